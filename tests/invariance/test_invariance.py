"""The guarantee: a row's bits, out and lse, are a function of its own query, own live K/V, own length and the plan."""

import dataclasses
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import battery
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import CONFIGS, MAX_ROWS, Config, digest, random_batches
from support import assert_same_bits, bits, junk_entries

import splitk_jax as sk
from splitk_jax.kernels.reference.split import split

EVERY = [pytest.param(config, id=name) for name, config in CONFIGS.items()]
TWO = [pytest.param(CONFIGS[name], id=name) for name in ("gqa", "mha-f32")]


@functools.cache
def company(name):
    """Eight sequences, the first of the longest and the last of none, and each decoded alone."""
    config = CONFIGS[name]
    rows = config.sequences(8, seed=3)
    return config, rows, config.alone(rows)


ROWS = [pytest.param(name, id=name) for name in CONFIGS]


def partials(config, rows):
    q, *rest = (jnp.asarray(x) for x in config.paged(rows).arrays)
    call = compiled_split(config)
    return [np.asarray(x) for x in call(q[:, None], *rest, jnp.float32(config.head_dim**-0.5), None)]


@functools.cache
def compiled_split(config):
    return jax.jit(functools.partial(split, plan=config.plan, window=config.window, softcap=config.softcap))


class TestCompany:
    @pytest.mark.parametrize("config", EVERY)
    def test_any_batch(self, config):
        unique, wrong = random_batches(config, 60)
        assert (unique, wrong) == (1, 0)

    @pytest.mark.parametrize("name", ROWS)
    def test_any_order(self, name):
        config, rows, alone = company(name)
        rng = np.random.default_rng(0)
        for _ in range(25):
            order = rng.permutation(len(rows))
            assert_same_bits(config.decode([rows[i] for i in order]), [x[order] for x in alone])

    @pytest.mark.parametrize("config", TWO)
    def test_every_edge_length_beside_every_other(self, config):
        rng = np.random.default_rng(1)
        rows = [config.sequence(n, rng) for n in config.edges]
        alone = config.alone(rows)
        for i, row in enumerate(rows):
            for j in range(i, len(rows)):
                assert_same_bits(config.decode([row, rows[j]]), [x[[i, j]] for x in alone])

    @pytest.mark.parametrize("name", ROWS)
    def test_whatever_the_neighbours_hold(self, name):
        config, rows, alone = company(name)
        victims = [0, 3]
        paged = config.paged(rows)
        own = np.unique(
            np.concatenate([paged.block_tables[i, : -(-len(rows[i]) // config.page_size)] for i in victims])
        )
        rng = np.random.default_rng(2)

        def changed(x, keep, fill):
            x = x.copy()
            foreign = np.setdiff1d(np.arange(len(x)), keep)
            x[foreign] = rng.standard_normal((len(foreign), *x.shape[1:])) if fill is None else fill
            return x

        for fill in (None, None, 0.0, 1e4, -1e4, np.nan, np.inf, -np.inf):
            other = paged.replace(
                q=changed(paged.q, victims, fill),
                k_pages=changed(paged.k_pages, own, fill),
                v_pages=changed(paged.v_pages, own, fill),
            )
            result = other.decode(config.plan, **config.options)
            assert_same_bits([x[victims] for x in result], [x[victims] for x in alone])

    @pytest.mark.parametrize("name", ROWS)
    def test_partials(self, name):
        """Before the output's rounding, that may hide it: the float32 partials of a row are its own, too."""
        config, rows, _ = company(name)
        together = partials(config, rows)
        for i, row in enumerate(rows):
            assert_same_bits([x[i : i + 1] for x in together], partials(config, [row]))
        active = np.isfinite(together[1][0, 0]).all(axis=-1).sum()
        assert active == config.active_splits(len(rows[0])) > 1


class TestLayout:
    @pytest.mark.parametrize("name", ROWS)
    def test_any_pages(self, name):
        config, rows, alone = company(name)
        paged = config.paged(rows)
        num_pages = len(paged.k_pages)
        used = list(dict.fromkeys(paged.block_tables[paged.block_tables >= 0]))
        in_order = np.argsort([*used, *np.setdiff1d(np.arange(num_pages), used)])
        rng = np.random.default_rng(4)
        maps = [in_order, num_pages - 1 - in_order, *(rng.permutation(num_pages) for _ in range(20))]
        for moved_to in maps:
            k_pages, v_pages = np.empty_like(paged.k_pages), np.empty_like(paged.v_pages)
            k_pages[moved_to], v_pages[moved_to] = paged.k_pages, paged.v_pages
            tables = np.where(paged.block_tables >= 0, moved_to[paged.block_tables], -1).astype(np.int32)
            moved = paged.replace(k_pages=k_pages, v_pages=v_pages, block_tables=tables)
            assert_same_bits(moved.decode(config.plan, **config.options), alone)

    @pytest.mark.parametrize("name", ROWS)
    def test_shared_prefix_pages(self, name):
        config, rows, _ = company(name)
        shared = 5 * config.page_size
        first, rng = rows[0], np.random.default_rng(5)
        family = [first]
        for n in (shared, shared + 1, shared + 40):
            own = config.sequence(n - shared, rng)
            family.append(
                dataclasses.replace(
                    own, k=np.concatenate([first.k[:shared], own.k]), v=np.concatenate([first.v[:shared], own.v])
                )
            )
        paged = config.paged(family)
        expected = paged.decode(config.plan, **config.options)
        assert_same_bits(expected, config.alone(family))
        tables, k_pages, v_pages = paged.block_tables.copy(), paged.k_pages.copy(), paged.v_pages.copy()
        for i in (1, 2, 3):
            k_pages[tables[i, :5]] = v_pages[tables[i, :5]] = np.nan
            tables[i, :5] = tables[0, :5]
        one_copy = paged.replace(block_tables=tables, k_pages=k_pages, v_pages=v_pages)
        assert_same_bits(one_copy.decode(config.plan, **config.options), expected)

    @pytest.mark.parametrize("name", ROWS)
    def test_one_page_twice_in_a_table(self, name):
        config, rows, _ = company(name)
        k, v, page = rows[0].k.copy(), rows[0].v.copy(), config.page_size
        again = slice(-(-150 // page) * page, (-(-150 // page) + 1) * page)
        k[again], v[again] = k[again.start - page : again.start], v[again.start - page : again.start]
        paged = config.paged([dataclasses.replace(rows[0], k=k, v=v), rows[2]])
        expected = paged.decode(config.plan, **config.options)
        tables = paged.block_tables.copy()
        tables[0, again.start // page] = tables[0, again.start // page - 1]
        assert_same_bits(paged.replace(block_tables=tables).decode(config.plan, **config.options), expected)

    @pytest.mark.parametrize("name", ["gqa", "mha-f32"])
    def test_any_padding_of_the_batch(self, name):
        config, rows, alone = company(name)
        rows = [rows[0], rows[4]]
        expected = [x[[0, 4]] for x in alone]
        nothing = config.sequence(0, np.random.default_rng(6))
        for size in (1, 2, 3, 4, 8, 16, 17, 32, 64):
            batch = [*rows, *[nothing] * (size - 2)][:size]
            out, lse = config.decode(batch, dead_entry=junk_entries(0)[size % 4])
            count = min(size, 2)
            assert_same_bits((out[:count], lse[:count]), [x[:count] for x in expected])
            assert (bits(out[count:]) == 0).all()
            assert np.isneginf(lse[count:]).all()

    @pytest.mark.parametrize("name", ["gqa", "mha-f32"])
    def test_any_table_width_and_pool(self, name):
        config, rows, alone = company(name)
        for times in (1, 2, 3, 8):
            for filler in (0, *junk_entries(config.width * 17 + 1)):
                wide = config.decode(rows, width=times * config.width, dead_entry=filler)
                assert_same_bits(wide, alone)
        for times in (2, 16):
            large = config.decode(rows, num_pages=times * (config.width * 17 + 1))
            assert_same_bits(large, alone)

    @pytest.mark.parametrize("name", ROWS)
    def test_whatever_nobody_reads_holds(self, name):
        """Page tails, spare pages and dead entries, in K, in V and in both, as NaN, infinities and all ones."""
        config, rows, alone = company(name)
        clean = config.paged(rows, dead=0.0)
        nan = config.paged(rows, dead=np.nan)
        dead_k, dead_v = np.isnan(nan.k_pages), np.isnan(nan.v_pages)
        ones = np.array(-1, f"int{8 * clean.k_pages.dtype.itemsize}").view(clean.k_pages.dtype)
        for poison in (np.nan, np.inf, -np.inf, ones, clean.k_pages.dtype.type(6e4)):
            k_pages = np.where(dead_k, poison, clean.k_pages).astype(config.dtype)
            v_pages = np.where(dead_v, poison, clean.v_pages).astype(config.dtype)
            for pools in ({"k_pages": k_pages}, {"v_pages": v_pages}, {"k_pages": k_pages, "v_pages": v_pages}):
                for filler in (0, *junk_entries(len(k_pages))):
                    tables = np.where(clean.block_tables < 0, filler, clean.block_tables).astype(np.int32)
                    poisoned = clean.replace(block_tables=tables, **pools)
                    assert_same_bits(poisoned.decode(config.plan, **config.options), alone)


class TestQueryRows:
    @pytest.mark.parametrize("name", ROWS)
    @pytest.mark.parametrize("q_len", [2, 5])
    def test_have_the_bits_of_one_token_calls(self, name, q_len):
        config, rows, _ = company(name)
        rng = np.random.default_rng(7)
        paged = config.paged(rows)
        q = rng.standard_normal((len(rows), q_len, *paged.q.shape[1:])).astype(paged.q.dtype)
        paged = paged.replace(q=q)
        result = paged.decode(config.plan, **config.options)
        for position, one in paged.query_tokens():
            assert_same_bits([x[:, position] for x in result], one.decode(config.plan, **config.options))

    def test_the_rows_of_a_block_can_have_other_edges(self):
        """What makes the test above one of the tree: the count rule gives the last row longer splits than the first."""
        plan = CONFIGS["gqa"].plan
        assert plan.split_bounds(64)[0] != plan.split_bounds(65)[0]


class TestContexts:
    """One call, in whatever program it stands."""

    @pytest.fixture(params=["gqa", "mha-f32"])
    def call(self, request):
        config, rows, alone = company(request.param)
        arrays = [jnp.asarray(x) for x in config.paged(rows).arrays]
        op = functools.partial(sk.paged_decode_attention, plan=config.plan, return_lse=True)
        return op, arrays, alone

    def test_jit(self, call):
        op, arrays, alone = call
        assert_same_bits(jax.jit(op)(*arrays), alone)

    @pytest.mark.parametrize("rows", [1, 8])
    def test_constants(self, call, rows):
        """What the compiler knows of the arguments, all of them or their lengths, scale and tables, is no matter."""
        op, (q, k_pages, v_pages, tables, lens), alone = call
        expected = [x[:rows] for x in alone]
        q, tables, lens = (np.asarray(x[:rows]) for x in (q, tables, lens))
        assert_same_bits(jax.jit(lambda: op(q, k_pages, v_pages, tables, lens))(), expected)
        assert_same_bits(jax.jit(lambda q, *pools: op(q, *pools, tables, lens))(q, k_pages, v_pages), expected)

    def test_a_scale_that_is_traced(self, call):
        op, arrays, alone = call
        scale = jnp.float32(arrays[0].shape[-1] ** -0.5)
        assert_same_bits(jax.jit(lambda scale, *arrays: op(*arrays, sm_scale=scale))(scale, *arrays), alone)

    def test_beside_work_that_fuses_with_it(self, call):
        op, (q, k_pages, v_pages, tables, lens), alone = call

        @jax.jit
        def step(half_q, k_pages, v_pages, tables, lens, two, weights):
            # Times a power of two is exact, and not known to be before it runs.
            out, lse = op(half_q * two, k_pages, v_pages, tables - 1, lens * 1)
            hidden = jnp.tanh(out.astype(jnp.float32).reshape(len(out), -1) @ weights)
            return out, lse, hidden, jnp.exp(lse) + out.astype(jnp.float32).sum(axis=-1), k_pages.sum(axis=1)

        weights = jnp.ones((q[0].size, 32), jnp.float32)
        two = jnp.asarray(2, q.dtype)
        out, lse, *_ = step(q / two, k_pages, v_pages, tables + 1, lens, two, weights)
        assert_same_bits((out, lse), alone)

    def test_scan(self, call):
        op, arrays, alone = call

        @jax.jit
        def steps(q, k_pages, v_pages, tables, lens):
            def step(carry, shift):
                # The first step stands alone; the others decode fewer tokens and feed the next.
                out, lse = op(q + 0 * carry, k_pages, v_pages, tables, jnp.maximum(lens - shift, 0))
                return jnp.where(jnp.isfinite(out), 0 * out, 0)[..., :1], (out, lse)

            return jax.lax.scan(step, jnp.zeros_like(q[..., :1]), jnp.arange(3, dtype=jnp.int32))[1]

        assert_same_bits([x[0] for x in steps(*arrays)], alone)

    def test_while_loop_and_cond(self, call):
        op, arrays, alone = call

        @jax.jit
        def looped(go, *arrays):
            first = op(*arrays)
            again = jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, op(*arrays)), (jnp.int32(0), first))[1]
            return jax.lax.cond(go, lambda: op(*arrays), lambda: jax.tree.map(jnp.zeros_like, first)), again

        for result in looped(True, *arrays):
            assert_same_bits(result, alone)

    def test_donated_inputs(self, call):
        op, arrays, alone = call

        def step(q, k_pages, v_pages, tables, lens):
            return op(q, k_pages, v_pages, tables, lens), (k_pages, v_pages)

        copies = [jnp.array(x) for x in arrays]
        result, pools = jax.jit(step, donate_argnums=(1, 2))(*copies)
        assert_same_bits(result, alone)
        assert copies[1].is_deleted()
        assert_same_bits(pools, arrays[1:3])

    def test_vmap(self, call):
        op, (q, k_pages, v_pages, tables, lens), alone = call
        rows = jax.vmap(lambda q, table, n: op(q[None], k_pages, v_pages, table[None], n[None]))
        for vmapped in (rows, jax.jit(rows)):
            assert_same_bits([x[:, 0] for x in vmapped(q, tables, lens)], alone)
        layers = jax.vmap(lambda k_pages, v_pages: op(q, k_pages, v_pages, tables, lens))
        stacked = layers(jnp.stack([k_pages, v_pages]), jnp.stack([v_pages, v_pages]))
        assert_same_bits([x[1] for x in stacked], op(q, v_pages, v_pages, tables, lens))

    def test_two_calls_in_one_program(self, call):
        op, arrays, alone = call
        q, *rest = arrays
        first, second = jax.jit(lambda q, *rest: (op(q, *rest), op(q[:3], *rest[:2], *(x[:3] for x in rest[2:]))))(
            q, *rest
        )
        assert_same_bits(first, alone)
        assert_same_bits(second, [x[:3] for x in alone])


def in_a_process(code, **environment):
    """Runs `code` in a fresh interpreter and returns what it prints."""
    folders = [str(Path(battery.__file__).parent), str(Path(sk.__file__).parents[1])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(folders),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # the parent may hold most of a GPU's memory
        **environment,
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


DECODED = """
import jax, numpy as np
from battery import CONFIGS, digest
assert jax.config.jax_enable_x64 is {x64}
for config in CONFIGS.values():
    print(digest(config.decode(config.sequences(8, seed=3))))
"""

SHARDED = """
import dataclasses, jax, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
import splitk_jax as sk
from battery import CONFIGS
from support import assert_same_bits
assert len(jax.devices()) == 2
config = CONFIGS["gqa"]
paged = config.paged(config.sequences(8, seed=3))
expected = paged.decode(config.plan)
plan = dataclasses.replace(config, heads=(3, 1)).plan
op = lambda *arrays: sk.paged_decode_attention(*arrays, plan=plan, return_lse=True)
heads, pools = P(None, "heads"), P(None, None, "heads")
for check_vma in (False, True):
    sharded = jax.shard_map(
        op,
        mesh=Mesh(np.array(jax.devices()), ("heads",)),
        in_specs=(heads, pools, pools, P(), P()),
        out_specs=(heads, heads),
        check_vma=check_vma,
    )
    compiled = jax.jit(sharded).lower(*paged.arrays).compile()
    assert "all-" not in compiled.as_text()
    assert_same_bits(compiled(*paged.arrays), expected)
    print("same")
rows = jax.shard_map(
    lambda *arrays: sk.paged_decode_attention(*arrays, plan=config.plan, return_lse=True),
    mesh=Mesh(np.array(jax.devices()), ("rows",)),
    in_specs=(P("rows"), P(), P(), P("rows"), P("rows")),
    out_specs=(P("rows"), P("rows")),
)
assert_same_bits(jax.jit(rows)(*paged.arrays), expected)
print("same")
"""


class TestProcesses:
    def test_a_fresh_process_and_x64(self):
        expected = [digest(config.decode(config.sequences(8, seed=3))) for config in CONFIGS.values()]
        assert len(set(expected)) == len(expected)
        assert in_a_process(DECODED.format(x64=True), JAX_ENABLE_X64="1") == expected

    def test_shard_map_over_heads_and_rows(self):
        flags = "--xla_force_host_platform_device_count=2"
        assert in_a_process(SHARDED, JAX_PLATFORMS="cpu", XLA_FLAGS=flags) == ["same"] * 3


class TestTheBatterySees:
    """Negative controls: what the comparisons above are for does fail them."""

    @pytest.mark.parametrize("name", ROWS)
    def test_another_tree(self, name):
        config, rows, alone = company(name)
        other = config.decode(rows, plan=config.plan_of(splits=3))
        assert any((bits(a) != bits(b)).any() for a, b in zip(other, alone, strict=True))

    def test_a_split_count_that_follows_the_batch(self):
        config = CONFIGS["gqa"]

        def decode(rows, **layout):
            return config.decode(rows, plan=config.plan_of(splits=max(2, 8 // len(rows))), **layout)

        unique, wrong = random_batches(config, 12, decode=decode)
        assert unique > 1
        assert wrong > 0

    def test_the_adaptive_rule_says_that_it_moves_and_does(self):
        policy = sk.load_policy(
            "h200", environ={}, backend="reference", ahead_of_time=True, splits="adaptive", min_kv_per_split=64
        )
        config = Config(heads=(6, 2), q_dtype="float32", longest=1024)
        rng = np.random.default_rng(0)
        rows = [config.sequence(1024, rng) for _ in range(17)]
        seen = set()
        for bucket in (1, 4, 17):
            plan = policy.plan(
                num_q_heads=6,
                num_kv_heads=2,
                head_dim=64,
                page_size=16,
                max_decode_seqs=MAX_ROWS,
                num_seqs=bucket,
                max_seq_len=1024,
                q_dtype="float32",
            )
            assert not plan.batch_invariant
            seen.add(digest(x[:1] for x in config.decode(rows[:bucket], plan=plan)))
        assert len(seen) > 1


ARITHMETIC = re.compile(r"dot_general|reduce_|exp2|log2|div|cumsum|argm|sort|tanh")


def arithmetic(jaxpr):
    """Primitive, operand shapes and parameters of every float operation, in program order, loop bodies included."""
    for equation in jaxpr.eqns:
        parameters = [x for value in equation.params.values() for x in (value if isinstance(value, tuple) else [value])]
        inner = [body for body in (getattr(x, "jaxpr", x) for x in parameters) if hasattr(body, "eqns")]
        for body in inner:
            yield from arithmetic(body)
        if not inner and ARITHMETIC.match(equation.primitive.name):
            shapes = [str(v.aval) for v in equation.invars]
            if any("float" in shape for shape in shapes):
                yield equation.primitive.name, *shapes, str(sorted(equation.params.items(), key=str))


class TestStructure:
    """Why the above holds: no operation that rounds has a shape, or a place, that the batch has a say in."""

    @pytest.mark.parametrize("config", EVERY)
    def test_arithmetic_is_of_the_plan_alone(self, config):
        call = functools.partial(sk.paged_decode_attention, plan=config.plan, return_lse=True, **config.options)
        seen = []
        for batch, width, num_pages in [(1, 1, 1), (1, 7, 40), (2, 7, 40), (3, 64, 9), (17, 16, 300), (64, 16, 300)]:
            lead = (num_pages, config.page_size, config.heads[1])
            traced = jax.make_jaxpr(call)(
                jnp.zeros((batch, config.heads[0], config.head_dim), config.plan.q_dtype),
                jnp.zeros((*lead, config.head_dim), config.dtype),
                jnp.zeros((*lead, config.head_dim_v or config.head_dim), config.dtype),
                jnp.zeros((batch, width), jnp.int32),
                jnp.zeros((batch,), jnp.int32),
            )
            seen.append(list(arithmetic(traced.jaxpr)))
        assert sum(name == "dot_general" for name, *_ in seen[0]) == 2
        assert sum(name.startswith("reduce_") for name, *_ in seen[0]) >= 2
        assert all(each == seen[0] for each in seen)
