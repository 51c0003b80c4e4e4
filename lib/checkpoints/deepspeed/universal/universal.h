// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>

#include "checkpoints/deepspeed/common/target.h"
#include "checkpoints/deepspeed/common/topology.h"
#include "checkpoints/model/format.h"
#include "support/base/result.h"

namespace shardwright::checkpoints {

/// Reads DeepSpeed universal folders: any upstream version, bare
/// tensors of stage 3, and Shardwright's superset with its manifest.
Result<Checkpoint> ReadUniversal(const SourceSet& source, const Patterns& patterns);

/// Implements Format::read_weights: reads the master weights and the model files.
Result<Checkpoint> ReadUniversalWeights(const SourceSet& source, const Patterns& patterns);

/// DeepSpeed's universal loader that must be able to open the state files of trained
/// parameters. No form works with all of them. Shardwright's reader opens every form.
enum class Loader : std::uint8_t {
  kAuto,    ///< the loader of the target's stage in the release that saved the source
  kAny,     ///< stages 1 and 2 of every release, stage 3 from 0.19.3 on: dicts
  kStage3,  ///< stage 3 of every release: bare tensors
};

/// Writes a universal folder: OUT/latest_universal, OUT/<tag>/zero/... Pure.
/// The model-state files are written for `topology.mp()` ranks.
/// \error kUnsupported kStage3 with tensor parallelism
Result<Written> WriteUniversal(const Checkpoint& source, const Topology& topology,
                               Loader loader = Loader::kAuto);

namespace universal {

// Functions in the format's row of the registry; see Format.
bool Claims(const Listing& listing);
Belongs BelongsTo(std::string_view name);
Result<SourceSet> Scan(const Listing& listing, const ScanOptions& options);
Result<Layout> Resolve(const TargetSpec& spec, const Checkpoint& source);
Result<Written> Write(const Checkpoint& source, const Layout& layout);

/// Implements TargetKey::check. \error kUsage
Status CheckLoader(std::string_view key, std::string_view value);

/// Values of --loader, in the order of Loader.
inline constexpr std::array<std::string_view, 3> kLoaderWords = {"auto", "any", "stage3"};

inline constexpr TargetKey kLoaderKey = {
    .name = "loader",
    .help =
        "DeepSpeed loaders that can open the atoms. auto: the loader of the target's ZeRO stage in "
        "the source's release. any: the loaders of all stages since 0.19.3, before that those of "
        "stages 1 and 2. stage3: the stage-3 loader of every release",
    .check = CheckLoader,
    .is_flag = true,
    .words = kLoaderWords};

template <std::size_t kKeys>
constexpr std::array<TargetKey, kKeys + 1> WithLoader(const std::array<TargetKey, kKeys>& zero) {
  std::array<TargetKey, kKeys + 1> keys{};
  std::copy(zero.begin(), zero.end(), keys.begin());
  keys.back() = kLoaderKey;
  return keys;
}

}  // namespace universal

/// Keys of DeepSpeed's layouts, and --loader.
inline constexpr auto kUniversalKeys = universal::WithLoader(kZeroKeys);

}  // namespace shardwright::checkpoints
