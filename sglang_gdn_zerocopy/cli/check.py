"""`check`: a stock release's own target verify without and with the overlay, compared bit by bit."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_gdn_zerocopy.cli.errors import CommandError
from sglang_gdn_zerocopy.settings import CACHE
from sglang_gdn_zerocopy.upstream.releases import RELEASES, SAME_BODIES

if TYPE_CHECKING:
    from rich.console import Console

    from sglang_gdn_zerocopy.lab.matrix import ReleaseRun
    from sglang_gdn_zerocopy.lab.wheels import StockTree

DEFAULT_RELEASE = "0.5.17"
# A result's name -> its column.
_COLUMNS = {
    "output": "output",
    "state": "state or ring",
    "windows": "windows",
    "conv state": "conv state",
    "after commit": "after commit",
    "inputs": "inputs",
}
# Columns of text that the table wants; a pipe or a file has no width of its own.
_WIDTH = 148
_NEEDED = ("rich", "torch", "triton", "platformdirs", "numpy", "msgspec")


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "check",
        help="compare stock target verify with and without the overlay, bit by bit",
        description="Runs a stock release's own forward_extend and Triton kernels without and with the overlay, then "
        "the release's own commit of accepted tokens, and compares the bits of every result. An installed SGLang is "
        "used where there is a GPU; any other release is fetched over pip as a wheel. Without a GPU the kernels run in "
        "the Triton interpreter.",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--release",
        metavar="X",
        help=f"stock release to check (default: the installed one on a GPU, else {DEFAULT_RELEASE})",
    )
    which.add_argument("--all", action="store_true", help="check every supported release")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random inputs (default: 0)")
    parser.add_argument("--cache", type=Path, metavar="DIR", help=f"folder for wheels (default: ${CACHE.name})")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check and print. Returns 0 when every case holds, 1 when one does not; bad input raises CommandError."""
    missing = [name for name in _NEEDED if util.find_spec(name) is None]
    if missing:
        raise CommandError(f"{', '.join(missing)} not installed: pip install 'sglang-gdn-zerocopy[lab]'")
    if args.release is not None and SAME_BODIES.get(args.release, args.release) not in RELEASES:
        raise CommandError(f"release {args.release!r} is not supported; choose one of {', '.join(RELEASES)}")
    device = _device(args)

    from rich.console import Console

    from sglang_gdn_zerocopy.lab.wheels import LabError, default_cache

    console = Console(stderr=args.json)
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH)
    installed = _installed() if device == "cuda" else ""
    releases = list(RELEASES) if args.all else [args.release or installed or DEFAULT_RELEASE]
    cache = args.cache or (Path(CACHE.read()) if CACHE.read() else default_cache())
    try:
        trees = [None if version == installed else _fetch(console, version, cache) for version in releases]
        runs = [_run_one(console, tree, device, args.seed, quiet=args.json) for tree in trees]
    except LabError as error:
        raise CommandError(str(error)) from None
    ok = all(one.ok for one in runs)
    if args.json:
        print(json.dumps({"ok": ok, "releases": [one.to_dict() for one in runs]}, indent=1))
    else:
        _summary(console, runs, ok)
    return 0 if ok else 1


def _device(args: argparse.Namespace) -> str:
    """ "cuda" when there is a GPU and it is wanted, else "cpu"."""
    if args.device == "cpu":
        return "cpu"
    # Asked in a process of its own, so that this one never holds a CUDA context.
    question = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    if subprocess.run([sys.executable, "-c", question], capture_output=True, check=False).returncode == 0:
        return "cuda"
    if args.device == "cuda":
        raise CommandError("--device cuda: torch sees no CUDA device here; use --device cpu")
    return "cpu"


def _installed() -> str:
    """The version of the SGLang in this environment, or nothing."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return ""


def _fetch(console: Console, version: str, cache: Path) -> StockTree:
    from sglang_gdn_zerocopy.lab.wheels import fetch

    with console.status(f"stock wheel of sglang {version}"):
        return fetch(version, cache)


def _run_one(console: Console, tree: StockTree | None, device: str, seed: int, quiet: bool) -> ReleaseRun:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from sglang_gdn_zerocopy.lab.matrix import run_release

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    name = f"sglang {tree.version}" if tree else "installed sglang"
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=None)

        def progress(done: int, total: int, case: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{name}: {case}" if case else name)

        finished = run_release(tree, device, seed, progress)
    if not quiet:
        _table(console, finished)
    return finished


def _table(console: Console, release: ReleaseRun) -> None:
    from rich import box
    from rich.table import Table

    where = release.gpu or "Triton interpreter, CPU"
    table = Table(
        title=f"SGLang {release.version} ({release.verdict}) on {where}, torch {release.torch}, "
        f"triton {release.triton}, seed {release.seed}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("case", no_wrap=True)
    table.add_column("route")
    table.add_column("copies", justify="right")
    for column in _COLUMNS.values():
        table.add_column(column, justify="center")
    table.add_column("")
    for one in release.outcomes:
        bits = [
            "-" if name not in one.equal else "equal" if one.equal[name] else "[bold red]DIFFERS[/]"
            for name in _COLUMNS
        ]
        mark = "[green]ok[/]" if one.ok else "[bold red]FAILED[/]"
        table.add_row(one.case, one.route, f"{one.copies_before} -> {one.copies_after}", *bits, mark)
    console.print(table)
    if release.wheel:
        console.print(f"{release.wheel}  sha256 {release.sha256}", style="dim", soft_wrap=True)
        stood_in = f"stand-ins, not compared: {', '.join(release.stand_ins)}"
        console.print(stood_in, style="dim", soft_wrap=True)


def _summary(console: Console, runs: list[ReleaseRun], ok: bool) -> None:
    for one in runs:
        outcomes = Counter("held" if outcome.ok else "FAILED" for outcome in one.outcomes)
        layers = sum(outcome.layers for outcome in one.outcomes)
        gone = sum(outcome.copies_before - outcome.copies_after for outcome in one.outcomes)
        text = ", ".join(f"{count} {word}" for word, count in sorted(outcomes.items(), reverse=True))
        console.print(
            f"SGLang {one.version}: {text}; {gone} copies removed in {layers} GDN layer calls ({one.verdict})",
            soft_wrap=True,
        )
    console.print("[green]all bits equal[/]" if ok else "[bold red]not all cases hold[/]")
