"""The content check: what is asked, when, what is recorded, and what `report` makes of it."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_gdn_zerocopy.bench import content
from sglang_gdn_zerocopy.bench.client import Refused
from sglang_gdn_zerocopy.bench.content import PROMPTS, Answer, Content, from_dict
from sglang_gdn_zerocopy.bench.render import to_html, to_json, to_markdown
from sglang_gdn_zerocopy.bench.verdict import judge
from sglang_gdn_zerocopy.cli import ab, report
from sglang_gdn_zerocopy.cli.errors import CommandError
from tests.bench import standin_server
from tests.bench.report_runs import ENVIRONMENT, change_where, steady, write

GOOD = Answer("p", "Paris, of course.", 64, 0.6, 64, 64, None)
REPEATED = replace(GOOD, text="!" * 64, distinct=1 / 64)
# Nothing is simulated here: the texts are the model's.
REAL = replace(ENVIRONMENT, simulated_acceptance=None)


def contents(off: Answer, on: Answer) -> list[Content]:
    """Four phases, all answers of an arm alike."""
    return [
        Content(arm, pair, 2 * pair + place, tuple(replace(answer, prompt=prompt) for prompt in PROMPTS))
        for pair in (0, 1)
        for place, (arm, answer) in enumerate((("off", off), ("on", on)))
    ]


def judged(off: Answer, on: Answer, **environment: Any) -> Any:
    rows = change_where(steady(), lambda m: True, environment=replace(REAL, **environment))
    return judge(rows, content=contents(off, on))


@pytest.mark.parametrize(
    ("change", "degenerate"),
    [
        ({}, False),
        ({"text": " \n"}, True),
        ({"distinct": 5 / 64}, True),
        ({"distinct": 6 / 64}, False),
        # Too short to tell: a model may say one word some times.
        ({"tokens": 15, "distinct": 1 / 15}, False),
        ({"tokens": 16, "distinct": 1 / 16}, True),
        ({"finite": 63}, True),
        ({"finite": None, "logprobs": None}, False),
        ({"error": "HTTP 500: no"}, True),
    ],
)
def test_what_is_degenerate(change: dict[str, Any], degenerate: bool) -> None:
    assert replace(GOOD, **change).degenerate is degenerate


def test_half_of_the_answers_make_a_phase_degenerate() -> None:
    assert not Content("on", 0, 1, (GOOD, GOOD, REPEATED)).degenerate
    assert Content("on", 0, 1, (GOOD, REPEATED)).degenerate


def test_different_texts_alone_are_not_broken() -> None:
    """Equal acceptance and other words: rounding turned a greedy token somewhere."""
    found = judged(GOOD, replace(GOOD, text="It is Paris."))
    assert found.refusals == ()
    assert found.headline.startswith("Output throughput with the overlay on")
    assert any("0 of 12 answers of the content check are the same text" in note for note in found.notes)
    assert not any(word in " ".join(found.notes) for word in ("broken", "wrong", "degenerate"))


@pytest.mark.parametrize(
    "bad", [REPEATED, replace(GOOD, text=""), replace(GOOD, finite=0), replace(GOOD, error="HTTP 500: no")]
)
def test_one_degenerate_arm_refuses_the_headline(bad: Answer) -> None:
    found = judged(GOOD, bad)
    assert found.headline is None
    assert found.refusals == (
        "the on-arm's answers are degenerate and the off-arm's are not: content check of pair 0 (6 of 6), "
        "pair 1 (6 of 6)",
    )
    assert judged(bad, GOOD).refusals[0].startswith("the off-arm's answers are degenerate and the on-arm's are not")


def test_two_degenerate_arms_are_noted() -> None:
    found = judged(REPEATED, REPEATED)
    assert found.refusals == ()
    assert any("The answers of both arms are degenerate" in note for note in found.notes)


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"simulated_acceptance": 4.0}, "acceptance was simulated"),
        ({"server_args": ("--load-format", "dummy")}, "the weights are dummies"),
        ({"server_args": ("--load-format=dummy",)}, "the weights are dummies"),
    ],
)
def test_noise_is_shown_and_judges_nothing(environment: dict[str, Any], why: str) -> None:
    found = judged(GOOD, REPEATED, **environment)
    assert found.refusals == ()
    assert any(f"judges nothing: {why}" in note for note in found.notes)


def test_a_phase_without_a_check_is_named() -> None:
    rows = change_where(steady(), lambda m: True, environment=REAL)
    found = judge(rows, content=contents(GOOD, GOOD)[:3])
    assert any("No content check of phase 3 (on)" in note for note in found.notes)


def test_every_format_shows_both_arms() -> None:
    found = judged(GOOD, replace(REPEATED, finite=63))
    markdown = to_markdown(found, None)
    assert "## Content check after the timed runs" in markdown
    assert "| 0 | off | 6 | 0 | 64 | 60 | 60 | 384 of 384 |" in markdown
    assert "| 1 | on | 6 | 6 | 64 | 2 | 2 | 378 of 384 |" in markdown
    assert "fewer than 8% distinct tokens among 16 or more" in markdown
    assert "Content check after the timed runs" in to_html(found, None, "", [])
    assert [c["degenerate"] for c in json.loads(to_json(found, None))["content"]] == [0, 6, 0, 6]


def test_the_record_survives_its_own_format_and_bad_ones_are_named(tmp_path: Path) -> None:
    write(steady(), tmp_path)
    wanted = contents(GOOD, REPEATED)[1]
    assert from_dict(json.loads(wanted.to_json())) == wanted
    file = tmp_path / "phase-1-on.content.json"
    file.write_text(wanted.to_json() + "\n")
    assert report.read_evidence(tmp_path).content == [wanted]
    good = json.loads(wanted.to_json())
    for bad, said in (
        ({**good, "schema": 2}, "schema 2 is not 1"),
        ({**good, "arm": "base"}, "neither off nor on"),
        ({**good, "answers": []}, "no answers"),
        ({**good, "answers": [{"prompt": "p"}]}, "is no content check"),
        ({**good, "answers": [{**good["answers"][0], "tokens": "many"}]}, "is no content check"),
    ):
        file.write_text(json.dumps(bad))
        with pytest.raises(CommandError, match=said):
            report.read_evidence(tmp_path)


def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arms: str, **control: object) -> tuple[int, Path]:
    """A short run of `ab` in this process against the stand-in; its exit code and folder."""
    tree, out = tmp_path / "tree", tmp_path / "out"
    standin_server.install(tree, "0.5.17", **control)
    monkeypatch.setenv("PYTHONPATH", str(tree))
    words = ["ab", "--model", "m", "--shapes", "4:8:1", "--repeats", "3", "--pairs", "2", "--arms", arms]
    words += ["--out", str(out), "--port", str(standin_server.free_port()), "--cooldown", "0"]
    parser = argparse.ArgumentParser()
    ab.add_parser(parser.add_subparsers())
    return int(ab.run(parser.parse_args(words))), out


def test_garbage_in_one_arm_is_found_after_the_timed_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out = measured(tmp_path, monkeypatch, "off,on", answers="garbage")
    assert code == 0
    for path in out.glob("phase-?-o*.log"):
        if "client" not in path.name:
            # Warm-up and three repeats first, then the questions, each without and with log-probabilities.
            assert path.read_text().count("asked after 4 batches") == path.read_text().count("asked after") == 12
    evidence = report.read_evidence(out)
    assert [(c.arm, c.bad, c.finite) for c in evidence.content] == [("off", 0, (384, 384)), ("on", 6, (384, 384))] * 2
    assert "the on-arm's answers are degenerate" in " ".join(
        judge(evidence.measurements, content=evidence.content).refusals
    )


@pytest.mark.parametrize(
    ("answers", "bad", "finite", "error"),
    [
        ("nan", 6, (378, 384), None),
        ("no logprobs", 0, None, None),
        ("refuse", 6, None, "HTTP 400: not supported here"),
    ],
)
def test_what_servers_answer(
    answers: str,
    bad: int,
    finite: tuple[int, int] | None,
    error: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, out = measured(tmp_path, monkeypatch, "off", answers=answers)
    assert code == 0
    found = report.read_evidence(out).content[0]
    assert (found.bad, found.finite, found.answers[0].error) == (bad, finite, error)


def test_a_server_that_breaks_off_costs_no_timings_and_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = measured(tmp_path, monkeypatch, "off", answers="drop")
    said = capsys.readouterr()
    assert code == 1
    assert "no content check of phase-0-off: " in said.out
    assert "phase-0-off lacks its content" in said.err
    assert len(report.read_evidence(out).measurements) == 6


def test_an_answer_without_ids_is_counted_by_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(base_url: str, prompt: str, max_new_tokens: int, *, logprobs: bool) -> dict[str, Any]:
        if logprobs:
            raise Refused("no")
        return {"text": "one two two"}

    monkeypatch.setattr(content, "generate", answer)
    found = content.ask("")[0]
    assert found.tokens == 3
    assert found.distinct == pytest.approx(2 / 3)
