#include <unistd.h>

#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "common/pec.h"
#include "os/socket.h"
#include "os/tls.h"
#include "pec-save/save_flags.h"
#include "pec-save/subcommands.h"
#include "pec/agent/agent_client.h"
#include "pec/agent/agent_run.h"
#include "pec/report/report_json.h"
#include "text/text.h"

namespace shardwright::apps {
namespace {

using Json = nlohmann::json;

constexpr std::chrono::hours kStopPatience(24 * 30);

std::string HostName() {
  char name[256] = "";
  if (gethostname(name, sizeof name - 1) != 0 || name[0] == '\0') return "localhost";
  return name;
}

/// A number of the answer as text; "none" where it is absent.
std::string Number(const Json& json, const char* key) {
  const auto found = json.find(key);
  if (found == json.end() || !found->is_number()) return "none";
  return found->dump();
}

std::uint64_t Bytes(const Json& json, const char* key) {
  const auto found = json.find(key);
  return found != json.end() && found->is_number_unsigned() ? found->get<std::uint64_t>() : 0;
}

void ShowStatus(cli::Context& context, const Json& json) {
  std::ostream& out = context.out();
  out << "process   " << Number(json, "pid") << "\n"
      << "newest    iteration " << Number(json, "newest") << ", persisted "
      << Number(json, "persisted") << "\n"
      << "memory    " << FormatBytes(Bytes(json, "memory_bytes")) << " of "
      << FormatBytes(Bytes(json, "memory_limit_bytes")) << "\n"
      << "snapshots " << Number(json, "snapshots") << ", failed "
      << Number(json, "snapshots_failed") << ", not persisted " << Number(json, "snapshots_skipped")
      << "\n"
      << "persists  " << Number(json, "persists") << ", failed " << Number(json, "persists_failed")
      << "\n";
  if (const std::string error = json.value("last_error", ""); !error.empty()) {
    out << "error     " << text::Printable(error) << "\n";
  }
  text::Table table({text::Table::Column{"BUFFER"},
                     text::Table::Column{"ITERATION", text::Table::Align::kRight}});
  for (const char* list : {"buffers", "copies"}) {
    for (const Json& one : json.value(list, Json::array())) {
      const std::string state = one.value("state", "copy of " + one.value("origin", ""));
      table.AddRow({text::Printable(state), Number(one, "iteration")});
    }
  }
  out << "\n";
  context.Print(table);
}

Status RunAgent(cli::Context& context, const SaveFlags& save, const KeyFlags& key,
                pec::AgentRunOptions options) {
  if (const int ranks = context.comm().size(); ranks > 1) {
    return Fail(Errc::kUnsupported,
                "pec-save agent: one process for each node, without a launcher of ranks; found " +
                    std::to_string(ranks) + " ranks");
  }
  options.agent.save = save.Options(context.flags());
  options.input = save.source.Options(context.flags());
  options.agent.pattern_files = options.input.pattern_files;
  options.agent.tokens_path = save.selection.tokens;
  if (options.name.empty()) options.name = HostName();
  SW_TRY_ASSIGN(options.key, key.Read(context));
  SW_TRY_ASSIGN(const pec::AgentStatus end, pec::RunAgent(options, context.sink()));
  context.SetResult(pec::AgentJson(end));
  context.out() << "snapshots " << end.snapshots << ", " << FormatBytes(end.snapshot_bytes)
                << "\npersists  " << end.persists << ", " << end.snapshots_skipped
                << " snapshots were not persisted\n";
  return {};
}

/// Ends a wait for an answer.
os::Stop StopOf(cli::Context& context) {
  const Sink& sink = context.sink();
  return [&sink] { return sink.stop_requested(); };
}

/// Which agent is asked, and how.
struct AddressFlags {
  std::string address;
  KeyFlags key;

  void AddTo(cli::App& app) {
    app.AddInput(&address, "where the agent listens, unix:PATH or HOST:PORT", "ADDRESS");
    key.AddTo(app);
    app.Check([this, &app]() -> Status {
      if (address.empty()) return {};
      return key.CheckRules(app, {address});
    });
  }
  Result<std::unique_ptr<pec::AgentClient>> Client(
      cli::Context& context, std::chrono::milliseconds patience = pec::kAgentPatience) const {
    SW_TRY_ASSIGN(os::Address where, os::ParseAddress(address));
    SW_TRY_ASSIGN(auto secret, key.Read(context));
    return std::make_unique<pec::AgentClient>(std::move(where), std::move(secret), StopOf(context),
                                              patience);
  }
};

}  // namespace

int AgentMain(int argc, const char* const* argv) {
  cli::App app(
      "pec-save agent",
      "Keep running: hold a snapshot of each checkpoint that the folder's `latest` names in memory "
      "and save it beside the training; a signal ends it when all is saved.",
      {{"ckpt/ store/ --listen unix:/run/user/1/pec.sock",
        "Saves what a training job on this node writes."}});
  SaveFlags save;
  KeyFlags key;
  pec::AgentRunOptions options;
  options.agent.memory_bytes = std::uint64_t{8} << 30;
  app.Use({cli::Shared::kVerify, cli::Shared::kThreads, cli::Shared::kMemory});
  app.Daily({"--listen", "--peer", "--key", "--memory-limit", "--bandwidth"});
  app.Group("The agent");
  app.AddList("--listen", &options.listen, "where requests come in", "unix:PATH|HOST:PORT");
  app.AddList("--peer", &options.peers, "agent that keeps copies of the snapshots",
              "unix:PATH|HOST:PORT");
  key.AddTo(app);
  app.AddText("--name", &options.name, "what peers call it [default: the host's name]", "NAME");
  app.AddFlag("--copies-only", &options.copies_only, "take no snapshots, keep copies of others");
  app.AddSize("--memory-limit", &options.agent.memory_bytes,
              "memory for snapshots and copies; a snapshot above it is refused");
  app.AddSize("--bandwidth", &options.agent.bandwidth,
              "bytes per second that saving and copying may take; 0: all");
  save.AddTo(app);
  app.Check([&]() -> Status {
    SW_TRY(save.CheckRules(app));
    if (options.copies_only && options.listen.empty()) {
      return Fail(Errc::kUsage, "--copies-only needs --listen: copies come in there");
    }
    std::vector<std::string> addresses = options.listen;
    addresses.insert(addresses.end(), options.peers.begin(), options.peers.end());
    return key.CheckRules(app, addresses);
  });
  return app.Run(argc, argv,
                 [&](cli::Context& context) { return RunAgent(context, save, key, options); });
}

int KeygenMain(int argc, const char* const* argv) {
  cli::App app(
      "pec-save keygen",
      "Make a key that agents at ports and all who ask them share: a new file that only its "
      "owner can read, for every node.",
      {{"~/.pec.key", "Makes the key; agents and restores take it with --key."}});
  std::string path;
  app.AddInput(&path, "file to make", "FILE");
  return app.Run(argc, argv, [&](cli::Context& context) {
    return context.comm().OnRoot([&] { return os::TlsKey::Make(path); });
  });
}

int StatusMain(int argc, const char* const* argv) {
  cli::App app("pec-save status", "Show what an agent does.",
               {{"unix:/run/user/1/pec.sock", "Asks the agent that listens there."}});
  AddressFlags flags;
  flags.AddTo(app);
  return app.Run(argc, argv, [&](cli::Context& context) -> Status {
    SW_TRY_ASSIGN(const auto client, flags.Client(context));
    return context.comm().OnRoot([&]() -> Status {
      SW_TRY_ASSIGN(const std::string text, client->AskText("status"));
      Json json = Json::parse(text, nullptr, false);
      if (!json.is_object()) {
        return Fail(Errc::kBadInput, flags.address + ": no status of an agent");
      }
      ShowStatus(context, json);
      context.SetResult(std::move(json));
      return {};
    });
  });
}

int TellMain(int argc, const char* const* argv) {
  cli::App app("pec-save tell", "Send an agent a request and show its answer.",
               {{"unix:/run/user/1/pec.sock snapshot", "Has it take a snapshot now."},
                {"unix:/run/user/1/pec.sock stop", "Ends it; waits until all is saved."}});
  AddressFlags flags;
  std::string request;
  flags.AddTo(app);
  app.AddInput(&request, "snapshot, flush or stop (docs/formats/agent.md)", "REQUEST");
  return app.Run(argc, argv, [&](cli::Context& context) -> Status {
    // Who stops an agent wants to know how that went, however long it saves; a signal ends the
    // wait.
    const std::chrono::milliseconds patience =
        request == "stop" ? kStopPatience : pec::kAgentPatience;
    SW_TRY_ASSIGN(const auto client, flags.Client(context, patience));
    return context.comm().OnRoot([&]() -> Status {
      SW_TRY_ASSIGN(const std::string answer, client->Ask(request));
      context.SetResult({{"answer", answer}});
      context.out() << text::Printable(answer) << "\n";
      return {};
    });
  });
}

}  // namespace shardwright::apps
