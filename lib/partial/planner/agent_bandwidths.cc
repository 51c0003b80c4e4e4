// SPDX-License-Identifier: Apache-2.0
#include "partial/planner/agent_bandwidths.h"

#include <algorithm>
#include <cmath>

#include "support/json/json.h"

namespace shardwright::partial {
namespace {

constexpr std::uint64_t kMostCopiedBytes = std::uint64_t{1} << 62;

/// Divides two members of an object. Returns nullopt if nothing was copied.
Result<std::optional<double>> RateOf(const json::Json& object, const char* bytes_name,
                                     const char* seconds_name, const std::string& where) {
  const json::Json* const bytes = json::Find(object, bytes_name);
  const json::Json* const seconds = json::Find(object, seconds_name);
  if (bytes == nullptr || seconds == nullptr) {
    return Fail(Errc::kUnsupported, where, ": the agent does not report ", bytes_name, " and ",
                seconds_name, "; restart it with this version");
  }
  SW_TRY_ASSIGN(const std::uint64_t copied,
                json::WholeOf(*bytes, 0, kMostCopiedBytes, StrCat(where, ": ", bytes_name)));
  const double taken_s = seconds->is_number() ? seconds->get<double>() : -1;
  if (!(taken_s >= 0) || !std::isfinite(taken_s)) {
    return Fail(Errc::kBadInput, where, ": ", seconds_name, ": expected seconds, found ",
                json::KindOf(*seconds));
  }
  std::optional<double> rate;
  if (copied > 0 && taken_s > 0) rate = static_cast<double>(copied) / taken_s;
  return rate;
}

}  // namespace

Result<AgentBandwidths> BandwidthsOf(const json::Json& status, const std::string& where) {
  AgentBandwidths measured;
  SW_TRY_ASSIGN(measured.host_bytes_per_s,
                RateOf(status, "snapshot_bytes", "snapshot_seconds", where));
  const json::Json* const peers = json::Find(status, "peers");
  if (peers == nullptr) return measured;
  if (!peers->is_array()) return Fail(Errc::kBadInput, where, ": peers: expected a list");
  std::optional<double> slowest;
  for (const json::Json& peer : *peers) {
    const json::Json* const address = peer.is_object() ? json::Find(peer, "address") : nullptr;
    if (address == nullptr || !address->is_string()) {
      return Fail(Errc::kBadInput, where, ": peers: expected objects with an address");
    }
    SW_TRY_ASSIGN(const std::optional<double> rate,
                  RateOf(peer, "copied_bytes", "copied_seconds", where));
    if (!rate) {
      measured.unmeasured.push_back(address->get<std::string>());
      continue;
    }
    slowest = slowest ? std::min(*slowest, *rate) : *rate;
  }
  if (measured.unmeasured.empty()) measured.network_bytes_per_s = slowest;
  return measured;
}

Status CheckMeasured(const AgentBandwidths& measured, bool network, const std::string& where) {
  if (!measured.host_bytes_per_s) {
    return Fail(Errc::kNotFound, where,
                ": the agent has not copied a snapshot yet, so it has no bandwidth to host memory; "
                "take one with pec-save tell ",
                where, " snapshot");
  }
  if (!network || measured.unmeasured.empty()) return {};
  return Fail(Errc::kNotFound, where, ": the agent has not completed a copy to its peer ",
              measured.unmeasured.front(),
              " yet; wait for it (pec-save status), or pass --network-bandwidth");
}

json::Json BandwidthsJson(const AgentBandwidths& measured) {
  const auto rate = [](const std::optional<double>& value) {
    return value ? json::Json(*value) : json::Json(nullptr);
  };
  return {{"host_bytes_per_s", rate(measured.host_bytes_per_s)},
          {"network_bytes_per_s", rate(measured.network_bytes_per_s)}};
}

std::uint64_t BandwidthOfRank(double bytes_per_s, std::uint64_t ranks) {
  const double share = bytes_per_s / static_cast<double>(std::max<std::uint64_t>(ranks, 1));
  return static_cast<std::uint64_t>(std::clamp(share, 1.0, 0x1p62));
}

}  // namespace shardwright::partial
