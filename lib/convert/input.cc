// SPDX-License-Identifier: Apache-2.0
#include "convert/input.h"

#include <algorithm>
#include <set>

#include <tbb/task_arena.h>

#include "checkpoints/deepspeed/common/scan.h"
#include "checkpoints/pickled/wrappers.h"
#include "checkpoints/registry.h"
#include "convert/catalogue.h"
#include "convert/convert.h"
#include "convert/scan/manifest_check.h"
#include "convert/scan/node_local.h"
#include "convert/scan/scan_ranks.h"
#include "engine/exec/for_each.h"
#include "engine/exec/integrity.h"
#include "engine/exec/zpack.h"
#include "support/base/limits.h"
#include "support/base/system.h"
#include "support/base/text.h"
#include "support/base/version.h"
#include "support/json/json.h"
#include "support/os/dir.h"
#include "support/os/real_path.h"
#include "support/os/sha256.h"

namespace shardwright::convert {
namespace {

std::span<const std::byte> BytesOf(std::string_view text) { return std::as_bytes(std::span(text)); }

void ReplaceAll(std::string* text, std::string_view what, std::string_view by) {
  for (std::size_t at = text->find(what); at != std::string::npos;
       at = text->find(what, at + by.size())) {
    text->replace(at, what.size(), by);
  }
}

std::vector<std::string> Expand(std::vector<std::string> source_paths, int rank) {
  const std::string node = HostName();
  for (std::string& root : source_paths) {
    ReplaceAll(&root, "{rank}", std::to_string(rank));
    ReplaceAll(&root, "{node}", node);
  }
  return source_paths;
}

Result<checkpoints::SourceSet> ScanAny(const std::vector<std::string>& source_paths, bool siblings,
                                       const checkpoints::ScanOptions& scan) {
  if (source_paths.size() == 1) {
    SW_TRY_ASSIGN(const bool catalogue, IsCatalogue(source_paths.front()));
    if (catalogue) {
      return ReadCatalogue(source_paths.front(), siblings);
    }
  }
  SW_TRY_ASSIGN(checkpoints::SourceSet set, checkpoints::ScanSource(source_paths, scan));
  SW_TRY(CheckListed(set));
  if (siblings) SW_TRY(checkpoints::FindSiblingFiles(&set));
  return set;
}

/// This rank's part of a node-local source.
struct Part {
  checkpoints::SourceSet set;
  std::set<std::string> catalogued;  // for a catalogue: the names of all files
};

Result<Part> ScanPart(const std::vector<std::string>& source_paths, bool siblings,
                      const checkpoints::ScanOptions& scan) {
  Part part;
  SW_TRY_ASSIGN(part.set, ScanAny(source_paths, siblings, scan));
  SW_TRY_ASSIGN(const bool catalogue, IsCatalogue(source_paths.front()));
  // Compressed files are in the catalogue itself and were found when it was read.
  if (!catalogue || IsCompressed(part.set)) return part;
  for (const checkpoints::SourceFile& file : part.set.files) part.catalogued.insert(file.name);
  for (const checkpoints::SiblingFile& one : part.set.siblings) part.catalogued.insert(one.name);
  KeepVisible(scan.io_threads, &part.set);
  return part;
}

bool HasPointer(const std::string& format) {
  const checkpoints::Format* row = checkpoints::FindFormat(format);
  return row != nullptr && !row->pointer.empty();
}

/// Scans again if this rank did not find the files that others have. Only one node needs
/// `latest`, and some nodes may have no part, so the ranks exchange the tag. A node that found
/// weights while others found a tag folder searches for that folder and its sibling files.
/// \param mine  the part that this rank has found so far
/// Collective.
Result<Part> Recheck(comm::Comm& comm, const std::vector<std::string>& source_paths, bool siblings,
                     const checkpoints::ScanOptions& scan, Result<Part> mine) {
  const std::string my_format = mine ? mine->set.format : "";
  SW_TRY_ASSIGN(const std::vector<std::string> formats, GatherTexts(comm, my_format));
  SW_TRY_ASSIGN(const std::vector<std::string> tags, GatherTexts(comm, mine ? mine->set.tag : ""));
  auto known = std::find_if(formats.begin(), formats.end(), HasPointer);
  const bool lacks = mine ? known != formats.end() && !HasPointer(my_format)
                          : mine.error().code == Errc::kNotFound;
  if (known == formats.end()) {
    known = std::find_if(formats.begin(), formats.end(),
                         [](const std::string& format) { return !format.empty(); });
  }
  if (!lacks || known == formats.end()) return mine;
  const auto rank = static_cast<std::size_t>(known - formats.begin());
  Part part;
  SW_TRY_ASSIGN(part.set, checkpoints::ScanPart(source_paths, tags[rank], scan));
  SW_TRY(CheckListed(part.set));
  if (siblings) SW_TRY(checkpoints::FindSiblingFiles(&part.set));
  return part;
}

/// Unites every rank's part of a node-local source. A file that several ranks see
/// belongs to the lowest of them. A warning lists ranks that see none of the files.
/// Collective.
Result<checkpoints::SourceSet> ScanParts(comm::Comm& comm, const InputOptions& options, Sink& sink,
                                         std::vector<int>* file_owner) {
  const std::vector<std::string> source_paths = Expand(options.source_paths, comm.rank());
  checkpoints::ScanOptions scan;
  scan.io_threads = options.io_threads;
  scan.sink = &sink;
  SW_TRY_ASSIGN(const Part mine,
                comm.Agree(Recheck(comm, source_paths, options.siblings, scan,
                                   ScanPart(source_paths, options.siblings, scan))));
  SW_TRY_ASSIGN(const std::vector<std::string> texts,
                GatherTexts(comm, checkpoints::Serialize(mine.set)));
  std::vector<checkpoints::SourceSet> parts;
  std::string blind;
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    SW_TRY_ASSIGN(checkpoints::SourceSet part, checkpoints::DeserializeSource(texts[rank]));
    if (part.files.empty()) blind += (blind.empty() ? "" : ", ") + std::to_string(rank);
    parts.push_back(std::move(part));
  }
  SW_TRY(DigestCopies(comm, &parts));
  SW_TRY_ASSIGN(checkpoints::SourceSet all, checkpoints::UniteParts(std::move(parts), file_owner));
  SW_TRY(comm.Agree(CheckCatalogued(mine.catalogued, all)));
  if (!blind.empty())
    all.warnings.push_back(StrCat(all.tag, ": none of its files is visible to ranks ", blind));
  return all;
}

/// Returns a text from the source's manifest, or an empty one if the source is not a catalogue.
/// Collective.
Result<std::string> FromCatalogue(comm::Comm& comm, const InputOptions& options,
                                  Result<std::string> (*text_of)(const std::string& folder)) {
  const std::vector<std::string> source_paths = Expand(options.source_paths, comm.rank());
  const auto read = [&]() -> Result<std::string> {
    if (source_paths.size() > 1 && !options.node_local) return std::string();
    // The scan reports folders that cannot be read.
    if (!IsCatalogue(source_paths.front()).value_or(false)) return std::string();
    return text_of(source_paths.front());
  };
  if (!options.node_local) return comm.OnRootText(read);
  SW_TRY_ASSIGN(const std::string mine, comm.Agree(read()));
  SW_TRY_ASSIGN(const std::vector<std::string> texts, GatherTexts(comm, mine));
  for (const std::string& text : texts) {
    if (!text.empty()) return text;
  }
  return std::string();
}

/// Returns the maps that were applied to a catalogue. Its names are those after the maps.
/// Collective.
Result<std::vector<MapChoice>> CataloguedMaps(comm::Comm& comm, const InputOptions& options) {
  SW_TRY_ASSIGN(const std::string recipes, FromCatalogue(comm, options, MapsOfCatalogue));
  return MapsOfRecipes(recipes, Expand(options.source_paths, comm.rank()).front());
}

/// Reads a checkpoint. Options decide if a requested set of weights may be missing.
Result<checkpoints::Checkpoint> ReadAsked(const InputOptions& options,
                                          const checkpoints::Patterns& patterns,
                                          checkpoints::SourceSet* set) {
  Result<checkpoints::Checkpoint> read = checkpoints::ReadCheckpointOrWeights(*set, patterns);
  const bool without = !read && read.error().code == Errc::kUsage && options.weights_if_present &&
                       !set->weights_of.empty();
  if (!without) return read;
  set->weights_of.clear();
  return checkpoints::ReadCheckpointOrWeights(*set, patterns);
}

Result<std::string> ReadPatternFile(const std::string& path) {
  return os::ReadWholeText(path, limits::kJsonBytes);
}

template <class Read>
Result<checkpoints::Patterns> PatternsFrom(const std::vector<std::string>& files,
                                           const Read& read) {
  checkpoints::Patterns patterns;
  for (const std::string& file : files) {
    SW_TRY_ASSIGN(const std::string text, read(file));
    SW_TRY(patterns.AddFile(text, file));
  }
  SW_TRY(patterns.AddBuiltIn());
  return patterns;
}

os::Fingerprint Finish(const exec::DigestStream& digest) {
  const exec::Digest sum = digest.Finish();
  os::Fingerprint fingerprint;
  std::memcpy(fingerprint.data(), sum.data(), sum.size());
  return fingerprint;
}

os::Fingerprint FingerprintOf(const std::vector<checkpoints::SiblingFile>& siblings) {
  exec::DigestStream digest;
  for (const checkpoints::SiblingFile& sibling : siblings) {
    digest.Add(BytesOf(sibling.name));
    digest.Add(std::as_bytes(std::span(&sibling.identity.bytes, 1)));
    if (sibling.content) {
      digest.Add(BytesOf(*sibling.content));
    } else {
      digest.Add(std::as_bytes(std::span(&sibling.identity.mtime_ns, 1)));
    }
  }
  return Finish(digest);
}

/// Opens the payloads of an input's map.
std::unique_ptr<exec::ByteSource> PayloadsOf(const Input& input) {
  std::vector<exec::SourcePath> paths = PathsOf(input.set);
  if (!IsCompressed(input.set)) {
    return std::make_unique<exec::FileBytes>(input.checkpoint.map, std::move(paths));
  }
  std::vector<std::string> packs;
  packs.reserve(paths.size());
  for (exec::SourcePath& path : paths) packs.push_back(std::move(path.path));
  return std::make_unique<exec::ZpackBytes>(input.checkpoint.map, std::move(packs));
}

/// Extends the error of a scan that found no checkpoint, if there is one at the output path.
/// Collective.
tl::unexpected<Error> WithOrder(comm::Comm& comm, const InputOptions& options, Error error) {
  if (error.code == Errc::kNotFound && !options.output.empty()) {
    InputOptions turned = options;
    turned.source_paths = {options.output};
    std::vector<int> owner;
    NullSink none;
    if (ScanInput(comm, turned, none, &owner)) {
      error.message +=
          StrCat("; OUTPUT ", options.output,
                 " contains a checkpoint; the arguments may be swapped: pass INPUT first");
    }
  }
  return tl::unexpected<Error>(std::move(error));
}

/// Adds names, identities and object graphs of files to the fingerprint of a source.
void AddFiles(const std::vector<checkpoints::SourceFile>& files, exec::DigestStream* digest) {
  for (const checkpoints::SourceFile& file : files) {
    digest->Add(BytesOf(file.name));
    digest->Add(std::as_bytes(std::span(&file.identity.bytes, 1)));
    digest->Add(std::as_bytes(std::span(&file.identity.mtime_ns, 1)));
    for (const checkpoints::Container& one : file.containers) {
      digest->Add(BytesOf(one.metadata->header));
    }
  }
}

Status CheckNew(const std::string& output) {
  SW_TRY_ASSIGN(const bool exists, os::Exists(output));
  if (exists) return Fail(Errc::kBusy, output, ": already exists; pass --force to replace it");
  return {};
}

/// Checks the path of an output before the source is read. Local.
/// \error kNotFound  the parent directory does not exist; kUsage  the output is the source
Status CheckPlace(const InputOptions& options) {
  SW_TRY_ASSIGN(const os::ParentName place, os::SplitOutput(options.output));
  SW_TRY_ASSIGN(const std::string output, os::ResolvePath(place.Path()));
  if (output.empty()) return {};
  for (const std::string& source : options.source_paths) {
    SW_TRY_ASSIGN(const std::string input, os::ResolvePath(source));
    if (input != output) continue;
    return Fail(Errc::kUsage, options.output,
                ": OUTPUT is the same path as INPUT, and inputs are never changed; choose another "
                "OUTPUT");
  }
  return {};
}

/// Verifies inferred mappings, or warns that they are not verified.
/// Collective.
Status ProvePlaces(comm::Comm& comm, const InputOptions& options, const Input& input, Sink& sink) {
  const checkpoints::Inferred& inferred = input.checkpoint.inferred;
  if (options.proof) {
    return ProveInferred(comm, input.checkpoint, *input.bytes, input.file_owner, *options.proof,
                         sink);
  }
  if (!inferred.params.empty()) {
    sink.Warn(StrCat(input.checkpoint.tag, ": ", inferred.why, ": the positions of ",
                     inferred.params.size(),
                     " parameters were inferred; a run that reads the weights verifies them"));
  }
  return {};
}

}  // namespace

Result<checkpoints::SourceSet> ScanInput(comm::Comm& comm, const InputOptions& options, Sink& sink,
                                         std::vector<int>* file_owner) {
  file_owner->clear();
  if (options.node_local) return ScanParts(comm, options, sink, file_owner);
  checkpoints::ScanOptions scan;
  scan.io_threads = options.io_threads;
  scan.sink = &sink;
  return ScanByRanks(comm, scan, [&](const checkpoints::ScanOptions& how) {
    return ScanAny(options.source_paths, options.siblings, how);
  });
}

Result<checkpoints::Patterns> ReadPatterns(const std::vector<std::string>& files) {
  return PatternsFrom(files, ReadPatternFile);
}

Result<std::unique_ptr<Input>> OpenInput(comm::Comm& comm, const InputOptions& options,
                                         Sink& sink) {
  sink.Pass("scan");
  if (!options.output.empty()) SW_TRY(comm.OnRoot([&] { return CheckPlace(options); }));
  auto input = std::make_unique<Input>();
  input->source_paths = options.source_paths;
  input->siblings = options.siblings;
  input->io_threads = options.io_threads;
  exec::DigestStream digest, patterns;
  // One rank reads each file once, so that all ranks use the same rules and fingerprint.
  const auto read_pattern_file = [&](const std::string& path) -> Result<std::string> {
    Result<std::string> text = comm.OnRootText([&] { return ReadPatternFile(path); });
    if (text) {
      digest.Add(BytesOf(*text));
      patterns.Add(BytesOf(*text));
    }
    return text;
  };
  SW_TRY_ASSIGN(input->patterns, PatternsFrom(options.pattern_files, read_pattern_file));
  input->patterns_fingerprint = Finish(patterns);
  SW_TRY_ASSIGN(std::vector<MapChoice> maps, CataloguedMaps(comm, options));
  SW_TRY_ASSIGN(const std::vector<MapChoice> asked, ReadMaps(comm, options.maps));
  maps.insert(maps.end(), asked.begin(), asked.end());
  Result<checkpoints::SourceSet> scanned = ScanInput(comm, options, sink, &input->file_owner);
  if (!scanned) return WithOrder(comm, options, std::move(scanned).error());
  input->set = *std::move(scanned);
  sink.Pass("map");
  SW_TRY_ASSIGN(input->set.weights_of, FromCatalogue(comm, options, WeightsOfCatalogue));
  if (!options.weights_of.empty()) input->set.weights_of = options.weights_of;
  SW_TRY_ASSIGN(input->checkpoint, comm.Agree(ReadAsked(options, input->patterns, &input->set)));
  digest.Add(BytesOf(input->set.weights_of));
  if (Status whole = checkpoints::CheckUnbound(input->checkpoint); !whole && !options.bound) {
    return WithExport(std::move(whole).error(), *input, options.output);
  }
  for (const std::string& warning : input->checkpoint.warnings) sink.Warn(warning);
  if (!options.maps.weights_alone) {
    for (const std::string& warning : input->checkpoint.optimizer_warnings) sink.Warn(warning);
  }
  if (options.new_output) SW_TRY(comm.OnRoot([&] { return CheckNew(options.output); }));
  AddFiles(input->set.files, &digest);
  input->siblings_fingerprint = FingerprintOf(input->set.siblings);
  input->bytes = PayloadsOf(*input);
  SW_TRY(ProvePlaces(comm, options, *input, sink));
  // A separate reader, so that the command's own reads are counted without these.
  const std::unique_ptr<exec::ByteSource> checked = PayloadsOf(*input);
  std::optional<exec::CountReads> reads(std::in_place, *checked, sink);
  SW_TRY_ASSIGN(input->one_save, CheckOneSave(comm, input->checkpoint, *checked, input->file_owner,
                                              options.has_payloads ? options.proof : std::nullopt,
                                              options.allow_mixed, sink));
  reads.reset();
  if (std::ranges::any_of(input->checkpoint.params, checkpoints::IsAdapterName,
                          &checkpoints::Param::name)) {
    SW_TRY_ASSIGN(input->checkpoint.adapter_config, comm.OnRootText([&] {
      return checkpoints::FindAdapterConfig(Expand(options.source_paths, comm.rank()));
    }));
    digest.Add(BytesOf(input->checkpoint.adapter_config));
  }
  if (!maps.empty()) {
    SW_TRY_ASSIGN(const std::string config, ReadModelConfig(comm, *input));
    SW_TRY_ASSIGN(input->mapped, comm.Agree(UseMaps(maps, options.maps, config, input->patterns,
                                                    &input->checkpoint, sink)));
    exec::DigestStream of_maps;
    const auto add = [&](const std::string& text) {
      digest.Add(BytesOf(text));
      of_maps.Add(BytesOf(text));
    };
    for (const MapChoice& map : maps) add(map.text);
    for (const MapUsed& map : input->mapped) add(map.Json().dump());
    input->maps_fingerprint = Finish(of_maps);
  }
  input->fingerprint = Finish(digest);
  return input;
}

Result<std::string> ReadModelConfig(comm::Comm& comm, const Input& input) {
  std::vector<std::string> folders = Expand(input.source_paths, comm.rank());
  folders.insert(folders.end(), input.set.save_folders.begin(), input.set.save_folders.end());
  return comm.OnRootText([&] { return checkpoints::FindConfig(folders); });
}

std::vector<exec::SourcePath> PathsOf(const checkpoints::SourceSet& set) {
  std::vector<exec::SourcePath> paths;
  for (const checkpoints::SourceFile& file : set.files) paths.push_back(PathOf(file));
  for (const checkpoints::SiblingFile& sibling : set.siblings) {
    if (!sibling.content) paths.push_back(PathOf(sibling));
  }
  return paths;
}

std::string FingerprintText(const Input& input) {
  exec::Digest digest;
  std::memcpy(digest.data(), input.fingerprint.data(), digest.size());
  return exec::Hex(digest);
}

exec::Identity RunIdentity(const Input& input) {
  exec::Identity identity;
  identity.Add("the version of shardwright", kVersion);
  identity.AddDigest("--patterns", Hex(input.patterns_fingerprint));
  identity.AddDigest("--map", Hex(input.maps_fingerprint));
  identity.Add("--weights-of", input.set.weights_of);
  identity.Add("--siblings", input.siblings ? "copy" : "none");
  identity.AddDigest("the files of INPUT, which have changed", FingerprintText(input));
  identity.AddDigest("the sibling files of INPUT, which have changed",
                     Hex(input.siblings_fingerprint));
  return identity;
}

namespace {

Status VerifyFile(const checkpoints::SourceFile& file, const std::string& expected) {
  SW_TRY_ASSIGN(const os::File opened, os::File::OpenRead(file.path));
  SW_TRY_ASSIGN(const std::string found, os::Sha256Of(opened));
  if (found == expected) return {};
  return Fail(Errc::kBadInput, file.path, ": damaged: SHA-256 ", expected,
              " expected by the checkpoint, found ", found);
}

}  // namespace

Status VerifyDigests(comm::Comm& comm, const Input& input, unsigned threads, Sink& sink) {
  const std::vector<checkpoints::FileDigest>& digests = input.checkpoint.digests;
  if (digests.empty()) return {};
  if (IsCompressed(input.set)) {
    sink.Warn(
        "the compressed catalogue does not contain the original files, so the digests that the "
        "checkpoint records are not verified; the checksums of the compressed blocks are");
    return {};
  }
  sink.Pass("digests");
  std::vector<const checkpoints::FileDigest*> mine;
  for (std::size_t i = 0; i < digests.size(); ++i) {
    const int reader = input.file_owner.empty()
                           ? static_cast<int>(i % static_cast<std::size_t>(comm.size()))
                           : input.file_owner[digests[i].file];
    if (reader == comm.rank()) mine.push_back(&digests[i]);
  }
  tbb::task_arena arena(exec::ArenaThreads(threads));
  return comm.Agree(exec::ForEach(arena, mine.size(), [&](std::uint64_t i) {
    return VerifyFile(input.set.files[mine[i]->file], mine[i]->sha256);
  }));
}

}  // namespace shardwright::convert
