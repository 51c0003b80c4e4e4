// SPDX-License-Identifier: Apache-2.0
#include "partial/gradient_log/module_chain.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "checkpoints/pickled/torch_optimizer.h"
#include "engine/layout/states.h"
#include "partial/optimizer_steps/apply.h"
#include "support/base/checked.h"
#include "support/base/text.h"

namespace shardwright::partial {
namespace {

/// A tensor of a module, identified by its state.
struct StateTensor {
  BlobTensor at;
  DType dtype = DType::kF32;
  std::uint64_t elems = 0;
};

/// The parts of a module that must be replayed.
struct Aim {
  std::uint64_t version = 0;  ///< version of the blobs
  /// Trained parameters with their states, kMaster or kWeight among them.
  std::map<std::string, std::map<std::string, StateTensor>> params;
};

std::string_view BaseOf(const std::map<std::string, StateTensor>& states) {
  return states.contains(std::string(layout::kMaster)) ? layout::kMaster : layout::kWeight;
}

/// Returns the tensors of a module by parameter, and the common version of all to replay.
/// \error kUnsupported  the reason why it cannot be replayed
Result<Aim> AimOf(const Module& module, const StoredModule& held_module,
                  const layout::ShardMap& map) {
  Aim aim;
  for (const Component component : kAllComponents) {
    for (const ModuleTensor& one : module.part(component).tensors) {
      const layout::LogicalTensor& tensor = map.tensors[one.tensor];
      if (tensor.state == layout::kFrozen) continue;
      if (tensor.state == layout::kBuffer || layout::IsPadding(tensor.state)) {
        return Fail(Errc::kUnsupported, Quoted(tensor.name), " ", tensor.state,
                    ": cannot be replayed, because it is not computed from gradients");
      }
      aim.params[tensor.name][tensor.state] = {
          {component, one.offset}, tensor.dtype, Elems(tensor.shape)};
    }
  }
  std::optional<std::uint64_t> version;
  for (auto& [name, states] : aim.params) {
    if (!states.contains(std::string(BaseOf(states)))) {
      return Fail(Errc::kUnsupported, Quoted(name), ": has optimizer states, but no weight");
    }
    // Weights with a master are computed by rounding it.
    if (BaseOf(states) == layout::kMaster) states.erase(std::string(layout::kWeight));
    for (const auto& [state, tensor] : states) {
      if (tensor.dtype != DType::kF32) {
        return Fail(Errc::kUnsupported, Quoted(name), " ", state, ": float32 expected, found ",
                    Name(tensor.dtype));
      }
      if (tensor.elems != states.begin()->second.elems) {
        return Fail(Errc::kUnsupported, Quoted(name), " ", state, ": has ", tensor.elems,
                    " elements, ", states.begin()->first, " has ", states.begin()->second.elems);
      }
      const std::optional<StoredComponent>& held =
          held_module[static_cast<std::size_t>(tensor.at.component)];
      if (tensor.elems == 0 || !held) continue;
      if (version && *version != held->version) {
        return Fail(Errc::kUnsupported, Quoted(name), ": its parts have iterations ",
                    std::min(*version, held->version), " and ", std::max(*version, held->version),
                    "; a replay requires one iteration");
      }
      version = held->version;
    }
  }
  if (!version) return Fail(Errc::kUnsupported, "the module has no trained parameters");
  aim.version = *version;
  return aim;
}

/// Returns the iteration after which the chain of a version begins: its own, or
/// that of a restore from which training resumed with this version unchanged.
/// \error kNotFound  training resumed from a restore with another version,
///        possibly at the same iteration, so that this version was rolled back
Result<std::uint64_t> ChainBegin(const std::string& module, std::uint64_t version,
                                 std::uint64_t resume,
                                 const std::vector<RecoveryRecord>& recoveries) {
  std::uint64_t begin = version;
  for (std::size_t i = 0; i < recoveries.size(); ++i) {
    const RecoveryRecord& one = recoveries[i];
    if (one.resume < version || one.resume >= resume) continue;
    // A later restore to the same or an earlier iteration cancels this one.
    const bool undone =
        std::any_of(recoveries.begin() + static_cast<std::ptrdiff_t>(i) + 1, recoveries.end(),
                    [&](const RecoveryRecord& later) { return later.resume <= one.resume; });
    if (undone) continue;
    // Older records do not list versions; assume this one.
    if (!one.older && one.resume == version) continue;
    SW_TRY(CheckGoesOnWith(one, module, version));
    if (one.older->contains(module)) begin = one.resume;
  }
  return begin;
}

/// Checks that all steps of a parameter have the same kind, matching its states.
Status CheckSteps(const std::string& name, const std::map<std::string, StateTensor>& states,
                  const std::vector<LogLink>& chain, std::size_t param, ReplayedParam* out) {
  const LogStep* first = nullptr;
  for (const LogLink& link : chain) {
    const std::span<const LogLink::Piece> pieces = link.of(param);
    if (pieces.empty()) continue;
    const optimizer_steps::Step& step = pieces.front().step->step;
    if (first == nullptr) first = pieces.front().step;
    if (optimizer_steps::StatesOf(step) != optimizer_steps::StatesOf(first->step) ||
        step.optimizer != first->step.optimizer) {
      return BadInput(
          Quoted(name), ", iteration ", link.iteration,
          ": another optimizer than in the steps before: ", optimizer_steps::Name(step.optimizer));
    }
  }
  std::set<std::string> unused;
  for (const auto& [state, tensor] : states) {
    if (state != BaseOf(states)) unused.insert(state);
  }
  out->param = states.at(std::string(BaseOf(states))).at;
  if (first == nullptr) {
    // Every step was skipped, so all states stay unchanged.
    for (const std::string& state : unused) out->states.push_back(states.at(state).at);
    return {};
  }
  const std::string who =
      StrCat(Quoted(name), ": steps of ", optimizer_steps::Name(first->step.optimizer));
  for (const std::string_view state : optimizer_steps::StatesOf(first->step)) {
    const auto found = states.find(std::string(state));
    if (found == states.end()) {
      return Fail(Errc::kUnsupported, who, " require ", Quoted(state),
                  ", which the checkpoint does not have");
    }
    unused.erase(found->first);
    out->states.push_back(found->second.at);
  }
  if (!unused.empty()) {
    return Fail(Errc::kUnsupported, who, " do not update ", Quoted(*unused.begin()),
                ", which the checkpoint has");
  }
  return {};
}

/// Checks that the last step of a chain equals the step of the checkpoint of X.
Status CheckLast(const checkpoints::Checkpoint& checkpoint, const std::string& name,
                 const std::vector<LogLink>& chain, std::size_t param) {
  const LogLink::Piece* last = nullptr;
  for (const LogLink& link : chain) {
    if (const auto pieces = link.of(param); !pieces.empty()) last = &pieces.front();
  }
  const auto found = std::ranges::find(checkpoint.params, name, &checkpoints::Param::name);
  if (last == nullptr || found == checkpoint.params.end() ||
      !optimizer_steps::CountsSteps(last->step->step.optimizer)) {
    return {};
  }
  const bool in_group =
      found->group >= 0 && static_cast<std::size_t>(found->group) < checkpoint.groups.size() &&
      checkpoint.groups[static_cast<std::size_t>(found->group)].hyper.step.has_value();
  const bool in_param = std::ranges::any_of(
      found->scalars, [](const checkpoints::Scalar& one) { return one.state == layout::kStep; });
  if (!in_group && !in_param) return {};
  SW_TRY_ASSIGN(const float expected, checkpoints::TorchStep(checkpoint, *found));
  if (last->step->step.count == expected) return {};
  return BadInput(Quoted(name), ": step ", expected, " of the checkpoint expected, found step ",
                  last->step->step.count, " at the end of the log");
}

Status LoadRoots(const std::vector<LogLink>& chain, ReplayLog* log) {
  for (const LogLink& link : chain) {
    for (const LogLink::Piece& piece : link.pieces) {
      const std::optional<exec::Digest>& digest = piece.step->roots;
      if (!digest || log->roots.contains(*digest)) continue;
      SW_TRY_ASSIGN(optimizer_steps::RootTable roots, GetRoots(log->folder, *digest));
      log->roots.emplace(*digest, std::move(roots));
    }
  }
  return {};
}

}  // namespace

Status CheckGoesOnWith(const RecoveryRecord& restore, const std::string& module,
                       std::uint64_t version) {
  const std::string who =
      StrCat("recovery ", restore.sequence, ", from iteration ", restore.resume);
  if (!restore.older) {
    return Fail(Errc::kNotFound, who, ": it is not recorded with which state of ", Quoted(module),
                " training resumed");
  }
  const auto older = restore.older->find(module);
  if (older == restore.older->end() || older->second == version) return {};
  return Fail(Errc::kNotFound, who, ": training resumed with ", Quoted(module), " of iteration ",
              older->second, ", not of ", version);
}

bool ReplayedModule::makes(Component component) const {
  return std::ranges::any_of(params, [&](const ReplayedParam& param) {
    return param.param.component == component ||
           std::ranges::any_of(
               param.states, [&](const BlobTensor& state) { return state.component == component; });
  });
}

Result<ReplayedModule> FindChain(const checkpoints::Checkpoint& checkpoint, const Module& module,
                                 const StoredModule& held, std::uint64_t to, ReplayLog* log) {
  SW_TRY_ASSIGN(const Aim aim, AimOf(module, held, checkpoint.map));
  SW_TRY_ASSIGN(const std::uint64_t begin,
                ChainBegin(module.name, aim.version, to, log->recoveries));
  std::vector<LoggedParam> params;
  for (const auto& [name, states] : aim.params) {
    params.push_back({name, states.begin()->second.elems});
  }
  ReplayedModule out;
  out.version = aim.version;
  SW_TRY_ASSIGN(out.chain, log->log.ChainOf(module.name, params, begin, to, log->recoveries));
  for (std::size_t p = 0; p < params.size(); ++p) {
    ReplayedParam& param = out.params.emplace_back();
    param.name = params[p].name;
    param.elems = params[p].elems;
    SW_TRY(CheckSteps(param.name, aim.params.at(param.name), out.chain, p, &param));
    SW_TRY(CheckLast(checkpoint, param.name, out.chain, p));
  }
  SW_TRY(LoadRoots(out.chain, log));
  for (const LogLink& link : out.chain) {
    for (const LogLink::Piece& piece : link.pieces) out.bytes += piece.piece->bytes;
  }
  return out;
}

std::vector<ReplayStep> StepsOf(const ReplayedModule& module, std::size_t param,
                                const ReplayLog& log) {
  std::vector<ReplayStep> steps;
  for (const LogLink& link : module.chain) {
    const std::span<const LogLink::Piece> pieces = link.of(param);
    if (pieces.empty()) continue;  // the step was skipped
    const LogStep* const step = pieces.front().step;
    steps.push_back({step, step->roots ? &log.roots.at(*step->roots) : nullptr, pieces});
  }
  return steps;
}

std::uint64_t RangeOf(const ReplayedModule& module, std::size_t param, std::uint64_t most) {
  std::uint64_t largest = 0;
  for (const LogLink& link : module.chain) {
    for (const LogLink::Piece& piece : link.of(param)) {
      if (piece.piece->zstd) largest = std::max(largest, piece.piece->count);
    }
  }
  const std::uint64_t cap = std::max(kReplayRange, most / kReplayRange * kReplayRange);
  return std::clamp(CeilDiv(largest, kReplayRange) * kReplayRange, kReplayRange, cap);
}

Status MakeSteps(std::span<const ReplayStep> steps, std::uint64_t first,
                 std::span<const std::span<float>> arrays, LogReads& reads,
                 std::vector<std::byte>* gradient) {
  const std::uint64_t last = first + arrays.front().size();
  for (const ReplayStep& step : steps) {
    auto piece = std::ranges::upper_bound(step.pieces, first, {}, [](const LogLink::Piece& one) {
      return one.piece->first + one.piece->count;
    });
    for (; piece != step.pieces.end() && piece->piece->first < last; ++piece) {
      const std::uint64_t from = std::max(first, piece->piece->first);
      const std::uint64_t to = std::min(last, piece->piece->first + piece->piece->count);
      gradient->resize((to - from) * ItemSize(piece->piece->dtype));
      SW_TRY(reads.Read(*piece, from - piece->piece->first, *gradient));
      optimizer_steps::Elements elements;
      elements.param = arrays[0].subspan(from - first, to - from);
      for (std::size_t i = 1; i < arrays.size(); ++i) {
        elements.states[i - 1] = arrays[i].subspan(from - first, to - from);
      }
      elements.gradient_dtype = piece->piece->dtype;
      elements.gradient = *gradient;
      SW_TRY(optimizer_steps::Apply(step.step->step, elements, step.roots));
    }
  }
  return {};
}

}  // namespace shardwright::partial
