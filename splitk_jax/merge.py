"""Merging of attention states over disjoint KV: a shared prefix and its suffixes, or shards of a context."""

import functools
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp

from splitk_jax import checks, marks
from splitk_jax.policy import INSPECTING
from splitk_jax.target import FLOAT_DTYPES


def merge_states(
    outs: jax.Array | Sequence[jax.Array], lses: jax.Array | Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Merges attention outputs computed over disjoint sets of keys, as one attention over all of them.

    States are folded in the order given, in float32, with one cast at the end; sinks belong in one of them only. On a
    GPU of compute capability 9.0, with JAX 0.11 or newer, a kernel does it where the second to last axis, heads, is a
    multiple of 4 and head_dim one of 64; else XLA does, and where `shard_map` checks how values vary or the mesh has
    explicit axes.

    Args:
      outs: states of [..., head_dim] each, as a sequence or stacked on a leading axis; one float dtype.
      lses: f32[...] each, natural log, in the same order. -inf is an empty state, whose out is not read; +inf
        outweighs every finite state, several of them weigh the same.

    Returns:
      (out, lse): [..., head_dim] in the dtype of outs, and f32[...]. All empty gives 0 and -inf.

    Raises:
      ValueError, TypeError: no states, counts, shapes or dtypes that differ.
    """
    outs, lses = _states("outs", outs), _states("lses", lses)
    if not outs or len(outs) != len(lses):
        raise ValueError(f"len(outs)={len(outs)} and len(lses)={len(lses)} must be equal and at least 1")
    if not outs[0].ndim:
        raise ValueError("outs must be states of [..., head_dim], got a scalar")
    checks.require_dtype("outs[0]", outs[0], *FLOAT_DTYPES)
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        checks.require_shape(f"outs[{i}]", out, outs[0].shape)
        checks.require_dtype(f"outs[{i}]", out, outs[0].dtype.name)
        checks.require_shape(f"lses[{i}]", lse, outs[0].shape[:-1])
        checks.require_dtype(f"lses[{i}]", lse, "float32")
    return _merge(len(outs))(outs, lses)


def _states(name: str, states: jax.Array | Sequence[jax.Array]) -> list[jax.Array]:
    try:
        each = list(states)
    except TypeError:
        raise TypeError(
            f"{name} must be a sequence of arrays, or one array stacked on a leading axis, got {type(states).__name__}"
        ) from None
    return [checks.as_array(f"{name}[{i}]", x) for i, x in enumerate(each)]


@functools.cache
def _merge(states: int) -> Any:
    """The jitted merge of so many states, under a name that says so."""
    return jax.jit(marks.named(_marked, marks.merge_name(states)))


def _marked(outs: list[jax.Array], lses: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    outs, lses = marks.mark_merge(outs, lses)
    # Behind barriers, what stands around the call can neither keep more precision than outs and lses have, nor fold
    # constants through the sums: eager and inside a larger jit give the same bits.
    outs, lses = jax.lax.optimization_barrier((outs, lses))
    if _kernel_serves(outs, lses):
        return _by_kernel(outs, lses)
    return jax.lax.optimization_barrier(_fold(outs, lses))


def _kernel_serves(outs: list[jax.Array], lses: list[jax.Array]) -> bool:
    # What is only inspected asks for no device, and looks the same either way.
    if INSPECTING.get() or jax.__version_info__ < checks.MOSAIC_JAX or not checks.on_hopper():
        return False
    # A kernel's results say neither how they vary over a mesh nor how they are sharded.
    if any(map(_varies, (*outs, *lses))) or jax.sharding.get_abstract_mesh().explicit_axes:
        return False
    return import_module("splitk_jax.kernels.mosaic.merge").serves(outs[0].shape)


def _varies(x: jax.Array) -> bool:
    """Whether a value is known to differ over the mesh of a `shard_map`."""
    aval: Any = jax.typeof(x)
    axes = getattr(aval, "manual_axis_type", None)  # newer than `vma`
    return bool(aval.vma if axes is None else axes.varying)


@jax.custom_jvp
def _by_kernel(outs: list[jax.Array], lses: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    kernel = import_module("splitk_jax.kernels.mosaic.merge").merge

    @jax.custom_batching.custom_vmap
    def merge(outs: list[jax.Array], lses: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        # A process with such a GPU may run this on its CPU all the same.
        return jax.lax.platform_dependent(outs, lses, cuda=kernel, default=_fold)

    @merge.def_vmap
    def _(size: int, batched: tuple[list[bool], list[bool]], *states: list[jax.Array]):
        # A batch is more rows.
        outs, lses = (
            [x if is_batched else jnp.broadcast_to(x, (size, *x.shape)) for x, is_batched in zip(xs, axes, strict=True)]
            for xs, axes in zip(states, batched, strict=True)
        )
        return merge(outs, lses), (True, True)

    return merge(outs, lses)


@_by_kernel.defjvp
def _(primals: tuple, tangents: tuple) -> tuple:
    return _by_kernel(*primals), jax.jvp(_fold, primals, tangents)[1]


def _fold(outs: list[jax.Array], lses: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    largest = lses[0]
    for lse in lses[1:]:
        largest = jnp.maximum(largest, lse)
    largest = jax.lax.stop_gradient(largest)  # what is shifted by it does not depend on it
    total = jnp.zeros_like(largest)
    merged = jnp.zeros(outs[0].shape, jnp.float32)
    for out, lse in zip(outs, lses, strict=True):
        # Equal infinities weigh 1 apart from -inf, whose out may hold anything.
        empty = lse == -jnp.inf
        below = jnp.where(empty | ((lse == largest) & jnp.isinf(largest)), 0.0, lse - largest)
        weight = jnp.where(empty, 0.0, jnp.exp(below))
        total += weight
        merged += jnp.where(empty[..., None], 0.0, weight[..., None] * out.astype(jnp.float32))
    none = total == 0
    total = jnp.where(none, 1.0, total)  # so that derivatives, too, are 0 where nothing is attended
    out = jnp.where(none[..., None], 0.0, merged / total[..., None])
    lse = jnp.where(jnp.isinf(largest), largest, largest + jnp.log(total))
    return out.astype(outs[0].dtype), lse
