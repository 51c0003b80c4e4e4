// SPDX-License-Identifier: Apache-2.0
#include "partial/report/report_json.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace shardwright::partial {
namespace {

using Json = nlohmann::json;

TEST(ReportJson, OfACheck) {
  const StoreCheck check{3, 1, 20, 4096, {"blob 7: digest"}};
  EXPECT_EQ(CheckJson(check), Json({{"checkpoints", 3},
                                    {"collected", 1},
                                    {"blobs", 20},
                                    {"bytes", 4096},
                                    {"damaged", {"blob 7: digest"}}}));
}

TEST(ReportJson, OfARepair) {
  StoreRepair repair;
  repair.check.damaged = {"line 2; not repaired: why"};
  repair.checkpoint = "ckpt";
  repair.repaired = 1;
  repair.written_bytes = 7;
  repair.blobs = {{"a", "master", 3, "p", 7, "line 1", ""},
                  {"client state", "", 4, "q", 9, "line 2", "why"}};
  Json wanted = CheckJson(repair.check);
  wanted["repair"] = Json::parse(R"({
    "checkpoint": "ckpt", "repaired": 1, "not_repaired": 1, "bytes_written": 7, "blobs": [
      {"module": "a", "component": "master", "iteration": 3, "path": "p", "bytes": 7,
       "damage": "line 1", "repaired": true, "reason": null},
      {"module": "client state", "component": null, "iteration": 4, "path": "q", "bytes": 9,
       "damage": "line 2", "repaired": false, "reason": "why"}]})");
  EXPECT_EQ(RepairJson(repair), wanted);
}

TEST(ReportJson, OfACollection) {
  Collected collected;
  collected.kept.resize(1);
  collected.kept[0].iteration = 30;
  collected.removed.resize(2);
  collected.removed[0].iteration = 10;
  collected.removed[1].iteration = 20;
  collected.blobs_removed = 5;
  collected.oldest_version = 21;
  CollectedLog log;
  log.segments_kept = 2;
  log.segments_removed = 7;
  log.bytes_removed = 4096;
  const Json json = CollectedJson(collected, log, true);
  EXPECT_EQ(json["dry_run"], true);
  EXPECT_EQ(json["kept"], Json({30}));
  EXPECT_EQ(json["removed"], Json({10, 20}));
  EXPECT_EQ(json["blobs_removed"], 5);
  EXPECT_EQ(json["log"], Json({{"through", 21},
                               {"segments_kept", 2},
                               {"segments_removed", 7},
                               {"bytes_removed", 4096},
                               {"wrong", nullptr}}));
  log.wrong = "0-1.swg: damaged";
  EXPECT_EQ(CollectedJson({}, log, false)["log"]["wrong"], "0-1.swg: damaged");
  EXPECT_EQ(CollectedJson({}, {}, false)["kept"], Json::array());
}

TEST(ReportJson, OfAnAgent) {
  AgentStatus status;
  status.snapshots = 2;
  status.newest = 40;
  const Json json = AgentJson(status);
  EXPECT_EQ(json["snapshots"], 2);
  EXPECT_EQ(json["newest"], 40);
  EXPECT_TRUE(json["persisted"].is_null());
}

}  // namespace
}  // namespace shardwright::partial
