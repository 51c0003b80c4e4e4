// SPDX-License-Identifier: Apache-2.0
#include "pec-save/job_flags.h"

#include "common/pec.h"
#include "common/ucp.h"
#include "support/base/limits.h"
#include "support/cli/flags.h"

namespace shardwright::apps {
namespace {

constexpr std::uint64_t kMostParams = std::uint64_t{1} << 48;
constexpr std::uint64_t kMostModules = 1'000'000;

/// Parses "PARAMS[xCOUNT],..." and returns the parameters of each module.
Result<std::vector<std::uint64_t>> ParseModules(const std::string& text) {
  std::vector<std::uint64_t> params;
  for (const std::string& part : Split(text, ',')) {
    const std::vector<std::string> factors = Split(part, 'x');
    if (factors.size() > 2) {
      return Fail(Errc::kUsage, "\"", part, "\": expected PARAMS or PARAMSxCOUNT");
    }
    SW_TRY_ASSIGN(const std::uint64_t one, cli::ParseCount(factors[0], 0, kMostParams));
    std::uint64_t count = 1;
    if (factors.size() == 2) {
      SW_TRY_ASSIGN(count, cli::ParseCount(factors[1], 1, kMostModules));
    }
    if (count > kMostModules - params.size()) {
      return Fail(Errc::kLimit, "expected at most ", kMostModules, " modules, found more");
    }
    params.insert(params.end(), count, one);
  }
  return params;
}

/// Parses "WEIGHTS,MASTER,MOMENTS", in bytes per parameter.
Result<partial::ComponentBytes> ParseParamBytes(const std::string& text) {
  const std::vector<std::string> parts = Split(text, ',');
  if (parts.size() != 3) {
    return Fail(Errc::kUsage, "\"", text, "\": expected three numbers, found ", parts.size());
  }
  partial::ComponentBytes bytes;
  SW_TRY_ASSIGN(bytes.weights, cli::ParseCount(parts[0], 0, 64));
  SW_TRY_ASSIGN(bytes.master, cli::ParseCount(parts[1], 0, 64));
  SW_TRY_ASSIGN(bytes.moments, cli::ParseCount(parts[2], 0, 64));
  return bytes;
}

}  // namespace

void JobFlags::AddTo(cli::App& app, partial::JobRequest* job, bool shape) {
  app.AddOptionalInput(&job->store, "store; its newest checkpoint provides the sizes", "STORE");
  app.ShowInShortHelp({"--ep", "--dp"});
  app.Group("Job");
  if (shape) {
    app.AddCount("--experts", &job->experts, 1, limits::kMoeExperts,
                 "number of experts in each MoE layer");
    app.AddCount("--moe-layers", &job->moe_layers, 1, limits::kMoeLayers,
                 "number of MoE layers in the model");
  }
  app.AddCount("--expert-params", &job->expert_params, 1, kMostParams,
               "number of parameters of an expert; the default sizes are those of GPT-350M-16E");
  app.AddText("--nonexpert-params", &nonexpert_params,
              "number of parameters of each non-expert module, as PARAMS or PARAMSxCOUNT, "
              "separated by commas",
              "LIST");
  app.AddText("--param-bytes", &param_bytes,
              "bytes per parameter for the weight, the master weight and the moments", "W,M,O");
  app.AddList("--keep", &keep,
              "component saved of every expert in every checkpoint: weights, master or moments",
              "COMPONENT");
  AddPatterns(app, &job->pattern_files);
  app.AddCount("--ep", &job->ep, 1, partial::kMostJobRanks,
               "number of expert-parallel ranks, a divisor of the number of experts [default: that "
               "of the store, or the number of experts]");
  app.AddCount("--dp", &job->dp, 1, partial::kMostJobRanks,
               "number of data-parallel ranks, a multiple of --ep [default: that of the store if "
               "it is a multiple, otherwise --ep]");
  app.AddCount("--ranks-per-node", &job->ranks_per_node, 1, partial::kMostJobRanks,
               "number of consecutive ranks that lose their memory when their node fails");
  app.AddBandwidth("--snapshot-bandwidth", &job->snapshot_bandwidth,
                   "bytes per second that a rank copies into memory");
  app.AddReal("--iteration-time", &job->iteration_s, 1e-6, 1e6, "seconds per iteration");
}

void AddStepTimes(cli::App& app, partial::JobRequest* job) {
  app.AddReal("--forward-backward", &job->forward_backward_s, 1e-6, 1e6,
              "seconds of a forward and backward pass, which hides the time of a snapshot");
  app.AddReal("--restart-time", &job->restart_s, 0, 1e7, "seconds of a restart after a fault");
  app.AddBandwidth("--persist-bandwidth", &job->persist_bandwidth,
                   "bytes per second that a rank writes to storage or reads from it");
  app.AddCount("--replay-speed", &job->replay_speed, 1, std::uint64_t{1} << 53,
               "speed at which a rank replays optimizer steps, in expert elements per second");
}

Status JobFlags::Complete(const cli::App& app, partial::JobRequest* job) const {
  if (!job->store.empty()) {
    return app.Exclude({"--experts", "--moe-layers", "--expert-params", "--nonexpert-params",
                        "--param-bytes", "--keep"},
                       "the store " + job->store + ": its newest checkpoint provides the sizes");
  }
  SW_TRY(app.Require({"--patterns"}, "a STORE"));
  auto bytes = ParseParamBytes(param_bytes);
  if (!bytes) return Within("--param-bytes", std::move(bytes).error());
  job->param_bytes = *bytes;
  auto modules = ParseModules(nonexpert_params);
  if (!modules) return Within("--nonexpert-params", std::move(modules).error());
  job->nonexpert_params = *std::move(modules);
  SW_TRY_ASSIGN(job->keep, ParseKeep(keep));
  return {};
}

Result<std::vector<std::uint32_t>> ParseRanks(const std::string& text) {
  std::vector<std::uint32_t> ranks;
  for (const std::string& part : Split(text, ',')) {
    const std::vector<std::string> ends = Split(part, '-');
    if (ends.size() > 2) {
      return Fail(Errc::kUsage, "\"", part, "\": expected RANK or FIRST-LAST");
    }
    SW_TRY_ASSIGN(const std::uint64_t first,
                  cli::ParseCount(ends.front(), 0, partial::kMostJobRanks - 1));
    SW_TRY_ASSIGN(const std::uint64_t last,
                  cli::ParseCount(ends.back(), first, partial::kMostJobRanks - 1));
    if (last - first >= partial::kMostJobRanks - ranks.size()) {
      return Fail(Errc::kLimit, "expected at most ", partial::kMostJobRanks, " ranks, found more");
    }
    for (std::uint64_t rank = first; rank <= last; ++rank) {
      ranks.push_back(static_cast<std::uint32_t>(rank));
    }
  }
  return ranks;
}

}  // namespace shardwright::apps
