"""The content check: a few fixed prompts to a server whose timed runs are over, and what its answers look like.

Speed alone cannot tell an answer from a stream of one repeated mark. The check judges no text by its words, and no
difference between two texts: it looks for answers that are empty, that repeat a handful of tokens, or whose
log-probabilities are no numbers.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sglang_gdn_zerocopy.bench.client import Refused, generate

PROMPTS = (
    "The capital of France is",
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Translate into German: The train to the coast leaves at half past nine.",
    "Once upon a time, in a village by the sea, there lived",
    "List five animals and say where each of them lives.",
)
MAX_NEW_TOKENS = 64
# An answer of at least MIN_TOKENS tokens with a smaller share of distinct ones is degenerate. A model that repeats a
# sentence of six words stays above it; one that repeats a mark, or a phrase of five tokens, does not.
MIN_DISTINCT = 0.08
MIN_TOKENS = 16
# A phase is degenerate when at least this share of its answers is.
DEGENERATE_SHARE = 0.5


@dataclass(frozen=True)
class Answer:
    """One prompt's answer. ``distinct`` is the share of distinct tokens; ``logprobs`` and ``finite`` count the
    log-probabilities and those that are numbers (None when the server gives none); ``error`` is the server's refusal.
    """

    prompt: str
    text: str
    tokens: int
    distinct: float
    logprobs: int | None
    finite: int | None
    error: str | None

    @property
    def degenerate(self) -> bool:
        """Whether nothing sensible was said, whatever the model."""
        repeats = self.tokens >= MIN_TOKENS and self.distinct < MIN_DISTINCT
        return self.error is not None or not self.text.strip() or repeats or self.finite != self.logprobs


@dataclass(frozen=True)
class Content:
    """The answers of one phase's server, in the order of the prompts."""

    arm: str
    pair: int
    phase: int
    answers: tuple[Answer, ...]

    @property
    def bad(self) -> int:
        """How many answers are degenerate."""
        return sum(answer.degenerate for answer in self.answers)

    @property
    def degenerate(self) -> bool:
        """Whether so many answers are that the phase is."""
        return self.bad >= DEGENERATE_SHARE * len(self.answers)

    @property
    def finite(self) -> tuple[int, int] | None:
        """Finite log-probabilities and all, None when the server gave none."""
        given = [(a.finite, a.logprobs) for a in self.answers if a.finite is not None and a.logprobs is not None]
        return (sum(finite for finite, _ in given), sum(count for _, count in given)) if given else None

    def summary(self) -> str:
        """One clause for people."""
        shares = [answer.distinct for answer in self.answers if answer.error is None] or [0.0]
        finite = "no logprobs given" if self.finite is None else "{} of {} logprobs finite".format(*self.finite)
        return (
            f"{len(self.answers)} answers, {self.bad} degenerate, distinct tokens {statistics.median(shares):.0%} "
            f"(lowest {min(shares):.0%}), {finite}"
        )

    def to_json(self) -> str:
        """One line, without the newline."""
        return json.dumps({"schema": 1, **asdict(self)}, sort_keys=True)


def from_dict(data: Mapping[str, Any]) -> Content:
    """The inverse of :meth:`Content.to_json`. Raises ``KeyError``, ``TypeError`` or ``ValueError``."""
    if data["schema"] != 1:
        raise ValueError(f"schema {data['schema']!r} is not 1")
    answers = tuple(Answer(**answer) for answer in data["answers"])
    found = Content(data["arm"], data["pair"], data["phase"], answers)
    numbers = [(answer.tokens, answer.distinct, answer.logprobs or 0, answer.finite or 0) for answer in answers]
    if not answers or not all(math.isfinite(number) and number >= 0 for row in numbers for number in row):
        raise ValueError("no answers, or one with a count that is no number")
    return found


def ask(base_url: str) -> tuple[Answer, ...]:
    """Every prompt's answer. Raises ``OSError`` when the server cannot be reached; a refusal is an answer."""
    return tuple(_answer(base_url, prompt) for prompt in PROMPTS)


def _answer(base_url: str, prompt: str) -> Answer:
    try:
        plain = generate(base_url, prompt, MAX_NEW_TOKENS, logprobs=False)
    except Refused as error:
        return Answer(prompt, "", 0, 0.0, None, None, str(error))
    text = plain.get("text")
    text = text if isinstance(text, str) else ""
    ids = plain.get("output_ids") or text.split()
    try:
        values = _logprobs(generate(base_url, prompt, MAX_NEW_TOKENS, logprobs=True))
    except Refused:
        # Some draft methods do without.
        values = None
    return Answer(
        prompt=prompt,
        text=text,
        tokens=len(ids),
        distinct=len(set(ids)) / len(ids) if ids else 0.0,
        logprobs=None if values is None else len(values),
        finite=None if values is None else sum(isinstance(v, (int, float)) and math.isfinite(v) for v in values),
        error=None,
    )


def _logprobs(answer: Mapping[str, Any]) -> list[object] | None:
    """The log-probabilities of the output tokens; a NaN may come as null."""
    meta = answer.get("meta_info")
    rows = meta.get("output_token_logprobs") if isinstance(meta, dict) else None
    return [row[0] for row in rows] if isinstance(rows, list) and rows else None
