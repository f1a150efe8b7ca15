// SIMD versions of fill_blend_block of blend.h for x86 processors, selected at run time.

#pragma once

#include "blend.h"

#if defined(__x86_64__) && defined(__GNUC__)
#if !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false positive in a compiler header
#endif
#include <immintrin.h>

namespace megatron {

// The largest error stays in a vector, broadcast to all lanes, between steps: moving it to a scalar register and back
// would take as long as everything else.
__attribute__((target("avx2"))) inline int64_t fill_blend_block_avx2(BlendState& state, int64_t begin, int64_t end,
                                                                     int16_t* dataset, int64_t* sample) {
  const auto num_errors = static_cast<int>(state.num_errors);
  const __m256i* growth = reinterpret_cast<const __m256i*>(state.growth);
  const __m256i one = _mm256_set1_epi32(state.one);
  const __m256i margin = _mm256_set1_epi32(state.margin);
  const __m256i first_marks = _mm256_setr_epi32(1 << 16, 65537, 65538, 65539, 65540, 65541, 65542, 65543);
  __m256i best = _mm256_set1_epi32(*std::max_element(state.errors, state.errors + num_errors));
  for (int64_t step = begin; step < end; ++step) {
    if (_mm256_cvtsi256_si32(best) < state.lowest) return step;
    const __m256i close = _mm256_sub_epi32(best, margin);
    const __m256i* errors = reinterpret_cast<const __m256i*>(state.errors);
    __m256i* next_errors = reinterpret_cast<__m256i*>(state.next_errors);
    __m256i found[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    __m256i marks[2] = {first_marks, _mm256_add_epi32(first_marks, _mm256_set1_epi32(8))};
    __m256i bests[2] = {_mm256_set1_epi32(BlendState::kNever), _mm256_set1_epi32(BlendState::kNever)};
    for (int v = 0; v < num_errors / 8; v += 2)
      for (int half = 0; half < 2; ++half) {
        const __m256i error = _mm256_load_si256(errors + v + half);
        const __m256i is_close = _mm256_cmpgt_epi32(error, close);
        found[half] = _mm256_add_epi32(found[half], _mm256_and_si256(is_close, marks[half]));
        marks[half] = _mm256_add_epi32(marks[half], _mm256_set1_epi32(16));
        const __m256i grown = _mm256_add_epi32(error, _mm256_load_si256(growth + v + half));
        const __m256i next_error = _mm256_sub_epi32(grown, _mm256_and_si256(is_close, one));
        _mm256_store_si256(next_errors + v + half, next_error);
        bests[half] = _mm256_max_epi32(bests[half], next_error);
      }
    best = _mm256_max_epi32(bests[0], bests[1]);
    best = _mm256_max_epi32(best, _mm256_permute2x128_si256(best, best, 1));
    best = _mm256_max_epi32(best, _mm256_shuffle_epi32(best, 0x4e));
    best = _mm256_max_epi32(best, _mm256_shuffle_epi32(best, 0xb1));
    __m256i sum = _mm256_add_epi32(found[0], found[1]);
    sum = _mm256_add_epi32(sum, _mm256_permute2x128_si256(sum, sum, 1));
    sum = _mm256_add_epi32(sum, _mm256_shuffle_epi32(sum, 0x4e));
    sum = _mm256_add_epi32(sum, _mm256_shuffle_epi32(sum, 0xb1));
    const auto place = static_cast<uint32_t>(_mm256_cvtsi256_si32(sum));
    const bool is_clear = place >> 16 == 1;
    const std::size_t e =
        is_clear ? place & 0xffffu : state.find_largest_error(step, _mm256_cvtsi256_si32(close));
    const Turn turn = state.take(e, dataset + step, sample + step);
    if (turn == Turn::kSpends) return step + 1;
    if (turn == Turn::kStays || !is_clear)
      best = _mm256_set1_epi32(state.correct_next_errors(e, turn, is_clear, _mm256_cvtsi256_si32(best)));
    std::swap(state.errors, state.next_errors);
  }
  return end;
}

// Faster than AVX2 from a few hundred errors.
__attribute__((target("avx512f"))) inline int64_t fill_blend_block_avx512(BlendState& state, int64_t begin, int64_t end,
                                                                          int16_t* dataset, int64_t* sample) {
  const auto num_errors = static_cast<int>(state.num_errors);
  const int32_t* growth = state.growth;
  const __m512i one = _mm512_set1_epi32(state.one);
  const __m512i margin = _mm512_set1_epi32(state.margin);
  const __m512i first_marks =
      _mm512_setr_epi32(1 << 16, 65537, 65538, 65539, 65540, 65541, 65542, 65543, 65544, 65545, 65546, 65547, 65548,
                        65549, 65550, 65551);
  __m512i best = _mm512_set1_epi32(*std::max_element(state.errors, state.errors + num_errors));
  for (int64_t step = begin; step < end; ++step) {
    if (_mm512_cvtsi512_si32(best) < state.lowest) return step;
    const __m512i close = _mm512_sub_epi32(best, margin);
    const int32_t* errors = state.errors;
    int32_t* next_errors = state.next_errors;
    __m512i found = _mm512_setzero_si512();
    __m512i marks = first_marks;
    best = _mm512_set1_epi32(BlendState::kNever);
    for (int i = 0; i < num_errors; i += 16) {
      const __m512i error = _mm512_load_si512(errors + i);
      const __mmask16 is_close = _mm512_cmpgt_epi32_mask(error, close);
      found = _mm512_mask_add_epi32(found, is_close, found, marks);
      marks = _mm512_add_epi32(marks, _mm512_set1_epi32(16));
      const __m512i grown = _mm512_add_epi32(error, _mm512_load_si512(growth + i));
      const __m512i next_error = _mm512_mask_sub_epi32(grown, is_close, grown, one);
      _mm512_store_si512(next_errors + i, next_error);
      best = _mm512_max_epi32(best, next_error);
    }
    best = _mm512_max_epi32(best, _mm512_shuffle_i64x2(best, best, 0x4e));
    best = _mm512_max_epi32(best, _mm512_shuffle_i64x2(best, best, 0xb1));
    best = _mm512_max_epi32(best, _mm512_shuffle_epi32(best, _MM_PERM_BADC));
    best = _mm512_max_epi32(best, _mm512_shuffle_epi32(best, _MM_PERM_CDAB));
    const auto place = static_cast<uint32_t>(_mm512_reduce_add_epi32(found));
    const bool is_clear = place >> 16 == 1;
    const std::size_t e =
        is_clear ? place & 0xffffu : state.find_largest_error(step, _mm512_cvtsi512_si32(close));
    const Turn turn = state.take(e, dataset + step, sample + step);
    if (turn == Turn::kSpends) return step + 1;
    if (turn == Turn::kStays || !is_clear)
      best = _mm512_set1_epi32(state.correct_next_errors(e, turn, is_clear, _mm512_cvtsi512_si32(best)));
    std::swap(state.errors, state.next_errors);
  }
  return end;
}

#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif

// Return the function for vectors of ``bits`` (32: scalar, 0: the fastest on this CPU), or nullptr if unsupported.
inline FillBlendBlock choose_fill_blend_block(std::size_t num_datasets, int bits) {
  const bool has_256 = __builtin_cpu_supports("avx2");
  const bool has_512 = __builtin_cpu_supports("avx512f");
  if (bits == 0) bits = has_512 && num_datasets >= 192 ? 512 : has_256 ? 256 : 32;
  if (bits == 512 && has_512) return fill_blend_block_avx512;
  if (bits == 256 && has_256) return fill_blend_block_avx2;
  return bits == 32 ? fill_blend_block : nullptr;
}

}  // namespace megatron

#else

namespace megatron {

inline FillBlendBlock choose_fill_blend_block(std::size_t, int bits) {
  return bits == 0 || bits == 32 ? fill_blend_block : nullptr;
}

}  // namespace megatron

#endif
