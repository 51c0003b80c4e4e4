#pragma once

#include <string>

#include "base/result.h"
#include "cli/app.h"
#include "pec-save/flags.h"
#include "pec-save/planning.h"

namespace shardwright::apps {

/// pec-save --simulate: plays a trace of tokens with every policy and K, or those given, and shows
/// what each saves, loses and costs.
/// \error kUsage; kBadInput  the trace, the faults; kBusy  the CSV file exists; as pec::Simulate
/// Collective.
Status Simulate(cli::Context& context, const cli::App& app, const SaveFlags& save,
                const PlanningFlags& flags);

/// pec-save --auto: chooses K_snapshot, K_persist and the interval and shows the model's numbers,
/// beside those of full checkpoints.
/// \error as pec::ChooseConfig, pec::BottleneckByK and pec::MeasureBandwidths
/// Collective.
Status Auto(cli::Context& context, const cli::App& app, const SaveFlags& save,
            const PlanningFlags& flags);

}  // namespace shardwright::apps
