"""Public bug reports about pages, block tables and cache writes, as small cases. The ids are those of README.md."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import (
    FINE,
    POISON,
    QUANTISED,
    SPLITS,
    assert_ramp,
    assert_same_bits,
    bits,
    copies_pools,
    junk_entries,
    make_plan,
    ramp_paged,
    random_paged,
)

import splitk_jax as sk

DTYPES = ("float32", "bfloat16", "float16")
INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)


# B01: stale NaN or Inf in unused cache slots.

# No sequence owns page 0: whether a kernel reads on in the last page or falls back to page 0, it finds poison.
B01 = {
    "seq_lens": [13, 1, 4],
    "page_size": 4,
    "width": 8,
    "first_page": 1,
    "num_q_heads": 4,
    "num_kv_heads": 2,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize("dead", POISON)
@pytest.mark.parametrize("splits", SPLITS)
def test_b01_stale_nan_in_unused_slots(splits, dead):
    case = ramp_paged(**B01, dead=dead)
    plan = case.plan(splits, **FINE)
    assert sum(high > low for low, high in plan.split_bounds(13)) >= min(splits, 7)
    got = case.decode(plan)
    assert_ramp(got, [6.0, 0.0, 1.5], [13, 1, 4])
    assert_same_bits(got, ramp_paged(**B01, dead=0).decode(plan))


@pytest.mark.parametrize("dead", POISON)
def test_b01_stale_nan_inside_jit(dead):
    case = ramp_paged(**B01, dead=dead)
    assert_ramp(case.decode(case.plan(3, **FINE), jit=True), [6.0, 0.0, 1.5], [13, 1, 4])


@pytest.mark.parametrize("dead", POISON)
def test_b01_stale_nan_where_k_and_v_are_one_buffer(dead):
    case = ramp_paged(**B01, dead=dead)
    pool = jnp.asarray(case.v_pages)
    case = case.replace(k_pages=pool, v_pages=pool)
    assert_ramp(case.decode(case.plan(3, **FINE)), [6.0, 0.0, 1.5], [13, 1, 4])


@pytest.mark.parametrize("pool", ["k_pages", "v_pages"])
def test_b01_a_live_nan_shows_in_its_own_row(pool):
    """The other half of masking: what a sequence did store is not hidden, and no other row sees it."""
    case = random_paged([40, 1, 33], num_q_heads=4, num_kv_heads=2)
    plan = case.plan(3)
    pages = getattr(case, pool).copy()
    pages[case.block_tables[0, 2], 7] = np.nan
    got, clean = case.replace(**{pool: pages}).decode(plan), case.decode(plan)
    assert np.isnan(got[0][0]).all()
    assert_same_bits([x[1:] for x in got], [x[1:] for x in clean])


# B02: unused block-table entries hold junk.

B02 = {"seq_lens": [17, 1], "width": 8, "num_pages": 8}


@pytest.mark.parametrize("splits", SPLITS)
def test_b02_unused_entries_hold_junk(splits):
    results = []
    for entry in (0, *junk_entries(8)):
        case = ramp_paged(**B02, dead_entry=entry)
        results.append(case.decode(case.plan(splits)))
        assert_ramp(results[-1], [8.0, 0.0], [17, 1])
    for got in results[1:]:
        assert_same_bits(got, results[0])


@pytest.mark.parametrize("dead", POISON)
def test_b02_null_page_is_nan(dead):
    case = ramp_paged(**B02, first_page=1, dead_entry=0, dead=dead)
    assert not np.isfinite(case.v_pages[0].astype(np.float32)).any()
    assert_ramp(case.decode(case.plan(4)), [8.0, 0.0], [17, 1])


def test_b02_junk_inside_jit():
    case = ramp_paged(**B02, dead_entry=INT32_MAX)
    assert_ramp(case.decode(case.plan(4), jit=True), [8.0, 0.0], [17, 1])


@pytest.mark.parametrize("splits", SPLITS)
def test_b02_a_live_entry_outside_the_pool_is_nan_and_nothing_else(splits):
    # Every page is finite: a clamped or wrapped id would give a quiet answer.
    case = ramp_paged(**B02, dead=3.0)
    plan = case.plan(splits)
    clean = case.decode(plan)
    for entry in junk_entries(8):
        for column in (0, 1):
            tables = case.block_tables.copy()
            tables[0, column] = entry
            out, lse = case.replace(block_tables=tables).decode(plan)
            assert np.isnan(out[0]).all()
            assert np.isnan(lse[0]).all()
            assert_same_bits([out[1], lse[1]], [clean[0][1], clean[1][1]])


# B03: a padding slot of -1 overwrites the last cache slot.


def filled_pages(dtype="float32", fill=7.0, num_pages=4, page_size=16):
    shape = (num_pages, page_size, 2, 8)
    return sk.KVPages(jnp.full(shape, fill, dtype), jnp.full((*shape[:-1], 4), fill, dtype))


def rows(values, dtype="float32"):
    values = jnp.asarray(values, dtype)[..., None, None]
    lead = values.shape[:-2]
    return jnp.broadcast_to(values, (*lead, 2, 8)), jnp.broadcast_to(values + 100, (*lead, 2, 4))


def assert_only_written(pages, written, fill=7.0):
    """Checks every slot of the pool; `written` is slot -> value."""
    for pool, offset in ((pages.k_pages, 0), (pages.v_pages, 100)):
        expected = np.full((pages.num_pages * pages.page_size, *pool.shape[2:]), fill, pool.dtype)
        for slot, value in written.items():
            expected[slot] = value + offset
        np.testing.assert_array_equal(bits(pool), bits(expected.reshape(pool.shape)))


write = jax.jit(sk.KVPages.write, donate_argnums=0)
append = jax.jit(sk.KVPages.append, donate_argnums=0)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "donated"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slot", [-1, 64, -64, -59, INT32_MAX, INT32_MIN])
def test_b03_a_slot_outside_the_pool_writes_nothing(slot, dtype, jit):
    k, v = rows([1.0, np.nan], dtype)
    pages = (write if jit else sk.KVPages.write)(filled_pages(dtype), k, v, jnp.array([5, slot], jnp.int32))
    assert_only_written(pages, {5: 1.0})


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "donated"])
def test_b03_of_equal_slots_the_last_row_wins(jit):
    k, v = rows([1.0, 2.0])
    pages = (write if jit else sk.KVPages.write)(filled_pages(), k, v, jnp.array([9, 9], jnp.int32))
    assert_only_written(pages, {9: 2.0})


def test_b03_many_equal_slots():
    values = np.arange(50.0)
    slots = np.random.default_rng(0).integers(-3, 12, 50).astype(np.int32)
    k, v = rows(values)
    last = {int(slot): value for slot, value in zip(slots, values, strict=True) if slot >= 0}
    assert_only_written(write(filled_pages(), k, v, slots), last)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "donated"])
@pytest.mark.parametrize(
    ("tables", "positions", "written"),
    [
        ([[2, 0], [1, 3]], [[17, -1], [-1, 31]], {1: 1.0, 63: 4.0}),
        ([[2, 0], [1, 3]], [[15, -16], [INT32_MIN, 0]], {47: 1.0, 16: 4.0}),
        ([[2, 0], [1, 3]], [[16, 32], [33, INT32_MAX]], {0: 1.0}),
        ([[2, -1], [4, 3]], [[0, 16], [0, 16]], {32: 1.0, 48: 4.0}),
        ([[INT32_MAX, 0], [INT32_MIN, 3]], [[0, 16], [0, 16]], {0: 2.0, 48: 4.0}),
        ([[2**28, 0], [-(2**28), 3]], [[1, 16], [2, 16]], {0: 2.0, 48: 4.0}),
        ([[2, 0], [2, 0]], [[3, 3], [4, 3]], {35: 4.0, 36: 3.0}),
    ],
    ids=[
        "padding",
        "negative",
        "past-the-table",
        "page-outside",
        "page-far-outside",
        "page-whose-slot-wraps",
        "shared-page",
    ],
)
def test_b03_append_writes_live_positions_alone(tables, positions, written, jit):
    k, v = rows([[1.0, 2.0], [3.0, 4.0]])
    call = append if jit else sk.KVPages.append
    pages = call(filled_pages(), k, v, np.array(tables, np.int32), np.array(positions, np.int32))
    assert_only_written(pages, written)


def test_b03_padding_rows_do_not_reach_the_null_page():
    """A padding row of NaN, whose table is all zeros, then a read through that table's padding."""
    k, v = rows([np.nan, 1.0])
    tables = np.array([[0, 0], [3, 0]], np.int32)
    pages = append(filled_pages(fill=0.0), k, v, tables, np.array([-1, 0], np.int32))
    assert_only_written(pages, {48: 1.0}, fill=0.0)


# B04: writing large values to a quantised cache.


def read_back(values, dtype, scale=None, rows_dtype="float32"):
    """(stored, read): one token for each value, written and read by the library."""
    values = jnp.asarray(values, rows_dtype)
    k = jnp.broadcast_to(values[:, None, None], (len(values), 2, 8))
    pages = sk.KVPages.init(
        num_pages=1, page_size=16, num_kv_heads=2, head_dim=8, dtype=dtype, k_scale=scale, v_scale=scale
    )
    pages = write(pages, k, -k, jnp.arange(len(values), dtype=jnp.int32))
    read, negated = pages.to_contiguous(np.zeros((1, 1), np.int32), np.array([len(values)], np.int32))
    np.testing.assert_array_equal(read, -negated)
    return [np.asarray(x).astype(np.float32)[0, : len(values), 1, 3] for x in (pages.k_pages, read)]


@pytest.mark.parametrize("rows_dtype", DTYPES)
@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        ("float8_e4m3fn", [448, 465, 500, 1000, -1000], [448, 448, 448, 448, -448]),
        ("float8_e5m2", [57344, 62000, 65504, -65504], [57344, 57344, 57344, -57344]),
        ("int8", [127, 128, 1000, -128, -1000], [127, 127, 127, -127, -127]),
    ],
)
def test_b04_large_values_saturate(dtype, values, expected, rows_dtype):
    np.testing.assert_array_equal(read_back(values, dtype, rows_dtype=rows_dtype)[0], expected)


@pytest.mark.parametrize(("dtype", "most"), [("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0), ("int8", 127.0)])
def test_b04_infinities_saturate_and_nan_stays(dtype, most):
    nan = 0.0 if dtype == "int8" else np.nan
    stored, _ = read_back([np.inf, -np.inf, np.nan, 3e38, 1.0], dtype)
    np.testing.assert_array_equal(stored, [most, -most, nan, most, 1.0])


@pytest.mark.parametrize("scale", [0.5, np.full(2, 0.5, np.float32)], ids=["number", "heads"])
def test_b04_a_scale_before_saturation(scale):
    stored, read = read_back([300.0, 100.0], "float8_e4m3fn", scale)
    np.testing.assert_array_equal(stored, [448.0, 192.0])  # 200 is halfway between 192 and 208
    np.testing.assert_array_equal(read, [224.0, 96.0])


@pytest.mark.parametrize("dtype", ["uint8", "int4", "float8_e4m3b11fnuz", "float4_e2m1fn"])
def test_b04_a_dtype_whose_limits_nobody_looked_at_is_refused(dtype):
    for call in (
        lambda: sk.KVPages.init(num_pages=4, page_size=16, num_kv_heads=2, head_dim=8, dtype=dtype),
        lambda: make_plan(dtype=dtype, q_dtype="float32"),
    ):
        with pytest.raises(NotImplementedError, match=f"dtype={dtype}: KV quantised so is served by no backend"):
            call()


@pytest.mark.parametrize("value", [70000.0, -np.inf, np.nan])
def test_b04_a_cast_on_write_keeps_what_the_dtype_cannot_hold_visible(value):
    k, v = rows([value])
    pages = sk.KVPages.write(filled_pages("float16"), k, v, np.array([5], np.int32))
    stored = np.asarray(pages.k_pages).reshape(64, -1)[5].astype(np.float32)
    np.testing.assert_array_equal(stored, np.float32(np.float16(np.inf) if value == 70000.0 else value))


# B05: rows without tokens.

B05 = {"num_q_heads": 8, "num_kv_heads": 2, "width": 4, "first_page": 1, "num_pages": 9, "dtype": "bfloat16"}


@pytest.mark.parametrize("dead", POISON)
@pytest.mark.parametrize("splits", [1, 4, 64, "fixed_size"])
def test_b05_row_of_length_zero(splits, dead):
    case = ramp_paged([0, 1, 17, 64], **B05, dead=dead)
    policy = {"split_size": 16} if splits == "fixed_size" else {}
    out, lse = case.decode(case.plan(splits, **policy))
    assert_ramp((out, lse), [0.0, 0.0, 8.0, 31.5], [0, 1, 17, 64])
    np.testing.assert_array_equal(bits(out[0]), 0)
    np.testing.assert_array_equal(lse[0], -np.inf)


def test_b05_inside_jit():
    case = ramp_paged([0, 1, 17, 64], **B05)
    assert_ramp(case.decode(case.plan(4), jit=True), [0.0, 0.0, 8.0, 31.5], [0, 1, 17, 64])


@pytest.mark.parametrize("batch", [4, 1])
def test_b05_whole_batch_of_length_zero(batch):
    case = ramp_paged([0] * batch, **B05, dead_entry=0)
    out, lse = case.decode(case.plan(4))
    np.testing.assert_array_equal(bits(out), 0)
    np.testing.assert_array_equal(lse, -np.inf)


@pytest.mark.parametrize("seq_len", [-1, INT32_MIN, 65, INT32_MAX])
def test_b05_a_length_that_cannot_be_is_nan(seq_len):
    case = ramp_paged([0, 1, 17, 64], **B05, dead=3.0, dead_entry=0)
    plan = case.plan(4)
    clean = case.decode(plan)
    seq_lens = case.seq_lens.copy()
    seq_lens[2] = seq_len
    out, lse = case.replace(seq_lens=seq_lens).decode(plan)
    assert np.isnan(out[2]).all()
    assert np.isnan(lse[2]).all()
    others = [0, 1, 3]
    assert_same_bits([out[others], lse[others]], [clean[0][others], clean[1][others]])


# B08: page addresses past 32 bits.


def available_bytes():
    """Memory that can be had without swapping; 0 where that is not known."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        return 0
    return 1024 * int(found[1]) if found else 0


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_b08_page_addresses_past_2_to_the_31_elements(dtype):
    """Writes and reads around element 2**31 of a pool, against the same tokens in a pool of 8 pages.

    A quantised pool has a scale of each token and head beside it.
    """
    if available_bytes() < 12 * 2**30:
        pytest.skip("needs 12 GiB of available memory")
    small = random_paged(
        [60, 40],
        num_q_heads=8,
        num_kv_heads=8,
        head_dim=128,
        width=4,
        num_pages=8,
        dead=0.0,
        dead_entry=0,
        dtype="float16",
    )
    num_pages, edge = 2**17 + 8, 2**17
    page_elements = small.k_pages[0].size
    assert edge * page_elements == 2**31
    used = np.array([*small.block_tables[0], *small.block_tables[1, :3]])
    # Both sides of the edge, and the last page.
    places = np.array([edge - 1, edge, edge + 1, num_pages - 1, edge - 2, edge + 2, 0])
    moved = np.zeros(8, np.int32)
    moved[used] = places
    tables = moved[small.block_tables]
    tables[1, 3] = -1

    # V of one lane: the pool that is written is K's alone.
    k = small.k_pages[used].reshape(-1, 8, 128)

    def written(num_pages, places):
        pages = sk.KVPages.init(
            num_pages=num_pages,
            page_size=16,
            num_kv_heads=8,
            head_dim=128,
            head_dim_v=1,
            dtype=dtype,
            k_scale="per_token" if dtype in QUANTISED else None,
        )
        slots = (places[:, None] * 16 + np.arange(16)).reshape(-1).astype(np.int32)
        arguments = (pages, k, np.zeros((len(slots), 8, 1), np.float16), slots)
        writer = write.lower(*arguments).compile()
        # Before anything runs: a copy of the pool in another dtype might not fit.
        copies = pages.k_pages.nbytes if copies_pools(dtype) else 0
        assert writer.memory_analysis().temp_size_in_bytes < copies + 2**27
        return writer(*arguments)

    here, there = written(8, used), written(num_pages, places)
    for page, place in zip(used, places, strict=True):
        assert_same_bits(there.k_pages[place], here.k_pages[page])
        if here.k_scale is not None:
            assert_same_bits(there.k_scale[place], here.k_scale[page])

    small = small.replace(k_pages=here.k_pages, v_pages=here.k_pages)
    big = small.replace(k_pages=there.k_pages, v_pages=there.k_pages, block_tables=tables)
    plan = small.plan(3)
    reader = jax.jit(
        lambda scale, *arrays: sk.paged_decode_attention(
            *arrays, plan=plan, k_scale=scale, v_scale=scale, return_lse=True
        )
    )
    compiled = reader.lower(there.k_scale, *big.arrays).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**27
    assert_same_bits(
        compiled(there.k_scale, *big.arrays), small.decode(plan, k_scale=here.k_scale, v_scale=here.k_scale)
    )


# B25: donation and aliasing of the cache.

B25 = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 80}


def decode_step(pages, q, k, v, block_tables, seq_lens, *, plan):
    """Appends one token to each sequence and attends; (pages, out, new lengths)."""
    pages = pages.append(k, v, block_tables, seq_lens)
    seq_lens = seq_lens + 1
    out = sk.paged_decode_attention(q, pages.k_pages, pages.v_pages, block_tables, seq_lens, plan=plan)
    return pages, out, seq_lens


def python_loop(pages, q, k, v, block_tables, seq_lens, *, plan):
    out = jnp.zeros_like(q[0])
    for i in range(len(q)):
        pages, out, seq_lens = decode_step(pages, q[i], k[i], v[i], block_tables, seq_lens, plan=plan)
    return pages, out, seq_lens


def scanned(pages, q, k, v, block_tables, seq_lens, *, plan):
    def body(carry, token):
        pages, _, seq_lens = carry
        return decode_step(pages, *token, block_tables, seq_lens, plan=plan), None

    return lax.scan(body, (pages, jnp.zeros_like(q[0]), seq_lens), (q, k, v))[0]


def while_looped(pages, q, k, v, block_tables, seq_lens, *, plan):
    def body(carry):
        i, pages, _, seq_lens = carry
        return i + 1, *decode_step(pages, q[i], k[i], v[i], block_tables, seq_lens, plan=plan)

    start = (jnp.int32(0), pages, jnp.zeros_like(q[0]), seq_lens)
    return lax.while_loop(lambda carry: carry[0] < q.shape[0], body, start)[1:]


def appended(pages, q, k, v, block_tables, seq_lens, *, plan):
    del q, plan
    return pages.append(k[0], v[0], block_tables, seq_lens)


def stepped(pages, q, k, v, block_tables, seq_lens, *, plan):
    return decode_step(pages, q[0], k[0], v[0], block_tables, seq_lens, plan=plan)


def step_inputs(dtype, *, num_pages, steps=10):
    """Pages of zeros and the arrays of `steps` decode steps of three sequences that cross splits and pages."""
    case = random_paged([30, 0, 61], **B25, width=8, num_pages=24, dtype=dtype)
    pages = sk.KVPages.init(num_pages=num_pages, page_size=16, num_kv_heads=2, head_dim=80, dtype=dtype)
    q, k, v = (
        jax.random.normal(key, (steps, 3, heads, 80), dtype)
        for key, heads in zip(jax.random.split(jax.random.key(0), 3), (4, 2, 2), strict=True)
    )
    tables = jnp.arange(24, dtype=jnp.int32).reshape(3, 8)
    return case.plan(3), (pages, q, k, v, tables, jnp.asarray(case.seq_lens))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [appended, stepped, scanned, while_looped])
def test_b25_a_donated_step_writes_in_place(step, dtype):
    plan, arguments = step_inputs(dtype, num_pages=2048)
    pool_bytes = arguments[0].k_pages.nbytes
    compiled = jax.jit(step, static_argnames="plan", donate_argnums=0).lower(*arguments, plan=plan).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * pool_bytes
    if copies_pools(dtype):
        return
    assert memory.temp_size_in_bytes < pool_bytes / 4
    shape = re.escape(",".join(map(str, arguments[0].k_pages.shape)))
    assert not re.search(rf"\[{shape}\]\S* copy\(", compiled.as_text())


@pytest.mark.parametrize("dtype", DTYPES)
def test_b25_attention_alone_copies_no_pool(dtype):
    """Undonated too: a copy of the pool, in its own or another dtype, would cost its size in every step."""
    plan, (pages, q, _, _, tables, seq_lens) = step_inputs(dtype, num_pages=2048)
    call = jax.jit(sk.paged_decode_attention, static_argnames="plan")
    compiled = call.lower(q[0], pages.k_pages, pages.v_pages, tables, seq_lens, plan=plan).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < pages.k_pages.nbytes / 4


@pytest.mark.parametrize("loop", [scanned, while_looped])
def test_b25_a_compiled_loop_gives_what_a_python_loop_gives(loop):
    plan, arguments = step_inputs("float32", num_pages=64)
    expected = python_loop(*arguments, plan=plan)
    got = jax.jit(loop, static_argnames="plan", donate_argnums=0)(*arguments, plan=plan)
    assert_same_bits(got, expected)


def test_b25_old_pages_are_gone_after_a_donated_step():
    old = filled_pages()
    k, v = rows([1.0])
    new = write(old, k, v, np.array([5], np.int32))
    assert_only_written(new, {5: 1.0})
    for pool in (old.k_pages, old.v_pages):
        with pytest.raises(RuntimeError, match="deleted"):
            np.asarray(pool)
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        write(old, k, v, np.array([5], np.int32))


def test_b25_old_pages_stay_without_donation():
    old = filled_pages()
    k, v = rows([1.0])
    assert_only_written(sk.KVPages.write(old, k, v, np.array([5], np.int32)), {5: 1.0})
    assert_only_written(old, {})


def test_b25_one_array_as_k_and_v_cannot_be_donated():
    z = jnp.zeros((4, 16, 2, 8))
    k, _ = rows([1.0])
    with pytest.raises(Exception, match="donate the same buffer twice"):
        write(sk.KVPages(z, z), k, k, np.array([5], np.int32))
    # Undonated, each half is written on its own.
    pages = sk.KVPages(z, z).write(k, k + 1, np.array([5], np.int32))
    assert (float(pages.k_pages[0, 5, 0, 0]), float(pages.v_pages[0, 5, 0, 0])) == (1.0, 2.0)


def test_b25_a_new_pool_has_two_buffers():
    pages = sk.KVPages.init(num_pages=4, page_size=16, num_kv_heads=2, head_dim=8, dtype="float32")
    k, v = rows([1.0])
    write(pages, k, jnp.zeros((1, 2, 8)) + v[..., :1], np.array([5], np.int32))


# B29: exactly full pages, and spare pages in the table.


@pytest.mark.parametrize("splits", SPLITS)
def test_b29_spare_pages_are_not_attended(splits):
    case = ramp_paged([15, 16, 17, 32, 48], width=4, dead=1000.0, dead_entry=None)
    assert_ramp(case.decode(case.plan(splits)), [7.0, 7.5, 8.0, 15.5, 23.5], [15, 16, 17, 32, 48])


def test_b29_a_full_table_and_one_token_more():
    case = ramp_paged([64, 63, 64, 1, 0], width=4, dead=1000.0, dead_entry=None)
    plan = case.plan(4)
    full = case.decode(plan)
    assert_ramp(full, [31.5, 31.0, 31.5, 0.0, 0.0], [64, 63, 64, 1, 0])
    out, lse = case.replace(seq_lens=case.seq_lens + np.int32([1, 0, 0, 0, 0])).decode(plan)
    assert np.isnan(out[0]).all()
    assert np.isnan(lse[0]).all()
    assert_same_bits([out[1:], lse[1:]], [full[0][1:], full[1][1:]])
