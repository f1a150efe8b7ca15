// The backend "nccl" between emulated devices: each communicator has a stream, values pass through shared memory.
#pragma once

#include "operators.h"
#include "shared_mailboxes.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <climits>

namespace emulated_cuda {

// Let go of the tensors of communications that no stream has waited for and that the host knows to have ended.
void release_ended_communications();

// What torch exposes of ncclConfig_t, with NCCL's mark of a number that is not set; it changes nothing here.
struct NcclConfig final {
  int blocking = INT_MIN;
  int cga_cluster_size = INT_MIN;
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
};

class Nccl final : public c10d::Backend {
 public:
  struct Options final : c10d::Backend::Options {
    Options() : c10d::Backend::Options("nccl", std::chrono::minutes(10)) {}
    NcclConfig config;
    bool is_high_priority_stream = false;
    c10::intrusive_ptr<Nccl> split_from;
    int64_t split_color = 0;
  };

  Nccl(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, c10::intrusive_ptr<Options> options);
  ~Nccl() override;

  const std::string getBackendName() const override {
    return "nccl";
  }
  bool supportsSplitting() const override {
    return true;
  }
  bool supportsCoalescing() const override {
    return true;
  }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override {
    return options_;
  }
  c10::intrusive_ptr<Options> options() const {
    return options_;
  }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return sequence_;
  }
  void eagerConnectSingleDevice(at::Device device) override;
  void abort() override;
  void shutdown() override {}
  // A rank that is in no group of a split takes part in it all the same.
  void take_part_in_split();
  // torch.distributed.split_group: a group of some of this group's ranks, or null for a rank that is in none.
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& given) override;

  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;

  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<std::vector<at::Tensor>>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  WorkPtr send(Tensors& tensors, int peer, int tag) override;
  WorkPtr recv(Tensors& tensors, int peer, int tag) override;

 private:
  // A communication: what it reads and writes, and what it does when all ranks have come.
  struct Operation {
    c10d::OpType type;
    std::string name;
    Tensors reads;
    Tensors writes;
    std::function<void()> run;
    bool is_async = true;
    // The other rank of a message; -1 for a collective.
    int peer = -1;
    Message message{};
  };

  WorkPtr launch(std::vector<Operation> operations);
  WorkPtr submit(Operation operation);
  WorkPtr submit_all(std::vector<Operation> operations);
  Stream& communication_stream(c10::DeviceIndex device, const std::string& key);
  void check_bound_device(const at::Tensor& tensor) const;
  std::string signature(const std::string& name, const at::Tensor& tensor, const std::string& detail = "") const;
  void reduce_into(const at::Tensor& target, const std::vector<at::Tensor>& addends, const c10d::ReduceOp& op) const;
  Operation make_message(Tensors& tensors, int peer, bool is_send);
  Operation make_all_gather(const Tensors& outputs, const at::Tensor& input, bool is_async);
  Operation make_reduce_scatter(const at::Tensor& output, const Tensors& inputs, const c10d::ReduceOp& op, bool is_async);
  Operation make_all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op, bool is_async);
  Operation make_all_to_all(const Tensors& outputs, const Tensors& inputs, const std::string& name, const std::string& what, bool is_async);

  c10::intrusive_ptr<Options> options_;
  std::shared_ptr<SharedMailboxes> mailboxes_;
  // Calls of several threads come one after the other.
  std::shared_ptr<std::mutex> order_ = std::make_shared<std::mutex>();
  std::map<std::string, Stream*> streams_;
  uint64_t sequence_ = 0;
  bool is_coalescing_ = false;
  std::vector<Operation> coalesced_;
};

}  // namespace emulated_cuda
