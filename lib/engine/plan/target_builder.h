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

/// Builds a target: files with their payloads, and the shard map of
/// the tensors in them. Returned numbers are indices into the target.
class TargetBuilder {
 public:
  /// Adds a file that consists of payloads only, initially empty. \returns its number
  std::uint32_t AddFile(std::string path);
  /// Adds a file with this text.
  void AddText(std::string path, std::string text);
  /// Adds a file that lists the digests of other files; see DigestList.
  void AddDigests(std::string path, DigestList list);
  /// Adds a finished file without tensor elements.
  void AddFile(OutputFile file);

  /// Sets the file's size and the function that makes its bytes outside
  /// the payloads. Without it a file ends with its last payload.
  void SetFrame(std::uint32_t file, std::uint64_t bytes, Frame frame);

  /// Adds an array with `holders` payloads, each set by AddElements. \returns its number
  std::uint32_t AddArray(DType dtype, std::uint64_t holders);
  /// Adds a logical tensor without fragments. \returns its number
  std::uint32_t AddTensor(std::string name, std::string_view state, DType dtype, Shape shape);
  void AddFragment(std::uint32_t tensor, layout::Fragment fragment);

  // The following functions add payloads to a file, in ascending order of their offsets.

  /// Adds the elements of one part of an array.
  /// \param what  the payload's name in messages: "data/3"
  void AddElements(std::uint32_t file, std::uint64_t offset, std::uint32_t array,
                   std::uint64_t holder, std::uint64_t elems, std::string what);
  /// Adds a whole row-major tensor: array, tensor and payload. \returns the tensor's number
  std::uint32_t AddWhole(std::uint32_t file, std::uint64_t offset, std::string name,
                         std::string_view state, DType dtype, Shape shape, std::string what);
  /// Adds a copy of a source member.
  void AddMember(std::uint32_t file, std::uint64_t offset, std::uint32_t member,
                 std::uint64_t bytes);
  void AddInline(std::uint32_t file, std::uint64_t offset, std::string bytes);

  /// Returns the current size of a file.
  std::uint64_t bytes(std::uint32_t file) const { return target_.files[file].bytes; }
  std::size_t file_count() const { return target_.files.size(); }
  const Target& target() const { return target_; }
  Target Take() && { return std::move(target_); }

 private:
  void AddPayload(std::uint32_t file, Payload payload);

  Target target_;
};

}  // namespace shardwright::plan
