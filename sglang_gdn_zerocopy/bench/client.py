"""The few HTTP questions that `ab` asks a server itself; the load comes from the stock benchmark."""

from __future__ import annotations

import json
import re
import socket
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.parse import urlsplit

_TIMEOUT_S = 10.0
# The first request with log-probabilities may compile kernels.
_GENERATE_TIMEOUT_S = 300.0
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}
_INTER_TOKEN = re.compile(r"^sglang:inter_token_latency_seconds_(sum|count)(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)


def healthy(base_url: str) -> bool:
    """Whether ``/health`` answers 200."""
    return _get(base_url, "/health") is not None


class Refused(Exception):  # noqa: N818 - the server's own answer, not a failure of ours
    """The server answered a request with an error; the text is its own."""


class Facts(NamedTuple):
    """What a server says about itself; None where it says nothing. ``speculative`` are the arguments of its
    speculative decoding as it resolved them, empty without any."""

    version: str | None
    decode_log_interval: int | None
    speculative: tuple[str, ...]


def server_facts(base_url: str) -> Facts:
    """The server's release, after how many decode passes it states its figures, and how it drafts."""
    text = _get(base_url, "/server_info")
    try:
        answer: Any = json.loads(text or "null")
    except ValueError:
        answer = None
    said = answer if isinstance(answer, dict) else {}
    version, interval = said.get("version"), said.get("decode_log_interval")
    names = ("speculative_algorithm", "speculative_num_steps", "speculative_num_draft_tokens")
    drafts = [(f"--{name.replace('_', '-')}", str(said[name])) for name in names if said.get(name) is not None]
    return Facts(
        version if isinstance(version, str) else None,
        interval if isinstance(interval, int) else None,
        tuple(word for pair in drafts for word in pair),
    )


def inter_token_latency(base_url: str) -> tuple[float, float] | None:
    """Sum in seconds and count of all inter-token latencies since the server's start; None without ``/metrics``
    (a stock server has it when it was started with ``--enable-metrics``)."""
    found = _INTER_TOKEN.findall(_get(base_url, "/metrics") or "")
    if not found:
        return None
    totals = {"sum": 0.0, "count": 0.0}
    for name, value in found:
        totals[name] += float(value)
    return totals["sum"], totals["count"]


def generate(base_url: str, prompt: str, max_new_tokens: int, *, logprobs: bool) -> dict[str, Any]:
    """The server's greedy continuation of ``prompt``, as it answers it.

    Raises :class:`Refused` when the server answers something else, ``OSError`` when it cannot be reached.
    """
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens}
    body = {"text": prompt, "sampling_params": sampling, "return_logprob": logprobs}
    request = urllib.request.Request(
        base_url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with _opener(base_url).open(request, timeout=_GENERATE_TIMEOUT_S) as reply:
            answer: Any = json.loads(reply.read())
    except urllib.error.HTTPError as error:
        raise Refused(f"HTTP {error.code}: {error.read(500).decode(errors='replace')}") from None
    except HTTPException as error:
        raise OSError(f"the connection broke: {error!r}") from None
    except ValueError as error:
        raise Refused(f"no JSON: {error}") from None
    if not isinstance(answer, dict):
        raise Refused(f"no object: {str(answer)[:500]}")
    return answer


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen on ``host:port`` now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Connections of the last server that linger in TIME_WAIT are no listener.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _opener(base_url: str) -> urllib.request.OpenerDirector:
    # A proxy from the environment cannot reach this machine's loopback.
    local = urlsplit(base_url).hostname in _LOOPBACK
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if local else []))


def _get(base_url: str, path: str) -> str | None:
    try:
        with _opener(base_url).open(base_url + path, timeout=_TIMEOUT_S) as answer:
            body: bytes = answer.read()
            return body.decode(errors="replace") if answer.status == 200 else None
    except (OSError, HTTPException, urllib.error.URLError):
        return None
