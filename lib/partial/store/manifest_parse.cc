// SPDX-License-Identifier: Apache-2.0
// Parses the texts of a store.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/exec/manifest.h"
#include "partial/store/manifest.h"
#include "partial/store/manifest_internal.h"
#include "support/json/json.h"

namespace shardwright::partial {
namespace {

using json::Json;

/// Reads fields of one text. Keeps the first error;
/// values that are read after an error are meaningless.
class Fields {
 public:
  Fields(std::string_view text, std::string where, std::string_view kind)
      : where_(std::move(where)) {
    sum_ = exec::CheckTextSum(text, where_);
    Parse(text);
    CheckHead(kind);
  }

  /// Reads a part of a text, without a digest.
  Fields(std::string_view text, std::string where) : where_(std::move(where)) {
    Parse(text);
    if (!root_.is_object()) Wrong("not a JSON object");
  }

  void CheckHead(std::string_view kind) {
    if (!root_.is_object()) return Wrong("not a JSON object");
    if (const std::string found = Text(root_, "kind"); found != kind) {
      Wrong(StrCat("\"kind\": expected ", kind, ", found ", found));
    }
    const std::uint64_t schema = Number(root_, "schema");
    if (ok() && schema != kStoreSchema) {
      error_ = {Errc::kUnsupported,
                StrCat(where_, ": expected schema ", kStoreSchema, ", found schema ", schema,
                       "; use a newer version of Shardwright"),
                0, -1};
    }
  }

  const Json& root() const { return root_; }
  bool ok() const { return error_.message.empty(); }

  template <class T>
  Result<T> Done(T value) {
    if (!ok()) return tl::unexpected<Error>(std::move(error_));
    SW_TRY(std::move(sum_));
    return value;
  }

  void Wrong(const std::string& what) {
    if (ok()) error_ = {Errc::kBadInput, where_ + ": " + what, 0, -1};
  }

  const Json& At(const Json& object, const char* key) {
    static const Json kNothing;
    if (object.is_object()) {
      if (const auto at = object.find(key); at != object.end()) return *at;
    }
    Wrong("\"" + std::string(key) + "\" is missing");
    return kNothing;
  }

  std::uint64_t Number(const Json& value, const std::string& what, bool) {
    if (value.is_number_unsigned()) return value.get<std::uint64_t>();
    Wrong(what + ": a number from 0 up expected");
    return 0;
  }
  std::uint64_t Number(const Json& object, const char* key) {
    return Number(At(object, key), "\"" + std::string(key) + "\"", true);
  }
  std::uint32_t Number32(const Json& object, const char* key) {
    const std::uint64_t number = Number(object, key);
    if (number > std::numeric_limits<std::uint32_t>::max()) {
      Wrong(StrCat("\"", key, "\": ", number, " is too large"));
    }
    return static_cast<std::uint32_t>(number);
  }
  double Real(const Json& object, const char* key) {
    const Json& value = At(object, key);
    if (value.is_number()) return value.get<double>();
    Wrong("\"" + std::string(key) + "\": a number expected");
    return 0;
  }
  std::string Text(const Json& object, const char* key) {
    const Json& value = At(object, key);
    if (value.is_string()) return value.get<std::string>();
    Wrong(StrCat("\"", key, "\": a string expected"));
    return {};
  }
  const Json& List(const Json& value, const std::string& what) {
    static const Json kEmpty = Json::array();
    if (value.is_array()) return value;
    Wrong(what + ": a list expected");
    return kEmpty;
  }
  template <class T>
  std::vector<T> Numbers(const Json& value, const std::string& what) {
    std::vector<T> out;
    for (const Json& one : List(value, what)) {
      const std::uint64_t number = Number(one, what, true);
      if (number > std::numeric_limits<T>::max())
        Wrong(StrCat(what, ": ", number, " is too large"));
      out.push_back(static_cast<T>(number));
    }
    return out;
  }
  Counts Table(const Json& object, const char* key) {
    Counts out;
    for (const Json& row : List(At(object, key), key))
      out.push_back(Numbers<std::uint64_t>(row, key));
    return out;
  }

  exec::Digest Hash(const Json& value, const std::string& what) {
    exec::Digest digest{};
    const std::string text = value.is_string() ? value.get<std::string>() : "";
    bool good = text.size() == 2 * digest.size();
    for (std::size_t i = 0; good && i < text.size(); ++i) {
      const char c = text[i];
      const bool digit = c >= '0' && c <= '9';
      good = digit || (c >= 'a' && c <= 'f');
      const auto nibble = static_cast<std::uint8_t>(digit ? c - '0' : c - 'a' + 10);
      digest[i / 2] = static_cast<std::uint8_t>((digest[i / 2] << 4) | nibble);
    }
    if (!good) Wrong(what + ": a digest of 32 hexadecimal digits expected");
    return digest;
  }

  BlobRef Blob(const Json& list, std::size_t first, const std::string& what) {
    BlobRef blob;
    const std::size_t size = list.size();
    if (!list.is_array() || size < first + 4 || size > first + 5 ||
        (size == first + 5 && list[first + 4] != "zstd")) {
      Wrong(what + ": digest, bytes, crc32 and head expected");
      return blob;
    }
    blob.digest = Hash(list[first], what);
    blob.bytes = Number(list[first + 1], what, true);
    const std::uint64_t crc = Number(list[first + 2], what, true);
    if (crc > 0xffff'ffff) Wrong(what + ": a checksum of 32 bits expected");
    blob.crc32 = static_cast<std::uint32_t>(crc);
    blob.head = Hash(list[first + 3], what);
    blob.zstd = size == first + 5;
    return blob;
  }

  LevelState Level(const Json& object, const char* key) {
    const Json& from = At(object, key);
    LevelState level;
    level.checkpoints = Number(from, "checkpoints");
    level.cursor = Numbers<std::uint64_t>(At(from, "cursor"), "cursor");
    level.tokens = Table(from, "tokens");
    level.covered = Table(from, "covered");
    level.version = Table(from, "version");
    level.saved_at = Table(from, "saved_at");
    return level;
  }

  /// Returns a module's components; an empty module after an error.
  StoredModule Module(const Json& module, const std::string& name) {
    StoredModule held;
    for (const Component component : kAllComponents) {
      const auto found = module.find(std::string(Name(component)));
      if (found == module.end()) continue;
      const std::string what = name + " " + std::string(Name(component));
      StoredComponent one;
      one.blob = Blob(*found, 1, what);
      if (!ok()) return {};
      one.version = Number((*found)[0], what, true);
      held[static_cast<std::size_t>(component)] = one;
    }
    return held;
  }

  DynamicK Dynamic(const Json& from) {
    DynamicK dynamic;
    dynamic.experts = Number32(from, "experts");
    dynamic.k = Number32(from, "k");
    dynamic.levels = Number32(from, "levels");
    dynamic.limit = Real(from, "limit");
    dynamic.spent = Real(from, "spent");
    dynamic.total = Real(from, "total");
    const Json& predict = At(from, "predict");
    if (!predict.is_boolean()) Wrong("\"predict\": true or false expected");
    dynamic.predict = predict.is_boolean() && predict.get<bool>();
    dynamic.iterations = Number(from, "iterations");
    if (const Status possible = Validate(dynamic); !possible) Wrong(possible.error().message);
    return dynamic;
  }

  SelectionState State(const Json& object) {
    const Json& from = At(object, "state");
    SelectionState state;
    state.snapshot = Level(from, "snapshot");
    state.persist = Level(from, "persist");
    if (const Json& counted = At(from, "counted_to"); !counted.is_null()) {
      state.counted_to = Number(counted, "counted_to", true);
    }
    if (const auto found = from.find("dynamic_k"); from.is_object() && found != from.end()) {
      state.dynamic_k = Dynamic(*found);
    }
    return state;
  }

  LossLedger Ledger(const Json& from) {
    LossLedger ledger;
    ledger.layer_lost = Numbers<std::uint64_t>(At(from, "layer_lost"), "layer_lost");
    ledger.resumes = Numbers<std::uint64_t>(At(from, "resumes"), "resumes");
    for (const Json& layer : List(At(from, "charged"), "charged")) {
      auto& experts = ledger.charged.emplace_back();
      for (const Json& ranges : List(layer, "charged")) {
        auto& mine = experts.emplace_back();
        for (const Json& range : List(ranges, "charged")) {
          const auto ends = Numbers<std::uint64_t>(range, "charged");
          if (ends.size() != 2 || ends[0] > ends[1]) {
            Wrong("charged: pairs of iterations expected");
            break;
          }
          mine.push_back({ends[0], ends[1]});
        }
      }
    }
    return ledger;
  }

 private:
  void Parse(std::string_view text) {
    Result<Json> parsed = json::Parse(text, where_);
    if (parsed) {
      root_ = *std::move(parsed);
    } else {
      error_ = std::move(parsed).error();
    }
  }

  std::string where_;
  Json root_;
  Error error_;
  Status sum_;  // reported after errors of fields
};

/// Reads all fields but the modules.
Manifest ReadHead(Fields* in) {
  Manifest manifest;
  const Json& root = in->root();
  manifest.sequence = in->Number(root, "sequence");
  manifest.parent = in->Number(root, "parent");
  manifest.iteration = in->Number(root, "iteration");
  manifest.tag = in->Text(root, "tag");
  manifest.policy = in->Text(root, "policy");
  manifest.k_snapshot = in->Number(root, "k_snapshot");
  manifest.k_persist = in->Number(root, "k_persist");
  if (root.is_object() && root.contains("store")) manifest.store = in->Text(root, "store");
  manifest.catalogue = in->Hash(in->At(root, "catalogue"), "\"catalogue\"");
  if (const Json& passed = in->At(root, "passed"); !passed.is_null()) {
    manifest.passed = in->Blob(passed, 0, "\"passed\"");
  }
  manifest.state = in->State(root);
  return manifest;
}

RecoveryRecord ReadRecoveryHead(Fields* in) {
  RecoveryRecord recovery;
  recovery.sequence = in->Number(in->root(), "sequence");
  recovery.manifest = in->Number(in->root(), "manifest");
  recovery.resume = in->Number(in->root(), "resume");
  recovery.abandoned = in->Numbers<std::uint64_t>(in->At(in->root(), "abandoned"), "\"abandoned\"");
  return recovery;
}

}  // namespace

Status ParseBegun(std::string_view text, const std::string& where) {
  Fields in(text, where, kBegunKind);
  SW_TRY(in.Done(true));
  return {};
}

Result<StoreHead> ParseHead(std::string_view text, const std::string& where) {
  Fields in(text, where, kStoreKind);
  StoreHead head;
  const Json& root = in.root();
  head.fingerprint = in.Hash(in.At(root, "fingerprint"), "\"fingerprint\"");
  head.modules = in.Number(root, "modules");
  head.experts = in.Numbers<std::uint32_t>(in.At(root, "experts"), "\"experts\"");
  head.layer_id = in.Numbers<std::uint32_t>(in.At(root, "layer_id"), "\"layer_id\"");
  if (head.layer_id.size() != head.experts.size())
    in.Wrong("\"layer_id\" and \"experts\" differ in length");
  for (const Json& word : in.List(in.At(root, "keep"), "\"keep\"")) {
    const auto component = ParseComponent(word.is_string() ? word.get<std::string>() : "");
    if (!component) {
      in.Wrong("\"keep\": " + component.error().message);
      break;
    }
    head.keep[static_cast<std::size_t>(*component)] = true;
  }
  if (root.contains("id")) head.id = in.Text(root, "id");
  return in.Done(std::move(head));
}

Result<Manifest> ParseManifest(std::string_view text, const std::string& where) {
  Fields in(text, where, kManifestKind);
  Manifest manifest = ReadHead(&in);
  for (const Json& module : in.List(in.At(in.root(), "modules"), "\"modules\"")) {
    if (!in.ok()) break;
    manifest.names.push_back(in.Text(module, "module"));
    manifest.modules.push_back(in.Module(module, manifest.names.back()));
    for (const auto& held : manifest.modules.back()) {
      if (!held || held->version <= manifest.iteration) continue;
      in.Wrong(StrCat(manifest.names.back(), ": version ", held->version,
                      " is above the checkpoint's iteration ", manifest.iteration));
    }
  }
  return in.Done(std::move(manifest));
}

Result<ManifestLines> SplitManifest(std::string text, const std::string& where) {
  const std::size_t begin = text.find(kModulesBegin);
  if (begin == std::string::npos || begin == 0 || !text.ends_with(kModulesEnd)) {
    // Formatted differently, but possibly still a manifest.
    SW_TRY_ASSIGN(const Manifest manifest, ParseManifest(text, where));
    std::string again = ToText(manifest);
    if (manifest.modules.empty())
      return Fail(Errc::kBadInput, where, ": the manifest has no modules");
    return SplitManifest(std::move(again), where);
  }
  Fields in(text.substr(0, begin - 1) + "}", where);
  in.CheckHead(kManifestKind);
  ManifestLines out;
  SW_TRY_ASSIGN(out.head, in.Done(ReadHead(&in)));
  SW_TRY(exec::CheckTextSum(text, where));
  out.text = std::make_shared<const std::string>(std::move(text));
  std::string_view rest = *out.text;
  rest.remove_prefix(begin + kModulesBegin.size());
  rest.remove_suffix(std::min(rest.size(), kModulesEnd.size()));
  while (!rest.empty()) {
    const std::size_t end = std::min(rest.find('\n'), rest.size());
    std::string_view line = rest.substr(0, end);
    if (line.ends_with(',')) line.remove_suffix(1);
    out.lines.push_back(line);
    rest.remove_prefix(std::min(rest.size(), end + 1));
  }
  return out;
}

Result<StoredModule> ParseModule(std::string_view line, const std::string& name,
                                 const std::string& where) {
  Fields in(line, where);
  const std::string found = in.Text(in.root(), "module");
  if (found != name) in.Wrong("module " + name + " expected, found " + found);
  return in.Done(in.Module(in.root(), name));
}

Result<TokenRecord> ParseTokens(std::string_view text, const std::string& where) {
  Fields in(text, where, kTokensKind);
  TokenRecord record;
  record.parent = in.Number(in.root(), "parent");
  if (in.ok() && in.root().contains("sequence")) {
    record.sequence = in.Number(in.root(), "sequence");
  }
  for (const Json& sum : in.List(in.At(in.root(), "sums"), "\"sums\"")) {
    if (!in.ok()) break;
    record.sums.push_back({in.Number(sum, "iteration"), in.Table(sum, "tokens")});
  }
  return in.Done(std::move(record));
}

Result<RecoveryRecord> ParseRecovery(std::string_view text, const std::string& where) {
  Fields in(text, where, kRecoveryKind);
  RecoveryRecord recovery = ReadRecoveryHead(&in);
  recovery.state = in.State(in.root());
  if (const Json& ledger = in.At(in.root(), "ledger"); !ledger.is_null()) {
    recovery.ledger = in.Ledger(ledger);
  }
  if (in.ok() && in.root().contains("older")) {
    recovery.older.emplace();
    for (const auto& [name, version] : in.root()["older"].items()) {
      (*recovery.older)[name] = in.Number(version, "\"older\"", true);
    }
  }
  return in.Done(std::move(recovery));
}

Result<RecoveryRecord> ParseRecoveryHead(std::string_view text, const std::string& where) {
  const std::size_t state = text.find(",\"state\":");
  if (state == std::string_view::npos) return ParseRecovery(text, where);  // formatted differently
  SW_TRY(exec::CheckTextSum(text, where));
  Fields in(std::string(text.substr(0, state)) + "}", where);
  in.CheckHead(kRecoveryKind);
  RecoveryRecord recovery = ReadRecoveryHead(&in);
  return in.Done(std::move(recovery));
}

}  // namespace shardwright::partial
