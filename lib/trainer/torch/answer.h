// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <string>

#include <nlohmann/json.hpp>

#include "support/base/result.h"

namespace shardwright::trainer_torch {

/// Runs an operator. Returns {"result": ...} or {"error": {"code", "message", "rank"}}.
/// \param work  Result<json>(json request)
/// Converts exceptions to errors, so nothing is thrown.
template <class Work>
std::string Answer(const std::string& request, Work&& work) {
  using nlohmann::json;
  const auto dump = [](const json& value) {
    return value.dump(-1, ' ', false, json::error_handler_t::replace);
  };
  const auto failed = [&](const Error& error) {
    return dump({{"error",
                  {{"code", static_cast<int>(error.code)},
                   {"message", error.message},
                   {"rank", error.rank}}}});
  };
  try {
    const Result<json> told = work(json::parse(request));
    return told ? dump({{"result", *told}}) : failed(told.error());
  } catch (const std::exception& error) {
    return failed({Errc::kInternal, error.what()});
  }
}

}  // namespace shardwright::trainer_torch
