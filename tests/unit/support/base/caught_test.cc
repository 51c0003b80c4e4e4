// SPDX-License-Identifier: Apache-2.0
#include "support/base/exception_to_error.h"

#include <gtest/gtest.h>

#include <new>
#include <stdexcept>
#include <system_error>

namespace shardwright {
namespace {

template <class Thrown>
Error ErrorOf(const Thrown& thrown) {
  try {
    throw thrown;
  } catch (...) {
    return CaughtError();
  }
}

TEST(CaughtTest, WantOfMemoryAndOfThreadsAreLimits) {
  EXPECT_EQ(ErrorOf(std::bad_alloc()).code, Errc::kLimit);
  EXPECT_EQ(ErrorOf(std::bad_alloc()).message, "out of memory");
  const std::system_error thread(EAGAIN, std::generic_category());
  EXPECT_EQ(ErrorOf(thread).code, Errc::kLimit);
  EXPECT_EQ(ErrorOf(thread).message, "cannot start a thread: out of memory, or too many threads");
}

TEST(CaughtTest, AllElseIsADefect) {
  const std::system_error other(EPERM, std::generic_category());
  EXPECT_EQ(ErrorOf(other).code, Errc::kInternal);
  EXPECT_EQ(ErrorOf(other).message, "unexpected exception: Operation not permitted");
  EXPECT_EQ(ErrorOf(std::runtime_error("thrown by a library")).message,
            "unexpected exception: thrown by a library");
  EXPECT_EQ(ErrorOf(3).code, Errc::kInternal);
  EXPECT_EQ(ErrorOf(3).message, "unexpected exception of an unknown type");
}

}  // namespace
}  // namespace shardwright
