// SPDX-License-Identifier: Apache-2.0
// Submission of gradients by trainers, and selection of
// those to buffer: docs/formats/agent.md, "Gradients".

#include <algorithm>
#include <chrono>
#include <thread>

#include <nlohmann/json.hpp>

#include "checkpoints/registry.h"
#include "engine/layout/states.h"
#include "partial/agent/agent_protocol.h"
#include "partial/agent/agent_server.h"
#include "partial/agent/throttle/handed_memory.h"
#include "partial/select/catch_up.h"
#include "partial/store/modules.h"
#include "partial/store/store.h"

namespace shardwright::partial {
namespace {

constexpr std::chrono::milliseconds kStepTick(100);
constexpr std::chrono::milliseconds kStoreTick(20);

/// Returns true if the trainer started from the store's last restore, at the iteration after which
/// it begins, from a checkpoint of that iteration with every module in that state. Otherwise some
/// chains of the log end there. A restore from memory alone proves nothing about the log.
Result<bool> WasRestored(const std::string& path, const Handing& handing) {
  SW_TRY_ASSIGN(const bool there, Store::IsStore(path));
  if (!there) return false;
  SW_TRY_ASSIGN(const Store store, Store::Open(path));
  SW_TRY_ASSIGN(const std::optional<RecoveryRecord> last, store.LastRecovery());
  if (!last || last->sequence != handing.recovery || last->resume != handing.begun) return false;
  if (!last->older || !last->older->empty()) return false;
  SW_TRY_ASSIGN(const std::vector<StoredCheckpoint> all, store.List());
  return std::ranges::any_of(all, [&](const StoredCheckpoint& one) {
    return one.sequence == last->manifest && one.iteration == last->resume;
  });
}

/// Registers a writer, and unregisters it when the trainer's process disconnects.
class Entered {
 public:
  Entered(GradientLogs& logs, const Handing& handing, bool restored)
      : logs_(logs), writer_(handing.writer) {
    logs_.Enter(writer_, handing.begun, restored, handing.every);
  }
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;
  ~Entered() { logs_.Leave(writer_); }

 private:
  GradientLogs& logs_;
  const std::uint32_t writer_;
};

/// Returns the source of the newest checkpoint of a store.
Result<checkpoints::SourceSet> NewestSource(const std::string& path) {
  SW_TRY_ASSIGN(const bool there, Store::IsStore(path));
  if (!there) return Fail(Errc::kNotFound, path, ": no snapshot and no checkpoint yet");
  SW_TRY_ASSIGN(const Store store, Store::Open(path));
  SW_TRY_ASSIGN(const std::vector<StoredCheckpoint> all, store.List());
  const StoredCheckpoint* newest = nullptr;
  for (const StoredCheckpoint& one : all) {
    if (!one.abandoned) newest = &one;
  }
  if (newest == nullptr) return Fail(Errc::kNotFound, path, ": no checkpoint");
  SW_TRY_ASSIGN(const Manifest manifest, store.ReadManifest(*newest));
  return store.ReadCatalogue(manifest);
}

}  // namespace

Result<std::vector<ExpertParam>> Agent::ExpertParams() {
  WaitForSnapshot();
  checkpoints::SourceSet set;
  if (const auto newest = Newest(); newest) {
    SW_TRY_ASSIGN(set, checkpoints::DeserializeSource(newest->catalogue));
  } else {
    SW_TRY_ASSIGN(set, NewestSource(options_.save.store));
  }
  SW_TRY_ASSIGN(const auto patterns, convert::ReadPatterns(options_.pattern_files));
  SW_TRY_ASSIGN(const checkpoints::Checkpoint checkpoint,
                checkpoints::ReadCheckpoint(set, patterns));
  SW_TRY_ASSIGN(const Model model, DescribeModel(checkpoint));
  std::vector<ExpertParam> params;
  for (std::size_t i = model.nonexpert_count; i < model.modules.size(); ++i) {
    const Module& module = model.modules[i];
    std::map<std::string, std::uint64_t> trained;
    for (const ModulePart& part : module.parts) {
      for (const ModuleTensor& each : part.tensors) {
        const layout::LogicalTensor& tensor = checkpoint.map.tensors[each.tensor];
        const bool of_optimizer =
            !layout::IsModelState(tensor.state) || tensor.state == layout::kMaster;
        if (!of_optimizer || layout::IsPadding(tensor.state)) continue;
        SW_TRY_ASSIGN(trained[tensor.name], CountElems(tensor.shape));
      }
    }
    for (const auto& [name, elems] : trained) params.push_back({module.name, name, elems});
  }
  return params;
}

/// \param after  state of both levels after a snapshot
/// \param known  last restore that the snapshot knows of
void Agent::NotePlan(const SnapshotChoice& choice, const SelectionState& after,
                     std::uint64_t known) {
  if (options_.save.policy != Policy::kReplay || choice.model.experts.empty()) return;
  {
    const std::lock_guard lock(mutex_);
    if (recovery_ != known) return;
    next_ = PlanAfter(choice, after);
  }
  PlanLogs();
}

/// \pre the caller has locked mutex_
Agent::NextPlan Agent::PlanAfter(const SnapshotChoice& choice, const SelectionState& after) const {
  NextPlan next;
  next.iteration = choice.iteration;
  if (next_) {
    const bool again = next_->iteration == choice.iteration;
    next.interval = again ? next_->interval : choice.iteration - next_->iteration;
  }
  next.map = choice.map;
  next.snapshot = after.snapshot;
  next.persist = after.persist;
  next.bytes = BytesOf(choice.model);
  next.k = choice.k_snapshot;
  for (std::size_t m = 0; m < choice.model.experts.size(); ++m) {
    std::vector<std::string>& names = next.names.emplace_back();
    for (std::uint32_t e = 0; e < choice.model.experts[m]; ++e) {
      names.push_back(choice.model.modules[choice.model.expert_module(m, e)].name);
    }
  }
  return next;
}

void Agent::PlanLogs() {
  const std::lock_guard lock(mutex_);
  const std::uint64_t every = logs_.every();
  const std::uint64_t interval = every > 0 ? every : next_ ? next_->interval : 0;
  if (!next_ || interval == 0) return logs_.DiscardAll();
  const ReplayPoint point{next_->iteration + interval,
                          interval,
                          logs_.logged_since(),
                          options_.save.replay.full_every,
                          options_.save.budget_bytes.value_or(0),
                          &next_->bytes};
  const Result<TransferPlan> plan =
      SelectReplay(next_->map, next_->snapshot.cursor, ChainStarts(next_->snapshot, next_->persist),
                   next_->k, point);
  // The snapshot itself will report the error.
  if (!plan || !point.logged_since) return logs_.DiscardAll();
  ModuleNames names;
  for (std::size_t m = 0; m < plan->full.size(); ++m) {
    for (const std::uint32_t e : plan->full[m]) names.insert(next_->names[m][e]);
  }
  logs_.Hold(next_->iteration, std::move(names));
}

Status AgentServer::SendExperts(os::Connection& connection) {
  SW_TRY_ASSIGN(const std::vector<ExpertParam> params, agent_.ExpertParams());
  nlohmann::json list = nlohmann::json::array();
  for (const ExpertParam& one : params) list.push_back({one.module, one.name, one.elems});
  // The store's last restore: the trainer was filled before this request.
  std::uint64_t recovery = 0;
  const std::string& path = agent_.options().save.store;
  SW_TRY_ASSIGN(const bool there, Store::IsStore(path));
  if (there) {
    SW_TRY_ASSIGN(const Store store, Store::Open(path));
    SW_TRY_ASSIGN(const auto last, store.LastRecoveryFile());
    if (last) recovery = last->sequence;
  }
  const nlohmann::json out = {{"recovery", recovery}, {"params", std::move(list)}};
  const std::string text = out.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  SW_TRY(SendAnswer(connection, {}, std::to_string(text.size())));
  return connection.Send(text);
}

/// Receives a table of the trainer's square roots in shared memory.
Status AgentServer::TakeRoots(os::Connection& connection, std::string_view last) {
  SW_TRY_ASSIGN(const std::uint64_t bits, ParseNumber(last, ~std::uint32_t{0}, "last"));
  SW_TRY(SendAnswer(connection, {}));
  SW_TRY_ASSIGN(const int descriptor, connection.ReceiveDescriptor());
  constexpr std::uint64_t kBytes = optimizer_steps::RootTable::kRoots * sizeof(float);
  SW_TRY_ASSIGN(const HandedMemory memory, HandedMemory::Map(descriptor, kBytes));
  const std::span<const float> roots(reinterpret_cast<const float*>(memory.bytes().data()),
                                     optimizer_steps::RootTable::kRoots);
  SW_TRY_ASSIGN(optimizer_steps::RootTable table,
                optimizer_steps::RootTable::FromRoots(roots, static_cast<std::uint32_t>(bits)));
  SW_TRY_ASSIGN(const auto digest, agent_.logs().AddRoots(std::move(table)));
  return SendAnswer(connection, {}, digest ? exec::Hex(*digest) : "none");
}

/// Serves a trainer's process that submits gradients until it disconnects.
Status AgentServer::TakeGradients(os::Connection& connection,
                                  const std::vector<std::string_view>& words) {
  SW_TRY_ASSIGN(const std::uint64_t number, ParseNumber(words[1], ~std::uint32_t{0}, "writer"));
  SW_TRY_ASSIGN(const std::uint64_t bytes, ParseNumber(words[2], kAgentTextBytes, "bytes"));
  const auto writer = static_cast<std::uint32_t>(number);
  const std::string where = "gradients of writer " + std::to_string(writer);
  SW_TRY_ASSIGN(const std::string text, ReceiveText(connection, bytes));
  SW_TRY_ASSIGN(const Handing handing, ParseHanding(text, writer, where));
  SW_TRY(SendAnswer(connection, {}));
  SW_TRY_ASSIGN(const int descriptor, connection.ReceiveDescriptor());
  SW_TRY_ASSIGN(const HandedMemory memory,
                HandedMemory::Map(descriptor, handing.places * handing.place_bytes));
  SW_TRY_ASSIGN(const bool restored, WasRestored(agent_.options().save.store, handing));
  const Entered entered(agent_.logs(), handing, restored);
  agent_.PlanLogs();
  SW_TRY(SendAnswer(connection, {}));
  while (!stop_.load()) {
    SW_TRY_ASSIGN(const bool there, connection.HasLine(os::kLineBytes, kStepTick));
    if (!there) continue;
    SW_TRY_ASSIGN(const std::optional<std::string> line, connection.ReceiveLine(os::kLineBytes));
    if (!line) return Fail(Errc::kIo, where, ": the trainer has closed the connection");
    const std::vector<std::string_view> step = WordsOf(*line);
    if (step.size() != 4 || step[0] != "step") {
      return BadInput(where, ": step ITERATION PLACE BYTES expected");
    }
    SW_TRY_ASSIGN(const std::uint64_t iteration,
                  ParseNumber(step[1], ~std::uint64_t{0}, "iteration"));
    SW_TRY_ASSIGN(const std::uint64_t place, ParseNumber(step[2], handing.places - 1, "place"));
    SW_TRY_ASSIGN(const std::uint64_t length, ParseNumber(step[3], kAgentTextBytes, "bytes"));
    SW_TRY_ASSIGN(const std::string told, ReceiveText(connection, length));
    SW_TRY_ASSIGN(const std::vector<LogStep> steps, ParseLogSteps(told, where));
    SW_TRY(AwaitStore());
    const auto gradients = memory.bytes().subspan(place * handing.place_bytes, handing.place_bytes);
    SW_TRY_ASSIGN(const std::uint64_t done,
                  agent_.logs().Append(handing, iteration, gradients, steps));
    SW_TRY(SendAnswer(
        connection, {},
        std::to_string(iteration) + " " + std::to_string(place) + " " + std::to_string(done)));
  }
  return Fail(Errc::kStopped, where, ": the agent is about to end");
}

/// Waits for the first checkpoint to reach the store, because a log requires it.
Status AgentServer::AwaitStore() {
  const std::string& path = agent_.options().save.store;
  for (;;) {
    SW_TRY_ASSIGN(const bool there, Store::IsStore(path));
    if (there) return {};
    if (stop_.load()) return Fail(Errc::kStopped, path, ": no checkpoint was saved");
    std::this_thread::sleep_for(kStoreTick);
  }
}

}  // namespace shardwright::partial
