from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_gdn_zerocopy.tracing import stream
from sglang_gdn_zerocopy.tracing.records import TraceError
from sglang_gdn_zerocopy.tracing.stream import EventStream, open_events

EVENT = {"ph": "X", "cat": "kernel", "name": "k", "ts": 1.5, "dur": 2, "args": {"correlation": 3}}


def read(path: Path) -> list[dict[str, Any]]:
    with open_events(path) as events:
        return list(events)


def text_of(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("top", ["object", "list"])
def test_object_and_list_plain_and_gzip_whatever_the_suffix(tmp_path: Path, packed: bool, top: str) -> None:
    data = json.dumps({"a": {"b": [1, 2]}, "traceEvents": [EVENT], "z": "end"} if top == "object" else [EVENT]).encode()
    # The name says the opposite of the content.
    path = tmp_path / ("t.json" if packed else "t.json.gz")
    path.write_bytes(gzip.compress(data) if packed else data)
    assert read(path) == [EVENT]


def test_raw_control_characters_in_a_name(tmp_path: Path) -> None:
    path = text_of(tmp_path / "t.json", '[{"ph": "X", "name": "a\x01\tb"}]')
    assert read(path) == [{"ph": "X", "name": "a\x01\tb"}]


@pytest.mark.parametrize(("end", "more"), [(",{}]", [{}]), (", ]", []), (", {} ,]", [{}]), (',null, 7, "x"]', [])])
def test_empty_trailing_events(tmp_path: Path, end: str, more: list[dict[str, Any]]) -> None:
    assert read(text_of(tmp_path / "t.json", "[" + json.dumps(EVENT) + end)) == [EVENT, *more]


def test_unescaped_quotes_cost_one_event(tmp_path: Path) -> None:
    good = json.dumps(EVENT)
    bad = '{"ph": "X", "name": "say "hi"", "args": {"list": [{"name": "inner"}, {"x": 1}]}, "ts": 1}'
    path = text_of(tmp_path / "t.json", f'{{"traceEvents": [{good},\n{bad},\n{good}, {good}], "traceName": "t"}}')
    with open_events(path) as events:
        assert list(events) == [EVENT] * 3
        assert events.damaged == 1


def test_bytes_that_are_no_utf8(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_bytes(b'[{"ph": "X", "name": "a\xff"}]')
    assert read(tmp_path / "t.json") == [{"ph": "X", "name": "a�"}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("hello", "is not JSON"),
        ('{"a": 1}', "without a traceEvents list"),
        ('{"a": tru, "traceEvents": []}', "is not JSON"),
        ('{"a" 1}', "is not JSON"),
        ('[{"ph": "X"}] trailing', "goes on after its end"),
        ('[{"ph": "X"}', "is truncated"),
        ('[{"ph": "X"}, {"ph": "X", "name', "is truncated"),
        ('{"traceEvents": [{"ph": "X"}]', "is truncated"),
        ('{"a": {"b": [1, 2', "is truncated"),
    ],
)
def test_what_is_not_a_trace_says_so(tmp_path: Path, text: str, message: str) -> None:
    path = text_of(tmp_path / "t.json", text)
    with pytest.raises(TraceError, match=message) as caught:
        read(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.95])
def test_truncated_gzip(tmp_path: Path, keep: float) -> None:
    data = gzip.compress(json.dumps([{**EVENT, "name": f"kernel{i * i}"} for i in range(2000)]).encode())
    (tmp_path / "t.json.gz").write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(TraceError, match="is truncated"):
        read(tmp_path / "t.json.gz")


def test_damaged_gzip(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(json.dumps([{**EVENT, "name": f"kernel{i * i}"} for i in range(2000)]).encode()))
    # A wrong checksum at the end: every event decodes.
    data[-8] ^= 0xFF
    (tmp_path / "t.json.gz").write_bytes(bytes(data))
    with pytest.raises(TraceError, match="damaged gzip"):
        read(tmp_path / "t.json.gz")


def test_unreadable_path(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read(tmp_path / "missing.json")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


# No deadline: a busy machine must not turn a slow example into a failure.
@settings(deadline=None)
@given(
    st.lists(st.dictionaries(st.text(max_size=4), VALUES, max_size=4), max_size=6),
    st.dictionaries(st.text(max_size=4), VALUES, max_size=3),
    st.integers(1, 40),
    st.booleans(),
)
def test_any_chunk_size_gives_what_json_gives(
    events: list[dict[str, Any]], rest: dict[str, Any], chunk: int, ascii_only: bool
) -> None:
    text = json.dumps({**rest, "traceEvents": events, "last": 12345}, ensure_ascii=ascii_only, indent=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "_CHUNK", chunk)
        assert list(EventStream(io.StringIO(text))) == events


class Pieces:
    """A text made while it is read; ``longest`` is the most that the reader held at a read."""

    def __init__(self, pieces: Iterable[str]) -> None:
        self.events = EventStream(self)
        self.longest = 0
        self._pieces = iter(pieces)

    def read(self, size: int, /) -> str:
        self.longest = max(self.longest, len(self.events._buffer))
        return next(self._pieces, "")


def test_memory_stays_bounded() -> None:
    piece = (json.dumps(EVENT) + ",") * 2000
    text = Pieces(["[", *[piece] * 100, "{}]"])
    assert sum(1 for _ in text.events) == 200_001
    assert text.longest <= 2 * len(piece)


def test_a_long_damaged_event_is_not_kept() -> None:
    text = Pieces(['[{"ph": "X", "name": "a"b"', *["junk " * 1000] * 100, "}", " ,", ' {"ph"', ': "X"}]'])
    assert list(text.events) == [{"ph": "X"}]
    assert text.events.damaged == 1
    assert text.longest <= 2 * 5000 + 256


def test_advance_counts_the_stored_bytes(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(json.dumps([EVENT] * 5000).encode()))
    seen: list[int] = []
    with open_events(path, seen.append) as events:
        assert len(list(events)) == 5000
    assert sum(seen) == path.stat().st_size
