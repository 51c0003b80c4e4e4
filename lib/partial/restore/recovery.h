// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "partial/select/types.h"
#include "support/base/result.h"

namespace shardwright::partial {

/// A version of a module in the memory of a node.
struct MemoryCopy {
  std::uint32_t node = 0;
  ModuleId module;
  std::uint64_t version = 0;  ///< iteration

  auto operator<=>(const MemoryCopy&) const = default;
};

/// A version of a module in storage, named by a valid manifest.
struct StoredCopy {
  ModuleId module;
  std::uint64_t version = 0;

  auto operator<=>(const StoredCopy&) const = default;
};

/// A module that a node loads to go on. Nodes that replace failed ones load as well.
struct Need {
  std::uint32_t node = 0;
  ModuleId module;
  std::uint64_t bytes = 0;

  auto operator<=>(const Need&) const = default;
};

/// What is left after a fault.
struct RecoveryInput {
  std::uint32_t nodes = 1;
  std::vector<std::uint32_t> failed;  ///< nodes whose memory is gone; any order
  std::vector<MemoryCopy> memory;     ///< of all nodes; what failed nodes held is ignored
  std::vector<StoredCopy> storage;
  std::vector<Need> needs;  ///< every module at least once
};

/// Choices that are the user's.
struct RecoveryOptions {
  std::optional<std::uint64_t> at;  ///< no resume point above this iteration
  bool remote_memory = true;        ///< false: a node reads its own memory and storage only
  /// Experts without any usable copy start again from this iteration (0: as initialized).
  std::optional<std::uint64_t> restart_missing;
  /// The store says that kept parts are newer than the rest of their experts: experts come in
  /// parts.
  bool kept_parts = false;
};

/// Where a version is read.
enum class Source : std::uint8_t { kLocalMemory, kRemoteMemory, kStorage, kRestart };

/// "memory", "peer", "storage", "restart".
const char* Name(Source source);

/// What a node does for one of its needs.
struct Restore {
  std::uint32_t node = 0;  ///< that loads it
  ModuleId module;
  std::uint64_t version = 0;
  Source source = Source::kStorage;
  std::uint32_t from = 0;   ///< kRemoteMemory: the lowest node that has it
  std::uint64_t bytes = 0;  ///< as needed; 0 for kRestart
};

/// The version that every node loads of a module.
struct ModuleVersion {
  ModuleId module;
  std::uint64_t version = 0;
};

/// A version that is newer than the resume point, on either level.
struct Abandoned {
  ModuleId module;
  std::uint64_t version = 0;
  std::optional<std::uint32_t> node;  ///< whose memory; absent: storage

  bool operator==(const Abandoned&) const = default;
};

/// How training goes on.
struct RecoveryPlan {
  std::uint64_t resume = 0;               ///< X
  std::vector<ModuleVersion> versions;    ///< ascending module, each once
  std::vector<Restore> restores;          ///< by node, then module
  std::vector<ModuleId> stale;            ///< modules whose version is below X, ascending
  std::vector<ModuleId> restarted;        ///< experts without a usable copy, ascending
  std::vector<Abandoned> abandoned;       ///< to be deleted or marked before training goes on
  std::uint64_t bytes[4] = {0, 0, 0, 0};  ///< read, by Source
};

/// Chooses the resume point X and a version of every module. X is the largest iteration of which
/// every module that checkpoints have completely (non-expert, kept parts) can be read in exactly
/// that version by every node that needs it. Every other module: the newest version <= X that all
/// nodes that need it can read. Equal versions: own memory, then the memory of others, then
/// storage.
/// \error kUsage  a node that does not exist, experts in parts without `kept_parts`, a module
///        needed twice by a node, no needs; kInfeasible  no such X: names the module that is the
///        last obstacle and its newest version; an expert without a usable copy and no
///        `restart_missing`: names all of them (up to 8) and X; kBadInput  overflow of byte sums
/// Pure. Source: docs/pec-planning.md section 6.3.
Result<RecoveryPlan> PlanRecovery(const RecoveryInput& input, const RecoveryOptions& options);

/// The plan's versions as a table, for LossLedger::Charge: selected parts count where experts come
/// in parts.
/// \error kMismatch  an expert of the plan that the shape lacks, or one that the plan lacks
/// Pure.
Result<Counts> ExpertVersions(const RecoveryPlan& plan, const LayerExperts& experts);

}  // namespace shardwright::partial
