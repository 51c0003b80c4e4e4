#include <cmath>

#include "moe/random_internal.h"
#include "moe/recovery_internal.h"

namespace shardwright::moe::internal {
namespace {

// Logarithm of C(n, k), by cumulated logarithms: no gamma function, which differs between
// libraries.
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

// Draws failure sets and counts the sets of the problem that lie wholly in them.
class Sampler {
 public:
  explicit Sampler(const Component& all) : all_(all), units_(all.units), failed_(all.units, false) {
    for (std::uint32_t i = 0; i < all.units; ++i) units_[i] = i;
  }

  // k failed units; those of `given` are among them.
  void Draw(Random* random, std::uint32_t k, const std::vector<std::uint32_t>* given) {
    std::fill(failed_.begin(), failed_.end(), false);
    std::uint32_t fixed = 0;
    if (given != nullptr) {
      for (const std::uint32_t unit : *given) failed_[unit] = true;
      fixed = static_cast<std::uint32_t>(given->size());
    }
    std::uint32_t pool = 0;
    for (std::uint32_t u = 0; u < all_.units; ++u) {
      if (!failed_[u]) units_[pool++] = u;
    }
    for (std::uint32_t i = 0; i < k - fixed; ++i) {
      const auto j = static_cast<std::uint32_t>(i + random->Below(pool - i));
      std::swap(units_[i], units_[j]);
      failed_[units_[i]] = true;
    }
  }

  std::uint32_t LostSets(bool stop_at_one) const {
    std::uint32_t lost = 0;
    for (const auto& set : all_.sets) {
      if (std::all_of(set.begin(), set.end(), [&](std::uint32_t u) { return failed_[u]; })) {
        ++lost;
        if (stop_at_one) break;
      }
    }
    return lost;
  }

 private:
  const Component& all_;
  std::vector<std::uint32_t> units_;
  std::vector<bool> failed_;
};

struct Estimate {
  double lost = 0;
  double error = 0;
};

Estimate Plain(Sampler* sampler, Random* random, std::uint32_t k, std::uint64_t samples) {
  std::uint64_t hits = 0;
  for (std::uint64_t i = 0; i < samples; ++i) {
    sampler->Draw(random, k, nullptr);
    hits += sampler->LostSets(true);
  }
  // One sample more of either kind keeps the error from being zero where nothing was seen.
  const double n = static_cast<double>(samples);
  const double p = static_cast<double>(hits) / n;
  const double safe = (static_cast<double>(hits) + 1) / (n + 2);
  return {p, std::sqrt(safe * (1 - safe) / n)};
}

// Draws a set of the problem, weighted by the chance that it fails, and the other failures at
// random; a failure set with j lost sets is drawn j times as often and so counts 1 / j.
Estimate Conditioned(const Component& all, Sampler* sampler, Random* random, std::uint32_t k,
                     std::uint64_t samples, const std::vector<double>& weight, double sum) {
  double total = 0;
  double squares = 0;
  for (std::uint64_t i = 0; i < samples; ++i) {
    double at = random->Unit() * sum;
    std::size_t s = 0;
    while (s + 1 < weight.size() && at >= weight[s]) at -= weight[s++];
    while (weight[s] == 0 && s > 0) --s;  // rounding may run past the last one that counts
    sampler->Draw(random, k, &all.sets[s]);
    const double x = sum / static_cast<double>(sampler->LostSets(false));
    total += x;
    squares += x * x;
  }
  const double n = static_cast<double>(samples);
  const double mean = total / n;
  return {mean, std::sqrt(std::max(squares / n - mean * mean, 0.0) / n)};
}

}  // namespace

void SolveMonteCarlo(const Component& all, const RecoveryOptions& options, Recovery* recovery) {
  recovery->method = RecoveryMethod::kMonteCarlo;
  const std::uint32_t cap = std::min(all.units, options.failures_max);
  const LogBinomial choose(all.units);
  Sampler sampler(all);
  recovery->survived.assign(cap + std::size_t{1}, 1.0);
  recovery->lost.assign(cap + std::size_t{1}, 0.0);
  recovery->standard_error.assign(cap + std::size_t{1}, 0.0);
  const double fits =
      std::log(static_cast<double>(std::max<std::uint64_t>(options.enumeration_max, 1)));
  for (std::uint32_t k = 0; k <= cap; ++k) {
    std::vector<double> weight(all.sets.size(), 0);
    double sum = 0;
    for (std::size_t s = 0; s < weight.size(); ++s) {
      const auto size = static_cast<std::uint32_t>(all.sets[s].size());
      if (size <= k)
        weight[s] = std::exp(choose(all.units - size, k - size) - choose(all.units, k));
      sum += weight[s];
    }
    if (sum == 0) continue;  // no set is that small
    Random random(options.seed * 0x9e3779b97f4a7c15 + k);
    Estimate estimate;
    if (k == all.units) {
      estimate.lost = 1;
    } else if (all.units <= 64 && choose(all.units, k) < fits) {
      const auto one = CountLost(all, k);
      estimate.lost = static_cast<double>(one) / std::round(std::exp(choose(all.units, k)));
    } else if (sum < 1) {
      estimate = Conditioned(all, &sampler, &random, k, options.samples, weight, sum);
    } else {
      estimate = Plain(&sampler, &random, k, options.samples);
    }
    recovery->lost[k] = estimate.lost;
    recovery->survived[k] = 1 - estimate.lost;
    recovery->standard_error[k] = estimate.error;
  }
}

}  // namespace shardwright::moe::internal
