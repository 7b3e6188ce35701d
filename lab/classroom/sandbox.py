"""A sandbox for what students have written: Linux namespaces, without a program to install.

The processes of a check share one. It has no network but a loopback of its own, which gloo needs,
and no process but theirs. They see Python, the system's libraries, the student's folder, and what a
run needs of the course: no exhibit, no home, and of the chapters the two that lab/ reads formulas
from. Where one of these is checked, the student's stands in its place. All is read-only, but for
folders in memory that end with the check. A process has MEMORY, and all together are TASKS at most.
Each has the rights of a user alone; a root of the machine becomes one whom nobody else is.

What it does not do: all processes together may take TASKS times MEMORY. Only cgroups bound that, as
in a container (container/README.md). And a fault of the kernel is one in here, too.
"""

import contextlib
import ctypes
import fcntl
import itertools
import multiprocessing
import os
import resource
import signal
import socket
import struct
import sys
import sysconfig
import tempfile
from pathlib import Path

from lab import ROOT

# Not torch, nor what imports it: see lab/classroom/checks.py.

MEMORY = 2**32          # bytes that a process may take, besides those of the warm interpreter
LARGEST_FILE = 2**28    # bytes; of a folder in memory, too
TASKS = 256             # processes and threads of a check
MOST = 200              # modules of a student's folder that are there, too
LARGEST = 10**6         # bytes of one
SYSTEM = "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache"
DEVICES = "null", "zero", "full", "random", "urandom"
COURSE = ("common.py", "10_*.py", "11_*.py", "kernels/*.py", "lab/__init__.py", "lab/schedules.py",
          "lab/bench", "lab/cli", "lab/checkpoints", "lab/planner",
          "lab/classroom/*.py", "lab/chapters/__init__.py", "lab/chapters/*/about.py")
NOBODY = 2**30          # and upwards: users whom no system has

REQUIRED = False        # of all that this process lets play: lab.grade --sandbox sets it

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_FILES, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NETWORK = 2**17, 2**27, 2**28, 2**29, 2**30
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC, BIND, ALL_BELOW, PRIVATE = 1, 2, 4, 8, 2**12, 2**14, 2**18
MOUNT_SETATTR, RECURSIVE, DETACH = 442, 0x8000, 2
SET_DEATH_SIGNAL, SET_DUMPABLE, SET_NO_NEW_PRIVILEGES = 1, 4, 38
SET_FLAGS, UP = 0x8914, 1               # of a network's interface
CAPABILITIES = 0x20080522               # the version of capset's arguments


def call(name, *args):
    """A function of the C library. Raises OSError."""
    args = [os.fsencode(arg) if isinstance(arg, str | Path) else arg for arg in args]
    if getattr(LIBC, name)(*args) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


# ---------------------------------------------------------------------------------- from without

def inside(play, folder, more_paths):
    """What play() gives, in a process in a sandbox of its own. What that forks, and then calls
    `enter`, is confined. folder: where its files are, and where it may write."""
    ours, its = multiprocessing.Pipe()
    pid = os.fork()
    if pid == 0:
        try:
            call("prctl", SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
            ours.close()
            its.send(tried(play, folder, more_paths))
        finally:
            os._exit(0)
    its.close()
    try:
        value, error = ours.recv()
    except EOFError:                                    # nobody waits for it any more
        raise SystemExit from None
    finally:
        ours.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if error:
        raise error
    return value


def tried(play, folder, more_paths):
    """Its value, and the OSError that there was instead."""
    try:
        separate()
        build(Path(folder), more_paths)
        begin_first_process()
        return play(), None
    except OSError as error:
        return None, error


def why_not():
    """Why there can be no sandbox here, in a few words; None: it has been tried."""
    if sys.platform != "linux":
        return "this system has no namespaces"
    with tempfile.TemporaryDirectory() as folder:
        try:
            return inside(try_to_enter, folder, []) and "a process in it does not begin" or None
        except OSError as error:
            return f"this system does not allow it ({error.strerror})"


def try_to_enter():
    """The exit status of a process that has entered."""
    pid = os.fork()
    if pid == 0:
        try:
            enter()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


# ------------------------------------------------------------------------------------- to build it

def separate():
    """Namespaces for this process and for those that it forks. Who is no root of the machine is one
    in here, of nothing else."""
    user, group = os.geteuid(), os.getegid()
    call("unshare", NEW_FILES | NEW_IPC | NEW_PIDS | NEW_NETWORK | (NEW_USER if user else 0))
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sH14x", b"lo", UP))


def begin_first_process():
    """The first one of a namespace of processes: with it, all others end."""
    if os.fork() == 0:
        call("prctl", SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)   # whoever has lost his parent is its child
        while True:
            signal.pause()


def build(folder, more_paths):
    """All that there is for a student's process, in place of the machine's files."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    call("mount", None, "/", None, ALL_BELOW | PRIVATE, None)
    in_memory(folder)
    under = lambda path: Path(f"{folder}{path}")
    writable = [under(path) for path in ("/tmp", "/dev/shm", folder)]
    for path in writable:
        path.mkdir(parents=True, exist_ok=True)         # the last may lie in the first
        in_memory(path)
    course = {path for pattern in COURSE for path in ROOT.glob(pattern)}
    theirs = set(map(Path, more_paths))
    for path in sorted({*map(Path, SYSTEM), ROOT, *python(), *theirs, *course}):
        if path == ROOT or path in theirs:
            under(path).mkdir(parents=True, exist_ok=True)
            in_memory(under(path))                      # also where it lies in one of the others
            for module in modules_in(path) if path in theirs else ():
                copy(module, under(module))
        elif path.is_symlink() and str(path) in SYSTEM:
            under(path).symlink_to(os.readlink(path))
        elif path.name in files and path.parent in (ROOT, ROOT / "kernels"):
            under(path).parent.mkdir(exist_ok=True)
            under(path).write_bytes(files[path.name])   # the student's, in place of the solution
        elif path.exists():
            bind(path, under(path))
    bind(Path("/proc"), under("/proc"))
    for name in DEVICES:
        bind(Path("/dev", name), under(f"/dev/{name}"))
    under("/dev/fd").symlink_to("/proc/self/fd")
    set_attributes(folder, RECURSIVE, READ_ONLY | NO_SUID)
    for path in writable:
        set_attributes(path, 0, NO_SUID, READ_ONLY)
    for name, data in files.items():
        (under(folder) / name).write_bytes(data)
    os.chdir(folder)
    call("pivot_root", ".", ".")
    call("umount2", ".", DETACH)
    os.chdir("/")


def python():
    """The folders of the interpreter that runs this."""
    names = "stdlib", "platstdlib", "purelib", "platlib"
    found = {sys.prefix, sys.base_prefix, *map(sysconfig.get_path, names)}
    found |= {name for name in sys.path if Path(name).name in ("site-packages", "dist-packages")}
    return {path for name in found for path in (Path(name), Path(name).resolve())}


def modules_in(folder):
    """What a student's file may import from its folder: so many of its modules."""
    found = (Path(where, name) for where, _, names in os.walk(folder) for name in names
             if name.endswith(".py"))
    return itertools.islice(found, MOST)


def copy(path, place):
    """A file of a student, which a user of the sandbox may not read, or may be none at all."""
    with contextlib.suppress(OSError):
        if path.is_file() and path.stat().st_size < LARGEST:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())


def bind(path, place):
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.exists():
        place.mkdir() if path.is_dir() else place.touch()
    call("mount", path, place, None, BIND | ALL_BELOW, None)


def in_memory(place):
    call("mount", "tmpfs", place, "tmpfs", NO_SUID | NO_DEVICES,
         f"size={LARGEST_FILE},nr_inodes=4096,mode=777")


def set_attributes(place, flags, to_set, to_clear=0):
    """Of what is mounted there, and with RECURSIVE below."""
    attributes = struct.pack("4Q", to_set, to_clear, 0, 0)
    call("syscall", MOUNT_SETATTR, -100, place, flags, attributes, len(attributes))


# ------------------------------------------------------------------------- in a student's process

def enter():
    """First of all in a process: it sees those of the sandbox alone, has limits and no rights."""
    call("unshare", NEW_FILES)
    call("mount", "proc", "/proc", "proc", READ_ONLY | NO_SUID | NO_DEVICES | NO_EXEC, None)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    for what, most in {"AS": pages * resource.getpagesize() + MEMORY, "NPROC": TASKS,
                       "FSIZE": LARGEST_FILE, "CORE": 0}.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{what}"), (most, most))
    if os.geteuid() == 0:
        user = NOBODY + os.stat("/proc/self/ns/net").st_ino % NOBODY     # of this sandbox alone
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    nothing = (ctypes.c_uint32 * 6)()
    call("capset", (ctypes.c_uint32 * 2)(CAPABILITIES, 0), nothing)
    call("prctl", SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    call("prctl", SET_DUMPABLE, 1, 0, 0, 0)             # what it may read of itself in /proc
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "HOME": "/tmp", "USER": "nobody"}
