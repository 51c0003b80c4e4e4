// SPDX-License-Identifier: Apache-2.0
// Compares a load through the cuda backend with the limit of the device: reads a file that is in
// the page cache, through a pinned ring into device memory, against copies from pinned memory.
// Prints the best of five: name, GB/s, GB/s of the reference copy, ratio.
//
//     cuda_bench [MIB [FOLDER]]      (of the file; 1024 and the folder for temporary files)

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include "engine/device/cuda_plugin.h"
#include "engine/device/device.h"
#include "support/comm/comm.h"

namespace shardwright::device {
namespace {

constexpr int kTimes = 5;
constexpr std::uint64_t kSlot = std::uint64_t{8} << 20;
constexpr std::size_t kSlots = 4;

struct Bench {
  Device& device;
  Stream& stream;
  std::uint64_t bytes;
};

/// Returns the seconds of the fastest of some calls, including the wait for the device.
Result<double> Best(Bench& bench, const std::function<Status()>& work) {
  double best = 1e9;
  for (int i = 0; i <= kTimes; ++i) {
    const auto begun = std::chrono::steady_clock::now();
    SW_TRY(work());
    SW_TRY(bench.stream.Synchronize());
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
    if (i > 0) best = std::min(best, took.count());  // the first run pays for lazy initialization
  }
  return best;
}

void Print(const std::string& what, std::uint64_t bytes, double seconds, double against) {
  const double gb = static_cast<double>(bytes) / 1e9;
  std::printf("%-28s %9.2f GB/s  against %9.2f GB/s  ratio %.2f\n", what.c_str(), gb / seconds,
              gb / against, against / seconds);
}

Status Load(Bench& bench, int file) {
  SW_TRY_ASSIGN(const auto target, bench.device.Allocate(Place::kDevice, bench.bytes));
  SW_TRY_ASSIGN(const auto ring, bench.device.Allocate(Place::kPinned, kSlot * kSlots));
  std::vector<std::unique_ptr<Event>> events(kSlots);
  const auto each_part = [&](const auto& fill) -> Status {
    std::size_t slot = 0;
    for (std::uint64_t at = 0; at < bench.bytes; at += kSlot, slot = (slot + 1) % kSlots) {
      std::byte* const part = ring->data() + slot * kSlot;
      const std::uint64_t some = std::min(kSlot, bench.bytes - at);
      if (events[slot] != nullptr) SW_TRY(events[slot]->Wait());
      if (!fill(part, at, some)) return Fail(Errc::kIo, "the file is not read");
      SW_TRY(bench.stream.Copy(target->data() + at, part, some));
      SW_TRY_ASSIGN(events[slot], bench.stream.Record());
    }
    return {};
  };
  const auto from_file = [&](std::byte* to, std::uint64_t at, std::uint64_t some) {
    while (some > 0) {
      const ssize_t got = pread(file, to, some, static_cast<off_t>(at));
      if (got <= 0) return false;
      to += got;
      at += static_cast<std::uint64_t>(got);
      some -= static_cast<std::uint64_t>(got);
    }
    return true;
  };
  SW_TRY_ASSIGN(const double loaded, Best(bench, [&] { return each_part(from_file); }));
  SW_TRY_ASSIGN(const double copied,
                Best(bench, [&] { return each_part([](auto, auto, auto) { return true; }); }));
  Print("load from the page cache", bench.bytes, loaded, copied);
  events.clear();
  return {};
}

Status Main(std::uint64_t bytes, int file) {
  const auto comm = comm::MakeSerialComm();
  SW_TRY_ASSIGN(const auto device, OpenCudaDevice(*comm, {}));
  std::printf("%s, %llu MiB\n", device->name().c_str(),
              static_cast<unsigned long long>(bytes >> 20));
  SW_TRY_ASSIGN(const auto stream, device->MakeStream());
  Bench bench{*device, *stream, bytes};
  return Load(bench, file);
}

/// A file of so many bytes that is deleted with the descriptor; -1 if it cannot be made.
int MakeFile(const std::string& folder, std::uint64_t bytes) {
  std::string path = folder + "/sw-cuda-bench-XXXXXX";
  const int file = mkstemp(path.data());
  if (file < 0) return -1;
  unlink(path.c_str());
  const std::vector<char> part(1 << 20, 'x');
  for (std::uint64_t at = 0; at < bytes; at += part.size()) {
    if (write(file, part.data(), part.size()) != static_cast<ssize_t>(part.size())) return -1;
  }
  return file;
}

}  // namespace
}  // namespace shardwright::device

int main(int argc, char** argv) {
  using namespace shardwright;
  const std::uint64_t mib = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1024;
  if (mib == 0 || argc > 3) {
    std::fputs("usage: cuda_bench [MIB [FOLDER]]\n", stderr);
    return 2;
  }
  const std::string folder = argc > 2 ? argv[2] : std::filesystem::temp_directory_path().string();
  const int file = device::MakeFile(folder, mib << 20);
  if (file < 0) {
    std::fprintf(stderr, "cuda_bench: error: %s: no file of %llu MiB can be written\n",
                 folder.c_str(), static_cast<unsigned long long>(mib));
    return static_cast<int>(Errc::kIo);
  }
  const Status status = device::Main(mib << 20, file);
  close(file);
  if (status) return 0;
  std::fprintf(stderr, "cuda_bench: error: %s\n", status.error().message.c_str());
  return static_cast<int>(status.error().code);
}
