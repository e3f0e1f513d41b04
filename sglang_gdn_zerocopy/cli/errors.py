"""The error that a command shows as one line, with exit code 2."""

from __future__ import annotations


class CommandError(Exception):
    """Bad input or a missing piece. The text names the value and the remedy; nothing was written."""
