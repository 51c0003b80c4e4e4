// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "common/outputs.h"
#include "common/pec.h"
#include "partial/agent/agent_client.h"
#include "partial/agent/agent_run.h"
#include "partial/agent/peers/agent_plan.h"
#include "partial/planner/agent_bandwidths.h"
#include "partial/report/report_json.h"
#include "partial/report/sends_page.h"
#include "pec-save/ask_agent.h"
#include "pec-save/job_flags.h"
#include "pec-save/save_flags.h"
#include "pec-save/subcommands.h"
#include "support/base/bytes.h"
#include "support/base/stop.h"
#include "support/base/system.h"
#include "support/base/text.h"
#include "support/json/json.h"
#include "support/os/socket.h"
#include "support/os/tls.h"
#include "support/text/text.h"

namespace shardwright::apps {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kMostMicroBatches = 65536;
constexpr std::chrono::hours kStopPatience(24 * 30);
constexpr std::uint64_t kLongestLinger = std::uint64_t{365} * 24 * 3600;

/// Formats a number of the answer; "none" if it is absent.
std::string Number(const Json& json, const char* key) {
  const auto found = json.find(key);
  if (found == json.end() || !found->is_number()) return "none";
  return found->dump();
}

std::uint64_t Bytes(const Json& json, const char* key) {
  const auto found = json.find(key);
  return found != json.end() && found->is_number_unsigned() ? found->get<std::uint64_t>() : 0;
}

/// Shows how much was sent in idle intervals, if ranks report them.
void ShowSent(std::ostream& out, const Json& json) {
  const Json sent = json.value("sent", Json::object());
  const std::uint64_t idle = Bytes(sent, "idle");
  const std::uint64_t busy = Bytes(sent, "busy");
  const std::uint64_t due = Bytes(sent, "due");
  if (idle + busy + due == 0 && Bytes(json, "ranks_marking") == 0) return;
  out << "sent      " << FormatBytes(idle) << " while ranks were idle, " << FormatBytes(busy)
      << " at other times, " << FormatBytes(due) << " due before the next snapshot ("
      << Plural(Bytes(json, "sends_due"), "time") << ")\n";
}

/// Shows the measured bandwidths of copies.
void ShowBandwidths(std::ostream& out, const Json& bandwidths) {
  const auto rate = [&](const char* name) {
    const Json& value = bandwidths[name];
    if (!value.is_number()) return std::string("none");
    return FormatBytes(static_cast<std::uint64_t>(value.get<double>())) + "/s";
  };
  out << "bandwidth " << rate("host_bytes_per_s") << " to memory, " << rate("network_bytes_per_s")
      << " to the slowest peer\n";
}

/// Shows how far the copies to other agents are.
void ShowPeers(std::ostream& out, const Json& json) {
  for (const Json& peer : json.value("peers", Json::array())) {
    const std::string agent = peer.value("agent", "");
    out << "peer      " << text::Printable(peer.value("address", ""))
        << (agent.empty() ? "" : " (" + text::Printable(agent) + ")") << ": "
        << text::Printable(peer.value("state", ""));
    if (Json copying = peer.value("copying", Json()); !copying.is_null()) {
      out << " iteration " << Number(peer, "copying");
    }
    out << ", newest copy " << Number(peer, "iteration");
    if (const std::uint64_t gradients = Bytes(peer, "gradient_bytes"); gradients > 0) {
      out << ", " << FormatBytes(gradients) << " of gradients in place of "
          << FormatBytes(Bytes(peer, "replaced_bytes")) << " of states";
    }
    if (const std::string error = peer.value("last_error", ""); !error.empty()) {
      out << ", " << Plural(Bytes(peer, "failures"), "failed attempt") << ": "
          << text::Printable(error);
    }
    out << "\n";
  }
}

/// Shows which plan the agent follows.
void ShowPlan(std::ostream& out, const Json& json) {
  const Json plan = json.value("plan", Json());
  if (!plan.is_object()) return;
  out << "plan      version " << Number(plan, "version") << " of job "
      << text::Printable(plan.value("job", "")) << "\n";
  if (const std::string error = plan.value("last_error", ""); !error.empty()) {
    out << "          " << text::Printable(error) << "\n";
  }
}

/// \param json  status of the agent, with `bandwidths`
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
  ShowBandwidths(out, json["bandwidths"]);
  ShowPlan(out, json);
  ShowPeers(out, json);
  ShowSent(out, json);
  if (const Json replays = json.value("replays", Json()); replays.is_object()) {
    out << "replayed  " << Plural(Bytes(replays, "modules"), "module") << " with "
        << FormatBytes(Bytes(replays, "gradient_bytes")) << " of gradients; "
        << Number(replays, "older") << " are older than the newest snapshot\n";
    for (const Json& why : replays.value("refused", Json::array())) {
      if (why.is_string()) out << "          " << text::Printable(why.get<std::string>()) << "\n";
    }
  }
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

/// Flags of policy gradient-log: the interval of full states and the log's memory limit.
struct ReplayFlags {
  std::uint64_t full_every = 500;
  std::uint64_t held_bytes = std::uint64_t{1} << 30;

  void AddTo(cli::App& app) {
    app.Group("Gradient log (--policy gradient-log)");
    app.AddCount("--full-every", &full_every, 1, kMany,
                 "number of consecutive gradients of an expert, after which its state is saved");
    app.AddSize("--log-memory", &held_bytes,
                "limit on the gradients that are buffered in memory until a checkpoint makes them "
                "unnecessary");
  }
  Status CheckRules(const cli::App& app, partial::Policy policy) const {
    if (policy == partial::Policy::kReplay) return {};
    return app.Require({"--full-every", "--log-memory"}, "--policy gradient-log");
  }
};

/// Returns the addresses of a plan that the agent listens at or sends copies to.
/// \error as partial::ReadAgentPlan
Result<std::vector<std::string>> PlannedAddresses(const partial::AgentRunOptions& options) {
  std::vector<std::string> addresses;
  SW_TRY_ASSIGN(const partial::AgentPlan plan, partial::ReadAgentPlan(options.plan));
  for (const partial::PlannedAgent& agent : plan.agents) {
    if (!agent.lost) addresses.push_back(agent.address);
  }
  return addresses;
}

Status RunAgent(cli::Context& context, const SaveFlags& save, const KeyFlags& key,
                const ReplayFlags& replay, partial::AgentRunOptions options) {
  options.agent.save = save.Options(context.flags());
  options.agent.save.replay.full_every = replay.full_every;
  // Copies on other nodes must not depend on gradients that only this agent has in memory.
  const bool copied = !options.peers.empty() || !options.plan.empty();
  options.agent.held_bytes = copied ? 0 : replay.held_bytes;
  options.input = save.source.Options(context.flags());
  options.agent.pattern_files = options.input.pattern_files;
  options.agent.tokens_path = save.selection.tokens;
  if (options.name.empty()) options.name = HostName();
  SW_TRY_ASSIGN(options.key, key.Read(context, !options.plan.empty()));
  options.insecure = key.insecure;
  SW_TRY_ASSIGN(options.trusted_user, key.trust.User());
  SW_TRY_ASSIGN(const partial::AgentStatus end, partial::RunAgent(options, context.sink()));
  context.SetResult(partial::AgentJson(end));
  context.out() << "snapshots " << end.snapshots << ", " << FormatBytes(end.snapshot_bytes)
                << "\npersists  " << end.persists << ", "
                << Plural(end.snapshots_skipped, "snapshot") << " not persisted\n";
  ShowSent(context.out(), partial::AgentJson(end));
  return {};
}

/// Fails if --replay would have no effect.
Status CheckReplay(const cli::App& app, const partial::AgentRunOptions& options,
                   partial::Policy policy) {
  if (options.copies_only)
    return app.Exclude({"--replay"}, "--copies-only: such an agent gets no gradients");
  if (policy == partial::Policy::kFull) {
    return app.Exclude({"--replay"}, "--policy full, which leaves no expert older");
  }
  const bool local = std::ranges::any_of(
      options.listen, [](const std::string& one) { return one.starts_with("unix:"); });
  if (local) return {};
  return Fail(Errc::kUsage,
              "--replay requires --listen unix:PATH, where trainers submit gradients");
}

/// Flags that describe when ranks are idle.
struct IdleFlags {
  std::string pipeline;
  std::string stages;
  std::uint64_t needed = 0;

  void AddTo(cli::App& app) {
    app.AddText("--pipeline", &pipeline,
                "send while the stages of --stages are idle in a 1F1B pipeline: number of stages, "
                "micro-batches, seconds of one forward and one backward pass",
                "P,B,TF,TB");
    app.AddText("--stages", &stages, "stages on this node, for --pipeline", "LIST");
    app.AddCount("--idle-ranks", &needed, 0, partial::kMostJobRanks,
                 "number of ranks that must be idle at the same time; 0: all ranks that report "
                 "idle intervals");
  }
  Status Read(const cli::App& app, partial::IdleOptions* options) const {
    options->needed = static_cast<std::uint32_t>(needed);
    if (pipeline.empty()) return app.Require({"--stages"}, "--pipeline");
    if (stages.empty()) {
      return Fail(Errc::kUsage, "--pipeline requires --stages LIST, the stages on this node");
    }
    const std::vector<std::string> parts = Split(pipeline, ',');
    if (parts.size() != 4) {
      return Fail(Errc::kUsage, "--pipeline \"", pipeline, "\": expected four numbers, found ",
                  parts.size());
    }
    partial::PipelineTimes times;
    auto read = [&]() -> Status {
      SW_TRY_ASSIGN(const std::uint64_t p, cli::ParseCount(parts[0], 1, partial::kMostJobRanks));
      SW_TRY_ASSIGN(const std::uint64_t b, cli::ParseCount(parts[1], 1, kMostMicroBatches));
      times.stages = static_cast<std::uint32_t>(p);
      times.micro_batches = static_cast<std::uint32_t>(b);
      SW_TRY_ASSIGN(times.forward_s, cli::ParseReal(parts[2], 1e-4, 1e6));
      SW_TRY_ASSIGN(times.backward_s, cli::ParseReal(parts[3], 1e-4, 1e6));
      return {};
    }();
    if (!read) return Within("--pipeline", std::move(read).error());
    auto ranks = ParseRanks(stages);
    if (!ranks) return Within("--stages", std::move(ranks).error());
    auto schedule = partial::ScheduleOf(times, *ranks, options->needed);
    if (!schedule) return Within("--pipeline", std::move(schedule).error());
    options->schedule = *std::move(schedule);
    return {};
  }
};

/// Flags that select an agent and authenticate to it.
struct AddressFlags {
  std::string address;
  KeyFlags key;

  void AddTo(cli::App& app) {
    app.AddInput(&address, "address of the agent, unix:PATH or HOST:PORT", "ADDRESS");
    key.AddTo(app);
    app.Check([this, &app]() -> Status {
      if (address.empty()) return {};
      return key.CheckRules(app, {address});
    });
  }
  Result<std::unique_ptr<partial::AgentClient>> Client(
      cli::Context& context, std::chrono::milliseconds patience = partial::kAgentPatience) const {
    return ConnectAgent(context, address, key, patience);
  }
};

/// Describes the effect of a request. Returns the answer to other requests unchanged.
std::string OutcomeText(const std::string& request, const std::string& answer) {
  if (request == "stop") return "stopped; all snapshots of the agent are saved";
  if (request == "flush" && answer == "none") {
    return "nothing to save; neither the agent nor the store has a checkpoint";
  }
  if (request == "flush") {
    return "all snapshots are saved; the store's newest checkpoint has iteration " + answer;
  }
  const bool snapshot = request == "snapshot" || request.starts_with("snapshot ");
  return snapshot ? "iteration " + answer + " is in the agent's memory" : answer;
}

}  // namespace

int AgentMain(int argc, const char* const* argv) {
  cli::App app(
      "pec-save agent",
      "Keep running: copy each checkpoint that the folder's `latest` names into memory, and save "
      "this snapshot while training runs. After a signal, save all snapshots, then exit.",
      {{"ckpt/ store/ --listen unix:/run/user/1/pec.sock",
        "Saves the checkpoints that a training job on this node writes."}});
  KeepFewHeaps();
  app.Alone();
  SaveFlags save;
  KeyFlags key;
  IdleFlags idle;
  ReplayFlags replay;
  partial::AgentRunOptions options;
  save.agent = true;
  options.agent.memory_bytes = std::uint64_t{8} << 30;
  std::uint64_t linger_s = 0;
  app.Use({cli::Shared::kVerify, cli::Shared::kThreads, cli::Shared::kMemory, cli::Shared::kMode,
           cli::Shared::kTakeOver});
  app.ShowInShortHelp({"--listen", "--peer", "--key", "--memory-limit", "--bandwidth"});
  app.Group("Agent");
  app.AddList("--listen", &options.listen, "address for requests", "unix:PATH|HOST:PORT");
  app.AddList("--peer", &options.peers, "another agent, which keeps copies of the snapshots",
              "unix:PATH|HOST:PORT");
  app.AddText(
      "--plan", &options.plan,
      "agent plan of pec-save plan --agents, in place of --peer: the address of this agent and "
      "the agents that keep its copies. Newer versions of the file are loaded while the agent runs",
      "FILE");
  key.AddTo(app);
  app.AddText("--name", &options.name,
              "name of this agent for its peers, unique among them [default: the host's name]",
              "NAME");
  app.AddFlag("--copies-only", &options.copies_only,
              "take no snapshots; only keep copies for other agents");
  app.AddFlag("--replay", &options.agent.replay,
              "replay the gradients that trainers submit, to bring older experts in memory to each "
              "new snapshot (docs/lossless.md)");
  app.AddFlag("--peer-gradients", &options.peer_gradients,
              "with --replay: send peers gradients, which they replay, in place of states that are "
              "more bytes");
  app.AddText("--trainer-lock", &options.trainer_lock,
              "file that every trainer locks (flock) while it runs, for --linger", "FILE");
  app.AddCount("--linger", &linger_s, 0, kLongestLinger,
               "end after this many seconds in which no trainer has locked the file of "
               "--trainer-lock; first save all snapshots");
  app.AddSize("--memory-limit", &options.agent.memory_bytes,
              "memory for snapshots and copies; the agent rejects a snapshot that exceeds it");
  app.AddBandwidth("--bandwidth", &options.agent.bandwidth,
                   "limit in bytes per second on saving and copying while no rank is idle. Without "
                   "a limit (0), the agent uses the full bandwidth; if ranks report idle "
                   "intervals, it then sends only in those. flush and stop ignore the limit");
  idle.AddTo(app);
  save.AddTo(app);
  replay.AddTo(app);
  app.Check([&]() -> Status {
    SW_TRY(save.CheckRules(app));
    SW_TRY(replay.CheckRules(app, save.selection.policy));
    SW_TRY(idle.Read(app, &options.agent.idle));
    if (!app.IsSet("--linger")) SW_TRY(app.Require({"--trainer-lock"}, "--linger"));
    if (options.trainer_lock.empty()) SW_TRY(app.Require({"--linger"}, "--trainer-lock"));
    options.linger = std::chrono::seconds(linger_s);
    if (!options.plan.empty()) SW_TRY(app.Exclude({"--peer"}, "--plan, which names the peers"));
    if (options.copies_only && options.listen.empty() && options.plan.empty()) {
      return Fail(Errc::kUsage,
                  "--copies-only requires --listen or --plan, the address for copies");
    }
    if (options.agent.replay) SW_TRY(CheckReplay(app, options, save.selection.policy));
    if (!options.agent.replay) SW_TRY(app.Require({"--peer-gradients"}, "--replay"));
    if (options.peers.empty() && options.plan.empty()) {
      SW_TRY(app.Require({"--peer-gradients"}, "--peer or --plan"));
    }
    std::vector<std::string> addresses = options.listen;
    addresses.insert(addresses.end(), options.peers.begin(), options.peers.end());
    return key.CheckRules(app, addresses);
  });
  return app.Run(argc, argv, [&](cli::Context& context) -> Status {
    if (!options.plan.empty()) {
      SW_TRY_ASSIGN(const std::vector<std::string> addresses, PlannedAddresses(options));
      SW_TRY(key.CheckRules(app, addresses));
    }
    return RunAgent(context, save, key, replay, options);
  });
}

int KeygenMain(int argc, const char* const* argv) {
  cli::App app("pec-save keygen",
               "Create a key for agents at HOST:PORT and their clients: a new file that only its "
               "owner can read. Every node needs a copy.",
               {{"~/.pec.key", "Creates the key. Pass it to agents and restores with --key."}});
  std::string path;
  app.Alone();
  app.AddInput(&path, "file to create", "FILE");
  return app.Run(argc, argv, [&](cli::Context&) { return os::TlsKey::Make(path); });
}

int StatusMain(int argc, const char* const* argv) {
  cli::App app("pec-save status", "Print the state of an agent.",
               {{"unix:/run/user/1/pec.sock", "Prints the state of the agent at this address."}});
  AddressFlags flags;
  std::string page;
  app.Alone();
  app.Use({cli::Shared::kForce, cli::Shared::kTakeOver});
  flags.AddTo(app);
  app.AddText("--html", &page,
              "also write an HTML report of the data sent around the last snapshots and of the "
              "idle intervals of ranks",
              "FILE");
  app.Check(
      [&]() -> Status { return page.empty() ? app.Require({"--force"}, "--html") : Status(); });
  return app.Run(argc, argv, [&](cli::Context& context) -> Status {
    SW_TRY(CheckOutputs(context, {page}));
    SW_TRY_ASSIGN(const auto client, flags.Client(context));
    SW_TRY_ASSIGN(Json json, AskStatus(*client, flags.address));
    // An agent of an older version does not report all numbers.
    const auto measured = partial::BandwidthsOf(json, flags.address);
    if (!measured && measured.error().code != Errc::kUnsupported) {
      return tl::unexpected<Error>(measured.error());
    }
    json["bandwidths"] = partial::BandwidthsJson(measured ? *measured : partial::AgentBandwidths{});
    ShowStatus(context, json);
    context.SetResult(std::move(json));
    if (page.empty()) return {};
    SW_TRY_ASSIGN(const std::string sends, client->AskText("sends"));
    SW_TRY_ASSIGN(const std::string html,
                  partial::SendsPage(sends, text::Printable(flags.address)));
    return WriteText(context, page, html);
  });
}

int TellMain(int argc, const char* const* argv) {
  cli::App app(
      "pec-save tell", "Send a request to an agent and print what it has done.",
      {{"unix:/run/user/1/pec.sock snapshot", "Takes a snapshot now."},
       {"unix:/run/user/1/pec.sock stop", "Stops the agent, after all snapshots are saved."}});
  AddressFlags flags;
  std::string request;
  app.Alone();
  flags.AddTo(app);
  app.AddInput(&request, "snapshot, flush or stop (docs/formats/agent.md)", "REQUEST");
  return app.Run(argc, argv, [&](cli::Context& context) -> Status {
    // A stop takes as long as saving all snapshots. A signal ends the wait.
    const std::chrono::milliseconds patience =
        request == "stop" ? kStopPatience : partial::kAgentPatience;
    SW_TRY_ASSIGN(const auto client, flags.Client(context, patience));
    SW_TRY_ASSIGN(const std::string answer, client->Ask(request));
    context.SetResult({{"answer", answer}});
    context.out() << text::Printable(OutcomeText(request, answer)) << "\n";
    return {};
  });
}

}  // namespace shardwright::apps
