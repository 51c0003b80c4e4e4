// SPDX-License-Identifier: Apache-2.0
#include "support/comm/threads.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "support/base/exception_to_error.h"

namespace shardwright::comm {

namespace {

enum class Kind { kBarrier, kBcast, kGather, kAllGather, kAllToAll, kAllReduce, kDone };

// Arguments of one rank in a collective, which the other ranks can read.
struct Shown {
  Kind kind = Kind::kBarrier;
  int root = 0;
  std::uint64_t number = 0;
  std::span<const std::byte> bytes;
  std::span<const std::span<const std::byte>> pieces;
};

// Barrier of the threads, which also checks that all of them are in the same collective.
class Meeting {
 public:
  explicit Meeting(int ranks)
      : shown_(static_cast<std::size_t>(ranks)), calls_(shown_.size()), ranks_(ranks) {}

  /// Publishes `mine` and waits for all ranks. Their arguments may be read until Part.
  Status Meet(int rank, const Shown& mine) {
    {
      const std::lock_guard lock(mutex_);
      shown_[static_cast<std::size_t>(rank)] = mine;
    }
    return Wait(rank, {mine.kind, mine.root});
  }

  /// Waits until all ranks have finished reading.
  Status Part(int rank) { return Wait(rank, {Kind::kDone, 0}); }

  void Leave() {
    const std::lock_guard lock(mutex_);
    ++gone_;
    if (waiting_ > 0 && waiting_ + gone_ == ranks_) Close();
  }

  const Shown& At(int rank) const { return shown_[static_cast<std::size_t>(rank)]; }

 private:
  // Call of a rank: the kind of the collective, and its root or operation.
  using Call = std::pair<Kind, int>;

  Status Wait(int rank, Call call) {
    std::unique_lock lock(mutex_);
    calls_[static_cast<std::size_t>(rank)] = call;
    const std::uint64_t round = round_;
    if (++waiting_ + gone_ == ranks_) Close();
    met_.wait(lock, [&] { return round_ != round; });
    return verdict_;
  }

  // Ends a round in which every rank waits or has returned. The caller locks the mutex.
  void Close() {
    if (gone_ > 0) {
      verdict_ = Fail(Errc::kInternal, gone_, " ranks have left while others are in a collective");
    }
    for (const Call& call : calls_) {
      if (gone_ == 0 && call != calls_[0]) {
        verdict_ = Fail(Errc::kInternal, "ranks are in different collectives");
      }
    }
    waiting_ = 0;
    ++round_;
    met_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable met_;
  std::vector<Shown> shown_;  // written before a meeting, read between Meet and Part
  std::vector<Call> calls_;
  int ranks_;
  int waiting_ = 0;
  int gone_ = 0;
  std::uint64_t round_ = 0;
  Status verdict_;  // an error stays for all later calls
};

class ThreadComm final : public Comm {
 public:
  using Comm::AllToAll;

  ThreadComm(Meeting& meeting, int rank, int size) : meeting_(meeting), rank_(rank), size_(size) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Status Barrier() override { return meeting_.Meet(rank_, {}); }

  Status Bcast(Bytes& bytes, int root) override {
    SW_TRY(CheckRoot(root));
    Shown mine;
    mine.kind = Kind::kBcast;
    mine.root = root;
    mine.bytes = bytes;
    return Collect(mine, [&] {
      if (rank_ == root) return;
      const std::span<const std::byte> from = meeting_.At(root).bytes;
      bytes.assign(from.begin(), from.end());
    });
  }

  Result<std::vector<Bytes>> Gather(std::span<const std::byte> mine, int root) override {
    SW_TRY(CheckRoot(root));
    return GatherAs(Kind::kGather, mine, root, rank_ == root);
  }

  Result<std::vector<Bytes>> AllGather(std::span<const std::byte> mine) override {
    return GatherAs(Kind::kAllGather, mine, 0, true);
  }

  Result<std::vector<Bytes>> AllToAll(std::span<const std::span<const std::byte>> pieces,
                                      std::uint64_t receive_cap) override {
    Shown mine;
    mine.kind = Kind::kAllToAll;
    mine.pieces = pieces;
    SW_TRY(meeting_.Meet(rank_, mine));
    // Every rank checks all pieces, so all get the same result.
    Status fits;
    std::uint64_t total = 0;
    for (int r = 0; r < size_; ++r) {
      if (meeting_.At(r).pieces.size() != static_cast<std::size_t>(size_)) {
        fits = Fail(Errc::kInternal, "all-to-all: ", size_, " pieces expected, found ",
                    meeting_.At(r).pieces.size());
      }
    }
    if (fits) {
      for (int r = 0; r < size_; ++r) total += meeting_.At(r).pieces[Index(rank_)].size();
      if (total > receive_cap) {
        fits = Fail(Errc::kLimit, "all-to-all: ", receive_cap, " bytes at most, would receive ",
                    total);
      }
    }
    std::vector<Bytes> received(fits ? Index(size_) : 0);
    for (std::size_t r = 0; r < received.size(); ++r) {
      const auto from = meeting_.At(static_cast<int>(r)).pieces[Index(rank_)];
      received[r].assign(from.begin(), from.end());
    }
    SW_TRY(meeting_.Part(rank_));
    SW_TRY(Agree(std::move(fits)));
    return received;
  }

  Result<std::uint64_t> AllReduce(std::uint64_t mine, ReduceOp op) override {
    Shown shown;
    shown.kind = Kind::kAllReduce;
    shown.root = static_cast<int>(op);
    shown.number = mine;
    std::uint64_t all = 0;
    SW_TRY(Collect(shown, [&] {
      for (int r = 0; r < size_; ++r) {
        const std::uint64_t number = meeting_.At(r).number;
        if (op == ReduceOp::kMax) all = std::max(all, number);
        if (op == ReduceOp::kSum) all += number;
        if (op == ReduceOp::kOr) all |= number;
      }
    }));
    return all;
  }

 private:
  static std::size_t Index(int rank) { return static_cast<std::size_t>(rank); }

  Status CheckRoot(int root) const {
    if (root >= 0 && root < size_) return {};
    return Fail(Errc::kInternal, "root ", root, " of ", size_, " ranks");
  }

  // Publishes `mine`, lets `copy` read the arguments of all ranks, and waits until all have read.
  template <class Copy>
  Status Collect(const Shown& mine, Copy&& copy) {
    SW_TRY(meeting_.Meet(rank_, mine));
    copy();
    return meeting_.Part(rank_);
  }

  Result<std::vector<Bytes>> GatherAs(Kind kind, std::span<const std::byte> mine, int root,
                                      bool takes) {
    Shown shown;
    shown.kind = kind;
    shown.root = root;
    shown.bytes = mine;
    std::vector<Bytes> all;
    SW_TRY(Collect(shown, [&] {
      for (int r = 0; takes && r < size_; ++r) {
        const std::span<const std::byte> from = meeting_.At(r).bytes;
        all.emplace_back(from.begin(), from.end());
      }
    }));
    return all;
  }

  Meeting& meeting_;
  int rank_;
  int size_;
};

}  // namespace

std::vector<Status> RunThreads(int ranks, const std::function<Status(Comm&)>& body) {
  Meeting meeting(ranks);
  std::vector<Status> outcomes(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  threads.reserve(outcomes.size());
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      ThreadComm comm(meeting, rank, ranks);
      Status& outcome = outcomes[static_cast<std::size_t>(rank)];
      try {
        outcome = body(comm);
      } catch (...) {
        outcome = tl::unexpected<Error>(CaughtError());
      }
      meeting.Leave();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

}  // namespace shardwright::comm
