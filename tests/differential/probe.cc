// SPDX-License-Identifier: Apache-2.0
// Reads the same inputs as other readers, and prints the result in one canonical form.
//
//   differential_probe < REQUESTS > ANSWERS
//
// A request is a line "KIND BYTES" and so many bytes. An answer is a line of JSON: {"error",
// "code"} or the contents. Its "blob" is the length of the bytes after the line, which are the same
// contents written again by this project. KIND is one of
//   pickle       a pickle; written again in protocol 2
//   zip          a zip container; nothing is written
//   pt           a file of torch.save; written again
//   safetensors  a .safetensors file; written again
// See class Render for the canonical form of graphs.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "files/pickle/reader.h"
#include "files/pickle/writer.h"
#include "files/safetensors/header.h"
#include "files/safetensors/layout.h"
#include "files/torch_pt/reader.h"
#include "files/torch_pt/writer.h"
#include "files/zip/reader.h"
#include "support/base/crc32.h"
#include "support/os/file.h"

namespace {

namespace os = shardwright::os;
namespace pickle = shardwright::pickle;
namespace safetensors = shardwright::safetensors;
namespace torch_pt = shardwright::torch_pt;
namespace zip = shardwright::zip;
using nlohmann::json;
using pickle::Kind;
using pickle::Node;
using shardwright::Crc32;
using shardwright::Errc;
using shardwright::Fail;
using shardwright::ItemSize;
using shardwright::Result;

constexpr std::uint64_t kMemberBytes = std::uint64_t{1} << 30;

std::string Hex(std::string_view bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string hex;
  hex.reserve(2 * bytes.size());
  for (const char c : bytes) {
    hex.push_back(kDigits[static_cast<unsigned char>(c) >> 4]);
    hex.push_back(kDigits[static_cast<unsigned char>(c) & 15]);
  }
  return hex;
}

// Renders a graph as text, so that equal texts are equal graphs. An object that is mutable or not
// executed gets a number at its first place ("#3"), which stands for it afterwards ("@3"). Texts
// are in hexadecimal. Items of sets are sorted by their texts and have no numbers inside.
class Render {
 public:
  explicit Render(const std::vector<std::string>& storages) : storages_(storages) {}

  std::string Text(const Node* root) {
    Add(root);
    return std::move(out_);
  }

 private:
  bool Named(const Node* node) {
    if (!numbered_) return false;
    const auto [place, fresh] = numbers_.emplace(node, numbers_.size());
    out_ += (fresh ? "#" : "@") + std::to_string(place->second);
    return !fresh;
  }

  void Items(char open, const std::vector<const Node*>& items, char close) {
    out_ += open;
    for (const Node* item : items) {
      Add(item);
      out_ += ' ';
    }
    out_ += close;
  }

  void Set(const Node* node) {
    const bool numbered = std::exchange(numbered_, false);
    std::vector<std::string> texts;
    const std::string before = std::exchange(out_, "");
    for (const Node* item : node->items) {
      Add(item);
      texts.push_back(std::exchange(out_, ""));
    }
    std::sort(texts.begin(), texts.end());
    texts.erase(std::unique(texts.begin(), texts.end()), texts.end());
    out_ = before + "{~";
    for (const std::string& text : texts) out_ += text + " ";
    out_ += "}";
    numbered_ = numbered;
  }

  void Numbers(const shardwright::Shape& shape) {
    out_ += '(';
    for (const std::uint64_t extent : shape) out_ += std::to_string(extent) + " ";
    out_ += ')';
  }

  void Tensor(const pickle::Tensor& tensor) {
    out_ += "T(" + storages_[tensor.storage] + " " + std::string(Name(tensor.dtype)) + " " +
            std::to_string(tensor.offset) + " ";
    Numbers(tensor.shape);
    Numbers(tensor.strides);
    out_ += tensor.requires_grad ? "T" : "F";
    out_ += tensor.is_parameter ? "T" : "F";
    if (tensor.attributes != nullptr) Add(tensor.attributes);
    out_ += ')';
  }

  void Object(const Node* node) {
    constexpr std::array kBuilds = {"reduce", "newobj", "newobjex"};
    out_ += "<" + std::string(kBuilds[static_cast<std::size_t>(node->build)]) + " ";
    Add(node->callable);
    Add(node->args);
    if (node->state != nullptr) {
      out_ += "/";
      Add(node->state);
    }
    if (!node->list_items.empty()) Items('[', node->list_items, ']');
    if (!node->dict_items.empty()) Items('{', node->dict_items, '}');
    out_ += ">";
  }

  void Add(const Node* node) {
    switch (node->kind) {
      case Kind::kNone:
        out_ += "N";
        return;
      case Kind::kBool:
        out_ += node->integer != 0 ? "T" : "F";
        return;
      case Kind::kInt:
        out_ += "i" + std::to_string(node->integer);
        return;
      case Kind::kLong:
        out_ += "l" + Hex(node->text);
        return;
      case Kind::kFloat:
        out_ += "f" + std::to_string(std::bit_cast<std::uint64_t>(node->real));
        return;
      case Kind::kString:
        out_ += "s" + Hex(node->text);
        return;
      case Kind::kBytes:
        out_ += "b" + Hex(node->text);
        return;
      case Kind::kGlobal:
        out_ += "g" + node->text;
        return;
      case Kind::kTuple:
        return Items('(', node->items, ')');
      case Kind::kSize:
        out_ += "S";
        return Items('(', node->items, ')');
      case Kind::kFrozenSet:
        out_ += "z";
        return Set(node);
      default:
        break;
    }
    if (Named(node)) return;
    switch (node->kind) {
      case Kind::kByteArray:
        out_ += "a" + Hex(node->text);
        return;
      case Kind::kList:
        return Items('[', node->items, ']');
      case Kind::kSet:
        return Set(node);
      case Kind::kDict:
        if (node->ordered) out_ += "O";
        Items('{', node->items, '}');
        if (node->state != nullptr) {
          out_ += "/";
          Add(node->state);
        }
        return;
      case Kind::kTensor:
        return Tensor(*node->tensor);
      default:
        return Object(node);
    }
  }

  const std::vector<std::string>& storages_;
  std::string out_;
  std::map<const Node*, std::size_t> numbers_;
  bool numbered_ = true;
};

struct Answer {  // NOLINT(bugprone-exception-escape): JSON's moves do not throw
  json said;
  std::string blob;
};

std::string RenderGraph(const Node* root, const std::vector<pickle::StorageUse>& storages) {
  std::vector<std::string> keys;
  keys.reserve(storages.size());
  for (const pickle::StorageUse& use : storages) keys.push_back(Hex(use.key));
  return Render(keys).Text(root);
}

Result<Answer> Pickle(std::string_view bytes) {
  SW_TRY_ASSIGN(const pickle::Graph graph, pickle::Load(bytes));
  std::size_t resume = 0;
  SW_TRY_ASSIGN(const std::optional<std::size_t> end, pickle::FindEnd(bytes, resume));
  if (end != bytes.size()) return Fail(Errc::kInternal, "the pickle is read, and has another end");
  Answer answer;
  json storages = json::array();
  for (const pickle::StorageUse& use : graph.storages) {
    storages.push_back(
        {Hex(use.key), use.untyped ? "untyped" : std::string(Name(use.dtype)), use.elems});
  }
  answer.said = {{"graph", RenderGraph(graph.root, graph.storages)}, {"storages", storages}};
  const Result<pickle::Dumped> dumped = pickle::Dump(graph.root, graph.storages);
  if (dumped) {
    answer.blob = dumped->bytes;
    answer.said["order"] = dumped->order;
  } else {
    answer.said["not_written"] = dumped.error().message;
  }
  return answer;
}

// A file that exists in memory only.
Result<os::File> FileOf(std::string_view bytes) {
  const int memory = memfd_create("differential", 0);
  SW_CHECK(memory >= 0);
  SW_CHECK(write(memory, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  Result<os::File> file = os::File::OpenRead("/proc/self/fd/" + std::to_string(memory));
  close(memory);
  return file;
}

Result<Answer> Zip(std::string_view bytes) {
  SW_TRY_ASSIGN(const os::File file, FileOf(bytes));
  SW_TRY_ASSIGN(const zip::Container container, zip::ReadContainer(file));
  json members = json::array();
  for (const zip::Member& member : container.members) {
    json entry = {{"name", Hex(member.name)},         {"header", member.header_offset},
                  {"payload", member.payload_offset}, {"bytes", member.bytes},
                  {"method", member.method},          {"crc", member.crc32}};
    if (member.method == 0) {
      const Result<std::string> content = zip::ReadMember(file, member, kMemberBytes);
      entry["sum"] = content ? json(Crc32(std::as_bytes(std::span(*content)))) : json(nullptr);
    }
    members.push_back(std::move(entry));
  }
  return Answer{{{"members", members}}, ""};
}

Result<Answer> Pt(std::string_view bytes) {
  SW_TRY_ASSIGN(const os::File file, FileOf(bytes));
  SW_TRY_ASSIGN(const torch_pt::ContainerMetadata metadata, torch_pt::ReadMetadata(file));
  SW_TRY_ASSIGN(const torch_pt::Document document, torch_pt::Parse(metadata));
  std::vector<torch_pt::StorageSpec> specs;
  std::vector<std::string> keys;
  json storages = json::array();
  for (const torch_pt::Document::StorageRef& ref : document.storages) {
    specs.push_back({ref.dtype, ref.untyped, ref.bytes / ItemSize(ref.dtype)});
    keys.push_back(Hex(ref.member.substr(5)));
    storages.push_back({{"member", ref.member}, {"offset", ref.offset}, {"bytes", ref.bytes}});
  }
  SW_TRY_ASSIGN(const torch_pt::Layout layout, torch_pt::Layout::Make(document.root, specs));
  Answer answer;
  answer.said = {{"graph", Render(keys).Text(document.root)},
                 {"storages", storages},
                 {"order", layout.order()}};
  answer.blob.resize(layout.file_bytes());
  std::vector<std::uint32_t> crcs;
  for (std::size_t i = 0; i < layout.storage_count(); ++i) {
    const std::string_view payload =
        bytes.substr(document.storages[i].offset, layout.payload_bytes(i));
    crcs.push_back(shardwright::Crc32(std::as_bytes(std::span(payload))));
    if (document.storages[i].crc32.value_or(crcs[i]) != crcs[i]) {
      return Fail(Errc::kBadInput, document.storages[i].member, ": wrong CRC-32");
    }
    payload.copy(answer.blob.data() + layout.payload_offset(i), payload.size());
  }
  for (const torch_pt::Layout::Piece& piece : layout.Frame(crcs)) {
    SW_CHECK(piece.offset + piece.bytes.size() <= answer.blob.size());
    piece.bytes.copy(answer.blob.data() + piece.offset, piece.bytes.size());
  }
  return answer;
}

Result<Answer> Safetensors(std::string_view bytes) {
  SW_TRY_ASSIGN(const os::File file, FileOf(bytes));
  SW_TRY_ASSIGN(const safetensors::Header header, safetensors::ReadHeader(file));
  Answer answer;
  json tensors = json::array();
  std::vector<safetensors::TensorSpec> specs;
  for (const safetensors::Entry& entry : header.entries) {
    tensors.push_back({{"name", Hex(entry.name)},
                       {"dtype", safetensors::Word(entry.dtype)},
                       {"shape", entry.shape},
                       {"offset", entry.offset},
                       {"bytes", entry.bytes}});
    SW_TRY_ASSIGN(shardwright::Shape shape, safetensors::ElemShape(entry));
    specs.push_back({entry.name, entry.dtype, std::move(shape)});
  }
  json metadata = json::object();
  for (const auto& [key, value] : header.metadata) metadata[Hex(key)] = Hex(value);
  answer.said = {{"tensors", tensors}, {"metadata", metadata}, {"warnings", header.warnings}};
  const Result<safetensors::Layout> layout = safetensors::Layout::Make(specs, header.metadata);
  if (!layout) {
    answer.said["not_written"] = layout.error().message;
    return answer;
  }
  answer.blob.resize(layout->file_bytes());
  layout->head().copy(answer.blob.data(), layout->head().size());
  for (std::size_t i = 0; i < header.entries.size(); ++i) {
    const safetensors::Entry& entry = header.entries[i];
    bytes.substr(entry.offset, entry.bytes)
        .copy(answer.blob.data() + layout->offset(i), entry.bytes);
  }
  return answer;
}

Result<Answer> Ask(const std::string& kind, std::string_view bytes) {
  if (kind == "pickle") return Pickle(bytes);
  if (kind == "zip") return Zip(bytes);
  if (kind == "pt") return Pt(bytes);
  if (kind == "safetensors") return Safetensors(bytes);
  return Fail(Errc::kUsage, "unknown kind ", kind);
}

}  // namespace

int main() {  // NOLINT(bugprone-exception-escape): a test's helper
  std::ios::sync_with_stdio(false);
  std::string kind;
  std::size_t count = 0;
  while (std::cin >> kind >> count && std::cin.get() == '\n') {
    std::string bytes(count, '\0');
    if (!std::cin.read(bytes.data(), static_cast<std::streamsize>(count))) return 1;
    Result<Answer> answer = Ask(kind, bytes);
    if (!answer) {
      answer = Answer{
          {{"error", answer.error().message}, {"code", static_cast<int>(answer.error().code)}}, ""};
    }
    answer->said["blob"] = answer->blob.size();
    std::cout << answer->said.dump(-1, ' ', true, json::error_handler_t::replace) << "\n"
              << answer->blob;
    std::cout.flush();
  }
  return std::cin.eof() ? 0 : 1;
}
