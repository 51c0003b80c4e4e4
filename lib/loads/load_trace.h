// lib/loads: how many tokens each expert of a model was sent.
// A LoadTrace is what a file holds, counts over time, whichever program wrote it. Loads (loads.h)
// are those of one moment or the mean of a window. Expert placement (lib/moe) and partial
// checkpoints (lib/pec) both start from them. Source: docs/formats/loads.md.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "loads/loads.h"

namespace shardwright::loads {

/// What a file of loads holds: token counts over time. Every record has the same layers and
/// experts.
struct LoadTrace {
  struct Record {
    std::uint64_t iteration = 0;
    std::vector<std::uint64_t> tokens;  ///< [layers][experts]
  };
  std::string format;  ///< "jsonl", "json", "csv", "sglang", "vllm", "tensorrt-llm", "checkpoint"
  std::uint32_t experts = 0;
  std::vector<std::uint32_t> layer_id;  ///< by layer: its number in the model
  std::vector<Record> records;          ///< ascending iteration, not empty
  std::uint64_t after = 0;  ///< of records up to this iteration only the newest may be here
  std::uint64_t bytes_read = 0;
  std::uint64_t files_read = 0;
  std::vector<std::string> notes;  ///< what a user may like to know of the reading
};

/// Which part of a trace a plan is made for.
struct LoadWindow {
  std::optional<std::uint64_t> at;    ///< last iteration that counts; absent: the trace's last
  std::uint64_t window = 1;           ///< records up to it whose mean is taken
  std::vector<std::uint32_t> layers;  ///< numbers in the model; empty: all
};

/// Reads loads of any format that docs/formats/loads.md names; the format is told by the content.
/// \param after  records up to this iteration are not needed. A log of JSON lines, which grows with
///        the training, is then read from its end backward, as far as it has to be; limits are
///        those of what is read
/// \error kNotFound; kBadInput  names file, record, layer and expert; kLimit; kUnsupported
/// Local.
Result<LoadTrace> ReadLoads(const std::string& path, std::uint64_t after = 0);

/// Loads out of a text: JSONL, JSON or CSV.
/// \param where  names it in messages
/// Pure.
Result<LoadTrace> ParseLoads(std::string_view text, const std::string& where);

/// The mean of a window of a trace, rounded half up.
/// \error kUsage  an iteration before the first one, a layer that the trace lacks, a window that is
///        longer than what there is up to `at`
/// Pure.
Result<Loads> Pick(const LoadTrace& trace, const LoadWindow& window);

/// The last record at or before an iteration. \error kUsage  if there is none
Result<std::size_t> RecordAt(const LoadTrace& trace, std::uint64_t iteration);

/// "0-11,14" as ascending numbers. \error kUsage  not such a list, or a range that runs backward
Result<std::vector<std::uint32_t>> ParseLayers(std::string_view text);

}  // namespace shardwright::loads
