#include "format/dcp/items.h"

#include <algorithm>
#include <cstdio>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/crc32.h"
#include "format/pickle/writer.h"
#include "format/torch_pt/reader.h"

namespace shardwright::dcp {
namespace {

using pickle::Node;

/// Items up to this size are read whole, many of them at a time.
constexpr std::uint64_t kSmallItem = std::uint64_t{64} << 10;
constexpr std::uint64_t kWindow = std::uint64_t{1} << 20;
constexpr std::size_t kNumberBytes = 4;  // of an item's value, in a header

tl::unexpected<Error> Bad(std::string message) { return Fail(Errc::kBadInput, std::move(message)); }

bool IsSmall(const Wanted& wanted) { return wanted.at.bytes > 0 && wanted.at.bytes <= kSmallItem; }

/// Bytes of small items, as many read at once as follow one another.
class Window {
 public:
  /// \param wanted  ascending, inside the file
  Window(const os::File& file, std::span<const Wanted> wanted) : file_(file), wanted_(wanted) {}

  /// Those of item `index`. \pre IsSmall
  Result<std::span<const std::byte>> At(std::size_t index) {
    const std::uint64_t offset = wanted_[index].at.offset;
    const std::uint64_t bytes = wanted_[index].at.bytes;
    if (offset < first_ || offset + bytes > first_ + loaded_.size()) {
      std::uint64_t end = offset + bytes;
      for (std::size_t next = index + 1; next < wanted_.size() && IsSmall(wanted_[next]); ++next) {
        const std::uint64_t reaches = wanted_[next].at.offset + wanted_[next].at.bytes;
        if (reaches - offset > kWindow) break;
        end = reaches;
      }
      loaded_.resize(end - offset);
      first_ = offset;
      SW_TRY(file_.ReadAt(offset, loaded_));
    }
    return std::span<const std::byte>(loaded_).subspan(offset - first_, bytes);
  }

 private:
  const os::File& file_;
  std::span<const Wanted> wanted_;
  std::uint64_t first_ = 0;
  std::vector<std::byte> loaded_;
};

class ItemReader {
 public:
  ItemReader(const os::File& file, std::span<const Wanted> wanted,
             const std::vector<std::vector<std::string>>& transforms, std::uint64_t inline_bytes)
      : file_(file), wanted_(wanted), transforms_(transforms), inline_bytes_(inline_bytes) {}

  Result<FileItems> Go();

 private:
  /// What the items of one pickle have in common.
  struct Known {
    std::uint32_t value = 0;
    pickle::Graph graph;
  };

  Status CheckPlaces(std::uint64_t file_bytes) const;
  Status CheckTransforms(const Wanted& wanted) const;
  Status Take(std::size_t index, Window& window);
  Status TakeTensor(const Wanted& wanted, const format::Skeleton& skeleton,
                    const format::Part& part);
  Result<bool> TakeObject(const format::Skeleton& skeleton, const format::Part& part);
  void TakeRaw(const Wanted& wanted);
  Result<const Known*> Understand(const format::Skeleton& skeleton);
  Status AddItem(const Known& known, const format::Skeleton& skeleton, const format::Part& part);
  Status AddStorage(const pickle::StorageUse& use, const format::Storage& storage,
                    const format::Part& part);
  Result<FileItems> Finish();

  const os::File& file_;
  std::span<const Wanted> wanted_;
  const std::vector<std::vector<std::string>>& transforms_;
  std::uint64_t inline_bytes_;
  std::unordered_map<std::string, Known> known_;  // by pickle
  std::vector<const std::string*> pickles_;       // keys of known_, by value
  std::vector<std::uint32_t> numbers_;            // by item
  FileItems items_;
};

Status ItemReader::CheckPlaces(std::uint64_t file_bytes) const {
  std::uint64_t end = 0;
  const Wanted* last = nullptr;
  for (const Wanted& one : wanted_) {
    const bool same = last != nullptr && one.at.offset == last->at.offset &&
                      one.at.bytes == last->at.bytes && one.is_tensor == last->is_tensor;
    if (!same && one.at.offset < end) {
      return Bad("items \"" + last->name + "\" and \"" + one.name + "\" overlap");
    }
    if (one.at.offset > file_bytes || one.at.bytes > file_bytes - one.at.offset) {
      return Bad("item \"" + one.name + "\": " + std::to_string(one.at.bytes) +
                 " bytes expected at offset " + std::to_string(one.at.offset) +
                 ", the file ends at " + std::to_string(file_bytes) +
                 ": it is damaged or of another save");
    }
    end = one.at.offset + one.at.bytes;
    last = &one;
  }
  if (end == file_bytes) return {};
  return Bad(std::to_string(file_bytes - end) +
             " bytes after the last item that the index names: the file is of another save");
}

Status ItemReader::CheckTransforms(const Wanted& wanted) const {
  const std::vector<std::string>& names = transforms_[wanted.at.transforms];
  if (names.empty()) return {};
  const bool known = std::all_of(names.begin(), names.end(), [](const std::string& name) {
    const std::string_view plain = std::string_view(name).substr(0, name.find_first_of("@/"));
    return plain == "stream.zstd" && name.ends_with("/1");
  });
  return Fail(Errc::kUnsupported,
              known ? "it is compressed (" + names.front() +
                          "): load the checkpoint with PyTorch and save it without"
                    : "transform \"" + names.front() + "\" is not known");
}

/// What the pickle of an item says.
Result<const ItemReader::Known*> ItemReader::Understand(const format::Skeleton& skeleton) {
  const auto found = known_.find(skeleton.header);
  if (found != known_.end()) return &found->second;
  Known known;
  known.value = static_cast<std::uint32_t>(pickles_.size());
  auto graph = pickle::Load(skeleton.header);
  if (!graph) return Within("data.pkl", std::move(graph).error());
  known.graph = *std::move(graph);
  const auto at = known_.emplace(skeleton.header, std::move(known)).first;
  pickles_.push_back(&at->first);
  return &at->second;
}

Status ItemReader::AddStorage(const pickle::StorageUse& use, const format::Storage& storage,
                              const format::Part& part) {
  const std::uint64_t bytes = use.elems * (use.untyped ? 1 : ItemSize(use.dtype));
  if (storage.bytes != bytes) {
    return Bad("storage data/" + storage.key + ": " + std::to_string(bytes) +
               " bytes expected, found " + std::to_string(storage.bytes));
  }
  if (storage.bytes > 0 && storage.bytes <= inline_bytes_) {
    std::string payload(storage.bytes, '\0');
    const auto out = std::as_writable_bytes(std::span(payload));
    SW_TRY(part.ReadAt(storage.offset - part.first(), out));
    const std::uint32_t crc = Crc32(out);
    if (storage.crc32 && *storage.crc32 != crc) {
      char text[64];
      std::snprintf(text, sizeof text, "CRC-32 %08x expected, %08x found", *storage.crc32, crc);
      return Bad("data/" + storage.key + ": " + text);
    }
    items_.inlined.emplace(static_cast<std::uint32_t>(items_.skeleton.storages.size()),
                           std::move(payload));
  }
  items_.skeleton.storages.push_back(storage);
  return {};
}

Status ItemReader::AddItem(const Known& known, const format::Skeleton& skeleton,
                           const format::Part& part) {
  numbers_.push_back(known.value);
  for (const pickle::StorageUse& use : known.graph.storages) {
    const auto stored =
        std::find_if(skeleton.storages.begin(), skeleton.storages.end(),
                     [&](const format::Storage& storage) { return storage.key == use.key; });
    if (stored == skeleton.storages.end()) return Bad("storage data/" + use.key + " is missing");
    SW_TRY(AddStorage(use, *stored, part));
  }
  return {};
}

Status ItemReader::TakeTensor(const Wanted& wanted, const format::Skeleton& skeleton,
                              const format::Part& part) {
  SW_TRY_ASSIGN(const Known* known, Understand(skeleton));
  const Node* root = known->graph.root;
  if (!root->is_tensor() || known->graph.storages.size() != 1 ||
      root->tensor->attributes != nullptr) {
    return Bad("one tensor expected, found " + Describe(root));
  }
  const pickle::Tensor& tensor = *root->tensor;
  if (tensor.shape != wanted.sizes || tensor.dtype != wanted.dtype) {
    return Bad("tensor " + std::string(Name(wanted.dtype)) + " " + ToString(wanted.sizes) +
               " expected, found " + std::string(Name(tensor.dtype)) + " " +
               ToString(tensor.shape));
  }
  return AddItem(*known, skeleton, part);
}

/// \returns false if it is of classes that nobody may look into
Result<bool> ItemReader::TakeObject(const format::Skeleton& skeleton, const format::Part& part) {
  const Result<const Known*> known = Understand(skeleton);
  if (!known) return false;
  SW_TRY(AddItem(**known, skeleton, part));
  return true;
}

void ItemReader::TakeRaw(const Wanted& wanted) {
  numbers_.push_back(ItemValues::kRaw);
  items_.skeleton.storages.push_back({"", wanted.at.offset, wanted.at.bytes, std::nullopt});
}

Status ItemReader::Take(std::size_t index, Window& window) {
  const Wanted& wanted = wanted_[index];
  SW_TRY(CheckTransforms(wanted));
  std::optional<format::Part> part;
  if (IsSmall(wanted)) {
    SW_TRY_ASSIGN(const auto bytes, window.At(index));
    part.emplace(file_, wanted.at.offset, bytes);
  } else {
    part.emplace(file_, wanted.at.offset, wanted.at.bytes);
  }
  auto skeleton = torch_pt::ReadSkeleton(*part);
  if (!skeleton) return tl::unexpected<Error>(std::move(skeleton).error());
  if (wanted.is_tensor) return TakeTensor(wanted, *skeleton, *part);
  SW_TRY_ASSIGN(const bool understood, TakeObject(*skeleton, *part));
  if (!understood) TakeRaw(wanted);
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
  items_.skeleton.header = std::move(dumped.bytes);
  for (std::size_t k = 0; k < items_.skeleton.storages.size(); ++k) {
    items_.skeleton.storages[k].key = std::to_string(k);
  }
  return std::move(items_);
}

Result<FileItems> ItemReader::Go() {
  SW_TRY_ASSIGN(const os::Identity identity, file_.Stat());
  if (Status fine = CheckPlaces(identity.bytes); !fine) {
    return Within(file_.path(), std::move(fine).error());
  }
  Window window(file_, wanted_);
  for (std::size_t i = 0; i < wanted_.size(); ++i) {
    const Wanted& wanted = wanted_[i];
    if (i > 0 && wanted.at.offset == wanted_[i - 1].at.offset && wanted.at.bytes > 0) {
      if (wanted.is_tensor &&
          (wanted.sizes != wanted_[i - 1].sizes || wanted.dtype != wanted_[i - 1].dtype)) {
        return Within(file_.path(),
                      Error{Errc::kBadInput, "items \"" + wanted_[i - 1].name + "\" and \"" +
                                                 wanted.name + "\" are two at one place"});
      }
      numbers_.push_back(ItemValues::kAsBefore);
      continue;
    }
    if (Status taken = Take(i, window); !taken) {
      Error error = std::move(taken).error();
      const std::string where = file_.path() + ": ";
      if (error.message.starts_with(where)) error.message.erase(0, where.size());
      return Within(file_.path(),
                    Error{error.code, "item \"" + wanted.name + "\": " + error.message});
    }
  }
  SW_TRY_ASSIGN(FileItems items, Finish());
  items.skeleton.last = identity.bytes;
  return items;
}

}  // namespace

Result<FileItems> ReadItems(const os::File& file, std::span<const Wanted> wanted,
                            const std::vector<std::vector<std::string>>& transforms,
                            std::uint64_t inline_bytes) {
  return ItemReader(file, wanted, transforms, inline_bytes).Go();
}

Result<ItemValues> ParseItems(const format::Skeleton& skeleton) {
  SW_TRY_ASSIGN(const pickle::Graph header, pickle::Load(skeleton.header));
  const Node* root = header.root;
  const bool ours = root->kind == pickle::Kind::kTuple && root->items.size() == 2 &&
                    root->items[0]->is_list() && root->items[1]->kind == pickle::Kind::kBytes &&
                    root->items[1]->text.size() % kNumberBytes == 0;
  if (!ours) return Bad("pickles and numbers of items expected, found " + Describe(root));
  ItemValues items;
  items.values.reserve(root->items[0]->items.size());
  for (const Node* one : root->items[0]->items) {
    if (one->kind != pickle::Kind::kBytes) return Bad("a pickle expected, found " + Describe(one));
    SW_TRY_ASSIGN(pickle::Graph graph, pickle::Load(one->text));
    items.values.push_back(std::move(graph));
  }
  const std::string_view numbers = root->items[1]->text;
  items.items.reserve(numbers.size() / kNumberBytes);
  std::size_t storage = 0;
  const auto next = [&](std::uint64_t bytes) -> Status {
    if (storage < skeleton.storages.size() && skeleton.storages[storage++].bytes == bytes) {
      return {};
    }
    return Bad("item " + std::to_string(items.items.size()) + ": storage " +
               std::to_string(storage) + " of " + std::to_string(bytes) + " bytes is missing");
  };
  for (std::size_t at = 0; at < numbers.size(); at += kNumberBytes) {
    ItemValues::Item item{0, static_cast<std::uint32_t>(storage)};
    for (std::size_t i = kNumberBytes; i > 0; --i) {
      item.value = (item.value << 8) | static_cast<std::uint8_t>(numbers[at + i - 1]);
    }
    if (item.value == ItemValues::kAsBefore && !items.items.empty()) {
      item = items.items.back();
    } else if (item.value == ItemValues::kRaw) {
      if (storage++ >= skeleton.storages.size()) return Bad("an item without its bytes");
    } else if (item.value < items.values.size()) {
      for (const pickle::StorageUse& use : items.values[item.value].storages) {
        SW_TRY(next(use.elems * (use.untyped ? 1 : ItemSize(use.dtype))));
      }
    } else {
      return Bad("item " + std::to_string(items.items.size()) + ": value " +
                 std::to_string(item.value) + " of " + std::to_string(items.values.size()));
    }
    items.items.push_back(item);
  }
  return items;
}

}  // namespace shardwright::dcp
