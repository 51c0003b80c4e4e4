// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoints/deepspeed/common/reader_common.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::atoms {

using Reading = reader::EngineReading;

/// A parameter's tensor in its atom file.
struct Atom {
  Place place;
  Shape shape;                         ///< as stored
  const pickle::Node* keys = nullptr;  ///< the dict around it, or null for a bare tensor (stage 3)
  torch_pt::Document document;         ///< keeps `keys` alive
};

/// The files of a universal folder by name.
class Folder {
 public:
  explicit Folder(const SourceSet& source);

  /// Returns the index of a file. \error kNotFound if the folder does not have it
  Result<std::uint32_t> Need(const std::string& name) const;
  std::optional<std::uint32_t> Find(const std::string& name) const;

  /// Returns the states of a parameter that have files, except the step. Sorted.
  const std::vector<std::string>& StatesOf(const std::string& param) const;
  /// Returns the folders in `zero`, sorted.
  const std::map<std::string, std::vector<std::string>>& params() const { return params_; }
  /// Returns the model files of ZeRO rank 0 by mp rank.
  const std::map<std::uint64_t, std::uint32_t>& models() const { return models_; }
  /// Returns the model files of stage 3, by mp rank and ZeRO rank.
  const std::map<std::pair<std::uint64_t, std::uint64_t>, std::uint32_t>& stage3_models() const {
    return stage3_models_;
  }

 private:
  const SourceSet& source_;
  std::map<std::string, std::uint32_t, std::less<>> files_;
  std::map<std::string, std::vector<std::string>> params_;
  std::map<std::uint64_t, std::uint32_t> models_;
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::uint32_t> stage3_models_;
};

/// Opens zero/<param>/<state>.pt. \error kNotFound, kBadInput, kUnsupported; names the file
Result<Atom> OpenAtom(Reading* reading, const Folder& folder, const std::string& param,
                      std::string_view state);

/// Adds the tensor (param, state) of one atom, whole or with
/// the padding rows of a vocabulary. A bare tensor may be flat.
/// \error kBadInput if the stored shape differs; names the file and both shapes
Status AddAtom(Reading* reading, const Param& param, const std::string& state, const Atom& atom);

/// Adds a tensor of one fragment.
void AddTensor(layout::ShardMap* map, const std::string& name, const std::string& state,
               const Shape& shape, std::uint32_t array, layout::CutPtr cut);

/// Parses the model files into the state that the target receives unchanged.
/// \error kNotFound if a file of one of the `mp` ranks is missing
Status ReadModelStates(Reading* reading, const Folder& folder, std::uint64_t mp);

/// Parses model files and zero/optimizer_state.pt into state that the target receives unchanged.
/// \error kNotFound if a file of one of the `mp` ranks is missing
Status ReadPassed(Reading* reading, const Folder& folder, std::uint64_t mp);

/// Sets the options of groups from `param_groups` of zero/optimizer_state.pt.
/// \error kBadInput if their number differs from the number of groups
Status SetOptions(Reading* reading);

/// Names the checkpoint and completes it. Moves the reader's engine state into it.
void Finish(Reading* reading);

/// Reads a folder that DeepSpeed's own converter wrote, of any version.
/// \param only_weights  skip the optimizer's state, as Format::read_weights does
Result<Checkpoint> ReadForeign(const SourceSet& source, const Patterns& patterns,
                               bool only_weights);

}  // namespace shardwright::checkpoints::atoms
