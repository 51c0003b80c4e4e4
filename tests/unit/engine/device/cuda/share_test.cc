// SPDX-License-Identifier: Apache-2.0
// Device memory that another process maps, on real devices and on doubles. The other process is
// this program again, with the handle to open in its environment.

#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <string>
#include <vector>

#include "engine/device/device.h"
#include "machine.h"

extern char** environ;

namespace shardwright::device::cuda {
namespace {

constexpr const char* kToken = "SHARDWRIGHT_TEST_TOKEN";
constexpr std::uint64_t kBytes = 3000000;

std::string ToHex(const std::string& bytes) {
  std::string hex;
  for (const char byte : bytes) {
    const auto value = static_cast<unsigned char>(byte);
    hex += "0123456789abcdef"[value >> 4];
    hex += "0123456789abcdef"[value & 15];
  }
  return hex;
}

std::string FromHex(const std::string& hex) {
  std::string bytes;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  }
  return bytes;
}

Handle HandleOf(const std::string& token) {
  Handle handle;
  handle.kind = Kind::kCuda;
  handle.bytes = kBytes;
  handle.token = token;
  return handle;
}

// Runs one test of this program in another process. \returns its exit status
int Other(const std::string& test, const std::string& token) {
  std::vector<std::string> texts;
  for (char** each = environ; *each != nullptr; ++each) texts.emplace_back(*each);
  texts.push_back(std::string(kToken) + "=" + ToHex(token));
  std::vector<char*> environment;
  environment.reserve(texts.size() + 1);
  for (std::string& text : texts) environment.push_back(text.data());
  environment.push_back(nullptr);
  std::array<char, 4096> own = {};
  if (readlink("/proc/self/exe", own.data(), own.size() - 1) <= 0) return -1;
  std::string filter = "--gtest_filter=" + test;
  std::string disabled = "--gtest_also_run_disabled_tests";
  char* const arguments[] = {own.data(), filter.data(), disabled.data(), nullptr};
  pid_t pid = 0;
  if (posix_spawn(&pid, own.data(), nullptr, nullptr, arguments, environment.data()) != 0)
    return -1;
  int status = 0;
  waitpid(pid, &status, 0);
  return status;
}

// Disabled here: these run in the other process.
TEST(CudaShareOther, DISABLED_MapsAndReads) {
  const char* const token = std::getenv(kToken);
  ASSERT_NE(token, nullptr) << "for the other process";
  OnRanks(1, [&](Rank& rank) -> Status {
    SW_TRY_ASSIGN(const auto stream, rank.device.MakeStream());
    SW_TRY_ASSIGN(const auto mapped, rank.device.Import(HandleOf(FromHex(token))));
    EXPECT_EQ(mapped->place(), Place::kShared);
    EXPECT_EQ(mapped->size(), kBytes);
    SW_TRY_ASSIGN(const auto found, Read(rank.device, *stream, mapped->data(), kBytes));
    SW_TRY(Same(Pattern(kBytes, 1), found, "mapped"));
    // Also writes bytes that the first process sees.
    return Write(rank.device, *stream, mapped->data(), Pattern(1000, 2));
  });
}

TEST(CudaShareOther, DISABLED_IsKilledWhileItMaps) {
  const char* const token = std::getenv(kToken);
  ASSERT_NE(token, nullptr) << "for the other process";
  OnRanks(1, [&](Rank& rank) -> Status {
    SW_TRY_ASSIGN(const auto mapped, rank.device.Import(HandleOf(FromHex(token))));
    kill(getpid(), SIGKILL);
    return {};
  });
}

TEST(CudaShare, AnotherProcessMapsIt) {
  OnRanks(1, [](Rank& rank) -> Status {
    SW_TRY_ASSIGN(const auto stream, rank.device.MakeStream());
    SW_TRY_ASSIGN(const auto buffer, rank.device.Allocate(Place::kShared, kBytes));
    SW_TRY(Write(rank.device, *stream, buffer->data(), Pattern(kBytes, 1)));
    SW_TRY_ASSIGN(const auto handle, rank.device.Export(*buffer));
    EXPECT_EQ(handle.bytes, kBytes);
    EXPECT_TRUE(WIFSIGNALED(Other("CudaShareOther.DISABLED_IsKilledWhileItMaps", handle.token)));
    EXPECT_EQ(Other("CudaShareOther.DISABLED_MapsAndReads", handle.token), 0);
    SW_TRY_ASSIGN(const auto found, Read(rank.device, *stream, buffer->data(), 1000));
    return Same(Pattern(1000, 2), found, "written by the other");
  });
}

TEST(CudaShare, RefusesWhatIsNoHandle) {
  OnRanks(1, [](Rank& rank) -> Status {
    SW_TRY_ASSIGN(const auto own, rank.device.Allocate(Place::kDevice, kBytes));
    EXPECT_FALSE(rank.device.Export(*own));  // not shared
    SW_TRY_ASSIGN(const auto buffer, rank.device.Allocate(Place::kShared, kBytes));
    SW_TRY_ASSIGN(const auto handle, rank.device.Export(*buffer));
    const auto expect = [&](Handle wrong, Errc code, const std::string& what) {
      const auto mapped = rank.device.Import(std::move(wrong));
      EXPECT_FALSE(mapped) << what;
      EXPECT_TRUE(mapped || mapped.error().code == code) << what;
    };
    Handle wrong = HandleOf(handle.token);
    expect(HandleOf(handle.token), Errc::kIo, "mapped by the process that has it");
    wrong.kind = Kind::kHost;
    expect(std::move(wrong), Errc::kBadInput, "of the host");
    wrong = HandleOf(handle.token);
    ++wrong.bytes;
    expect(std::move(wrong), Errc::kBadInput, "of another size");
    expect(HandleOf(handle.token.substr(1)), Errc::kBadInput, "cut short");
    wrong = HandleOf(handle.token);
    wrong.token[0] = '?';
    expect(std::move(wrong), Errc::kBadInput, "of no form");
    wrong = HandleOf(handle.token);
    wrong.token[8] = static_cast<char>(wrong.token[8] + 1);
    expect(std::move(wrong), Errc::kBadInput, "belongs to another device");
    return {};
  });
}

}  // namespace
}  // namespace shardwright::device::cuda
