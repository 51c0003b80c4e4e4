// SPDX-License-Identifier: Apache-2.0
// Ranges of gradients, stored plain and compressed, equal the written ones. A read fails if the log
// has changed since it was verified.

#include <fstream>
#include <random>

#include "log_fixture.h"

namespace shardwright::partial {
namespace {

constexpr std::uint64_t kLarge = 200'000;

/// One record of two pieces, of a parameter of kLarge elements.
std::vector<std::uint16_t> WriteLog(const std::string& folder, int zstd_level) {
  LogWriterOptions options = Options();
  options.zstd_level = zstd_level;
  auto writer = LogWriter::Open(folder, options);
  EXPECT_TRUE(writer.has_value());
  std::vector<std::uint16_t> gradient = GradientAt(1, kLarge);
  std::mt19937 random(3);
  for (std::size_t i = 0; i < kLarge; i += 5) gradient[i] = static_cast<std::uint16_t>(random());
  const LogStep step = StepAt(1);
  const auto bytes = std::as_bytes(std::span(gradient));
  const std::uint64_t cut = 33'333;
  const std::vector<GradientRange> ranges = {
      {"w", kLarge, 0, DType::kBF16, 0, cut, bytes.first(2 * cut)},
      {"w", kLarge, cut, DType::kBF16, 0, kLarge - cut, bytes.subspan(2 * cut)}};
  EXPECT_TRUE(writer->Append(1, "m", std::span(&step, 1), ranges));
  EXPECT_TRUE(writer->Persist());
  return gradient;
}

class Reads : public testing::TestWithParam<int> {};

TEST_P(Reads, AnyRange) {
  const Scratch scratch;
  const std::string folder = scratch.Path("logs");
  const std::vector<std::uint16_t> gradient = WriteLog(folder, GetParam());
  const auto log = GradientLog::Open(folder, kModel);
  ASSERT_TRUE(log) << log.error().message;
  const std::vector<LoggedParam> params = {{"w", kLarge}};
  const auto chain = log->ChainOf("m", params, 0, 1, {});
  ASSERT_TRUE(chain) << chain.error().message;
  ASSERT_EQ(chain->at(0).pieces.size(), 2U);
  EXPECT_EQ(chain->at(0).pieces[1].piece->zstd, GetParam() > 0);
  LogReads reads(*log);
  std::mt19937_64 random(1);
  for (int i = 0; i < 200; ++i) {
    const LogLink::Piece& piece = chain->at(0).pieces[random() % 2];
    const std::uint64_t first = i == 0 ? 0 : random() % piece.piece->count;
    const std::uint64_t count =
        i == 0 ? piece.piece->count : random() % (piece.piece->count - first + 1);
    std::vector<std::uint16_t> out(count);
    const Status read = reads.Read(piece, first, std::as_writable_bytes(std::span(out)));
    ASSERT_TRUE(read) << read.error().message;
    const auto expected = std::span(gradient).subspan(piece.piece->first + first, count);
    ASSERT_TRUE(std::ranges::equal(out, expected)) << first << " " << count;
  }
  EXPECT_EQ(reads.files_read(), 1U);
}

TEST_P(Reads, RefuseWhatHasChanged) {
  const Scratch scratch;
  const std::string folder = scratch.Path("logs");
  WriteLog(folder, GetParam());
  const auto log = GradientLog::Open(folder, kModel);
  ASSERT_TRUE(log);
  const std::vector<LoggedParam> params = {{"w", kLarge}};
  const auto chain = log->ChainOf("m", params, 0, 1, {});
  ASSERT_TRUE(chain);
  const LogLink::Piece& piece = chain->at(0).pieces[1];
  {
    std::fstream file(log->segments()[0], std::ios::in | std::ios::out | std::ios::binary);
    const auto at = static_cast<std::streamoff>(piece.piece->offset + piece.piece->bytes - 100);
    file.seekg(at);
    const int before = file.get();
    file.seekp(at);
    file.put(static_cast<char>(before ^ 1));
  }
  LogReads reads(*log);
  std::vector<std::byte> out(2 * piece.piece->count);
  const Status all = reads.Read(piece, 0, out);
  ASSERT_FALSE(all);
  EXPECT_EQ(all.error().code, Errc::kBadInput);
  EXPECT_NE(all.error().message.find("have changed since the log was verified"), std::string::npos);
  // The bytes before it are read as before.
  EXPECT_TRUE(reads.Read(piece, 0, std::span(out).first(1000)));
}

INSTANTIATE_TEST_SUITE_P(Levels, Reads, testing::Values(0, 3));

}  // namespace
}  // namespace shardwright::partial
