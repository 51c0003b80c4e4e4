// Any bytes as a .pt file: zip container or legacy stream. Whatever is accepted must lie inside the
// file.

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

void CheckPlaces(const torch_pt::Skeleton& skeleton, std::size_t size_bytes) {
  SW_CHECK(skeleton.last == size_bytes);
  for (const torch_pt::Storage& storage : skeleton.storages) {
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
  const Result<torch_pt::Skeleton> skeleton = torch_pt::ReadSkeleton(*file);
  close(memory);
  if (!skeleton) {
    SW_CHECK(skeleton.error().code != Errc::kInternal);
    return 0;
  }
  CheckPlaces(*skeleton, size_bytes);
  const Result<torch_pt::Document> document = torch_pt::Parse(*skeleton);
  if (!document) return 0;
  for (const torch_pt::Document::StorageRef& storage : document->storages) {
    SW_CHECK(storage.offset <= size_bytes && storage.bytes <= size_bytes - storage.offset);
  }
  return 0;
}
