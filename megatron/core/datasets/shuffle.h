// Shuffle with the same result as numpy.random.RandomState, and update its state.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace megatron {

// The 32-bit Mersenne Twister, continued from the state of a numpy.random.RandomState.
class MersenneTwister {
 public:
  static constexpr int kWords = 624;

  MersenneTwister(const uint32_t* key, int position) : position_(position) {
    std::memcpy(key_, key, sizeof(key_));
    temper();
  }

  uint32_t next() {
    if (position_ == kWords) refill();
    return tempered_[position_++];
  }

  const uint32_t* key() const { return key_; }
  int position() const { return position_; }

 private:
  static constexpr int kShift = 397;

  static uint32_t twist(uint32_t high, uint32_t low) {
    const uint32_t mixed = (high & 0x80000000u) | (low & 0x7fffffffu);
    return (mixed >> 1) ^ ((0u - (low & 1u)) & 0x9908b0dfu);
  }

  void refill() {
    int i = 0;
    for (; i < kWords - kShift; ++i) key_[i] = key_[i + kShift] ^ twist(key_[i], key_[i + 1]);
    for (; i < kWords - 1; ++i) key_[i] = key_[i + kShift - kWords] ^ twist(key_[i], key_[i + 1]);
    key_[i] = key_[kShift - 1] ^ twist(key_[i], key_[0]);
    position_ = 0;
    temper();
  }

  void temper() {
    for (int i = 0; i < kWords; ++i) {
      uint32_t y = key_[i];
      y ^= y >> 11;
      y ^= (y << 7) & 0x9d2c5680u;
      y ^= (y << 15) & 0xefc60000u;
      y ^= y >> 18;
      tempered_[i] = y;
    }
  }

  uint32_t key_[kWords];
  uint32_t tempered_[kWords];
  int position_;
};

inline uint32_t all_ones_from(uint32_t value) {
  value |= value >> 1;
  value |= value >> 2;
  value |= value >> 4;
  value |= value >> 8;
  value |= value >> 16;
  return value;
}

// Fisher-Yates shuffle from the back. Each target is drawn by rejection under a bit mask, as in RandomState.shuffle.
// Targets are drawn in blocks, so that their memory can be prefetched.
template <typename T>
void shuffle_in_place(T* data, std::size_t size, MersenneTwister& random) {
  constexpr uint32_t kBlock = 256;
  uint32_t targets[kBlock + 1];
  if (size < 2) return;
  uint32_t last = static_cast<uint32_t>(size - 1);
  while (last > 0) {
    const uint32_t block_last = last;
    uint32_t drawn = 0;
    while (drawn < kBlock && last > 0) {
      const uint32_t mask = all_ones_from(last);
      const uint32_t stop = drawn + std::min(kBlock - drawn, last - (mask >> 1));
      while (drawn < stop) {
        const uint32_t target = random.next() & mask;
        targets[drawn] = target;
        const uint32_t accepted = target <= last ? 1u : 0u;
        __builtin_prefetch(data + (accepted ? target : last), 1);
        drawn += accepted;
        last -= accepted;
      }
    }
    for (uint32_t i = 0; i < drawn; ++i) std::swap(data[block_last - i], data[targets[i]]);
  }
}

}  // namespace megatron
