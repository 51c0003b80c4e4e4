#include "dialect/zero/reading.h"

#include "layout/states.h"
#include "tensor/shape.h"

namespace shardwright::dialect::reader {

const Node* FindPath(const Node* dict, std::initializer_list<std::string_view> keys) {
  const Node* node = dict;
  for (const std::string_view key : keys) {
    if (node == nullptr || !node->is_dict()) return nullptr;
    node = node->Find(key);
  }
  return node;
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

std::string ModelFileName(bool zero3, std::uint64_t rank, std::uint64_t mp) {
  const std::string zero = zero3 ? "zero_pp_rank_" + std::to_string(rank) + "_" : "";
  return zero + "mp_rank_" + (mp < 10 ? "0" : "") + std::to_string(mp) + "_model_states.pt";
}

tl::unexpected<Error> Missing(const EngineReading& reading, const std::vector<std::string>& names) {
  std::string text = reading.source.tag + ": " + std::to_string(names.size()) +
                     (names.size() == 1 ? " file is missing: " : " files are missing: ");
  for (std::size_t i = 0; i < names.size(); ++i) text += (i == 0 ? "" : ", ") + names[i];
  return Fail(Errc::kNotFound, std::move(text));
}

Result<Document> Open(const EngineReading& reading, std::uint32_t file) {
  auto document = torch_pt::Parse(*reading.source.files[file].containers.front().skeleton);
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

Result<std::optional<Scalar>> ScalarOf(EngineReading* reading, std::uint32_t file,
                                       const Document& document, std::string_view state,
                                       const Node* node, const Shape& shape) {
  Scalar out;
  out.state = state;
  const std::string what = "optimizer state \"" + out.state + "\"";
  if (node->is_tensor()) {
    const Shape& own = node->tensor->shape;
    // A parameter of one element has moments of one element; a step is never a moment.
    if (!IsNumber(own) || (own == shape && state != layout::kStep)) return std::optional<Scalar>();
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
