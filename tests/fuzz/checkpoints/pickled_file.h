// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "checkpoints/model/source.h"
#include "files/pickle/reader.h"

namespace shardwright::fuzz {

/// A file with a pickle and exactly the storages that it refers to, small ones inlined.
inline checkpoints::SourceFile PickledFile(const std::string& name, std::string_view pickle) {
  constexpr std::uint64_t kMost = std::uint64_t{1} << 20;
  files::ContainerMetadata metadata;
  metadata.header = pickle;
  checkpoints::Container container;
  metadata.last = 64;
  if (const auto graph = pickle::Load(pickle)) {
    for (const auto& use : graph->storages) {
      const std::uint64_t item = use.untyped ? 1 : ItemSize(use.dtype);
      const std::uint64_t bytes = use.elems < kMost ? use.elems * item : 0;
      const auto index = static_cast<std::uint32_t>(metadata.storages.size());
      metadata.storages.push_back({use.key, metadata.last, bytes, index});
      if (bytes > 0 && bytes <= checkpoints::kInlineBytes) {
        container.inlined.emplace(index, std::string(bytes, '\0'));
      }
      metadata.last += bytes;
    }
  }
  container.metadata = std::make_shared<const files::ContainerMetadata>(std::move(metadata));
  checkpoints::SourceFile file;
  file.path = file.name = name;
  file.containers.push_back(std::move(container));
  return file;
}

/// Splits one input into two pickles. Its first two bytes, little endian, are the second's offset.
inline std::pair<std::string_view, std::string_view> TwoPickles(std::string_view bytes) {
  if (bytes.size() < 2) return {};
  const std::size_t split = static_cast<unsigned char>(bytes[0]) +
                            std::size_t{256} * static_cast<unsigned char>(bytes[1]);
  if (split < 2 || split > bytes.size()) return {bytes.substr(2), {}};
  return {bytes.substr(2, split - 2), bytes.substr(split)};
}

}  // namespace shardwright::fuzz
