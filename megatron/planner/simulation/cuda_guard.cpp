// Lets torch run autograd over fake tensors whose device is CUDA, on a node without a GPU.
//
// Autograd needs a device guard, hooks, and sometimes a generator. Here they do nothing, since no tensor has memory.
// The library must be loaded before torch is imported, since torch looks the hooks up only once. In a CUDA build of
// torch, the guard and the hooks replace those of CUDA, which are registered earlier.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

const Device kOnlyDevice(DeviceType::CUDA, 0);

struct IdleGuard : public c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return kOnlyDevice; }
  Device getDevice() const override { return kOnlyDevice; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, kOnlyDevice); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, kOnlyDevice); }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(CUDA, IdleGuard);

struct IdleGenerator : public at::CPUGeneratorImpl {
  IdleGenerator() { device_ = kOnlyDevice; }
};

}  // namespace

namespace at {

struct IdleHooks : public CUDAHooksInterface {
  explicit IdleHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  bool isPinnedPtr(const void*) const override { return false; }
  Generator getNewGenerator(DeviceIndex) const override { return make_generator<IdleGenerator>(); }
};
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(CUDAHooksRegistry, "CUDAHooks", c10::REGISTRY_PREFERRED, IdleHooks)

}  // namespace at
