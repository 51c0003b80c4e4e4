#include "exec/manifest.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace shardwright::exec {
namespace {

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
  EXPECT_EQ(json["files"][1]["twin"], "clone");
  EXPECT_FALSE(json["files"][1].contains("xxh3_128")) << "its bytes were not read";
}

TEST(Manifests, AreJsonWhateverNamesFilesHave) {
  const auto text = MakeManifest("{}", {{"bad\xFFname\"", 1, {}, ""}});
  ASSERT_TRUE(text.has_value());
  EXPECT_NE(nlohmann::json::parse(*text)["files"][0]["path"], "");
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
  // As docs/formats/manifest.md says: the digest of all digests.
  std::string all;
  for (const Digest& one : {units[0], units[1], frame}) all.append(one.begin(), one.end());
  EXPECT_EQ(whole, Of(all));
}

}  // namespace
}  // namespace shardwright::exec
