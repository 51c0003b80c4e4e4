// SPDX-License-Identifier: Apache-2.0
#include "engine/exec/zpack.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>

#include "engine/exec/for_each.h"
#include "support/base/checked.h"
#include "support/base/crc32.h"
#include "support/os/file.h"
#include "support/zstd/contexts.h"

namespace shardwright::exec {
namespace {

constexpr int kLevel = 3;
constexpr std::array<char, 8> kMagic = {'S', 'W', 'Z', 'P', 'A', 'C', 'K', '1'};
constexpr std::uint64_t kFooterBytes = 8 + 8 + 4 + kMagic.size();

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

/// Reads and checks footer and index. Returns the compressed size of every block.
Result<std::vector<std::uint32_t>> ReadIndex(const os::File& file, Footer* footer) {
  SW_TRY_ASSIGN(const os::Identity identity, file.Stat());
  const auto bad = [&](const char* what) { return Fail(Errc::kBadInput, file.path(), ": ", what); };
  if (identity.bytes < kFooterBytes) return bad("too short for a pack file");
  std::array<std::byte, kFooterBytes> tail;
  SW_TRY(file.ReadAt(identity.bytes - kFooterBytes, tail));
  if (std::memcmp(tail.data() + 20, kMagic.data(), kMagic.size()) != 0)
    return bad("not a pack file, or an incomplete one");
  std::memcpy(&footer->plain_bytes, tail.data(), 8);
  std::memcpy(&footer->blocks, tail.data() + 8, 8);
  std::memcpy(&footer->index_crc, tail.data() + 16, 4);
  if (footer->blocks != CeilDiv(footer->plain_bytes, kZpackBlockBytes) ||
      footer->blocks > (identity.bytes - kFooterBytes) / 4) {
    return bad("the pack file's index does not fit its size");
  }
  std::vector<std::uint32_t> sizes(footer->blocks);
  const std::uint64_t index_at = identity.bytes - kFooterBytes - footer->blocks * 4;
  SW_TRY(file.ReadAt(index_at, std::as_writable_bytes(std::span(sizes))));
  if (Crc32(std::as_bytes(std::span(sizes))) != footer->index_crc)
    return bad("the pack file's index is damaged");
  std::uint64_t total = 0;
  for (const std::uint32_t size : sizes) total += size;
  if (total != index_at) return bad("the pack file's blocks do not fill it");
  return sizes;
}

/// Consumes the units of one pack file in windows of consecutive units. The loop writes directly
/// into the memory of the window, in the layout of the plain file, and Drain compresses its blocks.
class PackSink final : public UnitSink {
 public:
  PackSink(const plan::Plan& plan, std::uint32_t file, ZpackWriter writer, tbb::task_arena& arena)
      : plan_(plan),
        file_(plan.target().files[file]),
        first_unit_(plan.first_unit(file, 0)),
        sums_(plan.unit_count(file)),
        writer_(std::move(writer)),
        arena_(arena),
        window_bytes_(2 * static_cast<std::uint64_t>(arena.max_concurrency()) * kZpackBlockBytes),
        window_(window_bytes_ + plan::kUnitBytes) {}

  Result<ZpackResult> Write(UnitLoop& loop) {
    std::vector<std::uint64_t> units;
    std::uint64_t next = 0;
    while (at_ < file_.bytes) {
      const std::uint64_t end = std::min(file_.bytes, at_ + window_bytes_);
      units.clear();
      for (; next < sums_.size() && Begin(plan_.unit(first_unit_ + next)) < end; ++next) {
        units.push_back(first_unit_ + next);
      }
      SW_TRY(loop.ForUnits(units, *this));
    }
    return writer_.Finish();
  }

  std::vector<UnitSum> TakeSums() { return std::move(sums_); }

  Result<std::span<std::byte>> Buffer(const plan::Unit& unit, std::uint64_t bytes) override {
    return std::span(window_).subspan(Begin(unit) - at_, bytes);
  }

  Status Put(const UnitInHand& unit) override {
    sums_[unit.index - first_unit_] = unit.record->sum;
    return {};
  }

  /// Compresses a full window. Its last unit may reach into the next window.
  Status Drain() override {
    const std::uint64_t full = std::min(file_.bytes - at_, window_bytes_);
    SW_TRY(writer_.Append(std::span(window_).first(full), arena_));
    at_ += full;
    // Bytes between payloads must be zero.
    std::copy(window_.begin() + static_cast<std::ptrdiff_t>(full), window_.end(), window_.begin());
    std::fill(window_.end() - static_cast<std::ptrdiff_t>(full), window_.end(), std::byte{0});
    return {};
  }

 private:
  std::uint64_t Begin(const plan::Unit& unit) const {
    return file_.payloads[unit.payload].offset + unit.first;
  }

  const plan::Plan& plan_;
  const plan::OutputFile& file_;
  const std::uint64_t first_unit_;
  std::vector<UnitSum> sums_;
  ZpackWriter writer_;
  tbb::task_arena& arena_;
  const std::uint64_t window_bytes_;
  std::vector<std::byte> window_;
  std::uint64_t at_ = 0;  // offset of the window in the plain file
};

}  // namespace

void ZstdContext::Free::operator()(ZSTD_CCtx_s* context) const { ZSTD_freeCCtx(context); }

ZstdContext::ZstdContext() : context_(NewZstdWriter()) {
  const auto set = [&](ZSTD_cParameter parameter, int value) {
    SW_CHECK(!ZstdFailed(ZSTD_CCtx_setParameter(context_.get(), parameter, value)));
  };
  set(ZSTD_c_compressionLevel, kLevel);
  set(ZSTD_c_checksumFlag, 1);
}

ZpackWriter::ZpackWriter(os::File file, ZstdContexts& contexts, UnfinishedWrites* writes)
    : file_(std::move(file)),
      contexts_(&contexts),
      writes_(writes),
      digest_(std::make_unique<DigestStream>()) {}

Status ZpackWriter::AppendBytes(std::span<const std::byte> data) {
  SW_TRY(file_.WriteAt(end_, data));
  if (writes_ != nullptr) writes_->Add(data.size());
  digest_->Add(data);
  end_ += data.size();
  return {};
}

Status ZpackWriter::Append(std::span<const std::byte> plain, tbb::task_arena& arena) {
  SW_CHECK(plain_bytes_ % kZpackBlockBytes == 0);  // only the last block is short
  const std::uint64_t blocks = CeilDiv(plain.size(), kZpackBlockBytes);
  if (frames_.size() < blocks) frames_.resize(blocks);
  SW_TRY(ForEach(arena, blocks, [&](std::uint64_t i) -> Status {
    const std::uint64_t at = i * kZpackBlockBytes;
    const std::span<const std::byte> block =
        plain.subspan(at, std::min<std::uint64_t>(kZpackBlockBytes, plain.size() - at));
    Frame& frame = frames_[i];
    frame.room.resize(ZSTD_compressBound(kZpackBlockBytes));
    frame.bytes = ZSTD_compress2(contexts_->local().get(), frame.room.data(), frame.room.size(),
                                 block.data(), block.size());
    if (!ZstdFailed(frame.bytes)) return {};
    return Fail(Errc::kInternal, file_.path(), ": ", ZSTD_getErrorName(frame.bytes));
  }));
  for (std::uint64_t i = 0; i < blocks; ++i) {
    SW_TRY(AppendBytes(std::span(frames_[i].room).first(frames_[i].bytes)));
    sizes_.push_back(static_cast<std::uint32_t>(frames_[i].bytes));
  }
  plain_bytes_ += plain.size();
  return {};
}

Result<ZpackResult> ZpackWriter::Finish() {
  SW_TRY(AppendBytes(std::as_bytes(std::span(sizes_))));
  SW_TRY(
      AppendBytes(Encode({plain_bytes_, sizes_.size(), Crc32(std::as_bytes(std::span(sizes_)))})));
  SW_TRY(file_.Sync());
  SW_TRY(file_.Close());
  return ZpackResult{end_, digest_->Finish()};
}

Result<ZpackResult> PackFile(const plan::Plan& plan, std::uint32_t file, UnitLoop& loop,
                             ZpackWriter writer, tbb::task_arena& arena,
                             std::vector<UnitSum>* sums) {
  PackSink to(plan, file, std::move(writer), arena);
  SW_TRY_ASSIGN(const ZpackResult result, to.Write(loop));
  *sums = to.TakeSums();
  return result;
}

bool IsZpack(const os::File& file, std::uint64_t bytes) {
  Footer footer;
  return ReadIndex(file, &footer).has_value() && footer.plain_bytes == bytes;
}

bool IsZpack(const std::string& path, std::uint64_t bytes) {
  const Result<os::File> file = os::File::OpenRead(path);
  return file && IsZpack(*file, bytes);
}

void ZpackBytes::FreeContext::operator()(ZSTD_DCtx_s* context) const { ZSTD_freeDCtx(context); }

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
    return Fail(Errc::kBadInput, paths_[file], ": read past the packed bytes");
  SW_TRY_ASSIGN(const auto open, pool_.Get(file));
  to->block = ~std::uint64_t{0};
  to->frame.resize(index->begin[block + 1] - index->begin[block]);
  to->plain.resize(std::min(kZpackBlockBytes, index->plain_bytes - block * kZpackBlockBytes));
  SW_TRY(open->ReadAt(index->begin[block], to->frame));
  bytes_.fetch_add(to->frame.size(), std::memory_order_relaxed);
  if (to->context == nullptr) to->context.reset(NewZstdReader());
  const std::size_t got = ZSTD_decompressDCtx(to->context.get(), to->plain.data(), to->plain.size(),
                                              to->frame.data(), to->frame.size());
  if (ZstdFailed(got) || got != to->plain.size()) {
    return Fail(Errc::kBadInput, paths_[file], ": block ", block, " is damaged");
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
    const std::uint64_t index = at / kZpackBlockBytes;
    if (block.file != file || block.block != index) SW_TRY(Load(file, index, &block));
    const std::uint64_t from = at % kZpackBlockBytes;
    if (from >= block.plain.size())
      return Fail(Errc::kBadInput, paths_[file], ": read past the packed bytes");
    const std::size_t count = std::min<std::size_t>(out.size(), block.plain.size() - from);
    std::memcpy(out.data(), block.plain.data() + from, count);
    out = out.subspan(count);
    at += count;
  }
  return {};
}

}  // namespace shardwright::exec
