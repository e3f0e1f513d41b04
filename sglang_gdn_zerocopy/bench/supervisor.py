"""The one owner of child processes: each leads a group of its own, and none outlives the supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from sglang_gdn_zerocopy.bench.errors import RunFailed

GRACE_S = 30.0
_STRAGGLERS_S = 5.0
_POLL_S = 0.05
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Group:
    """A child process and everything that it started in its group. Made by :meth:`Supervisor.start`."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self.log = log

    def exit_status(self) -> int | None:
        """The leader's exit code (negative: the signal that ended it), None while it runs.

        The leader is not reaped: as long as it is a zombie nobody else can get its id, so signals to the group
        cannot reach a stranger.
        """
        if self._process.returncode is not None:
            return self._process.returncode
        found = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def stop(self, grace_s: float) -> None:
        """End the whole group: SIGTERM, SIGKILL after ``grace_s`` seconds, and wait until it is gone."""
        if self._process.returncode is not None:
            return
        group = self._process.pid
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGTERM)
        _wait_until(lambda: self.exit_status() is not None, grace_s)
        # Also when the leader has gone: what it left behind holds the port and the GPU's memory.
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        self._process.wait()
        _wait_until(lambda: _is_empty(group), _STRAGGLERS_S)


class Supervisor:
    """Context manager. Inside, the first SIGINT, SIGTERM or SIGHUP raises ``KeyboardInterrupt``, later ones are
    ignored until everything is stopped; on the way out all groups are ended.

    A signal that the parent had ignored (``nohup``) stays ignored. Use it in the main thread.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._groups: list[Group] = []
        self._handlers: dict[signal.Signals, Any] = {}
        self._signalled = False
        self._deferred = 0
        self._pending = False

    def __enter__(self) -> Supervisor:
        for number in _SIGNALS:
            before = signal.getsignal(number)
            # None: a handler that was not set from Python and could not be put back.
            if before not in (signal.SIG_IGN, None):
                self._handlers[number] = before
                signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signalled = True
        try:
            for group in list(self._groups):
                self.stop(group)
        finally:
            for number, before in self._handlers.items():
                signal.signal(number, before)

    def start(self, command: Sequence[str], log: Path, env: Mapping[str, str], cwd: Path | None = None) -> Group:
        """Start ``command`` as the leader of a new group, its output appended to ``log``.

        Raises ``RunFailed`` when the log or the process cannot be made.
        """
        with self._uninterrupted():
            try:
                with log.open("ab") as output:
                    process = subprocess.Popen(
                        list(command),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=dict(env),
                        cwd=cwd,
                        start_new_session=True,
                    )
            except OSError as error:
                raise RunFailed(f"cannot start {command[0]} with its output in {log}: {error}") from None
            group = Group(process, log)
            self._groups.append(group)
        return group

    def stop(self, group: Group) -> None:
        """End one group; a signal that arrives meanwhile is raised afterwards."""
        with self._uninterrupted():
            group.stop(self._grace_s)
            if group in self._groups:
                self._groups.remove(group)

    @contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        self._deferred += 1
        try:
            yield
        finally:
            self._deferred -= 1
        if self._pending and not self._deferred:
            self._pending = False
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signalled:
            return
        self._signalled = True
        if self._deferred:
            self._pending = True
        else:
            raise KeyboardInterrupt


def tail(path: Path, lines: int = 20) -> str:
    """The last lines of a log that say something, indented; progress bars rewrite a line and count once."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 65536))
            text = file.read().decode(errors="replace")
    except OSError:
        return "  (no output)"
    said = [line.rsplit("\r", 1)[-1].rstrip() for line in text.rstrip().split("\n")]
    kept = [line for line in said if line][-lines:]
    return "\n".join(f"  {line}" for line in kept) or "  (no output)"


def ending(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"signal {-status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"signal {-status}"


def _is_empty(group: int) -> bool:
    """Whether no process of the group runs. A zombie holds nothing; who reaps it, and when, is init's affair."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in brackets may hold anything, blanks and brackets too.
            state, _, member_of = stat.read_text(errors="replace").rsplit(")", 1)[1].split()[:3]
        except OSError:
            continue
        if int(member_of) == group and state not in {"Z", "X"}:
            return False
    return True


def _wait_until(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
