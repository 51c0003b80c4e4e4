// Modules that are older than X, and the gradients that bring them there.

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/text.h"
#include "dialect/build/torch_optimizer.h"
#include "layout/states.h"
#include "os/dir.h"
#include "pec/restore/restore_internal.h"

namespace shardwright::pec::restore {
namespace {

/// A tensor of a module, by its state.
struct StateTensor {
  BlobTensor at;
  DType dtype = DType::kF32;
  std::uint64_t elems = 0;
};

/// What of a module has to be replayed.
struct Aim {
  std::uint64_t version = 0;  ///< of the blobs
  /// By parameter that is trained: its states, kMaster or kWeight among them.
  std::map<std::string, std::map<std::string, StateTensor>> params;
};

bool IsOlder(const ChosenModule& chosen, std::uint64_t resume) {
  return std::ranges::any_of(
      chosen.held, [&](const std::optional<Held>& held) { return held && held->version < resume; });
}

std::string_view BaseOf(const std::map<std::string, StateTensor>& states) {
  return states.contains(std::string(layout::kMaster)) ? layout::kMaster : layout::kWeight;
}

/// The tensors of a module by parameter, and the version that all that is replayed has.
/// \error kUnsupported  why it cannot be replayed
Result<Aim> AimOf(const Module& module, const ChosenModule& chosen, const layout::ShardMap& map) {
  Aim aim;
  for (const Component component : kAllComponents) {
    for (const ModuleTensor& one : module.part(component).tensors) {
      const layout::LogicalTensor& tensor = map.tensors[one.tensor];
      if (tensor.state == layout::kFrozen) continue;
      if (tensor.state == layout::kBuffer || layout::IsPadding(tensor.state)) {
        return Fail(Errc::kUnsupported, Quoted(tensor.name) + " " + tensor.state +
                                            ": gradients do not tell how it has changed");
      }
      aim.params[tensor.name][tensor.state] = {
          {component, one.offset}, tensor.dtype, Elems(tensor.shape)};
    }
  }
  std::optional<std::uint64_t> version;
  for (auto& [name, states] : aim.params) {
    // Beside a master the weights are the rounded master.
    if (BaseOf(states) == layout::kMaster) states.erase(std::string(layout::kWeight));
    for (const auto& [state, tensor] : states) {
      if (tensor.dtype != DType::kF32) {
        return Fail(Errc::kUnsupported, Quoted(name) + " " + state + ": float32 expected, found " +
                                            std::string(Name(tensor.dtype)));
      }
      const std::optional<Held>& held = chosen.of(tensor.at.component);
      if (tensor.elems == 0 || !held) continue;
      if (version && *version != held->version) {
        return Fail(Errc::kUnsupported, Quoted(name) + ": parts of iterations " +
                                            std::to_string(std::min(*version, held->version)) +
                                            " and " +
                                            std::to_string(std::max(*version, held->version)) +
                                            ", steps need all of one");
      }
      version = held->version;
    }
  }
  if (!version) return Fail(Errc::kUnsupported, "nothing of it is trained");
  aim.version = *version;
  return aim;
}

/// The iteration after which the chain of a version begins: the version's, or that of a restore
/// that has gone on with this version as it is.
/// \error kNotFound  a restore has gone on with something else
Result<std::uint64_t> ChainBegin(const std::string& module, std::uint64_t version,
                                 std::uint64_t resume,
                                 const std::vector<RecoveryRecord>& recoveries) {
  std::uint64_t begin = version;
  for (std::size_t i = 0; i < recoveries.size(); ++i) {
    const RecoveryRecord& one = recoveries[i];
    if (one.resume <= version || one.resume >= resume) continue;
    // What a later restore went back behind, it made good.
    const bool undone =
        std::any_of(recoveries.begin() + static_cast<std::ptrdiff_t>(i) + 1, recoveries.end(),
                    [&](const RecoveryRecord& later) { return later.resume <= one.resume; });
    if (undone) continue;
    const std::string who = "recovery " + std::to_string(one.sequence) + ", from iteration " +
                            std::to_string(one.resume);
    if (!one.older) {
      return Fail(Errc::kNotFound, who + ", does not say with which state of " + Quoted(module) +
                                       " training has gone on");
    }
    const auto older = one.older->find(module);
    if (older == one.older->end()) continue;
    if (older->second != version) {
      return Fail(Errc::kNotFound, who + ", has gone on with " + Quoted(module) + " of iteration " +
                                       std::to_string(older->second) + ", not of " +
                                       std::to_string(version));
    }
    begin = one.resume;
  }
  return begin;
}

/// Proves that all steps of a parameter are of one kind, and that the states are those of it.
Status CheckSteps(const std::string& name, const std::map<std::string, StateTensor>& states,
                  const std::vector<LogLink>& chain, std::size_t param, ReplayedParam* out) {
  const LogStep* first = nullptr;
  for (const LogLink& link : chain) {
    const std::span<const LogLink::Piece> pieces = link.of(param);
    if (pieces.empty()) continue;
    const replay::Step& step = pieces.front().step->step;
    if (first == nullptr) first = pieces.front().step;
    if (replay::StatesOf(step) != replay::StatesOf(first->step) ||
        step.optimizer != first->step.optimizer) {
      return BadInput(
          Quoted(name) + ", iteration " + std::to_string(link.iteration) +
          ": another optimizer than before: " + std::string(replay::Name(step.optimizer)));
    }
  }
  std::set<std::string> unused;
  for (const auto& [state, tensor] : states) {
    if (state != BaseOf(states)) unused.insert(state);
  }
  out->param = states.at(std::string(BaseOf(states))).at;
  if (first == nullptr) {
    // Every step was skipped: all stays as it is.
    for (const std::string& state : unused) out->states.push_back(states.at(state).at);
    return {};
  }
  const std::string who =
      Quoted(name) + ": steps of " + std::string(replay::Name(first->step.optimizer));
  for (const std::string_view state : replay::StatesOf(first->step)) {
    const auto found = states.find(std::string(state));
    if (found == states.end()) {
      return Fail(Errc::kUnsupported, who + " need " + Quoted(state) + ", which is not there");
    }
    unused.erase(found->first);
    out->states.push_back(found->second.at);
  }
  if (!unused.empty()) {
    return Fail(Errc::kUnsupported, who + " do not make " + Quoted(*unused.begin()));
  }
  return {};
}

/// Proves that the last step of a chain is the one that the checkpoint of X has.
Status CheckLast(const dialect::Checkpoint& checkpoint, const std::string& name,
                 const std::vector<LogLink>& chain, std::size_t param) {
  const LogLink::Piece* last = nullptr;
  for (const LogLink& link : chain) {
    if (const auto pieces = link.of(param); !pieces.empty()) last = &pieces.front();
  }
  const auto found = std::ranges::find(checkpoint.params, name, &dialect::Param::name);
  if (last == nullptr || found == checkpoint.params.end() ||
      !replay::CountsSteps(last->step->step.optimizer)) {
    return {};
  }
  const bool in_group =
      found->group >= 0 && static_cast<std::size_t>(found->group) < checkpoint.groups.size() &&
      checkpoint.groups[static_cast<std::size_t>(found->group)].hyper.step.has_value();
  const bool in_param = std::ranges::any_of(
      found->scalars, [](const dialect::Scalar& one) { return one.state == layout::kStep; });
  if (!in_group && !in_param) return {};
  SW_TRY_ASSIGN(const float expected, dialect::TorchStep(checkpoint, *found));
  if (last->step->step.count == expected) return {};
  return BadInput(Quoted(name) + ": the checkpoint has made " + std::to_string(expected) +
                  " steps, the log " + std::to_string(last->step->step.count));
}

/// The log, read so far as modules needed it.
struct OpenLog {
  std::string folder;
  std::shared_ptr<ReplayLog> log;
  std::vector<RecoveryRecord> recoveries;
};

Status LoadRoots(const std::vector<LogLink>& chain, OpenLog* open) {
  for (const LogLink& link : chain) {
    for (const LogLink::Piece& piece : link.pieces) {
      const std::optional<exec::Digest>& digest = piece.step->roots;
      if (!digest || open->log->roots.contains(*digest)) continue;
      SW_TRY_ASSIGN(replay::RootTable roots, GetRoots(open->folder, *digest));
      open->log->roots.emplace(*digest, std::move(roots));
    }
  }
  return {};
}

/// What brings a module to X.
/// \error why nothing does
Result<ReplayedModule> Replay(const Chosen& chosen, std::size_t index, OpenLog* open) {
  const Module& module = chosen.described.model.modules[index];
  const dialect::Checkpoint& checkpoint = chosen.described.input.checkpoint;
  SW_TRY_ASSIGN(const Aim aim, AimOf(module, chosen.modules[index], checkpoint.map));
  SW_TRY_ASSIGN(const std::uint64_t begin,
                ChainBegin(module.name, aim.version, chosen.plan.resume, open->recoveries));
  std::vector<LoggedParam> params;
  for (const auto& [name, states] : aim.params) {
    params.push_back({name, states.begin()->second.elems});
  }
  ReplayedModule out;
  out.version = aim.version;
  SW_TRY_ASSIGN(out.chain, open->log->log.ChainOf(module.name, params, begin, chosen.plan.resume,
                                                  open->recoveries));
  for (std::size_t p = 0; p < params.size(); ++p) {
    ReplayedParam& param = out.params.emplace_back();
    param.name = params[p].name;
    param.elems = params[p].elems;
    SW_TRY(CheckSteps(param.name, aim.params.at(param.name), out.chain, p, &param));
    SW_TRY(CheckLast(checkpoint, param.name, out.chain, p));
  }
  SW_TRY(LoadRoots(out.chain, open));
  for (const LogLink& link : out.chain) {
    for (const LogLink::Piece& piece : link.pieces) out.bytes += piece.piece->bytes;
  }
  return out;
}

/// Opens the log of the store.
/// \returns nothing where there is none, or where a damaged one is passed over: that is reported
Result<std::optional<OpenLog>> OpenTheLog(const Job& job, const Base& base, ReplayReport* report) {
  const bool required = job.options.replay == ReplayMode::kRequire;
  OpenLog open;
  open.folder = base.store.path() + "/logs";
  SW_TRY_ASSIGN(const bool there, os::Exists(open.folder));
  if (!there) {
    if (!required) return std::optional<OpenLog>();
    return Fail(Errc::kMismatch, open.folder + ": modules are older than what is restored, and " +
                                     "there is no log of gradients to replay");
  }
  report->log = true;
  Result<GradientLog> log =
      GradientLog::Open(open.folder, base.store.head().fingerprint, job.options.write.threads);
  if (!log) {
    // What cannot be read may be there the next time; what is wrong stays wrong.
    if (required || log.error().code == Errc::kIo) {
      return tl::unexpected<Error>(std::move(log).error());
    }
    report->refused.push_back(log.error().message);
    return std::optional<OpenLog>();
  }
  for (const TornTail& tail : log->torn()) {
    report->torn.push_back(tail.path + ": the last " + std::to_string(tail.bytes) +
                           " bytes are of a record that was cut short; they are not used");
  }
  open.log = std::make_shared<ReplayLog>(ReplayLog{*std::move(log), {}});
  SW_TRY_ASSIGN(open.recoveries, base.store.RecoveriesAfter(0));
  return std::optional<OpenLog>(std::move(open));
}

}  // namespace

bool RoundsMaster(const ChosenModule& chosen, const std::shared_ptr<const ReplayedModule>& replayed,
                  std::uint64_t resume) {
  const std::optional<Held>& weights = chosen.of(Component::kWeights);
  if (replayed == nullptr || !replayed->makes(Component::kMaster)) return chosen.rounds_master();
  return weights && weights->version < resume;
}

Result<Replays> FindReplays(const Job& job, const Base& base, Chosen* chosen) {
  Replays replays;
  replays.modules.resize(chosen->modules.size());
  replays.report.mode = job.options.replay;
  std::vector<std::size_t> older;
  for (std::size_t i = 0; i < chosen->modules.size(); ++i) {
    if (chosen->modules[i].restarted) continue;
    if (IsOlder(chosen->modules[i], chosen->plan.resume)) older.push_back(i);
  }
  if (older.empty() || job.options.replay == ReplayMode::kNever) return replays;
  SW_TRY_ASSIGN(std::optional<OpenLog> open, OpenTheLog(job, base, &replays.report));
  if (!open) return replays;
  bool damaged = false;
  for (const std::size_t i : older) {
    const std::string& name = chosen->described.model.modules[i].name;
    Result<ReplayedModule> one = Replay(*chosen, i, &*open);
    if (!one) {
      if (one.error().code == Errc::kIo) return tl::unexpected<Error>(std::move(one).error());
      damaged = damaged || one.error().code == Errc::kBadInput;
      replays.report.refused.push_back(name + ": " + one.error().message);
      continue;
    }
    ++replays.report.modules;
    replays.report.bytes += one->bytes;
    replays.modules[i] = std::make_shared<const ReplayedModule>(*std::move(one));
    for (ModuleVersion& version : chosen->plan.versions) {
      if (chosen->described.model.index_of(version.module) == i) {
        version.version = chosen->plan.resume;
      }
    }
  }
  if (job.options.replay == ReplayMode::kRequire && !replays.report.refused.empty()) {
    return Fail(damaged ? Errc::kBadInput : Errc::kMismatch,
                job.options.store + ": " + std::to_string(replays.report.refused.size()) +
                    " modules cannot be replayed to iteration " +
                    std::to_string(chosen->plan.resume) + ": " + FirstFew(replays.report.refused));
  }
  replays.log = std::move(open->log);
  return replays;
}

}  // namespace shardwright::pec::restore
