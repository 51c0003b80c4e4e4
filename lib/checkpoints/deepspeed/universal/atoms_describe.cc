// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <nlohmann/json.hpp>

#include "checkpoints/deepspeed/universal/atoms_internal.h"
#include "support/base/text.h"

namespace shardwright::checkpoints {
namespace {

using OrderedJson = nlohmann::ordered_json;
using layout::Split;

std::string_view KindName(ParamKind kind) {
  switch (kind) {
    case ParamKind::kTrainable:
      return "trainable";
    case ParamKind::kFrozen:
      return "frozen";
    case ParamKind::kBuffer:
      break;
  }
  return "buffer";
}

std::string_view SplitName(Split split) {
  switch (split) {
    case Split::kReplicated:
      return "replicated";
    case Split::kAverage:
      return "average";
    case Split::kDim:
      return "dim";
    case Split::kSub:
      return "sub";
    case Split::kMesh:
      return "mesh";
    case Split::kListed:
      return "listed";
    case Split::kUnknown:
      break;
  }
  return "unknown";
}

OrderedJson CutJson(const layout::Cut& cut) {
  OrderedJson boxes = OrderedJson::array();
  for (const layout::Box& box : cut.boxes()) {
    boxes.push_back({{"at_view", box.at_view}, {"at_shard", box.at_shard}, {"sizes", box.sizes}});
  }
  return {{"view", cut.view()}, {"shard", cut.shard()}, {"boxes", std::move(boxes)}};
}

OrderedJson RuleJson(const layout::SplitRule& rule) {
  OrderedJson out = {{"split", SplitName(rule.split)}};
  if (rule.split == Split::kDim || rule.split == Split::kSub) out["dim"] = rule.dim;
  if (!rule.view.empty()) out["view"] = rule.view;
  if (!rule.sub_sizes.empty()) out["sizes"] = rule.sub_sizes;
  if (!rule.widths.empty()) out["widths"] = rule.widths;
  if (!rule.granule.empty()) out["granule"] = rule.granule;
  if (rule.uneven) out["uneven"] = true;
  if (rule.padded) out["padded"] = true;
  if (rule.axis_ranks != 0) out["ranks"] = rule.axis_ranks;
  for (const layout::SplitRule& axis : rule.axes) out["axes"].push_back(RuleJson(axis));
  for (const layout::Cut& cut : rule.cuts) out["cuts"].push_back(CutJson(cut));
  if (!rule.origin.empty()) out["origin"] = rule.origin;
  return out;
}

Result<OrderedJson> ScalarJson(const Scalar& scalar) {
  OrderedJson out = {{"state", scalar.state}};
  if (scalar.is_tensor) {
    out["dtype"] = Name(scalar.dtype);
    out["shape"] = scalar.shape;
    out["bytes"] = Hex(std::as_bytes(std::span(scalar.bytes)));
    return out;
  }
  const pickle::Node* value = scalar.value;
  if (value == nullptr || value->is_none()) {
    out["none"] = true;
  } else if (value->kind == pickle::Kind::kInt) {
    out["int"] = value->integer;
  } else if (value->kind == pickle::Kind::kBool) {
    out["bool"] = value->integer != 0;
  } else if (value->kind == pickle::Kind::kFloat) {
    // Writes the bits as 16 hexadecimal digits, because JSON has no infinities and NaN.
    const auto bits = std::bit_cast<std::uint64_t>(value->real);
    std::string bytes;
    for (int shift = 56; shift >= 0; shift -= 8) bytes += static_cast<char>(bits >> shift & 255);
    out["float"] = Hex(std::as_bytes(std::span(bytes)));
  } else {
    return Fail(Errc::kUnsupported, "optimizer state \"", scalar.state,
                "\": tensor, number, bool or None expected, found ", pickle::Describe(value));
  }
  return out;
}

Result<OrderedJson> ParamJson(const Param& param) {
  OrderedJson out = {{"name", param.name},
                     {"kind", KindName(param.kind)},
                     {"shape", param.shape},
                     {"dtype", Name(param.dtype)}};
  if (!param.alias_of.empty()) out["alias_of"] = param.alias_of;
  if (!param.left_out_holder.empty()) out["left_out_holder"] = param.left_out_holder;
  if (param.entry) out["entry"] = true;
  if (param.undecided) out["undecided"] = true;
  if (param.frozen_later) out["frozen_later"] = true;
  out["rule"] = RuleJson(param.rule);
  if (param.group >= 0) out["group"] = param.group;
  if (param.layer) out["layer"] = *param.layer;
  if (!param.tied_layers.empty()) out["tied_layers"] = param.tied_layers;
  if (param.expert) {
    out["expert"] = {{"layer", param.expert->layer}, {"expert", param.expert->expert}};
  }
  if (!param.scalars.empty()) out["scalars"] = OrderedJson::array();
  for (const Scalar& scalar : param.scalars) {
    Result<OrderedJson> mine = ScalarJson(scalar);
    if (!mine) return Within("\"" + param.name + "\"", mine.error());
    out["scalars"].push_back(*std::move(mine));
  }
  return out;
}

OrderedJson TopologyJson(const Topology& topology) {
  return {{"zero", topology.zero},
          {"dp", topology.dp},
          {"tp", topology.tp},
          {"pp", topology.pp},
          {"ep", topology.ep},
          {"dtype", Name(topology.dtype)},
          {"bf16_optimizer", topology.bf16_optimizer},
          {"sub_group", topology.sub_group},
          {"round_robin", topology.round_robin},
          {"pipeline", topology.pipeline},
          {"stages", topology.stages}};
}

}  // namespace

Result<std::string> DescribeAtoms(const Checkpoint& checkpoint, const Topology& topology,
                                  std::span<const std::vector<std::string>> atoms) {
  SW_CHECK(atoms.size() == checkpoint.params.size());
  // The text has one line for each parameter and group.
  std::string text = R"({"format": "shardwright atoms", "version": 1,)";
  try {
    text += "\n \"topology\": " + TopologyJson(topology).dump() +
            ",\n \"states\": " + OrderedJson(checkpoint.states).dump();
    if (checkpoint.frozen_unknown) text += R"(, "frozen_unknown": true)";
    if (!checkpoint.order_unknown.empty()) {
      text += ", \"order_unknown\": " + OrderedJson(checkpoint.order_unknown).dump();
    }
    if (!checkpoint.own_values.empty()) {
      text += ", \"own_values\": " + OrderedJson(checkpoint.own_values).dump();
    }
    text += ",\n \"params\": [";
    for (std::size_t i = 0; i < checkpoint.params.size(); ++i) {
      SW_TRY_ASSIGN(OrderedJson mine, ParamJson(checkpoint.params[i]));
      if (!atoms[i].empty()) mine["atoms"] = atoms[i];
      text += (i == 0 ? "\n  " : ",\n  ") + mine.dump();
    }
    text += "\n ],\n \"groups\": [";
    for (std::size_t i = 0; i < checkpoint.groups.size(); ++i) {
      const Group& group = checkpoint.groups[i];
      text += (i == 0 ? "\n  " : ",\n  ") +
              OrderedJson({{"moe", group.moe}, {"params", group.params}}).dump();
    }
  } catch (const OrderedJson::exception& error) {
    return Fail(Errc::kBadInput, "a name that is not UTF-8: ", error.what());
  }
  return text + "\n ]\n}\n";
}

}  // namespace shardwright::checkpoints
