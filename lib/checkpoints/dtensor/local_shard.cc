// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/dtensor/local_shard_internal.h"

#include <algorithm>
#include <optional>

#include "support/base/text.h"

// Source: docs/formats/dtensor.md, "A DTensor".

namespace shardwright::checkpoints::dtensor {
namespace {

using layout::MeshSplit;
using pickle::Arena;
using pickle::Kind;
using pickle::Node;

constexpr std::string_view kPlacements = "torch.distributed.tensor.placement_types.";
constexpr std::string_view kSpecs = "torch.distributed.tensor._dtensor_spec.";
constexpr std::string_view kDTensorClass = "torch.distributed.tensor.DTensor";
constexpr std::string_view kRebuild = "torch._tensor._rebuild_from_type_v2";

/// Returns the class name of an object, without its module. Empty for other nodes.
std::string_view ClassOf(const Node* node) {
  if (node == nullptr || node->kind != Kind::kObject || node->callable->kind != Kind::kGlobal) {
    return {};
  }
  const std::string_view dotted = node->callable->text;
  return dotted.substr(dotted.rfind('.') + 1);
}

const Node* StateOf(const Node* node, std::string_view key) { return FindIn(node->state, key); }

/// Returns an attribute of a slotted class, from the second half of its state.
const Node* SlotOf(const Node* state, std::string_view key) {
  if (state == nullptr || state->kind != Kind::kTuple || state->items.size() != 2 ||
      !state->items[1]->is_dict()) {
    return nullptr;
  }
  return state->items[1]->Find(key);
}

Result<DType> DTypeOf(const Node* node) {
  constexpr std::string_view kTorch = "torch.";
  if (node != nullptr && node->kind == Kind::kGlobal && node->text.starts_with(kTorch)) {
    const auto dtype = DTypeFromName(std::string_view(node->text).substr(kTorch.size()));
    if (dtype) return *dtype;
    return Fail(Errc::kUnsupported, "unknown element type ", node->text);
  }
  return BadInput("an element type expected, found ", pickle::Describe(node));
}

bool IsRebuilt(const Node* node) {
  return node != nullptr && node->kind == Kind::kObject && node->callable->kind == Kind::kGlobal &&
         node->callable->text == kRebuild && node->args != nullptr && node->args->items.size() == 4;
}

Result<MeshSplit> PlacementOf(const Node* node) {
  const std::string_view cls = ClassOf(node);
  if (cls == "Replicate") return MeshSplit::Replicate();
  if (cls == "Partial" || cls == "_Partial") {
    return Fail(Errc::kUnsupported,
                "placement Partial is not supported: each rank has only a partial sum");
  }
  if (cls != "Shard" && cls != "_StridedShard") {
    return Fail(Errc::kUnsupported, "placement ", pickle::Describe(node), " is unknown");
  }
  const Result<std::uint64_t> dim = pickle::AsCount(StateOf(node, "dim"));
  if (!dim || *dim > 0xFFFF) return BadInput(cls, " without a valid tensor dimension");
  const auto tensor_dim = static_cast<std::uint32_t>(*dim);
  if (cls == "Shard") return MeshSplit::Shard(tensor_dim);
  const Result<std::uint64_t> factor = pickle::AsCount(StateOf(node, "split_factor"));
  if (!factor || *factor == 0) return BadInput("_StridedShard without a split_factor");
  return MeshSplit::StridedShard(tensor_dim, *factor);
}

/// Returns the order in the file, after checking it against the splits.
Result<std::vector<layout::SplitOrder>> StatedOrder(const Node* node,
                                                    const std::vector<MeshSplit>& splits) {
  std::vector<layout::SplitOrder> orders;
  std::size_t listed = 0;
  for (const Node* entry : node->items) {
    const bool whole = ClassOf(entry) == "ShardOrderEntry" && entry->args->items.size() == 2;
    if (!whole)
      return BadInput("shard_order: ShardOrderEntry expected, found ", pickle::Describe(entry));
    layout::SplitOrder order;
    SW_TRY_ASSIGN(const std::uint64_t dim, pickle::AsCount(entry->args->items[0]));
    SW_TRY_ASSIGN(const Shape mesh_dims, pickle::AsShape(entry->args->items[1]));
    order.dim = static_cast<std::uint32_t>(std::min<std::uint64_t>(dim, 0xFFFF));
    for (const std::uint64_t mesh_dim : mesh_dims) {
      if (mesh_dim >= splits.size() || !splits[mesh_dim].shards() ||
          splits[mesh_dim].dim != order.dim) {
        return BadInput("shard_order contradicts placements ", layout::Explain(splits));
      }
      order.mesh_dims.push_back(static_cast<std::uint32_t>(mesh_dim));
      ++listed;
    }
    orders.push_back(std::move(order));
  }
  const auto shards = std::count_if(splits.begin(), splits.end(),
                                    [](const MeshSplit& split) { return split.shards(); });
  if (listed != static_cast<std::size_t>(shards)) {
    return BadInput("shard_order contradicts placements ", layout::Explain(splits));
  }
  return orders;
}

Result<std::vector<layout::SplitOrder>> OrderFor(const Node* spec, const DeviceMesh& mesh,
                                                 const std::vector<MeshSplit>& splits) {
  SW_TRY_ASSIGN(std::vector<layout::SplitOrder> order, layout::OrderOf(mesh.sizes, splits));
  const Node* stated = StateOf(spec, "shard_order");
  if (stated == nullptr || stated->is_none()) return order;
  return StatedOrder(stated, splits);
}

/// Checks that the wrapper and the spec in it agree on the whole tensor.
Status CheckMeta(const Node* spec, const Node* wrapper) {
  const Node* meta = StateOf(spec, "tensor_meta");
  const bool known = ClassOf(meta) == "TensorMeta" && meta->args->items.size() == 3;
  if (!known) return BadInput("no tensor_meta");
  SW_TRY_ASSIGN(const Shape shape, pickle::AsShape(wrapper->items[2]));
  SW_TRY_ASSIGN(const Shape stride, pickle::AsShape(wrapper->items[3]));
  SW_TRY_ASSIGN(const Shape inner_shape, pickle::AsShape(meta->args->items[0]));
  SW_TRY_ASSIGN(const Shape inner_stride, pickle::AsShape(meta->args->items[1]));
  SW_TRY_ASSIGN(const DType dtype, DTypeOf(wrapper->items[1]));
  SW_TRY_ASSIGN(const DType inner_dtype, DTypeOf(meta->args->items[2]));
  if (shape == inner_shape && stride == inner_stride && dtype == inner_dtype) return {};
  return BadInput("the tensor is ", Name(dtype), " ", ToString(shape), ", its DTensorSpec has ",
                  Name(inner_dtype), " ", ToString(inner_shape));
}

Status CheckLocal(const Node* local, const Shape& sizes, DType dtype) {
  if (local == nullptr || !local->is_tensor()) {
    return BadInput("local tensor expected, found ", pickle::Describe(local));
  }
  const pickle::Tensor& tensor = *local->tensor;
  if (tensor.dtype != dtype) {
    return BadInput("the local tensor is ", Name(tensor.dtype), ", the full tensor ", Name(dtype));
  }
  if (tensor.shape != sizes) {
    return BadInput("the local tensor is ", ToString(tensor.shape), ", its placement requires ",
                    ToString(sizes));
  }
  return {};
}

}  // namespace

bool IsTensor(const Node* node) {
  return node != nullptr && (node->is_tensor() || IsRebuilt(node));
}

Result<RankTensor> TensorReader::Read(const Node* node) {
  if (node != nullptr && node->is_tensor()) return ReadPlain(node);
  if (!IsRebuilt(node)) return BadInput("a tensor expected, found ", pickle::Describe(node));
  const Node* cls = node->args->items[1];
  const bool sharded = cls->kind == Kind::kGlobal && cls->text.ends_with(".ShardedTensor");
  return sharded ? ReadSharded(node->args) : ReadDTensor(node->args);
}

Result<RankTensor> TensorReader::ReadPlain(const Node* node) const {
  RankTensor out;
  out.shape = node->tensor->shape;
  out.dtype = node->tensor->dtype;
  LocalPiece held;
  held.piece = {std::vector<std::uint64_t>(out.shape.size(), 0), out.shape};
  held.local = node;
  if (!held.piece.empty()) out.pieces.push_back(std::move(held));
  return out;
}

Result<std::shared_ptr<const DeviceMesh>> TensorReader::MeshOf(const Node* node) {
  const auto found = meshes_.find(node);
  if (found != meshes_.end()) return found->second;
  SW_TRY_ASSIGN(DeviceMesh mesh, ReadMesh(node, rank_));
  auto shared = std::make_shared<const DeviceMesh>(std::move(mesh));
  meshes_.emplace(node, shared);
  return shared;
}

Result<RankTensor> TensorReader::ReadDTensor(const Node* args) {
  RankTensor out;
  out.kind = RankTensor::Kind::kDTensor;
  const Node* wrapper = args->items[2];
  // Fields: class, type, size, stride, offset, layout, device, requires_grad.
  if (wrapper->kind != Kind::kTuple || wrapper->items.size() < 8)
    return BadInput("unknown form of tensor wrapper");
  SW_TRY_ASSIGN(out.dtype, DTypeOf(wrapper->items[1]));
  SW_TRY_ASSIGN(out.shape, pickle::AsShape(wrapper->items[2]));
  SW_TRY(CountElems(out.shape));
  const Result<std::uint64_t> offset = pickle::AsCount(wrapper->items[4]);
  if (!offset || *offset != 0) return BadInput("tensor wrapper with an offset");
  const Node* spec = SlotOf(args->items[3], "_spec");
  if (ClassOf(spec) != "DTensorSpec" || spec->state == nullptr) return BadInput("no DTensorSpec");
  SW_TRY_ASSIGN(out.mesh, MeshOf(StateOf(spec, "mesh")));
  const Node* placements = StateOf(spec, "placements");
  if (placements == nullptr || placements->kind != Kind::kTuple) return BadInput("no placements");
  for (const Node* one : placements->items) {
    SW_TRY_ASSIGN(const MeshSplit split, PlacementOf(one));
    out.splits.push_back(split);
  }
  SW_TRY(CheckMeta(spec, wrapper));
  SW_TRY_ASSIGN(const auto order, OrderFor(spec, *out.mesh, out.splits));
  LocalPiece held;
  SW_TRY_ASSIGN(held.piece,
                layout::PieceAt(out.shape, out.mesh->sizes, order, out.mesh->coordinate));
  held.local = SlotOf(args->items[3], "_local_tensor");
  SW_TRY(CheckLocal(held.local, held.piece.sizes, out.dtype));
  if (!held.piece.empty()) out.pieces.push_back(std::move(held));
  return out;
}

namespace {

Result<layout::Piece> BoxOf(const Node* shard, std::size_t rank) {
  layout::Piece piece;
  const Node* offsets = SlotOf(shard->state, "shard_offsets");
  const Node* sizes = SlotOf(shard->state, "shard_sizes");
  if (offsets == nullptr || sizes == nullptr) return BadInput("a shard without offsets or sizes");
  SW_TRY_ASSIGN(piece.offset, pickle::AsShape(offsets));
  SW_TRY_ASSIGN(piece.sizes, pickle::AsShape(sizes));
  if (piece.offset.size() != rank || piece.sizes.size() != rank) {
    return BadInput("a shard has another number of dimensions than its tensor");
  }
  return piece;
}

bool IsIn(const layout::Piece& piece, const std::vector<layout::Piece>& all) {
  return std::find(all.begin(), all.end(), piece) != all.end();
}

}  // namespace

Result<RankTensor> TensorReader::ReadSharded(const Node* args) const {
  RankTensor out;
  out.kind = RankTensor::Kind::kSharded;
  const Node* state = args->items[3];
  if (state->kind != Kind::kTuple || state->items.size() < 2) return BadInput("no shards");
  const Node* metadata = state->items[1];
  if (ClassOf(metadata) != "ShardedTensorMetadata" || metadata->state == nullptr) {
    return BadInput("no shard table");
  }
  const Node* whole = args->items[2];
  if (whole->kind != Kind::kTuple || whole->items.size() < 4)
    return BadInput("unknown form of tensor wrapper");
  SW_TRY_ASSIGN(out.dtype, DTypeOf(whole->items[1]));
  SW_TRY_ASSIGN(out.shape, pickle::AsShape(StateOf(metadata, "size")));
  SW_TRY(CountElems(out.shape));
  const Node* table = StateOf(metadata, "shards_metadata");
  if (table == nullptr || !table->is_list()) return BadInput("no shard table");
  for (const Node* shard : table->items) {
    SW_TRY_ASSIGN(layout::Piece piece, BoxOf(shard, out.shape.size()));
    out.all_pieces.push_back(std::move(piece));
  }
  for (const Node* shard : state->items[0]->items) {
    const Node* place = SlotOf(shard->state, "metadata");
    if (place == nullptr) return BadInput("a shard without metadata");
    LocalPiece held;
    SW_TRY_ASSIGN(held.piece, BoxOf(place, out.shape.size()));
    if (!IsIn(held.piece, out.all_pieces))
      return BadInput("a shard is missing from the shard table");
    held.local = SlotOf(shard->state, "tensor");
    SW_TRY(CheckLocal(held.local, held.piece.sizes, out.dtype));
    if (!held.piece.empty()) out.pieces.push_back(std::move(held));
  }
  return out;
}

namespace {

const Node* Extents(Arena& arena, const Shape& extents) {
  std::vector<const Node*> nodes;
  for (const std::uint64_t extent : extents) {
    nodes.push_back(arena.Int(static_cast<std::int64_t>(extent)));
  }
  return arena.Tuple(std::move(nodes));
}

const Node* Called(Arena& arena, std::string_view dotted, std::vector<const Node*> args,
                   pickle::Build build) {
  Node* node = arena.New(Kind::kObject);
  node->build = build;
  node->callable = arena.Global(dotted);
  node->args = arena.Tuple(std::move(args));
  return node;
}

std::string Spec(std::string_view cls) { return std::string(kSpecs).append(cls); }

const Node* SplitNode(Arena& arena, const MeshSplit& split) {
  Node* state = arena.Dict();
  std::string_view cls = "Replicate";
  if (split.shards()) {
    cls = "Shard";
    Set(arena, state, "dim", arena.Int(split.dim));
  }
  if (split.kind == MeshSplit::Kind::kStridedShard) {
    cls = "_StridedShard";
    Set(arena, state, "split_factor", arena.Int(static_cast<std::int64_t>(split.split_factor)));
  }
  return arena.Object(std::string(kPlacements).append(cls), state);
}

const Node* OrderNode(Arena& arena, const std::vector<layout::SplitOrder>& orders) {
  std::vector<const Node*> entries;
  for (const layout::SplitOrder& order : orders) {
    std::vector<const Node*> mesh_dims;
    for (const std::uint32_t mesh_dim : order.mesh_dims) mesh_dims.push_back(arena.Int(mesh_dim));
    entries.push_back(Called(arena, Spec("ShardOrderEntry"),
                             {arena.Int(order.dim), arena.Tuple(std::move(mesh_dims))},
                             pickle::Build::kNewObj));
  }
  return arena.Tuple(std::move(entries));
}

}  // namespace

const Node* DTensorNode(Arena& arena, const Node* local, const Node* mesh, MeshForm form,
                        const std::vector<std::uint64_t>& mesh_sizes,
                        const std::vector<MeshSplit>& splits, const Shape& shape, DType dtype) {
  const Node* cls = arena.Global(kDTensorClass);
  const Node* type = arena.Global("torch." + std::string(Name(dtype)));
  const Node* size = Extents(arena, shape);
  const Node* stride = Extents(arena, ContiguousStrides(shape));
  Node* spec = arena.Dict();
  Set(arena, spec, "mesh", mesh);
  std::vector<const Node*> placements;
  placements.reserve(splits.size());
  for (const MeshSplit& split : splits) placements.push_back(SplitNode(arena, split));
  Set(arena, spec, "placements", arena.Tuple(std::move(placements)));
  Set(arena, spec, "tensor_meta",
      Called(arena, Spec("TensorMeta"), {arena.SizeOf(shape), stride, type},
             pickle::Build::kNewObj));
  if (form == MeshForm::kNew) {
    const bool strided = std::any_of(splits.begin(), splits.end(), [](const MeshSplit& split) {
      return split.kind == MeshSplit::Kind::kStridedShard;
    });
    const auto orders = layout::OrderOf(mesh_sizes, splits);
    const bool stated = !strided && orders.has_value();
    Set(arena, spec, "shard_order", stated ? OrderNode(arena, *orders) : arena.None());
    Set(arena, spec, "use_strided_shard_as_shard_order", arena.Bool(strided));
  }
  // A hash of another process would make equal specs look different.
  Set(arena, spec, "_hash", arena.None());
  const Node* layout = Called(arena, "torch.serialization._get_layout",
                              {arena.String("torch.strided")}, pickle::Build::kReduce);
  const Node* device = Called(arena, "torch.device", {arena.String("cpu")}, pickle::Build::kReduce);
  Node* slots = arena.Dict();
  Set(arena, slots, "_local_tensor", local);
  Set(arena, slots, "_spec", arena.Object(Spec("DTensorSpec"), spec));
  return Called(
      arena, kRebuild,
      {arena.Global("torch._utils._rebuild_wrapper_subclass"), cls,
       arena.Tuple({cls, type, size, stride, arena.Int(0), layout, device, arena.Bool(false)}),
       arena.Tuple({arena.None(), slots})},
      pickle::Build::kReduce);
}

}  // namespace shardwright::checkpoints::dtensor
