#include "ucp/digests.h"

#include <string>
#include <vector>

#include <tbb/task_arena.h>

#include "exec/for_each.h"
#include "os/sha256.h"
#include "ucp/catalogue.h"

namespace shardwright::ucp {
namespace {

Status VerifyFile(const dialect::SourceFile& file, const std::string& expected) {
  SW_TRY_ASSIGN(const std::string found, os::Sha256OfFile(file.path));
  if (found == expected) return {};
  return Fail(Errc::kBadInput, file.path + ": damaged: SHA-256 " + expected +
                                   " expected by the checkpoint, found " + found);
}

}  // namespace

Status VerifyDigests(comm::Comm& comm, const Input& input, unsigned threads, Sink& sink) {
  const std::vector<dialect::FileDigest>& digests = input.checkpoint.digests;
  if (digests.empty()) return {};
  if (IsCompressed(input.set)) {
    sink.Warn("the source's own digests are of files that are not here: its blocks are checked");
    return {};
  }
  sink.Pass("digests");
  std::vector<const dialect::FileDigest*> mine;
  for (std::size_t i = 0; i < digests.size(); ++i) {
    const int reader = input.file_owner.empty()
                           ? static_cast<int>(i % static_cast<std::size_t>(comm.size()))
                           : input.file_owner[digests[i].file];
    if (reader == comm.rank()) mine.push_back(&digests[i]);
  }
  tbb::task_arena arena(static_cast<int>(threads));
  return comm.Agree(exec::ForEach(arena, mine.size(), [&](std::uint64_t i) {
    return VerifyFile(input.set.files[mine[i]->file], mine[i]->sha256);
  }));
}

}  // namespace shardwright::ucp
