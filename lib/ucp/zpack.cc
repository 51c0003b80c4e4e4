#include "ucp/zpack.h"

#include <zstd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>

#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include "base/checked.h"
#include "exec/first_error.h"
#include "format/zip/crc32.h"
#include "os/file.h"

namespace shardwright::ucp {
namespace {

constexpr std::uint64_t kBlockBytes = std::uint64_t{1} << 20;
constexpr int kLevel = 3;
constexpr std::array<char, 8> kMagic = {'S', 'W', 'Z', 'P', 'A', 'C', 'K', '1'};
constexpr std::uint64_t kFooterBytes = 8 + 8 + 4 + kMagic.size();

struct FreeContext {
  void operator()(ZSTD_CCtx* context) const { ZSTD_freeCCtx(context); }
};

struct Footer {
  std::uint64_t plain_bytes = 0;
  std::uint64_t blocks = 0;
  std::uint32_t index_crc = 0;
};

std::array<std::byte, kFooterBytes> Encode(const Footer& footer) {
  std::array<std::byte, kFooterBytes> bytes;
  std::memcpy(bytes.data(), &footer.plain_bytes, 8);
  std::memcpy(bytes.data() + 8, &footer.blocks, 8);
  std::memcpy(bytes.data() + 16, &footer.index_crc, 4);
  std::memcpy(bytes.data() + 20, kMagic.data(), kMagic.size());
  return bytes;
}

/// Reads and checks footer and index; returns the compressed size of every block.
Result<std::vector<std::uint32_t>> ReadIndex(const os::File& file, Footer* footer) {
  SW_TRY_ASSIGN(const os::Identity identity, file.Stat());
  const auto bad = [&](const char* what) {
    return Fail(Errc::kBadInput, file.path() + ": " + what);
  };
  if (identity.bytes < kFooterBytes) return bad("too short for a pack file");
  std::array<std::byte, kFooterBytes> tail;
  SW_TRY(file.ReadAt(identity.bytes - kFooterBytes, tail));
  if (std::memcmp(tail.data() + 20, kMagic.data(), kMagic.size()) != 0)
    return bad("not a whole pack file");
  std::memcpy(&footer->plain_bytes, tail.data(), 8);
  std::memcpy(&footer->blocks, tail.data() + 8, 8);
  std::memcpy(&footer->index_crc, tail.data() + 16, 4);
  if (footer->blocks != CeilDiv(footer->plain_bytes, kBlockBytes) ||
      footer->blocks > (identity.bytes - kFooterBytes) / 4) {
    return bad("the pack file's index does not fit its size");
  }
  std::vector<std::uint32_t> sizes(footer->blocks);
  const std::uint64_t index_at = identity.bytes - kFooterBytes - footer->blocks * 4;
  SW_TRY(file.ReadAt(index_at, std::as_writable_bytes(std::span(sizes))));
  if (zip::Crc32(std::as_bytes(std::span(sizes))) != footer->index_crc)
    return bad("the pack file's index is damaged");
  std::uint64_t total = 0;
  for (const std::uint32_t size : sizes) total += size;
  if (total != index_at) return bad("the pack file's blocks do not fill it");
  return sizes;
}

}  // namespace

Result<ZpackResult> WriteZpack(
    const std::string& path, std::uint64_t bytes,
    const std::function<Status(std::uint64_t, std::span<std::byte>)>& fill, unsigned threads) {
  SW_TRY_ASSIGN(const os::File file, os::File::Create(path));
  const std::uint64_t blocks = CeilDiv(bytes, kBlockBytes);
  std::vector<std::uint32_t> sizes;
  exec::DigestStream digest;
  std::uint64_t end = 0;
  const auto append = [&](std::span<const std::byte> data) -> Status {
    SW_TRY(file.WriteAt(end, data));
    digest.Add(data);
    end += data.size();
    return {};
  };
  struct Slot {
    std::vector<std::byte> plain;
    std::vector<std::byte> frame;
    std::size_t frame_bytes = 0;
  };
  std::vector<Slot> window(std::size_t{threads} * 2);
  tbb::task_arena arena(static_cast<int>(threads));
  for (std::uint64_t first = 0; first < blocks; first += window.size()) {
    const auto count =
        static_cast<std::size_t>(std::min<std::uint64_t>(window.size(), blocks - first));
    exec::FirstError error;
    const auto compress = [&](std::size_t i) -> Status {
      Slot& slot = window[i];
      const std::uint64_t at = (first + i) * kBlockBytes;
      slot.plain.assign(std::min(kBlockBytes, bytes - at), std::byte{0});
      slot.frame.resize(ZSTD_compressBound(kBlockBytes));
      SW_TRY(fill(at, slot.plain));
      const std::unique_ptr<ZSTD_CCtx, FreeContext> context(ZSTD_createCCtx());
      SW_CHECK(context != nullptr);
      SW_CHECK(
          !ZSTD_isError(ZSTD_CCtx_setParameter(context.get(), ZSTD_c_compressionLevel, kLevel)));
      SW_CHECK(!ZSTD_isError(ZSTD_CCtx_setParameter(context.get(), ZSTD_c_checksumFlag, 1)));
      slot.frame_bytes = ZSTD_compress2(context.get(), slot.frame.data(), slot.frame.size(),
                                        slot.plain.data(), slot.plain.size());
      if (ZSTD_isError(slot.frame_bytes) != 0) {
        return Fail(Errc::kInternal, path + ": " + ZSTD_getErrorName(slot.frame_bytes));
      }
      return {};
    };
    arena.execute([&] {
      tbb::parallel_for(std::size_t{0}, count, [&](std::size_t i) {
        if (Status status = compress(i); !status) error.Set(i, std::move(status).error());
      });
    });
    SW_TRY(error.Take());
    for (std::size_t i = 0; i < count; ++i) {
      SW_TRY(append(std::span(window[i].frame).first(window[i].frame_bytes)));
      sizes.push_back(static_cast<std::uint32_t>(window[i].frame_bytes));
    }
  }
  SW_TRY(append(std::as_bytes(std::span(sizes))));
  SW_TRY(append(Encode({bytes, blocks, zip::Crc32(std::as_bytes(std::span(sizes)))})));
  SW_TRY(file.Sync());
  return ZpackResult{end, digest.Finish()};
}

bool IsZpack(const std::string& path, std::uint64_t bytes) {
  Result<os::File> file = os::File::OpenRead(path);
  if (!file) return false;
  Footer footer;
  return ReadIndex(*file, &footer).has_value() && footer.plain_bytes == bytes;
}

ZpackBytes::ZpackBytes(const layout::ShardMap& map, std::vector<std::string> paths)
    : map_(map),
      paths_(std::move(paths)),
      pool_([this](std::uint32_t file) { return os::File::OpenRead(paths_[file]); }),
      indexes_(paths_.size()) {}

Result<const ZpackBytes::Index*> ZpackBytes::IndexOf(std::uint32_t file) {
  SW_TRY_ASSIGN(const auto open, pool_.Get(file));
  const std::lock_guard lock(mutex_);
  if (!indexes_[file]) {
    Footer footer;
    SW_TRY_ASSIGN(const std::vector<std::uint32_t> sizes, ReadIndex(*open, &footer));
    auto index = std::make_unique<Index>();
    index->plain_bytes = footer.plain_bytes;
    index->begin.push_back(0);
    for (const std::uint32_t size : sizes) index->begin.push_back(index->begin.back() + size);
    indexes_[file] = std::move(index);
  }
  return indexes_[file].get();
}

Status ZpackBytes::Load(std::uint32_t file, std::uint64_t block, Block* to) {
  SW_TRY_ASSIGN(const Index* index, IndexOf(file));
  if (block + 1 >= index->begin.size())
    return Fail(Errc::kBadInput, paths_[file] + ": read past the packed bytes");
  SW_TRY_ASSIGN(const auto open, pool_.Get(file));
  to->block = ~std::uint64_t{0};
  to->frame.resize(index->begin[block + 1] - index->begin[block]);
  to->plain.resize(std::min(kBlockBytes, index->plain_bytes - block * kBlockBytes));
  SW_TRY(open->ReadAt(index->begin[block], to->frame));
  bytes_.fetch_add(to->frame.size(), std::memory_order_relaxed);
  const std::size_t got =
      ZSTD_decompress(to->plain.data(), to->plain.size(), to->frame.data(), to->frame.size());
  if (ZSTD_isError(got) != 0 || got != to->plain.size()) {
    return Fail(Errc::kBadInput, paths_[file] + ": block " + std::to_string(block) + " is damaged");
  }
  to->file = file;
  to->block = block;
  return {};
}

Status ZpackBytes::Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) {
  const std::uint32_t file = map_.members[member].file;
  std::uint64_t at = map_.members[member].offset + offset;
  Block& block = blocks_.local();
  while (!out.empty()) {
    const std::uint64_t index = at / kBlockBytes;
    if (block.file != file || block.block != index) SW_TRY(Load(file, index, &block));
    const std::uint64_t from = at % kBlockBytes;
    if (from >= block.plain.size())
      return Fail(Errc::kBadInput, paths_[file] + ": read past the packed bytes");
    const std::size_t count = std::min<std::size_t>(out.size(), block.plain.size() - from);
    std::memcpy(out.data(), block.plain.data() + from, count);
    out = out.subspan(count);
    at += count;
  }
  return {};
}

}  // namespace shardwright::ucp
