#include "nccl.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <set>
#include <sstream>

namespace emulated_cuda {
namespace {

using at::Tensor;

// Tensors of communications that no stream has waited for. As torch's watchdog, the process keeps them until it knows
// that the communication has ended (ProcessGroupNCCL.cpp, shelvesToUnstash). A reference does not keep the memory of a
// storage that is resized.
struct Shelf {
  std::mutex lock;
  std::vector<std::pair<Event, std::vector<Tensor>>> kept;
};

Shelf& shelf() {
  static auto* only = new Shelf;
  return *only;
}

// A communication that has been launched. As torch's, it holds its tensors until a stream waits for it.
class Pending final : public c10d::Work {
 public:
  Pending(c10d::OpType type, Stream& stream, std::vector<Tensor> tensors, std::vector<Tensor> outputs, bool holds_host)
      : Work(-1, type), stream_(stream), tensors_(std::move(tensors)), outputs_(std::move(outputs)), holds_host_(holds_host) {
    record_event(end_, stream);
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{stream.handle().device()});
    Stream& outer = exchange_stream(stream);
    future_->markCompleted(c10::IValue(outputs_));
    exchange_stream(outer);
  }
  ~Pending() override {
    if (end_.capture != nullptr) {
      for (const Tensor& tensor : tensors_) {
        record_stream(tensor.storage().data_ptr(), stream_);
      }
    } else if (!tensors_.empty()) {
      std::lock_guard<std::mutex> guard(shelf().lock);
      shelf().kept.emplace_back(end_, std::move(tensors_));
    }
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    Stream& current = current_stream(stream_.device);
    stream_waits(current, end_);
    if (holds_host_) {
      synchronize_stream(current);
    }
    tensors_.clear();
  }
  void blockCurrentStream() override {
    synchronize();
  }
  bool isCompleted() override {
    return query_event(end_);
  }
  bool isSuccess() const override {
    return true;
  }
  std::vector<Tensor> result() override {
    return outputs_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  Stream& stream_;
  Event end_;
  std::vector<Tensor> tensors_;
  std::vector<Tensor> outputs_;
  bool holds_host_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

const std::set<at::ScalarType>& known_dtypes() {
  static const auto* dtypes = new std::set<at::ScalarType>{
      at::kByte, at::kChar, at::kBool, at::kInt, at::kLong, at::kHalf, at::kBFloat16, at::kFloat, at::kDouble,
      at::kFloat8_e4m3fn, at::kFloat8_e5m2};
  return *dtypes;
}

void check_tensor(const Tensor& tensor) {
  TORCH_CHECK(tensor.is_cuda() && !tensor.is_sparse(), "No backend type associated with device type ", tensor.device().type(),
              ": Tensors must be CUDA and dense");
  TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous");
  TORCH_CHECK_WITH(TypeError, known_dtypes().count(tensor.scalar_type()) > 0,
                   "Input tensor data type is not supported for NCCL process group: ", tensor.scalar_type());
}

std::string name_of(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return "sum";
    case c10d::ReduceOp::AVG:
      return "avg";
    case c10d::ReduceOp::PRODUCT:
      return "product";
    case c10d::ReduceOp::MIN:
      return "min";
    case c10d::ReduceOp::MAX:
      return "max";
    default:
      TORCH_CHECK(false, "Cannot use this ReduceOp with NCCL");
  }
}

// A tensor for each rank, none of which is there yet.
std::vector<Tensor> absent(int size) {
  return std::vector<Tensor>(static_cast<size_t>(size));
}

// The memory of a tensor as a flat CPU tensor, which a replay may use after the tensor is gone.
Tensor flat(const Tensor& tensor) {
  const Tensor host = on_host_unowned(tensor);
  return host.as_strided({host.numel()}, {1}, host.storage_offset());
}

}  // namespace

void release_ended_communications() {
  std::vector<std::pair<Event, std::vector<Tensor>>> ended;
  {
    std::lock_guard<std::mutex> guard(shelf().lock);
    auto& kept = shelf().kept;
    StateGuard state(state_lock());
    const auto first = std::stable_partition(
        kept.begin(), kept.end(), [](const auto& each) { return !host_clock().covers(each.first.clock); });
    ended.assign(std::make_move_iterator(first), std::make_move_iterator(kept.end()));
    kept.erase(first, kept.end());
  }
}

Nccl::Nccl(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, c10::intrusive_ptr<Options> options)
    : Backend(rank, size), options_(std::move(options)) {
  if (options_->split_from) {
    options_->split_from->take_part_in_split();
  }
  mailboxes_ = std::make_shared<SharedMailboxes>(store, rank, size, options_->timeout);
}

Nccl::~Nccl() {
  for (const auto& [key, stream] : streams_) {
    give_back(*stream);
  }
}

void Nccl::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  mailboxes_->set_timeout(timeout);
}

void Nccl::eagerConnectSingleDevice(at::Device) {
  std::lock_guard<std::mutex> guard(*order_);
  mailboxes_->meet("ncclCommInitRank");
}

void Nccl::take_part_in_split() {
  std::lock_guard<std::mutex> guard(*order_);
  mailboxes_->meet("ncclCommSplit");
}

c10::intrusive_ptr<c10d::Backend> Nccl::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& given) {
  const auto mine = std::find(ranks.begin(), ranks.end(), rank_);
  if (mine == ranks.end()) {
    take_part_in_split();
    return nullptr;
  }
  const auto known = c10::dynamic_intrusive_pointer_cast<Options>(given);
  TORCH_CHECK(known, "opts not a ProcessGroupNCCL::Options.");
  auto options = c10::make_intrusive<Options>(*known);
  options->split_from = c10::intrusive_ptr<Nccl>::unsafe_reclaim_from_nonowning(this);
  const auto own_store = c10::make_intrusive<c10d::PrefixStore>("split " + options->group_name, store);
  return c10::make_intrusive<Nccl>(own_store, static_cast<int>(mine - ranks.begin()), static_cast<int>(ranks.size()), options);
}

void Nccl::abort() {
  mailboxes_->abort();
}

Stream& Nccl::communication_stream(c10::DeviceIndex device, const std::string& key) {
  auto& stream = streams_[key + " " + std::to_string(device)];
  if (stream == nullptr) {
    const auto& name = options_->group_desc.empty() ? options_->group_name : options_->group_desc;
    stream = &dedicated_stream(device, "the stream of NCCL group " + name + key);
  }
  return *stream;
}

std::string Nccl::signature(const std::string& name, const Tensor& tensor, const std::string& detail) const {
  std::ostringstream text;
  text << name << " (" << tensor.nbytes() << " bytes of " << tensor.scalar_type() << (detail.empty() ? "" : ", ") << detail << ")";
  return text.str();
}

// Launch operations as one: a collective, or what was called together.
Nccl::WorkPtr Nccl::launch(std::vector<Operation> operations) {
  TORCH_CHECK_WITH(DistBackendError, !mailboxes_->is_aborted(), "NCCL communicator was aborted on rank ", rank_, ".");
  const Operation& first = operations.front();
  Tensors inputs, outputs;
  for (const auto& operation : operations) {
    inputs.insert(inputs.end(), operation.reads.begin(), operation.reads.end());
    outputs.insert(outputs.end(), operation.writes.begin(), operation.writes.end());
  }
  const c10::DeviceIndex device = inputs.empty() ? outputs.at(0).device().index() : inputs[0].device().index();
  Stream& current = current_stream(device);
  const bool is_lone_message = operations.size() == 1 && first.peer >= 0 && !is_coalescing_;
  const std::string key = is_lone_message
      ? " between ranks " + std::to_string(std::min(rank_, first.peer)) + " and " + std::to_string(std::max(rank_, first.peer))
      : "";
  Stream& stream = first.is_async ? communication_stream(device, key) : current;
  if (&stream != &current) {
    stream_waits(stream, current);
  }
  std::vector<Operand> operands;
  for (const Tensor& tensor : inputs) {
    operands.push_back({tensor, false, "its input"});
  }
  for (const Tensor& tensor : outputs) {
    operands.push_back({tensor, true, "its output"});
  }
  // A graph may run it again: it owns none of the tensors.
  std::vector<std::function<void()>> collectives;
  std::vector<Message> sends, receives;
  for (const auto& operation : operations) {
    if (operation.peer < 0) {
      collectives.push_back(operation.run);
    } else {
      (operation.type == c10d::OpType::SEND ? sends : receives).push_back(operation.message);
    }
  }
  const auto run = [collectives, sends, receives, mailboxes = mailboxes_, order = order_] {
    std::lock_guard<std::mutex> guard(*order);
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    try {
      for (const auto& collective : collectives) {
        collective();
      }
      mailboxes->exchange(sends, receives);
    } catch (const Aborted&) {
      // As on a GPU: the work ends, and what it should have written says nothing.
    }
  };
  ++sequence_;
  release_ended_communications();
  run_work("nccl:" + first.name, stream, operands, run);
  Tensors held = inputs;
  held.insert(held.end(), outputs.begin(), outputs.end());
  return c10::make_intrusive<Pending>(first.type, stream, held, outputs, first.type == c10d::OpType::BARRIER);
}

// A rank that communicates from another device would need a communicator of its own, which its peers do not make.
void Nccl::check_bound_device(const Tensor& tensor) const {
  const auto bound = getBoundDeviceId();
  TORCH_CHECK_WITH(DistBackendError, !bound || *bound == tensor.device(),
                   "Attempt to perform collective on tensor not on device passed to init_process_group: it is on ",
                   tensor.device(), " and the group is bound to ", bound.value_or(tensor.device()));
}

Nccl::WorkPtr Nccl::submit(Operation operation) {
  for (const auto* tensors : {&operation.reads, &operation.writes}) {
    for (const Tensor& tensor : *tensors) {
      check_tensor(tensor);
      check_bound_device(tensor);
    }
  }
  if (is_coalescing_) {
    coalesced_.push_back(std::move(operation));
    return nullptr;
  }
  std::vector<Operation> operations;
  operations.push_back(std::move(operation));
  return launch(std::move(operations));
}

Nccl::WorkPtr Nccl::submit_all(std::vector<Operation> operations) {
  for (auto& operation : operations) {
    for (const auto* tensors : {&operation.reads, &operation.writes}) {
      for (const Tensor& tensor : *tensors) {
        check_tensor(tensor);
        check_bound_device(tensor);
      }
    }
  }
  if (is_coalescing_) {
    std::move(operations.begin(), operations.end(), std::back_inserter(coalesced_));
    return nullptr;
  }
  return launch(std::move(operations));
}

void Nccl::startCoalescing() {
  is_coalescing_ = true;
  coalesced_.clear();
}

Nccl::WorkPtr Nccl::endCoalescing() {
  TORCH_CHECK(is_coalescing_, "endCoalescing without startCoalescing");
  WorkPtr work = coalesced_.empty() ? nullptr : launch(std::move(coalesced_));
  coalesced_.clear();
  is_coalescing_ = false;
  return work;
}

// NCCL adds in the tensors' dtype, and averages by multiplying each addend by 1/size. Ranks are added in order, so that
// all ranks have equal results.
void Nccl::reduce_into(const Tensor& target, const std::vector<Tensor>& addends, const c10d::ReduceOp& op) const {
  const bool averages = op.op_ == c10d::ReduceOp::AVG;
  const bool is_floating = target.is_floating_point();
  const auto addend = [&](size_t i) {
    return averages && is_floating ? addends[i].mul(1.0 / static_cast<double>(size_)) : addends[i];
  };
  Tensor total = addend(0).clone();
  for (size_t i = 1; i < addends.size(); ++i) {
    switch (op.op_) {
      case c10d::ReduceOp::SUM:
      case c10d::ReduceOp::AVG:
        total.add_(addend(i));
        break;
      case c10d::ReduceOp::PRODUCT:
        total.mul_(addends[i]);
        break;
      case c10d::ReduceOp::MIN:
        total.copy_(at::minimum(total, addends[i]));
        break;
      default:
        total.copy_(at::maximum(total, addends[i]));
    }
  }
  if (averages && !is_floating) {
    total.div_(size_, "trunc");
  }
  target.copy_(total);
}

Nccl::Operation Nccl::make_all_reduce(const Tensor& tensor, const c10d::ReduceOp& op, bool is_async) {
  const std::string text = signature("all_reduce", tensor, name_of(op));
  const auto run = [this, self = c10::intrusive_ptr<Nccl>::unsafe_reclaim_from_nonowning(this), values = flat(tensor), op, text] {
    const int64_t step = int64_t{1} << 18;
    for (int64_t start = 0; start == 0 || start < values.numel(); start += step) {
      const Tensor part = values.slice(0, start, std::min(start + step, values.numel()));
      Tensors addends;
      std::vector<Message> sends, receives;
      for (int rank = 0; rank < size_; ++rank) {
        addends.push_back(rank == rank_ ? part : at::empty_like(part));
        if (rank != rank_) {
          sends.push_back({rank, part.mutable_data_ptr(), part.nbytes(), "all_reduce"});
          receives.push_back({rank, addends.back().mutable_data_ptr(), part.nbytes(), "all_reduce"});
        }
      }
      mailboxes_->meet(text, sends, receives);
      reduce_into(part, addends, op);
    }
  };
  return {c10d::OpType::ALLREDUCE, "all_reduce", {tensor}, {tensor}, run, is_async};
}

Nccl::Operation Nccl::make_all_gather(const Tensors& outputs, const Tensor& input, bool is_async) {
  const std::string text = signature("all_gather", input);
  Tensors targets;
  for (const Tensor& output : outputs) {
    TORCH_CHECK(output.nbytes() == input.nbytes() && output.scalar_type() == input.scalar_type(),
                "output tensors of all_gather must have the size and dtype of its input");
    targets.push_back(flat(output));
  }
  const auto run = [this, self = c10::intrusive_ptr<Nccl>::unsafe_reclaim_from_nonowning(this), targets, values = flat(input), text] {
    std::vector<Message> sends, receives;
    for (int rank = 0; rank < size_; ++rank) {
      const Tensor& target = targets.at(size_t(rank));
      if (rank != rank_) {
        sends.push_back({rank, values.mutable_data_ptr(), values.nbytes(), "all_gather"});
        receives.push_back({rank, target.mutable_data_ptr(), target.nbytes(), "all_gather"});
      } else if (target.data_ptr() != values.data_ptr()) {
        target.copy_(values);
      }
    }
    mailboxes_->meet(text, sends, receives);
  };
  return {c10d::OpType::_ALLGATHER_BASE, "all_gather", {input}, outputs, run, is_async};
}

Nccl::Operation Nccl::make_reduce_scatter(
    const Tensor& output, const Tensors& inputs, const c10d::ReduceOp& op, bool is_async) {
  const std::string text = signature("reduce_scatter", output, name_of(op));
  Tensors values;
  for (const Tensor& input : inputs) {
    TORCH_CHECK(output.nbytes() == input.nbytes() && output.scalar_type() == input.scalar_type(),
                "input tensors of reduce_scatter must have the size and dtype of its output");
    values.push_back(flat(input));
  }
  const auto run = [this, self = c10::intrusive_ptr<Nccl>::unsafe_reclaim_from_nonowning(this), values, target = flat(output), op, text] {
    Tensors addends;
    std::vector<Message> sends, receives;
    for (int rank = 0; rank < size_; ++rank) {
      const Tensor& part = values.at(size_t(rank));
      addends.push_back(rank == rank_ ? part.clone() : at::empty_like(part));
      if (rank != rank_) {
        sends.push_back({rank, part.mutable_data_ptr(), part.nbytes(), "reduce_scatter"});
        receives.push_back({rank, addends.back().mutable_data_ptr(), part.nbytes(), "reduce_scatter"});
      }
    }
    mailboxes_->meet(text, sends, receives);
    reduce_into(target, addends, op);
  };
  return {c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter", inputs, {output}, run, is_async};
}

// Part i of the inputs goes to rank i, and part i of the outputs comes from it; sizes may differ from pair to pair.
Nccl::Operation Nccl::make_all_to_all(
    const Tensors& outputs, const Tensors& inputs, const std::string& name, const std::string& what, bool is_async) {
  Tensors sources, targets;
  for (const Tensor& input : inputs) {
    sources.push_back(input.defined() ? flat(input) : input);
  }
  for (const Tensor& output : outputs) {
    targets.push_back(output.defined() ? flat(output) : output);
  }
  const auto run = [this, self = c10::intrusive_ptr<Nccl>::unsafe_reclaim_from_nonowning(this), sources, targets, what] {
    std::vector<Message> sends, receives;
    for (int rank = 0; rank < size_; ++rank) {
      const Tensor source = size_t(rank) < sources.size() ? sources[size_t(rank)] : Tensor();
      const Tensor target = size_t(rank) < targets.size() ? targets[size_t(rank)] : Tensor();
      if (rank == rank_) {
        if (source.defined() && target.defined()) {
          target.copy_(source);
        }
        continue;
      }
      if (source.defined() && source.numel() > 0) {
        sends.push_back({rank, source.mutable_data_ptr(), source.nbytes(), what});
      }
      if (target.defined() && target.numel() > 0) {
        receives.push_back({rank, target.mutable_data_ptr(), target.nbytes(), what});
      }
    }
    mailboxes_->meet(what, sends, receives);
  };
  Tensors reads, writes;
  std::copy_if(inputs.begin(), inputs.end(), std::back_inserter(reads), [](const Tensor& each) { return each.defined(); });
  std::copy_if(outputs.begin(), outputs.end(), std::back_inserter(writes), [](const Tensor& each) { return each.defined(); });
  return {c10d::OpType::ALLTOALL, name, reads, writes, run, is_async};
}

Nccl::Operation Nccl::make_message(Tensors& tensors, int peer, bool is_send) {
  TORCH_CHECK(tensors.size() == 1, "a message has one tensor");
  TORCH_CHECK(peer >= 0 && peer < size_ && peer != rank_, "Invalid rank ", peer, " for a message of rank ", rank_);
  const Tensor values = flat(tensors[0]);
  Operation operation{is_send ? c10d::OpType::SEND : c10d::OpType::RECV, is_send ? "send" : "recv"};
  (is_send ? operation.reads : operation.writes) = tensors;
  operation.peer = peer;
  operation.message = {peer, values.mutable_data_ptr(), values.nbytes(), signature("message", values)};
  return operation;
}

Nccl::WorkPtr Nccl::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const int root = static_cast<int>(options.rootRank);
  const std::string text = signature("broadcast", tensors.at(0), "root " + std::to_string(root));
  Tensors outputs = absent(size_), inputs = absent(size_);
  if (rank_ == root) {
    std::fill(inputs.begin(), inputs.end(), tensors[0]);
    inputs[size_t(rank_)] = Tensor();
  } else {
    outputs[size_t(root)] = tensors[0];
  }
  Operation operation = make_all_to_all(outputs, inputs, "broadcast", text, options.asyncOp);
  operation.reads.resize(std::min<size_t>(operation.reads.size(), 1));
  if (operation.reads.empty() && operation.writes.empty()) {
    operation.reads = {tensors[0]};
  }
  operation.type = c10d::OpType::BROADCAST;
  return submit(std::move(operation));
}

Nccl::WorkPtr Nccl::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return submit(make_all_reduce(tensors.at(0), options.reduceOp, options.asyncOp));
}

Nccl::WorkPtr Nccl::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  std::vector<Operation> operations;
  for (const Tensor& tensor : tensors) {
    operations.push_back(make_all_reduce(tensor, options.reduceOp, options.asyncOp));
  }
  return submit_all(std::move(operations));
}

Nccl::WorkPtr Nccl::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const Tensor& tensor = tensors.at(0);
  const int root = static_cast<int>(options.rootRank);
  const std::string text = signature("reduce", tensor, name_of(options.reduceOp) + ", root " + std::to_string(root));
  const auto run = [this, self = c10::intrusive_ptr<Nccl>::unsafe_reclaim_from_nonowning(this), values = flat(tensor), op = options.reduceOp, root, text] {
    Tensors addends;
    std::vector<Message> sends, receives;
    if (rank_ != root) {
      sends.push_back({root, values.mutable_data_ptr(), values.nbytes(), "reduce"});
    }
    for (int rank = 0; rank < size_ && rank_ == root; ++rank) {
      addends.push_back(rank == rank_ ? values : at::empty_like(values));
      if (rank != rank_) {
        receives.push_back({rank, addends.back().mutable_data_ptr(), values.nbytes(), "reduce"});
      }
    }
    mailboxes_->meet(text, sends, receives);
    if (rank_ == root) {
      reduce_into(values, addends, op);
    }
  };
  Tensors writes = rank_ == root ? Tensors{tensor} : Tensors{};
  return submit({c10d::OpType::REDUCE, "reduce", {tensor}, writes, run, options.asyncOp});
}

Nccl::WorkPtr Nccl::allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return submit(make_all_gather(outputs.at(0), inputs.at(0), options.asyncOp));
}

Nccl::WorkPtr Nccl::_allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) {
  TORCH_CHECK(output.numel() == input.numel() * size_, "output tensor size must be equal to world_size times input tensor size");
  TORCH_CHECK(output.scalar_type() == input.scalar_type(), "output tensor must have the same type as input tensor");
  check_tensor(output);
  return submit(make_all_gather(output.as_strided({output.numel()}, {1}).chunk(size_), input, options.asyncOp));
}

Nccl::WorkPtr Nccl::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  std::vector<Operation> operations;
  for (size_t i = 0; i < inputs.size(); ++i) {
    operations.push_back(make_all_gather(outputs.at(i).view({-1}).chunk(size_), inputs[i], options.asyncOp));
  }
  return submit_all(std::move(operations));
}

Nccl::WorkPtr Nccl::gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const int root = static_cast<int>(options.rootRank);
  const std::string text = signature("gather", inputs.at(0), "root " + std::to_string(root));
  Tensors sources = absent(size_), targets;
  sources[size_t(root)] = inputs[0];
  if (rank_ == root) {
    targets = outputs.at(0);
  }
  return submit(make_all_to_all(targets, sources, "gather", text, options.asyncOp));
}

Nccl::WorkPtr Nccl::scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) {
  const int root = static_cast<int>(options.rootRank);
  const std::string text = signature("scatter", outputs.at(0), "root " + std::to_string(root));
  Tensors targets = absent(size_), sources;
  targets[size_t(root)] = outputs[0];
  if (rank_ == root) {
    sources = inputs.at(0);
  }
  return submit(make_all_to_all(targets, sources, "scatter", text, options.asyncOp));
}

Nccl::WorkPtr Nccl::reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) {
  return submit(make_reduce_scatter(outputs.at(0), inputs.at(0), options.reduceOp, options.asyncOp));
}

Nccl::WorkPtr Nccl::_reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK(input.numel() == output.numel() * size_, "input tensor must be the same size as output size times world size");
  TORCH_CHECK(output.scalar_type() == input.scalar_type(), "input tensor must be the same type as the output tensor.");
  check_tensor(input);
  return submit(make_reduce_scatter(
      output, input.as_strided({input.numel()}, {1}).chunk(size_), options.reduceOp, options.asyncOp));
}

Nccl::WorkPtr Nccl::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  std::vector<Operation> operations;
  for (size_t i = 0; i < inputs.size(); ++i) {
    operations.push_back(
        make_reduce_scatter(outputs.at(i), inputs[i].view({-1}).chunk(size_), options.reduceOp, options.asyncOp));
  }
  return submit_all(std::move(operations));
}

Nccl::WorkPtr Nccl::alltoall_base(
    Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
    const c10d::AllToAllOptions& options) {
  const auto parts = [&](const Tensor& tensor, const std::vector<int64_t>& sizes) {
    TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
    if (sizes.empty()) {
      TORCH_CHECK(tensor.size(0) % size_ == 0, "Tensor's dim 0 does not divide equally across group size");
      return tensor.split(std::max<int64_t>(tensor.size(0) / size_, 1), 0);
    }
    return tensor.split_with_sizes(sizes, 0);
  };
  check_tensor(input);
  check_tensor(output);
  // Each pair of ranks has a number of rows of its own: all ranks share only the size of a row.
  std::ostringstream text;
  text << "all_to_all (" << (input_sizes.empty() ? "" : "rows by count, ") << input.scalar_type() << ")";
  return submit(make_all_to_all(parts(output, output_sizes), parts(input, input_sizes), "all_to_all", text.str(), options.asyncOp));
}

Nccl::WorkPtr Nccl::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  return submit(make_all_to_all(outputs, inputs, "all_to_all", "all_to_all of lists", options.asyncOp));
}

Nccl::WorkPtr Nccl::barrier(const c10d::BarrierOptions& options) {
  const auto device = options.device ? options.device->index()
      : !options.device_ids.empty()  ? static_cast<c10::DeviceIndex>(options.device_ids[0])
      : bound_device_id_             ? bound_device_id_->index()
                                     : current_device();
  const Tensor token = at::zeros({1}, at::TensorOptions().dtype(at::kFloat).device(c10::DeviceType::CUDA, device));
  Operation operation = make_all_reduce(token, c10d::ReduceOp::SUM, options.asyncOp);
  operation.type = c10d::OpType::BARRIER;
  operation.name = "barrier";
  return submit(std::move(operation));
}

Nccl::WorkPtr Nccl::send(Tensors& tensors, int peer, int) {
  return submit(make_message(tensors, peer, true));
}

Nccl::WorkPtr Nccl::recv(Tensors& tensors, int peer, int) {
  return submit(make_message(tensors, peer, false));
}

}  // namespace emulated_cuda
