// SPDX-License-Identifier: Apache-2.0
#include "pec-save/save_flags.h"

#include "common/pec.h"

namespace shardwright::apps {

const std::vector<std::pair<std::string, partial::Policy>>& PolicyWords() {
  static const std::vector<std::pair<std::string, partial::Policy>> kWords = {
      {"sequential", partial::Policy::kSequential},
      {"load-aware", partial::Policy::kLoadAware},
      {"budget", partial::Policy::kBudget},
      {"budget-global", partial::Policy::kBudgetGlobal},
      {"full", partial::Policy::kFull},
      {"gradient-log", partial::Policy::kReplay}};
  return kWords;
}

void SelectionFlags::AddTo(cli::App& app) {
  app.Group("Selection of experts");
  app.AddCount("--k", &k, 1, 65536, "number of experts to select in each MoE layer");
  app.AddCount("--k-persist", &k_persist, 1, 65536,
               "number of selected experts per layer to persist [default: all]");
  app.AddEnum<partial::Policy>(
      "--policy", &policy, PolicyWords(),
      "how experts are selected. sequential: in turn; load-aware: those with "
      "most unsaved tokens; budget, budget-global: within a budget per layer "
      "or over all layers; full: all; gradient-log: in turn or within a budget, "
      "with a log of the gradients of the other experts (docs/lossless.md)");
  app.AddText("--tokens", &tokens, "token counts per expert and iteration (docs/formats/loads.md)",
              "FILE");
  app.AddSize("--budget", &budget,
              "bytes per checkpoint for the budget policies; bytes per iteration, log included, "
              "for gradient-log; 0: --k experts per layer");
  app.AddCount("--max-age", &max_age, 1, kMany,
               "load-aware: number of checkpoints after which an unsaved expert is selected first "
               "[default: 4 rounds]");
  app.AddReal("--dynamic-k", &dynamic_k, 1e-9, 1,
              "limit on the share of lost tokens (PLT) of the run. K starts at --k and doubles "
              "when its part of the limit is used up");
  app.AddChoice(
      "--dynamic-k-mode", &dynamic_k_mode, {"react", "predict"},
      "double K when its part is used up (react), or before a fault could exceed it (predict)");
}

Status SelectionFlags::CheckRules(const cli::App& app) const {
  if (policy != partial::Policy::kLoadAware) {
    SW_TRY(app.Require({"--max-age"}, "--policy load-aware"));
  }
  if (policy != partial::Policy::kBudget && policy != partial::Policy::kBudgetGlobal &&
      policy != partial::Policy::kReplay) {
    SW_TRY(app.Require({"--budget"}, "--policy budget, budget-global or gradient-log"));
  }
  if (policy == partial::Policy::kReplay) {
    SW_TRY(app.Exclude({"--k-persist"}, "--policy gradient-log, which has one K"));
  }
  if (policy == partial::Policy::kFull) {
    SW_TRY(app.Exclude({"--k", "--k-persist"}, "--policy full, which saves all experts"));
  }
  if (!dynamic_k) {
    SW_TRY(app.Require({"--dynamic-k-mode", "--iterations"}, "--dynamic-k"));
  }
  if (k_persist.value_or(k) <= k) return {};
  return Fail(Errc::kUsage, "--k-persist ", *k_persist, " is larger than --k ", k);
}

void SaveFlags::AddTo(cli::App& app) {
  app.AddInput(&source.input, "checkpoint to save");
  app.AddOutput(&request.store, "store to save into, created if missing", "STORE");
  app.ShowInShortHelp({"--k", "--policy", "--tokens", "--keep", "--dynamic-k"});
  selection.AddTo(app);
  app.AddCount("--iterations", &iterations, 1, kMany,
               "dynamic K: length of the run in iterations [default: the iterations so far]");
  app.Group("Contents of a checkpoint");
  source.AddTo(app);
  app.AddList("--keep", &keep,
              "component saved of every expert in every checkpoint: weights, master or moments; "
              "fixed by the first checkpoint of a store",
              "COMPONENT");
  app.AddChoice("--compress", &compress, {"none", "zstd"}, "compression of new blobs");
  app.AddFlag("--existing-store", &request.existing_store,
              "fail if STORE does not exist instead of creating it, for example because its file "
              "system is not mounted");
}

void SaveFlags::AddSaveOnlyTo(cli::App& app) {
  app.ShowInShortHelp({"--resumed-from", "--iteration"});
  app.AddFlag(
      "--partial-start", &request.partial_start,
      "select experts also for the first checkpoint of a store, which otherwise has all experts");
  app.AddCount("--resumed-from", &request.resumed_from, 0, kMany,
               "iteration from which training resumed without pec-restore; abandons newer "
               "checkpoints of the store and newer copies of agents");
  app.AddCount("--iteration", &request.iteration, 0, kMany,
               "iteration of the checkpoint, if it does not record one");
}

Status SaveFlags::CheckRules(const cli::App& app) {
  SW_TRY(selection.CheckRules(app));
  if (selection.policy == partial::Policy::kReplay) {
    if (!agent) {
      return Fail(
          Errc::kUsage,
          "--policy gradient-log requires gradients from a running trainer: use pec-save agent, "
          "or shardwright.PartialCheckpoints(..., lossless=True) (docs/lossless.md)");
    }
    SW_TRY(app.Exclude({"--keep"}, "--policy gradient-log, which has one version of an expert"));
  }
  SW_TRY(CheckDynamicK(app));
  if (keep.empty()) return {};
  SW_TRY_ASSIGN(request.keep, ParseKeep(keep));
  return {};
}

Status SaveFlags::CheckDynamicK(const cli::App& app) const {
  if (!selection.dynamic_k) return {};
  if (selection.policy != partial::Policy::kSequential &&
      selection.policy != partial::Policy::kLoadAware) {
    return Fail(Errc::kUsage, "--dynamic-k cannot be combined with --policy ",
                partial::Name(selection.policy), ", which has no K");
  }
  if (app.IsSet("--k-persist")) {
    return Fail(
        Errc::kUsage,
        "--dynamic-k cannot be combined with --k-persist: its K applies to memory and to storage");
  }
  if (!selection.tokens.empty()) return {};
  return Fail(Errc::kUsage,
              "--dynamic-k requires --tokens FILE, from which lost tokens are counted");
}

partial::SaveRequest SaveFlags::Options(const cli::CommonFlags& common) const {
  const convert::ConvertOptions write = WriteOptions(common, request.store);
  partial::SaveRequest options = request;
  options.policy = selection.policy;
  options.k_snapshot = static_cast<std::uint32_t>(selection.k);
  if (selection.k_persist) options.k_persist = static_cast<std::uint32_t>(*selection.k_persist);
  if (selection.dynamic_k) {
    options.dynamic_k = partial::DynamicKOptions{
        *selection.dynamic_k, selection.dynamic_k_mode == "predict", iterations.value_or(0)};
  }
  options.max_age = selection.max_age;
  if (selection.budget > 0) options.budget_bytes = selection.budget;
  options.zstd = compress == "zstd";
  options.dry_run = write.dry_run;
  options.take_over = write.take_over;
  options.verify = write.verify;
  options.threads = write.threads;
  options.memory_bytes = write.memory_bytes;
  return options;
}

}  // namespace shardwright::apps
