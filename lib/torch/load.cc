#include <cstddef>
#include <exception>
#include <memory>
#include <span>
#include <utility>

#include <nlohmann/json.hpp>

#include "comm/comm.h"
#include "live/live.h"
#include "live/tell.h"
#include "live/trainer_comm.h"
#include "tensor/dtype.h"
#include "torch/interrupt.h"
#include "torch/operators.h"

namespace shardwright::live_torch {
namespace {

using nlohmann::json;

std::string Dump(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

json ErrorJson(const Error& error) {
  return {
      {"error",
       {{"code", static_cast<int>(error.code)}, {"message", error.message}, {"rank", error.rank}}}};
}

live::LoadOptions OptionsOf(const json& request) {
  live::LoadOptions options;
  options.input.roots = request.at("source").get<std::vector<std::string>>();
  options.input.pattern_files = request.at("patterns").get<std::vector<std::string>>();
  options.input.maps.maps = request.at("maps").get<std::vector<std::string>>();
  options.input.maps.sizes = request.at("map_sizes").get<std::string>();
  options.strict = request.at("strict").get<bool>();
  options.verify = request.at("verify").get<bool>();
  options.threads = request.at("threads").get<unsigned>();
  options.memory_bytes = request.at("memory").get<std::uint64_t>();
  options.input.proof = ucp::CompareOptions{options.threads, options.memory_bytes};
  return options;
}

std::unique_ptr<comm::Comm> CommOf(const json& request) {
  const int size = request.at("ranks").get<int>();
  if (size == 1) return comm::MakeSerialComm();
  const auto address = request.at("swap").get<std::uintptr_t>();
  return live::MakeTrainerComm(request.at("rank").get<int>(), size,
                               reinterpret_cast<live::SwapFunction>(address));
}

/// What this rank brings to a load.
struct Brought {
  std::vector<live::Held> held;
  std::vector<std::span<std::byte>> memory;
};

Result<Brought> Bring(json* request, const Result<std::vector<Given>>& tensors) {
  // The package found something wrong: all ranks have to hear of it.
  if (const json& failed = request->at("failed"); !failed.is_null()) {
    return Fail(static_cast<Errc>(failed.at("code").get<int>()),
                failed.at("message").get<std::string>());
  }
  SW_TRY(tensors);
  json& list = request->at("held");
  if (list.size() != tensors->size()) {
    return Fail(Errc::kInternal, "as many tensors as descriptions expected");
  }
  for (std::size_t i = 0; i < list.size(); ++i) list[i]["dtype"] = (*tensors)[i].dtype;
  Brought out;
  SW_TRY_ASSIGN(out.held, live::ParseHeld(list));
  for (std::size_t i = 0; i < out.held.size(); ++i) {
    const live::Held& held = out.held[i];
    const Given& given = (*tensors)[i];
    if (held.cut->shard_elems() != given.elems) {
      return Fail(Errc::kBadInput, live::Label(held) + ": " + held.cut->Explain() + " are " +
                                       std::to_string(held.cut->shard_elems()) +
                                       " elements, the tensor has " + std::to_string(given.elems));
    }
    out.memory.emplace_back(static_cast<std::byte*>(given.data),
                            given.elems * ItemSize(held.dtype));
  }
  return out;
}

Result<json> Load(json* request, const Result<std::vector<Given>>& tensors) {
  const Interrupts interrupts;
  OperatorSink sink;
  const std::unique_ptr<comm::Comm> comm = CommOf(*request);
  SW_TRY_ASSIGN(const Brought mine, comm->Agree(Bring(request, tensors)));
  const live::LoadOptions options = OptionsOf(*request);
  SW_TRY_ASSIGN(const live::Loaded loaded,
                live::Load(*comm, options, mine.held, mine.memory, sink));
  json told = live::Tell(loaded);
  told["warnings"] = sink.TakeWarnings();
  return told;
}

}  // namespace

std::string LoadRequest(const std::string& request, const Result<std::vector<Given>>& tensors) {
  try {
    json parsed = json::parse(request);
    const Result<json> told = Load(&parsed, tensors);
    return Dump(told ? json{{"loaded", *told}} : ErrorJson(told.error()));
  } catch (const std::exception& error) {
    return Dump(ErrorJson({Errc::kInternal, error.what()}));
  }
}

}  // namespace shardwright::live_torch
