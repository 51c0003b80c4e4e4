#include "cli/app.h"
#include "moe-replace/flags.h"
#include "moe-replace/tasks.h"

using shardwright::Status;
using shardwright::apps::Task;
using shardwright::cli::Shared;

int main(int argc, char** argv) {
  shardwright::cli::App app(
      "moe-replace", "Plan where expert replicas live, for balance and for surviving failures.",
      {{"loads.jsonl --cluster cluster.json --faults 1 -o plan.json",
        "Places the experts so that any one node may fail."},
       {"loads.jsonl --cluster cluster.json --old plan.json -o next.json --format sglang",
        "Plans anew with few moves, for SGLang to read."},
       {"loads.jsonl --cluster cluster.json --compare", "Shows every strategy in one table."},
       {"loads.jsonl --nodes 32 --gpus 1 --slots 4 --events nodes.csv --strategy lazarus",
        "Replays failures and arrivals over the run on 32 equal nodes."},
       {"--evaluate theirs.json loads.jsonl", "Measures somebody else's plan."}});
  shardwright::apps::MoeFlags flags;
  app.Use({Shared::kForce, Shared::kThreads, Shared::kSeed});
  flags.AddTo(app);
  return app.Run(argc, argv, [&](shardwright::cli::Context& context) -> Status {
    switch (flags.task()) {
      case Task::kPlan:
        return shardwright::apps::RunPlan(context, flags);
      case Task::kCompare:
        return shardwright::apps::RunCompare(context, flags);
      case Task::kEvents:
        return shardwright::apps::RunEvents(context, flags);
      case Task::kEvaluate:
        break;
    }
    return shardwright::apps::RunEvaluate(context, flags);
  });
}
