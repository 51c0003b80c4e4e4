// SPDX-License-Identifier: Apache-2.0
// lib/checkpoints/deepspeed/native: DeepSpeed's native files, one set for each rank. This header
// declares the functions of the format's row. `read` makes a checkpoint from model states and
// optimizer shards, and `write` does the reverse. deepspeed/common has code shared with universal.

#pragma once

#include <span>
#include <string_view>

#include "checkpoints/deepspeed/common/topology.h"
#include "checkpoints/model/format.h"
#include "support/base/result.h"

namespace shardwright::checkpoints {

/// Reads native files. Source: docs/formats/deepspeed.md, sections "Files" and "Flattening".
Result<Checkpoint> ReadDeepSpeed(const SourceSet& source, const Patterns& patterns);

/// Implements Format::read_weights. Reads the model
/// states of stages 0 to 2 and skips all optimizer shards.
/// \error kUnsupported  stage 3, where only the optimizer shards have the weights
Result<Checkpoint> ReadDeepSpeedWeights(const SourceSet& source, const Patterns& patterns);

/// Writes native DeepSpeed files for a topology: OUT/latest and
/// OUT/<tag>/*. Pure. Source: docs/formats/deepspeed.md, section "Writing".
Result<Written> WriteDeepSpeed(const Checkpoint& source, const Topology& topology);

namespace deepspeed {

// Functions in the format's row of the registry; see Format.
bool Claims(const Listing& listing);
Belongs BelongsTo(std::string_view name);
Result<SourceSet> Scan(const Listing& listing, const ScanOptions& options);
Result<Layout> Resolve(const TargetSpec& spec, const Checkpoint& source);
Result<Written> Write(const Checkpoint& source, const Layout& layout);
FileReaders Readers(const Layout& layout, std::span<const plan::OutputFile> files);

}  // namespace deepspeed
}  // namespace shardwright::checkpoints
