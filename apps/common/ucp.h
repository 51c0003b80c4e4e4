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

/// --patterns.
void AddPatterns(cli::App& app, std::vector<std::string>* files);

/// --trust-user: a user whose agents and shared-memory caches are accepted at socket files, besides
/// those of this process's user and of root.
struct TrustFlags {
  std::string user;

  void AddTo(cli::App& app);
  /// Reads the user, once the flags are parsed. \error kUsage  there is no such user
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

  /// \param parts  whether ranks may see parts of INPUT: --node-local
  void AddTo(cli::App& app, bool parts = true);
  /// And --siblings, of commands that write what they read; on unless told otherwise.
  void AddSiblingsTo(cli::App& app);
  /// Adds --map, --map-sizes and --weights-of, for commands that can rename tensors.
  void AddMapTo(cli::App& app);
  /// As the library takes them; with --dry-run and what describes INPUT no payload is read.
  /// \param output  what is to be written, if it is a path
  convert::InputOptions Options(const cli::CommonFlags& flags,
                                const std::string& output = {}) const;
};

/// What a command writes: --format, --target with the format's keys, and the keys that are flags of
/// their own.
struct FormatFlags {
  const checkpoints::Format* format = &checkpoints::Formats().front();
  std::string target;
  bool fixed = false;      ///< the command writes one format, and has no --format
  bool of_source = false;  ///< without --format that of INPUT is written: then `format` is null
  bool strict = false;     ///< --strict
  bool for_ranks = false;  ///< only formats whose files are for certain ranks
  bool or_none = false;    ///< --format none writes nothing: `format` is null
  std::string none_help;   ///< what that means, for --help

  /// \param what  of keys that are not named, for --help
  void AddTo(cli::App& app, const std::string& what);
  void AddKeyFlags(cli::App& app);
  /// And --strict.
  void AddStrictTo(cli::App& app);
  /// What is asked for, once the flags are parsed; nothing while `format` is null. \error kUsage
  Result<checkpoints::TargetSpec> Spec(const cli::App& app) const;
  /// The names that a map that is found by itself leads to (checkpoints::Format::sides).
  std::vector<std::string> Sides(const checkpoints::TargetSpec& spec) const;
  /// The first flag of a key that is given, "--loader", but for `except`; empty without one.
  std::string GivenKeyFlag(const cli::App& app, std::string_view except = {}) const;
  /// The value of the flag of a key, that was given or its default. \pre there is such a flag
  const std::string& ValueOf(std::string_view key) const;

 private:
  /// A key of one format as a flag.
  struct KeyFlag {
    const checkpoints::Format* format = nullptr;
    const checkpoints::TargetKey* key = nullptr;
    std::string value;
    bool on = false;  // the value of a flag without an argument
  };
  const KeyFlag* FindFlag(std::string_view name) const;

  std::vector<std::unique_ptr<KeyFlag>> key_flags_;  // the parser keeps their addresses
};

/// The shared flags of a command that writes `output`.
convert::ConvertOptions WriteOptions(const cli::CommonFlags& flags, const std::string& output);

/// Opens a command's input as convert::OpenInput does. A stop request interrupts it at any point.
/// \error kStopped; as convert::OpenInput
/// Collective.
Result<std::unique_ptr<convert::Input>> OpenInput(cli::Context& context,
                                                  const convert::InputOptions& options);

/// Answers --list or --explain.
/// Collective.
Status Describe(cli::Context& context, const SourceFlags& source);

/// Shows what was done, or with --dry-run what would be done.
/// \error kIo  with --dry-run, and `output` would not fit on its file system
Status ShowConversion(cli::Context& context, const convert::ConvertReport& report,
                      const std::string& output);

}  // namespace shardwright::apps
