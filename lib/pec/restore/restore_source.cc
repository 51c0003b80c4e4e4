// The middle of a restore: the checkpoint of X with a shard map that leads into blobs.

#include <algorithm>
#include <cstring>
#include <utility>

#include "exec/integrity.h"
#include "layout/cut.h"
#include "layout/states.h"
#include "pec/restore/restore_internal.h"

namespace shardwright::pec::restore {
namespace {

layout::LogicalTensor Whole(const layout::LogicalTensor& tensor, std::uint32_t array) {
  layout::LogicalTensor out{tensor.name, tensor.state, tensor.dtype, tensor.shape, {}};
  layout::Fragment whole;
  whole.cut = std::make_shared<const layout::Cut>(layout::Cut::Whole(tensor.shape));
  whole.at.array = array;
  out.fragments.push_back(std::move(whole));
  return out;
}

}  // namespace

void Restoring::AddTensor(const layout::LogicalTensor& tensor, const layout::Array& array,
                          layout::ShardMap* map) const {
  const auto index = static_cast<std::uint32_t>(map->arrays.size());
  map->arrays.push_back(array);
  map->tensors.push_back(Whole(tensor, index));
}

/// One member for each chosen blob, one array for each tensor in it.
Status Restoring::AddBlobs(layout::ShardMap* map, std::vector<BlobSource>* files) {
  for (std::size_t i = 0; i < model_.modules.size(); ++i) {
    const Module& module = model_.modules[i];
    if (restarted_[i]) continue;
    for (const Component component : kAllComponents) {
      const auto c = static_cast<std::size_t>(component);
      const bool stored = chosen_[i][c].has_value();
      std::uint32_t member = 0;
      if (stored) {
        const Held& held = *chosen_[i][c];
        BlobSource file;
        if (const auto agent = from_agent_[i][c]) {
          file.path = os::ToText(agents_[*agent]->address());
          file.remote = ReaderOf(*agent, held.blob.digest);
        } else {
          SW_TRY_ASSIGN(file, FindBlob(store_->BlobPath(held.blob), held.blob));
        }
        member = static_cast<std::uint32_t>(map->members.size());
        map->members.push_back({static_cast<std::uint32_t>(files->size()), 0, held.blob.bytes,
                                held.blob.crc32,
                                module.name + " " + std::string(Name(component)) +
                                    " of iteration " + std::to_string(held.version)});
        map->files.push_back(file.path);
        files->push_back(std::move(file));
      }
      for (const ModuleTensor& one : module.part(component).tensors) {
        const layout::LogicalTensor& tensor = input_.checkpoint.map.tensors[one.tensor];
        if (dropped_[i][c] && tensor.state == layout::kWeight) continue;
        const std::uint64_t elems = Elems(tensor.shape);
        if (!stored && elems > 0) {
          return Fail(Errc::kInternal,
                      module.name + " " + std::string(Name(component)) + ": chosen without a blob");
        }
        AddTensor(tensor, {tensor.dtype, {{member, one.offset, elems}}}, map);
      }
    }
  }
  return {};
}

/// Members that are passed through keep the numbers that the checkpoint's documents use.
Status Restoring::AddPassed(layout::ShardMap* map, std::vector<BlobSource>* files) {
  const std::vector<std::uint32_t> members = PassedMembers(input_.checkpoint);
  std::uint64_t bytes = 0;
  for (const std::uint32_t member : members) bytes += input_.checkpoint.map.members[member].bytes;
  const std::uint64_t stored = at_->passed ? at_->passed->bytes : 0;
  if (bytes != stored) {
    return Fail(Errc::kBadInput, store_->ManifestPath({at_->sequence, at_->iteration, false}) +
                                     ": " + std::to_string(bytes) +
                                     " bytes of client state expected, found " +
                                     std::to_string(stored));
  }
  // A place for every number: those without a blob are never read.
  map->members.assign(input_.checkpoint.map.members.size(), layout::Member{});
  for (layout::Member& member : map->members) member.name = "not stored";
  BlobSource file{"none", {}, false, {}};
  // Of a checkpoint in memory there are only dry runs.
  if (!members.empty() && at_->sequence != 0) {
    SW_TRY_ASSIGN(file, FindBlob(store_->BlobPath(*at_->passed), *at_->passed));
  }
  map->files.push_back(file.path);
  files->push_back(std::move(file));
  std::uint64_t offset = 0;
  for (const std::uint32_t member : members) {
    const layout::Member& from = input_.checkpoint.map.members[member];
    map->members[member] = {0, offset, from.bytes, from.crc32, from.name};
    offset += from.bytes;
  }
  return {};
}

/// Experts without any version, out of another checkpoint of the same model.
Status Restoring::AddRestarted(layout::ShardMap* map) {
  if (!other_) return {};
  const layout::ShardMap& from = other_->checkpoint.map;
  const auto first_file = static_cast<std::uint32_t>(map->files.size());
  const auto first_member = static_cast<std::uint32_t>(map->members.size());
  const auto first_array = static_cast<std::uint32_t>(map->arrays.size());
  map->files.insert(map->files.end(), from.files.begin(), from.files.end());
  for (layout::Member member : from.members) {
    member.file += first_file;
    map->members.push_back(std::move(member));
  }
  for (layout::Array array : from.arrays) {
    for (layout::Region& region : array.regions) region.member += first_member;
    map->arrays.push_back(std::move(array));
  }
  const layout::TensorIndex index(from);
  for (std::size_t i = 0; i < model_.modules.size(); ++i) {
    if (!restarted_[i]) continue;
    for (const ModulePart& part : model_.modules[i].parts) {
      for (const ModuleTensor& one : part.tensors) {
        const layout::LogicalTensor& wanted = input_.checkpoint.map.tensors[one.tensor];
        const auto found = index.Find(wanted.name, wanted.state);
        if (!found) {
          return Fail(Errc::kMismatch, options_.restart_missing + ": tensor \"" + wanted.name +
                                           "\" " + wanted.state + " is missing");
        }
        layout::LogicalTensor tensor = from.tensors[*found];
        for (layout::Fragment& fragment : tensor.fragments) fragment.at.array += first_array;
        map->tensors.push_back(std::move(tensor));
      }
    }
  }
  return {};
}

Status Restoring::BuildSource() {
  layout::ShardMap map;
  std::vector<BlobSource> files;
  SW_TRY(AddPassed(&map, &files));
  SW_TRY(AddBlobs(&map, &files));
  const auto first_other = static_cast<std::uint32_t>(map.members.size());
  SW_TRY(AddRestarted(&map));
  exec::DigestStream digest;
  for (const auto& module : chosen_) {
    for (const auto& held : module) {
      if (held) digest.Add(std::as_bytes(std::span(held->blob.digest)));
    }
  }
  digest.Add(std::as_bytes(std::span(at_->catalogue)));
  if (other_) digest.Add(other_->fingerprint);
  const exec::Digest sum = digest.Finish();
  std::memcpy(input_.fingerprint.data(), sum.data(), sum.size());
  // The checkpoint's own files are gone or of another iteration: nothing may be linked to them.
  for (dialect::SourceFile& file : input_.set.files) file.path.clear();
  input_.checkpoint.map = std::move(map);
  input_.checkpoint.proved = false;
  input_.bytes = std::make_unique<StoreBytes>(input_.checkpoint.map, files, first_other,
                                              other_ ? other_->bytes.get() : nullptr);
  return {};
}

}  // namespace shardwright::pec::restore
