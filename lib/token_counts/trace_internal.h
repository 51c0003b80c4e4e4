// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/base/result.h"
#include "support/json/json.h"
#include "support/os/file.h"
#include "token_counts/trace.h"

namespace shardwright::token_counts {

using json::Json;

/// One number that counts tokens.
/// \error kBadInput  negative, fractional, not a number, or above limits::kMoeTokens
Result<std::uint64_t> CountOf(const Json& value, const std::string& where);
Result<std::uint64_t> CountOf(double value, const std::string& where);

/// Counts of one record as they are found: rows by layer number. Rows of several ranks add up.
class RecordBuilder {
 public:
  /// \param where  starts messages
  explicit RecordBuilder(std::string where) : where_(std::move(where)) {}

  /// Adds a layer's counts. \error kBadInput  another number of experts than other layers have
  Status Add(std::uint64_t layer, std::vector<std::uint64_t> counts);

  bool empty() const { return rows_.empty(); }
  const std::map<std::uint64_t, std::vector<std::uint64_t>>& rows() const { return rows_; }

 private:
  std::string where_;
  std::map<std::uint64_t, std::vector<std::uint64_t>> rows_;
};

/// Appends a record; the first one says what layers and experts there are.
/// \error kBadInput  other layers or experts than the records before; kLimit
Status Append(TokenTrace* trace, std::uint64_t iteration, const RecordBuilder& record,
              const std::string& where);

/// Sorts by iteration and proves the trace.
/// \error kBadInput  no records, an iteration twice, counts that overflow
Status Finish(TokenTrace* trace, const std::string& where);

/// Warns that a log repeats an iteration. \param place  place of the first such line
void WarnOfRestart(TokenTrace* trace, const std::string& place, std::uint64_t iteration);
/// Warns that the last line is truncated, and sets `torn`. \param place  place of the line
void WarnOfTornLine(TokenTrace* trace, const std::string& place);

/// "layer 3 expert 5". For messages.
std::string CellName(std::uint64_t layer, std::uint64_t expert);

/// A list of lists of counts, as rows of consecutive layers from 0.
Status AddMatrix(const Json& matrix, const std::string& where, RecordBuilder* record);

/// Appends a record for each line. Handles restarts and a torn last line like ReadLoads.
/// \param begin  where in the file the text begins, for messages; absent: it is the file's, whose
///        lines are numbered
/// \error kBadInput  names the line; kLimit
Status AddLines(std::string_view text, const std::string& where, std::optional<std::uint64_t> begin,
                TokenTrace* trace);

/// Reads a log of JSON lines that is too long to be read at once, part after part.
/// \error kLimit  another text; as ReadLoads
Result<TokenTrace> ReadLongLog(const os::File& file, std::uint64_t bytes);

/// Reads the end of a log of JSON lines: all records of iterations above `after`. Nothing where it
/// has to be read whole: lines that do not say their iteration, are in another order, or not of
/// each.
/// \error as ReadLoads
Result<std::optional<TokenTrace>> ReadLogEnd(const std::string& path, std::uint64_t after);

Result<TokenTrace> ParseCsvLoads(std::string_view text, const std::string& where);
/// A `.pt` file: a tensor alone, a dump of SGLang's recorder, or physical counts with their map.
Result<TokenTrace> ReadTensorFile(const std::string& path);
/// A `.npy` file.
Result<TokenTrace> ReadNumpyFile(const std::string& path);
/// A folder of TensorRT-LLM's statistics: meta_info.json and rank*.safetensors.
Result<TokenTrace> ReadStatisticFolder(const std::string& folder);
/// A checkpoint folder whose model files hold token counters.
Result<TokenTrace> ReadCheckpointCounters(const std::string& folder);

}  // namespace shardwright::token_counts
