// How often each operation was launched, by name: what shows which kernels a run has called.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace emulated_cuda {

std::map<std::string, uint64_t> operation_counts();

}  // namespace emulated_cuda
