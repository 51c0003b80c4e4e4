#include "ucp/value.h"

#include <gtest/gtest.h>

#include <cstring>

namespace shardwright::ucp {
namespace {

using Lines = std::vector<std::string>;

template <class T>
std::string Element(DType dtype, T value) {
  return ElementText(dtype, std::as_bytes(std::span(&value, 1)));
}

TEST(Values, OfElementsAreNumbersAndBits) {
  EXPECT_EQ(Element(DType::kF32, 0.0125F), "0.012500000186264515 (0x3c4ccccd)");
  EXPECT_EQ(Element(DType::kF32, -2.0F), "-2 (0xc0000000)");
  EXPECT_EQ(Element(DType::kBF16, std::uint16_t{0x3F80}), "1 (0x3f80)");
  EXPECT_EQ(Element(DType::kF64, 0.1), "0.1 (0x3fb999999999999a)");
  EXPECT_EQ(Element(DType::kI32, std::int32_t{17}), "0x00000011");
}

TEST(Values, OfObjectsAreWrittenAsPythonDoes) {
  pickle::Arena arena;
  EXPECT_EQ(ValueText(nullptr), "nothing");
  EXPECT_EQ(ValueText(arena.Int(-3)), "-3");
  EXPECT_EQ(ValueText(arena.Float(0.1)), "0.1");
  EXPECT_EQ(ValueText(arena.Float(0.1 + 0.2)), "0.30000000000000004");
  EXPECT_EQ(ValueText(arena.String("decay")), "'decay'");
  EXPECT_EQ(ValueText(arena.List({arena.Float(0.9), arena.Int(1)})), "[0.9, 1]");
  EXPECT_EQ(ValueText(arena.List({})), "[]");
}

dialect::Scalar Step(float value) {
  dialect::Scalar scalar;
  scalar.state = "step";
  scalar.is_tensor = true;
  scalar.bytes.resize(sizeof value);
  std::memcpy(scalar.bytes.data(), &value, sizeof value);
  return scalar;
}

TEST(Differences, OfScalarsNameTheStateAndBothSides) {
  EXPECT_EQ(ScalarDifferences({Step(4)}, {Step(4)}), Lines{});
  EXPECT_EQ(ScalarDifferences({Step(4)}, {Step(5)}),
            (Lines{"step: 4 (0x40800000) and 5 (0x40a00000)"}));
  EXPECT_EQ(ScalarDifferences({}, {Step(5)}), (Lines{"step: nothing and 5 (0x40a00000)"}));
}

pickle::Node* Group(pickle::Arena& arena, double lr, const std::string& name, bool moe) {
  pickle::Node* group = arena.Dict();
  pickle::Set(arena, group, "lr", arena.Float(lr));
  pickle::Set(arena, group, "name", arena.String(name));
  pickle::Set(arena, group, "params", arena.List({arena.Int(static_cast<std::int64_t>(lr * 10))}));
  if (moe) pickle::Set(arena, group, "moe", arena.Int(1));
  return group;
}

TEST(Differences, OfOptionsAreThoseOfTheTraining) {
  pickle::Arena arena;
  const pickle::Node* one = Group(arena, 0.5, "a", false);
  EXPECT_EQ(OptionDifferences(one, one), Lines{});
  EXPECT_EQ(OptionDifferences(one, Group(arena, 0.25, "b", false)),
            (Lines{"lr: 0.5 and 0.25", "name: 'a' and 'b'"}))
      << "parameters are numbered anew in every layout";
  EXPECT_EQ(
      OptionDifferences(Group(arena, 0.5, "ep_size_2", true), Group(arena, 0.5, "ep_size_4", true)),
      Lines{})
      << "the name of an expert group holds the size of its layout";
  EXPECT_EQ(OptionDifferences(nullptr, one), Lines{});
}

}  // namespace
}  // namespace shardwright::ucp
