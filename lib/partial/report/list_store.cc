// SPDX-License-Identifier: Apache-2.0
#include "partial/report/list_store.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "engine/exec/integrity.h"
#include "partial/report/report_json.h"
#include "partial/save/save.h"

namespace shardwright::partial {
namespace {

using Json = nlohmann::json;

ListedCheckpoint Listed(const StoredCheckpoint& checkpoint, const Manifest& manifest) {
  ListedCheckpoint row;
  row.checkpoint = checkpoint;
  row.policy = manifest.policy;
  row.k_snapshot = manifest.k_snapshot;
  row.k_persist = manifest.k_persist;
  row.dynamic_k = manifest.state.dynamic_k;
  row.oldest = manifest.iteration;
  for (std::size_t i = 0; i < manifest.modules.size(); ++i) {
    std::uint64_t version = manifest.iteration;
    bool there = false;
    for (const auto& held : manifest.modules[i]) {
      if (!held) continue;
      there = true;
      version = std::min(version, held->version);
    }
    row.missing_modules += there ? 0 : 1;
    if (!there) continue;
    row.stale_modules += version < manifest.iteration ? 1 : 0;
    row.oldest = std::min(row.oldest, version);
    row.versions[manifest.names[i]] = version;
  }
  return row;
}

}  // namespace

Result<StoreListing> ListStore(const std::string& path) {
  SW_TRY_ASSIGN(const Store store, Store::Open(path));
  SW_TRY_ASSIGN(const std::vector<StoredCheckpoint> checkpoints, store.List());
  SW_TRY_ASSIGN(const auto last, store.LastRecovery());
  StoreListing listing;
  listing.head = store.head();
  listing.recoveries = last ? last->sequence : 0;
  for (const StoredCheckpoint& one : checkpoints) {
    const Result<Manifest> manifest = store.ReadManifest(one);
    if (!manifest && store.IsGone(one)) continue;  // removed by gc after it was listed
    if (!manifest) return tl::unexpected<Error>(manifest.error());
    listing.checkpoints.push_back(Listed(one, *manifest));
  }
  SW_TRY_ASSIGN(const auto dynamic, NewestDynamicK(store, checkpoints, last));
  if (dynamic) {
    const std::uint64_t newest = NewestIteration(checkpoints);
    listing.dynamic_k =
        ReportOf(*dynamic, listing.head.experts, IntervalBefore(checkpoints, newest), newest);
  }
  return listing;
}

Json ListingJson(const StoreListing& listing) {
  Json list = Json::array();
  for (const ListedCheckpoint& one : listing.checkpoints) {
    list.push_back(
        {{"sequence", one.checkpoint.sequence},
         {"iteration", one.checkpoint.iteration},
         {"abandoned", one.checkpoint.abandoned},
         {"policy", one.policy},
         {"k", one.k_snapshot},
         {"k_persist", one.k_persist},
         {"stale_modules", one.stale_modules},
         {"missing_modules", one.missing_modules},
         {"dynamic_k", one.dynamic_k ? DynamicKJson({*one.dynamic_k, {}, {}}) : Json(nullptr)},
         {"modules", one.versions}});
  }
  Json result = {{"fingerprint", exec::Hex(listing.head.fingerprint)},
                 {"module_count", listing.head.modules},
                 {"experts", listing.head.experts},
                 {"keep", KeepText(listing.head.keep)},
                 {"checkpoints", std::move(list)},
                 {"recoveries", listing.recoveries}};
  if (listing.dynamic_k) result["dynamic_k"] = DynamicKJson(*listing.dynamic_k);
  return result;
}

}  // namespace shardwright::partial
