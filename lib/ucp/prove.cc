#include "ucp/prove.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "tensor/convert.h"
#include "ucp/value.h"

namespace shardwright::ucp {
namespace {

using layout::Fragment;
using layout::LogicalTensor;
using layout::ShardMap;

// Enough that two tensors which were trained apart agree by chance nowhere.
constexpr std::uint64_t kSampleElems = 64;

/// Elements that lie together in one place.
struct Stretch {
  std::uint32_t member = 0;
  std::uint64_t offset = 0;  ///< bytes, in the member
  DType dtype = DType::kF32;
  std::uint64_t elems = 0;

  std::uint64_t bytes() const { return elems * ItemSize(dtype); }
};

/// The same elements of a parameter in two states.
struct Sample {
  std::uint32_t param = 0;
  std::array<Stretch, 2> sides;  ///< master weights, weight
};

/// The stretch that holds shard elements [first, last) of a fragment. \pre they lie on one holder
Stretch StretchOf(const ShardMap& map, const LogicalTensor& tensor, const Fragment& fragment,
                  std::uint64_t first, std::uint64_t last) {
  Stretch out;
  out.dtype = tensor.dtype;
  out.elems = last - first;
  layout::ForHolders(map, fragment.at, first, last,
                     [&](const layout::Region& region, std::uint64_t element, std::uint64_t) {
                       out.member = region.member;
                       out.offset = region.offset + element * ItemSize(tensor.dtype);
                     });
  return out;
}

const Fragment* SameShard(const LogicalTensor& weight, const Fragment& master) {
  const auto at =
      std::find_if(weight.fragments.begin(), weight.fragments.end(), [&](const Fragment& fragment) {
        return fragment.role == layout::Role::kOwner && fragment.at.chunk == layout::kOneHolder &&
               (fragment.cut == master.cut || *fragment.cut == *master.cut);
      });
  return at == weight.fragments.end() ? nullptr : &*at;
}

/// The first and last elements of every holder's part of a parameter's masters, and the same of its
/// weight. \returns false if they cannot be compared
bool AddSamples(const ShardMap& map, const layout::TensorIndex& index, const std::string& name,
                std::uint32_t param, std::vector<Sample>* samples) {
  const auto master = index.Find(name, "fp32");
  const auto weight = index.Find(name, "weight");
  if (!master || !weight) return false;
  const LogicalTensor& from = map.tensors[*master];
  const LogicalTensor& to = map.tensors[*weight];
  if (!CanConvert(from.dtype, to.dtype)) return false;
  bool all = true;
  for (const Fragment& fragment : from.fragments) {
    if (fragment.role == layout::Role::kReplica) continue;
    const Fragment* shard =
        fragment.role == layout::Role::kOwner ? SameShard(to, fragment) : nullptr;
    if (shard == nullptr) {
      all = false;
      continue;
    }
    std::uint64_t at = 0;
    layout::ForHolders(map, fragment.at, 0, fragment.cut->shard_elems(),
                       [&](const layout::Region&, std::uint64_t, std::uint64_t elems) {
                         const std::uint64_t end = at + elems;
                         const auto add = [&](std::uint64_t first, std::uint64_t last) {
                           samples->push_back({param,
                                               {StretchOf(map, from, fragment, first, last),
                                                StretchOf(map, to, *shard, first, last)}});
                         };
                         const std::uint64_t head = std::min(end, at + kSampleElems);
                         add(at, head);
                         if (head < end)
                           add(std::max(head, end - std::min(end - at, kSampleElems)), end);
                         at = end;
                       });
  }
  return all;
}

/// Gives all ranks the bytes of all samples: each rank reads some of them, or of a node-local
/// source those in files of its own.
class Exchange {
 public:
  Exchange(comm::Comm& comm, const ShardMap& map, const std::vector<int>& file_owner)
      : comm_(comm), map_(map), file_owner_(file_owner) {}

  Status Read(const std::vector<Sample>& samples, exec::ByteSource& bytes) {
    comm::Bytes mine;
    const auto read = [&]() -> Status {
      for (std::size_t i = 0; i < samples.size(); ++i) {
        for (const Stretch& side : samples[i].sides) {
          if (ReaderOf(i, side) != comm_.rank()) continue;
          mine.resize(mine.size() + side.bytes());
          SW_TRY(bytes.Read(side.member, side.offset, std::span(mine).last(side.bytes())));
        }
      }
      return {};
    };
    SW_TRY(comm_.Agree(read()));
    SW_TRY_ASSIGN(all_, comm_.AllGather(mine));
    at_.assign(all_.size(), 0);
    return {};
  }

  /// The next stretch, in the order of Read.
  std::span<const std::byte> Next(std::size_t sample, const Stretch& side) {
    const auto rank = static_cast<std::size_t>(ReaderOf(sample, side));
    at_[rank] += side.bytes();
    return std::span(all_[rank]).subspan(at_[rank] - side.bytes(), side.bytes());
  }

 private:
  int ReaderOf(std::size_t sample, const Stretch& side) const {
    if (!file_owner_.empty()) return file_owner_[map_.members[side.member].file];
    return static_cast<int>(sample % static_cast<std::size_t>(comm_.size()));
  }

  comm::Comm& comm_;
  const ShardMap& map_;
  const std::vector<int>& file_owner_;
  std::vector<comm::Bytes> all_;  // by rank
  std::vector<std::size_t> at_;
};

bool IsNan(DType dtype, std::span<const std::byte> element) {
  double value = 0;
  Convert(dtype, element, DType::kF64, std::as_writable_bytes(std::span(&value, 1)));
  return std::isnan(value);
}

/// The first element that differs, or the number of elements. A NaN equals any other.
std::uint64_t FirstDifference(DType dtype, std::span<const std::byte> a,
                              std::span<const std::byte> b) {
  const std::uint64_t item = ItemSize(dtype);
  for (std::uint64_t i = 0; i < a.size() / item; ++i) {
    const auto x = a.subspan(i * item, item);
    const auto y = b.subspan(i * item, item);
    if (!std::equal(x.begin(), x.end(), y.begin()) && !(IsNan(dtype, x) && IsNan(dtype, y))) {
      return i;
    }
  }
  return a.size() / item;
}

Status Compare(const dialect::Checkpoint& checkpoint, const std::vector<Sample>& samples,
               Exchange* exchange) {
  const ShardMap& map = checkpoint.map;
  const auto file = [&](const Stretch& side) { return map.files[map.members[side.member].file]; };
  for (std::size_t i = 0; i < samples.size(); ++i) {
    const auto& [master, weight] = samples[i].sides;
    const std::span<const std::byte> masters = exchange->Next(i, master);
    const std::span<const std::byte> weights = exchange->Next(i, weight);
    comm::Bytes rounded(weight.bytes());
    Convert(master.dtype, masters, weight.dtype, rounded);
    const std::uint64_t at = FirstDifference(weight.dtype, rounded, weights);
    if (at == weight.elems) continue;
    const auto text = [&](const Stretch& side, std::span<const std::byte> bytes) {
      const std::uint64_t item = ItemSize(side.dtype);
      return ElementText(side.dtype, bytes.subspan(at * item, item)) + " in " + file(side);
    };
    return Fail(Errc::kUnsupported, "\"" + checkpoint.params[samples[i].param].name +
                                        "\": its master weights are not where they should be: " +
                                        text(master, masters) + " and " + text(weight, weights) +
                                        ": " + checkpoint.inferred.why);
  }
  return {};
}

}  // namespace

Status ProveInferred(comm::Comm& comm, const dialect::Checkpoint& checkpoint,
                     const std::vector<int>& file_owner, exec::ByteSource& bytes, Sink& sink) {
  const dialect::Inferred& inferred = checkpoint.inferred;
  if (inferred.params.empty()) return {};
  const layout::TensorIndex index(checkpoint.map);
  std::vector<Sample> samples;
  for (const std::uint32_t param : inferred.params) {
    const std::string& name = checkpoint.params[param].name;
    if (AddSamples(checkpoint.map, index, name, param, &samples)) continue;
    return Fail(Errc::kUnsupported, "\"" + name +
                                        "\": its master weights cannot be compared with its "
                                        "weight: " +
                                        inferred.why);
  }
  Exchange exchange(comm, checkpoint.map, file_owner);
  SW_TRY(exchange.Read(samples, bytes));
  SW_TRY(comm.Agree(Compare(checkpoint, samples, &exchange)));
  sink.Note(checkpoint.tag + ": " + inferred.why + ": the places of " +
                std::to_string(inferred.params.size()) +
                " parameters were worked out, and their weights prove them",
            0);
  return {};
}

}  // namespace shardwright::ucp
