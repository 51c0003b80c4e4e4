// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace shardwright::files {

/// Encoding of a container's header.
enum class Head : std::uint8_t {
  kPickle,  ///< an object graph: `.pt`
  kJson,    ///< a JSON object: safetensors
};

/// Location of the bytes of one stored payload.
struct Storage {
  std::string key;           ///< its name in the header
  std::uint64_t offset = 0;  ///< of the payload, from the start of the file
  std::uint64_t bytes = 0;
  std::optional<std::uint32_t> crc32;  ///< absent if the file does not contain one

  bool operator==(const Storage&) const = default;
};

/// A container without its payloads: the part that a fragment catalogue stores.
/// A container is the range [first, last) of a file, usually all of it.
struct ContainerMetadata {
  Head head = Head::kPickle;
  std::string header;  ///< the object pickle, or the JSON text
  std::vector<Storage> storages;
  std::uint64_t first = 0;
  std::uint64_t last = 0;

  bool operator==(const ContainerMetadata&) const = default;
};

/// Returns a storage's name for messages: "data/12" if the header is a pickle, otherwise its key.
inline std::string NameOf(const ContainerMetadata& metadata, const Storage& storage) {
  return metadata.head == Head::kPickle ? "data/" + storage.key : storage.key;
}

}  // namespace shardwright::files
