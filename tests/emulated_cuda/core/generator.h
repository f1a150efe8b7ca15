// Random generators of a device. As on CUDA, their state is a seed and an offset, 16 bytes.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

#include <atomic>
#include <vector>

namespace emulated_cuda {

class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  explicit DeviceGenerator(c10::DeviceIndex device);

  void set_current_seed(uint64_t seed) override;
  void set_offset(uint64_t offset) override;
  uint64_t get_offset() const override;
  uint64_t current_seed() const override;
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

  // A generator for one kernel on the CPU, which draws what comes at the offset; the offset moves on.
  at::Generator next_kernel();

 private:
  DeviceGenerator* clone_impl() const override;

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);

// Seeds and offsets of the default generators, which a capture must not move.
using GeneratorPositions = std::vector<std::pair<uint64_t, uint64_t>>;
GeneratorPositions generator_positions();
void restore_generators(const GeneratorPositions& positions);

}  // namespace emulated_cuda
