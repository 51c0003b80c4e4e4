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

/// A byte range of a source member.
struct ByteRange {
  std::uint32_t member = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

/// A source with files that may each be visible on one node only. Before a round of work the
/// ranks send each other the byte ranges that they will read. If every rank sees every
/// file, nothing is sent and reads go to the files, so callers are the same in both cases.
class Exchange final : public ByteSource {
 public:
  /// \param local       reads this rank's own files
  /// \param file_owner  rank that reads each source file; empty if every rank sees every file
  /// \pre `source` outlives it; `local` reads the bytes of `source`
  Exchange(comm::Comm& comm, const layout::ShardMap& source, ByteSource& local,
           std::vector<int> file_owner);

  /// Assigns members to ranks that can read them, from now on without regard to their files.
  /// \param member_owner  rank by source member
  void ReadBy(std::vector<int> member_owner) { member_owner_ = std::move(member_owner); }

  /// Returns false if every rank sees every file. Rounds then do nothing.
  bool sends() const { return !file_owner_.empty() || !member_owner_.empty(); }

  /// Fetches the `wanted` bytes of other ranks, serves their requests, and
  /// discards the previous round. Reads identical ranges for several ranks once.
  /// Collective: ranks without work pass an empty list.
  Status Round(std::span<const ByteRange> wanted);

  /// Fetches the bytes that units of a plan read. Collective.
  Status Round(const plan::Plan& plan, std::span<const std::uint64_t> units);

  /// Returns the maximum number of units in a round
  /// within `budget_bytes`, unlimited if nothing is sent.
  /// \param read_bytes  maximum bytes that a unit reads
  /// Small with shared memory, because allocating new pages costs more than extra rounds.
  std::uint64_t RoundUnits(std::uint64_t budget_bytes,
                           std::uint64_t read_bytes = plan::kUnitBytes * 8) const;

  /// Enables shared memory if all ranks can map each other's: ranks then read bytes in place.
  /// Otherwise nothing changes. Rounds must have at most RoundUnits(same arguments) units.
  /// \pre the same arguments on all ranks
  /// Collective.
  Status ShareMemory(std::uint64_t budget_bytes, std::uint64_t read_bytes);

  /// Returns for each round of `most` units if any rank needs bytes of another one. All ranks
  /// may skip the other rounds. The result is as long as the longest list of rounds of any rank.
  /// \pre most > 0
  /// Collective.
  Result<std::vector<bool>> RoundsThatSend(const plan::Plan& plan,
                                           std::span<const std::uint64_t> units,
                                           std::uint64_t most);

  /// Reads local files directly and other ranks' bytes from the round. Thread-safe between rounds.
  Status Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) override;
  Result<bool> Recheck(std::uint32_t file) override { return local_.Recheck(file); }
  Result<os::File> Open(std::uint32_t file) override { return local_.Open(file); }
  bool has_places() const override { return local_.has_places(); }
  std::optional<std::uint64_t> PlaceOf(std::uint32_t member, std::uint64_t offset) override {
    return local_.PlaceOf(member, offset);
  }
  std::uint64_t bytes_read() const override { return local_.bytes_read(); }
  std::uint64_t files_read() const override { return local_.files_read(); }

  /// Returns true on the one rank that processes a source file and sees it. \pre not ReadBy
  bool MineFile(std::uint32_t file) const;
  /// Returns true on the one rank that verifies a member.
  bool Mine(std::uint32_t member) const;

  const layout::ShardMap& source() const { return source_; }

 private:
  struct BufferedRange {
    ByteRange stretch;
    std::size_t rank;
    std::uint64_t at;  // offset in that rank's bytes
  };
  /// Byte ranges of a round, in the buffers sent to or received from each rank.
  struct Holding {
    std::vector<BufferedRange> index;  // by member and offset
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
  std::vector<int> member_owner_;  // empty: the owners of their files
  Holding fetched_;
  Holding served_;
  std::unique_ptr<device::Windows> windows_;  // null: no shared memory
};

/// Calls `act(first, last)` for consecutive parts of this rank's [0, count), each at most `most`
/// long. Every rank makes the same number of calls; ranks with less work end with empty parts.
/// \pre most > 0; `act` is collective and ends with an agreement
/// Collective.
Status InRounds(comm::Comm& comm, std::uint64_t count, std::uint64_t most,
                const std::function<Status(std::uint64_t first, std::uint64_t last)>& act);

}  // namespace shardwright::exec
