// SPDX-License-Identifier: Apache-2.0
// Digests that a checkpoint records for its files: integrity.json of Megatron-Core.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include <nlohmann/json.hpp>

#include "convert/check.h"
#include "opened.h"
#include "support/os/sha256.h"

namespace shardwright::convert {
namespace {

std::string TextOf(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

/// A Megatron-Core checkpoint with the list that it writes on request.
class Digests : public os::Scratch {
 protected:
  void SetUp() override {
    os::Scratch::SetUp();
    save_ = At("ckpt");
    fs::copy(fs::path(SW_SOURCE_DIR) / "tests/data/megatron/dist_full_tp2/ckpt", save_,
             fs::copy_options::recursive);
    folder_ = save_ / "iter_0000002";
    list_ = {{"algorithm", "sha256"}, {"files", nlohmann::json::object()}};
    for (const fs::directory_entry& entry : fs::directory_iterator(folder_)) {
      list_["files"][entry.path().filename()] = os::Sha256Of(TextOf(entry.path()));
    }
    WriteList();
  }
  void WriteList() { std::ofstream(folder_ / "integrity.json") << list_.dump(2); }

  /// Changes a byte that pads a container, which no other checksum covers.
  std::string Damage() {
    for (const fs::directory_entry& entry : fs::directory_iterator(folder_)) {
      if (entry.path().extension() != ".distcp") continue;
      std::string bytes = TextOf(entry.path());
      const std::size_t padding = bytes.find("ZZZZ");
      if (padding == std::string::npos) continue;
      bytes[padding] = 'Y';
      std::ofstream(entry.path(), std::ios::binary) << bytes;
      return entry.path().filename();
    }
    ADD_FAILURE() << "no padding";
    return "";
  }

  Result<std::unique_ptr<Input>> Open(const std::string& root) {
    const auto comm = comm::MakeSerialComm();
    InputOptions options;
    options.source_paths = {root};
    return OpenInput(*comm, options, sink_);
  }
  Result<ConvertReport> Convert(const ConvertOptions& options) {
    auto input = Open(save_);
    if (!input) return tl::unexpected<Error>(input.error());
    return Converted(**input, "tp=1", options, "megatron");
  }
  ConvertOptions Options() {
    ConvertOptions options;
    options.output = At("out");
    return options;
  }
  void ExpectError(Errc code, const std::string& words) {
    const auto input = Open(save_);
    ASSERT_FALSE(input);
    EXPECT_EQ(input.error().code, code) << input.error().message;
    EXPECT_NE(input.error().message.find(words), std::string::npos) << input.error().message;
  }

  NullSink sink_;
  fs::path save_;
  fs::path folder_;
  nlohmann::json list_;
};

TEST_F(Digests, AreVerifiedAndWrittenAgain) {
  const auto converted = Convert(Options());
  ASSERT_TRUE(converted) << converted.error().message;
  const fs::path made = fs::path(At("out")) / "iter_0000002";
  const nlohmann::json list = nlohmann::json::parse(TextOf(made / "integrity.json"));
  EXPECT_EQ(list["algorithm"], "sha256");
  std::size_t files = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(made)) {
    const std::string name = entry.path().filename();
    if (name == "integrity.json") continue;
    ++files;
    EXPECT_EQ(list["files"].value(name, ""), os::Sha256Of(TextOf(entry.path()))) << name;
  }
  EXPECT_EQ(list["files"].size(), files);
  EXPECT_GE(files, 4U);
  // The output is verified in the same way.
  const auto again = Open(At("out"));
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ((*again)->checkpoint.digests.size(), files - 2) << "the index is verified at once";
  EXPECT_TRUE(VerifyDigests(*comm::MakeSerialComm(), **again, 2, sink_));
}

TEST_F(Digests, AreReadBack) {
  ConvertOptions options = Options();
  options.verify = exec::Verify::kReadback;
  const auto converted = Convert(options);
  ASSERT_TRUE(converted) << converted.error().message;
}

TEST_F(Digests, OfDamagedDataStopAConversion) {
  const std::string name = Damage();
  const auto converted = Convert(Options());
  ASSERT_FALSE(converted);
  EXPECT_EQ(converted.error().code, Errc::kBadInput);
  EXPECT_NE(converted.error().message.find(name + ": damaged: SHA-256 "), std::string::npos)
      << converted.error().message;
  EXPECT_FALSE(fs::exists(At("out")));
}

TEST_F(Digests, OfDamagedDataStopAComparison) {
  Damage();
  const auto comm = comm::MakeSerialComm();
  const auto a = Open(save_);
  const auto b = Open(save_);
  ASSERT_TRUE(a && b);
  const auto report = Check(*comm, **a, **b, {}, sink_);
  ASSERT_FALSE(report);
  EXPECT_EQ(report.error().code, Errc::kBadInput);
}

TEST_F(Digests, AreLeftAloneWhereNothingIsRead) {
  Damage();
  ConvertOptions dry = Options();
  dry.dry_run = true;
  EXPECT_TRUE(Convert(dry));
  ConvertOptions trusting = Options();
  trusting.verify = exec::Verify::kNone;
  EXPECT_TRUE(Convert(trusting));
}

TEST_F(Digests, OfADamagedIndexRefuseTheFolder) {
  list_["files"][".metadata"] = std::string(64, '0');
  WriteList();
  ExpectError(Errc::kBadInput, ".metadata: damaged: SHA-256 0000");
}

TEST_F(Digests, OfADamagedDescriptionRefuseTheFolder) {
  std::ofstream(folder_ / "metadata.json", std::ios::app) << "\n";
  ExpectError(Errc::kBadInput, "metadata.json: damaged");
}

TEST_F(Digests, ThatLackAFileRefuseTheFolder) {
  list_["files"].erase("__1_0.distcp");
  WriteList();
  ExpectError(Errc::kBadInput, "__1_0.distcp: integrity.json does not list it");
}

TEST_F(Digests, OfAnotherAlgorithmAreNotSupported) {
  list_["algorithm"] = "md5";
  WriteList();
  ExpectError(Errc::kUnsupported, "algorithm \"sha256\" expected, found \"md5\"");
}

TEST_F(Digests, ThatAreNoneAreRefused) {
  for (const nlohmann::json& sum :
       {nlohmann::json(3), nlohmann::json("abc"), nlohmann::json(std::string(64, 'G'))}) {
    list_["files"]["__0_0.distcp"] = sum;
    WriteList();
    ExpectError(Errc::kBadInput, "64 hexadecimal digits expected");
  }
  list_.erase("files");
  WriteList();
  ExpectError(Errc::kBadInput, "files: an object expected");
  std::ofstream(folder_ / "integrity.json") << "{";
  ExpectError(Errc::kBadInput, "integrity.json");
}

}  // namespace
}  // namespace shardwright::convert
