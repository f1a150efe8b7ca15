// Compute the order in which a blend takes samples from its data sets.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

namespace megatron {

// Data sets of equal weight and size take turns in order of their number, so that one entry represents all of them.
struct BlendEntry {
  double weight;
  double taken;  // samples taken from the next member
  double size;   // samples of each member; -1 if unlimited
  uint16_t first_member;
  uint16_t end_member;
  uint16_t turn;
};

enum class Turn { kFalls, kStays, kSpends };  // effect of taking a sample on the error of an entry

// The state of a blend between two steps. Errors are integers, because SIMD instructions compare many of them at once.
class BlendState {
 public:
  static constexpr int64_t kBlock = 128;  // steps for which one conversion to integers is valid
  static constexpr int32_t kNever = std::numeric_limits<int32_t>::min() / 2;

  // Without sizes, no data set is ever exhausted.
  BlendState(const double* weights, const int64_t* sizes, std::size_t num_datasets) {
    std::vector<int16_t> order(num_datasets);
    std::iota(order.begin(), order.end(), static_cast<int16_t>(0));
    const auto size_of = [sizes](int16_t d) { return sizes == nullptr ? int64_t{-1} : sizes[d]; };
    std::stable_sort(order.begin(), order.end(), [&](int16_t a, int16_t b) {
      return weights[a] != weights[b] ? weights[a] > weights[b] : size_of(a) < size_of(b);
    });
    for (const int16_t d : order) {
      const auto size = static_cast<double>(size_of(d));
      if (size == 0.0) continue;
      const auto place = static_cast<uint16_t>(members_.size());
      if (entries_.empty() || entries_.back().weight != weights[d] || entries_.back().size != size)
        entries_.push_back({weights[d], 0.0, size, place, place, place});
      members_.push_back(d);
      entries_.back().end_member += 1;
    }
    num_errors = (entries_.size() + kAligned - 1) / kAligned * kAligned;
    storage_.resize(3 * num_errors + kAligned);
    const std::size_t misplaced = reinterpret_cast<std::uintptr_t>(storage_.data()) / sizeof(int32_t) % kAligned;
    errors = storage_.data() + (kAligned - misplaced) % kAligned;
    next_errors = errors + num_errors;
    growth = next_errors + num_errors;
  }

  BlendState(const BlendState&) = delete;
  BlendState& operator=(const BlendState&) = delete;

  bool has_one_entry() const { return entries_.size() == 1; }

  // Convert the errors at ``step``, relative to the largest, to integers.
  //
  // An integer deviates by its own rounding, by the rounding of its growth at each step, and by the floating-point
  // rounding error, which grows with the position. An error far below the largest is clamped to a limit that cannot
  // become the largest within the block.
  void convert_errors(int64_t step) {
    double largest_error = -std::numeric_limits<double>::infinity();
    double largest_weight = 0.0;
    for (const BlendEntry& entry : entries_) {
      if (entry.taken == entry.size) continue;
      largest_error = std::max(largest_error, error_of(entry, step));
      largest_weight = std::max(largest_weight, entry.weight);
    }
    const double reach = static_cast<double>(kBlock) * largest_weight + 3.0;
    const double unit = std::exp2(29.0 - std::ceil(std::log2(reach)));
    const double rounded_away = largest_weight * position_of(step + kBlock) * std::exp2(-49.0) * unit;
    one = static_cast<int32_t>(unit);
    margin = static_cast<int32_t>(static_cast<double>(kBlock + 8) + rounded_away);
    lowest = -one;
    std::fill(errors, errors + num_errors, kNever);
    std::fill(growth, growth + num_errors, 0);
    for (std::size_t e = 0; e < entries_.size(); ++e) {
      const BlendEntry& entry = entries_[e];
      if (entry.taken == entry.size) continue;
      growth[e] = static_cast<int32_t>(std::lround(entry.weight * unit));
      errors[e] = static_cast<int32_t>(std::lround(std::max(error_of(entry, step) - largest_error, -reach) * unit));
    }
  }

  // Compare the entries whose integers are above ``close`` in floating point; ties go to the lowest data set.
  std::size_t find_largest_error(int64_t step, int32_t close) const {
    std::size_t best = entries_.size();
    double best_error = 0.0;
    for (std::size_t e = 0; e < entries_.size(); ++e) {
      if (errors[e] <= close) continue;
      const double error = error_of(entries_[e], step);
      const bool is_tie = best != entries_.size() && error == best_error;
      if (is_tie ? next_of(e) > next_of(best) : best != entries_.size() && error < best_error) continue;
      best = e;
      best_error = error;
    }
    return best;
  }

  // Take the next sample from an entry, and write its data set and index.
  Turn take(std::size_t e, int16_t* dataset, int64_t* sample) {
    BlendEntry& entry = entries_[e];
    *dataset = members_[entry.turn];
    *sample = static_cast<int64_t>(entry.taken);
    entry.turn += 1;
    if (entry.turn != entry.end_member) return Turn::kStays;
    entry.turn = entry.first_member;
    entry.taken += 1.0;
    return entry.taken == entry.size ? Turn::kSpends : Turn::kFalls;
  }

  // Correct the next errors if entries other than the chosen one were decremented, or if the chosen one should not
  // have been. Return the largest error.
  int32_t correct_next_errors(std::size_t e, Turn turn, bool is_clear, int32_t best) {
    if (is_clear) {
      next_errors[e] += one;
      return std::max(best, next_errors[e]);
    }
    best = kNever;
    for (std::size_t i = 0; i < num_errors; ++i) {
      next_errors[i] = errors[i] + growth[i] - (turn == Turn::kFalls && i == e ? one : 0);
      best = std::max(best, next_errors[i]);
    }
    return best;
  }

  std::size_t num_errors;
  int32_t* errors;
  int32_t* next_errors;
  int32_t* growth;      // increment of each error per step
  int32_t one = 0;      // an error of 1
  int32_t margin = 0;   // a larger difference between integers has the same sign in floating point
  int32_t lowest = 0;   // if the largest error is lower, the errors must be converted again

 private:
  static constexpr std::size_t kAligned = 16;  // integers per vector of the widest instruction set

  static double position_of(int64_t step) { return static_cast<double>(std::max<int64_t>(step, 1)); }
  static double error_of(const BlendEntry& entry, int64_t step) {
    return entry.weight * position_of(step) - entry.taken;
  }
  int16_t next_of(std::size_t e) const { return members_[entries_[e].turn]; }

  std::vector<BlendEntry> entries_;
  std::vector<int16_t> members_;  // data sets, grouped by entry
  std::vector<int32_t> storage_;
};

// Fills the steps from ``begin`` and returns the first step that needs a conversion, or ``end``.
using FillBlendBlock = int64_t (*)(BlendState& state, int64_t begin, int64_t end, int16_t* dataset, int64_t* sample);

// Portable implementation; blend_x86.h has the SIMD versions.
//
// One pass finds the entries close to the largest error and computes the errors of the next step as if there were only
// one such entry, which is then the entry to take. ``found`` counts these entries in its upper half and sums their
// indices in its lower half, which is the index if there is only one.
inline int64_t fill_blend_block(BlendState& state, int64_t begin, int64_t end, int16_t* dataset, int64_t* sample) {
  const auto num_errors = static_cast<uint32_t>(state.num_errors);
  const int32_t one = state.one;
  const int32_t* __restrict growth = state.growth;
  int32_t best = *std::max_element(state.errors, state.errors + num_errors);
  for (int64_t step = begin; step < end; ++step) {
    if (best < state.lowest) return step;
    const int32_t close = best - state.margin;
    const int32_t* __restrict errors = state.errors;
    int32_t* __restrict next_errors = state.next_errors;
    uint32_t found = 0;
    best = BlendState::kNever;
    for (uint32_t e = 0; e < num_errors; ++e) {
      const bool is_close = errors[e] > close;
      found += is_close ? 1u << 16 | e : 0u;
      const int32_t next_error = errors[e] + growth[e] - (is_close ? one : 0);
      next_errors[e] = next_error;
      best = std::max(best, next_error);
    }
    const bool is_clear = found >> 16 == 1;
    const std::size_t e = is_clear ? found & 0xffffu : state.find_largest_error(step, close);
    const Turn turn = state.take(e, dataset + step, sample + step);
    if (turn == Turn::kSpends) return step + 1;
    if (turn == Turn::kStays || !is_clear) best = state.correct_next_errors(e, turn, is_clear, best);
    std::swap(state.errors, state.next_errors);
  }
  return end;
}

// For each step, take the data set with the largest error, weight * max(step, 1) - taken; ties go to the lowest one.
//
// The reference is a scan over all data sets in floating point. Here the scan is over integers, and floating point
// decides if they are too close. The result is identical, including ties.
//
// Weights are from 0 to 1, and there are fewer than 2**50 steps. With sizes, the number of steps is the sum of sizes.
inline void fill_blend(FillBlendBlock fill_block, const double* weights, const int64_t* sizes, std::size_t num_datasets,
                       int64_t num_steps, int16_t* dataset, int64_t* sample) {
  BlendState state(weights, sizes, num_datasets);
  if (state.has_one_entry()) {
    for (int64_t step = 0; step < num_steps; ++step) state.take(0, dataset + step, sample + step);
    return;
  }
  for (int64_t step = 0; step < num_steps;) {
    state.convert_errors(step);
    // Steps 0 and 1 have the same position, so the errors do not grow between them.
    const int64_t end = step == 0 ? 1 : std::min(step + BlendState::kBlock, num_steps);
    step = fill_block(state, step, end, dataset, sample);
  }
}

}  // namespace megatron
