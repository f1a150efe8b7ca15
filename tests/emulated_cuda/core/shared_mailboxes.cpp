#include "shared_mailboxes.h"

#include "peers.h"

#include <c10/util/Exception.h>

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <sstream>

namespace emulated_cuda {

namespace {

constexpr size_t kTextBytes = 512;
constexpr size_t kMailboxBytes = size_t{1} << 16;
constexpr auto kPoll = std::chrono::milliseconds(20);

void copy_text(char* target, const std::string& text) {
  std::strncpy(target, text.c_str(), kTextBytes - 1);
}

std::string folder_of_segments() {
  struct stat found {};
  return stat("/dev/shm", &found) == 0 && access("/dev/shm", W_OK) == 0 ? "/dev/shm" : P_tmpdir;
}

}  // namespace

struct SharedMailboxes::Header {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  std::atomic<uint64_t> version;
  std::atomic<int> num_attached;
  std::atomic<uint64_t> num_arrivals;
};

// What a rank said at its last two meetings, and the clock of its stream.
struct SharedMailboxes::Slot {
  std::atomic<uint64_t> num_meetings;
  char text[2][kTextBytes];
  SharedClock clock[2];
};

struct SharedMailboxes::Mailbox {
  std::atomic<bool> is_full;
  uint64_t message_bytes;
  uint64_t num_bytes;
  char text[kTextBytes];
  char data[kMailboxBytes];
};

SharedMailboxes::SharedMailboxes(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout)
    : rank_(rank), size_(size), timeout_(timeout) {
  num_bytes_ = sizeof(Header) + sizeof(Slot) * size_t(size) + sizeof(Mailbox) * size_t(size) * size_t(size);
  std::string path;
  int file = -1;
  if (rank == 0) {
    path = folder_of_segments() + "/emulated-nccl-" + std::to_string(getpid()) + "-" + std::to_string(std::random_device()());
    file = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
    TORCH_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(num_bytes_)) == 0, "cannot create ", path, ": ", std::strerror(errno));
  } else {
    const auto bytes = store->get("emulated_nccl");
    path.assign(bytes.begin(), bytes.end());
    file = open(path.c_str(), O_RDWR);
    TORCH_CHECK(file >= 0, "cannot open ", path, ", which another rank of this node made: ", std::strerror(errno));
  }
  void* place = mmap(nullptr, num_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  TORCH_CHECK(place != MAP_FAILED, "cannot map ", path, ": ", std::strerror(errno));
  memory_ = static_cast<char*>(place);
  if (rank == 0) {
    pthread_mutexattr_t mutex;
    pthread_mutexattr_init(&mutex);
    pthread_mutexattr_setpshared(&mutex, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&mutex, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&header().mutex, &mutex);
    pthread_condattr_t condition;
    pthread_condattr_init(&condition);
    pthread_condattr_setpshared(&condition, PTHREAD_PROCESS_SHARED);
    pthread_cond_init(&header().changed, &condition);
    store->set("emulated_nccl", std::vector<uint8_t>(path.begin(), path.end()));
  }
  // The last rank that has the file open removes its name.
  if (header().num_attached.fetch_add(1) + 1 == size) {
    unlink(path.c_str());
  }
}

SharedMailboxes::~SharedMailboxes() {
  munmap(memory_, num_bytes_);
}

SharedMailboxes::Header& SharedMailboxes::header() const {
  return *reinterpret_cast<Header*>(memory_);
}

SharedMailboxes::Slot& SharedMailboxes::slot(int rank) const {
  return reinterpret_cast<Slot*>(memory_ + sizeof(Header))[rank];
}

SharedMailboxes::Mailbox& SharedMailboxes::mailbox(int sender, int receiver) const {
  auto* first = reinterpret_cast<Mailbox*>(memory_ + sizeof(Header) + sizeof(Slot) * size_t(size_));
  return first[sender * size_ + receiver];
}

uint64_t SharedMailboxes::version() const {
  return header().version.load();
}

void SharedMailboxes::announce_change() {
  if (pthread_mutex_lock(&header().mutex) == EOWNERDEAD) {
    pthread_mutex_consistent(&header().mutex);
  }
  header().version.fetch_add(1);
  pthread_cond_broadcast(&header().changed);
  pthread_mutex_unlock(&header().mutex);
}

void SharedMailboxes::wait_for_change(
    uint64_t seen, std::chrono::steady_clock::time_point start, const std::function<std::string()>& what) {
  if (is_aborted_) {
    throw Aborted{};
  }
  const auto timeout = timeout_.load();
  TORCH_CHECK_WITH(DistBackendError, std::chrono::steady_clock::now() - start < timeout, "NCCL timeout: rank ", rank_,
                   " of ", size_, " has waited for ", timeout.count(), " ms in ", what());
  if (pthread_mutex_lock(&header().mutex) == EOWNERDEAD) {
    pthread_mutex_consistent(&header().mutex);
  }
  if (version() == seen) {
    timespec until{};
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += std::chrono::nanoseconds(kPoll).count();
    if (until.tv_nsec >= 1'000'000'000) {
      until.tv_nsec -= 1'000'000'000;
      ++until.tv_sec;
    }
    pthread_cond_timedwait(&header().changed, &header().mutex, &until);
  }
  pthread_mutex_unlock(&header().mutex);
}

void SharedMailboxes::wait_for_all(const std::string& signature) {
  const auto start = std::chrono::steady_clock::now();
  const uint64_t number = ++num_meetings_;
  // A rank overwrites what it said two meetings ago: every rank has read it, or the last meeting would not be over.
  copy_text(slot(rank_).text[number % 2], signature);
  Stream* stream = running_stream();
  if (stream != nullptr) {
    write_clock(slot(rank_).clock[number % 2], *stream);
  }
  slot(rank_).num_meetings.store(number);
  // No rank comes to a meeting before the last one is over, so the count says when all are there. Only the last rank
  // wakes the others.
  const uint64_t all = number * static_cast<uint64_t>(size_);
  if (header().num_arrivals.fetch_add(1) + 1 == all) {
    announce_change();
  }
  const auto what = [&] {
    int missing = 0;
    while (missing + 1 < size_ && slot(missing).num_meetings.load() >= number) {
      ++missing;
    }
    return signature + ", for rank " + std::to_string(missing);
  };
  while (true) {
    const uint64_t seen = version();
    if (header().num_arrivals.load() >= all) {
      break;
    }
    wait_for_change(seen, start, what);
  }
  for (int rank = 0; rank < size_; ++rank) {
    const std::string theirs = slot(rank).text[number % 2];
    const std::string mine = slot(rank_).text[number % 2];
    TORCH_CHECK_WITH(DistBackendError, theirs == mine, "matching calls differ: rank ", rank_, " of the group: ",
                     mine, "; rank ", rank, ": ", theirs);
    // All ranks' work on symmetric memory so far comes before what follows.
    if (stream != nullptr) {
      join_clock(*stream, slot(rank).clock[number % 2]);
    }
  }
}

void SharedMailboxes::meet(
    const std::string& signature, const std::vector<Message>& sends, const std::vector<Message>& receives) {
  pass(sends, receives, &signature);
}

void SharedMailboxes::pass(
    const std::vector<Message>& sends, const std::vector<Message>& receives, const std::string* signature) {
  struct Progress {
    const Message* message;
    size_t done = 0;
    bool is_started = false;
  };
  const auto start = std::chrono::steady_clock::now();
  std::map<int, std::vector<Progress>> outgoing, incoming;
  for (const auto& message : sends) {
    outgoing[message.peer].push_back({&message});
  }
  for (const auto& message : receives) {
    incoming[message.peer].push_back({&message});
  }
  const auto push = [&](Progress& each) {
    Mailbox& box = mailbox(rank_, each.message->peer);
    if (box.is_full.load()) {
      return false;
    }
    const size_t part = std::min(kMailboxBytes, each.message->num_bytes - each.done);
    std::memcpy(box.data, static_cast<char*>(each.message->data) + each.done, part);
    copy_text(box.text, each.message->signature);
    box.num_bytes = part;
    box.message_bytes = each.message->num_bytes;
    each.done += part;
    each.is_started = true;
    box.is_full.store(true);
    return true;
  };
  const auto pull = [&](Progress& each) {
    Mailbox& box = mailbox(each.message->peer, rank_);
    if (!box.is_full.load()) {
      return false;
    }
    TORCH_CHECK_WITH(DistBackendError,
                     each.message->signature.compare(0, kTextBytes - 1, box.text) == 0 && box.message_bytes == each.message->num_bytes,
                     "matching calls differ: rank ", rank_, " of the group receives ", each.message->signature,
                     " (", each.message->num_bytes, " bytes) from rank ", each.message->peer, ", which sends ",
                     std::string(box.text), " (", box.message_bytes, " bytes)");
    std::memcpy(static_cast<char*>(each.message->data) + each.done, box.data, box.num_bytes);
    each.done += box.num_bytes;
    each.is_started = true;
    box.is_full.store(false);
    return true;
  };
  const auto advance = [&](std::map<int, std::vector<Progress>>& queues, const auto& move) {
    bool has_moved = false;
    for (auto& [peer, queue] : queues) {
      while (!queue.empty() && move(queue.front())) {
        has_moved = true;
        if (queue.front().done == queue.front().message->num_bytes) {
          queue.erase(queue.begin());
        }
      }
    }
    return has_moved;
  };
  const auto is_done = [&] {
    for (const auto* queues : {&outgoing, &incoming}) {
      for (const auto& [peer, queue] : *queues) {
        if (!queue.empty()) {
          return false;
        }
      }
    }
    // A message is not buffered: a send lasts until it is received. At a collective all ranks are there already.
    for (const auto& [peer, queue] : outgoing) {
      if (signature == nullptr && mailbox(rank_, peer).is_full.load()) {
        return false;
      }
    }
    return true;
  };
  if (signature != nullptr) {
    // What fits is there when the last rank comes.
    advance(outgoing, push);
    wait_for_all(*signature);
  }
  while (true) {
    const uint64_t seen = version();
    const bool has_sent = advance(outgoing, push);
    const bool has_received = advance(incoming, pull);
    if (has_sent || has_received) {
      announce_change();
    }
    if (is_done()) {
      return;
    }
    if (!has_sent && !has_received) {
      wait_for_change(seen, start, [&] {
        std::ostringstream what;
        for (const auto& [peer, queue] : outgoing) {
          what << (queue.empty() ? "a send to rank " : "a send that has not begun to rank ") << peer << ", ";
        }
        for (const auto& [peer, queue] : incoming) {
          what << "a receive from rank " << peer << ", ";
        }
        return what.str() + "which must be called by both ends";
      });
    }
  }
}

}  // namespace emulated_cuda
