#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Agents among others that are late, greedy, silent, or many at once: peers with copies of a past that
was rolled back, connections that announce much or send nothing, agents that do not answer, starts at
the same time.

Usage: agent_trouble_test.py BIN
"""

import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import agent_test  # pylint: disable=wrong-import-position
import stores  # pylint: disable=wrong-import-position
import trainer_socket  # pylint: disable=wrong-import-position
from stores import environment  # pylint: disable=wrong-import-position

SLOTS = 64


class Strangers(agent_test.Agents):
    """Two runs of one model with agents on the same nodes."""

    def other_run(self, iteration):
        """The agent "b" of the other run, which has saved an iteration to its own store."""
        folder, self.other = self.work / "other-run", self.work / "other-store"
        folder.mkdir()
        agent = self.start("b", "--k", 2, folder=folder, store=self.other)
        made = self.work / "made"
        stores.moe_checkpoint.write(made, stores.moe_checkpoint.Model(seed=7), iteration)
        for path in (made / f"global_step{iteration}", made / "latest"):
            path.rename(folder / path.name)
        self.wait(lambda: self.status("b")["persisted"] == iteration)
        return agent

    def test_a_restore_does_not_use_the_memory_of_another_run(self):
        self.save_series((3, 6), "--k", 1)
        self.other_run(5)
        result = self.restore("out", "--agents", self.address("b"))
        self.assertIn("so of another run; the restore does not use it", self.stderr)
        self.assertEqual({one["source"] for one in result["modules"]}, {"storage"})

    def test_a_copy_of_another_run_is_refused(self):
        self.other_run(4)
        self.save(3, "--k", 2)
        self.start("a", "--k", 2, "--peer", self.address("b"))
        self.checkpoint(6)
        self.wait(lambda: "so of another run" in (self.status("a")["peers"][0]["last_error"] or ""))
        self.assertEqual(self.status("b")["copies"], [])
        self.assertEqual(self.tell("b", "flush"), {"answer": "4"})


class Unfinished(agent_test.Agents):
    """Checkpoints and snapshots that are complete a moment later, or never."""

    def setUp(self):
        super().setUp()
        self.agent = self.start("a", "--k", 2)
        self.checkpoint(3)
        self.wait(lambda: self.status("a")["persisted"] == 3)

    def test_a_flush_leaves_the_agent_waiting_for_late_files(self):
        late = self.run_folder / "global_step4" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
        made, apart = self.work / "made", self.work / "late.pt"
        stores.moe_checkpoint.write(made, stores.MODEL, 4)
        (made / "global_step4" / late.name).rename(apart)
        for name in ("global_step4", "latest"):
            (made / name).rename(self.run_folder / name)
        self.assertEqual(self.tell("a", "flush"), {"answer": "3"})
        apart.rename(late)
        self.wait(lambda: self.status("a")["persisted"] == 4)

    def test_a_trainer_that_hangs_does_not_keep_a_complete_snapshot_from_the_store(self):
        lock = self.hold_lock()
        self.checkpoint(4)
        self.wait(lambda: self.status("a")["newest"] == 4)
        made = self.work / "made"
        stores.moe_checkpoint.write(made, stores.MODEL, 5)
        (made / "global_step5").rename(self.run_folder / "global_step5")
        trainer = trainer_socket.TrainerSocket(self.work / "a")
        self.addCleanup(trainer.close)
        trainer.send(b"offer global_step5\n")
        trainer.take(int(trainer.answer()))  # and fills nothing
        self.agent.send_signal(signal.SIGTERM)
        lock.close()
        self.assertEqual(self.agent.wait(60), 0)
        self.assertEqual(self.newest(), 4)


class GivenUp(agent_test.Agents):
    """Restores that an agent, or a peer, does not hear of."""

    def test_a_peer_that_was_away_gets_no_copy_of_it(self):
        for iteration in (4, 5, 6):
            self.save(iteration, "--k", 2)
        self.start("a", "--peer", self.address("b"), "--name", "node-a")
        self.checkpoint(8)
        self.wait(lambda: self.status("a")["persisted"] == 8)
        # Training goes back, and has made an iteration 6 of its own when the peer is back.
        self.restore("out", "--at", 5)
        self.save(6, "--k", 1)
        self.start("b", "--copies-only")
        self.wait(lambda: self.status("a")["newest"] is None)
        self.tell("b", "flush")
        self.assertEqual(self.newest(), 6)
        self.restore("out", "--force", "--agents", f"{self.address('a')},{self.address('b')}")
        self.assertEqual(self.report["result"]["iteration"], 6)
        # Tensors made from here on are copied and flushed as before.
        self.checkpoint(7)
        self.wait(lambda: self.status("b")["copies"] == [{"origin": "node-a", "iteration": 7}])
        self.wait(lambda: self.status("a")["persisted"] == 7)  # until then it holds the store's lock
        self.assertEqual(self.tell("b", "flush"), {"answer": "7"})

    def test_a_peer_that_has_one_forgets_it(self):
        self.save(4, "--k", 2)
        self.start("b", "--copies-only")
        agent = self.start("a", "--peer", self.address("b"), "--name", "node-a")
        self.checkpoint(5)
        self.wait(lambda: self.status("a")["persisted"] == 5)
        self.wait(lambda: self.status("b")["copies"] == [{"origin": "node-a", "iteration": 5}])
        agent.kill()
        agent.wait()
        self.restore("out", "--at", 4)
        self.assertEqual(self.tell("b", "flush"), {"answer": "4"})
        self.restore("out", "--force", "--agents", self.address("b"), "--dry-run")
        self.assertEqual(self.report["result"]["iteration"], 4)
        self.assertEqual(self.report["result"]["bytes"]["memory"], 0)

    def test_a_latest_from_before_a_restore_is_not_taken(self):
        agent = self.start("a", "--k", 2)
        for iteration in (4, 5):
            self.checkpoint(iteration)
            self.wait(lambda i=iteration: self.status("a")["persisted"] == i)
        # The agent does nothing while training writes a checkpoint, fails and goes back.
        agent.send_signal(signal.SIGSTOP)
        self.checkpoint(8)
        self.restore("out", "--at", 4)
        agent.send_signal(signal.SIGCONT)
        self.assertEqual(self.tell("a", "flush"), {"answer": "4"})
        self.assertEqual(self.newest(), 4)
        self.checkpoint(5)
        self.wait(lambda: self.newest() == 5)
        self.assertEqual(self.end(agent), 0)
        self.assertIn("written before recovery 1", agent.stderr.read())

    def test_a_copy_that_resumed_from_has_given_up(self):
        self.save(4, "--k", 2)
        self.start("b", "--copies-only")
        agent = self.start("a", "--peer", self.address("b"), "--name", "node-a")
        with stores.locked(self.store / "lock"):
            self.checkpoint(8)
            self.wait(lambda: self.status("b")["copies"] == [{"origin": "node-a", "iteration": 8}])
            agent.kill()
            agent.wait()
        # Nothing in the store is newer than 4; the peer's copy is.
        self.save(5, "--k", 2, "--resumed-from", 4)
        self.assertEqual(self.tell("b", "flush"), {"answer": "5"})
        self.assertEqual(self.newest(), 5)
        self.restore("out", "--agents", self.address("b"))
        self.assertEqual(self.report["iteration"], 5)

    def test_a_stop_saves_a_latest_that_was_just_written(self):
        for how in ("request", "signal"):
            for _ in range(5):
                agent = self.start("a", "--k", 2)
                self.checkpoint(4)
                self.wait(lambda: self.status("a")["persisted"] == 4)
                # Stopped, so that it comes to see both together.
                agent.send_signal(signal.SIGSTOP)
                self.checkpoint(5)
                if how == "signal":
                    agent.send_signal(signal.SIGTERM)
                    agent.send_signal(signal.SIGCONT)
                else:
                    with socket.socket(socket.AF_UNIX) as asks:
                        asks.connect(str(self.work / "a"))
                        asks.sendall(b"stop\n")
                        agent.send_signal(signal.SIGCONT)
                        self.assertEqual(asks.recv(100), b"ok\n")
                self.assertEqual(agent.wait(agent_test.PATIENCE), 0)
                self.assertEqual(self.newest(), 5)
                shutil.rmtree(self.store)

    def test_a_restore_before_the_last_save_is_no_failure_of_it(self):
        self.save(4, "--k", 2)
        # It stops itself when it has begun to save: in front of its first folder.
        agent = self.start("a", "--k", 2, fault="mkdir:1:hang")
        recovery = self.store / "recoveries" / "0000000001.json"
        with stores.locked(self.store / "lock"):
            self.checkpoint(8)
            self.wait(lambda: self.status("a")["newest"] == 8)
            agent.send_signal(signal.SIGTERM)
            time.sleep(1.5)  # only the last persist is repeated
        state = pathlib.Path(f"/proc/{agent.pid}/stat")
        self.wait(lambda: state.read_text(encoding="utf-8").rsplit(") ", 1)[1][0] == "T")
        # As on a node with locks of its own: no restore gets past the lock here.
        copy = self.work / "copy"
        shutil.copytree(self.store, copy, ignore=shutil.ignore_patterns("incoming-*", "lock"))
        self.run_tool("pec-restore", copy, "--format", "none")
        shutil.copy(copy / "recoveries" / recovery.name, recovery)
        agent.send_signal(signal.SIGCONT)
        self.assertEqual(agent.wait(agent_test.PATIENCE), 0, agent.stderr.read())
        self.assertEqual(self.newest(), 4)


class Connections(agent_test.Agents):
    """Others at an agent's port that has no key: what agents with one keep out."""

    def serve(self, *words):
        """\\returns an agent for copies, host and port"""
        agent = self.start("b", "--copies-only", "--listen", "127.0.0.1:0", "--insecure", *words)
        return agent, ("127.0.0.1", int(self.tcp(agent).rsplit(":", 1)[1]))

    def connect(self, where):
        one = socket.create_connection(where)
        self.addCleanup(one.close)
        return one

    def test_what_is_announced_takes_no_memory(self):
        agent, where = self.serve("--memory-limit", "1MiB")

        def resident():
            status = pathlib.Path(f"/proc/{agent.pid}/status").read_text()
            return int(status.split("VmRSS:")[1].split()[0]) << 10

        before = resident()
        for name in range(4):
            self.connect(where).sendall(f"hello 2 agent x{name} {name}\n".encode()
                                        + f"push x{name} {256 << 20} {256 << 20}\n".encode()
                                        + b" " * 10)
        self.wait(lambda: self.status("b")["memory_bytes"] == 4 << 16)
        self.assertLess(resident() - before, 128 << 20)

    def test_silent_connections_keep_nobody_out(self):
        self.save(4)
        _, where = self.serve()
        silent = [self.connect(where) for _ in range(SLOTS + 8)]
        for one in silent[::2]:
            one.sendall(b"half a requ")
        self.status("b")  # the socket file has places of its own
        self.restore("out", "--agents", f"127.0.0.1:{where[1]}", "--insecure")
        self.assertEqual(self.report["result"]["iteration"], 4)


class Garbled(agent_test.Agents):
    """An agent that sends changed catalogues."""

    def relay(self, name):
        """Passes everything on to the agent NAME and back, but for the last byte of every catalogue.

        \\returns the address to ask it at
        """
        path = self.work / f"{name}-relay"
        listener = socket.socket(socket.AF_UNIX)
        self.addCleanup(listener.close)
        listener.bind(str(path))
        listener.listen()
        threading.Thread(target=self.serve, args=(listener, self.work / name), daemon=True).start()
        return f"unix:{path}"

    def serve(self, listener, agent):
        while True:
            try:
                client = listener.accept()[0]
            except OSError:
                return
            with client, socket.socket(socket.AF_UNIX) as behind:
                behind.connect(str(agent))
                requests, answers = client.makefile("rb"), behind.makefile("rb")
                for request in requests:
                    behind.sendall(request)
                    answer = answers.readline()
                    words = answer.split()
                    body = answers.read(int(words[1])) if words[0] == b"ok" and len(words) > 1 else b""
                    if request.startswith(b"catalogue "):
                        body = body[:-1] + bytes([body[-1] ^ 1])
                    client.sendall(answer + body)

    def test_a_checkpoint_that_cannot_be_read_is_passed_over(self):
        self.start("a", "--k", 2)
        self.checkpoint(3)
        self.wait(lambda: self.status("a")["persisted"] == 3)
        self.hold_lock()
        self.checkpoint(4)
        self.wait(lambda: self.status("a")["newest"] == 4)
        words = ("--agents", self.relay("a"), "--dry-run")
        self.restore("out", *words, code=4)
        self.restore("out", *words, "--allow-older")
        self.assertEqual(self.report["result"]["iteration"], 3)
        self.assertIn("catalogue", self.report["result"]["damaged"][0])


class Mute(agent_test.Agents):
    """An agent that takes connections and never answers."""

    def test_waits_end_on_a_signal(self):
        self.save(4)
        mute = socket.socket(socket.AF_UNIX)
        self.addCleanup(mute.close)
        mute.bind(str(self.work / "m"))
        mute.listen()
        address = self.address("m")
        for how in (signal.SIGTERM, signal.SIGINT):
            for argv in (["pec-restore", self.store, self.work / "out", "--agents", address],
                         ["pec-restore", self.store, self.work / "out", "--agents", address,
                          "--lost-nodes", "unreachable"],
                         ["pec-save", "tell", address, "flush"],
                         ["pec-save", "tell", address, "stop"],
                         ["pec-save", "status", address]):
                argv = [str(word) for word in (stores.Given.bin / argv[0], *argv[1:])]
                with subprocess.Popen(argv, env=environment(), cwd=self.work, text=True,
                                      stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as asks:
                    self.running.append(asks)
                    connection, _ = mute.accept()
                    with connection:
                        self.assertTrue(connection.recv(100), "it has asked, and waits")
                        asks.send_signal(how)
                        self.assertEqual(asks.wait(agent_test.PATIENCE), 75, argv)
                        self.assertIn("stopped on request", asks.stderr.read())
                    self.running.remove(asks)
        self.assertFalse((self.work / "out").exists())
        self.assertEqual(list((self.store / "recoveries").iterdir()), [])

    def test_a_hook_that_waits_ends_on_a_signal(self):
        mute = socket.socket(socket.AF_UNIX)
        self.addCleanup(mute.close)
        mute.bind(str(self.work / "m"))
        mute.listen()
        hook = pathlib.Path(__file__).resolve().parents[3] / "scripts/slurm/pec-save-hook.sh"
        env = environment()
        env["PATH"] = f"{stores.Given.bin}:{env['PATH']}"
        with subprocess.Popen([str(word) for word in (hook, self.work / "m", self.run_folder,
                                                      self.store)],
                              env=env, text=True, stderr=subprocess.DEVNULL) as waits:
            self.running.append(waits)
            connection, _ = mute.accept()
            with connection:
                self.assertEqual(connection.recv(100), b"status\n")
                connection.sendall(b"ok 2\n{}")
            connection, _ = mute.accept()
            with connection:
                self.assertEqual(connection.recv(100), b"snapshot\n")
                waits.terminate()
                self.assertEqual(waits.wait(agent_test.PATIENCE), 75)
            self.running.remove(waits)


def runs(pid):
    """True if a process runs and does not just wait to be reaped."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Together(agent_test.Agents):
    """pec-agent.sh, called by several tasks of a node."""

    def setUp(self):
        super().setUp()
        self.socket = self.work / "a"
        self.pids = set()
        self.addCleanup(self.kill_agents)

    def kill_agents(self):
        for pid in self.pids:
            if runs(pid):
                os.kill(pid, signal.SIGKILL)

    def pid(self):
        """Of the agent that answers; the PID file names it."""
        pid = self.status("a")["pid"]
        self.pids.add(pid)
        self.assertEqual(int((self.work / "a.pid").read_text()), pid)
        return pid

    def agent_start(self, *words, **options):
        return self.hook("pec-agent.sh", "start", self.socket, self.run_folder, self.store, *words,
                         **options)

    def test_of_many_starts_one_starts_it(self):
        script = pathlib.Path(__file__).resolve().parents[3] / "scripts/slurm/pec-agent.sh"
        env = environment()
        env["PATH"] = f"{stores.Given.bin}:{env['PATH']}"
        (self.work / "a.log").write_text("what an agent before has said\n")
        (self.work / "a.pid").write_text("1\n")
        # About 16 KiB a checkpoint: the last save takes seconds.
        argv = [str(word) for word in (script, "start", self.socket, self.run_folder, self.store,
                                       "--bandwidth", "6000")]
        starts = [subprocess.Popen(argv, env=env, cwd=self.work) for _ in range(6)]
        self.assertEqual([start.wait(agent_test.PATIENCE) for start in starts], [0] * 6)
        pid = self.pid()
        log = (self.work / "a.log").read_text()
        self.assertIn("what an agent before has said\n", log)
        self.assertEqual(log.count("listening on"), 1, log)
        self.assertNotIn("another process", log)
        self.checkpoint(4)
        self.wait(lambda: self.status("a")["newest"] == 4)
        self.assertIsNone(self.newest())
        self.hook("pec-agent.sh", "stop", self.socket)
        self.assertEqual(self.newest(), 4)
        self.assertFalse(runs(pid))
        self.assertFalse((self.work / "a.pid").exists())
        self.hook("pec-agent.sh", "stop", self.socket, code=3)
        self.assertIn("done:", (self.work / "a.log").read_text())

    def test_a_number_that_another_process_has_by_now_is_not_waited_for(self):
        self.agent_start()
        pid = self.pid()
        with subprocess.Popen(["sleep", "1000"]) as other:
            self.running.append(other)
            (self.work / "a.pid").write_text(f"{other.pid}\n")
            self.agent_start()
            self.assertEqual(self.pid(), pid, "a start puts it right")
            (self.work / "a.pid").write_text(f"{other.pid}\n")
            self.hook("pec-agent.sh", "stop", self.socket)
            self.assertIsNone(other.poll())
            self.running.remove(other)
            other.kill()

    def test_an_agent_of_another_store_is_refused(self):
        self.agent_start()
        pid = self.pid()
        link = self.work / "link"
        link.symlink_to(self.work)
        self.hook("pec-agent.sh", "start", self.socket, self.run_folder, link / "store")
        self.hook("pec-agent.sh", "start", self.socket, self.run_folder, "store")
        self.hook("pec-agent.sh", "start", self.socket, self.run_folder, self.work / "other",
                  code=6)
        self.assertEqual(self.pid(), pid)
        self.hook("pec-agent.sh", "stop", self.socket)

    def test_a_stop_tells_of_a_last_save_that_fails(self):
        self.agent_start(fault="store.manifest:1+:enospc")
        self.pid()
        self.checkpoint(4)
        self.wait(lambda: self.status("a")["persists_failed"] > 0)
        self.hook("pec-agent.sh", "stop", self.socket, code=7)
        self.assertIsNone(self.newest())
        self.wait(lambda: not self.socket.exists())
        self.wait(lambda: "; iteration 4 is lost, none was saved" in (self.work / "a.log").read_text())


if __name__ == "__main__":
    stores.main()
