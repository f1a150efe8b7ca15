#include "streams.h"

#include "graphs.h"
#include "host_waits.h"
#include "memory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <map>

namespace emulated_cuda {
namespace {

constexpr int kPoolSize = 32;
// So many queries are answered with "not ready": a GPU may still be at work. A program that polls gets on.
constexpr int kQueriesUnderWay = 3;

struct Registry {
  // A deque: streams stay where they are. The index is the lane.
  std::deque<Stream> streams;
  std::map<std::pair<c10::DeviceIndex, int64_t>, Stream*> by_id;
  std::map<std::pair<c10::DeviceIndex, int>, std::vector<Stream*>> pools;
  std::map<std::pair<c10::DeviceIndex, int>, size_t> next_of_pool;
  std::array<Stream*, kMaxDevices> defaults{};
  // Dedicated streams that nobody uses: every lane makes all clocks longer.
  std::vector<Stream*> unused;
  std::map<std::pair<uint64_t, Lane>, Lane> foreign_lanes;
  std::map<Lane, std::pair<uint64_t, Lane>> origins;
  Clock host;
  int64_t next_id = 1;
};

Registry& registry() {
  // Never destroyed: tensors of static objects are released after it would be.
  static auto* instance = new Registry;
  return *instance;
}

std::atomic<uint64_t> num_host_waits{0};

thread_local c10::DeviceIndex this_device = 0;
thread_local std::array<Stream*, kMaxDevices> these_streams{};

Stream& add_stream(c10::DeviceIndex device, int64_t id, int priority, std::string name) {
  auto& known = registry();
  const auto lane = static_cast<Lane>(known.streams.size());
  known.streams.push_back(Stream{device, id, lane, priority, std::move(name)});
  Stream& stream = known.streams.back();
  known.by_id[{device, id}] = &stream;
  return stream;
}

double now_in_milliseconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

}  // namespace

bool Clock::covers(const Clock& other) const {
  for (size_t lane = 0; lane < other.times_.size(); ++lane) {
    if (!covers(static_cast<Lane>(lane), other.times_[lane])) {
      return false;
    }
  }
  return true;
}

void Clock::advance(Lane lane, uint64_t time) {
  if (lane >= times_.size()) {
    times_.resize(lane + 1, 0);
  }
  times_[lane] = std::max(times_[lane], time);
}

void Clock::join(const Clock& other) {
  if (other.times_.size() > times_.size()) {
    times_.resize(other.times_.size(), 0);
  }
  for (size_t lane = 0; lane < other.times_.size(); ++lane) {
    times_[lane] = std::max(times_[lane], other.times_[lane]);
  }
}

uint64_t Stream::tick() {
  clock.join(host_clock());
  clock.advance(lane, ++time);
  return time;
}

void raise_cuda_error(int code, const std::string& text) {
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, code, "CUDA error: " + text);
}

std::recursive_mutex& state_lock() {
  static auto* instance = new std::recursive_mutex;
  return *instance;
}

c10::DeviceIndex device_count() {
  static const auto count = [] {
    const char* text = std::getenv("EMULATED_CUDA_DEVICES");
    const long number = text == nullptr ? 1 : std::strtol(text, nullptr, 10);
    TORCH_CHECK(number >= 1 && number <= kMaxDevices,
                "EMULATED_CUDA_DEVICES is ", number, "; a number of devices from 1 to ", int(kMaxDevices), " is expected");
    return static_cast<c10::DeviceIndex>(number);
  }();
  return count;
}

void check_device(c10::DeviceIndex device) {
  if (device < 0 || device >= device_count()) {
    raise_cuda_error(101, "invalid device ordinal (device " + std::to_string(device) + " of " + std::to_string(device_count()) + ")");
  }
}

c10::DeviceIndex current_device() {
  return this_device;
}

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  check_device(device);
  return std::exchange(this_device, device);
}

Stream& default_stream(c10::DeviceIndex device) {
  StateGuard guard(state_lock());
  check_device(device);
  auto& slot = registry().defaults.at(device);
  if (slot == nullptr) {
    slot = &add_stream(device, 0, 0, "the default stream");
  }
  return *slot;
}

Stream& current_stream(c10::DeviceIndex device) {
  check_device(device);
  auto& slot = these_streams.at(device);
  if (slot == nullptr) {
    slot = &default_stream(device);
  }
  return *slot;
}

Stream& exchange_stream(Stream& stream) {
  Stream& old = current_stream(stream.device);
  these_streams.at(stream.device) = &stream;
  return old;
}

Stream& find_stream(c10::DeviceIndex device, int64_t id) {
  if (id == 0) {
    return default_stream(device);
  }
  StateGuard guard(state_lock());
  const auto found = registry().by_id.find({device, id});
  TORCH_CHECK(found != registry().by_id.end(), "device ", int(device), " has no stream ", id);
  return *found->second;
}

Stream& find_stream(const c10::Stream& handle) {
  return find_stream(handle.device_index(), handle.id());
}

Stream& stream_of_lane(Lane lane) {
  return registry().streams.at(lane);
}

Lane foreign_lane(uint64_t process, Lane lane) {
  StateGuard guard(state_lock());
  auto& known = registry();
  const auto found = known.foreign_lanes.find({process, lane});
  if (found != known.foreign_lanes.end()) {
    return found->second;
  }
  constexpr c10::DeviceIndex nowhere = -1;
  const Lane added = add_stream(nowhere, known.next_id++, 0, "a stream of another rank").lane;
  known.foreign_lanes[{process, lane}] = added;
  known.origins[added] = {process, lane};
  return added;
}

std::optional<std::pair<uint64_t, Lane>> origin_of_lane(Lane lane) {
  const auto& origins = registry().origins;
  const auto found = origins.find(lane);
  return found == origins.end() ? std::nullopt : std::optional(found->second);
}

Stream& pool_stream(c10::DeviceIndex device, int priority) {
  StateGuard guard(state_lock());
  check_device(device);
  auto& known = registry();
  const int level = priority < 0 ? -1 : 0;
  auto& pool = known.pools[{device, level}];
  auto& next = known.next_of_pool[{device, level}];
  if (pool.size() < kPoolSize) {
    const auto id = known.next_id++;
    pool.push_back(&add_stream(device, id, level, "stream " + std::to_string(id)));
    return *pool.back();
  }
  return *pool[next++ % kPoolSize];
}

Stream& dedicated_stream(c10::DeviceIndex device, const std::string& name) {
  StateGuard guard(state_lock());
  check_device(device);
  auto& known = registry();
  // One whose work may not be done yet keeps its name, which a report may need.
  const auto found = std::find_if(known.unused.begin(), known.unused.end(), [&](const Stream* stream) {
    return stream->device == device && known.host.covers(stream->lane, stream->time);
  });
  if (found == known.unused.end()) {
    return add_stream(device, known.next_id++, 0, name);
  }
  Stream& stream = **found;
  known.unused.erase(found);
  stream.name = name;
  return stream;
}

void give_back(Stream& stream) {
  StateGuard guard(state_lock());
  registry().unused.push_back(&stream);
}

void record_event(Event& event, Stream& stream) {
  StateGuard guard(state_lock());
  TORCH_CHECK(event.device == -1 || event.device == stream.device,
              "Event device ", int(event.device), " does not match recording stream's device ", int(stream.device), ".");
  event.is_recorded = true;
  event.device = stream.device;
  event.clock = stream.clock;
  event.capture = stream.capture;
  event.milliseconds = now_in_milliseconds();
  event.num_queries = 0;
}

void stream_waits(Stream& stream, const Event& event) {
  StateGuard guard(state_lock());
  if (!event.is_recorded) {
    return;  // CUDA: a wait for an event that was never recorded does nothing
  }
  order_in_capture(stream, event);
  stream.clock.join(event.clock);
}

void stream_waits(Stream& stream, Stream& other) {
  Event event;
  record_event(event, other);
  stream_waits(stream, event);
}

uint64_t host_wait_count() {
  return num_host_waits;
}

const Clock& host_clock() {
  return registry().host;
}

void host_waits(const Clock& clock) {
  Arrivals arrivals;
  {
    StateGuard guard(state_lock());
    auto& host = registry().host;
    if (host.covers(clock)) {
      return;
    }
    host.join(clock);
    arrivals = take_arrivals();
    release_deferred();
  }
  arrivals.deliver();
}

void synchronize_stream(Stream& stream) {
  forbid_in_capture("cudaStreamSynchronize", &stream);
  ++num_host_waits;
  host_waits(Clock(stream.clock));
}

void synchronize_event(const Event& event) {
  forbid_in_capture("cudaEventSynchronize", nullptr);
  ++num_host_waits;
  if (event.is_recorded) {
    host_waits(Clock(event.clock));
  }
}

void synchronize_device(c10::DeviceIndex device) {
  forbid_in_capture("cudaDeviceSynchronize", nullptr);
  ++num_host_waits;
  Clock all;
  {
    StateGuard guard(state_lock());
    for (const auto& stream : registry().streams) {
      if (stream.device == device) {
        all.join(stream.clock);
      }
    }
  }
  host_waits(all);
}

bool query_event(const Event& event) {
  if (event.capture != nullptr && is_under_way(event.capture)) {
    raise_cuda_error(907, "operation not permitted on an event last recorded in a capturing stream");
  }
  {
    StateGuard guard(state_lock());
    if (!event.is_recorded || host_clock().covers(event.clock)) {
      return true;
    }
    if (++event.num_queries <= kQueriesUnderWay) {
      return false;
    }
  }
  host_waits(Clock(event.clock));
  return true;
}

bool query_stream(Stream& stream) {
  forbid_in_capture("cudaStreamQuery", &stream);
  {
    StateGuard guard(state_lock());
    if (host_clock().covers(stream.clock)) {
      return true;
    }
    if (stream.queried != stream.time) {
      stream.queried = stream.time;
      stream.num_queries = 0;
    }
    if (++stream.num_queries <= kQueriesUnderWay) {
      return false;
    }
  }
  host_waits(Clock(stream.clock));
  return true;
}

}  // namespace emulated_cuda
