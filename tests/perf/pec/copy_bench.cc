// SPDX-License-Identifier: Apache-2.0
// Copies between agents at ports, with the agents' key and without, each on one core. Measures the
// bytes that a receiver accepts and verifies by digest, sender and receiver together. Speeds are by
// processor time, which other work on the machine changes less than the wall time.
//
//     pec_copy_bench [MIB]

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <future>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "engine/plan/plan.h"
#include "partial/agent/agent_protocol.h"
#include "partial/store/write_blobs.h"
#include "support/os/tls.h"

namespace shardwright::partial {
namespace {

constexpr int kRuns = 25;
constexpr std::chrono::seconds kPatience(60);

using Key = std::shared_ptr<const os::TlsKey>;

Result<Key> NewKey() {
  std::string folder = (std::filesystem::temp_directory_path() / "sw-key-XXXXXX").string();
  if (::mkdtemp(folder.data()) == nullptr) return Fail(Errc::kIo, folder, ": cannot be made");
  SW_TRY(os::TlsKey::Make(folder + "/key"));
  Result<Key> key = os::TlsKey::Read(folder + "/key");
  std::filesystem::remove_all(folder);
  return key;
}

/// A blob of some bytes, in memory.
Result<BlobPtr> MakeBlob(std::uint64_t bytes, const std::shared_ptr<MemoryPool>& pool) {
  SW_TRY_ASSIGN(BlobMemory buffer, pool->Take(bytes));
  for (std::uint64_t i = 0; i < bytes; ++i) buffer.get()[i] = static_cast<std::byte>(i * 7 >> 5);
  std::vector<exec::UnitSum> sums;
  std::vector<std::uint32_t> units;
  for (std::uint64_t at = 0; at < bytes; at += units.back()) {
    const std::uint64_t left = bytes - at;
    units.push_back(static_cast<std::uint32_t>(std::min<std::uint64_t>(left, plan::kUnitBytes)));
    sums.push_back(exec::SumOf(std::span(buffer.get() + at, units.back())));
  }
  const BlobRef ref = Summarize(sums);
  return std::make_shared<const MemoryBlob>(pool, std::move(buffer), ref, std::move(units));
}

Status Secure(os::Connection& connection, const Key& key, bool accepted) {
  if (!key) return {};
  SW_TRY_ASSIGN(auto channel, key->MakeChannel(accepted));
  return connection.Secure(std::move(channel), kPatience);
}

double ProcessorSeconds() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// Sends a blob over a connection of its own.
/// \returns seconds of processor time, without those of the handshake
Result<double> Copy(const BlobPtr& blob, const std::shared_ptr<MemoryPool>& pool, const Key& key) {
  SW_TRY_ASSIGN(const os::Address any, os::ParseAddress("127.0.0.1:0"));
  SW_TRY_ASSIGN(const os::Listener listener, os::Listener::Open(any));
  SW_TRY_ASSIGN(os::Connection sender, os::Connection::Open(listener.address(), kPatience));
  SW_TRY_ASSIGN(std::optional<os::Connection> receiver, listener.Accept(kPatience, kPatience));
  if (!receiver) return Fail(Errc::kIo, "nobody has come");
  std::future<Status> sent = std::async(std::launch::async, [&]() -> Status {
    SW_TRY(Secure(sender, key, false));
    SW_TRY_ASSIGN(const auto line, sender.ReceiveLine(16));
    if (!line) return Fail(Errc::kIo, "nobody asks");
    Limiter limiter(0);
    Limiter::Job job(limiter);
    return SendBlob(sender, *blob, job);
  });
  SW_TRY(Secure(*receiver, key, true));
  const double start = ProcessorSeconds();
  SW_TRY(receiver->Send("go\n"));
  SW_TRY(ReceiveBlob(*receiver, blob->ref(), pool));
  SW_TRY(sent.get());
  return ProcessorSeconds() - start;
}

Status Measure(std::uint64_t bytes) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(static_cast<std::size_t>(std::max(::sched_getcpu(), 0)), &one);
  if (::sched_setaffinity(0, sizeof one, &one) != 0) {
    return Fail(Errc::kIo, "cannot stay on one core");
  }
  SW_TRY_ASSIGN(const Key key, NewKey());
  const auto pool = std::make_shared<MemoryPool>(4 * bytes);
  SW_TRY_ASSIGN(const BlobPtr blob, MakeBlob(bytes, pool));
  // Alternates, so that other load affects both; takes the minimum, as other load only adds time.
  double with = std::numeric_limits<double>::max();
  double without = with;
  for (int run = 0; run < kRuns; ++run) {
    SW_TRY_ASSIGN(const double plain, Copy(blob, pool, nullptr));
    SW_TRY_ASSIGN(const double tls, Copy(blob, pool, key));
    without = std::min(without, plain);
    with = std::min(with, tls);
  }
  const double giga = static_cast<double>(bytes) / 1e9;
  std::printf("TLS %.2f GB/s, plain %.2f GB/s, ratio %.2f\n", giga / with, giga / without,
              without / with);
  return {};
}

}  // namespace
}  // namespace shardwright::partial

int main(int argc, char** argv) {
  const std::uint64_t mib = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 64;
  if (mib == 0 || argc > 2) {
    std::fputs("use: pec_copy_bench [MIB]\n", stderr);
    return 2;
  }
  const auto done = shardwright::partial::Measure(mib << 20);
  if (!done) std::fprintf(stderr, "pec_copy_bench: %s\n", done.error().message.c_str());
  return done ? 0 : 1;
}
