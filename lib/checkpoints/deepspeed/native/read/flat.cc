// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "checkpoints/deepspeed/common/flat.h"
#include "checkpoints/deepspeed/native/read/read_internal.h"
#include "engine/layout/states.h"
#include "support/base/checked.h"

// ZeRO-1, ZeRO-2 and BF16_Optimizer: every group is one flat buffer, cut into equal partitions.

namespace shardwright::checkpoints::reader {
namespace {

/// One group's flat buffer on one mp rank.
struct Flat : Spread {
  const std::vector<NamedShape>* params = nullptr;
  std::vector<std::uint64_t> starts;    ///< by parameter
  std::uint64_t total = 0;              ///< elements before the tail padding
  std::uint64_t tightest_total = 0;     ///< the same without gaps
  std::uint64_t chunk = 0;              ///< partition
  std::vector<std::uint32_t> original;  ///< position without round robin -> position in the buffer
  bool round_robin = false;
};

/// Computes the starts of consecutive parameters with the given gaps.
Status Pack(const std::vector<NamedShape>& params, const std::vector<std::uint64_t>* gaps,
            std::vector<std::uint64_t>* starts, std::uint64_t* total) {
  starts->clear();
  *total = 0;
  for (std::size_t i = 0; i < params.size(); ++i) {
    starts->push_back(*total);
    SW_TRY_ASSIGN(*total, CheckedAdd(*total, params[i].elems));
    // Tail padding follows the last parameter and is not counted.
    if (gaps != nullptr && i + 1 < params.size()) {
      SW_TRY_ASSIGN(*total, CheckedAdd(*total, (*gaps)[i]));
    }
  }
  return {};
}

/// Finds the partition size: the most elements of any rank. The first rank's partition is full.
Status FindChunk(const Reading& reading, Flat* flat) {
  std::uint64_t stored = 0;
  std::uint64_t masters = 0;
  for (std::uint64_t rank = 0; rank < reading.ranks; ++rank) {
    const ShardGroup& group = GroupAt(reading, *flat, rank);
    flat->chunk = std::max(flat->chunk, group.fp32.elems);
    masters += group.fp32.elems;
    for (const auto& [state, place] : group.states) stored += place.elems;
  }
  if (flat->total > 0 && masters == 0) {
    return Fail(Errc::kUnsupported, GroupText(reading, *flat), ": its master weights are empty (",
                (stored == 0 ? "optimizer state offloaded to NVMe"
                             : "only other optimizer states are present"),
                ")");
  }
  return {};
}

Status CheckLength(const Reading& reading, const Flat& flat) {
  SW_TRY_ASSIGN(const std::uint64_t held, CheckedMul(flat.chunk, flat.ranks));
  // Groups are padded to a multiple of twice the ranks, or of the ranks in old releases.
  if (held >= flat.tightest_total && held - flat.tightest_total <= 2 * flat.ranks) return {};
  if (held >= flat.total && held - flat.total <= 2 * flat.ranks) return {};
  return Fail(Errc::kBadInput, GroupText(reading, flat), ": ", flat.total,
              " elements expected from param_shapes, ", flat.ranks, " partitions of ", flat.chunk,
              " found");
}

/// Starts of parameters in the buffer, as far as the ranks' slices record them.
struct RecordedStarts {
  std::unordered_map<std::string, std::uint64_t> starts;
  bool complete = false;  ///< the slices cover every parameter that has elements completely
};

RecordedStarts ReadRecordedStarts(const Reading& reading, const Flat& flat) {
  RecordedStarts out;
  std::unordered_map<std::string, std::uint64_t> elems;
  for (std::uint64_t edp = 0; edp < flat.ranks; ++edp) {
    for (const Slice& slice : GroupAt(reading, flat, RankOf(reading, flat, 0, edp)).slices) {
      out.starts.emplace(slice.name, edp * flat.chunk + slice.start);
      elems[slice.name] += slice.elems;
    }
  }
  out.complete =
      std::all_of(flat.params->begin(), flat.params->end(), [&](const NamedShape& param) {
        const auto at = elems.find(param.name);
        return param.elems == 0 || (at != elems.end() && at->second == param.elems);
      });
  return out;
}

bool Agrees(const Flat& flat, const RecordedStarts& told,
            const std::vector<std::uint64_t>& starts) {
  for (std::size_t i = 0; i < starts.size(); ++i) {
    const NamedShape& param = (*flat.params)[i];
    if (param.elems > 0 && told.starts.at(param.name) != starts[i]) return false;
  }
  return true;
}

/// Returns the starts of parameters packed in another order.
Result<std::vector<std::uint64_t>> PackIn(const Flat& flat,
                                          const std::vector<std::uint32_t>& order) {
  std::vector<std::uint64_t> out(flat.params->size());
  std::uint64_t at = 0;
  for (const std::uint32_t position : order) {
    out[position] = at;
    SW_TRY_ASSIGN(at, CheckedAdd(at, (*flat.params)[position].elems));
  }
  return out;
}

/// Returns true if starts ascend with small gaps between parameters.
bool HasGaps(const Flat& flat, const RecordedStarts& told) {
  constexpr std::uint64_t kMostGap = 16;  // parameters start on 16-byte boundaries
  std::uint64_t at = 0;
  for (const NamedShape& param : *flat.params) {
    if (param.elems == 0) continue;
    const std::uint64_t start = told.starts.at(param.name);
    if (start < at || start - at >= kMostGap) return false;
    at = start + param.elems;
  }
  return at <= flat.chunk * flat.ranks;
}

/// Orders that the names in every rank's slices follow.
struct NameOrders {
  bool buffer = true;
  bool original = true;  ///< the one before round robin
};

NameOrders OrdersOfNames(const Reading& reading, const Flat& flat,
                         const std::vector<std::uint32_t>& original) {
  std::unordered_map<std::string_view, std::size_t> buffer_place;
  std::unordered_map<std::string_view, std::size_t> original_place;
  for (std::size_t i = 0; i < original.size(); ++i) {
    buffer_place.emplace((*flat.params)[i].name, i);
    original_place.emplace((*flat.params)[original[i]].name, i);
  }
  NameOrders orders;
  for (std::uint64_t edp = 0; edp < flat.ranks; ++edp) {
    const std::vector<Slice>& slices = GroupAt(reading, flat, RankOf(reading, flat, 0, edp)).slices;
    for (std::size_t i = 1; i < slices.size(); ++i) {
      const auto& a = slices[i - 1].name;
      const auto& b = slices[i].name;
      if (!buffer_place.contains(a) || !buffer_place.contains(b)) return {true, false};
      orders.buffer = orders.buffer && buffer_place[a] < buffer_place[b];
      orders.original = orders.original && original_place[a] < original_place[b];
    }
  }
  return orders;
}

/// Finds the starts of parameters, and if round robin has reordered them.
/// `param_shapes` always has the order of the buffer. The ranks' slices decide the rest.
Status FindStarts(Reading* reading, Flat* flat) {
  const Shard& shard = reading->shards[flat->mp].front();
  const std::size_t count = flat->params->size();
  SW_TRY(Pack(*flat->params, nullptr, &flat->starts, &flat->tightest_total));
  flat->total = flat->tightest_total;
  bool padded = false;
  if (!shard.alignments.empty()) {
    const std::vector<std::uint64_t>& gaps = shard.alignments[flat->group];
    if (gaps.size() != count) {
      return Fail(Errc::kBadInput, GroupText(*reading, *flat),
                  ": param_alignment_paddings: ", count, " parameters expected, found ",
                  gaps.size());
    }
    padded = std::any_of(gaps.begin(), gaps.end(), [](std::uint64_t gap) { return gap > 0; });
    SW_TRY(Pack(*flat->params, &gaps, &flat->starts, &flat->total));
    flat->tightest_total = flat->total;
  }
  SW_TRY(FindChunk(*reading, flat));

  std::vector<std::uint32_t> identity(count);
  for (std::uint32_t i = 0; i < count; ++i) identity[i] = i;
  flat->original = identity;
  // RoundRobinOrder maps positions to original parameters. The reader needs the inverse.
  std::vector<std::uint32_t> inverse(count);
  const std::vector<std::uint32_t> order = RoundRobinOrder(count, flat->ranks);
  for (std::uint32_t i = 0; i < count; ++i) inverse[order[i]] = i;
  const bool moves = order != identity;

  const RecordedStarts told = ReadRecordedStarts(*reading, *flat);
  const Model& model = reading->models[flat->mp];
  if (!model.has_shapes && !told.complete && !model.inferred[flat->group].empty()) {
    // NameParams has already compared the few recorded values.
    if (moves && reading->round_robin) {
      flat->round_robin = true;
      flat->original = inverse;
    }
    return CheckLength(*reading, *flat);
  }
  const bool silent = told.starts.empty();
  if (!silent && !told.complete) {
    return Fail(Errc::kBadInput, GroupText(*reading, *flat),
                ": param_slice_mappings do not cover the parameters of param_shapes");
  }
  if (silent || Agrees(*flat, told, flat->starts)) {
    const NameOrders names = silent ? NameOrders() : OrdersOfNames(*reading, *flat, inverse);
    // If parameter_alignment pads, the slices state positions in the buffer. If their names follow
    // both orders, only the configuration decides then.
    const bool decides = silent || padded;
    if (moves && names.original && (!names.buffer || (decides && reading->round_robin))) {
      flat->round_robin = true;
      flat->original = inverse;
    }
    return CheckLength(*reading, *flat);
  }
  if (moves) {
    SW_TRY_ASSIGN(const std::vector<std::uint64_t> original, PackIn(*flat, inverse));
    if (!padded && Agrees(*flat, told, original)) {
      flat->round_robin = true;
      flat->original = inverse;
      return CheckLength(*reading, *flat);
    }
  }
  if (shard.alignments.empty() && HasGaps(*flat, told)) {
    for (std::size_t i = 0; i < count; ++i) {
      const auto at = told.starts.find((*flat->params)[i].name);
      if (at == told.starts.end()) continue;
      flat->starts[i] = at->second;
      flat->total = std::max(flat->total, at->second + (*flat->params)[i].elems);
    }
    return CheckLength(*reading, *flat);
  }
  return Fail(
      Errc::kBadInput, GroupText(*reading, *flat),
      ": param_slice_mappings agree neither with param_shapes nor with a round robin of them, in ",
      flat->ranks, " partitions of ", flat->chunk, " elements");
}

/// Records the parameters of a group if their order was inferred.
void NoteInferred(const Flat& flat, const Model& model, const std::vector<std::uint32_t>& params,
                  Inferred* out) {
  if (model.has_shapes || model.inferred[flat.group].empty()) return;
  if (out->why.empty()) out->why = model.inferred[flat.group];
  out->params.insert(out->params.end(), params.begin(), params.end());
}

/// Formats a range as "8" or "8 to 12".
std::string Range(std::uint64_t least, std::uint64_t most) {
  std::string text = std::to_string(least);
  if (least < most) text += " to " + std::to_string(most);
  return text;
}

/// Adds an array of one state over the ranks that share one buffer.
Result<std::uint32_t> AddPartitions(Reading* reading, const Flat& flat, std::uint64_t ep,
                                    const std::string& state) {
  std::vector<layout::Region> regions;
  DType dtype = DType::kF32;
  for (std::uint64_t edp = 0; edp < flat.ranks; ++edp) {
    const std::uint64_t rank = RankOf(*reading, flat, ep, edp);
    const ShardGroup& group = GroupAt(*reading, flat, rank);
    const Place* place = &group.fp32;
    if (state != layout::kMaster) {
      const auto at = std::find_if(group.states.begin(), group.states.end(),
                                   [&](const auto& entry) { return entry.first == state; });
      SW_CHECK(at != group.states.end());  // the ranks have the same states
      place = &at->second;
    }
    const std::uint64_t first = edp * flat.chunk;
    const std::uint64_t needed = flat.total > first ? std::min(flat.total - first, flat.chunk) : 0;
    SW_TRY_ASSIGN(const std::uint64_t padded, PartitionElems(flat.chunk, 1));
    if (place->elems < needed || place->elems > padded) {
      return Fail(Errc::kBadInput, reading->file_name(reading->shards[flat.mp][rank].file),
                  ": group ", flat.group, " ", state, ": ", Range(needed, padded),
                  " elements expected from param_shapes, found ", place->elems);
    }
    dtype = place->dtype;
    regions.push_back(reading->map.RegionOf(*place));
  }
  return reading->map.AddArray(dtype, std::move(regions));
}

Status MapBuffer(Reading* reading, const Flat& flat, std::uint64_t ep, const Group& options,
                 std::vector<std::uint32_t>* params) {
  const Shard& shard = reading->shards[flat.mp].front();
  const ShardGroup& group = shard.groups[flat.group];
  std::vector<std::pair<std::string, std::uint32_t>> arrays;
  const std::string master(layout::kMaster);
  SW_TRY_ASSIGN(const std::uint32_t masters, AddPartitions(reading, flat, ep, master));
  arrays.emplace_back(master, masters);
  for (const auto& [state, place] : group.states) {
    SW_TRY_ASSIGN(const std::uint32_t array, AddPartitions(reading, flat, ep, state));
    arrays.emplace_back(state, array);
  }
  const std::vector<Scalar> scalars = WithGroupStep(*reading, flat.mp, group.scalars, options);
  for (const std::uint32_t position : flat.original) {
    const NamedShape& named = (*flat.params)[position];
    SW_TRY_ASSIGN(const std::uint32_t param, ParamOf(*reading, named.name, ep, shard.file));
    const ParamInfo& info = reading->params[param];
    if (info.shards[reading->tp_of(flat.mp)] != named.shape) {
      return Fail(Errc::kBadInput, reading->file_name(reading->models[flat.mp].file),
                  ": parameter \"", named.name, "\": ", ToString(named.shape),
                  " in param_shapes, its weight is ",
                  ToString(info.shards[reading->tp_of(flat.mp)]));
    }
    for (const auto& [state, array] : arrays) {
      SW_TRY(AddFragment(reading, param, state, flat.mp,
                         {array, flat.starts[position], flat.chunk, 0}));
    }
    SW_TRY(SetScalars(reading, param, scalars, shard.file));
    params->push_back(param);
  }
  return {};
}

/// Merges the experts of all ranks: by layer of first appearance, then global id, then position.
void MergeExperts(const Reading& reading, const std::vector<std::vector<std::uint32_t>>& by_ep,
                  std::vector<std::uint32_t>* out) {
  struct Key {
    std::size_t layer;
    std::uint32_t expert;
    std::uint32_t param;
  };
  std::vector<Key> keys;
  std::vector<std::uint32_t> layers;
  for (const std::vector<std::uint32_t>& params : by_ep) {
    for (const std::uint32_t param : params) {
      const std::optional<ExpertId>& id = reading.out.params[param].expert;
      // Other parameters of a MoE group remain at the front.
      const std::uint32_t layer = id ? id->layer + 1 : 0;
      auto at = std::find(layers.begin(), layers.end(), layer);
      if (at == layers.end()) at = layers.insert(at, layer);
      keys.push_back({static_cast<std::size_t>(at - layers.begin()), id ? id->expert : 0, param});
    }
  }
  std::stable_sort(keys.begin(), keys.end(), [](const Key& a, const Key& b) {
    return a.layer != b.layer ? a.layer < b.layer : a.expert < b.expert;
  });
  for (const Key& key : keys) out->push_back(key.param);
}

/// Returns the group's options: those in the shards, or values of ds_config if the shard is
/// elastic.
Result<const Node*> OptionsOf(Reading* reading, std::size_t g, std::size_t groups) {
  const std::size_t mp = reading->state.options_rank;
  const Node* inner = reading->state.optimizer[mp].document.root;
  const Node* list = FindPath(inner, {"base_optimizer_state", "param_groups"});
  const Shard& shard = reading->shards[mp].front();
  if (shard.elastic) {
    const Node* params = FindPath(reading->config, {"optimizer", "params"});
    if (g == 0) {
      reading->out.warnings.push_back(
          StrCat(reading->file_name(shard.file),
                 ": an elastic checkpoint holds no hyper-parameters of the optimizer: ",
                 (params != nullptr ? "taken from ds_config"
                                    : "the groups are written without them, and PyTorch cannot "
                                      "step until a script sets them")));
    }
    return params;
  }
  if (list == nullptr || !list->is_list() || list->items.size() != groups ||
      !list->items[g]->is_dict()) {
    return Fail(Errc::kBadInput, reading->file_name(shard.file), ": param_groups: ", groups,
                " groups expected, found ", (list == nullptr ? "nothing" : pickle::Describe(list)));
  }
  return list->items[g];
}

}  // namespace

Status MapFlatGroups(Reading* reading) {
  const std::size_t groups = reading->own_groups.front().size();
  for (std::size_t g = 0; g < groups; ++g) {
    SW_TRY_ASSIGN(const Node* options, OptionsOf(reading, g, groups));
    Group group = MakeGroup(reading, options);
    std::vector<bool> listed(reading->out.params.size());
    for (std::uint64_t mp = 0; mp < reading->mp_ranks; ++mp) {
      const Model& model = reading->models[mp];
      const std::size_t own_count = reading->shards[mp].front().groups.size();
      if (model.shapes.size() != own_count) {
        return Fail(Errc::kBadInput, reading->file_name(model.file), ": param_shapes: ", own_count,
                    " groups expected as in the shards, found ", model.shapes.size());
      }
      const std::optional<std::size_t> own = reading->own_groups[mp][g];
      if (!own) continue;
      Flat flat;
      static_cast<Spread&>(flat) = SpreadOf(*reading, mp, *own);
      flat.params = &model.shapes[*own];
      SW_TRY(FindStarts(reading, &flat));
      if (flat.round_robin) reading->topology.round_robin = true;
      std::vector<std::vector<std::uint32_t>> by_ep(flat.ep);
      for (std::uint64_t ep = 0; ep < flat.ep; ++ep) {
        SW_TRY(MapBuffer(reading, flat, ep, group, &by_ep[ep]));
        NoteInferred(flat, model, by_ep[ep], &reading->out.inferred);
      }
      std::vector<std::uint32_t> order;
      const bool experts = std::any_of(by_ep[0].begin(), by_ep[0].end(), [&](std::uint32_t param) {
        return reading->out.params[param].expert.has_value();
      });
      if (experts) {
        group.moe = true;
        MergeExperts(*reading, by_ep, &order);
      } else {
        order = by_ep[0];
      }
      for (const std::uint32_t param : order) {
        if (listed[param]) continue;  // another rank or stage also has it
        listed[param] = true;
        reading->out.params[param].group = static_cast<std::int32_t>(g);
        group.params.push_back(param);
      }
    }
    reading->out.groups.push_back(std::move(group));
  }
  // The list has a parameter once, even if several model-parallel ranks have it.
  std::vector<std::uint32_t>& inferred = reading->out.inferred.params;
  std::sort(inferred.begin(), inferred.end());
  inferred.erase(std::unique(inferred.begin(), inferred.end()), inferred.end());
  return {};
}

}  // namespace shardwright::checkpoints::reader
