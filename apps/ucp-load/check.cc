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

namespace {

/// Finds a map from the names of a checkpoint to those of a format's programs.
/// \returns  "llama:megatron", or "auto" if several maps fit; empty if the
///        names already match or no map knows them
Result<std::string> MissingMap(const checkpoints::Checkpoint& checkpoint,
                               const std::vector<std::string>& wanted) {
  std::vector<std::string> found;
  for (const std::string& name : checkpoints::ModelMap::BuiltInNames()) {
    SW_TRY_ASSIGN(const auto map, checkpoints::ModelMap::BuiltIn(name));
    const std::vector<std::string> has = checkpoints::SidesOf(map, checkpoint);
    const auto is_wanted = [&](const std::string& side) {
      return std::ranges::find(wanted, side) != wanted.end();
    };
    if (std::ranges::any_of(has, is_wanted)) return std::string();
    const std::vector<std::string> all = map.sides();
    const auto to = std::ranges::find_first_of(wanted, all);
    if (!has.empty() && to != wanted.end())
      found.push_back(std::string(name).append(":").append(*to));
  }
  if (found.empty()) return std::string();
  return found.size() == 1 ? found.front() : std::string("auto");
}

}  // namespace

Status CheckNames(cli::Context& context, const convert::Input& input,
                  const checkpoints::Format& format, const std::vector<std::string>& wanted,
                  const std::string& output) {
  if (wanted.empty() || !input.mapped.empty() || input.checkpoint.origin == format.name) return {};
  SW_TRY_ASSIGN(const std::string map, MissingMap(input.checkpoint, wanted));
  if (map.empty()) return {};
  const std::string what =
      StrCat("the tensor names of ", input.checkpoint.tag,
             " are not the names that readers of the ", format.name, " format expect");
  if (format.name != "megatron") {
    context.sink().Warn(StrCat(what, "; add --map ", map, " to write the expected names"));
    return {};
  }
  return Fail(Errc::kUsage, what, ": run ucp-load ", ShellWord(input.source_paths.front()), " ",
              ShellWord(output), " --format ", format.name, " --map ", map,
              " to write the expected names, or pass --map none to keep the present names");
}

}  // namespace shardwright::apps
