// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "convert/input.h"
#include "partial/agent/agent.h"
#include "partial/agent/agent_client.h"
#include "partial/store/store.h"
#include "support/comm/comm.h"
#include "unit/support/os/scratch.h"

namespace shardwright::partial::test {

/// Returns the hello that an agent of this name sends.
inline Hello HelloOf(const std::string& name) { return {Hello::Role::kAgent, name, name + "-id"}; }

/// A client of an agent, which itself is an agent of this name.
inline AgentClient ClientOf(const std::string& name, const os::Address& address,
                            std::shared_ptr<const os::TlsKey> key = {}) {
  return AgentClient(address, std::move(key), {}, kAgentPatience, HelloOf(name));
}

/// Agents over a series of small checkpoints, global_step1 to global_step<kLast>.
class AgentTest : public os::Scratch {
 protected:
  static constexpr std::uint64_t kLast = 24;

  static void SetUpTestSuite() {
    series = (std::filesystem::temp_directory_path() / "sw-agent-XXXXXX").string();
    ASSERT_NE(::mkdtemp(series.data()), nullptr);
    const std::string code =
        "import sys; sys.dont_write_bytecode = True; sys.path.insert(0, '" SW_SOURCE_DIR
        "/tests/crash'); import pathlib, moe_checkpoint as m; m.series(pathlib.Path('" +
        series + "'), m.Model(), range(1, " + std::to_string(kLast + 1) + "))";
    ASSERT_EQ(std::system((SW_PYTHON " -c \"" + code + "\"").c_str()), 0);
  }
  static void TearDownTestSuite() { std::filesystem::remove_all(series); }

  AgentOptions Options() const {
    AgentOptions options;
    options.save.store = At("store");
    options.save.k_snapshot = 2;
    options.save.k_persist = 1;
    options.memory_bytes = std::uint64_t{64} << 20;
    return options;
  }

  static std::unique_ptr<convert::Input> Open(std::uint64_t iteration) {
    NullSink sink;
    const auto comm = comm::MakeSerialComm();
    auto input = convert::OpenInput(
        *comm, {{series + "/global_step" + std::to_string(iteration)}, {}, false}, sink);
    EXPECT_TRUE(input) << input.error().message;
    return *std::move(input);
  }

  Result<std::uint64_t> Snapshot(Agent& agent, std::uint64_t iteration,
                                 const Agent::Copied& copied = {}, const FillSource& fill = {}) {
    const std::uint64_t known = Known(agent.options().save.store);
    return agent.Snapshot(*Open(iteration), known, sink_, copied, fill);
  }

  /// The last recovery of a store, 0 where there is none.
  static std::uint64_t Known(const std::string& store) {
    if (!std::filesystem::exists(store + "/store.json")) return 0;
    const auto last = Store::Open(store)->LastRecoveryFile();
    EXPECT_TRUE(last) << last.error().message;
    return *last ? (*last)->sequence : 0;
  }

  /// Returns the newest usable checkpoint of the store.
  std::optional<Manifest> Stored() const {
    if (!std::filesystem::exists(At("store/store.json"))) return std::nullopt;
    const auto store = Store::Open(At("store"));
    EXPECT_TRUE(store) << store.error().message;
    std::optional<Manifest> newest;
    const auto list = store->List();
    for (const StoredCheckpoint& one : *list) {
      if (!one.abandoned) newest = *store->ReadManifest(one);
    }
    return newest;
  }

  /// Simulates pec-restore: training resumes from an iteration that the store has.
  /// \param older  modules that resume with an older state; absent if this is unknown
  void Restore(std::uint64_t resume,
               std::optional<std::map<std::string, std::uint64_t>> older = {}) const {
    const auto store = Store::Open(At("store"));
    ASSERT_TRUE(store) << store.error().message;
    RecoveryRecord recovery;
    const auto last = store->LastRecovery();
    recovery.sequence = *last ? (*last)->sequence + 1 : 1;
    recovery.resume = resume;
    recovery.older = std::move(older);
    const auto list = store->List();
    for (const StoredCheckpoint& one : *list) {
      if (one.abandoned) continue;
      if (one.iteration > resume) {
        recovery.abandoned.push_back(one.sequence);
      } else {
        recovery.manifest = one.sequence;
        recovery.state = store->ReadManifest(one)->state;
      }
    }
    ASSERT_TRUE(store->AddRecovery(recovery));
  }

  static inline std::string series;
  NullSink sink_;
};

}  // namespace shardwright::partial::test
