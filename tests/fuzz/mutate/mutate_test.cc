// SPDX-License-Identifier: Apache-2.0
// Mutations are useful if they differ, and if many pass the checks that stop random
// bytes.

#include "fuzz/mutate/mutate.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>

#include "files/pickle/reader.h"
#include "files/safetensors/header.h"
#include "files/torch_pt/reader.h"
#include "support/os/file.h"

namespace shardwright::fuzz {
namespace {

constexpr std::uint32_t kMutations = 3000;

/// One bit, or one byte more.
std::string Plain(std::string bytes) {
  if (bytes.empty()) return "x";
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 1);
  return bytes;
}

std::vector<std::string> Seeds(const std::string& target) {
  std::vector<std::string> seeds;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::string(SW_CORPUS) + "/" + target)) {
    std::ifstream file(entry.path(), std::ios::binary);
    seeds.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return seeds;
}

/// Of all mutations of valid seeds, counts those that differ, and those that `accept` accepts.
struct Yield {
  std::size_t differ = 0;
  std::size_t accepted = 0;
};

Yield Try(const std::string& target, Mutation mutation,
          const std::function<bool(const std::string&)>& accept) {
  std::vector<std::string> sound = Seeds(target);
  std::erase_if(sound, [&](const std::string& seed) { return !accept(seed); });
  EXPECT_GE(sound.size(), 2U);
  std::set<std::string> made;
  Yield yield;
  for (std::uint32_t seed = 0; seed < kMutations && !sound.empty(); ++seed) {
    Chance chance(seed, Plain);
    const std::string& before = sound[seed % sound.size()];
    const std::string after = mutation(before, chance);
    Chance again(seed, Plain);
    EXPECT_EQ(mutation(before, again), after);
    if (after == before || !made.insert(after).second) continue;
    yield.accepted += accept(after) ? 1 : 0;
  }
  yield.differ = made.size();
  return yield;
}

Result<os::File> InMemory(const std::string& bytes, int* memory) {
  *memory = memfd_create("mutated", 0);
  EXPECT_EQ(write(*memory, bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  return os::File::OpenRead("/proc/self/fd/" + std::to_string(*memory));
}

TEST(MutateTest, PicklesAreReadToTheirEnd) {
  const Yield yield = Try("fuzz_pickle", MutatePickle,
                          [](const std::string& bytes) { return pickle::Load(bytes).has_value(); });
  EXPECT_GT(yield.differ, kMutations * 2 / 3);
  EXPECT_GT(yield.accepted, kMutations / 20);
}

TEST(MutateTest, ArchivesAreOpened) {
  const Yield yield = Try("fuzz_container", MutateZip, [](const std::string& bytes) {
    int memory = -1;
    const auto file = InMemory(bytes, &memory);
    const bool read = bytes.starts_with("PK") && file && torch_pt::ReadMetadata(*file);
    close(memory);
    return read;
  });
  EXPECT_GT(yield.differ, kMutations * 2 / 3);
  EXPECT_GT(yield.accepted, kMutations / 10);
}

TEST(MutateTest, HeadersOfSafetensorsCoverTheirFile) {
  const Yield yield = Try("fuzz_safetensors", MutateSafetensors, [](const std::string& bytes) {
    int memory = -1;
    const auto file = InMemory(bytes, &memory);
    const auto header = file && bytes.front() != 'i' ? safetensors::ReadHeader(*file)
                                                     : Fail(Errc::kBadInput, "an index");
    close(memory);
    return header.has_value();
  });
  EXPECT_GT(yield.differ, kMutations / 3);
  EXPECT_GT(yield.accepted, kMutations / 10);
}

TEST(MutateTest, HeadersMayHoldAnything) {
  const std::string header =
      R"({"__metadata__": 7, "t": {"dtype": "F99999999999999999999", "shape": [2]}})";
  const std::string file = Little(header.size(), 8) + header + "ab";
  for (std::uint32_t seed = 0; seed < 100; ++seed) {
    Chance chance(seed, Plain);
    EXPECT_NO_THROW((void)MutateSafetensors(file, chance)) << seed;
  }
}

TEST(MutateTest, TheSecondPickleIsFoundAgain) {
  const std::string both = Little(2 + 2, 2) + "N." + "]q\1.";
  for (std::uint32_t seed = 0; seed < 100; ++seed) {
    Chance chance(seed, Plain);
    const std::string made = MutateTwoPickles(both, chance);
    const std::size_t split = Number(std::string_view(made).substr(0, 2));
    ASSERT_LE(split, made.size());
    EXPECT_TRUE(made.substr(2, split - 2) == "N." || made.substr(split) == "]q\1.");
  }
}

}  // namespace
}  // namespace shardwright::fuzz
