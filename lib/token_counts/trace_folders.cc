// SPDX-License-Identifier: Apache-2.0
// Reads token counts from folders: TensorRT-LLM's statistics, and counters in the
// model files of a checkpoint.

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "files/safetensors/header.h"
#include "support/base/checked.h"
#include "support/base/limits.h"
#include "support/os/dir.h"
#include "token_counts/tensor_counts_internal.h"
#include "token_counts/trace_internal.h"
#include "token_counts/window.h"

namespace shardwright::token_counts {
namespace {

// TensorRT-LLM.

/// The iterations in one rank's file.
struct RankFile {
  std::string path;
  std::set<std::uint64_t> iterations;
};

/// Adds the counts of one rank, from tensors named "<iteration>_<layer>".
Status AddRank(RankFile* rank, TokenTrace* trace, std::map<std::uint64_t, RecordBuilder>* records) {
  const std::string& path = rank->path;
  SW_TRY_ASSIGN(const os::File file, os::File::OpenRead(path));
  SW_TRY_ASSIGN(const auto header, safetensors::ReadHeader(file));
  for (const safetensors::Entry& entry : header.entries) {
    const std::string where = path + ": tensor \"" + entry.name + "\"";
    const std::size_t split = entry.name.find('_');
    const auto iteration = NumberIn<std::uint64_t>(std::string_view(entry.name).substr(0, split));
    const auto layer =
        split == std::string::npos
            ? std::nullopt
            : NumberIn<std::uint64_t>(std::string_view(entry.name).substr(split + 1));
    if (!iteration || !layer || entry.shape.size() != 1) {
      return Fail(Errc::kBadInput, where, ": a list named <iteration>_<layer> expected");
    }
    SW_TRY(CheckElems(entry.shape[0], where));
    std::vector<std::byte> bytes(entry.bytes);
    SW_TRY(file.ReadAt(entry.offset, bytes));
    SW_TRY_ASSIGN(auto counts, Counts(entry.dtype, bytes, entry.shape, where));
    const auto at =
        records->try_emplace(*iteration, "iteration " + std::to_string(*iteration)).first;
    SW_TRY(at->second.Add(*layer, std::move(counts)));
    rank->iterations.insert(*iteration);
    trace->bytes_read += entry.bytes;
  }
  trace->files_read += 1;
  return {};
}

/// Warns about iterations that some ranks lack.
void WarnOfGaps(const std::vector<RankFile>& ranks, TokenTrace* trace) {
  for (const RankFile& rank : ranks) {
    std::vector<std::uint64_t> missing;
    for (const TokenTrace::Record& record : trace->records) {
      if (!rank.iterations.contains(record.iteration)) missing.push_back(record.iteration);
    }
    if (missing.empty()) continue;
    trace->warnings.push_back(
        StrCat(rank.path, ": lacks iteration ", Ranges(missing),
               ", which other ranks have: the totals do not include this rank's tokens"));
  }
}

// Checkpoints.

constexpr std::string_view kCounterNames[] = {"tokens_per_expert", "local_tokens_per_expert",
                                              "exp_counts", "expert_counts"};

/// Returns the layer in a counter's name or its file's name, nullopt if there is none.
std::optional<std::uint64_t> LayerOf(std::string_view file, std::string_view name) {
  // A pipeline module has one file per layer, and no layer in its tensor names.
  constexpr std::string_view kPrefix = "layer_";
  if (file.starts_with(kPrefix)) {
    file.remove_prefix(kPrefix.size());
    return NumberIn<std::uint64_t>(file.substr(0, file.find_first_not_of("0123456789")));
  }
  while (!name.empty()) {
    const std::string_view part = name.substr(0, name.find('.'));
    if (const auto number = NumberIn<std::uint64_t>(part)) return number;
    name.remove_prefix(std::min(name.size(), part.size() + 1));
  }
  return std::nullopt;
}

bool IsCounter(std::string_view name) {
  const std::string_view last = name.substr(name.rfind('.') + 1);
  return std::find(std::begin(kCounterNames), std::end(kCounterNames), last) !=
         std::end(kCounterNames);
}

/// Counters of a file by layer.
using Found = std::map<std::uint64_t, std::vector<std::uint64_t>>;

Status FindCounters(const PtFile& pt, std::string_view file_name, const pickle::Node& node,
                    int depth, Found* found) {
  if (node.kind != pickle::Kind::kDict || depth > 4) return {};
  for (std::size_t i = 0; i < node.entry_count(); ++i) {
    const pickle::Node& value = *node.value(i);
    if (!value.is_tensor()) {
      SW_TRY(FindCounters(pt, file_name, value, depth + 1, found));
      continue;
    }
    if (!node.key(i)->is_string() || !IsCounter(node.key(i)->text)) continue;
    const std::string& name = node.key(i)->text;
    const std::string where = pt.file.path() + ": \"" + name + "\"";
    const auto layer = LayerOf(file_name, name);
    if (!layer || value.tensor->shape.size() != 1) {
      return Fail(Errc::kBadInput, where,
                  ": a list of counts with a layer number in its name expected");
    }
    SW_TRY_ASSIGN(auto counts, ReadCounts(pt, *value.tensor, where));
    if (!found->try_emplace(*layer, std::move(counts)).second) {
      return Fail(Errc::kBadInput, where, ": layer ", *layer, " occurs twice");
    }
  }
  return {};
}

bool MayHoldCounters(const std::string& name) {
  return name.ends_with(".pt") && name.find("optim_states") == std::string::npos &&
         name.find("_expert_") == std::string::npos;
}

/// Returns the folder of the newest save: the one in `latest`, or the folder itself.
Result<std::string> SaveFolder(const std::string& folder) {
  SW_TRY_ASSIGN(const bool has_latest, os::Exists(folder + "/latest"));
  if (!has_latest) return folder;
  SW_TRY_ASSIGN(std::string tag, os::ReadWholeText(folder + "/latest", 4096));
  while (!tag.empty() && (tag.back() == '\n' || tag.back() == ' ')) tag.pop_back();
  return os::JoinSafe(folder, tag);
}

/// Combines model files of several ranks. They repeat a counter, or each has its rank's share.
Status Combine(const Found& found, const std::string& where, std::map<std::uint64_t, Found>* seen,
               RecordBuilder* record, bool* summed) {
  for (const auto& [layer, counts] : found) {
    Found& earlier = (*seen)[layer];
    const bool repeats =
        std::any_of(earlier.begin(), earlier.end(),
                    [&counts = counts](const auto& other) { return other.second == counts; });
    if (repeats) continue;
    *summed = *summed || !earlier.empty();
    earlier.emplace(earlier.size(), counts);
    Status added = record->Add(layer, counts);
    if (!added) return Within(where, added.error());
  }
  return {};
}

}  // namespace

Result<TokenTrace> ReadStatisticFolder(const std::string& folder) {
  SW_TRY_ASSIGN(const std::string meta, os::ReadWholeText(folder + "/meta_info.json", 1 << 20));
  SW_TRY_ASSIGN(const Json json, json::Parse(meta, folder + "/meta_info.json"));
  const Json* given = json::Find(json, "num_experts");
  if (given == nullptr) {
    return Fail(Errc::kBadInput, folder, "/meta_info.json: num_experts is missing");
  }
  SW_TRY_ASSIGN(
      const std::uint64_t experts,
      json::WholeOf(*given, 1, limits::kMoeExperts, folder + "/meta_info.json: num_experts"));
  SW_TRY_ASSIGN(const auto names, os::ListDir(folder));
  TokenTrace trace;
  trace.format = "tensorrt-llm";
  trace.serving = true;
  std::map<std::uint64_t, RecordBuilder> records;
  std::vector<RankFile> ranks;
  for (const os::Entry& entry : names) {
    const bool counts = entry.name.starts_with("rank") && entry.name.ends_with(".safetensors") &&
                        !entry.name.ends_with("_raw.safetensors");
    if (!counts) continue;
    RankFile& rank = ranks.emplace_back();
    rank.path = folder + "/" + entry.name;
    SW_TRY(AddRank(&rank, &trace, &records));
  }
  for (const auto& [iteration, record] : records) {
    SW_TRY(Append(&trace, iteration, record, folder + ": iteration " + std::to_string(iteration)));
  }
  SW_TRY(Finish(&trace, folder));
  WarnOfGaps(ranks, &trace);
  if (trace.experts != experts) {
    return Fail(Errc::kBadInput, folder, ": ", experts, " experts in meta_info.json, found ",
                trace.experts);
  }
  return trace;
}

Result<TokenTrace> ReadCheckpointCounters(const std::string& folder) {
  SW_TRY_ASSIGN(const std::string save, SaveFolder(folder));
  SW_TRY_ASSIGN(os::Tree tree, os::WalkTree(save));
  std::sort(tree.files.begin(), tree.files.end());
  TokenTrace trace;
  trace.format = "checkpoint";
  RecordBuilder record(save);
  std::map<std::uint64_t, Found> seen;
  std::uint64_t iteration = 0;
  bool summed = false;
  for (const std::string& path : tree.files) {
    const std::string name = path.substr(path.rfind('/') + 1);
    if (!MayHoldCounters(name)) continue;
    SW_TRY_ASSIGN(const PtFile pt, OpenPt(path));
    Found found;
    SW_TRY(FindCounters(pt, name, *pt.document.root, 0, &found));
    trace.bytes_read += pt.bytes;
    trace.files_read += 1;
    for (const char* key : {"iteration", "global_steps"}) {
      const pickle::Node* node = pt.document.root->Find(key);
      if (node == nullptr) continue;
      if (const auto count = pickle::AsCount(node)) iteration = *count;
    }
    SW_TRY(Combine(found, path, &seen, &record, &summed));
  }
  if (record.empty()) {
    return Fail(Errc::kBadInput, save, ": no token counters in ", trace.files_read,
                " model files: expected one of tokens_per_expert, local_tokens_per_expert, "
                "exp_counts and expert_counts");
  }
  if (summed) trace.notes.push_back("counters differ between ranks, so they were added up");
  SW_TRY(Append(&trace, iteration, record, save));
  SW_TRY(Finish(&trace, save));
  return trace;
}

}  // namespace shardwright::token_counts
