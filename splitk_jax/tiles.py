"""Shapes and shared memory of the mosaic backend's tiles: plain ints that a plan fixes, and what cannot be served."""

import math
from dataclasses import dataclass, replace

from splitk_jax.policy import ceil_div

WARPGROUP = 128
"""Threads."""

ROWS = 64
"""Rows of one Hopper `wgmma`."""

MAX_COLUMNS = 64
"""Query heads of one CTA."""

MAX_Q_LEN = 16
"""Query tokens of a sequence in one call."""

MAX_SCRATCH_BYTES = 1 << 31
"""Partials of a call of several query tokens, where every row's go through memory."""

MAX_COPIES = 32
"""TMA copies of keys in one step: a bit each says which page is not there."""

MOSAIC_DTYPES = ("bfloat16", "float16")
MOSAIC_HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
MOSAIC_QUANTISED_HEAD_DIMS = (64, 96, 128, 192, 256)
"""Those whose rows of one byte a lane can be swizzled."""

REDUCTION_BYTES = 2048
"""Shared memory through which the warps of one KV head reduce."""

SCALE_HEADS = 4
"""KV heads whose scales of a token a CTA loads: as few as 16 bytes hold."""

SMEM_ALIGNMENT = 1024
"""Bytes; Mosaic aligns each buffer to it, as swizzled tiles need."""

SHARED_STAGES = 3
"""Stages that must fit for KV heads to share a CTA: with fewer, loads and products take turns."""

QUANTISED_STEP = 128
"""Tokens of a step of two KV heads, at most, where they are quantised: they are multiplied from registers."""

WIDE_HEADS = 16
"""Query heads of one KV head above which two warpgroups share them: a step's products and its softmax then take longer
than its loads."""


def _round_up(x: int, multiple: int) -> int:
    return ceil_div(x, multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class MosaicTile:
    """What one CTA of the mosaic split kernel holds; every number is static in the plan.

    Attributes:
      group: query heads of a KV head.
      heads: query heads that a warpgroup packs, the columns of its products that count.
      blocks: warpgroups that share a KV head's group.
      kv_heads: KV heads of a CTA.
      parts: warpgroups of a CTA that share a KV head.
      head_dim, head_dim_v: lanes of a key and of a value.
      page_size, block_kv, step_kv: tokens of a page, between split edges, and of one pipeline stage.
      itemsize: bytes of a K/V element; of one byte, quantised, they are widened to float16 in the kernel.
    """

    group: int
    heads: int
    blocks: int
    kv_heads: int
    parts: int
    head_dim: int
    head_dim_v: int
    page_size: int
    block_kv: int
    step_kv: int
    itemsize: int

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a CTA that compute; one more loads."""
        return self.kv_heads * self.parts

    @property
    def ctas_per_kv_head(self) -> int:
        """CTAs that share a KV head's group; more than one only where a CTA has one KV head."""
        return self.blocks // self.parts

    @property
    def cols(self) -> int:
        """Columns of a product: `heads` in whole octets, as `wgmma` counts its N."""
        return _round_up(self.heads, 8)

    @property
    def rows_v(self) -> int:
        """Rows of the output product: `head_dim_v` in whole `wgmma` rows; those beyond it are never stored."""
        return _round_up(self.head_dim_v, ROWS)

    @property
    def direct(self) -> bool:
        """Whether the split kernel can write outputs itself: a copy of rows cannot leave a part of each behind."""
        return self.rows_v == self.head_dim_v

    @property
    def lanes(self) -> int:
        """Floats of one head's partial in scratch, a whole number for each thread of a warpgroup."""
        return _round_up(self.head_dim_v, WARPGROUP)

    @property
    def swizzle(self) -> int:
        """Bytes of the swizzle of what is multiplied: the widest of 128, 64 and 32 that divides both head dims."""
        return 2 * self._swizzle_lanes(64, 32, 16)

    @property
    def kv_lanes(self) -> int:
        """Lanes of one swizzled row of quantised keys and values as they are loaded."""
        return self._swizzle_lanes(128, 64, 32)

    def _swizzle_lanes(self, *accepted: int) -> int:
        return next(n for n in accepted if self.head_dim % n == 0 and self.head_dim_v % n == 0)

    @property
    def quantised(self) -> bool:
        return self.itemsize == 1

    @property
    def copy_rows(self) -> int:
        """Tokens of one TMA copy: as many as lie in one page wherever a step begins."""
        return math.gcd(self.page_size, self.block_kv, self.step_kv)

    @property
    def copies(self) -> int:
        """TMA copies that fill a stage with keys."""
        return self.step_kv // self.copy_rows

    @property
    def copy_rows_v(self) -> int:
        """Tokens of one TMA copy of values: where rows are wider than values, only one row of tiles lies together."""
        return self.copy_rows if self.direct else 8

    def smem_bytes(self, stages: int, token_scales: int = 0) -> int:
        """Bytes of shared memory that a CTA with this many stages needs.

        Args:
          stages: of the CTA.
          token_scales: how many of keys and values have a scale a token.
        """
        stage = stages * self.kv_heads * self.step_kv
        buffers = [
            stage * self.head_dim * self.itemsize,
            stage * (self.head_dim_v if self.quantised else self.rows_v) * self.itemsize,
            self.warpgroups * self.cols * self.head_dim * 2,
            self.warpgroups * self.cols * self.step_kv * 2,
            self.warpgroups * self.cols * self.rows_v * 2,
            self.warpgroups * self.cols * 4 if self.quantised else 0,
            self.warpgroups * REDUCTION_BYTES,
            *[stages * self.step_kv * SCALE_HEADS * 4] * token_scales,
            stages * 4,
            WARPGROUP * 4,
            *[stages * 8] * 4,
        ]
        return sum(_round_up(b, SMEM_ALIGNMENT) for b in buffers)

    def stages_that_fit(self, stages: int, limit: int | None, token_scales: int = 0) -> int:
        """Of so many stages, as many as fit in `limit` bytes of shared memory, where it is known; at least one."""
        while limit is not None and stages > 1 and self.smem_bytes(stages, token_scales) > limit:
            stages -= 1
        return stages

    def fitted(self, *, num_kv_heads: int, warpgroups: int, stages: int, limit: int | None) -> tuple["MosaicTile", int]:
        """The tile of one warpgroup, widened to two where a CTA may have two and has work for them, and its stages.

        Of a step that does not fit, a half or a quarter of it.

        Args:
          num_kv_heads: of the model.
          warpgroups: of a CTA, at most.
          stages: of a CTA, at most, and twice as many of quantised K/V; fewer where they do not fit.
          limit: bytes of shared memory of a CTA; None where it is not known.
        """

        def fit(tile: MosaicTile) -> int:
            # Of half the bytes, twice as many steps are as much on its way.
            most = 2 * stages if self.quantised and tile.kv_heads == 1 else stages
            return tile.stages_that_fit(most, limit)

        # Two KV heads of as many bytes in a stage.
        step_kv = min(self.step_kv, QUANTISED_STEP) if self.quantised else self.step_kv // 2
        if warpgroups > 1 and self.blocks == 1 and num_kv_heads % 2 == step_kv % ROWS == step_kv % self.block_kv == 0:
            shared = replace(self, kv_heads=2, step_kv=step_kv)
            if fit(shared) >= SHARED_STAGES:
                return shared, fit(shared)
        if warpgroups > 1 and self.heads > WIDE_HEADS and self.heads % 2 == 0:
            tile = replace(self, heads=self.heads // 2, blocks=2 * self.blocks, parts=2)
        else:
            tile = self
        while limit is not None and tile.smem_bytes(1) > limit:
            half = tile.step_kv // 2
            if half % ROWS or half % tile.block_kv:
                break
            tile = replace(tile, step_kv=half)
        return tile, fit(tile)
