// SPDX-License-Identifier: Apache-2.0
// Any bytes as expert token counts. Accepted input keeps the guarantees: layers ascend, every
// record has a count for each expert, and the total of all records passes verification.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "support/base/result.h"
#include "token_counts/window.h"

namespace token_counts = shardwright::token_counts;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size_bytes) {
  const std::string_view text(reinterpret_cast<const char*>(data), size_bytes);
  const auto trace = token_counts::ParseLoads(text, "input");
  if (!trace) return 0;
  SW_CHECK(!trace->records.empty() && !trace->layer_id.empty() && trace->experts > 0);
  SW_CHECK(std::is_sorted(trace->layer_id.begin(), trace->layer_id.end()));
  for (const auto& record : trace->records) {
    SW_CHECK(record.tokens.size() == trace->layer_id.size() * trace->experts);
  }
  token_counts::LoadWindow window;
  window.windows = {token_counts::kAllRecords};
  const auto mean = token_counts::Pick(*trace, window);
  SW_CHECK(mean && token_counts::Validate(*mean));
  return 0;
}
