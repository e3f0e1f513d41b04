"""What a run measures, in which order: a plan is data and a resumed run must have an equal one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from sglang_gdn_zerocopy.bench.measurement import ARMS, Environment, Shape

ORDERS = ("abab", "abba")


@dataclass(frozen=True)
class Gsm8k:
    """The accuracy arm: the user's question file, by its SHA-256, and the stock program's settings."""

    sha256: str
    questions: int
    shots: int
    max_new_tokens: int
    parallel: int
    temperature: float = 0.0


class Phase(NamedTuple):
    """One server start. ``number`` counts from 0; ``last_of_arm`` marks the arm's last phase, which is profiled."""

    number: int
    pair: int
    arm: str
    last_of_arm: bool

    @property
    def name(self) -> str:
        """The stem of the phase's files."""
        return f"phase-{self.number}-{self.arm}"


@dataclass(frozen=True)
class Plan:
    """Everything that must be equal for two runs to be parts of one.

    ``order`` "abab" starts every pair with the first arm, "abba" turns every second pair round. ``external``: the
    user started the server. ``warmup`` and ``repeats`` are benchmark runs per shape and phase.
    """

    model: str
    arms: tuple[str, ...]
    pairs: int
    order: str
    shapes: tuple[Shape, ...]
    warmup: int
    repeats: int
    trace: bool
    gsm8k: Gsm8k | None
    external: bool
    environment: Environment

    def phases(self) -> tuple[Phase, ...]:
        """All server starts in order."""
        order = [
            (pair, arm)
            for pair in range(self.pairs)
            for arm in (self.arms[::-1] if self.order == "abba" and pair % 2 else self.arms)
        ]
        last = {arm: number for number, (_, arm) in enumerate(order)}
        return tuple(Phase(number, pair, arm, last[arm] == number) for number, (pair, arm) in enumerate(order))

    @property
    def traced_shape(self) -> Shape:
        """The shape that is profiled: the largest batch, and of those the shortest prompts.

        A profile covers a few forward passes from the first prefill on: long prompts would fill it with prefill.
        """
        return min(self.shapes, key=lambda shape: (-shape.batch_size, shape.input_len, shape.output_len))

    def to_dict(self) -> dict[str, Any]:
        """As it stands in ``plan.json``."""
        return {"schema": 1, **asdict(self), "shapes": [shape.label for shape in self.shapes]}


class Planned(NamedTuple):
    """What a ``plan.json`` promises, as far as a report can miss it."""

    arms: tuple[str, ...]
    pairs: int
    shapes: tuple[Shape, ...]
    repeats: int
    gsm8k: bool


def planned(data: dict[str, Any]) -> Planned:
    """What :meth:`Plan.to_dict` promised. Raises ``KeyError``, ``TypeError`` or ``ValueError`` when it is no plan."""
    if data["schema"] != 1:
        raise ValueError(f"schema {data['schema']!r} is not 1")
    shapes = tuple(Shape(*map(int, label.split(":"))) for label in data["shapes"])
    found = Planned(tuple(data["arms"]), data["pairs"], shapes, data["repeats"], data["gsm8k"] is not None)
    counts = (found.pairs, found.repeats)
    if not shapes or not set(found.arms) <= set(ARMS) or not all(type(n) is int and n > 0 for n in counts):
        raise ValueError("its arms, pairs, shapes or repeats are none")
    return found


def differences(there: dict[str, Any], here: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """One text for every value in which two plans differ, nested names joined by a dot."""
    for name in sorted({*there, *here}):
        old, new = there.get(name), here.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from differences(old, new, f"{prefix}{name}.")
        elif old != new:
            yield f"{prefix}{name} is {old!r} there and {new!r} here"
