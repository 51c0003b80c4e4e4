# SPDX-License-Identifier: Apache-2.0
"""Converts checkpoints of real trainers and resumes the results in the real trainers.

    matrix.py BIN FIXTURES [--all] [--only TEXT]... [--record FILE [--new]]

matrix.tsv defines which checkpoint is converted to which target and the trainer that resumes it; its head explains the
columns. FIXTURES is the folder of the checkpoints and of the scripts that made them and resume them: such a script
loads a checkpoint into a model with other weights, requires every tensor bit for bit and the losses of the next steps,
and reports so. Without --all only the rows that are marked as a sample. --record writes the results of each row into
FILE (results.tsv, of which scripts/gen-docs makes the table of docs/from-to.md); rows that did not run keep their
results in FILE, and with --new only those run that FILE has no good result of. Rows of trainers without an installed
environment are left out, by name.
"""

import argparse
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import results

HERE = pathlib.Path(__file__).resolve().parent


class Judge:
    """A script that resumes checkpoints, and how it is started."""

    def __init__(self, script, *packages, environment="", forks=False, below="",
                 first="torch._dynamo,torch.distributed.checkpoint,torch.distributed.fsdp,"
                       "transformers.models.llama.modeling_llama"):
        self.script = script
        self.packages = ("torch", *packages)  # a result names the versions of these
        self.environment = environment  # folder in that of scripts/peers
        self.forks = forks  # starts its ranks itself
        self.first = first  # modules to import before its ranks are forked
        self.below = below  # the folder of a checkpoint, in the one passed to the script

    def python(self):
        peers = pathlib.Path(os.environ.get("SHARDWRIGHT_PEERS") or pathlib.Path.home() / ".cache/shardwright/peers")
        path = peers / self.environment / "bin/python"
        return path if path.exists() else None

    def words(self, fixtures, folder, case, ranks, expect):
        start, end = [self.python(), fixtures / self.script], []
        if self.forks:
            end = ["--ranks", str(ranks)]
        else:
            start[1:1] = [HERE / "fork_ranks.py", str(ranks), self.first]
        return [*start, "resume", folder, json.dumps(case), "--expect", expect, *end]

    @functools.cached_property
    def versions(self):
        """"torch 2.15.0, verl 0.9.1", as the environment has them."""
        ask = "import importlib.metadata as m, sys; print(', '.join(f'{p} {m.version(p)}' for p in sys.argv[1:]))"
        return subprocess.run([self.python(), "-c", ask, *self.packages], check=True, capture_output=True,
                              text=True).stdout.strip()


JUDGES = {
    "torch": Judge("train_torch.py"),
    "deepspeed": Judge("train_deepspeed.py", "deepspeed"),
    "accelerate": Judge("trainers/accelerate_fsdp2.py", "accelerate"),
    "trainer": Judge("trainers/hf_fsdp2.py", "transformers", "accelerate"),
    "torchtitan": Judge("trainers/titan.py", "torchtitan", environment="trainers", below="step-4"),
    "verl": Judge("trainers/verl_ckpt.py", "verl", environment="trainers"),
    "lightning": Judge("trainers/lightning_ds.py", "lightning", "deepspeed", environment="trainers"),
    "sharded": Judge("trainers/old_torch.py"),
    "sharded, torch 2.9": Judge("trainers/old_torch.py", environment="../old/torch29"),
    "sharded, torch 2.6": Judge("trainers/old_torch.py", environment="../old/torch26"),
    "torch_checkpointing": Judge("trainers/torch_ckpt.py", "torch_checkpointing", environment="trainers"),
    "megatron": Judge("train_megatron.py", "megatron-core", environment="trainers", forks=True),
}


def last_words(text):
    """The lines with the reason, without torchrun's reports that its ranks ended."""
    said = [line.strip() for line in text.splitlines()
            if re.search(r"Error\b|error: |differs|RESUME|refus", line) and not re.search(r"elastic|ChildFailedError", line)]
    return "; ".join(said[-3:])[:600] or text[-300:]


def run(words, timeout):
    # Some virtual machines promise AMX tiles, and oneDNN's kernels with them trap.
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
                                "HF_HUB_OFFLINE": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
    try:
        done = subprocess.run(list(map(str, words)), env=environment, stdin=subprocess.DEVNULL, text=True, timeout=timeout,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    except subprocess.TimeoutExpired:
        return None, f"still running after {timeout} s"
    return done.returncode, done.stdout


def outcome(row, commands, fixtures, folder):
    """True if the row passes, and its results: tensors that are bit for bit the same of how many, and the largest
    difference of a loss; or the reason for its failure."""
    source = fixtures / row["source"]
    known = next(above for above in (source, *source.parents) if (above / "case.json").exists())
    checkpoint = source / "ckpt" if (source / "ckpt").is_dir() else source
    judge = JUDGES[row["judge"]]
    for number, words in enumerate(row["convert"].split(" then ")):
        told = folder / f"out{number}"
        output = told / judge.below
        output.parent.mkdir(exist_ok=True)
        code, said = run([commands / "ucp-load", checkpoint, output, *words.split(), "--progress", "off"], 120)
        if code != 0:
            return False, f"ucp-load {words} ended with {code}: {last_words(said)}"
        checkpoint = output
    code, said = run(judge.words(fixtures, told, json.loads(row["case"]), int(row["ranks"]), known), 400)
    seen = re.search(r"tensors (\d+/\d+) bit-exact; losses .* max diff ([0-9.e+-]+)", said)
    if code != 0 or "RESUME OK" not in said or not seen:
        return False, last_words(said)
    return True, seen.groups()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bin", type=pathlib.Path)
    results.options(parser)
    asked = parser.parse_args()
    if not (asked.fixtures / "train_torch.py").exists():
        print(f"no checkpoints of trainers in {asked.fixtures}")
        return results.SKIPPED

    def versions(row):
        judge = JUDGES[row["judge"]]
        return judge.versions if judge.python() else None

    def tried(row):
        with tempfile.TemporaryDirectory(prefix="shardwright-matrix-", ignore_cleanup_errors=True) as folder:
            return outcome(row, asked.bin.resolve(), asked.fixtures.resolve(), pathlib.Path(folder))

    return results.run(asked, HERE / "matrix.tsv", versions, lambda row: f"{row['source']} -> {row['convert']}, resumed by "
                       f"{row['judge']} on {row['ranks']}", tried)


if __name__ == "__main__":
    sys.exit(main())
