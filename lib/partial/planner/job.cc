// SPDX-License-Identifier: Apache-2.0
#include "partial/planner/job.h"

#include <algorithm>
#include <utility>

#include "checkpoints/registry.h"
#include "convert/input.h"
#include "engine/layout/states.h"
#include "partial/store/store.h"
#include "support/base/checked.h"
#include "support/base/limits.h"
#include "support/base/text.h"

namespace shardwright::partial {
namespace {

ComponentBytes BytesOf(const StoredModule& module) {
  const auto bytes = [&](Component component) -> std::uint64_t {
    const auto& held = module[static_cast<std::size_t>(component)];
    return held ? held->blob.bytes : 0;
  };
  return {bytes(Component::kWeights), bytes(Component::kMaster), bytes(Component::kMoments)};
}

/// Gives components of experts that were never saved the largest size in their layer.
void FillUnknown(std::vector<ComponentBytes>* layer) {
  ComponentBytes most;
  for (const ComponentBytes& expert : *layer) {
    most = {std::max(most.weights, expert.weights), std::max(most.master, expert.master),
            std::max(most.moments, expert.moments)};
  }
  for (ComponentBytes& expert : *layer) {
    if (expert.weights == 0) expert.weights = most.weights;
    if (expert.master == 0) expert.master = most.master;
    if (expert.moments == 0) expert.moments = most.moments;
  }
}

Keep KeepOf(const KeptComponents& keep) { return {keep[0], keep[1], keep[2]}; }

/// Returns why a job cannot run losslessly (docs/lossless.md); empty: it can.
std::string NoReplay(bool single_precision, const Keep& keep) {
  if (keep.master || keep.moments) {
    return "gradients are replayed on master weights and moments of one iteration, but with --keep "
           "these have different iterations";
  }
  if (!single_precision)
    return "gradients are replayed on float32 states with float32 weights or master weights";
  return "";
}

/// Returns true if the master weights, or the weights if there are no master weights, are float32.
bool IsSinglePrecision(const checkpoints::Checkpoint& checkpoint) {
  bool masters = true;
  bool weights = true;
  bool any_master = false;
  for (const layout::LogicalTensor& tensor : checkpoint.map.tensors) {
    if (tensor.state == layout::kMaster) {
      any_master = true;
      masters = masters && tensor.dtype == DType::kF32;
    }
    if (tensor.state == layout::kWeight) weights = weights && tensor.dtype == DType::kF32;
  }
  return any_master ? masters : weights;
}

/// Returns the number of parameters: the elements of the weights, or else of the master weights.
double ParamsOf(const checkpoints::Checkpoint& checkpoint) {
  double weights = 0;
  double masters = 0;
  for (const layout::LogicalTensor& tensor : checkpoint.map.tensors) {
    const auto elems = static_cast<double>(Elems(tensor.shape));
    if (tensor.state == layout::kWeight) weights += elems;
    if (tensor.state == layout::kMaster) masters += elems;
  }
  return std::max(weights, masters);
}

std::vector<std::uint32_t> Numbers(std::size_t count) {
  std::vector<std::uint32_t> numbers;
  for (std::size_t i = 0; i < count; ++i) numbers.push_back(static_cast<std::uint32_t>(i));
  return numbers;
}

Status ReadSizesOfStore(const JobRequest& request, Job* job) {
  const std::string& store = request.store;
  SW_TRY_ASSIGN(const Store from, Store::Open(store));
  SW_TRY_ASSIGN(const std::vector<StoredCheckpoint> list, from.List());
  const auto usable =
      std::find_if(list.rbegin(), list.rend(), [](const auto& one) { return !one.abandoned; });
  if (usable == list.rend()) {
    return Fail(Errc::kNotFound, store, ": the store has no checkpoint that provides sizes");
  }
  SW_TRY_ASSIGN(Manifest manifest, from.ReadManifest(*usable));
  const StoreHead& head = from.head();
  job->state = manifest.state;
  SW_TRY_ASSIGN(const std::optional<RecoveryRecord> last, from.LastRecovery());
  if (last && last->manifest == manifest.sequence) job->state = last->state;
  std::uint64_t of_experts = 0;
  for (const std::uint32_t count : head.experts) of_experts += count;
  if (head.experts.empty() || of_experts > manifest.modules.size()) {
    return Fail(Errc::kUsage, store, ": expected a model with experts, found ", of_experts,
                " experts in ", manifest.modules.size(), " modules");
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
  SW_TRY_ASSIGN(const checkpoints::SourceSet source, from.ReadCatalogue(manifest));
  SW_TRY_ASSIGN(const checkpoints::Patterns rules, convert::ReadPatterns(request.pattern_files));
  SW_TRY_ASSIGN(const checkpoints::Checkpoint checkpoint,
                checkpoints::ReadCheckpoint(source, rules));
  job->mesh = checkpoint.layout.mesh;
  job->params = ParamsOf(checkpoint);
  job->keep = KeepOf(head.keep);
  job->no_replay = NoReplay(IsSinglePrecision(checkpoint), job->keep);
  job->layer_id = head.layer_id;
  job->newest = std::move(manifest);
  return {};
}

/// Takes the sizes from the request. \param experts, layers  from the request or the trace
Status ReadSizes(const JobRequest& request, std::uint64_t experts, std::uint64_t layers, Job* job) {
  if (layers * experts > limits::kMoeCounts) {
    return Fail(Errc::kLimit, layers, " MoE layers of ", experts, " experts: expected at most ",
                limits::kMoeCounts, " experts in total");
  }
  for (const std::uint64_t params : request.nonexpert_params) {
    SW_TRY_ASSIGN(const ComponentBytes module, BytesOfParams(params, request.param_bytes));
    job->names.push_back(StrCat("module ", job->names.size()));
    job->model.nonexpert.push_back(module);
    job->params += static_cast<double>(params);
  }
  job->params += static_cast<double>(layers * experts) * static_cast<double>(request.expert_params);
  SW_TRY_ASSIGN(const ComponentBytes expert,
                BytesOfParams(request.expert_params, request.param_bytes));
  job->model.expert.assign(layers, std::vector<ComponentBytes>(experts, expert));
  job->layer_id = Numbers(layers);
  job->keep = KeepOf(request.keep);
  const ComponentBytes& each = request.param_bytes;
  job->no_replay = NoReplay((each.master > 0 ? each.master : each.weights) == 4, job->keep);
  return {};
}

}  // namespace

std::uint32_t Job::most_experts() const {
  const LayerExperts all = experts();
  return *std::max_element(all.begin(), all.end());
}

std::uint32_t Job::nodes() const {
  return static_cast<std::uint32_t>(CeilDiv(ranks.dp, ranks_per_node));
}

double Job::LostShare(const std::optional<double>& told) const {
  if (told) return *told;
  return std::min(1.0, static_cast<double>(ranks_per_node) / static_cast<double>(ranks.dp));
}

Result<Job> ReadJob(const JobRequest& request, const std::optional<TraceShape>& trace) {
  Job job;
  if (!request.store.empty()) {
    SW_TRY(ReadSizesOfStore(request, &job));
  } else {
    const std::uint64_t experts = trace ? trace->experts : request.experts;
    SW_TRY(ReadSizes(request, experts, trace ? trace->layer_id.size() : request.moe_layers, &job));
  }
  const LayerExperts shape = ShapeOf(job.model.expert);
  if (trace) {
    const LayerExperts played(trace->layer_id.size(), trace->experts);
    if (played != shape) {
      return Fail(Errc::kMismatch, "the trace has ", played.size(), " layers of ", trace->experts,
                  " experts, but ", request.store, " has ", shape.size(), " layers of ",
                  shape.front(), " experts");
    }
    job.layer_id = trace->layer_id;
  }
  const std::uint64_t own_ep =
      job.mesh ? job.mesh->ep : *std::min_element(shape.begin(), shape.end());
  const std::uint64_t ep = request.ep.value_or(own_ep);
  // Use the store's data-parallel size if `ep` divides it, otherwise `ep`.
  const bool fits = job.mesh && job.mesh->dp() % ep == 0;
  const std::uint64_t dp = request.dp.value_or(fits ? job.mesh->dp() : ep);
  SW_TRY_ASSIGN(job.map, EvenExpertMap(shape, static_cast<std::uint32_t>(ep)));
  job.ranks.dp = static_cast<std::uint32_t>(dp);
  SW_TRY(Validate(job.ranks, static_cast<std::uint32_t>(ep)));
  job.ranks_per_node = static_cast<std::uint32_t>(request.ranks_per_node);
  return job;
}

Result<double> TokenParams(const Job& job, std::uint64_t top_k) {
  SW_TRY_ASSIGN(const std::uint64_t all, FullBytes(job.model));
  if (all == 0) return Fail(Errc::kUsage, "a model without bytes has no known parameters");
  const auto bytes_of = [](const ComponentBytes& module) {
    return static_cast<double>(module.weights + module.master + module.moments);
  };
  double passed = 0;
  for (const ComponentBytes& module : job.model.nonexpert) passed += bytes_of(module);
  for (const std::vector<ComponentBytes>& layer : job.model.expert) {
    if (top_k > layer.size()) {
      return Fail(Errc::kUsage, "--top-k ", top_k, ": a layer has ",
                  Plural(layer.size(), "expert"));
    }
    double bytes = 0;
    for (const ComponentBytes& expert : layer) bytes += bytes_of(expert);
    passed += bytes * static_cast<double>(top_k) /
              static_cast<double>(std::max<std::size_t>(layer.size(), 1));
  }
  return job.params * (passed / static_cast<double>(all));
}

Result<std::uint64_t> FullBytes(const ModelBytes& model) {
  SW_TRY_ASSIGN(const CheckpointSize size,
                SizeOfCheckpoint(model, SelectAll(ShapeOf(model.expert)), {}));
  return size.bytes;
}

}  // namespace shardwright::partial
