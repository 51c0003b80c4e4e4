#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Sibling files of the tag folder are copied byte for byte, or reported by name.

Usage: siblings_test.py BIN
"""

import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys

sys.dont_write_bytecode = True

from demo import TAG, DemoTest, main  # pylint: disable=wrong-import-position

BIG = "model.safetensors"
SIBLINGS = {
    "trainer_state.json": b'{"global_step": 5, "log_history": [NaN',  # never parsed
    "config.json": b"{}",
    "zero_to_fp32.py": b"#!/usr/bin/env python\n",
    "scheduler.pt": b"\x80\x02cos\nsystem\nq\x00.",  # never executed
    "rng_state_0.pth": b"0" * 300,
    "rng_state_1.pth": b"1" * 300,
    "empty.txt": b"",
    ".hidden": b"hidden",
    BIG: random.Random(1).randbytes(3_500_001),
}


class Neighbours(DemoTest):
    def setUp(self):
        super().setUp()
        for name, data in SIBLINGS.items():
            (self.work / "ckpt" / name).write_bytes(data)
        (self.work / "ckpt/zero_to_fp32.py").chmod(0o755)

    def sibling_files(self, folder):
        return {name: data for name, data in self.files(folder).items()
                if "/" not in name and name not in ("latest", "latest_universal")}

    def left_out(self, report):
        return {one["name"]: one["why"] for one in report["siblings"]["left_out"]}

    def test_every_target_gets_them(self):
        for flags in (("--target", "zero=3,dp=3"), ("--target", "zero=1,dp=2"), ("--format", "universal"), (),
                      ("--link",)):
            out = "out" + "".join(flags)
            result = self.report_of("ucp-load", "ckpt", out, *flags)
            self.assertEqual(self.sibling_files(out), SIBLINGS, flags)
            self.assertEqual({one["name"]: one["bytes"] for one in result["siblings"]["copied"]},
                             {name: len(data) for name, data in SIBLINGS.items()})
            self.assertEqual(result["siblings"]["bytes"], sum(map(len, SIBLINGS.values())))
            self.assertEqual(result["siblings"]["folders"], ["ckpt"])
            listed = {line["path"]: line for line in self.manifest(out)["files"]}
            self.assertTrue(all("xxh3_128" in listed[name] for name in SIBLINGS), out)
            self.assertTrue(os.access(self.work / out / "zero_to_fp32.py", os.X_OK))
            self.assertFalse(os.access(self.work / out / "config.json", os.X_OK))
            self.assertNotEqual((self.work / out / BIG).stat().st_ino, (self.work / "ckpt" / BIG).stat().st_ino)
            self.run_in("ucp-load", "--check", "ckpt", out)

    def test_they_stay_where_they_are_if_asked(self):
        for flags in ((), ("--target", "dp=3")):
            out = "out" + "".join(flags)
            result = self.report_of("ucp-load", "ckpt", out, "--siblings=none", *flags)
            self.assertEqual(self.sibling_files(out), {})
            self.assertEqual(result["siblings"]["copied"], [])

    def test_one_line_says_how_many(self):
        done = self.run_in("ucp-load", "ckpt", "out", "--target", "dp=1")
        self.assertIn("8 carried over", done.stderr)
        self.assertIn("1 left out (rng_state_1.pth)", done.stderr)
        for name in set(SIBLINGS) - {"config.json"}:
            (self.work / "ckpt" / name).unlink()
        done = self.run_in("ucp-load", "ckpt", "few", "--target", "dp=2")
        self.assertIn("sibling files: 1 carried over (config.json, ", done.stderr)

    def test_a_dry_run_counts_them_to_the_byte(self):
        for flags in (("--target", "dp=3"), ()):
            plan = self.report_of("ucp-load", "ckpt", "out", "--dry-run", *flags)["plan"]
            none = self.report_of("ucp-load", "ckpt", "out", "--dry-run", "--siblings=none", *flags)["plan"]
            self.assertEqual(plan["output_bytes"] - none["output_bytes"], sum(map(len, SIBLINGS.values())))
            self.assertEqual(plan["output_files"] - none["output_files"], len(SIBLINGS))
            self.run_in("ucp-load", "ckpt", "out", *flags)
            self.assertEqual(sum(map(len, self.files("out").values())), plan["output_bytes"])
            shutil.rmtree(self.work / "out")

    def test_random_states_of_ranks_that_are_no_more_are_named(self):
        (self.work / "ckpt/random_states_7.pkl").write_bytes(b"7")
        (self.work / "ckpt/rng_state_x.pth").write_bytes(b"x")
        done = self.run_in("ucp-load", "ckpt", "out", "--target", "dp=1", "--json=report")
        self.assertIn("random_states_7.pkl, rng_state_1.pth", done.stderr)
        report = json.loads((self.work / "report").read_text())
        self.assertEqual(set(self.left_out(report["result"])), {"random_states_7.pkl", "rng_state_1.pth"})
        self.assertEqual(set(self.sibling_files("out")), set(SIBLINGS) - {"rng_state_1.pth"} | {"rng_state_x.pth"})
        done = self.run_in("ucp-load", "ckpt", "more", "--target", "dp=9", "--siblings=copy")
        self.assertIn("the other ranks start with new random states", done.stderr)
        self.assertIn("rng_state_1.pth", self.sibling_files("more"))

    def test_a_tag_folder_has_them_beside_it(self):
        for source in (f"ckpt/{TAG}", f"ckpt/{TAG}/", f"ckpt/{TAG}/.", f"ckpt/../ckpt/{TAG}"):
            self.run_in("ucp-load", source, "out", "--target", "dp=3")
            self.assertEqual(self.sibling_files("out"), SIBLINGS, source)
            shutil.rmtree(self.work / "out")

    def test_what_lies_beside_a_folder_that_is_no_save_folder_is_not_taken(self):
        shutil.move(self.work / "ckpt" / TAG, self.work / TAG)
        (self.work / "thesis.tex").write_text("mine")
        self.run_in("ucp-load", TAG, "out", "--target", "dp=3")
        self.assertEqual(self.sibling_files("out"), {})

    def test_other_checkpoints_and_folders_stay(self):
        shutil.copytree(self.work / "ckpt" / TAG, self.work / "ckpt/global_step4")
        (self.work / "ckpt/runs").mkdir()
        (self.work / "ckpt/runs/events").write_text("curves")
        result = self.report_of("ucp-load", "ckpt", "out", "--target", "dp=3")
        done = self.run_in("ucp-load", "ckpt/global_step4", "older", "--target", "dp=3")
        self.assertIn(f"sibling files of global_step4 may belong to {TAG}", done.stderr)
        done = self.run_in("ucp-load", f"ckpt/{TAG}", "newest", "--target", "dp=3")
        self.assertNotIn("may belong to", done.stderr)
        self.assertEqual(self.left_out(result), {"global_step4": "a folder", "runs": "a folder"})
        self.assertEqual(self.sibling_files("out"), SIBLINGS)
        self.assertFalse((self.work / "out/runs").exists())

    def test_what_shardwright_puts_there_itself_stays(self):
        save = self.work / "ckpt"
        names = {"shardwright.json", "ckpt.dp3.report.json", "out.lock", "plan.json.partial", ".nfs0123", ".journal"}
        for name in names:
            (save / name).write_text(f"process 1 on {socket.gethostname()} (run 1)\n")
        result = self.report_of("ucp-load", "ckpt", "ckpt/out", "--target", "dp=3")
        self.assertEqual(set(self.left_out(result)), names)
        self.assertEqual(self.sibling_files("ckpt/out"), SIBLINGS)

    def test_an_output_beside_the_source_is_no_neighbour(self):
        self.run_in("ucp-union", "--input_folder", f"ckpt/{TAG}", "--output_folder", "ckpt/made")
        self.assertEqual(set(os.listdir(self.work / "ckpt/made")) & set(SIBLINGS), set())
        self.run_in("ucp-load", "ckpt/made", "out")
        self.assertEqual(self.sibling_files("out"), SIBLINGS)
        done = self.run_in("ucp-union", "--input_folder", f"ckpt/{TAG}", "--output_folder", "ckpt/again",
                           "--siblings=copy", code=2)
        self.assertIn("--siblings=copy", done.stderr)

    def test_they_pass_through_atoms_and_catalogues(self):
        self.run_in("ucp-union", "ckpt", "atoms")
        self.run_in("ucp-extract", "ckpt", "described")
        self.run_in("ucp-extract", "ckpt", "copied", "--pack")
        self.run_in("ucp-extract", "ckpt", "packed", "--pack=zstd")
        self.run_in("ucp-extract", "ckpt", "bare", "--pack", "--siblings=none")
        self.run_in("ucp-load", "described", "first", "--target", "dp=3")
        self.assertEqual(self.sibling_files("first"), SIBLINGS)
        shutil.rmtree(self.work / "ckpt")
        for source in ("atoms", "copied", "packed"):
            for flags in (("--target", "dp=3"), ()):
                out = f"out_{source}{len(flags)}"
                self.run_in("ucp-load", source, out, *flags)
                self.assertEqual(self.sibling_files(out), SIBLINGS, out)
        self.run_in("ucp-load", "copied", "none", "--siblings=none")
        self.run_in("ucp-load", "bare", "bare_out")
        self.assertEqual(self.sibling_files("none"), {})
        self.assertEqual(self.sibling_files("bare_out"), {})

    def test_damage_to_a_packed_one_is_found(self):
        for pack in ("copy", "zstd"):
            self.run_in("ucp-extract", "ckpt", pack, f"--pack={pack}")
            path = sorted((self.work / pack / "pack").iterdir())[-1]
            data = bytearray(path.read_bytes())
            for at in (0, len(data) // 2, len(data) - 1):
                data[at] ^= 1
                path.write_bytes(data)
                for flags in (("--target", "dp=3"), ()):
                    done = self.run_in("ucp-load", pack, "out", *flags, code=4)
                    self.assertIn(f"pack/{path.name}: damaged: expected digest ", done.stderr)
                    self.assertFalse((self.work / "out").exists())
                data[at] ^= 1
            self.run_in("ucp-load", pack, f"{pack}_none", "--siblings=none")
            path.write_bytes(data)
            self.run_in("ucp-load", pack, f"{pack}_out")
            self.assertEqual(self.sibling_files(f"{pack}_out"), SIBLINGS)

    def test_links_stay_inside_the_folder(self):
        save = self.work / "ckpt"
        (self.work / "secret").write_text("key")
        (save / "inside.bin").symlink_to(BIG)
        (save / "outside").symlink_to("../secret")
        (save / "absolute").symlink_to(self.work / "secret")
        (save / "loop").symlink_to("loop")
        (save / "dangling").symlink_to("nowhere")
        (save / "folder").symlink_to(TAG)
        done = self.run_in("ucp-load", "ckpt", "out", "--target", "dp=3", "--json=report")
        left = self.left_out(json.loads((self.work / "report").read_text())["result"])
        self.assertEqual(set(left), {"outside", "absolute", "loop", "dangling", "folder"})
        self.assertIn("absolute, outside: a link that leads out of the folder", done.stderr)
        self.assertIn("dangling, loop: a link that leads nowhere", done.stderr)
        self.assertEqual(self.sibling_files("out"), {**SIBLINGS, "inside.bin": SIBLINGS[BIG]})
        self.assertFalse((self.work / "out/inside.bin").is_symlink())

    def test_pipes_and_sockets_are_named_and_never_opened(self):
        os.mkfifo(self.work / "ckpt/pipe")
        (self.work / "ckpt/to_pipe").symlink_to("pipe")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.work / "ckpt/socket"))
            done = self.run_in("ucp-load", "ckpt", "out")
        self.assertIn("pipe, socket: neither a file nor a folder", done.stderr)
        self.assertIn("to_pipe", done.stderr)
        self.assertEqual(self.sibling_files("out"), SIBLINGS)

    def test_any_name_that_a_file_has_comes_along(self):
        names = [b"new\nline", b"\xff\xfe", b"-rf", b"a b", b"x" * 255, "ü".encode(), b"%s%n", b"{rank}"]
        for name in names:
            pathlib.Path(os.fsdecode(bytes(self.work / "ckpt") + b"/" + name)).write_bytes(name)
        self.run_in("ucp-load", "ckpt", "out", "--target", "dp=3", "--json=report")
        found = self.sibling_files("out")
        for name in names:
            self.assertEqual(found[os.fsdecode(name)], name)
        json.loads((self.work / "report").read_text())
        self.manifest("out")

    def test_a_name_that_the_output_needs_is_named(self):
        (self.work / f"ckpt/{TAG}_universal").write_text("in the way")
        done = self.run_in("ucp-union", "ckpt", "atoms")
        self.assertIn(f"{TAG}_universal: the output has a file or folder of that name", done.stderr)
        self.assertEqual(self.sibling_files("atoms"), SIBLINGS)

    def test_two_parts_of_a_source_may_both_have_them(self):
        shutil.copytree(self.work / "ckpt", self.work / "other")
        (self.work / "other/config.json").write_text("[]")
        (self.work / "other/more.txt").write_text("more")
        (self.work / "ckpt/same_size.bin").write_bytes(b"1" * 100_000)
        (self.work / "other/same_size.bin").write_bytes(b"1" * 99_999 + b"2")
        done = self.run_in("ucp-load", "ckpt", "out", "--also", "other", "--target", "dp=3")
        self.assertIn("config.json, same_size.bin: differs from the file of that name in ckpt", done.stderr)
        self.assertNotIn(BIG, done.stderr)
        self.assertEqual(self.sibling_files("out"), {**SIBLINGS, "more.txt": b"more", "same_size.bin": b"1" * 100_000})

    def test_a_large_one_that_was_written_again_is_refused(self):
        self.run_in("ucp-extract", "ckpt", "catalogue")
        path = self.work / "ckpt" / BIG
        for data in (SIBLINGS[BIG] + b"appended", SIBLINGS[BIG][:-1], SIBLINGS[BIG]):
            path.write_bytes(data)
            for flags in ((), ("--target", "dp=3"), ("--link",)):
                done = self.run_in("ucp-load", "catalogue", "out", *flags, "--no-resume", code=3)
                self.assertIn(f"{BIG}: changed since it was catalogued", done.stderr)
                self.assertFalse((self.work / "out").exists())
        self.run_in("ucp-load", "catalogue", "out", "--siblings=none", "--no-resume")

    def test_a_large_one_that_was_written_again_longer_is_not_torn(self):
        path = self.work / "ckpt/trainer_state.json"
        path.write_text(json.dumps({"log_history": list(range(30_000))}))
        self.run_in("ucp-extract", "ckpt", "catalogue")
        path.write_text(json.dumps({"log_history": list(range(30_001))}))
        for flags in ((), ("--target", "dp=3"), ("--link",)):
            done = self.run_in("ucp-load", "catalogue", "out", *flags, "--no-resume", code=3)
            self.assertIn("trainer_state.json: changed since it was catalogued", done.stderr)
            self.assertFalse((self.work / "out").exists())

    def test_a_log_that_grew_is_taken_as_it_was(self):
        names = ("run.log", "metrics.jsonl", "events.out.tfevents.7", "slurm.out", "slurm.err")
        logs = {name: name.encode() * 20_000 for name in names}
        for name, data in logs.items():
            (self.work / "ckpt" / name).write_bytes(data)
        self.run_in("ucp-extract", "ckpt", "catalogue")
        for name in names:
            with open(self.work / "ckpt" / name, "ab") as file:
                file.write(b"appended")
        for flags in ((), ("--target", "dp=3"), ("--link",), ("--node-local",)):
            out = "out" + "".join(flags)
            done = self.run_in("ucp-load", "catalogue", out, *flags)
            for name in names:
                self.assertIn(f"{name}: grew while it was copied", done.stderr)
            self.assertEqual(self.sibling_files(out), {**SIBLINGS, **logs})
        path = self.work / "ckpt/run.log"
        path.rename(self.work / "rotated")
        path.write_bytes(b"the next log" * 20_000)
        done = self.run_in("ucp-load", "catalogue", "rotated_out", code=3)
        self.assertIn("run.log: changed since it was catalogued", done.stderr)

    def test_a_link_that_leads_elsewhere_later_is_taken_as_it_was(self):
        link = self.work / "ckpt/inside.log"
        link.symlink_to(BIG)
        self.run_in("ucp-extract", "ckpt", "catalogue")
        secret = self.work / "secret"
        secret.write_bytes(b"key" * len(SIBLINGS[BIG]))
        link.unlink()
        link.symlink_to("../secret")
        self.run_in("ucp-load", "catalogue", "out", "--target", "dp=3")
        self.assertEqual(self.sibling_files("out"), {**SIBLINGS, "inside.log": SIBLINGS[BIG]})

    def test_small_ones_may_change_once_they_are_found(self):
        self.run_in("ucp-extract", "ckpt", "catalogue")
        (self.work / "ckpt/zero_to_fp32.py").write_bytes(b"written again by the next save")
        self.run_in("ucp-load", "catalogue", "out", "--target", "dp=3")
        self.assertEqual(self.sibling_files("out"), SIBLINGS)

    def test_a_resumed_run_keeps_what_it_has_of_them(self):
        flags = ("--target", "dp=3", "--threads=1")
        self.run_in("ucp-load", "ckpt", "wanted", *flags)
        writes = 0
        for kill in range(10, 200, 9):
            if self.ends_well("ucp-load", "ckpt", "out", *flags, SHARDWRIGHT_FAULT=f"write:{kill}:kill"):
                break
            writes = kill
            result = self.report_of("ucp-load", "ckpt", "out", *flags, "--resume")
            self.assertEqual(self.files("out"), self.files("wanted"))
            last = result["run"]["units_resumed"]
            shutil.rmtree(self.work / "out")
        self.assertGreater(writes, 10)
        # Only small units are made again: those with known bytes and those in flight.
        self.assertGreater(last, result["run"]["units"] // 2)

    def ends_well(self, *words, **environment):
        done = subprocess.run([str(self.bin / words[0]), *words[1:]], cwd=self.work, text=True,
                              capture_output=True, check=False, env={**os.environ, **environment})
        self.assertIn(done.returncode, (0, -signal.SIGKILL), done.stderr)
        return done.returncode == 0


if __name__ == "__main__":
    main("siblings_test.py BIN")
