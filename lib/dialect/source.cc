#include "dialect/source.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <set>
#include <span>
#include <utility>

#include "base/limits.h"
#include "dialect/file_name_internal.h"
#include "dialect/save_folder_internal.h"
#include "format/zip/crc32.h"
#include "os/dir.h"

namespace shardwright::dialect {
namespace {

constexpr std::string_view kAtomFolder = "zero";
constexpr std::string_view kAtomManifest = "shardwright_atoms.json";
constexpr std::uint64_t kTagBytes = 4096;

/// A file that belongs to the checkpoint, before it is opened.
struct Found {
  std::string path;
  std::string name;
};

/// One root, looked at.
struct Root {
  std::string path;
  std::optional<std::string> tag;  // what its pointer file says
  bool universal_pointer = false;
};

bool IsFile(const os::Entry& entry) {
  // A link counts as what it points to: opening it refuses anything but a regular file.
  return entry.type == os::EntryType::kFile || entry.type == os::EntryType::kSymlink;
}

std::string_view Trimmed(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r\n\v\f";
  const std::size_t first = text.find_first_not_of(kBlank);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlank) - first + 1);
}

/// The tag in a root's pointer file, if it has one.
Status ReadPointer(Root* root) {
  for (const char* name : kPointers) {
    const std::string path = root->path + "/" + name;
    SW_TRY_ASSIGN(const bool there, os::Exists(path));
    if (!there) continue;
    SW_TRY_ASSIGN(root->tag, PointedTag(path));
    root->universal_pointer = name == kPointers[1];
    return {};
  }
  return {};
}

/// True if a folder holds files of a checkpoint itself.
bool LooksLikeTag(const std::vector<os::Entry>& entries) {
  return std::any_of(entries.begin(), entries.end(), [](const os::Entry& entry) {
    if (entry.name == kAtomFolder) return entry.type == os::EntryType::kDir;
    return IsFile(entry) && ParseFileName(entry.name).has_value();
  });
}

/// The tag folders below a save folder that has no pointer file.
Result<std::vector<std::string>> TagsIn(const std::string& root,
                                        const std::vector<os::Entry>& entries) {
  std::vector<std::string> tags;
  for (const os::Entry& entry : entries) {
    if (entry.type != os::EntryType::kDir) continue;
    SW_TRY_ASSIGN(const std::vector<os::Entry> below, os::ListDir(root + "/" + entry.name));
    if (LooksLikeTag(below)) tags.push_back(entry.name);
  }
  return tags;
}

/// True if a folder is a save folder, as far as can be told: it has a pointer file, or tag folders.
bool LooksLikeSave(const std::string& folder) {
  const auto entries = os::ListDir(folder);
  if (!entries) return false;
  return std::any_of(entries->begin(), entries->end(), [&](const os::Entry& entry) {
    if (IsFile(entry)) return IsPointer(entry.name);
    if (entry.type != os::EntryType::kDir) return false;
    const auto below = os::ListDir(folder + "/" + entry.name);
    return below && LooksLikeTag(*below);
  });
}

/// "b and a", newest first as far as their numbers tell, the oldest of many left out.
std::string NewestOf(std::vector<std::string> names) {
  constexpr std::size_t kShown = 5;
  std::sort(names.begin(), names.end(),
            [](const auto& a, const auto& b) { return NaturalLess(b, a); });
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kShown); ++i) {
    const bool last = i + 1 == names.size();
    text += (i == 0 ? "" : last ? " and " : ", ") + names[i];
  }
  if (names.size() > kShown)
    text += " and " + std::to_string(names.size() - kShown) + " older ones";
  return text;
}

/// Why a folder without a pointer file is no checkpoint, and which folders in it are: its tags, and
/// save folders, as a Trainer makes one for every step.
tl::unexpected<Error> NoCheckpoint(const std::string& root, const std::vector<os::Entry>& entries,
                                   std::vector<std::string> found) {
  for (const os::Entry& entry : entries) {
    const bool folder = entry.type == os::EntryType::kDir;
    const bool known = std::find(found.begin(), found.end(), entry.name) != found.end();
    if (folder && !known && LooksLikeSave(root + "/" + entry.name)) found.push_back(entry.name);
  }
  if (found.empty()) {
    return Fail(Errc::kNotFound, root +
                                     ": no checkpoint here: neither a \"latest\" file "
                                     "nor files of a DeepSpeed checkpoint");
  }
  const bool one = found.size() == 1;
  return Fail(Errc::kNotFound,
              root + ": no \"latest\" here, but " + NewestOf(std::move(found)) +
                  (one ? " is a checkpoint: name it" : " are checkpoints: name one of them"));
}

/// The folder's own name, also where the path ends in "." or a slash.
Result<std::string> FolderName(const std::string& path) {
  // Only the parent of a name is made canonical, so the folder is asked for as one.
  SW_TRY_ASSIGN(const os::ParentName inside, os::SplitOutput(path + "/name"));
  const std::size_t slash = inside.parent.rfind('/');
  return slash == std::string::npos ? inside.parent : inside.parent.substr(slash + 1);
}

/// The folder that holds a tag folder, if it is a save folder: it has a pointer to some tag.
Result<std::optional<std::string>> SaveFolderOf(const std::string& tag_folder) {
  std::string path = tag_folder;
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  const std::size_t slash = path.rfind('/');
  const std::string_view last = std::string_view(path).substr(slash + 1);
  if (last == "." || last == "..") {
    path += "/..";
  } else if (slash == std::string::npos) {
    path = ".";
  } else {
    path.resize(std::max<std::size_t>(slash, 1));
  }
  for (const char* name : kPointers) {
    SW_TRY_ASSIGN(const bool there, os::Exists(path + "/" + name));
    if (there) return path;
  }
  return std::nullopt;
}

/// Turns every root into the tag folder it stands for, and finds the one tag of all.
Result<std::vector<std::string>> ResolveTag(const std::vector<std::string>& roots, std::string* tag,
                                            std::vector<std::string>* save_folders) {
  std::vector<Root> looked;
  std::optional<std::string> pointed;
  for (const std::string& path : roots) {
    SW_TRY(os::ExpectDir(path));
    Root root{path, std::nullopt, false};
    SW_TRY(ReadPointer(&root));
    if (root.tag && pointed && *pointed != *root.tag) {
      return Fail(Errc::kBadInput, path + ": latest tag " + *root.tag +
                                       " differs from that of another root, " + *pointed);
    }
    if (root.tag) pointed = root.tag;
    looked.push_back(std::move(root));
  }
  std::vector<std::string> folders;
  for (const Root& root : looked) {
    SW_TRY_ASSIGN(const std::vector<os::Entry> entries, os::ListDir(root.path));
    std::string chosen;
    if (root.tag) {
      chosen = *root.tag;
    } else if (LooksLikeTag(entries)) {
      folders.push_back(root.path);
      SW_TRY_ASSIGN(const std::optional<std::string> save_folder, SaveFolderOf(root.path));
      if (save_folder) save_folders->push_back(*save_folder);
      if (tag->empty() && pointed) *tag = *pointed;
      if (tag->empty()) {
        SW_TRY_ASSIGN(*tag, FolderName(root.path));
      }
      continue;
    } else {
      SW_TRY_ASSIGN(const std::vector<std::string> tags, TagsIn(root.path, entries));
      if (pointed && std::find(tags.begin(), tags.end(), *pointed) != tags.end()) {
        chosen = *pointed;
      } else if (tags.size() == 1) {
        chosen = tags.front();
      } else {
        return NoCheckpoint(root.path, entries, tags);
      }
    }
    if (!tag->empty() && *tag != chosen) {
      return Fail(Errc::kBadInput,
                  root.path + ": checkpoint " + chosen + " here, " + *tag + " in another root");
    }
    *tag = chosen;
    std::string folder = root.path + "/" + chosen;
    SW_TRY_ASSIGN(const bool there, os::IsDir(folder));
    if (!there) {
      return Fail(Errc::kNotFound, folder + ": no such folder, although " + root.path +
                                       (root.universal_pointer ? "/latest_universal" : "/latest") +
                                       " names it");
    }
    folders.push_back(std::move(folder));
    save_folders->push_back(root.path);
  }
  return folders;
}

/// Atoms below `zero`: one folder per parameter with one file per state, and optimizer_state.pt.
Status ListAtoms(const std::string& folder, std::vector<Found>* found,
                 std::vector<std::string>* skipped) {
  const auto under = [&](std::string_view name) {
    return std::string(folder).append("/").append(name);
  };
  const std::string top = under(kAtomFolder);
  SW_TRY_ASSIGN(const std::vector<os::Entry> entries, os::ListDir(top));
  for (const os::Entry& entry : entries) {
    const std::string name = std::string(kAtomFolder) + "/" + entry.name;
    if (IsFile(entry) && entry.name.ends_with(".pt")) {
      found->push_back({under(name), name});
      continue;
    }
    if (entry.type != os::EntryType::kDir) {
      skipped->push_back(name);
      continue;
    }
    SW_TRY_ASSIGN(const std::vector<os::Entry> states, os::ListDir(top + "/" + entry.name));
    for (const os::Entry& state : states) {
      std::string state_name = name;
      state_name += '/';
      state_name += state.name;
      if (IsFile(state) && state.name.ends_with(".pt")) {
        found->push_back({under(state_name), state_name});
      } else {
        skipped->push_back(state_name);
      }
    }
  }
  return {};
}

/// Everything of a checkpoint in one tag folder.
struct Listing {
  std::vector<Found> files;
  std::vector<Found> atoms;
  std::vector<std::string> skipped;
  std::string manifest_path;
  bool shards = false;
};

Status ListFolder(const std::string& folder, Listing* out) {
  SW_TRY_ASSIGN(const std::vector<os::Entry> entries, os::ListDir(folder));
  for (const os::Entry& entry : entries) {
    if (entry.type == os::EntryType::kDir) {
      if (entry.name == kAtomFolder) {
        SW_TRY(ListAtoms(folder, &out->atoms, &out->skipped));
        continue;
      }
      if (entry.name == "offloaded_tensors") {
        return Fail(Errc::kUnsupported,
                    folder +
                        "/offloaded_tensors: optimizer state offloaded to NVMe: save the "
                        "checkpoint without NVMe offload");
      }
    } else if (IsFile(entry)) {
      if (entry.name == kAtomManifest) {
        out->manifest_path = folder + "/" + entry.name;
        continue;
      }
      if (const auto name = ParseFileName(entry.name)) {
        out->shards = out->shards || name->role == FileRole::kShard;
        out->files.push_back({folder + "/" + entry.name, entry.name});
        continue;
      }
      // Ours and the recovery scripts of DeepSpeed: known, and of no use here.
      if (entry.name == "shardwright.json" || entry.name.ends_with(".py")) continue;
    }
    out->skipped.push_back(entry.name);
  }
  return {};
}

/// Nebula puts a pickled empty string where the file should be.
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

/// DataStates puts the length of a JSON header first, whose last key is its own.
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

/// Scalars are used from here, so no later pass over the payloads compares them.
Status CheckSum(const std::string& path, const torch_pt::Storage& storage, std::string_view bytes) {
  const std::uint32_t crc = zip::Crc32(std::as_bytes(std::span(bytes)));
  if (!storage.crc32 || *storage.crc32 == crc) return {};
  char text[64];
  std::snprintf(text, sizeof text, "CRC-32 %08x expected, %08x found", *storage.crc32, crc);
  return Fail(Errc::kBadInput, path + ": data/" + storage.key + ": " + text);
}

Result<SourceFile> ReadFile(const Found& found) {
  SourceFile out;
  out.path = found.path;
  out.name = found.name;
  SW_TRY_ASSIGN(const os::File file, os::File::OpenRead(found.path));
  SW_TRY_ASSIGN(out.identity, file.Stat());
  if (IsNebulaStub(file, out.identity)) {
    return Fail(Errc::kUnsupported, found.path +
                                        ": a Nebula placeholder, its data is elsewhere: "
                                        "load and save the checkpoint without Nebula");
  }
  Result<torch_pt::Skeleton> skeleton = torch_pt::ReadSkeleton(file);
  if (!skeleton && IsDataStates(file, out.identity)) {
    return Fail(Errc::kUnsupported, found.path +
                                        ": a DataStates container: load and save the "
                                        "checkpoint without DataStates");
  }
  SW_TRY_ASSIGN(out.skeleton, std::move(skeleton));
  for (std::size_t i = 0; i < out.skeleton.storages.size(); ++i) {
    const torch_pt::Storage& storage = out.skeleton.storages[i];
    if (storage.bytes == 0 || storage.bytes > kInlineBytes) continue;
    std::string bytes(static_cast<std::size_t>(storage.bytes), '\0');
    SW_TRY(file.ReadAt(storage.offset, std::as_writable_bytes(std::span(bytes))));
    SW_TRY(CheckSum(found.path, storage, bytes));
    out.inlined.emplace(static_cast<std::uint32_t>(i), std::move(bytes));
  }
  return out;
}

/// Refuses a second copy of a file that is another file.
Status CheckCopy(const SourceFile& have, const Found& other) {
  SW_TRY_ASSIGN(const os::File file, os::File::OpenRead(other.path));
  SW_TRY_ASSIGN(const os::Identity identity, file.Stat());
  if (identity == have.identity) return {};
  bool same = identity.bytes == have.identity.bytes;
  if (same) {
    SW_TRY_ASSIGN(const torch_pt::Skeleton skeleton, torch_pt::ReadSkeleton(file));
    same = SameSums(have.skeleton, skeleton);
    if (!same) {
      SW_TRY_ASSIGN(same, SameBytes(have.path, other.path, identity.bytes));
    }
  }
  if (!same) {
    return Fail(Errc::kBadInput, other.path + " and " + have.path +
                                     ": two different files with the name " + have.name);
  }
  return {};
}

void WarnAboutSkipped(const Listing& listing, std::vector<std::string>* warnings) {
  if (listing.skipped.empty()) return;
  const std::set<std::string> names(listing.skipped.begin(), listing.skipped.end());
  warnings->push_back("not part of the checkpoint, ignored: " +
                      FirstFew({names.begin(), names.end()}));
}

/// Reads what lies in the tag folders: nothing, if there is nothing in them.
Status ScanFolders(const std::vector<std::string>& folders, SourceSet* out) {
  Listing listing;
  for (const std::string& folder : folders) SW_TRY(ListFolder(folder, &listing));

  std::vector<Found> found = std::move(listing.files);
  // The atoms that a manifest describes may be another rank's part.
  if (!listing.manifest_path.empty() && !listing.shards) {
    SW_TRY_ASSIGN(out->manifest, os::ReadWholeText(listing.manifest_path, limits::kJsonBytes));
  }
  if (!listing.atoms.empty() && !listing.shards) {
    out->kind = SourceKind::kUniversal;
    std::move(listing.atoms.begin(), listing.atoms.end(), std::back_inserter(found));
  } else if (!listing.atoms.empty()) {
    listing.skipped.push_back(std::string(kAtomFolder) + "/");
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const Found& a, const Found& b) { return NaturalLess(a.name, b.name); });
  for (const Found& file : found) {
    if (!out->files.empty() && out->files.back().name == file.name) {
      SW_TRY(CheckCopy(out->files.back(), file));
      continue;
    }
    SW_TRY_ASSIGN(SourceFile read, ReadFile(file));
    out->files.push_back(std::move(read));
  }
  WarnAboutSkipped(listing, &out->warnings);
  return {};
}

}  // namespace

Result<std::string> PointedTag(const std::string& path) {
  SW_TRY_ASSIGN(const std::string text, os::ReadWholeText(path, kTagBytes));
  const std::string_view tag = Trimmed(text);
  if (tag.empty()) return Fail(Errc::kNotFound, path + ": the tag is empty");
  if (Status safe = os::SafeName(tag); !safe) return Within(path, std::move(safe).error());
  return std::string(tag);
}

bool SameSums(const torch_pt::Skeleton& a, const torch_pt::Skeleton& b) {
  if (a.pickle != b.pickle || a.storages.size() != b.storages.size()) return false;
  for (std::size_t i = 0; i < a.storages.size(); ++i) {
    const torch_pt::Storage& x = a.storages[i];
    const torch_pt::Storage& y = b.storages[i];
    if (x.key != y.key || x.bytes != y.bytes || !x.crc32 || x.crc32 != y.crc32) return false;
  }
  return true;
}

Result<bool> SameBytes(const std::string& a, const std::string& b, std::uint64_t bytes) {
  constexpr std::uint64_t kBlock = std::uint64_t{1} << 20;
  SW_TRY_ASSIGN(const os::File x, os::File::OpenRead(a));
  SW_TRY_ASSIGN(const os::File y, os::File::OpenRead(b));
  std::vector<std::byte> p(kBlock);
  std::vector<std::byte> q(kBlock);
  for (std::uint64_t at = 0; at < bytes; at += kBlock) {
    const auto n = static_cast<std::size_t>(std::min(kBlock, bytes - at));
    SW_TRY(x.ReadAt(at, std::span(p).first(n)));
    SW_TRY(y.ReadAt(at, std::span(q).first(n)));
    if (std::memcmp(p.data(), q.data(), n) != 0) return false;
  }
  return true;
}

Result<SourceSet> ScanSource(const std::vector<std::string>& roots) {
  if (roots.empty()) return Fail(Errc::kUsage, "no source given");
  SourceSet out;
  SW_TRY_ASSIGN(const std::vector<std::string> folders,
                ResolveTag(roots, &out.tag, &out.save_folders));
  SW_TRY(ScanFolders(folders, &out));
  if (out.files.empty()) {
    return Fail(Errc::kNotFound, folders.front() + ": no files of a DeepSpeed checkpoint here");
  }
  return out;
}

Result<SourceSet> ScanPart(const std::vector<std::string>& roots, const std::string& tag) {
  SourceSet out;
  out.tag = tag;
  std::vector<std::string> folders;
  for (const std::string& root : roots) {
    SW_TRY_ASSIGN(const bool there, os::Exists(root));
    if (!there) continue;
    SW_TRY_ASSIGN(const std::vector<os::Entry> entries, os::ListDir(root));
    std::string folder = root;
    folder.append("/").append(tag);
    SW_TRY_ASSIGN(const bool below, os::IsDir(folder));
    if (LooksLikeTag(entries)) {
      folders.push_back(root);
      SW_TRY_ASSIGN(const std::optional<std::string> save_folder, SaveFolderOf(root));
      if (save_folder) out.save_folders.push_back(*save_folder);
    } else if (below) {
      folders.push_back(folder);
      out.save_folders.push_back(root);
    }
  }
  SW_TRY(ScanFolders(folders, &out));
  return out;
}

}  // namespace shardwright::dialect
