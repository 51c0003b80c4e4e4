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

/// How a comparison works; the fields are the shared flags.
struct CompareOptions {
  unsigned threads = 1;
  /// Bytes that a rank may hold of what others send it, where files are not visible on all.
  std::uint64_t memory_bytes = std::uint64_t{1} << 30;
};

/// One of two sources to compare; all outlive the comparison.
struct Compared {
  const layout::ShardMap& map;
  exec::ByteSource& bytes;
  const std::vector<int>& file_owner;  ///< as exec::Exchange takes it
};

/// Sees a unit as both sides have it. Thread-safe.
using OnUnit =
    std::function<void(std::uint64_t index, const plan::Unit& unit, std::span<const std::byte> of_a,
                       std::span<const std::byte> of_b)>;

/// Gathers every unit of a target, which is never written, from both sources, unit by unit in
/// bounded memory, and compares every source member read with its checksum.
/// \returns  bytes of the target
/// \error kBadInput, kNotFound  a source; kStopped
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

/// Returns the file that holds an element of a tensor.
const std::string& FileOf(const layout::ShardMap& map, const layout::LogicalTensor& tensor,
                          std::uint64_t element);

/// Proves what a reader had to infer: a parameter's master weights, rounded to the type of its
/// weight, are its weight, every element of them. Nothing to do where nothing was inferred.
/// \param bytes       reads the checkpoint's map
/// \param file_owner  as exec::Exchange takes it
/// \error kUnsupported  a parameter's masters lie elsewhere, or cannot be compared; names it, the
///        files and both values
/// \error kBadInput  its masters lie there but for some elements, the first of which the message
///        shows; a file is damaged, as its checksum tells
/// Collective.
Status ProveInferred(comm::Comm& comm, const checkpoints::Checkpoint& checkpoint,
                     exec::ByteSource& bytes, const std::vector<int>& file_owner,
                     const CompareOptions& options, Sink& sink);

/// Number of elements in the middle of each parameter that CheckOneSave compares, unless there is
/// evidence of two saves. A smaller parameter is compared whole.
inline constexpr std::uint64_t kSampledElements = 16384;

/// Result of CheckOneSave for a checkpoint that is accepted.
struct OneSave {
  /// Parameters whose compute weights differ from their rounded master weights. Weights that are
  /// converted from the masters differ from those that the trainer used.
  std::vector<std::string> weights_apart;
  /// Reason why the files may be of two saves, without proof; empty: none.
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
/// \param file_owner   as exec::Exchange takes it
/// \param how          nothing: reads no payload, compares only steps, and reports a difference
/// \param allow_mixed  report instead of failing
/// \error kBadInput  the files are of two saves; names both files and both values
/// Collective.
Result<OneSave> CheckOneSave(comm::Comm& comm, const checkpoints::Checkpoint& checkpoint,
                             exec::ByteSource& bytes, const std::vector<int>& file_owner,
                             const std::optional<CompareOptions>& how, bool allow_mixed,
                             Sink& sink);

}  // namespace shardwright::convert
