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

/// One stretch of an output file whose bytes come from the source.
struct Payload {
  enum class Kind : std::uint8_t {
    kArray,   ///< region `holder` of target array `array`; what no fragment covers is zero
    kMember,  ///< a copy of source member `member`, unchanged; members that lie within one
              ///< without a checksum are verified by their own
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

/// Takes bytes of an output file, stretch after stretch, ascending.
using PutFrame = std::function<Status(std::uint64_t offset, std::string_view bytes)>;

/// Makes everything of an output file but the payloads, given the CRC-32 of every payload (in
/// order). What it makes is put at once, so that no frame need be held whole.
using Frame = std::function<Status(std::span<const std::uint32_t> crcs, const PutFrame& put)>;

/// What makes a file that tells the digests of others, once they are complete.
struct DigestList {
  std::vector<std::uint32_t> files;  ///< of the target; none of them is such a list. Empty: no list
  /// \param sha256  of these files, in hexadecimal digits
  /// \returns as many bytes as the file was said to have
  std::function<std::string(std::span<const std::string> sha256)> text;
};

/// How an output file that repeats a source file, byte for byte, comes to be.
enum class CloneMode : std::uint8_t {
  kCopy,   ///< by its payloads, as every other file
  kClone,  ///< as a clone where the file system can, else by its payloads
  kLink,   ///< as a second name of the source file; it has no payloads
};

/// The frame of a file that is all payloads: nothing.
Status NoFrame(std::span<const std::uint32_t> crcs, const PutFrame& put);

/// One file to be written, laid out to the byte before anything is read.
struct OutputFile {
  std::string path;  ///< relative to the output; components are made by us, never taken from a
                     ///< source file's names
  std::uint64_t bytes = 0;
  bool executable = false;
  CloneMode clone = CloneMode::kCopy;
  std::uint32_t clone_of = 0;     ///< of a clone or link: the source file
  std::vector<Payload> payloads;  ///< ascending, disjoint
  Frame frame = NoFrame;          ///< may be called on any rank, once
  DigestList digests = {};        ///< in place of payloads and frame
};

/// What a conversion writes: the target's shard map, with members that are the payloads of `files`.
/// Every region of an array is one whole payload: map.arrays[a].regions[h].offset is 0.
struct Target {
  layout::ShardMap map;
  std::vector<OutputFile> files;
};

/// A file that is this text: all frame.
OutputFile TextFile(std::string path, std::string text);

/// A file that repeats a whole source file, as one payload; adds that file to the source map.
/// \param path    of the output file
/// \param source  of the source file
OutputFile WholeFile(std::string path, const std::string& source, std::uint64_t bytes,
                     CloneMode clone, layout::ShardMap* map);

/// The same for a source file whose bytes are known.
OutputFile WholeFile(std::string path, std::string content);

}  // namespace shardwright::plan
