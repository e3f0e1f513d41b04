"""Counts by reason, one line a reason, and lines that can be read back."""

from __future__ import annotations

import logging
import os

import pytest

from sglang_gdn_zerocopy.ledger import Ledger, parse_statement
from sglang_gdn_zerocopy.records import Decision, Protocol, Route

VIEWS = Decision(Route.VIEWS, "the kernel reads views")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "sglang_gdn_zerocopy")
    return caplog


def test_each_reason_is_said_once_and_counted_always(log: pytest.LogCaptureFixture) -> None:
    ledger = Ledger()
    for _ in range(3):
        ledger.decided(Protocol.SNAPSHOTS, VIEWS)
    ledger.decided(Protocol.FOLD_RING, VIEWS)
    assert len(log.messages) == 2
    rows = {(row["stage"], row["reason"]): row["count"] for row in ledger.as_rows()}
    assert rows == {
        ("snapshots target verify -> views", VIEWS.reason): 3,
        ("fold ring target verify -> views", VIEWS.reason): 1,
    }


def test_a_route_to_upstream_is_a_warning(log: pytest.LogCaptureFixture) -> None:
    ledger = Ledger()
    ledger.decided(Protocol.SNAPSHOTS, Decision(Route.UPSTREAM, "no copy to remove"))
    ledger.decided(Protocol.SNAPSHOTS, VIEWS)
    assert [record.levelno for record in log.records] == [logging.WARNING, logging.INFO]


def test_statements_are_read_back(log: pytest.LogCaptureFixture) -> None:
    ledger = Ledger()
    ledger.installed("SGLang 0.5.17, stock")
    ledger.declined("unknown build")
    ledger.decided(Protocol.FOLD_RING, VIEWS)
    ledger.decided(None, Decision(Route.UPSTREAM, "a ragged verify layout is set"))
    statements = [parse_statement(f"[2026-01-01 00:00:00 TP0] {message}") for message in log.messages]
    pid = os.getpid()
    assert statements == [
        ("installed", pid, "", "", "SGLang 0.5.17, stock"),
        ("declined", pid, "", "", "unknown build"),
        ("live", pid, "fold ring", "views", VIEWS.reason),
        ("live", pid, "", "upstream", "a ragged verify layout is set"),
    ]
    assert parse_statement("[2026-01-01] GDN kernel dispatcher: decode=TritonGDNKernel") is None


def test_a_stream_of_new_reasons_does_not_grow_the_process(log: pytest.LogCaptureFixture) -> None:
    ledger = Ledger()
    for number in range(10_000):
        ledger.decided(None, Decision(Route.UPSTREAM, f"{number} rows"))
    assert len(ledger.counts) <= Ledger._LIMIT + 1
    assert sum(ledger.counts.values()) == 10_000


def test_a_full_ledger_still_counts_what_it_knows() -> None:
    ledger = Ledger()
    for number in range(Ledger._LIMIT + 1):
        ledger.count("stage", str(number))
    ledger.count("stage", "0")
    assert ledger.counts["stage", "0"] == 2


class Counting:
    """A reporter that counts what it is told."""

    def __init__(self) -> None:
        self.changes = 0

    def changed(self) -> None:
        self.changes += 1

    def pulse(self) -> None:
        """Not asked for here."""


def test_the_reporter_hears_of_what_is_new() -> None:
    ledger = Ledger()
    ledger.reporter = reporter = Counting()
    for reason in ("one", "one", "another", "one"):
        ledger.count("stage", reason)
    assert reporter.changes == 2


def test_reset_starts_from_zero(log: pytest.LogCaptureFixture) -> None:
    ledger = Ledger()
    for _ in range(2):
        ledger.installed("once")
        ledger.decided(Protocol.SNAPSHOTS, VIEWS)
        ledger.reset()
        assert ledger.as_rows() == []
    assert len(log.messages) == 4
