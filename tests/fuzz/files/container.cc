// SPDX-License-Identifier: Apache-2.0
// Any bytes as a .pt file: zip container or legacy stream. Every accepted byte range must be inside
// the file.

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "files/torch_pt/reader.h"
#include "fuzz/mutate/mutate.h"
#include "support/base/result.h"
#include "support/os/file.h"

namespace os = shardwright::os;
namespace torch_pt = shardwright::torch_pt;
using shardwright::Errc;
using shardwright::Result;

namespace {

void CheckPlaces(const torch_pt::ContainerMetadata& metadata, std::size_t size_bytes) {
  SW_CHECK(metadata.last == size_bytes);
  for (const torch_pt::Storage& storage : metadata.storages) {
    SW_CHECK(storage.offset <= size_bytes && storage.bytes <= size_bytes - storage.offset);
  }
}

}  // namespace

SW_FUZZ_MUTATION(MutateZip)

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size_bytes) {
  const int memory = memfd_create("fuzz", 0);
  SW_CHECK(memory >= 0);
  SW_CHECK(write(memory, data, size_bytes) == static_cast<ssize_t>(size_bytes));
  const Result<os::File> file = os::File::OpenRead("/proc/self/fd/" + std::to_string(memory));
  SW_CHECK(file);
  const Result<torch_pt::ContainerMetadata> metadata = torch_pt::ReadMetadata(*file);
  close(memory);
  if (!metadata) {
    SW_CHECK(metadata.error().code != Errc::kInternal);
    return 0;
  }
  CheckPlaces(*metadata, size_bytes);
  const Result<torch_pt::Document> document = torch_pt::Parse(*metadata);
  if (!document) return 0;
  for (const torch_pt::Document::StorageRef& storage : document->storages) {
    SW_CHECK(storage.offset <= size_bytes && storage.bytes <= size_bytes - storage.offset);
  }
  return 0;
}
