// SPDX-License-Identifier: Apache-2.0
// Pickles as sequences of opcodes: removed, doubled, exchanged, inserted, with other operands.

#include <algorithm>
#include <array>
#include <optional>

#include "fuzz/mutate/mutate.h"

namespace shardwright::fuzz {
namespace {

constexpr char kFrame = '\x95';

enum class Operand { kFixed, kCounted, kLines };

struct Form {
  Operand operand;
  std::size_t size;  // bytes of the operand, bytes of its length, or lines
};

Form FormOf(char opcode) {
  switch (static_cast<unsigned char>(opcode)) {
    case 'K':
    case 'h':
    case 'q':
    case 0x80:
    case 0x82:
      return {Operand::kFixed, 1};
    case 'M':
    case 0x83:
      return {Operand::kFixed, 2};
    case 'J':
    case 'j':
    case 'r':
    case 0x84:
      return {Operand::kFixed, 4};
    case 'G':
    case 0x95:
      return {Operand::kFixed, 8};
    case 'U':
    case 'C':
    case 0x8c:
    case 0x8a:
      return {Operand::kCounted, 1};
    case 'T':
    case 'B':
    case 'X':
    case 0x8b:
      return {Operand::kCounted, 4};
    case 0x8d:
    case 0x8e:
    case 0x96:
      return {Operand::kCounted, 8};
    case 'I':
    case 'L':
    case 'F':
    case 'S':
    case 'V':
    case 'g':
    case 'p':
    case 'P':
      return {Operand::kLines, 1};
    case 'c':
    case 'i':
      return {Operand::kLines, 2};
    default:
      return {Operand::kFixed, 0};
  }
}

std::size_t OperandBytes(Form form, std::string_view rest) {
  if (form.operand == Operand::kFixed) return form.size;
  if (form.operand == Operand::kCounted) {
    if (rest.size() < form.size) return rest.size();
    const std::uint64_t count = Number(rest.substr(0, form.size));
    return form.size + std::min<std::uint64_t>(count, rest.size() - form.size);
  }
  std::size_t end = 0;
  for (std::size_t line = 0; line < form.size; ++line) {
    end = rest.find('\n', end);
    if (end == std::string_view::npos) return rest.size();
    ++end;
  }
  return end;
}

using Units = std::vector<std::string>;

/// Splits a pickle into opcodes with their operands; a truncated opcode is the last unit.
Units UnitsOf(std::string_view pickle) {
  Units units;
  while (!pickle.empty()) {
    const std::size_t wanted = 1 + OperandBytes(FormOf(pickle.front()), pickle.substr(1));
    const std::size_t bytes = std::min(wanted, pickle.size());
    units.emplace_back(pickle.substr(0, bytes));
    pickle.remove_prefix(bytes);
  }
  return units;
}

using std::string_view_literals::operator""sv;

constexpr std::array kPieces = {"N"sv,
                                ")"sv,
                                "]"sv,
                                "}"sv,
                                "\x8f"sv,
                                "("sv,
                                "t"sv,
                                "l"sv,
                                "d"sv,
                                "\x85"sv,
                                "\x86"sv,
                                "\x87"sv,
                                "R"sv,
                                "\x81"sv,
                                "\x92"sv,
                                "b"sv,
                                "Q"sv,
                                "0"sv,
                                "1"sv,
                                "2"sv,
                                "a"sv,
                                "e"sv,
                                "s"sv,
                                "u"sv,
                                "o"sv,
                                "\x90"sv,
                                "\x91"sv,
                                "\x93"sv,
                                "\x94"sv,
                                "\x97"sv,
                                "\x98"sv,
                                "\x88"sv,
                                "\x89"sv,
                                "."sv,
                                "h\0"sv,
                                "h\1"sv,
                                "q\0"sv,
                                "q\7"sv,
                                "j\0\0\0\0"sv,
                                "r\1\0\0\0"sv,
                                "K\0"sv,
                                "K\3"sv,
                                "M\0\1"sv,
                                "J\xff\xff\xff\xff"sv,
                                "\x8a\1\5"sv,
                                "\x8a\0"sv,
                                "G\x3f\xf0\0\0\0\0\0\0"sv,
                                "I01\n"sv,
                                "\x8c\3abc"sv,
                                "\x8c\0"sv,
                                "X\3\0\0\0step"sv,
                                "C\2ab"sv,
                                "\x96\2\0\0\0\0\0\0\0ab"sv,
                                "\x82\1"sv,
                                "P0\n"sv,
                                "ccollections\nOrderedDict\n"sv,
                                "c__builtin__\nset\n"sv,
                                "cbuiltins\ngetattr\n"sv,
                                "ctorch\nSize\n"sv,
                                "ctorch\nFloatStorage\n"sv,
                                "ctorch\nbfloat16\n"sv,
                                "ctorch._utils\n_rebuild_tensor_v2\n"sv,
                                "ctorch._utils\n_rebuild_parameter\n"sv,
                                "ctorch.storage\nUntypedStorage\n"sv,
                                "ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"sv,
                                "ctorch.distributed.checkpoint.metadata\nTensorStorageMetadata\n"sv,
                                "cpathlib\nPosixPath\n"sv};

void ChangeFixed(std::string* unit, Chance& chance) {
  const std::size_t bytes = unit->size() - 1;
  if (bytes == 0) {
    *unit = kPieces[chance.Below(kPieces.size())];
  } else if (chance.OneIn(2)) {
    *unit = unit->front() + Little(chance.Odd(), bytes);
  } else {
    (*unit)[1] = static_cast<char>((*unit)[1] + (chance.OneIn(2) ? 1 : -1));
  }
}

void ChangeCounted(std::string* unit, std::size_t size, Chance& chance) {
  if (unit->size() < 1 + size) return;
  const std::string text = chance.Change(unit->substr(1 + size));
  std::uint64_t count = text.size();
  if (chance.OneIn(8)) count = chance.OneIn(2) ? chance.Odd() : count + 1;
  if (size == 1 && count > 255) return;
  *unit = unit->front() + Little(count, size) + text;
}

void ChangeLines(std::string* unit, Chance& chance) {
  std::string text = chance.Change(unit->substr(1));
  std::replace(text.begin(), text.end(), '\n', '_');
  const std::size_t middle = unit->front() == 'c' || unit->front() == 'i' ? text.find('_') : 0;
  if (middle != std::string::npos && middle != 0) text[middle] = '\n';
  *unit = unit->front() + text + "\n";
}

void ChangeOperand(Units* units, Chance& chance) {
  std::string& unit = (*units)[chance.Below(units->size())];
  const Form form = FormOf(unit.front());
  if (chance.OneIn(3)) {  // of another of the same kind
    std::vector<std::string> same;
    for (const std::string& other : *units) {
      if (other.front() == unit.front() && other != unit) same.push_back(other);
    }
    if (!same.empty()) {
      unit = same[chance.Below(same.size())];
      return;
    }
  }
  if (form.operand == Operand::kFixed) return ChangeFixed(&unit, chance);
  if (form.operand == Operand::kCounted) return ChangeCounted(&unit, form.size, chance);
  ChangeLines(&unit, chance);
}

void ChangeUnits(Units* units, Chance& chance) {
  const std::size_t at = chance.Below(units->size());
  const auto place = units->begin() + static_cast<std::ptrdiff_t>(at);
  const std::size_t most = std::min<std::size_t>(units->size() - at, 8);
  const auto end = place + static_cast<std::ptrdiff_t>(1 + chance.Below(most));
  const auto other = static_cast<std::ptrdiff_t>(chance.Below(units->size()));
  switch (chance.Below(7)) {
    case 0:
      units->erase(place, end);
      break;
    case 1: {
      const Units copy(place, end);
      units->insert(units->begin() + other, copy.begin(), copy.end());
      break;
    }
    case 2:
      std::iter_swap(place, units->begin() + other);
      break;
    case 3:
      units->insert(place, std::string(kPieces[chance.Below(kPieces.size())]));
      break;
    case 4:
      *place = kPieces[chance.Below(kPieces.size())];
      break;
    default:
      ChangeOperand(units, chance);
      break;
  }
  if (units->empty()) units->emplace_back("N");
}

std::string Joined(const Units& units) {
  std::string pickle;
  for (const std::string& unit : units) pickle += unit;
  return pickle;
}

/// Puts one frame around everything after its opcode, in place of frames with wrong lengths.
std::string JoinedInOneFrame(const Units& units) {
  std::optional<std::size_t> frame;
  std::string pickle;
  for (const std::string& unit : units) {
    if (unit.front() == kFrame && unit.size() == 9) {
      if (frame) continue;
      frame = pickle.size() + unit.size();
    }
    pickle += unit;
  }
  if (frame) pickle.replace(*frame - 8, 8, Little(pickle.size() - *frame, 8));
  return pickle;
}

}  // namespace

std::string MutatePickle(std::string_view bytes, Chance& chance) {
  Units units = UnitsOf(bytes);
  if (units.empty()) units.emplace_back("N.");
  for (std::size_t i = 1 + chance.Below(3); i > 0; --i) ChangeUnits(&units, chance);
  return chance.OneIn(8) ? Joined(units) : JoinedInOneFrame(units);
}

std::string MutateTwoPickles(std::string_view bytes, Chance& chance) {
  if (bytes.size() < 2 || bytes.front() == '{') return chance.Change(std::string(bytes));
  const std::size_t place = Number(bytes.substr(0, 2));
  const bool one = place < 2 || place > bytes.size();
  std::string first(bytes.substr(2, one ? bytes.size() : place - 2));
  std::string second(one ? std::string_view() : bytes.substr(place));
  std::string& changed = second.empty() || chance.OneIn(2) ? first : second;
  changed = MutatePickle(changed, chance);
  const std::size_t split = second.empty() ? 0 : 2 + first.size();
  return Little(split, 2) + first + second;
}

}  // namespace shardwright::fuzz
