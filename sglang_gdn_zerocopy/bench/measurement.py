"""The record that `ab` writes and `report` reads: one JSON line per timed repeat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

ARMS = ("off", "on")


class Shape(NamedTuple):
    """One benchmark shape; lengths in tokens, ``batch_size`` in requests."""

    input_len: int
    output_len: int
    batch_size: int

    @property
    def label(self) -> str:
        """As the user types it: ``input:output:batch``."""
        return f"{self.input_len}:{self.output_len}:{self.batch_size}"


@dataclass(frozen=True)
class Environment:
    """Where a measurement was made. ``seed`` feeds the client's prompts; ``server_args`` is what the server was
    started with; ``simulated_acceptance`` is SGLANG_SIMULATE_ACC_LEN, or None when acceptance was real."""

    release: str
    torch: str
    triton: str
    gpu: str
    driver: str
    overlay: str
    server_args: tuple[str, ...]
    seed: int
    simulated_acceptance: float | None = None


@dataclass(frozen=True)
class Measurement:
    """One timed repeat of one shape in one phase.

    ``pair`` counts the off/on pairs from 0, ``phase`` all server starts from 0. ``latency_s`` is the time of the
    whole batch, ``output_throughput`` and ``overall_throughput`` are tokens per second, ``acceptance_length`` is
    tokens per verify pass in this run (None when the server gave none, see :mod:`.acceptance`).
    ``statements`` are the overlay's own lines in the server's log (empty in the off arm).
    """

    arm: str
    pair: int
    phase: int
    shape: Shape
    repeat: int
    latency_s: float
    output_throughput: float
    overall_throughput: float
    acceptance_length: float | None
    environment: Environment
    statements: tuple[str, ...] = field(default=())

    def to_json(self) -> str:
        """One line, without the newline."""
        return json.dumps({"schema": 1, **asdict(self), "shape": self.shape._asdict()}, sort_keys=True)


def from_json(text: str) -> Measurement:
    """The measurement in one line. Raises ``ValueError`` naming what is wrong with it."""
    try:
        data: dict[str, Any] = json.loads(text)
        schema = data.pop("schema")
        if schema != 1:
            raise ValueError(f"schema {schema!r} is not 1")
        environment = data.pop("environment")
        environment["server_args"] = tuple(environment["server_args"])
        return Measurement(
            **{
                **data,
                "shape": Shape(**data["shape"]),
                "statements": tuple(data["statements"]),
                "environment": Environment(**environment),
            }
        )
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"not a measurement: {error}") from None


def read_measurements(path: Path) -> Iterator[Measurement]:
    """All measurements of one file. Raises ``ValueError`` with the file and line of the first bad one."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                yield from_json(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
