"""The mosaic kernels on a CPU: their text on numpy, against dense attention and against themselves. See emulator.py."""

import dataclasses

import emulator
import jax
import numpy as np
import pytest
from support import assert_nan_alone, assert_same_bits, assert_within_rounding, random_paged
from test_mosaic import Case, needs_mosaic, with_tile
from test_quantised import quantise

pytestmark = needs_mosaic

EDGES = (0, 1, 2, 63, 64, 65, 66, 127, 128, 129, 130)
LONGEST = 700

CASES = {
    "two-kv-heads-a-cta": Case((8, 2), batch=3),
    "two-warpgroups-a-kv-head": Case((20, 1), 64, batch=2, page_size=64),
    "one-split": Case((2, 2), 64, splits="off", launch_ctas=3, batch=5),
    "more-rows-than-teams": Case((4, 2), 64, batch=9, launch_ctas=3, dtype="float16"),
    "dv80-page8": Case((4, 2), 64, 80, page_size=8, launch_ctas=5, batch=3),
    "group3-page24-fixed": Case((3, 1), 80, page_size=24, splits="fixed_size"),
    "pinned-33": Case((4, 1), 64, splits=33, launch_ctas=7, batch=2),
    "window": Case((8, 2), batch=3, window=100),
    "group7-window1-sinks": Case((14, 2), 64, page_size=8, window=1, sinks=True, batch=4),
    "window-fixed": Case((4, 2), 64, splits="fixed_size", window=130, softcap=5.0, batch=3),
    "softcap-sinks-alone": Case((8, 2), 64, batch=1, softcap=3.0, sinks=True, launch_ctas=20),
    "q2": Case((8, 2), batch=2, q_len=2),
    "q5-window": Case((4, 2), 64, batch=2, q_len=5, window=70, launch_ctas=6),
    "q16-mqa-page64": Case((6, 1), 64, batch=2, q_len=16, page_size=64, launch_ctas=9),
    "q3-dv80-sinks": Case((2, 2), 64, 80, batch=3, q_len=3, sinks=True, launch_ctas=4),
    "q8-window1-fixed": Case((4, 2), 64, batch=2, q_len=8, window=1, splits="fixed_size"),
    "q5-group5-sinks": Case((10, 2), 64, batch=2, q_len=5, sinks=True, launch_ctas=9),
    "q3-group7-dv80": Case((7, 1), 64, 80, batch=2, q_len=3, sinks=True, window=90),
    "e4m3": Case((8, 2), batch=3, kv_dtype="float8_e4m3fn"),
    "e5m2-q3-window": Case((4, 2), 64, batch=2, kv_dtype="float8_e5m2", q_len=3, window=70, page_size=8),
    "int8-dv96-sinks": Case((4, 1), 64, 96, batch=4, kv_dtype="int8", sinks=True, launch_ctas=7),
    "e4m3-f16-mqa": Case((20, 1), 64, batch=2, page_size=64, dtype="float16", kv_dtype="float8_e4m3fn"),
    "e4m3-tokens": Case((8, 4), batch=3, kv_dtype="float8_e4m3fn", token_scales=True),
    "int8-tokens-q3-window": Case(
        (8, 8), 64, batch=2, kv_dtype="int8", q_len=3, window=70, page_size=8, token_scales=True, sinks=True
    ),
    "q4-few-tokens-a-split": Case((4, 2), 64, batch=2, q_len=4, splits=40, launch_ctas=30),
}


def draw(case, seed, *, longest=LONGEST, narrow=True):
    """A plan, where `narrow` of short steps, the arrays of a batch, and the options of the call."""
    case = dataclasses.replace(case, longest=-(-longest // case.page_size) * case.page_size)
    rng = np.random.default_rng(seed)
    lengths = [int(n) for n in rng.choice([*EDGES, *rng.integers(0, longest, 12)], case.batch)]
    lengths[0] = longest - seed
    sizes = {"split_size": 128} if case.splits == "fixed_size" else {"min_kv_per_split": 64}
    policy = case.policy(**sizes)
    # Of an even number of KV heads, a long step is two heads' short ones.
    tile = {"warpgroups": 2, "block_kv": 8 if seed % 2 else 64, "step_kv": 128 if seed else 64}
    plan = case.plan(with_tile(policy, **tile) if narrow else policy)
    paged = random_paged(
        lengths,
        num_q_heads=case.heads[0],
        num_kv_heads=case.heads[1],
        head_dim=case.head_dim,
        head_dim_v=case.head_dim_v,
        q_len=case.q_len,
        page_size=case.page_size,
        dtype=case.dtype,
        width=case.width,
        window=None if case.window is None else case.window + (case.q_len or 1) - 1,
        seed=seed,
        first_page=1,  # page 0 is NaN: what a missing page's copies are pointed at
    )
    sinks = np.linspace(-2, 2, case.heads[0], dtype=np.float32) if case.sinks else None
    options = {"window": case.window, "softcap": case.softcap, "sinks": sinks}
    if case.kv_dtype is not None:
        kinds = ("head", "tensor") if seed % 2 else ("none", "head")
        stored = quantise(paged, case.kv_dtype, *(("token", "token") if case.token_scales else kinds))
        paged, options = stored.paged, options | stored.scales
    return plan, paged, options


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_against_dense(name, seed):
    plan, paged, options = draw(CASES[name], seed)
    assert plan.num_splits > 1 or CASES[name].splits == "off"
    assert_within_rounding(emulator.decode(paged, plan, **options), paged, **options)


@pytest.mark.parametrize("name", ["two-kv-heads-a-cta", "dv80-page8", "window", "q5-window", "e4m3", "e4m3-f16-mqa"])
def test_every_schedule_same_bits(name):
    plan, paged, options = draw(CASES[name], 2)
    expected = emulator.decode(paged, plan, **options)
    for launch_ctas in (1, 5, 23, 90):
        launched = dataclasses.replace(plan, launch_ctas=launch_ctas)
        assert_same_bits(emulator.decode(paged, launched, **options), expected)


@pytest.mark.parametrize("case", [Case((2, 1), 64, page_size=8), Case((2, 1), 64, page_size=8, window=1500, q_len=2)])
def test_rows_of_many_page_ids(case):
    """A row's table is loaded in parts, each row's anew; and there are rows without tokens between them."""
    plan, paged, options = draw(dataclasses.replace(case, batch=8), 1, longest=2600)
    seq_lens = np.array([2599, 0, 9, 1030, 0, 0, 2060, 0], np.int32)
    paged = paged.replace(seq_lens=seq_lens, block_tables=paged.block_tables[:1].repeat(8, 0))
    expected = emulator.decode(paged, plan, **options)
    assert_within_rounding(expected, paged, **options)
    for launch_ctas in (1, 3, 7):
        launched = dataclasses.replace(plan, launch_ctas=launch_ctas)
        assert_same_bits(emulator.decode(paged, launched, **options), expected)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.q_len])
def test_query_tokens_have_the_bits_that_they_have_alone(name):
    plan, paged, options = draw(CASES[name], 3)
    got = emulator.decode(paged, plan, **options)
    for token, alone in paged.query_tokens():
        assert_same_bits([x[:, token] for x in got], emulator.decode(alone, plan, **options))


@pytest.mark.parametrize(
    "name",
    [
        "two-kv-heads-a-cta",
        "window",
        "q2",
        "q5-window",
        "q16-mqa-page64",
        "q8-window1-fixed",
        "int8-dv96-sinks",
        "e5m2-q3-window",
    ],
)
def test_a_missing_page_is_nan_where_it_is_attended(name):
    (plan, paged, options), page_size = draw(CASES[name], 4), CASES[name].page_size
    seq_lens = paged.seq_lens.copy()
    newest = (seq_lens[0] - 1) // page_size
    seq_lens[0] = newest * page_size + 1  # of several query tokens, the last alone attends the newest page
    paged = paged.replace(seq_lens=seq_lens)
    got = emulator.decode(paged, plan, **options)
    for page in (newest, newest - 1, newest // 2):
        tables = paged.block_tables.copy()
        tables[0, page] = -1
        bad = paged.replace(block_tables=tables)
        assert_nan_alone(emulator.decode(bad, plan, **options), np.isnan(bad.dense(**options)[1]), got)


def test_rows_that_cannot_be_served_are_nan_alone():
    plan, paged, options = draw(CASES["more-rows-than-teams"], 5)
    got, seq_lens = emulator.decode(paged, plan, **options), paged.seq_lens.copy()
    seq_lens[[2, 5]] = -1, paged.block_tables.shape[1] * 16 + 1
    wrong = np.isin(np.arange(len(seq_lens)), [2, 5])
    assert_nan_alone(emulator.decode(paged.replace(seq_lens=seq_lens), plan, **options), wrong, got)


def test_queries_of_any_size_meet_quantised_pages():
    """Each is brought into float16's range by a power of two of its own, which the scale takes out again."""
    plan, paged, options = draw(CASES["e4m3"], 8)
    expected = emulator.decode(paged, plan, **options)
    exponents = 25 * np.arange(plan.num_q_heads, dtype=np.float32) - 90
    sizes = paged.replace(q=(paged.q.astype(np.float32) * np.exp2(exponents)[:, None]).astype(paged.q.dtype))
    for head in (0, plan.num_q_heads - 1):
        scales = options | {"k_scale": np.exp2(-exponents[head])}
        got = emulator.decode(sizes, plan, **scales)
        assert_same_bits([x[:, head] for x in got], [x[:, head] for x in expected])


@pytest.mark.parametrize("name", ["e4m3-tokens", "int8-tokens-q3-window"])
def test_scales_of_any_size(name):
    """Weights times scales are brought into float16's range by a power of two, which grows as scales are met."""
    plan, paged, options = draw(CASES[name], 10)
    rng = np.random.default_rng(0)
    for low, high in ((-60, 60), (0, 1), (60, 61), (-60, -59)):
        size = np.exp2(rng.integers(low, high, options["v_scale"].shape)).astype(np.float32)
        scaled = options | {"v_scale": options["v_scale"] * size}
        assert_within_rounding(emulator.decode(paged, plan, **scaled), paged, **scaled)


@pytest.mark.parametrize("exponent", [40, 90, 127])
def test_a_large_scale_of_a_token_without_weight(exponent):
    """It takes no bits from the others, and 3e38 overflows nothing that is finite."""
    plan, paged, options = draw(CASES["e4m3-tokens"], 11)
    q, k = np.zeros_like(paged.q, np.float32), paged.k_pages.astype(np.float32)
    q[..., 0] = 64
    k[..., 0] = 0
    scale = options["v_scale"].copy()
    for table, seq_len in zip(paged.block_tables, paged.seq_lens, strict=True):
        for token in range(3, seq_len, 50):
            at = table[token // 16], token % 16
            k[(*at, slice(None), 0)] = -440
            scale[at] = np.float32(2.0**exponent)
    paged = paged.replace(q=q.astype(paged.q.dtype), k_pages=k.astype(paged.k_pages.dtype))
    options |= {"k_scale": np.ones_like(scale), "v_scale": scale}
    assert_within_rounding(emulator.decode(paged, plan, **options), paged, **options)


@pytest.mark.parametrize("name", ["e4m3", "int8-dv96-sinks", "more-rows-than-teams", "one-split"])
@pytest.mark.parametrize("gap", [20, 24.8, 30])
def test_light_weights_on_large_values(name, gap):
    """Of a token whose value is 0, as an attention sink's, all others, `gap` powers of two below it, are the output."""
    plan, paged, options = draw(CASES[name], 9)
    options |= {"sinks": None, "k_scale": None, "v_scale": None}
    q, k, v = (np.zeros_like(x, np.float32) for x in (paged.q, paged.k_pages, paged.v_pages))
    q[..., 0] = 1
    for table, seq_len in zip(paged.block_tables, paged.seq_lens, strict=True):
        page_size = k.shape[1]
        tokens = np.arange(1, seq_len)
        v[table[tokens // page_size], tokens % page_size] = 100
        if seq_len:
            k[table[0], 0, :, 0] = 16
    # Logits in base 2: 16 * sm_scale * log2(e) for the first token, 0 for the others.
    q *= gap * np.log(2) / 16 * plan.head_dim**0.5
    paged = paged.replace(
        q=q.astype(paged.q.dtype), k_pages=k.astype(paged.k_pages.dtype), v_pages=v.astype(paged.v_pages.dtype)
    )
    assert_within_rounding(emulator.decode(paged, plan, **options), paged, **options)


@pytest.mark.parametrize("softcap", [1e-3, 50.0, 1e5, 1e8, 3e38])
def test_a_softcap_of_any_size(softcap):
    plan, paged, _ = draw(CASES["two-kv-heads-a-cta"], 6)
    assert_within_rounding(emulator.decode(paged, plan, softcap=softcap), paged, softcap=softcap)


@pytest.mark.parametrize("name", ["two-kv-heads-a-cta", "dv80-page8"])
def test_infinite_sinks(name):
    plan, paged, _ = draw(CASES[name], 7)
    sinks = np.zeros(plan.num_q_heads, np.float32)
    some = emulator.decode(paged, plan, sinks=sinks)
    sinks[0], sinks[1] = np.inf, -np.inf
    got, none = emulator.decode(paged, plan, sinks=sinks), emulator.decode(paged, plan)
    for x, without, of_zero in zip(got, none, some, strict=True):
        assert np.isnan(x[:, 0]).all()
        assert_same_bits((x[:, 1], x[:, 2:]), (without[:, 1], of_zero[:, 2:]))


@pytest.mark.parametrize("q_len", [None, 2])
def test_x64_lowers(q_len):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        Case((8, 2), batch=64, splits=7, q_len=q_len).lower()
