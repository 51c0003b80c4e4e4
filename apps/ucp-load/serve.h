// SPDX-License-Identifier: Apache-2.0
#pragma once

// The subcommands of ucp-load for checkpoints in shared memory.

namespace shardwright::apps {

/// "ucp-load serve": keeps a checkpoint in shared memory for trainers to load.
int ServeMain(int argc, const char* const* argv);

/// "ucp-load status": shows the state of a shared-memory cache.
int ServeStatusMain(int argc, const char* const* argv);

/// "ucp-load stop": ends a shared-memory cache.
int ServeStopMain(int argc, const char* const* argv);

}  // namespace shardwright::apps
