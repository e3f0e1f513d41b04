"""Failure drills on the real stock 0.5.17 model, backend and kernels: whatever breaks, the answers keep stock's bits,
one line says so, and the ledger shows it.

Drilled elsewhere, each beside what it breaks: the probe (test_activation), the adapter (test_forward), a self-test's
answer (test_fused_conv), activation in any order and wrappers of others (test_lifecycle), fork and spawn
(test_activation), a jumping clock (test_status_file), strict mode (test_strict).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import logging
import os
import pkgutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import sglang_gdn_zerocopy
from sglang_gdn_zerocopy import activation, bundled, forward
from sglang_gdn_zerocopy.bits import same_bits
from sglang_gdn_zerocopy.lab.cases import Case
from sglang_gdn_zerocopy.lab.harness import Harness
from sglang_gdn_zerocopy.records import Protocol
from sglang_gdn_zerocopy.status_file import StatusFile
from tests.test_fused_conv import LAYER, NEXT, PACKED, Twin, counts, declined, world_of

pytestmark = pytest.mark.usefixtures("two_launches")

BACKEND = "sglang.srt.layers.attention.linear.gdn_backend"
RING = Case("ring", protocol=Protocol.FOLD_RING, ring_steps=4, num_v_heads=1, draft_tokens=2, slots=(1, 3))
# Every way into the overlay: with the unpack put off in both models, and from packed QKV, snapshots and ring.
CASES = pytest.mark.parametrize("case", [LAYER, NEXT, PACKED, RING], ids=lambda case: case.name)


def explode(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("drill")


class CompilationError(Exception):
    """As Triton's, which takes source code to make."""


def miscompile(*args: Any, **kwargs: Any) -> Any:
    raise CompilationError("at 12:4: drill")


def warnings_of(log: pytest.LogCaptureFixture) -> list[str]:
    ours = (r for r in log.records if r.name == "sglang_gdn_zerocopy")
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]


def overlay() -> forward.Overlay:
    installation = activation._PROCESS.installation
    assert installation is not None
    assert installation.overlay is not None
    return installation.overlay


@pytest.mark.usefixtures("switched_on")
@pytest.mark.parametrize("error", [explode, miscompile], ids=["self-test", "compile in the self-test"])
@pytest.mark.parametrize("stage", ["conv", "recurrence"])
@CASES
def test_a_self_test_that_cannot_run(
    harness: Harness,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    case: Case,
    stage: str,
    error: Any,
) -> None:
    monkeypatch.setattr(bundled, f"{stage}_difference", error)
    twin = Twin(harness, case)
    assert any(f"self-test of the bundled {stage} kernel failed" in text for text in declined())
    # Where the unpack's own test broke, the conv behind it asks for itself and says so too.
    lines = warnings_of(caplog)
    assert 1 <= len(lines) <= 3
    assert len(lines) == len(set(lines))
    assert (stage, "bundled") not in counts()
    assert twin.equals_stock()


@pytest.mark.usefixtures("switched_on")
@pytest.mark.parametrize("error", [explode, miscompile], ids=["launch", "compile"])
@pytest.mark.parametrize("stage", ["conv", "recurrence"])
@CASES
def test_a_launch_that_fails_before_it_writes(
    harness: Harness,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    case: Case,
    stage: str,
    error: Any,
) -> None:
    monkeypatch.setattr(bundled, "conv_update" if stage == "conv" else "recurrent_verify", error)
    twin = Twin(harness, case)
    (line,) = warnings_of(caplog)
    assert f"{stage} failed, stock takes over: " in line
    assert "drill" in line
    assert counts()["declined", line.partition("): ")[2]] == 1
    if stage == "recurrence":
        # The conv had written by then: it ran once, stock's recurrence went on from there.
        assert sum(count for (where, _), count in counts().items() if where == "conv") == 1
        assert twin.launches == 1
    assert twin.equals_stock()


@pytest.mark.usefixtures("switched_on")
@CASES
def test_no_memory_for_our_results(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, case: Case
) -> None:
    """Every torch.empty of the wrappers runs out of memory; stock's own do not."""
    # The self-tests allocate too; they have passed before the memory runs short.
    harness.verify(world_of(case))
    real = torch

    class Short(ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        @staticmethod
        def empty(*args: Any, **kwargs: Any) -> Any:
            raise real.OutOfMemoryError("drill")

    monkeypatch.setattr(forward, "torch", Short("torch"))
    twin = Twin(harness, case)
    lines = warnings_of(caplog)
    assert len(lines) == (2 if case.model else 1)
    assert all("failed, stock takes over: OutOfMemoryError: drill" in line for line in lines)
    assert twin.equals_stock()


@pytest.mark.usefixtures("switched_on")
def test_a_policy_that_raises(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    class Raises:
        @sglang_gdn_zerocopy.hookimpl
        def gdn_zerocopy_route(self, shape: Any) -> None:
            raise RuntimeError("drill")

    overlay().routes.register(Raises(), "first layers")
    twin = Twin(harness, LAYER)
    (line,) = warnings_of(caplog)
    assert "policy first layers was taken out: RuntimeError: drill" in line
    assert sglang_gdn_zerocopy.status()["policies"] == ["builtin"]
    # The other policies decide.
    assert twin.launches == 1
    assert twin.equals_stock()


@pytest.mark.usefixtures("switched_on")
@CASES
def test_stock_raises_after_our_kernels_wrote(harness: Harness, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """State may have been written: the error is the caller's to see, and nothing is run a second time."""
    harness.verify(world_of(case))
    calls: list[str] = []
    kernels = importlib.import_module(harness.module.TritonGDNKernel.__module__)
    name = "fused_sigmoid_gating_delta_rule_update"
    world = world_of(case)
    before, bundled = harness.launches, counts()["recurrence", "bundled"]
    with monkeypatch.context() as patch:
        for module in (kernels, importlib.import_module(vars(kernels)[name].__module__)):
            ours = vars(module)[name]

            def raising(*args: Any, ours: Any = ours, **kwargs: Any) -> Any:
                ours(*args, **kwargs)
                calls.append("recurrence")
                raise SystemError("drill")

            patch.setattr(module, name, raising)
        with pytest.raises(SystemError, match="drill"):
            harness.verify(world)
    assert calls == ["recurrence"]
    assert harness.launches == before + 1
    assert counts()["recurrence", "bundled"] == bundled + 1
    # Nothing of that call is left behind for the next one.
    assert Twin(harness, case).equals_stock()


@pytest.mark.usefixtures("switched_on")
@CASES
def test_switched_off_and_on_between_steps(harness: Harness, case: Case) -> None:
    """One server's buffers through steps with and without the overlay, against stock all the way."""
    mixed, stock = world_of(case), world_of(case)
    outputs = []
    for on in (True, False, True, True, False):
        if on:
            assert sglang_gdn_zerocopy.activate()
        else:
            assert sglang_gdn_zerocopy.deactivate() == ()
        outputs.append(harness.verify(mixed))
    sglang_gdn_zerocopy.deactivate()
    for output in outputs:
        assert same_bits(output, harness.verify(stock))
    assert all(same_bits(mixed.tensors[name], stock.tensors[name]) for name in stock.tensors)


@pytest.mark.usefixtures("switched_on")
def test_a_status_folder_that_cannot_be_written(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    reporter = StatusFile(str(in_the_way), sglang_gdn_zerocopy.status)
    monkeypatch.setattr(activation._PROCESS.ledger, "reporter", reporter)
    twin = Twin(harness, LAYER)
    assert twin.launches == 1
    assert twin.equals_stock()
    assert [line for line in warnings_of(caplog) if "writes no status file" in line] == warnings_of(caplog)
    assert len(warnings_of(caplog)) == 1


@pytest.fixture
def registry(stock_tree: Callable[[str], Path]) -> Any:
    """SGLang's own hook registry, from the wheel."""
    path = stock_tree("0.5.17") / "sglang/srt/plugins/hook_registry.py"
    spec = importlib.util.spec_from_file_location("hook_registry_of_the_wheel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # It would also put the hook into every other module that holds the function, which no test could undo.
    vars(module)["_propagate_patch"] = lambda *args: 0
    return module


HOOKED = {
    LAYER: (
        f"{BACKEND}.GDNAttnBackend.forward_extend",
        f"{BACKEND}.causal_conv1d_update",
        "sglang.srt.models.qwen3_5.fused_qkvzba_split_reshape_cat_contiguous",
    ),
    NEXT: (
        f"{BACKEND}.GDNAttnBackend.forward_extend",
        f"{BACKEND}.causal_conv1d_update",
        "sglang.srt.models.qwen3_next.fused_qkvzba_split_reshape_cat",
    ),
    PACKED: (f"{BACKEND}.GDNAttnBackend.forward_extend", f"{BACKEND}.causal_conv1d_update"),
}


@pytest.mark.parametrize("theirs_first", [True, False], ids=["theirs first", "ours first"])
@pytest.mark.parametrize("kind", ["REPLACE", "AROUND"])
@pytest.mark.parametrize(
    ("case", "target"),
    [(case, target) for case, targets in HOOKED.items() for target in targets],
    ids=lambda value: value.name if isinstance(value, Case) else value.rpartition(".")[2],
)
def test_a_hook_of_another_plugin(
    harness: Harness,
    monkeypatch: pytest.MonkeyPatch,
    registry: Any,
    case: Case,
    target: str,
    kind: str,
    theirs_first: bool,
) -> None:
    """Theirs sees what it would see on stock, and its answer is what the server gives, with and without the overlay.

    Packed QKV that nobody has written yet must not get to it.
    """
    place, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(place)
    stock = vars(owner)[name]
    seen: list[torch.Tensor] = []

    def theirs(original: Any, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("fused_qkvzba"):
            result = original(*args, **kwargs)
            seen.append(result[0].clone())
            return result[0] + 1, *result[1:]
        seen.append((kwargs["mixed_qkv"] if name == "forward_extend" else args[0]).clone())
        return original(*args, **kwargs) + 1

    def run(with_overlay: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        seen.clear()
        if with_overlay and not theirs_first:
            sglang_gdn_zerocopy.activate()
        under = vars(owner)[name]
        hook = theirs if kind == "AROUND" else functools.partial(theirs, stock)
        registry.HookRegistry.reset()
        registry.HookRegistry.register(target, hook, registry.HookType[kind])
        registry.HookRegistry.apply_hooks()
        if with_overlay and theirs_first:
            sglang_gdn_zerocopy.activate()
        try:
            return harness.verify(world_of(case)), seen.copy()
        finally:
            if with_overlay and theirs_first:
                sglang_gdn_zerocopy.deactivate()
            setattr(owner, name, under)
            sglang_gdn_zerocopy.deactivate()
            setattr(owner, name, stock)

    monkeypatch.setenv("SGLANG_GDN_ZEROCOPY", "1")
    output, got = run(with_overlay=True)
    expected, wanted = run(with_overlay=False)
    assert same_bits(output, expected)
    assert len(got) == len(wanted) == 1
    assert same_bits(got[0], wanted[0])
    # Their hook off again, ours in full.
    sglang_gdn_zerocopy.activate()
    twin = Twin(harness, case)
    assert twin.launches == 1
    assert twin.equals_stock()


PLUGINS = """
import importlib.metadata, importlib.util, json, logging, pathlib, sys
logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s")
from sglang_gdn_zerocopy.lab.loader import mount
tree = pathlib.Path(sys.argv[1])
mount(tree)

def raises():
    raise RuntimeError("drill")

class Entry:
    name, value, dist = "broken", "broken:raises", None
    def load(self):
        return raises

class Unloadable(Entry):
    name = "unloadable"
    def load(self):
        raise ImportError("drill")

import sglang.srt.environ
class Unset:
    @staticmethod
    def get():
        return None
class envs:
    SGLANG_PLUGINS = SGLANG_PLATFORM = Unset
sglang.srt.environ.envs = envs
for name in ("hook_registry", "__init__"):
    dotted = "sglang.srt.plugins" + ("" if name == "__init__" else "." + name)
    spec = importlib.util.spec_from_file_location(dotted, tree / f"sglang/srt/plugins/{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[dotted] = module
    spec.loader.exec_module(module)
real = importlib.metadata.entry_points(group="sglang.srt.plugins")
order = [*real, Entry(), Unloadable()] if sys.argv[2] == "ours first" else [Entry(), Unloadable(), *real]
module.entry_points = lambda group: order if group == "sglang.srt.plugins" else []
module.load_plugins()
module.load_plugins()
importlib.import_module("sglang.srt.layers.attention.linear.gdn_backend")
import sglang_gdn_zerocopy
print(json.dumps(sglang_gdn_zerocopy.status()))
"""


@pytest.mark.parametrize("order", ["ours first", "ours last"])
def test_other_plugins_that_raise(
    python: Callable[..., subprocess.CompletedProcess[str]], stock_tree: Callable[[str], Path], order: str
) -> None:
    """SGLang's own loader, with one plugin that raises and one that cannot be imported beside ours."""
    done = python(PLUGINS, str(stock_tree("0.5.17")), order, SGLANG_GDN_ZEROCOPY="1")
    assert done.stderr.count("GDN zero-copy installed") == 1
    assert done.stderr.count("RuntimeError: drill") == 1
    assert json.loads(done.stdout.splitlines()[-1])["state"] == "installed"


FORK = """
import importlib, os, pathlib, sys
from sglang_gdn_zerocopy.lab.loader import mount
mount(pathlib.Path(sys.argv[1]))
import sglang_gdn_zerocopy as overlay
overlay.activate()
importlib.import_module("sglang.srt.layers.attention.linear.gdn_backend")
from sglang_gdn_zerocopy import activation
pid = os.fork()
if pid == 0:
    activation._PROCESS.ledger.count("child", "only")
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
print(os.getpid(), pid)
"""


def test_a_forked_child_has_a_status_file_of_its_own(
    python: Callable[..., subprocess.CompletedProcess[str]], stock_tree: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "status"
    environment = {"SGLANG_GDN_ZEROCOPY": "1", "SGLANG_GDN_ZEROCOPY_STATUS_DIR": str(folder)}
    parent, child = python(FORK, str(stock_tree("0.5.17")), **environment).stdout.split()
    files = {path.name.split("-")[2]: json.loads(path.read_text(encoding="utf-8")) for path in folder.iterdir()}
    assert files.keys() == {parent, child}
    assert files[child]["parent"][0] == int(parent)
    assert [row["stage"] for row in files[child]["counts"]] == ["child"]
    assert [row["stage"] for row in files[parent]["counts"]] == ["installed"]
    assert os.listdir(folder) != []
