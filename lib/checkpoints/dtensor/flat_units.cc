// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/dtensor/flat_units_internal.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "support/base/checked.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::dtensor {
namespace {

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

std::vector<FlatUnit> UnitsOf(std::span<const std::string_view> names,
                              std::span<const Shape> shapes, BlockIndex index) {
  std::vector<FlatUnit> units;
  for (std::vector<std::uint32_t>& params : UnitParams(names, index)) {
    FlatUnit& unit = units.emplace_back();
    for (const std::uint32_t one : params) {
      unit.offsets.push_back(unit.elems);
      unit.elems += Elems(shapes[one]);
    }
    unit.params = std::move(params);
  }
  return units;
}

Result<FoundUnits> UnitsOfLengths(std::span<const std::string_view> names,
                                  std::span<const Shape> shapes,
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
