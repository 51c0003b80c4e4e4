// SPDX-License-Identifier: Apache-2.0
// lib/checkpoints/dtensor: torch.save files, one for each rank and item, that contain DTensors.
// verl, Accelerate and torch_checkpointing write them. A pickled DTensor records its shape,
// mesh, placements and the rank's position in the mesh. No other file has this information.
// File names give the ranks, and the reader verifies that no file is missing: every tensor
// must be covered once. It reads all three programs' files, with FSDP1's flat optimizer and
// shards. The writer makes the same three kinds for any mesh. Source: docs/formats/dtensor.md.

#pragma once

#include <array>
#include <string_view>

#include "checkpoints/model/checkpoint.h"
#include "checkpoints/model/format.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::dtensor {

inline constexpr std::string_view kName = "dtensor";

// Functions in the format's row of the registry; see Format.
bool Claims(const Listing& listing);
Belongs BelongsTo(std::string_view name);

/// Finds the files of all ranks. The set's `manifest` is fsdp_config.json or metadata.pkl.
/// \error as for ReadFiles
/// Local; reads pickles.
Result<SourceSet> Scan(const Listing& listing, const ScanOptions& options);

/// Reads the containers of one file that Scan found. Implements Format::read_file.
Result<std::vector<Container>> ReadFile(const Found& found, const os::File& file,
                                        const os::Identity& identity);

/// Reads tensors, groups and optimizer states. Float32 tensors with states become master weights.
/// \error kNotFound  missing ranks, listed; kBadInput  files that contradict each other;
///        kUnsupported an optimizer that does not record which parameter a state belongs to
/// Source: docs/formats/dtensor.md.
Result<Checkpoint> Read(const SourceSet& source, const Patterns& patterns);

/// Implements Format::read_weights. Reads only the files of the model.
Result<Checkpoint> ReadWeights(const SourceSet& source, const Patterns& patterns);

Result<Layout> Resolve(const TargetSpec& spec, const Checkpoint& source);

/// Implements Format::running_names: Accelerate saves a Trainer's adapters under other names.
bool HasRunningNames(const TargetSpec& spec, const Checkpoint& source);

/// Returns the naming schemes: verl and Accelerate train Hugging Face models.
std::span<const std::string_view> Sides(const TargetSpec& spec);

/// Writes one file of each item for every rank. Pure.
Result<Written> Write(const Checkpoint& source, const Layout& layout);
FileReaders Readers(const Layout& layout, std::span<const plan::OutputFile> files);

/// Implements TargetKey::check. \error kUsage
Status CheckKey(std::string_view key, std::string_view value);

/// Folders that verl stores next to the files: configuration, tokenizer and perhaps weights.
inline constexpr std::array<std::string_view, 1> kSiblingFolders = {"huggingface"};

inline constexpr std::array<std::string_view, 4> kTrainerWords = {"source", "verl", "accelerate",
                                                                  "torch_checkpointing"};
inline constexpr std::array<std::string_view, 4> kTorchWords = {"source", "2.15", "2.9", "2.6"};

}  // namespace shardwright::checkpoints::dtensor

namespace shardwright::checkpoints {

inline constexpr std::array<TargetKey, 8> kDTensorKeys = {{
    {.name = "dp_shard",
     .help = "ranks that shard every tensor (fsdp)",
     .check = dtensor::CheckKey},
    {.name = "dp_replicate",
     .help = "copies of the model, each of dp_shard ranks (ddp)",
     .check = dtensor::CheckKey},
    {.name = "tp", .help = "tensor-parallel ranks", .check = dtensor::CheckKey},
    {.name = "mesh_names",
     .help = "names of the mesh's dimensions separated by :, or none",
     .check = dtensor::CheckKey},
    {.name = "device", .help = "type of the mesh's devices: cuda, cpu", .check = dtensor::CheckKey},
    {.name = "fsdp_version",
     .help = "2, or 1 with the optimizer's states in flat vectors",
     .check = dtensor::CheckKey},
    {.name = "trainer",
     .help = "trainer that will load the per-rank files",
     .check = dtensor::CheckKey,
     .is_flag = true,
     .words = dtensor::kTrainerWords},
    {.name = "torch",
     .help = "PyTorch release that will load the per-rank files",
     .check = dtensor::CheckKey,
     .is_flag = true,
     .words = dtensor::kTorchWords},
}};

}  // namespace shardwright::checkpoints
