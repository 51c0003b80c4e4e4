// SPDX-License-Identifier: Apache-2.0
// Times the part of an agent's snapshot that training waits for, the copy, on two threads, against
// memcpy of the same bytes on one, both into reused memory. Also times the checksums after it.
//
//     pec_snapshot_bench CHECKPOINT ITERATION

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "partial/agent/memory/memory.h"
#include "partial/store/modules.h"
#include "support/comm/comm.h"

namespace shardwright::partial {
namespace {

constexpr int kRuns = 7;

double Seconds(const std::chrono::steady_clock::time_point& start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Half of the experts of every layer, others in odd layers than in even ones.
std::vector<std::vector<std::uint32_t>> Half(const Model& model) {
  std::vector<std::vector<std::uint32_t>> chosen(model.experts.size());
  for (std::size_t layer = 0; layer < chosen.size(); ++layer) {
    for (std::uint32_t e = layer % 2; e < model.experts[layer]; e += 2) chosen[layer].push_back(e);
  }
  return chosen;
}

Status Measure(const std::string& folder, std::uint64_t iteration) {
  NullSink sink;
  const auto comm = comm::MakeSerialComm();
  SW_TRY_ASSIGN(const auto input, convert::OpenInput(*comm, {{folder}, {}, false}, sink));
  SnapshotChoice choice;
  choice.iteration = iteration;
  SW_TRY_ASSIGN(choice.model, DescribeModel(input->checkpoint));
  choice.selection = Half(choice.model);
  SaveRequest options;
  options.threads = 2;  // as in the other benchmarks: two threads against one plain copy
  const auto pool = std::make_shared<MemoryPool>(std::uint64_t{16} << 30);
  const std::uint64_t bytes = BytesToTake(*input, choice);
  std::uint64_t all = 0;
  for (const Module& module : choice.model.modules) all += module.bytes();
  std::vector<std::byte> from(bytes, std::byte{1});
  std::vector<std::byte> to(bytes, std::byte{2});
  double copy = 1e9;
  double take = 1e9;
  double seal = 1e9;
  std::uint64_t read = 0;
  for (int run = 0; run < kRuns; ++run) {
    auto start = std::chrono::steady_clock::now();
    std::memcpy(to.data(), from.data(), bytes);
    copy = std::min(copy, Seconds(start));
    from[static_cast<std::size_t>(run)] = to[bytes / 2];
    const std::uint64_t before = input->bytes->bytes_read();
    start = std::chrono::steady_clock::now();
    SW_TRY_ASSIGN(const auto taking, SnapshotCopy::Copy(*input, choice, pool, options, sink));
    take = std::min(take, Seconds(start));
    start = std::chrono::steady_clock::now();
    SW_TRY_ASSIGN(const Taken taken, taking->Seal());
    seal = std::min(seal, Seconds(start));
    read = input->bytes->bytes_read() - before;
  }
  const double gb = static_cast<double>(bytes) / 1e9;
  std::printf(
      "snapshot of %.0f MB of %.0f MB: %.2f GB/s, memcpy %.2f GB/s, ratio %.2f; sums %.2f GB/s; "
      "%.3f "
      "bytes read for each taken\n",
      1e3 * gb, static_cast<double>(all) / 1e6, gb / take, gb / copy, copy / take, gb / seal,
      static_cast<double>(read) / static_cast<double>(bytes));
  return {};
}

}  // namespace
}  // namespace shardwright::partial

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fputs("use: pec_snapshot_bench CHECKPOINT ITERATION\n", stderr);
    return 2;
  }
  const auto done = shardwright::partial::Measure(argv[1], std::strtoull(argv[2], nullptr, 10));
  if (!done) std::fprintf(stderr, "pec_snapshot_bench: %s\n", done.error().message.c_str());
  return done ? 0 : 1;
}
