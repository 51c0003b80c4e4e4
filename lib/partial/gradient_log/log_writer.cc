// SPDX-License-Identifier: Apache-2.0
#include "partial/gradient_log/log_writer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "partial/gradient_log/log_frame_internal.h"
#include "support/base/text.h"
#include "support/os/dir.h"
#include "support/os/fault.h"
#include "support/zstd/contexts.h"

// Steps that make records durable. Each has a fault point of the same name:
//
//   log.segment  begins a segment: writes and syncs its head, then syncs the folder
//   log.record   writes a record: head, text, gradients, trailer; a kill leaves a torn tail
//   log.sync     syncs the segment, before and after the mark
//   log.mark     writes a mark after the appended records
//
// A full segment is synced before the next one begins.

namespace shardwright::partial {

namespace {

Status CheckFinite(const LogStep& step, const std::string& where) {
  std::vector<optimizer_steps::Option> numbers = optimizer_steps::OptionsOf(step.step);
  numbers.push_back({"gradient_factor", step.step.gradient_factor});
  numbers.push_back({"count", step.step.count});
  for (const optimizer_steps::Option& number : numbers) {
    if (!std::isfinite(number.value)) {
      return BadInput(where, ": ", Quoted(number.name), " is not finite");
    }
  }
  return {};
}

/// Computes the digests of the payload written from `begin` on, as a reader verifies it.
LogPayload PayloadOf(std::uint64_t begin, std::span<const std::span<const std::byte>> pieces) {
  LogPayload out{begin, 0, {}};
  std::optional<exec::DigestStream> sum(std::in_place);
  for (std::span<const std::byte> rest : pieces) {
    while (!rest.empty()) {
      const std::uint64_t room = kLogSumBytes - out.bytes % kLogSumBytes;
      const auto part = rest.first(std::min<std::uint64_t>(room, rest.size()));
      sum->Add(part);
      out.bytes += part.size();
      rest = rest.subspan(part.size());
      if (out.bytes % kLogSumBytes == 0) {
        out.sums.push_back(sum->Finish());
        sum.emplace();
      }
    }
  }
  if (out.bytes % kLogSumBytes != 0) out.sums.push_back(sum->Finish());
  return out;
}

std::string WhereOf(std::uint64_t iteration, std::string_view module) {
  return StrCat("gradients of ", Quoted(module), ", iteration ", iteration);
}

/// Makes the record of uncompressed gradients, without recovery and digests.
Result<LogRecord> Describe(std::uint64_t iteration, std::string_view module,
                           std::span<const LogStep> steps, std::span<const GradientRange> ranges) {
  const std::string where = WhereOf(iteration, module);
  LogRecord record;
  record.iteration = iteration;
  record.module = module;
  record.steps.assign(steps.begin(), steps.end());
  for (const LogStep& step : steps) SW_TRY(CheckFinite(step, where));
  for (const GradientRange& range : ranges) {
    const bool skipped = range.step < steps.size() && steps[range.step].step.skipped;
    const std::uint64_t plain = skipped ? 0 : range.count * ItemSize(range.dtype);
    if (range.gradient.size() != plain) {
      return BadInput(where, ", parameter ", Quoted(range.param), ": ", plain,
                      " bytes expected, found ", range.gradient.size());
    }
    LogPiece piece;
    piece.param = range.param;
    piece.elems = range.elems;
    piece.first = range.first;
    piece.count = range.count;
    piece.dtype = range.dtype;
    piece.step = range.step;
    piece.bytes = plain;
    record.pieces.push_back(std::move(piece));
  }
  return record;
}

/// Makes the text of a record and checks that readers accept it.
Result<std::string> MetaOf(const LogRecord& record, const std::string& where) {
  std::string meta = ToText(record);
  if (meta.size() > kLogMetaBytes) {
    return Fail(Errc::kLimit, where, ": description of ", meta.size(),
                " bytes exceeds the limit of ", kLogMetaBytes);
  }
  // Do not write a record that readers would reject.
  SW_TRY_ASSIGN(const LogRecord read, ParseLogRecord(meta, where));
  if (read != record)
    return BadInput(where, ": the name of the module or of a parameter is not UTF-8");
  return meta;
}

}  // namespace

void LogWriter::Free::operator()(ZSTD_CCtx_s* context) const { ZSTD_freeCCtx(context); }

LogWriter::LogWriter(std::string folder, const LogWriterOptions& options)
    : folder_(std::move(folder)), options_(options) {}

LogWriter::LogWriter(LogWriter&&) noexcept = default;
LogWriter& LogWriter::operator=(LogWriter&&) noexcept = default;
LogWriter::~LogWriter() = default;

Result<LogWriter> LogWriter::Open(const std::string& folder, const LogWriterOptions& options) {
  SW_TRY(os::MakeDirs(folder));
  LogWriter writer(folder, options);
  if (options.zstd_level != 0) writer.zstd_.reset(NewZstdWriter());
  SW_TRY_ASSIGN(const LogEnd end, GradientLog::EndOf(folder, options.fingerprint, options.writer));
  writer.index_ = end.next_index;
  writer.previous_ = end.previous;
  writer.cut_bytes_ = end.torn_bytes;
  writer.number_ = end.number;
  if (end.number == 0) {
    SW_TRY(writer.Begin());
    return writer;
  }
  const std::string path = folder + "/" + log::SegmentName(options.writer, end.number);
  if (end.end == 0) {
    SW_TRY(os::RemoveFile(path));
    --writer.number_;
    SW_TRY(writer.Begin());
    return writer;
  }
  SW_TRY_ASSIGN(writer.file_, os::File::OpenWrite(path));
  writer.end_ = end.end;
  if (end.torn_bytes > 0) {
    SW_TRY(writer.file_.Allocate(end.end));
    SW_TRY(writer.file_.Sync());
  }
  return writer;
}

Status LogWriter::Begin() {
  SW_TRY(os::FaultPoint("log.segment"));
  ++number_;
  SW_TRY_ASSIGN(file_,
                os::File::Create(folder_ + "/" + log::SegmentName(options_.writer, number_)));
  const log::Frame frame = log::ToFrame(
      log::SegmentHead{kLogVersion, options_.writer, number_, index_, options_.fingerprint});
  SW_TRY(file_.WriteAt(0, frame));
  SW_TRY(file_.Sync());
  SW_TRY(os::SyncDir(folder_));
  end_ = log::kFrameBytes;
  return {};
}

/// \returns the offset of the payload
Result<std::uint64_t> LogWriter::WriteRecord(std::uint32_t kind, std::string_view meta,
                                             std::span<const std::span<const std::byte>> payload) {
  if (broken_) {
    return Fail(Errc::kIo, file_.path(), ": an earlier write to the gradient log failed");
  }
  // Readers treat a record after a torn one as damage, so a failure is final.
  broken_ = true;
  log::RecordHead head;
  head.index = index_;
  head.kind = static_cast<log::Kind>(kind);
  head.meta_bytes = static_cast<std::uint32_t>(meta.size());
  for (const auto& piece : payload) head.payload_bytes += piece.size();
  head.previous = previous_;
  if (end_ > log::kFrameBytes && end_ + log::RecordBytes(head) > options_.segment_bytes) {
    SW_TRY(file_.Sync());
    SW_TRY(Begin());
  }
  SW_TRY(os::FaultPoint("log.record"));
  const log::Frame frame = log::ToFrame(head);
  exec::DigestStream digest;
  std::vector<std::byte> front(frame.begin(), frame.end());
  const auto text = std::as_bytes(std::span(meta));
  front.insert(front.end(), text.begin(), text.end());
  digest.Add(front);
  SW_TRY(file_.WriteAt(end_, front));
  const std::uint64_t payload_begin = end_ + front.size();
  std::uint64_t at = payload_begin;
  for (const auto& piece : payload) {
    digest.Add(piece);
    SW_TRY(file_.WriteAt(at, piece));
    at += piece.size();
  }
  const exec::Digest trailer = digest.Finish();
  const std::uint64_t end = end_ + log::RecordBytes(head);
  std::vector<std::byte> back(end - at);
  std::ranges::copy(std::as_bytes(std::span(trailer)), back.begin());
  SW_TRY(file_.WriteAt(at, back));
  end_ = end;
  previous_ = trailer;
  ++index_;
  broken_ = false;
  return payload_begin;
}

Result<std::span<const std::byte>> LogWriter::Compressed(std::span<const std::byte> plain,
                                                         std::vector<std::byte>* room) {
  room->resize(ZSTD_compressBound(plain.size()));
  const std::size_t bytes = ZSTD_compressCCtx(zstd_.get(), room->data(), room->size(), plain.data(),
                                              plain.size(), options_.zstd_level);
  if (ZstdFailed(bytes)) {
    return Fail(Errc::kInternal, "zstd: ", ZSTD_getErrorName(bytes));
  }
  return std::span<const std::byte>(*room).first(bytes);
}

Status LogWriter::Append(std::uint64_t iteration, std::string_view module,
                         std::span<const LogStep> steps, std::span<const GradientRange> ranges,
                         LoggedRecord* logged) {
  const std::string where = WhereOf(iteration, module);
  SW_TRY_ASSIGN(LogRecord record, Describe(iteration, module, steps, ranges));
  record.recovery = options_.recovery;
  std::vector<std::vector<std::byte>> rooms(ranges.size());
  std::vector<std::span<const std::byte>> payload;
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    LogPiece& piece = record.pieces[i];
    std::span<const std::byte> bytes = ranges[i].gradient;
    piece.digest = exec::DigestOf(bytes);
    if (zstd_ != nullptr && !bytes.empty() && bytes.size() <= kLogPieceBytes) {
      SW_TRY_ASSIGN(const auto smaller, Compressed(bytes, &rooms[i]));
      if (smaller.size() < bytes.size()) {
        bytes = smaller;
        piece.zstd = true;
      }
    }
    piece.bytes = bytes.size();
    payload.push_back(bytes);
  }
  SW_TRY_ASSIGN(const std::string meta, MetaOf(record, where));
  SW_TRY_ASSIGN(const std::uint64_t begin,
                WriteRecord(static_cast<std::uint32_t>(log::Kind::kGradients), meta, payload));
  if (logged == nullptr) return {};
  logged->path = file_.path();
  logged->payload = PayloadOf(begin, payload);
  std::uint64_t at = begin;
  for (LogPiece& piece : record.pieces) {
    piece.offset = at;
    at += piece.bytes;
  }
  logged->record = std::move(record);
  return {};
}

Status LogWriter::Check(std::uint64_t iteration, std::string_view module,
                        std::span<const LogStep> steps, std::span<const GradientRange> ranges) {
  SW_TRY_ASSIGN(LogRecord record, Describe(iteration, module, steps, ranges));
  record.recovery = std::numeric_limits<std::int64_t>::max();  // the longest possible number
  SW_TRY(MetaOf(record, WhereOf(iteration, module)));
  return {};
}

Status LogWriter::Persist() {
  // After a power loss a mark must not exist without the records before it.
  SW_TRY(Sync());
  SW_TRY(os::FaultPoint("log.mark"));
  SW_TRY(WriteRecord(static_cast<std::uint32_t>(log::Kind::kMark), "", {}));
  return Sync();
}

Status LogWriter::Sync() {
  SW_TRY(os::FaultPoint("log.sync"));
  broken_ = true;  // no more writes after a failed sync
  SW_TRY(file_.Sync());
  broken_ = false;
  return {};
}

}  // namespace shardwright::partial
