#pragma once

namespace shardwright {

/// Makes `operator new` note where it finds no memory, in the whole process; what it then does is
/// what it did before. Again: nothing.
/// Local.
void WatchMemory();

/// Whether `operator new` has found no memory in this thread since WatchMemory().
/// Local.
bool MemoryWasWanting();

/// As long as one lives, want of memory in its thread ends the process as std::terminate() does,
/// with std::bad_alloc as what was thrown. For libraries that do not bear that exception.
/// Local.
class EndsWithoutMemory {
 public:
  EndsWithoutMemory();
  ~EndsWithoutMemory();
  EndsWithoutMemory(const EndsWithoutMemory&) = delete;
  EndsWithoutMemory& operator=(const EndsWithoutMemory&) = delete;
};

}  // namespace shardwright
