// Snapshots: modules of a checkpoint folder into memory.

#include <utility>

#include <tbb/enumerable_thread_specific.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

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

class Taker final : public Taking {
 public:
  Taker(std::vector<Wanted> wanted, std::unique_ptr<const plan::Target> target, plan::Plan plan,
        const SnapshotChoice& choice, std::shared_ptr<MemoryPool> pool, const SaveRequest& options)
      : wanted_(std::move(wanted)),
        target_(std::move(target)),
        plan_(std::move(plan)),
        module_count_(choice.model.modules.size()),
        pool_(std::move(pool)),
        threads_(options.threads),
        note_(options.verify != exec::Verify::kNone),
        sums_(plan_.source().members.size()),
        copies_(plan_.target().files.size()),
        blobs_(copies_.size()) {}
  ~Taker() override {
    for (std::size_t i = 0; i < copies_.size(); ++i) {
      if (copies_[i]) pool_->Give(std::move(copies_[i]), plan_.target().files[i].bytes);
    }
  }

  Status CopyAll(exec::ByteSource& source, Sink& sink) {
    return ForAll([&](std::size_t i) -> Status {
      if (sink.stop_requested()) return Fail(Errc::kStopped, "stopped on request");
      const plan::OutputFile& file = plan_.target().files[i];
      auto taken = pool_->Take(file.bytes);
      if (!taken) return Within(file.path, std::move(taken).error());
      // Owned here at once, so that an error gives the memory back.
      copies_[i] = *std::move(taken);
      return ForUnits(i, [&](const plan::Unit& unit, std::span<std::byte> bytes) -> Status {
        std::vector<exec::Share> shares;
        SW_TRY(exec::CopyUnit(plan_, unit, source, bytes, &workspaces_.local(), Noted(&shares)));
        sums_.Add(shares);
        return {};
      });
    });
  }

  Result<Taken> Seal() override {
    SW_TRY(ForAll([&](std::size_t i) { return SealOne(i); }));
    SW_TRY(CompareSums());
    Taken taken;
    for (const plan::OutputFile& file : plan_.target().files) taken.bytes += file.bytes;
    taken.modules.resize(module_count_);
    for (std::size_t i = 0; i < wanted_.size(); ++i) {
      taken.modules[wanted_[i].module][static_cast<std::size_t>(wanted_[i].component)] =
          std::move(blobs_[i]);
    }
    if (blobs_.size() > wanted_.size()) taken.passed = std::move(blobs_.back());
    return taken;
  }

 private:
  /// Runs `work` for every blob. \returns the error of the first that has one
  template <class Work>
  Status ForAll(const Work& work) {
    exec::FirstError error;
    tbb::task_arena arena(static_cast<int>(threads_));
    arena.execute([&] {
      tbb::parallel_for(std::size_t{0}, copies_.size(), [&](std::size_t i) {
        if (error.failed()) return;
        if (Status status = work(i); !status) error.Set(i, std::move(status).error());
      });
    });
    return error.Take();
  }

  /// Runs `work` for every unit of a blob, in order.
  template <class Work>
  Status ForUnits(std::size_t blob, const Work& work) {
    const auto index = static_cast<std::uint32_t>(blob);
    const plan::OutputFile& file = plan_.target().files[index];
    for (std::uint32_t p = 0; p < file.payloads.size(); ++p) {
      const std::uint64_t first = plan_.first_unit(index, p);
      for (std::uint64_t at = 0; at < file.payloads[p].bytes; at += plan::kUnitBytes) {
        const plan::Unit unit = plan_.unit(first + at / plan::kUnitBytes);
        std::byte* to = copies_[blob].get() + file.payloads[p].offset + at;
        SW_TRY(work(unit, std::span(to, unit.bytes)));
      }
    }
    return {};
  }

  std::vector<exec::Share>* Noted(std::vector<exec::Share>* shares) const {
    return note_ ? shares : nullptr;
  }

  Status SealOne(std::size_t i) {
    const plan::OutputFile& file = plan_.target().files[i];
    std::vector<UnitSum> sums;
    std::vector<std::uint32_t> unit_bytes;
    std::vector<std::uint32_t> payload_crc(file.payloads.size(), 0);
    SW_TRY(ForUnits(i, [&](const plan::Unit& unit, std::span<std::byte> bytes) -> Status {
      std::vector<exec::Share> shares;
      const auto told = exec::SumUnit(plan_, unit, bytes, &workspaces_.local(), Noted(&shares));
      sums_.Add(shares);
      const std::uint32_t crc = told ? *told : zip::Crc32(bytes);
      sums.push_back({crc, exec::DigestOf(bytes), unit.bytes});
      unit_bytes.push_back(static_cast<std::uint32_t>(unit.bytes));
      const std::uint64_t behind = file.payloads[unit.payload].bytes - unit.first - unit.bytes;
      payload_crc[unit.payload] ^= zip::Crc32Share(crc, behind);
      return {};
    }));
    // Passed members are whole payloads, and count towards no plan.
    for (std::size_t p = 0; note_ && p < file.payloads.size(); ++p) {
      if (file.payloads[p].kind != plan::Payload::Kind::kMember) continue;
      SW_TRY(Compare(file.payloads[p].member, payload_crc[p]));
    }
    blobs_[i] = std::make_shared<const MemoryBlob>(pool_, std::move(copies_[i]), Summarize(sums),
                                                   std::move(unit_bytes));
    return {};
  }

  Status CompareSums() const {
    if (!note_) return {};
    const std::vector<layout::Member>& members = plan_.source().members;
    for (std::uint32_t m = 0; m < members.size(); ++m) {
      if (sums_.bytes(m) == 0 || sums_.bytes(m) != members[m].bytes) continue;
      SW_TRY(Compare(m, sums_.crc(m)));
    }
    return {};
  }

  Status Compare(std::uint32_t member, std::uint32_t found) const {
    const auto& expected = plan_.source().members[member].crc32;
    if (!expected || *expected == found) return {};
    return tl::unexpected<Error>(exec::WrongChecksum(plan_, member, found));
  }

  const std::vector<Wanted> wanted_;                  // the blobs; one of passed members may follow
  const std::unique_ptr<const plan::Target> target_;  // the plan's
  const plan::Plan plan_;
  const std::size_t module_count_;
  const std::shared_ptr<MemoryPool> pool_;
  const unsigned threads_;
  const bool note_;
  exec::SourceSums sums_;
  tbb::enumerable_thread_specific<exec::Workspace> workspaces_;
  std::vector<os::Buffer> copies_;
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

Result<std::unique_ptr<Taking>> Taking::Copy(ucp::Input& input, const SnapshotChoice& choice,
                                             const std::shared_ptr<MemoryPool>& pool,
                                             const SaveRequest& options, Sink& sink) {
  SW_TRY(pool->CheckRoom(BytesToTake(input, choice),
                         "snapshot of iteration " + std::to_string(choice.iteration)));
  auto target = std::make_unique<plan::Target>();
  std::vector<Wanted> wanted = ListWanted(choice);
  std::vector<std::uint32_t> tensors;
  for (const Wanted& one : wanted) {
    AddModuleFile(input.checkpoint.map, choice.model.modules[one.module], one.component,
                  target.get(), &tensors);
  }
  const std::vector<std::uint32_t> passed = PassedMembers(input.checkpoint);
  if (!passed.empty()) AddPassedFile(input.checkpoint.map, passed, target.get());
  SW_TRY_ASSIGN(plan::Plan plan, plan::Plan::Make(input.checkpoint.map, *target,
                                                  {input.checkpoint.proved, tensors}));
  auto taker = std::make_unique<Taker>(std::move(wanted), std::move(target), std::move(plan),
                                       choice, pool, options);
  SW_TRY(taker->CopyAll(*input.bytes, sink));
  return std::unique_ptr<Taking>(std::move(taker));
}

}  // namespace shardwright::pec
