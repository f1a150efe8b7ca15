// Compute the start of each sample in a sequence of documents.

#pragma once

#include <cstdint>
#include <stdexcept>

namespace megatron {

// Write the sample boundaries within each document, in one pass over the documents.
//
// The number of boundaries per document is practically random, so a loop over them would cost a branch misprediction
// per document. Instead, kRows rows are always written, and the next document overwrites the superfluous ones.
template <typename Index>
void fill_sample_index(const int32_t* lengths, int64_t num_lengths, const int32_t* documents, int64_t num_documents,
                       int64_t sequence_length, int64_t num_samples, Index* out) {
  constexpr int64_t kAhead = 32;
  constexpr int64_t kRows = 4;
  out[0] = 0;
  out[1] = 0;
  int64_t sample = 1;
  int64_t boundary = sequence_length;  // relative to the start of the current document
  for (int64_t d = 0; d < num_documents && sample <= num_samples; ++d) {
    if (d + kAhead < num_documents) __builtin_prefetch(lengths + documents[d + kAhead]);
    const int64_t sequence = documents[d];
    if (sequence < 0 || sequence >= num_lengths) throw std::out_of_range("document index holds an unknown sequence");
    const int64_t length = lengths[sequence];
    if (sample + kRows <= num_samples) {
      Index* row = out + 2 * sample;
      int64_t count = 0;
      for (int64_t k = 0; k < kRows; ++k) {
        const int64_t offset = boundary + k * sequence_length;
        row[2 * k] = static_cast<Index>(d);
        row[2 * k + 1] = static_cast<Index>(offset);
        count += offset < length ? 1 : 0;
      }
      sample += count;
      boundary += count * sequence_length;
    }
    while (boundary < length && sample <= num_samples) {
      out[2 * sample] = static_cast<Index>(d);
      out[2 * sample + 1] = static_cast<Index>(boundary);
      ++sample;
      boundary += sequence_length;
    }
    boundary -= length;
  }
  if (sample < num_samples) throw std::invalid_argument("the documents hold fewer tokens than the samples need");
  if (sample == num_samples) {  // a partial last sample ends with the last token
    out[2 * sample] = static_cast<Index>(num_documents - 1);
    out[2 * sample + 1] = static_cast<Index>(lengths[documents[num_documents - 1]] - 1);
  }
}

}  // namespace megatron
