// SPDX-License-Identifier: Apache-2.0
#include "partial/report/sends_page.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "partial/agent/throttle/limiter.h"
#include "support/base/bytes.h"
#include "support/base/text.h"
#include "support/html/page.h"
#include "support/html/timeline.h"
#include "support/json/json.h"

namespace shardwright::partial {
namespace {

constexpr std::size_t kSlices = 300;
constexpr std::size_t kSnapshotsShown = 2;
constexpr double kInASecond = 1e9;
constexpr std::array<const char*, kSentKinds> kSentNames = {
    "while ranks were idle", "at other times", "due before the next snapshot",
    "at any time: without known idle intervals, or while a client waits"};

/// Reads a list of exactly `count` non-negative integers.
Result<std::vector<std::int64_t>> WholeNumbers(const json::Json& in, std::size_t count,
                                               const std::string& where) {
  std::vector<std::int64_t> out;
  const bool good = in.is_array() && in.size() == count;
  for (std::size_t i = 0; good && i < count; ++i) {
    SW_TRY_ASSIGN(const std::uint64_t number,
                  json::WholeOf(in[i], 0, std::numeric_limits<std::int64_t>::max(), where));
    out.push_back(static_cast<std::int64_t>(number));
  }
  if (good) return out;
  return BadInput(where, ": expected a list of ", Plural(count, "number"));
}

Result<const json::Json*> ListOf(const json::Json& in, const char* name, const std::string& where) {
  const json::Json* const list = in.is_object() ? json::Find(in, name) : nullptr;
  if (list != nullptr && list->is_array()) return list;
  return BadInput(where, ": ", Quoted(name), " is not a list");
}

struct Sends {
  std::vector<std::vector<std::int64_t>> snapshots;  // iteration, time
  std::vector<std::vector<std::int64_t>> sends;      // time, bytes, kind
  struct Rank {
    std::int64_t number = 0;
    std::vector<std::vector<std::int64_t>> idle;  // begin, end
  };
  std::vector<Rank> ranks;
};

Status AddSends(const json::Json& root, Sends* out, const std::string& where) {
  SW_TRY_ASSIGN(const json::Json* const snapshots, ListOf(root, "snapshots", where));
  for (const json::Json& one : *snapshots) {
    SW_TRY_ASSIGN(out->snapshots.emplace_back(), WholeNumbers(one, 2, where + ": \"snapshots\""));
  }
  SW_TRY_ASSIGN(const json::Json* const sends, ListOf(root, "sends", where));
  for (const json::Json& one : *sends) {
    SW_TRY_ASSIGN(auto sent, WholeNumbers(one, 3, where + ": \"sends\""));
    if (sent[2] >= static_cast<std::int64_t>(kSentKinds)) {
      return BadInput(where, ": expected a send kind from 0 to ", kSentKinds - 1, ", found ",
                      sent[2]);
    }
    out->sends.push_back(std::move(sent));
  }
  return {};
}

Result<Sends> ParseSends(std::string_view text, const std::string& where) {
  SW_TRY_ASSIGN(const json::Json root, json::Parse(text, where));
  Sends out;
  SW_TRY(AddSends(root, &out, where));
  SW_TRY_ASSIGN(const json::Json* const ranks, ListOf(root, "ranks", where));
  for (const json::Json& one : *ranks) {
    Sends::Rank& rank = out.ranks.emplace_back();
    const json::Json* const number = one.is_object() ? json::Find(one, "rank") : nullptr;
    if (number == nullptr) return BadInput(where, ": an entry of \"ranks\" lacks \"rank\"");
    SW_TRY_ASSIGN(const std::uint64_t whole,
                  json::WholeOf(*number, 0, ~std::uint32_t{0}, where + ": \"rank\""));
    rank.number = static_cast<std::int64_t>(whole);
    SW_TRY_ASSIGN(const json::Json* const idle, ListOf(one, "idle", where));
    for (const json::Json& stretch : *idle) {
      SW_TRY_ASSIGN(rank.idle.emplace_back(), WholeNumbers(stretch, 2, where + ": \"idle\""));
    }
  }
  return out;
}

/// Time range of the chart: from the first shown snapshot, or the first send, to the last event.
struct Window {
  std::int64_t first = 0;
  std::int64_t last = 0;
  double At(std::int64_t time) const { return static_cast<double>(time - first) / kInASecond; }
  double seconds() const { return At(last); }
};

Window WindowOf(const Sends& sends) {
  Window window{sends.sends.front()[0], sends.sends.back()[0]};
  for (const auto& sent : sends.sends) {
    window.first = std::min(window.first, sent[0]);
    window.last = std::max(window.last, sent[0]);
  }
  const std::size_t count = sends.snapshots.size();
  if (count > 0) {
    const auto from = static_cast<std::ptrdiff_t>(count - std::min(count, kSnapshotsShown));
    window.first = (sends.snapshots.begin() + from)->at(1);
    window.last = std::max(window.last, sends.snapshots.back()[1]);
  }
  // Add a margin at the end, so that the range is never empty.
  window.last += std::max<std::int64_t>((window.last - window.first) / 50, 1'000'000);
  return window;
}

html::Timeline TimelineOf(const Sends& sends, const Window& window) {
  html::Timeline timeline;
  timeline.label = "bytes sent per time slice, and idle intervals of ranks";
  timeline.seconds = window.seconds();
  timeline.unit = html::Unit::kBytes;
  timeline.stretch_name = "idle interval";
  for (std::size_t kind = 0; kind < kSentKinds; ++kind) {
    timeline.bars.push_back({kSentNames[kind], kind, std::vector<double>(kSlices, 0)});
  }
  for (const auto& sent : sends.sends) {
    if (sent[0] < window.first) continue;
    const double share = window.At(sent[0]) / window.seconds();
    const auto slice = std::min(kSlices - 1, static_cast<std::size_t>(share * kSlices));
    timeline.bars[static_cast<std::size_t>(sent[2])].values[slice] += static_cast<double>(sent[1]);
  }
  std::erase_if(timeline.bars, [](const html::Timeline::Bars& bars) {
    return std::all_of(bars.values.begin(), bars.values.end(), [](double one) { return one == 0; });
  });
  for (const Sends::Rank& rank : sends.ranks) {
    html::Timeline::Row& row = timeline.rows.emplace_back();
    row.name = "rank " + std::to_string(rank.number);
    for (const auto& idle : rank.idle) {
      if (idle[1] <= window.first || idle[0] >= window.last) continue;
      row.stretches.push_back({window.At(idle[0]), window.At(idle[1])});
    }
  }
  for (const auto& snapshot : sends.snapshots) {
    if (snapshot[1] < window.first) continue;
    timeline.events.push_back({window.At(snapshot[1]), "snapshot " + std::to_string(snapshot[0])});
  }
  return timeline;
}

std::string SendsTiles(const Sends& sends, const Window& window) {
  std::array<std::uint64_t, kSentKinds> bytes{};
  std::uint64_t all = 0;
  for (const auto& sent : sends.sends) {
    if (sent[0] < window.first) continue;
    bytes[static_cast<std::size_t>(sent[2])] += static_cast<std::uint64_t>(sent[1]);
    all += static_cast<std::uint64_t>(sent[1]);
  }
  std::string text =
      "<div class=\"tiles\">\n" +
      html::Tile("Sent", FormatBytes(all), "in " + Fixed(window.seconds(), 1) + " s");
  for (std::size_t kind = 0; kind < kSentKinds; ++kind) {
    if (bytes[kind] == 0) continue;
    std::string name = kSentNames[kind];
    name[0] = static_cast<char>(name[0] - 'a' + 'A');
    text +=
        html::Tile(name, Percent(static_cast<double>(bytes[kind]) / static_cast<double>(all), 1),
                   FormatBytes(bytes[kind]));
  }
  return text + "</div>\n";
}

}  // namespace

Result<std::string> SendsPage(std::string_view sends, const std::string& address) {
  const std::string where = address + ": sends";
  SW_TRY_ASSIGN(const Sends found, ParseSends(sends, where));
  if (found.sends.empty()) return Fail(Errc::kNotFound, where, ": nothing was sent yet");
  const Window window = WindowOf(found);
  html::Document document;
  document.title = "Partial checkpoints: sends of an agent";
  document.body =
      "<main>\n<h1>Partial checkpoints: sends of an agent</h1>\n<p>" + html::Escape(address) +
      "</p>\n" + SendsTiles(found, window) +
      "<section class=\"chart\">\n<h2>Sends and idle ranks</h2>\n<p>Bars: bytes sent to the store "
      "and to peers per time slice of " +
      Fixed(1000 * window.seconds() / kSlices, 1) +
      " ms. Rows: idle intervals of a rank. Dotted lines: a snapshot was complete in "
      "memory.</p>\n" +
      html::TimelineMarkup(TimelineOf(found, window)) +
      "</section>\n<footer>A send has at most 1 MiB, and is counted when it "
      "begins.</footer>\n</main>\n";
  return html::Render(document);
}

}  // namespace shardwright::partial
