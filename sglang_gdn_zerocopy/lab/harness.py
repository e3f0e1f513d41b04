"""Runs a release's own ``forward_extend`` on a world, and counts the copy launches that it makes."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from sglang_gdn_zerocopy.lab.world import POOL_REQUESTS, World
from sglang_gdn_zerocopy.records import Protocol
from sglang_gdn_zerocopy.upstream.releases import BACKEND_CLASS, BACKEND_MODULE, COPY_FUNCTION


class _TargetVerify:
    """A forward mode; the forward asks it nothing else."""

    @staticmethod
    def is_target_verify() -> bool:
        return True


class _CountingKernel:
    """Passes launches on to the kernel that it stands for and counts them."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.launches = 0

    def __getitem__(self, grid: Any) -> Any:
        self.launches += 1
        return self._kernel[grid]


class Harness:
    """A mounted or installed release's GDN backend, imported, with a counter on its copy kernel."""

    def __init__(self) -> None:
        self.module: ModuleType = importlib.import_module(BACKEND_MODULE)
        copy_module = inspect.getmodule(inspect.unwrap(getattr(self.module, COPY_FUNCTION)))
        assert copy_module is not None
        name = f"{COPY_FUNCTION}_kernel"
        self._counter = _CountingKernel(getattr(copy_module, name))
        setattr(copy_module, name, self._counter)
        self._backend_class = getattr(self.module, BACKEND_CLASS)
        ring_verify = getattr(self._backend_class, "_replayssm_target_verify", None)
        # From 0.5.20 the circular ring is keyed by request and keeps low parts of its 16-bit records.
        self.low_parts = ring_verify is not None and "replay_indices" in inspect.signature(ring_verify).parameters

    @property
    def copies(self) -> int:
        """Copy launches so far."""
        return self._counter.launches

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
        device = world.mixed_qkv.device
        backend.__dict__.update(
            kernel_dispatcher=self.dispatcher(),
            forward_metadata=world.metadata,
            req_to_token_pool=SimpleNamespace(
                mamba_pool=pool, size=POOL_REQUESTS - 1, mamba2_layer_cache=lambda layer_id: cache
            ),
            verify_intermediate_state_indices=torch.arange(POOL_REQUESTS, dtype=torch.int32, device=device),
            mis_metadata=None,
        )
        return backend

    def forward_batch(self, world: World) -> SimpleNamespace:
        """A target-verify batch of the world's requests, request i in request slot i."""
        case = world.case
        requests = torch.arange(case.num_requests, dtype=torch.int64, device=world.mixed_qkv.device)
        return SimpleNamespace(
            forward_mode=_TargetVerify(),
            spec_info=SimpleNamespace(draft_token_num=case.draft_tokens, ragged_verify_layout=None),
            req_pool_indices=requests,
            batch_size=case.num_requests,
        )

    def verify(self, world: World) -> torch.Tensor:
        """One target verify as the hybrid backend calls it. Writes the world's buffers, returns the output."""
        backend, batch = self.backend(world), self.forward_batch(world)
        if hasattr(backend, "_init_target_verify_qkv_routing"):
            backend._init_target_verify_qkv_routing(batch)
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
