"""Counts decisions by (stage, reason) and says each reason once: for `status()`, `doctor` and the server log."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections import Counter
from typing import NamedTuple, NoReturn
from typing import Protocol as Interface

from sglang_gdn_zerocopy.records import Decision, Protocol, Route

LOGGER = logging.getLogger("sglang_gdn_zerocopy")

_LINE = re.compile(
    r"GDN zero-copy (?P<event>installed|declined|live) \(pid (?P<pid>\d+)\): "
    r"(?:(?:(?P<protocol>[a-z ]+) )?target verify -> (?P<route>[a-z ]+): )?(?P<reason>.*)"
)


class Statement(NamedTuple):
    """One line of the overlay in a server's log: ``event`` is "installed", "declined" or "live".

    ``protocol`` and ``route`` are filled for "live" only.
    """

    event: str
    pid: int
    protocol: str
    route: str
    reason: str


def parse_statement(line: str) -> Statement | None:
    """The overlay's statement in one line of a server log, or None when the line is not ours."""
    found = _LINE.search(line)
    if found is None:
        return None
    return Statement(
        found["event"],
        int(found["pid"]),
        found["protocol"] or "",
        found["route"] or "",
        found["reason"].strip(),
    )


class Reporter(Interface):
    """Keeps others posted about the ledger. Neither call raises."""

    def changed(self) -> None:
        """Something happened for the first time."""

    def pulse(self) -> None:
        """A call went by; must cost next to nothing."""


class Ledger:
    """Per-process counts. A forked child starts from zero (see :meth:`reset`)."""

    # A reason may name a size; a stream of ever new sizes must not grow the process.
    _LIMIT = 4096

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        # The count's key of a decision, which is asked for at every call.
        self._decided: dict[tuple[Protocol | None, Decision], tuple[str, str]] = {}
        # Whether a refusal ends the process.
        self.strict = False
        self.reporter: Reporter | None = None

    def reset(self) -> None:
        """Forget everything; run in a forked child."""
        self.counts.clear()

    def count(self, stage: str, reason: str) -> bool:
        """Count one event without saying it. Returns whether it is the first of its kind."""
        key = (stage, reason)
        seen = self.counts.get(key, 0)
        if not seen and len(self.counts) >= self._LIMIT:
            key = (stage, "more reasons than the ledger keeps")
            seen = self.counts.get(key, 0)
        self.counts[key] = seen + 1
        first = not seen
        if first and self.reporter is not None:
            self.reporter.changed()
        return first

    def pulse(self) -> None:
        """Called once per call of the backend's forward, for what is done every few seconds."""
        if self.reporter is not None:
            self.reporter.pulse()

    def installed(self, reason: str) -> None:
        """The overlay was put on the backend."""
        if self.count("installed", reason):
            LOGGER.info("GDN zero-copy installed (pid %d): %s", os.getpid(), reason)

    def declined(self, reason: str, level: int = logging.WARNING) -> None:
        """The overlay was asked for and stays off, or a part of it was switched off."""
        if self.count("declined", reason):
            LOGGER.log(level, "GDN zero-copy declined (pid %d): %s", os.getpid(), reason)

    def failed(self, stage: str, error: Exception) -> None:
        """Our own code raised before anything was written; stock took over."""
        self.declined(f"{stage} failed, stock takes over: {type(error).__name__}: {error}", logging.ERROR)

    def refused(self, reason: str, otherwise: str = "", *, level: int = logging.WARNING) -> None:
        """As :meth:`declined`, for what strict mode does not put up with: then this ends the process.

        ``otherwise`` is what happens without strict mode.
        """
        if self.strict:
            self.declined(reason, level)
            stop(reason)
        self.declined(f"{reason}; {otherwise}" if otherwise else reason, level)

    def refused_by(self, stage: str, error: Exception) -> None:
        """As :meth:`failed`, for what strict mode does not put up with: then this ends the process."""
        if self.strict:
            self.refused(f"{stage} failed: {type(error).__name__}: {error}", level=logging.ERROR)
        self.failed(stage, error)

    def decided(self, protocol: Protocol | None, decision: Decision) -> None:
        """One target-verify call took ``decision.route``. ``protocol`` is None when the call was not looked at."""
        key = self._decided.get((protocol, decision))
        seen = self.counts.get(key, 0) if key is not None else 0
        if key is not None and seen:
            self.counts[key] = seen + 1
            return
        kind = f"{protocol.value} target verify" if protocol else "target verify"
        stage = f"{kind} -> {decision.route.value}"
        if self.count(stage, decision.reason):
            level = logging.WARNING if decision.route is Route.UPSTREAM else logging.INFO
            LOGGER.log(level, "GDN zero-copy live (pid %d): %s: %s", os.getpid(), stage, decision.reason)
        if len(self._decided) < self._LIMIT:
            self._decided[protocol, decision] = stage, decision.reason

    def as_rows(self) -> list[dict[str, object]]:
        """The counts, most frequent first: stage, reason, count."""
        return [{"stage": s, "reason": r, "count": n} for (s, r), n in self.counts.most_common()]


def stop(reason: str) -> NoReturn:
    """End this process with one line and exit code 1.

    SGLang's plugin loader, its model registry and its scheduler all catch ``Exception``; none catches ``SystemExit``.
    A child of a server is ended at once instead: on its way out the interpreter would wait for threads and process
    groups of a half-started rank, while SGLang's parent looks only at whether its children are alive.
    """
    from multiprocessing import parent_process

    text = f"GDN zero-copy stopped (pid {os.getpid()}): SGLANG_GDN_ZEROCOPY_STRICT=1 and {reason}"
    if parent_process() is None:
        raise SystemExit(text)
    LOGGER.critical("%s", text)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(1)
