// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoints/registry.h"
#include "convert/convert.h"
#include "convert/input.h"
#include "support/base/result.h"
#include "support/cli/app.h"

namespace shardwright::apps {

/// Adds --patterns.
void AddPatterns(cli::App& app, std::vector<std::string>* files);

/// --trust-user: accept the agents and shared-memory caches of a user
/// at socket files, in addition to those of this process's user and of root.
struct TrustFlags {
  std::string user;

  void AddTo(cli::App& app);
  /// Returns the user, after the flags are parsed. \error kUsage  there is no such user
  Result<std::optional<std::uint32_t>> User() const;
};

/// The source flags that all ucp commands share: positional INPUT, --also, --patterns,
/// --allow-mixed, --node-local.
struct SourceFlags {
  std::string input;
  std::vector<std::string> also;
  std::vector<std::string> patterns;
  bool node_local = false;
  bool allow_mixed = false;
  bool siblings = false;
  std::vector<std::string> maps;
  std::string map_sizes;
  std::string weights_of;
  std::uint64_t io_concurrency = os::kIoThreads;

  /// \param parts  adds --node-local, for commands with ranks that may see parts of INPUT
  void AddTo(cli::App& app, bool parts = true);
  /// Adds --siblings, for commands that write a copy of INPUT. The default is `copy`.
  void AddSiblingsTo(cli::App& app);
  /// Adds --map, --map-sizes and --weights-of, for commands that can rename tensors.
  void AddMapTo(cli::App& app);
  /// Returns the options for the library. With --dry-run, --list or --explain, no payload is read.
  /// \param output  the output of the command, if it is a path
  convert::InputOptions Options(const cli::CommonFlags& flags,
                                const std::string& output = {}) const;
};

/// Flags for the output of a command: --format, --target with
/// the format's keys, and keys that have their own flag.
struct FormatFlags {
  const checkpoints::Format* format = &checkpoints::Formats().front();
  std::string target;
  bool fixed = false;      ///< the command writes one format and has no --format
  bool of_source = false;  ///< the default is the format of INPUT: then `format` is null
  bool strict = false;     ///< --strict
  bool for_ranks = false;  ///< only formats with files for certain ranks
  bool or_none = false;    ///< --format none writes nothing: `format` is null
  std::string none_help;   ///< help text of this value

  /// \param what  effect of keys you omit, for --help
  void AddTo(cli::App& app, const std::string& what);
  void AddKeyFlags(cli::App& app);
  /// Adds --strict.
  void AddStrictTo(cli::App& app);
  /// Returns the requested keys after parsing. Empty while `format` is null. \error kUsage
  Result<checkpoints::TargetSpec> Spec(const cli::App& app) const;
  /// Returns the first key flag given, such as "--loader", except `except`; empty without one.
  std::string GivenKeyFlag(const cli::App& app, std::string_view except = {}) const;
  /// Returns the value of a key's flag, given or default. \pre there is such a flag
  const std::string& ValueOf(std::string_view key) const;

 private:
  /// A key of one format that has its own flag.
  struct KeyFlag {
    const checkpoints::Format* format = nullptr;
    const checkpoints::TargetKey* key = nullptr;
    std::string value;
    bool on = false;  // the value of a flag without an argument
  };
  const KeyFlag* FindFlag(std::string_view name) const;

  std::vector<std::unique_ptr<KeyFlag>> key_flags_;  // the parser keeps their addresses
};

/// Returns the options of a conversion that writes `output`, from the shared flags.
convert::ConvertOptions WriteOptions(const cli::CommonFlags& flags, const std::string& output);

/// Opens a command's input as convert::OpenInput does. A stop request interrupts it at any point.
/// \error kStopped; as convert::OpenInput
/// Collective.
Result<std::unique_ptr<convert::Input>> OpenInput(cli::Context& context,
                                                  const convert::InputOptions& options);

/// Handles --list and --explain.
/// Collective.
Status Describe(cli::Context& context, const SourceFlags& source);

/// Shows the result of a conversion, or its forecast with --dry-run.
/// \error kIo  with --dry-run, and `output` would not fit on its file system
Status ShowConversion(cli::Context& context, const convert::ConvertReport& report,
                      const std::string& output);

}  // namespace shardwright::apps
