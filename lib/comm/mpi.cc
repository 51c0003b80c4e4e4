#include <mpi.h>

#include <algorithm>
#include <climits>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "comm/mpi_internal.h"

namespace shardwright::comm::internal {

namespace {

constexpr int kTag = 1;

Status Check(int code, const char* what) {
  if (code == MPI_SUCCESS) return {};
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  int kind = MPI_ERR_OTHER;
  MPI_Error_string(code, text, &length);
  MPI_Error_class(code, &kind);
  const bool misuse = kind == MPI_ERR_BUFFER || kind == MPI_ERR_COUNT || kind == MPI_ERR_TYPE ||
                      kind == MPI_ERR_TAG || kind == MPI_ERR_COMM || kind == MPI_ERR_RANK ||
                      kind == MPI_ERR_ROOT || kind == MPI_ERR_OP || kind == MPI_ERR_ARG ||
                      kind == MPI_ERR_TRUNCATE || kind == MPI_ERR_REQUEST;
  return Fail(misuse ? Errc::kInternal : Errc::kIo, std::string(what) + ": " + text);
}

std::size_t Index(int rank) { return static_cast<std::size_t>(rank); }

/// Receive buffers, or kLimit when there is no memory for them.
Result<std::vector<Bytes>> Reserve(const std::vector<std::uint64_t>& sizes) {
  try {
    std::vector<Bytes> buffers(sizes.size());
    for (std::size_t i = 0; i < sizes.size(); ++i) buffers[i].resize(sizes[i]);
    return buffers;
  } catch (const std::exception&) {  // bad_alloc or length_error
    std::uint64_t total = 0;
    for (const std::uint64_t size : sizes) total += size;
    return Fail(Errc::kLimit, "no memory to receive " + std::to_string(total) + " bytes");
  }
}

/// Whether there is a value, without it.
Status Outcome(const Result<std::vector<Bytes>>& result) {
  if (result) return {};
  return tl::unexpected<Error>(result.error());
}

class MpiComm final : public Comm {
 public:
  using Comm::AllToAll;

  explicit MpiComm(std::uint64_t chunk_bytes) : chunk_bytes_(chunk_bytes) {}

  ~MpiComm() override {
    if (comm_ != MPI_COMM_NULL) MPI_Comm_free(&comm_);
    MPI_Finalize();
  }

  /// Opens a channel of our own, where errors are returned. Called once, before anything else.
  Status Open() {
    SW_TRY(Check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI error handler"));
    SW_TRY(Check(MPI_Comm_dup(MPI_COMM_WORLD, &comm_), "MPI_Comm_dup"));
    SW_TRY(Check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI error handler"));
    SW_TRY(Check(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank"));
    return Check(MPI_Comm_size(comm_, &size_), "MPI_Comm_size");
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Status Barrier() override { return Check(MPI_Barrier(comm_), "MPI_Barrier"); }

  Status Bcast(Bytes& bytes, int root) override {
    SW_TRY(CheckRoot(root));
    std::uint64_t total = bytes.size();
    SW_TRY(Check(MPI_Bcast(&total, 1, MPI_UINT64_T, root, comm_), "MPI_Bcast"));
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
    std::vector<MPI_Request> requests;
    if (rank_ != root) {
      SW_TRY(Send(mine, root, requests));
    } else {
      std::copy(mine.begin(), mine.end(), (*all)[Index(root)].begin());
      for (int r = 0; r < size_; ++r) {
        if (r != root) SW_TRY(Receive((*all)[Index(r)], r, requests));
      }
    }
    SW_TRY(Wait(requests));
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
    // The count is checked together with the cap, so that a wrong call fails on all ranks.
    const bool counted = pieces.size() == Index(size_);
    std::vector<std::uint64_t> outgoing(Index(size_));
    for (std::size_t r = 0; counted && r < outgoing.size(); ++r) outgoing[r] = pieces[r].size();
    std::vector<std::uint64_t> incoming(Index(size_));
    SW_TRY(Check(
        MPI_Alltoall(outgoing.data(), 1, MPI_UINT64_T, incoming.data(), 1, MPI_UINT64_T, comm_),
        "MPI_Alltoall"));
    Result<std::vector<Bytes>> received = Prepare(incoming, receive_cap);
    if (!counted) {
      received =
          Fail(Errc::kInternal, "all-to-all: " + std::to_string(size_) +
                                    " pieces expected, found " + std::to_string(pieces.size()));
    }
    SW_TRY(Agree(Outcome(received)));
    std::copy(pieces[Index(rank_)].begin(), pieces[Index(rank_)].end(),
              (*received)[Index(rank_)].begin());
    // In step s every rank sends to one other and receives from one other: no rank is a hot spot.
    for (int step = 1; step < size_; ++step) {
      const int to = (rank_ + step) % size_;
      const int from = (rank_ + size_ - step) % size_;
      std::vector<MPI_Request> requests;
      SW_TRY(Receive((*received)[Index(from)], from, requests));
      SW_TRY(Send(pieces[Index(to)], to, requests));
      SW_TRY(Wait(requests));
    }
    return received;
  }

  Result<std::uint64_t> AllReduce(std::uint64_t mine, ReduceOp op) override {
    const MPI_Op mpi_op = op == ReduceOp::kMax ? MPI_MAX : op == ReduceOp::kSum ? MPI_SUM : MPI_BOR;
    std::uint64_t all = 0;
    SW_TRY(Check(MPI_Allreduce(&mine, &all, 1, MPI_UINT64_T, mpi_op, comm_), "MPI_Allreduce"));
    return all;
  }

 private:
  Status CheckRoot(int root) const {
    if (root >= 0 && root < size_) return {};
    return Fail(Errc::kInternal,
                "root " + std::to_string(root) + " of " + std::to_string(size_) + " ranks");
  }

  static Result<std::vector<Bytes>> Prepare(const std::vector<std::uint64_t>& sizes,
                                            std::uint64_t cap) {
    std::uint64_t room = cap;
    for (const std::uint64_t size : sizes) {
      if (size > room) {
        return Fail(Errc::kLimit, "all-to-all: " + std::to_string(cap) +
                                      " bytes at most, would receive at least " +
                                      std::to_string(cap - room + size));
      }
      room -= size;
    }
    return Reserve(sizes);
  }

  Result<std::vector<std::uint64_t>> AllSizes(std::uint64_t mine) {
    std::vector<std::uint64_t> sizes(Index(size_));
    SW_TRY(Check(MPI_Allgather(&mine, 1, MPI_UINT64_T, sizes.data(), 1, MPI_UINT64_T, comm_),
                 "MPI_Allgather"));
    return sizes;
  }

  // MPI-3 counts are int: longer messages go in parts.
  int Part(std::size_t left) const {
    return static_cast<int>(std::min<std::uint64_t>(left, chunk_bytes_));
  }

  Status BcastChunks(std::span<std::byte> bytes, int root) {
    for (std::size_t done = 0; done < bytes.size();) {
      const int part = Part(bytes.size() - done);
      SW_TRY(Check(MPI_Bcast(bytes.data() + done, part, MPI_BYTE, root, comm_), "MPI_Bcast"));
      done += static_cast<std::size_t>(part);
    }
    return {};
  }

  Status Send(std::span<const std::byte> bytes, int to, std::vector<MPI_Request>& requests) {
    for (std::size_t done = 0; done < bytes.size();) {
      const int part = Part(bytes.size() - done);
      requests.push_back(MPI_REQUEST_NULL);
      SW_TRY(
          Check(MPI_Isend(bytes.data() + done, part, MPI_BYTE, to, kTag, comm_, &requests.back()),
                "MPI_Isend"));
      done += static_cast<std::size_t>(part);
    }
    return {};
  }

  Status Receive(std::span<std::byte> bytes, int from, std::vector<MPI_Request>& requests) {
    for (std::size_t done = 0; done < bytes.size();) {
      const int part = Part(bytes.size() - done);
      requests.push_back(MPI_REQUEST_NULL);
      SW_TRY(
          Check(MPI_Irecv(bytes.data() + done, part, MPI_BYTE, from, kTag, comm_, &requests.back()),
                "MPI_Irecv"));
      done += static_cast<std::size_t>(part);
    }
    return {};
  }

  static Status Wait(std::vector<MPI_Request>& requests) {
    if (requests.size() > INT_MAX) {
      return Fail(Errc::kInternal, "more messages at once than MPI can wait for");
    }
    return Check(
        MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE),
        "MPI_Waitall");
  }

  std::uint64_t chunk_bytes_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 1;
};

}  // namespace

Result<std::unique_ptr<Comm>> MakeMpiComm(const CommOptions& options) {
  int started = 0;
  SW_TRY(Check(MPI_Initialized(&started), "MPI_Initialized"));
  if (started != 0) return Fail(Errc::kInternal, "MPI is started once per process");
  int provided = MPI_THREAD_SINGLE;
  SW_TRY(Check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided), "MPI_Init"));
  auto comm = std::make_unique<MpiComm>(options.chunk_bytes);
  if (provided < MPI_THREAD_FUNNELED) {
    return Fail(Errc::kIo, "MPI: thread level funneled expected, found single");
  }
  SW_TRY(comm->Open());
  return comm;
}

}  // namespace shardwright::comm::internal
