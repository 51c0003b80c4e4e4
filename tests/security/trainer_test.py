#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Python package in a trainer's process, while another user holds the names that it uses: folders and sockets of
agents, token logs. What an agent's process can do with the trainer's memory.

Usage: trainer_test.py BIN
"""

import hashlib
import json
import os
import socket
import stat
import sys
import threading

sys.dont_write_bytecode = True

import users  # pylint: disable=wrong-import-position
from users import ATTACKER, VICTIM, home, run_as  # pylint: disable=wrong-import-position

# The modules that this test uses need nothing of torch but its names.
PROLOGUE = """
import os, sys, types
sys.dont_write_bytecode = True
torch = types.ModuleType("torch")
torch.Tensor, torch.nn = object, types.SimpleNamespace(Module=object)
sys.modules["torch"] = torch
package = types.ModuleType("shardwright")
package.__path__ = ["{python}/shardwright"]
sys.modules["shardwright"] = package
from shardwright._agent import Connection, SharedMemory
from shardwright._agent_process import OwnAgent
from shardwright._errors import Error
from shardwright._tokens import TokenLog

def own(store):
    return OwnAgent(store, "pec-save", ["--k", "1", "--tokens", store + ".tokens.jsonl"])
"""

USER = """
try:
{work}
except Error as error:
    print(error)
    sys.exit(error.code)
"""

MISMATCH, BAD_INPUT = 5, 4


class ForgedAgent:
    """Answers as an agent does, and keeps the requests. Its process is the attacker's."""

    def __init__(self, path, status):
        self.heard = path.with_suffix(".heard")
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reader)
            try:
                os.setgroups([])
                os.setresgid(ATTACKER, ATTACKER, ATTACKER)
                os.setresuid(ATTACKER, ATTACKER, ATTACKER)
                self.serve(path, status, writer)
            finally:
                os._exit(1)
        os.close(writer)
        with open(reader, "rb") as ready:
            assert ready.read(1) == b"x", "the forged agent does not listen"

    def serve(self, path, status, writer):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        path.chmod(0o777)
        listener.listen(8)
        self.heard.touch()
        os.write(writer, b"x")
        while True:
            connection = listener.accept()[0]
            threading.Thread(target=self.answer, args=(connection, json.dumps(status).encode()), daemon=True).start()

    def answer(self, connection, status):
        with connection:
            while line := connection.recv(4096):
                with self.heard.open("ab") as heard:
                    heard.write(line)
                connection.sendall(b"ok %d\n" % len(status) + status if line.startswith(b"status") else b"ok 8\n")

    def close(self):
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)


class Trainer(users.TestCase):
    def setUp(self):
        super().setUp()
        self.tmp = users.WORLD / "shared" / "tmp"
        self.tmp.mkdir()
        self.tmp.chmod(0o1777)
        self.store = str(home(VICTIM) / "store")
        name = f"shardwright-{VICTIM}-{hashlib.sha256(self.store.encode()).hexdigest()[:16]}"
        self.runtime, self.memory = self.tmp / name, f"/dev/shm/{name}"
        self.addCleanup(lambda: os.path.isdir(self.memory) and os.rmdir(self.memory))

    def run_python(self, work, uid=VICTIM):
        """Runs lines of Python as a user, with the package; an Error is the exit code and on stdout."""
        text = PROLOGUE.format(python=users.WORLD / "python")
        text += USER.format(work="".join(f"    {line}\n" for line in work.splitlines()))
        done = run_as(uid, "python3", "-I", "-c", text, self.store, env={"TMPDIR": str(self.tmp)})
        self.assertNotIn("Traceback", done.stderr)
        return done

    def expect(self, code, done, *words):
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        for word in words:
            self.assertIn(str(word), done.stdout)

    def forge(self, path, **status):
        agent = ForgedAgent(path, {"pid": 1, "store": self.store, "k": 1, "policy": "sequential"} | status)
        self.addCleanup(agent.close)
        return agent

    def attackers_folder(self, path, mode=0o755):
        os.mkdir(path)
        os.chown(path, ATTACKER, ATTACKER)
        os.chmod(path, mode)


class Folders(Trainer):
    def test_a_socket_in_a_folder_of_another_user_is_not_connected_to(self):
        self.attackers_folder(self.runtime)
        agent = self.forge(self.runtime / "agent.sock")
        done = self.run_python("own(sys.argv[1]).start()")
        self.expect(MISMATCH, done, self.runtime, f"found one of user {ATTACKER}")
        self.assertEqual(agent.heard.read_bytes(), b"", "the forged agent was asked")

    def test_a_folder_that_is_open_to_others_is_refused(self):
        self.runtime.mkdir()
        os.chown(self.runtime, VICTIM, VICTIM)
        self.runtime.chmod(0o777)
        self.expect(MISMATCH, self.run_python("own(sys.argv[1]).start()"), self.runtime, "with mode 0777")

    def test_a_link_in_place_of_a_folder_is_refused(self):
        for path in (self.memory, self.runtime):
            private = home(VICTIM) / "private"
            private.mkdir(mode=0o700)
            os.chown(private, VICTIM, VICTIM)
            os.symlink(private, path)
            os.lchown(path, ATTACKER, ATTACKER)
            done = self.run_python("own(sys.argv[1]).start()")
            self.expect(MISMATCH, done, path, f"owned by user {ATTACKER}")
            self.assertEqual(list(private.iterdir()), [])
            os.unlink(path)
            private.rmdir()

    def test_an_agent_of_ones_own_is_started_found_again_and_stopped(self):
        done = self.run_python("""one = own(sys.argv[1])
one.start()
again = own(sys.argv[1])
again.start()
print(one.started, again.started)
with Connection(again.address) as agent:
    print(agent.user, agent.status()["checkpoints"] == os.path.realpath(one.folder))
one.stop()""")
        self.expect(0, done, "True False", f"{VICTIM} True")
        self.assertFalse(self.runtime.exists())


class Peers(Trainer):
    def test_an_agent_of_another_user_is_refused_before_anything_is_sent(self):
        path = users.WORLD / "shared" / "agent.sock"
        agent = self.forge(path)
        done = self.run_python(f"Connection('unix:{path}').status()")
        self.expect(MISMATCH, done, f"user {VICTIM} or root expected", f"found user {ATTACKER}", f"trust_user={ATTACKER}")
        done = self.run_python(f"Connection('unix:{path}').status()", uid=0)
        self.expect(MISMATCH, done, "user 0 expected", f"found user {ATTACKER}")
        self.assertEqual(agent.heard.read_bytes(), b"")
        self.expect(0, self.run_python(f"print(Connection('unix:{path}', user={ATTACKER}).status()['pid'])", uid=0), "1")
        self.assertNotEqual(agent.heard.read_bytes(), b"")

    def test_answers_without_an_end_are_bounded(self):
        path = users.WORLD / "shared" / "agent.sock"
        self.forge(path, deep="[" * 10)
        done = self.run_python(f"""connection = Connection('unix:{path}', user={ATTACKER})
connection._ahead += b"x" * 5000
connection.answer()""")
        self.expect(BAD_INPUT, done, "a line of more than 4096 bytes")
        done = self.run_python(f"""connection = Connection('unix:{path}', user={ATTACKER})
connection._ahead += b"ok 999999999999\\n"
connection.text()""")
        self.expect(BAD_INPUT, done, "a text of 999999999999 bytes")
        done = self.run_python(f"""connection = Connection('unix:{path}', user={ATTACKER})
connection._ahead += b"ok 200000\\n" + b"[" * 200000
connection.json()""")
        self.expect(BAD_INPUT, done, "a JSON object expected")

    def test_memory_that_was_handed_over_cannot_be_written_elsewhere(self):
        done = self.run_python("""import mmap
memory = SharedMemory("test", 4096)
other = os.open(f"/proc/self/fd/{memory.descriptor}", os.O_RDWR)
memory.map[0:1] = b"a"
for attempt in (lambda: mmap.mmap(other, 4096), lambda: os.pwrite(other, b"b", 0), lambda: os.ftruncate(other, 1),
                lambda: os.ftruncate(other, 8192)):
    try:
        attempt()
        print("written")
    except OSError as error:
        print("refused")
seen = mmap.mmap(other, 4096, prot=mmap.PROT_READ)
memory.map[1:2] = b"c"
print(seen[0:2])""")
        self.expect(0, done, "refused\n" * 4 + "b'ac'")


class TokenLogs(Trainer):
    def add(self, path, iteration=1):
        return self.run_python(f"TokenLog({str(path)!r}).add({{{iteration}: [[1, 2]]}})")

    def test_other_files_are_not_overwritten(self):
        for text in ("one line without a line feed", '{"secret": 1}', "{", "line\n"):
            path = home(VICTIM) / "notes"
            path.write_text(text, encoding="ascii")
            os.chown(path, VICTIM, VICTIM)
            if text == "{":  # possible remains of a killed writer
                self.expect(0, self.add(path))
                continue
            self.expect(BAD_INPUT, self.add(path), path, "not a JSON object with an iteration")
            self.assertEqual(path.read_text(encoding="ascii"), text)

    def test_planted_links_and_pipes_are_refused(self):
        private = self.private_file()
        path = users.WORLD / "shared" / "tokens.jsonl"
        os.symlink(private, path)
        os.lchown(path, ATTACKER, ATTACKER)
        with self.unchanged(private):
            self.expect(BAD_INPUT, self.add(path), path, f"a symbolic link of user {ATTACKER}")
        path.unlink()
        os.mkfifo(path, 0o666)
        os.chown(path, VICTIM, VICTIM)
        self.expect(BAD_INPUT, self.add(path), path, "not a regular file")

    def test_a_log_is_continued(self):
        path = home(VICTIM) / "tokens.jsonl"
        self.expect(0, self.add(path, 1))
        with path.open("a", encoding="ascii") as log:
            log.write('{"iteration": 2, "tok')
        self.expect(0, self.add(path, 3))
        iterations = [json.loads(line)["iteration"] for line in path.read_text(encoding="ascii").splitlines()]
        self.assertEqual(iterations, [1, 3])
        self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o644)


if __name__ == "__main__":
    users.main()
