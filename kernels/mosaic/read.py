"""The floor that benchmarks compare with: a kernel that reads bytes and does nothing else with them.

A persistent ring of TMA loads into shared memory: each CTA keeps `slots` chunks in flight, and one element of each
chunk goes into a sum, so that a caller can see that every chunk arrived.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from splitk_jax.policy import ceil_div

LANES = 256
"""Elements of one row of a chunk: the widest TMA box without a swizzle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A launch shape.

    Attributes:
      ctas_per_sm: CTAs of one SM; all their rings fit its shared memory at once.
      rows: rows of `LANES` elements in one chunk, 8 to 256.
      slots: chunks that one CTA keeps in flight.
    """

    ctas_per_sm: int
    rows: int
    slots: int

    def __str__(self) -> str:
        return f"{self.ctas_per_sm} CTAs an SM, {self.slots} x {self.rows} rows"


# With 2-byte elements, 192 KiB of an SM's 227 KiB are in flight in each; which is fastest depends on the size.
LAUNCHES = (
    Launch(ctas_per_sm=1, rows=64, slots=6),
    Launch(ctas_per_sm=1, rows=32, slots=12),
    Launch(ctas_per_sm=2, rows=32, slots=6),
    Launch(ctas_per_sm=2, rows=16, slots=12),
    Launch(ctas_per_sm=4, rows=32, slots=3),
)


def chunks(size: int, launch: Launch) -> int:
    """Chunks that hold `size` elements, the last one perhaps in part."""
    return ceil_div(size, launch.rows * LANES)


def read(k: jax.Array, v: jax.Array, sums: jax.Array, *, size: int, launch: Launch, ctas: int) -> jax.Array:
    """Reads the first `size` elements of two arrays, rounded up to whole chunks.

    Args:
      k, v: arrays of one dtype whose sizes are a multiple of `LANES`.
      sums: f32[ctas]. What the results are added to: a chain of reads stays in order.
      size: elements of each array to read.
      launch: chunks and slots.
      ctas: CTAs to launch.

    Returns:
      f32[ctas]: `sums` plus the first element of each chunk that the CTA has read, in order: chunks `cta`,
      `cta + ctas`, `cta + 2 * ctas`, ... of k's chunks followed by v's.
    """
    rows, slots = launch.rows, launch.slots
    count = chunks(size, launch)

    def read(
        k_ref,  # [k_rows, LANES]
        v_ref,  # [v_rows, LANES]
        sums_ref,  # [ctas]
        # outputs
        out_ref,  # [ctas]
        # scratch
        ring_smem,  # [slots, rows, LANES]
        full,  # slots barriers
    ):
        cta = lax.axis_index("cta")
        mine = lax.div(2 * count - cta + (ctas - 1), jnp.int32(ctas))

        def load(i: Any, slot: Any) -> None:
            chunk = cta + i * ctas

            @pl.when(chunk < count)
            def _():
                plgpu.copy_gmem_to_smem(k_ref.at[pl.ds(chunk * rows, rows)], ring_smem.at[slot], full.at[slot])

            @pl.when(chunk >= count)
            def _():
                start = (chunk - count) * rows
                plgpu.copy_gmem_to_smem(v_ref.at[pl.ds(start, rows)], ring_smem.at[slot], full.at[slot])

        @pl.loop(0, jnp.minimum(mine, slots))
        def _(i):
            load(i, i)

        # Before the loop: its latency hides behind the first chunk's.
        before = sums_ref[cta]

        def step(i, total):
            slot = lax.rem(i, jnp.int32(slots))
            plgpu.barrier_wait(full.at[slot])
            total += ring_smem[slot, 0, 0].astype(jnp.float32)

            @pl.when(i + slots < mine)
            def _():
                plgpu.commit_smem()  # every thread has read the slot
                load(i + slots, slot)

            return total

        out_ref[cta] = before + lax.fori_loop(0, mine, step, jnp.float32(0))

    return plgpu.kernel(
        read,
        out_type=jax.ShapeDtypeStruct((ctas,), jnp.float32),
        scratch_types=[
            plgpu.SMEM((slots, rows, LANES), k.dtype),
            plgpu.Barrier(num_arrivals=1, num_barriers=slots),
        ],
        grid=(ctas,),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(k.reshape(-1, LANES), v.reshape(-1, LANES), sums)
