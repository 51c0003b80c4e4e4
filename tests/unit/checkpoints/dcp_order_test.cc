// SPDX-License-Identifier: Apache-2.0
// The order of the model's parameters in folders of ranks that have saved different parts of it.
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "checkpoints/dcp/dcp.h"
#include "checkpoints/registry.h"
#include "files/dcp/index.h"
#include "fixtures.h"
#include "unit/support/os/scratch.h"

namespace shardwright::checkpoints::dcp {
namespace {

namespace file_format = shardwright::dcp;

/// The three parameters of a model in the order of its state dict, under other names.
using Renamed = std::map<std::string, std::string>;

class DcpOrder : public os::Scratch {
 protected:
  /// Saves flat_w2 with one index per rank, in which rank 1 has the given parameters and rank 0 all
  /// others. Returns Checkpoint::order_unknown.
  std::string OrderOf(const Renamed& names, const std::set<std::string>& of_rank_1) {
    const fs::path folder = At("ckpt");
    fs::remove_all(folder);
    fs::copy(fs::path(SW_SOURCE_DIR) / "tests/data/dcp/flat_w2/ckpt", folder);
    Result<file_format::Index> whole =
        file_format::ReadIndex(ReadFileText(folder / file_format::kIndexName));
    EXPECT_TRUE(whole) << whole.error().message;
    fs::remove(folder / file_format::kIndexName);
    file_format::Index ranks[2] = {*whole, *whole};
    for (file_format::Index& rank : ranks) rank.entries.clear();
    for (file_format::Entry& entry : whole->entries) {
      std::size_t rank = 0;
      for (const auto& [before, name] : names) {
        const std::size_t at = entry.name.find(before);
        if (at == std::string::npos) continue;
        entry.name.replace(at, before.size(), name);
        if (!entry.path.empty()) {
          entry.path.back().end = static_cast<std::uint32_t>(entry.name.size());
        }
        rank = of_rank_1.contains(name) ? 1 : 0;
      }
      ranks[rank].entries.push_back(std::move(entry));
    }
    for (int rank = 0; rank < 2; ++rank) {
      const Result<std::string> bytes = file_format::DumpIndex(ranks[rank]);
      EXPECT_TRUE(bytes) << bytes.error().message;
      std::ofstream(folder / ("__" + std::to_string(rank) + ".metadata"), std::ios::binary)
          << *bytes;
    }
    const Result<SourceSet> set = ScanSource({folder.string()});
    EXPECT_TRUE(set) << set.error().message;
    const Result<Checkpoint> checkpoint = ReadCheckpoint(*set, Patterns());
    EXPECT_TRUE(checkpoint) << checkpoint.error().message;
    return checkpoint ? checkpoint->order_unknown : "not read";
  }
  static Renamed Names(const char* first, const char* second, const char* third) {
    return {{"emb.weight", first}, {"up.weight", second}, {"up.bias", third}};
  }
};

constexpr const char* kUnknown =
    "the ranks that saved the DCP folder had different parts of the model, such as pipeline "
    "stages, and it records only the order within each part";

TEST_F(DcpOrder, OfConsecutiveStagesIsKnown) {
  const Renamed names = Names("layers.0.weight", "layers.1.weight", "layers.1.bias");
  EXPECT_EQ(OrderOf(names, {"layers.1.weight", "layers.1.bias"}), "");
  EXPECT_EQ(OrderOf(names, {"layers.1.bias"}), "");  // a block in two stages
}

TEST_F(DcpOrder, OfInterleavedStagesIsUnknown) {
  const Renamed names = Names("layers.0.weight", "layers.1.weight", "layers.2.weight");
  EXPECT_EQ(OrderOf(names, {"layers.1.weight"}), kUnknown);
  EXPECT_EQ(OrderOf(names, {"layers.0.weight"}), kUnknown);
}

TEST_F(DcpOrder, OfOtherModulesInStagesIsUnknown) {
  // The first rank has the first and the last stage, as in a V-shaped schedule.
  EXPECT_EQ(OrderOf(Names("emb.weight", "layers.0.weight", "norm.weight"), {"layers.0.weight"}),
            kUnknown);
  // A module in parts of two ranks, as experts of expert-parallel ranks with names of their own.
  EXPECT_EQ(OrderOf(Names("moe.a.weight", "other.weight", "moe.b.weight"), {"moe.b.weight"}),
            kUnknown);
}

TEST_F(DcpOrder, OfOneRankIsKnownUnlessAModuleIsInParts) {
  EXPECT_EQ(OrderOf(Names("layers.1.weight", "norm.weight", "layers.0.weight"), {}), kUnknown);
  EXPECT_EQ(OrderOf(Names("layers.1.weight", "layers.0.weight", "norm.weight"), {}), "");
}

}  // namespace
}  // namespace shardwright::checkpoints::dcp
