// SPDX-License-Identifier: Apache-2.0
#include "trainer/cache/partition.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "engine/plan/target_builder.h"
#include "support/base/checked.h"
#include "support/base/text.h"

namespace shardwright::cache {
namespace {

using layout::Fragment;
using layout::LogicalTensor;
using plan::Payload;

class Sharing {
 public:
  Sharing(const plan::Target& target, const checkpoints::FileReaders& readers,
          std::uint32_t processes)
      : target_(target), readers_(readers), processes_(processes) {}

  Result<SharedOut> Run() {
    FindRepeated();
    FindHolders();
    AddPayloads();
    AddTensors();
    out_.target = std::move(builder_).Take();
    PlaceParts();
    return std::move(out_);
  }

 private:
  using Processes = std::set<std::uint32_t>;

  /// Finds arrays of one fragment and slot that repeat another such array, for same_as_.
  void FindRepeated() {
    const auto& arrays = target_.map.arrays;
    uses_.resize(arrays.size());
    for (const LogicalTensor& tensor : target_.map.tensors) {
      for (const Fragment& one : tensor.fragments) ++uses_[one.at.array];
    }
    const auto alone = [&](const Fragment& one) {
      return uses_[one.at.array] == 1 && arrays[one.at.array].regions.size() == 1;
    };
    same_as_.resize(arrays.size());
    for (const LogicalTensor& tensor : target_.map.tensors) {
      for (const Fragment& one : tensor.fragments) {
        if (one.role != layout::Role::kReplica || !alone(one)) continue;
        const auto owner = std::find_if(
            tensor.fragments.begin(), tensor.fragments.end(), [&](const Fragment& other) {
              return other.role == layout::Role::kOwner && alone(other) &&
                     (other.cut == one.cut || *other.cut == *one.cut);
            });
        if (owner != tensor.fragments.end()) same_as_[one.at.array] = owner->at.array;
      }
    }
  }

  /// Finds the processes of every slot of every array, from the readers of files.
  void FindHolders() {
    for (const layout::Array& array : target_.map.arrays) {
      holders_.emplace_back(array.regions.size());
    }
    for (std::size_t f = 0; f < target_.files.size(); ++f) {
      Processes of_file;
      for (const std::uint64_t rank : readers_.by_file[f]) {
        of_file.insert(static_cast<std::uint32_t>(rank * processes_ / readers_.ranks));
      }
      if (of_file.empty()) of_file.insert(static_cast<std::uint32_t>(f % processes_));
      for (const Payload& payload : target_.files[f].payloads) {
        if (payload.kind != Payload::Kind::kArray) continue;
        const std::optional<std::uint32_t> same = same_as_[payload.array];
        Processes& all = holders_[same.value_or(payload.array)][same ? 0 : payload.holder];
        all.insert(of_file.begin(), of_file.end());
      }
    }
  }

  void AddPayloads() {
    arrays_.resize(target_.map.arrays.size());
    for (const plan::OutputFile& file : target_.files) {
      for (const Payload& payload : file.payloads) {
        if (payload.kind != Payload::Kind::kArray || same_as_[payload.array]) continue;
        if (uses_[payload.array] == 0) continue;
        const layout::Array& from = target_.map.arrays[payload.array];
        std::optional<std::uint32_t>& array = arrays_[payload.array];
        if (!array) array = builder_.AddArray(from.dtype, from.regions.size());
        const std::uint32_t part = PartOf(holders_[payload.array][payload.holder]);
        const layout::Region& region = from.regions[payload.holder];
        builder_.AddElements(part, RoundUp(builder_.bytes(part), kAlignment), *array,
                             payload.holder, region.elems,
                             StrCat(file.path, " ", target_.map.members[region.member].name));
      }
    }
  }

  std::uint32_t PartOf(const Processes& processes) {
    const auto [at, fresh] = parts_.try_emplace(processes, 0);
    if (fresh) {
      Part part;
      part.processes.assign(processes.begin(), processes.end());
      std::string name = "memory of";
      for (const std::uint32_t one : part.processes) name += " " + std::to_string(one);
      at->second = builder_.AddFile(std::move(name));
      out_.parts.push_back(std::move(part));
    }
    return at->second;
  }

  void AddTensors() {
    for (const LogicalTensor& from : target_.map.tensors) {
      const std::uint32_t tensor =
          builder_.AddTensor(from.name, from.state, from.dtype, from.shape);
      for (const Fragment& one : from.fragments) {
        if (same_as_[one.at.array] || !arrays_[one.at.array]) continue;
        Fragment fragment = one;
        fragment.at.array = *arrays_[one.at.array];
        builder_.AddFragment(tensor, std::move(fragment));
      }
    }
  }

  void PlaceParts() {
    out_.buffer_bytes.resize(processes_);
    for (std::size_t p = 0; p < out_.parts.size(); ++p) {
      Part& part = out_.parts[p];
      for (const std::uint32_t process : part.processes) {
        std::uint64_t& end = out_.buffer_bytes[process];
        part.at.push_back(end);
        end += RoundUp(out_.target.files[p].bytes, kAlignment);
      }
    }
    // Give every process a buffer, even if it stores nothing.
    for (std::uint64_t& bytes : out_.buffer_bytes) bytes = std::max(bytes, kAlignment);
  }

  const plan::Target& target_;
  const checkpoints::FileReaders& readers_;
  const std::uint32_t processes_;
  std::vector<std::uint32_t> uses_;                    // number of fragments, by array
  std::vector<std::optional<std::uint32_t>> same_as_;  // the array that it repeats, by array
  std::vector<std::vector<Processes>> holders_;        // by array and slot
  std::vector<std::optional<std::uint32_t>> arrays_;   // the new array, by array
  std::map<Processes, std::uint32_t> parts_;
  plan::TargetBuilder builder_;
  SharedOut out_;
};

}  // namespace

Result<SharedOut> ShareOut(const plan::Target& target, const checkpoints::FileReaders& readers,
                           std::uint32_t processes) {
  if (processes > readers.ranks) {
    return Fail(Errc::kUsage, processes, " processes for a target of ",
                Plural(readers.ranks, "rank"),
                ": start at most as many processes as the target has ranks");
  }
  return Sharing(target, readers, processes).Run();
}

}  // namespace shardwright::cache
