"""A release's own commit of accepted tokens: what its server calls once it knows how many drafts of a verify hold.

From 0.5.14 on that is one function for every protocol. It copies the accepted snapshots and conv windows into the pools,
folds the ring into the state, or moves the ring's cursors. In 0.5.13 it is the hybrid backend's method alone.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch

from sglang_gdn_zerocopy.lab.cases import TREE_PARENTS, Case
from sglang_gdn_zerocopy.lab.world import World
from sglang_gdn_zerocopy.records import Protocol

_MODULE = "sglang.srt.speculative.spec_utils"
_FUNCTION = "commit_mamba_states_after_verify"


def last_nodes(case: Case, seed: int) -> tuple[int, ...]:
    """The last accepted draft token of each live request: all, one and a part of its tokens in turn, from ``seed`` on.

    A ring that is shorter than the draft holds no more tokens than it has steps. Rows without tokens have no entry: the
    server commits real requests only.
    """
    tokens = case.draft_tokens
    if case.protocol is Protocol.FOLD_RING:
        tokens = min(tokens, case.ring_steps)
    return tuple((tokens - 1, 0, tokens // 2)[(seed + request) % 3] for request in range(case.live_requests))


class Commit:
    """A mounted or installed release's commit."""

    def __init__(self) -> None:
        self._module = importlib.import_module(_MODULE)
        self._function = getattr(self._module, _FUNCTION, None)
        if hasattr(self._module, "mambaish_config"):
            # Asked whether the model has recurrent layers; there is no model here.
            self._module.mambaish_config = lambda config: True

    @property
    def name(self) -> str:
        """What is called."""
        return _FUNCTION if self._function else "update_mamba_state_after_mtp_verify"

    def __call__(self, world: World, hybrid: Any, nodes: tuple[int, ...]) -> None:
        """Commit ``world`` after its verify: request i up to its draft token ``nodes[i]``.

        ``hybrid`` is the hybrid backend around a GDN backend whose pool holds the world's buffers. Writes the world's
        ``conv_state`` and ``state``, with a circular ring also its cursors.
        """
        case, device = world.case, world.mixed_qkv.device
        paths = [_path(case, node) for node in nodes]
        T = case.draft_tokens
        rows = [[request * T + node for node in path] + [-1] * (T - len(path)) for request, path in enumerate(paths)]
        accept_index = _served(torch.tensor(rows, dtype=torch.int32, device=device))
        accept_lens = _served(torch.tensor([len(path) for path in paths], dtype=torch.int32, device=device))
        pool = hybrid.linear_attn_backend.req_to_token_pool
        state = pool.mamba2_layer_cache(0)
        every_layer = SimpleNamespace(**{name: _all_layers(buffer) for name, buffer in vars(state).items()})
        vars(pool).update(
            get_speculative_mamba2_params_all_layers=lambda: every_layer,
            get_mamba_indices=lambda requests: world.metadata.mamba_cache_indices[requests],
            short_conv_pool=SimpleNamespace(conv_state=None),
            ngram_pool=SimpleNamespace(context=None),
        )
        if self._function is None:
            last_steps = accept_index[torch.arange(len(nodes)), accept_lens.long() - 1]
            last_steps -= torch.arange(0, len(nodes) * T, T, dtype=torch.int32, device=device)
            hybrid.update_mamba_state_after_mtp_verify(last_steps, None, None, None)
            return
        runner = SimpleNamespace(
            req_to_token_pool=pool, attn_backend=hybrid, model=None, model_config=None, mambaish_config=True
        )
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_idle=lambda: False),
            mamba_track_indices=None,
            req_pool_indices=torch.arange(len(nodes), dtype=torch.int64, device=device),
        )
        self._function(SimpleNamespace(model_runner=runner), batch, accept_lens, accept_index, T)


def _path(case: Case, node: int) -> list[int]:
    """The draft tokens from the root to ``node``."""
    if not case.tree:
        return list(range(node + 1))
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = TREE_PARENTS[node]
    return path


class _SaysCuda(torch.Tensor):
    """A CPU tensor for functions that refuse one; the kernels behind them run in the Triton interpreter."""

    is_cuda = True


def _served(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_cuda else tensor.as_subclass(_SaysCuda)


def _all_layers(buffer: Any) -> Any:
    """The same memory with the layer axis that a commit's buffers have in front."""
    if isinstance(buffer, list | tuple):
        return [_all_layers(one) for one in buffer]
    return _served(buffer[None]) if isinstance(buffer, torch.Tensor) else buffer
