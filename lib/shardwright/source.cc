#include "shardwright/source.h"

#include <unordered_map>
#include <utility>

#include <nlohmann/json.hpp>

#include "shardwright/calls_internal.h"
#include "ucp/convert.h"
#include "ucp/describe.h"

namespace shardwright {
namespace {

Result<Contents> DescribeOpened(comm::Comm& comm, const Source& source, Sink& sink) {
  SW_TRY_ASSIGN(ucp::InputOptions options, internal::InputOf(source));
  options.bound = true;
  SW_TRY_ASSIGN(const auto input, ucp::OpenInput(comm, options, sink));
  const dialect::Checkpoint& checkpoint = input->checkpoint;
  for (const std::string& one : dialect::OptimizerLeftOut(checkpoint)) sink.Warn(one);
  Contents out;
  out.format = checkpoint.origin;
  out.tag = checkpoint.tag;
  out.layout = ucp::Explain(checkpoint.layout);
  const std::vector<ucp::ListRow> rows = ucp::List(checkpoint);
  out.parameters.reserve(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    out.parameters.push_back(
        {rows[i].name, rows[i].kind, checkpoint.params[i].shape, rows[i].bytes});
  }
  nlohmann::json json = ucp::ListJson(checkpoint);
  json["fingerprint"] = ucp::FingerprintText(*input);
  if (!input->mapped.empty()) json["maps"] = ucp::MapsJson(input->mapped);
  out.json = json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  return out;
}

}  // namespace

Result<Contents> Describe(Ranks& ranks, const Source& source, Sink& sink) {
  return internal::Guarded([&] { return DescribeOpened(ranks.comm(), source, sink); });
}

}  // namespace shardwright
