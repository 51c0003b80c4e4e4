// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "checkpoints/registry.h"
#include "common/ucp.h"
#include "convert/input.h"
#include "support/base/result.h"
#include "support/cli/app.h"

namespace shardwright::apps {

/// Handles --check: compares the source with a second checkpoint and shows the differences.
/// \param other  path of the second checkpoint
/// \param only   the state to compare alone: "weight" or "master"; empty: everything
/// \error kMismatch  they differ; as convert::OpenInput and convert::Check
/// Collective.
Status CheckBoth(cli::Context& context, const SourceFlags& source, const std::string& other,
                 const std::string& only);

/// Warns if a trainer may not accept the layout: fp32 weights that were not requested, or
/// key-value heads that tensor parallelism divides.
/// \param spec  keys of the format
/// Collective.
Status WarnOfLayout(cli::Context& context, const convert::Input& input,
                    const checkpoints::Format& format, const checkpoints::TargetSpec& spec);

/// Fails or warns if the programs that read a format do not look for these names.
/// \param spec  keys of the format
/// \error kUsage  Megatron and safetensors: their readers initialize parameters that they do not
///        find. The message has the command line that writes the expected names
/// Collective.
Status CheckNames(cli::Context& context, const convert::Input& input,
                  const checkpoints::Format& format, const checkpoints::TargetSpec& spec);

}  // namespace shardwright::apps
