"""What is remembered of a launch: found again for the same sizes, never for others, and nothing kept alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_gdn_zerocopy import bundled
from sglang_gdn_zerocopy.bundled import Bundled, ConvTensors
from sglang_gdn_zerocopy.kernels.conv_update import Unpack
from sglang_gdn_zerocopy.kernels.launch import Launch
from sglang_gdn_zerocopy.kernels.recurrent_verify import PORTABLE, Config, FoldRing, Inputs, Snapshots
from sglang_gdn_zerocopy.ledger import Ledger

N, T, H, HV, K, W = 2, 2, 1, 2, 128, 4
D, ROWS = (2 * H + HV) * K, N * T


def conv(with_unpack: bool = True) -> tuple[ConvTensors, torch.Tensor]:
    """A conv that is taken, and its output."""

    def rows(width: int) -> torch.Tensor:
        return torch.zeros(ROWS, width, dtype=torch.float16)

    unpack = Unpack(rows(2 * HV), rows(HV * K).view(ROWS, HV, K), rows(HV), rows(HV), False, H, K)
    call = ConvTensors(
        x=rows(D + HV * K if with_unpack else D),
        draft_tokens=T,
        weight=torch.zeros(D, W, dtype=torch.float16),
        bias=None,
        silu=True,
        conv_state=torch.zeros(5, D, W - 1, dtype=torch.float16),
        slots=torch.arange(N),
        windows=torch.zeros(5, T, D, W - 1, dtype=torch.float16),
        window_rows=torch.arange(N),
        unpack=unpack if with_unpack else None,
        stock_unpack=None,
    )
    return call, rows(D)


def recurrence(ring: bool = False) -> tuple[Inputs, FoldRing | Snapshots]:
    """A recurrence that is taken."""
    packed = torch.zeros(1, ROWS, 2 * H + HV, K, dtype=torch.float16)
    gates = torch.zeros(ROWS, HV, dtype=torch.float16)
    q, k, v = torch.split(packed, [H, H, HV], dim=2)
    inputs = Inputs(
        q,
        k,
        v,
        gates,
        gates.clone(),
        torch.zeros(HV),
        torch.zeros(HV),
        torch.zeros(5, HV, K, K),
        torch.arange(N),
        torch.arange(0, ROWS + 1, T),
    )
    if ring:
        kept: FoldRing | Snapshots = FoldRing(
            torch.zeros(5, HV, T, K), torch.zeros(5, H, T, K), torch.zeros(5, HV, T), torch.zeros(5, HV, T)
        )
    else:
        kept = Snapshots(torch.zeros(5, T, HV, K, K), torch.arange(N))
    return inputs, kept


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same sizes, one element further: no longer aligned to 16 bytes."""
    return torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same sizes and dtype, every other element."""
    return torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)[..., 0]


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    """The same sizes in another dtype."""
    return tensor.double()


class Launches:
    """The launches that the kernels' functions were given, which are not run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[Launch] = []
        self.prepared = 0
        for name in ("conv_update", "recurrent_verify", "conv_verify"):
            monkeypatch.setattr(bundled, name, self._note)
        for name in ("conv_launch", "recurrent_launch", "one_launch"):
            monkeypatch.setattr(bundled, name, self._counted(getattr(bundled, name)))

    def _note(self, *args: Any, launch: Launch, **kwargs: Any) -> torch.Tensor:
        self.seen.append(launch)
        return torch.empty(0)

    def _counted(self, prepare: Callable[..., Launch]) -> Callable[..., Launch]:
        def counted(*args: Any, **kwargs: Any) -> Launch:
            self.prepared += 1
            return prepare(*args, **kwargs)

        return counted


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(monkeypatch)


@pytest.fixture
def kernels() -> Bundled:
    """Without self-tests."""
    return Bundled(Ledger(), False, stock, reciprocal_norm=False)


def stock(*args: Any) -> Any:
    raise AssertionError("nobody compares")


def run_recurrence(kernels: Bundled, inputs: Inputs, kept: FoldRing | Snapshots) -> Any:
    return kernels.recurrence(T, inputs, kept, stock)


def run_both(
    kernels: Bundled,
    call: ConvTensors,
    inputs: Inputs,
    kept: FoldRing | Snapshots,
    config: Config = PORTABLE,
) -> Any:
    return kernels.together(config, call, inputs, kept, stock)


@pytest.mark.parametrize("with_unpack", [True, False])
def test_the_same_sizes_are_prepared_once(kernels: Bundled, launches: Launches, with_unpack: bool) -> None:
    for _ in range(3):
        kernels.conv(*conv(with_unpack))
        run_recurrence(kernels, *recurrence())
        run_recurrence(kernels, *recurrence(ring=True))
        run_both(kernels, conv(with_unpack)[0], *recurrence())
    assert launches.prepared == 4
    assert len(launches.seen) == 12
    assert launches.seen[:4] == launches.seen[4:8] == launches.seen[8:]


BAD_CONV = [
    ("weight", spread, "the weight is not dense"),
    ("conv_state", spread, "conv state has strides"),
    ("conv_state", doubled, "conv state is torch.float64"),
    ("conv_state", lambda state: state[:, :, :2], "conv state has shape"),
    ("windows", spread, "conv windows of shape"),
    ("windows", doubled, "x and conv windows differ in dtype"),
    ("windows", lambda windows: windows[:, :1], "conv windows hold 1 steps, not 2"),
    ("window_rows", lambda rows: rows[:1], "not one window row for each request"),
    ("x", spread, "x has no dense row"),
    ("draft_tokens", lambda tokens: 1, "4 rows are not 2 requests x 1 tokens"),
    ("bias", lambda bias: torch.zeros(D, 2)[:, 0], "bias is not dense"),
]
BAD_UNPACK = [
    ("ba", spread, "ba has no dense rows"),
    ("z", spread, "z, b or a is not dense"),
    ("b", doubled, "dtypes differ"),
    ("num_k_heads", lambda heads: 2, "packed QKV is 512 wide, which its heads do not make"),
]


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(("name", "change", "says"), BAD_CONV + BAD_UNPACK)
def test_a_bad_conv_after_a_good_one(kernels: Bundled, name: str, change: Any, says: str) -> None:
    call, packed = conv()
    inputs, kept = recurrence()
    for _ in range(2):
        assert kernels.conv(call, packed)
        assert run_both(kernels, call, inputs, kept) is not None
        assert call.unpack is not None
        if name in ConvTensors._fields:
            bad = call._replace(**{name: change(getattr(call, name))})
        else:
            bad = call._replace(unpack=call.unpack._replace(**{name: change(getattr(call.unpack, name))}))
        with pytest.raises(ValueError, match=says):
            kernels.conv(bad, packed)
        with pytest.raises(ValueError, match=says):
            run_both(kernels, bad, inputs, kept)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(("change", "says"), [(spread, "packed QKV is not dense"), (doubled, "differ in dtype")])
def test_a_bad_output_after_a_good_one(kernels: Bundled, change: Any, says: str) -> None:
    call, packed = conv()
    assert kernels.conv(call, packed)
    with pytest.raises(ValueError, match=says):
        kernels.conv(call, change(packed))


BAD_RECURRENCE = [
    ("state", shifted, "state is not aligned"),
    ("state", spread, "state has strides"),
    ("state", doubled, "state is torch.float64"),
    ("a", lambda a: a[:1], "a is"),
    ("b", spread, "b has strides"),
    ("a_log", spread, "a_log has stride"),
    ("slots", lambda slots: slots[:1], "slots"),
    ("states", doubled, "snapshots are torch.float64"),
    ("states", spread, "snapshots have strides"),
    ("rows", lambda rows: rows[:1], "rows of the snapshots"),
    ("raw_v", spread, "raw_v of the ring has strides"),
    ("g", doubled, "gates of the ring are torch.float64"),
]


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(("name", "change", "says"), [*BAD_RECURRENCE, ("q", spread, "q has strides")])
def test_a_bad_recurrence_after_a_good_one(kernels: Bundled, name: str, change: Any, says: str) -> None:
    inputs, kept = recurrence(ring=name in FoldRing._fields)
    call, _ = conv(with_unpack=False)
    for _ in range(2):
        assert run_recurrence(kernels, inputs, kept) is not None
        assert run_both(kernels, call, inputs, kept) is not None
        if name in Inputs._fields:
            bad = inputs._replace(**{name: change(getattr(inputs, name))}), kept
        else:
            bad = inputs, kept._replace(**{name: change(getattr(kept, name))})
        with pytest.raises(ValueError, match=says):
            run_recurrence(kernels, *bad)
        # One launch reads Q from where it will have been, and takes the slots of the conv.
        if name not in ("q", "slots"):
            with pytest.raises(ValueError, match=says):
                run_both(kernels, call, *bad)


@pytest.mark.parametrize(
    ("name", "flag"),
    [("x", "X_PACKED"), ("weight", "PARAM_PACKED"), ("conv_state", "STATE_PACKED"), ("windows", "WINDOW_PACKED")],
)
def test_an_unaligned_tensor_gets_its_own_kernel(kernels: Bundled, launches: Launches, name: str, flag: str) -> None:
    """Words of four cells may be read and written only where they are aligned."""
    call, packed = conv()
    changes: dict[str, Any] = {name: shifted(getattr(call, name))}
    unaligned = call._replace(**changes)
    for variant in (call, unaligned, call):
        kernels.conv(variant, packed)
        run_both(kernels, variant, *recurrence(), config=Config("explicit", 32, 4))
    assert [launch.constants[flag] for launch in launches.seen[::2]] == [True, False, True]
    flag = flag.replace("STATE", "CONV")
    assert [launch.constants[flag] for launch in launches.seen[1::2]] == [True, False, True]


def test_other_outputs_and_other_wishes_get_their_own(kernels: Bundled, launches: Launches) -> None:
    call, packed = conv()
    assert call.unpack is not None
    unaligned = call.unpack._replace(z=shifted(call.unpack.z))
    for variant in (
        (call, packed),
        (call._replace(silu=False), packed),
        (call._replace(unpack=call.unpack._replace(interleaved=True)), packed),
        (call._replace(unpack=unaligned), packed),
        (call, shifted(packed)),
    ):
        kernels.conv(*variant)
    names = ("SILU", "INTERLEAVED", "OUT_PACKED")
    found = [tuple(launch.constants[name] for name in names) for launch in launches.seen]
    off = (True, False, False)
    assert found == [(True, False, True), (False, False, True), (True, True, True), off, off]
    for config in (PORTABLE, Config("explicit", 32, 4), PORTABLE):
        run_both(kernels, call, *recurrence(), config=config)
    assert [launch.explicit for launch in launches.seen[5:]] == [False, True, False]


def test_another_device_is_another_key(kernels: Bundled, launches: Launches) -> None:
    """Two GPUs need not be of one kind."""
    call, packed = conv()
    kernels.conv(call, packed)
    assert call.unpack is not None

    def on_meta(record: Any) -> dict[str, Any]:
        return {name: x.to("meta") for name, x in record._asdict().items() if isinstance(x, torch.Tensor)}

    unpack = call.unpack._replace(**on_meta(call.unpack))
    kernels.conv(call._replace(**on_meta(call), unpack=unpack), packed.to("meta"))
    assert launches.prepared == 2


def test_an_answer_that_was_not_given_is_asked_for_again(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside graph capture the self-test says no and does not remember it."""
    kernels = Bundled(Ledger(), True, stock, reciprocal_norm=False)
    answers = [False, True]
    asked = []

    def passed(shape: Any, difference: Any) -> bool:
        asked.append(shape)
        return answers[0]

    monkeypatch.setattr(kernels._self_test, "passed", passed)
    call, packed = conv()
    inputs, kept = recurrence()
    runs: list[Callable[[], Any]] = [
        lambda: kernels.conv(call, packed) or None,
        lambda: kernels.conv(*conv(with_unpack=False)) or None,
        lambda: run_recurrence(kernels, inputs, kept),
        lambda: run_both(kernels, call, inputs, kept),
        lambda: kernels.may_unpack("key", call.shape, stock) or None,
    ]
    for run in runs:
        assert run() is None
        assert run() is None
    assert len(asked) == 2 * len(runs)
    assert launches.seen == []
    answers.pop(0)
    for run in runs:
        assert run() is not None
        assert run() is not None
    assert len(asked) == 3 * len(runs)


def test_another_overlay_tests_anew() -> None:
    for _ in range(2):
        compared: list[object] = []

        def compare(*args: Any, seen: list[object] = compared) -> Any:
            seen.append(args)
            raise RuntimeError("drill")

        kernels = Bundled(Ledger(), True, compare, reciprocal_norm=False)
        with pytest.raises(RuntimeError, match="drill"):
            kernels.conv(*conv(with_unpack=False))
        assert len(compared) == 1


@pytest.mark.usefixtures("launches")
def test_no_tensor_is_kept_alive(kernels: Bundled) -> None:
    call, packed = conv()
    inputs, kept = recurrence()
    assert call.unpack is not None
    tensors = [*call, *call.unpack, packed, *inputs, *kept]
    gone = [weakref.ref(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)]
    kernels.conv(call, packed)
    run_recurrence(kernels, inputs, kept)
    run_both(kernels, call, inputs, kept)
    del call, packed, inputs, kept, tensors
    gc.collect()
    assert all(tensor() is None for tensor in gone)


def test_what_is_remembered_is_bounded(kernels: Bundled, launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "_MOST_KEYS", 2)
    call, packed = conv()
    variants = [call, call._replace(silu=False), call._replace(x=shifted(call.x))]
    for _ in range(2):
        for variant in variants:
            kernels.conv(variant, packed)
            assert len(kernels._convs) <= 2
    assert launches.prepared == 6
