"""A model's module behind a backend that the overlay is not on, or is on with views alone: left as it is."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from sglang_gdn_zerocopy.import_hook import Installation, install_model
from sglang_gdn_zerocopy.ledger import Ledger
from sglang_gdn_zerocopy.records import ProbeReport, Verdict
from sglang_gdn_zerocopy.upstream.releases import MODELS


class _Views:
    """An overlay without bundled kernels."""

    bundled_kernels = False


@pytest.mark.parametrize("overlay", [None, _Views()])
@pytest.mark.parametrize("site", MODELS, ids=lambda site: site.module)
def test_a_model_is_left_alone(overlay: Any, site: Any) -> None:
    ledger, module = Ledger(), ModuleType(site.module)
    before = dict(vars(module))
    installation = Installation(ProbeReport(Verdict.DECLINED, "drill"), overlay)
    install_model(module, site, ledger, installation)
    assert vars(module) == before
    assert not installation.applied
    assert not ledger.counts
