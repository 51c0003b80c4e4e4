// SPDX-License-Identifier: Apache-2.0
#include <new>

#include "support/comm/comm.h"

namespace shardwright::comm {

namespace {

class SerialComm final : public Comm {
 public:
  using Comm::AllToAll;

  int rank() const override { return 0; }
  int size() const override { return 1; }

  Status Barrier() override { return {}; }

  Status Bcast(Bytes&, int root) override { return CheckRoot(root); }

  Result<std::vector<Bytes>> Gather(std::span<const std::byte> mine, int root) override {
    SW_TRY(CheckRoot(root));
    return AllGather(mine);
  }

  Result<std::vector<Bytes>> AllGather(std::span<const std::byte> mine) override {
    try {
      std::vector<Bytes> all;
      all.emplace_back(mine.begin(), mine.end());
      return all;
    } catch (const std::bad_alloc&) {
      return Fail(Errc::kLimit, "out of memory: cannot allocate ", mine.size(), " bytes");
    }
  }

  Result<std::vector<Bytes>> AllToAll(std::span<const std::span<const std::byte>> pieces,
                                      std::uint64_t receive_cap) override {
    if (pieces.size() != 1) {
      return Fail(Errc::kInternal, "all-to-all: 1 piece expected, found ", pieces.size());
    }
    if (pieces[0].size() > receive_cap) {
      return Fail(Errc::kLimit, "all-to-all: ", receive_cap, " bytes at most, would receive ",
                  pieces[0].size());
    }
    return AllGather(pieces[0]);
  }

  Result<std::uint64_t> AllReduce(std::uint64_t mine, ReduceOp) override { return mine; }

 private:
  static Status CheckRoot(int root) {
    if (root == 0) return {};
    return Fail(Errc::kInternal, "root ", root, " of 1 rank");
  }
};

}  // namespace

std::unique_ptr<Comm> MakeSerialComm() { return std::make_unique<SerialComm>(); }

}  // namespace shardwright::comm
