// SPDX-License-Identifier: Apache-2.0
#include "convert/api/source.h"

#include <unordered_map>
#include <utility>

#include <nlohmann/json.hpp>

#include "convert/api/calls_internal.h"
#include "convert/convert.h"
#include "convert/describe.h"

namespace shardwright {
namespace {

Result<Contents> DescribeOpened(comm::Comm& comm, const Source& source, Sink& sink) {
  SW_TRY_ASSIGN(convert::InputOptions options, internal::InputOf(source));
  options.bound = true;
  SW_TRY_ASSIGN(const auto input, convert::OpenInput(comm, options, sink));
  const checkpoints::Checkpoint& checkpoint = input->checkpoint;
  for (const std::string& one : checkpoints::OptimizerLeftOut(checkpoint)) sink.Warn(one);
  Contents out;
  out.format = checkpoint.origin;
  out.tag = checkpoint.tag;
  out.layout = convert::Explain(checkpoint.layout);
  const std::vector<convert::ListRow> rows = convert::List(checkpoint);
  out.parameters.reserve(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    out.parameters.push_back(
        {rows[i].name, rows[i].kind, checkpoint.params[i].shape, rows[i].bytes});
  }
  nlohmann::json json = convert::ListJson(checkpoint);
  json["fingerprint"] = convert::FingerprintText(*input);
  if (!input->mapped.empty()) json["maps"] = convert::MapsJson(input->mapped);
  out.json = json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  return out;
}

}  // namespace

Result<Contents> Describe(Ranks& ranks, const Source& source, Sink& sink) {
  return internal::Guarded([&] { return DescribeOpened(ranks.comm(), source, sink); });
}

}  // namespace shardwright
