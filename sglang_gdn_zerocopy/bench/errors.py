"""The error of a run that had started: exit code 1, everything measured so far is kept."""

from __future__ import annotations


class RunFailed(Exception):  # noqa: N818 - the name says what happened to the run, as CommandError does for input
    """A run cannot go on. The text says why, with the last lines of the process that failed."""
