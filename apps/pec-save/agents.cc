// SPDX-License-Identifier: Apache-2.0
// pec-save agents: lists agents that trainers started automatically. Finds them by
// the names of their folders (lib/trainer/torch/shardwright/_agent_process.py).

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "partial/agent/agent_client.h"
#include "pec-save/subcommands.h"
#include "support/base/bytes.h"
#include "support/base/stop.h"
#include "support/base/text.h"
#include "support/cli/app.h"
#include "support/json/json.h"
#include "support/os/dir.h"
#include "support/os/directory.h"
#include "support/os/real_path.h"
#include "support/os/socket.h"
#include "support/text/text.h"

namespace shardwright::apps {
namespace {

using Json = nlohmann::json;

constexpr std::chrono::seconds kStatusPatience(10);
constexpr std::chrono::hours kEndPatience(24 * 30);  // it first saves all buffered snapshots

/// A running agent, or the files that an ended one left.
struct Found {
  std::string folder;
  std::string state = "running";  ///< "ended": no process listens; "silent": it does not answer
  Json status;                    ///< only of a running agent
};

/// Returns the folders in which the Python package may have put the sockets of agents. Its choice
/// depends on the environment of the trainer, which may differ from that of this command.
std::vector<std::string> RuntimeFolders() {
  std::vector<std::string> folders;
  const auto add = [&](const std::string& folder) {
    const std::string real = os::ResolvePath(folder).value_or("");
    if (!real.empty() && std::ranges::find(folders, real) == folders.end()) folders.push_back(real);
  };
  for (const char* name : {"XDG_RUNTIME_DIR", "TMPDIR"}) {
    const char* const value = std::getenv(name);
    if (value != nullptr && *value != '\0') add(value);
  }
  add("/run/user/" + std::to_string(::getuid()));
  add("/tmp");
  return folders;
}

std::string AddressIn(const std::string& folder) { return "unix:" + folder + "/agent.sock"; }

Result<std::unique_ptr<partial::AgentClient>> ClientOf(const std::string& folder,
                                                       cli::Context& context,
                                                       std::chrono::milliseconds patience) {
  SW_TRY_ASSIGN(os::Address address, os::ParseAddress(AddressIn(folder)));
  return std::make_unique<partial::AgentClient>(std::move(address), nullptr, StopOf(context.sink()),
                                                patience);
}

/// \error kStopped
Result<Found> LookAt(const std::string& folder, cli::Context& context) {
  Found found;
  found.folder = folder;
  SW_TRY_ASSIGN(const auto client, ClientOf(folder, context, kStatusPatience));
  const Result<std::string> text = client->AskText("status");
  if (!text && text.error().code == Errc::kStopped) return tl::unexpected<Error>(text.error());
  if (!text) {
    found.state = text.error().code == Errc::kNotFound ? "ended" : "silent";
    return found;
  }
  SW_TRY_ASSIGN(found.status, json::Parse(*text, AddressIn(folder)));
  if (!found.status.is_object()) found.state = "silent";
  return found;
}

/// Adds the agents with a folder of this user below `folder`.
/// \error kNotFound  the folder cannot be read; kStopped
Status AddAgentsIn(const std::string& folder, cli::Context& context, std::vector<Found>* all) {
  const std::string begin = "shardwright-" + std::to_string(::getuid()) + "-";
  SW_TRY_ASSIGN(const os::Directory opened, os::Directory::Open(folder));
  SW_TRY_ASSIGN(const std::vector<os::Entry> entries, os::ListDir(folder));
  for (const os::Entry& entry : entries) {
    if (entry.type != os::EntryType::kDir || !entry.name.starts_with(begin)) continue;
    const auto status = opened.Look(entry.name);
    if (!status || !*status || (*status)->owner != ::geteuid()) continue;
    SW_TRY_ASSIGN(Found found, LookAt(StrCat(folder, "/", entry.name), context));
    all->push_back(std::move(found));
  }
  return {};
}

/// \param asked  folders of --in; empty: RuntimeFolders
/// \error as AddAgentsIn, but a folder of RuntimeFolders may be missing
Result<std::vector<Found>> FindAgents(const std::vector<std::string>& asked,
                                      cli::Context& context) {
  std::vector<Found> all;
  for (const std::string& folder : asked) SW_TRY(AddAgentsIn(folder, context, &all));
  if (!asked.empty()) return all;
  for (const std::string& folder : RuntimeFolders()) {
    const Status added = AddAgentsIn(folder, context, &all);
    if (!added && added.error().code == Errc::kStopped) return tl::unexpected<Error>(added.error());
  }
  return all;
}

std::string TextOf(const Json& status, const char* key) {
  const auto found = status.find(key);
  if (found == status.end() || found->is_null()) return "none";
  return found->is_string() ? found->get<std::string>() : found->dump();
}

/// \param searched  folders in which agents were looked for
void Show(cli::Context& context, const std::vector<Found>& all,
          const std::vector<std::string>& searched) {
  using Column = text::Table::Column;
  text::Table table({Column{"STATE"}, Column{"PID", text::Table::Align::kRight},
                     Column{"SNAPSHOT", text::Table::Align::kRight},
                     Column{"STORED", text::Table::Align::kRight},
                     Column{"MEMORY", text::Table::Align::kRight}, Column{"STORE"},
                     Column{"ADDRESS", text::Table::Align::kLeft, true}});
  Json list = Json::array();
  for (const Found& one : all) {
    const std::string address = AddressIn(one.folder);
    list.push_back({{"address", address}, {"state", one.state}, {"status", one.status}});
    if (!one.status.is_object()) {
      table.AddRow({one.state, "", "", "", "", "", address});
      continue;
    }
    const auto memory = one.status.find("memory_bytes");
    const bool known = memory != one.status.end() && memory->is_number_unsigned();
    table.AddRow({one.state, TextOf(one.status, "pid"), TextOf(one.status, "newest"),
                  TextOf(one.status, "persisted"),
                  known ? FormatBytes(memory->get<std::uint64_t>()) : "",
                  TextOf(one.status, "store"), address});
  }
  context.SetResult({{"agents", std::move(list)}});
  if (all.empty()) {
    context.out() << "no agent that a trainer of this user has started was found in "
                  << text::Printable(Joined(searched, ", "))
                  << "\nFor an agent that you started with pec-save agent, run pec-save status "
                     "ADDRESS with the address of its --listen.\n";
    return;
  }
  context.Print(table);
  context.out() << text::Legend(
      "SNAPSHOT, STORED: newest iteration in memory and in the store. STATE ended: only the "
      "folder of the agent is left; silent: the agent does not answer.");
}

/// Ends all running agents. Each first saves its buffered snapshots.
Status StopAll(cli::Context& context, const std::vector<Found>& all) {
  Status first;
  for (const Found& one : all) {
    const std::string address = AddressIn(one.folder);
    if (one.state == "ended") continue;
    const auto stop = [&]() -> Status {
      SW_TRY_ASSIGN(const auto client, ClientOf(one.folder, context, kEndPatience));
      SW_TRY(client->Ask("stop"));
      return {};
    };
    const Status ended = stop();
    if (ended) {
      context.sink().Note(address + ": stopped; all its snapshots are saved", 0);
    } else if (first) {
      first = ended;
    } else {
      context.sink().Warn(ended.error().message);
    }
  }
  return first;
}

}  // namespace

int AgentsMain(int argc, const char* const* argv) {
  cli::App app(
      "pec-save agents",
      "List the agents that trainers of this user have started on this machine, including "
      "agents that outlived their trainer, but not agents started with pec-save agent. The command "
      "looks in $XDG_RUNTIME_DIR, $TMPDIR, /run/user/UID and /tmp.",
      {{"", "Shows the snapshots of each agent in memory and in its store."},
       {"--stop", "Stops every agent, after all its snapshots are saved."}});
  bool stop = false;
  std::vector<std::string> folders;
  app.Alone();
  app.ShowInShortHelp({"--stop"});
  app.AddList("--in", &folders, "look only in this folder", "DIR");
  app.AddFlag("--stop", &stop, "stop the agents, each after all its snapshots are saved");
  return app.Run(argc, argv, [&](cli::Context& context) -> Status {
    SW_TRY_ASSIGN(const std::vector<Found> all, FindAgents(folders, context));
    Show(context, all, folders.empty() ? RuntimeFolders() : folders);
    return stop ? StopAll(context, all) : Status();
  });
}

}  // namespace shardwright::apps
