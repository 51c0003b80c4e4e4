// SPDX-License-Identifier: Apache-2.0
// lib/files/safetensors: .safetensors files.
// header.h reads a file's header from untrusted bytes, index.h reads the
// index of a set of files, and layout.h lays out files to write. This
// module does not read payloads. Source: docs/formats/safetensors.md.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "engine/tensor/dtype.h"
#include "engine/tensor/shape.h"
#include "support/base/result.h"
#include "support/os/file.h"

namespace shardwright::safetensors {

/// A tensor of a `.safetensors` file, contiguous and row-major.
struct Entry {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;               ///< as in the header: for packed types in values, not bytes
  std::uint64_t offset = 0;  ///< of its first byte in the file
  std::uint64_t bytes = 0;
};

/// The contents of a file's header.
struct Header {
  std::vector<Entry> entries;                   ///< sorted by offset
  std::map<std::string, std::string> metadata;  ///< `__metadata__`
  std::vector<std::string> warnings;            ///< deviations from the published format
};

/// The header of a file as text, and the size of the file: the part that a catalogue stores.
struct HeaderText {
  std::string text;
  std::uint64_t file_bytes = 0;
};

/// Bytes before the header: its length.
inline constexpr std::uint64_t kLengthBytes = 8;

/// Reads the header of a file as text, without parsing it. Payloads stay unread.
/// \error kBadInput  not such a file (the message names other known
///        contents: a pickle, a zip archive, a Git LFS pointer, a
///        web page); kLimit  the header exceeds the format's cap
/// Local; many threads may read different files.
Result<HeaderText> ReadHeaderText(const os::File& file);

/// Parses a header. The tensors of the result cover the rest of the file exactly once.
/// \error kBadInput  not JSON of the format; a duplicate name, field or
///        key; a tensor with more or fewer bytes than its shape; holes,
///        overlaps, missing or extra bytes. kUnsupported  an element type
///        that is newer than this program. The message names the tensor.
/// Pure. Source: docs/formats/safetensors.md, "Header".
Result<Header> ParseHeader(const HeaderText& source);

/// Reads and parses a header. Messages start with the path.
Result<Header> ReadHeader(const os::File& file);

/// Returns the format's name of an element type: "BF16", "F8_E4M3"; empty if it has none.
std::string_view Word(DType dtype);

/// Returns the shape of a tensor in elements of its DType, which are bytes for packed types.
/// \error kUnsupported  the last dimension of a packed type does not fill whole bytes
/// Pure.
Result<Shape> ElemShape(const Entry& entry);

}  // namespace shardwright::safetensors
