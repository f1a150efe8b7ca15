#pragma once

#include <cstdint>

namespace emulated_cuda {

// How often the host has waited for a stream, an event or a device; a query is no wait.
uint64_t host_wait_count();

}  // namespace emulated_cuda
