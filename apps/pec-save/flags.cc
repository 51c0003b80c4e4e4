#include "pec-save/flags.h"

#include <optional>

#include "common/pec.h"

namespace shardwright::apps {
namespace {

constexpr std::uint64_t kMany = std::uint64_t{1} << 53;

std::optional<std::uint64_t> Given(std::uint64_t value) {
  return value == SaveFlags::kUnset ? std::nullopt : std::optional(value);
}

}  // namespace

void SaveFlags::AddTo(cli::App& app) {
  app.AddInputOutput(&source.input, &store,
                     "checkpoint to save; with --check, --gc or --list a store",
                     "store to save into, made if it is not there");
  modes.AddTo(app);
  app.Group("What is saved");
  source.AddTo(app);
  app.AddCount("--k", &k, 1, 65536, "experts of each MoE layer that are selected");
  app.AddCount("--k-persist", &k_persist, 1, 65536,
               "experts of each layer that go to storage, of those selected [default: all]");
  app.AddEnum<pec::Policy>("--policy", &policy,
                           {{"sequential", pec::Policy::kSequential},
                            {"load-aware", pec::Policy::kLoadAware},
                            {"budget", pec::Policy::kBudget},
                            {"budget-global", pec::Policy::kBudgetGlobal},
                            {"full", pec::Policy::kFull}},
                           "which experts: in turn, those with most unsaved tokens, within a "
                           "budget by layer or over all layers, or all");
  app.AddReal("--dynamic-k", &dynamic_k, 1e-9, 1,
              "share of lost tokens (PLT) that the run may have: K begins at --k and doubles when "
              "its part of it is spent; a save needs --tokens");
  app.AddChoice("--dynamic-k-mode", &dynamic_k_mode, {"react", "predict"},
                "double K when its part is spent, or before a fault could exceed it");
  app.AddText("--tokens", &tokens, "tokens per expert and iteration (docs/formats/loads.md)",
              "FILE");
  app.AddSize("--budget", &budget,
              "bytes of a checkpoint for the budget policies; 0: --k experts per layer on average");
  app.AddCount("--max-age", &max_age, 1, kMany,
               "load-aware: checkpoints after which an expert is taken first [default: 4 rounds]");
  app.AddList("--keep", &keep,
              "component saved of every expert each time: weights, master or moments; fixed by a "
              "store's first checkpoint",
              "COMPONENT");
  app.AddChoice("--compress", &compress, {"none", "zstd"}, "how new blobs are stored");
  app.AddFlag("--partial-start", &partial_start,
              "select experts also for a store's first checkpoint, which else has all");
  app.AddCount("--resumed-from", &resumed_from, 0, kMany,
               "training went on from this iteration without pec-restore: newer checkpoints of "
               "the store, and newer copies of agents, are abandoned");
  app.AddCount("--iteration", &iteration, 0, kMany,
               "iteration of the checkpoint, where it does not say");
  app.Group("--gc");
  app.AddCount("--keep-last", &keep_last, 1, kMany, "newest checkpoints to keep");
  app.AddCount("--keep-every", &keep_every, 1, kMany,
               "also checkpoints whose iteration is a multiple of this");
  planning.AddTo(app);
}

Status SaveFlags::CheckRules(cli::App& app) {
  SW_TRY_ASSIGN(mode, modes.Choose(app));
  SW_TRY(CheckArguments(app, mode, source.input, store));
  const auto refuse = [&](const char* why, std::initializer_list<const char*> flags) -> Status {
    for (const char* flag : flags) {
      if (app.Given(flag)) {
        return Fail(Errc::kUsage, std::string(flag) + " means nothing " + why);
      }
    }
    return {};
  };
  // A simulation without --policy plays all of them.
  if (policy != pec::Policy::kLoadAware && (mode != Mode::kSimulate || app.Given("--policy"))) {
    SW_TRY(refuse("without --policy load-aware", {"--max-age"}));
  }
  if (policy != pec::Policy::kBudget && policy != pec::Policy::kBudgetGlobal) {
    SW_TRY(refuse("without a budget policy", {"--budget"}));
  }
  SW_TRY(CheckDynamicK(app));
  if (policy == pec::Policy::kFull) SW_TRY(refuse("with --policy full", {"--k", "--k-persist"}));
  if (k_persist != kUnset && k_persist > k) {
    return Fail(Errc::kUsage,
                "--k-persist " + std::to_string(k_persist) + " is above --k " + std::to_string(k));
  }
  return planning.CheckRules(app, mode, mode == Mode::kSimulate ? store : source.input,
                             source.patterns);
}

Status SaveFlags::CheckDynamicK(const cli::App& app) const {
  const bool saves = mode == Mode::kSave || mode == Mode::kAgent;
  if (!app.Given("--dynamic-k")) {
    for (const char* flag : {"--dynamic-k-mode", "--iterations"}) {
      if (!saves || !app.Given(flag)) continue;
      return Fail(Errc::kUsage, std::string(flag) + " means nothing without --dynamic-k");
    }
    return {};
  }
  if (!saves) return {};
  if (policy != pec::Policy::kSequential && policy != pec::Policy::kLoadAware) {
    return Fail(Errc::kUsage, "--dynamic-k means nothing with --policy " +
                                  std::string(pec::Name(policy)) + ", which has no K");
  }
  if (app.Given("--k-persist")) {
    return Fail(Errc::kUsage, "--dynamic-k and --k-persist exclude each other: both levels have K");
  }
  if (!tokens.empty()) return {};
  return Fail(Errc::kUsage,
              "--dynamic-k: lost tokens are known from the tokens per expert only: "
              "give --tokens");
}

Result<pec::SaveRequest> SaveFlags::Options(const cli::App& app,
                                            const cli::CommonFlags& common) const {
  const ucp::ConvertOptions write = WriteOptions(common, store);
  pec::SaveRequest options;
  options.store = store;
  options.policy = policy;
  options.k_snapshot = static_cast<std::uint32_t>(k);
  if (k_persist != kUnset) options.k_persist = static_cast<std::uint32_t>(k_persist);
  if (app.Given("--dynamic-k")) {
    options.dynamic_k = pec::DynamicKOptions{dynamic_k, dynamic_k_mode == "predict",
                                             app.Given("--iterations") ? planning.iterations : 0};
  }
  options.max_age = Given(max_age);
  if (budget > 0) options.budget_bytes = budget;
  if (app.Given("--keep")) {
    SW_TRY_ASSIGN(options.keep, ParseKeep(keep));
  }
  options.zstd = compress == "zstd";
  options.partial_start = partial_start;
  options.resumed_from = Given(resumed_from);
  options.iteration = Given(iteration);
  options.dry_run = write.dry_run;
  options.verify = write.verify;
  options.threads = write.threads;
  options.memory_bytes = write.memory_bytes;
  return options;
}

pec::Retention SaveFlags::Rules() const { return {keep_last, Given(keep_every)}; }

}  // namespace shardwright::apps
