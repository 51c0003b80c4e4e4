#include "dialect/scan.h"

#include <algorithm>
#include <utility>

#include "base/text.h"
#include "dialect/dialects.h"
#include "os/dir.h"

namespace shardwright::dialect {
namespace {

constexpr std::uint64_t kTagBytes = 4096;

/// One root, looked at.
struct Root {
  std::string path;
  std::optional<std::string> tag;  // what its pointer file says
  std::string_view pointer;        // its name
};

/// The tag in a root's pointer file, if it has one.
Status ReadPointer(Root* root) {
  for (const Dialect& dialect : Dialects()) {
    if (dialect.pointer.empty()) continue;
    const std::string path = root->path + "/" + std::string(dialect.pointer);
    SW_TRY_ASSIGN(const bool there, os::Exists(path));
    if (!there) continue;
    SW_TRY_ASSIGN(root->tag, PointedTag(path));
    root->pointer = dialect.pointer;
    return {};
  }
  return {};
}

/// The dialect that claims a folder with these names, or null.
const Dialect* ClaimantOf(const Listing& listing) {
  for (const Dialect& dialect : Dialects()) {
    if (dialect.claims(listing)) return &dialect;
  }
  return nullptr;
}

const Dialect* ClaimantOf(const std::string& path, const std::vector<os::Entry>& entries) {
  return ClaimantOf(Listing{{{path, entries}}});
}

/// The tag folders below a save folder that has no pointer file. Weights beside a pointer file are
/// not one: there the pointer says what is meant.
Result<std::vector<std::string>> TagsIn(const std::string& root,
                                        const std::vector<os::Entry>& entries) {
  std::vector<std::string> tags;
  for (const os::Entry& entry : entries) {
    if (entry.type != os::EntryType::kDir) continue;
    const std::string path = root + "/" + entry.name;
    SW_TRY_ASSIGN(const std::vector<os::Entry> below, os::ListDir(path));
    const Dialect* claimant = ClaimantOf(path, below);
    const bool pointed = std::any_of(below.begin(), below.end(),
                                     [](const os::Entry& one) { return IsPointer(one.name); });
    if (claimant != nullptr && !(claimant->pointer.empty() && pointed)) tags.push_back(entry.name);
  }
  return tags;
}

/// The dialect whose checkpoint lies in a folder itself, or null. A Trainer puts weights beside its
/// tag folders; whoever names that folder means the training state, and must not get less of it
/// only because the pointer file is missing.
Result<const Dialect*> OwnerOf(const std::string& root, const std::vector<os::Entry>& entries) {
  const Dialect* claimant = ClaimantOf(root, entries);
  if (claimant == nullptr || !claimant->pointer.empty()) return claimant;
  for (const os::Entry& entry : entries) {
    if (entry.type != os::EntryType::kDir) continue;
    const std::string path = root + "/" + entry.name;
    SW_TRY_ASSIGN(const std::vector<os::Entry> below, os::ListDir(path));
    const Dialect* other = ClaimantOf(path, below);
    if (other != nullptr && !other->pointer.empty()) return nullptr;
  }
  return claimant;
}

/// True if a folder is a save folder, as far as can be told: it has a pointer file, or tag folders.
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
                                     ": no checkpoint here: neither a \"latest\" file nor files "
                                     "of a checkpoint of any format (" +
                                     FormatNames() + ")");
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
  SW_TRY_ASSIGN(const std::string_view pointer, PointerIn(path));
  if (pointer.empty()) return std::nullopt;
  return path;
}

/// Adds the save folder of a tag folder that was named itself.
Status AddSaveFolder(const Dialect& dialect, const std::string& folder,
                     std::vector<std::string>* save_folders) {
  if (dialect.pointer.empty()) {
    save_folders->push_back(folder);
    return {};
  }
  SW_TRY_ASSIGN(const std::optional<std::string> above, SaveFolderOf(folder));
  if (above) save_folders->push_back(*above);
  return {};
}

/// Turns every root into the tag folder it stands for, and finds the one tag of all.
Result<std::vector<std::string>> ResolveTag(const std::vector<std::string>& roots, std::string* tag,
                                            std::vector<std::string>* save_folders) {
  std::vector<Root> looked;
  std::optional<std::string> pointed;
  for (const std::string& path : roots) {
    SW_TRY(os::ExpectDir(path));
    Root root{path, std::nullopt, {}};
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
    const Dialect* claimant = nullptr;
    if (!root.tag) {
      SW_TRY_ASSIGN(claimant, OwnerOf(root.path, entries));
    }
    std::string chosen;
    if (root.tag) {
      chosen = *root.tag;
    } else if (claimant != nullptr) {
      folders.push_back(root.path);
      SW_TRY(AddSaveFolder(*claimant, root.path, save_folders));
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
      return Fail(Errc::kNotFound, folder + ": no such folder, although " + root.path + "/" +
                                       std::string(root.pointer) + " names it");
    }
    SW_TRY_ASSIGN(const std::vector<os::Entry> below, os::ListDir(folder));
    claimant = ClaimantOf(folder, below);
    const bool own = claimant != nullptr && claimant->pointer.empty();
    save_folders->push_back(own ? folder : root.path);
    folders.push_back(std::move(folder));
  }
  return folders;
}

/// Reads what lies in the tag folders: nothing, if there is nothing in them.
Status ScanFolders(const std::vector<std::string>& folders, SourceSet* out) {
  Listing listing;
  for (const std::string& folder : folders) {
    SW_TRY_ASSIGN(std::vector<os::Entry> entries, os::ListDir(folder));
    listing.folders.push_back({folder, std::move(entries)});
  }
  const Dialect* dialect = ClaimantOf(listing);
  // A folder that nobody claims may still hold what its files cannot be told without.
  if (dialect == nullptr) dialect = &Dialects().front();
  SW_TRY_ASSIGN(SourceSet found, dialect->scan(listing));
  found.dialect = dialect->name;
  found.tag = std::move(out->tag);
  found.save_folders = std::move(out->save_folders);
  *out = std::move(found);
  return {};
}

}  // namespace

Result<std::string_view> PointerIn(const std::string& folder) {
  for (const Dialect& dialect : Dialects()) {
    if (dialect.pointer.empty()) continue;
    SW_TRY_ASSIGN(const bool there, os::Exists(folder + "/" + std::string(dialect.pointer)));
    if (there) return dialect.pointer;
  }
  return std::string_view();
}

bool IsPointer(std::string_view name) {
  const std::span<const Dialect> all = Dialects();
  return std::any_of(all.begin(), all.end(), [&](const Dialect& dialect) {
    return !name.empty() && dialect.pointer == name;
  });
}

Result<std::string> PointedTag(const std::string& path) {
  SW_TRY_ASSIGN(const std::string text, os::ReadWholeText(path, kTagBytes));
  const std::string_view tag = Trimmed(text);
  if (tag.empty()) return Fail(Errc::kNotFound, path + ": the tag is empty");
  if (Status safe = os::SafeName(tag); !safe) return Within(path, std::move(safe).error());
  return std::string(tag);
}

Result<SourceSet> ScanSource(const std::vector<std::string>& roots) {
  if (roots.empty()) return Fail(Errc::kUsage, "no source given");
  SourceSet out;
  SW_TRY_ASSIGN(const std::vector<std::string> folders,
                ResolveTag(roots, &out.tag, &out.save_folders));
  SW_TRY(ScanFolders(folders, &out));
  if (out.files.empty()) {
    return Fail(Errc::kNotFound, folders.front() + ": no files of a checkpoint of any format (" +
                                     FormatNames() + ") here");
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
    const Dialect* claimant = ClaimantOf(root, entries);
    if (claimant != nullptr && !(claimant->pointer.empty() && below)) {
      folders.push_back(root);
      SW_TRY(AddSaveFolder(*claimant, root, &out.save_folders));
    } else if (below) {
      folders.push_back(folder);
      out.save_folders.push_back(root);
    }
  }
  SW_TRY(ScanFolders(folders, &out));
  return out;
}

}  // namespace shardwright::dialect
