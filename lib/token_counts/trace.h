// SPDX-License-Identifier: Apache-2.0
// lib/token_counts: how many tokens each expert of a model was sent.
// A TokenTrace is what a file holds, counts over time, whichever program wrote it. TokenCounts
// (loads.h) are those of one moment or the sum of a window (load_window.h). Expert placement
// (lib/placement) and partial checkpoints (lib/partial) both start from them. Source:
// docs/formats/loads.md.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "support/base/result.h"
#include "token_counts/token_counts.h"

namespace shardwright::token_counts {

/// What a file of loads holds: token counts over time. Every record has the same layers and
/// experts.
struct TokenTrace {
  struct Record {
    std::uint64_t iteration = 0;
    std::vector<std::uint64_t> tokens;  ///< [layers][experts]
  };
  std::string format;  ///< "jsonl", "json", "csv", "npy", "pt", "sglang", "vllm", "tensorrt-llm",
                       ///< "checkpoint"
  std::uint32_t experts = 0;
  std::vector<std::uint32_t> layer_id;  ///< by layer: its number in the model
  std::vector<Record> records;          ///< ascending iteration, not empty
  std::uint64_t after = 0;  ///< of records up to this iteration only the newest may be here
  std::uint64_t bytes_read = 0;
  std::uint64_t files_read = 0;
  std::vector<std::string> notes;     ///< information about the reading, for messages
  std::vector<std::string> warnings;  ///< ignored lines and the reason
  bool torn = false;                  ///< the last line is truncated, and is ignored
  bool serving = false;               ///< recorded by a serving engine
  /// Records that the first one is the sum of: a serving engine's recording with more counts than
  /// are kept is summed while it is read. Else 1.
  std::uint64_t first_sums = 1;
};

/// Reads loads of any format that docs/formats/loads.md names; the format is told by the content.
/// A log may repeat iterations after a restart. Ignores the earlier lines of the first repeated
/// iteration and of all later ones, and a truncated last line, with a warning each.
/// \param after  records up to this iteration are not needed. A log of JSON lines, which grows with
///        the training, is then read from its end backward, as far as it has to be; limits are
///        those of what is read
/// \error kNotFound; kBadInput  names file, record, layer and expert; kLimit; kUnsupported
/// Local.
Result<TokenTrace> ReadLoads(const std::string& path, std::uint64_t after = 0);

/// TokenCounts out of a text: JSONL, JSON or CSV.
/// \param where  names it in messages
/// Pure.
Result<TokenTrace> ParseLoads(std::string_view text, const std::string& where);

}  // namespace shardwright::token_counts
