"""Constructed runs of `ab` for the tests of `report`. No number here was measured."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from sglang_gdn_zerocopy.bench.measurement import ARMS, Environment, Measurement, Shape
from sglang_gdn_zerocopy.bench.schedule import Plan

SMALL = Shape(256, 256, 1)
LARGE = Shape(256, 256, 64)
LIVE = (
    "GDN zero-copy installed (pid 71): SGLang 0.5.17, stock",
    "GDN zero-copy live (pid 71): fold ring target verify -> views: triton reads packed QKV through views, no copy",
)
UPSTREAM = ("GDN zero-copy live (pid 71): snapshots target verify -> upstream: flashinfer needs contiguous inputs",)
ENVIRONMENT = Environment(
    release="0.5.17",
    torch="2.11.0+cu130",
    triton="3.6.0",
    gpu="NVIDIA H200",
    driver="580.95",
    overlay="0.1.0",
    server_args=("--speculative-algorithm", "NEXTN", "--enable-linear-replayssm-spec"),
    seed=7,
    simulated_acceptance=2.0,
)

Speed = Callable[[str, int, int], float]


def measurement(
    arm: str,
    pair: int,
    repeat: int,
    throughput: float,
    *,
    shape: Shape = LARGE,
    acceptance: float | None = 2.0,
    statements: Sequence[str] | None = None,
    environment: Environment = ENVIRONMENT,
) -> Measurement:
    """One measurement; the on-arm is live unless ``statements`` says otherwise."""
    said = statements if statements is not None else (LIVE if arm == "on" else ())
    tokens = shape.batch_size * shape.output_len
    return Measurement(
        arm=arm,
        pair=pair,
        phase=2 * pair + ARMS.index(arm),
        shape=shape,
        repeat=repeat,
        latency_s=tokens / throughput + 0.05,
        output_throughput=throughput,
        overall_throughput=2 * throughput,
        acceptance_length=acceptance,
        environment=environment,
        statements=tuple(said),
    )


def run_of(speed: Speed, *, pairs: int = 2, repeats: int = 5, shape: Shape = LARGE) -> list[Measurement]:
    """A complete run: ``speed(arm, pair, repeat)`` in output tokens per second."""
    return [
        measurement(arm, pair, repeat, speed(arm, pair, repeat), shape=shape)
        for pair in range(pairs)
        for arm in ARMS
        for repeat in range(repeats)
    ]


def noisy(base: float, gain: float, noise: float, seed: int) -> Speed:
    """Normal noise around ``base`` and, for the on-arm, ``base * (1 + gain)``; ``noise`` is relative."""
    source = random.Random(seed)
    drawn: dict[tuple[str, int, int], float] = {}

    def speed(arm: str, pair: int, repeat: int) -> float:
        key = (arm, pair, repeat)
        if key not in drawn:
            drawn[key] = base * (1 + (gain if arm == "on" else 0)) * (1 + source.gauss(0, noise))
        return drawn[key]

    return speed


def steady(gain: float = 0.02, noise: float = 0.002) -> list[Measurement]:
    """A clean run of two shapes in which the on-arm is faster by ``gain`` and nothing depends on the server start."""
    offsets = (0.3, -1.0, 0.5, 1.0, -0.8)

    def speed(base: float) -> Speed:
        def at(arm: str, pair: int, repeat: int) -> float:
            # Both arms share no offset at the same repeat, and the two pairs have the same ones.
            offset = offsets[repeat] if arm == "off" else offsets[(repeat + 2) % 5]
            return base * (1 + (gain if arm == "on" else 0)) * (1 + noise * offset)

        return at

    return [*run_of(speed(300.0), shape=SMALL), *run_of(speed(14_000.0), shape=LARGE)]


def change_where(
    rows: Sequence[Measurement], which: Callable[[Measurement], bool], **changes: object
) -> list[Measurement]:
    """``rows`` with ``changes`` made to those that ``which`` picks."""
    return [replace(row, **changes) if which(row) else row for row in rows]  # type: ignore[arg-type]  # field names by keyword


def plan_of(rows: Sequence[Measurement], **changes: object) -> dict[str, object]:
    """The plan.json that a complete run of ``rows`` has, with ``changes``."""
    plan = Plan(
        model="m",
        arms=ARMS,
        pairs=len({row.pair for row in rows}),
        order="abab",
        shapes=tuple(sorted({row.shape for row in rows})),
        warmup=1,
        repeats=len({row.repeat for row in rows}),
        trace=False,
        gsm8k=None,
        external=False,
        environment=rows[0].environment,
    )
    return {**json.loads(json.dumps(plan.to_dict())), **changes}


def write(rows: Sequence[Measurement], folder: Path) -> Path:
    """One file per phase, as `ab` names them. Returns ``folder``."""
    for phase, arm in sorted({(row.phase, row.arm) for row in rows}):
        lines = [row.to_json() for row in rows if row.phase == phase]
        (folder / f"phase-{phase}-{arm}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
