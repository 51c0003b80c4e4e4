// Snapshots: modules of a checkpoint folder into memory.

#include <algorithm>
#include <utility>

#include <tbb/enumerable_thread_specific.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include "comm/comm.h"
#include "exec/first_error.h"
#include "exec/gather.h"
#include "format/zip/crc32.h"
#include "pec/memory.h"
#include "pec/module_reads.h"
#include "pec/write_blobs.h"

namespace shardwright::pec {
namespace {

struct Wanted {
  std::uint32_t module = 0;
  Component component = Component::kWeights;
};

std::vector<Wanted> ListWanted(const SnapshotChoice& choice) {
  const Model& model = choice.model;
  std::vector<bool> selected(model.modules.size(), false);
  for (std::size_t m = 0; m < choice.selection.size(); ++m) {
    for (const std::uint32_t e : choice.selection[m]) selected[model.expert_module(m, e)] = true;
  }
  std::vector<Wanted> wanted;
  for (std::uint32_t i = 0; i < model.modules.size(); ++i) {
    for (const Component component : kAllComponents) {
      const bool always =
          !model.modules[i].id.is_expert() || choice.keep[static_cast<std::size_t>(component)];
      if ((always || selected[i]) && model.modules[i].part(component).bytes > 0) {
        wanted.push_back({i, component});
      }
    }
  }
  return wanted;
}

/// Gathers the files of a plan's target into memory.
class Taker {
 public:
  Taker(const plan::Plan& plan, exec::ByteSource& source, const std::shared_ptr<MemoryPool>& pool,
        const SaveRequest& options, Sink& sink)
      : plan_(plan),
        source_(source),
        pool_(pool),
        options_(options),
        sink_(sink),
        sums_(plan.source().members.size()),
        blobs_(plan.target().files.size()) {}

  Result<std::vector<BlobPtr>> Go() {
    exec::FirstError error;
    tbb::task_arena arena(static_cast<int>(options_.threads));
    arena.execute([&] {
      tbb::parallel_for(std::size_t{0}, blobs_.size(), [&](std::size_t file) {
        if (error.failed()) return;
        if (sink_.stop_requested()) {
          return error.Set(~std::uint64_t{0}, {Errc::kStopped, "stopped on request", 0, -1});
        }
        if (Status status = TakeOne(static_cast<std::uint32_t>(file)); !status) {
          error.Set(file, std::move(status).error());
        }
      });
    });
    SW_TRY(error.Take());
    if (options_.verify != exec::Verify::kNone) {
      SW_TRY(VerifyMembers(*comm::MakeSerialComm(), plan_, sums_, source_, options_.threads));
    }
    return std::move(blobs_);
  }

 private:
  Status TakeOne(std::uint32_t index) {
    const plan::OutputFile& file = plan_.target().files[index];
    auto taken = pool_->Take(file.bytes);
    if (!taken) return Within(file.path, std::move(taken).error());
    std::unique_ptr<std::byte[]> buffer = *std::move(taken);
    // Owned by the blob at once, so that an error gives the memory back.
    std::vector<UnitSum> sums;
    std::vector<std::uint32_t> unit_bytes;
    Status status = Gather(index, buffer.get(), &sums, &unit_bytes);
    if (!status) {
      pool_->Give(std::move(buffer), file.bytes);
      return status;
    }
    const BlobRef ref = Summarize(sums);
    blobs_[index] =
        std::make_shared<const MemoryBlob>(pool_, std::move(buffer), ref, std::move(unit_bytes));
    return {};
  }

  Status Gather(std::uint32_t index, std::byte* to, std::vector<UnitSum>* sums,
                std::vector<std::uint32_t>* unit_bytes) {
    const plan::OutputFile& file = plan_.target().files[index];
    const bool note = options_.verify != exec::Verify::kNone;
    exec::Workspace& workspace = workspaces_.local();
    for (std::uint32_t p = 0; p < file.payloads.size(); ++p) {
      const plan::Payload& payload = file.payloads[p];
      const std::uint64_t first = plan_.first_unit(index, p);
      std::uint32_t crc = 0;
      for (std::uint64_t at = 0; at < payload.bytes; at += plan::kUnitBytes) {
        const plan::Unit unit = plan_.unit(first + at / plan::kUnitBytes);
        const std::span<std::byte> bytes(to + payload.offset + at, unit.bytes);
        std::vector<exec::Share> shares;
        SW_TRY(exec::GatherUnitInto(plan_, unit, source_, bytes, &workspace,
                                    note ? &shares : nullptr));
        sums_.Add(shares);
        const std::uint32_t own = workspace.crc32 ? *workspace.crc32 : zip::Crc32(bytes);
        sums->push_back({own, exec::DigestOf(bytes), unit.bytes});
        unit_bytes->push_back(static_cast<std::uint32_t>(unit.bytes));
        crc ^= zip::Crc32Share(own, payload.bytes - at - unit.bytes);
      }
      // Passed members are whole payloads, and count towards no plan.
      if (!note || payload.kind != plan::Payload::Kind::kMember) continue;
      const auto& expected = plan_.source().members[payload.member].crc32;
      if (expected && *expected != crc) {
        return tl::unexpected<Error>(exec::WrongChecksum(plan_, payload.member, crc));
      }
    }
    return {};
  }

  const plan::Plan& plan_;
  exec::ByteSource& source_;
  const std::shared_ptr<MemoryPool>& pool_;
  const SaveRequest& options_;
  Sink& sink_;
  exec::SourceSums sums_;
  tbb::enumerable_thread_specific<exec::Workspace> workspaces_;
  std::vector<BlobPtr> blobs_;
};

}  // namespace

std::uint64_t BytesToTake(const ucp::Input& input, const SnapshotChoice& choice) {
  std::uint64_t bytes = 0;
  for (const Wanted& one : ListWanted(choice)) {
    bytes += choice.model.modules[one.module].part(one.component).bytes;
  }
  for (const std::uint32_t member : PassedMembers(input.checkpoint)) {
    bytes += input.checkpoint.map.members[member].bytes;
  }
  return bytes;
}

Result<Taken> TakeModules(ucp::Input& input, const SnapshotChoice& choice,
                          const std::shared_ptr<MemoryPool>& pool, const SaveRequest& options,
                          Sink& sink) {
  Taken taken;
  taken.bytes = BytesToTake(input, choice);
  SW_TRY(pool->CheckRoom(taken.bytes, "snapshot of iteration " + std::to_string(choice.iteration)));
  plan::Target target;
  const std::vector<Wanted> wanted = ListWanted(choice);
  for (const Wanted& one : wanted) {
    AddModuleFile(input.checkpoint.map, choice.model.modules[one.module], one.component, &target);
  }
  const std::vector<std::uint32_t> passed = PassedMembers(input.checkpoint);
  if (!passed.empty()) AddPassedFile(input.checkpoint.map, passed, &target);
  SW_TRY_ASSIGN(const plan::Plan plan, plan::Plan::Make(input.checkpoint.map, target));
  SW_TRY_ASSIGN(std::vector<BlobPtr> blobs, Taker(plan, *input.bytes, pool, options, sink).Go());
  taken.modules.resize(choice.model.modules.size());
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    taken.modules[wanted[i].module][static_cast<std::size_t>(wanted[i].component)] =
        std::move(blobs[i]);
  }
  if (!passed.empty()) taken.passed = std::move(blobs.back());
  return taken;
}

}  // namespace shardwright::pec
