// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <set>

#include "checkpoints/dtensor/dtensor.h"
#include "checkpoints/dtensor/write_internal.h"
#include "checkpoints/pickled/torch_optimizer.h"
#include "checkpoints/tp_rules/rule_source.h"
#include "engine/layout/mesh_rule.h"
#include "engine/layout/states.h"
#include "support/base/checked.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::dtensor {
namespace {

using layout::MeshSplit;
using pickle::Node;

class Planner {
 public:
  Planner(const Checkpoint& source, const FilesLayout& layout)
      : source_(source), index_(source.map) {
    plan_.layout = layout;
    plan_.made = std::make_shared<pickle::Arena>();
    plan_.source = source.arena;
    own_format_ = source.origin == kName;
  }

  Result<FilesPlan> Make();

 private:
  Status AddParam(const Param& param);
  Status SetSplits(PlannedParam* planned) const;
  Status SetTensors(PlannedParam* planned);
  std::uint32_t AddTensor(std::string_view state, DType dtype);
  Status SetScalars(const Param& param, PlannedParam* planned);
  Result<Scalar> StepScalar(const Param& param) const;
  Status AddGroups();
  Status AddUnits();
  void TakeOwn();
  void TellWhatIsLeft();
  void Leave(std::string what) { plan_.not_carried.push_back(std::move(what)); }

  const Checkpoint& source_;
  layout::TensorIndex index_;
  bool own_format_ = false;
  std::set<std::string> left_options_;
  FilesPlan plan_;
};

/// Returns the part of a parameter's cut that belongs to tensor parallelism.
Result<ParamSplit> ParamSplitOf(const Param& param, const FilesLayout& layout) {
  const std::vector<std::uint64_t> sizes = layout.tp_sizes();
  std::uint64_t tp = 1;
  for (const std::uint64_t size : sizes) tp *= size;
  ParamSplit split;
  bool on_whole_mesh = false;
  if (const auto known = layout.splits.find(param.name); known != layout.splits.end()) {
    split = known->second;
    if (split.tp.size() == sizes.size()) return split;
    on_whole_mesh = !split.tp.empty();
    split.tp.clear();
  }
  const layout::Split by = param.rule.split;
  if (tp == 1 || by == layout::Split::kReplicated || by == layout::Split::kAverage) {
    if (on_whole_mesh) split.tp.assign(sizes.size(), MeshSplit::Replicate());
    return split;
  }
  if (by == layout::Split::kUnknown) {
    SW_TRY(CutOf(param, tp, 0));
    return split;
  }
  auto splits = layout::SplitsOfRule(param.rule, sizes);
  if (!splits) return Within(StrCat("tp=", tp, ": ", Quoted(param.name)), splits.error());
  split.tp = *std::move(splits);
  return split;
}

Status Planner::SetSplits(PlannedParam* planned) const {
  const FilesLayout& layout = plan_.layout;
  const Param& param = planned->param;
  SW_TRY_ASSIGN(const ParamSplit split, ParamSplitOf(param, layout));
  planned->on_whole_mesh = !split.tp.empty();
  const std::size_t rank = param.shape.size();
  const bool outside = split.shard_dim >= rank ||
                       std::any_of(split.tp.begin(), split.tp.end(), [&](const MeshSplit& one) {
                         return one.shards() && one.dim >= rank;
                       });
  if (outside) {
    return Fail(Errc::kUnsupported, Quoted(param.name), " ", ToString(param.shape),
                ": its rule shards a dimension that it does not have");
  }
  // Starts at the last dimension, because a split depends on the splits of later dimensions.
  std::vector<std::uint64_t> sizes;
  std::size_t tp_dim = split.tp.size();
  for (std::size_t dim = layout.sizes.size(); dim-- > 0;) {
    const Role role = layout.roles[dim];
    if (role == Role::kTensorParallel && !planned->on_whole_mesh) continue;
    MeshSplit one = MeshSplit::Replicate();
    if (role == Role::kTensorParallel) {
      one = split.tp[--tp_dim];
    } else if (role == Role::kShard) {
      one = layout::FullyShard(split.shard_dim, sizes, planned->splits);
    }
    planned->splits.insert(planned->splits.begin(), one);
    sizes.insert(sizes.begin(), layout.sizes[dim]);
  }
  return {};
}

std::uint32_t Planner::AddTensor(std::string_view state, DType dtype) {
  StateTensor tensor;
  tensor.param = static_cast<std::uint32_t>(plan_.params.size());
  tensor.state = state;
  tensor.dtype = dtype;
  plan_.tensors.push_back(std::move(tensor));
  return static_cast<std::uint32_t>(plan_.tensors.size() - 1);
}

/// Chooses the model's tensor: the master weight if there is one, because training resumes with it.
Status Planner::SetTensors(PlannedParam* planned) {
  const Param& param = planned->param;
  const auto dtype_of = [&](std::string_view state) -> std::optional<DType> {
    const auto found = index_.Find(param.name, state);
    return found ? std::optional(source_.map.tensors[*found].dtype) : std::nullopt;
  };
  std::string_view state = param.kind == ParamKind::kBuffer   ? layout::kBuffer
                           : param.kind == ParamKind::kFrozen ? layout::kFrozen
                                                              : layout::kMaster;
  std::optional<DType> dtype = dtype_of(state);
  if (!dtype && param.kind == ParamKind::kTrainable) {
    state = layout::kWeight;
    dtype = dtype_of(state);
  }
  if (!dtype) {
    return BadInput(Quoted(param.name), ": the source has no ", state, " tensor");
  }
  planned->model = AddTensor(state, *dtype);
  if (param.kind != ParamKind::kTrainable) return {};
  for (const std::string& one : source_.states) {
    if (const auto found = dtype_of(one)) planned->states.push_back(AddTensor(one, *found));
  }
  return {};
}

/// Returns the number of steps in the form of PyTorch's optimizers: one float.
Result<Scalar> Planner::StepScalar(const Param& param) const {
  SW_TRY_ASSIGN(const float steps, TorchStep(source_, param));
  Scalar made;
  made.state = layout::kStep;
  made.is_tensor = true;
  made.bytes.assign(reinterpret_cast<const char*>(&steps), sizeof(steps));
  return made;
}

Status Planner::SetScalars(const Param& param, PlannedParam* planned) {
  if (own_format_) {
    planned->scalars = param.scalars;
    return {};
  }
  bool counts = false;
  for (const Scalar& scalar : param.scalars) {
    if (scalar.state == layout::kStep) {
      counts = true;
    } else {
      planned->scalars.push_back(scalar);
    }
  }
  counts =
      counts || std::any_of(planned->states.begin(), planned->states.end(), [&](std::uint32_t at) {
        return plan_.tensors[at].state == layout::kFirstMoment;
      });
  if (!counts) return {};
  SW_TRY_ASSIGN(Scalar made, StepScalar(param));
  planned->scalars.insert(planned->scalars.begin(), std::move(made));
  return {};
}

Status Planner::AddParam(const Param& param) {
  PlannedParam planned;
  planned.param = param;
  planned.param.scalars.clear();
  if (!param.alias_of.empty()) {
    plan_.params.push_back(std::move(planned));
    return {};
  }
  planned.plain = param.kind == ParamKind::kBuffer || param.shape.empty();
  if (!planned.plain) SW_TRY(SetSplits(&planned));
  SW_TRY(SetTensors(&planned));
  if (param.kind == ParamKind::kTrainable) SW_TRY(SetScalars(param, &planned));
  plan_.params.push_back(std::move(planned));
  return {};
}

Status Planner::AddGroups() {
  plan_.has_optimizer = !source_.groups.empty();
  const std::vector<std::vector<std::string>>& listed = plan_.layout.listed;
  for (std::size_t g = 0; g < source_.groups.size(); ++g) {
    const Group& group = source_.groups[g];
    PlannedGroup planned;
    planned.options = own_format_ && group.options != nullptr
                          ? group.options
                          : TorchOptions(source_, group, plan_.made.get(), &left_options_);
    planned.tensors = group.tensors;
    planned.params = group.params;
    if (own_format_ && g < listed.size()) {
      planned.params.clear();
      for (const std::string& name : listed[g]) {
        const auto found = plan_.by_name.find(name);
        if (found != plan_.by_name.end()) planned.params.push_back(found->second);
      }
    }
    // Without names, ids are positions in the model, regardless of the source's order.
    if (plan_.layout.trainer == Trainer::kVerl) {
      std::sort(planned.params.begin(), planned.params.end());
    }
    plan_.groups.push_back(std::move(planned));
  }
  if (plan_.layout.trainer != Trainer::kVerl) return {};
  if (!source_.order_unknown.empty() && !plan_.groups.empty()) {
    return Fail(Errc::kUnsupported, source_.tag,
                ": trainer=verl numbers the parameters in model order, which is unknown: ",
                source_.order_unknown, "; trainer=accelerate identifies parameters by name");
  }
  if (plan_.groups.size() <= 1) return {};
  return Fail(Errc::kUnsupported, "trainer=verl: one parameter group expected, found ",
              plan_.groups.size(), "; trainer=accelerate supports several, with parameter names");
}

/// Checks that the only group lists the whole model. Without names, ids are positions in the model.
Status CheckAllAreListed(const FilesPlan& plan) {
  if (plan.layout.trainer != Trainer::kVerl || plan.groups.empty()) return {};
  const std::vector<std::uint32_t>& listed = plan.groups.front().params;
  std::vector<std::uint32_t> wanted;
  for (std::uint32_t i = 0; i < plan.params.size(); ++i) {
    const Param& param = plan.params[i].param;
    if (param.kind != ParamKind::kBuffer && param.alias_of.empty()) wanted.push_back(i);
  }
  if (listed != wanted && plan.layout.fsdp_version == 2) {
    return Fail(Errc::kUnsupported,
                "trainer=verl: the optimizer must list every parameter of the model: ",
                wanted.size(), " expected, found ", listed.size());
  }
  return {};
}

Status Planner::AddUnits() {
  if (plan_.layout.fsdp_version != 1) return {};
  std::vector<std::string_view> names;
  std::vector<Shape> shapes;
  for (std::uint32_t i = 0; i < plan_.params.size(); ++i) {
    const PlannedParam& planned = plan_.params[i];
    if (planned.plain || !planned.param.alias_of.empty()) continue;
    if (planned.param.kind == ParamKind::kFrozen) {
      return Fail(Errc::kUnsupported, "fsdp_version=1: ", Quoted(planned.param.name),
                  " is frozen, but is in a flat vector with other parameters");
    }
    plan_.flat.push_back(i);
    names.push_back(planned.param.name);
    shapes.push_back(planned.param.shape);
  }
  plan_.units = UnitsOf(names, shapes, plan_.layout.blocks);
  for (const FlatUnit& unit : plan_.units) {
    const PlannedParam& first = plan_.params[plan_.flat[unit.params.front()]];
    for (const std::uint32_t at : unit.params) {
      const PlannedParam& other = plan_.params[plan_.flat[at]];
      bool same = other.scalars == first.scalars && other.states.size() == first.states.size();
      for (std::size_t s = 0; same && s < first.states.size(); ++s) {
        const StateTensor& a = plan_.tensors[first.states[s]];
        const StateTensor& b = plan_.tensors[other.states[s]];
        same = a.state == b.state && a.dtype == b.dtype;
      }
      if (same) continue;
      return Fail(Errc::kUnsupported, "fsdp_version=1: ", Quoted(first.param.name), " and ",
                  Quoted(other.param.name),
                  " are in one flat vector, but their states or steps differ");
    }
  }
  return {};
}

void Planner::TakeOwn() {
  if (source_.own == nullptr) return;
  auto own = std::dynamic_pointer_cast<const OwnFiles>(source_.own);
  if (own == nullptr || own->trainer != plan_.layout.trainer) {
    for (const std::string& one : source_.own->Contents()) Leave(one);
    return;
  }
  const std::uint64_t ranks = plan_.layout.ranks();
  for (const OwnFiles::One& item : own->items) {
    if (item.ranks.size() == ranks || item.same) continue;
    Leave(StrCat(
        "values of ", Quoted(item.name), " for each of ", item.ranks.size(),
        " ranks, such as random states: rank R of the target gets the value of rank R modulo ",
        item.ranks.size()));
  }
  plan_.own = std::move(own);
}

void Planner::TellWhatIsLeft() {
  if (!left_options_.empty()) {
    Leave("optimizer options that are not plain values: " +
          FirstFew({left_options_.begin(), left_options_.end()}));
  }
  if (own_format_) return;
  bool stepped = false;
  bool rounded = false;
  bool experts = false;
  for (const PlannedParam& planned : plan_.params) {
    if (!planned.param.alias_of.empty()) continue;
    stepped = stepped || !planned.scalars.empty();
    rounded = rounded || plan_.tensors[planned.model].dtype != planned.param.dtype;
    experts = experts || planned.param.expert.has_value();
  }
  if (rounded) {
    Leave("the type of the compute weights, " + std::string(Name(source_.layout.dtype)) +
          ": the model's tensors are the master weights, and trainers round them to the type that "
          "they are configured for");
  }
  if (source_.iteration && !stepped) Leave(StrCat("the iteration, ", *source_.iteration));
  if (source_.consumed_samples) {
    Leave(StrCat("the number of samples, ", *source_.consumed_samples));
  }
  if (experts) Leave("the distinction of expert parameters from others");
  if (plan_.layout.trainer != Trainer::kAccelerate) {
    Leave("schedule and random states: their files are not written");
  }
}

Result<FilesPlan> Planner::Make() {
  for (std::uint32_t i = 0; i < source_.params.size(); ++i) {
    plan_.by_name.emplace(source_.params[i].name, i);
    SW_TRY(AddParam(source_.params[i]));
  }
  SW_TRY(AddGroups());
  SW_TRY(CheckAllAreListed(plan_));
  SW_TRY(AddUnits());
  TakeOwn();
  TellWhatIsLeft();
  return std::move(plan_);
}

}  // namespace

Result<FilesPlan> MakePlan(const Checkpoint& source, const FilesLayout& layout) {
  return Planner(source, layout).Make();
}

}  // namespace shardwright::checkpoints::dtensor
