// SPDX-License-Identifier: Apache-2.0
// lib/placement/migration: from one placement to the next.
// Relabel renames the nodes, GPUs and slots of a plan so that the fewest experts move.
// PlanMigration then lists the transfers and assigns them to rounds. MapsOf converts a migration
// to two shard maps with GPUs as files; their copy program executes the migration.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/layout/shard_map.h"
#include "engine/plan/target.h"
#include "placement/core/types.h"

namespace shardwright::placement {

/// Smallest part of the cluster that contains both ends of a transfer.
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

/// An expert without a replica on a live device of the current placement.
struct LostExpert {
  std::uint32_t layer = 0;
  std::uint32_t expert = 0;
};

struct MigrationOptions {
  /// A node that has received an expert may send it to others: fewer bytes from one sender.
  bool forward = false;
  StopCheck stop = {};  ///< ends planning with kStopped
};

/// Transfers that lead from one placement to another.
struct Migration {
  std::vector<Transfer> transfers;  ///< by round, then sender
  std::vector<LostExpert> lost;     ///< must come from a checkpoint; no transfer is made
  std::uint32_t rounds = 0;  ///< in a round a node exchanges at most one expert with other nodes
                             ///< per direction, a device one in its node
  std::uint64_t bytes = 0;   ///< total of all transfers
  std::uint64_t inter_node_bytes = 0;         ///< transfers between nodes
  std::uint64_t inter_rack_bytes = 0;         ///< transfers between racks
  std::uint64_t inter_node_transfers = 0;     ///< experts that enter a node: "migrated experts"
  std::vector<std::uint64_t> node_in_bytes;   ///< by node, from other nodes
  std::vector<std::uint64_t> node_out_bytes;  ///< by node, to other nodes
  double seconds = 0;  ///< rounds at the cluster's bandwidths; 0 if they are unknown
};

/// Plans transfers from `current` to `next`, balanced over senders and assigned to rounds.
/// \param current  placement on the devices; replicas on dead nodes cannot be read
/// \pre both fit `cluster` and have the same layers and experts
/// \error kMismatch  layers or experts differ; kStopped
/// Local, pure except for the stop.
Result<Migration> PlanMigration(const Placement& current, const Placement& next,
                                const Cluster& cluster, const MigrationOptions& options = {});

/// Verifies that a migration leads from one placement to another: each sender has the expert at
/// that time, each device that needs an expert has or receives it, and none receives one it has.
/// \pre both fit `cluster` and have the same layers and experts
/// \error kMismatch  names the layer as in `layer_id`, the expert and the device; kInfeasible  lost
///        experts
/// Local, pure.
Status Prove(const Migration& migration, const Placement& current, const Placement& next,
             const Cluster& cluster, std::span<const std::uint32_t> layer_id);

/// Returns the physical node for every plan node. Only nodes with equal slots of their devices
/// are exchanged, and only inside their rack if that is the failure unit. The cost of a node is
/// the number of distinct experts that the physical node lacks.
/// \pre map is kJoint or kGreedy; both placements have the same shape
std::vector<std::uint32_t> MapNodes(const Placement& current, const Placement& plan,
                                    const Cluster& cluster, NodeMap map,
                                    FailureUnit unit = FailureUnit::kNode,
                                    const StopCheck& stop = {});

/// Renames the nodes, then the devices inside each node, then orders slots, so that `plan` needs
/// the fewest transfers from `current`. An expert that stays on its device keeps its slot.
/// \param stop  ends the work early, here and in the functions below
/// Local, pure except for the stop.
Placement Relabel(const Placement& current, const Placement& plan, const Cluster& cluster,
                  NodeMap map, FailureUnit unit = FailureUnit::kNode, const StopCheck& stop = {});

/// Renames devices of the whole cluster, layer by layer, for strategies that do not use nodes.
Placement RelabelDevices(const Placement& current, const Placement& plan, const Cluster& cluster,
                         const StopCheck& stop = {});

/// Returns the column of each row in an assignment of least cost. `cost` is n x n, row-major.
/// O(n^3). Ties are resolved deterministically, mostly to lower columns for lower rows. Returns
/// the identity after a stop.
std::vector<std::uint32_t> Assign(const std::vector<std::int64_t>& cost, std::uint32_t n,
                                  const StopCheck& stop = {});

/// The same migration in the form that all commands of the toolkit execute: a source map and
/// a target, with devices as files and slots as payloads. The state of an expert is a logical
/// tensor "layers.<id>.experts.<e>" with the state "from.<device>". plan::Plan::Make turns
/// both into the copy program.
struct MigrationMaps {
  layout::ShardMap source;
  plan::Target target;
};

/// \error kBadInput  the cluster does not specify the size of an expert
Result<MigrationMaps> MapsOf(const Migration& migration, const Placement& current,
                             const Placement& next, const TokenCounts& loads,
                             const Cluster& cluster);

/// Orders the slots of every live device so that experts that stay keep their slots.
/// Local, pure.
void KeepSlots(const Placement& current, const Cluster& cluster, Placement* plan);

}  // namespace shardwright::placement
