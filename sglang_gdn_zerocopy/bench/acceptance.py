"""When a stock server states its acceptance length, and what makes it do so for every shape.

In all supported releases the server counts accepted tokens per verify pass and adds the counts to those that
``/server_info`` shows only once every ``--decode-log-interval`` decode passes (40 unless set). ``/flush_cache``, with
which the stock benchmark begins every run, sets both to zero. So the acceptance length of a run covers that run alone,
in whole intervals, and a run of fewer passes has none however many drafts were accepted: 128 output tokens at 4 tokens
per pass are 32 passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sglang_gdn_zerocopy.bench.measurement import Shape

LOG_INTERVAL = "--decode-log-interval"
STOCK_LOG_INTERVAL = 40
# Where the arguments say nothing stock takes at most 8 tokens for EAGLE and NEXTN, 12 for NGRAM, 16 for DFLASH.
_UNKNOWN_TOKENS_PER_PASS = 16


def option(server_args: Sequence[str], *flags: str) -> str | None:
    """The value of the last of ``flags`` in ``server_args`` ("" for a flag without one), None without any."""
    found = None
    for word, following in zip(server_args, [*server_args, ""][1:], strict=True):
        name, equals, value = word.partition("=")
        if name in flags:
            found = value if equals else "" if following.startswith("--") else following
    return found


def speculates(server_args: Sequence[str]) -> bool:
    """Whether the arguments name a speculative algorithm, abbreviated or not."""
    return any(word.startswith("--speculative-algo") for word in server_args)


def log_interval(server_args: Sequence[str]) -> int:
    """Decode passes between two statements of a server with these arguments."""
    return _number(option(server_args, LOG_INTERVAL)) or STOCK_LOG_INTERVAL


def fewest_passes(shape: Shape, server_args: Sequence[str]) -> int:
    """Verify passes of a run of ``shape`` in which every draft is accepted (the prefill makes the first token)."""
    steps = _number(option(server_args, "--speculative-num-steps"))
    drafts = _number(option(server_args, "--speculative-num-draft-tokens"))
    bounds = [bound for bound in (steps and steps + 1, drafts) if bound]
    per_pass = min(bounds, default=_UNKNOWN_TOKENS_PER_PASS)
    return max(1, -(-(shape.output_len - 1) // per_pass))


def needed_interval(shapes: Iterable[Shape], server_args: Sequence[str]) -> int:
    """The longest interval, up to stock's own, after which every run of every shape has been stated."""
    return min(STOCK_LOG_INTERVAL, *(fewest_passes(shape, server_args) for shape in shapes))


def silence(shape: Shape, server_args: Sequence[str]) -> str:
    """Why a run of ``shape`` may have no acceptance length, with the remedy."""
    if not speculates(server_args):
        return "the server arguments name no speculative algorithm; was speculative decoding on?"
    interval, passes = log_interval(server_args), fewest_passes(shape, server_args)
    if passes < interval:
        return (
            f"the server states it every {interval} decode passes and this shape may take as few as {passes}; measure "
            f"again with {LOG_INTERVAL} {passes}"
        )
    return f"the server states it every {interval} decode passes and this shape takes more; see the server's log"


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None
