// A checkpoint of which every rank sees a part only.

#include <algorithm>
#include <map>
#include <utility>

#include "dialect/file_name_internal.h"
#include "dialect/source.h"

namespace shardwright::dialect {
namespace {

bool IsShard(const SourceFile& file) {
  const auto name = ParseFileName(file.name);
  return name && name->role == FileRole::kShard;
}

/// Old files carry no checksums: whether two of them are the same cannot be told from here.
bool HasSums(const SourceFile& file) {
  return std::any_of(file.skeleton.storages.begin(), file.skeleton.storages.end(),
                     [](const torch_pt::Storage& storage) { return storage.crc32.has_value(); });
}

bool IsAtomic(const SourceSet& part) { return part.kind == SourceKind::kUniversal; }

bool HasShards(const SourceSet& part) {
  return std::any_of(part.files.begin(), part.files.end(), IsShard);
}

std::string OnRank(std::size_t rank) { return "rank " + std::to_string(rank); }

Status CheckParts(const std::vector<SourceSet>& parts) {
  constexpr std::size_t kNone = ~std::size_t{0};
  std::size_t first = kNone;
  std::size_t atoms = kNone;
  std::size_t shards = kNone;
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    const SourceSet& part = parts[rank];
    if (part.files.empty()) continue;
    if (first == kNone) first = rank;
    if (part.tag != parts[first].tag) {
      return Fail(Errc::kBadInput, "the ranks see different checkpoints: \"" + parts[first].tag +
                                       "\" on " + OnRank(first) + ", \"" + part.tag + "\" on " +
                                       OnRank(rank));
    }
    if (IsAtomic(part)) atoms = rank;
    if (HasShards(part)) shards = rank;
  }
  if (first == kNone) return Fail(Errc::kNotFound, "no rank sees files of a checkpoint");
  if (atoms != kNone && shards != kNone) {
    return Fail(Errc::kBadInput, parts[first].tag + ": " + OnRank(atoms) + " sees atoms, " +
                                     OnRank(shards) + " optimizer shards: give one of the two");
  }
  return {};
}

/// What is to be said of a rank's file that a rank before it has, too.
Status CheckCopy(const SourceFile& have, int owner, const SourceFile& other, std::size_t rank,
                 std::vector<std::string>* warnings) {
  if (other.identity == have.identity || SameSums(have.skeleton, other.skeleton)) return {};
  const std::string text = "two different files with the name " + have.name + " on " +
                           OnRank(static_cast<std::size_t>(owner)) + " (" + have.path + ") and " +
                           OnRank(rank);
  if (IsShard(have) && HasSums(have) && HasSums(other))
    return Fail(Errc::kBadInput, text + " (" + other.path + ")");
  warnings->push_back(text + ": the first is taken");
  return {};
}

/// Where neighbours of the parts are in the united set, and the rank that sees each.
class Neighbours {
 public:
  explicit Neighbours(SourceSet* all) : all_(*all) {}

  /// Adds what a rank sees to what ranks before it see.
  void Add(SourceSet* part, std::size_t rank) {
    for (Neighbour& neighbour : part->neighbours) {
      const auto [known, fresh] =
          seen_.try_emplace(neighbour.name, Seen{all_.neighbours.size(), rank});
      if (fresh) {
        all_.neighbours.push_back(std::move(neighbour));
        continue;
      }
      const Neighbour& other = all_.neighbours[known->second.index];
      const bool sized = other.identity.bytes == neighbour.identity.bytes;
      const bool known_bytes = other.content && neighbour.content;
      if (sized && (known_bytes ? other.content == neighbour.content
                                : other.identity == neighbour.identity)) {
        continue;
      }
      // No rank sees both, so bytes that are not in the set cannot be compared.
      const std::string first = "that of " + OnRank(known->second.rank);
      part->left_out.push_back({neighbour.name + " of " + OnRank(rank),
                                sized && !known_bytes
                                    ? "could not be compared with " + first + ", of the same size"
                                    : "differs from " + first});
      part->warnings.push_back("beside the checkpoint, not carried over: " +
                               part->left_out.back().name + ": " + part->left_out.back().why);
    }
    for (LeftOut& one : part->left_out) {
      const bool told = std::any_of(all_.left_out.begin(), all_.left_out.end(),
                                    [&](const LeftOut& other) { return other.name == one.name; });
      if (!told) all_.left_out.push_back(std::move(one));
    }
  }

  /// Sorts them, and tells the ranks of those whose bytes are not in the set.
  void Finish(std::vector<int>* owner) {
    std::sort(all_.neighbours.begin(), all_.neighbours.end(),
              [](const Neighbour& a, const Neighbour& b) { return NaturalLess(a.name, b.name); });
    for (const Neighbour& neighbour : all_.neighbours) {
      if (!neighbour.content) owner->push_back(static_cast<int>(seen_[neighbour.name].rank));
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

Result<SourceSet> UniteParts(std::vector<SourceSet> parts, std::vector<int>* owner) {
  SW_TRY(CheckParts(parts));
  SourceSet all;
  std::vector<std::pair<SourceFile, int>> files;
  std::map<std::string, std::size_t> by_name;
  Neighbours neighbours(&all);
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    SourceSet& part = parts[rank];
    neighbours.Add(&part, rank);
    for (std::string& warning : part.warnings) {
      const bool told =
          std::find(all.warnings.begin(), all.warnings.end(), warning) != all.warnings.end();
      if (!told) all.warnings.push_back(std::move(warning));
    }
    if (part.files.empty()) continue;
    all.tag = part.tag;
    if (IsAtomic(part)) all.kind = part.kind;
    if (all.manifest.empty()) all.manifest = std::move(part.manifest);
    for (SourceFile& file : part.files) {
      const auto [known, fresh] = by_name.emplace(file.name, files.size());
      if (fresh) {
        files.emplace_back(std::move(file), static_cast<int>(rank));
      } else {
        const auto& [have, its_owner] = files[known->second];
        SW_TRY(CheckCopy(have, its_owner, file, rank, &all.warnings));
      }
    }
  }
  std::sort(files.begin(), files.end(),
            [](const auto& a, const auto& b) { return NaturalLess(a.first.name, b.first.name); });
  for (auto& [file, rank] : files) {
    all.files.push_back(std::move(file));
    owner->push_back(rank);
  }
  neighbours.Finish(owner);
  return all;
}

}  // namespace shardwright::dialect
