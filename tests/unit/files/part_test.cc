// SPDX-License-Identifier: Apache-2.0
// Byte ranges of files that are read as if they were files, plain and compressed.

#include "files/part.h"

#include <zstd.h>

#include <array>

#include "builders.h"
#include "support/os/fault.h"
#include "support/zstd/stream.h"

namespace shardwright::files {
namespace {

std::string Bytes(const Part& part, std::uint64_t offset, std::size_t count) {
  std::string out(count, '?');
  const Status read = part.ReadAt(offset, std::as_writable_bytes(std::span(out)));
  return read ? out : "error: " + read.error().message;
}

std::span<const std::byte> Of(std::string_view text) { return std::as_bytes(std::span(text)); }

bool EndsBefore(const std::string& answer) { return answer.starts_with("error: "); }

class Parts : public FileTest {
 protected:
  os::File Opened(std::string_view content) {
    Write(content);
    auto file = os::File::OpenRead(path());
    EXPECT_TRUE(file);
    return *std::move(file);
  }
};

/// Reads through a ReadAhead and counts the calls that it makes.
class ReadAheads : public Parts {
 protected:
  static constexpr ReadAhead::Windows kWindows = {1000, 200, 100};
};

TEST_F(ReadAheads, ReadSmallContainersAtOnce) {
  std::string text(900, 'x');
  text.replace(10, 3, "abc");
  text.replace(890, 3, "def");
  const os::File file = Opened("before" + text);
  const os::ScopedFault counted;
  ReadAhead ahead(file, 6, text.size(), kWindows);
  const Part part(file, 6, text.size(), ahead);
  EXPECT_EQ(Bytes(part, 10, 3), "abc");
  EXPECT_EQ(Bytes(part, 890, 3), "def");
  EXPECT_EQ(Bytes(part, 0, 900), text);
  EXPECT_EQ(counted.Count(os::Op::kRead), 1U);
  EXPECT_TRUE(EndsBefore(Bytes(part, 899, 2)));
}

TEST_F(ReadAheads, ReadTheEndsOfLargeContainersAndWhatFollowsASmallRead) {
  std::string text;
  for (int i = 0; text.size() < 5000; ++i) text += std::to_string(i) + ",";
  const os::File file = Opened(text);
  const os::ScopedFault counted;
  ReadAhead ahead(file, 0, text.size(), kWindows);
  const Part part(file, 0, text.size(), ahead);
  const auto expect = [&](std::size_t at, std::size_t bytes, std::uint64_t reads) {
    EXPECT_EQ(Bytes(part, at, bytes), text.substr(at, bytes)) << at;
    EXPECT_EQ(counted.Count(os::Op::kRead), reads) << at;
  };
  expect(0, 4, 1);
  expect(150, 50, 1);
  expect(text.size() - 22, 22, 2);
  expect(text.size() - 100, 78, 2);
  expect(2000, 30, 3);
  expect(2100, 16, 3);   // follows the bytes read before
  expect(1000, 900, 4);  // by itself
  expect(190, 20, 5);    // across the border of the head
  expect(3000, 30, 6);
  expect(2010, 20, 6);
  expect(10, 5, 6);
}

TEST_F(Parts, SmallOnesThatFollowOneAnotherAreReadAtOnce) {
  const os::File file = Opened("aabbbccddd");
  const os::ScopedFault counted;
  SmallParts small(file, {{0, 2}, {2, 3}, {5, 2}, {7, 3}});
  const auto text_of = [&](std::size_t index) {
    const auto bytes = small.At(index);
    return bytes ? std::string(reinterpret_cast<const char*>(bytes->data()), bytes->size()) : "";
  };
  EXPECT_EQ(text_of(0), "aa");
  EXPECT_EQ(text_of(1), "bbb");
  EXPECT_EQ(text_of(3), "ddd");
  EXPECT_EQ(counted.Count(os::Op::kRead), 1U);
  EXPECT_FALSE(SmallParts::IsSmall({0, 0}));
  EXPECT_FALSE(SmallParts::IsSmall({0, std::uint64_t{1} << 20}));
}

TEST_F(Parts, AreReadLikeFiles) {
  const os::File file = Opened("0123456789");
  const Part whole(file);
  EXPECT_EQ(*whole.Bytes(), 10U);
  EXPECT_EQ(Bytes(whole, 8, 2), "89");
  EXPECT_TRUE(EndsBefore(Bytes(whole, 8, 3)));
  const Part middle(file, 3, 4);
  EXPECT_EQ(*middle.Bytes(), 4U);
  EXPECT_EQ(middle.first(), 3U);
  EXPECT_EQ(Bytes(middle, 1, 3), "456");
  EXPECT_TRUE(EndsBefore(Bytes(middle, 1, 4))) << "though the file goes on";
  EXPECT_TRUE(EndsBefore(Bytes(middle, 5, 0)));
  EXPECT_TRUE(EndsBefore(Bytes(middle, ~std::uint64_t{0}, 2)));
  const Part beyond(file, 8, 4);
  EXPECT_FALSE(beyond.Bytes());
  EXPECT_FALSE(Part(file, 11, std::uint64_t{0}).Bytes());
}

TEST_F(Parts, ThatWereReadBeforeDoNotNeedTheFile) {
  const os::File file = Opened("");
  const Part loaded(file, 5, Of("abcdef"));
  EXPECT_EQ(Bytes(loaded, 2, 4), "cdef");
  EXPECT_TRUE(EndsBefore(Bytes(loaded, 2, 5)));
  const Part ends(file, 5, 100, Of("head"), Of("tail"));
  EXPECT_EQ(*ends.Bytes(), 100U);
  EXPECT_EQ(Bytes(ends, 0, 4), "head");
  EXPECT_EQ(Bytes(ends, 97, 3), "ail");
  EXPECT_TRUE(EndsBefore(Bytes(ends, 2, 4))) << "between them nothing is known";
  EXPECT_TRUE(EndsBefore(Bytes(ends, 95, 3)));
  EXPECT_TRUE(EndsBefore(Bytes(ends, 98, 4)));
}

TEST_F(Parts, OfAFileThatCannotBeAskedAreErrors) {
  const os::File file = Opened("0123456789");
  const os::ScopedFault fault(*os::ParseFaults("stat:1+:eio,read:1+:eio"));
  EXPECT_FALSE(Part(file).Bytes());
  EXPECT_FALSE(Part(file, 1, 2).Bytes());
  EXPECT_TRUE(EndsBefore(Bytes(Part(file), 0, 1)));
}

class Streams : public Parts {
 protected:
  static std::string Compressed(const std::string& plain) {
    std::string out(ZSTD_compressBound(plain.size()), '\0');
    out.resize(ZSTD_compress(out.data(), out.size(), plain.data(), plain.size(), 1));
    return out;
  }
  static std::string Plain() {
    std::string plain(300'000, '\0');
    for (std::size_t i = 0; i < plain.size(); ++i) plain[i] = static_cast<char>(i * i >> 7);
    return plain;
  }
  /// Reads a whole byte range in pieces of `piece` bytes. Returns "error: ..." if a read fails.
  static std::string All(const os::File& file, std::uint64_t first, std::uint64_t bytes,
                         std::size_t piece) {
    zstd::Stream stream;
    stream.Begin(file, first, bytes);
    std::string all;
    for (;;) {
      std::string part(piece, '?');
      const auto got = stream.Read(std::as_writable_bytes(std::span(part)));
      if (!got) return "error: " + got.error().message;
      all += part.substr(0, *got);
      EXPECT_EQ(stream.given(), all.size());
      if (*got < piece) return all;
    }
  }
};

TEST_F(Streams, GiveWhatWasCompressedInAnyPieces) {
  const std::string frames = Compressed(Plain()) + Compressed("second") + Compressed("");
  const os::File file = Opened("before" + frames + "behind");
  for (const std::size_t piece : {std::size_t{1000}, std::size_t{65536}, std::size_t{1} << 20}) {
    EXPECT_TRUE(All(file, 6, frames.size(), piece) == Plain() + "second") << piece;
  }
  EXPECT_EQ(All(file, 0, 0, 10), "") << "nothing is nothing";
}

TEST_F(Streams, ThatAreCutOrDamagedAreErrors) {
  const std::string frame = Compressed(Plain());
  const os::File file = Opened(frame + frame);
  for (const std::size_t cut :
       {std::size_t{1}, std::size_t{3}, frame.size() / 2, frame.size() - 1, frame.size() + 1}) {
    EXPECT_TRUE(EndsBefore(All(file, 0, cut, 4096))) << cut;
  }
  EXPECT_TRUE(EndsBefore(All(file, 1, frame.size(), 4096))) << "not where a frame begins";
  EXPECT_TRUE(EndsBefore(All(file, frame.size(), 2 * frame.size(), 4096))) << "beyond the file";
  const os::ScopedFault fault(*os::ParseFault("read:1+:eio"));
  EXPECT_TRUE(EndsBefore(All(file, 0, frame.size(), 4096)));
}

}  // namespace
}  // namespace shardwright::files
