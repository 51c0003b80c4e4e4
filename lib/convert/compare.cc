// SPDX-License-Identifier: Apache-2.0
#include "convert/compare.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>
#include <numeric>
#include <string>

#include <tbb/enumerable_thread_specific.h>
#include <tbb/task_arena.h>

#include "convert/element_text.h"
#include "engine/exec/exchange.h"
#include "engine/exec/for_each.h"
#include "engine/exec/units.h"
#include "engine/exec/verify.h"
#include "engine/layout/states.h"
#include "engine/plan/target_builder.h"
#include "engine/tensor/convert.h"

namespace shardwright::convert {
namespace {

using layout::LogicalTensor;
using layout::ShardMap;

/// One of the two sources while payloads are compared.
struct Side {
  Side(comm::Comm& comm, const plan::Plan& its_plan, const Compared& compared)
      : plan(its_plan),
        source(comm, compared.map, compared.bytes, compared.file_owner),
        sums(compared.map.members.size()) {}
  const plan::Plan& plan;
  exec::Exchange source;
  exec::SourceSums sums;
};

/// Receives units of the first source, gathers those of the second, and passes on both.
class CompareSink final : public exec::UnitSink {
 public:
  CompareSink(Side& side, const OnUnit& on_unit) : side_(side), on_unit_(on_unit) {}

  bool sums() const override { return false; }

  Status BeginRound(std::span<const std::uint64_t> units) override {
    return side_.source.Round(side_.plan, units);
  }

  Status Put(const exec::UnitInHand& first) override {
    exec::Workspace& workspace = workspaces_.local();
    workspace.unit.resize(first.unit.bytes);
    std::vector<exec::Share> shares;
    std::optional<std::uint32_t> crc32;
    SW_TRY(exec::GatherUnit(side_.plan, first.unit, side_.source, workspace.unit, &workspace,
                            &shares, &crc32));
    side_.sums.Add(shares);
    on_unit_(first.index, first.unit, first.bytes, workspace.unit);
    return {};
  }

 private:
  Side& side_;
  const OnUnit& on_unit_;
  tbb::enumerable_thread_specific<exec::Workspace> workspaces_;
};

Status Verify(comm::Comm& comm, tbb::task_arena& arena, Side* side) {
  SW_TRY(exec::CombineSums(comm, &side->sums));
  const exec::MembersToVerify which{
      &side->source, 1, [&](std::uint32_t member) { return side->source.Mine(member); }};
  SW_TRY(comm.Agree(exec::VerifyMembers(side->plan, side->sums, which, arena)));
  return {};
}

}  // namespace

Result<std::uint64_t> CompareSources(comm::Comm& comm, const Compared& a, const Compared& b,
                                     const plan::Target& target, const CompareOptions& options,
                                     const OnUnit& on_unit, Sink& sink) {
  tbb::task_arena arena(exec::ArenaThreads(options.threads));
  const auto plan_of = [&](const Compared& one) -> Result<plan::Plan> {
    const Interruptible planning(sink);
    return plan::Plan::Make(one.map, target);
  };
  SW_TRY_ASSIGN(const plan::Plan plan_a, plan_of(a));
  SW_TRY_ASSIGN(const plan::Plan plan_b, plan_of(b));
  Side side_a(comm, plan_a, a);
  Side side_b(comm, plan_b, b);
  const std::uint64_t units = plan_a.unit_count();
  const auto ranks = static_cast<std::uint64_t>(comm.size());
  const auto rank = static_cast<std::uint64_t>(comm.rank());
  const std::uint64_t first = units * rank / ranks;
  std::vector<std::uint64_t> mine(units * (rank + 1) / ranks - first);
  std::iota(mine.begin(), mine.end(), first);
  const std::uint64_t workspaces = std::uint64_t{2} * options.threads * exec::kWorkspaceBytes;
  const std::uint64_t budget =  // for a round; each source buffers one
      (options.memory_bytes - std::min(options.memory_bytes, workspaces)) / 2;
  const std::uint64_t most =
      std::min(side_a.source.RoundUnits(budget), side_b.source.RoundUnits(budget));
  exec::UnitLoopOptions loop_options;
  loop_options.sums = &side_a.sums;
  for (const std::uint64_t index : mine) loop_options.bytes_total += plan_a.unit(index).bytes;
  exec::UnitLoop loop(plan_a, side_a.source, arena, sink, loop_options);
  CompareSink second(side_b, on_unit);
  SW_TRY(exec::ForUnitsInRounds(comm, loop, plan_a, side_a.source, mine, most, second));
  SW_TRY(Verify(comm, arena, &side_a));
  SW_TRY(Verify(comm, arena, &side_b));
  return plan_a.totals().payload_bytes;
}

namespace {

bool IsNan(DType dtype, std::span<const std::byte> element) {
  double value = 0;
  Convert(dtype, element, DType::kF64, std::as_writable_bytes(std::span(&value, 1)));
  return std::isnan(value);
}

/// Returns the rank of a floating-point number among all numbers of its type.
std::int64_t Ordered(std::span<const std::byte> element) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, element.data(), element.size());
  const std::uint64_t sign = std::uint64_t{1} << (8 * element.size() - 1);
  const auto magnitude = static_cast<std::int64_t>(bits & (sign - 1));
  return (bits & sign) != 0 ? -magnitude : magnitude;
}

/// Returns true for equal numbers, and for two without another number between them.
bool AreAdjacent(std::span<const std::byte> a, std::span<const std::byte> b) {
  const std::int64_t x = Ordered(a);
  const std::int64_t y = Ordered(b);
  return x < y ? y == x + 1 : x == y || x == y + 1;
}

bool HasOwners(const LogicalTensor& tensor) {
  return std::all_of(tensor.fragments.begin(), tensor.fragments.end(),
                     [](const auto& fragment) { return fragment.role != layout::Role::kPartial; });
}

}  // namespace

Differing CompareElements(DType dtype, std::span<const std::byte> a, std::span<const std::byte> b) {
  Differing out;
  if (std::memcmp(a.data(), b.data(), a.size()) == 0) return out;
  const std::uint64_t item = ItemSize(dtype);
  for (std::uint64_t i = 0; i < a.size() / item; ++i) {
    const auto x = a.subspan(i * item, item);
    const auto y = b.subspan(i * item, item);
    if (std::equal(x.begin(), x.end(), y.begin()) || (IsNan(dtype, x) && IsNan(dtype, y))) continue;
    if (out.count++ == 0) out.first = i;
    if (!AreAdjacent(x, y)) ++out.apart;
  }
  return out;
}

const std::string& FileOf(const ShardMap& map, const LogicalTensor& tensor, std::uint64_t element) {
  static const std::string kNone;
  const std::string* file = &kNone;
  for (const layout::Fragment& fragment : tensor.fragments) {
    if (fragment.role != layout::Role::kOwner) continue;
    fragment.cut->ForLogicalRange(element, element + 1, [&](const layout::Run& run) {
      layout::ForHolders(map, fragment.at, run.shard, run.shard + 1,
                         [&](const layout::Region& region, std::uint64_t, std::uint64_t) {
                           file = &map.files[map.members[region.member].file];
                         });
    });
  }
  return *file;
}

std::optional<Weighed> WeighedOf(const ShardMap& map, const layout::TensorIndex& index,
                                 const std::string& name) {
  const auto master = index.Find(name, layout::kMaster);
  const auto weight = index.Find(name, layout::kWeight);
  if (!master || !weight) return std::nullopt;
  const LogicalTensor& of_master = map.tensors[*master];
  const LogicalTensor& of_weight = map.tensors[*weight];
  if (!HasOwners(of_master) || !HasOwners(of_weight) || of_master.shape != of_weight.shape ||
      !CanConvert(of_master.dtype, of_weight.dtype)) {
    return std::nullopt;
  }
  return Weighed{*weight, *master};
}

WeightsAndMasters::WeightsAndMasters(const ShardMap& map) : map_(map) {
  for (ShardMap* side : {&weights_, &masters_}) {
    side->files = map.files;
    side->members = map.members;
    side->arrays = map.arrays;
  }
}

void WeightsAndMasters::Add(const Weighed& param) {
  const LogicalTensor& wanted = map_.tensors[param.weight];
  weights_.tensors.push_back(wanted);
  masters_.tensors.push_back(map_.tensors[param.master]);
  target_.AddWhole(target_.AddFile(wanted.name), 0, wanted.name, wanted.state, wanted.dtype,
                   wanted.shape, wanted.state);
}

namespace {

/// Compares the weights of inferred parameters with their rounded masters.
class Proof {
 public:
  explicit Proof(const checkpoints::Checkpoint& checkpoint)
      : checkpoint_(checkpoint), sides_(checkpoint.map) {}

  /// \error kUnsupported  masters that cannot be compared
  Status Prepare();
  Status Run(comm::Comm& comm, exec::ByteSource& bytes, const std::vector<int>& file_owner,
             const CompareOptions& options, Sink& sink);

 private:
  void Look(std::uint64_t index, const plan::Unit& unit, std::span<const std::byte> weight,
            std::span<const std::byte> rounded);

  const checkpoints::Checkpoint& checkpoint_;
  WeightsAndMasters sides_;
  std::mutex mutex_;
  std::uint64_t failed_ = std::numeric_limits<std::uint64_t>::max();  // first differing unit
  Status status_;
};

Status Proof::Prepare() {
  const checkpoints::Inferred& inferred = checkpoint_.inferred;
  const layout::TensorIndex index(checkpoint_.map);
  for (const std::uint32_t param : inferred.params) {
    const std::string& name = checkpoint_.params[param].name;
    if (const auto found = WeighedOf(checkpoint_.map, index, name)) {
      sides_.Add(*found);
      continue;
    }
    return Fail(
        Errc::kUnsupported, "\"", name,
        "\": its master weights cannot be compared with its compute weights: ", inferred.why);
  }
  return {};
}

void Proof::Look(std::uint64_t index, const plan::Unit& unit, std::span<const std::byte> weight,
                 std::span<const std::byte> rounded) {
  const LogicalTensor& tensor = sides_.weights().tensors[unit.file];
  const LogicalTensor& master = sides_.masters().tensors[unit.file];
  const std::uint64_t item = ItemSize(tensor.dtype);
  weight = weight.first(unit.bytes);
  rounded = rounded.first(unit.bytes);
  const Differing differing = CompareElements(tensor.dtype, weight, rounded);
  if (differing.count == 0) return;
  const std::lock_guard lock(mutex_);
  if (index >= failed_) return;
  failed_ = index;
  const std::uint64_t element = unit.first / item + differing.first;
  const auto side = [&](const ShardMap& map, const LogicalTensor& its,
                        std::span<const std::byte> bytes) {
    return ElementText(tensor.dtype, bytes.subspan(differing.first * item, item)) + " in " +
           FileOf(map, its, element);
  };
  // Masters at another place agree with the weight only by chance.
  const bool elsewhere = differing.count > unit.bytes / item / 2;
  const std::string both =
      StrCat("element ", element, ": ", side(sides_.masters(), master, rounded),
             " after rounding, and ", side(sides_.weights(), tensor, weight));
  status_ = Fail(elsewhere ? Errc::kUnsupported : Errc::kBadInput, "\"", tensor.name,
                 "\": its master weights ",
                 (elsewhere ? "are not at the inferred position: "
                            : "differ from its compute weights, which must confirm the inferred "
                              "position: "),
                 both, ": ", checkpoint_.inferred.why);
}

Status Proof::Run(comm::Comm& comm, exec::ByteSource& bytes, const std::vector<int>& file_owner,
                  const CompareOptions& options, Sink& sink) {
  const OnUnit look =
      [this](std::uint64_t index, const plan::Unit& unit, std::span<const std::byte> weight,
             std::span<const std::byte> rounded) { Look(index, unit, weight, rounded); };
  // Checksums first, so that all ranks report damage as damage and not as a wrong place.
  SW_TRY(CompareSources(comm, {sides_.weights(), bytes, file_owner},
                        {sides_.masters(), bytes, file_owner}, sides_.target(), options, look,
                        sink));
  return comm.Agree(std::move(status_));
}

}  // namespace

Status ProveInferred(comm::Comm& comm, const checkpoints::Checkpoint& checkpoint,
                     exec::ByteSource& bytes, const std::vector<int>& file_owner,
                     const CompareOptions& options, Sink& sink) {
  const checkpoints::Inferred& inferred = checkpoint.inferred;
  if (inferred.params.empty()) return {};
  sink.Pass("prove");
  Proof proof(checkpoint);
  SW_TRY(proof.Prepare());
  SW_TRY(proof.Run(comm, bytes, file_owner, options, sink));
  sink.Note(
      StrCat(checkpoint.tag, ": ", inferred.why, ": the positions of ", inferred.params.size(),
             " parameters were inferred, and their weights confirm them"),
      0);
  return {};
}

}  // namespace shardwright::convert
