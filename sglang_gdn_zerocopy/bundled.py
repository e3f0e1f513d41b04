"""The bundled kernels of one overlay: their self-tests and their launches.

What a launch depends on beside the values in its tensors (sizes, strides, dtypes, alignment, device) is its key. The
first call of a key is checked, tested against stock and prepared; those after it are found in one look-up. A call that
is refused, or left to stock, is not remembered here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from sglang_gdn_zerocopy.kernels import conv_verify as together
from sglang_gdn_zerocopy.kernels.conv_update import Unpack, conv_launch, conv_update
from sglang_gdn_zerocopy.kernels.conv_verify import conv_verify, one_launch
from sglang_gdn_zerocopy.kernels.launch import Launch, signature
from sglang_gdn_zerocopy.kernels.recurrent_verify import (
    Config,
    FoldRing,
    Inputs,
    Snapshots,
    recurrent_launch,
    recurrent_verify,
)
from sglang_gdn_zerocopy.ledger import Ledger
from sglang_gdn_zerocopy.records import CallShape, Protocol
from sglang_gdn_zerocopy.self_test.conv import ConvShape, conv_difference, conv_shape
from sglang_gdn_zerocopy.self_test.memo import SelfTest
from sglang_gdn_zerocopy.self_test.one_launch import OneLaunchShape, one_launch_difference
from sglang_gdn_zerocopy.self_test.recurrence import recurrence_difference, recurrence_shape

# Keys of one process and kernel; beyond it they are checked again.
_MOST_KEYS = 4096
_FOLD_RING = Protocol.FOLD_RING
_STATE_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}


class ConvTensors(NamedTuple):
    """One bundled conv, see :func:`sglang_gdn_zerocopy.kernels.conv_update.conv_update`: all but its output.

    ``stock_unpack`` is the model's own, for the self-test of a launch with ``unpack``.
    """

    x: torch.Tensor
    draft_tokens: int
    weight: torch.Tensor
    bias: torch.Tensor | None
    silu: bool
    conv_state: torch.Tensor
    slots: torch.Tensor
    windows: torch.Tensor
    window_rows: torch.Tensor
    unpack: Unpack | None
    stock_unpack: Callable[..., Any] | None

    def shape(self) -> ConvShape:
        """What its self-test is remembered by."""
        return conv_shape(
            self.slots.shape[0],
            self.draft_tokens,
            self.x,
            self.weight,
            self.bias,
            self.silu,
            self.conv_state,
            self.windows,
            self.unpack,
        )


class _Prepared(dict[Hashable, Any]):
    """What is known by key. Bounded: emptied when it is full."""

    def keep(self, key: Hashable, value: Any) -> None:
        if len(self) >= _MOST_KEYS:
            self.clear()
        self[key] = value


class Bundled:
    """Launches the bundled kernels where they have given stock's bits in this process."""

    def __init__(
        self, ledger: Ledger, self_test: bool, stock_conv: Callable[..., torch.Tensor], reciprocal_norm: bool
    ) -> None:
        self._self_test = SelfTest(ledger, self_test)
        self._stock_conv = stock_conv
        self._reciprocal_norm = reciprocal_norm
        self._unpacks = _Prepared()
        self._convs = _Prepared()
        self._recurrences = _Prepared()
        self._pairs = _Prepared()

    def as_rows(self) -> list[dict[str, str]]:
        """What was tested so far, see :meth:`SelfTest.as_rows`."""
        return self._self_test.as_rows()

    def may_unpack(self, key: Hashable, shape: Callable[[], ConvShape], stock_unpack: Callable[..., Any]) -> bool:
        """Whether a conv launch with an unpack in it will do, before its output is there.

        ``key``: all that the answer can depend on; ``shape`` is asked at the first call of a key. A yes is no promise:
        :meth:`conv` looks at the tensors themselves.
        """
        if key in self._unpacks:
            return True
        kernel = shape()
        if not self._passed_conv(kernel, stock_unpack):
            return False
        self._unpacks.keep(key, True)
        return True

    def _passed_conv(self, shape: ConvShape, stock_unpack: Callable[..., Any] | None) -> bool:
        return self._self_test.passed(shape, lambda: conv_difference(shape, self._stock_conv, stock_unpack))

    def conv(self, call: ConvTensors, packed: torch.Tensor) -> bool:
        """Launch the bundled conv, which writes ``packed``; False, with nothing written, where it may not run.

        Raises, before anything is written, as :func:`conv_update` does.
        """
        x, draft_tokens, weight, bias, silu, conv_state, slots, windows, window_rows, unpack, stock_unpack = call
        if unpack is None:
            tensors = signature((x, weight, bias, conv_state, slots, windows, window_rows, packed))
            key: Hashable = (tensors, x.device, draft_tokens, silu)
        else:
            ba, z, b, a, interleaved, num_k_heads, head_k_dim = unpack
            tensors = signature((x, weight, bias, conv_state, slots, windows, window_rows, packed, ba, z, b, a))
            key = (tensors, x.device, draft_tokens, silu, interleaved, num_k_heads, head_k_dim)
        arguments = (x, draft_tokens, weight, bias, silu, conv_state, slots, windows, window_rows, packed, unpack)
        launch: Launch | None = self._convs.get(key)
        if launch is None:
            # With an unpack it was tested when the unpack was put off: on buffers of this kind, or it is now.
            if unpack is None and not self._passed_conv(call.shape(), None):
                return False
            launch = conv_launch(*arguments)
            if unpack is not None and not self._passed_conv(call.shape(), stock_unpack):
                return False
            self._convs.keep(key, launch)
        conv_update(*arguments, launch=launch)
        return True

    def recurrence(
        self,
        draft_tokens: int,
        inputs: Inputs,
        kept: FoldRing | Snapshots,
        stock: Callable[[], Callable[..., torch.Tensor]],
    ) -> torch.Tensor | None:
        """The output of the bundled recurrence; None, with nothing written, where it may not run.

        ``stock`` makes stock's function for the self-test. Raises, before anything is written, as
        :func:`recurrent_verify` does.
        """
        device = inputs.state.device
        key = (signature((*inputs, *kept)), device, draft_tokens)
        known: tuple[Launch, bool] | None = self._recurrences.get(key)
        if known is None:
            shape = recurrence_shape(draft_tokens, inputs, kept, self._reciprocal_norm)
            if not self._self_test.passed(shape, lambda: recurrence_difference(shape, stock())):
                return None
            launch = recurrent_launch(inputs, kept, reciprocal_norm=shape.reciprocal_norm, overlap=shape.overlap)
            known = launch, shape.overlap
            self._recurrences.keep(key, known)
        launch, overlap = known
        return recurrent_verify(*inputs, kept, reciprocal_norm=self._reciprocal_norm, overlap=overlap, launch=launch)

    @staticmethod
    def one_launch(shape: CallShape, device: torch.device) -> Config | None:
        """How conv and recurrence are compiled together; None where they are faster one by one."""
        state_dtype = _STATE_DTYPES.get(shape.state_dtype)
        if state_dtype is None:
            return None
        protocol = "ring" if shape.protocol is _FOLD_RING else "snapshots"
        return together.choose(
            protocol, state_dtype, shape.num_requests * shape.num_v_heads, shape.draft_tokens, device
        )

    def together(
        self,
        config: Config,
        call: ConvTensors,
        inputs: Inputs,
        kept: FoldRing | Snapshots,
        stock: Callable[[], Callable[..., torch.Tensor]],
    ) -> torch.Tensor | None:
        """The output of conv and recurrence in one launch; None, with nothing written, where that may not be.

        Raises, before anything is written, as :func:`conv_verify` does.
        """
        x, draft_tokens, weight, bias, silu, conv_state, slots, windows, window_rows, unpack, stock_unpack = call
        if unpack is None:
            key: Hashable = ()
            a, b = inputs.a, inputs.b
            gates: tuple[torch.Tensor, ...] = ()
        else:
            ba, z, gate_b, gate_a, *heads = unpack
            key, a, b, gates = tuple(heads), None, None, (ba, z, gate_b, gate_a)
        tensors = (x, weight, bias, conv_state, slots, windows, window_rows, *gates, *inputs, *kept)
        key = (signature(tensors), x.device, draft_tokens, silu, key)
        reciprocal_norm = self._reciprocal_norm
        front = (x, draft_tokens, weight, bias, silu, conv_state, slots, windows, window_rows, unpack)
        arguments = (*front, a, b, inputs.a_log, inputs.dt_bias, inputs.state, inputs.starts, kept)
        known: tuple[Config, Launch, bool] | None = self._pairs.get(key)
        if known is None or (known[0] is not config and known[0] != config):
            shape = OneLaunchShape(config, call.shape(), recurrence_shape(draft_tokens, inputs, kept, reciprocal_norm))
            if not self._self_test.passed(
                shape, lambda: one_launch_difference(shape, self._stock_conv, stock_unpack, stock())
            ):
                return None
            overlap = shape.recurrence.overlap
            launch = one_launch(*arguments, reciprocal_norm=reciprocal_norm, overlap=overlap, config=config)
            known = config, launch, overlap
            self._pairs.keep(key, known)
        _, launch, overlap = known
        return conv_verify(*arguments, reciprocal_norm=reciprocal_norm, overlap=overlap, config=config, launch=launch)
