// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "convert/convert.h"
#include "engine/plan/target.h"
#include "support/base/result.h"

namespace shardwright::convert {

/// The flags of DeepSpeed's ds_to_universal, so that a job script changes one
/// word. With --output_folder, that tag folder directly contains the atoms,
/// and `latest_universal` in its parent is set to it once it is complete.
/// Source: docs/formats/deepspeed.md, "The upstream converter".
struct DsToUniversal {
  std::string output;
  std::uint64_t extract_workers = 0;
  std::uint64_t merge_workers = 0;
  bool keep_temp_folder = false;
  bool no_strict = false;
  bool inject_missing_state = false;

  /// Makes --output_folder the command's OUTPUT.
  /// \error kUsage if both are given
  Status Apply(std::string* positional);

  /// Turns the flags into options of the conversion.
  void Adjust(ConvertOptions* options) const;
};

/// Changes a target from save-folder form (tag folder next to
/// its pointer) to the tag folder alone, for --output_folder.
void Flatten(const checkpoints::Format& format, plan::Target* target);

/// Atomically points the format's pointer file, next to a finished tag folder, to that folder.
/// \error kIo
Status PointLatest(const checkpoints::Format& format, const std::string& tag_folder);

}  // namespace shardwright::convert
