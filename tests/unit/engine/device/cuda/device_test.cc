// SPDX-License-Identifier: Apache-2.0
// Memory, streams, copies, runs and conversion of the cuda backend, on real devices and on doubles.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "engine/device/device.h"
#include "engine/tensor/convert.h"
#include "inputs.h"
#include "machine.h"

namespace shardwright::device::cuda {
namespace {

constexpr Place kPlaces[] = {Place::kPageable, Place::kPinned, Place::kShared, Place::kDevice};

bool OfHost(Place place) { return place == Place::kPageable || place == Place::kPinned; }

TEST(CudaDevice, SaysWhatItIs) {
  OnRanks(1, [](Rank& rank) -> Status {
    EXPECT_EQ(rank.device.kind(), Kind::kCuda);
    EXPECT_EQ(rank.device.name().substr(0, 7), "cuda:0 ");
    SW_TRY_ASSIGN(const auto before, rank.device.FreeBytes());
    SW_TRY_ASSIGN(const auto buffer, rank.device.Allocate(Place::kDevice, 64 << 20));
    SW_TRY_ASSIGN(const auto after, rank.device.FreeBytes());
    EXPECT_LE(after + (64U << 20), before);
    EXPECT_EQ(buffer->size(), 64U << 20);
    EXPECT_EQ(buffer->place(), Place::kDevice);
    return {};
  });
}

TEST(CudaDevice, RefusesAnOrdinalThatIsNotThere) {
  DeviceOptions options;
  options.ordinal = 4096;
  const auto outcomes = RunRanks(
      1, [](Rank&) { return Status(); }, options);
  if (Devices() == 0) GTEST_SKIP() << "no device";
  ASSERT_FALSE(outcomes[0]);
  EXPECT_EQ(outcomes[0].error().code, Errc::kUsage);
  EXPECT_NE(outcomes[0].error().message.find("4096"), std::string::npos);
}

TEST(CudaDevice, TooMuchMemoryIsALimitThatSaysHowMuchIsFree) {
  OnRanks(1, [](Rank& rank) -> Status {
    for (const Place place : {Place::kShared, Place::kDevice}) {
      const auto buffer = rank.device.Allocate(place, std::uint64_t{1} << 50);
      EXPECT_FALSE(buffer);
      if (buffer) continue;
      EXPECT_EQ(buffer.error().code, Errc::kLimit);
      EXPECT_NE(buffer.error().message.find("1125899906842624"), std::string::npos);
      EXPECT_NE(buffer.error().message.find("free"), std::string::npos);
    }
    const auto all = rank.device.Allocate(Place::kShared, UINT64_MAX);
    EXPECT_FALSE(all);
    // The device keeps working.
    SW_TRY_ASSIGN(const auto stream, rank.device.MakeStream());
    SW_TRY_ASSIGN(const auto buffer, rank.device.Allocate(Place::kDevice, 100));
    const auto bytes = Pattern(100, 1);
    SW_TRY(Write(rank.device, *stream, buffer->data(), bytes));
    SW_TRY_ASSIGN(const auto found, Read(rank.device, *stream, buffer->data(), 100));
    SW_TRY(Same(bytes, found, "after a refusal"));
    // A launch does not report the error of the call before it.
    EXPECT_FALSE(rank.device.Allocate(Place::kDevice, std::uint64_t{1} << 50));
    SW_TRY(stream->Convert(DType::kF32, buffer->data(), DType::kBF16, buffer->data() + 64, 16));
    return stream->Synchronize();
  });
}

TEST(CudaDevice, CopiesBetweenAllPlaces) {
  OnRanks(1, [](Rank& rank) -> Status {
    SW_TRY_ASSIGN(const auto stream, rank.device.MakeStream());
    std::uint64_t seed = 0;
    for (const Place from : kPlaces) {
      for (const Place to : kPlaces) {
        for (const std::uint64_t bytes : {1ULL, 255ULL, 4096ULL, 70001ULL, 3000000ULL}) {
          SW_TRY_ASSIGN(const auto source, rank.device.Allocate(from, bytes));
          SW_TRY_ASSIGN(const auto target, rank.device.Allocate(to, bytes));
          EXPECT_EQ(reinterpret_cast<std::uintptr_t>(source->data()) % 256, 0U);
          const auto expected = Pattern(bytes, ++seed);
          if (OfHost(from)) {
            std::memcpy(source->data(), expected.data(), bytes);
          } else {
            SW_TRY(Write(rank.device, *stream, source->data(), expected));
          }
          SW_TRY(stream->Copy(target->data(), source->data(), bytes));
          SW_TRY(stream->Synchronize());
          std::vector<std::byte> found;
          if (OfHost(to)) {
            found.assign(target->data(), target->data() + bytes);
          } else {
            SW_TRY_ASSIGN(found, Read(rank.device, *stream, target->data(), bytes));
          }
          SW_TRY(Same(expected, found,
                      "place " + std::to_string(static_cast<int>(from)) + " to " +
                          std::to_string(static_cast<int>(to))));
        }
      }
    }
    return {};
  });
}

// Ordinary memory may change once the copy has been waited for. A pinned ring may be filled again
// after its event, as a load does.
TEST(CudaDevice, ARingIsFilledAgainAfterItsEvent) {
  OnRanks(1, [](Rank& rank) -> Status {
    constexpr std::uint64_t kPart = 10000;
    constexpr std::size_t kSlots = 3;
    constexpr std::size_t kParts = 20;
    SW_TRY_ASSIGN(const auto target, rank.device.Allocate(Place::kDevice, kPart * kParts));
    SW_TRY_ASSIGN(const auto ring, rank.device.Allocate(Place::kPinned, kPart * kSlots));
    SW_TRY_ASSIGN(const auto stream, rank.device.MakeStream());
    std::vector<std::unique_ptr<Event>> events(kSlots);
    std::vector<std::byte> expected;
    for (std::size_t i = 0; i < kParts; ++i) {
      std::byte* const slot = ring->data() + i % kSlots * kPart;
      if (events[i % kSlots] != nullptr) SW_TRY(events[i % kSlots]->Wait());
      const auto part = Pattern(kPart, i);
      std::memcpy(slot, part.data(), kPart);
      expected.insert(expected.end(), part.begin(), part.end());
      SW_TRY(stream->Copy(target->data() + i * kPart, slot, kPart));
      SW_TRY_ASSIGN(events[i % kSlots], stream->Record());
    }
    SW_TRY(stream->Synchronize());
    SW_TRY_ASSIGN(const auto found, Read(rank.device, *stream, target->data(), kPart * kParts));
    return Same(expected, found, "a ring");
  });
}

TEST(CudaDevice, AStreamWaitsForAnEventOfAnother) {
  OnRanks(1, [](Rank& rank) -> Status {
    constexpr std::uint64_t kBytes = 100000;
    SW_TRY_ASSIGN(const auto host, rank.device.Allocate(Place::kPinned, kBytes));
    SW_TRY_ASSIGN(const auto middle, rank.device.Allocate(Place::kDevice, kBytes));
    SW_TRY_ASSIGN(const auto last, rank.device.Allocate(Place::kPinned, kBytes));
    const auto bytes = Pattern(kBytes, 5);
    std::memcpy(host->data(), bytes.data(), kBytes);
    std::unique_ptr<Event> event;
    SW_TRY_ASSIGN(const auto other, rank.device.MakeStream());
    {
      SW_TRY_ASSIGN(const auto stream, rank.device.MakeStream());
      SW_TRY(stream->Copy(middle->data(), host->data(), kBytes));
      SW_TRY_ASSIGN(event, stream->Record());
      SW_TRY(other->WaitFor(*event));
      SW_TRY(other->Copy(last->data(), middle->data(), kBytes));
      SW_TRY(other->Synchronize());
    }
    SW_TRY_ASSIGN(const bool ended, event->Ended());  // it outlives its stream
    EXPECT_TRUE(ended);
    SW_TRY(event->Wait());
    return Same(bytes, {last->data(), kBytes}, "behind an event");
  });
}

// Destroying a stream ends its queued work.
TEST(CudaDevice, AStreamEndsItsWork) {
  OnRanks(1, [](Rank& rank) -> Status {
    SW_TRY_ASSIGN(const auto from, rank.device.Allocate(Place::kPinned, 5000));
    SW_TRY_ASSIGN(const auto to, rank.device.Allocate(Place::kPinned, 5000));
    std::memset(from->data(), 7, 5000);
    std::memset(to->data(), 0, 5000);
    {
      SW_TRY_ASSIGN(const auto stream, rank.device.MakeStream());
      SW_TRY(stream->Copy(to->data(), from->data(), 5000));
    }
    return Same({from->data(), 5000}, {to->data(), 5000}, "after the stream");
  });
}

TEST(CudaDevice, MovesRuns) {
  OnRanks(1, [](Rank& rank) -> Status {
    constexpr std::uint64_t kBytes = 4 << 20;
    SW_TRY_ASSIGN(const auto stream, rank.device.MakeStream());
    for (const Place place : {Place::kPinned, Place::kShared, Place::kDevice}) {
      SW_TRY_ASSIGN(const auto source, rank.device.Allocate(place, kBytes));
      SW_TRY_ASSIGN(const auto target, rank.device.Allocate(Place::kDevice, kBytes));
      const auto bytes = Pattern(kBytes, 3);
      SW_TRY(stream->Copy(source->data(), bytes.data(), kBytes));
      std::mt19937_64 random(static_cast<unsigned>(place));
      for (const std::uint64_t longest : {3ULL, 40ULL, 700ULL, 20000ULL, 3000000ULL}) {
        std::vector<std::byte> expected(kBytes, std::byte{0});
        SW_TRY(stream->Copy(target->data(), expected.data(), kBytes));
        std::vector<device::Run> runs;
        for (std::uint64_t at = random() % 64; at < kBytes && runs.size() < 900;) {
          const std::uint64_t most = std::min(longest, kBytes - at);
          const std::uint64_t length = random() % (most + 1);
          const std::uint64_t from = random() % (kBytes - length + 1);
          runs.push_back({from, at, length});
          std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(from), length,
                      expected.begin() + static_cast<std::ptrdiff_t>(at));
          at += length + random() % 30;
        }
        std::shuffle(runs.begin(), runs.end(), random);
        SW_TRY(stream->CopyRuns(target->data(), source->data(), runs));
        std::fill(runs.begin(), runs.end(), device::Run{});  // the runs may go
        SW_TRY_ASSIGN(const auto found, Read(rank.device, *stream, target->data(), kBytes));
        SW_TRY(Same(expected, found, "runs of at most " + std::to_string(longest)));
      }
    }
    std::vector<std::byte> ordinary(100);
    SW_TRY_ASSIGN(const auto target, rank.device.Allocate(Place::kDevice, 100));
    const device::Run run{0, 0, 100};
    EXPECT_FALSE(stream->CopyRuns(target->data(), ordinary.data(), {&run, 1}));
    return {};
  });
}

// Every pair, bit for bit as Convert: all values of 8 and 16 bits, and of wider types all kinds.
TEST(CudaDevice, ConvertsAsTheHostDoes) {
  OnRanks(1, [](Rank& rank) -> Status {
    SW_TRY_ASSIGN(const auto stream, rank.device.MakeStream());
    int pairs = 0;
    for (const DType from : kFloating) {
      const auto inputs = Inputs(from);
      const std::uint64_t elems = inputs.size() / ItemSize(from);
      SW_TRY_ASSIGN(const auto source, rank.device.Allocate(Place::kDevice, inputs.size()));
      SW_TRY(Write(rank.device, *stream, source->data(), inputs));
      for (const DType to : kFloating) {
        if (!CanConvert(from, to)) {
          EXPECT_FALSE(stream->Convert(to, source->data(), from, source->data(), 1));
          continue;
        }
        ++pairs;
        std::vector<std::byte> expected(elems * ItemSize(to));
        Convert(from, inputs, to, expected);
        SW_TRY_ASSIGN(const auto target, rank.device.Allocate(Place::kDevice, expected.size()));
        SW_TRY(stream->Convert(to, target->data(), from, source->data(), elems));
        SW_TRY_ASSIGN(const auto found,
                      Read(rank.device, *stream, target->data(), expected.size()));
        SW_TRY(Same(expected, found, std::string(Name(from)) + " to " + std::string(Name(to))));
      }
    }
    EXPECT_EQ(pairs, 40 + 8);
    return {};
  });
}

// Operands aligned to one element only, and element counts that no group size divides.
TEST(CudaDevice, ConvertsFromAndToAnyElement) {
  OnRanks(1, [](Rank& rank) -> Status {
    SW_TRY_ASSIGN(const auto stream, rank.device.MakeStream());
    const auto inputs = Pattern(1 << 14, 9);
    SW_TRY_ASSIGN(const auto source, rank.device.Allocate(Place::kDevice, inputs.size()));
    SW_TRY_ASSIGN(const auto target, rank.device.Allocate(Place::kDevice, 1 << 15));
    SW_TRY(Write(rank.device, *stream, source->data(), inputs));
    for (const auto& [from, to] :
         {std::pair(DType::kBF16, DType::kF32), std::pair(DType::kF32, DType::kF8E4M3),
          std::pair(DType::kF8E5M2, DType::kF16)}) {
      for (const std::uint64_t skip : {0ULL, 1ULL, 3ULL, 8ULL}) {
        for (const std::uint64_t elems : {1ULL, 7ULL, 8ULL, 9ULL, 1000ULL}) {
          const std::uint64_t bytes = (elems + 2) * ItemSize(to);
          std::vector<std::byte> expected(bytes, std::byte{0x5A});
          SW_TRY(Write(rank.device, *stream, target->data(), expected));
          const std::uint64_t at = skip * ItemSize(from);
          Convert(from, std::span(inputs).subspan(at, elems * ItemSize(from)), to,
                  std::span(expected).subspan(ItemSize(to), elems * ItemSize(to)));
          SW_TRY(
              stream->Convert(to, target->data() + ItemSize(to), from, source->data() + at, elems));
          SW_TRY_ASSIGN(const auto found, Read(rank.device, *stream, target->data(), bytes));
          SW_TRY(Same(expected, found, "from element " + std::to_string(skip)));
        }
      }
    }
    return {};
  });
}

}  // namespace
}  // namespace shardwright::device::cuda
