"""The python that will run the server: what is installed there, found by one short child process."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_gdn_zerocopy.bench.measurement import Environment
from sglang_gdn_zerocopy.cli.errors import CommandError
from sglang_gdn_zerocopy.settings import child_environment

SIMULATED_ACCEPTANCE = "SGLANG_SIMULATE_ACC_LEN"
_PROBE = Path(__file__).with_name("target_probe.py")
_PROBE_TIMEOUT_S = 120


@dataclass(frozen=True)
class Tool:
    """A stock program: the module to run with ``-m`` and the flags that it declares itself."""

    module: str
    flags: frozenset[str]


@dataclass(frozen=True)
class Target:
    """What the target python has. ``overlay`` is "none" when the overlay is not installed there; ``gsm8k`` is None
    when the release has no few-shot GSM8K program."""

    python: str
    release: str
    torch: str
    triton: str
    overlay: str
    gpu: str
    driver: str
    benchmark: Tool
    gsm8k: Tool | None

    def environment(self, server_args: Sequence[str], seed: int) -> Environment:
        """The record that every measurement carries.

        Raises ``CommandError`` when SGLANG_SIMULATE_ACC_LEN is set to something that is not a number.
        """
        return Environment(
            release=self.release,
            torch=self.torch,
            triton=self.triton,
            gpu=self.gpu,
            driver=self.driver,
            overlay=self.overlay,
            server_args=tuple(server_args),
            seed=seed,
            simulated_acceptance=_simulated_acceptance(),
        )


def probe(python: str) -> Target:
    """Look into ``python``. Raises ``CommandError`` when it does not start or holds no SGLang with its benchmark."""
    command = [python, "-c", _PROBE.read_text(encoding="utf-8")]
    try:
        child = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            env=child_environment(),
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandError(f"--python {python!r} cannot be run: {error}") from None
    lines = child.stdout.splitlines()
    if child.returncode != 0 or not lines:
        last = (child.stderr.strip().splitlines() or ["no output"])[-1]
        raise CommandError(f"--python {python!r} failed with exit code {child.returncode}: {last}")
    answer = json.loads(lines[-1])
    if answer["package"] is None or answer["release"] == "none":
        raise CommandError(f"{python!r} has no SGLang: give the python of your server's environment with --python")
    if answer["benchmark"] is None:
        raise CommandError(f"SGLang {answer['release']} in {answer['package']} has no one-batch benchmark module")
    return Target(
        python=python,
        release=answer["release"],
        torch=answer["torch"],
        triton=answer["triton"],
        overlay=answer["overlay"],
        gpu=answer["gpu"],
        driver=answer["driver"],
        benchmark=Tool(answer["benchmark"]["module"], frozenset(answer["benchmark"]["flags"])),
        gsm8k=Tool(answer["gsm8k"]["module"], frozenset(answer["gsm8k"]["flags"])) if answer["gsm8k"] else None,
    )


def _simulated_acceptance() -> float | None:
    text = child_environment().get(SIMULATED_ACCEPTANCE, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise CommandError(
            f"{SIMULATED_ACCEPTANCE}={text!r} is not a number: unset it or give tokens per pass"
        ) from None
    # Stock reads zero and below as "acceptance is real".
    return value if value > 0 else None
