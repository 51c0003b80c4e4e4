// SPDX-License-Identifier: Apache-2.0
#include "partial/planner/tune.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "partial/planner/forecast/baselines.h"
#include "partial/planner/forecast/overhead.h"
#include "partial/select/sharding/saved_model.h"
#include "support/base/bytes.h"
#include "support/base/checked.h"
#include "support/base/text.h"

namespace shardwright::partial {
namespace {

using Json = nlohmann::json;

/// Returns the bytes that ranks save. With ZeRO, all ranks have equal parts of the
/// non-expert state, the last one padded, as in the trainers that implement it.
Result<SavedModel> ModelOf(const Job& job, const Keep& keep, std::uint64_t zero_stage) {
  SW_TRY_ASSIGN(SavedModel model, SavedModelOf(job.model, keep, job.map, job.ranks,
                                               static_cast<std::uint32_t>(zero_stage)));
  std::uint64_t& split = model.options.nonexpert_split;
  const std::uint64_t part = CeilDiv(split, model.ranks.dp);
  SW_TRY_ASSIGN(split, CheckedMul(part, model.ranks.dp));
  return model;
}

/// \param snapshot_rank_bytes, persist_rank_bytes  of the rank that saves most
Result<TunedNumbers> NumbersOf(const Job& job, const AutoInput& input, const AutoConfig& config,
                               std::uint64_t snapshot_rank_bytes,
                               std::uint64_t persist_rank_bytes) {
  TunedNumbers n;
  n.config = config;
  SW_TRY_ASSIGN(n.snapshot, SizeForK(job.model, n.config.k_snapshot, job.keep));
  SW_TRY_ASSIGN(n.persist, SizeForK(job.model, n.config.k_persist, job.keep));
  n.snapshot_rank_bytes = snapshot_rank_bytes;
  n.persist_rank_bytes = persist_rank_bytes;
  const auto interval = static_cast<double>(n.config.interval);
  const double faults = input.fault_rate * input.iterations;
  n.stalls_s = n.config.stall_s * input.iterations / interval;
  n.restarts_s = faults * input.restart_s;
  n.repeated_s = faults * interval * input.iteration_s / 2;
  SW_TRY_ASSIGN(n.rate_s, OverheadRate({n.config.stall_s, interval, input.iteration_s,
                                        input.fault_rate, input.restart_s}));
  return n;
}

/// Returns the numbers of checkpoints that the ranks divide as the tables of the input state.
Result<TunedNumbers> NumbersOf(const Job& job, const AutoInput& input, const AutoConfig& config) {
  return NumbersOf(job, input, config, input.snapshot.bytes[config.k_snapshot - 1],
                   input.persist.bytes[config.k_persist - 1]);
}

/// Returns the numbers of the same job with full checkpoints (K = N).
Result<TunedNumbers> FullNumbers(const Job& job, AutoInput input, const StopCheck& stop) {
  const std::size_t experts = input.snapshot.bytes.size();
  for (BottleneckTable* table : {&input.snapshot, &input.persist}) {
    // With equal costs for all K, ChooseConfig chooses K = N.
    std::fill(table->bytes.begin(), table->bytes.end(), table->bytes[experts - 1]);
  }
  SW_TRY_ASSIGN(const AutoConfig config, ChooseConfig(input, stop));
  return NumbersOf(job, input, config);
}

/// Sets `replay` to the best lossless run, or `no_replay` to the reason why there is none.
Status TuneReplay(const Job& job, const StopCheck& stop, Tuning* tuning) {
  const AutoInput& input = tuning->input;
  tuning->no_replay = job.no_replay;
  if (!tuning->no_replay.empty()) return {};
  SW_TRY_ASSIGN(const std::optional<ReplayConfig> chosen, ChooseReplay(input, stop));
  if (!chosen) {
    const auto share = static_cast<std::uint64_t>(static_cast<double>(input.log_bytes) /
                                                  input.ranks / input.iteration_s);
    tuning->no_replay =
        input.persist.bytes.size() < 2
            ? "layers have one expert, so there is nothing to select"
            : "the gradients of a rank take " + FormatBytes(share) + "/s, storage allows " +
                  FormatBytes(static_cast<std::uint64_t>(input.persist_bytes_per_s)) + "/s";
    return {};
  }
  TunedReplay& replay = tuning->replay.emplace();
  SW_TRY_ASSIGN(replay.numbers, NumbersOf(job, input, chosen->config));
  const double faults = input.fault_rate * input.iterations;
  replay.replay_s = chosen->replay_s;
  replay.window = chosen->window;
  replay.numbers.log_stalls_s = chosen->log_stall_s * input.iterations;
  replay.numbers.replays_s = faults * chosen->replay_s;
  replay.numbers.rate_s += chosen->log_stall_s + input.fault_rate * chosen->replay_s;
  return {};
}

/// Returns the number of data-parallel ranks of a node. Its GPUs include their tensor-parallel
/// ranks.
std::uint64_t RanksOfNode(const Job& job, std::uint64_t tp) {
  return std::max<std::uint64_t>(job.ranks_per_node / tp, 1);
}

/// Sets the times of a step, computed or as measured.
Status SetTimes(const TuneRequest& request, const Job& job, Tuning* tuning) {
  AutoInput& input = tuning->input;
  input.forward_backward_s = request.job.forward_backward_s;
  input.iteration_s = request.job.iteration_s;
  const StepRequest& step = request.step;
  if (!(step.gpu_flops > 0)) return {};
  StepInput of;
  SW_TRY_ASSIGN(of.token_params, TokenParams(job, step.top_k));
  of.gpu_flops = step.gpu_flops;
  of.sequence_length = step.sequence_length.value_or(0);
  of.sequences = step.sequences;
  of.attention_layers = step.attention_layers;
  of.hidden_size = step.hidden_size.value_or(0);
  of.tp = request.tp;
  of.moe_layers = job.map.rank.size();
  of.top_k = step.top_k;
  of.token_bytes = step.token_bytes > 0 ? step.token_bytes : 2 * of.hidden_size;
  const std::uint64_t near = std::min<std::uint64_t>(job.map.ep, RanksOfNode(job, request.tp));
  of.sent_share = 1 - static_cast<double>(near) / static_cast<double>(job.map.ep);
  of.gpu_bytes_per_s = static_cast<double>(step.gpu_bandwidth);
  of.network_bytes_per_s = static_cast<double>(request.network_bandwidth);
  SW_TRY_ASSIGN(tuning->step, ForwardBackwardTime(of));
  input.forward_backward_s = tuning->step->seconds();
  if (!step.iteration_given) input.iteration_s = input.forward_backward_s;
  if (input.iteration_s >= input.forward_backward_s) return {};
  return Fail(Errc::kUsage, "--iteration-time ", Fixed(input.iteration_s, 3),
              " s is shorter than the computed forward and backward pass of ",
              Fixed(input.forward_backward_s, 3), " s; check --gpu-flops");
}

/// Divides the bytes of every rank among its tensor-parallel ranks.
void DivideAmongTensorRanks(std::uint64_t tp, BottleneckTable* table) {
  for (std::uint64_t& bytes : table->bytes) bytes = CeilDiv(bytes, tp);
}

/// Sets the numbers of full checkpoints of other systems, in which copies do not share the work.
Status TuneBaselines(const Job& job, const TuneRequest& request, Tuning* tuning) {
  const AutoInput& input = tuning->input;
  SW_TRY_ASSIGN(const SavedModel model, ModelOf(job, {}, request.zero_stage));
  SW_TRY_ASSIGN(const std::vector<std::uint64_t> rank_bytes,
                UnsharedBytes(model, SelectAll(job.experts())));
  const std::uint64_t most =
      CeilDiv(*std::max_element(rank_bytes.begin(), rank_bytes.end()), request.tp);
  SW_TRY_ASSIGN(const AutoConfig checkfreq, CheckFreqConfig(input, most));
  SW_TRY_ASSIGN(tuning->checkfreq, NumbersOf(job, input, checkfreq, most, most));
  SW_TRY_ASSIGN(const AutoConfig blocking, BlockingConfig(input, most));
  SW_TRY_ASSIGN(tuning->blocking, NumbersOf(job, input, blocking, most, most));
  if (request.network_bandwidth == 0) return {};
  SW_TRY_ASSIGN(const AutoConfig gemini,
                GeminiConfig(input, most, static_cast<double>(request.network_bandwidth)));
  SW_TRY_ASSIGN(tuning->gemini, NumbersOf(job, input, gemini, most, most));
  return {};
}

/// Sets the reduction of the stall and the speed-up of every configuration.
void CompareWithBlocking(Tuning* tuning) {
  const AutoInput& input = tuning->input;
  const double blocking_s = tuning->blocking.config.stall_s;
  std::vector<TunedNumbers*> all = {&tuning->chosen, &tuning->full, &tuning->checkfreq,
                                    &tuning->blocking};
  if (tuning->replay) all.push_back(&tuning->replay->numbers);
  if (tuning->gemini) all.push_back(&*tuning->gemini);
  for (TunedNumbers* const one : all) {
    const double log_stall_s = one->log_stalls_s / input.iterations;
    one->stall_reduction = StallReduction(one->config.stall_s, blocking_s);
    one->speed_up =
        (input.iteration_s + blocking_s) / (input.iteration_s + one->config.stall_s + log_stall_s);
  }
}

TunedBest BestOf(const Tuning& tuning) {
  double least = tuning.full.config.overhead_s;
  TunedBest best = TunedBest::kFull;
  if (tuning.replay && tuning.replay->numbers.config.overhead_s < least) {
    least = tuning.replay->numbers.config.overhead_s;
    best = TunedBest::kReplay;
  }
  const AutoConfig& chosen = tuning.chosen.config;
  return chosen.plt_in_limit && chosen.overhead_s <= least ? TunedBest::kChosen : best;
}

Json NumbersJson(const TunedNumbers& n) {
  return {{"k", n.config.k_snapshot},
          {"k_persist", n.config.k_persist},
          {"interval", n.config.interval},
          {"snapshot_bytes", n.snapshot.bytes},
          {"bytes", n.persist.bytes},
          {"full_bytes", n.persist.full_bytes},
          {"snapshot_bottleneck_bytes", n.snapshot_rank_bytes},
          {"bottleneck_bytes", n.persist_rank_bytes},
          {"snapshot_s", n.config.snapshot_s},
          {"persist_s", n.config.persist_s},
          {"stall_s", n.config.stall_s},
          {"stall_reduction", n.stall_reduction},
          {"speed_up", n.speed_up},
          {"stalls_s", n.stalls_s},
          {"restarts_s", n.restarts_s},
          {"repeated_s", n.repeated_s},
          {"overhead_s", n.config.overhead_s},
          {"overhead_per_iteration_s", n.rate_s},
          {"expected_plt", n.config.expected_plt},
          {"plt_in_limit", n.config.plt_in_limit},
          {"ettr", n.config.ettr}};
}

Json ReplayJson(const Tuning& tuning) {
  if (!tuning.replay) return nullptr;
  const TunedReplay& replay = *tuning.replay;
  Json json = NumbersJson(replay.numbers);
  json["log"] = {{"bytes", tuning.input.log_bytes},
                 {"stalls_s", replay.numbers.log_stalls_s},
                 {"replay_s", replay.replay_s},
                 {"replays_s", replay.numbers.replays_s},
                 {"window", replay.window}};
  return json;
}

const char* NameOf(TunedBest best) {
  switch (best) {
    case TunedBest::kFull:
      return "full";
    case TunedBest::kReplay:
      return "gradient-log";
    case TunedBest::kChosen:
      break;
  }
  return "chosen";
}

Json TimesJson(const Tuning& tuning) {
  Json json = {{"forward_backward_s", tuning.input.forward_backward_s},
               {"iteration_s", tuning.input.iteration_s},
               {"computed", nullptr}};
  if (!tuning.step) return json;
  json["computed"] = {{"flops", tuning.step->flops},
                      {"compute_s", tuning.step->compute_s},
                      {"reduce_s", tuning.step->reduce_s},
                      {"exchange_s", tuning.step->exchange_s}};
  return json;
}

Json MeasuredJson(const Bandwidths& measured) {
  return {{"bytes", kMeasuredBytes},
          {"persist_bytes_per_s", measured.persist_bytes_per_s},
          {"snapshot_bytes_per_s", measured.snapshot_bytes_per_s}};
}

}  // namespace

Result<Tuning> Tune(const TuneRequest& request, const Job& job,
                    const std::optional<Bandwidths>& measured, const StopCheck& stop) {
  SW_TRY_ASSIGN(const SavedModel model, ModelOf(job, job.keep, request.zero_stage));
  Tuning tuning;
  tuning.measured = measured;
  AutoInput& input = tuning.input;
  // The bytes per rank repeat after at most ep checkpoints.
  SW_TRY_ASSIGN(input.snapshot, BottleneckByK(model, job.map.ep, 1, stop));
  DivideAmongTensorRanks(request.tp, &input.snapshot);
  input.persist = input.snapshot;
  input.snapshot_bytes_per_s = measured ? measured->snapshot_bytes_per_s
                                        : static_cast<double>(request.job.snapshot_bandwidth);
  input.persist_bytes_per_s =
      measured ? measured->persist_bytes_per_s : static_cast<double>(request.job.persist_bandwidth);
  SW_TRY(SetTimes(request, job, &tuning));
  input.fault_rate = request.fault_rate;
  input.restart_s = request.job.restart_s;
  input.iterations = static_cast<double>(request.iterations);
  input.plt_limit = request.plt_limit;
  input.lost_share = request.lost_share.value_or(
      std::min(1.0, static_cast<double>(job.ranks_per_node) /
                        (static_cast<double>(job.ranks.dp) * static_cast<double>(request.tp))));
  input.interval = request.interval;
  SW_TRY_ASSIGN(input.log_bytes, LogBytes(job.model.expert));
  SW_TRY_ASSIGN(const std::uint64_t gpus, CheckedMul(job.ranks.dp, request.tp));
  if (gpus > kMostJobRanks) {
    return Fail(Errc::kUsage, "--tp ", request.tp, ": ", gpus, " ranks in all, at most ",
                kMostJobRanks, " are supported");
  }
  input.ranks = static_cast<std::uint32_t>(gpus);
  input.replay_elems_per_s = static_cast<double>(request.job.replay_speed);
  SW_TRY_ASSIGN(const AutoConfig config, ChooseConfig(input, stop));
  SW_TRY_ASSIGN(tuning.chosen, NumbersOf(job, input, config));
  SW_TRY_ASSIGN(tuning.full, FullNumbers(job, input, stop));
  SW_TRY(TuneReplay(job, stop, &tuning));
  SW_TRY(TuneBaselines(job, request, &tuning));
  CompareWithBlocking(&tuning);
  tuning.best = BestOf(tuning);
  return tuning;
}

Json TuningJson(const Tuning& tuning) {
  const AutoInput& input = tuning.input;
  const bool in_limit = tuning.chosen.config.plt_in_limit;
  const Json partial = NumbersJson(tuning.chosen);
  return {{"chosen", in_limit ? partial : Json(nullptr)},
          {"closest", in_limit ? Json(nullptr) : partial},
          {"full", NumbersJson(tuning.full)},
          {"replay", ReplayJson(tuning)},
          {"gemini", tuning.gemini ? NumbersJson(*tuning.gemini) : Json(nullptr)},
          {"checkfreq", NumbersJson(tuning.checkfreq)},
          {"blocking", NumbersJson(tuning.blocking)},
          {"no_replay", tuning.no_replay.empty() ? Json(nullptr) : Json(tuning.no_replay)},
          {"best", NameOf(tuning.best)},
          {"times", TimesJson(tuning)},
          {"bottleneck_bytes_by_k", input.snapshot.bytes},
          {"plt_limit", input.plt_limit},
          {"lost_share", input.lost_share},
          {"measured", tuning.measured ? MeasuredJson(*tuning.measured) : Json(nullptr)},
          {"faults", input.fault_rate * input.iterations}};
}

}  // namespace shardwright::partial
