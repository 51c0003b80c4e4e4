#include "pec-save/planning.h"

namespace shardwright::apps {
namespace {

constexpr std::uint64_t kMany = std::uint64_t{1} << 53;

/// Flags that say what a STORE says, too.
Status CheckSizes(const cli::App& app, const std::string& store) {
  for (const char* flag : {"--experts", "--moe-layers", "--expert-params", "--nonexpert-params",
                           "--param-bytes", "--keep"}) {
    if (!app.Given(flag)) continue;
    return Fail(Errc::kUsage, std::string(flag) + " means nothing with " + store +
                                  ", whose newest checkpoint says it");
  }
  return {};
}

}  // namespace

void PlanningFlags::AddTo(cli::App& app) {
  app.Group("--simulate and --auto");
  app.AddText("--faults", &faults,
              "--simulate: a file of lines \"ITERATION NODE,NODE\" (no nodes: no memory is lost), "
              "or faults per iteration, at random",
              "FILE|RATE");
  app.AddReal("--node-share", &node_share, 0, 1,
              "--simulate: of the faults at random, those that take a node's memory");
  app.AddText("--csv", &csv, "--simulate: also write the rows to this file", "FILE");
  app.AddCount("--interval", &interval, 1, kMany,
               "iterations between checkpoints [default: 10; with --auto what is best]");
  app.AddReal("--plt-limit", &plt_limit, 1e-9, 1, "share of lost tokens that is tolerable");
  app.AddSize("--persist-bandwidth", &persist_bandwidth,
              "--auto: bytes per second of a rank into storage");
  app.AddReal("--fault-rate", &fault_rate, 0, 1, "--auto: faults per iteration");
  app.AddCount("--iterations", &iterations, 1, kMany, "--auto: length of the run");
  app.AddReal("--lost-share", &lost_share, 0, 1,
              "--auto: share of the memory copies that a fault takes [default: of one node]");
  job.AddTo(app);
}

Status PlanningFlags::CheckRules(const cli::App& app, Mode mode, const std::string& store) {
  if (mode != Mode::kSimulate && mode != Mode::kAuto) return {};
  if (app.Given("--force") && csv.empty()) {
    return Fail(Errc::kUsage, "--force means nothing without --csv");
  }
  job.store = store;
  if (!store.empty()) SW_TRY(CheckSizes(app, store));
  return {};
}

}  // namespace shardwright::apps
