// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <utility>

#include "checkpoints/open_source.h"
#include "engine/exec/manifest.h"
#include "partial/store/store.h"
#include "partial/store/write_blobs.h"
#include "unit/support/os/scratch.h"

namespace shardwright::partial {

/// A source without files, as in a catalogue.
inline checkpoints::SourceSet Nothing() {
  checkpoints::SourceSet set;
  set.format = "deepspeed";
  return set;
}

class StoreTest : public os::Scratch {
 protected:
  Store Make() {
    StoreHead head;
    head.modules = 1;
    auto store = Store::OpenOrCreate(At("store"), head);
    EXPECT_TRUE(store) << store.error().message;
    return *std::move(store);
  }

  /// A manifest of one module that holds `text`, with its blob in place.
  Manifest Put(const Store& store, std::uint64_t sequence, std::uint64_t iteration,
               const std::string& text) {
    Manifest manifest;
    manifest.sequence = sequence;
    manifest.iteration = iteration;
    manifest.names = {"module"};
    manifest.modules.resize(1);
    StoredComponent held;
    held.version = iteration;
    const exec::UnitSum sum = exec::SumOf(os::AsBytes(text));
    held.blob = Summarize({&sum, 1});
    manifest.modules[0][0] = held;
    manifest.catalogue = exec::DigestOf(os::AsBytes("catalogue"));
    const std::string path = store.BlobPath(held.blob);
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    std::ofstream(path, std::ios::binary) << text;
    EXPECT_TRUE(store.Commit({sequence, iteration, false}, ToText(manifest),
                             checkpoints::Serialize(Nothing()), std::nullopt));
    return manifest;
  }
};

}  // namespace shardwright::partial
