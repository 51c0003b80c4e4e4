// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "checkpoints/deepspeed/common/engine_state.h"
#include "checkpoints/pickled/document.h"
#include "files/pickle/node.h"
#include "support/base/result.h"

// Entries of a module's state dict that are neither parameters nor buffers. Tensors (quantization
// state, _extra_state) are parameters of the checkpoint with Param::entry. Other entries are
// OpaqueEntry. Source: docs/formats/deepspeed.md, "Entries of the state dict".

namespace shardwright::checkpoints {

/// Frozen parameters that a model file records.
struct FrozenLists {
  bool listed = false;                    ///< frozen_param_shapes is a dict that names all of them
  bool left_out = false;                  ///< true if the file has none (exclude_frozen_parameters)
  std::unordered_set<std::string> names;  ///< if listed: their names
  std::unordered_map<std::string, std::string> kinds;  ///< contents of kKinds

  /// Returns the kind of a tensor in kKinds, or an empty text.
  std::string_view KindOf(const std::string& name) const;
  /// Reads frozen_param_shapes and kKinds. \param stage  the ZeRO stage
  static FrozenLists Of(const pickle::Node* root, std::uint64_t stage);
};

/// Returns the names of a state dict's tensors that are certainly neither parameters nor
/// buffers. Stages 0 and 1 do not list frozen parameters. In these stages only the names of
/// PyTorch's and bitsandbytes' own entries are certain; UnlistedParameters guesses the others.
/// \param prefix  prefix of the dict's keys in the model
/// \param known   returns true for trained parameters, buffers and tied names
/// \param knows_trained  `known` has all trained parameters; false at stage 0, where only the
///        optimizer lists them
/// Pure.
std::unordered_set<std::string> EntryNames(const pickle::Node* dict, const std::string& prefix,
                                           const FrozenLists& frozen,
                                           const std::function<bool(const std::string&)>& known,
                                           bool knows_trained);

/// Decides by name if a tensor that is neither trained nor a buffer is a frozen
/// parameter. Readers use it for stages 0 and 1, which do not list frozen parameters.
class UnlistedParameters {
 public:
  void AddTrained(const std::string& name);
  /// Returns true if the name looks like a parameter's: its last part ends in "weight"
  /// or "bias", it is a part of PyTorch's parametrizations, or it differs from a trained
  /// parameter's name in numbers only (modules of a list are similar). False means unknown.
  bool Contains(const std::string& name) const;

 private:
  std::unordered_set<std::string> trained_;  // without their numbers
};

/// Collects opaque entries during reading.
struct EntryList {
  std::vector<OpaqueEntry> entries;
  std::unordered_map<std::string, std::size_t> by_name;  ///< indices
};

/// Adds a tensor-parallel rank's value of an opaque entry.
/// \param tps  number of tensor-parallel ranks
/// \returns the entry, which is added if the list does not have it
OpaqueEntry& AddOpaque(EntryList* list, const std::string& name, const std::string& after,
                       std::uint64_t tp, std::uint64_t tps, OpaqueEntry::Value value);

/// Copies values of opaque entries into a document.
class EntryTaker {
 public:
  explicit EntryTaker(Document& document) : document_(document) {}
  /// Returns the value of a rank, or another rank's value if it has none.
  /// \error kBadInput as for Graft::Take
  Result<const pickle::Node*> Take(const OpaqueEntry& entry, std::uint64_t tp);
  /// Inserts entries into a state dict of tensors, each after the tensor that preceded it.
  /// \param local  converts names in the model to keys of the dict
  Status PutInto(pickle::Node* dict, const std::vector<const OpaqueEntry*>& entries,
                 std::uint64_t tp, const std::function<std::string(const std::string&)>& local);

 private:
  Document& document_;
  std::map<const Passed*, std::unique_ptr<Graft>> grafts_;
};

/// Returns the list for kOpaqueEntries of one tensor-parallel rank; null if there are no entries.
Result<const pickle::Node*> EntriesNode(Document& document, const std::vector<OpaqueEntry>& entries,
                                        std::uint64_t tp);

/// Inverse of EntriesNode: adds the entries of a model file of a universal folder.
/// \error kBadInput  not a list that EntriesNode made
Status ParseEntries(const std::shared_ptr<const Passed>& from, std::uint64_t tp, std::uint64_t tps,
                    EntryList* entries);

}  // namespace shardwright::checkpoints
