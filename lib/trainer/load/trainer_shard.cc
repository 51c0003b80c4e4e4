// SPDX-License-Identifier: Apache-2.0
#include "trainer/load/trainer_shard.h"

#include <memory>
#include <optional>
#include <span>
#include <utility>

#include <nlohmann/json.hpp>

#include "engine/layout/mesh_cut.h"
#include "support/base/text.h"

namespace shardwright::trainer {
namespace {

using nlohmann::json;

Result<std::vector<std::uint64_t>> Counts(const json& object, const char* key) {
  std::vector<std::uint64_t> out;
  const auto found = object.find(key);
  if (found == object.end() || !found->is_array()) {
    return Fail(Errc::kUsage, key, ": a list of numbers expected");
  }
  for (const json& one : *found) {
    if (!one.is_number_unsigned()) {
      return Fail(Errc::kUsage, key, ": a non-negative number expected");
    }
    out.push_back(one.get<std::uint64_t>());
  }
  return out;
}

Result<std::string> TextOf(const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_string()) {
    return Fail(Errc::kUsage, key, ": a text expected");
  }
  return found->get<std::string>();
}

Result<layout::MeshSplit> SplitOf(const json& split) {
  const auto number = [&](std::size_t i) {
    return i < split.size() && split[i].is_number_unsigned()
               ? std::optional(split[i].get<std::uint64_t>())
               : std::nullopt;
  };
  const std::string kind = split.is_array() && !split.empty() && split[0].is_string()
                               ? split[0].get<std::string>()
                               : std::string();
  if (kind == "replicate") return layout::MeshSplit::Replicate();
  if (kind == "shard" && number(1)) {
    return layout::MeshSplit::Shard(static_cast<std::uint32_t>(*number(1)));
  }
  if (kind == "strided" && number(1) && number(2)) {
    return layout::MeshSplit::StridedShard(static_cast<std::uint32_t>(*number(1)), *number(2));
  }
  return Fail(Errc::kUnsupported, "placement ", split.dump(), " is not supported");
}

/// Makes the cut with elements [first, first + count) of the flattened tensor.
Result<layout::Cut> RangeOf(const Shape& shape, std::uint64_t first, std::uint64_t count) {
  const std::uint64_t elems = Elems(shape);
  if (first > elems || count > elems - first) {
    return Fail(Errc::kBadInput, "elements [", first, ", ", first + count,
                ") do not exist, the tensor has ", elems);
  }
  std::vector<layout::Box> boxes;
  if (count > 0) boxes.push_back({{first}, {0}, {count}});
  return layout::Cut::Make({elems}, {count}, std::move(boxes));
}

Result<layout::Cut> BoxOf(const Shape& shape, const layout::Piece& box) {
  if (box.sizes == shape) return layout::Cut::Whole(shape);
  return layout::CutOf(shape, box);
}

Result<layout::Cut> CutOf(const Shape& shape, const json& object) {
  if (object.contains("first")) {
    if (!object["first"].is_number_unsigned() || !object.contains("count") ||
        !object["count"].is_number_unsigned()) {
      return Fail(Errc::kUsage, "first, count: numbers expected");
    }
    const auto first = object["first"].get<std::uint64_t>();
    const auto count = object["count"].get<std::uint64_t>();
    // Use one form for whole tensors, so that ranks with the same elements are recognized.
    if (first == 0 && count == Elems(shape)) return layout::Cut::Whole(shape);
    return RangeOf(shape, first, count);
  }
  if (object.contains("offset")) {
    layout::Piece box;
    SW_TRY_ASSIGN(box.offset, Counts(object, "offset"));
    SW_TRY_ASSIGN(box.sizes, Counts(object, "sizes"));
    return BoxOf(shape, box);
  }
  if (!object.contains("mesh")) return layout::Cut::Whole(shape);
  SW_TRY_ASSIGN(const std::vector<std::uint64_t> sizes, Counts(object, "mesh"));
  SW_TRY_ASSIGN(const std::vector<std::uint64_t> coordinate, Counts(object, "coordinate"));
  std::vector<layout::MeshSplit> splits;
  for (const json& split : object.value("splits", json::array())) {
    SW_TRY_ASSIGN(const layout::MeshSplit one, SplitOf(split));
    splits.push_back(one);
  }
  SW_TRY_ASSIGN(
      const layout::Piece piece,
      layout::PieceAt(shape, sizes, std::span<const layout::MeshSplit>(splits), coordinate));
  return BoxOf(shape, piece);
}

Result<TrainerShard> HeldOf(const json& object) {
  TrainerShard held;
  if (!object.is_object()) return Fail(Errc::kUsage, "an object expected for each tensor");
  SW_TRY_ASSIGN(held.name, TextOf(object, "name"));
  SW_TRY_ASSIGN(held.kind, TextOf(object, "kind"));
  SW_TRY_ASSIGN(const std::string dtype, TextOf(object, "dtype"));
  const std::optional<DType> known = DTypeFromName(dtype);
  if (!known) {
    return Fail(Errc::kUnsupported, Label(held), ": element type ", dtype, " is not supported");
  }
  held.dtype = *known;
  Result<std::vector<std::uint64_t>> shape = Counts(object, "shape");
  if (!shape) return Within(Label(held), std::move(shape).error());
  held.shape = *std::move(shape);
  SW_TRY(CountElems(held.shape));
  Result<layout::Cut> cut = CutOf(held.shape, object);
  if (!cut) return Within(Label(held) + " " + ToString(held.shape), std::move(cut).error());
  held.cut = std::make_shared<const layout::Cut>(*std::move(cut));
  return held;
}

}  // namespace

json ToJson(const TrainerShard& held) {
  const layout::Cut& cut = *held.cut;
  json object = {
      {"name", held.name}, {"kind", held.kind}, {"shape", held.shape}, {"dtype", Name(held.dtype)}};
  if (cut.is_whole()) return object;
  if (cut.view() == held.shape && cut.view().size() == cut.shard().size()) {
    const bool empty = cut.boxes().empty();
    object["offset"] =
        empty ? std::vector<std::uint64_t>(cut.view().size()) : cut.boxes()[0].at_view;
    object["sizes"] = cut.shard();
  } else {
    object["first"] = cut.boxes().empty() ? 0 : cut.boxes()[0].at_view[0];
    object["count"] = cut.shard_elems();
  }
  return object;
}

std::string Label(const TrainerShard& held) {
  return Quoted(held.name) + (held.kind == kParam ? "" : " " + held.kind);
}

Result<std::vector<TrainerShard>> ParseShards(const json& list) {
  if (!list.is_array()) return Fail(Errc::kUsage, "a list of tensors expected");
  std::vector<TrainerShard> out;
  out.reserve(list.size());
  for (const json& object : list) {
    SW_TRY_ASSIGN(TrainerShard held, HeldOf(object));
    out.push_back(std::move(held));
  }
  return out;
}

}  // namespace shardwright::trainer
