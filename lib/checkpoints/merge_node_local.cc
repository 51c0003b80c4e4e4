// SPDX-License-Identifier: Apache-2.0
// Merges the parts of a checkpoint of which every rank sees only some files.

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "checkpoints/registry.h"

namespace shardwright::checkpoints {
namespace {

/// Returns true if all storages have checksums; some formats and old files have none.
bool HasSums(const SourceFile& file) {
  return std::any_of(file.containers.begin(), file.containers.end(), [](const Container& one) {
    return std::any_of(one.metadata->storages.begin(), one.metadata->storages.end(),
                       [](const files::Storage& storage) { return storage.crc32.has_value(); });
  });
}

std::string OnRank(std::size_t rank) { return "rank " + std::to_string(rank); }

/// Returns the names of all parts' files in the form of one folder.
Listing NamesOf(const std::vector<SourceSet>& parts) {
  std::set<std::pair<std::string, bool>> names;  // with true for folders
  for (const SourceSet& part : parts) {
    for (const SourceFile& file : part.files) {
      const std::size_t slash = file.name.find('/');
      names.emplace(file.name.substr(0, slash), slash != std::string::npos);
    }
  }
  Listing listing{{{}}};
  for (const auto& [name, folder] : names) {
    listing.folders.front().entries.push_back(
        {name, folder ? os::EntryType::kDir : os::EntryType::kFile});
  }
  return listing;
}

/// Detects the format of all parts together. One part may look like another
/// format, for example model states without the atoms that another rank sees.
/// \error kNotFound, kBadInput  as UniteParts
Result<const Format*> CheckParts(const std::vector<SourceSet>& parts) {
  const SourceSet* first = nullptr;
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    const SourceSet& part = parts[rank];
    if (part.files.empty()) continue;
    if (first == nullptr) first = &part;
    if (part.tag != first->tag) {
      const auto first_rank = static_cast<std::size_t>(first - parts.data());
      return Fail(Errc::kBadInput, "the ranks see different checkpoints: \"", first->tag, "\" on ",
                  OnRank(first_rank), ", \"", part.tag, "\" on ", OnRank(rank));
    }
  }
  if (first == nullptr) return Fail(Errc::kNotFound, "no rank sees files of a checkpoint");
  const Format* format = nullptr;
  const Listing all = NamesOf(parts);
  for (const Format& one : Formats()) {
    if (format == nullptr && one.claims(all)) format = &one;
  }
  if (format == nullptr) {
    SW_TRY_ASSIGN(format, RequireFormat(first->format));
  }
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    for (const SourceFile& file : parts[rank].files) {
      if (format->belongs(file.name) != Belongs::kNo) continue;
      return Fail(Errc::kBadInput, first->tag, ": ", OnRank(rank), " sees ", file.name,
                  ", which does not belong to the ", std::string(format->name),
                  " checkpoint that other ranks see: pass one of the two");
    }
  }
  return format;
}

/// Compares a rank's file with an earlier rank's file of the same name; warns or fails if unequal.
Status CheckCopy(const Format& format, const SourceFile& have, int owner, const SourceFile& other,
                 std::size_t rank, std::vector<std::string>* warnings) {
  if (other.identity == have.identity || SameSums(have.containers, other.containers)) return {};
  if (!have.digest.empty() && have.digest == other.digest) return {};
  const std::string text = "two different files with the name " + have.name + " on " +
                           OnRank(static_cast<std::size_t>(owner)) + " (" + have.path + ") and " +
                           OnRank(rank);
  if (format.belongs(have.name) == Belongs::kOneVersion)
    return Fail(Errc::kBadInput, text, " (", other.path, ")");
  warnings->push_back(text + ": the first is taken");
  return {};
}

/// Merges siblings, and records their index in the merged set and the first rank that sees each.
class Siblings {
 public:
  explicit Siblings(SourceSet* all) : all_(*all) {}

  /// Adds the siblings of one rank to those of the ranks before it.
  void Add(SourceSet* part, std::size_t rank) {
    for (SiblingFile& sibling : part->siblings) {
      const auto [known, fresh] = seen_.try_emplace(sibling.name, Seen{all_.siblings.size(), rank});
      if (fresh) {
        all_.siblings.push_back(std::move(sibling));
        continue;
      }
      const SiblingFile& other = all_.siblings[known->second.index];
      const bool sized = other.identity.bytes == sibling.identity.bytes;
      const bool known_bytes = other.content && sibling.content;
      if (sized &&
          (known_bytes ? other.content == sibling.content : other.identity == sibling.identity)) {
        continue;
      }
      // No rank sees both files, so content that is not in the set cannot be compared.
      const std::string first = "that of " + OnRank(known->second.rank);
      part->left_out.push_back({sibling.name + " of " + OnRank(rank),
                                sized && !known_bytes
                                    ? "could not be compared with " + first + ", of the same size"
                                    : "differs from " + first});
      part->warnings.push_back(StrCat("sibling file, not carried over: ",
                                      part->left_out.back().name, ": ", part->left_out.back().why));
    }
    for (LeftOut& one : part->left_out) {
      const bool told = std::any_of(all_.left_out.begin(), all_.left_out.end(),
                                    [&](const LeftOut& other) { return other.name == one.name; });
      if (!told) all_.left_out.push_back(std::move(one));
    }
  }

  /// Sorts the siblings, and appends to `owner` the ranks of those without `content`.
  void Finish(std::vector<int>* owner) {
    std::sort(
        all_.siblings.begin(), all_.siblings.end(),
        [](const SiblingFile& a, const SiblingFile& b) { return NaturalLess(a.name, b.name); });
    for (const SiblingFile& sibling : all_.siblings) {
      if (!sibling.content) owner->push_back(static_cast<int>(seen_[sibling.name].rank));
    }
  }

 private:
  struct Seen {
    std::size_t index = 0;
    std::size_t rank = 0;
  };
  SourceSet& all_;
  std::map<std::string, Seen> seen_;
};

}  // namespace

Result<std::vector<std::vector<Copy>>> CopiesToCompare(const std::vector<SourceSet>& parts) {
  SW_TRY_ASSIGN(const Format* format, CheckParts(parts));
  const auto file_of = [&](const Copy& copy) -> const SourceFile& {
    return parts[copy.seen.front().rank].files[copy.seen.front().file];
  };
  std::map<std::string, std::vector<Copy>> by_name;
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    for (std::size_t i = 0; i < parts[rank].files.size(); ++i) {
      const SourceFile& file = parts[rank].files[i];
      if (HasSums(file) || format->belongs(file.name) != Belongs::kOneVersion) continue;
      std::vector<Copy>& copies = by_name[file.name];
      const auto same = std::find_if(copies.begin(), copies.end(), [&](const Copy& copy) {
        return file_of(copy).identity == file.identity;
      });
      Copy& copy = same == copies.end() ? copies.emplace_back() : *same;
      copy.seen.push_back({rank, i});
    }
  }
  std::vector<std::vector<Copy>> out;
  for (auto& [name, copies] : by_name) {
    const std::uint64_t bytes = file_of(copies.front()).identity.bytes;
    const bool one_size = std::all_of(copies.begin(), copies.end(), [&](const Copy& copy) {
      return file_of(copy).identity.bytes == bytes;
    });
    if (copies.size() > 1 && one_size) out.push_back(std::move(copies));
  }
  return out;
}

Result<SourceSet> UniteParts(std::vector<SourceSet> parts, std::vector<int>* owner) {
  SW_TRY_ASSIGN(const Format* format, CheckParts(parts));
  SourceSet all;
  all.format = format->name;
  std::vector<std::pair<SourceFile, int>> files;
  std::map<std::string, std::size_t> by_name;
  Siblings siblings(&all);
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    SourceSet& part = parts[rank];
    siblings.Add(&part, rank);
    for (std::string& warning : part.warnings) {
      const bool told =
          std::find(all.warnings.begin(), all.warnings.end(), warning) != all.warnings.end();
      if (!told) all.warnings.push_back(std::move(warning));
    }
    if (part.files.empty()) continue;
    all.tag = part.tag;
    if (all.manifest.empty()) all.manifest = std::move(part.manifest);
    for (SourceFile& file : part.files) {
      const auto [known, fresh] = by_name.emplace(file.name, files.size());
      if (fresh) {
        files.emplace_back(std::move(file), static_cast<int>(rank));
      } else {
        const auto& [have, its_owner] = files[known->second];
        SW_TRY(CheckCopy(*format, have, its_owner, file, rank, &all.warnings));
      }
    }
  }
  std::sort(files.begin(), files.end(),
            [](const auto& a, const auto& b) { return NaturalLess(a.first.name, b.first.name); });
  for (auto& [file, rank] : files) {
    all.files.push_back(std::move(file));
    owner->push_back(rank);
  }
  siblings.Finish(owner);
  return all;
}

}  // namespace shardwright::checkpoints
