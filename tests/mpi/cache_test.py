# SPDX-License-Identifier: Apache-2.0
"""ucp-load serve with real processes: ranks of MPI, trainers that die, other users, signals, stops and limits.

    cache_test.py BIN MPIEXEC
"""

import array
import json
import mmap
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
DATA = ROOT / "tests/data/deepspeed"
SECONDS = 1200
BIN = MPIEXEC = None


class Client:
    """The messages of a trainer's rank to a cache, byte by byte."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(SECONDS)
        self.socket.connect(str(path))

    def ask(self, line):
        self.socket.sendall(line.encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            byte = self.socket.recv(1)
            if not byte:
                raise ConnectionError(line)
            answer += byte
        return answer.decode().strip()

    def attach(self):
        """The description, packed."""
        answer = self.ask("attach").split()
        assert answer[0] == "ok", answer
        text = b""
        while len(text) < int(answer[1]):
            text += self.socket.recv(int(answer[1]) - len(text))
        return text

    def memory(self, process):
        """A descriptor of the memory of a process of the load."""
        self.socket.sendall(f"memory {process}\n".encode())
        byte, control, _, _ = self.socket.recvmsg(1, socket.CMSG_SPACE(4))
        if not control:
            raise ConnectionError(byte)
        fds = array.array("i")
        fds.frombytes(control[0][2][:4])
        return fds[0]

    def close(self):
        self.socket.close()


class Load:
    def __init__(self, source, path, *flags, ranks=0, target="zero=2,dp=4", report=None):
        self.path = path
        launcher = [MPIEXEC, "--oversubscribe", "-n", str(ranks)] if ranks else []
        more = [f"--json={report}"] if report else []
        self.process = subprocess.Popen(
            [*launcher, BIN / "ucp-load", "serve", source, f"unix:{path}", "--target", target, "--threads", "1", *flags,
             *more], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})

    def ready(self):
        done = run("status", f"unix:{self.path}", "--wait", str(SECONDS), "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["result"]

    def status(self):
        return json.loads(run("status", f"unix:{self.path}", "--json").stdout)["result"]

    def end(self):
        out, _ = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, out


def run(*words):
    return subprocess.run([BIN / "ucp-load", *map(str, words)], capture_output=True, text=True, timeout=SECONDS)


def until(what, condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


class Resident(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="sw-cache-")
        self.addCleanup(folder.cleanup)
        self.scratch = pathlib.Path(folder.name)
        self.path = self.scratch / "s"

    def load(self, source=DATA / "zero1_w2/ckpt", *flags, path=None, **options):
        load = Load(source, path or self.path, *flags, **options)

        def kill():
            if load.process.poll() is None:
                load.process.kill()
            load.process.communicate()
        self.addCleanup(kill)
        return load

    def client(self):
        client = Client(self.path)
        self.addCleanup(client.close)
        return client

    def test_any_number_of_ranks_reads_each_byte_once(self):
        reads = {}
        for ranks in (0, 1, 2, 4):
            load = self.load(ranks=ranks, report=self.scratch / "report.json")
            status = load.ready()
            self.assertEqual((status["state"], status["processes"]), ("ready", max(ranks, 1)))
            self.assertEqual(run("stop", f"unix:{self.path}").returncode, 0)
            self.assertFalse(self.path.exists())
            self.assertEqual(load.end()[0], 0)
            result = json.loads((self.scratch / "report.json").read_text())["result"]
            self.assertEqual(result["end"], "stopped by a request")
            reads[ranks] = result["bytes_read"]
            self.assertEqual(status["bytes_read"], result["bytes_read"])
            self.assertEqual(result["bytes_gathered"] > 0, ranks > 1)
        self.assertEqual(len(set(reads.values())), 1, reads)

    def test_a_trainer_that_is_killed_comes_back(self):
        load = self.load(ranks=2)
        load.ready()
        first = self.client()
        description = first.attach()
        child = os.fork()
        if child == 0:
            other = Client(self.path)
            other.attach()
            mapped = mmap.mmap(other.memory(1), 0, prot=mmap.PROT_READ)
            os.write(1, mapped[:0])
            time.sleep(SECONDS)
            os._exit(1)
        until("two are attached", lambda: load.status()["attached"] == 2)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        until("the killed one has let go", lambda: load.status()["attached"] == 1)
        again = self.client()
        self.assertEqual(again.attach(), description)
        self.assertEqual(load.status()["attaches"], 3)
        self.assertEqual(load.status()["bytes_read"], load.ready()["bytes_read"])
        # Both see the same memory, and only the cache may write to it.
        both = [mmap.mmap(client.memory(0), 0, prot=mmap.PROT_READ) for client in (first, again)]
        self.assertEqual(both[0][:], both[1][:])
        self.assertTrue(any(both[0][:]))
        with self.assertRaises(PermissionError):
            mmap.mmap(first.memory(0), 0, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        for client in (first, again):
            self.assertEqual(client.ask("detach"), "ok")
        self.assertEqual(load.status()["attached"], 0)

    def test_requests_that_make_no_sense(self):
        load = self.load()
        load.ready()
        client = self.client()
        for line in ("", "attach x", "hand 0 guess 0", "read", "x" * 4000):
            self.assertTrue(client.ask(line).startswith("error 2 "), line)
        with self.assertRaises(ConnectionError):
            client.memory(0)  # only for attached clients
        client = self.client()
        client.attach()
        with self.assertRaises(ConnectionError):
            client.memory(7)
        long = self.client()
        long.socket.sendall(b"x" * 10000)
        with self.assertRaises(ConnectionError):  # cut; the unread bytes make it a reset
            if not long.socket.recv(1):
                raise ConnectionError
        self.assertEqual(load.status()["state"], "ready")

    @unittest.skipUnless(os.geteuid() == 0, "only root can become somebody else")
    def test_another_user_is_refused(self):
        load = self.load()
        load.ready()
        os.chmod(self.scratch, 0o755)

        def as_nobody():
            child = os.fork()
            if child == 0:
                os.setgid(65534)
                os.setuid(65534)
                try:
                    client = Client(self.path)
                    client.socket.settimeout(10)
                    client.attach()
                    os._exit(1)
                except PermissionError:
                    os._exit(10)
                except (OSError, AssertionError):
                    os._exit(11)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        self.assertEqual(as_nobody(), 10)  # by the mode of the socket file
        os.chmod(self.path, 0o666)
        self.assertEqual(as_nobody(), 11)  # by its user
        self.assertEqual(load.status()["attaches"], 0)

    def processes_of(self, load, server):
        """The other processes of a load."""
        found = [int(words.parent.name) for words in pathlib.Path("/proc").glob("[0-9]*/cmdline")
                 if str(self.path).encode() in words.read_bytes() and b"serve" in words.read_bytes()]
        return [pid for pid in found if pid not in (server, load.process.pid)]

    def test_signals(self):
        load = self.load()
        load.ready()
        client = self.client()
        client.attach()
        load.process.send_signal(signal.SIGTERM)
        code, out = load.end()
        self.assertEqual(code, 0, out)
        self.assertIn("stopped by a signal", out)
        self.assertIn("1 trainer rank still attached", out)
        self.assertFalse(self.path.exists())

    def test_a_signal_to_any_process_ends_all(self):
        load = self.load(ranks=2)
        for pid in self.processes_of(load, load.ready()["pid"]):
            os.kill(pid, signal.SIGTERM)
        code, out = load.end()
        self.assertEqual(code, 0, out)
        self.assertFalse(self.path.exists())

    def test_a_signal_to_the_launcher(self):
        load = self.load(ranks=2)
        load.ready()
        load.process.send_signal(signal.SIGTERM)
        load.end()  # its exit code does not matter here
        self.assertFalse(self.path.exists())

    def test_a_stop_waits_for_trainers(self):
        load = self.load()
        load.ready()
        client = self.client()
        client.attach()
        stop = subprocess.Popen([BIN / "ucp-load", "stop", f"unix:{self.path}"], stderr=subprocess.DEVNULL)
        until("it is about to end", lambda: load.status()["state"] == "ending")
        self.assertIsNone(load.process.poll())
        late = self.client()
        self.assertTrue(late.ask("attach").startswith("error 3 "))
        self.assertEqual(client.ask("detach"), "ok")
        self.assertEqual(stop.wait(SECONDS), 0)
        self.assertEqual(load.end()[0], 0)

    def test_deadline(self):
        load = self.load(DATA / "zero1_w2/ckpt", "--deadline", "1")
        code, out = load.end()
        self.assertEqual(code, 0, out)
        self.assertIn("its deadline has passed", out)

    def test_a_process_of_the_load_that_is_killed_ends_it(self):
        load = self.load(ranks=2)
        others = self.processes_of(load, load.ready()["pid"])
        self.assertEqual(len(others), 1)
        os.kill(others[0], signal.SIGKILL)
        code, out = load.end()
        self.assertNotEqual(code, 0, out)

    def test_a_load_that_is_killed_is_heard_of_and_replaced(self):
        load = self.load()
        load.ready()
        client = self.client()
        client.attach()
        load.process.kill()
        load.end()
        with self.assertRaises(OSError):
            client.ask("detach")
        self.assertEqual(run("status", f"unix:{self.path}").returncode, 3)
        again = self.load()
        self.assertEqual(again.ready()["attaches"], 0)

    def test_damage(self):
        copy = self.scratch / "ckpt"
        shutil.copytree(DATA / "zero1_w2/ckpt", copy)
        victim = max(copy.rglob("*optim_states.pt"))
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 0x40
        victim.write_bytes(data)
        for ranks in (0, 2):
            load = self.load(copy, ranks=ranks)
            code, out = load.end()
            self.assertEqual(code, 4, out)
            self.assertFalse(self.path.exists())
            self.assertEqual(run("status", f"unix:{self.path}", "--wait", "0").returncode, 3)

    def test_refusals(self):
        for words, code, text in (
                ((DATA / "zero1_w2/ckpt", f"unix:{self.path}", "--memory", "9MiB", "--threads", "1"), 8, "need 11"),
                ((DATA / "zero1_w2/ckpt", "localhost:1"), 2, "expected an address unix:PATH"),
                ((DATA / "zero1_w2/ckpt", f"unix:{self.path}", "--verify", "readback"), 2, "none or checksums"),
                ((DATA / "zero1_w2/ckpt", f"unix:{self.path}", "--format", "universal"), 2, "universal"),
                ((self.scratch / "none", f"unix:{self.path}"), 3, "none"),
        ):
            with self.subTest(words[1:]):
                done = run("serve", *words)
                self.assertEqual(done.returncode, code, done.stderr)
                self.assertIn(text, done.stderr)
        three = self.load(ranks=3, target="zero=1,dp=2").end()
        self.assertEqual(three[0], 2, three[1])
        self.assertIn("3 processes for a target of 2 ranks", three[1])
        old = run(DATA / "zero1_w2/ckpt", "--serve", f"unix:{self.path}")
        self.assertEqual(old.returncode, 2)
        self.assertIn("ucp-load serve INPUT ADDRESS", old.stderr)

    def test_other_sources(self):
        subprocess.run([BIN / "ucp-extract", DATA / "zero1_w2/ckpt", self.scratch / "catalogue", "--pack=zstd"], check=True,
                       capture_output=True)
        subprocess.run([BIN / "ucp-union", DATA / "zero1_w2/ckpt", self.scratch / "atoms"], check=True, capture_output=True)
        for source in ("catalogue", "atoms"):
            load = self.load(self.scratch / source, ranks=2)
            self.assertGreater(load.ready()["bytes_cached"], 0)
            self.assertEqual(run("stop", f"unix:{self.path}").returncode, 0)
            self.assertEqual(load.end()[0], 0)


if __name__ == "__main__":
    BIN, MPIEXEC = pathlib.Path(sys.argv.pop(1)), sys.argv.pop(1)
    unittest.main(verbosity=2)
