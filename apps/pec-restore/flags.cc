#include "pec-restore/flags.h"

#include "cli/flags.h"
#include "common/pec.h"
#include "common/ucp.h"

namespace shardwright::apps {
namespace {

/// The values of --lost-nodes.
Status ParseLost(const std::vector<std::string>& words, pec::RestoreOptions* options) {
  if (words.empty()) return {};
  if (options->agents.empty()) {
    return Fail(Errc::kUsage,
                "--lost-nodes means nothing without --agents, whose positions it names");
  }
  for (const std::string& word : words) {
    if (word == "unreachable") {
      options->lost_unreachable = true;
      continue;
    }
    const auto node = cli::ParseCount(word, 0, options->agents.size() - 1);
    if (!node) return Within("--lost-nodes", node.error());
    options->lost_nodes.insert(static_cast<std::size_t>(*node));
  }
  return {};
}

}  // namespace

void RestoreFlags::AddTo(cli::App& app) {
  app.AddInputOutput(&options.store, &output, "store to restore", "folder to make");
  app.AddCount("--at", &options.at, 0, std::uint64_t{1} << 53, "no iteration above this");
  format.or_none = true;
  format.none_help = "; none: the store only notes what training goes on from";
  format.AddTo(app, "what is not named stays as it was saved");
  format.AddKeyFlags(app);
  format.AddStrictTo(app);
  app.AddFlag("--require-complete", &options.require_complete,
              "refuse modules older than the iteration restored; exit 5");
  app.AddEnum<pec::ReplayMode>(
      "--replay", &options.replay,
      {{"auto", pec::ReplayMode::kAuto},
       {"never", pec::ReplayMode::kNever},
       {"require", pec::ReplayMode::kRequire}},
      "make steps again that the store's log has gradients of, so that experts are of the "
      "iteration restored; require: all of them, or exit 5");
  app.AddFlag("--allow-older", &options.allow_older,
              "where a blob is damaged, go back to the version before; reads and verifies all");
  app.AddText("--restart-missing", &options.restart_missing,
              "checkpoint from which experts start again that have no version", "CHECKPOINT");
  app.AddFlag("--read-only", &options.read_only,
              "leave the store as it is: newer checkpoints are not abandoned");
  app.AddFlag(
      "--allow-empty", &options.allow_empty,
      "a store that can be read and has no checkpoint yet is no error: nothing is restored, "
      "and the report's iteration is null");
  app.AddFlag("--begin", &options.begin,
              "with --allow-empty, at the first start of a run: a store that is not there is made, "
              "with a mark that the run has begun, so that a store that is missing later is an "
              "error");
  app.AddList(
      "--agents", &agents,
      "agents whose memory is read too, where it has newer versions or the same ones; first "
      "they save what is not in the store yet; separated by commas",
      "unix:PATH|HOST:PORT,...");
  app.AddList(
      "--lost-nodes", &lost,
      "agents that are gone with their memory, by position in --agents from 0, separated by "
      "commas, or \"unreachable\": all that do not answer, which else are an error; copies "
      "that others keep of them are used",
      "N,...");
  key.AddTo(app);
  AddPatterns(app, &options.pattern_files);
}

Status RestoreFlags::CheckRules(cli::App& app) {
  SW_TRY_ASSIGN(options.target, format.Spec(app));
  options.format = format.format;
  options.agents = Words(agents);
  SW_TRY(key.CheckRules(app, options.agents));
  SW_TRY(ParseLost(Words(lost), &options));
  if (options.require_complete && !options.restart_missing.empty()) {
    return Fail(Errc::kUsage, "--require-complete and --restart-missing exclude each other");
  }
  if (options.begin && !options.allow_empty) {
    return Fail(Errc::kUsage, "--begin means nothing without --allow-empty");
  }
  if (options.begin && options.read_only) {
    return Fail(Errc::kUsage, "--begin and --read-only exclude each other");
  }
  if (options.format != nullptr) return {};
  // Nothing is written there.
  app.MayLack(&output);
  for (const char* flag : {"--target", "--force", "--resume", "--verify", "--strict"}) {
    if (!app.Given(flag)) continue;
    return Fail(Errc::kUsage, std::string(flag) + " means nothing with --format none");
  }
  return {};
}

}  // namespace shardwright::apps
