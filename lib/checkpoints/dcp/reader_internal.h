// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "checkpoints/dcp/dcp.h"
#include "checkpoints/dcp/pieces_internal.h"
#include "checkpoints/dcp/sort_internal.h"
#include "checkpoints/pickled/map_builder.h"
#include "engine/tensor/dtype.h"
#include "files/container_metadata.h"
#include "files/dcp/items.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::dcp {

/// A DCP folder: one index and its data files.
struct Folder {
  std::string name;        // with a trailing slash, or empty
  std::string index_name;  // ".metadata", for messages
  shardwright::dcp::Index index;
  std::vector<std::uint32_t> source;  // for each file of the index: index into SourceSet::files
  // For each item (by entry and chunk, then copies): its number in its data file.
  std::vector<std::uint32_t> numbers;
  std::vector<std::uint32_t> first;  // index into `numbers`, by entry, then of the copies

  /// Returns `name` without its slash.
  std::string_view StemName() const {
    return std::string_view(name).substr(0, name.empty() ? 0 : name.size() - 1);
  }
  /// Returns the range [first, last) of index.copies that belongs to an entry.
  std::pair<std::uint32_t, std::uint32_t> CopiesOf(std::uint32_t entry) const;
};

/// An item of a data file: its value and the location of its storages.
struct StoredItem {
  std::uint32_t file = 0;  // into SourceSet::files
  shardwright::dcp::ItemValues::Item item;
  const pickle::Node* node = nullptr;  // null if the item is of an unknown type
};

/// Identifies an entry of one of the folders.
struct EntryRef {
  std::uint32_t folder = 0;
  std::uint32_t entry = 0;
};

/// The optimizer's entries for one parameter, identified by the model's name.
struct Kept {
  std::vector<std::pair<std::string_view, EntryRef>> slots;
  std::vector<std::pair<std::string_view, EntryRef>> options;  // of the flat form
};

/// Returns true if parameters of this type can be trained: floating point, more than one byte.
inline bool CanBeTrained(DType dtype) { return IsFloating(dtype) && ItemSize(dtype) > 1; }

/// Makes a Checkpoint from the folders of a source.
class FolderReader {
 public:
  /// \param only_weights  read only the parameter names of an optimizer's entries
  FolderReader(const SourceSet& source, const Patterns& patterns, bool only_weights)
      : source_(source),
        patterns_(patterns),
        only_weights_(only_weights),
        map_(source, &out_.map) {}

  Result<Checkpoint> Run() {
    out_.origin = kName;
    out_.tag = source_.tag;
    out_.arena = std::make_shared<pickle::Arena>();
    out_.warnings = source_.warnings;
    SW_TRY(ReadFolders());
    SW_TRY(SortEntries());
    SW_TRY(CompareCopies());
    MakeParams();
    SW_TRY(MakeGroups());
    OrderParams();
    SW_TRY(DecideRules());
    SW_TRY(AddModel());
    SW_TRY(AddSlots());
    AddExtras();
    Finish();
    return std::move(out_);
  }

 private:
  Status ReadFolders();
  Status ChooseFolders();
  void TakeSets(std::vector<WeightSet> sets, bool chosen_by_name);
  Status ReadFolder(std::string folder_name, const std::vector<std::uint32_t>& indexes);
  Status CompareCopies();
  Status CompareCopy(std::uint32_t folder, std::uint32_t number);
  bool SameValue(const StoredItem& a, const StoredItem& b) const;
  bool AreDifferent(const StoredItem& a, const StoredItem& b) const;
  Status SortEntries();
  void MakeParams();
  void WarnOfUnmatched();
  void MatchGroupNames();
  Status MakeGroups();
  Status MakeNestedGroups();
  Status MakeFlatGroups();
  void DecideStateless();
  bool HasModelOrder() const;
  void OrderParams();
  Status DecideRules();
  Status AddModel();
  Status AddSlots();
  Status AddSlot(Param* param, std::string_view slot, EntryRef ref, bool in_model);
  Status AddTensor(const std::string& name, std::string_view state, EntryRef ref);
  void AddExtras();
  void FindIteration();
  bool ShardsParameters() const;
  void Finish();

  const shardwright::dcp::Entry& At(EntryRef ref) const {
    return folders_[ref.folder].index.entries[ref.entry];
  }
  StoredItem ItemOf(EntryRef ref, std::uint32_t chunk) const;
  StoredItem CopyOf(std::uint32_t number, std::uint32_t copy) const;
  const pickle::Node* ObjectOf(EntryRef ref) const { return ItemOf(ref, 0).node; }
  Result<std::string> BytesOf(const StoredItem& held) const;
  Extra::Value ValueOf(const StoredItem& held);
  const files::Storage& StorageOf(const StoredItem& held, std::uint32_t storage) const {
    return source_.files[held.file].containers.front().metadata->storages[held.item.storage +
                                                                          storage];
  }
  std::string Where(EntryRef ref) const {
    return folders_[ref.folder].name + folders_[ref.folder].index_name + ": " +
           Quoted(At(ref).name);
  }
  /// Returns the model's name of the parameter that has this name in the optimizer.
  std::string_view ModelName(std::string_view name) const {
    const auto found = model_names_.find(name);
    return found == model_names_.end() ? name : found->second;
  }
  Result<const pickle::Node*> OptionValue(std::string_view key, EntryRef ref,
                                          std::vector<Scalar>* tensors);
  Result<const pickle::Node*> PlainOption(std::string_view key, EntryRef ref,
                                          std::vector<Scalar>* tensors);
  Status SetOptions(const std::vector<std::pair<std::string_view, EntryRef>>& options,
                    Group* group);

  const SourceSet& source_;
  const Patterns& patterns_;
  const bool only_weights_;
  Checkpoint out_;
  MapBuilder map_;
  std::shared_ptr<DcpState> own_ = std::make_shared<DcpState>();
  std::vector<Folder> folders_;
  std::vector<shardwright::dcp::ItemValues> items_;  // by index of the file in the source
  std::vector<std::vector<Sorted>> sorted_;
  std::vector<EntryRef> model_;  // by parameter
  std::unordered_map<std::string_view, std::uint32_t>
      by_name_;  // indexes into model_ before the parameters are ordered
  std::unordered_map<std::string_view, Kept> kept_;
  std::vector<std::string_view> kept_order_;
  std::set<std::string_view> trained_;  // only_weights: parameter names in the optimizers
  std::unordered_map<std::string_view, std::string_view>
      model_names_;               // maps optimizer names of parameters to model names that differ
  bool folders_chosen_ = false;   // SourceSet::weights_of names the folder of one of several models
  bool others_left_out_ = false;  // weights were chosen by name
  std::map<std::uint64_t, std::vector<std::pair<std::string_view, EntryRef>>> group_options_;
  std::vector<std::string> differing_;  // items with different values on different ranks
  PieceCuts cuts_;
};

}  // namespace shardwright::checkpoints::dcp
