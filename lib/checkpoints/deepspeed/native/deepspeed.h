// SPDX-License-Identifier: Apache-2.0
// lib/checkpoints/deepspeed/native: DeepSpeed's native files, one set for each rank.
// The functions of the format's row. read makes a checkpoint of model states and optimizer shards,
// write the reverse; what they share with universal folders is in zero.

#pragma once

#include <span>
#include <string_view>

#include "checkpoints/deepspeed/common/topology.h"
#include "checkpoints/model/format.h"
#include "support/base/result.h"

namespace shardwright::checkpoints {

/// Reads native files. docs/formats/deepspeed.md sections "Files" and "Flattening".
Result<Checkpoint> ReadDeepSpeed(const SourceSet& source, const Patterns& patterns);

/// Implements Format::read_weights: reads the model states of stages 0 to 2 and no optimizer
/// shard.
/// \error kUnsupported  stage 3, whose weights are in the optimizer shards
Result<Checkpoint> ReadDeepSpeedWeights(const SourceSet& source, const Patterns& patterns);

/// Native DeepSpeed files for a topology: OUT/latest, OUT/<tag>/*. Pure.
/// docs/formats/deepspeed.md section "Writing".
Result<Written> WriteDeepSpeed(const Checkpoint& source, const Topology& topology);

namespace deepspeed {

// The row of the table; see Format.
bool Claims(const Listing& listing);
Belongs BelongsTo(std::string_view name);
Result<SourceSet> Scan(const Listing& listing, const ScanOptions& options);
Result<Layout> Resolve(const TargetSpec& spec, const Checkpoint& source);
Result<Written> Write(const Checkpoint& source, const Layout& layout);
FileReaders Readers(const Layout& layout, std::span<const plan::OutputFile> files);

}  // namespace deepspeed
}  // namespace shardwright::checkpoints
