"""What a worker may ask of the system, so that a stranger's exercise can be run: very little.

It needs no rights and no container: the process gives up what it could do before the learner's file is loaded, and cannot get
it back. What the system lacks is left out; `active` says what there is, in `gpukit doctor` and in every report.

Landlock    files: reads what Python, PyTorch, Triton and gpukit are made of, its own entry in /proc and its own folder. Not
            the exercises of others, solutions/ or gpukit/checks; a worker that compiles, or uses a GPU, writes into its folder,
            others nowhere. No TCP, no signals to others. That files exist, and how large they are, it does not hide.
seccomp     system calls: no sockets, no other processes (threads are allowed), no signals to others, no ptrace, mounts, keys,
            BPF, io_uring; where nothing may be written, no file is opened for writing, created, renamed or deleted.
rlimits     memory, CPU, open files, processes, the size of a file; no core dumps.

There is no package to lean on: those for Landlock know no seccomp, those for seccomp need libseccomp, and what is used here is
five system calls. `device` means what it means in gpukit.grading.server. What "cuda" needs was tried on an H100 and is no test here.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import resource
import site
import struct
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from gpukit import course

_PACKAGE = Path(__file__).resolve().parents[1]
# What the judge knows, and what the exercises ask for.
HIDDEN = (_PACKAGE / "checks", _PACKAGE / "kernels", _PACKAGE / "reference", _PACKAGE / "results")

MEMORY_SHARE, MEMORY_LEAST, MEMORY_MOST = 0.5, 2 << 30, 16 << 30  # of what is free; in bytes
FILES = 256
FILE_BYTES = 256 << 20
PROCESSES = 4096  # more than the user has: enough for a busy desktop, and no bomb


class Fence:
    """Made once, by the server; `enter` is called in each worker. `folder` is the one that the worker may use."""

    def __init__(self, device: str, folder: str):
        self.device = device
        self._rules = _opened(device, Path(folder)) if _landlock_abi() else []
        self._processes = _count_processes() + PROCESSES
        self._filter = b"".join(_filter(device)) if _has_seccomp() else b""

    def enter(self, cpu_s: int) -> None:
        """Give up everything that is not needed. Raises OSError if the system does not keep what it promised."""
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_CPU, cpu_s, cpu_s + 1)  # a signal that a file can catch, then one that it cannot
        _limit(resource.RLIMIT_FSIZE, FILE_BYTES if self.device in ("compile", "cuda") else 0)
        if sys.platform != "linux":
            return
        _limit(resource.RLIMIT_NPROC, self._processes)
        if self.device != "cuda":  # which maps far more address space than it uses
            _limit(resource.RLIMIT_AS, _memory_bytes())
        with open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
            file.write(b"1000")  # where memory ends all the same, the worker goes first
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        _drop_capabilities()
        if _landlock_abi():
            self._enter_landlock()
        _limit(resource.RLIMIT_NOFILE, FILES)
        if self._filter:
            code = self._filter.replace(_OWN_PID, struct.pack("<I", os.getpid()))
            buffer = ctypes.create_string_buffer(code, len(code))
            _prctl(_PR_SET_SECCOMP, 2, struct.pack("<HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer)))

    def _enter_landlock(self) -> None:
        abi = _landlock_abi()
        attributes = struct.pack("<QQQ", _handled(abi), 0b11 if abi >= 4 else 0, 0b11 if abi >= 6 else 0)
        attributes = attributes[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
        ruleset = _call(_LANDLOCK_CREATE, attributes, len(attributes), 0)
        own = os.open(f"/proc/{os.getpid()}", os.O_PATH)
        # CUDA names its threads, in /proc/self/task.
        of_own = _READ | (_WRITE_FILE | _TRUNCATE if self.device == "cuda" else 0)
        for descriptor, access in [*self._rules, (own, of_own)]:
            _call(_LANDLOCK_ADD, ruleset, 1, struct.pack("<Qi", access & _handled(abi), descriptor), 0)
        _call(_LANDLOCK_RESTRICT, ruleset, 0)
        for descriptor in (ruleset, own, *(descriptor for descriptor, _ in self._rules)):
            os.close(descriptor)


@functools.cache
def active() -> str:
    """What keeps a learner's code from the rest of this machine, in one line."""
    if sys.platform != "linux":
        return "limits on CPU and files only: the rest of the fence needs Linux; grade strangers' code in a container"
    abi = _landlock_abi()
    parts = ["limits on memory, CPU, files and processes"]
    parts += ["seccomp (no processes, sockets, writes)"] if _has_seccomp() else []
    network = ", TCP" if abi >= 4 else ""
    parts += [f"Landlock {abi} (files{network}{', signals' if abi >= 6 else ''})"] if abi else []
    lacking = [name for name, there in (("seccomp", _has_seccomp()), ("Landlock", abi)) if not there]
    return "; ".join(parts) + (f"; this kernel lacks {' and '.join(lacking)}" if lacking else "")


# -- memory, processes, capabilities -----------------------------------------------------------------------------------


def _limit(which: int, soft: int, hard: int | None = None) -> None:
    """Never above what holds already."""
    before = resource.getrlimit(which)[1]
    hard = soft if hard is None else hard
    if before != resource.RLIM_INFINITY:
        soft, hard = min(soft, before), min(hard, before)
    resource.setrlimit(which, (soft, hard))


def _memory_bytes() -> int:
    """Address space: what the process has, and a share of what is free in the machine or in its control group."""
    free = [int(MEMORY_MOST / MEMORY_SHARE)]
    free.append(int(_read("/proc/meminfo").partition(b"MemAvailable:")[2].split(None, 1)[0]) << 10)
    for most, now in _CGROUP_FILES:
        try:
            free.append(int(_read(most)) - int(_read(now)))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    pages = int(_read("/proc/self/statm").split(None, 1)[0])
    return pages * resource.getpagesize() + int(max(MEMORY_LEAST, MEMORY_SHARE * min(free)))


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 1 << 12)
    finally:
        os.close(descriptor)


def _cgroup_files() -> Iterator[tuple[str, str]]:
    """(limit, usage) of each memory group around this process, of either version."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            top, names = "/sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        elif not controllers:
            top, names = "/sys/fs/cgroup", ("memory.max", "memory.current")
        else:
            continue
        folders = [Path(top + path), *Path(top + path).parents] if path != "/" else [Path(top)]
        for folder in folders:
            if folder.is_relative_to(top) and (folder / names[0]).exists():
                yield str(folder / names[0]), str(folder / names[1])


_CGROUP_FILES = tuple(_cgroup_files()) if sys.platform == "linux" else ()


def _count_processes() -> int:
    """Of this user, threads too: what RLIMIT_NPROC counts."""
    count = 0
    for path in Path("/proc").glob("[0-9]*") if sys.platform == "linux" else ():
        try:
            count += len(os.listdir(path / "task")) if path.stat().st_uid == os.getuid() else 0
        except OSError:
            continue
    return count


def _drop_capabilities() -> None:
    """Root's rights, where a container has made the learner's process root's."""
    _call(_SYSTEM_CALLS["capset"], struct.pack("<Ii", 0x20080522, 0), bytes(24))


# -- Landlock: https://docs.kernel.org/userspace-api/landlock.html ------------------------------------------------------
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _IOCTL = 1, 2, 4, 8, 1 << 14, 1 << 15
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
_READ = _READ_FILE | _READ_DIR
_OWN = (1 << 15) - 1 & ~(1 << 6 | 1 << 11)  # anything but device files


@functools.cache
def _landlock_abi() -> int:
    """The version of Landlock that this kernel has, 0 without."""
    if sys.platform != "linux" or not _SYSTEM_CALLS:
        return 0
    return max(0, _libc().syscall(_LANDLOCK_CREATE, None, 0, 1))


def _handled(abi: int) -> int:
    """The accesses to files that Landlock of this version forbids unless a rule allows them."""
    return (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1


def _opened(device: str, folder: Path) -> list[tuple[int, int]]:
    """The files and folders that a worker may use, open, and what it may do with them."""
    opened = []
    for path, access in _allowed(device, folder):
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:  # not on this machine
            continue
        opened.append((descriptor, access if os.path.isdir(path) else access & _OF_A_FILE))
    return opened


def _allowed(device: str, folder: Path) -> Iterator[tuple[Path, int]]:
    run = _EXECUTE if device != "cpu" else 0  # ptxas; and a C compiler, which builds Triton's launchers
    prefixes = {Path(prefix) for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    libraries = {prefix / name for prefix in prefixes for name in ("lib", "lib64")}
    libraries |= {Path("/lib"), Path("/lib64"), Path("/usr/lib"), Path("/usr/lib64"), Path("/usr/local/lib")}
    libraries |= {Path(sysconfig.get_path("stdlib")), *map(Path, site.getsitepackages())}
    # Folders that .pth files add, but not a checkout of the course.
    courses = {entry for entry in sys.path for name in course.IMPLS if os.path.exists(os.path.join(entry, name))}
    libraries |= {Path(entry) for entry in sys.path if entry not in courses}
    if run:
        libraries |= {
            *map(Path, ("/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/libexec", "/usr/include")),
            *_programs(),
        }
    for path in {path.resolve() for path in libraries}:
        if len(path.parts) > 1:
            yield from _without_hidden(path, _READ | run)
    yield from _without_hidden(_PACKAGE, _READ)
    for name in (
        "/etc/ld.so.cache",
        "/etc/localtime",
        "/usr/share/zoneinfo",
        "/dev/zero",
        "/dev/urandom",
        "/dev/random",
    ):
        yield Path(name), _READ
    for name in ("cpuinfo", "meminfo", "stat", "sys/vm/overcommit_memory"):
        yield Path("/proc", name), _READ
    for name in ("cpu", "node"):
        yield Path("/sys/devices/system", name), _READ
    yield Path("/dev/null"), _READ | _WRITE_FILE
    yield folder, _READ | run | (_OWN if run else 0)
    if device == "cuda":
        for pattern in ("nvidia*", "nvidia-caps/*", "dri/*", "dxg"):
            yield from ((path, _OF_A_FILE) for path in Path("/dev").glob(pattern))
        for pattern in (
            "sys",
            "etc/nvidia*",
            "run/nvidia*",
            "proc/driver",
            "proc/devices",
            "proc/modules",
            "usr/share/nvidia*",
        ):
            yield from ((path, _READ) for path in Path("/").glob(pattern))


def _programs() -> Iterator[Path]:
    """Where a compiler may be, with what belongs to it, and the libraries that are named in the environment."""
    entries = [*os.environ.get("PATH", "").split(":"), *os.environ.get("LD_LIBRARY_PATH", "").split(":")]
    entries += [os.path.dirname(os.environ.get(name, "")) for name in ("CC", "CXX")]
    for entry in map(Path, entries):
        if entry.is_absolute() and entry.name in ("bin", "sbin", "lib", "lib64"):
            yield entry
            yield from (entry.parent / name for name in ("lib", "lib64", "libexec", "include"))
    yield from Path("/usr/local").glob("cuda*")


def _without_hidden(path: Path, access: int) -> Iterator[tuple[Path, int]]:
    """`path`, or where something hidden lies below it, what lies beside that. Names may be listed everywhere."""
    if path in HIDDEN:
        return
    if not any(path in hidden.parents for hidden in HIDDEN):
        yield path, access
        return
    yield path, _READ_DIR
    for each in path.iterdir():
        yield from _without_hidden(each, access)


# -- seccomp: https://docs.kernel.org/userspace-api/seccomp_filter.html -------------------------------------------------
# The numbers of system calls on x86-64 and on aarch64, "-" where there is no such call.
_NUMBERS = """
accept 43 202, accept4 288 242, acct 163 89, add_key 248 217, adjtimex 159 171, bind 49 200, bpf 321 280, capset 126 91,
chmod 90 -, chown 92 -, chroot 161 51, clock_adjtime 305 266, clock_settime 227 112, clone 56 220, clone3 435 435,
connect 42 203, creat 85 -, delete_module 176 106, execve 59 221, execveat 322 281, fanotify_init 300 262, fchmod 91 52,
fchmodat 268 53, fchmodat2 452 452, fchown 93 55, fchownat 260 54, fcntl 72 25, finit_module 313 273, fork 57 -,
fremovexattr 199 16, fsconfig 431 431, fsetxattr 190 7, fsmount 432 432, fsopen 430 430, fspick 433 433, ftruncate 77 46,
futimesat 261 -, init_module 175 105, inotify_init 253 -, inotify_init1 294 26, io_uring_enter 426 426,
io_uring_register 427 427, io_uring_setup 425 425, ioctl 16 29, ioperm 173 -, iopl 172 -, ioprio_set 251 30, kcmp 312 272,
kexec_file_load 320 294, kexec_load 246 104, keyctl 250 219, kill 62 129, lchown 94 -, link 86 -, linkat 265 37,
listen 50 201, lremovexattr 198 15, lsetxattr 189 6, memfd_create 319 279, memfd_secret 447 447, migrate_pages 256 238,
mkdir 83 -, mkdirat 258 34, mknod 133 -, mknodat 259 33, mount 165 40, mount_setattr 442 442, move_mount 429 429,
move_pages 279 239, mq_open 240 180, mq_unlink 241 181, msgctl 71 187, msgget 68 186, name_to_handle_at 303 264, open 2 -,
open_by_handle_at 304 265, open_tree 428 428, openat 257 56, openat2 437 437, perf_event_open 298 241, personality 135 92,
pidfd_getfd 438 438, pidfd_open 434 434, pidfd_send_signal 424 424, pivot_root 155 41, prctl 157 167, prlimit64 302 261,
process_madvise 440 440, process_vm_readv 310 270, process_vm_writev 311 271, ptrace 101 117, quotactl 179 60,
quotactl_fd 443 443, reboot 169 142, removexattr 197 14, rename 82 -, renameat 264 38, renameat2 316 276,
request_key 249 218, rmdir 84 -, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, sched_setaffinity 203 122,
sched_setattr 314 274, sched_setparam 142 118, sched_setscheduler 144 119, semctl 66 191, semget 64 190,
setdomainname 171 162, sethostname 170 161, setns 308 268, setpriority 141 140, settimeofday 164 170, setxattr 188 5,
shmat 30 196, shmctl 31 195, shmget 29 194, socket 41 198, socketpair 53 199, swapoff 168 225, swapon 167 224, symlink 88 -,
symlinkat 266 36, syslog 103 116, tgkill 234 131, tkill 200 130, truncate 76 45, umount2 166 39, unlink 87 -, unlinkat 263 35,
unshare 272 97, userfaultfd 323 282, utime 132 -, utimensat 280 88, utimes 235 -, vfork 58 -, vhangup 153 58
"""
_NEWEST = 463  # system calls from here on are not in the table: as if this kernel did not have them
_COLUMN = {"x86_64": 1, "aarch64": 2}.get(platform.machine(), 0)
_ARCHITECTURE = {1: 0xC000003E, 2: 0xC00000B7}.get(_COLUMN)
_X32 = 0x40000000  # a second way to name each call of x86-64


def _numbers() -> dict[str, int]:
    rows = [entry.split() for entry in _NUMBERS.replace("\n", " ").split(",")] if _COLUMN else []
    return {row[0]: int(row[_COLUMN]) for row in rows if row[_COLUMN] != "-"}


_SYSTEM_CALLS = _numbers()
_WRITING = """creat mkdir mkdirat mknod mknodat rename renameat renameat2 rmdir unlink unlinkat link linkat symlink symlinkat
truncate ftruncate chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes utimensat futimesat setxattr
lsetxattr fsetxattr removexattr lremovexattr fremovexattr openat2""".split()
_STARTING = "fork vfork execve execveat".split()
_CONDITIONAL = "clone prctl fcntl ioctl prlimit64 sched_setaffinity kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo open openat"
_SET_OWNER = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: a descriptor that sends signals to others
_IOCTLS = (0x5412, 0x541C, 0x8901, 0x8902)  # typing into a terminal; owners again
_OPEN_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CLONE_THREAD = 0x10000
_OWN_PID = b"\xfeown"
_AF_UNIX = 1

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000


@functools.cache
def _has_seccomp() -> bool:
    if sys.platform != "linux" or not _SYSTEM_CALLS:
        return False
    _libc().prctl(_PR_SET_SECCOMP, 2, None, 0, 0)  # no filter: a kernel that has them finds the address bad
    return ctypes.get_errno() == errno.EFAULT


def _filter(device: str) -> Iterator[bytes]:
    """The program of the filter: what is not refused is allowed. _OWN_PID stands for the worker's own number."""
    (pid,) = struct.unpack("<I", _OWN_PID)
    refused = set(_SYSTEM_CALLS) - set(_CONDITIONAL.split()) - {"capset"}
    starts = device != "cpu"  # ptxas, a C compiler
    if starts:
        refused -= {*_STARTING, *_WRITING}
    if device == "cuda":  # what the driver talks to its own daemons with
        refused -= {"socket", "socketpair", "connect", "bind", "listen", "memfd_create"}
    yield _step(_LOAD, 4)
    yield _step(_EQUAL, _ARCHITECTURE, 1, 0)
    yield _step(_RETURN, _ERROR | errno.ENOSYS)
    yield _step(_LOAD, 0)
    yield _step(_AT_LEAST, _NEWEST, 0, 1)  # x32 calls, too
    yield _step(_RETURN, _ERROR | errno.ENOSYS)
    for name in sorted(refused):
        known = errno.ENOSYS if name in ("clone3", "openat2") else errno.EPERM  # the C library has another way
        yield _step(_EQUAL, _SYSTEM_CALLS[name], 0, 1)
        yield _step(_RETURN, _ERROR | known)
    for name in ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"):
        yield from _where(name, 0, (pid,), _ALLOW, _ERROR | errno.EPERM)
    for name in ("prlimit64", "sched_setaffinity"):
        yield from _where(name, 0, (0, pid), _ALLOW, _ERROR | errno.EPERM)
    yield from _where("prctl", 0, (_PR_SET_PDEATHSIG,), _ERROR | errno.EPERM, _ALLOW)
    yield from _where("fcntl", 1, _SET_OWNER, _ERROR | errno.EPERM, _ALLOW)
    yield from _where("ioctl", 1, _IOCTLS, _ERROR | errno.EPERM, _ALLOW)
    if device == "cuda":
        yield from _where("socket", 0, (_AF_UNIX,), _ALLOW, _ERROR | errno.EPERM)
    if not starts:
        yield from _where("clone", 0, (_CLONE_THREAD,), _ALLOW, _ERROR | errno.EPERM, _ANY_BIT)
        yield from _where("open", 1, (_OPEN_TO_WRITE,), _ERROR | errno.EACCES, _ALLOW, _ANY_BIT)
        yield from _where("openat", 2, (_OPEN_TO_WRITE,), _ERROR | errno.EACCES, _ALLOW, _ANY_BIT)
    yield _step(_RETURN, _ALLOW)


def _where(name: str, argument: int, values: tuple, then: int, otherwise: int, test: int = _EQUAL) -> Iterator[bytes]:
    """The answer to system call `name`, which depends on the lower half of an argument: they are numbers of 32 bits."""
    if name not in _SYSTEM_CALLS:
        return
    yield _step(_EQUAL, _SYSTEM_CALLS[name], 0, 2 * len(values) + 2)
    yield _step(_LOAD, 16 + 8 * argument)
    for value in values:
        yield _step(test, value, 0, 1)
        yield _step(_RETURN, then)
    yield _step(_RETURN, otherwise)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


# -- calls -------------------------------------------------------------------------------------------------------------


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: int | bytes) -> int:
    """A system call. Raises OSError."""
    result = _libc().syscall(number, *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"system call {number}: {os.strerror(ctypes.get_errno())}")
    return result


def _prctl(option: int, value: int, data: bytes | None = None) -> None:
    if _libc().prctl(option, ctypes.c_ulong(value), data or ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)):
        raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")
