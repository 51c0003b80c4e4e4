// SPDX-License-Identifier: Apache-2.0
#include "convert/api/compare.h"

#include <nlohmann/json.hpp>

#include "convert/api/calls_internal.h"
#include "convert/check.h"
#include "convert/describe.h"

namespace shardwright {
namespace {

Result<CompareReport> CompareOpened(comm::Comm& comm, const Source& first, const Source& second,
                                    const CompareOptions& options, Sink& sink) {
  SW_TRY(internal::CheckWork(options.threads, options.memory_bytes));
  SW_TRY_ASSIGN(convert::InputOptions of_a, internal::InputOf(first));
  SW_TRY_ASSIGN(convert::InputOptions of_b, internal::InputOf(second));
  const convert::CompareOptions how{options.threads, options.memory_bytes};
  of_a.proof = how;
  of_b.proof = how;
  of_b.maps = {};
  SW_TRY_ASSIGN(const auto b, convert::OpenInput(comm, of_b, sink));
  of_a.maps.like = &b->checkpoint;
  SW_TRY_ASSIGN(const auto a, convert::OpenInput(comm, of_a, sink));
  SW_TRY_ASSIGN(const convert::CheckReport found, convert::Check(comm, *a, *b, how, sink));
  nlohmann::json json = convert::CheckJson(found);
  if (!a->mapped.empty()) json["maps"] = convert::MapsJson(a->mapped);
  return CompareReport{
      found.tensors_equal,  found.tensors_different,
      found.bytes_compared, found.difference_count,
      found.differences,    json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)};
}

}  // namespace

Result<CompareReport> Compare(Ranks& ranks, const Source& first, const Source& second,
                              const CompareOptions& options, Sink& sink) {
  return internal::Guarded(
      [&] { return CompareOpened(ranks.comm(), first, second, options, sink); });
}

}  // namespace shardwright
