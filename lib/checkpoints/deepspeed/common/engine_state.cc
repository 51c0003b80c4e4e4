// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/deepspeed/common/engine_state.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>

#include "checkpoints/deepspeed/common/flat.h"
#include "checkpoints/pickled/hyper.h"
#include "support/base/text.h"

namespace shardwright::checkpoints {
namespace {

using pickle::Node;

/// Keys of a model file that every engine writes, even without a value.
constexpr std::array<std::string_view, 8> kEngineKeys = {"global_steps",
                                                         "global_samples",
                                                         "skipped_steps",
                                                         "ds_config",
                                                         "num_experts",
                                                         "csr_tensor_module_names",
                                                         "sparse_tensor_module_names",
                                                         "data_sampler"};

Result<std::uint64_t> IterationOf(const EngineState& state, const std::string& tag) {
  std::optional<std::uint64_t> found;
  for (const Passed& passed : state.model_states) {
    const Node* root = passed.document.root;
    const Node* steps = root == nullptr ? nullptr : root->Find("global_steps");
    if (steps == nullptr) continue;
    Result<std::uint64_t> count = pickle::AsCount(steps);
    if (!count) return Within(tag + ": global_steps", std::move(count).error());
    if (found && *found != *count) {
      return Fail(Errc::kBadInput, tag, ": global_steps differs between ranks: ", *found, " and ",
                  *count);
    }
    found = *count;
  }
  if (!found) {
    return Fail(Errc::kBadInput, tag,
                ": no \"global_steps\" in the model states: give --iteration");
  }
  return *found;
}

/// Calls `act` with key and value of each entry of client state in a model file.
template <class Act>
void ForClientState(const Node* root, const Act& act) {
  if (root == nullptr || !root->is_dict()) return;
  for (std::size_t i = 0; i < root->entry_count(); ++i) {
    if (IsOneOf(root->key(i), kModelKeys) || IsOneOf(root->key(i), kEngineKeys)) continue;
    const Node* value = root->value(i);
    const bool empty = value->is_none() || (value->is_dict() && value->items.empty()) ||
                       (value->is_list() && value->items.empty()) ||
                       (value->kind == pickle::Kind::kSet && value->items.empty());
    if (!empty && root->key(i)->is_string()) act(root->key(i), value);
  }
}

}  // namespace

bool SameValues(const Node* a, const Node* b, const SameTensor& same) {
  std::vector<std::pair<const Node*, const Node*>> open = {{a, b}};
  std::set<std::pair<const Node*, const Node*>> seen;
  while (!open.empty()) {
    const auto [x, y] = open.back();
    open.pop_back();
    if (x == nullptr && y == nullptr) continue;
    if (x == nullptr || y == nullptr || x->kind != y->kind) return false;
    if (x->is_tensor() && (!same || !same(*x->tensor, *y->tensor))) return false;
    const bool equal = x->integer == y->integer && x->text == y->text &&
                       (x->real == y->real || (std::isnan(x->real) && std::isnan(y->real)));
    if (!equal) return false;
    if (!seen.emplace(x, y).second) continue;
    open.insert(open.end(), {{x->callable, y->callable}, {x->args, y->args}, {x->state, y->state}});
    for (const auto list : {&Node::items, &Node::list_items, &Node::dict_items}) {
      if ((x->*list).size() != (y->*list).size()) return false;
      for (std::size_t i = 0; i < (x->*list).size(); ++i) {
        open.emplace_back((x->*list)[i], (y->*list)[i]);
      }
    }
  }
  return true;
}

namespace {

/// Adds the members of all tensors of a graph.
void AddMembers(const Passed& from, const Node* value, std::vector<std::uint32_t>* members) {
  std::vector<const Node*> open = {value};
  std::set<const Node*> seen;
  while (!open.empty()) {
    const Node* node = open.back();
    open.pop_back();
    if (node == nullptr || !seen.insert(node).second) continue;
    if (node->is_tensor()) {
      members->push_back(from.members[node->tensor->storage]);
      open.push_back(node->tensor->attributes);
    }
    open.insert(open.end(), {node->callable, node->args, node->state});
    for (const auto list : {&Node::items, &Node::list_items, &Node::dict_items}) {
      open.insert(open.end(), (node->*list).begin(), (node->*list).end());
    }
  }
}

/// Returns the names of opaque entries that are lost because another rank's replace them.
std::vector<std::string> LostEntries(const EngineState& state, const Topology& from,
                                     const Topology& to) {
  std::vector<std::string> lost;
  if (from.tp == to.tp) return lost;
  for (const OpaqueEntry& entry : state.entries) {
    const bool alike = std::all_of(entry.by_tp.begin(), entry.by_tp.end(), [&](const auto& value) {
      return value.node == entry.by_tp[0].node || SameValues(value.node, entry.by_tp[0].node);
    });
    if (!alike) lost.push_back(entry.name);
  }
  return lost;
}

/// Compares tensors in opaque entries of two checkpoints by the checksums of their storages.
SameTensor BySums(const Checkpoint& a, const Passed& from_a, const Checkpoint& b,
                  const Passed& from_b) {
  return [&](const pickle::Tensor& x, const pickle::Tensor& y) {
    if (x.dtype != y.dtype || x.shape != y.shape || x.strides != y.strides) return false;
    const layout::Member& of_a = a.map.members[from_a.members[x.storage]];
    const layout::Member& of_b = b.map.members[from_b.members[y.storage]];
    if (x.offset != y.offset || of_a.bytes != of_b.bytes) return false;
    return !of_a.crc32 || !of_b.crc32 || *of_a.crc32 == *of_b.crc32;
  };
}

std::string Lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](char c) {
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  });
  return text;
}

}  // namespace

std::string DescribeEntries(const std::vector<OpaqueEntry>& entries) {
  std::vector<std::string> names;
  for (const OpaqueEntry& entry : entries) {
    const Node* value = nullptr;
    for (const OpaqueEntry::Value& one : entry.by_tp) value = value == nullptr ? one.node : value;
    names.push_back(StrCat(entry.name, " (", pickle::Describe(value), ")"));
  }
  return "entries of the state dict that are not tensors: " + FirstFew(names);
}

std::vector<std::string> EntryDifferences(const Checkpoint& a, const Checkpoint& b) {
  std::vector<std::string> lines;
  const EngineState* first = EngineStateOf(a);
  const EngineState* second = EngineStateOf(b);
  if (first == nullptr || second == nullptr) return lines;
  std::map<std::string, const OpaqueEntry*> of_b;
  for (const OpaqueEntry& entry : second->entries) of_b[entry.name] = &entry;
  for (const OpaqueEntry& entry : first->entries) {
    const auto found = of_b.find(entry.name);
    if (found == of_b.end()) {
      lines.push_back(Quoted(entry.name) + ": only in the first");
      continue;
    }
    const std::vector<OpaqueEntry::Value>& others = found->second->by_tp;
    const std::size_t ranks = entry.by_tp.size() == others.size() ? others.size() : 1;
    for (std::size_t tp = 0; tp < ranks; ++tp) {
      const OpaqueEntry::Value& x = entry.by_tp[tp];
      const OpaqueEntry::Value& y = others[tp];
      if (x.from == nullptr || y.from == nullptr) continue;
      if (SameValues(x.node, y.node, BySums(a, *x.from, b, *y.from))) continue;
      lines.push_back(StrCat(Quoted(entry.name), ": ", pickle::Describe(x.node), " and ",
                             pickle::Describe(y.node), " with different contents"));
      break;
    }
    of_b.erase(found);
  }
  for (const auto& [name, entry] : of_b) lines.push_back(Quoted(name) + ": only in the second");
  return lines;
}

std::vector<std::uint32_t> EngineState::Members() const {
  std::vector<std::uint32_t> all;
  for (const auto* list : {&model_states, &optimizer}) {
    for (const Passed& one : *list) all.insert(all.end(), one.members.begin(), one.members.end());
  }
  for (const OpaqueEntry& entry : entries) {
    for (const OpaqueEntry::Value& value : entry.by_tp) {
      if (value.from != nullptr) AddMembers(*value.from, value.node, &all);
    }
  }
  return all;
}

std::shared_ptr<const OwnState> EngineState::WithoutNames(std::vector<std::string>* lost) const {
  if (entries.empty()) return nullptr;
  lost->push_back(DescribeEntries(entries));
  auto kept = std::make_shared<EngineState>(*this);
  kept->entries.clear();
  return kept;
}

std::vector<std::string> EngineState::Contents() const {
  std::vector<std::string> contents;
  const Node* root = model_states.empty() ? nullptr : model_states.front().document.root;
  ForClientState(root,
                 [&](const Node* key, const Node*) { contents.push_back(Quoted(key->text)); });
  if (!optimizer.empty()) contents.push_back("the loss scaler");
  if (!entries.empty()) contents.push_back(DescribeEntries(entries));
  return contents;
}

const Node* MegatronArgs(const Node* model_states) {
  const Node* args = model_states == nullptr ? nullptr : model_states->Find("args");
  const bool object = args != nullptr && args->kind == pickle::Kind::kObject;
  const Node* attributes = object ? args->state : nullptr;
  const bool theirs =
      attributes != nullptr && attributes->Find("tensor_model_parallel_size") != nullptr;
  return theirs ? attributes : nullptr;
}

const EngineState* EngineStateOf(const Checkpoint& checkpoint) {
  return dynamic_cast<const EngineState*>(checkpoint.own.get());
}

std::vector<std::string> OwnClientState(const Node* a, const Node* b) {
  std::vector<std::string> own;
  ForClientState(a, [&](const Node* key, const Node* value) {
    const Node* other = FindIn(b, key->text);
    if (other == nullptr || !SameValues(value, other)) own.push_back(Quoted(key->text));
  });
  ForClientState(b, [&](const Node* key, const Node*) {
    if (FindIn(a, key->text) == nullptr) own.push_back(Quoted(key->text));
  });
  return own;
}

std::uint64_t PassedRank(const Topology& from, const Topology& to, std::uint64_t mp,
                         std::size_t ranks) {
  std::uint64_t rank = 0;
  if (to.tp == from.tp) rank = to.pp == from.pp ? mp : mp % to.tp;
  return rank < ranks ? rank : 0;
}

std::vector<std::string> LostClientState(const EngineState& state, const Topology& from,
                                         const Topology& to) {
  const std::vector<Passed>& all = state.model_states;
  std::set<std::string> lost;
  for (std::size_t mp = 0; mp < all.size(); ++mp) {
    const std::uint64_t kept = PassedRank(from, to, mp, all.size());
    if (kept == mp) continue;
    for (std::string& key : OwnClientState(all[kept].document.root, all[mp].document.root)) {
      lost.insert(std::move(key));
    }
  }
  std::vector<std::string> out;
  if (!lost.empty()) {
    out.push_back("client state of model-parallel ranks, replaced by that of other ranks: " +
                  Joined(std::vector<std::string>(lost.begin(), lost.end()), ", "));
  }
  if (const std::vector<std::string> entries = LostEntries(state, from, to); !entries.empty()) {
    out.push_back("rank-specific state dict entries of tensor-parallel ranks other than rank 0: " +
                  FirstFew(entries));
  }
  return out;
}

void TakeEngineState(const Topology& topology, EngineState state, Checkpoint* checkpoint) {
  checkpoint->layout = LayoutOf(topology);
  checkpoint->iteration = IterationOf(state, checkpoint->tag);
  const Node* root = state.model_states.empty() ? nullptr : state.model_states[0].document.root;
  const Result<std::uint64_t> samples = pickle::AsCount(FindIn(root, "global_samples"));
  if (samples) checkpoint->consumed_samples = *samples;
  const Node* type = FindIn(FindIn(FindIn(root, "ds_config"), "optimizer"), "type");
  if (type != nullptr && type->is_string()) checkpoint->optimizer = Lower(type->text);
  for (Param& param : checkpoint->params) {
    if (param.expert) param.expert->module = ExpertModuleOf(param.name);
  }
  for (Group& group : checkpoint->groups) group.hyper = HyperOf(group.options, group.tensors);
  checkpoint->own = std::make_shared<const EngineState>(std::move(state));
}

bool IsOneOf(const Node* key, std::span<const std::string_view> keys) {
  return key->is_string() && std::find(keys.begin(), keys.end(), key->text) != keys.end();
}

}  // namespace shardwright::checkpoints
