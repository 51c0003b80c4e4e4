// SPDX-License-Identifier: Apache-2.0
// First start of a run: distinguishes a new store from one that is not visible.

#include <algorithm>
#include <utility>

#include "partial/store/store.h"
#include "support/base/limits.h"
#include "support/os/commit.h"
#include "support/os/dir.h"

namespace shardwright::partial {
namespace {

/// Counts the texts in a folder of a store.
/// \error kNotFound  it cannot be listed; kBadInput  it has other names but no texts
Result<std::size_t> CountTexts(const std::string& folder, std::string_view suffix) {
  SW_TRY_ASSIGN(const std::vector<os::Entry> entries, os::ListDir(folder));
  std::size_t count = 0;
  std::string stranger;
  for (const os::Entry& entry : entries) {
    // Leftovers of a killed run, and names hidden by a file system.
    if (entry.name.ends_with(".tmp") || entry.name.starts_with('.')) continue;
    if (entry.name.ends_with(suffix)) {
      ++count;
    } else {
      stranger = entry.name;
    }
  }
  if (count > 0 || stranger.empty()) return count;
  return Fail(Errc::kBadInput, folder, ": contains \"", stranger, "\", but no *", suffix, " file");
}

/// Checks that a store without manifests has no other
/// texts. A killed first save leaves at most one catalogue.
Status CheckNoTraces(const std::string& path) {
  SW_TRY_ASSIGN(const std::size_t recoveries, CountTexts(path + "/recoveries", ".json"));
  SW_TRY_ASSIGN(const std::size_t catalogues, CountTexts(path + "/catalogues", ".swc"));
  if (recoveries == 0 && catalogues <= 1) return {};
  return Fail(Errc::kBadInput, path, ": all manifests are missing, but there are ", recoveries,
              " recoveries and ", catalogues,
              " catalogues; if every save was killed before it was complete, remove the folder or "
              "the files in its catalogues/");
}

constexpr std::string_view kBeginSuffix = ".begin-";

/// Removes folders of killed calls of Begin as far as possible.
/// Concurrent calls fail without theirs, as they would in any case.
/// \pre the store exists
void RemoveLeftBehind(const os::ParentName& store) {
  const auto siblings = os::ListDir(store.parent);
  if (!siblings) return;
  for (const os::Entry& sibling : *siblings) {
    if (sibling.type != os::EntryType::kDir) continue;
    if (!sibling.name.starts_with(store.name + std::string(kBeginSuffix))) continue;
    const std::string path = store.parent + "/" + sibling.name;
    const auto entries = os::ListDir(path);
    const bool ours = entries && std::all_of(entries->begin(), entries->end(), [](const auto& one) {
                        return one.name.starts_with(Store::kBegunName);
                      });
    if (ours) (void)os::RemoveTree(path, store.parent);
  }
}

}  // namespace

Status Store::Begin(const std::string& path) {
  SW_TRY_ASSIGN(const os::ParentName split, os::SplitOutput(path));
  SW_TRY_ASSIGN(const bool taken, os::Exists(split.Path()));
  if (taken) return Fail(Errc::kBusy, path, ": already exists");
  // Created next to its final name, so that a kill leaves no folder without a mark.
  SW_TRY_ASSIGN(const std::string run_id, os::MakeRunId());
  const std::string made = split.Path() + std::string(kBeginSuffix) + run_id;
  const auto make = [&]() -> Status {
    SW_TRY(os::MakeDir(made));
    SW_TRY(os::ReplaceFile(made + "/" + kBegunName, BegunText()));
    return os::RenameNew(made, split.Path());
  };
  Status begun = make();
  if (!begun) {
    (void)os::RemoveTree(made, split.parent);
    // A concurrent call that was first removes leftovers next to the store.
    const auto there = os::Exists(split.Path());
    if (there && *there) return Fail(Errc::kBusy, path, ": already exists");
    return begun;
  }
  SW_TRY(os::SyncDir(split.parent));
  RemoveLeftBehind(split);
  return {};
}

Status Store::Prepare(const std::string& path) {
  SW_TRY_ASSIGN(const bool there, os::Exists(path));
  if (!there) return Begin(path);
  SW_TRY_ASSIGN(const bool store, IsStore(path));
  if (!store) return ExpectOwnNames(path);
  SW_TRY_ASSIGN(const Store open, Open(path));
  Result<os::Lock> lock = open.LockForWriting("a check for write access");
  if (lock) return lock->Release();
  // A locked store is writable by the owner of the lock.
  return lock.error().code == Errc::kBusy ? Status() : tl::unexpected<Error>(lock.error());
}

Result<bool> Store::HasNoCheckpoint(const std::string& path) {
  SW_TRY_ASSIGN(const bool folder, os::IsDir(path));
  if (!folder) {
    SW_TRY_ASSIGN(const bool there, os::Exists(path));
    return Fail(Errc::kNotFound, path,
                (there ? ": not a folder"
                       : ": there is no store; check that its file system is mounted; at the "
                         "first start of a run, pass --begin to create the store"));
  }
  SW_TRY_ASSIGN(const std::vector<os::Entry> entries, os::ListDir(path));
  if (entries.empty()) {
    return Fail(Errc::kNotFound, path,
                ": expected a store or no folder, found an empty folder; check that its file "
                "system is mounted; at the first start of a run, remove the folder");
  }
  const auto has = [&](const char* name) {
    return std::any_of(entries.begin(), entries.end(),
                       [&](const os::Entry& entry) { return entry.name == name; });
  };
  SW_TRY_ASSIGN(const bool store, IsStore(path));
  if (store) {
    SW_TRY(Open(path));
  } else if (has(kBegunName)) {
    const std::string name = path + "/" + kBegunName;
    SW_TRY_ASSIGN(const std::string text, os::ReadWholeText(name, limits::kJsonBytes));
    SW_TRY(ParseBegun(text, name));
  } else {
    // A killed creation leaves folders but no head.
    const bool ours = std::all_of(entries.begin(), entries.end(),
                                  [](const os::Entry& entry) { return IsOwnName(entry.name); });
    if (!ours || !has("manifests")) {
      return Fail(Errc::kNotFound, path, ": no store of partial checkpoints");
    }
  }
  if (!store && !has("manifests")) return true;
  SW_TRY_ASSIGN(const std::size_t manifests, CountTexts(path + "/manifests", ".json"));
  if (manifests > 0) {
    if (store) return false;
    return Fail(Errc::kBadInput, path, ": has manifests, but no store.json");
  }
  if (store) SW_TRY(CheckNoTraces(path));
  return true;
}

}  // namespace shardwright::partial
