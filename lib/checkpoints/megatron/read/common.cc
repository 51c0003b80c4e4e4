// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <unordered_set>

#include "checkpoints/megatron/buckets.h"
#include "checkpoints/megatron/names.h"
#include "checkpoints/megatron/read/read_internal.h"
#include "engine/layout/states.h"

namespace shardwright::checkpoints::megatron {
namespace {

using pickle::Node;

/// Finds the storages of the tensors in a value.
class Storages {
 public:
  void Visit(const Node* node) {
    if (node == nullptr || !seen_.insert(node).second) return;
    if (node->is_tensor()) found.push_back(node->tensor->storage);
    for (const auto* list : {&node->items, &node->list_items, &node->dict_items}) {
      for (const Node* child : *list) Visit(child);
    }
    for (const Node* child : {node->callable, node->args, node->state}) Visit(child);
  }

  std::vector<std::uint32_t> found;

 private:
  std::unordered_set<const Node*> seen_;
};

}  // namespace

Value ValueOf(MapBuilder& map, std::uint32_t file, std::uint32_t container,
              std::shared_ptr<const torch_pt::Document> document, const Node* node) {
  Storages storages;
  storages.Visit(node);
  Value value;
  value.members.assign(document->storages.size(), Value::kNoMember);
  for (const std::uint32_t storage : storages.found) {
    value.members[storage] = map.MemberOf(file, container, *document, storage);
  }
  value.document = std::move(document);
  value.root = node;
  return value;
}

void AddModule(const std::string& name, const Node* node, const std::function<Value()>& value,
               RunState* own) {
  if (node->is_none() && IsOfLinear(ParseName(name))) return;
  if (!own->modules.contains(name)) own->modules.emplace(name, value());
}

ModelConfig FactsOf(const Args& args) {
  ModelConfig facts;
  const auto add = [&](const char* key, std::string text) {
    if (!text.empty()) facts.emplace(key, std::move(text));
  };
  const auto add_count = [&](const char* key, std::uint64_t count) {
    if (count > 0) facts.emplace(key, std::to_string(count));
  };
  const auto add_flag = [&](const char* key, bool on) {
    facts.emplace(key, on ? "true" : "false");
  };
  if (args.swiglu) {
    add_flag("swiglu", *args.swiglu);
    add_flag("qk_layernorm", args.qk_layernorm);
    add_flag("moe", args.experts > 0);
  }
  add("normalization", args.normalization);
  add("position_embedding_type", args.positions);
  add_count("num_attention_heads", args.heads);
  add_count("num_key_value_heads", args.groups);
  add_count("head_dim", args.channels);
  add_count("vocab_size", args.vocab.value_or(0));
  return facts;
}

void FillLayout(const Args& args, MegatronLayout layout, Checkpoint* out) {
  out->facts = FactsOf(args);
  out->own_values = args.own_values;
  out->save.weights_are_rounded = !args.quantized_weights;
  Mesh& mesh = out->layout.mesh;
  mesh.tp = args.tp;
  mesh.pp = args.pp;
  mesh.ep = args.ep;
  mesh.cp = args.cp;
  if (layout.optimizer == OptimizerForm::kNone) {
    mesh.dp_replicate = args.dp;
  } else {
    mesh.dp_shard = args.dp;
  }
  out->layout.dtype = args.dtype;
  layout.mesh = mesh;
  layout.vpp = args.vpp;
  layout.etp = args.etp;
  layout.first = args.first.value_or(0);
  layout.last = args.last.value_or(0);
  if (!args.bucket_count) layout.bucket = BucketRuleOf(args, 0, 0, 0, false).elems.value_or(0);
  layout.sequence_parallel = args.sequence_parallel;
  layout.dtype = args.dtype;
  out->layout.own = std::make_shared<const MegatronLayout>(std::move(layout));
}

Scalar StepScalar(double step) {
  const auto value = static_cast<float>(step);
  Scalar scalar;
  scalar.state = layout::kStep;
  scalar.is_tensor = true;
  scalar.bytes.resize(sizeof value);
  std::memcpy(scalar.bytes.data(), &value, sizeof value);
  return scalar;
}

Result<Scalar> ScalarOf(const Container& container, const torch_pt::Document& document,
                        const Node* node, const std::string& what) {
  const auto wrong = [&] {
    return Fail(Errc::kBadInput, what, ": a number expected, found ", pickle::Describe(node));
  };
  if (!node->is_tensor() || node->tensor->storage >= document.storages.size()) return wrong();
  const pickle::Tensor& tensor = *node->tensor;
  const std::uint64_t at = document.storages[tensor.storage].offset;
  Scalar scalar;
  scalar.state = layout::kStep;
  scalar.is_tensor = true;
  scalar.dtype = tensor.dtype;
  scalar.shape = tensor.shape;
  const std::uint64_t bytes = Elems(tensor.shape) * ItemSize(tensor.dtype);
  for (const auto& [storage, payload] : container.inlined) {
    if (container.metadata->storages[storage].offset != at) continue;
    const std::uint64_t first = tensor.offset * ItemSize(tensor.dtype);
    if (bytes == 0 || first + bytes > payload.size()) return wrong();
    scalar.bytes = payload.substr(first, bytes);
    return scalar;
  }
  return wrong();
}

std::vector<layout::Box> BoxesOfRange(const Shape& shape, std::uint64_t first, std::uint64_t last) {
  std::vector<layout::Box> boxes;
  while (first < last) {
    // Takes the largest box that starts here: whole along the last dimensions,
    // a range along one dimension, and one index along the dimensions before it.
    layout::Box box;
    box.at_view.assign(shape.size(), 0);
    box.at_shard.assign(shape.size(), 0);
    box.sizes.assign(shape.size(), 1);
    std::uint64_t inner = 1;  // elements per index of `dim`
    std::size_t dim = shape.size();
    while (dim > 1 && first % (inner * shape[dim - 1]) == 0 &&
           last - first >= inner * shape[dim - 1]) {
      --dim;
      box.sizes[dim] = shape[dim];
      inner *= shape[dim];
    }
    std::uint64_t count = 1;
    if (dim > 0) {
      const std::uint64_t index = first / inner % shape[dim - 1];
      count = std::min((last - first) / inner, shape[dim - 1] - index);
      box.sizes[dim - 1] = count;
    }
    std::uint64_t rest = first / inner;
    for (std::size_t d = dim; d-- > 0;) {
      box.at_view[d] = rest % shape[d];
      rest /= shape[d];
    }
    first += count * inner;
    boxes.push_back(std::move(box));
  }
  return boxes;
}

Result<Checkpoint> Read(const SourceSet& source, const Patterns& patterns) {
  return source.manifest.empty() ? ReadLegacy(source, patterns, Reads::kAll)
                                 : ReadDist(source, patterns, Reads::kAll);
}

Result<Checkpoint> ReadWeights(const SourceSet& source, const Patterns& patterns) {
  SW_TRY_ASSIGN(Checkpoint read, source.manifest.empty()
                                     ? ReadLegacy(source, patterns, Reads::kOnlyWeights)
                                     : ReadDist(source, patterns, Reads::kOnlyWeights));
  read.only_weights = OnlyWeights{{}, true};
  return read;
}

}  // namespace shardwright::checkpoints::megatron
