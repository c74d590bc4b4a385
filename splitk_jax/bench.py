"""`splitk-jax bench`: the op and its peers on the same cells, in one run: correctness first, then time.

Two metrics, both in microseconds a layer, over a step of as many layers as a model has. The layers take turns with KV
pools that together are far larger than the L2 cache, so that every layer reads its keys and values from HBM.

- queued: wall time of `CALLS` calls of the jitted step, none waited for, over calls and layers; the best of several.
  Launch gaps are in it: it is what a decode step pays. Each call is given the last one's output, donated, as a model's
  step is its cache: a CUDA graph whose buffers stay where they are is launched without being updated.
- kernel: the sum of its kernels' times (CUPTI).

The floor is a kernel that only reads as many bytes (`kernels/mosaic/read.py`), queued in the same way.

The JSON document of a run:

    suite, target, device, platform_version, calls, repeats
    date       when the document was written, UTC
    tolerance  relative error of a row and head that counts as right
    versions   {package: version}
    peers      {name: {title, version, missing}}; missing: why it cannot run here, or null
    cells      a list of:
      cell, model, num_q_heads, num_kv_heads, head_dim, page_size, batch, context, seq_lens (tokens)
      window     tokens that a query attends, or null for all
      q_len      query tokens of a sequence
      kv_dtype   of keys and values
      kv_bytes   attended, of a layer
      skipped    why nothing ran, or null
      layers, pools        of a step; sets of pools that its layers take turns with
      num_pages            of a pool
      plan       {fingerprint, num_splits, backend}; null where there is none
      floor      {queued_us, kernel_us, launch, reason}
      results    {system: {status, reason, choice, error, queued_us, kernel_us, kernels,
                           tb_per_s, over_floor, over_ours}}
                 status: ok, wrong, unserved, failed or missing; choice: the fastest way to call it that is right;
                 error: the largest relative error of a row and head; kernels: {name: microseconds a layer}
      cost       suite invariance: queued time over the best pinned count's, less 1; else null
      faster     of a quantised cell: queued time of the run's bfloat16 cell of as many tokens over its own; else null

A figure that there is none of is null. The systems are `splitk_jax`, the peers, and in the suite invariance
`pinned N`: the op with N splits.
"""

import functools
import importlib
import json
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from splitk_jax import peers
from splitk_jax.attention import paged_decode_attention
from splitk_jax.bench_report import OURS, PINNED, PINNED_PREFIX, Floor, Result, Row, line
from splitk_jax.peers import Decode, installed
from splitk_jax.plan import DecodePlan, versions
from splitk_jax.policy import Policy, ceil_div, load_policy
from splitk_jax.shapes import SUITES, Cell

READ = "splitk_jax.kernels.mosaic.read"
"""The floor's kernel, imported where it is wanted: Pallas takes a second."""

FLOOR = "floor"

QUANTISED_PEERS = "quantised keys and values: the benchmark asks no peer for them"

CALLS = 20
"""Calls that are queued before one is waited for."""

LAYERS = 32
"""Layers of a step, as many as a model has: what a step computes once for all of them must not count as one layer's."""
FEW_POOLS = 4
"""Sets of pools that a ragged batch must have room for if they are to hold whole tables."""
MIN_POOLS = 2
"""Sets of pools where memory is short, and on a CPU; there also the layers."""

POOL_BYTES = 20 * 10**9
"""Bytes that the pools of one cell may take; a cell that is larger with `MIN_POOLS` is skipped."""
EXACT_POOL_BYTES = 10 * 10**9
"""Bytes up to which a ragged batch gets pools of batch * table width pages, as cuDNN wants them."""

TOLERANCE = 1e-2
"""Relative error (2-norm over head_dim) of a row and head that still counts as right. Rounding to bfloat16 makes 2e-3
to 4e-3 of it; a token left out of ten thousand makes 1e-2."""
CHECKED_TOKENS = 1 << 17
"""Tokens of a batch up to which every row is compared with dense attention; beyond, `CHECKED_ROWS` are."""
CHECKED_ROWS = 8

KV_SCALES = {"bfloat16": 1.0, "float8_e4m3fn": 0.5, "float8_e5m2": 0.5, "int8": 1 / 32}
"""What stored values are multiplied by when read; those of a cell are normal before they are quantised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a run was asked for.

    Attributes:
      suite: a name in `shapes.SUITES`.
      cells: those of its cells that were asked for.
      peers: names in `peers.NAMES`.
      target: as for `load_policy`.
      repeats: timed repeats; the best counts.
      seconds: after which no cell is begun; None for no limit.
      json_path: where the JSON document goes; `-` for the standard output, None for nowhere.
      plot_path: where the PNG goes, or None.
    """

    suite: str
    cells: tuple[Cell, ...]
    peers: tuple[str, ...]
    target: str | None
    repeats: int
    seconds: float | None
    json_path: str | None
    plot_path: str | None

    @classmethod
    def parse(
        cls,
        *,
        suite: str,
        peers: str,
        target: str | None,
        page_size: int | None,
        only: str | None,
        repeats: int,
        seconds: float | None,
        json_path: str | None,
        plot_path: str | None,
    ) -> "Options":
        """Reads the command's options.

        Raises:
          ValueError: a value that is not accepted, naming the option, what was got and what is accepted.
        """
        if suite not in SUITES:
            raise ValueError(f"--suite={suite!r} is not known: accepted are {', '.join(SUITES)}")
        cells = tuple(
            cell
            for cell in SUITES[suite]
            if page_size in (None, cell.page_size) and (only is None or only in cell.name)
        )
        if not cells:
            names = "; ".join(cell.name for cell in SUITES[suite])
            raise ValueError(f"--only={only!r}, --page-size={page_size} leave no cell of the suite {suite}: {names}")
        if repeats < 1:
            raise ValueError(f"--repeats={repeats} is out of range: accepted is a whole number of at least 1")
        if seconds is not None and not seconds > 0:
            raise ValueError(f"--seconds={seconds} is out of range: accepted is a number above 0")
        if json_path not in (None, "-"):
            require_folder("--json", json_path)
        if plot_path is not None:
            require_plot(plot_path)
        return cls(
            suite=suite,
            cells=cells,
            peers=parse_peers(peers),
            target=target,
            repeats=repeats,
            seconds=seconds,
            json_path=json_path,
            plot_path=plot_path,
        )


def require_folder(flag: str, path: str) -> None:
    """Raises where a file could not be written for want of its folder."""
    if not Path(path).parent.is_dir():
        raise ValueError(f"{flag}={path!r}: {str(Path(path).parent)!r} is not a folder")


def require_plot(path: str) -> None:
    """Raises where a picture could not be drawn."""
    require_folder("--plot", path)
    if not path.endswith(".png"):
        raise ValueError(f"--plot={path!r} must end in .png")
    if not installed("matplotlib"):
        raise ValueError("--plot needs matplotlib, which is not installed: pip install 'splitk_jax[bench]'")


def parse_peers(text: str) -> tuple[str, ...]:
    """Reads `--peers`: `all`, `none`, or names between commas."""
    if text in ("all", "none"):
        return peers.NAMES if text == "all" else ()
    names = {name.strip() for name in text.split(",")}
    for name in sorted(names - set(peers.NAMES)):
        raise ValueError(f"--peers={text!r}: {name!r} is not known: accepted are all, none, {', '.join(peers.NAMES)}")
    return tuple(name for name in peers.NAMES if name in names)


@dataclass(slots=True, kw_only=True, eq=False)
class Way:
    """One way to call one system: what is compiled, checked and timed.

    Attributes:
      system, label: whose, and which of its ways.
      decode: what one layer runs.
      start: what the first layer takes: queries, or a read's sums. The step is given copies, which it consumes.
      compare: the relative error of the first layer's result.
      step: the compiled step of all layers.
      failure: why it is not timed.
      error: the relative error found.
      queued_us: the best time so far, microseconds a layer.
    """

    system: str
    label: str
    decode: Decode
    start: jax.Array
    compare: Callable[[jax.Array], float]
    step: Any = None
    failure: Result | None = None
    error: float | None = None
    queued_us: float = math.inf


class Inputs:
    """A cell's arrays on the device: pools that layers take turns with, one table, and dense attention of some rows."""

    def __init__(self, cell: Cell, *, num_pages: int, pools: int, layers: int) -> None:
        heads = cell.heads
        self.layers = layers
        host = np.random.default_rng(0)
        # In a ragged batch of a small pool, dead entries name a page all the same: some peers load it.
        table = np.zeros((cell.batch, cell.width), np.int32)
        pages = host.permutation(num_pages)
        if num_pages == table.size:
            table = pages.astype(np.int32).reshape(table.shape)
        else:
            taken = 0
            for row, seq_len in enumerate(cell.seq_lens):
                live = ceil_div(seq_len, cell.page_size)
                table[row, :live] = pages[taken : taken + live]
                taken += live
        self.block_tables = jnp.asarray(table)
        self.seq_lens = jnp.asarray(cell.seq_lens, jnp.int32)
        keys = jax.random.split(jax.random.key(1), 2 * pools + 1)
        pool = (num_pages, cell.page_size, heads.num_kv_heads, heads.head_dim)
        self.q = _normal(keys[0], query_shape(cell))
        self.pools = [
            (_normal(k, pool, dtype=cell.kv_dtype), _normal(v, pool, dtype=cell.kv_dtype))
            for k, v in zip(keys[1::2], keys[2::2], strict=True)
        ]
        self.checked = checked_rows(cell)
        dense = functools.partial(dense_row, window=cell.window, scale=KV_SCALES[cell.kv_dtype])
        self.dense = np.stack(
            [
                np.asarray(dense(self.q[row], *self.pools[0], self.block_tables[row], self.seq_lens[row]))
                for row in self.checked
            ]
        )

    @property
    def args(self) -> tuple[Any, ...]:
        """What a step takes beside its start."""
        return self.pools, self.block_tables, self.seq_lens

    def error(self, out: jax.Array) -> float:
        """The largest relative error of a checked row and head; inf where it is not a number."""
        got = np.asarray(out[np.asarray(self.checked)]).astype(np.float32)
        difference = np.linalg.norm(got - self.dense, axis=-1)
        error = float((difference / np.linalg.norm(self.dense, axis=-1)).max())
        return error if math.isfinite(error) else math.inf

    def delete(self) -> None:
        """Frees the pools."""
        for array in jax.tree.leaves(self.pools):
            array.delete()


def query_shape(cell: Cell) -> tuple[int, ...]:
    """Of its queries: [batch, num_q_heads, head_dim], with q_len after batch where there are several."""
    heads = (cell.heads.num_q_heads, cell.heads.head_dim)
    return (cell.batch, *heads) if cell.q_len == 1 else (cell.batch, cell.q_len, *heads)


def pools_of(cell: Cell, *, on_gpu: bool) -> tuple[int, int]:
    """Sets of pools, and pages of each: batch * table width, or the live ones of a large ragged batch."""
    most = LAYERS if on_gpu else MIN_POOLS
    exact = cell.batch * cell.width
    num_pages = exact if min(most, FEW_POOLS) * exact * cell.page_bytes <= EXACT_POOL_BYTES else cell.live_pages
    return max(min(most, POOL_BYTES // (num_pages * cell.page_bytes)), MIN_POOLS), num_pages


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: str = "bfloat16") -> jax.Array:
    """Normal numbers, as a cache of the dtype stores them."""
    x = jax.random.normal(key, shape, jnp.bfloat16)
    if dtype == "bfloat16":
        return x
    x = x.astype(jnp.float32) / KV_SCALES[dtype]
    return (jnp.clip(jnp.round(x), -127, 127) if dtype == "int8" else x).astype(dtype)


def checked_rows(cell: Cell) -> list[int]:
    """The rows that are compared with dense attention: all of a small batch; else some, the longest among them."""
    if sum(cell.seq_lens) <= CHECKED_TOKENS or cell.batch <= CHECKED_ROWS:
        return list(range(cell.batch))
    ends = {0, cell.batch - 1, int(np.argmax(cell.seq_lens)), int(np.argmin(cell.seq_lens))}
    return sorted(ends | {*range(0, cell.batch, ceil_div(cell.batch, CHECKED_ROWS - len(ends)))})


@functools.partial(jax.jit, static_argnames=("window", "scale"))
def dense_row(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_table: jax.Array,
    seq_len: jax.Array,
    *,
    window: int | None = None,
    scale: float = 1.0,
) -> jax.Array:
    """Attention of one sequence without splits, in float32.

    Args:
      q: [num_q_heads, head_dim], or [q_len, num_q_heads, head_dim]: the last tokens, each attending up to itself.
      k_pages, v_pages: [num_pages, page_size, num_kv_heads, head_dim].
      block_table: i32[max_pages_per_seq].
      seq_len: i32, tokens.
      window: tokens that a query attends, itself included; None for all.
      scale: what keys and values are multiplied by.

    Returns:
      f32 of q's shape.
    """
    num_kv_heads, head_dim = k_pages.shape[2:]
    k, v = (x[block_table].reshape(-1, num_kv_heads, head_dim).astype(jnp.float32) for x in (k_pages, v_pages))
    k, v = ((x * scale).transpose(1, 0, 2)[:, None] for x in (k, v))  # [num_kv_heads, 1, tokens, head_dim]
    token = jnp.arange(k.shape[2])

    def attend(query: tuple[jax.Array, jax.Array]) -> jax.Array:
        q, past = query
        grouped = q.reshape(num_kv_heads, -1, 1, head_dim).astype(jnp.float32) * head_dim**-0.5
        # Products and sums, not `dot`: nothing rounds to TF32, and there is no algorithm to search for.
        logits = (grouped * k).sum(-1)  # [num_kv_heads, group, tokens]
        live = token < past
        if window is not None:
            live &= token >= past - window
        p = jax.nn.softmax(jnp.where(live, logits, -jnp.inf), axis=-1)
        return (p[..., None] * v).sum(2).reshape(q.shape)

    if q.ndim == 2:
        return attend((q, seq_len))
    # One by one: of all together, products of gigabytes.
    return jax.lax.map(attend, (q, seq_len - q.shape[0] + 1 + jnp.arange(q.shape[0])))


def chain(decode: Decode, *, layers: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """A step of all layers, each layer's queries the last one's output: (the last output, the first).

    The layers take turns with the pools inside it: as arguments, XLA would count a pool as often as it is named.
    """

    def step(
        start: jax.Array, pools: list[tuple[jax.Array, jax.Array]], block_tables: jax.Array, seq_lens: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        layer = jax.jit(decode)  # traced and lowered once, however many layers there are
        outs = [start]
        for i in range(layers):
            outs.append(layer(outs[-1], *pools[i % len(pools)], block_tables, seq_lens).astype(start.dtype))
        return outs[-1], outs[1]

    return step


def compile_ways(ways: list[Way], inputs: Inputs) -> None:
    """Compiles the steps, several at once: compilation is most of a run."""
    with ThreadPoolExecutor(8) as pool:
        compiling = []
        for way in ways:
            try:
                step = jax.jit(chain(way.decode, layers=inputs.layers), donate_argnums=0)
                lowered = step.lower(way.start, *inputs.args)
            except Exception as e:  # noqa: BLE001 - a peer may refuse a shape in any way: it is its result
                way.failure = _failed(e)
            else:
                compiling.append((way, pool.submit(lowered.compile)))
        for way, compiled in compiling:
            try:
                way.step = compiled.result()
            except Exception as e:  # noqa: BLE001 - as above
                way.failure = _failed(e)


def check_way(way: Way, inputs: Inputs) -> None:
    """Runs a compiled step once and compares its first layer."""
    try:
        _, first = way.step(jnp.copy(way.start), *inputs.args)
        way.error = way.compare(first)
    except Exception as e:  # noqa: BLE001 - as above
        way.failure = _failed(e)
        return
    way.failure = _wrong(way.error)


def time_ways(ways: list[Way], inputs: Inputs, repeats: int) -> None:
    """Times the steps in turn, so that a slow moment of the machine falls on all of them."""
    for _ in range(repeats):
        for way in ways:
            if way.failure is not None:
                continue
            try:
                x = jnp.copy(way.start).block_until_ready()
                start = time.perf_counter()
                for _ in range(CALLS):
                    x, _ = way.step(x, *inputs.args)
                x.block_until_ready()
            except Exception as e:  # noqa: BLE001 - as above
                way.failure = _failed(e)
            else:
                way.queued_us = min(way.queued_us, (time.perf_counter() - start) * 1e6 / CALLS / inputs.layers)


class _Fed:
    """A step that is given its own last output: the profiler calls it more than once, and takes it for jitted."""

    def __init__(self, step: Any, start: jax.Array) -> None:
        self.step, self.last = step, start

    def __call__(self, *args: Any) -> jax.Array:
        self.last, _ = self.step(self.last, *args)
        return self.last

    trace = lower = __call__


def kernel_times(way: Way, inputs: Inputs) -> dict[str, float] | None:
    """Kernel name -> microseconds a layer, by CUPTI; None where there is no GPU or no profile."""
    if jax.default_backend() != "gpu":
        return None
    try:
        profiler = importlib.import_module("jax.experimental.mosaic.gpu.profiler")
        _, kernels = profiler.measure(_Fed(way.step, jnp.copy(way.start)), aggregate=False)(*inputs.args)
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError):
        return None  # one figure less, not a run less
    times: dict[str, float] = {}
    for name, ms in kernels or ():
        times[name] = times.get(name, 0.0) + ms * 1e3 / inputs.layers
    return times or None


def total(kernels: dict[str, float] | None) -> float | None:
    """Microseconds of all kernels."""
    return None if kernels is None else sum(kernels.values())


def _wrong(error: float) -> Result | None:
    """The result of a system that is too far off; None for one that is right."""
    if error <= TOLERANCE:
        return None
    return Result(status="wrong", reason=f"relative error {error:.2g}, above {TOLERANCE:g}", error=error)


def _failed(e: Exception) -> Result:
    text = " ".join(str(e).split()) or "no message"
    return Result(status="failed", reason=f"{type(e).__name__}: {text[:300]}")


class Run:
    """One run of the command: its systems, and its rows so far."""

    def __init__(self, options: Options, *, say: Callable[[str], None]) -> None:
        """Loads the policy and looks for the peers.

        Args:
          options: what was asked for.
          say: takes a line of progress.
        """
        self.options = options
        self.say = say
        self.policy = load_policy(options.target)
        self.device = jax.devices()[0]
        self.rows: list[Row] = []
        # The suite invariance compares the op with itself.
        names = () if options.suite == "invariance" else options.peers
        self.in_process = [peer for peer in peers.IN_PROCESS if peer.name in names]
        self.flashinfer = peers.FlashInfer(
            sorted({(cell.heads.head_dim, cell.window is not None) for cell in options.cells})
        )
        found = {peer.name: peer for peer in (*self.in_process, self.flashinfer)}
        self.peers = {
            name: {
                "title": found[name].title,
                "version": found[name].version(),
                "missing": found[name].missing(self.device.platform),
            }
            for name in names
        }
        self._floors: dict[int, Floor] = {}

    def execute(self) -> None:
        """Runs every cell, says a line for each, and keeps the JSON file up to date."""
        flashinfer = self.flashinfer
        if self.peers.get(flashinfer.name, {"missing": "not asked for"})["missing"] is not None:
            flashinfer = None
        waiting: list[Row] = []
        count, limit, begin = len(self.options.cells), self.options.seconds, time.perf_counter()
        try:
            if flashinfer is not None:
                flashinfer.start()
            for number, cell in enumerate(self.options.cells, 1):
                start = time.perf_counter()
                if limit is None or start - begin < limit:
                    row = self._cell(cell)
                else:
                    row = Row(cell=cell, skipped=f"the run's {limit:g} seconds were over")
                self.rows.append(row)
                if flashinfer is not None and row.layers is not None and flashinfer.name not in row.results:
                    waiting.append(row)
                    if flashinfer.ready():
                        self._ask(flashinfer, waiting)
                self.say(f"[{number}/{count}, {time.perf_counter() - start:.1f} s] {line(self, row)}")
                self._save()
            if flashinfer is not None and waiting:
                self.say(f"waiting for {flashinfer.name}, {len(waiting)} cells")
                flashinfer.ready(wait=True)
                self._ask(flashinfer, waiting)
                self._save()
        finally:
            if flashinfer is not None:
                flashinfer.close()

    def not_right(self) -> list[str]:
        """The cells on which the op itself is not right, each with what became of it."""
        return [
            f"{row.cell.name}: {name} {result.status} ({result.reason})"
            for row in self.rows
            for name, result in row.results.items()
            if name not in self.peers and result.status != "ok"
        ]

    def faster(self, row: Row) -> float | None:
        """Of a quantised cell: the bfloat16 cell's queued time, at as many tokens, over its own."""
        wide = next((other for other in self.rows if other.cell == replace(row.cell, kv_dtype="bfloat16")), None)
        return None if wide is None or not row.cell.quantised else wide.over(OURS, row.us(OURS))

    def _cell(self, cell: Cell) -> Row:
        row = Row(cell=cell)
        on_gpu = self.device.platform == "gpu"
        pools, num_pages = pools_of(cell, on_gpu=on_gpu)
        size, bound = pools * num_pages * cell.page_bytes, self._pool_bytes()
        if size > bound:
            row.skipped = f"{pools} sets of pools take {size / 1e9:.1f} GB; the bound is {bound / 1e9:.1f} GB"
            return row
        row.layers, row.pools, row.num_pages = LAYERS if on_gpu else MIN_POOLS, pools, num_pages
        row.results = {
            name: Result(status="missing", reason=facts["missing"])
            for name, facts in self.peers.items()
            if facts["missing"] is not None
        }
        if cell.quantised:
            for name in self.peers:
                row.results.setdefault(name, Result(status="unserved", reason=QUANTISED_PEERS))
        inputs = Inputs(cell, num_pages=num_pages, pools=pools, layers=row.layers)
        try:
            self._measure(row, inputs)
        finally:
            inputs.delete()
        return row

    def _measure(self, row: Row, inputs: Inputs) -> None:
        ways = [
            Way(system=system, label=label, decode=decode, start=inputs.q, compare=inputs.error)
            for system, candidates in self._systems(row).items()
            for label, decode in candidates.items()
        ]
        reads = self._reads(row, inputs)
        compile_ways(ways + reads, inputs)
        for way in ways + reads:
            if way.failure is None:
                check_way(way, inputs)
        time_ways(ways + reads, inputs, self.options.repeats)

        best: dict[str, Way] = {}
        for way in ways + reads:
            if way.failure is None and (way.system not in best or way.queued_us < best[way.system].queued_us):
                best[way.system] = way
        pinned = {name: way for name, way in best.items() if name.startswith(PINNED_PREFIX)}
        # Of the pinned counts only the fastest is worth a profile.
        idle = set(pinned) - {min(pinned, key=lambda name: pinned[name].queued_us, default=None)}
        kernels = {name: None if name in idle else kernel_times(way, inputs) for name, way in best.items()}
        for system in dict.fromkeys(way.system for way in ways):
            if system in best:
                way = best[system]
                row.results[system] = Result(
                    status="ok",
                    choice=way.label or None,
                    error=way.error,
                    queued_us=way.queued_us,
                    kernel_us=total(kernels[system]),
                    kernels=kernels[system],
                )
            else:
                failures = [way.failure for way in ways if way.system == system and way.failure is not None]
                row.results[system] = next((f for f in failures if f.status == "wrong"), failures[0])
        if FLOOR in best:
            way = best[FLOOR]
            row.floor = Floor(queued_us=way.queued_us, kernel_us=total(kernels[FLOOR]), launch=way.label)
        elif reads:
            row.floor = Floor(reason=next(way.failure.reason for way in reads if way.failure is not None))
        self._floors.setdefault(row.cell.kv_bytes, row.floor)

    def _systems(self, row: Row) -> dict[str, dict[str, Decode]]:
        """The systems to run on a cell: name -> label -> what one layer runs."""
        cell, systems = row.cell, {}
        try:
            row.plan = plan_for(self.policy, cell)
            systems[OURS] = {"": ours(row.plan, cell)}
            if self.options.suite == "invariance":
                for count in pinned_counts(row.plan, cell):
                    policy = load_policy(self.options.target, splits=count)
                    systems[f"{PINNED_PREFIX}{count}"] = {"": ours(plan_for(policy, cell), cell)}
        except (NotImplementedError, ValueError) as e:
            row.results[OURS] = _failed(e)
        for peer in self.in_process:
            if peer.name in row.results:
                continue
            try:
                assert row.num_pages is not None
                systems[peer.name] = peer.candidates(cell, row.num_pages)
            except peers.Unserved as e:
                row.results[peer.name] = Result(status="unserved", reason=str(e))
            except Exception as e:  # noqa: BLE001 - a peer's import may fail in any way: it is its result
                row.results[peer.name] = _failed(e)
        return systems

    def _reads(self, row: Row, inputs: Inputs) -> list[Way]:
        """The launch shapes of the read floor; none where it is known, or there is none to have."""
        if self.device.platform != "gpu":
            row.floor = Floor(reason=f"the read kernel needs a GPU, got {self.device.platform}")
            return []
        if self.options.suite == "invariance":
            row.floor = Floor(reason="the suite compares the op with itself")
            return []
        if row.cell.kv_bytes in self._floors:
            row.floor = self._floors[row.cell.kv_bytes]
            return []
        if row.cell.quantised:
            row.floor = Floor(reason="the read kernel reads bfloat16, and no cell of as many bytes came before")
            return []
        read = importlib.import_module(READ)
        size = row.cell.attended * row.cell.heads.num_kv_heads * row.cell.heads.head_dim
        k, v = inputs.pools[0]

        def way(launch: Any) -> Way:
            shape: dict[str, Any] = {"size": size, "launch": launch}
            shape["ctas"] = min(self.policy.sm_count * launch.ctas_per_sm, 2 * read.chunks(size, launch))

            def layer(
                sums: jax.Array, k_pages: jax.Array, v_pages: jax.Array, block_tables: jax.Array, seq_lens: jax.Array
            ) -> jax.Array:
                del block_tables, seq_lens
                return read.read(k_pages, v_pages, sums, **shape)

            def compare(sums: jax.Array) -> float:
                return 0.0 if np.array_equal(np.asarray(sums), read_sums(k, v, **shape)) else math.inf

            start = jnp.zeros(shape["ctas"], jnp.float32)
            return Way(system=FLOOR, label=str(launch), decode=layer, start=start, compare=compare)

        return [way(launch) for launch in read.LAUNCHES]

    def _ask(self, flashinfer: peers.FlashInfer, waiting: list[Row]) -> None:
        for row in waiting:
            assert row.layers is not None
            assert row.pools is not None
            answer = flashinfer.ask(
                row.cell, layers=row.layers, pools=row.pools, calls=CALLS, repeats=self.options.repeats
            )
            row.results[flashinfer.name] = flashinfer_result(answer)
        waiting.clear()

    def _pool_bytes(self) -> int:
        """Half of what the device has, and no more than `POOL_BYTES`."""
        stats = self.device.memory_stats() or {}
        return min(POOL_BYTES, stats.get("bytes_limit", 2 * POOL_BYTES) // 2)

    def _save(self) -> None:
        if self.options.json_path in (None, "-"):
            return
        path = Path(self.options.json_path)
        part = path.with_name(f"{path.name}.part")  # a run that is cut leaves a whole document
        part.write_text(json.dumps(document(self), indent=1) + "\n")
        part.replace(path)


def read_sums(k: jax.Array, v: jax.Array, *, size: int, launch: Any, ctas: int) -> np.ndarray:
    """What the read kernel returns for sums of zero, found without it; the arguments are its own."""
    read = importlib.import_module(READ)
    firsts = functools.partial(_firsts, count=read.chunks(size, launch), chunk=launch.rows * read.LANES)
    loaded = np.concatenate([np.asarray(firsts(x)) for x in (k, v)])
    sums = np.zeros(ctas, np.float32)
    for i in range(0, len(loaded), ctas):  # in the kernel's order, which float32 sums depend on
        sums[: len(loaded) - i] += loaded[i : i + ctas]
    return sums


@functools.partial(jax.jit, static_argnames=("count", "chunk"))
def _firsts(x: jax.Array, *, count: int, chunk: int) -> jax.Array:
    return x.reshape(-1)[: count * chunk : chunk].astype(jnp.float32)


def ours(plan: DecodePlan, cell: Cell) -> Decode:
    """The op under a plan, as a cell asks for it."""

    def decode(
        q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, block_tables: jax.Array, seq_lens: jax.Array
    ) -> jax.Array:
        return paged_decode_attention(
            q, k_pages, v_pages, block_tables, seq_lens, plan=plan, window=cell.window, k_scale=scale, v_scale=scale
        )

    scale = KV_SCALES[cell.kv_dtype] if cell.quantised else None
    return decode


def plan_for(policy: Policy, cell: Cell) -> DecodePlan:
    """The plan of a cell: capacity for its batch, and for its block-table width."""
    return policy.plan(
        num_q_heads=cell.heads.num_q_heads,
        num_kv_heads=cell.heads.num_kv_heads,
        head_dim=cell.heads.head_dim,
        page_size=cell.page_size,
        max_decode_seqs=cell.batch,
        max_seq_len=cell.width * cell.page_size,
        kv_dtype=cell.kv_dtype,
    )


def pinned_counts(plan: DecodePlan, cell: Cell) -> list[int]:
    """The counts of `PINNED` that make different trees: no sequence has more splits than its length allows."""
    counts = [n for n in PINNED if n <= plan.policy.max_splits]
    most = ceil_div(max(cell.seq_lens), plan.min_kv_per_split)
    return [n for n in counts if n < most] + [n for n in counts if n >= most][:1]


def flashinfer_result(answer: dict[str, Any]) -> Result:
    """What FlashInfer's process answered, as a result."""
    if "reason" in answer:
        return Result(status="failed", reason=answer["reason"])
    return _wrong(answer["error"]) or Result(status="ok", **answer)


def document(run: Run) -> dict[str, Any]:
    """The run as plain values; the module's docstring names the fields."""
    cells = []
    for row in run.rows:
        cell, plan = row.cell, row.plan
        results = {}
        for name, result in row.results.items():
            results[name] = asdict(result) | {
                "tb_per_s": row.tb_per_s(name),
                "over_floor": row.over(name, row.floor.queued_us),
                "over_ours": row.over(name, row.us(OURS)),
            }
        cells.append(
            {
                "cell": cell.name,
                "model": cell.model,
                **asdict(cell.heads),
                "page_size": cell.page_size,
                "batch": cell.batch,
                "context": cell.context,
                "seq_lens": list(cell.seq_lens),
                "window": cell.window,
                "q_len": cell.q_len,
                "kv_dtype": cell.kv_dtype,
                "kv_bytes": cell.kv_bytes,
                "skipped": row.skipped,
                "num_pages": row.num_pages,
                "layers": row.layers,
                "pools": row.pools,
                "plan": None
                if plan is None
                else {"fingerprint": plan.fingerprint(), "num_splits": plan.num_splits, "backend": plan.backend},
                "floor": asdict(row.floor),
                "results": results,
                "cost": row.cost,
                "faster": run.faster(row),
            }
        )
    target = run.policy.target
    return {
        "suite": run.options.suite,
        "target": None if target is None else target.name,
        "device": run.device.device_kind,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "platform_version": run.device.client.platform_version,
        "calls": CALLS,
        "repeats": run.options.repeats,
        "tolerance": TOLERANCE,
        "versions": versions(),
        "peers": run.peers,
        "cells": cells,
    }
