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

/// A version of a module in storage, listed in a valid manifest.
struct StoredCopy {
  ModuleId module;
  std::uint64_t version = 0;

  auto operator<=>(const StoredCopy&) const = default;
};

/// A module that a node loads to resume, including nodes that replace failed ones.
struct Need {
  std::uint32_t node = 0;
  ModuleId module;
  std::uint64_t bytes = 0;

  auto operator<=>(const Need&) const = default;
};

/// State of nodes and storage after a fault.
struct RecoveryInput {
  std::uint32_t nodes = 1;
  std::vector<std::uint32_t> failed;  ///< nodes that lost their memory; any order
  std::vector<MemoryCopy> memory;     ///< of all nodes; entries of failed nodes are ignored
  std::vector<StoredCopy> storage;
  std::vector<Need> needs;  ///< every module at least once
};

/// Choices of the user.
struct RecoveryOptions {
  std::optional<std::uint64_t> at;  ///< no resume point above this iteration
  bool remote_memory = true;        ///< false: a node reads only its own memory and storage
  /// Iteration from which experts without any usable copy restart (0: initial values).
  std::optional<std::uint64_t> restart_missing;
  /// Kept parts in the store are newer than the rest
  /// of their experts, so experts are given in parts.
  bool kept_parts = false;
};

/// Source that a version is read from.
enum class Source : std::uint8_t { kLocalMemory, kRemoteMemory, kStorage, kRestart };

/// Returns "memory", "peer", "storage" or "restart".
const char* Name(Source source);

/// Action of a node for one of its needs.
struct Restore {
  std::uint32_t node = 0;  ///< node that loads the module
  ModuleId module;
  std::uint64_t version = 0;
  Source source = Source::kStorage;
  std::uint32_t from = 0;   ///< kRemoteMemory: the lowest node with the version
  std::uint64_t bytes = 0;  ///< bytes of the need; 0 for kRestart
};

/// Version of a module that every node loads.
struct ModuleVersion {
  ModuleId module;
  std::uint64_t version = 0;
};

/// A version newer than the resume point, on either level.
struct Abandoned {
  ModuleId module;
  std::uint64_t version = 0;
  std::optional<std::uint32_t> node;  ///< node with the memory copy; absent: storage

  bool operator==(const Abandoned&) const = default;
};

/// Plan to resume training.
struct RecoveryPlan {
  std::uint64_t resume = 0;               ///< X
  std::vector<ModuleVersion> versions;    ///< ascending by module, each once
  std::vector<Restore> restores;          ///< by node, then module
  std::vector<ModuleId> stale;            ///< modules with a version below X, ascending
  std::vector<ModuleId> restarted;        ///< experts without a usable copy, ascending
  std::vector<Abandoned> abandoned;       ///< to be deleted or marked before training resumes
  std::uint64_t bytes[4] = {0, 0, 0, 0};  ///< bytes to read, indexed by Source
};

/// Chooses the resume point X and a version of every module. X is the largest
/// iteration at which every module that all checkpoints contain (non-expert, kept
/// parts) can be read in exactly that version by every node that needs it. Every
/// other module gets the newest version <= X that all nodes that need it can read.
/// Equal versions are read from own memory, then other nodes' memory, then storage.
/// \error kUsage  unknown node, experts in parts without `kept_parts`, a module needed twice
///        by a node, no needs; kInfeasible  no such X (names the module that prevents it last
///        and its newest version), or experts without usable copy and without
///        `restart_missing` (names up to 8 of them, and X); kBadInput  overflow of byte counts
/// Pure. Source: docs/pec-planning.md section 6.3.
Result<RecoveryPlan> PlanRecovery(const RecoveryInput& input, const RecoveryOptions& options);

/// Returns the plan's expert versions as a table, for
/// LossLedger::Charge. Uses selected parts if experts come in parts.
/// \error kMismatch  an expert that is missing in the shape, or in the plan
/// Pure.
Result<Counts> ExpertVersions(const RecoveryPlan& plan, const LayerExperts& experts);

/// Returns the oldest version in such a table, at most `newest`. Pure.
std::uint64_t OldestVersion(const Counts& versions, std::uint64_t newest);

}  // namespace shardwright::partial
