// SPDX-License-Identifier: Apache-2.0
// lib/support/cli: flags, messages, progress and exit codes that all commands share.
// A command declares its flags with App and gives it a body. App parses the arguments, starts MPI,
// catches signals and shows progress. At the end it prints the answer, writes the report, and
// returns an exit code that is the same on all ranks. See run.cc. Source: docs/commands.md.

#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/cli/flags.h"
#include "support/comm/comm.h"
#include "support/text/table.h"

namespace CLI {  // NOLINT(readability-identifier-naming): theirs
class App;
class Option;
}  // namespace CLI

namespace shardwright::cli {

class Parser;

/// An example at the beginning of the help text.
struct Example {
  std::string arguments;  ///< arguments after the command's name
  std::string purpose;    ///< one sentence
};

/// A subcommand, called by its first argument: "pec-save check STORE". It has its own App,
/// named "pec-save check". To pass a file of the same name, write ./check.
struct Subcommand {
  std::string name;
  std::string about;                                 ///< one line for the command's own help
  std::function<int(int, const char* const*)> main;  ///< takes all arguments, returns the exit code
};

/// Returns the subcommand that the first argument names, or null if it names none.
/// Local.
const Subcommand* FindSubcommand(const std::vector<Subcommand>& list, int argc,
                                 const char* const* argv);

/// Ranks, sink, flags and output for the body of a command. Not thread-safe apart from sink().
class Context {
 public:
  Context(comm::Comm& comm, Sink& sink, const CommonFlags& flags);
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context();

  comm::Comm& comm() { return comm_; }
  Sink& sink() { return sink_; }
  const CommonFlags& flags() const { return flags_; }
  /// Returns the command line as typed, without the path of the program, quoted for a shell.
  const std::string& command_line() const { return command_line_; }

  /// Stream for the answer in plain text. Rank 0 prints it to stdout when the body has
  /// returned, also after an error, unless --json writes to stdout. Escape names from
  /// files with Printable (support/text/text.h).
  std::ostream& out() { return *out_; }

  /// Adds a table to the answer, as wide as the terminal allows.
  void Print(const text::Table& table);

  /// Sets the report's `result`, the answer for programs. Only rank 0's is used. \pre an object
  void SetResult(nlohmann::json result);

 private:
  friend class App;
  comm::Comm& comm_;
  Sink& sink_;
  const CommonFlags& flags_;
  std::string command_line_;
  std::unique_ptr<std::ostringstream> out_;
  std::unique_ptr<nlohmann::json> result_;
};

/// A command with its flags and the tasks that all commands share: help, usage errors,
/// signals, progress, the report and the exit code.
class App {
 public:
  using Body = std::function<Status(Context&)>;

  /// \param name  the command as typed, with the subcommand after a space
  /// \param about  one sentence for the help text
  /// \param examples  at least one
  App(std::string name, std::string about, std::vector<Example> examples);
  App(const App&) = delete;
  App& operator=(const App&) = delete;
  ~App();

  /// Makes the command ignore MPI, even under a launcher. Each process then does all of the
  /// work, also if only one process of a job step runs the command.
  void Alone();

  /// Adds shared flags that the command has in addition to those that every command has.
  void Use(std::initializer_list<Shared> flags);

  /// Adds a required positional, by default INPUT.
  void AddInput(std::string* input, std::string_view what, const std::string& name = "INPUT");
  /// Adds a positional that may be absent.
  void AddOptionalInput(std::string* input, std::string_view what, const std::string& name);
  /// Adds the positional OUTPUT, or one with another name. It is required unless --list or
  /// --explain is given, and an error with them.
  void AddOutput(std::string* output, std::string_view what, const std::string& name = "OUTPUT");
  /// Adds the positionals INPUT and OUTPUT.
  void AddInputOutput(std::string* input, std::string* output,
                      std::string_view what_input = "checkpoint to read",
                      std::string_view what_output = "folder to create");

  /// Adds the subcommands to the help text.
  void AddSubcommands(const std::vector<Subcommand>& list);

  /// Adds flags to the output of -h, in addition to the usual ones. --help shows all flags.
  void ShowInShortHelp(std::initializer_list<std::string_view> flags);

  /// Puts the flags added from now on under a heading of --help.
  void Group(const std::string& heading);

  // Flags of the command. `flag` is "--name" or "-x,--name", and `what` is one sentence without a
  // full stop. An absent flag leaves the variable unchanged, and --help shows its value as default.

  /// Adds a switch, off unless given.
  CLI::Option* AddFlag(const std::string& flag, bool* value, std::string_view what);
  /// Adds a text flag. `kind` is the placeholder for its value in --help, such as "FILE".
  CLI::Option* AddText(const std::string& flag, std::string* value, std::string_view what,
                       std::string_view kind = "TEXT");
  /// Adds a flag that may be repeated. Each use appends one text.
  CLI::Option* AddList(const std::string& flag, std::vector<std::string>* values,
                       std::string_view what, std::string_view kind = "NAME");
  /// Adds a whole number in [first, last]. A *value outside means "not given" and is not shown.
  CLI::Option* AddCount(const std::string& flag, std::uint64_t* value, std::uint64_t first,
                        std::uint64_t last, std::string_view what);
  /// Adds a whole number in [first, last] that stays absent unless given.
  CLI::Option* AddCount(const std::string& flag, std::optional<std::uint64_t>* value,
                        std::uint64_t first, std::uint64_t last, std::string_view what);
  /// Adds a finite number in [first, last]. A *value outside means "not given", as in AddCount.
  CLI::Option* AddReal(const std::string& flag, double* value, double first, double last,
                       std::string_view what);
  /// Adds a finite number in [first, last] that stays absent unless given.
  CLI::Option* AddReal(const std::string& flag, std::optional<double>* value, double first,
                       double last, std::string_view what);
  /// Adds a size in bytes, in the syntax of ParseBytes.
  CLI::Option* AddSize(const std::string& flag, std::uint64_t* value, std::string_view what);
  /// Adds a bandwidth in bytes per second, in the syntax of ParseBandwidth.
  CLI::Option* AddBandwidth(const std::string& flag, std::uint64_t* value, std::string_view what);
  /// Adds a flag with one of `words` as its value.
  CLI::Option* AddChoice(const std::string& flag, std::string* value,
                         const std::vector<std::string>& words, std::string_view what);
  /// Adds --name or --name=VALUE. The argument after it is never used as the value.
  CLI::Option* AddOptionalValue(const std::string& flag, std::optional<std::string>* value,
                                const std::string& when_bare, std::string_view what,
                                std::string_view kind = "VALUE");

  /// Adds a flag with one name of a list of names and values. \pre *value is in the list
  template <class E>
  CLI::Option* AddEnum(const std::string& flag, E* value,
                       const std::vector<std::pair<std::string, E>>& words, std::string_view what) {
    std::vector<std::string> names;
    std::string start;
    for (const auto& [name, word_value] : words) {
      names.push_back(name);
      if (word_value == *value) start = name;
    }
    return AddChosen(flag, names, start, what,
                     [value, words](std::size_t i) { *value = words[i].second; });
  }

  /// Sets words that shell completion suggests for a flag's value. Other values stay valid.
  /// Words that end in "=" may be combined with commas.
  void Suggest(const CLI::Option* option, std::vector<std::string> words);

  /// Sets an environment variable that provides the value of an absent AddText flag.
  void FromEnvironment(const std::string& flag, std::string* value, const std::string& variable);

  /// Adds a rule about several flags. Run calls it after parsing, before anything starts,
  /// and reports its error as a usage error.
  void Check(std::function<Status()> rule);

  /// Allows the positional of *value to be absent in this run. Call it within a rule.
  void AllowAbsent(const std::string* value);

  /// True once Run has parsed `flag` ("--name") among the arguments.
  bool IsSet(const std::string& flag) const;

  /// Fails if one of `flags` is given, because it has no effect with `other`. For rules.
  /// \param other  ends the message "--x cannot be combined with "
  /// \error kUsage  names the first flag that is given
  Status Exclude(std::initializer_list<const char*> flags, const std::string& other) const;

  /// Fails if one of `flags` is given, because it has no effect without `needed`. For rules.
  /// \param needed  ends the message "--x requires "
  /// \error kUsage  names the first flag that is given
  Status Require(std::initializer_list<const char*> flags, const std::string& needed) const;

  /// Returns the underlying CLI11 parser, for cases that the functions above do not cover.
  CLI::App& cli();

  /// Parses the arguments and runs the command.
  /// \returns the exit code for main, the same on all ranks
  /// Collective.
  int Run(int argc, const char* const* argv, const Body& body);

 private:
  CLI::Option* AddChosen(const std::string& flag, const std::vector<std::string>& words,
                         const std::string& start, std::string_view what,
                         const std::function<void(std::size_t)>& choose);

  std::unique_ptr<Parser> parser_;
  bool alone_ = false;
};

}  // namespace shardwright::cli
