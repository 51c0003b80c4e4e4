#include "pec-save/job.h"

#include <algorithm>
#include <utility>

#include "base/checked.h"
#include "base/limits.h"
#include "cli/flags.h"
#include "common/pec.h"
#include "dialect/dialect.h"
#include "pec/store.h"
#include "ucp/input.h"

namespace shardwright::apps {
namespace {

constexpr std::uint64_t kMostParams = std::uint64_t{1} << 48;
constexpr std::uint64_t kMostModules = 1'000'000;
constexpr std::uint64_t kMostRanks = 1'000'000;

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

pec::ComponentBytes BytesOf(const pec::HeldModule& module) {
  const auto bytes = [&](pec::Component component) -> std::uint64_t {
    const auto& held = module[static_cast<std::size_t>(component)];
    return held ? held->blob.bytes : 0;
  };
  return {bytes(pec::Component::kWeights), bytes(pec::Component::kMaster),
          bytes(pec::Component::kMoments)};
}

/// Experts that were never saved are as large as others of their layer.
void FillUnknown(std::vector<pec::ComponentBytes>* layer) {
  pec::ComponentBytes most;
  for (const pec::ComponentBytes& expert : *layer) {
    most = {std::max(most.weights, expert.weights), std::max(most.master, expert.master),
            std::max(most.moments, expert.moments)};
  }
  for (pec::ComponentBytes& expert : *layer) {
    if (expert.weights == 0) expert.weights = most.weights;
    if (expert.master == 0) expert.master = most.master;
    if (expert.moments == 0) expert.moments = most.moments;
  }
}

pec::Keep KeepOf(const pec::KeptComponents& keep) { return {keep[0], keep[1], keep[2]}; }

std::vector<std::uint32_t> Numbers(std::size_t count) {
  std::vector<std::uint32_t> numbers;
  for (std::size_t i = 0; i < count; ++i) numbers.push_back(static_cast<std::uint32_t>(i));
  return numbers;
}

}  // namespace

std::uint32_t Job::nodes() const {
  return static_cast<std::uint32_t>(CeilDiv(ranks.dp, ranks_per_node));
}

void JobFlags::AddTo(cli::App& app) {
  app.AddCount("--experts", &experts, 1, limits::kMoeExperts, "experts of each MoE layer");
  app.AddCount("--moe-layers", &moe_layers, 1, limits::kMoeLayers, "MoE layers of the model");
  app.AddCount("--expert-params", &expert_params, 1, kMostParams,
               "parameters of an expert; without sizes or a STORE all is as in GPT-350M-16E");
  app.AddText("--nonexpert-params", &nonexpert_params,
              "parameters of the non-expert modules, as PARAMS or PARAMSxCOUNT, separated by "
              "commas",
              "LIST");
  app.AddText("--param-bytes", &param_bytes,
              "bytes of a parameter's weight, master weight and moments", "W,M,O");
  app.AddCount(
      "--ep", &ep, 1, kMostRanks,
      "expert-parallel ranks, a divisor of the experts [default: those of the store's newest "
      "checkpoint, or as many as experts]");
  app.AddCount("--dp", &dp, 1, kMostRanks,
               "data-parallel ranks, a multiple of --ep [default: those of the store's newest "
               "checkpoint if they are one, or --ep]");
  app.AddCount("--ranks-per-node", &ranks_per_node, 1, kMostRanks,
               "consecutive ranks whose memory a fault of their node takes");
  app.AddSize("--snapshot-bandwidth", &snapshot_bandwidth,
              "bytes per second of a rank into memory");
  app.AddReal("--forward-backward", &forward_backward_s, 1e-6, 1e6,
              "seconds of a forward and backward pass, which hide a snapshot");
  app.AddReal("--iteration-time", &iteration_s, 1e-6, 1e6, "seconds of an iteration");
  app.AddReal("--restart-time", &restart_s, 0, 1e7, "seconds of a restart after a fault");
}

Status JobFlags::ReadStore(Job* job) const {
  SW_TRY_ASSIGN(const pec::Store from, pec::Store::Open(store));
  SW_TRY_ASSIGN(const std::vector<pec::StoredCheckpoint> list, from.List());
  const auto usable =
      std::find_if(list.rbegin(), list.rend(), [](const auto& one) { return !one.abandoned; });
  if (usable == list.rend()) {
    return Fail(Errc::kNotFound, store + ": holds no checkpoint to take sizes from");
  }
  SW_TRY_ASSIGN(pec::Manifest manifest, from.ReadManifest(*usable));
  const pec::StoreHead& head = from.head();
  job->state = manifest.state;
  SW_TRY_ASSIGN(const std::optional<pec::Recovery> last, from.LastRecovery());
  if (last && last->manifest == manifest.sequence) job->state = last->state;
  std::uint64_t of_experts = 0;
  for (const std::uint32_t count : head.experts) of_experts += count;
  if (head.experts.empty() || of_experts > manifest.modules.size()) {
    return Fail(Errc::kUsage, store + ": a model of " + std::to_string(of_experts) +
                                  " experts among " + std::to_string(manifest.modules.size()) +
                                  " modules: there is nothing to select");
  }
  std::size_t next = manifest.modules.size() - of_experts;
  for (std::size_t i = 0; i < next; ++i) {
    job->model.nonexpert.push_back(BytesOf(manifest.modules[i]));
    job->names.push_back(manifest.names[i]);
  }
  for (const std::uint32_t count : head.experts) {
    auto& layer = job->model.expert.emplace_back();
    for (std::uint32_t e = 0; e < count; ++e) layer.push_back(BytesOf(manifest.modules[next++]));
    FillUnknown(&layer);
  }
  SW_TRY_ASSIGN(const dialect::SourceSet source, from.ReadCatalogue(manifest));
  SW_TRY_ASSIGN(const dialect::Patterns rules, ucp::ReadPatterns(patterns));
  SW_TRY_ASSIGN(const dialect::Checkpoint checkpoint, dialect::ReadCheckpoint(source, rules));
  job->topology = checkpoint.topology;
  job->keep = KeepOf(head.keep);
  job->layer_id = head.layer_id;
  job->newest = std::move(manifest);
  return {};
}

Status JobFlags::ReadSizes(Job* job) const {
  auto bytes = ParseParamBytes(param_bytes);
  if (!bytes) return Within("--param-bytes", std::move(bytes).error());
  auto modules = ParseModules(nonexpert_params);
  if (!modules) return Within("--nonexpert-params", std::move(modules).error());
  for (const std::uint64_t params : *modules) {
    SW_TRY_ASSIGN(const pec::ComponentBytes module, pec::BytesOfParams(params, *bytes));
    job->names.push_back("module " + std::to_string(job->names.size()));
    job->model.nonexpert.push_back(module);
  }
  SW_TRY_ASSIGN(const pec::ComponentBytes expert, pec::BytesOfParams(expert_params, *bytes));
  const auto layers = static_cast<std::size_t>(moe_layers);
  if (moe_layers * experts > limits::kMoeCounts) {
    return Fail(Errc::kLimit, std::to_string(moe_layers) + " layers of " + std::to_string(experts) +
                                  " experts, at most " + std::to_string(limits::kMoeCounts) +
                                  " experts");
  }
  job->model.expert.assign(layers, std::vector<pec::ComponentBytes>(experts, expert));
  job->layer_id = Numbers(layers);
  return {};
}

Result<Job> JobFlags::Read(const cli::App& app, const std::vector<std::string>& keep,
                           const std::optional<Shape>& trace) const {
  Job job;
  if (!store.empty()) {
    SW_TRY(ReadStore(&job));
  } else {
    JobFlags sizes = *this;
    if (trace) {
      sizes.experts = trace->experts;
      sizes.moe_layers = trace->layer_id.size();
    }
    SW_TRY(sizes.ReadSizes(&job));
    if (app.Given("--keep")) {
      SW_TRY_ASSIGN(const pec::KeptComponents kept, ParseKeep(keep));
      job.keep = KeepOf(kept);
    }
  }
  const pec::LayerExperts shape = pec::ShapeOf(job.model.expert);
  if (trace) {
    const pec::LayerExperts played(trace->layer_id.size(), trace->experts);
    if (played != shape) {
      return Fail(Errc::kMismatch, "the trace has " + std::to_string(played.size()) +
                                       " layers of " + std::to_string(trace->experts) +
                                       " experts, " + store + " " + std::to_string(shape.size()) +
                                       " layers of " + std::to_string(shape.front()));
    }
    job.layer_id = trace->layer_id;
  }
  std::uint64_t ranks_ep = ep;
  if (ep == kFromModel) {
    ranks_ep = job.topology ? job.topology->ep : *std::min_element(shape.begin(), shape.end());
  }
  std::uint64_t ranks_dp = dp;
  if (dp == kFromModel) {
    // The store's ranks, if they hold what was asked for.
    const bool fits = job.topology && job.topology->dp % ranks_ep == 0;
    ranks_dp = fits ? job.topology->dp : ranks_ep;
  }
  SW_TRY_ASSIGN(job.map, pec::EvenExpertMap(shape, static_cast<std::uint32_t>(ranks_ep)));
  job.ranks.dp = static_cast<std::uint32_t>(ranks_dp);
  SW_TRY(pec::Validate(job.ranks, static_cast<std::uint32_t>(ranks_ep)));
  job.ranks_per_node = static_cast<std::uint32_t>(ranks_per_node);
  return job;
}

Result<std::vector<std::uint32_t>> ParseRanks(const std::string& text) {
  std::vector<std::uint32_t> ranks;
  for (const std::string& part : Split(text, ',')) {
    const std::vector<std::string> ends = Split(part, '-');
    if (ends.size() > 2) {
      return Fail(Errc::kUsage, "\"" + part + "\": expected RANK or FIRST-LAST");
    }
    SW_TRY_ASSIGN(const std::uint64_t first, cli::ParseCount(ends.front(), 0, kMostRanks - 1));
    SW_TRY_ASSIGN(const std::uint64_t last, cli::ParseCount(ends.back(), first, kMostRanks - 1));
    if (last - first >= kMostRanks - ranks.size()) {
      return Fail(Errc::kLimit, "more than " + std::to_string(kMostRanks) + " ranks");
    }
    for (std::uint64_t rank = first; rank <= last; ++rank) {
      ranks.push_back(static_cast<std::uint32_t>(rank));
    }
  }
  return ranks;
}

Result<std::uint64_t> FullBytes(const pec::ModelBytes& model) {
  SW_TRY_ASSIGN(const pec::CheckpointSize size,
                pec::SizeOfCheckpoint(model, pec::SelectAll(pec::ShapeOf(model.expert)), {}));
  return size.bytes;
}

}  // namespace shardwright::apps
