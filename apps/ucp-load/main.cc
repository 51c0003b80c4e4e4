#include <ostream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/bytes.h"
#include "common/ucp.h"
#include "ucp-load/serve.h"
#include "ucp/check.h"
#include "ucp/convert.h"
#include "ucp/describe.h"

using shardwright::Status;
using shardwright::cli::Shared;

namespace {

/// Answers --check: OUTPUT is the second checkpoint.
Status CheckBoth(shardwright::cli::Context& context, const shardwright::apps::SourceFlags& source,
                 const std::string& other) {
  shardwright::ucp::InputOptions first = source.Options(context.flags());
  first.neighbours = false;
  shardwright::ucp::InputOptions second = first;
  second.roots = {other};
  second.maps = {};  // its names are those that the first gets
  SW_TRY_ASSIGN(const auto b, shardwright::ucp::OpenInput(context.comm(), second, context.sink()));
  first.maps.like = &b->checkpoint;
  SW_TRY_ASSIGN(const auto a, shardwright::ucp::OpenInput(context.comm(), first, context.sink()));
  const shardwright::ucp::CompareOptions options{context.flags().threads,
                                                 context.flags().memory_bytes};
  SW_TRY_ASSIGN(const auto report,
                shardwright::ucp::Check(context.comm(), *a, *b, options, context.sink()));
  nlohmann::json result = shardwright::ucp::CheckJson(report);
  if (!a->mapped.empty()) result["maps"] = shardwright::ucp::MapsJson(a->mapped);
  context.SetResult(std::move(result));
  for (const std::string& line : report.differences) context.out() << line << "\n";
  context.out() << report.tensors_equal << " tensors equal, " << report.difference_count
                << " differences, " << shardwright::FormatBytes(report.bytes_compared)
                << " compared\n";
  if (report.difference_count == 0) return {};
  return shardwright::Fail(shardwright::Errc::kMismatch,
                           source.input + " and " + other + ": " + report.differences.front());
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<shardwright::cli::Subcommand> subcommands = {
      {"serve", "load into memory, and stay for trainers to take it",
       &shardwright::apps::ServeMain},
      {"status", "show what such a load does", &shardwright::apps::ServeStatusMain},
      {"stop", "end one", &shardwright::apps::ServeStopMain}};
  if (const auto* one = shardwright::cli::FindSubcommand(subcommands, argc, argv)) {
    return one->main(argc, argv);
  }
  shardwright::cli::App app(
      "ucp-load", "Write a checkpoint in another parallel layout.",
      {{"ckpt/ out/ --target zero=3,dp=48",
        "Converts a checkpoint for 48 ranks with ZeRO stage 3."},
       {"--check ckpt/ out/", "Compares two checkpoints of any layouts, tensor by tensor."}});
  app.AddSubcommands(subcommands);
  app.Replaced("--serve", "ucp-load serve INPUT ADDRESS");
  shardwright::apps::SourceFlags source;
  std::string output;
  shardwright::apps::FormatFlags format;
  bool check = false;
  bool link = false;
  app.AddInputOutput(&source.input, &output,
                     "checkpoint, catalogue, folder of atoms or .safetensors file",
                     "folder to make");
  app.Use({Shared::kDryRun, Shared::kForce, Shared::kResume, Shared::kVerify, Shared::kThreads,
           Shared::kMemory, Shared::kList, Shared::kExplain});
  app.Daily({"--target", "--format", "--check", "--memory"});
  source.AddTo(app);
  source.AddNeighboursTo(app);
  source.AddMapTo(app);
  format.AddTo(app, "what is not named stays as in INPUT");
  app.AddFlag(
      "--link", &link,
      "equal layouts only: hard links to the files of INPUT instead of clones or copies; the "
      "two checkpoints then share their bytes, and a trainer that saves over a file of one "
      "changes both");
  format.AddStrictTo(app);
  format.AddKeyFlags(app);
  app.AddFlag("--check", &check,
              "compare INPUT with OUTPUT instead of writing; exit 5 if they differ");
  shardwright::dialect::TargetSpec spec;
  app.Check([&]() -> Status {
    for (const char* flag : {"--target", "--format", "--force", "--resume", "--dry-run", "--verify",
                             "--neighbours", "--link", "--strict"}) {
      if (check && app.Given(flag)) {
        return shardwright::Fail(shardwright::Errc::kUsage,
                                 std::string(flag) + " means nothing with --check");
      }
    }
    if (const std::string flag = format.GivenKeyFlag(app); check && !flag.empty()) {
      return shardwright::Fail(shardwright::Errc::kUsage, flag + " means nothing with --check");
    }
    SW_TRY_ASSIGN(spec, format.Spec(app));
    return {};
  });
  return app.Run(argc, argv, [&](shardwright::cli::Context& context) -> Status {
    if (context.flags().describes()) return shardwright::apps::Describe(context, source);
    if (check) return CheckBoth(context, source, output);
    shardwright::ucp::InputOptions first = source.Options(context.flags(), output);
    first.bound = true;  // equal layouts keep every file as it is
    first.maps.sides = format.Sides(spec);
    SW_TRY_ASSIGN(const auto input,
                  shardwright::ucp::OpenInput(context.comm(), first, context.sink()));
    auto options = shardwright::apps::WriteOptions(context.flags(), output);
    options.link = link;
    options.strict = format.strict;
    SW_TRY_ASSIGN(const auto report,
                  shardwright::ucp::Convert(context.comm(), *input, spec, *format.format,
                                            "ucp-load", options, context.sink()));
    shardwright::apps::ShowConversion(context, report);
    return {};
  });
}
