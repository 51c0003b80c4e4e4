// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/megatron/notes.h"

#include "checkpoints/megatron/args.h"
#include "engine/layout/states.h"
#include "support/base/limits.h"

namespace shardwright::checkpoints::megatron {
namespace {

using pickle::Arena;
using pickle::Kind;
using pickle::Node;

constexpr std::size_t kFields = 6;

/// Not a style of Megatron's, so a run fails that takes its schedule from the checkpoint.
constexpr std::string_view kStyle = "of --override-opt_param-scheduler";

tl::unexpected<Error> BadNotes() {
  return Fail(Errc::kBadInput, "notes of Shardwright in a form that is not known");
}

const Node* IntOf(Arena& arena, std::uint64_t value) {
  return arena.Int(static_cast<std::int64_t>(value));
}

const Node* ScalarNode(Arena& arena, const Scalar& scalar) {
  if (!scalar.is_tensor) return arena.List({arena.String(scalar.state), scalar.value});
  Node* bytes = arena.New(Kind::kBytes);
  bytes->text = scalar.bytes;
  return arena.List({arena.String(scalar.state), arena.String(Name(scalar.dtype)),
                     arena.SizeOf(scalar.shape), bytes});
}

const Node* ParamNode(Arena& arena, const Param& param) {
  std::vector<const Node*> scalars;
  for (const Scalar& scalar : param.scalars) scalars.push_back(ScalarNode(arena, scalar));
  const Node* expert = arena.None();
  if (param.expert) {
    expert = arena.List({IntOf(arena, param.expert->layer), IntOf(arena, param.expert->expert),
                         arena.String(param.expert->module)});
  }
  return arena.List({arena.String(param.name), arena.Int(static_cast<int>(param.kind)),
                     arena.String(param.alias_of), arena.Int(param.group), expert,
                     arena.List(std::move(scalars))});
}

const Node* GroupNode(Arena& arena, const Group& group) {
  Node* out = arena.Dict();
  const HyperParams& hyper = group.hyper;
  const auto number = [&](const char* key, const std::optional<double>& value) {
    if (value) Set(arena, out, key, arena.Float(*value));
  };
  number("lr", hyper.lr);
  if (hyper.betas) {
    Set(arena, out, "betas",
        arena.List({arena.Float(hyper.betas->first), arena.Float(hyper.betas->second)}));
  }
  number("eps", hyper.eps);
  number("weight_decay", hyper.weight_decay);
  number("momentum", hyper.momentum);
  number("step", hyper.step);
  Set(arena, out, "moe", arena.Bool(group.moe));
  return out;
}

bool IsList(const Node* node, std::size_t count) {
  return node != nullptr && node->is_list() && node->items.size() == count;
}

Result<Scalar> ParseScalar(const Node* node) {
  Scalar scalar;
  if (IsList(node, 2)) {
    SW_TRY_ASSIGN(scalar.state, pickle::AsString(node->items[0]));
    scalar.value = node->items[1];
    return scalar;
  }
  if (!IsList(node, 4) || node->items[3]->kind != Kind::kBytes) return BadNotes();
  SW_TRY_ASSIGN(scalar.state, pickle::AsString(node->items[0]));
  SW_TRY_ASSIGN(const std::string_view word, pickle::AsString(node->items[1]));
  const auto dtype = DTypeFromName(word);
  if (!dtype) return BadNotes();
  scalar.is_tensor = true;
  scalar.dtype = *dtype;
  SW_TRY_ASSIGN(scalar.shape, pickle::AsShape(node->items[2]));
  scalar.bytes = node->items[3]->text;
  SW_TRY_ASSIGN(const std::uint64_t elems, CountElems(scalar.shape));
  if (elems != 1 || scalar.bytes.size() != ItemSize(scalar.dtype)) return BadNotes();
  return scalar;
}

Result<Param> ParseParam(const Node* node, std::size_t groups) {
  if (!IsList(node, kFields)) return BadNotes();
  Param param;
  SW_TRY_ASSIGN(param.name, pickle::AsString(node->items[0]));
  SW_TRY_ASSIGN(const std::uint64_t kind, pickle::AsCount(node->items[1]));
  if (kind > static_cast<std::uint64_t>(ParamKind::kBuffer)) return BadNotes();
  param.kind = static_cast<ParamKind>(kind);
  SW_TRY_ASSIGN(param.alias_of, pickle::AsString(node->items[2]));
  SW_TRY_ASSIGN(const std::int64_t group, pickle::AsInt(node->items[3]));
  if (group < -1 || group >= static_cast<std::int64_t>(groups)) return BadNotes();
  param.group = static_cast<std::int32_t>(group);
  const Node* expert = node->items[4];
  if (!expert->is_none()) {
    if (!IsList(expert, 3)) return BadNotes();
    ExpertId id;
    SW_TRY_ASSIGN(const std::uint64_t layer, pickle::AsCount(expert->items[0]));
    SW_TRY_ASSIGN(const std::uint64_t number, pickle::AsCount(expert->items[1]));
    if (layer >= limits::kMoeLayers || number >= limits::kMoeExperts) return BadNotes();
    id.layer = static_cast<std::uint32_t>(layer);
    id.expert = static_cast<std::uint32_t>(number);
    SW_TRY_ASSIGN(id.module, pickle::AsString(expert->items[2]));
    param.expert = std::move(id);
  }
  if (!node->items[5]->is_list()) return BadNotes();
  for (const Node* scalar : node->items[5]->items) {
    SW_TRY_ASSIGN(Scalar parsed, ParseScalar(scalar));
    param.scalars.push_back(std::move(parsed));
  }
  return param;
}

Group ParseGroup(const Node* node) {
  Group group;
  const auto number = [&](const char* key) {
    const Result<double> value = pickle::AsFloat(node->Find(key));
    return value ? std::optional(*value) : std::nullopt;
  };
  group.hyper.lr = number("lr");
  group.hyper.eps = number("eps");
  group.hyper.weight_decay = number("weight_decay");
  group.hyper.momentum = number("momentum");
  group.hyper.step = number("step");
  const Node* betas = node->Find("betas");
  if (IsList(betas, 2)) {
    const Result<double> first = pickle::AsFloat(betas->items[0]);
    const Result<double> second = pickle::AsFloat(betas->items[1]);
    if (first && second) group.hyper.betas = {*first, *second};
  }
  const Result<std::int64_t> moe = pickle::AsInt(node->Find("moe"));
  group.moe = moe && *moe != 0;
  return group;
}

}  // namespace

const Node* NotesNode(Arena& arena, const Checkpoint& checkpoint) {
  std::vector<const Node*> params;
  for (const Param& param : checkpoint.params) params.push_back(ParamNode(arena, param));
  std::vector<const Node*> groups;
  for (const Group& group : checkpoint.groups) groups.push_back(GroupNode(arena, group));
  Node* notes = arena.Dict();
  Set(arena, notes, "version", arena.Int(1));
  Set(arena, notes, "params", arena.List(std::move(params)));
  Set(arena, notes, "groups", arena.List(std::move(groups)));
  Set(arena, notes, "optimizer", arena.String(checkpoint.optimizer));
  Set(arena, notes, "order_unknown", arena.String(checkpoint.order_unknown));
  return notes;
}

Result<Notes> ParseNotes(const Node* node) {
  if (!node->is_dict()) return BadNotes();
  const Node* params = node->Find("params");
  const Node* groups = node->Find("groups");
  if (params == nullptr || !params->is_list() || groups == nullptr || !groups->is_list()) {
    return BadNotes();
  }
  Notes notes;
  SW_TRY_ASSIGN(notes.optimizer, pickle::AsString(node->Find("optimizer")));
  SW_TRY_ASSIGN(notes.order_unknown, pickle::AsString(node->Find("order_unknown")));
  for (const Node* group : groups->items) {
    if (!group->is_dict()) return BadNotes();
    notes.groups.push_back(ParseGroup(group));
  }
  for (const Node* param : params->items) {
    SW_TRY_ASSIGN(Param parsed, ParseParam(param, notes.groups.size()));
    notes.params.push_back(std::move(parsed));
  }
  return notes;
}

std::optional<NewRun> FindNewRun(const Node* common) {
  const Node* schedule = FindIn(common, "opt_param_scheduler");
  const Node* args = AttributesOf(FindIn(common, "args"));
  const Result<std::string_view> style = pickle::AsString(FindIn(schedule, "lr_decay_style"));
  if (args == nullptr || !style || *style != kStyle) return std::nullopt;
  const Result<double> max_rate = pickle::AsFloat(schedule->Find("max_lr"));
  const Result<double> min_rate = pickle::AsFloat(schedule->Find("min_lr"));
  const Result<std::uint64_t> samples = pickle::AsCount(schedule->Find("num_steps"));
  const Result<std::uint64_t> heads = pickle::AsCount(args->Find("num_attention_heads"));
  if (!max_rate || !min_rate || !samples || !heads) return std::nullopt;
  return NewRun{*max_rate, *min_rate, *heads, *samples};
}

const Node* ScheduleNode(Arena& arena, const NewRun& run) {
  Node* schedule = arena.Dict();
  Set(arena, schedule, "max_lr", arena.Float(run.max_rate));
  Set(arena, schedule, "min_lr", arena.Float(run.min_rate));
  Set(arena, schedule, "num_steps", arena.Int(static_cast<std::int64_t>(run.samples)));
  Set(arena, schedule, "lr_decay_style", arena.String(std::string(kStyle)));
  Set(arena, schedule, "lr_warmup_steps", arena.Int(0));
  Set(arena, schedule, "lr_decay_steps", arena.Int(1));
  return schedule;
}

}  // namespace shardwright::checkpoints::megatron
