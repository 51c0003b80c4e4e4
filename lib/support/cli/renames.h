// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace shardwright::cli {

/// One flag, value or subcommand of an earlier version and its replacement.
struct Rename {
  std::string_view command;  ///< without a subcommand; empty for all commands
  std::string_view old;      ///< "--flag", "--flag=value" or the name of a subcommand
  std::string_view now;      ///< "--flag", "--flag=value" or the command line to run instead
};

/// Finds the replacement of a flag, value or subcommand.
/// \param command  without a subcommand
/// \returns null if `old` was not renamed in this command
const Rename* FindRename(std::string_view command, std::string_view old);

}  // namespace shardwright::cli
