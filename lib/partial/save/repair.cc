// SPDX-License-Identifier: Apache-2.0
#include "partial/save/repair.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "engine/exec/byte_source.h"
#include "engine/exec/unfinished_writes.h"
#include "engine/plan/plan.h"
#include "partial/save/save_internal.h"
#include "partial/store/module_reads.h"
#include "partial/store/store.h"
#include "partial/store/write_blobs.h"
#include "support/os/dir.h"
#include "support/os/lock.h"

namespace shardwright::partial {
namespace {

/// Blobs of this rank that the checkpoint may contain, as files of a plan.
struct Candidates {
  plan::Target target;
  std::vector<std::uint32_t> tensors;  ///< by tensor of the target: its source tensor
  std::vector<BlobJob> jobs;           ///< by file of the target
};

/// Returns the bytes of a place in the checkpoint; 0: none.
std::uint64_t BytesAt(const BlobPlace& place, const Model& model, const convert::Input& input) {
  if (place.module != BlobPlace::kPassed) {
    return model.modules[place.module].part(place.component).bytes;
  }
  std::uint64_t bytes = 0;
  for (const std::uint32_t member : PassedMembers(input.checkpoint)) {
    bytes += input.checkpoint.map.members[member].bytes;
  }
  return bytes;
}

/// Lists each place once for all versions of its content, separately for plain and compressed.
Candidates ListCandidates(const std::vector<DamagedBlob>& blobs, const Model& model,
                          const convert::Input& input) {
  std::map<std::pair<BlobPlace, bool>, std::vector<BlobRef>> wanted;
  for (const DamagedBlob& blob : blobs) {
    if (blob.may_be_intact) continue;
    for (const BlobPlace& place : blob.places) {
      if (BytesAt(place, model, input) != blob.ref.bytes) continue;
      wanted[{place, blob.ref.zstd}].push_back(blob.ref);
    }
  }
  Candidates out;
  plan::TargetBuilder target;
  const layout::ShardMap& source = input.checkpoint.map;
  for (auto& [where, refs] : wanted) {
    const BlobPlace& place = where.first;
    BlobJob job;
    job.file = place.module == BlobPlace::kPassed
                   ? AddPassedFile(source, PassedMembers(input.checkpoint), &target)
                   : AddModuleFile(source, model.modules[place.module], place.component, &target,
                                   &out.tensors);
    job.repairs = std::move(refs);
    out.jobs.push_back(std::move(job));
  }
  out.target = std::move(target).Take();
  return out;
}

/// Writes the blobs of this rank that the checkpoint contains. Local.
/// \param incoming  folder for blobs in progress
/// \returns the written blobs
Result<std::map<BlobFile, BlobResult>> WriteCandidates(const Store& store, convert::Input& input,
                                                       const Candidates& candidates,
                                                       const std::string& incoming,
                                                       unsigned threads, Sink& sink) {
  std::map<BlobFile, BlobResult> written;
  if (candidates.jobs.empty()) return written;
  const exec::CountReads reads(*input.bytes, sink);
  exec::UnfinishedWrites writes(sink);
  SW_TRY_ASSIGN(const plan::Plan plan,
                plan::Plan::Make(input.checkpoint.map, candidates.target,
                                 {input.checkpoint.proved, candidates.tensors}));
  BlobOptions options;
  options.incoming = incoming;
  options.note_sums = false;  // the digests prove the content
  options.threads = threads;
  options.writes = &writes;
  SW_TRY_ASSIGN(const std::vector<BlobResult> results,
                WriteBlobs(store, plan, *input.bytes, candidates.jobs, options, nullptr, sink));
  SW_TRY(save::ReadBack(store, candidates.target, candidates.jobs, results));
  for (const BlobResult& result : results) {
    if (result.restored) written[{result.ref.digest, result.ref.zstd}] = result;
  }
  writes.Complete();
  return written;
}

/// Explains that a blob was not repaired, and states the next step.
std::string ReasonFor(const DamagedBlob& blob, const convert::Input& input) {
  if (blob.may_be_intact) {
    return "its file cannot be opened and may be intact: make it readable, or remove it";
  }
  const std::string& path = input.source_paths.front();
  const Result<std::uint64_t>& iteration = input.checkpoint.iteration;
  if (iteration && *iteration == blob.iteration) {
    return StrCat(path, " has the same iteration ", blob.iteration,
                  ", but other content: it was written again after the save");
  }
  return StrCat(path, iteration ? StrCat(" (iteration ", *iteration, ")") : std::string(),
                " has other content: --repair needs the checkpoint of iteration ", blob.iteration);
}

/// Serializes blobs for other ranks, with a NUL after each field.
std::string Pack(const std::vector<BlobRepair>& blobs) {
  std::string text;
  for (const BlobRepair& blob : blobs) {
    for (const std::string& field :
         {blob.module, blob.component, std::to_string(blob.iteration), blob.path,
          std::to_string(blob.bytes), blob.damage, blob.reason}) {
      text += field + '\0';
    }
  }
  return text;
}

void Unpack(std::string_view text, std::vector<BlobRepair>* blobs) {
  const auto next = [&] {
    const std::size_t end = text.find('\0');
    SW_CHECK(end != std::string_view::npos);
    std::string field(text.substr(0, end));
    text.remove_prefix(end + 1);
    return field;
  };
  while (!text.empty()) {
    BlobRepair blob;
    blob.module = next();
    blob.component = next();
    blob.iteration = std::stoull(next());
    blob.path = next();
    blob.bytes = std::stoull(next());
    blob.damage = next();
    blob.reason = next();
    blobs->push_back(std::move(blob));
  }
}

/// Runs the repair of a locked store, pass by pass.
class Repairing {
 public:
  Repairing(comm::Comm& comm, convert::Input& input, const RepairRequest& request, Sink& sink)
      : comm_(comm), input_(input), request_(request), sink_(sink) {}

  Result<StoreRepair> Run() {
    StoreRepair out;
    out.checkpoint = input_.source_paths.front();
    SW_TRY(Open());
    SW_TRY_ASSIGN(out.check,
                  CheckStore(comm_, request_.store, input_.patterns, request_.threads, sink_));
    sink_.Pass("repair");
    SW_TRY_ASSIGN(const std::uint64_t damaged, comm_.AllReduceSum(out.check.damaged_blobs.size()));
    if (damaged > 0) SW_TRY(Write(&out));
    if (comm_.rank() == 0) End();
    return out;
  }

 private:
  /// Opens the store on every rank and locks it on the root. Collective.
  Status Open() {
    const auto open = [&]() -> Status {
      SW_TRY_ASSIGN(model_, DescribeModel(input_.checkpoint));
      SW_TRY_ASSIGN(Store opened, Store::Open(request_.store));
      store_.emplace(std::move(opened));
      return save::ExpectModel(*store_, input_, model_);
    };
    SW_TRY(comm_.Agree(open()));
    return comm_.OnRoot([&]() -> Status {
      SW_TRY_ASSIGN(lock_, store_->LockForWriting("pec-save check", request_.take_over));
      return {};
    });
  }

  /// Collective.
  Status Write(StoreRepair* out) {
    const Candidates candidates = ListCandidates(out->check.damaged_blobs, model_, input_);
    // Checked again, because a check takes minutes, and some file systems lock only per node.
    SW_TRY(comm_.OnRoot([&] { return lock_.Check(); }));
    SW_TRY_ASSIGN(incoming_, save::OpenIncoming(comm_, *store_));
    auto written = comm_.Agree(WriteCandidates(*store_, input_, candidates,
                                               incoming_ + "/" + std::to_string(comm_.rank()),
                                               request_.threads, sink_));
    if (!written) {
      if (comm_.rank() == 0) (void)os::RemoveTree(incoming_, store_->path());
      return tl::unexpected<Error>(std::move(written).error());
    }
    return Report(*written, out);
  }

  /// Collects the results of all ranks on every rank. Collective.
  Status Report(const std::map<BlobFile, BlobResult>& written, StoreRepair* out) {
    std::vector<BlobRepair> mine;
    for (const DamagedBlob& blob : out->check.damaged_blobs) {
      const bool repaired = written.contains({blob.ref.digest, blob.ref.zstd});
      mine.push_back({blob.module, blob.component, blob.iteration, blob.path, blob.ref.bytes,
                      blob.line, repaired ? "" : ReasonFor(blob, input_)});
    }
    std::uint64_t bytes = 0;
    for (const auto& [blob, result] : written) bytes += result.written_bytes;
    sink_.AddWritten(bytes, written.size());
    SW_TRY_ASSIGN(out->written_bytes, comm_.AllReduceSum(bytes));
    const std::string text = Pack(mine);
    SW_TRY_ASSIGN(const std::vector<comm::Bytes> parts,
                  comm_.AllGather(std::as_bytes(std::span(text))));
    for (const comm::Bytes& part : parts) {
      Unpack({reinterpret_cast<const char*>(part.data()), part.size()}, &out->blobs);
    }
    std::ranges::sort(out->blobs, {}, [](const BlobRepair& blob) {
      return std::tie(blob.iteration, blob.module, blob.component, blob.path);
    });
    DropRepaired(out);
    return {};
  }

  /// Removes repaired blobs from `damaged`, and adds the reason to the others.
  static void DropRepaired(StoreRepair* out) {
    std::map<std::string_view, const BlobRepair*> by_line;
    for (const BlobRepair& blob : out->blobs) {
      by_line[blob.damage] = &blob;
      out->repaired += blob.repaired() ? 1 : 0;
    }
    std::vector<std::string> left;
    for (const std::string& line : out->check.damaged) {
      const auto found = by_line.find(line);
      if (found == by_line.end()) {
        left.push_back(line);
      } else if (!found->second->repaired()) {
        left.push_back(line + "; not repaired: " + found->second->reason);
      }
    }
    out->check.damaged = std::move(left);
  }

  /// Root.
  void End() {
    if (!incoming_.empty()) return save::CleanUp(incoming_, *store_, &lock_, sink_);
    if (Status released = lock_.Release(); !released) sink_.Warn(released.error().message);
  }

  comm::Comm& comm_;
  convert::Input& input_;
  const RepairRequest& request_;
  Sink& sink_;
  Model model_;
  std::optional<Store> store_;
  os::Lock lock_;         // root only
  std::string incoming_;  // empty: nothing is written
};

}  // namespace

Result<StoreRepair> RepairStore(comm::Comm& comm, convert::Input& input,
                                const RepairRequest& request, Sink& sink) {
  return Repairing(comm, input, request, sink).Run();
}

}  // namespace shardwright::partial
