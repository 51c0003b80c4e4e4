// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>

#include "checkpoints/megatron/folder.h"
#include "checkpoints/megatron/names.h"
#include "checkpoints/megatron/stages.h"
#include "checkpoints/megatron/write/shards.h"
#include "checkpoints/megatron/write/write_internal.h"
#include "engine/layout/states.h"

namespace shardwright::checkpoints::megatron {
namespace {

using pickle::Arena;
using pickle::Node;

constexpr double kCheckpointVersion = 3.0;

/// A file under construction.
struct OpenFile {
  Document document;
  std::vector<std::uint32_t> arrays;  ///< by tensor number in the document
};

class LegacyWriter {
 public:
  LegacyWriter(const Checkpoint& source, const MegatronLayout& to)
      : w_(source, to), source_(source), to_(to) {}

  Result<Written> Run();

 private:
  Status Prepare();
  Status CheckOneStack() const;
  Status AddRank();
  Result<const Node*> ModelNode(OpenFile* file, std::uint64_t chunk);
  Status AddModules(OpenFile* file, std::uint64_t chunk, Node* model) const;
  Result<const Node*> OptimizerNode(OpenFile* file, bool experts);
  Status AddBuffers();
  Result<const Node*> BuffersNode(OpenFile* file, bool experts);
  Status AddRandom(OpenFile* file, Node* root) const;
  Result<const Node*> ShardNode(OpenFile* file, const Mine& mine, std::string_view state,
                                DType dtype);
  std::string Folder() const { return FolderName(w_.args, rank_.t, rank_.p, rank_.e); }
  DType DTypeOf(const Param& param, std::string_view state) const;

  Writing w_;
  const Checkpoint& source_;
  const MegatronLayout& to_;
  std::optional<double> step_;
  std::optional<Shards> shards_;
  // The rank being written.
  Rank rank_;
  std::vector<std::vector<Mine>> mine_;  // by chunk
};

Status LegacyWriter::Prepare() {
  if (RunStateOf(source_) == nullptr || RunStateOf(source_)->noted || !HasArgs(source_)) {
    return Fail(Errc::kUnsupported,
                "files=torch: legacy files require the arguments of a Megatron run, which ",
                (HasArgs(source_) ? source_.origin : "this checkpoint"),
                " does not have; use files=torch_dist");
  }
  if (w_.args.experts > 0 && to_.etp != to_.mesh.tp) {
    return Fail(Errc::kUnsupported, "files=torch: etp=", to_.etp, " must equal tp=", to_.mesh.tp);
  }
  if (Status stages = CheckMtpStages(w_.args); !stages) {
    return Within("files=torch", stages.error());
  }
  SW_TRY(CheckOneStack());
  SW_TRY_ASSIGN(std::vector<Stage> stages, StagesOf(w_.args));
  std::vector<std::uint32_t> order(source_.params.size());
  std::iota(order.begin(), order.end(), 0U);
  shards_.emplace(w_, std::move(stages), std::move(order));
  SW_TRY_ASSIGN(step_, StepOf(source_));
  for (const Param& param : source_.params) {
    if (!IsOfVocabulary(param.name)) continue;
    const Whole whole = w_.WholeFor(param);
    w_.vocab_rows = whole.shape[0] + whole.padding;
  }
  return {};
}

/// Checks that the model has one list of layers, because stages share only one.
Status LegacyWriter::CheckOneStack() const {
  if (w_.args.hybrid) {
    return Fail(Errc::kUnsupported,
                "files=torch: hybrid models (layers of several kinds) are not supported");
  }
  for (const Param& param : source_.params) {
    const ParamName name = ParseName(param.name);
    if (name.stack == kEncoderLayers) {
      return Fail(
          Errc::kUnsupported, "files=torch: \"", param.name,
          "\": encoder layers are not supported: use files=torch_dist with optimizer=none or "
          "fully_reshardable");
    }
  }
  return {};
}

DType LegacyWriter::DTypeOf(const Param& param, std::string_view state) const {
  const layout::LogicalTensor* tensor = w_.SourceTensor(param.name, state);
  return tensor == nullptr ? DType::kF32 : tensor->dtype;
}

Result<const Node*> LegacyWriter::ShardNode(OpenFile* file, const Mine& mine,
                                            std::string_view state, DType dtype) {
  const auto number = static_cast<std::uint32_t>(file->arrays.size());
  file->arrays.push_back(w_.builder.AddArray(dtype, 1));
  SW_TRY(shards_->AddShard(rank_, mine, state, dtype, file->arrays.back(), 0));
  return file->document.AddTensor(number, dtype, mine.shape);
}

Result<const Node*> LegacyWriter::ModelNode(OpenFile* file, std::uint64_t chunk) {
  const std::vector<Mine>& mine = mine_[chunk];
  Arena& arena = file->document.arena;
  Node* model = arena.Dict(true);
  std::string module;  // a linear layer without its extra state yet
  std::string whole;   // its name in the whole model
  const auto close = [&]() -> Status {
    if (module.empty()) return {};
    const std::string state(kExtraState);
    SW_TRY_ASSIGN(const Node* value, ModuleNode(&file->document, source_, whole + state));
    Set(arena, model, module + state, value);
    module.clear();
    return {};
  };
  for (const Mine& one : mine) {
    const Param& param = source_.params[one.param];
    const std::string before = one.name.substr(0, one.name.rfind('.') + 1);
    if (before != module) SW_TRY(close());
    const bool master = param.dtype == DType::kF32 && w_.has_optimizer;
    const std::string_view state = param.kind == ParamKind::kBuffer   ? layout::kBuffer
                                   : param.kind == ParamKind::kFrozen ? layout::kFrozen
                                   : master                           ? layout::kMaster
                                                                      : layout::kWeight;
    SW_TRY_ASSIGN(const Node* tensor, ShardNode(file, one, state, param.dtype));
    Set(arena, model, one.name, tensor);
    if (IsOfLinear(ParseName(param.name)) || before == "output_layer.") {
      module = before;
      whole = one.copy ? before : param.name.substr(0, param.name.rfind('.') + 1);
    }
  }
  SW_TRY(close());
  SW_TRY(AddModules(file, chunk, model));
  return model;
}

/// Adds the extra state of modules without parameters, mainly attention.
Status LegacyWriter::AddModules(OpenFile* file, std::uint64_t chunk, Node* model) const {
  const Stage& stage = shards_->stages()[chunk * to_.mesh.pp + rank_.p];
  const std::uint64_t each = w_.args.experts / to_.mesh.ep;
  const std::uint64_t index = chunk * to_.mesh.pp + rank_.p;
  for (const auto& [text, value] : RunStateOf(source_)->modules) {
    ParamName name = ParseName(text);
    if (!StageHas(name, shards_->stages(), index)) continue;
    if (name.layer) name.layer = *name.layer - stage.begin;
    if (name.expert && *name.expert / each != rank_.e) continue;
    if (name.expert) name.expert = *name.expert - rank_.e * each;
    if (w_.args.old_mtp_names) name.stack = name.OldStack();
    if (model->Find(name.Text()) != nullptr) continue;
    SW_TRY_ASSIGN(const Node* state, ModuleNode(&file->document, source_, text));
    Set(file->document.arena, model, name.Text(), state);
  }
  return {};
}

/// Builds states of whole shards, by number: group by group, each in model order.
Result<const Node*> LegacyWriter::OptimizerNode(OpenFile* file, bool experts) {
  Document& document = file->document;
  Arena& arena = document.arena;
  const bool buffers = to_.optimizer != OptimizerForm::kNone;
  std::vector<Mine> mine;
  for (const std::vector<Mine>& chunk : mine_) {
    for (Mine& one : shards_->PartOf(chunk, experts)) mine.push_back(std::move(one));
  }
  Node* states = arena.Dict();
  std::vector<const Node*> groups;
  std::vector<const Node*> masters;
  std::int64_t id = 0;
  bool half = false;
  for (const TargetGroup& group :
       GroupsOf(arena, w_, shards_->chained(), experts, buffers ? step_ : std::nullopt)) {
    std::vector<const Node*> ids;
    std::vector<const Node*> of_group;
    for (const Mine& one : mine) {
      const Param& param = source_.params[one.param];
      const auto from = static_cast<std::uint32_t>(param.group);
      if (buffers || std::find(group.from.begin(), group.from.end(), from) == group.from.end()) {
        continue;
      }
      Node* state = arena.Dict();
      if (step_) {
        const auto value = static_cast<float>(*step_);
        std::string bytes(sizeof value, '\0');
        std::memcpy(bytes.data(), &value, sizeof value);
        Set(arena, state, "step", document.AddInline(std::move(bytes), DType::kF32, {}));
      }
      for (const std::string& name : source_.states) {
        if (w_.SourceTensor(param.name, name) == nullptr) continue;
        SW_TRY_ASSIGN(const Node* tensor, ShardNode(file, one, name, DTypeOf(param, name)));
        Set(arena, state, name, tensor);
      }
      if (param.dtype != DType::kF32) {
        half = true;
        SW_TRY_ASSIGN(const Node* master, ShardNode(file, one, layout::kMaster, DType::kF32));
        of_group.push_back(master);
      }
      states->items.push_back(arena.Int(id));
      states->items.push_back(state);
      ids.push_back(arena.Int(id++));
    }
    if (!buffers) Set(arena, group.options, "params", arena.List(std::move(ids)));
    groups.push_back(group.options);
    masters.push_back(arena.List(std::move(of_group)));
  }
  Node* inner = arena.Dict();
  if (!buffers) Set(arena, inner, "state", states);
  Set(arena, inner, "param_groups", arena.List(std::move(groups)));
  if (!buffers && !half && source_.layout.dtype == DType::kF32) return inner;
  Node* outer = arena.Dict();
  Set(arena, outer, "optimizer", inner);
  SW_TRY_ASSIGN(const Node* scaler, ScalerNode(&document, source_, experts));
  if (scaler != nullptr) Set(arena, outer, "grad_scaler", scaler);
  if (!buffers) Set(arena, outer, "fp32_from_fp16_params", arena.List(std::move(masters)));
  return outer;
}

/// Builds states in gradient buffers.
Result<const Node*> LegacyWriter::BuffersNode(OpenFile* file, bool experts) {
  Arena& arena = file->document.arena;
  Node* root = arena.Dict();
  Set(arena, root, "buckets_coalesced", arena.Bool(true));
  SW_TRY_ASSIGN(const std::vector<StateBuffer> buffers, shards_->BuffersOf(rank_, mine_, experts));
  std::int64_t index = 0;
  for (const StateBuffer& one : buffers) {
    Node* entry = arena.Dict();
    for (const std::string& state : one.states) {
      const auto number = static_cast<std::uint32_t>(file->arrays.size());
      file->arrays.push_back(w_.builder.AddArray(DType::kF32, 1));
      for (std::size_t i = 0; i < one.mine.size(); ++i) {
        SW_TRY(shards_->AddShard(rank_, one.mine[i], state, DType::kF32, file->arrays.back(),
                                 one.buffer.stored_offset(i)));
      }
      Set(arena, entry, SlotOf(state),
          file->document.AddTensor(number, DType::kF32, {one.buffer.stored()}));
    }
    Set(arena, entry, "numel_unpadded", arena.Int(static_cast<std::int64_t>(one.buffer.stored())));
    Node* types = arena.Dict();
    types->items = {TypesNode(arena, one), entry};
    root->items.push_back(arena.Int(index++));
    root->items.push_back(types);
  }
  return root;
}

Status LegacyWriter::AddBuffers() {
  OpenFile file;
  Arena& arena = file.document.arena;
  if (!shards_->chained()) {
    SW_TRY_ASSIGN(file.document.root, BuffersNode(&file, false));
  } else {
    const Node* dense = arena.None();  // the first expert rank has it
    if (rank_.e == 0) {
      SW_TRY_ASSIGN(dense, BuffersNode(&file, false));
    }
    SW_TRY_ASSIGN(const Node* experts, BuffersNode(&file, true));
    file.document.root = arena.List({dense, experts});
  }
  const std::string path = w_.tag + "/" + Folder() + "/" + std::string(kOptimizerFile);
  SW_TRY(w_.items.AddObject(w_.items.AddFile(path), file.document, file.arrays));
  return {};
}

Status LegacyWriter::AddRandom(OpenFile* file, Node* root) const {
  const RunState* own = RunStateOf(source_);
  if (own->random.empty()) return {};
  auto from = own->random.find({rank_.p, rank_.t});
  if (from == own->random.end()) from = own->random.begin();
  Graft graft(file->document, *from->second.document, from->second.members);
  SW_TRY_ASSIGN(const Node* state, graft.Take(from->second.root));
  Set(file->document.arena, root, "rng_state", state);
  return {};
}

Status LegacyWriter::AddRank() {
  mine_.clear();
  for (std::uint64_t chunk = 0; chunk < to_.vpp; ++chunk) {
    SW_TRY_ASSIGN(std::vector<Mine> mine, shards_->MineOf(rank_, chunk));
    mine_.push_back(std::move(mine));
  }
  OpenFile file;
  Arena& arena = file.document.arena;
  Node* root = arena.Dict();
  Set(arena, root, "args", ArgsNode(arena, w_));
  Set(arena, root, "checkpoint_version", arena.Float(kCheckpointVersion));
  Set(arena, root, "iteration",
      arena.Int(static_cast<std::int64_t>(source_.iteration ? *source_.iteration : 0)));
  for (std::uint64_t chunk = 0; chunk < to_.vpp; ++chunk) {
    SW_TRY_ASSIGN(const Node* model, ModelNode(&file, chunk));
    Set(arena, root, to_.vpp > 1 ? "model" + std::to_string(chunk) : "model", model);
  }
  if (w_.has_optimizer) {
    SW_TRY_ASSIGN(const Node* dense, OptimizerNode(&file, false));
    if (shards_->chained()) {
      SW_TRY_ASSIGN(const Node* experts, OptimizerNode(&file, true));
      Set(arena, root, "optimizer", arena.List({dense, experts}));
    } else {
      Set(arena, root, "optimizer", dense);
    }
  }
  SW_TRY(AddRandom(&file, root));
  SW_TRY(AddOthers(source_, &file.document, root));
  file.document.root = root;
  const std::string path = w_.tag + "/" + Folder() + "/" + std::string(kModelFile);
  SW_TRY(w_.items.AddObject(w_.items.AddFile(path), file.document, file.arrays));
  const bool buffers = w_.has_optimizer && to_.optimizer != OptimizerForm::kNone;
  return buffers ? AddBuffers() : Status();
}

Result<Written> LegacyWriter::Run() {
  SW_TRY(Prepare());
  for (rank_.p = 0; rank_.p < to_.mesh.pp; ++rank_.p) {
    for (rank_.e = 0; rank_.e < to_.mesh.ep; ++rank_.e) {
      for (rank_.t = 0; rank_.t < to_.mesh.tp; ++rank_.t) SW_TRY(AddRank());
    }
  }
  w_.items.Finish();
  w_.builder.AddText(std::string(kTracker), TrackerText(source_));
  Written out;
  out.not_carried = w_.Left();
  out.target = std::move(w_.builder).Take();
  return out;
}

}  // namespace

Result<Written> WriteLegacy(const Checkpoint& source, const MegatronLayout& to) {
  return LegacyWriter(source, to).Run();
}

}  // namespace shardwright::checkpoints::megatron
