"""`doctor`: what the overlay would do in this environment, stage by stage, with reasons."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from enum import Enum
from importlib import metadata, util
from pathlib import Path
from typing import Any, NamedTuple

from sglang_gdn_zerocopy import settings
from sglang_gdn_zerocopy.cli import live
from sglang_gdn_zerocopy.cli.errors import CommandError
from sglang_gdn_zerocopy.cli.model_config import GdnModel, read_model
from sglang_gdn_zerocopy.records import ProbeReport, Verdict
from sglang_gdn_zerocopy.upstream.probe import examine_package, version_of
from sglang_gdn_zerocopy.upstream.releases import BACKEND_MODULE, STOCK_COPY_LIMIT, wide_qkv_consumers

PLUGIN_GROUP = "sglang.srt.plugins"
PLUGIN_NAME = "gdn_zerocopy"
POLICY_GROUP = "sglang_gdn_zerocopy.policies"
_IMPORT_TIMEOUT_S = 300
_IN_PROCESS = f"""
import importlib, json
from sglang.srt.plugins import load_plugins
load_plugins()
importlib.import_module({BACKEND_MODULE!r})
import sglang_gdn_zerocopy
print("STATUS " + json.dumps(sglang_gdn_zerocopy.status()))
"""


class State(str, Enum):
    """What one finding means for the overlay: only DECLINED keeps it from working."""

    OK = "ok"
    NOTE = "note"
    NOT_APPLICABLE = "not applicable"
    DECLINED = "declined"


class Finding(NamedTuple):
    """One line of the report."""

    stage: str
    state: State
    text: str


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="say what the overlay would do here, and why",
        description="Checks this environment stage by stage. Reads files only: no SGLang import and no CUDA context "
        "unless --import is given. Exit code 0: active or nothing to do; 1: declined; 2: error.",
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="folder with a model's config.json")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel size for --model (default: 1)")
    parser.add_argument(
        "--import",
        dest="in_process",
        action="store_true",
        help="load SGLang's plugins and its GDN backend in a child process and look at the patched functions there",
    )
    parser.add_argument(
        "--live",
        type=Path,
        metavar="DIR",
        help="read the status files of running processes (SGLANG_GDN_ZEROCOPY_STATUS_DIR) instead; exit code 1 when a "
        "scheduler process is missing or on another route than its siblings, those of the same parent process",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="with --live: scheduler processes that each server has on this machine (default: its world size)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the findings. Returns 0 or 1; bad input raises CommandError."""
    if args.live is not None:
        return live.run(args.live, args.ranks, args.json)
    findings = list(examine(args.model, args.tp, args.in_process))
    declined = any(finding.state is State.DECLINED for finding in findings)
    idle = any(finding.state is State.NOT_APPLICABLE for finding in findings)
    verdict = "declined" if declined else "nothing to do" if idle else "active"
    if args.json:
        rows = [{"stage": f.stage, "state": f.state.value, "text": f.text} for f in findings]
        print(json.dumps({"verdict": verdict, "findings": rows}, indent=1))
    else:
        width = max(len(finding.stage) for finding in findings)
        for finding in findings:
            print(f"{finding.stage:<{width}}  {finding.state.value:<14}  {finding.text}")
        print(f"overlay: {verdict}")
    return int(declined)


def examine(model: Path | None, tp: int, in_process: bool) -> Iterator[Finding]:
    """The findings of every stage, in the order in which a server meets them."""
    yield _switch()
    yield _entry_point()
    yield from _sitecustomize()
    yield from _others()
    package = _package()
    report = None
    if package is None:
        remedy = "install it in this environment, or run doctor with its Python"
        yield Finding("sglang", State.DECLINED, f"no SGLang in {sys.prefix}; {remedy}")
    else:
        version = version_of(package)
        yield Finding("sglang", State.OK, f"{version} in {package}")
        report = examine_package(package, version, _read(settings.UNVERIFIED), _read(settings.KERNELS) != "none")
        yield _release(report)
        if report.patchable:
            yield _kernels(report)
    yield _gpu()
    if model is not None:
        yield from _model(read_model(model, tp), tp, report)
    if in_process and package is not None:
        yield from _in_process()


def _read(setting: settings.Setting) -> Any:
    try:
        return setting.read()
    except settings.SettingError as error:
        raise CommandError(str(error)) from None


def _switch() -> Finding:
    name = settings.SWITCH.name
    if _read(settings.SWITCH):
        return Finding("switch", State.OK, f"{name} is on")
    return Finding("switch", State.DECLINED, f"{name} is off; set it to 1 in the server's environment")


def _entry_point() -> Finding:
    ours = [e for e in metadata.entry_points(group=PLUGIN_GROUP) if e.name == PLUGIN_NAME]
    if not ours:
        text = "SGLang's plugin loader cannot see the overlay; pip install it into SGLang's environment"
        return Finding("entry point", State.DECLINED, text)
    allowed = _read(settings.SGLANG_PLUGINS)
    if allowed and PLUGIN_NAME not in {name.strip() for name in allowed.split(",")}:
        text = f"SGLANG_PLUGINS={allowed!r} leaves the overlay out; add {PLUGIN_NAME} to it"
        return Finding("entry point", State.DECLINED, text)
    return Finding("entry point", State.OK, f"{PLUGIN_NAME} in group {PLUGIN_GROUP}")


def _sitecustomize() -> Iterator[Finding]:
    spec = util.find_spec("sitecustomize")
    if spec is None or spec.origin is None:
        return
    try:
        mentions = "sglang_gdn_zerocopy" in Path(spec.origin).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    if mentions:
        yield Finding("sitecustomize", State.OK, f"{spec.origin} activates the overlay too; both ways are one")


def _others() -> Iterator[Finding]:
    for entry in metadata.entry_points(group=PLUGIN_GROUP):
        if entry.name != PLUGIN_NAME:
            text = f"plugin {entry.name} ({entry.value}) may hook the same functions; --import shows whether it does"
            yield Finding("other plugins", State.NOTE, text)
    for entry in metadata.entry_points(group=POLICY_GROUP):
        yield Finding("policies", State.NOTE, f"{entry.name} ({entry.value}) takes part in route decisions")


def _package() -> Path | None:
    try:
        spec = util.find_spec("sglang")
    except ValueError:
        return None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return Path(folders[0]).resolve() if folders else None


def _release(report: ProbeReport) -> Finding:
    state = {
        Verdict.SUPPORTED: State.OK,
        Verdict.UNVERIFIED: State.NOTE,
        Verdict.BUILT_IN: State.NOT_APPLICABLE,
        Verdict.NOT_APPLICABLE: State.NOT_APPLICABLE,
        Verdict.DECLINED: State.DECLINED,
    }[report.verdict]
    return Finding("release", state, report.reason)


def _kernels(report: ProbeReport) -> Finding:
    if report.kernels_off:
        return Finding("kernels", State.NOTE, report.kernels_off)
    tested = "after a self-test at start" if _read(settings.SELFTEST) else "without self-test (switched off)"
    names = "conv and recurrence" if _read(settings.KERNELS) == "all" else "conv"
    return Finding("kernels", State.OK, f"bundled {names}, {tested}")


def _gpu() -> Finding:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return Finding("gpu", State.NOT_APPLICABLE, "not applicable: nvidia-smi finds no GPU here")
    return Finding("gpu", State.OK, "; ".join(line.strip() for line in done.stdout.splitlines() if line.strip()))


def _model(model: GdnModel | None, tp: int, report: ProbeReport | None) -> Iterator[Finding]:
    if model is None:
        yield Finding("model", State.NOT_APPLICABLE, "not applicable: the config has no GDN layers")
        return
    width, ratio = model.qkv_dim(tp), model.num_v_heads / model.num_k_heads
    heads = f"{model.num_k_heads // tp} key and {model.num_v_heads // tp} value heads a rank (ratio {ratio:g})"
    text = f"{model.name}: {model.layers} GDN layers, {heads}, qkv_dim {width} at TP {tp}"
    yield Finding("model", State.OK, text)
    release = report.release if report else None
    if report is not None and report.patchable and not report.kernels_off:
        text = f"bundled kernels on Triton chains: one launch up to packed QKV in each of {model.layers} layers"
        yield Finding("route", State.OK, f"{text}; upstream on FlashInfer")
        return
    if width > STOCK_COPY_LIMIT:
        text = f"no copy to remove: qkv_dim {width} > {STOCK_COPY_LIMIT}"
        yield Finding("route", State.NOT_APPLICABLE, text)
        if release is not None:
            for consumer, honours in wide_qkv_consumers(release.version):
                yield Finding("route", State.NOTE, f"stock hands strided views to {consumer}: {honours}")
    elif release is None or release.copies:
        text = f"views on Triton target verify: {model.layers} copies fewer a verify pass; upstream on FlashInfer"
        yield Finding("route", State.OK, text)


def _in_process() -> Iterator[Finding]:
    command = [sys.executable, "-c", _IN_PROCESS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_IMPORT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise CommandError(f"--import: SGLang's backend was not imported within {_IMPORT_TIMEOUT_S} s") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith("STATUS ")]
    if not lines:
        last = done.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
        raise CommandError(f"--import: SGLang's backend cannot be imported here: {last[0]}")
    status = json.loads(lines[-1].removeprefix("STATUS "))
    quiet = {"built in", "not applicable"}
    state = status["state"]
    good = State.OK if state == "installed" else State.NOT_APPLICABLE if state in quiet else State.DECLINED
    yield Finding("in process", good, f"{state}: {status['reason']}")
    for label in status["lost"]:
        text = next((c for c in status["covered"] if c.startswith(f"{label} ")), label)
        yield Finding("in process", State.DECLINED, f"no call reaches the overlay any more: {text}")
    for label in status["covered"]:
        if not any(label.startswith(f"{lost} ") for lost in status["lost"]):
            yield Finding("in process", State.NOTE, f"wrapped by another: {label}")
    for row in status["counts"]:
        if row["stage"] == "declined":
            yield Finding("in process", State.NOTE, row["reason"])
