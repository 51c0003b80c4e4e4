// SPDX-License-Identifier: Apache-2.0
// Reads plans of other programs from text (docs/formats/plan.md).

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "placement/io/plan_file_internal.h"
#include "support/base/checked.h"
#include "support/base/limits.h"
#include "support/base/text.h"

namespace shardwright::placement {
namespace {

Status AddMatrixLayers(const Json& matrix, const std::string& where, PlanFile* plan) {
  if (!matrix.is_array() || matrix.empty() || matrix.size() > limits::kMoeLayers) {
    return Fail(Errc::kBadInput, where, ": a list of layers expected");
  }
  std::uint64_t layer = 0;
  for (const Json& row : matrix) {
    const std::string place = where + ": layer " + std::to_string(layer);
    SW_TRY_ASSIGN(auto slots, SlotsOf(row, place));
    SW_TRY(AddLayer(plan, layer++, std::move(slots), place));
  }
  return {};
}

/// Reads the subset of YAML in TensorRT-LLM's files: `key: value` at the top level, and below
/// initial_global_assignments `layer: [a, b]`, or `layer:` with one `- a` per line.
class TensorrtReader {
 public:
  TensorrtReader(std::string_view text, const std::string& where) : text_(text), where_(where) {}

  Result<PlanFile> Read() {
    plan_.format = "tensorrt-llm";
    while (!text_.empty()) {
      const std::string_view line = text_.substr(0, text_.find('\n'));
      text_.remove_prefix(std::min(text_.size(), line.size() + 1));
      ++line_;
      SW_TRY(Line(line.substr(0, line.find('#'))));
    }
    SW_TRY(EndLayer());
    if (in_list_) return Bad("the list does not end");
    if (plan_.slots.empty()) return Bad("initial_global_assignments is missing");
    SW_TRY(placement::Finish(&plan_, where_));
    if (num_slots_ && *num_slots_ != plan_.slots.front().size()) {
      return Bad(
          StrCat("num_slots is ", *num_slots_, ", layers list ", plan_.slots.front().size()));
    }
    return std::move(plan_);
  }

 private:
  tl::unexpected<Error> Bad(const std::string& what) const {
    return Fail(Errc::kBadInput, where_, ":", line_, ": ", what);
  }

  Status Line(std::string_view line) {
    const std::string_view body = Trimmed(line);
    if (body.empty() || body == "---") return {};
    if (in_list_) return Items(body);
    if (body.starts_with("- ") && layer_) return Item(Trimmed(body.substr(2)));
    SW_TRY(EndLayer());
    const std::size_t colon = body.find(':');
    if (colon == std::string_view::npos) {
      return Bad(StrCat("cannot read \"", body.substr(0, 40), "\""));
    }
    std::string_view key = Trimmed(body.substr(0, colon));
    if (key.size() > 1 && (key.front() == '"' || key.front() == '\'')) {
      key = key.substr(1, key.size() - 2);
    }
    const std::string_view value = Trimmed(body.substr(colon + 1));
    if (line.front() == ' ' || line.front() == '\t') return LayerLine(key, value);
    in_assignments_ = key == "initial_global_assignments";
    if (key == "num_slots") {
      num_slots_ = NumberIn<std::uint64_t>(value);
      if (!num_slots_) return Bad("num_slots: a whole number expected");
    }
    return {};
  }

  Status LayerLine(std::string_view key, std::string_view value) {
    if (!in_assignments_) return {};
    layer_ = NumberIn<std::uint64_t>(key);
    if (!layer_) return Bad(StrCat("a layer number expected, found \"", key, "\""));
    if (value.empty()) return {};
    if (value.front() != '[') return Bad("a list of experts expected");
    in_list_ = true;
    return Items(value.substr(1));
  }

  /// Reads the items of a list in brackets, which may span several lines.
  Status Items(std::string_view text) {
    while (true) {
      const std::size_t end = text.find_first_of(",]");
      const std::string_view item = Trimmed(text.substr(0, end));
      if (!item.empty()) SW_TRY(Item(item));
      if (end == std::string_view::npos) return {};
      if (text[end] == ']') {
        in_list_ = false;
        return EndLayer();
      }
      text.remove_prefix(end + 1);
    }
  }

  Status Item(std::string_view item) {
    const auto expert = NumberIn<std::uint64_t>(item);
    if (!expert || *expert >= limits::kMoeExperts) {
      return Bad(StrCat("the number of an expert expected, found \"", item.substr(0, 24), "\""));
    }
    if (slots_.size() >= limits::kMoeSlots) return Bad("too many slots");
    slots_.push_back(static_cast<std::int32_t>(*expert));
    return {};
  }

  Status EndLayer() {
    if (!layer_ || in_list_) return {};
    const std::uint64_t layer = *layer_;
    layer_.reset();
    return AddLayer(&plan_, layer, std::exchange(slots_, {}), where_ + ":" + std::to_string(line_));
  }

  std::string_view text_;
  const std::string where_;
  std::uint64_t line_ = 0;
  bool in_assignments_ = false;
  bool in_list_ = false;
  std::optional<std::uint64_t> layer_;
  std::optional<std::uint64_t> num_slots_;
  std::vector<std::int32_t> slots_;
  PlanFile plan_;
};

}  // namespace

Result<PlanFile> ParseMatrixPlan(const Json& root, const std::string& where) {
  PlanFile plan;
  plan.format = "vllm";
  plan.positions = true;
  SW_TRY(AddMatrixLayers(root, where, &plan));
  SW_TRY(Finish(&plan, where));
  return plan;
}

Result<PlanFile> ParseEplbPlan(const Json& root, const std::string& where) {
  PlanFile plan;
  plan.format = "eplb";
  plan.positions = true;
  SW_TRY(AddMatrixLayers(root["physical_to_logical"], where + ": physical_to_logical", &plan));
  const Json* counts = json::Find(root, "logical_count");
  if (counts != nullptr && counts->is_array() && !counts->empty() && (*counts)[0].is_array()) {
    if ((*counts)[0].size() > limits::kMoeExperts) {
      return Fail(Errc::kLimit, where, ": logical_count: too many experts");
    }
    plan.experts = static_cast<std::uint32_t>((*counts)[0].size());
  }
  SW_TRY(Finish(&plan, where));
  const Json* gpus = json::Find(root, "gpus");
  if (gpus == nullptr) return plan;
  const auto slots = static_cast<std::uint32_t>(plan.slots.front().size());
  SW_TRY_ASSIGN(const std::uint64_t gpu_count,
                json::WholeOf(*gpus, 1, limits::kMoeDevices, where + ": gpus"));
  std::uint64_t node_count = 1;
  if (const Json* nodes = json::Find(root, "nodes")) {
    SW_TRY_ASSIGN(node_count, json::WholeOf(*nodes, 1, limits::kMoeNodes, where + ": nodes"));
  }
  if (slots % gpu_count != 0 || gpu_count % node_count != 0) {
    return Fail(Errc::kBadInput, where, ": ", slots, " slots do not divide evenly among ",
                gpu_count, " gpus on ", node_count, " nodes");
  }
  const auto per_gpu = static_cast<std::uint32_t>(slots / gpu_count);
  plan.device_slots.assign(gpu_count, per_gpu);
  plan.cluster = UniformCluster(static_cast<std::uint32_t>(node_count),
                                static_cast<std::uint32_t>(gpu_count / node_count), per_gpu);
  return plan;
}

Result<PlanFile> ParseSglangPlan(const Json& root, const std::string& where) {
  PlanFile plan;
  plan.format = "sglang";
  const Json& map = root["physical_to_logical_map"];
  SW_TRY(AddMatrixLayers(map, where + ": physical_to_logical_map", &plan));
  SW_TRY(Finish(&plan, where));
  return plan;
}

Result<PlanFile> ParseVllmPlan(const Json& root, const std::string& where) {
  const Json* map = json::Find(root, "initial_global_assignments");
  if (root["record_type"] != "eplb_initial_mapping" || map == nullptr || !map->is_object()) {
    return Fail(Errc::kBadInput, where, ": record_type ", root["record_type"].dump(),
                ": eplb_initial_mapping with initial_global_assignments "
                "expected");
  }
  PlanFile plan;
  plan.format = "vllm";
  plan.positions = true;
  for (const auto& [name, row] : map->items()) {
    const auto layer = NumberIn<std::uint64_t>(name);
    std::string place = where;
    place.append(": layer ").append(name);
    if (!layer) return Fail(Errc::kBadInput, place.append(": a number expected"));
    SW_TRY_ASSIGN(auto slots, SlotsOf(row, place));
    SW_TRY(AddLayer(&plan, *layer, std::move(slots), place));
  }
  SW_TRY(Finish(&plan, where));
  const std::uint64_t slots = plan.slots.front().size();
  if (const Json* redundant = json::Find(root, "num_redundant_experts")) {
    SW_TRY_ASSIGN(const std::uint64_t count,
                  json::WholeOf(*redundant, 0, slots, where + ": num_redundant_experts"));
    if (slots - count < plan.experts || slots - count > limits::kMoeExperts) {
      return Fail(Errc::kBadInput, where, ": ", count, " redundant experts in ", slots,
                  " slots, but the plan has expert ", plan.experts - 1);
    }
    plan.experts = static_cast<std::uint32_t>(slots - count);
  }
  return plan;
}

Result<PlanFile> ParseAscendPlan(const Json& root, const std::string& where) {
  PlanFile plan;
  plan.format = "vllm-ascend";
  plan.positions = true;
  const Json& layers = root["layer_list"];
  if (!layers.is_array()) return Fail(Errc::kBadInput, where, ": layer_list: a list expected");
  for (const Json& layer : layers) {
    const Json* number = json::Find(layer, "layer_id");
    const Json* devices = json::Find(layer, "device_list");
    if (number == nullptr || devices == nullptr || !devices->is_array()) {
      return Fail(Errc::kBadInput, where, ": layer_list: layer_id and device_list expected");
    }
    SW_TRY_ASSIGN(const std::uint64_t id,
                  json::WholeOf(*number, 0, limits::kMoeLayers - 1, where + ": layer_id"));
    const std::string place = where + ": layer " + std::to_string(id);
    std::vector<std::int32_t> slots;
    std::vector<std::uint32_t> sizes;
    for (const Json& device : *devices) {
      const Json* experts = json::Find(device, "device_expert");
      if (experts == nullptr) return Fail(Errc::kBadInput, place, ": device_expert is missing");
      SW_TRY_ASSIGN(const auto held, SlotsOf(*experts, place));
      slots.insert(slots.end(), held.begin(), held.end());
      sizes.push_back(static_cast<std::uint32_t>(held.size()));
    }
    if (plan.slots.empty()) plan.device_slots = sizes;
    if (sizes != plan.device_slots) {
      return Fail(Errc::kBadInput, place, ": experts per device differ from the first layer");
    }
    SW_TRY(AddLayer(&plan, id, std::move(slots), place));
  }
  SW_TRY(Finish(&plan, where));
  return plan;
}

Result<PlanFile> ParseTensorrtPlan(std::string_view text, const std::string& where) {
  return TensorrtReader(text, where).Read();
}

}  // namespace shardwright::placement
