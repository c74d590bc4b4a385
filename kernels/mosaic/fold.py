"""The merge of partials, exact in its scaling: on register arrays, for the CTA that holds them and for the combine.

Every partial's `m` is a whole number, so a weight is a power of two and multiplies without rounding: what is left of a
fold is one sum in split order, whose terms may be scaled to the largest `m` early or late. So a CTA that folds as it
goes and the combine, which knows every `m` before it begins, come to the same bits.

That holds where no term of a sum overflows, or is below 2**-126 at the scale of the largest `m`. What is lost there
late and not early is below 2**-149: `finish` drops outputs that it could be seen in, and above them it shows only where
the sum of such terms and the ones above is an exact tie, which takes values made for it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from splitk_jax.kernels.partials import LN2, LOG2E, SplitPartials

LEAST = 2.0**-100
"""An output's unnormalised magnitude, its values' scale included, below which it is 0: far above where a product of
float32 is rounded."""

_NORMAL = -126.0
_WHOLE = 1.5 * 2.0**23


def to_whole(m: jax.Array) -> jax.Array:
    """The nearest whole number, by adding one so large that nothing smaller is kept; infinities and NaN as they are."""
    # From both sides: a sum below 2**23 keeps halves.
    return (((m + _WHOLE) - _WHOLE) - _WHOLE) + _WHOLE


def weights(m: jax.Array, m_new: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two powers of two whose product is `2**(m - m_new)` for whole `m <= m_new`: one alone reaches down to 2**-126.

    Of an empty partial, whatever is finite: there is nothing to weigh.
    """
    d = jnp.where(m_new == -jnp.inf, 0.0, m - m_new)
    near = jnp.maximum(d, _NORMAL)
    return jnp.exp2(near), jnp.exp2(jnp.maximum(d - near, _NORMAL))


def fold(acc: SplitPartials, part: SplitPartials, across: Callable[[jax.Array], jax.Array]) -> SplitPartials:
    """Folds the next split into the ones before it. Sums do not associate: split order is part of the bits.

    Args:
      acc: the fold so far.
      part: the next split's.
      across: spreads a value per head over its output.
    """
    m = jnp.maximum(acc.m, part.m)
    (a, a_far), (b, b_far) = weights(acc.m, m), weights(part.m, m)
    return SplitPartials(
        o=acc.o * across(a) * across(a_far) + part.o * across(b) * across(b_far),
        m=m,
        l=acc.l * a * a_far + part.l * b * b_far,
    )


def fold_sink(acc: SplitPartials, sink: jax.Array, across: Callable[[jax.Array], jax.Array]) -> SplitPartials:
    """Folds one more logit, of nothing, into a whole fold: after every split, in whichever kernel that is.

    Args:
      acc: the fold.
      sink: the logit of each head (natural logarithm).
      across: spreads a value per head over its output.
    """
    logit = sink * LOG2E
    m_sink = to_whole(logit)
    l_sink = jnp.where(logit == -jnp.inf, 0.0, jnp.exp2(logit - m_sink))
    return fold(acc, SplitPartials(o=across(jnp.zeros_like(m_sink)), m=m_sink, l=l_sink), across)


def finish(acc: SplitPartials, across: Callable[[jax.Array], jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp (natural logarithm) of a whole fold; 0 and -inf where nothing was attended.

    Args:
      acc: the fold.
      across: spreads a value per head over its output.
    """
    empty = acc.l == 0
    total = jnp.where(empty, 1.0, acc.l)
    least = jnp.where((acc.o < LEAST) & (acc.o > -LEAST), 0.0, acc.o)
    out = jnp.where(across(empty), 0.0, least / across(total))
    return out, (acc.m + jnp.log(acc.l) * LOG2E) * LN2
