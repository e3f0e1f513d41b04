"""A release's own commit of accepted tokens: what its server calls once it knows how many drafts of a verify hold.

From 0.5.14 on that is one function for every protocol. It copies the accepted conv windows into the pool; for the state
it copies the accepted snapshot, replays the fold ring, or moves the circular ring's cursors and folds a full one. For
snapshots it calls the hybrid backend's method, which in 0.5.13 is the whole commit.
"""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton.language as tl

from sglang_gdn_zerocopy.lab.cases import TREE_PARENTS, Case
from sglang_gdn_zerocopy.lab.world import World
from sglang_gdn_zerocopy.records import Protocol

_MODULE = "sglang.srt.speculative.spec_utils"
_FUNCTION = "commit_mamba_states_after_verify"
_FOLD_MODULE = "sglang.kernels.ops.attention.fla.gdn_replayssm_spec_fold"


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
        module = _import()
        self._function = getattr(module, _FUNCTION, None)
        if hasattr(module, "mambaish_config"):
            # Asked whether the model has recurrent layers; there is no model here.
            vars(module)["mambaish_config"] = lambda config: True

    @property
    def overlapping_windows(self) -> bool:
        """Whether it takes overlapping conv windows; without them, as in 0.5.13, a server's windows are dense."""
        return self._function is not None

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
        if device.type == "cpu":
            every_layer.conv = [_as_bfloat16(buffer) for buffer in every_layer.conv]
            every_layer.intermediate_conv_window = [_as_bfloat16(one) for one in every_layer.intermediate_conv_window]
            if case.protocol is Protocol.FOLD_RING:
                _count_in_triton(_FOLD_MODULE)
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


def _import() -> ModuleType:
    """The module of the common commit. Off a GPU what it compiles with torch.compile, none of it on a commit's way, is
    left as it is: that compiler takes seconds to import."""
    if torch.cuda.is_available():
        return importlib.import_module(_MODULE)
    with mock.patch.object(torch, "compile", lambda function=None, **_: function or (lambda decorated: decorated)):
        return importlib.import_module(_MODULE)


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


def _as_bfloat16(buffer: torch.Tensor) -> torch.Tensor:
    """The same 16-bit memory as production's type, for which a commit has another launch. It moves bits only."""
    return buffer.view(torch.bfloat16) if buffer.dtype == torch.float16 else buffer


def _count_in_triton(module: str) -> None:
    """Let ``module``'s loops in the interpreter count in Triton's integers, as compiled ones do; Python's, which the
    interpreter counts in, lack their methods."""
    vars(importlib.import_module(module))["range"] = _triton_range


def _triton_range(*bounds: Any) -> Iterator[Any]:
    return (tl.full((), number, tl.int32) for number in builtins.range(*bounds))
