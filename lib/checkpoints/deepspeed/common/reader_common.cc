// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/deepspeed/common/reader_common.h"

#include "engine/layout/states.h"
#include "engine/tensor/shape.h"

namespace shardwright::checkpoints::reader {

const Node* FindPath(const Node* dict, std::initializer_list<std::string_view> keys) {
  const Node* node = dict;
  for (const std::string_view key : keys) {
    if (node == nullptr || !node->is_dict()) return nullptr;
    node = node->Find(key);
  }
  return node;
}

Result<std::uint64_t> StageOf(const Node* node) {
  if (node->kind == pickle::Kind::kObject && node->args != nullptr) {
    // ZeroStageEnum(2), or getattr(ZeroStageEnum, "gradients").
    const std::vector<const Node*>& args = node->args->items;
    if (args.size() == 1) return pickle::AsCount(args[0]);
    if (args.size() == 2 && args[1]->is_string()) {
      constexpr std::string_view kStages[] = {"disabled", "optimizer_states", "gradients",
                                              "weights"};
      for (std::uint64_t stage = 0; stage < std::size(kStages); ++stage) {
        if (args[1]->text == kStages[stage]) return stage;
      }
    }
    return Fail(Errc::kBadInput, "unknown ZeRO stage ", pickle::Describe(node));
  }
  return pickle::AsCount(node);
}

Result<std::vector<NamedShape>> ShapesOf(const Node* dict) {
  if (dict == nullptr || !dict->is_dict()) {
    return Fail(Errc::kBadInput, "dict of shapes expected, found ", pickle::Describe(dict));
  }
  std::vector<NamedShape> out;
  out.reserve(dict->entry_count());
  for (std::size_t i = 0; i < dict->entry_count(); ++i) {
    SW_TRY_ASSIGN(const std::string_view name, pickle::AsString(dict->key(i)));
    auto shape = pickle::AsShape(dict->value(i));
    if (!shape) return Within("shape of \"" + std::string(name) + "\"", std::move(shape).error());
    auto elems = CountElems(*shape);
    if (!elems) return Within("shape of \"" + std::string(name) + "\"", std::move(elems).error());
    out.push_back({std::string(name), *std::move(shape), *elems});
  }
  return out;
}

std::string ModelFileName(bool zero3, std::uint64_t rank, std::uint64_t mp) {
  const std::string zero = zero3 ? "zero_pp_rank_" + std::to_string(rank) + "_" : "";
  return zero + "mp_rank_" + (mp < 10 ? "0" : "") + std::to_string(mp) + "_model_states.pt";
}

tl::unexpected<Error> Missing(const EngineReading& reading, const std::vector<std::string>& names) {
  std::string text = reading.source.tag + ": " + std::to_string(names.size()) +
                     (names.size() == 1 ? " file is missing: " : " files are missing: ");
  for (std::size_t i = 0; i < names.size(); ++i) text += (i == 0 ? "" : ", ") + names[i];
  return Fail(Errc::kNotFound, text);
}

Result<Document> Open(const EngineReading& reading, std::uint32_t file) {
  auto document = torch_pt::Parse(*reading.source.files[file].containers.front().metadata);
  if (!document) return Within(reading.source.files[file].path, std::move(document).error());
  if (document->root->is_string()) {
    return Fail(Errc::kUnsupported, reading.source.files[file].path,
                ": contains a string instead of a checkpoint (Nebula stores its data elsewhere)");
  }
  if (!document->root->is_dict()) {
    return Fail(Errc::kBadInput, reading.source.files[file].path, ": dict expected, found ",
                pickle::Describe(document->root));
  }
  return document;
}

bool IsNumber(const Shape& shape) { return shape.empty() || (shape.size() == 1 && shape[0] == 1); }

bool IsPlainValue(const pickle::Node& node) {
  switch (node.kind) {
    case pickle::Kind::kNone:
    case pickle::Kind::kBool:
    case pickle::Kind::kInt:
    case pickle::Kind::kLong:
    case pickle::Kind::kFloat:
    case pickle::Kind::kString:
      return true;
    default:
      return false;
  }
}

Result<std::optional<Scalar>> ScalarOf(EngineReading* reading, std::uint32_t file,
                                       const Document& document, std::string_view state,
                                       const Node* node, const Shape& shape) {
  Scalar out;
  out.state = state;
  const std::string what = "optimizer state \"" + out.state + "\"";
  if (node->is_tensor()) {
    const Shape& own = node->tensor->shape;
    // A one-element parameter has moments of one element. A step is never a moment.
    if (!IsNumber(own) || (own == shape && state != layout::kStep)) return std::optional<Scalar>();
    out.is_tensor = true;
    out.dtype = node->tensor->dtype;
    out.shape = own;
    SW_TRY_ASSIGN(out.bytes, reading->map.Payload(file, document, node, what));
    return std::optional<Scalar>(std::move(out));
  }
  if (!IsPlainValue(*node)) {
    return Fail(Errc::kUnsupported, reading->file_name(file), ": ", what,
                ": tensor or number expected, found ", pickle::Describe(node));
  }
  out.value = node;
  return std::optional<Scalar>(std::move(out));
}

namespace {

using Names = std::unordered_map<std::string, std::string>;

/// Returns pairs of a name and the name that has its data, in the file's order.
Result<std::vector<std::pair<std::string, std::string>>> PairsOf(
    const Node* root, const std::function<bool(const std::string&)>& trainable) {
  std::vector<std::pair<std::string, std::string>> out;
  const Node* shared = root->Find("shared_params");
  if (shared == nullptr || !shared->is_dict()) return out;
  for (std::size_t i = 0; i < shared->entry_count(); ++i) {
    SW_TRY_ASSIGN(const std::string_view alias, pickle::AsString(shared->key(i)));
    SW_TRY_ASSIGN(const std::string_view holder, pickle::AsString(shared->value(i)));
    // The name that the optimizer knows has the data.
    const bool swapped = trainable(std::string(alias)) && !trainable(std::string(holder));
    out.emplace_back(swapped ? holder : alias, swapped ? alias : holder);
  }
  return out;
}

/// Maps names with data that are neither in the module nor trained to their first other name.
Names HeirsOf(const Node* module, const Names& holders,
              const std::function<bool(const std::string&)>& trainable) {
  Names heirs;
  for (std::size_t i = 0; i < module->entry_count(); ++i) {
    if (!module->key(i)->is_string()) continue;
    const auto tie = holders.find(module->key(i)->text);
    if (tie == holders.end() || trainable(tie->second)) continue;
    if (module->Find(tie->second) == nullptr) heirs.try_emplace(tie->second, tie->first);
  }
  return heirs;
}

}  // namespace

Result<Ties> TiesOf(const Node* root, const Node* module,
                    const std::function<bool(const std::string&)>& trainable, bool lists_frozen) {
  Ties out;
  SW_TRY_ASSIGN(out.aliases, PairsOf(root, trainable));
  if (out.aliases.empty() || module == nullptr || lists_frozen) return out;
  const Names heirs = HeirsOf(module, Names(out.aliases.begin(), out.aliases.end()), trainable);
  std::vector<std::pair<std::string, std::string>> kept;
  for (auto& [alias, holder] : out.aliases) {
    const auto heir = heirs.find(holder);
    if (heir != heirs.end()) out.left_out.emplace(alias, holder);
    if (heir != heirs.end() && heir->second == alias) continue;
    kept.emplace_back(alias, heir == heirs.end() ? holder : heir->second);
  }
  out.aliases = std::move(kept);
  return out;
}

std::string LeftOutToo(const std::string& file, const std::string& name) {
  return file + ": \"" + name +
         "\" is an alias of a frozen parameter that the save left out; no file contains its data, "
         "so the alias is left out too";
}

std::unordered_map<std::string, std::string> TiedPlaceholders(
    const Node* module, const std::function<bool(const std::string&)>& partitioned) {
  struct Holder {
    std::string name;
    std::size_t count = 0;
  };
  std::unordered_map<std::uint32_t, Holder> holders;  // by storage
  std::vector<std::pair<std::string, std::uint32_t>> others;
  for (std::size_t i = 0; i < module->entry_count(); ++i) {
    const Node* node = module->value(i);
    if (!module->key(i)->is_string() || !node->is_tensor()) continue;
    if (node->tensor->shape != Shape{0}) continue;
    const std::string& name = module->key(i)->text;
    if (!partitioned(name)) {
      others.emplace_back(name, node->tensor->storage);
    } else if (Holder& holder = holders[node->tensor->storage]; holder.count++ == 0) {
      holder.name = name;
    }
  }
  std::unordered_map<std::string, std::string> out;
  for (const auto& [name, storage] : others) {
    const auto at = holders.find(storage);
    if (at != holders.end() && at->second.count == 1) out.emplace(name, at->second.name);
  }
  return out;
}

}  // namespace shardwright::checkpoints::reader
