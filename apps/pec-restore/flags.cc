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
      "replay logged gradients to bring experts to the iteration restored; require: exit 5 unless "
      "all can be brought there");
  app.AddFlag("--allow-older", &options.allow_older,
              "go back to an older version of a damaged blob; verifies all");
  app.AddText("--restart-missing", &options.restart_missing,
              "checkpoint from which experts start again that have no version", "CHECKPOINT");
  app.AddFlag("--restart", &options.restart,
              "record that training restarts from OUTPUT: newer checkpoints are abandoned; "
              "without this flag the next save into the store decides");
  app.AddFlag("--read-only", &options.read_only,
              "leave the store as it is, as an export does (--format safetensors)");
  app.AddFlag(
      "--allow-empty", &options.allow_empty,
      "a store that can be read and has no checkpoint yet is no error: nothing is restored, "
      "and the report's iteration is null");
  app.AddFlag(
      "--begin", &options.begin,
      "with --allow-empty, at the first start of a run: create a missing store with a mark, "
      "so that a store that is missing later is an error");
  app.AddList(
      "--agents", &agents,
      "agents whose memory is used too; first they save what the store does not have; separated "
      "by commas",
      "unix:PATH|HOST:PORT,...");
  app.AddList("--lost-nodes", &lost,
              "agents that are lost, by position in --agents from 0, separated by commas, or "
              "\"unreachable\": all that do not answer; copies that other agents keep are used",
              "N,...");
  app.AddText(
      "--trim-tokens", &token_log,
      "with --restart: remove the lines of this token log that follow the iteration restored, and "
      "a truncated last line; the log may be missing",
      "FILE");
  key.AddTo(app);
  AddPatterns(app, &options.pattern_files);
}

Status RestoreFlags::CheckRules(cli::App& app) {
  SW_TRY_ASSIGN(options.target, format.Spec(app));
  options.format = format.format;
  options.agents = Words(agents);
  SW_TRY(key.CheckRules(app, options.agents));
  SW_TRY_ASSIGN(options.trusted_user, key.trust.User());
  SW_TRY(ParseLost(Words(lost), &options));
  if (options.require_complete && !options.restart_missing.empty()) {
    return Fail(Errc::kUsage, "--require-complete and --restart-missing exclude each other");
  }
  if (options.replay == pec::ReplayMode::kRequire && !options.restart_missing.empty()) {
    return Fail(Errc::kUsage, "--replay require and --restart-missing exclude each other");
  }
  if (options.restart && options.read_only) {
    return Fail(Errc::kUsage, "--restart and --read-only exclude each other");
  }
  if (options.format != nullptr && options.format->name == "safetensors") {
    SW_TRY(app.Refuse({"--restart"}, "with --format safetensors, an export"));
    options.read_only = true;
  }
  if (options.begin && !options.allow_empty) {
    return Fail(Errc::kUsage, "--begin means nothing without --allow-empty");
  }
  if (options.begin && options.read_only) {
    return Fail(Errc::kUsage, "--begin and --read-only exclude each other");
  }
  if (!token_log.empty() && !options.restart && options.format != nullptr) {
    return Fail(Errc::kUsage,
                "--trim-tokens requires --restart: only a restart makes later lines void");
  }
  if (options.format != nullptr) return {};
  // Nothing is written there.
  app.MayLack(&output);
  for (const char* flag : {"--target", "--force", "--resume", "--verify", "--strict", "--mode"}) {
    if (!app.Given(flag)) continue;
    return Fail(Errc::kUsage, std::string(flag) + " means nothing with --format none");
  }
  return {};
}

}  // namespace shardwright::apps
