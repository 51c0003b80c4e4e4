// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <numeric>

#include "placement/migration/migration.h"

namespace shardwright::placement {
namespace {

constexpr std::uint32_t kNobody = std::numeric_limits<std::uint32_t>::max();
constexpr std::int64_t kFar = std::numeric_limits<std::int64_t>::max();

// Solves the assignment by shortest augmenting paths with potentials.
class Assignment {
 public:
  Assignment(const std::vector<std::int64_t>& cost, std::uint32_t n)
      : cost_(cost),
        n_(n),
        row_(n, 0),
        column_(n, 0),
        column_of_(n, kNobody),
        row_of_(n, kNobody) {}

  std::vector<std::uint32_t> Solve(const StopCheck& stop) {
    Start();
    for (std::uint32_t r = 0; r < n_; ++r) {
      if (Stopped(stop)) {
        std::iota(column_of_.begin(), column_of_.end(), 0U);
        break;
      }
      if (column_of_[r] == kNobody) Augment(r);
    }
    return column_of_;
  }

 private:
  std::int64_t Cost(std::uint32_t r, std::uint32_t c) const {
    return cost_[std::size_t{r} * n_ + c];
  }

  // Sets potentials to the minimum of each row, then column, and assigns free pairs of cost 0.
  void Start() {
    for (std::uint32_t r = 0; r < n_; ++r) {
      const auto first = cost_.begin() + static_cast<std::ptrdiff_t>(std::size_t{r} * n_);
      row_[r] = *std::min_element(first, first + n_);
    }
    std::fill(column_.begin(), column_.end(), kFar);
    for (std::uint32_t r = 0; r < n_; ++r) {
      for (std::uint32_t c = 0; c < n_; ++c) {
        column_[c] = std::min(column_[c], Cost(r, c) - row_[r]);
      }
    }
    for (std::uint32_t r = 0; r < n_; ++r) {
      for (std::uint32_t c = 0; c < n_; ++c) {
        if (row_of_[c] != kNobody || Cost(r, c) - row_[r] - column_[c] != 0) continue;
        row_of_[c] = r;
        column_of_[r] = c;
        break;
      }
    }
  }

  void Augment(std::uint32_t from) {
    std::vector<std::int64_t> distance(n_, kFar);
    std::vector<std::uint32_t> before(n_, from);  // row before a column on its path
    std::vector<std::uint32_t> open(n_);
    for (std::uint32_t c = 0; c < n_; ++c) open[c] = c;
    std::vector<std::uint32_t> closed;
    std::uint32_t row = from;
    std::int64_t base = 0;
    while (true) {
      std::int64_t least = kFar;
      std::size_t at = 0;
      for (std::size_t i = 0; i < open.size(); ++i) {
        const std::uint32_t c = open[i];
        const std::int64_t through = base + Cost(row, c) - row_[row] - column_[c];
        if (through < distance[c]) {
          distance[c] = through;
          before[c] = row;
        }
        if (distance[c] < least ||
            (distance[c] == least && row_of_[c] == kNobody && row_of_[open[at]] != kNobody)) {
          least = distance[c];
          at = i;
        }
      }
      const std::uint32_t column = open[at];
      open[at] = open.back();
      open.pop_back();
      base = least;
      if (row_of_[column] == kNobody) {
        Finish(from, column, least, distance, before, closed);
        return;
      }
      closed.push_back(column);
      row = row_of_[column];
    }
  }

  void Finish(std::uint32_t from, std::uint32_t column, std::int64_t length,
              const std::vector<std::int64_t>& distance, const std::vector<std::uint32_t>& before,
              const std::vector<std::uint32_t>& closed) {
    row_[from] += length;
    for (const std::uint32_t c : closed) {
      column_[c] -= length - distance[c];
      row_[row_of_[c]] += length - distance[c];
    }
    while (true) {
      const std::uint32_t row = before[column];
      std::swap(column_of_[row], column);
      row_of_[column_of_[row]] = row;
      if (row == from) return;
    }
  }

  const std::vector<std::int64_t>& cost_;
  std::uint32_t n_;
  std::vector<std::int64_t> row_, column_;  // potentials
  std::vector<std::uint32_t> column_of_, row_of_;
};

}  // namespace

std::vector<std::uint32_t> Assign(const std::vector<std::int64_t>& cost, std::uint32_t n,
                                  const StopCheck& stop) {
  return Assignment(cost, n).Solve(stop);
}

}  // namespace shardwright::placement
