#include <limits>
#include <string>
#include <vector>

#include "common/pec.h"
#include "common/ucp.h"
#include "dialect/target_spec.h"
#include "os/socket.h"
#include "pec/restore.h"

namespace apps = shardwright::apps;
namespace pec = shardwright::pec;
using pec::RestoreFormat;
using shardwright::Errc;
using shardwright::Status;
using shardwright::cli::Shared;

namespace {

constexpr std::uint64_t kUnset = std::numeric_limits<std::uint64_t>::max();

/// Rules that join several flags.
Status CheckRules(const shardwright::cli::App& app, const pec::RestoreOptions& options,
                  std::string* output) {
  if (options.require_complete && !options.restart_missing.empty()) {
    return shardwright::Fail(Errc::kUsage,
                             "--require-complete and --restart-missing exclude each other");
  }
  if (options.format != RestoreFormat::kNone) return {};
  for (const char* flag : {"--target", "--force", "--resume", "--verify"}) {
    if (app.Given(flag)) {
      return shardwright::Fail(Errc::kUsage,
                               std::string(flag) + " means nothing with --format none");
    }
  }
  // Nothing is written there, so it need not be given.
  if (output->empty()) *output = options.store;
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  shardwright::cli::App app(
      "pec-restore", "Write the newest usable state of a store as a checkpoint.",
      {{"store/ out/ --target ep=4,dp=4", "Restores for another parallel layout."},
       {"store/ out/ --dry-run", "Says which module would come from which iteration."}});
  pec::RestoreOptions options;
  std::string output;
  std::string target;
  std::uint64_t at = kUnset;
  app.AddInputOutput(&options.store, &output, "store to restore", "folder to make");
  app.Use({Shared::kDryRun, Shared::kForce, Shared::kResume, Shared::kVerify, Shared::kThreads,
           Shared::kMemory});
  app.AddCount("--at", &at, 0, std::uint64_t{1} << 53, "no iteration above this");
  app.AddText("--target", &target,
              "layout to write, as key=value,... of dp tp pp ep zero dtype sub_group round_robin "
              "stages; what is not named stays as it was saved",
              "SPEC");
  app.AddEnum<RestoreFormat>("--format", &options.format,
                             {{"deepspeed", RestoreFormat::kDeepSpeed},
                              {"universal", RestoreFormat::kUniversal},
                              {"none", RestoreFormat::kNone}},
                             "files to write: native ones of the layout, atoms, or none: the store "
                             "only notes what training goes on from");
  app.AddFlag("--require-complete", &options.require_complete,
              "refuse modules older than the iteration restored; exit 5");
  app.AddFlag("--allow-older", &options.allow_older,
              "where a blob is damaged, go back to the version before; reads and verifies all");
  app.AddText("--restart-missing", &options.restart_missing,
              "checkpoint from which experts start again that have no version", "CHECKPOINT");
  app.AddFlag("--read-only", &options.read_only,
              "leave the store as it is: newer checkpoints are not abandoned");
  app.AddList("--agents", &options.agents,
              "agent whose memory is read too, where it has newer versions or the same ones; first "
              "it saves what is not in the store yet; may be given several times",
              "unix:PATH|HOST:PORT");
  app.AddList("--patterns", &options.pattern_files,
              "file of rules that say how tensor parallelism cuts parameters", "FILE");
  app.Check([&]() -> Status {
    SW_TRY_ASSIGN(options.target, shardwright::dialect::ParseTargetSpec(target));
    if (at != kUnset) options.at = at;
    for (const std::string& agent : options.agents) SW_TRY(shardwright::os::ParseAddress(agent));
    return CheckRules(app, options, &output);
  });
  return app.Run(argc, argv, [&](shardwright::cli::Context& context) -> Status {
    options.write = apps::WriteOptions(context.flags(), output);
    SW_TRY_ASSIGN(const pec::RestoreReport report,
                  pec::RestoreStore(context.comm(), options, context.sink()));
    apps::ShowRestore(context, report);
    return {};
  });
}
