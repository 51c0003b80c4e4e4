// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <unordered_map>

#include "files/dcp/index.h"
#include "files/dcp/names_internal.h"
#include "files/pickle/fold.h"
#include "files/pickle/names.h"
#include "support/base/limits.h"

namespace shardwright::dcp {
namespace {

using pickle::AttributeOf;
using pickle::Box;
using pickle::Cell;
using pickle::ClassOf;

constexpr std::uint64_t kMostExtent = std::uint64_t{1} << 62;

/// Returns the name of a class of the metadata module, otherwise an empty string.
std::string_view MetadataClass(const Cell& cell) {
  const std::string_view name = ClassOf(cell);
  return name.starts_with(kMetadata) ? name.substr(kMetadata.size()) : std::string_view();
}

tl::unexpected<Error> Expected(std::string_view what, const Cell* found) {
  return Fail(Errc::kBadInput, what, " expected, found ",
              (found == nullptr ? "nothing" : Describe(*found)));
}

Result<std::uint64_t> CountOf(const Cell* cell, std::string_view what) {
  if (cell == nullptr || !cell->is_int()) return Expected(std::string(what) + ": count", cell);
  const std::int64_t value = cell->integer();
  if (value >= 0 && static_cast<std::uint64_t>(value) <= kMostExtent) {
    return static_cast<std::uint64_t>(value);
  }
  return Fail(Errc::kBadInput, what, ": ", value, " is not a number of bytes or elements");
}

/// Reads a torch.Size, or a tuple or list in its place.
Result<Shape> ShapeOf(const Cell* cell, std::string_view what) {
  const Cell* extents = cell;
  if (cell != nullptr && ClassOf(*cell) == "torch.Size") {
    const Box& args = *cell->box()->items[1].box();
    extents = args.items.size() == 1 ? args.items.data() : nullptr;
  }
  const Box* box = extents != nullptr ? extents->box() : nullptr;
  if (box == nullptr || (box->kind != Box::Kind::kTuple && box->kind != Box::Kind::kList)) {
    return Expected(std::string(what) + ": torch.Size", cell);
  }
  if (box->items.size() > limits::kTensorRank) {
    return Fail(Errc::kLimit, what, ": ", box->items.size(), " dimensions, at most ",
                limits::kTensorRank);
  }
  Shape shape;
  shape.reserve(box->items.size());
  for (const Cell& item : box->items) {
    SW_TRY_ASSIGN(const std::uint64_t extent, CountOf(&item, what));
    shape.push_back(extent);
  }
  return shape;
}

/// Reads (dtype, layout, requires_grad, memory format, pin_memory) and, in some releases, strides.
Result<DType> DTypeOf(const Cell* properties) {
  const std::string_view name = properties != nullptr ? ClassOf(*properties) : std::string_view();
  if (name != std::string(kMetadata) + "TensorProperties" &&
      name != std::string(kOldModule) + "TensorProperties") {
    return Expected("properties: TensorProperties", properties);
  }
  const Cell* state = pickle::StateOf(*properties);
  const Box* box = state != nullptr ? state->box() : nullptr;
  const bool known = box != nullptr && box->kind == Box::Kind::kTuple &&
                     (box->items.size() == 5 || box->items.size() == 6);
  if (!known) return Expected("properties: tuple of 5 or 6 values", state);
  const Cell& dtype = box->items[0];
  const auto type =
      dtype.is_global() ? pickle::DTypeOfGlobal(dtype.text()) : std::optional<DType>();
  if (!type) return Expected("properties: element type", &dtype);
  const Cell& layout = box->items[1];
  const Box* args =
      ClassOf(layout) == "torch.serialization._get_layout" ? layout.box()->items[1].box() : nullptr;
  const bool strided = (args != nullptr && args->items.size() == 1 && args->items[0].is_text() &&
                        args->items[0].text() == "torch.strided") ||
                       (layout.is_global() && layout.text() == "torch.strided");
  if (strided) return *type;
  return Fail(Errc::kUnsupported, "properties: layout torch.strided expected");
}

/// A key of storage_data: the name and, for a chunk, its offset.
struct Key {
  std::string_view name;
  std::optional<Shape> offset;
};

struct Stored {
  Key key;
  Place at;
};

struct Path {
  std::string_view name;
  std::vector<PathPart> parts;
};

/// Contents of one dict of the pickle.
struct Table {
  std::vector<Entry> entries;
  std::vector<Stored> stored;
  std::vector<Path> paths;
};

Result<Key> KeyOf(const Cell& index) {
  Key key;
  const Cell* name = AttributeOf(index, "fqn");
  if (name == nullptr || !name->is_text()) return Expected("MetadataIndex: fqn", name);
  key.name = name->text();
  const Cell* offset = AttributeOf(index, "offset");
  if (offset == nullptr || offset->is_none()) return key;
  SW_TRY_ASSIGN(key.offset, ShapeOf(offset, "MetadataIndex \"" + std::string(key.name) + "\""));
  return key;
}

Status CheckFileName(std::string_view name) {
  const bool bare = !name.empty() && name != "." && name != ".." && name.size() < 256 &&
                    name.find_first_of(std::string_view("/\\\0", 3)) == std::string_view::npos;
  if (bare) return {};
  return Fail(Errc::kBadInput, "data file \"", name.substr(0, 256), "\" is not the name of a file");
}

Result<Entry> TensorOf(std::string_view name, const Cell& value) {
  Entry entry;
  entry.name = name;
  entry.is_tensor = true;
  SW_TRY_ASSIGN(entry.dtype, DTypeOf(AttributeOf(value, "properties")));
  SW_TRY_ASSIGN(entry.shape, ShapeOf(AttributeOf(value, "size"), "size"));
  SW_TRY(CountElems(entry.shape));
  const Cell* chunks = AttributeOf(value, "chunks");
  const Box* list = chunks != nullptr ? chunks->box() : nullptr;
  if (list == nullptr || list->kind != Box::Kind::kList) return Expected("chunks: list", chunks);
  entry.chunks.reserve(list->items.size());
  for (const Cell& item : list->items) {
    if (MetadataClass(item) != "ChunkStorageMetadata") {
      return Expected("ChunkStorageMetadata", &item);
    }
    Chunk chunk;
    SW_TRY_ASSIGN(chunk.offsets, ShapeOf(AttributeOf(item, "offsets"), "offsets"));
    SW_TRY_ASSIGN(chunk.sizes, ShapeOf(AttributeOf(item, "sizes"), "sizes"));
    const auto wrong = [&](const std::string& what) {
      return Fail(Errc::kBadInput, "chunk at ", ToString(chunk.offsets), " of ",
                  ToString(chunk.sizes), ": ", what, " ", ToString(entry.shape));
    };
    if (chunk.offsets.size() != entry.shape.size() || chunk.sizes.size() != entry.shape.size()) {
      return wrong("the number of dimensions differs from its tensor");
    }
    for (std::size_t dim = 0; dim < entry.shape.size(); ++dim) {
      if (chunk.offsets[dim] > entry.shape[dim] ||
          chunk.sizes[dim] > entry.shape[dim] - chunk.offsets[dim]) {
        return wrong("outside its tensor");
      }
    }
    entry.chunks.push_back(std::move(chunk));
  }
  return entry;
}

class IndexReader final : public pickle::Folder {
 public:
  Result<bool> Take(std::uint64_t dict, const Cell& key, const Cell& value) override;
  Status Root(const Cell& root) override;
  Index&& index() { return std::move(index_); }

 private:
  Result<Stored> StoredOf(const Cell& key, const Cell& value);
  Result<std::uint32_t> TransformsOf(const Cell* list);
  Result<std::uint32_t> FileOf(const Cell* name);
  Table* TableOf(std::uint64_t dict);
  Result<Table> TakeTable(const Cell& root, std::string_view name, bool needed);
  Status AddEntries(Table table);
  Status AddPlaces(const Table& table);
  Status AddPaths(Table table);
  void OrderAsSaved(const std::vector<std::uint32_t>& order);
  std::optional<std::uint32_t> EntryOf(std::string_view name);

  Index index_;
  std::unordered_map<std::string, std::uint32_t> file_numbers_;
  std::unordered_map<std::uint64_t, Table> tables_;  // by dict number
  std::uint64_t last_dict_ = 0;
  Table* last_table_ = nullptr;
  std::unordered_map<std::string_view, std::uint32_t> by_name_;  // index into index_.entries
  std::uint32_t next_ = 0;                                       // guess for the next lookup
};

Table* IndexReader::TableOf(std::uint64_t dict) {
  if (last_table_ == nullptr || last_dict_ != dict) {
    last_dict_ = dict;
    last_table_ = &tables_[dict];
  }
  return last_table_;
}

Result<bool> IndexReader::Take(std::uint64_t dict, const Cell& key, const Cell& value) {
  if (key.is_text()) {
    const std::string_view kind = MetadataClass(value);
    if (kind == "TensorStorageMetadata") {
      Result<Entry> entry = TensorOf(key.text(), value);
      if (!entry) return Within("tensor \"" + std::string(key.text()) + "\"", entry.error());
      TableOf(dict)->entries.push_back(*std::move(entry));
      return true;
    }
    if (kind == "BytesStorageMetadata") {
      Entry entry;
      entry.name = key.text();
      TableOf(dict)->entries.push_back(std::move(entry));
      return true;
    }
    const Box* box = value.box();
    if (box == nullptr || box->kind != Box::Kind::kTuple || box->items.empty()) return false;
    Path path;
    path.name = key.text();
    std::string joined;
    for (const Cell& part : box->items) {
      if (!part.is_text() && !(part.is_int() && part.integer() >= 0)) return false;
      if (&part != box->items.data()) joined += '.';
      joined += part.is_text() ? std::string(part.text()) : std::to_string(part.integer());
      path.parts.push_back({static_cast<std::uint32_t>(joined.size()), part.is_int()});
    }
    if (joined != path.name) return false;
    TableOf(dict)->paths.push_back(std::move(path));
    return true;
  }
  if (MetadataClass(key) != "MetadataIndex" || ClassOf(value) != kStorageInfo) return false;
  SW_TRY_ASSIGN(Stored stored, StoredOf(key, value));
  TableOf(dict)->stored.push_back(std::move(stored));
  return true;
}

Result<std::uint32_t> IndexReader::FileOf(const Cell* name) {
  if (name == nullptr || !name->is_text()) return Expected("relative_path: string", name);
  const auto known = file_numbers_.find(std::string(name->text()));
  if (known != file_numbers_.end()) return known->second;
  SW_TRY(CheckFileName(name->text()));
  const auto number = static_cast<std::uint32_t>(index_.files.size());
  index_.files.emplace_back(name->text());
  file_numbers_.emplace(name->text(), number);
  return number;
}

Result<std::uint32_t> IndexReader::TransformsOf(const Cell* list) {
  if (list == nullptr || list->is_none()) return 0;
  const Box* box = list->box();
  if (box == nullptr || box->kind != Box::Kind::kList) {
    return Expected("transform_descriptors: list", list);
  }
  std::vector<std::string> names;
  for (const Cell& item : box->items) {
    if (!item.is_text()) return Expected("transform_descriptors: string", &item);
    names.emplace_back(item.text());
  }
  const auto at = std::find(index_.transforms.begin(), index_.transforms.end(), names);
  if (at == index_.transforms.end()) index_.transforms.push_back(names);
  return static_cast<std::uint32_t>(
      std::find(index_.transforms.begin(), index_.transforms.end(), names) -
      index_.transforms.begin());
}

Result<Stored> IndexReader::StoredOf(const Cell& key, const Cell& value) {
  Stored stored;
  SW_TRY_ASSIGN(stored.key, KeyOf(key));
  const auto read = [&]() -> Status {
    SW_TRY_ASSIGN(stored.at.file, FileOf(AttributeOf(value, "relative_path")));
    SW_TRY_ASSIGN(stored.at.offset, CountOf(AttributeOf(value, "offset"), "offset"));
    SW_TRY_ASSIGN(stored.at.bytes, CountOf(AttributeOf(value, "length"), "length"));
    SW_TRY_ASSIGN(stored.at.transforms, TransformsOf(AttributeOf(value, "transform_descriptors")));
    return {};
  };
  if (Status done = read(); !done) {
    return Within("item \"" + std::string(stored.key.name) + "\"", done.error());
  }
  return stored;
}

/// Takes the table of a dict that is an attribute of the root.
Result<Table> IndexReader::TakeTable(const Cell& root, std::string_view name, bool needed) {
  const Cell* dict = AttributeOf(root, name);
  if (!needed && (dict == nullptr || dict->is_none())) return Table();
  const Box* box = dict != nullptr ? dict->box() : nullptr;
  if (box == nullptr || box->kind != Box::Kind::kDict) {
    return Expected(std::string(name) + ": dict", dict);
  }
  if (needed && !box->items.empty()) {
    const Cell& value = box->items[1];
    return Fail(Errc::kBadInput, name, ": ",
                (box->items[0].is_text() ? "\"" + std::string(box->items[0].text()) + "\""
                                         : Describe(box->items[0])),
                ": found ", Describe(value));
  }
  const auto found = tables_.find(box->number);
  Table table = found == tables_.end() ? Table() : std::move(found->second);
  if (found != tables_.end()) tables_.erase(found);
  return table;
}

Status IndexReader::AddEntries(Table table) {
  if (!table.stored.empty() || !table.paths.empty()) {
    return Fail(Errc::kBadInput, "state_dict_metadata: a value is neither a tensor nor an object");
  }
  index_.entries = std::move(table.entries);
  by_name_.reserve(index_.entries.size());
  for (std::uint32_t i = 0; i < index_.entries.size(); ++i) {
    const std::string& name = index_.entries[i].name;
    if (!by_name_.emplace(name, i).second) {
      return Fail(Errc::kBadInput, "\"", name, "\" appears twice in state_dict_metadata");
    }
  }
  return {};
}

/// Finds an entry. Starts after the previous one, because all dicts have nearly the same key order.
std::optional<std::uint32_t> IndexReader::EntryOf(std::string_view name) {
  std::uint32_t at = next_;
  if (at >= index_.entries.size() || index_.entries[at].name != name) {
    const auto found = by_name_.find(name);
    if (found == by_name_.end()) return std::nullopt;
    at = found->second;
  }
  next_ = at + 1;
  return at;
}

tl::unexpected<Error> NoPlace(const Entry& entry, const Shape* offset) {
  return Fail(Errc::kBadInput, "\"", entry.name, "\"",
              (offset == nullptr ? "" : ": chunk at " + ToString(*offset)),
              ": storage_data has no location for it");
}

/// Assigns each chunk and object its place, by name and offset.
Status IndexReader::AddPlaces(const Table& table) {
  if (!table.entries.empty() || !table.paths.empty()) {
    return Fail(Errc::kBadInput, "storage_data: a value is not a location");
  }
  // Sorted by entry, then by offset.
  struct Ref {
    std::uint32_t entry;
    std::uint32_t stored;
  };
  std::vector<Ref> refs;
  refs.reserve(table.stored.size());
  for (std::uint32_t i = 0; i < table.stored.size(); ++i) {
    const auto found = EntryOf(table.stored[i].key.name);
    if (!found) {
      return Fail(Errc::kBadInput, "storage_data has \"", table.stored[i].key.name,
                  "\", state_dict_metadata does not");
    }
    refs.push_back({*found, i});
  }
  const auto offset = [&](const Ref& ref) -> const std::optional<Shape>& {
    return table.stored[ref.stored].key.offset;
  };
  std::sort(refs.begin(), refs.end(), [&](const Ref& a, const Ref& b) {
    return a.entry != b.entry ? a.entry < b.entry : offset(a) < offset(b);
  });
  std::size_t at = 0;
  for (std::uint32_t i = 0; i < index_.entries.size(); ++i) {
    Entry& entry = index_.entries[i];
    std::vector<Chunk*> chunks;
    for (Chunk& chunk : entry.chunks) chunks.push_back(&chunk);
    std::sort(chunks.begin(), chunks.end(),
              [](const Chunk* a, const Chunk* b) { return a->offsets < b->offsets; });
    for (std::size_t c = 1; c < chunks.size(); ++c) {
      if (chunks[c]->offsets != chunks[c - 1]->offsets) continue;
      return Fail(Errc::kBadInput, "tensor \"", entry.name, "\": two chunks at ",
                  ToString(chunks[c]->offsets));
    }
    const std::size_t count = entry.is_tensor ? chunks.size() : 1;
    for (std::size_t c = 0; c < count; ++c) {
      const Shape* wanted = entry.is_tensor ? &chunks[c]->offsets : nullptr;
      const bool there = at < refs.size() && refs[at].entry == i;
      if (!there) return NoPlace(entry, wanted);
      const Stored& stored = table.stored[refs[at].stored];
      if (entry.is_tensor) {
        if (!stored.key.offset || *wanted < *stored.key.offset) return NoPlace(entry, wanted);
        if (*stored.key.offset != *wanted) {
          return Fail(Errc::kBadInput, "tensor \"", entry.name, "\": storage_data has a chunk at ",
                      ToString(*stored.key.offset),
                      " that the tensor does not have, or has it twice");
        }
        chunks[c]->at = stored.at;
      } else {
        entry.at = stored.at;
      }
      ++at;
    }
    if (at < refs.size() && refs[at].entry == i) {
      return Fail(Errc::kBadInput, "\"", entry.name,
                  "\": storage_data has more locations than chunks, or the same location twice");
    }
  }
  return {};
}

Status IndexReader::AddPaths(Table table) {
  if (table.paths.empty()) return {};
  std::vector<std::uint32_t> order;
  for (Path& path : table.paths) {
    const auto found = EntryOf(path.name);
    // Ignore items that the writer planned but did not save.
    if (!found) continue;
    Entry& entry = index_.entries[*found];
    if (!entry.path.empty()) {
      return Fail(Errc::kBadInput, "\"", entry.name, "\" appears twice in planner_data");
    }
    entry.path = std::move(path.parts);
    order.push_back(*found);
  }
  for (const Entry& entry : index_.entries) {
    if (order.size() == index_.entries.size()) break;
    if (!entry.path.empty()) continue;
    return Fail(Errc::kBadInput, "planner_data does not have \"", entry.name, "\"");
  }
  SW_TRY(CheckPaths(index_));
  for (Entry& entry : index_.entries) {
    if (entry.path.size() == 1) std::vector<PathPart>().swap(entry.path);
  }
  index_.has_paths = true;
  OrderAsSaved(order);
  return {};
}

/// Sorts the entries into the order of the planner data, which is the order of the state dict.
/// Ranks with replicas divide the items, and the index lists them rank by rank. Rank 0 always saves
/// the first item of a state dict. If the index begins with another item, the ranks had different
/// state dicts (pipeline stages), and planner data lists the last rank first; the order then stays.
void IndexReader::OrderAsSaved(const std::vector<std::uint32_t>& order) {
  if (order.empty()) return;
  if (order.front() != 0) {
    index_.ranks_differ = true;
    for (std::uint32_t i = 0; i < order.size(); ++i) index_.entries[order[i]].planned = i;
    return;
  }
  std::vector<Entry> entries;
  entries.reserve(order.size());
  for (const std::uint32_t at : order) entries.push_back(std::move(index_.entries[at]));
  index_.entries = std::move(entries);
}

Status IndexReader::Root(const Cell& root) {
  const std::string_view name = ClassOf(root);
  if (name == "bytecheckpoint.checkpointer.meta_type.Metadata") {
    return Fail(Errc::kUnsupported,
                "the index of a ByteCheckpoint folder: its data files differ in format "
                "from those of torch.distributed.checkpoint");
  }
  if (MetadataClass(root) != "Metadata") {
    return Expected("torch.distributed.checkpoint.metadata.Metadata", &root);
  }
  SW_TRY_ASSIGN(Table entries, TakeTable(root, "state_dict_metadata", true));
  SW_TRY(AddEntries(std::move(entries)));
  SW_TRY_ASSIGN(const Table places, TakeTable(root, "storage_data", true));
  SW_TRY(AddPlaces(places));
  const Cell* planner = AttributeOf(root, "planner_data");
  const Box* box = planner != nullptr ? planner->box() : nullptr;
  if (box == nullptr || box->kind != Box::Kind::kDict) return {};
  // Other planners store other data here: ignore a value that is not a table of paths.
  if (!box->items.empty()) {
    const auto found = tables_.find(box->number);
    if (found == tables_.end()) return {};
    return Fail(
        Errc::kBadInput, "planner_data: \"",
        (box->items[0].is_text() ? std::string(box->items[0].text()) : Describe(box->items[0])),
        "\" has no path that matches its name");
  }
  SW_TRY_ASSIGN(Table paths, TakeTable(root, "planner_data", false));
  return AddPaths(std::move(paths));
}

}  // namespace

Result<Index> ReadIndex(std::string_view pickle) {
  IndexReader reader;
  if (Status done = pickle::Fold(pickle, reader); !done) {
    return tl::unexpected<Error>(std::move(done).error());
  }
  return reader.index();
}

}  // namespace shardwright::dcp
