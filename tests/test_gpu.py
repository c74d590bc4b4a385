"""What only a GPU can show: the invariance and accuracy of each backend there, and the target found by its device.

Every other test runs on whatever JAX's default device is; these are the ones that a CPU cannot stand in for.
"""

import dataclasses
import functools
import re

import battery
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import CONFIGS, Config, random_batches
from support import (
    TOLERANCE,
    assert_nan_alone,
    assert_same_bits,
    assert_within_rounding,
    bits,
    junk_entries,
    make_paged,
)
from test_emulated import draw
from test_mosaic import Case

import splitk_jax as sk
from splitk_jax.checks import MOSAIC_JAX
from splitk_jax.target import load_targets

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU as JAX's default device"),
]

SIZES = {
    "gqa-llama": Config(heads=(32, 8), head_dim=128, longest=2048, splits=33, min_kv_per_split=64),
    "gqa-llama-f32": Config(
        heads=(32, 8), head_dim=128, q_dtype="float32", longest=2048, splits=33, min_kv_per_split=64
    ),
    "mqa-page64": Config(heads=(64, 1), head_dim=64, page_size=64, q_dtype="float32", longest=2048, splits=64),
}
EVERY = [pytest.param(config, id=name) for name, config in (CONFIGS | SIZES).items()]

HOPPER = functools.partial(Config, target="h200", min_kv_per_split=128, split_size=128, longest=2048)
MOSAIC = {
    "gqa-llama": HOPPER(heads=(32, 8), head_dim=128, splits="balanced"),
    "d256-page64": HOPPER(heads=(24, 4), head_dim=256, page_size=64, splits=11),
    "d96-page8-f16": HOPPER(heads=(12, 2), head_dim=96, page_size=8, dtype="float16", splits="fixed_size"),
    "window-softcap-sinks": HOPPER(heads=(16, 4), head_dim=128, splits="balanced", window=700, softcap=8.0, sinks=True),
}
# Query tokens of a sequence in one call; some windows begin in other steps and splits for one token than for the next.
QUERY_TOKENS = {
    "q2-llama": (2, HOPPER(heads=(32, 8), head_dim=128, splits="balanced")),
    "q16-llama-f16-page8": (16, HOPPER(heads=(32, 8), head_dim=128, splits="balanced", dtype="float16", page_size=8)),
    "q4-mqa-page64": (4, HOPPER(heads=(32, 1), head_dim=128, splits="balanced", page_size=64)),
    "q5-d256": (5, HOPPER(heads=(24, 4), head_dim=256, splits=11, page_size=64)),
    "q5-group5-sinks": (5, HOPPER(heads=(40, 8), head_dim=128, splits="balanced", sinks=True)),
    "q7-d80-sinks": (7, HOPPER(heads=(2, 2), head_dim=80, splits="balanced", sinks=True)),
    "q4-everything": (4, HOPPER(heads=(32, 8), head_dim=128, splits=9, window=100, softcap=3.0, sinks=True)),
    "q6-window4": (6, HOPPER(heads=(8, 2), head_dim=128, splits="balanced", window=4)),
    "q16-window1-page256": (16, HOPPER(heads=(16, 2), splits="balanced", window=1, page_size=256)),
    "q8-fixed-window": (8, HOPPER(heads=(16, 4), head_dim=128, splits="fixed_size", window=500)),
    "q3-dv256": (3, HOPPER(heads=(28, 4), head_dim_v=256, splits="balanced")),
}
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
MOSAIC_QUANTISED = {
    "e4m3-llama": Case((32, 8), batch=17, kv_dtype=E4M3),
    "int8-llama-f16-page64": Case((32, 8), batch=9, kv_dtype="int8", dtype="float16", page_size=64),
    "e5m2-d256-window-softcap-sinks": Case((24, 4), 256, batch=5, kv_dtype=E5M2, window=700, softcap=20.0, sinks=True),
    "e4m3-mqa": Case((32, 1), batch=5, kv_dtype=E4M3),
    "int8-dv96": Case((4, 2), 64, 96, batch=5, kv_dtype="int8", splits=7),
    "e4m3-q4": Case((32, 8), batch=5, q_len=4, kv_dtype=E4M3),
    "int8-d192-q3-window-page8": Case((6, 2), 192, 128, batch=3, q_len=3, window=333, page_size=8, kv_dtype="int8"),
    "e4m3-tokens": Case((32, 8), batch=9, kv_dtype=E4M3, token_scales=True),
    "int8-tokens-q3-window": Case((8, 4), 64, batch=3, q_len=3, window=333, kv_dtype="int8", token_scales=True),
}
EVERY_MOSAIC = [pytest.param(config, id=name) for name, config in MOSAIC.items()]
# One compilation each: the other lanes, groups, pages and rules.
MOSAIC_SHAPES = {
    "d64-group8-auto": HOPPER(heads=(16, 2), splits="auto", longest=1000),
    "d64-mqa64-page128": HOPPER(heads=(64, 1), page_size=128, splits="balanced", longest=1024),
    "d80-group3-one-split": HOPPER(heads=(9, 3), head_dim=80, dtype="float16", splits="off", longest=1000),
    "d80-dv64-page256": HOPPER(heads=(8, 8), head_dim=80, head_dim_v=64, page_size=256, longest=1024),
    "d112-group7-legacy": HOPPER(heads=(7, 1), head_dim=112, splits="legacy", longest=1000),
    "d192-dv128-page32": HOPPER(heads=(32, 2), head_dim=192, head_dim_v=128, page_size=32, longest=1024),
    "d128-group128-f16": HOPPER(heads=(128, 1), head_dim=128, dtype="float16", longest=1000),
    "two-heads-adaptive": HOPPER(heads=(2, 2), head_dim=128, splits="adaptive", longest=1000),
}


def mosaic_is_missing():
    """Why this process cannot run the plans of `MOSAIC`; empty when it can."""
    device = jax.devices()[0]
    if jax.__version_info__ < MOSAIC_JAX:
        return f"jax {jax.__version__} is too old for the mosaic backend"
    if getattr(device, "compute_capability", None) != "9.0" or device.core_count != sk.load_target("h200").sm_count:
        return f"{device.device_kind} is not the Hopper part that target h200 describes"
    return ""


needs_mosaic = pytest.mark.skipif(bool(mosaic_is_missing()), reason=mosaic_is_missing())


@pytest.mark.parametrize("config", EVERY)
def test_any_batch(config):
    assert random_batches(config, 30) == (1, 0)


@pytest.mark.parametrize("config", EVERY)
def test_against_dense(config):
    """float32 means float32: a TF32 product would miss the tolerance by two orders of magnitude."""
    battery.check_against_dense(config)


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_width_and_pool(name):
    config = CONFIGS[name]
    rows = config.sequences(8, seed=3)
    alone = config.alone(rows)
    nothing = config.sequence(0, np.random.default_rng(0))
    for size in (16, 17, 33, 64):
        out, lse = config.decode([*rows, *[nothing] * (size - len(rows))])
        assert_same_bits((out[: len(rows)], lse[: len(rows)]), alone)
    assert_same_bits(config.decode(rows, width=8 * config.width), alone)
    assert_same_bits(config.decode(rows, num_pages=16 * (17 * config.width + 1)), alone)


def test_repeats_give_the_same_bits():
    config = SIZES["gqa-llama-f32"]
    paged = config.paged(config.sequences(60, seed=1), num_pages=60 * config.width + 1)
    arrays = [jnp.asarray(x) for x in paged.arrays]
    call = functools.partial(sk.paged_decode_attention, plan=config.plan, return_lse=True)
    expected = call(*arrays)
    for _ in range(200):
        assert_same_bits(call(*arrays), expected)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(SIZES["gqa-llama"], id="reference"),
        pytest.param(MOSAIC["gqa-llama"], id="mosaic", marks=needs_mosaic),
    ],
)
def test_no_pool_sized_temporary(config):
    """Neither reading nor writing the cache copies it."""
    pages = sk.KVPages.init(num_pages=4096, page_size=16, num_kv_heads=8, head_dim=128)
    pool = pages.k_pages.nbytes
    q, new = jnp.zeros((2, 32, 128), jnp.bfloat16), jnp.zeros((2, 8, 128), jnp.bfloat16)
    tables, lens = jnp.zeros((2, 64), jnp.int32), jnp.ones(2, jnp.int32)

    def step(pages, q):
        pages = pages.append(new, new, tables, lens - 1)
        return pages, sk.paged_decode_attention(q, pages.k_pages, pages.v_pages, tables, lens, plan=config.plan)

    memory = jax.jit(step, donate_argnums=0).lower(pages, q).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * pool
    assert memory.temp_size_in_bytes < pool / 2


class Company:
    """Sequences in one pool, which stays on the device, and what each of them gives alone.

    Whatever nobody owns is NaN, and table entries without a live page name none.
    """

    COUNT = 64

    def __init__(self, config):
        self.config = config
        self.rows = config.sequences(self.COUNT, seed=5)
        self.num_pages = sum(-(-len(row) // config.page_size) for row in self.rows) + 1
        self.paged = self.layout()
        self.pools = self.paged.k_pages, self.paged.v_pages
        each = [self.decode([i]) for i in range(self.COUNT)]
        self.alone = tuple(np.concatenate(x) for x in zip(*each, strict=True))

    def layout(self, **layout):
        """The sequences laid out in other pages, or with something else where nothing is owned."""
        paged = self.config.paged(self.rows, num_pages=self.num_pages, window=self.config.window, **layout)
        return paged.replace(k_pages=jnp.asarray(paged.k_pages), v_pages=jnp.asarray(paged.v_pages))

    def batch(self, chosen, paged=None, **arrays):
        """The call of some of the rows, in that order."""
        paged = self.paged if paged is None else paged
        own = {name: getattr(paged, name)[chosen] for name in ("q", "block_tables", "seq_lens")}
        return paged.replace(**own | arrays)

    def decode(self, chosen, plan=None, paged=None, **arrays):
        return self.batch(chosen, paged, **arrays).decode(
            self.config.plan if plan is None else plan, **self.config.options
        )

    def check(self, chosen, got):
        assert_same_bits(got, tuple(x[chosen] for x in self.alone))


@functools.cache
def company(name):
    return Company(MOSAIC[name])


@needs_mosaic
class TestMosaicBits:
    """Every row has the bits that it has alone; `Company` keeps shapes few, since each is compiled."""

    @pytest.fixture(params=MOSAIC)
    def rows(self, request):
        return company(request.param)

    def test_there_is_something_to_see(self, rows):
        config = rows.config
        assert config.plan.backend == "mosaic"
        assert sum(config.active_splits(len(row)) > 1 for row in rows.rows) >= 10
        assert sum(len(row) == 0 for row in rows.rows) >= 1
        assert np.isfinite(rows.alone[0]).all()

    def test_every_schedule_same_bits(self, rows):
        """From one CTA for everything to one for each split, and more: who computes what moves no bit."""
        plan, rng = rows.config.plan, np.random.default_rng(0)
        for launch_ctas in (plan.ctas, 2 * plan.ctas, 5 * plan.ctas, 132, 4000):
            launched = dataclasses.replace(plan, launch_ctas=launch_ctas)
            for _ in range(4):
                chosen = rng.choice(rows.COUNT, 17, replace=False)
                # The longest and one of no token, among others.
                chosen[rng.choice(17, 2, replace=False)] = 0, rows.COUNT - 1
                rows.check(chosen, rows.decode(chosen, plan=launched))

    @pytest.mark.parametrize("size", [2, 3, 8, 17, 64])
    def test_any_batch_in_any_order(self, rows, size):
        rng = np.random.default_rng(size)
        for _ in range(8):
            chosen = rng.permutation(rows.COUNT)[:size]
            rows.check(chosen, rows.decode(chosen))

    def test_beside_nothing_and_beside_itself(self, rows):
        for chosen in (np.full(17, 0), np.r_[np.full(16, rows.COUNT - 1), 0], np.r_[0, np.full(16, rows.COUNT - 1)]):
            rows.check(chosen, rows.decode(chosen))

    def test_another_tree_has_other_bits(self):
        rows, chosen = company("gqa-llama"), np.arange(17)
        other = rows.decode(chosen, plan=rows.config.plan_of(splits=3))
        assert any((bits(a) != bits(b[chosen])).any() for a, b in zip(other, rows.alone, strict=True))

    def wider_tables(self, rows, chosen, factor):
        tables = rows.paged.block_tables[chosen]
        return np.pad(tables, ((0, 0), (0, (factor - 1) * tables.shape[1])), constant_values=-1)

    def test_a_wider_table(self, rows):
        chosen = np.arange(0, rows.COUNT, 8)
        rows.check(chosen, rows.decode(chosen, block_tables=self.wider_tables(rows, chosen, 8)))

    def test_pages_in_another_order_and_a_larger_pool(self, rows):
        chosen = np.arange(0, rows.COUNT, 8)
        rows.check(chosen, rows.decode(chosen, paged=rows.layout(seed=1)))
        tables, num_pages = self.wider_tables(rows, chosen, 2), 4 * rows.num_pages
        at = np.random.default_rng(2).permutation(num_pages)[: rows.num_pages].astype(np.int32)
        moved = np.where(tables < 0, tables, at[tables])
        k_pages, v_pages = (jnp.full((num_pages, *x.shape[1:]), jnp.nan, x.dtype).at[at].set(x) for x in rows.pools)
        rows.check(chosen, rows.decode(chosen, block_tables=moved, k_pages=k_pages, v_pages=v_pages))

    def test_nothing_dead_is_read(self, rows):
        chosen = np.arange(17)
        rows.check(chosen, rows.decode(chosen, paged=rows.layout(dead=0.0)))
        rows.check(chosen, rows.decode(chosen, paged=rows.layout(dead=np.inf)))
        tables = rows.paged.block_tables[chosen]
        for junk in (*junk_entries(rows.num_pages), 0):
            rows.check(chosen, rows.decode(chosen, block_tables=np.where(tables < 0, np.int32(junk), tables)))

    def test_neighbours_contents(self, rows):
        """Queries of the others that are huge, or NaN: this row's own are what counts."""
        chosen = np.arange(17)
        for value in (np.nan, 1e4, 0.0):
            q = rows.paged.q[chosen].copy()
            q[1:] = value
            out, lse = rows.decode(chosen, q=q)
            rows.check([0], (out[:1], lse[:1]))

    def test_bad_rows_are_nan_and_alone(self, rows):
        config, rng = rows.config, np.random.default_rng(3)
        by_length = np.argsort([-len(row) for row in rows.rows])
        chosen = by_length[np.linspace(0, rows.COUNT - 1, 17).astype(int)]
        seq_lens = rows.paged.seq_lens[chosen]
        live = -(-seq_lens // config.page_size)
        first = 0 * live if config.window is None else np.maximum(seq_lens - config.window, 0) // config.page_size
        capacity = config.width * config.page_size
        for bad in junk_entries(rows.num_pages):
            for where in (lambda low, high: low, lambda low, high: high - 1, rng.integers):
                tables, wrong = rows.paged.block_tables[chosen].copy(), [0, 3, 6]
                for row in wrong:
                    tables[row, where(first[row], live[row])] = bad
                self.only(rows, chosen, wrong, rows.decode(chosen, block_tables=tables))
        # Where every page can be read and holds numbers, so that a length which is cut to what there is would show.
        readable = rows.layout(dead=0.0)
        tables = np.maximum(readable.block_tables[chosen], 0)
        for bad in (-1, -(2**31), capacity + 1, 2**31 - 1):
            lengths, wrong = rows.paged.seq_lens[chosen].copy(), [1, 4, 16]
            lengths[wrong] = bad
            got = rows.decode(chosen, paged=readable, block_tables=tables, seq_lens=lengths)
            self.only(rows, chosen, wrong, got)
        # And the next call is none the worse for it.
        rows.check(chosen, rows.decode(chosen))

    def only(self, rows, chosen, wrong, got):
        right = np.setdiff1d(np.arange(len(chosen)), wrong)
        assert all(np.isnan(x[wrong]).all() for x in got)
        rows.check(chosen[right], tuple(x[right] for x in got))

    def test_repeats_give_the_same_bits(self, rows):
        chosen = np.arange(rows.COUNT)
        arrays = [jnp.asarray(x) for x in rows.batch(chosen).arrays]
        call = functools.partial(
            sk.paged_decode_attention, plan=rows.config.plan, return_lse=True, **rows.config.options
        )
        for _ in range(200):
            rows.check(chosen, call(*arrays))


@needs_mosaic
class TestMosaic:
    @pytest.mark.parametrize("name", MOSAIC)
    def test_against_dense(self, name):
        rows = company(name)
        everyone = rows.paged.replace(k_pages=np.asarray(rows.pools[0]), v_pages=np.asarray(rows.pools[1]))
        assert_within_rounding(rows.decode(np.arange(rows.COUNT)), everyone, **rows.config.options)

    @pytest.mark.parametrize("config", [pytest.param(config, id=name) for name, config in MOSAIC_SHAPES.items()])
    def test_other_shapes_against_dense(self, config):
        battery.check_against_dense(config)

    @pytest.mark.parametrize(("q_len", "config"), [pytest.param(*x, id=name) for name, x in QUERY_TOKENS.items()])
    def test_query_tokens_have_the_bits_that_they_have_alone(self, q_len, config):
        """B20: and the schedule moves none; the tokens of a sequence that reach no bad page are not touched by it."""
        rng = np.random.default_rng(q_len)
        lengths = [config.longest, 0, 1, q_len, config.longest - 17, *rng.choice(config.edges, 12)]
        rows = [config.sequence(int(n), rng) for n in lengths]
        q = rng.standard_normal((len(rows), q_len, config.heads[0], config.head_dim))
        paged = make_paged(
            q,
            [row.k for row in rows],
            [row.v for row in rows],
            page_size=config.page_size,
            width=config.width,
            window=None if config.window is None else config.window + q_len - 1,
            first_page=1,
            dtype=config.dtype,
        )
        got = paged.decode(config.plan, **config.options)
        assert_within_rounding(got, paged, **config.options)
        for token, alone in paged.query_tokens():
            assert_same_bits([x[:, token] for x in got], alone.decode(config.plan, **config.options))
        for launch_ctas in (1, 40, 4000):
            launched = dataclasses.replace(config.plan, launch_ctas=launch_ctas)
            assert_same_bits(paged.decode(launched, **config.options), got)
        tables = paged.block_tables.copy()
        for row in (0, 4):
            tables[row, (paged.seq_lens[row] - 1) // config.page_size] = -1
        bad = paged.replace(block_tables=tables)
        wrong = np.isnan(bad.dense(**config.options)[1])
        assert_nan_alone(bad.decode(config.plan, **config.options), wrong, got)

    @pytest.mark.parametrize("name", MOSAIC_QUANTISED)
    def test_quantised_pages(self, name):
        """Against dense attention; bits over schedules, companies and query tokens; a missing page is NaN alone."""
        plan, paged, options = draw(MOSAIC_QUANTISED[name], 1, longest=5000, narrow=False)
        assert plan.backend == "mosaic"
        got = paged.decode(plan, **options)
        assert_within_rounding(got, paged, **options)
        for launch_ctas in (1, 40, 4000):
            launched = dataclasses.replace(plan, launch_ctas=launch_ctas)
            assert_same_bits(paged.decode(launched, **options), got)

        def rows(chosen):
            fields = ("q", "block_tables", "seq_lens")
            return paged.replace(**{field: getattr(paged, field)[chosen] for field in fields})

        for chosen in ([0], [1], [2, 0, 1], [0, 0, 0, 2]):
            assert_same_bits(rows(chosen).decode(plan, **options), [x[chosen] for x in got])
        if paged.q.ndim == 4:
            for token, alone in paged.query_tokens():
                assert_same_bits(alone.decode(plan, **options), [x[:, token] for x in got])
        tables = paged.block_tables.copy()
        tables[0, (paged.seq_lens[0] - 1) // plan.page_size] = -1
        bad = paged.replace(block_tables=tables)
        assert_nan_alone(bad.decode(plan, **options), np.isnan(bad.dense(**options)[1]), got)

    def test_pools_beyond_two_gibibytes(self):
        """Pages at the very end of 2.5 GiB each of keys and values, in what is otherwise NaN."""
        rows, chosen = company("gqa-llama"), np.arange(0, Company.COUNT, 8)
        num_pages = 5 * 2**29 // rows.pools[0][0].nbytes
        first = num_pages - rows.num_pages

        @functools.partial(jax.jit, donate_argnums=0)
        def write(pool, pages):
            return pool.at[first:].set(pages)

        pools = [write(jnp.full((num_pages, *x.shape[1:]), jnp.nan, x.dtype), x) for x in rows.pools]
        assert all(pool.nbytes == 5 * 2**29 for pool in pools)
        tables = rows.paged.block_tables[chosen]
        tables = np.where(tables < 0, tables, tables + np.int32(first))
        got = rows.decode(chosen, block_tables=tables, k_pages=pools[0], v_pages=pools[1])
        for pool in pools:
            pool.delete()
        rows.check(chosen, got)

    def test_inside_other_transformations(self):
        """A loop over layers, rows one by one, and neighbours that XLA could fuse with."""
        rows, chosen = company("gqa-llama"), np.arange(0, Company.COUNT, 8)
        q, k_pages, v_pages, tables, lens = map(jnp.asarray, rows.batch(chosen).arrays)
        decode = functools.partial(sk.paged_decode_attention, plan=rows.config.plan, return_lse=True)

        @jax.jit
        def scanned(q, k_pages, v_pages, tables, lens):
            def layer(carry, i):
                out, lse = decode(q + 0 * i, k_pages, v_pages, tables, lens + 0)
                return carry + jnp.sum(lse * 0), (out, lse)

            return jax.lax.scan(layer, jnp.float32(0), jnp.zeros(2, q.dtype))[1]

        out, lse = scanned(q, k_pages, v_pages, tables, lens)
        for i in range(2):
            rows.check(chosen, (out[i], lse[i]))
        out, lse = jax.jit(jax.vmap(decode, in_axes=(0, None, None, 0, 0)))(
            q[:, None], k_pages, v_pages, tables[:, None], lens[:, None]
        )
        rows.check(chosen, (out[:, 0], lse[:, 0]))

    @pytest.mark.parametrize("size", [1, 17])
    def test_no_call_is_fused_with_a_slice(self, size):
        """A CUDA graph would be updated at each launch, which takes longer than the kernels do."""
        rows = company("gqa-llama")
        q, *rest = map(jnp.asarray, rows.batch(np.arange(size)).arrays)
        decode = functools.partial(sk.paged_decode_attention, plan=rows.config.plan)
        step = jax.jit(lambda q: decode(decode(q, *rest), *rest), donate_argnums=0)
        text = str(step.lower(q).compile().as_text())
        assert text.count("mosaic_gpu") >= 2
        assert "dynamic-slice-fusion" not in text

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_merge_states(self, dtype):
        """Against attention over the union; bits alone, in company, in a larger jit and under vmap; a gradient."""
        rng = np.random.default_rng(0)
        lses = rng.standard_normal((5, 17, 32)).astype(np.float32) * 4
        outs = jnp.asarray(rng.standard_normal((5, 17, 32, 128)), dtype)
        lses[1, 3], lses[:, 4], lses[2, 5] = -np.inf, -np.inf, np.inf
        outs = outs.at[1, 3].set(jnp.nan)
        assert "splitk_merge_n5" in jax.jit(sk.merge_states).lower(outs, lses).as_text()
        out, lse = (np.asarray(x) for x in sk.merge_states(outs, lses))
        total = np.logaddexp.reduce(lses.astype(np.float64), axis=0)
        with np.errstate(invalid="ignore"):
            weights = np.where(lses == np.inf, 1.0, np.exp(lses - np.where(np.isneginf(total), 0, total)))
        expected = np.nansum(weights[..., None] * np.nan_to_num(np.asarray(outs, np.float64)), axis=0)
        rtol, _ = TOLERANCE[dtype]
        np.testing.assert_allclose(out.astype(np.float64), expected, rtol=rtol, atol=2e-5)
        np.testing.assert_allclose(lse, total, rtol=1e-6, atol=1e-5)
        for rows in ([0], [16], [3, 5, 4], list(range(17))[::-1]):
            assert_same_bits(sk.merge_states(outs[:, np.array(rows)], lses[:, rows]), (out[rows], lse[rows]))
        inside = jax.jit(lambda outs, lses: sk.merge_states([x + 0 for x in outs], [x + 0 for x in lses]))
        assert_same_bits(inside(outs, lses), (out, lse))
        assert_same_bits(jax.vmap(sk.merge_states, in_axes=1)(outs, lses), (out, lse))
        grad = jax.grad(lambda lses: jnp.sum(sk.merge_states(outs[:, :3], lses)[1]))(lses[:, :3])
        np.testing.assert_allclose(grad, weights[:, :3], rtol=1e-5, atol=1e-6)

    def test_a_table_and_a_batch_of_nothing(self):
        rows = company("gqa-llama")
        out, lse = rows.decode(np.zeros(0, int))
        assert (out.shape, lse.shape) == ((0, 32, 128), (0, 32))
        out, lse = rows.decode(np.full(17, rows.COUNT - 1))
        assert not bits(out).any()
        assert np.isneginf(lse).all()


class TestDevice:
    def test_its_target_is_found_by_device_kind(self):
        device = jax.devices()[0]
        described = {kind for target in load_targets() for kind in target.device_kinds}
        if device.device_kind not in described:
            with pytest.raises(sk.ConfigError, match=re.escape(repr(device.device_kind)) + " matches no target"):
                sk.load_policy(environ={})
            return
        policy = sk.load_policy(environ={})
        assert device.device_kind in policy.target.device_kinds
        assert policy.sm_count == device.core_count
        config = SIZES["gqa-llama"]
        plan = policy.plan(num_q_heads=32, num_kv_heads=8, head_dim=128, page_size=16, max_decode_seqs=64)
        assert plan.num_splits > 1
        paged = config.paged(config.sequences(8))
        assert_within_rounding(paged.decode(plan), paged)

    def test_another_sm_count_is_refused_where_it_is_used(self):
        cores = jax.devices()[0].core_count
        name = next(t for t in ("gb10", "a100") if sk.load_target(t).sm_count != cores)
        config = CONFIGS["gqa"]
        num_q_heads, num_kv_heads = config.heads
        shape = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": config.head_dim}
        shape |= {"page_size": config.page_size, "max_decode_seqs": 8, "q_dtype": config.q_dtype}
        arrays = config.paged(config.sequences(4)).arrays
        with pytest.raises(sk.ConfigError, match=rf"is not this device's: .* has {cores}"):
            sk.paged_decode_attention(*arrays, plan=sk.load_policy(name, environ={}).plan(**shape))
        ahead = sk.load_policy(name, environ={}, ahead_of_time=True).plan(**shape)
        assert np.isfinite(np.asarray(sk.paged_decode_attention(*arrays, plan=ahead))).all()
