// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "checkpoints/dtensor/mesh_internal.h"
#include "engine/layout/mesh_cut.h"
#include "support/base/checked.h"
#include "support/base/limits.h"
#include "support/base/text.h"

// Source: docs/formats/dtensor.md, "Meshes".

namespace shardwright::checkpoints::dtensor {
namespace {

using pickle::Arena;
using pickle::Kind;
using pickle::Node;

constexpr std::string_view kMeshClass = "torch.distributed.device_mesh.DeviceMesh";
constexpr std::string_view kLayoutClass = "torch.distributed._mesh_layout._MeshLayout";
constexpr std::string_view kFlatClass = "torch.distributed._mesh_layout._FlatLayout";

tl::unexpected<Error> MeshError(const std::string& what) { return BadInput("mesh: ", what); }

bool IsObject(const Node* node, std::string_view cls) {
  return node != nullptr && node->kind == Kind::kObject && node->callable->kind == Kind::kGlobal &&
         node->callable->text == cls;
}

/// Reads a tuple or list of counts under `key`.
Result<std::vector<std::uint64_t>> Numbers(const Node* state, std::string_view key) {
  auto numbers = pickle::AsShape(state->Find(key));
  if (!numbers) return MeshError(std::string(key) + ": " + numbers.error().message);
  return *std::move(numbers);
}

Result<std::optional<std::vector<std::string>>> NamesOf(const Node* node) {
  if (node == nullptr || node->is_none()) return std::nullopt;
  std::vector<std::string> names;
  for (const Node* item : node->items) {
    if (!item->is_string())
      return MeshError("dimension name expected, found " + pickle::Describe(item));
    names.push_back(item->text);
  }
  return names;
}

Result<std::uint64_t> CountRanks(const std::vector<std::uint64_t>& sizes) {
  SW_TRY_ASSIGN(const std::uint64_t ranks, CountElems(sizes));
  if (ranks == 0 || ranks > limits::kRanks) {
    return MeshError(StrCat("1 to ", limits::kRanks, " ranks expected, found ", ranks));
  }
  return ranks;
}

Status ReadOld(const Node* state, DeviceMesh* mesh) {
  const Node* tensor = state->Find("mesh");
  if (tensor == nullptr || !tensor->is_tensor()) return MeshError("no tensor of ranks");
  mesh->sizes = tensor->tensor->shape;
  SW_TRY_ASSIGN(const std::uint64_t count, CountRanks(mesh->sizes));
  SW_TRY_ASSIGN(mesh->ranks, Numbers(state, "_flatten_mesh_list"));
  if (mesh->ranks.size() != count) {
    return MeshError(StrCat(count, " ranks expected for sizes ", ToString(mesh->sizes), ", found ",
                            mesh->ranks.size()));
  }
  if (const Node* names = state->Find("_dim_group_names"); names != nullptr) {
    for (const Node* name : names->items) {
      if (name->is_string()) mesh->groups.push_back(name->text);
    }
  } else if (const Node* infos = state->Find("_dim_group_infos"); infos != nullptr) {
    for (const Node* info : infos->items) {
      if (info->items.size() == 3 && info->items[2]->is_string()) {
        mesh->groups.push_back(info->items[2]->text);
      }
    }
  }
  return {};
}

/// Reads one axis of a mesh, which may itself be a stack of axes.
/// Fails unless their strides are those of a row-major walk.
Result<std::pair<std::uint64_t, std::uint64_t>> AxisOf(const Node* node) {
  if (!IsObject(node, kFlatClass) || node->state == nullptr)
    return MeshError("axis expected, found " + pickle::Describe(node));
  SW_TRY_ASSIGN(const auto shape, Numbers(node->state, "shape"));
  SW_TRY_ASSIGN(const auto stride, Numbers(node->state, "stride"));
  if (shape.size() != stride.size())
    return MeshError("an axis has different numbers of sizes and strides");
  SW_TRY_ASSIGN(const std::uint64_t size, CountRanks(shape));
  if (shape.empty()) return std::pair<std::uint64_t, std::uint64_t>(1, 1);
  for (std::size_t i = 0; i + 1 < shape.size(); ++i) {
    SW_TRY_ASSIGN(const std::uint64_t inner, CheckedMul(shape[i + 1], stride[i + 1]));
    if (stride[i] != inner) {
      return Fail(Errc::kUnsupported, "mesh: the ranks of an axis are not evenly spaced");
    }
  }
  return std::pair(size, stride.back());
}

Status ReadNew(const Node* state, std::uint64_t rank, DeviceMesh* mesh) {
  const Node* layout = state->Find("_layout");
  const Node* axes = IsObject(layout, kLayoutClass) && layout->state != nullptr
                         ? layout->state->Find("axes")
                         : nullptr;
  if (axes == nullptr || axes->kind != Kind::kTuple) return MeshError("no layout");
  std::vector<std::uint64_t>& strides = mesh->strides;
  for (const Node* axis : axes->items) {
    SW_TRY_ASSIGN(const auto one, AxisOf(axis));
    mesh->sizes.push_back(one.first);
    strides.push_back(one.second);
  }
  SW_TRY_ASSIGN(const std::uint64_t count, CountRanks(mesh->sizes));
  SW_TRY_ASSIGN(mesh->all_ranks, Numbers(state, "_flatten_rank_map"));
  const std::vector<std::uint64_t>& world = mesh->all_ranks;
  if (mesh->coordinate.size() != mesh->sizes.size()) return {};  // the caller fails with an error
  // The mesh starts at the index of this rank minus the offset of its coordinate.
  const auto mine = std::find(world.begin(), world.end(), rank);
  if (mine == world.end()) return MeshError(StrCat("rank ", rank, " is not in it"));
  std::uint64_t offset = 0;
  for (std::size_t i = 0; i < strides.size(); ++i) {
    SW_TRY_ASSIGN(const std::uint64_t step, CheckedMul(mesh->coordinate[i], strides[i]));
    SW_TRY_ASSIGN(offset, CheckedAdd(offset, step));
  }
  const auto at = static_cast<std::uint64_t>(mine - world.begin());
  if (offset > at) return MeshError(StrCat("rank ", rank, " has the coordinate of another rank"));
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::vector<std::uint64_t> coordinate = layout::CoordinateOf(mesh->sizes, i);
    std::uint64_t index = at - offset;
    for (std::size_t dim = 0; dim < strides.size(); ++dim) {
      SW_TRY_ASSIGN(const std::uint64_t step, CheckedMul(coordinate[dim], strides[dim]));
      SW_TRY_ASSIGN(index, CheckedAdd(index, step));
    }
    if (index >= world.size()) {
      return MeshError(StrCat("rank ", rank, " cannot be at coordinate ",
                              ToString(mesh->coordinate),
                              ": the mesh would extend beyond the ranks that it lists"));
    }
    mesh->ranks.push_back(world[index]);
  }
  if (const Node* groups = state->Find("_dim_group_names"); groups != nullptr) {
    for (const Node* name : groups->items) {
      if (name->is_string()) mesh->groups.push_back(name->text);
    }
  }
  return {};
}

/// Checks that the coordinate is inside the mesh and belongs to this rank.
Status CheckRank(const DeviceMesh& mesh, std::uint64_t rank) {
  bool inside = mesh.coordinate.size() == mesh.sizes.size();
  std::uint64_t at = 0;
  for (std::size_t i = 0; inside && i < mesh.sizes.size(); ++i) {
    inside = mesh.coordinate[i] < mesh.sizes[i];
    at = at * mesh.sizes[i] + mesh.coordinate[i];
  }
  if (!inside) {
    return MeshError("coordinate " + ToString(mesh.coordinate) + " is not in a mesh " +
                     ToString(mesh.sizes));
  }
  std::vector<std::uint64_t> sorted = mesh.ranks;
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
    return MeshError("a rank is in it twice");
  }
  if (mesh.ranks[at] != rank) {
    return MeshError(StrCat("rank ", rank, " expected at coordinate ", ToString(mesh.coordinate),
                            ", found rank ", mesh.ranks[at]));
  }
  return {};
}

// Functions that write a mesh.

const Node* Count(Arena& arena, std::uint64_t value) {
  return arena.Int(static_cast<std::int64_t>(value));
}

std::vector<const Node*> CountNodes(Arena& arena, const std::vector<std::uint64_t>& values) {
  std::vector<const Node*> nodes;
  nodes.reserve(values.size());
  for (const std::uint64_t value : values) nodes.push_back(Count(arena, value));
  return nodes;
}

std::vector<const Node*> TextNodes(Arena& arena, const std::vector<std::string>& values) {
  std::vector<const Node*> nodes;
  nodes.reserve(values.size());
  for (const std::string& value : values) nodes.push_back(arena.String(value));
  return nodes;
}

const Node* RankMapNode(Document& document, const std::vector<std::uint64_t>& ranks, Shape shape) {
  std::string bytes;
  for (const std::uint64_t rank : ranks) {
    for (unsigned i = 0; i < 4; ++i) bytes.push_back(static_cast<char>(rank >> (8 * i)));
  }
  return document.AddInline(std::move(bytes), DType::kI32, std::move(shape));
}

const Node* DimNames(Arena& arena, const DeviceMesh& mesh) {
  return mesh.names ? arena.Tuple(TextNodes(arena, *mesh.names)) : arena.None();
}

/// Returns the ranks of the mesh that differ from this one only in dimension `dim`.
std::vector<std::uint64_t> AlongDim(const DeviceMesh& mesh, std::size_t dim) {
  std::vector<std::uint64_t> ranks;
  for (std::uint64_t i = 0; i < mesh.ranks.size(); ++i) {
    std::vector<std::uint64_t> other = layout::CoordinateOf(mesh.sizes, i);
    other[dim] = mesh.coordinate[dim];
    if (other == mesh.coordinate) ranks.push_back(mesh.ranks[i]);
  }
  return ranks;
}

const Node* OldState(Document& document, const DeviceMesh& mesh) {
  Arena& arena = document.arena;
  Node* state = arena.Dict();
  Set(arena, state, "device_type", arena.String(mesh.device));
  Set(arena, state, "mesh", RankMapNode(document, mesh.ranks, mesh.sizes));
  Set(arena, state, "mesh_dim_names", DimNames(arena, mesh));
  Set(arena, state, "_flatten_mesh_list", arena.Tuple(CountNodes(arena, mesh.ranks)));
  Set(arena, state, "_thread_id", arena.None());
  Set(arena, state, "_coordinate_on_dim", arena.List(CountNodes(arena, mesh.coordinate)));
  // Releases up to 2.6 find their groups by tag and ranks, later ones by name.
  std::vector<const Node*> infos;
  for (std::size_t dim = 0; dim < mesh.groups.size(); ++dim) {
    infos.push_back(arena.Tuple({arena.String("ptd:" + mesh.groups[dim]),
                                 arena.List(CountNodes(arena, AlongDim(mesh, dim))),
                                 arena.String(mesh.groups[dim])}));
  }
  Set(arena, state, "_dim_group_infos", arena.List(std::move(infos)));
  Set(arena, state, "_dim_group_names", arena.List(TextNodes(arena, mesh.groups)));
  return state;
}

/// Returns sizes and strides over the list of ranks. An axis of one rank has neither.
const Node* NewState(Document& document, const DeviceMesh& mesh, std::uint64_t rank) {
  Arena& arena = document.arena;
  std::vector<const Node*> axes;
  for (std::size_t dim = 0; dim < mesh.sizes.size(); ++dim) {
    std::vector<const Node*> size;
    std::vector<const Node*> stride;
    if (mesh.sizes[dim] != 1) {
      size.push_back(Count(arena, mesh.sizes[dim]));
      stride.push_back(Count(arena, mesh.strides[dim]));
    }
    Node* axis = arena.Dict();
    Set(arena, axis, "shape", arena.Tuple(std::move(size)));
    Set(arena, axis, "stride", arena.Tuple(std::move(stride)));
    axes.push_back(arena.Object(kFlatClass, axis));
  }
  Node* layout = arena.Dict();
  Set(arena, layout, "axes", arena.Tuple(std::move(axes)));
  Node* state = arena.Dict();
  Set(arena, state, "_device_type", arena.String(mesh.device));
  Set(arena, state, "_layout", arena.Object(kLayoutClass, layout));
  Set(arena, state, "_rank_map", RankMapNode(document, mesh.all_ranks, {mesh.all_ranks.size()}));
  Set(arena, state, "_mesh_dim_names", DimNames(arena, mesh));
  Set(arena, state, "_root_mesh", arena.None());
  Set(arena, state, "_preserve_rank_order", arena.Bool(false));
  Set(arena, state, "_flatten_rank_map", arena.Tuple(CountNodes(arena, mesh.all_ranks)));
  Set(arena, state, "_thread_id", arena.None());
  Set(arena, state, "_flatten_mapping", arena.Dict());
  Set(arena, state, "_dim_group_names", arena.List(TextNodes(arena, mesh.groups)));
  Set(arena, state, "_rank", Count(arena, rank));
  Set(arena, state, "_coordinate_on_dim", arena.Tuple(CountNodes(arena, mesh.coordinate)));
  return state;
}

}  // namespace

Result<DeviceMesh> ReadMesh(const Node* node, std::uint64_t rank) {
  const bool known = node != nullptr && node->kind == Kind::kObject && node->state != nullptr &&
                     node->state->is_dict() && node->callable->kind == Kind::kGlobal &&
                     node->callable->text.ends_with(".DeviceMesh");
  if (!known) return MeshError("a mesh expected, found " + pickle::Describe(node));
  const Node* state = node->state;
  DeviceMesh mesh;
  mesh.form = state->Find("_layout") != nullptr ? MeshForm::kNew : MeshForm::kOld;
  const bool is_new = mesh.form == MeshForm::kNew;
  const Node* device = state->Find(is_new ? "_device_type" : "device_type");
  if (device == nullptr || !device->is_string()) return MeshError("no device type");
  mesh.device = device->text;
  SW_TRY_ASSIGN(mesh.names, NamesOf(state->Find(is_new ? "_mesh_dim_names" : "mesh_dim_names")));
  const Node* coordinate = state->Find("_coordinate_on_dim");
  if (coordinate == nullptr || coordinate->is_none()) {
    return MeshError(StrCat("rank ", rank, " is not in it"));
  }
  SW_TRY_ASSIGN(mesh.coordinate, Numbers(state, "_coordinate_on_dim"));
  if (is_new) {
    SW_TRY(ReadNew(state, rank, &mesh));
  } else {
    SW_TRY(ReadOld(state, &mesh));
  }
  if (mesh.names && mesh.names->size() != mesh.sizes.size()) {
    return MeshError(Plural(mesh.names->size(), "name") + " for a mesh " + ToString(mesh.sizes));
  }
  SW_TRY(CheckRank(mesh, rank));
  return mesh;
}

const Node* MeshNode(Document& document, const DeviceMesh& mesh, std::uint64_t rank) {
  return document.arena.Object(kMeshClass, mesh.form == MeshForm::kNew
                                               ? NewState(document, mesh, rank)
                                               : OldState(document, mesh));
}

std::vector<std::string> GroupNames(const std::vector<std::uint64_t>& sizes,
                                    const std::vector<std::uint64_t>& coordinate) {
  if (sizes.size() == 1) return {"0"};
  std::uint64_t ranks = 1;
  for (const std::uint64_t size : sizes) ranks *= size;
  std::vector<std::string> names;
  std::uint64_t counted = 0;
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    // The other coordinates distinguish the groups of a dimension. Groups are numbered
    // in the order of these coordinates, which is also the order of their ranks.
    std::uint64_t group = 0;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      if (i != dim) group = group * sizes[i] + coordinate[i];
    }
    names.push_back(std::to_string(counted + group + 1));
    counted += ranks / sizes[dim];
  }
  return names;
}

}  // namespace shardwright::checkpoints::dtensor
