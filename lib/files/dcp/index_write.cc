// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <utility>

#include "files/dcp/index.h"
#include "files/dcp/names_internal.h"
#include "files/pickle/emitter.h"

namespace shardwright::dcp {
namespace {

using pickle::Emitter;

/// Emits an instance of a class of the metadata module, without its state.
void Open(std::string_view name, Emitter* out) {
  out->Global(std::string(kMetadata).append(name));
  out->EmptyTuple();
  out->NewObj();
}

}  // namespace

void IndexWriter::GrowingDict::Next() {
  if (entries_ % Emitter::kBatch == 0) {
    if (entries_ > 0) out.SetItems(Emitter::kBatch);
    out.Mark();
  }
  ++entries_;
}

void IndexWriter::GrowingDict::End() {
  // Uses SETITEMS also for a last batch of one entry, because Next has emitted a Mark.
  if (entries_ > 0) out.SetItems(Emitter::kBatch);
}

IndexWriter::IndexWriter() {
  logical_.out.Begin();
  Open("Metadata", &logical_.out);
  logical_.out.EmptyDict();
  logical_.out.Mark();
  logical_.out.Word("state_dict_metadata");
  logical_.out.EmptyDict();
  paths_.out.Word("planner_data");
  paths_.out.EmptyDict();
  places_.out.Word("storage_data");
  places_.out.EmptyDict();
}

Status IndexWriter::Add(const Entry& entry, const std::vector<std::string>& files) {
  logical_.Next();
  SW_TRY(logical_.out.Text(entry.name));
  const std::uint32_t name = logical_.out.Put();
  if (entry.is_tensor) {
    Tensor(entry);
  } else {
    Open("BytesStorageMetadata", &logical_.out);
  }
  SW_TRY(Path(entry, name));
  if (!entry.is_tensor) {
    OnePlace(name, nullptr, 0, entry.at, files);
    return {};
  }
  for (std::size_t c = 0; c < entry.chunks.size(); ++c) {
    OnePlace(name, &entry.chunks[c].offsets, c, entry.chunks[c].at, files);
  }
  return {};
}

void IndexWriter::Tensor(const Entry& entry) {
  Emitter& out = logical_.out;
  Open("TensorStorageMetadata", &out);
  out.EmptyDict();
  out.Mark();
  out.Word("properties");
  Properties(entry.dtype);
  out.Word("size");
  out.Size(entry.shape);
  out.Word("chunks");
  Chunks(entry.chunks);
  out.SetItems(3);
  out.Build();
}

void IndexWriter::Properties(DType dtype) {
  Emitter& out = logical_.out;
  out.Global(std::string(kOldModule) + "TensorProperties");
  out.EmptyTuple();
  out.NewObj();
  out.Mark();
  out.Global("torch." + std::string(Name(dtype)));
  out.Global("torch.serialization._get_layout");
  out.Word("torch.strided");
  out.Tuple(1);
  out.Reduce();
  out.Bool(false);
  out.Global(std::string(kOldModule) + "MEM_FORMAT_ENCODING");
  out.Int(0);
  out.Tuple(1);
  out.Reduce();
  out.Bool(false);
  out.Tuple(5);
  out.Build();
}

void IndexWriter::Chunks(const std::vector<Chunk>& chunks) {
  Emitter& out = logical_.out;
  out.EmptyList();
  for (std::size_t first = 0; first < chunks.size(); first += Emitter::kBatch) {
    const std::size_t last = std::min(chunks.size(), first + Emitter::kBatch);
    if (Emitter::NeedsMark(last - first)) out.Mark();
    for (std::size_t i = first; i < last; ++i) {
      Open("ChunkStorageMetadata", &out);
      out.EmptyDict();
      out.Mark();
      out.Word("offsets");
      out.Size(chunks[i].offsets);
      out.Word("sizes");
      out.Size(chunks[i].sizes);
      out.SetItems(2);
      out.Build();
    }
    out.Append(last - first);
  }
}

/// \param name  memo entry of the entry's name
Status IndexWriter::Path(const Entry& entry, std::uint32_t name) {
  paths_.Next();
  Emitter& out = paths_.out;
  out.Get(name);
  const std::size_t parts = entry.part_count();
  if (parts == 1) {
    out.Get(name);
    out.Tuple(1);
    return {};
  }
  if (parts > 3) out.Mark();
  for (std::size_t part = 0; part < parts; ++part) {
    // Inner parts of a path are mostly parameter names: too many different ones to keep as words.
    const bool word = part == 0 || part + 1 == parts || entry.part(part).size() < 8;
    if (entry.path[part].is_index) {
      std::int64_t number = 0;
      for (const char digit : entry.part(part)) number = 10 * number + (digit - '0');
      out.Int(number);
    } else if (word) {
      out.Word(entry.part(part));
    } else {
      SW_TRY(out.Text(entry.part(part)));
    }
  }
  out.Tuple(parts);
  return {};
}

/// \param name    memo entry of the entry's name
/// \param number  of the chunk
void IndexWriter::OnePlace(std::uint32_t name, const Shape* offset, std::size_t number,
                           const Place& at, const std::vector<std::string>& files) {
  places_.Next();
  Emitter& out = places_.out;
  Open("MetadataIndex", &out);
  out.EmptyDict();
  out.Mark();
  out.Word("fqn");
  out.Get(name);
  out.Word("index");
  if (offset == nullptr) {
    out.None();
  } else {
    out.Int(static_cast<std::int64_t>(number));
    out.Word("offset");
    out.Size(*offset);
  }
  out.SetItems(2);
  out.Build();
  out.Global(kStorageInfo);
  out.EmptyTuple();
  out.NewObj();
  out.EmptyDict();
  out.Mark();
  out.Word("relative_path");
  out.Word(files[at.file]);
  out.Word("offset");
  out.Int(static_cast<std::int64_t>(at.offset));
  out.Word("length");
  out.Int(static_cast<std::int64_t>(at.bytes));
  out.SetItems(3);
  out.Build();
}

std::vector<std::string> IndexWriter::Finish() && {
  for (GrowingDict* dict : {&logical_, &paths_, &places_}) dict->End();
  places_.out.SetItems(3);
  places_.out.Build();
  std::vector<std::string> parts;
  parts.push_back(std::move(logical_.out).Take());
  parts.push_back(std::move(paths_.out).Take());
  parts.push_back(std::move(places_.out).Finish());
  return parts;
}

Result<std::string> DumpIndex(const Index& index) {
  IndexWriter writer;
  for (const Entry& entry : index.entries) SW_TRY(writer.Add(entry, index.files));
  std::string all;
  for (const std::string& part : std::move(writer).Finish()) all += part;
  return all;
}

}  // namespace shardwright::dcp
