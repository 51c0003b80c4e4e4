// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>
#include <utility>

#include "files/dcp/index.h"

namespace shardwright::dcp {
namespace {

std::string What(const Entry& entry) {
  if (!entry.is_tensor) return "an object";
  return "a tensor " + std::string(Name(entry.dtype)) + " " + ToString(entry.shape);
}

}  // namespace

Status IndexUnion::CheckSame(std::uint32_t first, const Entry& other,
                             const std::string& name) const {
  const Entry& entry = all_.entries[first];
  const bool same =
      entry.is_tensor == other.is_tensor &&
      (!entry.is_tensor || (entry.dtype == other.dtype && entry.shape == other.shape));
  const std::string& origin = names_[origins_[first]];
  if (!same) {
    return Fail(Errc::kBadInput, name, ": \"", other.name, "\" is ", What(other), ", in ", origin,
                " ", What(entry));
  }
  if (entry.path == other.path) return {};
  return Fail(Errc::kBadInput, name, ": planner_data: \"", other.name,
              "\" has another path than in ", origin);
}

Status IndexUnion::Add(const std::string& name, Index index) {
  const auto number = static_cast<std::uint32_t>(names_.size());
  names_.push_back(name);
  if (all_.entries.empty()) all_.has_paths = index.has_paths;
  if (!index.entries.empty() && index.has_paths != all_.has_paths) {
    return Fail(Errc::kBadInput, name, ": ",
                (index.has_paths ? "has planner_data" : "has no planner_data"), ", unlike ",
                names_[origins_.front()]);
  }
  std::vector<std::uint32_t> file_numbers;
  for (std::string& file : index.files) {
    const auto [at, fresh] = files_.emplace(file, static_cast<std::uint32_t>(all_.files.size()));
    if (fresh) all_.files.push_back(std::move(file));
    file_numbers.push_back(at->second);
  }
  std::vector<std::uint32_t> transform_numbers;
  for (std::vector<std::string>& list : index.transforms) {
    const auto at = std::find(all_.transforms.begin(), all_.transforms.end(), list);
    transform_numbers.push_back(static_cast<std::uint32_t>(at - all_.transforms.begin()));
    if (at == all_.transforms.end()) all_.transforms.push_back(std::move(list));
  }
  const auto renumber = [&](Place* place) {
    place->file = file_numbers[place->file];
    place->transforms = transform_numbers[place->transforms];
  };
  for (Entry& entry : index.entries) {
    if (!entry.is_tensor) renumber(&entry.at);
    for (Chunk& chunk : entry.chunks) renumber(&chunk.at);
    const auto [at, fresh] =
        entries_.emplace(entry.name, static_cast<std::uint32_t>(all_.entries.size()));
    if (fresh) {
      all_.ranks_differ = all_.ranks_differ || number > 0;
      all_.entries.push_back(std::move(entry));
      origins_.push_back(number);
      more_.emplace_back();
      continue;
    }
    SW_TRY(CheckSame(at->second, entry, name));
    if (!entry.is_tensor) {
      more_[at->second].push_back(entry.at);
      continue;
    }
    std::vector<Chunk>& chunks = all_.entries[at->second].chunks;
    std::move(entry.chunks.begin(), entry.chunks.end(), std::back_inserter(chunks));
  }
  return {};
}

/// Keeps the first of several chunks at the same offsets and records the others as copies.
Status IndexUnion::FindCopies(std::uint32_t number) {
  Entry& entry = all_.entries[number];
  for (const Place& at : more_[number]) all_.copies.push_back({number, 0, at});
  std::vector<Chunk> chunks = std::exchange(entry.chunks, {});
  std::stable_sort(chunks.begin(), chunks.end(),
                   [](const Chunk& a, const Chunk& b) { return a.offsets < b.offsets; });
  for (Chunk& chunk : chunks) {
    if (entry.chunks.empty() || entry.chunks.back().offsets != chunk.offsets) {
      entry.chunks.push_back(std::move(chunk));
      continue;
    }
    const Chunk& first = entry.chunks.back();
    if (first.sizes != chunk.sizes) {
      return Fail(Errc::kBadInput, "tensor \"", entry.name, "\": chunk at ",
                  ToString(chunk.offsets), " is ", ToString(first.sizes), " in ",
                  all_.files[first.at.file], " and ", ToString(chunk.sizes), " in ",
                  all_.files[chunk.at.file]);
    }
    all_.copies.push_back({number, static_cast<std::uint32_t>(entry.chunks.size() - 1), chunk.at});
  }
  return {};
}

/// Numbers the entries as the planner data of one index would: the last rank first.
void IndexUnion::Plan() {
  std::vector<std::uint32_t> next(names_.size() + 1, 0);  // by origin
  for (const std::uint32_t origin : origins_) ++next[origin];
  for (std::size_t i = names_.size(), after = 0; i-- > 0;) {
    const std::uint32_t count = next[i];
    next[i] = static_cast<std::uint32_t>(after);
    after += count;
  }
  for (std::uint32_t i = 0; i < all_.entries.size(); ++i) {
    all_.entries[i].planned = next[origins_[i]]++;
  }
}

Result<Index> IndexUnion::Finish() && {
  if (all_.ranks_differ) Plan();
  for (std::uint32_t i = 0; i < all_.entries.size(); ++i) SW_TRY(FindCopies(i));
  if (all_.has_paths) SW_TRY(CheckPaths(all_));
  return std::move(all_);
}

}  // namespace shardwright::dcp
