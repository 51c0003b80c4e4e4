#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Behaviour that all commands share about signals, terminals, reports and start-up, seen through the probe.

Usage: probe_test.py PROBE SCHEMA [unittest arguments]
"""

import json
import os
import pty
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import unittest

PROBE = os.path.abspath(sys.argv[1])
SCHEMA = os.path.abspath(sys.argv[2])
DEADLINE_SECONDS = 300


def environment(**more):
    clean = {key: value for key, value in os.environ.items()
             if not key.startswith(("SHARDWRIGHT_", "NO_COLOR", "OMPI_", "PMI"))}
    return {**clean, "TERM": "xterm", **more}


def run(*arguments, **options):
    return subprocess.run([PROBE, *arguments], env=environment(), stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False,
                          **options)


class Running:
    """A probe that works long, with its standard error."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen([PROBE, "in", "out", "--note", "started", *arguments],
                                        env=environment(), stdin=subprocess.DEVNULL, text=True,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        self.seen = ""
        self.wait_for("started")

    def wait_for(self, text, start=0):
        while text not in self.seen[start:]:
            line = self.process.stderr.readline()
            if not line:
                raise AssertionError(f"{text!r} never came: {self.seen}")
            self.seen += line

    def send(self, number):
        self.process.send_signal(number)

    def end(self):
        self.seen += self.process.communicate(timeout=DEADLINE_SECONDS)[1]
        return self.process.returncode


LONG = ("--units", "6000", "--unit-ms", "50")


class Signals(unittest.TestCase):
    def test_first_signal_finishes_the_unit_and_reports(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            with self.subTest(number), tempfile.TemporaryDirectory() as folder:
                report = os.path.join(folder, "r.json")
                probe = Running(*LONG, f"--json={report}")
                probe.send(number)
                self.assertEqual(probe.end(), 75)
                self.assertIn("probe: stopping: ", probe.seen)
                with open(report, encoding="utf-8") as file:
                    found = json.load(file)
                self.assertEqual((found["status"], found["exit_code"]), ("stopped", 75))
                self.assertEqual(found["error"]["name"], "stopped")
                self.assertGreater(found["files_written"], 0)
                self.assertLess(found["files_written"], 6000)

    def test_work_that_never_asks_is_left(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            with self.subTest(number), tempfile.TemporaryDirectory() as folder:
                report = os.path.join(folder, "r.json")
                probe = Running("--stuck", f"--json={report}")
                probe.send(number)
                self.assertEqual(probe.end(), 75)
                self.assertIn("probe: error: stopped on request\nprobe: stopped: ", probe.seen)
                with open(report, encoding="utf-8") as file:
                    found = json.load(file)
                self.assertEqual((found["status"], found["exit_code"]), ("stopped", 75))
                self.assertEqual([one["name"] for one in found["passes"]], ["plan"])

    def test_second_signal_ends_at_once(self):
        for first, second in ((signal.SIGINT, signal.SIGINT), (signal.SIGUSR1, signal.SIGTERM)):
            with self.subTest(first):
                probe = Running("--units", "1", "--unit-ms", "60000")
                probe.send(first)
                probe.wait_for("stopping")
                probe.send(second)
                self.assertEqual(probe.end(), -second)

    def test_second_usr1_does_not_end(self):
        probe = Running("--units", "2", "--unit-ms", "500")
        probe.send(signal.SIGUSR1)
        probe.wait_for("stopping")
        probe.send(signal.SIGUSR1)
        self.assertEqual(probe.end(), 75)

    def test_usr2_prints_progress(self):
        for mode in ("plain", "off", "tty"):
            with self.subTest(mode):
                probe = Running(*LONG, f"--progress={mode}")
                while "% (" not in probe.seen:  # the first one may come before the pass has begun
                    probe.send(signal.SIGUSR2)
                    probe.wait_for("\n", len(probe.seen))
                self.assertRegex(probe.seen, r"probe: write: \d+% \(.* of 5\.86 GiB\)")
                probe.send(signal.SIGTERM)
                self.assertEqual(probe.end(), 75)

    def test_stop_after_the_last_unit_changes_nothing(self):
        done = run("in", "out", "--units", "0", "--raise", str(int(signal.SIGTERM)))
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_signal_ignored_by_nohup_stays_ignored(self):
        probe = subprocess.run(["bash", "-c", f"trap '' INT; exec '{PROBE}' in out --raise 2 --units 0"],
                               capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
        self.assertEqual(probe.returncode, 0)
        self.assertNotIn("stopping", probe.stderr)


class Terminal(unittest.TestCase):
    def on_terminal(self, *arguments, **variables):
        """Runs the probe with standard error on a terminal; returns the printed text, by time."""
        parent, child = pty.openpty()
        pieces = [(time.monotonic(), "")]  # the start
        process = subprocess.Popen([PROBE, "in", "out", *arguments], stdin=subprocess.DEVNULL,
                                   stdout=subprocess.DEVNULL, stderr=child,
                                   env=environment(**variables))
        os.close(child)
        end = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < end:
            if not select.select([parent], [], [], 1)[0]:
                continue
            try:
                piece = os.read(parent, 65536)
            except OSError:
                break
            if not piece:
                break
            pieces.append((time.monotonic(), piece.decode()))
        os.close(parent)
        self.assertEqual(process.wait(DEADLINE_SECONDS), 0)
        return pieces

    def test_repaints_at_most_six_times_a_second(self):
        pieces = self.on_terminal("--units", "20", "--unit-ms", "100")
        text = "".join(piece for _, piece in pieces)
        paints = text.count("\rprobe: write: ")
        self.assertGreater(paints, 2, text)
        seconds = pieces[-1][0] - pieces[0][0]
        self.assertLessEqual(paints, 6 * seconds + 1, text)
        self.assertRegex(text, r"\rprobe: write: \d+% \(.* MiB of 20\.0 MiB\), .*/s, .* left\x1b\[K")
        self.assertTrue(text.rstrip().endswith("warnings"), text)
        self.assertIn("\r\x1b[K", text)

    def test_a_dumb_terminal_is_not_painted(self):
        text = "".join(piece for _, piece in
                       self.on_terminal("--units", "5", "--unit-ms", "100", "--warn", "w", TERM="dumb"))
        self.assertNotIn("\x1b", text)

    def test_colours_follow_the_terminal_and_no_color(self):
        self.assertIn("\x1b[1;33mwarning:", "".join(p for _, p in self.on_terminal("--warn", "w")))
        plain = "".join(p for _, p in self.on_terminal("--warn", "w", NO_COLOR="1"))
        self.assertIn("probe: warning: w", plain)

    def test_off_paints_nothing(self):
        text = "".join(p for _, p in self.on_terminal("--units", "5", "--unit-ms", "100", "--progress=off"))
        self.assertNotIn("\x1b", text)

    def test_json_progress_is_one_object_per_line(self):
        done = run("in", "out", "--units", "15", "--unit-ms", "100", "--progress=json")
        lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
        self.assertGreaterEqual(len(lines), 3, done.stderr)
        self.assertEqual({line["event"] for line in lines}, {"progress"})
        self.assertEqual(lines[-1]["pass"], "write")
        self.assertEqual(lines[-1]["bytes_done"], lines[-1]["bytes_total"])
        self.assertEqual((lines[-1]["files_done"], lines[-1]["files_total"]), (0, None))


class Reports(unittest.TestCase):
    CASES = (
        ("in", "out"), ("in", "out", "--dry-run"), ("in", "--list"), ("in", "--explain", "w"),
        ("in", "out", "--fail", "7"), ("in", "out", "--fail", "75"), ("in", "out", "--fail", "5"),
        ("in", "out", "--throw", "memory"), ("in", "out", "--warn", "w", "--warn", "v"),
        ("in", "out", "--no-such-flag"), (), ("in", "out", "--text", "\udcff"),
    )

    def validator(self):
        try:
            import jsonschema
        except ImportError:
            self.skipTest("python3-jsonschema is not installed")
        with open(SCHEMA, encoding="utf-8") as file:
            schema = json.load(file)
        kind = jsonschema.validators.validator_for(schema)
        kind.check_schema(schema)
        return kind(schema)

    def test_every_report_fits_the_schema(self):
        validator = self.validator()
        for case in self.CASES:
            with self.subTest(case):
                done = run("--json", *case)
                report = json.loads(done.stdout)
                validator.validate(report)
                self.assertEqual(report["exit_code"], done.returncode)
                self.assertEqual(report["argv"][2:][:1], list(case[:1]))

    def test_the_schema_refuses_what_does_not_fit(self):
        validator = self.validator()
        good = json.loads(run("--json", "in", "out").stdout)
        for key, value in (("exit_code", 3), ("status", "failed"), ("error", {}), ("ranks", 0),
                           ("passes", [{"name": "x"}]), ("extra", 1), ("started", "today")):
            with self.subTest(key):
                self.assertFalse(validator.is_valid({**good, key: value}))
        for key in good:
            with self.subTest(f"without {key}"):
                self.assertFalse(validator.is_valid({k: v for k, v in good.items() if k != key}))

    def test_the_description_names_every_field(self):
        with open(SCHEMA, encoding="utf-8") as file:
            fields = json.load(file)["properties"]
        with open(os.path.join(os.path.dirname(SCHEMA), "report.md"), encoding="utf-8") as file:
            described = set(re.findall(r"`(\w+)`", file.read()))
        self.assertEqual(set(fields) - described, set())


class Start(unittest.TestCase):
    @unittest.skipIf(os.environ.get("SHARDWRIGHT_TEST_SLOW_BUILD"), "not timed under sanitizers")
    def test_help_takes_less_than_20_ms(self):
        # Processor time of the process and its loader, which other work on the machine does not lengthen.
        def seconds():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([PROBE, "--help"], env=environment(), stdout=subprocess.DEVNULL, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        self.assertLess(min(seconds() for _ in range(20)), 0.020)

    def test_mpi_is_not_started_without_a_launcher(self):
        # Starting it leaves a session folder, helper threads and sockets; the map shows its plugins.
        probe = Running(*LONG)
        with open(f"/proc/{probe.process.pid}/maps", encoding="utf-8") as file:
            self.assertNotIn("mca_btl", file.read())
        probe.send(signal.SIGTERM)
        self.assertEqual(probe.end(), 75)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
