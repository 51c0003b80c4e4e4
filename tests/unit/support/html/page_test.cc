// SPDX-License-Identifier: Apache-2.0
#include "support/html/page.h"

#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "support/html/chart.h"
#include "support/html/timeline.h"
#include "unit/support/html/count.h"

namespace shardwright::html {
namespace {

bool Has(const std::string& text, const std::string& part) { return Count(text, part) > 0; }

Chart OneCurve(std::vector<Point> points) {
  Chart chart;
  chart.label = "a chart";
  chart.curves = {{"first", 0, std::move(points), true, false}};
  return chart;
}

TEST(Page, TextIsNoMarkup) {
  EXPECT_EQ(Escape("b\u202etxt.exe"), "b\\xe2\\x80\\xaetxt.exe");
  EXPECT_EQ(Escape("<b a=\"1\" c='2'>&amp;\u00e9"),
            "&lt;b a=&quot;1&quot; c=&#39;2&#39;&gt;&amp;amp;\u00e9");
  EXPECT_EQ(ScriptSafe("{\"a\":\"</script>\"}"), "{\"a\":\"\\u003c/script>\"}");
}

TEST(Page, RunsScriptsOnlyWhereItHasOne) {
  const std::string still = Render({"a & b", ".x {}", "<main/>\n", ""});
  EXPECT_TRUE(Has(still, "<title>a &amp; b</title>"));
  EXPECT_TRUE(Has(still, "default-src 'none'"));
  EXPECT_FALSE(Has(still, "script"));
  EXPECT_TRUE(Has(Render({"t", "", "", "go();"}), "script-src 'unsafe-inline'"));
}

TEST(Chart, TicksAreRoundAndReachTheTop) {
  Chart chart = OneCurve({{1, 0.6 * 1024 * 1024 * 1024, "<x>"}, {2, 2.3 * 1024 * 1024 * 1024, ""}});
  chart.by_doubling = true;
  chart.y_unit = Unit::kBytes;
  const std::string text = ChartMarkup(chart);
  EXPECT_TRUE(Has(text, ">GiB<"));
  for (const char* tick : {">0.0<", ">0.5<", ">1.0<", ">1.5<", ">2.0<", ">2.5<"}) {
    EXPECT_EQ(Count(text, tick), 1U) << tick;
  }
  EXPECT_FALSE(Has(text, ">3.0<"));
  EXPECT_TRUE(Has(text, "&lt;x&gt;"));
}

TEST(Chart, SharesArePercentAndTheLimitIsInSight) {
  Chart chart = OneCurve({{0, 0.001, ""}, {10, 0.004, ""}});
  chart.y_unit = Unit::kShare;
  chart.limit = 0.0375;
  chart.limit_name = "limit 3.75 %";
  const std::string text = ChartMarkup(chart);
  EXPECT_TRUE(Has(text, ">4<"));
  EXPECT_TRUE(Has(text, ">limit 3.75 %</text>"));
}

TEST(Chart, DoublingsAreEqualSteps) {
  Chart chart = OneCurve({{1, 1, ""}, {2, 1, ""}, {4, 1, ""}, {8, 1, ""}});
  chart.by_doubling = true;
  const std::string text = ChartMarkup(chart);
  std::vector<double> xs;
  const std::string key = "<circle cx=\"";
  const std::string drawing = text.substr(text.find("class=\"curves\""));
  for (std::size_t at = drawing.find(key); at != std::string::npos;
       at = drawing.find(key, at + 1)) {
    xs.push_back(std::stod(drawing.substr(at + key.size())));
  }
  ASSERT_EQ(xs.size(), 4U);
  EXPECT_NEAR(xs[1] - xs[0], xs[3] - xs[2], 0.2);
  EXPECT_GT(xs[1], xs[0]);
}

TEST(Chart, CurvesThatWouldHideEachOtherShareALine) {
  Chart chart = OneCurve({{1, 5, ""}, {2, 6, ""}});
  chart.curves.push_back({"second", 1, chart.curves[0].points, true, false});
  chart.curves.push_back({"third", 2, {{1, 5, ""}, {2, 7, ""}}, true, false});
  chart.curves.push_back({"empty", 3, {}, true, false});
  const std::string text = ChartMarkup(chart);
  EXPECT_TRUE(Has(text, "first, second"));
  EXPECT_EQ(Count(text, "<polyline"), 2U);
  EXPECT_FALSE(Has(text, "empty"));
}

/// Returns the opening tag of the text element with this content.
std::string TagOf(const std::string& page, const std::string& content) {
  const std::size_t end = page.find(">" + content + "</text>");
  if (end == std::string::npos) return "";
  const std::size_t begin = page.rfind('<', end);
  return page.substr(begin, end - begin);
}

double LeftOf(const std::string& page, const std::string& content) {
  const std::string tag = TagOf(page, content);
  return std::stod(tag.substr(tag.find("x=\"") + 3));
}

TEST(Chart, LongLabelsHaveSpace) {
  EXPECT_GE(LeftOf(ChartMarkup(OneCurve({{1, 250'000, ""}, {2, 1, ""}})), "250000"), 60);
  EXPECT_LT(LeftOf(ChartMarkup(OneCurve({{1, 5, ""}, {2, 1, ""}})), "5"), 60);
}

TEST(Chart, TheLimitIsNamedWhereNoCurveIs) {
  Chart chart = OneCurve({{1, 20, ""}, {2, 3, ""}});
  chart.limit = 4;
  chart.limit_name = "limit 4";
  EXPECT_TRUE(Has(TagOf(ChartMarkup(chart), "limit 4"), "text-anchor=\"start\""));
  chart.curves[0].points = {{1, 3, ""}, {2, 20, ""}};
  EXPECT_TRUE(Has(TagOf(ChartMarkup(chart), "limit 4"), "text-anchor=\"end\""));
}

Timeline OneBar() {
  Timeline timeline;
  timeline.label = "a timeline";
  timeline.seconds = 10;
  timeline.bars = {{"bytes", 0, {1, 0}}};
  return timeline;
}

TEST(Timeline, NamesOfRowsHaveSpace) {
  Timeline timeline = OneBar();
  timeline.rows = {{"a long name", {{1, 2}}}};
  EXPECT_GE(LeftOf(TimelineMarkup(timeline), "a long name"), 110);
}

TEST(Timeline, TimesStayInsideOfTheChart) {
  Timeline timeline = OneBar();
  timeline.seconds = 0.1601;
  const std::string text = TimelineMarkup(timeline);
  EXPECT_LE(LeftOf(text, "0.16"), 1060);  // of 1080, and four letters of 10
  EXPECT_GT(LeftOf(text, "0.16"), LeftOf(text, "0.14"));
}

TEST(Timeline, NamesOfEventsDoNotCoverEachOther) {
  Timeline timeline = OneBar();
  timeline.events = {{1, "first"}, {1.1, "second"}, {5, "third"}, {9.9, "fourth"}};
  const std::string text = TimelineMarkup(timeline);
  const auto y_of = [&](const std::string& name) {
    const std::string tag = TagOf(text, name);
    return tag.substr(tag.find("y=\""), 9);
  };
  EXPECT_NE(y_of("first"), y_of("second"));
  EXPECT_EQ(y_of("first"), y_of("third"));
  EXPECT_TRUE(Has(TagOf(text, "fourth"), "text-anchor=\"end\""));
}

TEST(Chart, NothingAndZeroAreDrawn) {
  EXPECT_TRUE(Has(ChartMarkup(Chart()), "</svg>"));
  const std::string text = ChartMarkup(OneCurve({{3, 0, ""}}));
  EXPECT_FALSE(Has(text, "nan"));
  EXPECT_FALSE(Has(text, "inf"));
}

}  // namespace
}  // namespace shardwright::html
