"""Run the command line as where a platform lacks what Linux has: `python -X
warn_default_encoding other_platform.py WORDS`.

For dstrain's own modules (other libraries ask for the platform's name first) modules of
Unix cannot be imported, `os` and `signal` have what they have on Windows, a text file
opened without an encoding is an error, and processes are spawned. For all, a file that
this process has open can be neither renamed, replaced nor removed, and neither can a
folder with such a file in it.
"""

import builtins
import multiprocessing
import os
import signal
import sys
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODULES = "fcntl grp posix pty pwd resource syslog termios tty"
SIGNALS = """SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGUSR1
    SIGUSR2 SIGWINCH alarm pause pthread_kill pthread_sigmask setitimer sigwait
"""
OF_OS = """chown chroot copy_file_range fchmod fchown fdatasync fork forkpty fpathconf
    fstatvfs getegid geteuid getgid getgroups getloadavg getpgid getpgrp getpriority
    getsid getuid initgroups killpg lchown lockf major minor mkfifo mknod nice openpty
    pathconf pipe2 posix_fadvise posix_fallocate posix_spawn pread preadv pwrite
    pwritev readv register_at_fork sched_getaffinity sched_yield sendfile setgid
    setpgid setpriority setsid setuid setxattr getxattr statvfs sync sysconf
    tcgetpgrp uname wait wait3 wait4 waitid writev WNOHANG O_CLOEXEC O_DIRECTORY
    O_DIRECT O_NOATIME O_NOCTTY O_NOFOLLOW O_NONBLOCK O_PATH O_SYNC
"""
"""What the modules `signal` and `os` lack on Windows."""


def without(module: types.ModuleType, names: str) -> types.ModuleType:
    """A copy of a module without some of its names."""
    copy = types.ModuleType(module.__name__)
    vars(copy).update({k: v for k, v in vars(module).items() if k not in names.split()})
    return copy


def replace_modules() -> None:
    """Let dstrain's modules find those of the other platform."""
    found = builtins.__import__
    other = {"os": without(os, OF_OS), "signal": without(signal, SIGNALS)}
    vars(other["os"]).update(name="nt", supports_dir_fd=set())

    def find(
        name: str,
        namespace: Mapping[str, Any] | None = None,
        *arguments: Any,
        **keywords: Any,
    ) -> types.ModuleType:
        importer = (namespace or {}).get("__name__", "")
        if importer.startswith(("dstrain", "filelock")):
            if name in MODULES.split():
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if name in other and importer.startswith("dstrain"):
                return other[name]
        return found(name, namespace, *arguments, **keywords)

    builtins.__import__ = find


def open_files() -> set[str]:
    """The paths of what this process has open, mapped memory included."""
    paths = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            paths.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            continue
    for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
        parts = line.split(maxsplit=5)
        if len(parts) == 6:
            paths.add(parts[5])
    return paths


def keep_open_files(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse what Windows refuses for files that are open."""
    if event not in ("os.rename", "os.remove", "os.rmdir"):
        return
    places = arguments[:2] if event == "os.rename" else arguments[:1]
    held = open_files()
    for place in places:
        if not isinstance(place, str | bytes | os.PathLike):
            continue
        path = os.path.realpath(os.fsdecode(place))
        for one in held:
            if one == path or one.startswith(os.path.join(path, "")):
                raise PermissionError(13, f"{event}: {one} is open", path)


def main() -> int:
    """Run the command line that the words of this one are."""
    warnings.filterwarnings("error", category=EncodingWarning, module="dstrain")
    replace_modules()
    multiprocessing.set_start_method("spawn")
    from dstrain.cli.main import main as dstrain

    sys.addaudithook(keep_open_files)
    return dstrain(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
