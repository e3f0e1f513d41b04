"""Carries out a plan: for every phase a server, then its measurements, accuracy run, profile and content check."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Hashable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from sglang_gdn_zerocopy.bench import content
from sglang_gdn_zerocopy.bench import server as servers
from sglang_gdn_zerocopy.bench.benchmark import Client, Row
from sglang_gdn_zerocopy.bench.client import healthy, port_is_free
from sglang_gdn_zerocopy.bench.content import Content
from sglang_gdn_zerocopy.bench.errors import RunFailed
from sglang_gdn_zerocopy.bench.measurement import Measurement, Shape
from sglang_gdn_zerocopy.bench.progress import Estimate, Progress
from sglang_gdn_zerocopy.bench.schedule import Phase, Plan
from sglang_gdn_zerocopy.bench.server import Server
from sglang_gdn_zerocopy.bench.store import Step, Store
from sglang_gdn_zerocopy.bench.supervisor import Supervisor
from sglang_gdn_zerocopy.bench.target import Target

# A phase and what it still needs.
Todo = tuple[Phase, tuple[Step, ...]]


@dataclass(frozen=True)
class Means:
    """How a plan is carried out on this machine; none of it changes what is measured.

    ``base_url`` and ``server_log`` belong to a server that the user started. ``gsm8k_file`` is the plan's question
    file, ``trace_steps`` the forward passes in a profile. Times are seconds.
    """

    target: Target
    port: int
    base_url: str | None
    server_log: Path | None
    gsm8k_file: Path | None
    trace_steps: int
    startup_timeout_s: float
    cooldown_s: float


def pending(store: Store) -> list[Todo]:
    """The phases that still need something, with what they need."""
    todo = ((phase, store.missing(phase)) for phase in store.plan.phases())
    return [(phase, steps) for phase, steps in todo if steps]


def port_line(port: int) -> str:
    """What to say about a port that somebody listens on."""
    return (
        f"port {port} on {servers.HOST} is taken: stop what listens there (a server of an earlier run?) or give "
        "another --port"
    )


class Runner:
    """One run of one plan. Raises ``RunFailed``; all files that were complete stay as they are."""

    def __init__(self, store: Store, means: Means, supervisor: Supervisor, progress: Progress) -> None:
        self._store = store
        self._plan: Plan = store.plan
        self._means = means
        self._supervisor = supervisor
        self._progress = progress
        self._estimate = Estimate({})

    def run(self, todo: list[Todo]) -> None:
        """Carry out ``todo`` in order. A failed profile is said and does not stop the run."""
        self._estimate = Estimate(self._work(todo))
        for number, (phase, steps) in enumerate(todo):
            if number and self._means.cooldown_s:
                self._progress.say(f"cool-down for {self._means.cooldown_s:g} s")
                time.sleep(self._means.cooldown_s)
            self._phase(phase, steps)

    def _work(self, todo: Iterable[Todo]) -> Counter[Hashable]:
        work: Counter[Hashable] = Counter()
        for _, steps in todo:
            work["start"] += 1
            if Step.MEASURE in steps:
                work.update(dict.fromkeys(self._plan.shapes, self._plan.warmup + self._plan.repeats))
            extra = {*steps, Step.CONTENT} if Step.MEASURE in steps else set(steps)
            work.update(step for step in extra if step is not Step.MEASURE)
        return work

    def _phase(self, phase: Phase, steps: tuple[Step, ...]) -> None:
        self._store.prepare(phase, steps)
        self._begin(phase, "server start")
        server = self._server(phase)
        self._end(phase, "server start", "start", "")
        try:
            client = Client(
                self._means.target,
                self._supervisor,
                server,
                self._store.client_log(phase),
                self._plan.environment.seed,
                # The path that somebody else's server reports need not exist here.
                self._plan.model if self._plan.external else None,
            )
            if Step.MEASURE in steps:
                for shape in self._plan.shapes:
                    self._measure(phase, shape, server, client)
            if Step.GSM8K in steps:
                self._accuracy(phase, client)
            if Step.TRACE in steps:
                self._trace(phase, client)
            if Step.CONTENT in self._store.missing(phase):
                self._content(phase, server)
        finally:
            if server.group is not None:
                self._supervisor.stop(server.group)

    def _server(self, phase: Phase) -> Server:
        means = self._means
        if means.base_url is not None:
            if not healthy(means.base_url):
                raise RunFailed(f"{means.base_url}/health does not answer 200: start the server first")
            return Server(means.base_url, means.server_log, None)
        if not port_is_free(servers.HOST, means.port):
            raise RunFailed(port_line(means.port))
        words = servers.command(means.target.python, self._plan.model, self._plan.environment.server_args, means.port)
        log = self._store.log_file(phase)
        return servers.start(self._supervisor, words, phase.arm, means.port, log, means.startup_timeout_s)

    def _measure(self, phase: Phase, shape: Shape, server: Server, client: Client) -> None:
        plan = self._plan
        names = [f"{shape.label} warm-up {number + 1}/{plan.warmup}" for number in range(plan.warmup)]
        names += [f"{shape.label} repeat {repeat + 1}/{plan.repeats}" for repeat in range(plan.repeats)]
        # The stock program spends many seconds on its imports. One process could make all runs of a shape, but it
        # draws new prompts for each, and with real drafts acceptance depends on the prompts: repeats would be none.
        per_process = 1 if plan.environment.simulated_acceptance is None else len(names)
        for first in range(0, len(names), per_process):
            runs = names[first : first + per_process]
            self._begin(phase, runs[0])
            with closing(client.one_batch(shape, len(runs), lambda n: f"{phase.name}, {runs[n]}")) as rows:  # noqa: B023 - used up in this turn
                for number, row in enumerate(rows):
                    repeat = first + number - plan.warmup
                    if repeat >= 0:
                        self._keep(phase, shape, repeat, row, server)
                    self._end(phase, runs[number], shape, _summary(row) if repeat >= 0 else "")
                    if number + 1 < len(runs):
                        self._begin(phase, runs[number + 1])

    def _keep(self, phase: Phase, shape: Shape, repeat: int, row: Row, server: Server) -> None:
        self._store.append(
            phase,
            Measurement(
                arm=phase.arm,
                pair=phase.pair,
                phase=phase.number,
                shape=shape,
                repeat=repeat,
                latency_s=row.latency_s,
                output_throughput=row.output_throughput,
                overall_throughput=row.overall_throughput,
                acceptance_length=row.acceptance_length,
                environment=self._plan.environment,
                statements=server.statements(),
            ),
        )

    def _accuracy(self, phase: Phase, client: Client) -> None:
        settings, file = self._plan.gsm8k, self._means.gsm8k_file
        assert settings is not None
        assert file is not None
        self._begin(phase, "GSM8K")
        accuracy = client.gsm8k(file, settings, phase, f"{phase.name}, GSM8K")
        self._store.write(self._store.gsm8k_file(phase), accuracy.to_json() + "\n")
        per_token = accuracy.time_per_output_token_s
        self._end(
            phase,
            "GSM8K",
            Step.GSM8K,
            f"accuracy {accuracy.accuracy:.3f}, {accuracy.output_throughput:.1f} tok/s, "
            + (f"{per_token * 1e3:.2f} ms per token" if per_token else "no time per token (no --enable-metrics)"),
        )

    def _trace(self, phase: Phase, client: Client) -> None:
        shape = self._plan.traced_shape
        what = f"{shape.label} profile"
        self._begin(phase, what)
        try:
            folder = self._store.new_trace(phase.arm)
            client.profile(shape, folder.resolve(), self._means.trace_steps, f"{phase.name}, {what}")
            folder.rename(self._store.trace_folder(phase.arm))
        except (RunFailed, OSError) as error:
            # The timed shapes are done and on disk: a profiler's trouble must not cost them.
            self._progress.say(f"no profile of arm {phase.arm}: {error}")
        self._end(phase, what, Step.TRACE, "")

    def _content(self, phase: Phase, server: Server) -> None:
        self._begin(phase, "content check")
        try:
            found = Content(phase.arm, phase.pair, phase.number, content.ask(server.base_url))
        except OSError as error:
            # As with a profile: the check comes late so that its trouble costs nothing that was measured.
            self._progress.say(f"no content check of {phase.name}: {error}")
            self._end(phase, "content check", Step.CONTENT, "")
            return
        self._store.write(self._store.content_file(phase), found.to_json() + "\n")
        self._end(phase, "content check", Step.CONTENT, found.summary())

    def _begin(self, phase: Phase, what: str) -> None:
        self._estimate.begin()
        self._progress.doing(self._label(phase, what), self._estimate)

    def _end(self, phase: Phase, what: str, kind: Hashable, result: str) -> None:
        self._estimate.finish(kind)
        self._progress.done(self._label(phase, what), result, self._estimate)

    def _label(self, phase: Phase, what: str) -> str:
        return f"phase {phase.number + 1}/{len(self._plan.phases())} {phase.arm}  {what}"


def write_traces(store: Store) -> None:
    """Summarise the arms' profiles and their difference into ``traces.json``.

    Raises ``RunFailed`` when an arm's profile cannot be read or holds no verify pass.
    """
    from sglang_gdn_zerocopy.tracing import compare, files, reader, records

    answer: dict[str, object] = {"schema": 1, "shape": store.plan.traced_shape.label}
    try:
        paths = {arm: files.pick(_newest_profile(store, arm), rank=0) for arm in store.plan.arms}
        summaries = {arm: reader.summarise(path, which="verify") for arm, path in paths.items()}
        answer["files"] = {arm: str(path.relative_to(store.folder)) for arm, path in paths.items()}
        answer["summaries"] = {arm: dataclasses.asdict(summary) for arm, summary in summaries.items()}
        if set(summaries) == {"off", "on"}:
            answer["comparison"] = dataclasses.asdict(compare.compare(summaries["off"], summaries["on"]))
    except records.TraceError as error:
        raise RunFailed(
            f"the profiles tell nothing: {error}. To take them again, perhaps with more --trace-steps, remove "
            f"{store.folder}/trace-*"
        ) from None
    store.write(store.folder / "traces.json", json.dumps(answer, indent=2, sort_keys=True) + "\n")


def _newest_profile(store: Store, arm: str) -> Path:
    folder = store.trace_folder(arm)
    # Each profile lies in a folder of its own, named by the time.
    return max((path.parent for path in folder.rglob("*.trace.json.gz")), default=folder)


def _summary(row: Row) -> str:
    acceptance = "not stated" if row.acceptance_length is None else f"{row.acceptance_length:.2f}"
    return f"{row.output_throughput:.2f} tok/s, {row.latency_s:.3f} s, acceptance {acceptance}"
