// SPDX-License-Identifier: Apache-2.0
#include "partial/gradient_log/submitted_gradients.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "partial/gradient_log/log.h"
#include "support/base/checked.h"
#include "support/base/text.h"
#include "support/json/json.h"

namespace shardwright::partial {
namespace {

using json::Json;

/// Limits for a trainer's description.
constexpr std::size_t kNameBytes = 4096;
constexpr std::size_t kPieces = std::size_t{1} << 16;  // per module
constexpr std::uint64_t kGreatest = std::numeric_limits<std::int64_t>::max();

Result<std::uint64_t> Whole(const Json& in, const char* name, std::uint64_t last,
                            const std::string& where) {
  const Json* const value = in.is_object() ? json::Find(in, name) : nullptr;
  if (value == nullptr) return BadInput(where, ": ", Quoted(name), " is missing");
  return json::WholeOf(*value, 0, last, where + ": " + Quoted(name));
}

Result<std::string> Text(const Json& in, const char* name, const std::string& where) {
  const Json* const value = in.is_object() ? json::Find(in, name) : nullptr;
  if (value != nullptr && value->is_string()) return value->get<std::string>();
  return BadInput(where, ": ", Quoted(name), ": a text expected, found ",
                  (value == nullptr ? "nothing" : json::KindOf(*value)));
}

Result<const Json*> List(const Json& in, const char* name, const std::string& where) {
  const Json* const value = in.is_object() ? json::Find(in, name) : nullptr;
  if (value != nullptr && value->is_array()) return value;
  return BadInput(where, ": ", Quoted(name), ": a list expected, found ",
                  (value == nullptr ? "nothing" : json::KindOf(*value)));
}

Status AddPiece(const Json& in, const Handing& handing, const std::string& where,
                std::vector<Handing::Piece>* pieces) {
  Handing::Piece piece;
  SW_TRY_ASSIGN(piece.param, Text(in, "param", where));
  const std::string who = where + ": parameter " + Quoted(piece.param);
  SW_TRY_ASSIGN(piece.elems, Whole(in, "elems", kGreatest, who));
  SW_TRY_ASSIGN(piece.first, Whole(in, "first", piece.elems, who));
  SW_TRY_ASSIGN(piece.count, Whole(in, "count", piece.elems - piece.first, who));
  SW_TRY_ASSIGN(piece.offset, Whole(in, "offset", handing.place_bytes, who));
  SW_TRY_ASSIGN(const std::uint64_t tensor, Whole(in, "tensor", handing.tensors, who));
  SW_TRY_ASSIGN(const std::string name, Text(in, "dtype", who));
  const auto dtype = DTypeFromName(name);
  if (!dtype || (*dtype != DType::kF32 && *dtype != DType::kBF16 && *dtype != DType::kF16)) {
    return Fail(Errc::kUnsupported, who,
                ": gradients in float32, bfloat16 or float16 expected, found ", Quoted(name));
  }
  piece.dtype = *dtype;
  piece.tensor = static_cast<std::uint32_t>(tensor);
  const std::uint64_t item = ItemSize(piece.dtype);
  if (tensor >= handing.tensors || piece.count > (handing.place_bytes - piece.offset) / item) {
    return BadInput(who, ": out of range: ", piece.count, " elements at byte ", piece.offset,
                    " in a slot of ", handing.place_bytes, " bytes, index ", tensor, " of ",
                    handing.tensors, " tensors");
  }
  // Size limit of a piece in a log.
  const std::uint64_t most = kLogPieceBytes / item;
  if (piece.param.size() > kNameBytes || pieces->size() + CeilDiv(piece.count, most) > kPieces) {
    return Fail(Errc::kLimit, where, ": a name of more than ", kNameBytes,
                " bytes, or a module with more than ", kPieces, " pieces");
  }
  for (std::uint64_t left = piece.count; left > 0; left -= piece.count) {
    piece.count = std::min(left, most);
    pieces->push_back(piece);
    piece.first += piece.count;
    piece.offset += piece.count * item;
  }
  return {};
}

}  // namespace

Result<Handing> ParseHanding(std::string_view text, std::uint32_t writer,
                             const std::string& where) {
  constexpr std::uint64_t kMany = std::uint64_t{1} << 24;
  SW_TRY_ASSIGN(const Json root, json::Parse(text, where));
  Handing out;
  out.writer = writer;
  SW_TRY_ASSIGN(out.recovery, Whole(root, "recovery", kGreatest, where));
  SW_TRY_ASSIGN(out.begun, Whole(root, "begun", kGreatest, where));
  // Trainers of older versions do not send it.
  if (root.is_object() && json::Find(root, "every") != nullptr) {
    SW_TRY_ASSIGN(out.every, Whole(root, "every", kGreatest, where));
  }
  SW_TRY_ASSIGN(const std::uint64_t level, Whole(root, "zstd", 19, where));
  out.zstd_level = static_cast<int>(level);
  SW_TRY_ASSIGN(const std::uint64_t places, Whole(root, "places", kMany, where));
  out.places = static_cast<std::uint32_t>(places);
  SW_TRY_ASSIGN(out.place_bytes, Whole(root, "place_bytes", std::uint64_t{1} << 44, where));
  if (places == 0 || out.place_bytes == 0 || places > kGreatest / out.place_bytes) {
    return BadInput(where, ": invalid shared memory: ", places, " slots of ", out.place_bytes,
                    " bytes");
  }
  SW_TRY_ASSIGN(const std::uint64_t tensors, Whole(root, "tensors", kMany, where));
  out.tensors = static_cast<std::uint32_t>(tensors);
  SW_TRY_ASSIGN(const Json* const modules, List(root, "modules", where));
  for (const Json& each : *modules) {
    Handing::Module module;
    SW_TRY_ASSIGN(module.name, Text(each, "name", where));
    SW_TRY_ASSIGN(const Json* const pieces, List(each, "pieces", where));
    for (const Json& piece : *pieces) SW_TRY(AddPiece(piece, out, where, &module.pieces));
    out.modules.push_back(std::move(module));
  }
  return out;
}

}  // namespace shardwright::partial
