"""``ab``: measure a stock server with the overlay off and on, in alternating phases with a fresh server each."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sglang_gdn_zerocopy.bench import acceptance, benchmark, runner
from sglang_gdn_zerocopy.bench.client import port_is_free, server_facts
from sglang_gdn_zerocopy.bench.errors import RunFailed
from sglang_gdn_zerocopy.bench.flags import translate
from sglang_gdn_zerocopy.bench.measurement import ARMS, Shape
from sglang_gdn_zerocopy.bench.progress import BarProgress, PlainProgress, Progress
from sglang_gdn_zerocopy.bench.schedule import ORDERS, Gsm8k, Plan
from sglang_gdn_zerocopy.bench.server import HOST
from sglang_gdn_zerocopy.bench.store import Store
from sglang_gdn_zerocopy.bench.supervisor import Supervisor
from sglang_gdn_zerocopy.bench.target import Target, probe
from sglang_gdn_zerocopy.cli.errors import CommandError
from sglang_gdn_zerocopy.settings import SGLANG_PLUGINS

DEFAULT_SHAPES = "256:256:1,256:256:8,256:256:32,256:256:64,1024:256:64"
_PLUGIN = "gdn_zerocopy"
_FEWEST_REPEATS = 5


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "ab",
        help="measure a stock server with the overlay off and on",
        description="Alternates phases with the overlay off and on. Each phase starts a fresh stock server with the "
        "same arguments, runs the release's own one-batch benchmark over all shapes, asks a few fixed prompts and "
        "stops the server. The same command with the same --out continues an interrupted run.",
        epilog="Example: sglang-gdn-zerocopy ab --model Qwen/Qwen3.5-4B --out run -- --tp 1 --speculative-algorithm "
        "NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
    )
    parser.add_argument("--model", required=True, help="model path or name for the server")
    parser.add_argument("--arms", default="off,on", help="arms of a pair, in order (default: %(default)s)")
    parser.add_argument("--pairs", type=_positive, default=2, help="pairs of phases (default: %(default)s)")
    parser.add_argument(
        "--order",
        choices=ORDERS,
        default="abab",
        help="abba turns every second pair round, which cancels a linear drift (default: %(default)s)",
    )
    parser.add_argument(
        "--shapes",
        default=DEFAULT_SHAPES,
        metavar="IN:OUT:BATCH,...",
        help="prompt tokens, output tokens and requests per batch (default: %(default)s)",
    )
    parser.add_argument(
        "--warmup", type=_positive, default=1, help="untimed runs per shape and phase (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=_positive, default=5, help="timed runs per shape and phase (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, help="folder of the run (default: a new one, named by the time)")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the prompts, and of the server unless it gets --random-seed (default: %(default)s)",
    )
    parser.add_argument("--port", type=_port, default=30000, help="of the server on 127.0.0.1 (default: %(default)s)")
    parser.add_argument("--python", default=sys.executable, help="python with SGLang (default: this one)")
    parser.add_argument(
        "--startup-timeout",
        type=_seconds,
        default=1800.0,
        metavar="S",
        help="seconds until the server must be healthy (default: %(default)g)",
    )
    parser.add_argument(
        "--cooldown", type=_seconds, default=10.0, metavar="S", help="seconds between phases (default: %(default)g)"
    )
    parser.add_argument("--trace", action="store_true", help="profile each arm once, after its last timed shapes")
    parser.add_argument(
        "--trace-steps", type=_positive, default=30, help="forward passes in a profile (default: %(default)s)"
    )
    own = parser.add_argument_group("a server that you started")
    own.add_argument("--base-url", help="measure the next phase on this server instead of starting one")
    own.add_argument("--arm", choices=ARMS, help="what the server at --base-url runs")
    own.add_argument("--server-log", type=Path, help="its log, for the overlay's statement of the live route")
    accuracy = parser.add_argument_group("accuracy")
    accuracy.add_argument("--gsm8k", type=Path, metavar="FILE", help="GSM8K test questions (jsonl), run in each phase")
    accuracy.add_argument("--gsm8k-sha256", metavar="HEX", help="expected SHA-256 of FILE")
    accuracy.add_argument("--gsm8k-questions", type=_positive, default=200, help="(default: %(default)s)")
    accuracy.add_argument("--gsm8k-shots", type=_positive, default=5, help="(default: %(default)s)")
    accuracy.add_argument("--gsm8k-max-new-tokens", type=_positive, default=512, help="(default: %(default)s)")
    accuracy.add_argument(
        "--gsm8k-parallel", type=_positive, default=64, help="requests at once (default: %(default)s)"
    )
    parser.add_argument("server_args", nargs="*", metavar="SERVER_ARG", help="after `--`: arguments of the server")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out or continue a run. Returns 0 when it is complete, 1 when it failed on the way; Ctrl-C passes through.

    Writes ``plan.json``, per phase ``.jsonl``, ``.log``, ``.client.log``, ``.gsm8k.json`` and
    ``.content.json``, and ``traces.json``.
    Raises ``CommandError`` before anything is written.
    """
    _check_server_choice(args)
    target = probe(args.python)
    plan, notes = _plan(args, target)
    folder = args.out or Path(time.strftime("gdn-zerocopy-ab-%Y%m%d-%H%M%S"))
    store = Store(folder, plan)
    store.check()
    todo = runner.pending(store)
    if todo and args.base_url:
        _check_next_arm(args.arm, todo[0][0].arm, todo[0][0].number)
        todo = todo[:1]
    elif todo and not port_is_free(HOST, args.port):
        raise CommandError(runner.port_line(args.port))
    means = runner.Means(
        target=target,
        port=args.port,
        base_url=args.base_url,
        server_log=args.server_log,
        gsm8k_file=args.gsm8k.resolve() if args.gsm8k else None,
        trace_steps=args.trace_steps,
        startup_timeout_s=args.startup_timeout,
        cooldown_s=args.cooldown,
    )
    with _progress() as progress:
        try:
            store.create()
            for line in (*notes, f"results in {folder}, {len(todo)} of {len(plan.phases())} phases to do"):
                progress.say(line)
            with Supervisor() as supervisor:
                runner.Runner(store, means, supervisor, progress).run(todo)
            left = runner.pending(store)
            if plan.trace and not left and not (folder / "traces.json").exists():
                runner.write_traces(store)
        except RunFailed as error:
            print(f"sglang-gdn-zerocopy ab: {error}\n{_resume_line(folder)}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print(f"sglang-gdn-zerocopy ab: {_resume_line(folder)}", file=sys.stderr)
            raise
        return _finish(progress, folder, left, external=plan.external)


def _finish(progress: Progress, folder: Path, left: list[runner.Todo], *, external: bool) -> int:
    if not left:
        progress.say(f"complete: sglang-gdn-zerocopy report {folder}")
        return 0
    phase, steps = left[0]
    if external:
        progress.say(
            f"next: phase {phase.number}, arm {phase.arm}. Restart the server with SGLANG_GDN_ZEROCOPY="
            f"{int(phase.arm == 'on')} and give --arm {phase.arm} with the same --out {folder}"
        )
        return 0
    print(f"sglang-gdn-zerocopy ab: {phase.name} lacks its {', '.join(steps)}. {_resume_line(folder)}", file=sys.stderr)
    return 1


def _resume_line(folder: Path) -> str:
    return f"what was measured is in {folder}; the same command with --out {folder} goes on from there"


def _plan(args: argparse.Namespace, target: Target) -> tuple[Plan, list[str]]:
    arms = _arms(args.arms)
    external = args.base_url is not None
    if not external and "on" in arms:
        _check_overlay(target)
    translation = translate(args.server_args, target.release)
    server_args = translation.args
    notes = list(translation.notes)
    if not external and not any(word.split("=")[0] == "--random-seed" for word in server_args):
        # Without one stock draws a new seed at every start.
        server_args = (*server_args, "--random-seed", str(args.seed))
    shapes = _shapes(args.shapes)
    if external:
        _check_server(args.base_url, target, shapes, notes)
    else:
        server_args = _stating_acceptance(shapes, server_args, notes)
    settings = _gsm8k(args, notes)
    plan = Plan(
        model=args.model,
        arms=arms,
        pairs=args.pairs,
        order=args.order,
        shapes=shapes,
        warmup=args.warmup,
        repeats=args.repeats,
        trace=args.trace,
        gsm8k=settings,
        external=external,
        environment=target.environment(server_args, args.seed, external=external),
    )
    _check_programs(plan, target, notes)
    if plan.repeats < _FEWEST_REPEATS:
        notes.append(f"{plan.repeats} repeats per phase give wide intervals; {_FEWEST_REPEATS} or more are usual")
    return plan, notes


def _check_programs(plan: Plan, target: Target, notes: list[str]) -> None:
    """Refuse a release whose programs lack a needed flag; note the optional ones that are left out."""
    place = Path("unused")
    options = benchmark.one_batch_options(plan.shapes[0], "", 0, place, plan.model if plan.external else None)
    if plan.trace:
        options += benchmark.profile_options(place, 1)
    for flag in benchmark.left_out(target.benchmark, options):
        notes.append(f"{target.benchmark.module} of {target.release} has no {flag}; it is left out")
    if plan.gsm8k is not None:
        if target.gsm8k is None:
            raise CommandError(f"SGLang {target.release} has no few-shot GSM8K program: leave out --gsm8k")
        benchmark.left_out(target.gsm8k, benchmark.gsm8k_options(place, plan.gsm8k, ""))


def _check_server_choice(args: argparse.Namespace) -> None:
    if args.base_url is None:
        for name, value in (("--arm", args.arm), ("--server-log", args.server_log)):
            if value is not None:
                raise CommandError(f"{name} {value} is for a server that you started: give its --base-url too")
        return
    if args.arm is None:
        raise CommandError(f"--base-url {args.base_url} needs --arm off or --arm on: what does that server run?")
    if args.arm not in _arms(args.arms):
        raise CommandError(f"--arm {args.arm} is not among --arms {args.arms}")
    if not args.base_url.startswith(("http://", "https://")) or args.base_url.endswith("/"):
        raise CommandError(f"--base-url {args.base_url!r} is not like http://127.0.0.1:30000 (no slash at the end)")
    if args.server_log is not None and not args.server_log.is_file():
        raise CommandError(f"--server-log {args.server_log} is not a file")


def _check_next_arm(given: str, needed: str, number: int) -> None:
    if given != needed:
        raise CommandError(
            f"the next phase of this run is {number}, arm {needed}, not {given}: start the server with "
            f"SGLANG_GDN_ZEROCOPY={int(needed == 'on')} and give --arm {needed}"
        )


def _check_server(base_url: str, target: Target, shapes: Sequence[Shape], notes: list[str]) -> None:
    """Refuse a server of another release; note one that will be silent about its acceptance length."""
    facts = server_facts(base_url)
    if facts.version is not None and facts.version != target.release:
        raise CommandError(
            f"the server at {base_url} is SGLang {facts.version} and {target.python} has {target.release}: give the "
            "python of the server's environment with --python"
        )
    needed = acceptance.needed_interval(shapes, facts.speculative)
    interval = facts.decode_log_interval
    if interval is not None and interval > needed and acceptance.speculates(facts.speculative):
        notes.append(
            f"the server at {base_url} states its acceptance length every {interval} decode passes, "
            f"which a run may not reach: start it with {acceptance.LOG_INTERVAL} {needed} in both arms"
        )


def _stating_acceptance(shapes: Sequence[Shape], server_args: tuple[str, ...], notes: list[str]) -> tuple[str, ...]:
    """The arguments with which the server states its acceptance length in every run, in both arms alike."""
    needed = acceptance.needed_interval(shapes, server_args)
    if not acceptance.speculates(server_args) or acceptance.log_interval(server_args) <= needed:
        return server_args
    if acceptance.option(server_args, acceptance.LOG_INTERVAL) is not None:
        notes.append(
            f"with {acceptance.LOG_INTERVAL} {acceptance.log_interval(server_args)} a run may end before the server "
            f"states its acceptance length; {needed} or less is safe for these shapes"
        )
        return server_args
    notes.append(
        f"{acceptance.LOG_INTERVAL} {needed} is added for both arms: the shortest run may take no more verify passes, "
        f"and stock states its acceptance length every {acceptance.STOCK_LOG_INTERVAL}"
    )
    return (*server_args, acceptance.LOG_INTERVAL, str(needed))


def _check_overlay(target: Target) -> None:
    if target.overlay == "none":
        raise CommandError(
            f"{target.python} lacks the overlay, its on arm would be stock: pip install sglang-gdn-zerocopy there"
        )
    allowed = [name.strip() for name in SGLANG_PLUGINS.read().split(",") if name.strip()]
    if allowed and _PLUGIN not in allowed:
        raise CommandError(
            f"SGLANG_PLUGINS={','.join(allowed)} keeps SGLang from loading the overlay: add {_PLUGIN} or unset it"
        )


def _arms(text: str) -> tuple[str, ...]:
    arms = tuple(text.split(","))
    if not set(arms) <= set(ARMS) or len(set(arms)) != len(arms):
        raise CommandError(f"--arms {text!r} is not off,on (or one of them, or on,off)")
    return arms


def _shapes(text: str) -> tuple[Shape, ...]:
    shapes = tuple(_shape(part) for part in text.split(","))
    if len(set(shapes)) != len(shapes):
        raise CommandError(f"--shapes {text!r} names a shape twice; use --repeats for more runs")
    return shapes


def _shape(text: str) -> Shape:
    parts = text.strip().split(":")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise CommandError(f"--shapes: {text!r} is not input:output:batch with three positive numbers, as 256:256:8")
    shape = Shape(*map(int, parts))
    if shape.output_len < 2:
        raise CommandError(f"--shapes: {text!r} ends with the prefill's token and verifies none; use 2 or more")
    return shape


def _gsm8k(args: argparse.Namespace, notes: list[str]) -> Gsm8k | None:
    if args.gsm8k is None:
        if args.gsm8k_sha256 is not None:
            raise CommandError("--gsm8k-sha256 needs --gsm8k FILE")
        return None
    try:
        content = args.gsm8k.read_bytes()
    except OSError as error:
        raise CommandError(f"--gsm8k {args.gsm8k} cannot be read: {error.strerror}") from None
    digest = hashlib.sha256(content).hexdigest()
    if args.gsm8k_sha256 is None:
        notes.append(f"--gsm8k {args.gsm8k} has SHA-256 {digest}")
    elif args.gsm8k_sha256.lower() != digest:
        raise CommandError(f"--gsm8k {args.gsm8k} has SHA-256 {digest}, not {args.gsm8k_sha256}: get the file again")
    questions = content.splitlines()
    try:
        complete = {"question", "answer"} <= set(json.loads(questions[0]))
    except (IndexError, ValueError, TypeError):
        complete = False
    if not complete:
        raise CommandError(f"--gsm8k {args.gsm8k}: line 1 is no JSON object with 'question' and 'answer'")
    if len(questions) < max(args.gsm8k_questions, args.gsm8k_shots):
        raise CommandError(
            f"--gsm8k {args.gsm8k} has {len(questions)} questions: lower --gsm8k-questions {args.gsm8k_questions} and "
            f"--gsm8k-shots {args.gsm8k_shots}"
        )
    return Gsm8k(
        sha256=digest,
        questions=args.gsm8k_questions,
        shots=args.gsm8k_shots,
        max_new_tokens=args.gsm8k_max_new_tokens,
        parallel=args.gsm8k_parallel,
    )


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar in a terminal, plain lines elsewhere."""
    if not sys.stdout.isatty():
        yield PlainProgress(lambda line: print(line, flush=True))
        return
    try:
        from rich import progress as rich_progress
    except ImportError:
        raise CommandError("the progress bar needs rich: pip install 'sglang-gdn-zerocopy[cli]'") from None
    columns = (
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TextColumn("{task.fields[left]}"),
    )
    with rich_progress.Progress(*columns) as bar:
        yield BarProgress(bar)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 < value < 65536:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and 65535")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return value
