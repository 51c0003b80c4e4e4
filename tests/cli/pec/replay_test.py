#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""pec-restore --replay: experts of older versions and the gradients since then make the experts of the
iteration restored, bit for bit; if a log has gaps or errors, its experts stay older and the report
gives the reason.

Usage: replay_test.py BIN [MPIEXEC]
"""

import array
import json
import pathlib
import shutil
import struct
import sys
import tempfile

import stores
from stores import Given, Stores, moe_checkpoint

import gradient_log
from gradient_log import Log, adamw, piece
from harness import scratch_parent, tree

ITERATIONS = range(3, 9)
SKIPPED, SPECIAL = 5, 6


class Trained(moe_checkpoint.Model):
    """Its experts are trained: every iteration makes a step of AdamW on the one before.
    \\param half  gradients are bfloat16 numbers"""

    def __init__(self, half=False, **options):
        super().__init__(**options)
        self.half, self.trained, self.gradients = half, {}, {}
        self.steps = {i: adamw(self.step(i), lr=1e-2 / i, betas=(0.9, 0.95 + i / 1000),
                               weight_decay=0.1, factor=1 / (1 + i % 3), skipped=i == SKIPPED)
                      for i in range(ITERATIONS[0], ITERATIONS[-1] + 2)}
        for layer in range(self.layers):
            for expert in range(self.experts):
                for suffix, shape in self.expert.items():
                    self.train(f"{self.module(layer, expert)}.{suffix}", shape)

    def step(self, iteration):
        return iteration - (iteration >= SKIPPED)

    def modules(self):
        return [self.module(l, e) for l in range(self.layers) for e in range(self.experts)]

    def train(self, name, shape):
        start = ITERATIONS[0]
        now = [list(struct.unpack(f"<{len(data) // 4}f", data)) for data in
               (super(Trained, self).data(name, s, shape, start) for s in moe_checkpoint.STATES)]
        self.note(name, start, now)
        for iteration in self.steps:
            if iteration == start:
                continue
            gradient = list(struct.unpack(
                f"<{len(now[0])}f", super().data(name, "gradient", shape, iteration)))
            if iteration == SPECIAL:
                gradient[:4] = [0.0, -0.0, 1e-42, 3e38]
            if self.half:
                bits = array.array("I", (b & 0xFFFF0000 for b in array.array("I", struct.pack(f"<{len(gradient)}f", *gradient))))
                gradient = list(array.array("f", bits.tobytes()))
            self.gradients[name, iteration] = struct.pack(f"<{len(gradient)}f", *gradient)
            gradient_log.apply(self.steps[iteration], *now, gradient)
            self.note(name, iteration, now)

    def note(self, name, iteration, now):
        for state, values in zip(moe_checkpoint.STATES, now):
            self.trained[name, state, iteration] = struct.pack(f"<{len(values)}f", *values)

    def data(self, name, state, shape, iteration):
        found = self.trained.get((name, state, iteration)) if hasattr(self, "trained") else None
        return found or super().data(name, state, shape, iteration)

    def weight(self, name, shape, iteration):
        if self.dtype != "bf16":
            return super().weight(name, shape, iteration)
        # Rounded to the nearest, of two the even one.
        bits = array.array("I", self.data(name, "fp32", shape, iteration))
        data = array.array("H", [(b + 0x7FFF + (b >> 16 & 1)) >> 16 for b in bits]).tobytes()
        return moe_checkpoint.ptfile.tensor("BFloat16Storage", data, shape, 2)


class Replaying(Stores):
    dtype = "bf16"
    model_options = {}

    @classmethod
    def setUpClass(cls):
        cls.shared = pathlib.Path(tempfile.mkdtemp(prefix="sw-pec-replay-", dir=scratch_parent()))
        cls.addClassCleanup(shutil.rmtree, cls.shared)
        cls.model = Trained(dtype=cls.dtype, **cls.model_options)
        cls.tokens_path, cls.tokens = moe_checkpoint.series(cls.shared / "run", cls.model, ITERATIONS)

    def store_series(self, *words, upto=8):
        for iteration in range(3, upto + 1):
            self.save(iteration, "--k", 1, "--tokens", self.tokens_path, *words)

    def fingerprint(self):
        return json.loads((self.store / "store.json").read_text())["fingerprint"]

    def pieces(self, module, iteration, first=0.0, last=1.0, dtype="float32"):
        out = []
        for suffix in self.model.expert:
            data = self.model.gradients[f"{module}.{suffix}", iteration]
            elems = len(data) // 4
            begin, end = int(elems * first), int(elems * last)
            skipped = self.model.steps[iteration]["skipped"]
            one = piece(f"{module}.{suffix}", elems, b"" if skipped else data[4 * begin:4 * end],
                        begin, dtype)
            out.append({**one, "count": end - begin})
        return out

    def log(self, iterations=range(4, 9), writer=0, leave=(), folder=None, segments=False, **part):
        """Logs all experts; `leave` lists (module, iteration). segments: one for each iteration."""
        log = Log(folder or self.store / "logs", self.fingerprint(), writer)
        for iteration in iterations:
            if segments and iteration != iterations[0]:
                log.begin()
            for module in self.model.modules():
                if (module, iteration) in leave:
                    continue
                log.record(iteration, module, [self.model.steps[iteration]],
                           self.pieces(module, iteration, **part))
            log.mark()
        return log

    def restored(self, out, *words, versions=None, iteration=8, **options):
        result = self.restore(out, *words, **options)
        self.assertEqual(result["iteration"], iteration)
        self.said, self.warned = self.stdout, self.stderr
        self.same(out, iteration, versions or {}, self.model)
        return result

    def older(self, result):
        return {m["module"]: m["version"] for m in result["modules"] if m["version"] < 8}


class Exact(Replaying):
    def test_all_experts_become_those_of_the_iteration(self):
        self.store_series()
        plain = self.restore("plain", "--read-only")
        stale = self.older(plain)
        self.assertGreaterEqual(len(stale), 6)
        self.assertFalse(plain["replay"]["log"])
        self.assertGreater(sum(map(sum, plain["loss"]["lost_by_expert"])), 0)
        self.log()
        result = self.restored("out", "--replay=require", "--read-only")
        self.assertEqual(result["stale_modules"], 0)
        self.assertEqual(result["replay"]["modules"], len(stale))
        self.assertEqual(sum(map(sum, result["loss"]["lost_by_expert"])), 0)
        total = 0
        for module in result["modules"]:
            if module["module"] not in stale:
                self.assertNotIn("replayed", module)
                continue
            replayed = module["replayed"]
            self.assertEqual(replayed["from"], stale[module["module"]])
            self.assertEqual(replayed["iterations"], 8 - replayed["from"])
            self.assertEqual(replayed["lost_tokens"], 0)
            total += replayed["bytes"]
        self.assertEqual(result["replay"]["bytes"], total)
        self.assertIn("0 tokens lost there", self.said)
        self.assertEqual(self.restored("auto", "--read-only")["replay"]["modules"], len(stale))
        old = self.restored("never", "--replay=never", "--read-only", versions=stale)
        self.assertEqual(old["replay"]["mode"], "never")
        dry = self.restore("dry", "--replay=require", "--dry-run")
        self.assertEqual(dry["replay"]["modules"], len(stale))
        self.assertFalse((self.work / "dry").exists())

    def test_other_layouts_threads_and_memory(self):
        self.store_series()
        self.log(writer=0, first=0.0, last=0.4)
        self.log(writer=7, first=0.4, last=1.0)
        for name, words in {"ep1": ["--target", "ep=1"], "ep4": ["--target", "ep=4,dp=4"],
                            "threads": ["--threads", 4, "--memory", "40MiB"],
                            "universal": ["--format", "universal"]}.items():
            with self.subTest(name):
                self.restored(name, "--replay=require", "--read-only", *words)

    def test_a_stopped_run_goes_on_with_the_same_log_alone(self):
        self.store_series()
        log = self.log(range(4, 9))
        words = ["--replay=require", "--read-only"]
        self.killed("out", *words, at="commit.manifest:1")
        data = log.path.read_bytes()
        log.path.unlink()
        # The same steps, but for a gradient.
        module = self.model.modules()[-1]
        log = self.log(range(4, 9), leave=[(module, 8)])
        pieces = self.pieces(module, 8)
        pieces[0] = {**piece(pieces[0]["param"], pieces[0]["elems"], bytes(len(pieces[0]["data"])))}
        log.record(8, module, [self.model.steps[8]], pieces)
        self.restore("out", *words, code=6)
        log.path.write_bytes(data)
        result = self.restored("out", *words, "--resume")
        self.assertGreater(result["conversion"]["run"]["units_resumed"], 0)

    def test_of_an_iteration_before(self):
        self.store_series()
        self.log()
        self.restored("out", "--replay=require", "--at", 6, "--read-only", iteration=6)

    def test_kept_components(self):
        self.store_series("--keep", "weights")
        self.log()
        result = self.restored("out", "--replay=require")
        self.assertGreater(result["replay"]["modules"], 0)

    def test_damaged_blobs(self):
        self.store_series()
        self.log()
        result = self.restore("out", "--dry-run")
        module = next(m for m in result["modules"] if m.get("replayed", {}).get("from", 0) > 3)
        manifest = json.loads(sorted((self.store / "manifests").iterdir())[-1].read_text())
        name = next(m for m in manifest["modules"] if m["module"] == module["module"])["moments"][1]
        self.damage(self.store / "blobs" / name[:2] / name, "flipped")
        self.restore("bad", code=4)
        self.assertIn("digest", self.stderr)
        older = self.restored("older", "--replay=require", "--allow-older")
        now = next(m for m in older["modules"] if m["module"] == module["module"])
        self.assertLess(now["replayed"]["from"], module["replayed"]["from"])


class SinglePrecision(Exact):
    dtype = "fp32"


class Collecting(Replaying):
    """pec-save gc and the segments of the log: one for each iteration from 4 to 8."""

    def setUp(self):
        super().setUp()
        self.store_series()
        self.log(segments=True)

    def names(self):
        return sorted(path.name for path in (self.store / "logs").iterdir())

    def collected(self, *words):
        words = words if "--keep-last" in words else ("--keep-last", 1, *words)
        return self.run_tool("pec-save", "gc", self.store, *words)["log"]

    def test_what_no_kept_checkpoint_needs_goes(self):
        every = self.names()
        self.assertEqual(len(every), 5)
        sizes = {path.name: path.stat().st_size for path in (self.store / "logs").iterdir()}
        # Checkpoint 6 has an expert of each layer of iteration 3.
        kept = {"segments_kept": 5, "segments_removed": 0, "bytes_removed": 0, "wrong": None}
        self.assertEqual(self.collected("--keep-last", 3), {"through": 3, **kept})
        self.assertEqual(self.names(), every)
        gone = {"through": 5, "segments_kept": 3, "segments_removed": 2,
                "bytes_removed": sizes["0-1.swg"] + sizes["0-2.swg"], "wrong": None}
        self.assertEqual(self.collected("--dry-run"), gone)
        self.assertIn("would remove 2 of 5 segments", self.stdout)
        self.assertEqual(self.names(), every)
        self.assertEqual(self.collected(), gone)
        self.assertEqual(self.names(), ["0-3.swg", "0-4.swg", "0-5.swg"])
        self.assertEqual(self.collected()["segments_removed"], 0)
        self.run_tool("pec-save", "check", self.store)
        result = self.restored("out", "--replay=require", "--read-only")
        self.assertEqual(result["stale_modules"], 0)

    def test_a_damaged_log_stays(self):
        path = self.store / "logs/0-1.swg"
        data = bytearray(path.read_bytes())
        data[70] ^= 1
        path.write_bytes(data)
        every = self.names()
        log = self.collected()
        self.assertIn("record 0 is damaged", log["wrong"])
        self.assertEqual(log["segments_removed"], 0)
        self.assertIn("the gradient log is left unchanged", self.stderr)
        self.assertEqual(self.names(), every)
        listed = self.run_tool("pec-save", "list", self.store)["checkpoints"]
        self.assertEqual([one["iteration"] for one in listed], [8])

    def test_without_a_log(self):
        shutil.rmtree(self.store / "logs")
        self.assertEqual(self.collected()["segments_kept"], 0)
        self.assertNotIn("segment", self.stdout)


class Broken(Replaying):
    def setUp(self):
        super().setUp()
        self.store_series()
        self.stale = self.older(self.restore("plain", "--dry-run"))
        self.victim = min(self.stale, key=self.stale.get)

    def refused(self, what, versions, code=5, said=None):
        self.restore("required", "--replay=require", code=code)
        self.assertIn(what, self.stderr)
        self.assertFalse((self.work / "required").exists())
        result = self.restored(f"auto-{next(self.count)}", "--read-only", versions=versions)
        self.assertEqual(self.older(result), versions)
        self.assertIn(said or what, "".join(result["replay"]["refused"]))
        self.assertIn("not replayed", self.warned)
        lost = sum(map(sum, result["loss"]["lost_by_expert"]))
        self.assertGreater(lost, 0)
        self.assertEqual(result["replay"]["modules"], len(self.stale) - len(versions))
        return result

    def only(self):
        return {self.victim: self.stale[self.victim]}

    def test_no_log(self):
        self.restore("required", "--replay=require", code=5)
        self.assertIn("no gradient log", self.stderr)

    def test_experts_that_start_again(self):
        self.restore("out", "--replay=require", "--restart-missing", self.shared / "run", code=2)
        self.assertIn("cannot be combined with --restart-missing", self.stderr)

    def test_a_gap(self):
        self.log(leave=[(self.victim, 7)])
        self.refused(f'"{self.victim}", iteration 7: no record', self.only())

    def test_a_range_that_is_missing_or_doubled(self):
        self.log(writer=0, last=0.5)
        self.log(writer=1, first=0.5, leave=[(self.victim, 6)])
        self.refused("are missing", self.only())
        Log(self.store / "logs", self.fingerprint(), 2).record(
            6, self.victim, [self.model.steps[6]], self.pieces(self.victim, 6))
        self.refused("come twice", self.only(), code=4)

    def test_a_torn_tail(self):
        log = self.log()
        data = log.path.read_bytes()
        # The last record is a mark; the one before is of the last expert.
        last = self.model.modules()[-1]
        log.path.write_bytes(data[:-64 - 80])
        versions = {last: self.stale[last]} if last in self.stale else {}
        result = self.refused("iteration 8: no record", versions)
        self.assertTrue(any("truncated" in line for line in result["replay"]["torn"]))

    def test_damage_in_the_middle(self):
        log = self.log()
        data = bytearray(log.path.read_bytes())
        data[len(data) // 2] ^= 1
        log.path.write_bytes(data)
        self.refused("is damaged", self.stale, code=4)

    def test_segments_that_do_not_fit(self):
        log = self.log()
        first = log.path.read_bytes()
        log.begin()
        log.record(9, self.victim, [self.model.steps[9]], self.pieces(self.victim, 9))
        second = log.path
        log.begin()
        (self.store / "logs/0-2.swg").rename(self.work / "kept")
        self.refused("0-2.swg is missing", self.stale, code=4)
        (self.store / "logs/0-2.swg").write_bytes(first)
        self.refused("under another name", self.stale, code=4)
        shutil.move(self.work / "kept", second)
        self.restored("good", "--replay=require", "--read-only")

    def test_records_out_of_order(self):
        log = self.log()
        log.parts[2], log.parts[3] = log.parts[3], log.parts[2]
        log.write()
        self.refused("records", self.stale, code=4)

    def test_another_model(self):
        log = Log(self.store / "logs", "00" * 16)
        log.mark()
        self.refused("another model", self.stale)

    def test_records_that_do_not_fit_the_module(self):
        module, i = self.victim, 8
        for change, what, code, everything in (
                (lambda r: r["pieces"][0].update(elems=43), "42 elements expected, found 43", 4, False),
                (lambda r: r["pieces"][0].update(param="other"), 'no parameter "other"', 4, False),
                (lambda r: r["steps"][0].update(count=12), "expected, found 12", 4, False),
                (lambda r: r["steps"][0].update(optimizer="Adafactor"), '"Adafactor"', 9, True),
                (lambda r: r["steps"][0].update(optimizer="Lion", options={
                    "lr": 1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0}), "another optimizer", 4,
                 False)):
            with self.subTest(what):
                shutil.rmtree(self.store / "logs", ignore_errors=True)
                log = self.log(leave=[(module, i)])
                record = {"steps": [json.loads(json.dumps(self.model.steps[i]))],
                          "pieces": self.pieces(module, i)}
                change(record)
                log.record(i, module, **record)
                self.refused(what, self.stale if everything else self.only(), code=code)

    def test_square_roots_that_are_not_there(self):
        log = self.log(leave=[(self.victim, 8)])
        log.record(8, self.victim, [{**self.model.steps[8], "roots": "12" * 16}],
                   self.pieces(self.victim, 8))
        self.refused("roots-" + "12" * 16, self.only())


class GoingOn(Replaying):
    """Records of several lives of a training run."""

    def test_what_an_older_state_has_learnt(self):
        self.store_series(upto=6)
        self.log(range(4, 7))
        self.restore("first", "--replay=never")
        older = {m["module"]: m["version"] for m in self.report["result"]["modules"]
                 if m["version"] < 6}
        recovery = json.loads(next((self.store / "recoveries").iterdir()).read_text())
        self.assertEqual(recovery["older"], older)
        # Training continues with experts of older versions: their state at 8 follows from that.
        model = Trained(dtype=self.dtype)
        for layer in range(model.layers):
            for expert in range(model.experts):
                module = model.module(layer, expert)
                for suffix in model.expert:
                    name = f"{module}.{suffix}"
                    at = older.get(module, 6)
                    now = [list(struct.unpack(f"<{len(d) // 4}f", d)) for d in
                           (model.trained[name, s, at] for s in moe_checkpoint.STATES)]
                    for iteration in (7, 8):
                        gradient = struct.unpack(f"<{len(now[0])}f", model.gradients[name, iteration])
                        gradient_log.apply(model.steps[iteration], *now, gradient)
                        model.note(name, iteration, now)
        moe_checkpoint.write(self.work / "again", model, 8)
        self.save(8, "--k", 1, "--tokens", self.tokens_path, source=self.work / "again")
        log = Log(self.store / "logs", self.fingerprint(), 1)
        for iteration in (7, 8):
            for module in model.modules():
                log.record(iteration, module, [model.steps[iteration]], self.pieces(module, iteration),
                           recovery=1)
        result = self.restore("out", "--replay=require", "--read-only")
        self.same("out", 8, {}, model)
        chains = {m["module"]: m["replayed"]["iterations"] for m in result["modules"] if "replayed" in m}
        self.assertEqual({chains[m] for m in older if m in chains}, {2})
        # A store with recoveries that lack this information.
        path = next((self.store / "recoveries").iterdir())
        del recovery["older"], recovery["xxh3_128"]
        path.write_text(json.dumps(recovery))
        self.restore("unknown", "--replay=require", code=5)
        self.assertIn("not recorded with which state", self.stderr)

    def test_what_was_replayed_goes_on(self):
        self.store_series(upto=6)
        self.log(range(4, 7))
        # Belongs to a past that is rolled back now: iterations 7 and 8 come again.
        other = Log(self.store / "logs", self.fingerprint(), 2)
        for module in self.model.modules():
            other.record(7, module, [self.model.steps[7]], self.pieces(module, 6))
        self.restored("first", "--replay=require", iteration=6)
        log = Log(self.store / "logs", self.fingerprint(), 1)
        for iteration in (7, 8):
            for module in self.model.modules():
                log.record(iteration, module, [self.model.steps[iteration]],
                           self.pieces(module, iteration), recovery=1)
        self.save(8, "--k", 1, "--tokens", self.tokens_path)
        result = self.restored("out", "--replay=require")
        self.assertGreater(max(m["replayed"]["iterations"] for m in result["modules"]
                               if "replayed" in m), 2)


class Ranks(Replaying):
    def test_every_number_of_ranks_gives_the_same_output(self):
        if Given.mpiexec is None:
            self.skipTest("no MPI launcher given")
        self.store_series()
        self.log()
        outputs = []
        for ranks in (1, 2, 3):
            launcher = [Given.mpiexec, "--oversubscribe", "-n", ranks] if ranks > 1 else []
            self.restored("out", "--replay=require", "--read-only", "--target", "ep=4,dp=4", "--threads", 1,
                          launcher=launcher)
            outputs.append(tree(self.work / "out"))
            shutil.rmtree(self.work / "out")
        self.assertEqual(outputs[0], outputs[1])
        self.assertEqual(outputs[0], outputs[2])


if __name__ == "__main__":
    if gradient_log.LIBRARY is None:
        print("skipped: no libxxhash")
        sys.exit(77)
    stores.main()
