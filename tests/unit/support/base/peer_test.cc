// SPDX-License-Identifier: Apache-2.0
#include "support/base/peer.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>

namespace shardwright {
namespace {

TEST(ParseUser, TakesNamesAndNumbers) {
  EXPECT_EQ(*ParseUser("0"), 0U);
  EXPECT_EQ(*ParseUser("4294967294"), 4294967294U);
  EXPECT_EQ(*ParseUser("root"), 0U);
  for (const char* text : {"", " 1", "-1", "1x", "4294967296", "no such user"}) {
    const auto user = ParseUser(text);
    ASSERT_FALSE(user) << text;
    EXPECT_EQ(user.error().code, Errc::kUsage);
    EXPECT_NE(user.error().message.find("there is no such user"), std::string::npos);
  }
}

TEST(CheckPeer, AcceptsThisProcessesUser) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()), 0);
  EXPECT_TRUE(CheckPeer(ends[0], "here", {}));
  EXPECT_TRUE(CheckPeer(ends[0], "here", ::geteuid() + 1));
  ::close(ends[0]);
  ::close(ends[1]);
  const Status closed = CheckPeer(ends[0], "here", {});
  ASSERT_FALSE(closed);
  EXPECT_EQ(closed.error().code, Errc::kIo);
}

}  // namespace
}  // namespace shardwright
