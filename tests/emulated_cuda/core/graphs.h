// CUDA graphs: work is recorded while it is captured, and run again when the graph is replayed.
//
// A capture runs the work once, so that shapes follow from it, and undoes all that it has written: on a GPU a capture
// computes nothing.
#pragma once

#include "accesses.h"
#include "memory.h"

#include <functional>

namespace emulated_cuda {

enum class CaptureMode { kGlobal, kThreadLocal, kRelaxed };

struct RecordedWork {
  std::string operation;
  SitePtr site;
  std::vector<Region> reads;
  std::vector<Region> writes;
  std::function<void()> run;
};

class Graph {
 public:
  Graph();
  ~Graph();
  Graph(const Graph&) = delete;

  void begin_capture(PoolId pool, CaptureMode mode);
  void end_capture();
  void replay();
  void reset();
  PoolId pool() const {
    return pool_;
  }

 private:
  PoolId pool_ = kDefaultPool;
  bool is_captured_ = false;
  c10::DeviceIndex device_ = 0;
  std::vector<RecordedWork> work_;
  std::unique_ptr<Capture> capture_;
};

// The capture that a stream takes part in, or null.
Capture* capture_of(const Stream& stream);
bool is_under_way(const Capture* capture);
// Keep a piece of work; `written` are the tensors in memory that it will write to.
void save_before_write(Capture& capture, const at::Tensor& written);
void add_work(Capture& capture, RecordedWork work);

// Raise the driver's error if a capture forbids a call. A stream's call is forbidden while the stream is captured.
void forbid_in_capture(const std::string& call, const Stream* stream);
void forbid_allocation_in_capture(const std::string& call);
// Memory on a stream that takes no part in this thread's capture.
void forbid_foreign_allocation(const Stream& stream);
PoolId allocation_pool(const Stream& stream);
// A wait of one stream for an event: brings a stream into a capture, or is an error.
void order_in_capture(Stream& stream, const Event& event);

}  // namespace emulated_cuda
