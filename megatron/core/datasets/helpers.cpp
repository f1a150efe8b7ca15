// C++ versions of the functions in index_builder.py, which return bitwise identical arrays. Compile without
// floating-point contraction, because a fused multiply-add would break ties between data sets of a blend differently.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#include "blend_x86.h"
#include "sample_index.h"
#include "shuffle.h"

namespace py = pybind11;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

using megatron::MersenneTwister;

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
  megatron::shuffle_in_place(data, size, random);
  std::memcpy(state, random.key(), sizeof(uint32_t) * MersenneTwister::kWords);
  return random.position();
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
  megatron::fill_sample_index(length_data, num_lengths, document_data, num_documents, sequence_length, num_samples,
                              out);
  return result;
}

// Without sizes, no data set is ever exhausted.
py::tuple order_blend(const double* weights, const int64_t* sizes, std::size_t num_datasets, int64_t num_samples,
                      int vector_bits) {
  const megatron::FillBlendBlock fill_block = megatron::choose_fill_blend_block(num_datasets, vector_bits);
  if (fill_block == nullptr) throw std::invalid_argument("this processor has no such vectors");
  Array<int16_t> dataset(static_cast<py::ssize_t>(num_samples));
  Array<int64_t> sample(static_cast<py::ssize_t>(num_samples));
  int16_t* dataset_data = dataset.mutable_data();
  int64_t* sample_data = sample.mutable_data();
  {
    py::gil_scoped_release release;
    megatron::fill_blend(fill_block, weights, sizes, num_datasets, num_samples, dataset_data, sample_data);
  }
  return py::make_tuple(dataset, sample);
}

py::tuple blending_indices(Array<double> weights, int64_t size, int vector_bits) {
  if (weights.size() < 1 || weights.size() > std::numeric_limits<int16_t>::max() || size < 0)
    throw std::invalid_argument("a blend needs 1 to 32767 data sets and a size of 0 or more");
  const double* weight_data = weights.data();
  for (py::ssize_t d = 0; d < weights.size(); ++d)
    if (!(weight_data[d] >= 0.0 && weight_data[d] <= 1.0)) throw std::invalid_argument("a weight is not from 0 to 1");
  return order_blend(weight_data, nullptr, static_cast<std::size_t>(weights.size()), size, vector_bits);
}

py::tuple exhaustive_blending_indices(Array<int64_t> sizes, int vector_bits) {
  if (sizes.size() < 1 || sizes.size() > std::numeric_limits<int16_t>::max())
    throw std::invalid_argument("a blend needs 1 to 32767 data sets");
  const int64_t* size_data = sizes.data();
  const std::size_t num_datasets = static_cast<std::size_t>(sizes.size());
  int64_t total = 0;
  for (std::size_t d = 0; d < num_datasets; ++d) {
    if (size_data[d] < 0) throw std::invalid_argument("a data set has a negative size");
    total += size_data[d];
  }
  std::vector<double> weights(num_datasets);
  for (std::size_t d = 0; d < num_datasets; ++d)
    weights[d] = static_cast<double>(size_data[d]) / static_cast<double>(std::max<int64_t>(total, 1));
  return order_blend(weights.data(), size_data, num_datasets, total, vector_bits);
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
  module.def("blending_indices", &blending_indices, py::arg("weights").noconvert(), py::arg("size"),
             py::arg("vector_bits") = 0);
  module.def("exhaustive_blending_indices", &exhaustive_blending_indices, py::arg("sizes").noconvert(),
             py::arg("vector_bits") = 0);
}
