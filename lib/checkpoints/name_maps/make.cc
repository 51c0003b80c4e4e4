// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "checkpoints/name_maps/map_internal.h"
#include "support/base/checked.h"
#include "support/base/limits.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::maps {
namespace {

/// A tensor of one naming scheme and its range on every axis of the rule.
struct Placed {
  std::vector<Range> ranges;        ///< by index of the axis
  std::vector<std::uint32_t> axes;  ///< in the order of its factors
  std::vector<std::uint64_t> view;  ///< extents of its factors in the stored tensor
  Shape shape;                      ///< without padding
  std::uint64_t elems = 1;          ///< without padding
};

/// Makes the new parameters of one instance.
class Maker {
 public:
  Maker(const ModelMap::Impl& map, std::uint32_t from, std::uint32_t to, const Instance& instance,
        const Checkpoint& source, std::map<std::string, layout::CutPtr>* cuts)
      : rule_(map.rules[instance.rule]),
        from_(*rule_.sides[from]),
        to_(*rule_.sides[to]),
        instance_(instance),
        source_(source),
        cuts_(*cuts) {}

  Result<std::vector<NewParam>> Run();

 private:
  Result<Placed> Place(const TensorForm& form, std::uint64_t place, const Shape* stored) const;
  Status PlaceMembers();
  Status CheckComplete() const;
  std::vector<std::string> Missing() const;
  Result<std::vector<std::uint64_t>> PlacesOf(const TensorForm& form) const;
  Result<NewParam> MakeOne(const TensorForm& form, std::uint64_t place);
  Result<layout::CutPtr> CutOf(const Placed& target, const Placed& part);
  std::optional<std::uint32_t> CapturedAxis(const TensorForm& form) const;
  NewParam Named(const TensorForm& form, Captures captures) const;

  const MapRule& rule_;
  const SideForm& from_;
  const SideForm& to_;
  const Instance& instance_;
  const Checkpoint& source_;
  std::map<std::string, layout::CutPtr>& cuts_;
  std::vector<Placed> members_;  // by index of the member
};

std::optional<std::uint32_t> Maker::CapturedAxis(const TensorForm& form) const {
  for (const std::vector<Factor>& dim : form.dims) {
    for (const Factor& factor : dim) {
      if (factor.captured) return factor.axis;
    }
  }
  return std::nullopt;
}

/// \param stored  shape of a member in the files; null: the tensor is new
Result<Placed> Maker::Place(const TensorForm& form, std::uint64_t place,
                            const Shape* stored) const {
  Placed placed;
  placed.ranges.resize(rule_.axes.size());
  for (std::size_t dim = 0; dim < form.dims.size(); ++dim) {
    std::uint64_t extent = 1;
    for (const Factor& factor : form.dims[dim]) {
      const Range range = RangeOf(rule_, factor, place, instance_);
      placed.ranges[factor.axis] = range;
      placed.axes.push_back(factor.axis);
      placed.view.push_back(factor.padded && stored != nullptr ? (*stored)[dim] : range.size());
      SW_TRY_ASSIGN(extent, CheckedMul(extent, range.size()));
    }
    placed.shape.push_back(extent);
  }
  SW_TRY_ASSIGN(placed.elems, CountElems(placed.shape));
  return placed;
}

Status Maker::PlaceMembers() {
  for (const Member& member : instance_.members) {
    SW_TRY_ASSIGN(Placed placed, Place(from_.tensors[member.tensor], member.place,
                                       &source_.params[member.param].shape));
    members_.push_back(std::move(placed));
  }
  return CheckComplete();
}

/// Returns the names that the rule requires and the checkpoint lacks.
std::vector<std::string> Maker::Missing() const {
  std::vector<std::string> names;
  for (std::uint32_t t = 0; t < from_.tensors.size(); ++t) {
    const TensorForm& form = from_.tensors[t];
    const std::optional<std::uint32_t> axis = CapturedAxis(form);
    const std::uint64_t places = axis ? ExtentOf(rule_.axes[*axis], instance_) : 1;
    for (std::uint64_t place = 0; place < places; ++place) {
      const bool there = std::any_of(
          instance_.members.begin(), instance_.members.end(),
          [&](const Member& member) { return member.tensor == t && member.place == place; });
      if (there) continue;
      Captures captures = instance_.captures;
      if (axis) captures[rule_.axes[*axis].name] = std::to_string(place);
      names.push_back(form.name.Fill(captures));
    }
  }
  return names;
}

/// Checks that members cover all elements of the rule's axes. The forms exclude overlaps.
Status Maker::CheckComplete() const {
  std::uint64_t all = 1;
  for (const Axis& axis : rule_.axes) {
    SW_TRY_ASSIGN(all, CheckedMul(all, ExtentOf(axis, instance_)));
  }
  std::uint64_t held = 0;
  for (const Placed& member : members_) {
    SW_TRY_ASSIGN(held, CheckedAdd(held, member.elems));
  }
  if (held == all) return {};
  return Fail(Errc::kBadInput, Quoted(source_.params[instance_.members.front().param].name), ": ",
              rule_.origin,
              " also needs parameters that the checkpoint lacks: ", FirstFew(Missing()));
}

/// Returns the values of the captured axis in the names of a form; one value if it has none.
Result<std::vector<std::uint64_t>> Maker::PlacesOf(const TensorForm& form) const {
  const std::optional<std::uint32_t> axis = CapturedAxis(form);
  if (!axis) return std::vector<std::uint64_t>{0};
  const std::uint64_t count = ExtentOf(rule_.axes[*axis], instance_);
  if (count > limits::kMoeExperts) {
    return Fail(Errc::kLimit, rule_.origin, ": ", count, " names of ", Quoted(form.name.text()),
                ", at most ", limits::kMoeExperts);
  }
  std::vector<std::uint64_t> places(count);
  for (std::uint64_t i = 0; i < count; ++i) places[i] = i;
  return places;
}

/// Returns the cut for the elements that a member and a new tensor share; null if there are none.
Result<layout::CutPtr> Maker::CutOf(const Placed& target, const Placed& part) {
  const std::size_t rank = part.axes.size();
  layout::Box box;
  std::vector<std::uint32_t> axes(rank);
  std::string key = rule_.origin + ToString(part.view);
  for (std::size_t i = 0; i < rank; ++i) {
    const std::uint32_t axis = target.axes[i];
    const Range& a = target.ranges[axis];
    const Range& b = part.ranges[axis];
    const std::uint64_t first = std::max(a.first, b.first);
    const std::uint64_t last = std::min(a.last, b.last);
    if (first >= last) return layout::CutPtr();
    box.at_view.push_back(first - a.first);
    box.sizes.push_back(last - first);
  }
  for (std::size_t i = 0; i < rank; ++i) {
    const std::uint32_t axis = part.axes[i];
    const auto in_target = std::find(target.axes.begin(), target.axes.end(), axis);
    axes[i] = static_cast<std::uint32_t>(in_target - target.axes.begin());
    const std::uint64_t first = std::max(target.ranges[axis].first, part.ranges[axis].first);
    box.at_shard.push_back(first - part.ranges[axis].first);
    key += "," + std::to_string(axes[i]);
  }
  Shape view = target.view;
  Shape shard = part.view;
  key += ToString(view) + ToString(box.at_view) + ToString(box.at_shard) + ToString(box.sizes);
  layout::CutPtr& cut = cuts_[key];
  if (!cut) {
    SW_TRY_ASSIGN(layout::Cut made, layout::Cut::Make(std::move(view), std::move(shard),
                                                      {std::move(box)}, std::move(axes)));
    cut = std::make_shared<const layout::Cut>(std::move(made));
  }
  return cut;
}

NewParam Maker::Named(const TensorForm& form, Captures captures) const {
  NewParam out;
  out.name = form.name.Fill(captures);
  const auto number = [&](const char* capture) -> std::optional<std::uint64_t> {
    const auto at = captures.find(capture);
    if (at == captures.end() || !form.name.Has(capture)) return std::nullopt;
    std::uint64_t value = 0;
    for (const char c : at->second) {
      if (c < '0' || c > '9') return std::nullopt;
      value = value * 10 + static_cast<std::uint64_t>(c - '0');
    }
    return value;
  };
  out.layer = number("layer");
  out.expert = number("expert");
  if (out.expert) out.expert_module = form.name.FillUpTo(captures, "expert");
  return out;
}

Result<NewParam> Maker::MakeOne(const TensorForm& form, std::uint64_t place) {
  Captures captures = instance_.captures;
  const std::optional<std::uint32_t> axis = CapturedAxis(form);
  if (axis) captures[rule_.axes[*axis].name] = std::to_string(place);
  NewParam out = Named(form, captures);
  SW_TRY_ASSIGN(const Placed target, Place(form, place, nullptr));
  out.shape = target.shape;
  for (std::size_t m = 0; m < members_.size(); ++m) {
    SW_TRY_ASSIGN(layout::CutPtr cut, CutOf(target, members_[m]));
    if (!cut) continue;
    out.pieces.push_back({instance_.members[m].param, cut->is_whole() ? nullptr : std::move(cut)});
  }
  out.reshaped = out.pieces.size() != 1 || out.pieces.front().cut != nullptr ||
                 source_.params[out.pieces.front().param].shape != out.shape;
  return out;
}

Result<std::vector<NewParam>> Maker::Run() {
  std::vector<NewParam> made;
  if (from_.rename || instance_.same) {
    const Param& old = source_.params[instance_.members.front().param];
    NewParam& renamed = made.emplace_back(Named(to_.tensors.front(), instance_.captures));
    renamed.shape = old.shape;
    renamed.pieces.push_back({instance_.members.front().param, nullptr});
    return made;
  }
  SW_TRY(PlaceMembers());
  for (const TensorForm& form : to_.tensors) {
    SW_TRY_ASSIGN(const std::vector<std::uint64_t> places, PlacesOf(form));
    for (const std::uint64_t place : places) {
      SW_TRY_ASSIGN(NewParam param, MakeOne(form, place));
      if (param.pieces.empty()) {
        return Fail(Errc::kUnsupported, Quoted(param.name), " ", ToString(param.shape), ": ",
                    rule_.origin, " has no source for it");
      }
      made.push_back(std::move(param));
    }
  }
  return made;
}

}  // namespace

Result<std::vector<NewParam>> MakeParams(const ModelMap::Impl& map, std::uint32_t from,
                                         std::uint32_t to, const Instance& instance,
                                         const Checkpoint& source,
                                         std::map<std::string, layout::CutPtr>* cuts) {
  return Maker(map, from, to, instance, source, cuts).Run();
}

}  // namespace shardwright::checkpoints::maps
