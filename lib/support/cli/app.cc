// SPDX-License-Identifier: Apache-2.0
#include "support/cli/app.h"

#include <algorithm>
#include <utility>

#include "support/base/bytes.h"
#include "support/base/text.h"
#include "support/cli/parser_internal.h"

namespace shardwright::cli {
namespace {

/// Adds a flag and converts its text to *value with `parse`.
template <class T, class Parse>
CLI::Option* AddParsed(CLI::App& cli, const std::string& flag, std::string_view what,
                       const char* kind, T* value, const Parse& parse) {
  const std::string name = LongName(flag);
  CLI::Option* option = cli.add_option_function<std::string>(
      flag, [=](const std::string& text) { *value = ValueOrThrow(parse(text), name); },
      std::string(what));
  return option->type_name(kind);
}

}  // namespace

const Subcommand* FindSubcommand(const std::vector<Subcommand>& list, int argc,
                                 const char* const* argv) {
  if (argc < 2) return nullptr;
  const auto found = std::find_if(list.begin(), list.end(),
                                  [&](const Subcommand& one) { return one.name == argv[1]; });
  return found == list.end() ? nullptr : &*found;
}

App::App(std::string name, std::string about, std::vector<Example> examples)
    : parser_(std::make_unique<Parser>(std::move(name), std::move(about), std::move(examples))) {}

App::~App() = default;

CLI::App& App::cli() { return parser_->cli(); }

void App::Alone() {
  alone_ = true;
  parser_->Alone();
}

void App::Use(std::initializer_list<Shared> flags) {
  for (const Shared flag : flags) parser_->Use(flag);
}

void App::AddInput(std::string* input, std::string_view what, const std::string& name) {
  parser_->AddPositional(name, input, what, PositionalKind::kNeeded);
}

void App::AddOptionalInput(std::string* input, std::string_view what, const std::string& name) {
  parser_->AddPositional(name, input, what, PositionalKind::kOptional);
}

void App::AddOutput(std::string* output, std::string_view what, const std::string& name) {
  parser_->AddPositional(name, output, what, PositionalKind::kWritten);
}

void App::AddInputOutput(std::string* input, std::string* output, std::string_view what_input,
                         std::string_view what_output) {
  AddInput(input, what_input);
  AddOutput(output, what_output);
}

void App::AllowAbsent(const std::string* value) { parser_->AllowAbsent(value); }

void App::AddSubcommands(const std::vector<Subcommand>& list) { parser_->AddSubcommands(list); }

void App::ShowInShortHelp(std::initializer_list<std::string_view> flags) {
  for (const std::string_view flag : flags) parser_->ShowInShortHelp(std::string(flag));
}

void App::Group(const std::string& heading) { parser_->Group(heading); }

CLI::Option* App::AddFlag(const std::string& flag, bool* value, std::string_view what) {
  return cli().add_flag(flag, *value, std::string(what))->disable_flag_override();
}

CLI::Option* App::AddText(const std::string& flag, std::string* value, std::string_view what,
                          std::string_view kind) {
  CLI::Option* option = cli().add_option(flag, *value, std::string(what));
  parser_->ShowDefault(option, *value);
  return option->type_name(std::string(kind));
}

CLI::Option* App::AddList(const std::string& flag, std::vector<std::string>* values,
                          std::string_view what, std::string_view kind) {
  CLI::Option* option = cli().add_option(flag, *values, std::string(what) + "; may be repeated");
  return option->allow_extra_args(false)->type_name(std::string(kind));
}

CLI::Option* App::AddCount(const std::string& flag, std::optional<std::uint64_t>* value,
                           std::uint64_t first, std::uint64_t last, std::string_view what) {
  return AddParsed(cli(), flag, what, "N", value, [first, last](const std::string& text) {
    return ParseCount(text, first, last);
  });
}

CLI::Option* App::AddCount(const std::string& flag, std::uint64_t* value, std::uint64_t first,
                           std::uint64_t last, std::string_view what) {
  CLI::Option* option =
      AddParsed(cli(), flag, what, "N", value,
                [first, last](const std::string& text) { return ParseCount(text, first, last); });
  if (*value >= first && *value <= last) parser_->ShowDefault(option, std::to_string(*value));
  return option;
}

CLI::Option* App::AddReal(const std::string& flag, std::optional<double>* value, double first,
                          double last, std::string_view what) {
  return AddParsed(cli(), flag, what, "X", value,
                   [first, last](const std::string& text) { return ParseReal(text, first, last); });
}

CLI::Option* App::AddReal(const std::string& flag, double* value, double first, double last,
                          std::string_view what) {
  CLI::Option* option =
      AddParsed(cli(), flag, what, "X", value,
                [first, last](const std::string& text) { return ParseReal(text, first, last); });
  if (*value >= first && *value <= last) parser_->ShowDefault(option, RealText(*value));
  return option;
}

CLI::Option* App::AddSize(const std::string& flag, std::uint64_t* value, std::string_view what) {
  CLI::Option* option = AddParsed(cli(), flag, what, "SIZE", value,
                                  [](const std::string& text) { return ParseBytes(text); });
  parser_->ShowDefault(option, FormatBytes(*value));
  return option;
}

CLI::Option* App::AddBandwidth(const std::string& flag, std::uint64_t* value,
                               std::string_view what) {
  CLI::Option* option = AddParsed(cli(), flag, what, "RATE", value,
                                  [](const std::string& text) { return ParseBandwidth(text); });
  parser_->ShowDefault(option, *value == 0 ? "0" : FormatBytes(*value) + "/s");
  return option;
}

CLI::Option* App::AddChoice(const std::string& flag, std::string* value,
                            const std::vector<std::string>& words, std::string_view what) {
  auto choose = [value, words](std::size_t i) { *value = words[i]; };
  return AddChosen(flag, words, *value, what, choose);
}

CLI::Option* App::AddChosen(const std::string& flag, const std::vector<std::string>& words,
                            const std::string& start, std::string_view what,
                            const std::function<void(std::size_t)>& choose) {
  const std::string name = LongName(flag);
  const std::string all = Joined(words, "|");
  CLI::Option* option = cli().add_option_function<std::string>(
      flag,
      [=](const std::string& text) {
        for (std::size_t i = 0; i < words.size(); ++i) {
          if (words[i] == text) return choose(i);
        }
        throw CLI::ValidationError(name, "\"" + text + "\" is not one of " + all);
      },
      std::string(what));
  parser_->Choose(option, words);
  parser_->ShowDefault(option, start);
  return option;
}

CLI::Option* App::AddOptionalValue(const std::string& flag, std::optional<std::string>* value,
                                   const std::string& when_bare, std::string_view what,
                                   std::string_view kind) {
  // A CLI11 flag takes a value only after "=", so the next argument stays separate.
  CLI::Option* option = cli().add_flag(flag + "{" + when_bare + "}", *value, std::string(what));
  parser_->ShowOptional(option, std::string(kind));
  return option;
}

void App::Suggest(const CLI::Option* option, std::vector<std::string> words) {
  parser_->Suggest(option, std::move(words));
}

void App::FromEnvironment(const std::string& flag, std::string* value,
                          const std::string& variable) {
  parser_->FromEnvironment(flag, value, variable);
}

void App::Check(std::function<Status()> rule) { parser_->AddRule(std::move(rule)); }

bool App::IsSet(const std::string& flag) const {
  const CLI::Option* option = parser_->cli().get_option_no_throw(flag);
  return option != nullptr && option->count() > 0;
}

Status App::Exclude(std::initializer_list<const char*> flags, const std::string& other) const {
  for (const char* flag : flags) {
    if (!IsSet(flag)) continue;
    return Fail(Errc::kUsage, flag, " cannot be combined with ", other);
  }
  return {};
}

Status App::Require(std::initializer_list<const char*> flags, const std::string& needed) const {
  for (const char* flag : flags) {
    if (IsSet(flag)) return Fail(Errc::kUsage, flag, " requires ", needed);
  }
  return {};
}

}  // namespace shardwright::cli
