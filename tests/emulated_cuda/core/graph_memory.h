#pragma once

#include <cstdint>

namespace emulated_cuda {

// The number of the allocation that has an address, or 0: for host memory, released memory and pools of graphs.
uint64_t lasting_allocation(uintptr_t address);

}  // namespace emulated_cuda
