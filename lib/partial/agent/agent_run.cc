// SPDX-License-Identifier: Apache-2.0
#include "partial/agent/agent_run.h"

#include <algorithm>
#include <chrono>
#include <ctime>
#include <functional>
#include <future>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "checkpoints/open_source.h"
#include "partial/agent/agent_server.h"
#include "partial/agent/peer_copies.h"
#include "partial/agent/peers/plan_file.h"
#include "partial/agent/quiet_sink.h"
#include "partial/store/store.h"
#include "support/base/limits.h"
#include "support/base/system.h"
#include "support/base/text.h"
#include "support/comm/comm.h"
#include "support/os/dir.h"
#include "support/os/fault.h"
#include "support/os/file.h"
#include "support/os/lock.h"
#include "support/os/real_path.h"

namespace shardwright::partial {
namespace {

using Clock = std::chrono::steady_clock;

/// Time limit for a checkpoint to become complete after its `latest` was written.
constexpr std::chrono::seconds kSettle(30);
/// Size of a process's random id.
constexpr std::size_t kIdBytes = 16;
/// Time that the last persist waits for another process to unlock the store.
constexpr std::chrono::seconds kPatience(120);
/// Time that the last persist waits for an unmounted file system, and for progress.
constexpr std::chrono::seconds kNoProgress(10);
/// Interval at which the agent looks for a trainer.
constexpr std::chrono::seconds kTrainerLook(1);

/// Returns the plan that an agent follows; null without one.
std::unique_ptr<PlanFile> PlanOf(const AgentRunOptions& options) {
  if (options.plan.empty()) return nullptr;
  return std::make_unique<PlanFile>(options.plan, options.name, options.agent.save.store,
                                    options.key != nullptr || options.insecure);
}

class Runner {
 public:
  Runner(const AgentRunOptions& options, Sink& sink)
      : options_(options),
        process_(sink),
        sink_(sink),
        whole_(sink, &never_),
        agent_(options.agent),
        plan_(PlanOf(options)),
        copies_(agent_, commands_.self, plan_.get(), sink_),
        seen_(Latest()) {
    commands_.plan = plan_.get();
    if (const auto last = LastRestore()) seen_restore_ = last->sequence;
    commands_.self = {Hello::Role::kAgent, options.name, {}};
    commands_.checkpoints = os::ResolvePath(options.input.source_paths.front()).value_or("");
    commands_.snapshot = [this](const std::string& tag, const Agent::Copied& copied,
                                const FillSource& fill) -> Result<std::uint64_t> {
      SW_TRY_ASSIGN(const RecoveryFile restore, LastRestore());
      return Snapshot(tag, restore.sequence, 0, copied, fill);
    };
    commands_.flush = [this] {
      Watch(Try::kNow);
      return agent_.Flush(sink_);
    };
    commands_.peers = [this] { return copies_.statuses(); };
    copies_.SetAccess(options.key, options.trusted_user);
    if (options.peer_gradients) copies_.SendGradients();
    commands_.stopping = [this] { return stopping(); };
    commands_.stop = [this] {
      asked_to_stop_.store(true);
      return end_.get();
    };
  }

  Result<AgentStatus> Run() {
    // Requests are answered until the end, so that clients see the
    // agent running, and a client that stops it receives the result.
    std::list<AgentServer> servers;
    const Status end = Work(&servers);
    ended_.set_value(end);
    SW_TRY(end);
    return agent_.status();
  }

 private:
  Status Work(std::list<AgentServer>* servers) {
    if (!IsAgentName(options_.name)) {
      return Fail(Errc::kUsage, "--name \"", options_.name,
                  "\": 1 to 128 printable characters without spaces expected");
    }
    SW_TRY_ASSIGN(commands_.self.id, RandomHex(kIdBytes));
    if (plan_) SW_TRY(plan_->Start());
    if (options_.agent.replay) SW_TRY(CheckReplay());
    if (const Status confirmed = ConfirmRestore(); !confirmed)
      sink_.Warn(confirmed.error().message);
    if (const Status seen = agent_.CatchUp(); !seen) sink_.Warn(seen.error().message);
    SW_TRY(SetPeers());
    SW_TRY_ASSIGN(const std::vector<os::Address> listened, Listened());
    for (const os::Address& address : listened) {
      SW_TRY_ASSIGN(os::Listener listener, os::Listener::Open(address));
      servers->emplace_back(agent_, commands_, std::move(listener), sink_, options_.key);
      sink_.Note(StrCat("listening on ", os::ToText(servers->back().address())), 0);
    }
    std::vector<std::thread> threads;
    threads.emplace_back([this] { PersistLoop(); });
    std::thread watch([this] { WatchLastSave(); });
    if (options_.agent.replay) threads.emplace_back([this] { ReplayLoop(); });
    copies_.Start();
    while (!stopping()) {
      Watch(Try::kInTurn);
      FollowPlan();
      EndIfAbandoned();
      std::this_thread::sleep_for(kAgentTick);
    }
    const Limiter::Hurry hurry(agent_.limiter());
    Watch(Try::kLast);  // a `latest` that was written before the stop
    done_.store(true);
    copies_.End();
    // Persist first: joining the threads may outlast the caller's kill timeout.
    Status durable = PersistLast();
    for (std::thread& thread : threads) thread.join();
    copies_.Stop();
    if (durable) durable = PersistLast();  // if another thread's persist failed in between
    saved_.store(true);
    watch.join();
    if (!durable) durable.error().message += Lost();
    return durable;
  }

  /// Stops the agent if no trainer has run for the time of --linger.
  void EndIfAbandoned() {
    if (options_.trainer_lock.empty() || Clock::now() < next_look_) return;
    next_look_ = Clock::now() + kTrainerLook;
    const Result<bool> locked = os::Lock::IsLocked(options_.trainer_lock);
    if (!locked && !look_failed_) sink_.Warn(locked.error().message);
    look_failed_ = !locked;
    if (!locked || *locked) seen_trainer_ = Clock::now();
    if (Clock::now() - seen_trainer_ < options_.linger) return;
    sink_.Note(StrCat("no trainer has run for ", options_.linger.count(),
                      " s: saving all snapshots, then ending"),
               0);
    asked_to_stop_.store(true);
  }

  /// Returns "; iteration 8 is lost, the last one saved is 4", or nothing if all is saved.
  std::string Lost() const {
    const AgentStatus status = agent_.status();
    if (!status.newest || status.newest == status.persisted) return "";
    const std::string last =
        status.persisted ? StrCat("the last one saved is ", *status.persisted) : "none was saved";
    return StrCat("; iteration ", *status.newest, " is lost, ", last);
  }

  /// Lets the process end if the last save makes no progress: if no system call ends, no sync runs
  /// within its patience, and hardly any processor time is used.
  void WatchLastSave() {
    // The loop of Work may hang in the store's file system, too.
    while (!stopping() && !saved_.load()) std::this_thread::sleep_for(kAgentTick);
    std::uint64_t calls = os::CallsDone();
    std::clock_t used = std::clock();
    Clock::time_point since = Clock::now();
    while (!saved_.load()) {
      const std::string lost = Lost();
      process_.SetLastWords(lost.empty() ? "" : "ended by a second signal" + lost);
      std::this_thread::sleep_for(kAgentTick);
      const bool works = std::clock() - used > CLOCKS_PER_SEC;
      const auto synced = os::PatientCallTime();
      const bool syncs = synced.count() > 0 && synced < kPatience;
      if (os::CallsDone() != calls || works || syncs) {
        calls = os::CallsDone();
        used = std::clock();
        since = Clock::now();
      }
      if (Clock::now() - since < kNoProgress) continue;
      sink_.Warn(StrCat("the last save makes no progress", Lost()));
      const Interruptible leave(process_);
      while (!saved_.load()) std::this_thread::sleep_for(kAgentTick);
    }
    process_.SetLastWords("");
  }

  bool stopping() const { return sink_.stop_requested() || asked_to_stop_.load(); }

  /// Path of the folder's pointer file, which names its
  /// newest checkpoint; nullopt if there is none yet.
  std::optional<std::string> PointerPath() const {
    const std::string& folder = options_.input.source_paths.front();
    const Result<std::string_view> pointer = checkpoints::PointerIn(folder);
    if (!pointer || pointer->empty()) return std::nullopt;
    return folder + "/" + std::string(*pointer);
  }

  /// Returns the identity of `latest`; nullopt if it is missing or incomplete.
  std::optional<os::Identity> Latest() const {
    const std::optional<std::string> path = PointerPath();
    if (!path) return std::nullopt;
    const auto file = os::File::OpenRead(*path);
    if (!file) return std::nullopt;
    const auto identity = file->Stat();
    if (!identity || identity->bytes == 0) return std::nullopt;
    return *identity;
  }

  /// Returns the store's last restore; sequence 0 if there was none yet.
  Result<RecoveryFile> LastRestore() const {
    const std::string& path = agent_.options().save.store;
    SW_TRY_ASSIGN(const bool there, Store::IsStore(path));
    if (!there) return RecoveryFile();
    SW_TRY_ASSIGN(const Store store, Store::Open(path));
    SW_TRY_ASSIGN(const std::optional<RecoveryFile> last, store.LastRecoveryFile());
    return last.value_or(RecoveryFile());
  }

  /// Confirms a pending restore as the restart of the training that starts with this
  /// agent, unless the store has newer checkpoints that no restore has rolled back.
  Status ConfirmRestore() const {
    const std::string& path = agent_.options().save.store;
    SW_TRY_ASSIGN(const bool there, Store::IsStore(path));
    if (!there) return {};
    SW_TRY_ASSIGN(const Store store, Store::Open(path));
    SW_TRY_ASSIGN(std::optional<RecoveryRecord> pending, store.Pending());
    if (!pending) return {};
    SW_TRY_ASSIGN(os::Lock lock,
                  store.LockForWriting("pec-save agent", agent_.options().save.take_over));
    SW_TRY_ASSIGN(pending, store.Pending());
    SW_TRY_ASSIGN(const std::vector<StoredCheckpoint> checkpoints, store.List());
    if (pending && NewestIteration(checkpoints) <= pending->resume) {
      SW_TRY(store.ConfirmPending());
    }
    return lock.Release();
  }

  /// Takes a snapshot of the checkpoint that `latest` names, unless a new restore came after it
  /// and has rolled it back. Compares clocks only if the agent did not see their order itself.
  Result<std::uint64_t> TakeLatest(const os::Identity& latest, const RecoveryFile& restore,
                                   std::int64_t not_before_ns) {
    if (restore.sequence != seen_restore_ && latest.mtime_ns < restore.written_ns) {
      return Fail(Errc::kMismatch, PointerPath().value_or(options_.input.source_paths.front()),
                  ": written before recovery ", restore.sequence, " of ",
                  agent_.options().save.store,
                  ", so the restore may have rolled it back; if not, request the snapshot with "
                  "pec-save tell AGENT snapshot");
    }
    return Snapshot("", restore.sequence, not_before_ns, {});
  }

  /// When Watch tries again to read an incomplete checkpoint.
  enum class Try : std::uint8_t {
    kInTurn,  ///< after a pause
    kNow,
    kLast,  ///< no process writes any more, so this is the last try
  };

  /// Takes a snapshot if `latest` was written since the last call. The rank that writes
  /// it does not wait for the others, so an incomplete checkpoint is retried for a while.
  void Watch(Try attempt) {
    if (options_.copies_only) return;
    const std::lock_guard one(watch_mutex_);
    const std::optional<os::Identity> now = Latest();
    if (!now || now == seen_) return;
    if (now != tried_) {
      tried_ = now;
      next_try_ = Clock::now();
      give_up_ = Clock::now() + kSettle;
    }
    if (attempt == Try::kInTurn && Clock::now() < next_try_) return;
    // Files older than the previous `latest` belong to an earlier checkpoint
    // with the same tag, unless the clock was set back in between.
    const bool tells = seen_ && seen_->mtime_ns <= now->mtime_ns;
    const Result<RecoveryFile> restore = LastRestore();
    auto iteration = restore ? TakeLatest(*now, *restore, tells ? seen_->mtime_ns : 0)
                             : tl::unexpected<Error>(restore.error());
    if (restore) seen_restore_ = restore->sequence;
    if (iteration) {
      seen_ = now;
      return sink_.Note(StrCat("snapshot of iteration ", *iteration), 0);
    }
    const Errc code = iteration.error().code;
    const bool unfinished = code == Errc::kBadInput || code == Errc::kNotFound;
    next_try_ = Clock::now() + kAgentRetry;
    if (unfinished && attempt != Try::kLast && next_try_ < give_up_) return;
    seen_ = now;
    sink_.Warn(StrCat("snapshot: ", iteration.error().message));
  }

  /// \param known  the store's last recovery; a later one may
  ///        roll back the checkpoint while it is being opened
  Result<std::uint64_t> Snapshot(const std::string& tag, std::uint64_t known,
                                 std::int64_t not_before_ns, const Agent::Copied& copied,
                                 const FillSource& fill = {}) {
    if (done_.load()) return Fail(Errc::kStopped, "the agent is shutting down");
    if (options_.copies_only) {
      return Fail(Errc::kUsage, "an agent with --copies-only takes no snapshots");
    }
    convert::InputOptions input = options_.input;
    if (!tag.empty()) {
      for (std::string& root : input.source_paths) {
        SW_TRY_ASSIGN(root, os::JoinSafe(root, tag));
      }
    }
    input.has_payloads = !fill;
    const std::unique_ptr<comm::Comm> comm = comm::MakeSerialComm();
    SW_TRY_ASSIGN(const std::unique_ptr<convert::Input> opened,
                  convert::OpenInput(*comm, input, whole_));
    for (const checkpoints::SourceFile& file : opened->set.files) {
      if (file.identity.mtime_ns >= not_before_ns) continue;
      return Fail(Errc::kBadInput, file.name,
                  ": older than the previous checkpoint, so left from an earlier save of ",
                  opened->checkpoint.tag);
    }
    return agent_.Snapshot(*opened, known, whole_, copied, fill);
  }

  void PersistLoop() {
    Clock::time_point next{};
    while (!done_.load()) {
      if (agent_.wants_persist() && Clock::now() >= next) {
        const auto persisted = agent_.Persist(sink_);
        if (!persisted) {
          sink_.Warn(StrCat("persist: ", persisted.error().message));
          next = Clock::now() + kAgentRetry;
        } else if (*persisted) {
          sink_.Note(StrCat("persisted iteration ", **persisted), 0);
        }
      }
      std::this_thread::sleep_for(kAgentTick);
    }
  }

  /// Checks that the store does not keep masters or moments of all experts: it prevents replay.
  Status CheckReplay() const {
    const SaveRequest& save = options_.agent.save;
    Mask keep = save.keep.value_or(Mask{});
    SW_TRY_ASSIGN(const bool there, Store::IsStore(save.store));
    if (there) {
      SW_TRY_ASSIGN(const Store store, Store::Open(save.store));
      keep = store.head().keep;
    }
    for (const Component component : {Component::kMaster, Component::kMoments}) {
      if (!keep[static_cast<std::size_t>(component)]) continue;
      return Fail(Errc::kUnsupported, save.store, ": keeps ", Name(component),
                  " of all experts in each checkpoint, so the parts of older experts "
                  "have two iterations; --replay requires a store without --keep ",
                  Name(component));
    }
    return {};
  }

  /// Starts a replay as soon as all gradients for the newest snapshot were submitted.
  void ReplayLoop() {
    std::string told;
    Clock::time_point next{};
    while (!done_.load()) {
      std::this_thread::sleep_for(kAgentTick);
      const std::shared_ptr<const MemoryCheckpoint> newest = agent_.Newest();
      if (Clock::now() < next || !newest || !agent_.logs().AllAt(newest->manifest.iteration))
        continue;
      const Status done = agent_.Replay([this] { return done_.load(); });
      std::string wrong = done ? "" : done.error().message;
      if (!done) next = Clock::now() + kAgentRetry;
      if (wrong != told && !wrong.empty()) sink_.Warn(StrCat("replay in memory: ", wrong));
      told = std::move(wrong);
    }
  }

  /// Returns the addresses to listen at. An agent with a plan also listens at its own address in
  /// the plan, unless it is given the same port at another name of the host.
  Result<std::vector<os::Address>> Listened() const {
    std::vector<os::Address> addresses;
    for (const std::string& text : options_.listen) {
      SW_TRY_ASSIGN(os::Address address, os::ParseAddress(text));
      addresses.push_back(std::move(address));
    }
    if (!plan_) return addresses;
    SW_TRY_ASSIGN(os::Address own, os::ParseAddress(plan_->address()));
    const bool there = std::ranges::any_of(addresses, [&](const os::Address& one) {
      return one.is_local() ? one == own : !own.is_local() && one.port == own.port;
    });
    if (!there) addresses.push_back(std::move(own));
    return addresses;
  }

  /// Sets the peers of the flags or of the plan.
  Status SetPeers() {
    std::vector<PeerPlace> peers;
    for (const std::string& address : options_.peers) peers.push_back({address, "", 0});
    return copies_.Set(plan_ ? plan_->Peers() : peers);
  }

  /// Takes a new plan, if there is one.
  void FollowPlan() {
    if (!plan_ || !plan_->Look(sink_)) return;
    if (const Status set = SetPeers(); !set) return sink_.Warn(set.error().message);
    sink_.Note(StrCat("plan: version ", plan_->state().version, ", copies go to ",
                      Plural(copies_.statuses().size(), "agent")),
               0);
  }

  /// Persists all complete snapshots, then one that is being taken.
  Status PersistLast() {
    SW_TRY(PersistFilled());
    agent_.WaitForSnapshot();
    return PersistFilled();
  }

  /// Persists all complete snapshots. Waits for a store that another
  /// process is writing to, or with an unmounted file system.
  Status PersistFilled() {
    const Clock::time_point start = Clock::now();
    while (agent_.wants_persist()) {
      const auto persisted = agent_.Persist(sink_);
      if (persisted) continue;
      if (persisted.error().code == Errc::kMismatch) {
        // A restore may have rolled back the snapshot in between.
        SW_TRY(agent_.CatchUp());
        if (!agent_.wants_persist()) break;
      }
      const Errc code = persisted.error().code;
      const Clock::duration patience = code == Errc::kBusy       ? kPatience
                                       : code == Errc::kNotFound ? kNoProgress
                                                                 : Clock::duration::zero();
      if (Clock::now() - start >= patience) {
        return tl::unexpected<Error>(persisted.error());
      }
      std::this_thread::sleep_for(kAgentRetry);
    }
    return {};
  }

  const AgentRunOptions& options_;
  Sink& process_;
  QuietSink sink_;
  const std::atomic<bool> never_ = false;
  QuietSink whole_;  // for snapshots: one in progress, or the last, is not stopped
  Agent agent_;
  AgentCommands commands_;
  const std::unique_ptr<PlanFile> plan_;  // null without --plan
  PeerCopies copies_;
  std::mutex watch_mutex_;
  /// A `latest` from before the start of the agent may be of work that was rolled back.
  std::optional<os::Identity> seen_;
  std::optional<os::Identity> tried_;  // incomplete so far
  std::uint64_t seen_restore_ = 0;     // the last one at the time `latest` was read
  Clock::time_point next_try_{};
  Clock::time_point give_up_{};
  std::atomic<bool> asked_to_stop_ = false;
  std::atomic<bool> done_ = false;
  std::atomic<bool> saved_ = false;
  Clock::time_point seen_trainer_ = Clock::now();
  Clock::time_point next_look_{};
  bool look_failed_ = false;
  std::promise<Status> ended_;
  std::shared_future<Status> end_ = ended_.get_future();
};

}  // namespace

Result<AgentStatus> RunAgent(const AgentRunOptions& options, Sink& sink) {
  return Runner(options, sink).Run();
}

}  // namespace shardwright::partial
