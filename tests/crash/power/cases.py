# SPDX-License-Identifier: Apache-2.0
"""The commands to check after a power failure, and the required content of each disk."""

import json
import pathlib
import shutil

import gradient_log
import moe_checkpoint
from harness import DATA, DEMO, difference, expect, run, shown, succeed, tree

# A command may reject a stopped run that was damaged; then the run starts again from the beginning.
REFUSALS = {3, 4, 5}


def content(path):
    return tree(path) if path.is_dir() else path.read_bytes() if path.exists() else None


def last(printed):
    """The number of the call that printed that a command is done."""
    return printed[-1][0]


class Output:
    """A command that makes root/out, a folder or a file."""

    def __init__(self, name, before, argv, again):
        """before: argv of the command that makes an older output, or None. argv(out). again: the flags to resume
        with."""
        self.name, self.before, self.argv, self.again = name, before, argv, again
        self.old = self.wanted = None

    def command(self, root):
        return self.argv(root / "out")

    def shown(self):
        return shown(self.argv("OUT"))

    def said(self, printed):
        return last(printed)

    def prepare(self, root):
        if self.before is not None:
            succeed(self.before(root / "out"))
            self.old = content(root / "out")

    def learn(self, root):
        self.wanted = content(root / "out")
        expect(self.left(root) == ["out"], f"left beside the output: {self.left(root)}")

    def left(self, root):
        return sorted(path.name for path in root.iterdir())

    def judge(self, root, done, counts):
        out = root / "out"
        found = content(out)
        if done:
            expect(found == self.wanted, "what was said to be done is not there")
        elif found is not None:
            expect(found in (self.old, self.wanted), "an output that is neither the old nor the new one")
        elif self.old is not None:
            names = self.left(root)
            expect(any(".partial-" in name for name in names), f"neither an old nor a new output: {names}")
        counts["complete"] += found == self.wanted
        again = run([*self.command(root), *self.again])
        if again.code in REFUSALS and self.again:
            counts["refused"] += 1
            again = run(self.command(root))
        else:
            counts["resumed"] += 1
        expect(again.code == 0, f"cannot be done again: {again}")
        expect(content(out) == self.wanted, "the output differs once it was done again")
        expect(self.left(root) == ["out"], f"left beside the output: {self.left(root)}")


class Store:
    """A command on root/store."""

    def __init__(self, name, stores, before, argv, after):
        """before: iterations that are in the store first. after: the one that a restore gives afterwards."""
        self.name, self.stores, self.before, self.argv, self.after = name, stores, before, argv, after

    def command(self, root):
        return self.argv(root)

    def shown(self):
        return shown(self.argv(pathlib.Path("/")))

    def said(self, printed):
        return last(printed)

    def prepare(self, root):
        self.stores.fill(root / "store", self.before)

    def learn(self, root):
        self.look(root, {self.after})

    def look(self, root, allowed):
        store, out, report = root / "store", root / "seen", root / "report"
        done = run([self.stores.save, "check", store])
        expect(done.code == 0, f"the store is damaged: {done}")
        done = run([self.stores.restore, store, out, "--read-only", f"--json={report}"])
        expect(done.code == 0, f"no restore: {done}")
        iteration = json.loads(report.read_text())["iteration"]
        expect(iteration in allowed, f"iteration {iteration}, not of {sorted(allowed)}")
        found = tree(out)
        wanted = self.wanted(iteration)
        expect(found == wanted, f"iteration {iteration} differs in {difference(wanted, found)}")
        shutil.rmtree(out)
        report.unlink()

    def wanted(self, iteration):
        return self.stores.known[iteration]

    def judge(self, root, done, counts):
        if self.before or done:
            self.look(root, {self.after} if done else {max(self.before), self.after})
        again = run(self.command(root))
        expect(again.code == 0, f"cannot be done again: {again}")
        counts["resumed"] += 1
        self.look(root, {self.after})
        stray = [path.name for path in (root / "store").iterdir()
                 if path.name.startswith("incoming-") or path.name.endswith(".tmp") or path.name == "lock"]
        expect(not stray, f"left in the store: {stray}")


class AgentStore(Store):
    """An agent that takes a snapshot and saves it; done once a flush has been answered."""

    def command(self, root):
        return ["sh", "-c", AGENT, self.stores.save, root.parent, self.stores.run]

    def shown(self):
        return "`pec-save agent`, a snapshot and a flush"

    def said(self, printed):
        """printed: (number of the call, text) of all that was printed"""
        wanted = (f"iteration {self.after} is in the agent's memory", f"newest checkpoint has iteration {self.after}")
        answers = [number for number, text in printed if text.decode().strip().endswith(wanted)]
        expect(len(answers) == 2, f"{self.name}: not the answers to a snapshot and a flush: {printed}")
        return answers[1]


# save $0, the folder of root and socket $1, the run $2
AGENT = """cd "$1" || exit 1
"$0" agent "$2" root/store --k 1 --threads 1 --listen unix:socket 2>&1 &
for i in $(seq 6000); do test -S socket && break; sleep 0.01; done
"$0" tell unix:socket snapshot && "$0" tell unix:socket flush && "$0" tell unix:socket stop || kill $!
wait $!"""


class LoggedStore(Store):
    """The same with the gradients of all experts, a segment for each iteration. Every restore brings all experts to
    its iteration."""

    def shown(self):
        return f"{super().shown()} with a log of gradients"

    def prepare(self, root):
        store = root / "store"
        for iteration in self.before:
            succeed(self.stores.saving(iteration, k=2)(root))
        fingerprint = json.loads((store / "store.json").read_text())["fingerprint"]
        gradient_log.log_series(store / "logs", fingerprint, self.stores.model, range(2, self.after + 1),
                                gradient_log.adamw)
        succeed([self.stores.restore, store, root / "seen", "--read-only", "--replay=require"])
        self.known = tree(root / "seen")
        shutil.rmtree(root / "seen")

    def wanted(self, iteration):
        return self.known


class Stores:
    """Shared code of the cases of stores: checkpoints to save, and the expected result of a restore of each."""

    def __init__(self, programs, folder):
        self.save, self.restore = programs / "pec-save", programs / "pec-restore"
        self.run, self.folder = folder / "run", folder
        self.model = moe_checkpoint.Model(layers=1, experts=4)
        moe_checkpoint.series(self.run, self.model, range(1, 5))
        (self.run / "latest").write_text("global_step3")  # the file that an agent reads
        self.fill(folder / "whole", (1, 2, 3))
        self.known = {}
        for iteration in (1, 2, 3):
            succeed([self.restore, folder / "whole", folder / f"at{iteration}", "--at", iteration, "--read-only"])
            self.known[iteration] = tree(folder / f"at{iteration}")

    def fill(self, store, iterations):
        for iteration in iterations:
            succeed(self.saving(iteration)(store.parent, store))

    def saving(self, iteration, *flags, k=1):
        def argv(root, store=None):
            return [self.save, self.run / f"global_step{iteration}", store or root / "store", "--k", str(k), "--threads",
                    "1", *flags]
        return argv


def cases(programs, folder):
    load, union, extract = (programs / f"ucp-{name}" for name in ("load", "union", "extract"))
    stores = Stores(programs, folder)
    routing = DATA / "deepspeed" / "routing_12x32" / "tokens.jsonl"

    def converting(*flags):
        return lambda out: [load, DEMO, out, *flags, "--threads", "1"]

    def restoring(out):
        return [stores.restore, folder / "whole", out, "--at", "2", "--threads", "1", "--target", "ep=1", "--read-only"]

    def placing(*flags):
        return lambda out: [programs / "moe-replace", routing, "--nodes", "4", "--gpus", "8", "--slots", "5", "-o", out, *flags]

    def collecting(root):
        return [stores.save, "gc", root / "store", "--keep-last", "1"]

    target = ("--target", "zero=3,dp=3")
    resume = ["--resume"]
    return [
        Output("load", None, converting(*target), resume),
        Output("load-force", converting("--target", "zero=1,dp=3"), converting(*target, "--force"), resume),
        Output("load-equal", None, converting(), resume),
        Output("load-dcp", None, converting("--format", "dcp", "--target", "dp_shard=2"), resume),
        Output("extract", None, lambda out: [extract, DEMO, out, "--threads", "1"], resume),
        Output("pack", None, lambda out: [extract, DEMO, out, "--pack=copy", "--threads", "1"], resume),
        Output("union", None, lambda out: [union, DEMO, out, "--threads", "1"], resume),
        Output("restore", None, restoring, ["--force"]),
        Output("place", None, placing(), ["--force"]),
        Output("place-force", placing("--faults", "1"), placing("--force"), []),
        Store("save-first", stores, (), stores.saving(1), 1),
        Store("save", stores, (1, 2), stores.saving(3), 3),
        Store("save-zstd", stores, (1, 2), stores.saving(3, "--compress", "zstd"), 3),
        AgentStore("agent", stores, (1, 2), None, 3),
        Store("gc", stores, (1, 2, 3), collecting, 3),
        *([LoggedStore("gc-log", stores, (1, 2, 3, 4), collecting, 4)] if gradient_log.LIBRARY else []),
    ]
