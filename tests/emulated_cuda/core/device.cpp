// The device as torch sees it: guard, hooks and allocators.
#include "addresses.h"
#include "generator.h"
#include "memory.h"
#include "streams.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace emulated_cuda {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

Device cuda(DeviceIndex index) {
  return {DeviceType::CUDA, index};
}

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override {
    return DeviceType::CUDA;
  }
  Device exchangeDevice(Device device) const override {
    return cuda(device.has_index() ? exchange_device(device.index()) : current_device());
  }
  Device getDevice() const override {
    return cuda(current_device());
  }
  void setDevice(Device device) const override {
    exchangeDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index() && device.index() < device_count()) {
      exchange_device(device.index());
    }
  }
  c10::Stream getStream(Device device) const override {
    return current_stream(device.has_index() ? device.index() : current_device()).handle();
  }
  c10::Stream getDefaultStream(Device device) const override {
    return default_stream(device.has_index() ? device.index() : current_device()).handle();
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool is_high_priority) const override {
    return pool_stream(device.index(), is_high_priority ? -1 : 0).handle();
  }
  c10::Stream getNewStream(Device device, int priority) const override {
    return pool_stream(device.has_index() ? device.index() : current_device(), priority).handle();
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return exchange_stream(find_stream(stream)).handle();
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event;
    }
    record_event(*static_cast<Event*>(*event), find_stream(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      stream_waits(find_stream(stream), *static_cast<Event*>(event));
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || query_event(*static_cast<Event*>(event));
  }
  DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }
  bool queryStream(const c10::Stream& stream) const override {
    return query_stream(find_stream(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize_stream(find_stream(stream));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      synchronize_event(*static_cast<Event*>(event));
    }
  }
  void synchronizeDevice(DeviceIndex device) const override {
    synchronize_device(device);
  }
  bool isStreamCapturing(const c10::Stream& stream) const override {
    return find_stream(stream).capture != nullptr;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, find_stream(stream));
  }
  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    return static_cast<Event*>(second)->milliseconds - static_cast<Event*>(first)->milliseconds;
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct Installation {
  Installation() {
    c10::SetAllocator(DeviceType::CUDA, &device_allocator());
    install_kernel_allocator();
    install_pinned_allocator();
  }
};
const Installation installation;

}  // namespace
}  // namespace emulated_cuda

namespace at {

struct EmulatedHooks final : public CUDAHooksInterface {
  explicit EmulatedHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return emulated_cuda::device_count();
  }
  int getNumGPUs() const override {
    return emulated_cuda::device_count();
  }
  DeviceIndex current_device() const override {
    return emulated_cuda::current_device();
  }
  DeviceIndex getCurrentDevice() const override {
    return emulated_cuda::current_device();
  }
  void setCurrentDevice(DeviceIndex device) const override {
    emulated_cuda::exchange_device(device);
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return emulated_cuda::exchange_device(device);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return emulated_cuda::exchange_device(device);
  }
  Device getDeviceFromPtr(void* data) const override {
    // Memory of other ranks is mapped for this one's device.
    const auto device = emulated_cuda::is_symmetric_memory(data) ? std::optional(emulated_cuda::current_device())
                                                                 : emulated_cuda::device_of_block(data);
    TORCH_CHECK(device, "The specified pointer resides on host memory and is not registered with any CUDA device.");
    return {DeviceType::CUDA, *device};
  }
  bool isPinnedPtr(const void* data) const override {
    return emulated_cuda::is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return at::getHostAllocator(c10::DeviceType::CUDA);
  }
  c10::Allocator* getCUDADeviceAllocator() const override {
    return &emulated_cuda::device_allocator();
  }
  const Generator& getDefaultGenerator(DeviceIndex device) const override {
    return emulated_cuda::default_generator(device);
  }
  Generator getNewGenerator(DeviceIndex device) const override {
    return emulated_cuda::new_generator(device);
  }
  void deviceSynchronize(DeviceIndex device) const override {
    emulated_cuda::synchronize_device(device);
  }
};
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", EmulatedHooks)

}  // namespace at
