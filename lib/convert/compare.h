// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoints/model/checkpoint.h"
#include "engine/exec/byte_source.h"
#include "engine/plan/plan.h"
#include "engine/plan/target_builder.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/comm/comm.h"

namespace shardwright::convert {

/// Options of a comparison, as the shared flags set them.
struct CompareOptions {
  unsigned threads = 1;
  /// Limit for data received from other ranks, if files are not visible to every rank.
  std::uint64_t memory_bytes = std::uint64_t{1} << 30;
};

/// One of two sources to compare. All referenced objects must outlive the comparison.
struct Compared {
  const layout::ShardMap& map;
  exec::ByteSource& bytes;
  const std::vector<int>& file_owner;  ///< as in exec::Exchange
};

/// Receives one unit with its bytes from both sources. Must be thread-safe.
using OnUnit =
    std::function<void(std::uint64_t index, const plan::Unit& unit, std::span<const std::byte> of_a,
                       std::span<const std::byte> of_b)>;

/// Gathers every unit of a target from both sources and passes it to `on_unit`. Never writes the
/// target, and uses bounded memory. Compares every source member that it reads with its checksum.
/// \returns  bytes of the target
/// \error kBadInput, kNotFound  a source is damaged or missing; kStopped
/// Collective; units are spread over ranks and threads, each rank has consecutive ones.
Result<std::uint64_t> CompareSources(comm::Comm& comm, const Compared& a, const Compared& b,
                                     const plan::Target& target, const CompareOptions& options,
                                     const OnUnit& on_unit, Sink& sink);

/// Indexes of a parameter's compute weights and master weights, which can be compared.
struct Weighed {
  std::uint32_t weight = 0;
  std::uint32_t master = 0;
};

/// Finds both tensors of a parameter. Returns nothing if one of them is missing or is a mean of
/// ranks' values, or if their types cannot be converted. Pure.
std::optional<Weighed> WeighedOf(const layout::ShardMap& map, const layout::TensorIndex& index,
                                 const std::string& name);

/// Presents compute weights and master weights of parameters as two sources of the same tensors.
/// CompareSources for `target` then compares the weights with the rounded masters. File number i of
/// the target, and tensor number i of both maps, is the i-th added parameter.
class WeightsAndMasters {
 public:
  /// \pre the map outlives it
  explicit WeightsAndMasters(const layout::ShardMap& map);

  /// Adds a parameter. \pre its tensors of the checkpoint's map can be compared
  void Add(const Weighed& param);

  const layout::ShardMap& weights() const { return weights_; }
  const layout::ShardMap& masters() const { return masters_; }
  const plan::Target& target() const { return target_.target(); }

 private:
  const layout::ShardMap& map_;
  layout::ShardMap weights_;
  layout::ShardMap masters_;
  plan::TargetBuilder target_;
};

/// Differing elements of two units. All NaNs are equal.
struct Differing {
  std::uint64_t first = 0;
  std::uint64_t count = 0;
  std::uint64_t apart = 0;  ///< number that differs by more than one unit in the last place
};

/// Compares two units element by element. Pure.
Differing CompareElements(DType dtype, std::span<const std::byte> a, std::span<const std::byte> b);

/// Returns the path of the file that contains element `element` of a tensor.
const std::string& FileOf(const layout::ShardMap& map, const layout::LogicalTensor& tensor,
                          std::uint64_t element);

/// Verifies a mapping that a reader had to infer: every element of a parameter's weight must
/// equal its master weight, rounded to the weight's type. Does nothing if nothing was inferred.
/// \param bytes       reads the checkpoint's map
/// \param file_owner  as in exec::Exchange
/// \error kUnsupported  the masters are stored at another place or cannot be compared; the
///        message has the parameter, the files and both values
/// \error kBadInput  the place is right, but some elements differ, and the message shows the
///        first; or a file does not match its checksum
/// Collective.
Status ProveInferred(comm::Comm& comm, const checkpoints::Checkpoint& checkpoint,
                     exec::ByteSource& bytes, const std::vector<int>& file_owner,
                     const CompareOptions& options, Sink& sink);

/// Number of elements in the middle of each parameter that CheckOneSave compares,
/// unless there is evidence of two saves. Smaller parameters are compared completely.
inline constexpr std::uint64_t kSampledElements = 16384;

/// Result of CheckOneSave for a checkpoint that is accepted.
struct OneSave {
  /// Parameters with compute weights that differ from their rounded masters. Weights that are
  /// converted from the masters differ from those that the trainer used.
  std::vector<std::string> weights_apart;
  /// Reason to suspect that the files are of two saves, without proof. Empty if there is none.
  std::string doubt;
};

/// Checks that the files of a checkpoint are of one save. A job that is killed while it overwrites
/// a checkpoint leaves files of two: model states of step 8 and optimizer states of step 4.
/// Compares the optimizer's step with the trainer's counters (Checkpoint::save), and compute
/// weights with rounded master weights. Compares a sample of every parameter (kSampledElements), or
/// all elements if steps differ or weights may be ahead of the masters.
///  - Weights that differ from the rounded masters prove two saves, unless the trainer makes them
///    differ. A difference of one unit in the last place counts only if steps differ too.
///  - Different steps with weights equal to the rounded masters do not prove two saves: the
///    optimizer's state was reset or imported.
///  - If no weights can be compared (ZeRO stage 3), different steps are reported as a doubt.
/// \param bytes        reads the checkpoint's map
/// \param file_owner   as in exec::Exchange
/// \param how          nothing: reads no payload, compares only steps, and reports a difference
/// \param allow_mixed  report instead of failing
/// \error kBadInput  the files are of two saves; names both files and both values
/// Collective.
Result<OneSave> CheckOneSave(comm::Comm& comm, const checkpoints::Checkpoint& checkpoint,
                             exec::ByteSource& bytes, const std::vector<int>& file_owner,
                             const std::optional<CompareOptions>& how, bool allow_mixed,
                             Sink& sink);

}  // namespace shardwright::convert
