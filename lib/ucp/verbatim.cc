#include "ucp/verbatim.h"

#include <algorithm>

#include "os/dir.h"

namespace shardwright::ucp {
namespace {

/// True if the set's files are the checkpoint's own; a packed catalogue holds their payloads only.
bool HasOwnFiles(const dialect::SourceSet& set) {
  return std::all_of(set.files.begin(), set.files.end(), [](const dialect::SourceFile& file) {
    return file.path.ends_with("/" + file.name);
  });
}

}  // namespace

bool SameLayout(const dialect::Topology& a, const dialect::Topology& b) {
  return a.zero == b.zero && a.dp == b.dp && a.tp == b.tp && a.pp == b.pp && a.ep == b.ep &&
         a.dtype == b.dtype && a.pipeline == b.pipeline && (!a.pipeline || a.stages == b.stages) &&
         a.round_robin == b.round_robin && (a.zero != 3 || a.sub_group == b.sub_group);
}

bool IsVerbatim(const Input& input, const dialect::Topology& topology) {
  return input.checkpoint.origin == "deepspeed" && HasOwnFiles(input.set) &&
         SameLayout(input.checkpoint.topology, topology);
}

Result<Verbatim> PlanVerbatim(const Input& input, plan::Twin twin) {
  Verbatim out;
  const std::string& tag = input.checkpoint.tag;
  SW_TRY(os::SafeName(tag));
  for (const dialect::SourceFile& file : input.set.files) {
    SW_TRY_ASSIGN(const std::string path, os::JoinSafe(tag, file.name));
    const auto index = static_cast<std::uint32_t>(out.map.files.size());
    out.target.files.push_back(
        plan::WholeFile(path, file.path, file.identity.bytes, twin, &out.map));
    for (const torch_pt::Storage& storage : file.skeleton.storages) {
      out.map.members.push_back(
          {index, storage.offset, storage.bytes, storage.crc32, "data/" + storage.key});
    }
  }
  out.target.files.push_back(plan::TextFile("latest", tag));
  return out;
}

}  // namespace shardwright::ucp
