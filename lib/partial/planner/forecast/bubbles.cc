// SPDX-License-Identifier: Apache-2.0
#include "partial/planner/forecast/bubbles.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "support/base/checked.h"

namespace shardwright::partial {
namespace {

bool IsTime(double seconds) { return std::isfinite(seconds) && seconds >= 0; }

/// Returns the number of elements that can be saved within the bubble.
std::uint64_t RoomOf(std::uint64_t elems, double snapshot_s, double bubble_s) {
  if (snapshot_s <= bubble_s) return elems;
  return std::min(elems, static_cast<std::uint64_t>(
                             std::floor(static_cast<double>(elems) * bubble_s / snapshot_s)));
}

}  // namespace

Result<BubbleTimes> BubblesOf(const PipelineTimes& pipeline, std::uint32_t stage) {
  if (pipeline.stages == 0 || pipeline.micro_batches == 0 || pipeline.chunks == 0 ||
      stage >= pipeline.stages) {
    return Fail(Errc::kUsage, "stage ", stage, " of a pipeline with ", pipeline.stages, " stages, ",
                pipeline.micro_batches, " micro-batches and ", pipeline.chunks,
                " chunks: expected at least 1 of each, and a stage that exists");
  }
  if (!IsTime(pipeline.forward_s) || !IsTime(pipeline.backward_s)) {
    return Fail(Errc::kUsage, "a micro-batch takes ", pipeline.forward_s, " s forward and ",
                pipeline.backward_s, " s backward: expected finite times from 0");
  }
  const double both_s = pipeline.forward_s + pipeline.backward_s;
  BubbleTimes times;
  times.bubble_s = (pipeline.stages - 1) * both_s / pipeline.chunks;
  times.iteration_s = pipeline.micro_batches * both_s + times.bubble_s;
  times.before_s = stage * pipeline.forward_s / pipeline.chunks;
  times.after_s = stage * pipeline.backward_s / pipeline.chunks;
  times.between_s = std::max(0.0, times.bubble_s - times.before_s - times.after_s);
  return times;
}

Result<std::vector<IdleTime>> IdleTimesOf(const PipelineTimes& pipeline, std::uint32_t stage) {
  SW_TRY_ASSIGN(const BubbleTimes times, BubblesOf(pipeline, stage));
  if (pipeline.chunks != 1) {
    return Fail(Errc::kUnsupported, "a pipeline with ", pipeline.chunks,
                " chunks per stage: idle times are known only for 1F1B with one chunk");
  }
  std::vector<IdleTime> idle;
  const auto add = [&](double begin_s, double end_s) {
    if (end_s > begin_s) idle.push_back({begin_s, end_s});
  };
  const double both_s = pipeline.forward_s + pipeline.backward_s;
  const std::uint32_t below = pipeline.stages - 1 - stage;  // stages closer to the loss
  const std::uint32_t first = std::min(pipeline.micro_batches, below + 1);  // warm-up forwards
  const double backward_s = pipeline.stages * pipeline.forward_s + below * pipeline.backward_s;
  add(0, times.before_s);
  add(times.before_s + first * pipeline.forward_s, backward_s);
  for (std::uint32_t done = 1; done < pipeline.micro_batches; ++done) {
    // There is no gap while forwards are left: one runs between two backwards.
    if (first + done <= pipeline.micro_batches) continue;
    const double end_s = backward_s + done * both_s;
    add(end_s - pipeline.forward_s, end_s);
  }
  add(times.iteration_s - times.after_s, times.iteration_s);
  return idle;
}

Result<BubblePlan> FillBubble(const std::vector<std::uint64_t>& module_elems,
                              std::uint64_t elem_bytes, double bytes_per_s, double bubble_s) {
  if (!(std::isfinite(bytes_per_s) && bytes_per_s > 0) || !IsTime(bubble_s)) {
    return Fail(Errc::kUsage, "a bubble of ", bubble_s, " s at ", bytes_per_s,
                " bytes per second: expected a time from 0 and a positive bandwidth");
  }
  std::uint64_t elems = 0;
  for (std::uint64_t more : module_elems) {
    SW_TRY_ASSIGN(elems, CheckedAdd(elems, more));
  }
  SW_TRY_ASSIGN(const std::uint64_t bytes, CheckedMul(elems, elem_bytes));
  BubblePlan plan;
  plan.snapshot_s = static_cast<double>(bytes) / bytes_per_s;
  plan.in_bubble = RoomOf(elems, plan.snapshot_s, bubble_s);
  plan.outside = elems - plan.in_bubble;

  std::vector<std::size_t> order(module_elems.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return module_elems[a] > module_elems[b]; });
  std::uint64_t room = plan.in_bubble;
  plan.module.resize(module_elems.size());
  for (std::size_t i : order) {
    const bool fits = module_elems[i] <= room;
    (fits ? plan.module[i].in_bubble : plan.module[i].outside) = module_elems[i];
    if (fits) room -= module_elems[i];
  }
  for (std::size_t i : order) {  // put part of a module into the remaining time
    BubbleShare& share = plan.module[i];
    if (share.outside == 0 || room == 0) continue;
    share.in_bubble = std::min(room, share.outside);
    share.outside -= share.in_bubble;
    room -= share.in_bubble;
  }
  return plan;
}

}  // namespace shardwright::partial
