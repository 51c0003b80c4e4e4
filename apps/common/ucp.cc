#include "common/ucp.h"

#include <ostream>

#include <nlohmann/json.hpp>

#include "base/bytes.h"
#include "ucp/describe.h"

namespace shardwright::apps {
namespace {

exec::Verify VerifyOf(cli::Verify verify) {
  switch (verify) {
    case cli::Verify::kNone:
      return exec::Verify::kNone;
    case cli::Verify::kSums:
      return exec::Verify::kSums;
    case cli::Verify::kReplicas:
      return exec::Verify::kReplicas;
    case cli::Verify::kReadback:
      return exec::Verify::kReadback;
  }
  return exec::Verify::kSums;
}

nlohmann::json TotalsJson(const ucp::ConvertReport& report) {
  const plan::Totals& totals = report.totals;
  return {{"output_files", totals.output_files},
          {"output_bytes", totals.output_bytes},
          {"linked_files", totals.linked_files},
          {"payload_bytes", totals.payload_bytes},
          {"read_bytes", totals.read_bytes + totals.verify_bytes},
          {"verify_bytes", totals.verify_bytes},
          {"units", totals.units},
          {"members_read", totals.members_read},
          {"members_unread", totals.members_unread},
          {"buffer_bytes", report.buffer_bytes}};
}

nlohmann::json NeighboursJson(const ucp::NeighbourReport& report) {
  nlohmann::json copied = nlohmann::json::array();
  for (const auto& [name, bytes] : report.copied)
    copied.push_back({{"name", name}, {"bytes", bytes}});
  nlohmann::json left_out = nlohmann::json::array();
  for (const dialect::LeftOut& one : report.left_out) {
    left_out.push_back({{"name", one.name}, {"why", one.why}});
  }
  return {{"folders", report.folders},
          {"copied", std::move(copied)},
          {"bytes", report.bytes},
          {"left_out", std::move(left_out)}};
}

}  // namespace

void SourceFlags::AddTo(cli::App& app) {
  app.AddList("--also", &also, "another folder that holds a part of INPUT", "DIR");
  app.AddList("--patterns", &patterns,
              "file of rules that say how tensor parallelism cuts parameters", "FILE");
  app.AddFlag("--node-local", &node_local,
              "INPUT is visible in part on every node; {rank} and {node} in it are replaced");
}

void SourceFlags::AddNeighboursTo(cli::App& app) {
  neighbours = true;
  app.AddEnum<bool>("--neighbours", &neighbours, {{"copy", true}, {"none", false}},
                    "files beside the tag folder, such as trainer_state.json and the tokenizer: "
                    "carried over byte for byte, or left where they are");
}

ucp::InputOptions SourceFlags::Options() const {
  ucp::InputOptions options{{input}, patterns, node_local, neighbours};
  options.roots.insert(options.roots.end(), also.begin(), also.end());
  return options;
}

void AddLoader(cli::App& app, dialect::Loader* loader) {
  app.AddEnum<dialect::Loader>(
      "--loader", loader,
      {{"auto", dialect::Loader::kAuto},
       {"any", dialect::Loader::kAny},
       {"stage3", dialect::Loader::kStage3}},
      "loader of DeepSpeed that shall open the atoms: that of the layout's "
      "stage in INPUT's release, those of all stages since 0.19.3 (before: "
      "stages 1 and 2), or that of stage 3 of any release");
}

ucp::ConvertOptions WriteOptions(const cli::CommonFlags& flags, const std::string& output) {
  ucp::ConvertOptions options;
  options.output = output;
  options.force = flags.force;
  options.resume = flags.resume;
  options.dry_run = flags.dry_run;
  options.verify = VerifyOf(flags.verify);
  options.threads = flags.threads;
  options.memory_bytes = flags.memory_bytes;
  return options;
}

Status Describe(cli::Context& context, const SourceFlags& source) {
  ucp::InputOptions options = source.Options();
  options.neighbours = false;
  options.bound = true;
  SW_TRY_ASSIGN(const auto input, ucp::OpenInput(context.comm(), options, context.sink()));
  const dialect::Checkpoint& checkpoint = input->checkpoint;
  for (const std::string& bound : checkpoint.bound) context.sink().Warn(bound);
  if (context.flags().explain) {
    SW_TRY_ASSIGN(const std::string text, ucp::ExplainParam(checkpoint, *context.flags().explain));
    SW_TRY_ASSIGN(const auto json, ucp::ExplainJson(checkpoint, *context.flags().explain));
    context.out() << text;
    context.SetResult(json);
    return {};
  }
  context.out() << checkpoint.origin << " checkpoint " << checkpoint.tag << ": "
                << ucp::Explain(checkpoint.topology) << ", " << checkpoint.map.files.size()
                << " files\n\n";
  using Column = cli::Table::Column;
  cli::Table table({Column{"NAME", cli::Table::Align::kLeft, true}, Column{"SHAPE"}, Column{"KIND"},
                    Column{"SIZE", cli::Table::Align::kRight}, Column{"SPLIT"}, Column{"STATES"}});
  for (const ucp::ListRow& row : ucp::List(checkpoint)) {
    table.AddRow({row.name, row.shape, row.kind, FormatBytes(row.bytes), row.split, row.states});
  }
  context.Print(table);
  nlohmann::json list = ucp::ListJson(checkpoint);
  list["fingerprint"] = ucp::FingerprintText(*input);
  context.SetResult(std::move(list));
  return {};
}

nlohmann::json ConversionJson(const ucp::ConvertReport& report) {
  nlohmann::json result = {{"dry_run", report.dry_run},
                           {"found_done", report.found_done},
                           {"verbatim", report.verbatim},
                           {"linked", report.linked},
                           {"neighbours", NeighboursJson(report.neighbours)},
                           {"plan", TotalsJson(report)},
                           {"source", ucp::ToJson(report.source)},
                           {"target", ucp::ToJson(report.target)}};
  if (!report.dry_run && !report.found_done) {
    result["run"] = {{"payload_bytes_read", report.run.bytes_read},
                     {"bytes_written", report.run.bytes_written},
                     {"files_read", report.run.files_read},
                     {"files_written", report.run.files_written},
                     {"files_cloned", report.run.files_cloned},
                     {"files_linked", report.run.files_linked},
                     {"units", report.run.units},
                     {"units_resumed", report.run.units_resumed},
                     {"members_verified", report.run.members_verified},
                     {"members_without_sum", report.run.members_without_sum}};
  }
  return result;
}

void ShowConversion(cli::Context& context, const ucp::ConvertReport& report) {
  context.SetResult(ConversionJson(report));
  if (!report.dry_run) return;
  const plan::Totals& totals = report.totals;
  context.out() << "source   " << ucp::Explain(report.source) << "\n"
                << "target   " << ucp::Explain(report.target) << "\n";
  if (report.verbatim) {
    context.out() << "equal layouts: the source's files as they are, "
                  << (report.linked
                          ? "by hard links\n"
                          : "as clones that need none of this where the file system can\n");
  }
  context.out() << "read     " << totals.read_bytes + totals.verify_bytes << " bytes ("
                << FormatBytes(totals.read_bytes + totals.verify_bytes) << ") of payload, "
                << totals.verify_bytes << " of them only to verify\n"
                << "write    " << totals.output_bytes << " bytes ("
                << FormatBytes(totals.output_bytes) << ") in "
                << totals.output_files - totals.linked_files << " files\n"
                << "disk     " << FormatBytes(totals.output_bytes)
                << " beside the output until it is committed\n"
                << "memory   " << FormatBytes(report.buffer_bytes) << " of buffers per rank\n"
                << "beside   " << report.neighbours.copied.size() << " files of these ("
                << FormatBytes(report.neighbours.bytes) << ") lie beside the checkpoint\n"
                << "unread   " << totals.members_unread << " of "
                << totals.members_unread + totals.members_read << " storages\n";
}

}  // namespace shardwright::apps
