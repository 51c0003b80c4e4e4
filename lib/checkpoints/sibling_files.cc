// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cerrno>
#include <map>
#include <set>
#include <utility>

#include "checkpoints/model/links.h"
#include "checkpoints/registry.h"
#include "support/base/checked.h"
#include "support/base/text.h"
#include "support/os/directory.h"
#include "support/os/real_path.h"

namespace shardwright::checkpoints {
namespace {

// Large enough for the scripts and settings that trainers write with every checkpoint.
constexpr std::uint64_t kContentBytes = std::uint64_t{64} << 10;
// An export changes the element type in it, so it has to be read whole.
constexpr std::uint64_t kConfigBytes = std::uint64_t{1} << 20;
constexpr std::uint64_t kAllContentBytes = std::uint64_t{4} << 20;
constexpr int kAttempts = 3;

/// Index of each sibling in the set, by name.
using ByName = std::map<std::string, std::size_t>;

/// Finds the siblings of one save folder.
class Folder {
 public:
  Folder(const std::string& path, SourceSet* set, ByName* by_name)
      : path_(path), set_(set), by_name_(*by_name), format_(FindFormat(set->format)) {}

  Status Read() {
    SW_TRY_ASSIGN(const std::string real, os::ResolvePath(path_));
    SW_TRY_ASSIGN(const std::vector<os::Entry> entries, os::ListDir(path_));
    const std::size_t before = set_->siblings.size();
    for (const os::Entry& entry : entries) {
      if (IsPointer(entry.name)) continue;  // outputs get a new one
      if (entry.name == set_->tag) continue;
      if (format_ != nullptr && format_->pointer.empty() &&
          format_->belongs(entry.name) != Belongs::kNo) {
        continue;
      }
      if (auto why = OwnFileReason(entry.name)) {
        LeaveOut(entry.name, *why);
        continue;
      }
      switch (entry.type) {
        case os::EntryType::kFile:
          SW_TRY(Add(entry.name, path_ + "/" + entry.name, real + "/" + entry.name, false));
          break;
        case os::EntryType::kDir:
          SW_TRY(AddFolder(entry.name, real));
          break;
        case os::EntryType::kSymlink:
          SW_TRY(AddLink(entry.name, real));
          break;
        case os::EntryType::kOther:
          LeaveOutSurprising(entry.name, "neither a file nor a folder");
          break;
      }
    }
    if (set_->siblings.size() > before) WarnIfNotNewest();
    for (const auto& [why, names] : surprising_) {
      set_->warnings.push_back(
          StrCat("sibling file, not carried over: ", FirstFew(names), ": ", why));
    }
    return {};
  }

 private:
  /// Adds the files of a folder in sibling_folders. Records only the name of any other folder.
  Status AddFolder(const std::string& name, const std::string& real) {
    const auto along =
        format_ == nullptr ? std::span<const std::string_view>() : format_->sibling_folders;
    if (std::find(along.begin(), along.end(), name) == along.end()) {
      LeaveOut(name, "a folder");
      return {};
    }
    SW_TRY_ASSIGN(const std::vector<os::Entry> entries, os::ListDir(path_ + "/" + name));
    for (const os::Entry& entry : entries) {
      const std::string below = std::string(name).append("/").append(entry.name);
      if (entry.type == os::EntryType::kFile) {
        SW_TRY(Add(below, path_ + "/" + below, std::string(real).append("/").append(below), false));
      } else if (entry.type == os::EntryType::kSymlink) {
        SW_TRY(AddLink(below, real));
      } else {
        LeaveOut(below, "not a file");
      }
    }
    return {};
  }

  /// Warns if the pointer file names another tag, because trainers rewrite siblings at every save.
  void WarnIfNotNewest() {
    std::string newest;
    for (const Format& format : Formats()) {
      if (format.pointer.empty()) continue;
      const Result<std::string> tag = PointedTag(format, path_);
      if (!tag) continue;
      if (PlainTag(*tag) == PlainTag(set_->tag)) return;  // universal tags are also accepted
      if (newest.empty()) newest = *tag;
    }
    if (newest.empty()) return;
    set_->warnings.push_back(StrCat("sibling files of ", set_->tag, " may belong to ", newest));
  }

  void LeaveOut(const std::string& name, const std::string& why) {
    set_->left_out.push_back({name, why});
  }

  void LeaveOutSurprising(const std::string& name, const std::string& why) {
    LeaveOut(name, why);
    surprising_[why].push_back(name);
  }

  /// Follows a link only if IsLinkAllowed permits it: a downloaded checkpoint
  /// must not be able to copy arbitrary files of this machine into the output.
  Status AddLink(const std::string& name, const std::string& real_folder) {
    auto found = os::ResolvePath(path_ + "/" + name);
    if (!found && found.error().sys == EACCES) {
      LeaveOutSurprising(name, "a link into a folder that this user may not read");
      return {};
    }
    SW_TRY_ASSIGN(const std::string real, std::move(found));
    if (real.empty()) {
      LeaveOutSurprising(name, "a link that leads nowhere");
      return {};
    }
    if (!IsLinkAllowed(real_folder, real)) {
      LeaveOutSurprising(name, "a link that leads out of the folder");
      return {};
    }
    SW_TRY_ASSIGN(const bool folder, os::IsDir(real));
    if (folder) {
      LeaveOut(name, "a link to a folder");
      return {};
    }
    // Uses the resolved path, so a link that changes later cannot replace the file.
    return Add(name, real, real, true);
  }

  /// \param real  path without links; opening fails if a link has replaced a part of it
  Status Add(const std::string& name, const std::string& path, const std::string& real,
             bool is_link) {
    SiblingFile found;
    found.path = path;
    found.name = name;
    found.real = real;
    Result<os::File> file = os::Directory::OpenReal(real, path);
    if (!file) {
      SW_TRY_ASSIGN(const bool there, os::Exists(found.path));
      if (!there) return {};  // removed after it was listed
      if (file.error().sys == ELOOP || file.error().sys == ENOTDIR) {
        LeaveOutSurprising(name, "a link took its place while the folder was read");
        return {};
      }
      if (is_link) {
        LeaveOutSurprising(name, "a link to something that is not a readable file");
        return {};
      }
      file.error().message += "; to leave out sibling files, pass --siblings none";
      return tl::unexpected<Error>(std::move(file).error());
    }
    SW_TRY_ASSIGN(found.executable, file->IsExecutable());
    SW_TRY_ASSIGN(found.identity, file->Stat());
    for (int attempt = 0; attempt < kAttempts && !found.content; ++attempt) {
      SW_TRY(ReadContent(*file, &found));
    }
    SW_TRY_ASSIGN(const bool fresh, IsNew(found));
    if (!fresh) return {};
    if (found.content) content_bytes_ += found.content->size();
    by_name_.emplace(found.name, set_->siblings.size());
    set_->siblings.push_back(std::move(found));
    return {};
  }

  /// Reads the content of a small file, unless the file changes during the read.
  Status ReadContent(const os::File& file, SiblingFile* found) const {
    const std::uint64_t bytes = found->identity.bytes;
    const std::uint64_t most = found->name.ends_with("config.json") ? kConfigBytes : kContentBytes;
    if (bytes > most || content_bytes_ + bytes > kAllContentBytes) return {};
    std::string content(static_cast<std::size_t>(bytes), '\0');
    const Status read = file.ReadAt(0, std::as_writable_bytes(std::span(content)));
    const os::Identity before = found->identity;
    SW_TRY_ASSIGN(found->identity, file.Stat());
    if (found->identity != before) return {};
    SW_TRY(read);
    found->content = std::move(content);
    return {};
  }

  static Result<bool> IsSame(const SiblingFile& a, const SiblingFile& b) {
    if (a.identity.bytes != b.identity.bytes) return false;
    if (a.content && b.content) return *a.content == *b.content;
    if (a.identity == b.identity) return true;
    return SameBytes(a.path, b.path, a.identity.bytes);
  }

  /// Returns false if another save folder has a file of that name; warns if the two differ.
  Result<bool> IsNew(const SiblingFile& found) {
    const auto have = by_name_.find(found.name);
    if (have == by_name_.end()) return true;
    const SiblingFile& other = set_->siblings[have->second];
    SW_TRY_ASSIGN(const bool same, IsSame(other, found));
    if (!same) {
      LeaveOutSurprising(found.name, "differs from the file of that name in " +
                                         other.path.substr(0, other.path.rfind('/')));
    }
    return false;
  }

  const std::string& path_;
  SourceSet* set_;
  ByName& by_name_;
  const Format* format_;
  std::uint64_t content_bytes_ = 0;
  std::map<std::string, std::vector<std::string>> surprising_;  // by reason
};

}  // namespace

std::optional<std::string> OwnFileReason(std::string_view name) {
  if (name == "shardwright.json") return "the manifest of another output";
  if (name == ".journal") return "a name that outputs use while they are written";
  if (name.ends_with(".report.json")) return "a report";
  if (name.ends_with(".lock")) return "a lock";
  if (name.ends_with(".partial")) return "an output that is not complete";
  if (name.starts_with(".nfs")) return "removed, but still open somewhere";
  return std::nullopt;
}

Status FindSiblingFiles(SourceSet* set) {
  std::set<std::string> seen;
  ByName by_name;
  for (const std::string& folder : set->save_folders) {
    SW_TRY_ASSIGN(std::string real, os::ResolvePath(folder));
    if (!seen.insert(std::move(real)).second) continue;
    SW_TRY(Folder(folder, set, &by_name).Read());
  }
  std::sort(set->siblings.begin(), set->siblings.end(),
            [](const SiblingFile& a, const SiblingFile& b) { return NaturalLess(a.name, b.name); });
  return {};
}

bool IsAppendedTo(std::string_view path) {
  constexpr std::array<std::string_view, 4> kEnds = {".log", ".jsonl", ".out", ".err"};
  const std::string_view name = path.substr(path.rfind('/') + 1);
  return name.starts_with("events.out.tfevents") ||  // TensorBoard
         std::any_of(kEnds.begin(), kEnds.end(),
                     [&](std::string_view end) { return name.ends_with(end); });
}

std::optional<std::uint64_t> RankOfSibling(std::string_view name) {
  // By Hugging Face Trainer and by Accelerate.
  constexpr std::array<std::pair<std::string_view, std::string_view>, 2> kForms = {
      {{"rng_state_", ".pth"}, {"random_states_", ".pkl"}}};
  for (const auto& [begin, end] : kForms) {
    if (!name.starts_with(begin) || !name.ends_with(end)) continue;
    if (name.size() <= begin.size() + end.size()) continue;
    const std::string_view digits =
        name.substr(begin.size(), name.size() - begin.size() - end.size());
    if (const auto rank = NumberIn<std::uint64_t>(digits)) return rank;
  }
  return std::nullopt;
}

}  // namespace shardwright::checkpoints
