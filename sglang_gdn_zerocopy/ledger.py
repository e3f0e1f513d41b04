"""Counts decisions by (stage, reason) and says each reason once. Feeds ``status()``, ``doctor`` and the server's log."""

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
    r"(?:(?P<protocol>[a-z ]+) target verify -> (?P<route>[a-z]+): )?(?P<reason>.*)"
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
        found["event"], int(found["pid"]), found["protocol"] or "", found["route"] or "", found["reason"].strip()
    )


class Ledger:
    """Per-process counts. A forked child starts from zero (see :meth:`reset`)."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._said: set[tuple[str, str]] = set()

    def reset(self) -> None:
        """Forget everything; run in a forked child."""
        self.counts.clear()
        self._said.clear()

    def count(self, stage: str, reason: str) -> None:
        """Count one event without saying it."""
        self.counts[stage, reason] += 1

    def installed(self, reason: str) -> None:
        """The overlay was put on the backend."""
        self._say("installed", reason, logging.INFO, f"GDN zero-copy installed (pid {os.getpid()}): {reason}")

    def declined(self, reason: str, level: int = logging.WARNING) -> None:
        """The overlay was asked for and stays off, or a part of it was switched off."""
        self._say("declined", reason, level, f"GDN zero-copy declined (pid {os.getpid()}): {reason}")

    def decided(self, protocol: Protocol, decision: Decision) -> None:
        """One target-verify call took ``decision.route``."""
        stage = f"{protocol.value} -> {decision.route.value}"
        if (stage, decision.reason) in self._said:
            self.counts[stage, decision.reason] += 1
            return
        level = logging.INFO if decision.route is Route.VIEWS else logging.WARNING
        text = f"GDN zero-copy live (pid {os.getpid()}): {protocol.value} target verify -> {decision.route.value}"
        self._say(stage, decision.reason, level, f"{text}: {decision.reason}")

    def _say(self, stage: str, reason: str, level: int, text: str) -> None:
        self.counts[stage, reason] += 1
        if (stage, reason) not in self._said:
            self._said.add((stage, reason))
            LOGGER.log(level, text)

    def as_rows(self) -> list[dict[str, object]]:
        """The counts, most frequent first: stage, reason, count."""
        return [{"stage": s, "reason": r, "count": n} for (s, r), n in self.counts.most_common()]
