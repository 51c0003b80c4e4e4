// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/deepspeed/universal/universal.h"

#include <algorithm>
#include <string>

#include "checkpoints/deepspeed/common/file_name.h"
#include "checkpoints/deepspeed/common/scan.h"

namespace shardwright::checkpoints::universal {
bool Claims(const Listing& listing) { return HoldsAtoms(listing); }

Belongs BelongsTo(std::string_view name) {
  if (name.starts_with(std::string(kAtomsFolder) + "/")) return Belongs::kYes;
  const auto parsed = ParseFileName(name);
  return parsed && parsed->role != FileRole::kShard ? Belongs::kYes : Belongs::kNo;
}

Result<SourceSet> Scan(const Listing& listing, const ScanOptions& options) {
  return ScanEngineFiles(listing, true, options);
}

Status CheckLoader(std::string_view key, std::string_view value) {
  if (std::find(kLoaderWords.begin(), kLoaderWords.end(), value) != kLoaderWords.end()) return {};
  return Fail(Errc::kUsage, "target ", key, "=", value, ": auto, any or stage3 expected");
}

Result<Layout> Resolve(const TargetSpec& spec, const Checkpoint& source) {
  TargetSpec zero;
  std::string loader(kLoaderWords[0]);
  for (const auto& [key, value] : spec.settings) {
    if (key == kLoaderKey.name) {
      loader = value;
    } else {
      zero.settings.emplace_back(key, value);
    }
  }
  SW_TRY_ASSIGN(const ZeroSpec wanted, ReadZeroSpec(zero));
  SW_TRY_ASSIGN(const Topology topology, ResolveTopology(wanted, source));
  Layout layout = LayoutOf(topology);
  layout.options.emplace_back(kLoaderKey.name, std::move(loader));
  return layout;
}

Result<Written> Write(const Checkpoint& source, const Layout& layout) {
  const std::string_view word = layout.Option(kLoaderKey.name);
  const auto* const at = std::find(kLoaderWords.begin(), kLoaderWords.end(), word);
  const auto loader =
      at == kLoaderWords.end() ? Loader::kAuto : static_cast<Loader>(at - kLoaderWords.begin());
  return WriteUniversal(source, TopologyOf(layout), loader);
}

}  // namespace shardwright::checkpoints::universal
