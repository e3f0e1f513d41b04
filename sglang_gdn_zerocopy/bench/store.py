"""The folder of a run: the plan first, then one file per phase. What is in it decides what a resumed run still does."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path

from sglang_gdn_zerocopy.bench.errors import RunFailed
from sglang_gdn_zerocopy.bench.measurement import Measurement, read_measurements
from sglang_gdn_zerocopy.bench.schedule import Phase, Plan, differences
from sglang_gdn_zerocopy.cli.errors import CommandError


class Step(str, Enum):
    """The parts of a phase, in the order in which they run on its server."""

    MEASURE = "measure"
    GSM8K = "gsm8k"
    TRACE = "trace"
    CONTENT = "content"


class Store:
    """Reads and writes one run's folder. Every write that fails raises ``RunFailed`` and leaves whole lines only."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder = folder
        self.plan = plan

    def check(self) -> None:
        """Raise ``CommandError`` when the folder holds a run with another plan, or files but no plan."""
        path = self.folder / "plan.json"
        if not path.exists():
            if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
                raise CommandError(f"--out {self.folder} exists and holds no run to resume: give a new folder")
            return
        try:
            there = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(there, dict):
                raise ValueError("it is not an object")
        except (OSError, ValueError) as error:
            raise CommandError(f"{path} cannot be read ({error}): give a new --out folder") from None
        here = json.loads(json.dumps(self.plan.to_dict()))
        found = "; ".join(differences(there, here))
        if found:
            raise CommandError(
                f"--out {self.folder} holds another run: {found}. Give a new folder, or the same arguments"
            )

    def create(self) -> None:
        """Make the folder and write ``plan.json``, unless it is there."""
        path = self.folder / "plan.json"
        with self._writing(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                write_text(path, json.dumps(self.plan.to_dict(), indent=2, sort_keys=True) + "\n")

    def missing(self, phase: Phase) -> tuple[Step, ...]:
        """What the phase still needs, in order. A phase without all its measurements is repeated as a whole."""
        steps = []
        if not self._measured(phase):
            steps.append(Step.MEASURE)
        if self.plan.gsm8k is not None and not self.gsm8k_file(phase).exists():
            steps.append(Step.GSM8K)
        if self.plan.trace and phase.last_of_arm and not self.trace_folder(phase.arm).exists():
            steps.append(Step.TRACE)
        if not self.content_file(phase).exists():
            steps.append(Step.CONTENT)
        return tuple(steps)

    def prepare(self, phase: Phase, steps: tuple[Step, ...]) -> None:
        """Set aside what an earlier, interrupted try of these steps left; nothing is deleted or merged."""
        leftovers = [self.log_file(phase), self.client_log(phase)]
        if Step.MEASURE in steps:
            leftovers.append(self.measurements_file(phase))
            # It belongs to the server that was measured.
            leftovers.append(self.content_file(phase))
        if Step.TRACE in steps:
            leftovers.append(self.new_trace_folder(phase.arm))
        for path in leftovers:
            with self._writing(path):
                set_aside(path)

    def append(self, phase: Phase, measurement: Measurement) -> None:
        """Add one measurement; it is on disk when this returns."""
        path = self.measurements_file(phase)
        with self._writing(path):
            append_line(path, measurement.to_json())

    def write(self, path: Path, text: str) -> None:
        """Write one whole file; it is either complete or not there."""
        with self._writing(path):
            write_text(path, text)

    def new_trace(self, arm: str) -> Path:
        """Make and return the folder that a profile is written to before it is complete."""
        path = self.new_trace_folder(arm)
        with self._writing(path):
            path.mkdir()
        return path

    def log_file(self, phase: Phase) -> Path:
        """The server's output."""
        return self.folder / f"{phase.name}.log"

    def client_log(self, phase: Phase) -> Path:
        """The output of the stock benchmark programs."""
        return self.folder / f"{phase.name}.client.log"

    def measurements_file(self, phase: Phase) -> Path:
        """The phase's measurements, one JSON line each."""
        return self.folder / f"{phase.name}.jsonl"

    def gsm8k_file(self, phase: Phase) -> Path:
        """The phase's accuracy, one JSON line."""
        return self.folder / f"{phase.name}.gsm8k.json"

    def content_file(self, phase: Phase) -> Path:
        """The phase's content check, one JSON line."""
        return self.folder / f"{phase.name}.content.json"

    def trace_folder(self, arm: str) -> Path:
        """The arm's complete profile."""
        return self.folder / f"trace-{arm}"

    def new_trace_folder(self, arm: str) -> Path:
        """The arm's profile while it is being taken."""
        return self.folder / f"trace-{arm}.new"

    def _measured(self, phase: Phase) -> bool:
        path = self.measurements_file(phase)
        if not path.exists():
            return False
        try:
            found = [(row.shape, row.repeat) for row in read_measurements(path)]
        except ValueError:
            return False
        return found == [(shape, repeat) for shape in self.plan.shapes for repeat in range(self.plan.repeats)]

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunFailed(f"cannot write {path}: {error.strerror or error}. Every earlier line is kept") from None


def append_line(path: Path, text: str) -> None:
    """Append one line and force it to disk. On ``OSError`` the file is cut back to its earlier whole lines."""
    data = text.encode() + b"\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        length = os.fstat(descriptor).st_size
        try:
            while data:
                data = data[os.write(descriptor, data) :]
            os.fsync(descriptor)
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, length)
            raise
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a whole file by way of a sibling, so that ``path`` never holds half of it."""
    sibling = path.with_name(path.name + ".new")
    sibling.unlink(missing_ok=True)
    try:
        append_line(sibling, text.rstrip("\n"))
        sibling.replace(path)
    except OSError:
        with suppress(OSError):
            sibling.unlink()
        raise


def set_aside(path: Path) -> Path | None:
    """Rename ``path`` to the first free ``<name>.partial-<n>``; returns the new path, None when there was nothing."""
    if not path.exists():
        return None
    number = 1
    while (kept := path.with_name(f"{path.name}.partial-{number}")).exists():
        number += 1
    return path.rename(kept)
