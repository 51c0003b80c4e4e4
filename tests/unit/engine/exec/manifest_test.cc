// SPDX-License-Identifier: Apache-2.0
#include "engine/exec/manifest.h"

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>

#include <nlohmann/json.hpp>

#include "support/os/fault.h"
#include "unit/support/os/scratch.h"

namespace shardwright::exec {
namespace {

namespace fs = std::filesystem;

Digest Of(const std::string& text) { return DigestOf(std::as_bytes(std::span(text))); }

TEST(Manifests, ListFilesBesideWhatTheyBeginWith) {
  const auto text = MakeManifest(R"({"command": "ucp-load", "zero": 1})",
                                 {{"a/b.pt", 10, Of("x"), ""}, {"c.pt", 20, {}, "clone"}});
  ASSERT_TRUE(text.has_value()) << text.error().message;
  EXPECT_EQ(text->back(), '\n');
  const auto json = nlohmann::ordered_json::parse(*text);
  EXPECT_EQ(json.begin().key(), "command") << "the head comes first, in its order";
  EXPECT_EQ(json["zero"], 1);
  ASSERT_EQ(json["files"].size(), 2U);
  EXPECT_EQ(json["files"][0]["path"], "a/b.pt");
  EXPECT_EQ(json["files"][0]["bytes"], 10);
  EXPECT_EQ(json["files"][0]["xxh3_128"], Hex(Of("x")));
  EXPECT_EQ(json["files"][1]["clone_mode"], "clone");
  EXPECT_FALSE(json["files"][1].contains("xxh3_128")) << "its bytes were not read";
}

TEST(Manifests, GiveBackWhatTheyList) {
  const auto text = MakeManifest("{}", {{"a/b.pt", 10, Of("x"), "", 4000000000U},
                                        {"text", 5, Of("y"), ""},
                                        {"c.pt", 20, {}, "clone"}});
  ASSERT_TRUE(text.has_value());
  const auto listed = ListedFiles(nlohmann::json::parse(*text));
  ASSERT_TRUE(listed.has_value());
  ASSERT_EQ(listed->size(), 3U);
  EXPECT_EQ(listed->at("a/b.pt").bytes, 10U);
  EXPECT_EQ(listed->at("a/b.pt").digest, Hex(Of("x")));
  EXPECT_EQ(listed->at("a/b.pt").payload_crc32, 4000000000U);
  EXPECT_EQ(listed->at("text").digest, Hex(Of("y")));
  EXPECT_FALSE(listed->at("text").payload_crc32.has_value());
  EXPECT_EQ(listed->at("c.pt").digest, "");
  for (const char* wrong :
       {"", "[]", "{}", R"({"files": {}})", R"({"files": [1]})", R"({"files": [{"path": "a"}]})",
        R"({"files": [{"path": 1, "bytes": 1}]})", R"({"files": [{"path": "a", "bytes": -1}]})",
        R"({"files": [{"path": "a", "bytes": 1, "xxh3_128": 1}]})",
        R"({"files": [{"path": "a", "bytes": 1, "payload_crc32": "1"}]})",
        R"({"files": [{"path": "a", "bytes": 1, "payload_crc32": 4294967296}]})"}) {
    EXPECT_FALSE(ListedFiles(nlohmann::json::parse(wrong, nullptr, false)).has_value()) << wrong;
  }
}

TEST(Manifests, AreJsonWhateverNamesFilesHave) {
  const auto text = MakeManifest("{}", {{"bad\xFFname\"", 1, {}, ""}});
  ASSERT_TRUE(text.has_value());
  EXPECT_NE(nlohmann::json::parse(*text)["files"][0]["path"], "");
}

// Tests of the folders that --force may remove.
class Replaceable : public os::Scratch {
 protected:
  /// Returns the error of CheckReplaceable for the folder "out", and expects its code.
  std::string Said(const std::vector<std::string>& sources = {}) const {
    const Status status = CheckReplaceable(At("out") + "/", sources);
    if (status) return "yes";
    const Errc code = status.error().code;
    return (code == Errc::kBusy    ? "busy"
            : code == Errc::kUsage ? "usage"
                                   : "other") +
           (": " + status.error().message);
  }
  void Expect(const std::string& what) const {
    const std::string said = Said();
    EXPECT_TRUE(said.starts_with("busy: ") && said.find(what) != std::string::npos)
        << what << " expected: " << said;
  }
  const std::string manifest_ = std::string("out/") + kManifestName;
};

TEST_F(Replaceable, IsWhatARunHasMadeAndLeft) {
  EXPECT_EQ(Said(), "yes") << "nothing is there";
  fs::create_directories(At("out/a"));
  EXPECT_EQ(Said(), "yes") << "empty folders";
  Put("out/a/b.pt", "0123456789");
  Expect("not an output of Shardwright: it has no shardwright.json");
  Put(manifest_, *MakeManifest("{}", {{"a/b.pt", 10, {}, ""}}));
  EXPECT_EQ(Said(), "yes");
  Put("out/a/latest", "x");
  Expect("a/latest was not written by the run that made this output");
  fs::remove(At("out/a/latest"));
  Put("out/a/b.pt", "01234567890");
  Expect("a/b.pt has changed since the run");
  Put("out/a/b.pt", "0123456789");
  const auto made = fs::last_write_time(At(manifest_));
  fs::last_write_time(At("out/a/b.pt"), made + std::chrono::seconds(30));
  EXPECT_EQ(Said(), "yes") << "as a copy may have it";
  fs::last_write_time(At("out/a/b.pt"), made + std::chrono::seconds(90));
  Expect("a/b.pt has changed since the run");
  fs::remove(At("out/a/b.pt"));
  EXPECT_EQ(Said(), "yes") << "what is gone needs no keeping";
  Put("out/c", "1");
  for (const char* text : {"", "{\"files\":[],\"files\":[]}"}) {
    Put(manifest_, text);
    Expect("not an output of Shardwright: shardwright.json: ");
  }
  for (const char* text : {"[]", "{}", R"({"files": 3})", R"({"files": [{"path": 1}]})"}) {
    Put(manifest_, text);
    Expect("not an output of Shardwright: its shardwright.json lists no files");
  }
  fs::create_symlink("b.pt", At("out/a/link"));
  Expect("a/link is neither a file nor a folder");
  fs::remove(At("out/a/link"));
  const os::ScopedFault stale(*os::ParseFault("open:5:estale"));  // after both folders
  const std::string said = Said();
  EXPECT_TRUE(said.starts_with("other: " + At(manifest_) + ": ")) << said;
}

TEST_F(Replaceable, IsNothingThatIsRead) {
  Put("out/a/b.pt", "0123456789");
  Put(manifest_, *MakeManifest("{}", {{"a/b.pt", 10, {}, ""}}));
  EXPECT_EQ(Said({"/nothing/there", At("outer"), At("")}), "yes");
  const std::string what = "usage: " + At("out") + ": OUTPUT contains a file of INPUT, ";
  EXPECT_EQ(Said({At("outer"), At("out/a/b.pt")}), what + At("out/a/b.pt"));
  fs::create_directory_symlink(At("out"), At("link"));
  EXPECT_EQ(Said({At("link/a/../a/b.pt")}), what + At("link/a/../a/b.pt"));
}

TEST(Manifests, NeedAHead) {
  for (const char* head : {"", "[]", "3", "{"}) {
    const auto text = MakeManifest(head, {});
    ASSERT_FALSE(text.has_value()) << head;
    EXPECT_EQ(text.error().code, Errc::kInternal);
  }
}

TEST(FileDigests, TellUnitsAndFrameApart) {
  const std::vector<Digest> units = {Of("one"), Of("two")};
  const std::vector<Digest> swapped = {Of("two"), Of("one")};
  const Digest frame = Of("headtail");
  const Digest whole = FileDigest(units, frame);
  EXPECT_NE(whole, FileDigest(swapped, frame));
  EXPECT_NE(whole, FileDigest(units, Of("other")));
  EXPECT_NE(whole, FileDigest(std::span(units).first(1), frame));
  // As docs/formats/manifest.md specifies: the digest of all digests.
  std::string all;
  for (const Digest& one : {units[0], units[1], frame}) all.append(one.begin(), one.end());
  EXPECT_EQ(whole, Of(all));
}

}  // namespace
}  // namespace shardwright::exec
