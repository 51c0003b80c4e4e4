// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/torchtitan_fused_qkv.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "checkpoints/dcp/dcp.h"
#include "engine/layout/states.h"
#include "support/base/text.h"

namespace shardwright::checkpoints {
namespace {

constexpr std::string_view kFusedSide = "fused";

using Names = std::map<std::string, std::vector<std::string>, std::less<>>;

/// Moves the tensors of `params` that `wanted` accepts out of `source`
/// and returns them as a checkpoint of only these parameters.
template <class Wanted>
Checkpoint TakePart(Checkpoint* source, std::vector<Param> params, Wanted&& wanted) {
  Checkpoint part;
  part.origin = source->origin;
  part.tag = source->tag;
  part.layout = source->layout;
  part.arena = source->arena;
  part.states = source->states;
  part.map.files = source->map.files;
  part.map.members = source->map.members;
  part.map.arrays = source->map.arrays;
  std::set<std::string, std::less<>> names;
  for (const Param& param : params) names.insert(param.name);
  std::vector<layout::LogicalTensor> kept;
  for (layout::LogicalTensor& tensor : source->map.tensors) {
    const bool taken = names.contains(tensor.name) && wanted(tensor);
    (taken ? part.map.tensors : kept).push_back(std::move(tensor));
  }
  source->map.tensors = std::move(kept);
  part.groups = source->groups;
  for (Group& group : part.groups) group.params.clear();
  for (std::uint32_t i = 0; i < params.size(); ++i) {
    if (params[i].group < 0) continue;
    part.groups[static_cast<std::size_t>(params[i].group)].params.push_back(i);
  }
  part.params = std::move(params);
  return part;
}

/// Renames the members of optimizer groups that DCP folders record.
void RenameMembers(const Names& made, Checkpoint* checkpoint) {
  const auto* own = dynamic_cast<const dcp::DcpState*>(checkpoint->own.get());
  if (own == nullptr) return;
  auto renamed = std::make_shared<dcp::DcpState>(*own);
  for (std::vector<std::string>& group : renamed->groups) {
    std::vector<std::string> names;
    for (const std::string& name : group) {
      const auto found = made.find(name);
      const std::vector<std::string> now =
          found == made.end() ? std::vector<std::string>{name} : found->second;
      for (const std::string& one : now) {
        if (std::find(names.begin(), names.end(), one) == names.end()) names.push_back(one);
      }
    }
    group = std::move(names);
  }
  checkpoint->own = std::move(renamed);
}

/// Returns "layers.0.attention.qkv_linear." of a name: its module, without the projection.
std::string ModuleOf(std::string_view name) {
  const std::size_t leaf = name.rfind('.');
  const std::size_t part = leaf == std::string_view::npos ? leaf : name.rfind('.', leaf - 1);
  return part == std::string_view::npos ? "" : std::string(name.substr(0, part + 1));
}

/// Returns the part after ModuleOf that names a projection: "wq" or "wqkv".
std::string_view ProjectionOf(std::string_view name) {
  const std::string module = ModuleOf(name);
  if (!module.ends_with(".qkv_linear.")) return {};
  const std::string_view rest = name.substr(module.size());
  return rest.substr(0, rest.find('.'));
}

/// Returns the name that the parts of a fused parameter share: "layers.0.qkv_linear.weight".
std::string CommonOf(std::string_view name) {
  return ModuleOf(name) + std::string(name.substr(name.rfind('.') + 1));
}

/// Maps the names of `from` to the names of `to` that belong to the same fused parameter.
Names NamesOf(const std::vector<std::string>& from, const std::vector<Param>& to) {
  std::map<std::string, std::vector<std::string>> common;
  for (const Param& param : to) common[CommonOf(param.name)].push_back(param.name);
  Names names;
  for (const std::string& name : from) names[name] = common[CommonOf(name)];
  return names;
}

std::vector<std::string> NamesIn(const std::vector<Param>& params) {
  std::vector<std::string> names;
  names.reserve(params.size());
  for (const Param& param : params) names.push_back(param.name);
  return names;
}

/// Returns the number of query heads per key head, from the model's separate projections.
std::optional<std::uint64_t> QueryHeads(const Checkpoint& source) {
  std::map<std::string, std::uint64_t> rows;  // row counts of the projections in one module
  for (const Param& param : source.params) {
    if (ProjectionOf(param.name).empty() || param.shape.empty()) continue;
    if (CommonOf(param.name) != CommonOf(source.fused.front().name)) continue;
    rows[std::string(ProjectionOf(param.name))] = param.shape.front();
  }
  const bool divides = rows["wk"] > 0 && rows["wq"] > 0 && rows["wq"] % rows["wk"] == 0;
  return divides ? std::optional(rows["wq"] / rows["wk"]) : std::nullopt;
}

}  // namespace

Checkpoint WithoutFused(Checkpoint source) {
  TakePart(&source, std::exchange(source.fused, {}),
           [](const layout::LogicalTensor& /*tensor*/) { return true; });
  return source;
}

Result<Unfused> SplitFused(Checkpoint source, const ModelSizes& sizes, const Patterns& patterns) {
  SW_TRY_ASSIGN(const ModelMap map, ModelMap::BuiltIn(kFusedMap));
  const std::vector<std::string> before = NamesIn(source.fused);
  const std::optional<std::uint64_t> query = QueryHeads(source);
  Checkpoint part = TakePart(&source, std::exchange(source.fused, {}),
                             [](const layout::LogicalTensor& /*tensor*/) { return true; });
  MapUse use{std::string(kFusedSide), std::string(kFusedSplit), {}, sizes};
  if (query) use.config.try_emplace("query", *query);
  SW_TRY_ASSIGN(Mapped mapped, ApplyMap(map, use, std::move(part), patterns));
  std::unordered_map<std::string, std::uint32_t> by_name;
  for (std::uint32_t i = 0; i < source.params.size(); ++i) by_name[source.params[i].name] = i;
  std::set<std::string, std::less<>> trained;
  for (Param& made : mapped.checkpoint.params) {
    const auto found = by_name.find(made.name);
    if (found == by_name.end()) {
      return Fail(Errc::kUnsupported, Quoted(made.name),
                  ": the optimizer has state for it, but the model does not have it, and no rule "
                  "splits it");
    }
    Param& param = source.params[found->second];
    if (param.shape != made.shape) {
      return Fail(Errc::kBadInput, Quoted(made.name), ": ", ToString(param.shape),
                  " in the model, but ", ToString(made.shape), " in the optimizer's fused state");
    }
    param.kind = ParamKind::kTrainable;
    param.group = made.group;
    param.scalars = std::move(made.scalars);
    if (made.group >= 0) {
      source.groups[static_cast<std::size_t>(made.group)].params.push_back(found->second);
    }
    trained.insert(made.name);
  }
  for (Group& group : source.groups) std::sort(group.params.begin(), group.params.end());
  // As in all PyTorch checkpoints, a trained float32 tensor is its own master weight.
  for (layout::LogicalTensor& tensor : source.map.tensors) {
    const bool master = tensor.state == layout::kWeight && tensor.dtype == DType::kF32;
    if (master && trained.contains(tensor.name)) tensor.state = layout::kMaster;
  }
  std::move(mapped.checkpoint.map.tensors.begin(), mapped.checkpoint.map.tensors.end(),
            std::back_inserter(source.map.tensors));
  RenameMembers(NamesOf(before, mapped.checkpoint.params), &source);
  source.proved = false;
  return Unfused{std::move(source), std::move(mapped.sizes)};
}

Result<Unfused> FuseOptimizer(Checkpoint source, const ModelSizes& sizes,
                              const Patterns& patterns) {
  SW_TRY_ASSIGN(const ModelMap map, ModelMap::BuiltIn(kFusedMap));
  std::vector<Param> parts;
  std::set<std::uint32_t> numbers;
  for (std::uint32_t i = 0; i < source.params.size(); ++i) {
    const std::string_view projection = ProjectionOf(source.params[i].name);
    if (projection != "wq" && projection != "wk" && projection != "wv") continue;
    numbers.insert(i);
    parts.push_back(source.params[i]);
  }
  if (parts.empty() || source.groups.empty() || !source.fused.empty()) {
    return Fail(
        Errc::kUnsupported, "map ", kFusedMap, ":", kFusedSaved,
        ": the source has no torchtitan query, key and value states (qkv_linear.wq) to fuse");
  }
  const std::vector<std::string> before = NamesIn(parts);
  const std::set<std::string, std::less<>> states(source.states.begin(), source.states.end());
  Checkpoint part = TakePart(&source, std::move(parts), [&](const layout::LogicalTensor& tensor) {
    return states.contains(tensor.state);
  });
  const MapUse use{std::string(kFusedSplit), std::string(kFusedSide), {}, sizes};
  SW_TRY_ASSIGN(Mapped mapped, ApplyMap(map, use, std::move(part), patterns));
  for (const std::uint32_t i : numbers) {
    source.params[i].scalars.clear();
    source.params[i].group = -1;
  }
  for (Group& group : source.groups) {
    std::erase_if(group.params, [&](std::uint32_t i) { return numbers.contains(i); });
  }
  std::move(mapped.checkpoint.map.tensors.begin(), mapped.checkpoint.map.tensors.end(),
            std::back_inserter(source.map.tensors));
  source.fused = std::move(mapped.checkpoint.params);
  RenameMembers(NamesOf(before, source.fused), &source);
  source.proved = false;
  return Unfused{std::move(source), std::move(mapped.sizes)};
}

}  // namespace shardwright::checkpoints
