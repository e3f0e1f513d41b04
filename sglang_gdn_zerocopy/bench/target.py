"""The python that will run the server: what is installed there, found by one short child process."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sglang_gdn_zerocopy.bench.acceptance import option
from sglang_gdn_zerocopy.bench.measurement import Environment
from sglang_gdn_zerocopy.cli.errors import CommandError
from sglang_gdn_zerocopy.settings import child_environment

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
SIMULATED_ACCEPTANCE = "SGLANG_SIMULATE_ACC_LEN"
_PROBE = Path(__file__).with_name("target_probe.py")
_PROBE_TIMEOUT_S = 120


@dataclass(frozen=True)
class Tool:
    """A stock program: the module to run with ``-m`` and the flags that it declares itself."""

    module: str
    flags: frozenset[str]


class Gpu(NamedTuple):
    """One device, as nvidia-smi lists it."""

    uuid: str
    name: str
    driver: str


@dataclass(frozen=True)
class Target:
    """What the target python has, and the machine's GPUs in the order of their indices.

    ``overlay`` is "none" when the overlay is not installed there; ``gsm8k`` is None when the release has no few-shot
    GSM8K program.
    """

    python: str
    release: str
    torch: str
    triton: str
    overlay: str
    gpus: tuple[Gpu, ...]
    benchmark: Tool
    gsm8k: Tool | None

    def environment(self, server_args: Sequence[str], seed: int, *, external: bool = False) -> Environment:
        """The record that every measurement carries. Of an ``external`` server nobody knows which of the visible
        devices it takes: all are named.

        Raises ``CommandError`` when SGLANG_SIMULATE_ACC_LEN is set to something that is not a number.
        """
        seen = visible_gpus(self.gpus, child_environment().get(VISIBLE_DEVICES))
        return Environment(
            release=self.release,
            torch=self.torch,
            triton=self.triton,
            gpu=gpu_label(seen if external else used_gpus(seen, server_args)),
            driver=self.gpus[0].driver if self.gpus else "none",
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
        gpus=tuple(Gpu(*row) for row in answer["gpus"]),
        benchmark=Tool(answer["benchmark"]["module"], frozenset(answer["benchmark"]["flags"])),
        gsm8k=Tool(answer["gsm8k"]["module"], frozenset(answer["gsm8k"]["flags"])) if answer["gsm8k"] else None,
    )


def used_gpus(seen: Sequence[str], server_args: Sequence[str]) -> Sequence[str]:
    """Those of the visible devices that a server with these arguments takes."""
    count = 1
    for flags in (("--tp-size", "--tp", "--tensor-parallel-size"), ("--pp-size", "--pp", "--pipeline-parallel-size")):
        count *= _size(server_args, *flags)
    if "--enable-dp-attention" not in server_args:
        count *= _size(server_args, "--dp-size", "--dp", "--data-parallel-size")
    first = int(text) if (text := option(server_args, "--base-gpu-id") or "0").isdecimal() else 0
    # A server over several machines takes all that it finds here.
    return seen[first:][: count // min(count, _size(server_args, "--nnodes"))]


def visible_gpus(gpus: Sequence[Gpu], visible: str | None) -> list[str]:
    """Device names in CUDA's numbering. ``visible`` is CUDA_VISIBLE_DEVICES, None when it is not set; as in CUDA the
    first entry that names no device ends the list."""
    if visible is None:
        return [gpu.name for gpu in gpus]
    names: list[str] = []
    for entry in (word.strip() for word in visible.split(",")):
        if entry.startswith("MIG-"):
            names.append("a MIG slice")
            continue
        if entry.isdecimal():
            found = gpus[int(entry) : int(entry) + 1]
        else:
            found = [gpu for gpu in gpus if entry and gpu.uuid.startswith(entry)]
        if len(found) != 1:
            break
        names.append(found[0].name)
    return names


def _size(server_args: Sequence[str], *flags: str) -> int:
    text = option(server_args, *flags)
    return int(text) if text and text.isdecimal() and int(text) else 1


def gpu_label(names: Sequence[str]) -> str:
    """Device names for people, "none" without any."""
    return ", ".join(n if count == 1 else f"{count} x {n}" for n, count in Counter(names).items()) or "none"


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
