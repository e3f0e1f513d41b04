"""`ab` from the command line against stand-ins that are real processes: whole runs, and what goes wrong in them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sglang_gdn_zerocopy.bench.measurement import Measurement, Shape, read_measurements
from tests.bench import standin_server
from tests.bench.standin_server import alive, free_port, wait_for

# Only this command: the others' modules are none of these tests' business.
_MAIN = "import sglang_gdn_zerocopy.__main__ as m; m.COMMANDS = ('ab',); raise SystemExit(m.main())"
_ROOT = Path(__file__).parents[2]


@dataclass
class Bench:
    """A stand-in tree, a free port, an output folder, and the command over them."""

    tree: Path
    out: Path
    port: int
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def words(self, *more: str, shapes: str = "4:8:1,4:8:2", repeats: int = 2, pairs: int = 2) -> list[str]:
        options = ["--model", "some/model", "--shapes", shapes, "--repeats", str(repeats), "--pairs", str(pairs)]
        options += ["--out", str(self.out), "--port", str(self.port), "--cooldown", "0"]
        return [sys.executable, "-c", _MAIN, "ab", *options, *more]

    def start(self, words: list[str], **env: str) -> subprocess.Popen[str]:
        # The project itself is on the path in front of nothing that could shadow the stand-in.
        path = os.pathsep.join((str(self.tree), str(_ROOT)))
        child = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "SGLANG_GDN_ZEROCOPY": "1", **env},
            cwd=self.tree,
        )
        self.running.append(child)
        return child

    def run(self, *more: str, repeats: int = 2, pairs: int = 2, **env: str) -> tuple[int, str, str]:
        child = self.start(self.words(*more, repeats=repeats, pairs=pairs), **env)
        out, err = child.communicate(timeout=60)
        return child.returncode, out, err

    def measurements(self, name: str) -> list[Measurement]:
        return list(read_measurements(self.out / f"{name}.jsonl"))

    def server_pids(self) -> list[int]:
        """The servers of all phases so far and their workers."""
        texts = [path.read_text(errors="replace") for path in sorted(self.out.glob("phase-*.log*"))]
        found = [match for text in texts for match in re.findall(r"server (\d+) worker (\d+) switch", text)]
        return [int(pid) for pair in found for pid in pair]

    def assert_nothing_left(self) -> None:
        pids = self.server_pids()
        assert pids
        assert [pid for pid in pids if alive(pid)] == []


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    tree = tmp_path / "tree"
    standin_server.install(tree, "0.5.17")
    made = Bench(tree, tmp_path / "out", free_port())
    yield made
    for child in made.running:
        if child.poll() is None:
            child.kill()
        child.communicate()
    for pid in made.server_pids():
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "gsm8k.jsonl"
    file.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n' * 6)
    return file


def test_a_whole_run_alternates_fresh_servers_and_is_not_repeated(bench: Bench, questions: Path) -> None:
    more = ("--gsm8k", str(questions), "--gsm8k-questions", "6", "--seed", "5")
    server_args = ("--", "--tp", "1", "--cuda-graph-max-bs", "8")
    code, out, err = bench.run(*more, *server_args, SGLANG_SIMULATE_ACC_LEN="4")
    assert (code, err) == (0, ""), out
    bench.assert_nothing_left()

    names = ["phase-0-off", "phase-1-on", "phase-2-off", "phase-3-on"]
    assert sorted(path.stem for path in bench.out.glob("phase-*.jsonl")) == names
    for number, name in enumerate(names):
        rows = bench.measurements(name)
        arm = name.rsplit("-", 1)[1]
        assert [(row.shape, row.repeat) for row in rows] == [
            (shape, repeat) for shape in (Shape(4, 8, 1), Shape(4, 8, 2)) for repeat in (0, 1)
        ]
        assert {(row.arm, row.pair, row.phase) for row in rows} == {(arm, number // 2, number)}
        assert {row.output_throughput for row in rows} == {101.0 if arm == "on" else 100.0}
        # The first run of each shape is the warm-up: the stand-in counts the batches of one server.
        assert [row.latency_s for row in rows] == pytest.approx([1.002, 1.003, 1.005, 1.006])
        assert {row.acceptance_length for row in rows} == {2.9}
        live = (
            "GDN zero-copy installed (pid 7): as a test says",
            "GDN zero-copy live (pid 7): snapshots target verify -> views: ok",
        )
        assert {row.statements for row in rows} == {live if arm == "on" else ()}
        # Acceptance is simulated, so that prompts do not matter and one process makes all runs of a shape.
        processes = re.findall(r"process for (\d) runs", (bench.out / f"{name}.client.log").read_text())
        assert processes == ["3", "3"]
        log = (bench.out / f"{name}.log").read_text()
        assert f"switch {int(arm == 'on')} model some/model" in log
        environment = rows[0].environment
        assert (environment.release, environment.overlay, environment.seed) == ("0.5.17", "0.0.test", 5)
        assert environment.server_args == ("--tp", "1", "--cuda-graph-max-bs-decode", "8", "--random-seed", "5")
        assert environment.simulated_acceptance == 4.0
        accuracy = json.loads((bench.out / f"{name}.gsm8k.json").read_text())
        assert (accuracy["arm"], accuracy["phase"], accuracy["accuracy"]) == (arm, number, 0.875)
        assert (accuracy["latency_s"], accuracy["output_throughput"]) == (12.5, 3210.5)
        assert accuracy["time_per_output_token_s"] == pytest.approx(0.005)
        assert accuracy["settings"]["questions"] == 6
    assert "--cuda-graph-max-bs is called --cuda-graph-max-bs-decode in 0.5.17" in out
    assert "has SHA-256" in out
    assert "[35/36] phase 4/4 on  GSM8K  accuracy 0.875, 3210.5 tok/s, 5.00 ms per token" in out
    assert "[36/36] phase 4/4 on  content check  6 answers, 0 degenerate, distinct tokens 100% (lowest 100%)" in out
    assert "phase 2/4 on  4:8:2 repeat 2/2  101.00 tok/s, 1.006 s, acceptance 2.90" in out
    assert f"complete: sglang-gdn-zerocopy report {bench.out}" in out
    assert not list(bench.tree.glob("tmp_output*")), "the accuracy program's litter"

    before = {path: path.stat().st_mtime_ns for path in bench.out.iterdir()}
    code, out, err = bench.run(*more, *server_args, SGLANG_SIMULATE_ACC_LEN="4")
    assert (code, err) == (0, "")
    assert "0 of 4 phases to do" in out
    assert {path: path.stat().st_mtime_ns for path in bench.out.iterdir()} == before


def test_old_release_runs_with_its_own_module(bench: Bench) -> None:
    tree = bench.tree.with_name("old")
    standin_server.install(tree, "0.5.13.post1")
    bench.tree = tree
    code, _, err = bench.run("--arms", "on", "--pairs", "1")
    assert (code, err) == (0, "")
    assert len(bench.measurements("phase-0-on")) == 4


def test_real_acceptance_gives_every_run_a_process_and_thus_the_same_prompts(bench: Bench) -> None:
    code, _, err = bench.run("--arms", "off", "--pairs", "1", "--shapes", "4:8:1")
    assert (code, err) == (0, "")
    log = (bench.out / "phase-0-off.client.log").read_text()
    assert re.findall(r"process for (\d) runs", log) == ["1"] * 3
    assert [row.latency_s for row in bench.measurements("phase-0-off")] == pytest.approx([1.002, 1.003])


def test_rows_of_one_process_are_kept_as_they_come(bench: Bench) -> None:
    standin_server.set_control(bench.tree, hang=3)
    child = bench.start(bench.words(), SGLANG_SIMULATE_ACC_LEN="4")
    hanging = bench.out / "phase-0-off.client.log"
    wait_for(lambda: hanging.exists() and "hanging" in hanging.read_text(), "hanging benchmark")
    wait_for(lambda: (bench.out / "phase-0-off.jsonl").exists(), "first row")
    os.kill(bench.server_pids()[0], signal.SIGKILL)
    _, err = child.communicate(timeout=15)
    assert child.returncode == 1
    assert "the server ended with signal 9 (SIGKILL) during phase-0-off, 4:8:1 repeat 2/2" in err
    (row,) = bench.measurements("phase-0-off")
    assert row.repeat == 0
    assert row.latency_s == pytest.approx(1.002)


def test_a_row_of_another_shape_is_refused(bench: Bench) -> None:
    standin_server.set_control(bench.tree, longer=1)
    code, _, err = bench.run(SGLANG_SIMULATE_ACC_LEN="4")
    assert (code, "it is of 5:8:1, not 4:8:1" in err) == (1, True)
    bench.assert_nothing_left()


def test_a_short_shape_gets_its_acceptance_stated_in_both_arms(bench: Bench) -> None:
    drafts = ("--speculative-algorithm", "NEXTN", "--speculative-num-draft-tokens", "4")
    code, out, err = bench.run("--pairs", "1", "--shapes", "4:128:1", "--", *drafts)
    assert (code, err) == (0, "")
    assert "--decode-log-interval 32 is added for both arms" in out
    for name in ("phase-0-off", "phase-1-on"):
        args = bench.measurements(name)[0].environment.server_args
        assert args == (*drafts, "--random-seed", "0", "--decode-log-interval", "32")


def test_abba_turns_the_second_pair_round(bench: Bench) -> None:
    code, _, err = bench.run("--order", "abba", "--shapes", "4:8:1", repeats=1)
    assert (code, err) == (0, "")
    names = ["phase-0-off", "phase-1-on", "phase-2-on", "phase-3-off"]
    assert sorted(path.stem for path in bench.out.glob("phase-*.jsonl")) == names


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_server_and_the_run_resumes(bench: Bench, number: signal.Signals) -> None:
    standin_server.set_control(bench.tree, hang=5)
    child = bench.start(bench.words(pairs=1))
    hanging = bench.out / "phase-0-off.client.log"
    wait_for(lambda: hanging.exists() and "hanging" in hanging.read_text(), "hanging benchmark")
    child.send_signal(number)
    out, err = child.communicate(timeout=20)
    assert child.returncode == 130, out + err
    assert f"the same command with --out {bench.out} goes on from there" in err
    assert "Traceback" not in err
    bench.assert_nothing_left()
    kept = bench.measurements("phase-0-off")
    assert len(kept) == 2

    standin_server.set_control(bench.tree)
    code, out, err = bench.run(pairs=1)
    assert (code, err) == (0, "")
    assert [len(bench.measurements(path.stem)) for path in sorted(bench.out.glob("*.jsonl"))] == [4, 4]
    partial = bench.out / "phase-0-off.jsonl.partial-1"
    assert list(read_measurements(partial)) == kept, "an interrupted phase is kept and never merged"


def test_complete_phases_survive_an_interruption_untouched(bench: Bench) -> None:
    child = bench.start(bench.words(pairs=1))
    wait_for(lambda: (bench.out / "phase-1-on.jsonl").exists(), "second phase")
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=20)
    first = (bench.out / "phase-0-off.jsonl").read_bytes()
    code, out, err = bench.run(pairs=1)
    assert (code, err) == (0, "")
    assert "1 of 2 phases to do" in out
    assert (bench.out / "phase-0-off.jsonl").read_bytes() == first
    assert not list(bench.out.glob("phase-0-*.partial-*"))
    assert list(bench.out.glob("phase-1-on.jsonl.partial-1"))


def test_a_killed_server_is_said_at_once(bench: Bench) -> None:
    standin_server.set_control(bench.tree, hang=2)
    child = bench.start(bench.words())
    hanging = bench.out / "phase-0-off.client.log"
    wait_for(lambda: hanging.exists() and "hanging" in hanging.read_text(), "hanging benchmark")
    server, worker = bench.server_pids()
    os.kill(server, signal.SIGKILL)
    _, err = child.communicate(timeout=15)
    assert child.returncode == 1
    assert "the server ended with signal 9 (SIGKILL) during phase-0-off, 4:8:1 repeat 1/2" in err
    assert "goes on from there" in err
    wait_for(lambda: not alive(worker), "end of the worker")


def test_a_usage_error_of_the_server_is_shown_within_seconds(bench: Bench) -> None:
    standin_server.set_control(bench.tree, usage_error=True)
    started = time.monotonic()
    code, _, err = bench.run()
    assert time.monotonic() - started < 15
    assert code == 1
    assert "the server ended with exit code 2 during its start" in err
    assert "unrecognized arguments: --no-such-flag" in err


def test_a_server_that_never_gets_healthy_is_stopped(bench: Bench) -> None:
    standin_server.set_control(bench.tree, never_healthy=True)
    code, _, err = bench.run("--startup-timeout", "1.5")
    assert code == 1
    assert "the server was not healthy after 1.5 s (--startup-timeout)" in err
    bench.assert_nothing_left()


@pytest.mark.parametrize(("simulated", "wanted"), [("", "one"), ("4", "3")])
def test_a_skipped_shape_is_no_silent_gap(bench: Bench, simulated: str, wanted: str) -> None:
    standin_server.set_control(bench.tree, no_row=True)
    code, _, err = bench.run(SGLANG_SIMULATE_ACC_LEN=simulated)
    assert code == 1
    assert f"the benchmark wrote 0 result rows instead of {wanted}" in err
    assert "due to max running requests limit" in err
    bench.assert_nothing_left()


def test_a_taken_port_is_said_before_anything_is_written(bench: Bench) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", bench.port))
        other.listen()
        code, _, err = bench.run()
    assert code == 2
    assert f"port {bench.port} on 127.0.0.1 is taken" in err
    assert not bench.out.exists()


def test_other_arguments_do_not_resume(bench: Bench) -> None:
    code, _, err = bench.run("--shapes", "4:8:1", "--pairs", "1", "--arms", "off", repeats=1)
    assert (code, err) == (0, "")
    before = sorted(bench.out.iterdir())
    code, _, err = bench.run("--shapes", "4:8:1", "--pairs", "1", "--arms", "off", "--", "--tp", "2", repeats=2)
    assert code == 2
    assert "repeats is 1 there and 2 here" in err
    assert "environment.server_args is ['--random-seed', '0'] there and ['--tp', '2'," in err
    assert sorted(bench.out.iterdir()) == before


def test_without_an_acceptance_length_there_is_none(bench: Bench) -> None:
    standin_server.set_control(bench.tree, acceptance=-1)
    code, out, _ = bench.run("--arms", "off", "--pairs", "1", "--shapes", "4:8:1")
    assert code == 0
    assert {row.acceptance_length for row in bench.measurements("phase-0-off")} == {None}
    assert "acceptance not stated" in out


def test_a_server_of_the_user_is_measured_one_arm_at_a_time_and_never_stopped(bench: Bench, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{bench.port}"
    words = ("--pairs", "1", "--shapes", "4:8:1", "--base-url", url)
    servers = []
    for switch in ("0", "1"):
        log = tmp_path / f"mine-{switch}.log"
        with log.open("wb") as output:
            env = {**os.environ, "PYTHONPATH": str(bench.tree), "SGLANG_GDN_ZEROCOPY": switch}
            command = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(bench.port)]
            server = subprocess.Popen(command, stdout=output, stderr=output, env=env, start_new_session=True)
        servers.append(server)
        try:
            wait_for(lambda: not _refuses(bench.port), "server of the user")
            if switch == "0":
                newer = bench.tree.with_name("newer")
                standin_server.install(newer, "0.5.18")
                code, _, err = Bench(newer, bench.out, bench.port).run(*words, "--arm", "off")
                assert (code, f"the server at {url} is SGLang 0.5.17 and" in err) == (2, True)
            arm, other = ("off", "on") if switch == "0" else ("on", "off")
            code, _, err = bench.run(*words, "--arm", other)
            assert code == 2
            assert f"the next phase of this run is {switch}, arm {arm}, not {other}" in err
            code, out, err = bench.run(*words, "--arm", arm, "--server-log", str(log))
            assert (code, err) == (0, "")
            assert "states its acceptance length every 40 decode passes, which a run may not reach" in out
            assert "start it with --decode-log-interval 2 in both arms" in out
            assert server.poll() is None
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
        said = "next: phase 1, arm on. Restart the server with SGLANG_GDN_ZEROCOPY=1" if arm == "off" else "complete:"
        assert said in out
    assert bench.measurements("phase-0-off")[0].statements == ()
    assert len(bench.measurements("phase-1-on")[0].statements) == 2
    code, out, _ = bench.run(*words, "--arm", "on")
    assert (code, "0 of 2 phases to do" in out) == (0, True)


def test_an_old_server_of_the_user_is_measured_without_the_tokenizers_path(bench: Bench, tmp_path: Path) -> None:
    bench.tree = tmp_path / "old"
    standin_server.install(bench.tree, "0.5.13.post1")
    url = f"http://127.0.0.1:{bench.port}"
    env = {**os.environ, "PYTHONPATH": str(bench.tree), "SGLANG_GDN_ZEROCOPY": "0"}
    command = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(bench.port)]
    with (tmp_path / "log").open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, env=env, start_new_session=True)
    try:
        wait_for(lambda: not _refuses(bench.port), "server of the user")
        code, out, err = bench.run("--pairs", "1", "--shapes", "4:256:1", "--base-url", url, "--arm", "off")
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    assert (code, err) == (0, "")
    assert "sglang.bench_one_batch_server of 0.5.13.post1 has no --local-tokenizer-path; it is left out" in out
    # 255 tokens at 4 per pass are more passes than the server's interval.
    assert "states its acceptance length" not in out


def _refuses(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_profiles_come_last_and_are_compared(bench: Bench) -> None:
    code, out, err = bench.run("--pairs", "1", "--shapes", "4:8:1,4:8:2", "--trace")
    assert (code, err) == (0, ""), out
    lines = out.splitlines()
    for arm in ("off", "on"):
        (profile,) = (n for n, line in enumerate(lines) if f"{arm}  4:8:2 profile" in line)
        timed = [n for n, line in enumerate(lines) if f" {arm}  " in line and ("repeat" in line or "warm-up" in line)]
        assert max(timed) < profile
        assert list((bench.out / f"trace-{arm}").glob("*/*.trace.json.gz"))
    answer = json.loads((bench.out / "traces.json").read_text())
    assert answer["shape"] == "4:8:2"
    changes = {kernel["short_name"]: kernel["change"] for kernel in answer["comparison"]["kernels"]}
    assert changes["fused_qkv_split_gdn_prefill_kernel"] == "disappeared"


def test_an_interrupted_profile_is_taken_again_alone(bench: Bench) -> None:
    code, _, err = bench.run("--pairs", "1", "--arms", "off", "--shapes", "4:8:1", "--trace", "--trace-steps", "2")
    assert (code, err) == (0, "")
    (bench.out / "trace-off").rename(bench.out / "trace-off.new")
    (bench.out / "traces.json").unlink()
    rows = (bench.out / "phase-0-off.jsonl").read_bytes()
    code, out, err = bench.run("--pairs", "1", "--arms", "off", "--shapes", "4:8:1", "--trace")
    assert (code, err) == (0, "")
    assert "4:8:1 profile" in out
    assert "4:8:1 repeat" not in out
    assert (bench.out / "phase-0-off.jsonl").read_bytes() == rows
    assert (bench.out / "traces.json").exists()
    assert (bench.out / "trace-off.new.partial-1").is_dir()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shapes", "256:256"], "'256:256' is not input:output:batch"),
        (["--shapes", "256:0:1"], "'256:0:1' is not input:output:batch"),
        (["--shapes", "256:1:1"], "'256:1:1' ends with the prefill's token"),
        (["--shapes", "4:8:1,4:8:1"], "names a shape twice"),
        (["--arms", "on,on"], "--arms 'on,on' is not off,on"),
        (["--arms", "off,fast"], "--arms 'off,fast' is not off,on"),
        (["--arm", "on"], "--arm on is for a server that you started: give its --base-url"),
        (["--base-url", "http://127.0.0.1:1"], "needs --arm off or --arm on"),
        (["--base-url", "127.0.0.1:1", "--arm", "on"], "is not like http://"),
        (["--base-url", "http://127.0.0.1:1", "--arm", "on", "--server-log", "/none"], "/none is not a file"),
        (["--gsm8k", "/none"], "--gsm8k /none cannot be read: No such file"),
        (["--gsm8k-sha256", "00"], "--gsm8k-sha256 needs --gsm8k FILE"),
        (["--python", "/no/python"], "--python '/no/python' cannot be run"),
        (["--", "--port", "1"], "--port is not a server argument here"),
        (["--out", str(_ROOT)], "exists and holds no run to resume"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(bench: Bench, words: list[str], said: str) -> None:
    code, out, err = bench.run(*words)
    assert code == 2
    assert said in err
    assert err.count("\n") == 1
    assert out == ""
    assert not bench.out.exists()


def test_the_question_file_is_checked(bench: Bench, questions: Path) -> None:
    code, _, err = bench.run("--gsm8k", str(questions), "--gsm8k-sha256", "abc")
    assert (code, "not abc: get the file again" in err) == (2, True)
    code, _, err = bench.run("--gsm8k", str(questions))
    assert (code, "has 6 questions: lower --gsm8k-questions 200" in err) == (2, True)
    questions.write_text("1, 2, 3\n")
    code, _, err = bench.run("--gsm8k", str(questions))
    assert (code, "line 1 is no JSON object with 'question' and 'answer'" in err) == (2, True)


def test_an_on_arm_that_could_not_be_live_is_refused(bench: Bench, tmp_path: Path) -> None:
    code, _, err = bench.run(SGLANG_PLUGINS="other")
    assert (code, "SGLANG_PLUGINS=other keeps SGLang from loading the overlay: add gdn_zerocopy" in err) == (2, True)
    # A python that sees the stand-in SGLang and nothing else: no environment's own overlay.
    next(bench.tree.glob("sglang_gdn_zerocopy-*")).rename(tmp_path / "gone")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{bench.tree}" exec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    code, _, err = bench.run("--python", str(python))
    assert (code, f"{python} lacks the overlay, its on arm would be stock" in err) == (2, True)
    assert not bench.out.exists()
    code, _, err = bench.run("--python", str(python), "--arms", "off", "--shapes", "4:8:1", repeats=1, pairs=1)
    assert (code, err) == (0, "")
