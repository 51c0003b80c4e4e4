// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/dtensor/flat_units_internal.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <unordered_map>

#include "support/base/checked.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::dtensor {
namespace {

/// Returns the name up to and including the number of its block. Empty outside of blocks.
std::string_view BlockOf(std::string_view name, BlockIndex index) {
  std::string_view block;
  for (std::size_t at = 0; at < name.size();) {
    const std::size_t dot = std::min(name.find('.', at), name.size());
    const std::string_view word = name.substr(at, dot - at);
    const bool number = !word.empty() && std::all_of(word.begin(), word.end(),
                                                     [](char c) { return c >= '0' && c <= '9'; });
    // The last component is the name of the parameter itself.
    if (number && dot < name.size()) {
      block = name.substr(0, dot);
      if (index == BlockIndex::kFirst) break;
    }
    at = dot + 1;
  }
  return block;
}

bool Fit(const std::vector<FlatUnit>& units, const std::vector<std::uint64_t>& lengths,
         std::uint64_t shards) {
  return std::equal(units.begin(), units.end(), lengths.begin(), lengths.end(),
                    [&](const FlatUnit& unit, std::uint64_t length) {
                      return CeilDiv(unit.elems, shards) == length;
                    });
}

bool SameParams(const std::vector<FlatUnit>& a, const std::vector<FlatUnit>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const FlatUnit& x, const FlatUnit& y) { return x.params == y.params; });
}

}  // namespace

std::vector<FlatUnit> UnitsOf(const std::vector<std::string>& names,
                              const std::vector<Shape>& shapes, BlockIndex index) {
  std::vector<FlatUnit> units(1);
  std::unordered_map<std::string_view, std::size_t> known = {{"", 0}};
  for (std::uint32_t i = 0; i < names.size(); ++i) {
    const auto [at, fresh] = known.emplace(BlockOf(names[i], index), units.size());
    if (fresh) units.emplace_back();
    FlatUnit& unit = units[at->second];
    unit.params.push_back(i);
    unit.offsets.push_back(unit.elems);
    unit.elems += Elems(shapes[i]);
  }
  if (units.front().params.empty()) units.erase(units.begin());
  return units;
}

Result<FoundUnits> UnitsOfLengths(const std::vector<std::string>& names,
                                  const std::vector<Shape>& shapes,
                                  const std::vector<std::uint64_t>& lengths, std::uint64_t shards) {
  std::vector<FlatUnit> first = UnitsOf(names, shapes, BlockIndex::kFirst);
  std::vector<FlatUnit> last = UnitsOf(names, shapes, BlockIndex::kLast);
  const bool first_fits = Fit(first, lengths, shards);
  const bool last_fits = Fit(last, lengths, shards);
  if (first_fits && last_fits && !SameParams(first, last)) {
    return Fail(Errc::kUnsupported,
                "the flat vectors of the optimizer fit two ways to group the parameters");
  }
  if (first_fits) return FoundUnits{std::move(first), BlockIndex::kFirst};
  if (last_fits) return FoundUnits{std::move(last), BlockIndex::kLast};
  return Fail(Errc::kUnsupported, "the optimizer has ", Plural(lengths.size(), "flat vector"),
              " with lengths that fit no grouping of the model's parameters into a root and "
              "blocks (",
              Plural(first.size(), "unit"), ")");
}

}  // namespace shardwright::checkpoints::dtensor
