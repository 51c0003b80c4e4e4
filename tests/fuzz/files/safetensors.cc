// SPDX-License-Identifier: Apache-2.0
// Any bytes as a .safetensors file. Accepted tensors cover the file exactly, and have the same
// names and values when written with our own layout. The first byte chooses between file and index.

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "files/safetensors/header.h"
#include "files/safetensors/index.h"
#include "files/safetensors/layout.h"
#include "fuzz/mutate/mutate.h"
#include "support/base/result.h"
#include "support/os/dir.h"
#include "support/os/file.h"

namespace os = shardwright::os;
namespace safetensors = shardwright::safetensors;
using shardwright::Errc;
using shardwright::Result;

namespace {

void CheckCover(const safetensors::Header& header, std::uint64_t first, std::uint64_t size_bytes) {
  std::uint64_t end = first;
  for (const safetensors::Entry& entry : header.entries) {
    SW_CHECK(entry.offset == end);
    SW_CHECK(entry.bytes <= size_bytes - end);
    end += entry.bytes;
  }
  SW_CHECK(end == size_bytes);
}

void CheckWritten(const safetensors::Header& header) {
  std::vector<safetensors::TensorSpec> specs;
  std::map<std::string, safetensors::Entry> by_name;
  for (const safetensors::Entry& entry : header.entries) {
    auto shape = safetensors::ElemShape(entry);
    if (!shape || entry.name.empty()) return;
    specs.push_back({entry.name, entry.dtype, *std::move(shape)});
    by_name[entry.name] = entry;
  }
  const auto layout = safetensors::Layout::Make(specs, header.metadata);
  SW_CHECK(layout);
  const auto again = safetensors::ParseHeader(
      {layout->head().substr(safetensors::kLengthBytes), layout->file_bytes()});
  SW_CHECK(again);
  SW_CHECK(again->metadata == header.metadata);
  SW_CHECK(again->entries.size() == specs.size());
  for (const safetensors::Entry& entry : again->entries) {
    const safetensors::Entry& before = by_name.at(entry.name);
    SW_CHECK(entry.dtype == before.dtype && entry.shape == before.shape);
  }
}

void TryIndex(const std::string& text) {
  const auto index = safetensors::ParseIndex(text, "index");
  if (!index) {
    SW_CHECK(index.error().code != Errc::kInternal);
    return;
  }
  for (const auto& [name, file] : index->files) SW_CHECK(os::SafeName(file));
}

}  // namespace

SW_FUZZ_MUTATION(MutateSafetensors)

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size_bytes) {
  if (size_bytes > 0 && data[0] == 'i') {
    TryIndex({reinterpret_cast<const char*>(data) + 1, size_bytes - 1});
    return 0;
  }
  const int memory = memfd_create("fuzz", 0);
  SW_CHECK(memory >= 0);
  SW_CHECK(write(memory, data, size_bytes) == static_cast<ssize_t>(size_bytes));
  const Result<os::File> file = os::File::OpenRead("/proc/self/fd/" + std::to_string(memory));
  SW_CHECK(file);
  const auto text = safetensors::ReadHeaderText(*file);
  close(memory);
  if (!text) {
    SW_CHECK(text.error().code != Errc::kInternal);
    return 0;
  }
  const auto header = safetensors::ParseHeader(*text);
  if (!header) {
    SW_CHECK(header.error().code != Errc::kInternal);
    return 0;
  }
  CheckCover(*header, safetensors::kLengthBytes + text->text.size(), size_bytes);
  CheckWritten(*header);
  return 0;
}
