// Memory that the ranks of a group share on one node, in which they meet and pass messages.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace emulated_cuda {

struct Message {
  int peer;
  void* data;
  size_t num_bytes;
  std::string signature;  // equal on both sides
};

// Raised by a wait that another thread has ended.
struct Aborted {};

// Every call returns when all ranks that take part have made theirs: the strictest behavior that NCCL may show.
class SharedMailboxes {
 public:
  SharedMailboxes(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout);
  ~SharedMailboxes();
  SharedMailboxes(const SharedMailboxes&) = delete;

  // Wait for all ranks, and then send and receive the messages of a collective. The signatures of the ranks must be
  // equal: NCCL checks none, and hangs or computes wrong values.
  void meet(const std::string& signature, const std::vector<Message>& sends = {}, const std::vector<Message>& receives = {});
  // Send and receive messages between pairs of ranks, which progress together; those with one peer are in order.
  void exchange(const std::vector<Message>& sends, const std::vector<Message>& receives) {
    pass(sends, receives, nullptr);
  }

  void abort() {
    is_aborted_ = true;
  }
  bool is_aborted() const {
    return is_aborted_;
  }
  void set_timeout(std::chrono::milliseconds timeout) {
    timeout_ = timeout;
  }

 private:
  struct Header;
  struct Slot;
  struct Mailbox;

  Header& header() const;
  Slot& slot(int rank) const;
  Mailbox& mailbox(int sender, int receiver) const;
  uint64_t version() const;
  void announce_change();
  void wait_for_all(const std::string& signature);
  // With a signature the messages are those of a collective.
  void pass(const std::vector<Message>& sends, const std::vector<Message>& receives, const std::string* signature);
  // Wait until another rank has changed something since a version.
  void wait_for_change(
      uint64_t seen, std::chrono::steady_clock::time_point start, const std::function<std::string()>& what);

  int rank_;
  int size_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<bool> is_aborted_{false};
  uint64_t num_meetings_ = 0;
  char* memory_ = nullptr;
  size_t num_bytes_ = 0;
};

}  // namespace emulated_cuda
