"""The systems that `splitk-jax bench` compares with. Each is imported only when it is asked for.

A peer takes what the op takes, `(q, k_pages, v_pages, block_tables, seq_lens)`, and returns `out`; what it needs
beyond that (another layout, another table) is part of its call, and of its time.
"""

import functools
import importlib
import importlib.util
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from splitk_jax.policy import ceil_div
from splitk_jax.shapes import Cell

Decode = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""`(q, k_pages, v_pages, block_tables, seq_lens) -> out`, shapes and dtypes as in `paged_decode_attention`."""

GATHER_BYTES = 6 * 10**9
"""The largest gathered copy of K and V, in bytes, that the gather is asked to make."""

FLASHINFER_PROGRAM = Path(__file__).with_name("flashinfer_peer.py")
FLASHINFER_WARM_S = 180.0
"""Seconds that FlashInfer's first compilation of one kernel may take."""
FLASHINFER_CELL_S = 60.0
"""Seconds that one cell may take there."""


class Unserved(Exception):  # noqa: N818 - a fact about a peer, not a fault
    """A cell that a peer does not serve; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A system that runs in this process.

    Attributes:
      name: as in `--peers`.
      title: what it is.
      distributions: the packages that it is; the first that is installed gives its version.
      module: what has to be importable.
      gpu_only: whether it has no CPU path.
      candidates: (cell, num_pages) -> the ways to call it, by label: the fastest that is right is shown. Raises
        `Unserved`.
    """

    name: str
    title: str
    distributions: tuple[str, ...]
    module: str
    gpu_only: bool
    candidates: Callable[[Cell, int], dict[str, Decode]]

    def missing(self, platform: str) -> str | None:
        """Why it cannot run here; None when it can."""
        if self.gpu_only and platform != "gpu":
            return f"needs a GPU, got {platform}"
        return None if installed(self.module) else f"not installed: no module {self.module}"

    def version(self) -> str | None:
        """The installed version; None when none of its packages is installed."""
        return next(versions(self.distributions), None)


def versions(distributions: Iterable[str]) -> Iterator[str]:
    """Name and version of each of some packages that is installed."""
    for distribution in distributions:
        try:
            yield f"{distribution} {metadata.version(distribution)}"
        except metadata.PackageNotFoundError:
            continue


def installed(module: str) -> bool:
    """Whether a module can be found; does not import it, only the packages above it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _cudnn(cell: Cell, num_pages: int) -> dict[str, Decode]:
    """JAX's private entry to cuDNN's paged attention: there is no public one."""
    require_plain(cell, "through JAX its masks are aligned with a sequence's first token, not with its last")
    wanted = cell.batch * cell.width
    if num_pages != wanted:
        size = wanted * cell.page_bytes / 1e9
        raise Unserved(f"wants a pool of exactly batch * table width = {wanted} pages ({size:.1f} GB a layer)")
    cudnn = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")

    def call(mask: str) -> Decode:
        def decode(
            q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, block_tables: jax.Array, seq_lens: jax.Array
        ) -> jax.Array:
            table = block_tables[:, None, :, None]
            out = cudnn.paged_attention(
                q[:, None],
                k_pages,
                v_pages,
                jnp.ones_like(seq_lens),
                seq_lens,
                table,
                table,
                scale=q.shape[-1] ** -0.5,
                mask_type=cudnn.MaskType[mask],
            )
            return out[:, 0]

        return decode

    # JAX's own test of paged attention has no mask; the padding mask is what lengths within a page need.
    return {mask: call(mask) for mask in ("PADDING", "NO_MASK")}


def require_plain(cell: Cell, reason: str) -> None:
    """Raises `Unserved` for a cell with a window or several query tokens."""
    if cell.window is not None:
        raise Unserved(f"a window: {reason}")
    if cell.q_len > 1:
        raise Unserved(f"several query tokens: {reason}")


def _fa3(cell: Cell, num_pages: int) -> dict[str, Decode]:
    """FlashAttention-3 with its split count pinned, over counts that launch between a fifth of a wave and eight waves.

    The package has no automatic count: it refuses 0.
    """
    del num_pages
    decode_with_cache = importlib.import_module("flash_attn3_jax").flash_mha_with_kvcache
    # One CTA holds the query heads of one KV head; 128 tokens is the smallest tile of keys.
    ctas = cell.batch * cell.heads.num_kv_heads
    longest = max(cell.seq_lens) if cell.window is None else min(max(cell.seq_lens), cell.window)
    counts = [n for n in (1, 2, 4, 8, 16, 32) if 24 <= n * ctas <= 1056 and n * 128 <= longest]
    # Tokens before a query and after it that it attends; -1 for all, which the causal mask bounds.
    window_size = (-1, -1) if cell.window is None else (cell.window - 1, 0)

    def call(num_splits: int) -> Decode:
        def decode(
            q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, block_tables: jax.Array, seq_lens: jax.Array
        ) -> jax.Array:
            out = decode_with_cache(
                q if q.ndim == 4 else q[:, None],
                k_pages,
                v_pages,
                cache_seqlens=seq_lens,
                page_table=block_tables,
                is_causal=True,
                window_size=window_size,
                num_splits=num_splits,
            )
            return out.reshape(q.shape)

        return decode

    return {f"{n} splits": call(n) for n in counts or [1]}


def _stock(cell: Cell, num_pages: int) -> dict[str, Decode]:
    """JAX's paged attention for GPUs, with the transposes that its pool layout forces."""
    del num_pages
    require_plain(cell, "it attends the whole context, with one query token")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # JAX is about to remove it: then it is not installed
        stock = importlib.import_module("jax.experimental.pallas.ops.gpu.paged_attention").paged_attention
    k_splits = 1
    while k_splits < 16 and 2 * k_splits <= cell.width:
        k_splits *= 2
    # It loads blocks of whole pages, a power of two of them; 128 tokens of 128 lanes fit its shared memory.
    block_tokens = 128 if cell.heads.head_dim <= 128 else 64
    block_pages = 1
    while 2 * block_pages * cell.page_size <= block_tokens and 2 * block_pages * k_splits <= cell.width:
        block_pages *= 2

    def decode(
        q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, block_tables: jax.Array, seq_lens: jax.Array
    ) -> jax.Array:
        # It wants a table width that splits and blocks divide; entries beyond the live pages are not used.
        table = jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % (k_splits * block_pages))))
        return stock(
            q * q.shape[-1] ** -0.5,
            jnp.transpose(k_pages, (2, 0, 1, 3)),
            jnp.transpose(v_pages, (2, 0, 1, 3)),
            table,
            seq_lens,
            k_splits=k_splits,
            pages_per_compute_block=block_pages,
        )

    return {f"{k_splits} splits, {block_pages} pages a block": decode}


def gather_softmax(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    window: int | None = None,
) -> jax.Array:
    """What one writes without a library: gather every page, one product each way, accumulating in float32.

    With a window, the pages that it may reach into.
    """
    batch, width = block_tables.shape
    page_size, num_kv_heads, head_dim = k_pages.shape[1:]
    q_len = q.shape[1] if q.ndim == 4 else 1
    own = seq_lens[:, None] - jnp.arange(q_len)[None, ::-1]  # tokens up to each query, itself included
    columns = jnp.arange(width)[None, :]
    count = gathered_pages(width, page_size, window=window, q_len=q_len)
    if window is not None and count < width:
        first = jnp.clip((own[:, :1] - window) // page_size, 0, width - count)
        columns = first + jnp.arange(count)[None, :]
        block_tables = jnp.take_along_axis(block_tables, columns, axis=1)
    key = (columns[:, :, None] * page_size + jnp.arange(page_size)[None, None, :]).reshape(columns.shape[0], 1, -1)
    k = k_pages[block_tables].reshape(batch, -1, num_kv_heads, head_dim)
    v = v_pages[block_tables].reshape(batch, -1, num_kv_heads, head_dim)
    grouped = q.reshape(batch, q_len, num_kv_heads, -1, head_dim)
    logits = jnp.einsum("bqhgd,bthd->bhgqt", grouped, k, preferred_element_type=jnp.float32) * head_dim**-0.5
    live = key < own[:, :, None]
    if window is not None:
        live &= key >= own[:, :, None] - window
    p = jax.nn.softmax(jnp.where(live[:, None, None], logits, -jnp.inf), axis=-1)
    out = jnp.einsum("bhgqt,bthd->bqhgd", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return out.reshape(q.shape).astype(k.dtype)


def gathered_pages(width: int, page_size: int, *, window: int | None, q_len: int) -> int:
    """Pages of one table row that a gather copies: those that `window + q_len - 1` tokens may lie in."""
    return width if window is None else min(ceil_div(window + q_len - 2, page_size) + 1, width)


def _gather(cell: Cell, num_pages: int) -> dict[str, Decode]:
    del num_pages
    pages = gathered_pages(cell.width, cell.page_size, window=cell.window, q_len=cell.q_len)
    copied = cell.batch * pages * cell.page_bytes
    if copied > GATHER_BYTES:
        raise Unserved(f"would gather {copied / 1e9:.1f} GB; the bound is {GATHER_BYTES / 1e9:g} GB")
    return {"": functools.partial(gather_softmax, window=cell.window)}


IN_PROCESS = (
    Peer(
        name="cudnn",
        title="cuDNN's paged attention through JAX",
        distributions=("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
        module="jax._src.cudnn.fused_attention_stablehlo",
        gpu_only=True,
        candidates=_cudnn,
    ),
    Peer(
        name="fa3",
        title="FlashAttention-3 (flash-attn3-jax), its best pinned split count",
        distributions=("flash-attn3-jax",),
        module="flash_attn3_jax",
        gpu_only=True,
        candidates=_fa3,
    ),
    Peer(
        name="stock",
        title="JAX's own paged_attention (Pallas Triton), with the transposes that it forces",
        distributions=("jax",),
        module="jax.experimental.pallas.ops.gpu.paged_attention",
        gpu_only=True,
        candidates=_stock,
    ),
    Peer(
        name="gather",
        title="gather and softmax, left to XLA",
        distributions=("jax",),
        module="jax",
        gpu_only=False,
        candidates=_gather,
    ),
)
"""The peers that are JAX functions."""


class FlashInfer:
    """FlashInfer's paged decode (FA2 on tensor cores), in a process of its own that runs torch.

    One process serves all cells. Its kernels compile when it starts, in a minute or two, beside what this process
    does; cells are asked for one at a time, so that the GPU is never shared while something is timed. Cells with
    several query tokens take its prefill, whose kernel its decode runs too.
    """

    name = "flashinfer"
    title = "FlashInfer, FA2 on tensor cores, planned ahead, in a CUDA graph"

    def __init__(self, kernels: list[tuple[int, bool]]) -> None:
        """Starts nothing yet.

        Args:
          kernels: what cells need: head_dim, and whether there is a window.
        """
        self._kernels = kernels
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._log: Any = None
        self._warm = 0
        self._deadline = 0.0
        self._dead: str | None = None

    @staticmethod
    def missing(platform: str) -> str | None:
        """Why it cannot run here; None when it can."""
        if platform != "gpu":
            return f"needs a GPU, got {platform}"
        absent = [module for module in ("torch", "flashinfer") if not installed(module)]
        return f"not installed: no module {', '.join(absent)}" if absent else None

    @staticmethod
    def version() -> str | None:
        """The installed versions of FlashInfer and torch."""
        return ", ".join(versions(("flashinfer-python", "torch"))) or None

    def start(self) -> None:
        """Starts the process and its compilations; returns at once."""
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it lives as long as the process
        # -P: the folder of the program holds modules of this package, which torch must not see as top-level ones.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(FLASHINFER_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()
        for head_dim, windowed in self._kernels:
            self._send({"warm": head_dim, "windowed": windowed})
        self._deadline = time.monotonic() + FLASHINFER_WARM_S * len(self._kernels)

    def ready(self, *, wait: bool = False) -> bool:
        """Whether its kernels are compiled, or it is known that it will never answer.

        Args:
          wait: wait for them.
        """
        while self._dead is None and self._warm < len(self._kernels):
            left = max(self._deadline - time.monotonic(), 0.0)
            if self._receive(left if wait else 0.0) is not None:
                self._warm += 1  # a kernel that does not compile is refused again when a cell asks for it
            elif left and not wait:
                return False
            else:
                self._die(f"its kernels did not compile in {FLASHINFER_WARM_S * len(self._kernels):.0f} s")
        return True

    def ask(self, cell: Cell, *, layers: int, pools: int, calls: int, repeats: int) -> dict[str, Any]:
        """Checks and times one cell.

        Returns:
          `error` (the largest relative error of a row), `queued_us`, `kernel_us`; or `reason`.
        """
        if not self.ready(wait=True) or self._dead is not None:
            return {"reason": self._dead}
        heads = cell.heads
        self._send(
            {
                "num_q_heads": heads.num_q_heads,
                "num_kv_heads": heads.num_kv_heads,
                "head_dim": heads.head_dim,
                "page_size": cell.page_size,
                "seq_lens": cell.seq_lens,
                "window": cell.window,
                "q_len": cell.q_len,
                "layers": layers,
                "pools": pools,
                "calls": calls,
                "repeats": repeats,
            }
        )
        answer = self._receive(FLASHINFER_CELL_S)
        if answer is None:
            self._die(f"no answer in {FLASHINFER_CELL_S:.0f} s")
            return {"reason": self._dead}
        return answer

    def close(self) -> None:
        """Ends the process."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._log):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
        self._process = None

    def _read(self, lines: Any) -> None:
        with lines:
            for line in lines:
                self._answers.put(line)
        self._answers.put(None)

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError:
            self._die("it ended")

    def _receive(self, timeout: float) -> dict[str, Any] | None:
        if self._dead is not None:
            return None
        try:
            line = self._answers.get(timeout=timeout) if timeout > 0 else self._answers.get_nowait()
        except queue.Empty:
            return None
        if line is None:
            self._die("it ended")
            return None
        return json.loads(line)

    def _die(self, reason: str) -> None:
        if self._dead is not None or self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._log.seek(0)
        last_words = self._log.read().strip().splitlines()[-1:]
        self._dead = ": ".join([reason, *(line[:200] for line in last_words)])


NAMES = ("cudnn", "fa3", FlashInfer.name, "stock", "gather")
"""Every peer, in the order of the tables."""
