"""Server flags by release, as data, and the one function that turns what a user typed into what a release knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from sglang_gdn_zerocopy.cli.errors import CommandError


class Rename(NamedTuple):
    """One flag under two names: ``old`` exists from ``old_since`` on, ``new`` replaces it from ``new_since`` on."""

    old: str
    old_since: str
    new: str
    new_since: str


class Translation(NamedTuple):
    """``args`` for the server's command line, and one sentence for everything that is not as the user typed it."""

    args: tuple[str, ...]
    notes: tuple[str, ...]


# Stock keeps most old names as aliases for some releases and drops them in 0.5.20, where what is left of
# --cuda-graph-max-bs is an ambiguous prefix: the new name is emitted as soon as a release has it.
RENAMES = (
    Rename("--enable-gdn-replayssm-spec", "0.5.16", "--enable-linear-replayssm-spec", "0.5.17"),
    Rename("--cuda-graph-max-bs", "0.5.13", "--cuda-graph-max-bs-decode", "0.5.14"),
    Rename("--cuda-graph-bs", "0.5.13", "--cuda-graph-bs-decode", "0.5.14"),
    Rename("--piecewise-cuda-graph-max-tokens", "0.5.13", "--cuda-graph-max-bs-prefill", "0.5.14"),
    Rename("--piecewise-cuda-graph-tokens", "0.5.13", "--cuda-graph-bs-prefill", "0.5.14"),
    Rename("--mamba-scheduler-strategy", "0.5.13", "--mamba-radix-cache-strategy", "0.5.14"),
)

# Flags without an older name: the first release that parses them.
FIRST_RELEASE = {"--linear-attn-verify-backend": "0.5.17"}

# flag -> (release, what to know about the flag there)
REMARKS = {
    "--linear-attn-verify-backend": (
        "0.5.17",
        "0.5.17 parses --linear-attn-verify-backend and ignores it for GDN; 0.5.18 is the first release to honour it",
    )
}

# `ab` sets these itself: a second value would measure another server than the one that it started.
RESERVED = {"--model": "--model", "--model-path": "--model", "--host": "--base-url", "--port": "--port"}


def parse_release(release: str) -> Version:
    """The release that a build belongs to: ``0.5.13.post1`` and ``0.5.13rc1`` have the flags of 0.5.13.

    Raises ``CommandError`` when ``release`` is no version.
    """
    try:
        return Version(Version(release).base_version)
    except InvalidVersion:
        raise CommandError(f"the target's SGLang calls itself {release!r}, which is no version") from None


def translate(args: Sequence[str], release: str) -> Translation:
    """``args`` as ``release`` spells them. Unknown flags and abbreviations pass: the server's parser judges them.

    Raises ``CommandError`` for a flag that ``release`` lacks under any name, and for one that `ab` sets itself.
    """
    version = parse_release(release)
    translated: list[str] = []
    notes: list[str] = []
    for word in args:
        flag, equals, value = word.partition("=")
        if flag in RESERVED:
            raise CommandError(f"{flag} is not a server argument here: `ab` sets it, give {RESERVED[flag]} before `--`")
        name = _name_in(version, flag, release)
        if name != flag:
            notes.append(f"{flag} is called {name} in {release}")
        remark_release, remark = REMARKS.get(flag, ("", ""))
        if remark and version == Version(remark_release):
            notes.append(remark)
        translated.append(f"{name}{equals}{value}")
    return Translation(tuple(translated), tuple(notes))


def _name_in(version: Version, flag: str, release: str) -> str:
    for rename in RENAMES:
        if flag in (rename.old, rename.new):
            if version >= Version(rename.new_since):
                return rename.new
            if version >= Version(rename.old_since):
                return rename.old
            raise _refusal(flag, release, rename.old_since)
    first = FIRST_RELEASE.get(flag)
    if first is not None and version < Version(first):
        raise _refusal(flag, release, first)
    return flag


def _refusal(flag: str, release: str, first: str) -> CommandError:
    return CommandError(f"SGLang {release} has no {flag}: it came with {first}; leave it out or use a later release")
