#include "pec-save/modes.h"

namespace shardwright::apps {
namespace {

constexpr unsigned Bits(Mode mode) { return static_cast<unsigned>(mode); }
constexpr unsigned kSave = Bits(Mode::kSave);
constexpr unsigned kList = Bits(Mode::kList);
constexpr unsigned kCheck = Bits(Mode::kCheck);
constexpr unsigned kCollect = Bits(Mode::kCollect);
constexpr unsigned kAgent = Bits(Mode::kAgent);
constexpr unsigned kSimulate = Bits(Mode::kSimulate);
constexpr unsigned kAuto = Bits(Mode::kAuto);
constexpr unsigned kPlan = Bits(Mode::kPlan);

struct Use {
  const char* flag;
  unsigned modes;
};

constexpr Use kModes[] = {{"--list", kList},
                          {"--check", kCheck},
                          {"--gc", kCollect},
                          {"--agent", kAgent},
                          {"--status", Bits(Mode::kAsk)},
                          {"--tell", Bits(Mode::kAsk)},
                          {"--simulate", kSimulate},
                          {"--auto", kAuto},
                          {"--plan", kPlan}};

/// Where a flag means something.
constexpr Use kUses[] = {{"--k", kSave | kAgent | kSimulate | kPlan},
                         {"--k-persist", kSave | kAgent | kSimulate | kPlan},
                         {"--dynamic-k", kSave | kAgent | kSimulate | kPlan},
                         {"--dynamic-k-mode", kSave | kAgent | kPlan},
                         {"--policy", kSave | kAgent | kSimulate | kPlan},
                         {"--max-age", kSave | kAgent | kSimulate | kPlan},
                         {"--keep", kSave | kAgent | kSimulate | kAuto | kPlan},
                         {"--partial-start", kSave | kSimulate},
                         {"--tokens", kSave | kAgent | kPlan},
                         {"--budget", kSave | kAgent | kPlan},
                         {"--compress", kSave | kAgent},
                         {"--resumed-from", kSave},
                         {"--iteration", kSave},
                         {"--also", kSave | kAgent},
                         {"--patterns", kSave | kAgent | kCheck | kSimulate | kAuto | kPlan},
                         {"--node-local", kSave | kAgent},
                         {"--dry-run", kSave | kCollect},
                         {"--verify", kSave | kAgent},
                         {"--threads", kSave | kAgent | kCheck},
                         {"--memory", kSave | kAgent | kCheck},
                         {"--keep-last", kCollect},
                         {"--keep-every", kCollect},
                         {"--listen", kAgent},
                         {"--peer", kAgent},
                         {"--name", kAgent},
                         {"--copies-only", kAgent},
                         {"--memory-limit", kAgent},
                         {"--bandwidth", kAgent},
                         {"--faults", kSimulate},
                         {"--node-share", kSimulate},
                         {"--seed", kSimulate},
                         {"--csv", kSimulate},
                         {"--page", kSimulate},
                         {"--force", kSimulate},
                         {"--persist-bandwidth", kAuto},
                         {"--measure", kAuto},
                         {"--fault-rate", kAuto},
                         {"--iterations", kSave | kAgent | kAuto | kPlan},
                         {"--plt-limit", kSimulate | kAuto},
                         {"--lost-share", kAuto | kPlan},
                         {"--interval", kSimulate | kAuto | kPlan},
                         {"--experts", kAuto | kPlan},
                         {"--moe-layers", kAuto | kPlan},
                         {"--expert-params", kSimulate | kAuto | kPlan},
                         {"--nonexpert-params", kSimulate | kAuto | kPlan},
                         {"--param-bytes", kSimulate | kAuto | kPlan},
                         {"--ep", kSimulate | kAuto | kPlan},
                         {"--dp", kSimulate | kAuto | kPlan},
                         {"--ranks-per-node", kSimulate | kAuto | kPlan},
                         {"--snapshot-bandwidth", kSimulate | kAuto | kPlan},
                         {"--forward-backward", kSimulate | kAuto},
                         {"--iteration-time", kSimulate | kAuto | kPlan},
                         {"--restart-time", kSimulate | kAuto},
                         {"--checkpoints", kPlan},
                         {"--zero", kPlan},
                         {"--split-above", kPlan},
                         {"--dead-ranks", kPlan},
                         {"--copies", kPlan},
                         {"--pp", kPlan},
                         {"--copy-bandwidth", kPlan},
                         {"--gradients", kPlan},
                         {"--full-every", kPlan},
                         {"--micro-batches", kPlan},
                         {"--forward-time", kPlan},
                         {"--backward-time", kPlan},
                         {"--chunks", kPlan},
                         {"--capacity", kPlan},
                         {"--lost-tokens", kPlan},
                         {"--checkpoint-time", kPlan},
                         {"--retrieval-time", kPlan}};

/// "--simulate or --auto", without the save itself, which no flag names.
std::string NamesOf(unsigned modes) {
  std::string text;
  for (const Use& mode : kModes) {
    if ((mode.modes & modes) != 0) text += (text.empty() ? "" : " or ") + std::string(mode.flag);
  }
  return text;
}

}  // namespace

void ModeFlags::AddTo(cli::App& app) {
  app.Group("Instead of saving");
  app.AddFlag("--check", &check, "verify every blob of the store INPUT; exit 5 if one is bad");
  app.AddFlag("--gc", &gc, "remove what no rule keeps from the store INPUT");
  app.AddFlag(
      "--agent", &agent,
      "keep running: hold a snapshot of each checkpoint that the folder's `latest` names in "
      "memory and save it beside the training; a signal ends it when all is saved");
  app.AddFlag("--status", &status, "show what the agent with address INPUT does");
  app.AddText("--tell", &tell,
              "send the agent with address INPUT a request: snapshot, flush or stop "
              "(docs/formats/agent.md)",
              "REQUEST");
  app.AddFlag("--simulate", &simulate,
              "play INPUT, tokens per expert (docs/formats/loads.md), with every policy and K, or "
              "those given; OUTPUT, if given, is a store whose sizes are taken");
  app.AddFlag("--auto", &choose,
              "choose K, K to persist and the interval for the store INPUT, if given, or for the "
              "sizes below");
  app.AddFlag(
      "--plan", &plan,
      "show the next checkpoints of the store INPUT, if given, or of the sizes below: bytes, "
      "experts, shares of ranks, and what the flags of --plan ask for");
}

Result<Mode> ModeFlags::Choose(const cli::App& app) const {
  const Use* chosen = nullptr;
  for (const Use& mode : kModes) {
    if (!app.Given(mode.flag)) continue;
    if (chosen != nullptr) {
      return Fail(Errc::kUsage,
                  std::string(chosen->flag) + " and " + mode.flag + " exclude each other");
    }
    chosen = &mode;
  }
  const unsigned modes = chosen == nullptr ? kSave : chosen->modes;
  for (const Use& use : kUses) {
    if ((use.modes & modes) != 0 || !app.Given(use.flag)) continue;
    return Fail(Errc::kUsage, std::string(use.flag) + " means nothing " +
                                  (chosen == nullptr ? "without " + NamesOf(use.modes)
                                                     : "with " + std::string(chosen->flag)));
  }
  return static_cast<Mode>(modes);
}

Status CheckArguments(cli::App& app, Mode mode, const std::string& input,
                      const std::string& output) {
  const auto one = [&](const char* flag, const char* what) -> Status {
    app.MayLack(&output);
    if (output.empty()) return {};
    return Fail(Errc::kUsage, std::string("with ") + flag + " there is one argument, " + what +
                                  ": \"" + output + "\" is one too many");
  };
  switch (mode) {
    case Mode::kSave:
    case Mode::kAgent:
    case Mode::kList:
      return {};
    case Mode::kCheck:
      return one("--check", "the store");
    case Mode::kCollect:
      return one("--gc", "the store");
    case Mode::kAsk:
      return one("--status and --tell", "the agent's address");
    case Mode::kSimulate:
      app.MayLack(&output);
      return {};
    case Mode::kAuto:
      app.MayLack(&input);
      return one("--auto", "a store or none");
    case Mode::kPlan:
      app.MayLack(&input);
      return one("--plan", "a store or none");
  }
  return {};
}

}  // namespace shardwright::apps
