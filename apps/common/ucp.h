#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "base/result.h"
#include "cli/app.h"
#include "ucp/convert.h"
#include "ucp/input.h"

namespace shardwright::apps {

/// The source flags that all ucp commands share: positional INPUT, --also, --patterns,
/// --node-local.
struct SourceFlags {
  std::string input;
  std::vector<std::string> also;
  std::vector<std::string> patterns;
  bool node_local = false;
  bool neighbours = false;

  void AddTo(cli::App& app);
  /// And --neighbours, of commands that write what they read; on unless told otherwise.
  void AddNeighboursTo(cli::App& app);
  /// As the library takes them.
  ucp::InputOptions Options() const;
};

/// --loader of the commands that write atoms.
void AddLoader(cli::App& app, dialect::Loader* loader);

/// The shared flags of a command that writes `output`.
ucp::ConvertOptions WriteOptions(const cli::CommonFlags& flags, const std::string& output);

/// Answers --list or --explain.
/// Collective.
Status Describe(cli::Context& context, const SourceFlags& source);

/// What a conversion did, for programs.
nlohmann::json ConversionJson(const ucp::ConvertReport& report);

/// Shows what was done, or with --dry-run what would be done.
void ShowConversion(cli::Context& context, const ucp::ConvertReport& report);

}  // namespace shardwright::apps
