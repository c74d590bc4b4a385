"""Paged decode attention: plan -> split -> combine."""

import functools
from importlib import import_module
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from splitk_jax import checks, log, marks
from splitk_jax.plan import DecodePlan
from splitk_jax.policy import INSPECTING, check_sm_count


@overload
def paged_decode_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    plan: DecodePlan,
    sm_scale: float | jax.Array | None = ...,
    window: int | None = ...,
    softcap: float | None = ...,
    sinks: jax.Array | None = ...,
    k_scale: float | jax.Array | None = ...,
    v_scale: float | jax.Array | None = ...,
    return_lse: Literal[False] = ...,
) -> jax.Array: ...


@overload
def paged_decode_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    plan: DecodePlan,
    sm_scale: float | jax.Array | None = ...,
    window: int | None = ...,
    softcap: float | None = ...,
    sinks: jax.Array | None = ...,
    k_scale: float | jax.Array | None = ...,
    v_scale: float | jax.Array | None = ...,
    return_lse: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...


def paged_decode_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    plan: DecodePlan,
    sm_scale: float | jax.Array | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: float | jax.Array | None = None,
    v_scale: float | jax.Array | None = None,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of the newest tokens of each sequence over its paged KV cache.

    The new tokens' keys and values are in the pages already (`KVPages.append`). Query `t` of `q_len` sits at position
    `seq_len - q_len + t` and attends up to itself.

    Args:
      q: [batch, num_q_heads, head_dim] or [batch, q_len, num_q_heads, head_dim]; the plan's q_dtype.
      k_pages: [num_pages, page_size, num_kv_heads, head_dim]; the plan's kv_dtype.
      v_pages: [num_pages, page_size, num_kv_heads, head_dim_v]; the plan's kv_dtype.
      block_tables: i32[batch, max_pages_per_seq]. Page of each logical page; entries of live pages in
        [0, num_pages), the rest ignored.
      seq_lens: i32[batch]. Tokens of each sequence including the new ones; 0 for an empty slot.
      plan: what to launch; static.
      sm_scale: f32 scalar that the logits are multiplied by; `head_dim ** -0.5` when None. May be traced.
      window: tokens that a query attends, itself included; static; None for all.
      softcap: logits become `softcap * tanh(logits / softcap)` after the scale and before the mask; static; None or 0
        for none.
      sinks: f32[num_q_heads]. One logit a head, not scaled or capped, counted once in the denominator.
      k_scale, v_scale: of a quantised cache, what its stored values are multiplied by: a number or f32[] for all,
        f32[num_kv_heads], or f32[num_pages, page_size, num_kv_heads]; None for 1. May be traced, and of two kinds.
        With a kv_dtype that is not quantised they are refused.
      return_lse: also return the log-sum-exp.

    Returns:
      out: q's shape with head_dim_v lanes, q's dtype. With `return_lse`, (out, lse): lse is f32 of q's shape without
      its last axis, natural log, over the scaled and capped logits and the sink. A row that attends no token has
      out 0 and lse -inf (with sinks: the sink's logit). A row of a sequence with seq_len below 0, a row whose own
      length is above what its table or the plan holds, and a row with a live page id outside [0, num_pages) are NaN,
      and no other row is touched.

    Raises:
      ValueError, TypeError: an argument that is not accepted, naming it, what was got and what is accepted.
      NotImplementedError: what no backend of this build serves.

    Note:
      For equal `plan.fingerprint()` every row's bits depend on its own query, own live K/V values, their scales and own
      length alone: not on the batch, neighbours, table width, page ids, pool size or dead entries; and a row of a
      q_len > 1 call has the bits of a one-token call at its position. A scale in two forms of the same value is equal
      to rounding, not in bits.
    """
    if not isinstance(return_lse, bool):
        raise TypeError(f"return_lse={return_lse!r} must be a bool, got {type(return_lse).__name__}")
    arrays, options = checks.decode_arguments(
        q,
        k_pages,
        v_pages,
        block_tables,
        seq_lens,
        plan=plan,
        sm_scale=sm_scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    traced = any(isinstance(x, jax.core.Tracer) for x in arrays)
    elsewhere = plan.policy.ahead_of_time or INSPECTING.get()
    if plan.backend == "mosaic":
        runs = not (traced or INSPECTING.get())
        checks.require_served_by_mosaic(plan, q, (arrays[-2], arrays[-1]), elsewhere=elsewhere, runs=runs)
    if not elsewhere and plan.policy.target is not None and plan.policy.target.arch != "cpu":
        check_sm_count(plan.policy.sm_count, plan.policy.target.source, jax.devices()[0])
    log.traced(plan)
    if traced and not INSPECTING.get():
        for observe in marks.OBSERVERS:
            observe(plan)
    # Equal plans are one call. A trace also says where its plan came from, so there such plans are calls of their own.
    q_len = 1 if jnp.ndim(q) == 3 else q.shape[1]
    tile = marks.tile_name(plan, q_len, sum(jnp.ndim(scale) == 3 for scale in arrays[-2:] if scale is not None))
    out, lse = _decode(plan, tile=tile, origin=_origin(plan) if traced else None)(*arrays, **options)
    if jnp.ndim(q) == 3:
        out, lse = out[:, 0], lse[:, 0]
    return (out, lse) if return_lse else out


def _origin(plan: DecodePlan) -> tuple[Any, ...]:
    """What a plan shows of itself and does not compare."""
    policy = plan.policy
    shown = (policy, policy.target, policy.origins, policy.ahead_of_time, policy.log_plans)
    return (*shown, plan.max_decode_seqs, plan.num_seqs, plan.max_seq_len)


@functools.cache
def _decode(plan: DecodePlan, *, tile: str, origin: tuple[Any, ...] | None) -> Any:
    """The jitted call of a plan; its name says which plan that is in whatever the call is lowered or compiled to."""
    del origin
    return jax.jit(
        marks.named(functools.partial(_attend, plan=plan), marks.call_name(plan, tile)),
        static_argnames=("window", "softcap"),
    )


def _attend(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    sm_scale: jax.Array,
    sinks: jax.Array | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    *,
    plan: DecodePlan,
    window: int | None,
    softcap: float | None,
) -> tuple[jax.Array, jax.Array]:
    q, k_pages, v_pages, sm_scale, sinks, k_scale, v_scale = marks.mark(
        q, k_pages, v_pages, sm_scale, sinks, k_scale, v_scale, plan=plan, window=window, softcap=softcap
    )
    if q.shape[0] == 0:
        return jnp.zeros((*q.shape[:-1], plan.head_dim_v), q.dtype), jnp.zeros(q.shape[:-1], jnp.float32)

    # Under `vmap` the calls run one after another: a batched loop body would be another program, with other bits.
    @jax.custom_batching.sequential_vmap
    def attend(sinks: jax.Array | None, *arrays: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        split, combine = _kernels(plan)
        *operands, k_scale, v_scale = arrays
        return combine(split(*operands, sinks, k_scale, v_scale, window=window, softcap=softcap), sinks)

    return attend(sinks, q, k_pages, v_pages, block_tables, seq_lens, sm_scale, k_scale, v_scale)


def _kernels(plan: DecodePlan) -> tuple[Any, Any]:
    # Imported when first used: one backend's dependencies are not another's.
    folder = f"splitk_jax.kernels.{plan.backend}"
    split = functools.partial(import_module(f"{folder}.split").split, plan=plan)
    combine = functools.partial(import_module(f"{folder}.combine").combine, plan=plan)
    if plan.backend != "reference":
        return split, combine
    # Device kernels have names of their own; these are functions of a program, named alike.
    split_name, combine_name = marks.kernel_names(plan.num_splits, marks.tile_name(plan, 1, 0), plan.backend)
    return (
        jax.jit(marks.named(split, split_name), static_argnames=("window", "softcap")),
        jax.jit(marks.named(combine, combine_name)),
    )
