// SPDX-License-Identifier: Apache-2.0
// Times AdamW steps: replay_bench ELEMS THREADS REPEATS [ROOTS LAST]
// With `ROOTS` (square roots of all float32 numbers of [1, 4), as torch has them) also with that
// table. For comparison, times a copy that moves the bytes of a step: 28 for each element, 14 of
// them read and 14 written. The best of REPEATS is the limit of the machine.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <tbb/global_control.h>
#include <tbb/parallel_for.h>

#include "partial/optimizer_steps/apply.h"

namespace {

namespace optimizer_steps = shardwright::optimizer_steps;

constexpr std::size_t kRangeElems = std::size_t{1} << 18;  // a unit of 1 MiB

double Best(int repeats, const std::function<void()>& body) {
  double best = 0;
  for (int i = 0; i < repeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    body();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    if (i == 0 || taken.count() < best) best = taken.count();
  }
  return best;
}

void ForRanges(std::size_t elems, const std::function<void(std::size_t, std::size_t)>& body) {
  tbb::parallel_for(std::size_t{0}, (elems + kRangeElems - 1) / kRangeElems, [&](std::size_t i) {
    const std::size_t first = i * kRangeElems;
    body(first, std::min(kRangeElems, elems - first));
  });
}

std::optional<optimizer_steps::RootTable> ReadRoots(const char* path, const char* last) {
  std::vector<float> roots(optimizer_steps::RootTable::kRoots);
  std::ifstream in(path, std::ios::binary);
  in.read(reinterpret_cast<char*>(roots.data()),
          static_cast<std::streamsize>(roots.size() * sizeof(float)));
  auto table = optimizer_steps::RootTable::FromRoots(
      roots, static_cast<std::uint32_t>(std::strtoul(last, nullptr, 10)));
  if (!table) {
    std::fprintf(stderr, "%s\n", table.error().message.c_str());
    return std::nullopt;
  }
  return *std::move(table);
}

void Print(const char* what, double seconds, std::size_t elems) {
  const double bytes = 28.0 * static_cast<double>(elems);
  std::printf("%-22s %8.2f ms, %6.2f GB/s, %6.2f ns an element\n", what, seconds * 1e3,
              bytes / seconds / 1e9, seconds * 1e9 / static_cast<double>(elems));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4 && argc != 6) {
    std::fputs("replay_bench ELEMS THREADS REPEATS [ROOTS LAST]\n", stderr);
    return 2;
  }
  const std::size_t elems = std::strtoull(argv[1], nullptr, 10);
  const std::size_t threads = std::max(1ULL, std::strtoull(argv[2], nullptr, 10));
  const int repeats = std::max(1, std::atoi(argv[3]));
  const tbb::global_control limit(tbb::global_control::max_allowed_parallelism, threads);

  std::vector<float> param(elems);
  std::vector<float> gradient(elems);
  std::vector<float> first(elems, 0.01F);
  std::vector<float> second(elems);
  std::uint32_t random = 1;
  for (std::size_t i = 0; i < elems; ++i) {
    random = random * 1664525U + 1013904223U;
    param[i] = static_cast<float>(random >> 8) * 0x1p-24F - 0.5F;
    gradient[i] = param[i] * 0.1F;
    second[i] = param[i] * param[i] * 0.01F;
  }
  optimizer_steps::Step step;
  step.lr = 1e-3;
  step.beta1 = 0.9;
  step.beta2 = 0.999;
  step.eps = 1e-8;
  step.weight_decay = 0.01;
  step.count = 1000;
  const auto run = [&](const optimizer_steps::RootTable* roots) {
    ForRanges(elems, [&](std::size_t at, std::size_t count) {
      optimizer_steps::Elements range;
      range.param = std::span(param).subspan(at, count);
      range.states = {
          std::span(first).subspan(at, count), std::span(second).subspan(at, count), {}};
      range.gradient = std::as_bytes(std::span(gradient).subspan(at, count));
      if (!optimizer_steps::Apply(step, range, roots)) std::abort();
    });
  };

  std::vector<std::byte> from(14 * elems, std::byte{1});
  std::vector<std::byte> to(14 * elems, std::byte{2});
  const double copied = Best(repeats, [&] {
    ForRanges(elems, [&](std::size_t at, std::size_t count) {
      std::memcpy(to.data() + 14 * at, from.data() + 14 * at, 14 * count);
    });
  });
  Print("copy", copied, elems);
  const double correct = Best(repeats, [&] { run(nullptr); });
  Print("AdamW", correct, elems);
  std::printf("%-22s %8.2f of the copy's speed\n", "", copied / correct);
  if (argc == 6) {
    const auto roots = ReadRoots(argv[4], argv[5]);
    if (!roots) return 4;
    const double with_table = Best(repeats, [&] { run(&*roots); });
    Print("AdamW, table of roots", with_table, elems);
    std::printf("%-22s %8.2f of the copy's speed\n", "", copied / with_table);
  }
  return 0;
}
