// SPDX-License-Identifier: Apache-2.0
#include "trainer/load/match.h"

#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "checkpoints/pickled/wrappers.h"
#include "engine/layout/states.h"
#include "engine/plan/target_builder.h"
#include "support/base/text.h"

namespace shardwright::trainer {
namespace {

using layout::LogicalTensor;

/// Returns true for weights, masters, frozen parameters and buffers, which have one value per name.
bool IsModel(const std::string& kind) { return kind == kParam || layout::IsModelState(kind); }

/// Location of a tensor's values in the source, and the state to request from the plan.
struct Found {
  std::uint32_t tensor = 0;
  std::string state;
};

std::optional<Found> Find(const layout::TensorIndex& index, const std::string& name,
                          const std::string& kind) {
  if (!IsModel(kind)) {
    const auto found = index.Find(name, kind);
    return found ? std::optional(Found{*found, kind}) : std::nullopt;
  }
  // A parameter that one trainer trains may be frozen or a buffer in the other, and the reverse.
  const bool master = kind == layout::kMaster;
  const std::string_view wanted = master ? layout::kMaster : layout::kWeight;
  const auto trained = [&]() -> std::optional<Found> {
    auto found = index.Find(name, wanted);
    if (!found) found = index.Find(name, master ? layout::kWeight : layout::kMaster);
    return found ? std::optional(Found{*found, std::string(wanted)}) : std::nullopt;
  };
  const auto other = [&](std::string_view state) -> std::optional<Found> {
    const auto found = index.Find(name, state);
    return found ? std::optional(Found{*found, std::string(state)}) : std::nullopt;
  };
  std::optional<Found> found = kind == layout::kBuffer ? other(layout::kBuffer) : trained();
  if (!found) found = other(layout::kFrozen);
  if (!found) found = other(layout::kBuffer);
  return found ? found : trained();
}

/// Builds the target, one tensor at a time.
class Matcher {
 public:
  Matcher(const checkpoints::Checkpoint& source, bool optimizer)
      : source_(source), names_(source), index_(source.map), has_optimizer_(optimizer) {}

  Status AddRank(std::size_t rank, const std::vector<TrainerShard>& held);
  Match Take() &&;

 private:
  Status Add(std::size_t rank, std::uint32_t number, const TrainerShard& held);
  void FindUnused();

  const checkpoints::Checkpoint& source_;
  const Names names_;
  const layout::TensorIndex index_;
  plan::TargetBuilder target_;
  Match match_;
  std::set<std::string> unused_;
  // Maps source tensor, state and type to the target's tensor.
  std::map<std::tuple<std::uint32_t, std::string, DType>, std::uint32_t> tensors_;
  std::set<std::string> missing_;
  std::set<std::uint32_t> used_;
  std::set<std::string> model_names_;
  bool has_optimizer_;
};

Status Matcher::AddRank(std::size_t rank, const std::vector<TrainerShard>& held) {
  target_.AddFile("rank " + std::to_string(rank));
  match_.payloads.emplace_back();
  for (std::uint32_t i = 0; i < held.size(); ++i) SW_TRY(Add(rank, i, held[i]));
  return {};
}

Status Matcher::Add(std::size_t rank, std::uint32_t number, const TrainerShard& held) {
  if (!IsOfModel(held.kind)) has_optimizer_ = true;
  const std::string& name = names_.Holder(held.name);
  const std::optional<Found> found = Find(index_, name, held.kind);
  if (!found) {
    missing_.insert(Label(held));
    return {};
  }
  const LogicalTensor& from = source_.map.tensors[found->tensor];
  const bool one = Elems(from.shape) == 1 && Elems(held.shape) == 1;  // shapes [] and [1] are equal
  if (from.shape != held.shape && !one) {
    return Fail(Errc::kMismatch, Label(held), ": the trainer has shape ", ToString(held.shape),
                ", the checkpoint has ", ToString(from.shape));
  }
  used_.insert(found->tensor);
  if (IsModel(held.kind)) model_names_.insert(name);
  const std::uint64_t elems = held.cut->shard_elems();
  if (elems == 0) return {};
  const auto [at, is_new] =
      tensors_.try_emplace({found->tensor, found->state, held.dtype}, std::uint32_t{0});
  if (is_new) at->second = target_.AddTensor(name, found->state, held.dtype, held.shape);
  layout::Fragment fragment;
  fragment.cut = held.cut;
  fragment.at.array = target_.AddArray(held.dtype, 1);
  for (const layout::Fragment& other : target_.target().map.tensors[at->second].fragments) {
    if (*other.cut == *held.cut) fragment.role = layout::Role::kReplica;
  }
  const auto file = static_cast<std::uint32_t>(rank);
  target_.AddElements(file, target_.bytes(file), fragment.at.array, 0, elems, Label(held));
  target_.AddFragment(at->second, std::move(fragment));
  match_.payloads[rank].push_back(number);
  return {};
}

void Matcher::FindUnused() {
  for (std::uint32_t t = 0; t < source_.map.tensors.size(); ++t) {
    const LogicalTensor& tensor = source_.map.tensors[t];
    if (layout::IsPadding(tensor.state) || used_.contains(t)) continue;
    const bool model = layout::IsModelState(tensor.state);
    if (model ? model_names_.contains(tensor.name) : !has_optimizer_) continue;
    unused_.insert(Quoted(tensor.name) + (model ? "" : " " + tensor.state));
  }
}

Match Matcher::Take() && {
  FindUnused();
  match_.unused.assign(unused_.begin(), unused_.end());
  match_.missing.assign(missing_.begin(), missing_.end());
  match_.target = std::move(target_).Take();
  return std::move(match_);
}

}  // namespace

bool IsOfModel(const std::string& kind) { return IsModel(kind) && kind != layout::kMaster; }

Names::Names(const checkpoints::Checkpoint& source) {
  std::set<std::string> several;
  for (const checkpoints::Param& param : source.params) {
    if (!param.alias_of.empty()) alias_of_.emplace(param.name, param.alias_of);
    const std::string plain = checkpoints::PlainName(param.name);
    const bool is_new = wrapped_.emplace(plain, param.name).second;
    if (!is_new) several.insert(plain);
  }
  for (const std::string& plain : several) wrapped_.erase(plain);
  std::erase_if(wrapped_, [](const auto& one) { return one.first == one.second; });
}

const std::string& Names::Holder(const std::string& name) const {
  const auto wrapped = wrapped_.find(name);
  const std::string& own = wrapped == wrapped_.end() ? name : wrapped->second;
  const auto found = alias_of_.find(own);
  return found == alias_of_.end() ? own : found->second;
}

Result<Match> MatchShards(const checkpoints::Checkpoint& source,
                          const std::vector<std::vector<TrainerShard>>& by_rank, bool optimizer) {
  Matcher matcher(source, optimizer);
  for (std::size_t rank = 0; rank < by_rank.size(); ++rank) {
    SW_TRY(matcher.AddRank(rank, by_rank[rank]));
  }
  return std::move(matcher).Take();
}

}  // namespace shardwright::trainer
