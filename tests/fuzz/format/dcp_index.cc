// Any bytes as the index of a DCP folder. What is read can be written, and is then read and written
// the same again.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/result.h"
#include "format/dcp/index.h"

namespace dcp = shardwright::dcp;
using shardwright::Errc;
using shardwright::Result;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size_bytes) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size_bytes);
  const Result<dcp::Index> index = dcp::ReadIndex(bytes);
  if (!index) {
    SW_CHECK(index.error().code != Errc::kInternal);
    return 0;
  }
  static_cast<void>(dcp::CheckVolumes(*index));
  const Result<std::string> first = dcp::DumpIndex(*index);
  SW_CHECK(first);
  const Result<dcp::Index> again = dcp::ReadIndex(*first);
  SW_CHECK(again);
  SW_CHECK(again->entries.size() == index->entries.size());
  const Result<std::string> second = dcp::DumpIndex(*again);
  SW_CHECK(second);
  SW_CHECK(*first == *second);
  return 0;
}
