// Streams, events and the vector clocks that order their work.
//
// All work runs on the host at once, in the order of its launches. The clocks say what a GPU would be free to reorder.
// A stream has a lane: its component of every clock. The host has no lane, because its own accesses are not tracked.
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace emulated_cuda {

class Capture;

using Lane = uint32_t;

constexpr c10::DeviceIndex kMaxDevices = 16;

class Clock {
 public:
  uint64_t time_of(Lane lane) const {
    return lane < times_.size() ? times_[lane] : 0;
  }
  bool covers(Lane lane, uint64_t time) const {
    return time_of(lane) >= time;
  }
  bool covers(const Clock& other) const;
  void advance(Lane lane, uint64_t time);
  void join(const Clock& other);
  const std::vector<uint64_t>& times() const {
    return times_;
  }

 private:
  std::vector<uint64_t> times_;
};

struct Stream {
  c10::DeviceIndex device;
  int64_t id;
  Lane lane;
  int priority;
  std::string name;
  // The work that everything launched from now on comes after.
  Clock clock;
  uint64_t time = 0;
  // The capture that this stream takes part in, if any.
  Capture* capture = nullptr;
  // How often it was asked for since the last work was launched, and that work.
  int num_queries = 0;
  uint64_t queried = 0;

  c10::Stream handle() const {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::CUDA, device), id);
  }
  // Start a new piece of work, which comes after all that the host has waited for.
  uint64_t tick();
};

struct Event {
  bool is_recorded = false;
  Clock clock;
  c10::DeviceIndex device = -1;
  double milliseconds = 0.0;
  bool has_timing = false;
  // The capture in which it was recorded; compared, never dereferenced.
  const Capture* capture = nullptr;
  // How often it was asked for since it was recorded.
  mutable int num_queries = 0;
};

// An error of the CUDA runtime, with its number.
[[noreturn]] void raise_cuda_error(int code, const std::string& text);

// Protects all bookkeeping. A thread that holds it must not wait for Python's interpreter lock.
std::recursive_mutex& state_lock();
using StateGuard = std::lock_guard<std::recursive_mutex>;

c10::DeviceIndex device_count();
c10::DeviceIndex current_device();
// Returns the previous device. Raises CUDA's error for a device that does not exist.
c10::DeviceIndex exchange_device(c10::DeviceIndex device);
void check_device(c10::DeviceIndex device);

Stream& default_stream(c10::DeviceIndex device);
Stream& current_stream(c10::DeviceIndex device);
// Returns the previous stream of the stream's device in this thread.
Stream& exchange_stream(Stream& stream);
Stream& find_stream(c10::DeviceIndex device, int64_t id);
Stream& find_stream(const c10::Stream& handle);
Stream& stream_of_lane(Lane lane);
// The lane that stands for a stream of another process in the clocks of this one, and the reverse.
Lane foreign_lane(uint64_t process, Lane lane);
std::optional<std::pair<uint64_t, Lane>> origin_of_lane(Lane lane);
// A stream of the pool: like torch, the 33rd of a priority is the first one again.
Stream& pool_stream(c10::DeviceIndex device, int priority);
// A stream of its own, for a communicator, which gives it back.
Stream& dedicated_stream(c10::DeviceIndex device, const std::string& name);
void give_back(Stream& stream);

void record_event(Event& event, Stream& stream);
void stream_waits(Stream& stream, const Event& event);
void stream_waits(Stream& stream, Stream& other);

// The work that the host knows to be done.
const Clock& host_clock();
// Let the host wait for work: deferred copies arrive, and memory that only waited for it is free.
void host_waits(const Clock& clock);
void synchronize_stream(Stream& stream);
void synchronize_event(const Event& event);
void synchronize_device(c10::DeviceIndex device);
// Whether it is done. A positive reply is as good as a wait.
bool query_event(const Event& event);
bool query_stream(Stream& stream);

}  // namespace emulated_cuda
