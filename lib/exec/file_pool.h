#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "base/result.h"
#include "os/file.h"

namespace shardwright::exec {

/// Keeps a bounded number of files open; a checkpoint has more of them than a process may have
/// descriptors. Thread-safe.
/// Local.
class FilePool {
 public:
  using Open = std::function<Result<os::File>(std::uint32_t file)>;

  explicit FilePool(Open open, std::size_t limit = 256) : open_(std::move(open)), limit_(limit) {}

  /// The open file; it stays open at least as long as the caller holds it.
  /// \error what `open` returns
  Result<std::shared_ptr<const os::File>> Get(std::uint32_t file);

  /// Closes a file as soon as nobody holds it. It may be opened again.
  void Close(std::uint32_t file);

  /// How many files have been opened for the first time.
  std::uint64_t opened_count() const;

 private:
  struct Entry {
    std::shared_ptr<const os::File> file;
    std::list<std::uint32_t>::iterator recent;
  };
  const Open open_;
  const std::size_t limit_;
  mutable std::mutex mutex_;
  std::unordered_map<std::uint32_t, Entry> entries_;
  std::list<std::uint32_t> recent_;  // most recent first
  std::unordered_map<std::uint32_t, bool> seen_;
};

}  // namespace shardwright::exec
