# SPDX-License-Identifier: Apache-2.0
"""Scenarios that the campaign cannot show call by call: real signals at any time, full disks, rivals,
and unnoticed changes of sources."""

import os
import random
import shutil
import signal
import subprocess
import time

import ptfile
from harness import (DEMO, Scratch, Broken, difference, expect, finish, run, start, succeed, tree,
                     with_siblings)


def grow(folder, factor):
    """Makes a large checkpoint of two ranks from the demo: its first parameter gets `factor` times
    as many rows. Values repeat; the bytes need not be a trained model's."""
    shutil.copytree(DEMO, folder)
    step = folder / (folder / "latest").read_text().strip()
    models = step / "mp_rank_00_model_states.pt"
    model = ptfile.load(models)
    for group in model["param_shapes"]:
        for name in list(group):
            if name != "embedding.weight":
                del group[name]
    while len(model["param_shapes"]) > 1:
        model["param_shapes"].pop()
    shapes = model["param_shapes"][0]
    rows, columns = shapes["embedding.weight"].args[0]
    shapes["embedding.weight"] = ptfile.size(rows * factor, columns)
    elements = rows * factor * columns
    for key in ("shared_params", "frozen_param_shapes", "frozen_param_fragments"):
        model[key].clear()
    model["buffer_names"].clear()
    halves = bytearray(random.Random(1).randbytes(2 * elements))
    halves[1::2] = halves[1::2].translate(bytes(byte & 0xbf for byte in range(256)))  # no infinities, no NaNs
    weight = ptfile.tensor("BFloat16Storage", bytes(halves), (rows * factor, columns), 2)
    model["module"].clear()
    model["module"]["embedding.weight"] = weight
    ptfile.save(models, model)
    each = elements // 2
    for rank in (0, 1):
        path = step / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        shard = ptfile.load(path)
        state = shard["optimizer_state_dict"]
        def flat(seed):
            return ptfile.tensor("FloatStorage", random.Random(seed).randbytes(4 * each), (each,), 4)
        for key in ("single_partition_of_fp32_groups", "group_paddings", "partition_count",
                    "param_alignment_paddings", "param_slice_mappings"):
            del state[key][1:]
        masters = bytearray(4 * each)  # that round to the weights
        masters[2::4] = halves[2 * each * rank:2 * each * (rank + 1):2]
        masters[3::4] = halves[2 * each * rank + 1:2 * each * (rank + 1):2]
        state["single_partition_of_fp32_groups"][0] = ptfile.tensor("FloatStorage", bytes(masters), (each,), 4)
        state["group_paddings"][0] = 0
        state["param_alignment_paddings"][0] = [0]
        base = state["base_optimizer_state"]
        del base["param_groups"][1:]
        del base["state"][1]
        base["state"][0].update(exp_avg=flat(rank + 2), exp_avg_sq=flat(rank + 4))
        slices = state["param_slice_mappings"][0]
        _, address = slices.popitem()
        slices.clear()
        address.state = {"numel": each, "start": 0}
        slices["embedding.weight"] = address
        ptfile.save(path, shard)
    return folder


class Scenarios:
    def __init__(self, programs, mpirun, log, thorough):
        self.load = programs / "ucp-load"
        self.extract = programs / "ucp-extract"
        self.mpirun = mpirun
        self.log = log
        self.thorough = thorough

    def go(self):
        with Scratch("crash-scenarios-") as folder:
            self.large(folder)
            small = [name for name in dir(self) if name.startswith("check_")]
            for name in small:
                place = folder / name
                place.mkdir(mode=0o755)
                getattr(self, name)(place)
                shutil.rmtree(place, ignore_errors=True)
                self.log(f"{name[6:].replace('_', ' ')}: held")

    def under_mpirun(self):
        with Scratch("crash-ranks-") as folder:
            command = [self.load, grow(folder / "large", 5400)]
            flags = ["--target", "zero=3,dp=3", "--threads", "2"]
            succeed([*command, folder / "wanted", *flags])
            self.stop_under_mpirun(folder, command, flags, tree(folder / "wanted"))

    # --- a large run: real signals ---------------------------------------------------------------

    def large(self, folder):
        # 18 * 47 * 14 bytes per factor: 256 MB, or 64 MB where the whole set has a minute.
        source = grow(folder / "large", 21000 if self.thorough else 5400)
        command = [self.load, source]
        flags = ["--target", "zero=3,dp=3", "--threads", "2"]
        began = time.monotonic()
        succeed([*command, folder / "wanted", *flags])
        seconds = time.monotonic() - began
        wanted = tree(folder / "wanted")
        shutil.rmtree(folder / "wanted")
        kills = self.kill_at_random(folder, command, flags, wanted, seconds)
        self.log(f"large run: {kills} kills at random times, all completed to identical bytes")
        self.stop_by_signals(folder, command, flags, wanted)
        self.rivals(folder, command, flags, wanted)
        self.source_vanishes(folder, source, flags, wanted)

    def same(self, output, wanted, what):
        expect(output.is_dir(), f"{what}: no output")
        found = tree(output)
        expect(found == wanted, f"{what}: differs in {difference(wanted, found)}")
        left = [name for name in os.listdir(output.parent)
                if name.startswith(output.name) and name != output.name]
        expect(not left, f"{what}: left behind: {left}")

    def kill_at_random(self, folder, command, flags, wanted, seconds):
        choose = random.Random(20)
        kills = 0
        for turn in range(30 if self.thorough else 2):
            output = folder / f"random-{turn}"
            for _ in range(50):
                process = start([*command, output, *flags, "--resume"])
                try:
                    process.communicate(timeout=choose.uniform(0, 0.8 * seconds))
                    break
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.communicate()
                    kills += 1
                    expect(not output.exists() or tree(output) == wanted,
                           f"killed run {turn}: a partial output has its final name")
            done = run([*command, output, *flags, "--resume"])
            expect(done.code == 0, f"resume after kills: {done}")
            self.same(output, wanted, f"kill at random {turn}")
            shutil.rmtree(output)
        return kills

    def held_in_the_middle(self, argv, output):
        """Starts a run and freezes it while its output is being written.
        \\returns the process, or None when it was too fast"""
        process = start([*argv, output])
        ends = time.monotonic() + 600
        while time.monotonic() < ends and process.poll() is None:
            for name in os.listdir(output.parent):
                if name.startswith(output.name + ".partial-"):
                    process.send_signal(signal.SIGSTOP)
                    # It continues until all of its threads have noticed.
                    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
                    if not output.exists():
                        return process
                    process.send_signal(signal.SIGCONT)
        finish(process)
        return None

    def try_until_held(self, argv, output):
        for _ in range(20):
            process = self.held_in_the_middle(argv, output)
            if process is not None:
                return process
            shutil.rmtree(output, ignore_errors=True)
        raise Broken(f"{argv}: never caught in the middle")

    def ended_by(self, argv, output, wanted, *numbers):
        """A run that got these signals in its middle. If only its commit was left, they came too late."""
        for _ in range(20):
            process = self.try_until_held(argv, output)
            for number in (*numbers, signal.SIGCONT):
                process.send_signal(number)
            done = finish(process)
            if done.code != 0:
                return done
            self.same(output, wanted, f"done in spite of {numbers}")
            shutil.rmtree(output)
        raise Broken(f"{argv}: always done in spite of {numbers}")

    def stop_by_signals(self, folder, command, flags, wanted):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            output = folder / f"stop-{number.name}"
            done = self.ended_by([*command, *flags], output, wanted, number)
            expect(done.code == 75, f"{number.name}: 75 expected: {done}")
            expect(not output.exists(), f"{number.name}: stopped, but the output is there")
            done = succeed([*command, output, *flags, "--resume"])
            self.same(output, wanted, f"resumed after {number.name}")
            shutil.rmtree(output)
        # Two different signals: two of one kind that wait for a frozen process are one.
        output = folder / "twice"
        done = self.ended_by([*command, *flags], output, wanted, signal.SIGINT, signal.SIGTERM)
        expect(done.code in (128 + signal.SIGINT, 128 + signal.SIGTERM), f"two signals: {done}")
        succeed([*command, output, *flags, "--resume"])
        self.same(output, wanted, "resumed after two signals")
        shutil.rmtree(output)
        for first in (5, 9, 40):
            # A SIGTERM at every call from this one on: the stop makes one more at least.
            done = run([*command, output, *flags], fault=f"any:{first}+:term")
            expect(done.code == 143, f"a second SIGTERM: {done}")
            expect(not output.exists(), f"a second SIGTERM left an output: {done}")
        succeed([*command, output, *flags, "--resume"])
        self.same(output, wanted, "resumed after two SIGTERM")
        shutil.rmtree(output)
        self.log("signals: TERM, INT, USR1 stop with 75 and resume; a second ends at once")

    def rivals(self, folder, command, flags, wanted):
        output = folder / "rivals"
        process = self.try_until_held([*command, *flags], output)
        for more in ((), ("--force",), ("--resume",)):
            done = run([*command, output, *flags, *more])
            expect(done.code == 6, f"a second run {more}: exit code 6 expected: {done}")
            expect("in use by process" in done.stderr, f"the owner is not named: {done}")
        process.send_signal(signal.SIGCONT)
        done = finish(process)
        expect(done.code == 0, f"the first of two runs: {done}")
        self.same(output, wanted, "the first of two runs")
        shutil.rmtree(output)
        self.log("two runs at once: the second is refused, the first is not harmed")

    def source_vanishes(self, folder, source, flags, wanted):
        """Files go away, shrink or change while the run stands still."""
        for name, harm in (("removed", os.remove),
                           ("shrunk", lambda path: os.truncate(path, path.stat().st_size // 2)),
                           ("touched", lambda path: os.utime(path, (1, 1)))):
            copy = folder / "copy"
            shutil.copytree(source, copy)
            victim = sorted(copy.glob("*/*optim*"))[1]
            output = folder / f"source-{name}"
            process = self.try_until_held([self.load, copy, *flags], output)
            harm(victim)
            process.send_signal(signal.SIGCONT)
            done = finish(process)
            # A file that was open when it went away can still be read to its end.
            if done.code == 0:
                self.same(output, wanted_but_fingerprint(wanted, output), f"source {name}")
            else:
                expect(done.code in (3, 4), f"source {name}: {done}")
                expect(victim.name in done.stderr, f"source {name}: file not named: {done}")
                expect(not output.exists(), f"source {name}: an output is left")
            shutil.rmtree(copy)
            shutil.rmtree(output, ignore_errors=True)
        self.log("sources removed, shrunk and touched in the middle of a run: named")

    def stop_under_mpirun(self, folder, command, flags, wanted):
        launcher = [self.mpirun, "--oversubscribe", "-n", "2"]
        output = folder / "ranks"
        stopped = 0
        for _ in range(20):
            process = start([*launcher, *command, output, *flags])
            while process.poll() is None and not any(
                    name.startswith("ranks.partial-") for name in os.listdir(folder)):
                time.sleep(0.001)
            process.send_signal(signal.SIGUSR1)  # the launcher passes it on to the ranks
            done = finish(process)
            if done.code == 0:
                shutil.rmtree(output)
                continue
            expect(not output.exists(), f"stopped ranks left an output: {done}")
            expect("stopped on request" in done.stderr, f"ranks stopped by USR1: {done}")
            stopped += 1
            break
        expect(stopped == 1, "no run under mpirun was caught in the middle")
        # Fewer and more ranks than the stopped run had.
        succeed([*command, output, *flags, "--resume"])
        self.same(output, wanted, "ranks, resumed by one")
        shutil.rmtree(output)
        process = start([*launcher, *command, output, *flags])
        while process.poll() is None and not any(
                name.startswith("ranks.partial-") for name in os.listdir(folder)):
            time.sleep(0.001)
        kill_ranks(process, command[0])
        finish(process)
        done = succeed([self.mpirun, "--oversubscribe", "-n", "3", *command, output, *flags,
                        "--resume"])
        self.same(output, wanted, "ranks killed, resumed by three")
        shutil.rmtree(output)
        self.log("under mpirun: stopped and killed ranks, resumed with other rank counts")

    # --- small runs ------------------------------------------------------------------------------

    def check_output_that_exists(self, place):
        argv = [self.load, DEMO]
        flags = ["--target", "dp=3"]
        (place / "folder").mkdir()
        (place / "folder" / "precious").write_text("mine")
        (place / "file").write_text("mine")
        (place / "link").symlink_to("folder")
        before = tree(place)
        for name, more in (("folder", ()), ("folder", ("--resume",)), ("file", ()),
                           ("file", ("--force",)), ("link", ()), ("link", ("--force",))):
            done = run([*argv, place / name, *flags, *more])
            expect(done.code == 6, f"existing {name} {more}: {done}")
            expect(name in done.stderr, f"existing {name} not named: {done}")
            expect(tree(place) == before, f"existing {name} {more} was changed: {done}")

    def check_folder_that_cannot_be_written(self, place):
        locked = place / "locked"
        locked.mkdir()
        argv = [self.load, DEMO, locked / "out", "--target", "dp=3"]
        options = {}
        if os.geteuid() == 0:
            # Root may write everywhere: run as user 65534, with a copy of the program that this user may run.
            for path in (place, place.parent):
                path.chmod(0o755)
            argv[0] = shutil.copy(self.load, place / "ucp-load")
            argv[1] = shutil.copytree(DEMO, place / "demo")
            options = {"user": 65534, "group": 65534, "extra_groups": []}
        locked.chmod(0o555)
        done = run(argv, **options)
        expect(done.code == 7, f"read-only folder: {done}")
        expect("out" in done.stderr and "ermission denied" in done.stderr, f"not named: {done}")
        expect(os.listdir(locked) == [], "something was made in a read-only folder")
        done = run([self.load, DEMO, place / "none" / "out", "--target", "dp=3"])
        expect(done.code == 3, f"missing parent: {done}")

    def check_full_disk(self, place):
        """A small file system of its own: too few bytes, then too few names, then enough."""
        disk = place / "disk"
        disk.mkdir()
        mounted = os.geteuid() == 0 and subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=80k,nr_inodes=64", "none", disk],
            capture_output=True, check=False).returncode == 0
        argv = [self.load, DEMO, disk / "out", "--target", "zero=3,dp=3"]
        if not mounted:
            done = run(argv, fault="any:20+:enospc")
            expect(done.code == 7, f"no space, injected: {done}")
            succeed([*argv, "--resume"])
            return
        try:
            done = run(argv)
            expect(done.code == 7 and "needed" in done.stderr, f"too few bytes: {done}")
            expect(not (disk / "out").exists(), "an output on a full disk")
            for inodes in range(5, 15):
                subprocess.run(["mount", "-o", f"remount,size=10m,nr_inodes={inodes}", disk],
                               capture_output=True, check=False)
                done = run([*argv, "--resume"])
                expect(done.code in (7, 0), f"too few names: {done}")
                if done.code == 0:
                    break
                expect("no space left" in done.stderr.lower() or "inodes needed" in done.stderr, f"the reason is not told: {done}")
            subprocess.run(["mount", "-o", "remount,size=10m,nr_inodes=64", disk], check=True)
            done = run([*argv, "--resume"])
            expect(done.code == 0, f"resume after space was made: {done}")
            expect(os.listdir(disk) == ["out"], f"left on the disk: {os.listdir(disk)}")
            succeed([self.load, "--check", DEMO, disk / "out"])
        finally:
            subprocess.run(["umount", disk], check=False)

    def check_source_that_changed_before_resuming(self, place):
        source = shutil.copytree(DEMO, place / "source")
        flags = ["--target", "zero=3,dp=3", "--threads", "1"]
        succeed([self.load, source, place / "wanted", *flags])
        output = place / "out"
        done = run([self.load, source, output, *flags], fault="write:20:term")
        expect(done.code == 75, f"stopped: {done}")
        before = [tree(path) for path in place.glob("out.partial-*")]
        victim = sorted(source.glob("*/*optim*"))[0]
        kept = victim.stat()
        os.utime(victim, ns=(kept.st_atime_ns, kept.st_mtime_ns + 1))
        done = run([self.load, source, output, *flags, "--resume"])
        expect(done.code == 6 and "it differs in the files of INPUT" in done.stderr and "--no-resume" in done.stderr,
               f"changed source: {done}")
        os.utime(victim, ns=(kept.st_atime_ns, kept.st_mtime_ns))
        done = run([self.load, source, output, "--target", "zero=3,dp=4", "--resume"])
        expect(done.code == 6 and "dp=3" in done.stderr and "dp=4" in done.stderr, f"other target: {done}")
        after = [tree(path) for path in place.glob("out.partial-*")]
        expect(len(before) == 1 and before == after, "a refused resume changed the stopped run")
        done = succeed([self.load, source, output, *flags, "--resume", "--json"])
        expect('"units_resumed": 0' not in done.stdout, f"nothing was taken over: {done.stdout}")
        expect(tree(output) == tree(place / "wanted"), "resumed output differs")

    def check_resuming_with_more_checks(self, place):
        """Units that a run without checksums wrote are not believed by one that compares them."""
        flags = ["--target", "zero=3,dp=3", "--threads", "1"]
        succeed([self.load, DEMO, place / "wanted", *flags])
        for first, second in (("none", "checksums"), ("checksums", "none"), ("none", "readback")):
            output = place / f"{first}-{second}"
            done = run([self.load, DEMO, output, *flags, f"--verify={first}"],
                       fault="write:20:kill")
            expect(done.code == 137, f"killed: {done}")
            succeed([self.load, DEMO, output, *flags, f"--verify={second}", "--resume"])
            expect(tree(output) == tree(place / "wanted"), f"{first} then {second} differs")

    def check_damage_to_what_a_stopped_run_left(self, place):
        """Power failures: any byte of the stage or the journal may be lost or old."""
        flags = ["--target", "zero=3,dp=3", "--threads", "1"]
        succeed([self.load, DEMO, place / "wanted", *flags])
        wanted = tree(place / "wanted")
        choose = random.Random(3)
        for turn in range(60 if self.thorough else 15):
            output = place / f"out-{turn}"
            run([self.load, DEMO, output, *flags], fault=f"write:{choose.randrange(5, 60)}:kill")
            stages = list(place.glob(f"out-{turn}.partial-*"))
            expect(len(stages) == 1, "no stage of the killed run")
            files = sorted(path for path in stages[0].rglob("*") if path.is_file())
            victim = choose.choice(files)
            data = bytearray(victim.read_bytes())
            at = choose.randrange(max(1, len(data)))
            if turn % 3 == 0:
                data[at:] = bytes(len(data) - at)
            elif turn % 3 == 1:
                del data[at:]
            elif data:
                data[at] ^= 1 << choose.randrange(8)
            victim.write_bytes(data)
            done = run([self.load, DEMO, output, *flags, "--resume"])
            if done.code == 0:
                expect(tree(output) == wanted, f"damage to {victim} came through")
            else:
                expect(done.code == 6 and victim.name in done.stderr, f"damage to {victim}: {done}")
                expect(not output.exists(), f"refused, but the output is there: {done}")
                succeed([self.load, DEMO, output, *flags, "--no-resume"])
                expect(tree(output) == wanted, "a fresh run after damage differs")
            shutil.rmtree(output)

    def check_equal_layouts_come_out_as_they_are(self, place):
        source = with_siblings(place / "source")
        sound = tree(source)
        del sound["runs"]
        for flags in ((), ("--verify=readback",), ("--link",)):
            succeed([self.load, source, place / "out", *flags])
            found = tree(place / "out")
            found.pop("shardwright.json")
            expect(found == sound, f"equal layouts {flags}: {difference(sound, found)}")
            succeed([self.load, "--check", source, place / "out"])
            shutil.rmtree(place / "out")

    def check_saving_over_an_output_leaves_its_source_whole(self, place):
        source = with_siblings(place / "source")
        sound = tree(source)
        for flags in ((), ("--target", "dp=3"), ("--verify=readback",)):
            succeed([self.load, source, place / "out", *flags])
            for path in (place / "out").rglob("*"):
                if path.is_file():
                    path.write_bytes(b"cut and written again, as torch.save does")
            expect(tree(source) == sound, f"saving over an output changed its source: {flags}")
            shutil.rmtree(place / "out")

    def check_catalogue_of_a_source_that_changed(self, place):
        source = shutil.copytree(DEMO, place / "source")
        succeed([self.extract, source, place / "catalogue"])
        succeed([self.extract, source, place / "packed", "--pack=copy"])
        victim = sorted(source.glob("*/*optim*"))[0]
        data = victim.read_bytes()
        for name, harm in (("removed", lambda: os.remove(victim)),
                           ("truncated", lambda: victim.write_bytes(data[:999])),
                           ("rewritten", lambda: victim.write_bytes(data))):
            harm()
            output = place / "out"
            done = run([self.load, place / "catalogue", output, "--target", "dp=3"])
            expect(done.code == 3 and victim.name in done.stderr, f"source {name}: {done}")
            expect(not output.exists(), f"source {name}: an output is left")
        shutil.rmtree(source)
        succeed([self.load, place / "packed", place / "out", "--target", "dp=3"])
        succeed([self.load, "--check", DEMO, place / "out"])


def wanted_but_fingerprint(wanted, output):
    """Only the manifest records the source's time stamps; all other files must be the same."""
    return {**wanted, "shardwright.json": tree(output)["shardwright.json"]}


def kill_ranks(launcher, program):
    """SIGKILL to every process that `launcher` started from `program`."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8") as file:
                parent = int(file.read().rsplit(")", 1)[1].split()[1])
            if parent == launcher.pid and os.readlink(f"/proc/{name}/exe") == str(program):
                os.kill(int(name), signal.SIGKILL)
        except (OSError, ValueError):
            continue
