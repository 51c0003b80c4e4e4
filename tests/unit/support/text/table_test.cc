// SPDX-License-Identifier: Apache-2.0
#include "support/text/table.h"

#include <gtest/gtest.h>

#include <sstream>

#include "support/text/text.h"

namespace shardwright::text {
namespace {

Table Small() {
  Table table({{"NAME", Table::Align::kLeft, true},
               {"BYTES", Table::Align::kRight, false},
               {"DTYPE", Table::Align::kLeft, false}});
  table.AddRow({"model.embed.weight", "4096", "f32"});
  table.AddRow({"b", "12", "bf16"});
  return table;
}

TEST(Table, AlignsColumnsWithoutTrailingSpaces) {
  EXPECT_EQ(Small().Render(0),
            "NAME                BYTES  DTYPE\n"
            "model.embed.weight   4096  f32\n"
            "b                      12  bf16\n");
}

TEST(Table, CutsOnlyShrinkingColumnsOnATerminal) {
  EXPECT_EQ(Small().Render(26),
            "NAME          BYTES  DTYPE\n"
            "model.embed…   4096  f32\n"
            "b                12  bf16\n");
}

TEST(Table, NeverCutsBelowWhatCanBeRead) {
  const std::string text = Small().Render(5);
  EXPECT_NE(text.find("model.e…"), std::string::npos) << text;
  EXPECT_NE(text.find("4096"), std::string::npos) << text;
}

TEST(Table, FitsTheWidthItIsGiven) {
  Table table({{"A", Table::Align::kLeft, true}, {"B", Table::Align::kLeft, true}});
  table.AddRow({std::string(300, 'a'), std::string(200, 'b')});
  std::istringstream lines(table.Render(100));
  for (std::string line; std::getline(lines, line);) EXPECT_LE(DisplayWidth(line), 100U);
  EXPECT_EQ(table.row_count(), 1U);
}

TEST(Table, EscapesControlCharacters) {
  Table table({{"NAME", Table::Align::kLeft, false}});
  table.AddRow({"a\nb"});
  EXPECT_EQ(table.Render(0), "NAME\na\\x0ab\n");
}

TEST(Table, LegendsFitAHundredColumns) {
  EXPECT_EQ(Legend("A: first."), "\nA: first.\n");
  std::string meaning;
  for (int i = 0; i < 60; ++i) meaning += "A: first. ";
  std::istringstream lines(Legend(meaning));
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 98U);
}

}  // namespace
}  // namespace shardwright::text
