"""Public bug reports about splits, masks and arithmetic, as small cases. The ids are those of README.md."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from support import (
    FINE,
    POISON,
    QUANTISED,
    SPLITS,
    assert_close,
    assert_ramp,
    assert_same_bits,
    bits,
    make_paged,
    make_plan,
    ramp_paged,
    random_paged,
)

import splitk_jax as sk
from splitk_jax.kernels.reference.split import split

FIXED_SIZE = {"split_size": 16}


def two_tokens(dots, v, **layout):
    """One query whose raw dot products with the tokens are `dots`."""
    q = np.zeros((1, 1, 64))
    q[..., 0] = 1.0
    k = np.zeros((len(dots), 1, 64))
    k[:, 0, 0] = dots
    return make_paged(q, [k], [np.broadcast_to(np.reshape(v, (-1, 1, 1)), k.shape)], **layout)


# B06: more splits than there is work.


@functools.cache
def b06():
    return random_paged([1, 2, 3, 5, 16, 17], width=8, num_pages=48)


@pytest.mark.parametrize("splits", [1, 2, 8, 16, 32])
def test_b06_more_splits_than_work(splits):
    case = b06()
    plan = case.plan(splits, **FINE)
    # Full rows first: scratch that is used again is not clean.
    random_paged([128] * 6, width=8, num_pages=48, seed=1).decode(plan)
    got = case.decode(plan)
    assert_close(got, case.dense())
    np.testing.assert_allclose(got[0], case.decode(case.plan(1, **FINE))[0], rtol=0, atol=1e-6)
    first = case.v_pages[case.block_tables[0, 0], 0]
    np.testing.assert_array_equal(got[0][0], np.broadcast_to(first, (2, 64)))


@pytest.mark.parametrize("splits", [8, 32])
def test_b06_idle_splits_are_empty(splits):
    case = b06()
    plan = case.plan(splits, **FINE)
    arrays = map(jnp.asarray, (case.q[:, None], *case.arrays[1:]))
    partials = split(*arrays, jnp.float32(0.125), None, plan=plan, window=None, softcap=None)
    for row, seq_len in enumerate(case.seq_lens):
        for s, (low, high) in enumerate(plan.split_bounds(int(seq_len))):
            at = (row, 0, s)
            assert np.isfinite(partials.m[at]).all() == (low < high)
            if low == high:
                np.testing.assert_array_equal(partials.m[at], -np.inf)
                np.testing.assert_array_equal(bits(partials.l[at]), 0)
                np.testing.assert_array_equal(bits(partials.o[at]), 0)


# B09: table widths that are no multiple of anything.


@pytest.mark.parametrize("splits", [2, 3, 4, 5, 8, "fixed_size"])
def test_b09_table_of_seven_pages(splits):
    case = ramp_paged([112, 97, 96], width=7)
    plan = case.plan(splits, **(FIXED_SIZE if splits == "fixed_size" else {}))
    assert plan.num_splits == (7 if splits == "fixed_size" else splits)
    assert_ramp(case.decode(plan), [55.5, 48.0, 47.5], [112, 97, 96])


@pytest.mark.parametrize("step_kv", [16, 48])
def test_b09_any_step(step_kv):
    case = ramp_paged([112, 97, 96], width=7)
    assert_ramp(case.decode(case.plan(3, block_kv=16, step_kv=step_kv)), [55.5, 48.0, 47.5], [112, 97, 96])


@pytest.mark.parametrize("splits", [1, 3])
def test_b09_table_of_one_page(splits):
    case = ramp_paged([16, 1, 15])
    assert case.block_tables.shape[1] == 1
    assert_ramp(case.decode(case.plan(splits)), [7.5, 0.0, 7.0], [16, 1, 15])


@pytest.mark.parametrize(
    ("width", "num_pages"), [(4096, 21), (7, 20), (7, 100)], ids=["wide", "fewer-pages-than-entries", "many-pages"]
)
def test_b09_tables_and_pools_of_any_size(width, num_pages):
    case = ramp_paged([112, 97, 96], width=width, num_pages=num_pages)
    assert_ramp(case.decode(case.plan(3)), [55.5, 48.0, 47.5], [112, 97, 96])


# B10: sizes that are not powers of two.


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "group", "splits", "page_size"),
    [
        (64, 64, 1, 3, 24),
        (72, 72, 3, 5, 48),
        (80, 80, 5, 6, 24),
        (96, 96, 6, 43, 48),
        (112, 112, 7, 200, 24),
        (120, 120, 12, 3, 48),
        (128, 128, 5, 43, 24),
        (192, 192, 3, 5, 48),
        (256, 256, 7, 6, 24),
        (192, 128, 12, 200, 48),
        (576, 512, 5, 3, 24),
    ],
)
def test_b10_sizes_that_are_no_powers_of_two(head_dim, head_dim_v, group, splits, page_size):
    shape = {"head_dim": head_dim, "head_dim_v": head_dim_v, "num_kv_heads": 3, "num_q_heads": 3 * group}
    case = random_paged([200, 1, 97], **shape, page_size=page_size, width=9)
    # The neighbouring head is NaN: a lane past the end of head 0 or before the start of head 2 would show.
    k_pages, v_pages = case.k_pages.copy(), case.v_pages.copy()
    k_pages[:, :, 1] = v_pages[:, :, 1] = np.nan
    case = case.replace(k_pages=k_pages, v_pages=v_pages)
    plan = case.plan(splits, block_kv=1, step_kv=64, min_kv_per_split=1)
    assert plan.num_splits == splits
    out, lse = case.decode(plan)
    assert np.isnan(out[:, group : 2 * group]).all()
    assert np.isfinite(out[:, :group]).all()
    assert np.isfinite(out[:, 2 * group :]).all()
    assert_close((out, lse), case.dense())


# B13: the window is one token out.

B13 = {"page_size": 4, "width": 4, "first_page": 1, "num_pages": 5}


@pytest.mark.parametrize("dead", POISON)
@pytest.mark.parametrize("splits", SPLITS)
def test_b13_window_counts_the_current_token(splits, dead):
    # Whatever is before the window is dead too: its slots are poison, and its pages have no entry.
    case = ramp_paged([10], **B13, window=4, dead=dead)
    assert case.block_tables[0, 0] == -1
    assert_ramp(case.decode(case.plan(splits, **FINE), window=4), [7.5], [4])


@pytest.mark.parametrize(
    ("window", "mean"), [(1, 9.0), (5, 7.0), (6, 6.5), (7, 6.0), (10, 4.5), (11, 4.5), (1000, 4.5)]
)
def test_b13_window_of_any_size(window, mean):
    """Of 10 tokens on pages of 4, a window of 6 starts on a page edge, 7 before it and 5 after it."""
    case = ramp_paged([10], **B13, window=window)
    assert_ramp(case.decode(case.plan(3, **FINE), window=window), [mean], [min(window, 10)])


@pytest.mark.parametrize("window", [16, 33])
def test_b13_window_under_fixed_size(window):
    """Edges stay at absolute multiples of the split size, so the window empties the first splits."""
    case = ramp_paged([100, 20, 0, 7], width=8, num_pages=16, window=window)
    expected = [(n - 1 + max(n - window, 0)) / 2 if n else 0.0 for n in case.seq_lens.tolist()]
    plan = case.plan("fixed_size", **FIXED_SIZE)
    assert plan.split_bounds(100, window=window)[:4] == [(0, 0)] * 4
    assert_ramp(case.decode(plan, window=window), expected, np.minimum(case.seq_lens, window))


@pytest.mark.parametrize("window", [0, -1])
def test_b13_window_of_no_tokens_is_refused(window):
    case = ramp_paged([10], **B13)
    with pytest.raises(ValueError, match=f"window={window} is out of range"):
        case.decode(case.plan(1), window=window)


# B14: the sink enters the sum once per split.

LN4, LN12 = np.log([4.0, 12.0])
SINKS = np.array([LN4, LN12], np.float32)


def ones_paged(seq_lens, *, zero_q=True, **layout):
    """v is 1: out is 1 whatever the weights are. With `zero_q`, every token weighs the same."""
    case = random_paged(seq_lens, **layout)
    ones = np.where(np.isfinite(case.v_pages.astype(np.float32)), 1.0, np.nan).astype(case.v_pages.dtype)
    return case.replace(q=np.zeros_like(case.q) if zero_q else case.q, v_pages=ones)


def assert_sink(got, weights, lse):
    np.testing.assert_allclose(got[0], np.broadcast_to(np.array(weights)[..., None], got[0].shape), atol=1e-6)
    np.testing.assert_allclose(got[1], np.broadcast_to(lse, got[1].shape), atol=2e-6)


@pytest.mark.parametrize("splits", SPLITS)
def test_b14_sink_counts_once(splits):
    # The second row has no token: the sink alone.
    case = ones_paged([4, 0], page_size=1, width=4)
    plan = case.plan(splits, **FINE)
    assert sum(high > low for low, high in plan.split_bounds(4)) == (2 if splits == 3 else min(splits, 4))
    got = case.decode(plan, sinks=SINKS)
    assert_sink(got, [[0.5, 0.25], [0.0, 0.0]], [[np.log(8), np.log(16)], SINKS])
    np.testing.assert_array_equal(bits(got[0][1]), 0)


@pytest.mark.parametrize("splits", [2, "fixed_size"])
def test_b14_sink_with_a_window_that_empties_the_first_splits(splits):
    tile = FINE | ({"split_size": 1} if splits == "fixed_size" else {})
    case = ones_paged([9, 4], page_size=1, width=9, window=4)
    got = case.decode(case.plan(splits, **tile), sinks=SINKS, window=4)
    assert_sink(got, [0.5, 0.25], [np.log(8), np.log(16)])


def test_b14_sink_is_neither_scaled_nor_capped():
    case = ones_paged([4, 0], page_size=1, width=4)
    got = case.decode(case.plan(4, **FINE), sinks=SINKS, softcap=0.5, sm_scale=3.0)
    assert_sink(got, [[0.5, 0.25], [0.0, 0.0]], [[np.log(8), np.log(16)], SINKS])


def test_b14_sink_of_minus_infinity_is_none():
    case = ones_paged([4, 0], page_size=1, width=4)
    plan = case.plan(4, **FINE)
    got = case.decode(plan, sinks=np.full(2, -np.inf, np.float32))
    assert_sink(got, [[1.0, 1.0], [0.0, 0.0]], [[np.log(4)] * 2, [-np.inf] * 2])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_b14_sinks_of_each_head(dtype):
    case = random_paged([100, 17, 1], num_q_heads=6, num_kv_heads=2, dtype=dtype)
    sinks = np.linspace(-3, 3, 6).astype(np.float32)
    options = {"sinks": sinks, "window": 40}
    assert_close(case.decode(case.plan(3), **options), case.dense(**options))


@pytest.mark.parametrize("dtype", QUANTISED)
def test_b14_sink_of_a_quantised_cache(dtype):
    """The sink is a logit: no scale is its."""
    case = ones_paged([4, 0], page_size=1, width=4, dead=0.0)
    case = case.replace(k_pages=case.k_pages.astype(dtype), v_pages=(2 * case.v_pages).astype(dtype))
    got = case.decode(case.plan(4, **FINE), sinks=SINKS, k_scale=7.0, v_scale=0.5)
    assert_sink(got, [[0.5, 0.25], [0.0, 0.0]], [[np.log(8), np.log(16)], SINKS])


# B16: softcap: overflow, order, and capping after the mask.


@pytest.mark.parametrize("splits", [1, 2])
def test_b16_softcap_of_large_logits(splits):
    case = two_tokens([80000.0, -80000.0], [1.0, 0.0], page_size=1)
    out, lse = case.decode(case.plan(splits, **FINE), softcap=50.0)
    np.testing.assert_array_equal(out, 1.0)
    np.testing.assert_allclose(lse, 50.0, rtol=1e-6)
    # Of the negative one alone.
    case = two_tokens([-80000.0], [0.5], page_size=1, width=2, num_pages=3)
    out, lse = case.decode(case.plan(splits, **FINE), softcap=50.0)
    np.testing.assert_allclose(out, 0.5, rtol=1e-6)
    np.testing.assert_allclose(lse, -50.0, rtol=1e-6)


@pytest.mark.parametrize("splits", [1, 2])
def test_b16_large_logits_without_a_cap(splits):
    case = two_tokens([80000.0, -80000.0], [1.0, 0.0], page_size=1)
    out, lse = case.decode(case.plan(splits, **FINE))
    np.testing.assert_array_equal(out, 1.0)
    np.testing.assert_allclose(lse, 10000.0, rtol=1e-6)


@pytest.mark.parametrize(("softcap", "expected"), [(5.0, 0.991999), (None, 0.999955), (0, 0.999955), (0.0, 0.999955)])
@pytest.mark.parametrize("splits", [1, 2])
def test_b16_softcap_comes_after_the_scale(softcap, expected, splits):
    case = two_tokens([80.0, 0.0], [1.0, 0.0], page_size=1)
    got = case.decode(case.plan(splits, **FINE), softcap=softcap)
    np.testing.assert_allclose(got[0], expected, atol=1e-6)
    assert_close(got, case.dense(softcap=softcap))


@pytest.mark.parametrize("splits", [1, 4])
def test_b16_softcap_comes_before_the_mask(splits):
    case = ones_paged([1], width=1, num_pages=1, dead=0.0)
    v_pages = np.zeros_like(case.v_pages)
    v_pages[0, 0] = 1.0
    case = case.replace(k_pages=np.zeros_like(case.k_pages), v_pages=v_pages)
    out, lse = case.decode(case.plan(splits, block_kv=16, step_kv=16), softcap=5.0)
    np.testing.assert_array_equal(out, 1.0)
    np.testing.assert_array_equal(lse, 0.0)


@pytest.mark.parametrize("softcap", [-1.0, -0.5, np.nan, np.inf, -np.inf])
def test_b16_softcap_that_is_no_cap_is_refused(softcap):
    case = two_tokens([80.0, 0.0], [1.0, 0.0], page_size=1)
    with pytest.raises(ValueError, match=r"softcap=.* must be finite and above 0"):
        case.decode(case.plan(1), softcap=softcap)


# B17: partials in the dtype of the query.

B17 = {"num_q_heads": 2, "num_kv_heads": 1, "dtype": "bfloat16", "num_pages": 512}


@functools.cache
def b17():
    return random_paged([8192], **B17)


@pytest.mark.parametrize("splits", SPLITS)
def test_b17_partials_keep_their_precision(splits):
    case = b17()
    plan = case.plan(splits)
    ones = case.replace(v_pages=np.ones_like(case.v_pages))
    out, _ = ones.decode(plan)
    assert np.abs(out.astype(np.float64) - 1.0).max() <= 2**-7  # one ulp

    # +1 and -1 by split, so that the partials cancel.
    v = np.zeros((8192, 1, 64), np.float32)
    for s, (low, high) in enumerate(plan.split_bounds(8192)):
        v[low:high] = 1 - 2 * (s % 2)
    v_pages = np.zeros_like(case.v_pages)
    v_pages[case.block_tables[0]] = v.reshape(512, 16, 1, 64).astype(case.v_pages.dtype)
    case = case.replace(v_pages=v_pages)
    out, lse = case.decode(plan)
    dense_out, dense_lse = case.dense()
    assert np.abs(out.astype(np.float64) - dense_out).max() <= 4e-3
    np.testing.assert_allclose(lse, dense_lse, atol=2e-5)


# B18: head counts of every kind.


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads"),
    [(6, 1), (7, 1), (12, 12), (24, 2), (25, 5), (28, 4), (40, 2), (48, 2), (64, 4), (71, 1), (80, 4), (128, 1)],
)
def test_b18_query_heads_use_their_kv_head(num_q_heads, num_kv_heads, splits):
    rng = np.random.default_rng(0)
    k = [rng.standard_normal((n, num_kv_heads, 64)) for n in (70, 3)]
    v = [np.broadcast_to(np.arange(1, num_kv_heads + 1)[:, None], x.shape) for x in k]
    case = make_paged(rng.standard_normal((2, num_q_heads, 64)), k, v, page_size=16, dtype="bfloat16")
    out, lse = case.decode(case.plan(splits))
    head = np.arange(num_q_heads) // (num_q_heads // num_kv_heads) + 1
    np.testing.assert_array_equal(out.astype(np.float32), np.broadcast_to(head[:, None], out.shape))
    np.testing.assert_allclose(lse, case.dense()[1], atol=2e-5)


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(33, 2), (3, 2), (2, 4)])
def test_b18_heads_that_do_not_divide_are_refused(num_q_heads, num_kv_heads):
    with pytest.raises(
        ValueError, match=f"num_q_heads={num_q_heads} must be a multiple of num_kv_heads={num_kv_heads}"
    ):
        make_plan(num_q_heads=num_q_heads, num_kv_heads=num_kv_heads)


def test_b18_pages_of_another_head_count_are_refused():
    case = random_paged([5], num_q_heads=4, num_kv_heads=2)
    plan = case.plan(1)
    with pytest.raises(ValueError, match=r"k_pages.shape\[2\]=4 must be 2"):
        random_paged([5], num_q_heads=4, num_kv_heads=4).decode(plan)


# B19: scales of a quantised cache.

FORMS = ("float", "array", "heads", "slots")


def stored(k, v, dtype, *, q=1.0, heads=(2, 2)):
    """One sequence of two tokens, a page each, whose stored keys and values are the numbers given, in every lane."""
    shape = (1, heads[1], 64)
    case = make_paged(
        np.full((1, heads[0], 64), q),
        [np.concatenate([np.full(shape, x) for x in k])],
        [np.concatenate([np.full(shape, x) for x in v])],
        page_size=1,
        dead=0.0,
    )
    return case.replace(k_pages=case.k_pages.astype(dtype), v_pages=case.v_pages.astype(dtype))


def scale_form(scale, form, pages):
    shapes = {"array": (), "heads": pages.shape[2:3], "slots": pages.shape[:3]}
    return scale if form == "float" else np.full(shapes[form], scale, np.float32)


@pytest.mark.parametrize(("dtype", "form"), [*zip((*QUANTISED, QUANTISED[0]), FORMS, strict=True)])
def test_b19_the_scale_of_keys(dtype, form):
    """0.999665 where it is ignored, 0.622459 where it is applied twice."""
    case = stored([1, 0], [1, 0], dtype)
    for splits in (1, 2):
        out, lse = case.decode(case.plan(splits, **FINE), k_scale=scale_form(0.25, form, case.k_pages))
        np.testing.assert_allclose(out, 1 / (1 + np.exp(-2)), rtol=1e-6)
        np.testing.assert_allclose(lse, np.log(1 + np.exp(2)), rtol=1e-6)


@pytest.mark.parametrize(("dtype", "form"), [*zip((QUANTISED[-1], *QUANTISED), FORMS, strict=True)])
def test_b19_the_scale_of_values(dtype, form):
    """2.0 where it is ignored, 0.5 where it is applied twice, and with the split count where it is in the merge."""
    case = stored([1, 0], [2, 2], dtype, q=0.0)
    for splits in (1, 2):
        out, lse = case.decode(case.plan(splits, **FINE), v_scale=scale_form(0.5, form, case.v_pages))
        np.testing.assert_allclose(out, 1.0, rtol=1e-6)
        np.testing.assert_allclose(lse, np.log(2), rtol=1e-6)


@pytest.mark.parametrize("form", ["heads", "slots"])
def test_b19_a_scale_of_each_head(form):
    case = stored([0, 0], [4, 4], "float8_e4m3fn", heads=(6, 3))
    scale = (np.arange(3, dtype=np.float32) + 1) / 4
    scale = np.broadcast_to(scale, case.v_pages.shape[:3]).copy() if form == "slots" else scale
    out, _ = case.decode(case.plan(2, **FINE), v_scale=scale)
    np.testing.assert_allclose(out, np.broadcast_to([[[1.0], [1], [2], [2], [3], [3]]], out.shape), rtol=1e-6)


def test_b19_a_scale_of_each_token():
    """Each token's own, wherever its page lies: the mean of 4 * 0.25 and 4 * 0.75."""
    case = stored([0, 0], [4, 4], "int8")
    scale = np.full(case.v_pages.shape[:3], np.nan, np.float32)
    scale[case.block_tables[0], 0] = [[0.25, 0.5], [0.75, 1.0]]
    out, _ = case.decode(case.plan(2, **FINE), v_scale=scale)
    np.testing.assert_allclose(out[0, :, 0], [2.0, 3.0], rtol=1e-6)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_b19_other_shapes_and_unquantised_caches_are_refused(name):
    case = stored([1, 0], [1, 0], "float8_e5m2")
    for shape in ((1,), (3,), (1, 2), (3, 1), (*case.k_pages.shape[:3], 1)):
        with pytest.raises(ValueError, match=f"{name} must be a number, .* got shape"):
            case.decode(case.plan(1), **{name: np.ones(shape, np.float32)})
    for dtype in ("float32", "bfloat16"):
        other = random_paged([5], num_q_heads=2, num_kv_heads=2, dtype=dtype)
        for scale in (0.25, np.ones(2, np.float32)):
            with pytest.raises(ValueError, match=f"{name} is for quantised pages .* got pages of {dtype}"):
                other.decode(other.plan(1), **{name: scale})


@pytest.mark.parametrize("scale", [0.37, "per_token"])
@pytest.mark.parametrize("dtype", QUANTISED)
def test_b19_written_and_read_by_the_library(dtype, scale):
    case = random_paged([40, 17], num_q_heads=4, num_kv_heads=2, dead=0.0)
    scale = 0.04 if (dtype, scale) == ("int8", 0.37) else scale
    pages = sk.KVPages.init(
        num_pages=len(case.k_pages),
        page_size=16,
        num_kv_heads=2,
        head_dim=64,
        dtype=dtype,
        k_scale=scale,
        v_scale=scale,
    )
    slots = np.arange(case.k_pages.shape[0] * 16, dtype=np.int32)
    pages = pages.write(*(x.reshape(-1, 2, 64) for x in (case.k_pages, case.v_pages)), slots)
    quantised = case.replace(k_pages=np.asarray(pages.k_pages), v_pages=np.asarray(pages.v_pages))
    scales = {"k_scale": pages.k_scale, "v_scale": pages.v_scale}
    out, lse = quantised.decode(quantised.plan(3), **scales)
    assert_close((out, lse), quantised.dense(**scales))
    # And what was written is what was meant: a step of the dtype, in logits and values of order 1.
    step = {"int8": 0.04, "float8_e4m3fn": 0.06, "float8_e5m2": 0.12}[dtype]
    np.testing.assert_allclose(out, case.dense()[0], atol=2 * step)
    np.testing.assert_allclose(lse, case.dense()[1], atol=2 * step)


# B20: several query tokens of each sequence.


@pytest.mark.parametrize("splits", SPLITS)
def test_b20_queries_attend_up_to_themselves(splits):
    # The second row has fewer tokens than queries.
    case = ramp_paged([10, 2], q_len=3, page_size=4)
    got = case.decode(case.plan(splits, **FINE))
    assert_ramp(got, [[3.5, 4.0, 4.5], [0.0, 0.0, 0.5]], [[8, 9, 10], [0, 1, 2]])
    np.testing.assert_array_equal(bits(got[0][1, 0]), 0)
    np.testing.assert_array_equal(got[1][1, 0], -np.inf)


@pytest.mark.parametrize("dead", POISON)
@pytest.mark.parametrize("splits", [1, 4])
def test_b20_window_with_several_queries(splits, dead):
    # The first query sees back to token 1.
    case = ramp_paged([10], q_len=6, page_size=4, first_page=1, window=9, dead=dead)
    got = case.decode(case.plan(splits, **FINE), window=4)
    assert_ramp(got, [[2.5, 3.5, 4.5, 5.5, 6.5, 7.5]], [[4] * 6])


@pytest.mark.parametrize(
    ("q_len", "options"),
    [pytest.param(n, {}, id=str(n)) for n in range(1, 9)]
    + [pytest.param(3, {"window": 20, "softcap": 3.0}, id="3-window-softcap")],
)
def test_b20_rows_have_the_bits_of_one_token_calls(q_len, options):
    case = random_paged([50, 17, 3], num_q_heads=8, num_kv_heads=1, head_dim=80, q_len=q_len)
    plan = case.plan(3)
    # Rows of one sequence have spans of their own.
    assert (plan.split_bounds(50)[0], plan.split_bounds(43)[0]) == ((0, 32), (0, 16))
    got = case.decode(plan, **options)
    assert_close(got, case.dense(**options))
    for t, alone in case.query_tokens():
        assert_same_bits([x[:, t] for x in got], alone.decode(plan, **options))


def test_b20_a_table_too_short_for_the_last_queries():
    """Only the queries that see past the table cannot be served."""
    case = random_paged([32, 20], q_len=3, width=2, num_pages=4)
    plan = case.plan(2)
    longer = case.replace(seq_lens=np.array([33, 20], np.int32))
    got = longer.decode(plan)
    assert_close(got, longer.dense())
    assert np.isnan(got[0][0, 2]).all()
    assert np.isfinite(got[0][0, :2]).all()
    assert_same_bits([x[1] for x in got], [x[1] for x in case.decode(plan)])


# B21: a request's numbers depend on its neighbours.

# A scale of 80**-0.5 is inexact: where it is multiplied in shows in the bits, as it would not with 64.
B21 = {"num_q_heads": 6, "num_kv_heads": 3, "head_dim": 80}
X_LEN = 90


def batch_with_x(row, others, *, width, seed, dead=np.nan):
    """Sequence X as row `row` among sequences of lengths `others`, all else drawn from `seed`."""
    x = random_paged([X_LEN], **B21, seed=0)
    rng = np.random.default_rng(seed)
    lens = [*others[:row], X_LEN, *others[row:]]
    q = rng.standard_normal((len(lens), 6, 80)).astype(np.float32)
    q[row] = x.q[0]
    k, v = ([rng.standard_normal((n, 3, 80)).astype(np.float32) for n in lens] for _ in range(2))
    for pool, seqs in ((x.k_pages, k), (x.v_pages, v)):
        seqs[row] = pool[x.block_tables[0]].reshape(-1, 3, 80)[:X_LEN]
    return make_paged(q, k, v, page_size=16, width=width, num_pages=64 + width, dead=dead, seed=seed)


OTHERS = {"ragged": [1, 128, 17, 0, 64, 99, 33], "empty": [0] * 7, "long": [128] * 7}
B21_PLANS = {"3-splits": (3, {}), "fixed_size": ("fixed_size", {"split_size": 48})}


def b21_plan(name):
    splits, policy = B21_PLANS[name]
    return make_plan(splits, **B21, max_seq_len=64 * 16, **policy)


@pytest.mark.parametrize("plan", B21_PLANS)
def test_b21_a_row_has_the_bits_of_the_row_alone(plan):
    plan = b21_plan(plan)
    assert sum(high > low for low, high in plan.split_bounds(X_LEN)) > 1
    case = batch_with_x(0, [], width=8, seed=1)
    alone = case.decode(plan)
    for _ in range(20):
        assert_same_bits(case.decode(plan), alone)
    assert_same_bits(batch_with_x(0, [], width=64, seed=2).decode(plan), alone)
    for width in (8, 64):
        for seed, (others, row) in enumerate((others, row) for others in OTHERS for row in (0, 3, 7)):
            dead = (np.nan, np.inf)[seed % 2]
            got = batch_with_x(row, OTHERS[others], width=width, seed=10 + seed, dead=dead).decode(plan)
            assert_same_bits([x[row] for x in got], [x[0] for x in alone])


def test_b21_the_comparison_sees_another_tree():
    """The control of the test above: other splits, other bits."""
    case = batch_with_x(0, [], width=8, seed=1)
    one, other = (case.decode(b21_plan(name)) for name in B21_PLANS)
    assert (bits(one[0]) != bits(other[0])).any()


def test_b21_the_callers_jit_leaves_the_bits():
    """Inside a jitted function the scale is a constant, and the compiler may multiply by it elsewhere."""
    case = random_paged([60, 40], num_q_heads=8, num_kv_heads=8, head_dim=128)
    plan = case.plan(3)
    assert_same_bits(case.decode(plan, jit=True), case.decode(plan))


def test_b21_the_size_of_the_pool_leaves_the_bits():
    """A compiler that sees how large an operand is may choose another loop for it: here, one of half a GiB."""
    case = random_paged([60, 40], num_q_heads=8, num_kv_heads=8, head_dim=128, num_pages=8, dead=0.0)
    plan = case.plan(3)
    pool = jnp.zeros((8192, 16, 8, 128)).at[:8].set(case.k_pages)
    case = case.replace(k_pages=case.k_pages, v_pages=case.k_pages)
    assert_same_bits(case.replace(k_pages=pool, v_pages=pool).decode(plan), case.decode(plan))


def test_b21_splits_are_folded_in_order():
    """2**24 + 1 + 1 in float32: from the left the ones are lost, from the right they are not."""
    for v, total in (([2.0**24, 1.0, 1.0], 2.0**24), ([1.0, 1.0, 2.0**24], 2.0**24 + 2)):
        case = two_tokens([0.0, 0.0, 0.0], v, page_size=4)
        out, _ = case.decode(case.plan(3, **FINE))
        np.testing.assert_array_equal(out, np.float32(total) / np.float32(3))


@pytest.mark.parametrize("rule", ["auto", "legacy", "fixed_size", 5])
def test_b21_rules_that_read_no_batch_say_so(rule):
    plans = [make_plan(rule, num_seqs=n, max_seq_len=4096, max_decode_seqs=8) for n in (1, 4, 8)]
    assert len({plan.num_splits for plan in plans}) == 1
    assert all(plan.batch_invariant for plan in plans)
    assert "batch-invariant  yes" in plans[0].explain()


def test_b21_the_rule_that_reads_the_batch_says_so():
    small, large = (
        make_plan("adaptive", num_seqs=n, max_seq_len=4096, max_decode_seqs=8, target_ctas=16) for n in (1, 8)
    )
    assert (small.num_splits, large.num_splits) == (16, 2)
    for plan in (small, large):
        assert not plan.batch_invariant
        assert "batch-invariant  NO: the split count moves with the batch bucket" in plan.explain()


# B22: base and scale of the log-sum-exp.


@pytest.mark.parametrize(("splits", "jit"), [(1, False), (4, False), (64, False), (4, True)])
def test_b22_lse_is_the_natural_logarithm(splits, jit):
    case = ramp_paged([1600])
    got = case.decode(case.plan(splits), jit=jit)
    np.testing.assert_allclose(got[1], 7.377759, atol=2e-6)
    np.testing.assert_allclose(got[0], 799.5, rtol=1e-6)


@pytest.mark.parametrize("splits", [1, 3])
def test_b22_states_of_two_calls_merge(splits):
    first, second = (ones_paged([n], width=1, num_pages=2) for n in (12, 4))
    first = first.replace(v_pages=first.v_pages * 0)
    states = [case.decode(case.plan(splits, **FINE)) for case in (first, second)]
    out, lse = sk.merge_states(*zip(*states, strict=True))
    np.testing.assert_allclose(out, 0.25, rtol=1e-6)
    np.testing.assert_allclose(lse, np.log(16), rtol=1e-6)


def test_b22_merged_halves_are_the_whole():
    case = random_paged([96, 40, 16], num_q_heads=4, num_kv_heads=2, width=6)
    plan = case.plan(3)
    prefix = case.replace(seq_lens=np.array([48, 40, 0], np.int32))
    tables = case.block_tables.copy()
    tables[0] = np.roll(tables[0], -3)
    suffix = case.replace(block_tables=tables, seq_lens=np.array([48, 0, 16], np.int32))
    merged = sk.merge_states(*zip(prefix.decode(plan), suffix.decode(plan), strict=True))
    assert_close([np.asarray(x) for x in merged], case.dense())


@pytest.mark.parametrize("splits", [1, 2])
def test_b22_the_scale_is_applied_once(splits):
    case = two_tokens([16.0, 0.0], [1.0, 0.0], page_size=1)
    got = case.decode(case.plan(splits, **FINE))
    np.testing.assert_allclose(got[0], 0.880797, atol=1e-6)
    np.testing.assert_allclose(got[1], np.logaddexp(2.0, 0.0), rtol=1e-6)
    # A scale that is given replaces the default one; a traced one too.
    for scale in (0.5, jnp.float32(0.5)):
        _, lse = case.decode(case.plan(splits, **FINE), sm_scale=scale)
        np.testing.assert_allclose(lse, np.logaddexp(8.0, 0.0), rtol=1e-6)


# B26: page sizes other than the one developed on.

B26_LENS = [300, 1, 255, 256, 257]


@functools.cache
def b26(page_size, splits):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((5, 2, 64))
    k, v = ([rng.standard_normal((n, 1, 64)) for n in B26_LENS] for _ in range(2))
    case = make_paged(q, k, v, page_size=page_size, dead_entry=2**31 - 1, seed=page_size)
    return case, case.decode(case.plan(splits))


@pytest.mark.parametrize("page_size", [1, 2, 16, 24, 32, 48, 64, 128, 256, 512])
def test_b26_page_size_does_not_matter(page_size):
    case, got = b26(page_size, 4)
    assert_close(got, case.dense())
    for a, b in zip(got, b26(16, 4)[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("page_size", "splits"), [(1, 16), (24, 1), (512, 16)])
def test_b26_page_size_under_other_splits(page_size, splits):
    case, got = b26(page_size, splits)
    assert_close(got, case.dense())
