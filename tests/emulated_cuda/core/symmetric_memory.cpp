// torch's symmetric memory between the ranks of a node: memory that all of them map, signals and barriers.
//
// A signal carries the clock of the stream that puts it. Each segment has a history of accesses, in the memory that the
// ranks share: an access must come after the conflicting ones of other ranks, by signals, barriers or collectives.
#include "addresses.h"
#include "memory.h"
#include "operators.h"
#include "peers.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <random>
#include <sstream>
#include <thread>

namespace emulated_cuda {
namespace {

namespace symm = c10d::symmetric_memory;

constexpr int kMaxRanks = 16;
constexpr int kMaxChannels = 16;
constexpr size_t kMaxEntries = 4096;
constexpr size_t kTextBytes = 200;
constexpr size_t kPageBytes = 4096;
constexpr int kPoison = 0xFF;
constexpr auto kDefaultTimeout = std::chrono::minutes(10);
constexpr auto kPoll = std::chrono::microseconds(200);

std::atomic<bool> is_in_use{false};
thread_local Stream* this_stream = nullptr;

uint64_t this_process() {
  static const uint64_t number = [] {
    std::random_device random;
    return (uint64_t{random()} << 32) ^ random() ^ static_cast<uint64_t>(getpid());
  }();
  return number;
}

// A signal of one rank to another on one channel.
struct Signal {
  std::atomic<uint32_t> is_set;
  SharedClock clock;
};

struct Entry {
  uint64_t process;
  uint32_t lane;
  uint32_t is_write;
  uint64_t time;
  uint64_t start;
  uint64_t end;
  char text[kTextBytes];
};

struct Header {
  pthread_mutex_t mutex;
  uint64_t num_entries;
  Entry entries[kMaxEntries];
  Signal signals[kMaxChannels][kMaxRanks];
};

size_t round_up(size_t size) {
  return (size + kPageBytes - 1) / kPageBytes * kPageBytes;
}

// The memory of one rank, mapped into this process.
class Segment {
 public:
  Segment(const std::string& path, size_t size, bool is_own) : path_(path), size_(size), pad_size_(symm::get_signal_pad_size()) {
    const int file = open(path.c_str(), is_own ? O_RDWR | O_CREAT | O_EXCL : O_RDWR, 0600);
    TORCH_CHECK(file >= 0, "cannot open symmetric memory ", path, ": ", std::strerror(errno));
    if (is_own) {
      TORCH_CHECK(ftruncate(file, static_cast<off_t>(num_bytes())) == 0, "cannot size ", path, ": ", std::strerror(errno));
    }
    void* place = mmap(nullptr, num_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    close(file);
    TORCH_CHECK(place != MAP_FAILED, "cannot map ", path, ": ", std::strerror(errno));
    memory_ = static_cast<char*>(place);
    if (is_own) {
      pthread_mutexattr_t attributes;
      pthread_mutexattr_init(&attributes);
      pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
      pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
      pthread_mutex_init(&header().mutex, &attributes);
      std::memset(data(), kPoison, size_);
    }
  }
  ~Segment() {
    StateGuard guard(state_lock());
    forget(reinterpret_cast<uintptr_t>(data()), size_);
    munmap(memory_, num_bytes());
  }
  Segment(const Segment&) = delete;

  Header& header() const {
    return *reinterpret_cast<Header*>(memory_);
  }
  void* signal_pad() const {
    return memory_ + round_up(sizeof(Header));
  }
  void* data() const {
    return memory_ + round_up(sizeof(Header)) + round_up(pad_size_);
  }
  size_t size() const {
    return size_;
  }
  const std::string& path() const {
    return path_;
  }

 private:
  size_t num_bytes() const {
    return round_up(sizeof(Header)) + round_up(pad_size_) + round_up(size_);
  }

  std::string path_;
  size_t size_;
  size_t pad_size_;
  char* memory_;
};
using SegmentPtr = std::shared_ptr<Segment>;

// All segments that this process maps, by the end of their data.
std::map<uintptr_t, std::weak_ptr<Segment>>& segments() {
  static auto* instance = new std::map<uintptr_t, std::weak_ptr<Segment>>;
  return *instance;
}

void add_segment(const SegmentPtr& segment) {
  StateGuard guard(state_lock());
  segments()[reinterpret_cast<uintptr_t>(segment->data()) + segment->size()] = segment;
  is_in_use = true;
}

SegmentPtr segment_at(uintptr_t address) {
  StateGuard guard(state_lock());
  for (auto each = segments().upper_bound(address); each != segments().end();) {
    const SegmentPtr found = each->second.lock();
    if (found == nullptr) {
      each = segments().erase(each);
      continue;
    }
    return reinterpret_cast<uintptr_t>(found->data()) <= address ? found : nullptr;
  }
  return nullptr;
}

class SegmentLock {
 public:
  explicit SegmentLock(Header& header) : mutex_(header.mutex) {
    if (pthread_mutex_lock(&mutex_) == EOWNERDEAD) {
      pthread_mutex_consistent(&mutex_);
    }
  }
  ~SegmentLock() {
    pthread_mutex_unlock(&mutex_);
  }

 private:
  pthread_mutex_t& mutex_;
};

class Handle final : public symm::SymmetricMemory {
 public:
  Handle(std::vector<SegmentPtr> all, int rank, size_t offset, c10::DeviceIndex device)
      : segments_(std::move(all)), rank_(rank), offset_(offset), device_(c10::DeviceType::CUDA, device) {}

  std::vector<void*> get_buffer_ptrs() override {
    std::vector<void*> pointers;
    for (const auto& segment : segments_) {
      pointers.push_back(static_cast<char*>(segment->data()) + offset_);
    }
    return pointers;
  }
  std::vector<void*> get_signal_pad_ptrs() override {
    std::vector<void*> pointers;
    for (const auto& segment : segments_) {
      pointers.push_back(segment->signal_pad());
    }
    return pointers;
  }
  void** get_buffer_ptrs_dev() override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "kernels that take the addresses of symmetric memory are not emulated");
  }
  void** get_signal_pad_ptrs_dev() override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "kernels that take the addresses of symmetric memory are not emulated");
  }
  size_t get_buffer_size() override {
    return segments_.at(size_t(rank_))->size();
  }
  size_t get_offset() override {
    return offset_;
  }
  bool has_multicast_support() override {
    return false;
  }
  void* get_multicast_ptr() override {
    return nullptr;
  }
  int get_rank() override {
    return rank_;
  }
  int get_world_size() override {
    return static_cast<int>(segments_.size());
  }
  c10::Device get_device() override {
    return device_;
  }
  bool world_within_direct_access() override {
    return true;
  }

  // CUDASymmetricMemory.cu, barrier_kernel: a signal to every other rank, then one of each.
  void barrier(int channel, size_t timeout_ms) override {
    check_channel(channel);
    run("symm_mem::barrier", [self = own(), channel, timeout_ms](Stream& stream) {
      for (int peer = 0; peer < self->get_world_size(); ++peer) {
        if (peer != self->rank_) {
          self->put(stream, peer, channel, timeout_ms);
        }
      }
      for (int peer = 0; peer < self->get_world_size(); ++peer) {
        if (peer != self->rank_) {
          self->wait(stream, peer, channel, timeout_ms);
        }
      }
    });
  }
  void put_signal(int peer, int channel, size_t timeout_ms) override {
    check_channel(channel);
    run("symm_mem::put_signal", [self = own(), peer, channel, timeout_ms](Stream& stream) {
      self->put(stream, peer, channel, timeout_ms);
    });
  }
  void wait_signal(int peer, int channel, size_t timeout_ms) override {
    check_channel(channel);
    run("symm_mem::wait_signal", [self = own(), peer, channel, timeout_ms](Stream& stream) {
      self->wait(stream, peer, channel, timeout_ms);
    });
  }

 private:
  c10::intrusive_ptr<Handle> own() {
    return c10::intrusive_ptr<Handle>::unsafe_reclaim_from_nonowning(this);
  }

  void check_channel(int channel) const {
    // CUDASymmetricMemory.cu, check_channel
    TORCH_CHECK(channel >= 0, "channel for barrier(), put_signal() and wait_signal() must be greater than 0 (got ", channel, ")");
    TORCH_CHECK(channel < kMaxChannels, "The maximum supported channel for barrier(), put_signal() and wait_signal() is ",
                kMaxChannels - 1, " (got ", channel, ")");
  }

  void run(const char* name, const std::function<void(Stream&)>& work) {
    run_work(name, current_stream(device_.index()), {}, [work] { work(*running_stream()); });
  }

  void put(const Stream& stream, int peer, int channel, size_t timeout_ms) {
    Signal& signal = segments_.at(size_t(peer))->header().signals[channel][rank_];
    wait_until(signal, 0, timeout_ms, "until its last signal to rank " + std::to_string(peer) + " is taken", channel);
    write_clock(signal.clock, stream);
    signal.is_set.store(1);
  }

  void wait(Stream& stream, int peer, int channel, size_t timeout_ms) {
    Signal& signal = segments_.at(size_t(rank_))->header().signals[channel][peer];
    wait_until(signal, 1, timeout_ms, "for a signal of rank " + std::to_string(peer), channel);
    join_clock(stream, signal.clock);
    signal.is_set.store(0);
  }

  void wait_until(const Signal& signal, uint32_t state, size_t timeout_ms, const std::string& what, int channel) const {
    const auto start = std::chrono::steady_clock::now();
    const auto timeout = timeout_ms == 0 ? std::chrono::milliseconds(kDefaultTimeout) : std::chrono::milliseconds(timeout_ms);
    while (signal.is_set.load() != state) {
      TORCH_CHECK(std::chrono::steady_clock::now() - start < timeout, "symmetric memory timeout: rank ", rank_, " of ",
                  segments_.size(), " has waited for ", timeout.count(), " ms ", what, " on channel ", channel);
      std::this_thread::sleep_for(kPoll);
    }
  }

  std::vector<SegmentPtr> segments_;
  int rank_;
  size_t offset_;
  c10::Device device_;
};

class Allocator final : public symm::SymmetricMemoryAllocator {
 public:
  void* alloc(size_t size, int device, const std::optional<std::string>& group) override {
    forbid_allocation_in_capture("cuMemCreate, for symmetric memory");
    const char* folder = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : P_tmpdir;
    const std::string path = std::string(folder) + "/emulated-symmetric-" + std::to_string(this_process()) + "-" + std::to_string(next_++);
    const auto segment = std::make_shared<Segment>(path, size, true);
    add_segment(segment);
    const auto index = static_cast<c10::DeviceIndex>(device);
    StateGuard guard(state_lock());
    note_allocation(reinterpret_cast<uintptr_t>(segment->data()), size, begin_launch(current_stream(index), SitePtr()));
    allocations_[segment->data()] = {segment, index, group, nullptr};
    return segment->data();
  }

  void free(void* pointer) override {
    StateGuard guard(state_lock());
    const auto found = allocations_.find(pointer);
    if (found != allocations_.end()) {
      unlink(found->second.segment->path().c_str());
      allocations_.erase(found);
    }
  }

  size_t get_alloc_size(void* pointer) override {
    return allocation(pointer).segment->size();
  }

  c10::intrusive_ptr<symm::SymmetricMemory> rendezvous(void* pointer, const std::optional<std::string>& group) override {
    Allocation& mine = allocation(pointer);
    if (mine.handle != nullptr) {
      return mine.handle;
    }
    TORCH_CHECK(group || mine.group, "rendezvous of symmetric memory needs the name of a group");
    const std::string name = group ? *group : *mine.group;
    const auto process_group = c10d::resolve_process_group(name);
    const int this_rank = process_group->getRank(), num_ranks = process_group->getSize();
    const auto store = c10::make_intrusive<c10d::PrefixStore>("symmetric_memory-" + name, process_group->getStore());
    TORCH_CHECK(num_ranks <= kMaxRanks, "emulated symmetric memory has at most ", kMaxRanks, " ranks");
    const std::string key = "emulated symmetric memory " + std::to_string(rendezvous_[name]++) + " ";
    const std::string text = mine.segment->path() + "\n" + std::to_string(mine.segment->size());
    store->set(key + std::to_string(this_rank), std::vector<uint8_t>(text.begin(), text.end()));
    std::vector<SegmentPtr> all;
    for (int rank = 0; rank < num_ranks; ++rank) {
      if (rank == this_rank) {
        all.push_back(mine.segment);
        continue;
      }
      const auto bytes = store->get(key + std::to_string(rank));
      std::istringstream theirs(std::string(bytes.begin(), bytes.end()));
      std::string path;
      size_t size = 0;
      std::getline(theirs, path);
      theirs >> size;
      TORCH_CHECK(size == mine.segment->size(), "symmetric memory of a group has one size: rank ", this_rank, " has ",
                  mine.segment->size(), " bytes, and rank ", rank, " ", size);
      all.push_back(std::make_shared<Segment>(path, size, false));
      add_segment(all.back());
    }
    // The last rank that has opened the files removes their names.
    if (store->add(key + "opened", 1) == num_ranks) {
      for (const auto& segment : all) {
        unlink(segment->path().c_str());
      }
    }
    mine.handle = c10::make_intrusive<Handle>(std::move(all), this_rank, 0, mine.device);
    return mine.handle;
  }

  bool has_multicast_support(int) override {
    return false;
  }
  c10::DeviceType supported_device_type() override {
    return c10::DeviceType::CUDA;
  }
  std::string name() override {
    return "CUDA";
  }
  bool has_allocation(void* pointer) override {
    StateGuard guard(state_lock());
    return allocations_.count(pointer) > 0;
  }

 private:
  struct Allocation {
    SegmentPtr segment;
    c10::DeviceIndex device;
    std::optional<std::string> group;
    c10::intrusive_ptr<Handle> handle;
  };

  Allocation& allocation(void* pointer) {
    StateGuard guard(state_lock());
    const auto found = allocations_.find(pointer);
    TORCH_CHECK(found != allocations_.end(), "the tensor is not of symmetric memory");
    return found->second;
  }

  std::map<void*, Allocation> allocations_;
  std::map<std::string, int> rendezvous_;
  int next_ = 0;
};

}  // namespace

Stream* running_stream() {
  return this_stream;
}

RunningStream::RunningStream(Stream& stream) : outer_(std::exchange(this_stream, &stream)) {}

RunningStream::~RunningStream() {
  this_stream = outer_;
}

bool has_symmetric_memory() {
  return is_in_use;
}

bool is_symmetric_memory(const void* address) {
  return segment_at(reinterpret_cast<uintptr_t>(address)) != nullptr;
}

void write_clock(SharedClock& target, const Stream& stream) {
  target.num_times = 0;
  if (!is_in_use) {
    return;
  }
  StateGuard guard(state_lock());
  const auto& times = stream.clock.times();
  for (size_t lane = 0; lane < times.size(); ++lane) {
    if (times[lane] == 0) {
      continue;
    }
    TORCH_CHECK(target.num_times < kMaxTimes, "emulated CUDA: more than ", kMaxTimes, " streams of all ranks share memory");
    const auto origin = origin_of_lane(static_cast<Lane>(lane));
    target.times[target.num_times++] = {origin ? origin->first : this_process(),
                                        origin ? origin->second : static_cast<uint32_t>(lane), times[lane]};
  }
}

void join_clock(Stream& stream, const SharedClock& source) {
  StateGuard guard(state_lock());
  for (uint64_t i = 0; i < source.num_times; ++i) {
    const auto& [process, lane, time] = source.times[i];
    if (process != this_process()) {
      stream.clock.advance(foreign_lane(process, lane), time);
    }
  }
}

void check_peers(uintptr_t start, uintptr_t end, bool is_write, const Launch& launch, const std::string& what) {
  const SegmentPtr segment = segment_at(start);
  if (segment == nullptr) {
    return;
  }
  const auto base = reinterpret_cast<uintptr_t>(segment->data());
  const Entry mine{this_process(), launch.stream->lane, is_write, launch.time, start - base, end - base, {}};
  Header& header = segment->header();
  std::string conflict;
  {
    // The lock of the segment comes first: no other thread of this process waits for it with the state lock.
    SegmentLock lock(header);
    StateGuard guard(state_lock());
    uint64_t kept = 0;
    for (uint64_t i = 0; i < header.num_entries; ++i) {
      const Entry& entry = header.entries[i];
      const bool overlaps = entry.start < mine.end && mine.start < entry.end;
      const bool is_foreign = entry.process != mine.process;
      if (overlaps && is_foreign && (is_write || entry.is_write) &&
          !launch.stream->clock.covers(foreign_lane(entry.process, entry.lane), entry.time)) {
        conflict = entry.text;
        break;
      }
      // What comes after a write comes after all that the write comes after, and likewise for reads of one stream.
      const bool is_inside = mine.start <= entry.start && entry.end <= mine.end;
      const bool is_earlier_read = !is_foreign && entry.lane == mine.lane && !entry.is_write;
      if (is_inside && (is_write || is_earlier_read)) {
        continue;
      }
      if (kept != i) {
        header.entries[kept] = entry;
      }
      ++kept;
    }
    if (conflict.empty()) {
      TORCH_CHECK(kept < kMaxEntries, "emulated CUDA: symmetric memory has more than ", kMaxEntries, " separate accesses");
      header.num_entries = kept;
      Entry& added = header.entries[header.num_entries++];
      added = mine;
      const std::string text = describe(launch.site, launch.stream->lane) + (is_write ? ", which writes" : ", which reads");
      std::strncpy(added.text, text.c_str(), kTextBytes - 1);
    }
  }
  if (!conflict.empty()) {
    report("race between ranks: " + describe(launch.site, launch.stream->lane) + (is_write ? " writes " : " reads ") + what +
           " in symmetric memory, and no signal, barrier or collective orders it after another rank's " + conflict +
           " (device " + std::to_string(launch.stream->device) + ", bytes " + std::to_string(mine.start) + " to " +
           std::to_string(mine.end) + ")\n  this rank's access, innermost frame first:\n" + stack_of(launch.site));
  }
}

void install_symmetric_memory() {
  const auto allocator = c10::make_intrusive<Allocator>();
  symm::register_availability("CUDA", allocator);
  symm::register_allocator(c10::DeviceType::CUDA, allocator);
}

}  // namespace emulated_cuda
