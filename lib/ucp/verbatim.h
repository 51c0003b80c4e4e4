#pragma once

#include "dialect/checkpoint.h"
#include "dialect/target_spec.h"
#include "layout/shard_map.h"
#include "plan/target.h"
#include "ucp/input.h"

namespace shardwright::ucp {

/// True if native files of both layouts hold the same.
bool SameLayout(const dialect::Topology& a, const dialect::Topology& b);

/// True if the source's files are native ones that can be read, and `topology` is their own layout:
/// the output then repeats them, with what a conversion could not keep.
bool IsVerbatim(const Input& input, const dialect::Topology& topology);

/// What makes OUTPUT/<tag> a copy of the source's files, with `latest`.
struct Verbatim {
  layout::ShardMap map;  ///< whole files, and the checksummed members within them
  plan::Target target;
};

/// \param twin  how files come to be; a file that is not of this rank alone can only be copied
/// \error kBadInput  a name that cannot be a file name
Result<Verbatim> PlanVerbatim(const Input& input, plan::Twin twin);

}  // namespace shardwright::ucp
