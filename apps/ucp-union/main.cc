// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "common/ucp.h"
#include "convert/convert.h"
#include "convert/ds_to_universal.h"

using shardwright::Status;
using shardwright::cli::Shared;

int main(int argc, char** argv) {
  shardwright::cli::App app(
      "ucp-union",
      "Merge the fragments of a checkpoint into atoms: one file per parameter and state.",
      {{"ckpt/ atoms/", "Writes a universal checkpoint that DeepSpeed's own loader opens."},
       {"--input_folder ckpt/global_step100 --output_folder ckpt/global_step100_universal",
        "Does the same with the flags of DeepSpeed's ds_to_universal."}});
  shardwright::apps::SourceFlags source;
  shardwright::convert::DsToUniversal compatible;
  std::string output;
  app.AddInputOutput(&source.input, &output,
                     "catalogue, save folder or tag folder, or a .safetensors file",
                     "folder to create for the atoms");
  app.Use({Shared::kDryRun, Shared::kForce, Shared::kResume, Shared::kVerify, Shared::kThreads,
           Shared::kMemory, Shared::kList, Shared::kExplain, Shared::kMode, Shared::kTakeOver});
  app.ShowInShortHelp({"--input_folder", "--output_folder", "--memory"});
  source.AddTo(app);
  source.AddSiblingsTo(app);
  source.AddMapTo(app);
  shardwright::apps::FormatFlags format;
  format.format = shardwright::checkpoints::FindFormat("universal");
  format.fixed = true;
  format.AddStrictTo(app);
  format.AddKeyFlags(app);
  app.AddText("--input_folder", &source.input,
              "INPUT, with the flag name of ds_to_universal; a tag folder", "DIR");
  app.AddText("--output_folder", &compatible.output,
              "tag folder to create, in the layout of ds_to_universal", "DIR");
  app.AddCount("--num_extract_workers", &compatible.extract_workers, 0, 4096,
               "minimum threads per rank; 0: no minimum");
  app.AddCount("--num_merge_workers", &compatible.merge_workers, 0, 4096,
               "minimum threads per rank; 0: no minimum");
  app.AddFlag("--keep_temp_folder", &compatible.keep_temp_folder,
              "accepted and ignored: ucp-union creates no temporary files");
  app.AddFlag("--no_strict", &compatible.no_strict,
              "accepted and ignored: a pattern that matches no parameter is never an error");
  app.AddFlag(
      "--inject_missing_state", &compatible.inject_missing_state,
      "accepted and ignored: universal_checkpoint_info is not required where nothing is sharded");
  shardwright::checkpoints::TargetSpec spec;
  app.Check([&]() -> Status {
    SW_TRY_ASSIGN(spec, format.Spec(app));
    if (!compatible.output.empty()) {
      // Like the upstream converter that defined these flags, leave sibling files in place.
      if (source.siblings && app.IsSet("--siblings")) {
        return shardwright::Fail(shardwright::Errc::kUsage,
                                 "--siblings=copy cannot be combined with --output_folder, which "
                                 "leaves sibling files where they are");
      }
      source.siblings = false;
    }
    return compatible.Apply(&output);
  });
  return app.Run(argc, argv, [&](shardwright::cli::Context& context) -> Status {
    if (context.flags().describes()) return shardwright::apps::Describe(context, source);
    shardwright::convert::InputOptions from = source.Options(context.flags(), output);
    from.bound = true;  // Convert fails if it cannot write the state
    SW_TRY_ASSIGN(const auto input, shardwright::apps::OpenInput(context, from));
    auto options = shardwright::apps::WriteOptions(context.flags(), output);
    options.strict = format.strict;
    compatible.Adjust(&options);
    SW_TRY_ASSIGN(const auto report,
                  shardwright::convert::Convert(context.comm(), *input, spec, *format.format,
                                                "ucp-union", options, context.sink()));
    return shardwright::apps::ShowConversion(context, report, output);
  });
}
