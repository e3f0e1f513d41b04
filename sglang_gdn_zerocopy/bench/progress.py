"""What the user sees while a run goes on: a bar in a terminal, one line per event elsewhere."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol


class Estimate:
    """Time left, from the units of work that are done. Units of one kind (a shape, a server start) take alike."""

    def __init__(self, work: Mapping[Hashable, int], clock: Callable[[], float] = time.monotonic) -> None:
        self._left = Counter(dict(work))
        self._done: dict[Hashable, list[float]] = defaultdict(list)
        self._clock = clock
        self._started = clock()

    def begin(self) -> None:
        """A unit starts now."""
        self._started = self._clock()

    def finish(self, kind: Hashable) -> None:
        """The unit that began last is done."""
        self._done[kind].append(self._clock() - self._started)
        self._left[kind] -= 1

    @property
    def total(self) -> int:
        """All units, done and left."""
        return self.finished + sum(self._left.values())

    @property
    def finished(self) -> int:
        """The units that are done."""
        return sum(map(len, self._done.values()))

    def seconds_left(self) -> float | None:
        """Seconds, None before the first unit is done. A kind without a done unit counts as the mean of all."""
        durations = [duration for kind in self._done.values() for duration in kind]
        if not durations:
            return None
        overall = sum(durations) / len(durations)
        means = {kind: sum(done) / len(done) for kind, done in self._done.items() if done}
        return sum(count * means.get(kind, overall) for kind, count in self._left.items())


def time_left(seconds: float | None) -> str:
    """For people: "" when nothing is left or known, else as "about 12 min left"."""
    if not seconds:
        return ""
    if seconds < 90:
        return f"about {seconds:.0f} s left"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"about {minutes} min left"
    return f"about {minutes // 60} h {minutes % 60:02d} min left"


class Progress(Protocol):
    """Where the runner reports to."""

    def say(self, line: str) -> None:
        """A line to keep."""

    def doing(self, what: str, estimate: Estimate) -> None:
        """A unit of work starts."""

    def done(self, what: str, result: str, estimate: Estimate) -> None:
        """A unit of work is done."""


class PlainProgress:
    """One line per finished unit, for logs and pipes."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write

    def say(self, line: str) -> None:
        """A line to keep."""
        self._write(line)

    def doing(self, what: str, estimate: Estimate) -> None:
        """Nothing: the finished unit is the line."""

    def done(self, what: str, result: str, estimate: Estimate) -> None:
        """One line: what, its result, time left."""
        parts = (f"[{estimate.finished}/{estimate.total}] {what}", result, time_left(estimate.seconds_left()))
        self._write("  ".join(part for part in parts if part))


class BarProgress:
    """A bar of rich that shows what is running and the time left; kept lines scroll above it.

    ``bar`` is a started ``rich.progress.Progress`` with the columns of the command line.
    """

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=None, left="")

    def say(self, line: str) -> None:
        """A line to keep."""
        # Text from a server may hold square brackets, which rich would read as its markup.
        self._bar.console.print(line, markup=False, highlight=False)

    def doing(self, what: str, estimate: Estimate) -> None:
        """Show ``what`` beside the bar."""
        self._show(what, estimate)

    def done(self, what: str, result: str, estimate: Estimate) -> None:
        """Advance the bar; a result is kept as a line."""
        self._show(what, estimate)
        if result:
            self.say(f"{what}  {result}")

    def _show(self, what: str, estimate: Estimate) -> None:
        self._bar.update(
            self._task,
            description=what,
            total=estimate.total,
            completed=estimate.finished,
            left=time_left(estimate.seconds_left()),
        )
