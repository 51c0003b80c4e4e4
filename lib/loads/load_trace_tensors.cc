// Loads out of tensors: SGLang's recorder dumps, TensorRT-LLM's statistics, and counters in the
// model files of a checkpoint.

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "base/checked.h"
#include "base/crc32.h"
#include "base/limits.h"
#include "format/safetensors/header.h"
#include "format/torch_pt/reader.h"
#include "loads/load_trace_internal.h"
#include "os/dir.h"
#include "tensor/convert.h"

namespace shardwright::loads {
namespace {

template <class T>
Status TakeIntegers(std::span<const std::byte> bytes, const std::string& where,
                    std::vector<std::uint64_t>* counts) {
  for (std::size_t at = 0; at < bytes.size(); at += sizeof(T)) {
    T value{};
    std::memcpy(&value, bytes.data() + at, sizeof(T));
    if (value < 0 || static_cast<std::uint64_t>(value) > limits::kMoeTokens) {
      return Fail(Errc::kBadInput, where + ": element " + std::to_string(counts->size()) +
                                       ": not a count: " + std::to_string(value));
    }
    counts->push_back(static_cast<std::uint64_t>(value));
  }
  return {};
}

Status TakeReals(DType dtype, std::span<const std::byte> bytes, const std::string& where,
                 std::vector<std::uint64_t>* counts) {
  std::vector<double> values(bytes.size() / ItemSize(dtype));
  Convert(dtype, bytes, DType::kF64, std::as_writable_bytes(std::span(values)));
  for (const double value : values) {
    SW_TRY_ASSIGN(const std::uint64_t count,
                  CountOf(value, where + ": element " + std::to_string(counts->size())));
    counts->push_back(count);
  }
  return {};
}

/// Elements of one type as counts.
Result<std::vector<std::uint64_t>> Counts(DType dtype, std::span<const std::byte> bytes,
                                          const std::string& where) {
  std::vector<std::uint64_t> counts;
  counts.reserve(bytes.size() / ItemSize(dtype));
  Status status;
  switch (dtype) {
    case DType::kI64:
      status = TakeIntegers<std::int64_t>(bytes, where, &counts);
      break;
    case DType::kI32:
      status = TakeIntegers<std::int32_t>(bytes, where, &counts);
      break;
    case DType::kI16:
      status = TakeIntegers<std::int16_t>(bytes, where, &counts);
      break;
    case DType::kU64:
      status = TakeIntegers<std::uint64_t>(bytes, where, &counts);
      break;
    case DType::kU32:
      status = TakeIntegers<std::uint32_t>(bytes, where, &counts);
      break;
    case DType::kU8:
      status = TakeIntegers<std::uint8_t>(bytes, where, &counts);
      break;
    default:
      if (!CanConvert(dtype, DType::kF64)) {
        return Fail(Errc::kUnsupported,
                    where + ": counts of type " + std::string(Name(dtype)) + " are not read");
      }
      status = TakeReals(dtype, bytes, where, &counts);
  }
  if (!status) return tl::unexpected<Error>(std::move(status).error());
  return counts;
}

/// Checks a number of elements before they are read.
Status CheckElems(std::uint64_t elems, const std::string& where) {
  if (elems <= limits::kMoeCounts) return {};
  return Fail(Errc::kLimit, where + ": " + std::to_string(elems) + " counts, at most " +
                                std::to_string(limits::kMoeCounts));
}

/// A tensor of a .pt file as counts, row-major.
Result<std::vector<std::uint64_t>> ReadCounts(const os::File& file,
                                              const torch_pt::Document& document,
                                              const pickle::Tensor& tensor,
                                              const std::string& where) {
  SW_TRY_ASSIGN(const std::uint64_t elems, CountElems(tensor.shape));
  SW_TRY(CheckElems(elems, where));
  const torch_pt::Document::StorageRef& storage = document.storages[tensor.storage];
  const std::uint64_t item = ItemSize(tensor.dtype);
  SW_TRY(CheckElems(storage.bytes / item, where + ": storage"));
  std::vector<std::byte> bytes(storage.bytes);
  SW_TRY(file.ReadAt(storage.offset, bytes));
  if (storage.crc32 && Crc32(bytes) != *storage.crc32) {
    return Fail(Errc::kBadInput, where + ": " + storage.member + ": wrong CRC-32");
  }
  std::vector<std::byte> packed(elems * item);
  std::vector<std::uint64_t> index(tensor.shape.size(), 0);
  for (std::uint64_t e = 0; e < elems; ++e) {
    std::uint64_t at = tensor.offset;
    for (std::size_t d = 0; d < index.size(); ++d) at += index[d] * tensor.strides[d];
    std::memcpy(packed.data() + e * item, bytes.data() + at * item, item);
    for (std::size_t d = index.size(); d-- > 0;) {
      if (++index[d] < tensor.shape[d]) break;
      index[d] = 0;
    }
  }
  return Counts(tensor.dtype, packed, where);
}

/// A .pt file that is open.
struct PtFile {
  os::File file;
  torch_pt::Document document;
  std::uint64_t bytes = 0;
};

Result<PtFile> OpenPt(const std::string& path) {
  PtFile pt;
  SW_TRY_ASSIGN(pt.file, os::File::OpenRead(path));
  auto skeleton = torch_pt::ReadSkeleton(pt.file);
  if (!skeleton) return Within(path, skeleton.error());
  pt.bytes = skeleton->last;
  auto document = torch_pt::Parse(*skeleton);
  if (!document) return Within(path, document.error());
  pt.document = *std::move(document);
  return pt;
}

/// Rows of `layers` x `experts` counts as one record.
Status AddRows(std::span<const std::uint64_t> counts, std::uint64_t layers, std::uint64_t experts,
               RecordBuilder* record) {
  for (std::uint64_t l = 0; l < layers; ++l) {
    const auto row = counts.subspan(l * experts, experts);
    SW_TRY(record->Add(l, {row.begin(), row.end()}));
  }
  return {};
}

std::optional<std::uint64_t> WholeNumber(std::string_view text) {
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool whole = !text.empty() && error == std::errc() && end == text.data() + text.size();
  return whole ? std::optional(number) : std::nullopt;
}

// TensorRT-LLM.

/// Adds what one rank counted: tensors named "<iteration>_<layer>".
Status AddRank(const std::string& path, LoadTrace* trace,
               std::map<std::uint64_t, RecordBuilder>* records) {
  SW_TRY_ASSIGN(const os::File file, os::File::OpenRead(path));
  SW_TRY_ASSIGN(const auto header, safetensors::ReadHeader(file));
  for (const safetensors::Entry& entry : header.entries) {
    const std::string where = path + ": tensor \"" + entry.name + "\"";
    const std::size_t split = entry.name.find('_');
    const auto iteration = WholeNumber(std::string_view(entry.name).substr(0, split));
    const auto layer = split == std::string::npos
                           ? std::nullopt
                           : WholeNumber(std::string_view(entry.name).substr(split + 1));
    if (!iteration || !layer || entry.shape.size() != 1) {
      return Fail(Errc::kBadInput, where + ": a list named <iteration>_<layer> expected");
    }
    SW_TRY(CheckElems(entry.shape[0], where));
    std::vector<std::byte> bytes(entry.bytes);
    SW_TRY(file.ReadAt(entry.offset, bytes));
    SW_TRY_ASSIGN(auto counts, Counts(entry.dtype, bytes, where));
    const auto at =
        records->try_emplace(*iteration, "iteration " + std::to_string(*iteration)).first;
    SW_TRY(at->second.Add(*layer, std::move(counts)));
    trace->bytes_read += entry.bytes;
  }
  trace->files_read += 1;
  return {};
}

// Checkpoints.

constexpr std::string_view kCounterNames[] = {"tokens_per_expert", "local_tokens_per_expert",
                                              "exp_counts", "expert_counts"};

/// The layer that a counter's name or its file's name tells.
std::optional<std::uint64_t> LayerOf(std::string_view file, std::string_view name) {
  // A pipeline module has a file per layer, and no layer in its names.
  constexpr std::string_view kPrefix = "layer_";
  if (file.starts_with(kPrefix)) {
    file.remove_prefix(kPrefix.size());
    return WholeNumber(file.substr(0, file.find_first_not_of("0123456789")));
  }
  while (!name.empty()) {
    const std::string_view part = name.substr(0, name.find('.'));
    if (const auto number = WholeNumber(part)) return number;
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
      return Fail(Errc::kBadInput, where + ": a list of counts of a numbered layer expected");
    }
    SW_TRY_ASSIGN(auto counts, ReadCounts(pt.file, pt.document, *value.tensor, where));
    if (!found->try_emplace(*layer, std::move(counts)).second) {
      return Fail(Errc::kBadInput, where + ": layer " + std::to_string(*layer) + " twice");
    }
  }
  return {};
}

bool MayHoldCounters(const std::string& name) {
  return name.ends_with(".pt") && name.find("optim_states") == std::string::npos &&
         name.find("_expert_") == std::string::npos;
}

/// The folder of the newest save: what `latest` names, or the folder itself.
Result<std::string> SaveFolder(const std::string& folder) {
  SW_TRY_ASSIGN(const bool has_latest, os::Exists(folder + "/latest"));
  if (!has_latest) return folder;
  SW_TRY_ASSIGN(std::string tag, os::ReadWholeText(folder + "/latest", 4096));
  while (!tag.empty() && (tag.back() == '\n' || tag.back() == ' ')) tag.pop_back();
  return os::JoinSafe(folder, tag);
}

/// Model files of several ranks repeat a counter, or hold each rank's share of it.
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

Result<LoadTrace> ReadRecorderDump(const std::string& path) {
  SW_TRY_ASSIGN(const PtFile pt, OpenPt(path));
  const pickle::Node* counts = pt.document.root->Find("logical_count");
  if (counts == nullptr || !counts->is_tensor()) {
    const bool detail = pt.document.root->Find("records") != nullptr;
    return Fail(detail ? Errc::kUnsupported : Errc::kBadInput,
                path + (detail ? ": a dump of single passes is not read: record with the mode stat"
                               : ": no tensor logical_count: not a dump of SGLang's recorder"));
  }
  const pickle::Tensor& tensor = *counts->tensor;
  const std::string where = path + ": logical_count";
  if (tensor.shape.size() != 2 && tensor.shape.size() != 3) {
    return Fail(Errc::kBadInput,
                where + ": [steps, layers, experts] expected, found " + ToString(tensor.shape));
  }
  SW_TRY_ASSIGN(const auto values, ReadCounts(pt.file, pt.document, tensor, where));
  const std::size_t base = tensor.shape.size() - 2;
  const std::uint64_t steps = base == 1 ? tensor.shape[0] : 1;
  const std::uint64_t cells = tensor.shape[base] * tensor.shape[base + 1];
  LoadTrace trace;
  trace.format = "sglang";
  trace.bytes_read = pt.bytes;
  trace.files_read = 1;
  for (std::uint64_t step = 0; step < steps; ++step) {
    const auto rows = std::span(values).subspan(step * cells, cells);
    // The recorder's ring has rows that no pass has filled.
    if (steps > 1 && std::all_of(rows.begin(), rows.end(), [](auto t) { return t == 0; })) continue;
    const std::string place = where + ": step " + std::to_string(step);
    RecordBuilder record(place);
    SW_TRY(AddRows(rows, tensor.shape[base], tensor.shape[base + 1], &record));
    SW_TRY(Append(&trace, step, record, place));
  }
  SW_TRY(Finish(&trace, path));
  return trace;
}

Result<LoadTrace> ReadStatisticFolder(const std::string& folder) {
  SW_TRY_ASSIGN(const std::string meta, os::ReadWholeText(folder + "/meta_info.json", 1 << 20));
  SW_TRY_ASSIGN(const Json json, json::Parse(meta, folder + "/meta_info.json"));
  const Json* given = json::Find(json, "num_experts");
  if (given == nullptr) {
    return Fail(Errc::kBadInput, folder + "/meta_info.json: num_experts is missing");
  }
  SW_TRY_ASSIGN(
      const std::uint64_t experts,
      json::WholeOf(*given, 1, limits::kMoeExperts, folder + "/meta_info.json: num_experts"));
  SW_TRY_ASSIGN(const auto names, os::ListDir(folder));
  LoadTrace trace;
  trace.format = "tensorrt-llm";
  std::map<std::uint64_t, RecordBuilder> records;
  for (const os::Entry& entry : names) {
    const bool counts = entry.name.starts_with("rank") && entry.name.ends_with(".safetensors") &&
                        !entry.name.ends_with("_raw.safetensors");
    if (counts) SW_TRY(AddRank(folder + "/" + entry.name, &trace, &records));
  }
  for (const auto& [iteration, record] : records) {
    SW_TRY(Append(&trace, iteration, record, folder + ": iteration " + std::to_string(iteration)));
  }
  SW_TRY(Finish(&trace, folder));
  if (trace.experts != experts) {
    return Fail(Errc::kBadInput, folder + ": " + std::to_string(experts) +
                                     " experts in meta_info.json, found " +
                                     std::to_string(trace.experts));
  }
  return trace;
}

Result<LoadTrace> ReadCheckpointCounters(const std::string& folder) {
  SW_TRY_ASSIGN(const std::string save, SaveFolder(folder));
  SW_TRY_ASSIGN(os::Tree tree, os::WalkTree(save));
  std::sort(tree.files.begin(), tree.files.end());
  LoadTrace trace;
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
    return Fail(Errc::kBadInput,
                save + ": no token counters in " + std::to_string(trace.files_read) +
                    " model files: none of tokens_per_expert, local_tokens_per_expert, "
                    "exp_counts, expert_counts");
  }
  if (summed) trace.notes.push_back("counters of several ranks differ and were added up");
  SW_TRY(Append(&trace, iteration, record, save));
  SW_TRY(Finish(&trace, save));
  return trace;
}

}  // namespace shardwright::loads
