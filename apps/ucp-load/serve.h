// SPDX-License-Identifier: Apache-2.0
#pragma once

// What ucp-load does with memory in place of files.

namespace shardwright::apps {

/// "ucp-load serve": loads into memory, and stays for trainers.
int ServeMain(int argc, const char* const* argv);

/// "ucp-load status": what a resident load does.
int ServeStatusMain(int argc, const char* const* argv);

/// "ucp-load stop": ends one.
int ServeStopMain(int argc, const char* const* argv);

}  // namespace shardwright::apps
