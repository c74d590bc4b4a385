"""The named shapes that tests and benchmarks share: models, cells (a model under a batch of lengths), suites."""

import math
import random
from dataclasses import dataclass, replace

from splitk_jax.policy import ceil_div

K = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The attention shape of a model; keys and values have the same lanes."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def token_values(self) -> int:
        """Numbers of one token's key and value in one layer."""
        return 2 * self.num_kv_heads * self.head_dim


MODELS = {
    "llama3-8b": Model(num_q_heads=32, num_kv_heads=8, head_dim=128),
    "llama3-70b": Model(num_q_heads=64, num_kv_heads=8, head_dim=128),
    "qwen3-d256": Model(num_q_heads=24, num_kv_heads=4, head_dim=256),
    "qwen3-d128": Model(num_q_heads=32, num_kv_heads=4, head_dim=128),
    "mha": Model(num_q_heads=32, num_kv_heads=32, head_dim=128),
    "mqa": Model(num_q_heads=32, num_kv_heads=1, head_dim=128),
    "tiny": Model(num_q_heads=8, num_kv_heads=2, head_dim=128),
}


KV_BYTES = {"bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}
"""Bytes of a number of each dtype that a cell's keys and values may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One decode step: a model's layer over a batch of sequences in pages.

    Attributes:
      model: a name in `MODELS`.
      seq_lens: tokens of each sequence.
      page_size: tokens.
      context: what the lengths are called: `8k`, `log 512-16k`.
      window: tokens that a query attends, itself included; None for all.
      q_len: query tokens of each sequence, its last tokens; each attends up to itself.
      kv_dtype: of keys and values, in `KV_BYTES`.
    """

    model: str
    seq_lens: tuple[int, ...]
    page_size: int
    context: str
    window: int | None = None
    q_len: int = 1
    kv_dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"{self.model} b{self.batch} {self.span} p{self.page_size}"

    @property
    def span(self) -> str:
        """The context, with the window, the query tokens and the dtype where they are not all, one and bfloat16."""
        window = "" if self.window is None else f" w{tokens(self.window)}"
        q_len = "" if self.q_len == 1 else f" q{self.q_len}"
        kv_dtype = f" {self.kv_dtype.removeprefix('float8_').removesuffix('fn')}" if self.quantised else ""
        return self.context + window + q_len + kv_dtype

    @property
    def quantised(self) -> bool:
        return self.kv_dtype != "bfloat16"

    @property
    def heads(self) -> Model:
        return MODELS[self.model]

    @property
    def batch(self) -> int:
        return len(self.seq_lens)

    @property
    def width(self) -> int:
        """Pages of one block-table row."""
        return ceil_div(max(self.seq_lens), self.page_size)

    @property
    def live_pages(self) -> int:
        return sum(ceil_div(n, self.page_size) for n in self.seq_lens)

    @property
    def attended(self) -> int:
        """Tokens that queries attend, over all sequences: each token once, however many queries share it."""
        if self.window is None:
            return sum(self.seq_lens)
        return sum(min(n, self.window + self.q_len - 1) for n in self.seq_lens)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer, keys and values."""
        return self.page_size * self.token_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of attended keys and values in one layer: what a decode step must read."""
        return self.attended * self.token_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key and value in one layer."""
        return self.heads.token_values * KV_BYTES[self.kv_dtype]


def tokens(count: int) -> str:
    """Tokens as people write them: 131072 is 128k."""
    return f"{count // K}k" if count % K == 0 else str(count)


def equal(
    model: str, batch: int, seq_len: int, page_size: int = 16, *, window: int | None = None, q_len: int = 1
) -> Cell:
    """A cell whose sequences are all `seq_len` tokens long."""
    return Cell(
        model=model,
        seq_lens=(seq_len,) * batch,
        page_size=page_size,
        context=tokens(seq_len),
        window=window,
        q_len=q_len,
    )


def log_uniform(model: str, batch: int, low: int, high: int, page_size: int = 16, *, seed: int = 0) -> Cell:
    """A cell whose lengths are drawn log-uniformly from [low, high] tokens."""
    draw = random.Random(seed)  # its random() gives the same numbers on every Python
    seq_lens = tuple(int(low * math.exp(draw.random() * math.log(high / low))) for _ in range(batch))
    return Cell(model=model, seq_lens=seq_lens, page_size=page_size, context=f"log {tokens(low)}-{tokens(high)}")


def one_long(model: str, page_size: int = 16, *, seed: int = 0) -> Cell:
    """One sequence of 128k tokens beside 63 of 512 to 4k."""
    draw = random.Random(seed)
    short = [512 + int(draw.random() * (4 * K - 512 + 1)) for _ in range(63)]
    short.insert(31, 128 * K)
    return Cell(model=model, seq_lens=tuple(short), page_size=page_size, context="128k+63")


TARGETS = (
    equal("llama3-8b", 1, 1 * K),
    equal("llama3-8b", 1, 8 * K),
    equal("qwen3-d256", 1, 4864),
    equal("llama3-8b", 1, 128 * K),
    equal("llama3-8b", 16, 8 * K, 64),
    equal("llama3-8b", 64, 2 * K),
    one_long("llama3-8b"),
)
"""The shapes that the speed targets are stated for."""

SUITES = {
    # Every model; contexts 1k to 128k; batches 1 to 128; equal and ragged lengths; pages of 16 and 64 tokens.
    # In an order that has something of everything early, for a run that is cut short.
    "decode": (
        *TARGETS,
        log_uniform("llama3-8b", 32, 512, 16 * K),
        equal("llama3-70b", 16, 4 * K),
        equal("mha", 16, 2 * K, 64),
        equal("mqa", 128, 8 * K),
        equal("qwen3-d256", 16, 8 * K),
        log_uniform("qwen3-d128", 16, 1 * K, 64 * K),
        equal("qwen3-d128", 64, 4 * K),
        equal("llama3-8b", 128, 1 * K),
        equal("llama3-8b", 4, 8 * K),
        equal("llama3-70b", 1, 8 * K),
        equal("llama3-8b", 1, 32 * K, 64),
        equal("mha", 1, 4 * K),
        equal("mqa", 1, 128 * K),
        equal("qwen3-d128", 4, 64 * K, 64),
        log_uniform("llama3-70b", 64, 256, 8 * K, 64),
        equal("llama3-70b", 8, 32 * K, 64),
        equal("qwen3-d256", 128, 1 * K, 64),
        equal("qwen3-d256", 1, 32 * K, 64),
        equal("qwen3-d128", 1, 8 * K),
        log_uniform("mha", 8, 512, 16 * K),
        equal("mqa", 16, 64 * K, 64),
    ),
    "targets": TARGETS,
    # What one fixed tree costs against the best split count of each shape.
    "invariance": (
        *(equal("llama3-8b", batch, n * K) for batch in (1, 4, 16, 64) for n in (1, 8, 32, 128)),
        log_uniform("llama3-8b", 16, 1 * K, 128 * K),
        log_uniform("llama3-8b", 64, 512, 32 * K),
        one_long("llama3-8b"),
    ),
    # A window in contexts of several times its length, each after the same tokens as a context of their own.
    "window": tuple(
        cell
        for batch, window, page_size, contexts in (
            (1, 1 * K, 16, (8 * K, 128 * K)),
            (16, 4 * K, 16, (32 * K, 128 * K)),
            (1, 4 * K, 64, (32 * K, 128 * K)),
            (16, 1 * K, 64, (8 * K, 32 * K)),
        )
        for cell in (
            equal("llama3-8b", batch, window, page_size),
            *(equal("llama3-8b", batch, seq_len, page_size, window=window) for seq_len in contexts),
        )
    ),
    # Several query tokens a sequence, as in multi-token prediction and speculative decoding.
    "mtp": tuple(
        cell
        for model in ("llama3-8b", "qwen3-d256", "qwen3-d128")
        for cell in (
            *(equal(model, 16, 8 * K, 64, q_len=q_len) for q_len in (1, 2, 4, 8)),
            equal(model, 1, 8 * K, q_len=4),
            equal(model, 64, 2 * K, q_len=4),
        )
    ),
    # Quantised caches, each after bfloat16 at as many tokens and at as many bytes.
    "fp8": tuple(
        cell
        for model, batch, seq_len, page_size in (
            ("llama3-8b", 16, 8 * K, 64),
            ("llama3-8b", 64, 2 * K, 16),
            ("qwen3-d256", 16, 8 * K, 16),
            ("llama3-8b", 1, 128 * K, 16),
            ("llama3-8b", 1, 8 * K, 16),
            ("mqa", 128, 8 * K, 16),
        )
        for cell in (
            equal(model, batch, seq_len, page_size),
            equal(model, batch, seq_len // 2, page_size),
            *(
                replace(equal(model, batch, seq_len, page_size), kv_dtype=dtype)
                for dtype in KV_BYTES
                if dtype != "bfloat16"
            ),
        )
    ),
    # Small enough for a CPU and the reference backend.
    "smoke": (
        equal("tiny", 2, 1 * K),
        log_uniform("tiny", 3, 1, 1 * K),
    ),
}
