// SPDX-License-Identifier: Apache-2.0
#include "trainer/torch/experts.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include <nlohmann/json.hpp>

#include "placement/io/plan_file.h"
#include "placement/migration/migration.h"
#include "placement/strategy/hecate.h"
#include "support/base/result.h"
#include "support/os/sha256.h"
#include "trainer/torch/answer.h"

namespace shardwright::trainer_torch {
namespace {

using nlohmann::json;

/// A plan and the ranks that store its experts.
struct Read {
  placement::PlanFile file;
  placement::TokenCounts shape;  ///< its layers and experts, no tokens
  placement::Cluster cluster;
  std::vector<std::uint32_t> device;  ///< by rank
};

Result<Read> ReadFor(const std::string& path, std::uint32_t ranks) {
  Read read;
  SW_TRY_ASSIGN(read.file, placement::ReadPlan(path));
  if (!read.file.layer_experts.empty()) {
    return Fail(Errc::kUnsupported, path,
                ": the layers have different numbers of experts: plan each "
                "number separately with moe-replace --layers");
  }
  read.shape.layers = static_cast<std::uint32_t>(read.file.layer_id.size());
  read.shape.experts = read.file.experts;
  read.shape.layer_id = read.file.layer_id;
  read.shape.tokens.assign(std::size_t{read.shape.layers} * read.shape.experts, 0);
  // A plan without a cluster has no nodes either, so every rank is its own node.
  read.cluster = read.file.cluster ? *read.file.cluster : placement::UniformCluster(ranks, 1, 0);
  for (std::uint32_t d = 0; d < read.cluster.device_count(); ++d) {
    if (read.cluster.alive(d)) read.device.push_back(d);
  }
  if (read.device.size() != ranks) {
    return Fail(Errc::kMismatch, path, ": ", read.device.size(),
                " live gpus, but the process group has ", ranks, " ranks");
  }
  return read;
}

/// Returns the experts of every rank in a plan, on a cluster with the ranks as live devices.
Result<json> ExpertsOfRank(const std::string& path, const placement::PlanFile& plan,
                           const Read& on) {
  auto placed = placement::PlacedOn(plan, on.shape, on.cluster);
  if (!placed) return Within(path, placed.error());
  const Status fits =
      placement::Validate(*placed, on.shape, on.cluster, placement::Rules{false, false, 0, false});
  if (!fits) return Within(path, fits.error());
  json layers = json::array();
  for (std::uint32_t l = 0; l < on.shape.layers; ++l) {
    json by_rank = json::array();
    for (const std::uint32_t d : on.device) {
      std::vector<std::int32_t> held;
      for (const std::int32_t e : placed->slots(l, d)) {
        if (e != placement::kNoExpert) held.push_back(e);
      }
      by_rank.push_back(std::move(held));
    }
    layers.push_back(std::move(by_rank));
  }
  return layers;
}

Result<json> Describe(const std::string& path, const Read& read) {
  json told = {{"experts", read.shape.experts},
               {"layers", read.shape.layer_id},
               {"device", read.device},
               {"owners", nullptr}};
  json nodes = json::array();
  for (const std::uint32_t d : read.device) nodes.push_back(read.cluster.devices[d].node);
  told["node"] = std::move(nodes);
  placement::PlanFile copies = read.file;
  copies.owner_slots.clear();
  copies.owner_device_slots.clear();
  SW_TRY_ASSIGN(told["slots"], ExpertsOfRank(path, copies, read));
  if (!read.file.owner_slots.empty()) {
    SW_TRY_ASSIGN(told["owners"], ExpertsOfRank(path, placement::StateOf(read.file), read));
  }
  told["digest"] = os::Sha256Of(told.dump());
  return told;
}

Result<json> ReadPlan(const json& request) {
  const auto path = request.at("plan").get<std::string>();
  SW_TRY_ASSIGN(const Read read, ReadFor(path, request.at("ranks").get<std::uint32_t>()));
  return Describe(path, read);
}

/// Reads a plan again. Fails if it has changed since the trainer read it.
Result<Read> ReadAgain(const std::string& path, std::uint32_t ranks, const std::string& digest) {
  SW_TRY_ASSIGN(Read read, ReadFor(path, ranks));
  SW_TRY_ASSIGN(const json told, Describe(path, read));
  if (told.at("digest") == digest) return read;
  return Fail(Errc::kMismatch, path, ": the plan has changed since it was read");
}

Result<json> PlanMoves(const json& request) {
  const auto old_path = request.at("old").get<std::string>();
  const auto path = request.at("new").get<std::string>();
  SW_TRY_ASSIGN(const Read old, ReadAgain(old_path, request.at("old_ranks").get<std::uint32_t>(),
                                          request.at("old_digest").get<std::string>()));
  SW_TRY_ASSIGN(const Read next, ReadAgain(path, request.at("ranks").get<std::uint32_t>(),
                                           request.at("digest").get<std::string>()));
  if (old.shape.layer_id != next.shape.layer_id || old.shape.experts != next.shape.experts) {
    return Fail(Errc::kMismatch, path, ": ", next.shape.layers, " layers of ", next.shape.experts,
                " experts: expected the same layers and experts as in ", old_path, ", which has ",
                old.shape.layers, " of ", old.shape.experts);
  }
  const placement::PlanFile state = placement::StateOf(old.file);
  auto current = placement::PlacedOn(state, next.shape, next.cluster);
  if (!current) return Within(old_path, current.error());
  auto wanted = placement::PlacedOn(placement::StateOf(next.file), next.shape, next.cluster);
  if (!wanted) return Within(path, wanted.error());
  placement::Migration moves;
  if (next.file.migration) {
    moves = *next.file.migration;
  } else {
    SW_TRY_ASSIGN(moves, placement::PlanMigration(*current, *wanted, next.cluster));
  }
  const Status leads =
      placement::Prove(moves, *current, *wanted, next.cluster, next.shape.layer_id);
  if (!leads) return Within(path, leads.error());
  std::vector<std::uint32_t> rank(next.cluster.device_count(), 0);
  for (std::uint32_t r = 0; r < next.device.size(); ++r) rank[next.device[r]] = r;
  json told = {{"transfers", json::array()}, {"rounds", moves.rounds}};
  for (const placement::Transfer& one : moves.transfers) {
    told["transfers"].push_back(
        {next.shape.layer_id[one.layer], one.expert, rank[one.from], rank[one.to], one.round});
  }
  SW_TRY_ASSIGN(told["held"], ExpertsOfRank(old_path, state, next));
  return told;
}

Result<json> Calibrate(const json& request) {
  const auto owner = request.at("owner").get<std::vector<std::uint32_t>>();
  const auto planned = request.at("planned").get<std::vector<std::vector<std::uint32_t>>>();
  const auto tokens = request.at("tokens").get<std::vector<std::uint64_t>>();
  const auto node = request.at("node").get<std::vector<std::uint32_t>>();
  const auto spare = request.at("spare").get<std::vector<std::uint32_t>>();
  if (owner.empty() || planned.size() != owner.size() || tokens.size() != owner.size()) {
    return Fail(Errc::kUsage, "calibrate: found owners for ", owner.size(),
                " experts, replicas for ", planned.size(), " and token counts for ", tokens.size());
  }
  if (node.empty() || spare.size() != node.size() || !std::is_sorted(node.begin(), node.end())) {
    return Fail(Errc::kUsage, "calibrate: found spare slots for ", spare.size(),
                " ranks and nodes for ", node.size(),
                ": expected equal numbers, and ascending nodes");
  }
  for (std::size_t e = 0; e < owner.size(); ++e) {
    const auto& held = planned[e];
    const bool sorted = std::is_sorted(held.begin(), held.end(), std::less_equal<>());
    if (sorted && std::binary_search(held.begin(), held.end(), owner[e]) &&
        held.back() < node.size()) {
      continue;
    }
    return Fail(Errc::kUsage, "calibrate: expert ", e,
                ": its ranks must be in ascending order and include the expert's owner, rank ",
                owner[e]);
  }
  placement::Cluster cluster = placement::UniformCluster(node.back() + 1, 1, 1);
  cluster.devices.clear();
  for (const std::uint32_t n : node) cluster.devices.push_back({n, 1});
  const json& asked = request.at("cost");
  placement::CalibrationCost cost;
  cost.seconds_per_token = asked.at("seconds_per_token").get<double>();
  cost.bytes_per_token = asked.at("bytes_per_token").get<double>();
  cost.bytes_per_s = asked.at("bytes_per_s").get<double>();
  cost.expert_bytes = asked.at("expert_bytes").get<std::uint64_t>();
  const placement::Calibrated found =
      placement::Calibrate(owner, planned, tokens, placement::LiveDevices(cluster),
                           request.at("overlap").get<std::uint32_t>(), spare, cost);
  return json{{"holders", found.holders}, {"changed", found.changed}};
}

}  // namespace

std::string ReadPlanRequest(const std::string& request) { return Answer(request, ReadPlan); }

std::string PlanMovesRequest(const std::string& request) { return Answer(request, PlanMoves); }

std::string CalibrateRequest(const std::string& request) { return Answer(request, Calibrate); }

}  // namespace shardwright::trainer_torch
