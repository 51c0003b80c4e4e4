// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <set>
#include <utility>

#include "partial/gradient_log/log_reader.h"
#include "support/base/text.h"

namespace shardwright::partial {
namespace {

std::string Range(std::uint64_t first, std::uint64_t last) {
  return StrCat("elements ", first, " to ", last - 1);
}

/// Checks that sorted pieces of one iteration contain every element of a parameter once.
Status CheckCover(const LoggedParam& param, std::span<const LogLink::Piece> pieces,
                  const std::string& where) {
  const std::string who = StrCat(where, ": parameter ", Quoted(param.name));
  std::uint64_t at = 0;
  for (const LogLink::Piece& each : pieces) {
    const LogPiece& piece = *each.piece;
    if (piece.elems != param.elems) {
      return BadInput(who, ": ", param.elems, " elements expected, found ", piece.elems, " in ",
                      *each.path);
    }
    if (piece.first > at) {
      return Fail(Errc::kNotFound, who, ": ", Range(at, piece.first), " are missing");
    }
    if (piece.first < at) {
      return BadInput(who, ": ", Range(piece.first, at), " come twice, the second time in ",
                      *each.path);
    }
    if (*each.step != *pieces.front().step) {
      return BadInput(who, ": its pieces have different optimizer steps, the second one in ",
                      *each.path);
    }
    at = piece.first + piece.count;
  }
  if (at < param.elems) {
    return Fail(Errc::kNotFound, who, ": ", Range(at, param.elems), " are missing");
  }
  return {};
}

/// Checks that a step directly follows the previous step; null: that is unknown.
Status CheckCount(const optimizer_steps::Step* before, const optimizer_steps::Step& step,
                  const std::string& where) {
  if (before == nullptr) return {};
  // torch counts in float32, which stops at 2^24.
  const float expected = step.skipped ? before->count : before->count + 1.0F;
  if (step.count == expected) return {};
  return BadInput(where, ": step ", expected, " expected, found ", step.count);
}

}  // namespace

std::map<std::string, std::vector<std::uint64_t>> GradientLog::Modules() const {
  std::map<std::string, std::vector<std::uint64_t>> modules;
  for (const auto& [name, indices] : by_module_) {
    std::set<std::uint64_t> iterations;
    for (const std::size_t index : indices)
      iterations.insert(entries_[index].logged->record.iteration);
    modules[name].assign(iterations.begin(), iterations.end());
  }
  return modules;
}

Result<std::vector<LogLink>> GradientLog::ChainOf(
    std::string_view module, std::span<const LoggedParam> params, std::uint64_t from,
    std::uint64_t to, std::span<const RecoveryRecord> recoveries) const {
  std::map<std::string_view, std::size_t> by_name;
  for (std::size_t i = 0; i < params.size(); ++i) by_name.emplace(params[i].name, i);
  std::map<std::uint64_t, std::vector<LogLink::Piece>> found;
  const auto listed = by_module_.find(module);
  const auto none = std::vector<std::size_t>();
  for (const std::size_t index : listed == by_module_.end() ? none : listed->second) {
    const Entry& entry = entries_[index];
    const LogRecord& record = entry.logged->record;
    if (record.iteration <= from || record.iteration > to) continue;
    const bool given_up = std::ranges::any_of(recoveries, [&](const RecoveryRecord& recovery) {
      return GivesUp(recovery, record.recovery, record.iteration);
    });
    if (given_up) continue;
    for (const LogPiece& piece : record.pieces) {
      const auto param = by_name.find(piece.param);
      if (param == by_name.end()) {
        return BadInput("gradients of ", Quoted(module), ", iteration ", record.iteration,
                        ": the module has no parameter ", Quoted(piece.param), ", but ",
                        paths_[entry.path], " has its gradient");
      }
      found[record.iteration].push_back(
          {param->second, &record.steps[piece.step], &piece, &entry.logged->payload,
           static_cast<std::uint32_t>(entry.path), &paths_[entry.path]});
    }
  }

  std::vector<LogLink> chain;
  std::vector<const optimizer_steps::Step*> before(params.size(), nullptr);
  for (std::uint64_t iteration = from + 1; iteration <= to; ++iteration) {
    const std::string where = StrCat("gradients of ", Quoted(module), ", iteration ", iteration);
    const auto at = found.find(iteration);
    if (at == found.end()) {
      return Fail(Errc::kNotFound, where, ": no record has them");
    }
    std::vector<LogLink::Piece>& pieces = at->second;
    std::ranges::stable_sort(pieces, [](const LogLink::Piece& a, const LogLink::Piece& b) {
      return std::pair(a.param, a.piece->first) < std::pair(b.param, b.piece->first);
    });
    auto first = pieces.begin();
    for (std::size_t i = 0; i < params.size(); ++i) {
      const auto end = std::find_if(first, pieces.end(),
                                    [&](const LogLink::Piece& piece) { return piece.param != i; });
      SW_TRY(CheckCover(params[i], std::span(first, end), where));
      if (first != end) {
        const optimizer_steps::Step& step = first->step->step;
        if (optimizer_steps::CountsSteps(step.optimizer)) {
          SW_TRY(CheckCount(before[i], step, where + ": parameter " + Quoted(params[i].name)));
        }
        before[i] = &step;
      }
      first = end;
    }
    std::erase_if(pieces, [](const LogLink::Piece& piece) { return piece.step->step.skipped; });
    chain.push_back({iteration, std::move(pieces)});
  }
  return chain;
}

std::span<const LogLink::Piece> LogLink::of(std::size_t param) const {
  const auto begin = std::ranges::lower_bound(pieces, param, {}, &Piece::param);
  const auto end = std::ranges::upper_bound(pieces, param, {}, &Piece::param);
  return {begin, end};
}

}  // namespace shardwright::partial
