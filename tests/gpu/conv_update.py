"""The fused conv against stock's unpack and conv on a GPU: equality of every result, then time.

    python -m tests.gpu.conv_update equality SOURCES [--releases 0.5.17 0.5.20 0.5.23] [--jobs 12] [--repeats 10000]
    python -m tests.gpu.conv_update timing SOURCES [--release 0.5.17] [--out FILE]

SOURCES is a wheel cache as `check` keeps it, or holds <release>/sglang trees; a release that is not there is fetched
over pip. Equality compares bits in
bfloat16 and exits 1 on a difference. Timing prints microseconds per layer, in a CUDA graph of 24 layers with buffers of
their own, stock and bundled interleaved in one run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

LAYERS = 24
REPLAYS = 30
# Key and value heads of one rank: Qwen3.5-4B at TP 1 to 8, then ratios 1, 3 and 4, whole and split.
HEADS = ((16, 32), (8, 16), (4, 8), (2, 4), (16, 16), (2, 2), (16, 48), (8, 24), (2, 6), (16, 64), (4, 16))
REQUESTS = (1, 2, 3, 8, 17, 32, 64, 128)
DRAFT_TOKENS = range(1, 9)


class Variant(NamedTuple):
    """What selects the compiled kernels."""

    draft_tokens: int
    num_k_heads: int
    num_v_heads: int
    interleaved: bool
    overlapping: bool
    row_padding: int


def variants(strided_unpack: bool, draft_tokens: Sequence[int]) -> Iterator[Variant]:
    """Every draft length with every head split; window and projection layouts and row strides spread over them."""
    for number, (tokens, heads) in enumerate(itertools.product(draft_tokens, HEADS)):
        # One GEMM output: a row holds the gates too, so its stride is a multiple of 4 or only of 2.
        padding = 2 * heads[1] + 2 if strided_unpack and number % 2 else 0
        yield Variant(tokens, *heads, interleaved=False, overlapping=True, row_padding=padding)
        if number % 3 == 0:
            yield Variant(tokens, *heads, interleaved=False, overlapping=False, row_padding=padding)
        if heads[1] // heads[0] != 3 and number % 2:
            # Stock's interleaved unpack takes powers of two only.
            yield Variant(tokens, *heads, interleaved=True, overlapping=True, row_padding=0)


class Buffers(NamedTuple):
    """The tensors of one layer's call, see ``conv_update``."""

    x: Any
    ba: Any
    weight: Any
    bias: Any
    state: Any
    slots: Any
    windows: Any
    window_rows: Any


def buffers(variant: Variant, requests: int, seed: int, padded: bool, bias: bool = False) -> Buffers:
    """Fresh random inputs on the GPU, windows filled with NaN; with ``padded`` every third request has no slot."""
    import torch

    make = torch.Generator("cuda").manual_seed(seed)

    def normal(*size: int) -> Any:
        return torch.randn(size, generator=make, device="cuda").to(torch.bfloat16)

    T, H, HV = variant.draft_tokens, variant.num_k_heads, variant.num_v_heads
    dim, rows = (2 * H + HV) * 128, requests * T
    wide = dim + HV * 128
    if variant.overlapping:
        cells = T + 2
        storage = torch.full((requests, dim, cells), float("nan"), dtype=torch.bfloat16, device="cuda")
        windows = storage.as_strided((requests, T, dim, 3), (dim * cells, 1, cells, 1))
    else:
        windows = torch.full((requests, T, dim, 3), float("nan"), dtype=torch.bfloat16, device="cuda")
    order = torch.randperm(requests + 2, generator=make, device="cuda")[:requests].to(torch.int32)
    if padded:
        order[::3] = -1
    return Buffers(
        x=normal(rows, wide + variant.row_padding)[:, :wide],
        ba=normal(rows, 2 * HV + variant.row_padding)[:, : 2 * HV],
        weight=normal(dim, 4),
        bias=normal(dim) if bias else None,
        state=normal(requests + 2, dim, 3),
        slots=order,
        windows=windows,
        window_rows=torch.randperm(requests, generator=make, device="cuda").to(torch.int32),
    )


class Chains:
    """Stock's unpack and conv of one mounted release, and the bundled launch."""

    def __init__(self, sources: Path, release: str) -> None:
        from sglang_gdn_zerocopy.lab import loader, wheels

        plain = sources / release
        loader.mount(plain if plain.is_dir() else wheels.fetch(release, sources).folder)
        from sglang_gdn_zerocopy.lab.harness import Harness
        from sglang_gdn_zerocopy.upstream.releases import CONV_FUNCTION, MODELS

        harness = Harness()
        self.strided_unpack = harness.strided_unpack
        # Before 0.5.18 stock's unpack kernels take powers of two only.
        self._any_ratio = Version(release) >= Version("0.5.18")
        self._conv = getattr(harness.module, CONV_FUNCTION)
        self._unpack = {site.interleaved: getattr(sys.modules[site.module], site.unpack_function) for site in MODELS}

    def stock(self, variant: Variant, b: Buffers) -> dict[str, Any]:
        """Stock's two launches; results by name."""
        H, HV = variant.num_k_heads, variant.num_v_heads
        if (HV % H == 0 and (HV // H).bit_count() == 1) or self._any_ratio:
            mixed, z, gate_b, gate_a = self._unpack[variant.interleaved](b.x, b.ba, H, HV, 128, 128)
        else:
            # As stock's model does it there: split and concatenate.
            dim = (2 * H + HV) * 128
            mixed = b.x[:, :dim].contiguous()
            z = b.x[:, dim:].view(-1, HV, 128)
            gate_b, gate_a = b.ba[:, :HV].contiguous(), b.ba[:, HV:].contiguous()
        out = self._conv(
            mixed.view(-1, variant.draft_tokens, mixed.shape[1]).transpose(1, 2),
            b.state,
            b.weight,
            b.bias,
            "silu",
            conv_state_indices=b.slots,
            intermediate_conv_window=b.windows,
            intermediate_state_indices=b.window_rows,
        )
        packed = out.transpose(1, 2).view(mixed.shape)
        return {"packed": packed, "z": z, "b": gate_b, "a": gate_a, "windows": b.windows, "conv state": b.state}

    def ours(self, variant: Variant, b: Buffers, tile: Any = None) -> dict[str, Any]:
        """The bundled launch; results by name."""
        import torch

        from sglang_gdn_zerocopy.kernels.conv_update import Unpack, conv_update

        rows, H, HV = b.x.shape[0], variant.num_k_heads, variant.num_v_heads
        dim = (2 * H + HV) * 128

        def empty(*size: int) -> Any:
            return torch.empty(size, dtype=torch.bfloat16, device="cuda")

        unpack = Unpack(b.ba, empty(rows, HV, 128), empty(rows, HV), empty(rows, HV), variant.interleaved, H, 128)
        packed = empty(rows, dim)
        conv_update(
            b.x,
            variant.draft_tokens,
            b.weight,
            b.bias,
            True,
            b.state,
            b.slots,
            b.windows,
            b.window_rows,
            packed,
            unpack,
            tile=tile,
        )
        return {
            "packed": packed,
            "z": unpack.z,
            "b": unpack.b,
            "a": unpack.a,
            "windows": b.windows,
            "conv state": b.state,
        }


def differences(variant: Variant, stock: dict[str, Any], ours: dict[str, Any], slots: Any) -> list[str]:
    """Names of results whose bits differ. Packed rows of a request without slot are written by neither."""
    import torch

    names = []
    for name, left in stock.items():
        right = ours[name]
        if name == "packed":
            live = slots >= 0
            left, right = (t.view(len(slots), -1)[live] for t in (left, right))
        if left.shape != right.shape or not torch.equal(left.view(torch.int16), right.view(torch.int16)):
            names.append(name)
    return names


def equality_shard(sources: Path, release: str, tokens: Sequence[int], shard: int, shards: int, repeats: int) -> int:
    """Compare this shard's variants; prints one JSON line, returns the number of differing calls."""
    chains = Chains(sources, release)
    mine = [v for i, v in enumerate(variants(chains.strided_unpack, tokens)) if i % shards == shard]
    calls, failed = 0, []
    for variant, requests in itertools.product(mine, REQUESTS):
        for padded in (False, True):
            seed = hash((variant, requests, padded)) & 0x7FFFFFFF
            pair = [buffers(variant, requests, seed, padded, bias=requests == 3) for _ in range(2)]
            names = differences(variant, chains.stock(variant, pair[0]), chains.ours(variant, pair[1]), pair[0].slots)
            calls += 1
            if names:
                failed.append({"variant": variant._asdict(), "requests": requests, "padded": padded, "differs": names})
    repeated = repeat(chains, repeats) if shard == 0 and repeats else {}
    print(json.dumps({"release": release, "shard": shard, "calls": calls, "repeats": repeated, "failed": failed}))
    return len(failed) + sum(repeated.values())


def repeat(chains: Chains, times: int) -> dict[str, int]:
    """Runs equal inputs again and again; returns, per batch, in how many runs any bit was another."""
    import torch

    bad = {}
    for requests in (1, 17, 64):
        variant = Variant(4, 16, 32, interleaved=False, overlapping=True, row_padding=0)
        b = buffers(variant, requests, requests, padded=False)
        state = b.state.clone()
        want = {name: value.clone() for name, value in chains.ours(variant, b).items()}
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(times):
            b.state.copy_(state)
            b.windows.fill_(float("nan"))
            got = chains.ours(variant, b)
            wrong += torch.stack([(got[n].view(torch.int16) != want[n].view(torch.int16)).any() for n in want]).any()
        bad[f"N={requests} x {times}"] = int(wrong)
    return bad


def equality(args: argparse.Namespace) -> int:
    """Runs the shards in processes of their own, a release after the other."""
    total, started = 0, time.monotonic()
    for release in args.releases:
        tokens = ",".join(map(str, args.draft_tokens))
        command = [sys.executable, "-m", "tests.gpu.conv_update", "shard", str(args.sources), release, tokens]
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        workers = [
            subprocess.Popen(
                [*command, str(shard), str(args.jobs), str(args.repeats if release == args.releases[0] else 0)],
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for shard in range(args.jobs)
        ]
        calls = differing = 0
        for worker in workers:
            out, _ = worker.communicate()
            lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
            if not lines:
                print(f"{release}: a shard stopped with {worker.returncode}")
                differing += 1
                continue
            calls += lines[-1]["calls"]
            differing += len(lines[-1]["failed"]) + sum(lines[-1]["repeats"].values())
            for failure in lines[-1]["failed"][:5]:
                print(f"{release}: DIFFERS {failure}")
            if lines[-1]["repeats"]:
                print(f"{release}: runs with other bits: {lines[-1]['repeats']}")
        print(f"{release}: {calls} calls compared, {differing} differ, {time.monotonic() - started:.0f} s", flush=True)
        total += differing
    return int(total > 0)


def graph_of(calls: Sequence[Callable[[], Any]]) -> Any:
    """A CUDA graph of ``calls``, one per layer."""
    import torch

    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types there
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def time_graphs(graphs: dict[str, Any]) -> dict[str, tuple[float, float, float]]:
    """Lower quartile, median and upper quartile of microseconds per layer, replays of all graphs interleaved."""
    import torch

    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(REPLAYS + 3):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= 3:
                times[name].append(start.elapsed_time(end) * 1000 / LAYERS)
    return {name: tuple(statistics.quantiles(values, n=4)) for name, values in times.items()}  # type: ignore[misc]


def _name(tile: Any) -> str:
    return f"{tile.quads}x{tile.warps}{'s' if tile.swap else ''}"


def timing(args: argparse.Namespace) -> int:
    """Stock against every tile, and against the tile that the table chooses."""
    import torch
    import triton

    from sglang_gdn_zerocopy.kernels.conv_update import Tile, choose_tile

    chains = Chains(args.sources, args.release)
    tiles = [Tile(quads, warps, swap) for quads, warps in ((32, 1), (64, 2), (128, 4)) for swap in (False, True)]
    rows = []
    for (H, HV), T in itertools.product(args.heads, args.draft_tokens):
        for requests in args.requests:
            variant = Variant(T, H, HV, interleaved=False, overlapping=True, row_padding=0)
            layers = [buffers(variant, requests, 100 + layer, padded=False) for layer in range(LAYERS)]
            pair = [buffers(variant, requests, 7, padded=False) for _ in range(2)]
            names = differences(variant, chains.stock(variant, pair[0]), chains.ours(variant, pair[1]), pair[0].slots)
            if names:
                print(f"N={requests}: {names} differ, not timed")
                return 1
            graphs = {"stock": graph_of([partial(chains.stock, variant, layer) for layer in layers])}
            for tile in tiles:
                calls = [partial(chains.ours, variant, layer, tile) for layer in layers]
                graphs[_name(tile)] = graph_of(calls)
            times = time_graphs(graphs)
            chosen = _name(choose_tile(requests))
            best = min((name for name in times if name != "stock"), key=lambda name: times[name][1])
            cells = "  ".join(f"{name} {value[1]:6.2f}" for name, value in times.items())
            print(f"H={H} HV={HV} T={T} N={requests:3d}  {cells}  best {best} chosen {chosen}", flush=True)
            rows.append(
                {
                    "release": args.release,
                    "gpu": torch.cuda.get_device_name(),
                    "torch": torch.__version__,
                    "triton": triton.__version__,
                    "heads": [H, HV],
                    "draft_tokens": T,
                    "requests": requests,
                    "us_per_layer": {name: [round(v, 3) for v in value] for name, value in times.items()},
                    "chosen": chosen,
                }
            )
            del graphs, layers
            torch.cuda.empty_cache()
    if args.out:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return 0


def _pair(text: str) -> tuple[int, int]:
    k, v = text.split(":")
    return int(k), int(v)


def main(arguments: list[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.conv_update")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("equality")
    one.add_argument("sources", type=Path)
    one.add_argument("--releases", nargs="+", default=["0.5.17", "0.5.20", "0.5.23"])
    one.add_argument("--jobs", type=int, default=12)
    one.add_argument("--repeats", type=int, default=10000)
    one.add_argument("--draft-tokens", type=int, nargs="+", default=list(DRAFT_TOKENS))
    two = commands.add_parser("timing")
    two.add_argument("sources", type=Path)
    two.add_argument("--release", default="0.5.17")
    two.add_argument("--requests", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    two.add_argument("--draft-tokens", type=int, nargs="+", default=[4])
    two.add_argument("--heads", type=_pair, nargs="+", default=[(16, 32)])
    two.add_argument("--out", type=Path)
    three = commands.add_parser("shard")
    three.add_argument("sources", type=Path)
    three.add_argument("release")
    three.add_argument("tokens")
    three.add_argument("numbers", type=int, nargs=3)
    args = parser.parse_args(arguments)
    if args.command == "equality":
        return equality(args)
    if args.command == "timing":
        return timing(args)
    tokens = [int(text) for text in args.tokens.split(",")]
    return int(equality_shard(args.sources, args.release, tokens, *args.numbers) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
