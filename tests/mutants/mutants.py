#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Puts faults into the sources, one at a time, and checks that the tests notice.

The faults are in faults/*.txt, written by hand. All of them are built into one copy of the tree, each behind a switch
(switch.h) that an environment variable turns on. One run of the tests without a fault records which faults each test
comes by; then each fault is turned on, and only those tests run, those of its module first, then the shortest, until one fails.

Usage: mutants.py [--check] [--build] [--list] [--sample N] [--seed S] [--only WHAT]... [--seconds S] [--jobs N]
                  [--label LABEL]... [--tests REGEX] [--target NAME]... [--folder FOLDER] [--no-build]
  --check      only: each text is in its file exactly once, each number is given once
  --build      only: make the copy and build it
  --list       only: the results so far
  --sample N   N of the faults, drawn with --seed S (default 1)
  --only WHAT  faults with this number, or in files with a path that begins with this text
  --seconds S  no more tests for a fault after S seconds of tests that passed; default 600
  --jobs N     how many tests at once; default SHARDWRIGHT_JOBS, or one per processor
  --label L    tests with this label; default fast and mpi
  --tests R    only tests with matching names: faults that they miss are reported as open
  --target T   build only this target; tests that are not there are left out
  --no-build   take the build as it is, also one that is not complete
  --folder F   where the copy, its build and the results are kept; default build/mutants

Results are kept: after a change to the sources or tests the test that caught a fault runs first, and all others
only if it passes. Exits 1 if fewer than 95 % of the faults are caught, or a fault is not reached by any test.

Each campaign of scripts/night was run once with a fault that it must detect. A number is one of faults/*.txt; set SW_MUTANT to
it in the build made here.
  power          all syncs are left out (power_test.py --forget syncs); every case fails
  kills          117: the stage of a finished commit is continued instead of the old output
  kills-stores   914: a manifest is written before the blobs that it lists
  ranks          a launcher that leaves the other ranks running (mpirun --enable-recovery)
  errors         151: a failed write is not reported. 654: --verify=readback reads nothing. 116: the remains of a kill in the
                 middle of a commit are not removed
  damage         669: a changed text is accepted
  hostile        516: a member with a wrong checksum is read. With --traced: a command that starts a program, opens a socket or
                 reads /etc/passwd (traced_test.py)
  promises       a command that allocates 200 MiB for nothing
  large          533: the high half of a 64-bit number is lost
  differential   39 wrong readers and writers (lies_test.py)
  properties     455: a later run starts at the beginning of its unit. 1115: two transfers of one
                 round have the same receiver. 957: tokens of the resume point are not counted as lost
  threads        exec::FilePool without its lock: 115 reports in exec_test
"""

import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass

sys.dont_write_bytecode = True

from fault_tables import HERE, KINDS, ROOT, die, read_faults, switched  # pylint: disable=wrong-import-position

sys.path.insert(0, str(ROOT / "tests" / "docs"))

import tables  # pylint: disable=wrong-import-position

GATE = 0.95
# Memory for the effects of a fault on a test, and no more.
MEMORY = 12 << 30


def write_changed(path, data):
    if not path.is_file() or path.read_bytes() != data:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def make_tree(tree, faults, sources):
    """Copies what git knows or would add; only what changed is written, so that only that is built again. Returns its digest."""
    listed = subprocess.run(["git", "-c", f"safe.directory={ROOT}", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT,
                            check=True, capture_output=True).stdout.decode().split("\0")
    names = sorted({name for name in listed if name and (ROOT / name).is_file()})
    by_path = {}
    for fault in faults:
        by_path.setdefault(fault.path, []).append(fault)
    digest = hashlib.sha256()
    for name in names:
        path = ROOT / name
        data = path.read_bytes()
        if not name.startswith(("tests/mutants/", "docs/", "CHANGELOG")):
            digest.update(name.encode() + b"\0" + hashlib.sha256(data).digest())
        if name in by_path:
            data = switched(sources[name], by_path[name]).encode()
        write_changed(tree / name, data)
        os.chmod(tree / name, path.stat().st_mode & 0o777)
    for path in [path for path in tree.rglob("*") if path.is_file() or path.is_symlink()]:
        if str(path.relative_to(tree)) not in names and "__pycache__" not in path.parts:
            path.unlink()
    return digest.hexdigest()[:16]


def build(folder, targets, jobs):
    tree, where = folder / "tree", folder / "build"
    write_changed(folder / "switch.h", (HERE / "switch.h").read_bytes())
    log = folder / "build.log"
    flags = f"-w -include {folder / 'switch.h'}"
    with open(log, "w", encoding="utf-8") as out:
        for command in (["cmake", "-S", tree, "-B", where, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", f"-DCMAKE_CXX_FLAGS={flags}",
                         "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG", "-DSW_TORCH=off", "-DSW_CUDA=off"],
                        ["cmake", "--build", where, "--parallel", str(jobs),
                         *(word for target in targets for word in ("--target", target)), "--", "-k", "0"]):
            done = subprocess.run([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            if done.returncode != 0:
                die(f"the build failed, log in {log}")


@dataclass
class Test:
    name: str
    command: list
    where: str
    environment: dict
    skip_code: int = None
    skip_text: str = None
    labels: tuple = ()
    seconds: float = 0.0  # Of the run without a fault.
    reached: tuple = ()

    @property
    def limit(self):
        return 20 + 10 * self.seconds


def read_tests(where, labels, names):
    listed = subprocess.run(["ctest", "--test-dir", str(where), "--show-only=json-v1"], check=True, capture_output=True,
                            text=True).stdout
    tests = []
    for row in json.loads(listed)["tests"]:
        properties = {one["name"]: one["value"] for one in row["properties"]}
        # The table is looked at in the sources; the copy's are switched.
        if not set(properties.get("LABELS", [])) & set(labels) or row["name"] == "mutants_apply":
            continue
        if "command" not in row or not shutil.which(row["command"][0]) or (names and not re.search(names, row["name"])):
            continue
        environment = dict(word.split("=", 1) for word in properties.get("ENVIRONMENT", []))
        tests.append(Test(row["name"], row["command"], properties["WORKING_DIRECTORY"], environment,
                          properties.get("SKIP_RETURN_CODE"), (properties.get("SKIP_REGULAR_EXPRESSION") or [None])[0],
                          tuple(properties.get("LABELS", []))))
    return tests


def kill_marked(mark):
    """Ends every process that has `mark` in its environment: what a test left behind."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark.encode() in pathlib.Path("/proc", entry.name, "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:
                pass


def bounded():
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # shells have their background jobs ignore it


def run_test(test, scratch, limit, **environment):
    """Runs a test with files in a folder of its own: "passed", "failed", "skipped" or "too slow", the seconds, its output."""
    work = pathlib.Path(tempfile.mkdtemp(dir=scratch))
    os.chmod(work, 0o755)
    mark = f"SW_MUTANT_RUN={work.name}-{os.getpid()}"
    name, value = mark.split("=")
    began = time.monotonic()
    output = ""
    log = work.with_suffix(".log")
    with open(log, "w+b") as out:
        process = subprocess.Popen(test.command, cwd=test.where, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                                   preexec_fn=bounded, env={**os.environ, **test.environment, **environment, name: value,
                                                            "TMPDIR": str(work), "GTEST_FAIL_FAST": "1", "GTEST_BRIEF": "1"})
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        seconds = time.monotonic() - began
        kill_marked(mark)
        out.seek(0)
        output = out.read(1 << 20).decode(errors="replace")
    log.unlink()
    shutil.rmtree(work, ignore_errors=True)
    if code is None:
        return "too slow", seconds, output
    # A program that ends at its first failure prints last that it has skipped the rest.
    if code == test.skip_code or (code == 0 and test.skip_text and re.search(test.skip_text, output)):
        return "skipped", seconds, output
    return ("passed" if code == 0 else "failed"), seconds, output


def find_reach(folder, tests, scratch, jobs, digest):
    """Runs all tests without a fault; sets what each reaches, and leaves out those that do not pass."""
    known_path = folder / "reach.json"
    known = json.loads(known_path.read_text()) if known_path.exists() else {}
    if known.get("digest") != digest:
        known = {"digest": digest, "tests": {}}
    lock = threading.Lock()

    def one(test):
        if test.name in known["tests"]:
            return
        with tempfile.NamedTemporaryFile(dir=scratch, prefix="reach-") as reach:
            state, seconds, output = run_test(test, scratch, 900, SW_MUTANT_REACH=reach.name)
            numbers = sorted({int(line) for line in reach.read().decode().split()})
        if state != "passed":
            (folder / f"{test.name}.log").write_text(output)
        with lock:
            known["tests"][test.name] = [state, seconds, numbers]
            known_path.write_text(json.dumps(known))

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, tests))
    sound = []
    for test in tests:
        state, test.seconds, test.reached = known["tests"][test.name]
        if state == "passed":
            sound.append(test)
        elif state != "skipped":
            print(f"mutants: {test.name}: {state} without a fault, left out (output in {folder / test.name}.log)")
    return sound


def judge(fault, tests, before, scratch, seconds, all_tests):
    """The outcome of one fault."""
    reaching = [test for test in tests if fault.number in test.reached]
    if not reaching:
        return {"state": "unreached" if all_tests else "unfinished"}
    # The test that caught it before, then the tests of its module, then the shortest.
    own = f"/tests/unit/{fault.path.split('/')[1]}"
    reaching.sort(key=lambda test: (test.name != before.get("test"), own not in test.where, test.seconds))
    passed, spent = [], 0.0
    for test in reaching:
        if spent > seconds:
            return {"state": "unfinished", "passed": passed, "left": len(reaching) - len(passed)}
        state, took, output = run_test(test, scratch, test.limit, SW_MUTANT=str(fault.number))
        if state in ("failed", "too slow"):
            last = [line for line in output.splitlines() if line.strip()]
            return {"state": "caught", "test": test.name, "how": state, "seconds": round(took, 2),
                    "said": (last[-1] if last else "")[:200]}
        passed.append(test.name)
        spent += took
    return {"state": "survived" if all_tests else "unfinished", "passed": passed}


def report(faults, results):
    """The table by module and kind, and the faults that no test caught. Returns the share of caught ones."""
    rows, kinds = {}, {}
    caught = judged = 0
    for fault in faults:
        state = "equivalent" if fault.equivalent else results.get(fault.key, {}).get("state", "not run")
        for table, key in ((rows, fault.path.split("/")[1]), (kinds, fault.kind)):
            row = table.setdefault(key, {})
            row[state] = row.get(state, 0) + 1
        if state not in ("equivalent", "not run"):
            judged += 1
            caught += state == "caught"
            if state != "caught":
                print(f"{state}: {fault}")
    states = ("caught", "survived", "unreached", "unfinished", "equivalent", "not run")
    for title, table in (("Kind", kinds), ("Module", rows)):
        tables.show((title, *map(str.capitalize, states)),
                    [(f"`{key}`", *(row.get(state, 0) for state in states)) for key, row in sorted(table.items())])
    share = caught / judged if judged else 0.0
    print(f"{caught} of {judged} faults caught ({100 * share:.1f} %), {len(faults) - judged} equivalent or not run")
    return share


def read_results(path):
    results = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            results[row["key"]] = row
    return results


def main():
    if any(word in ("-h", "--help") for word in sys.argv[1:]):
        print(__doc__.strip())
        return 0
    parser = argparse.ArgumentParser(prog="mutants.py", add_help=False, allow_abbrev=False)
    for flag in ("--check", "--build", "--list"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--label", action="append", default=[])
    parser.add_argument("--tests")
    parser.add_argument("--target", action="append", default=[])
    parser.add_argument("--no-build", action="store_true")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--jobs", type=int, default=int(os.environ.get("SHARDWRIGHT_JOBS") or os.cpu_count()))
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "build" / "mutants")
    asked = parser.parse_args()

    faults, sources = read_faults()
    if asked.check:
        kinds = {kind: sum(fault.kind == kind for fault in faults) for kind in KINDS}
        print(f"{len(faults)} faults in {len(sources)} files: " + ", ".join(f"{count} {kind}" for kind, count in kinds.items()))
        return 0
    chosen = faults
    if asked.only:
        chosen = [fault for fault in chosen if any(str(fault.number) == one or fault.path.startswith(one) for one in asked.only)]
    if asked.sample is not None:
        chosen = sorted(random.Random(asked.seed).sample(chosen, min(asked.sample, len(chosen))), key=lambda fault: fault.number)
    if not chosen:
        die("no such fault")
    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    results_path = folder / "results.jsonl"
    results = read_results(results_path)
    if asked.list:
        report(chosen, results)
        return 0

    digest = make_tree(folder / "tree", faults, sources)
    if not asked.no_build:
        build(folder, asked.target, asked.jobs)
    if asked.build:
        return 0
    tests = read_tests(folder / "build", asked.label or ["fast", "mpi"], asked.tests)
    switches = hashlib.sha256(json.dumps([(fault.number, fault.key) for fault in faults]).encode()).hexdigest()
    memory = pathlib.Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="shardwright-mutants.", dir=memory if os.access(memory, os.W_OK) else None) as scratch:
        os.chmod(scratch, 0o755)
        tests = find_reach(folder, tests, scratch, asked.jobs, digest + switches)
        lock = threading.Lock()

        def one(fault):
            before = results.get(fault.key, {})
            if fault.equivalent or (before.get("tree") == digest and before["state"] in ("caught", "survived", "unreached")):
                return
            row = {"key": fault.key, "number": fault.number, "tree": digest, **judge(fault, tests, before, scratch, asked.seconds, not asked.tests)}
            with lock:
                results[fault.key] = row
                with open(results_path, "a", encoding="utf-8") as out:
                    out.write(json.dumps(row) + "\n")
                print(f"{row['state']}: {fault}" + (f": {row['test']}" if "test" in row else ""), flush=True)

        with concurrent.futures.ThreadPoolExecutor(asked.jobs) as pool:
            list(pool.map(one, chosen))
    return 0 if report(chosen, results) >= GATE else 1


if __name__ == "__main__":
    sys.exit(main())
