#include "exec/file_pool.h"

namespace shardwright::exec {

Result<std::shared_ptr<const os::File>> FilePool::Get(std::uint32_t file) {
  const std::lock_guard lock(mutex_);
  if (const auto found = entries_.find(file); found != entries_.end()) {
    recent_.splice(recent_.begin(), recent_, found->second.recent);
    return found->second.file;
  }
  SW_TRY_ASSIGN(os::File opened, open_(file));
  seen_[file] = true;
  if (entries_.size() >= limit_) {
    entries_.erase(recent_.back());
    recent_.pop_back();
  }
  recent_.push_front(file);
  auto shared = std::make_shared<const os::File>(std::move(opened));
  entries_[file] = {shared, recent_.begin()};
  return shared;
}

void FilePool::Close(std::uint32_t file) {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(file);
  if (found == entries_.end()) return;
  recent_.erase(found->second.recent);
  entries_.erase(found);
}

std::uint64_t FilePool::opened_count() const {
  const std::lock_guard lock(mutex_);
  return seen_.size();
}

}  // namespace shardwright::exec
