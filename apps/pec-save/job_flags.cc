#include "pec-save/job_flags.h"

#include "base/limits.h"
#include "cli/flags.h"
#include "common/pec.h"
#include "common/ucp.h"

namespace shardwright::apps {
namespace {

constexpr std::uint64_t kMostParams = std::uint64_t{1} << 48;
constexpr std::uint64_t kMostModules = 1'000'000;

/// "PARAMS[xCOUNT],..." as parameters by module.
Result<std::vector<std::uint64_t>> ParseModules(const std::string& text) {
  std::vector<std::uint64_t> params;
  for (const std::string& part : Split(text, ',')) {
    const std::vector<std::string> factors = Split(part, 'x');
    if (factors.size() > 2) {
      return Fail(Errc::kUsage, "\"" + part + "\": expected PARAMS or PARAMSxCOUNT");
    }
    SW_TRY_ASSIGN(const std::uint64_t one, cli::ParseCount(factors[0], 0, kMostParams));
    std::uint64_t count = 1;
    if (factors.size() == 2) {
      SW_TRY_ASSIGN(count, cli::ParseCount(factors[1], 1, kMostModules));
    }
    if (count > kMostModules - params.size()) {
      return Fail(Errc::kLimit, "more than " + std::to_string(kMostModules) + " modules");
    }
    params.insert(params.end(), count, one);
  }
  return params;
}

/// "WEIGHTS,MASTER,MOMENTS".
Result<pec::ComponentBytes> ParseParamBytes(const std::string& text) {
  const std::vector<std::string> parts = Split(text, ',');
  if (parts.size() != 3) {
    return Fail(Errc::kUsage,
                "\"" + text + "\": expected three numbers, found " + std::to_string(parts.size()));
  }
  pec::ComponentBytes bytes;
  SW_TRY_ASSIGN(bytes.weights, cli::ParseCount(parts[0], 0, 64));
  SW_TRY_ASSIGN(bytes.master, cli::ParseCount(parts[1], 0, 64));
  SW_TRY_ASSIGN(bytes.moments, cli::ParseCount(parts[2], 0, 64));
  return bytes;
}

}  // namespace

void JobFlags::AddTo(cli::App& app, pec::JobRequest* job, bool shape) {
  app.AddOptionalInput(&job->store, "store whose newest checkpoint says the sizes", "STORE");
  app.Daily({"--ep", "--dp"});
  app.Group("The job");
  if (shape) {
    app.AddCount("--experts", &job->experts, 1, limits::kMoeExperts, "experts of each MoE layer");
    app.AddCount("--moe-layers", &job->moe_layers, 1, limits::kMoeLayers,
                 "MoE layers of the model");
  }
  app.AddCount("--expert-params", &job->expert_params, 1, kMostParams,
               "parameters of an expert; without sizes or a STORE all is as in GPT-350M-16E");
  app.AddText("--nonexpert-params", &nonexpert_params,
              "parameters of the non-expert modules, as PARAMS or PARAMSxCOUNT, separated by "
              "commas",
              "LIST");
  app.AddText("--param-bytes", &param_bytes,
              "bytes of a parameter's weight, master weight and moments", "W,M,O");
  app.AddList("--keep", &keep,
              "component saved of every expert each time: weights, master or moments", "COMPONENT");
  AddPatterns(app, &job->pattern_files);
  app.AddCount("--ep", &job->ep, 1, pec::kMostJobRanks,
               "expert-parallel ranks, a divisor of the experts [default: the store's, or as many "
               "as experts]");
  app.AddCount("--dp", &job->dp, 1, pec::kMostJobRanks,
               "data-parallel ranks, a multiple of --ep [default: the store's if they are one, or "
               "--ep]");
  app.AddCount("--ranks-per-node", &job->ranks_per_node, 1, pec::kMostJobRanks,
               "consecutive ranks whose memory a fault of their node takes");
  app.AddBandwidth("--snapshot-bandwidth", &job->snapshot_bandwidth,
                   "bytes per second of a rank into memory");
  app.AddReal("--iteration-time", &job->iteration_s, 1e-6, 1e6, "seconds of an iteration");
}

void AddStepTimes(cli::App& app, pec::JobRequest* job) {
  app.AddReal("--forward-backward", &job->forward_backward_s, 1e-6, 1e6,
              "seconds of a forward and backward pass, which hide a snapshot");
  app.AddReal("--restart-time", &job->restart_s, 0, 1e7, "seconds of a restart after a fault");
  app.AddBandwidth("--persist-bandwidth", &job->persist_bandwidth,
                   "bytes per second of a rank into storage, and out of it");
  app.AddCount("--replay-speed", &job->replay_speed, 1, std::uint64_t{1} << 53,
               "elements of experts whose step a rank makes again in a second");
}

Status JobFlags::Complete(const cli::App& app, pec::JobRequest* job) const {
  if (!job->store.empty()) {
    return app.Refuse({"--experts", "--moe-layers", "--expert-params", "--nonexpert-params",
                       "--param-bytes", "--keep"},
                      "with " + job->store + ", whose newest checkpoint says it");
  }
  SW_TRY(app.Refuse({"--patterns"}, "without a store"));
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
      return Fail(Errc::kUsage, "\"" + part + "\": expected RANK or FIRST-LAST");
    }
    SW_TRY_ASSIGN(const std::uint64_t first,
                  cli::ParseCount(ends.front(), 0, pec::kMostJobRanks - 1));
    SW_TRY_ASSIGN(const std::uint64_t last,
                  cli::ParseCount(ends.back(), first, pec::kMostJobRanks - 1));
    if (last - first >= pec::kMostJobRanks - ranks.size()) {
      return Fail(Errc::kLimit, "more than " + std::to_string(pec::kMostJobRanks) + " ranks");
    }
    for (std::uint64_t rank = first; rank <= last; ++rank) {
      ranks.push_back(static_cast<std::uint32_t>(rank));
    }
  }
  return ranks;
}

}  // namespace shardwright::apps
