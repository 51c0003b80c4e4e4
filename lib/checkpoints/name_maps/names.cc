// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "checkpoints/name_maps/map_internal.h"
#include "checkpoints/tp_rules/expression.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::maps {

Result<NameForm> NameForm::Parse(std::string_view text) {
  NameForm form;
  form.text_ = text;
  std::string expression;
  std::string_view rest = text;
  while (!rest.empty()) {
    const std::size_t open = rest.find('{');
    const std::size_t close = rest.find('}', open == std::string_view::npos ? 0 : open);
    const bool last = open == std::string_view::npos;
    if (last != (close == std::string_view::npos) ||
        rest.substr(0, open).find('}') != std::string_view::npos) {
      return Fail(Errc::kBadInput, Quoted(text), ": braces do not match");
    }
    const std::string literal(rest.substr(0, open));
    expression += re2::RE2::QuoteMeta(literal);
    std::string_view capture = last ? std::string_view() : rest.substr(open + 1, close - open - 1);
    const bool any = capture.starts_with('*');
    if (any) capture.remove_prefix(1);
    const bool known =
        std::find(form.captures_.begin(), form.captures_.end(), capture) != form.captures_.end();
    if (!last && (capture.empty() || known)) {
      return Fail(Errc::kBadInput, Quoted(text),
                  ": every pair of braces must contain a unique name");
    }
    form.parts_.push_back({literal, std::string(capture), any});
    if (last) break;
    // A number has only one spelling, so that Fill reproduces the matched name.
    expression += any ? "(.+)" : "(0|[1-9][0-9]{0,8})";
    form.captures_.emplace_back(capture);
    rest.remove_prefix(close + 1);
  }
  form.expression_ = CompileExpression(expression);
  if (text.empty() || !form.expression_->ok()) {
    return Fail(Errc::kBadInput, Quoted(text), ": not a valid name");
  }
  return form;
}

std::optional<Captures> NameForm::Match(const std::string& name) const {
  std::vector<re2::StringPiece> groups(1 + captures_.size());
  if (!MatchExpression(*expression_, name, re2::RE2::ANCHOR_BOTH, groups)) return std::nullopt;
  Captures captures;
  for (std::size_t i = 0; i < captures_.size(); ++i) {
    captures.emplace(captures_[i], std::string(groups[i + 1].data(), groups[i + 1].size()));
  }
  return captures;
}

std::string NameForm::Fill(const Captures& captures) const { return FillUpTo(captures, ""); }

std::string NameForm::FillUpTo(const Captures& captures, std::string_view capture) const {
  std::string name;
  for (const Part& part : parts_) {
    name += part.literal;
    if (part.capture.empty()) break;
    name += captures.at(part.capture);
    if (part.capture == capture) break;
  }
  return name;
}

bool NameForm::Has(std::string_view capture) const {
  return std::find(captures_.begin(), captures_.end(), capture) != captures_.end();
}

bool NameForm::Counts(std::string_view capture) const {
  return std::any_of(parts_.begin(), parts_.end(), [&](const Part& part) {
    return part.capture == capture && !part.any && !capture.empty();
  });
}

std::string NameForm::UpTo(std::string_view capture) const {
  std::string text;
  for (const Part& part : parts_) {
    text += part.literal;
    text += '{';
    text += part.capture;
    text += '}';
    if (part.capture == capture) break;
  }
  return text;
}

std::optional<FoundRule> NameFinder::Find(const std::string& name) const {
  for (std::uint32_t r = 0; r < map_.rules.size(); ++r) {
    const std::optional<SideForm>& form = map_.rules[r].sides[side_];
    if (!form) continue;
    for (std::uint32_t t = 0; t < form->tensors.size(); ++t) {
      if (auto captures = form->tensors[t].name.Match(name))
        return FoundRule{r, t, *std::move(captures)};
    }
  }
  return std::nullopt;
}

}  // namespace shardwright::checkpoints::maps
