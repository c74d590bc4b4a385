"""The op against dense attention in float64, its split kernel against a split-wise model, and rows that go wrong."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import (
    TOLERANCE,
    assert_close,
    assert_same_bits,
    bits,
    junk_entries,
    make_paged,
    make_plan,
    random_paged,
)

import splitk_jax as sk
from splitk_jax.kernels.partials import LOG2E
from splitk_jax.kernels.reference.split import split


@dataclasses.dataclass(frozen=True)
class Case:
    """One compiled shape: heads as (query, KV), lanes, page, the plan's policy and the call's options."""

    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    head_dim_v: int | None = None
    page_size: int = 16
    q_len: int | None = None
    dtype: str = "float32"
    splits: str | int = 4
    target: str = "cpu"
    min_kv_per_split: int = 16
    split_size: int = 32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    sm_scale: float | None = None
    longest: int = 150

    def lengths(self):
        """Around the page, the split and the end of the table, and nothing at all."""
        width = -(-self.longest // self.page_size)
        unit = self.split_size if self.splits == "fixed_size" else self.min_kv_per_split
        lengths = [
            0,
            1,
            self.page_size - 1,
            self.page_size + 1,
            unit,
            unit + 1,
            2 * unit - 1,
            100,
            width * self.page_size,
        ]
        return [min(n, width * self.page_size) for n in lengths]

    def paged(self, seed=0):
        return random_paged(
            self.lengths(),
            num_q_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            q_len=self.q_len,
            page_size=self.page_size,
            dtype=self.dtype,
            seed=seed,
        )

    def plan(self):
        policy = sk.load_policy(
            self.target,
            environ={},
            ahead_of_time=True,
            backend="reference",
            splits=self.splits,
            split_size=self.split_size,
            min_kv_per_split=self.min_kv_per_split,
        )
        batch = len(self.lengths())
        return policy.plan(
            num_q_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            page_size=self.page_size,
            max_decode_seqs=batch,
            max_seq_len=-(-self.longest // self.page_size) * self.page_size,
            q_dtype=self.dtype,
            kv_dtype=self.dtype,
        )

    def options(self):
        sinks = np.random.default_rng(9).standard_normal(self.heads[0]).astype(np.float32) if self.sinks else None
        return {"window": self.window, "softcap": self.softcap, "sinks": sinks, "sm_scale": self.sm_scale}


H200 = {"target": "h200", "min_kv_per_split": 128, "split_size": 128, "longest": 600}

# Covers every value of each column, and the pairs of options that meet in the kernel; not the cross of all.
CASES = {
    "group1": Case(heads=(3, 3)),
    "group3-bf16": Case(heads=(6, 2), dtype="bfloat16", splits=3),
    "group5-f16": Case(heads=(5, 1), dtype="float16", splits=8),
    "group6-page1": Case(heads=(12, 2), page_size=1, longest=110),
    "group7-page2-bf16": Case(heads=(7, 1), page_size=2, dtype="bfloat16", splits=7),
    "group12-page3": Case(heads=(12, 1), page_size=3, splits=16),
    "group71-page5-bf16": Case(heads=(71, 1), page_size=5, dtype="bfloat16"),
    "d72": Case(head_dim=72, page_size=24),
    "d80-f16": Case(head_dim=80, dtype="float16", splits=2),
    "d96-bf16": Case(head_dim=96, dtype="bfloat16", page_size=64, longest=300),
    "d112": Case(head_dim=112, page_size=256, longest=256),
    "d128-bf16": Case(heads=(8, 2), head_dim=128, dtype="bfloat16", longest=400),
    "d192-dv128": Case(heads=(4, 1), head_dim=192, head_dim_v=128),
    "d256-dv64-bf16": Case(head_dim=256, head_dim_v=64, dtype="bfloat16"),
    "d64-dv256": Case(head_dim_v=256, page_size=3),
    "one-split": Case(splits="off"),
    "more-splits-than-tokens": Case(splits=64, longest=100),
    "q1": Case(q_len=1),
    "q2-window": Case(q_len=2, window=17),
    "q3-bf16-fixed": Case(q_len=3, dtype="bfloat16", splits="fixed_size"),
    "q4-sinks-softcap": Case(q_len=4, sinks=True, softcap=3.0),
    "q5-window-sinks": Case(q_len=5, window=40, sinks=True, heads=(6, 2), page_size=5),
    "window1": Case(window=1),
    "window-past-everything": Case(window=10_000),
    "window-softcap-bf16": Case(window=33, softcap=20.0, dtype="bfloat16"),
    "softcap": Case(softcap=0.5),
    "sinks-f16": Case(sinks=True, dtype="float16"),
    "scale": Case(sm_scale=1.0, head_dim=128),
    "auto": Case(splits="auto", heads=(16, 8), head_dim=128, dtype="bfloat16", **H200),
    "auto-window": Case(splits="auto", window=300, **H200),
    "balanced": Case(splits="balanced", heads=(8, 4), **H200),
    "pinned": Case(splits=11, heads=(10, 2), **H200),
    "legacy": Case(splits="legacy", **H200),
    "adaptive": Case(splits="adaptive", **H200),
    "fixed-size": Case(splits="fixed_size", heads=(12, 4), **H200),
    "fixed-size-window-sinks": Case(splits="fixed_size", window=50, sinks=True, page_size=3),
}
EVERY = [pytest.param(case, id=name) for name, case in CASES.items()]


@pytest.mark.parametrize("case", EVERY)
def test_against_dense(case):
    paged, plan, options = case.paged(), case.plan(), case.options()
    got = paged.decode(plan, **options)
    assert_close(got, paged.dense(**options))
    # The compiled program serves other lengths, pages and contents; a scale that is traced is the scale.
    again = case.paged(seed=1)
    again = again.replace(seq_lens=again.seq_lens[::-1].copy(), block_tables=again.block_tables[::-1].copy())
    assert_close(again.decode(plan, **options), again.dense(**options))


def test_the_cases_cover_what_they_say():
    def column(name):
        return {getattr(case, name) for case in CASES.values()}

    assert {q // kv for q, kv in column("heads")} >= {1, 3, 5, 6, 7, 12, 71}
    assert column("head_dim") >= {64, 72, 80, 96, 112, 128, 192, 256}
    assert column("page_size") == {1, 2, 3, 5, 16, 24, 64, 256}
    assert column("q_len") == {None, 1, 2, 3, 4, 5}
    assert column("dtype") == set(TOLERANCE)
    assert column("splits") >= {"auto", "balanced", "legacy", "adaptive", "fixed_size", "off", 3, 64}
    active = {
        name: max(sum(b > a for a, b in case.plan().split_bounds(n)) for n in case.lengths())
        for name, case in CASES.items()
    }
    assert {name for name, count in active.items() if count < 2} == {"one-split"}
    assert CASES["auto"].plan().num_splits == 33


class TestArguments:
    paged = random_paged([40, 0, 17], num_q_heads=4, num_kv_heads=2)
    plan = paged.plan(4)

    def test_out_alone_is_the_out_of_the_pair(self):
        out = sk.paged_decode_attention(*self.paged.arrays, plan=self.plan)
        assert_same_bits(out, self.paged.decode(self.plan)[0])

    def test_a_traced_scale_is_the_scale(self):
        expected = self.paged.decode(self.plan, sm_scale=0.3)
        call = functools.partial(sk.paged_decode_attention, *self.paged.arrays, plan=self.plan, return_lse=True)
        assert_same_bits(jax.jit(lambda scale: call(sm_scale=scale))(jnp.float32(0.3)), expected)
        assert_same_bits(self.paged.decode(self.plan, sm_scale=np.float32(0.3)), expected)
        assert_close(expected, self.paged.dense(sm_scale=float(np.float32(0.3))))

    def test_the_default_scale(self):
        assert_same_bits(self.paged.decode(self.plan), self.paged.decode(self.plan, sm_scale=64**-0.5))

    def test_softcap_0_is_none(self):
        assert_same_bits(self.paged.decode(self.plan, softcap=0), self.paged.decode(self.plan))

    @pytest.mark.parametrize("softcap", [1e31, 1e37, 3.4e38])
    def test_a_softcap_beyond_every_logit_is_none(self, softcap):
        assert_same_bits(self.paged.decode(self.plan, softcap=softcap), self.paged.decode(self.plan))

    def test_one_query_token_with_and_without_its_axis(self):
        with_axis = self.paged.replace(q=self.paged.q[:, None]).decode(self.plan)
        assert_same_bits([x[:, 0] for x in with_axis], self.paged.decode(self.plan))

    def test_q_and_kv_of_two_dtypes(self):
        paged = random_paged([40, 0, 17], num_q_heads=4, num_kv_heads=2, dtype="bfloat16")
        paged = paged.replace(q=paged.q.astype(np.float32))
        plan = dataclasses.replace(self.plan, kv_dtype="bfloat16")
        assert_close(paged.decode(plan), paged.dense())

    def test_an_empty_batch(self):
        empty = self.paged.replace(
            **{name: getattr(self.paged, name)[:0] for name in ("q", "block_tables", "seq_lens")}
        )
        out, lse = empty.decode(self.plan)
        assert out.shape == (0, 4, 64)
        assert lse.shape == (0, 4)
        out, lse = empty.replace(q=np.zeros((0, 3, 4, 64), np.float32)).decode(self.plan)
        assert out.shape == (0, 3, 4, 64)

    def test_no_input_is_written(self):
        before = [x.copy() for x in self.paged.arrays]
        on_device = [jnp.asarray(x) for x in before]
        sk.paged_decode_attention(*on_device, plan=self.plan)
        self.paged.decode(self.plan)
        assert_same_bits(on_device, before)
        assert_same_bits(self.paged.arrays, before)

    def test_repeats_give_the_same_bits(self):
        expected = self.paged.decode(self.plan)
        for _ in range(20):
            assert_same_bits(self.paged.decode(self.plan), expected)

    def test_equal_plans_share_one_trace_and_lengths_take_none(self):
        traced = []

        @functools.partial(jax.jit, static_argnames="plan")
        def call(arrays, plan):
            traced.append(plan)
            return sk.paged_decode_attention(*arrays, plan=plan)

        call(self.paged.arrays, self.paged.plan(4))
        call(self.paged.replace(seq_lens=np.array([1, 2, 3], np.int32)).arrays, self.paged.plan("4"))
        assert len(traced) == 1
        call(self.paged.arrays, self.paged.plan(3))
        assert len(traced) == 2


def split_model(paged, plan, *, sm_scale, window=None, softcap=None):
    """(o, m, l) of each split of each row in float64, cut by `plan.split_bounds`."""
    q = paged.q.astype(np.float64)
    q = q[:, None] if q.ndim == 3 else q
    batch, q_len, num_q_heads, _ = q.shape
    o = np.zeros((batch, q_len, plan.num_splits, num_q_heads, plan.head_dim_v))
    m = np.full(o.shape[:-1], -np.inf)
    l = np.zeros(o.shape[:-1])  # noqa: E741 - the paper's name
    for row, position in np.ndindex(batch, q_len):
        own_len = max(int(paged.seq_lens[row]) - (q_len - 1 - position), 0)
        for s, (low, high) in enumerate(plan.split_bounds(own_len, window=window)):
            if low == high:
                continue
            tokens = np.arange(low, high)
            at = paged.block_tables[row, tokens // plan.page_size], tokens % plan.page_size
            k, v = (
                np.repeat(pool[at].astype(np.float64), plan.group, axis=1) for pool in (paged.k_pages, paged.v_pages)
            )
            logits = np.einsum("hd,thd->ht", q[row, position], k) * sm_scale
            if softcap:
                logits = softcap * np.tanh(logits / softcap)
            logits *= LOG2E
            here = row, position, s
            m[here] = logits.max(axis=1)
            p = np.exp2(logits - m[here][:, None])
            l[here], o[here] = p.sum(axis=1), np.einsum("ht,thd->hd", p, v)
    return o, m, l


def split_kernel(paged, plan, *, sm_scale, window=None, softcap=None):
    arrays = [jnp.asarray(x) for x in paged.arrays]
    arrays[0] = arrays[0][:, None] if arrays[0].ndim == 3 else arrays[0]
    call = jax.jit(functools.partial(split, plan=plan, window=window, softcap=softcap))
    return [np.asarray(x) for x in call(*arrays, jnp.float32(sm_scale), None)]


class TestSplitKernel:
    @pytest.mark.parametrize(
        "name",
        [
            "group3-bf16",
            "d192-dv128",
            "more-splits-than-tokens",
            "q5-window-sinks",
            "window-softcap-bf16",
            "fixed-size",
            "auto",
        ],
    )
    def test_against_the_split_wise_model(self, name):
        case = CASES[name]
        paged, plan = case.paged(), case.plan()
        options = {"sm_scale": case.sm_scale or case.head_dim**-0.5, "window": case.window, "softcap": case.softcap}
        o, m, l = split_model(paged, plan, **options)  # noqa: E741
        got_o, got_m, got_l = split_kernel(paged, plan, **options)
        assert (np.isfinite(m).any(axis=-1).sum(axis=2) > 1).any(), "one row has several splits"
        # Inputs are exact in float32 whatever their dtype: the kernel owes float32 accuracy.
        np.testing.assert_allclose(got_m, m, rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(got_l, l, rtol=1e-5)
        np.testing.assert_allclose(got_o, o, rtol=1e-5, atol=2e-5)
        empty = np.isneginf(m)
        assert (bits(got_o)[empty] == 0).all()
        assert (bits(got_l)[empty] == 0).all()
        assert np.isneginf(got_m[empty]).all()

    @pytest.mark.parametrize("name", ["group3-bf16", "q5-window-sinks", "fixed-size"])
    def test_the_split_wise_model_folds_to_dense(self, name):
        """The other half of the distance: what the model's splits add up to, without the kernel."""
        case = dataclasses.replace(CASES[name], sinks=False)
        paged, plan = case.paged(), case.plan()
        o, m, l = split_model(paged, plan, sm_scale=case.head_dim**-0.5, window=case.window)  # noqa: E741
        out, lse = paged.dense(window=case.window)
        largest = m.max(axis=2, keepdims=True)
        weights = np.exp2(m - np.where(np.isneginf(largest), 0, largest))
        total = (weights * l).sum(axis=2)
        folded = (weights[..., None] * o).sum(axis=2) / np.where(total == 0, 1, total)[..., None]
        np.testing.assert_allclose(folded.reshape(out.shape), out, atol=1e-12)
        with np.errstate(divide="ignore"):
            folded_lse = (largest[:, :, 0] + np.log2(total)) / LOG2E
        np.testing.assert_allclose(folded_lse.reshape(lse.shape), lse, atol=1e-12)


class TestCounting:
    """K is 0 and V one-hot of a position bucket: every partial is a count, exact in float32, of the tokens it holds."""

    BUCKETS = 64
    LONGEST = 320
    PAGE_SIZE = 16
    LENGTHS = np.arange(LONGEST + 1, dtype=np.int32)

    def arrays(self, rows):
        positions = np.arange(self.LONGEST)
        # Neighbouring tokens fall in different buckets: a token that is lost, doubled or foreign changes a count.
        v = np.eye(self.BUCKETS, dtype=np.float32)[positions % self.BUCKETS]
        pool = (self.LONGEST // self.PAGE_SIZE, self.PAGE_SIZE, 1)
        tables = np.tile(np.arange(pool[0], dtype=np.int32), (len(rows), 1))  # every row shares one sequence
        q = np.ones((len(rows), 1, 8), np.float32)
        return q, np.zeros((*pool, 8), np.float32), v.reshape(*pool, self.BUCKETS), tables, rows

    def counts(self, low, high):
        tokens = np.arange(self.LONGEST)
        inside = (tokens >= low) & (tokens < high)
        return np.bincount(tokens[inside] % self.BUCKETS, minlength=self.BUCKETS)

    @pytest.mark.parametrize(
        ("splits", "min_kv", "block_kv", "window"),
        [
            (1, 16, 16, None),
            (2, 16, 16, None),
            (3, 16, 16, None),
            (7, 32, 16, None),
            (8, 1, 1, None),
            (16, 16, 16, None),
            (33, 3, 3, None),
            (64, 1, 1, None),
            (128, 2, 2, 77),
            ("fixed_size", 16, 16, None),
            ("fixed_size", 16, 16, 50),
        ],
    )
    def test_every_token_counts_once_in_its_own_split(self, splits, min_kv, block_kv, window):
        plan = make_plan(
            splits,
            head_dim=8,
            head_dim_v=self.BUCKETS,
            num_q_heads=1,
            page_size=self.PAGE_SIZE,
            max_decode_seqs=len(self.LENGTHS),
            max_seq_len=self.LONGEST,
            min_kv_per_split=min_kv,
            block_kv=block_kv,
            step_kv=48,
            **({"split_size": 48} if splits == "fixed_size" else {}),
        )
        arrays = self.arrays(self.LENGTHS)
        arrays = [jnp.asarray(x) for x in arrays]
        q, *rest = arrays
        o, m, l = jax.jit(functools.partial(split, plan=plan, window=window, softcap=None))(  # noqa: E741
            q[:, None], *rest, jnp.float32(1), None
        )
        o, m, l = (np.asarray(x)[:, 0, :, 0] for x in (o, m, l))  # noqa: E741
        bounds = [plan.split_bounds(int(n), window=window) for n in self.LENGTHS]
        expected = np.array([[self.counts(*b) for b in row] for row in bounds])
        np.testing.assert_array_equal(o, expected)
        np.testing.assert_array_equal(l, expected.sum(axis=-1))
        np.testing.assert_array_equal(m, np.where(expected.sum(axis=-1) > 0, 0, -np.inf))

        if splits not in (1, 7, "fixed_size"):
            return  # the merge of the counts is the same whatever they are: three plans see it
        out, lse = sk.paged_decode_attention(*arrays, plan=plan, window=window, return_lse=True)
        out, lse = np.asarray(out)[:, 0], np.asarray(lse)[:, 0]
        attended = self.LENGTHS if window is None else np.minimum(self.LENGTHS, window)
        whole = np.array([self.counts(n - a, n) for n, a in zip(self.LENGTHS, attended, strict=True)])
        np.testing.assert_allclose(out * attended[:, None], whole, atol=1e-4)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(lse, np.log(attended), rtol=1e-6)

    def test_one_token_less_is_seen(self):
        """The oracle itself: a count that is off by one token is not the count."""
        for n in (1, 33, self.LONGEST):
            assert (self.counts(0, n) != self.counts(0, n - 1)).sum() == 1


class TestAccuracy:
    """Error against float64 on the same inputs does not grow with the split count."""

    LENGTH = 2048
    SPLITS = (1, 2, 3, 8, 16, 64, 128)
    KINDS = ("normal", "peaky", "flat", "offset")

    @functools.cached_property
    def inputs(self):
        """One row for each kind of logits: std 1, std 6, all nearly equal, a large common offset."""
        paged = random_paged([self.LENGTH] * 4, num_q_heads=4, num_kv_heads=1, head_dim=64, page_size=64)
        q = paged.q * np.array([1, 6, 0.01, 1], np.float32)[:, None, None]
        q[3, :, 0] = 30.0
        k = paged.k_pages.copy()
        k[paged.block_tables[3], :, :, 0] = 30.0
        return paged.replace(q=q, k_pages=k)

    def errors(self, dtype, partial_dtype="float32", splits=SPLITS):
        """(rms, max) error by split count and kind, relative to the rms of the dense output."""
        paged = self.inputs
        paged = paged.replace(**{name: getattr(paged, name).astype(dtype) for name in ("q", "k_pages", "v_pages")})
        dense, _ = paged.dense()
        scale = np.sqrt((dense**2).mean(axis=(1, 2)))
        rms, largest = {}, {}
        for count in splits:
            plan = dataclasses.replace(paged.plan(count, min_kv_per_split=16), partial_dtype=partial_dtype)
            assert sum(b > a for a, b in plan.split_bounds(self.LENGTH)) == count
            error = paged.decode(plan)[0].astype(np.float64) - dense
            rms[count] = np.sqrt((error**2).mean(axis=(1, 2))) / scale
            largest[count] = np.abs(error).max(axis=(1, 2)) / np.abs(dense).max(axis=(1, 2))
        return paged, dense, rms, largest

    def test_float32(self):
        _, _, rms, largest = self.errors("float32")
        for splits in self.SPLITS:
            assert (rms[splits] <= 1.25 * rms[1]).all(), dict(zip(self.KINDS, rms[splits] / rms[1], strict=True))
            # float32 end to end: 2**-24 times a sum over a row's blocks, far below the gate of bfloat16 inputs, 3e-4.
            assert (rms[splits][[0, 1, 2]] <= 2e-6).all()
            assert (largest[splits] <= 1e-3).all()

    def test_bfloat16(self):
        paged, dense, rms, largest = self.errors("bfloat16")
        unsplit = np.abs(unsplit_reference(paged).astype(np.float64) - dense).max(axis=(1, 2))
        for splits in self.SPLITS:
            # One rounding of the output, whatever the count: 2**-9 at most, its rms below that.
            assert (rms[splits] <= 2e-3).all()
            assert (rms[splits] <= 1.25 * rms[1]).all()
            assert (largest[splits] * np.abs(dense).max(axis=(1, 2)) <= 2 * unsplit).all()

    def test_bfloat16_partials(self):
        """B17: each split is rounded once, over its own sum, and the fold is float32: more of them add no error."""
        counts = (1, 16, 128)
        paged, _, rms, _ = self.errors("float32", "bfloat16", counts)
        for splits in counts:
            assert (rms[splits] <= 2e-3).all()
            assert (rms[splits] <= 1.25 * rms[1]).all()
            plan = dataclasses.replace(paged.plan(splits, min_kv_per_split=16), partial_dtype="bfloat16")
            ones = paged.replace(v_pages=np.ones_like(paged.v_pages))
            np.testing.assert_allclose(ones.decode(plan)[0], 1, rtol=2**-22)
        assert (rms[1] > 1e-4).all()

    def test_bfloat16_partials_in_company(self):
        """Of rows long, short, empty and bad, each its own bits; a scale of V that the sum brings back."""
        paged = random_paged([300, 0, 1, 77, 300], page_size=8)
        plan = dataclasses.replace(paged.plan(7, min_kv_per_split=16), partial_dtype="bfloat16")
        paged = paged.replace(v_pages=paged.v_pages * np.float32(1e30))
        paged.block_tables[4, 3] = -1
        out, lse = paged.decode(plan)
        assert np.isnan(out[4]).all()
        assert np.isnan(lse[4]).all()
        assert not out[1].any()
        dense, dense_lse = paged.dense()
        np.testing.assert_allclose(out[:4] / 1e30, dense[:4] / 1e30, rtol=2**-8, atol=1e-3)
        np.testing.assert_allclose(lse[[0, 2, 3]], dense_lse[[0, 2, 3]], rtol=1e-6)
        for row in range(4):
            alone = paged.replace(**{x: getattr(paged, x)[row : row + 1] for x in ("q", "block_tables", "seq_lens")})
            assert_same_bits(alone.decode(plan), [x[row : row + 1] for x in (out, lse)])


def unsplit_reference(paged):
    """Attention as a user would write it in the dtype of the inputs: one softmax, no splits."""
    k, v = (
        jnp.asarray(pool)[paged.block_tables].reshape(len(paged.q), -1, pool.shape[-1])
        for pool in (paged.k_pages, paged.v_pages)
    )
    logits = jnp.einsum("bhd,btd->bht", jnp.asarray(paged.q), k) * jnp.asarray(paged.q.shape[-1] ** -0.5, k.dtype)
    return np.asarray(jnp.einsum("bht,btd->bhd", jax.nn.softmax(logits, axis=-1), v))


class TestLse:
    def test_of_halves_merges_to_the_whole(self):
        """50 rows and 4 heads, each cut at a random token: the caller's merge is the whole, in natural logarithms."""
        rng = np.random.default_rng(4)
        lens = rng.integers(2, 200, 50)
        cuts = rng.integers(1, lens)
        q = rng.standard_normal((50, 4, 64))
        k, v = ([rng.standard_normal((n, 2, 64)) for n in lens] for _ in range(2))

        def decoded(k, v):
            paged = make_paged(q, k, v, page_size=16, width=13, num_pages=800)
            return paged, paged.decode(paged.plan(3, max_decode_seqs=50))

        whole, (out, lse) = decoded(k, v)
        _, first = decoded([x[:c] for x, c in zip(k, cuts, strict=True)], [x[:c] for x, c in zip(v, cuts, strict=True)])
        _, second = decoded(
            [x[c:] for x, c in zip(k, cuts, strict=True)], [x[c:] for x, c in zip(v, cuts, strict=True)]
        )
        np.testing.assert_allclose(lse, whole.dense()[1], atol=1e-5, rtol=0)
        merged = np.logaddexp(first[1].astype(np.float64), second[1])
        np.testing.assert_allclose(lse, merged, rtol=2**-20, atol=1e-6)
        outs, lses = sk.merge_states([first[0], second[0]], [first[1], second[1]])
        np.testing.assert_allclose(lses, lse, rtol=2**-20, atol=1e-6)
        np.testing.assert_allclose(outs, out, atol=2e-6)

    def test_includes_the_sink(self):
        paged = random_paged([40, 0], num_q_heads=2)
        sinks = np.array([1.5, -3.0], np.float32)
        out, lse = paged.decode(paged.plan(2), sinks=sinks)
        np.testing.assert_allclose(lse[0], np.logaddexp(paged.decode(paged.plan(2))[1][0], sinks), rtol=1e-6)
        assert not out[1].any()
        np.testing.assert_allclose(lse[1], sinks, rtol=1e-6)


LENGTHS = [70, 64, 1, 0, 33, 80]
VICTIM = 1
LIVE_PAGES = 4  # of the victim: 64 tokens of 16


def with_bad_row(kind):
    """The clean batch and the one whose row 1 is bad, of equal shapes."""
    paged = random_paged(LENGTHS, num_q_heads=4, num_kv_heads=2, dtype="bfloat16")
    lens, tables, q = paged.seq_lens.copy(), paged.block_tables.copy(), paged.q.copy()
    k, v = paged.k_pages.copy(), paged.v_pages.copy()
    what, _, value = kind.partition(":")
    if what == "len":
        lens[VICTIM] = int(value)
        tables[VICTIM, LIVE_PAGES:] = tables[-1, LIVE_PAGES:]  # whatever the length, the pages are good
    elif what.startswith("page"):
        tables[VICTIM, int(what[4:])] = int(value)
    else:
        name, head = what[0], int(what[1:])
        value = np.float32(value)
        page = tables[VICTIM, 2]
        if name == "q":
            q[VICTIM, head, 5] = value
        elif name == "k":
            k[page, 7, head, 5] = value
        elif name == "v":
            v[page, 7, head, 5] = value
    return paged, paged.replace(q=q, k_pages=k, v_pages=v, block_tables=tables, seq_lens=lens)


NUM_PAGES = random_paged(LENGTHS).k_pages.shape[0]
CAPACITY = 80
UNSERVED = [
    *(f"len:{n}" for n in (-1, -64, -(2**31), CAPACITY + 1, CAPACITY + 16, 10**6, 2**31 - 1)),
    *(f"page{i}:{page}" for i in range(LIVE_PAGES) for page in junk_entries(NUM_PAGES)),
]
NON_FINITE = [f"{name}{head}:{value}" for name in "qkv" for head in (0, 1) for value in ("nan", "inf", "-inf")]


class TestBadRows:
    plan = random_paged(LENGTHS, num_q_heads=4, num_kv_heads=2, dtype="bfloat16").plan(4)

    def check_the_others(self, got, expected):
        others = [row for row in range(len(LENGTHS)) if row != VICTIM]
        assert_same_bits([x[others] for x in got], [x[others] for x in expected])

    @pytest.mark.parametrize("kind", UNSERVED)
    @pytest.mark.parametrize("q_len", [None, 2], ids=["q1", "q2"])
    def test_what_cannot_be_served_is_nan_in_its_row_alone(self, kind, q_len):
        clean, bad = with_bad_row(kind)
        if q_len:
            clean, bad = (x.replace(q=np.stack([x.q] * q_len, axis=1)) for x in (clean, bad))
        expected = clean.decode(self.plan)
        got = bad.decode(self.plan)
        self.check_the_others(got, expected)
        if kind == f"len:{CAPACITY + 1}" and q_len:
            # The first of two queries sits at the last token that the table holds.
            assert np.isfinite(got[1][VICTIM, 0]).all()
            got = [x[:, 1] for x in got]
        assert np.isnan(got[0][VICTIM]).all()
        assert np.isnan(got[1][VICTIM]).all()
        # The call can be repeated, and the next one is fine.
        assert_same_bits(clean.decode(self.plan), expected)

    @pytest.mark.parametrize("kind", NON_FINITE)
    def test_non_finite_live_values_show_in_the_heads_that_read_them(self, kind):
        clean, bad = with_bad_row(kind)
        expected, got = clean.decode(self.plan), bad.decode(self.plan)
        self.check_the_others(got, expected)
        head = int(re.search(r"[0-9]", kind)[0])
        heads = [head] if kind[0] == "q" else [2 * head, 2 * head + 1]
        untouched = [h for h in range(4) if h not in heads]
        assert_same_bits([x[VICTIM, untouched] for x in got], [x[VICTIM, untouched] for x in expected])
        with np.errstate(invalid="ignore"):
            dense_out, dense_lse = bad.dense()
        # -inf logits weigh nothing, and are the only non-finite ones that leave anything finite behind.
        np.testing.assert_array_equal(np.isfinite(got[0][VICTIM]), np.isfinite(dense_out[VICTIM]))
        np.testing.assert_array_equal(np.isfinite(got[1][VICTIM]), np.isfinite(dense_lse[VICTIM]))
        if kind[0] in "kq" and "nan" in kind:
            assert np.isnan(got[0][VICTIM, heads]).all()
            assert np.isnan(got[1][VICTIM, heads]).all()

    def test_all_logits_minus_infinity_is_an_empty_row(self):
        paged = random_paged([40, 33, 20], num_q_heads=2)
        q, k = np.abs(paged.q), paged.k_pages.copy()
        k[paged.block_tables[1], :, :, 3] = -np.inf
        paged = paged.replace(q=q, k_pages=k)
        out, lse = paged.decode(paged.plan(3))
        assert (bits(out[1]) == 0).all()
        assert np.isneginf(lse[1]).all()
        assert np.isfinite(out).all()
        assert_close((out, lse), paged.dense())

    def test_finite_logits_of_any_size_are_not_taken_for_masked(self):
        paged = random_paged([40, 33, 20], num_q_heads=2)
        q, k = np.zeros_like(paged.q), paged.k_pages.copy()
        q[..., 0], k[..., 0] = 1.0, -3e38  # below every finite mask value in use
        paged = paged.replace(q=q, k_pages=np.where(np.isnan(k), np.nan, k))
        out, lse = paged.decode(paged.plan(3), sm_scale=0.5)
        assert np.isfinite(lse).all()
        mean = np.stack(
            [
                paged.v_pages[t].reshape(-1, 1, 64)[:n].mean(axis=0)
                for t, n in zip(paged.block_tables, paged.seq_lens, strict=True)
            ]
        )
        np.testing.assert_allclose(out, np.broadcast_to(mean, out.shape), atol=1e-5)

    def test_another_tenants_value_never_shows(self):
        """Row 0 holds a value that nobody else does; whatever row 1 asks for, it does not get it."""
        secret = 12345.0
        paged = random_paged([64, 64], num_q_heads=2, num_pages=12, dead=0.0)
        v = paged.v_pages.copy()
        v[paged.block_tables[0]] = secret
        paged = paged.replace(v_pages=v)
        plan = paged.plan(4)
        expected = paged.decode(plan)
        own = paged.block_tables[1]
        foreign = [x for x in range(-40, 60) if not 0 <= x < 12]
        rng = np.random.default_rng(5)
        for _ in range(300):
            tables, lens = paged.block_tables.copy(), paged.seq_lens.copy()
            tables[1] = np.where(rng.random(4) < 0.5, own, rng.choice([*foreign, *junk_entries(12)], 4))
            lens[1] = rng.choice([*range(65), -1, 65, 10**6, 2**31 - 1, -(2**31)])
            out, lse = paged.replace(block_tables=tables, seq_lens=lens).decode(plan)
            assert not (np.abs(out[1]) > 100).any()
            assert_same_bits((out[0], lse[0]), [x[0] for x in expected])
