#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""pec-save agent sends while ranks idle, as a process that shares intervals or a schedule reports; its HTML report.

Usage: sends_test.py BIN
"""

import pathlib
import sys
import time
import unittest
import xml.etree.ElementTree as tree

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import agent_test  # pylint: disable=wrong-import-position
import stores  # pylint: disable=wrong-import-position
import trainer_socket  # pylint: disable=wrong-import-position


class Rank(trainer_socket.TrainerSocket):
    def __init__(self, path, number):
        super().__init__(path)
        self.send(f"marks {number}\n".encode())
        self.count = int(self.answer())
        self.words = memoryview(self.share("marks", 8 * (self.count + 1))).cast("Q")

    def mark(self, idle):
        self.words[1 + self.words[0] % self.count] = 2 * time.monotonic_ns() + idle
        self.words[0] += 1


class Sends(agent_test.Agents):
    def saved(self, iteration):
        self.wait(lambda: self.status("a")["persisted"] == iteration)
        return self.status("a")

    def held(self, iteration):
        """In memory, and not saved for a while."""
        self.wait(lambda: self.status("a")["newest"] == iteration)
        time.sleep(0.5)
        status = self.status("a")
        self.assertNotEqual(status["persisted"], iteration)
        return status

    def picture(self, *words, code=0):
        page = self.work / "sends.html"
        self.run_tool("pec-save", "status", self.address("a"), "--html", page, *words, code=code)
        text = page.read_text(encoding="utf-8")
        svg = tree.fromstring(text[text.index('<svg class="curves"'):text.index("</svg></div>") + 6])
        return [element.get("class") for element in svg.iter("rect")], ["".join(one.itertext()) for one in svg.iter("text")]

    def test_sends_while_ranks_idle(self):
        agent = self.start("a", "--k", 1)
        self.run_tool("pec-save", "status", self.address("a"), "--html", self.work / "none.html", code=3)
        self.assertIn("nothing was sent yet", self.stderr)
        rank, other = Rank(self.work / "a", 0), Rank(self.work / "a", 3)
        self.assertEqual(self.status("a")["ranks_marking"], 2)
        rank.mark(1)
        self.checkpoint(1)
        self.held(1)
        other.mark(1)
        self.assertGreater(self.saved(1)["sent"]["idle"], 0)
        self.assertIn("while ranks were idle", self.stdout)
        shapes, texts = self.picture()
        self.assertEqual((shapes.count("row"), shapes.count("bar b-row"), "bar b0" in shapes), (2, 2, True))
        for text in ("rank 0", "rank 3", "snapshot 1"):
            self.assertIn(text, texts)
        self.run_tool("pec-save", "status", self.address("a"), "--html", self.work / "sends.html", code=6)
        self.picture("--force")
        for one in (rank, other):
            one.mark(0)
        time.sleep(12)  # until one is due: many times the duration of the work in between
        self.checkpoint(2)
        before = self.held(2)["sent"]
        self.tell("a", "flush")  # no waiting client is delayed
        status = self.saved(2)
        self.assertEqual([status["sent"][kind] - before[kind] for kind in ("idle", "busy", "due")], [0, 0, 0])
        self.assertGreater(status["sent"]["any"], before["any"])
        time.sleep(10)
        self.checkpoint(3)
        self.held(3)
        rank.close()
        other.close()  # ranks that are gone are not waited for
        self.saved(3)
        self.assertEqual((self.status("a")["ranks_marking"], self.end(agent)), (0, 0))
        self.run_tool("pec-save", "check", self.store)

    def test_is_due_before_the_next(self):
        agent = self.start("a", "--k", 1)
        rank = Rank(self.work / "a", 0)
        self.addCleanup(rank.close)
        rank.mark(1)
        self.checkpoint(1)
        self.saved(1)
        rank.mark(0)
        time.sleep(2)
        self.checkpoint(2)
        status = self.saved(2)  # with no idle rank
        self.assertEqual(status["sends_due"], 1)
        self.assertGreater(status["sent"]["due"], 0)
        self.assertEqual(self.end(agent), 0)
        self.assertEqual(self.newest(), 2)

    def test_a_schedule(self):
        # Stage 1 of two idles in the first and last third of iterations of three seconds.
        agent = self.start("a", "--k", 1, "--pipeline", "2,2,0.5,0.5", "--stages", "1")
        self.checkpoint(1)
        self.assertGreater(self.saved(1)["sent"]["idle"], 0)
        shapes, texts = self.picture()
        self.assertIn("rank 1", texts)
        self.assertIn("bar b-row", shapes)
        self.assertEqual(self.end(agent), 0)
        for words, said in ((("--pipeline", "4,8,1,2"), "--stages"), (("--stages", "1"), "--stages requires --pipeline"),
                            (("--pipeline", "4,8,1", "--stages", "0"), "four numbers"),
                            (("--pipeline", "4,8,1,x", "--stages", "0"), "not a number"),
                            (("--pipeline", "4,8,1,2", "--stages", "4"), "stage 4"),
                            (("--pipeline", "4,8,1,2", "--stages", "0-3"), "never idle at once")):
            self.run_tool("pec-save", "agent", self.run_folder, self.store, *words, code=2)
            self.assertIn(said, self.stderr)

    def test_without_idle_times_all_is_as_it_was(self):
        agent = self.start("a", "--k", 1, "--idle-ranks", "3")
        self.checkpoint(1)
        status = self.saved(1)
        self.assertEqual([status["sent"][kind] for kind in ("idle", "busy", "due")], [0, 0, 0])
        self.assertNotIn("idled", self.stdout)
        self.assertEqual(self.end(agent), 0)


if __name__ == "__main__":
    stores.main()
