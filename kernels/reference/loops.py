"""What keeps the compiler from knowing more of a loop than the plan."""

import jax
import jax.numpy as jnp
from jax import lax


def trip_count(count: int) -> jax.Array:
    """A trip count that the compiler cannot see: a loop over a batch of one would be unrolled into another program."""
    return lax.optimization_barrier(jnp.int32(count))


def index(i: jax.Array) -> jax.Array:
    """A loop's index, passed through a sort.

    XLA's CPU backend compiles a loop over few bytes as one function, with other code for its products than a loop over
    many, and so with other bits: the batch's and the pool's sizes would decide. It leaves a loop with a sort alone.
    """
    return lax.sort(jnp.stack([i, i + 1]))[0]
