// SPDX-License-Identifier: Apache-2.0
#include "support/cli/renames.h"

#include <algorithm>
#include <iterator>

namespace shardwright::cli {
namespace {

constexpr Rename kRenames[] = {
    {"", "--neighbours", "--siblings"},
    {"", "--verify=sums", "--verify=checksums"},
    {"moe-replace", "replay", "moe-replace simulate-failures"},
    {"moe-replace", "--report", "--html"},
    {"moe-replace", "--compare", "moe-replace compare LOADS"},
    {"moe-replace", "--events", "moe-replace simulate-failures LOADS EVENTS"},
    {"moe-replace", "--evaluate", "moe-replace evaluate PLAN LOADS"},
    {"pec-save", "--page", "--html"},
    {"pec-save", "--policy=replay", "--policy=gradient-log"},
    {"pec-save", "--list", "pec-save list STORE"},
    {"pec-save", "--check", "pec-save check STORE"},
    {"pec-save", "--gc", "pec-save gc STORE"},
    {"pec-save", "--agent", "pec-save agent INPUT STORE"},
    {"pec-save", "--status", "pec-save status ADDRESS"},
    {"pec-save", "--tell", "pec-save tell ADDRESS REQUEST"},
    {"pec-save", "--plan", "pec-save plan [STORE]"},
    {"pec-save", "--auto", "pec-save tune [STORE]"},
    {"pec-save", "--simulate", "pec-save simulate TOKENS [STORE]"},
    {"ucp-load", "--serve", "ucp-load serve INPUT ADDRESS"},
};

}  // namespace

const Rename* FindRename(std::string_view command, std::string_view old) {
  const auto* const found =
      std::find_if(std::begin(kRenames), std::end(kRenames), [&](const Rename& one) {
        return (one.command.empty() || one.command == command) && one.old == old;
      });
  return found == std::end(kRenames) ? nullptr : found;
}

}  // namespace shardwright::cli
