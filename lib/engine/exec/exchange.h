// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "engine/device/windows.h"
#include "engine/exec/byte_source.h"
#include "engine/plan/plan.h"
#include "support/base/result.h"
#include "support/comm/comm.h"

namespace shardwright::exec {

/// A stretch of a source member.
struct Stretch {
  std::uint32_t member = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

/// A source whose files may each be visible on one node only: before a round of work the ranks send
/// each other the stretches that they will need. One program, two transports: where every rank sees
/// every file nothing is sent, and the work is the same.
class Exchange final : public ByteSource {
 public:
  /// \param local       reads this rank's own files
  /// \param file_owner  by source file: the rank that reads it; empty: every rank sees every file
  /// \pre `source`, of which `local` reads, outlives it
  Exchange(comm::Comm& comm, const layout::ShardMap& source, ByteSource& local,
           std::vector<int> file_owner);

  /// From now on members are read by these ranks, which see them, whatever file they are in.
  /// \param member_owner  by source member
  void ReadBy(std::vector<int> member_owner) { member_owner_ = std::move(member_owner); }

  /// False where every rank sees every file: rounds then do nothing.
  bool sends() const { return !file_owner_.empty() || !member_owner_.empty(); }

  /// Fetches from other ranks what is theirs of `wanted`, and serves them; forgets the round
  /// before. What several ranks ask for alike is read once, also where this rank reads it itself.
  /// Collective: ranks without work take part with nothing.
  Status Round(std::span<const Stretch> wanted);

  /// The same for what units of a plan read. Collective.
  Status Round(const plan::Plan& plan, std::span<const std::uint64_t> units);

  /// Most units of work in a round when `budget_bytes` may be held; any number where nothing is
  /// sent.
  /// \param read_bytes  most bytes that a unit reads
  /// With shared memory few: pages that are made cost more than rounds.
  std::uint64_t RoundUnits(std::uint64_t budget_bytes,
                           std::uint64_t read_bytes = plan::kUnitBytes * 8) const;

  /// From now on ranks read what they get where its reader has put it, if all see each other's
  /// memory: on several nodes it is sent as before. Rounds are of RoundUnits of the same arguments.
  /// \pre the same arguments on all ranks
  /// Collective.
  Status ShareMemory(std::uint64_t budget_bytes, std::uint64_t read_bytes);

  /// Of rounds of `most` units: whether any rank wants anything of another in them. Rounds without
  /// may be left out, by all ranks; the answer is as long as the longest list of rounds.
  /// \pre most > 0
  /// Collective.
  Result<std::vector<bool>> RoundsThatSend(const plan::Plan& plan,
                                           std::span<const std::uint64_t> units,
                                           std::uint64_t most);

  /// Local files directly, other ranks' bytes from the round. Thread-safe between rounds.
  Status Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) override;
  Result<bool> Recheck(std::uint32_t file) override { return local_.Recheck(file); }
  Result<os::File> Open(std::uint32_t file) override { return local_.Open(file); }
  bool has_places() const override { return local_.has_places(); }
  std::optional<std::uint64_t> PlaceOf(std::uint32_t member, std::uint64_t offset) override {
    return local_.PlaceOf(member, offset);
  }
  std::uint64_t bytes_read() const override { return local_.bytes_read(); }
  std::uint64_t files_read() const override { return local_.files_read(); }

  /// True on the one rank that deals with a whole source file, and sees it. \pre not ReadBy
  bool MineFile(std::uint32_t file) const;
  /// The same for a member: to verify it.
  bool Mine(std::uint32_t member) const;

  const layout::ShardMap& source() const { return source_; }

 private:
  struct Held {
    Stretch stretch;
    std::size_t rank;
    std::uint64_t at;  // in that rank's bytes
  };
  /// Stretches of a round, in what was sent to or got from each rank.
  struct Holding {
    std::vector<Held> index;  // by member and offset
    std::vector<comm::Bytes> bytes;
    std::vector<std::span<const std::byte>> views;  // of `bytes`, or of shared memory

    void View() { views.assign(bytes.begin(), bytes.end()); }

    void Sort();
    const std::byte* Find(std::uint32_t member, std::uint64_t offset, std::uint64_t count) const;
  };
  int OwnerOf(std::uint32_t member) const;
  bool Local(std::uint32_t member) const;
  Status Serve(const std::vector<comm::Bytes>& requests);
  Status ServeShared(const std::vector<comm::Bytes>& requests, std::vector<comm::Bytes>* places);
  Status FetchShared(const std::vector<comm::Bytes>& requests);

  comm::Comm& comm_;
  const layout::ShardMap& source_;
  ByteSource& local_;
  std::vector<int> file_owner_;
  std::vector<int> member_owner_;  // empty: those of their files
  Holding fetched_;
  Holding served_;
  std::unique_ptr<device::Windows> windows_;  // null: nothing is shared
};

/// Calls `act(first, last)` for consecutive parts of this rank's [0, count), none longer than
/// `most`, and equally often on every rank: with empty parts at last where others have more to do.
/// \pre most > 0; `act` is collective and ends with an agreement
/// Collective.
Status InRounds(comm::Comm& comm, std::uint64_t count, std::uint64_t most,
                const std::function<Status(std::uint64_t first, std::uint64_t last)>& act);

}  // namespace shardwright::exec
