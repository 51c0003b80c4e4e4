#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "format/pickle/node.h"
#include "os/file.h"

namespace shardwright::torch_pt {

/// Where the bytes of one storage lie.
struct Storage {
  std::string key;           ///< record data/<key>
  std::uint64_t offset = 0;  ///< of the payload, from the start of the file
  std::uint64_t bytes = 0;
  std::optional<std::uint32_t>
      crc32;  ///< none where the file does not carry one (legacy stream, stored 0)
};

/// Everything in a file but the payloads: what a fragment catalogue keeps of it.
/// For a zip container: its data.pkl and record table. For the legacy stream: the object pickle and
/// where each storage's raw data lies.
struct Skeleton {
  std::string pickle;
  std::vector<Storage> storages;
  std::uint64_t file_bytes = 0;
};

/// Reads the directory and data.pkl of a `.pt` file; payloads stay unread.
/// \error kBadInput  not a readable container, truncated, wrong CRC of a record read, overlapping
/// or unsafe records
///                   (docs/formats/pt.md); kUnsupported TorchScript, tar, preview containers,
///                   big-endian
/// Local; many threads may read different files.
Result<Skeleton> ReadSkeleton(const os::File& file);

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

/// Interprets the pickle over the closed table of globals; nothing is ever executed. Every tensor
/// is checked against its storage (bounds, dtype, element count). \error kBadInput  with the byte
/// offset of the opcode at fault Pure.
Result<Document> Parse(const Skeleton& skeleton);

}  // namespace shardwright::torch_pt
