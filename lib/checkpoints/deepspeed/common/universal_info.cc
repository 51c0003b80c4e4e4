// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/deepspeed/common/universal_info.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <utility>
#include <variant>
#include <vector>

#include "checkpoints/deepspeed/common/affine_map_internal.h"
#include "checkpoints/tp_rules/name_list.h"
#include "support/base/checked.h"

namespace shardwright::checkpoints {

// One entry of `parameter_with_sub_params`.
struct SubParams {
  // By dimension of the view: a size (-1: the remainder), or the sizes of sub-tensors.
  std::vector<std::variant<std::int64_t, std::vector<std::uint64_t>>> shape;
  std::uint32_t dim = 0;
};

namespace {

using layout::Split;
using layout::SplitRule;
using pickle::Kind;
using pickle::Node;

constexpr double kNewestVersion = 0.4;
constexpr const char* kOrigin = "universal_checkpoint_info";

using Widths = std::vector<std::vector<std::uint64_t>>;

bool IsSequence(const Node* node) {
  return node->kind == Kind::kList || node->kind == Kind::kTuple || node->kind == Kind::kSize;
}

Status ReadList(const Node* info, std::string_view key, NameList* out) {
  const Node* list = info->Find(key);
  if (list == nullptr || list->is_none()) return {};
  if (!IsSequence(list)) {
    return Fail(Errc::kBadInput, key, ": list expected, found ", pickle::Describe(list));
  }
  for (const Node* item : list->items) {
    const Result<std::string_view> text = pickle::AsString(item);
    if (!text) return Within(key, text.error());
    SW_TRY(out->Add(*text, key));
  }
  return {};
}

// Returns a dict with string keys, or null if it does not exist.
Result<const Node*> ReadDict(const Node* info, std::string_view key) {
  const Node* dict = info->Find(key);
  if (dict == nullptr || dict->is_none()) return nullptr;
  if (!dict->is_dict()) {
    return Fail(Errc::kBadInput, key, ": dict expected, found ", pickle::Describe(dict));
  }
  for (std::size_t i = 0; i < dict->entry_count(); ++i) {
    if (dict->key(i)->is_string()) continue;
    return Fail(Errc::kBadInput, key, ": string keys expected, found ",
                pickle::Describe(dict->key(i)));
  }
  return dict;
}

// Returns the attributes of a SubparamShape object, or the dict itself.
const Node* Fields(const Node* entry) {
  return entry->kind == Kind::kObject && entry->state != nullptr ? entry->state : entry;
}

Result<SubParams> ReadSubParams(const Node* entry) {
  SubParams sub;
  SW_TRY_ASSIGN(const std::uint64_t dim, pickle::AsCount(entry->Find("partition_dim")));
  const Node* shape = entry->Find("shape");
  if (shape == nullptr || !IsSequence(shape) || dim >= shape->items.size()) {
    return Fail(Errc::kBadInput, "shape: a sequence with more than ", dim,
                " entries expected, found ", pickle::Describe(shape));
  }
  sub.dim = static_cast<std::uint32_t>(dim);
  for (const Node* item : shape->items) {
    if (IsSequence(item)) {
      SW_TRY_ASSIGN(Shape sizes, pickle::AsShape(item));
      sub.shape.emplace_back(std::move(sizes));
    } else {
      SW_TRY_ASSIGN(const std::int64_t size, pickle::AsInt(item));
      if (size < -1)
        return Fail(Errc::kBadInput, "shape: entries of at least -1 expected, found ", size);
      sub.shape.emplace_back(size);
    }
  }
  return sub;
}

Result<std::uint64_t> ElemsOfAll(std::span<const Shape> shards) {
  std::uint64_t sum = 0;
  for (const Shape& shard : shards) {
    SW_TRY_ASSIGN(const std::uint64_t elems, CountElems(shard));
    SW_TRY_ASSIGN(sum, CheckedAdd(sum, elems));
  }
  return sum;
}

std::vector<Shape> Copy(std::span<const Shape> shards) { return {shards.begin(), shards.end()}; }

}  // namespace

struct UniversalInfo::Impl {
  double version = 0;
  bool says_anything = false;
  bool autotp = false;
  bool cuts_others = true;  // cut unnamed parameters along dimension 0
  std::uint64_t original_vocab = 0;
  NameList replicated, average, two_sub, row, vocabulary, sub, unsupported, affine;
  std::vector<std::uint32_t> sub_entry;  // by expression of `sub`
  std::vector<SubParams> sub_params;
  std::map<std::string, Widths, std::less<>> sub_widths;  // by expression
  std::vector<std::string> reasons;                       // by expression of `unsupported`
  std::vector<const Node*> maps;                          // by expression of `affine`

  Status ReadSubs(const Node* info);
  Status ReadUnsupported(const Node* info);
  Status ReadAffine(const Node* info);

  Result<std::optional<std::uint32_t>> MatchOne(const NameList& list, std::string_view key,
                                                const std::string& name) const;
  Result<std::optional<Ruled>> Category(const std::string& name,
                                        std::span<const Shape> shards) const;
  Result<Ruled> TwoSubs(std::span<const Shape> shards) const;
  Result<Ruled> Subs(std::uint32_t expression, std::span<const Shape> shards) const;
  Status Vocabulary(Ruled* ruled, std::span<const Shape> shards) const;
};

UniversalInfo::UniversalInfo() : impl_(std::make_unique<Impl>()) {}
UniversalInfo::~UniversalInfo() = default;
UniversalInfo::UniversalInfo(UniversalInfo&&) noexcept = default;
UniversalInfo& UniversalInfo::operator=(UniversalInfo&&) noexcept = default;

void UniversalInfo::OfAutoTp() { impl_->cuts_others = impl_->autotp; }

bool UniversalInfo::says_anything() const { return impl_->says_anything; }

Status UniversalInfo::Impl::ReadSubs(const Node* info) {
  const Node* list = info->Find("parameter_with_sub_params");
  if (list != nullptr && !list->is_none()) {
    if (!IsSequence(list)) {
      return Fail(Errc::kBadInput, "parameter_with_sub_params: list expected, found ",
                  pickle::Describe(list));
    }
    for (const Node* item : list->items) {
      const Node* entry = Fields(item);
      Result<SubParams> params = ReadSubParams(entry);
      if (!params) return Within("parameter_with_sub_params", params.error());
      SW_TRY(ReadList(entry, "patterns", &sub));
      sub_entry.resize(sub.size(), static_cast<std::uint32_t>(sub_params.size()));
      sub_params.push_back(*std::move(params));
    }
  }
  SW_TRY_ASSIGN(const Node* widths, ReadDict(info, "sub_param_shard_widths"));
  for (std::size_t i = 0; widths != nullptr && i < widths->entry_count(); ++i) {
    Widths& mine = sub_widths[widths->key(i)->text];
    if (!IsSequence(widths->value(i))) {
      return Fail(Errc::kBadInput, "sub_param_shard_widths: list expected, found ",
                  pickle::Describe(widths->value(i)));
    }
    for (const Node* item : widths->value(i)->items) {
      Result<Shape> row_of = pickle::AsShape(item);
      if (!row_of) return Within("sub_param_shard_widths", row_of.error());
      mine.push_back(*std::move(row_of));
    }
  }
  return {};
}

Status UniversalInfo::Impl::ReadUnsupported(const Node* info) {
  constexpr std::string_view kKey = "autotp_unsupported_parameter_patterns";
  SW_TRY_ASSIGN(const Node* dict, ReadDict(info, kKey));
  autotp = dict != nullptr;
  for (std::size_t i = 0; dict != nullptr && i < dict->entry_count(); ++i) {
    SW_TRY(unsupported.Add(dict->key(i)->text, kKey));
    reasons.push_back(dict->value(i)->is_string() ? dict->value(i)->text : "no reason given");
  }
  return {};
}

Status UniversalInfo::Impl::ReadAffine(const Node* info) {
  SW_TRY_ASSIGN(const Node* map, ReadDict(info, "affine_map"));
  if (map == nullptr) return {};
  if (const Node* format = map->Find("version")) {
    SW_TRY_ASSIGN(const std::int64_t number, pickle::AsInt(format));
    if (number > 1) {
      return Fail(Errc::kUnsupported, "affine_map: format version ", number,
                  ", 1 is the newest known");
    }
  }
  SW_TRY_ASSIGN(const Node* params, ReadDict(map, "params"));
  for (std::size_t i = 0; params != nullptr && i < params->entry_count(); ++i) {
    if (!params->value(i)->is_dict()) {
      return Fail(Errc::kBadInput, "affine_map: dict expected for \"", params->key(i)->text,
                  "\", found ", pickle::Describe(params->value(i)));
    }
    SW_TRY(affine.Add(params->key(i)->text, "affine_map"));
    maps.push_back(params->value(i));
  }
  return {};
}

Result<UniversalInfo> UniversalInfo::Parse(const Node* info) {
  UniversalInfo parsed;
  Impl& impl = *parsed.impl_;
  if (info == nullptr || info->is_none()) return parsed;
  const auto within = [](Error error) { return Within(kOrigin, std::move(error)); };
  if (!info->is_dict()) {
    return within({Errc::kBadInput, "dict expected, found " + pickle::Describe(info)});
  }
  if (const Node* version = info->Find("universal_checkpoint_version")) {
    const Result<double> number = pickle::AsFloat(version);
    if (!number) return within(number.error());
    impl.version = *number;
    if (impl.version > kNewestVersion + 0.001) {
      return within({Errc::kUnsupported,
                     "version " + std::to_string(impl.version) + ", 0.4 is the newest known"});
    }
  }
  const std::pair<std::string_view, NameList*> lists[] = {
      {"tp_replicated_parameter_patterns", &impl.replicated},
      {"parameter_to_average_patterns", &impl.average},
      {"parameter_with_2_sub_params_cat_dim_0", &impl.two_sub},
      {"parameter_with_row_parallelism_patterns", &impl.row},
      {"vocabulary_parameter_patterns", &impl.vocabulary}};
  for (const auto& [key, list] : lists) {
    const Status read = ReadList(info, key, list);
    if (!read) return within(read.error());
  }
  for (const Status& read :
       {impl.ReadSubs(info), impl.ReadUnsupported(info), impl.ReadAffine(info)}) {
    if (!read) return within(read.error());
  }
  if (const Node* rows = info->Find("original_vocab_size"); rows != nullptr && !rows->is_none()) {
    const Result<std::uint64_t> count = pickle::AsCount(rows);
    if (!count) return Within("universal_checkpoint_info: original_vocab_size", count.error());
    impl.original_vocab = *count;
  }
  impl.says_anything = impl.replicated.size() + impl.average.size() + impl.two_sub.size() +
                           impl.row.size() + impl.vocabulary.size() + impl.sub.size() +
                           impl.unsupported.size() + impl.affine.size() >
                       0;
  return parsed;
}

Result<std::optional<std::uint32_t>> UniversalInfo::Impl::MatchOne(const NameList& list,
                                                                   std::string_view key,
                                                                   const std::string& name) const {
  const std::vector<std::uint32_t> found = list.Match(name);
  if (found.size() > 1) {
    return Fail(Errc::kBadInput, key, ": both \"", list.text(found[0]), "\" and \"",
                list.text(found[1]), "\" match");
  }
  if (found.empty()) return std::nullopt;
  return found.front();
}

// Returns the rule for shards of two halves along dimension 0. All first halves precede the second.
Result<Ruled> UniversalInfo::Impl::TwoSubs(std::span<const Shape> shards) const {
  Ruled ruled;
  SplitRule& rule = ruled.rule;
  rule.split = Split::kSub;
  rule.widths.resize(2);
  rule.sub_sizes.resize(2);
  for (const Shape& shard : shards) {
    const std::uint64_t rows = shard.empty() ? 0 : shard.front();
    const std::uint64_t halves[] = {CeilDiv(rows, 2), rows - CeilDiv(rows, 2)};
    for (std::size_t half = 0; half < 2; ++half) {
      rule.widths[half].push_back(halves[half]);
      SW_TRY_ASSIGN(rule.sub_sizes[half], CheckedAdd(rule.sub_sizes[half], halves[half]));
    }
  }
  SW_TRY_ASSIGN(ruled.whole, layout::WholeShape(rule, Copy(shards)));
  return ruled;
}

Result<Ruled> UniversalInfo::Impl::Subs(std::uint32_t expression,
                                        std::span<const Shape> shards) const {
  const SubParams& params = sub_params[sub_entry[expression]];
  const auto& spec = params.shape[params.dim];
  Ruled ruled;
  SplitRule& rule = ruled.rule;
  rule.split = Split::kSub;
  rule.dim = params.dim;
  const auto* sizes = std::get_if<std::vector<std::uint64_t>>(&spec);
  if (sizes != nullptr) {
    rule.sub_sizes = *sizes;
  } else if (version > kNewestVersion - 0.001) {
    return Fail(Errc::kBadInput, "the sizes of the sub-parameters are missing");
  } else {
    // Before version 0.4 this is the number of equal sub-parameters.
    const std::int64_t count = std::get<std::int64_t>(spec);
    std::uint64_t extent = 0;
    for (const Shape& shard : shards) {
      if (params.dim >= shard.size()) {
        return Fail(Errc::kBadInput, "sub-parameters along dimension ", params.dim,
                    ", but the shard has shape ", ToString(shard));
      }
      SW_TRY_ASSIGN(extent, CheckedAdd(extent, shard[params.dim]));
    }
    if (count < 1 || static_cast<std::uint64_t>(count) > extent ||
        extent % static_cast<std::uint64_t>(count) != 0) {
      return Fail(Errc::kBadInput, extent, " elements along dimension ", params.dim,
                  " do not divide into ", count, " equal sub-parameters");
    }
    rule.sub_sizes.assign(static_cast<std::size_t>(count),
                          extent / static_cast<std::uint64_t>(count));
  }
  if (version > kNewestVersion - 0.001) {
    const auto widths = sub_widths.find(sub.text(expression));
    if (widths == sub_widths.end() || widths->second.size() != rule.sub_sizes.size()) {
      return Fail(Errc::kBadInput, "sub_param_shard_widths lacks \"", sub.text(expression),
                  "\" or lists a different number of sub-parameters for it");
    }
    rule.widths = widths->second;
    for (const auto& row_of : rule.widths) {
      if (row_of.size() == shards.size()) continue;
      return Fail(Errc::kBadInput, "sub_param_shard_widths of \"", sub.text(expression),
                  "\" are for ", row_of.size(), " ranks, the checkpoint has ", shards.size());
    }
  }
  SW_TRY_ASSIGN(std::uint64_t left, ElemsOfAll(shards));
  const std::uint64_t all = left;
  std::uint64_t known = 1;
  std::optional<std::size_t> rest;
  for (std::size_t dim = 0; dim < params.shape.size(); ++dim) {
    std::uint64_t extent = 0;
    if (dim == params.dim) {
      for (std::uint64_t size : rule.sub_sizes) {
        SW_TRY_ASSIGN(extent, CheckedAdd(extent, size));
      }
    } else if (const auto* sizes_of = std::get_if<std::vector<std::uint64_t>>(&params.shape[dim])) {
      for (std::uint64_t size : *sizes_of) {
        SW_TRY_ASSIGN(extent, CheckedAdd(extent, size));
      }
    } else if (const std::int64_t size = std::get<std::int64_t>(params.shape[dim]); size >= 0) {
      extent = static_cast<std::uint64_t>(size);
    } else if (rest) {
      return Fail(Errc::kBadInput, "shape: more than one entry is -1");
    } else {
      rest = dim;
      rule.view.push_back(0);
      continue;
    }
    rule.view.push_back(extent);
    SW_TRY_ASSIGN(known, CheckedMul(known, extent));
  }
  if (rest) {
    if (known == 0 || all % known != 0) {
      return Fail(Errc::kBadInput, "shape: ", all, " elements are not divisible by ", known);
    }
    rule.view[*rest] = all / known;
  } else if (known != all) {
    return Fail(Errc::kBadInput, "shape: the view ", ToString(rule.view), " does not have ", all,
                " elements");
  }
  SW_TRY_ASSIGN(ruled.whole, layout::WholeShape(rule, Copy(shards)));
  if (rule.view == ruled.whole) rule.view.clear();
  SW_TRY(layout::RuleWidths(rule, ruled.whole, shards.size()));
  if (rule.view.empty() && rule.sub_sizes.size() == 1) {
    rule.split = Split::kDim;
    rule.sub_sizes.clear();
  }
  return ruled;
}

// Treats rows beyond the original vocabulary as padding. The writer's padding multiple per rank
// is unknown; the reader assumes the largest power of two up to 128 that explains the padding.
Status UniversalInfo::Impl::Vocabulary(Ruled* ruled, std::span<const Shape> shards) const {
  SplitRule& rule = ruled->rule;
  const std::uint64_t rows = ruled->whole.empty() ? 0 : ruled->whole.front();
  if (original_vocab == 0) {
    return Fail(Errc::kBadInput,
                "the parameter is a vocabulary, but original_vocab_size is missing");
  }
  if (rows < original_vocab) {
    return Fail(Errc::kBadInput, "the vocabulary has ", rows, " rows, but original_vocab_size is ",
                original_vocab);
  }
  if (rows == original_vocab && (rule.split != Split::kDim || (autotp && maps.empty()))) return {};
  const bool equal = std::all_of(shards.begin(), shards.end(),
                                 [&](const Shape& shard) { return shard == shards.front(); });
  if (rule.split != Split::kDim || rule.dim != 0 || !equal) {
    if (rows == original_vocab) return {};
    return Fail(Errc::kUnsupported,
                "a padded vocabulary must be sharded into equal numbers of rows, found ",
                layout::Explain(rule));
  }
  rule.padded = true;
  rule.granule = {1};
  rule.widths = {std::vector<std::uint64_t>(shards.size(), shards.front().front())};
  for (std::uint64_t multiple = 128; multiple > 1; multiple /= 2) {
    if (RoundUp(original_vocab, multiple * shards.size()) == rows) {
      rule.granule = {multiple};
      break;
    }
  }
  ruled->whole.front() = original_vocab;
  return {};
}

/// Returns true if any two shapes differ.
bool AnyDiffers(std::span<const Shape> shards) {
  return std::adjacent_find(shards.begin(), shards.end(), std::not_equal_to<>()) != shards.end();
}

Result<std::optional<Ruled>> UniversalInfo::Impl::Category(const std::string& name,
                                                           std::span<const Shape> shards) const {
  SW_TRY_ASSIGN(const auto is_vocabulary,
                MatchOne(vocabulary, "vocabulary_parameter_patterns", name));
  SW_TRY_ASSIGN(const auto is_replicated,
                MatchOne(replicated, "tp_replicated_parameter_patterns", name));
  SW_TRY_ASSIGN(const auto is_average, MatchOne(average, "parameter_to_average_patterns", name));
  SW_TRY_ASSIGN(const auto is_two,
                MatchOne(two_sub, "parameter_with_2_sub_params_cat_dim_0", name));
  SW_TRY_ASSIGN(const auto is_row, MatchOne(row, "parameter_with_row_parallelism_patterns", name));
  const std::vector<std::uint32_t> is_sub = sub.Match(name);
  Ruled ruled;
  if (is_replicated || is_average) {
    ruled.rule.split = is_replicated ? Split::kReplicated : Split::kAverage;
    SW_TRY_ASSIGN(ruled.whole, layout::WholeShape(ruled.rule, Copy(shards)));
  } else if (is_two) {
    SW_TRY_ASSIGN(ruled, TwoSubs(shards));
  } else if (!is_sub.empty()) {
    SW_TRY_ASSIGN(ruled, Subs(is_sub.front(), shards));
  } else if (is_row || is_vocabulary ||
             (shards.size() > 1 && (cuts_others || AnyDiffers(shards)))) {
    ruled.rule.split = Split::kDim;
    ruled.rule.dim = is_row ? 1 : 0;
    SW_TRY_ASSIGN(ruled.whole, layout::WholeShape(ruled.rule, Copy(shards)));
    ruled.rule.widths.resize(1);
    for (const Shape& shard : shards) ruled.rule.widths[0].push_back(shard[ruled.rule.dim]);
  } else {
    return std::nullopt;
  }
  if (is_vocabulary) {
    SW_TRY(Vocabulary(&ruled, shards));
  }
  return ruled;
}

Result<std::optional<Ruled>> UniversalInfo::RuleFor(const std::string& name,
                                                    std::span<const Shape> shards) const {
  SW_CHECK(!shards.empty());
  if (!impl_->says_anything) return std::nullopt;
  const std::string where = std::string(kOrigin) + ": \"" + name + "\"";
  const std::vector<std::uint32_t> refused = impl_->unsupported.Match(name);
  if (!refused.empty()) {
    return Fail(Errc::kUnsupported, where, ": ", impl_->reasons[refused.front()]);
  }
  if (shards.size() > 1) {
    const auto map = impl_->MatchOne(impl_->affine, "affine_map", name);
    if (!map) return Within(where, map.error());
    if (*map) {
      Result<Ruled> ruled = RuleFromAffine(impl_->maps[**map], shards);
      if (!ruled) return Within(where + ": affine_map", ruled.error());
      ruled->rule.origin = kOrigin;
      return *std::move(ruled);
    }
  }
  Result<std::optional<Ruled>> ruled = impl_->Category(name, shards);
  if (!ruled) return Within(where, ruled.error());
  if (*ruled) (*ruled)->rule.origin = kOrigin;
  return ruled;
}

}  // namespace shardwright::checkpoints
