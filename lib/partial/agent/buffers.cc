// SPDX-License-Identifier: Apache-2.0
#include "partial/agent/buffers.h"

#include <string>
#include <utility>

namespace shardwright::partial {

const char* Name(BufferState state) {
  switch (state) {
    case BufferState::kIdle:
      return "idle";
    case BufferState::kFilling:
      return "filling";
    case BufferState::kFilled:
      return "filled";
    case BufferState::kPersisting:
      return "persisting";
    case BufferState::kRecovery:
      break;
  }
  return "recovery";
}

std::optional<std::size_t> SnapshotBuffers::Find(BufferState state) const {
  std::optional<std::size_t> found;
  for (std::size_t i = 0; i < kBuffers; ++i) {
    if (buffers_[i].state != state) continue;
    if (!found || IsNewer(buffers_[i], buffers_[*found])) found = i;
  }
  return found;
}

std::optional<std::size_t> SnapshotBuffers::NewestComplete() const {
  std::optional<std::size_t> found;
  for (std::size_t i = 0; i < kBuffers; ++i) {
    const BufferState state = buffers_[i].state;
    if (state == BufferState::kIdle || state == BufferState::kFilling) continue;
    if (!found || IsNewer(buffers_[i], buffers_[*found])) found = i;
  }
  return found;
}

void SnapshotBuffers::MakeIdle(std::size_t buffer) { buffers_[buffer] = Buffer(); }

Result<std::size_t> SnapshotBuffers::Begin(std::uint64_t iteration) {
  if (const auto filling = Find(BufferState::kFilling)) {
    return Fail(Errc::kBusy, "snapshot of iteration ", iteration, ": the snapshot of iteration ",
                buffers_[*filling].iteration, " is still in progress");
  }
  Content content;
  if (const auto newest = NewestComplete()) {
    if (iteration < buffers_[*newest].iteration) {
      return Fail(Errc::kUsage, "snapshot of iteration ", iteration,
                  ": the newer snapshot of iteration ", buffers_[*newest].iteration,
                  " already exists");
    }
    content = buffers_[*newest].content;
  }
  std::optional<std::size_t> chosen = Find(BufferState::kIdle);
  if (!chosen) {
    // At most one is persisting and one for recovery, so one is filled. Take the oldest.
    for (std::size_t i = 0; i < kBuffers; ++i) {
      const Buffer& buffer = buffers_[i];
      if (buffer.state != BufferState::kFilled) continue;
      if (!chosen || IsNewer(buffers_[*chosen], buffer)) chosen = i;
    }
    SW_CHECK(chosen.has_value());
    ++skipped_;
  }
  buffers_[*chosen] = {BufferState::kFilling, iteration, ++begun_, std::move(content)};
  return *chosen;
}

Status SnapshotBuffers::Put(const ModuleId& module, std::shared_ptr<const void> data) {
  const auto filling = Find(BufferState::kFilling);
  if (!filling) return Fail(Errc::kUsage, Name(module), ": no snapshot has begun");
  Buffer& buffer = buffers_[*filling];
  buffer.content[module] = {buffer.iteration, std::move(data)};
  return {};
}

Status SnapshotBuffers::End() {
  const auto filling = Find(BufferState::kFilling);
  if (!filling) return Fail(Errc::kUsage, "no snapshot has begun");
  Buffer& buffer = buffers_[*filling];
  for (const auto& [module, blob] : buffer.content) {
    if (module.is_complete() && blob.version != buffer.iteration) {
      return Fail(Errc::kMismatch, Name(module), " is of iteration ", blob.version,
                  " in a snapshot of iteration ", buffer.iteration);
    }
  }
  buffer.state = BufferState::kFilled;
  for (std::size_t i = 0; i < kBuffers; ++i) {
    const Buffer& other = buffers_[i];
    if (i == *filling || other.state != BufferState::kFilled) continue;
    if (other.iteration != buffer.iteration) continue;
    MakeIdle(i);
    ++skipped_;
  }
  return {};
}

bool SnapshotBuffers::Advance(std::size_t buffer, const ModuleId& module,
                              const std::shared_ptr<const void>& from, Blob to) {
  const auto held = buffers_[buffer].content.find(module);
  if (held == buffers_[buffer].content.end() || held->second.data != from) return false;
  held->second = std::move(to);
  return true;
}

void SnapshotBuffers::AbandonFilling() {
  if (const auto filling = Find(BufferState::kFilling)) MakeIdle(*filling);
}

std::optional<std::size_t> SnapshotBuffers::StartPersist() {
  if (Find(BufferState::kPersisting)) return std::nullopt;
  const std::optional<std::size_t> newest = Find(BufferState::kFilled);
  if (!newest) return std::nullopt;
  buffers_[*newest].state = BufferState::kPersisting;
  while (const auto older = Find(BufferState::kFilled)) {
    MakeIdle(*older);
    ++skipped_;
  }
  return newest;
}

Status SnapshotBuffers::EndPersist() {
  const auto persisting = Find(BufferState::kPersisting);
  if (!persisting) return Fail(Errc::kUsage, "no snapshot is being persisted");
  if (const auto before = Find(BufferState::kRecovery)) MakeIdle(*before);
  buffers_[*persisting].state = BufferState::kRecovery;
  return {};
}

Status SnapshotBuffers::FailPersist() {
  const auto persisting = Find(BufferState::kPersisting);
  if (!persisting) return Fail(Errc::kUsage, "no snapshot is being persisted");
  ++failed_;
  if (Find(BufferState::kFilled)) {  // filled later, so newer
    MakeIdle(*persisting);
    ++skipped_;
  } else {
    buffers_[*persisting].state = BufferState::kFilled;
  }
  return {};
}

void SnapshotBuffers::Rollback(std::uint64_t resume) {
  for (std::size_t i = 0; i < kBuffers; ++i) {
    if (buffers_[i].iteration > resume) MakeIdle(i);
  }
}

}  // namespace shardwright::partial
