#include "kernel_rules.h"
#include "streams.h"

#include <ATen/Context.h>
#include <ATen/SDPBackend.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace emulated_cuda {
namespace {

using at::Tensor;

constexpr int64_t kMaxFlashHead = 256;
constexpr int64_t kMaxCudnnHead = 128;

bool is_half(const Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

// sdp_utils.cpp, minimum_gemm_alignment, of compute capability 8 and newer
int64_t gemm_alignment(const Tensor& query) {
  return is_half(query) ? 8 : 4;
}

bool have_equal_dtypes(const Tensor& query, const Tensor& key, const Tensor& value) {
  return query.scalar_type() == key.scalar_type() && query.scalar_type() == value.scalar_type();
}

bool is_contiguous_in_heads(const Tensor& query, const Tensor& key, const Tensor& value) {
  return query.stride(-1) == 1 && key.stride(-1) == 1 && value.stride(-1) == 1;
}

// flash_attn/kernel_traits.h: the kernels load vectors of 128 bits (Gmem_copy_struct), and nothing checks their places.
// The driver's error of a load that is not aligned ends the process's context.
void check_vector_loads(const Tensor& tensor) {
  constexpr int64_t vector = 8;
  bool is_aligned = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
  for (int64_t dim = 0; dim + 1 < tensor.dim(); ++dim) {
    is_aligned = is_aligned && (tensor.size(dim) == 1 || tensor.stride(dim) % vector == 0);
  }
  if (!is_aligned) {
    raise_cuda_error(716, "misaligned address");
  }
}

// sdp_utils_cpp.h, check_batch_size_and_num_heads_dense
bool fit_heads(const Tensor& query, const Tensor& key, const Tensor& value, bool has_groups) {
  return has_groups ? query.size(1) % key.size(1) == 0 && key.size(1) == value.size(1)
                    : query.size(1) == key.size(1) && query.size(1) == value.size(1);
}

// sdp_utils.cpp, use_flash_attention
bool can_use_flash(
    const Tensor& query, const Tensor& key, const Tensor& value, bool has_mask, bool is_causal, bool has_groups) {
  const int64_t width = query.size(-1);
  return !has_mask && is_half(query) && have_equal_dtypes(query, key, value) && fit_heads(query, key, value, has_groups) &&
      query.size(0) == key.size(0) && query.size(0) == value.size(0) && width == key.size(-1) && width == value.size(-1) &&
      width <= kMaxFlashHead && query.size(2) > 0 && key.size(2) > 0 && !(is_causal && query.size(2) != key.size(2)) &&
      is_contiguous_in_heads(query, key, value);
}

// sdp_utils.cpp, use_mem_efficient_attention
bool can_use_efficient(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask) {
  const int64_t alignment = gemm_alignment(query);
  const bool has_dtype = query.scalar_type() == at::kFloat || is_half(query);
  const bool has_heads = query.size(1) == key.size(1) && query.size(1) == value.size(1);
  const bool is_mask_contiguous = !mask || mask->stride(-1) == 1 || mask->size(-1) == 1;
  return has_dtype && have_equal_dtypes(query, key, value) && has_heads && query.size(0) == key.size(0) &&
      query.size(0) == value.size(0) && query.size(-1) == key.size(-1) && query.size(-1) % alignment == 0 &&
      value.size(-1) % alignment == 0 && query.size(2) > 0 && key.size(2) > 0 && is_mask_contiguous &&
      is_contiguous_in_heads(query, key, value);
}

// sdp_utils.cpp, can_use_cudnn_attention
bool can_use_cudnn(const Tensor& query, const Tensor& key, const Tensor& value) {
  return capability().major >= 8 && fit_heads(query, key, value, true) && is_half(query) && have_equal_dtypes(query, key, value) &&
      query.size(-1) % 8 == 0 && value.size(-1) % 8 == 0 && query.size(-1) <= kMaxCudnnHead &&
      value.size(-1) <= kMaxCudnnHead && query.size(2) > 1 && key.size(2) > 1;
}

}  // namespace

// flash_attn/flash_api.cpp, mha_fwd
void check_flash_forward(const Tensor& query, const Tensor& key, const Tensor& value, double dropout) {
  check_same_device("_flash_attention_forward", {{"query", query}, {"key", key}, {"value", value}});
  TORCH_CHECK(capability().major >= 8, "FlashAttention only supports Ampere GPUs or newer.");
  TORCH_CHECK(is_half(query), "FlashAttention only support fp16 and bf16 data type");
  TORCH_CHECK(key.scalar_type() == query.scalar_type(), "query and key must have the same dtype");
  TORCH_CHECK(value.scalar_type() == query.scalar_type(), "query and value must have the same dtype");
  TORCH_CHECK(is_contiguous_in_heads(query, key, value), "Input tensor must have contiguous last dimension");
  TORCH_CHECK(query.size(0) > 0, "batch size must be positive");
  TORCH_CHECK(query.size(-1) % 8 == 0, "query, key, value, and out_ must have a head_size that is a multiple of 8");
  TORCH_CHECK(query.size(-1) <= kMaxFlashHead, "FlashAttention forward only supports head dimension at most 256");
  TORCH_CHECK(query.size(2) % key.size(2) == 0, "Number of heads in key/value must divide number of heads in query");
  // CHECK_SHAPE of flash_api.cpp
  const auto check_shape = [&](const char* name, const Tensor& tensor) {
    const std::vector<int64_t> expected{query.size(0), key.size(1), key.size(2), query.size(-1)};
    TORCH_CHECK(tensor.sizes() == c10::IntArrayRef(expected), name, " must have shape (", c10::IntArrayRef(expected), ")");
  };
  check_shape("k", key);
  check_shape("v", value);
  TORCH_CHECK(dropout >= 0.0 && dropout < 1.0, "p_dropout must be at least 0 and less than 1");
  for (const Tensor* tensor : {&query, &key, &value}) {
    check_vector_loads(*tensor);
  }
}

// flash_attn/flash_api.cpp, mha_bwd
void check_flash_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out,
    const Tensor& logsumexp, double dropout) {
  check_same_device("_flash_attention_backward", {{"grad_out", grad}, {"query", query}, {"key", key}, {"value", value},
                                                  {"out", out}, {"logsumexp", logsumexp}});
  check_flash_forward(query, key, value, dropout);
  TORCH_CHECK(out.scalar_type() == query.scalar_type(), "query and out must have the same dtype");
  TORCH_CHECK(grad.scalar_type() == query.scalar_type(), "query and dout must have the same dtype");
  TORCH_CHECK(out.stride(-1) == 1, "out tensor must have contiguous last dimension");
  TORCH_CHECK(grad.stride(-1) == 1, "dout tensor must have contiguous last dimension");
  TORCH_CHECK(logsumexp.scalar_type() == at::kFloat && logsumexp.is_contiguous(),
              "softmax_lse must be a contiguous tensor of float32");
  // "FlashAttention backward for head dim > 192 requires A100/A800 or H100/H800": all emulated GPUs are of those or newer.
}

// attention.cu, _efficient_attention_forward; mem_eff_attention/kernel_forward.h, check_supported
void check_efficient(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& bias) {
  check_same_device("_scaled_dot_product_efficient_attention", {{"query", query}, {"key", key}, {"value", value},
                                                                {"attn_bias", bias.value_or(Tensor())}});
  TORCH_CHECK(have_equal_dtypes(query, key, value), "Expected query, key and value to have the same dtype, but got ",
              query.scalar_type(), ", ", key.scalar_type(), " and ", value.scalar_type());
  TORCH_CHECK(query.scalar_type() == at::kFloat || is_half(query),
              "Expected data type should be in kFloat, kHalf or kBFloat16 but got ", query.scalar_type());
  TORCH_CHECK(query.size(1) == key.size(1) && query.size(1) == value.size(1),
              "query.size(2) == key.size(2) INTERNAL ASSERT FAILED: memory efficient attention takes no groups of heads");
  // attention.cu, CHECK_NOSPARSE_LASTCONTIGUOUS_CUDA
  TORCH_CHECK(is_contiguous_in_heads(query, key, value), "query: last dimension must be contiguous");
  const int64_t alignment = gemm_alignment(query);
  const auto check_aligned = [&](const char* name, const Tensor& tensor) {
    const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    TORCH_CHECK(address % (static_cast<uintptr_t>(alignment) * tensor.element_size()) == 0, name, " is not correctly aligned");
    for (const int64_t dim : {0, 1, 2}) {
      TORCH_CHECK(tensor.size(dim) == 1 || tensor.stride(dim) % alignment == 0, name,
                  " is not correctly aligned (stride of dim ", dim, ")");
    }
  };
  TORCH_CHECK(query.size(-1) % alignment == 0 && value.size(-1) % alignment == 0,
              "Mem efficient attention requires last dimension of inputs to be divisible by ", alignment, ". Got Query.size(-1): ",
              query.size(-1), ", Key.size(-1): ", key.size(-1), ", Value.size(-1): ", value.size(-1), " instead.");
  check_aligned("query", query);
  check_aligned("key", key);
  check_aligned("value", value);
  if (bias) {
    TORCH_CHECK(bias->scalar_type() == query.scalar_type(), "invalid dtype for bias - should match query's dtype");
    TORCH_CHECK(bias->stride(-1) == 1 || bias->size(-1) == 1, "attn_bias: last dimension must be contiguous");
    // kernel_forward.h: rows of the bias are read as vectors. scaled_dot_product_attention pads a bias for it.
    TORCH_CHECK(bias->size(-2) == 1 || bias->stride(-2) % alignment == 0,
                "attn_bias is not correctly aligned (strideM). attn_bias.stride(2) = ", bias->stride(-2),
                ", and should be a multiple of ", alignment, ".");
  }
}

// sdp_utils.cpp, can_use_cudnn_attention
void check_cudnn(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& bias, double dropout) {
  check_same_device("_scaled_dot_product_cudnn_attention", {{"query", query}, {"key", key}, {"value", value},
                                                            {"attn_bias", bias.value_or(Tensor())}});
  TORCH_CHECK(can_use_cudnn(query, key, value), "cuDNN SDPA takes float16 and bfloat16, heads of at most 128 whose width is a "
              "multiple of 8, more than one query and key, and compute capability 8.0 or newer; got ", query.scalar_type(),
              ", ", query.sizes(), " and ", value.sizes());
  TORCH_CHECK(!bias || bias->scalar_type() == query.scalar_type(), "Expected attn_bias to have the dtype of query");
  TORCH_CHECK(dropout >= 0.0 && dropout < 1.0, "p_dropout must be at least 0 and less than 1");
}

// sdp_utils.cpp, select_sdp_backend. cuDNN comes first with CUDA 13 and cuDNN 9.15.1 only; this CUDA is 12.9.
at::SDPBackend choose_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double, bool is_causal,
    bool has_groups) {
  auto& context = at::globalContext();
  const bool is_batched = query.dim() == 4 && key.dim() == 4 && value.dim() == 4;
  const bool has_mask = mask.has_value() && mask->defined();
  for (const auto backend : context.sDPPriorityOrder()) {
    switch (backend) {
      case at::SDPBackend::flash_attention:
        if (context.userEnabledFlashSDP() && is_batched && can_use_flash(query, key, value, has_mask, is_causal, has_groups)) {
          return backend;
        }
        break;
      case at::SDPBackend::efficient_attention:
        if (context.userEnabledMemEfficientSDP() && is_batched && can_use_efficient(query, key, value, mask)) {
          return backend;
        }
        break;
      case at::SDPBackend::cudnn_attention:
        if (context.userEnabledCuDNNSDP() && is_batched && fit_heads(query, key, value, has_groups) &&
            (!context.deterministicAlgorithms() || context.deterministicAlgorithmsWarnOnly()) &&
            can_use_cudnn(query, key, value)) {
          return backend;
        }
        break;
      case at::SDPBackend::math:
        if (context.userEnabledMathSDP()) {
          return backend;
        }
        break;
      default:
        break;
    }
  }
  TORCH_CHECK(false, "No viable backend for scaled_dot_product_attention was found. This is likely due to turning off both "
              "the math kernel and the fused kernels.");
}

}  // namespace emulated_cuda
