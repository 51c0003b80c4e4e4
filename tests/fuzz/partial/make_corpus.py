#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the seed inputs of fuzz_store and fuzz_agent: make_corpus.py BIN FOLDER. Same bytes every time, but for the version in them.

They are the texts of a store that pec-save and pec-restore have made: two layers of four experts,
tokens, dynamic K, kept and compressed components, a recovery. Of manifests and the recovery there
are small ones too, of one layer of two experts: a target tries several times as many inputs that
are made of these.
"""

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "crash"))

import moe_checkpoint  # pylint: disable=wrong-import-position


def cut(table):
    """The first two experts of the first layer."""
    return [row[:2] for row in table[:1]]


def compact(value):
    """Without the digest of the whole text."""
    value.pop("xxh3_128", None)
    return json.dumps(value, separators=(",", ":"))


def small_state(state):
    for level in ("snapshot", "persist"):
        for name, table in state[level].items():
            if isinstance(table, list):
                state[level][name] = table[:1] if name == "cursor" else cut(table)
    if "dynamic_k" in state:
        state["dynamic_k"]["experts"] = 2


def small_manifest(text):
    """With one of its modules, on a line of its own as before."""
    manifest = json.loads(text)
    small_state(manifest["state"])
    module = manifest.pop("modules")[-1]
    return compact(manifest)[:-1] + ',\n"modules":[\n' + compact(module) + "\n]}\n"


def small_recovery(text):
    recovery = json.loads(text)
    small_state(recovery["state"])
    ledger = recovery["ledger"]
    ledger["layer_lost"] = ledger["layer_lost"][:1]
    ledger["charged"] = cut(ledger["charged"])
    return compact(recovery) + "\n"


SMALL = {
    "plain-manifests-0000000001-0000000001.json": small_manifest,
    "rules-manifests-0000000004-0000000006.json": small_manifest,
    "rules-recoveries-0000000001.json": small_recovery,
}


# Without a checksum, so that changed plans are parsed to their end.
PLAN = """{"schema":"shardwright-agent-plan","schema_version":1,
"job":"0123456789abcdef0123456789abcdef","version":2,"store":null,"copies":1,"group":3,
"agents":[
{"name":"a","address":"a:1","ranks":[0,8],"since":1,"peers":["c"]},
{"name":"b","address":"b:1","ranks":[8,16],"since":1,"lost":true,"peers":[]},
{"name":"c","address":"unix:/c","ranks":[16,24],"since":2,"peers":["a"]}
]}
"""


# A record of the gradients that a copy announces.
ANNOUNCED = {"iteration": 4, "recovery": 0, "module": "m",
         "steps": [{"optimizer": "AdamW", "fused": True, "count": 4, "gradient_factor": 0.5, "skipped": False,
                    "first_momentum": False, "options": {"lr": 0.001, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8,
                                                         "weight_decay": 0.01, "amsgrad": 0, "maximize": 0}}],
         "pieces": [{"param": "p", "elems": 4, "first": 0, "count": 4, "dtype": "float32", "step": 0, "bytes": 16,
                     "zstd": False, "digest": "0123456789abcdef0123456789abcdef"}]}


def write_agent(folder, stores):
    """Messages of an agent: the list of its checkpoints, and lines."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest = (stores / "small-rules-manifests-0000000004-0000000006.json").read_text()
    listed = [{"state": "buffered", "manifest": manifest},
              {"state": "persisted", "manifest": manifest, "recovery": 1, "replayed": {"a": 3}}]
    (folder / "list").write_text(json.dumps(listed))
    (folder / "no_manifest").write_text('[{"state": "buffered"}]')
    (folder / "deep").write_text("[" * 40)
    (folder / "read").write_text("read 0123456789abcdef0123456789abcdef 0 16777216\n")
    (folder / "error").write_text("error 6 busy\n")
    (folder / "hello").write_text("2 agent node-a 0123456789abcdef0123456789abcdef\n")
    (folder / "plan").write_text(PLAN)
    (folder / "announced").write_text(2 * (json.dumps(ANNOUNCED) + "\n"))


def main():
    tools, folder = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]) / "fuzz_store"
    folder.mkdir(parents=True, exist_ok=True)
    work = pathlib.Path(tempfile.mkdtemp())
    model = moe_checkpoint.Model(hidden=1)
    moe_checkpoint.write(work / "run", model, 1)
    (work / "tokens.jsonl").write_text("".join(
        json.dumps({"iteration": i, "tokens": [[i, 2, 3, 4], [8, 7, 6, 5]]}) + "\n"
        for i in range(1, 9)))

    def run(tool, *words):
        subprocess.run([str(word) for word in (tools / tool, *words, "-q")], check=True,
                       stdout=subprocess.DEVNULL)

    def save(store, iteration, *words):
        run("pec-save", work / "run", work / store, "--iteration", iteration, *words)

    dynamic = ["--tokens", work / "tokens.jsonl", "--dynamic-k", 0.5, "--iterations", 100]
    for iteration in (2, 4, 6):
        save("rules", iteration, *dynamic)
    run("pec-restore", work / "rules", "--format", "none", "--at", 4)
    save("rules", 6, *dynamic)
    for iteration in (1, 2):
        save("plain", iteration, "--keep", "master", "--compress", "zstd", "--partial-start")
    for store in ("rules", "plain"):
        for text in sorted((work / store).rglob("*.json")):
            name = str(text.relative_to(work)).replace("/", "-")
            shutil.copyfile(text, folder / name)
    for name, small in SMALL.items():
        (folder / f"small-{name}").write_text(small((folder / name).read_text()))
    shutil.rmtree(work)
    write_agent(folder.parent / "fuzz_agent", folder)


if __name__ == "__main__":
    main()
