#include "kernel_rules.h"

#include <ATen/ceil_div.h>
#include <c10/util/Exception.h>

#include <atomic>

namespace emulated_cuda {
namespace {

using at::Tensor;

std::atomic<Capability> this_capability{Capability{9, 0}};

bool is_fp8(const Tensor& tensor) {
  return c10::isFloat8Type(tensor.scalar_type());
}

bool is_half(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16;
}

int64_t blocks(int64_t size, int64_t block) {
  return at::ceil_div<int64_t>(size, block);
}

int64_t round_up(int64_t size, int64_t unit) {
  return blocks(size, unit) * unit;
}

// Numbers of scales of 1 x 32 blocks in cuBLAS's tiles of 128 x 4.
int64_t num_tiled_scales(int64_t outer, int64_t inner) {
  return round_up(outer, 128) * round_up(blocks(inner, 32), 4);
}

bool is_address_aligned(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}

// The text of TORCH_CUDABLAS_CHECK around the call in which cuBLAS turns a product down.
[[noreturn]] void raise_not_supported(const std::string& rule) {
  TORCH_CHECK(false, "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic( ltHandle, "
              "computeDesc.descriptor(), Adesc.descriptor(), Bdesc.descriptor(), Cdesc.descriptor(), Ddesc.descriptor(), "
              "preference.descriptor(), 1, &heuristicResult, &returnedResult)` (", rule, ")");
}

bool is_row_major(const Tensor& matrix) {
  return matrix.stride(1) == 1 && matrix.stride(0) >= std::max<int64_t>(1, matrix.size(1));
}

bool is_column_major(const Tensor& matrix) {
  return matrix.stride(0) == 1 && matrix.stride(1) >= std::max<int64_t>(1, matrix.size(0));
}

// ---- the kinds of scales of torch._scaled_mm: is_*_scaling of aten/src/ATen/native/cuda/ScaledBlas.cpp. The second
// operand and its scales are transposed, except scales in tiles.

bool has_layout(const Tensor& scale, int64_t dim, int64_t size, int64_t stride) {
  return scale.size(dim) == size && (size <= 1 || scale.stride(dim) == stride);
}

bool has_scaling(const Tensor& t, const Tensor& scale, ScalingType kind) {
  if (!is_fp8(t)) {
    return false;
  }
  if (kind == ScalingType::BlockWise1x32) {
    return scale.scalar_type() == at::kFloat8_e8m0fnu && scale.numel() == num_tiled_scales(t.size(0), t.size(1)) &&
        scale.is_contiguous();
  }
  if (scale.scalar_type() != at::kFloat) {
    return false;
  }
  if (kind == ScalingType::TensorWise) {
    return scale.numel() == 1;
  }
  if (scale.dim() != 2) {
    return false;
  }
  const int64_t rows = t.size(0), row_blocks = blocks(t.size(0), 128), column_blocks = blocks(t.size(1), 128);
  switch (kind) {
    case ScalingType::RowWise:
      return scale.size(0) == rows && scale.size(1) == 1 && scale.is_contiguous();
    case ScalingType::BlockWise1x128:
      return has_layout(scale, 0, rows, 1) && has_layout(scale, 1, column_blocks, rows);
    case ScalingType::BlockWise128x128:
      return has_layout(scale, 0, row_blocks, column_blocks) && has_layout(scale, 1, column_blocks, 1);
    default:
      return false;
  }
}

[[noreturn]] void raise_invalid_scaling(const ScaledCall& call) {
  const auto& [a, b, scale_a, scale_b, bias, scale_result, out_dtype, out] = call;
  TORCH_CHECK_VALUE(
      false, "Invalid scaling configuration.\n",
      "- For TensorWise scaling, a and b should be float8, scales should be float and singletons.\n",
      "- For RowWise scaling, a and b should be float8, scales should be float, scale_a should be (", a.size(0),
      ", 1) and scale_b should be (1, ", b.size(1), "), and both should be contiguous.\n",
      "- For BlockWise 1x128 scaling, a and b should be float8, scales should be float, scale_a should be (", a.size(0), ", ",
      blocks(a.size(1), 128), ") and scale_b should be (", blocks(b.size(0), 128), ", ", b.size(1),
      "), and both should be outer-dim-major.\n",
      "- For BlockWise 128x128 scaling, a and b should be float8, scales should be float, scale_a should be (",
      blocks(a.size(0), 128), ", ", blocks(a.size(1), 128), ") and scale_b should be (", blocks(b.size(0), 128), ", ",
      blocks(b.size(1), 128), "), and both should be near-inner-dim-major (with 16-byte aligned strides).\n",
      "- For Blockwise 1x32 scaling, a and b should be float8, scales should be float8_e8m0fnu, scale_a should have ",
      num_tiled_scales(a.size(0), a.size(1)), " elements and scale_b should have ", num_tiled_scales(b.size(1), b.size(0)),
      " elements, and both should be contiguous.\n",
      "Got a.dtype()=", a.scalar_type(), ", scale_a.dtype()=", scale_a.scalar_type(), ", scale_a.size()=", scale_a.sizes(),
      ", scale_a.stride()=", scale_a.strides(), ", b.dtype()=", b.scalar_type(), ", scale_b.dtype()=", scale_b.scalar_type(),
      ", scale_b.size()=", scale_b.sizes(), " and scale_b.stride()=", scale_b.strides());
}

// ScaledBlasDeviceUtils.cpp, scaled_mm_arch_allowed
void check_scaled_mm_device() {
  const auto [major, minor] = capability();
  TORCH_CHECK(major >= 9 || (major == 8 && minor == 9),
              "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9, or ROCm MI300+");
}

// ScaledBlas.cpp, _scaled_mm_out_cuda and _scaled_mm_cuda_v2_out: what both check of sizes, dtypes and the bias.
void check_scaled_operands(const ScaledCall& call) {
  const auto& [a, b, scale_a, scale_b, bias, scale_result, out_dtype, out] = call;
  TORCH_CHECK(!scale_result || (scale_result->numel() == 1 && scale_result->scalar_type() == at::kFloat),
              "scale_result must be a float scalar");
  TORCH_CHECK(!bias || bias->numel() == b.size(1), "Bias must be size ", b.size(1), " but got ", bias ? bias->numel() : 0);
  TORCH_CHECK(a.size(1) % 16 == 0, "Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: (",
              a.size(0), "x", a.size(1), ").");
  TORCH_CHECK(b.size(0) % 16 == 0 && b.size(1) % 16 == 0, "mat2 shape (", b.size(0), "x", b.size(1),
              ") must be divisible by 16");
  TORCH_CHECK(!out.defined() || out.scalar_type() == out_dtype, "out_dtype must match output matrix type");
  TORCH_CHECK(is_fp8(a), "Expected mat1 to be Float8 or Float4_x2 matrix got ", a.scalar_type());
  TORCH_CHECK(is_fp8(b), "Expected mat2 to be Float8 or Float4_x2 matrix got ", b.scalar_type());
  TORCH_CHECK_VALUE(a.scalar_type() != at::kFloat8_e5m2 || b.scalar_type() != at::kFloat8_e5m2,
                    "Multiplication of two Float8_e5m2 matrices is not supported");
  if (bias) {
    const auto dtype = bias->scalar_type();
    TORCH_CHECK(out_dtype != at::kFloat, "Bias is not supported when out_dtype is set to Float32");
    TORCH_CHECK(is_half(dtype), "Bias must be BFloat16 or Half, but got ", dtype);
    TORCH_CHECK(out_dtype != at::kBFloat16 || dtype == at::kBFloat16, "Bias must be BFloat16 to compute ", out_dtype,
                " output, but got ", dtype);
    TORCH_CHECK(out_dtype != at::kHalf || dtype == at::kHalf, "Bias must be Float16 to compute ", out_dtype,
                " output, but got ", dtype);
  }
}

// RowwiseScaledMM.cu, check_inputs: the CUTLASS kernel that torch takes for scaled rows on Blackwell.
void check_cutlass_rows(const ScaledCall& call) {
  const auto& [a, b, scale_a, scale_b, bias, scale_result, out_dtype, out] = call;
  TORCH_CHECK_VALUE(out_dtype == at::kBFloat16 || out_dtype == at::kHalf || out_dtype == at::kFloat,
                    "Only bf16, fp16, and fp32 high precision output types are supported for row-wise scaling.");
  TORCH_CHECK(b.scalar_type() == at::kFloat8_e4m3fn, "Expected b.dtype() == at::kFloat8_e4m3fn to be true, but got false.");
  TORCH_CHECK(is_row_major(a), "Expected a.stride(1) == 1 to be true, but got false.");
  TORCH_CHECK(is_column_major(b), "Expected b.stride(0) == 1 to be true, but got false.");
}

// What cuBLAS turns down, and torch's _scaled_gemm before it.
void check_cublas(const ScaledCall& call, Scaling scaling) {
  const auto& [a, b, scale_a, scale_b, bias, scale_result, out_dtype, out] = call;
  const auto [major, minor] = capability();
  // ScaledBlas.cpp, _scaled_gemm; cuBLAS, cublasLtMatmul(), "To use FP8 kernels": A transposed and B not, before 10.0.
  if (major == 9) {
    TORCH_CHECK(is_row_major(a) && is_column_major(b),
                "Only multiplication of row-major and column-major matrices is supported by cuBLASLt");
  } else if (major < 9 && !(is_row_major(a) && is_column_major(b))) {
    raise_not_supported("fp8 operands before compute capability 10.0 are row-major and column-major");
  }
  // cuBLAS, cublasLtMatmul(), "To use FP8 kernels": "All matrix pointers must be 16-byte aligned".
  for (const Tensor* matrix : {&a, &b}) {
    const int64_t leading = matrix->stride(0) == 1 ? matrix->stride(1) : matrix->stride(0);
    if (!is_address_aligned(*matrix) || leading % 16 != 0) {
      raise_not_supported("fp8 matrices and their leading dimensions are aligned to 16 bytes");
    }
  }
  // Not documented. Observed on an H200 with cuBLAS of CUDA 13.0, for scales of tensors, rows and 1x128 blocks.
  for (const Tensor* scale : {&scale_a, &scale_b}) {
    if (!is_address_aligned(*scale)) {
      raise_not_supported("the scales of fp8 matrices are aligned to 16 bytes");
    }
  }
  // cuBLAS, "Narrow Precision Data Types Usage": each scaling mode and the GPUs that have it.
  for (const auto kind : {scaling.a, scaling.b}) {
    const bool is_block = kind == ScalingType::BlockWise1x128 || kind == ScalingType::BlockWise128x128;
    if (is_block && major != 9) {
      raise_not_supported("1x128 and 128x128 scales are for compute capability 9.0");
    }
    if (kind == ScalingType::BlockWise1x32 && major < 10) {
      raise_not_supported("1x32 scales are for compute capability 10.0 and newer");
    }
    if (kind == ScalingType::RowWise && major != 9) {
      raise_not_supported("scales of rows are for compute capability 9.0");
    }
    if (kind != ScalingType::TensorWise && c10::isFloat8Type(out_dtype)) {
      raise_not_supported("an fp8 result has one scale");
    }
  }
  // cuBLAS: 128 x 128 scales on both sides are not a combination.
  if (scaling.a == ScalingType::BlockWise128x128 && scaling.b == ScalingType::BlockWise128x128) {
    raise_not_supported("128x128 scales go with 1x128 scales");
  }
}

void check_rows_or_cublas(const ScaledCall& call, Scaling scaling) {
  if (call.a.numel() == 0 || call.b.numel() == 0) {
    return;  // ScaledBlas.cpp: an empty product returns before it reaches a kernel
  }
  // ScaledBlas.cpp: cuBLAS has scales of rows from 12.9, on compute capability 9 only. Else it is a kernel of CUTLASS.
  if (scaling.a == ScalingType::RowWise && capability().major != 9) {
    check_cutlass_rows(call);
  } else {
    check_cublas(call, scaling);
  }
}

// GroupedMMUtils.h, check_valid_strides_and_return_transposed
bool is_transposed(const Tensor& matrix) {
  const int64_t last = matrix.dim() - 1;
  const int64_t alignment = 16 / static_cast<int64_t>(matrix.element_size());
  TORCH_CHECK(is_address_aligned(matrix), "expected data_ptr to be aligned to 16 bytes");
  const auto strides = matrix.strides(), sizes = matrix.sizes();
  if (strides[last - 1] == 1 && strides[last] >= std::max<int64_t>(1, sizes[last - 1])) {
    TORCH_CHECK(strides[last] % alignment == 0, "strides should be multiple of 16 bytes");
    return true;
  }
  TORCH_CHECK(strides[last] == 1 && strides[last - 1] >= std::max<int64_t>(1, sizes[last]), "Invalid strides/sizes, got ",
              strides, " for strides and ", sizes, " for sizes");
  TORCH_CHECK(strides[last - 1] % alignment == 0, "strides should be multiple of 16 bytes");
  return false;
}

void check_offsets(const Tensor& a, const Tensor& b, const std::optional<Tensor>& offs) {
  if (offs) {
    TORCH_CHECK(offs->dim() == 1, "offs has to be 1D");
    TORCH_CHECK(offs->scalar_type() == at::kInt, "Offsets have to be int32");
  }
  const bool a_is_2d = a.dim() == 2, b_is_2d = b.dim() == 2;
  if (a_is_2d != b_is_2d) {
    TORCH_CHECK(offs->size(0) == (a_is_2d ? b : a).size(0), "matrix batch sizes have to match");
  } else if (!a_is_2d) {
    TORCH_CHECK(a.size(0) == b.size(0), "batched dimension has to match");
  }
}

}  // namespace

Capability capability() {
  return this_capability.load();
}

void set_capability(int major, int minor) {
  this_capability = Capability{major, minor};
}

void check_same_device(const char* operation, const std::vector<NamedTensor>& tensors) {
  std::optional<c10::Device> device;
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.defined()) {
      continue;
    }
    if (!device) {
      device = tensor.device();
    }
    // torchgen's check_and_update_common_device
    TORCH_CHECK(tensor.device() == *device && tensor.is_cuda(), "Expected all tensors to be on the same device, but got ",
                name, " is on ", tensor.device(), ", different from other tensors on ", *device,
                " (when checking argument in method wrapper_CUDA_", operation, ")");
  }
}

// Blas.cpp, _mm_dtype_out_cuda
void check_mm_with_dtype(const Tensor& self, const Tensor& mat2, at::ScalarType out_dtype, const Tensor& out) {
  check_same_device("dtype_out_mm", {{"self", self}, {"mat2", mat2}, {"out", out}});
  TORCH_CHECK(self.dim() == 2, "self must be a matrix, got ", self.dim(), "-D tensor");
  TORCH_CHECK(mat2.dim() == 2, "mat2 must be a matrix, got ", mat2.dim(), "-D tensor");
  TORCH_CHECK(self.size(1) == mat2.size(0), "mat1 and mat2 shapes cannot be multiplied (", self.size(0), "x", self.size(1),
              " and ", mat2.size(0), "x", mat2.size(1), ")");
  TORCH_CHECK(self.scalar_type() == mat2.scalar_type(), "input dtypes must be the same");
  TORCH_CHECK(out_dtype == self.scalar_type() || (out_dtype == at::kFloat && is_half(self.scalar_type())),
              "out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs");
  TORCH_CHECK(out_dtype == out.scalar_type(), "out_dtype must be the same as the dtype of the provided out tensor");
  // Blas.cpp, addmm_out_cuda_impl: the result is `self` there.
  TORCH_CHECK(out.dim() == 2 && out.size(0) == self.size(0), "self_ dim 0 must match mat1 dim 0");
  TORCH_CHECK(out.size(1) == mat2.size(1), "self_ dim 1 must match mat2 dim 1");
}

// Blas.cpp, _addmm_dtype_out_cuda
void check_addmm_with_dtype(
    const Tensor& self, const Tensor& mat1, const Tensor& mat2, at::ScalarType out_dtype, const Tensor& out) {
  check_same_device("dtype_out_addmm", {{"self", self}, {"mat1", mat1}, {"mat2", mat2}, {"out", out}});
  TORCH_CHECK(mat1.dim() == 2, "mat1 must be a matrix, got ", mat1.dim(), "-D tensor");
  TORCH_CHECK(mat2.dim() == 2, "mat2 must be a matrix, got ", mat2.dim(), "-D tensor");
  TORCH_CHECK(mat1.size(1) == mat2.size(0), "mat1 and mat2 shapes cannot be multiplied (", mat1.size(0), "x", mat1.size(1),
              " and ", mat2.size(0), "x", mat2.size(1), ")");
  TORCH_CHECK(mat1.scalar_type() == mat2.scalar_type(), "mat1 and mat2 must have the same dtype, but got ",
              mat1.scalar_type(), " and ", mat2.scalar_type());
  TORCH_CHECK(out_dtype == mat1.scalar_type() || (out_dtype == at::kFloat && is_half(mat1.scalar_type())),
              "out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs");
  TORCH_CHECK(out_dtype == out.scalar_type(), "out_dtype must be the same as the dtype of the provided out tensor");
  TORCH_CHECK(out_dtype == self.scalar_type() || self.scalar_type() == mat1.scalar_type(),
              "self dtype must match either out_dtype or mat1 dtype");
}

Scaling check_scaled_mm(const ScaledCall& call) {
  const auto& [a, b, scale_a, scale_b, bias, scale_result, out_dtype, out] = call;
  check_same_device("_scaled_mm", {{"mat1", a}, {"mat2", b}, {"scale_a", scale_a}, {"scale_b", scale_b},
                                   {"bias", bias.value_or(Tensor())}, {"scale_result", scale_result.value_or(Tensor())}});
  check_scaled_mm_device();
  TORCH_CHECK(a.dim() == 2, "mat1 must be a matrix");
  TORCH_CHECK(b.dim() == 2, "mat2 must be a matrix");
  TORCH_CHECK(a.size(1) == b.size(0), "mat1 and mat2 shapes cannot be multiplied (", a.size(0), "x", a.size(1), " and ",
              b.size(0), "x", b.size(1), ")");
  // ScaledBlas.cpp, get_joint_scaling
  constexpr ScalingType whole = ScalingType::TensorWise, rows = ScalingType::RowWise, tiles = ScalingType::BlockWise1x32,
                        segments = ScalingType::BlockWise1x128, squares = ScalingType::BlockWise128x128;
  std::optional<Scaling> found;
  for (const auto& [left, right] : std::initializer_list<Scaling>{
           {whole, whole}, {rows, rows}, {squares, segments}, {segments, squares}, {segments, segments}, {tiles, tiles}}) {
    if (has_scaling(a, scale_a, left) &&
        has_scaling(b.t(), right == tiles || scale_b.dim() > 2 ? scale_b : scale_b.t(), right)) {
      found = Scaling{left, right};
      break;
    }
  }
  if (!found) {
    raise_invalid_scaling(call);
  }
  check_scaled_operands(call);
  check_rows_or_cublas(call, *found);
  return *found;
}

Scaling check_scaled_mm_v2(const ScaledCall& call, const Recipe& recipe) {
  const auto& [a, b, scale_a, scale_b, bias, scale_result, out_dtype, out] = call;
  check_same_device("_scaled_mm_v2", {{"mat_a", a}, {"mat_b", b}, {"scale_a", scale_a}, {"scale_b", scale_b},
                                      {"bias", bias.value_or(Tensor())}});
  check_scaled_mm_device();
  TORCH_CHECK(a.dim() == 2, "mat_a must be a matrix");
  TORCH_CHECK(b.dim() == 2, "mat_b must be a matrix");
  TORCH_CHECK(a.size(1) == b.size(0), "mat_a and mat_b shapes cannot be multiplied (", a.size(0), "x", a.size(1), " and ",
              b.size(0), "x", b.size(1), ")");
  check_scaled_operands(call);
  // ScaledBlasUtils.h, check_*_recipe: the kinds that go together, and the dtype of their scales.
  if (recipe.a.size() != 1 || recipe.b.size() != 1) {
    raise_invalid_scaling(call);
  }
  const Scaling scaling{recipe.a[0], recipe.b[0]};
  constexpr ScalingType segments = ScalingType::BlockWise1x128, squares = ScalingType::BlockWise128x128;
  const bool has_blocks = (scaling.a == segments || scaling.a == squares) && (scaling.b == segments || scaling.b == squares) &&
      !(scaling.a == squares && scaling.b == squares);
  const bool is_alike = scaling.a == scaling.b &&
      (scaling.a == ScalingType::TensorWise || scaling.a == ScalingType::RowWise || scaling.a == ScalingType::BlockWise1x32);
  const auto scale_dtype = scaling.a == ScalingType::BlockWise1x32 ? at::kFloat8_e8m0fnu : at::kFloat;
  if (!(has_blocks || is_alike) || scale_a.scalar_type() != scale_dtype || scale_b.scalar_type() != scale_dtype) {
    raise_invalid_scaling(call);
  }
  const int64_t m = a.size(0), k = a.size(1), n = b.size(1);
  // ScaledBlas.cpp, _check_deepseek_support
  TORCH_CHECK_NOT_IMPLEMENTED(!has_blocks || capability().major == 9,
                              "DeepSeek style (1x128, 128x128) scaling only supported in CUDA for SM90");
  // ScaledBlas.cpp, _scaled_block*: rows of 128 x 128 scales are filled up to a multiple of 4.
  const auto check_block = [&](const char* name, const Tensor& scale, ScalingType kind, int64_t outer) {
    const bool is_square = kind == squares;
    const int64_t first = is_square ? round_up(blocks(k, 128), 4) : outer;
    const int64_t second = is_square ? blocks(outer, 128) : blocks(k, 128);
    TORCH_CHECK_VALUE(scale.dim() == 2 && scale.size(0) == first && scale.size(1) == second, name, " must have shape ",
                      first, " x ", second, " Float elements, got ", scale.sizes());
    TORCH_CHECK_VALUE(scale.stride(0) == 1 && (scale.stride(1) == first || (second == 1 && scale.stride(1) == 1)), name,
                      " must have strides (1, ", first, "); got ", scale.strides());
  };
  if (has_blocks) {
    check_block("scale_a", scale_a, scaling.a, m);
    check_block("scale_b", scale_b, scaling.b, n);
  } else if (scaling.a == ScalingType::TensorWise) {
    // ScaledBlas.cpp, _scaled_tensorwise_tensorwise
    TORCH_CHECK_VALUE(scale_a.numel() == 1, "scale_a must have 1 Float element");
    TORCH_CHECK_VALUE(scale_b.numel() == 1, "scale_b must have 1 Float element");
  } else if (scaling.a == ScalingType::RowWise) {
    // ScaledBlas.cpp, _scaled_rowwise_rowwise
    TORCH_CHECK_VALUE(scale_a.dim() == 2 && scale_a.size(0) == m && scale_a.size(1) == 1, "scale_a must have shape [", m,
                      ", 1], got [", scale_a.sizes(), "]");
    TORCH_CHECK_VALUE(scale_b.dim() == 2 && scale_b.numel() == n, "scale_b must have ", n, " Float elements, got ",
                      scale_b.numel());
    TORCH_CHECK_VALUE(scale_b.stride(1) == 1, "expected scale_b.stride(1) to be 1, but got ", scale_b.stride(1));
  } else {
    // ScaledBlas.cpp, check_swizzle_lengths and _scaled_mxfp8_mxfp8
    const auto check_tiles = [&](const char* name, const Tensor& scale, int64_t outer, c10::IntArrayRef swizzle) {
      TORCH_CHECK_VALUE(swizzle.size() == 1, "swizzle_", name[6], " must have 1 value, got ", swizzle.size());
      TORCH_CHECK_VALUE(scale.numel() == num_tiled_scales(outer, k), "For Blockwise scaling ", name, " should have ",
                        num_tiled_scales(outer, k), " elements, got: ", scale.numel());
      TORCH_CHECK_VALUE(static_cast<at::blas::SwizzleType>(swizzle[0]) == at::blas::SwizzleType::SWIZZLE_32_4_4, name,
                        " must be swizzled to SWIZZLE_32_4_4 format");
      TORCH_CHECK_VALUE(scale.is_contiguous(), "For Blockwise scaling both scales should be contiguous");
    };
    check_tiles("scale_a", scale_a, m, recipe.swizzle_a);
    check_tiles("scale_b", scale_b, n, recipe.swizzle_b);
  }
  check_rows_or_cublas(call, scaling);
  return scaling;
}

// GroupedMMUtils.h, _grouped_mm_validate_inputs and _resolve_grouped_mm_out_dtype
void check_grouped_mm(
    const Tensor& a, const Tensor& b, const std::optional<Tensor>& offs, const std::optional<Tensor>& bias,
    std::optional<at::ScalarType> out_dtype) {
  check_same_device("_grouped_mm", {{"self", a}, {"mat2", b}, {"offs", offs.value_or(Tensor())}, {"bias", bias.value_or(Tensor())}});
  const auto check_dtype = [](const char* name, const Tensor& matrix) {
    TORCH_CHECK(matrix.scalar_type() == at::kFloat || is_half(matrix.scalar_type()), "Expected ", name,
                " to be Float32, BFloat16 or Float16 matrix, got ", matrix.scalar_type());
  };
  check_dtype("mat_a", a);
  check_dtype("mat_b", b);
  TORCH_CHECK(a.dim() == 2 || a.dim() == 3, "mat_a has to be 2 or 3d");
  TORCH_CHECK(b.dim() == 2 || b.dim() == 3, "mat_b has to be 2 or 3d");
  const bool has_2d = a.dim() == 2 || b.dim() == 2;
  TORCH_CHECK((a.dim() == 2 && b.dim() == 2) || a.size(-1) == b.size(-2),
              "contraction dimension of mat_a and mat_b must match");
  is_transposed(a);
  is_transposed(b);
  TORCH_CHECK(offs.has_value() == has_2d,
              "Have to provide offsets if there is a 2d matrix, or no offset if both matrices are 3d");
  TORCH_CHECK(!bias.has_value(), "Bias not supported yet");
  TORCH_CHECK(out_dtype.value_or(a.scalar_type()) == a.scalar_type(), "Grouped gemm output dtype must match `mat_a` dtype");
  check_offsets(a, b, offs);
}

// GroupedBlas.cpp, _scaled_grouped_mm_cuda: scales of rows
void check_scaled_grouped_mm(
    const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b, const std::optional<Tensor>& offs,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& scale_result, std::optional<at::ScalarType> out_dtype) {
  check_same_device("_scaled_grouped_mm", {{"self", a}, {"mat2", b}, {"scale_a", scale_a}, {"scale_b", scale_b},
                                           {"offs", offs.value_or(Tensor())}});
  const auto [major, minor] = capability();
  TORCH_CHECK_VALUE((major == 9 || major == 10) && minor == 0, "torch._scaled_grouped_mm is only supported on CUDA devices "
                    "with compute capability = [9.0, 10.0], or ROCm MI300+");
  TORCH_CHECK_VALUE(!is_transposed(a), "Expected mat1 to not be transposed");
  TORCH_CHECK_VALUE(is_transposed(b), "Expected mat2 to be transposed");
  TORCH_CHECK_VALUE(a.dim() == 2 || a.dim() == 3, "mat_a has to be 2 or 3d");
  TORCH_CHECK_VALUE(b.dim() == 2 || b.dim() == 3, "mat_b has to be 2 or 3d");
  const bool a_is_2d = a.dim() == 2, b_is_2d = b.dim() == 2;
  TORCH_CHECK_VALUE((a_is_2d && b_is_2d) || a.size(-1) == b.size(-2), "contraction dimension of mat_a and mat_b must match");
  TORCH_CHECK_VALUE(a.size(-1) % 16 == 0, "Expected trailing dimension of mat_a to be divisible by 16 but got mat1 shape: (",
                    a.sizes(), ").");
  TORCH_CHECK_VALUE(b.size(-2) % 16 == 0 && b.size(-1) % 16 == 0,
                    "Expected mat_b shape to be divisible by 16 but got mat_b shape: (", b.sizes(), ").");
  TORCH_CHECK_VALUE(!bias.has_value(), "Bias not supported yet");
  TORCH_CHECK_VALUE(!scale_result.has_value(), "Scale result not supported yet");
  TORCH_CHECK_VALUE(offs.has_value() == (a_is_2d || b_is_2d), "Have to provide offsets if there is a 2d matrix");
  check_offsets(a, b, offs);
  TORCH_CHECK_VALUE(scale_a.scalar_type() == at::kFloat && scale_b.scalar_type() == at::kFloat,
                    "For FP8 tensorwise and rowwise, both scales must both be float32 tensors. For MXFP8, scales must both "
                    "be float8_e8m0fnu tensors. (mxfp8 groups are not emulated)");
  // torch's own tests expect the kernel for row scales on SM90 only.
  TORCH_CHECK(major == 9, "torch has no grouped GEMM with row scales for this GPU");
  // GroupedBlas.cpp, _check_scales_fp8_rowwise
  const int64_t groups = a_is_2d && b_is_2d ? offs->size(0) : 1;
  const auto check_scale = [groups](const Tensor& matrix, const Tensor& scale, int64_t dim, int number) {
    if (matrix.dim() == 2) {
      TORCH_CHECK(scale.dim() == 1, "scale must be a 1D tensor, but got ", scale.dim(), "D, arg ", number);
      TORCH_CHECK(scale.is_contiguous(), "scale must be contiguous for arg ", number);
      TORCH_CHECK(scale.size(0) == matrix.size(dim) * groups, "scale must have the same length as mat for arg ", number);
      return;
    }
    TORCH_CHECK(scale.dim() == 2, "scale must be a 2D tensor, but got ", scale.dim(), "D for arg ", number);
    TORCH_CHECK(scale.stride(1) == 1, "scale must be contiguous in the last dimension for arg ", number);
    TORCH_CHECK(scale.size(0) == matrix.size(0), "scale must have the same batch dimension as mat for arg ", number);
    TORCH_CHECK(scale.size(1) == matrix.size(1 + dim), "scale must have the same first dimension as mat for arg ", number);
  };
  check_scale(a, scale_a, 0, 0);
  check_scale(b, scale_b, 1, 1);
  TORCH_CHECK_VALUE(out_dtype.value_or(at::kBFloat16) == at::kBFloat16,
                    "Only bf16 high precision output types are supported for grouped gemm");
  TORCH_CHECK_VALUE(a.scalar_type() == at::kFloat8_e4m3fn, "Expected mat_a to be Float8_e4m3 matrix got ", a.scalar_type());
  TORCH_CHECK_VALUE(b.scalar_type() == at::kFloat8_e4m3fn, "Expected mat_a to be Float8_e4m3 matrix got ", b.scalar_type());
}

}  // namespace emulated_cuda
