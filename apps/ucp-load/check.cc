// SPDX-License-Identifier: Apache-2.0
#include "ucp-load/check.h"

#include <algorithm>
#include <ostream>
#include <utility>

#include <nlohmann/json.hpp>

#include "convert/check.h"
#include "convert/describe.h"
#include "support/base/bytes.h"
#include "support/base/text.h"

namespace shardwright::apps {

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
  context.out() << report.tensors_equal << " tensors equal, " << report.difference_count
                << " differences, " << FormatBytes(report.bytes_compared) << " compared\n";
  if (report.difference_count == 0) return {};
  return Fail(Errc::kMismatch, source.input, " and ", other, ": ", report.differences.front());
}

Status CheckNames(cli::Context& context, const convert::Input& input,
                  const checkpoints::Format& format, const checkpoints::TargetSpec& spec,
                  const std::string& output) {
  if (!input.mapped.empty() || input.checkpoint.origin == format.name) return {};
  convert::MapsAsked asked;
  convert::SetTarget(format, spec, &asked);
  if (asked.sides.empty()) return {};  // readers of this format take any names
  SW_TRY_ASSIGN(const std::string config, convert::ReadModelConfig(context.comm(), input));
  SW_TRY_ASSIGN(const std::vector<std::string> flags,
                convert::MapFlagsFor(input.checkpoint, asked, input.patterns, config));
  if (flags.empty()) return {};
  std::string which = Joined(flags, " or ");
  if (flags.size() > 1) which += ", whichever is the map of the model's family,";
  const std::string what =
      StrCat("the tensor names of ", input.checkpoint.tag,
             " are not the names that readers of the ", format.name, " format expect");
  if (format.name != "megatron") {
    context.sink().Warn(StrCat(what, "; add ", which, " to write the expected names"));
    return {};
  }
  return Fail(Errc::kUsage, what, ": run ucp-load ", ShellWord(input.source_paths.front()), " ",
              ShellWord(output), " --format ", format.name, " ", which,
              " to write the expected names, or pass --map none to keep the present names");
}

}  // namespace shardwright::apps
