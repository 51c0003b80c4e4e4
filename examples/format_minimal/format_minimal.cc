// SPDX-License-Identifier: Apache-2.0
// examples/format_minimal: a checkpoint format that is only read. docs/extending.md explains it.
// A checkpoint is a folder with files of raw little-endian elements and an index, minimal.json:
//   {"version": 1, "step": 10,
//    "optimizer": {"lr": 0.001, "beta1": 0.9, "beta2": 0.999, "eps": 1e-08, "weight_decay": 0.01},
//    "files": {"rank-0.raw": {"bytes": 480, "crc32": 907060870}},
//    "parameters": [{"name": "up.weight", "shape": [4, 6], "states": {"weight": {
//        "dtype": "bfloat16",
//        "pieces": [{"file": "rank-0.raw", "offset": 0, "start": [0, 0], "shape": [4, 6]}]}}}]}

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <utility>

#include "checkpoints/model/fields.h"
#include "checkpoints/model/links.h"
#include "checkpoints/pickled/map_builder.h"
#include "checkpoints/registry.h"
#include "checkpoints/tp_rules/rule_source.h"
#include "engine/layout/mesh_cut.h"
#include "engine/layout/states.h"
#include "support/base/checked.h"
#include "support/base/limits.h"
#include "support/base/text.h"
#include "support/json/json.h"

namespace shardwright::checkpoints {
namespace {

using json::Json;
using Kind = Json::value_t;

constexpr std::string_view kIndexName = "minimal.json";
constexpr std::array kStates = {layout::kWeight, layout::kMaster, layout::kFirstMoment,
                                layout::kSecondMoment};

/// Returns a member of an untrusted object. \error kBadInput  it is absent or of another kind
Result<const Json*> Get(const Json& object, const char* key, Kind kind) {
  const Json* const value = json::Find(object, key);
  const bool number = kind == Kind::number_float && value != nullptr && value->is_number();
  if (number || (value != nullptr && value->type() == kind)) return value;
  return BadInput(Quoted(key), ": expected ", json::KindOf(Json(kind)), ", found ",
                  value == nullptr ? "nothing" : json::KindOf(*value));
}

Result<std::uint64_t> Count(const Json& object, const char* key, std::uint64_t last = ~0ULL) {
  const Json* const value = json::Find(object, key);
  return json::WholeOf(value == nullptr ? Json() : *value, 0, last, Quoted(key));
}

Result<Shape> Counts(const Json& object, const char* key) {
  SW_TRY_ASSIGN(const Json* const list, Get(object, key, Kind::array));
  if (list->size() > limits::kTensorRank) return Fail(Errc::kLimit, Quoted(key), ": too long");
  Shape counts;
  for (const Json& one : *list) {
    SW_TRY_ASSIGN(counts.emplace_back(), json::WholeOf(one, 0, ~0ULL, Quoted(key)));
  }
  return counts;
}

bool IsIndex(const os::Entry& entry) { return IsFile(entry) && entry.name == kIndexName; }

bool Claims(const Listing& listing) {
  return std::ranges::any_of(listing.folders, [](const Listing::Folder& folder) {
    return std::ranges::any_of(folder.entries, IsIndex);
  });
}

Belongs BelongsTo(std::string_view name) {
  return name == kIndexName || name.ends_with(".raw") ? Belongs::kOneVersion : Belongs::kNo;
}

/// Returns the data files that the index names, with their Found::how: size and CRC-32.
Result<std::map<std::string, std::string>> DataFiles(const Json& index) {
  SW_TRY_ASSIGN(const std::uint64_t version, Count(index, "version"));
  if (version != 1) return Fail(Errc::kUnsupported, "expected version 1, found ", version);
  SW_TRY_ASSIGN(const Json* const files, Get(index, "files", Kind::object));
  std::map<std::string, std::string> found;
  for (const auto& [name, file] : files->items()) {
    FieldWriter how;
    SW_TRY_ASSIGN(const std::uint64_t bytes, Count(file, "bytes"));
    SW_TRY_ASSIGN(const std::uint64_t crc32, Count(file, "crc32", ~std::uint32_t{0}));
    how.Number(bytes);
    how.Number(crc32);
    found[name] = std::move(how).Take();
  }
  return found;
}

/// Returns the container of a data file: no header, and the whole file as its only payload.
Result<std::vector<Container>> ReadFile(const Found& found, const os::File& /*file*/,
                                        const os::Identity& identity) {
  FieldReader how(found.how);
  SW_TRY_ASSIGN(const std::uint64_t bytes, how.Number());
  SW_TRY_ASSIGN(const std::uint64_t crc32, how.Number());
  if (identity.bytes != bytes) {
    return BadInput(found.path, ": expected ", bytes, " bytes, as in ", kIndexName, ", found ",
                    identity.bytes);
  }
  files::ContainerMetadata metadata;
  metadata.head = files::Head::kJson;
  metadata.header = "{}";
  metadata.last = bytes;
  metadata.storages.push_back({"data", 0, bytes, static_cast<std::uint32_t>(crc32)});
  Container container;
  container.metadata = std::make_shared<const files::ContainerMetadata>(std::move(metadata));
  return std::vector<Container>{std::move(container)};
}

Result<SourceSet> Scan(const Listing& listing, const ScanOptions& options) {
  SourceSet set;
  std::map<std::string, std::string> wanted;
  for (const Listing::Folder& folder : listing.folders) {
    if (!set.manifest.empty() || std::ranges::none_of(folder.entries, IsIndex)) continue;
    const std::string path = StrCat(folder.path, "/", kIndexName);
    SW_TRY_ASSIGN(set.manifest, ReadTextInFolder(path, limits::kJsonBytes));
    SW_TRY_ASSIGN(const Json index, json::Parse(set.manifest, path));
    auto files = DataFiles(index);
    if (!files) return Within(path, files.error());
    wanted = *std::move(files);
  }
  std::vector<Found> found;
  for (const Listing::Folder& folder : listing.folders) {
    for (const os::Entry& entry : folder.entries) {
      const auto file = wanted.find(entry.name);
      if (file == wanted.end() || !IsFile(entry)) continue;
      found.push_back({folder.path + "/" + entry.name, entry.name, true, file->second});
    }
  }
  SW_TRY(ReadFiles(std::move(found), ReadFile, options, &set));
  return set;
}

/// Makes a Checkpoint from the index and the containers that ReadFile has returned.
class Reader {
 public:
  explicit Reader(const SourceSet& source) : source_(source), map_(source, &out_.map) {
    for (std::uint32_t i = 0; i < source.files.size(); ++i) files_[source.files[i].name] = i;
  }

  Result<Checkpoint> Run(const Patterns& patterns) {
    out_.origin = source_.format;
    out_.tag = source_.tag;
    out_.warnings = source_.warnings;
    out_.arena = std::make_shared<pickle::Arena>();
    const std::string where = StrCat(source_.tag, "/", kIndexName);
    SW_TRY_ASSIGN(const Json index, json::Parse(source_.manifest, where));
    if (Status read = ReadIndex(index); !read) return Within(where, read.error());
    const Patterns chosen = patterns.ForModel(names_, shapes_);
    for (Param& param : out_.params) {
      SW_TRY_ASSIGN(Ruled ruled, DecideRule({}, chosen, param.name, std::span(&param.shape, 1)));
      param.rule = std::move(ruled.rule);
    }
    return std::move(out_);
  }

 private:
  Status ReadIndex(const Json& index) {
    SW_TRY_ASSIGN(const auto files, DataFiles(index));
    for (const auto& [name, how] : files) {
      if (!files_.contains(name)) return Fail(Errc::kNotFound, name, ": this data file is missing");
    }
    for (const SourceFile& file : source_.files) {  // a catalogue may have others than ReadFile
      if (file.containers.size() == 1 && file.containers[0].metadata->storages.size() == 1)
        continue;
      return BadInput(file.name, ": expected one container with one payload");
    }
    SW_TRY_ASSIGN(out_.iteration, Count(index, "step", 1ULL << 53));
    SW_TRY(ReadOptimizer(index));
    SW_TRY_ASSIGN(const Json* const parameters, Get(index, "parameters", Kind::array));
    if (parameters->empty()) return BadInput("expected parameters, found none");
    for (const Json& json : *parameters) {
      SW_TRY_ASSIGN(const Json* const name, Get(json, "name", Kind::string));
      out_.params.emplace_back().name = name->get<std::string>();
      if (Status read = ReadParameter(json); !read) return Within(name->dump(), read.error());
    }
    out_.states.assign(moments_.begin(), moments_.end());
    out_.layout.dtype = out_.params.front().dtype;
    out_.layout.mesh.dp_shard = files_.size();
    SW_TRY(layout::Validate(out_.map));
    out_.proved = true;
    for (const auto& [name, file] : files_) {
      if (used_bytes_[file] == BytesOf(file)) continue;
      return BadInput(name, ": expected pieces of ", BytesOf(file), " bytes in total, found ",
                      used_bytes_[file]);
    }
    return {};
  }

  Status ReadOptimizer(const Json& index) {
    HyperParams& hyper = out_.groups.emplace_back().hyper;
    hyper.betas.emplace();
    hyper.lr = hyper.eps = hyper.weight_decay = 0;
    SW_TRY_ASSIGN(const Json* const optimizer, Get(index, "optimizer", Kind::object));
    const std::pair<const char*, double*> numbers[] = {{"lr", &*hyper.lr},
                                                       {"beta1", &hyper.betas->first},
                                                       {"beta2", &hyper.betas->second},
                                                       {"eps", &*hyper.eps},
                                                       {"weight_decay", &*hyper.weight_decay}};
    for (const auto& [key, number] : numbers) {
      SW_TRY_ASSIGN(const Json* const value, Get(*optimizer, key, Kind::number_float));
      *number = value->get<double>();
    }
    return {};
  }

  Status ReadParameter(const Json& json) {
    Param& param = out_.params.back();
    param.group = 0;
    out_.groups.front().params.push_back(static_cast<std::uint32_t>(out_.params.size() - 1));
    SW_TRY_ASSIGN(param.shape, Counts(json, "shape"));
    names_.push_back(param.name);
    shapes_.push_back(param.shape);
    SW_TRY_ASSIGN(const Json* const states, Get(json, "states", Kind::object));
    SW_TRY(Get(*states, "weight", Kind::object));
    for (const auto& [state, value] : states->items()) {
      if (Status read = ReadState(value, state); !read) return Within(state, read.error());
    }
    if (!states->contains(layout::kFirstMoment)) return {};
    Scalar& step = param.scalars.emplace_back();  // the parameter has been trained
    step.state = layout::kStep;
    step.value = out_.arena->Count(*out_.iteration);
    return {};
  }

  Status ReadState(const Json& json, const std::string& name) {
    Param& param = out_.params.back();
    if (std::ranges::find(kStates, name) == kStates.end()) {
      return Fail(Errc::kUnsupported, "this state is unknown");
    }
    if (!layout::IsModelState(name)) moments_.insert(name);
    SW_TRY_ASSIGN(const Json* const word, Get(json, "dtype", Kind::string));
    const auto dtype = DTypeFromName(word->get<std::string>());
    if (!dtype || !IsFloating(*dtype)) {
      return Fail(Errc::kUnsupported, "expected a floating-point dtype, found ", word->dump());
    }
    if (name == layout::kWeight) param.dtype = *dtype;
    layout::LogicalTensor tensor{param.name, name, *dtype, param.shape, {}};
    SW_TRY_ASSIGN(const Json* const pieces, Get(json, "pieces", Kind::array));
    for (const Json& piece : *pieces) SW_TRY(ReadPiece(piece, &tensor));
    out_.map.tensors.push_back(std::move(tensor));
    return {};
  }

  Status ReadPiece(const Json& json, layout::LogicalTensor* tensor) {
    SW_TRY_ASSIGN(const Json* const name, Get(json, "file", Kind::string));
    const auto file = files_.find(name->get<std::string>());
    if (file == files_.end()) return BadInput("\"files\" does not list ", name->dump());
    layout::Piece box;
    SW_TRY_ASSIGN(box.offset, Counts(json, "start"));
    SW_TRY_ASSIGN(box.sizes, Counts(json, "shape"));
    SW_TRY_ASSIGN(const std::uint64_t offset, Count(json, "offset"));
    SW_TRY_ASSIGN(const std::uint64_t elems, CountElems(box.sizes));
    SW_TRY_ASSIGN(const std::uint64_t bytes, CheckedMul(elems, ItemSize(tensor->dtype)));
    SW_TRY_ASSIGN(const std::uint64_t end, CheckedAdd(offset, bytes));
    if (end > BytesOf(file->second)) {
      return BadInput("expected a piece in the ", BytesOf(file->second), " bytes of ", file->first,
                      ", found one that ends at byte ", end);
    }
    SW_TRY_ASSIGN(used_bytes_[file->second], CheckedAdd(used_bytes_[file->second], bytes));
    SW_TRY_ASSIGN(layout::Cut cut, layout::CutOf(tensor->shape, box));
    if (elems == 0) return {};
    layout::Fragment& fragment = tensor->fragments.emplace_back();
    fragment.cut = std::make_shared<const layout::Cut>(std::move(cut));
    fragment.at.array =
        map_.AddWhole({map_.MemberOf(file->second, 0, 0), offset, elems, tensor->dtype});
    return {};
  }

  std::uint64_t BytesOf(std::uint32_t file) const {
    return source_.files[file].containers[0].metadata->storages[0].bytes;
  }

  const SourceSet& source_;
  Checkpoint out_;
  MapBuilder map_;
  std::map<std::string, std::uint32_t> files_;         // by name: index into source_.files
  std::map<std::uint32_t, std::uint64_t> used_bytes_;  // by file: bytes of its pieces
  std::vector<std::string> names_;                     // of parameters
  std::vector<Shape> shapes_;
  std::set<std::string> moments_;
};

Result<Checkpoint> Read(const SourceSet& source, const Patterns& patterns) {
  return Reader(source).Run(patterns);
}

[[maybe_unused]] const bool kAdded = AddFormat({.name = "minimal",
                                                .summary = "raw elements and a JSON index",
                                                .keys = {},
                                                .claims = Claims,
                                                .belongs = BelongsTo,
                                                .scan = Scan,
                                                .read_file = ReadFile,
                                                .read = Read});

}  // namespace
}  // namespace shardwright::checkpoints
