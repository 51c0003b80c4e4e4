// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>
#include <utility>

#include "placement/affinity/affinity.h"
#include "support/base/limits.h"
#include "support/base/text.h"
#include "support/json/json.h"
#include "support/os/dir.h"
#include "token_counts/trace.h"

namespace shardwright::placement {

using json::Json;

namespace {

/// Shape that a file must have.
struct AffinityShape {
  std::string path;
  std::span<const std::uint32_t> recorded;  ///< numbers of the layers
  std::uint32_t experts = 0;

  std::size_t pairs() const { return recorded.size() - 1; }
  std::string Pair(std::size_t pair) const {
    return StrCat(path, ": layer ", recorded[pair], " to ", recorded[pair + 1]);
  }
};

/// Transitions of all pairs of consecutive layers in a file.
using FilePairs = std::vector<std::vector<std::uint64_t>>;

tl::unexpected<Error> WrongLength(const std::string& where, std::size_t wanted,
                                  const std::string& each, const Json& found) {
  return Fail(Errc::kBadInput, where, ": expected a list of ", wanted, ", ", each, ", found ",
              found.is_array() ? StrCat("a list of ", found.size()) : json::KindOf(found));
}

bool IsListOf(const Json& list, std::size_t size) { return list.is_array() && list.size() == size; }

/// Reads the counts of one pair of layers.
Result<std::vector<std::uint64_t>> ReadPair(const Json& rows, std::size_t pair,
                                            const AffinityShape& shape) {
  const std::string where = shape.Pair(pair);
  if (!IsListOf(rows, shape.experts)) {
    return WrongLength(where, shape.experts,
                       StrCat("one for each expert of layer ", shape.recorded[pair]), rows);
  }
  std::vector<std::uint64_t> counts;
  counts.reserve(std::size_t{shape.experts} * shape.experts);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Json& row = rows[i];
    if (!IsListOf(row, shape.experts)) {
      return WrongLength(StrCat(where, ": expert ", i), shape.experts,
                         StrCat("one for each expert of layer ", shape.recorded[pair + 1]), row);
    }
    for (std::size_t j = 0; j < row.size(); ++j) {
      const Json& value = row[j];
      // Handles plain counts first, without building the place for messages.
      if (value.is_number_unsigned() && value.get<std::uint64_t>() <= limits::kMoeTokens) {
        counts.push_back(value.get<std::uint64_t>());
        continue;
      }
      SW_TRY_ASSIGN(const std::uint64_t count,
                    json::WholeOf(value, 0, limits::kMoeTokens,
                                  StrCat(where, ": expert ", i, " to expert ", j)));
      counts.push_back(count);
    }
  }
  return counts;
}

Result<FilePairs> ReadLists(const AffinityShape& shape) {
  SW_TRY_ASSIGN(const std::string text, os::ReadWholeText(shape.path, limits::kJsonBytes));
  SW_TRY_ASSIGN(const Json root, json::Parse(text, shape.path));
  if (!IsListOf(root, shape.pairs())) {
    return WrongLength(
        shape.path, shape.pairs(),
        StrCat("one for each two consecutive layers of the ", shape.recorded.size(), " layers"),
        root);
  }
  FilePairs pairs;
  for (std::size_t p = 0; p < root.size(); ++p) {
    SW_TRY_ASSIGN(auto pair, ReadPair(root[p], p, shape));
    pairs.push_back(std::move(pair));
  }
  return pairs;
}

/// Reads an array, which has the shape of token counts: [steps, layers, experts].
Result<FilePairs> ReadArray(const AffinityShape& shape) {
  SW_TRY_ASSIGN(token_counts::TokenTrace array, token_counts::ReadLoads(shape.path));
  const std::size_t pairs = array.records.size();
  if (array.first_sums != 1 || pairs != shape.pairs() || array.experts != shape.experts ||
      array.layer_id.size() != shape.experts) {
    return Fail(
        Errc::kBadInput, shape.path, ": expected the shape [", shape.pairs(), ", ", shape.experts,
        ", ", shape.experts, "] (pairs of consecutive layers, experts, experts), found [",
        array.first_sums - 1 + pairs, ", ", array.layer_id.size(), ", ", array.experts, "]");
  }
  FilePairs found;
  for (auto& record : array.records) found.push_back(std::move(record.tokens));
  return found;
}

/// Checks that no sum of the counts overflows, and that there are any.
Status CheckSum(const FilePairs& pairs, const AffinityShape& shape) {
  std::uint64_t sum = 0;
  for (std::size_t p = 0; p < pairs.size(); ++p) {
    for (const std::uint64_t count : pairs[p]) {
      if (count <= limits::kMoeTokens - sum) {
        sum += count;
        continue;
      }
      return Fail(Errc::kBadInput, shape.Pair(p), ": the file has more than ", limits::kMoeTokens,
                  " transitions");
    }
  }
  if (sum > 0) return {};
  return Fail(Errc::kBadInput, shape.path, ": contains no transitions: all counts are 0");
}

/// Returns the position of a pair of layers in the file.
std::optional<std::size_t> PairAt(std::span<const std::uint32_t> recorded, std::uint32_t layer,
                                  std::uint32_t next) {
  const auto at = std::ranges::find(recorded, layer);
  if (at == recorded.end() || at + 1 == recorded.end() || *(at + 1) != next) return std::nullopt;
  return static_cast<std::size_t>(at - recorded.begin());
}

}  // namespace

Result<Affinity> ReadAffinity(const std::string& path, std::span<const std::uint32_t> recorded,
                              std::span<const std::uint32_t> planned, std::uint32_t experts) {
  bool any = false;
  for (std::size_t l = 1; l < planned.size(); ++l) {
    any = any || PairAt(recorded, planned[l - 1], planned[l]).has_value();
  }
  if (!any) {
    return Fail(Errc::kUsage, "--affinity requires two consecutive layers, found ",
                Plural(planned.size(), "layer"), " to plan",
                planned.size() > 1 ? ", none of which follows another" : "");
  }
  const AffinityShape shape{path, recorded, experts};
  const std::uint64_t cells = std::uint64_t{experts} * experts;
  if (cells > limits::kMoeCounts / shape.pairs()) {
    return Fail(Errc::kLimit, path, ": ", shape.pairs(), " pairs of layers of ", experts,
                " experts: at most ", limits::kMoeCounts, " counts");
  }
  const bool array = path.ends_with(".npy") || path.ends_with(".pt") || path.ends_with(".pth");
  SW_TRY_ASSIGN(FilePairs pairs, array ? ReadArray(shape) : ReadLists(shape));
  SW_TRY(CheckSum(pairs, shape));
  Affinity affinity;
  affinity.experts = experts;
  for (std::size_t l = 1; l < planned.size(); ++l) {
    const auto at = PairAt(recorded, planned[l - 1], planned[l]);
    affinity.pairs.push_back(at ? std::move(pairs[*at]) : std::vector<std::uint64_t>());
  }
  return affinity;
}

}  // namespace shardwright::placement
