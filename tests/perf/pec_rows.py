# SPDX-License-Identifier: Apache-2.0
"""Rows of bench.py for partial checkpoints."""

import json
import os
import re
import shutil
import subprocess
import sys

from measure import HERE, ROOT, clear, processor_seconds, timed


class PecRows:
    """Methods of bench.Bench, which has the folders, the command lines and the table."""

    def experts(self):
        """The save folder of a real mixture-of-experts checkpoint, made once: 16 experts in 4 layers."""
        folder = os.path.join(self.work, "experts")
        if not os.path.exists(os.path.join(folder, "ckpt", "latest")):
            case = {"h": 1024, "layers": 4, "vocab": 2000, "dtype": "bf16", "zero": 2, "batch": 4, "moe": 16, "ep": 2,
                    "groups": 1, "buffers": False}
            self.torchrun(2, os.path.join(self.fixtures, "train_deepspeed.py"), "bench", folder, json.dumps(case))
        return os.path.join(folder, "ckpt")

    def pec(self):
        """Partial saves and restores, in --work and in --disk."""
        source = self.experts()
        quiet = ["--threads", "2", "--progress", "off"]
        for where, folder in (("tmpfs", self.work), ("disk", self.disk)):
            at = {name: os.path.join(folder, "pec-" + name) for name in ("store", "copy", "out", "saved", "kept", "ckpt")}
            clear(*at.values())
            shutil.copytree(source, at["ckpt"])
            full = [self.command("pec-save"), at["ckpt"], at["store"], "--policy", "full", *quiet]
            copy = ["cp", "-r", at["ckpt"], at["copy"]]
            if where == "disk":
                subprocess.run(["sync", "-f", at["ckpt"]], check=True)
                copy = ["sh", "-c", 'cp -r "$0" "$1" && sync -f "$1"', at["ckpt"], at["copy"]]
            self.ratio(f"full `pec-save` against `cp -r` of the checkpoint, {where}", full, copy,
                       [at["store"], at["copy"]], "≤ 0.8")
            # The same number of bytes in files of a store, which is what cp of just these bytes is.
            one = [self.command("pec-save"), at["ckpt"], at["store"], "--k", "1", "--partial-start", *quiet]
            subprocess.run([*one[:2], at["kept"], *one[3:]], check=True, stderr=subprocess.DEVNULL,
                           stdout=subprocess.DEVNULL)
            blobs = os.path.join(at["kept"], "blobs")
            copy = ["cp", "-r", blobs, at["saved"]]
            if where == "disk":
                copy = ["sh", "-c", 'cp -r "$0" "$1" && sync -f "$1"', blobs, at["saved"]]
            self.ratio(f"`pec-save --k 1` of 16 experts against `cp` of just the bytes saved, {where}", one, copy,
                       [at["store"], at["saved"]], "≤ 1.1")
            subprocess.run(full, check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            restore = [self.command("pec-restore"), at["store"], at["out"], "--target", "ep=4,dp=4", "--read-only", *quiet]
            clear(at["kept"])
            subprocess.run([*restore[:2], at["kept"], *restore[3:]], check=True, stderr=subprocess.DEVNULL,
                           stdout=subprocess.DEVNULL)
            copy = ["cp", "-r", at["kept"], at["copy"]]
            if where == "disk":
                copy = ["sh", "-c", 'cp -r "$0" "$1" && sync -f "$1"', at["kept"], at["copy"]]
            self.ratio(f"`pec-restore` to ep=4, dp=4 against `cp -r` of the result, {where}", restore, copy,
                       [at["out"], at["copy"]], "≤ 0.9")
            if where == "tmpfs":
                peaks = [timed([*full, "--memory", "256MiB"])[1], timed([*restore, "--memory", "256MiB"])[1]]
                self.row("peak resident memory with `--memory 256MiB`: full `pec-save`, `pec-restore`",
                         ", ".join(f"{peak:.0f} MiB" for peak in peaks), "≤ 320 MiB")
            clear(*at.values())

    def pec_replay(self):
        """A restore that makes 10 steps of 15 of 16 experts again, against the same without; logs in both types."""
        at = {name: os.path.join(self.work, "pec-" + name) for name in ("ckpt", "store", "out", "copy")}
        clear(*at.values())
        shutil.copytree(self.experts(), at["ckpt"])
        tag, = (name for name in os.listdir(at["ckpt"]) if name.startswith("global_step"))
        subprocess.run([self.python, os.path.join(HERE, "pec", "set_steps.py"), os.path.join(at["ckpt"], tag), "11"],
                       check=True, stderr=subprocess.DEVNULL)
        quiet = ["--threads", "2", "--progress", "off"]
        for words in (["--policy", "full", "--iteration", "1"], ["--k", "1", "--iteration", "11"]):
            subprocess.run([self.command("pec-save"), at["ckpt"], at["store"], *words, *quiet], check=True,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        clear(at["ckpt"])
        bench = os.path.join(os.path.dirname(os.path.abspath(self.args.bin)), "tests", "pec_log_bench")
        for dtype in ("bfloat16", "float32"):
            logs = os.path.join(at["store"], "logs")
            clear(logs)
            subprocess.run([bench, at["store"], "11", "10", dtype], check=True, stdout=subprocess.DEVNULL)
            restore = [self.command("pec-restore"), at["store"], at["out"], "--target", "ep=4,dp=4", "--read-only", *quiet]
            size = sum(os.path.getsize(os.path.join(logs, name)) for name in os.listdir(logs))
            self.ratio(f"`pec-restore --replay require`, 10 steps of 15 of 16 experts ({size / 1e9:.1f} GB of {dtype}), against "
                       "`--replay never`, tmpfs", [*restore, "--replay", "require"], [*restore, "--replay", "never"],
                       [at["out"]], "≤ 3")
            peaks = []
            for memory in ("256MiB", "32MiB"):
                clear(at["out"])
                peaks.append(timed([*restore, "--replay", "require", "--memory", memory])[1])
            self.row(f"its peak resident memory with `--memory` 256MiB and 32MiB, {dtype}",
                     ", ".join(f"{peak:.0f} MiB" for peak in peaks), "≤ 320 MiB, ≤ 96 MiB")
        clear(*at.values())

    def pec_snapshot(self):
        """Stall of training while an agent takes a snapshot of half of the experts."""
        bench = os.path.join(os.path.dirname(os.path.abspath(self.args.bin)), "tests", "pec_snapshot_bench")
        done = subprocess.run([bench, self.experts(), "1"], check=True, capture_output=True, text=True)
        self.row("copy of an agent's snapshot, 2 threads, tmpfs, against memcpy of the same bytes on one",
                 done.stdout.strip(), "≥ 0.8; 1.000 bytes read for each taken")

    def pec_copy(self):
        """Copies between agents at ports, with a key against without."""
        bench = os.path.join(os.path.dirname(os.path.abspath(self.args.bin)), "tests", "pec_copy_bench")
        done = subprocess.run([bench], check=True, capture_output=True, text=True)
        self.row("copies between agents over TCP, TLS against plain, sender and receiver on one core",
                 done.stdout.strip(), "≥ 0.7")

    def pec_stall(self):
        """Stall of training while PartialCheckpoints takes a snapshot out of it."""
        package = os.path.join(os.path.dirname(os.path.abspath(self.args.bin)), "python")
        done = subprocess.run([self.python, os.path.join(HERE, "pec", "trainer_stall.py"), self.args.bin, package,
                               os.path.join(self.work, "stall"), "--runs", str(self.args.runs),
                               "--width", "64" if self.args.small else "1024"], check=True, capture_output=True, text=True)
        self.row("snapshot out of the trainer, one of 16 experts, against DeepSpeed's `save_checkpoint` into a tmpfs",
                 done.stdout.splitlines()[-1], "≤ 0.067")

    def pec_lossless(self):
        """Share of a trainer's step for the log of gradients."""
        package = os.path.join(os.path.dirname(os.path.abspath(self.args.bin)), "python")
        done = subprocess.run([self.python, os.path.join(HERE, "pec", "lossless_stall.py"), self.args.bin, package,
                               os.path.join(self.work, "lossless"), "--blocks", str(self.args.runs),
                               "--width", "64" if self.args.small else "512"], check=True, capture_output=True, text=True)
        self.row("a step of a trainer that logs gradients of 32 experts against one that does not", done.stdout.splitlines()[-1],
                 "≤ 1.03")

    def pec_unchanged(self):
        """Cost of a module that a save only copies on: stores of many tiny experts, two sizes of them."""
        times = {}
        for experts in (256, 4096):
            folder = os.path.join(self.work, f"tiny-{experts}")
            if not os.path.exists(os.path.join(folder, "latest")):
                sys.path.insert(0, os.path.join(ROOT, "tests", "crash"))
                import moe_checkpoint, pathlib  # pylint: disable=import-outside-toplevel,multiple-imports
                model = moe_checkpoint.Model(layers=1, experts=experts, ep=2, ranks=2, hidden=2)
                moe_checkpoint.write(pathlib.Path(folder), model, 1)
            store = os.path.join(self.work, "pec-store")
            clear(store)
            words = [self.command("pec-save"), folder, store, "--progress", "off", "--threads", "1", "--iteration"]
            subprocess.run([*words, "1"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            load = [self.command("pec-save"), folder, os.path.join(self.work, "none"), "--progress", "off", "-n",
                    "--k", "1", "--partial-start"]
            # The least of many: other work only adds to processor time.
            saves, loads = [], []
            for number in range(2, 32):
                saves.append(processor_seconds([*words, str(number), "--k", "1"]))
                loads.append(processor_seconds(load))
            times[experts] = min(saves) - min(loads)
            clear(store)
        each = (times[4096] - times[256]) / (4096 - 256) * 1e6
        bench = os.path.join(os.path.dirname(os.path.abspath(self.args.bin)), "tests", "pec_bench")
        said = subprocess.run([bench], check=True, capture_output=True, text=True).stdout
        alone = re.search(r"unchanged module: ([0-9.]+) us", said)[1]
        self.row("a module that a save carries on unchanged: in the manifest read and in that written; processor time "
                 "of the whole save beyond a dry run, most of it to compress the catalogue",
                 f"{alone} µs; {each:.2f} µs", "≤ 1 µs beyond hashing")
        slowest = max((float(ms), what.strip()) for what, ms in re.findall(r"^(.*?): +([0-9.]+) ms$", said, re.M))
        self.row("selection for 60 layers × 256 experts on 1024 ranks, the slowest policy and K",
                 f"{slowest[0]:.2f} ms ({' '.join(slowest[1].split())})", "≤ 5 ms")
