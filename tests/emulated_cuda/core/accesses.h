// Which work has read and written which bytes, and the proof that conflicting accesses are ordered.
#pragma once

#include "streams.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>

namespace emulated_cuda {

struct Frame {
  const void* code;
  int place;  // where in the code, as the hooks count it
};

// Where work was launched: an operator's name, and the innermost Python frames.
struct Site {
  std::string operation;
  std::vector<Frame> frames;
};
using SitePtr = std::shared_ptr<const Site>;

// One piece of work on a stream.
struct Launch {
  Stream* stream;
  uint64_t time;
  SitePtr site;
};

// The functions that know Python, which the bindings set.
struct PythonHooks {
  std::function<std::vector<Frame>()> frames;
  std::function<std::string(const std::vector<Frame>&)> format;
};
PythonHooks& python_hooks();

// To be called without the state lock: it may wait for Python's interpreter lock.
SitePtr make_site(std::string operation);
Launch begin_launch(Stream& stream, SitePtr site);
Launch begin_launch(Stream& stream, const std::string& operation);

// Part of memory: the bytes of a strided tensor.
struct Region {
  uintptr_t start;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  // in bytes
  int64_t item_size;
};
Region region_of(const at::Tensor& tensor);

void check_read(const Region& region, const Launch& launch, const std::string& what);
void check_write(const Region& region, const Launch& launch, const std::string& what);

// Bytes that belong to a new tensor: its stream is their last writer.
void note_allocation(uintptr_t start, size_t size, const Launch& launch);
// Forget bytes that are no longer memory.
void forget(uintptr_t start, size_t size);

// The first access of another stream that a stream does not come after, if there is one. Lanes for which `is_excused`
// is true are passed over.
struct Unordered {
  Lane lane;
  SitePtr site;
};
std::optional<Unordered> unordered_access(
    uintptr_t start, size_t size, const Stream& stream, const std::function<bool(Lane)>& is_excused);

// "mm on stream 3".
std::string describe(const SitePtr& site, Lane lane);
// The frames of a site, a line each. To be called without the state lock.
std::string stack_of(const SitePtr& site);

// End the current operation with a report, which is also counted and appended to the file of reports.
[[noreturn]] void report(const std::string& message);
std::vector<std::string> reports();
void clear_reports();

}  // namespace emulated_cuda
