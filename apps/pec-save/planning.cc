#include "pec-save/planning.h"

#include <algorithm>

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
  app.Group("--simulate, --auto and --plan");
  app.AddText("--faults", &faults,
              "--simulate: a file of lines \"ITERATION NODE,NODE\" (no nodes: no memory is lost), "
              "or faults per iteration, at random",
              "FILE|RATE");
  app.AddReal("--node-share", &node_share, 0, 1,
              "--simulate: of the faults at random, those that take a node's memory");
  app.AddText("--csv", &csv, "--simulate: also write the rows to this file", "FILE");
  app.AddText("--page", &page,
              "--simulate: also write curves and rows as a page to look at, in one HTML file",
              "FILE");
  app.AddCount("--interval", &interval, 1, kMany,
               "iterations between checkpoints [default: 10; --plan: 1; --auto: what is best]");
  app.AddReal("--plt-limit", &plt_limit, 1e-9, 1, "share of lost tokens that is tolerable");
  app.AddSize("--persist-bandwidth", &persist_bandwidth,
              "--auto: bytes per second of a rank into storage");
  app.AddText("--measure", &measure,
              "--auto: measure both bandwidths instead, in FOLDER, where the store will be: every "
              "rank writes, syncs and removes 256 MiB there, and copies as much in memory",
              "FOLDER");
  app.AddReal("--fault-rate", &fault_rate, 0, 1, "--auto: faults per iteration");
  app.AddCount("--iterations", &iterations, 1, kMany,
               "--auto, --plan and --dynamic-k: length of the run; a save without it takes the "
               "iterations so far");
  app.AddReal(
      "--lost-share", &lost_share, 0, 1,
      "--auto, --plan: share of the memory copies that a fault takes [default: of one node]");
  job.AddTo(app);
  plan.AddTo(app);
}

Status PlanningFlags::CheckRules(const cli::App& app, Mode mode, const std::string& store,
                                 const std::vector<std::string>& patterns) {
  if (mode != Mode::kSimulate && mode != Mode::kAuto && mode != Mode::kPlan) return {};
  if (app.Given("--force") && csv.empty() && page.empty()) {
    return Fail(Errc::kUsage, "--force means nothing without --csv or --page");
  }
  if (!page.empty() && page == csv) {
    return Fail(Errc::kUsage, "--csv and --page name the same file, " + page);
  }
  for (const char* flag : {"--persist-bandwidth", "--snapshot-bandwidth"}) {
    if (measure.empty() || !app.Given(flag)) continue;
    return Fail(Errc::kUsage, std::string("--measure and ") + flag + " exclude each other");
  }
  if (store.empty() && !patterns.empty()) {
    return Fail(Errc::kUsage, "--patterns means nothing without a store");
  }
  job.store = store;
  job.patterns = patterns;
  if (!store.empty()) SW_TRY(CheckSizes(app, store));
  return mode == Mode::kPlan ? plan.CheckRules(app, store) : Status();
}

double PlanningFlags::LostShare(const Job& of) const {
  if (lost_share >= 0) return lost_share;
  return std::min(1.0, static_cast<double>(of.ranks_per_node) / static_cast<double>(of.ranks.dp));
}

}  // namespace shardwright::apps
