"""What `inspect` finds in a trace: every call through every construct, and nothing but what the jaxpr holds."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from jax.sharding import Mesh, PartitionSpec

import splitk_jax as sk
from splitk_jax import log, marks, testing
from splitk_jax.checks import MOSAIC_JAX
from splitk_jax.cli import main

HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "max_decode_seqs": 8}
NEEDS_MOSAIC = pytest.mark.skipif(
    jax.__version_info__ < MOSAIC_JAX, reason=f"jax {jax.__version__} is too old for mosaic"
)
BATCH, WIDTH, PAGES = 3, 4, 16


def make_plan(**settings):
    dtypes = {"q_dtype": "float32", "kv_dtype": "float32"}
    return sk.load_policy("cpu", environ={}, **settings).plan(**HEADS, **dtypes)


PLAN = make_plan(splits=3, min_kv_per_split=16)
OTHER = make_plan(splits=2, min_kv_per_split=16)


def arguments(*lead, batch=BATCH):
    """Abstract arguments of a call, q with leading axes of its own."""
    pool = jax.ShapeDtypeStruct((PAGES, 16, 2, 64), jnp.float32)
    return (
        jax.ShapeDtypeStruct((*lead, batch, 4, 64), jnp.float32),
        pool,
        pool,
        jax.ShapeDtypeStruct((batch, WIDTH), jnp.int32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )


def decode(*arrays, plan=PLAN, **options):
    return sk.paged_decode_attention(*arrays, plan=plan, **options)


def scanned(q, *rest, plan=PLAN):
    return jax.lax.scan(lambda x, _: (decode(x, *rest, plan=plan), None), q, None, length=5)[0]


def scanned_twice(q, *rest):
    return jax.lax.scan(lambda x, _: (scanned(x, *rest), None), q, None, length=3)[0]


def in_while(q, *rest):
    return jax.lax.while_loop(lambda x: x.sum() < 0, lambda x: decode(x, *rest), q)


def in_branches(q, *rest):
    return jax.lax.cond(
        rest[-1][0] > 3, lambda: decode(q, *rest), lambda: decode(q, *rest, plan=OTHER) + scanned(q, *rest)
    )


def sharded(q, *rest):
    mesh = Mesh(np.array(jax.devices()[:1]), ("heads",))
    by_head = PartitionSpec(None, "heads")
    pools = PartitionSpec(None, None, "heads")
    specs = (by_head, pools, pools, PartitionSpec(), PartitionSpec())
    return jax.shard_map(decode, mesh=mesh, in_specs=specs, out_specs=by_head)(q, *rest)


def in_condition(q, *rest):
    return jax.lax.while_loop(lambda x: decode(x, *rest).sum() < 0, lambda x: x + 1, q)


def switched(q, *rest):
    return jax.lax.switch(
        rest[-1][0], [lambda: q, lambda: decode(q, *rest), lambda: decode(q, *rest, plan=OTHER), lambda: q * 2]
    )


def mixed(q, *rest):
    """A scan in a branch in a shard_map in a jit."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("heads",))

    def shard(q, *rest):
        return jax.lax.cond(rest[-1][0] > 3, scanned, lambda q, *_: q, q, *rest)

    return jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec()))(q, *rest)


def rematerialised(*arrays):
    return jax.checkpoint(decode)(*arrays)


@jax.custom_jvp
def custom(*arrays):
    return decode(*arrays)


@custom.defjvp
def custom_jvp(primals, tangents):
    return custom(*primals), tangents[0]


@jax.custom_vjp
def custom_backward(*arrays):
    return decode(*arrays)


custom_backward.defvjp(lambda *arrays: (decode(*arrays, plan=OTHER), None), lambda _, g: (g, None, None, None, None))


def with_a_gradient(q, *rest):
    """The forward rule's call, in a scan that is differentiated."""
    return jax.grad(lambda q: jax.lax.scan(lambda x, _: (custom_backward(x, *rest), None), q, length=5)[0].sum())(q)


def of_layers(*arrays):
    layer = jax.jit(decode)
    return layer(layer(*arrays), *arrays[1:])


CONSTRUCTS = {
    "plain": (decode, [((), 1)]),
    "jit": (jax.jit(decode), [((), 1)]),
    "nested-jit": (jax.jit(of_layers), [((), 1), ((), 1)]),
    "scan": (scanned, [(("scan of 5",), 5)]),
    "scan-in-scan": (jax.jit(scanned_twice), [(("scan of 3", "scan of 5"), 15)]),
    "while": (in_while, [(("while",), None)]),
    "cond": (
        in_branches,
        [
            (("branch 0 of cond",), None),
            (("branch 0 of cond", "scan of 5"), None),
            (("branch 1 of cond",), None),
        ],
    ),
    "while-condition": (in_condition, [(("condition of while",), None)]),
    "switch": (switched, [(("branch 1 of cond",), None), (("branch 2 of cond",), None)]),
    "scan-in-cond-in-shard-map": (mixed, [(("shard_map", "branch 1 of cond", "scan of 5"), None)]),
    "custom-vjp": (custom_backward, [((), 1)]),
    "grad-of-custom-vjp": (with_a_gradient, [(("scan of 5",), 5)]),
    "remat": (rematerialised, [(("remat",), 1)]),
    "custom-jvp": (custom, [((), 1)]),
    "shard-map": (sharded, [(("shard_map",), 1)]),
}


def merge_three(x):
    """Of f32[n, 4], as outs, and their first lanes as lses."""
    return sk.merge_states([x, x + 1, x + 2], [x[..., 0]] * 3)[0]


def merge_twice_mapped(x):
    return jax.vmap(jax.vmap(merge_three, in_axes=1))(x[:, None, :, None] + jnp.zeros((1, 2, 4, 4)))


MERGES = {
    "jit": (jax.jit(merge_three), [((), 1)]),
    "scan": (lambda x: jax.lax.scan(lambda c, _: (merge_three(c), None), x, length=5), [(("scan of 5",), 5)]),
    "while": (
        lambda x: jax.lax.while_loop(lambda c: merge_three(c).sum() < 0, lambda c: c + 1, x),
        [(("condition of while",), None)],
    ),
    "cond": (lambda x: jax.lax.cond(x[0, 0] > 0, merge_three, lambda c: c, x), [(("branch 1 of cond",), None)]),
    "vmap": (jax.vmap(merge_three), [(("vmap of 7",), 1)]),
    "vmap-of-outs": (
        lambda x: jax.vmap(lambda out: sk.merge_states([out] * 3, [x[:, 0]] * 3))(x[None] + jnp.zeros((5, 1, 1))),
        [(("vmap of 5",), 1)],
    ),
    "vmap-in-vmap": (merge_twice_mapped, [(("vmap of 7", "vmap of 4"), 1)]),
    "jvp": (lambda x: jax.jvp(merge_three, (x,), (x,)), [((), 1)]),
    "grad": (jax.grad(lambda x: merge_three(x).sum()), [((), 1)]),
    "grad-of-vmap-in-scan": (
        jax.grad(lambda x: jax.lax.scan(lambda c, _: (jax.vmap(merge_three)(c), None), x, length=5)[0].sum()),
        [(("scan of 5", "vmap of 7"), 5)],
    ),
}


@jax.jit
def splitk_decode_of_mine(x):
    return x


@jax.jit
def splitk_merge_states(x, y):
    return x + y


class TestConstructs:
    @pytest.mark.parametrize("name", CONSTRUCTS)
    def test_every_call_is_found(self, name):
        fn, expected = CONSTRUCTS[name]
        calls = sk.inspect(fn, *arguments())
        assert [(call.where, call.times) for call in calls] == expected
        for call in calls:
            assert call.kind == "decode"
            assert call.plan in (PLAN, OTHER)
            assert (call.num_splits, call.backend) == (call.plan.num_splits, "reference")
            assert call.fingerprint == call.plan.fingerprint()
            assert (call.batch, call.q_len) == (BATCH, 1)
            assert re.fullmatch(rf"{re.escape(__file__)}:\d+ \((decode|<lambda>)\)", call.source)

    @pytest.mark.parametrize("axis", [0, 2])
    def test_vmap_is_a_loop(self, axis):
        q, *rest = arguments(7)
        q = jax.ShapeDtypeStruct((*q.shape[1 : axis + 1], 7, *q.shape[axis + 1 :]), q.dtype)
        (call,) = sk.inspect(jax.vmap(decode, in_axes=(axis, *[None] * 4), out_axes=axis), q, *rest)
        assert (call.plan, call.batch, call.q_len) == (PLAN, BATCH, 1)
        assert (call.where, call.times) == (("vmap of 7",), 7)

    def test_vmap_of_lengths_in_a_scan(self):
        def layers(q, *rest):
            by_lengths = jax.vmap(decode, in_axes=(None, None, None, None, 0))
            return jax.lax.scan(lambda x, _: (by_lengths(x, *rest)[0], None), q, None, length=5)[0]

        *arrays, lengths = arguments()
        lengths = jax.ShapeDtypeStruct((3, *lengths.shape), lengths.dtype)
        (call,) = sk.inspect(layers, *arrays, lengths)
        assert (call.where, call.times) == (("scan of 5", "vmap of 3"), 15)

    def test_branches_hold_their_own_plans(self):
        calls = sk.inspect(in_branches, *arguments())
        assert [call.plan for call in calls] == [OTHER, PLAN, PLAN]

    def test_merges(self):
        def cascade(*arrays):
            outs, lses = zip(*(decode(*arrays, return_lse=True) for _ in range(2)), strict=True)
            return sk.merge_states(outs, lses)

        assert [call.kind for call in sk.inspect(cascade, *arguments())] == ["decode", "decode", "merge"]
        merge = sk.inspect(cascade, *arguments())[2]
        assert (merge.plan, merge.num_splits, merge.kernels) == (None, None, ())
        assert "(cascade)" in str(merge.source)
        assert merge.states == 2

    @pytest.mark.parametrize("name", MERGES)
    def test_merges_in_constructs(self, name):
        """The states of each are its own, whatever a transformation has added to its operands."""
        fn, expected = MERGES[name]
        x = jax.ShapeDtypeStruct((7, 4), jnp.float32)
        found = [(call.kind, call.states, call.where, call.times) for call in sk.inspect(fn, x)]
        assert found == [("merge", 3, *each) for each in expected]

    def test_options_that_are_static(self):
        (call,) = sk.inspect(functools.partial(decode, window=9, softcap=2.0), *arguments())
        assert (call.window, call.softcap, call.sinks) == (9, 2.0, False)

        def with_sinks(*arrays):
            return decode(*arrays, sinks=jnp.zeros(4)) + decode(*arrays)

        found = sk.inspect(with_sinks, *arguments())
        assert [call.sinks for call in found] == [True, False]
        assert "sinks" in str(found)

    def test_several_query_tokens(self):
        q, *rest = arguments()
        q = jax.ShapeDtypeStruct((BATCH, 2, 4, 64), jnp.float32)
        (call,) = sk.inspect(decode, q, *rest)
        assert (call.batch, call.q_len) == (BATCH, 2)

    def test_a_function_without_a_call(self):
        assert len(sk.inspect(jnp.sin, jax.ShapeDtypeStruct((3,), jnp.float32))) == 0
        assert "no call" in str(sk.inspect(lambda: None))


def shown_by(how, plan, first):
    if how == "beside":  # an equal plan in the same function
        return sk.inspect(lambda *arrays: decode(*arrays, plan=first) + decode(*arrays, plan=plan), *arguments())
    if how == "static":
        return sk.inspect(STATIC, *arguments(), plan=plan)
    step = functools.partial(decode, plan=plan)
    return (
        sk.inspect(jax.jit(step).trace(*arguments()))
        if how == "trace"
        else sk.inspect(step if how == "function" else jax.jit(step), *arguments())
    )


STATIC = jax.jit(decode, static_argnames="plan")


class TestWhatItIsReadFrom:
    def test_another_plan_shows(self):
        """In the inspection and in what is lowered, both."""
        for plan in (PLAN, OTHER):
            call = jax.jit(functools.partial(decode, plan=plan))
            (found,) = sk.inspect(call, *arguments())
            text = call.lower(*arguments()).as_text()
            assert found.plan == plan
            assert found.kernels
            assert {f"_s{plan.num_splits}" in name for name, _ in found.kernels} == {True}
            for name, _ in found.kernels:
                assert re.search(rf"\b{name}\b", text)
            assert f"splitk_decode_s{plan.num_splits}_t{plan.step_kv}_reference_{plan.fingerprint()}" in text

    @pytest.mark.parametrize("jitted", [False, True], ids=["function", "jit"])
    def test_nothing_is_compiled_or_run(self, monkeypatch, jitted):
        import jax._src.compiler as compiler

        def refuse(*args, **kwargs):
            raise AssertionError("compiled")

        monkeypatch.setattr(compiler, "backend_compile_and_load", refuse, raising=False)
        monkeypatch.setattr(compiler, "compile_or_get_cached", refuse)
        plan = make_plan(splits=5, min_kv_per_split=16)
        step = functools.partial(scanned, plan=plan)
        step = jax.jit(step) if jitted else step
        assert sk.inspect(step, *arguments())[0].plan == plan
        with pytest.raises(AssertionError, match="compiled"):
            jax.jit(step).lower(*arguments()).compile()

    @pytest.mark.parametrize("backend", ["reference", pytest.param("mosaic", marks=NEEDS_MOSAIC)])
    def test_no_device_is_asked_for(self, backend, monkeypatch):
        """Of a plan that nobody called ahead of time; and its run, afterwards, is compared all the same."""
        import jax._src.xla_bridge as xla_bridge

        plan = sk.load_policy("h200", environ={}, backend=backend).plan(**HEADS)
        arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments()]
        arrays[:3] = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in arrays[:3]]
        step = jax.jit(functools.partial(decode, plan=plan))

        def refuse(*args, **kwargs):
            raise AssertionError("a device was asked for")

        with monkeypatch.context() as patch:
            for name in ("devices", "default_backend", "local_devices"):
                patch.setattr(jax, name, refuse)
            for name in ("backends", "get_backend", "devices"):
                patch.setattr(xla_bridge, name, refuse)
            assert sk.inspect(step, *arrays)[0].plan == plan
            assert len(sk.inspect(merge_three, jax.ShapeDtypeStruct((4, 64), jnp.float32))) == 1

        class Slice:
            platform, device_kind, core_count, compute_capability = "gpu", "NVIDIA H200 MIG", 60, "9.0"

        monkeypatch.setattr(jax, "devices", lambda *args: [Slice()])
        with pytest.raises(sk.ConfigError, match="sm_count=132"):
            step.trace(*arrays)

    @pytest.mark.parametrize("stage", ["traced", "lowered", "compiled", "exported"])
    def test_what_becomes_of_a_function(self, stage):
        call = jax.jit(scanned)
        traced = call.trace(*arguments())
        made = {
            "traced": lambda: traced,
            "lowered": traced.lower,
            "compiled": lambda: traced.lower().compile(),
            "exported": lambda: jax.export.export(call)(*arguments()),
        }[stage]()
        (found,) = sk.inspect(made)
        assert (found.num_splits, found.backend, found.fingerprint) == (3, "reference", PLAN.fingerprint())
        assert (found.plan == PLAN) is (stage == "traced")
        if stage != "compiled":  # XLA has inlined the reference backend's functions by then
            assert {name for name, _ in found.kernels} == {
                f"splitk_reference_split_s3_t{PLAN.step_kv}",
                "splitk_reference_combine_s3",
            }
        with pytest.raises(TypeError, match="traced already"):
            sk.inspect(made, 1)

    def test_arguments_that_are_no_arrays(self):
        def step(arrays, settings):
            return decode(*arrays, plan=settings["plan"]), settings["name"]

        (call,) = sk.inspect(step, arguments(), {"plan": OTHER, "name": "x"})
        assert call.plan == OTHER

    @pytest.mark.parametrize("stage", ["traced", "lowered", "compiled"])
    def test_functions_with_names_like_ours(self, stage):
        def step(q, *cache):
            x = splitk_merge_states(splitk_decode_of_mine(q), q)
            return x, sk.merge_states([decode(x, *cache), x], [x[..., 0]] * 2)

        traced = jax.jit(step).trace(*arguments())
        made = {"traced": lambda: traced, "lowered": traced.lower, "compiled": lambda: traced.lower().compile()}[
            stage
        ]()
        assert [(call.kind, call.states) for call in sk.inspect(made)] == [("decode", None), ("merge", 2)]

    @pytest.mark.parametrize("how", ["function", "jit", "trace", "static", "beside"])
    def test_what_is_shown_is_the_plan_of_the_call(self, how):
        """Equal plans share what runs; a plan says of itself where it came from, which equality leaves out."""
        first = make_plan(splits=2, min_kv_per_split=16)
        second = make_plan(splits="auto", target_waves=4, min_kv_per_split=16)
        shown = [call.plan.policy.rule for plan in (first, second) for call in shown_by(how, plan, first)]
        assert first == second
        assert shown == (["pinned"] * 2 + ["pinned", "auto"] if how == "beside" else ["pinned", "auto"])

    def test_a_text_keeps_tiles_apart(self):
        """Of two plans with as many splits each has its own kernels, and not those whose names begin alike."""
        tiles = [sk.Tile(heads_per_cta=64, block_kv=16, step_kv=step) for step in (16, 160)]
        policies = [sk.Policy(sm_count=1, splits=3, min_kv_per_split=16, tiles=(tile,)) for tile in tiles]
        plans = [policy.plan(**HEADS, q_dtype="float32", kv_dtype="float32") for policy in policies]
        lowered = jax.jit(lambda *arrays: sum(decode(*arrays, plan=plan) for plan in plans)).lower(*arguments())
        names = {call.fingerprint: {name for name, _ in call.kernels} for call in sk.inspect(lowered)}
        assert names == {
            plan.fingerprint(): {f"splitk_reference_split_s3_t{plan.step_kv}", "splitk_reference_combine_s3"}
            for plan in plans
        }

    def test_names_in_device_code(self):
        class Compiled:
            def as_text(self):
                calls = [f"jit(splitk_decode_s3_{tile}_mosaic_{'0' * 16})" for tile in ("t64x2", "t64")]
                kernels = (r"version\00splitk_split_s3_t64x2\00mpmd", "splitk_combine_s3_gpu", "splitk_split_s33_t64x2")
                return " ".join((*calls, *kernels))

        whole, other = sk.inspect(Compiled())
        assert [name for name, _ in whole.kernels] == ["splitk_split_s3_t64x2", "splitk_combine_s3"]
        assert [name for name, _ in other.kernels] == ["splitk_combine_s3"]

    def test_a_text_keeps_plans_apart(self):
        def two(*arrays):
            return decode(*arrays) + decode(*arrays, plan=OTHER)

        lowered = jax.jit(two).lower(*arguments())
        for call in sk.inspect(lowered):
            assert len(call.kernels) == 2
            assert all(f"_s{call.num_splits}" in name for name, _ in call.kernels)
        assert all(line.startswith(" ?") for line in str(sk.inspect(lowered)).splitlines() if "decode" in line)

    def test_an_exported_function_that_is_called(self):
        exported = jax.export.export(jax.jit(decode))(*arguments())
        (call,) = sk.inspect(lambda *arrays: exported.call(*arrays), *arguments())
        assert (call.fingerprint, call.where) == (PLAN.fingerprint(), ("exported",))

    def test_without_jit(self):
        with jax.disable_jit():
            (call,) = sk.inspect(decode, *arguments())
        assert call.plan == PLAN

    def test_an_object_with_a_trace_of_its_own(self):
        class Engine:
            def trace(self, path):
                raise AssertionError("not JAX's")

            def __call__(self, *arrays):
                return decode(*arrays)

        assert sk.inspect(Engine(), *arguments())[0].plan == PLAN

    def test_refuses_what_is_no_function(self):
        with pytest.raises(TypeError, match=r"fn must be a function.*got builtins\.int"):
            sk.inspect(3)

    def test_a_module_beside_the_package_is_the_users(self):
        path = f"{Path(sk.__file__).parent}_models/model.py"
        scope = {"decode": sk.paged_decode_attention, "plan": PLAN}
        exec(compile("def step(*arrays):\n    return decode(*arrays, plan=plan)", path, "exec"), scope)
        assert sk.inspect(scope["step"], *arguments())[0].source == f"{path}:2 (step)"

    def test_a_table_keeps_fingerprints_whole(self):
        (call,) = sk.inspect(decode, *arguments())
        long = {"source": f"/model.py:93 ({'a_long_name_' * 9})", "where": ("shard_map", "scan of 126", "remat") * 3}
        call = dataclasses.replace(call, window=100_000, softcap=0.123456789, sinks=True, **long)
        lines = str(sk.Inspection((call,))).splitlines()
        assert sum(line.endswith(f" {PLAN.fingerprint()}") for line in lines) == 1

    def test_a_call_without_a_line_is_counted(self):
        (call,) = sk.inspect(decode, *arguments())
        text = str(sk.Inspection((dataclasses.replace(call, source=None),) * 2))
        assert re.search(r"^ 2 +decode +- ", text, flags=re.MULTILINE)

    def test_prints_and_reports(self):
        found = sk.inspect(scanned, *arguments())
        text = str(found)
        for part in ("scan of 5", PLAN.fingerprint(), "splitk_reference_split_s3", "test_inspection.py:"):
            assert part in text
        (facts,) = json.loads(found.to_json())
        assert facts["times"] == 5
        assert facts["plan"]["num_splits"] == 3
        assert facts["where"] == ["scan of 5"]


@NEEDS_MOSAIC
class TestMosaic:
    def test_kernels_and_grids_are_the_launches(self):
        shape = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "max_decode_seqs": 4}
        plan = sk.load_policy("h200", environ={}, ahead_of_time=True).plan(**shape)
        pool = jax.ShapeDtypeStruct((64, 16, 8, 128), jnp.bfloat16)
        arrays = (
            jax.ShapeDtypeStruct((4, 32, 128), jnp.bfloat16),
            pool,
            pool,
            jax.ShapeDtypeStruct((4, 16), jnp.int32),
            jax.ShapeDtypeStruct((4,), jnp.int32),
        )
        call = jax.jit(functools.partial(decode, plan=plan))
        (found,) = sk.inspect(call, *arrays)
        assert (found.backend, found.plan) == ("mosaic", plan)
        (split, split_grid), (combine, combine_grid) = found.kernels
        assert split == f"splitk_split_s33_t{plan.step_kv}x{plan.stages}"
        assert split_grid == (plan.ctas, plan.launch_teams)
        assert combine == "splitk_combine_s33"
        assert np.prod(combine_grid) == 32 * 4
        lowered = call.trace(*arrays).lower(lowering_platforms=("cuda",))
        for name in (split, combine):
            assert name in lowered.as_text()
        (read,) = sk.inspect(lowered)
        assert (read.num_splits, read.fingerprint) == (33, plan.fingerprint())
        assert {name for name, _ in read.kernels} == {split, combine}

        # Beside a call of the other backend with as many splits.
        other = sk.load_policy("h200", environ={}, ahead_of_time=True, backend="reference").plan(**shape)
        both = jax.jit(lambda *arrays: decode(*arrays, plan=plan) + decode(*arrays, plan=other))
        for call in sk.inspect(both.trace(*arrays).lower(lowering_platforms=("cuda",))):
            names = {name for name, _ in call.kernels}
            assert len(names) == 2
            assert all(name.startswith("splitk_reference_") == (call.backend == "reference") for name in names)

    @pytest.mark.parametrize("q_len", [1, 9])
    def test_names_of_calls_hold_their_own_tile(self, q_len):
        """Query tokens and scales of each token take stages away, which the plan alone does not say."""
        policy = sk.load_policy("h200", environ={}, ahead_of_time=True)
        plan = policy.plan(**HEADS | {"num_q_heads": 32, "num_kv_heads": 4}, kv_dtype="float8_e4m3fn")
        pool = jax.ShapeDtypeStruct((PAGES, 16, 4, 64), jnp.float8_e4m3fn)
        scale, q = (
            jax.ShapeDtypeStruct(pool.shape[:3], jnp.float32),
            jax.ShapeDtypeStruct((3, q_len, 32, 64), "bfloat16"),
        )
        step = jax.jit(lambda scale, *arrays: decode(*arrays, plan=plan, k_scale=scale, v_scale=scale))
        traced = step.trace(scale, q, pool, pool, *arguments()[3:])
        tile = marks.tile_name(plan, q_len, 2)
        assert marks.call_name(plan, tile) in str(traced.jaxpr)
        assert [name for name, _ in sk.inspect(traced)[0].kernels] == [
            *marks.kernel_names(plan.num_splits, tile, "mosaic")
        ]


class TestTheMark:
    def test_costs_no_operation(self):
        text = jax.jit(decode).lower(*arguments()).as_text()
        assert "splitk_plan" not in text

    @pytest.mark.parametrize("name", ["q", "k_pages", "v_pages", "sm_scale", "sinks"])
    def test_a_gradient_says_that_there_is_none(self, name):
        arrays = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), arguments())
        operands = dict(zip(("q", "k_pages", "v_pages", "block_tables", "seq_lens"), arrays, strict=True))
        operands |= {"sm_scale": jnp.float32(1), "sinks": jnp.zeros(PLAN.num_q_heads)}

        def call(x):
            return sk.paged_decode_attention(**operands | {name: x}, plan=PLAN).astype(jnp.float32).sum()

        x = operands[name]
        for differentiate in (jax.grad(call), jax.jit(jax.grad(call)), lambda x: jax.jvp(call, (x,), (x,))):
            with pytest.raises(NotImplementedError, match="paged_decode_attention has no gradient"):
                differentiate(x)

    def test_equal_plans_are_one_call(self):
        twin = dataclasses.replace(PLAN)
        assert twin is not PLAN
        traced = []

        @functools.partial(jax.jit, static_argnames="plan")
        def call(*arrays, plan):
            traced.append(plan)
            return decode(*arrays, plan=plan)

        for plan in (PLAN, twin):
            call.trace(*arguments(), plan=plan)
        assert len(traced) == 1


class TestLog:
    @pytest.fixture(autouse=True)
    def _as_it_was(self, monkeypatch):
        monkeypatch.setattr(log, "_seen", set())

    def trace(self, **environ):
        policy = sk.load_policy("cpu", environ=environ, splits=7, min_kv_per_split=16)
        plan = policy.plan(**HEADS, q_dtype="float32", kv_dtype="float32")
        jax.clear_caches()
        for _ in range(2):
            jax.jit(lambda *arrays: decode(*arrays, plan=plan)).trace(*arguments())
        return plan

    def test_says_nothing_unless_asked(self, caplog):
        caplog.set_level("INFO", logger="splitk_jax")
        self.trace()
        assert not caplog.records

    def test_to_the_standard_error_where_nobody_logs(self, monkeypatch, capsys):
        monkeypatch.setattr(log.LOGGER, "propagate", False)
        plan = self.trace(SPLITK_JAX_LOG="plan")
        assert capsys.readouterr().err == f"splitk_jax.plan: {log.line(plan)}\n"

    @pytest.mark.parametrize("disabled", [False, True])
    def test_a_line_a_plan(self, caplog, monkeypatch, disabled):
        """Whatever a program has done to the logger since."""
        monkeypatch.setattr(log.LOGGER, "disabled", disabled)
        plan = self.trace(SPLITK_JAX_LOG="plan")
        (record,) = caplog.records
        assert record.name == "splitk_jax.plan"
        assert record.getMessage() == (
            "cpu: 7 splits by pinned (argument splits), 14 CTAs with all of them, 14.0 waves of 1, reference, plan "
            + plan.fingerprint()
        )

    @pytest.mark.parametrize("value", ["", "1", "Plan", "plan,all"])
    def test_another_value_is_refused(self, value):
        with pytest.raises(sk.ConfigError, match=rf"SPLITK_JAX_LOG='{value}' is not valid: accepted is plan"):
            sk.load_policy("cpu", environ={"SPLITK_JAX_LOG": value})


class TestCountTraces:
    def test_two_hundred_steps_are_one_trace(self):
        """Lengths grow, rows come and go; a new shape traces again."""
        step = jax.jit(decode)
        pool = jnp.zeros((PAGES, 16, 2, 64))
        tables = np.arange(BATCH * WIDTH, dtype=np.int32).reshape(BATCH, WIDTH)
        lengths = np.array([1, 0, 9], np.int32)
        with testing.count_traces() as traces:
            for i in range(200):
                lengths = np.where(np.arange(BATCH) == i % BATCH, (lengths + 1) % (WIDTH * 16), lengths)
                tables = np.roll(tables, i % 2, axis=0)
                step(jnp.ones((BATCH, 4, 64)), pool, pool, tables, lengths.astype(np.int32))
        assert (traces.count, traces.plans) == (1, [PLAN])
        with testing.count_traces() as more:
            step(jnp.ones((1, 4, 64)), pool, pool, tables[:1], lengths[:1].astype(np.int32))
        assert (traces.count, more.count) == (1, 1)

    def test_a_call_outside_jit_is_none(self):
        pool = jnp.zeros((PAGES, 16, 2, 64))
        with testing.count_traces() as traces:
            decode(jnp.ones((1, 4, 64)), pool, pool, np.zeros((1, 1), np.int32), np.ones(1, np.int32))
        assert traces.count == 0


def of_nothing():
    return decode, arguments()


def of_an_array():
    return decode, 3


def of_a_mistake():
    def step(x):
        return x + {}["no such layer"]

    return step, arguments()[:1]


def of_another_target():
    sk.load_policy("h300")


def that_leaves():
    raise SystemExit(3)


def for_a_named_target():
    """As a program has it, that is made for the machine that it runs on."""
    plan = sk.load_policy(backend="reference").plan(**HEADS, q_dtype="float32", kv_dtype="float32")
    return functools.partial(decode, plan=plan), arguments()


class TestCommand:
    HERE = str(Path(__file__))

    def run(self, *args):
        return CliRunner().invoke(main, ["inspect", *args])

    def test_a_function_that_returns_what_to_inspect(self):
        done = self.run(f"{self.HERE}:of_nothing")
        assert done.exit_code == 0, done.output
        for part in ("decode", "splitk_reference_split_s3", PLAN.fingerprint()):
            assert part in done.output

    def test_the_target_of_the_environment_needs_no_device(self, monkeypatch):
        monkeypatch.setenv("SPLITK_JAX_TARGET", "h200")
        monkeypatch.setattr(jax, "devices", lambda *args: pytest.fail("a device was asked for"))
        done = self.run(f"{self.HERE}:for_a_named_target", "--json")
        assert done.exit_code == 0, done.output
        assert json.loads(done.output)[0]["plan"]["launch_ctas"] == 132

    def test_shapes_on_the_command_line(self):
        specs = "f32[3,4,64] float32[16, 16, 2, 64], f32[16,16,2,64] i32[3,4]  int32[3]"
        done = self.run(f"{self.HERE}:decode", "--args", specs, "--json")
        assert done.exit_code == 0, done.output
        (facts,) = json.loads(done.output)
        assert (facts["batch"], facts["num_splits"]) == (3, 3)

    def test_a_module(self):
        done = self.run("jax.numpy:sin", "--args", "f32[]")
        assert (done.exit_code, done.output) == (0, "no call of splitk_jax\n\n")

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (["no_such_module:f"], "'no_such_module' cannot be imported"),
            (["no_such_file.py"], "'no_such_file.py' is not a file"),
            (["json:nothing"], "'json:nothing': json has no 'nothing'"),
            (["json:__name__"], "'json:__name__' is not a function, got str"),
            (["json"], "'json' names no function"),
            ([HERE], "splitk_inspect is taken"),
            (["builtins:dict"], "returned dict: accepted is (function, args)"),
            ([f"{HERE}:scanned"], "scanned has parameters (q): give their shapes with --args"),
            ([f"{HERE}:of_an_array"], "returned tuple of (function, int): accepted is (function, args)"),
            ([f"{HERE}:of_a_mistake"], " (step): KeyError: 'no such layer'"),
            ([f"{HERE}:of_another_target"], " (of_another_target): ConfigError: target 'h300' is not known"),
            ([f"{HERE}:that_leaves"], " (that_leaves): SystemExit: 3"),
            ([f"{HERE}:that_leaves", "--args", "f32[]"], "TypeError: that_leaves() takes 0 positional arguments"),
            ([":f"], "':f' names no module"),
            ([""], "'' names no module"),
            ([".f:g"], "'.f:g' names no module"),
            (["jax.numpy:sin", "--args", "str[3]"], "'str' is no dtype: accepted are JAX's names"),
            (["jax.numpy:sin", "--args", "object[3]"], "'object' is no dtype: accepted are JAX's names"),
            (["jax.numpy:sin", "--args", "float64[3]"], "'float64' would be narrowed to float32"),
            (["jax.numpy:sin", "--args", "f32[3"], "'f32[3' does not begin with an array"),
            (["jax.numpy:sin", "--args", "f32[3] f33[3]"], "'f33' is no dtype: accepted are JAX's names"),
        ],
    )
    def test_what_is_refused(self, args, message):
        done = self.run(*args)
        assert done.exit_code == 2
        assert len(done.stderr.strip().splitlines()) == 1
        assert message in done.stderr

    def test_a_module_that_fails_is_told_by_its_line(self, tmp_path):
        path = tmp_path / "broken_model.py"
        for text, message in (
            ("import json\n\nimport no_such_module", f"{path}:3 (<module>): ModuleNotFoundError: No module named"),
            ("def f(:", "SyntaxError: invalid syntax (broken_model.py, line 1)"),
        ):
            path.write_text(text)
            done = self.run(str(path))
            assert done.exit_code == 2
            assert done.stderr.startswith(f"Error: {str(path)!r} cannot be imported: {message}")
            assert len(done.stderr.strip().splitlines()) == 1
