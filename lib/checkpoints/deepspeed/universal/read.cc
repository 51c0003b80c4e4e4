// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "checkpoints/deepspeed/common/entries.h"
#include "checkpoints/deepspeed/common/file_name.h"
#include "checkpoints/deepspeed/universal/atoms_internal.h"
#include "checkpoints/deepspeed/universal/read_internal.h"
#include "engine/layout/states.h"

namespace shardwright::checkpoints {
namespace atoms {

using pickle::Node;

namespace {

std::string OptimizerName() { return std::string(kAtomsFolder) + "/" + kOptimizerStateFile; }

std::string ModelName(std::uint64_t mp) { return reader::ModelFileName(false, 0, mp); }

Result<Passed> Pass(Reading* reading, std::uint32_t file) {
  Passed passed;
  SW_TRY_ASSIGN(passed.document, reader::Open(*reading, file));
  for (std::uint32_t i = 0; i < passed.document.storages.size(); ++i) {
    passed.members.push_back(reading->map.MemberOf(file, passed.document, i));
  }
  return passed;
}

}  // namespace

Folder::Folder(const SourceSet& source) : source_(source) {
  const std::string top = std::string(kAtomsFolder) + "/";
  for (std::uint32_t i = 0; i < source.files.size(); ++i) {
    const std::string& name = source.files[i].name;
    files_.emplace(name, i);
    if (name.starts_with(top)) {
      const std::optional<AtomFile> atom = ParseAtomName(name);
      if (!atom) continue;
      std::vector<std::string>& states = params_[atom->param];
      if (atom->state != layout::kStep) states.push_back(atom->state);
      continue;
    }
    const auto parsed = ParseFileName(name);
    if (!parsed) continue;
    if (parsed->role == FileRole::kModel) models_[parsed->mp] = i;
    if (parsed->role == FileRole::kModelZero3) stage3_models_[{parsed->mp, parsed->rank}] = i;
  }
  for (auto& [param, states] : params_) std::sort(states.begin(), states.end());
  for (const auto& [ranks, file] : stage3_models_) {
    if (ranks.second == 0) models_.try_emplace(ranks.first, file);
  }
}

std::optional<std::uint32_t> Folder::Find(const std::string& name) const {
  const auto it = files_.find(name);
  if (it == files_.end()) return std::nullopt;
  return it->second;
}

Result<std::uint32_t> Folder::Need(const std::string& name) const {
  if (const auto file = Find(name)) return *file;
  return Fail(Errc::kNotFound, source_.tag, ": ", name, " is missing");
}

const std::vector<std::string>& Folder::StatesOf(const std::string& param) const {
  static const std::vector<std::string> kNone;
  const auto it = params_.find(param);
  return it == params_.end() ? kNone : it->second;
}

Result<Atom> OpenAtom(Reading* reading, const Folder& folder, const std::string& param,
                      std::string_view state) {
  SW_TRY_ASSIGN(const std::uint32_t file, folder.Need(AtomName(param, state)));
  const SourceFile& source = reading->source.files[file];
  Atom atom;
  auto document = torch_pt::Parse(*source.containers.front().metadata);
  if (!document) return Within(source.path, std::move(document).error());
  atom.document = *std::move(document);
  const Node* tensor = atom.document.root;
  if (tensor->is_dict()) {
    atom.keys = tensor;
    tensor = tensor->Find("param");
  }
  SW_TRY_ASSIGN(atom.place, reading->map.PlaceOf(file, atom.document, tensor, "\"param\""));
  atom.shape = tensor->tensor->shape;
  return atom;
}

void AddTensor(layout::ShardMap* map, const std::string& name, const std::string& state,
               const Shape& shape, std::uint32_t array, layout::CutPtr cut) {
  layout::LogicalTensor tensor;
  tensor.name = name;
  tensor.state = state;
  tensor.dtype = map->arrays[array].dtype;
  tensor.shape = shape;
  layout::Fragment fragment;
  fragment.cut = std::move(cut);
  fragment.at.array = array;
  tensor.fragments.push_back(std::move(fragment));
  map->tensors.push_back(std::move(tensor));
}

namespace {

/// Returns true if every dimension of a tensor is the product of consecutive ones of `atom`.
/// DeepSpeed's converter stores a parameter with sub-parameters in the shape of its view.
bool IsViewOf(const Shape& atom, const Shape& tensor) {
  std::size_t at = 0;
  for (const std::uint64_t extent : tensor) {
    std::uint64_t product = 1;
    while (at < atom.size() && product < extent) product *= atom[at++];
    if (product != extent) return false;
  }
  return std::all_of(atom.begin() + static_cast<std::ptrdiff_t>(at), atom.end(),
                     [](std::uint64_t extent) { return extent == 1; });
}

}  // namespace

Status AddAtom(Reading* reading, const Param& param, const std::string& state, const Atom& atom) {
  const std::string where = reading->source.tag + "/" + AtomName(param.name, state);
  const auto wrong = [&] {
    return Fail(Errc::kBadInput, where, ": shape ", ToString(param.shape), " expected, found ",
                ToString(atom.shape));
  };
  SW_TRY_ASSIGN(const std::uint64_t elems, CountElems(param.shape));
  layout::Cut cut = layout::Cut::Whole(param.shape);
  const bool bare = atom.keys == nullptr && atom.shape.size() == 1;
  const bool reshaped = bare || (atom.keys != nullptr && IsViewOf(atom.shape, param.shape));
  if (atom.shape != param.shape && !(reshaped && atom.place.elems == elems)) {
    // The atom may have the padding rows of a vocabulary at the end.
    const std::uint64_t row =
        param.shape.empty() || param.shape[0] == 0 ? 0 : elems / param.shape[0];
    if (!param.rule.padded || row == 0 || atom.place.elems < elems || atom.place.elems % row != 0) {
      return wrong();
    }
    Shape padded = param.shape;
    padded[0] = atom.place.elems / row;
    if (!bare && atom.shape != padded) return wrong();
    const std::vector<std::uint64_t> origin(param.shape.size(), 0);
    SW_TRY_ASSIGN(
        cut, layout::Cut::Make(param.shape, std::move(padded), {{origin, origin, param.shape}}));
  }
  const std::uint32_t array = reading->map.AddWhole(atom.place);
  AddTensor(&reading->out.map, param.name, state, param.shape, array,
            std::make_shared<const layout::Cut>(std::move(cut)));
  return {};
}

Status ReadModelStates(Reading* reading, const Folder& folder, std::uint64_t mp) {
  std::vector<std::string> missing;
  for (std::uint64_t rank = 0; rank < mp; ++rank) {
    const auto file = folder.models().find(rank);
    if (file == folder.models().end()) {
      missing.push_back(ModelName(rank));
      if (missing.size() == 16) break;
      continue;
    }
    SW_TRY_ASSIGN(Passed passed, Pass(reading, file->second));
    reading->state.model_states.push_back(std::move(passed));
  }
  if (!missing.empty()) return reader::Missing(*reading, missing);
  return {};
}

Status ReadPassed(Reading* reading, const Folder& folder, std::uint64_t mp) {
  SW_TRY(ReadModelStates(reading, folder, mp));
  SW_TRY_ASSIGN(const std::uint32_t file, folder.Need(OptimizerName()));
  SW_TRY_ASSIGN(const Passed passed, Pass(reading, file));
  reading->state.optimizer.assign(mp, passed);
  return {};
}

void Finish(Reading* reading) {
  reading->out.origin = "universal";
  reading->out.tag = PlainTag(reading->source.tag);
  reading->state.entries = std::move(reading->opaque.entries);
  TakeEngineState(reading->topology, std::move(reading->state), &reading->out);
}

Status SetOptions(Reading* reading) {
  Checkpoint& out = reading->out;
  const Node* root = reading->state.optimizer.front().document.root;
  const Node* groups = root->Find("param_groups");
  if (groups == nullptr || !groups->is_list() || groups->items.size() != out.groups.size()) {
    return Fail(
        Errc::kBadInput, OptimizerName(), ": param_groups: ", out.groups.size(),
        " groups expected, found ", pickle::Describe(groups),
        (groups != nullptr && groups->is_list() ? " of " + std::to_string(groups->items.size())
                                                : std::string()));
  }
  for (std::size_t i = 0; i < out.groups.size(); ++i) {
    if (!groups->items[i]->is_dict()) {
      return Fail(Errc::kBadInput, OptimizerName(), ": param_groups: dict expected, found ",
                  pickle::Describe(groups->items[i]));
    }
    Node* options = pickle::CopyDict(*out.arena, groups->items[i]);
    pickle::Remove(options, "params");
    out.groups[i].options = options;
  }
  return {};
}

namespace {

// Reads the opaque entries of all tensor-parallel ranks.
Status ReadEntries(Reading* reading) {
  EngineState& state = reading->state;
  const std::uint64_t tp = reading->topology.tp;
  for (std::uint64_t mp = 0; mp < state.model_states.size(); ++mp) {
    if (state.model_states[mp].document.root->Find(kOpaqueEntries) == nullptr) continue;
    const auto from = std::make_shared<const Passed>(state.model_states[mp]);
    if (Status parsed = ParseEntries(from, mp % tp, tp, &reading->opaque); !parsed) {
      return Within(ModelName(mp), std::move(parsed).error());
    }
  }
  return {};
}

// Reads a folder with Shardwright's description: the entire checkpoint, or only its model.
Result<Checkpoint> ReadOwn(const SourceSet& source, const Patterns& patterns, bool only_weights) {
  Reading reading(source, patterns);
  Checkpoint& out = reading.out;
  out.arena = std::make_shared<pickle::Arena>();
  std::vector<std::vector<std::string>> atoms;
  SW_TRY(ParseAtoms(source.manifest, &out, &reading.topology, &atoms));
  const Folder folder(source);
  if (only_weights) {
    out.states.clear();
    out.only_weights = OnlyWeights{};  // atoms contain the master weights, which are read
  } else {
    SW_TRY(ReadPassed(&reading, folder, reading.topology.mp()));
    SW_TRY(SetOptions(&reading));
    SW_TRY(ReadEntries(&reading));
  }
  for (std::size_t i = 0; i < out.params.size(); ++i) {
    for (const std::string& state : atoms[i]) {
      if (only_weights && !layout::IsModelState(state)) continue;
      SW_TRY_ASSIGN(const Atom atom, OpenAtom(&reading, folder, out.params[i].name, state));
      SW_TRY(AddAtom(&reading, out.params[i], state, atom));
    }
    const std::vector<std::string>& found = folder.StatesOf(out.params[i].name);
    for (const std::string& state : found) {
      if (std::find(atoms[i].begin(), atoms[i].end(), state) != atoms[i].end()) continue;
      out.warnings.push_back(StrCat(AtomName(out.params[i].name, state), " is not listed in ",
                                    kAtomsFile, " and is ignored"));
    }
  }
  Finish(&reading);
  return std::move(reading.out);
}

}  // namespace
}  // namespace atoms

Result<Checkpoint> ReadUniversal(const SourceSet& source, const Patterns& patterns) {
  return source.manifest.empty() ? atoms::ReadForeign(source, patterns, false)
                                 : atoms::ReadOwn(source, patterns, false);
}

Result<Checkpoint> ReadUniversalWeights(const SourceSet& source, const Patterns& patterns) {
  return source.manifest.empty() ? atoms::ReadForeign(source, patterns, true)
                                 : atoms::ReadOwn(source, patterns, true);
}

}  // namespace shardwright::checkpoints
