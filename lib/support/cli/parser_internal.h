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

/// What the arguments ask for.
enum class Action { kRun, kShortHelp, kHelp, kDescribe, kVersion };

/// Whether a positional must be there.
enum class PositionalKind {
  kNeeded,
  kWritten,  ///< needed, and allowed, only without --list and --explain
  kOptional,
};

/// The command line of one command: its own flags, the shared ones, and the texts about them.
class Parser {
 public:
  Parser(std::string name, std::string about, std::vector<Example> examples);

  /// Reads the arguments (without the program's name) and the environment into flags().
  /// flags().json and the verbosity are right on failure too, as far as they could be read.
  /// Call it once, after the command's own flags are declared: --help lists those first.
  /// \error kUsage
  Result<Action> Parse(const std::vector<std::string>& args);

  /// What one needs daily (-h).
  std::string ShortHelpText() const;
  /// All there is (--help).
  std::string HelpText() const;
  /// The same as JSON, for whoever makes manual pages and completions.
  std::string DescribeText() const;
  std::string VersionText() const;

  void AddPositional(const std::string& name, std::string* value, std::string_view what,
                     PositionalKind kind);
  void AllowAbsent(const std::string* value) { may_be_absent_.insert(value); }
  /// Own options from now on stand under this heading of --help.
  void Group(const std::string& heading);
  void AddSubcommands(const std::vector<Subcommand>& list) { subcommands_ = list; }
  void ShowInShortHelp(std::string flag) { short_help_.insert(std::move(flag)); }
  /// How --help writes the value of a flag that may do without one: "--json[=FILE]".
  void ShowOptional(const CLI::Option* option, std::string kind) {
    optional_[option] = std::move(kind);
  }
  /// Words that a value is one of.
  void Choose(CLI::Option* option, std::vector<std::string> words);
  /// Words that completions offer for a value, which may be another one or, for those that end in
  /// "=", a list of them.
  void Suggest(const CLI::Option* option, std::vector<std::string> words) {
    words_[option] = std::move(words);
  }
  /// The default that --help shows.
  void ShowDefault(const CLI::Option* option, std::string text) {
    defaults_[option] = std::move(text);
  }

  CLI::App& cli() { return cli_; }
  const CommonFlags& flags() const { return flags_; }
  /// The command, without a subcommand.
  std::string command() const { return name_.substr(0, name_.find(' ')); }
  /// As typed: "pec-save check".
  const std::string& name() const { return name_; }
  bool is_subcommand() const { return name_.find(' ') != std::string::npos; }
  bool Uses(Shared flag) const { return used_.contains(flag); }
  void Use(Shared flag) { used_.insert(flag); }
  /// A variable that stands for an own flag where it is absent.
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
  std::set<Shared> used_;
  std::vector<Positional> positionals_;
  std::set<const std::string*> may_be_absent_;
  std::vector<Subcommand> subcommands_;
  std::set<std::string> short_help_ = {"--list",   "--explain", "--dry-run", "--force",
                                       "--resume", "--json",    "--help"};
  std::vector<std::string> groups_;                     // own ones, in the order of --help
  std::map<const CLI::Option*, std::string> optional_;  // what their value is
  std::map<const CLI::Option*, std::vector<std::string>> words_;
  std::map<const CLI::Option*, std::string> defaults_;
  std::vector<Variable> environment_;  // of own flags
  std::vector<std::function<Status()>> rules_;
  std::string json_text_;
  bool quiet_ = false;
  int verbose_ = 0;
};

inline constexpr const char* kOwnGroup = "Flags";
inline constexpr const char* kSharedGroup = "Shared flags";

/// Throws the parser's own error for a Result that is one; the parser catches it in Parse.
template <class T>
T ValueOrThrow(Result<T> result, const std::string& flag) {
  if (!result) throw CLI::ValidationError(flag, result.error().message);
  return *std::move(result);
}

/// The first long name in "-x,--name" or "--name".
std::string LongName(const std::string& flag);

}  // namespace shardwright::cli
