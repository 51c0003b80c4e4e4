// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <optional>
#include <set>
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

/// Reads one token count.
/// \error kBadInput  negative, fractional, not a number, or above limits::kMoeTokens
Result<std::uint64_t> CountOf(const Json& value, const std::string& where);
Result<std::uint64_t> CountOf(double value, const std::string& where);
Result<std::uint64_t> WholeCountOf(std::uint64_t value, const std::string& where);

/// Collects the counts of one record by layer number, and adds rows of several ranks.
class RecordBuilder {
 public:
  /// \param where  prefix of messages
  explicit RecordBuilder(std::string where) : where_(std::move(where)) {}

  /// Adds a layer's counts. \error kBadInput the number of experts differs from an earlier row
  Status Add(std::uint64_t layer, std::vector<std::uint64_t> counts);

  bool empty() const { return rows_.empty(); }
  const std::map<std::uint64_t, std::vector<std::uint64_t>>& rows() const { return rows_; }

 private:
  std::string where_;
  std::map<std::uint64_t, std::vector<std::uint64_t>> rows_;
};

/// Appends a record. The first record defines the layers and experts of the trace.
/// \error kBadInput  layers or experts differ from earlier records; kLimit
Status Append(TokenTrace* trace, std::uint64_t iteration, const RecordBuilder& record,
              const std::string& where);

/// Sorts the records by iteration and checks the trace.
/// \error kBadInput  no records, a repeated iteration, or counts that overflow
Status Finish(TokenTrace* trace, const std::string& where);

/// Warns of a restart of training in a log.
/// \param place  place of the first line of the new run
/// \param sign  what shows the restart: "occurs again"
void WarnOfRestart(TokenTrace* trace, const std::string& place, std::uint64_t iteration,
                   std::string_view sign);
/// Warns that the last line is truncated, and sets `torn`. \param place  place of the line
void WarnOfTornLine(TokenTrace* trace, const std::string& place);

/// An iteration of a log, and the place of its first line for messages.
struct LogEntry {
  std::uint64_t iteration = 0;
  std::string place;
};

/// Finds restarts of training that repeat no iteration: an iteration that follows a larger one.
/// Warns of each, and returns the larger iterations, which the abandoned runs logged. Returns
/// none for at least three iterations in descending order, because such a log is sorted.
/// \param order  different iterations in the order of the log
std::set<std::uint64_t> AbandonedIn(const std::vector<LogEntry>& order, TokenTrace* trace);

/// Returns the name of a count for messages: "layer 3 expert 5".
std::string CellName(std::uint64_t layer, std::uint64_t expert);

/// Adds a list of lists of counts as rows of consecutive layers, starting at 0.
Status AddMatrix(const Json& matrix, const std::string& where, RecordBuilder* record);

/// Appends the records of a JSON object in any format of docs/formats/loads.md.
/// \error kBadInput  names `where`; kLimit
Status AddObject(const Json& object, const std::string& where, TokenTrace* trace);

/// Returns the iteration of an object's first record: its `iteration` or `step`. Otherwise it is
/// the object's position, or for steps of SGLang's recorder the number after the last step.
/// \error kBadInput  names `where`
Result<std::uint64_t> FirstIteration(const Json& object, const TokenTrace& trace,
                                     const std::string& where);

/// Byte order mark that some programs write before UTF-8 text. Readers skip it.
inline constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

/// Returns whether a text consists of one JSON object per line.
/// \pre the text has its complete first line
bool IsLog(std::string_view text);

/// Appends a record for each line. Handles restarts and a truncated last line like ReadLoads.
/// \param begin  byte offset of the text in its file, for messages; nullopt if the text
///        is the whole file, and messages use line numbers
/// \error kBadInput  names the line; kLimit
Status AddLines(std::string_view text, const std::string& where, std::optional<std::uint64_t> begin,
                TokenTrace* trace);

/// Reads a log of JSON lines in parts, if it is too long to read at once.
/// \error kLimit  the text is not such a log; as ReadLoads
Result<TokenTrace> ReadLongLog(const os::File& file, std::uint64_t bytes);

/// Reads the end of a log of JSON lines: all records of iterations above `after`. Returns
/// nullopt if the log must be read from its beginning, because lines have no iteration,
/// are not in ascending order, or skip iterations.
/// \error as ReadLoads
Result<std::optional<TokenTrace>> ReadLogEnd(const std::string& path, std::uint64_t after);

/// Reads a text as ParseLoads, but layers may have different numbers of experts.
Result<TokenTrace> ParseUnevenLoads(std::string_view text, const std::string& where);
Result<TokenTrace> ParseCsvLoads(std::string_view text, const std::string& where);
/// Reads a `.pt` file: a tensor, a dump of SGLang's recorder, or physical counts with their map.
Result<TokenTrace> ReadTensorFile(const std::string& path);
/// Reads a `.npy` file.
Result<TokenTrace> ReadNumpyFile(const std::string& path);
/// Reads a folder of TensorRT-LLM statistics: meta_info.json and rank*.safetensors.
Result<TokenTrace> ReadStatisticFolder(const std::string& folder);
/// Reads the token counters in the model files of a checkpoint folder.
Result<TokenTrace> ReadCheckpointCounters(const std::string& folder);

}  // namespace shardwright::token_counts
