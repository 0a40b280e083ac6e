"""A small disk that fills up just before a chosen file is written.

As root it is a tmpfs of 16 MB, and the error comes from the kernel. Elsewhere a limit for the size of files
(RLIMIT_FSIZE) of 0 bytes from that moment on has the same effect on every write.
"""

import contextlib
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

BALLAST = "ballast"


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int = 16) -> Iterator[bool]:
    """Mounts a tmpfs at `folder`; yields whether that was possible."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> None:
    """Leaves no byte free on a small disk."""
    handle = os.open(disk / BALLAST, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for size in (2**20, 2**12, 1):
        with contextlib.suppress(OSError):
            while True:
                os.write(handle, bytes(size))
    os.close(handle)


def free(disk: Path) -> None:
    """Removes what `fill` wrote."""
    (disk / BALLAST).unlink(missing_ok=True)


class FillBefore:
    """An audit hook: no space is left from the first time that a file whose path matches is opened to write.

    Args:
        pattern: regular expression, searched in the path.
        disk: a small disk to fill; None: limit the size of files instead.
        skip: number of matches to let pass.
    """

    def __init__(self, pattern: str, disk: Path | None, skip: int = 0) -> None:
        self.pattern, self.disk, self.skip = re.compile(pattern), disk, skip
        self.filled = False

    def __call__(self, event: str, arguments: tuple) -> None:
        if self.filled or event != "open" or not isinstance(arguments[0], str | os.PathLike):
            return
        path, _, flags = arguments
        if not self.pattern.search(str(path)) or not flags & (os.O_WRONLY | os.O_RDWR):
            return
        if self.skip:
            self.skip -= 1
            return
        self.now()

    def now(self) -> None:
        """Fills the disk."""
        self.filled = True
        if self.disk is not None:
            fill(self.disk)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def in_child(words: list[str], output: Path, hook: FillBefore | None = None, shard: bool = False) -> int:
    """Runs a g2rpo command in a forked child, which has imported torch already; returns its exit code.

    Args:
        output: file for what the command prints; it is on a disk with space.
        hook: fills the disk.
        shard: fill it before the first shard of the embedding cache, which safetensors writes.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 70
    try:
        log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))  # noqa: SIM115
        code = _run(words, hook, shard)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        sys.stdout.flush()
        os._exit(code)


def _run(words: list[str], hook: FillBefore | None, shard: bool) -> int:
    import safetensors.torch
    import torch

    from g2rpo.cli.app import app

    torch.set_num_threads(1)
    if hook is not None:
        sys.addaudithook(hook)
    if shard:
        save_file = safetensors.torch.save_file

        def filled(*args, **options):
            hook.now()
            return save_file(*args, **options)

        safetensors.torch.save_file = filled
    try:
        app(words, prog_name="g2rpo")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0
