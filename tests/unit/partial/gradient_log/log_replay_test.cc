// SPDX-License-Identifier: Apache-2.0
// An old module and the log since then make the new module, bit for bit.

#include <bit>
#include <cmath>

#include "log_fixture.h"
#include "partial/optimizer_steps/apply.h"

namespace shardwright::partial {
namespace {

constexpr std::uint64_t kCount = 3000;

struct Module {
  std::vector<float> param = std::vector<float>(kCount);
  std::vector<float> first = std::vector<float>(kCount);
  std::vector<float> second = std::vector<float>(kCount);
  bool operator==(const Module&) const = default;

  Status Apply(const optimizer_steps::Step& step, std::uint64_t at, std::uint64_t count,
               std::span<const std::byte> gradient) {
    optimizer_steps::Elements range;
    range.param = std::span(param).subspan(at, count);
    range.states = {std::span(first).subspan(at, count), std::span(second).subspan(at, count), {}};
    range.gradient_dtype = DType::kBF16;
    range.gradient = gradient;
    return optimizer_steps::Apply(step, range, nullptr);
  }
};

TEST(Replay, TheLogBringsAnOldModuleForward) {
  const Scratch scratch;
  const std::string folder = scratch.Path("logs");
  std::vector<LogWriter> writers;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    LogWriterOptions options = Options(rank);
    options.zstd_level = static_cast<int>(rank);
    writers.push_back(LogWriter::Open(folder, options).value());
  }
  Module trained;
  for (std::size_t i = 0; i < kCount; ++i) trained.param[i] = std::sin(static_cast<float>(i));
  Module old;
  for (std::uint64_t iteration = 1; iteration <= 20; ++iteration) {
    if (iteration == 8) old = trained;  // the version of iteration 7
    const std::vector<std::uint16_t> gradient = GradientAt(iteration, kCount);
    const LogStep step = StepAt(iteration);
    const auto bytes = std::as_bytes(std::span(gradient));
    ASSERT_TRUE(trained.Apply(step.step, 0, kCount, bytes));
    // Each rank logs the part of its partition.
    for (std::uint64_t rank = 0; rank < 2; ++rank) {
      const std::uint64_t at = rank * 1111;
      const std::uint64_t count = rank == 0 ? 1111 : kCount - 1111;
      const GradientRange range{
          "w", kCount, at, DType::kBF16, 0, count, bytes.subspan(2 * at, 2 * count)};
      ASSERT_TRUE(writers[rank].Append(iteration, "m", std::span(&step, 1), std::span(&range, 1)));
    }
  }
  const auto log = GradientLog::Open(folder, kModel);
  ASSERT_TRUE(log) << log.error().message;
  const std::vector<LoggedParam> params = {{"w", kCount}};
  const auto chain = log->ChainOf("m", params, 7, 20, {});
  ASSERT_TRUE(chain) << chain.error().message;
  EXPECT_NE(old, trained);
  for (const LogLink& link : *chain) {
    for (const LogLink::Piece& piece : link.pieces) {
      const auto gradient = ReadPiece(*log, piece);
      ASSERT_TRUE(gradient);
      ASSERT_TRUE(old.Apply(piece.step->step, piece.piece->first, piece.piece->count, *gradient));
    }
  }
  EXPECT_EQ(old, trained);
}

}  // namespace
}  // namespace shardwright::partial
