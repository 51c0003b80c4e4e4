// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/safetensors/adapter_internal.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include <nlohmann/json.hpp>

#include "checkpoints/pickled/wrappers.h"
#include "support/base/text.h"
#include "support/json/json.h"

namespace shardwright::checkpoints::safetensors {
namespace {

constexpr std::string_view kPeftRoot = "base_model.model.";
constexpr std::string_view kSaved = "modules_to_save";

/// The components of the name of an adapter's tensor.
struct Parts {
  std::string module;   // the adapted module in the model: "base_model.model.layers.0.q_proj"
  std::string kind;     // "lora_A", "lora_magnitude_vector", "modules_to_save"
  std::string adapter;  // "default", or empty
};

std::optional<Parts> PartsOf(std::string_view name) {
  Parts parts;
  bool found = false;
  for (std::size_t at = 0; at <= name.size();) {
    const std::size_t dot = std::min(name.find('.', at), name.size());
    const std::string_view part = name.substr(at, dot - at);
    if (found) {
      if (part != "weight" && part != "bias") parts.adapter = part;
      return parts;
    }
    if (part.starts_with("lora_") || part == kSaved) {
      found = true;
      parts.kind = part;
      parts.module = name.substr(0, at == 0 ? 0 : at - 1);
    }
    at = dot + 1;
  }
  return found ? std::optional(std::move(parts)) : std::nullopt;
}

class Maker {
 public:
  Maker(const Checkpoint& source, const FilesLayout& layout, const std::vector<std::string>& names)
      : source_(source), layout_(layout), names_(names) {}

  Result<AdapterFolder> Make();

 private:
  bool TrainsMore() const;
  Status ChooseAdapter();
  Status NameTensors();
  void MakeConfig();
  void CheckConfig();
  std::string ModuleOf(std::size_t i) const;

  const Checkpoint& source_;
  const FilesLayout& layout_;
  const std::vector<std::string>& names_;
  std::vector<std::optional<Parts>> parts_;  // by index of the parameter
  std::string adapter_;
  std::map<std::string, std::uint64_t> ranks_;  // by adapted module
  AdapterFolder out_;
};

/// Returns true if a parameter outside of adapters is trained; only optimizer groups record this.
bool Maker::TrainsMore() const {
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const Param& param = source_.params[i];
    if (!parts_[i] && param.kind == ParamKind::kTrainable && param.group >= 0) return true;
  }
  return false;
}

Status Maker::ChooseAdapter() {
  std::set<std::string> adapters;
  for (const auto& parts : parts_) {
    if (parts) adapters.insert(parts->adapter);
  }
  const std::vector<std::string> all(adapters.begin(), adapters.end());
  if (!layout_.adapter.empty()) {
    adapter_ = layout_.adapter;
    if (adapters.contains(adapter_)) return {};
    return Fail(Errc::kUsage, "--adapter ", adapter_, ": the checkpoint has adapters ",
                Joined(all, ", "));
  }
  if (adapters.size() > 1) {
    return Fail(Errc::kUnsupported, "the checkpoint has several adapters: ", Joined(all, ", "),
                "; choose one with --adapter NAME, or write all tensors "
                "under their own names with --adapter all");
  }
  adapter_ = all.front();
  return {};
}

/// Returns the path of an adapted module in the model, in the form of PEFT's config.
std::string Maker::ModuleOf(std::size_t i) const {
  const std::string& module = parts_[i]->module;
  const std::size_t root = module.find(kPeftRoot);
  return root == std::string::npos ? module : module.substr(root + kPeftRoot.size());
}

Status Maker::NameTensors() {
  std::set<std::string> seen;
  std::size_t base = 0;
  for (std::uint32_t i = 0; i < parts_.size(); ++i) {
    const Param& param = source_.params[i];
    if (!parts_[i] || parts_[i]->adapter != adapter_) {
      base += param.kind != ParamKind::kBuffer && param.alias_of.empty() ? 1 : 0;
      continue;
    }
    if (!param.alias_of.empty()) continue;
    std::string name = PlainName(names_[i]);
    const std::size_t root = name.find(kPeftRoot);
    name = std::string(kPeftRoot) +
           (root == std::string::npos ? name : name.substr(root + kPeftRoot.size()));
    // PEFT omits the last part of these names.
    if (parts_[i]->kind == "lora_magnitude_vector" && name.ends_with(".weight")) {
      name.erase(name.rfind('.'));
    }
    if (!seen.insert(name).second) {
      return Fail(Errc::kBadInput, "two tensors of the adapter have the name ", Quoted(name),
                  "; --adapter all writes all tensors under their own names");
    }
    const bool first = parts_[i]->kind == "lora_A" || parts_[i]->kind == "lora_embedding_A";
    if (first && !param.shape.empty()) ranks_[ModuleOf(i)] = param.shape[0];
    out_.tensors.push_back({i, std::move(name)});
  }
  if (base > 0) {
    out_.not_carried.push_back(Plural(base, "tensor") +
                               " outside of the adapter: PEFT loads the base model separately; "
                               "--adapter all writes every tensor under its own name");
  }
  return {};
}

void Maker::MakeConfig() {
  std::map<std::uint64_t, std::size_t> counts;
  for (const auto& [module, rank] : ranks_) ++counts[rank];
  const auto most =
      std::max_element(counts.begin(), counts.end(),
                       [](const auto& a, const auto& b) { return a.second < b.second; });
  const std::uint64_t rank = most == counts.end() ? 0 : most->first;
  std::set<std::string> targets;
  std::set<std::string> saved;
  bool dora = false;
  bool bias = false;
  for (const AdapterFolder::Tensor& tensor : out_.tensors) {
    const Parts& parts = *parts_[tensor.param];
    const std::string module = ModuleOf(tensor.param);
    if (parts.kind == kSaved) {
      saved.insert(module.substr(module.rfind('.') + 1));
      continue;
    }
    targets.insert(module);
    dora = dora || parts.kind == "lora_magnitude_vector";
    bias = bias || (parts.kind == "lora_B" && tensor.name.ends_with(".bias"));
  }
  nlohmann::ordered_json config = {
      {"peft_type", "LORA"},
      {"task_type", nullptr},
      {"base_model_name_or_path", nullptr},
      {"inference_mode", true},
      {"r", rank},
      {"lora_alpha", layout_.lora_alpha > 0 ? layout_.lora_alpha : rank},
      {"lora_dropout", 0.0},
      {"bias", "none"},
      {"lora_bias", bias},
      {"use_dora", dora},
      {"fan_in_fan_out", false},
      {"target_modules", targets}};
  config["modules_to_save"] =
      saved.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(saved);
  config["rank_pattern"] = nlohmann::ordered_json::object();
  for (const auto& [module, other] : ranks_) {
    if (other != rank) config["rank_pattern"][module] = other;
  }
  out_.config = config.dump(2) + "\n";
  if (layout_.lora_alpha > 0) return;
  out_.not_carried.push_back(
      StrCat("lora_alpha, which is missing from the checkpoint, without an adapter_config.json "
             "next to it: the new ",
             kAdapterConfig, " has lora_alpha = r = ", rank,
             ", a scaling of 1; set another with --lora-alpha N"));
}

/// Compares the config that the trainer wrote with the tensors.
void Maker::CheckConfig() {
  const auto config = json::Parse(source_.adapter_config, std::string(kAdapterConfig));
  const json::Json* rank = config ? json::Find(*config, "r") : nullptr;
  if (rank == nullptr || !rank->is_number_unsigned()) {
    out_.notes.push_back(std::string(kAdapterConfig) +
                         " of the source is not understood; it is copied unchanged");
    return;
  }
  const bool any = std::any_of(ranks_.begin(), ranks_.end(), [&](const auto& one) {
    return one.second == rank->get<std::uint64_t>();
  });
  if (ranks_.empty() || any) return;
  out_.notes.push_back(StrCat(kAdapterConfig, " of the source has r = ", rank->dump(),
                              ", the adapter's tensors have ", ranks_.begin()->second,
                              ": it may belong to another adapter"));
}

Result<AdapterFolder> Maker::Make() {
  for (const std::string& name : names_) parts_.push_back(PartsOf(name));
  const bool lora = std::any_of(parts_.begin(), parts_.end(), [](const auto& parts) {
    return parts && parts->kind.starts_with("lora_");
  });
  if (!lora || layout_.adapter == kAllTensors) return std::move(out_);
  if (TrainsMore()) {
    out_.notes.emplace_back(
        "the checkpoint has a LoRA adapter and trains other parameters too: all tensors are "
        "written under their own names");
    return std::move(out_);
  }
  SW_TRY(ChooseAdapter());
  SW_TRY(NameTensors());
  if (source_.adapter_config.empty()) {
    MakeConfig();
  } else {
    CheckConfig();
    out_.config = source_.adapter_config;
  }
  out_.notes.push_back("a LoRA adapter: written as a folder that PEFT loads (" +
                       std::string(kAdapterFile) + ", " + std::string(kAdapterConfig) + ")");
  return std::move(out_);
}

}  // namespace

Result<AdapterFolder> MakeAdapterFolder(const Checkpoint& source, const FilesLayout& layout,
                                        const std::vector<std::string>& names) {
  return Maker(source, layout, names).Make();
}

}  // namespace shardwright::checkpoints::safetensors
