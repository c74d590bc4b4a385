"""The paged cache against a numpy model of it, its memory under donation, and the allocator of page ids."""

import collections

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from support import QUANTISED, TOLERANCE, assert_same_bits, bits, copies_pools, dequantised, junk_entries

import splitk_jax as sk

DTYPES = list(TOLERANCE)
NUM_PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM, HEAD_DIM_V, WIDTH = 9, 4, 2, 8, 6, 3
CAPACITY = WIDTH * PAGE_SIZE


def filled(dtype="float32", seed=0, num_pages=NUM_PAGES, page_size=PAGE_SIZE):
    rng = np.random.default_rng(seed)
    lead = (num_pages, page_size, KV_HEADS)
    return sk.KVPages(
        jnp.asarray(rng.standard_normal((*lead, HEAD_DIM)).astype(dtype)),
        jnp.asarray(rng.standard_normal((*lead, HEAD_DIM_V)).astype(dtype)),
    )


def tokens(*lead, dtype="float32", seed=1):
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal((*lead, KV_HEADS, HEAD_DIM)).astype(dtype),
        rng.standard_normal((*lead, KV_HEADS, HEAD_DIM_V)).astype(dtype),
    )


def after_write(pages, k, v, slots):
    """What `write` is to leave: one row after another, those outside the pool left out."""
    pools = []
    for pool, rows in ((pages.k_pages, k), (pages.v_pages, v)):
        pool = np.array(pool)
        flat = pool.reshape(-1, *pool.shape[2:])
        for slot, row in zip(slots, rows, strict=True):
            if 0 <= slot < len(flat):
                flat[slot] = row.astype(pool.dtype)
        pools.append(pool)
    return sk.KVPages(*pools)


def after_append(pages, k, v, block_tables, positions):
    slots = np.full(positions.shape, -1, np.int64)
    for (row, i), position in np.ndenumerate(positions):
        if 0 <= position < block_tables.shape[1] * pages.page_size:
            page = block_tables[row, position // pages.page_size]
            if 0 <= page < pages.num_pages:
                slots[row, i] = int(page) * pages.page_size + position % pages.page_size
    return after_write(pages, k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:]), slots.ravel())


class TestInit:
    @pytest.mark.parametrize("dtype", [*DTYPES, jnp.bfloat16, np.dtype("float16")])
    def test_zeros_of_the_shape_asked_for(self, dtype):
        pages = sk.KVPages.init(num_pages=5, page_size=4, num_kv_heads=2, head_dim=8, head_dim_v=6, dtype=dtype)
        assert pages.k_pages.shape == (5, 4, 2, 8)
        assert pages.v_pages.shape == (5, 4, 2, 6)
        assert pages.k_pages.dtype == pages.v_pages.dtype == jnp.dtype(dtype)
        assert not np.asarray(pages.k_pages).any()
        assert not np.asarray(pages.v_pages).any()
        assert (pages.num_pages, pages.page_size) == (5, 4)

    def test_defaults(self):
        pages = sk.KVPages.init(num_pages=1, page_size=1, num_kv_heads=1, head_dim=8)
        assert pages.v_pages.shape == pages.k_pages.shape
        assert pages.k_pages.dtype == jnp.bfloat16


class TestWrite:
    @pytest.mark.parametrize("rows", DTYPES)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_cast_to_the_dtype_of_the_pages(self, dtype, rows):
        pages, (k, v), slots = filled(dtype), tokens(5, dtype=rows), np.array([3, 35, 0, 17, 4], np.int32)
        assert_same_bits(pages.write(k, v, slots), after_write(pages, k, v, slots))

    @pytest.mark.parametrize("outside", [-1, -36, 36, 37, 2**31 - 1, -(2**31)])
    def test_outside_the_pool_writes_nothing(self, outside):
        pages, (k, v) = filled(), tokens(3)
        slots = np.array([outside, 35, outside], np.int32)
        assert_same_bits(pages.write(k, v, slots), after_write(pages, k, v, slots))
        assert_same_bits(pages.write(k, v, np.full(3, outside, np.int32)), pages)

    def test_no_rows_write_nothing(self):
        assert_same_bits(filled().write(*tokens(0), np.zeros(0, np.int32)), filled())

    def test_of_equal_slots_the_last_row_wins(self):
        pages, (k, v) = filled(), tokens(200)
        slots = np.random.default_rng(2).integers(-3, 40, 200).astype(np.int32)
        assert max(collections.Counter(slots.tolist()).values()) > 3
        assert_same_bits(pages.write(k, v, slots), after_write(pages, k, v, slots))

    def test_the_old_pages_are_not_written(self):
        pages, (k, v) = filled(), tokens(3)
        before = np.array(pages.k_pages), np.array(pages.v_pages)
        pages.write(k, v, np.arange(3, dtype=np.int32))
        assert_same_bits(pages, before)

    def test_non_finite_values_are_kept(self):
        pages, (k, v) = filled(), tokens(2)
        k[0], v[1] = np.nan, np.inf
        slots = np.array([1, 2], np.int32)
        assert_same_bits(pages.write(k, v, slots), after_write(pages, k, v, slots))


class TestAppend:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_one_token_a_row_both_ways_of_writing_it(self, dtype):
        pages, (k, v) = filled(dtype), tokens(3, 1, dtype=dtype)
        tables = np.array([[5, 0, 2], [1, 8, 3], [4, 7, 6]], np.int32)
        positions = np.array([[0], [5], [11]], np.int32)
        expected = after_append(pages, k, v, tables, positions)
        assert_same_bits(pages.append(k, v, tables, positions), expected)
        assert_same_bits(pages.append(k[:, 0], v[:, 0], tables, positions[:, 0]), expected)

    def test_random_positions_tables_and_padding(self):
        rng = np.random.default_rng(3)
        append = jax.jit(sk.KVPages.append)
        for seed in range(30):
            pages, (k, v) = filled(), tokens(3, 7, seed=seed)
            tables = rng.permutation(NUM_PAGES).reshape(3, WIDTH).astype(np.int32)
            tables[rng.random(tables.shape) < 0.2] = rng.choice(junk_entries(NUM_PAGES))
            positions = rng.integers(-3, CAPACITY + 3, (3, 7)).astype(np.int32)
            assert_same_bits(append(pages, k, v, tables, positions), after_append(pages, k, v, tables, positions))

    @pytest.mark.parametrize("position", [-1, -(2**31), CAPACITY, 2**31 - 1])
    def test_padding_and_past_the_table_write_nothing(self, position):
        pages, (k, v) = filled(), tokens(2, 2)
        tables = np.arange(6, dtype=np.int32).reshape(2, WIDTH)
        positions = np.array([[0, position], [position, position]], np.int32)
        assert_same_bits(pages.append(k, v, tables, positions), after_append(pages, k, v, tables, positions))

    @pytest.mark.parametrize("page", junk_entries(NUM_PAGES))
    def test_a_page_outside_the_pool_writes_nothing(self, page):
        pages, (k, v) = filled(), tokens(2, 1)
        tables = np.array([[page, 0, 0], [1, 0, 0]], np.int32)
        positions = np.zeros((2, 1), np.int32)
        assert_same_bits(pages.append(k, v, tables, positions), after_append(pages, k, v, tables, positions))

    def test_of_tokens_at_one_position_the_last_wins(self):
        pages, (k, v) = filled(), tokens(2, 3)
        tables = np.array([[0, 1, 2], [0, 1, 2]], np.int32)  # one page in two rows, as a shared prefix has
        positions = np.array([[4, 4, 5], [5, 6, 4]], np.int32)
        assert_same_bits(pages.append(k, v, tables, positions), after_append(pages, k, v, tables, positions))

    def test_token_by_token_is_all_at_once(self):
        k, v = tokens(2, 10)
        tables = np.array([[5, 0, 2], [1, 8, 3]], np.int32)
        positions = np.tile(np.arange(10, dtype=np.int32), (2, 1))
        stepped = filled()
        for t in range(10):
            stepped = stepped.append(k[:, t], v[:, t], tables, positions[:, t])
        assert_same_bits(stepped, filled().append(k, v, tables, positions))


class TestContiguous:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("length", "page_size"), [(1, 1), (7, 4), (8, 4), (9, 4), (5, 16), (10, 3)])
    def test_round_trip(self, length, page_size, dtype):
        k, v = tokens(3, length, dtype=dtype)
        pages, tables = sk.KVPages.from_contiguous(k, v, page_size=page_size)
        width = -(-length // page_size)
        assert tables.shape == (3, width)
        assert tables.dtype == jnp.int32
        assert sorted(np.ravel(tables)) == list(range(3 * width))
        got_k, got_v = pages.to_contiguous(tables, np.full(3, length, np.int32))
        assert got_k.dtype == got_v.dtype == dtype
        assert_same_bits((got_k[:, :length], got_v[:, :length]), (k, v))
        assert not np.asarray(got_k[:, length:]).any()
        assert not np.asarray(got_v[:, length:]).any()

    def test_the_tail_of_the_last_page_is_zeros(self):
        pages, _ = sk.KVPages.from_contiguous(*tokens(2, 6), page_size=4)
        assert not np.asarray(pages.k_pages)[[1, 3], 2:].any()

    def test_reads_own_live_tokens_only(self):
        pages = filled()
        tables = np.array([[5, -1, 99], [1, 8, 2**31 - 1], [3, 3, -(2**31)], [99, 99, 99]], np.int32)
        lens = np.array([3, 8, 5, 0], np.int32)
        k, v = pages.to_contiguous(tables, lens)
        for got, pool in ((k, pages.k_pages), (v, pages.v_pages)):
            expected = np.zeros((4, CAPACITY, *pool.shape[2:]), np.float32)
            for row, n in enumerate(lens):
                for t in range(n):
                    expected[row, t] = np.asarray(pool)[tables[row, t // PAGE_SIZE], t % PAGE_SIZE]
            assert_same_bits(got, expected)

    @pytest.mark.parametrize("page", junk_entries(NUM_PAGES))
    def test_a_live_page_outside_the_pool_is_nan(self, page):
        tables = np.array([[5, page, 2], [1, 8, 3]], np.int32)
        for got in filled().to_contiguous(tables, np.array([12, 12], np.int32)):
            nan = np.isnan(got).all(axis=(2, 3))
            assert nan[0].tolist() == [False] * 4 + [True] * 4 + [False] * 4
            assert not np.isnan(got[1]).any()

    @pytest.mark.parametrize("length", [-1, -(2**31), CAPACITY + 1, 2**31 - 1])
    def test_a_length_outside_the_table_is_nan_for_its_row_only(self, length):
        tables = np.array([[5, 0, 2], [1, 8, 3]], np.int32)
        whole = filled().to_contiguous(tables, np.array([CAPACITY, CAPACITY], np.int32))
        got = filled().to_contiguous(tables, np.array([length, CAPACITY], np.int32))
        for ours, theirs in zip(got, whole, strict=True):
            assert np.isnan(ours[0]).all()
            assert_same_bits(ours[1], theirs[1])

    def test_back_and_forth_gives_the_same_pages(self):
        k, v = tokens(2, 9)
        pages, tables = sk.KVPages.from_contiguous(k, v, page_size=4)
        back = pages.to_contiguous(tables, np.array([9, 9], np.int32))
        again, again_tables = sk.KVPages.from_contiguous(*back, page_size=4)
        assert_same_bits((again, again_tables), (pages, tables))


class TestPagesMadeByHand:
    """A pytree's fields take anything; what uses them does not."""

    @pytest.mark.parametrize(
        ("k_pages", "v_pages", "error", "match"),
        [
            ((9, 4, 2, 8), (8, 4, 2, 8), ValueError, r"v_pages.shape\[0\]=8 must be 9"),
            ((9, 4, 2, 8), (9, 2, 2, 8), ValueError, r"v_pages.shape\[1\]=2 must be 4"),
            ((9, 4, 8), (9, 4, 8), ValueError, r"k_pages must be \[num_pages, page_size, num_kv_heads, head_dim\]"),
        ],
    )
    def test_shapes(self, k_pages, v_pages, error, match):
        pages = sk.KVPages(jnp.zeros(k_pages), jnp.zeros(v_pages))
        for use in self.uses():
            with pytest.raises(error, match=match):
                use(pages)

    @pytest.mark.parametrize("dtype", ["uint8", "float8_e4m3"])
    def test_dtypes_that_are_not_served(self, dtype):
        pages = sk.KVPages(*[jnp.zeros((9, 4, 2, 8), dtype)] * 2)
        for use in self.uses():
            with pytest.raises(TypeError, match=f"k_pages.dtype={dtype} must be float32 or .* float8_e5m2 or int8"):
                use(pages)

    @pytest.mark.parametrize(
        ("dtype", "scale", "error", "match"),
        [
            ("float32", jnp.ones(2), ValueError, "v_scale is for quantised pages .* got pages of float32"),
            ("int8", jnp.ones(3), ValueError, r"v_scale must be a number, .* got shape \[3\]"),
            ("int8", jnp.ones((8, 4, 2)), ValueError, r"v_scale must be .*=\[9, 4, 2\], got shape \[8, 4, 2\]"),
            ("int8", jnp.ones(2, jnp.bfloat16), TypeError, "v_scale.dtype=bfloat16 must be float32"),
            ("int8", 0.5, TypeError, "v_scale must be a jax or numpy array, got float"),
        ],
        ids=["unquantised", "heads", "pages", "dtype", "number"],
    )
    def test_scales(self, dtype, scale, error, match):
        pages = sk.KVPages(*[jnp.zeros((9, 4, 2, 8), dtype)] * 2, None, scale)
        for use in self.uses():
            with pytest.raises(error, match=match):
                use(pages)

    def test_nothing(self):
        with pytest.raises(TypeError, match="k_pages must be a jax or numpy array, got NoneType"):
            sk.KVPages(None, None).to_contiguous(np.zeros((1, 1), np.int32), np.zeros(1, np.int32))

    def uses(self):
        token, zero = jnp.zeros((1, 2, 8)), np.zeros(1, np.int32)
        table = np.zeros((1, 1), np.int32)
        return (
            lambda pages: pages.write(token, token, zero),
            lambda pages: pages.append(token, token, table, zero),
            lambda pages: pages.to_contiguous(table, zero),
        )


def test_only_page_ids_are_freed():
    with pytest.raises(TypeError, match="pages=3 must be page ids"):
        sk.PageAllocator(4).free(3)


def test_an_empty_batch_writes_nothing():
    pages = filled()
    none = np.zeros((0, 3), np.int32)
    assert_same_bits(pages.append(*tokens(0, 2), none, none[:, :2]), pages)
    assert_same_bits(pages.append(*(x[:, 0] for x in tokens(0, 2)), none, none[:, 0]), pages)


MOST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
SCALES = {
    "none": None,
    "number": 0.3,
    "heads": np.array([0.02, 3.0], np.float32),
    "token": "per_token",
}


def quantised_pool(dtype, scale="none", num_pages=NUM_PAGES, page_size=PAGE_SIZE):
    return sk.KVPages.init(
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        head_dim_v=HEAD_DIM_V,
        dtype=dtype,
        k_scale=SCALES[scale],
        v_scale=SCALES[scale],
    )


def quantised_rows(x, scale, dtype):
    """Rows as the pages are to hold them, and their scales: the arithmetic written out in numpy."""
    x, most = np.asarray(x, np.float32), np.float32(MOST[dtype])
    if scale is not None and np.ndim(scale) == 3:
        largest = np.abs(x).max(axis=-1)
        scale = np.where(largest == 0, np.float32(1), largest / most)
    scaled = x if scale is None else x / np.asarray(scale)[..., None]
    scaled = np.clip(scaled, -most, most)
    return (np.rint(scaled) if dtype == "int8" else scaled).astype(dtype), scale


def after_quantised_write(pages, k, v, slots):
    dtype, after = pages.k_pages.dtype.name, []
    for pool, scales, rows in ((pages.k_pages, pages.k_scale, k), (pages.v_pages, pages.v_scale, v)):
        stored, row_scales = quantised_rows(rows, scales, dtype)
        pool = np.array(pool)
        flat = pool.reshape(-1, *pool.shape[2:])
        if scales is not None and scales.ndim == 3:
            scales = np.array(scales)
            scales.reshape(-1, KV_HEADS)[slots] = row_scales
        flat[slots] = stored
        after.append((pool, scales))
    (k_pages, k_scale), (v_pages, v_scale) = after
    return sk.KVPages(k_pages, v_pages, k_scale, v_scale)


class TestQuantised:
    @pytest.mark.parametrize("rows", DTYPES)
    @pytest.mark.parametrize("scale", SCALES)
    @pytest.mark.parametrize("dtype", QUANTISED)
    def test_write(self, dtype, scale, rows):
        pages, (k, v), slots = (
            quantised_pool(dtype, scale),
            tokens(5, dtype=rows),
            np.array([3, 35, 0, 17, 4], np.int32),
        )
        assert_same_bits(pages.write(k, v, slots), after_quantised_write(pages, k, v, slots))

    @pytest.mark.parametrize("scale", SCALES)
    @pytest.mark.parametrize("dtype", QUANTISED)
    def test_append_is_write_at_the_slots(self, dtype, scale):
        """Tokens without a place, and those that another takes the place of, leave neither values nor scales."""
        pages, (k, v) = quantised_pool(dtype, scale), tokens(2, 4)
        tables = np.array([[5, 0, -1], [1, 8, 99]], np.int32)
        positions = np.array([[0, 5, -1, 0], [4, 8, 7, 2]], np.int32)
        rows = [(0, 3), (0, 1), (1, 0), (1, 2), (1, 3)]
        slots = np.array([20, 1, 32, 35, 6], np.int32)
        at = tuple(zip(*rows, strict=True))
        expected = after_quantised_write(pages, k[at], v[at], slots)
        assert_same_bits(jax.jit(sk.KVPages.append)(pages, k, v, tables, positions), expected)

    @pytest.mark.parametrize("rows", ["float32", "bfloat16"])
    def test_compiled_writes_divide_too(self, rows):
        """And do not multiply with a reciprocal: 2.25 over this scale is below 63.5, and times its reciprocal above."""
        scale = np.float32(4.5 / 127)
        k = jnp.asarray(3 * np.random.default_rng(0).standard_normal((64, KV_HEADS, HEAD_DIM)), rows).at[0].set(2.25)
        pages = sk.KVPages.init(
            num_pages=16, page_size=4, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype="int8", k_scale=scale
        )
        got = jax.jit(sk.KVPages.write)(pages, k, k, np.arange(64, dtype=np.int32)).k_pages.reshape(k.shape)
        np.testing.assert_array_equal(got, np.clip(np.rint(np.asarray(k, np.float32) / scale), -127, 127))
        assert np.all(got[0] == 63)

    @pytest.mark.parametrize("dtype", QUANTISED)
    def test_a_batch_of_writes_finds_the_scales_that_each_finds_alone(self, dtype):
        k, slots = tokens(12, 3)[0], np.arange(3, dtype=np.int32)

        def scale(k):
            return quantised_pool(dtype, "token").write(k, k[..., :HEAD_DIM_V], slots).k_scale

        assert_same_bits([jax.vmap(scale)(k)], [np.stack([scale(row) for row in k])])

    @pytest.mark.parametrize("dtype", QUANTISED)
    @pytest.mark.parametrize("least", [0.0, 1e-40])
    def test_of_a_scale_of_0_no_nan_is_stored(self, dtype, least):
        scale = np.array([least] + [0.5] * (KV_HEADS - 1), np.float32)
        pages = sk.KVPages.init(
            num_pages=1, page_size=4, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype, k_scale=scale
        )
        k = np.zeros((2, KV_HEADS, HEAD_DIM), np.float32)
        k[1] = 3
        got, _ = pages.write(k, k, np.arange(2, dtype=np.int32)).to_contiguous(
            np.zeros((1, 1), np.int32), np.full(1, 2, np.int32)
        )
        np.testing.assert_array_equal(got[0, :2, 1:], k[:, 1:])
        np.testing.assert_allclose(got[0, :2, 0], 0, atol=1e-37)

    @pytest.mark.parametrize("dtype", QUANTISED)
    def test_ties_round_to_even(self, dtype):
        # Halfway between neighbours of each dtype.
        ties = {"float8_e4m3fn": [17, 19, 21, 432], "float8_e5m2": [9, 11, 13, 15], "int8": [0.5, 1.5, 2.5, 126.5]}
        even = {"float8_e4m3fn": [16, 20, 20, 448], "float8_e5m2": [8, 12, 12, 16], "int8": [0, 2, 2, 126]}
        x = np.array(ties[dtype] + [-n for n in ties[dtype]], np.float32)
        k = np.broadcast_to(x, (1, KV_HEADS, HEAD_DIM))
        pages = quantised_pool(dtype).write(k, k[..., :HEAD_DIM_V], np.zeros(1, np.int32))
        np.testing.assert_array_equal(
            np.asarray(pages.k_pages)[0, 0, 0].astype(np.float32), even[dtype] + [-n for n in even[dtype]]
        )

    @pytest.mark.parametrize("dtype", QUANTISED)
    def test_scales_per_token_round_trip(self, dtype):
        """The largest value of each token and head is stored as the largest of the dtype, and reads back as it was."""
        k, v = tokens(2, 10)
        k *= np.float32(10.0) ** np.arange(-15, 15, 3, dtype=np.float32)[:, None, None]
        k[1, 3], v[0, 2] = 0, 0
        tables = np.array([[5, 0, 2], [1, 8, 3]], np.int32)
        pages = quantised_pool(dtype, "token").append(k, v, tables, np.tile(np.arange(10, dtype=np.int32), (2, 1)))
        for x, got in zip((k, v), pages.to_contiguous(tables, np.array([10, 10], np.int32)), strict=True):
            assert got.dtype == jnp.float32
            largest = np.abs(x).max(axis=-1, keepdims=True)
            # Half a step of the dtype: of 1/127, or of the mantissa's 3 or 2 bits and the smallest subnormal.
            unit = {"int8": 0, "float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3}[dtype]
            least = {"int8": 0.5 / 127, "float8_e4m3fn": 2**-10 / 448, "float8_e5m2": 2**-17 / 57344}[dtype]
            assert (np.abs(got[:, :10] - x) <= 1.00001 * np.maximum(unit * np.abs(x), least * largest)).all()
            np.testing.assert_allclose(np.abs(got[:, :10]).max(axis=-1, keepdims=True), largest, rtol=1e-6)
        # Of zeros: an all-zero token, and a page that nobody wrote.
        assert (np.asarray(pages.k_scale)[8 - 7, 3] == np.finfo(np.float32).tiny).all()
        assert (np.asarray(pages.k_scale)[4] == np.finfo(np.float32).tiny).all()

    @pytest.mark.parametrize("scale", SCALES)
    @pytest.mark.parametrize("dtype", QUANTISED)
    def test_extremes(self, dtype, scale):
        """No infinity and no NaN of any finite value; NaN is kept, or is 0 where the dtype has none and no scale."""
        big = np.finfo(np.float32).max
        for value in (big, -big, np.inf, -np.inf, 1e-40, 2e-38):
            k = np.full((1, KV_HEADS, HEAD_DIM), value, np.float32)
            pages = quantised_pool(dtype, scale).write(k, k[..., :HEAD_DIM_V], np.zeros(1, np.int32))
            (got, _), stored = pages.to_contiguous(np.zeros((1, 1), np.int32), np.ones(1, np.int32)), pages.k_pages
            assert np.isfinite(got).all()
            if abs(value) > 1:
                np.testing.assert_array_equal(np.asarray(stored)[0, 0].astype(np.float32), np.sign(value) * MOST[dtype])
        k[0, 0, 3] = np.nan
        pages = quantised_pool(dtype, scale).write(k, k[..., :HEAD_DIM_V], np.zeros(1, np.int32))
        got = np.asarray(pages.to_contiguous(np.zeros((1, 1), np.int32), np.ones(1, np.int32))[0])[0, 0]
        assert np.isnan(got[0, 3]) == (dtype != "int8" or scale == "token")
        assert np.isnan(got[0]).all() == (scale == "token")
        assert np.isfinite(got[1]).all()

    @pytest.mark.parametrize("dtype", QUANTISED)
    def test_a_scale_per_token_is_never_subnormal(self, dtype):
        """It could be taken for 0, and zeros beside a tiny value would be 0 / 0."""
        k = np.zeros((1, KV_HEADS, HEAD_DIM), np.float32)
        k[..., 2] = 4e-38
        pages = quantised_pool(dtype, "token").write(k, k[..., :HEAD_DIM_V], np.zeros(1, np.int32))
        assert (np.asarray(pages.k_scale)[0, 0] >= np.finfo(np.float32).tiny).all()
        stored = np.asarray(pages.k_pages)[0, 0].astype(np.float32)
        np.testing.assert_array_equal(np.flatnonzero(stored[0]), [2])
        assert not np.isnan(stored).any()

    @pytest.mark.parametrize("scale", SCALES)
    @pytest.mark.parametrize("dtype", QUANTISED)
    def test_from_contiguous_is_append(self, dtype, scale):
        k, v = tokens(2, 9)
        pages, tables = sk.KVPages.from_contiguous(
            k, v, page_size=4, dtype=dtype, k_scale=SCALES[scale], v_scale=SCALES[scale]
        )
        appended = quantised_pool(dtype, scale, num_pages=6).append(
            k, v, tables, np.tile(np.arange(9, dtype=np.int32), (2, 1))
        )
        assert_same_bits(pages, appended)
        for got, pool, scales in zip(
            pages.to_contiguous(tables, np.array([9, 9], np.int32)),
            (pages.k_pages, pages.v_pages),
            (pages.k_scale, pages.v_scale),
            strict=True,
        ):
            values = dequantised(pool, scales).reshape(2, 12, *pool.shape[2:])
            np.testing.assert_allclose(got[:, :9], values[:, :9], rtol=1e-6)

    @pytest.mark.parametrize("dtype", QUANTISED)
    @pytest.mark.parametrize("page", junk_entries(NUM_PAGES))
    def test_a_live_page_outside_the_pool_is_nan(self, dtype, page):
        tables = np.array([[5, page, 2]], np.int32)
        for got in quantised_pool(dtype, "token").to_contiguous(tables, np.array([12], np.int32)):
            assert np.isnan(got).all(axis=(2, 3))[0].tolist() == [False] * 4 + [True] * 4 + [False] * 4

    def test_two_kinds_of_scale_in_buffers_of_their_own(self):
        """One array given for both: donated, they could not be one buffer, nor the caller's."""
        scale = jnp.array([0.5, 2.0], jnp.float32)
        pages = sk.KVPages.init(
            num_pages=4, page_size=4, num_kv_heads=2, head_dim=8, dtype="int8", k_scale=scale, v_scale=scale
        )
        k = jnp.ones((1, 2, 8))
        pages = jax.jit(sk.KVPages.write, donate_argnums=0)(pages, k, k, jnp.zeros(1, jnp.int32))
        assert_same_bits((pages.k_scale, pages.v_scale), (scale, scale))
        mixed = sk.KVPages.init(
            num_pages=4, page_size=4, num_kv_heads=2, head_dim=8, dtype="int8", k_scale="per_token", v_scale=0.25
        )
        assert [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(mixed)] == [
            ".k_pages",
            ".v_pages",
            ".k_scale",
            ".v_scale",
        ]
        assert (mixed.k_scale.shape, mixed.v_scale.shape) == ((4, 4, 2), ())

    def test_a_dtype_for_contiguous_pages_that_are_not_quantised(self):
        k, v = tokens(2, 6)
        pages, _ = sk.KVPages.from_contiguous(k, v, page_size=4, dtype="bfloat16")
        assert_same_bits(pages, sk.KVPages.from_contiguous(k.astype("bfloat16"), v.astype("bfloat16"), page_size=4)[0])


def donated_append(dtype, num_tokens):
    """A compiled append into a pool of 1 MB or more, its arguments, and the bytes of the pool."""
    scale = "per_token" if dtype in QUANTISED else None
    pages = sk.KVPages.init(
        num_pages=512,
        page_size=16,
        num_kv_heads=2,
        head_dim=64,
        head_dim_v=32,
        dtype=dtype,
        k_scale=scale,
        v_scale=scale,
    )
    k = jnp.ones((4, num_tokens, 2, 64), "float32" if dtype in QUANTISED else dtype)
    v = k[..., :32]
    arguments = (pages, k, v, jnp.arange(32, dtype=jnp.int32).reshape(4, 8), jnp.zeros((4, num_tokens), jnp.int32))
    compiled = jax.jit(sk.KVPages.append, donate_argnums=0).lower(*arguments).compile()
    return compiled, arguments, sum(x.nbytes for x in jax.tree.leaves(pages))


class TestDonation:
    @pytest.mark.parametrize("num_tokens", [1, 16])
    @pytest.mark.parametrize("dtype", [*DTYPES, *QUANTISED])
    def test_append_writes_in_place(self, dtype, num_tokens):
        compiled, _, pool_bytes = donated_append(dtype, num_tokens)
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= pool_bytes
        if not copies_pools(dtype):
            assert memory.temp_size_in_bytes < pool_bytes / 10
        elif dtype in QUANTISED:
            # One copy of each pool, and none in a wider dtype.
            assert memory.temp_size_in_bytes < 1.1 * pool_bytes

    @pytest.mark.parametrize("dtype", [*DTYPES, *QUANTISED])
    def test_the_buffers_stay_the_same(self, dtype):
        compiled, (pages, *rest), _ = donated_append(dtype, 1)
        before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(pages)]
        after = compiled(pages, *rest)
        assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(after)] == before
        assert pages.k_pages.is_deleted()

    def test_a_scan_of_steps_is_the_steps(self):
        k, v = tokens(2, 10)
        tables = np.array([[5, 0, 2], [1, 8, 3]], np.int32)

        def step(pages, new):
            k, v, position = new
            return pages.append(k, v, tables, jnp.stack([position, position])), None

        news = (k.swapaxes(0, 1), v.swapaxes(0, 1), np.arange(10, dtype=np.int32))
        scanned, _ = jax.jit(lambda pages: jax.lax.scan(step, pages, news), donate_argnums=0)(filled())
        positions = np.tile(np.arange(10, dtype=np.int32), (2, 1))
        assert_same_bits(scanned, filled().append(k, v, tables, positions))


class TestPytree:
    def test_round_trip(self):
        pages = filled()
        leaves, tree = jax.tree.flatten(pages)
        assert [x.shape for x in leaves] == [pages.k_pages.shape, pages.v_pages.shape]
        again = jax.tree.unflatten(tree, leaves)
        assert isinstance(again, sk.KVPages)
        assert_same_bits(again, pages)

    def test_names(self):
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(filled())]
        assert paths == [".k_pages", ".v_pages"]

    def test_layers_stack_and_map(self):
        layers = jax.tree.map(lambda *x: jnp.stack(x), filled(seed=0), filled(seed=1))
        assert layers.k_pages.shape == (2, NUM_PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM)
        assert_same_bits(jax.tree.map(lambda x: x[1], layers), filled(seed=1))

    def test_through_jit_as_it_is(self):
        assert_same_bits(jax.jit(lambda pages: pages)(filled()), filled())

    def test_frozen(self):
        with pytest.raises(AttributeError):
            filled().k_pages = None


class TestPageAllocator:
    def test_hands_out_every_page_once_in_order(self):
        alloc = sk.PageAllocator(5)
        assert alloc.num_free == 5
        assert alloc.allocate(2) == [0, 1]
        assert alloc.allocate(0) == []
        assert alloc.allocate(3) == [2, 3, 4]
        assert alloc.num_free == 0
        assert repr(alloc) == "PageAllocator(num_pages=5, num_free=0)"

    def test_pages_come_back_in_the_order_of_their_freeing(self):
        alloc = sk.PageAllocator(4)
        alloc.allocate(4)
        alloc.free([2])
        alloc.free([0, 3])
        assert alloc.allocate(2) == [2, 0]
        alloc.free([1])
        assert alloc.allocate(2) == [3, 1]

    def test_freed_pages_queue_behind_those_never_used(self):
        alloc = sk.PageAllocator(3)
        alloc.free(alloc.allocate(1))
        assert alloc.allocate(3) == [1, 2, 0]

    def test_too_many_allocates_nothing(self):
        alloc = sk.PageAllocator(3)
        alloc.allocate(1)
        with pytest.raises(sk.OutOfPages, match="asked for 3 pages, 2 of 3 are free: free sequences, or make the pool"):
            alloc.allocate(3)
        assert alloc.num_free == 2
        assert alloc.allocate(2) == [1, 2]

    @pytest.mark.parametrize("pages", [[1, 3], [1, 1], [1, 0], [1, -1], [1, 4]], ids=str)
    def test_a_wrong_page_frees_nothing(self, pages):
        alloc = sk.PageAllocator(4)
        alloc.allocate(3)
        alloc.free([0])
        with pytest.raises(ValueError, match=r"page (3|1|0) is free already|page=(-1|4) is out of range"):
            alloc.free(pages)
        assert alloc.num_free == 2
        assert alloc.allocate(2) == [3, 0]

    @pytest.mark.parametrize("value", [True, 1.0, "1", None])
    def test_not_whole_numbers(self, value):
        alloc = sk.PageAllocator(4)
        with pytest.raises(TypeError, match=r"count=.* must be a static whole number"):
            alloc.allocate(value)
        with pytest.raises(TypeError, match=r"page=.* must be a static whole number"):
            alloc.free([value])
        with pytest.raises(TypeError, match=r"num_pages=.* must be a static whole number"):
            sk.PageAllocator(value)

    def test_out_of_range(self):
        with pytest.raises(ValueError, match="count=-1 is out of range"):
            sk.PageAllocator(4).allocate(-1)
        with pytest.raises(ValueError, match="num_pages=0 is out of range"):
            sk.PageAllocator(0)

    def test_numpy_integers_are_taken_and_python_ints_given(self):
        alloc = sk.PageAllocator(np.int64(4))
        pages = alloc.allocate(np.int32(2))
        assert [type(page) for page in pages] == [int, int]
        alloc.free(np.array(pages))
        assert alloc.num_free == 4

    @hypothesis.settings(derandomize=True, database=None, deadline=None, max_examples=100)
    @hypothesis.given(num_pages=st.integers(1, 12), data=st.data())
    def test_no_page_is_held_twice(self, num_pages, data):
        alloc, queue, held = sk.PageAllocator(num_pages), list(range(num_pages)), []
        for _ in range(data.draw(st.integers(1, 30))):
            if data.draw(st.booleans()):
                count = data.draw(st.integers(0, num_pages))
                if count > len(queue):
                    with pytest.raises(sk.OutOfPages):
                        alloc.allocate(count)
                else:
                    pages = alloc.allocate(count)
                    assert not set(pages) & set(held)
                    assert pages == queue[:count]
                    held += pages
                    del queue[:count]
            else:
                pages = data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []
                alloc.free(pages)
                queue += pages
                held = [page for page in held if page not in pages]
                if pages:
                    with pytest.raises(ValueError, match="is free already"):
                        alloc.free([pages[0]])
            assert alloc.num_free == len(queue) == num_pages - len(held)


def test_bits_of_the_untouched_slots_survive_a_cast():
    """A write may not pass the rest of the pool through another dtype: a signalling NaN would lose its bits."""
    patterns = np.arange(NUM_PAGES * PAGE_SIZE * KV_HEADS * HEAD_DIM, dtype=np.uint16) * 113
    k = jax.lax.bitcast_convert_type(jnp.asarray(patterns), jnp.bfloat16)
    pages = sk.KVPages(k.reshape(NUM_PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM), filled("bfloat16").v_pages)
    if copies_pools("bfloat16"):
        pytest.skip("this jaxlib writes bfloat16 through float32")
    got = pages.write(*tokens(1, dtype="bfloat16"), np.array([-1], np.int32))
    np.testing.assert_array_equal(bits(got.k_pages), bits(pages.k_pages))
