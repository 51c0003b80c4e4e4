#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the commands against their yardsticks and prints one Markdown table.

    tests/perf/bench.py [--bin build/release/bin] [--peers VENV] [--work /dev/shm] [--disk DIR] [--checkpoint CKPT]
                        [--runs 5] [--only ROW,...] [--small]

Every ratio is of medians of paired runs: ours, the yardstick, ours, ... Checkpoints are made with make_checkpoint.py,
make_sharded.py and make_sparse.py where they are not there yet. Needs 20 GB in --work (a tmpfs) and 15 GB in --disk, and
strace. --small makes them of a tiny model, to see that the rows work: such times are not meaningful.
"""
import argparse
import glob
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True

import pec_rows  # pylint: disable=wrong-import-position
from measure import HERE, ROOT, clear, processor_seconds, run_trainer, timed  # pylint: disable=wrong-import-position


class Bench(pec_rows.PecRows):
    def __init__(self, args):
        self.args = args
        name = "shardwright-bench-small" if args.small else "shardwright-bench"
        self.work = os.path.join(args.work, name)
        self.disk = os.path.join(args.disk, name)
        os.makedirs(self.work, exist_ok=True)
        os.makedirs(self.disk, exist_ok=True)
        shared = os.environ.get("SHARDWRIGHT_SHARED", os.path.join(os.path.dirname(ROOT), "shared"))
        self.fixtures = os.path.join(shared, "fixtures")  # scripts of trainers
        self.python = os.path.join(args.peers, "bin", "python")
        self.rows = []

    def command(self, name):
        return os.path.join(self.args.bin, name)

    def row(self, what, value, wanted):
        self.rows.append((what, value, wanted))
        print(f"| {what} | {value} | {wanted} |", flush=True)

    def pairs(self, ours, theirs, outputs, runs):
        """Seconds and largest resident sets of paired runs; outputs are removed before every run, out of the timing."""
        mine, other = [], []
        for run in range(runs + 1):
            clear(*outputs)
            a = timed(ours)
            clear(*outputs)
            b = timed(theirs)
            if run > 0 or runs == 1:  # the first pair warms up
                mine.append(a)
                other.append(b)
        clear(*outputs)
        return mine, other

    def ratio(self, what, ours, theirs, outputs, wanted, invert=False, memory=False):
        """memory: also prints the largest resident sets: those with --memory 256MiB, and the yardstick's"""
        (mine, _), (other, sets) = (zip(*runs) for runs in self.pairs(ours, theirs, outputs, self.args.runs))
        a, b = statistics.median(mine), statistics.median(other)
        held = ""
        if memory:
            held = f"; {timed([*ours, '--memory', '256MiB'])[1]:.0f} MiB to {max(sets):.0f} MiB"
            clear(*outputs)
        value = f"{b / a:.1f} times faster" if invert else f"{a / b:.2f}"
        self.row(what, f"{value} ({a:.2f} s to {b:.2f} s; {min(mine):.2f}-{max(mine):.2f} to "
                       f"{min(other):.2f}-{max(other):.2f}{held})", wanted)

    def checkpoint(self, name, *sizes):
        """The save folder of a real checkpoint, made once."""
        if self.args.checkpoint and not sizes:
            return self.args.checkpoint
        folder = os.path.join(self.work, name)
        if not os.path.exists(os.path.join(folder, "latest")):
            self.torchrun(2, os.path.join(HERE, "make_checkpoint.py"), folder, *(sizes or self.sizes()))
        return folder

    def sizes(self):
        return ["--hidden", "64", "--layers", "2", "--vocab", "500"] if self.args.small else []

    def torchrun(self, ranks, *words):
        run_trainer(self.python, os.path.join(self.args.peers, "bin", "torchrun"), "--nproc-per-node", str(ranks), *words)

    def sharded(self, form):
        """An FSDP2 checkpoint on 4 ranks, made once."""
        folder = os.path.join(self.work, "sharded-" + form)
        if not os.path.exists(folder):
            making = folder + "-making"
            clear(making)
            self.torchrun(4, os.path.join(HERE, "make_sharded.py"), making, "--form", form, *self.sizes())
            os.rename(making, folder)
        return folder

    def union(self, source, out):
        return [self.command("ucp-union"), source, out, "--threads", "2", "--progress", "off"]

    def load(self, source, out, *more):
        return [self.command("ucp-load"), source, out, "--target", "zero=2,dp=3", "--threads", "2", "--progress", "off",
                *more]

    def upstream(self):
        source = self.checkpoint("big")
        tag = glob.glob(os.path.join(source, "global_step*"))[0]
        out, theirs = os.path.join(self.work, "atoms"), os.path.join(self.work, "upstream", "universal")
        os.environ["DS_ACCELERATOR"] = "cpu"
        peer = [self.python, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", tag, "--output_folder",
                theirs, "--num_extract_workers", "2", "--num_merge_workers", "2", "--inject_missing_state"]
        self.ratio("`ucp-union` against `ds_to_universal` (2 + 2 workers), tmpfs", self.union(source, out), peer,
                   [out, os.path.dirname(theirs)], "≥ 15 times faster", invert=True)

    def tmpfs(self):
        source = self.checkpoint("big")
        out, copy = os.path.join(self.work, "out"), os.path.join(self.work, "copy")
        peer = ["cp", "-r", source, copy]
        self.ratio("`ucp-union` against `cp -r` of the source, tmpfs", self.union(source, out), peer, [out, copy],
                   "≤ 0.8")
        self.ratio("`ucp-load --target zero=2,dp=3` against `cp -r` of the source, tmpfs", self.load(source, out), peer,
                   [out, copy], "≤ 0.8")

    def on_disk(self):
        source = os.path.join(self.disk, "source")
        if not os.path.exists(source):
            shutil.copytree(self.checkpoint("big"), source)
            subprocess.run(["sync", "-f", source], check=True)
        out, copy = os.path.join(self.disk, "out"), os.path.join(self.disk, "copy")
        peer = ["sh", "-c", 'cp -r "$0" "$1" && sync -f "$1"', source, copy]
        self.ratio("`ucp-union` with its syncs against `cp -r` and `sync -f`, disk", self.union(source, out), peer,
                   [out, copy], "≤ 1.0")
        self.ratio("`ucp-load` with its syncs against `cp -r` and `sync -f`, disk", self.load(source, out), peer,
                   [out, copy], "≤ 1.0")
        clear(source)

    def memory(self):
        out = os.path.join(self.work, "out")
        peaks = []
        for source in (self.checkpoint("big"), self.checkpoint("small", "--hidden", "512", "--layers", "4", "--vocab",
                                                               "24000")):
            for command in (self.load(source, out, "--memory", "256MiB"), self.union(source, out) + ["--memory", "256MiB"]):
                clear(out)
                peaks.append(timed(command)[1])
        clear(out)
        self.row("peak resident memory with `--memory 256MiB`: load, union; the same ten times smaller",
                 ", ".join(f"{peak:.0f} MiB" for peak in peaks), "≤ 320 MiB, the same")

    def moved(self):
        """Payload bytes that cross the system call boundary, by file, from strace."""
        source, out = self.checkpoint("big"), os.path.join(self.work, "out")
        clear(out)
        sums = {"read": 0, "write": 0}
        with tempfile.TemporaryDirectory() as logs:
            report = os.path.join(logs, "report.json")
            # One log per thread, so that no call is split over lines.
            subprocess.run(["strace", "-ff", "-y", "-qq", "-s", "0", "-e", "trace=read,pread64,write,pwrite64", "-o",
                            os.path.join(logs, "thread"), *self.load(source, out, "--json=" + report)], check=True,
                           stderr=subprocess.DEVNULL)
            pattern = re.compile(r"p?(read|write)(?:64)?\(\d+<([^>]*)>.*= (\d+)$")
            for log in glob.glob(os.path.join(logs, "thread.*")):
                for found in map(pattern.match, open(log, encoding="utf-8", errors="replace")):
                    if found and (os.path.realpath(source) in found[2] if found[1] == "read" else
                                  "/out" in found[2] and ".journal" not in found[2]):
                        sums[found[1]] += int(found[3])
            plan = json.load(open(report, encoding="utf-8"))["result"]["plan"]
        held = sum(os.path.getsize(p) for p in glob.glob(os.path.join(source, "*", "*.pt")))
        made = sum(os.path.getsize(p) for p in glob.glob(os.path.join(out, "**"), recursive=True) if os.path.isfile(p))
        clear(out)
        self.row("bytes read, by strace; the plan's; size of the source's files",
                 f"{sums['read']:,}; {plan['read_bytes']:,}; {held:,}", "each source byte needed once")
        self.row("bytes written, by strace; the plan's; size of the output's files",
                 f"{sums['write']:,}; {plan['output_bytes']:,}; {made:,}", "each target byte once")

    def plan(self):
        """A catalogue and a plan from it; the files are made without their bytes (make_sparse.py)."""
        for ranks, tensors, target, wanted in ((1024, 1500, 768, "≤ 10 s, ≤ 2 GiB, ≤ 64 MiB"),
                                               (16384, 4000, 12288, "the plan ≤ 10 s, ≤ 2 GiB")):
            folder = os.path.join(self.work, f"sparse-{ranks}")
            if not os.path.exists(os.path.join(folder, "latest")):
                clear(folder)
                subprocess.run([self.python, os.path.join(HERE, "make_sparse.py"), folder, "--ranks", str(ranks),
                                "--tensors", str(tensors)], check=True)
            catalogue = os.path.join(self.work, "catalogue")
            clear(catalogue)
            first, one = timed([self.command("ucp-extract"), folder, catalogue, "--progress", "off"])
            second, two = timed([self.command("ucp-load"), catalogue, os.path.join(self.work, "out"), "--target",
                                 f"dp={target}", "-n", "--progress", "off"])
            size = os.path.getsize(os.path.join(catalogue, "catalogue.swc"))
            clear(catalogue, folder)
            self.row(f"catalogue, then plan from it: {ranks} ranks × {tensors} tensors, 10^12 parameters, to {target} "
                     "ranks", f"{first:.1f} s + {second:.1f} s; {max(one, two):.0f} MiB; catalogue {size / 2**20:.1f} MiB",
                     wanted)

    def items(self):
        """A folder of torch.distributed.checkpoint with a million items, to other ranks: read, planned and written."""
        folder, out = os.path.join(self.work, "items"), os.path.join(self.work, "out")
        if not os.path.exists(os.path.join(folder, ".metadata")):
            clear(folder)
            subprocess.run([self.python, os.path.join(HERE, "make_dcp.py"), folder], check=True)
        clear(out)
        words = [self.command("ucp-load"), folder, out, "--format", "dcp", "--target", "dp_shard=6", "--threads", "2",
                 "--progress", "off"]
        wall, peak = timed(words)
        clear(out)
        busy = processor_seconds(words)
        clear(out, folder)
        self.row("`ucp-load --format dcp --target dp_shard=6` of 10^6 items from 8 ranks, tmpfs",
                 f"{wall:.1f} s, {busy:.1f} s of processor time; {peak:.0f} MiB", "≤ 60 s, ≤ 2048 MiB")

    def trainer_load(self):
        """Waiting time of a trainer that is filled from files, against its own loader; and the bytes read of them."""
        package = os.path.join(os.path.dirname(os.path.abspath(self.args.bin)), "python")
        rows = (("same", self.checkpoint("big"), "of ZeRO-2 into its own layout, 2 ranks, against DeepSpeed's `load_checkpoint`", 4),
                ("stage3", self.checkpoint("big"), "of ZeRO-2 into ZeRO-3, 2 ranks, against `ds_to_universal` (2 + 2 workers) "
                                                   "alone", 15),
                ("dcp", self.sharded("dcp"), "of DCP of 4 ranks into FSDP2 on 2, against `dcp.load`", 1.5))
        for what, source, told, wanted in rows:
            words = [self.python, os.path.join(HERE, "live", "trainer_load.py"), what, package, source,
                     os.path.join(self.work, "theirs"), "--runs", str(self.args.runs), *self.sizes()]
            value, read = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[-1].rsplit("; ", 1)
            self.row(f"`shardwright.load` {told}, tmpfs", value, f"≥ {wanted} times faster")
            planned = self.convert(source, os.path.join(self.work, "out"), "--format", "dcp", "--target", "dp_shard=3", "-n", "--json",
                                   "-q") if what == "dcp" else self.load(source, os.path.join(self.work, "out"), "-n", "--json", "-q")
            plan = json.loads(subprocess.run(planned, check=True, capture_output=True, text=True).stdout)["result"]["plan"]
            self.row("what that load has read of the source's payload, all ranks together", f"{read} bytes of {plan['read_bytes']}",
                     "each byte once")

    def cache(self):
        """Waiting time of a trainer that is filled from a shared-memory cache."""
        package = os.path.join(os.path.dirname(os.path.abspath(self.args.bin)), "python")
        done = subprocess.run([self.python, os.path.join(HERE, "live", "cache.py"), self.args.bin, package,
                               os.path.join(self.work, "cache"),
                               os.path.join(self.disk, "cache"), "--runs", str(self.args.runs),
                               "--width", "64" if self.args.small else "2048"], check=True, capture_output=True, text=True)
        *fills, read = done.stdout.splitlines()[-3:]
        for place, fill in zip(("tmpfs", "disk, not in memory"), fills):
            self.row(f"`shardwright.load` from a shared-memory cache against DeepSpeed's `load_checkpoint`, {place}", fill,
                     "≥ 8 times faster")
        self.row("what that load has read of the source's payload", read, "each byte once")

    def safetensors(self):
        """Model files out of a training checkpoint, and a training checkpoint out of model files."""
        source = self.checkpoint("big")
        out, copy, files = (os.path.join(self.work, name) for name in ("out", "copy", "files"))
        quiet = ["--threads", "2", "--progress", "off"]
        report = os.path.join(self.work, "report.json")

        def planned(*words):
            subprocess.run([*words, "-n", "--json=" + report], check=True, stdout=subprocess.DEVNULL,
                           stderr=subprocess.DEVNULL)
            return json.load(open(report, encoding="utf-8"))["result"]["plan"]

        # Another type than that of the compute weights is rounded from the masters.
        load = [self.command("ucp-load"), source, out, "--format", "safetensors", *quiet]
        rounded = [*load, "--target", "dtype=float16"]
        clear(out, copy)
        needed = planned(*rounded)["read_bytes"]
        # As many bytes of the source's own; a read by this process would count as memory of the next command.
        subprocess.run(["sh", "-c", 'cat "$0"/*/*.pt | head -c "$1" > "$2"', source, str(needed), files], check=True)
        self.ratio("`ucp-load --format safetensors`, masters to 16-bit weights, against `cp` of the bytes read, tmpfs",
                   rounded, ["cp", files, copy + "-file"], [out], "≤ 0.8")
        os.remove(files)
        os.remove(copy + "-file")
        masters = [*load, "--only", "master"]
        theirs = [self.python, os.path.join(source, "zero_to_fp32.py"), source, copy, "--safe_serialization"]
        os.environ["DS_ACCELERATOR"] = "cpu"
        self.ratio("`ucp-load --format safetensors --only master` against `zero_to_fp32.py --safe_serialization`, tmpfs",
                   masters, theirs, [out, copy], "≥ 5 times faster", invert=True)
        peaks = []
        for words in (rounded, masters):
            clear(out)
            peaks.append(timed([*words, "--memory", "256MiB"])[1])
        clear(out)
        subprocess.run([*load[:2], files, *load[3:]], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        back = [self.command("ucp-load"), files, out, "--format", "deepspeed", "--target", "zero=2,dp=3", *quiet]
        peaks.append(timed([*back, "--memory", "256MiB"])[1])
        self.row("peak resident memory with `--memory 256MiB`: to 16-bit weights, to masters, from safetensors",
                 ", ".join(f"{peak:.0f} MiB" for peak in peaks), "≤ 320 MiB")
        kept = os.path.join(self.work, "kept")
        clear(kept)
        os.rename(out, kept)
        self.ratio("safetensors to `--target zero=2,dp=3` against `cp -r` of the result, tmpfs", back,
                   ["cp", "-r", kept, copy], [out, copy], "≤ 0.8")
        clear(kept, files)

    def convert(self, source, out, *words):
        return [self.command("ucp-load"), source, out, *words, "--threads", "2", "--progress", "off"]

    def result_of(self, words, kept):
        """The output of a conversion, kept to be copied."""
        clear(words[2], kept)
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.rename(words[2], kept)
        return kept

    def against_copy_of_result(self, what, words, copy):
        kept = self.result_of(words, os.path.join(self.work, "kept"))
        self.ratio(f"{what} against `cp -r` of the result, tmpfs", words, ["cp", "-r", kept, copy], [words[2], copy],
                   "≤ 0.8", memory=True)
        clear(kept)

    def dcp(self):
        """Folders of torch.distributed.checkpoint, between ranks, to weights, and from and to DeepSpeed."""
        source = self.sharded("dcp")
        out, copy = os.path.join(self.work, "out"), os.path.join(self.work, "copy")
        self.ratio("DCP of 4 ranks to 6 against `cp -r` of the source, tmpfs",
                   self.convert(source, out, "--format", "dcp", "--target", "dp_shard=6"), ["cp", "-r", source, copy],
                   [out, copy], "≤ 0.8", memory=True)
        weights = self.convert(source, out, "--format", "safetensors")
        theirs = """if True:
            import sys, os, torch
            from safetensors.torch import save_file
            from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
            os.makedirs(sys.argv[2])
            whole = os.path.join(sys.argv[2], "whole.pt")
            dcp_to_torch_save(sys.argv[1], whole)
            save_file(torch.load(whole, mmap=True)["model"], os.path.join(sys.argv[2], "model.safetensors"))
            """
        self.ratio("DCP to safetensors, weights, against `dcp_to_torch_save` and `save_file`, tmpfs", weights,
                   [self.python, "-c", theirs, source, copy], [out, copy], "≥ 8 times faster", invert=True, memory=True)
        pieces = self.sharded("hf")
        theirs = """if True:
            import glob, os, sys
            from safetensors import safe_open
            from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
            names = set()
            for path in glob.glob(os.path.join(sys.argv[1], "*.safetensors")):
                with safe_open(path, "pt") as file:
                    names.update(file.keys())
            os.makedirs(sys.argv[2])
            consolidate_safetensors_files(sys.argv[1], sys.argv[2], dict.fromkeys(names, 1), num_threads=2)
            """
        self.ratio("DCP to safetensors, weights, against DCP's consolidation of its safetensors of the ranks, tmpfs",
                   weights, [self.python, "-c", theirs, pieces, copy], [out, copy], "≥ 3 times faster", invert=True, memory=True)
        clear(pieces)  # in memory, like all others
        self.against_copy_of_result("DeepSpeed ZeRO-2 of 2 ranks to DCP of 4", self.convert(
            self.checkpoint("big"), out, "--format", "dcp", "--target", "dp_shard=4"), copy)
        self.against_copy_of_result("DCP of 4 ranks to DeepSpeed ZeRO-3 of 3", self.convert(
            source, out, "--format", "deepspeed", "--target", "zero=3,dp=3"), copy)
        clear(source)

    def dtensor(self):
        """DTensor files for each rank, to other ranks and to weights."""
        source = self.sharded("files")
        out, copy = os.path.join(self.work, "out"), os.path.join(self.work, "copy")
        self.ratio("files of DTensors of 4 ranks to 2 against `cp -r` of the source, tmpfs",
                   self.convert(source, out, "--format", "dtensor", "--target", "dp_shard=2"), ["cp", "-r", source, copy],
                   [out, copy], "≤ 0.8", memory=True)
        theirs = [os.path.join(self.args.peers, "trainers", "bin", "python"), "-m", "verl.model_merger", "merge",
                  "--backend", "fsdp", "--local_dir", source, "--target_dir", copy, "--use_cpu_initialization"]
        # verl's merger writes bfloat16.
        self.ratio("files of DTensors of 4 ranks to safetensors, bfloat16 weights, against verl's model merger, tmpfs",
                   self.convert(source, out, "--format", "safetensors", "--target", "dtype=bfloat16"), theirs, [out, copy],
                   "≥ 5 times faster", invert=True, memory=True)
        clear(source)

    def megatron(self):
        """Megatron's torch_dist, from the form that only its own layout loads to the one that any loads. The source is made of
        DeepSpeed's checkpoint: Megatron itself holds the state several times while it saves, which 24 GiB do not hold."""
        source = os.path.join(self.work, "megatron")
        if not os.path.exists(os.path.join(source, "latest_checkpointed_iteration.txt")):
            clear(source)
            subprocess.run(self.convert(self.checkpoint("big"), source, "--format", "megatron", "--target",
                                        "optimizer=dp_reshardable,dp=2"), check=True, stdout=subprocess.DEVNULL)
        out, copy = os.path.join(self.work, "out"), os.path.join(self.work, "copy")
        self.ratio("Megatron dp_reshardable to fully_reshardable against `cp -r` of the source, tmpfs",
                   self.convert(source, out, "--format", "megatron", "--target", "optimizer=fully_reshardable"),
                   ["cp", "-r", source, copy], [out, copy], "≤ 1.0", memory=True)
        clear(source)

    def help(self):
        for name in ("ucp-extract", "ucp-union", "ucp-load", "pec-save", "pec-restore"):
            times = [timed([self.command(name), "--help"])[0] for _ in range(21)]
            libraries = subprocess.run(["ldd", self.command(name)], check=True, capture_output=True, text=True).stdout
            torch = "links LibTorch" if "libtorch" in libraries or "libc10" in libraries else "no LibTorch"
            self.row(f"`{name} --help`", f"{statistics.median(times) * 1000:.0f} ms, {torch}", "≤ 20 ms, no LibTorch")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default=os.path.join(ROOT, "build/release/bin"))
    parser.add_argument("--peers", default=os.path.expanduser("~/.cache/shardwright/peers"))
    parser.add_argument("--work", default="/dev/shm")
    parser.add_argument("--disk", default="/var/tmp")
    parser.add_argument("--checkpoint", help="save folder to use instead of making one")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", default="help,plan,items,tmpfs,memory,moved,upstream,on_disk,safetensors,dcp,dtensor,megatron,"
                                          "pec,pec_replay,pec_snapshot,pec_unchanged")
    parser.add_argument("--small", action="store_true")
    bench = Bench(parser.parse_args())
    print("| what | measured | must reach |\n|---|---|---|")
    for name in bench.args.only.split(","):
        getattr(bench, name)()


main()
