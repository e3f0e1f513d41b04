"""The one hook that a route policy implements."""

from __future__ import annotations

import pluggy

from sglang_gdn_zerocopy.records import CallShape, Decision

PROJECT = "sglang_gdn_zerocopy"
ENTRY_POINT_GROUP = "sglang_gdn_zerocopy.policies"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class RoutePolicy:
    """What a policy plugin may implement."""

    @hookspec(firstresult=True)
    def gdn_zerocopy_route(self, shape: CallShape) -> Decision | None:
        """Decide one target-verify call from its ``shape``; None means no opinion.

        Called once per distinct shape and process, not per call. A policy may leave more to stock than the built-in
        one does (views instead of the fused conv, upstream instead of views); asking for more has no effect.
        """
