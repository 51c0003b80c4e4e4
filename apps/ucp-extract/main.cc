// SPDX-License-Identifier: Apache-2.0
#include <optional>
#include <string>

#include "common/ucp.h"
#include "convert/catalogue.h"

using shardwright::Status;
using shardwright::cli::Shared;
using shardwright::convert::Pack;

int main(int argc, char** argv) {
  shardwright::cli::App app(
      "ucp-extract",
      "Write a fragment catalogue that describes a sharded checkpoint, optionally with its tensor "
      "data.",
      {{"ckpt/ catalogue/", "Writes the fragment catalogue of the newest checkpoint in ckpt/."},
       {"ckpt/ --list", "Shows the parameters of a checkpoint and how they are sharded."}});
  shardwright::apps::SourceFlags source;
  std::string output;
  std::optional<std::string> pack;
  app.AddInputOutput(&source.input, &output,
                     "save folder or tag folder of a checkpoint, or a .safetensors file",
                     "catalogue to create");
  app.Use({Shared::kDryRun, Shared::kForce, Shared::kResume, Shared::kVerify, Shared::kThreads,
           Shared::kMemory, Shared::kList, Shared::kExplain, Shared::kMode, Shared::kTakeOver});
  app.ShowInShortHelp({"--pack", "--also", "--memory"});
  source.AddTo(app);
  source.AddSiblingsTo(app);
  source.AddMapTo(app);
  app.AddOptionalValue("--pack", &pack, "copy",
                       "also store the tensor data in the catalogue, copied or compressed, so that "
                       "INPUT can be deleted",
                       "copy|zstd");
  app.Check([&]() -> Status {
    if (!pack || *pack == "copy" || *pack == "zstd") return {};
    return shardwright::Fail(shardwright::Errc::kUsage, "--pack=", *pack,
                             ": expected copy or zstd");
  });
  return app.Run(argc, argv, [&](shardwright::cli::Context& context) -> Status {
    if (context.flags().describes()) return shardwright::apps::Describe(context, source);
    shardwright::convert::InputOptions from = source.Options(context.flags(), output);
    if (!pack) from.proof.reset();  // no payload is read
    from.bound = true;              // a catalogue describes every file unchanged
    SW_TRY_ASSIGN(const auto input, shardwright::apps::OpenInput(context, from));
    for (const std::string& one : shardwright::checkpoints::OptimizerLeftOut(input->checkpoint)) {
      context.sink().Warn(one);
    }
    SW_TRY_ASSIGN(const auto report,
                  shardwright::convert::ExtractCatalogue(
                      context.comm(), *input,
                      !pack             ? Pack::kNone
                      : *pack == "zstd" ? Pack::kZstd
                                        : Pack::kCopy,
                      shardwright::apps::WriteOptions(context.flags(), output), context.sink()));
    return shardwright::apps::ShowConversion(context, report, output);
  });
}
