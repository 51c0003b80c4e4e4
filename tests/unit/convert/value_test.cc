// SPDX-License-Identifier: Apache-2.0
#include "convert/element_text.h"

#include <gtest/gtest.h>

#include <cstring>

namespace shardwright::convert {
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

checkpoints::Scalar Step(float value) {
  checkpoints::Scalar scalar;
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

TEST(Differences, OfScalarsAreInEveryByte) {
  checkpoints::Scalar two;
  two.state = "pair";
  two.is_tensor = true;
  two.bytes = std::string(8, 'a');
  checkpoints::Scalar other = two;
  EXPECT_EQ(ScalarDifferences({two}, {other}), Lines{});
  other.bytes.back() = 'b';
  EXPECT_EQ(ScalarDifferences({two}, {other}),
            (Lines{"pair: tensor float32 of 8 bytes 6161616161616161 and tensor float32 of 8 bytes "
                   "6161616161616162"}));
  checkpoints::Scalar half = Step(0);
  half.dtype = DType::kF16;
  half.bytes.resize(2);
  checkpoints::Scalar brain = half;
  brain.dtype = DType::kBF16;
  EXPECT_EQ(ScalarDifferences({half}, {brain}), Lines{}) << "zeros of two types are one number";
}

// Steps are compared by parameter, wherever the optimizer keeps them.
TEST(Differences, OfGroupsAreNotInAStepThatOneKeeps) {
  pickle::Arena arena;
  pickle::Node* with = arena.Dict();
  pickle::Set(arena, with, "lr", arena.Float(0.1));
  pickle::Node* without = pickle::CopyDict(arena, with);
  pickle::Set(arena, with, "step", arena.Int(4));
  checkpoints::Group a;
  a.options = with;
  checkpoints::Group b;
  b.options = without;
  EXPECT_EQ(GroupDifferences(a, b), Lines{});
  EXPECT_EQ(GroupDifferences(b, a), Lines{});
  pickle::Node* other = pickle::CopyDict(arena, without);
  pickle::Set(arena, other, "step", arena.Float(4.0));
  b.options = other;
  EXPECT_EQ(GroupDifferences(a, b), Lines{}) << "4 is 4.0";
}

// Optimizers keep a step as a plain number or as a tensor of some type.
TEST(Differences, OfNumbersAreInTheirValues) {
  pickle::Arena arena;
  checkpoints::Scalar plain;
  plain.state = "step";
  plain.value = arena.Int(4);
  EXPECT_EQ(ScalarDifferences({plain}, {Step(4)}), Lines{});
  EXPECT_EQ(ScalarDifferences({Step(4)}, {plain}), Lines{});
  EXPECT_EQ(ScalarDifferences({plain}, {Step(5)}), (Lines{"step: 4 and 5 (0x40a00000)"}));
  checkpoints::Scalar count = Step(4);
  const std::int64_t four = 4;
  count.dtype = DType::kI64;
  count.bytes.assign(reinterpret_cast<const char*>(&four), sizeof four);
  EXPECT_EQ(ScalarDifferences({count}, {Step(4)}), Lines{});
}

TEST(Differences, OfContainersAreInWhatTheyHold) {
  pickle::Arena arena;
  const auto nested = [&](double decay, bool turned) {
    pickle::Node* dict = arena.Dict();
    const auto put = [&](bool first) {
      if (first) {
        pickle::Set(arena, dict, "decay", arena.Float(decay));
      } else {
        pickle::Set(arena, dict, "kind", arena.String("cosine"));
      }
    };
    put(!turned);
    put(turned);
    checkpoints::Scalar scalar;
    scalar.state = "schedule";
    scalar.value = arena.List({dict, arena.Int(3)});
    return scalar;
  };
  EXPECT_EQ(ScalarDifferences({nested(0.1, false)}, {nested(0.1, true)}), Lines{});
  EXPECT_EQ(ScalarDifferences({nested(0.1, false)}, {nested(0.2, false)}).size(), 1U);
  const auto group = [&](double decay) {
    pickle::Node* options = arena.Dict();
    pickle::Set(arena, options, "schedule", nested(decay, false).value);
    checkpoints::Group made;
    made.options = options;
    return made;
  };
  EXPECT_EQ(GroupDifferences(group(0.1), group(0.1)), Lines{});
  EXPECT_EQ(GroupDifferences(group(0.1), group(0.2)).size(), 1U);
  EXPECT_EQ(GroupDifferences(group(0.1), group(0.2), false).size(), 1U) << "of two formats as well";
}

checkpoints::Group Group(pickle::Arena& arena, double lr, const std::string& name, bool moe) {
  pickle::Node* options = arena.Dict();
  pickle::Set(arena, options, "lr", arena.Float(lr));
  pickle::Set(arena, options, "name", arena.String(name));
  pickle::Set(arena, options, "params",
              arena.List({arena.Int(static_cast<std::int64_t>(lr * 10))}));
  checkpoints::Group group;
  group.options = options;
  group.moe = moe;
  return group;
}

/// A group with one option besides the learning rate.
checkpoints::Group With(pickle::Arena& arena, const std::string& key, const pickle::Node* value) {
  pickle::Node* options = arena.Dict();
  pickle::Set(arena, options, "lr", arena.Float(0.5));
  pickle::Set(arena, options, key, value);
  checkpoints::Group group;
  group.options = options;
  return group;
}

TEST(Differences, OfGroupsAreThoseOfTheTraining) {
  pickle::Arena arena;
  const checkpoints::Group one = Group(arena, 0.5, "a", false);
  EXPECT_EQ(GroupDifferences(one, one), Lines{});
  EXPECT_EQ(GroupDifferences(one, Group(arena, 0.25, "b", false)),
            (Lines{"lr: 0.5 and 0.25", "name: 'a' and 'b'"}))
      << "parameters are numbered anew in every layout";
  EXPECT_EQ(
      GroupDifferences(Group(arena, 0.5, "ep_size_2", true), Group(arena, 0.5, "ep_size_4", true)),
      Lines{})
      << "the name of an expert group holds the size of its layout";
}

TEST(Differences, OfSpellingAreNone) {
  pickle::Arena arena;
  const auto pair = [&](bool tuple, double second) {
    const std::vector<const pickle::Node*> items{arena.Float(0.9), arena.Float(second)};
    return With(arena, "betas", tuple ? arena.Tuple(items) : arena.List(items));
  };
  EXPECT_EQ(GroupDifferences(pair(true, 0.5), pair(false, 0.5)), Lines{});
  EXPECT_EQ(GroupDifferences(pair(true, 0.5), pair(false, 0.25)),
            Lines{"betas: [0.9, 0.5] and [0.9, 0.25]"});
  const auto step = [&](const pickle::Node* value) { return With(arena, "step", value); };
  EXPECT_EQ(GroupDifferences(step(arena.Int(4)), step(arena.Float(4))), Lines{});
  EXPECT_EQ(GroupDifferences(step(arena.Int(1)), step(arena.Bool(true))), Lines{});
  EXPECT_EQ(GroupDifferences(step(arena.Int(4)), step(arena.String("4"))),
            Lines{"step: 4 and '4'"});
  const std::int64_t large = std::int64_t{1} << 53;
  EXPECT_EQ(GroupDifferences(step(arena.Int(large)), step(arena.Int(large + 1))).size(), 1U);
  const auto corrects = [&](bool on) { return With(arena, "bias_correction", arena.Bool(on)); };
  const auto began = [&](double lr) { return With(arena, "initial_lr", arena.Float(lr)); };
  EXPECT_EQ(GroupDifferences(corrects(true), Group(arena, 0.5, "a", false)), Lines{});
  EXPECT_EQ(GroupDifferences(Group(arena, 0.5, "a", false), corrects(false)),
            Lines{"bias_correction: nothing and False"});
  EXPECT_EQ(GroupDifferences(began(0.5), Group(arena, 0.5, "a", false)), Lines{});
  EXPECT_EQ(GroupDifferences(began(0.25), Group(arena, 0.5, "a", false)),
            Lines{"initial_lr: 0.25 and nothing"});
  EXPECT_EQ(GroupDifferences(step(arena.None()), Group(arena, 0.5, "a", false)),
            (Lines{"step: None and nothing"}));
}

// Weight files record a group's hyper-parameters but have no options of a trainer.
TEST(Differences, OfGroupsWithoutOptionsAreWhatBothCanSay) {
  pickle::Arena arena;
  checkpoints::Group typed;
  EXPECT_EQ(GroupDifferences(typed, Group(arena, 0.5, "a", false)), Lines{});
  typed.hyper.lr = 0.5;
  typed.hyper.momentum = 0.1;
  EXPECT_EQ(GroupDifferences(typed, Group(arena, 0.5, "a", false)), Lines{});
  EXPECT_EQ(GroupDifferences(Group(arena, 0.25, "a", false), typed), Lines{"lr: 0.25 and 0.5"});
  typed.hyper.betas = {0.9, 0.5};
  EXPECT_EQ(
      GroupDifferences(typed, With(arena, "betas", arena.List({arena.Float(0.9), arena.Float(1)}))),
      Lines{"betas: [0.9, 0.5] and [0.9, 1]"});
}

// As a hostile file may have them: a list that has one list twice, which has one list twice,
// and so on. Without memoization, a walk over 400 of them visits 2^400 elements.
TEST(Differences, OfListsThatHangInManyPlacesAreFoundAtOnce) {
  pickle::Arena arena;
  const auto nested = [&](std::int64_t leaf, bool in_dicts) {
    const pickle::Node* node = arena.List({arena.Int(0), arena.Int(leaf)});
    for (int i = 0; i < 400; ++i) {
      pickle::Node* dict = arena.Dict();
      pickle::Set(arena, dict, "one", node);
      pickle::Set(arena, dict, "other", node);
      node = in_dicts ? dict : arena.List({node, node});
    }
    return With(arena, "betas", node);
  };
  for (const bool in_dicts : {false, true}) {
    EXPECT_EQ(GroupDifferences(nested(1, in_dicts), nested(1, in_dicts)), Lines{});
    const Lines lines = GroupDifferences(nested(1, in_dicts), nested(2, in_dicts));
    ASSERT_EQ(lines.size(), 1U);
    EXPECT_LT(lines[0].size(), 4000U);
  }
}

TEST(Differences, OfDictsDoNotDependOnTheOrderOfTheirEntries) {
  pickle::Arena arena;
  const auto dict = [&](std::string_view first, double one, std::string_view second, double other) {
    pickle::Node* node = arena.Dict();
    pickle::Set(arena, node, first, arena.Float(one));
    pickle::Set(arena, node, second, arena.Float(other));
    return With(arena, "betas", node);
  };
  EXPECT_EQ(GroupDifferences(dict("a", 1, "b", 2), dict("b", 2, "a", 1)), Lines{});
  EXPECT_EQ(GroupDifferences(dict("a", 1, "b", 2), dict("b", 2, "a", 3)).size(), 1U);
}

}  // namespace
}  // namespace shardwright::convert
