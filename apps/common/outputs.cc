// SPDX-License-Identifier: Apache-2.0
#include "common/outputs.h"

#include "support/os/commit.h"
#include "support/os/dir.h"

namespace shardwright::apps {

Status CheckOutputs(cli::Context& context, const std::vector<std::string>& paths) {
  return context.comm().OnRoot([&]() -> Status {
    for (const std::string& path : paths) {
      if (path.empty() || context.flags().force) continue;
      SW_TRY_ASSIGN(const bool exists, os::Exists(path));
      if (exists) return Fail(Errc::kBusy, path, ": already exists; pass --force to replace it");
    }
    return {};
  });
}

Status WriteText(cli::Context& context, const std::string& path, const std::string& text) {
  SW_TRY(os::CommitFile(path, text, context.flags().force, context.flags().take_over));
  context.sink().AddWritten(text.size(), 1);
  return {};
}

}  // namespace shardwright::apps
