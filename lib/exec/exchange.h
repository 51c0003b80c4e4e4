#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"
#include "comm/comm.h"
#include "exec/byte_source.h"
#include "plan/plan.h"

namespace shardwright::exec {

/// The source of a run whose files are each visible on one node only: before a round of units, the
/// ranks send each other the fragments that they will need. One program, two transports: units are
/// gathered the same way.
class Exchange final : public ByteSource {
 public:
  /// \param local       reads this rank's own files
  /// \param file_owner  by source file: the rank that reads it
  Exchange(comm::Comm& comm, const plan::Plan& plan, ByteSource& local,
           std::vector<int> file_owner);

  /// Fetches what `units` of this rank need from other ranks, and serves theirs; forgets the round
  /// before. Collective: ranks without units take part with none.
  Status Round(std::span<const std::uint64_t> units);

  /// Local files directly, other ranks' bytes from the round. Thread-safe between rounds.
  Status Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) override;
  std::uint64_t bytes_read() const override { return local_.bytes_read(); }
  std::uint64_t files_read() const override { return local_.files_read(); }

  int owner(std::uint32_t member) const { return file_owner_[plan_.source().members[member].file]; }

 private:
  struct Fetched {
    std::uint32_t member;
    std::uint64_t offset;
    std::uint64_t bytes;
    int rank;
    std::uint64_t at;  // in that rank's answer
  };
  comm::Comm& comm_;
  const plan::Plan& plan_;
  ByteSource& local_;
  std::vector<int> file_owner_;
  std::vector<Fetched> fetched_;  // by member and offset
  std::vector<comm::Bytes> answers_;
};

}  // namespace shardwright::exec
