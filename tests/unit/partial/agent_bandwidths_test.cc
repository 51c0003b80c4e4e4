// SPDX-License-Identifier: Apache-2.0
#include "partial/planner/agent_bandwidths.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

namespace shardwright::partial {
namespace {

using Json = nlohmann::json;

Json Peer(const std::string& address, std::uint64_t bytes, double seconds) {
  return {{"address", address}, {"copied_bytes", bytes}, {"copied_seconds", seconds}};
}

Json StatusOf(std::uint64_t bytes, double seconds, Json peers = Json::array()) {
  return {{"snapshot_bytes", bytes}, {"snapshot_seconds", seconds}, {"peers", std::move(peers)}};
}

TEST(AgentBandwidths, AreThoseOfAllCopies) {
  const auto measured =
      BandwidthsOf(StatusOf(3000, 1.5, {Peer("a", 800, 2), Peer("b", 900, 3)}), "agent");
  ASSERT_TRUE(measured);
  EXPECT_EQ(measured->host_bytes_per_s, 2000);
  EXPECT_EQ(measured->network_bytes_per_s, 300) << "of the slowest peer";
  EXPECT_TRUE(CheckMeasured(*measured, true, "agent"));
  EXPECT_EQ(BandwidthsJson(*measured),
            Json({{"host_bytes_per_s", 2000.0}, {"network_bytes_per_s", 300.0}}));
}

TEST(AgentBandwidths, AreAbsentUntilSomethingIsCopied) {
  const auto nothing = BandwidthsOf(StatusOf(0, 0), "agent");
  ASSERT_TRUE(nothing);
  EXPECT_EQ(BandwidthsJson(*nothing),
            Json({{"host_bytes_per_s", nullptr}, {"network_bytes_per_s", nullptr}}));
  const auto error = CheckMeasured(*nothing, false, "unix:a");
  ASSERT_FALSE(error);
  EXPECT_EQ(error.error().code, Errc::kNotFound);
  EXPECT_NE(error.error().message.find("pec-save tell unix:a snapshot"), std::string::npos);

  const auto waits = BandwidthsOf(StatusOf(5, 1, {Peer("a", 5, 1), Peer("b", 0, 0)}), "agent");
  ASSERT_TRUE(waits);
  EXPECT_FALSE(waits->network_bytes_per_s);
  EXPECT_TRUE(CheckMeasured(*waits, false, "agent"));
  const auto peer = CheckMeasured(*waits, true, "agent");
  ASSERT_FALSE(peer);
  EXPECT_EQ(peer.error().code, Errc::kNotFound);
  EXPECT_NE(peer.error().message.find("to its peer b yet"), std::string::npos);

  const auto alone = BandwidthsOf(StatusOf(5, 1), "agent");
  ASSERT_TRUE(alone);
  EXPECT_FALSE(alone->network_bytes_per_s);
  EXPECT_TRUE(CheckMeasured(*alone, true, "agent")) << "an agent without peers";
}

TEST(AgentBandwidths, MalformedAnswersAreErrors) {
  const auto code = [](const Json& status) { return BandwidthsOf(status, "agent").error().code; };
  EXPECT_EQ(code({{"pid", 1}}), Errc::kUnsupported);
  EXPECT_EQ(code(StatusOf(1, 1, {Json{{"address", "a"}}})), Errc::kUnsupported);
  EXPECT_EQ(code(StatusOf(1, -1)), Errc::kBadInput);
  EXPECT_EQ(code(StatusOf(1, 1, Json::object())), Errc::kBadInput);
  EXPECT_EQ(code(StatusOf(1, 1, {1})), Errc::kBadInput);
  Json text = StatusOf(1, 1);
  text["snapshot_seconds"] = "1";
  EXPECT_EQ(code(text), Errc::kBadInput);
  text = StatusOf(1, 1);
  text["snapshot_bytes"] = -1;
  EXPECT_EQ(code(text), Errc::kBadInput);
}

TEST(AgentBandwidths, AreDividedAmongRanks) {
  EXPECT_EQ(BandwidthOfRank(1000, 3), 333U);
  EXPECT_EQ(BandwidthOfRank(2, 3), 1U) << "never 0, which means none";
  EXPECT_EQ(BandwidthOfRank(1e300, 1), std::uint64_t{1} << 62);
}

}  // namespace
}  // namespace shardwright::partial
