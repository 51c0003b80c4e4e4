// SPDX-License-Identifier: Apache-2.0
#include "convert/describe.h"

#include <algorithm>
#include <unordered_map>

#include <nlohmann/json.hpp>

#include "checkpoints/deepspeed/common/engine_state.h"
#include "convert/convert.h"
#include "support/base/text.h"
#include "support/os/dir.h"

namespace shardwright::convert {
namespace {

using checkpoints::Checkpoint;
using checkpoints::Param;

/// Limit of slots of a fragment that --explain lists one by one.
constexpr std::size_t kShownRegions = 8;

std::string KindText(const Param& param) {
  if (!param.alias_of.empty()) return "tied to " + param.alias_of;
  if (param.undecided) return param.entry ? "state entry or frozen" : "buffer or frozen";
  if (param.entry) return "state entry";
  switch (param.kind) {
    case checkpoints::ParamKind::kTrainable:
      return "trainable";
    case checkpoints::ParamKind::kFrozen:
      return "frozen";
    case checkpoints::ParamKind::kBuffer:
      return "buffer";
  }
  return "";
}

const std::vector<checkpoints::OpaqueEntry>& OpaqueEntries(const Checkpoint& checkpoint) {
  static const std::vector<checkpoints::OpaqueEntry> kNone;
  const checkpoints::EngineState* state = checkpoints::EngineStateOf(checkpoint);
  return state == nullptr ? kNone : state->entries;
}

/// Formats the type of an entry for people, such as "state entry, dict".
std::string TypeText(const checkpoints::OpaqueEntry& entry) {
  const pickle::Node* value = nullptr;
  for (const auto& one : entry.by_tp) value = value == nullptr ? one.node : value;
  return "state entry, " + pickle::Describe(value);
}

const char* RoleText(layout::Role role) {
  switch (role) {
    case layout::Role::kOwner:
      return "owner";
    case layout::Role::kReplica:
      return "replica";
    case layout::Role::kPartial:
      return "partial";
  }
  return "";
}

std::unordered_map<std::string, std::vector<const layout::LogicalTensor*>> ByName(
    const Checkpoint& checkpoint) {
  std::unordered_map<std::string, std::vector<const layout::LogicalTensor*>> tensors;
  for (const layout::LogicalTensor& tensor : checkpoint.map.tensors)
    tensors[tensor.name].push_back(&tensor);
  return tensors;
}

Result<const Param*> FindParam(const Checkpoint& checkpoint, const std::string& name) {
  std::string near;
  for (const Param& param : checkpoint.params) {
    if (param.name == name) return &param;
    if (near.empty() && param.name.find(name) != std::string::npos) near = param.name;
  }
  return Fail(Errc::kNotFound, "no parameter is named \"", name, "\"",
              (near.empty() ? "" : "; a similar name is \"" + near + "\""));
}

/// A consecutive range of a fragment's elements in one slot.
struct FileRange {
  const layout::Member* member;
  const std::string* file;
  std::uint64_t shard_first;
  std::uint64_t elems;
  std::uint64_t file_offset;
};

std::vector<FileRange> FileRangesOf(const layout::ShardMap& map, const layout::Fragment& fragment,
                                    std::uint64_t item) {
  std::vector<FileRange> list;
  std::uint64_t at = 0;
  layout::ForHolders(map, fragment.at, 0, fragment.cut->shard_elems(),
                     [&](const layout::Region& region, std::uint64_t element, std::uint64_t elems) {
                       const layout::Member& member = map.members[region.member];
                       list.push_back({&member, &map.files[member.file], at, elems,
                                       member.offset + region.offset + element * item});
                       at += elems;
                     });
  return list;
}

nlohmann::json TotalsJson(const ConvertReport& report) {
  const plan::Totals& totals = report.totals;
  nlohmann::json json = {{"output_files", totals.output_files},
                         {"output_bytes", totals.output_bytes},
                         {"linked_files", totals.linked_files},
                         {"payload_bytes", totals.payload_bytes},
                         {"read_bytes", totals.read_bytes + totals.verify_bytes},
                         {"verify_bytes", totals.verify_bytes},
                         {"units", totals.units},
                         {"members_read", totals.members_read},
                         {"members_unread", totals.members_unread},
                         {"buffer_bytes", report.buffer_bytes}};
  if (!report.rank_bytes.empty()) json["rank_bytes"] = report.rank_bytes;
  return json;
}

nlohmann::json SiblingsJson(const SiblingReport& report) {
  nlohmann::json copied = nlohmann::json::array();
  for (const auto& [name, bytes] : report.copied)
    copied.push_back({{"name", name}, {"bytes", bytes}});
  nlohmann::json left_out = nlohmann::json::array();
  for (const checkpoints::LeftOut& one : report.left_out) {
    left_out.push_back({{"name", one.name}, {"why", one.why}});
  }
  return {{"folders", report.folders},
          {"copied", std::move(copied)},
          {"bytes", report.bytes},
          {"left_out", std::move(left_out)}};
}

}  // namespace

std::vector<ListRow> List(const Checkpoint& checkpoint) {
  const auto tensors = ByName(checkpoint);
  std::vector<ListRow> rows;
  for (const Param& param : checkpoint.params) {
    ListRow row{param.name, KindText(param), ToString(param.shape), "", layout::Explain(param.rule),
                0};
    if (const auto found = tensors.find(param.name); found != tensors.end()) {
      for (const layout::LogicalTensor* tensor : found->second) {
        row.states += (row.states.empty() ? "" : " ") + tensor->state;
        row.bytes += Elems(tensor->shape) * ItemSize(tensor->dtype);
      }
    }
    rows.push_back(std::move(row));
  }
  for (const checkpoints::OpaqueEntry& entry : OpaqueEntries(checkpoint)) {
    rows.push_back({entry.name, TypeText(entry), "", "", "", 0});
  }
  return rows;
}

nlohmann::json ListJson(const Checkpoint& checkpoint) {
  nlohmann::json json = {{"kind", checkpoint.origin},
                         {"tag", checkpoint.tag},
                         {"layout", ToJson(checkpoint.layout)},
                         {"files", checkpoint.map.files.size()}};
  const auto tensors = ByName(checkpoint);
  for (const checkpoints::WeightSet& set : checkpoint.weight_sets) {
    json["weight_sets"].push_back(
        {{"name", set.name}, {"tensors", set.tensors}, {"bytes", set.bytes}, {"taken", set.taken}});
  }
  json["parameters"] = nlohmann::json::array();
  for (const Param& param : checkpoint.params) {
    nlohmann::json entry = {{"name", param.name},
                            {"kind", KindText(param)},
                            {"shape", param.shape},
                            {"split", layout::Explain(param.rule)},
                            {"group", param.group}};
    entry["tensors"] = nlohmann::json::array();
    if (const auto found = tensors.find(param.name); found != tensors.end()) {
      for (const layout::LogicalTensor* tensor : found->second) {
        entry["tensors"].push_back({{"state", tensor->state},
                                    {"dtype", Name(tensor->dtype)},
                                    {"fragments", tensor->fragments.size()}});
      }
    }
    json["parameters"].push_back(std::move(entry));
  }
  for (const checkpoints::OpaqueEntry& entry : OpaqueEntries(checkpoint)) {
    json["entries"].push_back({{"name", entry.name}, {"kind", TypeText(entry)}});
  }
  return json;
}

Result<std::string> ExplainParam(const Checkpoint& checkpoint, const std::string& name) {
  SW_TRY_ASSIGN(const Param* param, FindParam(checkpoint, name));
  std::string text = name + " " + ToString(param->shape) + ", " + KindText(*param) + ", " +
                     layout::Explain(param->rule) +
                     (param->rule.origin.empty() ? "" : " (" + param->rule.origin + ")") + "\n";
  for (const layout::LogicalTensor& tensor : checkpoint.map.tensors) {
    if (tensor.name != name) continue;
    text += "  " + tensor.state + " " + std::string(Name(tensor.dtype)) + "\n";
    for (const layout::Fragment& fragment : tensor.fragments) {
      text += "    " + std::string(RoleText(fragment.role)) + ": " + fragment.cut->Explain() + "\n";
      const std::uint64_t item = ItemSize(tensor.dtype);
      const std::vector<FileRange> ranges = FileRangesOf(checkpoint.map, fragment, item);
      for (std::size_t i = 0; i < std::min(ranges.size(), kShownRegions); ++i) {
        const FileRange& s = ranges[i];
        text += "      elements [" + std::to_string(s.shard_first) + ", " +
                std::to_string(s.shard_first + s.elems) + ") at bytes [" +
                std::to_string(s.file_offset) + ", " +
                std::to_string(s.file_offset + s.elems * item) + ") of " + *s.file + " (" +
                s.member->name + ")\n";
      }
      if (ranges.size() > kShownRegions) {
        text += "      and " + std::to_string(ranges.size() - kShownRegions) + " more ranks\n";
      }
    }
  }
  return text;
}

Result<nlohmann::ordered_json> ExplainJson(const Checkpoint& checkpoint, const std::string& name) {
  SW_TRY_ASSIGN(const Param* param, FindParam(checkpoint, name));
  nlohmann::ordered_json json = {{"name", name},
                                 {"kind", KindText(*param)},
                                 {"shape", param->shape},
                                 {"split", layout::Explain(param->rule)},
                                 {"origin", param->rule.origin}};
  json["tensors"] = nlohmann::ordered_json::array();
  for (const layout::LogicalTensor& tensor : checkpoint.map.tensors) {
    if (tensor.name != name) continue;
    nlohmann::ordered_json entry = {{"state", tensor.state}, {"dtype", Name(tensor.dtype)}};
    for (const layout::Fragment& fragment : tensor.fragments) {
      nlohmann::ordered_json shard = {{"role", RoleText(fragment.role)},
                                      {"cut", fragment.cut->Explain()}};
      const std::uint64_t item = ItemSize(tensor.dtype);
      for (const FileRange& s : FileRangesOf(checkpoint.map, fragment, item)) {
        shard["byte_ranges"].push_back({{"file", *s.file},
                                        {"member", s.member->name},
                                        {"first", s.shard_first},
                                        {"elements", s.elems},
                                        {"offset", s.file_offset},
                                        {"bytes", s.elems * item}});
      }
      entry["fragments"].push_back(std::move(shard));
    }
    json["tensors"].push_back(std::move(entry));
  }
  return json;
}

nlohmann::json MapsJson(const std::vector<MapUsed>& maps) {
  nlohmann::json json = nlohmann::json::array();
  for (const MapUsed& map : maps) json.push_back(nlohmann::json(map.Json()));
  return json;
}

nlohmann::json ConversionJson(const ConvertReport& report) {
  nlohmann::json result = {{"dry_run", report.dry_run},
                           {"found_done", report.found_done},
                           {"verbatim", report.verbatim},
                           {"linked", report.linked},
                           {"siblings", SiblingsJson(report.siblings)},
                           {"not_carried", report.not_carried},
                           {"plan", TotalsJson(report)},
                           {"source", ToJson(report.source)},
                           {"target", ToJson(report.target)}};
  if (!report.maps.empty()) result["maps"] = MapsJson(report.maps);
  if (report.dry_run) {
    result["disk"] = {{"needed_bytes", report.needed_bytes}, {"free_bytes", nullptr}};
    if (report.free.bytes) result["disk"]["free_bytes"] = *report.free.bytes;
  }
  if (!report.dry_run && !report.found_done) {
    result["run"] = {{"payload_bytes_read", report.run.bytes_read},
                     {"bytes_written", report.run.bytes_written},
                     {"files_read", report.run.files_read},
                     {"files_written", report.run.files_written},
                     {"files_cloned", report.run.files_cloned},
                     {"files_linked", report.run.files_linked},
                     {"units", report.run.units},
                     {"units_resumed", report.run.units_resumed},
                     {"members_verified", report.run.members_verified},
                     {"members_without_checksum", report.run.members_without_checksum}};
  }
  return result;
}

nlohmann::json CheckJson(const CheckReport& report) {
  return {
      {"tensors_equal", report.tensors_equal},   {"tensors_different", report.tensors_different},
      {"bytes_compared", report.bytes_compared}, {"difference_count", report.difference_count},
      {"differences", report.differences},       {"notes", report.notes}};
}

Result<os::FreeSpace> FreeSpaceFor(comm::Comm& comm, const std::string& output) {
  const auto look = [&]() -> Result<std::string> {
    SW_TRY_ASSIGN(const os::ParentName split, os::SplitOutput(output));
    SW_TRY_ASSIGN(const os::FreeSpace free, os::FreeSpaceAt(split.parent));
    return free.bytes ? StrCat(*free.bytes, " ", free.bytes_quota) : std::string();
  };
  SW_TRY_ASSIGN(const std::string text, comm.OnRootText(look));
  os::FreeSpace free;
  if (text.empty()) return free;
  free.bytes = std::stoull(text);
  free.bytes_quota = text.substr(text.find(' ') + 1);
  return free;
}

}  // namespace shardwright::convert
