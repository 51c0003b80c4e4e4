// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "partial/gradient_log/log.h"
#include "support/base/checked.h"
#include "support/base/limits.h"
#include "support/base/text.h"
#include "support/json/json.h"
#include "support/os/dir.h"

namespace shardwright::partial {
namespace {

using json::Json;

constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max();

/// Reads members of one object. Reports missing ones and wrong types.
class Members {
 public:
  Members(const Json& object, std::string where) : object_(object), where_(std::move(where)) {}

  bool Has(const char* name) const {
    return object_.is_object() && json::Find(object_, name) != nullptr;
  }
  Result<const Json*> Get(const char* name, Json::value_t kind) const {
    const Json* const value = object_.is_object() ? json::Find(object_, name) : nullptr;
    const bool real = kind == Json::value_t::number_float && value != nullptr && value->is_number();
    if (value == nullptr || (value->type() != kind && !real)) {
      return BadInput(where_, ": ", Quoted(name), ": ", json::KindOf(Json(kind)),
                      " expected, found ", (value == nullptr ? "nothing" : json::KindOf(*value)));
    }
    return value;
  }
  Result<std::uint64_t> Whole(const char* name) const {
    const Json* const value = object_.is_object() ? json::Find(object_, name) : nullptr;
    if (value == nullptr) return BadInput(where_, ": ", Quoted(name), " is missing");
    return json::WholeOf(*value, 0, kMost, where_ + ": " + Quoted(name));
  }
  Result<double> Real(const char* name) const {
    SW_TRY_ASSIGN(const Json* const value, Get(name, Json::value_t::number_float));
    return value->get<double>();
  }
  Result<bool> Flag(const char* name) const {
    SW_TRY_ASSIGN(const Json* const value, Get(name, Json::value_t::boolean));
    return value->get<bool>();
  }
  Result<std::string> Text(const char* name) const {
    SW_TRY_ASSIGN(const Json* const value, Get(name, Json::value_t::string));
    return value->get<std::string>();
  }
  Result<exec::Digest> Digest(const char* name) const {
    SW_TRY_ASSIGN(const std::string text, Text(name));
    exec::Digest digest{};
    const auto digit = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
    const bool good = text.size() == 2 * digest.size() &&
                      text.find_first_not_of("0123456789abcdef") == std::string::npos;
    if (!good)
      return BadInput(where_, ": ", Quoted(name), ": digest expected, found ", Quoted(text));
    for (std::size_t i = 0; i < digest.size(); ++i) {
      digest[i] = static_cast<std::uint8_t>(digit(text[2 * i]) * 16 + digit(text[2 * i + 1]));
    }
    return digest;
  }
  const std::string& where() const { return where_; }

 private:
  const Json& object_;
  std::string where_;
};

Json JsonOf(const LogStep& logged) {
  const optimizer_steps::Step& step = logged.step;
  Json out = {{"optimizer", optimizer_steps::Name(step.optimizer)},
              {"fused", step.rounding == optimizer_steps::Rounding::kFused},
              {"count", step.count},
              {"gradient_factor", step.gradient_factor},
              {"skipped", step.skipped},
              {"first_momentum", step.first_momentum}};
  Json options = Json::object();
  for (const optimizer_steps::Option& option : optimizer_steps::OptionsOf(step))
    options[option.name] = option.value;
  if (!options.empty()) out["options"] = std::move(options);
  if (logged.roots) out["roots"] = exec::Hex(*logged.roots);
  return out;
}

Json JsonOf(const LogPiece& piece) {
  return {{"param", piece.param},
          {"elems", piece.elems},
          {"first", piece.first},
          {"count", piece.count},
          {"dtype", shardwright::Name(piece.dtype)},
          {"step", piece.step},
          {"bytes", piece.bytes},
          {"zstd", piece.zstd},
          {"digest", exec::Hex(piece.digest)}};
}

Result<LogStep> StepFrom(const Members& in) {
  SW_TRY_ASSIGN(const std::string optimizer, in.Text("optimizer"));
  SW_TRY_ASSIGN(const Json* const listed, in.Get("options", Json::value_t::object));
  std::vector<optimizer_steps::Option> options;
  for (const auto& [name, value] : listed->items()) {
    SW_TRY_ASSIGN(const double number, Members(*listed, in.where()).Real(name.c_str()));
    options.push_back({name, number});
  }
  LogStep logged;
  Result<optimizer_steps::Step> step = optimizer_steps::StepOf(optimizer, options);
  if (!step) return Within(in.where(), std::move(step).error());
  logged.step = *step;
  SW_TRY_ASSIGN(const bool fused, in.Flag("fused"));
  logged.step.rounding =
      fused ? optimizer_steps::Rounding::kFused : optimizer_steps::Rounding::kSeparate;
  SW_TRY_ASSIGN(const double count, in.Real("count"));
  logged.step.count = static_cast<float>(count);
  if (!(count >= 0) || static_cast<double>(logged.step.count) != count) {
    return BadInput(in.where(), ": \"count\": float32 number that is not negative expected, found ",
                    count);
  }
  SW_TRY_ASSIGN(logged.step.gradient_factor, in.Real("gradient_factor"));
  SW_TRY_ASSIGN(logged.step.skipped, in.Flag("skipped"));
  SW_TRY_ASSIGN(logged.step.first_momentum, in.Flag("first_momentum"));
  if (in.Has("roots")) {
    SW_TRY_ASSIGN(logged.roots, in.Digest("roots"));
  }
  return logged;
}

Result<LogPiece> PieceFrom(const Members& in, const std::vector<LogStep>& steps) {
  LogPiece piece;
  SW_TRY_ASSIGN(piece.param, in.Text("param"));
  SW_TRY_ASSIGN(piece.elems, in.Whole("elems"));
  SW_TRY_ASSIGN(piece.first, in.Whole("first"));
  SW_TRY_ASSIGN(piece.count, in.Whole("count"));
  SW_TRY_ASSIGN(piece.bytes, in.Whole("bytes"));
  SW_TRY_ASSIGN(piece.zstd, in.Flag("zstd"));
  SW_TRY_ASSIGN(piece.digest, in.Digest("digest"));
  SW_TRY_ASSIGN(const std::uint64_t step, in.Whole("step"));
  SW_TRY_ASSIGN(const std::string name, in.Text("dtype"));
  const std::string where = in.where() + ": parameter " + Quoted(piece.param);
  const auto dtype = DTypeFromName(name);
  if (!dtype || (*dtype != DType::kF32 && *dtype != DType::kBF16 && *dtype != DType::kF16)) {
    return Fail(Errc::kUnsupported, where,
                ": gradients in float32, bfloat16 or float16 expected, found ", Quoted(name));
  }
  piece.dtype = *dtype;
  if (step >= steps.size()) {
    return BadInput(where, ": step ", step, " is out of range: the record has ", steps.size(),
                    " steps");
  }
  piece.step = static_cast<std::uint32_t>(step);
  if (piece.first > piece.elems || piece.count > piece.elems - piece.first) {
    return BadInput(where, ": out of range: ", piece.count, " elements from element ", piece.first,
                    " on, but the parameter has ", piece.elems);
  }
  const std::uint64_t most = kLogPieceBytes / ItemSize(piece.dtype);
  const bool skipped = steps[step].step.skipped;
  if (!skipped && piece.count > most) {
    return Fail(Errc::kLimit, where, ": piece of ", piece.count, " elements exceeds the limit of ",
                most);
  }
  const std::uint64_t plain = skipped ? 0 : piece.count * ItemSize(piece.dtype);
  if (piece.zstd ? piece.bytes > kLogPieceBytes : piece.bytes != plain) {
    return BadInput(where, ": ", plain, " bytes expected, found ", piece.bytes);
  }
  return piece;
}

Result<std::vector<LogStep>> StepsFrom(const Json& list, const std::string& where) {
  std::vector<LogStep> steps;
  for (const Json& each : list) {
    SW_TRY_ASSIGN(LogStep step, StepFrom(Members(each, where)));
    steps.push_back(step);
  }
  return steps;
}

/// Makes a square-root file: u32 RootTable::last, little-endian, and RootTable::bytes.
std::vector<std::byte> FileOf(const optimizer_steps::RootTable& roots) {
  std::vector<std::byte> bytes(4 + optimizer_steps::RootTable::kBytes);
  for (std::size_t i = 0; i < 4; ++i) bytes[i] = static_cast<std::byte>(roots.last() >> (8 * i));
  std::memcpy(bytes.data() + 4, roots.bytes().data(), optimizer_steps::RootTable::kBytes);
  return bytes;
}

std::string RootsPath(const std::string& folder, const exec::Digest& digest) {
  return folder + "/roots-" + exec::Hex(digest) + ".swr";
}

}  // namespace

std::string ToText(const LogRecord& record) {
  Json out = {{"iteration", record.iteration},
              {"recovery", record.recovery},
              {"module", record.module},
              {"steps", Json::array()},
              {"pieces", Json::array()}};
  for (const LogStep& step : record.steps) out["steps"].push_back(JsonOf(step));
  for (const LogPiece& piece : record.pieces) out["pieces"].push_back(JsonOf(piece));
  return out.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Result<LogRecord> ParseLogRecord(std::string_view text, const std::string& where) {
  SW_TRY_ASSIGN(const Json root, json::Parse(text, where));
  const Members in(root, where);
  LogRecord record;
  SW_TRY_ASSIGN(record.iteration, in.Whole("iteration"));
  SW_TRY_ASSIGN(record.recovery, in.Whole("recovery"));
  SW_TRY_ASSIGN(record.module, in.Text("module"));
  SW_TRY_ASSIGN(const Json* const steps, in.Get("steps", Json::value_t::array));
  SW_TRY_ASSIGN(record.steps, StepsFrom(*steps, where));
  SW_TRY_ASSIGN(const Json* const pieces, in.Get("pieces", Json::value_t::array));
  for (const Json& each : *pieces) {
    SW_TRY_ASSIGN(LogPiece piece, PieceFrom(Members(each, where), record.steps));
    record.pieces.push_back(std::move(piece));
  }
  return record;
}

Result<std::vector<LogStep>> ParseLogSteps(std::string_view text, const std::string& where) {
  SW_TRY_ASSIGN(const Json root, json::Parse(text, where));
  if (root.is_array()) return StepsFrom(root, where);
  return BadInput(where, ": a list expected, found ", json::KindOf(root));
}

exec::Digest DigestOf(const optimizer_steps::RootTable& roots) {
  return exec::DigestOf(FileOf(roots));
}

Result<exec::Digest> PutRoots(const std::string& folder, const optimizer_steps::RootTable& roots) {
  const std::vector<std::byte> bytes = FileOf(roots);
  const exec::Digest digest = exec::DigestOf(bytes);
  const std::string path = RootsPath(folder, digest);
  SW_TRY_ASSIGN(const bool there, os::Exists(path));
  if (!there) SW_TRY(os::ReplaceFile(path, bytes));
  return digest;
}

Result<optimizer_steps::RootTable> GetRoots(const std::string& folder, const exec::Digest& digest) {
  const std::string path = RootsPath(folder, digest);
  SW_TRY_ASSIGN(const std::vector<std::byte> bytes,
                os::ReadWholeFile(path, 4 + optimizer_steps::RootTable::kBytes));
  if (const exec::Digest found = exec::DigestOf(bytes); found != digest || bytes.size() < 4) {
    return BadInput(path, ": digest ", exec::Hex(digest), " expected, found ", exec::Hex(found));
  }
  std::uint32_t last = 0;
  for (std::size_t i = 0; i < 4; ++i) last |= std::to_integer<std::uint32_t>(bytes[i]) << (8 * i);
  auto roots = optimizer_steps::RootTable::FromBytes(std::span(bytes).subspan(4), last);
  if (!roots) return Within(path, std::move(roots).error());
  return roots;
}

}  // namespace shardwright::partial
