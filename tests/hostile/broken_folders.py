# SPDX-License-Identifier: Apache-2.0
"""Folders of checkpoints: missing, replaced, linked and foreign files, and pointer files that name no tag folder."""

import json
import os
import shutil

import bench as at
from harness import expect, run


def folder_jobs(bench):
    def latest(what, data, codes=(3, 4, 8)):
        source = bench.demo()
        # The target of a path in `latest`: a sound checkpoint.
        shutil.copytree(at.tag_folder(source), source.parent / "elsewhere")
        (source / "latest").write_bytes(data)
        bench.refused(source, f"latest: {what}", ["latest"], codes, group="latest files, refused")

    def folder(what, harm, words, codes=(3, 4), group="folders, refused"):
        source = bench.demo()
        harm(source)
        bench.refused(source, what, words, codes, group=group)

    def replaced(path_of, make):
        def harm(source):
            path = path_of(source)
            path.unlink()
            make(path)
        return harm

    jobs = [lambda w=what, d=data: latest(w, d) for what, data in (
        ("empty", b""), ("blanks", b" \n\n"), ("..", b".."), (".", b"."),
        ("parent", b"../elsewhere"), ("slash", b"global_step5/../../elsewhere"),
        ("absolute", b"/etc"), ("NUL", b"global_step5\0x"), ("two lines", b"global_step5\nx"),
        ("not there", b"global_step6"), ("not UTF-8", b"\xff\xfe"), ("long", b"x" * 5000),
        ("endless", b"x" * (9 << 20)))]
    name = at.optim(at.DEMO).name
    for what, make, codes in (
            ("directory", lambda path: path.mkdir(), (3, 4)),
            ("pipe", os.mkfifo, (3, 4)),
            ("dangling link", lambda path: path.symlink_to("nowhere"), (3, 4)),
            ("link to itself", lambda path: path.symlink_to(path.name), (3, 4)),
            ("link to a device", lambda path: path.symlink_to("/dev/zero"), (3, 4))):
        jobs.append(lambda w=what, m=make, c=codes:
                    folder(f"{w} for a file", replaced(at.optim, m), [name], c))
    jobs.append(lambda: folder("directory for latest", lambda s: ((s / "latest").unlink(),
                                                                  (s / "latest").mkdir()),
                               ["latest"]))
    jobs.append(lambda: folder("empty tag folder", lambda s: (
        shutil.rmtree(at.tag_folder(s)), at.tag_folder(s).mkdir()), ["global_step5"]))
    jobs.append(lambda: folder("no such folder", shutil.rmtree, ["ckpt"]))
    jobs.append(lambda: folder("a file for the folder", lambda s: (shutil.rmtree(s),
                                                                   s.write_text("x")), ["ckpt"]))
    jobs.append(lambda: folder("two versions of a rank", lambda s: shutil.copy(
        at.optim(s), at.tag_folder(s) / "zero_pp_rank_0_mp_rank_00_optim_states.pt"), [".pt"]))
    jobs.append(lambda: folder("a rank too many", lambda s: shutil.copy(
        at.optim(s), at.optim(s, 7)), ["8 ZeRO ranks", "by 2"]))
    jobs.append(lambda: many_digits(bench))
    jobs.append(lambda: folder("files of two saves", lambda s: shutil.copy(
        at.optim(s), at.optim(s, 1)), [".pt"], (4,)))
    jobs.append(lambda: unreadable(bench, at.optim))
    jobs.append(lambda: unreadable(bench, beside))
    jobs.append(lambda: linked(bench))
    for what, make in (("pipe", os.mkfifo), ("folder", lambda path: path.mkdir()),
                       ("dangling link", lambda path: path.symlink_to("nowhere")),
                       ("link to itself", lambda path: path.symlink_to(path.name)),
                       ("link to a device", lambda path: path.symlink_to("/dev/zero")),
                       ("link to a secret", lambda path: path.symlink_to("/etc/passwd"))):
        jobs.append(lambda w=what, m=make: not_carried(bench, w, m))
    return jobs


def many_digits(bench):
    """A number that does not fit belongs to no rank: the file is not read, and a message reports it."""
    source = bench.demo()
    name = at.optim(source).name.replace("rank_0", "rank_" + "9" * 30, 1)
    shutil.copy(at.optim(source), at.tag_folder(source) / name)
    done, output = bench.convert(source, "rank of many digits")
    expect(done.code == 0 and bench.same(output), f"rank of many digits: {done}")
    expect(f"ignored: {name}" in done.stderr, f"rank of many digits: no warning: {done}")
    bench.count("folders, files ignored")


def beside(source):
    """A sibling file of the tag folder, made if it is missing."""
    path = source / "trainer_state.json"
    if not path.exists():
        path.write_text("{}")
    return path


def not_carried(bench, what, make):
    """Foreign files next to the tag folder are not read, and a message reports them."""
    source = bench.demo()
    make(source / "neighbour")
    report = source.parent / "report"
    done, output = bench.convert(source, f"neighbour: {what}", [*at.TARGET, f"--json={report}"])
    expect(done.code == 0 and bench.same(output), f"neighbour: {what}: {done}")
    left_out = json.loads(report.read_text())["result"]["siblings"]["left_out"]
    expect([one["name"] for one in left_out] == ["neighbour"], f"neighbour: {what}: not named: {left_out}")
    bench.count("folders, sibling files left out")


def unreadable(bench, path_of):
    """As an unprivileged user, for root may read everything."""
    source = bench.demo()
    path_of(source).chmod(0)
    options = {}
    program = bench.load
    if os.geteuid() == 0:
        options = {"user": 65534, "group": 65534, "extra_groups": []}
        # Copied by another process: a child that is forked here meanwhile would hold the file open for
        # writing, and a file in writing cannot be run.
        program = source.parent / "ucp-load"
        run(["cp", bench.load, program])
        bench.folder.chmod(0o755)
        source.parent.chmod(0o777)
    done = run([program, source, source.parent / "out", *at.TARGET], **options)
    expect(done.code == 3 and path_of(source).name in done.stderr, f"unreadable: {done}")
    expect("ermission denied" in done.stderr, f"unreadable: {done}")
    expect(not (source.parent / "out").exists(), "unreadable: an output is left")
    bench.count("folders, refused")


def linked(bench):
    """A file may be a link: people keep checkpoints that way."""
    source = bench.demo()
    path = at.optim(source)
    shutil.move(path, source.parent / "elsewhere.pt")
    path.symlink_to(source.parent / "elsewhere.pt")
    done, output = bench.convert(source, "link to a file")
    expect(done.code == 0 and bench.same(output), f"link to a file: {done}")
    bench.count("folders, links followed")
