"""One small JSON file per process that says what is live in it, for `doctor --live`.

Written when the overlay is installed, when something happens for the first time, and then every few seconds from
within calls. No thread, no CUDA context, nothing raised. Replays of a CUDA graph do not run Python: behind graphs the
counts are those of warm-up and capture, and a process is known to be alive by its id and start time, not by the age of
its file.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_gdn_zerocopy import settings

LOGGER = logging.getLogger("sglang_gdn_zerocopy")
FORMAT = 1
PREFIX = "gdn-zerocopy-"
# Seconds between two writes from within calls.
INTERVAL_S = 10.0
# A stream of ever new reasons must not write at every call: after this many writes the interval holds for it as well.
_WRITES_AT_ONCE = 256


def started(pid: int) -> int | None:
    """When process ``pid`` started, in clock ticks since boot (no clock jump moves it); None when it is not there."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    # A zombie has ended; only its parent has not looked yet.
    return int(fields[19]) if fields[0] not in "ZX" else None


def pid_namespace() -> str:
    """What process ids of this process are relative to: the host and, on Linux, the pid namespace."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {namespace}".strip()


class StatusFile:
    """Writes ``facts()`` and who this process is to a file of its own in ``folder``. Never raises."""

    def __init__(self, folder: str, facts: Callable[[], dict[str, Any]]) -> None:
        self._folder = folder
        self._facts = facts
        self._due = 0.0
        self._writes = 0
        self._writing = False
        self._complained = False

    def changed(self) -> None:
        """Write now."""
        if self._writes < _WRITES_AT_ONCE:
            self._try_to_write()

    def pulse(self) -> None:
        """Write when the last time is long enough ago."""
        if time.monotonic() >= self._due:
            self._try_to_write()

    def _try_to_write(self) -> None:
        # A fact that is counted while the facts are collected asks to be written again.
        if self._writing:
            return
        self._writing = True
        try:
            self._due = time.monotonic() + INTERVAL_S
            self._writes += 1
            self._write()
        except Exception as error:
            if not self._complained:
                self._complained = True
                text = "GDN zero-copy writes no status file (pid %d): %s: %s"
                LOGGER.warning(text, os.getpid(), type(error).__name__, error)
        finally:
            self._writing = False

    def _write(self) -> None:
        text = json.dumps(self._identity() | self._facts(), indent=1)
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        pid = os.getpid()
        # Mode 0600, a name that nobody can guess, renamed within the folder: a reader sees all of it or the old one.
        descriptor, temporary = tempfile.mkstemp(prefix=f".{PREFIX}{pid}-", suffix=".tmp", dir=self._folder)
        try:
            with open(descriptor, "w", encoding="utf-8") as stream:
                stream.write(text)
            os.replace(temporary, os.path.join(self._folder, f"{PREFIX}{pid}-{started(pid) or 0}.json"))
        except BaseException:
            os.unlink(temporary)
            raise

    def _identity(self) -> dict[str, Any]:
        pid, parent = os.getpid(), os.getppid()
        rank, world_size = _rank()
        return {
            "format": FORMAT,
            "namespace": pid_namespace(),
            "pid": pid,
            "started": started(pid),
            "parent": [parent, started(parent)],
            "rank": rank,
            "world_size": world_size,
            "gpu": _gpu(),
            "written": time.time(),
        }


def _rank() -> tuple[int | None, int | None]:
    """Rank and world size from torch, if it is there and knows, else from the launcher's environment."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    try:
        rank, world_size = settings.RANK.read(), settings.WORLD_SIZE.read()
    except settings.SettingError:
        return None, None
    return (rank if rank >= 0 else None), (world_size if world_size > 0 else None)


def _gpu() -> str | None:
    """The GPU that this process uses at present; asking creates no CUDA context.

    Asked anew for each file: a rank may have a context on GPU 0 before it is told which one is its own.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return None
    index = cuda.current_device()
    return f"{index}: {cuda.get_device_name(index)}"
