#include "ucp/prove.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <span>
#include <string>

#include "base/crc32.h"
#include "layout/states.h"
#include "plan/plan.h"
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
struct Elements {
  exec::Stretch at;
  DType dtype = DType::kF32;

  std::uint64_t count() const { return at.bytes / ItemSize(dtype); }
};

/// The same elements of a parameter in two states.
struct Sample {
  std::uint32_t param = 0;
  std::array<Elements, 2> sides;  ///< master weights, weight
};

/// Where shard elements [first, last) of a fragment lie. \pre they lie on one holder
Elements ElementsOf(const ShardMap& map, const LogicalTensor& tensor, const Fragment& fragment,
                    std::uint64_t first, std::uint64_t last) {
  const std::uint64_t item = ItemSize(tensor.dtype);
  Elements out;
  out.dtype = tensor.dtype;
  out.at.bytes = (last - first) * item;
  layout::ForHolders(map, fragment.at, first, last,
                     [&](const layout::Region& region, std::uint64_t element, std::uint64_t) {
                       out.at.member = region.member;
                       out.at.offset = region.offset + element * item;
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
/// weight.
/// \returns false if they cannot be compared
bool AddSamples(const ShardMap& map, const layout::TensorIndex& index, const std::string& name,
                std::uint32_t param, std::vector<Sample>* samples) {
  const auto master = index.Find(name, layout::kMaster);
  const auto weight = index.Find(name, layout::kWeight);
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
                                               {ElementsOf(map, from, fragment, first, last),
                                                ElementsOf(map, to, *shard, first, last)}});
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

class Proof {
 public:
  Proof(const dialect::Checkpoint& checkpoint, exec::Exchange& source)
      : checkpoint_(checkpoint), source_(source) {}

  Status Fetch(std::span<const Sample> samples) {
    if (!source_.sends()) return {};
    std::vector<exec::Stretch> wanted;
    for (const Sample& sample : samples) {
      for (const Elements& side : sample.sides) wanted.push_back(side.at);
    }
    return source_.Round(wanted);
  }

  /// \param equal  gets how many samples are, before the first that is not
  Status Compare(std::span<const Sample> samples, std::uint64_t* equal) {
    for (const Sample& sample : samples) {
      SW_TRY(CompareOne(sample));
      ++*equal;
    }
    return {};
  }

  /// Compares what a sample was read from with the checksums of its files, where they have any.
  /// \error kBadInput  names file, member and parameter
  /// Local: each member is read by one rank, all of it.
  Status CheckSums(const Sample& sample) {
    for (const Elements& side : sample.sides) {
      const std::uint32_t index = side.at.member;
      const layout::Member& member = checkpoint_.map.members[index];
      if (!member.crc32 || !source_.Mine(index)) continue;
      SW_TRY_ASSIGN(const std::uint32_t found, CrcOf(index));
      if (found == *member.crc32) continue;
      char text[64];
      std::snprintf(text, sizeof text, "CRC-32 %08x expected, %08x found", *member.crc32, found);
      return Fail(Errc::kBadInput, checkpoint_.map.files[member.file] + ": " + member.name +
                                       " (with \"" + checkpoint_.params[sample.param].name +
                                       "\"): " + text);
    }
    return {};
  }

 private:
  Result<comm::Bytes> Read(const Elements& side) {
    comm::Bytes bytes(side.at.bytes);
    SW_TRY(source_.Read(side.at.member, side.at.offset, bytes));
    return bytes;
  }

  Result<std::uint32_t> CrcOf(std::uint32_t member) {
    const std::uint64_t bytes = checkpoint_.map.members[member].bytes;
    comm::Bytes buffer;
    std::uint32_t crc = 0;
    for (std::uint64_t at = 0; at < bytes; at += buffer.size()) {
      buffer.resize(std::min(plan::kUnitBytes, bytes - at));
      SW_TRY(source_.Read(member, at, buffer));
      crc ^= Crc32Share(Crc32(buffer), bytes - at - buffer.size());
    }
    return crc;
  }

  /// An element as a value, and the file that holds it.
  std::string Text(const Elements& side, std::span<const std::byte> bytes, std::uint64_t at) const {
    const ShardMap& map = checkpoint_.map;
    const std::uint64_t item = ItemSize(side.dtype);
    return ElementText(side.dtype, bytes.subspan(at * item, item)) + " in " +
           map.files[map.members[side.at.member].file];
  }

  Status CompareOne(const Sample& sample) {
    const auto& [master, weight] = sample.sides;
    SW_TRY_ASSIGN(const comm::Bytes masters, Read(master));
    SW_TRY_ASSIGN(const comm::Bytes weights, Read(weight));
    comm::Bytes rounded(weight.at.bytes);
    Convert(master.dtype, masters, weight.dtype, rounded);
    const std::uint64_t at = FirstDifference(weight.dtype, rounded, weights);
    if (at == weight.count()) return {};
    return Fail(
        Errc::kUnsupported,
        "\"" + checkpoint_.params[sample.param].name +
            "\": its master weights are not where they should be: " + Text(master, masters, at) +
            " and " + Text(weight, weights, at) + ": " + checkpoint_.inferred.why);
  }

  const dialect::Checkpoint& checkpoint_;
  exec::Exchange& source_;
};

}  // namespace

Status ProveInferred(comm::Comm& comm, const dialect::Checkpoint& checkpoint,
                     exec::Exchange& source, Sink& sink) {
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
  const auto ranks = static_cast<std::size_t>(comm.size());
  const auto rank = static_cast<std::size_t>(comm.rank());
  const std::size_t first = samples.size() * rank / ranks;
  const std::size_t last = samples.size() * (rank + 1) / ranks;
  const auto mine = std::span<const Sample>(samples).subspan(first, last - first);
  Proof proof(checkpoint, source);
  SW_TRY(proof.Fetch(mine));
  std::uint64_t equal = 0;
  const Status compared = proof.Compare(mine, &equal);
  // What does not fit may also be damaged: then that is what all ranks say, not that the places are
  // wrong. They look at the first sample that failed on any of them.
  const std::uint64_t rest = compared ? 0 : samples.size() - (first + equal);
  SW_TRY_ASSIGN(const std::uint64_t failed, comm.AllReduceMax(rest));
  if (failed > 0) SW_TRY(comm.Agree(proof.CheckSums(samples[samples.size() - failed])));
  SW_TRY(comm.Agree(compared));
  sink.Note(checkpoint.tag + ": " + inferred.why + ": the places of " +
                std::to_string(inferred.params.size()) +
                " parameters were worked out, and their weights prove them",
            0);
  return {};
}

}  // namespace shardwright::ucp
