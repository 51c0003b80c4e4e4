// SPDX-License-Identifier: Apache-2.0
// Memory, streams and copies of the cuda backend, on real devices and on doubles.

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "engine/device/device.h"
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
    return Same(bytes, found, "after a refusal");
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

TEST(CudaDevice, AnEventOutlivesItsStream) {
  OnRanks(1, [](Rank& rank) -> Status {
    constexpr std::uint64_t kBytes = 100000;
    SW_TRY_ASSIGN(const auto from, rank.device.Allocate(Place::kPinned, kBytes));
    SW_TRY_ASSIGN(const auto to, rank.device.Allocate(Place::kPinned, kBytes));
    const auto bytes = Pattern(kBytes, 5);
    std::memcpy(from->data(), bytes.data(), kBytes);
    std::unique_ptr<Event> event;
    {
      SW_TRY_ASSIGN(const auto stream, rank.device.MakeStream());
      SW_TRY(stream->Copy(to->data(), from->data(), kBytes));
      SW_TRY_ASSIGN(event, stream->Record());
    }
    SW_TRY(event->Wait());
    return Same(bytes, {to->data(), kBytes}, "before an event");
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

}  // namespace
}  // namespace shardwright::device::cuda
