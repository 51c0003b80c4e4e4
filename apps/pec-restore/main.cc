// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "common/pec.h"
#include "common/ucp.h"
#include "partial/restore/restore.h"
#include "pec-restore/flags.h"
#include "token_counts/trim_log.h"

namespace apps = shardwright::apps;
namespace token_counts = shardwright::token_counts;
namespace partial = shardwright::partial;
using shardwright::Status;
using shardwright::cli::Shared;

int main(int argc, char** argv) {
  shardwright::cli::App app(
      "pec-restore", "Write the newest usable state of a store as a checkpoint.",
      {{"store/ out/ --target ep=4,dp=4", "Restores for another parallel layout."},
       {"store/ out/ --dry-run", "Shows the iteration that each module would come from."}});
  apps::RestoreFlags flags;
  app.Use({Shared::kDryRun, Shared::kForce, Shared::kResume, Shared::kVerify, Shared::kThreads,
           Shared::kMemory, Shared::kMode, Shared::kTakeOver});
  app.ShowInShortHelp({"--at", "--target", "--format", "--agents", "--allow-older", "--memory"});
  flags.AddTo(app);
  app.Check([&] { return flags.CheckRules(app); });
  return app.Run(argc, argv, [&](shardwright::cli::Context& context) -> Status {
    SW_TRY_ASSIGN(flags.options.key, flags.key.Read(context));
    flags.options.write = apps::WriteOptions(context.flags(), flags.output);
    flags.options.write.strict = flags.format.strict;
    const std::string& log = flags.token_log;
    if (!log.empty()) SW_TRY(context.comm().OnRoot([&] { return token_counts::CheckLog(log); }));
    SW_TRY_ASSIGN(const partial::RestoreReport report,
                  partial::RestoreStore(context.comm(), flags.options, context.sink()));
    if (!log.empty() && !context.flags().dry_run) {
      SW_TRY(context.comm().OnRoot([&] { return token_counts::TrimLog(log, report.iteration); }));
    }
    apps::ShowRestore(context, report);
    if (!report.convert.dry_run) return {};
    return shardwright::exec::CheckFits(report.convert.free, flags.output,
                                        report.convert.needed_bytes, 0);
  });
}
