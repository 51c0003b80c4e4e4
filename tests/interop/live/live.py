# SPDX-License-Identifier: Apache-2.0
"""Shared code of the tests of loading into running trainers."""

import json
import os
import pathlib
import signal
import sys
import time
import unittest

PACKAGE = None  # the folder of the package, after start()
EVERYTHING = False  # --all: more cases, which take long
HERE = pathlib.Path(__file__).resolve().parent
for folder in ("deepspeed", "formats"):
    sys.path.insert(0, str(HERE.parent / folder))

import ranks  # first: it sets the environment up
import commands
import torch


def start():
    """Takes the first two arguments of a test, the folder of the commands and that of the package, and --all."""
    global EVERYTHING, PACKAGE
    folder, package = sys.argv.pop(1), sys.argv.pop(1)
    if "--all" in sys.argv:
        sys.argv.remove("--all")
        EVERYTHING = True
    if not package:
        print("skipped: the build has no operators for PyTorch (configure it with -DSW_TORCH_PYTHON=...)")
        sys.exit(1 if os.environ.get("CI") else 77)  # there the trainers' PyTorch must have been found
    PACKAGE = package
    sys.path.insert(0, package)
    return commands.Commands(folder, "")


class InFolder(unittest.TestCase):
    """A test with a folder of its own, where agents of its trainers are too."""

    ucp = None

    def setUp(self):
        scratch = commands.Scratch()
        self.addCleanup(scratch.close)
        self.folder = scratch.path
        os.environ["XDG_RUNTIME_DIR"] = str(self.folder)


def into_engine(engine, checkpoint, left_out):
    """Collective. As train.load, straight from a checkpoint of any layout; the note in the client state."""
    import shardwright
    loaded = shardwright.load(engine, checkpoint, strict=not left_out, threads=1)
    if int(loaded) != engine.global_steps:
        raise AssertionError(f"{int(loaded)} steps, the engine has made {engine.global_steps}")
    return loaded.client_state.get("note")


def keep(engine, case, folder, iteration):
    """Collective. Keeps what an engine has in memory: every tensor whole, and its counters."""
    import train
    from tensors import logical_tensors
    tensors, counted = logical_tensors(engine, case), train.counters(engine, case)
    if torch.distributed.get_rank() == 0:
        torch.save(tensors, folder / f"tensors{iteration}.pt")
        (folder / f"counters{iteration}.json").write_text(json.dumps(counted))


def kept(folder, restored):
    """The tensors that keep() has kept of the versions of modules that a restore reports."""
    tensors = {}

    def of(version):
        if version not in tensors:
            tensors[version] = torch.load(folder / f"tensors{version}.pt", weights_only=True)
        return tensors[version]

    want = {}
    for name in of(restored["iteration"]):
        versions = [version for module, version in restored["versions"].items() if name.startswith(module + ".")]
        want[name] = of(versions[0] if versions else restored["iteration"])[name]
    return want


def agent_pid(address):
    from shardwright._agent import Connection
    with Connection(address) as agent:
        return agent.status()["pid"]


def kill(pid):
    """SIGKILL; the process is gone, or a zombie until its parent waits. Its sockets are closed with its last thread."""
    os.kill(pid, signal.SIGKILL)
    process = pathlib.Path(f"/proc/{pid}")
    try:
        while len(list((process / "task").iterdir())) > 1 or (
                (process / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"):
            time.sleep(0.01)
    except (FileNotFoundError, ProcessLookupError):
        pass


def state_of(model, optimizer):
    """Collective. Every tensor of a model and its optimizer, whole: NAME/STATE."""
    def whole(tensor):
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return full.detach().clone()
    found = {}
    for name, param in model.named_parameters():
        found[f"{name}/weight"] = whole(param)
        for key, value in (optimizer.state.get(param, {}) if optimizer else {}).items():
            found[f"{name}/{key}"] = whole(value)
    return found


def differing(got, want):
    """Names of tensors that differ between two states, bit for bit."""
    return sorted(name for name in got.keys() | want.keys()
                  if name not in got or name not in want or not torch.equal(got[name], want[name]))
