// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/dcp/dcp.h"

#include <algorithm>
#include <array>
#include <charconv>

#include <nlohmann/json.hpp>

#include "checkpoints/pickled/weight_sets.h"
#include "checkpoints/pickled/wrappers.h"
#include "support/base/checked.h"
#include "support/base/limits.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::dcp {
namespace {

Result<std::uint64_t> CountOf(std::string_view key, std::string_view value) {
  const auto count = NumberIn<std::uint64_t>(value);
  if (count && *count >= 1 && *count <= limits::kRanks) return *count;
  return Fail(Errc::kUsage, "target ", key, "=", value, ": a number from 1 to ", limits::kRanks,
              " expected");
}

template <std::size_t kCount>
Status CheckWord(std::string_view key, std::string_view value,
                 const std::array<std::string_view, kCount>& words) {
  if (std::find(words.begin(), words.end(), value) != words.end()) return {};
  std::vector<std::string> all(words.begin(), words.end());
  return Fail(Errc::kUsage, "target ", key, "=", value, ": ", Joined(all, ", "), " expected");
}

std::string_view Name(Flavour flavour) {
  return kFlavourWords[1 + static_cast<std::size_t>(flavour)];
}

/// Returns the flavour that --target requests; none: that of the source, or plain.
std::optional<Flavour> FlavourOf(const TargetSpec& spec) {
  const std::string* word = spec.Find("flavour");
  if (word == nullptr || *word == "source") return std::nullopt;
  const auto at = std::find(kFlavourWords.begin(), kFlavourWords.end(), *word);
  return static_cast<Flavour>(at - kFlavourWords.begin() - 1);
}

/// Fails if adapters have equal names without their own.
Status CheckAdapters(const Checkpoint& source) {
  std::unordered_map<std::string, const std::string*> seen;
  for (const Param& param : source.params) {
    const auto [other, fresh] = seen.emplace(PeftName(param.name), &param.name);
    if (fresh) continue;
    return Fail(Errc::kUnsupported, "flavour=transformers: ", Quoted(*other->second), " and ",
                Quoted(param.name), " are adapters of the same module, and a Trainer saves one; ",
                "--flavour accelerate writes both");
  }
  return {};
}

}  // namespace

Naming NamingOf(Flavour flavour) {
  Naming naming;
  if (flavour == Flavour::kPlain) return naming;
  naming.optimizer = {"optimizer"};
  naming.flat = flavour == Flavour::kTorchtitan;
  if (naming.flat) naming.model.clear();
  naming.pair = !naming.flat;
  naming.peft = flavour == Flavour::kTransformers;
  return naming;
}

std::vector<std::uint32_t> DcpState::Members() const {
  std::vector<std::uint32_t> all;
  for (const Extra& extra : extras) {
    for (const Extra::Value& value : extra.values) {
      all.insert(all.end(), value.members.begin(), value.members.end());
    }
  }
  return all;
}

std::vector<std::string> DcpState::Contents() const {
  std::vector<std::string> contents;
  for (const Extra& extra : extras) {
    const bool listed = extra.set && *extra.set < sets.size();
    std::string name =
        listed ? WeightSetText(sets[*extra.set]) : "item " + Quoted(extra.entry.name);
    if (std::find(contents.begin(), contents.end(), name) == contents.end()) {
      contents.push_back(std::move(name));
    }
  }
  return contents;
}

const std::string& DcpState::OptimizerName(const std::string& name) const {
  const auto found = optimizer_names.find(name);
  return found == optimizer_names.end() ? name : found->second;
}

std::string FolderLayout::Json() const {
  nlohmann::ordered_json json = {{"dp_shard", mesh.dp_shard},
                                 {"dp_replicate", mesh.dp_replicate},
                                 {"tp", mesh.tp},
                                 {"ep", mesh.ep},
                                 {"flavour", Name(flavour)},
                                 {"optimizer", naming.flat ? "flat" : "nested"}};
  if (files > 0) json["files"] = files;
  return json.dump();
}

Status CheckKey(std::string_view key, std::string_view value) {
  if (key == "flavour") return CheckWord(key, value, kFlavourWords);
  if (key == "optimizer") return CheckWord(key, value, kOptimizerWords);
  SW_TRY(CountOf(key, value));
  return {};
}

Result<Layout> Resolve(const TargetSpec& spec, const Checkpoint& source) {
  auto own = std::make_shared<FolderLayout>();
  if (const auto* before = dynamic_cast<const FolderLayout*>(source.layout.own.get())) {
    *own = *before;
  } else {
    own->mesh.dp_shard = std::max<std::uint64_t>(1, source.layout.mesh.dp());
    own->mesh.tp = std::max<std::uint64_t>(1, source.layout.mesh.tp);
  }
  const auto count = [&](std::string_view key, std::uint64_t* to) -> Status {
    const std::string* value = spec.Find(key);
    if (value == nullptr) return {};
    SW_TRY_ASSIGN(*to, CountOf(key, *value));
    return {};
  };
  SW_TRY(count("dp_shard", &own->mesh.dp_shard));
  SW_TRY(count("dp_replicate", &own->mesh.dp_replicate));
  SW_TRY(count("tp", &own->mesh.tp));
  SW_TRY(count("ep", &own->mesh.ep));
  SW_TRY(count("files", &own->files));
  if (const auto flavour = FlavourOf(spec)) {
    if (*flavour != own->flavour) own->naming = NamingOf(*flavour);
    own->flavour = *flavour;
  }
  if (own->naming.peft) SW_TRY(CheckAdapters(source));
  if (const std::string* form = spec.Find("optimizer"); form != nullptr && *form != "source") {
    own->naming.flat = *form == "flat";
  }
  const Mesh& mesh = own->mesh;
  if (mesh.dp_shard * mesh.tp % mesh.ep != 0) {
    return Fail(Errc::kInfeasible, "ep=", mesh.ep, ": does not divide dp_shard=", mesh.dp_shard,
                " x tp=", mesh.tp);
  }
  const std::uint64_t ranks = mesh.dp() * mesh.tp;
  if (ranks > limits::kRanks) {
    return Fail(Errc::kLimit, "target: at most ", limits::kRanks, " ranks supported, found ",
                ranks);
  }
  if (own->files > ranks) {
    return Fail(Errc::kInfeasible, "files=", own->files, ": more files than the ", ranks,
                " ranks that write them");
  }
  Layout layout;
  layout.mesh = own->mesh;
  layout.dtype = source.layout.dtype;
  layout.own = std::move(own);
  return layout;
}

bool HasRunningNames(const TargetSpec& spec, const Checkpoint& source) {
  const auto* before = dynamic_cast<const FolderLayout*>(source.layout.own.get());
  const Flavour flavour =
      FlavourOf(spec).value_or(before == nullptr ? Flavour::kPlain : before->flavour);
  if (before != nullptr && before->flavour == flavour) return false;
  return flavour == Flavour::kPlain || flavour == Flavour::kTorchtitan;
}

FileReaders Readers(const Layout& layout, std::span<const plan::OutputFile> files) {
  FileReaders readers;
  readers.ranks = layout.mesh.dp() * layout.mesh.tp;
  for (const plan::OutputFile& file : files) {
    std::vector<std::uint32_t>& ranks = readers.by_file.emplace_back();
    const std::string_view name =
        std::string_view(file.path).substr(file.path.rfind('/') + 1);  // such as "__3_0.distcp"
    std::uint32_t rank = 0;
    if (!name.starts_with("__")) continue;
    const auto end = std::from_chars(name.data() + 2, name.data() + name.size(), rank);
    if (end.ec == std::errc() && rank < readers.ranks) ranks.push_back(rank);
  }
  return readers;
}

std::span<const std::string_view> Sides(const TargetSpec& spec) {
  static constexpr std::array<std::string_view, 1> kTitan = {"torchtitan"};
  static constexpr std::array<std::string_view, 1> kHuggingFace = {"hf"};
  const std::string* flavour = spec.Find("flavour");
  if (flavour == nullptr) return {};
  if (*flavour == "torchtitan") return kTitan;
  if (*flavour == "accelerate" || *flavour == "transformers") return kHuggingFace;
  return {};
}

}  // namespace shardwright::checkpoints::dcp
