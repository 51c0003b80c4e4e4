# SPDX-License-Identifier: Apache-2.0
"""The rules that check.py applies: modules and their includes, files with privileges, and the top level."""

import re

# Each module of lib/ and the modules it may include directly; what those may include, it may too.
MODULES = {
    "support": [],
    "engine": ["support"],
    "files": ["engine"],
    "checkpoints": ["files"],
    "token_counts": ["files"],
    "convert": ["checkpoints"],
    "placement": ["token_counts"],
    "partial": ["convert", "token_counts"],
    "trainer": ["partial", "placement"],
}

# The submodules of a module, its sub-folders, and the submodules that each may include directly. ""
# is the module's own folder. A module that is not listed has no sub-folders with source files.
SUBMODULES = {
    "support": {
        "base": [],
        "os/locks": ["base"],
        "os/sockets": ["base"],
        "os": ["base", "os/locks", "os/sockets"],
        "os/net": ["os"],
        "zstd": ["os"],
        "json": ["base"],
        "comm": ["base"],
        "comm/watch": ["comm", "os"],
        "text": ["base"],
        "html": ["text"],
        "cli": ["comm/watch", "text"],
    },
    "engine": {
        "tensor": [],
        "layout": ["tensor"],
        "plan": ["layout"],
        "device": [],
        "device/cuda": ["device"],
        "exec": ["plan", "device"],
        "exec/run": ["exec"],
    },
    "files": {
        "": [],
        "zip": [""],
        "pickle": [""],
        "torch_pt": ["pickle", "zip"],
        "safetensors": [""],
        "dcp": ["torch_pt"],
    },
    "checkpoints": {
        "": ["dcp", "deepspeed/native", "deepspeed/universal", "dtensor", "megatron", "name_maps", "safetensors"],
        "model": [],
        "pickled": ["model"],
        "tp_rules": ["model"],
        "name_maps": ["tp_rules"],
        "dcp": ["pickled", "tp_rules"],
        "deepspeed/common": ["pickled", "tp_rules"],
        "deepspeed/native": ["deepspeed/common"],
        "deepspeed/native/read": ["deepspeed/native"],
        "deepspeed/native/write": ["deepspeed/native"],
        "deepspeed/universal": ["deepspeed/common"],
        "dtensor": ["pickled", "tp_rules"],
        "megatron": ["pickled", "tp_rules"],
        "megatron/read": ["megatron"],
        "megatron/write": ["megatron"],
        "safetensors": ["pickled", "tp_rules"],
    },
    "convert": {
        "": ["scan"],
        "api": [""],
        "scan": [],
    },
    "placement": {
        "core": [],
        "recovery": ["core"],
        "migration": ["core"],
        "affinity": ["migration"],
        "cost": ["core"],
        "strategy": ["migration", "recovery"],
        "best": ["strategy"],
        "verify": ["strategy"],
        "io": ["cost", "verify", "io/html"],
        "io/html": [],
        "failure_simulation": ["migration", "strategy"],
        "planning": ["affinity", "cost", "io", "failure_simulation"],
    },
    "partial": {
        "optimizer_steps": [],
        "select": [],
        "select/sharding": ["select"],
        "store": ["select"],
        "gradient_log": ["store", "optimizer_steps"],
        "save": ["select/sharding", "store"],
        "planner/forecast": ["select/sharding"],
        "planner": ["planner/forecast", "store"],
        "agent/throttle": ["planner/forecast"],
        "agent/peers": ["select/sharding", "store"],
        "agent/memory": ["save", "gradient_log"],
        "agent": ["agent/memory", "agent/throttle", "agent/peers"],
        "restore": ["agent"],
        "report": ["restore"],
    },
    "trainer": {
        "load": [],
        "cache": ["load"],
        "torch": ["cache"],
    },
}

# Folders of lower modules that only these folders of lib/ and those inside them may include, although
# the arrows between modules would allow more.
ABOVE = ["convert", "placement", "partial", "trainer"]
FORMATS = ["files", "checkpoints", "token_counts"]
LIMITED = {
    "support/cli": ["support/cli"],
    "support/html": ["support/html", "placement", "partial"],
    "support/text": ["support", "placement", "partial"],
    "support/comm": ["support", "engine/device", "engine/exec", *ABOVE],
    "support/json": ["support", "engine/exec", *FORMATS, *ABOVE],
    "support/os": ["support", "engine/exec", *FORMATS, *ABOVE],
    "support/zstd": ["support", "engine/exec", *FORMATS, *ABOVE],
    "engine/layout": ["engine", "checkpoints", *ABOVE],
    "engine/plan": ["engine", "checkpoints", *ABOVE],
    "engine/device": ["engine", *ABOVE],
    "engine/exec": ["engine", *ABOVE],
}

# Headers of others that are kept behind one module; None means nowhere.
FENCED = [
    (re.compile(r"mpi(-ext)?\.h"), "support/comm"),
    (re.compile(r"openssl/.*"), "support/os"),
    (re.compile(r"torch/(csrc/stable|headeronly)/.*"), "trainer/torch"),
    (re.compile(r"(torch/(csrc(?!/stable/)|nn|optim|data)|ATen|c10|caffe2)/.*"), None),
    (re.compile(r"torch/(torch|extension|library|all|script|python|types|cuda)\.h"), None),
    (re.compile(r"(cuda|cu(blas|rand)|nccl|nvToolsExt)[^/]*(/.*)?"), "engine/device"),
]

# nlohmann's parsers: their trees have no limit of memory, MessagePack none of depth, and ordered
# objects take quadratic time. Texts from outside go through format/json (and format/safetensors,
# which keeps no tree).
PARSE = re.compile(r"::(?:sax_)?parse\(|::accept\(|\bfrom_(?:msgpack|cbor|ubjson|bjdata|bson)\(")
PARSERS = {
    "lib/support/json/parse.cc",
    "lib/files/safetensors/header_sax.cc",
    # Texts that this run, or the process that it is loaded into, has made itself.
    "apps/ucp-load/serve.cc",
    "lib/support/cli/report.cc",
    "lib/engine/exec/manifest.cc",
    "lib/partial/planner/plan_json.cc",
    "lib/trainer/cache/serve.cc",
    "lib/trainer/torch/answer.h",
    "lib/convert/convert.cc",
}

# Tests that stand in for the subjects of such headers.
STAND_INS = {"engine/device": ("tests/device/", "tests/unit/engine/device/"), None: ("tests/interop/live/far_device.cc",)}

# Calls that take a path. They are made in lib/support/os, which opens names relative to their directory and follows no link.
PATH_CALL = re.compile(
    r"(?<![\w.>])(?:(?:std::)?[io]?fstream\b|std::filesystem\b|::open\(|open\([^()]*(?:\(\))?[^()]*\bO_(?:RD|WR|CREAT|PATH)|"
    r"(?:::)?(?:openat2?|creat|fopen|freopen|renameat2?|rename|unlinkat|unlink|mkdirat|mkdir|rmdir|linkat|link|symlinkat|"
    r"symlink|fchmodat|chmod|fchownat|chown|truncate|mkfifo|mknod|mkd?o?stemp|mkdtemp|opendir|utimensat)\()"
)
# Files outside lib/support/os that make such calls, with the paths that they open.
PATH_CALLERS = {
    "lib/support/base/system.cc": "/proc",
    "lib/support/cli/console.cc": "--log-file",
    "lib/support/cli/report.cc": "--json",
    "lib/support/cli/resources.cc": "/sys/fs/cgroup",
    "lib/engine/device/host_memory.cc": "/proc",
    "lib/engine/device/windows.cc": "/proc",
}

TOP_LEVEL = {
    "CMakeLists.txt",
    "CMakePresets.json",
    "CITATION.cff",  # citation tools look for it here
    "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md",
    "Containerfile",
    "LICENSE",
    "README.md",
    "apps",
    "docs",
    "examples",
    "lib",
    "patterns",
    "pyproject.toml",  # pip looks for it here
    "scripts",
    "tests",
}
# Not part of the source tree, and ignored by git.
OUTPUTS = {"build"}
