// SPDX-License-Identifier: Apache-2.0
#include "placement/best/pins_internal.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <string>
#include <utility>

#include "support/base/text.h"

namespace shardwright::placement::internal {
namespace {

/// Returns the pin of an expert, nullptr if it may be anywhere.
const Pin* PinOf(std::span<const Pin> pins, std::uint32_t expert) {
  const auto found = std::ranges::find_if(
      pins, [&](const Pin& pin) { return std::ranges::binary_search(pin.experts, expert); });
  return found == pins.end() ? nullptr : &*found;
}

std::uint32_t NameOf(const Options& options, std::uint32_t expert) {
  return options.expert_names.empty() ? expert : options.expert_names[expert];
}

std::string NodesText(const Pin& pin) {
  std::string text = pin.nodes.size() == 1 ? "node " : "nodes ";
  for (std::size_t i = 0; i < pin.nodes.size(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(pin.nodes[i]);
  }
  return text;
}

/// Assigns experts to devices. An expert takes a free slot, or the slot of
/// an expert that can go to another device (an augmenting path).
class Matching {
 public:
  explicit Matching(const SearchGround& ground)
      : ground_(ground), on_(ground.size()), devices_(ground.experts), moving_(ground.experts) {}

  /// Gives an expert a free slot of a device. Returns false if it may not have it.
  /// \param spare  another device of the same failure unit may have it, too
  bool Keep(std::uint32_t expert, std::uint32_t device, bool spare) {
    const bool may =
        spare ? ground_.Allows(device, expert) && std::ranges::count(devices_[expert], device) == 0
              : MayGo(expert, device, ground_.size());
    if (Free(device) == 0 || !may) return false;
    Put(expert, ground_.size(), device);
    return true;
  }

  /// Gives an expert one more device. Returns false if none was found.
  bool Add(std::uint32_t expert) {
    seen_.assign(ground_.size(), false);
    return Place(expert, ground_.size());
  }

  std::size_t CountOf(std::uint32_t expert) const { return devices_[expert].size(); }

  std::vector<std::int32_t> Slots() const {
    std::vector<std::int32_t> slots;
    for (std::uint32_t d = 0; d < ground_.size(); ++d) {
      const std::size_t end = slots.size() + ground_.slots[d];
      for (const std::uint32_t e : on_[d]) slots.push_back(static_cast<std::int32_t>(e));
      slots.resize(end, kNoExpert);
    }
    return slots;
  }

 private:
  /// Returns whether the expert may go to a device when it leaves `left` (size(): it leaves none).
  bool MayGo(std::uint32_t expert, std::uint32_t to, std::uint32_t left) const {
    if (!ground_.Allows(to, expert)) return false;
    return std::ranges::none_of(devices_[expert], [&](std::uint32_t d) {
      return d == to || (d != left && ground_.unit[d] == ground_.unit[to]);
    });
  }

  bool Place(std::uint32_t expert, std::uint32_t left) {
    moving_[expert] = true;
    const bool placed = PlaceMoving(expert, left);
    moving_[expert] = false;
    return placed;
  }

  bool PlaceMoving(std::uint32_t expert, std::uint32_t left) {
    std::uint32_t best = ground_.size();
    for (std::uint32_t d = 0; d < ground_.size(); ++d) {
      if (Free(d) == 0 || !MayGo(expert, d, left)) continue;
      if (best == ground_.size() || Free(d) > Free(best)) best = d;
    }
    if (best < ground_.size()) {
      Put(expert, left, best);
      return true;
    }
    for (std::uint32_t d = 0; d < ground_.size(); ++d) {
      if (seen_[d] || !MayGo(expert, d, left)) continue;
      seen_[d] = true;
      for (const std::uint32_t other : std::vector<std::uint32_t>(on_[d])) {
        if (moving_[other] || !Place(other, d)) continue;
        Put(expert, left, d);
        return true;
      }
    }
    return false;
  }

  std::size_t Free(std::uint32_t d) const { return ground_.slots[d] - on_[d].size(); }

  void Put(std::uint32_t expert, std::uint32_t left, std::uint32_t to) {
    if (left < ground_.size()) {
      std::erase(on_[left], expert);
      std::erase(devices_[expert], left);
    }
    on_[to].push_back(expert);
    devices_[expert].push_back(to);
  }

  const SearchGround& ground_;
  std::vector<std::vector<std::uint32_t>> on_;       // experts of each device
  std::vector<std::vector<std::uint32_t>> devices_;  // of each expert
  std::vector<bool> seen_;                           // devices
  std::vector<bool> moving_;                         // experts of the current path
};

}  // namespace

Status ApplyPins(const Options& options, const TokenCounts& loads, const Cluster& cluster,
                 SearchGround* ground) {
  if (options.pins.empty()) return {};
  SW_TRY(Validate(options.pins, loads, cluster));
  ground->experts = loads.experts;
  ground->barred.assign(std::size_t{ground->size()} * loads.experts, 0);
  for (const Pin& pin : options.pins) {
    std::set<std::uint32_t> units;
    for (std::uint32_t d = 0; d < ground->size(); ++d) {
      if (std::ranges::binary_search(pin.nodes, cluster.devices[ground->device[d]].node)) {
        units.insert(ground->unit[d]);
        continue;
      }
      for (const std::uint32_t e : pin.experts) {
        ground->barred[std::size_t{d} * loads.experts + e] = 1;
      }
    }
    if (units.size() >= ground->copies_min) continue;
    return Fail(Errc::kInfeasible, "--pin: expert ", NameOf(options, pin.experts.front()),
                " needs replicas on ", Plural(ground->copies_min, "failure unit"), ", but ",
                NodesText(pin), " has ", units.size(),
                " live ones: add nodes to the pin, or lower --faults");
  }
  return {};
}

Result<std::vector<std::int32_t>> PinnedStart(const SearchGround& ground, const Options& options,
                                              const Placement* current, std::uint32_t layer) {
  Matching matching(ground);
  std::vector<std::pair<std::uint32_t, std::uint32_t>> spare;  // expert and device
  for (std::uint32_t d = 0; current != nullptr && d < ground.size(); ++d) {
    for (const std::int32_t held : current->slots(layer, ground.device[d])) {
      if (held == kNoExpert) continue;
      const auto e = static_cast<std::uint32_t>(held);
      if (matching.CountOf(e) < ground.copies_min && matching.Keep(e, d, false)) continue;
      spare.emplace_back(e, d);
    }
  }
  std::vector<std::uint32_t> order(ground.experts);
  std::iota(order.begin(), order.end(), 0U);
  const auto choices = [&](std::uint32_t e) {
    const Pin* const pin = PinOf(options.pins, e);
    return pin == nullptr ? ~std::size_t{0} : pin->nodes.size();
  };
  std::ranges::stable_sort(order, {}, choices);
  for (const std::uint32_t e : order) {
    while (matching.CountOf(e) < ground.copies_min) {
      SW_TRY(CheckStop(ground.stop));
      if (matching.Add(e)) continue;
      const Pin* const pin = PinOf(options.pins, e);
      return Fail(Errc::kInfeasible, "found no placement that obeys every --pin: expert ",
                  NameOf(options, e),
                  pin == nullptr ? std::string() : ", pinned to " + NodesText(*pin) + ",",
                  " found no free slot: add nodes to the pins, or slots to the GPUs");
    }
  }
  for (const auto& [e, d] : spare) matching.Keep(e, d, true);
  return matching.Slots();
}

}  // namespace shardwright::placement::internal
