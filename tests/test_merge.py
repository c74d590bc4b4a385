"""Merging of attention states: against one attention over the union, in the order given, empties included."""

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from support import TOLERANCE, assert_same_bits, bits

import splitk_jax as sk
from splitk_jax.checks import MOSAIC_JAX

SHAPE = (3, 4)  # rows, heads
HEAD_DIM = 64


@pytest.fixture(params=["xla", "kernel"])
def merge(request):
    """`merge_states` as it is on a CPU, and as the GPU's kernel has it."""
    if request.param == "xla":
        return sk.merge_states
    if jax.__version_info__ < MOSAIC_JAX:
        pytest.skip("the mosaic backend needs a newer JAX")
    return emulator.merge_states


def state(logits, v):
    """(out, lse) of one softmax in float64: logits [..., tokens], v [..., tokens, head_dim]."""
    largest = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - largest)
    total = weights.sum(axis=-1)
    return np.einsum("...t,...td->...d", weights, v) / total[..., None], largest[..., 0] + np.log(total)


def states_of(parts, *, spread=2.0, dtype="float32", seed=0):
    """States over `parts` disjoint sets of keys, and the state over all of them."""
    rng = np.random.default_rng(seed)
    logits = [spread * rng.standard_normal((*SHAPE, n)) for n in parts]
    values = [rng.standard_normal((*SHAPE, n, HEAD_DIM)) for n in parts]
    outs, lses = zip(*map(state, logits, values), strict=True)
    whole = state(np.concatenate(logits, axis=-1), np.concatenate(values, axis=-2))
    return np.stack(outs).astype(dtype), np.stack(lses).astype(np.float32), whole


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("parts", [(5,), (1, 1), (3, 40), (7, 1, 20, 4), (2,) * 17], ids=lambda parts: f"{len(parts)}")
@pytest.mark.parametrize("spread", [1.0, 30.0], ids=["flat", "peaky"])
def test_against_attention_over_the_union(merge, parts, spread, dtype):
    outs, lses, whole = states_of(parts, spread=spread, dtype=dtype)
    got_out, got_lse = merge(outs, lses)
    assert (got_out.dtype, got_lse.dtype) == (dtype, jnp.float32)
    # Apart from the rounding that the states bring along, the merge adds that of its own output.
    weights = np.exp(lses.astype(np.float64) - whole[1])[..., None]
    rtol, atol = TOLERANCE[dtype]
    got_out = np.asarray(got_out).astype(np.float64)
    np.testing.assert_allclose(got_out, (weights * outs.astype(np.float64)).sum(axis=0), rtol=rtol, atol=2e-5)
    np.testing.assert_allclose(got_out, whole[0], rtol=rtol, atol=atol + 2 * rtol)
    np.testing.assert_allclose(got_lse, whole[1], rtol=1e-6, atol=1e-5)


def test_lists_stacked_arrays_and_jit_give_the_same_bits():
    outs, lses, _ = states_of((5, 9, 2))
    stacked = sk.merge_states(outs, lses)
    assert_same_bits(sk.merge_states(list(outs), tuple(lses)), stacked)
    assert_same_bits(sk.merge_states([jnp.asarray(x) for x in outs], jnp.asarray(lses)), stacked)
    assert_same_bits(jax.jit(sk.merge_states)(outs, lses), stacked)
    assert_same_bits(jax.jit(lambda *states: sk.merge_states(states[:3], states[3:]))(*outs, *lses), stacked)


def test_a_row_does_not_depend_on_the_others():
    outs, lses, _ = states_of((5, 9, 2))
    whole = sk.merge_states(outs, lses)
    for row in range(SHAPE[0]):
        alone = sk.merge_states(outs[:, row : row + 1], lses[:, row : row + 1])
        assert_same_bits(alone, [x[row : row + 1] for x in whole])


def test_states_are_folded_in_the_order_given():
    rng = np.random.default_rng(0)
    outs = rng.standard_normal((6, 500, HEAD_DIM)).astype(np.float32)
    lses = rng.standard_normal((6, 500)).astype(np.float32)
    merged, _ = sk.merge_states(outs, lses)
    largest = lses.max(axis=0)
    total, weighted = np.zeros_like(lses[0]), np.zeros_like(outs[0])
    for out, lse in zip(outs, lses, strict=True):
        weight = np.asarray(jnp.exp(lse - largest))
        total, weighted = total + weight, weighted + weight[:, None] * out
    # One order of sums is within a rounding or two of the fold; the reverse order gives other bits.
    np.testing.assert_allclose(merged, weighted / total[:, None], rtol=1e-5, atol=1e-6)
    reverse, _ = sk.merge_states(outs[::-1], lses[::-1])
    assert (bits(merged) != bits(reverse)).any()
    assert_same_bits(merged, sk.merge_states(outs, lses)[0])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_one_state_is_itself(merge, dtype):
    outs, lses, _ = states_of((7,), dtype=dtype)
    assert_same_bits(merge(outs, lses), (outs[0], lses[0]))


@pytest.mark.parametrize("held", [np.nan, np.inf, 7.0])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_the_out_of_an_empty_state_is_not_read(merge, at, held):
    outs, lses, _ = states_of((5, 9))
    lses_and_empty = np.insert(lses, at, -np.inf, axis=0)
    got = merge(np.insert(outs, at, held, axis=0), lses_and_empty)
    assert_same_bits(got, merge(np.insert(outs, at, 0.0, axis=0), lses_and_empty))
    for a, b in zip(got, merge(outs, lses), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("count", [1, 3])
def test_all_empty(merge, count):
    outs = np.full((count, *SHAPE, HEAD_DIM), np.nan, np.float32)
    out, lse = merge(outs, np.full((count, *SHAPE), -np.inf, np.float32))
    assert (bits(out) == 0).all()
    assert np.isneginf(lse).all()


def test_empty_in_one_row_only(merge):
    outs, lses, _ = states_of((5, 9))
    outs[0, 1], lses[0, 1] = np.nan, -np.inf
    out, lse = merge(outs, lses)
    np.testing.assert_array_equal(out[1], outs[1, 1])
    np.testing.assert_array_equal(lse[1], lses[1, 1])
    assert np.isfinite(out).all()


def test_plus_infinity_outweighs_and_shares(merge):
    outs, lses, _ = states_of((5, 9, 2))
    lses[1] = np.inf
    out, lse = merge(outs, lses)
    assert_same_bits(out, outs[1])
    assert np.isposinf(lse).all()
    lses[2] = np.inf
    out, lse = merge(outs, lses)
    np.testing.assert_allclose(out, (outs[1] + outs[2]) / 2, rtol=1e-6, atol=1e-7)
    assert np.isposinf(lse).all()


def test_nan_stays_in_its_row(merge):
    outs, lses, _ = states_of((5, 9))
    clean = merge(outs, lses)
    outs[0, 1, 2, 3] = np.nan
    lses[1, 2, 0] = np.nan
    out, lse = (np.asarray(x) for x in merge(outs, lses))
    assert np.argwhere(np.isnan(out[1])).tolist() == [[2, 3]]
    assert np.isnan(out[2, 0]).all()
    assert np.argwhere(np.isnan(lse)).tolist() == [[2, 0]]
    assert_same_bits((out[0], lse[0]), [x[0] for x in clean])


def test_large_lse_does_not_overflow(merge):
    outs, lses, (out, lse) = states_of((5, 9))
    for shift in (-1e4, 1e4):
        got_out, got_lse = merge(outs, lses + np.float32(shift))
        np.testing.assert_allclose(got_out, out, atol=1e-3)  # an ulp of 1e4 is 1e-3
        np.testing.assert_allclose(got_lse, lse + shift, atol=2e-3)


def test_the_count_of_an_empty_row_batch_is_kept():
    out, lse = sk.merge_states(np.zeros((2, 0, 4, HEAD_DIM), np.float32), np.zeros((2, 0, 4), np.float32))
    assert out.shape == (0, 4, HEAD_DIM)
    assert lse.shape == (0, 4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_constants_and_producers_around_it_move_no_bit(dtype):
    """Inlined into a larger jit, a bfloat16 state could be used before it is rounded, a constant lse be folded."""
    rng = np.random.default_rng(5)
    factor = jnp.float32(0.37)
    raw = [jnp.asarray(rng.standard_normal((37, 5, 16)), jnp.float32) for _ in range(3)]
    lses = [np.asarray(rng.standard_normal((37, 5)), np.float32) for _ in range(3)]
    outs = [jax.jit(lambda x: (x * factor).astype(dtype))(x) for x in raw]
    expected = sk.merge_states(outs, lses)
    assert_same_bits(jax.jit(lambda outs: sk.merge_states(outs, lses))(outs), expected)
    fused = jax.jit(lambda raw: sk.merge_states([(x * factor).astype(dtype) for x in raw], lses))(raw)
    assert_same_bits(fused, expected)


@pytest.mark.skipif(jax.__version_info__ < MOSAIC_JAX, reason="the mosaic backend needs a newer JAX")
class TestKernel:
    """What a Hopper GPU gets, as far as a CPU shows it."""

    @pytest.fixture(autouse=True)
    def hopper(self, monkeypatch):
        monkeypatch.setattr("splitk_jax.checks.on_hopper", lambda: True)

    @pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
    @pytest.mark.parametrize("dtype", TOLERANCE)
    def test_is_what_a_gpu_runs(self, head_dim, dtype):
        states = [jax.ShapeDtypeStruct((3, 8, head_dim), dtype)] * 3, [jax.ShapeDtypeStruct((3, 8), "float32")] * 3

        def text(platform):
            traced = jax.jit(lambda *states: sk.merge_states(*states)).trace(*states)
            return traced.lower(lowering_platforms=(platform,)).as_text()

        assert "splitk_merge_n3" in text("cuda")
        assert "splitk_merge_n3" not in text("cpu")

    @pytest.mark.parametrize("shape", [(3, 6, 64), (8, 80), (64,), (0, 8, 64)])
    def test_what_it_does_not_serve_is_folded_by_xla(self, shape):
        states = [jax.ShapeDtypeStruct(shape, "float32")] * 2, [jax.ShapeDtypeStruct(shape[:-1], "float32")] * 2
        assert "mosaic" not in str(jax.make_jaxpr(lambda *states: sk.merge_states(*states))(*states))

    def test_vmap_and_grad(self):
        outs, lses, _ = states_of((5, 9))
        expected = jax.vmap(sk.merge_states, in_axes=1)(outs, lses)
        for a, b in zip(expected, sk.merge_states(outs, lses), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
        check_grads(lambda outs, lses: sk.merge_states(outs, lses), (outs, lses), order=1, rtol=0.1)

    def test_gradients_of_equal_and_of_empty_states(self):
        """Of equal weights, as of others; and 0, not NaN, where all states are empty."""
        outs, lses = jnp.array([[[1.0], [5.0]], [[3.0], [7.0]]]), jnp.array([[0.0, -jnp.inf], [0.0, -jnp.inf]])

        def merged(lses):
            out, lse = sk.merge_states(outs, lses)
            return out.sum() + jnp.where(jnp.isinf(lse), 0.0, lse).sum()

        np.testing.assert_allclose(jax.grad(merged)(lses), [[0.5 - 0.5, 0], [0.5 + 0.5, 0]], rtol=1e-6)
        np.testing.assert_allclose(jax.grad(lambda outs: sk.merge_states(outs, lses)[0].sum())(outs)[:, 0, 0], 0.5)

    def test_inside_transformations(self):
        """Of what varies over a mesh, or is sharded on one with explicit axes, XLA makes it; of the rest the kernel."""
        outs, lses, _ = states_of((5, 9))
        expected = sk.merge_states(outs, lses)
        mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec
        for check_vma in (True, False):
            sharded = jax.shard_map(
                sk.merge_states,
                mesh=mesh,
                in_specs=(spec(None, "x"), spec(None, "x")),
                out_specs=(spec("x"), spec("x")),
                check_vma=check_vma,
            )
            assert_same_bits(sharded(outs, lses), expected)
        explicit = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
        with jax.set_mesh(explicit):
            states = [jax.device_put(x, spec(None, "x")) for x in (outs, lses)]
            assert_same_bits(jax.jit(sk.merge_states)(*states), expected)
        plain, remat = (
            jax.grad(lambda outs, f=f: f(outs, lses)[0].sum())(jnp.asarray(outs))
            for f in (sk.merge_states, jax.checkpoint(sk.merge_states))
        )
        assert_same_bits(remat, plain)
