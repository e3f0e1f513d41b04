"""Runs releases through their cases, each release in a worker process, and collects the results."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from sglang_gdn_zerocopy.lab.results import CaseResult
from sglang_gdn_zerocopy.lab.wheels import LabError, StockTree
from sglang_gdn_zerocopy.records import Route, Verdict
from sglang_gdn_zerocopy.settings import SWITCH, UNVERIFIED, child_environment

_FUSED = (Route.FUSED_CONV.value, Route.BUNDLED.value)


@dataclass(frozen=True)
class Outcome(CaseResult):
    """A case's result, judged."""

    ok: bool


@dataclass(frozen=True)
class ReleaseRun:
    """All cases of one release, with what they ran on."""

    version: str
    verdict: str
    reason: str
    wheel: str
    sha256: str
    torch: str
    triton: str
    gpu: str
    device: str
    seed: int
    stand_ins: tuple[str, ...]
    outcomes: tuple[Outcome, ...]

    @property
    def ok(self) -> bool:
        """Whether every case holds."""
        return all(outcome.ok for outcome in self.outcomes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "ok": self.ok}


def judge(result: dict[str, Any], verdict: str) -> Outcome:
    """A case holds when all bits are equal and the launches are those of its route.

    The fused conv: one launch a layer where stock makes two or three (without a model one or two), no copy. Views: the
    copy is gone. Upstream, and a release on which the overlay patches nothing: as before.
    """
    found = CaseResult(**result)
    before, after = found.launches_before, found.launches_after
    if verdict == Verdict.SUPPORTED.value and found.route in _FUSED:
        launches = before >= after >= found.layers and found.copies_after == 0
    elif verdict == Verdict.SUPPORTED.value and found.route == Route.VIEWS.value:
        launches = found.copies_before == found.layers == before - after and found.copies_after == 0
    else:
        launches = before == after and found.copies_before == found.copies_after == 0
        launches = launches and found.route in (verdict, Route.UPSTREAM.value)
    return Outcome(**result, ok=found.bits_equal and launches)


def run_release(
    tree: StockTree | None, device: str, seed: int, progress: Callable[[int, int, str], None]
) -> ReleaseRun:
    """Run every case of ``tree``, or of the installed SGLang when it is None.

    ``progress`` is called with cases done, cases in all, and the last case's name. Raises :class:`LabError` when the
    worker stops early or does not support the release.
    """
    command = [sys.executable, "-m", "sglang_gdn_zerocopy.lab.worker", device, str(seed)]
    environment = {SWITCH.name: "1", UNVERIFIED.name: "0"}
    if tree is not None:
        command.append(str(tree.folder))
    if device == "cpu":
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    # A pipe that nobody reads until the end would stop a worker that warns a lot.
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=complaints, text=True, env=child_environment(**environment)
        ) as worker,
    ):
        assert worker.stdout is not None
        try:
            head: dict[str, Any] = {}
            outcomes: list[Outcome] = []
            for line in worker.stdout:
                message = _message(line)
                if "error" in message:
                    raise LabError(message["error"])
                if "result" in message:
                    outcomes.append(judge(message["result"], head["verdict"]))
                    progress(len(outcomes), head["cases"], outcomes[-1].case)
                elif message:
                    head = message
                    progress(0, head["cases"], "")
            worker.wait()
            complaints.seek(0)
            errors = complaints.read()
        except BaseException:
            worker.kill()
            raise
    if not head or len(outcomes) != head["cases"]:
        last = errors.strip().splitlines()[-1:] or ["it printed nothing"]
        name = f"sglang {tree.version}" if tree else "the installed sglang"
        raise LabError(f"the worker for {name} stopped after {len(outcomes)} cases: {last[0]}")
    return ReleaseRun(
        version=head["version"],
        verdict=head["verdict"],
        reason=head["reason"],
        wheel=tree.wheel if tree else "",
        sha256=tree.sha256 if tree else "",
        torch=head["torch"],
        triton=head["triton"],
        gpu=head["gpu"],
        device=device,
        seed=seed,
        stand_ins=tuple(head["stand_ins"]),
        outcomes=tuple(outcomes),
    )


def _message(line: str) -> dict[str, Any]:
    """A worker's JSON line; anything else on its standard output (a library's chatter) is an empty message."""
    try:
        message = json.loads(line)
    except json.JSONDecodeError:
        return {}
    return message if isinstance(message, dict) else {}
