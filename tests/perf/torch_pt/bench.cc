// SPDX-License-Identifier: Apache-2.0
// Times opening and parsing of .pt files: pt_bench REPEATS FILE...
// Reported per pass over all files; the best of REPEATS is the limit of the machine.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "files/pickle/writer.h"
#include "files/torch_pt/reader.h"
#include "files/torch_pt/writer.h"
#include "support/base/crc32.h"
#include "support/os/file.h"

namespace {

namespace os = shardwright::os;
namespace torch_pt = shardwright::torch_pt;
using shardwright::Crc32Share;
using shardwright::ItemSize;
using shardwright::Result;

struct Times {
  double open_s = 0;
  double parse_s = 0;
  double layout_s = 0;
  double frame_s = 0;
  std::uint64_t pickle_bytes = 0;
  std::uint64_t storages = 0;
};

double Now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

Result<Times> Pass(const std::vector<std::string>& paths) {
  Times times;
  for (const std::string& path : paths) {
    double start = Now();
    SW_TRY_ASSIGN(const os::File file, os::File::OpenRead(path));
    SW_TRY_ASSIGN(const shardwright::files::ContainerMetadata metadata,
                  torch_pt::ReadMetadata(file));
    times.open_s += Now() - start;
    start = Now();
    SW_TRY_ASSIGN(const torch_pt::Document document, torch_pt::Parse(metadata));
    times.parse_s += Now() - start;
    std::vector<torch_pt::StorageSpec> specs;
    for (const auto& ref : document.storages) {
      specs.push_back({ref.dtype, ref.untyped, ref.bytes / ItemSize(ref.dtype)});
    }
    start = Now();
    SW_TRY_ASSIGN(const torch_pt::Layout layout, torch_pt::Layout::Make(document.root, specs));
    times.layout_s += Now() - start;
    start = Now();
    const auto pieces = layout.Frame(std::vector<std::uint32_t>(specs.size()));
    times.frame_s += Now() - start;
    times.pickle_bytes += metadata.header.size();
    times.storages += pieces.size() - 1;
  }
  return times;
}

double ShareNanoseconds() {
  constexpr std::uint64_t kCalls = 1'000'000;
  std::uint32_t crc = 1;
  const double start = Now();
  for (std::uint64_t i = 0; i < kCalls; ++i)
    crc ^= Crc32Share(static_cast<std::uint32_t>(i), i * 0x9E3779B97F4A7C15U);
  const double seconds = Now() - start;
  // The sum is printed so that the loop stays.
  std::printf("crc share       %8.1f ns a call (%08x)\n", seconds * 1e9 / kCalls, crc);
  return seconds;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fputs("pt_bench REPEATS FILE...\n", stderr);
    return 2;
  }
  const std::vector<std::string> paths(argv + 2, argv + argc);
  Times best;
  for (int i = 0; i < std::max(1, std::atoi(argv[1])); ++i) {
    const Result<Times> times = Pass(paths);
    if (!times) {
      std::fprintf(stderr, "%s\n", times.error().message.c_str());
      return static_cast<int>(times.error().code);
    }
    if (i == 0 || times->open_s + times->parse_s < best.open_s + best.parse_s) best = *times;
  }
  const double megabytes = static_cast<double>(best.pickle_bytes) / 1e6;
  std::printf("files           %8zu, %llu storages with bytes, %.2f MB of pickle\n", paths.size(),
              static_cast<unsigned long long>(best.storages), megabytes);
  std::printf("read skeletons  %8.2f ms\n", best.open_s * 1e3);
  std::printf("parse           %8.2f ms, %.0f MB/s\n", best.parse_s * 1e3,
              megabytes / best.parse_s);
  std::printf("lay out         %8.2f ms\n", best.layout_s * 1e3);
  std::printf("frame           %8.2f ms\n", best.frame_s * 1e3);
  ShareNanoseconds();
  return 0;
}
