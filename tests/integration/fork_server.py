"""The server of forked_start.py: `python -m tests.integration.fork_server DESCRIPTOR KIND`, where
the descriptor is a socket on which it takes requests and KIND says what it imports. Linux on
x86-64.

It has one thread, so that its forks find every lock free. Forks leave its loop with the request
that they are for, become the process that the request describes, and run its program.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import io
import json
import os
import pkgutil
import platform
import re
import runpy
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NoReturn, TextIO

from tests.integration.forked_start import COMPUTING, PLAIN, PROBES, ForkServer, install

# What the commands that compute and their ranks import sooner or later.
_COMPUTING = [
    "drillyard.cli.main",
    "drillyard.cli.train",
    "drillyard.cli.generate",
    "drillyard.cli.saved_model",
    "drillyard.models.adapters",
    "drillyard.measurement.read_logs",
    "drillyard.supervise.supervisor",
    "drillyard.training.run",
    "drillyard.training.saved_evaluation",
    "drillyard.training.saved_generation",
    "drillyard.training.saved_model",
    "transformers.modeling_layers",
    "transformers.models.encoder_decoder",
    "transformers.processing_utils",
]
_OF_PROBES = ["torch", "torch._dynamo", "torch.distributed", "torch.nn.attention"]
# Packages whose modules the other commands import.
_PLAIN = ["acceptance", "cli", "config", "estimation", "hardware", "launch", "loglines"]
_PLAIN += ["measurement", "modelspec", "provision", "reporting", "supervise", "telemetry", "watch"]
# But programs, what imports torch, and the clients of Google, which few commands use.
_NOT_PLAIN = re.compile(
    r"drillyard\.(.*\.__main__|acceptance\.(node|torch_probes)\b.*|launch\.vertex\b.*)"
)
_FIRST_PRIVATE_DESCRIPTOR = 512
# linux/sched.h, linux/prctl.h; the number of clone on x86-64, whose order of arguments is
# flags, stack, parent's tid, child's tid, TLS (clone(2)).
_CLONE = 56
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_MM, _PR_SET_MM_MAP, _PR_GET_TID_ADDRESS = 1, 35, 14, 40
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.sbrk.restype = ctypes.c_void_p
_shown: list[object] = []
"""The memory that /proc/PID/cmdline and environ show."""


class _MemoryMap(ctypes.Structure):
    """struct prctl_mm_map of linux/prctl.h."""

    _fields_ = [
        *(
            (name, ctypes.c_uint64)
            for name in (
                *("start_code", "end_code", "start_data", "end_data", "start_brk", "brk"),
                *("start_stack", "arg_start", "arg_end", "env_start", "env_end", "auxv"),
            )
        ),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_int32),
    ]


_Request = tuple[dict[str, Any], list[int]]


def main() -> None:
    connection, kind = _moved_up(socket.socket(fileno=int(sys.argv[1]))), sys.argv[2]
    # Imports may set variables of their own.
    imported_with = dict(os.environ)
    # The thread that pyarrow's jemalloc starts would be missing in forks.
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
    if kind == PLAIN:
        os.environ.__class__ = _RecordedEnvironment
    from drillyard.cli.torch_import import import_without_collection

    modules = {COMPUTING: _COMPUTING, PROBES: _OF_PROBES}
    for module in modules.get(kind) or _plain_modules():
        import_without_collection(module)
    assert kind in modules or "torch" not in sys.modules
    os.chdir("/")
    if not _can_fork():
        return
    recorded = sorted(_RecordedEnvironment.read) if kind == PLAIN else None
    connection.send(json.dumps(recorded).encode())
    _become(_fork_until_closed(connection), imported_with if kind == COMPUTING else None)


class _RecordedEnvironment(os._Environ):  # type: ignore[type-arg]
    """os.environ while plain modules are imported: it knows what they have read."""

    read: ClassVar[set[str]] = set()

    def __getitem__(self, name: str) -> str:
        self.read.add(name)
        return str(super().__getitem__(name))


def _plain_modules() -> Iterator[str]:
    import drillyard

    for package in _PLAIN:
        yield (name := f"drillyard.{package}")
        path = [f"{drillyard.__path__[0]}/{package}"]
        for module in pkgutil.walk_packages(path, f"{name}."):
            if not _NOT_PLAIN.fullmatch(module.name):
                yield module.name


def _can_fork() -> bool:
    """Whether the kernel gives this user what forks need, and no thread was left by an import."""
    try:
        _thread_address()
        _show([*sys.orig_argv], {})
    except OSError:
        return False
    return platform.machine() == "x86_64" and len(os.listdir("/proc/self/task")) == 1


def _fork_until_closed(connection: socket.socket) -> _Request:
    """Fork at each request; returns in the forks only. Signals for the whole group are not for the
    server."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 250)
        if not message:
            os._exit(0)
        pid = _fork_for_parent()
        if pid == 0:
            connection.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return json.loads(message), descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(str(pid).encode())


def _fork_for_parent() -> int:
    """fork(2), but that the child is one of this process's parent."""
    flags = _CLONE_PARENT | _CLONE_CHILD_CLEARTID | _CLONE_CHILD_SETTID | signal.SIGCHLD
    address = _thread_address()
    ctypes.pythonapi.PyOS_BeforeFork()
    # fork of the C library does the same, and cannot be given another flag.
    none = ctypes.c_long(0)
    pid = int(_libc.syscall(ctypes.c_long(_CLONE), ctypes.c_long(flags), none, none, address, none))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return pid


def _thread_address() -> ctypes.c_void_p:
    """Where the C library keeps this thread's id, for the kernel to write that of the child."""
    address = ctypes.c_void_p()
    _checked(_libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0))
    return address


def _checked(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _become(asked: _Request, imported_with: dict[str, str] | None) -> None:
    """Be the process that a request describes, and run its program. `imported_with`: the
    environment of the imports, if what this process starts may be forks too."""
    request, (*descriptors, mounts) = asked
    if request["enters_network"]:
        _checked(_libc.setns(descriptors.pop(), _CLONE_NEWNET))
    _see(mounts)
    if request["dies_with"] is not None:
        _die_with(request["dies_with"])
    if request["new_session"]:
        os.setsid()
    elif request["group"] >= 0:
        os.setpgid(0, request["group"])
    _hold_only(dict(zip(request["descriptors"], descriptors, strict=True)))
    if imported_with is not None and "RANK" not in request["environment"]:
        connection = _own_server(imported_with)
        if connection is not None:
            # In the forks of the new server.
            _become(_fork_until_closed(connection), imported_with)
            return
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if (kubeconfig := sys.modules.get("kubernetes.config.kube_config")) is not None:
        # It has read this when it was imported.
        location = os.environ.get("KUBECONFIG", "~/.kube/config")
        kubeconfig.KUBE_CONFIG_DEFAULT_LOCATION = location  # type: ignore[attr-defined]
    _show(request["command"], request["environment"])
    _open_streams()
    _run(request["command"])


def _see(mounts: int) -> None:
    """Enter a mount namespace, such as the one that `chaos` makes for its small disks."""
    if os.fstat(mounts).st_ino != os.stat("/proc/self/ns/mnt").st_ino:
        _checked(_libc.setns(mounts, _CLONE_NEWNS))


def _die_with(parent: int) -> None:
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0))
    if os.getppid() != parent:
        os._exit(1)


def _own_server(imported_with: dict[str, str]) -> socket.socket | None:
    """Fork a server for what this process is going to start; in that server, its connection."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    this = os.getpid()
    if os.fork() == 0:
        ours.close()
        _die_with(this)
        theirs = _moved_up(theirs)
        _hold_only({theirs.fileno(): theirs.fileno()})
        return theirs
    theirs.close()
    server = ForkServer(_moved_up(ours), imported_with)
    install(lambda kind: server if kind == COMPUTING else None)
    return None


def _moved_up(connection: socket.socket) -> socket.socket:
    """The same connection on a descriptor that programs do not count on being free."""
    with connection:
        number = fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, _FIRST_PRIVATE_DESCRIPTOR)
    return socket.socket(fileno=number)


def _hold_only(given: dict[int, int]) -> None:
    """Have each descriptor of `given` under the number that is its key, and no other open."""
    copies = {
        number: fcntl.fcntl(held, fcntl.F_DUPFD, _FIRST_PRIVATE_DESCRIPTOR)
        for number, held in given.items()
    }
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in copies.values():
            # The one that listed them is closed already.
            with contextlib.suppress(OSError):
                os.close(int(name))
    for number, copy in copies.items():
        if copy != number:
            os.dup2(copy, number)
    for copy in set(copies.values()) - set(copies):
        os.close(copy)


def _show(command: Sequence[str], environment: dict[str, str]) -> None:
    """Let /proc/PID/cmdline and environ show these. Raises OSError where the kernel refuses."""
    pairs = [f"{name}={value}" for name, value in environment.items()]
    words, variables = (
        b"".join(os.fsencode(text) + b"\0" for text in texts) for texts in (command, pairs)
    )
    _shown[:] = [*_shown[-2:], *map(ctypes.create_string_buffer, (words, variables))]
    begins = [ctypes.addressof(memory) for memory in _shown[-2:]]
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as stat:
        # Numbered from 1, as in proc(5).
        field = dict(enumerate(stat.read().rpartition(")")[2].split(), start=3))
    content = _MemoryMap(
        *(int(field[number]) for number in (26, 27, 45, 46, 47)),
        0,
        int(field[28]),
        *(begins[0], begins[0] + len(words), begins[1], begins[1] + len(variables)),
        exe_fd=-1,
    )
    size = ctypes.c_ulong(ctypes.sizeof(content))
    content.brk = _libc.sbrk(ctypes.c_long(0))
    _checked(_libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(content), size, 0))


def _open_streams() -> None:
    """Open standard streams as the interpreter does at its start."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _stream(number, getattr(sys, f"__{name}__"))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _stream(number: int, like: TextIO) -> TextIO | None:
    try:
        os.fstat(number)
    except OSError:
        return None
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    raw = io.FileIO(number, "w" if number else "r", closefd=False)
    buffer: Any = raw
    if number == 0:
        buffer = io.BufferedReader(raw)
    elif not is_unbuffered:
        buffer = io.BufferedWriter(raw)
    return io.TextIOWrapper(
        buffer,
        encoding=like.encoding,
        errors=like.errors,
        newline="\n" if number else None,
        line_buffering=not is_unbuffered and (number == 2 or raw.isatty()),
        write_through=is_unbuffered,
    )


def _run(command: Sequence[str]) -> NoReturn:
    """Run `python -m MODULE ...` or `python SCRIPT ...` in this process, to its end."""
    sys.orig_argv = list(command)
    _, first, *rest = command
    code: Any = 0
    try:
        if first == "-m":
            sys.argv, sys.path[0] = list(rest), os.getcwd()
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = [first, *rest], os.path.dirname(first)
            runpy.run_path(first, run_name="__main__")
    except SystemExit as ended:
        code = ended.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    _end(code or 0)


def _end(code: int) -> NoReturn:
    """End as the interpreter does, but that it does not free a million objects, which takes longer
    than most commands."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit.unregister(gc.unfreeze)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
