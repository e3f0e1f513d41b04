"""Trace files as a stream of events: bounded memory, plain or gzip, tolerant of the damage that profilers leave."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from sglang_gdn_zerocopy.tracing.records import TraceError

_CHUNK = 1 << 20
_DECODER = json.JSONDecoder(strict=False)
# Where reading may go on after an event that does not decode: the next object of the list, told from an object
# inside the damaged event by a first key that only events start with.
_NEXT_EVENT = re.compile(r'\}\s*,\s*(?=\{\s*"(?:ph|name|cat|pid|ts)"\s*:)')
# An incomplete literal, number or escape fails, or looks whole, this close to the end of the buffer.
_TAIL = 16


class _Text(Protocol):
    """Where the text comes from."""

    def read(self, size: int, /) -> str:
        """At most ``size`` characters, "" at the end."""


class _DamagedError(Exception):
    """The value at the read position does not decode. ``cut``: it only stops short, at the end of the text."""

    def __init__(self, text: str, cut: bool = False) -> None:
        super().__init__(text)
        self.cut = cut


class EventStream:
    """Iterates over the events (dicts) of a trace: ``{"traceEvents": [...], ...}`` or a bare list.

    After the iteration ``head`` holds the top-level value ``deviceProperties`` if there was one, and ``damaged`` the
    number of events that did not decode and were left out. Memory: the longest single value plus two chunks.
    Raises :class:`TraceError` when the text ends early or is not a trace.
    """

    def __init__(self, text: _Text) -> None:
        self.head: dict[str, Any] = {}
        self.damaged = 0
        self._text = text
        self._buffer = ""
        self._at = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        opening = self._peek()
        try:
            if opening == "[":
                yield from self._list()
            elif opening == "{":
                yield from self._object()
            else:
                raise TraceError("is empty" if opening == "" else "is not JSON")
        except _DamagedError as error:
            raise TraceError("is truncated" if error.cut else f"is not JSON: {error}") from None
        if self._peek():
            raise TraceError("is not JSON: it goes on after its end")

    def _object(self) -> Iterator[dict[str, Any]]:
        self._at += 1
        found = False
        while (mark := self._peek()) != "}":
            if mark == ",":
                self._at += 1
                continue
            key = self._value()
            if self._peek() != ":":
                raise _DamagedError(f"no value behind {str(key)[:40]!r}", cut=self._peek() == "")
            self._at += 1
            if key == "traceEvents" and self._peek() == "[":
                found = True
                yield from self._list()
                continue
            value = self._value()
            if key == "deviceProperties":
                self.head[key] = value
        self._at += 1
        if not found:
            raise TraceError("is JSON without a traceEvents list")

    def _list(self) -> Iterator[dict[str, Any]]:
        self._at += 1
        while (mark := self._peek()) != "]":
            if mark == "":
                raise TraceError("is truncated")
            if mark == ",":
                self._at += 1
                continue
            try:
                value = self._value()
            except _DamagedError:
                self._skip_damaged()
                self.damaged += 1
                continue
            if isinstance(value, dict):
                yield value
        self._at += 1

    def _value(self) -> Any:
        """The value at the read position, which moves behind it."""
        # raw_decode takes no leading space.
        self._peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._buffer, self._at)
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated") or error.pos >= len(self._buffer) - _TAIL
                if cut and self._fill():
                    continue
                start = self._buffer[self._at : self._at + 40]
                raise _DamagedError(f"{error.msg} in {start!r}", cut) from None
            except RecursionError:
                raise _DamagedError("nested too deeply") from None
            # A number near the end of the buffer may go on in the next chunk: "1" may be "1.5" or "1e+5".
            near_end = end > len(self._buffer) - _TAIL
            if near_end and isinstance(value, (int, float)) and self._fill():
                continue
            self._at = end
            return value

    def _skip_damaged(self) -> None:
        """Move to the next event. Raises :class:`TraceError` when there is none."""
        self._at += 1
        while (found := _NEXT_EVENT.search(self._buffer, self._at)) is None:
            # The separator itself may straddle two chunks.
            self._at = max(self._at, len(self._buffer) - 256)
            if not self._fill():
                raise TraceError("is truncated, or its last event is damaged")
        self._at = found.end()

    def _peek(self) -> str:
        """The next character that is not white space (the read position moves there), or "" at the end."""
        while True:
            while self._at < len(self._buffer):
                if not self._buffer[self._at].isspace():
                    return self._buffer[self._at]
                self._at += 1
            if not self._fill():
                return ""

    def _fill(self) -> bool:
        """Drop what was read and append more text: at least as much as is waiting, so that one long value costs
        time linear in its length. False, with nothing moved, at the end of the text."""
        waiting = self._buffer[self._at :]
        more = self._text.read(max(_CHUNK, len(waiting)))
        if more:
            self._buffer, self._at = waiting + more, 0
        return bool(more)


class _Counted(io.RawIOBase):
    """A raw file that reports every read."""

    def __init__(self, raw: BinaryIO, advance: Callable[[int], None]) -> None:
        self._raw = raw
        self._advance = advance

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._raw.read(len(buffer))
        buffer[: len(data)] = data
        self._advance(len(data))
        return len(data)


@contextmanager
def open_events(path: Path, advance: Callable[[int], None] | None = None) -> Iterator[EventStream]:
    """The events of ``path``; gzip is told by its magic bytes, not by the name.

    ``advance`` is called with the number of bytes (as stored on disk) of each read. Inside the context every failure
    to read, decompress or decode becomes a :class:`TraceError` that names the file.
    """
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            source = io.BufferedReader(_Counted(raw, advance or (lambda _: None)), _CHUNK)
            # GzipFile is a binary stream in all but its declared type.
            plain: Any = gzip.GzipFile(fileobj=source) if packed else source
            yield EventStream(io.TextIOWrapper(plain, encoding="utf-8-sig", errors="replace"))
    except EOFError:
        raise TraceError(
            f"{path} is truncated: its gzip stream has no end. Was the server killed while it wrote? Profile again"
        ) from None
    except (zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path} is a damaged gzip file ({error}). Profile again") from None
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from None
    except TraceError as error:
        if str(error).startswith(str(path)):
            raise
        raise TraceError(f"{path} {error}. Give a torch-profiler trace, or profile again") from None
