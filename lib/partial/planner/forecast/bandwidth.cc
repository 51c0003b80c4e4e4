// SPDX-License-Identifier: Apache-2.0
#include "partial/planner/forecast/bandwidth.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <new>
#include <random>
#include <span>
#include <vector>

#include "support/base/bytes.h"
#include "support/os/commit.h"
#include "support/os/dir.h"
#include "support/os/file.h"

namespace shardwright::partial {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::size_t kBlock = std::size_t{16} << 20;
/// Bytes of each of two buffers, which are larger than the caches of a processor.
constexpr std::size_t kBuffer = kMeasuredBytes / 2;

/// Returns random bytes, which a file system cannot compress.
std::vector<std::byte> Noise() {
  std::vector<std::byte> out(kBuffer);
  std::mt19937_64 random(1);
  for (std::size_t at = 0; at < out.size(); at += sizeof(std::uint64_t)) {
    const std::uint64_t word = random();
    std::memcpy(out.data() + at, &word, sizeof word);
  }
  return out;
}

/// Creates a file and unlinks it at once, so that it disappears when it is closed.
Result<os::File> OpenNameless(const std::string& folder) {
  SW_TRY_ASSIGN(const std::string run_id, os::MakeRunId());
  SW_TRY_ASSIGN(os::File file, os::File::Create(folder + "/.measure-" + run_id));
  SW_TRY(os::RemoveFile(file.path()));
  return file;
}

Status WriteAndSync(const std::string& folder, std::span<const std::byte> noise, Sink& sink) {
  SW_TRY_ASSIGN(const os::File file, OpenNameless(folder));
  for (std::uint64_t at = 0; at < kMeasuredBytes; at += kBlock) {
    if (sink.stop_requested()) return Fail(Errc::kStopped, "stopped on request while measuring");
    SW_TRY(file.WriteAt(at, noise.subspan(at % kBuffer, kBlock)));
    sink.Progress(at + kBlock, kMeasuredBytes);
  }
  return file.Sync();
}

/// Returns the seconds since `start` on the slowest rank. Collective.
Result<double> Slowest(comm::Comm& comm, Clock::time_point start) {
  const auto mine = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start);
  SW_TRY_ASSIGN(const std::uint64_t most,
                comm.AllReduceMax(static_cast<std::uint64_t>(
                    std::max<std::int64_t>(1, static_cast<std::int64_t>(mine.count())))));
  return static_cast<double>(most) * 1e-9;
}

}  // namespace

Result<Bandwidths> MeasureBandwidths(comm::Comm& comm, const std::string& folder, Sink& sink) {
  sink.Pass("measure");
  std::vector<std::byte> noise;
  std::vector<std::byte> copy;
  const auto prepare = [&]() -> Status {
    SW_TRY_ASSIGN(const bool there, os::IsDir(folder));
    if (!there) return Fail(Errc::kNotFound, folder, ": the folder to measure in does not exist");
    try {
      noise = Noise();
      copy.resize(kBuffer);
    } catch (const std::bad_alloc&) {
      return Fail(Errc::kLimit, "not enough memory for the measurement: ", FormatBytes(2 * kBuffer),
                  " are needed");
    }
    return {};
  };
  SW_TRY(comm.Agree(prepare()));
  Bandwidths out;
  SW_TRY(comm.Barrier());
  auto start = Clock::now();
  const Status written = WriteAndSync(folder, noise, sink);
  SW_TRY_ASSIGN(double seconds, Slowest(comm, start));
  SW_TRY(comm.Agree(written));
  out.persist_bytes_per_s = static_cast<double>(kMeasuredBytes) / seconds;
  SW_TRY(comm.Barrier());
  start = Clock::now();
  std::memcpy(copy.data(), noise.data(), kBuffer);
  std::memcpy(noise.data(), copy.data(), kBuffer);
  SW_TRY_ASSIGN(seconds, Slowest(comm, start));
  out.snapshot_bytes_per_s = static_cast<double>(kMeasuredBytes) / seconds;
  sink.AddWritten(kMeasuredBytes, 0);
  return out;
}

}  // namespace shardwright::partial
