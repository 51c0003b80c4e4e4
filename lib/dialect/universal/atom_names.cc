#include "dialect/universal/atoms_internal.h"
#include "layout/states.h"

namespace shardwright::dialect {
namespace {

constexpr std::string_view kEnd = ".pt";

std::string AtomsTop() { return std::string(kAtomsFolder) + "/"; }

}  // namespace

std::string StateFile(std::string_view state) { return std::string(state) + std::string(kEnd); }

std::string AtomName(std::string_view param, std::string_view state) {
  return AtomsTop() + std::string(param) + "/" + StateFile(state);
}

std::optional<AtomFile> ParseAtomName(std::string_view path) {
  const std::string top = AtomsTop();
  const std::size_t slash = path.rfind('/');
  if (!path.starts_with(top) || slash <= top.size() || !path.ends_with(kEnd)) return std::nullopt;
  AtomFile atom;
  atom.param = path.substr(top.size(), slash - top.size());
  atom.state = path.substr(slash + 1, path.size() - slash - 1 - kEnd.size());
  return atom;
}

std::string_view NeededState(ParamKind kind) {
  switch (kind) {
    case ParamKind::kFrozen:
      return layout::kFrozen;
    case ParamKind::kBuffer:
      return layout::kBuffer;
    case ParamKind::kTrainable:
      break;
  }
  return layout::kMaster;
}

}  // namespace shardwright::dialect
