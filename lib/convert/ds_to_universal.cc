// SPDX-License-Identifier: Apache-2.0
#include "convert/ds_to_universal.h"

#include <algorithm>

#include "support/os/dir.h"

namespace shardwright::convert {
Status DsToUniversal::Apply(std::string* positional) {
  if (output.empty()) return {};
  if (!positional->empty())
    return Fail(Errc::kUsage, "--output_folder cannot be combined with OUTPUT \"", *positional,
                "\"");
  *positional = output;
  return {};
}

void DsToUniversal::Adjust(ConvertOptions* options) const {
  options->flat = !output.empty();
  const std::uint64_t workers = std::max(extract_workers, merge_workers);
  options->threads = std::max(options->threads, static_cast<unsigned>(workers));
}

void Flatten(const checkpoints::Format& format, plan::Target* target) {
  std::erase_if(target->files,
                [&](const plan::OutputFile& file) { return file.path == format.pointer; });
  for (plan::OutputFile& file : target->files) {
    if (const auto slash = file.path.find('/'); slash != std::string::npos)
      file.path.erase(0, slash + 1);
  }
}

Status PointLatest(const checkpoints::Format& format, const std::string& tag_folder) {
  SW_TRY_ASSIGN(const os::ParentName split, os::SplitOutput(tag_folder));
  return os::ReplaceFile(split.parent + "/" + std::string(format.pointer), split.name);
}

}  // namespace shardwright::convert
