// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "engine/exec/byte_source.h"
#include "support/base/crc32.h"
#include "unit/engine/plan/small_maps.h"

namespace shardwright::exec {

/// Members that are strings.
class MemoryBytes final : public ByteSource {
 public:
  explicit MemoryBytes(std::vector<std::string> members) : members_(std::move(members)) {}

  Status Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) override {
    const std::string& from = members_.at(member);
    if (offset + out.size() > from.size()) return Fail(Errc::kBadInput, "the member ends before");
    std::memcpy(out.data(), from.data() + offset, out.size());
    bytes_ += out.size();
    return {};
  }
  std::uint64_t bytes_read() const override { return bytes_; }
  std::uint64_t files_read() const override { return members_.size(); }

  std::vector<std::string>& members() { return members_; }

 private:
  std::vector<std::string> members_;
  std::atomic<std::uint64_t> bytes_ = 0;
};

inline std::uint32_t Crc(const std::string& bytes) {
  return Crc32(std::as_bytes(std::span(bytes)));
}

/// Gives every member of a map the checksum of its bytes.
inline void SetChecksums(const std::vector<std::string>& members, layout::ShardMap* map) {
  for (std::size_t m = 0; m < members.size(); ++m) map->members[m].crc32 = Crc(members[m]);
}

}  // namespace shardwright::exec
