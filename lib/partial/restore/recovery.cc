// SPDX-License-Identifier: Apache-2.0
#include "partial/restore/recovery.h"

#include <algorithm>
#include <iterator>
#include <span>
#include <string>
#include <tuple>
#include <utility>

#include "support/base/checked.h"

namespace shardwright::partial {
namespace {

/// A module with its needs and copies.
struct ModuleInput {
  ModuleId id;
  std::span<const Need> needs;         // ascending node
  std::span<const MemoryCopy> memory;  // of surviving nodes, ascending by version, then node
  std::span<const StoredCopy> stored;  // ascending version
};

/// Sorted input, with surviving memory only.
struct SortedInput {
  std::vector<Need> needs;           // by module, then node
  std::vector<MemoryCopy> memory;    // by module, version, node
  std::vector<StoredCopy> storage;   // by module, version
  std::vector<bool> failed;          // by node
  std::vector<ModuleInput> modules;  // ascending id; views of the above
};

Status CheckNode(std::uint32_t node, std::uint32_t nodes, const std::string& what) {
  if (node < nodes) return {};
  return Fail(Errc::kUsage, what, ": node ", node, " does not exist, there are ", nodes);
}

Status SortFacts(const RecoveryInput& input, SortedInput* facts) {
  facts->failed.assign(input.nodes, false);
  for (std::uint32_t node : input.failed) {
    SW_TRY(CheckNode(node, input.nodes, "failed node"));
    facts->failed[node] = true;
  }
  for (const MemoryCopy& copy : input.memory) {
    SW_TRY(CheckNode(copy.node, input.nodes, "memory copy of " + Name(copy.module)));
    if (!facts->failed[copy.node]) facts->memory.push_back(copy);
  }
  facts->storage = input.storage;
  facts->needs = input.needs;
  std::sort(facts->memory.begin(), facts->memory.end(),
            [](const MemoryCopy& a, const MemoryCopy& b) {
              return std::tie(a.module, a.version, a.node) < std::tie(b.module, b.version, b.node);
            });
  std::sort(facts->storage.begin(), facts->storage.end());
  std::sort(facts->needs.begin(), facts->needs.end(), [](const Need& a, const Need& b) {
    return std::tie(a.module, a.node) < std::tie(b.module, b.node);
  });
  for (std::size_t i = 0; i < facts->needs.size(); ++i) {
    const Need& need = facts->needs[i];
    SW_TRY(CheckNode(need.node, input.nodes, "need of " + Name(need.module)));
    if (i > 0 && need.module == facts->needs[i - 1].module &&
        need.node == facts->needs[i - 1].node) {
      return Fail(Errc::kUsage, Name(need.module), " is listed twice as a need of node ",
                  need.node);
    }
  }
  return {};
}

/// Returns the part of `sorted` about `id`.
template <class T>
std::span<const T> RunOf(const std::vector<T>& sorted, const ModuleId& id) {
  const auto first = std::lower_bound(sorted.begin(), sorted.end(), id,
                                      [](const T& a, const ModuleId& b) { return a.module < b; });
  const auto last = std::upper_bound(first, sorted.end(), id,
                                     [](const ModuleId& a, const T& b) { return a < b.module; });
  return {first, last};
}

/// Checks that experts are whole or in two parts, and in parts only if the store has kept parts.
Status CheckParts(const std::vector<ModuleInput>& modules, bool kept_parts) {
  for (std::size_t i = 0; i < modules.size(); ++i) {
    const ModuleId& id = modules[i].id;
    if (!id.is_expert()) continue;
    if (id.part != Part::kWhole && !kept_parts) {
      return Fail(Errc::kUsage, Name(id),
                  ": parts of one expert may have different versions only "
                  "in a store that keeps components of all experts");
    }
    ModuleId other = id;
    other.part = id.part == Part::kKept ? Part::kSelected : Part::kKept;
    const std::size_t at = id.part == Part::kKept ? i + 1 : i - 1;  // i = 0 wraps around: none
    const bool found = at < modules.size() && modules[at].id == other;
    if (id.part != Part::kWhole && !found) {
      return Fail(Errc::kUsage, Name(id), " is needed without the ", Name(other));
    }
    if (id.part == Part::kWhole && i + 1 < modules.size() && modules[i + 1].id.layer == id.layer &&
        modules[i + 1].id.expert == id.expert) {
      return Fail(Errc::kUsage, Name(id), " is needed whole and in parts");
    }
  }
  return {};
}

Result<SortedInput> Prepare(const RecoveryInput& input, const RecoveryOptions& options) {
  SortedInput facts;
  SW_TRY(SortFacts(input, &facts));
  bool complete = false;
  for (std::size_t i = 0; i < facts.needs.size(); ++i) {
    const ModuleId& id = facts.needs[i].module;
    if (i > 0 && id == facts.needs[i - 1].module) continue;
    complete = complete || id.is_complete();
    facts.modules.push_back(
        {id, RunOf(facts.needs, id), RunOf(facts.memory, id), RunOf(facts.storage, id)});
  }
  if (!complete) {
    return Fail(Errc::kUsage,
                "cannot choose the resume point: no needed module is saved in every checkpoint");
  }
  SW_TRY(CheckParts(facts.modules, options.kept_parts));
  return facts;
}

bool InMemoryOf(const ModuleInput& module, std::uint32_t node, std::uint64_t version) {
  return std::any_of(module.memory.begin(), module.memory.end(), [&](const MemoryCopy& copy) {
    return copy.node == node && copy.version == version;
  });
}

/// Returns the versions that every node that needs the module can read, ascending.
std::vector<std::uint64_t> UsableVersions(const ModuleInput& module, bool remote_memory) {
  std::vector<std::uint64_t> versions;
  for (const StoredCopy& copy : module.stored) versions.push_back(copy.version);
  for (const MemoryCopy& copy : module.memory) {
    const bool usable =
        remote_memory ||
        std::all_of(module.needs.begin(), module.needs.end(),
                    [&](const Need& need) { return InMemoryOf(module, need.node, copy.version); });
    if (usable) versions.push_back(copy.version);
  }
  std::sort(versions.begin(), versions.end());
  versions.erase(std::unique(versions.begin(), versions.end()), versions.end());
  return versions;
}

/// Returns X. \error kInfeasible
Result<std::uint64_t> ResumePoint(const SortedInput& facts, const RecoveryOptions& options) {
  std::vector<std::uint64_t> common;
  bool first = true;
  for (const ModuleInput& module : facts.modules) {
    if (!module.id.is_complete()) continue;
    std::vector<std::uint64_t> versions = UsableVersions(module, options.remote_memory);
    const std::string newest =
        versions.empty() ? "it has no version" : StrCat("its newest version is ", versions.back());
    if (options.at) {
      versions.erase(std::upper_bound(versions.begin(), versions.end(), *options.at),
                     versions.end());
    }
    if (first) {
      common = std::move(versions);
      first = false;
    } else {
      std::vector<std::uint64_t> both;
      std::set_intersection(common.begin(), common.end(), versions.begin(), versions.end(),
                            std::back_inserter(both));
      common = std::move(both);
    }
    if (common.empty()) {
      return Fail(Errc::kInfeasible, Name(module.id), ": no version",
                  (options.at ? StrCat(" up to iteration ", *options.at) : std::string()),
                  " is available for all required modules; ", newest);
    }
  }
  return common.back();
}

/// Chooses the source of a version for a node: own memory, memory of others, storage.
Restore RestoreOf(const ModuleInput& module, const Need& need, std::uint64_t version,
                  bool remote_memory) {
  Restore restore{need.node, module.id, version, Source::kStorage, 0, need.bytes};
  const auto holder = [&](const MemoryCopy& copy) { return copy.version == version; };
  const auto remote = std::find_if(module.memory.begin(), module.memory.end(), holder);
  if (InMemoryOf(module, need.node, version)) {
    restore.source = Source::kLocalMemory;
    restore.from = need.node;
  } else if (remote_memory && remote != module.memory.end()) {
    restore.source = Source::kRemoteMemory;
    restore.from = remote->node;
  }
  return restore;
}

/// Lists experts without a usable copy, by name. \pre not empty
std::string NamesOf(const std::vector<ModuleId>& modules) {
  constexpr std::size_t kShown = 8;
  std::string names;
  for (std::size_t i = 0; i < modules.size() && i < kShown; ++i) {
    names += (i == 0 ? "" : ", ") + Name(modules[i]);
  }
  if (modules.size() > kShown) names += StrCat(" and ", modules.size() - kShown, " more");
  return names;
}

/// Chooses a version of every module, and the source for each node.
Status ChooseVersions(const SortedInput& facts, const RecoveryOptions& options,
                      RecoveryPlan* plan) {
  for (const ModuleInput& module : facts.modules) {
    const std::vector<std::uint64_t> versions = UsableVersions(module, options.remote_memory);
    const auto above = std::upper_bound(versions.begin(), versions.end(), plan->resume);
    if (above == versions.begin()) {
      plan->restarted.push_back(module.id);
      const std::uint64_t version = options.restart_missing.value_or(0);
      plan->versions.push_back({module.id, version});
      for (const Need& need : module.needs) {
        plan->restores.push_back({need.node, module.id, version, Source::kRestart, 0, 0});
      }
      continue;
    }
    const std::uint64_t version = *std::prev(above);
    plan->versions.push_back({module.id, version});
    if (version < plan->resume) plan->stale.push_back(module.id);
    for (const Need& need : module.needs) {
      plan->restores.push_back(RestoreOf(module, need, version, options.remote_memory));
    }
  }
  if (plan->restarted.empty()) return {};
  if (!options.restart_missing) {
    return Fail(Errc::kInfeasible, NamesOf(plan->restarted), ": no copy up to the resume point ",
                plan->resume, " is left");
  }
  if (*options.restart_missing > plan->resume) {
    return Fail(Errc::kUsage, "missing experts cannot restart from iteration ",
                *options.restart_missing, ", above the resume point ", plan->resume);
  }
  return {};
}

}  // namespace

const char* Name(Source source) {
  switch (source) {
    case Source::kLocalMemory:
      return "memory";
    case Source::kRemoteMemory:
      return "peer";
    case Source::kStorage:
      return "storage";
    case Source::kRestart:
      break;
  }
  return "restart";
}

Result<RecoveryPlan> PlanRecovery(const RecoveryInput& input, const RecoveryOptions& options) {
  SW_TRY_ASSIGN(const SortedInput facts, Prepare(input, options));
  RecoveryPlan plan;
  SW_TRY_ASSIGN(plan.resume, ResumePoint(facts, options));
  SW_TRY(ChooseVersions(facts, options, &plan));
  std::stable_sort(plan.restores.begin(), plan.restores.end(),
                   [](const Restore& a, const Restore& b) { return a.node < b.node; });
  for (const Restore& restore : plan.restores) {
    std::uint64_t& bytes = plan.bytes[static_cast<std::size_t>(restore.source)];
    SW_TRY_ASSIGN(bytes, CheckedAdd(bytes, restore.bytes));
  }
  for (const MemoryCopy& copy : facts.memory) {
    if (copy.version > plan.resume)
      plan.abandoned.push_back({copy.module, copy.version, copy.node});
  }
  for (const StoredCopy& copy : facts.storage) {
    if (copy.version > plan.resume) {
      plan.abandoned.push_back({copy.module, copy.version, std::nullopt});
    }
  }
  return plan;
}

Result<Counts> ExpertVersions(const RecoveryPlan& plan, const LayerExperts& experts) {
  Counts versions = MakeCounts(experts);
  PerExpert<bool> seen;
  for (std::uint32_t n : experts) seen.emplace_back(n, false);
  for (const ModuleVersion& entry : plan.versions) {
    const ModuleId& id = entry.module;
    if (id.is_complete()) continue;
    if (id.layer < 0 || static_cast<std::size_t>(id.layer) >= experts.size() || id.expert < 0 ||
        static_cast<std::uint32_t>(id.expert) >= experts[static_cast<std::size_t>(id.layer)]) {
      return Fail(Errc::kMismatch, Name(id),
                  " is in the recovery plan, but the model does not have it");
    }
    versions[static_cast<std::size_t>(id.layer)][static_cast<std::size_t>(id.expert)] =
        entry.version;
    seen[static_cast<std::size_t>(id.layer)][static_cast<std::size_t>(id.expert)] = true;
  }
  for (std::size_t m = 0; m < experts.size(); ++m) {
    for (std::size_t e = 0; e < experts[m]; ++e) {
      if (seen[m][e]) continue;
      const ModuleId id{static_cast<std::int32_t>(m), static_cast<std::int32_t>(e)};
      return Fail(Errc::kMismatch, Name(id), " is missing in the recovery plan");
    }
  }
  return versions;
}

std::uint64_t OldestVersion(const Counts& versions, std::uint64_t newest) {
  std::uint64_t oldest = newest;
  for (const auto& layer : versions) {
    for (const std::uint64_t version : layer) oldest = std::min(oldest, version);
  }
  return oldest;
}

}  // namespace shardwright::partial
