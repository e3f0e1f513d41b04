"""The parts of `ab` one by one: processes, files, schedule, rows, progress."""

from __future__ import annotations

import argparse
import builtins
import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_gdn_zerocopy.bench import benchmark, client, server
from sglang_gdn_zerocopy.bench.benchmark import Row, read_row, whole_lines
from sglang_gdn_zerocopy.bench.errors import RunFailed
from sglang_gdn_zerocopy.bench.flags import RENAMES, translate
from sglang_gdn_zerocopy.bench.measurement import Environment, Measurement, Shape, read_measurements
from sglang_gdn_zerocopy.bench.progress import BarProgress, Estimate, PlainProgress, time_left
from sglang_gdn_zerocopy.bench.schedule import Gsm8k, Phase, Plan, differences
from sglang_gdn_zerocopy.bench.store import Step, Store, append_line, set_aside, write_text
from sglang_gdn_zerocopy.bench.supervisor import Group, Supervisor, ending, tail
from sglang_gdn_zerocopy.cli import ab
from sglang_gdn_zerocopy.cli.errors import CommandError
from tests.bench import standin_server
from tests.bench.standin_server import alive, free_port, wait_for

ENVIRONMENT = Environment("0.5.17", "2.11.0", "3.6.0", "NVIDIA H200", "580", "0.1.0", ("--tp", "1"), 0)
PLAN = Plan("m", ("off", "on"), 2, "abab", (Shape(4, 8, 1), Shape(4, 8, 2)), 1, 2, False, None, False, ENVIRONMENT)


def measurement(phase: Phase, shape: Shape, repeat: int) -> Measurement:
    return Measurement(phase.arm, phase.pair, phase.number, shape, repeat, 1.0, 2.0, 3.0, 2.9, ENVIRONMENT)


# processes


def start_python(supervisor: Supervisor, log: Path, text: str) -> Group:
    return supervisor.start([sys.executable, "-u", "-c", text], log, os.environ)


def printed(log: Path) -> list[int]:
    wait_for(lambda: log.exists() and "\n" in log.read_text(), "output")
    return [int(word) for word in log.read_text().split()]


STUBBORN = (
    "import os, signal, subprocess, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print(os.getpid(), child.pid)\n"
)


def test_a_server_gets_the_time_to_end_by_itself(tmp_path: Path) -> None:
    log = tmp_path / "log"
    polite = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); print(1); time.sleep(600)"
    with Supervisor(grace_s=5) as supervisor:
        group = start_python(supervisor, log, polite)
        printed(log)
        supervisor.stop(group)
        assert group.exit_status() == 7


def test_a_group_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Supervisor(grace_s=0.3) as supervisor:
        group = start_python(supervisor, log, STUBBORN + "time.sleep(600)")
        pids = printed(log)
        started = time.monotonic()
        supervisor.stop(group)
        assert 0.3 <= time.monotonic() - started < 5
        assert not any(map(alive, pids))
        assert group.exit_status() == -signal.SIGKILL
        # A second stop has nothing to do and may not signal a group that took over the id.
        supervisor.stop(group)


def test_what_a_dead_leader_left_behind_is_killed_too(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Supervisor(grace_s=5) as supervisor:
        # SIGTERM is ignored by inheritance, so that only SIGKILL reaches the child.
        group = start_python(supervisor, log, STUBBORN + "raise SystemExit(3)")
        _, child = printed(log)
        wait_for(lambda: group.exit_status() is not None, "exit")
        assert group.exit_status() == 3
        assert alive(child)
        supervisor.stop(group)
        assert not alive(child)


def test_an_exception_leaves_nothing_and_only_own_processes_are_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with suppress(ZeroDivisionError), Supervisor(grace_s=0.2) as supervisor:
            start_python(supervisor, log, STUBBORN + "time.sleep(600)")
            pids = printed(log)
            assert all(map(alive, pids))
            raise ZeroDivisionError
        assert not any(map(alive, pids))
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_interrupts_and_later_ones_do_not_break_the_cleanup(
    tmp_path: Path, number: signal.Signals
) -> None:
    log = tmp_path / "log"
    # Under nohup the tests inherit an ignored SIGHUP, and what is ignored stays ignored.
    outside = signal.signal(number, signal.default_int_handler)
    try:
        _interrupted_twice(log, number)
    finally:
        signal.signal(number, outside)


def _interrupted_twice(log: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Supervisor(grace_s=0.5) as supervisor:
        start_python(supervisor, log, STUBBORN + "time.sleep(600)")
        pids = printed(log)
        # A user who presses Ctrl-C again while the server is being stopped.
        again = subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -{int(number)} {os.getpid()}"])
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert not any(map(alive, pids))
    # The second one came during the clean-up, while the handlers were still in place.
    assert again.wait() == 0
    assert signal.getsignal(number) == before


def test_a_signal_during_a_stop_is_raised_after_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Supervisor(grace_s=0.6) as supervisor:
        group = start_python(supervisor, log, STUBBORN + "time.sleep(600)")
        pids = printed(log)
        again = subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -INT {os.getpid()}"])
        with pytest.raises(KeyboardInterrupt):
            supervisor.stop(group)
        assert not any(map(alive, pids))
        again.wait()


def test_a_signal_that_the_parent_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Supervisor():
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    with Supervisor() as supervisor, pytest.raises(RunFailed, match=r"cannot start /no/such .*No such file"):
        supervisor.start(["/no/such"], tmp_path / "log", {})


def test_tail_shows_the_last_state_of_a_progress_bar(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"first\nCapturing 1%\rCapturing 2%\rCapturing 3%\n\n\xffbad\n")
    assert tail(log, 2) == "  Capturing 3%\n  �bad"
    assert tail(tmp_path / "none") == "  (no output)"


def test_endings_in_words() -> None:
    assert (ending(2), ending(-9), ending(-64)) == ("exit code 2", "signal 9 (SIGKILL)", "signal 64 (SIGRTMAX)")
    assert ending(-99) == "signal 99"


# files


def test_a_measurement_survives_a_full_disk_as_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows"
    append_line(path, "first")
    real = os.write

    def half_then_full(descriptor: int, data: bytes) -> int:
        if len(data) > 4:
            return real(descriptor, data[:4])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", half_then_full)
    with pytest.raises(OSError, match="No space left"):
        append_line(path, "second")
    assert path.read_text() == "first\n"
    with pytest.raises(OSError, match="No space left"):
        write_text(tmp_path / "whole", "text to write")
    assert sorted(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_the_kernels_own_disk_full_is_raised() -> None:
    with pytest.raises(OSError, match="No space left"):
        append_line(Path("/dev/full"), "line")


def test_set_aside_numbers_what_it_keeps(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for text in ("1", "2"):
        path.write_text(text)
        set_aside(path)
    assert set_aside(path) is None
    assert {kept.name: kept.read_text() for kept in tmp_path.iterdir()} == {
        "a.jsonl.partial-1": "1",
        "a.jsonl.partial-2": "2",
    }


def test_a_phase_is_measured_only_with_every_row_in_order(tmp_path: Path) -> None:
    there = Store(tmp_path / "out", PLAN)
    there.create()
    phase = PLAN.phases()[0]
    there.write(there.content_file(phase), "{}\n")
    rows = [measurement(phase, shape, repeat) for shape in PLAN.shapes for repeat in range(PLAN.repeats)]
    for row in rows[:-1]:
        assert there.missing(phase) == (Step.MEASURE,)
        there.append(phase, row)
    assert there.missing(phase) == (Step.MEASURE,)
    there.append(phase, rows[-1])
    assert there.missing(phase) == ()
    path = there.measurements_file(phase)
    path.write_text(path.read_text()[:-5])
    assert there.missing(phase) == (Step.MEASURE,)


def test_accuracy_and_profile_are_asked_for_on_their_own(tmp_path: Path) -> None:
    plan = replace(PLAN, shapes=PLAN.shapes[:1], repeats=1, trace=True, gsm8k=Gsm8k("", 1, 1, 1, 1))
    there = Store(tmp_path / "out", plan)
    there.create()
    first, last = plan.phases()[0], plan.phases()[2]
    assert there.missing(last) == (Step.MEASURE, Step.GSM8K, Step.TRACE, Step.CONTENT)
    assert there.missing(first) == (Step.MEASURE, Step.GSM8K, Step.CONTENT), (
        "the arm's profile belongs to its last phase"
    )
    for phase in (first, last):
        there.append(phase, measurement(phase, plan.shapes[0], 0))
        there.write(there.content_file(phase), "{}\n")
    assert there.missing(last) == (Step.GSM8K, Step.TRACE)
    there.write(there.gsm8k_file(last), "{}\n")
    assert there.missing(last) == (Step.TRACE,)
    there.trace_folder("off").mkdir()
    assert there.missing(last) == ()
    assert there.missing(first) == (Step.GSM8K,)
    there.prepare(last, (Step.TRACE,))
    assert there.measurements_file(last).exists()
    assert there.content_file(last).exists()
    there.prepare(last, (Step.MEASURE,))
    assert there.missing(last) == (Step.MEASURE, Step.CONTENT), "the check belongs to the server that was measured"


def test_a_folder_with_a_broken_plan_or_other_files_is_refused(tmp_path: Path) -> None:
    there = Store(tmp_path, PLAN)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CommandError, match="holds no run to resume"):
        there.check()
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(CommandError, match=r"plan\.json cannot be read"):
        there.check()
    (tmp_path / "plan.json").write_text("[]")
    with pytest.raises(CommandError, match="it is not an object"):
        there.check()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"order": "abba"}, "order is 'abab' there and 'abba' here"),
        ({"shapes": (Shape(4, 8, 9),)}, "shapes is ['4:8:1', '4:8:2'] there and ['4:8:9'] here"),
        ({"environment": replace(ENVIRONMENT, release="0.5.18")}, "environment.release is '0.5.17' there"),
        ({"environment": replace(ENVIRONMENT, simulated_acceptance=4.0)}, "environment.simulated_acceptance is None"),
    ],
)
def test_another_plan_is_refused_by_its_difference(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    Store(tmp_path / "out", PLAN).create()
    Store(tmp_path / "out", PLAN).check()
    with pytest.raises(CommandError) as caught:
        Store(tmp_path / "out", replace(PLAN, **change)).check()
    assert said in str(caught.value)


def test_differences_name_values_that_only_one_plan_has() -> None:
    assert list(differences({"a": 1, "c": {"d": 1}}, {"b": 2, "c": {"d": 2}})) == [
        "a is 1 there and None here",
        "b is None there and 2 here",
        "c.d is 1 there and 2 here",
    ]


def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *more: str, **control: object) -> argparse.Namespace:
    """Parsed arguments of a run of one phase in this process, its output in ``tmp_path / "out"``."""
    tree = tmp_path / "tree"
    standin_server.install(tree, "0.5.17", **control)
    monkeypatch.setenv("PYTHONPATH", str(tree))
    words = ["ab", "--model", "m", "--shapes", "4:8:1", "--repeats", "3", "--pairs", "1", "--arms", "off"]
    words += ["--out", str(tmp_path / "out"), "--port", str(free_port()), "--cooldown", "0"]
    parser = argparse.ArgumentParser()
    ab.add_parser(parser.add_subparsers())
    return parser.parse_args([*words, *more])


def test_a_failed_profile_costs_no_timings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = prepared(tmp_path, monkeypatch, "--trace", profile=False)
    monkeypatch.setattr(benchmark, "_TRACE_STABLE_S", 0.05)
    monkeypatch.setattr(benchmark, "_TRACE_FLUSH_S", 0.2)
    assert ab.run(args) == 1
    said = capsys.readouterr()
    assert "no profile of arm off: phase-0-off, 4:8:1 profile: no complete *.trace.json.gz in" in said.out
    assert "phase-0-off lacks its trace" in said.err
    assert len(list(read_measurements(tmp_path / "out" / "phase-0-off.jsonl"))) == 3
    standin_server.set_control(tmp_path / "tree")
    assert ab.run(args) == 0
    assert (tmp_path / "out" / "traces.json").exists()


def test_a_run_on_a_full_disk_stops_its_server_and_keeps_every_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = prepared(tmp_path, monkeypatch)
    out = tmp_path / "out"
    real, rows = os.write, 0

    def full_at_the_third_row(descriptor: int, data: bytes) -> int:
        nonlocal rows
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".jsonl"):
            rows += 1
            if rows == 3:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full_at_the_third_row)
        assert ab.run(args) == 1
    err = capsys.readouterr().err
    assert f"cannot write {out}/phase-0-off.jsonl: No space left on device" in err
    assert "goes on from there" in err
    kept = list(read_measurements(out / "phase-0-off.jsonl"))
    assert [row.repeat for row in kept] == [0, 1]
    words_said = (out / "phase-0-off.log").read_text().split()
    assert not alive(int(words_said[1]))
    assert not alive(int(words_said[3]))
    assert ab.run(args) == 0
    assert list(read_measurements(out / "phase-0-off.jsonl.partial-1")) == kept


# schedule


def test_phases_alternate_and_the_last_of_each_arm_is_marked() -> None:
    assert [tuple(phase) for phase in PLAN.phases()] == [
        (0, 0, "off", False),
        (1, 0, "on", False),
        (2, 1, "off", True),
        (3, 1, "on", True),
    ]
    turned = replace(PLAN, order="abba", pairs=3).phases()
    assert [phase.arm for phase in turned] == ["off", "on", "on", "off", "off", "on"]
    assert [phase.number for phase in turned if phase.last_of_arm] == [4, 5]


def test_the_profile_takes_the_largest_batch_with_the_shortest_prompts() -> None:
    shapes = (Shape(16, 8, 1), Shape(1024, 256, 64), Shape(256, 256, 64))
    assert replace(PLAN, shapes=shapes).traced_shape == Shape(256, 256, 64)


@given(st.lists(st.sampled_from([name for rename in RENAMES for name in (rename.old, rename.new)]) | st.text()))
def test_a_translation_is_stable(words: list[str]) -> None:
    try:
        once = translate(words, "0.5.19").args
    except CommandError:
        return
    assert len(once) == len(words)
    assert translate(once, "0.5.19") == (once, ())
    assert all(old == new for old, new in zip(words, once, strict=True) if not old.startswith("--"))


# rows

SHAPE = Shape(4, 8, 2)
GOOD = {**SHAPE._asdict(), "latency": 1.5, "output_throughput": 10.0, "overall_throughput": 20.0, "acc_length": 2.9}


def test_a_row_is_read_with_its_acceptance() -> None:
    assert read_row(json.dumps(GOOD), SHAPE) == Row(1.5, 10.0, 20.0, 2.9)
    assert read_row(json.dumps({**GOOD, "acc_length": -1}), SHAPE).acceptance_length is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (json.dumps({**GOOD, "latency": 0}), "latency is 0.0"),
        (json.dumps({**GOOD, "output_throughput": float("nan")}), "output_throughput is nan"),
        (json.dumps({**GOOD, "overall_throughput": float("inf")}), "overall_throughput is inf"),
        (json.dumps({**GOOD, "batch_size": 3}), "it is of 4:8:3, not 4:8:2"),
        (json.dumps({**SHAPE._asdict(), "latency": 1}), "'output_throughput'"),
        (json.dumps({"latency": 1}), "'input_len'"),
        ("{", "not understood"),
    ],
)
def test_a_row_that_is_no_result_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_row(text, SHAPE)


def test_a_line_that_is_being_written_is_no_row_yet(tmp_path: Path) -> None:
    path = tmp_path / "result.jsonl"
    assert whole_lines(path) == []
    path.write_text('{"a": 1}\n\n{"a": 2')
    assert whole_lines(path) == ['{"a": 1}\n']


def test_statements_are_the_overlays_lines_once_each(tmp_path: Path) -> None:
    log = tmp_path / "log"
    live = "GDN zero-copy live (pid 1): fold ring target verify -> views: all tokens"
    log.write_text(f"[TP0] {live}\nCapturing\rnoise\n[TP0] {live}\nGDN zero-copy declined (pid 2): x\nGDN zero-copy?\n")
    assert server.Server("", log, None).statements() == (live, "GDN zero-copy declined (pid 2): x")
    assert server.Server("", None, None).statements() == ()
    with pytest.raises(RunFailed, match="the server's log cannot be read"):
        server.Server("", tmp_path / "none", None).statements()


def test_the_server_command_ends_with_what_ab_sets() -> None:
    words = server.command("py", "m", ["--tp", "2", "--por", "1"], 30000)
    assert words[:3] == ["py", "-m", "sglang.launch_server"]
    assert words[-6:] == ["--model-path", "m", "--host", "127.0.0.1", "--port", "30000"]


def test_nothing_listens_and_nothing_is_healthy() -> None:
    port = free_port()
    assert client.port_is_free("127.0.0.1", port)
    assert not client.healthy(f"http://127.0.0.1:{port}")
    assert client.server_facts(f"http://127.0.0.1:{port}") == (None, None, ())
    assert client.inter_token_latency(f"http://127.0.0.1:{port}") is None


# progress


def test_the_estimate_uses_each_kinds_own_mean() -> None:
    now = 0.0
    estimate = Estimate({"start": 2, "short": 2, "long": 1}, clock=lambda: now)
    assert (estimate.seconds_left(), estimate.total, estimate.finished) == (None, 5, 0)
    for kind, seconds in (("start", 30.0), ("short", 10.0)):
        estimate.begin()
        now += seconds
        estimate.finish(kind)
    # One start, one short run, and a long one of which nothing is known but the mean of all.
    assert estimate.seconds_left() == 30 + 10 + 20
    assert (estimate.total, estimate.finished) == (5, 2)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(None, ""), (0, ""), (40, "about 40 s left"), (720, "about 12 min left"), (3900, "about 1 h 05 min left")],
)
def test_time_left_in_words(seconds: float | None, said: str) -> None:
    assert time_left(seconds) == said


def test_plain_lines_name_count_result_and_time_left() -> None:
    lines: list[str] = []
    estimate = Estimate({"a": 3}, clock=iter([0.0, 0.0, 100.0]).__next__)
    estimate.begin()
    estimate.finish("a")
    PlainProgress(lines.append).done("phase 1/4 off  256:256:8 repeat 1/5", "14.0 tok/s", estimate)
    assert lines == ["[1/3] phase 1/4 off  256:256:8 repeat 1/5  14.0 tok/s  about 3 min left"]


def test_the_bar_shows_what_runs_and_keeps_results_as_they_are() -> None:
    from rich.console import Console
    from rich.progress import Progress, TextColumn

    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120)
    with Progress(
        TextColumn("{task.description} {task.completed}/{task.total} {task.fields[left]}"), console=console
    ) as bar:
        progress = BarProgress(bar)
        estimate = Estimate({"a": 2}, clock=iter([0.0, 0.0, 60.0]).__next__)
        progress.doing("phase 1/2 on  4:8:1 repeat 1/5", estimate)
        bar.refresh()
        estimate.begin()
        estimate.finish("a")
        progress.done("phase 1/2 on", "[red]14.0 tok/s", estimate)
        bar.refresh()
    assert "phase 1/2 on  4:8:1 repeat 1/5 0/2" in text.getvalue()
    assert "phase 1/2 on 1/2 about 60 s left" in text.getvalue()
    assert "phase 1/2 on  [red]14.0 tok/s" in text.getvalue()


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_without_rich_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_rich(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "rich":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(sys, "stdout", _Terminal())
    with ab._progress() as progress:
        assert isinstance(progress, BarProgress)
    monkeypatch.setattr(builtins, "__import__", without_rich)
    with pytest.raises(CommandError, match=r"pip install 'sglang-gdn-zerocopy\[cli\]'"), ab._progress():
        pass
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with ab._progress() as progress:
        assert isinstance(progress, PlainProgress)


def test_the_command_line_loads_no_optional_library() -> None:
    optional = {"rich", "scipy", "torch", "matplotlib"}
    text = f"import sys, sglang_gdn_zerocopy.cli.ab; print(sorted({optional} & set(sys.modules)))"
    root = str(Path(__file__).parents[2])
    child = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": root}
    )
    assert child.stdout.strip() == "[]"
