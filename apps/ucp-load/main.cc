// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <vector>

#include "common/ucp.h"
#include "convert/convert.h"
#include "ucp-load/check.h"
#include "ucp-load/serve.h"

using shardwright::Status, shardwright::cli::Shared;

int main(int argc, char** argv) {
  const std::vector<shardwright::cli::Subcommand> subcommands = {
      {"serve", "keep a checkpoint in shared memory for trainers to load",
       &shardwright::apps::ServeMain},
      {"status", "print the state of a checkpoint in shared memory",
       &shardwright::apps::ServeStatusMain},
      {"stop", "remove a checkpoint from shared memory", &shardwright::apps::ServeStopMain}};
  if (const auto* one = shardwright::cli::FindSubcommand(subcommands, argc, argv)) {
    return one->main(argc, argv);
  }
  shardwright::cli::App app(
      "ucp-load", "Write a checkpoint in another parallel layout or format.",
      {{"ckpt/ out/ --target zero=3,dp=48",
        "Converts a checkpoint for 48 ranks with ZeRO stage 3."},
       {"--check ckpt/ out/", "Compares two checkpoints of any layouts, tensor by tensor."}});
  app.AddSubcommands(subcommands);
  shardwright::apps::SourceFlags source;
  std::string output;
  shardwright::apps::FormatFlags format;
  format.of_source = true;
  bool check = false;
  bool link = false;
  app.AddInputOutput(&source.input, &output,
                     "checkpoint, catalogue, folder of atoms or .safetensors file",
                     "folder to create");
  app.Use({Shared::kDryRun, Shared::kForce, Shared::kResume, Shared::kVerify, Shared::kThreads,
           Shared::kMemory, Shared::kList, Shared::kExplain, Shared::kMode, Shared::kTakeOver});
  app.ShowInShortHelp({"--target", "--format", "--check", "--memory"});
  source.AddTo(app);
  source.AddSiblingsTo(app);
  source.AddMapTo(app);
  format.AddTo(app, "keys you omit keep the source's value");
  app.AddFlag("--link", &link,
              "for equal layouts only: create hard links to the files of INPUT instead of clones "
              "or copies. The two checkpoints then share their bytes: a trainer that overwrites a "
              "file of one changes both");
  format.AddStrictTo(app);
  format.AddKeyFlags(app);
  app.AddFlag("--check", &check,
              "compare two checkpoints, INPUT and OUTPUT (with --only: just these weights); exit "
              "with code 5 if they differ");
  shardwright::checkpoints::TargetSpec spec;
  std::string only;  // for --check: "weight", "master", or empty for everything
  app.Check([&]() -> Status {
    for (const char* flag :
         {"--target", "--format", "--force", "--resume", "--no-resume", "--dry-run", "--verify",
          "--siblings", "--link", "--strict", "--mode"}) {
      if (check && app.IsSet(flag)) {
        return shardwright::Fail(shardwright::Errc::kUsage, flag,
                                 " cannot be combined with --check");
      }
    }
    if (const std::string flag = format.GivenKeyFlag(app, "--only"); check && !flag.empty()) {
      return shardwright::Fail(shardwright::Errc::kUsage, flag, " cannot be combined with --check");
    }
    if (check && !source.input.empty() && output.empty() && !app.IsSet("--list") &&
        !app.IsSet("--explain")) {
      return shardwright::Fail(shardwright::Errc::kUsage,
                               "--check compares INPUT with a second checkpoint, OUTPUT, which is "
                               "missing; try ucp-load --check INPUT OUTPUT");
    }
    if (check) {
      only = app.IsSet("--only") ? format.ValueOf("only") : "";
      return {};
    }
    SW_TRY_ASSIGN(spec, format.Spec(app));
    return {};
  });
  return app.Run(argc, argv, [&](shardwright::cli::Context& context) -> Status {
    if (context.flags().describes()) return shardwright::apps::Describe(context, source);
    if (check) return shardwright::apps::CheckBoth(context, source, output, only);
    shardwright::convert::InputOptions first = source.Options(context.flags(), output);
    first.bound = true;  // for equal layouts, files are copied unchanged
    if (format.format != nullptr) {
      shardwright::convert::SetTarget(*format.format, spec, &first.maps);
    }
    SW_TRY_ASSIGN(const auto input, shardwright::apps::OpenInput(context, first));
    if (format.format == nullptr) {
      SW_TRY_ASSIGN(format.format, shardwright::convert::DefaultFormat(context.comm(), *input));
      SW_TRY_ASSIGN(spec, format.Spec(app));
      const bool usual = format.format == &shardwright::checkpoints::Formats().front();
      context.sink().Note("the output has the checkpoint format of the source, " +
                              std::string(format.format->name) + "; use --format to choose another",
                          usual ? 1 : 0);
    }
    if (source.maps != std::vector<std::string>{"none"}) {
      SW_TRY(shardwright::apps::CheckNames(context, *input, *format.format, spec));
    }
    SW_TRY(shardwright::apps::WarnOfLayout(context, *input, *format.format, spec));
    auto options = shardwright::apps::WriteOptions(context.flags(), output);
    options.link = link;
    options.strict = format.strict;
    SW_TRY_ASSIGN(const auto report,
                  shardwright::convert::Convert(context.comm(), *input, spec, *format.format,
                                                "ucp-load", options, context.sink()));
    return shardwright::apps::ShowConversion(context, report, output);
  });
}
