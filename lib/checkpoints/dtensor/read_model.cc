// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <set>
#include <tuple>

#include "checkpoints/dtensor/read_internal.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::dtensor {
namespace {

using pickle::Node;

std::string KindText(RankTensor::Kind kind) {
  switch (kind) {
    case RankTensor::Kind::kPlain:
      return "a plain tensor";
    case RankTensor::Kind::kDTensor:
      return "a DTensor";
    case RankTensor::Kind::kSharded:
      break;
  }
  return "a ShardedTensor";
}

/// Describes the properties that must be equal on all ranks.
std::string DescribeTensor(const RankTensor& tensor) {
  std::string text =
      KindText(tensor.kind) + " " + std::string(Name(tensor.dtype)) + " " + ToString(tensor.shape);
  if (tensor.kind == RankTensor::Kind::kDTensor) {
    text += " " + layout::Explain(tensor.splits) + " on a mesh " + ToString(tensor.mesh->sizes);
    if (tensor.mesh->names) text += " (" + Joined(*tensor.mesh->names, ", ") + ")";
  }
  return text;
}

layout::CutPtr KnownCut(Reading* reading, const Shape& shape, const layout::Piece& piece,
                        const layout::Cut& cut) {
  std::vector<layout::CutPtr>& known = reading->cuts[{shape, piece.offset}];
  for (const layout::CutPtr& one : known) {
    if (*one == cut) return one;
  }
  known.push_back(std::make_shared<const layout::Cut>(cut));
  return known.back();
}

/// Finds tensors of different names that share their bytes.
class Ties {
 public:
  /// Returns the name that has the bytes: an earlier one, or the name itself.
  std::string HolderOf(const std::string& name, const RankTensor& tensor) {
    if (tensor.pieces.empty()) return {};
    const pickle::Tensor& local = *tensor.pieces.front().local->tensor;
    return holders_
        .emplace(std::tuple(local.storage, local.offset, local.shape, local.strides, tensor.shape),
                 name)
        .first->second;
  }

 private:
  using View = std::tuple<std::uint32_t, std::uint64_t, Shape, std::vector<std::uint64_t>, Shape>;
  std::map<View, std::string> holders_;
};

Status ReadRank(Reading* reading, std::uint64_t rank, std::uint32_t file,
                std::vector<std::set<std::string>>* tied_to) {
  SW_TRY_ASSIGN(const torch_pt::Document document, Open(*reading, file));
  const std::string& file_name = reading->file_name(file);
  const Node* root = document.root;
  if (!root->is_dict()) {
    return BadInput(file_name, ": a dict of tensors expected, found ", pickle::Describe(root));
  }
  TensorReader tensors(rank);
  Ties ties;
  std::size_t seen = 0;
  for (std::size_t i = 0; i < root->entry_count(); ++i) {
    if (!root->key(i)->is_string()) {
      return BadInput(file_name, ": a tensor without a name");
    }
    const std::string& name = root->key(i)->text;
    const std::string what = "tensor " + Quoted(name);
    auto tensor = tensors.Read(root->value(i));
    if (!tensor && name.ends_with("_extra_state")) {
      if (rank == 0) {
        reading->out.left_out.push_back("an entry of the state dict that is not a tensor: " + name +
                                        " (" + pickle::Describe(root->value(i)) + ")");
      }
      continue;
    }
    if (!tensor)
      return Within(Joined(std::vector<std::string>{file_name, what}, ": "),
                    std::move(tensor).error());
    auto [at, fresh] =
        reading->by_name.emplace(name, static_cast<std::uint32_t>(reading->entries.size()));
    if (fresh && rank > 0) {
      return BadInput(
          Joined(std::vector<std::string>{file_name, what, "other ranks do not have it"}, ": "));
    }
    if (fresh) {
      reading->entries.push_back({name, {}, {}});
      tied_to->emplace_back();
    }
    ++seen;
    // A rank without any of the bytes cannot decide.
    if (const std::string holder = ties.HolderOf(name, *tensor); !holder.empty()) {
      (*tied_to)[at->second].insert(holder);
    }
    SW_TRY(AddPieces(reading, rank, file, document, *tensor, what,
                     &reading->entries[at->second].spread));
  }
  if (seen == reading->entries.size()) return {};
  for (const Entry& entry : reading->entries) {
    if (root->Find(entry.name) != nullptr) continue;
    return BadInput(file_name, ": tensor ", Quoted(entry.name),
                    " is missing, but other ranks have it");
  }
  return {};
}

}  // namespace

Result<torch_pt::Document> Open(const Reading& reading, std::uint32_t file) {
  const SourceFile& source = reading.source.files[file];
  auto document = torch_pt::Parse(*source.containers.front().metadata);
  if (!document) return Within(source.name, std::move(document).error());
  return document;
}

Status AddPieces(Reading* reading, std::uint64_t rank, std::uint32_t file,
                 const torch_pt::Document& document, const RankTensor& tensor,
                 const std::string& what, Spread* spread) {
  if (!spread->known) {
    spread->known = true;
    spread->first = tensor;
    spread->first.pieces.clear();
    spread->first_rank = rank;
  } else {
    const std::string wanted = DescribeTensor(spread->first);
    const std::string found = DescribeTensor(tensor);
    if (wanted != found) {
      return BadInput(reading->file_name(file), ": ", what, " is ", found, ", on rank ",
                      spread->first_rank, " it is ", wanted);
    }
    if (tensor.all_pieces != spread->first.all_pieces) {
      return BadInput(reading->file_name(file), ": ", what,
                      ": its shard table differs from that of rank ", spread->first_rank);
    }
  }
  for (const LocalPiece& held : tensor.pieces) {
    SW_TRY_ASSIGN(const layout::Cut cut, layout::CutOf(tensor.shape, held.piece));
    SW_TRY_ASSIGN(std::vector<PlacedPart> parts,
                  reading->map.PartsOf(file, document, held.local, what));
    for (std::size_t i = 0; i < parts.size(); ++i) {
      Spread::RankPiece one;
      one.rank = rank;
      one.cut = KnownCut(reading, tensor.shape, held.piece, cut);
      one.place = parts[i].place;
      one.offset = held.piece.offset;
      one.order = std::move(parts[i].order);
      one.part = i;
      spread->held.push_back(std::move(one));
    }
  }
  return {};
}

namespace {

bool SameOrder(const layout::CutPtr& a, const layout::CutPtr& b) {
  return a == b || (a != nullptr && b != nullptr && *a == *b);
}

}  // namespace

Status AddTensor(Reading* reading, const Spread& spread, const std::string& name,
                 std::string_view state, const std::vector<std::uint32_t>& files) {
  layout::LogicalTensor tensor;
  tensor.name = name;
  tensor.state = state;
  tensor.dtype = spread.first.dtype;
  tensor.shape = spread.first.shape;
  std::map<std::tuple<std::vector<std::uint64_t>, Shape, std::size_t>, const Spread::RankPiece*>
      owners;
  for (const Spread::RankPiece& held : spread.held) {
    layout::Fragment fragment;
    fragment.cut = held.order == nullptr ? held.cut : layout::Cut::Compose(held.cut, held.order);
    fragment.at.array = reading->map.AddWhole(held.place);
    const auto [owner, fresh] =
        owners.emplace(std::tuple(held.offset, held.cut->shard(), held.part), &held);
    if (!fresh) {
      // A copy in another storage order cannot be compared.
      if (!SameOrder(owner->second->order, held.order)) continue;
      fragment.role = layout::Role::kReplica;
      const std::vector<layout::Member>& members = reading->map.map().members;
      const layout::Member& first = members[owner->second->place.member];
      const layout::Member& second = members[held.place.member];
      const std::uint64_t bytes = held.place.elems * ItemSize(held.place.dtype);
      const bool all_of_it = first.bytes == bytes && second.bytes == bytes;
      if (all_of_it && first.crc32 && second.crc32 && *first.crc32 != *second.crc32) {
        return BadInput("tensor ", Quoted(name), " ", state, ": the copies in ",
                        reading->file_name(files[owner->second->rank]), " and ",
                        reading->file_name(files[held.rank]), " differ");
      }
    }
    tensor.fragments.push_back(std::move(fragment));
  }
  reading->out.map.tensors.push_back(std::move(tensor));
  return {};
}

std::vector<std::pair<std::uint32_t, std::uint32_t>> EqualEntries(
    const Reading& reading, const std::vector<std::uint32_t>& among) {
  // Per piece: rank, offset in its storage, bytes, and checksum of the storage.
  using Piece = std::array<std::uint64_t, 4>;
  std::map<std::pair<std::string, std::vector<Piece>>, std::uint32_t> first;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> equal;
  for (const std::uint32_t at : among) {
    const Spread& spread = reading.entries[at].spread;
    std::vector<Piece> pieces;
    bool known = !spread.held.empty();
    for (const Spread::RankPiece& held : spread.held) {
      const layout::Member& member = reading.map.map().members[held.place.member];
      known = known && member.crc32.has_value() && held.order == nullptr;
      if (!known) break;
      pieces.push_back({held.rank, held.place.offset, held.place.elems, *member.crc32});
    }
    if (!known) continue;
    const auto [found, fresh] =
        first.emplace(std::pair(DescribeTensor(spread.first), std::move(pieces)), at);
    if (!fresh) equal.emplace_back(at, found->second);
  }
  return equal;
}

void TieTo(Reading* reading, std::uint32_t entry, std::uint32_t holder) {
  reading->entries[entry].alias_of = reading->entries[holder].name;
  reading->out.params[entry].alias_of = reading->entries[holder].name;
}

Status ReadModel(Reading* reading) {
  const ItemFiles& model = *reading->family.Find(Item::kModel);
  std::vector<std::set<std::string>> tied_to;
  for (std::uint64_t rank = 0; rank < model.files.size(); ++rank) {
    SW_TRY(ReadRank(reading, rank, model.files[rank], &tied_to));
  }
  if (reading->entries.empty()) {
    return BadInput(reading->file_name(model.files.front()), ": no tensors");
  }
  for (std::size_t i = 0; i < reading->entries.size(); ++i) {
    Entry& entry = reading->entries[i];
    // Tied to the same name on every rank that has a part of it.
    if (tied_to[i].size() == 1 && *tied_to[i].begin() != entry.name) {
      entry.alias_of = *tied_to[i].begin();
    }
  }
  return {};
}

}  // namespace shardwright::checkpoints::dtensor
