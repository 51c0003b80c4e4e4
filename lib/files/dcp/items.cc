// SPDX-License-Identifier: Apache-2.0
#include "files/dcp/items.h"

#include <algorithm>
#include <cstdio>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "files/pickle/writer.h"
#include "files/torch_pt/reader.h"
#include "support/base/crc32.h"
#include "support/base/limits.h"
#include "support/zstd/stream.h"

namespace shardwright::dcp {
namespace {

using pickle::Node;

constexpr std::size_t kNumberBytes = 4;  // of an item's index in a header
/// Bytes to keep at either end of a compressed tensor, which contain its headers.
constexpr std::uint64_t kEndBytes = std::uint64_t{512} << 10;

/// The bytes of a compressed item, without the middle.
struct Ends {
  std::vector<std::byte> head;
  std::vector<std::byte> tail;
  std::uint64_t bytes = 0;
};

/// Decompresses items, one after another.
class EndsReader {
 public:
  /// \param keep  maximum bytes of each end
  /// \param most  maximum decompressed bytes
  Result<Ends> Read(const os::File& file, const Place& at, std::uint64_t keep, std::uint64_t most);

 private:
  zstd::Stream stream_;
  std::vector<std::byte> block_ = std::vector<std::byte>(kEndBytes);
};

Result<Ends> EndsReader::Read(const os::File& file, const Place& at, std::uint64_t keep,
                              std::uint64_t most) {
  stream_.Begin(file, at.offset, at.bytes);
  Ends ends;
  std::size_t got = block_.size();
  while (got == block_.size()) {
    SW_TRY_ASSIGN(got, stream_.Read(block_));
    ends.bytes += got;
    if (ends.bytes > most) {
      return BadInput(
          StrCat("its ", at.bytes, " compressed bytes decompress to more than ", most, " bytes"));
    }
    const auto to_head =
        static_cast<std::ptrdiff_t>(std::min<std::uint64_t>(got, keep - ends.head.size()));
    const auto end = block_.begin() + static_cast<std::ptrdiff_t>(got);
    ends.head.insert(ends.head.end(), block_.begin(), block_.begin() + to_head);
    ends.tail.insert(ends.tail.end(), block_.begin() + to_head, end);
    if (ends.tail.size() > 2 * kEndBytes) {
      ends.tail.erase(ends.tail.begin(), ends.tail.end() - static_cast<std::ptrdiff_t>(kEndBytes));
    }
  }
  return ends;
}

class ItemReader {
 public:
  ItemReader(const os::File& file, std::span<const Wanted> wanted,
             const std::vector<std::vector<std::string>>& transforms, std::uint64_t inline_bytes)
      : file_(file), wanted_(wanted), transforms_(transforms), inline_bytes_(inline_bytes) {}

  Result<FileItems> Run();

 private:
  /// Parsed pickle, shared by all items with the same pickle.
  struct Known {
    std::uint32_t value = 0;
    pickle::Graph graph;
  };

  Status CheckPlaces(std::uint64_t file_bytes) const;
  Result<bool> IsCompressed(const Wanted& wanted) const;
  Status Take(std::size_t index, files::SmallParts& small);
  Status TakeFrom(const Wanted& wanted, const files::Part& part);
  Status TakeTensor(const Wanted& wanted, const files::ContainerMetadata& metadata,
                    const files::Part& part);
  Result<bool> TakeObject(const files::ContainerMetadata& metadata, const files::Part& part);
  Status TakeRaw(const files::Part& part);
  Result<const Known*> Understand(const files::ContainerMetadata& metadata);
  Status AddItem(const Known& known, const files::ContainerMetadata& metadata,
                 const files::Part& part);
  Status AddStorage(const pickle::StorageUse& use, const files::Storage& storage,
                    const files::Part& part);
  Result<FileItems> Finish();

  const os::File& file_;
  std::span<const Wanted> wanted_;
  const std::vector<std::vector<std::string>>& transforms_;
  std::uint64_t inline_bytes_;
  std::unordered_map<std::string, Known> known_;  // by pickle
  std::vector<const std::string*> pickles_;       // keys of known_, by value
  std::vector<std::uint32_t> numbers_;            // by item
  FileItems items_;
  std::optional<EndsReader> ends_;  // set once an item is compressed
  bool stretched_ = false;          // an item is compressed
  std::uint64_t plain_end_ = 0;     // end of the items so far, uncompressed
};

Status ItemReader::CheckPlaces(std::uint64_t file_bytes) const {
  std::uint64_t end = 0;
  const Wanted* last = nullptr;
  for (const Wanted& one : wanted_) {
    const bool same = last != nullptr && one.at.offset == last->at.offset &&
                      one.at.bytes == last->at.bytes && one.is_tensor == last->is_tensor;
    if (!same && one.at.offset < end) {
      return BadInput("items \"" + last->name + "\" and \"" + one.name + "\" overlap");
    }
    if (one.at.offset > file_bytes || one.at.bytes > file_bytes - one.at.offset) {
      return BadInput("item \"", one.name, "\": ", one.at.bytes, " bytes expected at offset ",
                      one.at.offset, ", the file ends at ", file_bytes,
                      ": it is damaged or belongs to another save");
    }
    end = one.at.offset + one.at.bytes;
    last = &one;
  }
  if (end == file_bytes) return {};
  return BadInput(file_bytes - end,
                  " bytes after the last item of the index: the file belongs to another save");
}

Result<bool> ItemReader::IsCompressed(const Wanted& wanted) const {
  const std::vector<std::string>& names = transforms_[wanted.at.transforms];
  if (names.empty()) return false;
  const std::string_view only = names.front();
  const std::string_view plain = only.substr(0, only.find_first_of("@/"));
  if (names.size() == 1 && plain == "stream.zstd" && only.ends_with("/1")) return true;
  return Fail(Errc::kUnsupported,
              names.size() == 1
                  ? "transform \"" + names.front() + "\" is not known"
                  : std::to_string(names.size()) + " nested transforms, at most 1 is supported");
}

/// Parses the pickle of an item.
Result<const ItemReader::Known*> ItemReader::Understand(const files::ContainerMetadata& metadata) {
  const auto found = known_.find(metadata.header);
  if (found != known_.end()) return &found->second;
  Known known;
  known.value = static_cast<std::uint32_t>(pickles_.size());
  auto graph = pickle::Load(metadata.header);
  if (!graph) return Within("data.pkl", std::move(graph).error());
  known.graph = *std::move(graph);
  const auto at = known_.emplace(metadata.header, std::move(known)).first;
  pickles_.push_back(&at->first);
  return &at->second;
}

Status ItemReader::AddStorage(const pickle::StorageUse& use, const files::Storage& storage,
                              const files::Part& part) {
  const std::uint64_t bytes = use.elems * (use.untyped ? 1 : ItemSize(use.dtype));
  if (storage.bytes != bytes) {
    return BadInput("storage data/", storage.key, ": ", bytes, " bytes expected, found ",
                    storage.bytes);
  }
  if (storage.bytes > 0 && storage.bytes <= inline_bytes_) {
    std::string payload(storage.bytes, '\0');
    const auto out = std::as_writable_bytes(std::span(payload));
    SW_TRY(part.ReadAt(storage.offset - part.first(), out));
    const std::uint32_t crc = Crc32(out);
    if (storage.crc32 && *storage.crc32 != crc) {
      char text[64];
      std::snprintf(text, sizeof text, "CRC-32 %08x expected, %08x found", *storage.crc32, crc);
      return BadInput("data/", storage.key, ": ", text);
    }
    items_.inlined.emplace(static_cast<std::uint32_t>(items_.metadata.storages.size()),
                           std::move(payload));
  }
  items_.metadata.storages.push_back(storage);
  return {};
}

Status ItemReader::AddItem(const Known& known, const files::ContainerMetadata& metadata,
                           const files::Part& part) {
  numbers_.push_back(known.value);
  for (const pickle::StorageUse& use : known.graph.storages) {
    const auto stored =
        std::find_if(metadata.storages.begin(), metadata.storages.end(),
                     [&](const files::Storage& storage) { return storage.key == use.key; });
    if (stored == metadata.storages.end()) return BadInput("storage data/", use.key, " is missing");
    SW_TRY(AddStorage(use, *stored, part));
  }
  return {};
}

Status ItemReader::TakeTensor(const Wanted& wanted, const files::ContainerMetadata& metadata,
                              const files::Part& part) {
  SW_TRY_ASSIGN(const Known* known, Understand(metadata));
  const Node* root = known->graph.root;
  if (!root->is_tensor() || known->graph.storages.size() != 1 ||
      root->tensor->attributes != nullptr) {
    return BadInput("one tensor expected, found ", Describe(root));
  }
  const pickle::Tensor& tensor = *root->tensor;
  if (tensor.shape != wanted.sizes || tensor.dtype != wanted.dtype) {
    return BadInput("tensor ", Name(wanted.dtype), " ", ToString(wanted.sizes), " expected, found ",
                    Name(tensor.dtype), " ", ToString(tensor.shape));
  }
  return AddItem(*known, metadata, part);
}

/// \returns false if it has classes that this program cannot parse
Result<bool> ItemReader::TakeObject(const files::ContainerMetadata& metadata,
                                    const files::Part& part) {
  const Result<const Known*> known = Understand(metadata);
  if (!known) return false;
  SW_TRY(AddItem(**known, metadata, part));
  return true;
}

Status ItemReader::TakeRaw(const files::Part& part) {
  SW_TRY_ASSIGN(const std::uint64_t bytes, part.Bytes());
  numbers_.push_back(ItemValues::kRaw);
  items_.metadata.storages.push_back({"", part.first(), bytes, std::nullopt});
  return {};
}

Status ItemReader::TakeFrom(const Wanted& wanted, const files::Part& part) {
  auto metadata = torch_pt::ReadMetadata(part);
  if (!metadata) return tl::unexpected<Error>(std::move(metadata).error());
  if (wanted.is_tensor) return TakeTensor(wanted, *metadata, part);
  SW_TRY_ASSIGN(const bool understood, TakeObject(*metadata, part));
  return understood ? Status() : TakeRaw(part);
}

Status ItemReader::Take(std::size_t index, files::SmallParts& small) {
  const Wanted& wanted = wanted_[index];
  const std::uint64_t offset = wanted.at.offset;
  SW_TRY_ASSIGN(const bool compressed, IsCompressed(wanted));
  zstd::CompressedItem stretch{offset, wanted.at.bytes, plain_end_, wanted.at.bytes, compressed};
  const std::size_t storages = items_.metadata.storages.size();
  if (compressed) {
    if (!ends_) ends_.emplace();
    // Allow for the headers of the container, and for gaps in a stored tensor.
    const std::uint64_t most =
        wanted.is_tensor ? 2 * Elems(wanted.sizes) * ItemSize(wanted.dtype) + 2 * kEndBytes
                         : limits::kPickleBytes;
    SW_TRY_ASSIGN(const Ends ends,
                  ends_->Read(file_, wanted.at, wanted.is_tensor ? kEndBytes : most, most));
    if (ends.bytes == 0) return BadInput("its compressed bytes decompress to 0 bytes");
    stretch.bytes = ends.bytes;
    SW_TRY(TakeFrom(wanted, {file_, plain_end_, ends.bytes, ends.head, ends.tail}));
  } else if (files::SmallParts::IsSmall({offset, wanted.at.bytes})) {
    SW_TRY_ASSIGN(const auto bytes, small.At(index));
    SW_TRY(TakeFrom(wanted, {file_, offset, bytes}));
  } else {
    files::ReadAhead ahead(file_, offset, wanted.at.bytes, files::ReadAhead::kItem);
    SW_TRY(TakeFrom(wanted, {file_, offset, wanted.at.bytes, ahead}));
  }
  if (!stretched_) return {};
  for (std::size_t i = compressed ? items_.metadata.storages.size() : storages;
       i < items_.metadata.storages.size(); ++i) {
    items_.metadata.storages[i].offset += stretch.first - offset;
  }
  plain_end_ += stretch.bytes;
  items_.stretches.push_back(stretch);
  return {};
}

Result<FileItems> ItemReader::Finish() {
  pickle::Arena arena;
  std::vector<const Node*> pickles;
  pickles.reserve(pickles_.size());
  for (const std::string* one : pickles_) {
    Node* bytes = arena.New(pickle::Kind::kBytes);
    bytes->text = *one;
    pickles.push_back(bytes);
  }
  Node* numbers = arena.New(pickle::Kind::kBytes);
  numbers->text.reserve(numbers_.size() * kNumberBytes);
  for (const std::uint32_t number : numbers_) {
    for (unsigned i = 0; i < kNumberBytes; ++i) {
      numbers->text.push_back(static_cast<char>(number >> (8 * i)));
    }
  }
  SW_TRY_ASSIGN(pickle::Dumped dumped,
                pickle::Dump(arena.Tuple({arena.List(std::move(pickles)), numbers}), {}));
  items_.metadata.header = std::move(dumped.bytes);
  for (std::size_t k = 0; k < items_.metadata.storages.size(); ++k) {
    items_.metadata.storages[k].key = std::to_string(k);
  }
  return std::move(items_);
}

Result<FileItems> ItemReader::Run() {
  SW_TRY_ASSIGN(const os::Identity identity, file_.Stat());
  if (Status fine = CheckPlaces(identity.bytes); !fine) {
    return Within(file_.path(), std::move(fine).error());
  }
  stretched_ = std::any_of(wanted_.begin(), wanted_.end(), [&](const Wanted& one) {
    return !transforms_[one.at.transforms].empty();
  });
  std::vector<files::SmallParts::Range> places;
  places.reserve(wanted_.size());
  for (const Wanted& one : wanted_) places.push_back({one.at.offset, one.at.bytes});
  files::SmallParts small(file_, std::move(places));
  for (std::size_t i = 0; i < wanted_.size(); ++i) {
    const Wanted& wanted = wanted_[i];
    if (i > 0 && wanted.at.offset == wanted_[i - 1].at.offset && wanted.at.bytes > 0) {
      if (wanted.is_tensor &&
          (wanted.sizes != wanted_[i - 1].sizes || wanted.dtype != wanted_[i - 1].dtype)) {
        return Within(
            file_.path(),
            Error{Errc::kBadInput, "items \"" + wanted_[i - 1].name + "\" and \"" + wanted.name +
                                       "\" differ but have the same location"});
      }
      numbers_.push_back(ItemValues::kAsBefore);
      continue;
    }
    if (Status taken = Take(i, small); !taken) {
      Error error = std::move(taken).error();
      const std::string where = file_.path() + ": ";
      if (error.message.starts_with(where)) error.message.erase(0, where.size());
      error.message = "item \"" + wanted.name + "\": " + error.message;
      return Within(file_.path(), std::move(error));
    }
  }
  SW_TRY_ASSIGN(FileItems items, Finish());
  items.metadata.last = stretched_ ? plain_end_ : identity.bytes;
  return items;
}

}  // namespace

Result<FileItems> ReadItems(const os::File& file, std::span<const Wanted> wanted,
                            const std::vector<std::vector<std::string>>& transforms,
                            std::uint64_t inline_bytes) {
  return ItemReader(file, wanted, transforms, inline_bytes).Run();
}

Result<ItemValues> ParseItems(const files::ContainerMetadata& metadata) {
  SW_TRY_ASSIGN(const pickle::Graph header, pickle::Load(metadata.header));
  const Node* root = header.root;
  const bool ours = root->kind == pickle::Kind::kTuple && root->items.size() == 2 &&
                    root->items[0]->is_list() && root->items[1]->kind == pickle::Kind::kBytes &&
                    root->items[1]->text.size() % kNumberBytes == 0;
  if (!ours) return BadInput("pickles and numbers of items expected, found ", Describe(root));
  ItemValues items;
  items.values.reserve(root->items[0]->items.size());
  for (const Node* one : root->items[0]->items) {
    if (one->kind != pickle::Kind::kBytes)
      return BadInput("a pickle expected, found ", Describe(one));
    SW_TRY_ASSIGN(pickle::Graph graph, pickle::Load(one->text));
    items.values.push_back(std::move(graph));
  }
  const std::string_view numbers = root->items[1]->text;
  items.items.reserve(numbers.size() / kNumberBytes);
  std::size_t storage = 0;
  const auto next = [&](std::uint64_t bytes) -> Status {
    if (storage < metadata.storages.size() && metadata.storages[storage++].bytes == bytes) {
      return {};
    }
    return BadInput("item ", items.items.size(), ": storage ", storage, " of ", bytes,
                    " bytes is missing");
  };
  for (std::size_t at = 0; at < numbers.size(); at += kNumberBytes) {
    ItemValues::Item item{0, static_cast<std::uint32_t>(storage)};
    for (std::size_t i = kNumberBytes; i > 0; --i) {
      item.value = (item.value << 8) | static_cast<std::uint8_t>(numbers[at + i - 1]);
    }
    if (item.value == ItemValues::kAsBefore && !items.items.empty()) {
      item = items.items.back();
    } else if (item.value == ItemValues::kRaw) {
      if (storage++ >= metadata.storages.size()) return BadInput("an item without its bytes");
    } else if (item.value < items.values.size()) {
      for (const pickle::StorageUse& use : items.values[item.value].storages) {
        SW_TRY(next(use.elems * (use.untyped ? 1 : ItemSize(use.dtype))));
      }
    } else {
      return BadInput("item ", items.items.size(), ": value ", item.value, " of ",
                      items.values.size());
    }
    items.items.push_back(item);
  }
  return items;
}

}  // namespace shardwright::dcp
