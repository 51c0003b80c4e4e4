#include "dialect/deepspeed/deepspeed.h"

#include "dialect/zero/file_name.h"
#include "dialect/zero/scan.h"
#include "dialect/zero/target.h"

namespace shardwright::dialect::deepspeed {

bool Claims(const Listing& listing) { return HoldsNative(listing); }

Belongs BelongsTo(std::string_view name) {
  const auto parsed = ParseFileName(name);
  if (!parsed) return Belongs::kNo;
  return parsed->role == FileRole::kShard ? Belongs::kOneVersion : Belongs::kYes;
}

Result<SourceSet> Scan(const Listing& listing) { return ScanEngineFiles(listing, false); }

Result<Layout> Resolve(const TargetSpec& spec, const Checkpoint& source) {
  SW_TRY_ASSIGN(const ZeroSpec wanted, ReadZeroSpec(spec));
  SW_TRY_ASSIGN(const Topology topology, ResolveTopology(wanted, source));
  Layout layout = LayoutOf(topology);
  layout.ranks = topology.dp * topology.tp * topology.pp;
  return layout;
}

Result<Written> Write(const Checkpoint& source, const Layout& layout) {
  return WriteDeepSpeed(source, TopologyOf(layout));
}

}  // namespace shardwright::dialect::deepspeed
