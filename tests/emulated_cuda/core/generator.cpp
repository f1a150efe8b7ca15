#include "generator.h"

#include "streams.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstring>

namespace emulated_cuda {
namespace {

constexpr int64_t kStateBytes = 16;
// CUDA's kernels move the offset by multiples of 4.
constexpr uint64_t kOffsetStep = 4;

uint64_t mix(uint64_t seed, uint64_t offset) {
  uint64_t value = seed + 0x9E3779B97F4A7C15ULL * (offset / kOffsetStep);
  if (offset == 0) {
    return seed;
  }
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ULL;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBULL;
  return value ^ (value >> 31);
}

}  // namespace

DeviceGenerator::DeviceGenerator(c10::DeviceIndex device)
    : GeneratorImpl(c10::Device(c10::DeviceType::CUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}

void DeviceGenerator::set_current_seed(uint64_t seed) {
  seed_ = seed;
  offset_ = 0;
}

void DeviceGenerator::set_offset(uint64_t offset) {
  offset_ = offset;
}

uint64_t DeviceGenerator::get_offset() const {
  return offset_;
}

uint64_t DeviceGenerator::current_seed() const {
  return seed_;
}

uint64_t DeviceGenerator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return seed_;
}

void DeviceGenerator::set_state(const c10::TensorImpl& state) {
  TORCH_CHECK(state.numel() == kStateBytes && state.dtype() == caffe2::TypeMeta::Make<uint8_t>(),
              "RNG state is wrong size: a CUDA generator has ", kStateBytes, " bytes, and ", state.numel(), " are given");
  const auto* bytes = static_cast<const char*>(state.data());
  std::memcpy(&seed_, bytes, 8);
  std::memcpy(&offset_, bytes + 8, 8);
}

c10::intrusive_ptr<c10::TensorImpl> DeviceGenerator::get_state() const {
  at::Tensor state = at::empty({kStateBytes}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
  auto* bytes = static_cast<char*>(state.mutable_data_ptr());
  std::memcpy(bytes, &seed_, 8);
  std::memcpy(bytes + 8, &offset_, 8);
  return state.getIntrusivePtr();
}

at::Generator DeviceGenerator::next_kernel() {
  std::lock_guard<std::mutex> guard(mutex_);
  at::Generator generator = at::detail::createCPUGenerator(mix(seed_, offset_));
  offset_ += kOffsetStep;
  return generator;
}

DeviceGenerator* DeviceGenerator::clone_impl() const {
  auto* copy = new DeviceGenerator(device().index());
  copy->seed_ = seed_;
  copy->offset_ = offset_;
  return copy;
}

at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* generators = new std::array<at::Generator, kMaxDevices>;
  StateGuard guard(state_lock());
  auto& generator = generators->at(device < 0 ? current_device() : device);
  if (!generator.defined()) {
    generator = new_generator(device < 0 ? current_device() : device);
  }
  return generator;
}

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<DeviceGenerator>(device < 0 ? current_device() : device);
}

GeneratorPositions generator_positions() {
  GeneratorPositions positions;
  for (c10::DeviceIndex device = 0; device < device_count(); ++device) {
    const auto& generator = default_generator(device);
    positions.emplace_back(generator.current_seed(), generator.get_offset());
  }
  return positions;
}

void restore_generators(const GeneratorPositions& positions) {
  for (size_t device = 0; device < positions.size(); ++device) {
    auto& generator = default_generator(static_cast<c10::DeviceIndex>(device));
    generator.set_current_seed(positions[device].first);
    generator.set_offset(positions[device].second);
  }
}

}  // namespace emulated_cuda
