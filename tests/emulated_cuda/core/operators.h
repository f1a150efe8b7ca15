// Operators of CUDA tensors, computed by the CPU's kernels on the same memory.
#pragma once

#include "accesses.h"
#include "graphs.h"

#include <ATen/core/Tensor.h>

#include <functional>

namespace emulated_cuda {

// A CPU tensor over the memory of a CUDA tensor, which it keeps alive; another tensor as it is.
at::Tensor on_host(const at::Tensor& tensor);
// The same, without keeping the memory alive: for what a graph replays.
at::Tensor on_host_unowned(const at::Tensor& tensor);

struct Operand {
  at::Tensor tensor;
  bool is_written;
  std::string name;
};

// Check the accesses of a piece of work that computes on memory that exists, run it, and record it if a capture is
// under way. `run` uses nothing but what it owns: a graph calls it again.
void run_work(
    const std::string& operation, Stream& stream, const std::vector<Operand>& operands, const std::function<void()>& run);

// Set the bytes of a CUDA storage, in place.
void resize_storage(c10::StorageImpl& storage, size_t num_bytes);

}  // namespace emulated_cuda
