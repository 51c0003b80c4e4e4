#!/usr/bin/env python3
"""Writes the seed inputs of fuzz_store: make_corpus.py BIN FOLDER. Same bytes every time.

They are the texts of a store that pec-save and pec-restore have made: two layers of four experts,
tokens, dynamic K, kept and compressed components, a recovery.
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


def main():
    tools, folder = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2])
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
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
