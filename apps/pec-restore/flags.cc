// SPDX-License-Identifier: Apache-2.0
#include "pec-restore/flags.h"

#include "common/pec.h"
#include "common/ucp.h"
#include "support/cli/flags.h"

namespace shardwright::apps {
namespace {

/// Parses the values of --lost-nodes.
Status ParseLost(const std::vector<std::string>& words, partial::RestoreOptions* options) {
  if (words.empty()) return {};
  if (options->agents.empty()) {
    return Fail(Errc::kUsage,
                "--lost-nodes requires --agents, because its numbers are positions in that list");
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
  app.AddInput(&options.store, "store to restore", "STORE");
  app.AddOutput(&output, "folder to create");
  app.AddCount("--at", &options.at, 0, std::uint64_t{1} << 53,
               "restore the newest usable state up to iteration N");
  format.or_none = true;
  format.none_help =
      ". none: write no checkpoint, and only record in the store the iteration that training "
      "resumes from";
  format.AddTo(app, "keys you omit keep the saved values");
  format.AddKeyFlags(app);
  format.AddStrictTo(app);
  app.AddFlag("--require-complete", &options.require_complete,
              "exit with code 5 if a module is older than the restored iteration");
  app.AddEnum<partial::ReplayMode>(
      "--replay", &options.replay,
      {{"auto", partial::ReplayMode::kAuto},
       {"never", partial::ReplayMode::kNever},
       {"require", partial::ReplayMode::kRequire}},
      "replay logged gradients to bring experts to the restored "
      "iteration. require: exit with code 5 unless all experts reach it");
  app.AddFlag("--allow-older", &options.allow_older,
              "use an older version for a damaged blob; verifies all blobs");
  app.AddText("--restart-missing", &options.restart_missing,
              "checkpoint from which experts without any saved version restart", "CHECKPOINT");
  app.AddFlag("--restart", &options.restart,
              "record that training restarts from OUTPUT, which abandons newer checkpoints; "
              "without the flag, the next save into the store decides");
  app.AddFlag("--read-only", &options.read_only,
              "leave the store unchanged (implied by --format safetensors)");
  app.AddFlag("--allow-empty", &options.allow_empty,
              "accept a readable store without a checkpoint: restore nothing, and set the report's "
              "iteration to null");
  app.AddFlag("--begin", &options.begin,
              "with --allow-empty, at the first start of a run: create a missing store; later "
              "starts fail if it is missing");
  app.AddList("--agents", &agents,
              "also restore from the memory of these agents, separated by commas; they first save "
              "the data that the store lacks",
              "unix:PATH|HOST:PORT,...");
  app.AddList("--lost-nodes", &lost,
              "lost agents: positions in --agents from 0, or \"unreachable\" for all that do not "
              "answer; uses copies on other agents",
              "N,...");
  app.AddText("--trim-tokens", &token_log,
              "with --restart: remove the lines of this token log that follow the restored "
              "iteration, and a truncated last line; the log may be missing",
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
    return Fail(Errc::kUsage, "--require-complete cannot be combined with --restart-missing");
  }
  if (options.replay == partial::ReplayMode::kRequire && !options.restart_missing.empty()) {
    return Fail(Errc::kUsage, "--replay require cannot be combined with --restart-missing");
  }
  if (options.restart && options.read_only) {
    return Fail(Errc::kUsage, "--restart cannot be combined with --read-only");
  }
  if (options.format != nullptr && options.format->name == "safetensors") {
    SW_TRY(app.Exclude({"--restart"}, "--format safetensors, which only exports"));
    options.read_only = true;
  }
  if (options.begin && !options.allow_empty) {
    return Fail(Errc::kUsage, "--begin requires --allow-empty");
  }
  if (options.begin && options.read_only) {
    return Fail(Errc::kUsage, "--begin cannot be combined with --read-only");
  }
  if (!token_log.empty() && !options.restart && (options.format != nullptr || options.read_only)) {
    return Fail(
        Errc::kUsage,
        "--trim-tokens requires --restart, because only a restart makes later lines invalid");
  }
  if (options.format != nullptr) return {};
  // --format none writes no output.
  app.AllowAbsent(&output);
  for (const char* flag :
       {"--target", "--force", "--resume", "--no-resume", "--verify", "--strict", "--mode"}) {
    if (!app.IsSet(flag)) continue;
    return Fail(Errc::kUsage, flag,
                " cannot be combined with --format none, which writes no checkpoint");
  }
  return {};
}

}  // namespace shardwright::apps
