// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <set>
#include <string>
#include <vector>

#include "support/base/result.h"
#include "support/cli/app.h"
#include "support/cli/flags.h"

namespace shardwright::cli {

/// Action that the arguments select.
enum class Action { kRun, kShortHelp, kHelp, kDescribe, kVersion };

/// Defines when a positional argument is required.
enum class PositionalKind {
  kNeeded,
  kWritten,  ///< required without --list and --explain, an error with them
  kOptional,
};

/// Command line of one command: its own flags, the shared flags, and their help texts.
class Parser {
 public:
  Parser(std::string name, std::string about, std::vector<Example> examples);

  /// Parses the arguments (without the program's name) and the environment into flags(). After
  /// a failure flags().json and the verbosity are still set, as far as they could be read. Call
  /// it once, after the command has declared its own flags, which --help lists first.
  /// \error kUsage  invalid arguments or environment variables
  Result<Action> Parse(const std::vector<std::string>& args);

  /// Returns the text for -h: the flags for daily use.
  std::string ShortHelpText() const;
  /// Returns the text for --help: all flags.
  std::string HelpText() const;
  /// Returns all flags as JSON, for the scripts that generate manual pages and completions.
  std::string DescribeText() const;
  std::string VersionText() const;

  void AddPositional(const std::string& name, std::string* value, std::string_view what,
                     PositionalKind kind);
  void AllowAbsent(const std::string* value) { may_be_absent_.insert(value); }
  /// Starts a new heading of --help for the command's flags that are added later.
  void Group(const std::string& heading);
  void AddSubcommands(const std::vector<Subcommand>& list) { subcommands_ = list; }
  void ShowInShortHelp(std::string flag) { short_help_.insert(std::move(flag)); }
  /// Sets how --help shows the value of a flag that may also have none: "--json[=FILE]".
  void ShowOptional(const CLI::Option* option, std::string kind) {
    optional_[option] = std::move(kind);
  }
  /// Restricts the value of a flag to `words`.
  void Choose(CLI::Option* option, std::vector<std::string> words);
  /// Sets words that completions suggest for a value. Other values are valid too. Words
  /// that end in "=" may form a list with commas.
  void Suggest(const CLI::Option* option, std::vector<std::string> words) {
    words_[option] = std::move(words);
  }
  /// Sets the default value that --help shows.
  void ShowDefault(const CLI::Option* option, std::string text) {
    defaults_[option] = std::move(text);
  }

  CLI::App& cli() { return cli_; }
  const CommonFlags& flags() const { return flags_; }
  /// Returns the command's name without the subcommand.
  std::string command() const { return name_.substr(0, name_.find(' ')); }
  /// Returns the name as typed: "pec-save check".
  const std::string& name() const { return name_; }
  bool is_subcommand() const { return name_.find(' ') != std::string::npos; }
  bool Uses(Shared flag) const { return used_.contains(flag); }
  void Use(Shared flag) { used_.insert(flag); }
  /// Omits flags that concern several ranks.
  void Alone() { alone_ = true; }
  /// Adds an environment variable that provides the value of an absent flag.
  void FromEnvironment(const std::string& flag, std::string* value, const std::string& variable) {
    environment_.push_back({flag, value, variable});
  }
  void AddRule(std::function<Status()> rule) { rules_.push_back(std::move(rule)); }

 private:
  struct Positional {
    CLI::Option* option;
    const std::string* value;
    PositionalKind kind;
  };

  struct Variable {
    std::string flag;
    std::string* value;
    std::string name;
  };

  void AddShared();
  void AddCommonFlags();
  void AddResumeFlags();
  void AddRunFlags();
  void AddDescribeFlags();
  void ReadEarlyFlags(const std::vector<std::string>& args);
  Status CheckTokens(const std::vector<std::string>& args) const;
  Status CheckUnknown() const;
  /// Fails if `old` is a flag, value or subcommand of an earlier version (renames.h).
  Status CheckRenamed(const std::string& old) const;
  Status CheckRenamedValues(const std::vector<std::string>& args) const;
  Status CheckPositionals() const;
  Status CheckCombinations() const;
  Status ReadEnvironment();
  Status FromParseError(const CLI::ParseError& error) const;
  std::vector<std::string> FlagNames() const;
  bool GivenFlag(const std::string& name) const;
  std::string HeadText() const;
  std::string OptionLines(const std::string& group, bool only_daily) const;
  bool IsDaily(const CLI::Option* option) const;
  std::string LeftColumn(const CLI::Option* option) const;
  std::string ValueKind(const CLI::Option* option) const;
  std::string DefaultOf(const CLI::Option* option) const;
  bool MayBeAbsent(const Positional& positional) const;
  nlohmann::ordered_json DescribeFlag(const CLI::Option* option) const;

  const std::string name_;
  const std::string about_;
  const std::vector<Example> examples_;
  CLI::App cli_;
  CommonFlags flags_;
  bool alone_ = false;
  std::set<Shared> used_;
  std::vector<Positional> positionals_;
  std::set<const std::string*> may_be_absent_;
  std::vector<Subcommand> subcommands_;
  std::set<std::string> short_help_ = {"--list",   "--explain", "--dry-run", "--force",
                                       "--resume", "--json",    "--help"};
  std::vector<std::string> groups_;                     // of the command, in the order of --help
  std::map<const CLI::Option*, std::string> optional_;  // kind of an optional value
  std::map<const CLI::Option*, std::vector<std::string>> words_;
  std::map<const CLI::Option*, std::string> defaults_;
  std::vector<Variable> environment_;  // for the command's own flags
  std::vector<std::function<Status()>> rules_;
  std::string json_text_;
  bool quiet_ = false;
  int verbose_ = 0;
};

inline constexpr const char* kOwnGroup = "Flags";
inline constexpr const char* kSharedGroup = "Shared flags";

/// Returns the value, or throws CLI11's ValidationError for a failed Result. Parse catches it.
template <class T>
T ValueOrThrow(Result<T> result, const std::string& flag) {
  if (!result) throw CLI::ValidationError(flag, result.error().message);
  return *std::move(result);
}

/// Returns the first long name in "-x,--name" or "--name".
std::string LongName(const std::string& flag);

}  // namespace shardwright::cli
