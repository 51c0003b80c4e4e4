// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "placement/core/random.h"
#include "placement/recovery/recovery_internal.h"

namespace shardwright::placement::internal {
namespace {

// Below this probability of a loss, plain samples contain too few losses.
constexpr double kRare = 0.1;

// Computes the logarithm of C(n, k) from cumulated logarithms. Does not use the gamma function,
// which differs between libraries.
class LogBinomial {
 public:
  explicit LogBinomial(std::uint32_t n) : log_factorial_(n + std::size_t{1}, 0.0) {
    for (std::size_t i = 1; i <= n; ++i) {
      log_factorial_[i] = log_factorial_[i - 1] + std::log(static_cast<double>(i));
    }
  }
  double operator()(std::uint32_t n, std::uint32_t k) const {
    return log_factorial_[n] - log_factorial_[k] - log_factorial_[n - k];
  }

 private:
  std::vector<double> log_factorial_;
};

// Lets at most `most` units fail one by one in a random order, and counts the sets that are lost.
// Larger sets cannot be lost and are left out.
class Sampler {
 public:
  Sampler(const Component& all, std::uint32_t most)
      : all_(all), units_(all.units), failed_(all.units, false), sets_of_(all.units) {
    for (std::uint32_t u = 0; u < all.units; ++u) units_[u] = u;
    for (std::uint32_t s = 0; s < all.sets.size(); ++s) {
      left_.push_back(static_cast<std::uint32_t>(all.sets[s].size()));
      if (left_.back() > most) continue;
      for (const std::uint32_t unit : all.sets[s]) sets_of_[unit].push_back(s);
    }
  }

  // Returns the number of failures at which the first set is lost; most + 1 if none is lost.
  std::uint32_t FirstLoss(Random* random, std::uint32_t most) {
    std::uint32_t failures = 0;
    bool lost = false;
    while (!lost && failures < most) {
      lost = Fail(Draw(random, failures)) > 0;
      ++failures;
    }
    Restore();
    return lost ? failures : most + 1;
  }

  // Counts the sets that are lost if k units fail, including all units of `given`.
  std::uint32_t LostWith(Random* random, std::uint32_t k, const std::vector<std::uint32_t>& given) {
    std::uint32_t lost = 0;
    for (const std::uint32_t unit : given) lost += Fail(unit);
    for (std::uint32_t drawn = 0; down_.size() < k; ++drawn) {
      const std::uint32_t unit = Draw(random, drawn);
      if (!failed_[unit]) lost += Fail(unit);
    }
    Restore();
    return lost;
  }

 private:
  // Returns the next unit of a random order, after `drawn` units.
  std::uint32_t Draw(Random* random, std::uint32_t drawn) {
    std::swap(units_[drawn], units_[drawn + random->Below(all_.units - drawn)]);
    return units_[drawn];
  }

  // \returns the number of sets that lose their last unit
  std::uint32_t Fail(std::uint32_t unit) {
    std::uint32_t lost = 0;
    for (const std::uint32_t s : sets_of_[unit]) lost += --left_[s] == 0 ? 1 : 0;
    failed_[unit] = true;
    down_.push_back(unit);
    return lost;
  }

  void Restore() {
    for (const std::uint32_t unit : down_) {
      for (const std::uint32_t s : sets_of_[unit]) ++left_[s];
      failed_[unit] = false;
    }
    down_.clear();
  }

  const Component& all_;
  std::vector<std::uint32_t> units_;
  std::vector<bool> failed_;
  std::vector<std::vector<std::uint32_t>> sets_of_;  // sets by unit
  std::vector<std::uint32_t> left_;                  // live units by set
  std::vector<std::uint32_t> down_;                  // failed units, in order
};

struct Estimate {
  double lost = 0;
  double error = 0;
};

// Estimates all k at once: a random order of failures shows for each k if it is survived.
std::vector<Estimate> Plain(Sampler* sampler, Random* random, std::uint32_t most,
                            const RecoveryOptions& options) {
  const std::uint64_t samples = options.samples;
  std::vector<std::uint64_t> first(most + std::size_t{2}, 0);
  for (std::uint64_t i = 0; i < samples && !Stopped(options.stop); ++i)
    ++first[sampler->FirstLoss(random, most)];
  std::vector<Estimate> estimates(most + std::size_t{1});
  const double n = static_cast<double>(samples);
  double hits = 0;
  for (std::size_t k = 0; k <= most; ++k) {
    hits += static_cast<double>(first[k]);
    // One more sample of either kind keeps the error above zero if no loss was seen.
    const double safe = (hits + 1) / (n + 2);
    estimates[k] = {hits / n, std::sqrt(safe * (1 - safe) / n)};
  }
  return estimates;
}

// Samples a set of the problem, weighted by the probability that it fails, and the other failures
// at random. A failure set with j lost sets is sampled j times as often, so it counts 1 / j.
Estimate Conditioned(const Component& all, Sampler* sampler, Random* random, std::uint32_t k,
                     const RecoveryOptions& options, const std::vector<double>& weight,
                     double sum) {
  const std::uint64_t samples = options.samples;
  std::vector<double> up_to(weight.size());
  std::partial_sum(weight.begin(), weight.end(), up_to.begin());
  double total = 0;
  double squares = 0;
  for (std::uint64_t i = 0; i < samples && !Stopped(options.stop); ++i) {
    const auto at = std::upper_bound(up_to.begin(), up_to.end(), random->Unit() * up_to.back());
    auto s = static_cast<std::size_t>(std::min(at, up_to.end() - 1) - up_to.begin());
    while (weight[s] == 0 && s > 0) --s;  // rounding may select a set without weight at the end
    const double x = sum / static_cast<double>(sampler->LostWith(random, k, all.sets[s]));
    total += x;
    squares += x * x;
  }
  const double n = static_cast<double>(samples);
  const double mean = total / n;
  return {mean, std::sqrt(std::max(squares / n - mean * mean, 0.0) / n)};
}

}  // namespace

void SolveMonteCarlo(const Component& all, const RecoveryOptions& options,
                     RecoveryProbability* recovery) {
  recovery->method = RecoveryMethod::kMonteCarlo;
  const std::uint32_t cap = std::min(all.units, options.failures_max);
  const LogBinomial choose(all.units);
  Sampler sampler(all, cap);
  recovery->survived.assign(cap + std::size_t{1}, 1.0);
  recovery->lost.assign(cap + std::size_t{1}, 0.0);
  recovery->standard_error.assign(cap + std::size_t{1}, 0.0);
  std::vector<Estimate> plain;  // computed when needed
  const double fits =
      std::log(static_cast<double>(std::max<std::uint64_t>(options.enumeration_max, 1)));
  for (std::uint32_t k = 0; k <= cap && !Stopped(options.stop); ++k) {
    std::vector<double> weight(all.sets.size(), 0);
    double sum = 0;
    for (std::size_t s = 0; s < weight.size(); ++s) {
      const auto size = static_cast<std::uint32_t>(all.sets[s].size());
      if (size <= k)
        weight[s] = std::exp(choose(all.units - size, k - size) - choose(all.units, k));
      sum += weight[s];
    }
    if (sum == 0) continue;  // no set has at most k units
    Estimate estimate;
    if (k == all.units) {
      estimate.lost = 1;
    } else if (all.units <= 64 && choose(all.units, k) < fits) {
      const auto one = CountLost(all, k, options.stop);
      estimate.lost = static_cast<double>(one) / std::round(std::exp(choose(all.units, k)));
    } else if (sum < kRare) {
      Random random(options.seed * 0x9e3779b97f4a7c15 + k);
      estimate = Conditioned(all, &sampler, &random, k, options, weight, sum);
    } else {
      if (plain.empty()) {
        Random random(options.seed * 0x9e3779b97f4a7c15);
        plain = Plain(&sampler, &random, cap, options);
      }
      estimate = plain[k];
    }
    recovery->lost[k] = estimate.lost;
    recovery->survived[k] = 1 - estimate.lost;
    recovery->standard_error[k] = estimate.error;
  }
}

}  // namespace shardwright::placement::internal
