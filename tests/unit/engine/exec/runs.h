// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

#include "engine/exec/run/run.h"
#include "memory_bytes.h"
#include "support/comm/threads.h"
#include "unit/support/os/scratch.h"

namespace shardwright::exec {

/// Requests a stop after so many queries.
class Stopping final : public NullSink {
 public:
  explicit Stopping(int looks) : looks_(looks) {}
  bool stop_requested() const override { return looks_-- <= 0; }

 private:
  mutable std::atomic<int> looks_;
};

class Runs : public os::Scratch {
 protected:
  void SetUp() override {
    os::Scratch::SetUp();
    std::filesystem::create_directories(At("in"));
    options_.output = At("in/out");
    options_.manifest = R"({"command": "test"})";
    options_.threads = 2;
  }

  /// Writes one file of that path to the output.
  Result<RunReport> Write(const std::string& path) {
    source_ = {};
    target_ = {};
    target_.files.push_back(plan::TextFile(path, "text"));
    return Run();
  }

  /// A tensor to be cut into files: by default of a few units, into two.
  void MakeTensor(std::uint64_t elems = plan::kUnitBytes, std::uint32_t files = 2) {
    plan::MapMaker source, wanted;
    source.Slices("w", "fp32", DType::kF32, {elems}, 0, 3);
    wanted.Slices("w", "fp32", DType::kF32, {elems}, 0, files);
    members_ = plan::Numbered(source.map);
    SetChecksums(members_, &source.map);
    source_ = source.map;
    target_ = wanted.AsTarget();
  }

  Result<RunReport> Run(Sink* sink = nullptr) {
    const auto comm = comm::MakeSerialComm();
    SW_TRY_ASSIGN(const plan::Plan plan, plan::Plan::Make(source_, target_));
    MemoryBytes bytes(members_);
    NullSink none;
    return exec::Run(*comm, plan, bytes, options_, sink != nullptr ? *sink : none);
  }

  /// Runs on several ranks, which must all return the same status. \returns the first one's outcome
  Status RunOn(int ranks, int looks = 1 << 30) {
    const auto answers = comm::RunThreads(ranks, [&](comm::Comm& comm) -> Status {
      SW_TRY_ASSIGN(const plan::Plan plan, plan::Plan::Make(source_, target_));
      MemoryBytes bytes(members_);
      Stopping sink(looks);
      SW_TRY_ASSIGN(const RunReport done, exec::Run(comm, plan, bytes, options_, sink));
      if (comm.rank() == 0) report_ = done;
      return {};
    });
    for (const Status& answer : answers) {
      EXPECT_EQ(answer.has_value(), answers[0].has_value())
          << (answer ? answers[0] : answer).error().message;
    }
    return answers[0];
  }

  /// A run of one thread that is stopped after so many units.
  void Stop(int units) {
    options_.threads = 1;
    Stopping stopping(units);
    const auto stopped = Run(&stopping);
    ASSERT_FALSE(stopped);
    ASSERT_EQ(stopped.error().code, Errc::kStopped);
    options_.resume = Resume::kIfSameOrDone;
  }

  /// Returns the path of the stage that a stopped run has left behind.
  std::string StagePath() const {
    for (const auto& entry : std::filesystem::directory_iterator(At("in"))) {
      if (entry.path().filename().string().starts_with("out.partial-"))
        return entry.path().string();
    }
    return "";
  }

  void ExpectTensor() const {
    const auto values = plan::AsFloats(Get("in/out/out0") + Get("in/out/out1"));
    ASSERT_EQ(values.size(), plan::kUnitBytes);
    for (std::size_t i = 0; i < values.size(); ++i) ASSERT_EQ(values[i], static_cast<float>(i));
  }

  layout::ShardMap source_;
  plan::Target target_;
  std::vector<std::string> members_;
  RunOptions options_;
  RunReport report_;  // of the last RunOn
};

}  // namespace shardwright::exec
