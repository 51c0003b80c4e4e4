# SPDX-License-Identifier: Apache-2.0
"""Shared code of the crash and hostile tests: running commands, looking at trees, a private folder."""

import hashlib
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time

SOURCE = pathlib.Path(__file__).resolve().parents[2]
DATA = SOURCE / "tests" / "data"
DEMO = DATA / "demo"
DEADLINE_SECONDS = 1800


class Broken(AssertionError):
    """The program broke a promise."""


def expect(condition, message):
    if not condition:
        raise Broken(message)


class Log:
    """Lines with the seconds since it was made."""

    def __init__(self):
        self.began = time.monotonic()

    def __call__(self, text):
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", flush=True)


def shown(argv):
    """A command as a table shows it: programs and folders without where they are, data of the tests with it."""
    words = []
    for word in map(str, argv):
        path = pathlib.Path(word)
        if path.is_absolute():
            word = str(path.relative_to(DATA)) if path.is_relative_to(DATA) else path.name
        words.append(word)
    return f"`{' '.join(words)}`"


def own_checkpoints():
    """Native checkpoints of real trainers that the project carries: one for each feature that they can have. Leaves
    out those that no command takes without rules of the user, which are stored next to them."""
    return sorted(path / "ckpt" for path in (DATA / "deepspeed").iterdir()
                  if (path / "ckpt" / "latest").is_file() and not (path / "rules.json").exists())


def real_checkpoints():
    """These, and more of them if the shared folder is present."""
    root = pathlib.Path(os.environ.get("SHARDWRIGHT_SHARED", SOURCE.parent / "shared"))
    folder = root / "fixtures" / "deepspeed"
    return own_checkpoints() + sorted(path / "ckpt" for path in folder.glob("*") if (path / "ckpt").is_dir())


def environment(fault=None):
    env = {key: value for key, value in os.environ.items() if not key.startswith("SHARDWRIGHT_")}
    env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", LC_ALL="C")
    if fault is not None:
        env["SHARDWRIGHT_FAULT"] = fault
    return env


class Outcome:
    def __init__(self, argv, code, stdout, stderr):
        self.argv = argv
        self.code = code if code >= 0 else 128 - code
        self.stdout = stdout
        self.stderr = stderr

    def __str__(self):
        return f"{' '.join(map(str, self.argv))}: exit code {self.code}\n{self.stderr}"


def run(argv, fault=None, deadline=DEADLINE_SECONDS, **options):
    """Runs a command to its end. A death by a signal is 128 + its number, as in a shell."""
    argv = [str(word) for word in argv]
    try:
        done = subprocess.run(argv, env=environment(fault), stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, errors="replace", timeout=deadline,
                              check=False, **options)
    except subprocess.TimeoutExpired as late:
        raise Broken(f"{' '.join(argv)}: not done after {deadline} s") from late
    return Outcome(argv, done.returncode, done.stdout, done.stderr)


def start(argv, fault=None, **options):
    return subprocess.Popen([str(word) for word in argv], env=environment(fault),
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, errors="replace", **options)


def finish(process, deadline=DEADLINE_SECONDS):
    try:
        stdout, stderr = process.communicate(timeout=deadline)
    except subprocess.TimeoutExpired as late:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        raise Broken(f"{' '.join(process.args)}: not done after {deadline} s") from late
    return Outcome(process.args, process.returncode, stdout, stderr)


def succeed(argv, **options):
    done = run(argv, **options)
    expect(done.code == 0, f"expected to succeed: {done}")
    return done


def tree(path):
    """Every file below a folder with the digest of its bytes, every folder with None."""
    path = pathlib.Path(path)
    found = {}
    for folder, folders, files in os.walk(path):
        base = pathlib.Path(folder)
        for name in folders:
            found[str((base / name).relative_to(path))] = None
        for name in files:
            digest = hashlib.blake2b((base / name).read_bytes()).hexdigest()
            found[str((base / name).relative_to(path))] = digest
    return found


def difference(expected, found):
    names = sorted(name for name in expected.keys() | found.keys()
                   if expected.get(name, "absent") != found.get(name, "absent"))
    return ", ".join(names[:6]) or "none"


def with_siblings(folder):
    """The demo checkpoint with sibling files of a trainer: small files, a large one, a folder."""
    source = shutil.copytree(DEMO, folder)
    for name, data in (("trainer_state.json", b"{}"), ("rng_state_0.pth", b"0"), ("zero_to_fp32.py", b"#!"),
                       ("model.safetensors", bytes(range(251)) * 10000)):
        (source / name).write_bytes(data)
    (source / "runs").mkdir()
    return source


def scratch_parent():
    """In memory by default: these tests sync thousands of small files."""
    shm = pathlib.Path("/dev/shm")
    if "TMPDIR" not in os.environ and shm.is_dir() and os.access(shm, os.W_OK):
        return shm
    return pathlib.Path(tempfile.gettempdir())


class Scratch:
    """A private folder that goes away."""

    def __init__(self, prefix):
        self.path = pathlib.Path(tempfile.mkdtemp(prefix=f"sw-{prefix}", dir=scratch_parent()))

    def __enter__(self):
        return self.path

    def __exit__(self, *_):
        shutil.rmtree(self.path, ignore_errors=True)
