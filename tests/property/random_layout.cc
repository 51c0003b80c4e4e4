// SPDX-License-Identifier: Apache-2.0
#include "random_layout.h"

#include <algorithm>
#include <cstring>

#include "support/base/checked.h"

namespace shardwright::property {
namespace {

std::uint64_t Pick(Random& random, std::uint64_t first, std::uint64_t last) {
  return std::uniform_int_distribution<std::uint64_t>(first, last)(random);
}

Shape RandomShape(Random& random) {
  Shape shape(Pick(random, 0, 3));
  for (std::uint64_t& extent : shape) extent = Pick(random, 1, 9);
  if (!shape.empty() && Pick(random, 0, 30) == 0) shape[Pick(random, 0, shape.size() - 1)] = 0;
  return shape;
}

layout::SplitRule RandomRule(Random& random, Shape* shape) {
  layout::SplitRule rule;
  const std::uint64_t kind = Pick(random, 0, 5);
  if (shape->empty() || Elems(*shape) == 0 || kind == 0) return rule;
  if (kind == 1) {
    rule.split = layout::Split::kAverage;
    return rule;
  }
  rule.dim = static_cast<std::uint32_t>(Pick(random, 0, shape->size() - 1));
  if (kind <= 3) {
    rule.split = layout::Split::kDim;
    rule.uneven = true;
    rule.padded = rule.dim == 0 && Pick(random, 0, 3) == 0;
    if (rule.padded) rule.uneven = false;
    return rule;
  }
  rule.split = layout::Split::kSub;
  rule.uneven = true;
  for (std::uint64_t left = (*shape)[rule.dim]; left > 0;) {
    rule.sub_sizes.push_back(Pick(random, 1, left));
    left -= rule.sub_sizes.back();
  }
  return rule;
}

/// Calls visit(shard element, logical element) for every element of a cut, by plain counting.
template <class Visit>
void ForElements(const layout::Cut& cut, Visit&& visit) {
  const std::vector<std::uint64_t> view = ContiguousStrides(cut.view());
  const std::vector<std::uint64_t> shard = ContiguousStrides(cut.shard());
  for (const layout::Box& box : cut.boxes()) {
    std::vector<std::uint64_t> index(box.sizes.size(), 0);
    for (bool more = true; more;) {
      std::uint64_t from = 0;
      std::uint64_t to = 0;
      for (std::size_t d = 0; d < index.size(); ++d) {
        from += (box.at_shard[d] + index[d]) * shard[d];
        to += (box.at_view[d] + index[d]) * view[d];
      }
      visit(from, to);
      more = false;
      for (std::size_t d = index.size(); d-- > 0;) {
        if (++index[d] < box.sizes[d]) {
          more = true;
          break;
        }
        index[d] = 0;
      }
    }
  }
}

void AddMember(Stored* stored, std::uint64_t bytes, Random& random, bool noise) {
  std::vector<std::byte> content(bytes);
  if (noise) {
    for (std::byte& byte : content) byte = static_cast<std::byte>(random());
  }
  const auto index = static_cast<std::uint32_t>(stored->members.size());
  stored->map.files.push_back("file" + std::to_string(index));
  stored->map.members.push_back({index, 0, bytes, std::nullopt, "data/0"});
  stored->members.push_back(std::move(content));
}

struct Pending {
  std::size_t truth;
  layout::Role role;
  layout::CutPtr cut;
};

/// Puts fragments of one dtype into one array in the mesh's flat form.
void PlaceFlat(const std::vector<Truth>& truth, const std::vector<Pending>& pending, DType dtype,
               const Mesh& mesh, Random& random, bool noise, Stored* stored) {
  const std::uint64_t item = ItemSize(dtype);
  const auto array = static_cast<std::uint32_t>(stored->map.arrays.size());
  std::vector<layout::Placement> places;
  std::uint64_t length = 0;
  for (const Pending& one : pending) {
    const std::uint64_t elems = one.cut->shard_elems();
    layout::Placement at;
    at.array = array;
    if (mesh.zero == 3) {
      at.chunk = std::max<std::uint64_t>(1, CeilDiv(elems, mesh.dp));
      at.region_offset = length;
      length += elems == 0 ? 0 : at.chunk;
    } else {
      at.vector_offset = length;
      length += elems;
    }
    places.push_back(at);
  }
  const std::uint64_t share =
      mesh.zero == 3 ? length : RoundUp(std::max<std::uint64_t>(length, 1), 2 * mesh.dp) / mesh.dp;
  if (mesh.zero != 3) {
    for (layout::Placement& at : places) at.chunk = share;
  }
  layout::Array made;
  made.dtype = dtype;
  const std::uint64_t lead = Pick(random, 0, 2) * item;
  for (std::uint64_t d = 0; d < mesh.dp; ++d) {
    made.regions.push_back(
        {static_cast<std::uint32_t>(stored->members.size()), noise ? lead : 0, share});
    AddMember(stored, share * item + (noise ? lead : 0), random, noise);
  }
  stored->map.arrays.push_back(made);
  for (std::size_t i = 0; i < pending.size(); ++i) {
    const Truth& tensor = truth[pending[i].truth];
    const layout::Placement& at = places[i];
    ForElements(*pending[i].cut, [&](std::uint64_t from, std::uint64_t to) {
      const std::uint64_t v = at.vector_offset + from;
      const layout::Region& region = made.regions[v / at.chunk];
      std::memcpy(stored->members[region.member].data() + region.offset +
                      (at.region_offset + v % at.chunk) * item,
                  tensor.bytes.data() + to * item, item);
    });
    stored->map.tensors[pending[i].truth].fragments.push_back(
        {pending[i].cut, at, pending[i].role});
  }
}

/// Widths of the sub-tensors on every rank, [sub-tensor][rank]: the first ranks have one more.
std::vector<std::vector<std::uint64_t>> WidthsOf(const std::vector<std::uint64_t>& sizes,
                                                 std::uint64_t ranks) {
  std::vector<std::vector<std::uint64_t>> widths;
  for (const std::uint64_t size : sizes) {
    widths.emplace_back();
    for (std::uint64_t rank = 0; rank < ranks; ++rank) {
      widths.back().push_back(size / ranks + (rank < size % ranks ? 1 : 0));
    }
  }
  return widths;
}

/// Returns a rank's indices along the sharded dimension, in the rank's order.
std::vector<std::uint64_t> IndicesOf(const std::vector<std::vector<std::uint64_t>>& widths,
                                     std::uint64_t rank) {
  std::vector<std::uint64_t> mine;
  std::uint64_t at = 0;
  for (const auto& of_ranks : widths) {
    for (std::uint64_t r = 0; r < of_ranks.size(); ++r) {
      for (std::uint64_t i = 0; i < of_ranks[r]; ++i, ++at) {
        if (r == rank) mine.push_back(at);
      }
    }
  }
  return mine;
}

}  // namespace

Viewed RandomViewed(Random& random) {
  Viewed out;
  std::vector<std::size_t> group;  // by dimension of the view: that of the tensor
  layout::SplitRule& rule = out.rule;
  Shape& view = rule.view;
  out.shape.assign(Pick(random, 1, 3), 1);
  for (std::size_t dim = 0; dim < out.shape.size(); ++dim) {
    for (std::uint64_t parts = Pick(random, 1, 3); parts > 0; --parts) {
      view.push_back(Pick(random, 1, 4));
      group.push_back(dim);
      out.shape[dim] *= view.back();
    }
  }
  rule.split = layout::Split::kSub;
  rule.uneven = true;
  rule.dim = static_cast<std::uint32_t>(Pick(random, 0, view.size() - 1));
  if (view[rule.dim] == 1) {
    view[rule.dim] = 2;
    out.shape[group[rule.dim]] *= 2;
  }
  for (std::uint64_t left = view[rule.dim]; left > 0; left -= rule.sub_sizes.back()) {
    rule.sub_sizes.push_back(Pick(random, 0, 1) == 0 ? left : Pick(random, 1, left));
  }
  const std::uint64_t ranks = Pick(random, 2, 4);
  const auto widths = WidthsOf(rule.sub_sizes, ranks);
  for (std::uint64_t rank = 0; rank < ranks; ++rank) {
    const std::vector<std::uint64_t> mine = IndicesOf(widths, rank);
    Shape shape(out.shape.size(), 1);
    for (std::size_t d = 0; d < view.size(); ++d) {
      shape[group[d]] *= d == rule.dim ? mine.size() : view[d];
    }
    std::uint64_t inner = 1;
    for (std::size_t d = rule.dim + 1; d < view.size(); ++d) inner *= view[d];
    const std::uint64_t outer = Elems(view) / view[rule.dim] / inner;
    std::vector<std::uint64_t> elements;
    for (std::uint64_t o = 0; o < outer; ++o) {
      for (const std::uint64_t index : mine) {
        for (std::uint64_t i = 0; i < inner; ++i) {
          elements.push_back((o * view[rule.dim] + index) * inner + i);
        }
      }
    }
    out.shapes.push_back(std::move(shape));
    out.elements.push_back(std::move(elements));
  }
  return out;
}

std::vector<Truth> RandomTruth(Random& random) {
  std::vector<Truth> all(Pick(random, 1, 5));
  for (std::size_t i = 0; i < all.size(); ++i) {
    Truth& tensor = all[i];
    tensor.name = "p" + std::to_string(i);
    tensor.state = "fp32";
    tensor.shape = RandomShape(random);
    tensor.rule = RandomRule(random, &tensor.shape);
    constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF64};
    // Adding up to four float64 values is not exact in the float64 accumulators of a mean.
    const bool mean = tensor.rule.split == layout::Split::kAverage;
    tensor.dtype = kTypes[Pick(random, 0, mean ? 1 : 2)];
    tensor.bytes.resize(Elems(tensor.shape) * ItemSize(tensor.dtype));
    for (std::byte& byte : tensor.bytes) byte = static_cast<std::byte>(random());
    // A mean of equal values is the value itself, unless it is a NaN or infinite: keep exponents
    // small.
    if (tensor.rule.split == layout::Split::kAverage) {
      for (std::size_t b = ItemSize(tensor.dtype) - 1; b < tensor.bytes.size();
           b += ItemSize(tensor.dtype)) {
        tensor.bytes[b] &= std::byte{0xBF};
      }
    }
  }
  return all;
}

Mesh RandomMesh(Random& random) {
  constexpr int kStages[] = {0, 1, 3};
  return {Pick(random, 1, 4), Pick(random, 1, 5), kStages[Pick(random, 0, 2)]};
}

Stored Store(const std::vector<Truth>& truth, const Mesh& mesh, Random& random, bool noise) {
  Stored stored;
  std::vector<bool> partial;  // by tensor: if averaged, also partial in a target
  for (const Truth& tensor : truth) {
    stored.map.tensors.push_back({tensor.name, tensor.state, tensor.dtype, tensor.shape, {}});
    partial.push_back(Pick(random, 0, 1) == 1);
  }
  for (std::uint64_t rank = 0; rank < mesh.tp; ++rank) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF64}) {
      std::vector<Pending> pending;
      for (std::size_t t = 0; t < truth.size(); ++t) {
        if (truth[t].dtype != dtype) continue;
        Result<layout::Cut> cut = layout::MakeCut(truth[t].rule, truth[t].shape, mesh.tp, rank);
        SW_CHECK(cut.has_value());
        layout::Role role = layout::Role::kOwner;
        if (truth[t].rule.split == layout::Split::kReplicated && rank > 0)
          role = layout::Role::kReplica;
        // A source has partial values. A target has whole values, one copy on each rank.
        if (truth[t].rule.split == layout::Split::kAverage) {
          role = noise || partial[t] ? layout::Role::kPartial
                 : rank > 0          ? layout::Role::kReplica
                                     : layout::Role::kOwner;
        }
        pending.push_back({t, role, std::make_shared<layout::Cut>(*std::move(cut))});
      }
      if (mesh.zero != 0) {
        if (!pending.empty()) PlaceFlat(truth, pending, dtype, mesh, random, noise, &stored);
        continue;
      }
      for (const Pending& one : pending) {
        const auto array = static_cast<std::uint32_t>(stored.map.arrays.size());
        PlaceFlat(truth, {one}, dtype, {1, 1, 1}, random, noise, &stored);
        layout::Placement& at = stored.map.tensors[one.truth].fragments.back().at;
        at.chunk = layout::kOneHolder;
        at.array = array;
      }
    }
  }
  return stored;
}

plan::Target TargetOf(const Stored& stored) {
  plan::Target target;
  target.map = stored.map;
  for (std::size_t m = 0; m < stored.members.size(); ++m) {
    plan::OutputFile file;
    file.path = stored.map.files[m];
    file.bytes = stored.members[m].size();
    target.files.push_back(std::move(file));
  }
  for (std::size_t a = 0; a < stored.map.arrays.size(); ++a) {
    for (std::size_t h = 0; h < stored.map.arrays[a].regions.size(); ++h) {
      const layout::Region& region = stored.map.arrays[a].regions[h];
      plan::Payload payload;
      payload.array = static_cast<std::uint32_t>(a);
      payload.holder = h;
      payload.bytes = stored.members[region.member].size();
      target.files[region.member].payloads.push_back(payload);
    }
  }
  return target;
}

}  // namespace shardwright::property
