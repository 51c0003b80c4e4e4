// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/deepspeed/common/file_name.h"

#include <charconv>

namespace shardwright::checkpoints {
namespace {

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

/// Reads a name from left to right. After a failed step all further steps fail.
class Scanner {
 public:
  explicit Scanner(std::string_view text) : rest_(text) {}

  bool Take(std::string_view word) {
    if (!rest_.starts_with(word)) return false;
    rest_.remove_prefix(word.size());
    return true;
  }

  bool Number(std::uint64_t* value, std::size_t min_digits = 1) {
    std::size_t digits = 0;
    while (digits < rest_.size() && IsDigit(rest_[digits])) ++digits;
    if (digits < min_digits) return false;
    if (std::from_chars(rest_.data(), rest_.data() + digits, *value).ec != std::errc())
      return false;
    rest_.remove_prefix(digits);
    return true;
  }

  /// Reads the text before `end`, which must be the end of the name.
  bool UpTo(std::string_view end, std::string* text) {
    if (!rest_.ends_with(end)) return false;
    *text = rest_.substr(0, rest_.size() - end.size());
    rest_ = {};
    return true;
  }

  bool Done() const { return rest_.empty(); }

 private:
  std::string_view rest_;
};

constexpr std::string_view kModelEnd = "_model_states.pt";

bool ParseModel(Scanner scan, FileName* out) {
  out->role = FileRole::kModel;
  return scan.Take("mp_rank_") && scan.Number(&out->mp, 2) && scan.Take(kModelEnd) && scan.Done();
}

bool ParseRanked(Scanner scan, FileName* out) {
  if (scan.Take("bf16_")) {
    out->prefix = "bf16_";
  } else if (scan.Take("fp16_")) {
    out->prefix = "fp16_";
  }
  if (!scan.Take("zero_pp_rank_") || !scan.Number(&out->rank) || !scan.Take("_mp_rank_") ||
      !scan.Number(&out->mp, 2)) {
    return false;
  }
  out->role = FileRole::kShard;
  if (scan.Take("optim_states.pt")) {
    out->old_style = true;
    return scan.Done();
  }
  if (scan.Take("_optim_states.pt")) return scan.Done();
  out->role = FileRole::kModelZero3;
  return out->prefix.empty() && scan.Take(kModelEnd) && scan.Done();
}

bool ParseLayer(Scanner scan, FileName* out) {
  out->role = FileRole::kLayer;
  if (!scan.Take("layer_") || !scan.Number(&out->layer, 2) || !scan.Take("-")) return false;
  if (scan.Take("model_states.pt")) return scan.Done();
  return scan.UpTo("-model_states.pt", &out->axes) && !out->axes.empty();
}

bool ParseExpert(Scanner scan, FileName* out) {
  out->role = FileRole::kExpert;
  if (scan.Take("layer_")) {
    if (!scan.Number(&out->layer) || !scan.Take("_")) return false;
  } else {
    out->old_style = true;
  }
  return scan.Take("expert_") && scan.Number(&out->expert) && scan.Take("_mp_rank_") &&
         scan.Number(&out->mp, 2) && scan.Take(kModelEnd) && scan.Done();
}

bool ParseExpertOptim(Scanner scan, FileName* out) {
  out->role = FileRole::kExpertOptim;
  return scan.Take("expp_rank_") && scan.Number(&out->rank) && scan.Take("_mp_rank_") &&
         scan.Number(&out->mp, 2) && scan.Take("_optim_states.pt") && scan.Done();
}

}  // namespace

std::optional<FileName> ParseFileName(std::string_view name) {
  for (const auto parse : {ParseModel, ParseRanked, ParseLayer, ParseExpert, ParseExpertOptim}) {
    FileName out;
    if (parse(Scanner(name), &out)) return out;
  }
  return std::nullopt;
}

}  // namespace shardwright::checkpoints
