// SPDX-License-Identifier: Apache-2.0
// lib/files/torch_pt: files of torch.save.
// ContainerMetadata is a file without its payloads: the pickle and the positions of the
// storages, in a zip container or in the older stream of pickles. Parse makes the object graph
// from it. writer.h computes the byte layout of a file before any payload is known, and
// completes the file when the checksums of the payloads are known. Source: docs/formats/pt.md.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "files/container_metadata.h"
#include "files/part.h"
#include "files/pickle/node.h"
#include "support/base/result.h"
#include "support/os/file.h"

namespace shardwright::torch_pt {

using files::ContainerMetadata;
using files::Storage;

// In a `.pt` file, the header is data.pkl or, in the legacy
// stream, the object pickle. Storage "12" is the record data/12.

/// Reads the directory and data.pkl of a `.pt` file; payloads stay unread.
/// \error kBadInput  not a readable container, truncated, wrong CRC of a
///        record read, overlapping or unsafe records (docs/formats/pt.md);
///        kUnsupported  TorchScript, tar, preview containers, big-endian
/// Local; many threads may read different files.
/// Offsets in the result count from the start of the file, also for a part of a file.
Result<ContainerMetadata> ReadMetadata(const files::Part& file);
inline Result<ContainerMetadata> ReadMetadata(const os::File& file) {
  return ReadMetadata(files::Part(file));
}

/// The object graph of a file. Tensors refer to `storages` (in first-use order) by index.
struct Document {
  struct StorageRef {
    DType dtype = DType::kU8;  ///< kU8 with untyped = true for torch.UntypedStorage
    bool untyped = false;
    std::uint64_t bytes = 0;
    std::uint64_t offset = 0;  ///< of the payload in the file
    std::optional<std::uint32_t> crc32;
    std::string member;  ///< "data/12", for messages
  };
  std::shared_ptr<pickle::Arena> arena;
  const pickle::Node* root = nullptr;
  std::vector<StorageRef> storages;
};

/// Interprets the pickle with the closed table of globals. Nothing is executed.
/// Checks every tensor against its storage (bounds, dtype, element count).
/// \error kBadInput  with the byte offset of the opcode at fault
/// Pure.
Result<Document> Parse(const ContainerMetadata& metadata);

}  // namespace shardwright::torch_pt
