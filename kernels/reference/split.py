"""Split kernel of the reference backend: pure JAX that walks the plan's split tree.

Every row is computed by one loop body whose shapes come from the plan alone: the compiler has nothing of the batch, the
table's width or the pool to choose a reduction by.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from splitk_jax.kernels.partials import LOG2E, NO_CAP, SplitPartials, rescale, to_bfloat16
from splitk_jax.kernels.reference import loops
from splitk_jax.plan import DecodePlan, split_range


def split(
    q: jax.Array,  # [batch, q_len, num_q_heads, head_dim]
    k_pages: jax.Array,  # [num_pages, page_size, num_kv_heads, head_dim]
    v_pages: jax.Array,  # [num_pages, page_size, num_kv_heads, head_dim_v]
    block_tables: jax.Array,  # i32[batch, max_pages_per_seq]
    seq_lens: jax.Array,  # i32[batch]
    sm_scale: jax.Array,  # f32[]
    sinks: jax.Array | None = None,  # f32[num_q_heads]; the combine folds them in
    k_scale: jax.Array | None = None,  # f32[], f32[num_kv_heads] or f32[num_pages, page_size, num_kv_heads]
    v_scale: jax.Array | None = None,  # as k_scale
    *,
    plan: DecodePlan,
    window: int | None,
    softcap: float | None,
) -> SplitPartials:
    """Computes the partials of every split of every row, as `kernels/README.md` has it.

    Returns:
      o [batch, q_len, num_splits, num_q_heads, head_dim_v] in the plan's partial_dtype; f32 m and l without its last
      axis.
    """
    del sinks
    batch, q_len, num_q_heads, head_dim = q.shape
    num_pages, page_size, num_kv_heads, _ = k_pages.shape
    group, head_dim_v = num_q_heads // num_kv_heads, v_pages.shape[-1]
    capacity = min(block_tables.shape[1] * page_size, plan.max_tokens)
    # A scale that the compiler knew to be a constant could be moved through the product, to other bits.
    sm_scale, k_scale, v_scale = lax.optimization_barrier((sm_scale, k_scale, v_scale))
    # Varies over the mesh axes that any input does: under `shard_map` a loop carry must start out as it ends.
    inputs = (q, k_pages, v_pages, block_tables, seq_lens, sm_scale, k_scale, v_scale)
    zero = sum((jnp.zeros_like(x, jnp.float32, shape=()) for x in jax.tree.leaves(inputs)), jnp.float32(0))
    q = q.reshape(batch * q_len, num_kv_heads, group, head_dim)
    # Products of two 16-bit floats are exact in float32, so that these need no copy in float32.
    product_dtype = q.dtype if q.dtype == k_pages.dtype else jnp.float32

    kept = to_bfloat16 if plan.partial_dtype == "bfloat16" else lambda part: part

    def attend_row(row: jax.Array, partials: SplitPartials) -> SplitPartials:
        seq, position = row // q_len, row % q_len
        seq_len, table = _at(seq_lens, seq), _at(block_tables, seq)
        # A row attends up to its own position: the very row that a one-token call there would be.
        own_len = seq_len - (q_len - 1 - position)
        length_ok = (seq_len >= 0) & (own_len <= capacity)
        own_len = jnp.where(length_ok, jnp.maximum(own_len, 0), 0)
        edges = plan.edges(own_len, window=window, xp=jnp)
        q_row = _at(q, row).astype(product_dtype)

        def attend_split(s: jax.Array, partials: SplitPartials) -> SplitPartials:
            low, high = split_range(edges, s, own_len, xp=jnp)

            def step(carry: tuple[jax.Array, SplitPartials]) -> tuple[jax.Array, SplitPartials]:
                token, acc = carry
                token = loops.index(token)
                tokens = token + lax.iota(jnp.int32, plan.step_kv)
                live = tokens < high
                pages = table.at[tokens // page_size].get(mode="fill", fill_value=-1)
                page_ok = (pages >= 0) & (pages < num_pages)
                # No address is formed from an unchecked id; a bad live one poisons this row and no other.
                poison = jnp.where(jnp.any(live & ~page_ok), jnp.nan, 0.0).astype(jnp.float32)
                live &= page_ok
                pages, slots = jnp.where(live, pages, 0), tokens % page_size
                k = _gather(k_pages, pages, slots, product_dtype)  # [num_kv_heads, step_kv, head_dim]
                # Masked by select, not by a zero weight: 0 * NaN is NaN.
                v = jnp.where(live[:, None], _gather(v_pages, pages, slots, jnp.float32), 0.0)
                logits = _dot("hgd,htd->hgt", q_row, k)
                if k_scale is not None:
                    logits *= _scale(k_scale, pages, slots)
                logits *= sm_scale
                if softcap is not None and softcap < NO_CAP:
                    logits = softcap * jnp.tanh(logits / softcap)
                logits = jnp.where(live, logits * LOG2E, -jnp.inf)
                m = jnp.maximum(acc.m, jnp.max(logits, axis=-1)) + poison
                p = rescale(logits, m[..., None])
                a = rescale(acc.m, m)
                # Behind the select too: the scale of a dead token may be NaN.
                weights = p if v_scale is None else jnp.where(live, p * _scale(v_scale, pages, slots), 0.0)
                o = acc.o * a[..., None] + _dot("hgt,htd->hgd", weights, v)
                return token + plan.step_kv, SplitPartials(o, m, acc.l * a + jnp.sum(p, axis=-1))

            start = (low, _empty((num_kv_heads, group), head_dim_v, zero))
            _, part = lax.while_loop(lambda carry: carry[0] < high, step, start)
            return _write(partials, (row, s), kept(part))

        # A row whose length cannot be served shows it in split 0; the fold carries NaN to the output.
        partials = _write(
            partials,
            (row, jnp.int32(0)),
            kept(
                jax.tree.map(
                    lambda x: jnp.where(length_ok, x, jnp.nan), _empty((num_kv_heads, group), head_dim_v, zero)
                )
            ),
        )
        return lax.fori_loop(edges.first, edges.stop, attend_split, partials)

    empty = kept(_empty((batch * q_len, plan.num_splits, num_kv_heads, group), head_dim_v, zero))
    partials = lax.fori_loop(0, loops.trip_count(batch * q_len), attend_row, empty)
    lead = (batch, q_len, plan.num_splits, num_q_heads)
    return SplitPartials(
        o=partials.o.reshape(*lead, head_dim_v), m=partials.m.reshape(lead), l=partials.l.reshape(lead)
    )


def _empty(shape: tuple[int, ...], head_dim_v: int, zero: jax.Array) -> SplitPartials:
    return SplitPartials(
        o=jnp.zeros_like(zero, shape=(*shape, head_dim_v)),
        m=jnp.full_like(zero, -jnp.inf, shape=shape),
        l=jnp.zeros_like(zero, shape=shape),
    )


def _at(x: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(x, i, keepdims=False)


def _gather(pool: jax.Array, pages: jax.Array, slots: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The tokens at (page, slot), head-major, as `dtype`."""
    if pool.dtype.itemsize < 4:
        # As integers: XLA's CPU backend can gather 16-bit and 8-bit floats through a wider copy of the whole pool. The
        # barrier keeps the bitcast in the loop, where it joins the gather: hoisted out, it would copy the pool too.
        pool, pages = lax.optimization_barrier((pool, pages))
        tokens = lax.bitcast_convert_type(pool, f"uint{8 * pool.dtype.itemsize}")[pages, slots]
        tokens = lax.bitcast_convert_type(tokens, pool.dtype)
    else:
        tokens = pool[pages, slots]
    # Behind the barrier the products below find plain row-major matrices, up to five times faster on a CPU.
    return lax.optimization_barrier(tokens.astype(dtype).transpose(1, 0, 2))


def _scale(scale: jax.Array, pages: jax.Array, slots: jax.Array) -> jax.Array:
    """The scales of the tokens at (page, slot), to multiply [num_kv_heads, group, step_kv] by."""
    if scale.ndim == 3:
        return scale[pages, slots].T[:, None, :]
    return scale.reshape(-1, 1, 1)


def _write(partials: SplitPartials, at: tuple[jax.Array, jax.Array], part: SplitPartials) -> SplitPartials:
    def put(whole: jax.Array, x: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(whole, x[None, None], (*at, *([jnp.int32(0)] * x.ndim)))

    return SplitPartials(*map(put, partials, part))


def _dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    # HIGHEST: a GPU would otherwise multiply float32 as TF32.
    return jnp.einsum(spec, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
