"""Shadow mode: every Nth eligible call of a layer is run both ways on its own data, and every result is compared.

Ours runs first, then everything that the call may have written is put back, and stock runs on it: a shadowed call's
answer is stock's, whatever ours did. The comparison stays on the device and is read calls later, so no call waits for
the one before it. A difference is counted, the first one's data is saved, and this process goes back to stock.

Cost of one shadowed call: both verifies, three copies of the layer's buffers (ring, or snapshots and conv windows, and
the states of the batch), one comparison, and for that time twice their memory. Not shadowed: calls under graph capture,
and replays, which run no Python. A graph that was captured before the difference keeps its kernels.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from sglang_gdn_zerocopy.bits import as_integers
from sglang_gdn_zerocopy.ledger import Ledger

# Shadowed calls whose comparison may be outstanding; each keeps its data until it was read.
_OUTSTANDING = 2


class Touched(NamedTuple):
    """What one verify call reads and writes, by name.

    ``inputs``: rows that came in. ``state``: the pool of recurrent states, of which only the rows of ``slots`` [N] are
    touched; -1 is no slot. ``kept``: buffers of earlier steps that are read and written. ``results``: buffers that are
    only written. ``parameters``: weights. ``starts`` [N + 1]: where each request's rows begin; those behind the last
    are nobody's.
    """

    inputs: dict[str, torch.Tensor]
    state: torch.Tensor
    kept: dict[str, torch.Tensor]
    results: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    slots: torch.Tensor
    starts: torch.Tensor


@dataclass
class _Outstanding:
    """A comparison that the device has not finished."""

    names: tuple[str, ...]
    differs: torch.Tensor
    done: Any
    layer_id: int
    facts: Mapping[str, Any]
    data: dict[str, torch.Tensor]
    strides: dict[str, tuple[int, ...]] = field(default_factory=dict)


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or where its elements share memory the stretch of memory that they lie in, each cell once."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,)) if 0 < span < tensor.numel() else tensor


class Shadow:
    """Compares every ``every``-th call per layer. ``give_up`` is called once, with what differed."""

    def __init__(self, every: int, folder: str, ledger: Ledger, give_up: Callable[[str], None]) -> None:
        self._every = every
        self._folder = folder
        self._ledger = ledger
        self._give_up = give_up
        self._calls: Counter[int] = Counter()
        self._outstanding: deque[_Outstanding] = deque()
        self._found = False

    def due(self, layer_id: int, device: torch.device) -> bool:
        """Whether this call of a layer is to be shadowed; the first one is."""
        if self._found or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return False
        if self._outstanding:
            self.settle()
        self._calls[layer_id] += 1
        return not self._found and (self._calls[layer_id] - 1) % self._every == 0

    def run(
        self,
        layer_id: int,
        facts: Mapping[str, Any],
        touched: Touched,
        handed_out: Mapping[str, torch.Tensor],
        ours: Callable[[], Any],
        stock: Callable[[], Any],
        left_alone: Callable[[], Collection[str]] = tuple,
    ) -> Any:
        """Both ways on the same data; returns stock's answer, or ours where there is no memory for a comparison.

        ``handed_out``: results that both write beside the returned one. ``facts`` go into the reproducer.
        ``left_alone``, asked after ``ours``: buffers that ours may leave to the commit; those must be as they were.
        """
        slots = touched.slots.clamp(min=0).long()
        buffers = {n: _memory(t) for n, t in (touched.inputs | touched.kept | touched.results).items()}
        try:
            before = {name: buffer.clone() for name, buffer in buffers.items()}
            state = touched.state.index_select(0, slots)
        except Exception as error:
            # Nothing has been written yet.
            self._ledger.count("shadow", f"not compared: {type(error).__name__}")
            return ours()
        failure: Exception | None = None
        unwritten: set[str] = set()
        mine: dict[str, torch.Tensor] = {}
        try:
            output = ours()
            # The caller may have given the tensor that both ways write their output to.
            mine = {"output": output.clone()} | {name: tensor.clone() for name, tensor in handed_out.items()}
            mine |= {name: buffer.clone() for name, buffer in buffers.items()}
            unwritten = set(left_alone())
            mine["state"] = touched.state.index_select(0, slots)
        except Exception as error:
            failure = error
        # Whatever was written is undone, so that stock's run is the first one on this data.
        for name, buffer in buffers.items():
            buffer.copy_(before[name])
        touched.state.index_copy_(0, slots, state)
        answer = stock()
        if failure is not None:
            self._ledger.count("shadow", f"not compared: {type(failure).__name__}")
            return answer
        theirs = {"output": answer, **handed_out, **buffers} | {name: before[name] for name in unwritten}
        try:
            theirs["state"] = touched.state.index_select(0, slots)
            flags = self._compare(touched, mine, theirs)
            data = {n: before[n] for n in (*touched.inputs, *touched.kept)} | touched.parameters
            data |= {"state": state, "slots": touched.slots.clone(), "starts": touched.starts.clone()}
            strides = {name: tensor.stride() for name, tensor in (touched.inputs | touched.kept).items()}
            self._enqueue(_Outstanding(tuple(mine), flags, None, layer_id, facts, data, strides))
        except Exception as error:
            self._ledger.count("shadow", f"not compared: {type(error).__name__}")
            return answer
        self._ledger.count("shadow", "compared with stock")
        self.settle()
        return answer

    def _compare(
        self, touched: Touched, mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """One flag a result, on the device: whether any bit differs that stock defines."""
        has_slot = touched.slots >= 0
        requests = has_slot.shape[0]
        flags = []
        for name, left in mine.items():
            right = theirs[name]
            if left.shape != right.shape or left.dtype != right.dtype:
                flags.append(torch.ones((), dtype=torch.bool, device=has_slot.device))
                continue
            unequal = as_integers(left) != as_integers(right)
            if name == "output":
                # Neither way defines the rows of a request without slot, nor those behind the last request.
                rows = unequal.numel() // (left.shape[-1] * left.shape[-2])
                live = has_slot.repeat_interleave(rows // requests, output_size=rows)
                live &= torch.arange(rows, device=live.device) < touched.starts[requests]
                flags.append((unequal.reshape(rows, -1).any(1) & live).any())
            elif name in touched.results:
                # What such a request leaves in its own rows is as undefined.
                flags.append(unequal.any() & has_slot.all())
            else:
                flags.append(unequal.any())
        return torch.stack(flags)

    def _enqueue(self, entry: _Outstanding) -> None:
        if entry.differs.is_cuda:
            host = torch.empty(entry.differs.shape, dtype=torch.bool, pin_memory=True)
            host.copy_(entry.differs, non_blocking=True)
            entry.differs = host
            entry.done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types for it
            entry.done.record()
        self._outstanding.append(entry)

    def settle(self) -> None:
        """Look at the comparisons that the device has finished; wait only where too many are outstanding."""
        while self._outstanding:
            entry = self._outstanding[0]
            if entry.done is not None and not entry.done.query():
                if len(self._outstanding) <= _OUTSTANDING:
                    return
                entry.done.synchronize()
            self._outstanding.popleft()
            names = [name for name, differs in zip(entry.names, entry.differs.tolist(), strict=True) if differs]
            if names:
                self._differs(entry, ", ".join(names))

    def _differs(self, entry: _Outstanding, names: str) -> None:
        self._ledger.count("shadow", f"differs from stock: {names}")
        if self._found:
            return
        self._found = True
        try:
            saved = self._save(entry, names)
        except Exception as error:
            saved = f"its data could not be saved: {type(error).__name__}: {error}"
        self._give_up(f"shadow mode found {names} of layer {entry.layer_id} not to be stock's; {saved}")

    def _save(self, entry: _Outstanding, names: str) -> str:
        if not self._folder:
            return "its data was not saved: no SGLANG_GDN_ZEROCOPY_STATUS_DIR"
        record = {
            "differs": names,
            "layer_id": entry.layer_id,
            "facts": dict(entry.facts),
            "torch": str(torch.__version__),
            "strides": entry.strides,
            "tensors": {name: tensor.cpu() for name, tensor in entry.data.items()},
        }
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        name = f"gdn-zerocopy-shadow-{os.getpid()}-layer{entry.layer_id}.pt"
        path = os.path.join(self._folder, name)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{name}-", suffix=".tmp", dir=self._folder)
        try:
            with open(descriptor, "wb") as stream:
                torch.save(record, stream)
            size = os.path.getsize(temporary)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        return f"its data is in {path} ({size / 1e6:.1f} MB)"
