// SPDX-License-Identifier: Apache-2.0
#include "convert/catalogue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <string>
#include <vector>

#include "convert/check.h"
#include "opened.h"
#include "support/os/fault.h"

namespace shardwright::convert {
namespace {

/// Requests a stop after so many polls.
class StopAfter final : public NullSink {
 public:
  explicit StopAfter(int looks) : looks_(looks) {}
  bool stop_requested() const override { return looks_-- <= 0; }

 private:
  mutable std::atomic<int> looks_;
};

class Catalogues : public os::Scratch {
 protected:
  void SetUp() override {
    os::Scratch::SetUp();
    fs::copy(Own("zero2_w3_frozen_tied"), At("source"), fs::copy_options::recursive);
  }

  Status Extract(const std::string& name, Pack pack, Sink&& sink = NullSink()) {
    const auto comm = comm::MakeSerialComm();
    const auto input = Opened(At("source"));
    if (!input) return Fail(Errc::kInternal, "not opened");
    ConvertOptions options;
    options.output = At(name);
    options.threads = 2;
    SW_TRY(ExtractCatalogue(*comm, *input, pack, options, sink));
    return {};
  }

  /// Returns the differences to the checkpoint from which the catalogue was made.
  static std::uint64_t Differences(const std::string& folder) {
    const auto comm = comm::MakeSerialComm();
    NullSink sink;
    const auto left = Opened(Own("zero2_w3_frozen_tied"));
    const auto right = Opened(folder);
    if (!left || !right) return ~std::uint64_t{0};
    const auto report = Check(*comm, *left, *right, {}, sink);
    EXPECT_TRUE(report.has_value()) << report.error().message;
    return report ? report->difference_count : ~std::uint64_t{0};
  }
};

TEST_F(Catalogues, AreToldFromCheckpoints) {
  ASSERT_TRUE(Extract("catalogue", Pack::kNone).has_value());
  EXPECT_EQ(IsCatalogue(At("catalogue")).value(), true);
  EXPECT_EQ(IsCatalogue(At("source")).value(), false);
}

TEST_F(Catalogues, WithoutPayloadsNeedTheirSource) {
  ASSERT_TRUE(Extract("catalogue", Pack::kNone).has_value());
  EXPECT_EQ(Differences(At("catalogue")), 0U);
  const auto set = ReadCatalogue(At("catalogue"), false);
  ASSERT_TRUE(set.has_value()) << set.error().message;
  EXPECT_FALSE(IsCompressed(*set));
  fs::remove_all(At("source"));
  const auto comm = comm::MakeSerialComm();
  NullSink sink;
  InputOptions options;
  options.source_paths = {At("catalogue")};
  const auto read = OpenInput(*comm, options, sink);
  ASSERT_FALSE(read.has_value()) << "a sample of the weights is compared";
  EXPECT_EQ(read.error().code, Errc::kNotFound);
  options.proof.reset();
  const auto one = OpenInput(*comm, options, sink);
  const auto other = Opened(Own("zero2_w3_frozen_tied"));
  ASSERT_TRUE(one && other) << "it can be described without";
  const auto report = Check(*comm, **one, *other, {}, sink);
  ASSERT_FALSE(report.has_value());
  EXPECT_EQ(report.error().code, Errc::kNotFound);
}

TEST_F(Catalogues, WithPayloadsOutliveTheirSource) {
  ASSERT_TRUE(Extract("copied", Pack::kCopy).has_value());
  const Status compressed = Extract("compressed", Pack::kZstd);
  ASSERT_TRUE(compressed.has_value()) << compressed.error().message;
  fs::remove_all(At("source"));
  EXPECT_EQ(Differences(At("copied")), 0U);
  EXPECT_EQ(Differences(At("compressed")), 0U);
  const auto copied = ReadCatalogue(At("copied"), false);
  const auto packed = ReadCatalogue(At("compressed"), false);
  ASSERT_TRUE(copied && packed);
  EXPECT_FALSE(IsCompressed(*copied));
  EXPECT_TRUE(IsCompressed(*packed));
}

// A file that is complete in the page cache may not be on the device.
TEST_F(Catalogues, KeepOnlyPackFilesThatWereSynced) {
  ASSERT_TRUE(Extract("fresh", Pack::kZstd));
  const auto expected = Contents("fresh");
  const auto stage = [&]() -> std::string {
    for (const auto& entry : fs::directory_iterator(root_)) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with("out.partial-") && entry.is_directory()) return entry.path().string();
    }
    return "";
  };
  for (const char* const spec : {"sync:3:eio", "sync:6:eio", "write:6:enospc"}) {
    const os::ScopedFault fault(*os::ParseFault(spec));
    const Status failed = Extract("out", Pack::kZstd);
    ASSERT_FALSE(failed) << spec;
    EXPECT_EQ(failed.error().code, Errc::kIo) << failed.error().message;
    EXPECT_EQ(stage(), "") << spec << ": nothing can be continued";
  }
  // A stopped run leaves whole files. They are damaged as by a power failure.
  std::vector<fs::path> packs;
  for (int looks = 1; packs.size() < 2; ++looks) {
    packs.clear();
    const Status stopped = Extract("out", Pack::kZstd, StopAfter(looks));
    ASSERT_FALSE(stopped);
    ASSERT_EQ(stopped.error().code, Errc::kStopped) << stopped.error().message;
    for (const auto& entry : fs::directory_iterator(stage() + "/pack")) {
      packs.push_back(entry.path());
    }
  }
  for (const fs::path& path : packs) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(fs::file_size(path) / 2));
    file.put('\x5a');
  }
  ASSERT_TRUE(Extract("out", Pack::kZstd));
  for (const auto& [path, text] : expected) {
    if (text == "/") continue;
    const std::string name = path.substr(path.find("fresh") + 5);
    EXPECT_TRUE(Get("out" + name) == text) << name;
  }
}

TEST_F(Catalogues, ThatAreDamagedAreRefused) {
  ASSERT_TRUE(Extract("catalogue", Pack::kNone).has_value());
  std::size_t tried = 0;
  for (const auto& [path, text] : Contents("catalogue")) {
    if (text == "/" || path.ends_with("shardwright.json")) continue;
    for (std::size_t at = 0; at < text.size(); at += 1 + text.size() / 7, ++tried) {
      std::string damaged = text;
      damaged[at] = static_cast<char>(damaged[at] ^ 0x20);
      Put(path, damaged);
      const auto set = ReadCatalogue(At("catalogue"), false);
      ASSERT_FALSE(set.has_value()) << path << " at " << at;
      EXPECT_EQ(set.error().code, Errc::kBadInput) << set.error().message;
    }
    Put(path, text.substr(0, text.size() / 2));
    EXPECT_FALSE(ReadCatalogue(At("catalogue"), false).has_value()) << path << " cut off";
    Put(path, text);
  }
  EXPECT_GT(tried, 5U);
  EXPECT_TRUE(ReadCatalogue(At("catalogue"), false).has_value());
}

}  // namespace
}  // namespace shardwright::convert
