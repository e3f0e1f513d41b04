"""`doctor --live`: what the processes of a server say about themselves in their status files.

Scheduler processes are siblings when they have the same parent process: SGLang's launcher, or its data-parallel
controller. A process is alive when its id and its start time are those in its file; the file's age says nothing, since
a server behind CUDA graphs hardly runs Python.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from sglang_gdn_zerocopy.cli.errors import CommandError
from sglang_gdn_zerocopy.status_file import FORMAT, PREFIX, pid_namespace, started

# How SGLang's scheduler processes call themselves.
_SCHEDULER_TITLE = "sglang::scheduler"
# States of a process that has not imported SGLang's GDN backend: a server's main process, for example.
_NO_SCHEDULER = ("waiting", "off")
_ARROW = "target verify -> "


class Life(str, Enum):
    """What is known about the process that wrote a file."""

    ALIVE = "alive"
    DEAD = "dead"
    ELSEWHERE = "other host"


class Parent(NamedTuple):
    """Who started a process."""

    namespace: str
    pid: int
    started: int | None


@dataclass(frozen=True)
class Process:
    """One status file."""

    facts: dict[str, Any]
    life: Life

    @property
    def pid(self) -> int:
        """The process's id."""
        return int(self.facts["pid"])

    @property
    def parent(self) -> Parent:
        """What it shares with its siblings."""
        pid, start = self.facts["parent"]
        return Parent(self.facts["namespace"], pid, start)

    @property
    def is_scheduler(self) -> bool:
        """Whether it imported SGLang's GDN backend."""
        return self.facts["state"] not in _NO_SCHEDULER or bool(self.facts["release"])

    @property
    def routes(self) -> dict[str, set[str]]:
        """The routes taken so far, by kind of target verify."""
        found: dict[str, set[str]] = {}
        for row in self.facts["counts"]:
            kind, arrow, route = row["stage"].partition(_ARROW)
            if arrow:
                found.setdefault(kind.strip() or "unread call", set()).add(route)
        return found

    @property
    def verify_calls(self) -> int:
        """Target-verify calls that Python saw."""
        return sum(row["count"] for row in self.facts["counts"] if _ARROW in row["stage"])

    @property
    def failed_kernels(self) -> set[str]:
        """Bundled kernels that failed a self-test there."""
        return {row["kernel"] for row in self.facts["kernels"] if row["self_test"] == "failed"}

    @property
    def name(self) -> str:
        """For messages."""
        rank = self.facts["rank"]
        return f"pid {self.pid}" if rank is None else f"rank {rank} (pid {self.pid})"

    @property
    def summary(self) -> str:
        """One sentence: what is live."""
        facts = self.facts
        if facts["state"] != "installed":
            return f"{facts['state']}: {facts['reason']}"
        if not self.verify_calls:
            return "installed, 0 verify calls (prefill worker?)"
        text = "; ".join(f"{kind} -> {' and '.join(sorted(routes))}" for kind, routes in sorted(self.routes.items()))
        failed = "".join(f"; {kernel} kernel failed its self-test" for kernel in sorted(self.failed_kernels))
        return f"{text}, {self.verify_calls} verify calls{failed}"


def run(folder: Path, ranks: int | None, as_json: bool) -> int:
    """Print the processes and what is wrong with them. Returns 0 or 1; a bad folder raises CommandError."""
    if ranks is not None and ranks < 1:
        raise CommandError(f"--ranks {ranks}: use 1 or more")
    processes = read(folder)
    problems = list(problems_of(processes, ranks))
    if as_json:
        rows = [{**p.facts, "life": p.life.value, "summary": p.summary} for p in processes]
        print(json.dumps({"processes": rows, "problems": problems}, indent=1))
    else:
        for line in _table(processes):
            print(line)
        for problem in problems:
            print(f"problem: {problem}")
        if not problems:
            print("every scheduler process is there and takes its siblings' routes")
    return int(bool(problems))


def read(folder: Path) -> list[Process]:
    """The status files of ``folder``, siblings together. Raises CommandError when it is none or a file is damaged."""
    if not folder.is_dir():
        raise CommandError(f"--live: {folder} is no folder; set it to the server's SGLANG_GDN_ZEROCOPY_STATUS_DIR")
    here = pid_namespace()
    processes = []
    for path in folder.glob(f"{PREFIX}*.json"):
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            if facts["format"] != FORMAT:
                raise CommandError(f"--live: {path} has format {facts['format']}, this version reads {FORMAT}")
            if facts["namespace"] != here:
                life = Life.ELSEWHERE
            else:
                life = Life.ALIVE if started(facts["pid"]) == facts["started"] is not None else Life.DEAD
            process = Process(facts, life)
            # Whatever is asked for later is asked for once here, where a damaged file is still known by name.
            _ = (
                process.summary,
                process.name,
                process.parent,
                process.is_scheduler,
                facts["world_size"],
                facts["written"],
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CommandError(f"--live: {path} is no status file: {type(error).__name__}: {error}") from None
        processes.append(process)
    rank = {id(p): -1 if p.facts["rank"] is None else p.facts["rank"] for p in processes}
    return sorted(processes, key=lambda p: (*p.parent[:2], p.is_scheduler, rank[id(p)], p.pid))


def problems_of(processes: list[Process], ranks: int | None) -> Iterator[str]:
    """Why the exit code is 1, a sentence each."""
    schedulers = [p for p in processes if p.is_scheduler]
    if not any(p.life is not Life.DEAD for p in schedulers):
        yield "no scheduler process with the overlay is running"
    for parent in dict.fromkeys(p.parent for p in schedulers):
        family = [p for p in schedulers if p.parent == parent]
        there = [p for p in family if p.life is not Life.DEAD]
        if there:
            yield from _missing(family, there, ranks)
            yield from _differing(there)
    yield from _without_overlay(processes)


def _missing(family: list[Process], there: list[Process], ranks: int | None) -> Iterator[str]:
    replaced = {p.facts["rank"] for p in there} - {None}
    for process in family:
        if process.life is Life.DEAD and process.facts["rank"] not in replaced:
            yield f"{process.name} is dead, its siblings run"
    if ranks is not None:
        if len(there) < ranks:
            yield f"{len(there)} of {ranks} scheduler processes of {_server(there[0])} are there"
        return
    wanted = max((p.facts["world_size"] or 0 for p in family), default=0)
    known = {p.facts["rank"] for p in family}
    for rank in range(wanted):
        if rank not in known:
            text = f"rank {rank} of {wanted} of {_server(there[0])} wrote no status file"
            yield f"{text} (with nodes of their own folders give --ranks)"


def _differing(there: list[Process]) -> Iterator[str]:
    """Each process against the first one of its family that has something to compare."""
    for index, process in enumerate(there):
        for other in there[:index]:
            difference = _difference(process, other)
            if difference:
                yield f"{process.name} differs from {other.name}: {difference}"
                break


def _difference(one: Process, other: Process) -> str:
    for name in ("state", "release", "bundled_kernels"):
        if one.facts[name] != other.facts[name]:
            return f"{name} {one.facts[name]!r}, not {other.facts[name]!r}"
    mine, theirs = one.routes, other.routes
    # Where one of them has seen no call there is nothing to compare.
    for kind in mine.keys() & theirs.keys():
        if mine[kind] != theirs[kind]:
            return f"{kind} -> {' and '.join(sorted(mine[kind]))}, not {' and '.join(sorted(theirs[kind]))}"
    if mine and theirs and one.failed_kernels != other.failed_kernels:
        failed = ", ".join(sorted(one.failed_kernels ^ other.failed_kernels))
        return f"one of them failed the self-test of its {failed} kernel"
    return ""


def _without_overlay(processes: list[Process]) -> Iterator[str]:
    """Running scheduler processes of the same servers that wrote no file: there the overlay was never switched on."""
    here = [p for p in processes if p.life is Life.ALIVE]
    known = {p.pid for p in here}
    parents = known | {p.parent.pid for p in here if p.is_scheduler}
    for pid, parent, title in running():
        if parent in parents and pid not in known and title.startswith(_SCHEDULER_TITLE):
            yield f"{title} (pid {pid}) runs without the overlay: it wrote no status file"


def running() -> Iterator[tuple[int, int, str]]:
    """Every process of this machine that can be looked at: id, parent's id, title."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = folder.joinpath("cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace")
            stat = folder.joinpath("stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        yield int(folder.name), int(stat.rpartition(")")[2].split()[1]), title


def _server(process: Process) -> str:
    return f"the server under pid {process.parent.pid}"


def _table(processes: list[Process]) -> Iterator[str]:
    head = ("server", "pid", "life", "rank", "gpu", "sglang", "written", "live")
    rows = [head]
    for p in processes:
        age = f"{max(0.0, time.time() - p.facts['written']):.0f} s ago"
        rank = "-" if p.facts["rank"] is None else f"{p.facts['rank']}/{p.facts['world_size'] or '?'}"
        cells = (
            p.parent.pid,
            p.pid,
            p.life.value,
            rank,
            p.facts["gpu"] or "-",
            p.facts["release"] or "-",
            age,
            p.summary,
        )
        rows.append(tuple(str(cell) for cell in cells))  # type: ignore[arg-type]  # as many as the head has
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
