// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/deepspeed/common/scan.h"

#include <algorithm>
#include <iterator>
#include <span>
#include <utility>

#include "checkpoints/deepspeed/common/file_name.h"
#include "files/torch_pt/reader.h"
#include "support/base/limits.h"
#include "support/os/dir.h"
#include "support/os/io_threads.h"

namespace shardwright::checkpoints {
namespace {

bool AnyFile(const Listing& listing, bool (*wanted)(const FileName& name)) {
  for (const Listing::Folder& folder : listing.folders) {
    for (const os::Entry& entry : folder.entries) {
      if (!IsFile(entry)) continue;
      const auto name = ParseFileName(entry.name);
      if (name && wanted(*name)) return true;
    }
  }
  return false;
}

bool HasShards(const Listing& listing) {
  return AnyFile(listing, [](const FileName& name) { return name.role == FileRole::kShard; });
}

bool HasAtoms(const Listing& listing) {
  if (listing.HasFolder(kAtomsFolder)) return true;
  return std::any_of(listing.folders.begin(), listing.folders.end(), [](const auto& folder) {
    return std::any_of(folder.entries.begin(), folder.entries.end(), [](const os::Entry& entry) {
      return IsFile(entry) && entry.name == kAtomsFile;
    });
  });
}

/// Maximum depth of folders below `zero`. Each slash in a parameter's name adds one.
constexpr int kAtomDepth = 32;

/// Contents of a folder of atoms: files, and names that are not atoms.
struct Atoms {
  std::vector<Found> found;
  std::vector<std::string> skipped;
};

/// Lists the files of a folder of atoms and its subfolders.
/// \param name  path of the folder, relative to the tag folder
/// \param io_threads  number of subfolders listed at the same time
Status ListAtomsIn(const std::string& tag_folder, const std::string& name, int depth,
                   unsigned io_threads, Atoms* out) {
  const std::string top = tag_folder + "/";
  SW_TRY_ASSIGN(const std::vector<os::Entry> entries, os::ListDir(top + name));
  std::vector<std::string> folders;
  for (const os::Entry& entry : entries) {
    std::string path = name;
    path.append("/").append(entry.name);
    if (IsFile(entry) && entry.name.ends_with(".pt")) {
      std::string whole = top;
      whole.append(path);
      out->found.push_back({std::move(whole), std::move(path)});
    } else if (entry.type == os::EntryType::kDir && depth > 0) {
      folders.push_back(std::move(path));
    } else {
      out->skipped.push_back(std::move(path));
    }
  }
  std::vector<Atoms> below(folders.size());
  SW_TRY(os::ForEachFile(folders.size(), io_threads, [&](std::uint64_t i) {
    return ListAtomsIn(tag_folder, folders[i], depth - 1, 1, &below[i]);
  }));
  for (Atoms& one : below) {
    std::move(one.found.begin(), one.found.end(), std::back_inserter(out->found));
    std::move(one.skipped.begin(), one.skipped.end(), std::back_inserter(out->skipped));
  }
  return {};
}

/// Lists the atoms below `zero`: one folder per parameter with one file per state, and
/// optimizer_state.pt. A parameter's name is a path, because DeepSpeed does not escape its slashes.
Result<Atoms> ListAtoms(const std::string& folder, unsigned io_threads) {
  Atoms atoms;
  SW_TRY(ListAtomsIn(folder, kAtomsFolder, kAtomDepth, io_threads, &atoms));
  return atoms;
}

/// Files of a checkpoint in one tag folder.
struct Contents {
  std::vector<Found> files;
  std::vector<std::string> skipped;
  std::string manifest_path;
};

Status ListFolder(const Listing::Folder& folder, bool atoms, unsigned io_threads, Contents* out) {
  for (const os::Entry& entry : folder.entries) {
    const std::string path = folder.path + "/" + entry.name;
    if (entry.type == os::EntryType::kDir) {
      if (entry.name == kAtomsFolder) {
        SW_TRY_ASSIGN(auto listed, ListAtoms(folder.path, io_threads));
        auto& [found, skipped] = listed;
        out->skipped.insert(out->skipped.end(), skipped.begin(), skipped.end());
        if (!atoms && !found.empty()) out->skipped.push_back(std::string(kAtomsFolder) + "/");
        if (atoms) std::move(found.begin(), found.end(), std::back_inserter(out->files));
        continue;
      }
      if (entry.name == "offloaded_tensors") {
        return Fail(
            Errc::kUnsupported, path,
            ": optimizer state offloaded to NVMe: save the checkpoint without NVMe offload");
      }
    } else if (IsFile(entry)) {
      if (entry.name == kAtomsFile) {
        out->manifest_path = path;
        continue;
      }
      if (ParseFileName(entry.name)) {
        out->files.push_back({path, entry.name});
        continue;
      }
      // Shardwright's own file and DeepSpeed's recovery scripts are not needed here.
      if (entry.name == "shardwright.json" || entry.name.ends_with(".py")) continue;
    }
    out->skipped.push_back(entry.name);
  }
  return {};
}

/// Returns true for the pickled empty string that Nebula writes in place of the file.
bool IsNebulaStub(const os::File& file, const os::Identity& identity) {
  constexpr std::uint64_t kStubBytes = 64;
  if (identity.bytes == 0 || identity.bytes > kStubBytes) return false;
  std::string text(static_cast<std::size_t>(identity.bytes), '\0');
  if (!file.ReadAt(0, std::as_writable_bytes(std::span(text)))) return false;
  constexpr std::string_view kEmptyText("X\0\0\0\0", 5);
  constexpr std::string_view kShortEmptyText("\x8c\0", 2);
  return text.front() == '\x80' && text.back() == '.' &&
         (text.find(kEmptyText) != std::string::npos ||
          text.find(kShortEmptyText) != std::string::npos);
}

/// Returns true for a DataStates file: a JSON header with its own last key, preceded by the length.
bool IsDataStates(const os::File& file, const os::Identity& identity) {
  constexpr std::uint64_t kTailBytes = 128;
  std::uint64_t header = 0;  // little-endian
  if (identity.bytes < sizeof header ||
      !file.ReadAt(0, std::as_writable_bytes(std::span(&header, 1))) ||
      header > identity.bytes - sizeof header) {
    return false;
  }
  std::string tail(static_cast<std::size_t>(std::min(header, kTailBytes)), '\0');
  const std::uint64_t begin = sizeof header + header - tail.size();
  if (!file.ReadAt(begin, std::as_writable_bytes(std::span(tail)))) return false;
  return tail.find("\"datastates_metadata\"") != std::string::npos;
}

}  // namespace

Result<std::vector<Container>> ReadEngineFile(const Found& found, const os::File& file,
                                              const os::Identity& identity) {
  if (IsNebulaStub(file, identity)) {
    return Fail(Errc::kUnsupported, found.path,
                ": a Nebula placeholder, its data is elsewhere: load and save the checkpoint "
                "without Nebula");
  }
  Result<Container> read = ReadPickled(found, file, identity);
  if (!read && IsDataStates(file, identity)) {
    return Fail(Errc::kUnsupported, found.path,
                ": a DataStates container: load and save the checkpoint without DataStates");
  }
  if (!read) return tl::unexpected<Error>(std::move(read).error());
  return std::vector<Container>{*std::move(read)};
}

bool HoldsNative(const Listing& listing) {
  return HasShards(listing) ||
         (!HasAtoms(listing) && AnyFile(listing, [](const FileName&) { return true; }));
}

bool HoldsAtoms(const Listing& listing) { return HasAtoms(listing) && !HasShards(listing); }

Result<SourceSet> ScanEngineFiles(const Listing& listing, bool atoms, const ScanOptions& options) {
  Contents contents;
  for (const Listing::Folder& folder : listing.folders) {
    SW_TRY(ListFolder(folder, atoms, options.io_threads, &contents));
  }
  SourceSet out;
  if (atoms && !contents.manifest_path.empty()) {
    SW_TRY_ASSIGN(out.manifest, os::ReadWholeText(contents.manifest_path, limits::kJsonBytes));
  }
  SW_TRY(ReadFiles(std::move(contents.files), ReadEngineFile, options, &out));
  WarnAboutSkipped(contents.skipped, &out);
  return out;
}

}  // namespace shardwright::checkpoints
