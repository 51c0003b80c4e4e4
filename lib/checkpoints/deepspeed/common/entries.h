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
  bool listed = false;    ///< frozen_param_shapes is a dict: it names all of them
  bool left_out = false;  ///< the file is known to hold none (exclude_frozen_parameters)
  std::unordered_set<std::string> names;               ///< listed: their names
  std::unordered_map<std::string, std::string> kinds;  ///< of kKinds

  /// Returns what kKinds has of a tensor, or nothing.
  std::string_view KindOf(const std::string& name) const;
  /// Reads frozen_param_shapes and kKinds. \param stage  of ZeRO
  static FrozenLists Of(const pickle::Node* root, std::uint64_t stage);
};

/// Returns the names of a state dict's tensors that are surely neither parameters nor buffers.
/// Stages 0 and 1 do not list frozen parameters. There only the names of entries of PyTorch and
/// bitsandbytes are sure; see UnlistedParameters for the others.
/// \param prefix  prefix of the dict's keys in the model
/// \param known   returns true for trained parameters, buffers and tied names
/// Pure.
std::unordered_set<std::string> EntryNames(const pickle::Node* dict, const std::string& prefix,
                                           const FrozenLists& frozen,
                                           const std::function<bool(const std::string&)>& known);

/// Decides by name whether a tensor that is neither trained nor a buffer is a frozen parameter,
/// where no list says so (stages 0 and 1).
class UnlistedParameters {
 public:
  void AddTrained(const std::string& name);
  /// Returns true if the name is one of a parameter: its last part is or ends in "weight" or
  /// "bias", it is a part of PyTorch's parametrizations, or differs from a trained parameter's in
  /// numbers only (modules of a list are alike). False: nothing is known of the tensor.
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
/// \returns the entry
OpaqueEntry& AddOpaque(EntryList* list, const std::string& name, const std::string& after,
                       std::uint64_t tp, std::uint64_t tps, OpaqueEntry::Value value);

/// Copies values of opaque entries into a document.
class EntryTaker {
 public:
  explicit EntryTaker(Document& document) : document_(document) {}
  /// Returns the value of a rank, or another rank's value if it has none.
  /// \error kBadInput as Graft::Take
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
/// \error kBadInput  not a list from EntriesNode
Status ParseEntries(const std::shared_ptr<const Passed>& from, std::uint64_t tp, std::uint64_t tps,
                    EntryList* entries);

}  // namespace shardwright::checkpoints
