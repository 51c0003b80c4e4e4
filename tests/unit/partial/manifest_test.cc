// SPDX-License-Identifier: Apache-2.0
#include "partial/store/manifest.h"

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <utility>

namespace shardwright::partial {
namespace {

exec::Digest DigestOf(std::string_view text) {
  return exec::DigestOf(std::as_bytes(std::span(text)));
}

BlobRef Blob(std::string_view text, bool zstd = false) {
  return {DigestOf(text), text.size(), 7, DigestOf("head"), zstd};
}

Manifest Sample() {
  Manifest manifest;
  manifest.sequence = 12;
  manifest.parent = 11;
  manifest.iteration = 500;
  manifest.tag = "global_step500";
  manifest.policy = "sequential";
  manifest.k_snapshot = 2;
  manifest.k_persist = 1;
  manifest.catalogue = DigestOf("catalogue");
  manifest.passed = Blob("client state");
  manifest.names = {"emb \"odd\\name\"", "experts.0", "experts.1"};
  manifest.modules.resize(3);
  manifest.modules[0][0] = StoredComponent{500, Blob("a")};
  manifest.modules[1][1] = StoredComponent{480, Blob("b", true)};
  manifest.modules[1][2] = StoredComponent{0, Blob("")};
  manifest.state.snapshot = MakeLevelState({2}, 2);
  manifest.state.persist = MakeLevelState({2}, 1);
  manifest.state.persist.tokens = {{5, 1ULL << 60}};
  manifest.state.counted_to = 500;
  manifest.state.dynamic_k = DynamicK{2, 1, 1, 0.0375, 0.1 / 3, 0.7 / 3, true, 3000};
  return manifest;
}

void ExpectSame(const LevelState& a, const LevelState& b) {
  EXPECT_EQ(a.checkpoints, b.checkpoints);
  EXPECT_EQ(a.cursor, b.cursor);
  EXPECT_EQ(a.tokens, b.tokens);
  EXPECT_EQ(a.covered, b.covered);
  EXPECT_EQ(a.version, b.version);
  EXPECT_EQ(a.saved_at, b.saved_at);
}

TEST(Manifest, ReadsWhatItWrote) {
  const Manifest wanted = Sample();
  const auto found = ParseManifest(ToText(wanted), "m");
  ASSERT_TRUE(found) << found.error().message;
  EXPECT_EQ(found->sequence, 12U);
  EXPECT_EQ(found->parent, 11U);
  EXPECT_EQ(found->iteration, 500U);
  EXPECT_EQ(found->tag, wanted.tag);
  EXPECT_EQ(found->policy, wanted.policy);
  EXPECT_EQ(found->k_snapshot, 2U);
  EXPECT_EQ(found->k_persist, 1U);
  EXPECT_EQ(found->catalogue, wanted.catalogue);
  EXPECT_EQ(found->passed, wanted.passed);
  EXPECT_EQ(found->names, wanted.names);
  EXPECT_EQ(found->modules, wanted.modules);
  EXPECT_EQ(found->state.counted_to, 500U);
  EXPECT_EQ(found->state.dynamic_k, wanted.state.dynamic_k) << "to the last bit";
  ExpectSame(found->state.snapshot, wanted.state.snapshot);
  ExpectSame(found->state.persist, wanted.state.persist);
  EXPECT_EQ(ToText(*found), ToText(wanted));
}

TEST(Manifest, IsOneJsonObject) {
  const auto json = nlohmann::json::parse(ToText(Sample()), nullptr, false);
  ASSERT_TRUE(json.is_object());
  EXPECT_EQ(json["modules"].size(), 3U);
  EXPECT_EQ(json["modules"][1]["master"].back(), "zstd");
}

/// Replaces every value of a manifest by one of another kind: the parser fails, and does not crash.
TEST(Manifest, RefusesWhatIsNoManifest) {
  const auto json = nlohmann::ordered_json::parse(ToText(Sample()));
  std::size_t refused = 0;
  const nlohmann::ordered_json flat = json.flatten();
  for (const auto& [path, value] : flat.items()) {
    for (const nlohmann::ordered_json& wrong :
         {nlohmann::ordered_json(-1), nlohmann::ordered_json(1.5), nlohmann::ordered_json(nullptr),
          nlohmann::ordered_json::object(), nlohmann::ordered_json("\x01")}) {
      auto broken = json;
      broken[nlohmann::ordered_json::json_pointer(path)] = wrong;
      const auto found = ParseManifest(broken.dump(), "m");
      // Names may be any text; unused counters are null.
      if (found) continue;
      ++refused;
      EXPECT_TRUE(found.error().message.starts_with("m: ")) << found.error().message;
    }
  }
  EXPECT_GT(refused, 4 * flat.size());
  for (const std::string text : {"", "[]", "{}", "null", "{\"kind\": \"pec-manifest\"}"}) {
    EXPECT_EQ(ParseManifest(text, "m").error().code, Errc::kBadInput) << text;
  }
  const std::string whole = ToText(Sample());
  for (std::size_t cut = 0; cut + 2 < whole.size(); cut += 7) {
    EXPECT_FALSE(ParseManifest(whole.substr(0, cut), "m"));
  }
}

TEST(Manifest, LinesAreThoseOfTheModules) {
  const Manifest wanted = Sample();
  const auto found = SplitManifest(ToText(wanted), "m");
  ASSERT_TRUE(found) << found.error().message;
  EXPECT_EQ(found->head.iteration, 500U);
  EXPECT_EQ(found->head.passed, wanted.passed);
  ASSERT_EQ(found->lines.size(), 3U);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(found->lines[i], ModuleLine(wanted.names[i], wanted.modules[i]));
    const auto module = ParseModule(found->lines[i], wanted.names[i], "m");
    ASSERT_TRUE(module) << module.error().message;
    EXPECT_EQ(*module, wanted.modules[i]);
    EXPECT_EQ(ParseModule(found->lines[i], "other", "m").error().code, Errc::kBadInput);
  }
  EXPECT_EQ(ToText(found->head, found->lines), ToText(wanted));
}

TEST(Manifest, LinesOfAnotherFormAreFoundToo) {
  const Manifest wanted = Sample();
  auto json = nlohmann::ordered_json::parse(ToText(wanted));
  EXPECT_FALSE(SplitManifest(json.dump(2), "m")) << "it has the digest of other bytes";
  json.erase("xxh3_128");
  const std::string pretty = json.dump(2);
  const auto found = SplitManifest(pretty, "m");
  ASSERT_TRUE(found) << found.error().message;
  EXPECT_EQ(ToText(found->head, found->lines), ToText(wanted));
  for (const std::string text : {"", "{}", "\n\"modules\":[\n\n]}\n", "x\n\"modules\":[\n]}\n"}) {
    EXPECT_FALSE(SplitManifest(text, "m")) << text;
  }
}

TEST(Manifest, RefusesVersionsFromTheFuture) {
  Manifest manifest = Sample();
  manifest.modules[0][0]->version = 501;
  const auto found = ParseManifest(ToText(manifest), "m");
  ASSERT_FALSE(found);
  EXPECT_NE(found.error().message.find("above the checkpoint's iteration"), std::string::npos);
}

TEST(Manifest, DynamicKIsOptionalAndMustBePossible) {
  Manifest manifest = Sample();
  manifest.state.dynamic_k.reset();
  const std::string without = ToText(manifest);
  EXPECT_EQ(without.find("dynamic_k"), std::string::npos) << "as older programs wrote it";
  const auto older = ParseManifest(without, "m");
  ASSERT_TRUE(older) << older.error().message;
  EXPECT_FALSE(older->state.dynamic_k);
  const auto json = nlohmann::ordered_json::parse(ToText(Sample()));
  for (const auto& [field, wrong, said] : {std::tuple{"k", "3", "k is 3, expected 1 to 2"},
                                           {"k", "4294967297", "is too large"},
                                           {"levels", "0", "0 levels do not lead"},
                                           {"spent", "0.9", "losses of 0.9"},
                                           {"limit", "0", "a limit of 0,"},
                                           {"limit", "-1", "a limit of -1"},
                                           {"predict", "1", "true or false"},
                                           {"iterations", "-1", "a number from 0"}}) {
    auto broken = json;
    broken["state"]["dynamic_k"][field] = nlohmann::ordered_json::parse(wrong);
    const auto found = ParseManifest(broken.dump(), "m");
    ASSERT_FALSE(found) << field;
    EXPECT_EQ(found.error().code, Errc::kBadInput);
    EXPECT_NE(found.error().message.find(said), std::string::npos) << found.error().message;
  }
}

TEST(Schemas, NewerOnesAreNotRead) {
  for (std::string text :
       {ToText(Sample()), ToText(StoreHead{}), ToText(RecoveryRecord{}), ToText(TokenRecord{})}) {
    const std::size_t at = text.find("\"schema\":") + 9;
    text.replace(text.find('1', at), 1, "2");
    EXPECT_EQ(ParseManifest(text, "m").error().code == Errc::kUnsupported,
              text.find("pec-manifest") != std::string::npos);
    EXPECT_EQ(ParseHead(text, "m").error().code == Errc::kUnsupported,
              text.find("pec-store") != std::string::npos);
    EXPECT_EQ(ParseRecovery(text, "m").error().code == Errc::kUnsupported,
              text.find("pec-recovery") != std::string::npos);
    EXPECT_EQ(ParseTokens(text, "m").error().code == Errc::kUnsupported,
              text.find("pec-tokens") != std::string::npos);
  }
}

TEST(Texts, ReadWhatTheyWrote) {
  StoreHead head;
  head.fingerprint = DigestOf("model");
  head.modules = 9;
  head.experts = {4, 8};
  head.layer_id = {1, 3};
  head.keep = {false, true, false};
  const auto read = ParseHead(ToText(head), "h");
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(read->fingerprint, head.fingerprint);
  EXPECT_EQ(read->experts, head.experts);
  EXPECT_EQ(read->layer_id, head.layer_id);
  EXPECT_EQ(read->keep, head.keep);

  const TokenRecord record{3, {{7, {{1, 2}, {3, 4}}}, {9, {{0, 0}, {5, 6}}}}};
  const auto tokens = ParseTokens(ToText(record), "t");
  ASSERT_TRUE(tokens);
  EXPECT_EQ(tokens->parent, 3U);
  ASSERT_EQ(tokens->sums.size(), 2U);
  EXPECT_EQ(tokens->sums[1].iteration, 9U);
  EXPECT_EQ(tokens->sums[1].tokens, record.sums[1].tokens);

  RecoveryRecord recovery;
  recovery.sequence = 2;
  recovery.manifest = 5;
  recovery.resume = 40;
  recovery.abandoned = {6, 7};
  recovery.state = Sample().state;
  recovery.ledger = LossLedger{{4, 0}, {40}, {{{{10, 20}, {30, 40}}, {}}, {{}, {{1, 2}}}}};
  const auto back = ParseRecovery(ToText(recovery), "r");
  ASSERT_TRUE(back) << back.error().message;
  EXPECT_EQ(back->abandoned, recovery.abandoned);
  ASSERT_TRUE(back->ledger);
  EXPECT_EQ(back->ledger->charged, recovery.ledger->charged);
  EXPECT_EQ(back->ledger->layer_lost, recovery.ledger->layer_lost);
  EXPECT_EQ(back->ledger->resumes, recovery.ledger->resumes);
  ExpectSame(back->state.persist, recovery.state.persist);
}

/// Flips any bit of any text: the parser fails, or only the name of the digest's field has changed
/// and all else is the same.
TEST(Texts, NoBitOfThemChangesWhatTheySay) {
  RecoveryRecord recovery;
  recovery.state = Sample().state;
  const std::array<std::pair<std::string, std::function<std::string(const std::string&)>>, 7>
      kinds = {{
          {ToText(Sample()),
           [](const std::string& text) {
             const auto read = ParseManifest(text, "m");
             return read ? ToText(*read) : "";
           }},
          {ToText(Sample()),
           [](const std::string& text) {
             const auto read = SplitManifest(text, "m");
             return read ? ToText(read->head, read->lines) : "";
           }},
          {ToText(StoreHead{{}, 9, {4, 8}, {1, 3}, {true}, {}}),
           [](const std::string& text) {
             const auto read = ParseHead(text, "h");
             return read ? ToText(*read) : "";
           }},
          {ToText(TokenRecord{3, {{7, {{1, 2}, {3, 4}}}}}),
           [](const std::string& text) {
             const auto read = ParseTokens(text, "t");
             return read ? ToText(*read) : "";
           }},
          {ToText(recovery),
           [](const std::string& text) {
             const auto read = ParseRecovery(text, "r");
             return read ? ToText(*read) : "";
           }},
          {ToText(recovery),
           [&](const std::string& text) {
             const auto read = ParseRecoveryHead(text, "r");
             if (!read) return std::string();
             RecoveryRecord whole = recovery;
             whole.sequence = read->sequence;
             whole.manifest = read->manifest;
             whole.resume = read->resume;
             whole.abandoned = read->abandoned;
             return ToText(whole);
           }},
          {BegunText(),
           [](const std::string& text) { return ParseBegun(text, "b") ? BegunText() : ""; }},
      }};
  for (const auto& [text, again] : kinds) {
    ASSERT_EQ(again(text), text);
    std::size_t accepted = 0;
    for (std::size_t bit = 0; bit < 8 * text.size(); ++bit) {
      std::string damaged = text;
      damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ 1 << bit % 8);
      const std::string found = again(damaged);
      if (found.empty()) continue;
      EXPECT_EQ(found, text) << "bit " << bit;
      ++accepted;
    }
    EXPECT_LE(accepted, 8 * sizeof("\"xxh3_128\": ")) << text;
  }
}

}  // namespace
}  // namespace shardwright::partial
