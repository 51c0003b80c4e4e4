// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <utility>

#include "support/base/text.h"
#include "support/base/version.h"
#include "support/cli/parser_internal.h"
#include "support/cli/renames.h"
#include "support/cli/resources.h"
#include "support/text/text.h"

namespace shardwright::cli {
namespace {

/// Shared flags, to distinguish unknown flags from flags that this command does not have.
constexpr std::string_view kSharedNames[] = {
    "--dry-run", "--force",   "--resume", "--no-resume", "--verify",    "--threads",     "--memory",
    "--list",    "--explain", "--seed",   "--mode",      "--take-over", "--rank-timeout"};

constexpr std::uint64_t kRankTimeoutMost = std::uint64_t{7} * 24 * 3600;

tl::unexpected<Error> Usage(const std::string& message) { return Fail(Errc::kUsage, message); }

/// Returns the arguments up to a "--".
std::vector<std::string> BeforeDashes(const std::vector<std::string>& args) {
  return {args.begin(), std::find(args.begin(), args.end(), "--")};
}

std::string EnvironmentText(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? "" : text;
}

}  // namespace

std::string LongName(const std::string& flag) {
  const std::size_t at = flag.find("--");
  return at == std::string::npos ? flag : flag.substr(at, flag.find(',', at) - at);
}

Parser::Parser(std::string name, std::string about, std::vector<Example> examples)
    : name_(std::move(name)),
      about_(std::move(about)),
      examples_(std::move(examples)),
      cli_(about_, name_) {
  SW_CHECK(!examples_.empty());
  // CheckUnknown reports unknown arguments later, with a hint.
  cli_.allow_extras();
  cli_.set_help_flag();
  Group(kOwnGroup);
}

void Parser::Group(const std::string& heading) {
  groups_.push_back(heading);
  cli_.option_defaults()->group(heading);
}

void Parser::AddPositional(const std::string& name, std::string* value, std::string_view what,
                           PositionalKind kind) {
  CLI::Option* option = cli_.add_option(name, *value, std::string(what));
  positionals_.push_back({option, value, kind});
}

void Parser::Choose(CLI::Option* option, std::vector<std::string> words) {
  option->type_name(Joined(words, "|"));
  Suggest(option, std::move(words));
}

void Parser::AddShared() {
  cli_.option_defaults()->group(kSharedGroup);
  if (Uses(Shared::kList) || Uses(Shared::kExplain)) AddDescribeFlags();
  AddRunFlags();
  AddCommonFlags();
}

void Parser::AddDescribeFlags() {
  if (Uses(Shared::kList)) {
    cli_.add_flag("--list", flags_.list,
                  "print the contents of INPUT and exit; reads metadata only")
        ->disable_flag_override();
  }
  if (Uses(Shared::kExplain)) {
    cli_.add_option_function<std::string>(
            "--explain", [this](const std::string& name) { flags_.explain = name; },
            "print the shards and bytes of tensor NAME and exit; reads metadata only")
        ->type_name("NAME");
  }
}

void Parser::AddResumeFlags() {
  const auto add = [this](const char* flag, Resume value, const char* what) {
    cli_.add_flag_callback(
            flag, [this, value] { flags_.resume = value; }, what)
        ->disable_flag_override();
  };
  add("--resume", Resume::kIfSameOrDone, "exit with code 0 if OUTPUT is complete already");
  add("--no-resume", Resume::kNever, "remove what a stopped run has written, and start again");
}

void Parser::AddRunFlags() {
  const auto add_switch = [this](Shared which, const char* flag, bool& value, const char* what) {
    if (Uses(which)) cli_.add_flag(flag, value, what)->disable_flag_override();
  };
  add_switch(Shared::kDryRun, "-n,--dry-run", flags_.dry_run,
             "print all reads, writes, files, memory and disk space; write nothing");
  add_switch(Shared::kForce, "--force", flags_.force, "replace an existing output atomically");
  if (Uses(Shared::kResume)) AddResumeFlags();
  add_switch(Shared::kTakeOver, "--take-over", flags_.take_over,
             "if a process on another machine has the lock: wait until its last heartbeat is 180 s "
             "old, then remove the lock (docs/filesystems.md)");
  if (Uses(Shared::kVerify)) {
    CLI::Option* option = cli_.add_option_function<std::string>(
        "--verify",
        [this](const std::string& text) {
          flags_.verify = ValueOrThrow(ParseVerify(text), "--verify");
        },
        "how much to verify. checksums: those of the data that is read; replicas: also that "
        "replicas are equal; readback: also read the output again before committing it");
    Choose(option, {"none", "checksums", "replicas", "readback"});
    ShowDefault(option, "checksums");
  }
  if (Uses(Shared::kThreads)) {
    CLI::Option* option = cli_.add_option_function<std::string>(
        "--threads",
        [this](const std::string& text) {
          flags_.threads =
              static_cast<unsigned>(ValueOrThrow(ParseCount(text, 1, kThreadsMax), "--threads"));
        },
        "threads per rank");
    ShowDefault(option->type_name("N"), "this rank's share of the processors");
  }
  if (Uses(Shared::kThreads) && !alone_) {
    CLI::Option* option = cli_.add_option_function<std::string>(
        "--rank-timeout",
        [this](const std::string& text) {
          flags_.rank_timeout_s =
              ValueOrThrow(ParseCount(text, 0, kRankTimeoutMost), "--rank-timeout");
        },
        "with several ranks: exit with code 75 if a rank hangs or is cut off for this many "
        "seconds; 0: wait without limit");
    ShowDefault(option->type_name("SECONDS"), std::to_string(kRankTimeout));
  }
  if (Uses(Shared::kMemory)) {
    CLI::Option* option = cli_.add_option_function<std::string>(
        "--memory",
        [this](const std::string& text) {
          flags_.memory_bytes = ValueOrThrow(ParseMemory(text), "--memory");
        },
        "memory limit per rank, in GiB (2^30) or GB or G (10^9)");
    ShowDefault(option->type_name("SIZE"),
                "1GiB or, if less, a rank's share of a quarter of the memory");
  }
  if (Uses(Shared::kSeed)) {
    CLI::Option* option = cli_.add_option_function<std::string>(
        "--seed",
        [this](const std::string& text) {
          flags_.seed = ValueOrThrow(ParseCount(text, 0, UINT64_MAX), "--seed");
        },
        "random seed");
    ShowDefault(option->type_name("N"), "0");
  }
  if (Uses(Shared::kMode)) {
    CLI::Option* option = cli_.add_option_function<std::string>(
        "--mode",
        [this](const std::string& text) { flags_.mode = ValueOrThrow(ParseMode(text), "--mode"); },
        "permissions of new files, such as 0600 or 0640; new folders also get execute where they "
        "have read");
    ShowDefault(option->type_name("MODE"), "set by the umask");
  }
}

void Parser::AddCommonFlags() {
  // ReadEarlyFlags reads the value, so that even a usage error is reported. This adds the name.
  CLI::Option* json = cli_.add_flag("--json{-}", json_text_,
                                    "write a JSON report to FILE, or to stdout without FILE");
  ShowOptional(json, "FILE");
  CLI::Option* progress = cli_.add_option_function<std::string>(
      "--progress",
      [this](const std::string& text) {
        flags_.progress = ValueOrThrow(ParseProgressMode(text), "--progress");
      },
      "how to show progress on stderr");
  Choose(progress, {"auto", "tty", "plain", "json", "off"});
  ShowDefault(progress, "auto");
  cli_.add_option("--log-file", flags_.log_file,
                  "append every message to FILE; {rank} in FILE is replaced by the rank")
      ->type_name("FILE");
  CLI::Option* color = cli_.add_option_function<std::string>(
      "--color",
      [this](const std::string& text) {
        flags_.color = ValueOrThrow(ParseColorMode(text), "--color");
      },
      "use colours on stderr");
  Choose(color, {"auto", "always", "never"});
  ShowDefault(color, "auto");
  cli_.add_flag("-v,--verbose", verbose_, "print more messages; may be repeated");
  cli_.add_flag("-q,--quiet", quiet_, "print errors only")->disable_flag_override();
  cli_.set_help_flag("-h,--help", "print the common flags (-h) or all flags (--help) and exit");
  cli_.set_version_flag("--version", std::string(), "print the version and exit");
}

void Parser::ReadEarlyFlags(const std::vector<std::string>& args) {
  constexpr std::string_view kJson = "--json";
  for (const std::string& arg : args) {
    if (arg == kJson) flags_.json = "-";
    if (arg.starts_with("--json=") && arg.size() > kJson.size() + 1) {
      flags_.json = arg.substr(kJson.size() + 1);
    }
    if (arg == "-q" || arg == "--quiet") flags_.verbosity = -1;
  }
}

Result<Action> Parser::Parse(const std::vector<std::string>& args) {
  AddShared();
  const std::vector<std::string> flag_args = BeforeDashes(args);
  ReadEarlyFlags(flag_args);
  if (!flag_args.empty() && !flag_args.front().starts_with("-")) {
    SW_TRY(CheckRenamed(flag_args.front()));
  }
  // Help works even if other arguments are invalid.
  for (const std::string& arg : flag_args) {
    if (arg == "-h") return Action::kShortHelp;
    if (arg == "--help") return Action::kHelp;
    if (arg == "--help=json") return Action::kDescribe;
    if (arg == "--version") return Action::kVersion;
  }
  SW_TRY(CheckTokens(flag_args));
  flags_.threads = DefaultThreads();
  flags_.memory_bytes = DefaultMemoryBytes();
  try {
    std::vector<std::string> reversed(args.rbegin(), args.rend());
    cli_.parse(std::move(reversed));
  } catch (const CLI::CallForHelp&) {
    return Action::kHelp;
  } catch (const CLI::CallForVersion&) {
    return Action::kVersion;
  } catch (const CLI::ParseError& error) {
    SW_TRY(CheckUnknown());
    SW_TRY(CheckRenamedValues(flag_args));
    SW_TRY(FromParseError(error));
  }
  SW_TRY(CheckUnknown());
  if (quiet_ && verbose_ > 0) return Usage("-q cannot be combined with -v");
  flags_.verbosity = quiet_ ? -1 : verbose_;
  for (const Variable& one : environment_) {
    if (!GivenFlag(one.flag)) *one.value = EnvironmentText(one.name.c_str());
  }
  // Rules run before the checks, since a rule may set a positional from a flag.
  for (const auto& rule : rules_) {
    if (Status status = rule(); !status) return Usage(status.error().message);
  }
  SW_TRY(CheckPositionals());
  SW_TRY(CheckCombinations());
  SW_TRY(ReadEnvironment());
  return Action::kRun;
}

Status Parser::CheckTokens(const std::vector<std::string>& args) const {
  for (const std::string& arg : args) {
    if (arg.starts_with("--") && arg.size() > 3 && arg.find('=') == arg.size() - 1) {
      return Usage(arg.substr(0, arg.size() - 1) + ": expected a value after \"=\"");
    }
  }
  return {};
}

Status Parser::CheckRenamed(const std::string& old) const {
  const Rename* const found = FindRename(command(), old);
  if (found == nullptr) return {};
  const std::string now(found->now);
  // A renamed flag is reported by commands that have the new one. Flags that became subcommands
  // and old subcommands are reported by the command itself.
  const bool is_flag = now.starts_with("--");
  const bool belongs = is_flag ? cli_.get_option_no_throw(now.substr(0, now.find('='))) != nullptr
                               : !is_subcommand();
  if (!belongs) return {};
  return Usage((old.starts_with("--") ? old : name_ + " " + old) + " is now " + now);
}

Status Parser::CheckRenamedValues(const std::vector<std::string>& args) const {
  for (std::size_t i = 0; i < args.size(); ++i) {
    const bool is_alone = args[i].find('=') == std::string::npos && i + 1 < args.size();
    SW_TRY(CheckRenamed(is_alone ? args[i] + "=" + args[i + 1] : args[i]));
  }
  return {};
}

Status Parser::CheckUnknown() const {
  for (const std::string& arg : cli_.remaining()) {
    if (arg.starts_with("--")) SW_TRY(CheckRenamed(arg.substr(0, arg.find('='))));
  }
  for (const std::string& arg : cli_.remaining()) {
    if (!arg.starts_with("-") || arg == "-") continue;
    const std::string flag = arg.substr(0, arg.find('='));
    if (std::find(std::begin(kSharedNames), std::end(kSharedNames), flag) !=
        std::end(kSharedNames)) {
      return Usage(name_ + " does not accept " + flag);
    }
    std::string message = "unknown flag " + Quoted(flag);
    if (const std::string near = text::Nearest(flag, FlagNames()); !near.empty()) {
      message += ", did you mean " + near + "?";
    }
    return Usage(message);
  }
  if (const auto rest = cli_.remaining(); !rest.empty()) {
    return Usage("unexpected argument " + Quoted(rest.front()));
  }
  return {};
}

Status Parser::CheckPositionals() const {
  for (const Subcommand& one : subcommands_) {
    if (positionals_.empty() || *positionals_.front().value != one.name) continue;
    return Usage(Quoted(one.name) + " is a subcommand: put it before all flags, as in " + name_ +
                 " " + one.name + "; for a file of that name, write ./" + one.name);
  }
  for (const Positional& positional : positionals_) {
    const bool is_written = positional.kind == PositionalKind::kWritten;
    const bool wanted = !is_written || !flags_.describes();
    const bool given = positional.option->count() > 0;
    const std::string name = positional.option->get_name(true);
    if (positional.kind == PositionalKind::kOptional && !given) continue;
    // A flag of the command may also have set the value.
    if (wanted && positional.value->empty() &&
        (given || !may_be_absent_.contains(positional.value))) {
      return Usage(given ? name + " is empty" : name + " is missing");
    }
    if (!wanted && given) {
      return Usage(std::string(flags_.list ? "--list" : "--explain") +
                   ", which writes nothing, takes no " + name + ": remove " +
                   Quoted(*positional.value));
    }
  }
  return {};
}

Status Parser::CheckCombinations() const {
  if (GivenFlag("--resume") && GivenFlag("--no-resume")) {
    return Usage("--resume cannot be combined with --no-resume");
  }
  if (flags_.list && flags_.explain) return Usage("--list cannot be combined with --explain");
  if (!flags_.describes()) return {};
  for (const char* flag :
       {"--dry-run", "--force", "--resume", "--no-resume", "--verify", "--seed", "--mode"}) {
    if (GivenFlag(flag)) {
      return Usage(std::string(flag) + " cannot be combined with " +
                   (flags_.list ? "--list" : "--explain") + ", which writes nothing");
    }
  }
  return {};
}

bool Parser::GivenFlag(const std::string& name) const {
  const CLI::Option* option = cli_.get_option_no_throw(name);
  return option != nullptr && option->count() > 0;
}

Status Parser::ReadEnvironment() {
  const auto wanted = [this](const char* flag, std::string& text, const char* variable) {
    if (!GivenFlag(flag)) text = EnvironmentText(variable);
    return !text.empty();
  };
  std::string text;
  if (Uses(Shared::kThreads) && wanted("--threads", text, "SHARDWRIGHT_THREADS")) {
    const auto threads = ParseCount(text, 1, kThreadsMax);
    if (!threads) return Within("SHARDWRIGHT_THREADS", threads.error());
    flags_.threads = static_cast<unsigned>(*threads);
  }
  text.clear();
  if (Uses(Shared::kMemory) && wanted("--memory", text, "SHARDWRIGHT_MEMORY")) {
    const auto bytes = ParseMemory(text);
    if (!bytes) return Within("SHARDWRIGHT_MEMORY", bytes.error());
    flags_.memory_bytes = *bytes;
  }
  text.clear();
  if (wanted("--log-file", text, "SHARDWRIGHT_LOG")) flags_.log_file = text;
  return {};
}

Status Parser::FromParseError(const CLI::ParseError& error) const {
  for (const CLI::Option* option : cli_.get_options()) {
    const bool single = option->get_items_expected_max() <= 1 &&
                        option->get_multi_option_policy() == CLI::MultiOptionPolicy::Throw;
    if (single && option->results().size() > 1) {
      return Usage(option->get_name() + ": given " + std::to_string(option->results().size()) +
                   " times, expected once");
    }
  }
  std::string text = error.what();
  std::string flag = text.substr(0, text.find_first_of(": "));
  // CLI11 omits the dashes in the message when a switch gets a value.
  if (!flag.starts_with("-")) flag.insert(0, flag.size() == 1 ? "-" : "--");
  const CLI::Option* option = cli_.get_option_no_throw(flag);
  if (error.get_name() == "ArgumentMismatch" && option != nullptr) {
    const bool is_switch = option->get_items_expected_max() == 0;
    return Usage(flag + (is_switch ? ": takes no value" : ": requires a value"));
  }
  if (!text.empty() && text.back() == '.') text.pop_back();
  if (!text.empty()) text[0] = static_cast<char>(std::tolower(static_cast<unsigned char>(text[0])));
  return Usage(text);
}

std::vector<std::string> Parser::FlagNames() const {
  std::vector<std::string> names;
  for (const CLI::Option* option : cli_.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

}  // namespace shardwright::cli
