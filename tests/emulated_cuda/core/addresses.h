// Which device an address belongs to.
#pragma once

#include <c10/core/Device.h>

#include <optional>

namespace emulated_cuda {

// Of memory of the allocator; nothing for other memory.
std::optional<c10::DeviceIndex> device_of_block(const void* address);
bool is_symmetric_memory(const void* address);

}  // namespace emulated_cuda
