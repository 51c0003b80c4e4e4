// SPDX-License-Identifier: Apache-2.0
#include "support/os/sha256.h"

#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <utility>

#include "scratch.h"

namespace shardwright::os {
namespace {

constexpr std::string_view kOfAbc =
    "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

TEST(Sha256, IsThatOfTheStandard) {
  EXPECT_EQ(Sha256Of("abc"), kOfAbc);
  EXPECT_EQ(Sha256Of(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(Sha256Of(std::string(1'000'000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, TakesStretches) {
  Sha256 sum;
  for (const char letter : std::string_view("abc")) {
    sum.Add(std::as_bytes(std::span(&letter, 1)));
  }
  EXPECT_EQ(std::move(sum).Finish(), kOfAbc);
}

using Sha256File = Scratch;

TEST_F(Sha256File, IsReadWhole) {
  const std::string text((std::size_t{1} << 20) + 7, 'x');
  std::ofstream(At("file"), std::ios::binary) << text;
  const Result<std::string> sum = Sha256Of(*File::OpenRead(At("file")));
  ASSERT_TRUE(sum) << sum.error().message;
  EXPECT_EQ(*sum, Sha256Of(text));
}

}  // namespace
}  // namespace shardwright::os
