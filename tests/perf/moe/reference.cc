// SPDX-License-Identifier: Apache-2.0
// Searches placements of experts without a line of the library, for tests of its strategy best:
//   moe_reference enumerate            the optimum, for a few GPUs and experts
//   moe_reference anneal SECONDS       simulated annealing, processor seconds per layer
// Reads from stdin: layers, experts, GPUs, slots per GPU, then the token counts of all layers.
// Prints the least balance found for each layer, a line each: the largest load over the mean when
// replicas share their expert's tokens equally. No expert is twice on a GPU, and no slot is empty.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <random>
#include <vector>

namespace {

struct Problem {
  std::size_t gpus = 0;
  std::size_t slots = 0;
  std::vector<double> tokens;  // by expert
};

double Balance(const Problem& problem, double peak) {
  double all = 0;
  for (const double t : problem.tokens) all += t;
  return all > 0 ? peak * static_cast<double>(problem.gpus) / all : 1;
}

/// Every way to give each GPU a set of experts. GPUs are equal, so their sets ascend.
class Enumeration {
 public:
  explicit Enumeration(const Problem& problem) : problem_(problem), copies_(problem.tokens.size()) {
    Grow(0);
  }

  double Least() {
    Fill(0, 0);
    return Balance(problem_, least_);
  }

 private:
  void Grow(std::size_t from) {
    if (set_.size() == problem_.slots) {
      sets_.push_back(set_);
      return;
    }
    for (std::size_t e = from; e < problem_.tokens.size(); ++e) {
      set_.push_back(e);
      Grow(e + 1);
      set_.pop_back();
    }
  }

  void Fill(std::size_t gpu, std::size_t from) {
    if (gpu == problem_.gpus) return VerifyPlan();
    for (std::size_t i = from; i < sets_.size(); ++i) {
      for (const std::size_t e : sets_[i]) copies_[e] += 1;
      chosen_.push_back(i);
      Fill(gpu + 1, i);
      chosen_.pop_back();
      for (const std::size_t e : sets_[i]) copies_[e] -= 1;
    }
  }

  void VerifyPlan() {
    if (std::find(copies_.begin(), copies_.end(), 0) != copies_.end()) return;
    double peak = 0;
    for (const std::size_t i : chosen_) {
      double load = 0;
      for (const std::size_t e : sets_[i]) load += problem_.tokens[e] / copies_[e];
      peak = std::max(peak, load);
    }
    least_ = std::min(least_, peak);
  }

  const Problem& problem_;
  std::vector<double> copies_;
  std::vector<std::size_t> set_;
  std::vector<std::vector<std::size_t>> sets_;
  std::vector<std::size_t> chosen_;
  double least_ = HUGE_VAL;
};

/// Simulated annealing on powers of the token counts per device, restarted from the best placement.
class Anneal {
 public:
  Anneal(const Problem& problem, std::uint64_t seed)
      : problem_(problem),
        random_(seed),
        slot_(problem.gpus * problem.slots),
        copies_(problem.tokens.size(), 0),
        load_(problem.gpus, 0) {
    Deal();
    best_ = slot_;
    best_peak_ = Peak();
  }

  double Run(double seconds) {
    const std::clock_t end = std::clock() + static_cast<std::clock_t>(seconds * CLOCKS_PER_SEC);
    constexpr double kHeat[] = {0.3, 0.1, 0.03, 0.01};
    for (std::size_t round = 0; std::clock() < end; ++round) {
      if (round % 3 == 0) Restore();
      const std::uint64_t steps = 100'000;
      for (std::uint64_t step = 0; step < steps; ++step) {
        const double cooled = 1 - static_cast<double>(step) / static_cast<double>(steps);
        Step(kHeat[round % 4] * cooled * cooled + 1e-9);
        if (Peak() < best_peak_ * (1 - 1e-12)) Note();
      }
    }
    return Balance(problem_, best_peak_);
  }

 private:
  std::size_t Below(std::size_t n) { return static_cast<std::size_t>(random_() % n); }
  double Unit() { return static_cast<double>(random_() >> 11) * 0x1p-53; }

  std::int64_t* Slots(std::size_t gpu) { return slot_.data() + gpu * problem_.slots; }
  bool Holds(std::size_t gpu, std::int64_t e) {
    return std::find(Slots(gpu), Slots(gpu) + problem_.slots, e) != Slots(gpu) + problem_.slots;
  }

  // Experts in turn, each next to others; the slots of a GPU are then of different experts.
  void Deal() {
    const std::size_t experts = problem_.tokens.size();
    for (std::size_t s = 0; s < slot_.size(); ++s) {
      const std::size_t gpu = s % problem_.gpus;
      auto e = static_cast<std::int64_t>(s % experts);
      while (s / problem_.gpus > 0 && HoldsFirst(gpu, s / problem_.gpus, e)) {
        e = (e + 1) % static_cast<std::int64_t>(experts);
      }
      Slots(gpu)[s / problem_.gpus] = e;
      copies_[static_cast<std::size_t>(e)] += 1;
    }
    // Duplicates that were avoided may have left an expert out.
    for (std::size_t e = 0; e < experts; ++e) {
      while (copies_[e] == 0) {
        std::int64_t& slot = slot_[Below(slot_.size())];
        if (copies_[static_cast<std::size_t>(slot)] < 2) continue;
        copies_[static_cast<std::size_t>(slot)] -= 1;
        slot = static_cast<std::int64_t>(e);
        copies_[e] = 1;
      }
    }
    Reload();
  }
  bool HoldsFirst(std::size_t gpu, std::size_t count, std::int64_t e) {
    return std::find(Slots(gpu), Slots(gpu) + count, e) != Slots(gpu) + count;
  }

  void Restore() {
    slot_ = best_;
    std::fill(copies_.begin(), copies_.end(), 0);
    for (const std::int64_t e : slot_) copies_[static_cast<std::size_t>(e)] += 1;
    Reload();
  }

  double Share(std::int64_t e) const {
    return problem_.tokens[static_cast<std::size_t>(e)] / copies_[static_cast<std::size_t>(e)];
  }
  void Reload() {
    for (std::size_t g = 0; g < problem_.gpus; ++g) {
      load_[g] = 0;
      for (std::size_t s = 0; s < problem_.slots; ++s) load_[g] += Share(Slots(g)[s]);
    }
  }
  double Peak() const { return *std::max_element(load_.begin(), load_.end()); }
  double Cost() const {
    double mean = 0;
    for (const double load : load_) mean += load;
    mean /= static_cast<double>(load_.size());
    double cost = 0;
    for (const double load : load_) {
      const double square = (load / mean) * (load / mean);
      cost += square * square * square * square * square * square;
    }
    return std::log(cost / static_cast<double>(load_.size())) + 4 * (Peak() / mean - 1);
  }

  void Step(double temperature) {
    const std::vector<double> before = load_;
    const double cost = Cost();
    const std::size_t a = Below(problem_.gpus);
    std::int64_t& mine = Slots(a)[Below(problem_.slots)];
    if (Below(2) == 0) {
      const std::size_t b = Below(problem_.gpus);
      std::int64_t& theirs = Slots(b)[Below(problem_.slots)];
      if (a == b || mine == theirs || Holds(a, theirs) || Holds(b, mine)) return;
      const double moved = Share(mine) - Share(theirs);
      load_[a] -= moved;
      load_[b] += moved;
      if (Keeps(cost, temperature)) {
        std::swap(mine, theirs);
      } else {
        load_ = before;
      }
      return;
    }
    const auto next = static_cast<std::int64_t>(Below(problem_.tokens.size()));
    const std::int64_t last = mine;
    if (Holds(a, next) || copies_[static_cast<std::size_t>(last)] < 2) return;
    const auto replace = [&](std::int64_t from, std::int64_t to) {
      copies_[static_cast<std::size_t>(from)] -= 1;
      copies_[static_cast<std::size_t>(to)] += 1;
      mine = to;
    };
    replace(last, next);
    Reload();
    if (Keeps(cost, temperature)) return;
    replace(next, last);
    load_ = before;
  }

  bool Keeps(double cost, double temperature) {
    const double worse = Cost() - cost;
    return worse <= 0 || Unit() < std::exp(-worse / temperature);
  }

  // Notes the best placement so far. Its loads are added up again, without what rounding left.
  void Note() {
    Reload();
    if (Peak() >= best_peak_) return;
    best_peak_ = Peak();
    best_ = slot_;
  }

  const Problem& problem_;
  std::mt19937_64 random_;
  std::vector<std::int64_t> slot_;  // [GPU][slot]: expert
  std::vector<double> copies_;
  std::vector<double> load_;
  std::vector<std::int64_t> best_;
  double best_peak_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  const bool anneals = argc == 3 && std::strcmp(argv[1], "anneal") == 0;
  if (!anneals && !(argc == 2 && std::strcmp(argv[1], "enumerate") == 0)) {
    std::fprintf(stderr, "usage: moe_reference enumerate | anneal SECONDS\n");
    return 2;
  }
  std::size_t layers = 0;
  std::size_t experts = 0;
  Problem problem;
  if (std::scanf("%zu %zu %zu %zu", &layers, &experts, &problem.gpus, &problem.slots) != 4 ||
      problem.slots > experts || problem.gpus * problem.slots < experts) {
    std::fprintf(stderr, "moe_reference: no such problem\n");
    return 2;
  }
  for (std::size_t layer = 0; layer < layers; ++layer) {
    problem.tokens.assign(experts, 0);
    for (double& tokens : problem.tokens) {
      if (std::scanf("%lf", &tokens) != 1) return 2;
    }
    const double least =
        anneals ? Anneal(problem, layer).Run(std::atof(argv[2])) : Enumeration(problem).Least();
    std::printf("%.12g\n", least);
  }
  return 0;
}
