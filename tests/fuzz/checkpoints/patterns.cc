// SPDX-License-Identifier: Apache-2.0
// Any bytes as a pattern file. The parser rejects a rule, or the rule must cut every tensor it fits
// into shards that reassemble to the whole tensor.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoints/tp_rules/patterns.h"
#include "engine/layout/rule.h"
#include "engine/tensor/shape.h"
#include "support/base/result.h"

using shardwright::Errc;
using shardwright::Result;
using shardwright::Shape;
using shardwright::Status;
using shardwright::checkpoints::Patterns;
namespace layout = shardwright::layout;

namespace {

const std::vector<std::string> kNames = {"model.embed_tokens.weight", "h.0.attn.c_attn.bias", "a",
                                         "layers.0.self_attn.q_proj.weight"};
const std::vector<Shape> kShapes = {{96, 8}, {24}, {5, 3, 2}, {16, 8}};
constexpr std::uint64_t kRanks = 4;

bool Refused(const shardwright::Error& error) {
  return error.code == Errc::kBadInput || error.code == Errc::kUnsupported ||
         error.code == Errc::kLimit;
}

void CheckWidths(const layout::SplitRule& rule, const Shape& whole) {
  const auto widths = layout::RuleWidths(rule, whole, kRanks);
  if (!widths) {
    SW_CHECK(Refused(widths.error()));
    return;
  }
  const Shape& cut = rule.split == layout::Split::kSub && !rule.view.empty() ? rule.view : whole;
  std::uint64_t sum = 0;
  for (const std::vector<std::uint64_t>& sub : *widths) {
    SW_CHECK(sub.size() == kRanks);
    for (const std::uint64_t width : sub) sum += width;
  }
  SW_CHECK(widths->empty() || rule.padded || sum == cut[rule.dim]);
  for (std::uint64_t rank = 0; rank < kRanks; ++rank) {
    const Result<layout::Cut> made = layout::MakeCut(rule, whole, kRanks, rank);
    SW_CHECK(made || Refused(made.error()));
    const Result<Shape> shape = layout::ShardShape(rule, whole, kRanks, rank);
    SW_CHECK(shape || Refused(shape.error()));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size_bytes) {
  Patterns patterns;
  const Status added =
      patterns.AddFile(std::string_view(reinterpret_cast<const char*>(data), size_bytes), "fuzz");
  if (!added) {
    SW_CHECK(Refused(added.error()));
    return 0;
  }
  const Patterns model = patterns.ForModel(kNames, kShapes);
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (const auto rule = model.Find(kNames[i], kShapes[i])) CheckWidths(*rule, kShapes[i]);
    for (const std::size_t shards : {std::size_t{1}, std::size_t{2}, std::size_t{3}}) {
      const auto ruled = model.RuleFor(kNames[i], std::vector<Shape>(shards, kShapes[i]));
      SW_CHECK(ruled || Refused(ruled.error()));
      if (ruled && *ruled) CheckWidths((*ruled)->rule, (*ruled)->whole);
    }
  }
  return 0;
}
