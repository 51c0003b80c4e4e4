// SPDX-License-Identifier: Apache-2.0
#include <filesystem>
#include <fstream>

#include "convert/catalogue.h"
#include "unit/checkpoints/fixtures.h"
#include "unit/convert/opened.h"

// DCP folders with items that PyTorch has compressed: the extension stream.zstd.

namespace shardwright::convert {
namespace {

fs::path Sample() { return fs::path(SW_SOURCE_DIR) / "tests/data/dcp/zstd_w2"; }

class CompressedItems : public os::Scratch {
 protected:
  void SetUp() override {
    os::Scratch::SetUp();
    fs::copy(Sample() / "ckpt", At("ckpt"));
  }

  /// Writes a source as a plain DCP folder of one rank. \returns the error, or nothing
  std::string Convert(const std::string& source, const std::string& out) {
    const auto comm = comm::MakeSerialComm();
    NullSink sink;
    InputOptions options;
    options.source_paths = {At(source)};
    auto input = OpenInput(*comm, options, sink);
    if (!input) return input.error().message;
    ConvertOptions to;
    to.output = At(out);
    const auto report = Converted(**input, "dp_shard=1", to, "dcp");
    return report ? "" : report.error().message;
  }

  /// A catalogue of the checkpoint.
  void Catalogue(Pack pack, const std::string& out) {
    const std::unique_ptr<Input> input = Opened(At("ckpt"));
    ASSERT_NE(input, nullptr);
    const auto comm = comm::MakeSerialComm();
    NullSink sink;
    ConvertOptions options;
    options.output = At(out);
    const auto report = ExtractCatalogue(*comm, *input, pack, options, sink);
    ASSERT_TRUE(report) << report.error().message;
  }
};

TEST_F(CompressedItems, BecomePlainOnes) {
  ASSERT_EQ(Convert("ckpt", "out"), "");
  const std::unique_ptr<Input> plain = Opened(At("out"));
  ASSERT_NE(plain, nullptr);
  EXPECT_TRUE(plain->set.files.at(1).containers.at(0).stretches.empty());
  checkpoints::ExpectTensors(plain->checkpoint,
                             checkpoints::Expected::Read(Sample() / "expected.safetensors"));
}

TEST_F(CompressedItems, AreReadThroughCatalogues) {
  ASSERT_EQ(Convert("ckpt", "out"), "");
  const std::map<std::string, std::string> whole = Files(Contents("out"));
  for (const Pack pack : {Pack::kNone, Pack::kCopy, Pack::kZstd}) {
    const std::string name = std::to_string(static_cast<int>(pack));
    Catalogue(pack, "catalogue" + name);
    ASSERT_EQ(Convert("catalogue" + name, "out" + name), "") << name;
    const std::map<std::string, std::string> again = Files(Contents("out" + name));
    ASSERT_EQ(again.size(), whole.size());
    EXPECT_TRUE(std::equal(whole.begin(), whole.end(), again.begin(),
                           [](const auto& a, const auto& b) { return a.second == b.second; }))
        << name;
  }
}

TEST_F(CompressedItems, ThatAreDamagedAreNeverTakenForOthers) {
  ASSERT_EQ(Convert("ckpt", "out"), "");
  const std::map<std::string, std::string> whole = Files(Contents("out"));
  const std::string bytes = Get("ckpt/__0_0.distcp");
  int refused = 0;
  for (std::size_t at = 0; at < bytes.size(); at += 37) {
    std::string broken = bytes;
    broken[at] = static_cast<char>(broken[at] ^ (1 << (at % 8)));
    Put("ckpt/__0_0.distcp", broken);
    fs::remove_all(At("again"));
    const std::string error = Convert("ckpt", "again");
    if (!error.empty()) {
      EXPECT_NE(error.find("__0_0.distcp"), std::string::npos) << error;
      ++refused;
      continue;
    }
    // Bytes that the output does not keep, e.g. the padding of a container, may be anything.
    const std::map<std::string, std::string> again = Files(Contents("again"));
    EXPECT_TRUE(std::equal(whole.begin(), whole.end(), again.begin(), again.end(),
                           [](const auto& a, const auto& b) { return a.second == b.second; }))
        << at;
  }
  EXPECT_GT(refused, 100);
}

}  // namespace
}  // namespace shardwright::convert
