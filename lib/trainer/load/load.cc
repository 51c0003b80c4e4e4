// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <iterator>
#include <mutex>
#include <numeric>
#include <utility>

#include <tbb/task_arena.h>
#include <nlohmann/json.hpp>

#include "engine/exec/exchange.h"
#include "engine/exec/for_each.h"
#include "engine/exec/gather.h"
#include "engine/exec/units.h"
#include "engine/exec/verify.h"
#include "support/base/bytes.h"
#include "support/base/text.h"
#include "support/json/json.h"
#include "trainer/load/load.h"
#include "trainer/load/match.h"

namespace shardwright::trainer {
namespace {

/// Writes to the tensors of one rank, which are the file of that rank in the target.
class Tensors final : public exec::UnitSink {
 public:
  /// \param payloads  of the file
  /// \param staging   LoadOptions::staging
  Tensors(std::vector<Memory> payloads, std::span<std::byte> staging)
      : payloads_(std::move(payloads)) {
    for (; staging.size() >= plan::kUnitBytes; staging = staging.subspan(plan::kUnitBytes)) {
      free_.push_back(staging.data());
    }
  }

  bool sums() const override { return false; }

  Result<std::span<std::byte>> Buffer(const plan::Unit& unit, std::uint64_t bytes) override {
    const Memory& to = payloads_[unit.payload];
    if (to.far == nullptr) return to.bytes.subspan(unit.first, bytes);
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return std::span<std::byte>();
    std::byte* const stage = free_.back();
    free_.pop_back();
    taken_.push_back(stage);
    return std::span(stage, bytes);
  }

  Status Put(const exec::UnitInHand& unit) override {
    const Memory& to = payloads_[unit.unit.payload];
    if (to.far == nullptr) return {};
    Status filled = to.far->Fill(unit.unit.first, unit.bytes);
    const std::lock_guard lock(mutex_);
    const auto stage = std::ranges::find(taken_, unit.bytes.data());
    if (stage != taken_.end()) {
      free_.push_back(*stage);
      taken_.erase(stage);
    }
    return filled;
  }

 private:
  const std::vector<Memory> payloads_;
  std::mutex mutex_;
  std::vector<std::byte*> free_;   // free units of the staging memory
  std::vector<std::byte*> taken_;  // by units that are being gathered
};

/// Exchanges the lists of shards between all ranks.
Result<std::vector<std::vector<TrainerShard>>> ShardsOfAllRanks(
    comm::Comm& comm, const std::vector<TrainerShard>& mine) {
  nlohmann::json list = nlohmann::json::array();
  for (const TrainerShard& held : mine) list.push_back(ToJson(held));
  const std::vector<std::uint8_t> packed = nlohmann::json::to_msgpack(list);
  SW_TRY_ASSIGN(const std::vector<comm::Bytes> all,
                comm.AllGather(std::as_bytes(std::span(packed))));
  std::vector<std::vector<TrainerShard>> out;
  for (const comm::Bytes& bytes : all) {
    SW_TRY_ASSIGN(const nlohmann::json theirs,
                  shardwright::json::ParseMessagePack(bytes, "rank " + std::to_string(out.size())));
    SW_TRY_ASSIGN(std::vector<TrainerShard> held, ParseShards(theirs));
    out.push_back(std::move(held));
  }
  return out;
}

/// Assignment of source members to ranks.
struct Readers {
  std::vector<int> of_member;    ///< the rank that reads each source member
  std::uint64_t unit_bytes = 0;  ///< largest number of bytes that a unit of any rank reads
};

/// Two ranks need a file equally if the bytes they need differ by less than 1/kAlike.
constexpr std::uint64_t kAlike = 8;

/// Assigns each file to the rank that needs most of it. If several ranks need it
/// about equally, such as weights that every rank has, they share its members.
class ReaderChoice {
 public:
  ReaderChoice(const layout::ShardMap& source, std::size_t ranks)
      : source_(source), members_(source.files.size()), reads_(ranks) {
    for (std::uint32_t member = 0; member < source.members.size(); ++member) {
      members_[source.members[member].file].push_back(member);
    }
  }

  /// \param need  bytes, by rank
  void Choose(std::uint32_t file, std::span<const std::uint64_t> need,
              std::vector<int>* of_member) {
    const std::uint64_t most = std::ranges::max(need);
    std::vector<std::size_t> alike;
    for (std::size_t rank = 0; rank < need.size(); ++rank) {
      if (need[rank] >= most - most / kAlike) alike.push_back(rank);
    }
    for (const std::uint32_t member : members_[file]) {
      const std::size_t reader = *std::ranges::min_element(
          alike, {}, [&](std::size_t rank) { return std::pair(reads_[rank], rank); });
      (*of_member)[member] = static_cast<int>(reader);
      if (most > 0) reads_[reader] += source_.members[member].bytes;
    }
  }

 private:
  const layout::ShardMap& source_;
  std::vector<std::vector<std::uint32_t>> members_;  // by file
  std::vector<std::uint64_t> reads_;                 // bytes so far, by rank
};

/// Chooses the rank that reads each source member. Collective.
Result<Readers> ReadersOf(comm::Comm& comm, const plan::Plan& plan,
                          std::span<const std::uint64_t> units) {
  const std::size_t files = plan.source().files.size();
  std::vector<std::uint64_t> needs(files + 1);  // and, as last entry, the most that a unit reads
  plan::Program program;
  for (const std::uint64_t index : units) {
    plan.Fill(plan.unit(index), &program);
    needs.back() = std::max(needs.back(), exec::ReadBytes(program));
    for (const plan::Read& read : program.reads) {
      needs[plan.source().members[read.member].file] += read.bytes;
    }
  }
  SW_TRY_ASSIGN(const std::vector<comm::Bytes> all,
                comm.AllGather(std::as_bytes(std::span(needs))));
  const auto said = [&](std::size_t rank, std::size_t place) {
    std::uint64_t bytes = 0;
    std::memcpy(&bytes, all[rank].data() + place * sizeof bytes, sizeof bytes);
    return bytes;
  };
  Readers out;
  out.of_member.resize(plan.source().members.size());
  ReaderChoice choice(plan.source(), all.size());
  std::vector<std::uint64_t> need(all.size());
  for (std::uint32_t file = 0; file < files; ++file) {
    for (std::size_t rank = 0; rank < all.size(); ++rank) need[rank] = said(rank, file);
    choice.Choose(file, need, &out.of_member);
  }
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    out.unit_bytes = std::max(out.unit_bytes, said(rank, files));
  }
  return out;
}

Status CheckStrict(const LoadOptions& options, const Match& match) {
  if (!options.strict || (match.missing.empty() && match.unused.empty())) return {};
  std::string message =
      options.input.source_paths.empty() ? "" : options.input.source_paths.front() + ": ";
  message += "strict: nothing was loaded";
  if (!match.missing.empty()) {
    message += "; the checkpoint does not have " + FirstFew(match.missing);
  }
  if (!match.unused.empty()) message += "; the trainer does not have " + FirstFew(match.unused);
  return Fail(Errc::kMismatch, message);
}

/// Returns the bytes that one rank needs in addition to the memory for exchanging data.
std::uint64_t BufferBytes(const LoadOptions& options) {
  return options.threads * exec::kWorkspaceBytes + options.staging.size();
}

/// Plans and runs one load on one rank.
class Loader {
 public:
  Loader(comm::Comm& comm, const LoadOptions& options, Sink& sink)
      : comm_(comm), options_(options), sink_(sink), arena_(exec::ArenaThreads(options.threads)) {}

  Status Fill(const convert::Input& input, const Match& match, std::span<const Memory> memory,
              Loaded* loaded);

 private:
  Status FillInRounds(const plan::Plan& plan, exec::Exchange& source, exec::UnitLoop& loop,
                      std::span<const std::uint64_t> units, std::uint64_t most, Tensors& to);
  Status Verify(const plan::Plan& plan, exec::Exchange& source, exec::SourceSums* sums,
                Loaded* loaded);

  comm::Comm& comm_;
  const LoadOptions& options_;
  Sink& sink_;
  tbb::task_arena arena_;
};

Status Loader::Fill(const convert::Input& input, const Match& match, std::span<const Memory> memory,
                    Loaded* loaded) {
  sink_.Pass("plan");
  const checkpoints::Checkpoint& from = input.checkpoint;
  SW_TRY_ASSIGN(const plan::Plan plan,
                comm_.Agree(plan::Plan::Make(from.map, match.target, {from.proved, {}})));
  const auto rank = static_cast<std::uint32_t>(comm_.rank());
  std::vector<std::uint64_t> units(match.payloads[rank].empty() ? 0 : plan.unit_count(rank));
  if (!units.empty()) std::iota(units.begin(), units.end(), plan.first_unit(rank, 0));
  std::vector<Memory> payloads;
  for (const std::uint32_t held : match.payloads[rank]) payloads.push_back(memory[held]);
  Readers readers;
  if (comm_.size() > 1 && !options_.in_memory) {
    SW_TRY_ASSIGN(readers, ReadersOf(comm_, plan, units));
  }
  sink_.Pass("load");
  exec::Exchange source(comm_, from.map, *input.bytes, {});
  source.ReadBy(std::move(readers.of_member));
  exec::SortByPlace(plan, source, &units);
  exec::SourceSums sums(from.map.members.size());
  exec::UnitLoopOptions loop_options;
  const bool verify = options_.verify && !options_.in_memory;
  loop_options.sums = verify ? &sums : nullptr;
  loop_options.stopped = "stopped on request: the contents of the trainer's tensors are undefined";
  for (const std::uint64_t index : units) loop_options.bytes_total += plan.unit(index).bytes;
  exec::UnitLoop loop(plan, source, arena_, sink_, std::move(loop_options));
  // Use the smallest budget of all ranks, because their rounds and windows have one size.
  SW_TRY_ASSIGN(const std::uint64_t most_missing,
                comm_.AllReduceMax(~(options_.memory_bytes - BufferBytes(options_))));
  const std::uint64_t budget = ~most_missing;
  SW_TRY(source.ShareMemory(budget, readers.unit_bytes));
  const std::uint64_t most = std::min<std::uint64_t>(source.RoundUnits(budget, readers.unit_bytes),
                                                     std::max<std::uint64_t>(1, plan.unit_count()));
  Tensors to(std::move(payloads), options_.staging);
  if (options_.in_memory) {
    SW_TRY(comm_.Agree(loop.ForUnits(units, to)));
  } else {
    SW_TRY(FillInRounds(plan, source, loop, units, most, to));
  }
  if (verify) SW_TRY(Verify(plan, source, &sums, loaded));
  loaded->bytes_filled = plan.totals().payload_bytes;
  SW_TRY_ASSIGN(loaded->bytes_read, comm_.AllReduceSum(source.bytes_read()));
  return {};
}

/// Number of rounds after which ranks meet even if no data is sent. Only then do they
/// learn of errors and stop requests of other ranks, and a process group has a timeout.
constexpr std::uint64_t kRoundsAlone = 64;

/// Same as exec::ForUnitsInRounds, but ranks rarely meet in rounds without data to send.
Status Loader::FillInRounds(const plan::Plan& plan, exec::Exchange& source, exec::UnitLoop& loop,
                            std::span<const std::uint64_t> units, std::uint64_t most, Tensors& to) {
  SW_TRY_ASSIGN(const std::vector<bool> sends, source.RoundsThatSend(plan, units, most));
  const auto part = [&](std::uint64_t first, std::uint64_t last) {
    const std::uint64_t begin = std::min<std::uint64_t>(first * most, units.size());
    return units.subspan(begin, std::min<std::uint64_t>(last * most, units.size()) - begin);
  };
  Status alone;  // status of the rounds since the last meeting
  std::uint64_t done = 0;
  for (std::uint64_t round = 0; round < sends.size(); ++round) {
    if (!sends[round] && (round + 1) % kRoundsAlone != 0) continue;
    if (alone) alone = loop.ForUnits(part(done, round), to);
    SW_TRY(source.Round(plan, part(round, round + 1)));
    SW_TRY(comm_.Agree(alone ? loop.ForUnits(part(round, round + 1), to) : alone));
    done = round + 1;
  }
  return comm_.Agree(loop.ForUnits(part(done, sends.size()), to));
}

Status Loader::Verify(const plan::Plan& plan, exec::Exchange& source, exec::SourceSums* sums,
                      Loaded* loaded) {
  sink_.Pass("verify");
  if (comm_.size() > 1) SW_TRY(exec::CombineSums(comm_, sums));
  const exec::MembersToVerify which{&source, 1,
                                    [&](std::uint32_t member) { return source.Mine(member); }};
  SW_TRY_ASSIGN(const exec::MembersVerified members,
                comm_.Agree(exec::VerifyMembers(plan, *sums, which, arena_)));
  SW_TRY_ASSIGN(loaded->members_verified, comm_.AllReduceSum(members.verified));
  return {};
}

/// Checks options before any file is opened. Collective.
Status CheckOptions(comm::Comm& comm, const LoadOptions& options) {
  const std::uint64_t least = BufferBytes(options);
  Status enough;
  if (options.threads == 0) {
    enough = Fail(Errc::kUsage, "threads: expected at least 1, found 0");
  } else if (options.memory_bytes < least) {
    enough = Fail(Errc::kLimit, "memory ", FormatBytes(options.memory_bytes), ": ",
                  Plural(options.threads, "thread"), " need ", FormatBytes(least), " of buffers");
  }
  return comm.Agree(std::move(enough));
}

}  // namespace

namespace {

/// Fails if the checkpoint's optimizer state is incomplete and the trainer loads
/// an optimizer. A trainer that loads only its model does not need the state.
Status CheckOptimizer(const convert::Input& input,
                      const std::vector<std::vector<TrainerShard>>& held) {
  Status whole = checkpoints::CheckUnbound(input.checkpoint);
  if (whole) return {};
  for (const std::vector<TrainerShard>& rank : held) {
    for (const TrainerShard& one : rank) {
      if (IsOfModel(one.kind)) continue;
      Error error = std::move(whole).error();
      error.message += "; the model can be loaded without the optimizer";
      return tl::unexpected<Error>(std::move(error));
    }
  }
  return {};
}

}  // namespace

Result<Loaded> LoadFrom(comm::Comm& comm, std::unique_ptr<convert::Input> input,
                        const LoadOptions& options, const std::vector<TrainerShard>& mine,
                        std::span<const Memory> memory, Sink& sink) {
  SW_CHECK(mine.size() == memory.size());
  SW_TRY(CheckOptions(comm, options));
  Loaded loaded;
  loaded.input = std::move(input);
  SW_TRY_ASSIGN(const std::vector<std::vector<TrainerShard>> held,
                comm.Agree(ShardsOfAllRanks(comm, mine)));
  SW_TRY(CheckOptimizer(*loaded.input, held));
  SW_TRY_ASSIGN(Match match,
                comm.Agree(MatchShards(loaded.input->checkpoint, held, options.optimizer)));
  SW_TRY(CheckStrict(options, match));
  Loader loader(comm, options, sink);
  SW_TRY(loader.Fill(*loaded.input, match, memory, &loaded));
  loaded.missing = std::move(match.missing);
  loaded.unused = std::move(match.unused);
  return loaded;
}

Result<Loaded> Load(comm::Comm& comm, const LoadOptions& options,
                    const std::vector<TrainerShard>& mine, std::span<const Memory> memory,
                    Sink& sink) {
  SW_TRY(CheckOptions(comm, options));
  convert::InputOptions from = options.input;
  from.bound = true;  // LoadFrom checks the rank-specific state
  SW_TRY_ASSIGN(std::unique_ptr<convert::Input> input, convert::OpenInput(comm, from, sink));
  for (const std::string& one : checkpoints::OptimizerLeftOut(input->checkpoint)) sink.Warn(one);
  return LoadFrom(comm, std::move(input), options, mine, memory, sink);
}

}  // namespace shardwright::trainer
