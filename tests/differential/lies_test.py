#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that the campaign notices wrong readers and writers. Each fault is simulated in turn; inputs of kind libzip
must find it.

Usage: lies_test.py PROBE
Where there is no libzip the exit code is 77.
"""

import sys
import unittest
import unittest.mock

sys.dont_write_bytecode = True

import archives  # pylint: disable=wrong-import-position
import differential_test  # pylint: disable=wrong-import-position
import libzip  # pylint: disable=wrong-import-position

INPUTS = 60  # of which at least one must find a fault


def changed(**changes):
    """The last member is reported with other values."""
    def lie(members):
        one = dict(members[-1])
        for key, change in changes.items():
            if key in one:
                one[key] = change(one[key])
        return [*members[:-1], one]
    return lie


def more(number):
    return (number or 0) + 1


# Possible faults in a list of members, of this project's reader or libzip's.
READERS = {
    "another name": changed(name=lambda name: name + "78"), "another size": changed(bytes=more),
    "another method": changed(method=lambda method: 8 - method), "another CRC-32": changed(crc=lambda crc: crc ^ 1),
    "a sum that is wrong is right": changed(sum=lambda sum_: sum_ or 1), "other content": changed(sum=more, content=more),
    "a member less": lambda members: members[:-1], "a member twice": lambda members: [*members, members[-1]],
}
# This project's reader also reports places of members, which libzip does not: their bytes are compared.
PLACES = {"another local header": changed(header=more), "a payload elsewhere": changed(payload=more)}


def flipped(place, bit=1):
    """An archive of this project with another byte; `place` is a function of it."""
    def lie(data):
        at = place(data)
        return data[:at] + bytes([data[at] ^ bit]) + data[at + 1:]
    return lie


# Possible faults in a file that this project writes. Only libzip reads dates, and the sizes that precede the content.
WRITERS = {
    "a byte of a payload": flipped(lambda data: 64),
    "a CRC-32 in the directory": flipped(lambda data: data.rindex(b"PK\1\2") + 16),
    "a CRC-32 in a local header": flipped(lambda data: 14),
    "a date in a local header": flipped(lambda data: 12),
    "the version that a local header needs": flipped(lambda data: 4),
    "a local header's name": flipped(lambda data: 30),
    "the place of the directory": flipped(lambda data: data.rindex(b"PK\6\6") + 48),
    "the number of members": flipped(lambda data: data.rindex(b"PK\6\6") + 32),
    "the directory's UTF-8 flag": flipped(lambda data: data.rindex(b"PK\1\2") + 9, 8),
}


class LyingProbe(differential_test.Probe):
    """Reports everything else correctly."""

    def __init__(self, program):
        super().__init__(program)
        self.about, self.writes = lambda answer, data: answer, lambda data: data

    def ask(self, kind, data):
        said, written = super().ask(kind, data)
        if kind == "zip":
            said = self.about(said, data)
        return said, self.writes(written) if kind == "pt" else written

    def close(self):
        self.process.communicate()


def lax(answer, data):
    """A reader that takes whatever zipfile takes."""
    if "error" not in answer:
        return answer
    try:
        return {"members": archives.read(data)}
    except Exception:  # pylint: disable=broad-exception-caught
        return answer


class Lies(unittest.TestCase):
    def setUp(self):
        self.probe = LyingProbe(PROBE)
        self.addCleanup(self.probe.close)

    def found(self):
        """\\returns the number of inputs that find a fault"""
        count = 0
        for number in range(INPUTS):
            try:
                differential_test.Differential(self.probe, f"lies {number}").libzip()
            except differential_test.Violation:
                count += 1
        return count

    def test_truth(self):
        self.assertEqual(self.found(), 0)

    def test_our_reader(self):
        for what, lie in {**READERS, **PLACES}.items():
            with self.subTest(what):
                self.probe.about = lambda answer, _, lie=lie: (
                    answer if "error" in answer else {**answer, "members": lie(answer["members"])})
                self.assertGreater(self.found(), 0)

    def test_our_reader_refuses(self):
        self.probe.about = lambda answer, _: {"error": "no", "code": differential_test.BAD_INPUT}
        self.assertGreater(self.found(), 0)

    def test_our_reader_is_lax(self):
        self.probe.about = lax
        self.assertGreater(self.found(), 0)

    def lied_to(self, lie, about):
        """\\param about  the wrong answers of libzip are about sound or about damaged archives
        \\returns the number of inputs that find it"""
        read = libzip.read

        def wrong(data, sound=False):
            members = read(data, sound)
            return lie(members) if sound == about else members

        with unittest.mock.patch.object(libzip, "read", wrong):
            return self.found()

    def test_libzip(self):
        for sound in (True, False):
            for what, lie in READERS.items():
                with self.subTest(what, sound=sound):
                    self.assertGreater(self.lied_to(lambda members, lie=lie: lie(members) if members else [], sound), 0)

    def test_libzip_refuses(self):
        def refuse(_):
            raise libzip.Refused("Premature end of file")

        for sound in (True, False):
            with self.subTest(sound=sound):
                self.assertGreater(self.lied_to(refuse, sound), 0)

    def test_our_writer(self):
        for what, lie in WRITERS.items():
            with self.subTest(what):
                self.probe.writes = lie
                self.assertGreater(self.found(), 0)


if __name__ == "__main__":
    if libzip.LIBRARY is None:
        print("skipped: no libzip.so (Debian has it in libzip4)")
        sys.exit(77)
    PROBE = sys.argv.pop(1)
    unittest.main()
