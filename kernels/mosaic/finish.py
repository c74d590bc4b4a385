"""The end of a fold, on register arrays: one text for the CTA that holds a whole row and for the combine."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from splitk_jax.kernels.partials import LN2, LOG2E, SplitPartials


def finish(acc: SplitPartials, across: Callable[[jax.Array], jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp (natural logarithm) of a whole fold; 0 and -inf where nothing was attended.

    Args:
      acc: the fold.
      across: spreads a value per head over its output.
    """
    empty = acc.l == 0
    total = jnp.where(empty, 1.0, acc.l)
    out = jnp.where(across(empty), 0.0, acc.o / across(total))
    return out, (acc.m + jnp.log(acc.l) * LOG2E) * LN2
