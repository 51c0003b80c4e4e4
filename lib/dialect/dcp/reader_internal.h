#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/text.h"
#include "dialect/build/map_builder.h"
#include "dialect/dcp/dcp.h"
#include "dialect/dcp/pieces_internal.h"
#include "dialect/dcp/sort_internal.h"
#include "format/dcp/items.h"
#include "format/skeleton.h"
#include "tensor/dtype.h"

namespace shardwright::dialect::dcp {

/// One index and its data files.
struct Folder {
  std::string name;        // with a slash, or empty
  std::string index_name;  // ".metadata", for messages
  shardwright::dcp::Index index;
  std::vector<std::uint32_t> source;  // by file of the index: into SourceSet::files
  // By item, entry after entry and chunk after chunk, then copies: its number in its file.
  std::vector<std::uint32_t> numbers;
  std::vector<std::uint32_t> first;  // by entry, then that of copies: into numbers

  /// Those of an entry: [first, last) of index.copies.
  std::pair<std::uint32_t, std::uint32_t> CopiesOf(std::uint32_t entry) const;
};

/// An item of a file: what it holds, and where its storages are.
struct HeldItem {
  std::uint32_t file = 0;  // into SourceSet::files
  shardwright::dcp::ItemValues::Item item;
  const pickle::Node* node = nullptr;  // null where it is not understood
};

/// An entry of one of the folders.
struct EntryRef {
  std::uint32_t folder = 0;
  std::uint32_t entry = 0;
};

/// What the optimizer has of a parameter.
struct Kept {
  std::vector<std::pair<std::string_view, EntryRef>> slots;
  std::vector<std::pair<std::string_view, EntryRef>> options;  // flat
};

/// Whether parameters of that type can be trained.
inline bool CanBeTrained(DType dtype) { return IsFloating(dtype) && ItemSize(dtype) > 1; }

/// Makes a checkpoint of the folders of a source.
class FolderReader {
 public:
  FolderReader(const SourceSet& source, const Patterns& patterns)
      : source_(source), patterns_(patterns), map_(source, &out_.map) {}

  Result<Checkpoint> Go() {
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
  Status ReadFolder(std::string folder_name, const std::vector<std::uint32_t>& indexes);
  Status CompareCopies();
  Status CompareCopy(std::uint32_t folder, std::uint32_t number);
  bool SameValue(const HeldItem& a, const HeldItem& b) const;
  bool AreDifferent(const HeldItem& a, const HeldItem& b) const;
  Status SortEntries();
  void MakeParams();
  Status MakeGroups();
  Status MakeNestedGroups();
  void MakeFlatGroups();
  void OrderParams();
  Status DecideRules();
  Status AddModel();
  Status AddSlots();
  Status AddSlot(Param* param, std::string_view slot, EntryRef ref, bool in_model);
  Status AddTensor(const std::string& name, std::string_view state, EntryRef ref);
  void AddExtras();
  void FindIteration();
  void Finish();

  const shardwright::dcp::Entry& At(EntryRef ref) const {
    return folders_[ref.folder].index.entries[ref.entry];
  }
  HeldItem ItemOf(EntryRef ref, std::uint32_t chunk) const;
  HeldItem CopyOf(std::uint32_t number, std::uint32_t copy) const;
  const pickle::Node* ObjectOf(EntryRef ref) const { return ItemOf(ref, 0).node; }
  Result<std::string> BytesOf(const HeldItem& held) const;
  Extra::Value ValueOf(const HeldItem& held);
  const format::Storage& StorageOf(const HeldItem& held, std::uint32_t storage) const {
    return source_.files[held.file].containers.front().skeleton->storages[held.item.storage +
                                                                          storage];
  }
  std::string Where(EntryRef ref) const {
    return folders_[ref.folder].name + folders_[ref.folder].index_name + ": " +
           Quoted(At(ref).name);
  }
  const pickle::Node* NewOptions(const std::vector<std::pair<std::string_view, EntryRef>>& options);

  const SourceSet& source_;
  const Patterns& patterns_;
  Checkpoint out_;
  MapBuilder map_;
  std::shared_ptr<DcpState> own_ = std::make_shared<DcpState>();
  std::vector<Folder> folders_;
  std::vector<shardwright::dcp::ItemValues> items_;  // by file of the source
  std::vector<std::vector<Sorted>> sorted_;
  std::vector<EntryRef> model_;  // by parameter
  std::unordered_map<std::string_view, std::uint32_t>
      by_name_;  // of model_, before they are ordered
  std::unordered_map<std::string_view, Kept> kept_;
  std::vector<std::string_view> kept_order_;
  std::map<std::uint64_t, std::vector<std::pair<std::string_view, EntryRef>>> group_options_;
  std::vector<std::string> differing_;  // items that ranks have each for themselves
  PieceCuts cuts_;
};

}  // namespace shardwright::dialect::dcp
