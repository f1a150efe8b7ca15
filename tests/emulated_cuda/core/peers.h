// Order between ranks: clocks that pass from one process to another, and accesses to memory that ranks share.
#pragma once

#include "accesses.h"

#include <cstdint>

namespace emulated_cuda {

constexpr size_t kMaxTimes = 1024;

// A clock as other processes can read it, in memory that they share.
struct SharedClock {
  struct Time {
    uint64_t process;
    uint32_t lane;
    uint64_t time;
  };
  uint64_t num_times;
  Time times[kMaxTimes];
};

// What a stream has been given, for another process; empty unless this process shares memory with others.
void write_clock(SharedClock& target, const Stream& stream);
// Let all that is launched on a stream from now on come after what another process has done.
void join_clock(Stream& stream, const SharedClock& source);

// The stream of the work that this thread is running; null outside of work.
Stream* running_stream();
class RunningStream {
 public:
  explicit RunningStream(Stream& stream);
  ~RunningStream();
  RunningStream(const RunningStream&) = delete;

 private:
  Stream* outer_;
};

bool has_symmetric_memory();
// Report an access to symmetric memory that conflicts with one of another rank, and else note it for the other ranks.
void check_peers(uintptr_t start, uintptr_t end, bool is_write, const Launch& launch, const std::string& what);

// Register the allocator with torch, whose torch.distributed._symmetric_memory runs on it unchanged.
void install_symmetric_memory();

}  // namespace emulated_cuda
