// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "checkpoints/deepspeed/native/read/read_internal.h"

namespace shardwright::checkpoints::reader {
namespace {

Status ReadInfo(Reading* reading) {
  const Model& model = reading->models.front();
  const Node* node = model.document.root->Find("universal_checkpoint_info");
  if (node == nullptr) {
    node = FindPath(reading->state.optimizer.front().document.root, {"universal_checkpoint_info"});
  }
  auto info = UniversalInfo::Parse(node);
  if (!info) {
    return Within(reading->file_name(model.file) + ": universal_checkpoint_info",
                  std::move(info).error());
  }
  reading->info = *std::move(info);
  const Node* autotp = FindPath(reading->config, {"tensor_parallel", "autotp_size"});
  if (autotp != nullptr && pickle::AsCount(autotp).value_or(0) > 1) reading->info.OfAutoTp();
  return {};
}

bool SameOrder(const layout::CutPtr& a, const layout::CutPtr& b) {
  return a == b || (a != nullptr && b != nullptr && *a == *b);
}

/// Returns true if checksums prove that the shards on all tensor-parallel ranks are equal.
bool ProvenEqual(const Reading& reading, const ParamInfo& info) {
  const std::uint64_t tp = reading.topology.tp;
  const layout::Member* first = nullptr;
  std::vector<bool> seen(tp);
  for (const Weight& weight : info.weights) {
    const layout::Member& member = reading.map.map().members[weight.place.member];
    const bool all_of_it = weight.place.offset == 0 &&
                           weight.place.elems * ItemSize(weight.place.dtype) == member.bytes;
    if (!all_of_it || !member.crc32 || member.bytes == 0) return false;
    if (!SameOrder(weight.order, info.weights.front().order)) return false;
    if (first == nullptr) first = &member;
    if (member.bytes != first->bytes || member.crc32 != first->crc32) return false;
    seen[weight.tp] = true;
  }
  return std::all_of(seen.begin(), seen.end(), [](bool known) { return known; }) &&
         std::all_of(info.shards.begin(), info.shards.end(),
                     [&](const Shape& shape) { return shape == info.shards.front(); });
}

Ruled Replicated(const ParamInfo& info, const std::string& origin) {
  Ruled out;
  out.rule.split = layout::Split::kReplicated;
  out.rule.origin = origin;
  out.whole = info.shards.front();
  return out;
}

Result<Ruled> RuleOf(const Reading& reading, const Patterns& patterns, const Param& param,
                     const ParamInfo& info) {
  const bool many = reading.topology.tp > 1;
  // universal_checkpoint_info has no list for buffers; its default would cut them.
  if (many && param.kind == ParamKind::kBuffer && ProvenEqual(reading, info)) {
    return Replicated(info, "equal on all ranks");
  }
  const RuleSource* const own = &reading.info;
  auto ruled = DecideRule(std::span(&own, 1), patterns, param.name, info.shards);
  if (!ruled && many && ruled.error().code == Errc::kUnsupported && ProvenEqual(reading, info)) {
    return Replicated(info, "equal on all ranks");
  }
  return ruled;
}

/// Returns the user's rules and the built-in families that match this model.
Patterns PatternsFor(const Reading& reading) {
  std::vector<std::string> names;
  std::vector<Shape> shapes;
  for (std::size_t i = 0; i < reading.out.params.size(); ++i) {
    if (reading.params[i].shards.empty()) continue;
    names.push_back(reading.out.params[i].name);
    shapes.push_back(reading.params[i].shards.front());
  }
  return reading.patterns.ForModel(names, shapes);
}

Status MakeCuts(const Reading& reading, const Param& param, const Shape& whole, ParamInfo* info) {
  const std::uint64_t tp = reading.topology.tp;
  for (std::uint64_t rank = 0; rank < tp; ++rank) {
    SW_TRY_ASSIGN(const Shape shard, layout::ShardShape(param.rule, whole, tp, rank));
    if (shard != info->shards[rank]) {
      return Fail(Errc::kBadInput, "rank ", rank, " of tp ", tp, ": shard ", ToString(shard),
                  " expected from the rule ", layout::Explain(param.rule), " of ", ToString(whole),
                  ", found ", ToString(info->shards[rank]));
    }
    SW_TRY_ASSIGN(layout::Cut cut, layout::MakeCut(param.rule, whole, tp, rank));
    if (rank > 0 && cut == *info->cuts.front()) {
      info->cuts.push_back(info->cuts.front());
    } else {
      info->cuts.push_back(std::make_shared<const layout::Cut>(std::move(cut)));
    }
  }
  return {};
}

/// Copies all properties except data from the parameter that has the alias's data.
Status FollowAlias(Reading* reading, Param* param) {
  const auto at = reading->by_name.find(param->alias_of);
  if (at == reading->by_name.end() || !reading->out.params[at->second].alias_of.empty()) {
    return Fail(Errc::kBadInput, reading->file_name(reading->models.front().file),
                ": shared_params: \"", param->name, "\" is tied to \"", param->alias_of,
                "\", which holds no data");
  }
  const Param& holder = reading->out.params[at->second];
  param->kind = holder.kind;
  param->shape = holder.shape;
  param->dtype = holder.dtype;
  param->rule = holder.rule;
  param->layer = holder.layer;
  return {};
}

}  // namespace

Status DecideRules(Reading* reading) {
  SW_TRY(ReadInfo(reading));
  const Patterns patterns = PatternsFor(*reading);
  for (std::size_t i = 0; i < reading->out.params.size(); ++i) {
    Param& param = reading->out.params[i];
    ParamInfo& info = reading->params[i];
    if (!param.alias_of.empty()) continue;
    if (const auto gap = std::find(info.known.begin(), info.known.end(), false);
        gap != info.known.end()) {
      const auto tp = static_cast<std::uint64_t>(gap - info.known.begin());
      const std::uint64_t mp = reading->mp_of(info.first_stage, tp);
      return Fail(Errc::kBadInput, reading->file_name(reading->models[mp].file), ": parameter \"",
                  param.name, "\" is missing, although another tensor-parallel rank has it");
    }
    auto ruled = RuleOf(*reading, patterns, param, info);
    const std::string where = "parameter \"" + param.name + "\"";
    if (!ruled) {
      const bool named = ruled.error().message.find(param.name) != std::string::npos;
      if (named) return tl::unexpected<Error>(std::move(ruled).error());
      return Within(where, std::move(ruled).error());
    }
    param.rule = std::move(ruled->rule);
    param.shape = std::move(ruled->whole);
    if (Status cuts = MakeCuts(*reading, param, param.shape, &info); !cuts) {
      return Within(where, std::move(cuts).error());
    }
  }
  for (Param& param : reading->out.params) {
    if (!param.alias_of.empty()) SW_TRY(FollowAlias(reading, &param));
  }
  return {};
}

Status AddFragment(Reading* reading, std::uint32_t param, std::string_view state, std::uint64_t mp,
                   const layout::Placement& at, const layout::CutPtr& order) {
  ParamInfo& info = reading->params[param];
  const Param& named = reading->out.params[param];
  const DType dtype = reading->out.map.arrays[at.array].dtype;
  const auto [known, fresh] = info.tensors.emplace(
      std::string(state), static_cast<std::uint32_t>(reading->out.map.tensors.size()));
  if (fresh) {
    layout::LogicalTensor tensor;
    tensor.name = named.name;
    tensor.state = state;
    tensor.dtype = dtype;
    tensor.shape = named.shape;
    reading->out.map.tensors.push_back(std::move(tensor));
  }
  layout::LogicalTensor& tensor = reading->out.map.tensors[known->second];
  const std::uint64_t tp = reading->tp_of(mp);
  if (tensor.dtype != dtype) {
    return Fail(Errc::kBadInput, reading->file_name(reading->models[mp].file), ": parameter \"",
                named.name, "\" ", tensor.state, ": ", Name(tensor.dtype),
                " expected as on other ranks, found ", Name(dtype));
  }
  if (info.cuts[tp]->shard_elems() == 0) return {};
  layout::Fragment fragment;
  fragment.cut = order == nullptr ? info.cuts[tp] : layout::Cut::Compose(info.cuts[tp], order);
  fragment.at = at;
  const bool first = reading->stage_of(mp) == info.first_stage;
  if (info.unused_copies && !first) return {};
  if (named.rule.split == layout::Split::kAverage && reading->topology.tp > 1) {
    if (!first) return {};  // another stage's copies would count twice in the mean
    fragment.role = layout::Role::kPartial;
  } else {
    const bool repeated =
        std::any_of(tensor.fragments.begin(), tensor.fragments.end(), [&](const auto& other) {
          return other.role == layout::Role::kOwner && *other.cut == *fragment.cut;
        });
    fragment.role = repeated ? layout::Role::kReplica : layout::Role::kOwner;
  }
  tensor.fragments.push_back(std::move(fragment));
  return {};
}

}  // namespace shardwright::checkpoints::reader
