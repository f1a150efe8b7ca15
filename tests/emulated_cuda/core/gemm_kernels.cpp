// Matmuls for which only CUDA has kernels. The CPU computes their values in float32 and rounds them once.
#include "kernel_rules.h"
#include "operators.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/ceil_div.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

#include <limits>

namespace emulated_cuda {
namespace {

using at::Tensor;
using std::optional;

constexpr int64_t kTileRows = 128;
constexpr int64_t kTileColumns = 4;

// The sums of a product of 16-bit or 8-bit numbers are float32, those of wider numbers are of their own dtype.
at::ScalarType sum_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

// Round sums once. Results in fp8 are clamped, as cuBLAS's are.
void put(const Tensor& target, Tensor values) {
  if (target.scalar_type() == at::kFloat8_e4m3fn || target.scalar_type() == at::kFloat8_e5m2) {
    const double largest = target.scalar_type() == at::kFloat8_e4m3fn ? 448.0 : 57344.0;
    values = values.clamp(-largest, largest);
  }
  target.copy_(values);
}

Tensor& mm_dtype_out(const Tensor& self, const Tensor& mat2, at::ScalarType out_dtype, Tensor& out) {
  check_mm_with_dtype(self, mat2, out_dtype, out);
  const Tensor left = on_host_unowned(self), right = on_host_unowned(mat2), target = on_host_unowned(out);
  run_work("aten::mm", current_stream(self.device().index()),
           {{self, false, "self"}, {mat2, false, "mat2"}, {out, true, "out"}}, [left, right, target] {
             const auto dtype = sum_dtype(left.scalar_type());
             put(target, left.to(dtype).mm(right.to(dtype)));
           });
  return out;
}

Tensor mm_dtype(const Tensor& self, const Tensor& mat2, at::ScalarType out_dtype) {
  TORCH_CHECK(self.dim() == 2, "self must be a matrix, got ", self.dim(), "-D tensor");
  TORCH_CHECK(mat2.dim() == 2, "mat2 must be a matrix, got ", mat2.dim(), "-D tensor");
  Tensor out = at::empty({self.size(0), mat2.size(1)}, self.options().dtype(out_dtype));
  return mm_dtype_out(self, mat2, out_dtype, out);
}

Tensor& addmm_dtype_out(
    const Tensor& self, const Tensor& mat1, const Tensor& mat2, at::ScalarType out_dtype, const at::Scalar& beta,
    const at::Scalar& alpha, Tensor& out) {
  check_addmm_with_dtype(self, mat1, mat2, out_dtype, out);
  const std::vector<int64_t> sizes{mat1.size(0), mat2.size(1)};
  if (!out.is_same(self)) {
    at::native::resize_output(out, sizes);
  }
  const Tensor total = on_host_unowned(self).expand(sizes), target = on_host_unowned(out);
  const Tensor left = on_host_unowned(mat1), right = on_host_unowned(mat2);
  run_work("aten::addmm", current_stream(self.device().index()),
           {{self, false, "self"}, {mat1, false, "mat1"}, {mat2, false, "mat2"}, {out, true, "out"}},
           [total, left, right, target, beta, alpha] {
             const auto dtype = sum_dtype(left.scalar_type());
             Tensor sum = left.to(dtype).mm(right.to(dtype));
             if (alpha.toDouble() != 1.0) {
               sum.mul_(alpha);
             }
             if (beta.toDouble() != 0.0) {  // with 0 nothing of `self` counts, not even NaN
               sum.add_(total.to(dtype), beta);
             }
             put(target, sum);
           });
  return out;
}

Tensor addmm_dtype(
    const Tensor& self, const Tensor& mat1, const Tensor& mat2, at::ScalarType out_dtype, const at::Scalar& beta,
    const at::Scalar& alpha) {
  TORCH_CHECK(mat1.dim() == 2, "mat1 must be a matrix, got ", mat1.dim(), "-D tensor");
  TORCH_CHECK(mat2.dim() == 2, "mat2 must be a matrix, got ", mat2.dim(), "-D tensor");
  Tensor out = at::empty({mat1.size(0), mat2.size(1)}, self.options().dtype(out_dtype));
  return addmm_dtype_out(self, mat1, mat2, out_dtype, beta, alpha, out);
}

// ---- fp8

// One scale per element of a matrix [outer, inner] of one kind of blocks.
Tensor spread_scales(const Tensor& scale, ScalingType kind, int64_t outer, int64_t inner) {
  const auto repeat = [&](const Tensor& rows_and_blocks, int64_t block) {
    return rows_and_blocks.repeat_interleave(block, 1).narrow(1, 0, inner);
  };
  switch (kind) {
    case ScalingType::RowWise:
      return scale.expand({outer, inner});
    case ScalingType::BlockWise1x128:
      return repeat(scale, 128);
    case ScalingType::BlockWise128x128:
      return repeat(scale.narrow(1, 0, at::ceil_div<int64_t>(inner, 128)), 128).repeat_interleave(128, 0).narrow(0, 0, outer);
    case ScalingType::BlockWise1x32: {
      // cuBLAS, "1D Block Scaling Factors Layout": scale (r, c) of a tile lies at 16 (r % 32) + 4 (r / 32) + c.
      const int64_t tiles = at::ceil_div(outer, kTileRows);
      const int64_t column_tiles = at::ceil_div(at::ceil_div<int64_t>(inner, 32), kTileColumns);
      const Tensor plain = scale.reshape({tiles, column_tiles, 32, 4, kTileColumns}).permute({0, 3, 2, 1, 4});
      return repeat(plain.reshape({tiles * kTileRows, column_tiles * kTileColumns}).to(at::kFloat), 32).narrow(0, 0, outer);
    }
    default:
      TORCH_CHECK(false, "tensorwise scales are not spread");
  }
}

// The kind of scales of cuBLAS 128 x 128 blocks lies in rows of a multiple of 4 scales. torch._scaled_mm lets rows lie
// close together, so that the kernel reads other memory (pytorch/pytorch #166752).
bool reads_other_scales(const Tensor& scale, ScalingType kind) {
  return kind == ScalingType::BlockWise128x128 && scale.size(0) > 1 && scale.stride(0) % 4 != 0;
}

struct ScaledProduct {
  Tensor a, b;  // b: [inner, outer]
  Tensor scale_a, scale_b;  // of [outer, inner], also that of b
  Scaling scaling;
  Tensor bias, scale_result;

  Tensor compute() const {
    Tensor result;
    if (scaling.a == ScalingType::TensorWise || scaling.a == ScalingType::RowWise) {
      // A kernel scales the sums.
      result = a.to(at::kFloat).mm(b.to(at::kFloat));
      const bool has_rows = scaling.a == ScalingType::RowWise;
      result.mul_(has_rows ? scale_a : scale_a.reshape({})).mul_(has_rows ? scale_b.t() : scale_b.reshape({}));
    } else {
      const Tensor left = a.to(at::kFloat).mul_(spread_scales(scale_a, scaling.a, a.size(0), a.size(1)));
      const Tensor right = b.t().to(at::kFloat).mul_(spread_scales(scale_b, scaling.b, b.size(1), b.size(0)));
      result = left.mm(right.t());
      if (reads_other_scales(scale_a, scaling.a) || reads_other_scales(scale_b, scaling.b)) {
        result.fill_(std::numeric_limits<double>::quiet_NaN());
      }
    }
    if (bias.defined()) {
      result.add_(bias);
    }
    if (scale_result.defined()) {
      result.mul_(scale_result.reshape({}));
    }
    return result;
  }
};

void run_scaled_mm(const char* name, const ScaledCall& call, Scaling scaling, const Tensor& scale_b) {
  std::vector<Operand> operands{
      {call.a, false, "self"}, {call.b, false, "mat2"}, {call.scale_a, false, "scale_a"}, {call.scale_b, false, "scale_b"}};
  ScaledProduct product{on_host_unowned(call.a), on_host_unowned(call.b), on_host_unowned(call.scale_a),
                        on_host_unowned(scale_b), scaling, {}, {}};
  if (call.bias) {
    operands.push_back({*call.bias, false, "bias"});
    product.bias = on_host_unowned(*call.bias);
  }
  if (call.scale_result && c10::isFloat8Type(call.out_dtype)) {
    operands.push_back({*call.scale_result, false, "scale_result"});
    product.scale_result = on_host_unowned(*call.scale_result);
  }
  operands.push_back({call.out, true, "out"});
  run_work(name, current_stream(call.a.device().index()), operands,
           [product, target = on_host_unowned(call.out)] { put(target, product.compute()); });
}

Tensor& scaled_mm_out(
    const Tensor& self, const Tensor& mat2, const Tensor& scale_a, const Tensor& scale_b, const optional<Tensor>& bias,
    const optional<Tensor>& scale_result, optional<at::ScalarType> out_dtype, bool, Tensor& out) {
  ScaledCall call{self, mat2, scale_a, scale_b, bias, scale_result, out_dtype.value_or(out.scalar_type()), out};
  const Scaling scaling = check_scaled_mm(call);
  at::native::resize_output(out, {self.size(0), mat2.size(1)});
  const bool is_in_tiles = scaling.b == ScalingType::BlockWise1x32;
  run_scaled_mm("aten::_scaled_mm", call, scaling, is_in_tiles || scaling.b == ScalingType::TensorWise ? scale_b : scale_b.t());
  return out;
}

Tensor scaled_mm(
    const Tensor& self, const Tensor& mat2, const Tensor& scale_a, const Tensor& scale_b, const optional<Tensor>& bias,
    const optional<Tensor>& scale_result, optional<at::ScalarType> out_dtype, bool use_fast_accum) {
  Tensor out = at::empty({0}, self.options().dtype(out_dtype.value_or(self.scalar_type())));
  return scaled_mm_out(self, mat2, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum, out);
}

std::vector<ScalingType> kinds_of(c10::IntArrayRef numbers) {
  std::vector<ScalingType> kinds;
  for (const int64_t number : numbers) {
    kinds.push_back(static_cast<ScalingType>(number));
  }
  return kinds;
}

Tensor& scaled_mm_v2_out(
    const Tensor& self, const Tensor& mat2, at::TensorList scale_a, c10::IntArrayRef recipe_a, c10::IntArrayRef swizzle_a,
    at::TensorList scale_b, c10::IntArrayRef recipe_b, c10::IntArrayRef swizzle_b, const optional<Tensor>& bias,
    optional<at::ScalarType> out_dtype, c10::IntArrayRef, bool, Tensor& out) {
  TORCH_CHECK_VALUE(!scale_a.empty() && !scale_b.empty(), "scale_a and scale_b must each have at least one tensor");
  ScaledCall call{self, mat2, scale_a[0], scale_b[0], bias, std::nullopt, out_dtype.value_or(out.scalar_type()), out};
  const Scaling scaling = check_scaled_mm_v2(call, {kinds_of(recipe_a), kinds_of(recipe_b), swizzle_a, swizzle_b});
  at::native::resize_output(out, {self.size(0), mat2.size(1)});
  // Named scales of 128 x 128 blocks are transposed, those of rows of the second operand too.
  if (scaling.a == ScalingType::BlockWise128x128) {
    call.scale_a = call.scale_a.t();
  }
  const bool is_transposed = scaling.b == ScalingType::BlockWise128x128 || scaling.b == ScalingType::RowWise;
  run_scaled_mm("aten::_scaled_mm_v2", call, scaling, is_transposed ? call.scale_b.t() : call.scale_b);
  return out;
}

Tensor scaled_mm_v2(
    const Tensor& self, const Tensor& mat2, at::TensorList scale_a, c10::IntArrayRef recipe_a, c10::IntArrayRef swizzle_a,
    at::TensorList scale_b, c10::IntArrayRef recipe_b, c10::IntArrayRef swizzle_b, const optional<Tensor>& bias,
    optional<at::ScalarType> out_dtype, c10::IntArrayRef contraction_dim, bool use_fast_accum) {
  Tensor out = at::empty({0}, self.options().dtype(out_dtype.value_or(self.scalar_type())));
  return scaled_mm_v2_out(
      self, mat2, scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b, bias, out_dtype, contraction_dim,
      use_fast_accum, out);
}

// ---- groups

// GroupedMMUtils.h, create_grouped_gemm_output_tensor: rows are filled up to 16 bytes for TMA.
Tensor empty_groups(const Tensor& a, const Tensor& b, const optional<Tensor>& offs, at::ScalarType dtype) {
  std::vector<int64_t> sizes;
  if (a.dim() == 2) {
    sizes = b.dim() == 2 ? std::vector<int64_t>{offs->size(0), a.size(0), b.size(1)}
                         : std::vector<int64_t>{a.size(0), b.size(2)};
  } else {
    sizes = b.dim() == 2 ? std::vector<int64_t>{a.size(1), b.size(1)} : std::vector<int64_t>{a.size(0), a.size(1), b.size(2)};
  }
  const auto unit = 16 / static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t row = at::ceil_div(sizes.back(), unit) * unit;
  const std::vector<int64_t> strides = sizes.size() == 2 ? std::vector<int64_t>{row, 1} : std::vector<int64_t>{sizes[1] * row, row, 1};
  return at::empty_strided(sizes, strides, a.options().dtype(dtype));
}

// Multiply the groups' parts. The fast kernels write nothing for a group without rows (pytorch/pytorch #152668 and
// #172439), and nothing past the last group.
template <typename Multiply>
void for_groups(const Tensor& a, const Tensor& b, const Tensor& offs, const Tensor& out, const Multiply& multiply) {
  if (!offs.defined()) {
    for (int64_t group = 0; group < a.size(0); ++group) {
      multiply(group, a[group], b[group], out[group]);
    }
    return;
  }
  const auto* ends = offs.const_data_ptr<int>();
  int64_t start = 0;
  for (int64_t group = 0; group < offs.size(0); ++group) {
    const int64_t end = ends[group * offs.stride(0)];
    // A kernel would read and write other memory.
    const int64_t limit = a.dim() == 2 ? a.size(b.dim() == 2 ? 1 : 0) : b.size(1);
    TORCH_CHECK(start <= end && end <= limit, "emulated CUDA: the ends of the groups of a grouped matmul do not ascend, or pass "
                "the operands: group ", group, " is from ", start, " to ", end, " of ", limit);
    if (end > start) {
      if (a.dim() == 2 && b.dim() == 2) {
        multiply(group, a.slice(1, start, end), b.slice(0, start, end), out[group]);
      } else if (a.dim() == 2) {
        multiply(group, a.slice(0, start, end), b[group], out.slice(0, start, end));
      } else {
        multiply(group, a[group], b.slice(1, start, end), out.slice(1, start, end));
      }
    }
    start = end;
  }
}

bool has_grouped_kernel(const Tensor& a, const Tensor& b) {
  // GroupedBlas.cpp, _grouped_mm_cuda: _scaled_mm_allowed_device(sm90_only, sm100_only)
  const auto [major, minor] = capability();
  return (major == 9 || major == 10) && minor == 0 && a.scalar_type() == at::kBFloat16 && b.scalar_type() == at::kBFloat16;
}

Tensor grouped_mm(
    const Tensor& self, const Tensor& mat2, const optional<Tensor>& offs, const optional<Tensor>& bias,
    optional<at::ScalarType> out_dtype) {
  check_grouped_mm(self, mat2, offs, bias, out_dtype);
  Tensor out = empty_groups(self, mat2, offs, self.scalar_type());
  Stream& stream = current_stream(self.device().index());
  const bool is_fast = has_grouped_kernel(self, mat2);
  if (!is_fast && offs) {
    // GroupedMMUtils.h, _grouped_mm_fallback copies the groups' ends to the host, and multiplies empty groups too.
    forbid_in_capture("cudaStreamSynchronize, by the fallback of aten::_grouped_mm", &stream);
  }
  std::vector<Operand> operands{{self, false, "self"}, {mat2, false, "mat2"}, {out, true, "its result"}};
  if (offs) {
    operands.push_back({*offs, false, "offs"});
  }
  run_work("aten::_grouped_mm", stream, operands,
           [a = on_host_unowned(self), b = on_host_unowned(mat2), target = on_host_unowned(out),
            ends = offs ? on_host_unowned(*offs) : Tensor(), is_fast] {
             if (!is_fast && target.dim() == 3) {
               target.zero_();  // the fallback multiplies groups without rows too
             }
             for_groups(a, b, ends, target, [](int64_t, const Tensor& left, const Tensor& right, const Tensor& result) {
               const auto dtype = sum_dtype(left.scalar_type());
               result.copy_(left.to(dtype).mm(right.to(dtype)));
             });
           });
  if (!is_fast && offs) {
    synchronize_stream(stream);
  }
  return out;
}

Tensor scaled_grouped_mm(
    const Tensor& self, const Tensor& mat2, const Tensor& scale_a, const Tensor& scale_b, const optional<Tensor>& offs,
    const optional<Tensor>& bias, const optional<Tensor>& scale_result, optional<at::ScalarType> out_dtype, bool) {
  check_scaled_grouped_mm(self, mat2, scale_a, scale_b, offs, bias, scale_result, out_dtype);
  Tensor out = empty_groups(self, mat2, offs, at::kBFloat16);
  std::vector<Operand> operands{{self, false, "self"}, {mat2, false, "mat2"}, {scale_a, false, "scale_a"},
                                {scale_b, false, "scale_b"}, {out, true, "its result"}};
  if (offs) {
    operands.push_back({*offs, false, "offs"});
  }
  run_work("aten::_scaled_grouped_mm", current_stream(self.device().index()), operands,
           [a = on_host_unowned(self), b = on_host_unowned(mat2), of_a = on_host_unowned(scale_a),
            of_b = on_host_unowned(scale_b), target = on_host_unowned(out), ends = offs ? on_host_unowned(*offs) : Tensor()] {
             const bool is_2d_2d = a.dim() == 2 && b.dim() == 2;
             const auto scale_of_group = [&](const Tensor& scale, const Tensor& matrix, int64_t group, int64_t size,
                                             const Tensor& part, const Tensor& whole, int64_t dim) {
               if (matrix.dim() == 3) {
                 return scale[group];
               }
               if (is_2d_2d) {
                 return scale.narrow(0, group * size, size);
               }
               return scale.narrow(0, (part.storage_offset() - whole.storage_offset()) / whole.stride(dim), size);
             };
             for_groups(a, b, ends, target, [&](int64_t group, const Tensor& left, const Tensor& right, const Tensor& result) {
               Tensor sums = left.to(at::kFloat).mm(right.to(at::kFloat));
               sums.mul_(scale_of_group(of_a, a, group, left.size(0), left, a, 0).unsqueeze(1));
               sums.mul_(scale_of_group(of_b, b, group, right.size(1), right, b, 1).unsqueeze(0));
               result.copy_(sums);
             });
           });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("mm.dtype", &mm_dtype);
  m.impl("mm.dtype_out", &mm_dtype_out);
  m.impl("addmm.dtype", &addmm_dtype);
  m.impl("addmm.dtype_out", &addmm_dtype_out);
  m.impl("_scaled_mm", &scaled_mm);
  m.impl("_scaled_mm.out", &scaled_mm_out);
  m.impl("_scaled_mm_v2", &scaled_mm_v2);
  m.impl("_scaled_mm_v2.out", &scaled_mm_v2_out);
  m.impl("_grouped_mm", &grouped_mm);
  m.impl("_scaled_grouped_mm", &scaled_grouped_mm);
}

}  // namespace emulated_cuda
