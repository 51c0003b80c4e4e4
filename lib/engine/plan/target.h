// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/layout/shard_map.h"
#include "support/base/result.h"

namespace shardwright::plan {

/// A byte range of an output file with bytes from the source.
struct Payload {
  enum class Kind : std::uint8_t {
    kArray,   ///< `Region` `holder` of target array `array`; zero outside of fragments
    kMember,  ///< a copy of source member `member`, unchanged; if it has no
              ///< checksum, the members inside it are verified by their own
    kInline,  ///< `bytes_inline`
  };
  Kind kind = Kind::kArray;
  std::uint64_t offset = 0;  ///< in the output file, bytes
  std::uint64_t bytes = 0;
  std::uint32_t array = 0;
  std::uint64_t holder = 0;
  std::uint32_t member = 0;
  std::string bytes_inline;
};

/// Writes the next bytes of an output file, in ascending order of offsets.
using PutFrame = std::function<Status(std::uint64_t offset, std::string_view bytes)>;

/// Makes all bytes of an output file except the payloads, given the CRC-32 of every payload (in
/// order). Passes each part to `put` at once, so that no frame is kept in memory as a whole.
using Frame = std::function<Status(std::span<const std::uint32_t> crcs, const PutFrame& put)>;

/// Makes a file that lists the digests of other files, after these are complete.
struct DigestList {
  std::vector<std::uint32_t> files;  ///< in the target; none of them is such a list. Empty: no list
  /// \param sha256  digests of these files, as hexadecimal digits
  /// \returns exactly OutputFile::bytes bytes
  std::function<std::string(std::span<const std::string> sha256)> text;
};

/// Method to make an output file that equals a source file byte for byte.
enum class CloneMode : std::uint8_t {
  kCopy,   ///< from its payloads, like every other file
  kClone,  ///< as a clone if the file system can, otherwise from its payloads
  kLink,   ///< as a hard link to the source file; it has no payloads
};

/// The frame of a file that consists of payloads only: puts no bytes.
Status NoFrame(std::span<const std::uint32_t> crcs, const PutFrame& put);

/// A file to be written, laid out to the byte before any payload is read.
struct OutputFile {
  std::string path;  ///< relative to the output; its components are
                     ///< generated, never taken from names in a source
  std::uint64_t bytes = 0;
  bool executable = false;
  CloneMode clone = CloneMode::kCopy;
  std::uint32_t clone_of = 0;     ///< source file of a clone or link
  std::vector<Payload> payloads;  ///< ascending, disjoint
  Frame frame = NoFrame;          ///< may be called on any rank, once
  DigestList digests = {};        ///< if not empty, replaces payloads and frame
};

/// The files that a conversion writes: the target's shard map. Its members are the payloads of
/// `files`. Every `Region` is a whole payload: `map.arrays[a].regions[h].offset` is 0.
struct Target {
  layout::ShardMap map;
  std::vector<OutputFile> files;
  bool compressed = false;  ///< files with payloads are compressed (engine/exec/zpack.h)
};

/// Makes a file with this text as its frame and no payloads.
OutputFile TextFile(std::string path, std::string text);

/// Makes a copy of a whole source file, as one payload, and adds that file to the source map.
/// \param path    of the output file
/// \param source  path of the source file
OutputFile WholeFile(std::string path, const std::string& source, std::uint64_t bytes,
                     CloneMode clone, layout::ShardMap* map);

/// Makes the same from the content of a source file that has been read already.
OutputFile WholeFile(std::string path, std::string content);

}  // namespace shardwright::plan
