#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <tuple>

#include "dialect/deepspeed_write_internal.h"
#include "dialect/dialect.h"
#include "layout/rule.h"
#include "tensor/dtype.h"

namespace shardwright::dialect {

namespace deepspeed {

namespace {

/// A file as it was laid out, without the graph: ranks whose files differ in payload only share it.
struct LaidOut {
  std::vector<torch_pt::StorageSpec> storages;
  std::vector<Fill> fills;
  std::vector<std::uint64_t> offsets;
  std::vector<std::uint32_t> order;  ///< storages as they follow in the file
  std::uint64_t bytes = 0;
};

/// Storages in file order: the pickle's first use decides, not their numbers.
std::vector<std::uint32_t> FileOrder(const torch_pt::Layout& layout) {
  std::vector<std::uint32_t> order(layout.storage_count());
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return layout.payload_offset(a) < layout.payload_offset(b);
  });
  return order;
}

Result<std::vector<plan::FramePiece>> MakeFrame(const Geometry& geometry, const FileId& id,
                                                std::span<const std::uint32_t> crcs) {
  SW_TRY_ASSIGN(const auto document, BuildDocument(geometry, id));
  SW_TRY_ASSIGN(const auto layout, torch_pt::Layout::Make(document->root, document->storages));
  const std::vector<std::uint32_t> order = FileOrder(layout);
  SW_CHECK(order.size() == crcs.size());
  std::vector<std::uint32_t> by_storage(crcs.size());
  for (std::size_t i = 0; i < order.size(); ++i) by_storage[order[i]] = crcs[i];
  std::vector<plan::FramePiece> pieces;
  for (auto& piece : layout.Frame(by_storage)) {
    pieces.push_back({.offset = piece.offset, .bytes = std::move(piece.bytes)});
  }
  return pieces;
}

/// Lays out files one after the other and enters their payloads in the target's shard map.
class Planner {
 public:
  explicit Planner(GeometryPtr geometry) : geometry_(std::move(geometry)) {
    tensors_.resize(geometry_->params.size());
  }

  Status AddFile(const FileId& id);
  void AddLatest();
  plan::Target Take() && { return std::move(target_); }

 private:
  struct Slot {
    std::uint32_t array = 0;
    std::uint64_t holder = 0;
  };
  using Key = std::tuple<Fill::Kind, std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t>;

  Status LayOut(const FileId& id);
  /// Files that differ in payload only have the same signature.
  std::uint64_t Signature(const FileId& id) const;
  Slot SlotOf(const FileId& id, const Fill& fill, const torch_pt::StorageSpec& spec);
  std::uint32_t NewArray(DType dtype, std::uint64_t holders);
  void AddFragment(std::uint32_t param, std::uint32_t state, std::uint32_t mp, DType dtype,
                   const layout::Placement& at);
  void AddFlat(const FileId& id, const Fill& fill, std::size_t ep, std::uint32_t array);
  void AddSub(const FileId& id, const Fill& fill, std::uint32_t array);

  GeometryPtr geometry_;
  plan::Target target_;
  std::map<Key, std::uint32_t> arrays_;  // shared by the files of many ranks
  std::vector<std::map<std::uint32_t, std::uint32_t>> tensors_;  // by parameter: state -> tensor
  std::set<std::pair<std::uint32_t, std::uint32_t>> owned_;      // tensor, tensor-parallel rank
  std::optional<std::uint64_t> signature_;
  LaidOut laid_out_;
};

std::uint64_t Planner::Signature(const FileId& id) const {
  const bool alike = geometry_->to.zero == 3;
  const std::uint64_t rank = alike && id.rank > 0 ? 1 : id.rank;
  const bool optimizer = id.kind == FileKind::kOptimizer;
  return std::uint64_t{id.mp} * 4 + (alike && optimizer ? 2 : rank);
}

Status Planner::LayOut(const FileId& id) {
  const bool reusable =
      geometry_->to.zero == 3 && (id.kind == FileKind::kModel || id.kind == FileKind::kOptimizer);
  if (reusable && signature_ == Signature(id)) return {};
  SW_TRY_ASSIGN(auto document, BuildDocument(*geometry_, id));
  auto layout = torch_pt::Layout::Make(document->root, document->storages);
  if (!layout) return Within(geometry_->PathOf(id), std::move(layout).error());
  laid_out_.storages = std::move(document->storages);
  laid_out_.fills = std::move(document->fills);
  laid_out_.bytes = layout->file_bytes();
  laid_out_.offsets.clear();
  for (std::size_t i = 0; i < layout->storage_count(); ++i) {
    laid_out_.offsets.push_back(layout->payload_offset(i));
  }
  laid_out_.order = FileOrder(*layout);
  SW_CHECK(laid_out_.order.size() == laid_out_.fills.size());
  signature_.reset();
  if (reusable) signature_ = Signature(id);
  return {};
}

std::uint32_t Planner::NewArray(DType dtype, std::uint64_t holders) {
  layout::Array array;
  array.dtype = dtype;
  array.regions.resize(holders);
  target_.map.arrays.push_back(std::move(array));
  return static_cast<std::uint32_t>(target_.map.arrays.size() - 1);
}

void Planner::AddFragment(std::uint32_t param, std::uint32_t state, std::uint32_t mp, DType dtype,
                          const layout::Placement& at) {
  const Param& source = geometry_->params[param];
  auto& tensors = target_.map.tensors;
  const auto [found, fresh] =
      tensors_[param].try_emplace(state, static_cast<std::uint32_t>(tensors.size()));
  if (fresh) {
    layout::LogicalTensor tensor;
    tensor.name = source.name;
    tensor.state = geometry_->states[state];
    tensor.dtype = dtype;
    tensor.shape = source.shape;
    tensors.push_back(std::move(tensor));
  }
  layout::Fragment fragment;
  fragment.cut = geometry_->cut(param, mp);
  fragment.at = at;
  const bool split = geometry_->to.tp > 1;
  const std::uint32_t part = geometry_->FirstWithCut(param, geometry_->tp_rank_of(mp));
  if (split && source.rule.split == layout::Split::kAverage) {
    fragment.role = layout::Role::kPartial;
  } else if (!owned_.emplace(found->second, part).second) {
    fragment.role = layout::Role::kReplica;
  }
  tensors[found->second].fragments.push_back(std::move(fragment));
}

void Planner::AddFlat(const FileId& id, const Fill& fill, std::size_t ep, std::uint32_t array) {
  const FlatGroup& group = geometry_->flat[id.mp][fill.group];
  const DType dtype = target_.map.arrays[array].dtype;
  for (std::size_t i = 0; i < group.params[ep].size(); ++i) {
    const std::uint32_t param = group.params[ep][i];
    if (!geometry_->dtypes[param][fill.state]) continue;
    AddFragment(param, fill.state, id.mp, dtype,
                {.array = array,
                 .vector_offset = group.offsets[i],
                 .chunk = group.partition > 0 ? group.partition : layout::kOneHolder,
                 .region_offset = 0});
  }
}

void Planner::AddSub(const FileId& id, const Fill& fill, std::uint32_t array) {
  const FlatGroup& group = geometry_->flat[id.mp][fill.group];
  const SubGroup& sub = group.sub_groups[fill.sub_group];
  const DType dtype = target_.map.arrays[array].dtype;
  std::uint64_t offset = 0;
  for (std::size_t i = sub.first; i < sub.last; ++i) {
    const std::uint32_t param = group.params[0][i];
    const std::uint64_t share = ShareElems(group.elems[i], group.ranks);
    if (geometry_->dtypes[param][fill.state]) {
      AddFragment(param, fill.state, id.mp, dtype,
                  {.array = array, .vector_offset = 0, .chunk = share, .region_offset = offset});
    }
    offset += share;
  }
}

Planner::Slot Planner::SlotOf(const FileId& id, const Fill& fill,
                              const torch_pt::StorageSpec& spec) {
  if (fill.kind == Fill::Kind::kWhole) {
    const Slot slot{NewArray(spec.dtype, 1), 0};
    AddFragment(
        fill.param, fill.state, id.mp, spec.dtype,
        {.array = slot.array, .vector_offset = 0, .chunk = layout::kOneHolder, .region_offset = 0});
    return slot;
  }
  if (fill.kind == Fill::Kind::kShare) {
    const auto [at, fresh] = arrays_.try_emplace({fill.kind, id.mp, fill.param, 0, fill.state}, 0);
    if (fresh) {
      at->second = NewArray(spec.dtype, geometry_->to.dp);
      AddFragment(
          fill.param, fill.state, id.mp, spec.dtype,
          {.array = at->second, .vector_offset = 0, .chunk = spec.elems, .region_offset = 0});
    }
    return {at->second, id.rank};
  }
  const FlatGroup& group = geometry_->flat[id.mp][fill.group];
  if (fill.kind == Fill::Kind::kSub) {
    const auto [at, fresh] =
        arrays_.try_emplace({fill.kind, id.mp, fill.group, fill.sub_group, fill.state}, 0);
    if (fresh) {
      at->second = NewArray(spec.dtype, group.ranks);
      AddSub(id, fill, at->second);
    }
    return {at->second, id.rank};
  }
  ExpertRank place{0, id.rank};
  if (group.moe && geometry_->to.zero > 0) place = geometry_->PlaceOf(id.rank);
  if (geometry_->to.zero == 0) place = {group.moe ? id.rank : 0, 0};
  // Without ZeRO every file holds its own copy of a dense group.
  const std::uint32_t copy = geometry_->to.zero == 0 && !group.moe ? id.rank : 0;
  const auto part = static_cast<std::uint32_t>(place.ep) + copy;
  const auto [at, fresh] = arrays_.try_emplace({fill.kind, id.mp, fill.group, part, fill.state}, 0);
  if (fresh) {
    at->second = NewArray(spec.dtype, group.ranks);
    AddFlat(id, fill, place.ep, at->second);
  }
  return {at->second, place.edp};
}

Status Planner::AddFile(const FileId& id) {
  SW_TRY(LayOut(id));
  const auto index = static_cast<std::uint32_t>(target_.files.size());
  plan::OutputFile file;
  file.path = geometry_->PathOf(id);
  file.bytes = laid_out_.bytes;
  file.payloads.reserve(laid_out_.fills.size());
  for (const std::uint32_t i : laid_out_.order) {
    const Fill& fill = laid_out_.fills[i];
    const torch_pt::StorageSpec& spec = laid_out_.storages[i];
    plan::Payload payload = PayloadOf(fill, laid_out_.offsets[i],
                                      spec.elems * (spec.untyped ? 1 : ItemSize(spec.dtype)));
    if (fill.kind != Fill::Kind::kInline && fill.kind != Fill::Kind::kMember) {
      const Slot slot = SlotOf(id, fill, spec);
      payload.array = slot.array;
      payload.holder = slot.holder;
      auto& members = target_.map.members;
      target_.map.arrays[slot.array].regions[slot.holder] = {
          .member = static_cast<std::uint32_t>(members.size()), .offset = 0, .elems = spec.elems};
      members.push_back({.file = index,
                         .offset = payload.offset,
                         .bytes = payload.bytes,
                         .crc32 = std::nullopt,
                         .name = "data/" + std::to_string(i)});
    }
    file.payloads.push_back(std::move(payload));
  }
  file.frame = [geometry = geometry_, id](std::span<const std::uint32_t> crcs) {
    return MakeFrame(*geometry, id, crcs);
  };
  target_.map.files.push_back(file.path);
  target_.files.push_back(std::move(file));
  return {};
}

void Planner::AddLatest() {
  target_.files.push_back(plan::TextFile("latest", geometry_->tag));
  target_.map.files.push_back(target_.files.back().path);
}

}  // namespace

}  // namespace deepspeed

Result<plan::Target> WriteDeepSpeed(const Checkpoint& source, const Topology& topology) {
  SW_TRY_ASSIGN(auto geometry, deepspeed::MakeGeometry(source, topology));
  deepspeed::Planner planner(geometry);
  for (const deepspeed::FileId& id : deepspeed::ListFiles(*geometry)) {
    SW_TRY(planner.AddFile(id));
  }
  planner.AddLatest();
  return std::move(planner).Take();
}

}  // namespace shardwright::dialect
