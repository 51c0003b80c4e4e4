// SPDX-License-Identifier: Apache-2.0
#include "common/ucp.h"

#include <algorithm>
#include <ostream>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "convert/describe.h"
#include "support/base/bytes.h"
#include "support/base/peer.h"
#include "support/base/stop.h"
#include "support/base/text.h"

namespace shardwright::apps {
namespace {

/// Returns the target keys of a format without those that are flags, such as "dp tp zero".
std::string KeysOf(const checkpoints::Format& format) {
  std::string keys;
  for (const checkpoints::TargetKey& key : format.keys) {
    if (key.is_flag) continue;
    keys += keys.empty() ? "" : " ";
    keys += key.name;
  }
  return keys;
}

/// Shows the sets of weights of a checkpoint that has several.
void ShowWeightSets(const checkpoints::Checkpoint& checkpoint, std::ostream& out) {
  if (checkpoint.weight_sets.size() < 2) return;
  for (const checkpoints::WeightSet& set : checkpoint.weight_sets) {
    out << "weights of " << Quoted(set.name);
    if (set.tensors > 0) out << ": " << Plural(set.tensors, "tensor");
    if (set.bytes > 0) out << ", " << FormatBytes(set.bytes);
    out << (set.taken ? " (selected)" : "") << "\n";
  }
}

}  // namespace

void TrustFlags::AddTo(cli::App& app) {
  app.AddText("--trust-user", &user,
              "also accept a process of this user at unix:PATH; by default only your own processes "
              "and those of root are accepted",
              "NAME");
}

Result<std::optional<std::uint32_t>> TrustFlags::User() const {
  if (user.empty()) return std::optional<std::uint32_t>();
  auto number = ParseUser(user);
  if (!number) return Within("--trust-user", std::move(number).error());
  return std::optional(*number);
}

void AddPatterns(cli::App& app, std::vector<std::string>* files) {
  app.AddList("--patterns", files, "rules file for sharding and for frozen parameters", "FILE");
}

void SourceFlags::AddTo(cli::App& app, bool parts) {
  app.AddList("--also", &also, "another folder with a part of INPUT", "DIR");
  AddPatterns(app, &patterns);
  app.AddFlag("--allow-mixed", &allow_mixed,
              "read INPUT even if its files come from two saves, for example because a job was "
              "killed while it overwrote a checkpoint");
  app.AddCount("--io-concurrency", &io_concurrency, 1, os::kIoThreadsMax,
               "files that a rank opens, reads, creates or syncs at the same time, in addition to "
               "the work of --threads; more files hide the latency of a network file system");
  if (!parts) return;
  app.AddFlag("--node-local", &node_local,
              "every node sees only a part of INPUT; {rank} and {node} in its path are replaced");
}

void SourceFlags::AddSiblingsTo(cli::App& app) {
  siblings = true;
  app.AddEnum<bool>("--siblings", &siblings, {{"copy", true}, {"none", false}},
                    "sibling files of the tag folder, such as trainer_state.json and the "
                    "tokenizer: copy them byte for byte, or leave them out");
}

void SourceFlags::AddMapTo(cli::App& app) {
  app.AddList("--map", &maps,
              "rename and reshape tensors for another program. MAP is " +
                  Joined(checkpoints::ModelMap::BuiltInNames(), ", ") +
                  ", a file, or auto (the map of the model family that INPUT or a config.json next "
                  "to it names). TO is the naming scheme to write; FROM is detected unless given. "
                  "Maps apply in order; \"none\" keeps all names",
              "MAP[:FROM][:TO]");
  app.AddText("--map-sizes", &map_sizes,
              "model sizes for --map that are neither in the shapes nor in a config.json next to "
              "INPUT, such as kv_heads=8",
              "NAME=N,...");
  app.AddText("--weights-of", &weights_of,
              "set of weights to read if INPUT has several with the same tensor names, such as the "
              "model and its EMA; --list prints the sets",
              "NAME");
  app.Check([this, &app]() -> Status {
    if (maps.empty() && app.IsSet("--map-sizes")) {
      return Fail(Errc::kUsage, "--map-sizes requires --map");
    }
    return {};
  });
}

convert::InputOptions SourceFlags::Options(const cli::CommonFlags& flags,
                                           const std::string& output) const {
  convert::InputOptions options;
  options.source_paths = {input};
  options.pattern_files = patterns;
  options.node_local = node_local;
  options.allow_mixed = allow_mixed;
  options.siblings = siblings;
  options.io_threads = static_cast<unsigned>(io_concurrency);
  options.maps = {maps, map_sizes, {}, false, nullptr};
  options.weights_of = weights_of;
  options.proof.reset();
  if (!flags.dry_run && !flags.describes()) {
    options.proof = convert::CompareOptions{flags.threads, flags.memory_bytes};
  }
  options.source_paths.insert(options.source_paths.end(), also.begin(), also.end());
  options.output = output;
  options.new_output =
      !output.empty() && !flags.force && flags.resume != Resume::kIfSameOrDone && !flags.dry_run;
  return options;
}

void FormatFlags::AddTo(cli::App& app, const std::string& what) {
  std::vector<std::pair<std::string, const checkpoints::Format*>> formats;
  for (const checkpoints::Format& one : checkpoints::Formats()) {
    if (one.write == nullptr || (for_ranks && one.readers == nullptr)) continue;
    formats.emplace_back(one.name, &one);
  }
  if (or_none) formats.emplace_back("none", nullptr);
  CLI::Option* spec = app.AddText(
      "--target", &target,
      "layout to write, as key=value,... with the keys " + KeysOf(*format) + "; " + what, "SPEC");
  std::string summaries;
  std::set<std::string> keys;
  const std::string first_keys = KeysOf(*format);
  for (const auto& [name, one] : formats) {
    if (one == nullptr) continue;
    for (const checkpoints::TargetKey& key : one->keys) {
      if (!key.is_flag) keys.insert(std::string(key.name) + "=");
    }
    summaries += ". " + name + ": " + std::string(one->summary);
    const std::string own = KeysOf(*one);
    if (!own.empty() && own != first_keys) summaries += " (keys " + own + ")";
  }
  if (of_source) format = nullptr;
  const std::string start =
      of_source ? "checkpoint format to write, by default that of INPUT" : "checkpoint format";
  app.AddEnum<const checkpoints::Format*>("--format", &format, formats,
                                          start + summaries + none_help);
  app.Suggest(spec, {keys.begin(), keys.end()});
}

void FormatFlags::AddKeyFlags(cli::App& app) {
  for (const checkpoints::Format& one : checkpoints::Formats()) {
    if (one.write == nullptr || (fixed && &one != format)) continue;
    for (const checkpoints::TargetKey& key : one.keys) {
      if (!key.is_flag || FindFlag(key.name) != nullptr) continue;
      KeyFlag& flag = *key_flags_.emplace_back(std::make_unique<KeyFlag>());
      flag.format = &one;
      flag.key = &key;
      const std::string name = "--" + std::string(key.name);
      if (key.is_switch) {
        flag.value = "yes";
        app.AddFlag(name, &flag.on, key.help);
        continue;
      }
      if (key.words.empty()) {
        app.AddText(name, &flag.value, key.help, key.value_kind);
        continue;
      }
      flag.value = key.words.front();
      const std::vector<std::string> words(key.words.begin(), key.words.end());
      app.AddChoice(name, &flag.value, words, key.help);
    }
  }
}

void FormatFlags::AddStrictTo(cli::App& app) {
  app.AddFlag("--strict", &strict,
              "if any data cannot be converted: list it, write nothing and exit with code 5");
}

const FormatFlags::KeyFlag* FormatFlags::FindFlag(std::string_view name) const {
  for (const std::unique_ptr<KeyFlag>& one : key_flags_) {
    if (one->key->name == name) return one.get();
  }
  return nullptr;
}

std::string FormatFlags::GivenKeyFlag(const cli::App& app, std::string_view except) const {
  for (const std::unique_ptr<KeyFlag>& one : key_flags_) {
    std::string name = "--" + std::string(one->key->name);
    if (name != except && app.IsSet(name)) return name;
  }
  return "";
}

const std::string& FormatFlags::ValueOf(std::string_view key) const {
  const KeyFlag* const flag = FindFlag(key);
  SW_CHECK(flag != nullptr);
  return flag->value;
}

Result<checkpoints::TargetSpec> FormatFlags::Spec(const cli::App& app) const {
  checkpoints::TargetSpec spec;
  if (format == nullptr) return spec;
  SW_TRY_ASSIGN(spec, checkpoints::ParseTarget(*format, target));
  for (const std::unique_ptr<KeyFlag>& one : key_flags_) {
    const std::string name(one->key->name);
    if (!app.IsSet("--" + name)) continue;
    const auto key =
        std::find_if(format->keys.begin(), format->keys.end(),
                     [&](const checkpoints::TargetKey& its) { return its.name == name; });
    if (key == format->keys.end()) {
      return Fail(Errc::kUsage, "--", name, " requires --format=", one->format->name);
    }
    if (spec.Find(name) != nullptr) {
      std::string both = "--" + name;
      both.append(" cannot be combined with --target ").append(name).append("=");
      return Fail(Errc::kUsage, both);
    }
    SW_TRY(key->check(name, one->value));
    spec.settings.emplace_back(name, one->value);
  }
  return spec;
}

convert::ConvertOptions WriteOptions(const cli::CommonFlags& flags, const std::string& output) {
  convert::ConvertOptions options;
  options.output = output;
  options.force = flags.force;
  options.resume = flags.resume;
  options.take_over = flags.take_over;
  options.dry_run = flags.dry_run;
  options.verify = flags.verify;
  options.threads = flags.threads;
  options.memory_bytes = flags.memory_bytes;
  return options;
}

Result<std::unique_ptr<convert::Input>> OpenInput(cli::Context& context,
                                                  const convert::InputOptions& options) {
  const Interruptible reading(context.sink());
  SW_TRY_ASSIGN(auto input, convert::OpenInput(context.comm(), options, context.sink()));
  SW_TRY(context.comm().Agree(CheckStop(StopOf(context.sink()))));
  return input;
}

Status Describe(cli::Context& context, const SourceFlags& source) {
  const Interruptible reading(context.sink());
  convert::InputOptions options = source.Options(context.flags());
  options.siblings = false;
  options.bound = true;
  SW_TRY_ASSIGN(const auto input, OpenInput(context, options));
  const checkpoints::Checkpoint& checkpoint = input->checkpoint;
  const auto with_maps = [&](nlohmann::json json) {
    if (!input->mapped.empty()) json["maps"] = convert::MapsJson(input->mapped);
    return json;
  };
  for (const std::string& one : checkpoints::OptimizerLeftOut(checkpoint)) context.sink().Warn(one);
  if (context.flags().explain) {
    SW_TRY_ASSIGN(const std::string text,
                  convert::ExplainParam(checkpoint, *context.flags().explain));
    SW_TRY_ASSIGN(const auto json, convert::ExplainJson(checkpoint, *context.flags().explain));
    context.out() << text;
    context.SetResult(with_maps(json));
    return {};
  }
  context.out() << checkpoint.origin << " checkpoint " << checkpoint.tag << ": "
                << convert::Explain(checkpoint.layout) << ", "
                << Plural(checkpoint.map.files.size(), "file") << "\n";
  ShowWeightSets(checkpoint, context.out());
  context.out() << "\n";
  using Column = text::Table::Column;
  text::Table table({Column{"NAME", text::Table::Align::kLeft, true}, Column{"SHAPE"},
                     Column{"KIND"}, Column{"SIZE", text::Table::Align::kRight}, Column{"SPLIT"},
                     Column{"STATES"}});
  for (convert::ListRow& row : convert::List(checkpoint)) {
    table.AddRow({std::move(row.name), std::move(row.shape), std::move(row.kind),
                  FormatBytes(row.bytes), std::move(row.split), std::move(row.states)});
  }
  context.Print(table);
  // Skip the JSON report without --json. It needs more memory than the rest of a list.
  if (!context.flags().json) return {};
  nlohmann::json list = convert::ListJson(checkpoint);
  list["fingerprint"] = convert::FingerprintText(*input);
  context.SetResult(with_maps(std::move(list)));
  return {};
}

Status ShowConversion(cli::Context& context, const convert::ConvertReport& report,
                      const std::string& output) {
  context.SetResult(convert::ConversionJson(report));
  if (!report.dry_run) return {};
  const plan::Totals& totals = report.totals;
  context.out() << "source   " << convert::Explain(report.source) << "\n"
                << "target   " << convert::Explain(report.target) << "\n";
  if (report.verbatim) {
    context.out() << "equal layouts: the source's files are used unchanged, "
                  << (report.linked ? "as hard links\n"
                                    : "as clones, which need no reads and no disk space if the "
                                      "file system supports them\n");
  }
  context.out() << "read     " << totals.read_bytes + totals.verify_bytes << " bytes ("
                << FormatBytes(totals.read_bytes + totals.verify_bytes) << ") of payload, "
                << totals.verify_bytes << " of them only to verify\n"
                << "write    " << totals.output_bytes << " bytes ("
                << FormatBytes(totals.output_bytes) << ") in "
                << Plural(totals.output_files - totals.linked_files, "file") << "\n"
                << "disk     " << FormatBytes(totals.output_bytes)
                << " in addition to an existing output until the new one is committed\n"
                << "memory   " << FormatBytes(report.buffer_bytes) << " of buffers per rank\n"
                << "siblings " << report.siblings.copied.size() << " of these files ("
                << FormatBytes(report.siblings.bytes) << ") are sibling files of the checkpoint\n"
                << "unread   " << totals.members_unread << " of "
                << Plural(totals.members_unread + totals.members_read, "storage") << "\n";
  return exec::CheckFits(report.free, output, report.needed_bytes, 0);
}

}  // namespace shardwright::apps
