#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Damaged files of every format give an error or a difference; no damage ends a command in another way.

Usage: damage_test.py ROWS BIN
"""

import shutil

from conformance import DIFFERENT, REFUSED, Conformance, harness, main

POSITIONS = 12  # of bytes that are changed, over a file
FILES = 6  # of a format, by size: from the smallest to the largest


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1:]


def damages(data):
    """(what, the damaged bytes)"""
    yield "empty", b""
    yield "cut in half", data[:len(data) // 2]
    yield "one byte short", data[:-1]
    yield "one byte long", data + b"x"
    yield "zeros in front", bytes(min(64, len(data))) + data[64:]
    for i in range(POSITIONS):
        at = i * (len(data) - 1) // (POSITIONS - 1)
        yield f"byte {at} changed", flipped(data, at)


class Damage(Conformance):
    def chosen(self, folder):
        """Files of tensors, ascending."""
        files = sorted((path for path in folder.rglob("*") if path.is_file() and path.name != "shardwright.json"
                        and path.name != "config.json" and path.stat().st_size > 0),
                       key=lambda path: (path.stat().st_size, path))
        step = max(1, (len(files) - 1) / (FILES - 1))
        return [files[at] for at in sorted({min(len(files) - 1, round(i * step)) for i in range(FILES)})]

    def test_no_damage_goes_wrong(self):
        for name in self.formats:
            copy = self.work / name
            shutil.copytree(self.made[name], copy)
            for path in self.chosen(copy):
                whole = path.read_bytes()
                for what, data in damages(whole):
                    with self.subTest(format=name, file=path.name, what=what):
                        path.write_bytes(data)
                        done = self.check(copy, self.made[name])
                        self.assertIn(done.code, REFUSED | {0, DIFFERENT}, done)
                        if done.code in REFUSED:
                            self.assertTrue(done.stderr.strip(), "a refusal says why")
                path.write_bytes(whole)
            self.expect_same(copy, self.made[name])

    def test_the_largest_file_is_all_read(self):
        """Most bytes of a checkpoint are tensors: no change of them passes unnoticed."""
        for name in self.formats:
            copy = self.work / name
            shutil.copytree(self.made[name], copy)
            path = self.chosen(copy)[-1]
            whole = path.read_bytes()
            for what, data in [("cut", whole[:-1]), ("longer", whole + b"x"), ("gone", None),
                               ("changed", flipped(whole, len(whole) * 3 // 4))]:
                with self.subTest(format=name, file=path.name, what=what):
                    if data is None:
                        path.unlink()
                    else:
                        path.write_bytes(data)
                    done = self.check(copy, self.made[name])
                    self.assertIn(done.code, REFUSED | {DIFFERENT}, done)
                    out = self.work / "out"
                    if done.code in REFUSED and data is not None:
                        other = next(f for f in self.formats if f != name)
                        done = self.convert_damaged(copy, out, other)
                        self.assertFalse(out.exists(), done)
            path.write_bytes(whole)

    def convert_damaged(self, source, out, name):
        done = harness.run(self.command(source, out, name))
        if done.code == 0:  # the damaged part is not needed there
            shutil.rmtree(out)
        return done


if __name__ == "__main__":
    main("damage_test.py ROWS BIN")
