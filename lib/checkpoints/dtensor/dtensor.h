// SPDX-License-Identifier: Apache-2.0
// lib/checkpoints/dtensor: files of torch.save, one for each rank and item, that hold DTensors.
// verl, Accelerate and torch_checkpointing write them. A DTensor says in its pickle which piece of
// which whole it is: mesh, placements and the rank's own place in it. Nothing else does: names of
// files tell the ranks, and that all are there is proved by covering every tensor once. Read: all
// three, with the flat optimizer and the shards of FSDP1. Written: the same three for any mesh.
// Source: docs/formats/dtensor.md.

#pragma once

#include <array>
#include <string_view>

#include "checkpoints/model/checkpoint.h"
#include "checkpoints/model/format.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::dtensor {

inline constexpr std::string_view kName = "dtensor";

// The row of the table; see Format.
bool Claims(const Listing& listing);
Belongs BelongsTo(std::string_view name);

/// Finds the files of all ranks; the set's `manifest` is fsdp_config.json or metadata.pkl.
/// \error as ReadFiles
/// Local; reads pickles.
Result<SourceSet> Scan(const Listing& listing, const ScanOptions& options);

/// Reads the containers of one file that Scan has found, as Format::read_file.
Result<std::vector<Container>> ReadFile(const Found& found, const os::File& file,
                                        const os::Identity& identity);

/// Tensors, and the optimizer's groups and states. What is in float32 and has states is a master.
/// \error kNotFound  ranks are missing, named; kBadInput  files that contradict each other;
///        kUnsupported  an optimizer that does not tell which parameter is which
/// Source: docs/formats/dtensor.md.
Result<Checkpoint> Read(const SourceSet& source, const Patterns& patterns);

/// Implements Format::read_weights: reads only the files of the model.
Result<Checkpoint> ReadWeights(const SourceSet& source, const Patterns& patterns);

Result<Layout> Resolve(const TargetSpec& spec, const Checkpoint& source);

/// verl and Accelerate train models of Hugging Face.
std::span<const std::string_view> Sides(const TargetSpec& spec);

/// One file of each item for every rank. Pure.
Result<Written> Write(const Checkpoint& source, const Layout& layout);
FileReaders Readers(const Layout& layout, std::span<const plan::OutputFile> files);

/// As TargetKey::check. \error kUsage
Status CheckKey(std::string_view key, std::string_view value);

/// What verl keeps beside: configuration, tokenizer and perhaps weights.
inline constexpr std::array<std::string_view, 1> kFoldersBeside = {"huggingface"};

inline constexpr std::array<std::string_view, 4> kTrainerWords = {"source", "verl", "accelerate",
                                                                  "torch_checkpointing"};
inline constexpr std::array<std::string_view, 4> kTorchWords = {"source", "2.15", "2.9", "2.6"};

}  // namespace shardwright::checkpoints::dtensor

namespace shardwright::checkpoints {

inline constexpr std::array<TargetKey, 8> kDTensorKeys = {{
    {.name = "dp_shard",
     .help = "ranks that share out every tensor (fsdp)",
     .check = dtensor::CheckKey},
    {.name = "dp_replicate",
     .help = "copies of the model, each of dp_shard ranks (ddp)",
     .check = dtensor::CheckKey},
    {.name = "tp", .help = "tensor-parallel ranks", .check = dtensor::CheckKey},
    {.name = "mesh_names",
     .help = "names of the mesh's dimensions, with : between them, or none",
     .check = dtensor::CheckKey},
    {.name = "device", .help = "type of the mesh's devices: cuda, cpu", .check = dtensor::CheckKey},
    {.name = "fsdp_version",
     .help = "2, or 1 with the optimizer's states in flat vectors",
     .check = dtensor::CheckKey},
    {.name = "trainer",
     .help = "whose per-rank files to write",
     .check = dtensor::CheckKey,
     .is_flag = true,
     .words = dtensor::kTrainerWords},
    {.name = "torch",
     .help = "release of PyTorch that shall load the per-rank files",
     .check = dtensor::CheckKey,
     .is_flag = true,
     .words = dtensor::kTorchWords},
}};

}  // namespace shardwright::checkpoints
