// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "checkpoints/pickled/wrappers.h"
#include "checkpoints/safetensors/adapter_internal.h"
#include "checkpoints/safetensors/notes_internal.h"
#include "checkpoints/safetensors/safetensors.h"
#include "checkpoints/tp_rules/quantized.h"
#include "engine/layout/shard_map.h"
#include "engine/layout/states.h"
#include "engine/layout/whole_cuts.h"
#include "files/safetensors/index.h"
#include "files/safetensors/layout.h"
#include "support/base/checked.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::safetensors {
namespace {

namespace file_format = shardwright::safetensors;

/// A tensor to be written.
struct Item {
  std::uint32_t param = 0;
  std::string state;
  DType dtype = DType::kF32;
  std::uint64_t bytes = 0;
};

/// Returns tensors that are not trained and belong to quantized weights; they keep their types.
std::set<std::string, std::less<>> UnconvertedOf(const Checkpoint& source) {
  auto names = QuantizationTensors(source);
  for (const Param& param : source.params) {
    if (param.kind == ParamKind::kTrainable) names.erase(param.name);
  }
  return names;
}

/// Returns true for PyTorch Lightning checkpoints, which record its version.
bool IsOfLightning(const Checkpoint& source) {
  if (source.facts.contains(std::string(kLightningFact))) return true;
  if (source.own == nullptr) return false;
  const std::vector<std::string> contents = source.own->Contents();
  return std::any_of(contents.begin(), contents.end(), [](const std::string& one) {
    return one.find(kLightningFact) != std::string::npos;
  });
}

class Writer {
 public:
  Writer(const Checkpoint& source, const FilesLayout& layout)
      : source_(source), layout_(layout), unconverted_(UnconvertedOf(source)) {}

  Result<Written> Run() {
    SW_TRY(CheckMasters());
    SW_TRY(ChooseNames());
    SW_TRY(MakeItems());
    CutFiles();
    MakeNotes();
    for (std::size_t file = 0; file < begin_.size(); ++file) SW_TRY(AddFile(file));
    if (begin_.size() > 1) AddIndex();
    if (!adapter_.config.empty()) AddText(kAdapterConfig, adapter_.config);
    TellWhatIsLeft();
    return std::move(out_);
  }

 private:
  Status CheckMasters() const;
  Status ChooseNames();
  Status AddItem(std::uint32_t param);
  Status MakeItems();
  std::string FileName(std::size_t file) const;
  void AddText(std::string_view path, std::string text);
  Item ItemOf(std::uint32_t index) const;
  void CutFiles();
  void MakeNotes();
  Status AddFile(std::size_t file);
  std::uint32_t AddArray(const Item& item, const plan::Payload& payload);
  Result<std::map<std::string, std::string>> MetadataOf(std::size_t first, std::size_t last) const;
  void AddIndex();
  void TellWhatIsLeft();

  std::size_t EndOf(std::size_t file) const {
    return file + 1 < begin_.size() ? begin_[file + 1] : items_.size();
  }

  const Checkpoint& source_;
  const FilesLayout& layout_;
  const std::set<std::string, std::less<>> unconverted_;  // such as scales of quantized weights
  std::vector<Item> items_;                               // in the order of the model
  std::vector<std::size_t> begin_;                        // for each file, its first item
  std::vector<std::string> names_;                        // names in the files, by parameter
  AdapterFolder adapter_;
  Notes notes_;  // without the notes for the tensors of one file
  layout::WholeCuts cuts_;
  Written out_;
};

/// Selects the state of a parameter to write, and its type. Buffers, quantized weights and their
/// scales keep their types.
Item Writer::ItemOf(std::uint32_t index) const {
  const Param& param = source_.params[index];
  Item item;
  item.param = index;
  item.dtype = param.dtype;
  const bool convert =
      layout_.convert && IsTrained(param.dtype) && !unconverted_.contains(param.name);
  switch (param.kind) {
    case ParamKind::kBuffer:
      item.state = layout::kBuffer;
      break;
    case ParamKind::kFrozen:
      item.state = layout::kFrozen;
      if (convert) item.dtype = layout_.dtype;
      break;
    case ParamKind::kTrainable:
      item.state = layout_.only == Only::kMaster ? layout::kMaster : layout::kWeight;
      if (layout_.only == Only::kMaster) item.dtype = DType::kF32;
      if (convert) item.dtype = layout_.dtype;
      break;
  }
  return item;
}

/// Fails if master weights are requested but unreadable; narrower weights cannot replace them.
Status Writer::CheckMasters() const {
  if (layout_.only != Only::kMaster || !source_.only_weights || !source_.only_weights->masters) {
    return {};
  }
  for (const Param& param : source_.params) {
    if (param.kind != ParamKind::kTrainable || param.dtype == DType::kF32) continue;
    const Error& why = source_.only_weights->why;
    return Fail(why.code, "--only master: the master weight of ", Quoted(param.name),
                " cannot be read: ", why.message, "; --only weight writes the compute weights");
  }
  return {};
}

/// Chooses names for the files: without wrapper parts, and in PEFT's form for an adapter.
Status Writer::ChooseNames() {
  std::vector<std::string_view> given;
  given.reserve(source_.params.size());
  for (const Param& param : source_.params) given.push_back(param.name);
  Unwrapped unwrapped = Unwrap(given, IsOfLightning(source_));
  SW_TRY_ASSIGN(adapter_, MakeAdapterFolder(source_, layout_, unwrapped.names));
  out_.notes = adapter_.notes;
  if (!adapter_.tensors.empty()) {
    names_.resize(source_.params.size());
    for (const AdapterFolder::Tensor& one : adapter_.tensors) names_[one.param] = one.name;
    return {};
  }
  if (layout_.keep_prefixes || !unwrapped.changed()) {
    names_.assign(given.begin(), given.end());
    return {};
  }
  std::vector<std::string> removed = unwrapped.wrappers;
  if (!unwrapped.front.empty()) removed.push_back(unwrapped.front);
  out_.notes.push_back("tensor names are written without the parts that wrappers added: " +
                       Joined(removed, ", ") + "; --keep-prefixes keeps them");
  names_ = std::move(unwrapped.names);
  return {};
}

Status Writer::AddItem(std::uint32_t param) {
  Item item = ItemOf(param);
  SW_TRY_ASSIGN(const std::uint64_t elems, CountElems(source_.params[param].shape));
  SW_TRY_ASSIGN(item.bytes, CheckedMul(elems, ItemSize(item.dtype)));
  items_.push_back(std::move(item));
  return {};
}

Status Writer::MakeItems() {
  for (const AdapterFolder::Tensor& one : adapter_.tensors) SW_TRY(AddItem(one.param));
  if (!adapter_.tensors.empty()) return {};
  for (std::uint32_t i = 0; i < source_.params.size(); ++i) {
    if (source_.params[i].alias_of.empty()) SW_TRY(AddItem(i));
  }
  return {};
}

std::string Writer::FileName(std::size_t file) const {
  if (!adapter_.tensors.empty()) return std::string(kAdapterFile);
  return file_format::FileName(file, begin_.size());
}

void Writer::AddText(std::string_view path, std::string text) {
  out_.target.map.files.emplace_back(path);
  out_.target.files.push_back(plan::TextFile(std::string(path), std::move(text)));
}

void Writer::CutFiles() {
  begin_.push_back(0);
  if (!adapter_.tensors.empty()) return;  // PEFT reads only one file
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < items_.size(); ++i) {
    const std::uint64_t next = items_[i].bytes;
    if (i > begin_.back() && (next > layout_.shard_bytes || bytes > layout_.shard_bytes - next)) {
      begin_.push_back(i);
      bytes = 0;
    }
    bytes += next;
  }
}

void Writer::MakeNotes() {
  notes_.state = layout_.only == Only::kMaster ? layout::kMaster : layout::kWeight;
  if (layout_.only == Only::kMaster) notes_.dtype = source_.layout.dtype;
  notes_.optimizer = source_.optimizer;
  if (source_.iteration) notes_.iteration = *source_.iteration;
  notes_.consumed_samples = source_.consumed_samples;
  for (const Group& group : source_.groups) notes_.groups.push_back({group.hyper, group.moe});
  if (notes_.groups.empty()) notes_.groups.emplace_back();  // for parameters without a group
  for (std::uint32_t i = 0; i < source_.params.size(); ++i) {
    const Param& param = source_.params[i];
    if (param.alias_of.empty()) continue;
    const auto holder =
        std::find_if(source_.params.begin(), source_.params.end(),
                     [&](const Param& other) { return other.name == param.alias_of; });
    const auto at = static_cast<std::size_t>(holder - source_.params.begin());
    if (at < names_.size()) notes_.tied.emplace(names_[i], TieNote{names_[at], i});
  }
}

/// Returns the `__metadata__` of a file.
/// \param first, last  range of the file's items, in the order of the model
Result<std::map<std::string, std::string>> Writer::MetadataOf(std::size_t first,
                                                              std::size_t last) const {
  std::map<std::string, std::string> values;
  if (const auto* own = dynamic_cast<const FileMetadata*>(source_.own.get())) values = own->values;
  values.emplace("format", "pt");
  if (!source_.order_unknown.empty() || !adapter_.tensors.empty()) return values;
  std::vector<file_format::TensorSpec> specs;
  for (std::size_t i = first; i < last; ++i) {
    const Param& param = source_.params[items_[i].param];
    specs.push_back({names_[items_[i].param], items_[i].dtype, param.shape});
  }
  SW_TRY_ASSIGN(const file_format::Layout order, file_format::Layout::Make(specs, {}));
  Notes notes = notes_;
  std::vector<const std::string*> names;
  for (const std::uint32_t at : order.order()) {
    const std::uint32_t index = items_[first + at].param;
    const Param& param = source_.params[index];
    TensorNote note;
    note.place = index;
    note.group = param.kind == ParamKind::kTrainable ? std::max(param.group, 0)
                 : param.kind == ParamKind::kFrozen  ? TensorNote::kFrozen
                                                     : TensorNote::kBuffer;
    notes.tensors.push_back(note);
    names.push_back(&names_[index]);
    if (param.expert) notes.experts.emplace(names_[index], *param.expert);
  }
  if (first > 0) notes.tied.clear();  // only the first file of a set has them
  values[std::string(kNotesKey)] = NotesText(notes, names);
  return values;
}

std::uint32_t Writer::AddArray(const Item& item, const plan::Payload& payload) {
  layout::ShardMap& map = out_.target.map;
  const Param& param = source_.params[item.param];
  const auto array = static_cast<std::uint32_t>(map.arrays.size());
  map.arrays.push_back({.dtype = item.dtype,
                        .regions = {{.member = static_cast<std::uint32_t>(map.members.size()),
                                     .offset = 0,
                                     .elems = Elems(param.shape)}}});
  map.members.push_back({.file = static_cast<std::uint32_t>(out_.target.files.size()),
                         .offset = payload.offset,
                         .bytes = payload.bytes,
                         .crc32 = std::nullopt,
                         .name = names_[item.param]});
  layout::LogicalTensor tensor;
  tensor.name = param.name;
  tensor.state = item.state;
  tensor.dtype = item.dtype;
  tensor.shape = param.shape;
  layout::Fragment fragment;
  fragment.cut = cuts_.Of(param.shape);
  fragment.at.array = array;
  tensor.fragments.push_back(std::move(fragment));
  map.tensors.push_back(std::move(tensor));
  return array;
}

Status Writer::AddFile(std::size_t file) {
  const std::size_t first = begin_[file];
  const std::size_t last = EndOf(file);
  plan::OutputFile output;
  output.path = FileName(file);
  std::vector<file_format::TensorSpec> specs;
  for (std::size_t i = first; i < last; ++i) {
    const Param& param = source_.params[items_[i].param];
    specs.push_back({names_[items_[i].param], items_[i].dtype, param.shape});
  }
  const auto metadata = MetadataOf(first, last);
  if (!metadata) return Within(output.path, metadata.error());
  const auto layout = file_format::Layout::Make(specs, *metadata);
  if (!layout) {
    Error error = layout.error();
    if (error.code == Errc::kLimit) error.message += "; give a smaller shard-size";
    return Within(output.path, std::move(error));
  }
  output.bytes = layout->file_bytes();
  for (const std::uint32_t at : layout->order()) {
    plan::Payload payload;
    payload.offset = layout->offset(at);
    payload.bytes = layout->bytes(at);
    if (payload.bytes == 0) continue;
    payload.array = AddArray(items_[first + at], payload);
    output.payloads.push_back(std::move(payload));
  }
  output.frame = [head = std::make_shared<const std::string>(layout->head())](
                     std::span<const std::uint32_t>, const plan::PutFrame& put) {
    return put(0, *head);
  };
  out_.target.map.files.push_back(output.path);
  out_.target.files.push_back(std::move(output));
  return {};
}

void Writer::AddIndex() {
  file_format::Index index;
  index.total_bytes = 0;
  for (std::size_t file = 0; file < begin_.size(); ++file) {
    const std::string name = FileName(file);
    for (std::size_t i = begin_[file]; i < EndOf(file); ++i) {
      *index.total_bytes += items_[i].bytes;
      index.files.emplace(names_[items_[i].param], name);
    }
  }
  AddText(file_format::kIndexName, file_format::IndexText(index));
}

void Writer::TellWhatIsLeft() {
  std::vector<std::string>& left = out_.not_carried;
  left = adapter_.not_carried;
  // If master weights have the type of the weights, there is only one set, which is written.
  std::unordered_map<std::string_view, DType> weights;
  for (const Param& param : source_.params) weights.emplace(param.name, param.dtype);
  bool masters = false;
  for (const layout::LogicalTensor& tensor : source_.map.tensors) {
    const auto weight = weights.find(tensor.name);
    const bool same = weight != weights.end() && weight->second == tensor.dtype;
    masters = masters || (tensor.state == layout::kMaster && !same);
  }
  if (masters && layout_.only == Only::kWeight) {
    left.emplace_back(
        "the master weights: --only master writes them instead of the compute weights");
  }
  if (!source_.states.empty()) {
    std::string names;
    for (const std::string& state : source_.states) names += (names.empty() ? "" : ", ") + state;
    left.push_back("optimizer state: " + names);
  }
  if (source_.own != nullptr && dynamic_cast<const FileMetadata*>(source_.own.get()) == nullptr) {
    const std::vector<std::string> contents = source_.own->Contents();
    for (const std::string& one : contents) left.push_back(one);
  }
  std::map<DType, std::uint64_t> kept;
  for (const Item& item : items_) {
    const Param& param = source_.params[item.param];
    const bool packed = IsFloating(param.dtype) && ItemSize(param.dtype) == 1;
    const bool stays = packed || (IsFloating(param.dtype) && unconverted_.contains(param.name));
    if (layout_.convert && stays && item.dtype != layout_.dtype) ++kept[item.dtype];
  }
  for (const auto& [dtype, count] : kept) {
    left.push_back(StrCat("the conversion of ", Plural(count, "tensor"), " of ", Name(dtype),
                          ", which are copied unchanged: quantized weights and their scales belong "
                          "together"));
  }
}

}  // namespace

Result<Written> Write(const Checkpoint& source, const Layout& layout) {
  const auto* own = dynamic_cast<const FilesLayout*>(layout.own.get());
  SW_CHECK(own != nullptr);
  return Writer(source, *own).Run();
}

}  // namespace shardwright::checkpoints::safetensors
