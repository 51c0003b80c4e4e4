// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <random>
#include <string>

#include "partial/select/selection.h"
#include "partial/select/sharding/sharding.h"
#include "partial/store/manifest.h"

namespace shardwright::partial {
namespace {

template <class Work>
double BestMs(Work work) {
  double best_ms = 1e9;
  for (int run = 0; run < 20; ++run) {
    const auto start = std::chrono::steady_clock::now();
    work();
    const std::chrono::duration<double, std::milli> taken =
        std::chrono::steady_clock::now() - start;
    best_ms = std::min(best_ms, taken.count());
  }
  return best_ms;
}

Status SelectAndCut(const ExpertMap& map, const LevelState& memory, const LevelState& storage,
                    const SelectionOptions& options, const SaveRanks& ranks) {
  SW_TRY_ASSIGN(const auto chosen, SelectTwoLevels(map, memory, storage, options));
  SW_TRY_ASSIGN(const auto cut, CutExperts(map, chosen.persist, ranks));
  return {};
}

// 60 layers x 256 experts, 256 expert-parallel ranks of 1024: the work of each rank at one save.
Status Select() {
  const LayerExperts experts(60, 256);
  SW_TRY_ASSIGN(const ExpertMap map, EvenExpertMap(experts, 256));
  const SaveRanks ranks{1024, {}};
  LevelState memory = MakeLevelState(experts, 1);
  LevelState storage = memory;
  std::mt19937_64 random(1);
  Counts tokens = MakeCounts(experts);
  for (auto& layer : tokens) {
    for (auto& count : layer) count = random() % 100'000;
  }
  SW_TRY(CountTokens(&memory, tokens));
  SW_TRY(CountTokens(&storage, tokens));
  for (std::uint32_t k : {1U, 16U, 128U}) {
    for (Policy policy : {Policy::kSequential, Policy::kLoadAware, Policy::kBudget,
                          Policy::kBudgetGlobal, Policy::kFull}) {
      SelectionOptions options{policy, 2 * k, k, std::nullopt, std::uint64_t{60} * k};
      SW_TRY(SelectAndCut(map, memory, storage, options, ranks));
      const double ms = BestMs([&] { (void)SelectAndCut(map, memory, storage, options, ranks); });
      std::printf("%-14s K = %3u: %.3f ms\n", std::string(Name(policy)).c_str(), k, ms);
    }
  }
  return {};
}

/// Does the work of a save for modules it keeps: reads the manifest before, and writes its own.
Status Carry() {
  const LayerExperts experts(60, 256);
  Manifest manifest;
  manifest.state.snapshot = MakeLevelState(experts, 1);
  manifest.state.persist = manifest.state.snapshot;
  std::mt19937_64 random(1);
  for (std::size_t m = 0; m < experts.size(); ++m) {
    for (std::uint32_t e = 0; e < experts[m]; ++e) {
      manifest.names.push_back("layers." + std::to_string(m) + ".moe.experts." + std::to_string(e));
      StoredModule& held = manifest.modules.emplace_back();
      for (auto& one : held) {
        one = StoredComponent{random() % 1000, {}};
        one->blob.bytes = random() >> 30;
        one->blob.crc32 = static_cast<std::uint32_t>(random());
        for (auto& byte : one->blob.digest) byte = static_cast<std::uint8_t>(random());
        for (auto& byte : one->blob.head) byte = static_cast<std::uint8_t>(random());
      }
    }
  }
  const std::string text = ToText(manifest);
  std::size_t written = 0;
  SW_TRY(SplitManifest(text, "manifest"));
  const double ms = BestMs([&] {
    const auto lines = SplitManifest(text, "manifest");
    written += ToText(lines->head, lines->lines).size();
  });
  const auto count = static_cast<double>(manifest.modules.size());
  std::printf("unchanged module: %.2f us, %.0f bytes of manifest\n", 1e3 * ms / count,
              static_cast<double>(text.size()) / count);
  return written > 0 ? Status() : Fail(Errc::kInternal, "nothing was written");
}

}  // namespace
}  // namespace shardwright::partial

int main() {
  auto done = shardwright::partial::Select();
  if (done) done = shardwright::partial::Carry();
  if (!done) std::fprintf(stderr, "pec_bench: %s\n", done.error().message.c_str());
  return done ? 0 : 1;
}
