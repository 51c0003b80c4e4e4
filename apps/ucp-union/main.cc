#include <string>

#include "common/ucp.h"
#include "ucp/convert.h"
#include "ucp/ds_to_universal.h"

using shardwright::Status;
using shardwright::cli::Shared;

int main(int argc, char** argv) {
  shardwright::cli::App app(
      "ucp-union",
      "Merge the fragments of a checkpoint into atoms: one file per parameter and state.",
      {{"ckpt/ atoms/", "Writes a universal checkpoint that DeepSpeed's own loader opens."},
       {"--input_folder ckpt/global_step100 --output_folder ckpt/global_step100_universal",
        "The same with the flags of ds_to_universal."}});
  shardwright::apps::SourceFlags source;
  shardwright::ucp::DsToUniversal compatible;
  std::string output;
  app.AddInputOutput(&source.input, &output,
                     "catalogue, save folder or tag folder, or a .safetensors file",
                     "folder of atoms to make");
  app.Use({Shared::kDryRun, Shared::kForce, Shared::kResume, Shared::kVerify, Shared::kThreads,
           Shared::kMemory, Shared::kList, Shared::kExplain, Shared::kMode, Shared::kTakeOver});
  app.Daily({"--input_folder", "--output_folder", "--memory"});
  source.AddTo(app);
  source.AddNeighboursTo(app);
  source.AddMapTo(app);
  shardwright::apps::FormatFlags format;
  format.format = shardwright::dialect::FindDialect("universal");
  format.fixed = true;
  format.AddStrictTo(app);
  format.AddKeyFlags(app);
  app.AddText("--input_folder", &source.input, "INPUT, as ds_to_universal names it: a tag folder",
              "DIR");
  app.AddText("--output_folder", &compatible.output,
              "tag folder to make, as ds_to_universal lays it out", "DIR");
  app.AddCount("--num_extract_workers", &compatible.extract_workers, 0, 4096,
               "0, or threads per rank at least");
  app.AddCount("--num_merge_workers", &compatible.merge_workers, 0, 4096,
               "0, or threads per rank at least");
  app.AddFlag("--keep_temp_folder", &compatible.keep_temp_folder,
              "accepted: no temporary files are made");
  app.AddFlag("--no_strict", &compatible.no_strict,
              "accepted: a pattern that no parameter needs is never an error");
  app.AddFlag("--inject_missing_state", &compatible.inject_missing_state,
              "accepted: universal_checkpoint_info is not needed where nothing is cut");
  shardwright::dialect::TargetSpec spec;
  app.Check([&]() -> Status {
    SW_TRY_ASSIGN(spec, format.Spec(app));
    if (!compatible.output.empty()) {
      // As the converter that these flags are of, which leaves what lies beside where it is.
      if (source.neighbours && app.Given("--neighbours")) {
        return shardwright::Fail(shardwright::Errc::kUsage,
                                 "--neighbours=copy: with --output_folder they lie beside it");
      }
      source.neighbours = false;
    }
    return compatible.Apply(&output);
  });
  return app.Run(argc, argv, [&](shardwright::cli::Context& context) -> Status {
    if (context.flags().describes()) return shardwright::apps::Describe(context, source);
    shardwright::ucp::InputOptions from = source.Options(context.flags(), output);
    from.bound = true;  // Convert refuses what it cannot write
    SW_TRY_ASSIGN(const auto input, shardwright::apps::OpenInput(context, from));
    auto options = shardwright::apps::WriteOptions(context.flags(), output);
    options.strict = format.strict;
    compatible.Adjust(&options);
    SW_TRY_ASSIGN(const auto report,
                  shardwright::ucp::Convert(context.comm(), *input, spec, *format.format,
                                            "ucp-union", options, context.sink()));
    return shardwright::apps::ShowConversion(context, report, output);
  });
}
