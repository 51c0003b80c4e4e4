// SPDX-License-Identifier: Apache-2.0
#include "convert/scan/scan_ranks.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoints/model/fields.h"
#include "checkpoints/registry.h"
#include "support/base/exception_to_error.h"

namespace shardwright::convert {
namespace scan {
namespace {

using checkpoints::FieldReader;
using checkpoints::FieldWriter;
using checkpoints::Found;
using checkpoints::SourceFile;

/// Requests from rank 0 to the other ranks.
enum class Request : std::uint8_t { kRead, kEnd };

/// Files that one rank reads, with their numbers among all files.
struct Share {
  std::vector<std::uint64_t> numbers;
  std::vector<Found> found;
};

/// Result of reading a share: its files, or the number of the first one that failed.
struct Outcome {
  Result<std::vector<SourceFile>> files;
  std::uint64_t failed = 0;
};

std::string_view TextOf(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

comm::Bytes BytesOf(std::string_view text) {
  comm::Bytes bytes(text.size());
  if (!text.empty()) std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

comm::Bytes Pack(const Share& share) {
  FieldWriter out;
  out.Number(share.numbers.size());
  for (const std::uint64_t number : share.numbers) out.Number(number);
  out.Number(share.found.size());
  for (const Found& one : share.found) {
    out.Text(one.path);
    out.Text(one.name);
    out.Number(one.stays ? 1 : 0);
    out.Text(one.how);
  }
  return BytesOf(std::move(out).Take());
}

Result<Share> UnpackShare(std::string_view bytes) {
  FieldReader in(bytes);
  Share share;
  SW_TRY_ASSIGN(const std::uint64_t names, in.Number());
  for (std::uint64_t i = 0; i < names; ++i) {
    SW_TRY_ASSIGN(const std::uint64_t number, in.Number());
    share.numbers.push_back(number);
  }
  SW_TRY_ASSIGN(const std::uint64_t files, in.Number());
  for (std::uint64_t i = 0; i < files; ++i) {
    Found one;
    SW_TRY_ASSIGN(one.path, in.Text());
    SW_TRY_ASSIGN(one.name, in.Text());
    SW_TRY_ASSIGN(const std::uint64_t stays, in.Number());
    one.stays = stays != 0;
    SW_TRY_ASSIGN(one.how, in.Text());
    share.found.push_back(std::move(one));
  }
  return share;
}

/// Distributes files over ranks. Files that the scan has read already stay with rank 0.
std::vector<Share> Cut(std::vector<Found> found, std::size_t ranks, std::uint64_t* names) {
  std::vector<Share> shares(ranks);
  std::size_t next = 0;
  std::size_t rank = 0;
  *names = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    const bool fresh = i == 0 || found[i].name != found[i - 1].name;
    if (fresh) {
      rank = found[i].known != nullptr ? 0 : next++ % ranks;
      shares[rank].numbers.push_back((*names)++);
    }
    shares[rank].found.push_back(found[i]);
  }
  return shares;
}

/// Reads a share. Converts exceptions to errors, so that the other ranks do not wait forever.
Outcome ReadShare(Share& share, checkpoints::ReadContainers read,
                  const checkpoints::ScanOptions& options) {
  Outcome outcome{std::vector<SourceFile>()};
  std::uint64_t failed = 0;
  try {
    outcome.files = checkpoints::ReadInOrder(std::move(share.found), read, options, &failed);
  } catch (...) {
    outcome.files = tl::unexpected<Error>(CaughtError());
  }
  if (!outcome.files && failed < share.numbers.size()) outcome.failed = share.numbers[failed];
  return outcome;
}

comm::Bytes Pack(const Outcome& outcome, const Share& share, std::string_view format) {
  FieldWriter out;
  out.Number(outcome.files ? 1 : 0);
  if (!outcome.files) {
    const Error& error = outcome.files.error();
    out.Number(outcome.failed);
    out.Number(static_cast<std::uint64_t>(error.code));
    out.Number(static_cast<std::uint64_t>(error.sys));
    out.Text(error.message);
    return BytesOf(std::move(out).Take());
  }
  out.Number(share.numbers.size());
  for (const std::uint64_t number : share.numbers) out.Number(number);
  checkpoints::SourceSet set;
  set.format = format;
  set.files = *outcome.files;
  out.Text(checkpoints::Serialize(set));
  return BytesOf(std::move(out).Take());
}

/// The files of all ranks by number, or the error with the lowest number.
class Merged {
 public:
  explicit Merged(std::uint64_t names) : files_(static_cast<std::size_t>(names)) {}

  Status Add(std::string_view bytes) {
    FieldReader in(bytes);
    SW_TRY_ASSIGN(const std::uint64_t read, in.Number());
    if (read == 0) return AddError(&in);
    std::vector<std::uint64_t> numbers;
    SW_TRY_ASSIGN(const std::uint64_t count, in.Number());
    for (std::uint64_t i = 0; i < count; ++i) {
      SW_TRY_ASSIGN(const std::uint64_t number, in.Number());
      numbers.push_back(number);
    }
    SW_TRY_ASSIGN(const std::string_view text, in.Text());
    SW_TRY_ASSIGN(checkpoints::SourceSet set, checkpoints::DeserializeSource(text));
    return Add(numbers, std::move(set.files));
  }

  Status Add(const std::vector<std::uint64_t>& numbers, std::vector<SourceFile> files) {
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      if (i >= files.size() || numbers[i] >= files_.size()) {
        return Fail(Errc::kInternal, "a rank has read files that it was not assigned");
      }
      for (checkpoints::Container& container : files[i].containers) {
        container.metadata = metadata_table_.Share(std::move(container.metadata)).first;
      }
      files_[static_cast<std::size_t>(numbers[i])] = std::move(files[i]);
    }
    return {};
  }

  Result<std::vector<SourceFile>> Take() && {
    if (error_) return tl::unexpected<Error>(*std::move(error_));
    return std::move(files_);
  }

 private:
  Status AddError(FieldReader* in) {
    SW_TRY_ASSIGN(const std::uint64_t number, in->Number());
    SW_TRY_ASSIGN(const std::uint64_t code, in->Number());
    SW_TRY_ASSIGN(const std::uint64_t sys, in->Number());
    SW_TRY_ASSIGN(const std::string_view message, in->Text());
    if (error_ && number_ <= number) return {};
    number_ = number;
    error_ = Error{static_cast<Errc>(code), std::string(message), static_cast<int>(sys)};
    return {};
  }

  std::vector<SourceFile> files_;
  checkpoints::MetadataTable metadata_table_;
  std::optional<Error> error_;
  std::uint64_t number_ = 0;  // index of error_
};

/// The ranks that take part in one scan.
class Ranks final : public checkpoints::ScanRanks {
 public:
  Ranks(comm::Comm& comm, const checkpoints::ScanOptions& options)
      : comm_(comm), options_(options) {}

  /// Reads files together with the other ranks. Only rank 0 calls it.
  Result<std::vector<SourceFile>> Read(std::vector<Found> found,
                                       checkpoints::ReadContainers read) override {
    const std::span<const checkpoints::Format> all = checkpoints::Formats();
    const auto row = std::find_if(all.begin(), all.end(), [&](const checkpoints::Format& one) {
      return one.read_file == read;
    });
    SW_CHECK(row != all.end());
    std::uint64_t names = 0;
    std::vector<Share> shares =
        Cut(std::move(found), static_cast<std::size_t>(comm_.size()), &names);
    FieldWriter head;
    head.Number(static_cast<std::uint64_t>(Request::kRead));
    head.Number(static_cast<std::uint64_t>(row - all.begin()));
    head.Number(names);
    comm::Bytes bytes = BytesOf(std::move(head).Take());
    SW_TRY(Sent(comm_.Bcast(bytes)));
    std::vector<comm::Bytes> pieces(shares.size());
    for (std::size_t rank = 1; rank < shares.size(); ++rank) pieces[rank] = Pack(shares[rank]);
    const Result<std::vector<comm::Bytes>> received = comm_.AllToAll(pieces);
    if (!received) return tl::unexpected<Error>(Broken(received.error()));
    return Exchange(*row, names, std::move(shares.front()));
  }

  /// Executes requests of rank 0 until it ends. Only other ranks call it.
  Status Serve() {
    for (;;) {
      comm::Bytes bytes;
      SW_TRY(comm_.Bcast(bytes));
      FieldReader head(TextOf(bytes));
      SW_TRY_ASSIGN(const std::uint64_t request, head.Number());
      if (request == static_cast<std::uint64_t>(Request::kEnd)) return {};
      SW_TRY_ASSIGN(const std::uint64_t row, head.Number());
      SW_TRY_ASSIGN(const std::uint64_t names, head.Number());
      const std::vector<comm::Bytes> pieces(static_cast<std::size_t>(comm_.size()));
      SW_TRY_ASSIGN(const std::vector<comm::Bytes> received, comm_.AllToAll(pieces));
      SW_TRY_ASSIGN(Share share, UnpackShare(TextOf(received.front())));
      // Rank 0 reports errors.
      auto files =
          Exchange(checkpoints::Formats()[static_cast<std::size_t>(row)], names, std::move(share));
      if (!files && broken_) return tl::unexpected<Error>(std::move(files).error());
      if (files) std::move(files->begin(), files->end(), std::back_inserter(files_));
    }
  }

  /// Ends Serve on the other ranks. Only rank 0 calls it.
  Status End() {
    FieldWriter head;
    head.Number(static_cast<std::uint64_t>(Request::kEnd));
    comm::Bytes bytes = BytesOf(std::move(head).Take());
    return comm_.Bcast(bytes);
  }

  /// Returns true if the ranks cannot communicate any more.
  bool broken() const { return broken_; }
  /// Returns the number of files that all calls of Read have read. Only for rank 0.
  std::size_t count() const { return count_; }
  /// Returns the files of all ranks. Only for other ranks.
  std::vector<SourceFile> TakeFiles() { return std::move(files_); }

 private:
  Error Broken(Error error) {
    broken_ = true;
    return error;
  }

  Status Sent(Status sent) {
    broken_ = broken_ || !sent;
    return sent;
  }

  Result<std::vector<SourceFile>> Exchange(const checkpoints::Format& row, std::uint64_t names,
                                           Share share) {
    Outcome mine = ReadShare(share, row.read_file, options_);
    const Result<std::vector<comm::Bytes>> outcomes = comm_.AllGather(Pack(mine, share, row.name));
    if (!outcomes) return tl::unexpected<Error>(Broken(outcomes.error()));
    Merged all(names);
    for (std::size_t rank = 0; rank < outcomes->size(); ++rank) {
      if (rank == static_cast<std::size_t>(comm_.rank()) && mine.files) {
        SW_TRY(all.Add(share.numbers, *std::move(mine.files)));
      } else {
        SW_TRY(all.Add(TextOf((*outcomes)[rank])));
      }
    }
    count_ += static_cast<std::size_t>(names);
    return std::move(all).Take();
  }

  comm::Comm& comm_;
  const checkpoints::ScanOptions options_;
  bool broken_ = false;
  std::size_t count_ = 0;
  std::vector<SourceFile> files_;
};

}  // namespace
}  // namespace scan

Result<checkpoints::SourceSet> ScanByRanks(
    comm::Comm& comm, checkpoints::ScanOptions options,
    const std::function<Result<checkpoints::SourceSet>(const checkpoints::ScanOptions& options)>&
        find) {
  if (comm.size() == 1) return find(options);
  scan::Ranks ranks(comm, options);
  checkpoints::SourceSet set;
  Status scanned;
  if (comm.rank() == 0) {
    options.ranks = &ranks;
    try {
      Result<checkpoints::SourceSet> found = find(options);
      if (found) {
        set = *std::move(found);
      } else {
        scanned = tl::unexpected<Error>(std::move(found).error());
      }
    } catch (...) {
      scanned = tl::unexpected<Error>(CaughtError());
    }
    if (ranks.broken()) return tl::unexpected<Error>(std::move(scanned).error());
    SW_TRY(ranks.End());
  } else {
    SW_TRY(ranks.Serve());
  }
  comm::Bytes rest;
  bool all_read = true;  // the ranks exchanged all files
  SW_TRY(comm.OnRoot([&]() -> Status {
    SW_TRY(std::move(scanned));
    all_read = set.files.size() == ranks.count();
    checkpoints::FieldWriter out;
    out.Number(all_read ? 1 : 0);
    std::vector<checkpoints::SourceFile> files;
    if (all_read) files.swap(set.files);
    out.Text(checkpoints::Serialize(set));
    if (all_read) files.swap(set.files);
    rest = scan::BytesOf(std::move(out).Take());
    return {};
  }));
  SW_TRY(comm.Bcast(rest));
  if (comm.rank() == 0) return set;
  checkpoints::FieldReader in(scan::TextOf(rest));
  SW_TRY_ASSIGN(const std::uint64_t exchanged, in.Number());
  SW_TRY_ASSIGN(const std::string_view text, in.Text());
  SW_TRY_ASSIGN(set, checkpoints::DeserializeSource(text));
  if (exchanged != 0) set.files = ranks.TakeFiles();
  return set;
}

}  // namespace shardwright::convert
