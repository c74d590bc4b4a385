"""Plans: a policy applied to a model's static shape, and the split tree that it fixes.

A split's edges depend on the plan and on the row's own length, nothing else: not on the batch, the block-table width,
page ids or the pool's size. That is the domain of the invariance guarantee.
"""

import hashlib
import json
from dataclasses import dataclass, field, fields, replace
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np

from splitk_jax import decision, report
from splitk_jax.policy import Policy, ceil_div, num_splits, workspace_slots
from splitk_jax.target import BACKENDS, FLOAT_DTYPES, KV_DTYPES, QUANTISED_DTYPES, Target, Tile, whole_number
from splitk_jax.tiles import (
    MAX_COLUMNS,
    MAX_COPIES,
    MAX_Q_LEN,
    MAX_SCRATCH_BYTES,
    MOSAIC_DTYPES,
    MOSAIC_HEAD_DIMS,
    MOSAIC_QUANTISED_HEAD_DIMS,
    ROWS,
    SCALE_HEADS,
    WARPGROUP,
    MosaicTile,
)

USE_REFERENCE = "use the reference backend (load_policy(..., backend='reference') or SPLITK_JAX_KERNEL=reference)"
LOWER_ELSEWHERE = "trace and lower it with .trace(...).lower(lowering_platforms=('cuda',)) for another machine"

PARTIAL_DTYPES = ("float32", "bfloat16")

TREE_VERSION = 5
"""Moves when the split rules or the fold change, since bits move with them."""

RUN_SPLITS = 8
"""Splits fold left to right in runs of so many, and the runs left to right: of a row that several CTAs share, each
writes one partial for a run, not for a split."""

PACKED_COLUMNS = 16
"""Query heads of a warpgroup where several query tokens are packed: with more, products take longer than loads."""

MAX_TOKENS = 1 << 30
"""Tokens that one block-table row may hold: span arithmetic stays inside int32 below it."""

REPORT_BATCHES = (1, 4, 16, 64)
REPORT_CONTEXTS = (256, 1024, 4096, 16384, 65536, 131072)


class SplitEdges(NamedTuple):
    """Where the splits of one row lie: split `s` in [first, stop) covers `split_range(edges, s, seq_len)`; every other
    split is empty.
    """

    start: Any
    origin: Any
    span: Any
    first: Any
    stop: Any


def split_edges(
    seq_len: Any,
    *,
    num_splits: int,
    min_kv_per_split: int,
    block_kv: int,
    split_size: int | None,
    window: int | None,
    xp: Any = np,
) -> SplitEdges:
    """The split tree of a row, from its own length.

    Args:
      seq_len: the row's tokens, 0 to `MAX_TOKENS`; a scalar or an array of `xp`.
      num_splits: the plan's.
      min_kv_per_split: tokens.
      block_kv: tokens; edges lie at multiples of it.
      split_size: tokens, under `fixed_size`; None under the count rules.
      window: tokens that the row attends, the current one included; None for all.
      xp: numpy on the host, `jax.numpy` on a device: one text serves both.
    """
    start = seq_len * 0 if window is None else xp.maximum(seq_len - window, 0)
    if split_size is not None:
        # Edges at absolute multiples: a shared prefix keeps its partials as the sequence grows.
        return SplitEdges(start, start * 0, start * 0 + split_size, start // split_size, ceil_div(seq_len, split_size))
    # A window's splits are counted from a multiple of `block_kv`: rows whose windows begin a few tokens apart have the
    # same edges, and every step of loads begins where a copy does.
    origin = start // block_kv * block_kv
    active = xp.clip(ceil_div(seq_len - start, min_kv_per_split), 1, num_splits)
    span = xp.maximum(ceil_div(ceil_div(seq_len - origin, active), block_kv), 1) * block_kv
    # Rounding the span up can leave the last of `active` splits empty: stop at the last that is not.
    return SplitEdges(start, origin, span, start * 0, ceil_div(seq_len - origin, span))


def split_range(edges: Any, s: Any, seq_len: Any, *, xp: Any = np) -> tuple[Any, Any]:
    """The tokens [low, high) of split `s` of a row.

    Args:
      edges: the row's `start`, `origin` and `span`: `SplitEdges`, or a record that has them.
      s: the split, counted as in `SplitEdges`.
      seq_len: the row's tokens.
      xp: as in `split_edges`.
    """
    edge = edges.origin + s * edges.span
    return xp.maximum(edges.start, edge), xp.minimum(edge + edges.span, seq_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """What a launch is: plain ints and strings, the one static argument of the op.

    Equal plans share one compilation; the policy that a plan came from takes no part in equality.

    Attributes:
      num_q_heads, num_kv_heads, head_dim, head_dim_v, page_size (tokens), q_dtype, kv_dtype: the model's shape.
      row_capacity: sequences that one launch may hold; more are refused.
      num_splits: splits of the longest sequences.
      min_kv_per_split: tokens; sequences under `num_splits` times this use fewer splits.
      split_size: tokens, under `fixed_size`; None under the other rules.
      block_kv: tokens; the granularity of split edges.
      step_kv: tokens that are loaded and multiplied at once.
      stages: steps whose loads the mosaic backend has in flight; None where the tile states none.
      heads_per_cta: query heads of one KV head that one CTA packs.
      kv_heads_per_cta: KV heads that one CTA computes.
      warpgroups: warpgroups of a CTA of the mosaic backend that compute: each a KV head, or part of one's query heads.
      ctas: CTAs that one sequence launches at one split,
        `num_kv_heads / kv_heads_per_cta * ceil(group / heads_per_cta)`.
      backend: the kernels that serve it.
      partial_dtype: what the outputs of splits are kept in between the kernels: float32, or bfloat16 and normalised.
      launch_ctas: CTAs that the mosaic backend launches, whatever the batch. Who computes a split moves no bit, so this
        takes no part in the fingerprint.
      policy: where it came from.
      max_decode_seqs, num_seqs, max_seq_len: the arguments that it was made with, for reports.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    page_size: int
    q_dtype: str
    kv_dtype: str
    row_capacity: int
    num_splits: int
    min_kv_per_split: int
    split_size: int | None
    block_kv: int
    step_kv: int
    stages: int | None
    heads_per_cta: int
    kv_heads_per_cta: int
    warpgroups: int
    ctas: int
    backend: str
    launch_ctas: int
    policy: Policy = field(compare=False, repr=False)
    partial_dtype: str = "float32"
    max_decode_seqs: int = field(compare=False)
    num_seqs: int = field(compare=False)
    max_seq_len: int | None = field(compare=False)

    def __post_init__(self) -> None:
        for name in ("head_dim", "head_dim_v"):
            whole_number(name, getattr(self, name), 1, 4096)
        for name in ("page_size", "row_capacity", "num_splits", "min_kv_per_split", "block_kv", "step_kv"):
            whole_number(name, getattr(self, name), 1, MAX_TOKENS)
        for name in (
            "num_q_heads",
            "num_kv_heads",
            "heads_per_cta",
            "kv_heads_per_cta",
            "warpgroups",
            "ctas",
            "launch_ctas",
        ):
            whole_number(name, getattr(self, name))
        dtype_name("q_dtype", self.q_dtype, FLOAT_DTYPES)
        dtype_name("kv_dtype", self.kv_dtype, KV_DTYPES)
        dtype_name("partial_dtype", self.partial_dtype, PARTIAL_DTYPES)
        _require_groups(self.num_q_heads, self.num_kv_heads)
        if self.num_kv_heads % self.kv_heads_per_cta:
            raise ValueError(f"kv_heads_per_cta={self.kv_heads_per_cta} must divide num_kv_heads={self.num_kv_heads}")
        if self.warpgroups not in (self.kv_heads_per_cta, 2 * self.kv_heads_per_cta):
            raise ValueError(
                f"warpgroups={self.warpgroups} must be one or two for each of kv_heads_per_cta={self.kv_heads_per_cta}"
            )
        for name, multiple in (("step_kv", self.step_kv), ("split_size", self.split_size)):
            if multiple is not None and whole_number(name, multiple) % self.block_kv:
                raise ValueError(f"{name}={multiple} must be a multiple of block_kv={self.block_kv}")
        if self.backend not in BACKENDS:
            raise ValueError(f"backend={self.backend!r} is not known: accepted are {', '.join(BACKENDS)}")
        if self.backend == "mosaic":
            self._require_served_by_mosaic()

    @classmethod
    def make(
        cls,
        policy: Policy,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        max_decode_seqs: int,
        q_dtype: Any = "bfloat16",
        kv_dtype: Any = "bfloat16",
        head_dim_v: int | None = None,
        num_seqs: int | None = None,
        max_seq_len: int | None = None,
        partial_dtype: Any = "float32",
    ) -> "DecodePlan":
        """Applies `policy` to a model's static shape.

        Args:
          policy: the rule.
          num_q_heads: query heads, a multiple of `num_kv_heads`.
          num_kv_heads: KV heads.
          head_dim: lanes of a query and a key.
          page_size: tokens of a page.
          max_decode_seqs: the most sequences that a launch holds.
          q_dtype: float32, bfloat16 or float16, as a name or a dtype.
          kv_dtype: one of these, or float8_e4m3fn, float8_e5m2 or int8.
          head_dim_v: lanes of a value; `head_dim` when None.
          num_seqs: the static batch bucket, read by `legacy` and `adaptive` only; `max_decode_seqs` when None.
          max_seq_len: tokens; the longest KV that a launch attends to (block-table width * page_size). Needed by
            `adaptive` and `fixed_size`, read by no other rule.
          partial_dtype: float32 or bfloat16; the latter halves the memory of partials, and rounds each split's output.

        Returns:
          The plan.

        Raises:
          ValueError, TypeError: an argument that is not accepted, naming it, what was got and what is accepted.
          NotImplementedError: a dtype, or a shape without a tile, that no backend of this build serves.
        """
        if not isinstance(policy, Policy):
            raise TypeError(f"policy must be a Policy (load_policy(...)), got {type(policy).__name__}")
        num_q_heads = whole_number("num_q_heads", num_q_heads)
        num_kv_heads = whole_number("num_kv_heads", num_kv_heads)
        _require_groups(num_q_heads, num_kv_heads)
        head_dim = whole_number("head_dim", head_dim, 1, 4096)
        head_dim_v = head_dim if head_dim_v is None else whole_number("head_dim_v", head_dim_v, 1, 4096)
        page_size = whole_number("page_size", page_size, 1, MAX_TOKENS)
        max_decode_seqs = whole_number("max_decode_seqs", max_decode_seqs)
        num_seqs = max_decode_seqs if num_seqs is None else whole_number("num_seqs", num_seqs)
        if max_seq_len is not None:
            max_seq_len = whole_number("max_seq_len", max_seq_len, 1, MAX_TOKENS)
        if policy.rule == "adaptive" and num_seqs > max_decode_seqs:
            raise ValueError(f"num_seqs={num_seqs} must be at most max_decode_seqs={max_decode_seqs}")
        q_dtype = dtype_name("q_dtype", q_dtype, FLOAT_DTYPES)
        kv_dtype = dtype_name("kv_dtype", kv_dtype, KV_DTYPES)
        partial_dtype = dtype_name("partial_dtype", partial_dtype, PARTIAL_DTYPES)
        tile = policy.tile(head_dim, kv_dtype, page_size)
        shape, stages = _fitted(
            tile,
            group=num_q_heads // num_kv_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            page_size=page_size,
            itemsize=_itemsize(kv_dtype),
            target=policy.target,
        )
        ctas = num_kv_heads // shape.kv_heads * shape.ctas_per_kv_head
        if policy.rule == "adaptive":
            row_capacity = num_seqs
        elif policy.rule == "legacy":
            row_capacity = max(num_seqs, max_decode_seqs)
        else:
            row_capacity = max_decode_seqs
        return cls(
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            page_size=page_size,
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
            row_capacity=row_capacity,
            num_splits=num_splits(
                policy,
                ctas=ctas,
                num_q_heads=num_q_heads,
                num_seqs=num_seqs,
                max_decode_seqs=max_decode_seqs,
                max_seq_len=max_seq_len,
            ),
            min_kv_per_split=policy.min_kv_per_split,
            split_size=policy.split_size if policy.rule == "fixed_size" else None,
            block_kv=tile.block_kv,
            step_kv=shape.step_kv,
            stages=stages,
            heads_per_cta=tile.heads_per_cta,
            kv_heads_per_cta=shape.kv_heads,
            warpgroups=shape.warpgroups,
            ctas=ctas,
            backend=policy.backend,
            partial_dtype=partial_dtype,
            launch_ctas=policy.sm_count,
            policy=policy,
            max_decode_seqs=max_decode_seqs,
            num_seqs=num_seqs,
            max_seq_len=max_seq_len,
        )

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def mosaic_tile(self) -> MosaicTile:
        """What one CTA of the mosaic backend holds."""
        parts = self.warpgroups // self.kv_heads_per_cta
        blocks = ceil_div(self.group, self.heads_per_cta) * parts
        return MosaicTile(
            group=self.group,
            heads=ceil_div(self.group, blocks),
            blocks=blocks,
            kv_heads=self.kv_heads_per_cta,
            parts=parts,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            page_size=self.page_size,
            block_kv=self.block_kv,
            step_kv=self.step_kv,
            itemsize=_itemsize(self.kv_dtype),
        )

    def packed(self, q_len: int) -> "DecodePlan":
        """The launch of `q_len` query tokens a sequence in the mosaic backend, as one of as many more heads.

        The heads of all tokens that share a KV head lie side by side, token by token, so that keys and values are read
        once for all of them, and some that nobody asked for behind them where equal parts need it. The tree and the
        steps are the plan's.
        """
        if q_len == 1:
            return self
        assert self.stages is not None  # a plan of this backend has them
        tile, group = self.mosaic_tile, self.group * q_len
        blocks = ceil_div(group, PACKED_COLUMNS)
        if self.warpgroups > 1 and blocks > 1:
            blocks += blocks % 2  # for two warpgroups a CTA
        heads = ceil_div(group, blocks)
        group = heads * blocks
        kv_heads = tile.kv_heads if blocks == 1 else 1
        parts = 2 if kv_heads == 1 and self.warpgroups > 1 and blocks % 2 == 0 else 1
        tile = replace(tile, group=group, heads=heads, blocks=blocks, kv_heads=kv_heads, parts=parts)
        stages = self.stages * self.kv_heads_per_cta // kv_heads
        return replace(
            self,
            num_q_heads=self.num_kv_heads * group,
            heads_per_cta=group * parts // blocks,
            kv_heads_per_cta=kv_heads,
            warpgroups=tile.warpgroups,
            ctas=self.num_kv_heads // kv_heads * tile.ctas_per_kv_head,
            stages=tile.stages_that_fit(stages, _smem_limit(self.policy.target)),
        )

    def with_token_scales(self, count: int) -> "DecodePlan":
        """The launch in the mosaic backend where so many of keys and values have a scale a token.

        Raises:
          NotImplementedError: what the backend does not serve of them.
        """
        if not count:
            return self
        assert self.stages is not None  # a plan of this backend has them
        if self.num_kv_heads % SCALE_HEADS:
            raise NotImplementedError(
                f"num_kv_heads={self.num_kv_heads} with k_scale or v_scale for each token: the mosaic backend loads"
                f" those of {SCALE_HEADS} KV heads at once and serves whole numbers of {SCALE_HEADS}; {USE_REFERENCE}"
            )
        tile, limit = self.mosaic_tile, _smem_limit(self.policy.target)
        stages = tile.stages_that_fit(self.stages, limit, count)
        if limit is not None and tile.smem_bytes(stages, count) > limit:
            raise NotImplementedError(
                f"head_dim={self.head_dim}, head_dim_v={self.head_dim_v} with scales for each token: one stage needs"
                f" {tile.smem_bytes(stages, count)} bytes of shared memory, of which a CTA has {limit}; {USE_REFERENCE}"
            )
        return replace(self, stages=stages)

    @property
    def launch_teams(self) -> int:
        """Teams of `ctas` CTAs in a launch of the mosaic backend, as many as `launch_ctas` holds; at least one."""
        return max(self.launch_ctas // self.ctas, 1)

    @property
    def runs(self) -> int:
        """Runs of splits in a tree."""
        return ceil_div(self.num_splits, RUN_SPLITS)

    @property
    def run_splits(self) -> int:
        """Splits of a whole run."""
        return min(RUN_SPLITS, self.num_splits)

    @property
    def scratch_splits(self) -> int:
        """Splits whose outputs a scratch slot of the mosaic backend has room for: whole runs of them."""
        return self.runs * self.run_splits

    @property
    def scratch_weights(self) -> int:
        """Splits whose weights it has room for: a whole number for each thread of the combine."""
        return ceil_div(self.num_splits, WARPGROUP) * WARPGROUP

    def scratch_slots(self, batch: int) -> int:
        """Rows whose partials the mosaic backend has room for.

        A slot a row, or a team where there are more rows: at most so many are shared.
        """
        return min(batch, self.launch_teams) if self.mosaic_tile.direct else batch

    def scratch_bytes(self, rows: int) -> int:
        """Bytes of partials that a launch of so many rows needs in the mosaic backend."""
        tile = self.mosaic_tile
        floats = self.scratch_splits * tile.lanes + 2 * self.scratch_weights
        return self.scratch_slots(rows) * self.num_kv_heads * tile.blocks * tile.cols * floats * 4

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that the tree can hold; longer rows come out NaN."""
        return MAX_TOKENS if self.split_size is None else min(self.num_splits * self.split_size, MAX_TOKENS)

    @property
    def batch_invariant(self) -> bool:
        """Whether no batch that this policy is asked for moves a sequence's bits."""
        if self.policy.rule == "legacy":
            return self.num_seqs <= self.max_decode_seqs
        return self.policy.rule != "adaptive"

    @property
    def workspace_bytes(self) -> int:
        """Bytes of partials that a launch of `row_capacity` sequences and one query token each needs."""
        return self._workspace_bytes(1)

    def _workspace_bytes(self, q_len: int) -> int:
        if self.backend == "mosaic":
            return self.packed(q_len).scratch_bytes(self.row_capacity * q_len)
        slots = workspace_slots(self.num_splits, self.num_q_heads, self.row_capacity * q_len)
        return slots * (self.head_dim_v * _itemsize(self.partial_dtype) + 2 * 4)

    def _require_served_by_mosaic(self) -> None:
        def refuse(what: str, served: str) -> None:
            raise NotImplementedError(
                f"{what}: the mosaic backend serves {served}; the reference backend serves the rest"
                " (backend='reference' or SPLITK_JAX_KERNEL=reference)"
            )

        target = self.policy.target
        if target is not None and target.arch != "sm_90":
            refuse(f"target {target.name} ({target.arch})", "sm_90")
        if self.partial_dtype != "float32":
            # A CTA hands on the fold of many splits: rounded, bits would follow who computed which.
            refuse(f"partial_dtype={self.partial_dtype}", "float32")
        quantised = self.kv_dtype in QUANTISED_DTYPES
        if self.q_dtype not in MOSAIC_DTYPES or not (quantised or self.q_dtype == self.kv_dtype):
            refuse(
                f"q_dtype={self.q_dtype}, kv_dtype={self.kv_dtype}",
                f"{' or '.join(MOSAIC_DTYPES)} for both, or such queries of {', '.join(QUANTISED_DTYPES)}",
            )
        head_dims = MOSAIC_QUANTISED_HEAD_DIMS if quantised else MOSAIC_HEAD_DIMS
        for name in ("head_dim", "head_dim_v"):
            if getattr(self, name) not in head_dims:
                of = f" with kv_dtype={self.kv_dtype}" if quantised else ""
                refuse(f"{name}={getattr(self, name)}{of}", ", ".join(map(str, head_dims)))
        if self.stages is None:
            raise ValueError(
                "stages=None: the mosaic backend needs the number of pipeline stages; state it in the tile row"
            )
        tile = self.mosaic_tile
        if self.step_kv % ROWS:
            raise ValueError(f"step_kv={self.step_kv} must be a multiple of {ROWS}, the rows of a Hopper product")
        if self.block_kv % 8:
            raise ValueError(
                f"block_kv={self.block_kv} must be a multiple of 8, the tokens of one tile in shared memory"
            )
        if self.page_size % 8:
            refuse(f"page_size={self.page_size}", "multiples of 8")
        if tile.copies > MAX_COPIES:
            raise ValueError(
                f"step_kv={self.step_kv} in copies of {tile.copy_rows} tokens, as page_size={self.page_size} and"
                f" block_kv={self.block_kv} have it, is {tile.copies} of them; at most {MAX_COPIES} are served: state a"
                " shorter step or a larger block_kv in the tile row"
            )
        if tile.heads * tile.blocks != self.group or tile.heads > MAX_COLUMNS:
            refuse(
                f"group={self.group} in CTAs of heads_per_cta={self.heads_per_cta}",
                f"groups in equal parts of at most {MAX_COLUMNS} heads",
            )
        needed, limit = tile.smem_bytes(self.stages), _smem_limit(target)
        if target is not None and limit is not None and needed > limit:
            raise ValueError(
                f"stages={self.stages} of step_kv={self.step_kv} tokens need {needed} bytes of shared memory at"
                f" head_dim={self.head_dim}, head_dim_v={self.head_dim_v}, and {target.name} has"
                f" {limit} a CTA: state fewer stages or a shorter step in its tile row, or {USE_REFERENCE}"
            )

    def edges(self, seq_len: Any, *, window: int | None = None, xp: Any = np) -> SplitEdges:
        """`split_edges` under this plan."""
        return split_edges(
            seq_len,
            num_splits=self.num_splits,
            min_kv_per_split=self.min_kv_per_split,
            block_kv=self.block_kv,
            split_size=self.split_size,
            window=window,
            xp=xp,
        )

    def split_bounds(self, seq_len: int, *, window: int | None = None) -> list[tuple[int, int]]:
        """The tokens `[low, high)` of each of the `num_splits` splits of a row; empty ones are `(0, 0)`.

        Args:
          seq_len: tokens of the row.
          window: tokens that it attends, the current one included; None for all.

        Raises:
          ValueError, TypeError: `seq_len` is not in [0, max_tokens], or `window` is not a count.
        """
        seq_len = whole_number("seq_len", seq_len, 0, self.max_tokens)
        window = None if window is None else whole_number("window", window)
        edges = self.edges(np.int64(seq_len), window=window)

        def bounds(s: int) -> tuple[int, int]:
            low, high = split_range(edges, s, seq_len) if edges.first <= s < edges.stop else (0, 0)
            return int(low), int(high)

        return [bounds(s) for s in range(self.num_splits)]

    def fingerprint(self) -> str:
        """A name for the bits that this plan gives on the device it is for.

        There, equal fingerprints promise equal bits; different ones promise nothing. Over the tree and its version,
        the tile, the backend, the target's hardware and the versions of splitk_jax, jax and jaxlib; the device that
        the plan runs on is not looked at, and no backend is started.
        """
        target = self.policy.target
        facts = {f.name: getattr(self, f.name) for f in fields(self) if f.compare and f.name != "launch_ctas"}
        facts |= {
            "tree_version": TREE_VERSION,
            "sm_count": self.policy.sm_count,
            "hardware": None if target is None else (target.hardware_name, target.arch),
            "versions": versions(),
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def report_batches(self) -> list[int]:
        """Batches that reports and pictures show, of those that a launch may hold."""
        return sorted({self.max_decode_seqs, *(n for n in REPORT_BATCHES if n < self.max_decode_seqs)})

    def splits_at(self, num_seqs: int) -> int:
        """The split count of a static batch bucket: another than `num_splits` only under rules that read the bucket."""
        return num_splits(
            self.policy,
            ctas=self.ctas,
            num_q_heads=self.num_q_heads,
            num_seqs=num_seqs,
            max_decode_seqs=self.max_decode_seqs,
            max_seq_len=self.max_seq_len,
        )

    def require_query_tokens(self, q_len: int, *, batch: int) -> None:
        """Refuses more query tokens a sequence than the plan's backend serves.

        Raises:
          NotImplementedError: naming what was asked for and the backend that serves it.
        """
        if self.backend != "mosaic" or q_len == 1:
            return
        if q_len > MAX_Q_LEN:
            raise NotImplementedError(
                f"q_len={q_len}: the mosaic backend serves up to {MAX_Q_LEN} query tokens; {USE_REFERENCE}"
            )
        packed = self.packed(q_len)
        needed = packed.scratch_bytes(batch * q_len)
        if not packed.mosaic_tile.direct and needed > MAX_SCRATCH_BYTES:
            raise NotImplementedError(
                f"q_len={q_len} in a batch of {batch} with head_dim_v={self.head_dim_v}: the mosaic backend would need"
                f" {needed} bytes of partials, and serves up to {MAX_SCRATCH_BYTES};"
                f" decode fewer sequences or tokens at once, or {USE_REFERENCE}"
            )

    def facts(self) -> dict[str, Any]:
        """The plan's own fields as plain values."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "policy"}

    def report(self, *, q_len: int = 1, window: int | None = None) -> dict[str, Any]:
        """What `explain` shows, as plain values for programs; the arguments are those of `explain`."""
        q_len = whole_number("q_len", q_len)
        window = None if window is None else whole_number("window", window)
        self.require_query_tokens(q_len, batch=1)
        packed = self.packed(q_len) if self.backend == "mosaic" else self
        policy, target = self.policy, self.policy.target
        bandwidth = None if target is None else target.hbm_gb_per_s
        token_bytes = self.num_kv_heads * (self.head_dim + self.head_dim_v) * _itemsize(self.kv_dtype)
        batches = []
        for batch in self.report_batches:
            splits, unsplit = self.splits_at(batch), batch * packed.ctas
            batches.append(
                {
                    "batch": batch,
                    "num_splits": splits,
                    "ctas": unsplit * splits,
                    "waves": round(unsplit * splits / policy.sm_count, 2),
                    "unsplit_ctas": unsplit,
                    "unsplit_waves": round(unsplit / policy.sm_count, 2),
                }
            )
        contexts = []
        asked = set() if self.max_seq_len is None else {self.max_seq_len}
        longest = min(self.max_tokens, *asked) if asked else self.max_tokens
        for tokens in sorted(asked.union(n for n in REPORT_CONTEXTS if n <= longest)):
            edges = self.edges(np.int64(tokens), window=window)
            splits = int(edges.stop - edges.first)
            own = tokens if window is None else min(tokens, window)
            attended = tokens if window is None else min(tokens, window + q_len - 1)
            kv_bytes = attended * token_bytes
            contexts.append(
                {
                    "tokens": tokens,
                    "active_splits": splits,
                    "tokens_per_split": min(int(edges.span), own),
                    "kv_bytes": kv_bytes,
                    "split_us": _round(decision.read_us(self, kv_bytes, splits * packed.ctas)),
                    "unsplit_us": _round(decision.read_us(self, kv_bytes, packed.ctas)),
                }
            )
        return {
            "target": None if target is None else target.name,
            "hardware": None if target is None else target.hardware_name,
            "arch": None if target is None else target.arch,
            "sm_count": policy.sm_count,
            "hbm_gb_per_s": bandwidth,
            "l2_tokens": None if target is None or target.l2_mib is None else int(target.l2_mib * 2**20 / token_bytes),
            "rule": policy.rule,
            "formula": self._formula(),
            "plan": self.facts(),
            "batch_invariant": self.batch_invariant,
            "q_len": q_len,
            "window": window,
            "partial_dtype": self.partial_dtype,
            "workspace_bytes": self._workspace_bytes(q_len),
            "launch": packed._launch() if self.backend == "mosaic" else None,
            "fingerprint": self.fingerprint(),
            "batches": batches,
            "contexts": contexts,
            "changes": decision.changes(self),
            "warnings": [*decision.warnings(self), *self._too_large(q_len)],
            "settings": [{"key": k, "value": v, "origin": o} for k, v, o in policy.settings()],
        }

    def explain(self, *, q_len: int = 1, window: int | None = None) -> str:
        """The decision as a person reads it: why this split count, what it launches, and where each setting is from.

        Args:
          q_len: query tokens of a sequence in one call, which move no split: what the call launches.
          window: tokens that a query attends, itself included; None for all: what each context then reads.

        Raises:
          NotImplementedError: more query tokens than the backend serves. ValueError, TypeError: not counts.
        """
        facts = self.report(q_len=q_len, window=window)
        target = self.policy.target
        where = "no target" if target is None else f"{target.name}: {target.hardware_name}, {target.arch}"
        invariant = "yes" if self.batch_invariant else "NO: the split count moves with the batch bucket"
        lines = [
            f"{where}, {self.policy.sm_count} SMs",
            f"{self.num_q_heads} query heads, {self.num_kv_heads} KV heads, head_dim {self.head_dim}/{self.head_dim_v},"
            f" page {self.page_size}, q {self.q_dtype}, KV {self.kv_dtype}, up to {self.row_capacity} sequences",
            "",
            f"num_splits       {self.num_splits} = {facts['formula']}",
            f"CTAs a sequence  {self.ctas} = {self.num_kv_heads} KV heads / {self.kv_heads_per_cta} a CTA *"
            f" ceil(group {self.group} / {self.heads_per_cta} heads a CTA), at one split",
            f"batch-invariant  {invariant}",
            f"backend          {self.backend}, split edges every {self.block_kv} tokens, steps of {self.step_kv}",
            *_call_lines(q_len, window, facts["launch"]),
            *_launch_lines(facts["launch"]),
            f"workspace        {report.si_bytes(facts['workspace_bytes'])} of {self.partial_dtype} partials",
            f"fingerprint      {facts['fingerprint']}",
            "",
        ]
        parts: list[Any] = [
            "\n".join(lines),
            report.table(
                "by batch, all splits active",
                ("batch", "splits", "CTAs of work", "waves", "unsplit", "unsplit waves"),
                [list(row.values()) for row in facts["batches"]],
                left=0,
            ),
            report.table(
                "by context, one sequence",
                ("tokens", "active splits", "tokens a split", "KV read", "us", "us unsplit"),
                [
                    [
                        c["tokens"],
                        c["active_splits"],
                        c["tokens_per_split"],
                        report.si_bytes(c["kv_bytes"]),
                        c["split_us"],
                        c["unsplit_us"],
                    ]
                    for c in facts["contexts"]
                ],
                left=0,
            ),
        ]
        if facts["hbm_gb_per_s"] is not None:
            parts.append("us: its KV read once at the peak bandwidth, if each SM reads its share of it.\n")
        if facts["l2_tokens"] is not None and target is not None:
            parts.append(
                f"The {target.l2_mib:g} MiB L2 holds {facts['l2_tokens']} tokens of KV: a warm call on fewer can beat"
                " the time at peak bandwidth.\n"
            )
        if self.kv_dtype in QUANTISED_DTYPES:
            parts.append("KV read leaves scales out: a scale a token and head is 4 bytes more for K, and for V.\n")
        if facts["changes"]:
            parts.append(
                report.table(
                    "where the count moves",
                    ("setting", "at", "splits"),
                    [list(row.values()) for row in facts["changes"]],
                )
            )
        if facts["warnings"]:
            parts.append("".join(f"warning: {text}\n" for text in facts["warnings"]))
        parts.append(report.table("settings", ("key", "value", "origin"), self.policy.settings(), left=3))
        return report.render(*parts)

    def _too_large(self, q_len: int) -> list[str]:
        """That the largest batch is not served with so many query tokens, where it is not."""
        try:
            self.require_query_tokens(q_len, batch=self.row_capacity)
        except NotImplementedError as e:
            return [str(e)]
        return []

    def _launch(self) -> dict[str, int]:
        """What the mosaic backend launches at every batch."""
        assert self.stages is not None  # a plan of this backend has them
        teams = self.launch_teams
        return {
            "teams": teams,
            "ctas": teams * self.ctas,
            "warpgroups": self.warpgroups,
            "heads_per_warpgroup": self.mosaic_tile.heads,
            "stages": self.stages,
            "smem_bytes": self.mosaic_tile.smem_bytes(self.stages),
        }

    def _formula(self) -> str:
        policy = self.policy
        ceiling = f"max_splits {policy.max_splits}"
        if policy.rule == "auto":
            return f"clamp(ceil({policy.target_waves} waves * {policy.sm_count} SMs / {self.ctas} CTAs), 1, {ceiling})"
        if policy.rule == "balanced":
            return (
                f"clamp({policy.target_waves} waves * max({policy.sm_count} SMs // {self.ctas} CTAs, 1), 1, {ceiling})"
            )
        if policy.rule == "legacy":
            return (
                f"min({policy.sm_count} SMs // ({self.num_q_heads} query heads * max({self.num_seqs} sequences,"
                f" {self.max_decode_seqs} rows)) or 1, {ceiling})"
            )
        if policy.rule == "adaptive":
            return (
                f"clamp(ceil({policy.target_ctas} CTAs / ({self.num_seqs} sequences * {self.ctas} CTAs)), 1,"
                f" min({ceiling}, {self.max_seq_len} tokens // {policy.min_kv_per_split}))"
            )
        if policy.rule == "fixed_size":
            return f"ceil({self.max_seq_len} tokens / {self.split_size} a split)"
        return f"clamp({policy.splits} pinned, 1, {ceiling})"


def _round(us: float | None) -> float | None:
    return None if us is None else round(us, 2)


def versions() -> dict[str, str]:
    """The installed versions that bits may move with."""
    return {name: metadata.version(name) for name in ("splitk_jax", "jax", "jaxlib")}


def _fitted(
    row: Tile,
    *,
    group: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int,
    page_size: int,
    itemsize: int,
    target: Target | None,
) -> tuple[MosaicTile, int | None]:
    """What of a tile row a CTA holds, and its stages; also where another backend serves: the tree is the same."""
    blocks = ceil_div(group, row.heads_per_cta)
    tile = MosaicTile(
        group=group,
        heads=ceil_div(group, blocks),
        blocks=blocks,
        kv_heads=1,
        parts=1,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        page_size=page_size,
        block_kv=row.block_kv,
        step_kv=row.step_kv,
        itemsize=itemsize,
    )
    if row.stages is None:
        return tile, None
    return tile.fitted(
        num_kv_heads=num_kv_heads,
        warpgroups=row.warpgroups,
        stages=row.stages,
        limit=_smem_limit(target),
    )


def _smem_limit(target: Target | None) -> int | None:
    """Bytes of shared memory of a CTA; None where it is not known."""
    return None if target is None or target.smem_per_cta_kib is None else target.smem_per_cta_kib * 1024


def _call_lines(q_len: int, window: int | None, launch: dict[str, int] | None) -> list[str]:
    asked = [] if q_len == 1 else [f"{q_len} query tokens a sequence"]
    if q_len > 1 and launch is not None:
        asked.append(f"{launch['heads_per_warpgroup']} of their heads a warpgroup")
    if window is not None:
        asked.append(f"a window of {window} tokens")
    return [f"call             {', '.join(asked)}"] if asked else []


def _launch_lines(launch: dict[str, int] | None) -> list[str]:
    if launch is None:
        return []
    return [
        f"launch           {launch['ctas']} CTAs at every batch, {launch['teams']} teams of"
        f" {launch['ctas'] // launch['teams']}; {launch['smem_bytes']} bytes of shared memory each, {launch['stages']}"
        f" stages, {launch['warpgroups']} warpgroups that compute"
    ]


def _require_groups(num_q_heads: int, num_kv_heads: int) -> None:
    if num_q_heads % num_kv_heads:
        raise ValueError(f"num_q_heads={num_q_heads} must be a multiple of num_kv_heads={num_kv_heads}")


_QUANTISED = (
    *QUANTISED_DTYPES,
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn",
    "uint8",
    "int4",
    "uint4",
    "int2",
    "uint2",
)


def dtype_name(argument: str, dtype: Any, accepted: tuple[str, ...]) -> str:
    """The name of a served dtype, one of `accepted`.

    Raises:
      TypeError: not a dtype. NotImplementedError: a quantised one. ValueError: any other that is not served.
    """
    try:
        if dtype is None:  # numpy's name for float64
            raise TypeError
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    except TypeError:
        raise TypeError(f"{argument}={dtype!r} must be a dtype or the name of one of {', '.join(accepted)}") from None
    if name in accepted:
        return name
    if name in _QUANTISED and argument != "partial_dtype":
        raise NotImplementedError(
            f"{argument}={name}: {'quantised queries are' if argument == 'q_dtype' else 'KV quantised so is'} served by"
            f" no backend of this build ({', '.join(BACKENDS)}): use one of {', '.join(accepted)}"
        )
    raise ValueError(f"{argument}={name!r} is not served: accepted are {', '.join(accepted)}")


def _itemsize(name: str) -> int:
    return 1 if name in QUANTISED_DTYPES else 4 if name == "float32" else 2
