// SPDX-License-Identifier: Apache-2.0
// lib/support/cli: what all commands share.
// A command declares its flags with App and gives it a body. App parses, starts MPI, catches
// signals, shows progress, and ends with the answer, the report, and an exit code that is the same
// on all ranks. Its steps are in run.cc. Source: docs/commands.md.

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

/// One of the examples that start the help.
struct Example {
  std::string arguments;  ///< what follows the command's name
  std::string purpose;    ///< one sentence
};

/// Another thing that a command does, called by its first argument: "pec-save check STORE". It has
/// an App of its own, named "pec-save check". A file of that name is reached as ./check.
struct Subcommand {
  std::string name;
  std::string about;                                 ///< one line for the command's own help
  std::function<int(int, const char* const*)> main;  ///< takes all arguments, returns the exit code
};

/// The one that the first argument names, or null.
/// Local.
const Subcommand* FindSubcommand(const std::vector<Subcommand>& list, int argc,
                                 const char* const* argv);

/// What a command's body works with. Not thread-safe apart from sink().
class Context {
 public:
  Context(comm::Comm& comm, Sink& sink, const CommonFlags& flags);
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context();

  comm::Comm& comm() { return comm_; }
  Sink& sink() { return sink_; }
  const CommonFlags& flags() const { return flags_; }

  /// The answer for people: shown on stdout when the body is over, whatever its status, from rank 0
  /// only and not with --json to stdout. Names out of files go through Printable
  /// (support/text/text.h).
  std::ostream& out() { return *out_; }

  /// Adds a table to the answer, as wide as the terminal allows.
  void Print(const text::Table& table);

  /// The answer for programs: the report's `result`. Rank 0's counts. \pre an object
  void SetResult(nlohmann::json result);

 private:
  friend class App;
  comm::Comm& comm_;
  Sink& sink_;
  const CommonFlags& flags_;
  std::unique_ptr<std::ostringstream> out_;
  std::unique_ptr<nlohmann::json> result_;
};

/// A command: its flags, and everything around its work that all commands share: help, usage
/// errors, signals, progress, the report and the exit code.
class App {
 public:
  using Body = std::function<Status(Context&)>;

  /// \param name  the command, as typed, and the subcommand after a space
  /// \param about  one sentence for the help
  /// \param examples  at least one
  App(std::string name, std::string about, std::vector<Example> examples);
  App(const App&) = delete;
  App& operator=(const App&) = delete;
  ~App();

  /// Has the command never join MPI, whatever launcher has started it: each process does all of the
  /// work, also where one process of a job step calls it.
  void Alone();

  /// Names the shared flags that the command has besides those that all have.
  void Use(std::initializer_list<Shared> flags);

  /// The positional INPUT, or of another name.
  void AddInput(std::string* input, std::string_view what, const std::string& name = "INPUT");
  /// A positional that may be absent.
  void AddOptionalInput(std::string* input, std::string_view what, const std::string& name);
  /// Adds the positional OUTPUT, or one with another name. It is required unless --list or
  /// --explain is given, and an error with them.
  void AddOutput(std::string* output, std::string_view what, const std::string& name = "OUTPUT");
  /// INPUT and OUTPUT.
  void AddInputOutput(std::string* input, std::string* output,
                      std::string_view what_input = "checkpoint to read",
                      std::string_view what_output = "folder to create");

  /// Names the other things that the command does, for its help.
  void AddSubcommands(const std::vector<Subcommand>& list);

  /// Names the flags that -h shows, besides those that write or describe; --help shows all.
  void ShowInShortHelp(std::initializer_list<std::string_view> flags);

  /// Puts the flags added from now on under a heading of --help.
  void Group(const std::string& heading);

  // Flags of the command. `flag` is "--name" or "-x,--name", `what` one sentence without its stop.
  // The variable keeps its value when the flag is absent; that value is the default in --help.

  /// A switch, off unless given.
  CLI::Option* AddFlag(const std::string& flag, bool* value, std::string_view what);
  /// A text; `kind` is what --help calls it, as "FILE".
  CLI::Option* AddText(const std::string& flag, std::string* value, std::string_view what,
                       std::string_view kind = "TEXT");
  /// A text for every time the flag is given.
  CLI::Option* AddList(const std::string& flag, std::vector<std::string>* values,
                       std::string_view what, std::string_view kind = "NAME");
  /// A whole number in [first, last]. A *value outside stands for "not given" and is not shown.
  CLI::Option* AddCount(const std::string& flag, std::uint64_t* value, std::uint64_t first,
                        std::uint64_t last, std::string_view what);
  /// The same; absent unless given.
  CLI::Option* AddCount(const std::string& flag, std::optional<std::uint64_t>* value,
                        std::uint64_t first, std::uint64_t last, std::string_view what);
  /// A finite number in [first, last]; outside as AddCount.
  CLI::Option* AddReal(const std::string& flag, double* value, double first, double last,
                       std::string_view what);
  /// The same; absent unless given.
  CLI::Option* AddReal(const std::string& flag, std::optional<double>* value, double first,
                       double last, std::string_view what);
  /// A size as ParseBytes takes it.
  CLI::Option* AddSize(const std::string& flag, std::uint64_t* value, std::string_view what);
  /// Bytes per second as ParseBandwidth takes them.
  CLI::Option* AddBandwidth(const std::string& flag, std::uint64_t* value, std::string_view what);
  /// One word of `words`.
  CLI::Option* AddChoice(const std::string& flag, std::string* value,
                         const std::vector<std::string>& words, std::string_view what);
  /// --name or --name=VALUE; the next argument is never taken for the value.
  CLI::Option* AddOptionalValue(const std::string& flag, std::optional<std::string>* value,
                                const std::string& when_bare, std::string_view what,
                                std::string_view kind = "VALUE");

  /// One word of a list of names and values. \pre *value is among them
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

  /// Names words that shells offer for a flag's value, which may be another one; those that end in
  /// "=" may be joined by commas.
  void Suggest(const CLI::Option* option, std::vector<std::string> words);

  /// Names the variable of the environment that stands for a flag of AddText where it is absent.
  void FromEnvironment(const std::string& flag, std::string* value, const std::string& variable);

  /// A rule that joins several flags: called after they are parsed, before anything starts. Its
  /// error is a usage error.
  void Check(std::function<Status()> rule);

  /// Within a rule: the positional that fills *value may be absent in this run.
  void AllowAbsent(const std::string* value);

  /// True once Run has parsed `flag` ("--name") among the arguments.
  bool IsSet(const std::string& flag) const;

  /// Within a rule: fails if one of `flags` is given, because it has no effect with `other`.
  /// \param other  ends the message "--x cannot be combined with "
  /// \error kUsage  names the first flag that is given
  Status Exclude(std::initializer_list<const char*> flags, const std::string& other) const;

  /// Within a rule: fails if one of `flags` is given, because it has no effect without `needed`.
  /// \param needed  ends the message "--x requires "
  /// \error kUsage  names the first flag that is given
  Status Require(std::initializer_list<const char*> flags, const std::string& needed) const;

  /// The parser underneath, for what the helpers above cannot say.
  CLI::App& cli();

  /// Runs the command.
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
