// SPDX-License-Identifier: Apache-2.0
#include "engine/exec/run/identity.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <optional>
#include <span>
#include <sstream>
#include <utility>

#include <nlohmann/json.hpp>

#include "engine/exec/integrity.h"
#include "support/base/limits.h"
#include "support/base/text.h"
#include "support/json/json.h"

namespace shardwright::exec {
namespace {

/// Parses the parts of a stopped run. \returns nothing if the text is damaged
std::optional<std::map<std::string, std::string>> PartsOf(const std::string& text) {
  const Result<json::Json> json = json::Parse(text, kIdentityName);
  if (!json || !json->is_object()) return std::nullopt;
  std::map<std::string, std::string> parts;
  for (const auto& [name, value] : json->items()) {
    if (!value.is_string()) return std::nullopt;
    parts.emplace(name, value.get<std::string>());
  }
  return parts;
}

std::vector<std::string> WordsOf(const std::string& text) {
  std::istringstream in(text);
  return {std::istream_iterator<std::string>(in), std::istream_iterator<std::string>()};
}

/// Returns the words of a value that another value lacks: "dp=2", or "none".
std::string Shown(const std::string& value, const std::string& other) {
  std::vector<std::string> own = WordsOf(value);
  const std::vector<std::string> theirs = WordsOf(other);
  std::erase_if(own, [&](const std::string& word) {
    return std::ranges::find(theirs, word) != theirs.end();
  });
  return own.empty() ? "none" : Joined(own, " ");
}

}  // namespace

void Identity::Add(std::string name, std::string value) {
  parts_.push_back({std::move(name), std::move(value), true});
}

void Identity::AddDigest(std::string name, std::string value) {
  parts_.push_back({std::move(name), std::move(value), false});
}

std::string Identity::Text() const {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  for (const Part& part : parts_) json[part.name] = part.value;
  return json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

os::Fingerprint Identity::Fingerprint() const {
  const std::string text = Text();
  const Digest digest = DigestOf(std::as_bytes(std::span(text)));
  os::Fingerprint fingerprint;
  static_assert(sizeof digest == sizeof fingerprint);
  std::memcpy(fingerprint.data(), digest.data(), sizeof digest);
  return fingerprint;
}

Status Identity::Write(const os::Directory& journals) const {
  SW_TRY_ASSIGN(const std::optional<os::NameStatus> there, journals.Look(kIdentityName));
  if (there) return {};
  const std::string text = Text();
  SW_TRY_ASSIGN(os::File file, journals.Create(kIdentityName));
  SW_TRY(file.WriteAt(0, std::as_bytes(std::span(text))));
  return file.Close();
}

Status Identity::CheckSame(const os::Directory& journals) const {
  SW_TRY_ASSIGN(const std::optional<os::NameStatus> there, journals.Look(kIdentityName));
  if (!there || !journals.IsOwnFile(*there)) return {};
  const Result<std::string> text = journals.ReadWholeText(kIdentityName, limits::kJsonBytes);
  const auto theirs = text ? PartsOf(*text) : std::nullopt;
  if (!theirs) return {};
  std::vector<std::string> flags;
  std::string input;
  for (const Part& part : parts_) {
    const auto found = theirs->find(part.name);
    const std::string before = found == theirs->end() ? "" : found->second;
    if (before == part.value) continue;
    if (part.shown) {
      flags.push_back(StrCat(part.name, " (", Shown(before, part.value), " before, ",
                             Shown(part.value, before), " now)"));
    } else if (input.empty()) {
      input = part.name;
    }
  }
  for (const auto& [name, value] : *theirs) {
    const bool known = std::ranges::find(parts_, name, &Part::name) != parts_.end();
    if (!known && name.starts_with("--")) {
      flags.push_back(StrCat(name, " (", Shown(value, ""), " before, none now)"));
    }
  }
  // A changed flag may also change a fingerprint, which is then no news.
  if (flags.empty() && !input.empty()) flags.push_back(input);
  if (flags.empty()) return {};
  // A damaged file is not a reason to refuse: the journals have the hash of the identity.
  const std::vector<std::string> first = {"0"};
  const auto journal = os::ReadJournals(journals, first, Fingerprint());
  if (journal && journal->valid_bytes > 0) return {};
  return Fail(Errc::kBusy, "it differs in ", Joined(flags, " and in "));
}

Result<std::vector<std::vector<std::byte>>> Identity::ReadJournals(
    const os::Directory& journals) const {
  SW_TRY_ASSIGN(const std::vector<os::Entry> entries, journals.List());
  std::vector<std::string> names;
  names.reserve(entries.size());
  for (const os::Entry& entry : entries) {
    if (entry.name != kIdentityName && entry.name != kCreatedName) names.push_back(entry.name);
  }
  SW_TRY_ASSIGN(os::JournalRecords found, os::ReadJournals(journals, names, Fingerprint()));
  return std::move(found.records);
}

}  // namespace shardwright::exec
