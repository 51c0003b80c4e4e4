// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "engine/device/host.h"

namespace shardwright::device {
namespace {

class HostCollective final : public Collective {
 public:
  HostCollective(comm::Comm& comm, std::vector<int> members, int rank)
      : comm_(comm), members_(std::move(members)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(members_.size()); }

  Status AllGather(Stream&, std::byte* to, const std::byte* from,
                   std::span<const std::uint64_t> bytes) override {
    SW_CHECK(bytes.size() == members_.size());
    const std::span own(from, bytes[static_cast<std::size_t>(rank_)]);
    std::vector<std::span<const std::byte>> pieces(static_cast<std::size_t>(comm_.size()));
    for (int r = 0; r < size(); ++r) {
      if (r != rank_) pieces[Global(r)] = own;
    }
    SW_TRY_ASSIGN(const std::vector<comm::Bytes> got, comm_.AllToAll(pieces));
    for (int r = 0; r < size(); ++r) {
      const std::span part = r == rank_ ? own : std::span<const std::byte>(got[Global(r)]);
      const std::uint64_t expected = bytes[static_cast<std::size_t>(r)];
      if (part.size() != expected) {
        return Fail(Errc::kInternal, "collective: rank ", r, " sends ", part.size(), " bytes, ",
                    expected, " are expected");
      }
      if (!part.empty() && part.data() != to) std::memmove(to, part.data(), part.size());
      to += expected;
    }
    return {};
  }

 private:
  /// Returns the rank in `comm_` of a member of the group.
  std::size_t Global(int member) const {
    return static_cast<std::size_t>(members_[static_cast<std::size_t>(member)]);
  }

  comm::Comm& comm_;
  const std::vector<int> members_;  // ranks in comm_
  const int rank_;
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
