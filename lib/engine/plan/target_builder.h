// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/layout/shard_map.h"
#include "engine/plan/target.h"
#include "support/base/result.h"

namespace shardwright::plan {

/// Puts a target together: files with their payloads, and the shard map that says which elements of
/// which tensors they hold. Numbers that it returns are indices into the target.
class TargetBuilder {
 public:
  /// Adds a file of payloads alone, empty so far. \returns its number
  std::uint32_t AddFile(std::string path);
  /// A file that is this text.
  void AddText(std::string path, std::string text);
  /// A file that tells the digests of others; see DigestList.
  void AddDigests(std::string path, DigestList list);
  /// A file that is made elsewhere, without elements of tensors.
  void AddFile(OutputFile file);

  /// Everything but the payloads, and the size of all; without it a file is as long as its last
  /// payload tells.
  void SetFrame(std::uint32_t file, std::uint64_t bytes, Frame frame);

  /// An array that `holders` payloads will hold, each set by AddElements. \returns its number
  std::uint32_t AddArray(DType dtype, std::uint64_t holders);
  /// A logical tensor without fragments. \returns its number
  std::uint32_t AddTensor(std::string name, std::string_view state, DType dtype, Shape shape);
  void AddFragment(std::uint32_t tensor, layout::Fragment fragment);

  // Payloads of a file, in ascending order of their offsets.

  /// Elements of one holder of an array.
  /// \param what  the payload's name in messages: "data/3"
  void AddElements(std::uint32_t file, std::uint64_t offset, std::uint32_t array,
                   std::uint64_t holder, std::uint64_t elems, std::string what);
  /// One whole tensor, row-major: array, tensor and payload in one. \returns the tensor's number
  std::uint32_t AddWhole(std::uint32_t file, std::uint64_t offset, std::string name,
                         std::string_view state, DType dtype, Shape shape, std::string what);
  /// A copy of a source member.
  void AddMember(std::uint32_t file, std::uint64_t offset, std::uint32_t member,
                 std::uint64_t bytes);
  void AddInline(std::uint32_t file, std::uint64_t offset, std::string bytes);

  /// Where a file ends so far.
  std::uint64_t bytes(std::uint32_t file) const { return target_.files[file].bytes; }
  std::size_t file_count() const { return target_.files.size(); }
  const Target& target() const { return target_; }
  Target Take() && { return std::move(target_); }

 private:
  void AddPayload(std::uint32_t file, Payload payload);

  Target target_;
};

}  // namespace shardwright::plan
