// What Python sees of the emulator. torch/cuda in Python runs on it unchanged.
#include "generator.h"
#include "graphs.h"
#include "host_waits.h"
#include "kernel_rules.h"
#include "memory.h"
#include "nccl.h"
#include "operation_counts.h"
#include "operators.h"
#include "peers.h"

#include <torch/csrc/Generator.h>
#include <torch/csrc/distributed/c10d/PyProcessGroup.hpp>
#include <torch/csrc/utils/pybind.h>

#include <ATen/core/CachingHostAllocator.h>
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <unordered_set>

namespace py = pybind11;
using namespace emulated_cuda;
using Unlocked = py::call_guard<py::gil_scoped_release>;

namespace {

constexpr size_t kMaxFrames = 12;

// To find a line takes longer than an operator: it is left until somebody reads it.
#if PY_VERSION_HEX >= 0x030B0000
int place_in_code(PyFrameObject* frame) {
  return PyFrame_GetLasti(frame);
}

int line_of(const Frame& frame) {
  return PyCode_Addr2Line(static_cast<PyCodeObject*>(const_cast<void*>(frame.code)), frame.place);
}
#else
int place_in_code(PyFrameObject* frame) {
  return PyFrame_GetLineNumber(frame);
}

int line_of(const Frame& frame) {
  return frame.place;
}
#endif

std::vector<Frame> python_frames() {
  std::vector<Frame> frames;
  if (!Py_IsInitialized()) {
    return frames;
  }
  py::gil_scoped_acquire gil;
  // Code objects are kept: a report may come long after their functions.
  static auto* kept = new std::unordered_set<const void*>;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame != nullptr) {
    if (frames.size() < kMaxFrames) {
      PyCodeObject* code = PyFrame_GetCode(frame);
      if (!kept->insert(code).second) {
        Py_DECREF(code);
      }
      frames.push_back({code, place_in_code(frame)});
    }
    PyFrameObject* back = frames.size() < kMaxFrames ? PyFrame_GetBack(frame) : nullptr;
    Py_DECREF(frame);
    frame = back;
  }
  return frames;
}

std::string format_frames(const std::vector<Frame>& frames) {
  py::gil_scoped_acquire gil;
  std::string text;
  for (const Frame& frame : frames) {
    auto* object = static_cast<PyObject*>(const_cast<void*>(frame.code));
    const auto code = py::reinterpret_borrow<py::object>(object);
    text += "    " + py::str(code.attr("co_filename")).cast<std::string>() + ":" + std::to_string(line_of(frame)) + " in " +
        py::str(code.attr("co_name")).cast<std::string>() + "\n";
  }
  return text;
}

using Interval = std::pair<uintptr_t, size_t>;
using Intervals = std::pair<std::vector<Interval>, std::vector<Interval>>;

std::vector<Region> regions_of(const std::vector<Interval>& intervals) {
  std::vector<Region> regions;
  for (const auto& [start, size] : intervals) {
    regions.push_back({start, {}, {}, static_cast<int64_t>(size)});
  }
  return regions;
}

// Run work that is written in Python on the current stream. It is given the tensors over host memory, and returns the
// intervals of addresses that it has read and written.
void run_python_work(
    const std::string& operation, c10::DeviceIndex device, const std::vector<at::Tensor>& tensors,
    const std::function<Intervals(std::vector<at::Tensor>)>& run) {
  Stream& stream = current_stream(device);
  Capture* capture = capture_of(stream);
  const Launch launch = begin_launch(stream, operation);
  std::vector<at::Tensor> on_hosts;
  for (const auto& tensor : tensors) {
    on_hosts.push_back(on_host_unowned(tensor));
    if (capture != nullptr) {
      save_before_write(*capture, on_hosts.back());
    }
  }
  const auto call = [run, on_hosts] {
    py::gil_scoped_acquire gil;
    return run(on_hosts);
  };
  const auto [reads, writes] = call();
  RecordedWork work{operation, launch.site, regions_of(reads), regions_of(writes), [call] { call(); }};
  for (const auto& region : work.reads) {
    check_read(region, launch, "memory that it loads");
  }
  for (const auto& region : work.writes) {
    check_write(region, launch, "memory that it stores");
  }
  if (capture != nullptr) {
    add_work(*capture, std::move(work));
  }
}

CaptureMode mode_of(const std::string& name) {
  if (name == "global") {
    return CaptureMode::kGlobal;
  }
  if (name == "thread_local") {
    return CaptureMode::kThreadLocal;
  }
  TORCH_CHECK(name == "relaxed", "Unknown capture error mode. Expected `global`, `thread_local`, or `relaxed`, got ", name);
  return CaptureMode::kRelaxed;
}

void bind_nccl(py::module& module) {
  auto options_base = py::module::import("torch._C._distributed_c10d").attr("Backend").attr("Options");
  auto nccl = py::class_<Nccl, c10d::Backend, c10::intrusive_ptr<Nccl>>(module, "ProcessGroupNCCL")
      .def(py::init<const c10::intrusive_ptr<c10d::Store>&, int, int, c10::intrusive_ptr<Nccl::Options>>(),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"), Unlocked())
      .def_property_readonly("options", &Nccl::options)
      .def("perform_nocolor_split", [](Nccl& self, const at::Device&) { self.take_part_in_split(); }, Unlocked())
      .def("_set_default_timeout", [](Nccl& self, std::chrono::milliseconds timeout) { self.setTimeout(timeout); })
      .def("_group_start", [](Nccl&) {})
      .def("_group_end", [](Nccl&) {});
  py::class_<NcclConfig>(nccl, "NCCLConfig")
      .def_readwrite("blocking", &NcclConfig::blocking)
      .def_readwrite("cga_cluster_size", &NcclConfig::cga_cluster_size)
      .def_readwrite("min_ctas", &NcclConfig::min_ctas)
      .def_readwrite("max_ctas", &NcclConfig::max_ctas);
  py::class_<Nccl::Options, c10d::Backend::Options, c10::intrusive_ptr<Nccl::Options>>(nccl, "Options")
      .def(py::init([](bool is_high_priority_stream) {
             auto options = c10::make_intrusive<Nccl::Options>();
             options->is_high_priority_stream = is_high_priority_stream;
             return options;
           }), py::arg("is_high_priority_stream") = false)
      .def("__deepcopy__", [](const Nccl::Options& self, const py::dict&) { return c10::make_intrusive<Nccl::Options>(self); })
      .def_readwrite("config", &Nccl::Options::config)
      .def_readwrite("is_high_priority_stream", &Nccl::Options::is_high_priority_stream)
      .def_property("split_from", [](const Nccl::Options& self) { return self.split_from; },
                    [](Nccl::Options& self, const c10::intrusive_ptr<c10d::Backend>& parent) {
                      self.split_from = c10::dynamic_intrusive_pointer_cast<Nccl>(parent);
                    })
      .def_readwrite("split_color", &Nccl::Options::split_color);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  python_hooks() = {&python_frames, &format_frames};

  module.def("bind_nccl", &bind_nccl);
  module.def("install_symmetric_memory", &install_symmetric_memory);

  module.def("set_capability", &set_capability);
  module.def("device_count", &device_count);
  module.def("current_device", &current_device);
  module.def("exchange_device", &exchange_device);
  module.def(
      "synchronize_device",
      [](c10::DeviceIndex device) {
        synchronize_device(device);
        release_ended_communications();
      },
      Unlocked());
  module.def("current_stream", [](c10::DeviceIndex device) { return current_stream(device).id; }, Unlocked());
  module.def("set_stream", [](c10::DeviceIndex device, int64_t id) { exchange_stream(find_stream(device, id)); }, Unlocked());
  module.def("new_stream", [](c10::DeviceIndex device, int priority) { return pool_stream(device, priority).id; }, Unlocked());
  module.def("is_capturing", [](c10::DeviceIndex device) { return current_stream(device).capture != nullptr; }, Unlocked());

  py::class_<Event>(module, "Event")
      .def(py::init([](bool has_timing) {
        auto event = std::make_unique<Event>();
        event->has_timing = has_timing;
        return event;
      }))
      .def_readonly("device", &Event::device)
      .def_readonly("is_recorded", &Event::is_recorded)
      .def("record", [](Event& self, c10::DeviceIndex device, int64_t id) { record_event(self, find_stream(device, id)); }, Unlocked())
      .def("wait", [](const Event& self, c10::DeviceIndex device, int64_t id) { stream_waits(find_stream(device, id), self); }, Unlocked())
      .def("query", &query_event, Unlocked())
      .def("synchronize", &synchronize_event, Unlocked())
      .def("elapsed_time", [](const Event& self, const Event& end) {
        TORCH_CHECK(self.has_timing && end.has_timing, "Both events must be created with argument 'enable_timing=True'.");
        TORCH_CHECK(self.is_recorded && end.is_recorded, "Both events must be recorded before calculating elapsed time.");
        return end.milliseconds - self.milliseconds;
      });

  py::class_<Graph>(module, "Graph")
      .def(py::init<>())
      .def("begin_capture", [](Graph& self, const PoolId& pool, const std::string& mode) { self.begin_capture(pool, mode_of(mode)); }, Unlocked())
      .def("end_capture", &Graph::end_capture, Unlocked())
      .def("replay", &Graph::replay, Unlocked())
      .def("reset", &Graph::reset, Unlocked())
      .def("pool", &Graph::pool);
  module.def("new_pool", &new_pool, Unlocked());
  module.def("new_user_pool", &new_user_pool, Unlocked());
  module.def("retain_pool", &retain_pool, Unlocked());
  module.def("release_pool", &release_pool, Unlocked());
  module.def("chosen_pool", &chosen_pool);
  module.def("choose_pool", &choose_pool);
  module.def("forbid_in_capture", [](const std::string& call) { forbid_in_capture(call, nullptr); }, Unlocked());

  py::class_<MemoryCount>(module, "MemoryCount")
      .def_readonly("current", &MemoryCount::current)
      .def_readonly("peak", &MemoryCount::peak)
      .def_readonly("allocated", &MemoryCount::allocated)
      .def_readonly("freed", &MemoryCount::freed);
  module.def("memory_counts", &memory_counts, Unlocked());
  module.def("num_out_of_memory", &num_out_of_memory, Unlocked());
  module.def("reset_peaks", &reset_peaks, Unlocked());
  module.def("empty_cache", &empty_cache, Unlocked());
  module.def("empty_host_cache", [] { at::getHostAllocator(c10::DeviceType::CUDA)->empty_cache(); }, Unlocked());
  module.def("free_memory", &free_memory, Unlocked());
  module.def("total_memory", &total_memory);
  module.def("pinned_bytes", &pinned_bytes, Unlocked());
  py::class_<BlockSummary>(module, "BlockSummary")
      .def_readonly("device", &BlockSummary::device)
      .def_readonly("segment", &BlockSummary::segment)
      .def_readonly("address", &BlockSummary::address)
      .def_readonly("size", &BlockSummary::size)
      .def_readonly("requested", &BlockSummary::requested)
      .def_readonly("is_allocated", &BlockSummary::is_allocated)
      .def_readonly("stream", &BlockSummary::stream)
      .def_readonly("pool", &BlockSummary::pool);
  module.def("list_blocks", &list_blocks, Unlocked());

  module.def("default_generator", [](c10::DeviceIndex device) {
    return py::reinterpret_steal<py::object>(THPGenerator_Wrap(default_generator(device)));
  });
  module.def("on_host", &on_host, "Return a CPU tensor over the memory of a CUDA tensor.");
  module.def("resize_storage", [](const at::Tensor& tensor, size_t num_bytes) {
    resize_storage(*tensor.storage().unsafeGetStorageImpl(), num_bytes);
  }, Unlocked());
  module.def("run_python_work", &run_python_work, Unlocked());
  module.def("operation_counts", &operation_counts, Unlocked());
  module.def("host_wait_count", &host_wait_count);
  module.def("reports", &reports, Unlocked());
  module.def("clear_reports", &clear_reports, Unlocked());
}
