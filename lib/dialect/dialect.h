#pragma once

#include <string>
#include <vector>

#include "base/result.h"
#include "dialect/checkpoint.h"
#include "dialect/patterns.h"
#include "dialect/source.h"
#include "plan/target.h"

namespace shardwright::dialect {

/// Understands a scanned source: logical tensors, where they lie, groups, order, and what is passed
/// through. Dispatches to ReadDeepSpeed or ReadUniversal. \error kBadInput, kNotFound (missing rank
/// files, named), kUnsupported Pure but for nothing: reads no files; payload values that it needs
/// are inlined in the set.
Result<Checkpoint> ReadCheckpoint(const SourceSet& source, const Patterns& patterns);

/// docs/formats/deepspeed.md sections "Files" and "Flattening".
Result<Checkpoint> ReadDeepSpeed(const SourceSet& source, const Patterns& patterns);

/// DeepSpeed universal folders: any upstream version, stage-3 bare tensors, and our superset with
/// its manifest.
Result<Checkpoint> ReadUniversal(const SourceSet& source, const Patterns& patterns);

/// Native DeepSpeed files for a topology: OUT/latest, OUT/<tag>/*. Pure.
/// docs/formats/deepspeed.md section "Writing".
Result<plan::Target> WriteDeepSpeed(const Checkpoint& source, const Topology& topology);

/// A universal folder in the superset form: OUT/latest_universal, OUT/<tag>/zero/... Pure.
/// The model-state files are written for `topology.mp()` ranks.
Result<plan::Target> WriteUniversal(const Checkpoint& source, const Topology& topology);

}  // namespace shardwright::dialect
