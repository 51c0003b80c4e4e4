// SPDX-License-Identifier: Apache-2.0
#include "engine/device/windows.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

#include "engine/device/host.h"
#include "support/base/system.h"

namespace shardwright::device {
namespace {

/// Random bytes at the beginning of a window, until all ranks have mapped it. They
/// detect a process with the same id on another node: its memory has other bytes.
using Mark = std::array<char, 32>;

/// Address of a window, as its rank sends it to the others.
struct WindowAddress {
  std::uint64_t process = 0;
  std::uint64_t bytes = 0;
  std::int64_t descriptor = -1;
  Mark mark{};
};

Result<std::unique_ptr<Buffer>> Find(const WindowAddress& told) {
  if (told.descriptor < 0) return Fail(Errc::kNotFound, "a rank could not create shared memory");
  const std::string path =
      "/proc/" + std::to_string(told.process) + "/fd/" + std::to_string(told.descriptor);
  // On another node the descriptor may be any file, and opening some files has side effects.
  std::array<char, 64> link = {};
  const ssize_t length = ::readlink(path.c_str(), link.data(), link.size());
  if (length <= 0 || !std::string_view(link.data(), static_cast<std::size_t>(length))
                          .starts_with(std::string("/memfd:") + kSharedName)) {
    return Fail(Errc::kNotFound, path, ": not the shared memory of a rank");
  }
  Handle handle;
  handle.bytes = told.bytes;
  handle.descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  SW_TRY_ASSIGN(std::unique_ptr<Buffer> found, ImportHost(handle));
  if (std::memcmp(found->data(), told.mark.data(), sizeof told.mark) != 0) {
    return Fail(Errc::kNotFound, path, ": belongs to another process");
  }
  return found;
}

}  // namespace

Result<std::unique_ptr<Windows>> Windows::Open(comm::Comm& comm, std::uint64_t bytes) {
  std::unique_ptr<Windows> out(new Windows(static_cast<std::size_t>(comm.rank())));
  WindowAddress mine;
  mine.process = static_cast<std::uint64_t>(::getpid());
  mine.bytes = std::max<std::uint64_t>(bytes, sizeof mine.mark);
  const Result<std::string> random = RandomHex(mine.mark.size() / 2);
  Result<std::unique_ptr<Buffer>> own = AllocateHost(Place::kShared, mine.bytes);
  if (random && own) {
    std::ranges::copy(*random, mine.mark.begin());
    std::memcpy((*own)->data(), mine.mark.data(), sizeof mine.mark);
    if (const Result<Handle> handle = ExportHost(**own)) mine.descriptor = handle->descriptor;
  }
  SW_TRY_ASSIGN(const std::vector<comm::Bytes> all,
                comm.AllGather(std::as_bytes(std::span(&mine, 1))));
  bool seen = true;
  for (std::size_t rank = 0; rank < all.size() && seen; ++rank) {
    if (rank == out->rank_) {
      seen = mine.descriptor >= 0;
      if (seen) out->memory_.push_back(std::move(*own));
      continue;
    }
    WindowAddress told;
    seen = all[rank].size() == sizeof told;
    if (!seen) break;
    std::memcpy(&told, all[rank].data(), sizeof told);
    Result<std::unique_ptr<Buffer>> found = Find(told);
    seen = found.has_value();
    if (seen) out->memory_.push_back(std::move(*found));
  }
  // No rank overwrites its mark before all ranks have read it.
  SW_TRY_ASSIGN(const std::uint64_t blind, comm.AllReduceOr(seen ? 0 : 1));
  if (blind != 0) out.reset();
  return out;
}

std::span<std::byte> Windows::mine() const {
  return {memory_[rank_]->data(), memory_[rank_]->size()};
}

std::span<const std::byte> Windows::of(int rank) const {
  const Buffer& buffer = *memory_[static_cast<std::size_t>(rank)];
  return {buffer.data(), buffer.size()};
}

}  // namespace shardwright::device
