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
                          {"--auto", kAuto}};

/// Where a flag means something.
constexpr Use kUses[] = {{"--k", kSave | kAgent | kSimulate},
                         {"--k-persist", kSave | kAgent | kSimulate},
                         {"--policy", kSave | kAgent | kSimulate},
                         {"--max-age", kSave | kAgent | kSimulate},
                         {"--keep", kSave | kAgent | kSimulate | kAuto},
                         {"--partial-start", kSave | kSimulate},
                         {"--tokens", kSave | kAgent},
                         {"--budget", kSave | kAgent},
                         {"--compress", kSave | kAgent},
                         {"--resumed-from", kSave},
                         {"--iteration", kSave},
                         {"--also", kSave | kAgent},
                         {"--patterns", kSave | kAgent | kCheck},
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
                         {"--force", kSimulate},
                         {"--persist-bandwidth", kAuto},
                         {"--fault-rate", kAuto},
                         {"--iterations", kAuto},
                         {"--plt-limit", kSimulate | kAuto},
                         {"--lost-share", kAuto},
                         {"--interval", kSimulate | kAuto},
                         {"--experts", kAuto},
                         {"--moe-layers", kAuto},
                         {"--expert-params", kSimulate | kAuto},
                         {"--nonexpert-params", kSimulate | kAuto},
                         {"--param-bytes", kSimulate | kAuto},
                         {"--ep", kSimulate | kAuto},
                         {"--dp", kSimulate | kAuto},
                         {"--ranks-per-node", kSimulate | kAuto},
                         {"--snapshot-bandwidth", kSimulate | kAuto},
                         {"--forward-backward", kSimulate | kAuto},
                         {"--iteration-time", kSimulate | kAuto},
                         {"--restart-time", kSimulate | kAuto}};

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
  }
  return {};
}

}  // namespace shardwright::apps
