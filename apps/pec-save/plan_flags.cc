#include "pec-save/plan_flags.h"

#include <array>

namespace shardwright::apps {
namespace {

constexpr std::uint64_t kMany = std::uint64_t{1} << 53;
constexpr std::uint64_t kMostCheckpoints = 100'000;
constexpr std::uint64_t kMostWorkers = 1'000'000;
constexpr std::uint64_t kMostStages = 10'000;

/// A flag, and the flags of which one must be there.
struct Need {
  const char* flag;
  std::array<const char*, 3> any;  // null: none
};

constexpr Need kNeeds[] = {{"--pp", {"--copies", "--micro-batches"}},
                           {"--copy-bandwidth", {"--copies"}},
                           {"--full-every", {"--gradients"}},
                           {"--forward-time", {"--micro-batches"}},
                           {"--backward-time", {"--micro-batches"}},
                           {"--chunks", {"--micro-batches"}},
                           {"--micro-batches", {"--forward-time"}},
                           {"--micro-batches", {"--backward-time"}},
                           {"--capacity", {"--lost-tokens"}},
                           {"--lost-tokens", {"--capacity"}},
                           {"--checkpoint-time", {"--retrieval-time"}},
                           {"--iteration-time", {"--retrieval-time"}},
                           {"--snapshot-bandwidth", {"--micro-batches", "--retrieval-time"}},
                           {"--interval", {"--gradients", "--retrieval-time", "--dynamic-k"}},
                           {"--ranks-per-node", {"--copies", "--dynamic-k"}},
                           {"--dynamic-k-mode", {"--dynamic-k"}},
                           {"--iterations", {"--dynamic-k"}},
                           {"--lost-share", {"--dynamic-k"}}};

Status CheckNeeds(const cli::App& app) {
  for (const Need& need : kNeeds) {
    if (!app.Given(need.flag)) continue;
    bool there = false;
    std::string names;
    for (const char* flag : need.any) {
      if (flag == nullptr) continue;
      there = there || app.Given(flag);
      names += (names.empty() ? "" : " or ") + std::string(flag);
    }
    if (there) continue;
    return Fail(Errc::kUsage,
                "--plan: " + std::string(need.flag) + " means nothing without " + names);
  }
  return {};
}

}  // namespace

void PlanFlags::AddTo(cli::App& app) {
  app.Group("--plan");
  app.AddCount("--checkpoints", &checkpoints, 1, kMostCheckpoints,
               "checkpoints to plan, each after the one before is complete");
  app.AddCount("--zero", &zero_stage, 0, 3,
               "ZeRO stage: from 1 on each rank saves its part of the optimizer's state, with 3 "
               "also of the weights");
  app.AddSize("--split-above", &split_above,
              "cut larger non-expert modules into equal byte ranges; 0: never");
  app.AddText("--dead-ranks", &dead_ranks, "data-parallel ranks that save nothing, as 0-3,7",
              "LIST");
  app.AddCount("--copies", &copies, 1, kMostWorkers,
               "copies of each worker's part of a snapshot on other nodes");
  app.AddCount("--pp", &pp, 1, kMostStages,
               "pipeline stages of --dp workers each; sizes and layers are those of one stage");
  app.AddSize("--copy-bandwidth", &copy_bandwidth,
              "bytes per second of a worker to other nodes; 0: no times");
  app.AddFlag("--gradients", &gradients,
              "send gradients of experts that were sent the iteration before, in place of state");
  app.AddCount("--full-every", &full_every, 1, kMany,
               "gradients of an expert in a row, after which its state is sent");
  app.AddCount("--micro-batches", &micro_batches, 1, kMostWorkers,
               "micro-batches of an iteration: show what fits the bubbles of the pipeline");
  app.AddReal("--forward-time", &forward_s, 0, 1e6,
              "seconds of a micro-batch forward through a stage");
  app.AddReal("--backward-time", &backward_s, 0, 1e6, "seconds of a micro-batch backward");
  app.AddCount("--chunks", &chunks, 1, kMostWorkers, "interleaved model chunks of a stage");
  app.AddCount("--capacity", &capacity, 1, kMany,
               "tokens that an expert may process in an iteration");
  app.AddCount("--lost-tokens", &lost_tokens, 0, kMany,
               "tokens that an expert lost, made up with a tenth more of its capacity");
  app.AddReal("--checkpoint-time", &checkpoint_s, 0, 1e7,
              "seconds of a checkpoint [default: of the largest share of a snapshot]");
  app.AddReal("--retrieval-time", &retrieval_s, 0, 1e7,
              "seconds until a checkpoint is loaded: show what a failure wastes");
}

Status PlanFlags::CheckRules(const cli::App& app, const std::string& store) const {
  SW_TRY(CheckNeeds(app));
  if (app.Given("--dead-ranks") && app.Given("--copies")) {
    return Fail(Errc::kUsage,
                "--copies and --dead-ranks exclude each other: copies are placed "
                "on all workers");
  }
  if (app.Given("--snapshot-bandwidth") && app.Given("--checkpoint-time") &&
      !app.Given("--micro-batches")) {
    return Fail(Errc::kUsage, "--snapshot-bandwidth means nothing with --checkpoint-time");
  }
  if (app.Given("--pp") && pp > 1 && !store.empty()) {
    return Fail(Errc::kUsage,
                "--pp means nothing with " + store + ", whose modules are those of all stages");
  }
  for (const char* flag : {"--experts", "--moe-layers"}) {
    if (!app.Given(flag) || !app.Given("--tokens")) continue;
    return Fail(Errc::kUsage, std::string(flag) + " means nothing with --tokens, which says it");
  }
  return {};
}

}  // namespace shardwright::apps
