"""The op on quantised pages: against dense attention over what they stand for, and the guarantee with scales."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support import QUANTISED, assert_close, assert_same_bits, junk_entries, random_paged

import splitk_jax as sk

KINDS = ("none", "tensor", "head", "token")
OPTIONS = {"window": 40, "softcap": 3.0, "sinks": np.linspace(-2, 2, 6).astype(np.float32)}
LENGTHS = [0, 1, 15, 17, 33, 64, 100, 150]


@dataclasses.dataclass(frozen=True)
class Quantised:
    """Pages of a quantised dtype and the scales of their K and V, all dead slots and scales of them filled."""

    paged: object
    k_scale: object
    v_scale: object

    @property
    def scales(self):
        return {"k_scale": self.k_scale, "v_scale": self.v_scale}

    def plan(self, splits=4, **policy):
        return self.paged.plan(splits, **policy)

    def decode(self, plan=None, **options):
        return self.paged.decode(plan or self.plan(), **self.scales, **options)

    def dense(self, **options):
        return self.paged.dense(**self.scales, **options)


def quantise(paged, dtype, k_kind, v_kind, *, dead=None, dead_scale=np.nan, seed=5):
    """Pages of random floats as `dtype`: what was NaN becomes `dead`, by default the worst that the dtype has."""
    rng = np.random.default_rng(seed)
    heads = paged.k_pages.shape[2]
    if dead is None:
        dead = 127 if dtype == "int8" else np.nan

    def quantised(pages, kind):
        pages = pages.astype(np.float32)
        unused = np.isnan(pages).any(axis=-1)
        unit = np.float32(1 / 32 if dtype == "int8" else 1)
        if kind == "none":
            scale = None
        elif kind == "tensor":
            scale = unit * np.float32(0.37)
        elif kind == "head":
            scale = unit * rng.uniform(0.2, 2, heads).astype(np.float32)
        else:
            scale = unit * rng.uniform(0.2, 2, unused.shape).astype(np.float32)
        stored = pages if scale is None else pages / scale[..., None]
        stored = np.where(unused[..., None], dead, np.rint(stored) if dtype == "int8" else stored)
        if kind == "token":
            scale = np.where(unused, np.float32(dead_scale), scale)
        return stored.astype(dtype), scale

    (k_pages, k_scale), (v_pages, v_scale) = quantised(paged.k_pages, k_kind), quantised(paged.v_pages, v_kind)
    return Quantised(paged.replace(k_pages=k_pages, v_pages=v_pages), k_scale, v_scale)


def quantised(lengths=LENGTHS, dtype="float8_e4m3fn", k_kind="token", v_kind="token", *, dead=None, **layout):
    layout = {"num_q_heads": 6, "num_kv_heads": 2, "head_dim": 80, "head_dim_v": 48} | layout
    return quantise(random_paged(lengths, **layout), dtype, k_kind, v_kind, dead=dead)


@pytest.mark.parametrize("dtype", QUANTISED)
class TestAgainstDense:
    @pytest.mark.parametrize("kind", KINDS)
    def test_plain(self, dtype, kind):
        case = quantised(dtype=dtype, k_kind=kind, v_kind=KINDS[(KINDS.index(kind) + 1) % 4])
        assert_close(case.decode(), case.dense())

    @pytest.mark.parametrize("kind", KINDS)
    def test_window_softcap_sinks_and_three_queries(self, dtype, kind):
        v_kind = KINDS[(KINDS.index(kind) + 2) % 4]
        case = quantised(dtype=dtype, k_kind=kind, v_kind=v_kind, q_len=3, page_size=5)
        assert_close(case.decode(case.plan("fixed_size", split_size=32), **OPTIONS), case.dense(**OPTIONS))

    @pytest.mark.parametrize("q_dtype", ["bfloat16", "float16"])
    def test_queries_of_16_bits(self, dtype, q_dtype):
        case = quantised(dtype=dtype)
        case = dataclasses.replace(case, paged=case.paged.replace(q=case.paged.q.astype(q_dtype)))
        assert_close(case.decode(), case.dense())


def test_more_splits_do_not_lose_accuracy():
    """B17: scales are applied once, in float32, before partials are merged."""
    case = quantised([2048] * 2, page_size=64)
    dense, _ = case.dense()
    errors = {}
    for splits in (1, 4, 64):
        plan = case.plan(splits, min_kv_per_split=16)
        assert sum(b > a for a, b in plan.split_bounds(2048)) == splits
        errors[splits] = np.sqrt(np.mean((case.decode(plan)[0] - dense) ** 2))
    assert max(errors.values()) <= 1.25 * errors[1], errors


class TestEveryStoredValue:
    @pytest.mark.parametrize("dtype", QUANTISED)
    def test_reads_as_it_is(self, dtype):
        """All 256 of them, one a token and sequence: out is V, K times the scale is the logit."""
        values = np.arange(256, dtype=np.uint8).view(dtype).reshape(256, 1, 1, 1)
        tables, lens = np.arange(256, dtype=np.int32)[:, None], np.ones(256, np.int32)
        paged = random_paged([1], num_q_heads=1, head_dim=1, page_size=1)
        paged = paged.replace(
            q=np.ones((256, 1, 1), np.float32),
            k_pages=values,
            v_pages=values,
            block_tables=tables,
            seq_lens=lens,
        )
        plan = paged.plan(1, max_decode_seqs=256)
        out, lse = paged.decode(plan, k_scale=0.5, v_scale=4.0)
        exact = values.astype(np.float32)[:, 0, 0]
        finite = np.isfinite(exact)
        np.testing.assert_array_equal(out[:, 0][finite], 4 * exact[finite])
        np.testing.assert_allclose(lse[finite], 0.5 * exact[finite], rtol=1e-6)
        # As a key -inf weighs nothing.
        assert not np.isfinite(out[:, 0][~finite & (exact != -np.inf)]).any()


@pytest.mark.parametrize("dtype", QUANTISED)
class TestGuarantee:
    """Bits of a row depend on its own query, live values, their scales and length alone."""

    @staticmethod
    def alone(case, row, *, first_page=0, num_pages=50, width=14):
        """Row `row` by itself, in the pages of another pool; what nobody owns is 0 and its scales NaN."""
        paged, page_size = case.paged, case.paged.k_pages.shape[1]
        used = paged.block_tables[row, : -(-int(paged.seq_lens[row]) // page_size)]
        places = first_page + np.arange(len(used))[::-1]
        table = np.full((1, width), -1, np.int32)
        table[0, : len(used)] = places

        def moved(x, fill):
            if np.ndim(x) < 3:
                return x
            out = np.full((num_pages, *x.shape[1:]), fill, x.dtype)
            out[places] = x[used]
            return out

        return Quantised(
            paged.replace(
                q=paged.q[[row]],
                k_pages=moved(paged.k_pages, 0),
                v_pages=moved(paged.v_pages, 0),
                block_tables=table,
                seq_lens=paged.seq_lens[[row]],
            ),
            moved(case.k_scale, np.nan),
            moved(case.v_scale, np.nan),
        )

    def test_rows_alone(self, dtype):
        forms = {
            "float8_e4m3fn": ("token", "token", "float32"),
            "float8_e5m2": ("tensor", "head", "bfloat16"),
            "int8": ("head", "token", "bfloat16"),
        }
        k_kind, v_kind, q_dtype = forms[dtype]
        case = quantised(dtype=dtype, k_kind=k_kind, v_kind=v_kind)
        case = dataclasses.replace(case, paged=case.paged.replace(q=case.paged.q.astype(q_dtype)))
        plan = case.plan()
        assert sum(sum(b > a for a, b in plan.split_bounds(n)) > 1 for n in LENGTHS) >= 5
        whole = case.decode(plan)
        for row in range(len(LENGTHS)):
            one = self.alone(case, row, first_page=3 * row)
            assert_same_bits(one.decode(plan), [x[[row]] for x in whole])
        one = self.alone(case, 7, num_pages=3000, width=100)
        assert_same_bits(one.decode(plan), [x[[7]] for x in whole])

    def test_queries_alone_at_their_positions(self, dtype):
        case = quantised(dtype=dtype, q_len=3)
        plan = case.plan()
        options = OPTIONS | {"window": None}
        whole = case.decode(plan, **options)
        for t, paged in case.paged.query_tokens():
            one = dataclasses.replace(case, paged=paged)
            assert_same_bits(one.decode(plan, **options), [x[:, t] for x in whole])

    @pytest.mark.parametrize("window", [None, 40])
    def test_dead_values_and_scales_reach_nothing(self, dtype, window):
        """B01: beyond the length, before the window, in pages that nobody owns."""
        clean = random_paged(LENGTHS, num_q_heads=6, num_kv_heads=2, window=window, num_pages=60)
        plan = None
        results = []
        for dead, scale in ((0, 1.0), (None, np.nan), (None, np.inf), (None, -np.inf)):
            case = quantise(clean, dtype, "token", "token", dead=dead, dead_scale=scale)
            assert (~np.isfinite(case.k_scale)).any() == (dead is None)
            plan = plan or case.plan()
            results.append(case.decode(plan, window=window))
        assert np.isfinite(results[0][0]).all()
        for other in results[1:]:
            assert_same_bits(other, results[0])

    @pytest.mark.parametrize("name", ["k_scale", "v_scale"])
    def test_a_live_scale_of_nan_shows_in_the_heads_that_read_it(self, dtype, name):
        case = quantised(dtype=dtype)
        plan = case.plan()
        expected = case.decode(plan)
        row, scale = 5, getattr(case, name).copy()
        scale[case.paged.block_tables[row, 1], 3, 1] = np.nan
        out, lse = (x.copy() for x in dataclasses.replace(case, **{name: scale}).decode(plan))
        assert np.isnan(out[row, 3:]).all()
        assert np.isnan(lse[row, 3:]).all() == (name == "k_scale")
        out[row, 3:], lse[row, 3:] = expected[0][row, 3:], expected[1][row, 3:]
        assert_same_bits((out, lse), expected)

    def test_a_bad_page_poisons_its_row_alone(self, dtype):
        case = quantised(dtype=dtype, dead=0)
        plan = case.plan()
        expected = case.decode(plan)
        for page in junk_entries(len(case.paged.k_pages)):
            tables = case.paged.block_tables.copy()
            tables[5, 2] = page
            out, lse = dataclasses.replace(case, paged=case.paged.replace(block_tables=tables)).decode(plan)
            assert np.isnan(out[5]).all()
            assert np.isnan(lse[5]).all()
            others = [row for row in range(len(LENGTHS)) if row != 5]
            assert_same_bits((out[others], lse[others]), [x[others] for x in expected])

    def test_jit_eager_constants_and_vmap(self, dtype):
        kinds = {"float8_e4m3fn": ("tensor", "head"), "float8_e5m2": ("token", "tensor"), "int8": ("token", "token")}
        case = quantised([17, 0, 100], dtype, *kinds[dtype])
        plan = case.plan()
        expected = case.decode(plan)
        arrays, scales = [jnp.asarray(x) for x in case.paged.arrays], jax.tree.map(jnp.asarray, case.scales)
        op = functools.partial(sk.paged_decode_attention, plan=plan, return_lse=True)
        assert_same_bits(jax.jit(lambda arrays, scales: op(*arrays, **scales))(arrays, scales), expected)
        assert_same_bits(jax.jit(lambda: op(*arrays, **scales))(), expected)
        # Two layers, the second with scales of twice the size.
        twice = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), scales)
        vmapped = jax.vmap(lambda scales: op(*arrays, **scales))(twice)
        assert_same_bits([x[0] for x in vmapped], expected)
        assert_same_bits([x[1] for x in vmapped], op(*arrays, **jax.tree.map(lambda x: 2 * x, scales)))

    @pytest.mark.parametrize("kind", ["tensor", "token"])
    def test_no_pool_sized_temporary(self, dtype, kind):
        """Neither a pool in a wider dtype nor one that is dequantised."""
        pool = jax.ShapeDtypeStruct((4096, 16, 2, 64), dtype)
        scale = {
            "tensor": jax.ShapeDtypeStruct((), jnp.float32),
            "token": jax.ShapeDtypeStruct(pool.shape[:3], jnp.float32),
        }[kind]
        plan = quantised([1], dtype, head_dim=64, head_dim_v=64).plan()
        q = jax.ShapeDtypeStruct((3, 6, 64), jnp.float32)
        integers = jax.ShapeDtypeStruct((3, 8), jnp.int32), jax.ShapeDtypeStruct((3,), jnp.int32)
        call = jax.jit(functools.partial(sk.paged_decode_attention, plan=plan))
        compiled = call.lower(q, pool, pool, *integers, k_scale=scale, v_scale=scale).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 2**20 < pool.size / 4


def test_one_trace_for_every_value_of_the_scales():
    case = quantised([17, 40], k_kind="tensor", v_kind="head")
    plan, traced = case.plan(), []

    @jax.jit
    def call(arrays, scales):
        traced.append(1)
        return sk.paged_decode_attention(*arrays, **scales, plan=plan)

    call(case.paged.arrays, jax.tree.map(jnp.asarray, case.scales))
    call(case.paged.arrays, jax.tree.map(lambda x: jnp.asarray(x) * 3, case.scales))
    assert len(traced) == 1


def test_the_cases_cover_the_range_of_each_dtype():
    """The oracle itself: stored values are many, of both signs, none rounded to 0 for want of range."""
    for dtype in QUANTISED:
        case = quantised(dtype=dtype, k_kind="head", v_kind="tensor", dead=0)
        for pages in (case.paged.k_pages, case.paged.v_pages):
            assert pages.dtype == np.dtype(getattr(ml_dtypes, dtype, dtype))
            assert len(np.unique(pages.view(np.uint8))) > 80


def test_inspect_finds_the_call_with_its_dtype():
    case = quantised([17, 40], dtype="float8_e5m2")
    plan = case.plan()
    arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), (case.paged.arrays, case.scales))
    (call,) = sk.inspect(lambda arrays, scales: sk.paged_decode_attention(*arrays, **scales, plan=plan), *arrays)
    assert call.plan == plan
    assert call.plan.kv_dtype == "float8_e5m2"
    assert [name for name, _ in call.kernels] == [
        f"splitk_reference_split_s4_t{plan.step_kv}",
        "splitk_reference_combine_s4",
    ]
    lowered = jax.jit(functools.partial(sk.paged_decode_attention, plan=plan)).lower(*arrays[0], **arrays[1])
    assert [call.fingerprint for call in sk.inspect(lowered)] == [plan.fingerprint()]
