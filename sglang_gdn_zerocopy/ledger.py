"""Counts decisions by (stage, reason) and says each reason once: for `status()`, `doctor` and the server log."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from typing import NamedTuple

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


class Ledger:
    """Per-process counts. A forked child starts from zero (see :meth:`reset`)."""

    # A reason may name a size; a stream of ever new sizes must not grow the process.
    _LIMIT = 4096

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    def reset(self) -> None:
        """Forget everything; run in a forked child."""
        self.counts.clear()

    def count(self, stage: str, reason: str) -> bool:
        """Count one event without saying it. Returns whether it is the first of its kind."""
        key = (stage, reason)
        if key not in self.counts and len(self.counts) >= self._LIMIT:
            key = (stage, "more reasons than the ledger keeps")
        self.counts[key] += 1
        return self.counts[key] == 1

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

    def decided(self, protocol: Protocol | None, decision: Decision) -> None:
        """One target-verify call took ``decision.route``. ``protocol`` is None when the call was not looked at."""
        kind = f"{protocol.value} target verify" if protocol else "target verify"
        if self.count(f"{kind} -> {decision.route.value}", decision.reason):
            level = logging.WARNING if decision.route is Route.UPSTREAM else logging.INFO
            text = "GDN zero-copy live (pid %d): %s -> %s: %s"
            LOGGER.log(level, text, os.getpid(), kind, decision.route.value, decision.reason)

    def as_rows(self) -> list[dict[str, object]]:
        """The counts, most frequent first: stage, reason, count."""
        return [{"stage": s, "reason": r, "count": n} for (s, r), n in self.counts.most_common()]
