// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "engine/device/host.h"
#include "engine/tensor/convert.h"

namespace shardwright::device {
namespace {

using comm::Bytes;

class HostCollective final : public Collective {
 public:
  HostCollective(comm::Comm& comm, std::vector<int> members, int rank)
      : comm_(comm), members_(std::move(members)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(members_.size()); }

  Status AllGather(Stream&, std::byte* to, const std::byte* from,
                   std::span<const std::uint64_t> bytes) override {
    SW_CHECK(bytes.size() == members_.size());
    std::vector<std::span<const std::byte>> out(members_.size(), {from, bytes[Mine()]});
    std::vector<std::span<std::byte>> in;
    std::uint64_t at = 0;
    for (const std::uint64_t part : bytes) {
      in.emplace_back(to + at, part);
      at += part;
    }
    return Swap(out, in);
  }

  Status Broadcast(Stream&, std::byte* data, std::uint64_t bytes, int root) override {
    SW_CHECK(root >= 0 && root < size());
    std::vector<std::span<const std::byte>> out(members_.size());
    std::vector<std::span<std::byte>> in(members_.size());
    if (rank_ == root) std::fill(out.begin(), out.end(), std::span<const std::byte>(data, bytes));
    in[static_cast<std::size_t>(root)] = {data, bytes};
    return Swap(out, in);
  }

  Status Exchange(Stream&, std::span<const std::span<const std::byte>> out,
                  std::span<const std::span<std::byte>> in) override {
    SW_CHECK(out.size() == members_.size() && in.size() == members_.size());
    return Swap(out, in);
  }

  Status ReduceScatter(Stream&, std::byte* to, const std::byte* from, std::uint64_t elems,
                       DType dtype) override {
    SW_CHECK(CanAverage(dtype));
    const std::uint64_t part = elems * ItemSize(dtype);
    std::vector<std::span<const std::byte>> out;
    for (std::size_t r = 0; r < members_.size(); ++r) out.emplace_back(from + r * part, part);
    std::vector<Bytes> got(members_.size(), Bytes(part));
    std::vector<std::span<std::byte>> in(got.begin(), got.end());
    SW_TRY(Swap(out, in));
    const DType sum = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
    if (sum == DType::kF64) return Sum<double>(got, elems, dtype, sum, {to, part});
    return Sum<float>(got, elems, dtype, sum, {to, part});
  }

  void Abort() override {
    if (std::exchange(aborted_, true)) return;
    // Takes part in the status exchange that the other ranks wait for.
    (void)comm_.AllReduceOr(1);
  }

 private:
  std::size_t Mine() const { return static_cast<std::size_t>(rank_); }

  /// Sends out[r] to rank r of the group and receives in[r] from it.
  Status Swap(std::span<const std::span<const std::byte>> out,
              std::span<const std::span<std::byte>> in) {
    if (aborted_) return Fail(Errc::kIo, "collective: aborted");
    SW_TRY_ASSIGN(const std::uint64_t aborted, comm_.AllReduceOr(0));
    if (aborted != 0) {
      aborted_ = true;
      return Fail(Errc::kIo, "collective: aborted by another rank");
    }
    std::vector<std::span<const std::byte>> pieces(static_cast<std::size_t>(comm_.size()));
    for (std::size_t r = 0; r < members_.size(); ++r) {
      if (r != Mine()) pieces[static_cast<std::size_t>(members_[r])] = out[r];
    }
    SW_TRY_ASSIGN(const std::vector<Bytes> got, comm_.AllToAll(pieces));
    for (std::size_t r = 0; r < members_.size(); ++r) {
      std::span<const std::byte> from = got[static_cast<std::size_t>(members_[r])];
      if (r == Mine()) from = out[r];
      if (from.size() != in[r].size()) {
        return Fail(Errc::kInternal, "collective: rank ", r, " sends ", from.size(), " bytes, ",
                    in[r].size(), " are expected");
      }
      if (!from.empty() && from.data() != in[r].data()) {
        std::memmove(in[r].data(), from.data(), from.size());
      }
    }
    return {};
  }

  template <class T>
  static Status Sum(const std::vector<Bytes>& parts, std::uint64_t elems, DType dtype, DType as,
                    std::span<std::byte> to) {
    std::vector<T> sum(elems);
    std::vector<T> one(elems);
    for (const Bytes& part : parts) {
      Convert(dtype, part, as, std::as_writable_bytes(std::span(one)));
      for (std::uint64_t i = 0; i < elems; ++i) sum[i] += one[i];
    }
    Convert(as, std::as_bytes(std::span(sum)), dtype, to);
    return {};
  }

  comm::Comm& comm_;
  const std::vector<int> members_;  // ranks in comm_
  const int rank_;
  bool aborted_ = false;
};

}  // namespace

Result<std::unique_ptr<Collective>> MakeHostCollective(comm::Comm& comm,
                                                       std::span<const int> group) {
  SW_CHECK(group.size() == static_cast<std::size_t>(comm.size()));
  std::vector<int> members;
  int rank = 0;
  for (int r = 0; r < comm.size(); ++r) {
    if (group[static_cast<std::size_t>(r)] != group[static_cast<std::size_t>(comm.rank())]) {
      continue;
    }
    if (r == comm.rank()) rank = static_cast<int>(members.size());
    members.push_back(r);
  }
  return std::unique_ptr<Collective>(
      std::make_unique<HostCollective>(comm, std::move(members), rank));
}

}  // namespace shardwright::device
