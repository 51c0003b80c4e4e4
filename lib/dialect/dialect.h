#pragma once

#include <cstdint>
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

/// Which of DeepSpeed's universal loaders shall open the state files of trained parameters: no form
/// suits all of them. Our own reader opens every form.
enum class Loader : std::uint8_t {
  kAuto,    ///< the one of the target's stage in the release that saved the source
  kAny,     ///< stages 1 and 2 of every release, stage 3 from 0.19.3 on: dicts
  kStage3,  ///< stage 3 of every release: bare tensors
};

/// A universal folder: OUT/latest_universal, OUT/<tag>/zero/... Pure.
/// The model-state files are written for `topology.mp()` ranks.
/// \error kUnsupported kStage3 with tensor parallelism
Result<plan::Target> WriteUniversal(const Checkpoint& source, const Topology& topology,
                                    Loader loader = Loader::kAuto);

}  // namespace shardwright::dialect
