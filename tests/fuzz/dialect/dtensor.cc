// Any bytes as the pickle of a model's file of one rank, and of an optimizer's: read as a
// checkpoint of one rank, or refused. What is read is written as a checkpoint of three, or refused.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/result.h"
#include "dialect/dialects.h"
#include "dialect/rules/patterns.h"
#include "fuzz/dialect/pickled_file.h"
#include "fuzz/mutate/mutate.h"

namespace dialect = shardwright::dialect;
namespace fuzz = shardwright::fuzz;
using shardwright::Errc;
using shardwright::Result;

SW_FUZZ_MUTATION(MutateTwoPickles)

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size_bytes) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size_bytes);
  const auto [model, optimizer] = fuzz::TwoPickles(bytes);
  dialect::SourceSet set;
  set.dialect = "dtensor";
  set.tag = "actor";
  set.files.push_back(fuzz::PickledFile("model_world_size_1_rank_0.pt", model));
  if (!optimizer.empty()) {
    set.files.push_back(fuzz::PickledFile("optim_world_size_1_rank_0.pt", optimizer));
  }
  const Result<dialect::Checkpoint> read = dialect::ReadCheckpoint(set, dialect::Patterns());
  if (!read) {
    SW_CHECK(read.error().code != Errc::kInternal);
    return 0;
  }
  const dialect::Dialect* format = dialect::FindDialect("dtensor");
  const dialect::TargetSpec spec{{{"dp_shard", "3"}}};
  const Result<dialect::Layout> layout = format->resolve(spec, *read);
  if (!layout) {
    SW_CHECK(layout.error().code != Errc::kInternal);
    return 0;
  }
  const Result<dialect::Written> written = format->write(*read, *layout);
  if (!written) {
    SW_CHECK(written.error().code != Errc::kInternal);
    return 0;
  }
  SW_CHECK(shardwright::layout::Validate(written->target.map) ||
           read->map.tensors.size() > written->target.map.tensors.size());
  return 0;
}
