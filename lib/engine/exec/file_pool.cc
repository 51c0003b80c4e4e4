// SPDX-License-Identifier: Apache-2.0
#include "engine/exec/file_pool.h"

#include <utility>

namespace shardwright::exec {

FilePool::FilePool(Open open, std::size_t limit)
    : open_(std::move(open)), limit_(limit), closed_(std::make_shared<Closed>()) {}

Result<std::shared_ptr<const os::File>> FilePool::Get(std::uint32_t file) {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (const auto found = entries_.find(file); found != entries_.end()) {
      recent_.splice(recent_.begin(), recent_, found->second.recent);
      return found->second.file;
    }
    if (opening_.insert(file).second) break;
    opened_.wait(lock);
  }
  lock.unlock();
  Result<os::File> opened = Fail(Errc::kInternal, "not opened");
  try {
    opened = open_(file);
  } catch (...) {
    lock.lock();
    opening_.erase(file);
    opened_.notify_all();
    throw;
  }
  lock.lock();
  opening_.erase(file);
  opened_.notify_all();
  if (!opened) return tl::unexpected<Error>(std::move(opened).error());
  return Store(std::move(lock), file, *std::move(opened));
}

void FilePool::Keep(std::uint32_t file, os::File opened) {
  (void)Store(std::unique_lock(mutex_), file, std::move(opened));
}

std::shared_ptr<const os::File> FilePool::Store(std::unique_lock<std::mutex> lock,
                                                std::uint32_t file, os::File opened) {
  std::shared_ptr<const os::File> oldest;
  seen_[file] = true;
  if (entries_.size() >= limit_) {
    const auto last = entries_.find(recent_.back());
    oldest = std::move(last->second.file);
    entries_.erase(last);
    recent_.pop_back();
  }
  recent_.push_front(file);
  const auto close = [closed = closed_](os::File* done) {
    Status status = done->Close();
    delete done;
    const std::lock_guard one(closed->mutex);
    if (closed->first) closed->first = std::move(status);
  };
  std::shared_ptr<const os::File> shared(new os::File(std::move(opened)), close);
  entries_[file] = {shared, recent_.begin()};
  lock.unlock();  // closing the oldest file may take long
  return shared;
}

void FilePool::Close(std::uint32_t file) {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(file);
  if (found == entries_.end()) return;
  recent_.erase(found->second.recent);
  entries_.erase(found);
}

Status FilePool::CloseAll() {
  {
    const std::lock_guard lock(mutex_);
    entries_.clear();
    recent_.clear();
  }
  const std::lock_guard one(closed_->mutex);
  return closed_->first;
}

std::uint64_t FilePool::opened_count() const {
  const std::lock_guard lock(mutex_);
  return seen_.size();
}

}  // namespace shardwright::exec
