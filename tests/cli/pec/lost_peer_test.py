#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The host of an agent's peer is cut off during a copy. The agent detects this, reports it in its status, and
copies again once the host is back. The peer has a network namespace of its own, behind a bridge.

Usage: lost_peer_test.py BIN
Needs root and Debian's iproute2; is skipped without them.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import agent_test  # pylint: disable=wrong-import-position
import stores  # pylint: disable=wrong-import-position
from stores import environment  # pylint: disable=wrong-import-position

INSIDE = "--inside"
HOST = "10.78.0.2"
# An answer is missed after 20 s, which is looked at every 5 s; the rest is for a busy machine.
NOTICED = 60


class LostPeer(agent_test.Agents):
    def setUp(self):
        super().setUp()
        host = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        self.addCleanup(lambda: (host.kill(), host.wait()))
        self.host = ["nsenter", "--net", "-t", str(host.pid)]
        self.wait(lambda: os.readlink(f"/proc/{host.pid}/ns/net") != os.readlink("/proc/self/ns/net"))
        for name in ("br0", "spare0", "to-host"):
            self.addCleanup(subprocess.run, ["ip", "link", "del", name], check=False)
        # The spare port keeps the bridge up when the host is cut off: data disappear without an error.
        for words in ("link set lo up", "link add br0 type bridge", "addr add 10.78.0.1/24 dev br0",
                      "link add spare0 type veth peer name spare1", "link set spare0 master br0 up", "link set spare1 up",
                      "link set br0 up",
                      f"link add to-host type veth peer name eth0 netns {host.pid}", "link set to-host master br0 up"):
            self.ip(words)
        for words in ("link set lo up", f"addr add {HOST}/24 dev eth0", "link set eth0 up"):
            self.ip(words, self.host)

    def ip(self, words, where=()):
        subprocess.run([*where, "ip", *words.split()], check=True)

    def peer(self):
        """Starts an agent for copies on the host. \\returns its address"""
        argv = [*self.host, stores.Given.bin / "pec-save", "agent", self.run_folder, self.work / "far", "--copies-only",
                "--name", "far", "--listen", f"{HOST}:0", "--key", self.key]
        agent = subprocess.Popen([str(word) for word in argv], env=environment(), cwd=self.work, text=True,
                                 stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        self.running.append(agent)
        while not (found := re.search(rf"listening on ({HOST}:\d+)", agent.stderr.readline())):
            self.assertIsNone(agent.poll())
        return found.group(1)

    def state(self):
        return self.status("a")["peers"][0]

    def test_is_noticed_and_copied_to_again(self):
        address = self.peer()
        self.start("a", "--peer", address, "--key", self.key, "--bandwidth", "64KiB/s")
        self.assertEqual((self.state()["state"], self.state()["address"]), ("waiting", address))
        self.checkpoint(3)
        self.wait(lambda: self.state()["agent"] == "far")
        self.assertEqual((self.state()["agent"], self.state()["copying"], self.state()["iteration"]), ("far", 3, None))
        self.ip("link set to-host down")
        cut = time.monotonic()
        self.wait(lambda: self.state()["failures"] > 0)
        self.assertLess(time.monotonic() - cut, NOTICED)
        self.assertIn(address, self.state()["last_error"])
        self.assertRegex(self.state()["last_error"], "has not acknowledged data for 20 s|timed out|No route|no route")
        text = subprocess.run([stores.Given.bin / "pec-save", "status", self.address("a")], env=environment(), text=True,
                              capture_output=True, check=True).stdout
        self.assertRegex(text, rf"peer +{re.escape(address)} \(far\): .*newest copy none, \d+ failed attempt")
        self.ip("link set to-host up")
        self.wait(lambda: self.state()["state"] == "complete")
        self.assertEqual((self.state()["iteration"], self.state()["failures"], self.state()["last_error"]), (3, 0, ""))

    def test_a_process_that_does_not_read_is_waited_for(self):
        address = self.peer()
        self.start("a", "--peer", address, "--key", self.key, "--bandwidth", "64KiB/s")
        self.checkpoint(3)
        self.wait(lambda: self.state()["state"] == "copying")
        far = self.running[0]
        subprocess.run(["kill", "-STOP", str(far.pid)], check=True)
        time.sleep(40)
        self.assertEqual((self.state()["state"], self.state()["failures"]), ("copying", 0))
        subprocess.run(["kill", "-CONT", str(far.pid)], check=True)
        self.wait(lambda: self.state()["state"] == "complete")


def main():
    if INSIDE in sys.argv:
        sys.argv.remove(INSIDE)
        stores.main()
        return 0
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "nsenter", "unshare"))):
        print("skipped: needs root, iproute2 and util-linux")
        return 77
    own = subprocess.run(["unshare", "--net", "ip", "link", "add", "br0", "type", "bridge"], capture_output=True, text=True,
                         check=False)
    if own.returncode != 0:
        print(f"skipped: no network namespace with a bridge: {own.stderr.strip()}")
        return 77
    return subprocess.run(["unshare", "--net", sys.executable, __file__, *sys.argv[1:], INSIDE], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
