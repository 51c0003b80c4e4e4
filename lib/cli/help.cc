#include <algorithm>
#include <utility>

#include "base/version.h"
#include "cli/parser_internal.h"
#include "text/text.h"

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

/// Two columns; a left one that is too long gets a line of its own.
std::string Entry(const std::string& left, const std::string& right) {
  std::string head = "  " + left;
  const std::string body = Indented(right, kLeft);
  if (head.size() + 2 > kLeft) return head + "\n" + body;
  head.append(kLeft - head.size(), ' ');
  return head + body.substr(kLeft);
}

}  // namespace

std::string Parser::LeftColumn(const CLI::Option* option) const {
  const auto shown = shown_.find(option);
  if (option->get_positional() && option->get_lnames().empty()) return option->get_name(true);
  std::string text;
  for (const std::string& name : option->get_snames()) text += "-" + name + ", ";
  if (shown != shown_.end()) return text + shown->second;
  for (const std::string& name : option->get_lnames()) text += "--" + name + ", ";
  text.resize(text.size() - 2);
  if (option->get_type_size() != 0 && !option->get_type_name().empty()) {
    text += " " + option->get_type_name();
  }
  return text;
}

bool Parser::IsDaily(const CLI::Option* option) const {
  for (const std::string& name : option->get_lnames()) {
    if (daily_.contains("--" + name)) return true;
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
    std::string start = option->get_default_str();
    if (const auto found = defaults_.find(option); found != defaults_.end()) start = found->second;
    if (!start.empty()) what += " [default: " + start + "]";
    text += Entry(LeftColumn(option), what);
  }
  return text;
}

/// Examples, usage, purpose, arguments and subcommands: what both helps begin with.
std::string Parser::HeadText() const {
  std::string text = "Examples:\n";
  for (const Example& example : examples_) {
    text += "  " + name_ + (example.arguments.empty() ? "" : " ") + example.arguments + "\n" +
            Indented(example.purpose, 6);
  }
  text += "\nUsage: " + name_ + " [FLAGS]";
  for (const Positional& positional : positionals_) {
    const std::string name = positional.option->get_name(true);
    const bool describes = Uses(Shared::kList) || Uses(Shared::kExplain);
    const bool optional = positional.kind == PositionalKind::kOptional ||
                          (positional.kind == PositionalKind::kWritten && describes);
    text += optional ? " [" + name + "]" : " " + name;
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
  text += "\nFlags for every day:\n" + lines + OptionLines(kSharedGroup, true);
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
  text += "\nEnvironment: ";
  if (Uses(Shared::kThreads)) text += "SHARDWRIGHT_THREADS, ";
  if (Uses(Shared::kMemory)) text += "SHARDWRIGHT_MEMORY, ";
  text += "SHARDWRIGHT_LOG (docs/commands.md)\n";
  return text +
         "Exit codes: 0 done, 1 to 10 failed, of them 5 a check's \"no\", 75 stopped "
         "(docs/commands.md)\n";
}

std::string Parser::VersionText() const { return command() + " (Shardwright) " + kVersion + "\n"; }

}  // namespace shardwright::cli
