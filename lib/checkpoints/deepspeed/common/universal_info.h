// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "checkpoints/model/checkpoint.h"
#include "checkpoints/tp_rules/rule_source.h"
#include "engine/layout/rule.h"
#include "engine/tensor/shape.h"
#include "files/pickle/node.h"
#include "support/base/result.h"

namespace shardwright::checkpoints {

/// The split rules that a checkpoint carries itself: `universal_checkpoint_info`, versions 0.0 to
/// 0.4, and its `affine_map`, which wins where it has a parameter. Expressions are Python's,
/// matched at the start of the name.
/// Source: docs/formats/deepspeed.md, "Tensor-parallel semantics".
class UniversalInfo : public RuleSource {
 public:
  UniversalInfo();
  ~UniversalInfo() override;
  UniversalInfo(UniversalInfo&&) noexcept;
  UniversalInfo& operator=(UniversalInfo&&) noexcept;

  /// \param info  the dict, or null / None: then nothing is known. Its nodes must outlive the
  ///              result.
  /// \error kBadInput     a value of the wrong type; names the key
  /// \error kUnsupported  a newer version, or an expression that RE2 cannot match; names it
  /// Pure.
  static Result<UniversalInfo> Parse(const pickle::Node* info);

  /// Says that AutoTP has written it. AutoTP of DeepSpeed 0.18 names only what it has cut in an
  /// unusual way, neither what it has cut along dimension 0 nor what it has not cut; of these
  /// nothing is known then, unless the shapes of the shards differ. Newer releases name all.
  void OfAutoTp();

  /// False when there was no info, or it says nothing about any parameter.
  bool says_anything() const;

  /// The rule of a parameter, from the shapes of its shards on all tensor-parallel ranks. With more
  /// than one shard, a parameter that no expression matches is cut along dimension 0, as the format
  /// says, if the info says anything at all (but see OfAutoTp); with one shard nothing is returned
  /// for it.
  /// \pre !shards.empty()
  /// \error kBadInput     two expressions of a list match, or shards do not fit the rule
  /// \error kUnsupported  the writer declared the layout unsupported, or a scaled or partly
  ///                      replicated piece; says why
  /// Pure.
  Result<std::optional<Ruled>> RuleFor(const std::string& name,
                                       std::span<const Shape> shards) const override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The `universal_checkpoint_info` of a checkpoint written for `tp` ranks: anchored and escaped
/// names as AutoTP writes them, the pattern lists of version 0.4, and an affine_map. With one rank
/// only the lists, so that rules learnt from an info stay with the checkpoint; null if none was.
/// \error kUnsupported as layout::MakeCut, with the parameter's name
/// Pure.
Result<const pickle::Node*> BuildUniversalInfo(pickle::Arena& arena, std::span<const Param> params,
                                               std::uint64_t tp);

}  // namespace shardwright::checkpoints
