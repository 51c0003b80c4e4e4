// SPDX-License-Identifier: Apache-2.0
// Reads token counts from single arrays: .npy files, and .pt files with a tensor, a dump
// of SGLang's recorder, or physical counts with their map.

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "support/base/checked.h"
#include "support/base/limits.h"
#include "support/base/text.h"
#include "token_counts/tensor_counts_internal.h"
#include "token_counts/trace_internal.h"

namespace shardwright::token_counts {
namespace {

constexpr std::string_view kForms =
    "; supported are a tensor [layers, experts] or [steps, layers, experts], a dump of SGLang's "
    "recorder (logical_count), and expert_load with physical_to_logical_map";

constexpr std::uint64_t kBlockCounts = std::uint64_t{1} << 22;

/// The counts of an array, row-major.
struct Array {
  Shape shape;
  std::vector<std::uint64_t> counts;
};

/// Adds missing dimensions of size 1 for layers and steps to the shape.
/// \error kBadInput  an empty array, or a wrong number of dimensions
Status ToSteps(Array* array, const std::string& where) {
  const std::size_t dimensions = array->shape.size();
  if (dimensions == 0 || dimensions > 3 || array->counts.empty()) {
    return Fail(Errc::kBadInput, where,
                ": counts of [layers, experts] or [steps, layers, experts] "
                "expected, found the shape ",
                ToString(array->shape));
  }
  array->shape.insert(array->shape.begin(), 3 - dimensions, 1);
  return {};
}

/// Appends a record for each step. Omits the unused steps in SGLang's ring buffer.
/// \param first  number of the first step
Status AddSteps(Array array, std::uint64_t first, const std::string& where, TokenTrace* trace) {
  SW_TRY(ToSteps(&array, where));
  const std::uint64_t experts = array.shape[2];
  auto row = array.counts.cbegin();
  for (std::uint64_t step = 0; step < array.shape[0]; ++step) {
    const std::string place =
        array.shape[0] > 1 ? where + ": step " + std::to_string(first + step) : where;
    RecordBuilder record(place);
    for (std::uint64_t layer = 0; layer < array.shape[1]; ++layer) {
      const auto end = row + static_cast<std::ptrdiff_t>(experts);
      SW_TRY(record.Add(layer, {row, end}));
      row = end;
    }
    SW_TRY(Append(trace, first + step, record, place));
    const auto& tokens = trace->records.back().tokens;
    const bool idle = std::all_of(tokens.begin(), tokens.end(), [](auto t) { return t == 0; });
    if (idle && trace->format == "sglang" && array.shape[0] > 1) trace->records.pop_back();
  }
  return {};
}

// NumPy arrays.

/// Returns the value of a key in the header's dict, up to the comma that ends it.
std::string_view ValueOf(std::string_view header, std::string_view key) {
  const std::size_t at = header.find("'" + std::string(key) + "':");
  if (at == std::string_view::npos) return {};
  std::string_view value = header.substr(at + key.size() + 3);
  const bool tuple = Trimmed(value).starts_with('(');
  const std::size_t end = value.find(tuple ? ')' : ',');
  return Trimmed(value.substr(0, end == std::string_view::npos || !tuple ? end : end + 1));
}

std::optional<DType> NumpyType(std::string_view name) {
  if (name.size() < 3 || name.front() != '\'' || name.back() != '\'') return std::nullopt;
  name = name.substr(1, name.size() - 2);
  constexpr std::pair<std::string_view, DType> kTypes[] = {
      {"<i8", DType::kI64}, {"<i4", DType::kI32}, {"<i2", DType::kI16}, {"|i1", DType::kI8},
      {"<u8", DType::kU64}, {"<u4", DType::kU32}, {"<u2", DType::kU16}, {"|u1", DType::kU8},
      {"<f8", DType::kF64}, {"<f4", DType::kF32}, {"<f2", DType::kF16}};
  for (const auto& [known, type] : kTypes) {
    if (name == known) return type;
  }
  return std::nullopt;
}

std::optional<Shape> NumpyShape(std::string_view tuple) {
  if (tuple.size() < 2 || tuple.front() != '(' || tuple.back() != ')') return std::nullopt;
  std::string_view rest = tuple.substr(1, tuple.size() - 2);
  Shape shape;
  while (!Trimmed(rest).empty()) {
    const std::string_view part = Trimmed(rest.substr(0, rest.find(',')));
    const auto extent = NumberIn<std::uint64_t>(part);
    if (!extent) return std::nullopt;
    shape.push_back(*extent);
    rest.remove_prefix(std::min(
        rest.size(), rest.find(',') == std::string_view::npos ? rest.size() : rest.find(',') + 1));
  }
  return shape;
}

/// Returns the header of a .npy file and the offset of its elements.
Result<std::pair<std::string, std::uint64_t>> NumpyHeader(const os::File& file,
                                                          std::uint64_t bytes) {
  constexpr std::uint64_t kMost = 1 << 16;
  std::string start(std::min<std::uint64_t>(bytes, 12), '\0');
  SW_TRY(file.ReadAt(0, std::as_writable_bytes(std::span(start))));
  const auto byte = [&](std::size_t at) { return static_cast<unsigned char>(start[at]); };
  if (start.size() < 12 || !start.starts_with("\x93NUMPY") || byte(6) < 1 || byte(6) > 3) {
    return Fail(Errc::kBadInput, file.path(), ": not a .npy file of NumPy");
  }
  const std::uint64_t before = byte(6) == 1 ? 10 : 12;
  std::uint64_t length = byte(8) + (std::uint64_t{byte(9)} << 8);
  if (before == 12) length += (std::uint64_t{byte(10)} << 16) + (std::uint64_t{byte(11)} << 24);
  if (length > kMost || before + length > bytes) {
    return Fail(Errc::kBadInput, file.path(), ": the header of a .npy file is cut short");
  }
  std::string header(length, '\0');
  SW_TRY(file.ReadAt(before, std::as_writable_bytes(std::span(header))));
  return std::pair(std::move(header), before + length);
}

/// Converts counts from column-major to row-major order.
std::vector<std::uint64_t> RowMajor(const std::vector<std::uint64_t>& counts, const Shape& shape) {
  std::vector<std::uint64_t> ordered;
  ordered.reserve(counts.size());
  std::vector<std::uint64_t> index(shape.size(), 0);
  for (std::size_t i = 0; i < counts.size(); ++i) {
    std::uint64_t at = 0;
    for (std::size_t d = shape.size(); d-- > 0;) at = at * shape[d] + index[d];
    ordered.push_back(counts[at]);
    for (std::size_t d = shape.size(); d-- > 0;) {
      if (++index[d] < shape[d]) break;
      index[d] = 0;
    }
  }
  return ordered;
}

// Files of torch.save.

/// Reads the map from physical to logical experts, by layer; kNoExpert for slots without one.
Result<Array> ReadMap(const PtFile& pt, const pickle::Tensor& map, const std::string& where) {
  if (map.shape.size() != 2) {
    return Fail(Errc::kBadInput, where, ": [layers, slots] expected, found ", ToString(map.shape));
  }
  SW_TRY_ASSIGN(auto ids, ReadCounts(pt, map, where, true));
  return Array{map.shape, std::move(ids)};
}

/// Adds the tokens of all physical experts of each logical expert.
Result<Array> ToLogical(const Array& physical, const Array& map, const std::string& where) {
  Array steps = physical;
  SW_TRY(ToSteps(&steps, where));
  if (steps.shape[1] != map.shape[0] || steps.shape[2] != map.shape[1]) {
    return Fail(Errc::kBadInput, where, ": counts ", ToString(physical.shape),
                ", but the physical_to_logical_map is ", ToString(map.shape));
  }
  std::uint64_t experts = 0;
  for (const std::uint64_t id : map.counts) {
    if (id != kNoExpert) experts = std::max(experts, id + 1);
  }
  if (experts > limits::kMoeExperts) {
    return Fail(Errc::kBadInput, where, ": physical_to_logical_map: expert ", experts - 1,
                " does not exist, at most ", limits::kMoeExperts, " experts are supported");
  }
  Array logical;
  logical.shape = {steps.shape[0], steps.shape[1], experts};
  SW_TRY_ASSIGN(const std::uint64_t cells, CountElems(logical.shape));
  SW_TRY(CheckElems(cells, where));
  logical.counts.assign(cells, 0);
  for (std::size_t i = 0; i < steps.counts.size(); ++i) {
    const std::uint64_t id = map.counts[i % map.counts.size()];
    if (id == kNoExpert) continue;
    std::uint64_t& sum = logical.counts[i / map.shape[1] * experts + id];
    SW_TRY_ASSIGN(sum, CheckedAdd(sum, steps.counts[i]));
  }
  return logical;
}

/// Adds a record for each pass in a dump of SGLang's recorder in the mode per_pass or
/// per_token. A pass has the counts of one rank by physical expert.
Status AddPasses(const PtFile& pt, const pickle::Node& records, const pickle::Node* map,
                 TokenTrace* trace) {
  const std::string where = pt.file.path() + ": records";
  if (!records.is_list() || map == nullptr || !map->is_tensor()) {
    return Fail(Errc::kBadInput, where,
                ": a dump of SGLang's recorder with one record per pass lacks "
                "last_physical_to_logical_map");
  }
  SW_TRY_ASSIGN(const Array ids,
                ReadMap(pt, *map->tensor, pt.file.path() + ": last_physical_to_logical_map"));
  for (std::size_t i = 0; i < records.items.size(); ++i) {
    const std::string place = where + "[" + std::to_string(i) + "]";
    const pickle::Node* counts = records.items[i]->Find("global_physical_count");
    if (counts == nullptr || !counts->is_tensor()) {
      return Fail(Errc::kBadInput, place,
                  ": a pass of SGLang's recorder lacks the tensor "
                  "global_physical_count");
    }
    SW_TRY_ASSIGN(auto physical, ReadCounts(pt, *counts->tensor, place));
    SW_TRY_ASSIGN(const Array pass,
                  ToLogical({counts->tensor->shape, std::move(physical)}, ids, place));
    RecordBuilder record(place);
    const std::uint64_t experts = pass.shape[2];
    for (std::uint64_t l = 0; l < pass.shape[1]; ++l) {
      const auto row = pass.counts.begin() + static_cast<std::ptrdiff_t>(l * experts);
      SW_TRY(record.Add(l, {row, row + static_cast<std::ptrdiff_t>(experts)}));
    }
    SW_TRY(Append(trace, i, record, place));
  }
  trace->notes.push_back(StrCat(pt.file.path(),
                                ": has the passes of one SGLang rank; add the files of the "
                                "other ranks with --join"));
  return {};
}

/// Returns the tensor of the first known key with counts in a dict.
const pickle::Node* FindCounts(const pickle::Node& root, std::string_view* key) {
  for (const std::string_view name :
       {"logical_count", "expert_load_view", "expert_load_window", "expert_load_pass",
        "expert_load", "tokens_per_expert", "token_counts", "expert_counts", "tokens", "loads"}) {
    const pickle::Node* const found = root.Find(name);
    if (found == nullptr || !found->is_tensor()) continue;
    *key = name;
    return found;
  }
  return nullptr;
}

/// Adds the counts of a dict or of a single tensor.
Status AddTensors(const PtFile& pt, TokenTrace* trace) {
  const pickle::Node& root = *pt.document.root;
  const std::string& path = pt.file.path();
  std::string_view key;
  const pickle::Node* const counts = root.is_tensor() ? &root : FindCounts(root, &key);
  const pickle::Node* map = root.Find("physical_to_logical_map");
  if (const pickle::Node* records = root.Find("records"); counts == nullptr && records != nullptr) {
    return AddPasses(pt, *records, root.Find("last_physical_to_logical_map"), trace);
  }
  if (counts == nullptr) {
    const std::string found = map != nullptr ? "a placement (physical_to_logical_map) without "
                                               "token counts (pass it to --old)"
                                             : pickle::Describe(&root);
    return Fail(Errc::kBadInput, path, ": no token counts: found ", found, kForms);
  }
  const std::string where = key.empty() ? path : path + ": " + std::string(key);
  SW_TRY_ASSIGN(auto values, ReadCounts(pt, *counts->tensor, where));
  Array array{counts->tensor->shape, std::move(values)};
  if (map != nullptr && map->is_tensor() && key != "logical_count") {
    SW_TRY_ASSIGN(const Array ids, ReadMap(pt, *map->tensor, path + ": physical_to_logical_map"));
    SW_TRY_ASSIGN(array, ToLogical(array, ids, where));
  } else if (key.starts_with("expert_load") || path.find("expert_load_view") != std::string::npos) {
    trace->notes.push_back(
        StrCat(where,
               ": counts of physical experts without a physical_to_logical_map: they are used "
               "as counts of logical experts"));
  }
  return AddSteps(std::move(array), 0, where, trace);
}

}  // namespace

Result<TokenTrace> ReadTensorFile(const std::string& path) {
  SW_TRY_ASSIGN(const PtFile pt, OpenPt(path));
  TokenTrace trace;
  const bool sglang = pt.document.root->Find("logical_count") != nullptr ||
                      pt.document.root->Find("records") != nullptr;
  trace.format = sglang ? "sglang" : "pt";
  trace.serving = true;
  trace.bytes_read = pt.bytes;
  trace.files_read = 1;
  SW_TRY(AddTensors(pt, &trace));
  SW_TRY(Finish(&trace, path));
  return trace;
}

Result<TokenTrace> ReadNumpyFile(const std::string& path) {
  SW_TRY_ASSIGN(const os::File file, os::File::OpenRead(path));
  SW_TRY_ASSIGN(const os::Identity identity, file.Stat());
  SW_TRY_ASSIGN(const auto header, NumpyHeader(file, identity.bytes));
  const std::string_view type = ValueOf(header.first, "descr");
  const auto dtype = NumpyType(type);
  if (!dtype) {
    return Fail(Errc::kUnsupported, path, ": a .npy file of type ", type,
                ": whole or real numbers in little-endian order expected");
  }
  const auto shape = NumpyShape(ValueOf(header.first, "shape"));
  const std::string_view order = ValueOf(header.first, "fortran_order");
  if (!shape || (order != "True" && order != "False")) {
    return Fail(Errc::kBadInput, path, ": the header of a .npy file lacks shape or fortran_order");
  }
  SW_TRY_ASSIGN(const std::uint64_t elems, CountElems(*shape));
  SW_TRY_ASSIGN(const std::uint64_t needed, CheckedMul(elems, ItemSize(*dtype)));
  if (identity.bytes - header.second != needed) {
    return Fail(Errc::kBadInput, path, ": shape ", ToString(*shape), ": expected ", needed,
                " bytes of elements, found ", identity.bytes - header.second);
  }
  TokenTrace trace;
  trace.format = "npy";
  trace.serving = true;
  trace.bytes_read = identity.bytes;
  trace.files_read = 1;
  // Reads steps in blocks, because a file may have more counts than are kept at a time.
  const bool steps = shape->size() == 3 && order == "False" && elems > 0;
  const std::uint64_t cells = steps ? elems / shape->front() : elems;
  SW_TRY(CheckElems(cells, path));
  const std::uint64_t block = steps ? std::max<std::uint64_t>(1, kBlockCounts / cells) : 1;
  for (std::uint64_t step = 0; step < (steps ? shape->front() : 1); step += block) {
    Shape part = *shape;
    if (steps) part.front() = std::min(block, shape->front() - step);
    std::vector<std::byte> bytes(Elems(part) * ItemSize(*dtype));
    SW_TRY(file.ReadAt(header.second + step * cells * ItemSize(*dtype), bytes));
    SW_TRY_ASSIGN(auto counts, Counts(*dtype, bytes, part, path));
    if (order == "True") counts = RowMajor(counts, part);
    SW_TRY(AddSteps({std::move(part), std::move(counts)}, step, path, &trace));
  }
  SW_TRY(Finish(&trace, path));
  return trace;
}

}  // namespace shardwright::token_counts
