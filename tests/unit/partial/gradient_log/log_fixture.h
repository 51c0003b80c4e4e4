// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdlib.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "partial/gradient_log/log_reader.h"
#include "partial/gradient_log/log_writer.h"
#include "support/os/dir.h"

namespace shardwright::partial {

/// A folder that is removed with the object. Tests of damage make one for each of many cases.
class Scratch {
 public:
  Scratch() {
    std::string name = (std::filesystem::temp_directory_path() / "sw-log-XXXXXX").string();
    EXPECT_NE(::mkdtemp(name.data()), nullptr);
    path_ = std::filesystem::canonical(name).string();
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }
  std::string Path(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

inline const exec::Digest kModel = {1, 2, 3};
inline constexpr std::uint64_t kElems = 10;

inline LogStep StepAt(std::uint64_t iteration) {
  LogStep logged;
  logged.step.lr = 1e-3 / static_cast<double>(iteration);
  logged.step.beta1 = 0.9;
  logged.step.beta2 = 0.999;
  logged.step.eps = 1e-8;
  logged.step.weight_decay = 0.01;
  logged.step.count = static_cast<float>(iteration);
  return logged;
}

/// The gradient of a parameter of a module in an iteration, bfloat16 bits.
inline std::vector<std::uint16_t> GradientAt(std::uint64_t iteration, std::size_t count = kElems) {
  std::vector<std::uint16_t> gradient;
  for (std::uint64_t i = 0; i < count; ++i) {
    gradient.push_back(static_cast<std::uint16_t>(0x3C00 + 17 * iteration + 31 * (i % 64)));
  }
  return gradient;
}

inline LogWriterOptions Options(std::uint32_t writer = 0) {
  LogWriterOptions options;
  options.writer = writer;
  options.fingerprint = kModel;
  return options;
}

/// Elements [first, last) of parameter "w" of `module`.
inline Status Append(LogWriter* writer, const std::string& module, std::uint64_t iteration,
                     std::uint64_t first = 0, std::uint64_t last = kElems) {
  const std::vector<std::uint16_t> gradient = GradientAt(iteration);
  const LogStep step = StepAt(iteration);
  GradientRange range;
  range.param = "w";
  range.elems = kElems;
  range.first = first;
  range.count = last - first;
  range.dtype = DType::kBF16;
  range.gradient = std::as_bytes(std::span(gradient).subspan(first, last - first));
  return writer->Append(iteration, module, std::span(&step, 1), std::span(&range, 1));
}

/// All of a piece, which its own digest holds for too.
inline Result<std::vector<std::byte>> ReadPiece(const GradientLog& log,
                                                const LogLink::Piece& piece) {
  LogReads reads(log);
  std::vector<std::byte> bytes(piece.piece->count * ItemSize(piece.piece->dtype));
  SW_TRY(reads.Read(piece, 0, bytes));
  EXPECT_EQ(exec::DigestOf(bytes), piece.piece->digest);
  return bytes;
}

inline const std::vector<LoggedParam> kParams = {{"w", kElems}};

/// The iterations of a chain of module "m", or its error.
inline std::string ChainText(const GradientLog& log, std::uint64_t from, std::uint64_t to,
                             std::span<const RecoveryRecord> recoveries = {}) {
  const auto chain = log.ChainOf("m", kParams, from, to, recoveries);
  if (!chain) return chain.error().message;
  std::string text;
  for (const LogLink& link : *chain) {
    text += std::to_string(link.iteration) + " ";
    for (const LogLink::Piece& piece : link.pieces) {
      const auto bytes = ReadPiece(log, piece);
      EXPECT_TRUE(bytes.has_value()) << bytes.error().message;
      const auto gradient = GradientAt(link.iteration);
      const auto expected =
          std::as_bytes(std::span(gradient).subspan(piece.piece->first, piece.piece->count));
      EXPECT_TRUE(bytes && std::ranges::equal(*bytes, expected));
    }
  }
  return text;
}

inline std::string ErrorOf(const std::string& folder) {
  const auto log = GradientLog::Open(folder, kModel);
  return log ? "" : log.error().message;
}

}  // namespace shardwright::partial
