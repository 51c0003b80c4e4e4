// SPDX-License-Identifier: Apache-2.0
// Items of a data file: their types, and the errors for a damaged file.

#include "files/dcp/items.h"

#include <zstd.h>

#include "builders.h"
#include "files/pickle/writer.h"
#include "files/torch_pt/writer.h"
#include "support/os/fault.h"

namespace shardwright::dcp {
namespace {

class Items : public FileTest {
 protected:
  /// Returns a `.pt` file of a tensor of that many floats, optionally followed by a name.
  std::string Saved(std::uint64_t elems, const char* name = nullptr) {
    pickle::Tensor tensor;
    tensor.shape = {elems};
    tensor.strides = {1};
    const pickle::Node* root = arena_.TensorOf(tensor);
    if (name != nullptr) root = arena_.List({arena_.String(name), root});
    const std::vector<torch_pt::StorageSpec> storages = {{DType::kF32, false, elems}};
    return Assembled(*torch_pt::Layout::Make(root, storages));
  }

  /// A `.pt` of values only.
  static std::string SavedValue(const pickle::Node* root) {
    return Assembled(*torch_pt::Layout::Make(root, {}));
  }

  /// Adds an item behind the others.
  void Add(const std::string& item, const Shape* sizes) {
    Wanted wanted;
    wanted.at.offset = bytes_.size();
    wanted.at.bytes = item.size();
    wanted.is_tensor = sizes != nullptr;
    if (sizes != nullptr) wanted.sizes = *sizes;
    wanted.name = "item" + std::to_string(wanted_.size());
    wanted_.push_back(wanted);
    bytes_ += item;
  }

  void AddCompressed(const std::string& item, const Shape* sizes) {
    std::string packed(ZSTD_compressBound(item.size()), '\0');
    packed.resize(ZSTD_compress(packed.data(), packed.size(), item.data(), item.size(), 1));
    Add(packed, sizes);
    wanted_.back().at.transforms = 1;
  }

  Result<FileItems> Read(std::uint64_t inline_bytes = 64) const {
    Write(bytes_);
    const auto file = os::File::OpenRead(path());
    EXPECT_TRUE(file);
    return ReadItems(*file, wanted_, transforms_, inline_bytes);
  }

  std::string Error() const {
    const auto items = Read();
    if (!items) return items.error().message;
    const auto values = ParseItems(items->metadata);
    return values ? "read" : values.error().message;
  }

  void ExpectRefused(std::string_view words, Errc code = Errc::kBadInput) const {
    ExpectFails(Read(), code, words);
  }

  /// A tensor, an object with a tensor in it, another tensor, an object without.
  void AddFour() {
    const Shape three = {3};
    Add(Saved(3), &three);
    Add(Saved(20, "step"), nullptr);
    Add(Saved(3), &three);
    Add(SavedValue(arena_.List({arena_.String("n")})), nullptr);
  }

  std::vector<std::vector<std::string>> transforms_ = {
      {}, {"stream.zstd/1"}, {"other/1"}, {"stream.zstd/1", "other/1"}};
  pickle::Arena arena_;
  std::string bytes_;
  std::vector<Wanted> wanted_;

 private:
  static std::string Assembled(const torch_pt::Layout& layout) {
    std::string file(layout.file_bytes(), '?');
    std::vector<std::uint32_t> crcs;
    for (std::size_t i = 0; i < layout.storage_count(); ++i) {
      const std::string payload(layout.payload_bytes(i), 'p');
      crcs.push_back(CrcOf(payload));
      file.replace(layout.payload_offset(i), payload.size(), payload);
    }
    for (const torch_pt::Layout::Piece& piece : layout.Frame(crcs)) {
      file.replace(piece.offset, piece.bytes.size(), piece.bytes);
    }
    return file;
  }
};

TEST_F(Items, AreReadOnceForEachThatIsDifferent) {
  AddFour();
  const auto items = Read();
  ASSERT_TRUE(items) << items.error().message;
  const auto values = ParseItems(items->metadata);
  ASSERT_TRUE(values) << values.error().message;
  ASSERT_EQ(values->items.size(), 4U);
  EXPECT_EQ(values->values.size(), 3U) << "two are alike";
  EXPECT_EQ(values->items[0].value, values->items[2].value);
  EXPECT_TRUE(values->NodeOf(values->items[0])->is_tensor());
  EXPECT_TRUE(values->NodeOf(values->items[1])->is_list());
  EXPECT_EQ(items->metadata.storages.size(), 3U);
  EXPECT_EQ(items->inlined.size(), 2U) << "those of 12 bytes";
  EXPECT_EQ(items->inlined.at(0), std::string(12, 'p'));
}

TEST_F(Items, ThatAreCompressedLieInStretches) {
  const Shape many = {100'000};
  const Shape three = {3};
  Add(Saved(3), &three);
  AddCompressed(Saved(100'000), &many);
  AddCompressed(Saved(5, "n"), nullptr);
  const auto items = Read();
  ASSERT_TRUE(items) << items.error().message;
  ASSERT_EQ(items->stretches.size(), 3U);
  EXPECT_EQ(items->metadata.storages.size(), 3U);
  EXPECT_EQ(items->metadata.storages[1].bytes, 400'000U);
  EXPECT_TRUE(ParseItems(items->metadata));
  for (const std::uint32_t transforms : {2U, 3U}) {
    wanted_[1].at.transforms = transforms;
    ExpectRefused(transforms == 2 ? "transform \"other/1\" is not known"
                                  : "2 nested transforms, at most 1 is supported",
                  Errc::kUnsupported);
  }
}

TEST_F(Items, AtOnePlaceAreOne) {
  const Shape three = {3};
  Add(Saved(3), &three);
  wanted_.push_back(wanted_[0]);
  wanted_[1].name = "again";
  const auto items = Read();
  ASSERT_TRUE(items) << items.error().message;
  EXPECT_EQ(ParseItems(items->metadata)->items.size(), 2U);
  EXPECT_EQ(items->metadata.storages.size(), 1U);
  wanted_[1].sizes = {4};
  ExpectRefused("items \"item0\" and \"again\" differ but have the same location");
}

TEST_F(Items, MustBeWhatTheIndexSays) {
  AddFour();
  wanted_[0].sizes = {4};
  ExpectRefused("item \"item0\": tensor float32 [4] expected, found float32 [3]");
  wanted_[0].sizes = {3};
  wanted_[0].dtype = DType::kBF16;
  ExpectRefused("tensor bfloat16 [3] expected");
  wanted_[0].dtype = DType::kF32;
  wanted_[1].is_tensor = true;
  ExpectRefused("item \"item1\": one tensor expected, found list");
}

TEST_F(Items, MustFillTheirFile) {
  AddFour();
  wanted_[1].at.offset -= 1;
  ExpectRefused("items \"item0\" and \"item1\" overlap");
  wanted_[1].at.offset += 1;
  bytes_ += "more";
  ExpectRefused("4 bytes after the last item");
  bytes_.resize(bytes_.size() - 5);
  ExpectRefused("item \"item3\": ");
  bytes_.clear();
  ExpectRefused("it is damaged or belongs to another save");
}

TEST_F(Items, WithoutTheirBytesAreRefused) {
  AddFour();
  Write(bytes_);
  const auto file = os::File::OpenRead(path());
  ASSERT_TRUE(file);
  bool fired = true;
  for (int call = 1; fired; ++call) {
    for (const std::string what : {"read", "stat"}) {
      const os::ScopedFault fault(*os::ParseFault(what + ":" + std::to_string(call) + ":eio"));
      const auto items = ReadItems(*file, wanted_, transforms_, 64);
      if (what == "read") fired = fault.fired();
      EXPECT_EQ(static_cast<bool>(items), !fault.fired()) << what << call;
      if (!items) {
        EXPECT_EQ(items.error().sys, EIO) << items.error().message;
      }
    }
    ASSERT_LT(call, 100);
  }
}

TEST_F(Items, WithAPayloadOfAnotherChecksumAreRefused) {
  const Shape three = {3};
  Add(Saved(3), &three);
  const std::size_t at = bytes_.find("pppp");
  bytes_[at] = 'q';
  ExpectRefused("data/0: CRC-32");
}

// One byte after the other, also where the values are compressed.
TEST_F(Items, EveryChangedByteIsRefusedOrHarmless) {
  const Shape three = {3};
  Add(Saved(3), &three);
  Add(SavedValue(arena_.List({arena_.Int(7), arena_.String("x")})), nullptr);
  const std::size_t plain = bytes_.size();
  AddCompressed(Saved(5, "n"), nullptr);
  const std::string whole = bytes_;
  ASSERT_EQ(Error(), "read");
  for (std::size_t at = 0; at < whole.size(); at += at < plain ? 3 : 1) {
    for (const char change : {'\x01', '\x80', '\xFF'}) {
      bytes_ = whole;
      bytes_[at] = static_cast<char>(bytes_[at] ^ change);
      const auto items = Read();
      if (!items) {
        EXPECT_EQ(items.error().message.rfind(path() + ": ", 0), 0U) << items.error().message;
        EXPECT_NE(items.error().code, Errc::kInternal) << at;
        continue;
      }
      const auto values = ParseItems(items->metadata);
      ASSERT_TRUE(values) << at << values.error().message;
      EXPECT_EQ(values->items.size(), 3U) << at;
    }
  }
}

TEST_F(Items, OfASkeletonThatIsNoneAreRefused) {
  AddFour();
  auto items = Read();
  ASSERT_TRUE(items) << items.error().message;
  const files::ContainerMetadata good = items->metadata;
  const auto refused = [](const files::ContainerMetadata& metadata, std::string_view words) {
    ExpectFails(ParseItems(metadata), Errc::kBadInput, words);
  };
  files::ContainerMetadata bad = good;
  bad.storages.pop_back();
  refused(bad, "is missing");
  bad = good;
  bad.storages[1].bytes += 4;
  refused(bad, "is missing");
  const auto with = [&](const pickle::Node* root) {
    files::ContainerMetadata one = good;
    one.header = pickle::Dump(root, {})->bytes;
    return one;
  };
  pickle::Node* bytes = arena_.New(pickle::Kind::kBytes);
  bytes->text = "\1\2\3";
  refused(with(arena_.None()), "pickles and numbers of items expected, found None");
  refused(with(arena_.Tuple({arena_.List({}), bytes})), "pickles and numbers");
  bytes->text = std::string(4, '\0');
  refused(with(arena_.Tuple({arena_.List({}), bytes})), "value 0 of 0");
  refused(with(arena_.Tuple({arena_.List({arena_.Int(1)}), bytes})), "a pickle expected");
  bytes->text = std::string(16, '\xFF');
  refused(with(arena_.Tuple({arena_.List({}), bytes})), "an item without its bytes");
}

}  // namespace
}  // namespace shardwright::dcp
