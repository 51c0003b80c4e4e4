// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/safetensors/safetensors.h"

#include <optional>
#include <string>
#include <vector>

#include "checkpoints/registry.h"
#include "checkpoints/safetensors/notes_internal.h"
#include "files/safetensors/index.h"
#include "files/safetensors/layout.h"
#include "unit/support/os/scratch.h"

namespace shardwright::checkpoints::safetensors {
namespace {

namespace file_format = shardwright::safetensors;
namespace fs = std::filesystem;

using Names = std::vector<std::string>;
using Metadata = std::map<std::string, std::string>;

Listing ListingOf(const std::string& name, os::EntryType type) {
  return Listing{{{"folder", {{name, type}}}}};
}

TEST(SafetensorsNames, FilesAndIndexesClaimAFolder) {
  for (const char* name : {"model.safetensors", "model-00002-of-00003.safetensors", "x.safetensors",
                           "model.safetensors.index.json", "model.safetensors.index.fp16.json"}) {
    EXPECT_TRUE(Claims(ListingOf(name, os::EntryType::kFile))) << name;
    EXPECT_TRUE(Claims(ListingOf(name, os::EntryType::kSymlink))) << name;
    EXPECT_FALSE(Claims(ListingOf(name, os::EntryType::kDir))) << name;
    EXPECT_EQ(BelongsTo(name), Belongs::kOneVersion) << name;
  }
  for (const char* name : {"model.safetensors.bak", "safetensors", "config.json", "index.json", "",
                           "model.safetensors.json", "model.bin.index.json"}) {
    EXPECT_FALSE(Claims(ListingOf(name, os::EntryType::kFile))) << name;
    EXPECT_EQ(BelongsTo(name), Belongs::kNo) << name;
  }
  EXPECT_FALSE(Claims(Listing{}));
}

TEST(SafetensorsNames, NumbersAreOfFiveDigits) {
  const auto numbered = ParseNumbered("a-b-00002-of-00013.safetensors");
  ASSERT_TRUE(numbered);
  EXPECT_EQ(numbered->stem, "a-b");
  EXPECT_EQ(numbered->number, 2U);
  EXPECT_EQ(numbered->count, 13U);
  for (const char* name :
       {"model.safetensors", "model-0002-of-0003.safetensors", "model-00002-of-00003.bin",
        "-00002-of-00003.safetensors", "model-0000x-of-00003.safetensors",
        "model-00002_of_00003.safetensors"}) {
    EXPECT_FALSE(ParseNumbered(name)) << name;
  }
}

TEST(SafetensorsNames, OneOfSeveralFilesDoesNotStandAlone) {
  EXPECT_TRUE(StandsAlone("model.safetensors"));
  EXPECT_TRUE(StandsAlone("model-00001-of-00001.safetensors"));
  EXPECT_FALSE(StandsAlone("model-00001-of-00002.safetensors"));
  EXPECT_FALSE(StandsAlone("model.safetensors.index.json"));
  EXPECT_FALSE(StandsAlone("model.pt"));
}

/// A tensor to write: float32, or the given type.
struct Made {
  std::string name;
  TensorNote note = {};
  DType dtype = DType::kF32;
  Shape shape = {2, 3};
};

class Safetensors : public os::Scratch {
 protected:
  /// Writes a file of zeros. \param notes  its tensors' notes are filled in, and the rest is kept
  void PutModel(const std::string& path, const std::vector<Made>& tensors, Metadata metadata = {},
                std::optional<Notes> notes = std::nullopt) const {
    std::vector<file_format::TensorSpec> specs;
    specs.reserve(tensors.size());
    for (const Made& one : tensors) specs.push_back({one.name, one.dtype, one.shape});
    if (notes) {
      std::vector<const std::string*> names;
      const auto order = file_format::Layout::Make(specs, {});
      ASSERT_TRUE(order) << order.error().message;
      for (const std::uint32_t at : order->order()) {
        notes->tensors.push_back(tensors[at].note);
        names.push_back(&tensors[at].name);
      }
      metadata[std::string(kNotesKey)] = NotesText(*notes, names);
    }
    const auto layout = file_format::Layout::Make(specs, metadata);
    ASSERT_TRUE(layout) << layout.error().message;
    std::string bytes = layout->head();
    bytes.resize(layout->file_bytes());
    Put(path, bytes);
  }

  void PutIndex(const std::string& path, const std::map<std::string, std::string>& map) const {
    file_format::Index index;
    index.files = map;
    Put(path, file_format::IndexText(index));
  }

  Result<SourceSet> ScanAt(const std::string& path) const { return ScanSource({At(path)}); }

  Checkpoint ReadAt(const std::string& path) const {
    const auto set = ScanAt(path);
    EXPECT_TRUE(set) << set.error().message;
    auto checkpoint = ReadCheckpoint(*set, Patterns());
    EXPECT_TRUE(checkpoint) << checkpoint.error().message;
    return *std::move(checkpoint);
  }

  void ExpectRefused(const std::string& path, Errc code, const std::string& word) const {
    const auto set = ScanAt(path);
    ASSERT_FALSE(set);
    EXPECT_EQ(set.error().code, code) << set.error().message;
    EXPECT_NE(set.error().message.find(word), std::string::npos) << set.error().message;
  }

  static Names FilesOf(const SourceSet& set) {
    Names names;
    for (const SourceFile& file : set.files) names.push_back(file.name);
    return names;
  }

  static Names ParamsOf(const Checkpoint& checkpoint) {
    Names names;
    for (const Param& param : checkpoint.params) names.push_back(param.name);
    return names;
  }

  static Notes WeightNotes(std::size_t groups) {
    Notes notes;
    notes.state = "weight";
    notes.groups.resize(groups);
    return notes;
  }
};

TEST_F(Safetensors, TheSingleFileComesBeforeTheIndex) {
  PutModel("m/model.safetensors", {{"a"}});
  PutModel("m/model-00001-of-00001.safetensors", {{"b"}});
  PutIndex("m/model.safetensors.index.json", {{"b", "model-00001-of-00001.safetensors"}});
  const auto set = ScanAt("m");
  ASSERT_TRUE(set) << set.error().message;
  EXPECT_EQ(FilesOf(*set), Names{"model.safetensors"});
  EXPECT_TRUE(set->manifest.empty());
  ASSERT_EQ(set->warnings.size(), 2U);
  EXPECT_NE(set->warnings[0].find("reading model.safetensors"), std::string::npos);
  EXPECT_NE(set->warnings[1].find("model-00001-of-00001.safetensors"), std::string::npos);
}

TEST_F(Safetensors, AnIndexSaysWhichFilesCount) {
  PutModel("m/one.safetensors", {{"a"}});
  PutModel("m/two.safetensors", {{"b"}});
  PutModel("m/old.safetensors", {{"c"}});
  PutIndex("m/x.safetensors.index.json", {{"a", "one.safetensors"}, {"b", "two.safetensors"}});
  const auto set = ScanAt("m");
  ASSERT_TRUE(set) << set.error().message;
  EXPECT_EQ(FilesOf(*set), (Names{"one.safetensors", "two.safetensors"}));
  EXPECT_FALSE(set->manifest.empty());
  ASSERT_EQ(set->warnings.size(), 1U);
  EXPECT_NE(set->warnings[0].find("old.safetensors"), std::string::npos);
  PutIndex("m/y.safetensors.index.json", {{"c", "old.safetensors"}});
  ExpectRefused("m", Errc::kUnsupported, "several sets");
  PutIndex("m/model.safetensors.index.json", {{"c", "old.safetensors"}});
  EXPECT_EQ(FilesOf(*ScanAt("m")), Names{"old.safetensors"});
}

TEST_F(Safetensors, WithoutAnIndexAllFilesCount) {
  PutModel("m/b.safetensors", {{"a"}});
  PutModel("m/a.safetensors", {{"b"}});
  EXPECT_EQ(FilesOf(*ScanAt("m")), (Names{"a.safetensors", "b.safetensors"}));
  EXPECT_EQ(ParamsOf(ReadAt("m")), (Names{"a", "b"}));
}

TEST_F(Safetensors, AFileIsACheckpointByItself) {
  PutModel("m/model.safetensors", {{"a"}});
  PutModel("m/other.v2.safetensors", {{"b"}});
  Put("m/config.json", "{}");
  auto set = ScanAt("m/other.v2.safetensors");
  ASSERT_TRUE(set) << set.error().message;
  EXPECT_EQ(set->format, "safetensors");
  EXPECT_EQ(set->tag, "other.v2");
  EXPECT_EQ(FilesOf(*set), Names{"other.v2.safetensors"});
  EXPECT_TRUE(set->warnings.empty());
  ASSERT_TRUE(FindSiblingFiles(&*set));
  EXPECT_TRUE(set->siblings.empty());
  EXPECT_EQ(ParamsOf(ReadAt("m/other.v2.safetensors")), Names{"b"});
  PutModel("...safetensors", {{"a"}});
  EXPECT_EQ(ScanAt("...safetensors")->tag, "...safetensors") << "it must be the name of a folder";
  const auto part = ScanPart({At("m/other.v2.safetensors"), At("absent.safetensors")}, "tag");
  ASSERT_TRUE(part) << part.error().message;
  EXPECT_EQ(FilesOf(*part), Names{"other.v2.safetensors"});
  EXPECT_EQ(part->tag, "tag");
}

TEST_F(Safetensors, AFileThatIsAPartIsNoCheckpoint) {
  const std::string word = ": a file, where a folder is expected";
  PutModel("m/model-00001-of-00002.safetensors", {{"a"}});
  PutIndex("m/model.safetensors.index.json", {{"a", "model-00001-of-00002.safetensors"}});
  Put("m/mp_rank_00_model_states.pt", "");
  for (const char* name : {"m/model-00001-of-00002.safetensors", "m/model.safetensors.index.json",
                           "m/mp_rank_00_model_states.pt"}) {
    ExpectRefused(name, Errc::kNotFound, At(name) + word);
    EXPECT_FALSE(ScanPart({At(name)}, "tag")) << name;
  }
  ExpectRefused("m/absent.safetensors", Errc::kNotFound, "absent.safetensors: no such file");
  ExpectRefused("m/absent", Errc::kNotFound, "absent: no such folder");
}

TEST_F(Safetensors, NotesTellOrderKindAndGroups) {
  Notes notes = WeightNotes(2);
  notes.groups[0].hyper.lr = 0.5;
  notes.groups[1].hyper.lr = 0.25;
  PutModel("m/model.safetensors",
           {{"a", {4, 0}},
            {"b", {3, 1}},
            {"c", {2, 0}},
            {"d", {1, TensorNote::kFrozen}},
            {"e", {0, TensorNote::kBuffer}}},
           {}, notes);
  const Checkpoint read = ReadAt("m");
  EXPECT_TRUE(read.warnings.empty());
  EXPECT_TRUE(read.order_unknown.empty());
  EXPECT_EQ(ParamsOf(read), (Names{"e", "d", "c", "b", "a"}));
  EXPECT_EQ(read.params[0].kind, ParamKind::kBuffer);
  EXPECT_EQ(read.params[1].kind, ParamKind::kFrozen);
  EXPECT_EQ(read.params[2].kind, ParamKind::kTrainable);
  ASSERT_EQ(read.groups.size(), 2U);
  EXPECT_EQ(read.groups[0].params, (std::vector<std::uint32_t>{2, 4}))
      << "in the order of the model, not of names";
  EXPECT_EQ(read.groups[1].params, std::vector<std::uint32_t>{3});
  EXPECT_EQ(read.groups[0].hyper.lr, 0.5);
  EXPECT_EQ(read.groups[1].hyper.lr, 0.25);
}

// A user adds or renames a tensor and keeps the metadata.
TEST_F(Safetensors, NotesOfOtherNamesAreVoid) {
  PutModel("m/model.safetensors", {{"a", {1, 0}}, {"b", {0, 0}}}, {}, WeightNotes(1));
  std::string bytes = Get("m/model.safetensors");
  const std::size_t at = bytes.find("\"b\":{");
  ASSERT_NE(at, std::string::npos);
  bytes[at + 1] = 'c';
  Put("changed/model.safetensors", bytes);
  EXPECT_EQ(ParamsOf(ReadAt("m")), (Names{"b", "a"}));
  const Checkpoint read = ReadAt("changed");
  EXPECT_EQ(ParamsOf(read), (Names{"a", "c"}));
  EXPECT_FALSE(read.order_unknown.empty());
  EXPECT_TRUE(read.groups.empty());
  ASSERT_EQ(read.warnings.size(), 1U);
  EXPECT_NE(read.warnings[0].find("describe other tensors than the file has"), std::string::npos);
}

TEST_F(Safetensors, NotesThatContradictEachOtherAreVoid) {
  const auto warned = [&](const std::string& path) {
    const Checkpoint read = ReadAt(path);
    EXPECT_FALSE(read.order_unknown.empty()) << path;
    return read.warnings.size() == 1 ? read.warnings[0] : "";
  };
  const std::string contradict = "contradict each other";
  PutModel("places/model.safetensors", {{"a", {0, 0}}, {"b", {0, 0}}}, {}, WeightNotes(1));
  EXPECT_NE(warned("places").find(contradict), std::string::npos);
  PutModel("numbers/model.safetensors", {{"ids", {0, 0}, DType::kI64}}, {}, WeightNotes(1));
  EXPECT_NE(warned("numbers").find(contradict), std::string::npos) << "integers are not trained";
  PutModel("some/a.safetensors", {{"a", {0, 0}}}, {}, WeightNotes(1));
  PutModel("some/b.safetensors", {{"b"}});
  EXPECT_NE(warned("some").find("only some files have notes"), std::string::npos);
  Notes later = WeightNotes(1);
  later.iteration = 7;
  PutModel("saves/a.safetensors", {{"a", {0, 0}}}, {}, WeightNotes(1));
  PutModel("saves/b.safetensors", {{"b", {1, 0}}}, {}, later);
  EXPECT_NE(warned("saves").find("belong to another save"), std::string::npos);
}

TEST_F(Safetensors, TiedNamesAreThoseOfTheNotes) {
  Notes notes = WeightNotes(1);
  notes.tied["head"] = {"emb", 2};
  PutModel("m/model.safetensors", {{"emb", {0, 0}}, {"norm", {1, 0}}}, {}, notes);
  const Checkpoint read = ReadAt("m");
  ASSERT_EQ(ParamsOf(read), (Names{"emb", "norm", "head"}));
  EXPECT_EQ(read.params[2].alias_of, "emb");
  EXPECT_EQ(read.params[2].shape, read.params[0].shape);
  EXPECT_EQ(read.map.tensors.size(), 2U);
  EXPECT_EQ(read.groups.at(0).params, (std::vector<std::uint32_t>{0, 1}));
}

TEST_F(Safetensors, TiedNamesAreThoseThatSaveModelDropped) {
  PutModel("m/model.safetensors", {{"emb"}, {"norm"}},
           {{"format", "pt"}, {"head", "emb"}, {"lost", "nobody"}, {"norm", "emb"}});
  const Checkpoint read = ReadAt("m");
  EXPECT_EQ(ParamsOf(read), (Names{"emb", "head", "norm"})) << "only of tensors that are not there";
  EXPECT_EQ(read.params[1].alias_of, "emb");
  EXPECT_TRUE(read.params[2].alias_of.empty());
}

// A rounded scale changes the weight that it belongs to.
TEST_F(Safetensors, ScalesOfQuantizedWeightsAreNeitherTrainedNorConverted) {
  PutModel("m/model.safetensors", {{"a.weight", {}, DType::kF8E4M3, {8, 8}},
                                   {"a.weight_scale_inv", {}, DType::kF32, {1, 1}},
                                   {"b.qweight", {}, DType::kI32, {1, 8}},
                                   {"b.scales", {}, DType::kF16, {1, 8}},
                                   {"n.scale", {}, DType::kF32, {8}},
                                   {"n.weight", {}, DType::kF32, {8}}});
  const Checkpoint read = ReadAt("m");
  Names trained;
  for (const Param& param : read.params) {
    if (param.kind == ParamKind::kTrainable) trained.push_back(param.name);
  }
  EXPECT_EQ(trained, (Names{"n.scale", "n.weight"}));
  ASSERT_EQ(read.warnings.size(), 1U);
  EXPECT_NE(read.warnings[0].find("2 tensors are scales"), std::string::npos) << read.warnings[0];
  const auto layout = Resolve({{{"dtype", "bf16"}}}, read);
  ASSERT_TRUE(layout) << layout.error().message;
  const auto written = Write(read, *layout);
  ASSERT_TRUE(written) << written.error().message;
  for (const layout::LogicalTensor& tensor : written->target.map.tensors) {
    const bool converted = tensor.name.starts_with("n.");
    const auto before = layout::TensorIndex(read.map).Find(tensor.name, tensor.state);
    ASSERT_TRUE(before.has_value()) << tensor.name;
    EXPECT_EQ(tensor.dtype, converted ? DType::kBF16 : read.map.tensors[*before].dtype)
        << tensor.name;
  }
}

// Frozen scales of a trainer's checkpoint, which notes name, are not converted either.
TEST_F(Safetensors, FrozenScalesKeepTheirType) {
  Notes notes = WeightNotes(1);
  PutModel("m/model.safetensors",
           {{"a.weight", {0, TensorNote::kFrozen}, DType::kF8E4M3, {8, 8}},
            {"a.weight_scale", {1, TensorNote::kFrozen}, DType::kF32, {8}},
            {"lora.weight", {2, 0}, DType::kF32, {8}}},
           {}, notes);
  const Checkpoint read = ReadAt("m");
  EXPECT_TRUE(read.order_unknown.empty()) << "notes are there";
  const auto layout = Resolve({{{"dtype", "bf16"}}}, read);
  ASSERT_TRUE(layout) << layout.error().message;
  const auto written = Write(read, *layout);
  ASSERT_TRUE(written) << written.error().message;
  for (const layout::LogicalTensor& tensor : written->target.map.tensors) {
    const DType expected = tensor.name == "a.weight"         ? DType::kF8E4M3
                           : tensor.name == "a.weight_scale" ? DType::kF32
                                                             : DType::kBF16;
    EXPECT_EQ(tensor.dtype, expected) << tensor.name;
  }
}

// Ranks of a node see one file, those of another node a copy. No checksum proves that it is a copy.
TEST_F(Safetensors, CopiesOnSeveralNodesAreComparedByTheirBytes) {
  PutModel("0/model.safetensors", {{"a"}});
  PutModel("1/model.safetensors", {{"a"}});
  PutModel("2/model.safetensors", {{"b"}});
  fs::last_write_time(At("1/model.safetensors"), fs::file_time_type::clock::now());
  const auto parts_of = [&](const Names& folders) {
    std::vector<SourceSet> parts;
    for (const std::string& folder : folders) {
      parts.push_back(*ScanSource({At(folder)}));
      parts.back().tag = "model";
    }
    return parts;
  };
  std::vector<SourceSet> parts = parts_of({"0", "0", "1"});
  const auto copies = CopiesToCompare(parts);
  ASSERT_TRUE(copies) << copies.error().message;
  ASSERT_EQ(copies->size(), 1U);
  ASSERT_EQ(copies->at(0).size(), 2U);
  EXPECT_EQ(copies->at(0)[0].seen.size(), 2U);
  EXPECT_EQ(copies->at(0)[1].seen.at(0).rank, 2U);
  std::vector<int> owner;
  EXPECT_FALSE(UniteParts(parts, &owner)) << "nobody has looked at the bytes";
  for (SourceSet& part : parts) part.files[0].digest = "x";
  owner.clear();
  const auto all = UniteParts(parts, &owner);
  ASSERT_TRUE(all) << all.error().message;
  EXPECT_TRUE(all->warnings.empty());
  EXPECT_EQ(owner, std::vector<int>{0});
  parts[2].files[0].digest = "y";
  const auto refused = UniteParts(parts, &owner);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kBadInput);
  EXPECT_NE(refused.error().message.find("model.safetensors on rank 0 ("), std::string::npos);
  EXPECT_TRUE(CopiesToCompare(parts_of({"0", "0"}))->empty()) << "one file";
  PutModel("2/model.safetensors", {{"longer", {}, DType::kF32, {999}}});
  EXPECT_TRUE(CopiesToCompare(parts_of({"0", "2"}))->empty()) << "their sizes differ";
}

}  // namespace
}  // namespace shardwright::checkpoints::safetensors
