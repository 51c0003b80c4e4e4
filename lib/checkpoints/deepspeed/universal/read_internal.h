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

/// A parameter's tensor in its file.
struct Atom {
  Place place;
  Shape shape;                         ///< as stored
  const pickle::Node* keys = nullptr;  ///< the dict around it, or null: a bare tensor (stage 3)
  torch_pt::Document document;         ///< keeps `keys` alive
};

/// The files of a universal folder by name.
class Folder {
 public:
  explicit Folder(const SourceSet& source);

  /// Index of a file. \error kNotFound if it is not there
  Result<std::uint32_t> Need(const std::string& name) const;
  std::optional<std::uint32_t> Find(const std::string& name) const;

  /// States of a parameter that are files, the step aside; sorted.
  const std::vector<std::string>& StatesOf(const std::string& param) const;
  /// Folders in `zero`, sorted.
  const std::map<std::string, std::vector<std::string>>& params() const { return params_; }
  /// Model files by mp rank, those of ZeRO rank 0.
  const std::map<std::uint64_t, std::uint32_t>& models() const { return models_; }
  /// Model files of stage 3, by mp rank and ZeRO rank.
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

/// Adds the tensor (param, state) of one atom, whole or with a padded vocabulary's extra rows.
/// A bare tensor may be flat.
/// \error kBadInput if the stored shape is another; names the file and both shapes
Status AddAtom(Reading* reading, const Param& param, const std::string& state, const Atom& atom);

/// Adds a tensor of one fragment.
void AddTensor(layout::ShardMap* map, const std::string& name, const std::string& state,
               const Shape& shape, std::uint32_t array, layout::CutPtr cut);

/// Parses the model files into the state that is passed through.
/// \error kNotFound if one of `mp` ranks has no file
Status ReadModelStates(Reading* reading, const Folder& folder, std::uint64_t mp);

/// Parses model files and zero/optimizer_state.pt into what is passed through.
/// \error kNotFound if one of `mp` ranks has no file
Status ReadPassed(Reading* reading, const Folder& folder, std::uint64_t mp);

/// Sets the options of groups from `param_groups` of zero/optimizer_state.pt.
/// \error kBadInput if their number is another than the groups'
Status SetOptions(Reading* reading);

/// Names the checkpoint and completes it. What a reader knows of the engine's state is moved.
void Finish(Reading* reading);

/// A folder that DeepSpeed's own converter wrote, of any version.
/// \param only_weights  leave out the optimizer's state, as Format::read_weights does
Result<Checkpoint> ReadForeign(const SourceSet& source, const Patterns& patterns,
                               bool only_weights);

}  // namespace shardwright::checkpoints::atoms
