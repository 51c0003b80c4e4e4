// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include <tbb/task_arena.h>

#include "engine/exec/exchange.h"
#include "engine/exec/for_each.h"
#include "engine/exec/gather.h"
#include "engine/exec/units.h"
#include "engine/exec/verify.h"
#include "support/base/bytes.h"
#include "support/base/text.h"
#include "trainer/cache/cache.h"
#include "trainer/cache/staging.h"

namespace shardwright::cache {
namespace {

/// A part that several processes store, cut into ranges of units that fit the memory limit.
struct Stretches {
  std::uint32_t part = 0;
  std::vector<std::uint64_t> begin;  ///< first unit of each range, and one past the last unit
};

/// Returns the buffer bytes of each rank that are not for exchanging data between ranks.
std::uint64_t WorkspaceBytes(const LoadOptions& options, device::Kind kind) {
  const std::uint64_t staged = kind == device::Kind::kHost ? 0 : Staging::Bytes(options.threads);
  return options.threads * exec::kWorkspaceBytes + staged;
}

Status CheckOptions(const LoadOptions& options, device::Kind kind) {
  if (options.threads == 0) return Fail(Errc::kUsage, "threads: expected at least 1, found 0");
  // One unit to send and one to receive.
  const std::uint64_t least = WorkspaceBytes(options, kind) + 2 * plan::kUnitBytes;
  if (options.memory_bytes >= least) return {};
  return Fail(Errc::kLimit, "memory ", FormatBytes(options.memory_bytes), ": ",
              Plural(options.threads, "thread"), " need ", FormatBytes(least), " of buffers");
}

/// Runs one load on one rank.
class Loader {
 public:
  Loader(comm::Comm& comm, device::Device& device, const convert::Input& input,
         const LoadOptions& options, Sink& sink, Loaded* loaded)
      : comm_(comm),
        device_(device),
        input_(input),
        options_(options),
        sink_(sink),
        loaded_(*loaded),
        arena_(exec::ArenaThreads(options.threads)),
        rank_(static_cast<std::uint32_t>(comm.rank())) {}

  Status Run();

 private:
  const Part& PartAt(std::uint32_t part) const { return loaded_.where.parts[part]; }
  /// Returns this rank's index in the processes of a part. Empty if it does not store the part.
  std::optional<std::size_t> PlaceIn(std::uint32_t part) const;
  /// Returns the address of a part in this rank's buffer. \pre this rank stores the part
  std::byte* Base(std::uint32_t part) const;
  std::uint64_t OffsetOf(std::uint32_t part, std::uint64_t unit) const;
  Status Allocate();
  Status CutParts();
  Status FillOwn();
  Status FillShared(const std::vector<Stretches>& parts);
  Status Verify();

  comm::Comm& comm_;
  device::Device& device_;
  const convert::Input& input_;
  const LoadOptions& options_;
  Sink& sink_;
  Loaded& loaded_;
  tbb::task_arena arena_;
  const std::uint32_t rank_;
  const plan::Plan* plan_ = nullptr;
  exec::Exchange* source_ = nullptr;
  exec::SourceSums* sums_ = nullptr;
  exec::UnitLoop* loop_ = nullptr;
  exec::UnitSink* to_ = nullptr;
  device::Stream* stream_ = nullptr;
  std::vector<std::uint64_t> own_;              // units of parts that only this rank stores
  std::vector<std::vector<Stretches>> phases_;  // parts that are filled at the same time
};

std::optional<std::size_t> Loader::PlaceIn(std::uint32_t part) const {
  const std::vector<std::uint32_t>& all = PartAt(part).processes;
  const auto found = std::lower_bound(all.begin(), all.end(), rank_);
  if (found == all.end() || *found != rank_) return std::nullopt;
  return static_cast<std::size_t>(found - all.begin());
}

std::byte* Loader::Base(std::uint32_t part) const {
  return loaded_.buffer->data() + PartAt(part).at[*PlaceIn(part)];
}

/// Returns the offset of a unit in its part, or the part's size for the index past the last unit.
std::uint64_t Loader::OffsetOf(std::uint32_t part, std::uint64_t unit) const {
  const plan::OutputFile& file = loaded_.where.target.files[part];
  const std::uint64_t first = plan_->first_unit(part, 0);
  if (unit == first + plan_->unit_count(part)) return file.bytes;
  const plan::Unit at = plan_->unit(unit);
  return file.payloads[at.payload].offset + at.first;
}

Status Loader::Allocate() {
  const auto make = [&]() -> Status {
    SW_TRY_ASSIGN(loaded_.buffer,
                  device_.Allocate(device::Place::kShared, loaded_.where.buffer_bytes[rank_]));
    return {};
  };
  return comm_.Agree(make());
}

/// Assigns parts to phases, in which a rank has at most one part each, and cuts the parts.
/// Collective.
Status Loader::CutParts() {
  // Use the smallest budget of all ranks, because ranks of a part must cut it in the same places.
  SW_TRY_ASSIGN(const std::uint64_t most_missing,
                comm_.AllReduceMax(
                    ~((options_.memory_bytes - WorkspaceBytes(options_, device_.kind())) / 2)));
  const std::uint64_t most = ~most_missing;
  std::vector<std::vector<bool>> taken;  // by phase and process
  for (std::uint32_t part = 0; part < loaded_.where.parts.size(); ++part) {
    const std::vector<std::uint32_t>& processes = PartAt(part).processes;
    const std::uint64_t count = plan_->unit_count(part);
    if (count == 0) continue;
    const std::uint64_t first = plan_->first_unit(part, 0);
    if (processes.size() == 1) {
      if (processes[0] != rank_) continue;
      own_.resize(own_.size() + count);
      std::iota(own_.end() - static_cast<std::ptrdiff_t>(count), own_.end(), first);
      continue;
    }
    Stretches cut{part, {first}};
    for (std::uint64_t unit = first; unit < first + count; ++unit) {
      const bool fits = OffsetOf(part, unit + 1) - OffsetOf(part, cut.begin.back()) <= most;
      if (!fits && unit > cut.begin.back()) cut.begin.push_back(unit);
    }
    cut.begin.push_back(first + count);
    const auto free = [&](const std::vector<bool>& phase) {
      return std::none_of(processes.begin(), processes.end(),
                          [&](std::uint32_t process) { return phase[process]; });
    };
    const auto at =
        static_cast<std::size_t>(std::find_if(taken.begin(), taken.end(), free) - taken.begin());
    if (at == taken.size()) {
      taken.emplace_back(static_cast<std::size_t>(comm_.size()));
      phases_.emplace_back();
    }
    for (const std::uint32_t process : processes) taken[at][process] = true;
    phases_[at].push_back(std::move(cut));
  }
  return {};
}

Status Loader::FillOwn() { return comm_.Agree(loop_->ForUnits(own_, *to_)); }

/// Fills parts range by range. Each rank of a part fills its share of the range, then all
/// gather the shares. Shares are consecutive in memory, so they are gathered in place.
Status Loader::FillShared(const std::vector<Stretches>& parts) {
  std::vector<int> group(static_cast<std::size_t>(comm_.size()));
  std::iota(group.begin(), group.end(), static_cast<int>(parts.size()));
  const Stretches* mine = nullptr;
  std::size_t rounds = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    for (const std::uint32_t process : PartAt(parts[i].part).processes) {
      group[process] = static_cast<int>(i);
      if (process == rank_) mine = &parts[i];
    }
    rounds = std::max(rounds, parts[i].begin.size() - 1);
  }
  SW_TRY_ASSIGN(const std::unique_ptr<device::Collective> collective,
                device_.MakeCollective(comm_, group));
  const auto members = static_cast<std::size_t>(collective->size());
  for (std::size_t round = 0; round < rounds; ++round) {
    std::vector<std::uint64_t> bytes(members);
    std::vector<std::uint64_t> units;
    std::byte* to = nullptr;
    const std::byte* from = nullptr;
    if (mine != nullptr && round + 1 < mine->begin.size()) {
      const std::uint64_t first = mine->begin[round];
      const std::uint64_t last = mine->begin[round + 1];
      const std::uint64_t start = OffsetOf(mine->part, first);
      const std::uint64_t all = OffsetOf(mine->part, last) - start;
      to = Base(mine->part) + start;
      std::uint64_t unit = first;
      for (std::size_t member = 0; member < members; ++member) {
        const std::uint64_t begin = unit;
        const std::uint64_t until = start + all * (member + 1) / members;
        while (unit < last && OffsetOf(mine->part, unit) < until) ++unit;
        if (member + 1 == members) unit = last;
        bytes[member] = OffsetOf(mine->part, unit) - OffsetOf(mine->part, begin);
        if (static_cast<int>(member) != collective->rank()) continue;
        from = Base(mine->part) + OffsetOf(mine->part, begin);
        units.resize(unit - begin);
        std::iota(units.begin(), units.end(), begin);
        loaded_.bytes_gathered += all - bytes[member];
      }
    }
    SW_TRY(comm_.Agree(loop_->ForUnits(units, *to_)));
    Status gathered = collective->AllGather(*stream_, to, from, bytes);
    if (gathered) gathered = stream_->Synchronize();
    SW_TRY(comm_.Agree(std::move(gathered)));
  }
  return {};
}

Status Loader::Verify() {
  sink_.Pass("verify");
  SW_TRY(exec::CombineSums(comm_, sums_));
  const exec::MembersToVerify which{source_, 1,
                                    [&](std::uint32_t member) { return source_->Mine(member); }};
  SW_TRY_ASSIGN(const exec::MembersVerified members,
                comm_.Agree(exec::VerifyMembers(*plan_, *sums_, which, arena_)));
  SW_TRY_ASSIGN(loaded_.members_verified, comm_.AllReduceSum(members.verified));
  return {};
}

Status Loader::Run() {
  sink_.Pass("plan");
  const checkpoints::Checkpoint& from = input_.checkpoint;
  SW_TRY_ASSIGN(const plan::Plan plan,
                comm_.Agree(plan::Plan::Make(from.map, loaded_.where.target, {from.proved, {}})));
  plan_ = &plan;
  if (options_.verify) SW_TRY(convert::VerifyDigests(comm_, input_, options_.threads, sink_));
  sink_.Pass("load");
  SW_TRY(Allocate());
  SW_TRY(CutParts());
  const exec::CountReads reads(*input_.bytes, sink_);
  exec::Exchange source(comm_, from.map, *input_.bytes, {});
  source_ = &source;
  exec::SourceSums sums(from.map.members.size());
  sums_ = &sums;
  exec::UnitLoopOptions loop_options;
  loop_options.sums = options_.verify ? &sums : nullptr;
  loop_options.stopped = "stopped on request: the cache serves nothing";
  loop_options.bytes_total = loaded_.where.buffer_bytes[rank_];
  exec::UnitLoop loop(plan, source, arena_, sink_, std::move(loop_options));
  loop_ = &loop;
  SW_TRY_ASSIGN(const std::unique_ptr<device::Stream> stream, comm_.Agree(device_.MakeStream()));
  stream_ = stream.get();
  const Staging::Place place = [&](const plan::Unit& unit) {
    return Base(unit.file) + loaded_.where.target.files[unit.file].payloads[unit.payload].offset +
           unit.first;
  };
  std::unique_ptr<exec::UnitSink> to = std::make_unique<InPlace>(place);
  if (device_.kind() != device::Kind::kHost) {
    SW_TRY_ASSIGN(to, comm_.Agree(Staging::Make(device_, *stream, options_.threads, place)));
  }
  to_ = to.get();
  SW_TRY(FillOwn());
  for (const std::vector<Stretches>& parts : phases_) SW_TRY(FillShared(parts));
  if (options_.verify) SW_TRY(Verify());
  SW_TRY_ASSIGN(loaded_.bytes_read, comm_.AllReduceSum(source.bytes_read()));
  SW_TRY_ASSIGN(loaded_.bytes_gathered, comm_.AllReduceSum(loaded_.bytes_gathered));
  SW_TRY_ASSIGN(loaded_.bytes_cached, comm_.AllReduceSum(loaded_.buffer->size()));
  return {};
}

/// Plans the target in memory. Pure but for the writer's warnings.
Result<SharedOut> Plan(const convert::Input& input, const checkpoints::TargetSpec& spec,
                       const checkpoints::Format& format, std::uint32_t processes, Sink& sink,
                       checkpoints::Layout* layout) {
  if (format.readers == nullptr) {
    return Fail(Errc::kUnsupported, "format ", format.name,
                ": its files do not belong to ranks, so they cannot be assigned to processes");
  }
  SW_TRY(checkpoints::CheckUnbound(input.checkpoint));
  SW_TRY_ASSIGN(*layout, format.resolve(spec, input.checkpoint));
  SW_TRY_ASSIGN(checkpoints::Written written, format.write(input.checkpoint, *layout));
  for (const std::string& one : written.warnings) sink.Warn(one);
  // Omit tensors that the source lacks but that follow from others, such as rounded weights.
  // The reader of the memory derives them, as from every source. Here they would be read twice.
  const layout::TensorIndex has(input.checkpoint.map);
  std::erase_if(written.target.map.tensors, [&](const layout::LogicalTensor& tensor) {
    return !has.Find(tensor.name, tensor.state);
  });
  return ShareOut(written.target, format.readers(*layout, written.target.files), processes);
}

}  // namespace

Result<Loaded> Load(comm::Comm& comm, device::Device& device, const convert::Input& input,
                    const checkpoints::TargetSpec& spec, const checkpoints::Format& format,
                    const LoadOptions& options, Sink& sink) {
  SW_TRY(comm.Agree(CheckOptions(options, device.kind())));
  Loaded loaded;
  SW_TRY_ASSIGN(loaded.where,
                comm.Agree(Plan(input, spec, format, static_cast<std::uint32_t>(comm.size()), sink,
                                &loaded.layout)));
  SW_TRY(Loader(comm, device, input, options, sink, &loaded).Run());
  return loaded;
}

}  // namespace shardwright::cache
