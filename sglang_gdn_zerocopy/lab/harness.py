"""Runs a release's own ``forward_extend``, or a model's own GDN layer, on a world, and counts launches."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from sglang_gdn_zerocopy import bundled
from sglang_gdn_zerocopy.kernels import conv_update, conv_verify
from sglang_gdn_zerocopy.kernels.recurrent_verify import PORTABLE
from sglang_gdn_zerocopy.lab.commit import Commit
from sglang_gdn_zerocopy.lab.world import World
from sglang_gdn_zerocopy.records import Protocol
from sglang_gdn_zerocopy.upstream.releases import (
    BACKEND_CLASS,
    BACKEND_MODULE,
    CONV_FUNCTION,
    COPY_FUNCTION,
    FORWARD_CONTEXT_MODULE,
    MODELS,
    PATH,
)


class _TargetVerify:
    """A forward mode; target verify is an extend to SGLang."""

    @staticmethod
    def is_target_verify() -> bool:
        return True

    @staticmethod
    def is_extend() -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("is_"):
            raise AttributeError(name)
        return lambda: False


class _CountingKernel:
    """Passes launches on to the kernel that it stands for and counts those outside a self-test."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.launches = 0
        self.paused = False

    def __getitem__(self, grid: Any) -> Any:
        self.launches += not self.paused
        return self._kernel[grid]


class Harness:
    """A mounted or installed release's GDN backend and models, imported, with counters on the kernels before the
    recurrence: stock's unpack, conv and copy, and the bundled conv, also where the recurrence is in its launch."""

    def __init__(self) -> None:
        self.module: ModuleType = importlib.import_module(BACKEND_MODULE)
        self._models = {site.module.rpartition(".")[2]: (importlib.import_module(site.module), site) for site in MODELS}
        self._counters = {
            "copy": _count(getattr(self.module, COPY_FUNCTION), f"{COPY_FUNCTION}_kernel"),
            "conv": _count(getattr(self.module, CONV_FUNCTION), f"_{CONV_FUNCTION}_kernel"),
            "ours": _count(conv_update.conv_update, "_conv_update_kernel"),
            "one launch": _count(conv_verify.conv_verify, "_conv_verify_kernel"),
            "explicit one launch": _count(conv_verify.conv_verify, "_conv_verify_explicit_kernel"),
        }
        for name, (model, site) in self._models.items():
            unpack = getattr(model, site.unpack_function)
            self._counters[f"unpack of {name}"] = _count(unpack, f"{site.unpack_function}_kernel")
        self.strided_unpack = all(
            "stride" in inspect.getsource(inspect.unwrap(getattr(model, site.unpack_function)))
            for model, site in self._models.values()
            if not site.interleaved
        )
        self._count_no_self_test()
        self._commit = Commit()
        self.overlapping_windows = self._commit.overlapping_windows
        self._backend_class = getattr(self.module, BACKEND_CLASS)
        ring_verify = getattr(self._backend_class, "_replayssm_target_verify", None)
        # From 0.5.20 the circular ring is keyed by request and keeps low parts of its 16-bit records.
        self.low_parts = ring_verify is not None and "replay_indices" in inspect.signature(ring_verify).parameters

    def _count_no_self_test(self) -> None:
        for name in ("conv_difference", "recurrence_difference", "one_launch_difference"):
            setattr(bundled, name, self._uncounted(getattr(bundled, name)))

    def _uncounted(self, compare: Callable[..., str]) -> Callable[..., str]:
        def uncounted(*args: Any, **kwargs: Any) -> str:
            for counter in self._counters.values():
                counter.paused = True
            try:
                return compare(*args, **kwargs)
            finally:
                for counter in self._counters.values():
                    counter.paused = False

        return uncounted

    @property
    def copies(self) -> int:
        """Copy launches so far."""
        return self._counters["copy"].launches

    @property
    def launches(self) -> int:
        """Launches before the recurrence so far: unpack, conv and copy, stock's and ours."""
        return sum(counter.launches for counter in self._counters.values())

    def dispatcher(self) -> Any:
        """The release's own kernel dispatcher with Triton for every phase."""
        dispatcher_class = self.module.GDNKernelDispatcher
        triton = self.module.LinearAttnKernelBackend.TRITON
        phases = len(inspect.signature(dispatcher_class).parameters)
        return dispatcher_class(*[triton] * phases)

    def backend(self, world: World) -> Any:
        """A backend whose pool holds the world's buffers. Its constructor, which wants a model runner, is not run."""
        state_class = self.module.MambaPool.SpeculativeState
        buffers = world.cache
        if dataclasses.is_dataclass(state_class):
            known = {field.name for field in dataclasses.fields(state_class)}
            buffers = {name: value for name, value in buffers.items() if name in known}
        cache = state_class(**buffers)
        for name in ("replayssm_d", "replayssm_rawv"):
            if not hasattr(cache, name):
                vars(cache)[name] = None
        pool = SimpleNamespace(
            mamba_cache=cache,
            replayssm_spec_fold=world.case.protocol is Protocol.FOLD_RING,
            replayssm_is_kda=False,
            **world.cursors,
        )
        if world.cursors:
            pool.replayssm_spec_write_pos = pool.replayssm_write_pos
        backend = object.__new__(self._backend_class)
        device, rows = world.mixed_qkv.device, world.case.pool_requests
        backend.__dict__.update(
            kernel_dispatcher=self.dispatcher(),
            forward_metadata=world.metadata,
            req_to_token_pool=SimpleNamespace(
                mamba_pool=pool, size=rows - 1, mamba2_layer_cache=lambda layer_id: cache
            ),
            verify_intermediate_state_indices=torch.arange(rows, dtype=torch.int32, device=device),
            mis_metadata=None,
        )
        return backend

    def forward_batch(self, world: World) -> SimpleNamespace:
        """A target-verify batch of the world's requests, request i in request slot i."""
        case = world.case
        requests = torch.arange(case.num_requests, dtype=torch.int64, device=world.mixed_qkv.device)
        return SimpleNamespace(
            forward_mode=_TargetVerify(),
            logical_forward_mode=_TargetVerify(),
            spec_info=SimpleNamespace(draft_token_num=case.draft_tokens, ragged_verify_layout=None),
            req_pool_indices=requests,
            batch_size=case.num_requests,
            global_num_token_non_padded_cpu=None,
        )

    def verify(self, world: World) -> torch.Tensor:
        """One target verify of the world's layer. Writes the world's buffers, returns what goes on to the norm.

        With a model that is its attention output and z, side by side.
        """
        if world.case.one_launch:
            with _chosen(world.mixed_qkv.device.type):
                return self._verify(world)
        return self._verify(world)

    def _verify(self, world: World) -> torch.Tensor:
        backend, batch = self.backend(world), self.forward_batch(world)
        if hasattr(backend, "_init_target_verify_qkv_routing"):
            backend._init_target_verify_qkv_routing(batch)
        if world.case.model:
            return self._verify_model(world, backend, batch)
        output = backend.forward_extend(
            q=None,
            k=None,
            v=None,
            layer=world.layer,
            forward_batch=batch,
            save_kv_cache=True,
            mixed_qkv=world.mixed_qkv,
            a=world.a,
            b=world.b,
        )
        assert isinstance(output, torch.Tensor)
        return output

    def commit(self, world: World, nodes: tuple[int, ...]) -> None:
        """The release's own commit after a verify of ``world``: request i up to its draft token ``nodes[i]``.

        Writes the world's ``conv_state`` and ``state``, with a circular ring also its cursors.
        """
        self._commit(world, self._hybrid(self.backend(world)), nodes)

    def model_layer(self, world: World) -> Any:
        """The model's own GDN layer around the world's projection; its norm keeps the attention output and z.

        Not compared and therefore not real: the GEMMs before and behind it, and the norm.
        """
        model, site = self._models[world.case.model]
        case, layer = world.case, world.layer
        attention_class = getattr(importlib.import_module(PATH[0][0]), PATH[0][1])
        attention = _without_init(attention_class, **vars(layer))
        members = {
            "num_k_heads": case.num_k_heads,
            "num_v_heads": case.num_v_heads,
            "head_k_dim": layer.head_k_dim,
            "head_v_dim": layer.head_v_dim,
            "key_dim": layer.k_dim,
            "value_dim": layer.v_dim,
            "attn_tp_size": 1,
            "attn": attention,
            "norm": _KeepingNorm(),
            "out_proj": _Identity(),
            "_forward_input_proj": lambda hidden_states: (world.projection, world.projection_ba),
        }
        return _without_init(getattr(model, site.layer_class), **members)

    def _hybrid(self, backend: Any) -> Any:
        """The hybrid backend around ``backend``; full attention has none."""
        hybrid = object.__new__(getattr(importlib.import_module(PATH[1][0]), PATH[1][1]))
        hybrid.__dict__.update(full_attn_layers=[], linear_attn_backend=backend, full_attn_backend=None)
        return hybrid

    def _verify_model(self, world: World, backend: Any, batch: Any) -> torch.Tensor:
        hybrid = self._hybrid(backend)
        context = importlib.import_module(FORWARD_CONTEXT_MODULE)
        layer = self.model_layer(world)
        before = context.set_forward_context(context.ForwardContext(attn_backend=hybrid))
        try:
            layer.forward(world.projection, batch)
        finally:
            context.set_forward_context(before)
        return torch.cat([tensor.flatten(1) for tensor in layer.norm.kept], dim=1)


@contextmanager
def _chosen(device: str) -> Iterator[None]:
    """Inside, one launch is the choice without a GPU as well."""
    choose = conv_verify.choose
    if device == "cpu":
        vars(conv_verify)["choose"] = lambda *args: PORTABLE
    try:
        yield
    finally:
        vars(conv_verify)["choose"] = choose


def _count(function: Any, kernel: str) -> _CountingKernel:
    """Put a counter on ``kernel`` in the module that holds ``function``."""
    module = inspect.getmodule(inspect.unwrap(function))
    counter = _CountingKernel(getattr(module, kernel))
    setattr(module, kernel, counter)
    return counter


def _without_init(kind: Any, **members: Any) -> Any:
    """An instance of a module class with ``members``, whose constructor, which wants a model's config, is not run."""
    instance = object.__new__(kind)
    if isinstance(instance, torch.nn.Module):
        torch.nn.Module.__init__(instance)
    vars(instance).update(members)
    return instance


class _KeepingNorm:
    """Stands in for the gated norm: keeps its two inputs, attention output and z, and passes the first one on."""

    def __init__(self) -> None:
        self.kept: tuple[torch.Tensor, ...] = ()

    def __call__(self, output: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        self.kept = (output, z)
        return output


class _Identity:
    """Stands in for the GEMM behind the norm."""

    def __call__(self, rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        return rows, None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None
