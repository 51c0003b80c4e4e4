// SPDX-License-Identifier: Apache-2.0
// Lagrangian bound of the configuration program.
//
// The bound tests if a placement can have a largest load of at most T. Replicas are sorted into
// classes by load. Class k has loads from k to k + 1 parts of T / kParts. With a price p(k) for
// a replica of class k, of any sign, every such placement satisfies
//
//   sum over experts e of (t(e) + n(e) p(class of t(e) / n(e)))
//     = sum over devices of (load + prices of its replicas)
//     <= sum over devices of the most that any device could have,
//
// A device has at most as many replicas as slots, classes that add up to at most kParts, and a
// load of at most T. If the least left side is above the right side, no placement exists. The
// search changes prices along the subgradient of the difference: the number of replicas of a
// class that experts want minus the number that devices take.

#include "placement/best/bound_internal.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <vector>

namespace shardwright::placement::internal {
namespace {

constexpr std::size_t kParts = 48;
constexpr int kPriceSteps = 120;
constexpr int kHalvings = 7;
// Limit of the replica counts of all experts that each step tries. With more counts there are
// so many slots that the mean is an equally good bound.
constexpr std::size_t kCountsMax = 1 << 16;
constexpr double kProof = 1e-9;      // share of all loads: above rounding errors
constexpr double kRounding = 1e-12;  // share of a load

class Prices {
 public:
  Prices(std::span<const double> tokens, const SearchGround& ground, double peak)
      : tokens_(tokens),
        devices_(ground.size()),
        peak_(peak),
        price_(kParts + 1, 0),
        slope_(kParts + 1, 0) {
    std::uint64_t all = 0;
    for (const std::uint32_t slots : ground.slots) {
      ++devices_of_[slots];
      all += slots;
    }
    most_ = all - std::min<std::uint64_t>(all, tokens.size()) + 1;
  }

  /// Returns true if prices prove that no placement has a peak this low.
  bool Prove() {
    const double scale = peak_ * devices_;
    for (int step = 0; step < kPriceSteps; ++step) {
      std::fill(slope_.begin(), slope_.end(), 0);
      const double value = Wanted() - Taken();
      if (value > kProof * scale) return true;
      double square = 0;
      for (const double s : slope_) square += s * s;
      if (square == 0) return false;
      const double length = (0.002 * scale - value) / square;
      for (std::size_t k = 0; k <= kParts; ++k) price_[k] += length * slope_[k];
    }
    return false;
  }

 private:
  // Returns the cost of the cheapest counts of all experts; infinite if none stays below the peak.
  double Wanted() {
    double sum = 0;
    for (const double all : tokens_) {
      double best = std::numeric_limits<double>::infinity();
      std::uint64_t best_count = 0;
      std::size_t best_class = 0;
      const double parts = all * kParts / peak_;
      for (std::uint64_t n = 1; n <= most_; ++n) {
        // Prevents rounding from moving a replica into a higher class than its load.
        const double part = parts / static_cast<double>(n) * (1 - kRounding);
        if (part > kParts) continue;
        const auto k = static_cast<std::size_t>(part);
        const double value = static_cast<double>(n) * price_[k];
        if (value >= best) continue;
        best = value;
        best_count = n;
        best_class = k;
      }
      if (best_count == 0) return best;
      sum += all + best;
      slope_[best_class] += static_cast<double>(best_count);
    }
    return sum;
  }

  // Returns the most that all devices can take. Devices with equal slots are computed once.
  double Taken() {
    double sum = 0;
    for (const auto& [slots, count] : devices_of_) sum += count * Fullest(slots, count);
    return sum;
  }

  // Returns the greatest load plus prices of a device. best_[c][k] is the greatest price of c
  // replicas with classes that add up to k.
  double Fullest(std::uint32_t slots, std::uint32_t count) {
    constexpr double kNone = -std::numeric_limits<double>::infinity();
    best_.assign((slots + std::size_t{1}) * (kParts + 1), kNone);
    last_.assign(best_.size(), 0);
    best_[0] = 0;
    for (std::uint32_t c = 0; c < slots; ++c) {
      const double* const from = best_.data() + c * (kParts + 1);
      double* const to = best_.data() + (c + std::size_t{1}) * (kParts + 1);
      std::size_t* const last = last_.data() + (c + std::size_t{1}) * (kParts + 1);
      for (std::size_t used = 0; used <= kParts; ++used) {
        if (from[used] == kNone) continue;
        for (std::size_t k = 0; used + k <= kParts; ++k) {
          const double value = from[used] + price_[k];
          if (value <= to[used + k]) continue;
          to[used + k] = value;
          last[used + k] = k;
        }
      }
    }
    double most = kNone;
    std::size_t at = 0;
    for (std::size_t i = 0; i < best_.size(); ++i) {
      if (best_[i] == kNone) continue;
      const std::size_t upper = i % (kParts + 1) + i / (kParts + 1);
      const double load = peak_ * std::min(1.0, static_cast<double>(upper) / kParts);
      if (load + best_[i] <= most) continue;
      most = load + best_[i];
      at = i;
    }
    for (; at > kParts; at -= kParts + 1 + last_[at]) slope_[last_[at]] -= count;
    return most;
  }

  std::span<const double> tokens_;
  std::uint32_t devices_;
  std::uint64_t most_ = 0;  // replicas of an expert if all others have one
  double peak_;
  std::vector<double> price_;
  std::vector<double> slope_;                          // replicas wanted minus taken, by class
  std::map<std::uint32_t, std::uint32_t> devices_of_;  // by number of slots
  std::vector<double> best_;
  std::vector<std::size_t> last_;  // last added class
};

}  // namespace

double ProvenBound(std::span<const double> tokens, const SearchGround& ground, double low,
                   double high) {
  const std::size_t slots =
      std::accumulate(ground.slots.begin(), ground.slots.end(), std::size_t{0});
  const std::size_t counts = tokens.size() * (slots - std::min(slots, tokens.size()) + 1);
  // The linear program supports only devices of equal speed.
  if (counts > kCountsMax || ground.slowest() < ground.fastest()) return low;
  for (int i = 0; i < kHalvings && low < high && !Stopped(ground.stop); ++i) {
    const double middle = low + (high - low) / 2;
    if (Prices(tokens, ground, middle).Prove()) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace shardwright::placement::internal
