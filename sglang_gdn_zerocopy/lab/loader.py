"""Import a release's own backend and kernels from its wheel on a machine without SGLang's dependencies.

The modules under comparison are the wheel's own files, unchanged. Everything else below ``sglang`` and
``sgl_kernel``, and what the model files import beside it and is not installed, is a stand-in: a name that can be
imported, called and subclassed, and that does nothing. A process mounts one release and is then used up.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

# What is under comparison: the backend with its dispatcher, the conv, the copy, the recurrence, the circular ring, and
# the kernels of the commit.
_REAL_BELOW = (
    "sglang.srt.layers.attention.",
    "sglang.kernels.ops.",
    "sglang.jit_kernel.triton.",
)
_REAL_FILES = frozenset(
    {
        "gdn_backend",
        "gdn_triton",
        "kernel_backend",
        "causal_conv1d_triton",
        "gdn_fused_proj",
        "triton_gdn_fused_proj",
        "fused_sigmoid_gating_recurrent",
        "gdn_replayssm_spec_decode",
        "gdn_replayssm_spec_fold",
        "mamba_state_scatter_triton",
        "ptr_table",
    }
)
# The way from a model's GDN layer to the backend, and the commit after a verify.
_REAL_MODULES = frozenset(
    {
        "sglang.srt.layers.attention.linear.utils",
        "sglang.srt.layers.attention.hybrid_linear_attn_backend",
        "sglang.srt.layers.attention.base_attn_backend",
        "sglang.srt.layers.radix_linear_attention",
        "sglang.srt.model_executor.forward_context",
        "sglang.srt.models.qwen3_5",
        "sglang.srt.models.qwen3_next",
        "sglang.srt.speculative.spec_utils",
    }
)
_SGLANG = ("sglang", "sgl_kernel")
_OTHERS = ("safetensors", "transformers", "einops", "huggingface_hub")


class _StandInType(type):
    """A class of which every attribute is another stand-in."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)


def _stand_in(name: str) -> type:
    members = {"__init__": _nothing, "__call__": _as_decorator, "__bool__": _no}
    return _StandInType(name, (), members)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _as_decorator(self: object, *args: Any, **kwargs: Any) -> Any:
    """Called with one function, return it: a stand-in may decorate what is real."""
    return args[0] if len(args) == 1 and callable(args[0]) else None


def _yes() -> bool:
    return True


def _no(self: object = None) -> bool:
    return False


def _has_pdl() -> bool:
    import torch

    return torch.cuda.get_device_capability() >= (9, 0)


class SpeculativeState:
    """Stands in for ``MambaPool.SpeculativeState``: a layer's buffers by name."""

    def __init__(self, **buffers: Any) -> None:
        vars(self).update(buffers)


class _MambaPool:
    SpeculativeState = SpeculativeState


def _known_stand_ins() -> dict[str, Any]:
    import torch

    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    return {
        "is_cuda": _yes,
        "is_cpu": _no,
        "is_hip": _no,
        "is_npu": _no,
        "is_xpu": _no,
        "is_musa": _no,
        # As stock answers it: compute capability 9.0 and up.
        "is_arch_support_pdl": _no if not torch.cuda.is_available() else _has_pdl,
        "torch_release": release,
        "get_eager_max_batch_size": lambda *args: 0,
        "MambaPool": _MambaPool,
        # No piecewise graph of a prefill is running.
        "get_forward_context": _nothing,
        "get_tc_piecewise_forward_context": _nothing,
    }


class _StandInModule(ModuleType):
    def __init__(self, name: str, known: dict[str, Any]) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self._known = known

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self._known.get(name)
        if value is None:
            value = _stand_in(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known = _known_stand_ins()
        self.stand_ins: list[str] = []
        self._stood_in_for = {*_SGLANG, *(name for name in _OTHERS if importlib.util.find_spec(name) is None)}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        top = fullname.partition(".")[0]
        if top not in self._stood_in_for:
            return None
        file = self._folder / (fullname.replace(".", "/") + ".py")
        below = fullname.startswith(_REAL_BELOW) and fullname.rpartition(".")[2] in _REAL_FILES
        if (below or fullname in _REAL_MODULES) and file.is_file():
            return importlib.util.spec_from_file_location(fullname, file)
        self.stand_ins.append(fullname)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandInModule(spec.name, self._known)

    def exec_module(self, module: ModuleType) -> None:
        pass


class Mounted:
    """A release made importable in this process."""

    def __init__(self, folder: Path) -> None:
        self._finder = _Finder(folder)
        # The release's dist-info lies in the folder, so its version is found as an installed one's is.
        sys.path.insert(0, str(folder))
        sys.meta_path.insert(0, self._finder)

    @property
    def stand_ins(self) -> tuple[str, ...]:
        """Names of the modules that were stood in for so far."""
        return tuple(sorted(set(self._finder.stand_ins)))


def mount(folder: Path) -> Mounted:
    """Make the release unpacked in ``folder`` (which holds ``sglang`` and its dist-info) importable here.

    Raises ``RuntimeError`` when there is no such package, or when this process has already imported a ``sglang``.
    """
    if not (folder / "sglang").is_dir():
        raise RuntimeError(f"{folder} holds no sglang package")
    if "sglang" in sys.modules:
        raise RuntimeError("this process has imported a sglang already; mount a release in a fresh one")
    return Mounted(folder)
