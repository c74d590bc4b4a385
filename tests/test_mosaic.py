"""The mosaic backend without its GPU: what it lowers to, what it refuses by name, and its schedule, replayed.

What it computes is for `test_emulated.py` and, on a Hopper, `test_gpu.py`.
"""

import collections
import dataclasses
import functools
import itertools
import re

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import assert_close, random_paged

import splitk_jax as sk
from splitk_jax.checks import MOSAIC_JAX
from splitk_jax.kernels.mosaic.schedule import (
    ALIGNED,
    MERGE_READS,
    SNAP,
    SPLIT_OVERHEAD,
    WORK_PAGES,
    WORK_ROW,
    Merge,
    Row,
    Work,
    make_schedule,
)
from splitk_jax.plan import RUN_SPLITS
from splitk_jax.target import load_targets
from splitk_jax.tiles import MOSAIC_HEAD_DIMS, MOSAIC_QUANTISED_HEAD_DIMS

HOPPERS = [target.name for target in load_targets() if target.arch == "sm_90"]
RULES = ("auto", "balanced", "legacy", "adaptive", "fixed_size", 7, "off")

needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < MOSAIC_JAX, reason=f"jax {jax.__version__} has no Mosaic GPU that serves these kernels"
)

# Of pools that are only lowered. A prime, so that no other axis is taken for it.
NUM_PAGES = 2003


@dataclasses.dataclass(frozen=True)
class Case:
    """One compiled shape: heads as (query, KV), lanes, page and batch, and the target and rule of the plan."""

    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    head_dim_v: int | None = None
    page_size: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    token_scales: bool = False
    batch: int = 3
    longest: int = 4096
    target: str = "h200"
    splits: str | int = "balanced"
    launch_ctas: int | None = None
    q_len: int | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def group(self):
        return self.heads[0] // self.heads[1]

    @property
    def width(self):
        return -(-self.longest // self.page_size)

    def policy(self, **overrides):
        overrides = {"splits": self.splits, "ahead_of_time": True} | overrides
        return sk.load_policy(self.target, environ={}, **overrides)

    def plan(self, policy=None, **shape):
        policy = self.policy() if policy is None else policy
        plan = policy.plan(
            **{
                "num_q_heads": self.heads[0],
                "num_kv_heads": self.heads[1],
                "head_dim": self.head_dim,
                "head_dim_v": self.head_dim_v,
                "page_size": self.page_size,
                "max_decode_seqs": max(self.batch, 64),
                "num_seqs": self.batch,
                "max_seq_len": self.width * self.page_size,
                "q_dtype": self.dtype,
                "kv_dtype": self.kv_dtype or self.dtype,
            }
            | shape
        )
        return plan if self.launch_ctas is None else dataclasses.replace(plan, launch_ctas=self.launch_ctas)

    def arguments(self):
        """The shapes of a call, and no arrays."""
        (num_q_heads, num_kv_heads), page = self.heads, (NUM_PAGES, self.page_size)
        tokens = () if self.q_len is None else (self.q_len,)
        return (
            jax.ShapeDtypeStruct((self.batch, *tokens, num_q_heads, self.head_dim), self.dtype),
            jax.ShapeDtypeStruct((*page, num_kv_heads, self.head_dim), self.kv_dtype or self.dtype),
            jax.ShapeDtypeStruct((*page, num_kv_heads, self.head_dim_v or self.head_dim), self.kv_dtype or self.dtype),
            jax.ShapeDtypeStruct((self.batch, self.width), "int32"),
            jax.ShapeDtypeStruct((self.batch,), "int32"),
        )

    def lower(self, plan=None):
        of_tokens = (NUM_PAGES, self.page_size, self.heads[1]) if self.token_scales else None
        call = functools.partial(
            sk.paged_decode_attention,
            plan=self.plan() if plan is None else plan,
            window=self.window,
            softcap=self.softcap,
            sinks=jnp.zeros(self.heads[0]) if self.sinks else None,
            k_scale=None if self.kv_dtype is None else jnp.ones(of_tokens or self.heads[1]),
            v_scale=None if self.kv_dtype is None else jnp.ones(of_tokens or ()),
            return_lse=True,
        )
        return jax.jit(call).trace(*self.arguments()).lower(lowering_platforms=("cuda",))


# Every tile row, head dim, group, page size, dtype, batch, rule and target somewhere, and the pairs that meet in the
# kernel; not the cross of all.
CASES = {
    "llama-alone": Case(batch=1),
    "llama-f16-b64": Case(batch=64, dtype="float16", target="h100"),
    "llama-page32-b200": Case(batch=200, page_size=32, target="h100_pcie"),
    "llama-page64": Case(page_size=64, target="h100"),
    "llama-page128-f16": Case(page_size=128, dtype="float16", target="h100_pcie"),
    "llama-page256-b64": Case(page_size=256, batch=64),
    "d64-group1-page128": Case((8, 8), 64, page_size=128, batch=64),
    "d64-group6-page8-f16": Case((12, 2), 64, page_size=8, dtype="float16", target="h100"),
    "d64-group64-page64-b200": Case((64, 1), 64, page_size=64, batch=200, target="h100_pcie"),
    "d64-group128-page256": Case((128, 1), 64, page_size=256, dtype="float16"),
    "d80-group3": Case((24, 8), 80, batch=1, target="h100"),
    "d80-dv64-group8-page64": Case((64, 8), 80, 64, page_size=64, dtype="float16"),
    "d80-dv96-group1-page8-b200": Case((2, 2), 80, 96, page_size=8, batch=200),
    "d96-group12-page8": Case((24, 2), 96, page_size=8, dtype="float16"),
    "d96-group4-page256-b64": Case((16, 4), 96, page_size=256, batch=64, target="h100_pcie"),
    "d112-group7-page32": Case((28, 4), 112, page_size=32, batch=1),
    "d112-dv128-group16": Case((16, 1), 112, 128, batch=64, target="h100"),
    "d128-dv64-group16-page128": Case((64, 4), 128, 64, page_size=128, dtype="float16"),
    "d128-dv80-group64": Case((64, 1), 128, 80, batch=64),
    "d128-group128-page8-b200": Case((128, 1), page_size=8, batch=200, dtype="float16", target="h100"),
    "d192-dv128-group16": Case((128, 8), 192, 128, batch=64),
    "d192-group12-page64-f16": Case((12, 1), 192, page_size=64, dtype="float16", target="h100_pcie"),
    "d192-dv128-group128-page128": Case((128, 1), 192, 128, page_size=128, target="h100"),
    "d256-group4-page8": Case((16, 4), 256, page_size=8, batch=1),
    "d256-group16-page64-f16": Case((16, 1), 256, page_size=64, dtype="float16", batch=200),
    "d64-page24": Case((4, 2), 64, page_size=24),
    "d96-dv128-group8-page40-f16": Case((8, 1), 96, 128, page_size=40, dtype="float16", batch=64),
    "d256-dv64-group6-page256": Case((24, 4), 256, 64, page_size=256, target="h100"),
    "one-head": Case((1, 1)),
    "four-heads": Case((4, 4), 64, batch=1),
    "six-heads-group3": Case((6, 2), 96, dtype="float16"),
    "auto": Case(splits="auto"),
    "pinned": Case(splits=7, target="h100"),
    "one-split": Case(splits="off"),
    "one-split-dv80": Case((8, 2), 80, splits="off"),
    "legacy": Case((4, 1), splits="legacy", batch=1, page_size=64),
    "adaptive": Case(splits="adaptive", batch=1),
    "fixed-size": Case(splits="fixed_size", page_size=32),
}


@needs_mosaic
class TestLowering:
    @pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
    def test_two_kernels_and_no_copy_of_a_pool(self, case):
        plan = case.plan()
        text = case.lower(plan).as_text()
        merges = plan.num_splits > 1 or plan.head_dim_v % 64 != 0
        assert len(re.findall(r"custom_call @mosaic_gpu", text)) == 1 + merges
        assert "splitk_split" in text
        assert ("splitk_combine" in text) == merges
        # Whatever reads or makes an array with the pool's pages: the signatures, the calls and the kernel.
        with_pages = [line for line in text.splitlines() if re.search(rf"tensor<(\d+x)*{NUM_PAGES}x", line)]
        assert sum("custom_call @mosaic_gpu" in line for line in with_pages) == 1
        for line in with_pages:
            assert re.search(r"^\s*func\.func |= call @|stablehlo\.custom_call @mosaic_gpu", line), line[:200]

    def test_the_cases_cover_what_they_say(self):
        def column(name):
            return {getattr(case, name) for case in CASES.values()}

        assert column("head_dim") == {64, 80, 96, 112, 128, 192, 256}
        assert any(case.head_dim_v not in (None, case.head_dim) for case in CASES.values())
        assert column("group") >= {1, 3, 4, 6, 7, 8, 12, 16, 64, 128}
        assert column("page_size") == {8, 16, 24, 32, 40, 64, 128, 256}
        assert column("dtype") == {"bfloat16", "float16"}
        assert column("batch") == {1, 3, 64, 200}
        assert column("splits") == set(RULES)
        assert column("target") == set(HOPPERS)
        plans = [case.plan() for case in CASES.values()]
        assert {plan.policy.tile(plan.head_dim, plan.kv_dtype, plan.page_size) for plan in plans} == {
            tile for target in HOPPERS for tile in sk.load_target(target).tiles
        }
        assert any(plan.row_capacity > plan.launch_teams for plan in plans)
        assert any(plan.num_q_heads < 8 for plan in plans)
        assert {plan.num_splits > 1 for plan in plans} == {True, False}

    @pytest.mark.parametrize("wrapper", ["vmap", "scan"])
    def test_inside_other_transformations(self, wrapper):
        """One sequence after another, one layer after another: the same two kernels in a loop."""
        case = Case()
        decode = functools.partial(sk.paged_decode_attention, plan=case.plan())
        many = [jax.ShapeDtypeStruct((2, *x.shape), x.dtype) for x in case.arguments()]

        def layers(q, k_pages, v_pages, block_tables, seq_lens):
            def layer(q, pools):
                return decode(q, *pools, block_tables, seq_lens), None

            return jax.lax.scan(layer, q, (k_pages, v_pages))[0]

        if wrapper == "vmap":
            traced = jax.jit(jax.vmap(decode)).trace(*many)
        else:
            q, _, _, *rest = case.arguments()
            traced = jax.jit(layers).trace(q, *many[1:3], *rest)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert len(re.findall(r"custom_call @mosaic_gpu", text)) == 2
        assert "stablehlo.while" in text

    def test_another_launch_is_another_program(self):
        traced = []

        @functools.partial(jax.jit, static_argnames="plan")
        def decode(arrays, plan):
            traced.append(plan.launch_ctas)
            return sk.paged_decode_attention(*arrays, plan=plan)

        plan = Case().plan()
        for launch_ctas in (132, 66, 132, 66):
            decode.trace(Case().arguments(), plan=dataclasses.replace(plan, launch_ctas=launch_ctas))
        assert traced == [132, 66]


REDUCTIONS = {"inline_mgpu", "inline_mgpu_p"}  # over tokens: JAX 0.12's name, and 0.11's
# What rounds, or chooses among what has been rounded.
ARITHMETIC = REDUCTIONS | {
    "add",
    "sub",
    "mul",
    "div",
    "max",
    "exp2",
    "log",
    "select_n",
    "convert_element_type",
    "wgmma_ref",
}


def kernel_arithmetic(jaxpr, kernel=None):
    """(kernel, primitive, operand types and constants) of every float operation of the kernels, in program order."""
    for equation in jaxpr.eqns:
        parameters = [x for value in equation.params.values() for x in (value if isinstance(value, tuple) else [value])]
        bodies = [body for body in (getattr(x, "jaxpr", x) for x in parameters) if hasattr(body, "eqns")]
        name = str(equation.params.get("name", ""))
        for body in bodies:
            yield from kernel_arithmetic(body, name if name.startswith("splitk_") else kernel)
        types = [f"{v.aval} {getattr(v, 'val', '')}" for v in equation.invars]
        if kernel and equation.primitive.name in ARITHMETIC and any("float" in x for x in types):
            yield kernel, equation.primitive.name, *types


@needs_mosaic
@pytest.mark.parametrize("name", ["llama-alone", "d80-dv96-group1-page8-b200", "fixed-size"])
def test_arithmetic_is_of_the_plan_alone(name):
    """Why bits do not move: no operation that rounds has a shape, or a place, that a batch or a launch has a say in."""
    plan = CASES[name].plan(max_decode_seqs=200)
    split, combine = [], []
    for batch, longest, launch_ctas in [(1, 1024, 132), (3, 4096, 132), (64, 4096, 8), (200, 512, 500)]:
        case = dataclasses.replace(CASES[name], batch=batch, longest=longest)
        call = functools.partial(
            sk.paged_decode_attention, plan=dataclasses.replace(plan, launch_ctas=launch_ctas), return_lse=True
        )
        found = list(kernel_arithmetic(jax.make_jaxpr(call)(*case.arguments()).jaxpr))
        split.append([x for x in found if x[0].startswith("splitk_split")])
        # Of the combine's, only which they are: how many partials it loads ahead may follow the batch. What begins
        # with 0 is in a loop or not.
        combine.append({x for x in found if x[0].startswith("splitk_combine") and "float32[] 0.0" not in x})
    assert sum(primitive == "wgmma_ref" for _, primitive, *_ in split[0]) == 2
    assert sum(primitive in REDUCTIONS for _, primitive, *_ in split[0]) == 2
    assert combine[0]
    assert all(each == split[0] for each in split)
    assert all(each == combine[0] for each in combine)


@needs_mosaic
@pytest.mark.parametrize("name", ["llama-f16-b64", "d80-group3", "d128-group128-page8-b200", "one-split-dv80"])
def test_the_workspace_that_a_plan_reports(name):
    """The most that the split kernel leaves to the combine, at the plan's capacity."""
    from splitk_jax.kernels.mosaic.split import split

    plan = CASES[name].plan()
    case = dataclasses.replace(CASES[name], batch=plan.row_capacity)
    q, *arrays = case.arguments()
    q = jax.ShapeDtypeStruct((q.shape[0], 1, *q.shape[1:]), q.dtype)
    call = functools.partial(split, plan=plan, window=None, softcap=None)
    partials = jax.eval_shape(call, q, *arrays, jax.ShapeDtypeStruct((), "float32"), None).partials
    assert sum(x.size * 4 for x in jax.tree.leaves(partials)) == plan.workspace_bytes


OPTIONS = {
    "window": Case(batch=4, window=100),
    "sinks-b64": Case(batch=64, sinks=True),
    "d256-everything": Case((24, 4), 256, page_size=64, window=77, softcap=50.0, sinks=True),
    "q2": Case(q_len=2),
    "q16": Case(q_len=16, batch=64),
    "q4-mqa": Case((32, 1), page_size=64, q_len=4),
    "q3-group8-window": Case((64, 8), page_size=64, q_len=3, window=9),
    "q7-d80-sinks": Case((2, 2), 80, q_len=7, sinks=True),
    "q2-group128": Case((128, 1), q_len=2),
    "q3-dv256": Case((28, 4), 64, 256, q_len=3, softcap=3.0),
    "q16-window1-page256": Case((16, 2), 64, page_size=256, q_len=16, window=1),
    "q5-group5": Case((40, 8), q_len=5, batch=64, sinks=True),
    "q7-group7-d64": Case((28, 4), 64, q_len=7),
    "e4m3": Case((32, 8), kv_dtype="float8_e4m3fn", window=300, sinks=True),
    "e5m2-d256-f16": Case((24, 4), 256, dtype="float16", kv_dtype="float8_e5m2", page_size=64),
    "int8-mqa-q4": Case((32, 1), kv_dtype="int8", q_len=4, page_size=8),
    "int8-d192-dv96-f16": Case((6, 2), 192, 96, dtype="float16", kv_dtype="int8", softcap=5.0),
    "e4m3-d64-dv128-q2": Case((8, 2), 64, 128, kv_dtype="float8_e4m3fn", q_len=2),
}


@needs_mosaic
@pytest.mark.parametrize("name", OPTIONS)
def test_options_lower(name):
    """Each in kernels of its own plan's steps: their number of tokens is part of the bits."""
    case = OPTIONS[name]
    plan = case.plan()
    packed = plan.packed(case.q_len or 1)
    text = case.lower(plan).as_text()
    assert f"splitk_split_s{plan.num_splits}_t{plan.step_kv}x{packed.stages}" in text
    assert packed.mosaic_tile.smem_bytes(packed.stages) <= sk.load_target(case.target).smem_per_cta_kib * 1024


def test_more_copies_than_a_word_has_bits():
    case = Case((4, 2), 64, page_size=8)
    with pytest.raises(
        ValueError, match=r"^step_kv=512 in copies of 8 tokens, .* is 64 of them; at most 32 .*block_kv"
    ):
        case.plan(with_tile(case.policy(), step_kv=512, block_kv=8, stages=1))


class TestSharedMemory:
    @needs_mosaic
    @pytest.mark.parametrize(
        "case",
        [
            Case((8, 1), 64, page_size=128),
            Case((64, 1), 64, page_size=8),
            Case((4, 1), 80),
            Case((64, 1), 96, 80, page_size=64),
            Case((32, 8)),
            Case((128, 1), page_size=256, dtype="float16"),
            Case((12, 1), 192, 128),
            Case((16, 1), 256, page_size=32),
            Case((32, 8), kv_dtype="float8_e4m3fn"),
            Case((32, 1), kv_dtype="int8", page_size=64),
            Case((6, 2), 192, 96, kv_dtype="float8_e5m2"),
        ],
        ids=lambda case: (
            f"group{case.group}-d{case.head_dim}-dv{case.head_dim_v}-page{case.page_size}-{case.kv_dtype or case.dtype}"
        ),
    )
    @pytest.mark.parametrize("stages", [None, 2])
    def test_the_rule_counts_what_the_kernel_asks_for(self, case, stages, monkeypatch):
        plan = case.plan()
        plan = plan if stages is None else dataclasses.replace(plan, stages=stages)
        monkeypatch.setattr("jax.experimental.mosaic.gpu.core._SMEM_SIZE_BOUND", 1)
        with pytest.raises(ValueError, match="exceeds available shared memory") as e:
            case.lower(plan)
        asked = int(re.search(r"smem_bytes=(\d+)", str(e.value))[1])
        assert asked <= plan.mosaic_tile.smem_bytes(plan.stages) <= asked + 8 * 1024

    @pytest.mark.parametrize("target", HOPPERS)
    def test_what_the_packaged_tiles_serve(self, target):
        """Every group of up to 16 at every page size, and the wide groups where the tile splits them evenly."""
        policy = Case(target=target).policy()
        for head_dim in (64, 80, 96, 112, 128, 192, 256):
            for page_size in (8, 16, 32, 64, 128, 256):
                for group, kv_dtype in itertools.product((*range(1, 17), 32, 64, 128), ("bfloat16", "int8")):
                    if kv_dtype == "int8" and head_dim not in MOSAIC_QUANTISED_HEAD_DIMS:
                        continue
                    case = Case((group, 1), head_dim, page_size=page_size, target=target, kv_dtype=kv_dtype)
                    plan = case.plan(policy)
                    assert plan.mosaic_tile.smem_bytes(plan.stages) <= 227 * 1024

    def test_quantised_keys_and_values_of_any_two_sizes(self):
        """A step is halved until what it is widened to fits."""
        sizes = MOSAIC_QUANTISED_HEAD_DIMS
        for head_dim, head_dim_v, group in itertools.product(sizes, sizes, (1, 5, 16, 48, 64, 128)):
            for num_kv_heads in (1, 2):
                heads = (group * num_kv_heads, num_kv_heads)
                plan = Case(heads, head_dim, head_dim_v, kv_dtype="int8", page_size=64).plan()
                assert plan.mosaic_tile.smem_bytes(plan.stages) <= 227 * 1024

    def test_a_tile_that_does_not_fit_is_refused_with_both_numbers(self):
        plan = Case().plan()
        needed = plan.mosaic_tile.smem_bytes(4)
        assert needed > 227 * 1024
        with pytest.raises(
            ValueError, match=rf"stages=4 of step_kv=64 tokens need {needed} bytes.*h200 has {227 * 1024} a CTA"
        ):
            dataclasses.replace(plan, stages=4)
        longer = dataclasses.replace(plan.policy, min_kv_per_split=512)
        long = with_tile(longer, step_kv=512, block_kv=512, stages=1)
        wide = r"bytes of shared memory at head_dim=128, head_dim_v=128.*SPLITK_JAX_KERNEL=reference"
        with pytest.raises(ValueError, match=wide):
            Case(page_size=64).plan(long)

    def test_as_much_as_fits_the_targets_limit(self):
        """KV heads share a CTA where three stages of them fit; else one has a CTA, and as many stages as fit."""
        plan = Case().plan()
        assert (plan.kv_heads_per_cta, plan.warpgroups, plan.step_kv, plan.stages) == (2, 2, 64, 3)
        needed = plan.mosaic_tile.smem_bytes(plan.stages)

        def on(kib):
            target = dataclasses.replace(sk.load_target("h200"), smem_per_cta_kib=kib)
            return Case().plan(dataclasses.replace(plan.policy, target=target))

        assert on(-(-needed // 1024)) == plan
        assert on(None) == plan
        less = on(-(-needed // 1024) - 1)
        assert (less.kv_heads_per_cta, less.warpgroups, less.step_kv, less.stages) == (1, 1, 128, 3)
        least = dataclasses.replace(less, stages=1).mosaic_tile.smem_bytes(1)
        assert (on(-(-least // 1024)).stages, on(-(-least // 1024)).step_kv) == (1, 128)
        # Then half of the step, which is all that an edge every 64 tokens leaves.
        assert on(-(-least // 1024) - 1).step_kv == 64
        least = dataclasses.replace(less, stages=1, step_kv=64).mosaic_tile.smem_bytes(1)
        assert on(-(-least // 1024)).step_kv == 64
        with pytest.raises(ValueError, match=f"stages=1 of step_kv=64 tokens need {least} bytes"):
            on(-(-least // 1024) - 1)

    @pytest.mark.parametrize(
        ("heads", "shares", "warpgroups", "in_each"),
        [
            ((32, 8), 2, 2, 4),
            ((32, 32), 2, 2, 1),
            ((9, 3), 1, 1, 3),  # an odd number of KV heads
            ((16, 1), 1, 1, 16),
            ((32, 1), 1, 2, 16),  # a wide group, halved
            ((33, 1), 1, 1, 33),  # in two unequal halves it would be
            ((96, 4), 1, 2, 12),  # too wide for three stages of two KV heads
            ((128, 1), 1, 2, 32),  # two CTAs of two halves
        ],
        ids=lambda x: str(x),
    )
    def test_what_the_warpgroups_of_a_cta_share(self, heads, shares, warpgroups, in_each):
        plan = Case(heads).plan()
        tile = plan.mosaic_tile
        assert (plan.kv_heads_per_cta, plan.warpgroups, tile.heads) == (shares, warpgroups, in_each)
        assert plan.ctas * plan.warpgroups * tile.heads == plan.num_q_heads
        assert tile.smem_bytes(plan.stages) <= 227 * 1024
        # The tree does not depend on which backend serves it.
        other = Case(heads).plan(sk.load_policy("h200", environ={}, backend="reference"))
        assert (other.num_splits, other.block_kv, other.step_kv) == (plan.num_splits, plan.block_kv, plan.step_kv)


def with_tile(policy, **changes):
    """The policy with one tile of these tests', whatever the packaged ones are tuned to."""
    tile = sk.Tile(**{"heads_per_cta": 64, "block_kv": 16, "step_kv": 64, "stages": 3} | changes)
    return dataclasses.replace(policy, tiles=(tile,))


def refusal(make):
    try:
        make()
    except ValueError as e:
        return str(e)
    return ""


class TestPlansThatAreRefused:
    @pytest.mark.parametrize(
        ("shape", "match"),
        [
            ({"q_dtype": "float32", "kv_dtype": "float32"}, "q_dtype=float32, kv_dtype=float32: .*bfloat16 or float16"),
            ({"q_dtype": "float32"}, "q_dtype=float32, kv_dtype=bfloat16: .*for both"),
            ({"q_dtype": "float16"}, "q_dtype=float16, kv_dtype=bfloat16: .*for both"),
            (
                {"q_dtype": "float32", "kv_dtype": "int8"},
                "q_dtype=float32, kv_dtype=int8: .*for both, or such queries of",
            ),
            ({"kv_dtype": "int8", "head_dim": 80}, "head_dim=80 with kv_dtype=int8: .*serves 64, 96, 128, 192, 256;"),
            (
                {"kv_dtype": "int8", "head_dim_v": 112},
                "head_dim_v=112 with kv_dtype=int8: .*serves 64, 96, 128, 192, 256",
            ),
            *[({"head_dim": n}, f"head_dim={n}: .*serves 64, 80, 96, 112, 128, 192, 256;") for n in (48, 72, 160, 320)],
            *[({"head_dim_v": n}, f"head_dim_v={n}: .*serves 64, 80, 96, 112, 128, 192, 256;") for n in (72, 512)],
            *[({"page_size": n}, f"page_size={n}: .*serves multiples of 8;") for n in (1, 2, 4, 5, 12, 36)],
            ({"num_q_heads": 65, "num_kv_heads": 1}, "group=65 in CTAs of heads_per_cta=64: .*equal parts"),
            ({"num_q_heads": 131, "num_kv_heads": 1}, "group=131 in CTAs of heads_per_cta=64: .*equal parts"),
        ],
        ids=lambda x: "-".join(f"{k}{v}" for k, v in x.items()) if isinstance(x, dict) else "",
    )
    def test_shapes(self, shape, match):
        with pytest.raises(NotImplementedError, match=rf"^{match}.*SPLITK_JAX_KERNEL=reference"):
            Case().plan(with_tile(Case().policy()), **shape)
        assert Case().plan(with_tile(Case().policy(backend="reference")), **shape).backend == "reference"

    @pytest.mark.parametrize("name", ["a100", "b200", "rtx_pro_6000", "mi300x", "cpu"])
    def test_another_architecture(self, name):
        policy = sk.load_policy(name, environ={"SPLITK_JAX_KERNEL": "mosaic"}, ahead_of_time=True)
        with pytest.raises(NotImplementedError, match=rf"^target {name} \({policy.target.arch}\): .*serves sm_90"):
            Case().plan(policy)

    @pytest.mark.parametrize(
        ("tile", "error", "match"),
        [
            ({"stages": None}, ValueError, "stages=None: .*state it in the tile row"),
            ({"step_kv": 96}, ValueError, "step_kv=96 must be a multiple of 64"),
            ({"step_kv": 32}, ValueError, "step_kv=32 must be a multiple of 64"),
            ({"block_kv": 4}, ValueError, "block_kv=4 must be a multiple of 8"),
            (
                {"heads_per_cta": 128},
                NotImplementedError,
                "group=128 in CTAs of heads_per_cta=128: .*at most 64 heads",
            ),
        ],
        ids=lambda x: "-".join(f"{k}{v}" for k, v in x.items()) if isinstance(x, dict) else "",
    )
    def test_tiles(self, tile, error, match):
        with pytest.raises(error, match=match):
            Case((128, 1)).plan(with_tile(Case().policy(), **tile))

    def test_other_head_dims_are_served_or_refused_before_compilation(self):
        for head_dim, head_dim_v in itertools.product(MOSAIC_HEAD_DIMS, MOSAIC_HEAD_DIMS):
            refused = refusal(Case(head_dim=head_dim, head_dim_v=head_dim_v).plan)
            assert refused == "" or f"shared memory at head_dim={head_dim}, head_dim_v={head_dim_v}" in refused


class Device:
    """A device as far as the checks look at it."""

    platform, core_count = "gpu", 132

    def __init__(self, device_kind, compute_capability):
        self.device_kind, self.compute_capability = device_kind, compute_capability


class TestCallsThatAreRefused:
    """A plan for this machine, not ahead of time, as a user's would be."""

    case = random_paged([40, 0, 17], num_q_heads=4, num_kv_heads=2, dtype="bfloat16")

    def plan(self, **overrides):
        return Case((4, 2), 64).plan(Case((4, 2), 64).policy(ahead_of_time=False, **overrides))

    @pytest.fixture(autouse=True)
    def _a_jax_that_serves(self, monkeypatch):
        monkeypatch.setattr(jax, "__version_info__", max(jax.__version_info__, MOSAIC_JAX))

    def test_more_query_tokens_than_are_served(self):
        case = self.case.replace(q=np.repeat(self.case.q[:, None], 17, axis=1))
        with pytest.raises(NotImplementedError, match=r"^q_len=17: .*up to 16 .*SPLITK_JAX_KERNEL=reference"):
            case.decode(self.plan())
        assert_close(case.decode(self.plan(backend="reference")), case.dense())

    def test_query_tokens_whose_partials_take_gigabytes(self):
        with pytest.raises(
            NotImplementedError, match=r"^q_len=16 in a batch of 64 with head_dim_v=80: .*partials.*or use"
        ):
            Case((32, 8), 80, batch=64, q_len=16).lower()

    @pytest.mark.parametrize("version", [(0, 10, 2), (0, 10, 99)])
    def test_an_older_jax(self, version, monkeypatch):
        monkeypatch.setattr(jax, "__version_info__", version)
        with pytest.raises(NotImplementedError, match=r"the mosaic backend needs JAX 0\.11 or newer.*reference"):
            self.case.decode(self.plan())
        assert_close(self.case.decode(self.plan(backend="reference")), self.case.dense())

    @pytest.mark.parametrize(
        "device",
        [Device("cpu", None), Device("NVIDIA A100-SXM4-80GB", "8.0"), Device("NVIDIA B200", "10.0")],
        ids=lambda device: device.device_kind,
    )
    def test_another_device(self, device, monkeypatch):
        monkeypatch.setattr(jax, "devices", lambda *args: [device])
        with pytest.raises(
            NotImplementedError, match=f"^device '{device.device_kind}': .*sm_90 GPU.*reference.*ahead_of_time=True"
        ):
            sk.paged_decode_attention(*map(jnp.asarray, self.case.arrays), plan=self.plan())

    @needs_mosaic
    def test_lowering_for_another_platform(self):
        plan = Case((4, 2), 64).plan(Case((4, 2), 64).policy())
        call = functools.partial(sk.paged_decode_attention, plan=plan)
        traced = jax.jit(call).trace(*map(jnp.asarray, self.case.arrays))
        with pytest.raises(NotImplementedError, match=r"^platform cpu: .*sm_90 GPU.*reference.*lowering_platforms="):
            traced.lower(lowering_platforms=("cpu",))

    @pytest.mark.skipif(jax.default_backend() == "gpu", reason="this process has a GPU")
    @pytest.mark.parametrize("choice", [{"environ": {"SPLITK_JAX_KERNEL": "reference"}}, {"backend": "reference"}])
    def test_the_other_backend_serves_the_same_call_here(self, choice):
        with pytest.raises(NotImplementedError, match="mosaic backend needs an sm_90 GPU"):
            self.case.decode(self.plan())
        plan = Case((4, 2), 64).plan(sk.load_policy("h200", **({"environ": {}} | choice)))
        assert plan.backend == "reference"
        assert_close(self.case.decode(plan), self.case.dense())


# Launches of one team and of more teams than splits; more rows than teams; outputs that the split kernel cannot write.
SCHEDULES = {
    "llama": Case(),
    "llama-auto-page256": Case(splits="auto", page_size=256),
    "llama-long": Case(longest=131072, splits=64),
    "group1-few-teams": Case((64, 64), 64),
    "one-team": Case(launch_ctas=1),
    "one-cta-a-team": Case((4, 1), 64, launch_ctas=7),
    "as-many-teams-as-sms": Case((8, 1), page_size=64),
    "far-more-teams-than-splits": Case((8, 1), launch_ctas=4000, splits=5),
    "more-ctas-than-sms": Case((300, 300), 64),
    "dv80": Case((6, 2), 80, page_size=8),
    "page24": Case((10, 10), 64, page_size=24),
    "dv80-few-teams": Case((40, 20), 80),
    "dv80-one-split": Case((8, 8), 80, splits="off", launch_ctas=24),
    "one-split": Case(splits="off"),
    "legacy": Case((4, 1), splits="legacy"),
    "adaptive": Case(splits="adaptive"),
    "fixed-size": Case(splits="fixed_size", page_size=32),
    "fixed-size-beyond-the-plan": Case((2, 1), splits="fixed_size"),
}
BATCHES = (1, 2, 3, 17, 64, 200)
REPLAYED = [
    pytest.param(dataclasses.replace(case, batch=batch), id=f"{name}-b{batch}")
    for name, case in SCHEDULES.items()
    for batch in BATCHES
]


def draw_lengths(case, capacity, rng):
    """Ragged lengths: even in their logarithm, some at edges, some empty and some that cannot be served."""
    kind = rng.choice(5, case.batch, p=[0.6, 0.15, 0.15, 0.05, 0.05]) if rng.random() < 0.8 else np.zeros(case.batch)
    spread = np.exp(rng.uniform(0, np.log(capacity), case.batch)).astype(int)
    edges = rng.choice([1, case.page_size, case.page_size + 1, capacity - 1, capacity], case.batch)
    bad = rng.choice([-1, -(2**31), capacity + 1, 2**31 - 1], case.batch)
    return np.select([kind == 1, kind == 2, kind == 3], [edges, 0, bad], spread).astype(np.int32)


class Replay:
    """What the kernels do with a schedule, on the host: who computes which split, and what becomes of it."""

    def __init__(self, plan, schedule):
        rows, work, merge, wanted = (np.asarray(x) for x in schedule[:4])
        self.rows = [Row(*record) for record in rows.tolist()]
        self.merge = [Merge(*record[:MERGE_READS]) for record in merge.tolist()]
        self.reads = merge[:, MERGE_READS:].tolist()
        self.wanted = wanted.tolist()
        self.work = [Work(*record[:WORK_ROW]) for record in work.tolist()]
        self.begins_in = [Row(*record[WORK_ROW:WORK_PAGES]) for record in work.tolist()]
        self.pages = work[:, WORK_PAGES:].reshape(len(work), plan.stages, plan.mosaic_tile.copies)
        self.teams = []  # the (row, split) of each team
        self.partials = {}  # (slot, index) -> (row, first split, past the last)
        self.finished = collections.Counter()
        for team in self.work:
            self.teams.append(list(self.split_kernel(plan, team)))
        self.written = dict(self.partials)
        self.combine_kernel(plan)

    def bounds(self, row, split):
        """Tokens [low, high) of a split of the row in a place of the schedule."""
        rec = self.rows[row]
        edge = rec.origin + (rec.first + split) * rec.span
        return max(rec.start, edge), min(edge + rec.span, rec.tokens)

    def write(self, plan, slot, index, covered):
        assert 0 <= slot < len(self.merge)
        assert 0 <= index < plan.num_splits
        assert (slot, index) not in self.partials, "two writers of one place"
        self.partials[slot, index] = covered

    def split_kernel(self, plan, team):
        row, split, whole, run_whole = team.row, team.split, False, False
        for u in range(team.count):
            yield row, split
            place = split % RUN_SPLITS
            whole |= split == 0
            run_whole |= place == 0
            ends, leaves = split == self.rows[row].splits - 1, u == team.count - 1
            run_ends = ends or place == RUN_SPLITS - 1
            slot = row if not plan.mosaic_tile.direct else team.last_slot if whole else team.slot
            if not run_whole:
                self.write(plan, slot, split, (row, split, split + 1))
            elif (leaves and not run_ends) or (run_ends and not whole):
                self.write(plan, slot, split - place, (row, split - place, split + 1))
            if whole and ends and plan.mosaic_tile.direct:
                self.finished[row] += 1
            elif whole and (ends or leaves) and (run_ends or split >= RUN_SPLITS):
                folded = split + 1 if run_ends else split - place
                self.write(plan, slot, 0, (row, 0, folded))
            whole, run_whole = whole and not ends, run_whole and not run_ends
            row, split = (row + 1, 0) if ends else (row, split + 1)

    def combine_kernel(self, plan):
        place = {row.row: i for i, row in enumerate(self.rows)}
        for slot, (item, reads, wanted) in enumerate(zip(self.merge, self.reads, self.wanted, strict=True)):
            assert len(wanted) % 128 == 0
            assert len(wanted) >= plan.num_splits
            splits = [s for s, one in enumerate(wanted) if one]
            runs = itertools.groupby(splits, lambda s: s // RUN_SPLITS)
            expected = [(run, [s % RUN_SPLITS for s in of]) for run, of in runs]
            assert reads[: item.reads] == [2 * run + (places != [0]) for run, places in expected]
            if item.splits == 0:
                assert not splits
                continue
            row = place[item.row]
            assert item.splits == self.rows[row].splits
            # In order, each split once, and no fold reaches into a run that it did not begin: the sums are the tree's.
            past = 0
            for split in splits:
                of_row, first, stop = self.partials.pop((slot, split))
                assert (of_row, first) == (row, past)
                assert first == split
                assert stop % RUN_SPLITS == 0 or stop == item.splits or stop // RUN_SPLITS == first // RUN_SPLITS
                assert first == 0 or stop <= (first // RUN_SPLITS + 1) * RUN_SPLITS
                past = stop
            assert past == item.splits
            self.finished[row] += 1

    def cost(self, row, plan):
        """What the schedule takes a split of a row to cost, in steps."""
        return self.rows[row].tokens / self.rows[row].splits / plan.step_kv + SPLIT_OVERHEAD


STATIC = ("plan", "window", "q_len")  # of make_schedule


class TestSchedule:
    """Under the promotion rules of conftest.py, so that no rank or dtype is promoted in it."""

    @pytest.mark.parametrize("case", REPLAYED)
    def test_replay(self, case):
        plan, rng = case.plan(), np.random.default_rng(case.batch)
        # A table wider than the plan's tree holds, where its rule bounds that.
        width = case.width + 3
        capacity = min(width * plan.page_size, plan.max_tokens)
        # Compiled at one batch; at the others numpy computes it.
        make = jax.jit(make_schedule, static_argnames=STATIC) if case.batch == 17 else emulator.make_schedule
        for _ in range(6):
            lengths = draw_lengths(case, capacity, rng)
            tables = rng.integers(-(2**31), 2**31, (case.batch, width), dtype=np.int32)
            schedule = make(lengths, tables, plan=plan, window=None)
            assert {x.dtype.name for x in schedule} == {"int32"}
            replay = Replay(plan, schedule)

            # Rows are the plan's tree, in whatever order.
            assert sorted(row.row for row in replay.rows) == list(range(case.batch))
            for row in replay.rows:
                length = int(lengths[row.row])
                served = 0 <= length <= capacity
                assert (row.tokens, row.poison) == ((length, 0) if served else (0, 1))
            for i, row in enumerate(replay.rows):
                expected = [b for b in plan.split_bounds(row.tokens) if b != (0, 0)]
                assert [replay.bounds(i, s) for s in range(row.splits)] == (expected or [(0, 0)])

            assert (np.asarray(schedule.row_of) == np.arange(case.batch)[:, None]).all()

            # Every split once, in order; every row written once, from partials that are its own.
            assert len(replay.teams) == plan.launch_teams
            in_order = [(i, s) for i, row in enumerate(replay.rows) for s in range(row.splits)]
            assert list(itertools.chain(*replay.teams)) == in_order
            assert replay.finished == dict.fromkeys(range(case.batch), 1)
            assert not replay.partials, "a partial that nothing merges"
            slots = min(case.batch, plan.launch_teams) if plan.mosaic_tile.direct else case.batch
            assert len(replay.merge) == slots

            # What a team's first copies read, without the table.
            for team, work in enumerate(replay.work):
                if not work.count:
                    continue
                assert replay.begins_in[team] == replay.rows[work.row]
                low, high = replay.bounds(work.row, work.split)
                for i in range(min(plan.stages, -(-(high - low) // plan.step_kv))):
                    tokens = low + i * plan.step_kv + np.arange(plan.mosaic_tile.copies) * plan.mosaic_tile.copy_rows
                    logical = np.minimum(tokens, high - 1) // plan.page_size
                    assert (replay.pages[team, i] == tables[replay.rows[work.row].row, logical]).all()

            # No team has more than its share by more than two splits, beside what keeps rows whole.
            costs = [sum(replay.cost(row, plan) for row, _ in team) for team in replay.teams]
            largest = max(replay.cost(row, plan) for row in range(case.batch))
            assert max(costs) <= np.mean(costs) * (1 + ALIGNED + SNAP) + 1.75 * largest

    @pytest.mark.parametrize(
        ("case", "q_len", "window"),
        [
            pytest.param(Case(batch=5), 4, None, id="q4"),
            pytest.param(Case((16, 1), batch=9, page_size=64), 16, 100, id="q16-window"),
            pytest.param(Case((4, 2), batch=3), 3, 1, id="q3-window1"),
            pytest.param(Case((40, 20), 80, batch=17, longest=900), 2, 333, id="q2-window-dv80"),
            pytest.param(Case((10, 10), 64, batch=4, splits="fixed_size", page_size=8), 5, 70, id="q5-window-fixed"),
            pytest.param(Case((24, 4), 256, batch=1, splits=17), 8, None, id="q8-pinned"),
            pytest.param(Case((4, 2), batch=7), 1, 200, id="q1-window"),
        ],
    )
    def test_replay_of_query_tokens(self, case, q_len, window):
        """Each query token is in a row whose splits and steps are those of its own length."""
        plan, rng = case.plan(), np.random.default_rng(q_len)
        packed, capacity = plan.packed(q_len), min(case.width * case.page_size, plan.max_tokens)
        make = jax.jit(functools.partial(make_schedule, plan=packed, window=window, q_len=q_len))
        shared = 0
        for _ in range(12):
            lengths = draw_lengths(case, capacity, rng)
            lengths[0] = rng.choice([0, 1, 63, 64, 65, 66, 128, 130, capacity])
            tables = rng.integers(0, 2**31, (case.batch, case.width), dtype=np.int32)
            schedule = make(lengths, tables)
            replay, row_of = Replay(packed, schedule), np.asarray(schedule.row_of)
            places = {row.row: i for i, row in enumerate(replay.rows)}
            for seq, token in np.ndindex(case.batch, q_len):
                row = replay.rows[places[row_of[seq, token]]]
                own = int(lengths[seq]) - (q_len - 1 - token)
                served = lengths[seq] >= 0 and own <= capacity
                assert (row.seq, row.poison) == (seq, 0 if served else 1)
                if not served:
                    continue
                own = max(own, 0)
                assert own <= row.tokens
                assert row.tokens == 0 or row.length == lengths[seq] - (q_len - 1)
                start = max(own - window, 0) if window else 0
                # Cut to what it attends, the row's splits are its own; and steps begin at the same token.
                edges = [row.origin + (row.first + s) * row.span for s in range(row.splits)]
                cut = [(max(start, edge), min(edge + row.span, own)) for edge in edges]
                assert [b for b in cut if b[0] < b[1]] == [
                    b for b in plan.split_bounds(own, window=window) if b != (0, 0)
                ]
                assert row.start // plan.block_kv == start // plan.block_kv or own == 0
                shared += row.row != seq * q_len + token
            led = sorted(set(row_of.reshape(-1).tolist()))
            assert sorted(row.row for row in replay.rows if row.splits) == led
            in_order = [(i, s) for i, row in enumerate(replay.rows) for s in range(row.splits)]
            assert list(itertools.chain(*replay.teams)) == in_order
            assert replay.finished == dict.fromkeys((places[row] for row in led), 1)
            assert not replay.partials
            for team, work in enumerate(replay.work):
                if work.count:
                    row = replay.rows[work.row]
                    low, high = replay.bounds(work.row, work.split)
                    base = low // plan.block_kv * plan.block_kv
                    for i in range(min(packed.stages, -(-(high - base) // plan.step_kv))):
                        copies = np.arange(packed.mosaic_tile.copies) * packed.mosaic_tile.copy_rows
                        logical = np.clip(base + i * plan.step_kv + copies, low, high - 1) // case.page_size
                        assert (replay.pages[team, i] == tables[row.seq, logical]).all()
        assert shared > 0 or q_len == 1

    def test_the_replayed_plans_are_what_they_say(self):
        plans = {name: case.plan() for name, case in SCHEDULES.items()}
        assert {plan.policy.rule for plan in plans.values()} == {
            "auto", "balanced", "legacy", "adaptive", "fixed_size", "pinned"
        }  # fmt: skip
        teams = {name: plan.launch_teams for name, plan in plans.items()}
        assert teams["one-team"] == teams["more-ctas-than-sms"] == 1
        assert teams["group1-few-teams"] == 4
        assert teams["as-many-teams-as-sms"] == 132
        assert teams["far-more-teams-than-splits"] == 4000
        assert {plan.mosaic_tile.direct for plan in plans.values()} == {True, False}

    @pytest.mark.parametrize("launch_ctas", [1, 8, 16, 40, 132, 4000])
    def test_a_launch_moves_no_tree(self, launch_ctas):
        plan, rng = Case().plan(), np.random.default_rng(0)
        lengths = draw_lengths(Case(batch=17), 4096, rng)
        tables = rng.integers(0, 9, (17, 256), dtype=np.int32)

        def trees(plan):
            rows = emulator.make_schedule(lengths, tables, plan=plan, window=None).rows
            return rows[rows[:, 0].argsort()]

        expected = trees(plan)
        other = dataclasses.replace(plan, launch_ctas=launch_ctas)
        assert (trees(other) == expected).all()
        assert other.fingerprint() == plan.fingerprint()

    def test_a_last_team_without_work_merges_nothing(self):
        """It begins past the last row, which another team has written: a merge would put scratch over its output."""
        lengths = np.array([89, 12, 33, 1, 2, 260, 214, 164, 24, 3908, 3412, 294, 220, 301, 25, 3, 397], np.int32)
        plan = dataclasses.replace(Case(splits="off").plan(), launch_ctas=66)
        assert plan.launch_teams < len(lengths)
        tables = np.zeros((17, 256), np.int32)
        replay = Replay(plan, emulator.make_schedule(lengths, tables, plan=plan, window=None))
        assert replay.teams[-1] == []
        assert replay.finished == dict.fromkeys(range(17), 1)

    def test_whole_rows_are_merged_by_nobody(self):
        """As many equal rows as teams: each is written by the CTAs that computed it."""
        plan = Case((64, 8), splits="off").plan()
        lengths = np.full(plan.launch_teams, 300, np.int32)
        tables = np.zeros((len(lengths), 256), np.int32)
        merge = emulator.make_schedule(lengths, tables, plan=plan, window=None).merge
        assert not np.asarray(merge)[:, Merge._fields.index("splits")].any()

    @pytest.mark.parametrize(("batch", "splits", "q_len"), [(1, 33, 1), (1, 132, 4), (17, 7, 1)])
    def test_no_record_is_a_slice(self, batch, splits, q_len):
        """A call that reads a slice becomes one command with it, for which a CUDA graph is updated at each launch."""
        make = functools.partial(make_schedule, plan=Case(batch=batch, splits=splits).plan(), window=None, q_len=q_len)
        shapes = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((batch,), (batch, 256)))

        def made_by(jaxpr, i):
            eqn = next(eqn for eqn in jaxpr.eqns if jaxpr.outvars[i] in eqn.outvars)
            if "jaxpr" in eqn.params:
                return made_by(eqn.params["jaxpr"].jaxpr, eqn.outvars.index(jaxpr.outvars[i]))
            return eqn.primitive.name

        jaxpr = jax.make_jaxpr(make)(*shapes).jaxpr
        makers = {made_by(jaxpr, i) for i in range(len(jaxpr.outvars))}
        assert not makers & {"slice", "dynamic_slice", "reshape", "squeeze"}, makers


@needs_mosaic
class TestCombine:
    """The kernel itself, interpreted, on partials as the split kernel would leave them."""

    @staticmethod
    def fold(a, b):
        (o, m, total), (p, n, more) = a, b
        top = max(m, n)
        x, y = (np.float32(0) if e == -np.inf else np.exp2(e - top) for e in (m, n))
        return o * x + p * y, top, total * x + more * y

    def of_splits(self, parts, first, past):
        """The fold of splits [first, past) of a row: each run, then the runs."""
        runs = [
            functools.reduce(self.fold, parts[s : min(s + RUN_SPLITS, past)]) for s in range(first, past, RUN_SPLITS)
        ]
        return functools.reduce(self.fold, runs)

    @pytest.mark.parametrize(
        ("case", "lengths", "few"),
        [
            pytest.param(Case((2, 1), 256, splits=132, launch_ctas=50), [16300], True, id="more-than-a-copy"),
            pytest.param(Case((4, 2), splits=33, launch_ctas=6), [3000, 0, 700, 5000], False, id="ragged"),
        ],
    )
    # In copies of many runs or of one: which of them a batch takes moves no number.
    def test_folds_what_was_written(self, case, lengths, few, monkeypatch):
        from jax.experimental.pallas import mosaic_gpu as plgpu

        from splitk_jax.kernels.mosaic import combine as module
        from splitk_jax.kernels.mosaic.split import Launched, first_row
        from splitk_jax.kernels.partials import SplitPartials

        interpreted = functools.partial(plgpu.kernel, interpret=plgpu.InterpretGPUParams())
        monkeypatch.setattr(module.plgpu, "kernel", interpreted)

        monkeypatch.setattr(module, "FEW_CTAS", 1e6 if few else 0)
        plan, batch, rng = case.plan(), len(lengths), np.random.default_rng(0)
        tile, dim = plan.mosaic_tile, plan.head_dim_v
        blocks = plan.num_kv_heads * tile.blocks
        schedule = make_schedule(np.array(lengths, np.int32), np.zeros((batch, 1024), np.int32), plan=plan, window=None)
        replay = Replay(plan, schedule)
        assert replay.written, "nothing to merge"

        def random_part(tokens):
            if tokens == 0:
                return np.zeros((plan.num_q_heads, dim), np.float32), -np.inf, np.float32(0)
            o = rng.normal(size=(plan.num_q_heads, dim)).astype(np.float32)
            return o, np.float32(rng.integers(-9, 9)), np.float32(rng.uniform(1, 9))

        parts = [[random_part(row.tokens) for _ in range(row.splits)] for row in replay.rows]
        # What nobody wrote is NaN.
        shape = (len(replay.merge), blocks)
        o = np.full((*shape, tile.cols, plan.scratch_splits, tile.lanes), np.nan, np.float32)
        tops, totals = (np.full((*shape, plan.scratch_weights, tile.cols), np.nan, np.float32) for _ in range(2))
        head = np.arange(plan.num_q_heads)
        block = head // tile.heads
        col = head - first_row(plan, block, xp=np)
        for (slot, index), (row, first, past) in replay.written.items():
            values, top, total = self.of_splits(parts[row], first, past)
            o[slot, block, col, index, :dim] = values
            tops[slot, block, index, col], totals[slot, block, index, col] = top, total
        launched = Launched(
            out=jnp.full((batch, plan.num_q_heads, dim), 7, jnp.bfloat16),
            lse=jnp.full((batch, blocks, tile.cols), 7, jnp.float32),
            partials=SplitPartials(*map(jnp.asarray, (o, tops, totals))),
            schedule=schedule,
        )
        out, lse = module.combine(launched, None, plan=plan)
        merged = {item.row for item in replay.merge if item.splits}
        for row, splits in zip(replay.rows, parts, strict=True):
            values, top, total = self.of_splits(splits, 0, row.splits)
            expected = values / total if total else values
            if row.row not in merged:  # written by the split kernel
                expected, lse_expected = np.full_like(values, 7), 7
            else:
                lse_expected = (top + np.log2(total)) * np.log(2) if total else -np.inf
            np.testing.assert_allclose(np.asarray(out[row.row, 0], np.float32), expected, rtol=8e-3, atol=1e-6)
            np.testing.assert_allclose(lse[row.row, 0], np.full(plan.num_q_heads, lse_expected), rtol=1e-5)
