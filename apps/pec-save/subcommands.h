// SPDX-License-Identifier: Apache-2.0
#pragma once

// The subcommands of pec-save. Each takes all arguments and returns the exit code.

namespace shardwright::apps {

int CheckMain(int argc, const char* const* argv);
int CollectMain(int argc, const char* const* argv);
int ListMain(int argc, const char* const* argv);
int UndoMain(int argc, const char* const* argv);
int AgentMain(int argc, const char* const* argv);
int AgentsMain(int argc, const char* const* argv);
int KeygenMain(int argc, const char* const* argv);
int StatusMain(int argc, const char* const* argv);
int TellMain(int argc, const char* const* argv);
int SimulateMain(int argc, const char* const* argv);
int TuneMain(int argc, const char* const* argv);
int PlanMain(int argc, const char* const* argv);
int ReplanMain(int argc, const char* const* argv);

}  // namespace shardwright::apps
