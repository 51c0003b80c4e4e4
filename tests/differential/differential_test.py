#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""This project's readers and writers of untrusted files against those of others: the same bytes, the same meaning.

Usage: differential_test.py PROBE [--count N] [--seed N] [--kind pickle|zip|libzip|pt|safetensors]... [--keep FOLDER]

pickle: Python's own machine over a closed table, and pickletools. zip: zipfile. libzip: the C library of that name, also
on archives that it, or this project's writer, has made, and on odd ones. pt: pickle and zip, on files of torch.save.
safetensors: the package of that name. libzip and safetensors are left out if they are not installed; the exit code is
77 if nothing else was requested.
N inputs of each kind are made, and both readers must give the same; what this project writes of them again is read by
the other reader. Then each is damaged several times: an input that this project accepts, the other reader must accept
with the same meaning.
"""

import argparse
import collections
import json
import pathlib
import pickletools
import random
import subprocess
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "docs"))

import archives  # pylint: disable=wrong-import-position
import libzip  # pylint: disable=wrong-import-position
import oddities  # pylint: disable=wrong-import-position
import pickle_reader  # pylint: disable=wrong-import-position
import pickles  # pylint: disable=wrong-import-position
import tables  # pylint: disable=wrong-import-position

KINDS = ("pickle", "zip", "libzip", "pt", "safetensors")
BAD_INPUT, UNSUPPORTED = 4, 9
DAMAGES = 3  # of each input
DAMAGED = ("alike", "refused", "refused by libzip alone")  # outcomes of damaged and unsafe inputs that are counted


class Violation(AssertionError):
    def __init__(self, text, data):
        super().__init__(text)
        self.data = data


class Probe:
    def __init__(self, program):
        self.process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, kind, data):
        """\\returns its answer, the bytes that it wrote"""
        self.process.stdin.write(f"{kind} {len(data)}\n".encode() + data)
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise Violation(f"the probe ended with {self.process.wait()}", data)
        said = json.loads(line)
        return said, self.process.stdout.read(said["blob"])


def damaged(choose, data):
    """One of the small things that go wrong with bytes."""
    at = choose.randrange(len(data))
    return choose.choice((
        lambda: data[:at] + bytes([data[at] ^ 1 << choose.randrange(8)]) + data[at + 1:],
        lambda: data[:at] + bytes([choose.randrange(256)]) + data[at + 1:],
        lambda: data[:at] + data[at + 1:],
        lambda: data[:at] + choose.randbytes(1) + data[at:],
        lambda: data[:at] + data[at:at + 9] + data[at:]))()


def other_opcode(choose, data):
    """Another opcode with operands of the same form: still a pickle, of another meaning."""
    forms = collections.defaultdict(list)
    for opcode in pickletools.opcodes:
        forms[opcode.arg.name if opcode.arg else None].append(opcode.code.encode("latin1"))
    try:
        places = [(opcode, at) for opcode, _, at in pickletools.genops(data)]
    except ValueError:
        return damaged(choose, data)
    opcode, at = choose.choice(places)
    code = choose.choice(forms[opcode.arg.name if opcode.arg else None])
    return data[:at] + code + data[at + 1:]


class Differential:
    def __init__(self, probe, seed):
        self.probe, self.counts, self.stricter = probe, collections.Counter(), collections.Counter()
        self.choose = random.Random(seed)

    def others(self, reader, data):
        """The result of the other reader, or the reason for its failure."""
        try:
            return reader(data), None
        except Exception as refused:  # pylint: disable=broad-exception-caught
            return None, f"{type(refused).__name__}: {refused}"

    def judge_damage(self, kind, reader, data, found, asked=None):
        """\\param asked  the kind that the probe knows, if that is another"""
        said, _ = self.probe.ask(asked or kind, data)
        theirs, why = self.others(reader, data)
        if "error" in said:
            if said["code"] not in (3, BAD_INPUT, 8, UNSUPPORTED):
                raise Violation(f"{kind}: code {said['code']}: {said['error']}", data)
            self.counts[f"{kind} damaged, refused"] += 1
            if theirs is not None:
                self.counts[f"{kind} damaged, refused by us alone"] += 1
                self.stricter[f"us alone: {kind}: " + "".join(c for c in said["error"] if not c.isdigit())[-60:]] += 1
        elif theirs is None:
            raise Violation(f"{kind}: accepted, but the other reader says {why}: {said}", data)
        elif found(said) != theirs:
            raise Violation(f"{kind}: read as {found(said)}, by the other reader as {theirs}", data)
        else:
            self.counts[f"{kind} damaged, read alike"] += 1

    def pickle(self):
        root, _ = pickles.make(self.choose)
        protocol = self.choose.randrange(6)
        data = pickles.write(self.choose, root, protocol)
        said, written = self.probe.ask("pickle", data)
        self.counts["pickle"] += 1
        if protocol < 2:
            if said.get("code") != BAD_INPUT or "protocol 2 or later" not in said["error"]:
                raise Violation(f"pickle of protocol {protocol}: {said}", data)
            self.counts["pickle of protocols 0 and 1, refused"] += 1
            return
        if "error" in said:
            if b"functools" not in data or "functools.partial" not in said["error"]:
                raise Violation(f"pickle: refused: {said}", data)
            self.counts["pickle of calls that are refused"] += 1
        else:
            theirs = pickle_reader.read(data)
            if said["graph"] != theirs:
                raise Violation(f"pickle: read as {said['graph']}, by Python as {theirs}", data)
            self.pickle_written(said, written, theirs)
        for _ in range(DAMAGES):
            change = self.choose.choice((damaged, other_opcode))
            self.judge_damage("pickle", pickle_reader.read, change(self.choose, data), lambda answer: answer["graph"])

    def pickle_written(self, said, written, wanted):
        if "not_written" in said:
            raise Violation(f"pickle: not written: {said['not_written']}", written)
        keys = {str(k): bytes.fromhex(said["storages"][i][0]) for k, i in enumerate(said["order"])}
        again, why = self.others(lambda data: pickle_reader.read(data, keys), written)
        if again != wanted:
            raise Violation(f"pickle: written as {again} ({why}), was {wanted}", written)
        self.counts["pickle written and read"] += 1

    def judge_zip(self, kind, data, sound):
        """\\param sound  it must be read, as zipfile reads it; otherwise it must be an error
        \\returns this project's answer, None for an error"""
        said, _ = self.probe.ask("zip", data)
        self.counts[kind] += 1
        if "error" in said:
            if sound or said["code"] != BAD_INPUT:
                raise Violation(f"{kind}: refused: {said}", data)
            self.counts[f"{kind} unsafe, refused"] += 1
            return None
        if not sound:
            raise Violation(f"{kind}: not refused: {said}", data)
        if said["members"] != (theirs := archives.read(data)):
            raise Violation(f"{kind}: read as {said['members']}, by zipfile as {theirs}", data)
        return said

    def zip(self):
        data, sound = archives.make(self.choose)
        self.judge_zip("zip", data, sound)
        for _ in range(DAMAGES):
            self.judge_damage("zip", archives.read, damaged(self.choose, data), lambda answer: answer["members"])

    def libzip(self):
        maker, make = self.choose.choice((
            ("zipfile", lambda: archives.make(self.choose, text=True)), ("libzip", lambda: libzip.make(self.choose)),
            ("us", self.our_zip)))
        data, sound = make()
        said = self.judge_zip("libzip", data, sound)
        if said is None:
            return
        theirs, why = self.others(lambda data: libzip.read(data, sound=True), data)
        if libzip.told(said, data) != theirs:
            raise Violation(f"libzip: read as {libzip.told(said, data)}, by libzip as {theirs} ({why})", data)
        self.counts[f"libzip written by {maker} and read"] += 1
        for _ in range(DAMAGES):
            self.libzip_damaged(self.choose.choice((damaged, oddities.odd))(self.choose, data))

    def our_zip(self):
        """A file of torch.save as we write it again."""
        file = None
        while file is None:
            file = self.torch_file()
        said, written = self.probe.ask("pt", file[0])
        if "error" in said:
            raise Violation(f"pt: refused: {said}", file[0])
        return written, True

    def libzip_damaged(self, data):
        said, _ = self.probe.ask("zip", data)
        theirs, why = self.others(libzip.read, data)
        if "error" not in said and oddities.several_ends(data):
            # libzip before 1.11 takes the end record with members that reach over most of the file; zipfile and torch
            # take the last one, as this project does. So zipfile decides the meaning.
            self.judge_damage("libzip, several end records,", archives.read, data, lambda answer: answer["members"], "zip")
            if libzip.told(said, data) != theirs:
                self.counts["libzip, several end records, libzip takes another"] += 1
        elif "error" not in said and theirs is None and (reason := libzip.pickier(data, why)):
            self.counts["libzip damaged, refused by libzip alone"] += 1
            self.stricter[f"libzip alone: {reason}"] += 1
        else:
            self.judge_damage("libzip", libzip.read, data, lambda answer: libzip.told(answer, data), "zip")

    def torch_file(self):
        """\\returns a file of torch.save, its pickle, the contents of its storages; None if it has unsupported calls"""
        root, _ = pickles.make(self.choose, 3)
        pickled = pickles.write(self.choose, root, self.choose.randrange(2, 6))
        unpickler = pickle_reader.Unpickler(pickled)
        if b"functools" in pickled:
            return None
        unpickler.load()
        sizes = {key: one.count * pickle_reader.TYPED.get(one.kind.dotted.rsplit(".", 1)[1], ("", 1))[1]
                 for key, one in unpickler.storages.items()}
        data, contents = archives.torch_file(self.choose, pickled, sizes)
        return data, pickled, contents

    def pt(self):
        file = self.torch_file()
        if file is None:
            return
        data, pickled, contents = file
        said, written = self.probe.ask("pt", data)
        self.counts["pt"] += 1
        if "error" in said:
            raise Violation(f"pt: refused: {said}", data)
        if said["graph"] != (wanted := pickle_reader.read(pickled)):
            raise Violation(f"pt: read as {said['graph']}, by Python as {wanted}", data)
        for one in said["storages"]:
            if data[one["offset"]:one["offset"] + one["bytes"]] != contents[one["member"][5:]]:
                raise Violation(f"pt: {one} is not where its bytes are", data)
        self.pt_written(said, written, wanted, contents)

    def pt_written(self, said, written, wanted, contents):
        members = {bytes.fromhex(one["name"]).decode(): one for one in archives.read(written)}

        def content(name):
            one = members["archive/" + name]
            if one["sum"] != one["crc"] or one["payload"] % 64 != 0:
                raise Violation(f"pt: written, but {one}", written)
            return written[one["payload"]:one["payload"] + one["bytes"]]

        keys = {str(k): said["storages"][i]["member"][5:] for k, i in enumerate(said["order"])}
        if pickle_reader.read(content("data.pkl"), keys) != wanted:
            raise Violation("pt: written with another graph", written)
        for ours, theirs in keys.items():
            if content(f"data/{ours}") != contents[theirs]:
                raise Violation(f"pt: data/{ours} is written with other bytes than data/{theirs} had", written)
        if content("version") != b"3\n" or content("byteorder") != b"little":
            raise Violation("pt: version or byteorder", written)
        self.counts["pt written and read"] += 1

    def safetensors(self):
        import tensors  # pylint: disable=import-outside-toplevel
        data = tensors.make(self.choose)
        said, written = self.probe.ask("safetensors", data)
        self.counts["safetensors"] += 1
        if "error" in said or said["warnings"]:
            raise Violation(f"safetensors: refused: {said}", data)
        theirs = tensors.read(data)
        if tensors.said(said, data) != theirs:
            raise Violation(f"safetensors: read as {said}, by the package as {theirs}", data)
        if "not_written" in said or tensors.read(written) != theirs:
            raise Violation(f"safetensors: written with another meaning: {said}", written)
        self.counts["safetensors written and read"] += 1
        for _ in range(DAMAGES):
            self.safetensors_damaged(tensors, data)

    def safetensors_damaged(self, tensors, data):
        """With a warning this project reads files that the package rejects, as specified in
        docs/formats/safetensors.md."""
        data = tensors.mutated_header(self.choose, data)
        said, _ = self.probe.ask("safetensors", data)
        if "error" not in said and said["warnings"] and self.others(tensors.read, data)[0] is None:
            self.counts["safetensors damaged, read with a warning"] += 1
            return
        self.judge_damage("safetensors", tensors.read, data, lambda answer: tensors.said(answer, data))


def row(kind, counts):
    """For the table in docs/robustness.md: inputs and how many of them are errors; written and read back; and of the
    damaged ones those with the same result, rejected by both, by this project alone, by the other reader alone."""
    refused = sum(counts[f"{kind} {what}"] for what in ("unsafe, refused", "of protocols 0 and 1, refused", "of calls that are refused"))
    alone, other = (counts[f"{kind} damaged, refused by {whom} alone"] for whom in ("us", "libzip"))
    alike, both = (sum(counts[f"{name} damaged, {what}"] for name in (kind, f"{kind}, several end records,"))
                   for what in ("read alike", "refused"))
    written = counts[f"{kind} written and read"] + counts[f"{kind} written by us and read"]
    return f"`{kind}`", counts[kind], refused, written, alike, both - alone, alone, other


def absent():
    """Kinds without an installed other reader, and how to install it."""
    if libzip.LIBRARY is None:
        yield "libzip", "no libzip.so (Debian has it in libzip4)"
    try:
        import safetensors as _  # pylint: disable=import-outside-toplevel
    except ImportError:
        yield "safetensors", "no Python package of that name (scripts/peers makes one)"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("probe", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--keep", type=pathlib.Path, default=pathlib.Path("."), help="for inputs that differ")
    arguments = parser.parse_args()
    kinds = arguments.kind or list(KINDS)
    for kind, missing in absent():
        if kind in kinds:
            kinds = [one for one in kinds if one != kind]
            print(f"skipped: {kind}: {missing}")
    if not kinds:
        return 77
    violations = []
    total, stricter = collections.Counter(), collections.Counter()
    probe = Probe(arguments.probe)
    for kind in kinds:
        for number in range(arguments.count):
            # Each input has a seed of its own, so that one can be made again alone.
            one = Differential(probe, f"{arguments.seed} {kind} {number}")
            try:
                getattr(one, kind)()
            except Violation as violation:
                violations.append((kind, number, violation))
                print(f"VIOLATION {kind} {number}: {str(violation)[:2000]}", flush=True)
                (arguments.keep / f"differential-{kind}-{number}").write_bytes(violation.data)
            total += one.counts
            stricter += one.stricter
    for name, count in sorted(total.items()):
        print(f"{count:8d}  {name}")
    for name, count in stricter.most_common(12):
        print(f"{count:8d}  refused by {name}")
    tables.show_rows(row(kind, total) for kind in kinds)
    print(f"differential: {sum(total[kind] for kind in kinds)} inputs of {', '.join(kinds)}, "
          f"{sum(count for name, count in total.items() if name.endswith(DAMAGED))} damaged or unsafe, "
          f"{len(violations)} violations, seed {arguments.seed}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
