// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace shardwright::files {

/// How the header of a container is written.
enum class Head : std::uint8_t {
  kPickle,  ///< an object graph: `.pt`
  kJson,    ///< a JSON object: safetensors
};

/// Where the bytes of one stored payload lie.
struct Storage {
  std::string key;           ///< what the header calls it
  std::uint64_t offset = 0;  ///< of the payload, from the start of the file
  std::uint64_t bytes = 0;
  std::optional<std::uint32_t> crc32;  ///< none where the file does not carry one

  bool operator==(const Storage&) const = default;
};

/// Everything of a container but the payloads: what a fragment catalogue keeps of it. A container
/// is the stretch [first, last) of a file, usually all of it.
struct ContainerMetadata {
  Head head = Head::kPickle;
  std::string header;  ///< the object pickle, or the JSON text
  std::vector<Storage> storages;
  std::uint64_t first = 0;
  std::uint64_t last = 0;

  bool operator==(const ContainerMetadata&) const = default;
};

/// What messages call a storage: "data/12" where the header is a pickle, else its key.
inline std::string NameOf(const ContainerMetadata& metadata, const Storage& storage) {
  return metadata.head == Head::kPickle ? "data/" + storage.key : storage.key;
}

}  // namespace shardwright::files
