"""Drills in live stock servers on GPUs: shadow mode, strict mode, a wrong kernel, and servers of two ranks.

    python -m tests.gpu.live_server shadow --model DIR --out DIR [--gpus 0,1] -- SERVER ARGUMENTS
    python -m tests.gpu.live_server strict --model DIR --out DIR [--gpus 0,1] -- SERVER ARGUMENTS
    python -m tests.gpu.live_server ranks --model DIR --out DIR [--gpus 0,1] [--dp] -- SERVER ARGUMENTS

``shadow``: four servers without CUDA graphs (overlay off, on, every call shadowed, and shadowed with a recurrence that
goes wrong after a while) answer the same requests, as many at a time as ``--gpus`` has entries. ``strict``: one with a
setting that is not understood and one whose self-test fails have to stop, one whose self-test fails without strict mode
and one with nothing wrong have to answer as stock does. ``ranks``: a server over all
given GPUs, overlay on and off, with profiles of every rank; ``--dp`` with data-parallel attention, overlay on only.
Writes logs, profiles and ``<first server>.json`` to ``--out`` and prints what it found; exit code 1 when something is
not as it should be. For a model without weights set SGLANG_SIMULATE_ACC_LEN.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from sglang_gdn_zerocopy.bench.server import HOST, Server, command, wait_until_healthy
from sglang_gdn_zerocopy.bench.supervisor import Supervisor
from sglang_gdn_zerocopy.settings import KERNELS, SHADOW, STATUS_DIR, STRICT, SWITCH, child_environment

FIRST_WRONG = "GDN_ZEROCOPY_TEST_FIRST_WRONG_LAUNCH"
"""Read by `tests.gpu.wrong_kernel`."""
STOPPED = "GDN zero-copy stopped"
ROOT = Path(__file__).resolve().parents[2]
BATCHES = (1, 8, 64)
INPUT_TOKENS = 64
_ACCEPTANCE = re.compile(r"accept len: ([0-9.]+)")


@dataclass
class Load:
    """One batch of requests of equal length, all at once."""

    requests: int
    output_tokens: int
    seconds: float
    answers: str
    """A hash of all output tokens."""


@dataclass
class Arm:
    """One server and what came of it."""

    name: str
    environment: dict[str, str]
    loads: list[Load] = field(default_factory=list)
    alone: list[str] = field(default_factory=list)
    """Hashes of answers to requests that ran alone, one after the other."""
    statements: tuple[str, ...] = ()
    acceptance: list[float] = field(default_factory=list)
    status: list[dict[str, Any]] = field(default_factory=list)
    live: str = ""
    live_exit: int | None = None
    saved: list[str] = field(default_factory=list)
    problem: str = ""
    stopped: list[str] = field(default_factory=list)
    """Strict mode's last words."""


def prompt(number: int) -> list[int]:
    """Token ids that no two requests share a prefix of."""
    return [1000 + (number * 7919 + position * 104729) % 90000 for position in range(INPUT_TOKENS)]


def ask(url: str, number: int, output_tokens: int) -> list[int]:
    """One greedy answer of exactly ``output_tokens`` tokens."""
    sampling = {"temperature": 0, "max_new_tokens": output_tokens, "ignore_eos": True}
    body = json.dumps({"input_ids": prompt(number), "sampling_params": sampling}).encode()
    request = urllib.request.Request(url + "/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as reply:
        answer = json.loads(reply.read())
    tokens: list[int] = answer["output_ids"]
    if len(tokens) != output_tokens:
        raise RuntimeError(f"{len(tokens)} tokens instead of {output_tokens}")
    return tokens


def digest(answers: Sequence[Sequence[int]]) -> str:
    """A short name for the bits of answers."""
    return hashlib.sha256(json.dumps(answers).encode()).hexdigest()[:16]


def load(url: str, requests: int, output_tokens: int) -> Load:
    """``requests`` requests at once."""
    start = time.monotonic()
    with ThreadPoolExecutor(requests) as pool:
        answers = list(pool.map(lambda number: ask(url, number, output_tokens), range(requests)))
    return Load(requests, output_tokens, round(time.monotonic() - start, 3), digest(answers))


def start(
    supervisor: Supervisor, arm: Arm, arguments: Sequence[str], port: int, out: Path, startup_timeout_s: float
) -> Server:
    """Start ``arm``'s server and wait until it is healthy; one that does not get there is stopped again."""
    log = out / f"{arm.name}.log"
    environment = child_environment(PYTHONUNBUFFERED="1", **arm.environment)
    group = supervisor.start(arguments, log, environment)
    server = Server(f"http://{HOST}:{port}", log, group)
    try:
        wait_until_healthy(server, log, startup_timeout_s)
    except BaseException:
        supervisor.stop(group)
        raise
    return server


def collect(arm: Arm, server: Server) -> None:
    """What the server's log and status files say, while it runs."""
    assert server.log is not None
    arm.statements = server.statements()
    arm.acceptance = [float(x) for x in _ACCEPTANCE.findall(server.log.read_text(errors="replace"))]
    folder = arm.environment.get(STATUS_DIR.name)
    if folder:
        for file in sorted(Path(folder).glob("*.json")):
            arm.status.append(json.loads(file.read_text()))
        arm.saved = [f"{file.name} ({file.stat().st_size / 1e6:.1f} MB)" for file in Path(folder).glob("*.pt")]
        words = [sys.executable, "-m", "sglang_gdn_zerocopy", "doctor", "--live", folder]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        arm.live, arm.live_exit = done.stdout + done.stderr, done.returncode


def counts(arm: Arm) -> dict[str, int]:
    """Events of all processes of an arm."""
    found: dict[str, int] = {}
    for process in arm.status:
        for row in process["counts"]:
            key = f"{row['stage']}: {row['reason']}"
            found[key] = found.get(key, 0) + row["count"]
    return found


def wrong_kernel(out: Path, first: int) -> dict[str, str]:
    """The environment of a server whose bundled recurrence is wrong from launch ``first`` on, see the plugin."""
    plugin = out / "plugin" / "wrong_kernel-0.dist-info"
    plugin.mkdir(parents=True, exist_ok=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong-kernel\nVersion: 0\n")
    (plugin / "entry_points.txt").write_text("[sglang_gdn_zerocopy.policies]\nwrong = tests.gpu.wrong_kernel\n")
    path = os.pathsep.join([str(plugin.parent), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {FIRST_WRONG: str(first), "PYTHONPATH": path}


def shadow_arms(out: Path) -> list[Arm]:
    """The four servers of the shadow drill."""
    on = {SWITCH.name: "1"}

    def status(name: str) -> dict[str, str]:
        return {STATUS_DIR.name: str(out / f"status-{name}")}

    wrong = wrong_kernel(out, 1500)
    return [
        Arm("shadowed", {**on, SHADOW.name: "1", **status("shadowed")}),
        Arm("on", {**on, **status("on")}),
        Arm("wrong", {**on, SHADOW.name: "1", **status("wrong"), **wrong}),
        Arm("off", {SWITCH.name: "0"}),
    ]


def strict_arms(out: Path) -> list[Arm]:
    """The servers of the strict drill."""
    on, strict = {SWITCH.name: "1"}, {SWITCH.name: "1", STRICT.name: "1"}
    return [
        Arm("strict-setting", {**strict, KERNELS.name: "2"}),
        Arm("strict-self-test", {**strict, **wrong_kernel(out, 0)}),
        Arm("strict", {**strict, STATUS_DIR.name: str(out / "status-strict")}),
        Arm("self-test", {**on, STATUS_DIR.name: str(out / "status-self-test"), **wrong_kernel(out, 0)}),
        Arm("off", {SWITCH.name: "0"}),
    ]


def serve(
    supervisor: Supervisor,
    arm: Arm,
    arguments: Sequence[str],
    port: int,
    args: argparse.Namespace,
    batches: Sequence[int],
) -> None:
    """Start, load, collect and stop one server of the shadow or strict drill."""
    try:
        server = start(supervisor, arm, arguments, port, args.out, args.startup_timeout)
        try:
            arm.alone = [digest([ask(server.base_url, 500 + number, 96)]) for number in range(5)]
            for requests in batches:
                load(server.base_url, requests, 32)
                arm.loads.append(load(server.base_url, requests, args.output_tokens))
            collect(arm, server)
        except (OSError, HTTPException):
            # A server that ends takes a moment, and its requests fail first.
            for _ in range(30):
                server.check("its requests")
                time.sleep(1.0)
            raise
        finally:
            assert server.group is not None
            supervisor.stop(server.group)
    except Exception as error:
        arm.problem = f"{type(error).__name__}: {error}"


def side_by_side(
    supervisor: Supervisor, arms: list[Arm], args: argparse.Namespace, batches: Sequence[int]
) -> dict[str, Arm]:
    """Run ``arms`` without CUDA graphs, as many at a time as there are entries in ``--gpus``; the arms by name."""
    words = [*args.server_args, "--disable-cuda-graph"]
    gpus = args.gpus.split(",")

    def run(place: int, arm: Arm) -> None:
        arm.environment["CUDA_VISIBLE_DEVICES"] = gpus[place]
        port = args.port + 1000 * place
        serve(supervisor, arm, command(sys.executable, args.model, words, port), port, args, batches)

    for first in range(0, len(arms), len(gpus)):
        with ThreadPoolExecutor(len(gpus)) as pool:
            list(pool.map(run, range(len(gpus)), arms[first : first + len(gpus)]))
    return {arm.name: arm for arm in arms}


def shadow(supervisor: Supervisor, args: argparse.Namespace) -> tuple[list[Arm], list[str]]:
    """The shadow drill and what is wrong with its outcome."""
    arms = shadow_arms(args.out)
    return arms, list(shadow_problems(side_by_side(supervisor, arms, args, BATCHES)))


def strict(supervisor: Supervisor, args: argparse.Namespace) -> tuple[list[Arm], list[str]]:
    """The strict drill and what is wrong with its outcome."""
    arms = strict_arms(args.out)
    by_name = side_by_side(supervisor, arms, args, ())
    for arm in arms:
        log = (args.out / f"{arm.name}.log").read_text(errors="replace")
        arm.stopped = [line[line.index(STOPPED) :] for line in log.splitlines() if STOPPED in line]
    return arms, list(strict_problems(by_name))


def shadow_problems(arms: dict[str, Arm]) -> Iterator[str]:
    """What an operator would not want to see."""
    for arm in arms.values():
        if arm.problem:
            yield f"{arm.name}: {arm.problem}"
        if arm.alone != arms["off"].alone:
            yield f"{arm.name}: answers to lone requests are not those of stock"
    right, wrong = counts(arms["shadowed"]), counts(arms["wrong"])
    if not right.get("shadow: compared with stock"):
        yield "shadowed: nothing was compared"
    yield from (f"shadowed: {key}" for key in right if key.startswith("shadow: ") and "compared with stock" not in key)
    if not any(key.startswith("shadow: differs from stock: output") for key in wrong):
        yield "wrong: the difference was not found"
    if not arms["wrong"].saved:
        yield "wrong: no reproducer was saved"
    if not any(process["state"] == "fell back" for process in arms["wrong"].status):
        yield "wrong: it did not fall back to stock"


def strict_problems(arms: dict[str, Arm]) -> Iterator[str]:
    """What an operator would not want to see."""
    for name, reason in (("strict-setting", KERNELS.name), ("strict-self-test", "self-test")):
        arm = arms[name]
        if "the server ended with" not in arm.problem:
            yield f"{name}: did not stop: {arm.problem or 'it answers'}"
        if not any(reason in line for line in arm.stopped):
            yield f"{name}: no line that says so, with {reason!r}"
    for name in ("strict", "self-test", "off"):
        if arms[name].problem or arms[name].stopped:
            yield f"{name}: {arms[name].problem or arms[name].stopped[0]}"
    for name in ("strict", "self-test"):
        if arms[name].alone != arms["off"].alone:
            yield f"{name}: answers to lone requests are not those of stock"
    rows = [row for process in arms["self-test"].status for row in process["kernels"]]
    if not any(row["self_test"] == "failed" for row in rows):
        yield "self-test: it did not fail"
    if [process["state"] for process in arms["strict"].status if process["rank"] is not None] != ["installed"]:
        yield "strict: not installed"


def ranks(supervisor: Supervisor, args: argparse.Namespace) -> tuple[list[Arm], list[str]]:
    """A server over all GPUs, overlay off and on, one after the other."""
    count = len(args.gpus.split(","))
    parallel = ["--tp", str(count)] + (["--dp", str(count), "--enable-dp-attention"] if args.dp else [])
    name = f"{args.label}{'dp' if args.dp else 'tp'}{count}"
    arms = [Arm(f"{name}-on", {SWITCH.name: "1", STATUS_DIR.name: str(args.out / f"status-{name}")})]
    if not args.dp:
        arms.append(Arm(f"{name}-off", {SWITCH.name: "0"}))
    for arm in arms:
        arm.environment["CUDA_VISIBLE_DEVICES"] = args.gpus
        try:
            words = command(sys.executable, args.model, [*args.server_args, *parallel], args.port)
            server = start(supervisor, arm, words, args.port, args.out, args.startup_timeout)
            try:
                for requests in BATCHES:
                    load(server.base_url, requests, 32)
                    arm.loads.append(load(server.base_url, requests, args.output_tokens))
                if not args.dp:
                    for requests in (1, 64):
                        profile(server, args.out / f"trace-{arm.name}-n{requests}", count, requests)
                collect(arm, server)
            finally:
                assert server.group is not None
                supervisor.stop(server.group)
        except Exception as error:
            arm.problem = f"{type(error).__name__}: {error}"
    return arms, list(ranks_problems(arms, count))


def profile(server: Server, folder: Path, count: int, requests: int) -> None:
    """Profile 30 passes of ``requests`` requests in each of ``count`` ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    body = json.dumps({"output_dir": str(folder), "num_steps": 30, "activities": ["CPU", "GPU"]}).encode()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(load, server.base_url, requests, 512)
        time.sleep(0.5)
        headers = {"Content-Type": "application/json"}
        question = urllib.request.Request(server.base_url + "/start_profile", body, headers)
        with urllib.request.urlopen(question, timeout=300) as reply:
            reply.read()
        running.result()
    sizes: dict[Path, int] = {}
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        before, sizes = sizes, {path: path.stat().st_size for path in folder.rglob("*.trace.json.gz")}
        if len(sizes) >= count and sizes == before:
            return
        time.sleep(1.0)
    raise RuntimeError(f"{len(sizes)} of {count} profiles in {folder}")


def ranks_problems(arms: list[Arm], count: int) -> Iterator[str]:
    """What an operator would not want to see."""
    for arm in arms:
        if arm.problem:
            yield f"{arm.name}: {arm.problem}"
    on = arms[0]
    if on.live_exit != 0:
        yield f"doctor --live: exit code {on.live_exit}"
    seen = {process["rank"] for process in on.status if process["state"] == "installed"}
    if not set(range(count)) <= seen:
        yield f"doctor --live: ranks {sorted(seen - {None})} of {count}"
    if len(arms) == 2 and set(arms[0].acceptance) != set(arms[1].acceptance):
        yield f"acceptance length {sorted(set(arms[0].acceptance))}, stock {sorted(set(arms[1].acceptance))}"


DRILLS = {"shadow": shadow, "strict": strict, "ranks": ranks}


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drill", choices=tuple(DRILLS))
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--gpus", default="0", help="devices, separated by commas (default: 0)")
    parser.add_argument("--dp", action="store_true", help="data-parallel attention")
    parser.add_argument("--label", default="", help="in front of the names of servers and files")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--startup-timeout", type=float, default=400.0, help="seconds (default: 400)")
    parser.add_argument("--output-tokens", type=int, default=1024, help="per request (default: 1024)")
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:end])
    args.server_args = words[end + 1 :]
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    with Supervisor() as supervisor:
        arms, problems = DRILLS[args.drill](supervisor, args)
    result = {"problems": problems, "arms": [asdict(arm) for arm in arms]}
    (args.out / f"{arms[0].name}.json").write_text(json.dumps(result, indent=1) + "\n")
    for arm in arms:
        loads = ", ".join(f"N={one.requests} {one.seconds} s" for one in arm.loads)
        print(f"{arm.name}: {loads}; acceptance {sorted(set(arm.acceptance))}; saved {arm.saved}")
        for line in (*arm.statements, *arm.stopped):
            print(f"  {line[:300]}")
        for key, number in counts(arm).items():
            if key.startswith("shadow: "):
                print(f"  {number} x {key}")
        if arm.live:
            print(arm.live)
    for problem in problems:
        print(f"PROBLEM {problem}")
    print("as it should be" if not problems else f"{len(problems)} problems")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
