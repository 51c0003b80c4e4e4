// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "checkpoints/model/checkpoint.h"
#include "checkpoints/model/format.h"
#include "convert/input.h"
#include "engine/layout/shard_map.h"
#include "engine/plan/target.h"

namespace shardwright::convert {

/// Returns true if the source consists of its original files (not of a packed catalogue), in
/// the format and layout to write. Then the output repeats the files with everything in them.
bool IsVerbatim(const Input& input, const checkpoints::Format& format,
                const checkpoints::Layout& layout);

/// A plan that makes OUTPUT/<tag> a copy of the source's files, with its pointer file.
struct Verbatim {
  layout::ShardMap map;  ///< whole files, and the checksummed members within them
  plan::Target target;
};

/// \param clone  copies, clones or hard links of the source's files
/// \error kBadInput  a tag or file name that is not a valid file name
Result<Verbatim> PlanVerbatim(const Input& input, const checkpoints::Format& format,
                              plan::CloneMode clone);

}  // namespace shardwright::convert
