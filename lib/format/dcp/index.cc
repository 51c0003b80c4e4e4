#include "format/dcp/index.h"

#include <algorithm>

#include "base/checked.h"

namespace shardwright::dcp {

bool Chunk::is_empty() const {
  return std::find(sizes.begin(), sizes.end(), std::uint64_t{0}) != sizes.end();
}

std::string_view Entry::part(std::size_t i) const {
  if (path.empty()) return name;
  const std::size_t first = i == 0 ? 0 : path[i - 1].end + 1;
  return std::string_view(name).substr(first, path[i].end - first);
}

std::uint32_t Index::FileNumber(std::string_view name) {
  const auto at = std::find(files.begin(), files.end(), name);
  const auto number = static_cast<std::uint32_t>(at - files.begin());
  if (number == files.size()) files.emplace_back(name);
  return number;
}

Status CheckVolumes(const Index& index) {
  for (const Entry& entry : index.entries) {
    if (!entry.is_tensor) continue;
    std::uint64_t sum = 0;
    for (const Chunk& chunk : entry.chunks) {
      SW_TRY_ASSIGN(sum, CheckedAdd(sum, Elems(chunk.sizes)));
    }
    const std::uint64_t whole = Elems(entry.shape);
    if (sum == whole) continue;
    return Fail(Errc::kBadInput,
                "tensor \"" + entry.name + "\" " + ToString(entry.shape) + ": its " +
                    std::to_string(entry.chunks.size()) + " chunks have " + std::to_string(sum) +
                    " of " + std::to_string(whole) + " elements" +
                    (sum > whole ? ": they overlap" : ": a part of it is missing"));
  }
  return {};
}

}  // namespace shardwright::dcp
