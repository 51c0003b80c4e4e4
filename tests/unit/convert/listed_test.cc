// SPDX-License-Identifier: Apache-2.0
// Atoms in the places of other atoms: the reader detects them with the manifest in their folder.

#include <gtest/gtest.h>

#include <set>

#include <nlohmann/json.hpp>

#include "opened.h"

namespace shardwright::convert {
namespace {

class Listed : public os::Scratch {
 protected:
  void SetUp() override {
    os::Scratch::SetUp();
    MakeAtoms("atoms", "zero1_w2");
    fs::copy(At("atoms"), At("sound"), fs::copy_options::recursive);
  }

  void MakeAtoms(const std::string& out, const std::string& source) {
    const auto input = Opened(Own(source));
    ASSERT_TRUE(input);
    ConvertOptions options;
    options.output = At(out);
    const auto done = Converted(*input, "", options, "universal");
    ASSERT_TRUE(done.has_value()) << done.error().message;
  }

  /// Reads the folder. Returns "read", or the error.
  std::string Said(const std::string& folder = "atoms") {
    const auto comm = comm::MakeSerialComm();
    NullSink sink;
    InputOptions options;
    options.source_paths = {At(folder)};
    const auto input = OpenInput(*comm, options, sink);
    if (input) return "read";
    EXPECT_EQ(input.error().code, Errc::kBadInput) << input.error().message;
    return input.error().message;
  }

  /// The first atom of a state, relative to the folder.
  std::string Atom(const std::string& state) const {
    std::set<std::string> names;
    for (const auto& entry : fs::recursive_directory_iterator(At("atoms"))) {
      if (entry.path().filename() == state + ".pt") {
        names.insert(fs::relative(entry.path(), At("atoms")).string());
      }
    }
    return *names.begin();
  }

  void Again() {
    fs::remove_all(At("atoms"));
    fs::copy(At("sound"), At("atoms"), fs::copy_options::recursive);
  }

  static constexpr const char* kManifest = "atoms/shardwright.json";
  static constexpr const char* kTag = "global_step4_universal";
};

TEST_F(Listed, AtomsThatHaveChangedPlacesAreRefused) {
  ASSERT_EQ(Said(), "read");
  const std::string one = Atom("exp_avg");
  const std::string other = Atom("exp_avg_sq");
  fs::rename(At("atoms/" + one), At("atoms/aside"));
  fs::rename(At("atoms/" + other), At("atoms/" + one));
  fs::rename(At("atoms/aside"), At("atoms/" + other));
  const std::string said = Said();
  EXPECT_NE(said.find(one), std::string::npos) << said;
  EXPECT_NE(said.find("was replaced or belongs to another run"), std::string::npos) << said;
  EXPECT_EQ(Said(std::string("atoms/") + kTag), said) << "the tag folder alone";
  fs::remove(At(kManifest));
  EXPECT_EQ(Said(), "read") << "who removes the manifest says so";
}

TEST_F(Listed, AtomsOfAnotherRunAreRefused) {
  MakeAtoms("others", "zero2_w3_frozen_tied");
  const std::string name = Atom("fp32");
  std::string other;
  for (const auto& entry : fs::recursive_directory_iterator(At("others"))) {
    if (entry.path().filename() == "fp32.pt") other = entry.path().string();
  }
  ASSERT_NE(other, "");
  fs::copy(other, At("atoms/" + name), fs::copy_options::overwrite_existing);
  EXPECT_NE(Said().find(name), std::string::npos);
}

TEST_F(Listed, ADescriptionThatWasChangedIsRefused) {
  const std::string name = std::string("atoms/") + kTag + "/shardwright_atoms.json";
  const std::string text = Get(name);
  std::size_t tried = 0;
  for (std::size_t at = 0; at < text.size(); ++at) {
    if (text[at] < '1' || text[at] > '9') continue;
    std::string changed = text;
    --changed[at];
    Put(name, changed);
    EXPECT_NE(Said(), "read") << "digit " << at;
    ++tried;
  }
  EXPECT_GT(tried, 10U);
}

TEST_F(Listed, WhatTheManifestDoesNotTellIsTakenAsItIs) {
  const auto manifest = nlohmann::ordered_json::parse(Get(kManifest));
  auto older = manifest;
  for (auto& file : older["files"]) file.erase("payload_crc32");
  Put(kManifest, older.dump());
  EXPECT_EQ(Said(), "read") << "of an older release";
  auto others = manifest;
  others["files"] = nlohmann::json::array();
  Put(kManifest, others.dump());
  EXPECT_EQ(Said(), "read") << "of another checkpoint";
  Again();
  fs::rename(At(std::string("atoms/") + kTag), At("alone"));
  EXPECT_EQ(Said("alone"), "read") << "without its manifest";
  for (const char* broken : {"", "{", R"({"files": 1})"}) {
    Again();
    Put(kManifest, broken);
    EXPECT_NE(Said().find("shardwright.json: "), std::string::npos) << broken;
  }
}

TEST_F(Listed, AManifestInTheTagFolderItselfCounts) {
  auto manifest = nlohmann::ordered_json::parse(Get(kManifest));
  fs::rename(At(std::string("atoms/") + kTag), At("flat"));
  const std::string prefix = std::string(kTag) + "/";
  for (auto& file : manifest["files"]) {
    const auto path = file["path"].get<std::string>();
    if (path.starts_with(prefix)) file["path"] = path.substr(prefix.size());
  }
  Put("flat/shardwright.json", manifest.dump());
  EXPECT_EQ(Said("flat"), "read");
  for (auto& file : manifest["files"]) {
    if (file.contains("payload_crc32")) file["payload_crc32"] = 1;
  }
  Put("flat/shardwright.json", manifest.dump());
  EXPECT_NE(Said("flat").find("CRC-32"), std::string::npos);
}

}  // namespace
}  // namespace shardwright::convert
