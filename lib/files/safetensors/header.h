// SPDX-License-Identifier: Apache-2.0
// lib/files/safetensors: .safetensors files.
// header.h reads a file's header out of untrusted bytes, index.h the index of a set of files, and
// layout.h lays out files that are written. Payloads are not looked at here. Source:
// docs/formats/safetensors.md.

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
  Shape shape;               ///< as the header has it: of packed types it counts values, not bytes
  std::uint64_t offset = 0;  ///< of its first byte in the file
  std::uint64_t bytes = 0;
};

/// What a file says before its payloads.
struct Header {
  std::vector<Entry> entries;                   ///< in the order of their bytes
  std::map<std::string, std::string> metadata;  ///< `__metadata__`
  std::vector<std::string> warnings;  ///< what the published format forbids and others write
};

/// The header of a file as text, and how long the file is: what a catalogue keeps of it.
struct HeaderText {
  std::string text;
  std::uint64_t file_bytes = 0;
};

/// Bytes before the header: its length.
inline constexpr std::uint64_t kLengthBytes = 8;

/// Reads the header of a file; payloads stay unread, and the text is not parsed yet.
/// \error kBadInput  not such a file; what is often found under the name (a pickle, a zip archive,
/// a
///        pointer of Git LFS, a web page) is named; kLimit  a header above the format's cap
/// Local; many threads may read different files.
Result<HeaderText> ReadHeaderText(const os::File& file);

/// Understands a header. The tensors cover what follows it exactly once.
/// \error kBadInput  not JSON of the format's form; a name, field or key twice; a tensor whose
/// bytes
///        do not fit its shape; holes, overlaps, bytes that are missing or left over. kUnsupported
///        an element type that the format has got since. The message names the tensor.
/// Pure. Source: docs/formats/safetensors.md, "Header".
Result<Header> ParseHeader(const HeaderText& source);

/// Both; messages start with the path.
Result<Header> ReadHeader(const os::File& file);

/// The format's word for an element type: "BF16", "F8_E4M3"; empty where it has none.
std::string_view Word(DType dtype);

/// The shape of a tensor in elements as DType counts them, which for packed types are bytes.
/// \error kUnsupported  the last dimension of a packed type does not fill whole bytes
/// Pure.
Result<Shape> ElemShape(const Entry& entry);

}  // namespace shardwright::safetensors
