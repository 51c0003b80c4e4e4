#include "pec-save/agent_flags.h"

#include <unistd.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <ostream>

#include "base/bytes.h"
#include "cli/text.h"
#include "os/socket.h"
#include "pec/agent_client.h"

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
    out << "error     " << cli::Printable(error) << "\n";
  }
  cli::Table table(
      {cli::Table::Column{"BUFFER"}, cli::Table::Column{"ITERATION", cli::Table::Align::kRight}});
  for (const char* list : {"buffers", "copies"}) {
    for (const Json& one : json.value(list, Json::array())) {
      const std::string state = one.value("state", "copy of " + one.value("origin", ""));
      table.AddRow({cli::Printable(state), Number(one, "iteration")});
    }
  }
  out << "\n";
  context.Print(table);
}

}  // namespace

void AgentFlags::AddTo(cli::App& app) {
  app.Group("--agent");
  app.AddList("--listen", &listen, "where requests come in", "unix:PATH|HOST:PORT");
  app.AddList("--peer", &peers, "agent that keeps copies of the snapshots", "unix:PATH|HOST:PORT");
  app.AddText("--name", &name, "what peers call it [default: the host's name]", "NAME");
  app.AddFlag("--copies-only", &copies_only, "take no snapshots, keep copies of others");
  app.AddSize("--memory-limit", &memory_limit,
              "memory for snapshots and copies; a snapshot above it is refused");
  app.AddSize("--bandwidth", &bandwidth,
              "bytes per second that saving and copying may take; 0: all");
}

Status AgentFlags::CheckRules(const SaveFlags& save) const {
  if (save.mode == Mode::kAsk) SW_TRY(os::ParseAddress(save.source.input));
  if (save.mode != Mode::kAgent) return {};
  if (copies_only && listen.empty()) {
    return Fail(Errc::kUsage, "--copies-only needs --listen: copies come in there");
  }
  for (const auto* list : {&listen, &peers}) {
    for (const std::string& text : *list) SW_TRY(os::ParseAddress(text));
  }
  return {};
}

Status AgentFlags::Run(cli::Context& context, const cli::App& app, const SaveFlags& save) const {
  if (context.comm().size() > 1) {
    return Fail(Errc::kUnsupported,
                "--agent: one process for each node, without a launcher of "
                "ranks; found " +
                    std::to_string(context.comm().size()) + " ranks");
  }
  pec::AgentRunOptions options;
  SW_TRY_ASSIGN(options.agent.save, save.Options(app, context.flags()));
  options.input = save.source.Options();
  options.agent.pattern_files = options.input.pattern_files;
  options.agent.tokens_path = save.tokens;
  options.agent.memory_bytes = memory_limit;
  options.agent.bandwidth = bandwidth;
  options.listen = listen;
  options.peers = peers;
  options.name = name.empty() ? HostName() : name;
  options.copies_only = copies_only;
  SW_TRY_ASSIGN(const pec::AgentStatus end, pec::RunAgent(options, context.sink()));
  context.SetResult({{"snapshots", end.snapshots},
                     {"snapshots_failed", end.snapshots_failed},
                     {"snapshots_skipped", end.snapshots_skipped},
                     {"persists", end.persists},
                     {"persists_failed", end.persists_failed},
                     {"snapshot_bytes", end.snapshot_bytes},
                     {"snapshot_seconds", end.snapshot_seconds},
                     {"newest", end.newest ? Json(*end.newest) : Json(nullptr)},
                     {"persisted", end.persisted ? Json(*end.persisted) : Json(nullptr)}});
  context.out() << "snapshots " << end.snapshots << ", " << FormatBytes(end.snapshot_bytes)
                << "\npersists  " << end.persists << ", " << end.snapshots_skipped
                << " snapshots were not persisted\n";
  return {};
}

Status AskAgent(cli::Context& context, const std::string& address, const std::string& request) {
  return context.comm().OnRoot([&]() -> Status {
    SW_TRY_ASSIGN(os::Address where, os::ParseAddress(address));
    // Who stops an agent wants to know how that went, however long it saves; a signal ends the
    // wait.
    const auto patience = request == "stop" ? kStopPatience : pec::kAgentPatience;
    const Sink& sink = context.sink();
    pec::AgentClient client(
        std::move(where), [&sink] { return sink.stop_requested(); }, patience);
    if (!request.empty()) {
      SW_TRY_ASSIGN(const std::string answer, client.Ask(request));
      context.SetResult({{"answer", answer}});
      context.out() << cli::Printable(answer) << "\n";
      return {};
    }
    SW_TRY_ASSIGN(const std::string text, client.AskText("status"));
    Json json = Json::parse(text, nullptr, false);
    if (!json.is_object()) return Fail(Errc::kBadInput, address + ": no status of an agent");
    ShowStatus(context, json);
    context.SetResult(std::move(json));
    return {};
  });
}

}  // namespace shardwright::apps
