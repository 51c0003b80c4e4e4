#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "base/limits.h"
#include "base/text.h"
#include "dialect/core/links.h"
#include "dialect/dcp/dcp.h"
#include "dialect/dcp/parts_internal.h"
#include "os/dir.h"

namespace shardwright::dialect::dcp {

namespace files = shardwright::dcp;

namespace {

constexpr std::string_view kDataSuffix = ".distcp";
constexpr std::string_view kModelFolder = "pytorch_model_fsdp_";
constexpr std::string_view kOptimizerFolder = "optimizer_";

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

/// "__3.metadata": the index of one rank's items, where ranks save without a common one.
bool IsRankIndex(std::string_view name) {
  return name.starts_with("__") && name.ends_with(files::kIndexName) &&
         IsNumber(name.substr(2, name.size() - 2 - files::kIndexName.size()));
}

/// One folder with an index of its own.
struct Part {
  std::string prefix;                                     // of names: "" or "optimizer_0/"
  std::map<std::string, std::vector<std::string>> paths;  // by name, of all its files
};

void AddNames(const std::string& path, const std::vector<os::Entry>& entries, Part* part) {
  for (const os::Entry& entry : entries) {
    if (IsFile(entry)) part->paths[entry.name].push_back(path + "/" + entry.name);
  }
}

/// The parts of what is listed: the folder itself, or a model's and an optimizer's.
Result<std::vector<Part>> PartsOf(const Listing& listing) {
  Part whole;
  for (const Listing::Folder& folder : listing.folders) {
    AddNames(folder.path, folder.entries, &whole);
  }
  const bool has_data = std::any_of(whole.paths.begin(), whole.paths.end(), [](const auto& one) {
    return one.first == files::kIndexName || IsDataFile(one.first) || IsRankIndex(one.first);
  });
  if (has_data) return std::vector<Part>{std::move(whole)};
  std::map<std::string, Part> below;
  for (const Listing::Folder& folder : listing.folders) {
    for (const os::Entry& entry : folder.entries) {
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
  const auto count = [&](bool (*is)(std::string_view)) {
    return std::count_if(below.begin(), below.end(),
                         [&](const auto& one) { return is(one.first); });
  };
  if (count(IsModelFolder) > 1 || count(IsOptimizerFolder) > 1) {
    return Fail(Errc::kUnsupported, listing.folders.front().path +
                                        ": several models or optimizers: give the folder of one");
  }
  std::vector<Part> parts;
  parts.reserve(below.size());
  for (auto& [name, part] : below) parts.push_back(std::move(part));
  return parts;
}

tl::unexpected<Error> Incomplete(const Listing& listing, const Part& part) {
  const std::string where = listing.folders.front().path + "/" + part.prefix;
  const bool by_rank = std::any_of(part.paths.begin(), part.paths.end(),
                                   [](const auto& one) { return IsRankIndex(one.first); });
  if (by_rank) {
    return Fail(Errc::kUnsupported,
                where +
                    ": each rank has an index of its own (__R.metadata) and there is no common "
                    ".metadata: save without no_dist, or load and save once");
  }
  return Fail(Errc::kNotFound, where + ": no " + std::string(files::kIndexName) +
                                   ": an incomplete save, which PyTorch does not load either");
}

/// The index of a part, understood and proved as far as it goes by itself.
Result<files::Index> IndexOf(const std::string& text, const std::string& path) {
  auto index = files::ReadIndex(text);
  if (!index) return Within(path, index.error());
  if (Status whole = files::CheckVolumes(*index); !whole) return Within(path, whole.error());
  return index;
}

Status ScanPart(const Listing& listing, const Part& part, SourceSet* set) {
  const auto at = part.paths.find(std::string(files::kIndexName));
  if (at == part.paths.end()) return Incomplete(listing, part);
  const std::string& path = at->second.front();
  for (const std::string& copy : at->second) SW_TRY(StaysInFolder(copy));
  auto described = std::make_shared<format::Skeleton>();
  SW_TRY_ASSIGN(described->header, os::ReadWholeText(path, limits::kPickleBytes));
  described->last = described->header.size();
  SW_TRY_ASSIGN(const files::Index index, IndexOf(described->header, path));
  const std::vector<std::vector<ItemRef>> items = ItemsByFile(index);
  std::vector<Found> found;
  for (const std::string& copy : at->second) found.push_back({copy, part.prefix + at->first});
  std::map<std::string, std::uint32_t> numbers;  // by path
  std::vector<std::string> missing;
  std::set<std::string, std::less<>> used;
  for (std::uint32_t i = 0; i < index.files.size(); ++i) {
    const auto there = part.paths.find(index.files[i]);
    if (there == part.paths.end()) {
      missing.push_back(index.files[i]);
      continue;
    }
    used.insert(index.files[i]);
    for (const std::string& copy : there->second) {
      SW_TRY(StaysInFolder(copy));
      numbers.emplace(copy, i);
      found.push_back({copy, part.prefix + index.files[i]});
    }
  }
  if (!missing.empty()) {
    return Fail(Errc::kNotFound,
                path + ": names data files that are not there: " + FirstFew(missing));
  }
  std::vector<std::string> skipped;
  for (const auto& [name, copies] : part.paths) {
    const bool ours = IsDataFile(name) || IsRankIndex(name) || name == ".metadata.tmp";
    if (!ours || used.contains(name)) continue;
    SW_TRY_ASSIGN(const os::File file, os::File::OpenRead(copies.front()));
    SW_TRY_ASSIGN(const os::Identity identity, file.Stat());
    // A rank that had nothing to save leaves an empty file.
    if (identity.bytes > 0) skipped.push_back(part.prefix + name);
  }
  WarnAboutSkipped(skipped, set);
  return ReadFiles(
      std::move(found),
      [&](const Found& one, const os::File& file,
          const os::Identity& /*identity*/) -> Result<std::vector<Container>> {
        Container container;
        const auto number = numbers.find(one.path);
        if (number == numbers.end()) {
          container.skeleton = described;
          return std::vector<Container>{std::move(container)};
        }
        std::vector<files::Wanted> wanted;
        wanted.reserve(items[number->second].size());
        for (const ItemRef& ref : items[number->second]) wanted.push_back(WantedOf(index, ref));
        SW_TRY_ASSIGN(files::FileItems read,
                      files::ReadItems(file, wanted, index.transforms, kInlineBytes));
        container.skeleton = std::make_shared<const format::Skeleton>(std::move(read.skeleton));
        container.inlined = std::move(read.inlined);
        return std::vector<Container>{std::move(container)};
      },
      set);
}

}  // namespace

bool IsModelFolder(std::string_view name) { return IsNumbered(name, kModelFolder); }
bool IsOptimizerFolder(std::string_view name) { return IsNumbered(name, kOptimizerFolder); }

std::string_view FolderOf(std::string_view name) {
  const std::size_t slash = name.rfind('/');
  return slash == std::string_view::npos ? std::string_view() : name.substr(0, slash + 1);
}

const files::Place& PlaceOf(const files::Index& index, const ItemRef& ref) {
  const files::Entry& entry = index.entries[ref.entry];
  return entry.is_tensor ? entry.chunks[ref.chunk].at : entry.at;
}

std::vector<std::vector<ItemRef>> ItemsByFile(const files::Index& index) {
  std::vector<std::vector<ItemRef>> items(index.files.size());
  for (std::uint32_t i = 0; i < index.entries.size(); ++i) {
    const files::Entry& entry = index.entries[i];
    const std::size_t count = entry.is_tensor ? entry.chunks.size() : 1;
    for (std::uint32_t c = 0; c < count; ++c) {
      items[PlaceOf(index, {i, c}).file].push_back({i, c});
    }
  }
  for (std::vector<ItemRef>& of_file : items) {
    std::stable_sort(of_file.begin(), of_file.end(), [&](const ItemRef& a, const ItemRef& b) {
      return PlaceOf(index, a).offset < PlaceOf(index, b).offset;
    });
  }
  return items;
}

files::Wanted WantedOf(const files::Index& index, const ItemRef& ref) {
  const files::Entry& entry = index.entries[ref.entry];
  files::Wanted wanted;
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
      // Megatron's folders have an index of the same kind, and this beside it.
      if (entry.name == "metadata.json" || entry.name == "common.pt") return false;
      ours = ours || (IsFile(entry) && (entry.name == files::kIndexName || IsDataFile(entry.name) ||
                                        IsRankIndex(entry.name)));
      ours = ours || (entry.type == os::EntryType::kDir && IsModelFolder(entry.name));
    }
  }
  return ours;
}

Belongs BelongsTo(std::string_view name) {
  const std::string_view folder = FolderOf(name);
  const std::string_view last = name.substr(folder.size());
  if (folder.empty() && (IsModelFolder(name) || IsOptimizerFolder(name))) return Belongs::kYes;
  const std::string_view stem = folder.substr(0, folder.size() - (folder.empty() ? 0 : 1));
  const bool known = folder.empty() || IsModelFolder(stem) || IsOptimizerFolder(stem);
  const bool ours =
      IsDataFile(last) || last == files::kIndexName || IsRankIndex(last) || last == ".metadata.tmp";
  return known && ours ? Belongs::kOneVersion : Belongs::kNo;
}

Result<SourceSet> Scan(const Listing& listing) {
  SourceSet set;
  SW_TRY_ASSIGN(const std::vector<Part> parts, PartsOf(listing));
  for (const Part& part : parts) SW_TRY(ScanPart(listing, part, &set));
  return set;
}

}  // namespace shardwright::dialect::dcp
