#include "dialect/zero/reading.h"

namespace shardwright::dialect::reader {
namespace {

using Names = std::unordered_map<std::string, std::string>;

/// Names by the names that hold their data, as the file has them.
Result<std::vector<std::pair<std::string, std::string>>> PairsOf(
    const Node* root, const std::function<bool(const std::string&)>& trainable) {
  std::vector<std::pair<std::string, std::string>> out;
  const Node* shared = root->Find("shared_params");
  if (shared == nullptr || !shared->is_dict()) return out;
  for (std::size_t i = 0; i < shared->entry_count(); ++i) {
    SW_TRY_ASSIGN(const std::string_view alias, pickle::AsString(shared->key(i)));
    SW_TRY_ASSIGN(const std::string_view holder, pickle::AsString(shared->value(i)));
    // Whichever name the optimizer knows holds the data.
    const bool swapped = trainable(std::string(alias)) && !trainable(std::string(holder));
    out.emplace_back(swapped ? holder : alias, swapped ? alias : holder);
  }
  return out;
}

/// Holders that are neither in the module nor trained, and for each the first of its other names.
Names HeirsOf(const Node* module, const Names& holders,
              const std::function<bool(const std::string&)>& trainable) {
  Names heirs;
  for (std::size_t i = 0; i < module->entry_count(); ++i) {
    if (!module->key(i)->is_string()) continue;
    const auto tie = holders.find(module->key(i)->text);
    if (tie == holders.end() || trainable(tie->second)) continue;
    if (module->Find(tie->second) == nullptr) heirs.try_emplace(tie->second, tie->first);
  }
  return heirs;
}

}  // namespace

Result<Ties> TiesOf(const Node* root, const Node* module,
                    const std::function<bool(const std::string&)>& trainable, bool lists_frozen) {
  Ties out;
  SW_TRY_ASSIGN(out.aliases, PairsOf(root, trainable));
  if (out.aliases.empty() || module == nullptr || lists_frozen) return out;
  const Names heirs = HeirsOf(module, Names(out.aliases.begin(), out.aliases.end()), trainable);
  std::vector<std::pair<std::string, std::string>> kept;
  for (auto& [alias, holder] : out.aliases) {
    const auto heir = heirs.find(holder);
    if (heir != heirs.end()) out.left_out.emplace(alias, holder);
    if (heir != heirs.end() && heir->second == alias) continue;
    kept.emplace_back(alias, heir == heirs.end() ? holder : heir->second);
  }
  out.aliases = std::move(kept);
  return out;
}

std::string LeftOutToo(const std::string& file, const std::string& name) {
  return file + ": \"" + name +
         "\" is another name of a frozen parameter that was left out when it was saved; no file "
         "holds "
         "its data, so it is left out too";
}

}  // namespace shardwright::dialect::reader
