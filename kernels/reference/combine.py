"""Combine kernel of the reference backend: folds the splits of each row, run by run, in split order."""

import jax
import jax.numpy as jnp
from jax import lax

from splitk_jax.kernels.partials import LN2, LOG2E, SplitPartials, fold, from_bfloat16
from splitk_jax.kernels.reference import loops
from splitk_jax.plan import RUN_SPLITS, DecodePlan


def combine(
    partials: SplitPartials,  # o [batch, q_len, num_splits, num_q_heads, head_dim_v]; m, l without the last axis
    sinks: jax.Array | None,  # f32[num_q_heads]
    *,
    plan: DecodePlan,
) -> tuple[jax.Array, jax.Array]:  # [batch, q_len, num_q_heads, head_dim_v], f32[batch, q_len, num_q_heads]
    """Merges the partials of each row and normalises once, as `kernels/README.md` has it."""
    batch, q_len, num_splits, num_q_heads, head_dim_v = partials.o.shape
    flat = SplitPartials(*(x.reshape(batch * q_len, *x.shape[2:]) for x in partials))

    def combine_row(row: jax.Array, result: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        row = loops.index(row)
        # The row is copied out first, so that the fold below has one shape whatever the batch is.
        parts = lax.optimization_barrier(
            SplitPartials(*(lax.dynamic_index_in_dim(x, row, keepdims=False) for x in flat))
        )

        def at(s: jax.Array | int) -> SplitPartials:
            part = SplitPartials(*(lax.dynamic_index_in_dim(x, s, keepdims=False) for x in parts))
            return from_bfloat16(part) if plan.partial_dtype == "bfloat16" else part

        def fold_run(first: jax.Array | int) -> SplitPartials:
            stop = jnp.minimum(first + RUN_SPLITS, num_splits)
            return lax.fori_loop(first + 1, stop, lambda s, run: fold(run, at(s)), at(first))

        acc = lax.fori_loop(1, plan.runs, lambda r, acc: fold(acc, fold_run(r * RUN_SPLITS)), fold_run(0))
        if sinks is not None:
            # A sink is one more logit whose value is 0: folded once, after every split.
            sink = SplitPartials(o=jnp.zeros_like(acc.o), m=sinks * LOG2E, l=jnp.ones_like(acc.l))
            acc = fold(acc, sink)
        out = jnp.where(acc.l[..., None] == 0, 0.0, acc.o / acc.l[..., None]).astype(plan.q_dtype)
        lse = (acc.m + jnp.log2(acc.l)) * LN2
        outs, lses = result
        zero = jnp.int32(0)
        return (
            lax.dynamic_update_slice(outs, out[None], (row, zero, zero)),
            lax.dynamic_update_slice(lses, lse[None], (row, zero)),
        )

    out, lse = lax.fori_loop(
        0,
        loops.trip_count(batch * q_len),
        combine_row,
        (
            jnp.zeros_like(flat.o, plan.q_dtype, shape=(batch * q_len, num_q_heads, head_dim_v)),
            jnp.zeros_like(flat.l, shape=(batch * q_len, num_q_heads)),
        ),
    )
    return out.reshape(batch, q_len, num_q_heads, head_dim_v), lse.reshape(batch, q_len, num_q_heads)
