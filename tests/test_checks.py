"""Every refusal: which argument, what was got, what is accepted; and that a wrong call never reaches the compiler."""

import contextlib
import dataclasses
import itertools
import traceback
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import make_plan

import splitk_jax as sk
from splitk_jax.plan import MAX_TOKENS

BATCH, Q_HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM_V, PAGE_SIZE, NUM_PAGES, WIDTH = 2, 4, 2, 8, 6, 4, 6, 3
HUGE_INT = 10**400

PLAN = make_plan(
    2,
    num_q_heads=Q_HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    head_dim_v=HEAD_DIM_V,
    page_size=PAGE_SIZE,
    max_decode_seqs=BATCH,
)


def zeros(*shape, dtype="float32"):
    return np.zeros(shape, dtype)


def ints(*shape):
    return zeros(*shape, dtype="int32")


DECODE: dict[str, Any] = {
    "q": zeros(BATCH, Q_HEADS, HEAD_DIM),
    "k_pages": zeros(NUM_PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM),
    "v_pages": zeros(NUM_PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM_V),
    "block_tables": ints(BATCH, WIDTH),
    "seq_lens": ints(BATCH),
    "plan": PLAN,
}


def decode(**arguments):
    arguments = DECODE | arguments
    arrays = [arguments.pop(name) for name in ("q", "k_pages", "v_pages", "block_tables", "seq_lens")]
    return sk.paged_decode_attention(*arrays, **arguments)


@contextlib.contextmanager
def refused(error, match):
    """Expects `error`, raised by the package's own code: not by JAX, numpy or the compiler."""
    with pytest.raises(error, match=match) as caught:
        yield
    raised_in = Path(traceback.extract_tb(caught.value.__traceback__)[-1].filename)
    assert raised_in.is_relative_to(Path(sk.__file__).parent), f"raised in {raised_in}"


def test_the_accepted_call_is_accepted():
    assert decode().shape == (BATCH, Q_HEADS, HEAD_DIM_V)


REFUSED = [
    ({"q": None}, TypeError, "q must be a jax or numpy array, got NoneType"),
    ({"q": [[1.0]]}, TypeError, "q must be a jax or numpy array, got list"),
    ({"q": zeros(BATCH, HEAD_DIM)}, ValueError, r"q must be \[batch, num_q_heads, head_dim\] or .*\[2, 8\]"),
    ({"q": zeros(1, 1, 1, 4, 8)}, ValueError, r"q must be .* got shape \[1, 1, 1, 4, 8\]"),
    ({"q": zeros(BATCH, 3, HEAD_DIM)}, ValueError, r"q.shape\[1\]=3 must be 4: expected \[2, 4, 8\]"),
    ({"q": zeros(BATCH, 4, 16)}, ValueError, r"q.shape\[2\]=16 must be 8"),
    ({"q": zeros(BATCH, 0, 4, 8)}, ValueError, r"q.shape\[1\]=0 must be at least 1: .*q_len"),
    ({"q": zeros(BATCH, 2, 3, 8)}, ValueError, r"q.shape\[2\]=3 must be 4: expected \[2, q_len, 4, 8\]"),
    ({"q": zeros(3, 4, 8)}, ValueError, r"q.shape\[0\]=3 is above the plan's row capacity 2: plan with"),
    ({"q": zeros(BATCH, 4, 8, dtype="bfloat16")}, TypeError, "q.dtype=bfloat16 must be float32; it is not"),
    ({"q": zeros(BATCH, 4, 8, dtype="float64")}, TypeError, "q.dtype=float64 must be float32; it is not cast"),
    ({"k_pages": zeros(NUM_PAGES, 4, 2)}, ValueError, r"k_pages must be \[num_pages, 4, 2, 8\], got .* rank 3"),
    ({"k_pages": zeros(0, 4, 2, 8)}, ValueError, r"k_pages.shape\[0\]=0 must be at least 1"),
    ({"k_pages": zeros(NUM_PAGES, 8, 2, 8)}, ValueError, r"k_pages.shape\[1\]=8 must be 4"),
    ({"k_pages": zeros(NUM_PAGES, 4, 4, 8)}, ValueError, r"k_pages.shape\[2\]=4 must be 2"),
    ({"k_pages": zeros(NUM_PAGES, 4, 2, 6)}, ValueError, r"k_pages.shape\[3\]=6 must be 8"),
    ({"k_pages": zeros(NUM_PAGES, 4, 2, 8, dtype="float16")}, TypeError, "k_pages.dtype=float16 must be float32"),
    ({"k_pages": zeros(NUM_PAGES, 4, 2, 8, dtype="int8")}, TypeError, "k_pages.dtype=int8 must be float32"),
    ({"v_pages": zeros(NUM_PAGES + 1, 4, 2, 6)}, ValueError, r"v_pages.shape\[0\]=7 must be 6"),
    ({"v_pages": zeros(NUM_PAGES, 4, 2, 8)}, ValueError, r"v_pages.shape\[3\]=8 must be 6"),
    ({"v_pages": zeros(NUM_PAGES, 4, 2, 6, dtype="bfloat16")}, TypeError, "v_pages.dtype=bfloat16 must be float32"),
    ({"block_tables": ints(BATCH)}, ValueError, r"block_tables must be \[2, max_pages_per_seq\]"),
    ({"block_tables": ints(1, WIDTH)}, ValueError, r"block_tables.shape\[0\]=1 must be 2"),
    ({"block_tables": ints(BATCH, 0)}, ValueError, r"block_tables.shape\[1\]=0 must be at least 1"),
    ({"block_tables": zeros(BATCH, WIDTH)}, TypeError, "block_tables.dtype=float32 must be int32; it is not cast"),
    ({"block_tables": zeros(BATCH, WIDTH, dtype="int64")}, TypeError, "block_tables.dtype=int64 must be int32"),
    ({"block_tables": zeros(BATCH, WIDTH, dtype="uint32")}, TypeError, "block_tables.dtype=uint32 must be int32"),
    ({"seq_lens": ints(BATCH, 1)}, ValueError, r"seq_lens must be \[2\], got shape \[2, 1\]"),
    ({"seq_lens": ints(3)}, ValueError, r"seq_lens.shape\[0\]=3 must be 2"),
    ({"seq_lens": zeros(BATCH, dtype="int16")}, TypeError, "seq_lens.dtype=int16 must be int32"),
    ({"seq_lens": (1, 2)}, TypeError, "seq_lens must be a jax or numpy array, got tuple"),
    ({"sm_scale": 0}, ValueError, "sm_scale=0 must be finite and above 0"),
    ({"sm_scale": -1.0}, ValueError, "sm_scale=-1.0 must be finite and above 0"),
    ({"sm_scale": float("nan")}, ValueError, "sm_scale=nan must be finite and above 0"),
    ({"sm_scale": np.float32("inf")}, ValueError, "sm_scale=.*inf.* must be finite and above 0"),
    ({"sm_scale": 1e300}, ValueError, r"sm_scale=1e\+300 must be finite and above 0 as a float32"),
    ({"sm_scale": 1e-300}, ValueError, "sm_scale=1e-300 must be finite and above 0 as a float32"),
    ({"sm_scale": HUGE_INT}, ValueError, "sm_scale=1000.* must be finite"),
    ({"sm_scale": True}, TypeError, "sm_scale=True must be a number or an array of rank 0, got bool"),
    ({"sm_scale": "1"}, TypeError, "sm_scale='1' must be a number"),
    ({"sm_scale": 1j}, TypeError, "sm_scale=1j must be a number"),
    ({"sm_scale": zeros(1)}, ValueError, r"sm_scale must be a number or an array of rank 0, got shape \[1\]"),
    ({"sm_scale": np.int32(1)}, TypeError, "sm_scale.dtype=int32 must be a float"),
    ({"window": 0}, ValueError, "window=0 is out of range: accepted is a whole number from 1"),
    ({"window": -1}, ValueError, "window=-1 is out of range"),
    ({"window": 2**31}, ValueError, "window=2147483648 is out of range: .* to 2147483647"),
    ({"window": 4.0}, TypeError, "window=4.0 must be a static whole number, got float"),
    ({"window": True}, TypeError, "window=True must be a static whole number, got bool"),
    ({"window": jnp.float32(4)}, TypeError, "window=.* must be a static whole number"),
    ({"softcap": -1}, ValueError, "softcap=-1 must be finite and above 0.*None or 0 is no cap"),
    ({"softcap": float("nan")}, ValueError, "softcap=nan must be finite"),
    ({"softcap": float("inf")}, ValueError, "softcap=inf must be finite"),
    ({"softcap": 1e300}, ValueError, r"softcap=1e\+300 must be finite and above 0 as a float32"),
    ({"softcap": 1e-300}, ValueError, "softcap=1e-300 must be finite and above 0 as a float32"),
    ({"softcap": HUGE_INT}, ValueError, "softcap=1000.* must be finite"),
    ({"softcap": True}, TypeError, "softcap=True must be a static number or None, got bool"),
    ({"softcap": jnp.float32(1)}, TypeError, "softcap=.* must be a static number or None"),
    ({"sinks": [0.0] * 4}, TypeError, "sinks must be a jax or numpy array, got list"),
    ({"sinks": zeros(KV_HEADS)}, ValueError, r"sinks.shape\[0\]=2 must be 4"),
    ({"sinks": zeros(4, 1)}, ValueError, r"sinks must be \[4\], got shape \[4, 1\] of rank 2"),
    ({"sinks": zeros(4, dtype="bfloat16")}, TypeError, "sinks.dtype=bfloat16 must be float32"),
    ({"k_scale": 1.0}, ValueError, r"k_scale is for quantised pages \(.*\), got pages of float32: leave it out"),
    ({"v_scale": zeros()}, ValueError, r"v_scale is for quantised pages \(.*\), got pages of float32: leave it out"),
    ({"plan": None}, TypeError, r"plan must be a DecodePlan \(policy.plan\(...\)\), a static value, got NoneType"),
    ({"plan": {"num_splits": 2}}, TypeError, "plan must be a DecodePlan .* got dict"),
    ({"plan": [PLAN]}, TypeError, "plan must be a DecodePlan .* got list"),
    ({"plan": PLAN.policy}, TypeError, "plan must be a DecodePlan .* got Policy"),
    ({"plan": jnp.int32(2)}, TypeError, "plan must be a DecodePlan"),
]


EIGHT_BIT = dataclasses.replace(PLAN, kv_dtype="float8_e4m3fn")
EIGHT_BIT_DECODE = {
    "plan": EIGHT_BIT,
    "k_pages": DECODE["k_pages"].astype("float8_e4m3fn"),
    "v_pages": DECODE["v_pages"].astype("float8_e4m3fn"),
}
REFUSED_SCALES = [
    (zeros(1), ValueError, r"k_scale must be a number, \[num_kv_heads\]=\[2\] or .*=\[6, 4, 2\], got shape \[1\]"),
    (zeros(Q_HEADS), ValueError, r"k_scale must be .* got shape \[4\]"),
    (zeros(NUM_PAGES, PAGE_SIZE), ValueError, r"k_scale must be .* got shape \[6, 4\]"),
    (zeros(NUM_PAGES + 1, PAGE_SIZE, KV_HEADS), ValueError, r"k_scale must be .* got shape \[7, 4, 2\]"),
    (zeros(2, dtype="bfloat16"), TypeError, "k_scale.dtype=bfloat16 must be float32; it is not cast for you"),
    (np.float32(0), ValueError, "k_scale=.* must be finite and above 0"),
    (ints(2), TypeError, "k_scale.dtype=int32 must be float32"),
    (zeros(2, dtype="float64"), TypeError, "k_scale.dtype=float64 must be float32; it is not cast"),
    (0, ValueError, "k_scale=0 must be finite and above 0"),
    (-1.0, ValueError, "k_scale=-1.0 must be finite and above 0"),
    (float("nan"), ValueError, "k_scale=nan must be finite and above 0"),
    (1e300, ValueError, r"k_scale=1e\+300 must be finite and above 0 as a float32"),
    (True, TypeError, "k_scale=True must be a number"),
    ("per_token", TypeError, "k_scale='per_token' must be a number or a jax or numpy array of float32, got str"),
    ([1.0, 1.0], TypeError, "k_scale=.* must be a number or a jax or numpy array of float32, got list"),
]


class TestDecode:
    @pytest.mark.parametrize(("scale", "error", "match"), REFUSED_SCALES, ids=range(len(REFUSED_SCALES)))
    def test_refuses_scales(self, scale, error, match):
        with refused(error, match):
            decode(**EIGHT_BIT_DECODE, k_scale=scale)
        with refused(error, match.replace("k_scale", "v_scale")):
            decode(**EIGHT_BIT_DECODE, v_scale=scale)

    def test_accepts_scales_of_two_kinds_and_traced(self):
        assert decode(**EIGHT_BIT_DECODE, k_scale=0.5, v_scale=zeros(NUM_PAGES, PAGE_SIZE, KV_HEADS)).shape
        call = jax.jit(lambda scale: decode(**EIGHT_BIT_DECODE, k_scale=scale, v_scale=scale[None].repeat(2)))
        assert call(jnp.float32(0.5)).shape == (BATCH, Q_HEADS, HEAD_DIM_V)

    @pytest.mark.parametrize("name", ["k_scale", "v_scale"])
    def test_the_mosaic_backend_refuses_scales_of_tokens_that_it_cannot_load_and_names_who_serves_them(self, name):
        policy = sk.load_policy("h200", environ={}, ahead_of_time=True)
        plan = policy.plan(**SHAPE, kv_dtype="int8")
        pages = np.zeros((3, 16, 2, 64), np.int8)
        arrays = np.zeros((4, 8, 64), "bfloat16"), pages, pages, np.zeros((4, 2), np.int32), np.ones(4, np.int32)
        with refused(
            NotImplementedError, rf"^num_kv_heads=2 with .*{name}.* for each token: .* whole numbers of 4; .*KERNEL=ref"
        ):
            sk.paged_decode_attention(*arrays, plan=plan, **{name: zeros(3, 16, 2)})

    @pytest.mark.parametrize(
        ("arguments", "error", "match"),
        [pytest.param(*case, id=f"{next(iter(case[0]))}-{i}") for i, case in enumerate(REFUSED)],
    )
    def test_refuses(self, arguments, error, match):
        with refused(error, match):
            decode(**arguments)

    @pytest.mark.parametrize("name", ["plan", "window", "softcap"])
    def test_a_traced_static_argument_is_refused(self, name):
        with refused(TypeError, f"{name}.* must be a (static|DecodePlan)"):
            jax.jit(lambda x: decode(**{name: x}))(jnp.int32(2))

    def test_a_table_of_more_tokens_than_a_sequence_may_have(self):
        # Only its shape is looked at: nothing of that size is made.
        table = jax.ShapeDtypeStruct((BATCH, MAX_TOKENS // PAGE_SIZE + 1), jnp.int32)
        with refused(
            ValueError, r"block_tables.shape\[1\]=268435457 pages of 4 tokens are above the 1073741824 tokens"
        ):
            jax.eval_shape(lambda table: decode(block_tables=table), table)

    def test_x64_arrays_are_not_cast(self):
        with jax.enable_x64(True):
            with refused(TypeError, "seq_lens.dtype=int64 must be int32; it is not cast for you"):
                decode(seq_lens=jnp.zeros(BATCH, jnp.int64))
            with refused(TypeError, "q.dtype=float64 must be float32; it is not cast for you: cast it"):
                decode(q=jnp.zeros(DECODE["q"].shape, jnp.float64))

    def test_batch_zero_and_scalars_of_any_float_are_accepted(self):
        assert decode(q=zeros(0, 4, 8), block_tables=ints(0, WIDTH), seq_lens=ints(0)).shape == (0, Q_HEADS, HEAD_DIM_V)
        expected = np.asarray(decode(sm_scale=0.5))
        for scale in (np.float64(0.5), np.float32(0.5), np.float16(0.5), jnp.bfloat16(0.5), np.array(0.5, np.float32)):
            np.testing.assert_array_equal(decode(sm_scale=scale), expected)


SHAPE = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "max_decode_seqs": 4}
POLICY = sk.load_policy("cpu", environ={})


class TestPlan:
    @pytest.mark.parametrize("name", SHAPE)
    @pytest.mark.parametrize("value", [0, -1, 2**31])
    def test_counts_out_of_range(self, name, value):
        with refused(ValueError, f"{name}={value} is out of range: accepted is a whole number from 1 to"):
            POLICY.plan(**SHAPE | {name: value})

    @pytest.mark.parametrize("name", [*SHAPE, "num_seqs", "max_seq_len", "head_dim_v"])
    @pytest.mark.parametrize("value", [True, 2.0, "2", np.float32(2), np.array([2])], ids=repr)
    def test_not_whole_numbers(self, name, value):
        with refused(TypeError, f"{name}=.* must be a static whole number, got {type(value).__name__}"):
            POLICY.plan(**SHAPE | {name: value})

    @pytest.mark.parametrize(
        ("arguments", "error", "match"),
        [
            ({"num_q_heads": 9}, ValueError, "num_q_heads=9 must be a multiple of num_kv_heads=2"),
            ({"head_dim": 4097}, ValueError, "head_dim=4097 is out of range: .* to 4096"),
            ({"head_dim_v": 0}, ValueError, "head_dim_v=0 is out of range"),
            ({"page_size": MAX_TOKENS + 1}, ValueError, "page_size=1073741825 is out of range"),
            ({"max_seq_len": MAX_TOKENS + 1}, ValueError, "max_seq_len=1073741825 is out of range"),
            ({"num_seqs": 0}, ValueError, "num_seqs=0 is out of range"),
            (
                {"q_dtype": "float64"},
                ValueError,
                "q_dtype='float64' is not served: accepted are float32, bfloat16, float16",
            ),
            ({"kv_dtype": jnp.int32}, ValueError, "kv_dtype='int32' is not served: accepted are"),
            ({"kv_dtype": "uint8"}, NotImplementedError, "kv_dtype=uint8: KV quantised so is served by no backend"),
            ({"kv_dtype": jnp.float8_e4m3b11fnuz}, NotImplementedError, "kv_dtype=float8_e4m3b11fnuz: KV quantised"),
            ({"q_dtype": "int8"}, NotImplementedError, "q_dtype=int8: quantised queries are served by no backend"),
            ({"q_dtype": 3}, TypeError, "q_dtype=3 must be a dtype or the name of one of float32"),
            ({"kv_dtype": None}, TypeError, "kv_dtype=None must be a dtype or the name"),
        ],
        ids=lambda x: str(x)[:40] if isinstance(x, dict) else "",
    )
    def test_refuses(self, arguments, error, match):
        with refused(error, match):
            POLICY.plan(**SHAPE | arguments)

    def test_needs_a_policy(self):
        with refused(TypeError, r"policy must be a Policy \(load_policy\(...\)\), got str"):
            sk.DecodePlan.make("h200", **SHAPE)

    def test_no_tile_holds(self):
        tiles = (sk.Tile(head_dim=128, kv_dtype="bfloat16", heads_per_cta=16, block_kv=16, step_kv=16),)
        policy = sk.Policy(sm_count=1, tiles=tiles)
        with refused(
            NotImplementedError,
            r"head_dim=64, kv_dtype=bfloat16, page_size=\d+ meet .* no \[\[kernel.tile\]\] row of this policy",
        ):
            policy.plan(**SHAPE)


PAGES = sk.KVPages.init(
    num_pages=NUM_PAGES,
    page_size=PAGE_SIZE,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    head_dim_v=HEAD_DIM_V,
    dtype="float32",
)
INIT = {"num_pages": 6, "page_size": 4, "num_kv_heads": 2, "head_dim": 8}
APPEND = {
    "k": zeros(BATCH, 3, KV_HEADS, HEAD_DIM),
    "v": zeros(BATCH, 3, KV_HEADS, HEAD_DIM_V),
    "block_tables": DECODE["block_tables"],
    "positions": ints(BATCH, 3),
}
WRITE = {"k": zeros(5, KV_HEADS, HEAD_DIM), "v": zeros(5, KV_HEADS, HEAD_DIM_V), "slots": ints(5)}
CONTIGUOUS = {"k": zeros(BATCH, 7, KV_HEADS, HEAD_DIM), "v": zeros(BATCH, 7, KV_HEADS, HEAD_DIM_V), "page_size": 4}
TABLES = {"block_tables": DECODE["block_tables"], "seq_lens": DECODE["seq_lens"]}


class TestPages:
    @pytest.mark.parametrize(
        ("arguments", "error", "match"),
        [
            ({"num_pages": 0}, ValueError, "num_pages=0 is out of range"),
            ({"page_size": 1.0}, TypeError, "page_size=1.0 must be a static whole number"),
            ({"num_kv_heads": -2}, ValueError, "num_kv_heads=-2 is out of range"),
            ({"head_dim": False}, TypeError, "head_dim=False must be a static whole number"),
            ({"head_dim_v": 0}, ValueError, "head_dim_v=0 is out of range"),
            (
                {"num_pages": 2**20, "page_size": 2**11},
                ValueError,
                r"num_pages=1048576 \* page_size=2048 is above the 2147483647",
            ),
            ({"dtype": "int4"}, NotImplementedError, "dtype=int4: KV quantised so is served by no backend"),
            ({"k_scale": 0.5}, ValueError, "k_scale is for quantised pages .* got pages of bfloat16: leave it out"),
            ({"v_scale": "per_token"}, ValueError, "v_scale is for quantised pages .* got pages of bfloat16"),
            ({"dtype": "int8", "k_scale": "token"}, ValueError, "k_scale='token' is not known: .*'per_token'"),
            ({"dtype": "int8", "v_scale": 0}, ValueError, "v_scale=0 must be finite and above 0"),
            ({"dtype": "int8", "v_scale": zeros(3)}, ValueError, r"v_scale must be .* got shape \[3\]"),
            ({"dtype": "int8", "k_scale": zeros(6, 4, 2)}, ValueError, r"k_scale must be a number, .* got shape \[6"),
            ({"dtype": "int8", "k_scale": ints(2)}, TypeError, "k_scale.dtype=int32 must be float32"),
            (
                {"dtype": "int8", "k_scale": [1.0, 1.0]},
                TypeError,
                r"k_scale=\[1.0, 1.0\] must be a number, an array float32\[num_kv_heads\] or 'per_token', got list",
            ),
            ({"dtype": "float64"}, ValueError, "dtype='float64' is not served"),
            ({"dtype": 1}, TypeError, "dtype=1 must be a dtype or the name"),
        ],
        ids=lambda x: str(x)[:40] if isinstance(x, dict) else "",
    )
    def test_init(self, arguments, error, match):
        with refused(error, match):
            sk.KVPages.init(**INIT | arguments)

    @pytest.mark.parametrize(
        ("arguments", "error", "match"),
        [
            ({"k": None}, TypeError, "k must be a jax or numpy array, got NoneType"),
            (
                {"k": zeros(BATCH, 2, KV_HEADS, HEAD_DIM)},
                ValueError,
                r"k.shape\[1\]=2 must be 3: expected \[2, 3, 2, 8\]",
            ),
            ({"k": zeros(BATCH, 3, 4, HEAD_DIM)}, ValueError, r"k.shape\[2\]=4 must be 2"),
            ({"k": zeros(BATCH, 3, KV_HEADS, 7)}, ValueError, r"k.shape\[3\]=7 must be 8"),
            ({"k": ints(BATCH, 3, KV_HEADS, HEAD_DIM)}, TypeError, "k.dtype=int32 must be float32 or bfloat16"),
            ({"v": zeros(BATCH, 3, KV_HEADS, HEAD_DIM)}, ValueError, r"v.shape\[3\]=8 must be 6"),
            (
                {"v": zeros(BATCH, 3, KV_HEADS, HEAD_DIM_V, dtype="bool")},
                TypeError,
                "v.dtype=bool must be float32 or bfloat16",
            ),
            (
                {"positions": ints(BATCH)},
                ValueError,
                r"k must be .*, got shape \[2, 3, 2, 8\] with positions of shape \[2\]: .* \[batch, num_tokens\]",
            ),
            ({"positions": ints(3, 3)}, ValueError, r"k.shape\[0\]=2 must be 3"),
            ({"positions": ints(BATCH, 0)}, ValueError, r"positions.shape\[1\]=0 must be at least 1"),
            ({"positions": zeros(BATCH, 3)}, TypeError, "positions.dtype=float32 must be int32"),
            (
                {"positions": np.int32(0)},
                ValueError,
                r"positions must be \[batch\] or \[batch, num_tokens\], got shape \[\]",
            ),
            ({"block_tables": ints(3, WIDTH)}, ValueError, r"block_tables.shape\[0\]=3 must be 2"),
            ({"block_tables": zeros(BATCH, WIDTH, dtype="uint8")}, TypeError, "block_tables.dtype=uint8 must be int32"),
        ],
        ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
    )
    def test_append(self, arguments, error, match):
        with refused(error, match):
            PAGES.append(**APPEND | arguments)

    @pytest.mark.parametrize(
        ("arguments", "error", "match"),
        [
            ({"slots": ints(5, 1)}, ValueError, r"slots must be \[5\], got shape \[5, 1\] of rank 2"),
            ({"slots": np.int32(1)}, ValueError, r"slots must be \[n\], got shape \[\] of rank 0"),
            ({"slots": zeros(5, dtype="int8")}, TypeError, "slots.dtype=int8 must be int32"),
            ({"slots": ints(4)}, ValueError, r"k.shape\[0\]=5 must be 4"),
            ({"v": zeros(5, KV_HEADS, HEAD_DIM)}, ValueError, r"v.shape\[2\]=8 must be 6"),
            (
                {"k": zeros(5, KV_HEADS, HEAD_DIM, dtype="complex64")},
                TypeError,
                "k.dtype=complex64 must be float32 or bfloat16 or float16",
            ),
        ],
        ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
    )
    def test_write(self, arguments, error, match):
        with refused(error, match):
            PAGES.write(**WRITE | arguments)

    @pytest.mark.parametrize(
        ("arguments", "error", "match"),
        [
            ({"k": zeros(BATCH, 7, KV_HEADS)}, ValueError, r"k must be \[batch, length, num_kv_heads, head_dim\]"),
            ({"k": zeros(BATCH, 0, KV_HEADS, HEAD_DIM)}, ValueError, r"k.shape\[1\]=0 must be at least 1"),
            ({"v": zeros(BATCH, 6, KV_HEADS, HEAD_DIM)}, ValueError, r"v.shape\[1\]=6 must be 7"),
            (
                {"k": zeros(BATCH, 7, KV_HEADS, HEAD_DIM, dtype="int8")},
                TypeError,
                "k.dtype=int8 must be float32 or bfloat16",
            ),
            ({"v": zeros(BATCH, 7, KV_HEADS, HEAD_DIM, dtype="float16")}, TypeError, "v.dtype=float16 must be float32"),
            ({"page_size": 0}, ValueError, "page_size=0 is out of range"),
        ],
        ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
    )
    def test_from_contiguous(self, arguments, error, match):
        with refused(error, match):
            sk.KVPages.from_contiguous(**CONTIGUOUS | arguments)

    @pytest.mark.parametrize(
        ("arguments", "error", "match"),
        [
            ({"block_tables": np.int32(0)}, ValueError, "block_tables must be .* got shape .* of rank 0"),
            ({"block_tables": zeros(BATCH, WIDTH)}, TypeError, "block_tables.dtype=float32 must be int32"),
            ({"seq_lens": ints(3)}, ValueError, r"seq_lens.shape\[0\]=3 must be 2"),
        ],
        ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
    )
    def test_to_contiguous(self, arguments, error, match):
        with refused(error, match):
            PAGES.to_contiguous(**TABLES | arguments)


class TestMergeStates:
    @pytest.mark.parametrize(
        ("outs", "lses", "error", "match"),
        [
            ([], [], ValueError, r"len\(outs\)=0 and len\(lses\)=0 must be equal and at least 1"),
            ([zeros(2, 8)], [], ValueError, r"len\(outs\)=1 and len\(lses\)=0 must be equal"),
            (zeros(2, 3, 8), zeros(3, 3), ValueError, r"len\(outs\)=2 and len\(lses\)=3 must be equal"),
            ([zeros(8)[0]], [zeros(1)[0]], ValueError, r"outs must be states of \[..., head_dim\], got a scalar"),
            ([zeros(2, 8), zeros(3, 8)], zeros(2, 2), ValueError, r"outs\[1\].shape\[0\]=3 must be 2"),
            ([zeros(2, 8)], [zeros(3)], ValueError, r"lses\[0\].shape\[0\]=3 must be 2"),
            ([zeros(2, 8)], [zeros(2, 8)], ValueError, r"lses\[0\] must be \[2\], got shape \[2, 8\] of rank 2"),
            (
                [zeros(2, 8), zeros(2, 8, dtype="bfloat16")],
                zeros(2, 2),
                TypeError,
                r"outs\[1\].dtype=bfloat16 must be float32",
            ),
            ([ints(2, 8)], zeros(1, 2), TypeError, r"outs\[0\].dtype=int32 must be float32 or bfloat16 or float16"),
            ([zeros(2, 8)], zeros(1, 2, dtype="bfloat16"), TypeError, r"lses\[0\].dtype=bfloat16 must be float32"),
            ([zeros(2, 8)], zeros(1, 2, dtype="float64"), TypeError, r"lses\[0\].dtype=float64 is not accepted"),
            ([[1.0]], zeros(1, 2), TypeError, r"outs\[0\] must be a jax or numpy array, got list"),
            (
                None,
                None,
                TypeError,
                "outs must be a sequence of arrays, or one array stacked on a leading axis, got NoneType",
            ),
            (zeros(1, 2, 8), jnp.float32(1), TypeError, "lses must be a sequence of arrays"),
            ("ab", "cd", TypeError, r"outs\[0\] must be a jax or numpy array, got str"),
        ],
    )
    def test_refuses(self, outs, lses, error, match):
        with refused(error, match):
            sk.merge_states(outs, lses)


class TestValidateBatch:
    def check(self, tables, lengths, **overrides):
        tables, lengths = np.asarray(tables, np.int32), np.asarray(lengths, np.int32)
        sk.validate_batch(tables, lengths, **{"num_pages": 6, "page_size": 4} | overrides)

    def test_accepts_what_a_kernel_serves(self):
        self.check([[5, 0, -1], [7, 7, 7], [0, 5, 3]], [8, 0, 12])
        self.check(np.zeros((0, 3)), np.zeros(0))

    @pytest.mark.parametrize(
        ("tables", "lengths", "match"),
        [
            ([[0, 1], [2, 3]], [8, -1], r"seq_lens\[1\]=-1 is outside \[0, 8\], what its table and plan can hold"),
            ([[0, 1], [2, 3]], [9, 1], r"seq_lens\[0\]=9 is outside \[0, 8\]"),
            ([[0, 1], [2, 6]], [8, 5], r"block_tables\[1, 1\]=6 is live \(seq_lens\[1\]=5\) and outside \[0, 6\)"),
            ([[0, -1], [2, 6]], [5, 4], r"block_tables\[0, 1\]=-1 is live \(seq_lens\[0\]=5\)"),
        ],
    )
    def test_says_which_row_and_why(self, tables, lengths, match):
        with refused(ValueError, match):
            self.check(tables, lengths)

    @pytest.mark.parametrize(
        ("arguments", "error", "match"),
        [
            ({"num_pages": 0}, ValueError, "num_pages=0 is out of range"),
            ({"page_size": None}, TypeError, "page_size=None must be a static whole number"),
            ({"block_tables": np.int32(3)}, ValueError, "block_tables must be .* of rank 0"),
            ({"block_tables": zeros(BATCH, WIDTH)}, TypeError, "block_tables.dtype=float32 must be int32"),
            ({"seq_lens": ints(BATCH + 1)}, ValueError, r"seq_lens.shape\[0\]=3 must be 2"),
        ],
        ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
    )
    def test_refuses(self, arguments, error, match):
        with refused(error, match):
            sk.validate_batch(**TABLES | {"num_pages": 6, "page_size": 4} | arguments)


# What no argument accepts, whatever it is for.
NONSENSE = [object(), "x", b"x", {}, {1}, lambda: 0, 1j, np.zeros(2, "U1"), np.zeros(2, object), np.zeros(2, "M8[s]")]
NOT_ARRAYS = [*NONSENSE, 1, 1.0, [1], None, (), np.complex128(1), zeros(2, dtype="longdouble")]
NOT_COUNTS = [*NONSENSE, 1.5, float("nan"), -1, HUGE_INT, True, np.bool_(True), np.float64(1), ints(1)]


def wrong_arrays(right):
    """Arrays one step from the right one: each axis dropped, added, halved, grown, emptied; other dtypes."""
    shape, dtype = right.shape, right.dtype
    for axis, size in enumerate(shape):
        yield zeros(*shape[:axis], *shape[axis + 1 :], dtype=dtype)
        for other in {0, size + 1, size * 2}:
            yield zeros(*shape[:axis], other, *shape[axis + 1 :], dtype=dtype)
    yield zeros(1, 1, *shape, dtype=dtype)
    yield zeros(dtype=dtype)
    for other in ("bool", "int8", "uint32", "int64", "float64", "complex64", "float8_e4m3fn", "int4"):
        yield zeros(*shape, dtype=other)


def illegal(legal, statics):
    """Values that are wrong on their own, by argument."""
    table = {}
    for name, value in legal.items():
        if isinstance(value, np.ndarray):
            # Free axes may have any size: a pool of other pages, a wider table, another length.
            table[name] = [*NOT_ARRAYS, *wrong_arrays(value)]
    return table | statics


def accepted_alone(name, value):
    """The steps of `wrong_arrays` that another argument of the same call has to go along with, or that are legal."""
    shape = getattr(value, "shape", None)
    free = {
        "q": [(BATCH, 1, Q_HEADS, HEAD_DIM)],
        "block_tables": [(BATCH, WIDTH + 1), (BATCH, WIDTH * 2)],
    }
    return shape in free.get(name, ()) and value.dtype == DECODE[name].dtype


class TestWrongCallsNeverReachTheCompiler:
    """Hundreds of wrong calls: each is refused by the package itself, in terms of the argument."""

    STATICS = {  # noqa: RUF012
        "plan": [*NONSENSE, None, 1, PLAN.policy, jnp.int32(1)],
        "sm_scale": [*NONSENSE[:-1], 0, -1.0, float("nan"), 1e300, HUGE_INT, True, zeros(1), np.int32(1)],
        "window": NOT_COUNTS,
        "softcap": [*NONSENSE, -1, float("nan"), float("inf"), HUGE_INT, True, zeros(1), jnp.float32(1)],
        "sinks": [*[x for x in NOT_ARRAYS if x is not None], *wrong_arrays(zeros(Q_HEADS))],
        "k_scale": [1.0, zeros(1)],
        "v_scale": [0, "x"],
    }
    TABLE = {  # noqa: RUF012
        name: [value for value in values if not accepted_alone(name, value)]
        for name, values in illegal(DECODE, STATICS).items()
    }
    ERRORS = (TypeError, ValueError, NotImplementedError)

    @pytest.fixture(autouse=True)
    def _no_compiler(self, monkeypatch):
        def lowered(*args, **kwargs):
            raise AssertionError("a wrong call was traced")

        monkeypatch.setattr("splitk_jax.attention._decode", lowered)

    @pytest.mark.parametrize("name", TABLE)
    def test_one_wrong_argument(self, name):
        # A pool's arrays are checked against one another, so the other one may be the one that is named.
        named = "[kv]_pages" if name in ("k_pages", "v_pages") else name
        if name == "q":  # its batch is what the tables are checked against
            named = "q|block_tables"
        for value in self.TABLE[name]:
            with refused(self.ERRORS, f"^({named})"):
                decode(**{name: value})

    def test_several_wrong_arguments(self):
        rng = np.random.default_rng(0)
        names = list(self.TABLE)
        count = 0
        for size, _ in itertools.product((2, 3, 4), range(150)):
            chosen = rng.choice(len(names), size, replace=False)
            wrong = {names[i]: self.TABLE[names[i]][rng.integers(len(self.TABLE[names[i]]))] for i in chosen}
            with refused(self.ERRORS, "^[a-z]"):
                decode(**wrong)
            count += 1
        assert count == 450

    @pytest.mark.parametrize(
        ("call", "legal"),
        [
            pytest.param(PAGES.append, APPEND, id="append"),
            pytest.param(PAGES.write, WRITE, id="write"),
            pytest.param(sk.KVPages.from_contiguous, CONTIGUOUS, id="from_contiguous"),
            pytest.param(PAGES.to_contiguous, TABLES, id="to_contiguous"),
        ],
    )
    def test_pages(self, call, legal):
        for name, right in legal.items():
            for value in NOT_ARRAYS if isinstance(right, np.ndarray) else NOT_COUNTS:
                with refused(self.ERRORS, f"^{name}"):
                    call(**legal | {name: value})

    @pytest.mark.parametrize("name", [*SHAPE, "head_dim_v", "num_seqs", "max_seq_len", "q_dtype", "kv_dtype"])
    def test_plan(self, name):
        optional = name in ("head_dim_v", "num_seqs", "max_seq_len")
        for value in NOT_COUNTS if optional else [*NOT_COUNTS, None]:
            with refused(self.ERRORS, f"^{name}"):
                POLICY.plan(**SHAPE | {name: value})


def test_validate_batch_knows_the_plan_and_the_window():
    policy = sk.load_policy("cpu", environ={}, splits="fixed_size", split_size=32)
    shape = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 8, "page_size": 16, "max_decode_seqs": 1}
    plan = policy.plan(**shape, max_seq_len=64)
    tables, lens = np.array([[-1, -1, 2, 3, 4]], np.int32), np.array([64], np.int32)
    sk.validate_batch(tables, lens, num_pages=9, page_size=16, plan=plan, window=32)
    with pytest.raises(ValueError, match=r"block_tables\[0, 1\]=-1 is live"):
        sk.validate_batch(tables, lens, num_pages=9, page_size=16, plan=plan, window=33)
    with pytest.raises(ValueError, match=r"seq_lens\[0\]=80 is outside \[0, 64\]"):
        sk.validate_batch(tables, np.array([80], np.int32), num_pages=9, page_size=16, plan=plan)
    with pytest.raises(ValueError, match="page_size=8 must be the plan's, 16"):
        sk.validate_batch(tables, lens, num_pages=9, page_size=8, plan=plan)


def test_validate_batch_knows_the_query_tokens():
    """The first of several attends from earlier on than the last."""
    tables, lens = np.array([[-1, 1, 2]], np.int32), np.array([33], np.int32)
    sk.validate_batch(tables, lens, num_pages=3, page_size=16, window=17)
    sk.validate_batch(tables, lens, num_pages=3, page_size=16, window=14, q_len=4)
    with pytest.raises(ValueError, match=r"block_tables\[0, 0\]=-1 is live"):
        sk.validate_batch(tables, lens, num_pages=3, page_size=16, window=15, q_len=4)


@pytest.mark.parametrize("value", ["no", 1, None])
def test_return_lse_is_a_bool(value):
    with pytest.raises(TypeError, match=r"return_lse=.* must be a bool"):
        sk.paged_decode_attention(*[None] * 5, plan=None, return_lse=value)


@pytest.mark.parametrize(
    ("x", "match"),
    [
        (np.ma.masked_array(np.zeros(3, np.float32), mask=True), r"outs\[0\] must be a jax or numpy array"),
        (np.zeros(3, ">f4"), r"outs\[0\].dtype=>f4 is not accepted"),
    ],
    ids=["masked", "big-endian"],
)
def test_arrays_that_would_lose_something(x, match):
    with pytest.raises(TypeError, match=match):
        sk.merge_states([x], [np.zeros((), np.float32)])
