"""The release's own programs as child processes: the one-batch benchmark, its profile, and few-shot GSM8K."""

from __future__ import annotations

import json
import math
import re
import tempfile
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from sglang_gdn_zerocopy.bench.client import inter_token_latency
from sglang_gdn_zerocopy.bench.errors import RunFailed
from sglang_gdn_zerocopy.bench.measurement import Shape
from sglang_gdn_zerocopy.bench.schedule import Gsm8k, Phase
from sglang_gdn_zerocopy.bench.server import Server
from sglang_gdn_zerocopy.bench.supervisor import Group, Supervisor, ending, tail
from sglang_gdn_zerocopy.bench.target import Target, Tool
from sglang_gdn_zerocopy.cli.errors import CommandError
from sglang_gdn_zerocopy.settings import SWITCH, child_environment

_POLL_S = 0.05
_TRACE_PATTERN = "*.trace.json.gz"
_TRACE_FLUSH_S = 180.0
_TRACE_STABLE_S = 2.0


class Option(NamedTuple):
    """One option of a stock program. An optional one is left out where the release does not know it."""

    flag: str
    values: tuple[str, ...] = ()
    optional: bool = False


@dataclass(frozen=True)
class Row:
    """One result row: seconds for the whole batch, tokens per second, tokens per verify pass (None when the server
    gave none)."""

    latency_s: float
    output_throughput: float
    overall_throughput: float
    acceptance_length: float | None


@dataclass(frozen=True)
class Accuracy:
    """One GSM8K run of one phase: shares of all questions, seconds for all, tokens per second over all requests, and
    the server's mean seconds between two tokens of a request (None when it exports no metrics)."""

    arm: str
    pair: int
    phase: int
    accuracy: float
    invalid: float
    latency_s: float
    output_throughput: float
    time_per_output_token_s: float | None
    settings: Gsm8k

    def to_json(self) -> str:
        """One line, without the newline."""
        return json.dumps({"schema": 1, **asdict(self)}, sort_keys=True)


def one_batch_options(
    shape: Shape, base_url: str, seed: int, result_file: Path, tokenizer: str | None, runs: int = 1
) -> list[Option]:
    """The options of ``runs`` benchmark runs in one process. ``tokenizer`` overrides the path that the server reports.

    Stock runs the batch sizes in the order given, equal ones too, and writes a row after each.
    """
    options = [
        Option("--base-url", (base_url,)),
        Option("--batch-size", (str(shape.batch_size),) * runs),
        Option("--input-len", (str(shape.input_len),)),
        Option("--output-len", (str(shape.output_len),)),
        Option("--temperature", ("0.0",)),
        Option("--seed", (str(seed),)),
        # Its own warm-up is 1024 tokens in and 16 out, not this shape: `ab` warms up with whole runs.
        Option("--skip-warmup"),
        Option("--result-filename", (str(result_file),)),
        # The default data set is fetched from the network.
        Option("--dataset-name", ("random-ids",), optional=True),
        Option("--no-append-to-github-summary", optional=True),
    ]
    if tokenizer is not None:
        options.append(Option("--local-tokenizer-path", (tokenizer,), optional=True))
    return options


def profile_options(folder: Path, steps: int) -> list[Option]:
    """The options that profile one more run, ``steps`` forward passes from its first prefill on."""
    return [
        Option("--profile"),
        Option("--profile-activities", ("CPU", "GPU")),
        Option("--profile-steps", (str(steps),)),
        Option("--profile-output-dir", (str(folder),)),
    ]


def gsm8k_options(file: Path, settings: Gsm8k, base_url: str) -> list[Option]:
    """The options of one GSM8K run against ``base_url``."""
    place = urlsplit(base_url)
    host = place.hostname or ""
    port = place.port or (443 if place.scheme == "https" else 80)
    return [
        Option("--data-path", (str(file),)),
        Option("--num-questions", (str(settings.questions),)),
        Option("--num-shots", (str(settings.shots),)),
        Option("--max-new-tokens", (str(settings.max_new_tokens),)),
        Option("--parallel", (str(settings.parallel),)),
        Option("--temperature", (str(settings.temperature),)),
        Option("--host", (f"https://{host}" if place.scheme == "https" else host,)),
        Option("--port", (str(port),)),
    ]


def left_out(tool: Tool, options: Iterable[Option]) -> tuple[str, ...]:
    """The optional flags that the release's program lacks. Raises ``CommandError`` when it lacks a needed one."""
    missing = [option for option in options if option.flag not in tool.flags]
    needed = [option.flag for option in missing if not option.optional]
    if needed:
        raise CommandError(f"{tool.module} of this release has no {', '.join(needed)}: `ab` cannot drive it")
    return tuple(option.flag for option in missing)


def arguments(tool: Tool, options: Iterable[Option]) -> list[str]:
    """The program's command line without the python, in what the release knows."""
    known = [option for option in options if option.flag in tool.flags]
    return ["-m", tool.module, *(word for option in known for word in (option.flag, *option.values))]


class Client:
    """Runs the stock programs of one target against one server, their output appended to ``log``.

    Every method raises ``RunFailed`` with the last lines of the server or of the program when one of them ends badly.
    """

    def __init__(
        self, target: Target, supervisor: Supervisor, server: Server, log: Path, seed: int, tokenizer: str | None
    ) -> None:
        self._target = target
        self._supervisor = supervisor
        self._server = server
        self._log = log
        self._seed = seed
        self._tokenizer = tokenizer

    def one_batch(self, shape: Shape, runs: int, doing: Callable[[int], str]) -> Generator[Row, None, None]:
        """``runs`` benchmark runs of ``shape`` in one process, each row as soon as it is there.

        ``doing`` names the run with the given number, from 0. The last row comes when the process has ended well.
        """
        with tempfile.TemporaryDirectory(prefix="gdn-zerocopy-") as folder:
            # Stock appends to the file: a fresh one has this process's rows alone.
            result_file = Path(folder) / "result.jsonl"
            group = self._start(self._words(shape, result_file, [], runs), self._log, None)
            found = 0
            try:
                while True:
                    status = group.exit_status()
                    lines = whole_lines(result_file)
                    for line in lines[found : runs if status == 0 else runs - 1]:
                        yield self._row(line, shape, doing(found))
                        found += 1
                    if status is not None:
                        break
                    # A dead server can leave its client waiting for the rest of a stream.
                    self._server.check(doing(found))
                    time.sleep(_POLL_S)
            finally:
                self._supervisor.stop(group)
            what = doing(min(found, runs - 1))
            self._check_ending(status, self._log, what)
            if len(lines) != runs:
                said = f"the benchmark wrote {len(lines)} result rows instead of {'one' if runs == 1 else runs}"
                raise RunFailed(f"{what}: {said}; last lines of {self._log}:\n{tail(self._log)}")

    def profile(self, shape: Shape, folder: Path, steps: int, doing: str) -> None:
        """One profiled run of ``shape``; returns when the server has written its traces under ``folder``."""
        with tempfile.TemporaryDirectory(prefix="gdn-zerocopy-") as work:
            words = self._words(shape, Path(work) / "result.jsonl", profile_options(folder, steps), runs=1)
            self._run(words, self._log, doing, None)
        sizes: dict[Path, int] = {}
        deadline = time.monotonic() + _TRACE_FLUSH_S
        while time.monotonic() < deadline:
            before, sizes = sizes, {path: path.stat().st_size for path in folder.rglob(_TRACE_PATTERN)}
            if sizes and sizes == before:
                return
            self._server.check(doing)
            time.sleep(_TRACE_STABLE_S)
        raise RunFailed(
            f"{doing}: no complete {_TRACE_PATTERN} in {folder} after {_TRACE_FLUSH_S:g} s; is the server on another "
            f"machine, or did its profiler fail? Last lines of {self._log}:\n{tail(self._log)}"
        )

    def gsm8k(self, file: Path, settings: Gsm8k, phase: Phase, doing: str) -> Accuracy:
        """One accuracy run."""
        tool = self._target.gsm8k
        if tool is None:
            raise RunFailed(f"{doing}: SGLang {self._target.release} has no few-shot GSM8K program")
        before = inter_token_latency(self._server.base_url)
        with tempfile.TemporaryDirectory(prefix="gdn-zerocopy-") as folder:
            # The program leaves its answers in the working directory.
            output = Path(folder) / "output.log"
            self._run(
                arguments(tool, gsm8k_options(file, settings, self._server.base_url)), output, doing, Path(folder)
            )
            text = output.read_text(encoding="utf-8", errors="replace")
        after = inter_token_latency(self._server.base_url)
        try:
            return Accuracy(
                arm=phase.arm,
                pair=phase.pair,
                phase=phase.number,
                accuracy=_printed("Accuracy", text),
                invalid=_printed("Invalid", text),
                latency_s=_printed("Latency", text),
                output_throughput=_printed("Output throughput", text),
                time_per_output_token_s=_mean_between(before, after),
                settings=settings,
            )
        except ValueError as error:
            raise RunFailed(f"{doing}: {error} in the output of {tool.module}:\n{text[-2000:]}") from None

    def _words(self, shape: Shape, result_file: Path, extra: list[Option], runs: int) -> list[str]:
        base = one_batch_options(shape, self._server.base_url, self._seed, result_file, self._tokenizer, runs)
        # The program has the server's parser too; with "None" it neither loads nor resolves a model of its own.
        return [*arguments(self._target.benchmark, [*base, *extra]), "--model", "None"]

    def _row(self, line: str, shape: Shape, doing: str) -> Row:
        try:
            return read_row(line, shape)
        except ValueError as error:
            raise RunFailed(f"{doing}: {error}; last lines of {self._log}:\n{tail(self._log)}") from None

    def _start(self, words: list[str], log: Path, cwd: Path | None) -> Group:
        # The program imports SGLang too; the switch is the server's alone.
        env = child_environment(**{SWITCH.name: "0"})
        return self._supervisor.start([self._target.python, *words], log, env, cwd)

    def _run(self, words: list[str], log: Path, doing: str, cwd: Path | None) -> None:
        group = self._start(words, log, cwd)
        try:
            while (status := group.exit_status()) is None:
                self._server.check(doing)
                time.sleep(_POLL_S)
        finally:
            self._supervisor.stop(group)
        self._check_ending(status, log, doing)

    def _check_ending(self, status: int, log: Path, doing: str) -> None:
        if status != 0:
            self._server.check(doing)
            raise RunFailed(f"{doing}: the benchmark ended with {ending(status)}; last lines of {log}:\n{tail(log)}")


def whole_lines(path: Path) -> list[str]:
    """The lines of a result file that is perhaps being written, without an unfinished last one."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n") and line.strip()]


def read_row(line: str, shape: Shape) -> Row:
    """One line of a result file. Raises ``ValueError`` when it is of another shape, or a figure is no figure."""
    try:
        data = json.loads(line)
        measured = Shape(data["input_len"], data["output_len"], data["batch_size"])
        if measured != shape:
            raise ValueError(f"it is of {measured.label}, not {shape.label}")
        latency = _positive(data, "latency")
        output = _positive(data, "output_throughput")
        overall = _positive(data, "overall_throughput")
        acceptance = float(data["acc_length"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the benchmark's result row is not understood ({error}): {line.strip()}") from None
    return Row(latency, output, overall, acceptance if acceptance > 0 else None)


def _positive(data: dict[str, object], name: str) -> float:
    value = float(str(data[name]))
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} is {value}")
    return value


def _printed(name: str, text: str) -> float:
    found = re.search(rf"^{name}: (\d+(?:\.\d+)?)", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"no line '{name}: <figure>'")
    return float(found[1])


def _mean_between(before: tuple[float, float] | None, after: tuple[float, float] | None) -> float | None:
    if after is None:
        return None
    total, count = (late - early for late, early in zip(after, before or (0.0, 0.0), strict=True))
    return total / count if count > 0 else None
