// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "support/base/version.h"
#include "support/cli/exit_code.h"
#include "support/cli/parser_internal.h"
#include "support/text/text.h"

namespace shardwright::cli {
namespace {

constexpr std::size_t kWidth = 100;
constexpr std::size_t kLeft = 30;

std::string Indented(std::string_view text, std::size_t indent) {
  std::string out;
  for (const std::string& line : text::Wrap(text, kWidth - indent)) {
    out += std::string(indent, ' ') + line + "\n";
  }
  return out;
}

/// Formats an entry in two columns. A long left column gets its own line.
std::string Entry(const std::string& left, const std::string& right) {
  std::string head = "  " + left;
  const std::string body = Indented(right, kLeft);
  if (head.size() + 2 > kLeft) return head + "\n" + body;
  head.append(kLeft - head.size(), ' ');
  return head + body.substr(kLeft);
}

}  // namespace

/// Returns the placeholder of a flag's value, "FILE" or "auto|never"; empty for a switch.
std::string Parser::ValueKind(const CLI::Option* option) const {
  if (const auto found = optional_.find(option); found != optional_.end()) return found->second;
  return option->get_type_size() == 0 ? "" : option->get_type_name();
}

std::string Parser::DefaultOf(const CLI::Option* option) const {
  const auto found = defaults_.find(option);
  return found == defaults_.end() ? option->get_default_str() : found->second;
}

std::string Parser::LeftColumn(const CLI::Option* option) const {
  if (option->get_positional() && option->get_lnames().empty()) return option->get_name(true);
  std::string text;
  for (const std::string& name : option->get_snames()) text += "-" + name + ", ";
  for (const std::string& name : option->get_lnames()) text += "--" + name + ", ";
  text.resize(text.size() - 2);
  const std::string kind = ValueKind(option);
  if (kind.empty()) return text;
  return optional_.contains(option) ? text + "[=" + kind + "]" : text + " " + kind;
}

bool Parser::IsDaily(const CLI::Option* option) const {
  for (const std::string& name : option->get_lnames()) {
    if (short_help_.contains("--" + name)) return true;
  }
  return false;
}

std::string Parser::OptionLines(const std::string& group, bool only_daily) const {
  std::string text;
  for (const CLI::Option* option : cli_.get_options()) {
    const bool positional = option->get_positional() && option->get_lnames().empty();
    if (positional ? group != "Arguments" : option->get_group() != group) continue;
    if (only_daily && !positional && !IsDaily(option)) continue;
    std::string what = option->get_description();
    if (const std::string start = DefaultOf(option); !start.empty()) {
      what += " [default: " + start + "]";
    }
    text += Entry(LeftColumn(option), what);
  }
  return text;
}

bool Parser::MayBeAbsent(const Positional& positional) const {
  const bool describes = Uses(Shared::kList) || Uses(Shared::kExplain);
  return positional.kind == PositionalKind::kOptional ||
         (positional.kind == PositionalKind::kWritten && describes);
}

/// Returns the beginning of -h and --help: examples, usage, purpose, arguments and subcommands.
std::string Parser::HeadText() const {
  std::string text = "Examples:\n";
  for (const Example& example : examples_) {
    text += "  " + name_ + (example.arguments.empty() ? "" : " ") + example.arguments + "\n" +
            Indented(example.purpose, 6);
  }
  text += "\nUsage: " + name_ + " [FLAGS]";
  for (const Positional& positional : positionals_) {
    const std::string name = positional.option->get_name(true);
    text += MayBeAbsent(positional) ? " [" + name + "]" : " " + name;
  }
  if (!subcommands_.empty()) text += "\n       " + name_ + " SUBCOMMAND -h";
  text += "\n" + Indented(about_, 0);
  if (const std::string lines = OptionLines("Arguments", false); !lines.empty()) {
    text.append("\nArguments:\n").append(lines);
  }
  if (subcommands_.empty()) return text;
  text += "\nSubcommands:\n";
  for (const Subcommand& one : subcommands_) text += Entry(one.name, one.about);
  return text;
}

std::string Parser::ShortHelpText() const {
  std::string text = HeadText();
  std::string lines;
  for (const std::string& group : groups_) lines += OptionLines(group, true);
  text += "\nCommon flags:\n" + lines + OptionLines(kSharedGroup, true);
  return text + "\nAll flags, exit codes and environment: " + name_ + " --help\n";
}

std::string Parser::HelpText() const {
  std::string text = HeadText();
  std::vector<std::string> groups = groups_;
  groups.emplace_back(kSharedGroup);
  for (const std::string& group : groups) {
    const std::string lines = OptionLines(group, false);
    if (!lines.empty()) text.append("\n").append(group).append(":\n").append(lines);
  }
  std::string variables = "Environment: ";
  if (Uses(Shared::kThreads)) variables += "SHARDWRIGHT_THREADS, ";
  if (Uses(Shared::kMemory)) variables += "SHARDWRIGHT_MEMORY, ";
  for (const Variable& one : environment_) variables += one.name + ", ";
  text += "\n" + Indented(variables + "SHARDWRIGHT_LOG (docs/commands.md)", 0);
  return text +
         "Exit codes: 0 done, 1 to 10 failed (5: check failed), 75 stopped on request "
         "(docs/commands.md)\n";
}

nlohmann::ordered_json Parser::DescribeFlag(const CLI::Option* option) const {
  nlohmann::ordered_json names = nlohmann::ordered_json::array();
  for (const std::string& name : option->get_snames()) names.push_back("-" + name);
  for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  nlohmann::ordered_json flag = {{"names", names},
                                 {"what", option->get_description()},
                                 {"heading", option->get_group()},
                                 {"daily", IsDaily(option)},
                                 {"value", ValueKind(option)},
                                 {"value_is_optional", optional_.contains(option)},
                                 {"default", DefaultOf(option)}};
  if (const auto found = words_.find(option); found != words_.end()) flag["words"] = found->second;
  return flag;
}

std::string Parser::DescribeText() const {
  using Json = nlohmann::ordered_json;
  Json described = {{"name", name_}, {"version", kVersion}, {"what", about_}};
  described["examples"] = Json::array();
  for (const Example& example : examples_) {
    described["examples"].push_back(
        {{"arguments", example.arguments}, {"purpose", example.purpose}});
  }
  described["arguments"] = Json::array();
  for (const Positional& positional : positionals_) {
    described["arguments"].push_back({{"name", positional.option->get_name(true)},
                                      {"what", positional.option->get_description()},
                                      {"may_be_absent", MayBeAbsent(positional)}});
  }
  described["subcommands"] = Json::array();
  for (const Subcommand& one : subcommands_) {
    described["subcommands"].push_back({{"name", one.name}, {"what", one.about}});
  }
  described["flags"] = Json::array();
  for (const CLI::Option* option : cli_.get_options()) {
    if (!option->get_lnames().empty()) described["flags"].push_back(DescribeFlag(option));
  }
  described["exit_codes"] = Json::array();
  for (const auto& [code, meaning] : ExitMeanings()) {
    described["exit_codes"].push_back({{"code", code}, {"meaning", meaning}});
  }
  return described.dump(1) + "\n";
}

std::string Parser::VersionText() const { return command() + " (Shardwright) " + kVersion + "\n"; }

}  // namespace shardwright::cli
