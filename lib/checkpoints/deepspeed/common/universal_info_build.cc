// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <vector>

#include "checkpoints/deepspeed/common/affine_map_internal.h"
#include "checkpoints/deepspeed/common/universal_info.h"
#include "checkpoints/tp_rules/name_list.h"

namespace shardwright::checkpoints {
namespace {

using layout::Cut;
using layout::Split;
using pickle::Arena;
using pickle::Node;

const Node* Number(Arena& arena, std::uint64_t value) {
  return arena.Int(static_cast<std::int64_t>(value));
}

const Node* Numbers(Arena& arena, const std::vector<std::uint64_t>& values) {
  std::vector<const Node*> items;
  items.reserve(values.size());
  for (std::uint64_t value : values) items.push_back(Number(arena, value));
  return arena.List(std::move(items));
}

const Node* SortedStrings(Arena& arena, std::vector<std::string> texts) {
  std::sort(texts.begin(), texts.end());
  std::vector<const Node*> items;
  items.reserve(texts.size());
  for (const std::string& text : texts) items.push_back(arena.String(text));
  return arena.List(std::move(items));
}

bool NamesVocabulary(const std::string& name) {
  return name.find("embed") != std::string::npos || name.find("lm_head") != std::string::npos;
}

// Returns true if a pattern list treats the parameter as a vocabulary: padded, or AutoTP's guess.
bool IsVocabulary(const Param& param) {
  return param.rule.split == Split::kDim && param.rule.dim == 0 &&
         (param.rule.padded || (param.shape.size() == 2 && NamesVocabulary(param.name)));
}

class Builder {
 public:
  Builder(Arena& arena, std::uint64_t tp) : arena_(arena), tp_(tp) {}

  Status SetVocabulary(std::span<const Param> params);
  Status Add(const Param& param);
  const Node* Finish();

 private:
  Status AddCategory(const Param& param, const std::string& pattern);
  Status AddSub(const Param& param, const std::string& pattern);

  Arena& arena_;
  std::uint64_t tp_;
  std::uint64_t vocabulary_rows_ = 0;
  bool padded_ = false;
  std::vector<std::string> row_, replicated_, vocabulary_, average_, tied_;
  std::vector<const Node*> subs_;
  Node* widths_ = nullptr;
  Node* maps_ = nullptr;
};

// Sets the vocabulary size. The format has one for all: that of the padded parameters.
Status Builder::SetVocabulary(std::span<const Param> params) {
  const Param* chosen = nullptr;
  for (const Param& param : params) {
    if (!param.alias_of.empty() || param.kind != ParamKind::kTrainable || !IsVocabulary(param)) {
      continue;
    }
    if (chosen == nullptr || (param.rule.padded && !chosen->rule.padded)) {
      chosen = &param;
    } else if (param.rule.padded && param.shape[0] != chosen->shape[0]) {
      return Fail(Errc::kUnsupported, "padded vocabularies \"", chosen->name, "\" and \"",
                  param.name, "\" have different sizes: ", chosen->shape[0], " and ",
                  param.shape[0], " rows");
    }
  }
  if (chosen != nullptr) {
    vocabulary_rows_ = chosen->shape[0];
    padded_ = chosen->rule.padded;
  }
  return {};
}

Status Builder::AddSub(const Param& param, const std::string& pattern) {
  const Shape& view = param.rule.view.empty() ? param.shape : param.rule.view;
  const auto made = layout::RuleWidths(param.rule, param.shape, tp_);
  if (!made) return Within("\"" + param.name + "\"", made.error());
  std::vector<const Node*> widths;
  for (const auto& row_of : *made) widths.push_back(Numbers(arena_, row_of));
  std::vector<const Node*> shape;
  for (std::size_t dim = 0; dim < view.size(); ++dim) {
    if (dim != param.rule.dim) {
      shape.push_back(Number(arena_, view[dim]));
      continue;
    }
    std::vector<const Node*> sizes;
    for (std::uint64_t size : param.rule.sub_sizes) sizes.push_back(Number(arena_, size));
    shape.push_back(arena_.Tuple(std::move(sizes)));
  }
  Node* entry = arena_.Dict();
  Set(arena_, entry, "patterns", arena_.List({arena_.String(pattern)}));
  Set(arena_, entry, "shape", arena_.List(std::move(shape)));
  Set(arena_, entry, "partition_dim", Number(arena_, param.rule.dim));
  subs_.push_back(entry);
  if (widths_ == nullptr) widths_ = arena_.Dict();
  widths_->items.push_back(arena_.String(pattern));
  widths_->items.push_back(arena_.List(std::move(widths)));
  return {};
}

Status Builder::AddCategory(const Param& param, const std::string& pattern) {
  if (param.tied_layers.size() > 1) tied_.push_back(pattern);
  if (IsVocabulary(param) && param.shape[0] == vocabulary_rows_) vocabulary_.push_back(pattern);
  switch (param.rule.split) {
    case Split::kReplicated:
      replicated_.push_back(pattern);
      break;
    case Split::kAverage:
      average_.push_back(pattern);
      break;
    case Split::kDim:
      if (param.rule.dim == 1) row_.push_back(pattern);
      break;
    case Split::kSub:
      return AddSub(param, pattern);
    case Split::kMesh:
    case Split::kListed:
    case Split::kUnknown:
      break;
  }
  return {};
}

Status Builder::Add(const Param& param) {
  if (!param.alias_of.empty()) return {};
  const std::string pattern = AnchoredLiteral(param.name);
  const layout::SplitRule& rule = param.rule;
  const bool replicated = rule.split == Split::kReplicated;
  if (param.kind == ParamKind::kBuffer && (replicated || rule.split == Split::kUnknown)) return {};
  const bool trained = param.kind == ParamKind::kTrainable;
  // DeepSpeed's converter does not store the view of a tensor that the map
  // describes. Any loader except AutoTP's would then cut its atom along dimension 0.
  const bool mappable =
      rule.split != Split::kAverage && !rule.padded && (rule.view.empty() || !trained);
  if (tp_ > 1) {
    std::vector<Cut> cuts;
    for (std::uint64_t rank = 0; rank < tp_; ++rank) {
      SW_TRY_ASSIGN(Cut cut, CutOf(param, tp_, rank));
      cuts.push_back(std::move(cut));
    }
    if (mappable) {
      if (maps_ == nullptr) maps_ = arena_.Dict();
      maps_->items.push_back(arena_.String(pattern));
      maps_->items.push_back(AffineFromCuts(arena_, cuts, rule));
    }
  }
  // DeepSpeed's converter requires that every expression of a list matches
  // a trainable parameter. It does not check expressions of the map.
  if (trained || !mappable) return AddCategory(param, pattern);
  return {};
}

const Node* Builder::Finish() {
  Node* info = arena_.Dict();
  Set(arena_, info, "universal_checkpoint_version", arena_.Float(0.4));
  Set(arena_, info, "parameter_with_row_parallelism_patterns", SortedStrings(arena_, row_));
  Set(arena_, info, "tp_replicated_parameter_patterns", SortedStrings(arena_, replicated_));
  Set(arena_, info, "vocabulary_parameter_patterns", SortedStrings(arena_, vocabulary_));
  Set(arena_, info, "parameter_with_sub_params", arena_.List(std::move(subs_)));
  // This key marks an info of AutoTP. Readers then do not treat equal vocabulary rows as padded.
  if (!padded_) Set(arena_, info, "autotp_unsupported_parameter_patterns", arena_.Dict());
  if (!average_.empty()) {
    Set(arena_, info, "parameter_to_average_patterns", SortedStrings(arena_, average_));
  }
  if (!tied_.empty()) {
    Set(arena_, info, "pipeline_replicated_parameter_patterns", SortedStrings(arena_, tied_));
  }
  if (widths_ != nullptr) Set(arena_, info, "sub_param_shard_widths", widths_);
  if (!vocabulary_.empty()) {
    Set(arena_, info, "original_vocab_size", Number(arena_, vocabulary_rows_));
  }
  if (maps_ != nullptr) {
    Node* map = arena_.Dict();
    Set(arena_, map, "version", arena_.Int(1));
    Set(arena_, map, "params", maps_);
    Set(arena_, info, "affine_map", map);
  }
  return info;
}

}  // namespace

Result<const Node*> BuildUniversalInfo(Arena& arena, std::span<const Param> params,
                                       std::uint64_t tp) {
  if (tp == 1) {
    const bool told = std::any_of(params.begin(), params.end(), [](const Param& param) {
      return param.rule.origin == "universal_checkpoint_info";
    });
    if (!told) return nullptr;
  }
  Builder builder(arena, tp);
  SW_TRY(builder.SetVocabulary(params));
  for (const Param& param : params) {
    SW_TRY(builder.Add(param));
  }
  return builder.Finish();
}

}  // namespace shardwright::checkpoints
