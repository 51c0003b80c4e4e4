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

/// First parts of the paths of a target's files: no neighbour may have such a name.
std::set<std::string> NamesOf(const plan::Target& target) {
  std::set<std::string> names;
  for (const plan::OutputFile& file : target.files) {
    names.insert(file.path.substr(0, file.path.find('/')));
  }
  return names;
}

/// Whether a target has the same of its own: the adapter that the checkpoint holds, and the
/// configuration, which its writer has taken over.
bool IsWritten(const checkpoints::Neighbour& neighbour, const plan::Target& target) {
  if (neighbour.name != "adapter_config.json" && neighbour.name != "adapter_model.safetensors") {
    return false;
  }
  return std::any_of(target.files.begin(), target.files.end(),
                     [&](const plan::OutputFile& file) { return file.path == neighbour.name; });
}

void WarnAboutRanks(const std::vector<std::string>& gone, std::uint64_t ranks,
                    const std::optional<std::uint64_t>& last, NeighbourReport* report, Sink& sink) {
  if (!gone.empty()) {
    sink.Warn("files of ranks that the target does not have, not carried over: " + FirstFew(gone));
    report->not_carried.push_back("files of ranks that the target does not have: " +
                                  Joined(gone, ", "));
  }
  if (last && *last + 1 < ranks) {
    sink.Warn("the target has " + std::to_string(ranks) + " ranks, the source random states of " +
              std::to_string(*last + 1) + ": those of the others begin anew");
  }
}

void Say(const NeighbourReport& report, Sink& sink) {
  if (report.copied.empty() && report.left_out.empty()) return;
  std::string note = "beside the checkpoint: " + std::to_string(report.copied.size()) +
                     " carried over (" + FormatBytes(report.bytes) + ")";
  if (!report.left_out.empty()) note += ", " + std::to_string(report.left_out.size()) + " left out";
  sink.Note(note, 0);
}

/// The name of a neighbour in the output. Programs look for a model's configuration and tokenizer
/// next to its weights, not in the folder where trainers keep them.
std::string NameIn(const checkpoints::Dialect& format, const checkpoints::Neighbour& neighbour) {
  constexpr std::string_view kFolder = "huggingface/";
  if (format.name != "safetensors" || !neighbour.name.starts_with(kFolder)) return neighbour.name;
  return neighbour.name.substr(kFolder.size());
}

/// True for files that programs expect next to a model's weights: configuration, tokenizer, chat
/// template, code and licence of the model. State and scripts of a trainer are not among them.
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

/// Type that most bytes of a target's weights have; nothing without floating weights.
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

/// A config.json with the element type of the weights in every "dtype" and "torch_dtype" that has a
/// floating type; all other bytes stay.
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

/// The bytes of a small neighbour in the output.
std::string ContentIn(const checkpoints::Dialect& format, const std::string& name,
                      const std::string& content, const plan::Target& target, Sink& sink) {
  if (!format.only_weights || name != "config.json") return content;
  const std::optional<DType> type = WeightType(target);
  if (!type) return content;
  std::string changed = WithWeightType(content, Name(*type));
  if (changed != content) {
    sink.Note("config.json: the element type is set to " + std::string(Name(*type)) +
                  ", that of the weights written",
              0);
  }
  return changed;
}

}  // namespace

NeighbourReport ListNeighbours(const checkpoints::SourceSet& set) {
  NeighbourReport report;
  report.folders = set.save_folders;
  report.left_out = set.left_out;
  for (const checkpoints::Neighbour& neighbour : set.neighbours) {
    report.bytes += neighbour.identity.bytes;
    report.copied.emplace_back(neighbour.name, neighbour.identity.bytes);
  }
  return report;
}

NeighbourReport AddNeighbours(const checkpoints::SourceSet& set, const checkpoints::Dialect& format,
                              const std::optional<std::uint64_t>& ranks, plan::Twin twin,
                              layout::ShardMap* map, plan::Target* target, Sink& sink) {
  NeighbourReport report;
  report.folders = set.save_folders;
  report.left_out = set.left_out;
  std::set<std::string> taken = NamesOf(*target);
  std::vector<std::string> gone;
  std::optional<std::uint64_t> last;  // rank of which there is a file
  // Every file has its place in the source map, carried over or not (PathsOf).
  const auto leave_out = [&](const checkpoints::Neighbour& neighbour, const char* why) {
    if (!neighbour.content) map->files.push_back(neighbour.path);
    report.left_out.push_back({neighbour.name, why});
  };
  const auto surprise = [&](const std::string& what) {
    sink.Warn("beside the checkpoint, not carried over: " + what);
    report.not_carried.push_back("beside the checkpoint: " + what);
  };
  for (const checkpoints::Neighbour& neighbour : set.neighbours) {
    const std::optional<std::uint64_t> rank = checkpoints::RankOfNeighbour(neighbour.name);
    if (rank) last = std::max(last.value_or(0), *rank);
    if (rank && ranks && *rank >= *ranks) {
      gone.push_back(neighbour.name);
      leave_out(neighbour, "of a rank that the target does not have");
      continue;
    }
    if (IsWritten(neighbour, *target)) {
      leave_out(neighbour, "the output has its own");
      continue;
    }
    const std::string name = NameIn(format, neighbour);
    if (format.pointer.empty() && format.belongs(name) != checkpoints::Belongs::kNo) {
      leave_out(neighbour, "a file of the format that is written");
      surprise(neighbour.name + ": it would be taken for a part of the output");
      continue;
    }
    if (format.only_weights && !IsOfModelFolder(neighbour.name)) {
      leave_out(neighbour, "no file of a folder of weights");
      continue;
    }
    if (!taken.insert(name).second) {
      leave_out(neighbour, "a name that the output itself has");
      surprise(neighbour.name + ": the output has a file or folder of that name");
      continue;
    }
    plan::OutputFile file =
        neighbour.content
            ? plan::WholeFile(name, ContentIn(format, name, *neighbour.content, *target, sink))
            : plan::WholeFile(name, neighbour.path, neighbour.identity.bytes, twin, map);
    file.executable = neighbour.executable;
    report.bytes += file.bytes;
    report.copied.emplace_back(name, file.bytes);
    target->files.push_back(std::move(file));
  }
  if (ranks) WarnAboutRanks(gone, *ranks, last, &report, sink);
  Say(report, sink);
  return report;
}

}  // namespace shardwright::convert
