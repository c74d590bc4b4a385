"""What a decode call leaves in a trace, so that `inspect` finds it there: its plan, and a name that texts keep.

The mark is an identity on the queries, a primitive whose parameters are the static decisions. It costs nothing: it
lowers to its operand.
"""

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from splitk_jax.plan import DecodePlan
from splitk_jax.policy import INSPECTING

DECODE = "splitk_decode"
MERGE = "splitk_merge_states"

OBSERVERS: list[Callable[[DecodePlan], None]] = []
"""Told of each decode call that is traced."""

_inspected = jax.make_user_context(False)


@contextmanager
def inspecting() -> Generator[None]:
    """While a function is inspected no device is asked for.

    What is traced meanwhile has not met the checks of the device that it runs on, so it has jit caches of its own.
    """
    token = INSPECTING.set(True)
    try:
        with _inspected(True):
            yield
    finally:
        INSPECTING.reset(token)


plan_p = Primitive("splitk_plan")
plan_p.def_impl(lambda q, **decisions: q)
plan_p.def_abstract_eval(lambda q, **decisions: q)
mlir.register_lowering(plan_p, lambda ctx, q, **decisions: [q])
batching.primitive_batchers[plan_p] = lambda args, dims, **decisions: (plan_p.bind(*args, **decisions), dims[0])


def _no_gradient(primals: Any, tangents: Any, **decisions: Any) -> Any:
    del primals, tangents, decisions
    raise NotImplementedError(
        "paged_decode_attention has no gradient: it is a decode op; differentiate a training attention instead"
    )


ad.primitive_jvps[plan_p] = _no_gradient


def mark(q: jax.Array, *, plan: DecodePlan, window: int | None, softcap: float | None, sinks: bool) -> jax.Array:
    """The queries [batch, q_len, num_q_heads, head_dim], with the call's static decisions on them."""
    batch, q_len = q.shape[:2]
    return plan_p.bind(q, plan=plan, batch=batch, q_len=q_len, window=window, softcap=softcap, sinks=sinks)


def call_name(plan: DecodePlan) -> str:
    """The name of a decode call in lowered and compiled text: `splitk_decode_s33_mosaic_<fingerprint>`."""
    return f"{DECODE}_s{plan.num_splits}_{plan.backend}_{plan.fingerprint()}"


def named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function under another name, which is what `jit` calls it."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    call.__name__ = call.__qualname__ = name
    return call
