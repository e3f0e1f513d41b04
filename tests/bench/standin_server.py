"""Stand-ins for what `ab` runs: a server, the one-batch benchmark and the GSM8K program, each a real process.

:func:`install` writes a folder with a fake ``sglang`` package that declares a release's flags and hands over to this
file. What the processes do wrong on demand stands in ``control.json`` of that folder:

- ``usage_error``: the server exits 2 as argparse does; ``ignore_sigterm``: only SIGKILL ends it; ``never_healthy``
- ``answers``: what the content check gets, "words", "garbage" (in the on-arm), "nan", "no logprobs", "refuse", "drop"
- ``hang``: the benchmark run with this number (from 1, per server) never ends; ``no_row``, ``longer`` (prompts),
  ``acceptance``, ``profile``
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import warnings
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMON_FLAGS = (
    "--base-url",
    "--batch-size",
    "--input-len",
    "--output-len",
    "--temperature",
    "--seed",
    "--skip-warmup",
    "--result-filename",
    "--dataset-name",
    "--no-append-to-github-summary",
    "--profile",
    "--profile-activities",
    "--profile-steps",
    "--profile-output-dir",
)
GSM8K_FLAGS = (
    "--num-shots",
    "--data-path",
    "--num-questions",
    "--max-new-tokens",
    "--parallel",
    "--host",
    "--port",
    "--temperature",
)
# What a stock server says of its arguments.
_SERVER_INFO = {
    "decode_log_interval": 40,
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_num_draft_tokens": 4,
    "speculative_eagle_topk": None,
}
_DRAFT_FLAGS = ("--speculative-algorithm", "--speculative-num-draft-tokens", "--decode-log-interval")
_SWITCHES = {"--skip-warmup", "--no-append-to-github-summary", "--profile"}


def wait_for(done: Callable[[], bool], what: str, seconds: float = 20) -> None:
    """Fail when ``done`` is not true within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"no {what} after {seconds} s"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def install(folder: Path, release: str, **control: object) -> None:
    """Write the fake package of ``release`` and the metadata of SGLang and of the overlay into ``folder``."""
    old = release.startswith("0.5.13")
    flags = COMMON_FLAGS if old else (*COMMON_FLAGS, "--local-tokenizer-path")
    package = folder / "sglang"
    bridge = f"import sys\nsys.path.append({str(Path(__file__).parent)!r})\nimport standin_server\n"
    files = {
        "__init__.py": "",
        "launch_server.py": bridge + "standin_server.serve(sys.argv[1:])\n",
        "test/__init__.py": "",
        "test/few_shot_gsm8k.py": bridge + _declaration(GSM8K_FLAGS) + "standin_server.gsm8k(parser.parse_args())\n",
    }
    benchmark = bridge + _declaration((*flags, "--model")) + "standin_server.one_batch(parser.parse_args())\n"
    if old:
        files["bench_one_batch_server.py"] = benchmark
    else:
        files |= {"benchmark/__init__.py": "", "benchmark/one_batch_server.py": benchmark}
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    for name, version in (("sglang", release), ("sglang_gdn_zerocopy", "0.0.test")):
        metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    set_control(folder, **control)


def set_control(folder: Path, **control: object) -> None:
    """Say what the next processes do wrong."""
    (folder / "control.json").write_text(json.dumps(control))


def _declaration(flags: Sequence[str]) -> str:
    lines = ["import argparse", "parser = argparse.ArgumentParser(allow_abbrev=False)"]
    for flag in flags:
        how = "action='store_true'" if flag in _SWITCHES else "nargs='+'"
        lines.append(f"parser.add_argument({flag!r}, {how})")
    return "\n".join(lines) + "\n"


def _control() -> dict[str, Any]:
    import sglang

    folder = Path(str(sglang.__file__)).parents[1]
    answer: dict[str, Any] = json.loads((folder / "control.json").read_text())
    return answer


def serve(words: list[str]) -> None:
    """The server: knows a few flags, starts a child in its group, answers until it is told to stop."""
    control = _control()
    parser = argparse.ArgumentParser(prog="launch_server.py")
    for flag in (
        "--model-path",
        "--host",
        "--port",
        "--random-seed",
        "--tp-size",
        "--cuda-graph-max-bs-decode",
        *_DRAFT_FLAGS,
    ):
        parser.add_argument(flag)
    parser.add_argument("--enable-linear-replayssm-spec", action="store_true")
    args = parser.parse_args([*words, "--no-such-flag"] if control.get("usage_error") else words)
    if control.get("ignore_sigterm"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    switch = os.environ["SGLANG_GDN_ZEROCOPY"]
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(f"server {os.getpid()} worker {worker.pid} switch {switch} model {args.model_path}", flush=True)
    if switch == "1":
        print("[01:02:03] GDN zero-copy installed (pid 7): as a test says", flush=True)
    state = {"batches": 0, "live": switch == "0", "seconds": 0.0, "tokens": 0}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/health":
                self._answer(503 if control.get("never_healthy") else 200, "")
            elif self.path == "/server_info":
                import importlib.metadata

                self._answer(200, json.dumps({"version": importlib.metadata.version("sglang"), **_SERVER_INFO}))
            elif self.path == "/metrics":
                lines = (
                    f'sglang:inter_token_latency_seconds_sum{{engine="0"}} {state["seconds"]}',
                    f'sglang:inter_token_latency_seconds_count{{engine="0"}} {state["tokens"]}',
                )
                self._answer(200, "\n".join(lines))
            else:
                self._answer(404, "")

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if "text" in asked:
                self._continue(asked)
                return
            state["batches"] += 1
            state["seconds"] += 0.5
            state["tokens"] += 100
            if not state["live"]:
                state["live"] = True
                print("[01:02:04] GDN zero-copy live (pid 7): snapshots target verify -> views: ok", flush=True)
            self._answer(200, json.dumps({"batch": state["batches"], "switch": switch}))

        def _continue(self, asked: dict[str, Any]) -> None:
            how = control.get("answers", "words")
            if how == "drop":
                self.close_connection = True
                return
            if how == "refuse" or (how == "no logprobs" and asked["return_logprob"]):
                self._answer(400, "not supported here")
                return
            assert asked["sampling_params"] == {"temperature": 0, "max_new_tokens": 64}
            ids = [7] * 64 if how == "garbage" and switch == "1" else list(range(64))
            answer: dict[str, Any] = {"text": "!" * 64 if ids[1] == 7 else "some words", "output_ids": ids}
            if asked["return_logprob"]:
                # Stock's JSON has null for a NaN.
                values = [None if how == "nan" and i == 3 else -0.5 for i in ids]
                answer["meta_info"] = {
                    "output_token_logprobs": [[v, i, None] for v, i in zip(values, ids, strict=True)]
                }
            print(f"asked after {state['batches']} batches", flush=True)
            self._answer(200, json.dumps(answer))

        def _answer(self, status: int, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    ThreadingHTTPServer((args.host, int(args.port)), Handler).serve_forever()


def _post(base_url: str) -> dict[str, Any]:
    request = urllib.request.Request(base_url + "/generate", data=b"{}")
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


def one_batch(args: argparse.Namespace) -> None:
    """The benchmark: per batch size a request and a row whose figures depend on the arm and the request's number."""
    assert os.environ["SGLANG_GDN_ZEROCOPY"] == "0", "the switch is the server's alone"
    # As the stock program of some releases does about its module's name.
    warnings.warn("this module has moved", FutureWarning, stacklevel=1)
    print(f"process for {len(args.batch_size)} runs", flush=True)
    for batch_size in args.batch_size:
        _one_case(args, int(batch_size), _control())


def _one_case(args: argparse.Namespace, batch_size: int, control: dict[str, Any]) -> None:
    answer = _post(args.base_url[0])
    if control.get("hang") == answer["batch"]:
        print("hanging", flush=True)
        time.sleep(600)
    if control.get("no_row"):
        print("Skip benchmark due to max running requests limit", flush=True)
        return
    row = {
        "run_name": "default",
        "batch_size": batch_size,
        "input_len": int(args.input_len[0]) + control.get("longer", 0),
        "output_len": int(args.output_len[0]),
        "latency": 1.0 + 0.001 * answer["batch"],
        "output_throughput": 100.0 + int(answer["switch"]),
        "overall_throughput": 200.0,
        "last_ttft": 0.1,
        "acc_length": control.get("acceptance", 2.9),
    }
    with Path(args.result_filename[0]).open("a") as file:
        for _ in range(2 if args.profile else 1):
            file.write(json.dumps(row) + "\n")
    if args.profile and control.get("profile", True):
        folder = Path(args.profile_output_dir[0])
        assert folder.is_dir()
        _write_trace(folder / str(time.time()), copies=0 if answer["switch"] == "1" else 2)


def _write_trace(folder: Path, copies: int) -> None:
    names = ["fused_recurrent_gated_delta_rule_update_kernel"] * 2 + ["fused_qkv_split_gdn_prefill_kernel"] * copies
    here = {"ph": "X", "pid": 1, "tid": 1}
    there = {"ph": "X", "cat": "kernel", "pid": 0, "tid": 7, "args": {"correlation": 5}}
    events: list[dict[str, object]] = [
        {**here, "cat": "user_annotation", "name": "step[TARGET_VERIFY bs=64]", "ts": 10, "dur": 50},
        {**here, "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 12, "dur": 2, "args": {"correlation": 5}},
    ]
    events += [{**there, "name": name, "ts": 20 + 3 * number, "dur": 2} for number, name in enumerate(names)]
    folder.mkdir()
    with gzip.open(folder / "bs-64-il-4-1-TP-0.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)


def gsm8k(args: argparse.Namespace) -> None:
    """The GSM8K program: prints what the stock one prints and leaves its answers in the working directory."""
    _post(f"http://{args.host[0]}:{args.port[0]}")
    Path("tmp_output_gsm8k.txt").write_text("answers")
    questions = len(Path(args.data_path[0]).read_text().splitlines())
    assert int(args.num_questions[0]) <= questions
    print("Accuracy: 0.875\nInvalid: 0.010\nLatency: 12.500 s\nOutput throughput: 3210.500 token/s", flush=True)
