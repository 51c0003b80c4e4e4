// SPDX-License-Identifier: Apache-2.0
// Any bytes as a fragment catalogue: unchanged if they begin like one, otherwise as the unpacked
// contents, so that checksum and compression do not hide the rest. Accepted input is written
// identically again, and then either reads as a checkpoint or fails with an error.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "checkpoints/model/source.h"
#include "checkpoints/registry.h"
#include "checkpoints/tp_rules/patterns.h"
#include "support/base/crc32.h"
#include "support/base/result.h"
#include "support/zstd/contexts.h"

namespace checkpoints = shardwright::checkpoints;
using shardwright::Errc;
using shardwright::Result;

namespace {

constexpr std::string_view kMagic("SWsource\0\0\0", 11);

/// A catalogue of a form, its first byte, with the rest as its content.
std::string Wrapped(std::string_view form_and_content) {
  const std::string_view form = form_and_content.substr(0, 1);
  const std::string_view content = form_and_content.substr(form.size());
  // Kept: making one costs more than the rest.
  static ZSTD_CCtx* const kContext = shardwright::NewZstdWriter();
  std::string frame(ZSTD_compressBound(content.size()), '\0');
  const std::size_t size =
      ZSTD_compressCCtx(kContext, frame.data(), frame.size(), content.data(), content.size(), 1);
  SW_CHECK(!ZSTD_isError(size));
  frame.resize(size);
  const std::uint32_t sum = shardwright::Crc32(std::as_bytes(std::span(frame)));
  std::string out(kMagic);
  out += form;
  for (unsigned b = 0; b < 4; ++b) out += static_cast<char>(sum >> (8 * b));
  return out + frame;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size_bytes) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size_bytes);
  const Result<checkpoints::SourceSet> set = checkpoints::DeserializeSource(
      bytes.starts_with(kMagic) ? std::string(bytes) : Wrapped(bytes));
  if (!set) {
    SW_CHECK(set.error().code != Errc::kInternal);
    return 0;
  }
  const std::string first = checkpoints::Serialize(*set);
  const Result<checkpoints::SourceSet> again = checkpoints::DeserializeSource(first);
  SW_CHECK(again);
  SW_CHECK(checkpoints::Serialize(*again) == first);
  const Result<checkpoints::Checkpoint> read =
      checkpoints::ReadCheckpoint(*set, checkpoints::Patterns());
  SW_CHECK(read || read.error().code != Errc::kInternal);
  return 0;
}
