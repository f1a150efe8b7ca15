#include "operators.h"

#include "generator.h"
#include "memory.h"
#include "peers.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <unordered_set>

namespace emulated_cuda {
namespace {

using at::Tensor;
using c10::IValue;

struct Owner {
  Tensor tensor;
};

Tensor make_host_tensor(const Tensor& tensor, c10::DataPtr data) {
  auto storage = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), tensor.storage().nbytes(), std::move(data), c10::GetCPUAllocator(), true));
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) {
    result._set_conj(true);
  }
  if (tensor.is_neg()) {
    result._set_neg(true);
  }
  return result;
}

Tensor make_device_tensor(c10::Storage storage, const Tensor& like) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), like.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return result;
}

// Operators after which the host knows their results: CUDA's kernels wait for the stream.
const std::unordered_set<std::string>& waiting_operators() {
  static const auto* names = new std::unordered_set<std::string>{
      "aten::nonzero", "aten::nonzero.out", "aten::masked_select", "aten::masked_select.out", "aten::equal",
      "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::is_nonzero",
      "aten::bincount", "aten::_linalg_check_errors", "aten::isin.Tensor_Tensor", "aten::_ctc_loss",
      "aten::multinomial.out"};
  return *names;
}

bool waits_for_stream(const c10::OperatorHandle& op, const std::vector<IValue>& arguments) {
  const auto& name = op.operator_name();
  const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
  if (waiting_operators().count(full) > 0) {
    return true;
  }
  if (name.name == "aten::repeat_interleave" && name.overload_name == "Tensor") {
    return arguments.back().isNone();
  }
  if (name.name == "aten::index" || name.name == "aten::index_put_" || name.name == "aten::_index_put_impl_") {
    const auto indices = arguments.at(1).toOptionalTensorList();
    for (size_t i = 0; i < indices.size(); ++i) {
      const std::optional<Tensor> index = indices.get(i);
      if (index && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte)) {
        return true;  // it asks nonzero for the number of elements
      }
    }
  }
  return false;
}

// Operators whose further tensors may be on the CPU.
bool takes_host_tensors(const std::string& name) {
  static const auto* names = new std::unordered_set<std::string>{
      "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index.Tensor_out", "aten::tensor_split"};
  return names->count(name) > 0;
}

// Context::alertCuBLASConfigNotDeterministic of torch, which at::cuda::blas::gemm, bgemm, gemv and dot call.
void check_cublas_is_deterministic(const std::string& name) {
  static const auto* names = new std::unordered_set<std::string>{
      "aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "aten::baddbmm_",
      "aten::mv", "aten::addmv", "aten::addmv_", "aten::dot", "aten::vdot"};
  if (names->count(name) == 0) {
    return;
  }
  static const bool has_workspace = [] {
    const char* setting = std::getenv("CUBLAS_WORKSPACE_CONFIG");
    const std::string text = setting == nullptr ? "" : setting;
    return text == ":4096:8" || text == ":16:8";
  }();
  TORCH_CHECK(has_workspace || !at::globalContext().deterministicAlgorithms(),
              "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
              "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic because it uses "
              "CuBLAS and you have CUDA >= 10.2. To enable deterministic behavior in this case, you must set an "
              "environment variable before running your PyTorch application: CUBLAS_WORKSPACE_CONFIG=:4096:8 or "
              "CUBLAS_WORKSPACE_CONFIG=:16:8 (by ", name, ")");
}

// Run the CPU's kernel on the arguments that lie on a stack.
void call_kernel(const c10::OperatorHandle& op, torch::jit::Stack& stack, c10::DeviceIndex device) {
  const auto& schema = op.schema();
  const size_t first = stack.size() - schema.arguments().size();
  bool has_generator = false;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& type = *schema.arguments()[i].type();
    const bool is_generator = type.isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get()));
    if (is_generator) {
      has_generator = true;
      IValue& value = stack[first + i];
      at::Generator generator = value.isNone() ? default_generator(device) : value.toGenerator();
      TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
                  generator.device().type(), "'");
      value = generator.get<DeviceGenerator>()->next_kernel();
    }
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  const auto& tags = op.getTags();
  const bool draws = std::find(tags.begin(), tags.end(), at::Tag::nondeterministic_seeded) != tags.end();
  if (!draws || has_generator) {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    return;
  }
  // It draws from the default generator, which is the CPU's in a kernel of the CPU.
  at::Generator host = at::detail::getDefaultCPUGenerator();
  const Tensor outer = host.get_state();
  host.set_state(default_generator(device).get<DeviceGenerator>()->next_kernel().get_state());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  host.set_state(outer);
}

// One call of the fallback.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack) : op_(op), stack_(stack) {
    const auto& schema = op.schema();
    const auto given = torch::jit::last(stack, schema.arguments().size());
    arguments_.assign(given.begin(), given.end());
    name_ = schema.name();
    for (size_t i = 0; i < arguments_.size(); ++i) {
      take(schema.arguments()[i], arguments_[i]);
    }
  }

  void run() {
    const auto& schema = op_.schema();
    check_devices();
    check_cublas_is_deterministic(name_);
    const c10::DeviceIndex device = device_ ? device_->index() : current_device();
    Stream& stream = current_stream(device);
    Capture* capture = capture_of(stream);
    const bool is_waiting = waits_for_stream(op_, arguments_) || copies_indices();
    if (is_waiting) {
      forbid_in_capture(name_ + ", which waits for the stream", &stream);
    }
    const Launch launch = begin_launch(stream, name_);
    for (const auto& operand : operands_) {
      const Region region = region_of(operand.tensor);
      operand.is_written ? check_write(region, launch, operand.name) : check_read(region, launch, operand.name);
      if (capture != nullptr && operand.is_written) {
        save_before_write(*capture, on_host_unowned(operand.tensor));
      }
    }
    torch::jit::drop(stack_, schema.arguments().size());
    {
      KernelMemory memory(launch);
      for (const auto& argument : arguments_) {
        stack_.push_back(replaced(argument, device, false));
      }
      call_kernel(op_, stack_, device);
    }
    adopt_resized();
    const size_t num_returns = schema.returns().size();
    std::vector<IValue> results(stack_.end() - static_cast<std::ptrdiff_t>(num_returns), stack_.end());
    torch::jit::drop(stack_, num_returns);
    for (auto& result : results) {
      stack_.push_back(to_device(result, device));
    }
    for (const auto& made : made_) {
      check_write(region_of(made), launch, "its result");
    }
    if (capture != nullptr) {
      record(*capture, launch, device);
    }
    if (is_waiting) {
      synchronize_stream(stream);
    }
  }

 private:
  void take(const c10::Argument& argument, const IValue& value) {
    const auto* alias = argument.alias_info();
    const bool is_written = alias != nullptr && alias->isWrite();
    const bool is_view = alias != nullptr && !alias->isWrite();
    const auto add = [&](const Tensor& tensor) {
      if (!tensor.defined()) {
        return;
      }
      if (!tensor.is_cuda()) {
        host_tensors_.push_back(tensor);
        return;
      }
      if (!device_) {
        device_ = tensor.device();
      } else if (tensor.device() != *device_) {
        TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", *device_,
                    " and ", tensor.device(), "! (when checking argument ", argument.name(), " of ", name_, ")");
      }
      originals_.push_back(tensor);
      if (!is_view) {
        operands_.push_back({tensor, is_written, argument.name()});
      }
    };
    if (value.isTensor()) {
      add(value.toTensor());
    } else if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorVector()) {
        add(tensor);
      }
    } else if (value.isOptionalTensorList()) {
      const auto list = value.toOptionalTensorList();
      for (size_t i = 0; i < list.size(); ++i) {
        const std::optional<Tensor> tensor = list.get(i);
        add(tensor.value_or(Tensor()));
      }
    } else if (value.isDevice() && value.toDevice().is_cuda() && !device_) {
      device_ = value.toDevice().has_index() ? value.toDevice() : c10::Device(c10::DeviceType::CUDA, current_device());
    }
  }

  void check_devices() const {
    if (originals_.empty()) {
      return;
    }
    for (const Tensor& tensor : host_tensors_) {
      const bool is_scalar = tensor.dim() == 0 && name_ != "aten::cat";
      TORCH_CHECK(tensor.is_meta() || is_scalar || takes_host_tensors(name_),
                  "Expected all tensors to be on the same device, but found at least two devices, ", *device_, " and ",
                  tensor.device(), "! (in ", name_, ")");
    }
  }

  // Indices on the CPU are copied to the device from pageable memory, for which the host waits.
  bool copies_indices() const {
    const bool is_indexing = name_.rfind("aten::index", 0) == 0 || name_.rfind("aten::_index_put", 0) == 0;
    return is_indexing && !originals_.empty() &&
        std::any_of(host_tensors_.begin(), host_tensors_.end(), [](const Tensor& each) { return each.dim() > 0; });
  }

  // Work of a graph has the tensors of the host as they were: a kernel's arguments hold their values.
  Tensor host_twin(const Tensor& tensor, bool is_unowned) {
    if (!tensor.defined() || !tensor.is_cuda()) {
      return is_unowned && tensor.defined() && tensor.is_cpu() ? tensor.clone() : tensor;
    }
    if (is_unowned) {
      return on_host_unowned(tensor);
    }
    for (size_t i = 0; i < twins_.size(); ++i) {
      if (twins_[i].first.is_same(tensor)) {
        return twins_[i].second;
      }
    }
    twins_.emplace_back(tensor, on_host(tensor));
    return twins_.back().second;
  }

  IValue replaced(const IValue& value, c10::DeviceIndex device, bool is_unowned) {
    if (value.isTensor()) {
      return host_twin(value.toTensor(), is_unowned);
    }
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) {
        list.push_back(host_twin(tensor, is_unowned));
      }
      return list;
    }
    if (value.isOptionalTensorList()) {
      const auto given = value.toOptionalTensorList();
      c10::List<std::optional<Tensor>> list;
      for (size_t i = 0; i < given.size(); ++i) {
        const std::optional<Tensor> tensor = given.get(i);
        list.push_back(tensor ? std::optional<Tensor>(host_twin(*tensor, is_unowned)) : std::nullopt);
      }
      return list;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) {
      return c10::Device(c10::DeviceType::CPU);
    }
    return value;
  }

  // An operator that was given a tensor of another size for its result has resized it.
  void adopt_resized() {
    for (auto& [original, twin] : twins_) {
      auto* impl = original.unsafeGetTensorImpl();
      auto& storage = twin.storage();
      if (storage.data() != original.storage().data() || storage.nbytes() != original.storage().nbytes()) {
        auto data = storage.set_data_ptr(c10::DataPtr());
        const auto device = original.device();
        c10::DataPtr adopted(data.get(), data.release_context(), data.get_deleter(), device);
        original.storage().unsafeGetStorageImpl()->set_nbytes(storage.nbytes());
        original.storage().set_data_ptr_noswap(std::move(adopted));
      }
      if (twin.sizes() != original.sizes() || twin.strides() != original.strides()) {
        impl->set_sizes_and_strides(twin.sizes(), twin.strides(), twin.storage_offset());
      }
    }
  }

  Tensor to_device(const Tensor& result, c10::DeviceIndex index) {
    if (!result.defined() || !result.is_cpu()) {
      return result;
    }
    for (const auto& [original, twin] : twins_) {
      if (result.is_same(twin)) {
        return original;
      }
    }
    auto* impl = result.storage().unsafeGetStorageImpl();
    for (const auto& [original, twin] : twins_) {
      if (impl == twin.storage().unsafeGetStorageImpl()) {
        Tensor view = make_device_tensor(c10::Storage(original.storage()), result);
        return view;
      }
    }
    for (const Tensor& host : host_tensors_) {
      if (impl == host.storage().unsafeGetStorageImpl()) {
        return result;
      }
    }
    const c10::Device device(c10::DeviceType::CUDA, index);
    auto found = std::find_if(adopted_.begin(), adopted_.end(), [&](const auto& each) { return each.first == impl; });
    if (found == adopted_.end()) {
      c10::DataPtr data;
      if (is_device_memory(impl->data_ptr()) || impl->nbytes() == 0) {
        auto& old = impl->_mutable_data_ptr_no_checks();
        const auto deleter = old.get_deleter();
        void* address = old.get();
        data = c10::DataPtr(address, old.release_context(), deleter, device);
      } else {
        data = allocate(impl->nbytes(), current_stream(index), device);
        std::memcpy(data.get(), impl->data(), impl->nbytes());
      }
      c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), impl->nbytes(), std::move(data), &device_allocator(), true));
      adopted_.emplace_back(impl, storage);
      found = std::prev(adopted_.end());
    }
    made_.push_back(make_device_tensor(found->second, result));
    return made_.back();
  }

  IValue to_device(const IValue& value, c10::DeviceIndex device) {
    if (value.isTensor()) {
      results_.push_back(to_device(value.toTensor(), device));
      return results_.back();
    }
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) {
        results_.push_back(to_device(tensor, device));
        list.push_back(results_.back());
      }
      return list;
    }
    return value;
  }

  void record(Capture& capture, const Launch& launch, c10::DeviceIndex device) {
    RecordedWork work{name_, launch.site};
    for (const auto& operand : operands_) {
      (operand.is_written ? work.writes : work.reads).push_back(region_of(operand.tensor));
    }
    std::vector<IValue> arguments;
    for (const auto& argument : arguments_) {
      arguments.push_back(replaced(argument, device, true));
    }
    // The results that are new memory: a replay computes them again and puts them there.
    std::vector<Tensor> targets;
    for (const auto& result : results_) {
      const bool is_new = std::any_of(made_.begin(), made_.end(), [&](const Tensor& each) { return each.is_same(result); });
      targets.push_back(is_new ? on_host_unowned(result) : Tensor());
      if (is_new) {
        work.writes.push_back(region_of(result));
      }
    }
    const size_t num_returns = op_.schema().returns().size();
    work.run = [op = op_, arguments, targets, num_returns, device] {
      torch::jit::Stack stack(arguments.begin(), arguments.end());
      call_kernel(op, stack, device);
      size_t next = 0;
      for (size_t i = stack.size() - num_returns; i < stack.size(); ++i) {
        const auto put = [&](const Tensor& tensor) {
          const Tensor& target = targets.at(next++);
          if (target.defined() && target.numel() > 0) {
            target.copy_(tensor);
          }
        };
        if (stack[i].isTensor()) {
          put(stack[i].toTensor());
        } else if (stack[i].isTensorList()) {
          for (const Tensor& tensor : stack[i].toTensorVector()) {
            put(tensor);
          }
        }
      }
    };
    add_work(capture, std::move(work));
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  std::string name_;
  std::vector<IValue> arguments_;
  std::vector<Operand> operands_;
  std::vector<Tensor> originals_;
  std::vector<Tensor> host_tensors_;
  std::optional<c10::Device> device_;
  std::vector<std::pair<Tensor, Tensor>> twins_;
  std::vector<std::pair<c10::StorageImpl*, c10::Storage>> adopted_;
  std::vector<Tensor> made_;
  std::vector<Tensor> results_;
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, *stack).run();
}

// ---- operators that are not computed by the fallback

c10::Device device_or_current(std::optional<c10::Device> device) {
  const auto index = device && device->has_index() ? device->index() : current_device();
  check_device(index);
  return {c10::DeviceType::CUDA, index};
}

// Makes the memory of a factory be that of a device, whichever is current.
class CurrentDevice {
 public:
  explicit CurrentDevice(c10::Device device) : outer_(exchange_device(device.index())) {}
  ~CurrentDevice() {
    exchange_device(outer_);
  }

 private:
  c10::DeviceIndex outer_;
};

Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  CurrentDevice guard(device_or_current(device));
  return at::detail::empty_generic(
      size, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  CurrentDevice guard(device_or_current(device));
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

Tensor view(const Tensor& self, c10::IntArrayRef size) {
  return at::native::view(self, size);
}

Tensor reshape_alias(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

Tensor unfold(const Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}

const Tensor& resize(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!format || *format == at::MemoryFormat::Contiguous, "resize_ to another memory format is not emulated");
  auto* impl = self.unsafeGetTensorImpl();
  const size_t needed = at::detail::computeStorageNbytesContiguous(size, self.element_size(), self.storage_offset());
  if (needed > self.storage().nbytes()) {
    resize_storage(*self.storage().unsafeGetStorageImpl(), needed);
  }
  impl->set_sizes_contiguous(size);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  TORCH_CHECK(source.device_type() == c10::DeviceType::CUDA, "Attempted to set the storage of a tensor on device \"",
              self.device(), "\" to a storage on different device \"", source.device(), "\".");
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  std::vector<int64_t> contiguous(size.size(), 1);
  for (size_t i = size.size(); i-- > 1;) {
    contiguous[i - 1] = contiguous[i] * std::max<int64_t>(size[i], 1);
  }
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride.empty() ? contiguous : stride.vec(), offset);
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, {count}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  const c10::Device device = self.device();
  return set_storage(self, c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0, c10::DataPtr(nullptr, device), &device_allocator(), true)), 0, {0}, {1});
}

void record_stream_of(Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), find_stream(stream));
}

at::Scalar local_scalar(const Tensor& self) {
  Stream& stream = current_stream(self.device().index());
  forbid_in_capture("cudaStreamSynchronize, by a read of a tensor on the host", &stream);
  const Launch launch = begin_launch(stream, "item");
  check_read(region_of(self), launch, "its argument");
  synchronize_stream(stream);
  return on_host(self).item();
}

// torch's own copies: values of another dtype are converted on the device.
Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.numel() == 0 || self.is_same(source)) {
    return self;
  }
  Stream& stream = current_stream((self.is_cuda() ? self : source).device().index());
  const Tensor target = on_host_unowned(self);
  const Tensor values = on_host_unowned(source);
  if (self.is_cuda() && source.is_cuda()) {
    Stream& other = current_stream(source.device().index());
    const bool crosses = &other != &stream;
    if (crosses) {
      stream_waits(stream, other);
    }
    run_work("aten::copy_", stream, {{source, false, "the source"}, {self, true, "the target"}},
             [target, values] { target.copy_(values); });
    if (crosses) {
      stream_waits(other, stream);
    }
    return self;
  }
  const Tensor& host = self.is_cuda() ? source : self;
  const bool is_pinned_host = is_pinned(host.storage().data());
  const bool waits = !(non_blocking && is_pinned_host);
  const std::string name = self.is_cuda() ? "copy_ from the host" : "copy_ to the host";
  if (waits) {
    forbid_in_capture("cudaMemcpyAsync of pageable memory, or a copy that is waited for", &stream);
  }
  if (is_pinned_host && self.is_cuda()) {
    deliver_for_device(source);
  }
  Capture* capture = capture_of(stream);
  if (capture != nullptr || waits) {
    std::vector<Operand> operands;
    const auto add = [&](const Tensor& tensor, bool is_written, const char* what) {
      if (tensor.is_cuda() || is_pinned_host) {
        operands.push_back({tensor, is_written, what});
      }
    };
    add(source, false, "the source");
    add(self, true, "the target");
    run_work(name, stream, operands, [target, values] { target.copy_(values); });
    if (waits) {
      synchronize_stream(stream);
    }
    return self;
  }
  const Launch launch = begin_launch(stream, name);
  check_read(region_of(source), launch, "the source");
  check_write(region_of(self), launch, "the target");
  if (self.is_cuda()) {
    target.copy_(values);
    watch_source(on_host(source.detach()), launch);
  } else {
    copy_late(self.detach(), values, launch);
  }
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  Tensor out = target;
  copy(out, self, non_blocking);
  return target;
}

}  // namespace

at::Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) {
    return tensor;
  }
  auto* owner = new Owner{tensor};
  return make_host_tensor(
      tensor, c10::DataPtr(tensor.storage().mutable_data(), owner, [](void* context) { delete static_cast<Owner*>(context); },
                           c10::Device(c10::DeviceType::CPU)));
}

at::Tensor on_host_unowned(const Tensor& tensor) {
  if (!tensor.defined()) {
    return tensor;
  }
  return make_host_tensor(tensor, c10::DataPtr(tensor.storage().mutable_data(), c10::Device(c10::DeviceType::CPU)));
}

void run_work(
    const std::string& operation, Stream& stream, const std::vector<Operand>& operands, const std::function<void()>& run) {
  const Launch launch = begin_launch(stream, operation);
  Capture* capture = capture_of(stream);
  RecordedWork work{operation, launch.site, {}, {}, run};
  for (const auto& operand : operands) {
    const Region region = region_of(operand.tensor);
    operand.is_written ? check_write(region, launch, operand.name) : check_read(region, launch, operand.name);
    (operand.is_written ? work.writes : work.reads).push_back(region);
    if (capture != nullptr && operand.is_written) {
      save_before_write(*capture, on_host_unowned(operand.tensor));
    }
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  const RunningStream running(stream);
  run();
  if (capture != nullptr) {
    add_work(*capture, std::move(work));
  }
}

void resize_storage(c10::StorageImpl& storage, size_t num_bytes) {
  TORCH_CHECK(storage.resizable(), "Trying to resize storage that is not resizable");
  const c10::Device device = storage.device();
  Stream& stream = current_stream(device.index());
  c10::DataPtr data = allocate(num_bytes, stream, device);
  const size_t kept = std::min(num_bytes, storage.nbytes());
  if (kept > 0) {
    const Launch launch = begin_launch(stream, "a copy of a storage that is resized");
    const auto item = static_cast<int64_t>(kept);
    check_read({reinterpret_cast<uintptr_t>(storage.data()), {}, {}, item}, launch, "the old memory");
    check_write({reinterpret_cast<uintptr_t>(data.get()), {}, {}, item}, launch, "the new memory");
    std::memcpy(data.get(), storage.data(), kept);
  }
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(num_bytes);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &unfold);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("record_stream", &record_stream_of);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("copy_", &copy);
  m.impl("_copy_from", &copy_from);
}

}  // namespace emulated_cuda
