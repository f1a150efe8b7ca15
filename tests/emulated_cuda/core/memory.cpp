#include "memory.h"

#include "addresses.h"
#include "graph_memory.h"
#include "graphs.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <list>
#include <set>
#include <unordered_map>

namespace emulated_cuda {
namespace {

// The sizes of torch's allocator (c10/cuda/CUDACachingAllocator.cpp).
constexpr size_t kAlignment = 512;
constexpr size_t kSmallSize = size_t{1} << 20;
constexpr size_t kSmallSegment = size_t{2} << 20;
constexpr size_t kMiddleSize = size_t{10} << 20;
constexpr size_t kMiddleSegment = size_t{20} << 20;
constexpr size_t kRounding = size_t{2} << 20;
constexpr int kPoison = 0xFF;

size_t round_up(size_t size, size_t unit) {
  return (size + unit - 1) / unit * unit;
}

struct Segment;

struct Block {
  Segment* segment;
  uintptr_t address;
  size_t size;
  size_t requested = 0;
  bool is_allocated = false;
  bool is_poisoned = false;
  uint64_t number = 0;
  Block* previous = nullptr;
  Block* next = nullptr;
  // Streams on which the tensor was used besides its own, by record_stream.
  std::set<Stream*> users;
  // Freed while another stream may still have used it: an error if it is reused before its own stream has waited.
  bool is_suspect = false;
};

struct Segment {
  c10::DeviceIndex device;
  Stream* stream;
  PoolId pool;
  uintptr_t address;
  size_t size;
  bool is_small;
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    return std::pair(a->size, a->address) < std::pair(b->size, b->address);
  }
};
// Memory is reused on the stream it was allocated on.
using PoolKey = std::tuple<PoolId, bool, Stream*>;

struct Device {
  std::map<PoolKey, std::set<Block*, BySize>> free;
  std::list<Block*> suspects;
  MemoryCounts counts;
  int64_t num_out_of_memory = 0;
};

struct Deferred {
  Block* block;
  Clock until;
};

struct Memory {
  std::array<Device, kMaxDevices> devices;
  std::map<uintptr_t, Segment> segments;
  std::map<uintptr_t, Block*> blocks;
  std::vector<Deferred> deferred;
  std::map<PoolId, int> pool_users;
  uint64_t next_pool = 1;
  uint64_t num_allocations = 0;
};

thread_local std::map<c10::DeviceIndex, PoolId> chosen_pools;

bool is_of_graph(PoolId pool) {
  return pool != kDefaultPool && pool.first == 0;
}

Memory& memory() {
  static auto* instance = new Memory;
  return *instance;
}

void count(const Block& block, const std::string& name, int64_t amount) {
  auto& counts = memory().devices.at(block.segment->device).counts[name];
  counts["all"].add(amount);
  counts[block.segment->is_small ? "small_pool" : "large_pool"].add(amount);
}

void count_bytes(const Block& block, const std::string& name, const std::string& bytes, int64_t sign) {
  count(block, name, sign);
  count(block, bytes, sign * static_cast<int64_t>(block.size));
}

PoolKey key_of(const Segment& segment) {
  return {segment.pool, segment.is_small, segment.stream};
}

std::set<Block*, BySize>& free_blocks(const Segment& segment) {
  return memory().devices.at(segment.device).free[key_of(segment)];
}

Block* new_block(Segment* segment, uintptr_t address, size_t size) {
  auto* block = new Block{segment, address, size};
  memory().blocks[address] = block;
  return block;
}

void release_segment(Block* block) {
  Segment segment = *block->segment;
  forget(segment.address, segment.size);
  count_bytes(*block, "segment", "reserved_bytes", -1);
  memory().blocks.erase(block->address);
  delete block;
  munmap(reinterpret_cast<void*>(segment.address), segment.size);
  memory().segments.erase(segment.address);
}

// Return cached segments of which nothing is in use.
void release_cached(c10::DeviceIndex index) {
  auto& device = memory().devices.at(index);
  for (auto& [key, blocks] : device.free) {
    const PoolId pool = std::get<0>(key);
    if (pool != kDefaultPool && memory().pool_users[pool] > 0) {
      continue;
    }
    for (auto each = blocks.begin(); each != blocks.end();) {
      Block* block = *each;
      if (block->size == block->segment->size && !block->is_suspect) {
        each = blocks.erase(each);
        release_segment(block);
      } else {
        ++each;
      }
    }
  }
}

int64_t reserved(c10::DeviceIndex device) {
  return memory().devices.at(device).counts["reserved_bytes"]["all"].current;
}

Block* new_segment(Stream& stream, PoolId pool, bool is_small, size_t size) {
  size_t bytes = is_small ? kSmallSegment : size < kMiddleSize ? kMiddleSegment : round_up(size, kRounding);
  if (reserved(stream.device) + static_cast<int64_t>(bytes) > total_memory()) {
    release_cached(stream.device);
  }
  const auto free = total_memory() - reserved(stream.device);
  void* place = MAP_FAILED;
  if (static_cast<int64_t>(bytes) <= free) {
    place = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  if (place == MAP_FAILED) {
    ++memory().devices.at(stream.device).num_out_of_memory;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", size, " bytes. GPU ",
                     int(stream.device), " has a total capacity of ", total_memory(), " bytes of which ", free,
                     " bytes are free.");
  }
  const auto address = reinterpret_cast<uintptr_t>(place);
  Segment* segment = &memory().segments.emplace(address, Segment{stream.device, &stream, pool, address, bytes, is_small}).first->second;
  Block* block = new_block(segment, address, bytes);
  count_bytes(*block, "segment", "reserved_bytes", 1);
  return block;
}

// The end of a block that is larger than needed becomes a free block.
void split(Block* block, size_t size) {
  const size_t rest = block->size - size;
  if (block->segment->is_small ? rest < kAlignment : rest <= kSmallSize) {
    return;
  }
  Block* other = new_block(block->segment, block->address + size, rest);
  other->is_poisoned = block->is_poisoned;
  other->previous = block;
  other->next = block->next;
  if (block->next != nullptr) {
    block->next->previous = other;
  }
  block->next = other;
  block->size = size;
  free_blocks(*block->segment).insert(other);
}

// Join a free block with the free one after it.
void join_next(Block* block) {
  Block* other = block->next;
  free_blocks(*block->segment).erase(other);
  block->is_poisoned = block->is_poisoned && other->is_poisoned;
  block->size += other->size;
  block->next = other->next;
  if (block->next != nullptr) {
    block->next->previous = block;
  }
  memory().blocks.erase(other->address);
  delete other;
}

bool is_free(const Block* block) {
  return block != nullptr && !block->is_allocated && !block->is_suspect &&
      free_blocks(*block->segment).count(const_cast<Block*>(block)) > 0;
}

void make_free(Block* block) {
  count_bytes(*block, "active", "active_bytes", -1);
  if (is_free(block->next)) {
    join_next(block);
  }
  if (is_free(block->previous)) {
    Block* previous = block->previous;
    free_blocks(*block->segment).erase(previous);
    free_blocks(*block->segment).insert(block);
    join_next(previous);
    block = previous;
  }
  free_blocks(*block->segment).insert(block);
}

struct Fault {
  size_t size;
  Unordered access;
  Lane owner;
};

// The bytes that the allocator has around a suspect block once it is free: it joins neighbors that are free.
size_t joined_size(const Block* block) {
  const auto can_join = [](const Block* each) { return each != nullptr && (each->is_suspect || is_free(each)); };
  size_t size = block->size;
  for (const Block* each = block->previous; can_join(each); each = each->previous) {
    size += each->size;
  }
  for (const Block* each = block->next; can_join(each); each = each->next) {
    size += each->size;
  }
  return size;
}

// A block that the allocator could give out now although another stream may still use it.
std::optional<Fault> unsafe_reuse(Stream& stream, PoolId pool, bool is_small, size_t size) {
  auto& suspects = memory().devices.at(stream.device).suspects;
  for (auto each = suspects.begin(); each != suspects.end();) {
    Block* block = *each;
    const auto access = unordered_access(block->address, block->size, *block->segment->stream, [](Lane) { return false; });
    if (!access) {
      each = suspects.erase(each);
      block->is_suspect = false;
      make_free(block);
      continue;
    }
    if (key_of(*block->segment) == PoolKey{pool, is_small, &stream} && joined_size(block) >= size) {
      return Fault{block->size, *access, stream.lane};
    }
    ++each;
  }
  return std::nullopt;
}

// torch takes the address of memory for the context with which it is released (Allocator::raw_allocate).
Block* allocated_block(const void* address) {
  return memory().blocks.at(reinterpret_cast<uintptr_t>(address));
}

void free_block(void* context) {
  StateGuard guard(state_lock());
  Block* block = allocated_block(context);
  Stream& owner = *block->segment->stream;
  block->is_allocated = false;
  count_bytes(*block, "allocation", "allocated_bytes", -1);
  count(*block, "requested_bytes", -static_cast<int64_t>(block->requested));
  std::memset(reinterpret_cast<void*>(block->address), kPoison, block->size);
  block->is_poisoned = true;
  if (!block->users.empty()) {
    Clock until;
    for (Stream* user : std::exchange(block->users, {})) {
      until.join(user->clock);
    }
    if (!host_clock().covers(until)) {
      memory().deferred.push_back({block, std::move(until)});
      return;
    }
  }
  if (unordered_access(block->address, block->size, owner, [](Lane) { return false; })) {
    block->is_suspect = true;
    memory().devices.at(block->segment->device).suspects.push_back(block);
    return;
  }
  make_free(block);
}

Block* allocate_block(size_t requested, Stream& stream, const SitePtr& site) {
  std::optional<Fault> fault;
  {
    StateGuard guard(state_lock());
    Launch launch = begin_launch(stream, site);
    release_deferred();
    const PoolId pool = allocation_pool(stream);
    const size_t size = round_up(std::max(requested, size_t{1}), kAlignment);
    const bool is_small = size <= kSmallSize;
    fault = unsafe_reuse(stream, pool, is_small, size);
    if (!fault) {
      auto& free = memory().devices.at(stream.device).free[{pool, is_small, &stream}];
      Block wanted{nullptr, 0, size};
      const auto best = free.lower_bound(&wanted);
      Block* block;
      if (best != free.end()) {
        block = *best;
        free.erase(best);
      } else {
        block = new_segment(stream, pool, is_small, size);
      }
      split(block, size);
      if (!block->is_poisoned) {
        std::memset(reinterpret_cast<void*>(block->address), kPoison, block->size);
      }
      block->is_allocated = true;
      block->is_poisoned = false;
      block->requested = requested;
      block->number = ++memory().num_allocations;
      count_bytes(*block, "allocation", "allocated_bytes", 1);
      count_bytes(*block, "active", "active_bytes", 1);
      count(*block, "requested_bytes", static_cast<int64_t>(requested));
      note_allocation(block->address, block->size, launch);
      return block;
    }
  }
  report("memory reused too early: " + describe(site, stream.lane) + " may be given a block of " +
         std::to_string(fault->size) + " bytes that was freed while " + describe(fault->access.site, fault->access.lane) +
         " may still use it; call record_stream, or wait for that stream before the tensor is released\n"
         "  the allocation, innermost frame first:\n" + stack_of(site) +
         "  the use on the other stream, innermost frame first:\n" + stack_of(fault->access.site));
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    const auto device = current_device();
    return emulated_cuda::allocate(size, current_stream(device), c10::Device(c10::DeviceType::CUDA, device));
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_block;
  }
  void copy_data(void* target, const void* source, size_t size) const override {
    std::memcpy(target, source, size);
  }
};

thread_local const Launch* kernel_launch = nullptr;

// Kernels ask for memory as such (oneDNN's scratchpads), and it may be of either allocator.
void free_of_kernel(void* address) {
  {
    StateGuard guard(state_lock());
    if (memory().blocks.count(reinterpret_cast<uintptr_t>(address)) > 0) {
      free_block(address);
      return;
    }
  }
  c10::GetDefaultCPUAllocator()->raw_deallocate(address);
}

// torch's CPU allocator, except that kernels of the device get memory of the device.
struct KernelAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (kernel_launch == nullptr) {
      return c10::GetDefaultCPUAllocator()->allocate(size);
    }
    return emulated_cuda::allocate(size, *kernel_launch->stream, c10::Device(c10::DeviceType::CPU), kernel_launch->site);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_of_kernel;
  }
  void copy_data(void* target, const void* source, size_t size) const override {
    std::memcpy(target, source, size);
  }
};

// ---- pinned memory

struct PinnedBlock {
  uintptr_t address;
  size_t size;
};

struct Pinned {
  std::map<uintptr_t, PinnedBlock*> blocks;
  std::multimap<size_t, PinnedBlock*> free;
  MemoryCount bytes;
};

Pinned& pinned() {
  static auto* instance = new Pinned;
  return *instance;
}

void free_pinned(void* context) {
  StateGuard guard(state_lock());
  auto* block = static_cast<PinnedBlock*>(context);
  std::memset(reinterpret_cast<void*>(block->address), kPoison, block->size);
  pinned().free.emplace(block->size, block);
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t requested) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (requested == 0) {
      return {nullptr, cpu};
    }
    forbid_allocation_in_capture("cudaHostAlloc");
    StateGuard guard(state_lock());
    size_t size = 1;
    while (size < requested) {
      size *= 2;
    }
    PinnedBlock* block;
    const auto found = pinned().free.find(size);
    if (found != pinned().free.end()) {
      block = found->second;
      pinned().free.erase(found);
    } else {
      void* place = std::aligned_alloc(kAlignment, round_up(size, kAlignment));
      TORCH_CHECK(place != nullptr, "CUDA error: out of memory (cudaHostAlloc of ", size, " bytes)");
      block = new PinnedBlock{reinterpret_cast<uintptr_t>(place), size};
      pinned().blocks[block->address] = block;
      pinned().bytes.add(static_cast<int64_t>(size));
      std::memset(place, kPoison, size);
    }
    return {reinterpret_cast<void*>(block->address), block, &free_pinned, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* target, const void* source, size_t size) const override {
    std::memcpy(target, source, size);
  }
  bool record_event(void*, void*, c10::Stream) override {
    return true;  // copies hold their pinned tensors until the host has waited for them
  }
  void empty_cache() override {
    StateGuard guard(state_lock());
    for (const auto& [size, block] : pinned().free) {
      forget(block->address, block->size);
      pinned().blocks.erase(block->address);
      pinned().bytes.add(-static_cast<int64_t>(size));
      std::free(reinterpret_cast<void*>(block->address));
      delete block;
    }
    pinned().free.clear();
  }
  at::HostStats get_stats() override {
    return {};
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {
    StateGuard guard(state_lock());
    pinned().bytes.peak = pinned().bytes.current;
  }
};

struct Transfer {
  Lane lane;
  uint64_t time;
  SitePtr site;
  // Of the pinned tensor; it is held, so that its memory is not reused.
  at::Tensor pinned;
  at::Tensor values;  // that a copy from the device delivers
  uint64_t hash = 0;  // of what a copy to the device reads
  bool is_to_host = false;
};

std::list<Transfer>& transfers() {
  static auto* instance = new std::list<Transfer>;
  return *instance;
}

uint64_t hash_of(const at::Tensor& tensor) {
  const at::Tensor contiguous = tensor.contiguous();
  const auto* bytes = static_cast<const unsigned char*>(contiguous.const_data_ptr());
  uint64_t hash = 1469598103934665603ULL;
  size_t i = 0;
  for (; i + 8 <= contiguous.nbytes(); i += 8) {
    uint64_t word;
    std::memcpy(&word, bytes + i, 8);
    hash = (hash ^ word) * 1099511628211ULL;
    hash ^= hash >> 29;
  }
  for (; i < contiguous.nbytes(); ++i) {
    hash = (hash ^ bytes[i]) * 1099511628211ULL;
  }
  return hash;
}

void finish(const Transfer& transfer) {
  if (transfer.is_to_host) {
    transfer.pinned.copy_(transfer.values);
  } else if (hash_of(transfer.pinned) != transfer.hash) {
    report("pinned memory changed too early: the host wrote to the source of " + describe(transfer.site, transfer.lane) +
           " before it had waited for that copy\n  the copy, innermost frame first:\n" + stack_of(transfer.site));
  }
}

}  // namespace

void MemoryCount::add(int64_t amount) {
  current += amount;
  peak = std::max(peak, current);
  (amount > 0 ? allocated : freed) += std::abs(amount);
}

c10::Allocator& device_allocator() {
  static auto* instance = new DeviceAllocator;
  return *instance;
}

c10::DataPtr allocate(size_t size, Stream& stream, c10::Device device, SitePtr site) {
  if (size == 0) {
    return {nullptr, device};
  }
  forbid_foreign_allocation(stream);
  Block* block = allocate_block(size, stream, site ? std::move(site) : make_site("an allocation"));
  return {reinterpret_cast<void*>(block->address), reinterpret_cast<void*>(block->address), &free_block, device};
}

bool is_device_memory(const c10::DataPtr& data) {
  return data.get_deleter() == &free_block;
}

void record_stream(const c10::DataPtr& data, Stream& stream) {
  if (!is_device_memory(data)) {
    return;
  }
  StateGuard guard(state_lock());
  Block* block = allocated_block(data.get_context());
  if (block->segment->stream != &stream) {
    block->users.insert(&stream);
  }
}

KernelMemory::KernelMemory(const Launch& launch) : outer_(std::exchange(kernel_launch, &launch)) {}

KernelMemory::~KernelMemory() {
  kernel_launch = outer_;
}

void install_kernel_allocator() {
  static auto* allocator = new KernelAllocator;
  c10::SetCPUAllocator(allocator, 255);
}

void release_deferred() {
  StateGuard guard(state_lock());
  auto& deferred = memory().deferred;
  for (size_t i = 0; i < deferred.size();) {
    if (host_clock().covers(deferred[i].until)) {
      Block* block = deferred[i].block;
      deferred.erase(deferred.begin() + static_cast<std::ptrdiff_t>(i));
      make_free(block);
    } else {
      ++i;
    }
  }
}

MemoryCounts memory_counts(c10::DeviceIndex device) {
  StateGuard guard(state_lock());
  return memory().devices.at(device).counts;
}

void reset_peaks(c10::DeviceIndex device) {
  StateGuard guard(state_lock());
  for (auto& [name, kinds] : memory().devices.at(device).counts) {
    for (auto& [kind, each] : kinds) {
      each.peak = each.current;
    }
  }
}

void empty_cache() {
  forbid_allocation_in_capture("cudaFree");
  StateGuard guard(state_lock());
  for (c10::DeviceIndex device = 0; device < device_count(); ++device) {
    release_cached(device);
  }
}

int64_t total_memory() {
  static const int64_t total = [] {
    const char* text = std::getenv("EMULATED_CUDA_MEMORY");
    return text == nullptr ? int64_t{80} << 30 : std::strtoll(text, nullptr, 10);
  }();
  return total;
}

int64_t num_out_of_memory(c10::DeviceIndex device) {
  StateGuard guard(state_lock());
  return memory().devices.at(device).num_out_of_memory;
}

int64_t free_memory(c10::DeviceIndex device) {
  StateGuard guard(state_lock());
  return total_memory() - reserved(device);
}

std::vector<BlockSummary> list_blocks() {
  StateGuard guard(state_lock());
  std::vector<BlockSummary> found;
  for (const auto& [address, block] : memory().blocks) {
    found.push_back({block->segment->device, block->segment->address, address, block->size, block->requested,
                     block->is_allocated, block->segment->stream->id, block->segment->pool});
  }
  return found;
}

std::optional<c10::DeviceIndex> device_of_block(const void* address) {
  StateGuard guard(state_lock());
  const auto place = reinterpret_cast<uintptr_t>(address);
  const auto after = memory().blocks.upper_bound(place);
  if (after == memory().blocks.begin()) {
    return std::nullopt;
  }
  const Block* block = std::prev(after)->second;
  return place < block->address + block->size ? std::optional(block->segment->device) : std::nullopt;
}

uint64_t lasting_allocation(uintptr_t address) {
  StateGuard guard(state_lock());
  const auto after = memory().blocks.upper_bound(address);
  if (after == memory().blocks.begin()) {
    return 0;
  }
  const Block* block = std::prev(after)->second;
  const bool is_used = address < block->address + block->size && block->is_allocated;
  return is_used && !is_of_graph(block->segment->pool) ? block->number : 0;
}

PoolId new_pool() {
  StateGuard guard(state_lock());
  return {0, memory().next_pool++};
}

void retain_pool(PoolId pool) {
  StateGuard guard(state_lock());
  ++memory().pool_users[pool];
}

void release_pool(PoolId pool) {
  StateGuard guard(state_lock());
  --memory().pool_users[pool];
}

PoolId new_user_pool() {
  StateGuard guard(state_lock());
  return {1, memory().next_pool++};
}

PoolId chosen_pool(c10::DeviceIndex device) {
  const auto chosen = chosen_pools.find(device);
  return chosen == chosen_pools.end() ? kDefaultPool : chosen->second;
}

void choose_pool(c10::DeviceIndex device, PoolId pool) {
  chosen_pools[device] = pool;
}

uint64_t allocation_count() {
  StateGuard guard(state_lock());
  return memory().num_allocations;
}

void poison_allocated_since(PoolId pool, uint64_t count) {
  StateGuard guard(state_lock());
  for (const auto& [address, block] : memory().blocks) {
    if (block->is_allocated && block->segment->pool == pool && block->number > count) {
      std::memset(reinterpret_cast<void*>(address), kPoison, block->size);
    }
  }
}

void install_pinned_allocator() {
  static auto* allocator = new PinnedAllocator;
  at::setHostAllocator(c10::DeviceType::CUDA, allocator);
}

bool is_pinned(const void* address) {
  StateGuard guard(state_lock());
  const auto place = reinterpret_cast<uintptr_t>(address);
  const auto after = pinned().blocks.upper_bound(place);
  if (after == pinned().blocks.begin()) {
    return false;
  }
  const auto* block = std::prev(after)->second;
  return place < block->address + block->size;
}

MemoryCount pinned_bytes() {
  StateGuard guard(state_lock());
  return pinned().bytes;
}

void Arrivals::deliver() {
  for (const auto& action : actions) {
    action();
  }
}

Arrivals take_arrivals() {
  Arrivals arrivals;
  for (auto each = transfers().begin(); each != transfers().end();) {
    if (host_clock().covers(each->lane, each->time)) {
      arrivals.actions.emplace_back([transfer = *each] { finish(transfer); });
      each = transfers().erase(each);
    } else {
      ++each;
    }
  }
  return arrivals;
}

void copy_late(const at::Tensor& target, const at::Tensor& source, const Launch& launch) {
  Transfer transfer{launch.stream->lane, launch.time, launch.site, target};
  transfer.values = at::empty(target.sizes(), target.options().pinned_memory(false));
  transfer.values.copy_(source);
  transfer.is_to_host = true;
  const at::Tensor poison = at::empty(target.sizes(), target.options().pinned_memory(false));
  std::memset(poison.mutable_data_ptr(), kPoison, poison.nbytes());
  target.copy_(poison);
  StateGuard guard(state_lock());
  transfers().push_back(std::move(transfer));
}

void watch_source(const at::Tensor& source, const Launch& launch) {
  Transfer transfer{launch.stream->lane, launch.time, launch.site, source};
  transfer.hash = hash_of(source);
  StateGuard guard(state_lock());
  transfers().push_back(std::move(transfer));
}

void deliver_for_device(const at::Tensor& source) {
  const auto start = reinterpret_cast<uintptr_t>(source.storage().data());
  const auto end = start + source.storage().nbytes();
  Arrivals arrivals;
  {
    StateGuard guard(state_lock());
    for (auto each = transfers().begin(); each != transfers().end();) {
      const auto address = reinterpret_cast<uintptr_t>(each->pinned.const_data_ptr());
      if (each->is_to_host && address >= start && address < end) {
        arrivals.actions.emplace_back([transfer = *each] { finish(transfer); });
        each = transfers().erase(each);
      } else {
        ++each;
      }
    }
  }
  arrivals.deliver();
}

}  // namespace emulated_cuda
