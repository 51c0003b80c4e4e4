#include "pec-save/save_flags.h"

#include "common/pec.h"

namespace shardwright::apps {

const std::vector<std::pair<std::string, pec::Policy>>& PolicyWords() {
  static const std::vector<std::pair<std::string, pec::Policy>> kWords = {
      {"sequential", pec::Policy::kSequential},
      {"load-aware", pec::Policy::kLoadAware},
      {"budget", pec::Policy::kBudget},
      {"budget-global", pec::Policy::kBudgetGlobal},
      {"full", pec::Policy::kFull},
      {"replay", pec::Policy::kReplay}};
  return kWords;
}

void SelectionFlags::AddTo(cli::App& app) {
  app.Group("Which experts");
  app.AddCount("--k", &k, 1, 65536, "experts of each MoE layer that are selected");
  app.AddCount("--k-persist", &k_persist, 1, 65536,
               "experts of each layer that go to storage, of those selected [default: all]");
  app.AddEnum<pec::Policy>("--policy", &policy, PolicyWords(),
                           "which experts: in turn, those with most unsaved tokens, within a "
                           "budget by layer or over all layers, or all; replay: in turn or within "
                           "a budget, beside a log of the others' gradients (docs/lossless.md)");
  app.AddText("--tokens", &tokens, "tokens per expert and iteration (docs/formats/loads.md)",
              "FILE");
  app.AddSize("--budget", &budget,
              "bytes of a checkpoint for the budget policies, of an iteration for replay, log and "
              "all; 0: --k experts per layer");
  app.AddCount("--max-age", &max_age, 1, kMany,
               "load-aware: checkpoints after which an expert is taken first [default: 4 rounds]");
  app.AddReal("--dynamic-k", &dynamic_k, 1e-9, 1,
              "share of lost tokens (PLT) that the run may have: K begins at --k and doubles when "
              "its part of it is spent");
  app.AddChoice("--dynamic-k-mode", &dynamic_k_mode, {"react", "predict"},
                "double K when its part is spent, or before a fault could exceed it");
}

Status SelectionFlags::CheckRules(const cli::App& app) const {
  if (policy != pec::Policy::kLoadAware) {
    SW_TRY(app.Refuse({"--max-age"}, "without --policy load-aware"));
  }
  if (policy != pec::Policy::kBudget && policy != pec::Policy::kBudgetGlobal &&
      policy != pec::Policy::kReplay) {
    SW_TRY(app.Refuse({"--budget"}, "without a budget policy"));
  }
  if (policy == pec::Policy::kReplay) {
    SW_TRY(app.Refuse({"--k-persist"}, "with --policy replay, which has one K"));
  }
  if (policy == pec::Policy::kFull) {
    SW_TRY(app.Refuse({"--k", "--k-persist"}, "with --policy full"));
  }
  if (!dynamic_k) {
    SW_TRY(app.Refuse({"--dynamic-k-mode", "--iterations"}, "without --dynamic-k"));
  }
  if (k_persist.value_or(k) <= k) return {};
  return Fail(Errc::kUsage,
              "--k-persist " + std::to_string(*k_persist) + " is above --k " + std::to_string(k));
}

void SaveFlags::AddTo(cli::App& app) {
  app.AddInputOutput(&source.input, &request.store, "checkpoint to save",
                     "store to save into, made if it is not there");
  app.Daily({"--k", "--policy", "--tokens", "--keep", "--dynamic-k"});
  selection.AddTo(app);
  app.AddCount("--iterations", &iterations, 1, kMany,
               "dynamic K: length of the run [default: the iterations so far]");
  app.Group("What is saved");
  source.AddTo(app);
  app.AddList("--keep", &keep,
              "component saved of every expert each time: weights, master or moments; fixed by a "
              "store's first checkpoint",
              "COMPONENT");
  app.AddChoice("--compress", &compress, {"none", "zstd"}, "how new blobs are stored");
  app.AddFlag("--existing-store", &request.existing_store,
              "fail if STORE does not exist instead of creating it, for example because its file "
              "system is not mounted");
}

void SaveFlags::AddSaveOnlyTo(cli::App& app) {
  app.Daily({"--resumed-from", "--iteration"});
  app.AddFlag("--partial-start", &request.partial_start,
              "select experts also for a store's first checkpoint, which else has all");
  app.AddCount("--resumed-from", &request.resumed_from, 0, kMany,
               "training went on from this iteration without pec-restore: newer checkpoints of "
               "the store, and newer copies of agents, are abandoned");
  app.AddCount("--iteration", &request.iteration, 0, kMany,
               "iteration of the checkpoint, where it does not say");
}

Status SaveFlags::CheckRules(const cli::App& app) {
  SW_TRY(selection.CheckRules(app));
  if (selection.policy == pec::Policy::kReplay) {
    if (!agent) {
      return Fail(Errc::kUsage,
                  "--policy replay: gradients come out of a running trainer only: give it to "
                  "pec-save agent, or to shardwright.PartialCheckpoints(..., lossless=True) "
                  "(docs/lossless.md)");
    }
    SW_TRY(app.Refuse({"--keep"}, "with --policy replay, which has one version of an expert"));
  }
  SW_TRY(CheckDynamicK(app));
  if (keep.empty()) return {};
  SW_TRY_ASSIGN(request.keep, ParseKeep(keep));
  return {};
}

Status SaveFlags::CheckDynamicK(const cli::App& app) const {
  if (!selection.dynamic_k) return {};
  if (selection.policy != pec::Policy::kSequential && selection.policy != pec::Policy::kLoadAware) {
    return Fail(Errc::kUsage, "--dynamic-k means nothing with --policy " +
                                  std::string(pec::Name(selection.policy)) + ", which has no K");
  }
  if (app.Given("--k-persist")) {
    return Fail(Errc::kUsage, "--dynamic-k and --k-persist exclude each other: both levels have K");
  }
  if (!selection.tokens.empty()) return {};
  return Fail(Errc::kUsage,
              "--dynamic-k: lost tokens are known from the tokens per expert only: "
              "give --tokens");
}

pec::SaveRequest SaveFlags::Options(const cli::CommonFlags& common) const {
  const ucp::ConvertOptions write = WriteOptions(common, request.store);
  pec::SaveRequest options = request;
  options.policy = selection.policy;
  options.k_snapshot = static_cast<std::uint32_t>(selection.k);
  if (selection.k_persist) options.k_persist = static_cast<std::uint32_t>(*selection.k_persist);
  if (selection.dynamic_k) {
    options.dynamic_k = pec::DynamicKOptions{
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
