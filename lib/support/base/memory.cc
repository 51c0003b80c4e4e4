// SPDX-License-Identifier: Apache-2.0
#include "support/base/memory.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <new>

#include "support/base/bytes.h"

namespace shardwright {
namespace {

thread_local bool wanting = false;
thread_local int ends = 0;  // number of EndsWithoutMemory objects
std::new_handler former = nullptr;

constexpr std::uint64_t kTextMemoryMin = std::uint64_t{64} << 20;
constexpr std::uint64_t kTimesText = 8;  // ordinary texts take up to six times their size
std::atomic<std::uint64_t> text_memory = std::uint64_t{1} << 30;

void NoMemory() {
  wanting = true;
  if (ends > 0) {
    try {
      throw std::bad_alloc();  // for the terminate handler, which rethrows it
    } catch (...) {
      std::terminate();
    }
  }
  if (former == nullptr) throw std::bad_alloc();
  former();
}

}  // namespace

void WatchMemory() {
  [[maybe_unused]] static const bool kWatched = (former = std::set_new_handler(NoMemory), true);
}

bool MemoryWasWanting() { return wanting; }

EndsWithoutMemory::EndsWithoutMemory() {
  WatchMemory();
  ++ends;
}
EndsWithoutMemory::~EndsWithoutMemory() { --ends; }

std::uint64_t TextMemory() { return text_memory; }

void LimitTextMemory(std::uint64_t bytes) { text_memory = std::max(bytes, kTextMemoryMin); }

TextBudget::TextBudget(std::uint64_t bytes)
    : bytes_(bytes), most_(std::max(TextMemory(), kTimesText * bytes)), left_(most_) {}

tl::unexpected<Error> TextBudget::Exceeded(const std::string& where) const {
  return Fail(Errc::kLimit, where, ": ", FormatBytes(bytes_), " of text take more than ",
              FormatBytes(most_),
              " of memory once parsed; split the file, or raise --memory if "
              "the command has this flag");
}

}  // namespace shardwright
