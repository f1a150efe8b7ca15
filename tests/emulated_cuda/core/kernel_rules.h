// Rules of CUDA's kernels that the CPU's kernels do not have: GPU types, dtypes, sizes, strides and alignment.
//
// Each function raises what torch's CUDA code raises. The comments in the sources name the function of torch, or the
// section of cuBLAS's documentation, that a rule is from.
#pragma once

#include <ATen/BlasBackend.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace emulated_cuda {

using at::blas::ScalingType;

struct Capability {
  int major;
  int minor;
};
// Of all devices. The bindings set it to that of the GPU type.
Capability capability();
void set_capability(int major, int minor);

struct NamedTensor {
  const char* name;
  at::Tensor tensor;
};
// The check of devices that torch generates for every operator; undefined tensors are passed over.
void check_same_device(const char* operation, const std::vector<NamedTensor>& tensors);

// ---- matmuls, in gemm_rules.cpp

void check_mm_with_dtype(const at::Tensor& self, const at::Tensor& mat2, at::ScalarType out_dtype, const at::Tensor& out);
void check_addmm_with_dtype(
    const at::Tensor& self, const at::Tensor& mat1, const at::Tensor& mat2, at::ScalarType out_dtype, const at::Tensor& out);

struct Scaling {
  ScalingType a;
  ScalingType b;
};
struct ScaledCall {
  at::Tensor a;
  at::Tensor b;
  at::Tensor scale_a;
  at::Tensor scale_b;
  std::optional<at::Tensor> bias;
  std::optional<at::Tensor> scale_result;
  at::ScalarType out_dtype;
  at::Tensor out;
};
// torch._scaled_mm finds the kind of scales by their shapes, in this order of preference.
Scaling check_scaled_mm(const ScaledCall& call);
struct Recipe {
  std::vector<ScalingType> a;
  std::vector<ScalingType> b;
  c10::IntArrayRef swizzle_a;
  c10::IntArrayRef swizzle_b;
};
// torch.nn.functional.scaled_mm names the kind of scales.
Scaling check_scaled_mm_v2(const ScaledCall& call, const Recipe& recipe);

void check_grouped_mm(
    const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& offs, const std::optional<at::Tensor>& bias,
    std::optional<at::ScalarType> out_dtype);
void check_scaled_grouped_mm(
    const at::Tensor& a, const at::Tensor& b, const at::Tensor& scale_a, const at::Tensor& scale_b,
    const std::optional<at::Tensor>& offs, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& scale_result, std::optional<at::ScalarType> out_dtype);

// ---- attention, in attention_rules.cpp

// Tensors of the flash kernels are [b, s, heads, d].
void check_flash_forward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, double dropout);
void check_flash_backward(
    const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& out,
    const at::Tensor& logsumexp, double dropout);
// Those of the other kernels are [b, heads, s, d].
void check_efficient(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& bias);
void check_cudnn(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& bias,
    double dropout);
// The kernel that scaled_dot_product_attention takes.
at::SDPBackend choose_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    double dropout, bool is_causal, bool has_groups);

}  // namespace emulated_cuda
