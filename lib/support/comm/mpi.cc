// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support/comm/mpi_calls_internal.h"
#include "support/comm/mpi_internal.h"
#include "support/comm/mpi_library_internal.h"

namespace shardwright::comm::internal {

namespace {

std::size_t Index(int rank) { return static_cast<std::size_t>(rank); }

/// Allocates receive buffers. Fails with kLimit if there is no memory for them.
Result<std::vector<Bytes>> Reserve(const std::vector<std::uint64_t>& sizes) {
  try {
    std::vector<Bytes> buffers(sizes.size());
    for (std::size_t i = 0; i < sizes.size(); ++i) buffers[i].resize(sizes[i]);
    return buffers;
  } catch (const std::exception&) {  // bad_alloc or length_error
    std::uint64_t total = 0;
    for (const std::uint64_t size : sizes) total += size;
    return Fail(Errc::kLimit, "out of memory: cannot receive ", total, " bytes");
  }
}

/// Returns the status of a result without its value.
Status Outcome(const Result<std::vector<Bytes>>& result) {
  if (result) return {};
  return tl::unexpected<Error>(result.error());
}

class MpiComm final : public Comm {
 public:
  using Comm::AllToAll;

  MpiComm(const MpiCalls& mpi, std::uint64_t chunk_bytes) : mpi_(mpi), chunk_bytes_(chunk_bytes) {}

  ~MpiComm() override {
    if (started_) mpi_.stop();
  }

  /// Starts MPI. Called once, before all other calls.
  Status Start() {
    bool begun = false;
    SW_TRY(Check(mpi_.started(&begun), "MPI_Initialized"));
    if (begun) return Fail(Errc::kInternal, "MPI can be started only once per process");
    bool funneled = false;
    SW_TRY(Check(mpi_.start(&funneled, &rank_, &size_), "MPI_Init"));
    started_ = true;
    if (funneled) return {};
    return Fail(Errc::kIo, "MPI: thread level funneled expected, found single");
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Status Barrier() override { return Check(mpi_.barrier(), "MPI_Barrier"); }

  Status Bcast(Bytes& bytes, int root) override {
    SW_TRY(CheckRoot(root));
    std::uint64_t total = bytes.size();
    SW_TRY(Check(mpi_.bcast(&total, sizeof total, root), "MPI_Bcast"));
    Status room;
    if (rank_ != root) {
      Result<std::vector<Bytes>> buffer = Reserve({total});
      if (buffer) {
        bytes = std::move((*buffer)[0]);
      } else {
        room = tl::unexpected<Error>(std::move(buffer).error());
      }
    }
    SW_TRY(Agree(std::move(room)));
    return BcastChunks(bytes, root);
  }

  Result<std::vector<Bytes>> Gather(std::span<const std::byte> mine, int root) override {
    SW_TRY(CheckRoot(root));
    SW_TRY_ASSIGN(const std::vector<std::uint64_t> sizes, AllSizes(mine.size()));
    Result<std::vector<Bytes>> all = std::vector<Bytes>();
    if (rank_ == root) all = Reserve(sizes);
    SW_TRY(Agree(Outcome(all)));
    std::vector<MpiPart> parts;
    if (rank_ != root) {
      AddSend(parts, mine, root);
    } else {
      std::copy(mine.begin(), mine.end(), (*all)[Index(root)].begin());
      for (int r = 0; r < size_; ++r) {
        if (r != root) AddReceive(parts, (*all)[Index(r)], r);
      }
    }
    SW_TRY(Transfer(parts));
    return all;
  }

  Result<std::vector<Bytes>> AllGather(std::span<const std::byte> mine) override {
    SW_TRY_ASSIGN(const std::vector<std::uint64_t> sizes, AllSizes(mine.size()));
    Result<std::vector<Bytes>> all = Reserve(sizes);
    SW_TRY(Agree(Outcome(all)));
    std::copy(mine.begin(), mine.end(), (*all)[Index(rank_)].begin());
    for (int r = 0; r < size_; ++r) SW_TRY(BcastChunks((*all)[Index(r)], r));
    return all;
  }

  Result<std::vector<Bytes>> AllToAll(std::span<const std::span<const std::byte>> pieces,
                                      std::uint64_t receive_cap) override {
    // Checks the count together with the cap, so that a wrong call fails on all ranks.
    const bool counted = pieces.size() == Index(size_);
    std::vector<std::uint64_t> outgoing(Index(size_));
    for (std::size_t r = 0; counted && r < outgoing.size(); ++r) outgoing[r] = pieces[r].size();
    std::vector<std::uint64_t> incoming(Index(size_));
    SW_TRY(Check(mpi_.all_to_all(outgoing.data(), incoming.data()), "MPI_Alltoall"));
    Result<std::vector<Bytes>> received = Prepare(incoming, receive_cap);
    if (!counted) {
      received =
          Fail(Errc::kInternal, "all-to-all: ", size_, " pieces expected, found ", pieces.size());
    }
    SW_TRY(Agree(Outcome(received)));
    std::copy(pieces[Index(rank_)].begin(), pieces[Index(rank_)].end(),
              (*received)[Index(rank_)].begin());
    // In each step every rank sends to one rank and receives from one, so none is overloaded.
    for (int step = 1; step < size_; ++step) {
      const int to = (rank_ + step) % size_;
      const int from = (rank_ + size_ - step) % size_;
      std::vector<MpiPart> parts;
      AddReceive(parts, (*received)[Index(from)], from);
      AddSend(parts, pieces[Index(to)], to);
      SW_TRY(Transfer(parts));
    }
    return received;
  }

  Result<std::uint64_t> AllReduce(std::uint64_t mine, ReduceOp op) override {
    auto* const reduce = op == ReduceOp::kMax   ? mpi_.all_max
                         : op == ReduceOp::kSum ? mpi_.all_sum
                                                : mpi_.all_or;
    std::uint64_t all = 0;
    SW_TRY(Check(reduce(mine, &all), "MPI_Allreduce"));
    return all;
  }

 private:
  Status Check(int code, const char* what) const {
    if (code == 0) return {};
    std::array<char, 1024> text = {};
    const bool misuse = mpi_.describe(code, text.data(), text.size());
    return Fail(misuse ? Errc::kInternal : Errc::kIo, what, ": ", text.data());
  }

  Status CheckRoot(int root) const {
    if (root >= 0 && root < size_) return {};
    return Fail(Errc::kInternal, "root ", root, " of ", size_, " ranks");
  }

  static Result<std::vector<Bytes>> Prepare(const std::vector<std::uint64_t>& sizes,
                                            std::uint64_t cap) {
    std::uint64_t room = cap;
    for (const std::uint64_t size : sizes) {
      if (size > room) {
        return Fail(Errc::kLimit, "all-to-all: ", cap, " bytes at most, would receive at least ",
                    cap - room + size);
      }
      room -= size;
    }
    return Reserve(sizes);
  }

  Result<std::vector<std::uint64_t>> AllSizes(std::uint64_t mine) {
    std::vector<std::uint64_t> sizes(Index(size_));
    SW_TRY(Check(mpi_.all_gather(mine, sizes.data()), "MPI_Allgather"));
    return sizes;
  }

  // Returns the size of the next part. MPI-3 counts are int, so long messages are split.
  int Part(std::size_t left) const {
    return static_cast<int>(std::min<std::uint64_t>(left, chunk_bytes_));
  }

  Status BcastChunks(std::span<std::byte> bytes, int root) {
    for (std::size_t done = 0; done < bytes.size();) {
      const int part = Part(bytes.size() - done);
      SW_TRY(Check(mpi_.bcast(bytes.data() + done, part, root), "MPI_Bcast"));
      done += static_cast<std::size_t>(part);
    }
    return {};
  }

  void AddSend(std::vector<MpiPart>& parts, std::span<const std::byte> bytes, int to) const {
    for (std::size_t done = 0; done < bytes.size();) {
      const int part = Part(bytes.size() - done);
      // MPI also takes send buffers as void*.
      parts.push_back({const_cast<std::byte*>(bytes.data() + done), part, to, true});
      done += static_cast<std::size_t>(part);
    }
  }

  void AddReceive(std::vector<MpiPart>& parts, std::span<std::byte> bytes, int from) const {
    for (std::size_t done = 0; done < bytes.size();) {
      const int part = Part(bytes.size() - done);
      parts.push_back({bytes.data() + done, part, from, false});
      done += static_cast<std::size_t>(part);
    }
  }

  Status Transfer(const std::vector<MpiPart>& parts) const {
    return Check(mpi_.transfer(parts.data(), parts.size()), "MPI_Waitall");
  }

  const MpiCalls& mpi_;
  std::uint64_t chunk_bytes_;
  bool started_ = false;
  int rank_ = 0;
  int size_ = 1;
};

}  // namespace

Result<std::unique_ptr<Comm>> MakeMpiComm(const CommOptions& options) {
  SW_TRY_ASSIGN(const MpiLibrary library, OpenLaunchersMpi());
  auto comm = std::make_unique<MpiComm>(*library.calls, options.chunk_bytes);
  // Read before the start, because an MPI library without its launcher changes the variables.
  const std::uint64_t started = LauncherSize(ProcessEnvironment).value_or(1);
  SW_TRY(comm->Start());
  SW_TRY(CheckMetOthers(library, started, comm->size()));
  return comm;
}

}  // namespace shardwright::comm::internal
