// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/dtensor/dtensor.h"

#include <algorithm>
#include <array>
#include <utility>

#include <nlohmann/json.hpp>

#include "checkpoints/dtensor/layout_internal.h"
#include "checkpoints/dtensor/names_internal.h"
#include "checkpoints/tp_rules/rule_source.h"
#include "support/base/checked.h"
#include "support/base/limits.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::dtensor {
namespace {

tl::unexpected<Error> BadValue(std::string_view key, std::string_view value,
                               std::string_view accepts) {
  return Fail(Errc::kUsage, "target ", key, "=", value, ": ", accepts, " expected");
}

Result<std::uint64_t> RanksOf(std::string_view key, std::string_view value) {
  const std::uint64_t count = NumberIn<std::uint64_t>(value).value_or(0);
  if (count > 0 && count <= limits::kRanks) return count;
  return BadValue(key, value, StrCat("a number from 1 to ", limits::kRanks));
}

/// Parses "4", or "2x2" for a mesh with two tensor-parallel dimensions.
Result<std::vector<std::uint64_t>> TpSizes(std::string_view value) {
  std::vector<std::uint64_t> sizes;
  std::uint64_t ranks = 1;
  for (std::string_view rest = value;;) {
    const std::size_t end = std::min(rest.find('x'), rest.size());
    const auto size = RanksOf("tp", rest.substr(0, end));
    if (!size || *size > limits::kRanks / ranks) {
      return BadValue("tp", value,
                      StrCat("a number of ranks, or several as in 2x2, of at most ", limits::kRanks,
                             " ranks in all"));
    }
    sizes.push_back(*size);
    ranks *= *size;
    if (end == rest.size()) return sizes;
    rest.remove_prefix(end + 1);
  }
}

std::uint64_t Product(const std::vector<std::uint64_t>& sizes) {
  std::uint64_t product = 1;
  for (const std::uint64_t size : sizes) product *= size;
  return product;
}

/// Splits "ddp:fsdp" into names.
std::vector<std::string> SplitNames(std::string_view value) {
  std::vector<std::string> names;
  while (true) {
    const std::size_t colon = std::min(value.find(':'), value.size());
    names.emplace_back(value.substr(0, colon));
    if (colon == value.size()) return names;
    value.remove_prefix(colon + 1);
  }
}

bool IsOneOfWords(std::span<const std::string_view> words, std::string_view value) {
  return std::find(words.begin(), words.end(), value) != words.end();
}

/// Returns the usual dimension names of a trainer. Accelerate does not name a single dimension.
std::optional<std::vector<std::string>> UsualNames(Trainer trainer,
                                                   const std::vector<Role>& roles) {
  const bool accelerate = trainer == Trainer::kAccelerate;
  if (accelerate && roles.size() == 1) return std::nullopt;
  const bool one_tp = std::count(roles.begin(), roles.end(), Role::kTensorParallel) == 1;
  std::vector<std::string> names;
  names.reserve(roles.size());
  std::size_t tp = 0;
  for (const Role role : roles) {
    names.emplace_back(role == Role::kReplicate ? (accelerate ? "dp_replicate" : "ddp")
                       : role == Role::kShard   ? (accelerate ? "dp_shard_cp" : "fsdp")
                       : one_tp                 ? "tp"
                                                : "tp" + std::to_string(tp++));
  }
  return names;
}

/// Sizes of mesh dimensions, by role.
using Sizes = std::array<std::uint64_t, 3>;

Sizes SizesOf(const FilesLayout& layout) {
  Sizes sizes = {1, 1, 1};
  for (std::size_t dim = 0; dim < layout.sizes.size(); ++dim) {
    sizes[static_cast<std::size_t>(layout.roles[dim])] *= layout.sizes[dim];
  }
  return sizes;
}

/// Returns names for the roles of `to` from the names in `from`, if it has all of them.
std::optional<std::vector<std::string>> NamesFrom(const FilesLayout& from,
                                                  const std::vector<Role>& roles) {
  std::vector<std::string> names;
  names.reserve(roles.size());
  std::array<std::size_t, 3> next = {0, 0, 0};  // by role: where to search
  for (const Role role : roles) {
    std::size_t& at = next[static_cast<std::size_t>(role)];
    while (at < from.roles.size() && from.roles[at] != role) ++at;
    if (at == from.roles.size()) return std::nullopt;
    names.push_back((*from.names)[at++]);
  }
  return names;
}

/// \param tp  sizes of the tensor-parallel dimensions
void ResolveMesh(const Sizes& sizes, const std::vector<std::uint64_t>& tp, const FilesLayout* from,
                 FilesLayout* to) {
  const bool same_tp = from != nullptr && (tp.size() == 1 || tp == from->tp_sizes());
  if (same_tp && SizesOf(*from) == sizes) {
    to->sizes = from->sizes;
    to->roles = from->roles;
    to->names = from->names;
    if (from->form == to->form) to->groups = from->groups;
    return;
  }
  for (const Role role : {Role::kReplicate, Role::kShard, Role::kTensorParallel}) {
    const std::uint64_t size = sizes[static_cast<std::size_t>(role)];
    if (size == 1 && role != Role::kShard) continue;
    const std::vector<std::uint64_t> dims =
        role == Role::kTensorParallel ? tp : std::vector<std::uint64_t>{size};
    to->sizes.insert(to->sizes.end(), dims.begin(), dims.end());
    to->roles.insert(to->roles.end(), dims.size(), role);
  }
  to->names = UsualNames(to->trainer, to->roles);
  if (from == nullptr || from->trainer != to->trainer) return;
  if (from->names) {
    if (auto names = NamesFrom(*from, to->roles)) to->names = std::move(names);
  } else if (from->roles.size() == to->roles.size()) {
    to->names.reset();
  }
}

Status ResolveNames(const TargetSpec& spec, FilesLayout* to) {
  const std::string* value = spec.Find("mesh_names");
  if (value == nullptr) return {};
  to->names.reset();
  if (*value == "none") return {};
  std::vector<std::string> names = SplitNames(*value);
  if (names.size() != to->sizes.size()) {
    return Fail(Errc::kUsage, "target mesh_names=", *value, ": the mesh ", ToString(to->sizes),
                " has ", Plural(to->sizes.size(), "dimension"));
  }
  to->names = std::move(names);
  return {};
}

Status ResolveVersion(const TargetSpec& spec, const FilesLayout* from, FilesLayout* to) {
  const bool verl = to->trainer == Trainer::kVerl;
  if (from != nullptr && verl) to->fsdp_version = from->fsdp_version;
  if (const std::string* version = spec.Find("fsdp_version")) {
    to->fsdp_version = *version == "1" ? 1 : 2;
  }
  if (to->fsdp_version == 2) return {};
  if (!verl) {
    return Fail(Errc::kUnsupported, "fsdp_version=1: requires trainer=verl");
  }
  const Sizes sizes = SizesOf(*to);
  if (sizes[static_cast<std::size_t>(Role::kTensorParallel)] > 1) {
    return Fail(Errc::kUnsupported, "fsdp_version=1: flat vectors require tp=1");
  }
  if (sizes[static_cast<std::size_t>(Role::kShard)] == 1) {
    return Fail(Errc::kUnsupported,
                "fsdp_version=1 with dp_shard=1: FSDP1 does not shard on one rank and then cannot "
                "load DTensors; use fsdp_version=2");
  }
  return {};
}

/// Returns the trainer that --target requests, that of the source, or Accelerate.
Trainer TrainerOf(const TargetSpec& spec, const Checkpoint& source) {
  const std::string* word = spec.Find("trainer");
  if (word != nullptr && *word != "source") {
    const auto* const at = std::find(kTrainerWords.begin(), kTrainerWords.end(), *word);
    return static_cast<Trainer>(at - kTrainerWords.begin() - 1);
  }
  const auto* from = dynamic_cast<const FilesLayout*>(source.layout.own.get());
  return from == nullptr ? Trainer::kAccelerate : from->trainer;
}

}  // namespace

std::uint64_t FilesLayout::ranks() const {
  std::uint64_t ranks = 1;
  for (const std::uint64_t size : sizes) ranks *= size;
  return ranks;
}

std::vector<std::uint64_t> FilesLayout::tp_sizes() const {
  std::vector<std::uint64_t> tp;
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    if (roles[dim] == Role::kTensorParallel) tp.push_back(sizes[dim]);
  }
  return tp;
}

std::string FilesLayout::Json() const {
  constexpr std::array<std::string_view, 3> kRoles = {"dp_replicate", "dp_shard", "tp"};
  nlohmann::ordered_json json = {{"trainer", kTrainerWords[static_cast<std::size_t>(trainer) + 1]},
                                 {"torch", form == MeshForm::kNew ? "2.15" : "2.9"},
                                 {"device", device}};
  const Sizes by_role = SizesOf(*this);
  for (const Role role : {Role::kReplicate, Role::kShard, Role::kTensorParallel}) {
    const auto at = static_cast<std::size_t>(role);
    if (by_role[at] > 1 || role == Role::kShard) json[std::string(kRoles[at])] = by_role[at];
  }
  if (const std::vector<std::uint64_t> tp = tp_sizes(); tp.size() > 1) {
    std::vector<std::string> axes;
    axes.reserve(tp.size());
    for (const std::uint64_t size : tp) axes.push_back(std::to_string(size));
    json["tp_axes"] = Joined(axes, "x");
  }
  json["mesh_names"] = names ? Joined(*names, ":") : "none";
  if (trainer == Trainer::kVerl) json["fsdp_version"] = fsdp_version;
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

std::vector<std::uint32_t> OwnFiles::Members() const {
  std::vector<std::uint32_t> all;
  for (const One& item : items) {
    for (const Passed& one : item.ranks) {
      all.insert(all.end(), one.members.begin(), one.members.end());
    }
  }
  return all;
}

std::vector<std::string> OwnFiles::Contents() const {
  std::vector<std::string> contents;
  for (const One& item : items) {
    contents.push_back(item.name == "extra_state" ? "schedule and random states (extra_state)"
                                                  : Quoted(item.name));
  }
  return contents;
}

Status CheckKey(std::string_view key, std::string_view value) {
  if (key == "mesh_names") {
    const std::vector<std::string> names = SplitNames(value);
    const bool empty = std::any_of(names.begin(), names.end(),
                                   [](const std::string& name) { return name.empty(); });
    if (empty) return BadValue(key, value, "names separated by :, or none");
  } else if (key == "device") {
    if (value.empty()) return BadValue(key, value, "a device type, such as cuda");
  } else if (key == "fsdp_version") {
    if (value != "1" && value != "2") return BadValue(key, value, "1 or 2");
  } else if (key == "trainer") {
    if (!IsOneOfWords(kTrainerWords, value)) {
      return BadValue(key, value, "source, verl, accelerate or torch_checkpointing");
    }
  } else if (key == "torch") {
    if (!IsOneOfWords(kTorchWords, value)) return BadValue(key, value, "source, 2.15, 2.9 or 2.6");
  } else if (key == "tp") {
    SW_TRY(TpSizes(value));
  } else {
    SW_TRY(RanksOf(key, value));
  }
  return {};
}

bool HasRunningNames(const TargetSpec& spec, const Checkpoint& source) {
  const auto* from = dynamic_cast<const FilesLayout*>(source.layout.own.get());
  const Trainer trainer = TrainerOf(spec, source);
  return trainer != Trainer::kAccelerate && (from == nullptr || from->trainer != trainer);
}

Result<Layout> Resolve(const TargetSpec& spec, const Checkpoint& source) {
  const auto* from = dynamic_cast<const FilesLayout*>(source.layout.own.get());
  auto to = std::make_shared<FilesLayout>();
  if (from != nullptr) {
    to->form = from->form;
    to->device = from->device;
    to->blocks = from->blocks;
    to->splits = from->splits;
    to->listed = from->listed;
    to->optimizer_names = from->optimizer_names;
  } else {
    to->optimizer_names = source.running_names;
  }
  to->trainer = TrainerOf(spec, source);
  if (const std::string* torch = spec.Find("torch"); torch != nullptr && *torch != "source") {
    to->form = *torch == "2.15" ? MeshForm::kNew : MeshForm::kOld;
  }
  if (const std::string* device = spec.Find("device")) to->device = *device;
  Layout layout;
  Mesh& mesh = layout.mesh;
  mesh.dp_replicate = source.layout.mesh.dp_replicate;
  mesh.dp_shard = source.layout.mesh.dp_shard;
  mesh.tp = source.layout.mesh.tp;
  for (const auto& [key, size] :
       {std::pair("dp_replicate", &mesh.dp_replicate), std::pair("dp_shard", &mesh.dp_shard)}) {
    if (const std::string* value = spec.Find(key)) {
      SW_TRY_ASSIGN(*size, RanksOf(key, *value));
    }
  }
  std::vector<std::uint64_t> tp = {mesh.tp};
  if (const std::string* value = spec.Find("tp")) {
    SW_TRY_ASSIGN(tp, TpSizes(*value));
    mesh.tp = Product(tp);
  } else if (from != nullptr && mesh.tp > 1) {
    tp = from->tp_sizes();
  }
  if (mesh.dp_replicate > limits::kRanks / mesh.dp_shard || mesh.dp() > limits::kRanks / mesh.tp) {
    return Fail(Errc::kLimit, "target: more than ", limits::kRanks, " ranks");
  }
  ResolveMesh({mesh.dp_replicate, mesh.dp_shard, mesh.tp}, tp, from, to.get());
  SW_TRY(ResolveNames(spec, to.get()));
  SW_TRY(ResolveVersion(spec, from, to.get()));
  const bool kept = from != nullptr && from->trainer == to->trainer;
  to->model_item = kept                                  ? from->model_item
                   : to->trainer == Trainer::kAccelerate ? "pytorch_model_fsdp_0"
                                                         : "model";
  to->optimizer_item = kept && !from->optimizer_item.empty() ? from->optimizer_item
                       : to->trainer == Trainer::kVerl       ? "optim"
                       : to->trainer == Trainer::kAccelerate ? "optimizer_0"
                                                             : "optimizer";
  layout.dtype = source.layout.dtype;
  layout.ranks = to->ranks();
  layout.own = std::move(to);
  return layout;
}

FileReaders Readers(const Layout& layout, std::span<const plan::OutputFile> files) {
  FileReaders readers;
  readers.ranks = *layout.ranks;
  for (const plan::OutputFile& file : files) {
    std::vector<std::uint32_t>& ranks = readers.by_file.emplace_back();
    const auto name = ParseRankFile(std::string_view(file.path).substr(file.path.rfind('/') + 1));
    if (name && name->rank < readers.ranks) ranks.push_back(static_cast<std::uint32_t>(name->rank));
  }
  return readers;
}

std::span<const std::string_view> Sides(const TargetSpec& spec) {
  static constexpr std::array<std::string_view, 1> kSides = {"hf"};
  const std::string* trainer = spec.Find("trainer");
  if (trainer != nullptr && (*trainer == "verl" || *trainer == "accelerate")) return kSides;
  return {};
}

}  // namespace shardwright::checkpoints::dtensor
