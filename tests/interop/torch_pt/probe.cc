// SPDX-License-Identifier: Apache-2.0
// Reads and rewrites .pt files for the interop tests.
//   pt_probe dump IN           one line per value of the graph
//   pt_probe rewrite IN OUT    the same graph and payloads through our writer
// Exit code: that of the error.

#include <cstdio>
#include <cstring>
#include <iostream>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "files/torch_pt/reader.h"
#include "files/torch_pt/writer.h"
#include "support/base/crc32.h"
#include "support/os/file.h"

namespace {

namespace os = shardwright::os;
namespace pickle = shardwright::pickle;
namespace torch_pt = shardwright::torch_pt;
using shardwright::Crc32;
using shardwright::Errc;
using shardwright::Fail;
using shardwright::ItemSize;
using shardwright::Result;
using shardwright::Status;

void Dump(const pickle::Node* node, const std::string& path);

void DumpBelow(const pickle::Node* node, const std::string& path, const std::string& name) {
  std::string below = path;
  below.append("/").append(name);
  Dump(node, below);
}

void Dump(const pickle::Node* node, const std::string& path) {
  std::cout << path << " " << pickle::Describe(node);
  if (node->kind == pickle::Kind::kInt || node->kind == pickle::Kind::kBool) {
    std::cout << " " << node->integer;
  }
  if (node->kind == pickle::Kind::kFloat) std::cout << " " << node->real;
  if (node->is_string() || node->kind == pickle::Kind::kBytes) {
    std::cout << " [" << node->text.size() << "] " << node->text;
  }
  std::cout << "\n";
  if (node->is_dict()) {
    for (std::size_t i = 0; i < node->entry_count(); ++i) {
      const pickle::Node* key = node->key(i);
      const std::string name = key->is_string() ? key->text : std::to_string(key->integer);
      DumpBelow(node->value(i), path, name);
    }
  } else {
    for (std::size_t i = 0; i < node->items.size(); ++i) {
      DumpBelow(node->items[i], path, std::to_string(i));
    }
  }
  if (node->args != nullptr) DumpBelow(node->args, path, "(args)");
  if (node->state != nullptr) DumpBelow(node->state, path, "(state)");
  if (node->tensor && node->tensor->attributes != nullptr) {
    DumpBelow(node->tensor->attributes, path, "(attributes)");
  }
}

struct Input {
  os::File file;
  torch_pt::Document document;
};

Result<Input> Read(const std::string& path) {
  Input input;
  SW_TRY_ASSIGN(input.file, os::File::OpenRead(path));
  SW_TRY_ASSIGN(const torch_pt::ContainerMetadata metadata, torch_pt::ReadMetadata(input.file));
  SW_TRY_ASSIGN(input.document, torch_pt::Parse(metadata));
  return input;
}

Status Rewrite(const std::string& from, const std::string& to) {
  SW_TRY_ASSIGN(const Input input, Read(from));
  std::vector<torch_pt::StorageSpec> specs;
  for (const torch_pt::Document::StorageRef& ref : input.document.storages) {
    specs.push_back({ref.dtype, ref.untyped, ref.bytes / ItemSize(ref.dtype)});
  }
  SW_TRY_ASSIGN(const torch_pt::Layout layout, torch_pt::Layout::Make(input.document.root, specs));
  std::remove(to.c_str());
  SW_TRY_ASSIGN(const os::File out, os::File::Create(to));
  std::vector<std::uint32_t> crcs;
  for (std::size_t i = 0; i < layout.storage_count(); ++i) {
    std::vector<std::byte> bytes(layout.payload_bytes(i));
    SW_TRY(input.file.ReadAt(input.document.storages[i].offset, bytes));
    crcs.push_back(Crc32(bytes));
    if (input.document.storages[i].crc32.value_or(crcs[i]) != crcs[i]) {
      return Fail(Errc::kBadInput, input.document.storages[i].member, ": wrong CRC-32");
    }
    SW_TRY(out.WriteAt(layout.payload_offset(i), bytes));
  }
  std::uint64_t end = 0;
  for (const torch_pt::Layout::Piece& piece : layout.Frame(crcs)) {
    SW_TRY(out.WriteAt(piece.offset, std::as_bytes(std::span(piece.bytes))));
    end = piece.offset + piece.bytes.size();
  }
  if (end != layout.file_bytes()) return Fail(Errc::kInternal, "file size is not as laid out");
  return {};
}

Status Run(const std::vector<std::string>& args) {
  if (args.size() == 2 && args[0] == "dump") {
    SW_TRY_ASSIGN(const Input input, Read(args[1]));
    Dump(input.document.root, "");
    return {};
  }
  if (args.size() == 3 && args[0] == "rewrite") return Rewrite(args[1], args[2]);
  return Fail(Errc::kUsage, "pt_probe dump IN | pt_probe rewrite IN OUT");
}

}  // namespace

int main(int argc, char** argv) {
  const Status done = Run(std::vector<std::string>(argv + 1, argv + argc));
  if (done) return 0;
  std::cerr << done.error().message << "\n";
  return static_cast<int>(done.error().code);
}
