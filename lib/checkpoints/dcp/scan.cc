// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "checkpoints/dcp/dcp.h"
#include "checkpoints/dcp/parts_internal.h"
#include "checkpoints/model/fields.h"
#include "checkpoints/model/links.h"
#include "support/base/limits.h"
#include "support/base/text.h"
#include "support/os/dir.h"
#include "support/os/real_path.h"

namespace shardwright::checkpoints::dcp {

namespace file_format = shardwright::dcp;

namespace {

constexpr std::string_view kDataSuffix = ".distcp";
// Folder names of Accelerate, which end in a number, and of slime.
constexpr std::string_view kModelFolder = "pytorch_model_fsdp_";
constexpr std::string_view kOptimizerFolder = "optimizer_";
constexpr std::string_view kPlainModel = "model";
constexpr std::string_view kPlainOptimizer = "optimizer";

bool IsNumber(std::string_view text) {
  return !text.empty() && text.size() < 10 &&
         text.find_first_not_of("0123456789") == std::string_view::npos;
}

bool IsNumbered(std::string_view name, std::string_view stem) {
  return name.starts_with(stem) && IsNumber(name.substr(stem.size()));
}

bool IsDataFile(std::string_view name) {
  return name.starts_with("__") && name.ends_with(kDataSuffix);
}

/// Returns true for "__3.metadata", the index of one rank, written if there is no common index.
bool IsRankIndex(std::string_view name) { return file_format::RankOfIndex(name).has_value(); }

/// Returns the rank in a data file's name, such as 3 in "__3_0.distcp".
std::optional<std::uint64_t> RankOfData(std::string_view name) {
  if (!IsDataFile(name)) return std::nullopt;
  const std::string_view rank = name.substr(2, name.find('_', 2) - 2);
  return file_format::RankOfIndex("__" + std::string(rank) + std::string(file_format::kIndexName));
}

/// A folder with its own index.
struct Part {
  std::string prefix;                                     // put before names: "" or "optimizer_0/"
  std::map<std::string, std::vector<std::string>> paths;  // the paths of all files, by file name
};

void AddNames(const std::string& path, const std::vector<os::Entry>& entries, Part* part) {
  for (const os::Entry& entry : entries) {
    if (IsFile(entry)) part->paths[entry.name].push_back(path + "/" + entry.name);
  }
}

/// Returns the model's and the optimizer's folders by name if the user specified
/// them directly; empty unless both are listed and no other folder is.
Result<std::map<std::string, Part>> NamedParts(const Listing& listing) {
  std::map<std::string, Part> parts;
  bool has_model = false;
  bool has_optimizer = false;
  for (const Listing::Folder& folder : listing.folders) {
    SW_TRY_ASSIGN(const std::string real, os::ResolvePath(folder.path));
    const std::string name = real.substr(real.rfind('/') + 1);
    if (!IsModelFolder(name) && !IsOptimizerFolder(name)) return std::map<std::string, Part>();
    has_model = has_model || IsModelFolder(name);
    has_optimizer = has_optimizer || IsOptimizerFolder(name);
    Part& part = parts[name];
    part.prefix = name + "/";
    AddNames(folder.path, folder.entries, &part);
  }
  return has_model && has_optimizer ? parts : std::map<std::string, Part>();
}

/// Returns true if the listing contains an Accelerate model folder.
bool HasNumbered(const Listing& listing) {
  return std::any_of(listing.folders.begin(), listing.folders.end(), [](const auto& folder) {
    return std::any_of(folder.entries.begin(), folder.entries.end(), [](const os::Entry& entry) {
      return entry.type == os::EntryType::kDir && IsNumbered(entry.name, kModelFolder);
    });
  });
}

/// Returns the listing as one part, or its model and optimizer folders as two parts.
Result<std::vector<Part>> PartsOf(const Listing& listing) {
  SW_TRY_ASSIGN(auto below, NamedParts(listing));
  Part whole;
  for (const Listing::Folder& folder : listing.folders) {
    AddNames(folder.path, folder.entries, &whole);
  }
  const bool has_data = std::any_of(whole.paths.begin(), whole.paths.end(), [](const auto& one) {
    return one.first == file_format::kIndexName || IsDataFile(one.first) || IsRankIndex(one.first);
  });
  if (has_data && below.empty()) return std::vector<Part>{std::move(whole)};
  const bool numbered = HasNumbered(listing);
  for (const Listing::Folder& folder : listing.folders) {
    for (const os::Entry& entry : folder.entries) {
      if (has_data || entry.type == os::EntryType::kFile) continue;
      if (numbered && (entry.name == kPlainModel || entry.name == kPlainOptimizer)) continue;
      if (!IsModelFolder(entry.name) && !IsOptimizerFolder(entry.name)) continue;
      Part& part = below[entry.name];
      part.prefix = entry.name + "/";
      const std::string path = folder.path + "/" + entry.name;
      SW_TRY_ASSIGN(const bool is_folder, os::IsDir(path));
      if (!is_folder) continue;
      SW_TRY_ASSIGN(const std::vector<os::Entry> entries, os::ListDir(path));
      AddNames(path, entries, &part);
    }
  }
  std::vector<Part> parts;
  parts.reserve(below.size());
  for (auto& [name, part] : below) parts.push_back(std::move(part));
  return parts;
}

/// Returns the index names of a part: the common index if it exists, or the indexes of the ranks.
Result<std::vector<std::string>> IndexesOf(const Listing& listing, const Part& part) {
  if (part.paths.contains(std::string(file_format::kIndexName))) {
    return std::vector<std::string>{std::string(file_format::kIndexName)};
  }
  std::map<std::uint64_t, std::string> by_rank;
  std::uint64_t ranks = 0;
  for (const auto& [name, copies] : part.paths) {
    const auto index = file_format::RankOfIndex(name);
    if (index) by_rank.emplace(*index, name);
    const auto rank = index ? index : RankOfData(name);
    if (rank && (index || !by_rank.empty())) ranks = std::max(ranks, *rank + 1);
  }
  const std::string where = listing.folders.front().path + "/" + part.prefix;
  const bool has_data = std::any_of(part.paths.begin(), part.paths.end(),
                                    [](const auto& one) { return IsDataFile(one.first); });
  if (by_rank.empty() && !has_data && !part.prefix.empty()) {
    return Fail(Errc::kNotFound, where, ": no torch.distributed.checkpoint files found");
  }
  if (by_rank.empty()) {
    std::string next;
    if (IsOptimizerFolder(part.prefix.substr(0, part.prefix.find('/')))) {
      next = "; to read the weights alone, give the model folder as INPUT";
    }
    return Fail(Errc::kNotFound, where, ": no ", file_format::kIndexName,
                ": an incomplete save, which PyTorch does not load either", next);
  }
  std::vector<std::string> names;
  for (const auto& [rank, name] : by_rank) {
    if (rank != names.size()) break;
    names.push_back(name);
  }
  if (names.size() == ranks) return names;
  return Fail(Errc::kNotFound, where, ": __", names.size(),
              ".metadata is missing: each rank has an index of its own, and files of rank ",
              ranks - 1, " exist", kAddFolder);
}

/// Parses the index of a part and checks that it is complete in itself.
Result<file_format::Index> IndexOf(const std::vector<IndexText>& texts) {
  SW_TRY_ASSIGN(file_format::Index index, UnderstandIndexes(texts));
  if (Status whole = file_format::CheckVolumes(index); !whole) {
    const std::string later = texts.size() > 1 || IsRankIndex(texts.front().name)
                                  ? StrCat(": found the indexes of ranks 0 to ", texts.size() - 1,
                                           "; those of later ranks may be missing")
                                  : "";
    return Within(texts.front().where, Error{whole.error().code, whole.error().message + later});
  }
  return index;
}

/// Encodes Found::how for a data file: the index's transforms and the file's items.
std::string HowToRead(const file_format::Index& index, const std::vector<ItemRef>& items) {
  FieldWriter how;
  how.Number(index.transforms.size());
  for (const std::vector<std::string>& list : index.transforms) {
    how.Number(list.size());
    for (const std::string& name : list) how.Text(name);
  }
  how.Number(items.size());
  for (const ItemRef& ref : items) {
    const file_format::Wanted one = WantedOf(index, ref);
    how.Number(one.at.offset);
    how.Number(one.at.bytes);
    how.Number(one.at.transforms);
    how.Text(one.name);
    how.Number(one.is_tensor ? 1 : 0);
    if (!one.is_tensor) continue;
    how.Number(static_cast<std::uint64_t>(one.dtype));
    how.Number(one.sizes.size());
    for (const std::uint64_t size : one.sizes) how.Number(size);
  }
  return std::move(how).Take();
}

Result<file_format::Wanted> TakeWanted(FieldReader* how) {
  file_format::Wanted one;
  SW_TRY_ASSIGN(one.at.offset, how->Number());
  SW_TRY_ASSIGN(one.at.bytes, how->Number());
  SW_TRY_ASSIGN(const std::uint64_t transforms, how->Number());
  one.at.transforms = static_cast<std::uint32_t>(transforms);
  SW_TRY_ASSIGN(one.name, how->Text());
  SW_TRY_ASSIGN(const std::uint64_t is_tensor, how->Number());
  one.is_tensor = is_tensor != 0;
  if (!one.is_tensor) return one;
  SW_TRY_ASSIGN(const std::uint64_t dtype, how->Number());
  one.dtype = static_cast<DType>(dtype);
  SW_TRY_ASSIGN(const std::uint64_t axes, how->Number());
  one.sizes.resize(static_cast<std::size_t>(axes));
  for (std::uint64_t& size : one.sizes) {
    SW_TRY_ASSIGN(size, how->Number());
  }
  return one;
}

Status ScanPart(const Listing& listing, const Part& part, const ScanOptions& options,
                SourceSet* set) {
  SW_TRY_ASSIGN(const std::vector<std::string> names, IndexesOf(listing, part));
  std::vector<Found> found;
  std::vector<IndexText> texts;
  std::set<std::string, std::less<>> used(names.begin(), names.end());
  for (const std::string& name : names) {
    const std::vector<std::string>& copies = part.paths.at(name);
    auto metadata = std::make_shared<files::ContainerMetadata>();
    SW_TRY_ASSIGN(metadata->header, ReadTextInFolder(copies.front(), limits::kPickleBytes));
    SW_TRY(CheckNotEmpty(copies.front(), metadata->header.size()));
    metadata->last = metadata->header.size();
    texts.push_back({name, metadata->header, copies.front()});
    for (const std::string& copy : copies) {
      found.push_back({copy, part.prefix + name, true, {}, metadata});
    }
  }
  SW_TRY_ASSIGN(const file_format::Index index, IndexOf(texts));
  const std::vector<std::vector<ItemRef>> items = ItemsByFile(index);
  std::vector<std::string> missing;
  for (std::uint32_t i = 0; i < index.files.size(); ++i) {
    const auto there = part.paths.find(index.files[i]);
    if (there == part.paths.end()) {
      missing.push_back(index.files[i]);
      continue;
    }
    used.insert(index.files[i]);
    const std::string how = HowToRead(index, items[i]);
    for (const std::string& copy : there->second) {
      found.push_back({copy, part.prefix + index.files[i], true, how});
    }
  }
  if (!missing.empty()) {
    return Fail(Errc::kNotFound, texts.front().where,
                ": data files listed in the index are missing: ", FirstFew(missing), kAddFolder);
  }
  std::vector<std::string> skipped;
  std::vector<std::string> of_ranks;
  for (const auto& [name, copies] : part.paths) {
    const bool ours = IsDataFile(name) || IsRankIndex(name) || name == ".metadata.tmp";
    if (!ours || used.contains(name)) continue;
    if (IsRankIndex(name)) {
      of_ranks.push_back(part.prefix + name);
      continue;
    }
    SW_TRY_ASSIGN(const os::File file, os::File::OpenRead(copies.front()));
    SW_TRY_ASSIGN(const os::Identity identity, file.Stat());
    // A rank without data to save leaves an empty file.
    if (identity.bytes > 0) skipped.push_back(part.prefix + name);
  }
  WarnAboutSkipped(skipped, set);
  if (!of_ranks.empty()) {
    set->warnings.push_back("using the index of all ranks, " + part.prefix +
                            std::string(file_format::kIndexName) +
                            "; ignoring the indexes of single ranks: " + FirstFew(of_ranks));
  }
  return ReadFiles(std::move(found), ReadFile, options, set);
}

}  // namespace

Result<std::vector<Container>> ReadFile(const Found& found, const os::File& file,
                                        const os::Identity& /*identity*/) {
  FieldReader how(found.how);
  SW_TRY_ASSIGN(const std::uint64_t lists, how.Number());
  std::vector<std::vector<std::string>> transforms(static_cast<std::size_t>(lists));
  for (std::vector<std::string>& list : transforms) {
    SW_TRY_ASSIGN(const std::uint64_t names, how.Number());
    list.resize(static_cast<std::size_t>(names));
    for (std::string& name : list) {
      SW_TRY_ASSIGN(name, how.Text());
    }
  }
  SW_TRY_ASSIGN(const std::uint64_t count, how.Number());
  std::vector<file_format::Wanted> wanted;
  wanted.reserve(static_cast<std::size_t>(count));
  for (std::uint64_t i = 0; i < count; ++i) {
    SW_TRY_ASSIGN(file_format::Wanted one, TakeWanted(&how));
    wanted.push_back(std::move(one));
  }
  SW_TRY_ASSIGN(file_format::FileItems read,
                file_format::ReadItems(file, wanted, transforms, kInlineBytes));
  Container container;
  container.metadata = std::make_shared<const files::ContainerMetadata>(std::move(read.metadata));
  container.inlined = std::move(read.inlined);
  container.stretches = std::move(read.stretches);
  return std::vector<Container>{std::move(container)};
}

bool IsModelFolder(std::string_view name) {
  return name == kPlainModel || IsNumbered(name, kModelFolder);
}

bool IsOptimizerFolder(std::string_view name) {
  return name == kPlainOptimizer || IsNumbered(name, kOptimizerFolder);
}

Result<file_format::Index> UnderstandIndexes(const std::vector<IndexText>& texts) {
  file_format::IndexUnion all;
  for (const IndexText& one : texts) {
    auto index = file_format::ReadIndex(one.text);
    if (!index) return Within(one.where, index.error());
    if (!file_format::RankOfIndex(one.name)) return index;
    SW_TRY(all.Add(one.where, *std::move(index)));
  }
  auto index = std::move(all).Finish();
  if (!index) return Within(texts.front().where, index.error());
  return index;
}

std::string_view FolderOf(std::string_view name) {
  const std::size_t slash = name.rfind('/');
  return slash == std::string_view::npos ? std::string_view() : name.substr(0, slash + 1);
}

const file_format::Place& PlaceOf(const file_format::Index& index, const ItemRef& ref) {
  if (ref.copy > 0) return index.copies[ref.copy - 1].at;
  const file_format::Entry& entry = index.entries[ref.entry];
  return entry.is_tensor ? entry.chunks[ref.chunk].at : entry.at;
}

std::vector<std::vector<ItemRef>> ItemsByFile(const file_format::Index& index) {
  std::vector<std::vector<ItemRef>> items(index.files.size());
  for (std::uint32_t i = 0; i < index.entries.size(); ++i) {
    const file_format::Entry& entry = index.entries[i];
    const std::size_t count = entry.is_tensor ? entry.chunks.size() : 1;
    for (std::uint32_t c = 0; c < count; ++c) {
      items[PlaceOf(index, {i, c}).file].push_back({i, c});
    }
  }
  for (std::uint32_t i = 0; i < index.copies.size(); ++i) {
    const file_format::Copy& copy = index.copies[i];
    items[copy.at.file].push_back({copy.entry, copy.chunk, i + 1});
  }
  for (std::vector<ItemRef>& of_file : items) {
    std::stable_sort(of_file.begin(), of_file.end(), [&](const ItemRef& a, const ItemRef& b) {
      return PlaceOf(index, a).offset < PlaceOf(index, b).offset;
    });
  }
  return items;
}

file_format::Wanted WantedOf(const file_format::Index& index, const ItemRef& ref) {
  const file_format::Entry& entry = index.entries[ref.entry];
  file_format::Wanted wanted;
  wanted.at = PlaceOf(index, ref);
  wanted.is_tensor = entry.is_tensor;
  wanted.name = entry.name;
  if (!entry.is_tensor) return wanted;
  wanted.dtype = entry.dtype;
  wanted.sizes = entry.chunks[ref.chunk].sizes;
  return wanted;
}

bool Claims(const Listing& listing) {
  bool ours = false;
  for (const Listing::Folder& folder : listing.folders) {
    for (const os::Entry& entry : folder.entries) {
      // Megatron's folders have the same kind of index and one of these files in addition.
      if (entry.name == "metadata.json" || entry.name == "common.pt") return false;
      ours = ours || (IsFile(entry) && (entry.name == file_format::kIndexName ||
                                        IsDataFile(entry.name) || IsRankIndex(entry.name)));
      ours = ours || (entry.type == os::EntryType::kDir && IsNumbered(entry.name, kModelFolder));
    }
  }
  // One such folder name is common, but only slime has both.
  return ours || (listing.HasFolder(kPlainModel) && listing.HasFolder(kPlainOptimizer));
}

Belongs BelongsTo(std::string_view name) {
  const std::string_view folder = FolderOf(name);
  const std::string_view last = name.substr(folder.size());
  if (folder.empty() && (IsModelFolder(name) || IsOptimizerFolder(name))) return Belongs::kYes;
  const std::string_view stem = folder.substr(0, folder.size() - (folder.empty() ? 0 : 1));
  const bool known = folder.empty() || IsModelFolder(stem) || IsOptimizerFolder(stem);
  const bool ours = IsDataFile(last) || last == file_format::kIndexName || IsRankIndex(last) ||
                    last == ".metadata.tmp";
  return known && ours ? Belongs::kOneVersion : Belongs::kNo;
}

Result<SourceSet> Scan(const Listing& listing, const ScanOptions& options) {
  SourceSet set;
  SW_TRY_ASSIGN(const std::vector<Part> parts, PartsOf(listing));
  for (const Part& part : parts) {
    const std::string_view name = std::string_view(part.prefix).substr(0, part.prefix.size() - 1);
    if (part.paths.empty() && !part.prefix.empty() && IsOptimizerFolder(name)) {
      set.warnings.push_back(part.prefix + " is empty: the checkpoint has weights only");
      continue;
    }
    SW_TRY(ScanPart(listing, part, options, &set));
  }
  return set;
}

}  // namespace shardwright::checkpoints::dcp
