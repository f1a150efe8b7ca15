// Device memory under the rules of CUDA's caching allocator, and pinned host memory.
#pragma once

#include "accesses.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <map>

namespace emulated_cuda {

using PoolId = std::pair<uint64_t, uint64_t>;
constexpr PoolId kDefaultPool{0, 0};

// The allocator of torch tensors: memory of the current stream of the current device.
c10::Allocator& device_allocator();
// Memory of a stream; freed by the deleter of the result, whose device says what kind of tensor it is for.
c10::DataPtr allocate(size_t size, Stream& stream, c10::Device device, SitePtr site = nullptr);
// Whether the memory behind a pointer came from `allocate`.
bool is_device_memory(const c10::DataPtr& data);
// torch's Tensor.record_stream: the memory is not reused before what the stream has been given until its release.
void record_stream(const c10::DataPtr& data, Stream& stream);

// Inside, the memory that CPU kernels ask for is memory of a device, allocated on the stream of a launch.
class KernelMemory {
 public:
  explicit KernelMemory(const Launch& launch);
  ~KernelMemory();
  KernelMemory(const KernelMemory&) = delete;

 private:
  const Launch* outer_;
};
void install_kernel_allocator();

// Memory that waited for streams and for the host is free again, as far as the host has waited.
void release_deferred();

struct MemoryCount {
  int64_t current = 0;
  int64_t peak = 0;
  int64_t allocated = 0;
  int64_t freed = 0;
  void add(int64_t amount);
};
// The counts of torch.cuda.memory_stats by name, such as "allocated_bytes", each for "all", "small_pool", "large_pool".
using MemoryCounts = std::map<std::string, std::map<std::string, MemoryCount>>;
MemoryCounts memory_counts(c10::DeviceIndex device);
void reset_peaks(c10::DeviceIndex device);
void empty_cache();
int64_t total_memory();
int64_t num_out_of_memory(c10::DeviceIndex device);
// Bytes that are not reserved.
int64_t free_memory(c10::DeviceIndex device);

struct BlockSummary {
  c10::DeviceIndex device;
  uintptr_t segment;
  uintptr_t address;
  size_t size;
  size_t requested;
  bool is_allocated;
  int64_t stream;
  PoolId pool;
};
std::vector<BlockSummary> list_blocks();

// Graphs: memory comes from a pool of their own, whose segments last as long as a graph does.
PoolId new_pool();
void retain_pool(PoolId pool);
void release_pool(PoolId pool);
// torch.cuda.MemPool: this thread's allocations on a device come from a chosen pool, or from the default one.
PoolId new_user_pool();
PoolId chosen_pool(c10::DeviceIndex device);
void choose_pool(c10::DeviceIndex device, PoolId pool);
// Overwrite the tensors of a pool that were allocated since a moment; their values do not exist before a replay.
uint64_t allocation_count();
void poison_allocated_since(PoolId pool, uint64_t count);

// Pinned memory.
void install_pinned_allocator();
bool is_pinned(const void* address);
MemoryCount pinned_bytes();

// Copies from the device whose results the host may not see yet, and copies to it whose sources must not change.
class Arrivals {
 public:
  void deliver();
  std::vector<std::function<void()>> actions;
};
// The work that the host has waited for; to be delivered without the state lock.
Arrivals take_arrivals();
// `source` has the values; `target`, pinned, holds NaN until the host has waited for the launch.
void copy_late(const at::Tensor& target, const at::Tensor& source, const Launch& launch);
// Report if the values of a pinned source have changed when the host has waited for the launch.
void watch_source(const at::Tensor& source, const Launch& launch);
// Deliver what has been copied to these bytes: work on the device reads them.
void deliver_for_device(const at::Tensor& source);

}  // namespace emulated_cuda
