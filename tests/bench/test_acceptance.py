"""When a server states its acceptance length: against the eleven releases' sources, and what `ab` and `report` say."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_gdn_zerocopy.bench import acceptance
from sglang_gdn_zerocopy.bench.acceptance import fewest_passes, log_interval, needed_interval, option, silence
from sglang_gdn_zerocopy.bench.measurement import Shape
from sglang_gdn_zerocopy.bench.verdict import judge
from sglang_gdn_zerocopy.cli import ab
from sglang_gdn_zerocopy.upstream.releases import RELEASES
from tests.bench.report_runs import ENVIRONMENT, change_where, steady

DRAFTS = ("--speculative-algorithm", "NEXTN", "--speculative-num-draft-tokens", "4")
SHORT, LONG = Shape(256, 128, 64), Shape(256, 256, 64)


def functions(path: Path) -> dict[str, str]:
    """The text of every function of a file by its name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("release", RELEASES)
def test_what_the_rule_rests_on_in_every_release(release: str, stock_tree: Callable[[str], Path]) -> None:
    managers = stock_tree(release) / "sglang" / "srt" / "managers"
    reporter = functions(managers / "scheduler_components" / "metrics_reporter.py")
    # The totals of /server_info grow behind the interval's guard alone, and a flush sets them and the pass count to 0.
    before, guard, after = reporter["report_decode_stats"].partition("decode_log_interval != 0:\n        return")
    assert guard
    assert "spec_total_num_forward_ct += " in after
    assert "spec_total_num_forward_ct += " not in before
    for name in ("forward_ct_decode", "spec_num_forward_ct", "spec_total_num_forward_ct"):
        assert f"self.{name} = 0" in reporter["reset_metrics"]
    assert "reset_metrics()" in functions(managers / "scheduler.py")["flush_cache"]
    homes = ("benchmark/one_batch_server.py", "test/bench_one_batch_server_internal.py")
    (home,) = (path for path in (stock_tree(release) / "sglang" / home for home in homes) if path.is_file())
    assert "'/flush_cache'" in functions(home)["run_one_case"]
    arguments = [
        managers.parent / "server_args.py",
        *sorted((managers.parent / "arg_groups" / "fields").glob("observability.py")),
    ]
    fields = [
        node
        for path in arguments
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "decode_log_interval"
    ]
    assert {ast.literal_eval(field.value) for field in fields if field.value} == {acceptance.STOCK_LOG_INTERVAL}


@pytest.mark.parametrize(
    ("args", "value"),
    [
        (("--a", "4"), "4"),
        (("--a=4",), "4"),
        (("--a", "4", "--a", "5"), "5"),
        (("--a", "--b"), ""),
        (("--b", "--a"), ""),
        (("--b", "4"), None),
        ((), None),
    ],
)
def test_options_are_found_as_argparse_finds_them(args: tuple[str, ...], value: str | None) -> None:
    assert option(args, "--a") == value


@pytest.mark.parametrize(
    ("shape", "args", "passes"),
    [
        (SHORT, DRAFTS, 32),
        (LONG, DRAFTS, 64),
        (LONG, ("--speculative-num-steps", "7"), 32),
        (LONG, ("--speculative-num-steps", "3", "--speculative-num-draft-tokens", "16"), 64),
        (LONG, (), 16),
        (Shape(1, 2, 1), DRAFTS, 1),
    ],
)
def test_fewest_passes_with_every_draft_accepted(shape: Shape, args: tuple[str, ...], passes: int) -> None:
    assert fewest_passes(shape, args) == passes


def test_the_interval_reaches_the_shortest_shape_and_never_exceeds_stocks() -> None:
    assert needed_interval([SHORT, LONG], DRAFTS) == 32
    assert needed_interval([LONG], DRAFTS) == 40
    assert needed_interval([Shape(1, 2, 1), LONG], DRAFTS) == 1
    assert log_interval(()) == 40
    assert log_interval(("--decode-log-interval=7",)) == 7


@pytest.mark.parametrize(
    ("shapes", "args", "added", "said"),
    [
        ([LONG, SHORT], DRAFTS, ("--decode-log-interval", "32"), "--decode-log-interval 32 is added for both arms"),
        ([LONG], DRAFTS, (), None),
        ([SHORT], (), (), None),
        ([SHORT], (*DRAFTS, "--decode-log-interval", "8"), (), None),
        ([SHORT], (*DRAFTS, "--decode-log-interval", "64"), (), "with --decode-log-interval 64 a run may end before"),
    ],
)
def test_ab_makes_the_server_state_it(
    shapes: list[Shape], args: tuple[str, ...], added: tuple[str, ...], said: str | None
) -> None:
    notes: list[str] = []
    assert ab._stating_acceptance(shapes, args, notes) == (*args, *added)
    assert [note[: len(said or "")] for note in notes] == ([said] if said else [])


@pytest.mark.parametrize(
    ("shape", "args", "why"),
    [
        (SHORT, DRAFTS, "may take as few as 32; measure again with --decode-log-interval 32"),
        (LONG, DRAFTS, "every 40 decode passes and this shape takes more; see the server's log"),
        (SHORT, ("--tp", "2"), "the server arguments name no speculative algorithm"),
    ],
)
def test_silence_has_a_reason(shape: Shape, args: tuple[str, ...], why: str) -> None:
    assert why in silence(shape, args)


def test_one_silent_repeat_is_enough_and_is_named() -> None:
    environment = replace(ENVIRONMENT, server_args=DRAFTS)
    rows = change_where(steady(), lambda m: True, environment=environment)
    rows = change_where(rows, lambda m: (m.arm, m.pair, m.repeat) == ("on", 1, 2), acceptance_length=None)
    report = judge(rows)
    assert report.headline is None
    assert "no acceptance length in 1 of 5 runs of the on phase of pair 1: the server states it" in report.refusals[0]
