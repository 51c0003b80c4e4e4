// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <future>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <nlohmann/json.hpp>

#include "checkpoints/registry.h"
#include "engine/exec/gather.h"
#include "engine/layout/states.h"
#include "support/comm/threads.h"
#include "trainer/cache/attach.h"
#include "trainer/cache/serve.h"
#include "trainer/load/load.h"
#include "trainer/load/load_result_json.h"
#include "unit/convert/opened.h"

// Real checkpoints in memory: trainers read the same bytes from it as from the files.

namespace shardwright::cache {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

/// Requests a stop once `stop` is set.
class StopSink final : public NullSink {
 public:
  bool stop_requested() const override { return stop.load(); }
  std::atomic<bool> stop = false;
};

struct Asked {
  std::string source;
  std::string target;
  std::string_view format = "deepspeed";
  int ranks = 1;
  LoadOptions load = {};
  std::optional<std::chrono::seconds> deadline = {};
};

/// Serves a load on ranks that are threads, until it goes out of scope.
class Resident {
 public:
  Resident(const std::string& path, Asked asked) : asked_(std::move(asked)) {
    address.path = path;
    thread_ = std::thread([this] {
      const checkpoints::Format& format = **checkpoints::RequireFormat(asked_.format);
      const auto spec = checkpoints::ParseTarget(format, asked_.target).value();
      outcomes = comm::RunThreads(asked_.ranks, [&](comm::Comm& comm) -> Status {
        ServeOptions options;
        options.address = address;
        options.input.source_paths = {asked_.source};
        options.load = asked_.load;
        options.deadline = asked_.deadline;
        SW_TRY_ASSIGN(Served one, Serve(comm, options, spec, format, sink));
        const std::lock_guard lock(mutex_);
        if (comm.rank() == 0) served.emplace(std::move(one));
        return {};
      });
    });
  }
  ~Resident() { End(); }

  void End() {
    sink.stop = true;
    Join();
  }
  void Join() {
    if (thread_.joinable()) thread_.join();
  }

  os::Address address;
  StopSink sink;
  std::vector<Status> outcomes;
  std::optional<Served> served;

 private:
  const Asked asked_;
  std::mutex mutex_;
  std::thread thread_;
};

/// Tensors of a rank of a trainer, by label.
struct Filled {  // NOLINT(bugprone-exception-escape): JSON's moves do not throw
  std::map<std::string, std::vector<std::byte>> tensors;
  json told;
};

/// Returns the shard of each tensor on a rank of `ranks`: a range of optimizer tensors, all others.
Result<std::vector<trainer::TrainerShard>> HeldOf(const layout::ShardMap& map, std::uint64_t rank,
                                                  std::uint64_t ranks) {
  json list = json::array();
  for (const layout::LogicalTensor& tensor : map.tensors) {
    if (layout::IsPadding(tensor.state)) continue;
    json one = {{"name", tensor.name},
                {"kind", tensor.state == "weight" ? std::string(trainer::kParam) : tensor.state},
                {"shape", tensor.shape},
                {"dtype", Name(tensor.dtype)}};
    if (!layout::IsModelState(tensor.state) || tensor.state == layout::kMaster) {
      const std::uint64_t elems = Elems(tensor.shape);
      one["first"] = elems * rank / ranks;
      one["count"] = elems * (rank + 1) / ranks - elems * rank / ranks;
    }
    list.push_back(std::move(one));
  }
  return trainer::ParseShards(json::parse(list.dump()));
}

Result<Filled> Fill(comm::Comm& comm, const layout::ShardMap& like, bool in_memory,
                    std::unique_ptr<convert::Input> input, Sink& sink) {
  SW_TRY_ASSIGN(const std::vector<trainer::TrainerShard> held,
                HeldOf(like, static_cast<std::uint64_t>(comm.rank()),
                       static_cast<std::uint64_t>(comm.size())));
  std::vector<std::vector<std::byte>> bytes;
  std::vector<trainer::Memory> memory;
  bytes.reserve(held.size());
  for (const trainer::TrainerShard& one : held) {
    bytes.emplace_back(one.cut->shard_elems() * ItemSize(one.dtype), std::byte{0xAB});
  }
  memory.reserve(bytes.size());
  for (auto& one : bytes) memory.push_back({one});
  trainer::LoadOptions options;
  options.in_memory = in_memory;
  SW_TRY_ASSIGN(const trainer::Loaded loaded,
                trainer::LoadFrom(comm, std::move(input), options, held, memory, sink));
  Filled out;
  for (std::size_t i = 0; i < held.size(); ++i) {
    out.tensors[trainer::Label(held[i])] = std::move(bytes[i]);
  }
  trainer::TellLoad(loaded, &out.told);
  return out;
}

/// Reads all ranks of a trainer, from the load or from the files.
std::vector<Filled> Train(int ranks, const std::string& source, const os::Address* address) {
  const auto like = convert::Opened(source);
  std::vector<Filled> out(static_cast<std::size_t>(ranks));
  const std::vector<Status> done = comm::RunThreads(ranks, [&](comm::Comm& comm) -> Status {
    StopSink sink;
    Filled& mine = out[static_cast<std::size_t>(comm.rank())];
    if (address == nullptr) {
      convert::InputOptions options;
      options.source_paths = {source};
      SW_TRY_ASSIGN(auto input, convert::OpenInput(comm, options, sink));
      const json told = trainer::TellSource(*input);
      SW_TRY_ASSIGN(mine, Fill(comm, like->checkpoint.map, false, std::move(input), sink));
      mine.told = told;
      return {};
    }
    SW_TRY_ASSIGN(Attached attached, Attach(comm, *address, std::chrono::seconds(300), sink));
    SW_TRY_ASSIGN(mine, Fill(comm, like->checkpoint.map, true, std::move(attached.input), sink));
    mine.told = attached.told;
    return Detach(comm, attached);
  });
  for (const Status& status : done) EXPECT_TRUE(status.has_value()) << status.error().message;
  return out;
}

/// Bytes of the source's payloads that hold elements of tensors: each once.
/// \param weights  true if compute weights count, which some layouts do not store
std::uint64_t PayloadBytes(const std::string& source, bool weights = true) {
  const auto input = convert::Opened(source);
  const layout::ShardMap& map = input->checkpoint.map;
  std::vector<bool> used(map.members.size());
  for (const layout::LogicalTensor& tensor : map.tensors) {
    if (!weights && tensor.state == layout::kWeight) continue;
    for (const layout::Fragment& one : tensor.fragments) {
      if (one.role == layout::Role::kReplica) continue;
      for (const layout::Region& region : map.arrays[one.at.array].regions) {
        used[region.member] = true;
      }
    }
  }
  std::uint64_t bytes = 0;
  for (std::size_t m = 0; m < used.size(); ++m) bytes += used[m] ? map.members[m].bytes : 0;
  return bytes;
}

class ServeTest : public os::Scratch {};

TEST_F(ServeTest, TrainersGetWhatTheFilesHaveAndEachByteIsReadOnce) {
  struct Case {
    std::string name;
    std::string target;
    std::string_view format = "deepspeed";
    bool weights = true;
  };
  const std::vector<Case> cases = {
      {"zero1_w2", "zero=2,dp=4"},
      {"bf16_zero2_w2", "zero=3,dp=4", "deepspeed", false},
      {"bf16_zero2_w2", "zero=1,dp=4"},
      {"zero3_w2_sub_groups", "zero=1,dp=4"},
      {"zero2_w3_frozen_tied", "zero=2,dp=4"},
      {"moe4_ep2_zero1_w2", "dp=4,ep=2"},
      {"zero1_w2", "dp_shard=4", "dcp", false},
      {"bf16_zero2_w2", "dp_shard=2,dp_replicate=2", "dtensor", false}};
  for (const Case& one : cases) {
    const std::string source = convert::Own(one.name);
    const std::vector<Filled> want = Train(1, source, nullptr);
    const std::vector<Filled> halves = Train(2, source, nullptr);
    ASSERT_FALSE(want[0].tensors.empty());
    const bool first = &one == &cases.front();
    for (const int ranks : first ? std::vector<int>{1, 2, 3, 4} : std::vector<int>{4}) {
      SCOPED_TRACE(one.name + " as " + one.target + " on " + std::to_string(ranks));
      Resident load(At("s"),
                    {.source = source, .target = one.target, .format = one.format, .ranks = ranks});
      for (int again = 0; again < 2; ++again) {
        const std::vector<Filled> got = Train(1, source, &load.address);
        EXPECT_TRUE(got[0].tensors == want[0].tensors);
        EXPECT_EQ(got[0].told, want[0].told);
      }
      const std::vector<Filled> two = Train(2, source, &load.address);
      EXPECT_TRUE(two[0].tensors == halves[0].tensors);
      EXPECT_TRUE(two[1].tensors == halves[1].tensors);
      load.End();
      for (const Status& status : load.outcomes) {
        ASSERT_TRUE(status.has_value()) << status.error().message;
      }
      EXPECT_EQ(load.served->loaded.bytes_read, PayloadBytes(source, one.weights));
      EXPECT_EQ(load.served->attaches, 4U);
      EXPECT_EQ(load.served->end, End::kSignal);
      EXPECT_GT(load.served->loaded.members_verified, 0U);
    }
  }
}

TEST_F(ServeTest, SharedPartsComeInStepsThatFitTheMemory) {
  const std::string source = convert::Own("zero1_w2");
  Asked asked{.source = source, .target = "zero=2,dp=2", .ranks = 2};
  asked.load.memory_bytes = exec::kWorkspaceBytes + 2 * plan::kUnitBytes;
  Resident load(At("s"), asked);
  EXPECT_TRUE(Train(1, source, &load.address)[0].tensors == Train(1, source, nullptr)[0].tensors);
  load.End();
  ASSERT_TRUE(load.outcomes[0].has_value());
  asked.load.memory_bytes -= 1;
  Resident small(At("t"), asked);
  small.Join();
  for (const Status& status : small.outcomes) {
    ASSERT_FALSE(status.has_value());
    EXPECT_EQ(status.error().code, Errc::kLimit);
    EXPECT_NE(status.error().message.find("1 thread need 11"), std::string::npos)
        << status.error().message;
  }
}

TEST_F(ServeTest, ADamagedSourceIsToldToWhoWaitsAndNothingIsServed) {
  const std::string copy = At("ckpt");
  fs::copy(convert::Own("zero1_w2"), copy, fs::copy_options::recursive);
  std::string path;
  for (const auto& entry : fs::recursive_directory_iterator(copy)) {
    if (entry.path().filename().string().ends_with("optim_states.pt")) path = entry.path();
  }
  // In the middle of the largest member, which is payload.
  const auto opened = convert::Opened(copy);
  const layout::ShardMap& map = opened->checkpoint.map;
  const layout::Member* largest = nullptr;
  for (const layout::Member& member : map.members) {
    const bool here = path.ends_with(map.files[member.file]);
    if (here && (largest == nullptr || member.bytes > largest->bytes)) largest = &member;
  }
  ASSERT_NE(largest, nullptr);
  const auto time = fs::last_write_time(path);
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(largest->offset + largest->bytes / 2));
  file.put('\x5a');
  file.close();
  fs::last_write_time(path, time);
  auto waits = std::async(std::launch::async, [&] {
    const auto comm = comm::MakeSerialComm();
    StopSink sink;
    const auto attached = Attach(*comm, {At("s"), {}, 0}, std::chrono::seconds(300), sink);
    return attached ? Error{} : attached.error();
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(150));
  Resident load(At("s"), {.source = copy, .target = "zero=2,dp=2", .ranks = 2});
  load.Join();
  for (const Status& status : load.outcomes) {
    ASSERT_FALSE(status.has_value());
    EXPECT_EQ(status.error().code, Errc::kBadInput);
  }
  const Error heard = waits.get();
  EXPECT_EQ(heard.code, Errc::kBadInput) << heard.message;
}

TEST_F(ServeTest, AClientMayComeFirstAndWaitsNoLongerThanItSays) {
  const auto comm = comm::MakeSerialComm();
  StopSink sink;
  const auto begun = std::chrono::steady_clock::now();
  const auto nobody = Attach(*comm, {At("s"), {}, 0}, std::chrono::milliseconds(300), sink);
  ASSERT_FALSE(nobody.has_value());
  EXPECT_EQ(nobody.error().code, Errc::kNotFound);
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(200));
  sink.stop = true;
  const auto stopped = Attach(*comm, {At("s"), {}, 0}, std::chrono::seconds(300), sink);
  ASSERT_FALSE(stopped.has_value());
  EXPECT_EQ(stopped.error().code, Errc::kStopped);
  const std::string source = convert::Own("zero1_w2");
  auto early = std::async(std::launch::async, [&] {
    const os::Address address{At("s"), {}, 0};
    return Train(1, source, &address);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  Resident load(At("s"), {.source = source, .target = "dp=1"});
  EXPECT_TRUE(early.get()[0].tensors == Train(1, source, nullptr)[0].tensors);
}

TEST_F(ServeTest, StatusStopAndDeadline) {
  const std::string source = convert::Own("zero1_w2");
  Resident load(At("s"), {.source = source, .target = "zero=2,dp=2", .ranks = 2});
  const auto status = AskStatus(load.address, std::chrono::seconds(300), {});
  ASSERT_TRUE(status.has_value()) << status.error().message;
  EXPECT_EQ((*status)["state"], "ready");
  EXPECT_EQ((*status)["processes"], 2);
  EXPECT_EQ((*status)["bytes_read"], PayloadBytes(source));
  EXPECT_EQ((*status)["attached"], 0);
  Resident second(At("s"), {.source = source, .target = "zero=2,dp=2"});
  second.Join();
  ASSERT_FALSE(second.outcomes[0].has_value());
  EXPECT_EQ(second.outcomes[0].error().code, Errc::kBusy);
  ASSERT_TRUE(AskStop(load.address, {}));
  EXPECT_FALSE(fs::exists(At("s")));
  load.Join();
  ASSERT_TRUE(load.outcomes[0].has_value() && load.outcomes[1].has_value());
  EXPECT_EQ(load.served->end, End::kAsked);
  const auto gone = AskStatus(load.address, std::chrono::seconds(0), {});
  ASSERT_FALSE(gone.has_value());
  EXPECT_EQ(gone.error().code, Errc::kNotFound);
  Resident brief(At("s"),
                 {.source = source, .target = "zero=2,dp=2", .deadline = std::chrono::seconds(1)});
  brief.Join();
  ASSERT_TRUE(brief.outcomes[0].has_value());
  EXPECT_EQ(brief.served->end, End::kDeadline);
}

TEST_F(ServeTest, ALoadThatEndsWhileItIsReadIsAnError) {
  const std::string source = convert::Own("zero1_w2");
  const auto comm = comm::MakeSerialComm();
  StopSink sink;
  Resident load(At("s"), {.source = source, .target = "dp=1"});
  auto attached = Attach(*comm, load.address, std::chrono::seconds(300), sink);
  ASSERT_TRUE(attached.has_value()) << attached.error().message;
  load.End();  // after the seconds that it gives
  const Status detached = Detach(*comm, *attached);
  ASSERT_FALSE(detached.has_value());
  EXPECT_EQ(detached.error().code, Errc::kIo);
  EXPECT_NE(detached.error().message.find("the cache ended while it was read"), std::string::npos)
      << detached.error().message;
}

TEST_F(ServeTest, FormatsForNoRanksInParticularAreRefused) {
  Resident load(At("s"),
                {.source = convert::Own("zero1_w2"), .target = "", .format = "safetensors"});
  load.Join();
  ASSERT_FALSE(load.outcomes[0].has_value());
  EXPECT_EQ(load.outcomes[0].error().code, Errc::kUnsupported);
  EXPECT_NE(load.outcomes[0].error().message.find("format safetensors"), std::string::npos);
}

}  // namespace
}  // namespace shardwright::cache
