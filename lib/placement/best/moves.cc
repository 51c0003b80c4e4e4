// SPDX-License-Identifier: Apache-2.0
#include "placement/best/moves_internal.h"

#include <algorithm>
#include <string>

namespace shardwright::placement::internal {
namespace {

/// A change of one layer from one choice to a more even one.
struct Step {
  std::size_t layer = 0;
  std::size_t to = 0;
  std::uint64_t moves = 0;  ///< additional moves
  double gain = 0;          ///< decrease of the imbalance

  double rate() const { return gain / static_cast<double>(moves); }
};

/// Returns the steps along the lower hull of each layer's choices, best rate first. The rates
/// of one layer decrease, so its steps keep their order.
std::vector<Step> Steps(const Choices& choices) {
  std::vector<Step> steps;
  for (std::size_t layer = 0; layer < choices.size(); ++layer) {
    const std::vector<LayerChoice>& list = choices[layer];
    for (std::size_t from = 0; from + 1 < list.size();) {
      Step best;
      for (std::size_t to = from + 1; to < list.size(); ++to) {
        const Step step{layer, to, list[to].moves - list[from].moves,
                        list[from].imbalance - list[to].imbalance};
        if (best.moves == 0 || step.rate() >= best.rate()) best = step;
      }
      steps.push_back(best);
      from = best.to;
    }
  }
  std::stable_sort(steps.begin(), steps.end(),
                   [](const Step& a, const Step& b) { return a.rate() > b.rate(); });
  return steps;
}

std::uint64_t LeastMoves(const Choices& choices) {
  std::uint64_t least = 0;
  for (const auto& list : choices) least += list.front().moves;
  return least;
}

/// Spends the rest of a budget on the steps with the largest gain.
void SpendRest(const Choices& choices, std::uint64_t left, std::vector<std::size_t>* chosen) {
  while (true) {
    Step best;
    for (std::size_t layer = 0; layer < choices.size(); ++layer) {
      const LayerChoice& now = choices[layer][(*chosen)[layer]];
      for (std::size_t to = (*chosen)[layer] + 1; to < choices[layer].size(); ++to) {
        const LayerChoice& next = choices[layer][to];
        const Step step{layer, to, next.moves - now.moves, now.imbalance - next.imbalance};
        if (step.moves <= left && step.gain > best.gain) best = step;
      }
    }
    if (best.moves == 0) return;
    (*chosen)[best.layer] = best.to;
    left -= best.moves;
  }
}

}  // namespace

std::size_t FewestMoves(std::span<const LayerChoice> choices, double target) {
  std::size_t at = 0;
  while (at + 1 < choices.size() && choices[at].imbalance > target) ++at;
  return at;
}

Result<std::vector<std::size_t>> WithinMoves(const Choices& choices, std::uint64_t most) {
  const std::uint64_t least = LeastMoves(choices);
  if (least > most) {
    return Fail(Errc::kInfeasible, "at most ", most,
                " moves are allowed, but the old plan's gpus "
                "lack replicas that every plan needs: at least ",
                least, " moves; raise --max-moves");
  }
  std::uint64_t left = most - least;
  std::vector<std::size_t> chosen(choices.size(), 0);
  std::vector<bool> closed(choices.size(), false);
  for (const Step& step : Steps(choices)) {
    closed[step.layer] = closed[step.layer] || step.moves > left;
    if (closed[step.layer]) continue;
    chosen[step.layer] = step.to;
    left -= step.moves;
  }
  SpendRest(choices, left, &chosen);
  return chosen;
}

std::vector<MovesPoint> CurveOf(const Choices& choices, const std::vector<bool>& counted,
                                std::size_t points) {
  std::vector<double> imbalance;
  imbalance.reserve(choices.size());
  for (const auto& list : choices) imbalance.push_back(list.front().imbalance);
  std::vector<MovesPoint> curve;
  const auto add = [&](std::uint64_t moves) {
    MovesPoint point{moves, 1, 1};
    double sum = 0;
    double layers = 0;
    for (std::size_t l = 0; l < imbalance.size(); ++l) {
      if (!counted[l]) continue;
      layers += 1;
      sum += imbalance[l];
      point.imbalance_max = std::max(point.imbalance_max, imbalance[l]);
    }
    if (layers > 0) point.imbalance_mean = sum / layers;
    curve.push_back(point);
  };
  std::uint64_t moves = LeastMoves(choices);
  add(moves);
  for (const Step& step : Steps(choices)) {
    imbalance[step.layer] -= step.gain;
    moves += step.moves;
    add(moves);
  }
  if (curve.size() <= points) return curve;
  // Selects points that are spread evenly over the moves, including both ends.
  std::vector<MovesPoint> shown;
  const std::uint64_t first = curve.front().moves;
  const std::uint64_t span = curve.back().moves - first;
  for (const MovesPoint& point : curve) {
    if ((point.moves - first) * (points - 1) >= span * shown.size()) shown.push_back(point);
  }
  if (shown.back().moves != curve.back().moves) shown.push_back(curve.back());
  return shown;
}

}  // namespace shardwright::placement::internal
