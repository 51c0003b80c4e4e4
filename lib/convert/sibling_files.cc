// SPDX-License-Identifier: Apache-2.0
#include "convert/sibling_files.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string_view>

#include "checkpoints/open_source.h"
#include "engine/layout/states.h"
#include "engine/tensor/dtype.h"
#include "support/base/bytes.h"
#include "support/base/text.h"

namespace shardwright::convert {
namespace {

/// Returns the first parts of the target's paths, which sibling files must not use as names.
std::set<std::string> NamesOf(const plan::Target& target) {
  std::set<std::string> names;
  for (const plan::OutputFile& file : target.files) {
    names.insert(file.path.substr(0, file.path.find('/')));
  }
  return names;
}

/// Returns true if the target has its own version of a file: an adapter
/// in the checkpoint, or the configuration that its writer has copied.
bool IsWritten(const checkpoints::SiblingFile& sibling, const plan::Target& target) {
  if (sibling.name != "adapter_config.json" && sibling.name != "adapter_model.safetensors") {
    return false;
  }
  return std::any_of(target.files.begin(), target.files.end(),
                     [&](const plan::OutputFile& file) { return file.path == sibling.name; });
}

void WarnAboutRanks(const std::vector<std::string>& gone, std::uint64_t ranks,
                    const std::optional<std::uint64_t>& last, SiblingReport* report, Sink& sink) {
  if (!gone.empty()) {
    sink.Warn("files of ranks that the target does not have, not carried over: " + FirstFew(gone));
    report->not_carried.push_back("files of ranks that the target does not have: " +
                                  Joined(gone, ", "));
  }
  if (last && *last + 1 < ranks) {
    sink.Warn(StrCat("the target has ", ranks, " ranks, but the source has random states of only ",
                     *last + 1, "; the other ranks start with new random states"));
  }
}

/// Returns all names followed by `end`, or nothing if there are many names or none.
std::string AllIfFew(const std::vector<std::string>& names, std::string_view end) {
  constexpr std::size_t kFew = 4;
  if (names.empty() || names.size() > kFew) return "";
  return StrCat(Joined(names, ", "), end);
}

void Say(const SiblingReport& report, Sink& sink) {
  if (report.copied.empty() && report.left_out.empty()) return;
  std::vector<std::string> copied;
  for (const auto& [name, bytes] : report.copied) copied.push_back(name);
  std::vector<std::string> left_out;
  for (const checkpoints::LeftOut& one : report.left_out) left_out.push_back(one.name);
  std::string note = StrCat("sibling files: ", copied.size(), " carried over (",
                            AllIfFew(copied, ", "), FormatBytes(report.bytes), ")");
  if (!left_out.empty()) {
    const std::string names = AllIfFew(left_out, ")");
    note += StrCat(", ", left_out.size(), " left out", names.empty() ? "" : " (", names);
  }
  sink.Note(note, 0);
}

/// Returns the name of a sibling file in the output. Programs look for a model's configuration
/// and tokenizer next to its weights, not in the folder where trainers store them.
std::string NameIn(const checkpoints::Format& format, const checkpoints::SiblingFile& sibling) {
  constexpr std::string_view kFolder = "huggingface/";
  if (format.name != "safetensors" || !sibling.name.starts_with(kFolder)) return sibling.name;
  return sibling.name.substr(kFolder.size());
}

/// Returns true for files that programs expect next to a model's weights: configuration, tokenizer,
/// chat template, code and license of the model. Trainer state and scripts are not among them.
bool IsOfModelFolder(std::string_view name) {
  constexpr std::array<std::string_view, 7> kEnds = {".json", ".txt",   ".model",   ".jinja",
                                                     ".md",   ".vocab", ".tiktoken"};
  constexpr std::array<std::string_view, 4> kTexts = {"LICENSE", "LICENCE", "NOTICE", "USE_POLICY"};
  constexpr std::array<std::string_view, 6> kCode = {"configuration_",    "feature_extraction_",
                                                     "image_processing_", "modeling_",
                                                     "processing_",       "tokenization_"};
  name.remove_prefix(name.rfind('/') + 1);
  if (name == "trainer_state.json") return false;
  const auto ends = [&](std::string_view end) { return name.ends_with(end); };
  const auto begins = [&](std::string_view begin) { return name.starts_with(begin); };
  return std::ranges::any_of(kEnds, ends) || std::ranges::any_of(kTexts, begins) ||
         (name.ends_with(".py") && std::ranges::any_of(kCode, begins));
}

/// Returns the type of most bytes of a target's weights. Empty without floating-point weights.
std::optional<DType> WeightType(const plan::Target& target) {
  std::map<DType, std::uint64_t> bytes;
  for (const layout::LogicalTensor& tensor : target.map.tensors) {
    const bool weight = tensor.state == layout::kWeight || tensor.state == layout::kMaster;
    if (!weight || !IsFloating(tensor.dtype) || ItemSize(tensor.dtype) == 1) continue;
    for (const layout::Fragment& fragment : tensor.fragments) {
      bytes[tensor.dtype] += fragment.cut->shard_elems() * ItemSize(tensor.dtype);
    }
  }
  const auto most = std::ranges::max_element(bytes, {}, [](const auto& one) { return one.second; });
  return most == bytes.end() ? std::nullopt : std::optional(most->first);
}

/// Returns a config.json with the element type of the weights in every "dtype"
/// and "torch_dtype" that has a floating-point type. Other bytes stay the same.
std::string WithWeightType(std::string_view config, std::string_view type) {
  constexpr std::array<std::string_view, 4> kTypes = {"bfloat16", "float16", "float32", "float64"};
  std::string out;
  std::size_t done = 0;
  for (std::size_t at = config.find("dtype\""); at != std::string_view::npos;
       at = config.find("dtype\"", at + 1)) {
    const bool key =
        at > 0 && (config[at - 1] == '"' || (at >= 7 && config.substr(at - 7, 7) == "\"torch_"));
    std::size_t begin = config.find_first_not_of(" \t\r\n", at + 6);
    if (!key || begin == std::string_view::npos || config[begin] != ':') continue;
    begin = config.find_first_not_of(" \t\r\n", begin + 1);
    if (begin == std::string_view::npos || config[begin] != '"') continue;
    const std::size_t end = config.find('"', ++begin);
    if (end == std::string_view::npos) break;
    if (std::ranges::find(kTypes, config.substr(begin, end - begin)) == kTypes.end()) continue;
    out.append(config.substr(done, begin - done)).append(type);
    done = end;
  }
  return out.append(config.substr(done));
}

/// Returns the bytes of a small sibling file in the output.
std::string ContentIn(const checkpoints::Format& format, const std::string& name,
                      const std::string& content, const plan::Target& target, Sink& sink) {
  if (!format.only_weights || name != "config.json") return content;
  const std::optional<DType> type = WeightType(target);
  if (!type) return content;
  std::string changed = WithWeightType(content, Name(*type));
  if (changed != content) {
    sink.Note(StrCat("config.json: the element type is set to ", Name(*type),
                     ", the type of the written weights"),
              0);
  }
  return changed;
}

}  // namespace

SiblingReport ListSiblings(const checkpoints::SourceSet& set) {
  SiblingReport report;
  report.folders = set.save_folders;
  report.left_out = set.left_out;
  for (const checkpoints::SiblingFile& sibling : set.siblings) {
    report.bytes += sibling.identity.bytes;
    report.copied.emplace_back(sibling.name, sibling.identity.bytes);
  }
  return report;
}

SiblingReport AddSiblings(const checkpoints::SourceSet& set, const checkpoints::Format& format,
                          const std::optional<std::uint64_t>& ranks, plan::CloneMode clone,
                          layout::ShardMap* map, plan::Target* target, Sink& sink) {
  SiblingReport report;
  report.folders = set.save_folders;
  report.left_out = set.left_out;
  std::set<std::string> taken = NamesOf(*target);
  std::vector<std::string> gone;
  std::optional<std::uint64_t> last;  // highest rank that has a file
  // Every file has an entry in the source map, even if it is omitted (PathsOf).
  const auto leave_out = [&](const checkpoints::SiblingFile& sibling, const char* why) {
    if (!sibling.content) map->files.push_back(sibling.path);
    report.left_out.push_back({sibling.name, why});
  };
  const auto surprise = [&](const std::string& what) {
    sink.Warn("sibling file, not carried over: " + what);
    report.not_carried.push_back("sibling file: " + what);
  };
  for (const checkpoints::SiblingFile& sibling : set.siblings) {
    const std::optional<std::uint64_t> rank = checkpoints::RankOfSibling(sibling.name);
    if (rank) last = std::max(last.value_or(0), *rank);
    if (rank && ranks && *rank >= *ranks) {
      gone.push_back(sibling.name);
      leave_out(sibling, "belongs to a rank that the target does not have");
      continue;
    }
    if (IsWritten(sibling, *target)) {
      leave_out(sibling, "the output has its own version of it");
      continue;
    }
    const std::string name = NameIn(format, sibling);
    if (format.pointer.empty() && format.belongs(name) != checkpoints::Belongs::kNo) {
      leave_out(sibling, "its name belongs to the target format");
      surprise(sibling.name + ": readers would mistake it for a part of the output");
      continue;
    }
    if (format.only_weights && !IsOfModelFolder(sibling.name)) {
      leave_out(sibling, "not a file that programs expect next to weights");
      continue;
    }
    if (!taken.insert(name).second) {
      leave_out(sibling, "the output has a file or folder of that name");
      surprise(sibling.name + ": the output has a file or folder of that name");
      continue;
    }
    plan::OutputFile file =
        sibling.content
            ? plan::WholeFile(name, ContentIn(format, name, *sibling.content, *target, sink))
            : plan::WholeFile(name, sibling.path, sibling.identity.bytes, clone, map);
    file.executable = sibling.executable;
    report.bytes += file.bytes;
    report.copied.emplace_back(name, file.bytes);
    target->files.push_back(std::move(file));
  }
  if (ranks) WarnAboutRanks(gone, *ranks, last, &report, sink);
  Say(report, sink);
  return report;
}

}  // namespace shardwright::convert
