// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/deepspeed/common/topology.h"

#include <nlohmann/json.hpp>

namespace shardwright::checkpoints {
namespace {

struct ZeroLayout : OwnLayout {
  Topology topology;

  std::string Json() const override {
    nlohmann::ordered_json json = {{"zero", topology.zero}, {"dp", topology.dp},
                                   {"tp", topology.tp},     {"pp", topology.pp},
                                   {"ep", topology.ep},     {"dtype", Name(topology.dtype)}};
    if (topology.zero == 3) json["sub_group"] = topology.sub_group;
    if (topology.round_robin) json["round_robin"] = true;
    if (topology.pipeline) json["stages"] = topology.stages;
    return json.dump();
  }
};

}  // namespace

Layout LayoutOf(const Topology& topology) {
  Layout layout;
  layout.mesh.dp_shard = topology.dp;
  layout.mesh.tp = topology.tp;
  layout.mesh.pp = topology.pp;
  layout.mesh.ep = topology.ep;
  layout.dtype = topology.dtype;
  auto own = std::make_shared<ZeroLayout>();
  own->topology = topology;
  layout.own = std::move(own);
  return layout;
}

Topology TopologyOf(const Layout& layout) {
  if (const auto* own = dynamic_cast<const ZeroLayout*>(layout.own.get())) return own->topology;
  Topology topology;
  topology.zero = 1;
  topology.dp = layout.mesh.dp() * layout.mesh.cp;
  topology.tp = layout.mesh.tp;
  topology.ep = layout.mesh.ep;
  topology.dtype = layout.dtype;
  return topology;
}

bool SameFiles(const Layout& a, const Layout& b) {
  const Topology x = TopologyOf(a);
  const Topology y = TopologyOf(b);
  return x.zero == y.zero && x.dp == y.dp && x.tp == y.tp && x.pp == y.pp && x.ep == y.ep &&
         x.dtype == y.dtype && x.pipeline == y.pipeline && (!x.pipeline || x.stages == y.stages) &&
         x.round_robin == y.round_robin && (x.zero != 3 || x.sub_group == y.sub_group);
}

}  // namespace shardwright::checkpoints
