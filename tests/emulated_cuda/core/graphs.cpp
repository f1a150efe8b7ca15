#include "graphs.h"

#include "generator.h"
#include "graph_memory.h"
#include "peers.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <set>
#include <thread>

namespace emulated_cuda {

class Capture {
 public:
  Stream* origin = nullptr;
  std::set<Stream*> streams;
  PoolId pool;
  CaptureMode mode = CaptureMode::kGlobal;
  std::thread::id thread;
  uint64_t first_allocation = 0;
  std::vector<RecordedWork> work;
  // What the captured work has overwritten: a view of the memory, and its old values.
  std::vector<std::pair<at::Tensor, at::Tensor>> overwritten;
  GeneratorPositions generators;
};

namespace {

std::set<const Capture*>& captures() {
  static auto* instance = new std::set<const Capture*>;
  return *instance;
}

// The numbers and texts of cudaError_t.
[[noreturn]] void raise_not_permitted(const std::string& call) {
  raise_cuda_error(900, "operation not permitted when stream is capturing (" + call + ")");
}

// The capture whose mode forbids unsafe calls in this thread.
const Capture* restricting_capture() {
  StateGuard guard(state_lock());
  for (const Capture* capture : captures()) {
    const bool is_here = capture->thread == std::this_thread::get_id();
    if (capture->mode == CaptureMode::kGlobal || (capture->mode == CaptureMode::kThreadLocal && is_here)) {
      return capture;
    }
  }
  return nullptr;
}

}  // namespace

Capture* capture_of(const Stream& stream) {
  return stream.capture;
}

bool is_under_way(const Capture* capture) {
  StateGuard guard(state_lock());
  return captures().count(capture) > 0;
}

void save_before_write(Capture& capture, const at::Tensor& written) {
  StateGuard guard(state_lock());
  capture.overwritten.emplace_back(written, written.clone());
}

void add_work(Capture& capture, RecordedWork work) {
  StateGuard guard(state_lock());
  // The addresses are part of the graph: memory from outside of its pool must stay allocated.
  std::vector<std::pair<uintptr_t, uint64_t>> used;
  for (const auto* regions : {&work.reads, &work.writes}) {
    for (const auto& region : *regions) {
      if (const uint64_t number = lasting_allocation(region.start)) {
        used.emplace_back(region.start, number);
      }
    }
  }
  work.run = [run = std::move(work.run), used, operation = work.operation, site = work.site] {
    for (const auto& [address, number] : used) {
      if (lasting_allocation(address) != number) {
        report("memory of a graph was released: " + operation + " in a replayed graph uses memory that was allocated at its "
               "capture and released since\n  the capture, innermost frame first:\n" + stack_of(site));
      }
    }
    run();
  };
  capture.work.push_back(std::move(work));
}

void forbid_in_capture(const std::string& call, const Stream* stream) {
  if ((stream != nullptr && stream->capture != nullptr) || restricting_capture() != nullptr) {
    raise_not_permitted(call);
  }
}

void forbid_allocation_in_capture(const std::string& call) {
  if (restricting_capture() != nullptr) {
    raise_not_permitted(call);
  }
}

void forbid_foreign_allocation(const Stream& stream) {
  if (stream.capture == nullptr && restricting_capture() != nullptr) {
    raise_not_permitted("cudaMalloc for " + stream.name + ", which is not captured");
  }
}

PoolId allocation_pool(const Stream& stream) {
  return stream.capture == nullptr ? chosen_pool(stream.device) : stream.capture->pool;
}

void order_in_capture(Stream& stream, const Event& event) {
  const bool is_captured = event.capture != nullptr && is_under_way(event.capture);
  if (stream.capture == nullptr && is_captured) {
    auto* capture = const_cast<Capture*>(event.capture);
    stream.capture = capture;
    capture->streams.insert(&stream);
  } else if (stream.capture != nullptr && event.capture != stream.capture) {
    raise_cuda_error(905, "dependency created on uncaptured work in another stream (cudaStreamWaitEvent)");
  }
}

Graph::Graph() = default;

Graph::~Graph() {
  reset();
}

void Graph::begin_capture(PoolId pool, CaptureMode mode) {
  Stream& stream = current_stream(current_device());
  TORCH_CHECK(stream.id != 0, "CUDA graphs must be captured on a non-default stream. (However, after capture, it's ok to "
              "replay them on the default stream.)");
  TORCH_CHECK(!is_captured_ && capture_ == nullptr, "This CUDAGraph instance already owns a captured graph. To capture a "
              "new graph, create a new instance.");
  if (stream.capture != nullptr) {
    raise_not_permitted("cudaStreamBeginCapture");
  }
  pool_ = pool == kDefaultPool ? new_pool() : pool;
  retain_pool(pool_);
  device_ = stream.device;
  capture_ = std::make_unique<Capture>();
  capture_->origin = &stream;
  capture_->pool = pool_;
  capture_->mode = mode;
  capture_->thread = std::this_thread::get_id();
  capture_->first_allocation = allocation_count();
  capture_->streams.insert(&stream);
  capture_->generators = generator_positions();
  StateGuard guard(state_lock());
  captures().insert(capture_.get());
  stream.capture = capture_.get();
}

void Graph::end_capture() {
  TORCH_CHECK(capture_ != nullptr, "capture_end without capture_begin");
  std::string unjoined;
  std::unique_ptr<Capture> ended = std::move(capture_);
  Clock captured;
  {
    StateGuard guard(state_lock());
    captures().erase(ended.get());
    for (Stream* stream : ended->streams) {
      stream->capture = nullptr;
      captured.join(stream->clock);
      if (!ended->origin->clock.covers(stream->lane, stream->time)) {
        unjoined = stream->name;
      }
    }
    for (auto each = ended->overwritten.rbegin(); each != ended->overwritten.rend(); ++each) {
      each->first.copy_(each->second);
    }
    poison_allocated_since(pool_, ended->first_allocation);
    restore_generators(ended->generators);
    work_ = std::move(ended->work);
    is_captured_ = true;
  }
  // The captured work has not run: nothing needs to come after it. What came before has been waited for, because
  // torch.cuda.graph synchronizes the device before a capture.
  host_waits(captured);
  if (&current_stream(device_) != ended->origin) {
    raise_cuda_error(908, "attempt to end a capture on another stream than it began on (cudaStreamEndCapture)");
  }
  if (!unjoined.empty()) {
    raise_cuda_error(904, "capturing stream has unjoined work, on " + unjoined + " (cudaStreamEndCapture)");
  }
}

void Graph::replay() {
  TORCH_CHECK(is_captured_, "Called CUDAGraph::replay without a preceding successful capture.");
  Stream& stream = current_stream(device_);
  if (stream.capture != nullptr) {
    raise_not_permitted("cudaGraphLaunch");
  }
  begin_launch(stream, std::string("cudaGraphLaunch"));
  for (const auto& work : work_) {
    const Launch launch = begin_launch(stream, work.site);
    for (const auto& region : work.reads) {
      check_read(region, launch, "in a replayed graph");
    }
    for (const auto& region : work.writes) {
      check_write(region, launch, "in a replayed graph");
    }
    const RunningStream running(stream);
    work.run();
  }
}

void Graph::reset() {
  if (capture_ != nullptr) {
    StateGuard guard(state_lock());
    captures().erase(capture_.get());
    for (Stream* stream : capture_->streams) {
      stream->capture = nullptr;
    }
    capture_.reset();
  }
  if (pool_ != kDefaultPool) {
    release_pool(pool_);
    pool_ = kDefaultPool;
  }
  work_.clear();
  is_captured_ = false;
}

}  // namespace emulated_cuda
