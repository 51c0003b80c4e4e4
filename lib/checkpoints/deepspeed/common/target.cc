// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/deepspeed/common/target.h"

#include <algorithm>
#include <map>
#include <set>

#include "checkpoints/deepspeed/common/flat.h"
#include "checkpoints/deepspeed/common/pipeline_stages.h"
#include "checkpoints/tp_rules/rule_source.h"
#include "engine/layout/rule.h"
#include "support/base/checked.h"
#include "support/base/limits.h"

namespace shardwright::checkpoints {

namespace {

tl::unexpected<Error> BadValue(std::string_view key, std::string_view value,
                               std::string_view accepts) {
  return Fail(Errc::kUsage, "target ", key, "=", value, ": ", accepts, " expected");
}

Result<std::uint64_t> ParseCount(std::string_view key, std::string_view value, std::uint64_t first,
                                 std::uint64_t last) {
  const auto count = NumberIn<std::uint64_t>(value);
  if (!count || *count < first || *count > last) {
    return BadValue(key, value,
                    "a number from " + std::to_string(first) + " to " + std::to_string(last));
  }
  return *count;
}

Result<bool> ParseFlag(std::string_view key, std::string_view value) {
  if (value == "true") return true;
  if (value == "false") return false;
  return BadValue(key, value, "true or false");
}

Result<DType> ParseDType(std::string_view value) {
  const auto dtype = DTypeFromName(value);
  if (dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16) return *dtype;
  return BadValue("dtype", value, "fp32, fp16 or bf16");
}

Status ParseItem(std::string_view key, std::string_view value, ZeroSpec& spec) {
  const auto ranks = [&](std::optional<std::uint64_t>& count) -> Status {
    SW_TRY_ASSIGN(count, ParseCount(key, value, 1, limits::kRanks));
    return {};
  };
  if (key == "dp") return ranks(spec.dp);
  if (key == "tp") return ranks(spec.tp);
  if (key == "pp") return ranks(spec.pp);
  if (key == "ep") return ranks(spec.ep);
  if (key == "zero") {
    SW_TRY_ASSIGN(spec.zero, ParseCount(key, value, 0, 3));
  } else if (key == "sub_group") {
    SW_TRY_ASSIGN(spec.sub_group, ParseCount(key, value, 1, std::uint64_t{1} << 62));
  } else if (key == "dtype") {
    SW_TRY_ASSIGN(spec.dtype, ParseDType(value));
  } else if (key == "round_robin") {
    SW_TRY_ASSIGN(spec.round_robin, ParseFlag(key, value));
  } else if (key == "stages") {
    const bool method = value == "uniform" || value == "parameters" || value == "type";
    if (!method) SW_TRY(ParseStageRanges(value));
    spec.stages = value;
  }
  return {};
}

std::string Setting(std::string_view key, std::uint64_t value) {
  return std::string(key) + "=" + std::to_string(value);
}

Status CheckExperts(const Topology& to, const Checkpoint& source) {
  std::map<std::uint32_t, std::uint64_t> experts;
  const Param* foreign = nullptr;
  for (const Param& param : source.params) {
    if (param.expert && !IsNativeExpert(param)) foreign = &param;
    if (!IsNativeExpert(param)) continue;
    std::uint64_t& count = experts[param.expert->layer];
    count = std::max<std::uint64_t>(count, std::uint64_t{param.expert->expert} + 1);
  }
  if (experts.empty()) {
    if (to.ep == 1) return {};
    if (foreign == nullptr) {
      return Fail(Errc::kInfeasible, Setting("ep", to.ep), ": the model has no experts");
    }
    return Fail(Errc::kUnsupported, Setting("ep", to.ep), ": \"", foreign->name,
                "\" is an ordinary parameter to DeepSpeed, which distributes only experts of its "
                "own MoE layers (deepspeed_experts)");
  }
  for (const auto& [layer, count] : experts) {
    if (count % to.ep == 0) continue;
    return Fail(Errc::kInfeasible, Setting("ep", to.ep), " does not divide the ", count,
                " experts of MoE layer ", layer);
  }
  if (to.dp % to.ep != 0) {
    return Fail(Errc::kInfeasible, Setting("ep", to.ep), " does not divide ", Setting("dp", to.dp));
  }
  if (to.zero == 3) {
    return Fail(Errc::kUnsupported,
                "zero=3: DeepSpeed trains native MoE layers with zero=0, 1 or 2 only");
  }
  if (to.pp > 1) {
    return Fail(Errc::kUnsupported, Setting("pp", to.pp),
                ": MoE layers in several pipeline stages are not supported, because DeepSpeed "
                "numbers them by stage");
  }
  return {};
}

Status CheckPipeline(const Topology& to, const ZeroSpec& spec) {
  if (!to.pipeline) {
    if (to.pp > 1) {
      return Fail(
          Errc::kUnsupported, Setting("pp", to.pp),
          ": the source is not a pipeline module, so the layers of its parameters are unknown");
    }
    if (!spec.stages.empty()) {
      return Fail(Errc::kUsage, "stages=", spec.stages, ": the source is not a pipeline module");
    }
    return {};
  }
  if (to.zero >= 2) {
    return Fail(Errc::kUnsupported, Setting("zero", to.zero),
                ": DeepSpeed runs pipeline modules with zero=0 or 1");
  }
  if (to.zero == 0 && to.dtype == DType::kBF16) {
    return Fail(
        Errc::kUnsupported,
        "zero=0 with bf16 weights: DeepSpeed cannot resume a pipeline module from it; use zero=1");
  }
  return {};
}

/// Fails if the number of stages changes and a tied layer is unknown.
/// Layers that use a tied module through another function have no file.
Status CheckTied(const Topology& to, const Checkpoint& source) {
  if (!to.pipeline || to.pp == 1 || to.pp == source.layout.mesh.pp) return {};
  for (const Param& param : source.params) {
    if (!param.name.starts_with("tied_modules.") || param.tied_layers.size() > 1) continue;
    return Fail(Errc::kUnsupported, Setting("pp", to.pp), ": \"", param.name,
                "\" is tied, and the files do not record which other layers use it");
  }
  return {};
}

Status CheckCuts(const Topology& to, const Checkpoint& source) {
  if (to.tp == 1) return {};
  for (const Param& param : source.params) {
    if (!param.alias_of.empty()) continue;
    const auto cut = CutOf(param, to.tp, 0);
    if (!cut) {
      return Within(Setting("tp", to.tp), cut.error());
    }
  }
  return {};
}

}  // namespace

Status CheckZeroKey(std::string_view key, std::string_view value) {
  ZeroSpec spec;
  return ParseItem(key, value, spec);
}

Result<ZeroSpec> ReadZeroSpec(const TargetSpec& spec) {
  ZeroSpec out;
  for (const auto& [key, value] : spec.settings) SW_TRY(ParseItem(key, value, out));
  return out;
}

Result<Topology> ResolveTopology(const ZeroSpec& spec, const Checkpoint& source) {
  const Topology from = TopologyOf(source.layout);
  Topology to;
  to.zero = spec.zero.value_or(from.zero);
  to.dp = spec.dp.value_or(from.dp);
  to.tp = spec.tp.value_or(from.tp);
  // Stages and expert ranks of another format do not apply to DeepSpeed.
  to.pp = spec.pp.value_or(from.pipeline ? from.pp : 1);
  const bool native = std::any_of(source.params.begin(), source.params.end(), IsNativeExpert);
  to.ep = spec.ep.value_or(native ? from.ep : 1);
  to.dtype = spec.dtype.value_or(from.dtype);
  to.pipeline = from.pipeline;
  // Round robin is a setting of the engine that resumes, not of the state. Its default is off.
  to.round_robin = spec.round_robin.value_or(false);
  if (from.zero == 3) to.sub_group = from.sub_group;
  to.sub_group = spec.sub_group.value_or(to.sub_group);
  const bool fits = to.dp <= limits::kRanks / to.tp && to.dp * to.tp <= limits::kRanks / to.pp;
  if (!fits) {
    return Fail(Errc::kLimit, Setting("dp", to.dp), ",", Setting("tp", to.tp), ",",
                Setting("pp", to.pp), ": more than ", limits::kRanks, " ranks");
  }
  if (to.round_robin && to.zero != 1 && to.zero != 2) {
    return Fail(Errc::kUnsupported, "round_robin=true: zero=1 or zero=2 expected, found ",
                Setting("zero", to.zero));
  }
  if (spec.sub_group && to.zero != 3) {
    return Fail(Errc::kUnsupported, Setting("sub_group", *spec.sub_group),
                ": zero=3 expected, found ", Setting("zero", to.zero));
  }
  SW_TRY(CheckExperts(to, source));
  SW_TRY(CheckPipeline(to, spec));
  SW_TRY(CheckTied(to, source));
  SW_TRY(CheckCuts(to, source));
  if (to.pipeline) {
    SW_TRY_ASSIGN(to.stages, ChooseStages(spec.stages, to, source));
  }
  return to;
}

}  // namespace shardwright::checkpoints
