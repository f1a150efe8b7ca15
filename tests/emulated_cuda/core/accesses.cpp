#include "accesses.h"

#include "operation_counts.h"
#include "peers.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <numeric>
#include <sstream>
#include <unistd.h>
#include <unordered_map>

namespace emulated_cuda {
namespace {

// A tensor of more separate runs of bytes than these is tracked by its bounds, and compared exactly when they conflict.
constexpr size_t kMaxRuns = 1024;

struct Access {
  Lane lane = 0;
  uint64_t time = 0;  // 0: nothing
  SitePtr site;
  std::shared_ptr<const Region> exact;  // where the cell is only its bounds
};

struct Cell {
  uintptr_t end;
  Access write;
  std::vector<Access> reads;  // the last one of each lane since the write
};

using Run = std::pair<uintptr_t, uintptr_t>;

std::map<uintptr_t, Cell>& cells() {
  static auto* instance = new std::map<uintptr_t, Cell>;
  return *instance;
}

std::vector<std::string>& kept_reports() {
  static auto* instance = new std::vector<std::string>;
  return *instance;
}

std::unordered_map<std::string, uint64_t>& counts() {
  static auto* instance = new std::unordered_map<std::string, uint64_t>;
  return *instance;
}

// The region as dimensions that cannot be merged, from the innermost, and the size of their contiguous items.
struct Merged {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  int64_t run = 0;
  uintptr_t start = 0;
  bool is_empty = false;
};

Merged merge(const Region& region) {
  Merged merged;
  merged.run = region.item_size;
  merged.start = region.start;
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (size_t i = 0; i < region.sizes.size(); ++i) {
    if (region.sizes[i] == 0) {
      merged.is_empty = true;
      return merged;
    }
    if (region.sizes[i] > 1 && region.strides[i] != 0) {
      dims.emplace_back(region.strides[i], region.sizes[i]);
    }
  }
  std::sort(dims.begin(), dims.end());
  for (const auto& [stride, size] : dims) {
    if (merged.dims.empty() && stride <= merged.run) {
      merged.run = (size - 1) * stride + merged.run;
    } else if (!merged.dims.empty() && merged.dims.back().first * merged.dims.back().second == stride) {
      merged.dims.back().second *= size;
    } else {
      merged.dims.emplace_back(stride, size);
    }
  }
  return merged;
}

size_t count_runs(const Merged& merged) {
  return std::accumulate(merged.dims.begin(), merged.dims.end(), size_t{1}, [](size_t product, const auto& dim) {
    return product * static_cast<size_t>(dim.second);
  });
}

std::vector<Run> list_runs(const Merged& merged) {
  std::vector<Run> runs;
  runs.reserve(count_runs(merged));
  std::vector<int64_t> index(merged.dims.size(), 0);
  while (true) {
    uintptr_t start = merged.start;
    for (size_t i = 0; i < index.size(); ++i) {
      start += static_cast<uintptr_t>(index[i] * merged.dims[i].first);
    }
    runs.emplace_back(start, start + static_cast<uintptr_t>(merged.run));
    size_t i = 0;
    while (i < index.size() && ++index[i] == merged.dims[i].second) {
      index[i++] = 0;
    }
    if (i == index.size()) {
      break;
    }
  }
  std::sort(runs.begin(), runs.end());
  return runs;
}

Run bounds(const Merged& merged) {
  uintptr_t end = merged.start + static_cast<uintptr_t>(merged.run);
  for (const auto& [stride, size] : merged.dims) {
    end += static_cast<uintptr_t>(stride * (size - 1));
  }
  return {merged.start, end};
}

bool overlap(const std::vector<Run>& a, const std::vector<Run>& b) {
  auto first = a.begin();
  auto second = b.begin();
  while (first != a.end() && second != b.end()) {
    if (first->second <= second->first) {
      ++first;
    } else if (second->second <= first->first) {
      ++second;
    } else {
      return true;
    }
  }
  return false;
}

// Split the cell that spans an address, so that a cell begins there.
void split_at(uintptr_t address) {
  auto& all = cells();
  auto next = all.upper_bound(address);
  if (next == all.begin()) {
    return;
  }
  auto cell = std::prev(next);
  if (cell->first < address && address < cell->second.end) {
    Cell rest = cell->second;
    cell->second.end = address;
    all.emplace_hint(next, address, std::move(rest));
  }
}

struct Conflict {
  Access earlier;
  bool earlier_is_write = false;
  Run bytes{0, 0};
};

bool is_conflict(const Access& access, const Clock& clock, const std::shared_ptr<const Region>& exact, const Run& run) {
  if (access.time == 0 || clock.covers(access.lane, access.time)) {
    return false;
  }
  if (access.exact == nullptr && exact == nullptr) {
    return true;
  }
  const auto mine = exact ? list_runs(merge(*exact)) : std::vector<Run>{run};
  const auto theirs = access.exact ? list_runs(merge(*access.exact)) : std::vector<Run>{run};
  return overlap(mine, theirs);
}

// Look for a conflict with one run of bytes, and note the access if there is none.
bool find_conflict(
    const Run& run, bool is_write, const Launch& launch, const std::shared_ptr<const Region>& exact, Conflict& found) {
  auto& all = cells();
  const Clock& clock = launch.stream->clock;
  split_at(run.first);
  split_at(run.second);
  const auto begin = all.lower_bound(run.first);
  auto cell = begin;
  for (; cell != all.end() && cell->first < run.second; ++cell) {
    const Run part{cell->first, cell->second.end};
    if (is_conflict(cell->second.write, clock, exact, part)) {
      found = {cell->second.write, true, part};
      return true;
    }
    for (const auto& read : cell->second.reads) {
      if (is_write && is_conflict(read, clock, exact, part)) {
        found = {read, false, part};
        return true;
      }
    }
  }
  const Access access{launch.stream->lane, launch.time, launch.site, exact};
  if (is_write) {
    all.erase(begin, cell);
    all.emplace(run.first, Cell{run.second, access, {}});
    return false;
  }
  uintptr_t place = run.first;
  for (auto each = begin; each != cell; ++each) {
    if (place < each->first) {
      all.emplace_hint(each, place, Cell{each->first, {}, {access}});
    }
    auto& reads = each->second.reads;
    const auto old = std::find_if(reads.begin(), reads.end(), [&](const Access& read) { return read.lane == access.lane; });
    if (old == reads.end()) {
      reads.push_back(access);
    } else {
      *old = access;
    }
    place = each->second.end;
  }
  if (place < run.second) {
    all.emplace(place, Cell{run.second, {}, {access}});
  }
  return false;
}

void check(const Region& region, bool is_write, const Launch& launch, const std::string& what) {
  const Merged merged = merge(region);
  if (merged.is_empty || merged.run == 0) {
    return;
  }
  Conflict found;
  bool is_found = false;
  {
    StateGuard guard(state_lock());
    if (count_runs(merged) <= kMaxRuns) {
      for (const Run& run : list_runs(merged)) {
        if (find_conflict(run, is_write, launch, nullptr, found)) {
          is_found = true;
          break;
        }
      }
    } else {
      is_found = find_conflict(bounds(merged), is_write, launch, std::make_shared<Region>(region), found);
    }
  }
  if (!is_found) {
    if (has_symmetric_memory()) {
      for (const Run& run : count_runs(merged) <= kMaxRuns ? list_runs(merged) : std::vector<Run>{bounds(merged)}) {
        check_peers(run.first, run.second, is_write, launch, what);
      }
    }
    return;
  }
  std::ostringstream text;
  text << "race: " << describe(launch.site, launch.stream->lane) << (is_write ? " writes " : " reads ") << what << ", which " << describe(found.earlier.site, found.earlier.lane)
       << (found.earlier_is_write ? " wrote" : " read") << " before, and no event or wait orders the two (device "
       << int(launch.stream->device) << ", bytes 0x" << std::hex << found.bytes.first << " to 0x" << found.bytes.second
       << std::dec << ")\n  the later access, innermost frame first:\n" << stack_of(launch.site)
       << "  the earlier access, innermost frame first:\n" << stack_of(found.earlier.site);
  report(text.str());
}

}  // namespace

std::string describe(const SitePtr& site, Lane lane) {
  return (site ? site->operation : "an unknown operation") + " on " + stream_of_lane(lane).name;
}

std::string stack_of(const SitePtr& site) {
  if (site == nullptr || site->frames.empty() || !python_hooks().format) {
    return "    (no Python frame)\n";
  }
  return python_hooks().format(site->frames);
}

PythonHooks& python_hooks() {
  static auto* instance = new PythonHooks;
  return *instance;
}

SitePtr make_site(std::string operation) {
  auto site = std::make_shared<Site>();
  site->operation = std::move(operation);
  if (python_hooks().frames) {
    site->frames = python_hooks().frames();
  }
  return site;
}

Launch begin_launch(Stream& stream, SitePtr site) {
  StateGuard guard(state_lock());
  return {&stream, stream.tick(), std::move(site)};
}

Launch begin_launch(Stream& stream, const std::string& operation) {
  SitePtr site = make_site(operation);
  StateGuard guard(state_lock());
  ++counts()[operation];
  return begin_launch(stream, std::move(site));
}

std::map<std::string, uint64_t> operation_counts() {
  StateGuard guard(state_lock());
  return {counts().begin(), counts().end()};
}

Region region_of(const at::Tensor& tensor) {
  const auto item_size = static_cast<int64_t>(tensor.element_size());
  Region region{reinterpret_cast<uintptr_t>(tensor.const_data_ptr()), tensor.sizes().vec(), tensor.strides().vec(), item_size};
  for (auto& stride : region.strides) {
    stride *= item_size;
  }
  return region;
}

void check_read(const Region& region, const Launch& launch, const std::string& what) {
  check(region, false, launch, what);
}

void check_write(const Region& region, const Launch& launch, const std::string& what) {
  check(region, true, launch, what);
}

void note_allocation(uintptr_t start, size_t size, const Launch& launch) {
  forget(start, size);
  cells().emplace(start, Cell{start + size, Access{launch.stream->lane, launch.time, launch.site, nullptr}, {}});
}

void forget(uintptr_t start, size_t size) {
  split_at(start);
  split_at(start + size);
  cells().erase(cells().lower_bound(start), cells().lower_bound(start + size));
}

std::optional<Unordered> unordered_access(
    uintptr_t start, size_t size, const Stream& stream, const std::function<bool(Lane)>& is_excused) {
  const auto is_unordered = [&](const Access& access) {
    return access.time != 0 && access.lane != stream.lane && !is_excused(access.lane) &&
        !stream.clock.covers(access.lane, access.time);
  };
  auto cell = cells().upper_bound(start);
  if (cell != cells().begin() && std::prev(cell)->second.end > start) {
    --cell;
  }
  for (; cell != cells().end() && cell->first < start + size; ++cell) {
    const auto& [end, write, reads] = cell->second;
    if (is_unordered(write)) {
      return Unordered{write.lane, write.site};
    }
    const auto read = std::find_if(reads.begin(), reads.end(), is_unordered);
    if (read != reads.end()) {
      return Unordered{read->lane, read->site};
    }
  }
  return std::nullopt;
}

void report(const std::string& message) {
  {
    StateGuard guard(state_lock());
    kept_reports().push_back(message);
    if (const char* path = std::getenv("EMULATED_CUDA_REPORTS")) {
      std::ofstream file(path, std::ios::app);
      file << "process " << getpid() << ": " << message << std::endl;
    }
  }
  TORCH_CHECK(false, "emulated CUDA: ", message);
}

std::vector<std::string> reports() {
  StateGuard guard(state_lock());
  return kept_reports();
}

void clear_reports() {
  StateGuard guard(state_lock());
  kept_reports().clear();
}

}  // namespace emulated_cuda
