// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/open_source.h"

#include <algorithm>
#include <utility>

#include "checkpoints/next_step.h"
#include "checkpoints/registry.h"
#include "support/base/text.h"
#include "support/os/dir.h"

namespace shardwright::checkpoints {
namespace {

constexpr std::uint64_t kTagBytes = 4096;

/// An inspected source path.
struct SourcePath {
  std::string path;
  std::optional<std::string> tag;        // the tag in its pointer file
  std::string_view pointer;              // name of its pointer file
  std::optional<Listing::Folder> alone;  // set if the path is a file: the listing with this file
};

/// Reads the tag in the pointer file of a source path, if it has one.
Status ReadPointer(SourcePath* root) {
  for (const Format& format : Formats()) {
    if (format.pointer.empty()) continue;
    const std::string path = root->path + "/" + std::string(format.pointer);
    SW_TRY_ASSIGN(const bool there, os::Exists(path));
    if (!there) continue;
    SW_TRY_ASSIGN(root->tag, PointedTag(format, root->path));
    root->pointer = format.pointer;
    return {};
  }
  return {};
}

/// Returns the format that claims a folder with these names, or null.
const Format* ClaimantOf(const Listing& listing) {
  for (const Format& format : Formats()) {
    if (format.claims(listing)) return &format;
  }
  return nullptr;
}

const Format* ClaimantOf(const std::string& path, const std::vector<os::Entry>& entries) {
  return ClaimantOf(Listing{{{path, entries}}});
}

/// A folder in a source path, described by the names of its entries.
struct Subfolder {
  std::string name;
  const Format* claimant = nullptr;
  bool pointed = false;  // it contains a pointer file

  /// False for weights next to a pointer file: there the pointer file names the tag folder.
  bool IsTag() const { return claimant != nullptr && !(claimant->pointer.empty() && pointed); }
};

Result<std::vector<Subfolder>> FoldersIn(const std::string& root,
                                         const std::vector<os::Entry>& entries) {
  std::vector<Subfolder> folders;
  for (const os::Entry& entry : entries) {
    if (entry.type != os::EntryType::kDir) continue;
    const std::string path = root + "/" + entry.name;
    SW_TRY_ASSIGN(const std::vector<os::Entry> names, os::ListDir(path));
    const bool pointed = std::any_of(names.begin(), names.end(),
                                     [](const os::Entry& one) { return IsPointer(one.name); });
    folders.push_back({entry.name, ClaimantOf(path, names), pointed});
  }
  return folders;
}

/// Fails with the reason why a file is not a valid INPUT; succeeds only if os::ExpectDir does.
/// \error kUnsupported  pickled weights; kNotFound  one file of a larger checkpoint, or absent
Status NotAlone(const std::string& path, const std::string& parent, const std::string& name) {
  SW_TRY_ASSIGN(const bool there, os::Exists(path));
  if (!there) return os::ExpectDir(path);
  SW_TRY_ASSIGN(const std::vector<os::Entry> siblings, os::ListDir(parent));
  const Format* claimant = ClaimantOf(parent, siblings);
  if (claimant != nullptr && claimant->belongs(name) != Belongs::kNo) {
    return Fail(Errc::kNotFound, path,
                ": a file, where a folder is expected: it is one of the files of a checkpoint (",
                claimant->name, "): pass its folder, ", parent);
  }
  if (auto pickled = PickledWeights(parent, name)) return tl::unexpected<Error>(*pickled);
  return os::ExpectDir(path);
}

/// Returns a listing with the one file of a source path that
/// is a complete checkpoint; nothing if the path is a folder.
/// \error kNotFound  the path is absent or not such a file; other errors as NotAlone
Result<std::optional<Listing::Folder>> FileAlone(const std::string& path) {
  SW_TRY_ASSIGN(const bool folder, os::IsDir(path));
  if (folder) return std::nullopt;
  const std::size_t slash = path.rfind('/');
  const std::string name = path.substr(slash + 1);
  const std::span<const Format> all = Formats();
  const bool alone = std::any_of(all.begin(), all.end(), [&](const Format& format) {
    return format.stands_alone != nullptr && format.stands_alone(name);
  });
  const std::string parent = slash == std::string::npos ? "." : path.substr(0, slash);
  if (!alone) {
    SW_TRY(NotAlone(path, parent, name));
    return std::nullopt;
  }
  SW_TRY_ASSIGN(const bool there, os::Exists(path));
  if (!there) return Fail(Errc::kNotFound, path, ": no such file");
  return Listing::Folder{parent, {{name, os::EntryType::kFile}}};
}

/// Returns a file's name without its last extension, unless
/// only dots would remain. The result serves as the tag.
std::string Stem(const std::string& name) {
  const std::string stem = name.substr(0, name.rfind('.'));
  return stem.find_first_not_of('.') == std::string::npos ? name : stem;
}

/// Returns true if a folder looks like a save folder: it has a pointer file or tag folders.
bool LooksLikeSave(const std::string& folder) {
  const auto entries = os::ListDir(folder);
  if (!entries) return false;
  return std::any_of(entries->begin(), entries->end(), [&](const os::Entry& entry) {
    if (IsFile(entry)) return IsPointer(entry.name);
    if (entry.type != os::EntryType::kDir) return false;
    const std::string path = folder + "/" + entry.name;
    const auto below = os::ListDir(path);
    return below && ClaimantOf(path, *below) != nullptr;
  });
}

/// Joins names, highest number first: "b and a". Counts the names after the first five.
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

/// Returns ", but b and a are checkpoints: name one of them" for the tag folders `found` and for
/// save folders in a source path (Trainer makes one for every step); empty if there are none.
std::string OtherCheckpoints(const std::string& root, const std::vector<os::Entry>& entries,
                             std::vector<std::string> found) {
  for (const os::Entry& entry : entries) {
    const bool folder = entry.type == os::EntryType::kDir;
    const bool known = std::find(found.begin(), found.end(), entry.name) != found.end();
    if (folder && !known && LooksLikeSave(root + "/" + entry.name)) found.push_back(entry.name);
  }
  if (found.empty()) return "";
  const bool one = found.size() == 1;
  return ", but " + NewestOf(std::move(found)) +
         (one ? " is a checkpoint: name it" : " are checkpoints: name one of them");
}

/// Returns the error for a folder without a pointer file that is not a checkpoint.
tl::unexpected<Error> NoCheckpoint(const std::string& root, const std::vector<os::Entry>& entries,
                                   std::vector<std::string> found) {
  const os::Entry store{"store.json", os::EntryType::kFile};
  if (std::find(entries.begin(), entries.end(), store) != entries.end()) {
    return Fail(Errc::kNotFound, root,
                ": a store of partial checkpoints; restore a checkpoint from it with pec-restore");
  }
  const std::string there = OtherCheckpoints(root, entries, std::move(found));
  if (!there.empty()) return Fail(Errc::kNotFound, root, ": no \"latest\" here", there);
  for (const os::Entry& entry : entries) {
    if (!IsFile(entry)) continue;
    if (auto pickled = PickledWeights(root, entry.name)) return tl::unexpected<Error>(*pickled);
  }
  return Fail(
      Errc::kNotFound, root,
      ": no checkpoint here: neither a \"latest\" file nor files of a checkpoint of any format (",
      FormatNames(), ")");
}

/// Returns the name of a folder, even if the path ends in "." or a slash.
Result<std::string> FolderName(const std::string& path) {
  // SplitOutput resolves only the parent of a name, so the folder is passed as the parent.
  SW_TRY_ASSIGN(const os::ParentName inside, os::SplitOutput(path + "/name"));
  const std::size_t slash = inside.parent.rfind('/');
  return slash == std::string::npos ? inside.parent : inside.parent.substr(slash + 1);
}

/// Returns the parent of a tag folder if it is a save folder, which has a pointer file.
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
  SW_TRY_ASSIGN(const std::string_view pointer, PointerIn(path));
  if (pointer.empty()) return std::nullopt;
  return path;
}

/// Adds the save folder of a tag folder that the user specified directly.
Status AddSaveFolder(const Format& format, const std::string& folder,
                     std::vector<std::string>* save_folders) {
  if (format.pointer.empty()) {
    save_folders->push_back(folder);
    return {};
  }
  SW_TRY_ASSIGN(const std::optional<std::string> above, SaveFolderOf(folder));
  if (above) save_folders->push_back(*above);
  return {};
}

/// Inspects every source path. \param pointed  receives the tag in their pointer files
Result<std::vector<SourcePath>> InspectPaths(const std::vector<std::string>& paths,
                                             std::optional<std::string>* pointed) {
  std::vector<SourcePath> source_paths;
  for (const std::string& path : paths) {
    SourcePath root;
    root.path = path;
    SW_TRY_ASSIGN(root.alone, FileAlone(path));
    if (!root.alone) SW_TRY(ReadPointer(&root));
    if (root.tag && *pointed && **pointed != *root.tag) {
      return Fail(Errc::kBadInput, path, ": latest tag ", *root.tag,
                  " differs from that of another source path, ", **pointed);
    }
    if (root.tag) *pointed = root.tag;
    source_paths.push_back(std::move(root));
  }
  return source_paths;
}

/// The checkpoint that a folder without a pointer file contains.
struct Claim {
  const Format* claimant = nullptr;  // format of the folder itself; null: use tag folder `tag`
  std::string tag;
};

/// \param pointed  the tag in the pointer file of another source path
/// \error kNotFound  no checkpoint, or several
Result<Claim> ClaimOf(const std::string& root, const std::vector<os::Entry>& entries,
                      const std::optional<std::string>& pointed) {
  Claim meant;
  meant.claimant = ClaimantOf(root, entries);
  if (meant.claimant != nullptr && !meant.claimant->pointer.empty()) return meant;
  SW_TRY_ASSIGN(const std::vector<Subfolder> folders, FoldersIn(root, entries));
  // Trainer stores weights next to its tag folders. A user who specifies this folder expects
  // the training state, so a missing pointer file must not reduce it to the weights.
  const bool trained = std::any_of(folders.begin(), folders.end(), [](const Subfolder& one) {
    return one.claimant != nullptr && !one.claimant->pointer.empty();
  });
  if (meant.claimant != nullptr && !trained) return meant;
  meant.claimant = nullptr;
  std::vector<std::string> tags;
  for (const Subfolder& one : folders) {
    if (one.IsTag()) tags.push_back(one.name);
  }
  if (pointed && std::find(tags.begin(), tags.end(), *pointed) != tags.end()) {
    meant.tag = *pointed;
  } else if (tags.size() == 1) {
    meant.tag = tags.front();
  } else {
    return NoCheckpoint(root, entries, tags);
  }
  return meant;
}

/// Reports the entries next to the only tag folder of a source path. They may
/// belong to the same checkpoint: OLMo-core stores config.json and train/ there.
void ReportAround(const std::vector<os::Entry>& entries, const std::string& folder,
                  SourceSet* out) {
  std::vector<std::string> names;
  for (const os::Entry& entry : entries) {
    if (entry.name == folder || IsPointer(entry.name) || OwnFileReason(entry.name)) continue;
    names.push_back(entry.name);
    out->left_out.push_back({entry.name, "next to the checkpoint's folder"});
  }
  if (names.empty()) return;
  out->warnings.push_back(StrCat("next to ", folder, ", not carried over: ", FirstFew(names)));
}

/// Like ReportAround, for a folder that the user specified directly and that OLMo-core has named.
Status ReportAroundNamed(const std::string& path, SourceSet* out) {
  constexpr std::string_view kOlmo = "model_and_optim";
  SW_TRY_ASSIGN(const std::string name, FolderName(path));
  if (name != kOlmo) return {};
  // The parent folder may be unreadable.
  const auto above = os::ListDir(path + "/..");
  if (above) ReportAround(*above, name, out);
  return {};
}

/// Resolves every source path to its tag folder or single file and determines the
/// tag, which must be the same for all. Sets tag and save folders of the set.
Result<Listing> Resolve(const std::vector<std::string>& paths, SourceSet* out) {
  std::optional<std::string> pointed;
  SW_TRY_ASSIGN(std::vector<SourcePath> source_paths, InspectPaths(paths, &pointed));
  Listing listing;
  for (SourcePath& root : source_paths) {
    if (root.alone) {
      if (out->tag.empty()) out->tag = pointed.value_or(Stem(root.alone->entries.front().name));
      listing.folders.push_back(*std::move(root.alone));
      continue;
    }
    SW_TRY_ASSIGN(std::vector<os::Entry> entries, os::ListDir(root.path));
    Claim meant;
    if (root.tag) {
      meant.tag = *root.tag;
    } else {
      SW_TRY_ASSIGN(meant, ClaimOf(root.path, entries, pointed));
    }
    if (meant.claimant != nullptr) {
      SW_TRY(AddSaveFolder(*meant.claimant, root.path, &out->save_folders));
      SW_TRY(ReportAroundNamed(root.path, out));
      if (out->tag.empty() && pointed) out->tag = *pointed;
      if (out->tag.empty()) {
        SW_TRY_ASSIGN(out->tag, FolderName(root.path));
      }
      listing.folders.push_back({root.path, std::move(entries)});
      continue;
    }
    if (!out->tag.empty() && out->tag != meant.tag) {
      return Fail(Errc::kBadInput, root.path, ": checkpoint ", meant.tag, " here, but ", out->tag,
                  " in another source path");
    }
    out->tag = meant.tag;
    std::string folder = root.path + "/" + meant.tag;
    const std::vector<os::Entry> around = entries;
    SW_TRY_ASSIGN(const bool there, os::IsDir(folder));
    if (!there) {
      // verl's pointer file has the name of Megatron's but a different meaning.
      return Fail(Errc::kNotFound, folder, ": no such folder, although ", root.path, "/",
                  root.pointer, " names it", OtherCheckpoints(root.path, entries, {}));
    }
    SW_TRY_ASSIGN(entries, os::ListDir(folder));
    const Format* claimant = ClaimantOf(folder, entries);
    const bool own = claimant != nullptr && claimant->pointer.empty();
    out->save_folders.push_back(own ? folder : root.path);
    if (own && !root.tag) ReportAround(around, meant.tag, out);
    listing.folders.push_back({std::move(folder), std::move(entries)});
  }
  return listing;
}

/// Scans a listing; an empty listing yields a set without files.
Status ScanListing(const Listing& listing, const ScanOptions& options, SourceSet* out) {
  const Format* format = ClaimantOf(listing);
  // Without a claiming format, the first format's scan reports the specific error.
  if (format == nullptr) format = &Formats().front();
  Result<SourceSet> scanned = format->scan(listing, options);
  if (!scanned) {
    const bool one = listing.folders.size() == 1;
    const auto name = one ? FolderName(listing.folders.front().path) : Result<std::string>("");
    return tl::unexpected<Error>(WithOtherSteps(std::move(scanned).error(), *format,
                                                one ? listing.folders.front().path : "",
                                                name.value_or("")));
  }
  SourceSet found = *std::move(scanned);
  found.format = format->name;
  found.tag = std::move(out->tag);
  found.save_folders = std::move(out->save_folders);
  found.left_out = std::move(out->left_out);
  found.warnings.insert(found.warnings.end(), out->warnings.begin(), out->warnings.end());
  *out = std::move(found);
  return {};
}

}  // namespace

Result<std::string_view> PointerIn(const std::string& folder) {
  for (const Format& format : Formats()) {
    if (format.pointer.empty()) continue;
    SW_TRY_ASSIGN(const bool there, os::Exists(folder + "/" + std::string(format.pointer)));
    if (there) return format.pointer;
  }
  return std::string_view();
}

bool IsPointer(std::string_view name) {
  const std::span<const Format> all = Formats();
  return std::any_of(all.begin(), all.end(),
                     [&](const Format& format) { return !name.empty() && format.pointer == name; });
}

Result<std::string> PointedTag(const Format& format, const std::string& folder) {
  const std::string path = folder + "/" + std::string(format.pointer);
  SW_TRY_ASSIGN(const std::string text, os::ReadWholeText(path, kTagBytes));
  std::string tag(Trimmed(text));
  if (tag.empty()) return Fail(Errc::kNotFound, path, ": the tag is empty");
  if (format.tag_of != nullptr) {
    Result<std::string> meant = format.tag_of(tag);
    if (!meant) return Within(path, std::move(meant).error());
    tag = *std::move(meant);
  }
  if (Status safe = os::SafeName(tag); !safe) return Within(path, std::move(safe).error());
  return tag;
}

Result<SourceSet> ScanSource(const std::vector<std::string>& source_paths,
                             const ScanOptions& options) {
  if (source_paths.empty()) return Fail(Errc::kUsage, "no source given");
  SourceSet out;
  SW_TRY_ASSIGN(const Listing listing, Resolve(source_paths, &out));
  SW_TRY(ScanListing(listing, options, &out));
  if (out.files.empty()) {
    return Fail(Errc::kNotFound, listing.folders.front().path,
                ": no files of a checkpoint of any format (", FormatNames(), ") here");
  }
  return out;
}

Result<SourceSet> ScanPart(const std::vector<std::string>& source_paths, const std::string& tag,
                           const ScanOptions& options) {
  SourceSet out;
  out.tag = tag;
  Listing listing;
  for (const std::string& root : source_paths) {
    SW_TRY_ASSIGN(const bool there, os::Exists(root));
    if (!there) continue;
    SW_TRY_ASSIGN(std::optional<Listing::Folder> alone, FileAlone(root));
    if (alone) {
      listing.folders.push_back(*std::move(alone));
      continue;
    }
    SW_TRY_ASSIGN(std::vector<os::Entry> entries, os::ListDir(root));
    std::string folder = root;
    folder.append("/").append(tag);
    SW_TRY_ASSIGN(const bool below, os::IsDir(folder));
    const Format* claimant = ClaimantOf(root, entries);
    if (claimant != nullptr && !(claimant->pointer.empty() && below)) {
      listing.folders.push_back({root, std::move(entries)});
      SW_TRY(AddSaveFolder(*claimant, root, &out.save_folders));
    } else if (below) {
      SW_TRY_ASSIGN(entries, os::ListDir(folder));
      listing.folders.push_back({std::move(folder), std::move(entries)});
      out.save_folders.push_back(root);
    }
  }
  SW_TRY(ScanListing(listing, options, &out));
  return out;
}

}  // namespace shardwright::checkpoints
