// SPDX-License-Identifier: Apache-2.0
#include "convert/api/convert.h"

#include <span>
#include <string_view>
#include <utility>

#include <nlohmann/json.hpp>

#include "checkpoints/registry.h"
#include "convert/api/calls_internal.h"
#include "convert/convert.h"
#include "convert/describe.h"

namespace shardwright {
namespace {

Result<const checkpoints::Format*> WrittenFormat(const std::string& name) {
  SW_TRY_ASSIGN(const checkpoints::Format* format, checkpoints::RequireFormat(name));
  if (format->write == nullptr) {
    return Fail(Errc::kUsage, "format \"", name, "\" is read only");
  }
  return format;
}

/// Returns the options to open a source for a conversion. Unless it is a dry run, inferred
/// mappings are verified. Rank-specific state is accepted, because copying files preserves it.
Result<convert::InputOptions> InputOf(const Source& source, const ConvertOptions& options,
                                      const checkpoints::Format& format,
                                      const checkpoints::TargetSpec& spec) {
  SW_TRY_ASSIGN(convert::InputOptions input, internal::InputOf(source));
  input.siblings = options.siblings;
  input.bound = true;
  input.output = options.output;
  if (!options.dry_run)
    input.proof = convert::CompareOptions{options.threads, options.memory_bytes};
  convert::SetTarget(format, spec, &input.maps);
  return input;
}

ConvertReport ReportOf(const convert::ConvertReport& done) {
  ConvertReport report;
  report.source_layout = convert::Explain(done.source);
  report.target_layout = convert::Explain(done.target);
  report.output_files = done.totals.output_files;
  report.output_bytes = done.totals.output_bytes;
  report.bytes_read = done.run.bytes_read;
  report.bytes_written = done.run.bytes_written;
  report.same_files = done.verbatim;
  report.found_done = done.found_done;
  report.not_carried = done.not_carried;
  report.json =
      convert::ConversionJson(done).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  return report;
}

Result<ConvertReport> ConvertOpened(comm::Comm& comm, const Source& source,
                                    const ConvertOptions& options, Sink& sink) {
  SW_TRY(internal::CheckWork(options.threads, options.memory_bytes));
  if (options.output.empty()) return Fail(Errc::kUsage, "the output has no name");
  SW_TRY_ASSIGN(const checkpoints::Format* format, WrittenFormat(options.format));
  SW_TRY_ASSIGN(const checkpoints::TargetSpec spec,
                checkpoints::ParseTarget(*format, options.target));
  SW_TRY_ASSIGN(const convert::InputOptions first, InputOf(source, options, *format, spec));
  SW_TRY_ASSIGN(const auto input, convert::OpenInput(comm, first, sink));
  convert::ConvertOptions how;
  how.output = options.output;
  how.force = options.force;
  how.resume = options.resume;
  how.take_over = options.take_over;
  how.dry_run = options.dry_run;
  how.link = options.link;
  how.strict = options.strict;
  how.verify = options.verify;
  how.threads = options.threads;
  how.memory_bytes = options.memory_bytes;
  SW_TRY_ASSIGN(const convert::ConvertReport done,
                convert::Convert(comm, *input, spec, *format, "library", how, sink));
  return ReportOf(done);
}

}  // namespace

Result<ConvertReport> Convert(Ranks& ranks, const Source& source, const ConvertOptions& options,
                              Sink& sink) {
  return internal::Guarded([&] { return ConvertOpened(ranks.comm(), source, options, sink); });
}

}  // namespace shardwright
