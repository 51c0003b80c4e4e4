#include "exec/text_sum.h"

#include <span>

#include "exec/integrity.h"

namespace shardwright::exec {

namespace {

// No text in JSON holds this within a string.
constexpr std::string_view kKey = "\"xxh3_128\":";
constexpr std::size_t kDigits = 32;

/// Where the digits begin; npos: there are none.
std::size_t FindDigits(std::string_view text) {
  std::size_t at = text.find(kKey);
  if (at == std::string_view::npos) return at;
  at = text.find_first_not_of(' ', at + kKey.size());
  const bool whole = at < text.size() && text.size() - at >= kDigits + 2 && text[at] == '"';
  return whole ? at + 1 : std::string_view::npos;
}

std::string SumAround(std::string_view text, std::size_t at) {
  const std::string zeros = NoTextSum();
  DigestStream digest;
  for (const std::string_view part :
       {text.substr(0, at), std::string_view(zeros), text.substr(at + kDigits)}) {
    digest.Add(std::as_bytes(std::span(part)));
  }
  return Hex(digest.Finish());
}

}  // namespace

std::string NoTextSum() { return std::string(kDigits, '0'); }

std::string WithTextSum(std::string text) {
  const std::size_t at = FindDigits(text);
  SW_CHECK(at != std::string::npos);
  text.replace(at, kDigits, SumAround(text, at));
  return text;
}

Status CheckTextSum(std::string_view text, const std::string& where) {
  const std::size_t at = FindDigits(text);
  if (at == std::string_view::npos) return {};
  const std::string_view said = text.substr(at, kDigits);
  const std::string found = SumAround(text, at);
  if (said == found) return {};
  return Fail(Errc::kBadInput,
              where + ": \"" + kTextSum + "\" says " + std::string(said) + ", the text has " +
                  found + ": it is damaged, or was changed on purpose: then remove the field");
}

}  // namespace shardwright::exec
