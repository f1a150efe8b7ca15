// Compiled twins of the functions in index_builder.py. They return the same arrays, bit for bit: compile without
// floating-point contraction, because a fused multiply-add would break ties between data sets of a blend.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

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

uint32_t all_ones_from(uint32_t value) {
  value |= value >> 1;
  value |= value >> 2;
  value |= value >> 4;
  value |= value >> 8;
  value |= value >> 16;
  return value;
}

// Fisher-Yates from the back, each target drawn by rejection under a bit mask: the stream of RandomState.shuffle.
// Targets are drawn in blocks so that the memory they point at is on its way before it is needed.
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

template <typename T>
int shuffle(Array<T> values, Array<uint32_t> key, int position) {
  if (key.size() != MersenneTwister::kWords || position < 0 || position > MersenneTwister::kWords)
    throw std::invalid_argument("not the state of a Mersenne Twister");
  if (static_cast<std::uint64_t>(values.size()) > std::numeric_limits<uint32_t>::max())
    throw std::invalid_argument("too many values for 32-bit targets");
  T* data = values.mutable_data();
  uint32_t* state = key.mutable_data();
  const std::size_t size = static_cast<std::size_t>(values.size());
  py::gil_scoped_release release;
  MersenneTwister random(state, position);
  shuffle_in_place(data, size, random);
  std::memcpy(state, random.key(), sizeof(uint32_t) * MersenneTwister::kWords);
  return random.position();
}

// One pass over the documents: emit every sample boundary that falls into each.
template <typename Index>
void fill_sample_index(const int32_t* lengths, int64_t num_lengths, const int32_t* documents, int64_t num_documents,
                       int64_t sequence_length, int64_t num_samples, Index* out) {
  constexpr int64_t kAhead = 24;
  out[0] = 0;
  out[1] = 0;
  int64_t sample = 1;
  int64_t boundary = sequence_length;  // relative to the start of the current document
  for (int64_t d = 0; d < num_documents && sample <= num_samples; ++d) {
    if (d + kAhead < num_documents) __builtin_prefetch(lengths + documents[d + kAhead]);
    const int64_t sequence = documents[d];
    if (sequence < 0 || sequence >= num_lengths) throw std::out_of_range("document index holds an unknown sequence");
    const int64_t length = lengths[sequence];
    while (boundary < length && sample <= num_samples) {
      out[2 * sample] = static_cast<Index>(d);
      out[2 * sample + 1] = static_cast<Index>(boundary);
      ++sample;
      boundary += sequence_length;
    }
    boundary -= length;
  }
  if (sample < num_samples) throw std::invalid_argument("the documents hold fewer tokens than the samples need");
  if (sample == num_samples) {  // the last sample is a partial one: it ends with the last token
    out[2 * sample] = static_cast<Index>(num_documents - 1);
    out[2 * sample + 1] = static_cast<Index>(lengths[documents[num_documents - 1]] - 1);
  }
}

template <typename Index>
Array<Index> sample_index(Array<int32_t> lengths, Array<int32_t> documents, int64_t sequence_length,
                          int64_t num_samples) {
  if (sequence_length < 1 || num_samples < 0) throw std::invalid_argument("sequence length or sample count too small");
  if (num_samples > 0 && documents.size() == 0) throw std::invalid_argument("no documents");
  Array<Index> result({static_cast<py::ssize_t>(num_samples + 1), static_cast<py::ssize_t>(2)});
  const int32_t* length_data = lengths.data();
  const int32_t* document_data = documents.data();
  Index* out = result.mutable_data();
  const int64_t num_lengths = lengths.size();
  const int64_t num_documents = documents.size();
  py::gil_scoped_release release;
  fill_sample_index(length_data, num_lengths, document_data, num_documents, sequence_length, num_samples, out);
  return result;
}

void fill_blend(const double* weights, std::size_t num_datasets, int64_t size, int16_t* dataset, int64_t* sample) {
  std::vector<double> taken(num_datasets, 0.0);
  for (int64_t i = 0; i < size; ++i) {
    const double position = static_cast<double>(std::max<int64_t>(i, 1));
    std::size_t best = 0;
    double best_error = weights[0] * position - taken[0];
    for (std::size_t d = 1; d < num_datasets; ++d) {
      const double error = weights[d] * position - taken[d];
      if (error > best_error) {
        best_error = error;
        best = d;
      }
    }
    dataset[i] = static_cast<int16_t>(best);
    sample[i] = static_cast<int64_t>(taken[best]);
    taken[best] += 1.0;
  }
}

py::tuple blending_indices(Array<double> weights, int64_t size) {
  if (weights.size() < 1 || weights.size() > std::numeric_limits<int16_t>::max() || size < 0)
    throw std::invalid_argument("a blend needs 1 to 32767 data sets and a size of 0 or more");
  Array<int16_t> dataset(static_cast<py::ssize_t>(size));
  Array<int64_t> sample(static_cast<py::ssize_t>(size));
  const double* weight_data = weights.data();
  int16_t* dataset_data = dataset.mutable_data();
  int64_t* sample_data = sample.mutable_data();
  const std::size_t num_datasets = static_cast<std::size_t>(weights.size());
  {
    py::gil_scoped_release release;
    fill_blend(weight_data, num_datasets, size, dataset_data, sample_data);
  }
  return py::make_tuple(dataset, sample);
}

void fill_exhaustive_blend(const int64_t* sizes, std::size_t num_datasets, int64_t total, int16_t* dataset,
                           int64_t* sample) {
  std::vector<double> weights(num_datasets);
  std::vector<int64_t> taken(num_datasets, 0);
  std::vector<std::size_t> unspent;
  for (std::size_t d = 0; d < num_datasets; ++d) {
    weights[d] = static_cast<double>(sizes[d]) / static_cast<double>(total);
    if (sizes[d] > 0) unspent.push_back(d);
  }
  for (int64_t i = 0; i < total; ++i) {
    const double position = static_cast<double>(std::max<int64_t>(i, 1));
    std::size_t best = 0;
    double best_error = std::numeric_limits<double>::lowest();
    for (std::size_t place = 0; place < unspent.size(); ++place) {
      const std::size_t d = unspent[place];
      const double error = weights[d] * position - static_cast<double>(taken[d]);
      if (error > best_error) {
        best_error = error;
        best = place;
      }
    }
    const std::size_t chosen = unspent[best];
    dataset[i] = static_cast<int16_t>(chosen);
    sample[i] = taken[chosen]++;
    if (taken[chosen] == sizes[chosen]) unspent.erase(unspent.begin() + static_cast<std::ptrdiff_t>(best));
  }
}

py::tuple exhaustive_blending_indices(Array<int64_t> sizes) {
  if (sizes.size() < 1 || sizes.size() > std::numeric_limits<int16_t>::max())
    throw std::invalid_argument("a blend needs 1 to 32767 data sets");
  const int64_t* size_data = sizes.data();
  const std::size_t num_datasets = static_cast<std::size_t>(sizes.size());
  int64_t total = 0;
  for (std::size_t d = 0; d < num_datasets; ++d) {
    if (size_data[d] < 0) throw std::invalid_argument("a data set has a negative size");
    total += size_data[d];
  }
  Array<int16_t> dataset(static_cast<py::ssize_t>(total));
  Array<int64_t> sample(static_cast<py::ssize_t>(total));
  int16_t* dataset_data = dataset.mutable_data();
  int64_t* sample_data = sample.mutable_data();
  {
    py::gil_scoped_release release;
    fill_exhaustive_blend(size_data, num_datasets, total, dataset_data, sample_data);
  }
  return py::make_tuple(dataset, sample);
}

}  // namespace

PYBIND11_MODULE(_helpers, module) {
  module.doc() = "Compiled index builder; see index_builder.py for what each function computes.";
  module.def("shuffle_int32", &shuffle<int32_t>, py::arg("values").noconvert(), py::arg("key").noconvert(),
             py::arg("position"));
  module.def("shuffle_uint32", &shuffle<uint32_t>, py::arg("values").noconvert(), py::arg("key").noconvert(),
             py::arg("position"));
  module.def("sample_index_int32", &sample_index<int32_t>, py::arg("lengths").noconvert(),
             py::arg("documents").noconvert(), py::arg("sequence_length"), py::arg("num_samples"));
  module.def("sample_index_int64", &sample_index<int64_t>, py::arg("lengths").noconvert(),
             py::arg("documents").noconvert(), py::arg("sequence_length"), py::arg("num_samples"));
  module.def("blending_indices", &blending_indices, py::arg("weights").noconvert(), py::arg("size"));
  module.def("exhaustive_blending_indices", &exhaustive_blending_indices, py::arg("sizes").noconvert());
}
