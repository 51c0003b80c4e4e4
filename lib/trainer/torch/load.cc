// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include <nlohmann/json.hpp>

#include "engine/tensor/dtype.h"
#include "partial/report/report_json.h"
#include "partial/restore/restore.h"
#include "partial/store/store.h"
#include "support/comm/comm.h"
#include "support/os/socket.h"
#include "trainer/cache/attach.h"
#include "trainer/load/load.h"
#include "trainer/load/load_result_json.h"
#include "trainer/load/trainer_comm.h"
#include "trainer/torch/answer.h"
#include "trainer/torch/interrupt.h"
#include "trainer/torch/operators.h"

namespace shardwright::trainer_torch {
namespace {

using nlohmann::json;

trainer::LoadOptions OptionsOf(const json& request) {
  trainer::LoadOptions options;
  options.input.source_paths = request.at("source").get<std::vector<std::string>>();
  options.input.pattern_files = request.at("patterns").get<std::vector<std::string>>();
  options.input.maps.maps = request.at("maps").get<std::vector<std::string>>();
  options.input.maps.sizes = request.at("map_sizes").get<std::string>();
  options.input.allow_mixed = request.at("allow_mixed").get<bool>();
  options.input.weights_of = request.at("weights_of").get<std::string>();
  options.strict = request.at("strict").get<bool>();
  options.verify = request.at("verify").get<bool>();
  options.optimizer = !request.at("store").at("weights_only").get<bool>();
  options.threads = request.at("threads").get<unsigned>();
  options.memory_bytes = request.at("memory").get<std::uint64_t>();
  options.input.proof = convert::CompareOptions{options.threads, options.memory_bytes};
  return options;
}

std::unique_ptr<comm::Comm> CommOf(const json& request) {
  const int size = request.at("ranks").get<int>();
  if (size == 1) return comm::MakeSerialComm();
  const auto address = request.at("swap").get<std::uintptr_t>();
  // NOLINTNEXTLINE(performance-no-int-to-ptr): the package passes the address of the function.
  const auto swap = reinterpret_cast<trainer::SwapFunction>(address);
  return trainer::MakeTrainerComm(request.at("rank").get<int>(), size, swap);
}

/// Shards and tensors of this rank for a load.
struct Brought {
  std::vector<trainer::TrainerShard> held;
  std::vector<trainer::Memory> memory;
};

/// Returns the staging memory: the tensor after the tensors to load, if there is one.
std::span<std::byte> StagingOf(const json& request, std::span<const TrainerTensor> tensors) {
  if (tensors.size() <= request.at("held").size()) return {};
  return {tensors.back().data, tensors.back().elems};
}

Result<Brought> Bring(json* request, const Result<std::vector<TrainerTensor>>& tensors) {
  // The Python package reported an error, which all ranks must receive.
  if (const json& failed = request->at("failed"); !failed.is_null()) {
    return Fail(static_cast<Errc>(failed.at("code").get<int>()),
                failed.at("message").get<std::string>());
  }
  SW_TRY(tensors);
  json& list = request->at("held");
  const bool staged = tensors->size() == list.size() + 1;
  if ((!staged && tensors->size() != list.size()) || (staged && tensors->back().far)) {
    return Fail(Errc::kInternal, "expected one tensor per description, or one more on the CPU");
  }
  for (std::size_t i = 0; i < list.size(); ++i) list[i]["dtype"] = (*tensors)[i].dtype;
  Brought out;
  SW_TRY_ASSIGN(out.held, trainer::ParseShards(list));
  for (std::size_t i = 0; i < out.held.size(); ++i) {
    const trainer::TrainerShard& held = out.held[i];
    const TrainerTensor& given = (*tensors)[i];
    if (held.cut->shard_elems() != given.elems) {
      return Fail(Errc::kBadInput, trainer::Label(held), ": ", held.cut->Explain(), " has ",
                  held.cut->shard_elems(), " elements, the tensor has ", given.elems);
    }
    out.memory.push_back(
        {{given.data, given.far ? 0 : given.elems * ItemSize(held.dtype)}, given.far.get()});
  }
  return out;
}

/// Returns the options of a restore, from the keys of the request that only stores use.
Result<partial::RestoreOptions> RestoreOptionsOf(const json& request) {
  const json& asked = request.at("store");
  partial::RestoreOptions options;
  const auto roots = request.at("source").get<std::vector<std::string>>();
  if (roots.size() != 1) {
    return Fail(Errc::kUsage, "a store is one folder, found ", roots.size(), " paths");
  }
  if (!request.at("maps").empty()) {
    return Fail(Errc::kUnsupported, roots.front(), ": maps= is not supported for a store");
  }
  if (!request.at("weights_of").get<std::string>().empty()) {
    return Fail(Errc::kUnsupported, roots.front(), ": weights_of= is not supported for a store");
  }
  options.store = roots.front();
  options.pattern_files = request.at("patterns").get<std::vector<std::string>>();
  options.agents = asked.at("agents").get<std::vector<std::string>>();
  options.lost_unreachable = asked.at("lost_unreachable").get<bool>();
  // Weights alone serve to inspect the model. Training restarts with its optimizer.
  options.read_only = asked.at("read_only").get<bool>() || asked.at("weights_only").get<bool>();
  options.begin = asked.at("begin").get<bool>();
  options.allow_empty = options.begin;
  if (!asked.at("trust_user").is_null()) {
    options.trusted_user = asked.at("trust_user").get<std::uint32_t>();
  }
  if (!asked.at("at").is_null()) options.at = asked.at("at").get<std::uint64_t>();
  for (const std::string& text : options.agents) {
    SW_TRY_ASSIGN(const os::Address address, os::ParseAddress(text));
    if (address.is_local()) continue;
    return Fail(Errc::kUnsupported, text,
                ": agents at TCP ports are not supported here, only socket files (unix:PATH); "
                "restore with pec-restore --agents");
  }
  return options;
}

/// Returns true if the source is a store, or if the caller begins a run in a new store.
/// \error kUsage  keys for stores are set, but the source is not a store
/// Collective.
Result<bool> IsStore(comm::Comm& comm, const json& request) {
  const json& asked = request.at("store");
  if (asked.at("begin").get<bool>()) return true;
  const auto look = [&]() -> Result<std::string> {
    const auto roots = request.at("source").get<std::vector<std::string>>();
    bool store = false;
    if (roots.size() == 1) {
      SW_TRY_ASSIGN(store, partial::Store::IsStore(roots.front()));
    }
    if (store) return "store";
    if (asked.at("agents").empty() && asked.at("at").is_null() &&
        !asked.at("read_only").get<bool>()) {
      return "";
    }
    return Fail(Errc::kUsage, (roots.empty() ? std::string() : roots.front() + ": "),
                "agents=, at= and read_only= require a store, and the source is not a store");
  };
  SW_TRY_ASSIGN(const std::string text, comm.OnRootText(look));
  return !text.empty();
}

Result<json> LoadStore(comm::Comm& comm, const json& request, const trainer::LoadOptions& load,
                       const Brought& mine, Sink& sink) {
  SW_TRY_ASSIGN(const partial::RestoreOptions options, comm.Agree(RestoreOptionsOf(request)));
  json told;
  const auto use = [&](std::unique_ptr<convert::Input> source,
                       const partial::RestoreReport&) -> Status {
    SW_TRY_ASSIGN(const trainer::Loaded loaded,
                  trainer::LoadFrom(comm, std::move(source), load, mine.held, mine.memory, sink));
    told = trainer::LoadResultJson(loaded);
    return {};
  };
  SW_TRY_ASSIGN(const partial::RestoreReport report,
                partial::RestoreStore(comm, options, sink, use));
  told["restored"] = partial::RestoreJson(report);
  return told;
}

/// Returns the address of a shared-memory cache, or nothing if the source is something else.
/// \error kUsage  keys for other sources are set; an invalid address
Result<std::optional<os::Address>> CacheAddressOf(const json& request) {
  const auto roots = request.at("source").get<std::vector<std::string>>();
  if (roots.size() != 1 || !roots.front().starts_with("unix:")) return std::optional<os::Address>();
  const json& asked = request.at("store");
  if (!asked.at("agents").empty() || !asked.at("at").is_null() ||
      asked.at("read_only").get<bool>() || asked.at("begin").get<bool>()) {
    return Fail(Errc::kUsage, roots.front(),
                ": agents=, at=, read_only= and begin= require a store, and the source is a "
                "shared-memory cache");
  }
  if (!request.at("maps").empty() || !request.at("patterns").empty()) {
    return Fail(Errc::kUsage, roots.front(),
                ": maps= and patterns= are set when the shared-memory cache is started: use "
                "ucp-load serve --map, --patterns");
  }
  if (!request.at("weights_of").get<std::string>().empty()) {
    return Fail(Errc::kUsage, roots.front(),
                ": weights_of= is set when the shared-memory cache is started: use ucp-load "
                "serve --weights-of");
  }
  SW_TRY_ASSIGN(os::Address address, os::ParseAddress(roots.front()));
  if (!asked.at("trust_user").is_null()) {
    address.trusted_user = asked.at("trust_user").get<std::uint32_t>();
  }
  return std::optional(std::move(address));
}

Result<json> LoadResident(comm::Comm& comm, const json& request, const os::Address& address,
                          trainer::LoadOptions options, const Brought& mine, Sink& sink) {
  const std::chrono::milliseconds wait(request.at("wait").get<std::uint64_t>());
  SW_TRY_ASSIGN(cache::Attached attached, cache::Attach(comm, address, wait, sink));
  options.in_memory = true;
  SW_TRY_ASSIGN(
      const trainer::Loaded loaded,
      trainer::LoadFrom(comm, std::move(attached.input), options, mine.held, mine.memory, sink));
  SW_TRY(cache::Detach(comm, attached));
  json told = std::move(attached.told);
  trainer::TellLoad(loaded, &told);
  told["restored"] = nullptr;
  return told;
}

Result<json> LoadCheckpoint(comm::Comm& comm, const trainer::LoadOptions& options,
                            const Brought& mine, Sink& sink) {
  SW_TRY_ASSIGN(const trainer::Loaded loaded,
                trainer::Load(comm, options, mine.held, mine.memory, sink));
  json told = trainer::LoadResultJson(loaded);
  told["restored"] = nullptr;
  return told;
}

Result<json> Load(json* request, const Result<std::vector<TrainerTensor>>& tensors) {
  const Interrupts interrupts;
  OperatorSink sink;
  const std::unique_ptr<comm::Comm> comm = CommOf(*request);
  SW_TRY_ASSIGN(const Brought mine, comm->Agree(Bring(request, tensors)));
  SW_TRY_ASSIGN(const std::optional<os::Address> address, comm->Agree(CacheAddressOf(*request)));
  trainer::LoadOptions options = OptionsOf(*request);
  options.staging = StagingOf(*request, *tensors);
  json told;
  if (address) {
    SW_TRY_ASSIGN(told, LoadResident(*comm, *request, *address, options, mine, sink));
  } else {
    SW_TRY_ASSIGN(const bool store, IsStore(*comm, *request));
    SW_TRY_ASSIGN(told, store ? LoadStore(*comm, *request, options, mine, sink)
                              : LoadCheckpoint(*comm, options, mine, sink));
  }
  told["warnings"] = sink.TakeWarnings();
  return told;
}

}  // namespace

std::string LoadRequest(const std::string& request,
                        const Result<std::vector<TrainerTensor>>& tensors) {
  return Answer(request, [&](json parsed) { return Load(&parsed, tensors); });
}

}  // namespace shardwright::trainer_torch
