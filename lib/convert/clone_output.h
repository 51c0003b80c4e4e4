// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "checkpoints/model/checkpoint.h"
#include "checkpoints/model/format.h"
#include "convert/input.h"
#include "engine/layout/shard_map.h"
#include "engine/plan/target.h"

namespace shardwright::convert {

/// True if the source's files are of the format to write and can be read, and the layout is their
/// own: the output then repeats them, with what a conversion could not keep.
bool IsVerbatim(const Input& input, const checkpoints::Format& format,
                const checkpoints::Layout& layout);

/// What makes OUTPUT/<tag> a copy of the source's files, with its pointer file.
struct Verbatim {
  layout::ShardMap map;  ///< whole files, and the checksummed members within them
  plan::Target target;
};

/// \param clone  how files come to be; a file that is not of this rank alone can only be copied
/// \error kBadInput  a name that cannot be a file name
Result<Verbatim> PlanVerbatim(const Input& input, const checkpoints::Format& format,
                              plan::CloneMode clone);

}  // namespace shardwright::convert
