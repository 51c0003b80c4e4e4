// SPDX-License-Identifier: Apache-2.0
#include "convert/scan/node_local.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "checkpoints/model/links.h"
#include "checkpoints/open_source.h"
#include "engine/exec/integrity.h"
#include "engine/plan/plan.h"
#include "support/os/file.h"
#include "support/os/io_threads.h"

namespace shardwright::convert {
namespace {

std::string TextOf(const comm::Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Returns true if this rank can open a catalogued file and it has not changed.
bool IsVisible(const exec::SourcePath& source) { return exec::OpenUnchanged(source).has_value(); }

/// Returns the XXH3-128 digest of a file. Reads the whole file. Local.
Result<std::string> DigestOfFile(const std::string& path) {
  SW_TRY_ASSIGN(const os::File file, os::File::OpenRead(path));
  SW_TRY_ASSIGN(const os::Identity identity, file.Stat());
  exec::DigestStream digest;
  std::vector<std::byte> buffer;
  for (std::uint64_t at = 0; at < identity.bytes; at += buffer.size()) {
    buffer.resize(std::min(plan::kUnitBytes, identity.bytes - at));
    SW_TRY(file.ReadAt(at, buffer));
    digest.Add(buffer);
  }
  return exec::Hex(digest.Finish());
}

}  // namespace

exec::SourcePath PathOf(const checkpoints::SourceFile& file) {
  exec::SourcePath path{file.path, file.identity, false, {}, file.real};
  for (const checkpoints::Container& one : file.containers) {
    path.stretches.insert(path.stretches.end(), one.stretches.begin(), one.stretches.end());
  }
  return path;
}

exec::SourcePath PathOf(const checkpoints::SiblingFile& sibling) {
  const std::string& path = sibling.path;
  std::string real = sibling.real;  // empty: another rank found it
  if (real.empty()) real = checkpoints::RealPathInFolder(path).value_or(path);
  return {path, sibling.identity, checkpoints::IsAppendedTo(path), {}, std::move(real)};
}

void KeepVisible(unsigned io_threads, checkpoints::SourceSet* set) {
  std::vector<std::uint8_t> visible_files(set->files.size());
  // The lambda cannot fail: a file that cannot be opened is not visible.
  (void)os::ForEachFile(set->files.size(), io_threads, [&](std::uint64_t i) -> Status {
    visible_files[i] = IsVisible(PathOf(set->files[i])) ? 1 : 0;
    return {};
  });
  std::vector<checkpoints::SourceFile> files;
  for (std::size_t i = 0; i < set->files.size(); ++i) {
    if (visible_files[i] != 0) files.push_back(std::move(set->files[i]));
  }
  set->files = std::move(files);
  std::vector<checkpoints::SiblingFile> siblings;
  for (checkpoints::SiblingFile& sibling : set->siblings) {
    const bool visible = sibling.content.has_value() || IsVisible(PathOf(sibling));
    if (visible) siblings.push_back(std::move(sibling));
  }
  set->siblings = std::move(siblings);
}

Status CheckCatalogued(const std::set<std::string>& catalogued, const checkpoints::SourceSet& all) {
  std::set<std::string> seen;
  for (const checkpoints::SourceFile& file : all.files) seen.insert(file.name);
  for (const checkpoints::SiblingFile& sibling : all.siblings) seen.insert(sibling.name);
  for (const std::string& name : catalogued) {
    if (seen.contains(name)) continue;
    return Fail(Errc::kNotFound, name,
                ": missing or changed since the catalogue was written: no rank can open the "
                "catalogued file");
  }
  return {};
}

Result<std::vector<std::string>> GatherTexts(comm::Comm& comm, const std::string& mine) {
  SW_TRY_ASSIGN(const std::vector<comm::Bytes> gathered,
                comm.AllGather(std::as_bytes(std::span(mine))));
  std::vector<std::string> texts;
  texts.reserve(gathered.size());
  for (const comm::Bytes& text : gathered) texts.push_back(TextOf(text));
  return texts;
}

Status DigestCopies(comm::Comm& comm, std::vector<checkpoints::SourceSet>* parts) {
  SW_TRY_ASSIGN(const auto names, checkpoints::CopiesToCompare(*parts));
  if (names.empty()) return {};
  const auto for_copies = [&](const auto& act) {
    for (std::size_t name = 0; name < names.size(); ++name) {
      for (const checkpoints::Copy& copy : names[name]) {
        act(copy, copy.seen[name % copy.seen.size()]);
      }
    }
  };
  std::string mine;
  Status outcome;
  for_copies([&](const checkpoints::Copy&, const checkpoints::Copy::Seen& reader) {
    if (reader.rank != static_cast<std::size_t>(comm.rank()) || !outcome) return;
    const Result<std::string> digest = DigestOfFile((*parts)[reader.rank].files[reader.file].path);
    if (!digest) outcome = tl::unexpected(digest.error());
    mine += digest.value_or("");
  });
  SW_TRY(comm.Agree(outcome));
  SW_TRY_ASSIGN(const std::vector<std::string> digests, GatherTexts(comm, mine));
  const std::size_t length = exec::Hex(exec::Digest()).size();
  std::vector<std::size_t> used(digests.size());
  for_copies([&](const checkpoints::Copy& copy, const checkpoints::Copy::Seen& reader) {
    const std::string digest = digests[reader.rank].substr(used[reader.rank], length);
    used[reader.rank] += length;
    for (const auto& [rank, file] : copy.seen) (*parts)[rank].files[file].digest = digest;
  });
  return {};
}

}  // namespace shardwright::convert
