// SPDX-License-Identifier: Apache-2.0
#include "partial/store/check_store.h"

#include <algorithm>
#include <cerrno>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include <tbb/task_arena.h>

#include "checkpoints/registry.h"
#include "engine/exec/for_each.h"
#include "partial/store/modules.h"
#include "partial/store/read_blobs.h"
#include "partial/store/store.h"

namespace shardwright::partial {
namespace {

/// A blob to verify once, for all checkpoints that refer to it.
struct Task {
  DamagedBlob blob;  ///< `path`, `may_be_intact` and `line` are set only if it is damaged
  std::vector<std::uint64_t> payloads;
  std::vector<std::size_t> users;  ///< indexes of checkpoints that refer to it, ascending
};

using Tasks = std::map<std::pair<exec::Digest, bool>, Task>;

void Add(DamagedBlob blob, const BlobPlace& place, std::vector<std::uint64_t> payloads,
         std::size_t user, Tasks* tasks) {
  const auto [found, is_new] = tasks->try_emplace({blob.ref.digest, blob.ref.zstd});
  Task& task = found->second;
  if (is_new) task = Task{std::move(blob), std::move(payloads), {}};
  task.blob.places.insert(place);
  if (task.users.empty() || task.users.back() != user) task.users.push_back(user);
}

/// Lists the blobs of one checkpoint. \param user  index of the checkpoint
Status AddCheckpoint(const Store& store, const StoredCheckpoint& checkpoint, std::size_t user,
                     const checkpoints::Patterns& patterns, Tasks* tasks) {
  SW_TRY_ASSIGN(const Manifest manifest, store.ReadManifest(checkpoint));
  SW_TRY_ASSIGN(const checkpoints::SourceSet set, store.ReadCatalogue(manifest));
  SW_TRY_ASSIGN(const checkpoints::Checkpoint source, checkpoints::ReadCheckpoint(set, patterns));
  SW_TRY_ASSIGN(const Model model, DescribeModel(source));
  for (std::size_t i = 0; i < manifest.modules.size(); ++i) {
    for (const Component component : kAllComponents) {
      const auto& held = manifest.modules[i][static_cast<std::size_t>(component)];
      if (!held) continue;
      std::vector<std::uint64_t> payloads;
      if (i < model.modules.size()) {
        for (const ModuleTensor& one : model.modules[i].part(component).tensors) {
          payloads.push_back(one.bytes);
        }
      }
      DamagedBlob blob;
      blob.ref = held->blob;
      blob.module = manifest.names[i];
      blob.component = Name(component);
      blob.iteration = held->version;
      const BlobPlace place{static_cast<std::uint32_t>(i), component};
      Add(std::move(blob), place, std::move(payloads), user, tasks);
    }
  }
  if (manifest.passed) {
    std::vector<std::uint64_t> payloads;
    for (const std::uint32_t member : PassedMembers(source)) {
      payloads.push_back(source.map.members[member].bytes);
    }
    DamagedBlob blob;
    blob.ref = *manifest.passed;
    blob.module = "client state";
    blob.iteration = manifest.iteration;
    Add(std::move(blob), BlobPlace(), std::move(payloads), user, tasks);
  }
  return {};
}

std::string Lines(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + '\n';
  return text;
}

std::vector<std::string> Split(std::string_view text) {
  std::vector<std::string> lines;
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    lines.emplace_back(text.substr(0, end));
    text.remove_prefix(end + 1);
  }
  return lines;
}

/// Runs a check: its passes in order, with their shared state. Garbage may be collected
/// meanwhile. A collection removes a manifest before anything that only it refers to.
/// So a missing file is damage if a manifest that refers to it still exists afterwards.
class Checking {
 public:
  Checking(comm::Comm& comm, const checkpoints::Patterns& patterns, unsigned threads, Sink& sink)
      : comm_(comm), patterns_(patterns), threads_(threads), sink_(sink) {}

  Result<StoreCheck> Run(const std::string& path) {
    sink_.Pass("list");
    SW_TRY(List(path));
    sink_.Pass("read");
    ReadTexts();
    ReadTokens();
    sink_.Pass("check");
    CheckBlobs();
    SW_TRY(comm_.Agree(sink_.stop_requested() ? Status(Fail(Errc::kStopped, "stopped on request"))
                                              : Status()));
    SW_TRY(FindGone());
    return Report();
  }

 private:
  /// Collective. The root lists for all ranks, because a save or a collection may end meanwhile.
  Status List(const std::string& path) {
    const auto open = [&]() -> Status {
      SW_TRY_ASSIGN(Store opened, Store::Open(path));
      store_.emplace(std::move(opened));
      return {};
    };
    SW_TRY(comm_.Agree(open()));
    const auto list = [&]() -> Result<std::string> {
      SW_TRY_ASSIGN(const std::vector<StoredCheckpoint> found, store_->List());
      std::string text;
      for (const StoredCheckpoint& one : found) {
        text += std::to_string(one.sequence) + " " + std::to_string(one.iteration) + '\n';
      }
      return text;
    };
    SW_TRY_ASSIGN(const std::string text, comm_.OnRootText(list));
    for (const std::string& line : Split(text)) {
      const std::size_t space = line.find(' ');
      checkpoints_.push_back({std::stoull(line), std::stoull(line.substr(space)), false});
    }
    return {};
  }

  void ReadTexts() {
    texts_.resize(checkpoints_.size());
    for (std::size_t i = 0; i < checkpoints_.size(); ++i) {
      const Status added = AddCheckpoint(*store_, checkpoints_[i], i, patterns_, &tasks_);
      if (!added) texts_[i] = added.error().message;
    }
    // By digest, not by index: ranks may have read other checkpoints before a collection.
    for (auto& [key, task] : tasks_) {
      const int rank = key.first[0] % comm_.size();
      if (rank == comm_.rank()) mine_.push_back(&task);
    }
  }

  /// Reads token records, which outlive their checkpoint if a later record continues them.
  void ReadTokens() {
    const auto sequences = store_->ListTokens();
    if (!sequences) {
      tokens_.emplace_back(0, sequences.error().message);
      return;
    }
    for (const std::uint64_t sequence : *sequences) {
      const auto record = store_->ReadTokens(sequence);
      if (!record) tokens_.emplace_back(sequence, record.error().message);
      if (!record || record->sums.empty()) continue;
      const auto of = std::find_if(checkpoints_.begin(), checkpoints_.end(),
                                   [&](const auto& one) { return one.sequence == sequence; });
      const std::uint64_t last = record->sums.back().iteration;
      if (of == checkpoints_.end() || of->iteration == last) continue;
      tokens_.emplace_back(
          sequence, StrCat(store_->TokensPath(sequence), ": expected tokens up to iteration ",
                           of->iteration, ", found tokens up to iteration ", last));
    }
  }

  /// Returns the damage of token records that still exist.
  std::vector<std::string> DamagedTokens() const {
    std::vector<std::string> lines;
    for (const auto& [sequence, error] : tokens_) {
      if (sequence == 0 || store_->HasTokens(sequence).value_or(true)) lines.push_back(error);
    }
    return lines;
  }

  void CheckBlobs() {
    tbb::task_arena arena(exec::ArenaThreads(threads_));
    arena.execute([&] {
      exec::ParallelFor(mine_.size(), [&](std::size_t i) {
        if (sink_.stop_requested()) return;
        Task& task = *mine_[i];
        const BlobRef& ref = task.blob.ref;
        const Status good = VerifyBlob(store_->BlobPath(ref), ref, task.payloads);
        if (good || good.error().code != Errc::kNotFound) sink_.AddRead(ref.bytes, 1);
        if (!good) NoteDamage(good.error(), &task.blob);
      });
    });
  }

  void NoteDamage(const Error& error, DamagedBlob* blob) const {
    blob->path = store_->BlobPath(blob->ref);
    // A file that cannot be opened may be intact; EIO means that the content is lost.
    blob->may_be_intact = error.code != Errc::kBadInput && error.sys != EIO;
    blob->line = StrCat(error.message, " (", blob->module, blob->component.empty() ? "" : " ",
                        blob->component, " of iteration ", blob->iteration, ")");
  }

  /// Finds the checkpoints that were collected since they were listed. Collective.
  Status FindGone() {
    const auto look = [&]() -> Result<std::string> {
      std::string gone;
      for (std::size_t i = 0; i < checkpoints_.size(); ++i) {
        if (store_->IsGone(checkpoints_[i]))
          gone += std::to_string(checkpoints_[i].sequence) + '\n';
      }
      return gone;
    };
    SW_TRY_ASSIGN(const std::string text, comm_.OnRootText(look));
    const std::vector<std::string> lines = Split(text);
    for (const StoredCheckpoint& one : checkpoints_) {
      const bool gone =
          std::find(lines.begin(), lines.end(), std::to_string(one.sequence)) != lines.end();
      gone_.push_back(gone);
    }
    if (lines.empty() || lines.size() < checkpoints_.size()) return {};
    return comm_.Agree(Fail(Errc::kBusy, store_->path(), ": all ", lines.size(),
                            " checkpoints were removed while they were read; run the check again"));
  }

  bool IsNeeded(const Task& task) const {
    return std::any_of(task.users.begin(), task.users.end(),
                       [&](std::size_t user) { return !gone_[user]; });
  }

  /// Collective.
  Result<StoreCheck> Report() {
    StoreCheck report;
    std::vector<std::string> damaged = DamagedTokens();
    for (std::size_t i = 0; i < checkpoints_.size(); ++i) {
      report.collected += gone_[i] ? 1 : 0;
      if (!gone_[i] && !texts_[i].empty()) damaged.push_back(texts_[i]);
    }
    report.checkpoints = checkpoints_.size() - report.collected;
    for (const auto& [key, task] : tasks_) {
      if (!IsNeeded(task)) continue;
      ++report.blobs;
      report.bytes += task.blob.ref.bytes;
    }
    for (const Task* task : mine_) {
      const DamagedBlob& blob = task->blob;
      if (blob.line.empty() || !IsNeeded(*task)) continue;
      damaged.push_back(blob.line);
      report.damaged_blobs.push_back(blob);
    }
    const std::string text = Lines(damaged);
    SW_TRY_ASSIGN(const std::vector<comm::Bytes> parts,
                  comm_.AllGather(std::as_bytes(std::span(text))));
    std::set<std::string> seen;  // every rank reads all texts
    for (const comm::Bytes& part : parts) {
      for (std::string& line : Split({reinterpret_cast<const char*>(part.data()), part.size()})) {
        if (seen.insert(line).second) report.damaged.push_back(std::move(line));
      }
    }
    return report;
  }

  comm::Comm& comm_;
  const checkpoints::Patterns& patterns_;
  const unsigned threads_;
  Sink& sink_;
  std::optional<Store> store_;
  std::vector<StoredCheckpoint> checkpoints_;  // the same on every rank
  std::vector<std::string> texts_;             // by checkpoint: damage of its texts; empty: none
  std::vector<std::pair<std::uint64_t, std::string>> tokens_;  // sequence, damage
  std::vector<bool> gone_;                                     // by checkpoint
  Tasks tasks_;
  std::vector<Task*> mine_;  // for this rank
};

}  // namespace

Result<StoreCheck> CheckStore(comm::Comm& comm, const std::string& path,
                              const checkpoints::Patterns& patterns, unsigned threads, Sink& sink) {
  return Checking(comm, patterns, threads, sink).Run(path);
}

}  // namespace shardwright::partial
