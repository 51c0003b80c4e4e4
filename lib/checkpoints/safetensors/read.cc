// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>

#include "checkpoints/pickled/map_builder.h"
#include "checkpoints/safetensors/notes_internal.h"
#include "checkpoints/safetensors/safetensors.h"
#include "checkpoints/tp_rules/quantized.h"
#include "checkpoints/tp_rules/rule_source.h"
#include "engine/layout/mesh_cut.h"
#include "engine/layout/states.h"
#include "engine/layout/whole_cuts.h"
#include "files/safetensors/header.h"
#include "files/safetensors/index.h"
#include "support/base/checked.h"
#include "support/base/text.h"
#include "support/json/json.h"

namespace shardwright::checkpoints::safetensors {
namespace {

namespace file_format = shardwright::safetensors;

/// The metadata key that records which piece of a tensor a file contains.
constexpr const char* kPiecesKey = "DCP_SHARDING_INFO";
constexpr std::string_view kPieceStem = "shard-";

/// Ends the message about an index that does not match the files next to it.
constexpr const char* kStale =
    ": the index is of other files: move it away to read the files as they are named";

/// A tensor of the set, or one piece of it.
struct Tensor {
  file_format::Entry entry;
  std::uint32_t file = 0;
  std::uint32_t storage = 0;
  TensorNote note;                  // only if there are notes
  std::optional<Shape> offsets;     // of a piece: its first element in the full tensor
  std::vector<std::uint32_t> more;  // of the first piece: the other pieces
  bool is_more = false;             // one of the other pieces
};

/// Returns true if two files are numbered parts of one set. Without
/// an index, any other file in a folder may be a separate model.
bool OfOneSet(std::string_view a, std::string_view b) {
  const auto one = ParseNumbered(a);
  const auto other = ParseNumbered(b);
  return one && other && one->stem == other->stem && one->count == other->count;
}

/// Checks that numbered files without an index are one complete set and the only one.
Status CheckNumbers(const SourceSet& source) {
  std::map<std::string, std::map<std::uint64_t, std::set<std::uint64_t>>> sets;
  for (const SourceFile& file : source.files) {
    if (const auto numbered = ParseNumbered(file.name)) {
      sets[numbered->stem][numbered->count].insert(numbered->number);
    }
  }
  for (const auto& [stem, counts] : sets) {
    // Ranks without data for a file do not write it.
    if (stem.starts_with(kPieceStem)) continue;
    if (counts.size() > 1) {
      return Fail(Errc::kUnsupported, stem, "-*", file_format::kSuffix, ": of ",
                  counts.begin()->first, " and of ", counts.rbegin()->first,
                  " files, and no index says which of them count: move one of the sets to a "
                  "folder of its own");
    }
    const auto& [count, numbers] = *counts.begin();
    for (std::uint64_t i = 0; i < count; ++i) {
      if (!numbers.contains(i + 1)) {
        return Fail(Errc::kNotFound, stem, "-*", file_format::kSuffix, ": ", numbers.size(), " of ",
                    count, " files are there, number ", i + 1,
                    " is missing: an incomplete download or save");
      }
    }
  }
  return {};
}

class Reader {
 public:
  Reader(const SourceSet& source, const Patterns& patterns)
      : source_(source), patterns_(patterns) {}

  Result<Checkpoint> Run() {
    out_.origin = "safetensors";
    out_.tag = source_.tag;
    out_.arena = std::make_shared<pickle::Arena>();
    out_.warnings = source_.warnings;
    SW_TRY(ReadIndex());
    SW_TRY(ReadHeaders());
    SW_TRY(CheckNames());
    TakeNotes();
    MakeParams();
    AddTied();
    Order();
    SW_TRY(DecideRules());
    SW_TRY(AddTensors());
    MakeGroups();
    Finish();
    return std::move(out_);
  }

 private:
  Status ReadIndex();
  Status ReadHeaders();
  Status ReadHeader(std::uint32_t file);
  Status SetPieces(std::uint32_t file, const std::string& text);
  Status CheckPieces();
  Status CheckNames();
  void TakeNotes();
  bool NotesAgree();
  void MergeMetadata();
  void MakeParams();
  void AddTied();
  void Order();
  Result<Shape> WholeShape(const Tensor& first) const;
  Status DecideRules();
  Status AddFragment(const Tensor& tensor, MapBuilder* map, layout::LogicalTensor* logical);
  Status AddTensors();
  void MakeGroups();
  void Finish();

  void Warn(std::string text) { out_.warnings.push_back(std::move(text)); }
  const std::string& NameOf(std::uint32_t file) const { return source_.files[file].name; }

  const SourceSet& source_;
  const Patterns& patterns_;
  Checkpoint out_;
  file_format::Index index_;
  std::vector<file_format::Header> headers_;                // by file, without their entries
  std::vector<Tensor> tensors_;                             // by file, in the order of their bytes
  std::unordered_map<std::string, std::uint32_t> by_name_;  // index into tensors_
  std::optional<Notes> notes_;                              // merged notes of all files
  std::vector<std::uint64_t> places_;                       // by index of the parameter
  layout::WholeCuts cuts_;
};

Status Reader::ReadIndex() {
  if (source_.manifest.empty()) return CheckNumbers(source_);
  SW_TRY_ASSIGN(index_, file_format::ParseIndex(source_.manifest, source_.tag + ": index"));
  std::set<std::string_view> there;
  for (const SourceFile& file : source_.files) there.insert(file.name);
  std::set<std::string> missing;
  for (const auto& [name, file] : index_.files) {
    if (!there.contains(file)) missing.insert(file);
  }
  if (missing.empty()) return {};
  return Fail(Errc::kNotFound, source_.tag, ": the index names files that are not there: ",
              FirstFew({missing.begin(), missing.end()}),
              ": an incomplete download or save, or a stale index: without it "
              "the files are read as they are named");
}

Status Reader::ReadHeader(std::uint32_t file) {
  const SourceFile& source = source_.files[file];
  const auto broken = [&](const std::string& what) {
    return Fail(Errc::kBadInput, source.name, ": ", what);
  };
  if (source.containers.size() != 1) return broken("one header expected");
  const shardwright::files::ContainerMetadata& metadata = *source.containers.front().metadata;
  if (metadata.head != shardwright::files::Head::kJson) return broken("a JSON header expected");
  // Offsets in a catalogue with payloads differ from the header; sizes do not.
  std::uint64_t bytes = file_format::kLengthBytes + metadata.header.size();
  for (const auto& storage : metadata.storages) bytes += storage.bytes;
  auto header = file_format::ParseHeader({metadata.header, bytes});
  if (!header) return Within(source.name, header.error());
  if (header->entries.size() != metadata.storages.size()) {
    return broken(std::to_string(header->entries.size()) + " tensors in the header, " +
                  std::to_string(metadata.storages.size()) + " payloads");
  }
  for (std::uint32_t i = 0; i < header->entries.size(); ++i) {
    file_format::Entry& entry = header->entries[i];
    if (entry.bytes != metadata.storages[i].bytes) return broken("payloads of other sizes");
    Tensor& tensor = tensors_.emplace_back();
    tensor.entry = std::move(entry);
    tensor.file = file;
    tensor.storage = i;
  }
  header->entries.clear();
  const auto pieces = header->metadata.find(kPiecesKey);
  if (pieces != header->metadata.end()) {
    if (Status set = SetPieces(file, pieces->second); !set) return Within(source.name, set.error());
    header->metadata.erase(pieces);
    header->metadata.erase("DCP_VERSION");
  }
  for (const std::string& warning : header->warnings) Warn(source.name + ": " + warning);
  headers_.push_back(*std::move(header));
  return {};
}

/// Sets the offsets of the pieces in a file.
/// \param text  JSON object: for each tensor name, its offsets in the full tensor
Status Reader::SetPieces(std::uint32_t file, const std::string& text) {
  SW_TRY_ASSIGN(const json::Json root, json::Parse(text, kPiecesKey));
  // The tensors of this file are the last ones in the list.
  std::size_t first = tensors_.size();
  while (first > 0 && tensors_[first - 1].file == file) --first;
  for (Tensor& tensor : std::span(tensors_).subspan(first)) {
    const json::Json* info = json::Find(root, tensor.entry.name.c_str());
    const json::Json* offsets = info == nullptr ? nullptr : json::Find(*info, "saved_offsets");
    const std::string where = "tensor " + Quoted(tensor.entry.name) + ": where it begins";
    if (offsets == nullptr || !offsets->is_array()) {
      return Fail(Errc::kBadInput, where, " is not told");
    }
    SW_TRY_ASSIGN(const Shape shape, file_format::ElemShape(tensor.entry));
    if (offsets->size() != shape.size()) {
      return Fail(Errc::kBadInput, where, ": ", shape.size(), " numbers expected");
    }
    Shape at;
    for (const json::Json& offset : *offsets) {
      SW_TRY_ASSIGN(const std::uint64_t count,
                    json::WholeOf(offset, 0, std::uint64_t{1} << 62, where));
      at.push_back(count);
    }
    tensor.offsets = std::move(at);
  }
  return {};
}

/// Checks that the ranks in the names of the piece files have no gaps.
Status Reader::CheckPieces() {
  std::set<std::string, std::less<>> ranks;
  for (const SourceFile& file : source_.files) {
    if (!file.name.starts_with(kPieceStem)) continue;
    const std::string_view rest = std::string_view(file.name).substr(kPieceStem.size());
    ranks.emplace(rest.substr(0, rest.find('-')));
  }
  if (ranks.empty()) return {};
  std::uint64_t next = 1;
  for (const std::string& rank : ranks) {
    std::string wanted = std::to_string(next++);
    if (wanted.size() < rank.size()) wanted.insert(0, rank.size() - wanted.size(), '0');
    if (rank == wanted) continue;
    return Fail(Errc::kNotFound, source_.tag, ": the pieces of rank ", wanted,
                " are missing: ", std::string(kPieceStem).append(wanted).append("-*"));
  }
  Warn("pieces of " + std::to_string(ranks.size()) +
       " ranks: the files do not tell how many ranks there were, nor how large the tensors are");
  return {};
}

Status Reader::ReadHeaders() {
  for (std::uint32_t file = 0; file < source_.files.size(); ++file) SW_TRY(ReadHeader(file));
  return CheckPieces();
}

/// Checks that no tensor occurs twice and that the index lists the file of each tensor.
Status Reader::CheckNames() {
  std::uint64_t total = 0;
  std::vector<std::string> unlisted;
  for (std::uint32_t i = 0; i < tensors_.size(); ++i) {
    Tensor& tensor = tensors_[i];
    const std::string& name = tensor.entry.name;
    total += tensor.entry.bytes;
    const auto [at, fresh] = by_name_.emplace(name, i);
    if (!fresh && tensor.offsets && tensors_[at->second].offsets) {
      tensors_[at->second].more.push_back(i);
      tensor.is_more = true;
      continue;
    }
    if (!fresh) {
      const bool several = source_.manifest.empty() &&
                           !OfOneSet(NameOf(tensors_[at->second].file), NameOf(tensor.file));
      return Fail(several ? Errc::kUnsupported : Errc::kBadInput, "tensor \"", name, "\": in ",
                  NameOf(tensors_[at->second].file), " and in ", NameOf(tensor.file),
                  (several ? ": several sets of weights in one folder: give one file as INPUT, "
                             "or move one of the sets to a folder of its own"
                           : ""));
    }
    if (source_.manifest.empty()) continue;
    const auto listed = index_.files.find(name);
    if (listed == index_.files.end()) {
      unlisted.push_back(name);
    } else if (listed->second != NameOf(tensor.file)) {
      return Fail(Errc::kBadInput, "tensor \"" + name + "\": in " + NameOf(tensor.file) +
                                       ", the index says " + listed->second + kStale);
    }
  }
  for (const auto& [name, file] : index_.files) {
    if (by_name_.contains(name)) continue;
    return Fail(Errc::kBadInput, "tensor ", Quoted(name), ": the index says it is in ", file,
                ", which lacks it", kStale);
  }
  if (!unlisted.empty()) Warn("tensors that the index does not list: " + FirstFew(unlisted));
  if (index_.total_bytes && *index_.total_bytes != total) {
    Warn("the index speaks of " + std::to_string(*index_.total_bytes) + " bytes of tensors, " +
         std::to_string(total) + " are there");
  }
  return {};
}

/// Merges the notes of all files. Uses them only if they are complete and consistent.
void Reader::TakeNotes() {
  Notes all;
  std::uint32_t noted = 0;
  std::string wrong;
  std::vector<const std::string*> names;
  std::size_t first = 0;
  for (std::uint32_t file = 0; file < headers_.size() && wrong.empty(); ++file) {
    std::size_t last = first;
    names.clear();
    for (; last < tensors_.size() && tensors_[last].file == file; ++last) {
      names.push_back(&tensors_[last].entry.name);
    }
    const auto text = headers_[file].metadata.find(std::string(kNotesKey));
    if (text != headers_[file].metadata.end()) {
      auto notes = ParseNotes(text->second, names);
      if (!notes) {
        wrong = NameOf(file) + ": " + notes.error().message;
        break;
      }
      for (std::size_t i = first; i < last; ++i) tensors_[i].note = notes->tensors[i - first];
      all.tied.merge(notes->tied);
      all.experts.merge(notes->experts);
      notes->tied = std::move(all.tied);
      notes->experts = std::move(all.experts);
      const bool same = noted == 0 || (notes->state == all.state && notes->dtype == all.dtype &&
                                       notes->groups.size() == all.groups.size() &&
                                       notes->iteration == all.iteration);
      all = *std::move(notes);
      if (!same) wrong = NameOf(file) + ": its notes are of another save";
      ++noted;
    }
    first = last;
  }
  if (noted == 0 && wrong.empty()) return;
  if (wrong.empty() && noted < headers_.size()) wrong = "only some files have notes";
  notes_ = std::move(all);
  if (wrong.empty() && !NotesAgree()) wrong = "the notes of the files contradict each other";
  if (wrong.empty()) return;
  notes_.reset();
  Warn(wrong + ": the notes of Shardwright are not used");
}

/// Checks that every position occurs once and that trained tensors have a trainable type.
bool Reader::NotesAgree() {
  std::set<std::uint64_t> places;
  for (const Tensor& tensor : tensors_) {
    if (!places.insert(tensor.note.place).second) return false;
    if (tensor.note.group >= 0 && !IsTrained(tensor.entry.dtype)) return false;
  }
  return std::all_of(notes_->tied.begin(), notes_->tied.end(), [&](const auto& tie) {
    return places.insert(tie.second.place).second && by_name_.contains(tie.second.holder) &&
           !by_name_.contains(tie.first);
  });
}

void Reader::MakeParams() {
  std::set<std::string, std::less<>> kept;
  if (!notes_) {  // otherwise the notes record which tensors are trained
    std::vector<NamedTensor> all;
    all.reserve(tensors_.size());
    for (const Tensor& one : tensors_) {
      all.push_back({one.entry.name, one.entry.dtype, one.entry.shape});
    }
    kept = QuantizationTensors(all);
    if (!kept.empty()) Warn(KeptWithWeights(kept.size()));
  }
  for (const Tensor& tensor : tensors_) {
    if (tensor.is_more) continue;
    Param param;
    param.name = tensor.entry.name;
    param.dtype = tensor.entry.dtype;
    const bool trained =
        notes_ ? tensor.note.group >= 0 : IsTrained(param.dtype) && !kept.contains(param.name);
    param.kind = trained ? ParamKind::kTrainable : ParamKind::kBuffer;
    if (notes_ && tensor.note.group == TensorNote::kFrozen) param.kind = ParamKind::kFrozen;
    if (trained && notes_) param.group = static_cast<std::int32_t>(tensor.note.group);
    if (trained && notes_ && notes_->state == layout::kMaster && notes_->dtype)
      param.dtype = *notes_->dtype;
    if (notes_) {
      const auto expert = notes_->experts.find(param.name);
      if (expert != notes_->experts.end()) param.expert = expert->second;
    }
    places_.push_back(tensor.note.place);
    out_.params.push_back(std::move(param));
  }
}

/// Adds tied names without data, from our notes or from the
/// metadata entries that save_model of safetensors writes.
void Reader::AddTied() {
  std::map<std::string, TieNote> tied;
  if (notes_) {
    tied = notes_->tied;
  } else {
    for (const file_format::Header& header : headers_) {
      for (const auto& [key, value] : header.metadata) {
        if (key != "format" && !by_name_.contains(key) && by_name_.contains(value)) {
          tied.emplace(key, TieNote{value, 0});
        }
      }
    }
  }
  for (const auto& [name, tie] : tied) {
    Param param = out_.params[by_name_.at(tie.holder)];
    param.name = name;
    param.alias_of = tie.holder;
    param.expert.reset();
    places_.push_back(tie.place);
    out_.params.push_back(std::move(param));
  }
}

/// Sorts parameters in the order of the notes, or by name if there are none.
void Reader::Order() {
  std::vector<std::uint32_t> order(out_.params.size());
  for (std::uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    if (notes_) return places_[a] < places_[b];
    return NaturalLess(out_.params[a].name, out_.params[b].name);
  });
  std::vector<Param> params;
  params.reserve(order.size());
  for (const std::uint32_t i : order) params.push_back(std::move(out_.params[i]));
  out_.params = std::move(params);
  if (!notes_) {
    out_.order_unknown =
        "files of safetensors do not tell in which order a model has its parameters, nor which of "
        "them are trained, unless Shardwright has written them";
  }
}

/// Returns the shape of a tensor. For a tensor in pieces, the shape that covers all pieces.
Result<Shape> Reader::WholeShape(const Tensor& first) const {
  SW_TRY_ASSIGN(Shape whole, file_format::ElemShape(first.entry));
  if (!first.offsets) return whole;
  std::vector<const Tensor*> pieces = {&first};
  for (const std::uint32_t i : first.more) pieces.push_back(&tensors_[i]);
  for (const Tensor* piece : pieces) {
    SW_TRY_ASSIGN(const Shape shape, file_format::ElemShape(piece->entry));
    if (shape.size() != whole.size() || piece->entry.dtype != first.entry.dtype) {
      return Fail(Errc::kBadInput, "tensor ", Quoted(first.entry.name), ": its pieces in ",
                  NameOf(first.file), " and ", NameOf(piece->file), " are of two types or ranks");
    }
    for (std::size_t dim = 0; dim < whole.size(); ++dim) {
      SW_TRY_ASSIGN(const std::uint64_t end, CheckedAdd((*piece->offsets)[dim], shape[dim]));
      whole[dim] = std::max(whole[dim], end);
    }
  }
  SW_TRY(CountElems(whole));
  return whole;
}

Status Reader::DecideRules() {
  std::vector<std::string> names;
  std::vector<Shape> shapes;
  for (Param& param : out_.params) {
    if (!param.alias_of.empty()) continue;
    SW_TRY_ASSIGN(param.shape, WholeShape(tensors_[by_name_.at(param.name)]));
    names.push_back(param.name);
    shapes.push_back(param.shape);
  }
  const Patterns chosen = patterns_.ForModel(names, shapes);
  std::unordered_map<std::string, std::uint32_t> holders;
  for (std::uint32_t i = 0; i < out_.params.size(); ++i) {
    Param& param = out_.params[i];
    if (!param.alias_of.empty()) continue;
    SW_TRY_ASSIGN(Ruled ruled, DecideRule({}, chosen, param.name, std::span(&param.shape, 1)));
    param.rule = std::move(ruled.rule);
    holders.emplace(param.name, i);
  }
  for (Param& param : out_.params) {
    if (param.alias_of.empty()) continue;
    const Param& holder = out_.params[holders.at(param.alias_of)];
    param.shape = holder.shape;
    param.rule = holder.rule;
  }
  return {};
}

Status Reader::AddFragment(const Tensor& tensor, MapBuilder* map, layout::LogicalTensor* logical) {
  SW_TRY_ASSIGN(const Shape sizes, file_format::ElemShape(tensor.entry));
  layout::Fragment fragment;
  if (tensor.offsets) {
    if (Elems(sizes) == 0 && Elems(logical->shape) > 0) return {};
    SW_TRY_ASSIGN(layout::Cut cut, layout::CutOf(logical->shape, {*tensor.offsets, sizes}));
    fragment.cut = std::make_shared<const layout::Cut>(std::move(cut));
  } else {
    fragment.cut = cuts_.Of(sizes);
  }
  fragment.at.array = map->AddWhole({.member = map->MemberOf(tensor.file, 0, tensor.storage),
                                     .offset = 0,
                                     .elems = Elems(sizes),
                                     .dtype = tensor.entry.dtype});
  logical->fragments.push_back(std::move(fragment));
  return {};
}

Status Reader::AddTensors() {
  MapBuilder map(source_, &out_.map);
  for (const Param& param : out_.params) {
    if (!param.alias_of.empty()) continue;
    const Tensor& tensor = tensors_[by_name_.at(param.name)];
    layout::LogicalTensor logical;
    logical.name = param.name;
    logical.state = param.kind == ParamKind::kFrozen   ? std::string(layout::kFrozen)
                    : param.kind == ParamKind::kBuffer ? std::string(layout::kBuffer)
                    : notes_                           ? notes_->state
                                                       : std::string(layout::kWeight);
    logical.dtype = tensor.entry.dtype;
    logical.shape = param.shape;
    SW_TRY(AddFragment(tensor, &map, &logical));
    for (const std::uint32_t i : tensor.more) SW_TRY(AddFragment(tensors_[i], &map, &logical));
    out_.map.tensors.push_back(std::move(logical));
  }
  return {};
}

void Reader::MakeGroups() {
  if (!notes_) return;
  for (const GroupNote& note : notes_->groups) {
    Group group;
    group.hyper = note.hyper;
    group.moe = note.moe;
    out_.groups.push_back(std::move(group));
  }
  for (std::uint32_t i = 0; i < out_.params.size(); ++i) {
    const Param& param = out_.params[i];
    if (param.kind != ParamKind::kTrainable || !param.alias_of.empty()) continue;
    out_.groups[static_cast<std::size_t>(param.group)].params.push_back(i);
  }
}

void Reader::MergeMetadata() {
  auto own = std::make_shared<FileMetadata>();
  std::set<std::string> differing;
  for (const file_format::Header& header : headers_) {
    for (const auto& [key, value] : header.metadata) {
      if (key == kNotesKey) continue;
      const auto [at, fresh] = own->values.emplace(key, value);
      if (!fresh && at->second != value) differing.insert(key);
    }
  }
  for (const std::string& key : differing) own->values.erase(key);
  if (!differing.empty()) {
    out_.left_out.push_back("metadata that differs from file to file: " +
                            FirstFew({differing.begin(), differing.end()}));
  }
  out_.own = std::move(own);
}

void Reader::Finish() {
  MergeMetadata();
  std::map<DType, std::uint64_t> elems;
  for (const Param& param : out_.params) {
    if (param.kind == ParamKind::kTrainable && param.alias_of.empty()) {
      elems[param.dtype] += Elems(param.shape);
    }
  }
  const auto most = std::max_element(
      elems.begin(), elems.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  if (most != elems.end()) out_.layout.dtype = most->first;
  if (!notes_) return;
  out_.optimizer = notes_->optimizer;
  if (notes_->iteration) out_.iteration = *notes_->iteration;
  out_.consumed_samples = notes_->consumed_samples;
}

}  // namespace

Result<Checkpoint> Read(const SourceSet& source, const Patterns& patterns) {
  return Reader(source, patterns).Run();
}

}  // namespace shardwright::checkpoints::safetensors
