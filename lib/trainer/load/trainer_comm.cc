// SPDX-License-Identifier: Apache-2.0
#include "trainer/load/trainer_comm.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace shardwright::trainer {
namespace {

using comm::Bytes;

class TrainerComm final : public comm::Comm {
 public:
  using Comm::AllToAll;

  TrainerComm(int rank, int size, SwapFunction swap) : rank_(rank), size_(size), swap_(swap) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Status Barrier() override {
    SW_TRY(AllGather({}));
    return {};
  }

  Status Bcast(Bytes& bytes, int root) override {
    const std::uint64_t count = bytes.size();
    SW_TRY_ASSIGN(std::vector<Bytes> got,
                  Swap(Transport::kFromRoot, root, bytes, std::span(&count, 1), 1));
    bytes = std::move(got[0]);
    return {};
  }

  Result<std::vector<Bytes>> Gather(std::span<const std::byte> mine, int root) override {
    SW_TRY_ASSIGN(std::vector<Bytes> all, AllGather(mine));
    if (rank_ != root) all.clear();
    return all;
  }

  Result<std::vector<Bytes>> AllGather(std::span<const std::byte> mine) override {
    const std::uint64_t count = mine.size();
    return Swap(Transport::kToAll, 0, mine, std::span(&count, 1), static_cast<std::size_t>(size_));
  }

  Result<std::vector<Bytes>> AllToAll(std::span<const std::span<const std::byte>> pieces,
                                      std::uint64_t receive_cap) override {
    Bytes all;
    std::vector<std::uint64_t> counts;
    for (const auto& piece : pieces) {
      counts.push_back(piece.size());
      all.insert(all.end(), piece.begin(), piece.end());
    }
    SW_TRY_ASSIGN(std::vector<Bytes> got,
                  Swap(Transport::kEachToEach, 0, all, counts, static_cast<std::size_t>(size_)));
    if (receive_cap == std::numeric_limits<std::uint64_t>::max()) return got;
    std::uint64_t total = 0;
    for (const Bytes& one : got) total += one.size();
    Status fits;
    if (total > receive_cap) {
      fits = Fail(Errc::kLimit, "all-to-all: expected at most ", receive_cap, " bytes, received ",
                  total);
    }
    SW_TRY(Agree(std::move(fits)));
    return got;
  }

  Result<std::uint64_t> AllReduce(std::uint64_t mine, comm::ReduceOp op) override {
    SW_TRY_ASSIGN(const std::vector<Bytes> all, AllGather(std::as_bytes(std::span(&mine, 1))));
    std::uint64_t total = 0;
    for (const Bytes& bytes : all) {
      std::uint64_t one = 0;
      if (bytes.size() != sizeof one) {
        return Fail(Errc::kInternal, "ranks of the trainer called different collectives");
      }
      std::memcpy(&one, bytes.data(), sizeof one);
      if (op == comm::ReduceOp::kMax) total = std::max(total, one);
      if (op == comm::ReduceOp::kSum) total += one;
      if (op == comm::ReduceOp::kOr) total |= one;
    }
    return total;
  }

 private:
  Result<std::vector<Bytes>> Swap(Transport what, int root, std::span<const std::byte> sent,
                                  std::span<const std::uint64_t> sent_bytes, std::size_t pieces) {
    const void* received = nullptr;
    const std::uint64_t* received_bytes = nullptr;
    const bool ok = !broken_ && swap_(static_cast<std::int32_t>(what), root, sent.data(),
                                      sent_bytes.data(), &received, &received_bytes) == 0;
    // A function in another language may also fail without setting its results.
    if (!ok || received_bytes == nullptr) {
      broken_ = true;
      return Fail(Errc::kIo, "a collective of the trainer's process group failed");
    }
    std::vector<Bytes> out(pieces);
    const auto* at = static_cast<const std::byte*>(received);
    for (std::size_t i = 0; i < pieces; ++i) {
      out[i].assign(at, at + received_bytes[i]);
      at += received_bytes[i];
    }
    return out;
  }

  const int rank_;
  const int size_;
  const SwapFunction swap_;
  bool broken_ = false;
};

}  // namespace

std::unique_ptr<comm::Comm> MakeTrainerComm(int rank, int size, SwapFunction swap) {
  return std::make_unique<TrainerComm>(rank, size, swap);
}

}  // namespace shardwright::trainer
