#include <array>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "base/checked.h"
#include "dialect/deepspeed_flat.h"
#include "dialect/deepspeed_read_internal.h"
#include "tensor/convert.h"

namespace shardwright::dialect::reader {

MapBuilder::MapBuilder(const SourceSet& source, layout::ShardMap* map)
    : source_(source), map_(map), members_(source.files.size()) {
  for (const SourceFile& file : source.files) map_->files.push_back(file.path);
}

std::uint32_t MapBuilder::MemberOf(std::uint32_t file, const Document& document,
                                   std::uint32_t storage) {
  std::vector<std::uint32_t>& known = members_[file];
  if (known.size() < document.storages.size()) known.resize(document.storages.size(), kNone);
  std::uint32_t& index = known[storage];
  if (index == kNone) {
    const Document::StorageRef& ref = document.storages[storage];
    index = static_cast<std::uint32_t>(map_->members.size());
    map_->members.push_back({file, ref.offset, ref.bytes, ref.crc32, ref.member});
  }
  return index;
}

Result<Place> MapBuilder::PlaceOf(std::uint32_t file, const Document& document, const Node* node,
                                  const std::string& what) {
  const std::string& name = source_.files[file].name;
  if (node == nullptr || !node->is_tensor()) {
    return Fail(Errc::kBadInput,
                name + ": " + what + ": tensor expected, found " + pickle::Describe(node));
  }
  const pickle::Tensor& tensor = *node->tensor;
  Place out;
  SW_TRY_ASSIGN(out.elems, CountElems(tensor.shape));
  out.dtype = tensor.dtype;
  if (out.elems > 0) {
    const std::vector<std::uint64_t> dense = ContiguousStrides(tensor.shape);
    for (std::size_t dim = 0; dim < dense.size(); ++dim) {
      if (tensor.shape[dim] > 1 && tensor.strides[dim] != dense[dim]) {
        return Fail(Errc::kUnsupported, std::string(name).append(": ").append(what).append(
                                            ": its elements are not stored in row-major order"));
      }
    }
    SW_TRY_ASSIGN(out.offset, CheckedMul(tensor.offset, ItemSize(tensor.dtype)));
  }
  out.member = MemberOf(file, document, tensor.storage);
  return out;
}

Result<std::string> MapBuilder::Payload(std::uint32_t file, const Document& document,
                                        const Node* tensor, const std::string& what) {
  SW_TRY_ASSIGN(const Place place, PlaceOf(file, document, tensor, what));
  const SourceFile& source = source_.files[file];
  if (keyed_file_ != file) {
    keys_.clear();
    for (std::size_t i = 0; i < source.skeleton.storages.size(); ++i) {
      keys_.emplace(source.skeleton.storages[i].key, static_cast<std::uint32_t>(i));
    }
    keyed_file_ = file;
  }
  const std::string& member = map_->members[place.member].name;
  auto found = keys_.find(member);
  if (found == keys_.end()) found = keys_.find(member.substr(member.rfind('/') + 1));
  const std::uint64_t bytes = place.elems * ItemSize(place.dtype);
  if (bytes == 0) return std::string();
  const auto inlined =
      found == keys_.end() ? source.inlined.end() : source.inlined.find(found->second);
  if (inlined == source.inlined.end() || place.offset + bytes > inlined->second.size()) {
    return Fail(Errc::kUnsupported,
                source.name + ": " + what + ": " + pickle::Describe(tensor) + " is no number");
  }
  return inlined->second.substr(place.offset, bytes);
}

std::uint32_t MapBuilder::AddArray(DType dtype, std::vector<layout::Region> regions) {
  map_->arrays.push_back({dtype, std::move(regions)});
  return static_cast<std::uint32_t>(map_->arrays.size() - 1);
}

const Node* FindInt(const Node* dict, std::int64_t key) {
  if (dict == nullptr || !dict->is_dict()) return nullptr;
  for (std::size_t i = 0; i < dict->entry_count(); ++i) {
    const Node* k = dict->key(i);
    if (k->kind == pickle::Kind::kInt && k->integer == key) return dict->value(i);
  }
  return nullptr;
}

const Node* FindPath(const Node* dict, std::initializer_list<std::string_view> keys) {
  const Node* node = dict;
  for (const std::string_view key : keys) {
    if (node == nullptr || !node->is_dict()) return nullptr;
    node = node->Find(key);
  }
  return node;
}

Result<std::uint64_t> CountAt(const Reading& reading, std::uint32_t file, const Node* dict,
                              std::string_view key) {
  auto count = pickle::AsCount(dict->Find(key));
  if (!count) {
    return Within(reading.file_name(file) + ": " + std::string(key), std::move(count).error());
  }
  return count;
}

Spread SpreadOf(const Reading& reading, std::uint64_t mp, std::size_t group) {
  const std::vector<std::uint64_t>& counts = reading.shards.front().front().partition_count;
  Spread out;
  out.mp = mp;
  out.group = group;
  out.ranks = counts.size() == 1 ? counts[0] : counts[group];
  out.ep = reading.ranks / out.ranks;
  return out;
}

std::uint64_t RankOf(const Reading& reading, const Spread& spread, std::uint64_t ep,
                     std::uint64_t edp) {
  if (spread.ep == 1) return edp;
  return RankOfExpert({ep, edp}, reading.ranks, spread.ep, reading.data_first);
}

const ShardGroup& GroupAt(const Reading& reading, const Spread& spread, std::uint64_t rank) {
  return reading.shards[spread.mp][rank].groups[spread.group];
}

std::string GroupText(const Reading& reading, const Spread& spread) {
  return reading.file_name(reading.shards[spread.mp].front().file) + ": group " +
         std::to_string(spread.group);
}

Result<std::uint64_t> StageOf(const Node* node) {
  if (node->kind == pickle::Kind::kObject && node->args != nullptr) {
    // ZeroStageEnum(2), or getattr(ZeroStageEnum, "gradients").
    const std::vector<const Node*>& args = node->args->items;
    if (args.size() == 1) return pickle::AsCount(args[0]);
    if (args.size() == 2 && args[1]->is_string()) {
      constexpr std::string_view kStages[] = {"disabled", "optimizer_states", "gradients",
                                              "weights"};
      for (std::uint64_t stage = 0; stage < std::size(kStages); ++stage) {
        if (args[1]->text == kStages[stage]) return stage;
      }
    }
    return Fail(Errc::kBadInput, "unknown ZeRO stage " + pickle::Describe(node));
  }
  return pickle::AsCount(node);
}

Result<std::vector<NamedShape>> ShapesOf(const Node* dict) {
  if (dict == nullptr || !dict->is_dict()) {
    return Fail(Errc::kBadInput, "dict of shapes expected, found " + pickle::Describe(dict));
  }
  std::vector<NamedShape> out;
  out.reserve(dict->entry_count());
  for (std::size_t i = 0; i < dict->entry_count(); ++i) {
    SW_TRY_ASSIGN(const std::string_view name, pickle::AsString(dict->key(i)));
    auto shape = pickle::AsShape(dict->value(i));
    if (!shape) return Within("shape of \"" + std::string(name) + "\"", std::move(shape).error());
    auto elems = CountElems(*shape);
    if (!elems) return Within("shape of \"" + std::string(name) + "\"", std::move(elems).error());
    out.push_back({std::string(name), *std::move(shape), *elems});
  }
  return out;
}

std::string Show(const Scalar& scalar) {
  if (!scalar.is_tensor) {
    const Node* value = scalar.value;
    if (value != nullptr &&
        (value->kind == pickle::Kind::kInt || value->kind == pickle::Kind::kBool)) {
      return std::to_string(value->integer);
    }
    if (value != nullptr && value->kind == pickle::Kind::kFloat) {
      std::array<char, 32> text{};
      std::snprintf(text.data(), text.size(), "%.9g", value->real);
      return text.data();
    }
    return pickle::Describe(value);
  }
  const std::string type = " (tensor " + std::string(Name(scalar.dtype)) + ")";
  if (scalar.dtype == DType::kI64 && scalar.bytes.size() == sizeof(std::int64_t)) {
    std::int64_t value = 0;
    std::memcpy(&value, scalar.bytes.data(), sizeof(value));
    return std::to_string(value) + type;
  }
  if (CanConvert(scalar.dtype, DType::kF64) && scalar.bytes.size() == ItemSize(scalar.dtype)) {
    double value = 0;
    Convert(scalar.dtype, std::as_bytes(std::span(scalar.bytes)), DType::kF64,
            std::as_writable_bytes(std::span(&value, 1)));
    std::string text = std::to_string(value);
    if (value == std::trunc(value)) text.resize(text.find('.'));
    return text + type;
  }
  return "a tensor " + std::string(Name(scalar.dtype)) + " " + ToString(scalar.shape);
}

tl::unexpected<Error> Missing(const Reading& reading, const std::vector<std::string>& names) {
  std::string text = reading.source.tag + ": " + std::to_string(names.size()) +
                     (names.size() == 1 ? " file is missing: " : " files are missing: ");
  for (std::size_t i = 0; i < names.size(); ++i) text += (i == 0 ? "" : ", ") + names[i];
  return Fail(Errc::kNotFound, std::move(text));
}

Result<Document> Open(const Reading& reading, std::uint32_t file) {
  auto document = torch_pt::Parse(reading.source.files[file].skeleton);
  if (!document) return Within(reading.source.files[file].path, std::move(document).error());
  if (document->root->is_string()) {
    return Fail(Errc::kUnsupported, reading.source.files[file].path +
                                        ": holds a text where a checkpoint should be (Nebula keeps "
                                        "its data elsewhere)");
  }
  if (!document->root->is_dict()) {
    return Fail(Errc::kBadInput, reading.source.files[file].path + ": dict expected, found " +
                                     pickle::Describe(document->root));
  }
  return document;
}

bool IsNumber(const Shape& shape) { return shape.empty() || (shape.size() == 1 && shape[0] == 1); }

Result<std::optional<Scalar>> ScalarOf(Reading* reading, std::uint32_t file,
                                       const Document& document, const std::string& state,
                                       const Node* node, const Shape& shape) {
  Scalar out;
  out.state = state;
  const std::string what = "optimizer state \"" + state + "\"";
  if (node->is_tensor()) {
    const Shape& own = node->tensor->shape;
    // A parameter of one element has moments of one element; a step is never a moment.
    if (!IsNumber(own) || (own == shape && state != "step")) return std::optional<Scalar>();
    out.is_tensor = true;
    out.dtype = node->tensor->dtype;
    out.shape = own;
    SW_TRY_ASSIGN(out.bytes, reading->map.Payload(file, document, node, what));
    return std::optional<Scalar>(std::move(out));
  }
  switch (node->kind) {
    case pickle::Kind::kNone:
    case pickle::Kind::kBool:
    case pickle::Kind::kInt:
    case pickle::Kind::kLong:
    case pickle::Kind::kFloat:
    case pickle::Kind::kString:
      out.value = node;
      return std::optional<Scalar>(std::move(out));
    default:
      return Fail(Errc::kUnsupported, reading->file_name(file) + ": " + what +
                                          ": tensor or number expected, found " +
                                          pickle::Describe(node));
  }
}

}  // namespace shardwright::dialect::reader
