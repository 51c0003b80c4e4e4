#include <algorithm>
#include <utility>

#include "base/version.h"
#include "cli/exit_code.h"
#include "cli/parser_internal.h"
#include "cli/text.h"

namespace shardwright::cli {
namespace {

constexpr std::size_t kWidth = 100;
constexpr std::size_t kLeft = 30;

std::string Indented(std::string_view text, std::size_t indent) {
  std::string out;
  for (const std::string& line : Wrap(text, kWidth - indent)) {
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

std::string Parser::OptionLines(const std::string& group) const {
  std::string text;
  for (const CLI::Option* option : cli_.get_options()) {
    const bool positional = option->get_positional() && option->get_lnames().empty();
    if (positional ? group != "Arguments" : option->get_group() != group) continue;
    std::string what = option->get_description();
    std::string start = option->get_default_str();
    if (const auto found = defaults_.find(option); found != defaults_.end()) start = found->second;
    if (!start.empty()) what += " [default: " + start + "]";
    text += Entry(LeftColumn(option), what);
  }
  return text;
}

std::string Parser::HelpText() const {
  std::string text = "Examples:\n";
  for (const Example& example : examples_) {
    text += "  " + name_ + " " + example.arguments + "\n" + Indented(example.purpose, 6);
  }
  text += "\nUsage: " + name_ + " [FLAGS]";
  for (const Positional& positional : positionals_) {
    const std::string name = positional.option->get_name(true);
    const bool optional = positional.is_written && (Uses(Shared::kList) || Uses(Shared::kExplain));
    text += optional ? " [" + name + "]" : " " + name;
  }
  text += "\n" + Indented(about_, 0);
  std::vector<std::string> groups = {"Arguments"};
  groups.insert(groups.end(), groups_.begin(), groups_.end());
  groups.emplace_back(kSharedGroup);
  for (const std::string& group : groups) {
    const std::string lines = OptionLines(group);
    if (!lines.empty()) text.append("\n").append(group).append(":\n").append(lines);
  }
  text += "\nEnvironment, where the flag is absent:\n";
  if (Uses(Shared::kThreads)) text += Entry("SHARDWRIGHT_THREADS", "value of --threads");
  if (Uses(Shared::kMemory)) text += Entry("SHARDWRIGHT_MEMORY", "value of --memory");
  text += Entry("SHARDWRIGHT_LOG", "value of --log-file");
  text += "\nExit codes:\n" + ExitCodeHelp();
  return text;
}

std::string Parser::VersionText() const { return name_ + " (Shardwright) " + kVersion + "\n"; }

}  // namespace shardwright::cli
