"""What a split kernel hands to a combine kernel, and the one fold that merges it.

Online softmax and its merge: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867,
algorithm 3; split over KV as in Dao et al., "Flash-Decoding" (2023).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453

NO_CAP = 2.0**100
"""A softcap from which on it caps nothing that a float32 logit can be, to the last bit but for overflows. Over a larger
one, small logits are subnormal."""


class SplitPartials(NamedTuple):
    """Partials of the splits of each row; float32, an empty split is `(0, -inf, 0)`, a poisoned one all NaN.

    Attributes:
      o: f32[..., head_dim_v]. Unnormalised output, `sum(exp2(s - m) * v)`; between kernels it may be bf16, over `l`.
      m: f32[...]. Largest logit in base 2.
      l: f32[...]. `sum(exp2(s - m))`.
    """

    o: jax.Array
    m: jax.Array
    l: jax.Array


def rescale(m: jax.Array, m_new: jax.Array) -> jax.Array:
    """`exp2(m - m_new)` for `m <= m_new`; 0 where both are empty, so that nothing comes of `-inf - -inf`."""
    return jnp.where(m_new == -jnp.inf, 0.0, jnp.exp2(m - m_new))


def fold(
    acc: SplitPartials,
    part: SplitPartials,
    across: Callable[[jax.Array], jax.Array] = lambda x: x[..., None],
) -> SplitPartials:
    """Folds the next split into the ones before it. Not associative: split order is part of the bits.

    Args:
      acc: the fold so far.
      part: the next split's.
      across: spreads a value per head over its output, however that is laid out.
    """
    m = jnp.maximum(acc.m, part.m)
    a, b = rescale(acc.m, m), rescale(part.m, m)
    return SplitPartials(o=acc.o * across(a) + part.o * across(b), m=m, l=acc.l * a + part.l * b)


def to_bfloat16(part: SplitPartials) -> SplitPartials:
    """A split's output over its `l`, which bfloat16 holds as well as any; `l` gives it its weight back."""
    empty = part.l == 0
    o = part.o / jnp.where(empty, 1.0, part.l)[..., None]
    return part._replace(o=o.astype(jnp.bfloat16))


def from_bfloat16(part: SplitPartials) -> SplitPartials:
    return part._replace(o=part.o.astype(jnp.float32) * part.l[..., None])


def choose(which: jax.Array, a: SplitPartials, b: SplitPartials) -> SplitPartials:
    """One of two, whole."""
    return SplitPartials(*(jnp.where(which, x, y) for x, y in zip(a, b, strict=True)))
