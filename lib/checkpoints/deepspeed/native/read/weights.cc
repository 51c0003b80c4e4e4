// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "checkpoints/deepspeed/common/flat.h"
#include "checkpoints/deepspeed/native/read/read_internal.h"
#include "checkpoints/pickled/hyper.h"
#include "engine/layout/states.h"

namespace shardwright::checkpoints::reader {
namespace {

std::string_view StateOf(const Reading& reading, const Param& param) {
  switch (param.kind) {
    case ParamKind::kBuffer:
      return layout::kBuffer;
    case ParamKind::kFrozen:
      return layout::kFrozen;
    case ParamKind::kTrainable:
      break;
  }
  // Without ZeRO and separate master weights, the weights are the master weights.
  return reading.plain_weights ? layout::kMaster : layout::kWeight;
}

/// Stage 3: maps the pieces of a frozen parameter, one per rank.
Status MapFrozenShares(Reading* reading, std::uint32_t param) {
  const ParamInfo& info = reading->params[param];
  const std::string& name = reading->out.params[param].name;
  for (std::uint64_t mp = 0; mp < reading->mp_ranks; ++mp) {
    const auto at = reading->frozen_shares[mp].find(name);
    if (at == reading->frozen_shares[mp].end()) continue;
    const std::uint64_t elems = Elems(info.shards[reading->tp_of(mp)]);
    const std::uint64_t share = ShareElems(elems, reading->ranks);
    std::vector<layout::Region> regions;
    DType dtype = at->second.front().dtype;
    for (const Place& place : at->second) {
      const std::uint32_t file = reading->map.map().members[place.member].file;
      if (place.elems != share || place.dtype != dtype) {
        return Fail(Errc::kBadInput, reading->file_name(file), ": frozen parameter \"", name,
                    "\": share of ", share, " elements of ", Name(dtype), " expected, found ",
                    place.elems, " of ", Name(place.dtype));
      }
      regions.push_back(reading->map.RegionOf(place));
    }
    const std::uint32_t array = reading->map.AddArray(dtype, std::move(regions));
    SW_TRY(AddFragment(reading, param, layout::kFrozen, mp, {array, 0, share, 0}));
  }
  return {};
}

/// Returns true if an earlier weight has the same elements
/// in another storage order. Such copies are not compared.
bool RepeatsInOtherOrder(const ParamInfo& info, const Weight& weight) {
  const auto same = [](const layout::CutPtr& a, const layout::CutPtr& b) {
    return a == b || (a != nullptr && b != nullptr && *a == *b);
  };
  bool repeats = false;
  for (const Weight& other : info.weights) {
    if (other.stage == weight.stage && other.tp == weight.tp) break;
    if (!same(info.cuts[other.tp], info.cuts[weight.tp])) continue;
    if (same(other.order, weight.order)) return false;
    repeats = true;
  }
  return repeats;
}

}  // namespace

void AddWeight(Reading* reading, std::uint32_t param, std::uint64_t mp,
               std::vector<PlacedPart> parts) {
  for (PlacedPart& part : parts) {
    reading->params[param].weights.push_back(
        {reading->stage_of(mp), reading->tp_of(mp), part.place, std::move(part.order)});
  }
}

OpaqueEntry& OpaqueReader::Add(const std::string& name, const Node* value) {
  if (kept_ == nullptr) {
    kept_ = std::make_shared<const Passed>(Keep(reading_, file_, document_));
  }
  return AddOpaque(&reading_->opaque, name, after_, reading_->tp_of(mp_), reading_->topology.tp,
                   {kept_, value});
}

Status MapWeights(Reading* reading) {
  for (std::uint32_t i = 0; i < reading->out.params.size(); ++i) {
    const Param& param = reading->out.params[i];
    if (!param.alias_of.empty()) continue;
    ParamInfo& info = reading->params[i];
    std::stable_sort(info.weights.begin(), info.weights.end(),
                     [](const Weight& a, const Weight& b) {
                       return a.stage != b.stage ? a.stage < b.stage : a.tp < b.tp;
                     });
    for (const Weight& weight : info.weights) {
      if (RepeatsInOtherOrder(info, weight)) continue;
      const std::uint32_t array = reading->map.AddWhole(weight.place);
      SW_TRY(AddFragment(reading, i, StateOf(*reading, param),
                         reading->mp_of(weight.stage, weight.tp), {array, 0, layout::kOneHolder, 0},
                         weight.order));
    }
    if (param.kind == ParamKind::kFrozen && info.weights.empty()) {
      SW_TRY(MapFrozenShares(reading, i));
    }
  }
  return {};
}

Status SetScalars(Reading* reading, std::uint32_t param, const std::vector<Scalar>& scalars,
                  std::uint32_t file) {
  Param& named = reading->out.params[param];
  ParamInfo& info = reading->params[param];
  if (!info.has_scalars) {
    info.has_scalars = true;
    named.scalars = scalars;
    return {};
  }
  if (named.scalars == scalars) return {};
  for (std::size_t i = 0; i < std::min(scalars.size(), named.scalars.size()); ++i) {
    if (scalars[i] == named.scalars[i]) continue;
    return Fail(Errc::kBadInput, reading->file_name(file), ": parameter \"", named.name, "\" ",
                scalars[i].state, ": ", Show(named.scalars[i]),
                " expected as on other ranks, found ", Show(scalars[i]));
  }
  return Fail(Errc::kBadInput, reading->file_name(file), ": parameter \"", named.name,
              "\": ", named.scalars.size(), " scalar states expected as on other ranks, found ",
              scalars.size());
}

std::vector<Scalar> WithGroupStep(const Reading& reading, std::uint64_t mp,
                                  std::vector<Scalar> scalars, const Group& options) {
  const bool known = std::any_of(scalars.begin(), scalars.end(), [](const Scalar& scalar) {
    return scalar.state == layout::kStep;
  });
  if (known) return scalars;
  const Node* step = options.options->Find("step");
  if (step == nullptr) {
    step = FindPath(reading.state.optimizer[mp].document.root, {"base_optimizer_state_step"});
  }
  if (step == nullptr || (step->kind != pickle::Kind::kInt && step->kind != pickle::Kind::kFloat)) {
    return scalars;
  }
  Scalar scalar;
  scalar.state = layout::kStep;
  scalar.value = step;
  scalars.push_back(std::move(scalar));
  return scalars;
}

namespace {

/// Returns the options of a group that are tensors. All options come from one optimizer file.
std::vector<Scalar> TensorsOf(Reading* reading, const Node* options) {
  if (reading->state.optimizer.empty()) return {};
  const bool sharded = !reading->shards.empty() && !reading->shards.front().empty();
  const std::size_t mp = reading->state.options_rank;
  const std::uint32_t file = sharded ? reading->shards[mp].front().file : reading->models[mp].file;
  const Document& document = reading->state.optimizer[mp].document;
  return TensorOptions(options, [&](const Node* tensor) {
    return reading->map.Payload(file, document, tensor, "an option of a parameter group");
  });
}

}  // namespace

Group MakeGroup(Reading* reading, const Node* options) {
  pickle::Arena& arena = *reading->out.arena;
  Group out;
  Node* dict =
      options != nullptr && options->is_dict() ? pickle::CopyDict(arena, options) : arena.Dict();
  pickle::Remove(dict, "params");
  // Names of the flat tensors' parameters are valid for this layout only.
  pickle::Remove(dict, "param_names");
  const Node* moe = dict->Find("moe");
  out.moe = moe != nullptr && moe->kind == pickle::Kind::kBool && moe->integer != 0;
  out.options = dict;
  out.tensors = TensorsOf(reading, dict);
  return out;
}

}  // namespace shardwright::checkpoints::reader
