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

/// Split rules stored in a checkpoint: `universal_checkpoint_info`, versions 0.0
/// to 0.4, and its `affine_map`, which takes precedence for the parameters that
/// it lists. Expressions use Python's syntax and match at the start of the name.
/// Source: docs/formats/deepspeed.md, "Tensor-parallel semantics".
class UniversalInfo : public RuleSource {
 public:
  UniversalInfo();
  ~UniversalInfo() override;
  UniversalInfo(UniversalInfo&&) noexcept;
  UniversalInfo& operator=(UniversalInfo&&) noexcept;

  /// \param info  the dict; without it (null or None) no
  ///        rule is known. Its nodes must outlive the result.
  /// \error kBadInput     a value of the wrong type; names the key
  /// \error kUnsupported  a newer version, or an expression that RE2 cannot match; names it
  /// Pure.
  static Result<UniversalInfo> Parse(const pickle::Node* info);

  /// Records that AutoTP wrote the info. AutoTP of DeepSpeed 0.18 names only unusual cuts. It
  /// omits parameters cut along dimension 0 and parameters that it does not cut, so RuleFor knows
  /// their rule only if the shapes of the shards differ. Newer releases name all parameters.
  void OfAutoTp();

  /// Returns false if there was no info, or if it has no rule for any parameter.
  bool says_anything() const;

  /// Returns the rule of a parameter, from the shapes of its shards on all
  /// tensor-parallel ranks. A parameter with several shards that no expression matches
  /// is cut along dimension 0, as the format defines, if the info has any rules at all
  /// (but see OfAutoTp). With one shard and no match, the function returns nothing.
  /// \pre !shards.empty()
  /// \error kBadInput     two expressions of a list match, or shards do not fit the rule
  /// \error kUnsupported  the writer declared the layout unsupported, or a
  ///        piece is scaled or partly replicated; the message has the reason
  /// Pure.
  Result<std::optional<Ruled>> RuleFor(const std::string& name,
                                       std::span<const Shape> shards) const override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Builds the `universal_checkpoint_info` of a checkpoint for `tp` ranks: anchored, escaped
/// names like AutoTP's, the pattern lists of version 0.4, and an affine_map. One rank gets
/// only the lists, which preserve rules from the source's info, or null if there are none.
/// \error kUnsupported as for layout::MakeCut, with the parameter's name
/// Pure.
Result<const pickle::Node*> BuildUniversalInfo(pickle::Arena& arena, std::span<const Param> params,
                                               std::uint64_t tp);

}  // namespace shardwright::checkpoints
