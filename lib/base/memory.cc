#include "base/memory.h"

#include <exception>
#include <new>

namespace shardwright {
namespace {

thread_local bool wanting = false;
thread_local int ends = 0;  // how many EndsWithoutMemory live
std::new_handler former = nullptr;

void NoMemory() {
  wanting = true;
  if (ends > 0) {
    try {
      throw std::bad_alloc();  // for the terminate handler, which asks what was thrown
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

}  // namespace shardwright
