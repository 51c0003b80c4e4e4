// SPDX-License-Identifier: Apache-2.0
// Random rules over random shapes, stored in random ways: layout::Validate verifies each map, which
// maps every element exactly once, and its inverse returns the first checkpoint.

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "map_model.h"

namespace shardwright::checkpoints {
namespace {

using Random = std::mt19937_64;

std::uint64_t Pick(Random& random, std::uint64_t least, std::uint64_t most) {
  return std::uniform_int_distribution<std::uint64_t>(least, most)(random);
}

/// A rule of random axes: some plain, perhaps a stack, perhaps one that names count.
class RandomRule {
 public:
  explicit RandomRule(Random& random) : random_(random) {
    const std::uint64_t plain = Pick(random, 1, 3);
    for (std::uint64_t i = 0; i < plain; ++i) {
      axes_.push_back({std::string("a") + std::to_string(i), Pick(random, 1, 4), {}});
    }
    if (Pick(random, 0, 2) > 0) {
      Axis stack{"s", 0, {}};
      for (std::uint64_t i = Pick(random, 2, 3); i > 0; --i)
        stack.segments.push_back(Pick(random, 1, 3));
      axes_.push_back(stack);
    }
    counted_ = Pick(random, 0, 1) == 1;
    if (counted_) axes_.push_back({"e", Pick(random, 1, 4), {}});
    for (const char* side : {"x", "y"}) sides_.push_back(MakeSide(side));
  }

  std::string Json() const {
    std::string sizes;
    std::string stacks;
    for (const Axis& axis : axes_) {
      if (axis.segments.empty()) {
        // A size of an axis that names count is known by them.
        if (axis.name == "e") continue;
        sizes += (sizes.empty() ? "" : ", ") + ("\"" + axis.name) +
                 "\": {\"value\": " + std::to_string(axis.extent) + "}";
        continue;
      }
      for (std::size_t i = 0; i < axis.segments.size(); ++i) {
        stacks += (stacks.empty() ? "" : ", ") + ("\"g" + std::to_string(i)) + "=" +
                  std::to_string(axis.segments[i]) + "\"";
      }
    }
    std::string text = "{\"map\": \"m\", \"sizes\": {" + sizes +
                       "}, \"sides\": [{\"name\": \"x\"}, {\"name\": \"y\"}], \"rules\": [{";
    if (!stacks.empty()) text += "\"stacks\": {\"s\": [" + stacks + "]}, ";
    return text + "\"x\": {" + sides_[0].json + "}, \"y\": {" + sides_[1].json + "}}]}";
  }

  /// Returns the tensors of the first naming scheme, of two layers.
  std::vector<std::pair<std::string, Shape>> Tensors() const { return sides_[0].tensors; }

 private:
  struct Axis {
    std::string name;
    std::uint64_t extent;
    std::vector<std::uint64_t> segments;
  };
  struct Side {
    std::string json;
    std::vector<std::pair<std::string, Shape>> tensors;
  };

  Side MakeSide(const std::string& side) {
    Side out;
    const bool apart = Pick(random_, 0, 1) == 1;  // each segment a tensor of its own
    const bool by_name = counted_ && Pick(random_, 0, 1) == 1;
    std::size_t parts = 1;
    for (const Axis& axis : axes_) {
      if (apart && !axis.segments.empty()) parts = axis.segments.size();
    }
    for (std::size_t part = 0; part < parts; ++part) {
      AddTensor(side + std::to_string(part), part, apart, by_name, &out);
    }
    return out;
  }

  void AddTensor(const std::string& name, std::size_t part, bool apart, bool by_name, Side* out) {
    std::vector<Axis> order = axes_;
    std::shuffle(order.begin(), order.end(), random_);
    std::string dims;
    Shape shape;
    bool open = false;
    std::uint64_t places = 1;
    for (const Axis& axis : order) {
      std::string factor = axis.name;
      std::uint64_t extent = axis.extent;
      if (!axis.segments.empty()) {
        extent = 0;
        for (const std::uint64_t size : axis.segments) extent += size;
        if (apart) {
          factor += ".g" + std::to_string(part);
          extent = axis.segments[part];
        }
      }
      if (by_name && axis.name == "e") {
        factor = "{e}";
        places = extent;
        extent = 1;
        if (!open) {
          dims += " {e}";  // no dimension of the tensor
          continue;
        }
      }
      if (!open && Pick(random_, 0, 1) == 1) {
        dims += " (";
        open = true;
        shape.push_back(1);
      } else if (!open) {
        shape.push_back(1);
      }
      dims += " " + factor;
      shape.back() *= extent;
      if (open && Pick(random_, 0, 1) == 1) {
        dims += ")";
        open = false;
      }
    }
    if (open) dims += ")";
    const std::string form = "l.{layer}." + name + (by_name ? ".{e}" : "");
    out->json += (out->json.empty() ? "\"" : ", \"") + form + "\": \"" + dims + "\"";
    for (const char* layer : {"0", "1"}) {
      for (std::uint64_t place = 0; place < places; ++place) {
        out->tensors.push_back(
            {std::string("l.") + layer + "." + name + (by_name ? "." + std::to_string(place) : ""),
             shape});
      }
    }
  }

  Random& random_;
  std::vector<Axis> axes_;
  bool counted_ = false;
  std::vector<Side> sides_;
};

TEST(Maps, InverseLeadsBack) {
  Random random(11);
  for (int round = 0; round < 1500; ++round) {
    const RandomRule rule(random);
    const Spread spread{Pick(random, 1, 3), Pick(random, 0, 1) == 1};
    const Checkpoint source = MadeUp(rule.Tensors(), spread);
    const auto before = ElementsOf(source.map);
    const ModelMap map = ParseMap(rule.Json());
    const Mapped there = Map(map, {"x", "y", {}}, source);
    const auto between = ElementsOf(there.checkpoint.map);
    std::vector<ElementId> all_before;
    std::vector<ElementId> all_between;
    for (const auto& [name, ids] : before)
      all_before.insert(all_before.end(), ids.begin(), ids.end());
    for (const auto& [name, ids] : between) {
      all_between.insert(all_between.end(), ids.begin(), ids.end());
    }
    std::sort(all_before.begin(), all_before.end());
    std::sort(all_between.begin(), all_between.end());
    ASSERT_EQ(all_before, all_between);
    const Mapped back = Map(map, {"y", "x", {}}, there.checkpoint);
    ASSERT_EQ(ElementsOf(back.checkpoint.map), before);
    ASSERT_EQ(back.checkpoint.params.size(), source.params.size());
    if (HasFailure()) FAIL() << "round " << round << ": " << rule.Json();
  }
}

}  // namespace
}  // namespace shardwright::checkpoints
