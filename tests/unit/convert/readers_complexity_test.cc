// SPDX-License-Identifier: Apache-2.0
// Readers of checkpoints, and of catalogues, take time in proportion to the number of tensors.

#include <string>

#include "checkpoints/tp_rules/patterns.h"
#include "unit/checkpoints/tiny_checkpoint.h"
#include "unit/checkpoints/tiny_megatron.h"
#include "unit/complexity.h"
#include "unit/convert/opened.h"

namespace shardwright::convert {
namespace {

struct Target {
  const char* format;
  const char* target;
  std::size_t tensors;
};

class Readers : public os::Scratch, public ::testing::WithParamInterface<Target> {
 protected:
  /// Returns the folder of a checkpoint of `n` parameters in the format of the test.
  std::string Make(std::size_t n) {
    const std::string number = std::to_string(n);
    ConvertOptions options;
    options.output = At("to" + number);
    if (fs::exists(options.output)) return options.output;
    checkpoints::TinyZero tiny;
    tiny.params.clear();
    for (std::size_t i = 0; i < n; ++i) tiny.params.push_back({"l." + Digits(i) + ".w", {2, 3}, 0});
    tiny.groups = 1;
    tiny.Write(At("from" + number));
    const auto input = Opened(At("from" + number));
    const auto report = Converted(*input, GetParam().target, options, GetParam().format);
    EXPECT_TRUE(report) << report.error().message;
    return options.output;
  }
};

const auto kRead = [](const std::string& folder) {
  const auto source = checkpoints::ScanSource({folder});
  ASSERT_TRUE(source) << source.error().message;
  const auto checkpoint = checkpoints::ReadCheckpoint(*source, checkpoints::Patterns());
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
};

const auto kReadCatalogue = [](const std::string& bytes) {
  const auto source = checkpoints::DeserializeSource(bytes);
  ASSERT_TRUE(source) << source.error().message;
};

/// The catalogue of a folder.
std::string CatalogueOf(const std::string& folder) {
  const auto source = checkpoints::ScanSource({folder});
  EXPECT_TRUE(source) << source.error().message;
  return source ? checkpoints::Serialize(*source) : std::string();
}

TEST_P(Readers, TakeTimeInProportionToTheTensors) {
  ExpectLinear(
      GetParam().tensors, [&](std::size_t n) { return Make(n); }, kRead);
  ExpectLinear(
      GetParam().tensors, [&](std::size_t n) { return CatalogueOf(Make(n)); }, kReadCatalogue);
}

INSTANTIATE_TEST_SUITE_P(
    Formats, Readers,
    testing::Values(Target{"deepspeed", "zero=2,dp=2", 300},
                    Target{"deepspeed", "zero=3,dp=2", 300}, Target{"universal", "", 100},
                    Target{"dcp", "dp_shard=2", 150}, Target{"dtensor", "dp_shard=2", 150},
                    Target{"safetensors", "", 500}),
    [](const auto& one) { return std::string(one.param.format) + std::to_string(one.index); });

class MegatronReader : public os::Scratch {};

TEST_F(MegatronReader, TakesTimeInProportionToTheLayers) {
  const auto make = [&](std::size_t n) {
    const checkpoints::TinyMegatron one;
    checkpoints::TinyMegatron tiny;
    tiny.args["num_layers"] = static_cast<std::int64_t>(n);
    tiny.optimizer_ids = {0};
    tiny.vector_ids.clear();
    tiny.names = {one.names.front()};
    for (std::size_t layer = 0; layer < n; ++layer) {
      for (std::string name : std::vector(one.names.begin() + 1, one.names.end())) {
        const Shape shape = one.shapes.at(name);
        name.replace(name.find(".0."), 3, "." + std::to_string(layer) + ".");
        tiny.shapes[name] = shape;
        tiny.names.push_back(name);
        if (shape.size() > 1) tiny.optimizer_ids.push_back(tiny.optimizer_ids.size());
      }
    }
    for (std::size_t i = tiny.optimizer_ids.size(); i < tiny.names.size(); ++i) {
      tiny.vector_ids.push_back(i);
    }
    std::string folder = At("layers" + std::to_string(n));
    tiny.Write(folder);
    return folder;
  };
  ExpectLinear(50, make, kRead);
}

}  // namespace
}  // namespace shardwright::convert
