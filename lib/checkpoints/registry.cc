// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/registry.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <set>
#include <string>
#include <unordered_set>
#include <vector>

#include "checkpoints/dcp/dcp.h"
#include "checkpoints/deepspeed/common/scan.h"
#include "checkpoints/deepspeed/common/target.h"
#include "checkpoints/deepspeed/native/deepspeed.h"
#include "checkpoints/deepspeed/universal/universal.h"
#include "checkpoints/dtensor/dtensor.h"
#include "checkpoints/megatron/megatron.h"
#include "checkpoints/safetensors/safetensors.h"
#include "engine/layout/states.h"
#include "support/base/text.h"

namespace shardwright::checkpoints {
namespace {

bool Always(const TargetSpec& /*spec*/, const Checkpoint& /*source*/) { return true; }

constexpr Format kFormats[] = {
    {.name = "deepspeed",
     .summary = "native files of a parallel layout",
     .keys = kZeroKeys,
     .pointer = "latest",
     .claims = deepspeed::Claims,
     .belongs = deepspeed::BelongsTo,
     .scan = deepspeed::Scan,
     .read_file = ReadEngineFile,
     .read = ReadDeepSpeed,
     .read_weights = ReadDeepSpeedWeights,
     .running_names = Always,
     .resolve = deepspeed::Resolve,
     .write = deepspeed::Write,
     .readers = deepspeed::Readers,
     .same_files = SameFiles},
    {.name = "universal",
     .summary = "atoms, one file per parameter and state",
     .keys = kUniversalKeys,
     .pointer = "latest_universal",
     .claims = universal::Claims,
     .belongs = universal::BelongsTo,
     .scan = universal::Scan,
     .read_file = ReadEngineFile,
     .read = ReadUniversal,
     .read_weights = ReadUniversalWeights,
     .running_names = Always,
     .resolve = universal::Resolve,
     .write = universal::Write},
    {.name = dcp::kName,
     .summary = "torch.distributed.checkpoint folders",
     .keys = kDcpKeys,
     .claims = dcp::Claims,
     .belongs = dcp::BelongsTo,
     .sibling_folders = dcp::kSiblingFolders,
     .scan = dcp::Scan,
     .read_file = dcp::ReadFile,
     .read = dcp::Read,
     .read_weights = dcp::ReadWeights,
     .running_names = dcp::HasRunningNames,
     .resolve = dcp::Resolve,
     .write = dcp::Write,
     .readers = dcp::Readers,
     .sides = dcp::Sides},
    {.name = "dtensor",
     .summary = "one DTensor file per rank, as verl and Accelerate write",
     .keys = kDTensorKeys,
     .claims = dtensor::Claims,
     .belongs = dtensor::BelongsTo,
     .sibling_folders = dtensor::kSiblingFolders,
     .scan = dtensor::Scan,
     .read_file = dtensor::ReadFile,
     .read = dtensor::Read,
     .read_weights = dtensor::ReadWeights,
     .running_names = dtensor::HasRunningNames,
     .resolve = dtensor::Resolve,
     .write = dtensor::Write,
     .readers = dtensor::Readers,
     .sides = dtensor::Sides},
    {.name = "megatron",
     .summary = "Megatron-Core checkpoints, torch_dist and legacy",
     .keys = kMegatronKeys,
     .pointer = megatron::kTracker,
     .tag_of = megatron::TagOf,
     .claims = megatron::Claims,
     .belongs = megatron::BelongsTo,
     .scan = megatron::Scan,
     .read_file = megatron::ReadFile,
     .read = megatron::Read,
     .read_weights = megatron::ReadWeights,
     .resolve = megatron::Resolve,
     .write = megatron::Write,
     .sides = megatron::Sides},
    {.name = "safetensors",
     .summary = "weights by name, as on model hubs",
     .keys = kSafetensorsKeys,
     .claims = safetensors::Claims,
     .belongs = safetensors::BelongsTo,
     .stands_alone = safetensors::StandsAlone,
     .scan = safetensors::Scan,
     .read_file = safetensors::ReadFile,
     .read = safetensors::Read,
     .only_weights = true,
     .resolve = safetensors::Resolve,
     .write = safetensors::Write,
     .sides = safetensors::Sides},
};

/// Joins the names of a table's records: "deepspeed, universal".
template <typename Record>
std::string NamesOf(std::span<const Record> records) {
  std::vector<std::string> names;
  for (const Record& record : records) names.emplace_back(record.name);
  return Joined(names, ", ");
}

Result<const TargetKey*> NeedKey(const Format& format, std::string_view name) {
  for (const TargetKey& key : format.keys) {
    if (key.name == name) return &key;
  }
  std::vector<std::string> others;
  for (const Format& other : Formats()) {
    if (std::ranges::find(other.keys, name, &TargetKey::name) != other.keys.end()) {
      others.push_back("--format " + std::string(other.name));
    }
  }
  return Fail(Errc::kUsage, "target key ", Quoted(name), " is not one of ", NamesOf(format.keys),
              (others.empty() ? "" : "; it belongs to " + Joined(others, ", ")));
}

std::vector<Format>& Table() {
  static std::vector<Format> table(std::begin(kFormats), std::end(kFormats));
  return table;
}

}  // namespace

std::span<const Format> Formats() { return Table(); }

bool AddFormat(const Format& format) {
  Table().push_back(format);
  return true;
}

std::string FormatNames() { return NamesOf(Formats()); }

const Format* FindFormat(std::string_view name) {
  for (const Format& format : Formats()) {
    if (format.name == name) return &format;
  }
  return nullptr;
}

Result<const Format*> RequireFormat(std::string_view name) {
  if (const Format* format = FindFormat(name)) return format;
  return Fail(Errc::kUsage, "format ", Quoted(name), " does not exist, there are ", FormatNames());
}

namespace {

/// Sets the kind of undecided tensors according to the user's pattern files.
void DecideKinds(const Patterns& patterns, Checkpoint* checkpoint) {
  std::unordered_set<std::string> frozen;
  for (Param& param : checkpoint->params) {
    if (!param.undecided) continue;
    const std::optional<bool> is_frozen = patterns.IsFrozenParameter(param.name);
    if (!is_frozen) continue;
    param.undecided = false;
    if (!*is_frozen) continue;
    param.kind = ParamKind::kFrozen;
    param.entry = false;
    frozen.insert(param.name);
  }
  if (frozen.empty()) return;
  checkpoint->frozen_unknown = false;
  for (layout::LogicalTensor& tensor : checkpoint->map.tensors) {
    if (tensor.state == layout::kBuffer && frozen.contains(tensor.name)) {
      tensor.state = layout::kFrozen;
    }
  }
}

/// Calls Format::read. A scan finds all files of the given folders, so
/// if files are missing, the error suggests another folder with --also.
Result<Checkpoint> ReadWhole(const Format& format, const SourceSet& source,
                             const Patterns& patterns) {
  Result<Checkpoint> whole = format.read(source, patterns);
  if (whole) DecideKinds(patterns, &*whole);
  if (whole && !source.weights_of.empty() && whole->weight_sets.empty()) {
    return Fail(Errc::kUsage, "--weights-of ", source.weights_of, ": ", source.tag, ": format ",
                source.format, " has one set of weights; leave --weights-of out");
  }
  if (whole || whole.error().code != Errc::kNotFound) return whole;
  Error error = std::move(whole).error();
  error.message += kAddFolder;
  return tl::unexpected<Error>(std::move(error));
}

}  // namespace

Result<Checkpoint> ReadCheckpoint(const SourceSet& source, const Patterns& patterns) {
  SW_TRY_ASSIGN(const Format* format, RequireFormat(source.format));
  return ReadWhole(*format, source, patterns);
}

Result<Checkpoint> ReadCheckpointOrWeights(const SourceSet& source, const Patterns& patterns) {
  SW_TRY_ASSIGN(const Format* format, RequireFormat(source.format));
  Result<Checkpoint> whole = ReadWhole(*format, source, patterns);
  if (whole || format->read_weights == nullptr) return whole;
  const Errc code = whole.error().code;
  if (code != Errc::kNotFound && code != Errc::kUnsupported) return whole;
  Result<Checkpoint> model = format->read_weights(source, patterns);
  if (!model) {
    // The first error usually includes the reason why the model could not be read.
    Error error = std::move(whole).error();
    const std::string& alone = model.error().message;
    if (error.message.find(alone) == std::string::npos) {
      error.message += "; the weights cannot be read alone either: " + alone;
    }
    return tl::unexpected<Error>(std::move(error));
  }
  DecideKinds(patterns, &*model);
  SW_CHECK(model->only_weights.has_value());
  model->only_weights->why = std::move(whole).error();
  return model;
}

Result<TargetSpec> ParseTarget(const Format& format, std::string_view text) {
  TargetSpec spec;
  std::set<std::string_view> seen;
  std::string_view rest = text;
  while (!rest.empty()) {
    const std::size_t equals = rest.find('=');
    std::size_t comma = rest.find(',');
    if (equals == std::string_view::npos || equals > comma) {
      return Fail(Errc::kUsage, "target \"", rest.substr(0, comma), "\": key=value expected");
    }
    const std::string_view name = rest.substr(0, equals);
    if (!seen.insert(name).second) {
      return Fail(Errc::kUsage, "target key \"", name, "\" is given twice");
    }
    SW_TRY_ASSIGN(const TargetKey* key, NeedKey(format, name));
    const bool ranges = key->lists && equals + 1 < rest.size() && rest[equals + 1] >= '0' &&
                        rest[equals + 1] <= '9';
    if (ranges) comma = std::string_view::npos;
    const std::string_view value =
        rest.substr(equals + 1, comma == std::string_view::npos ? comma : comma - equals - 1);
    SW_TRY(key->check(name, value));
    spec.settings.emplace_back(name, value);
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
    if (rest.empty()) return Fail(Errc::kUsage, "target \"", text, "\" ends in a comma");
  }
  return spec;
}

}  // namespace shardwright::checkpoints
