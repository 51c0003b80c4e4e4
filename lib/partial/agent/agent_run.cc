// SPDX-License-Identifier: Apache-2.0
#include "partial/agent/agent_run.h"

#include <algorithm>
#include <chrono>
#include <ctime>
#include <functional>
#include <future>
#include <list>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "checkpoints/open_source.h"
#include "partial/agent/agent_client.h"
#include "partial/agent/agent_server.h"
#include "partial/agent/quiet_sink.h"
#include "partial/store/store.h"
#include "support/base/limits.h"
#include "support/base/system.h"
#include "support/comm/comm.h"
#include "support/os/dir.h"
#include "support/os/fault.h"
#include "support/os/file.h"
#include "support/os/lock.h"

namespace shardwright::partial {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kTick(50);
constexpr std::chrono::milliseconds kRetry(1000);
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

class Runner {
 public:
  Runner(const AgentRunOptions& options, Sink& sink)
      : options_(options),
        process_(sink),
        sink_(sink),
        whole_(sink, &never_),
        agent_(options.agent),
        seen_(Latest()) {
    if (const auto last = LastRestore()) seen_restore_ = last->sequence;
    commands_.self = {Hello::Role::kAgent, options.name, {}};
    commands_.checkpoints = os::RealPath(options.input.source_paths.front());
    commands_.snapshot = [this](const std::string& tag, const Agent::Copied& copied,
                                const FillSource& fill) -> Result<std::uint64_t> {
      SW_TRY_ASSIGN(const RecoveryFile restore, LastRestore());
      return Snapshot(tag, restore.sequence, 0, copied, fill);
    };
    commands_.flush = [this] {
      Watch(true);
      return agent_.Flush(sink_);
    };
    commands_.peers = [this] {
      const std::lock_guard lock(peers_mutex_);
      return peers_;
    };
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
    if (options_.agent.replay) SW_TRY(CheckReplay());
    if (const Status confirmed = ConfirmRestore(); !confirmed)
      sink_.Warn(confirmed.error().message);
    if (const Status seen = agent_.CatchUp(); !seen) sink_.Warn(seen.error().message);
    std::vector<os::Address> peers;
    for (const std::string& text : options_.peers) {
      SW_TRY_ASSIGN(os::Address address, os::ParseAddress(text));
      address.trusted_user = options_.trusted_user;
      const std::lock_guard lock(peers_mutex_);
      peers_.emplace_back().address = os::ToText(address);
      peers.push_back(std::move(address));
    }
    for (const std::string& text : options_.listen) {
      SW_TRY_ASSIGN(const os::Address address, os::ParseAddress(text));
      SW_TRY_ASSIGN(os::Listener listener, os::Listener::Open(address));
      servers->emplace_back(agent_, commands_, std::move(listener), sink_, options_.key);
      sink_.Note(StrCat("listening on ", os::ToText(servers->back().address())), 0);
    }
    std::vector<std::thread> threads;
    threads.emplace_back([this] { PersistLoop(); });
    std::thread watch([this] { WatchLastSave(); });
    if (options_.agent.replay) threads.emplace_back([this] { ReplayLoop(); });
    for (std::size_t i = 0; i < peers.size(); ++i) {
      threads.emplace_back([this, i, peer = peers[i]] { PushLoop(i, peer); });
    }
    while (!stopping()) {
      Watch(false);
      EndIfAbandoned();
      std::this_thread::sleep_for(kTick);
    }
    const Limiter::Hurry hurry(agent_.limiter());
    Watch(true);  // a `latest` that was written before the stop
    done_.store(true);
    // Persist first: joining the threads may outlast the caller's kill timeout.
    Status durable = PersistLast();
    for (std::thread& thread : threads) thread.join();
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
    while (!stopping() && !saved_.load()) std::this_thread::sleep_for(kTick);
    std::uint64_t calls = os::CallsDone();
    std::clock_t used = std::clock();
    Clock::time_point since = Clock::now();
    while (!saved_.load()) {
      const std::string lost = Lost();
      process_.SetLastWords(lost.empty() ? "" : "ended by a second signal" + lost);
      std::this_thread::sleep_for(kTick);
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
      while (!saved_.load()) std::this_thread::sleep_for(kTick);
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

  /// Takes a snapshot if `latest` was written since the last call. The rank that writes
  /// it does not wait for the others, so an incomplete checkpoint is retried for a while.
  /// \param last_try  no process writes any more
  void Watch(bool last_try) {
    if (options_.copies_only) return;
    const std::lock_guard one(watch_mutex_);
    const std::optional<os::Identity> now = Latest();
    if (!now || now == seen_) return;
    if (now != tried_) {
      tried_ = now;
      next_try_ = Clock::now();
      give_up_ = Clock::now() + kSettle;
    }
    if (!last_try && Clock::now() < next_try_) return;
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
    next_try_ = Clock::now() + kRetry;
    if (unfinished && !last_try && next_try_ < give_up_) return;
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
          next = Clock::now() + kRetry;
        } else if (*persisted) {
          sink_.Note(StrCat("persisted iteration ", **persisted), 0);
        }
      }
      std::this_thread::sleep_for(kTick);
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
      std::this_thread::sleep_for(kTick);
      const std::shared_ptr<const MemoryCheckpoint> newest = agent_.Newest();
      if (Clock::now() < next || !newest || !agent_.logs().AllAt(newest->manifest.iteration))
        continue;
      const Status done = agent_.Replay([this] { return done_.load(); });
      std::string wrong = done ? "" : done.error().message;
      if (!done) next = Clock::now() + kRetry;
      if (wrong != told && !wrong.empty()) sink_.Warn(StrCat("replay in memory: ", wrong));
      told = std::move(wrong);
    }
  }

  /// Checks that two peers are two agents, because a proxy could lead both connections to one.
  Status ExpectOther(std::size_t peer, const Hello& agent) {
    const std::lock_guard lock(peers_mutex_);
    peers_[peer].agent = agent.name;
    std::erase_if(peers_of_, [&](const auto& one) { return one.second == peer; });
    const auto [known, fresh] = peers_of_.try_emplace(agent.id, peer);
    if (fresh) return {};
    return Fail(Errc::kMismatch, peers_[peer].address, ": the same agent as at ",
                peers_[known->second].address, ", \"", agent.name,
                "\"; give each peer once with --peer");
  }

  /// Copies the newest snapshot to a peer and records the state of the copy.
  /// \returns the copied snapshot; null if there is none any more
  Result<std::shared_ptr<const MemoryCheckpoint>> PushNewest(std::size_t peer,
                                                             AgentClient& client) {
    // The peer may have been away for long, and a restore may have rolled back its copy.
    SW_TRY(agent_.CatchUp());
    std::shared_ptr<const MemoryCheckpoint> newest = agent_.Newest();
    if (!newest) return newest;
    const std::uint64_t iteration = newest->manifest.iteration;
    {
      const std::lock_guard lock(peers_mutex_);
      peers_[peer].copying = iteration;
    }
    const Clock::time_point start = Clock::now();
    const Result<std::uint64_t> sent = client.Push(*newest, agent_.limiter());
    const std::chrono::duration<double> taken = Clock::now() - start;
    const std::lock_guard lock(peers_mutex_);
    peers_[peer].copying.reset();
    if (!sent) return tl::unexpected<Error>(sent.error());
    peers_[peer].iteration = iteration;
    if (*sent > 0) peers_[peer].copied_seconds += taken.count();
    peers_[peer].copied_bytes += *sent;
    peers_[peer].failures = 0;
    peers_[peer].last_error.clear();
    sink_.Note(
        StrCat("copied iteration ", iteration, " to ", peers_[peer].address, ": ", *sent, " bytes"),
        0);
    return newest;
  }

  void PushLoop(std::size_t peer, const os::Address& address) {
    AgentClient client(
        address, options_.key, [this] { return done_.load(); }, kAgentPatience, commands_.self,
        [this, peer](const Hello& agent) { return ExpectOther(peer, agent); });
    std::shared_ptr<const MemoryCheckpoint> last;
    Clock::time_point next{};
    while (!done_.load()) {
      std::this_thread::sleep_for(kTick);
      const std::shared_ptr<const MemoryCheckpoint> newest = agent_.Newest();
      if (!newest || newest == last || Clock::now() < next) continue;
      auto sent = PushNewest(peer, client);
      if (sent) {
        if (*sent) last = *std::move(sent);
        continue;
      }
      if (done_.load()) return;
      sink_.Warn(StrCat("copy to ", os::ToText(address), ": ", sent.error().message));
      const std::lock_guard lock(peers_mutex_);
      ++peers_[peer].failures;
      peers_[peer].last_error = sent.error().message;
      next = Clock::now() + kRetry;
    }
  }

  /// Persists all complete snapshots. Waits for a store that another
  /// process is writing to, or with an unmounted file system.
  Status PersistLast() {
    const Clock::time_point start = Clock::now();
    agent_.WaitForSnapshot();
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
      std::this_thread::sleep_for(kRetry);
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
  std::mutex watch_mutex_;
  /// A `latest` from before the start of the agent may be of work that was rolled back.
  std::optional<os::Identity> seen_;
  std::optional<os::Identity> tried_;  // incomplete so far
  std::uint64_t seen_restore_ = 0;     // the last one at the time `latest` was read
  Clock::time_point next_try_{};
  Clock::time_point give_up_{};
  std::mutex peers_mutex_;
  std::vector<PeerStatus> peers_;
  std::map<std::string, std::size_t> peers_of_;  // indices of peers_ by agent id
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
