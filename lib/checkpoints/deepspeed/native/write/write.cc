// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <tuple>

#include "checkpoints/deepspeed/common/import_foreign.h"
#include "checkpoints/deepspeed/native/deepspeed.h"
#include "checkpoints/deepspeed/native/write/write_internal.h"
#include "checkpoints/pickled/torch_optimizer.h"
#include "engine/layout/rule.h"
#include "engine/plan/target_builder.h"
#include "engine/tensor/dtype.h"

namespace shardwright::checkpoints {

namespace deepspeed {

namespace {

/// Layout of a file, without the graph. Ranks with equal files except for payloads share it.
struct LaidOut {
  std::vector<torch_pt::StorageSpec> storages;
  std::vector<Fill> fills;
  std::vector<Cutting> cuttings;
  std::vector<std::uint64_t> offsets;
  std::vector<std::uint32_t> order;  ///< storages in file order
  std::uint64_t bytes = 0;
};

/// Returns storages in file order, which is the order of first use in the pickle.
std::vector<std::uint32_t> FileOrder(const torch_pt::Layout& layout) {
  std::vector<std::uint32_t> order(layout.storage_count());
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return layout.payload_offset(a) < layout.payload_offset(b);
  });
  return order;
}

Status PutFrameOf(const Geometry& geometry, const FileId& id, std::span<const std::uint32_t> crcs,
                  const plan::PutFrame& put) {
  SW_TRY_ASSIGN(const auto document, BuildDocument(geometry, id));
  SW_TRY_ASSIGN(const auto layout, torch_pt::Layout::Make(document->root, document->storages));
  const std::vector<std::uint32_t> order = FileOrder(layout);
  SW_CHECK(order.size() == crcs.size());
  std::vector<std::uint32_t> by_storage(crcs.size());
  for (std::size_t i = 0; i < order.size(); ++i) by_storage[order[i]] = crcs[i];
  for (const torch_pt::Layout::Piece& piece : layout.Frame(by_storage)) {
    SW_TRY(put(piece.offset, piece.bytes));
  }
  return {};
}

/// Lays out files one after the other and adds their payloads to the target's shard map.
class Planner {
 public:
  explicit Planner(GeometryPtr geometry) : geometry_(std::move(geometry)) {
    tensors_.resize(geometry_->params.size());
  }

  Status AddFile(const FileId& id);
  void AddLatest();
  plan::Target Take() && { return std::move(builder_).Take(); }

 private:
  struct Slot {
    std::uint32_t array = 0;
    std::uint64_t holder = 0;
  };
  using Key = std::tuple<Cutting::Kind, std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t>;

  Status LayOut(const FileId& id);
  /// Returns a signature that is equal for files that differ only in payload.
  std::uint64_t Signature(const FileId& id) const;
  Slot SlotOf(const FileId& id, const Cutting& cutting, const torch_pt::StorageSpec& spec);
  void AddFragment(std::uint32_t param, std::uint32_t state, std::uint32_t mp, DType dtype,
                   const layout::Placement& at);
  void AddFlat(const FileId& id, const Cutting& cutting, std::size_t ep, std::uint32_t array);
  void AddSub(const FileId& id, const Cutting& cutting, std::uint32_t array);

  GeometryPtr geometry_;
  plan::TargetBuilder builder_;
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
  laid_out_.cuttings = std::move(document->cuttings);
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

void Planner::AddFragment(std::uint32_t param, std::uint32_t state, std::uint32_t mp, DType dtype,
                          const layout::Placement& at) {
  const Param& source = geometry_->params[param];
  const auto [found, fresh] = tensors_[param].try_emplace(state, 0);
  if (fresh) {
    found->second = builder_.AddTensor(source.name, geometry_->states[state], dtype, source.shape);
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
  builder_.AddFragment(found->second, std::move(fragment));
}

void Planner::AddFlat(const FileId& id, const Cutting& cutting, std::size_t ep,
                      std::uint32_t array) {
  const FlatGroup& group = geometry_->flat[id.mp][cutting.group];
  const DType dtype = builder_.target().map.arrays[array].dtype;
  for (std::size_t i = 0; i < group.params[ep].size(); ++i) {
    const std::uint32_t param = group.params[ep][i];
    if (!geometry_->dtypes[param][cutting.state]) continue;
    AddFragment(param, cutting.state, id.mp, dtype,
                {.array = array,
                 .vector_offset = group.offsets[i],
                 .chunk = group.partition > 0 ? group.partition : layout::kOneHolder,
                 .region_offset = 0});
  }
}

void Planner::AddSub(const FileId& id, const Cutting& cutting, std::uint32_t array) {
  const FlatGroup& group = geometry_->flat[id.mp][cutting.group];
  const SubGroup& sub = group.sub_groups[cutting.sub_group];
  const DType dtype = builder_.target().map.arrays[array].dtype;
  std::uint64_t offset = 0;
  for (std::size_t i = sub.first; i < sub.last; ++i) {
    const std::uint32_t param = group.params[0][i];
    const std::uint64_t share = ShareElems(group.elems[i], group.ranks);
    if (geometry_->dtypes[param][cutting.state]) {
      AddFragment(param, cutting.state, id.mp, dtype,
                  {.array = array, .vector_offset = 0, .chunk = share, .region_offset = offset});
    }
    offset += share;
  }
}

Planner::Slot Planner::SlotOf(const FileId& id, const Cutting& cutting,
                              const torch_pt::StorageSpec& spec) {
  if (cutting.kind == Cutting::Kind::kWhole) {
    const Slot slot{builder_.AddArray(spec.dtype, 1), 0};
    AddFragment(
        cutting.param, cutting.state, id.mp, spec.dtype,
        {.array = slot.array, .vector_offset = 0, .chunk = layout::kOneHolder, .region_offset = 0});
    return slot;
  }
  if (cutting.kind == Cutting::Kind::kShare) {
    const auto [at, fresh] =
        arrays_.try_emplace({cutting.kind, id.mp, cutting.param, 0, cutting.state}, 0);
    if (fresh) {
      at->second = builder_.AddArray(spec.dtype, geometry_->to.dp);
      AddFragment(
          cutting.param, cutting.state, id.mp, spec.dtype,
          {.array = at->second, .vector_offset = 0, .chunk = spec.elems, .region_offset = 0});
    }
    return {at->second, id.rank};
  }
  const FlatGroup& group = geometry_->flat[id.mp][cutting.group];
  if (cutting.kind == Cutting::Kind::kSub) {
    const auto [at, fresh] = arrays_.try_emplace(
        {cutting.kind, id.mp, cutting.group, cutting.sub_group, cutting.state}, 0);
    if (fresh) {
      at->second = builder_.AddArray(spec.dtype, group.ranks);
      AddSub(id, cutting, at->second);
    }
    return {at->second, id.rank};
  }
  ExpertRank place{0, id.rank};
  if (group.moe && geometry_->to.zero > 0) place = geometry_->PlaceOf(id.rank);
  if (geometry_->to.zero == 0) place = {group.moe ? id.rank : 0, 0};
  // Without ZeRO every file has its own copy of a dense group.
  const std::uint32_t copy = geometry_->to.zero == 0 && !group.moe ? id.rank : 0;
  const auto part = static_cast<std::uint32_t>(place.ep) + copy;
  const auto [at, fresh] =
      arrays_.try_emplace({cutting.kind, id.mp, cutting.group, part, cutting.state}, 0);
  if (fresh) {
    at->second = builder_.AddArray(spec.dtype, group.ranks);
    AddFlat(id, cutting, place.ep, at->second);
  }
  return {at->second, place.edp};
}

Status Planner::AddFile(const FileId& id) {
  SW_TRY(LayOut(id));
  const std::uint32_t file = builder_.AddFile(geometry_->PathOf(id));
  for (const std::uint32_t i : laid_out_.order) {
    const Fill& fill = laid_out_.fills[i];
    const torch_pt::StorageSpec& spec = laid_out_.storages[i];
    const std::uint64_t offset = laid_out_.offsets[i];
    switch (fill.kind) {
      case Fill::Kind::kTensor: {
        const Slot slot = SlotOf(id, laid_out_.cuttings[fill.tensor], spec);
        builder_.AddElements(file, offset, slot.array, slot.holder, spec.elems,
                             "data/" + std::to_string(i));
        break;
      }
      case Fill::Kind::kMember:
        builder_.AddMember(file, offset, fill.member,
                           spec.elems * (spec.untyped ? 1 : ItemSize(spec.dtype)));
        break;
      case Fill::Kind::kInline:
        builder_.AddInline(file, offset, fill.bytes);
        break;
    }
  }
  builder_.SetFrame(
      file, laid_out_.bytes,
      [geometry = geometry_, id](std::span<const std::uint32_t> crcs, const plan::PutFrame& put) {
        return PutFrameOf(*geometry, id, crcs, put);
      });
  return {};
}

void Planner::AddLatest() { builder_.AddText("latest", geometry_->tag); }

}  // namespace

}  // namespace deepspeed

Result<Written> WriteDeepSpeed(const Checkpoint& source, const Topology& topology) {
  if (!source.order_unknown.empty()) {
    return Fail(Errc::kUnsupported, source.tag,
                ": native files need the parameters in model order, which is unknown: ",
                source.order_unknown,
                "; use --format universal, which identifies parameters by name");
  }
  if (topology.zero == 3) {
    SW_TRY(CheckDecided(source,
                        "ZeRO stage 3 distributes frozen parameters among ranks and stores every "
                        "other tensor whole, and trainers load no other form"));
  }
  if (EngineStateOf(source) == nullptr) {
    SW_TRY_ASSIGN(Adopted adopted, Adopt(source));
    if (topology.tp == 1) {
      // Native files do not distinguish padding rows from vocabulary rows.
      for (Param& param : adopted.checkpoint.params) param.rule.padded = false;
    }
    SW_TRY_ASSIGN(Written written, WriteDeepSpeed(adopted.checkpoint, topology));
    written.not_carried.insert(written.not_carried.end(), adopted.not_carried.begin(),
                               adopted.not_carried.end());
    return written;
  }
  SW_TRY_ASSIGN(auto geometry, deepspeed::MakeGeometry(source, topology));
  deepspeed::Planner planner(geometry);
  for (const deepspeed::FileId& id : deepspeed::ListFiles(*geometry)) {
    SW_TRY(planner.AddFile(id));
  }
  planner.AddLatest();
  Written written{std::move(planner).Take(),
                  LostClientState(*EngineStateOf(source), geometry->from, topology)};
  // Without ZeRO and flat groups, a parameter either has its own state or none.
  if (topology.zero > 0 || geometry->flat_stage0) {
    for (std::string& one : StatelessLosses(source)) written.not_carried.push_back(std::move(one));
  }
  if (auto warning = deepspeed::StageGroupsWarning(*geometry)) {
    written.warnings.push_back(*std::move(warning));
  }
  return written;
}

}  // namespace shardwright::checkpoints
