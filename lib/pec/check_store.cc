#include "pec/check_store.h"

#include <map>
#include <optional>
#include <utility>

#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include "dialect/dialect.h"
#include "pec/modules.h"
#include "pec/read_blobs.h"
#include "pec/store.h"

namespace shardwright::pec {
namespace {

/// A blob to look at, once however often it is referred to.
struct Task {
  BlobRef ref;
  std::string what;  ///< of the first checkpoint that has it
  std::vector<std::uint64_t> payloads;
  std::string error;
};

using Tasks = std::map<std::pair<exec::Digest, bool>, Task>;

void Add(const BlobRef& ref, const std::string& what, std::vector<std::uint64_t> payloads,
         Tasks* tasks) {
  tasks->try_emplace({ref.digest, ref.zstd}, Task{ref, what, std::move(payloads), ""});
}

/// Lists the blobs of one checkpoint.
Status AddCheckpoint(const Store& store, const StoredCheckpoint& checkpoint,
                     const dialect::Patterns& patterns, Tasks* tasks) {
  SW_TRY_ASSIGN(const Manifest manifest, store.ReadManifest(checkpoint));
  SW_TRY_ASSIGN(const dialect::SourceSet set, store.ReadCatalogue(manifest));
  SW_TRY_ASSIGN(const dialect::Checkpoint source, dialect::ReadCheckpoint(set, patterns));
  SW_TRY_ASSIGN(const Model model, DescribeModel(source));
  const std::string of = " of iteration ";
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
      Add(held->blob,
          manifest.names[i] + " " + std::string(Name(component)) + of +
              std::to_string(held->version),
          std::move(payloads), tasks);
    }
  }
  if (manifest.passed) {
    std::vector<std::uint64_t> payloads;
    for (const std::uint32_t member : PassedMembers(source)) {
      payloads.push_back(source.map.members[member].bytes);
    }
    Add(*manifest.passed, "client state" + of + std::to_string(manifest.iteration),
        std::move(payloads), tasks);
  }
  return {};
}

std::string Joined(const std::vector<std::string>& lines) {
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

}  // namespace

Result<StoreCheck> CheckStore(comm::Comm& comm, const std::string& path,
                              const dialect::Patterns& patterns, unsigned threads, Sink& sink) {
  sink.Pass("list");
  StoreCheck report;
  std::optional<Store> store;
  Tasks tasks;
  std::vector<std::string> texts;  // manifests and catalogues that are wrong
  const auto list = [&]() -> Status {
    SW_TRY_ASSIGN(Store opened, Store::Open(path));
    store.emplace(std::move(opened));
    SW_TRY_ASSIGN(const std::vector<StoredCheckpoint> checkpoints, store->List());
    report.checkpoints = checkpoints.size();
    for (const StoredCheckpoint& one : checkpoints) {
      const Status added = AddCheckpoint(*store, one, patterns, &tasks);
      if (!added) texts.push_back(added.error().message);
    }
    return {};
  };
  SW_TRY(comm.Agree(list()));
  sink.Pass("check");
  std::vector<Task*> mine;
  std::size_t index = 0;
  for (auto& [key, task] : tasks) {
    report.bytes += task.ref.bytes;
    const auto rank = static_cast<int>(index++ % static_cast<std::size_t>(comm.size()));
    if (rank == comm.rank()) mine.push_back(&task);
  }
  report.blobs = tasks.size();
  tbb::task_arena arena(static_cast<int>(threads));
  arena.execute([&] {
    tbb::parallel_for(std::size_t{0}, mine.size(), [&](std::size_t i) {
      if (sink.stop_requested()) return;
      const Status good =
          VerifyBlob(store->BlobPath(mine[i]->ref), mine[i]->ref, mine[i]->payloads);
      if (!good) mine[i]->error = good.error().message + " (" + mine[i]->what + ")";
    });
  });
  SW_TRY(comm.Agree(sink.stop_requested() ? Status(Fail(Errc::kStopped, "stopped on request"))
                                          : Status()));
  std::vector<std::string> damaged;
  for (const Task* task : mine) {
    if (!task->error.empty()) damaged.push_back(task->error);
  }
  const std::string text = Joined(damaged);
  SW_TRY_ASSIGN(const std::vector<comm::Bytes> parts,
                comm.AllGather(std::as_bytes(std::span(text))));
  report.damaged = std::move(texts);
  for (const comm::Bytes& part : parts) {
    const std::vector<std::string> lines =
        Split({reinterpret_cast<const char*>(part.data()), part.size()});
    report.damaged.insert(report.damaged.end(), lines.begin(), lines.end());
  }
  if (comm.rank() == 0) sink.AddRead(report.bytes, report.blobs);
  return report;
}

}  // namespace shardwright::pec
