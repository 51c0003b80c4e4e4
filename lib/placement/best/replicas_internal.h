// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "placement/best/ground_internal.h"

namespace shardwright::placement::internal {

/// The replicas of one layer's experts on the live devices, and how a change of them changes the
/// tokens of the devices.
class Replicas {
 public:
  /// Starts without replicas.
  Replicas(const SearchGround& ground, const WindowShares& windows)
      : ground_(ground), windows_(windows), experts_(windows.experts()) {
    Clear();
  }

  void Clear() {
    holds_.assign(std::size_t{ground_.size()} * experts_, 0);
    holders_.assign(experts_, {});
  }
  /// Adds a replica to a device. \pre the device has none of this expert
  void Add(std::uint32_t e, std::uint32_t d) {
    holders_[e].push_back(d);
    holds_[std::size_t{d} * experts_ + e] = 1;
  }
  /// Removes the replica of a device.
  void Remove(std::uint32_t e, std::uint32_t d) {
    std::vector<std::uint32_t>& holders = holders_[e];
    std::iter_swap(std::find(holders.begin(), holders.end(), d), holders.end() - 1);
    holders.pop_back();
    holds_[std::size_t{d} * experts_ + e] = 0;
  }

  std::size_t experts() const { return experts_; }
  std::size_t count(std::uint32_t e) const { return holders_[e].size(); }
  /// Returns the devices of an expert.
  const std::vector<std::uint32_t>& holders(std::uint32_t e) const { return holders_[e]; }
  bool Holds(std::uint32_t d, std::uint32_t e) const {
    return holds_[std::size_t{d} * experts_ + e] != 0;
  }
  /// Returns whether the device may get a replica.
  bool Fits(std::uint32_t d, std::uint32_t e) const { return !Holds(d, e) && ground_.Allows(d, e); }
  /// Returns the tokens of one replica in a window.
  double Share(std::uint32_t w, std::uint32_t e) const {
    return Tokens(w, e) / static_cast<double>(count(e));
  }

  /// Calls add(window, device, tokens) once for each device that gets or loses tokens if expert `z`
  /// replaces `y` on a device.
  /// \pre y has another replica; the device does not have z
  template <class Add>
  void ForReplaced(std::uint32_t device, std::uint32_t y, std::uint32_t z, const Add& add) const {
    for (std::uint32_t w = 0; w < windows_.count(); ++w) {
      const double more = Tokens(w, y) / static_cast<double>(count(y) - 1) - Share(w, y);
      const double taken = Tokens(w, z) / static_cast<double>(count(z) + 1);
      const double less = Share(w, z) - taken;
      add(w, device, taken - Share(w, y));
      for (const std::uint32_t d : holders_[y]) {
        if (d != device) add(w, d, more - (Holds(d, z) ? less : 0));
      }
      for (const std::uint32_t d : holders_[z]) {
        if (!Holds(d, y)) add(w, d, -less);
      }
    }
  }

  /// Does the same for a swap: device `a` gives its replica of `x` for that of `y` on device `b`.
  template <class Add>
  void ForSwapped(std::uint32_t a, std::uint32_t x, std::uint32_t b, std::uint32_t y,
                  const Add& add) const {
    for (std::uint32_t w = 0; w < windows_.count(); ++w) {
      const double moved = Share(w, x) - Share(w, y);
      add(w, a, -moved);
      add(w, b, moved);
    }
  }

 private:
  double Tokens(std::uint32_t w, std::uint32_t e) const { return windows_.tokens(w)[e]; }

  const SearchGround& ground_;
  const WindowShares& windows_;
  std::size_t experts_;
  std::vector<std::uint8_t> holds_;                  // [device][expert]
  std::vector<std::vector<std::uint32_t>> holders_;  // devices of each expert
};

}  // namespace shardwright::placement::internal
