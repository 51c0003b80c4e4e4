// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "files/torch_pt/reader.h"
#include "files/torch_pt/writer.h"
#include "files/zip/reader.h"
#include "pickles.h"

namespace shardwright::torch_pt {
namespace {

class TorchPtWrite : public FileTest {
 protected:
  // A list of one tensor per storage of float32.
  Result<Layout> Make(const std::vector<std::uint64_t>& elems) {
    std::vector<const pickle::Node*> items;
    std::vector<StorageSpec> specs;
    for (std::uint64_t n : elems) {
      pickle::Tensor tensor;
      tensor.storage = static_cast<std::uint32_t>(specs.size());
      tensor.shape = {n};
      tensor.strides = {1};
      items.push_back(arena_.TensorOf(tensor));
      specs.push_back({DType::kF32, false, n});
    }
    return Layout::Make(arena_.List(items), specs);
  }
  static std::string Payload(std::size_t i, std::uint64_t bytes) {
    return std::string(bytes, static_cast<char>('a' + i));
  }
  // The whole file in memory.
  static std::string Assemble(const Layout& layout) {
    std::string file(layout.file_bytes(), '?');
    std::vector<std::uint32_t> crcs;
    std::uint64_t written_bytes = 0;
    for (std::size_t i = 0; i < layout.storage_count(); ++i) {
      const std::string payload = Payload(i, layout.payload_bytes(i));
      crcs.push_back(CrcOf(payload));
      file.replace(layout.payload_offset(i), payload.size(), payload);
      written_bytes += payload.size();
    }
    for (const Layout::Piece& piece : layout.Frame(crcs)) {
      EXPECT_LE(piece.offset + piece.bytes.size(), file.size());
      file.replace(piece.offset, piece.bytes.size(), piece.bytes);
      written_bytes += piece.bytes.size();
    }
    EXPECT_EQ(written_bytes, file.size());
    return file;
  }
  pickle::Arena arena_;
};

// The local header, padding and descriptor of a member, from the rules and by hand.
TEST_F(TorchPtWrite, FirstBytes) {
  const Result<Layout> layout = Make({3});
  ASSERT_TRUE(layout.has_value());
  const std::string file = Assemble(*layout);
  // "archive/data.pkl" is 16 bytes: 30 + 16 + 4 = 50, so 14 bytes of padding.
  const std::string head = Le(0x04034B50, 4) + Le(0, 2) + Le(0x0808, 2) + Le(0, 2) + Le(0, 4) +
                           Le(0, 12) + Le(16, 2) + Le(18, 2) + "archive/data.pkl" + "FB" +
                           Le(14, 2) + std::string(14, 'Z');
  EXPECT_EQ(file.substr(0, 64), head);
  const std::size_t end = file.find(Le(0x08074B50, 4));
  const std::string pickle = file.substr(64, end - 64);
  EXPECT_EQ(file.substr(end, 16),
            Le(0x08074B50, 4) + Le(CrcOf(pickle), 4) + Le(pickle.size(), 4) + Le(pickle.size(), 4));
  EXPECT_EQ(pickle.front(), '\x80');
  EXPECT_EQ(pickle.back(), '.');
}

TEST_F(TorchPtWrite, Trailer) {
  const Result<Layout> layout = Make({3});
  const std::string file = Assemble(*layout);
  const std::size_t directory = file.find(Le(0x02014B50, 4));
  const std::size_t end64 = file.size() - 98;
  const std::string trailer = Le(0x06064B50, 4) + Le(44, 8) + Le(0x031E, 2) + Le(45, 2) + Le(0, 8) +
                              Le(6, 8) + Le(6, 8) + Le(end64 - directory, 8) + Le(directory, 8) +
                              Le(0x07064B50, 4) + Le(0, 4) + Le(end64, 8) + Le(1, 4) +
                              Le(0x06054B50, 4) + Le(0, 4) + Le(6, 2) + Le(6, 2) +
                              Le(end64 - directory, 4) + Le(directory, 4) + Le(0, 2);
  EXPECT_EQ(file.substr(end64), trailer);
}

TEST_F(TorchPtWrite, ReadsBackAndIsAligned) {
  const Result<Layout> layout = Make({3, 0, 1000, 1, 0, 16});
  ASSERT_TRUE(layout.has_value());
  const std::string file = Assemble(*layout);
  Write(file);
  const Result<os::File> opened = os::File::OpenRead(path());
  const Result<zip::Container> container = zip::ReadContainer(*opened);
  ASSERT_TRUE(container.has_value()) << container.error().message;
  std::vector<std::string> names;
  for (const zip::Member& member : container->members) {
    names.emplace_back(member.name);
    EXPECT_EQ(member.payload_offset % 64, 0U) << member.name;
    EXPECT_TRUE(zip::ReadMember(*opened, member, 100'000).has_value()) << member.name;
  }
  EXPECT_EQ(names, (std::vector<std::string>{
                       "archive/data.pkl", "archive/.format_version", "archive/.storage_alignment",
                       "archive/byteorder", "archive/data/0", "archive/data/1", "archive/data/2",
                       "archive/data/3", "archive/data/4", "archive/data/5", "archive/version"}));
  EXPECT_EQ(*zip::ReadMember(*opened, *container->Find("archive/.format_version"), 9), "1");
  EXPECT_EQ(*zip::ReadMember(*opened, *container->Find("archive/.storage_alignment"), 9), "64");
  EXPECT_EQ(*zip::ReadMember(*opened, *container->Find("archive/byteorder"), 9), "little");
  EXPECT_EQ(*zip::ReadMember(*opened, *container->Find("archive/version"), 9), "3\n");
  const Result<ContainerMetadata> metadata = ReadMetadata(*opened);
  const Result<Document> document = Parse(*metadata);
  ASSERT_TRUE(document.has_value()) << document.error().message;
  ASSERT_EQ(document->storages.size(), 6U);
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(document->storages[i].offset, layout->payload_offset(i));
    EXPECT_EQ(document->storages[i].bytes, layout->payload_bytes(i));
    EXPECT_EQ(document->storages[i].crc32, CrcOf(Payload(i, layout->payload_bytes(i))));
  }
}

TEST_F(TorchPtWrite, EmptyStoragesHaveNoDescriptor) {
  const Result<Layout> layout = Make({0});
  const std::string file = Assemble(*layout);
  const std::size_t name = file.find("archive/data/0");
  EXPECT_EQ(file.substr(name - 24, 2), Le(0x0800, 2));
  EXPECT_EQ(file.substr(layout->payload_offset(0), 4), Le(0x04034B50, 4));
}

// Storages without a type count bytes, for any declared type.
TEST_F(TorchPtWrite, UntypedStoragesAreAsLongAsTheySay) {
  StorageSpec spec;
  spec.dtype = DType::kF64;
  spec.untyped = true;
  spec.elems = 3;
  const std::vector<StorageSpec> storages = {spec, spec};
  const Result<Layout> layout = Layout::Make(arena_.Dict(), storages);
  ASSERT_TRUE(layout) << layout.error().message;
  EXPECT_EQ(layout->payload_bytes(0), 3U);
  EXPECT_EQ(layout->payload_bytes(1), 3U);
}

TEST_F(TorchPtWrite, NothingToStore) {
  const Result<Layout> layout = Layout::Make(arena_.Dict(), {});
  ASSERT_TRUE(layout.has_value());
  Write(Assemble(*layout));
  const Result<os::File> opened = os::File::OpenRead(path());
  const Result<ContainerMetadata> metadata = ReadMetadata(*opened);
  ASSERT_TRUE(metadata.has_value()) << metadata.error().message;
  EXPECT_TRUE(Parse(*metadata)->root->is_dict());
}

// Storages are stored in the order of their first use for any index, as .format_version 1 promises.
TEST_F(TorchPtWrite, FileOrderIsUseOrder) {
  std::vector<const pickle::Node*> items;
  for (std::uint32_t storage : {2U, 0U}) {
    pickle::Tensor tensor;
    tensor.storage = storage;
    items.push_back(arena_.TensorOf(tensor));
  }
  const std::vector<StorageSpec> specs(3, StorageSpec{DType::kF32, false, 1});
  const Result<Layout> layout = Layout::Make(arena_.List(items), specs);
  EXPECT_LT(layout->payload_offset(2), layout->payload_offset(0));
  EXPECT_LT(layout->payload_offset(0), layout->payload_offset(1));
  Write(Assemble(*layout));
  const Result<os::File> opened = os::File::OpenRead(path());
  const Result<Document> document = Parse(*ReadMetadata(*opened));
  EXPECT_EQ(document->storages[0].offset, layout->payload_offset(2));
  EXPECT_EQ(document->storages[0].crc32, CrcOf(Payload(2, 4)));
}

// Beyond 4 GiB: a sparse file, so that only the frame is really written.
TEST_F(TorchPtWrite, Zip64) {
  const std::uint64_t big = std::uint64_t{1} << 30;  // elements: 4 GiB
  const Result<Layout> layout = Make({5, big, 7, big + 1, 0});
  ASSERT_TRUE(layout.has_value());
  ASSERT_GT(layout->file_bytes(), std::uint64_t{8} << 30);
  const Result<os::File> out = os::File::Create(path());
  const std::vector<std::uint32_t> crcs = {1, 2, 3, 4, 5};
  std::uint64_t end = 0;
  std::vector<Layout::Piece> pieces = layout->Frame(crcs);
  for (const Layout::Piece& piece : pieces) {
    ASSERT_TRUE(out->WriteAt(piece.offset, std::as_bytes(std::span(piece.bytes))).has_value());
    end = piece.offset + piece.bytes.size();
  }
  EXPECT_EQ(end, layout->file_bytes());
  const Result<ContainerMetadata> metadata = ReadMetadata(*out);
  ASSERT_TRUE(metadata.has_value()) << metadata.error().message;
  for (std::size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(metadata->storages[i].offset, layout->payload_offset(i));
    EXPECT_EQ(metadata->storages[i].bytes, layout->payload_bytes(i));
    EXPECT_EQ(metadata->storages[i].offset % 64, 0U);
    EXPECT_EQ(metadata->storages[i].crc32, i == 4 ? 0 : crcs[i]);
  }
  // Local zip64 field of the big one: sizes 4 GiB and 0; then a descriptor with 64-bit sizes.
  const std::string field = Le(1, 2) + Le(16, 2) + Le(4 * big, 8) + Le(0, 8) + "FB";
  EXPECT_NE(pieces[1].bytes.find("archive/data/1" + field), std::string::npos);
  const std::string descriptor = Le(0x08074B50, 4) + Le(2, 4) + Le(4 * big, 8) + Le(4 * big, 8);
  EXPECT_TRUE(pieces[2].bytes.starts_with(descriptor));
  // A small one behind 4 GiB: only its header's offset.
  const std::string small = "archive/data/2" + Le(1, 2) + Le(8, 2);
  EXPECT_NE(pieces[2].bytes.find(small), std::string::npos);
  EXPECT_TRUE(pieces[3].bytes.starts_with(Le(0x08074B50, 4) + Le(3, 4) + Le(28, 8)));
  // Both at once.
  EXPECT_NE(pieces[3].bytes.find("archive/data/3" + Le(1, 2) + Le(24, 2) + Le(4 * big + 4, 8)),
            std::string::npos);
  EXPECT_TRUE(Parse(*metadata).has_value());
}

TEST_F(TorchPtWrite, TooLarge) {
  ExpectFails(Make({~std::uint64_t{0}}), Errc::kBadInput, "overflows");
  // Unused: the pickle cannot object.
  const std::vector<StorageSpec> specs(1, StorageSpec{DType::kU8, false, std::uint64_t{1} << 63});
  ExpectFails(Layout::Make(arena_.None(), specs), Errc::kBadInput, "2^62");
}

TEST_F(TorchPtWrite, FrameOfThousandsOfStorages) {
  const Result<Layout> layout = Make(std::vector<std::uint64_t>(66'000, 1));
  ASSERT_TRUE(layout.has_value());
  Write(Assemble(*layout));
  const Result<os::File> opened = os::File::OpenRead(path());
  const Result<ContainerMetadata> metadata =
      ReadMetadata(*opened);  // more members than 16 bits hold
  ASSERT_TRUE(metadata.has_value()) << metadata.error().message;
  EXPECT_EQ(metadata->storages.size(), 66'000U);
}

}  // namespace
}  // namespace shardwright::torch_pt
