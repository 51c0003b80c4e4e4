// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <functional>

#include "engine/device/device.h"
#include "support/comm/comm.h"

// Memory and streams of the host backend.

namespace shardwright::device {
namespace {

class HostTest : public testing::Test {
 protected:
  std::unique_ptr<comm::Comm> comm_ = comm::MakeSerialComm();
  std::unique_ptr<Device> device_ = OpenDevice(Kind::kHost, *comm_).value();

  std::unique_ptr<Buffer> Make(Place place, std::uint64_t bytes) {
    auto made = device_->Allocate(place, bytes);
    EXPECT_TRUE(made.has_value()) << made.error().message;
    return *std::move(made);
  }
};

/// Returns the exit code of a process that runs this.
int InChild(const std::function<int()>& act) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(act());
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 256 + WTERMSIG(status);
}

void Fill(std::byte* to, std::uint64_t bytes, unsigned seed) {
  for (std::uint64_t i = 0; i < bytes; ++i) to[i] = static_cast<std::byte>(i * 31 + seed);
}

bool Holds(const std::byte* at, std::uint64_t bytes, unsigned seed) {
  for (std::uint64_t i = 0; i < bytes; ++i) {
    if (at[i] != static_cast<std::byte>(i * 31 + seed)) return false;
  }
  return true;
}

TEST(DeviceTest, NamesAreReadAndOthersRefused) {
  EXPECT_EQ(ParseKind("host").value(), Kind::kHost);
  EXPECT_EQ(ParseKind(Name(Kind::kCuda)).value(), Kind::kCuda);
  const auto other = ParseKind("tpu");
  ASSERT_FALSE(other.has_value());
  EXPECT_EQ(other.error().code, Errc::kUsage);
  EXPECT_EQ(other.error().message, "device \"tpu\": host or cuda expected");
}

TEST_F(HostTest, ThereIsOneDevice) {
  DeviceOptions options;
  options.ordinal = 1;
  const auto other = OpenDevice(Kind::kHost, *comm_, options);
  ASSERT_FALSE(other.has_value());
  EXPECT_EQ(other.error().code, Errc::kUsage);
  EXPECT_EQ(device_->name(), "host");
  EXPECT_GT(device_->FreeBytes().value(), 0U);
}

TEST_F(HostTest, BuffersAreAlignedAndTheirSizeIsWhatWasAskedFor) {
  for (const Place place : {Place::kPageable, Place::kPinned, Place::kShared, Place::kDevice}) {
    for (const std::uint64_t bytes : {1U, 255U, 4097U, 3U << 20}) {
      const auto buffer = Make(place, bytes);
      EXPECT_EQ(buffer->place(), place);
      EXPECT_EQ(buffer->size(), bytes);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer->data()) % 256, 0U);
      Fill(buffer->data(), bytes, 7);
      EXPECT_TRUE(Holds(buffer->data(), bytes, 7));
    }
  }
}

TEST_F(HostTest, MoreThanThereIsIsRefusedWithBothNumbers) {
  for (const Place place : {Place::kPageable, Place::kShared}) {
    const auto made = device_->Allocate(place, std::uint64_t{1} << 50);
    ASSERT_FALSE(made.has_value());
    EXPECT_EQ(made.error().code, Errc::kLimit);
    EXPECT_NE(made.error().message.find("no memory for 1125899906842624 bytes: "),
              std::string::npos)
        << made.error().message;
    EXPECT_NE(made.error().message.find(" are free"), std::string::npos);
  }
}

TEST_F(HostTest, AnotherProcessSeesWhatIsWrittenOnEitherSide) {
  constexpr std::uint64_t kBytes = (1 << 20) + 17;
  const auto buffer = Make(Place::kShared, kBytes);
  Fill(buffer->data(), kBytes, 1);
  Handle handle = device_->Export(*buffer).value();
  EXPECT_EQ(handle.bytes, kBytes);
  const int code = InChild([&] {
    handle.descriptor = ::dup(handle.descriptor);
    const auto mapped = device_->Import(handle);
    if (!mapped || (*mapped)->size() != kBytes || !Holds((*mapped)->data(), kBytes, 1)) return 1;
    Fill((*mapped)->data(), kBytes, 2);
    return 0;
  });
  EXPECT_EQ(code, 0);
  EXPECT_TRUE(Holds(buffer->data(), kBytes, 2));
}

TEST_F(HostTest, WhatWasImportedOutlivesTheOneThatExported) {
  auto buffer = Make(Place::kShared, 5000);
  Fill(buffer->data(), 5000, 3);
  Handle handle = device_->Export(*buffer).value();
  handle.descriptor = ::dup(handle.descriptor);
  const auto mapped = device_->Import(handle).value();
  buffer.reset();
  EXPECT_TRUE(Holds(mapped->data(), 5000, 3));
}

TEST_F(HostTest, NobodyChangesTheSizeOfWhatIsMapped) {
  const auto buffer = Make(Place::kShared, 8192);
  const int fd = device_->Export(*buffer).value().descriptor;
  EXPECT_NE(::ftruncate(fd, 0), 0);
  EXPECT_NE(::ftruncate(fd, 16384), 0);
}

TEST_F(HostTest, HandlesThatAreWrongAreRefused) {
  const auto buffer = Make(Place::kShared, 8192);
  const int fd = device_->Export(*buffer).value().descriptor;
  const auto code_of = [&](Kind kind, std::uint64_t bytes, int descriptor) {
    Handle handle;
    handle.kind = kind;
    handle.bytes = bytes;
    handle.descriptor = descriptor;
    const auto mapped = device_->Import(handle);
    return mapped ? Errc::kInternal : mapped.error().code;
  };
  EXPECT_EQ(code_of(Kind::kCuda, 8192, ::dup(fd)), Errc::kBadInput);
  EXPECT_EQ(code_of(Kind::kHost, 4096, ::dup(fd)), Errc::kBadInput);
  EXPECT_EQ(code_of(Kind::kHost, 8192, -1), Errc::kIo);
  // Another process could still change this file's size: a later read would then end this one.
  const int open = ::memfd_create("test", MFD_ALLOW_SEALING);
  ASSERT_EQ(::ftruncate(open, 8192), 0);
  EXPECT_EQ(code_of(Kind::kHost, 8192, open), Errc::kBadInput);
  // No huge pages may be left at a later read.
  constexpr std::uint64_t kHugePage = std::uint64_t{2} << 20;
  const int huge = ::memfd_create("test", MFD_ALLOW_SEALING | MFD_HUGETLB);
  if (huge >= 0) {
    ASSERT_EQ(::ftruncate(huge, kHugePage), 0);
    ASSERT_EQ(::fcntl(huge, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
    EXPECT_EQ(code_of(Kind::kHost, kHugePage, huge), Errc::kBadInput);
  }
  const auto own = Make(Place::kPageable, 8192);
  EXPECT_FALSE(device_->Export(*own).has_value());
}

TEST_F(HostTest, ASealedBufferIsReadOnlyForOthers) {
  const auto buffer = Make(Place::kShared, 4096);
  Fill(buffer->data(), 4096, 4);
  Handle handle = device_->Export(*buffer).value();
  ASSERT_EQ(::fcntl(handle.descriptor, F_ADD_SEALS, F_SEAL_FUTURE_WRITE), 0);
  const auto child = [&](bool write) {
    return InChild([&] {
      handle.descriptor = ::dup(handle.descriptor);
      const auto mapped = device_->Import(handle);
      if (!mapped || !Holds((*mapped)->data(), 4096, 4)) return 1;
      if (write) *static_cast<volatile std::byte*>((*mapped)->data()) = std::byte{9};
      return 0;
    });
  };
  EXPECT_EQ(child(false), 0);
  EXPECT_NE(child(true), 0) << "a write has to end the process that does it";
  EXPECT_TRUE(Holds(buffer->data(), 4096, 4));
}

TEST_F(HostTest, StreamsCopyAtOnce) {
  const auto stream = device_->MakeStream().value();
  const auto from = Make(Place::kPinned, 4096);
  const auto to = Make(Place::kShared, 4096);
  Fill(from->data(), 4096, 5);
  ASSERT_TRUE(stream->Copy(to->data(), from->data(), 4096));
  const auto event = stream->Record().value();
  ASSERT_TRUE(event->Wait());
  EXPECT_TRUE(Holds(to->data(), 4096, 5));
  ASSERT_TRUE(stream->Synchronize());
}

}  // namespace
}  // namespace shardwright::device
