// SPDX-License-Identifier: Apache-2.0
#include "partial/agent/memory/memory.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "checkpoints/registry.h"
#include "engine/layout/cut.h"
#include "partial/store/modules.h"
#include "support/base/bytes.h"

namespace shardwright::partial {
namespace {

/// Reads members from blobs in memory. Thread-safe.
class MemoryBytes final : public exec::ByteSource {
 public:
  struct Place {
    BlobPtr blob;  ///< null: not in memory
    std::uint64_t offset = 0;
  };

  explicit MemoryBytes(std::vector<Place> places) : places_(std::move(places)) {}

  Status Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) override {
    const Place& place = places_[member];
    if (!place.blob) {
      return Fail(Errc::kInternal, "member ", member, " is not in memory");
    }
    std::memcpy(out.data(), place.blob->bytes().data() + place.offset + offset, out.size());
    bytes_.fetch_add(out.size(), std::memory_order_relaxed);
    return {};
  }
  std::uint64_t bytes_read() const override { return bytes_.load(std::memory_order_relaxed); }
  std::uint64_t files_read() const override { return 0; }

 private:
  const std::vector<Place> places_;
  std::atomic<std::uint64_t> bytes_ = 0;
};

/// Finds a blob of a manifest. \error kBadInput  missing or wrong size
Result<BlobPtr> BlobOf(const MemoryCheckpoint& checkpoint, const BlobRef& ref, std::uint64_t bytes,
                       const std::string& what) {
  const auto found = checkpoint.blobs.find(ref.digest);
  if (found == checkpoint.blobs.end()) {
    return Fail(Errc::kBadInput, what, ": blob ", exec::Hex(ref.digest), " is not in memory");
  }
  if (ref.bytes != bytes || found->second->ref().bytes != bytes) {
    return Fail(Errc::kBadInput, what, ": ", bytes, " bytes expected, found ",
                found->second->ref().bytes);
  }
  return found->second;
}

/// Makes the map of a checkpoint refer to blobs in memory.
class MapBuilder {
 public:
  MapBuilder(const MemoryCheckpoint& checkpoint, const checkpoints::Checkpoint& source)
      : checkpoint_(checkpoint), source_(source) {}

  Result<std::unique_ptr<exec::ByteSource>> Build(const Model& model, layout::ShardMap* out) {
    map_.files = {"memory"};
    map_.tensors.resize(source_.map.tensors.size());
    SW_TRY(AddPassed());
    for (std::size_t i = 0; i < model.modules.size(); ++i) {
      for (const Component component : kAllComponents)
        SW_TRY(AddPart(model.modules[i], i, component));
    }
    *out = std::move(map_);
    return std::unique_ptr<exec::ByteSource>(std::make_unique<MemoryBytes>(std::move(places_)));
  }

 private:
  /// Passed members keep the numbers that the documents use; the other numbers are unused.
  Status AddPassed() {
    map_.members.assign(source_.map.members.size(), {0, 0, 0, std::nullopt, "not in memory"});
    places_.resize(source_.map.members.size());
    const std::vector<std::uint32_t> members = PassedMembers(source_);
    std::uint64_t bytes = 0;
    for (const std::uint32_t member : members) bytes += source_.map.members[member].bytes;
    const auto& ref = checkpoint_.manifest.passed;
    if (members.empty() || !ref) {
      if (members.empty() == !ref) return {};
      return Fail(Errc::kBadInput, "client state: ", bytes, " bytes expected, found ",
                  ref ? ref->bytes : 0);
    }
    SW_TRY_ASSIGN(const BlobPtr blob, BlobOf(checkpoint_, *ref, bytes, "client state"));
    std::uint64_t offset = 0;
    for (const std::uint32_t member : members) {
      map_.members[member] = source_.map.members[member];
      map_.members[member].file = 0;
      places_[member] = {blob, offset};
      offset += map_.members[member].bytes;
    }
    return {};
  }

  Status AddPart(const Module& module, std::size_t index, Component component) {
    const ModulePart& part = module.part(component);
    const std::string what = module.name + " " + std::string(Name(component));
    const auto& held = checkpoint_.manifest.modules[index][static_cast<std::size_t>(component)];
    const auto member = static_cast<std::uint32_t>(map_.members.size());
    map_.members.push_back({0, 0, part.bytes, std::nullopt, what});
    places_.emplace_back();
    if (held) {
      SW_TRY_ASSIGN(BlobPtr blob, BlobOf(checkpoint_, held->blob, part.bytes, what));
      if (held->version == checkpoint_.manifest.iteration) {
        map_.members.back().crc32 = held->blob.crc32;
        places_.back().blob = std::move(blob);
      }
    }
    for (const ModuleTensor& one : part.tensors) {
      const layout::LogicalTensor& from = source_.map.tensors[one.tensor];
      layout::LogicalTensor& to = map_.tensors[one.tensor];
      to = {from.name, from.state, from.dtype, from.shape, {}};
      layout::Fragment whole;
      whole.cut = std::make_shared<const layout::Cut>(layout::Cut::Whole(from.shape));
      whole.at.array = static_cast<std::uint32_t>(map_.arrays.size());
      to.fragments.push_back(std::move(whole));
      map_.arrays.push_back({from.dtype, {{member, one.offset, Elems(from.shape)}}});
    }
    return {};
  }

  const MemoryCheckpoint& checkpoint_;
  const checkpoints::Checkpoint& source_;
  layout::ShardMap map_;
  std::vector<MemoryBytes::Place> places_;
};

}  // namespace

Status MemoryPool::Count(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  return CountLocked(bytes);
}

/// \pre the caller has locked mutex_
Status MemoryPool::CountLocked(std::uint64_t bytes) {
  if (bytes > limit_bytes_ || used_bytes_ > limit_bytes_ - bytes) {
    return Fail(Errc::kLimit, FormatBytes(bytes), " needed in addition to ",
                FormatBytes(used_bytes_), " in use; the limit is ", FormatBytes(limit_bytes_),
                "; raise --memory-limit");
  }
  used_bytes_ += bytes;
  while (free_bytes_ > limit_bytes_ - used_bytes_) {
    free_bytes_ -= free_.begin()->first;
    free_.erase(free_.begin());
  }
  return {};
}

void MemoryPool::Free(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  used_bytes_ -= bytes;
}

Result<BlobMemory> MemoryPool::Take(std::uint64_t bytes) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = free_.find(bytes); found != free_.end()) {
      BlobMemory buffer = std::move(found->second);
      free_.erase(found);
      free_bytes_ -= bytes;
      used_bytes_ += bytes;
      return buffer;
    }
    SW_TRY(CountLocked(bytes));
  }
  BlobMemory buffer = MakeBlobMemory(bytes);
  if (buffer) return buffer;
  Free(bytes);
  return Fail(Errc::kLimit, "cannot allocate ", FormatBytes(bytes), " of memory");
}

void MemoryPool::Give(BlobMemory buffer, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  used_bytes_ -= bytes;
  free_bytes_ += bytes;
  free_.emplace(bytes, std::move(buffer));
}

Status MemoryPool::CheckRoom(std::uint64_t bytes, const std::string& what) const {
  const std::uint64_t used = used_bytes();
  if (bytes <= limit_bytes_ && used <= limit_bytes_ - bytes) return {};
  return Fail(Errc::kLimit, what, ": ", FormatBytes(bytes), " needed in addition to ",
              FormatBytes(used), " in use; the limit is ", FormatBytes(limit_bytes_),
              "; raise --memory-limit");
}

void MemoryPool::Reserve(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  reserved_bytes_ = bytes;
}

Status MemoryPool::CheckSpare(std::uint64_t bytes) const {
  const std::lock_guard lock(mutex_);
  const std::uint64_t free = limit_bytes_ - used_bytes_;
  if (reserved_bytes_ <= free && bytes <= free - reserved_bytes_) return {};
  return Fail(Errc::kLimit, FormatBytes(bytes), " needed in addition to ",
              FormatBytes(reserved_bytes_), " reserved for the next snapshot and ",
              FormatBytes(used_bytes_), " in use; the limit is ", FormatBytes(limit_bytes_),
              "; raise --memory-limit");
}

std::uint64_t MemoryPool::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return used_bytes_;
}

Counted::Counted(Counted&& other) noexcept
    : pool_(std::move(other.pool_)), bytes_(std::exchange(other.bytes_, 0)) {}

Counted& Counted::operator=(Counted&& other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Counted::~Counted() {
  if (bytes_ > 0) pool_->Free(bytes_);
}

Status Counted::Grow(std::uint64_t bytes) {
  SW_TRY(pool_->Count(bytes));
  bytes_ += bytes;
  return {};
}

bool IsAllOf(const StoredModule& module, std::uint64_t version) {
  const bool held = std::ranges::any_of(module, [](const auto& part) { return part.has_value(); });
  return held && std::ranges::all_of(module, [&](const std::optional<StoredComponent>& part) {
           return !part || part->version == version;
         });
}

Result<std::unique_ptr<convert::Input>> OpenMemory(const MemoryCheckpoint& checkpoint,
                                                   const std::vector<std::string>& pattern_files) {
  const Manifest& manifest = checkpoint.manifest;
  const exec::Digest catalogue = exec::DigestOf(std::as_bytes(std::span(checkpoint.catalogue)));
  if (catalogue != manifest.catalogue) {
    return Fail(Errc::kBadInput, "catalogue of iteration ", manifest.iteration, ": digest ",
                exec::Hex(manifest.catalogue), " expected, found ", exec::Hex(catalogue));
  }
  auto input = std::make_unique<convert::Input>();
  SW_TRY_ASSIGN(input->set, checkpoints::DeserializeSource(checkpoint.catalogue));
  SW_TRY_ASSIGN(input->patterns, convert::ReadPatterns(pattern_files));
  SW_TRY_ASSIGN(input->checkpoint, checkpoints::ReadCheckpoint(input->set, input->patterns));
  SW_TRY_ASSIGN(const Model model, DescribeModel(input->checkpoint));
  if (model.modules.size() != manifest.modules.size()) {
    return Fail(Errc::kBadInput, "manifest of iteration ", manifest.iteration, ": ",
                model.modules.size(), " modules expected, found ", manifest.modules.size());
  }
  for (std::size_t i = 0; i < model.modules.size(); ++i) {
    if (model.modules[i].name == manifest.names[i]) continue;
    return Fail(Errc::kBadInput, "module ", i, ": ", model.modules[i].name, " expected, found ",
                manifest.names[i]);
  }
  layout::ShardMap map;
  SW_TRY_ASSIGN(input->bytes, MapBuilder(checkpoint, input->checkpoint).Build(model, &map));
  input->checkpoint.map = std::move(map);
  input->checkpoint.proved = false;
  std::memcpy(input->fingerprint.data(), manifest.catalogue.data(), manifest.catalogue.size());
  return input;
}

}  // namespace shardwright::partial
