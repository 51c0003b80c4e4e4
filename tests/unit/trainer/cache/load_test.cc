// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "checkpoints/registry.h"
#include "convert/input.h"
#include "engine/device/device.h"
#include "support/base/sink.h"
#include "support/comm/comm.h"
#include "trainer/cache/cache.h"

namespace shardwright::cache {
namespace {

class Heard final : public NullSink {
 public:
  void Warn(std::string message) override { warnings.push_back(std::move(message)); }
  std::vector<std::string> warnings;
};

TEST(CacheLoad, PassesOnTheWarningsOfTheWriter) {
  const auto deepspeed = checkpoints::RequireFormat("deepspeed");
  ASSERT_TRUE(deepspeed);
  checkpoints::Format format = **deepspeed;
  format.write = [](const checkpoints::Checkpoint& from,
                    const checkpoints::Layout& layout) -> Result<checkpoints::Written> {
    SW_TRY_ASSIGN(const checkpoints::Format* const row, checkpoints::RequireFormat("deepspeed"));
    SW_TRY_ASSIGN(checkpoints::Written written, row->write(from, layout));
    written.warnings.emplace_back("these files do not train");
    return written;
  };
  const auto comm = comm::MakeSerialComm();
  Heard sink;
  convert::InputOptions options;
  options.source_paths = {std::filesystem::path(SW_SOURCE_DIR) /
                          "tests/data/deepspeed/zero1_w2/ckpt"};
  const auto input = convert::OpenInput(*comm, options, sink);
  ASSERT_TRUE(input) << input.error().message;
  const auto spec = checkpoints::ParseTarget(format, "zero=2,dp=1");
  ASSERT_TRUE(spec) << spec.error().message;
  const auto device = device::OpenDevice(device::Kind::kHost, *comm);
  ASSERT_TRUE(device) << device.error().message;
  sink.warnings.clear();
  const auto loaded = Load(*comm, **device, **input, *spec, format, {}, sink);
  ASSERT_TRUE(loaded) << loaded.error().message;
  EXPECT_EQ(sink.warnings, std::vector<std::string>{"these files do not train"});
}

}  // namespace
}  // namespace shardwright::cache
