// SPDX-License-Identifier: Apache-2.0
#include "partial/agent/memory/memory_replay.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/layout/states.h"
#include "engine/tensor/convert.h"
#include "partial/store/write_blobs.h"
#include "support/base/text.h"

namespace shardwright::partial {
namespace {

/// Maximum number of elements of a parameter that are computed at once: about 20 MiB per thread.
constexpr std::uint64_t kMostElems = std::uint64_t{1} << 20;

BlobRef SumsOf(std::span<const std::byte> bytes, const std::vector<std::uint32_t>& unit_bytes) {
  std::vector<exec::UnitSum> sums;
  sums.reserve(unit_bytes.size());
  for (const std::uint32_t unit : unit_bytes) {
    sums.push_back(exec::SumOf(bytes.first(unit)));
    bytes = bytes.subspan(unit);
  }
  return Summarize(sums);
}

/// Applies the steps of all parameters to copies of their blobs.
/// \error kStopped; as MakeSteps
Status MakeParams(const ReplayLog& log, LogReads& reads, const std::function<bool()>& stop,
                  ReplayWorkspace* work, ModuleReplay* one) {
  for (std::size_t p = 0; p < one->chain.params.size(); ++p) {
    const ReplayedParam& param = one->chain.params[p];
    const std::vector<ReplayStep> steps = StepsOf(one->chain, p, log);
    if (steps.empty()) continue;
    std::vector<std::span<std::byte>> places;
    const auto add = [&](const BlobTensor& tensor) {
      const BlobRoom& room = one->rooms[static_cast<std::size_t>(tensor.component)];
      places.push_back(room.bytes().subspan(tensor.offset, param.elems * sizeof(float)));
    };
    add(param.param);
    for (const BlobTensor& state : param.states) add(state);
    const std::uint64_t range = RangeOf(one->chain, p, kMostElems);
    for (std::uint64_t first = 0; first < param.elems; first += range) {
      if (stop && stop()) return Fail(Errc::kStopped, kReplayStopped);
      const std::uint64_t count = std::min(range, param.elems - first);
      work->values.resize(places.size() * count);
      std::vector<std::span<float>> arrays;
      for (std::size_t i = 0; i < places.size(); ++i) {
        arrays.push_back(std::span(work->values).subspan(i * count, count));
        std::memcpy(arrays[i].data(), places[i].data() + first * sizeof(float),
                    count * sizeof(float));
      }
      SW_TRY(MakeSteps(steps, first, arrays, reads, &work->gradient));
      for (std::size_t i = 0; i < places.size(); ++i) {
        std::memcpy(places[i].data() + first * sizeof(float), arrays[i].data(),
                    count * sizeof(float));
      }
    }
  }
  return {};
}

/// Computes weights with a master by rounding the master.
Status RoundWeights(const Module& module, const layout::ShardMap& map, ModuleReplay* one) {
  const BlobRoom& weights = one->rooms[static_cast<std::size_t>(Component::kWeights)];
  if (!weights) return {};
  for (const ModuleTensor& tensor : module.part(Component::kWeights).tensors) {
    const layout::LogicalTensor& logical = map.tensors[tensor.tensor];
    const auto param = std::ranges::find(one->chain.params, logical.name, &ReplayedParam::name);
    if (logical.state != layout::kWeight || param == one->chain.params.end() ||
        param->param.component != Component::kMaster) {
      continue;
    }
    if (!CanConvert(DType::kF32, logical.dtype)) {
      return Fail(Errc::kUnsupported, Quoted(logical.name),
                  ": float32 master weights cannot be rounded to ", Name(logical.dtype));
    }
    const BlobRoom& master = one->rooms[static_cast<std::size_t>(Component::kMaster)];
    Convert(DType::kF32, master.bytes().subspan(param->param.offset, param->elems * sizeof(float)),
            logical.dtype, weights.bytes().subspan(tensor.offset, tensor.bytes));
  }
  return {};
}

}  // namespace

Status MakeReplay(const Module& module, const layout::ShardMap& map, const ReplayLog& log,
                  LogReads& reads, const std::shared_ptr<MemoryPool>& pool,
                  const std::function<bool()>& stop, ReplayWorkspace* work, ModuleReplay* one) {
  for (std::size_t c = 0; c < kComponents; ++c) {
    if (!one->rooms[c]) continue;
    const MemoryBlob& old = *one->old[c];
    std::ranges::copy(old.bytes(), one->rooms[c].bytes().begin());
    if (SumsOf(one->rooms[c].bytes(), old.unit_bytes()).digest != old.ref().digest) {
      return BadInput("blob ", exec::Hex(old.ref().digest),
                      " is corrupt: its content has changed in memory");
    }
  }
  SW_TRY(MakeParams(log, reads, stop, work, one));
  SW_TRY(RoundWeights(module, map, one));
  for (std::size_t c = 0; c < kComponents; ++c) {
    if (!one->rooms[c]) continue;
    const MemoryBlob& old = *one->old[c];
    const BlobRef ref = SumsOf(one->rooms[c].bytes(), old.unit_bytes());
    one->made[c] =
        ref.digest == old.ref().digest
            ? one->old[c]
            : std::make_shared<const MemoryBlob>(pool, one->rooms[c].Take(), ref, old.unit_bytes());
  }
  one->rooms.clear();
  return {};
}

Result<ModuleReplay> FindReplay(const checkpoints::Checkpoint& checkpoint, const Module& module,
                                std::uint32_t index, const StoredModule& held, const BlobMap& blobs,
                                std::uint64_t to, ReplayLog* log) {
  ModuleReplay out;
  out.module = index;
  SW_TRY_ASSIGN(out.chain, FindChain(checkpoint, module, held, to, log));
  for (std::size_t c = 0; c < kComponents; ++c) {
    if (held[c] && held[c]->version != to) out.old[c] = blobs.at(held[c]->blob.digest);
  }
  return out;
}

Status ReserveReplay(const std::shared_ptr<MemoryPool>& pool, ModuleReplay* one) {
  for (const BlobPtr& old : one->old) {
    if (!old) {
      one->rooms.emplace_back();
      continue;
    }
    const std::uint64_t size = old->ref().bytes;
    SW_TRY_ASSIGN(BlobMemory buffer, pool->Take(size));
    one->rooms.emplace_back(pool, std::move(buffer), size);
  }
  return {};
}

}  // namespace shardwright::partial
