// SPDX-License-Identifier: Apache-2.0
#include "ucp-load/check.h"

#include <algorithm>
#include <cstdint>
#include <ostream>
#include <set>
#include <string_view>
#include <utility>

#include <nlohmann/json.hpp>

#include "checkpoints/name_maps/model_config.h"
#include "convert/check.h"
#include "convert/describe.h"
#include "support/base/bytes.h"
#include "support/base/checked.h"
#include "support/base/text.h"

namespace shardwright::apps {

namespace {

/// Returns true if fewer than half of the parameters of `a` have a name that `b` has, too.
bool NamesDiffer(const checkpoints::Checkpoint& a, const checkpoints::Checkpoint& b) {
  std::set<std::string_view> names;
  for (const checkpoints::Param& param : b.params) names.insert(param.name);
  const auto common = std::ranges::count_if(
      a.params, [&](const checkpoints::Param& param) { return names.contains(param.name); });
  return 2 * static_cast<std::size_t>(common) < a.params.size();
}

/// Prints the flags with which two different checkpoints may be equal.
void SuggestFlags(cli::Context& context, const SourceFlags& source, const convert::Input& a,
                  const convert::Input& b, const std::string& only) {
  if (source.maps.empty() && NamesDiffer(a.checkpoint, b.checkpoint)) {
    context.sink().Note(
        "most parameters of INPUT have names that OUTPUT lacks; if OUTPUT has the names of another "
        "program, add --map auto or --map MAP:TO",
        0);
  }
  if (only.empty() && a.checkpoint.states.empty() != b.checkpoint.states.empty()) {
    context.sink().Note(
        "only one of the checkpoints has optimizer state; to compare an export with its source, "
        "add --only weight or --only master, as in the command that exported it",
        0);
  }
}

}  // namespace

Status CheckBoth(cli::Context& context, const SourceFlags& source, const std::string& other,
                 const std::string& only) {
  convert::InputOptions first = source.Options(context.flags());
  first.siblings = false;
  first.bound = !only.empty();  // states that are not compared may have any form
  convert::InputOptions second = first;
  second.source_paths = {other};
  second.maps = {};  // its names are the targets of the first one's maps
  second.weights_if_present = true;
  SW_TRY_ASSIGN(const auto b, OpenInput(context, second));
  first.maps.like = &b->checkpoint;
  SW_TRY_ASSIGN(const auto a, OpenInput(context, first));
  const convert::CompareOptions options{context.flags().threads, context.flags().memory_bytes};
  SW_TRY_ASSIGN(const auto report,
                convert::Check(context.comm(), *a, *b, options, context.sink(), only));
  nlohmann::json result = convert::CheckJson(report);
  if (!a->mapped.empty()) result["maps"] = convert::MapsJson(a->mapped);
  context.SetResult(std::move(result));
  for (const std::string& line : report.differences) context.out() << line << "\n";
  if (report.difference_count > report.differences.size()) {
    context.out() << "and " << report.difference_count - report.differences.size() << " more\n";
  }
  context.out() << Plural(report.tensors_equal, "tensor") << " equal, "
                << Plural(report.difference_count, "difference") << ", "
                << FormatBytes(report.bytes_compared) << " compared\n";
  if (report.difference_count == 0) return {};
  SuggestFlags(context, source, *a, *b, only);
  return Fail(Errc::kMismatch, source.input, " and ", other, ": ", report.differences.front());
}

Status WarnOfLayout(cli::Context& context, const convert::Input& input,
                    const checkpoints::Format& format, const checkpoints::TargetSpec& spec) {
  const checkpoints::Checkpoint& source = input.checkpoint;
  if (format.name != "deepspeed") return {};
  const auto layout = format.resolve(spec, source);
  if (!layout) return {};  // the conversion reports it
  const bool trained_so = source.origin == "deepspeed" || source.origin == "universal";
  if (!trained_so && layout->dtype == DType::kF32 && spec.Find("dtype") == nullptr) {
    context.sink().Note(
        "the output is for training in fp32, because the source has no other compute weights; for "
        "bf16 or fp16 add --target dtype=bf16 or dtype=fp16",
        0);
  }
  const std::uint64_t tp = layout->mesh.tp;
  if (tp == source.layout.mesh.tp) return {};
  const auto config = convert::ReadModelConfig(context.comm(), input);
  if (!config) return {};
  const auto facts = checkpoints::MergeConfigs(*config, source);
  if (!facts) return {};
  const auto heads = facts->values.find("num_key_value_heads");
  if (heads == facts->values.end()) return {};
  const std::uint64_t count = NumberIn<std::uint64_t>(heads->second).value_or(0);
  if (count % tp == 0) return {};
  context.sink().Warn(
      StrCat("tp=", tp, " does not divide the ", count, " key-value heads of ", facts->origin,
             " evenly: without a rule with granule (docs/patterns.md, "
             "\"Heads\") the output has parts of heads, which trainers may reject"));
  return {};
}

Status CheckNames(cli::Context& context, const convert::Input& input,
                  const checkpoints::Format& format, const checkpoints::TargetSpec& spec) {
  if (!input.mapped.empty()) return {};
  const auto config = [&] { return convert::ReadModelConfig(context.comm(), input); };
  SW_TRY_ASSIGN(const convert::OtherNames names,
                convert::FindOtherNames(input.checkpoint, input.patterns, format, spec, config));
  const std::vector<std::string>& flags = names.flags;
  if (flags.empty()) return {};
  // Programs read these two formats by fixed names. They skip other tensors, and
  // leave the parameters that they do not find at random values.
  if (format.name != "megatron" && format.name != "safetensors") {
    context.sink().Warn(
        StrCat(names.what, "; add ", Joined(flags, " or "), " to write the expected names"));
    return {};
  }
  const std::string& line = context.command_line();
  std::string run = StrCat("run ", line, " ", flags.front());
  if (flags.size() > 1) {
    run = StrCat("repeat the command with ", Joined(flags, " or "),
                 ", whichever is the map of the model's family,");
  }
  return Fail(Errc::kUsage, names.what, ": ", run, " to write the expected names, or ", line,
              " --map none to keep the present names");
}

}  // namespace shardwright::apps
