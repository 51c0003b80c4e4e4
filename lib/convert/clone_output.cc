// SPDX-License-Identifier: Apache-2.0
#include "convert/clone_output.h"

#include <algorithm>

#include "support/os/dir.h"

namespace shardwright::convert {
namespace {

/// Returns false for a packed catalogue, which has the payloads but not the original files.
bool HasOwnFiles(const checkpoints::SourceSet& set) {
  return std::all_of(set.files.begin(), set.files.end(), [](const checkpoints::SourceFile& file) {
    return file.path.ends_with("/" + file.name);
  });
}

}  // namespace

bool IsVerbatim(const Input& input, const checkpoints::Format& format,
                const checkpoints::Layout& layout) {
  return format.same_files != nullptr && input.mapped.empty() &&
         input.checkpoint.origin == format.name && HasOwnFiles(input.set) &&
         format.same_files(input.checkpoint.layout, layout);
}

Result<Verbatim> PlanVerbatim(const Input& input, const checkpoints::Format& format,
                              plan::CloneMode clone) {
  Verbatim out;
  const std::string& tag = input.checkpoint.tag;
  SW_TRY(os::SafeName(tag));
  for (const checkpoints::SourceFile& file : input.set.files) {
    SW_TRY_ASSIGN(const std::string path, os::JoinSafe(tag, file.name));
    const auto index = static_cast<std::uint32_t>(out.map.files.size());
    out.target.files.push_back(
        plan::WholeFile(path, file.path, file.identity.bytes, clone, &out.map));
    for (const checkpoints::Container& container : file.containers) {
      for (const shardwright::files::Storage& storage : container.metadata->storages) {
        out.map.members.push_back({index, storage.offset, storage.bytes, storage.crc32,
                                   NameOf(*container.metadata, storage)});
      }
    }
  }
  out.target.files.push_back(plan::TextFile(std::string(format.pointer), tag));
  return out;
}

}  // namespace shardwright::convert
