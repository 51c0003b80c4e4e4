// SPDX-License-Identifier: Apache-2.0
#include "files/pickle/names_internal.h"

#include <algorithm>
#include <array>
#include <unordered_map>

#include "files/utf8.h"
#include "support/base/limits.h"

namespace shardwright::pickle {

namespace {

using std::string_view_literals::operator""sv;

constexpr std::array kStorageClasses = {
    std::pair{"DoubleStorage"sv, DType::kF64},
    std::pair{"FloatStorage"sv, DType::kF32},
    std::pair{"HalfStorage"sv, DType::kF16},
    std::pair{"BFloat16Storage"sv, DType::kBF16},
    std::pair{"LongStorage"sv, DType::kI64},
    std::pair{"IntStorage"sv, DType::kI32},
    std::pair{"ShortStorage"sv, DType::kI16},
    std::pair{"CharStorage"sv, DType::kI8},
    std::pair{"ByteStorage"sv, DType::kU8},
    std::pair{"BoolStorage"sv, DType::kBool},
    std::pair{"ComplexDoubleStorage"sv, DType::kC128},
    std::pair{"ComplexFloatStorage"sv, DType::kC64},
};

// Modules with functions that run code, open files or access the network. Checkpoints need none.
constexpr std::array kRefusedRoots = {
    "_codecs"sv,
    "_io"sv,
    "_operator"sv,
    "_pickle"sv,
    "_posixsubprocess"sv,
    "_thread"sv,
    "_winapi"sv,
    "asyncio"sv,
    "bdb"sv,
    "builtins"sv,
    "cPickle"sv,
    "cProfile"sv,
    "code"sv,
    "codecs"sv,
    "codeop"sv,
    "commands"sv,
    "concurrent"sv,
    "copyreg"sv,
    "ctypes"sv,
    "dill"sv,
    "cloudpickle"sv,
    "distutils"sv,
    "doctest"sv,
    "ensurepip"sv,
    "fcntl"sv,
    "ftplib"sv,
    "functools"sv,
    "gc"sv,
    "http"sv,
    "httplib"sv,
    "idlelib"sv,
    "imp"sv,
    "importlib"sv,
    "inspect"sv,
    "io"sv,
    "joblib"sv,
    "lib2to3"sv,
    "linecache"sv,
    "marshal"sv,
    "mmap"sv,
    "multiprocessing"sv,
    "nt"sv,
    "ntpath"sv,
    "operator"sv,
    "os"sv,
    "pdb"sv,
    "pickle"sv,
    "pip"sv,
    "pkg_resources"sv,
    "pkgutil"sv,
    "platform"sv,
    "posix"sv,
    "posixpath"sv,
    "profile"sv,
    "pty"sv,
    "pydoc"sv,
    "requests"sv,
    "runpy"sv,
    "setuptools"sv,
    "shelve"sv,
    "shutil"sv,
    "signal"sv,
    "site"sv,
    "smtplib"sv,
    "socket"sv,
    "socketserver"sv,
    "sqlite3"sv,
    "ssl"sv,
    "subprocess"sv,
    "sys"sv,
    "sysconfig"sv,
    "telnetlib"sv,
    "tempfile"sv,
    "threading"sv,
    "timeit"sv,
    "trace"sv,
    "types"sv,
    "urllib"sv,
    "urllib2"sv,
    "venv"sv,
    "webbrowser"sv,
    "xmlrpc"sv,
    "zipimport"sv,
};

constexpr std::array kRefusedPrefixes = {
    "numpy.distutils."sv,
    "numpy.f2py."sv,
    "numpy.load."sv,
    "numpy.testing."sv,
    "pandas.io."sv,
    "pandas.read_pickle."sv,
    "torch._dynamo."sv,
    "torch._inductor."sv,
    "torch.hub."sv,
    "torch.jit."sv,
    "torch.load."sv,
    "torch.package."sv,
    "torch.serialization.load."sv,
    "torch.storage._load_from_bytes."sv,
    "torch.utils.bottleneck."sv,
    "torch.utils.collect_env."sv,
    "torch.utils.cpp_extension."sv,
};

// Modules that other modules import and thus expose as members ("torch.serialization" "os").
constexpr std::array kRefusedMembers = {
    "builtins"sv, "ctypes"sv, "importlib"sv, "nt"sv,     "os"sv,         "pickle"sv, "posix"sv,
    "pty"sv,      "runpy"sv,  "shutil"sv,    "socket"sv, "subprocess"sv, "sys"sv,
};

// Members of refused modules that are plain data types.
constexpr std::array kHarmless = {
    "_codecs.encode"sv,
    "_io.BytesIO"sv,
    "_io.StringIO"sv,
    "builtins.bool"sv,
    "builtins.bytearray"sv,
    "builtins.bytes"sv,
    "builtins.complex"sv,
    "builtins.dict"sv,
    "builtins.float"sv,
    "builtins.frozenset"sv,
    "builtins.getattr"sv,
    "builtins.int"sv,
    "builtins.list"sv,
    "builtins.object"sv,
    "builtins.range"sv,
    "builtins.set"sv,
    "builtins.slice"sv,
    "builtins.str"sv,
    "builtins.tuple"sv,
    "builtins.type"sv,
    "copyreg.__newobj__"sv,
    "copyreg.__newobj_ex__"sv,
    "copyreg._reconstructor"sv,
    "io.BytesIO"sv,
    "io.StringIO"sv,
    "signal.Signals"sv,
    "types.SimpleNamespace"sv,
};

bool IsWordByte(char c) {
  const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
  return letter || (c >= '0' && c <= '9') || c == '_' || static_cast<unsigned char>(c) >= 0x80;
}

bool IsDottedIdentifier(std::string_view text) {
  bool word_open = false;
  for (char c : text) {
    if (c == '.' && !word_open) return false;
    if (c != '.' && !IsWordByte(c)) return false;
    word_open = c != '.';
  }
  return word_open && text.size() <= limits::kNameBytes && IsUtf8(text, Surrogates::kRefuse);
}

template <class List>
bool Contains(const List& list, std::string_view text) {
  return std::find(list.begin(), list.end(), text) != list.end();
}

// Spellings of PyTorch 2.5 and later, then of earlier releases.
constexpr std::array kShardedTensors = {
    "torch.distributed.tensor.DTensor"sv,
    "torch.distributed.tensor._api.DTensor"sv,
    "torch.distributed._tensor.DTensor"sv,
    "torch.distributed._tensor.api.DTensor"sv,
    "torch.distributed._shard.sharded_tensor.api.ShardedTensor"sv,
};

constexpr std::array kDeviceMeshes = {
    "torch.distributed.device_mesh.DeviceMesh"sv,
    "torch.distributed._tensor.device_mesh.DeviceMesh"sv,
};

constexpr std::array kLeadToMeshes = {"_root_mesh"sv, "_flatten_mapping"sv, "_parent_mesh"sv};

// Returns true if the name ends like an exception class, which only stores its arguments.
bool IsExceptionName(std::string_view dotted) {
  return dotted.ends_with("Error") || dotted.ends_with("Exception") || dotted.ends_with("Warning");
}

bool GivesAccess(std::string_view module, std::string_view dotted) {
  if (Contains(kHarmless, dotted)) return false;
  const std::string_view root = module.substr(0, module.find('.'));
  if (root == "builtins" && IsExceptionName(dotted)) return false;
  if (Contains(kRefusedRoots, root)) return true;
  const std::string with_dot = std::string(dotted) + ".";
  return std::any_of(kRefusedPrefixes.begin(), kRefusedPrefixes.end(),
                     [&](std::string_view prefix) { return with_dot.starts_with(prefix); });
}

// Names of these modules in protocols before 3, and their current names.
constexpr std::array<std::pair<std::string_view, std::string_view>, 3> kModulesOfPython2 = {
    {{"__builtin__", "builtins"}, {"copy_reg", "copyreg"}, {"exceptions", "builtins"}}};

std::string_view ModuleOfPython2(std::string_view module) {
  for (const auto& [old, since] : kModulesOfPython2) {
    if (old == module) return since;
  }
  return {};
}

// Maps old module and name pairs to those that Python 3 uses in their place.
std::pair<std::string_view, std::string_view> Modernise(std::string_view module,
                                                        std::string_view name) {
  if (module == "__builtin__") {
    if (name == "xrange") name = "range";
    if (name == "unicode" || name == "basestring") name = "str";
    if (name == "long") name = "int";
  }
  if (const std::string_view since = ModuleOfPython2(module); !since.empty()) return {since, name};
  if (module == "torch.tensor") return {"torch._tensor", name};
  return {module, name};
}

const std::unordered_map<std::string_view, Known>& KnownGlobals() {
  static const std::unordered_map<std::string_view, Known> kTable = {
      {"collections.OrderedDict", Known::kOrderedDict},
      {"torch.Size", Known::kSize},
      {"builtins.set", Known::kSet},
      {"builtins.frozenset", Known::kFrozenSet},
      {"builtins.bytes", Known::kBytes},
      {"builtins.bytearray", Known::kByteArray},
      {"_codecs.encode", Known::kEncode},
      {"builtins.getattr", Known::kGetattr},
      {"copyreg.__newobj__", Known::kNewObj},
      {"copyreg.__newobj_ex__", Known::kNewObjEx},
      {"torch._utils._rebuild_tensor", Known::kTensor},
      {"torch._utils._rebuild_tensor_v2", Known::kTensorV2},
      {"torch._utils._rebuild_tensor_v3", Known::kTensorV3},
      {"torch._utils._rebuild_parameter", Known::kParameter},
      {"torch._utils._rebuild_parameter_with_state", Known::kParameterWithState},
      {"torch._tensor._rebuild_from_type_v2", Known::kFromType},
      {"torch._utils._rebuild_device_tensor_from_cpu_tensor", Known::kDeviceTensor},
      {"torch._utils._rebuild_device_tensor_from_numpy", Known::kUnsupportedTensor},
      {"torch._utils._rebuild_xla_tensor", Known::kUnsupportedTensor},
      {"torch._utils._rebuild_meta_tensor_no_storage", Known::kUnsupportedTensor},
      {"torch._utils._rebuild_qtensor", Known::kUnsupportedTensor},
      {"torch._utils._rebuild_sparse_tensor", Known::kUnsupportedTensor},
      {"torch._utils._rebuild_sparse_csr_tensor", Known::kUnsupportedTensor},
      {"torch._utils._rebuild_nested_tensor", Known::kUnsupportedTensor},
      {"torch._utils._rebuild_wrapper_subclass", Known::kWrapper},
      {"torch._tensor._rebuild_from_type", Known::kUnsupportedTensor},
      {"torch.storage.UntypedStorage", Known::kStorage},
      {"torch.UntypedStorage", Known::kStorage},
      {"torch.cuda.UntypedStorage", Known::kStorage},
      {"torch.QInt8Storage", Known::kUnsupportedStorage},
      {"torch.QUInt8Storage", Known::kUnsupportedStorage},
      {"torch.QInt32Storage", Known::kUnsupportedStorage},
      {"torch.QUInt4x2Storage", Known::kUnsupportedStorage},
      {"torch.QUInt2x4Storage", Known::kUnsupportedStorage},
      {"torch.storage.TypedStorage", Known::kUnsupportedStorage},
  };
  return kTable;
}

void Classify(Meaning& meaning) {
  const auto found = KnownGlobals().find(meaning.dotted);
  if (found != KnownGlobals().end()) {
    meaning.known = found->second;
    meaning.untyped = meaning.known == Known::kStorage;
    return;
  }
  std::string_view dotted = meaning.dotted;
  if (!dotted.starts_with("torch.")) return;
  dotted.remove_prefix(6);
  if (dotted.starts_with("cuda.")) dotted.remove_prefix(5);
  for (const auto& [name, dtype] : kStorageClasses) {
    if (dotted == name) {
      meaning.known = Known::kStorage;
      meaning.dtype = dtype;
    }
  }
}

}  // namespace

bool IsHarmlessAttribute(std::string_view name) {
  return IsDottedIdentifier(name) && name.find('.') == std::string_view::npos &&
         !name.starts_with("__") && !Contains(kRefusedMembers, name);
}

bool IsShardedTensor(std::string_view dotted) { return Contains(kShardedTensors, dotted); }

bool IsDeviceMesh(std::string_view dotted) { return Contains(kDeviceMeshes, dotted); }

bool LeadsToMeshes(std::string_view attribute) { return Contains(kLeadToMeshes, attribute); }

Result<Meaning> Interpret(std::string_view module, std::string_view name, unsigned protocol) {
  if (!IsDottedIdentifier(module) || !IsDottedIdentifier(name)) {
    return Fail(Errc::kBadInput, "the name of a class is not a dotted identifier");
  }
  const bool absent = protocol >= 3 && !ModuleOfPython2(module).empty();
  const std::string_view as_written = module;
  std::tie(module, name) = Modernise(module, name);
  Meaning meaning;
  const std::size_t dot = name.find('.');
  meaning.dotted = std::string(module) + "." + std::string(name.substr(0, dot));
  if (dot != std::string_view::npos) meaning.nested = name.substr(dot + 1);
  if (GivesAccess(module, meaning.dotted) || Contains(kRefusedMembers, name.substr(0, dot))) {
    return Fail(Errc::kBadInput, "refused: pickle names ", meaning.dotted);
  }
  if (absent) {
    return Fail(Errc::kBadInput, "Python 2 module ", as_written, " in a pickle of protocol ",
                protocol);
  }
  Classify(meaning);
  return meaning;
}

std::optional<DType> DTypeOfGlobal(std::string_view dotted) {
  if (!dotted.starts_with("torch.")) return std::nullopt;
  dotted.remove_prefix(6);
  const std::optional<DType> dtype = DTypeFromName(dotted);
  // Short forms ("fp32") are not torch names, and some types exist only in other formats.
  if (dtype && (Name(*dtype) != dotted || !IsKnownToTorch(*dtype))) return std::nullopt;
  return dtype;
}

std::string_view StorageClass(DType dtype) {
  for (const auto& [name, storage_dtype] : kStorageClasses) {
    if (storage_dtype == dtype) return name;
  }
  return {};
}

std::pair<std::string, std::string> Spelling(std::string_view dotted) {
  const std::size_t dot = dotted.rfind('.');
  std::string_view module = dotted.substr(0, dot);
  std::string_view name = dotted.substr(dot + 1);
  if (module == "builtins") {
    module = "__builtin__";
    if (name == "range") name = "xrange";
    if (name == "str") name = "unicode";
    if (name == "int") name = "long";
  } else if (module == "copyreg") {
    module = "copy_reg";
  }
  return {std::string(module), std::string(name)};
}

}  // namespace shardwright::pickle
