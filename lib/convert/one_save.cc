// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>

#include <tbb/task_arena.h>

#include "convert/compare.h"
#include "convert/element_text.h"
#include "engine/exec/exchange.h"
#include "engine/exec/for_each.h"
#include "engine/layout/states.h"
#include "engine/tensor/convert.h"
#include "support/base/text.h"

namespace shardwright::convert {
namespace {

using layout::LogicalTensor;
using layout::ShardMap;
using Steps = checkpoints::SaveEvidence::Steps;

/// Returns the numbers of parameters that any rank found, ascending. Collective.
Result<std::vector<std::uint32_t>> Union(comm::Comm& comm, const std::vector<std::uint32_t>& mine) {
  SW_TRY_ASSIGN(const std::vector<comm::Bytes> parts,
                comm.AllGather(std::as_bytes(std::span(mine))));
  std::vector<std::uint32_t> all;
  for (const comm::Bytes& part : parts) {
    const std::size_t before = all.size();
    all.resize(before + part.size() / sizeof(std::uint32_t));
    if (!part.empty()) std::memcpy(all.data() + before, part.data(), part.size());
  }
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

/// Compares the middle elements of parameters without checksums.
/// WholeWeights then checks each difference that it finds.
class WeightSample {
 public:
  WeightSample(comm::Comm& comm, const ShardMap& map, const std::vector<Weighed>& params,
               exec::ByteSource& bytes, const std::vector<int>& file_owner)
      : comm_(comm), map_(map), params_(params), source_(comm, map, bytes, file_owner) {}

  /// \returns  indexes of the parameters with weights unequal to their rounded masters
  Result<std::vector<std::uint32_t>> Run(const CompareOptions& options, Sink& sink);

 private:
  struct Part {
    const LogicalTensor& tensor;
    std::uint64_t first;
    std::uint64_t elems;
  };
  Part PartOf(std::uint32_t tensor) const {
    const LogicalTensor& of = map_.tensors[tensor];
    const std::uint64_t all = Elems(of.shape);
    const std::uint64_t elems = std::min(all, kSampledElements);
    return {of, (all - elems) / 2, elems};
  }
  /// Calls visit(range, first byte in the part) for every byte range of a part.
  template <class Visit>
  void ForEachByteRange(const Part& part, Visit&& visit) const {
    const std::uint64_t item = ItemSize(part.tensor.dtype);
    for (const layout::Fragment& fragment : part.tensor.fragments) {
      if (fragment.role != layout::Role::kOwner) continue;
      fragment.cut->ForLogicalRange(
          part.first, part.first + part.elems, [&](const layout::Run& run) {
            std::uint64_t at = (run.logical - part.first) * item;
            layout::ForHolders(
                map_, fragment.at, run.shard, run.shard + run.elems,
                [&](const layout::Region& region, std::uint64_t element, std::uint64_t elems) {
                  visit(
                      exec::ByteRange{region.member, region.offset + element * item, elems * item},
                      at);
                  at += elems * item;
                });
          });
    }
  }
  Result<std::vector<std::byte>> Read(const Part& part);
  Result<bool> Differs(std::uint64_t param);
  Status Fetch(std::uint64_t first, std::uint64_t last);

  comm::Comm& comm_;
  const ShardMap& map_;
  const std::vector<Weighed>& params_;
  exec::Exchange source_;
};

Result<std::vector<std::byte>> WeightSample::Read(const Part& part) {
  std::vector<std::byte> out(part.elems * ItemSize(part.tensor.dtype));
  Status status;
  ForEachByteRange(part, [&](const exec::ByteRange& stretch, std::uint64_t at) {
    if (!status) return;
    status = source_.Read(stretch.member, stretch.offset,
                          std::span(out).subspan(static_cast<std::size_t>(at), stretch.bytes));
  });
  SW_TRY(std::move(status));
  return out;
}

Result<bool> WeightSample::Differs(std::uint64_t param) {
  const Part weight = PartOf(params_[param].weight);
  const Part master = PartOf(params_[param].master);
  SW_TRY_ASSIGN(const std::vector<std::byte> weights, Read(weight));
  SW_TRY_ASSIGN(const std::vector<std::byte> masters, Read(master));
  std::vector<std::byte> rounded(weights.size());
  Convert(master.tensor.dtype, masters, weight.tensor.dtype, rounded);
  return CompareElements(weight.tensor.dtype, weights, rounded).apart > 0;
}

Status WeightSample::Fetch(std::uint64_t first, std::uint64_t last) {
  if (!source_.sends()) return {};
  std::vector<exec::ByteRange> wanted;
  const auto add = [&](const exec::ByteRange& stretch, std::uint64_t) {
    wanted.push_back(stretch);
  };
  for (std::uint64_t param = first; param < last; ++param) {
    ForEachByteRange(PartOf(params_[param].weight), add);
    ForEachByteRange(PartOf(params_[param].master), add);
  }
  return source_.Round(wanted);
}

Result<std::vector<std::uint32_t>> WeightSample::Run(const CompareOptions& options, Sink& sink) {
  constexpr std::uint64_t kMostBytes = kSampledElements * 2 * sizeof(double);
  const auto ranks = static_cast<std::uint64_t>(comm_.size());
  const auto rank = static_cast<std::uint64_t>(comm_.rank());
  const std::uint64_t all = params_.size();
  const std::uint64_t begin = all * rank / ranks;
  const std::uint64_t count = all * (rank + 1) / ranks - begin;
  tbb::task_arena arena(exec::ArenaThreads(options.threads));
  std::mutex mutex;
  std::vector<std::uint32_t> found;
  SW_TRY(exec::InRounds(comm_, count, source_.RoundUnits(options.memory_bytes, kMostBytes),
                        [&](std::uint64_t first, std::uint64_t last) -> Status {
                          SW_TRY(Fetch(begin + first, begin + last));
                          return comm_.Agree(
                              exec::ForEach(arena, last - first, [&](std::uint64_t i) -> Status {
                                if (sink.stop_requested())
                                  return Fail(Errc::kStopped, "stopped on request");
                                const std::uint64_t param = begin + first + i;
                                SW_TRY_ASSIGN(const bool differs, Differs(param));
                                if (!differs) return {};
                                const std::lock_guard lock(mutex);
                                found.push_back(static_cast<std::uint32_t>(param));
                                return {};
                              }));
                        }));
  return Union(comm_, found);
}

/// Result of comparing all elements of one parameter.
struct FirstDifference {
  std::uint64_t unit = 0;  ///< the first unit that differs
  std::string text;        ///< its first differing element in both
  bool apart = false;      ///< true if an element differs by more than one unit in the last place
};

/// Compares all elements of parameters, and verifies the checksums of members that it reads.
class WholeWeights {
 public:
  explicit WholeWeights(const WeightsAndMasters& sides) : sides_(sides) {}

  Status Run(comm::Comm& comm, exec::ByteSource& bytes, const std::vector<int>& file_owner,
             const CompareOptions& options, Sink& sink);

  /// Returns the parameters that differ. The same on all ranks, except for
  /// the text, which only the rank that found the first difference has.
  const std::map<std::uint32_t, FirstDifference>& found() const { return found_; }

 private:
  void Look(std::uint64_t index, const plan::Unit& unit, std::span<const std::byte> weight,
            std::span<const std::byte> rounded);
  Status Share(comm::Comm& comm);

  const WeightsAndMasters& sides_;
  std::mutex mutex_;
  std::map<std::uint32_t, FirstDifference> found_;
};

void WholeWeights::Look(std::uint64_t index, const plan::Unit& unit,
                        std::span<const std::byte> weight, std::span<const std::byte> rounded) {
  const LogicalTensor& tensor = sides_.weights().tensors[unit.file];
  const LogicalTensor& master = sides_.masters().tensors[unit.file];
  const std::uint64_t item = ItemSize(tensor.dtype);
  const Differing differing =
      CompareElements(tensor.dtype, weight.first(unit.bytes), rounded.first(unit.bytes));
  if (differing.count == 0) return;
  const std::uint64_t element = unit.first / item + differing.first;
  const auto text = [&](std::span<const std::byte> of) {
    return ElementText(tensor.dtype, of.subspan(differing.first * item, item));
  };
  const std::lock_guard lock(mutex_);
  const auto [at, fresh] = found_.try_emplace(unit.file);
  FirstDifference& found = at->second;
  found.apart = found.apart || differing.apart > 0;
  if (!fresh && found.unit <= index) return;
  found.unit = index;
  found.text = StrCat(Quoted(tensor.name), " element ", element, ": weight ", text(weight), " in ",
                      FileOf(sides_.weights(), tensor, element), ", rounded master weight ",
                      text(rounded), " in ", FileOf(sides_.masters(), master, element));
  std::replace(found.text.begin(), found.text.end(), '\n', ' ');  // Share sends lines
}

Status WholeWeights::Run(comm::Comm& comm, exec::ByteSource& bytes,
                         const std::vector<int>& file_owner, const CompareOptions& options,
                         Sink& sink) {
  const OnUnit look =
      [this](std::uint64_t index, const plan::Unit& unit, std::span<const std::byte> weight,
             std::span<const std::byte> rounded) { Look(index, unit, weight, rounded); };
  SW_TRY(CompareSources(comm, {sides_.weights(), bytes, file_owner},
                        {sides_.masters(), bytes, file_owner}, sides_.target(), options, look,
                        sink));
  return Share(comm);
}

Status WholeWeights::Share(comm::Comm& comm) {
  // One line for each parameter: its number, unit, `apart` and text.
  std::string mine;
  for (const auto& [param, one] : found_) {
    mine += std::to_string(param) + " " + std::to_string(one.unit) + (one.apart ? " 1 " : " 0 ") +
            one.text + "\n";
  }
  SW_TRY_ASSIGN(const std::vector<comm::Bytes> parts,
                comm.AllGather(std::as_bytes(std::span(mine))));
  found_.clear();
  for (const comm::Bytes& part : parts) {
    std::string_view text(reinterpret_cast<const char*>(part.data()), part.size());
    while (!text.empty()) {
      const auto next = [&](char end) {
        const std::size_t at = std::min(text.find(end), text.size() - 1);
        std::string field(text.substr(0, at));
        text.remove_prefix(at + 1);
        return field;
      };
      const auto param = static_cast<std::uint32_t>(std::stoul(next(' ')));
      FirstDifference one;
      one.unit = std::stoull(next(' '));
      one.apart = next(' ') == "1";
      one.text = next('\n');
      const auto [at, fresh] = found_.try_emplace(param, one);
      if (fresh) continue;
      one.apart = one.apart || at->second.apart;
      if (one.unit > at->second.unit) {
        at->second.apart = one.apart;
      } else {
        at->second = std::move(one);
      }
    }
  }
  return {};
}

class SaveCheck {
 public:
  SaveCheck(comm::Comm& comm, const checkpoints::Checkpoint& checkpoint, exec::ByteSource& bytes,
            const std::vector<int>& file_owner, bool allow_mixed, Sink& sink)
      : comm_(comm),
        checkpoint_(checkpoint),
        save_(checkpoint.save),
        bytes_(bytes),
        file_owner_(file_owner),
        allow_mixed_(allow_mixed),
        sink_(sink) {}

  Result<OneSave> Run(const std::optional<CompareOptions>& how);

 private:
  void Collect();
  /// Returns the parameters that must be compared completely.
  Result<std::vector<Weighed>> Suspects(const CompareOptions& how);
  Result<OneSave> Decide(const std::map<std::uint32_t, FirstDifference>& all,
                         const std::vector<Weighed>& suspects);
  Result<OneSave> Mixed(const std::string& text, std::vector<std::string> apart);
  OneSave Undecided();

  comm::Comm& comm_;
  const checkpoints::Checkpoint& checkpoint_;
  const checkpoints::SaveEvidence& save_;
  exec::ByteSource& bytes_;
  const std::vector<int>& file_owner_;
  bool allow_mixed_;
  Sink& sink_;
  std::vector<Weighed> params_;  // those that can be compared
};

void SaveCheck::Collect() {
  const layout::TensorIndex index(checkpoint_.map);
  for (const checkpoints::Param& param : checkpoint_.params) {
    if (param.kind != checkpoints::ParamKind::kTrainable || !param.alias_of.empty()) continue;
    const auto found = WeighedOf(checkpoint_.map, index, param.name);
    if (found && Elems(param.shape) > 0) params_.push_back(*found);
  }
}

Result<std::vector<Weighed>> SaveCheck::Suspects(const CompareOptions& how) {
  if (save_.steps == Steps::kDiffer || !save_.weights_lead.empty()) return params_;
  SW_TRY_ASSIGN(const std::vector<std::uint32_t> found,
                WeightSample(comm_, checkpoint_.map, params_, bytes_, file_owner_).Run(how, sink_));
  std::vector<Weighed> suspects;
  suspects.reserve(found.size());
  for (const std::uint32_t at : found) suspects.push_back(params_[at]);
  return suspects;
}

OneSave SaveCheck::Undecided() {
  OneSave out;
  const std::string doubt =
      StrCat(checkpoint_.tag, ": ", save_.difference,
             ": the files come from two saves, or the optimizer was reset; this checkpoint has no "
             "compute weights that could decide");
  sink_.Warn(doubt);
  if (!allow_mixed_) out.doubt = doubt;
  return out;
}

Result<OneSave> SaveCheck::Mixed(const std::string& text, std::vector<std::string> apart) {
  if (!allow_mixed_) {
    return Fail(Errc::kBadInput, checkpoint_.tag,
                ": the files come from two saves, as if a job had been killed while it "
                "overwrote a checkpoint: ",
                text, "; use another checkpoint, or pass --allow-mixed to read this one anyway");
  }
  sink_.Warn(StrCat(checkpoint_.tag, ": the files come from two saves (--allow-mixed): ", text));
  return OneSave{std::move(apart), {}};
}

Result<OneSave> SaveCheck::Decide(const std::map<std::uint32_t, FirstDifference>& all,
                                  const std::vector<Weighed>& suspects) {
  const bool differ = save_.steps == Steps::kDiffer;
  std::vector<std::string> apart;
  const FirstDifference* first = nullptr;
  bool proved = false;
  for (const auto& [param, found] : all) {
    apart.push_back(checkpoint_.map.tensors[suspects[param].weight].name);
    const bool counts = found.apart || differ;
    if (first == nullptr || (counts && !proved)) first = &found;
    proved = proved || counts;
  }
  if (first == nullptr) {
    if (differ) {
      sink_.Note(
          StrCat(
              checkpoint_.tag, ": ", save_.difference,
              "; all compute weights equal the rounded master weights, so the files come from one "
              "save with an optimizer that was reset or loaded from elsewhere"),
          0);
    }
    return OneSave{};
  }
  const std::string count = StrCat(
      apart.size(), " of ", params_.size(),
      " parameters have compute weights that differ from the rounded master weights, such as ",
      first->text);
  if (proved && save_.weights_are_rounded) {
    return Mixed((differ ? save_.difference + ", and " : "") + count, std::move(apart));
  }
  const std::string why = !save_.weights_lead.empty()
                              ? save_.weights_lead
                              : "the files come from two saves, or the trainer does not round its "
                                "compute weights from the master weights";
  sink_.Warn(StrCat(checkpoint_.tag, ": ", count, ": ", why));
  return OneSave{std::move(apart), {}};
}

Result<OneSave> SaveCheck::Run(const std::optional<CompareOptions>& how) {
  Collect();
  const bool differ = save_.steps == Steps::kDiffer;
  if (params_.empty()) return differ ? Undecided() : OneSave{};
  if (!how) {
    if (differ) {
      sink_.Warn(StrCat(
          checkpoint_.tag, ": ", save_.difference,
          ": the files may come from two saves; a conversion compares the weights to decide"));
    }
    if (!save_.weights_lead.empty()) sink_.Warn(StrCat(checkpoint_.tag, ": ", save_.weights_lead));
    return OneSave{};
  }
  sink_.Pass("one save");
  SW_TRY_ASSIGN(const std::vector<Weighed> suspects, Suspects(*how));
  if (suspects.empty()) return OneSave{};
  WeightsAndMasters sides(checkpoint_.map);
  for (const Weighed& param : suspects) sides.Add(param);
  WholeWeights whole(sides);
  SW_TRY(whole.Run(comm_, bytes_, file_owner_, *how, sink_));
  return Decide(whole.found(), suspects);
}

}  // namespace

Result<OneSave> CheckOneSave(comm::Comm& comm, const checkpoints::Checkpoint& checkpoint,
                             exec::ByteSource& bytes, const std::vector<int>& file_owner,
                             const std::optional<CompareOptions>& how, bool allow_mixed,
                             Sink& sink) {
  return SaveCheck(comm, checkpoint, bytes, file_owner, allow_mixed, sink).Run(how);
}

}  // namespace shardwright::convert
