"""Every environment variable of the overlay: name, default, parser, help. The only reader of ``os.environ``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class SettingError(ValueError):
    """A variable holds a value that its parser does not know; the text names both and the remedy."""


def _parse_switch(text: str) -> bool:
    word = text.strip().lower()
    if word in {"1", "true", "yes", "on"}:
        return True
    if word in {"0", "false", "no", "off"}:
        return False
    raise ValueError("use 1 or 0")


def _parse_kernels(text: str) -> str:
    word = text.strip().lower()
    if word == "conv":
        return word
    try:
        return "all" if _parse_switch(text) else "none"
    except ValueError:
        raise ValueError("use 1, conv or 0") from None


def _parse_text(text: str) -> str:
    return text.strip()


def _parse_count(text: str) -> int:
    word = text.strip()
    if not word.isdecimal():
        raise ValueError("use a whole number, 0 for never")
    return int(word)


@dataclass(frozen=True)
class Setting:
    """One variable. ``parse`` turns its text into a value, or raises ``ValueError`` with the remedy."""

    name: str
    default: str
    parse: Callable[[str], Any]
    help: str

    def read(self, environ: Mapping[str, str] | None = None) -> Any:
        """The parsed value from ``environ`` (default: this process's). Raises :class:`SettingError`.

        An empty variable is as good as none, so that an empty line in somebody's configuration switches nothing.
        """
        source = os.environ if environ is None else environ
        text = source.get(self.name, "")
        try:
            return self.parse(text if text.strip() else self.default)
        except ValueError as error:
            raise SettingError(f"{self.name}={text!r} is not understood: {error}") from None


SWITCH = Setting(
    "SGLANG_GDN_ZEROCOPY",
    "0",
    _parse_switch,
    "1 switches the overlay on, 0 leaves stock SGLang untouched.",
)
UNVERIFIED = Setting(
    "SGLANG_GDN_ZEROCOPY_UNVERIFIED",
    "0",
    _parse_switch,
    "1 lets the overlay use views on a SGLang build that is not in its table or was edited. "
    "Nobody has compared the bits of such a build.",
)
KERNELS = Setting(
    "SGLANG_GDN_ZEROCOPY_KERNELS",
    "1",
    _parse_kernels,
    "1 uses the bundled kernels for conv and recurrence, conv only the first of them, 0 none: views alone.",
)
SELFTEST = Setting(
    "SGLANG_GDN_ZEROCOPY_SELFTEST",
    "1",
    _parse_switch,
    "0 skips the comparison with stock's kernels that a bundled kernel has to pass in a process before its first use.",
)
STRICT = Setting(
    "SGLANG_GDN_ZEROCOPY_STRICT",
    "0",
    _parse_switch,
    "1 stops the process, with the reason, where the overlay is asked for and would be declined: a setting that is not "
    "understood, a build that is not in the table or was edited, a self-test that fails. No effect while it is off.",
)
STATUS_DIR = Setting(
    "SGLANG_GDN_ZEROCOPY_STATUS_DIR",
    "",
    _parse_text,
    "Folder where each process keeps a small JSON file of what is live in it, for `doctor --live`. Default: none.",
)
SHADOW = Setting(
    "SGLANG_GDN_ZEROCOPY_SHADOW",
    "0",
    _parse_count,
    "N above 0: outside CUDA graphs, every Nth call of each layer runs stock as well, on the same data, and compares "
    "every bit. The answer of such a call is stock's; after a difference the process stays with stock.",
)
CACHE = Setting(
    "SGLANG_GDN_ZEROCOPY_CACHE",
    "",
    _parse_text,
    "Folder for the stock wheels that `check` fetches. Default: the user's cache folder.",
)

SETTINGS = (SWITCH, UNVERIFIED, KERNELS, SELFTEST, STRICT, STATUS_DIR, SHADOW, CACHE)

# SGLang's own allow-list of plugin names; read here, never written.
SGLANG_PLUGINS = Setting("SGLANG_PLUGINS", "", _parse_text, "SGLang's allow-list of plugin names.")

# A launcher's own numbering of its processes; read here, never written.
RANK = Setting("RANK", "-1", int, "The process's number, as launchers set it.")
WORLD_SIZE = Setting("WORLD_SIZE", "-1", int, "How many processes there are, as launchers set it.")


def child_environment(**changes: str) -> dict[str, str]:
    """A copy of this process's environment with ``changes`` applied, for a child process."""
    return {**os.environ, **changes}
