#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Damage at rest: files that are small enough to try all of them, one bit, one cut, one swap at a time.

Usage: damage_test.py BIN [--bits N] [--payload-bits N] [--seed N] [--subject NAME]... [--keep FOLDER]

Each subject is a folder and the commands that check or use it. A part of the folder is damaged, and each command must
refuse, with a documented exit code, or give exactly what it gives for the sound folder: output and report. What a
checking command lets pass, no other may refuse. --bits tries so many bits of each small file, evenly spread, instead of
all; --payload-bits so many bits of all payloads.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import random
import shutil
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "crash"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "cli" / "moe"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "docs"))

import command  # pylint: disable=wrong-import-position
import gradient_log  # pylint: disable=wrong-import-position
import moe_checkpoint  # pylint: disable=wrong-import-position
import tables  # pylint: disable=wrong-import-position
from harness import Broken, Log, Scratch, expect, run, succeed, tree  # pylint: disable=wrong-import-position

REFUSALS = {3, 4, 5, 6, 8, 9, 10}  # 6: the output folder has other content
# "replay" reports the losses of a damaged log of gradients; its results are in the output.
VARYING = {"replay", "seconds", "plan_seconds", "plan_seconds_mean", "plan_seconds_max", "peak_memory_bytes", "passes"}
PARTLY = "refused by some, no effect on the rest"
KINDS = ("bits", "payload bits", "cuts", "swaps", "copies", "mixtures")  # of damage
MODEL = moe_checkpoint.Model(layers=1, experts=2, ep=1, ranks=1, hidden=3)


class Judge:
    """A command with relative paths. \\param checks  it only looks; \\param makes  its output"""

    def __init__(self, *argv, makes=None, checks=False):
        self.argv, self.makes, self.checks = list(argv), makes, checks


class Subject:
    def __init__(self, name, make, judges, payload=()):
        self.name, self.make, self.judges = name, make, judges
        self.payload = tuple(payload)  # parts of the names of files that are mostly tensors


def timeless(value):
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if key not in VARYING}
    return [timeless(item) for item in value] if isinstance(value, list) else value


class Place:
    """A copy of a subject in which one thing at a time is damaged."""

    def __init__(self, subject, folder, sound):
        self.subject, self.folder = subject, folder
        shutil.copytree(sound, folder, symlinks=True)
        self.wanted = None

    def outcomes(self):
        return [self.outcome(judge) for judge in self.subject.judges]

    def outcome(self, judge):
        """\\returns exit code, what it gave, its message"""
        report = self.folder / "report.json"
        done = run([*judge.argv, f"--json={report}"], cwd=self.folder, deadline=600)
        expect(done.code in REFUSALS | {0}, f"no documented exit code: {done}")
        said = json.loads(report.read_text()) if done.code == 0 else {}
        given = json.dumps(timeless(said.get("result")), sort_keys=True)
        if judge.makes is not None:
            out = self.folder / judge.makes
            if done.code == 0:
                given = (given, self.content(out))
            else:
                expect(not out.exists(), f"refused, but {out.name} is there: {done}")
            shutil.rmtree(out, ignore_errors=True)
            if out.is_file():
                out.unlink()
        return done.code, given, done.stderr

    def content(self, out):
        """The manifest without the fingerprint, which covers all of the source, also its unused parts."""
        if not out.is_dir():
            return out.read_bytes()
        found = tree(out)
        manifest = json.loads((out / "shardwright.json").read_text())
        manifest.get("source", {}).pop("fingerprint", None)
        return tuple(sorted({**found, "shardwright.json": json.dumps(manifest)}.items()))

    def judge(self, changes):
        """\\param changes  {file: its damaged bytes}. \\returns what became of it"""
        kept = {name: (self.folder / name).read_bytes() for name in changes}
        for name, data in changes.items():
            self.write(name, data)
        try:
            found = self.outcomes()
        finally:
            for name, data in kept.items():
                self.write(name, data)
        accepted = [code == 0 for code, _, _ in found]
        for judge, (code, given, message), (_, wanted, _) in zip(self.subject.judges, found, self.wanted):
            if code == 0 and not judge.checks and given != wanted:
                raise Broken(f"{judge.argv[0].name} accepts it and gives something else: {told(given, wanted)}")
            if code != 0 and not [line for line in message.splitlines() if " error: " in line]:
                raise Broken(f"{judge.argv[0].name} ends with {code} and no word")
        checks = [judge.checks for judge in self.subject.judges]
        for passed in [ok for ok, check in zip(accepted, checks) if check]:
            if passed and not all(accepted):
                wrong = next(message for code, _, message in found if code != 0)
                raise Broken(f"the check passes, but {wrong.strip()[-300:]}")
        return "no effect" if all(accepted) else "refused" if not any(accepted) else PARTLY

    def write(self, name, data):
        # In place, with its times: a source is known by them.
        path = self.folder / name
        times = path.stat()
        path.write_bytes(data)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def told(given, wanted):
    """The first difference of two outcomes, short."""
    if isinstance(given, tuple):
        if given[0] == wanted[0]:
            parts = [one for one in zip(given[1], wanted[1]) if one[0] != one[1]] if isinstance(given[1], tuple) else []
            return f"output {parts[0][0][0] if parts else ''}"
        given, wanted = given[0], wanted[0]
    at = next((i for i, (a, b) in enumerate(zip(given, wanted)) if a != b), 0)
    return f"report ...{given[max(0, at - 60):at + 40]}... not ...{wanted[max(0, at - 60):at + 40]}..."


# --- subjects -----------------------------------------------------------------------------------------------------


def make_store(programs, folder):
    """Three saves with tokens, a recovery, a log of gradients."""
    tokens, _ = moe_checkpoint.series(folder / "run", MODEL, range(1, 5))

    def save(iteration, *more):
        succeed([programs / "pec-save", folder / "run" / f"global_step{iteration}", folder / "store", "--k", "1",
                 "--tokens", tokens, "--threads", "1", *more])

    save(1)
    save(2)
    succeed([programs / "pec-restore", folder / "store", folder / "out", "--at", "1"])
    shutil.rmtree(folder / "out")
    save(2)
    save(3)
    head = json.loads((folder / "store" / "store.json").read_text())
    log = gradient_log.Log(folder / "store" / "logs", head["fingerprint"])
    log.mark()
    log.begin()
    log.mark()
    return sorted(path for path in (folder / "store").rglob("*") if path.is_file())


def make_demo(programs, folder, *argv):
    moe_checkpoint.write(folder / "run", MODEL, 1)
    if argv:
        succeed([programs / argv[0], folder / "run", folder / "made", *argv[1:]])
        return sorted(path for path in (folder / "made").rglob("*") if path.is_file())
    return sorted(path for path in (folder / "run").rglob("*") if path.is_file())


def make_plan(programs, folder):
    (folder / "loads.jsonl").write_text(command.jsonl(command.trace(records=2, layers=1, experts=4)))
    succeed([programs / "moe-replace", "loads.jsonl", "--nodes", "2", "--gpus", "1", "--slots", "3", "--expert-bytes",
             "1MB", "-o", "plan.json"], cwd=folder)
    return [folder / "plan.json"]


def subjects(programs):
    load, save, restore, replace = (programs / name for name in ("ucp-load", "pec-save", "pec-restore", "moe-replace"))
    target = ("--target", "zero=1,dp=1", "--threads", "1")
    convert = Judge(load, "made", "out", *target, makes="out")

    def demo(*argv):
        return lambda folder: make_demo(programs, folder, *argv)

    return [
        Subject("store", lambda folder: make_store(programs, folder),
                [Judge(save, "check", "store", "--threads", "1", checks=True),
                 Judge(restore, "store", "out", "--read-only", "--threads", "1", makes="out"),
                 Judge(save, "run/global_step4", "store", "--policy", "load-aware", "--k", "1", "--tokens", "run/tokens.jsonl", "-n")],
                payload=("blobs/",)),
        Subject("catalogue", demo("ucp-extract"), [convert], payload=()),
        Subject("pack", demo("ucp-extract", "--pack=copy"), [convert], payload=("/pack/",)),
        Subject("pack-zstd", demo("ucp-extract", "--pack=zstd"), [convert], payload=("/pack/",)),
        Subject("atoms", demo("ucp-union"), [convert], payload=(".pt",)),
        Subject("output", demo("ucp-load", *target), [Judge(load, "--check", "run", "made")], payload=(".pt",)),
        Subject("native", demo(), [Judge(load, "run", "out", *target, makes="out")], payload=(".pt",)),
        Subject("plan", lambda folder: make_plan(programs, folder),
                [Judge(replace, "loads.jsonl", "--nodes", "2", "--gpus", "1", "--slots", "3", "--expert-bytes", "1MB",
                       "--old", "plan.json", "-o", "next.json", makes="next.json"),
                 Judge(replace, "evaluate", "plan.json", "loads.jsonl", "--nodes", "2", "--gpus", "1", "--slots", "3", "--expert-bytes", "1MB")]),
    ]


# --- damage -------------------------------------------------------------------------------------------------------


def spread(count, limit):
    """All of `count` numbers, or `limit` of them, evenly."""
    if limit is None or count <= limit:
        return range(count)
    return [i * count // limit for i in range(limit)]


def flipped(data, *bits):
    out = bytearray(data)
    for bit in bits:
        out[bit // 8] ^= 1 << bit % 8
    return bytes(out)


def damages(files, payload, bits, payload_bits, seed):
    """\\param files  {name: bytes}. Yields (kind, what, {name: damaged bytes})"""
    choose = random.Random(seed)
    small = {name: data for name, data in files.items() if not any(part in name for part in payload)}
    large = {name: data for name, data in files.items() if name not in small}
    for name, data in small.items():
        for bit in spread(8 * len(data), bits):
            yield "bits", f"{name} bit {bit}", {name: flipped(data, bit)}
        for at in spread(len(data), None if bits is None else max(1, bits // 8)):
            yield "cuts", f"{name} cut at {at}", {name: data[:at]}
    total = 8 * sum(map(len, large.values()))
    for number in sorted(choose.sample(range(total), min(total, payload_bits))):
        for name, data in large.items():
            if number < 8 * len(data):
                yield "payload bits", f"{name} bit {number}", {name: flipped(data, number)}
                break
            number -= 8 * len(data)
    pairs = []
    for one in files:
        for other in files:
            alike = os.path.dirname(one).split("/")[0:2] == os.path.dirname(other).split("/")[0:2]
            if one < other and alike and os.path.splitext(one)[1] == os.path.splitext(other)[1] and files[one] != files[other]:
                pairs.append((one, other))
    for one, other in pairs if bits is None or len(pairs) <= bits else choose.sample(pairs, bits):
        yield "swaps", f"{one} and {other}", {one: files[other], other: files[one]}
        yield "copies", f"{one} over {other}", {other: files[one]}
        yield "copies", f"{other} over {one}", {one: files[other]}
    for number in range(200 if bits is None else max(3, bits // 4)):
        names = choose.sample(sorted(files), min(len(files), choose.randrange(1, 4)))
        yield "mixtures", f"mixture {number}", {
            name: flipped(files[name], *(choose.randrange(8 * len(files[name])) for _ in range(choose.randrange(2, 6))))
            for name in names if files[name]}


def try_subject(subject, arguments, log):
    counts, broken, harmless = collections.Counter(), [], collections.Counter()
    with Scratch("damage-") as scratch:
        sound = scratch / "sound"
        sound.mkdir()
        names = [str(path.relative_to(sound)) for path in subject.make(sound)]
        files = {name: (sound / name).read_bytes() for name in names}
        places = [Place(subject, scratch / f"place-{i}", sound) for i in range(arguments.jobs)]
        for place in places:
            place.wanted = place.outcomes()
            for (code, given, message), (_, first, _) in zip(place.wanted, places[0].wanted):
                expect(code == 0, f"{subject.name}: the sound one is refused: {message}")
                expect(given == first, f"{subject.name}: sound ones differ: {told(given, first)}")
        cases = list(damages(files, subject.payload, arguments.bits, arguments.payload_bits, arguments.seed))

        def some(place, part):
            for kind, what, changes in part:
                try:
                    found = place.judge(changes)
                    counts[kind, found] += 1
                    if found == "no effect":
                        harmless[what.split(" ")[0]] += 1
                except Broken as violation:
                    counts[kind, "VIOLATION"] += 1
                    broken.append((what, changes, violation))
                    if len(broken) <= arguments.show:
                        log(f"VIOLATION {subject.name}: {what}: {str(violation)[:700]}")

        with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
            for done in [pool.submit(some, place, cases[i::arguments.jobs]) for i, place in enumerate(places)]:
                done.result()
        if broken:
            _, changes, _ = min(broken, key=lambda one: len(one[1]))
            for name, data in changes.items():
                (arguments.keep / f"damage-{subject.name}-{os.path.basename(name)}").write_bytes(data)
    for (kind, found), count in sorted(counts.items()):
        log(f"{count:8d}  {subject.name}: {kind}: {found}")
    for name, count in harmless.most_common(arguments.show):
        log(f"{count:8d}  {subject.name}: without effect in {name} of {8 * len(files[name]) if name in files else 0} bits")
    return counts, len(broken)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--bits", type=int)
    parser.add_argument("--payload-bits", type=int, default=50000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--show", type=int, default=5, help="violations of each subject")
    parser.add_argument("--subject", action="append")
    parser.add_argument("--keep", type=pathlib.Path, default=pathlib.Path("."), help="for what a violation was found with")
    arguments = parser.parse_args()
    log = Log()
    total, violations, rows = collections.Counter(), 0, []
    for subject in subjects(arguments.bin):
        if not arguments.subject or subject.name in arguments.subject:
            counts, broken = try_subject(subject, arguments, log)
            violations += broken
            of = collections.Counter()
            for (kind, found), count in counts.items():
                of[kind] += count
                of["refused" if found == PARTLY else found] += count
            total += of
            rows.append((f"`{subject.name}`", *(of[what] for what in (*KINDS, "refused", "no effect"))))
    tables.show(("Folder", *(kind.capitalize() for kind in KINDS), "Refused", "No effect"), rows)
    kinds = ", ".join(f"{total[kind]} {kind}" for kind in KINDS)
    log(f"damage: {kinds}: {total['refused']} refused, {total['no effect']} without effect, "
        f"{violations} violations, seed {arguments.seed}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
