// SPDX-License-Identifier: Apache-2.0
// pec-save replan, and the part of pec-save plan that writes a plan for agents.
#include "pec-save/agent_plan.h"

#include <nlohmann/json.hpp>
#include <ostream>
#include <utility>

#include "common/outputs.h"
#include "common/pec.h"
#include "partial/store/store.h"
#include "pec-save/subcommands.h"
#include "support/base/stop.h"
#include "support/base/text.h"
#include "support/text/text.h"

namespace shardwright::apps {
namespace {

using Json = nlohmann::json;

/// Most rows of the table of agents.
constexpr std::size_t kMostRows = 64;

std::string NamesText(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + text::Printable(name);
  return text.empty() ? "none" : text;
}

std::vector<std::string> PeerNames(const partial::AgentPlan& plan,
                                   const partial::PlannedAgent& agent) {
  std::vector<std::string> names;
  for (const std::uint32_t peer : agent.peers) names.push_back(plan.agents[peer].name);
  return names;
}

Json AgentPlanJson(const partial::AgentPlan& plan, const std::string& file) {
  Json agents = Json::array();
  for (const partial::PlannedAgent& agent : plan.agents) {
    agents.push_back({{"name", agent.name},
                      {"address", agent.address},
                      {"ranks", {agent.first_rank, agent.end_rank}},
                      {"since", agent.since},
                      {"lost", agent.lost},
                      {"peers", PeerNames(plan, agent)}});
  }
  return {{"file", file},
          {"job", plan.job},
          {"version", plan.version},
          {"store", plan.store.empty() ? Json(nullptr) : Json(plan.store)},
          {"copies", plan.copies},
          {"group", plan.group},
          {"agents", std::move(agents)}};
}

/// Warns if agents have fewer copies than requested.
void WarnOfIncomplete(const partial::AgentPlan& plan, Sink& sink) {
  const std::vector<std::string> names = plan.Incomplete();
  if (names.empty()) return;
  sink.Warn(StrCat("only ", Plural(plan.alive(), "agent"), " for ", plan.copies,
                   " copies on other nodes; agents with fewer copies: ", NamesText(names)));
}

void ShowAgentPlan(cli::Context& context, const partial::AgentPlan& plan, const std::string& file) {
  context.out() << "\nplan      version " << plan.version << " of job " << plan.job << " in "
                << text::Printable(file) << "\n\n";
  text::Table table({text::Table::Column{"AGENT"}, text::Table::Column{"ADDRESS"},
                     text::Table::Column{"RANKS"}, text::Table::Column{"COPIES ON"}});
  std::size_t rows = 0;
  for (const partial::PlannedAgent& agent : plan.agents) {
    if (rows++ == kMostRows) break;
    table.AddRow({text::Printable(agent.name), text::Printable(agent.address),
                  StrCat(agent.first_rank, '-', agent.end_rank - 1),
                  agent.lost ? "lost" : NamesText(PeerNames(plan, agent))});
  }
  context.Print(table);
  if (plan.agents.size() > kMostRows) {
    context.out() << "the first " << kMostRows << " of " << plan.agents.size() << " agents\n";
  }
}

/// Reads a plan, makes the next version of it and writes that.
Status WriteNext(cli::Context& context, const std::string& from, const std::string& output,
                 const std::vector<std::string>& lost,
                 const std::vector<partial::AgentPlace>& joined) {
  SW_TRY(CheckOutputs(context, {output}));
  SW_TRY_ASSIGN(const partial::AgentPlan before, partial::ReadAgentPlan(from));
  auto next = partial::NextAgentPlan(before, lost, joined, StopOf(context.sink()));
  if (!next) return Within(from, std::move(next).error());
  SW_TRY(WriteText(context, output, partial::ToText(*next)));
  WarnOfIncomplete(*next, context.sink());
  context.SetResult(AgentPlanJson(*next, output));
  ShowAgentPlan(context, *next, output);
  return {};
}

}  // namespace

Result<std::vector<partial::AgentPlace>> ParsePlaces(const std::vector<std::string>& values) {
  std::vector<partial::AgentPlace> places;
  for (const std::string& word : Words(values)) {
    SW_TRY_ASSIGN(partial::AgentPlace place, partial::ParseAgentPlace(word));
    places.push_back(std::move(place));
  }
  return places;
}

Status WriteAgentPlan(cli::Context& context, const partial::PlanAnswer& answer,
                      const std::vector<partial::AgentPlace>& places, const std::string& output,
                      Json* result) {
  return context.comm().OnRoot([&]() -> Status {
    partial::AgentPlanRequest request;
    const std::string& path = answer.request.job.store;
    if (!path.empty()) {
      SW_TRY_ASSIGN(const partial::Store store, partial::Store::Open(path));
      request.store = store.head().id;
    }
    request.dp = answer.job.ranks.dp;
    request.pp = answer.request.pipeline_stages;
    request.ranks_per_node = answer.job.ranks_per_node;
    request.copies = answer.request.copies.value_or(1);
    request.agents = places;
    auto plan = partial::MakeAgentPlan(request, StopOf(context.sink()));
    if (!plan) return Within("--agents", std::move(plan).error());
    SW_TRY(WriteText(context, output, partial::ToText(*plan)));
    WarnOfIncomplete(*plan, context.sink());
    (*result)["agent_plan"] = AgentPlanJson(*plan, output);
    ShowAgentPlan(context, *plan, output);
    return {};
  });
}

int ReplanMain(int argc, const char* const* argv) {
  cli::App app("pec-save replan",
               "Write the next version of an agent plan, after nodes are lost. Running agents "
               "take it when it replaces their file (docs/formats/agent-plan.md).",
               {{"plan.json plan.json --force --lost node8", "Places the copies without node8."},
                {"plan.json plan.json --force --lost node8 --joined node9:4711",
                 "Puts node9 into the place of node8."}});
  std::string from;
  std::string output;
  std::vector<std::string> lost;
  std::vector<std::string> joined;
  app.Alone();
  app.Use({cli::Shared::kForce, cli::Shared::kTakeOver});
  app.AddInput(&from, "plan to start from, written by pec-save plan or replan", "PLAN");
  app.AddOutput(&output, "file for the new plan; PLAN itself with --force");
  app.ShowInShortHelp({"--lost", "--joined"});
  app.Group("Changes");
  app.AddList("--lost", &lost, "names of agents that have left, separated by commas", "NAME");
  app.AddList("--joined", &joined,
              "agents that take the places of lost ones, in the order of their ranks, separated by "
              "commas",
              "[NAME=]ADDRESS");
  app.Check([&]() -> Status {
    auto places = ParsePlaces(joined);
    return places ? Status() : Within("--joined", std::move(places).error());
  });
  return app.Run(argc, argv, [&](cli::Context& context) -> Status {
    SW_TRY_ASSIGN(const std::vector<partial::AgentPlace> places, ParsePlaces(joined));
    return WriteNext(context, from, output, Words(lost), places);
  });
}

}  // namespace shardwright::apps
