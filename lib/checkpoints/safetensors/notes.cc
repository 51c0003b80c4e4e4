// SPDX-License-Identifier: Apache-2.0
#include <limits>

#include "checkpoints/safetensors/notes_internal.h"
#include "engine/layout/states.h"
#include "support/base/crc32.h"
#include "support/base/limits.h"
#include "support/json/json.h"

namespace shardwright::checkpoints::safetensors {
namespace {

using json::Json;

constexpr std::uint64_t kVersion = 1;
constexpr std::uint64_t kMostPlace = std::numeric_limits<std::uint32_t>::max();

/// Returns a checksum of names, which detects that a file's tensors have changed.
std::uint32_t NamesCrc(std::span<const std::string* const> names) {
  std::string all;
  for (const std::string* name : names) all += *name + '\0';
  return Crc32(std::as_bytes(std::span(all)));
}

Json HyperJson(const GroupNote& group) {
  Json json = Json::object();
  const HyperParams& hyper = group.hyper;
  if (hyper.lr) json["lr"] = *hyper.lr;
  if (hyper.betas) json["betas"] = {hyper.betas->first, hyper.betas->second};
  if (hyper.eps) json["eps"] = *hyper.eps;
  if (hyper.weight_decay) json["weight_decay"] = *hyper.weight_decay;
  if (hyper.momentum) json["momentum"] = *hyper.momentum;
  if (group.moe) json["moe"] = true;
  return json;
}

tl::unexpected<Error> Wrong(std::string_view key) {
  return Fail(Errc::kBadInput, "notes: \"", key, "\": invalid value");
}

std::optional<double> RealOf(const Json& object, const char* key) {
  const Json* value = json::Find(object, key);
  return value != nullptr && value->is_number() ? std::optional(value->get<double>())
                                                : std::nullopt;
}

std::string TextOf(const Json& object, const char* key) {
  const Json* value = json::Find(object, key);
  return value != nullptr && value->is_string() ? value->get<std::string>() : "";
}

Result<std::uint64_t> CountOf(const Json* value, std::uint64_t most, std::string_view key) {
  if (value == nullptr || !value->is_number_unsigned() || value->get<std::uint64_t>() > most) {
    return Wrong(key);
  }
  return value->get<std::uint64_t>();
}

GroupNote GroupOf(const Json& json) {
  GroupNote group;
  group.hyper.lr = RealOf(json, "lr");
  group.hyper.eps = RealOf(json, "eps");
  group.hyper.weight_decay = RealOf(json, "weight_decay");
  group.hyper.momentum = RealOf(json, "momentum");
  const Json* betas = json::Find(json, "betas");
  if (betas != nullptr && betas->is_array() && betas->size() == 2 && (*betas)[0].is_number() &&
      (*betas)[1].is_number()) {
    group.hyper.betas = {(*betas)[0].get<double>(), (*betas)[1].get<double>()};
  }
  const Json* moe = json::Find(json, "moe");
  group.moe = moe != nullptr && moe->is_boolean() && moe->get<bool>();
  return group;
}

Status ReadTensors(const Json& root, std::size_t count, Notes* notes) {
  const Json* places = json::Find(root, "places");
  const Json* groups = json::Find(root, "groups");
  const auto is_list = [&](const Json* list) {
    return list != nullptr && list->is_array() && list->size() == count;
  };
  if (!is_list(places)) return Wrong("places");
  if (!is_list(groups)) return Wrong("groups");
  const auto most = static_cast<std::int64_t>(notes->groups.size());
  for (std::size_t i = 0; i < count; ++i) {
    TensorNote note;
    SW_TRY_ASSIGN(note.place, CountOf(&(*places)[i], kMostPlace, "places"));
    if (!(*groups)[i].is_number_integer()) return Wrong("groups");
    note.group = (*groups)[i].get<std::int64_t>();
    if (note.group < TensorNote::kBuffer || note.group >= most) return Wrong("groups");
    notes->tensors.push_back(note);
  }
  return {};
}

Status ReadNamed(const Json& root, Notes* notes) {
  const Json* tied = json::Find(root, "tied");
  if (tied == nullptr || !tied->is_object()) return Wrong("tied");
  for (const auto& [name, value] : tied->items()) {
    if (!value.is_array() || value.size() != 2 || !value[0].is_string()) return Wrong("tied");
    TieNote tie{value[0].get<std::string>(), 0};
    SW_TRY_ASSIGN(tie.place, CountOf(&value[1], kMostPlace, "tied"));
    notes->tied.emplace(name, std::move(tie));
  }
  const Json* experts = json::Find(root, "experts");
  if (experts == nullptr || !experts->is_object()) return Wrong("experts");
  for (const auto& [name, value] : experts->items()) {
    if (!value.is_array() || value.size() != 3 || !value[2].is_string()) return Wrong("experts");
    ExpertId expert;
    SW_TRY_ASSIGN(const std::uint64_t layer, CountOf(&value[0], limits::kMoeLayers, "experts"));
    SW_TRY_ASSIGN(const std::uint64_t number, CountOf(&value[1], limits::kMoeExperts, "experts"));
    expert.layer = static_cast<std::uint32_t>(layer);
    expert.expert = static_cast<std::uint32_t>(number);
    expert.module = value[2].get<std::string>();
    notes->experts.emplace(name, std::move(expert));
  }
  return {};
}

}  // namespace

std::string NotesText(const Notes& notes, std::span<const std::string* const> names) {
  Json root = {{"version", kVersion}, {"names", NamesCrc(names)}, {"state", notes.state}};
  Json& places = root["places"] = Json::array();
  Json& groups = root["groups"] = Json::array();
  for (const TensorNote& note : notes.tensors) {
    places.push_back(note.place);
    groups.push_back(note.group);
  }
  Json& tied = root["tied"] = Json::object();
  for (const auto& [name, tie] : notes.tied) tied[name] = {tie.holder, tie.place};
  Json& experts = root["experts"] = Json::object();
  for (const auto& [name, expert] : notes.experts) {
    experts[name] = {expert.layer, expert.expert, expert.module};
  }
  Json& hyper = root["hyper"] = Json::array();
  for (const GroupNote& group : notes.groups) hyper.push_back(HyperJson(group));
  if (notes.dtype) root["dtype"] = Name(*notes.dtype);
  if (!notes.optimizer.empty()) root["optimizer"] = notes.optimizer;
  if (notes.iteration) root["iteration"] = *notes.iteration;
  if (notes.consumed_samples) root["consumed_samples"] = *notes.consumed_samples;
  return root.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Result<Notes> ParseNotes(std::string_view text, std::span<const std::string* const> names) {
  SW_TRY_ASSIGN(const Json root, json::Parse(text, "notes"));
  SW_TRY_ASSIGN(const std::uint64_t version,
                CountOf(json::Find(root, "version"), kMostPlace, "version"));
  if (version != kVersion) return Wrong("version");
  SW_TRY_ASSIGN(const std::uint64_t crc, CountOf(json::Find(root, "names"), kMostPlace, "names"));
  if (crc != NamesCrc(names)) {
    return Fail(Errc::kBadInput, "notes: they describe other tensors than the file has");
  }
  Notes notes;
  notes.state = TextOf(root, "state");
  if (notes.state != layout::kWeight && notes.state != layout::kMaster) return Wrong("state");
  if (const std::string dtype = TextOf(root, "dtype"); !dtype.empty()) {
    notes.dtype = DTypeFromName(dtype);
    if (!notes.dtype || !IsFloating(*notes.dtype)) return Wrong("dtype");
  }
  const Json* hyper = json::Find(root, "hyper");
  if (hyper == nullptr || !hyper->is_array()) return Wrong("hyper");
  for (const Json& group : *hyper) notes.groups.push_back(GroupOf(group));
  SW_TRY(ReadTensors(root, names.size(), &notes));
  SW_TRY(ReadNamed(root, &notes));
  notes.optimizer = TextOf(root, "optimizer");
  if (const Json* iteration = json::Find(root, "iteration")) {
    SW_TRY_ASSIGN(notes.iteration, CountOf(iteration, kMostPlace << 31, "iteration"));
  }
  if (const Json* samples = json::Find(root, "consumed_samples")) {
    SW_TRY_ASSIGN(notes.consumed_samples, CountOf(samples, kMostPlace << 31, "consumed_samples"));
  }
  return notes;
}

}  // namespace shardwright::checkpoints::safetensors
