"""What a call leaves in a trace, so that `inspect` finds it there: a mark, and a name that texts keep.

A mark is an identity on operands of the call, a primitive whose parameters are the static decisions. It costs nothing:
it lowers to its operands. Names of ours end in a hash, so that nobody's function has one by chance.
"""

import functools
import hashlib
import json
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from splitk_jax.plan import LOWER_ELSEWHERE, USE_REFERENCE, DecodePlan, versions
from splitk_jax.policy import INSPECTING

DECODE_NAME = re.compile(r"splitk_decode_s(\d+)_(t\d+(?:x\d+)?)_([a-z]+)_([0-9a-f]{16})")
MERGE_NAME = re.compile(r"splitk_merge_(\d+)_states_[0-9a-f]{16}")

OBSERVERS: list[Callable[[DecodePlan], None]] = []
"""Told of each decode call that is traced."""

_inspected = jax.make_user_context(False)


@contextmanager
def inspecting() -> Generator[None]:
    """While a function is inspected no device is asked for.

    What is traced meanwhile has not met the checks of the device that it runs on, so it is in no jit cache that others
    use; nor does an inspection find an earlier trace, which may be of an equal plan that came from elsewhere.
    """
    token = INSPECTING.set(True)
    try:
        with _inspected(object()):
            yield
    finally:
        INSPECTING.reset(token)


def _identity(name: str) -> Primitive:
    """A primitive that gives back its operands."""
    mark_p = Primitive(name)
    mark_p.multiple_results = True
    mark_p.def_impl(lambda *operands, **decisions: operands)
    mark_p.def_abstract_eval(lambda *operands, **decisions: operands)
    return mark_p


def _lower_plan(ctx: Any, *operands: Any, plan: DecodePlan, **decisions: Any) -> Any:
    del decisions
    platforms = ctx.module_context.platforms
    if plan.backend == "mosaic" and "cuda" not in platforms:
        raise NotImplementedError(
            f"platform {', '.join(platforms)}: the mosaic backend needs an sm_90 GPU; {USE_REFERENCE}, or"
            f" {LOWER_ELSEWHERE}"
        )
    return operands


def _no_gradient(primals: Any, tangents: Any, **decisions: Any) -> Any:
    del primals, tangents, decisions
    raise NotImplementedError(
        "paged_decode_attention has no gradient: it is a decode op; differentiate a training attention instead"
    )


# On every operand that has a derivative elsewhere: what is dropped on the way through a kernel would be a zero.
plan_p = _identity("splitk_plan")
mlir.register_lowering(plan_p, _lower_plan)
batching.primitive_batchers[plan_p] = lambda args, dims, **decisions: (plan_p.bind(*args, **decisions), dims)
ad.primitive_jvps[plan_p] = _no_gradient


def mark(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    sm_scale: jax.Array,
    sinks: jax.Array | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    *,
    plan: DecodePlan,
    window: int | None,
    softcap: float | None,
) -> list[Any]:
    """The differentiable operands of a call, q as [batch, q_len, num_q_heads, head_dim], with its static decisions."""
    batch, q_len = q.shape[:2]
    flat, tree = jax.tree.flatten([q, k_pages, v_pages, sm_scale, sinks, k_scale, v_scale])
    decisions = {"window": window, "softcap": softcap, "sinks": sinks is not None}
    return jax.tree.unflatten(tree, plan_p.bind(*flat, plan=plan, batch=batch, q_len=q_len, **decisions))


def _map_merge(args: Any, dims: Any, *, states: int, mapped: tuple[int, ...]) -> tuple[Any, Any]:
    size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
    return merge_p.bind(*args, states=states, mapped=(*mapped, size)), dims


merge_p = _identity("splitk_merge")
mlir.register_lowering(merge_p, lambda ctx, *operands, **decisions: operands)
batching.primitive_batchers[merge_p] = _map_merge
# A merge has gradients; its linear part is no second merge.
ad.primitive_jvps[merge_p] = lambda primals, tangents, **decisions: (merge_p.bind(*primals, **decisions), tangents)


def mark_merge(outs: list[jax.Array], lses: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
    """The states, with the merge's mark on them."""
    marked = merge_p.bind(*outs, *lses, states=len(outs), mapped=())
    return marked[: len(outs)], marked[len(outs) :]


def call_name(plan: DecodePlan, tile: str) -> str:
    """The name of a decode call in lowered and compiled text: `splitk_decode_s33_t256x3_mosaic_<fingerprint>`."""
    return f"splitk_decode_s{plan.num_splits}_{tile}_{plan.backend}_{plan.fingerprint()}"


def merge_name(states: int) -> str:
    """The name of a merge in lowered and compiled text: `splitk_merge_2_states_<hash of the versions>`."""
    tag = hashlib.sha256(json.dumps(versions(), sort_keys=True).encode()).hexdigest()[:16]
    return f"splitk_merge_{states}_states_{tag}"


def kernel_names(num_splits: int, tile: str, backend: str) -> tuple[str, str]:
    """The names of the split and the combine that such a call launches."""
    family = "splitk_reference" if backend == "reference" else "splitk"
    return f"{family}_split_s{num_splits}_{tile}", f"{family}_combine_s{num_splits}"


def tile_name(plan: DecodePlan, q_len: int, token_scales: int) -> str:
    """The tile of a call as names of kernels have it; `token_scales` of K and V have a scale a token."""
    if plan.backend == "reference":
        return f"t{plan.step_kv}"
    launch = plan.packed(q_len).with_token_scales(token_scales)
    return f"t{launch.step_kv}x{launch.stages}"


def named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function under another name, which is what `jit` calls it."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    call.__name__ = call.__qualname__ = name
    return call
