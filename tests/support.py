"""What the tests share: a dense float64 reference, paged inputs, poison, bit views, plans and tolerances."""

import dataclasses
import functools

import jax
import jaxlib
import numpy as np
import pytest

import splitk_jax as sk

# (rtol, atol) of out against `dense_attention` on the same inputs, with values of order 1. float32: rounding of sums in
# another order. bfloat16, float16: one rounding of the output (2**-8, 2**-11), and for tensor cores one of the softmax
# weights before they meet V.
TOLERANCE = {"float32": (0.0, 2e-5), "bfloat16": (2**-8, 2e-3), "float16": (2**-11, 5e-4)}
# lse is float32 whatever the inputs are.
LSE_TOLERANCE = TOLERANCE["float32"]

QUANTISED = ("float8_e4m3fn", "float8_e5m2", "int8")

SPLITS = (1, 2, 3, 4, 8, 16, 64)

# Edges at every token, so that a sequence of S tokens has S splits.
FINE = {"block_kv": 1, "step_kv": 4, "min_kv_per_split": 1}

# What memory that nobody has written may hold.
POISON = [pytest.param(np.nan, id="nan"), pytest.param(np.inf, id="inf")]


def junk_entries(num_pages):
    """Block-table entries that name no page."""
    return (-1, num_pages, 2**31 - 1, -(2**31))


def copies_pools(dtype):
    """Whether this jaxlib writes pages through a copy of the pool: 8-bit floats on a CPU, bfloat16 before 0.11.2."""
    if jax.default_backend() != "cpu":
        return False
    version = tuple(int(n) for n in jaxlib.__version__.split(".")[:3])
    return dtype.startswith("float8") or (dtype == "bfloat16" and version < (0, 11, 2))


def make_policy(splits=4, *, target="cpu", block_kv=None, step_kv=None, **overrides):
    """A policy of a target, whose packaged tiles take other edges where `block_kv` and `step_kv` are given."""
    settings = {"splits": splits, "max_splits": 256, "min_kv_per_split": 16} | overrides
    if block_kv is None:
        return sk.load_policy(target, environ={}, **settings)
    policy = sk.load_policy(target, environ={})
    tiles = tuple(dataclasses.replace(tile, block_kv=block_kv, step_kv=step_kv) for tile in policy.tiles)
    return dataclasses.replace(policy, tiles=tiles, **settings)


def make_plan(
    splits=4,
    *,
    num_q_heads=2,
    num_kv_heads=1,
    head_dim=64,
    head_dim_v=None,
    page_size=16,
    max_decode_seqs=8,
    num_seqs=None,
    max_seq_len=None,
    dtype="float32",
    q_dtype=None,
    **policy,
):
    """A plan of `make_policy(splits, **policy)`, KV of `dtype` and q of `q_dtype`, which is `dtype` when None."""
    return make_policy(splits, **policy).plan(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        page_size=page_size,
        max_decode_seqs=max_decode_seqs,
        num_seqs=num_seqs,
        max_seq_len=max_seq_len,
        q_dtype=dtype if q_dtype is None else q_dtype,
        kv_dtype=dtype,
    )


def bits(x):
    """The integers behind the floats: `==` takes -0 for 0 and no NaN for itself."""
    x = np.asarray(x)
    return x.view(f"uint{8 * x.dtype.itemsize}")


def assert_same_bits(got, expected):
    """Compares trees of arrays bit by bit."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        np.testing.assert_array_equal(bits(a), bits(b))


def assert_nan_alone(got, wrong, expected):
    """Checks that results are NaN where a mask says so, and have the bits that are expected everywhere else."""
    for x, before in zip(got, expected, strict=True):
        assert np.isnan(x[wrong]).all()
        assert_same_bits(x[~wrong], before[~wrong])


@dataclasses.dataclass(frozen=True)
class Paged:
    """The arrays of one decode call, on the host."""

    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    block_tables: np.ndarray
    seq_lens: np.ndarray

    @property
    def arrays(self):
        return self.q, self.k_pages, self.v_pages, self.block_tables, self.seq_lens

    def replace(self, **arrays):
        return dataclasses.replace(self, **arrays)

    def plan(self, splits=4, **policy):
        """A plan for these shapes."""
        _, page_size, num_kv_heads, head_dim = self.k_pages.shape
        return make_plan(
            splits,
            num_q_heads=self.q.shape[-2],
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            head_dim_v=self.v_pages.shape[-1],
            page_size=page_size,
            max_seq_len=self.block_tables.shape[1] * page_size,
            dtype=self.k_pages.dtype.name,
            q_dtype=self.q.dtype.name,
            **policy,
        )

    def decode(self, plan, *, jit=False, **options):
        """(out, lse) of the op as numpy arrays; with `jit`, inside a jitted function of the caller's."""
        call = functools.partial(sk.paged_decode_attention, plan=plan, return_lse=True, **options)
        out, lse = (jax.jit(call) if jit else call)(*self.arrays)
        assert out.dtype == self.q.dtype
        assert lse.dtype == np.float32
        return np.asarray(out), np.asarray(lse)

    def query_tokens(self):
        """Each of several query tokens, and the call that decodes it alone at its position."""
        q_len = self.q.shape[1]
        for token in range(q_len):
            seq_lens = np.maximum(self.seq_lens - (q_len - 1 - token), 0).astype(np.int32)
            yield token, self.replace(q=self.q[:, token], seq_lens=seq_lens)

    def dense(self, **options):
        """(out, lse) of `dense_attention`."""
        return dense_attention(*self.arrays, **options)


def make_paged(
    q,
    k,
    v,
    *,
    page_size,
    width=None,
    num_pages=None,
    first_page=0,
    dead=np.nan,
    dead_entry=-1,
    window=None,
    dtype="float32",
    seed=0,
):
    """Lays sequences out in pages drawn in random order.

    Args:
      q: [batch, num_q_heads, head_dim] or [batch, q_len, num_q_heads, head_dim].
      k, v: one array [seq_len, num_kv_heads, head_dim] for each sequence.
      page_size: tokens.
      width: entries of a block-table row; just enough for the longest sequence when None.
      num_pages: pages of the pool; when None, one more than needed, or enough for spare pages.
      first_page: the first page that a sequence may own.
      dead: what every slot holds that no live token owns.
      dead_entry: what every block-table entry holds that has no live token; None for spare pages of the pool.
      window: tokens at the end of each sequence that are live; None for all.
      dtype: of q and the pages.
      seed: of the order of the pages.
    """
    seq_lens = np.array([len(x) for x in k], np.int32)
    needed = -(-seq_lens // page_size)
    width = int(needed.max(initial=1)) if width is None else width
    if num_pages is None:
        num_pages = first_page + (len(k) * width if dead_entry is None else int(needed.sum()) + 1)
    free = iter(first_page + np.random.default_rng(seed).permutation(num_pages - first_page))
    k_pages = np.full((num_pages, page_size, *k[0].shape[1:]), dead, np.float32)
    v_pages = np.full((num_pages, page_size, *v[0].shape[1:]), dead, np.float32)
    block_tables = np.full((len(k), width), 0 if dead_entry is None else dead_entry, np.int64)
    for row, seq_len in enumerate(seq_lens):
        first_live = 0 if window is None else max(seq_len - window, 0)
        for i in range(first_live // page_size, needed[row]):
            page = block_tables[row, i] = next(free)
            low, high = max(i * page_size, first_live), min((i + 1) * page_size, seq_len)
            slots = slice(low - i * page_size, high - i * page_size)
            k_pages[page, slots], v_pages[page, slots] = k[row][low:high], v[row][low:high]
        if dead_entry is None:
            for i in range(needed[row], width):
                block_tables[row, i] = next(free)
    return Paged(
        np.asarray(q).astype(dtype),
        k_pages.astype(dtype),
        v_pages.astype(dtype),
        block_tables.astype(np.int32),
        seq_lens,
    )


def random_paged(
    seq_lens, *, num_q_heads=2, num_kv_heads=1, head_dim=64, head_dim_v=None, q_len=None, page_size=16, seed=0, **layout
):
    """Normal q, k and v, laid out as `make_paged` does."""
    rng = np.random.default_rng(seed)
    queries = () if q_len is None else (q_len,)
    q = rng.standard_normal((len(seq_lens), *queries, num_q_heads, head_dim))
    k = [rng.standard_normal((n, num_kv_heads, head_dim)) for n in seq_lens]
    v = [rng.standard_normal((n, num_kv_heads, head_dim_v or head_dim)) for n in seq_lens]
    return make_paged(q, k, v, page_size=page_size, seed=seed, **layout)


def ramp_paged(
    seq_lens, *, num_q_heads=2, num_kv_heads=1, head_dim=64, head_dim_v=None, q_len=None, page_size=16, seed=0, **layout
):
    """q is 0 and v of token j is j, so out is the mean of the visible j and lse the log of their count."""
    rng = np.random.default_rng(seed)
    queries = () if q_len is None else (q_len,)
    q = np.zeros((len(seq_lens), *queries, num_q_heads, head_dim))
    k = [rng.standard_normal((n, num_kv_heads, head_dim)) for n in seq_lens]
    v = [np.broadcast_to(np.arange(n)[:, None, None], (n, num_kv_heads, head_dim_v or head_dim)) for n in seq_lens]
    return make_paged(q, k, v, page_size=page_size, seed=seed, **layout)


def assert_ramp(got, means, counts):
    """Checks (out, lse) of `ramp_paged`: the mean and the count of the tokens that each row sees."""
    out, lse = got
    means = np.asarray(means, np.float64).reshape(out.shape[:-2])
    with np.errstate(divide="ignore"):
        log_counts = np.log(np.asarray(counts, np.float64)).reshape(out.shape[:-2])
    rtol, atol = TOLERANCE[out.dtype.name]
    np.testing.assert_allclose(
        out.astype(np.float64), np.broadcast_to(means[..., None, None], out.shape), rtol=rtol or 1e-6, atol=atol
    )
    np.testing.assert_allclose(lse, np.broadcast_to(log_counts[..., None], lse.shape), rtol=1e-6, atol=1e-6)


def assert_close(got, expected):
    """Compares (out, lse) with those of `dense_attention`; NaN and infinities must stand in the same places."""
    (out, lse), (dense_out, dense_lse) = got, expected
    rtol, atol = TOLERANCE[out.dtype.name]
    np.testing.assert_allclose(out.astype(np.float64), dense_out, rtol=rtol, atol=atol)
    rtol, atol = LSE_TOLERANCE
    np.testing.assert_allclose(lse, dense_lse, rtol=rtol, atol=atol)


def assert_within_rounding(got, paged, **options):
    """Compares (out, lse) of 16-bit tensor cores with `dense_attention`, as closely as they can be held to it.

    Each weight is rounded before it meets V, and the output once: a share of `sum(weight * |v|)` and of the output. The
    table's bound is one for values of order 1, which a row of a few tokens is not held to.
    """
    out, lse = got
    dense_out, dense_lse = paged.dense(**options)
    sizes = np.abs(paged.v_pages.astype(np.float32))  # of int8, -128 has none
    weighed, _ = paged.replace(v_pages=sizes).dense(**options)
    unit, _ = TOLERANCE[out.dtype.name]
    error = np.abs(out.astype(np.float64) - dense_out)
    np.testing.assert_array_less(error, unit * (weighed + np.abs(dense_out)) + TOLERANCE["float32"][1])
    rtol, atol = LSE_TOLERANCE
    np.testing.assert_allclose(lse, dense_lse, rtol=rtol, atol=atol)


def dequantised(pages, scale):
    """The values of pages in float64."""
    values = np.asarray(pages).astype(np.float64)
    return values if scale is None else values * np.asarray(scale, np.float64)[..., None]


def dense_attention(
    q,
    k_pages,
    v_pages,
    block_tables,
    seq_lens,
    sm_scale=None,
    window=None,
    softcap=None,
    sinks=None,
    k_scale=None,
    v_scale=None,
):
    """Attention as one softmax over the live tokens of each row, in float64; reads nothing else.

    Returns:
      out, lse: float64, shaped as those of the op, which they follow in rows that are empty or cannot be served.
    """
    q = np.asarray(q).astype(np.float64)
    k_pages, v_pages = dequantised(k_pages, k_scale), dequantised(v_pages, v_scale)
    one_query = q.ndim == 3
    q = q[:, None] if one_query else q
    batch, q_len, num_q_heads, head_dim = q.shape
    num_pages, page_size, num_kv_heads, _ = k_pages.shape
    sm_scale = head_dim**-0.5 if sm_scale is None else sm_scale
    out = np.zeros((batch, q_len, num_q_heads, v_pages.shape[-1]))
    lse = np.zeros((batch, q_len, num_q_heads))
    for row, position in np.ndindex(batch, q_len):
        table, at = np.asarray(block_tables[row]), (row, position)
        own_len = int(seq_lens[row]) - (q_len - 1 - position)
        if seq_lens[row] < 0 or own_len > len(table) * page_size:
            out[at] = lse[at] = np.nan
            continue
        tokens = np.arange(0 if window is None else max(own_len - window, 0), max(own_len, 0))
        pages = table[tokens // page_size]
        if np.any((pages < 0) | (pages >= num_pages)):
            out[at] = lse[at] = np.nan
            continue
        k, v = (
            np.repeat(x[pages, tokens % page_size], num_q_heads // num_kv_heads, axis=1) for x in (k_pages, v_pages)
        )
        logits = np.einsum("hd,thd->ht", q[at], k) * sm_scale
        if softcap:
            logits = softcap * np.tanh(logits / softcap)
        if sinks is not None:
            logits = np.concatenate([logits, np.asarray(sinks, np.float64)[:, None]], axis=1)
            v = np.concatenate([v, np.zeros((1, *v.shape[1:]))])
        largest = logits.max(axis=1, keepdims=True, initial=-np.inf)
        weights = np.exp(logits - np.where(np.isneginf(largest), 0.0, largest))
        total = weights.sum(axis=1)
        out[at] = np.einsum("ht,thd->hd", weights, v) / np.where(total == 0, 1.0, total)[:, None]
        with np.errstate(divide="ignore"):
            lse[at] = largest[:, 0] + np.log(total)
    return (out[:, 0], lse[:, 0]) if one_query else (out, lse)
