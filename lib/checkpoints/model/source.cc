// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/model/source.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <utility>

#include "checkpoints/model/found_files.h"
#include "files/torch_pt/reader.h"
#include "support/base/crc32.h"
#include "support/base/text.h"
#include "support/os/io_threads.h"

namespace shardwright::checkpoints {
namespace {

constexpr std::string_view kUniversal = "_universal";  // the suffix of a universal tag

/// Checks an inlined scalar. Later passes read only payloads, so they would not check it.
Status CheckSum(const std::string& path, const files::Storage& storage, std::string_view bytes) {
  const std::uint32_t crc = Crc32(std::as_bytes(std::span(bytes)));
  if (!storage.crc32 || *storage.crc32 == crc) return {};
  char text[64];
  std::snprintf(text, sizeof text, "CRC-32 %08x expected, %08x found", *storage.crc32, crc);
  return Fail(Errc::kBadInput, path, ": data/", storage.key, ": ", text);
}

/// Reads files in the order of their names, from many threads.
class HeaderReader {
 public:
  explicit HeaderReader(ReadContainers read) : read_(read) {}

  /// Reads the file with a given name. Further files with that name must be copies of it.
  Result<SourceFile> Read(std::span<Found> copies) {
    SW_TRY_ASSIGN(SourceFile first, ReadOne(copies.front()));
    for (const Found& other : copies.subspan(1)) SW_TRY(CheckCopy(first, other));
    return first;
  }

 private:
  Result<SourceFile> ReadOne(Found& found) {
    SW_TRY_ASSIGN(FoundFiles::Opened opened, files_.Open(found));
    SourceFile out;
    out.real = std::move(opened.real);
    out.identity = opened.identity;
    SW_TRY(CheckNotEmpty(found.path, out.identity.bytes));
    Result<std::vector<Container>> containers = ContainersOf(found, opened);
    if (!containers) {
      return tl::unexpected<Error>(
          WithBlank(opened.file, out.identity, std::move(containers).error()));
    }
    out.containers = *std::move(containers);
    for (Container& container : out.containers) {
      const std::lock_guard lock(mutex_);
      container.metadata = metadata_table_.Share(std::move(container.metadata)).first;
    }
    out.path = std::move(found.path);
    out.name = std::move(found.name);
    return out;
  }

  Result<std::vector<Container>> ContainersOf(const Found& found,
                                              const FoundFiles::Opened& opened) const {
    if (found.known == nullptr) return read_(found, opened.file, opened.identity);
    Container container;
    container.metadata = found.known;
    return std::vector<Container>{std::move(container)};
  }

  /// Fails if a second file of the same name is a different file.
  Status CheckCopy(const SourceFile& have, const Found& other) {
    SW_TRY_ASSIGN(const FoundFiles::Opened opened, files_.Open(other));
    if (opened.identity == have.identity) return {};
    bool same = opened.identity.bytes == have.identity.bytes;
    if (same) {
      SW_TRY_ASSIGN(const std::vector<Container> clone, ContainersOf(other, opened));
      same = SameSums(have.containers, clone);
      if (!same) {
        SW_TRY_ASSIGN(same, SameBytes(have.path, other.path, opened.identity.bytes));
      }
    }
    if (same) return {};
    return Fail(Errc::kBadInput, other.path, " and ", have.path,
                ": two different files with the name ", have.name);
  }

  const ReadContainers read_;
  FoundFiles files_;
  std::mutex mutex_;
  MetadataTable metadata_table_;
};

bool SameContainer(const Container& one, const Container& other) {
  const files::ContainerMetadata& a = *one.metadata;
  const files::ContainerMetadata& b = *other.metadata;
  if (a.head != b.head || a.header != b.header || a.storages.size() != b.storages.size()) {
    return false;
  }
  for (std::size_t i = 0; i < a.storages.size(); ++i) {
    const files::Storage& x = a.storages[i];
    const files::Storage& y = b.storages[i];
    if (x.key != y.key || x.bytes != y.bytes || !x.crc32 || x.crc32 != y.crc32) return false;
  }
  return true;
}

std::string WaitText(const std::string& path, double seconds, std::size_t others) {
  std::string text = path + ": not read after " + std::to_string(std::lround(seconds)) + " s";
  if (others > 0) text += ", and " + Plural(others, "other file") + " neither";
  return text + "; still waiting";
}

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

}  // namespace

std::pair<std::shared_ptr<const files::ContainerMetadata>, std::size_t> MetadataTable::Share(
    std::shared_ptr<const files::ContainerMetadata> metadata) {
  const auto same = indices_.find(metadata.get());
  if (same != indices_.end()) return {std::move(metadata), same->second};
  const std::uint32_t sum = Crc32(std::as_bytes(std::span(metadata->header)));
  const auto [first, last] = by_sum_.equal_range(sum);
  for (auto known = first; known != last; ++known) {
    if (*known->second.metadata == *metadata) return {known->second.metadata, known->second.index};
  }
  const std::size_t index = indices_.size();
  indices_.emplace(metadata.get(), index);
  by_sum_.emplace(sum, Known{metadata, index});
  return {std::move(metadata), index};
}

Status CheckNotEmpty(const std::string& path, std::uint64_t bytes) {
  if (bytes > 0) return {};
  return Fail(Errc::kBadInput, path,
              ": the file is empty (0 bytes): its save was interrupted, or the file system was "
              "full; take another checkpoint");
}

Error WithBlank(const os::File& file, const os::Identity& identity, Error error) {
  if (error.code != Errc::kBadInput) return error;
  std::string block(static_cast<std::size_t>(std::min<std::uint64_t>(identity.bytes, 4096)), '\0');
  const auto is_blank = [&](std::uint64_t at) {
    const Status read = file.ReadAt(at, std::as_writable_bytes(std::span(block)));
    return read && block.find_first_not_of('\0') == std::string::npos;
  };
  // A zip file ends in its directory. Other files may end in a tensor of zeros.
  const bool tail = is_blank(identity.bytes - block.size());
  const bool head = is_blank(0);
  if (tail && !head && !block.starts_with("PK")) return error;
  if (!head && !tail) return error;
  const std::string part = head && tail ? "is filled with zeros"
                           : head       ? "begins with a block of zeros"
                                        : "ends in a block of zeros";
  error.message += ": the file " + part +
                   ": its data never reached the disk, as after a crash of the machine; take "
                   "another checkpoint";
  return error;
}

Result<std::vector<SourceFile>> ReadInOrder(std::vector<Found> found, ReadContainers read,
                                            const ScanOptions& options, std::uint64_t* failed) {
  std::vector<std::span<Found>> names;
  for (std::size_t first = 0; first < found.size();) {
    std::size_t last = first + 1;
    while (last < found.size() && found[last].name == found[first].name) ++last;
    names.push_back(std::span(found).subspan(first, last - first));
    first = last;
  }
  std::vector<SourceFile> files(names.size());
  HeaderReader reader(read);
  std::vector<std::string> paths;  // the threads move those of `found`
  os::SlowCalls slow;
  if (options.sink != nullptr) {
    for (const std::span<Found>& copies : names) paths.push_back(copies.front().path);
    slow.seconds = options.slow_seconds;
    slow.tell = [&](std::uint64_t i, double seconds, std::size_t others) {
      options.sink->Waits(WaitText(paths[i], seconds, others));
    };
  }
  std::atomic<std::uint64_t> done = 0;
  SW_TRY(os::ForEachFile(
      names.size(), options.io_threads,
      [&](std::uint64_t i) -> Status {
        SW_TRY_ASSIGN(files[i], reader.Read(names[i]));
        const std::uint64_t count = done.fetch_add(1, std::memory_order_relaxed) + 1;
        if (options.sink != nullptr) options.sink->Files(count, names.size());
        return {};
      },
      failed, options.sink != nullptr ? &slow : nullptr));
  return files;
}

Status ReadFiles(std::vector<Found> found, ReadContainers read, const ScanOptions& options,
                 SourceSet* set) {
  std::stable_sort(found.begin(), found.end(),
                   [](const Found& a, const Found& b) { return NaturalLess(a.name, b.name); });
  std::uint64_t failed = 0;
  SW_TRY_ASSIGN(std::vector<SourceFile> files,
                options.ranks != nullptr ? options.ranks->Read(std::move(found), read)
                                         : ReadInOrder(std::move(found), read, options, &failed));
  std::move(files.begin(), files.end(), std::back_inserter(set->files));
  return {};
}

Result<Container> ReadPickled(const Found& found, const files::Part& part) {
  Container container;
  SW_TRY_ASSIGN(files::ContainerMetadata metadata, torch_pt::ReadMetadata(part));
  container.metadata = std::make_shared<const files::ContainerMetadata>(std::move(metadata));
  const std::vector<files::Storage>& storages = container.metadata->storages;
  for (std::size_t i = 0; i < storages.size(); ++i) {
    const files::Storage& storage = storages[i];
    if (storage.bytes == 0 || storage.bytes > kInlineBytes) continue;
    std::string bytes(static_cast<std::size_t>(storage.bytes), '\0');
    SW_TRY(part.ReadAt(storage.offset - part.first(), std::as_writable_bytes(std::span(bytes))));
    SW_TRY(CheckSum(found.path, storage, bytes));
    container.inlined.emplace(static_cast<std::uint32_t>(i), std::move(bytes));
  }
  return container;
}

Result<Container> ReadPickled(const Found& found, const os::File& file,
                              const os::Identity& identity) {
  files::ReadAhead ahead(file, 0, identity.bytes, files::ReadAhead::kFile);
  return ReadPickled(found, files::Part(file, 0, identity.bytes, ahead));
}

bool SameSums(const std::vector<Container>& a, const std::vector<Container>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), SameContainer);
}

Result<bool> SameBytes(const std::string& a, const std::string& b, std::uint64_t bytes) {
  constexpr std::uint64_t kBlock = std::uint64_t{1} << 20;
  SW_TRY_ASSIGN(const os::File x, os::File::OpenRead(a));
  SW_TRY_ASSIGN(const os::File y, os::File::OpenRead(b));
  std::vector<std::byte> p(kBlock);
  std::vector<std::byte> q(kBlock);
  for (std::uint64_t at = 0; at < bytes; at += kBlock) {
    const auto n = static_cast<std::size_t>(std::min(kBlock, bytes - at));
    SW_TRY(x.ReadAt(at, std::span(p).first(n)));
    SW_TRY(y.ReadAt(at, std::span(q).first(n)));
    if (std::memcmp(p.data(), q.data(), n) != 0) return false;
  }
  return true;
}

std::string_view PlainTag(std::string_view tag) {
  const bool longer = tag.size() > kUniversal.size() && tag.ends_with(kUniversal);
  return longer ? tag.substr(0, tag.size() - kUniversal.size()) : tag;
}

std::string UniversalTag(std::string_view tag) {
  std::string universal(tag);
  if (!tag.ends_with(kUniversal)) universal += kUniversal;
  return universal;
}

void WarnAboutSkipped(const std::vector<std::string>& skipped, SourceSet* set) {
  if (skipped.empty()) return;
  const std::set<std::string> names(skipped.begin(), skipped.end());
  set->warnings.push_back("not part of the checkpoint, ignored: " +
                          FirstFew({names.begin(), names.end()}));
}

bool NaturalLess(std::string_view a, std::string_view b) {
  std::size_t i = 0;
  std::size_t j = 0;
  while (i < a.size() && j < b.size()) {
    if (!IsDigit(a[i]) || !IsDigit(b[j])) {
      if (a[i] != b[j]) return static_cast<unsigned char>(a[i]) < static_cast<unsigned char>(b[j]);
      ++i;
      ++j;
      continue;
    }
    while (i < a.size() && a[i] == '0') ++i;
    while (j < b.size() && b[j] == '0') ++j;
    std::size_t m = i;
    std::size_t n = j;
    while (m < a.size() && IsDigit(a[m])) ++m;
    while (n < b.size() && IsDigit(b[n])) ++n;
    if (m - i != n - j) return m - i < n - j;
    const int order = a.substr(i, m - i).compare(b.substr(j, n - j));
    if (order != 0) return order < 0;
    i = m;
    j = n;
  }
  if ((a.size() - i) != (b.size() - j)) return a.size() - i < b.size() - j;
  return a < b;  // equal except for leading zeros
}

}  // namespace shardwright::checkpoints
