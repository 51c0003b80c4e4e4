// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "checkpoints/registry.h"
#include "engine/tensor/convert.h"
#include "files/torch_pt/reader.h"
#include "support/os/file.h"

namespace shardwright::checkpoints {

namespace fs = std::filesystem;

/// Folder of the checkpoints that the project carries, made by tests/data/train.py.
inline fs::path OwnCheckpoints() { return fs::path(SW_SOURCE_DIR) / "tests/data/deepspeed"; }

/// Returns the paths of additional checkpoints, in the same form as the project's, by these names.
/// Their folder is $SHARDWRIGHT_SHARED or ../shared; without it the result is empty.
inline std::vector<fs::path> SharedCheckpoints(const std::vector<std::string>& names) {
  const char* given = std::getenv("SHARDWRIGHT_SHARED");
  const fs::path shared =
      given != nullptr ? fs::path(given) : fs::path(SW_SOURCE_DIR) / ".." / "shared";
  const fs::path cases = shared / "fixtures" / "deepspeed";
  std::vector<fs::path> out;
  if (!fs::is_directory(cases)) return out;
  for (const std::string& name : names) out.push_back(cases / name);
  return out;
}

/// Checkpoints of the project, as whole paths.
inline std::vector<fs::path> OwnCheckpoints(const std::vector<std::string>& names) {
  std::vector<fs::path> out;
  out.reserve(names.size());
  for (const std::string& name : names) out.push_back(OwnCheckpoints() / name);
  return out;
}

/// A name that a test may have.
inline std::string TestName(std::string name) {
  for (char& c : name) {
    if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
  }
  return name;
}

inline std::string ReadFileText(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

/// Tensors of a safetensors file, as stored.
struct Expected {
  struct Tensor {
    std::string dtype;
    Shape shape;
    std::string bytes;
  };
  std::map<std::string, Tensor> tensors;

  static Expected Read(const fs::path& path) {
    const std::string text = ReadFileText(path);
    std::uint64_t header = 0;
    std::memcpy(&header, text.data(), sizeof(header));
    const auto json = nlohmann::json::parse(text.substr(8, header));
    Expected out;
    for (const auto& [name, entry] : json.items()) {
      if (name == "__metadata__") continue;
      const auto first = entry["data_offsets"][0].get<std::size_t>();
      const auto last = entry["data_offsets"][1].get<std::size_t>();
      out.tensors[name] = {entry["dtype"], entry["shape"].get<Shape>(),
                           text.substr(8 + header + first, last - first)};
    }
    return out;
  }
};

/// Gathers logical tensors by the map alone: a simple, slow version of the engine.
class Gatherer {
 public:
  explicit Gatherer(const layout::ShardMap& map) : map_(map) {}

  /// Bytes of a fragment's shard, as stored.
  std::string Shard(const layout::LogicalTensor& tensor, const layout::Fragment& fragment) {
    const std::uint64_t item = ItemSize(tensor.dtype);
    const layout::Array& array = map_.arrays[fragment.at.array];
    std::string out;
    for (std::uint64_t x = 0; x < fragment.cut->shard_elems(); ++x) {
      const std::uint64_t v = x + fragment.at.vector_offset;
      const std::uint64_t holder = v / fragment.at.chunk;
      const std::uint64_t element = fragment.at.region_offset + v % fragment.at.chunk;
      const layout::Region& region = array.regions.at(holder);
      EXPECT_LT(element, region.elems);
      const layout::Member& member = map_.members[region.member];
      const std::string& file = File(member.file);
      out += file.substr(member.offset + region.offset + element * item, item);
    }
    return out;
  }

  /// The whole tensor as float32, or in its stored type if that is not a float. Compares replicas.
  std::string Whole(const layout::LogicalTensor& tensor) {
    const std::uint64_t item = ItemSize(tensor.dtype);
    std::string out(Elems(tensor.shape) * item, '\0');
    std::vector<bool> seen(Elems(tensor.shape));
    for (const layout::Fragment& fragment : tensor.fragments) {
      EXPECT_NE(fragment.role, layout::Role::kPartial);
      const std::string shard = Shard(tensor, fragment);
      const bool replica = fragment.role == layout::Role::kReplica;
      fragment.cut->ForLogicalRange(0, seen.size(), [&](const layout::Run& run) {
        for (std::uint64_t i = 0; i < run.elems; ++i) {
          const std::uint64_t to = run.logical + i;
          const std::string_view value =
              std::string_view(shard).substr((run.shard + i) * item, item);
          if (replica) {
            EXPECT_EQ(std::string_view(out).substr(to * item, item), value) << tensor.name;
          } else {
            EXPECT_FALSE(seen[to]) << tensor.name;
          }
          std::memcpy(out.data() + to * item, value.data(), item);
          seen[to] = true;
        }
      });
    }
    for (const bool covered : seen) EXPECT_TRUE(covered) << tensor.name;
    if (!CanConvert(tensor.dtype, DType::kF32)) return out;
    std::string floats(Elems(tensor.shape) * sizeof(float), '\0');
    Convert(tensor.dtype, std::as_bytes(std::span(out)), DType::kF32,
            std::as_writable_bytes(std::span(floats)));
    return floats;
  }

 private:
  const std::string& File(std::uint32_t file) {
    auto& text = files_[file];
    if (text.empty()) text = ReadFileText(map_.files[file]);
    return text;
  }

  const layout::ShardMap& map_;
  std::map<std::uint32_t, std::string> files_;
};

/// Expects that the tensors of the checkpoint equal the trainer's, and that none is missing. Only
/// Weights are compared only if the checkpoint stores them.
/// \param frozen  true if the checkpoint contains frozen parameters
inline void ExpectTensors(const Checkpoint& checkpoint, const Expected& expected,
                          bool frozen = true) {
  Gatherer gatherer(checkpoint.map);
  std::set<std::string> found;
  for (const layout::LogicalTensor& tensor : checkpoint.map.tensors) {
    const bool weight = tensor.state == "weight";
    const std::string key = tensor.name + (weight ? "/computed" : "/" + tensor.state);
    const auto at = expected.tensors.find(key);
    if (weight && at == expected.tensors.end()) continue;  // some scripts record masters only
    ASSERT_NE(at, expected.tensors.end()) << key << " is not in the model";
    EXPECT_EQ(tensor.shape, at->second.shape) << key;
    EXPECT_TRUE(gatherer.Whole(tensor) == at->second.bytes) << key << " differs";
    found.insert(key);
  }
  for (const Param& param : checkpoint.params) {
    if (param.alias_of.empty()) continue;
    const std::string key = param.name + "/alias_of";
    ASSERT_TRUE(expected.tensors.contains(key)) << key;
    EXPECT_EQ(expected.tensors.at(key).bytes, param.alias_of);
    found.insert(key);
  }
  for (const auto& [key, tensor] : expected.tensors) {
    if (key.ends_with("/computed")) continue;
    const bool wanted = frozen || !key.ends_with("/frozen");
    EXPECT_EQ(found.contains(key), wanted) << key << (wanted ? " was not found" : " was found");
  }
}

/// Returns the document of a torch.save file, which must be readable.
inline torch_pt::Document ParsedFile(const std::filesystem::path& path) {
  auto file = os::File::OpenRead(path.string());
  EXPECT_TRUE(file.has_value());
  auto metadata = torch_pt::ReadMetadata(*file);
  EXPECT_TRUE(metadata.has_value());
  auto document = torch_pt::Parse(*metadata);
  EXPECT_TRUE(document.has_value());
  return *std::move(document);
}

}  // namespace shardwright::checkpoints
