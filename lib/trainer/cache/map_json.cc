// SPDX-License-Identifier: Apache-2.0
#include "trainer/cache/map_json.h"

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <nlohmann/json.hpp>

namespace shardwright::cache {
namespace {

using layout::Cut;
using layout::CutPtr;
using nlohmann::json;

constexpr int kCutDepth = 32;

json CutJson(const Cut& cut) {
  if (cut.is_whole()) return {{"whole", cut.view()}};
  if (cut.is_composed()) return {{"outer", CutJson(cut.outer())}, {"inner", CutJson(cut.inner())}};
  json boxes = json::array();
  for (const layout::Box& box : cut.boxes()) {
    boxes.push_back(json::array({box.at_view, box.at_shard, box.sizes}));
  }
  return {{"view", cut.view()},
          {"shard", cut.shard()},
          {"boxes", std::move(boxes)},
          {"axes", cut.axes()}};
}

/// Parses the output of ToJson. nlohmann throws if a value has another type.
Result<CutPtr> CutOf(const json& object, int depth) {
  if (depth > kCutDepth) return Fail(Errc::kBadInput, "a shard definition is nested too deeply");
  if (object.contains("whole")) {
    const Shape shape = object.at("whole").get<Shape>();
    SW_TRY(CountElems(shape));
    return std::make_shared<const Cut>(Cut::Whole(shape));
  }
  if (object.contains("outer")) {
    SW_TRY_ASSIGN(CutPtr outer, CutOf(object.at("outer"), depth + 1));
    SW_TRY_ASSIGN(CutPtr inner, CutOf(object.at("inner"), depth + 1));
    SW_TRY_ASSIGN(const std::uint64_t elems, CountElems(inner->view()));
    if (elems != outer->shard_elems()) {
      return Fail(Errc::kBadInput, "the parts of a nested shard definition do not fit together");
    }
    return Cut::Compose(std::move(outer), std::move(inner));
  }
  std::vector<layout::Box> boxes;
  for (const json& box : object.at("boxes")) {
    boxes.push_back({box.at(0), box.at(1), box.at(2)});
  }
  SW_TRY_ASSIGN(Cut cut, Cut::Make(object.at("view").get<Shape>(), object.at("shard").get<Shape>(),
                                   std::move(boxes), object.at("axes")));
  return std::make_shared<const Cut>(std::move(cut));
}

Result<DType> TypeOf(const json& name) {
  const std::optional<DType> type = DTypeFromName(name.get<std::string>());
  if (type) return *type;
  return Fail(Errc::kBadInput, "unknown element type ", name.dump());
}

class Reading {
 public:
  Reading(const json& from, const std::vector<std::uint64_t>& file_bytes)
      : from_(from), file_bytes_(file_bytes) {}

  Result<layout::ShardMap> Run() {
    for (const json& file : from_.at("files")) map_.files.push_back(file);
    if (map_.files.size() != file_bytes_.size()) {
      return Fail(Errc::kBadInput, "expected ", file_bytes_.size(), " files, found ",
                  map_.files.size());
    }
    SW_TRY(Members());
    SW_TRY(Arrays());
    for (const json& cut : from_.at("cuts")) {
      SW_TRY_ASSIGN(cuts_.emplace_back(), CutOf(cut, 0));
    }
    SW_TRY(Tensors());
    return std::move(map_);
  }

 private:
  Status Members() {
    for (const json& one : from_.at("members")) {
      layout::Member member;
      member.file = one.at(0);
      member.offset = one.at(1);
      member.bytes = one.at(2);
      const bool known = member.file < file_bytes_.size();
      const std::uint64_t bytes = known ? file_bytes_[member.file] : 0;
      if (!known || member.offset > bytes || member.bytes > bytes - member.offset) {
        return Fail(Errc::kBadInput, "a member is outside its file");
      }
      map_.members.push_back(std::move(member));
    }
    return {};
  }

  Status Arrays() {
    for (const json& one : from_.at("arrays")) {
      layout::Array array;
      SW_TRY_ASSIGN(array.dtype, TypeOf(one.at(0)));
      for (const json& region : one.at(1)) {
        array.regions.push_back({region.at(0), region.at(1), region.at(2)});
        if (array.regions.back().member >= map_.members.size()) {
          return Fail(Errc::kBadInput, "an array refers to a member that does not exist");
        }
      }
      map_.arrays.push_back(std::move(array));
    }
    return {};
  }

  Status Tensors() {
    for (const json& one : from_.at("tensors")) {
      layout::LogicalTensor tensor;
      tensor.name = one.at("name");
      tensor.state = one.at("state");
      SW_TRY_ASSIGN(tensor.dtype, TypeOf(one.at("dtype")));
      tensor.shape = one.at("shape").get<Shape>();
      SW_TRY(CountElems(tensor.shape));
      for (const json& part : one.at("fragments")) {
        layout::Fragment fragment;
        const std::size_t cut = part.at(0);
        const int role = part.at(1);
        fragment.at = {part.at(2), part.at(3), part.at(4), part.at(5)};
        if (cut >= cuts_.size() || fragment.at.array >= map_.arrays.size() || role < 0 ||
            role > static_cast<int>(layout::Role::kPartial) || fragment.at.chunk == 0) {
          return Fail(Errc::kBadInput, "a fragment refers to elements that do not exist");
        }
        fragment.cut = cuts_[cut];
        fragment.role = static_cast<layout::Role>(role);
        tensor.fragments.push_back(std::move(fragment));
      }
      map_.tensors.push_back(std::move(tensor));
    }
    return {};
  }

  const json& from_;
  const std::vector<std::uint64_t>& file_bytes_;
  layout::ShardMap map_;
  std::vector<CutPtr> cuts_;
};

}  // namespace

json ToJson(const layout::ShardMap& map) {
  json members = json::array();
  for (const layout::Member& one : map.members) {
    members.push_back(json::array({one.file, one.offset, one.bytes}));
  }
  json arrays = json::array();
  for (const layout::Array& one : map.arrays) {
    json regions = json::array();
    for (const layout::Region& region : one.regions) {
      regions.push_back(json::array({region.member, region.offset, region.elems}));
    }
    arrays.push_back(json::array({Name(one.dtype), std::move(regions)}));
  }
  json cuts = json::array();
  std::map<const Cut*, std::size_t> numbers;
  json tensors = json::array();
  for (const layout::LogicalTensor& one : map.tensors) {
    json fragments = json::array();
    for (const layout::Fragment& fragment : one.fragments) {
      const auto [number, fresh] = numbers.try_emplace(fragment.cut.get(), cuts.size());
      if (fresh) cuts.push_back(CutJson(*fragment.cut));
      fragments.push_back(
          json::array({number->second, static_cast<int>(fragment.role), fragment.at.array,
                       fragment.at.vector_offset, fragment.at.chunk, fragment.at.region_offset}));
    }
    tensors.push_back({{"name", one.name},
                       {"state", one.state},
                       {"dtype", Name(one.dtype)},
                       {"shape", one.shape},
                       {"fragments", std::move(fragments)}});
  }
  return {{"files", map.files},
          {"members", std::move(members)},
          {"arrays", std::move(arrays)},
          {"cuts", std::move(cuts)},
          {"tensors", std::move(tensors)}};
}

Result<layout::ShardMap> ParseMap(const nlohmann::json& json,
                                  const std::vector<std::uint64_t>& file_bytes) {
  try {
    return Reading(json, file_bytes).Run();
  } catch (const nlohmann::json::exception& error) {
    return Fail(Errc::kBadInput, error.what());
  }
}

}  // namespace shardwright::cache
