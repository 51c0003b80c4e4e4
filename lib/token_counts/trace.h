// SPDX-License-Identifier: Apache-2.0
// lib/token_counts: reads how many tokens the router sent to each expert of a model.
// A TokenTrace has the counts over time from a file of any supported program. TokenCounts
// (token_counts.h) has the counts of one iteration or the sum of a window (window.h).
// Expert placement (lib/placement) and partial checkpoints (lib/partial) both start
// from them. Source: docs/formats/loads.md.

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

/// Token counts over time, as read from a file. Every record has the same layers and experts.
struct TokenTrace {
  struct Record {
    std::uint64_t iteration = 0;
    std::vector<std::uint64_t> tokens;  ///< [layers][experts]; 0 for experts that a layer lacks
  };
  std::string format;  ///< "jsonl", "json", "csv", "npy", "pt", "sglang", "vllm", "tensorrt-llm",
                       ///< "checkpoint"
  std::string path;    ///< file, folder or name of the text, for messages
  std::uint32_t experts = 0;                 ///< the largest number in a layer
  std::vector<std::uint32_t> layer_id;       ///< by layer: its number in the model
  std::vector<std::uint32_t> layer_experts;  ///< by layer; empty: all have `experts`
  std::vector<Record> records;               ///< in ascending order of iterations, not empty
  std::uint64_t after = 0;  ///< of the records up to this iteration, only the newest may be present
  std::uint64_t bytes_read = 0;
  std::uint64_t files_read = 0;
  std::vector<std::string> notes;     ///< information for the user, such as skipped records
  std::vector<std::string> warnings;  ///< ignored lines and the reason
  bool torn = false;                  ///< the last line was truncated and is ignored
  bool serving = false;               ///< recorded by a serving engine
  /// Number of records that the first record is the sum of. It is 1, except for recordings of
  /// serving engines with too many counts. The reader adds up their oldest records.
  std::uint64_t first_sums = 1;

  /// Returns the number of experts of a layer, given by its position.
  std::uint32_t ExpertsOf(std::size_t layer) const {
    return layer_experts.empty() ? experts : layer_experts[layer];
  }
};

/// Reads token counts in any format of docs/formats/loads.md, and detects the format from the
/// content. A log may repeat iterations after a restart. Ignores the earlier lines of the first
/// repeated iteration and of all later ones, and a truncated last line, with a warning each.
/// \param after  records up to this iteration are not needed. A log of JSON lines, which
///        grows during training, is then read backward from its end, as far as necessary.
///        Limits apply to the part that is read.
/// \error kNotFound; kBadInput  names file, record, layer and expert, or two layers with different
///        numbers of experts; kLimit; kUnsupported
/// Local.
Result<TokenTrace> ReadLoads(const std::string& path, std::uint64_t after = 0);

/// Reads token counts as ReadLoads, but layers may have different numbers of experts. A note then
/// names the layers of each number.
/// Local.
Result<TokenTrace> ReadUnevenLoads(const std::string& path);

/// Reads token counts from a text: JSONL, JSON or CSV.
/// \param where  name of the text for messages
/// Pure.
Result<TokenTrace> ParseLoads(std::string_view text, const std::string& where);

}  // namespace shardwright::token_counts
