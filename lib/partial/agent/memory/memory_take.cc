// SPDX-License-Identifier: Apache-2.0
// Snapshots: copies modules of a checkpoint folder into memory.

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include <tbb/task_arena.h>

#include "engine/exec/for_each.h"
#include "engine/exec/units.h"
#include "engine/exec/verify.h"
#include "partial/agent/memory/memory.h"
#include "partial/store/module_reads.h"
#include "partial/store/write_blobs.h"

namespace shardwright::partial {
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

/// Copies units into the memory of their blobs.
class SnapshotCopier final : public SnapshotCopy, private exec::UnitSink {
 public:
  SnapshotCopier(std::vector<Wanted> wanted, std::unique_ptr<const plan::Target> target,
                 plan::Plan plan, const SnapshotChoice& choice, std::shared_ptr<MemoryPool> pool,
                 const SaveRequest& options)
      : wanted_(std::move(wanted)),
        target_(std::move(target)),
        plan_(std::move(plan)),
        module_count_(choice.model.modules.size()),
        pool_(std::move(pool)),
        arena_(exec::ArenaThreads(options.threads)),
        note_(options.verify != exec::Verify::kNone),
        source_sums_(plan_.source().members.size()),
        units_(plan_.unit_count()),
        sums_(units_.size()),
        copies_(plan_.target().files.size()) {
    std::iota(units_.begin(), units_.end(), std::uint64_t{0});
  }
  ~SnapshotCopier() override {
    for (std::size_t i = 0; i < copies_.size(); ++i) {
      if (copies_[i]) pool_->Give(std::move(copies_[i]), plan_.target().files[i].bytes);
    }
  }

  /// Returns the byte ranges that CopyAll reads, by file and offset.
  std::vector<FileByteRange> Stretches(const checkpoints::SourceSet& set) const {
    struct Place {
      std::uint32_t file;
      std::uint64_t first;
      std::uint64_t last;
      auto operator<=>(const Place&) const = default;
    };
    std::vector<Place> places;
    plan::Program program;
    for (const std::uint64_t unit : units_) {
      plan_.Fill(plan_.unit(unit), &program);
      for (const plan::Read& read : program.reads) {
        const layout::Member& member = plan_.source().members[read.member];
        const std::uint64_t first = member.offset + read.offset;
        places.push_back({member.file, first, first + read.bytes});
      }
    }
    std::sort(places.begin(), places.end());
    std::vector<FileByteRange> out;
    std::uint32_t file = 0;
    for (const Place& place : places) {
      if (out.empty() || file != place.file || place.first > out.back().first + out.back().bytes) {
        out.push_back({set.files[place.file].name, place.first, 0});
      }
      file = place.file;
      out.back().bytes = std::max(out.back().bytes, place.last - out.back().first);
    }
    return out;
  }

  Status CopyAll(exec::ByteSource& source, Sink& sink) {
    for (std::size_t i = 0; i < copies_.size(); ++i) {
      const plan::OutputFile& file = plan_.target().files[i];
      auto taken = pool_->Take(file.bytes);
      if (!taken) return Within(file.path, std::move(taken).error());
      // Owned here immediately, so that an error releases the memory.
      copies_[i] = *std::move(taken);
    }
    exec::UnitLoopOptions options;
    options.sums = note_ ? &source_sums_ : nullptr;
    options.bytes_total = plan_.totals().payload_bytes;
    loop_.emplace(plan_, source, arena_, sink, options);
    return loop_->CopyUnits(units_, *this);
  }

  Result<Taken> Seal() override {
    SW_TRY(loop_->SumUnits(units_, *this));
    SW_TRY_ASSIGN(std::vector<BlobPtr> blobs, MakeBlobs());
    // A partly copied member cannot be verified, and the source is not read again.
    if (note_) SW_TRY(exec::VerifyMembers(plan_, source_sums_, {}, arena_));
    Taken taken;
    for (const plan::OutputFile& file : plan_.target().files) taken.bytes += file.bytes;
    taken.modules.resize(module_count_);
    for (std::size_t i = 0; i < wanted_.size(); ++i) {
      taken.modules[wanted_[i].module][static_cast<std::size_t>(wanted_[i].component)] =
          std::move(blobs[i]);
    }
    if (blobs.size() > wanted_.size()) taken.passed = std::move(blobs.back());
    return taken;
  }

 private:
  Result<std::span<std::byte>> Buffer(const plan::Unit& unit, std::uint64_t bytes) override {
    const plan::Payload& payload = plan_.target().files[unit.file].payloads[unit.payload];
    return std::span(copies_[unit.file].get() + payload.offset + unit.first, bytes);
  }

  Status Put(const exec::UnitInHand& unit) override {
    if (unit.record != nullptr) sums_[unit.index] = unit.record->sum;
    return {};
  }

  Result<std::vector<BlobPtr>> MakeBlobs() {
    std::vector<BlobPtr> blobs;
    for (std::uint32_t i = 0; i < copies_.size(); ++i) {
      const auto sums = std::span<const exec::UnitSum>(sums_).subspan(plan_.first_unit(i, 0),
                                                                      plan_.unit_count(i));
      SW_TRY(exec::SumPayloads(plan_, i, sums, note_));
      std::vector<std::uint32_t> unit_bytes;
      unit_bytes.reserve(sums.size());
      for (const exec::UnitSum& sum : sums) unit_bytes.push_back(sum.bytes);
      blobs.push_back(std::make_shared<const MemoryBlob>(pool_, std::move(copies_[i]),
                                                         Summarize(sums), std::move(unit_bytes)));
    }
    return blobs;
  }

  const std::vector<Wanted> wanted_;                  // the blobs; that of passed members is last
  const std::unique_ptr<const plan::Target> target_;  // target of the plan
  const plan::Plan plan_;
  const std::size_t module_count_;
  const std::shared_ptr<MemoryPool> pool_;
  tbb::task_arena arena_;
  const bool note_;
  exec::SourceSums source_sums_;
  std::vector<std::uint64_t> units_;  // all units
  std::vector<exec::UnitSum> sums_;   // by unit
  std::optional<exec::UnitLoop> loop_;
  std::vector<BlobMemory> copies_;  // by file of the plan's target
};

}  // namespace

std::uint64_t BytesToTake(const convert::Input& input, const SnapshotChoice& choice) {
  std::uint64_t bytes = 0;
  for (const Wanted& one : ListWanted(choice)) {
    bytes += choice.model.modules[one.module].part(one.component).bytes;
  }
  for (const std::uint32_t member : PassedMembers(input.checkpoint)) {
    bytes += input.checkpoint.map.members[member].bytes;
  }
  return bytes;
}

Result<std::unique_ptr<SnapshotCopy>> SnapshotCopy::Copy(convert::Input& input,
                                                         const SnapshotChoice& choice,
                                                         const std::shared_ptr<MemoryPool>& pool,
                                                         const SaveRequest& options, Sink& sink,
                                                         const FillSource& fill) {
  SW_TRY(pool->CheckRoom(BytesToTake(input, choice),
                         StrCat("snapshot of iteration ", choice.iteration)));
  plan::TargetBuilder builder;
  std::vector<Wanted> wanted = ListWanted(choice);
  std::vector<std::uint32_t> tensors;
  for (const Wanted& one : wanted) {
    AddModuleFile(input.checkpoint.map, choice.model.modules[one.module], one.component, &builder,
                  &tensors);
  }
  const std::vector<std::uint32_t> passed = PassedMembers(input.checkpoint);
  if (!passed.empty()) AddPassedFile(input.checkpoint.map, passed, &builder);
  auto target = std::make_unique<plan::Target>(std::move(builder).Take());
  SW_TRY_ASSIGN(plan::Plan plan, plan::Plan::Make(input.checkpoint.map, *target,
                                                  {input.checkpoint.proved, tensors}));
  auto taker = std::make_unique<SnapshotCopier>(std::move(wanted), std::move(target),
                                                std::move(plan), choice, pool, options);
  if (fill) SW_TRY(fill(taker->Stretches(input.set)));
  SW_TRY(taker->CopyAll(*input.bytes, sink));
  return std::unique_ptr<SnapshotCopy>(std::move(taker));
}

}  // namespace shardwright::partial
