// SPDX-License-Identifier: Apache-2.0
#include "placement/io/cluster_text.h"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "support/base/bytes.h"
#include "support/base/checked.h"
#include "support/base/limits.h"
#include "support/json/json.h"
#include "support/os/dir.h"

namespace shardwright::placement {

using json::Json;

namespace {

/// Fails for unknown members. Otherwise a misspelled one would be ignored silently.
Status OnlyKnown(const Json& object, std::initializer_list<std::string_view> known,
                 const std::string& where) {
  if (!object.is_object()) {
    return Fail(Errc::kBadInput, where, ": an object expected, found ", json::KindOf(object));
  }
  for (const auto& [name, value] : object.items()) {
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    std::string message = where;
    message.append(": unknown member \"").append(name).append("\", known members are ");
    const char* separator = "";
    for (const std::string_view one : known) {
      message.append(separator).append(one);
      separator = ", ";
    }
    return Fail(Errc::kBadInput, message);
  }
  return {};
}

/// Reads a size: bytes, or a text with a unit.
Result<std::uint64_t> SizeOf(const Json& value, const std::string& where) {
  if (value.is_string()) {
    auto bytes = ParseBytes(value.get_ref<const std::string&>());
    if (bytes) return bytes;
    return Fail(Errc::kBadInput, where, ": ", bytes.error().message);
  }
  return json::WholeOf(value, 0, std::uint64_t{1} << 62, where);
}

/// Reads a bandwidth: bytes per second, or a text such as "12.5GB/s".
Result<double> RateOf(const Json& value, const std::string& where) {
  if (value.is_number()) {
    const auto rate = value.get<double>();
    if (rate > 0 && rate <= std::numeric_limits<double>::max()) return rate;
    return Fail(Errc::kBadInput, where, ": bytes per second above 0 expected");
  }
  if (!value.is_string()) {
    return Fail(Errc::kBadInput, where, ": bytes per second expected, found ", json::KindOf(value));
  }
  const auto bytes = ParseBandwidth(value.get_ref<const std::string&>());
  if (!bytes) return Fail(Errc::kBadInput, where, ": ", bytes.error().message);
  if (*bytes == 0) return Fail(Errc::kBadInput, where, ": bytes per second above 0 expected");
  return static_cast<double>(*bytes);
}

Result<std::string> TextOf(const Json& value, const std::string& where) {
  if (!value.is_string() || value.get_ref<const std::string&>().empty()) {
    return Fail(Errc::kBadInput, where, ": a text expected, found ", json::KindOf(value));
  }
  return value.get<std::string>();
}

/// Returns true if a node or a GPU is alive, which is the default.
Result<bool> AliveOf(const Json& object, const std::string& where) {
  const Json* alive = json::Find(object, "alive");
  if (alive == nullptr) return true;
  if (alive->is_boolean()) return alive->get<bool>();
  return Fail(Errc::kBadInput, where, ": alive: true or false expected, found ",
              json::KindOf(*alive));
}

/// Reads the speed of a GPU relative to others.
Result<double> SpeedOf(const Json& value, const std::string& where) {
  constexpr double kSlowest = 0.01;
  constexpr double kFastest = 100;
  const double speed = value.is_number() ? value.get<double>() : 0;
  if (speed >= kSlowest && speed <= kFastest) return speed;
  return Fail(Errc::kBadInput, where, ": speed: a number from 0.01 to 100 expected, found ",
              (value.is_number() ? value.dump() : json::KindOf(value)));
}

/// Properties of a GPU that does not specify its own.
struct GpuDefaults {
  std::optional<std::uint64_t> slots;
  std::optional<std::uint64_t> memory_bytes;
  double speed = 1;
};

class Builder {
 public:
  Builder(std::uint32_t layers, std::string where) : layers_(layers), where_(std::move(where)) {}

  Result<Cluster> Build(const Json& root) {
    SW_TRY(OnlyKnown(root,
                     {"nodes", "gpus", "slots", "memory", "expert_bytes", "param_bytes",
                      "bandwidth", "nodes_per_rack", "comment"},
                     where_));
    SW_TRY(ReadBytes(root));
    SW_TRY(ReadBandwidth(root));
    SW_TRY_ASSIGN(const GpuDefaults defaults, Defaults(root, {}, where_));
    if (const Json* per_rack = json::Find(root, "nodes_per_rack")) {
      SW_TRY_ASSIGN(nodes_per_rack_,
                    json::WholeOf(*per_rack, 1, limits::kMoeNodes, where_ + ": nodes_per_rack"));
    }
    const Json* nodes = json::Find(root, "nodes");
    if (nodes == nullptr) return Fail(Errc::kBadInput, where_, ": nodes is missing");
    if (nodes->is_array()) {
      if (nodes->size() > limits::kMoeNodes) return TooMany("nodes", nodes->size());
      for (const Json& node : *nodes) SW_TRY(AddNode(node, root, defaults));
    } else {
      SW_TRY_ASSIGN(const std::uint64_t count,
                    json::WholeOf(*nodes, 1, limits::kMoeNodes, where_ + ": nodes"));
      for (std::uint64_t n = 0; n < count; ++n) {
        SW_TRY(AddNode(Json::object(), root, defaults));
      }
    }
    SW_TRY(Validate(cluster_));
    return std::move(cluster_);
  }

 private:
  tl::unexpected<Error> TooMany(std::string_view what, std::uint64_t count) const {
    return Fail(Errc::kLimit, where_, ": ", count, " ", what, ", at most ", limits::kMoeNodes,
                " nodes and ", limits::kMoeDevices, " gpus");
  }

  Status ReadBytes(const Json& root) {
    if (const Json* bytes = json::Find(root, "expert_bytes")) {
      SW_TRY_ASSIGN(cluster_.expert_bytes, SizeOf(*bytes, where_ + ": expert_bytes"));
    }
    // Mixed precision with Adam stores 14 bytes per parameter, 2 of which are the weight.
    cluster_.param_bytes = cluster_.expert_bytes / 7;
    if (const Json* bytes = json::Find(root, "param_bytes")) {
      SW_TRY_ASSIGN(cluster_.param_bytes, SizeOf(*bytes, where_ + ": param_bytes"));
    }
    return {};
  }

  Status ReadBandwidth(const Json& root) {
    const Json* bandwidth = json::Find(root, "bandwidth");
    if (bandwidth == nullptr) return {};
    const std::string where = where_ + ": bandwidth";
    SW_TRY(OnlyKnown(*bandwidth, {"gpu", "node", "rack"}, where));
    for (const auto& [name, rate] : {std::pair("gpu", &cluster_.device_bytes_per_s),
                                     std::pair("node", &cluster_.node_bytes_per_s),
                                     std::pair("rack", &cluster_.rack_bytes_per_s)}) {
      const Json* value = json::Find(*bandwidth, name);
      if (value == nullptr) continue;
      SW_TRY_ASSIGN(*rate, RateOf(*value, where + ": " + name));
    }
    return {};
  }

  Result<GpuDefaults> Defaults(const Json& object, GpuDefaults outer, const std::string& where) {
    const Json* slots = json::Find(object, "slots");
    const Json* memory = json::Find(object, "memory");
    if (slots != nullptr && memory != nullptr) {
      return Fail(Errc::kBadInput, where, ": slots cannot be combined with memory");
    }
    if (const Json* speed = json::Find(object, "speed")) {
      SW_TRY_ASSIGN(outer.speed, SpeedOf(*speed, where));
    }
    if (slots != nullptr && slots->is_array()) {
      return Fail(Errc::kBadInput, where,
                  ": slots: one number for all layers expected, found a list; choose layers of one "
                  "number with --layers, and plan the others separately");
    }
    if (slots != nullptr) {
      outer.memory_bytes.reset();
      SW_TRY_ASSIGN(outer.slots, json::WholeOf(*slots, 0, limits::kMoeSlots, where + ": slots"));
    }
    if (memory != nullptr) {
      outer.slots.reset();
      SW_TRY_ASSIGN(outer.memory_bytes, SizeOf(*memory, where + ": memory"));
    }
    return outer;
  }

  Status AddNode(const Json& json, const Json& root, const GpuDefaults& outer) {
    const auto index = static_cast<std::uint32_t>(cluster_.nodes.size());
    std::string place = where_ + ": node " + std::to_string(index);
    SW_TRY(OnlyKnown(json, {"name", "rack", "alive", "gpus", "slots", "memory", "speed"}, place));
    Node node;
    node.name = "node" + std::to_string(index);
    if (const Json* name = json::Find(json, "name")) {
      SW_TRY_ASSIGN(node.name, TextOf(*name, place + ": name"));
    }
    if (!names_.insert(node.name).second) {
      return Fail(Errc::kBadInput, place, ": the name \"", node.name, "\" is taken");
    }
    place = where_ + ": node \"" + node.name + "\"";
    SW_TRY_ASSIGN(node.alive, AliveOf(json, place));
    SW_TRY_ASSIGN(node.rack, RackOf(json, index, place));
    cluster_.nodes.push_back(std::move(node));
    SW_TRY_ASSIGN(const GpuDefaults defaults, Defaults(json, outer, place));
    const Json* gpus = json::Find(json, "gpus");
    if (gpus == nullptr) gpus = json::Find(root, "gpus");
    if (gpus == nullptr) return Fail(Errc::kBadInput, place, ": gpus is missing");
    return AddGpus(*gpus, defaults, place);
  }

  Result<std::uint32_t> RackOf(const Json& json, std::uint32_t node, const std::string& place) {
    std::string name = "rack0";
    if (nodes_per_rack_ > 0) name = "rack" + std::to_string(node / nodes_per_rack_);
    if (const Json* rack = json::Find(json, "rack")) {
      SW_TRY_ASSIGN(name, TextOf(*rack, place + ": rack"));
    }
    const auto [at, fresh] =
        rack_index_.try_emplace(name, static_cast<std::uint32_t>(cluster_.racks.size()));
    if (fresh) cluster_.racks.push_back(name);
    return at->second;
  }

  Status AddGpus(const Json& gpus, const GpuDefaults& defaults, const std::string& place) {
    if (!gpus.is_array()) {
      SW_TRY_ASSIGN(const std::uint64_t count,
                    json::WholeOf(gpus, 1, limits::kMoeDevices, place + ": gpus"));
      for (std::uint64_t g = 0; g < count; ++g) {
        SW_TRY(AddGpu(defaults, place + ": gpu " + std::to_string(g)));
      }
      return {};
    }
    std::set<std::string> ids;
    for (std::size_t g = 0; g < gpus.size(); ++g) {
      const Json& gpu = gpus[g];
      std::string at = place + ": gpu " + std::to_string(g);
      // A number in place of an object specifies the slots of a GPU.
      if (gpu.is_number()) {
        GpuDefaults own;
        own.speed = defaults.speed;
        SW_TRY_ASSIGN(own.slots, json::WholeOf(gpu, 0, limits::kMoeSlots, at));
        SW_TRY(AddGpu(own, at));
        continue;
      }
      SW_TRY(OnlyKnown(gpu, {"id", "slots", "memory", "alive", "speed"}, at));
      if (const Json* id = json::Find(gpu, "id")) {
        if (!id->is_string() && !id->is_number_unsigned()) {
          return Fail(Errc::kBadInput, at, ": id: a text or a number expected");
        }
        const bool fresh =
            id->is_string() ? gpu_ids_.insert(id->dump()).second : ids.insert(id->dump()).second;
        if (!fresh) return Fail(Errc::kBadInput, at, ": id ", id->dump(), " is taken");
        at = place + ": gpu " + id->dump();
      }
      SW_TRY_ASSIGN(GpuDefaults own, Defaults(gpu, defaults, at));
      SW_TRY_ASSIGN(const bool alive, AliveOf(gpu, at));
      if (!alive) own.slots = 0;
      SW_TRY(AddGpu(own, at));
      cluster_.devices.back().alive = alive;
    }
    return {};
  }

  Status AddGpu(const GpuDefaults& gpu, const std::string& place) {
    if (cluster_.devices.size() >= limits::kMoeDevices) {
      return TooMany("gpus or more", cluster_.devices.size() + 1);
    }
    std::uint64_t slots = 0;
    if (gpu.slots) {
      slots = *gpu.slots;
    } else if (gpu.memory_bytes) {
      if (cluster_.expert_bytes == 0) {
        return Fail(Errc::kBadInput, place, ": memory requires expert_bytes");
      }
      SW_TRY_ASSIGN(const std::uint64_t layer_bytes, CheckedMul(cluster_.expert_bytes, layers_));
      slots = *gpu.memory_bytes / layer_bytes;
    } else {
      return Fail(Errc::kBadInput, place, ": slots or memory is missing");
    }
    if ((slot_sum_ += slots) > limits::kMoeSlots) {
      return Fail(Errc::kLimit, place, ": more than ", limits::kMoeSlots, " slots in the cluster");
    }
    Device device;
    device.node = static_cast<std::uint32_t>(cluster_.nodes.size() - 1);
    device.slots = static_cast<std::uint32_t>(slots);
    device.speed = gpu.speed;
    cluster_.devices.push_back(device);
    return {};
  }

  const std::uint32_t layers_;
  const std::string where_;
  Cluster cluster_;
  std::uint64_t nodes_per_rack_ = 0;
  std::uint64_t slot_sum_ = 0;
  std::set<std::string> names_;
  std::set<std::string> gpu_ids_;
  std::map<std::string, std::uint32_t> rack_index_;
};

}  // namespace

Result<Cluster> ParseCluster(std::string_view text, std::uint32_t layers,
                             const std::string& where) {
  SW_TRY_ASSIGN(const Json root, json::Parse(text, where));
  return Builder(layers, where).Build(root);
}

Result<Cluster> ReadCluster(const std::string& path, std::uint32_t layers) {
  SW_TRY_ASSIGN(const std::string text, os::ReadWholeText(path, limits::kJsonBytes));
  return ParseCluster(text, layers, path);
}

}  // namespace shardwright::placement
