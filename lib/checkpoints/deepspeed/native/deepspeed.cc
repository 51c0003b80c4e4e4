// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/deepspeed/native/deepspeed.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <vector>

#include "checkpoints/deepspeed/common/file_name.h"
#include "checkpoints/deepspeed/common/flat.h"
#include "checkpoints/deepspeed/common/scan.h"
#include "checkpoints/deepspeed/common/target.h"

namespace shardwright::checkpoints::deepspeed {

bool Claims(const Listing& listing) { return HoldsNative(listing); }

Belongs BelongsTo(std::string_view name) {
  const auto parsed = ParseFileName(name);
  if (!parsed) return Belongs::kNo;
  return parsed->role == FileRole::kShard ? Belongs::kOneVersion : Belongs::kYes;
}

Result<SourceSet> Scan(const Listing& listing, const ScanOptions& options) {
  return ScanEngineFiles(listing, false, options);
}

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

namespace {

/// The ranks of a job that use a file. Unset coordinates match all ranks.
struct Part {
  std::optional<std::uint64_t> data;     ///< rank in the ZeRO group
  std::optional<std::uint64_t> experts;  ///< expert-parallel rank
  std::optional<std::uint64_t> tensor;
  std::optional<std::uint64_t> stage;
};

/// Returns the stage that has a pipeline layer, or nothing if the layout does not list it.
std::optional<std::uint64_t> StageOf(const Topology& to, std::uint64_t layer) {
  for (std::size_t stage = 0; stage < to.stages.size(); ++stage) {
    const std::vector<std::uint32_t>& layers = to.stages[stage];
    if (std::find(layers.begin(), layers.end(), layer) != layers.end()) return stage;
  }
  return std::nullopt;
}

/// \param experts  number of experts of each MoE layer
Part PartOf(const FileName& name, const Topology& to,
            const std::map<std::uint64_t, std::uint64_t>& experts) {
  Part part;
  if (name.role == FileRole::kLayer) {
    part.stage = StageOf(to, name.layer);
    const std::string_view digits = std::string_view(name.axes).substr(name.axes.rfind('_') + 1);
    std::uint64_t tensor = 0;
    const auto end = std::from_chars(digits.data(), digits.data() + digits.size(), tensor);
    if (!name.axes.empty() && end.ec == std::errc()) part.tensor = tensor;
    return part;
  }
  part.tensor = name.mp % to.tp;
  part.stage = name.mp / to.tp;
  if (name.role == FileRole::kModelZero3 || name.role == FileRole::kShard) part.data = name.rank;
  if (name.role == FileRole::kExpertOptim) part.experts = name.rank;
  if (name.role == FileRole::kExpert) {
    const std::uint64_t local = std::max<std::uint64_t>(1, experts.at(name.layer) / to.ep);
    part.experts = name.expert / local;
  }
  return part;
}

}  // namespace

FileReaders Readers(const Layout& layout, std::span<const plan::OutputFile> files) {
  const Topology to = TopologyOf(layout);
  std::vector<std::optional<FileName>> names;
  std::map<std::uint64_t, std::uint64_t> experts;
  for (const plan::OutputFile& file : files) {
    names.push_back(ParseFileName(std::string_view(file.path).substr(file.path.rfind('/') + 1)));
    if (!names.back() || names.back()->role != FileRole::kExpert) continue;
    std::uint64_t& count = experts[names.back()->layer];
    count = std::max(count, names.back()->expert + 1);
  }
  FileReaders readers;
  readers.ranks = to.dp * to.mp();
  for (const std::optional<FileName>& name : names) {
    std::vector<std::uint32_t>& ranks = readers.by_file.emplace_back();
    if (!name) continue;
    const Part part = PartOf(*name, to, experts);
    // Ranks of one stage are consecutive, and within it those of one data-parallel rank.
    for (std::uint64_t rank = 0; rank < readers.ranks; ++rank) {
      const std::uint64_t data = rank / to.tp % to.dp;
      const bool reads =
          part.data.value_or(data) == data && part.tensor.value_or(rank % to.tp) == rank % to.tp &&
          part.stage.value_or(rank / (to.tp * to.dp)) == rank / (to.tp * to.dp) &&
          (!part.experts || ExpertRankOf(data, to.dp, to.ep, false).ep == *part.experts);
      if (reads) ranks.push_back(static_cast<std::uint32_t>(rank));
    }
  }
  return readers;
}

}  // namespace shardwright::checkpoints::deepspeed
