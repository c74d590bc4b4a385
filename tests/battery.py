"""Sequences that are decoded alone and then in any company: the core of the invariance tests, on any device."""

import dataclasses
import functools
import hashlib

import numpy as np
from support import assert_close, assert_within_rounding, make_paged, make_plan

MAX_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Sequence:
    """One sequence: q [num_q_heads, head_dim], k and v [seq_len, num_kv_heads, ...]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    def __len__(self):
        return len(self.k)

    def prefix(self, length, q=None):
        return Sequence(self.q if q is None else q, self.k[:length], self.v[:length])


@dataclasses.dataclass(frozen=True)
class Config:
    """A plan and its options, and the sequences that a test draws for it."""

    heads: tuple[int, int]
    target: str = "cpu"
    head_dim: int = 64
    head_dim_v: int | None = None
    page_size: int = 16
    dtype: str = "bfloat16"
    q_dtype: str | None = None
    splits: str | int = 4
    split_size: int = 64
    min_kv_per_split: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    longest: int = 256

    @functools.cached_property
    def width(self):
        """Pages of the longest sequence."""
        return -(-self.longest // self.page_size)

    @functools.cached_property
    def plan(self):
        return self.plan_of()

    def plan_of(self, **changes):
        return make_plan(
            changes.pop("splits", self.splits),
            target=self.target,
            num_q_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            page_size=self.page_size,
            max_decode_seqs=MAX_ROWS,
            max_seq_len=self.width * self.page_size,
            dtype=self.dtype,
            q_dtype=self.q_dtype,
            split_size=self.split_size,
            min_kv_per_split=self.min_kv_per_split,
            **changes,
        )

    @functools.cached_property
    def options(self):
        sinks = np.linspace(-2, 2, self.heads[0], dtype=np.float32) if self.sinks else None
        return {"window": self.window, "softcap": self.softcap, "sinks": sinks}

    def active_splits(self, length):
        return sum(b > a for a, b in self.plan.split_bounds(length, window=self.window))

    @functools.cached_property
    def edges(self):
        """Lengths at which the tree, a page or the table begins or ends, one token to either side too."""
        unit = self.split_size if self.splits == "fixed_size" else self.min_kv_per_split
        at = [0, 1, self.page_size, self.plan.block_kv, self.longest, *range(unit, self.longest, unit)]
        if self.window is not None:
            at.append(self.window)
        around = {n + d for n in at for d in (-1, 0, 1)}
        return sorted(n for n in around if 0 <= n <= self.longest)

    def lengths(self, count, rng):
        """Lengths uniform in their logarithm, a fifth of them edges."""
        spread = np.exp(rng.uniform(0, np.log(self.longest), count)).astype(int)
        return [int(n) for n in np.where(rng.random(count) < 0.2, rng.choice(self.edges, count), spread)]

    def sequence(self, length, rng):
        num_q_heads, num_kv_heads = self.heads
        return Sequence(
            rng.standard_normal((num_q_heads, self.head_dim)),
            rng.standard_normal((length, num_kv_heads, self.head_dim)),
            rng.standard_normal((length, num_kv_heads, self.head_dim_v or self.head_dim)),
        )

    def sequences(self, count, *, seed=0):
        """Sequences of drawn lengths, the first of the longest and the last of none."""
        rng = np.random.default_rng(seed)
        lengths = [self.longest, *self.lengths(count - 2, rng), 0]
        return [self.sequence(n, rng) for n in lengths]

    def paged(self, rows, *, width=None, num_pages=None, **layout):
        """A batch of `rows`, in shuffled pages of a pool whose size does not depend on them."""
        paged = make_paged(
            np.stack([row.q for row in rows]),
            [row.k for row in rows],
            [row.v for row in rows],
            page_size=self.page_size,
            width=self.width if width is None else width,
            num_pages=self.width * 17 + 1 if num_pages is None else num_pages,
            dtype=self.dtype,
            **layout,
        )
        return paged.replace(q=paged.q.astype(self.q_dtype or self.dtype))

    def decode(self, rows, *, plan=None, **layout):
        return self.paged(rows, **layout).decode(self.plan if plan is None else plan, **self.options)

    def alone(self, rows, **layout):
        """(out, lse) of the rows, each in a batch of its own."""
        each = [self.decode([row], **layout) for row in rows]
        return tuple(np.concatenate(x) for x in zip(*each, strict=True))


# Every rule whose tree reads no batch, and each option somewhere. Rounding to bfloat16 hides most of what another tree
# does to the output: float32 queries, whose output is float32, are what sees it. And head_dim**-0.5 is a power of two
# for 64, where a scale can be moved anywhere without a trace.
CONFIGS = {
    "gqa": Config(heads=(6, 2), head_dim=96, q_dtype="float32"),
    "mha-f32": Config(heads=(4, 4), head_dim=80, dtype="float32", page_size=3, splits=7),
    "mqa-fixed-size": Config(heads=(16, 1), head_dim=128, head_dim_v=64, q_dtype="float32", splits="fixed_size"),
    "f16-window-softcap-sinks": Config(
        heads=(10, 2), dtype="float16", page_size=5, splits=16, window=90, softcap=8.0, sinks=True
    ),
}


def digest(result):
    return hashlib.sha256(b"".join(np.ascontiguousarray(x).tobytes() for x in result)).hexdigest()


def random_batches(config, count, *, seed=0, sizes=(2, 3, 8, 17), decode=None):
    """Decodes sequences in random batches and compares every row with itself decoded alone, bit by bit.

    Args:
      config: what to decode.
      count: batches, in each of which the longest sequence stands somewhere.
      seed: of everything drawn.
      sizes: of the batches; each is compiled once.
      decode: what stands in for `config.decode`.

    Returns:
      (unique, wrong): how many results the longest sequence has had, itself alone among them, and how many rows of
      all batches were not what they are alone.
    """
    decode = config.decode if decode is None else decode
    rng = np.random.default_rng(seed)
    rows = config.sequences(24, seed=seed)
    # Without splits to merge, or with one active split each, there would be nothing to see.
    assert config.plan.num_splits > 1
    assert sum(config.active_splits(len(row)) > 1 for row in rows) >= 5
    alone = [digest(config.decode([row])) for row in rows]
    seen, wrong = {alone[0]}, 0
    for _ in range(count):
        chosen = np.append(0, 1 + rng.choice(len(rows) - 1, rng.choice(sizes) - 1, replace=False))
        rng.shuffle(chosen)
        out, lse = decode([rows[j] for j in chosen], seed=int(rng.integers(2**31)))
        got = [digest((out[i : i + 1], lse[i : i + 1])) for i in range(len(chosen))]
        wrong += sum(a != alone[j] for a, j in zip(got, chosen, strict=True))
        seen.add(got[int(np.flatnonzero(chosen == 0)[0])])
    return len(seen), wrong


def check_against_dense(config, *, seed=1):
    """Compares a batch of edge lengths with dense attention in float64."""
    rng = np.random.default_rng(seed)
    paged = config.paged([config.sequence(n, rng) for n in rng.choice(config.edges, 17)])
    got = paged.decode(config.plan, **config.options)
    if config.plan.backend == "mosaic":
        assert_within_rounding(got, paged, **config.options)
    else:
        assert_close(got, paged.dense(**config.options))
