// SPDX-License-Identifier: Apache-2.0
// lib/placement/migration: from one placement to the next.
// Relabel gives nodes, GPUs and slots of a plan the names under which least has to move.
// PlanMigration then makes the list of transfers and puts them in rounds. MapsOf tells the same as
// two shard maps with GPUs for files, whose plan is the copy program.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/layout/shard_map.h"
#include "engine/plan/target.h"
#include "placement/core/types.h"

namespace shardwright::placement {

/// How far a transfer goes.
enum class Reach : std::uint8_t { kNode, kRack, kCluster };

/// One expert of one layer that a device receives.
struct Transfer {
  std::uint32_t layer = 0;  ///< index, not the model's number
  std::uint32_t expert = 0;
  std::uint32_t from = 0;  ///< device
  std::uint32_t to = 0;    ///< device
  std::uint32_t round = 0;
  Reach reach = Reach::kNode;
};

/// An expert that no live device of the current placement holds.
struct LostExpert {
  std::uint32_t layer = 0;
  std::uint32_t expert = 0;
};

struct MigrationOptions {
  /// A node that has received an expert may send it on: fewer bytes out of one sender.
  bool forward = false;
  StopCheck stop = {};  ///< ends planning with kStopped
};

/// What must move to get from one placement to another.
struct Migration {
  std::vector<Transfer> transfers;  ///< by round, then sender
  std::vector<LostExpert> lost;     ///< must come from a checkpoint; no transfer is made for them
  std::uint32_t rounds = 0;  ///< a node sends and receives at most one expert of another node in a
                             ///< round, a device at most one of its own node
  std::uint64_t bytes = 0;   ///< of all transfers
  std::uint64_t inter_node_bytes = 0;         ///< of those between nodes
  std::uint64_t inter_rack_bytes = 0;         ///< of those between racks
  std::uint64_t inter_node_transfers = 0;     ///< experts that enter a node: "migrated experts"
  std::vector<std::uint64_t> node_in_bytes;   ///< by node, from other nodes
  std::vector<std::uint64_t> node_out_bytes;  ///< by node, to other nodes
  double seconds = 0;  ///< rounds at the cluster's bandwidths; 0 if they are unknown
};

/// Transfers from `current` to `next`, balanced over senders and put in rounds.
/// \param current  what lies on the devices; replicas on dead nodes cannot be read
/// \pre both fit `cluster` and have the same layers and experts
/// \error kMismatch  they do not; kStopped
/// Local, pure but for the stop.
Result<Migration> PlanMigration(const Placement& current, const Placement& next,
                                const Cluster& cluster, const MigrationOptions& options = {});

/// Proves that a migration leads from one placement to another: whoever sends an expert holds it
/// then, whoever is to hold one in the end has it or receives it, and nobody receives what it has.
/// \pre both fit `cluster` and have the same layers and experts
/// \error kMismatch  names the layer as in `layer_id`, the expert and the device; kInfeasible  lost
///        experts
/// Local, pure.
Status Prove(const Migration& migration, const Placement& current, const Placement& next,
             const Cluster& cluster, std::span<const std::uint32_t> layer_id);

/// A node for every node of the plan: physical node of plan node p. Only nodes with equal slots of
/// their devices change places, inside their rack if that is the failure unit. cost: distinct
/// experts that the physical node lacks.
/// \pre map is kJoint or kGreedy; both placements have the same shape
std::vector<std::uint32_t> MapNodes(const Placement& current, const Placement& plan,
                                    const Cluster& cluster, NodeMap map,
                                    FailureUnit unit = FailureUnit::kNode,
                                    const StopCheck& stop = {});

/// Renames the nodes, then the devices inside each node, then orders slots so that `plan` needs the
/// fewest transfers from `current`: what a device keeps stays in its slot.
/// \param stop  ends it early, as those of the functions below
/// Local, pure but for the stop.
Placement Relabel(const Placement& current, const Placement& plan, const Cluster& cluster,
                  NodeMap map, FailureUnit unit = FailureUnit::kNode, const StopCheck& stop = {});

/// Renames devices of the whole cluster, layer by layer, for strategies that know no nodes.
Placement RelabelDevices(const Placement& current, const Placement& plan, const Cluster& cluster,
                         const StopCheck& stop = {});

/// Least cost assignment of rows to columns: column of each row. cost is n x n, row-major.
/// O(n^3). Ties: lower columns for lower rows as far as the method sees them; deterministic.
/// Returns the identity after a stop.
std::vector<std::uint32_t> Assign(const std::vector<std::int64_t>& cost, std::uint32_t n,
                                  const StopCheck& stop = {});

/// The same migration as the record that every command of the toolkit executes: a source map and a
/// target with devices for files, slots for payloads, and expert state as logical tensors named
/// "layers.<id>.experts.<e>" with the state "from.<device>". plan::Plan::Make of the two gives the
/// copy program.
struct MigrationMaps {
  layout::ShardMap source;
  plan::Target target;
};

/// \error kBadInput  if an expert has no bytes in the cluster
Result<MigrationMaps> MapsOf(const Migration& migration, const Placement& current,
                             const Placement& next, const TokenCounts& loads,
                             const Cluster& cluster);

/// Orders the slots of every live device so that what stays is where it was.
/// Local, pure.
void KeepSlots(const Placement& current, const Cluster& cluster, Placement* plan);

}  // namespace shardwright::placement
