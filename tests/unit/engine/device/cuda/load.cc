// SPDX-License-Identifier: Apache-2.0
#include "load.h"

#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>

#include "checkpoints/registry.h"
#include "support/comm/threads.h"

namespace shardwright::device::cuda {

namespace {

/// Returns the checkpoint's path. scripts/gpu-run names a copy, on machines without the sources.
std::string SourcePath() {
  const char* const named = std::getenv("SHARDWRIGHT_TEST_SOURCE");
  if (named != nullptr) return named;
  return std::filesystem::path(SW_SOURCE_DIR) / "tests/data/deepspeed/zero1_w2/ckpt";
}

Result<cache::Loaded> LoadFor(comm::Comm& comm, Device& device, const convert::Input& input,
                              Sink& sink) {
  SW_TRY_ASSIGN(const checkpoints::Format* const format, checkpoints::RequireFormat("deepspeed"));
  SW_TRY_ASSIGN(const checkpoints::TargetSpec spec,
                checkpoints::ParseTarget(*format, "zero=2,dp=4"));
  return cache::Load(comm, device, input, spec, *format, {}, sink);
}

}  // namespace

std::unique_ptr<HostLoad> LoadOnHost(int ranks) {
  auto host = std::make_unique<HostLoad>();
  host->devices.resize(static_cast<std::size_t>(ranks));
  host->inputs.resize(static_cast<std::size_t>(ranks));
  host->loaded.resize(static_cast<std::size_t>(ranks));
  const std::vector<Status> outcomes = comm::RunThreads(ranks, [&](comm::Comm& comm) -> Status {
    const auto rank = static_cast<std::size_t>(comm.rank());
    NullSink sink;
    convert::InputOptions options;
    options.source_paths = {SourcePath()};
    SW_TRY_ASSIGN(host->inputs[rank], convert::OpenInput(comm, options, sink));
    SW_TRY_ASSIGN(host->devices[rank], OpenDevice(Kind::kHost, comm));
    SW_TRY_ASSIGN(host->loaded[rank],
                  LoadFor(comm, *host->devices[rank], *host->inputs[rank], sink));
    return {};
  });
  for (const Status& outcome : outcomes) EXPECT_TRUE(outcome) << outcome.error().message;
  return host;
}

Status LoadOnDevice(Rank& rank, const HostLoad& host, Sink& sink) {
  const auto number = static_cast<std::size_t>(rank.number());
  SW_TRY_ASSIGN(const cache::Loaded loaded,
                LoadFor(rank.comm, rank.device, *host.inputs[number], sink));
  const cache::Loaded& expected = host.loaded[number];
  SW_TRY_ASSIGN(const auto stream, rank.device.MakeStream());
  SW_TRY_ASSIGN(const auto found,
                Read(rank.device, *stream, loaded.buffer->data(), loaded.buffer->size()));
  if (found.size() != expected.buffer->size()) {
    return Fail(Errc::kMismatch, expected.buffer->size(), " bytes expected, found ", found.size());
  }
  for (std::size_t part = 0; part < loaded.where.parts.size(); ++part) {
    const cache::Part& stored = loaded.where.parts[part];
    for (std::size_t i = 0; i < stored.processes.size(); ++i) {
      if (stored.processes[i] != number) continue;
      for (const plan::Payload& payload : loaded.where.target.files[part].payloads) {
        const std::uint64_t at = stored.at[i] + payload.offset;
        SW_TRY(Same({expected.buffer->data() + at, payload.bytes},
                    std::span(found).subspan(at, payload.bytes), "part " + std::to_string(part)));
      }
    }
  }
  return {};
}

}  // namespace shardwright::device::cuda
