// SPDX-License-Identifier: Apache-2.0
#include <functional>
#include <map>
#include <set>
#include <span>
#include <utility>

#include "checkpoints/safetensors/read_internal.h"
#include "support/base/text.h"
#include "support/json/json.h"

// Reads the index and the headers of a set of files, and checks that the set is complete.

namespace shardwright::checkpoints::safetensors {
namespace {

namespace file_format = shardwright::safetensors;

/// The metadata key that records which piece of a tensor a file contains.
constexpr const char* kPiecesKey = "DCP_SHARDING_INFO";
constexpr std::string_view kPieceStem = "shard-";

/// Ends the message about an index that does not match the files next to it.
constexpr const char* kStale =
    ": the index belongs to other files: move it away to read the files by their names";

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
      return Fail(Errc::kUnsupported, stem, "-*", file_format::kSuffix, ": sets of ",
                  counts.begin()->first, " and of ", counts.rbegin()->first,
                  " files, and no index that selects one: move one of the sets to a folder of its "
                  "own");
    }
    const auto& [count, numbers] = *counts.begin();
    for (std::uint64_t i = 0; i < count; ++i) {
      if (!numbers.contains(i + 1)) {
        return Fail(Errc::kNotFound, stem, "-*", file_format::kSuffix, ": ", numbers.size(), " of ",
                    count, " files found, number ", i + 1,
                    " is missing: an incomplete download or save");
      }
    }
  }
  return {};
}

}  // namespace

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
  return Fail(Errc::kNotFound, source_.tag, ": files listed in the index are missing: ",
              FirstFew({missing.begin(), missing.end()}),
              ": an incomplete download or save, or a stale index: move it away to read the files "
              "by their names");
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
    return broken(StrCat(header->entries.size(), " tensors in the header, ",
                         metadata.storages.size(), " payloads"));
  }
  for (std::uint32_t i = 0; i < header->entries.size(); ++i) {
    file_format::Entry& entry = header->entries[i];
    if (entry.bytes != metadata.storages[i].bytes)
      return broken("payload sizes differ from the header");
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
    const std::string where = "tensor " + Quoted(tensor.entry.name) + ": saved_offsets";
    if (offsets == nullptr || !offsets->is_array()) {
      return Fail(Errc::kBadInput, where, ": list expected");
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
  Warn(
      StrCat("found pieces of ", ranks.size(),
             " ranks: the files record neither the number of ranks nor the full sizes of tensors"));
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
      return Fail(Errc::kBadInput, "tensor \"", name, "\": found in ", NameOf(tensor.file),
                  ", but the index lists it in ", listed->second, kStale);
    }
  }
  for (const auto& [name, file] : index_.files) {
    if (by_name_.contains(name)) continue;
    return Fail(Errc::kBadInput, "tensor ", Quoted(name), ": the index lists it in ", file,
                ", which lacks it", kStale);
  }
  if (!unlisted.empty()) Warn("tensors that the index does not list: " + FirstFew(unlisted));
  if (index_.total_bytes && *index_.total_bytes != total) {
    Warn(StrCat("the index records ", *index_.total_bytes, " bytes of tensors, found ", total));
  }
  return {};
}

}  // namespace shardwright::checkpoints::safetensors
