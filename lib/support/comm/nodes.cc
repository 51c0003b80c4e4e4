// SPDX-License-Identifier: Apache-2.0
#include "support/comm/nodes.h"

#include <span>

#include "support/base/system.h"

namespace shardwright::comm {

Result<std::vector<Node>> NodesOfRanks(Comm& comm) {
  const std::string own = BootId() + "\n" + HostName();
  SW_TRY_ASSIGN(const std::vector<Bytes> all, comm.AllGather(std::as_bytes(std::span(own))));
  std::vector<Node> nodes;
  nodes.reserve(all.size());
  for (const Bytes& bytes : all) {
    const std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    const std::size_t line = text.find('\n');
    nodes.push_back({text.substr(line + 1), text.substr(0, line)});
  }
  return nodes;
}

}  // namespace shardwright::comm
