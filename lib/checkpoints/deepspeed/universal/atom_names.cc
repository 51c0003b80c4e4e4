// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <set>

#include "checkpoints/deepspeed/universal/atoms_internal.h"
#include "engine/layout/states.h"
#include "support/base/text.h"
#include "support/os/dir.h"

namespace shardwright::checkpoints {
namespace {

constexpr std::string_view kEnd = ".pt";

std::string AtomsTop() { return std::string(kAtomsFolder) + "/"; }

tl::unexpected<Error> NoFolder(const std::string& name, const std::string& why) {
  constexpr std::size_t kShown = 300;
  const std::string shown = name.size() > kShown ? name.substr(0, kShown) + "..." : name;
  return Fail(
      Errc::kUnsupported, "parameter ", Quoted(shown),
      " cannot become a folder of a universal checkpoint, because loaders use the name as a path: ",
      why, "; write another format (--format), or give the parameter another name");
}

/// Checks that a parameter's name can be a folder. DeepSpeed's loaders
/// append it to a path unchanged, so each slash makes a nested folder.
Status CheckFolder(const std::string& name) {
  for (std::size_t first = 0; first <= name.size();) {
    const std::size_t last = std::min(name.find('/', first), name.size());
    if (first == 0 && name.substr(0, last) == kOptimizerStateFile) {
      return NoFolder(name, "the optimizer's file has that name");
    }
    const Status part = os::SafeName(std::string_view(name).substr(first, last - first));
    if (!part) return NoFolder(name, part.error().message);
    first = last + 1;
  }
  return {};
}

/// Returns true for a file or folder next to atoms that DeepSpeed's loader
/// mistakes for a state. The loader searches names for the expression "(.+).pt".
bool LooksLikeState(std::string_view name) { return name.find("pt", 2) != std::string_view::npos; }

/// Checks that a folder within another parameter's folder does not look like one of its states.
Status CheckNested(std::span<const Param> params) {
  std::set<std::string_view> names;
  for (const Param& param : params) {
    if (param.alias_of.empty()) names.insert(param.name);
  }
  for (const std::string_view name : names) {
    for (std::size_t at = name.find('/'); at != std::string_view::npos;
         at = name.find('/', at + 1)) {
      const std::string_view inner = name.substr(at + 1, name.find('/', at + 1) - at - 1);
      if (!LooksLikeState(inner)) continue;
      const std::string outer(name.substr(0, at));
      if (names.contains(outer)) {
        return NoFolder(std::string(name), "it would be in the folder of " + Quoted(outer) +
                                               ", where loaders would take " +
                                               Quoted(std::string(inner)) + " for a state");
      }
    }
  }
  return {};
}

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

Status CheckAtomFolders(std::span<const Param> params) {
  for (const Param& param : params) {
    if (param.alias_of.empty()) SW_TRY(CheckFolder(param.name));
  }
  return CheckNested(params);
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

}  // namespace shardwright::checkpoints
