#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Arguments of the Python package: sizes as the commands take them, paths with ~, flags of a trainer's own agent, files and
token logs that a killed or restarted trainer has left, and paths that an agent reports.

Usage: arguments_test.py BIN PACKAGE
"""

import json
import os
import socket
import sys
import threading
import unittest
from unittest import mock

import live  # first: it makes the modules of the other tests importable
import torch


def line(iteration, tokens):
    return json.dumps({"iteration": iteration, "tokens": [[tokens, 2 * tokens]]}) + "\n"


class Sizes(live.InFolder):
    def test_are_those_of_the_commands(self):
        from shardwright._library import size_of
        for text, size in (("62.5MB", 62_500_000), ("0.5GiB", 1 << 29), ("12.5GB", 12_500_000_000), (1 << 20, 1 << 20)):
            self.assertEqual(size_of(text), size)

    def test_what_is_none_is_refused(self):
        import shardwright
        from shardwright._library import size_of
        for text, why in (("1e9", 'unknown unit "e9"'), ("-1GB", "is not a size"), ("nan", "is not a size"),
                          ("99999999999999999999GB", "does not fit in 64 bits"), ("1.5", "not a whole number of bytes"),
                          ("1.0000000000000000001GB", "more than 18 digits")):
            with self.subTest(text):
                with self.assertRaisesRegex(shardwright.Error, why) as caught:
                    size_of(text)
                self.assertEqual(caught.exception.code, 2)
                with self.assertRaisesRegex(shardwright.Error, why):
                    shardwright.load((torch.nn.Linear(2, 2), None), self.folder, memory=text)


class Home(live.InFolder):
    """Paths of files that do not exist: the error has the expanded path. partial_test.py has those of PartialCheckpoints."""

    def setUp(self):
        super().setUp()
        environment = mock.patch.dict(os.environ, HOME=str(self.folder))
        environment.start()
        self.addCleanup(environment.stop)

    def test_is_expanded(self):
        import shardwright
        model = torch.nn.Linear(2, 2)
        for name, call in {
                "source": lambda: shardwright.load((model, None), "~/none"),
                "sources": lambda: shardwright.load((model, None), [self.folder, "~/none"]),
                "cache": lambda: shardwright.load((model, None), "unix:~/none", wait=0.1),
                "patterns": lambda: shardwright.load((model, None), self.folder, patterns=["~/none"]),
                "maps": lambda: shardwright.load((model, None), self.folder, maps=["~/none:hf"]),
                "plan": lambda: shardwright.ExpertPlan.read("~/none"),
                "idle times": lambda: shardwright.IdleTimes("unix:~/none", 0)}.items():
            with self.subTest(name):
                with self.assertRaises(shardwright.NotFoundError) as caught:
                    call()
                self.assertIn(f"{self.folder}/none", str(caught.exception))


class OwnAgents(live.InFolder):
    """Flags that an agent gets from the trainer that starts it."""

    def words(self, *flags):
        from shardwright._agent_process import OwnAgent
        return OwnAgent(str(self.folder / "store"), sys.executable, flags)._words

    def test_it_stays_for_half_an_hour_after_its_trainer(self):
        words = self.words()
        self.assertEqual(words[words.index("--linger") + 1], "1800")
        address, lock = words[words.index("--listen") + 1], words[words.index("--trainer-lock") + 1]
        self.assertEqual(os.path.dirname(lock), os.path.dirname(address.removeprefix("unix:")))

    def test_flags_change_this_time(self):
        for flags in (["--linger", "5"], ["--linger=5"]):
            words = self.words(*flags)
            self.assertEqual(words[-len(flags):], flags)
            self.assertEqual(len([word for word in words if word.startswith("--linger")]), 1)
            self.assertIn("--trainer-lock", words)


class Leftovers(live.InFolder):
    def test_a_trainer_removes_the_files_that_a_killed_one_was_about_to_write(self):
        from shardwright._snapshot_folder import remove_leftovers, write_mark
        write_mark(str(self.folder), ["global_step7"])
        for name in ("global_step6/a.pt", "global_step7/a.pt", "global_step7.filled-0", "global_step70/a.pt"):
            (self.folder / name).parent.mkdir(exist_ok=True)
            (self.folder / name).touch()
        remove_leftovers(str(self.folder))
        self.assertEqual(sorted(path.name for path in self.folder.iterdir()), ["global_step6", "global_step70", "hand-over.json"])


class Tokens(live.InFolder):
    def setUp(self):
        super().setUp()
        self.path = self.folder / "tokens.jsonl"

    def add(self, *iterations):
        """As a trainer that continues from the iteration before the first of these."""
        from shardwright._tokens import TokenLog
        TokenLog(str(self.path)).add({iteration: [[100 + iteration, 0]] for iteration in iterations})

    def test_a_killed_trainer_has_left_a_torn_line(self):
        self.path.write_text(line(1, 1) + line(2, 2) + line(3, 3) + '{"iteration": 4, "tok', encoding="utf-8")
        self.add(3, 4)
        self.assertEqual([json.loads(text)["iteration"] for text in self.path.read_text(encoding="utf-8").splitlines()],
                         [1, 2, 3, 4])
        self.assertEqual([json.loads(text)["tokens"][0][0] for text in self.path.read_text(encoding="utf-8").splitlines()],
                         [1, 2, 103, 104])

    def test_lines_of_a_run_that_was_abandoned(self):
        # 1 to 9, then from 4 on again, which has come to 6: what follows must not cut that off.
        self.path.write_text("".join(line(i, i) for i in range(1, 10)) + "".join(line(i, 40 + i) for i in (4, 5, 6)),
                             encoding="utf-8")
        self.add(7, 8)
        lines = [json.loads(text) for text in self.path.read_text(encoding="utf-8").splitlines()]
        self.assertEqual([(one["iteration"], one["tokens"][0][0]) for one in lines][-5:],
                         [(4, 44), (5, 45), (6, 46), (7, 107), (8, 108)])

    def test_a_torn_line_in_the_middle_is_named(self):
        import shardwright
        self.path.write_text(line(1, 1) + '{"iteration": 2, "tok' + line(2, 2), encoding="utf-8")
        with self.assertRaisesRegex(shardwright.Error, r"tokens\.jsonl:2: not a JSON object with an iteration") as caught:
            self.add(3)
        self.assertEqual(caught.exception.code, 4)


class ReportedPaths(live.InFolder):
    """PartialCheckpoints reads the status of an agent that it did not start."""

    def setUp(self):
        super().setUp()
        self.checkpoints = self.folder / "checkpoints"
        self.checkpoints.mkdir()
        self.checkpoints.chmod(0o700)
        self.status = {"store": str(self.folder / "store"), "checkpoints": str(self.checkpoints), "tokens": "", "k": 1}
        self.listener = socket.socket(socket.AF_UNIX)
        self.addCleanup(self.listener.close)
        self.listener.bind(str(self.folder / "agent.sock"))
        self.listener.listen()
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            try:
                connection = self.listener.accept()[0]
            except OSError:
                return
            with connection:
                connection.recv(100)
                text = json.dumps(self.status).encode()
                connection.sendall(b"ok %d\n" % len(text) + text)

    def open(self, *, tokens=None, checkpoints=None, trust_user=None, code=None, why=None):
        """Returns the folder and the log that the trainer would write to; or checks the error."""
        import shardwright
        from shardwright._group import Group
        one = object.__new__(shardwright.PartialCheckpoints)
        one._group, one._own = Group(), None
        self.addCleanup(one._group.close)
        one._asks = {"store": str(self.folder / "store"), "k": None, "agent": f"unix:{self.folder}/agent.sock", "flags": [],
                     "trust_user": trust_user, "lossless": False}
        if code is None:
            return one._open("pec-save", tokens, checkpoints)[1:3]
        with self.assertRaisesRegex(shardwright.Error, why) as caught:
            one._open("pec-save", tokens, checkpoints)
        self.assertEqual(caught.exception.code, code)
        return None

    def test_a_folder_of_ones_own_is_taken(self):
        self.assertEqual(self.open(), (str(self.checkpoints), None))
        self.assertEqual(self.open(checkpoints=self.checkpoints)[0], str(self.checkpoints))

    def test_another_folder_than_the_named_one_is_refused(self):
        self.open(checkpoints=self.folder, code=5, why="checkpoint folder is .*, expected")
        self.status["checkpoints"] = str(self.folder / "none")
        self.open(code=3, why="checkpoint folder .* does not exist")

    def test_a_folder_that_others_can_write_to_has_to_be_named(self):
        self.checkpoints.chmod(0o777)
        self.open(code=5, why="with mode 0777; if it is the right one, pass checkpoints=")
        self.assertEqual(self.open(checkpoints=self.checkpoints)[0], str(self.checkpoints))

    @unittest.skipUnless(os.geteuid() == 0, "only root gives files away")
    def test_a_folder_of_another_user_has_to_be_named(self):
        os.chown(self.checkpoints, 65534, 65534)
        self.open(code=5, why="found one of user 65534")
        self.assertEqual(self.open(checkpoints=self.checkpoints)[0], str(self.checkpoints))

    def test_a_log_is_the_one_that_is_named(self):
        log = str(self.folder / "tokens.jsonl")
        self.status["tokens"] = log
        self.assertEqual(self.open()[1], log)
        self.assertEqual(self.open(tokens=log)[1], log)
        self.open(tokens=str(self.folder / "other"), code=5, why="reads token counts from")

    def test_a_status_of_another_kind_is_refused(self):
        for key, value in (("store", 1), ("checkpoints", []), ("tokens", None), ("k", "1")):
            before = self.status[key]
            self.status[key] = value
            self.open(code=4, why=f'"{key}" is')
            self.status[key] = before


if __name__ == "__main__":
    Tokens.ucp = live.start()
    unittest.main(verbosity=2)
