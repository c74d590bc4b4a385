"""The paged KV cache: a pool of pages as a pytree, and a host-side allocator of page ids."""

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from splitk_jax import checks
from splitk_jax.plan import MAX_TOKENS, dtype_name
from splitk_jax.target import FLOAT_DTYPES, INT_MAX, KV_DTYPES, QUANTISED_DTYPES, whole_number

PER_TOKEN = "per_token"
"""The scales that a write finds itself: one for each token and head."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class KVPages:
    """The pages of one layer: a pytree of arrays, made to be donated to a jitted step.

    Every method that writes returns a new `KVPages`; under `jit` with the old one donated it writes in place.

    Quantised pages hold `value / scale`, rounded to the nearest (ties to even) and saturated to the dtype's largest
    finite value, infinities too; of int8 that is 127 to either side. NaN stays NaN in the 8-bit floats and is 0 in
    int8, which has none; where tokens have scales of their own, it makes that scale NaN.

    Attributes:
      k_pages: [num_pages, page_size, num_kv_heads, head_dim].
      v_pages: [num_pages, page_size, num_kv_heads, head_dim_v].
      k_scale, v_scale: what the values of quantised pages are multiplied by when read: f32[], f32[num_kv_heads], or
        f32[num_pages, page_size, num_kv_heads], which every write sets beside its tokens. None for 1, and for pages
        that are not quantised.
    """

    k_pages: jax.Array
    v_pages: jax.Array
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None

    @classmethod
    def init(
        cls,
        *,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        dtype: Any = "bfloat16",
        k_scale: float | jax.Array | Literal["per_token"] | None = None,
        v_scale: float | jax.Array | Literal["per_token"] | None = None,
    ) -> "KVPages":
        """A pool of zeros, each array in a buffer of its own.

        Args:
          num_pages: pages of the pool.
          page_size: tokens of a page.
          num_kv_heads: KV heads.
          head_dim: lanes of a key.
          head_dim_v: lanes of a value; `head_dim` when None.
          dtype: float32, bfloat16 or float16; or quantised: float8_e4m3fn, float8_e5m2 or int8.
          k_scale, v_scale: of quantised pages: a number or f32[] for all, f32[num_kv_heads], `"per_token"` for scales
            that each write finds for each token and head, its largest magnitude over the dtype's largest value (of
            magnitudes above 1.7e38, as of those); None for 1.

        Raises:
          ValueError, TypeError: an argument that is not accepted, or a pool of more slots than an int32 counts.
          NotImplementedError: another quantised dtype.
        """
        num_pages, page_size = whole_number("num_pages", num_pages), whole_number("page_size", page_size)
        _require_slots(num_pages, page_size)
        lead = (num_pages, page_size, whole_number("num_kv_heads", num_kv_heads))
        head_dim = whole_number("head_dim", head_dim)
        head_dim_v = head_dim if head_dim_v is None else whole_number("head_dim_v", head_dim_v)
        dtype = dtype_name("dtype", dtype, KV_DTYPES)
        k_pages, v_pages = jnp.zeros((*lead, head_dim), dtype), jnp.zeros((*lead, head_dim_v), dtype)
        return cls(k_pages, v_pages, _new_scale("k_scale", k_scale, k_pages), _new_scale("v_scale", v_scale, v_pages))

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self.k_pages.shape[0]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.k_pages.shape[1]

    def _require_valid(self) -> None:
        # Not in __post_init__: pytrees are unflattened with whatever a transformation puts in the leaves.
        k_pages, v_pages = checks.as_array("k_pages", self.k_pages), checks.as_array("v_pages", self.v_pages)
        checks.require_shape("k_pages", k_pages, ("num_pages", "page_size", "num_kv_heads", "head_dim"))
        checks.require_shape("v_pages", v_pages, (*k_pages.shape[:3], "head_dim_v"))
        checks.require_dtype("k_pages", k_pages, *KV_DTYPES)
        checks.require_dtype("v_pages", v_pages, k_pages.dtype.name)
        for name, scale, pages in (("k_scale", self.k_scale, k_pages), ("v_scale", self.v_scale, v_pages)):
            if scale is not None:
                checks.kv_scale(name, checks.as_array(name, scale), pages)
        _require_slots(*k_pages.shape[:2])

    def append(self, k: jax.Array, v: jax.Array, block_tables: jax.Array, positions: jax.Array) -> "KVPages":
        """Writes new tokens at their positions.

        Args:
          k: [batch, num_tokens, num_kv_heads, head_dim], or [batch, num_kv_heads, head_dim] for one token a row.
          v: as k, with head_dim_v lanes.
          block_tables: i32[batch, max_pages_per_seq].
          positions: i32[batch, num_tokens], or i32[batch] for one token a row. Position of each token in its
            sequence. A negative one is padding and writes nothing; nor does one past the table, or one whose page id
            is outside [0, num_pages).

        Returns:
          The pages with the tokens written, cast or quantised to the pages' dtype. Of tokens that share a slot the
          last one wins.

        Raises:
          ValueError, TypeError: shapes or dtypes that are not accepted.
        """
        self._require_valid()
        k, v = checks.as_array("k", k, *FLOAT_DTYPES), checks.as_array("v", v, *FLOAT_DTYPES)
        positions = checks.as_array("positions", positions, "int32")
        block_tables = checks.as_array("block_tables", block_tables, "int32")
        if positions.ndim not in (1, 2):
            raise ValueError(f"positions must be [batch] or [batch, num_tokens], got shape {list(positions.shape)}")
        batch = positions.shape[0]
        checks.require_shape("positions", positions, (batch, "num_tokens")[: positions.ndim])
        for name, x in (("k", k), ("v", v)):
            if x.ndim != positions.ndim + 2:
                raise ValueError(
                    f"{name} must be [*positions.shape, num_kv_heads, lanes], got shape {list(x.shape)} with positions"
                    f" of shape {list(positions.shape)}: of several tokens a row, positions are [batch, num_tokens]"
                )
        checks.require_shape("k", k, (*positions.shape, *self.k_pages.shape[2:]))
        checks.require_shape("v", v, (*positions.shape, *self.v_pages.shape[2:]))
        checks.require_shape("block_tables", block_tables, (batch, "max_pages_per_seq"))
        checks.require_dtype("block_tables", block_tables, "int32")
        checks.require_dtype("positions", positions, "int32")
        n = positions.size
        if not n:
            return self
        positions = positions.reshape(batch, n // batch)
        slots = _slots(block_tables, positions, page_size=self.page_size, num_pages=self.num_pages)
        return self.write(k.reshape(n, *k.shape[-2:]), v.reshape(n, *v.shape[-2:]), slots.reshape(n))

    def write(self, k: jax.Array, v: jax.Array, slots: jax.Array) -> "KVPages":
        """Writes rows to slots of the pool.

        Args:
          k: [n, num_kv_heads, head_dim], float; cast or quantised to the pages' dtype.
          v: [n, num_kv_heads, head_dim_v], likewise.
          slots: i32[n]. `page * page_size + offset`; a slot outside the pool, -1 among them, writes nothing. Of
            equal slots the last row wins.

        Returns:
          The pages with the rows written.

        Raises:
          ValueError, TypeError: shapes or dtypes that are not accepted.
        """
        self._require_valid()
        k, v, slots = (
            checks.as_array("k", k, *FLOAT_DTYPES),
            checks.as_array("v", v, *FLOAT_DTYPES),
            checks.as_array("slots", slots, "int32"),
        )
        checks.require_shape("slots", slots, (slots.shape[0] if slots.ndim else "n",))
        checks.require_dtype("slots", slots, "int32")
        checks.require_shape("k", k, (slots.shape[0], *self.k_pages.shape[2:]))
        checks.require_shape("v", v, (slots.shape[0], *self.v_pages.shape[2:]))
        for name, x in (("k", k), ("v", v)):
            checks.require_dtype(name, x, *FLOAT_DTYPES)
        slots = _last_writer(slots, self.num_pages * self.page_size)
        k_pages, k_scale = _written(self.k_pages, self.k_scale, k, slots)
        v_pages, v_scale = _written(self.v_pages, self.v_scale, v, slots)
        return KVPages(k_pages, v_pages, k_scale, v_scale)

    @classmethod
    def from_contiguous(
        cls,
        k: jax.Array,
        v: jax.Array,
        *,
        page_size: int,
        dtype: Any = None,
        k_scale: float | jax.Array | Literal["per_token"] | None = None,
        v_scale: float | jax.Array | Literal["per_token"] | None = None,
    ) -> tuple["KVPages", jax.Array]:
        """Pages a contiguous cache: sequence `b` takes pages `b * n` to `b * n + n - 1`.

        Args:
          k: [batch, length, num_kv_heads, head_dim].
          v: [batch, length, num_kv_heads, head_dim_v].
          page_size: tokens of a page; the last page of a sequence is filled up with zeros.
          dtype, k_scale, v_scale: as `init` has them; k's dtype when None.

        Returns:
          (pages, block_tables): block_tables is i32[batch, ceil(length / page_size)].

        Raises:
          ValueError, TypeError: shapes or dtypes that are not accepted.
        """
        k, v = checks.as_array("k", k, *FLOAT_DTYPES), checks.as_array("v", v, *FLOAT_DTYPES)
        page_size = whole_number("page_size", page_size)
        checks.require_shape("k", k, ("batch", "length", "num_kv_heads", "head_dim"))
        checks.require_shape("v", v, (*k.shape[:3], "head_dim_v"))
        checks.require_dtype("k", k, *FLOAT_DTYPES)
        checks.require_dtype("v", v, k.dtype.name)
        dtype = dtype_name("dtype", k.dtype.name if dtype is None else dtype, KV_DTYPES)
        batch, length = k.shape[:2]
        width = -(-length // page_size)
        _require_slots(batch * width, page_size)

        def paged(name: str, x: jax.Array, scale: Any) -> tuple[jax.Array, jax.Array | None]:
            padded = jnp.pad(x, ((0, 0), (0, width * page_size - length), (0, 0), (0, 0)))
            padded = padded.reshape(batch * width, page_size, *x.shape[2:])
            return _stored(padded, _new_scale(name, scale, jax.ShapeDtypeStruct(padded.shape, dtype)), dtype)

        (k_pages, k_scale), (v_pages, v_scale) = paged("k_scale", k, k_scale), paged("v_scale", v, v_scale)
        tables = jnp.arange(batch * width, dtype=jnp.int32).reshape(batch, width)
        return cls(k_pages, v_pages, k_scale, v_scale), tables

    def to_contiguous(self, block_tables: jax.Array, seq_lens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Gathers each sequence's tokens.

        Args:
          block_tables: i32[batch, max_pages_per_seq].
          seq_lens: i32[batch], tokens.

        Returns:
          k and v, [batch, max_pages_per_seq * page_size, num_kv_heads, head_dim or head_dim_v], of the pages' dtype, or
          float32 with the scales applied where that is quantised; zeros past a sequence's end, NaN where a live page
          id is outside [0, num_pages), and throughout a row whose seq_len is outside
          [0, max_pages_per_seq * page_size].
        """
        self._require_valid()
        block_tables = checks.as_array("block_tables", block_tables, "int32")
        batch = block_tables.shape[0] if block_tables.ndim else 0
        block_tables, seq_lens = checks.table_arguments(block_tables, seq_lens, batch=batch, page_size=self.page_size)
        length = block_tables.shape[1] * self.page_size
        tokens = jnp.arange(length, dtype=jnp.int32)
        pages = block_tables[:, tokens // self.page_size]
        length_ok = ((seq_lens >= 0) & (seq_lens <= length))[:, None]
        live = (tokens[None] < seq_lens[:, None]) | ~length_ok
        page_ok = (pages >= 0) & (pages < self.num_pages) & length_ok
        pages = jnp.where(page_ok, pages, 0)

        def gathered(pool: jax.Array, scale: jax.Array | None) -> jax.Array:
            dtype = jnp.float32 if pool.dtype.name in QUANTISED_DTYPES else pool.dtype
            x = pool[pages, tokens % self.page_size].astype(dtype)
            if scale is not None:
                scale = scale[pages, tokens % self.page_size] if scale.ndim == 3 else scale
                x *= jnp.broadcast_to(scale[..., None], x.shape)
            x = jnp.where(page_ok[..., None, None], x, jnp.nan)
            return jnp.where(live[..., None, None], x, 0).astype(dtype)

        return gathered(self.k_pages, self.k_scale), gathered(self.v_pages, self.v_scale)


def _require_slots(num_pages: int, page_size: int) -> None:
    if num_pages * page_size > INT_MAX:
        raise ValueError(
            f"num_pages={num_pages} * page_size={page_size} is above the {INT_MAX} slots that an int32 counts"
        )


def _slots(block_tables: jax.Array, positions: jax.Array, *, page_size: int, num_pages: int) -> jax.Array:
    """The pool slot of each position, -1 where it has none."""
    entries = jnp.where(positions >= 0, positions // page_size, block_tables.shape[1])
    pages = jnp.take_along_axis(block_tables, entries, axis=1, mode="fill", fill_value=-1)
    ok = (pages >= 0) & (pages < num_pages)
    return jnp.where(ok, jnp.where(ok, pages, 0) * page_size + positions % page_size, -1)


def _last_writer(slots: jax.Array, num_slots: int) -> jax.Array:
    """Sends every slot that must not be written past the pool: those outside it, and all but the last of equal ones.

    A negative index would wrap around to the end of the pool.
    """
    past_end = jnp.int32(num_slots)
    slots = jnp.where((slots >= 0) & (slots < past_end), slots, past_end)
    order = jnp.argsort(slots, stable=True)
    ordered = slots[order]
    superseded = jnp.concatenate([ordered[1:] == ordered[:-1], jnp.zeros((1,), bool)])[: slots.shape[0]]
    return jnp.zeros_like(slots).at[order].set(jnp.where(superseded, past_end, ordered))


def _new_scale(name: str, scale: Any, pages: Any) -> jax.Array | None:
    """The scales of a new pool, in a buffer of their own: what is donated may not be what a caller holds."""
    if isinstance(scale, str):
        if scale != PER_TOKEN:
            raise ValueError(f"{name}={scale!r} is not known: accepted are numbers, float32 arrays and {PER_TOKEN!r}")
        scale = jnp.full(pages.shape[:3], jnp.finfo(jnp.float32).tiny)  # as of zeros, which pages begin with
    elif isinstance(scale, list | tuple):
        raise TypeError(
            f"{name}={scale!r} must be a number, an array float32[num_kv_heads] or {PER_TOKEN!r}, got"
            f" {type(scale).__name__}: give it as an array"
        )
    elif getattr(scale, "shape", ()) not in ((), pages.shape[2:3]):
        raise ValueError(
            f"{name} must be a number, [num_kv_heads]={list(pages.shape[2:3])} or {PER_TOKEN!r}, got shape"
            f" {list(scale.shape)}: scales of each token are for the writes to find"
        )
    scale = checks.kv_scale(name, scale, pages)
    return None if scale is None else jnp.array(scale)


def _stored(x: jax.Array, scale: jax.Array | None, dtype: Any) -> tuple[jax.Array, jax.Array | None]:
    """Rows [..., num_kv_heads, lanes] as the pages hold them, and their scales.

    Args:
      scale: of the pool; one of rank 3 is not read, it says that rows have scales of their own.
    """
    dtype = jnp.dtype(dtype)
    if dtype.name not in QUANTISED_DTYPES:
        return x.astype(dtype), None
    whole = jnp.issubdtype(dtype, jnp.integer)
    most = float((jnp.iinfo if whole else jnp.finfo)(dtype).max)
    x = x.astype(jnp.float32)
    if scale is not None:
        if scale.ndim == 3:
            scale = _own_scale(x, most)
        # Of what is read as 0 anything may be stored, but NaN.
        scale_of = jnp.where(jnp.abs(scale) < checks.SMALLEST, 1.0, scale)
        x = _divide(x, jnp.broadcast_to(scale_of, x.shape[:-1])[..., None])
    # A cast alone makes NaN or infinity of what is too large.
    x = jnp.clip(x, -most, most)
    if whole:
        x = jnp.where(jnp.isnan(x), 0, jnp.round(x))
    return x.astype(dtype), scale


def _own_scale(x: jax.Array, most: float) -> jax.Array:
    """The scales [..., num_kv_heads] by which the largest magnitude of each row and head is stored as `most`."""
    largest = jnp.max(jnp.abs(x), axis=-1)
    # The scale of an infinity is one by which `most` is finite, that of a subnormal one that is not 0. Of zeros it is
    # the least: a kernel brings the scales that a query attends to one size, which the largest decides.
    limits = jnp.finfo(jnp.float32)
    return jnp.clip(_divide(largest, most), limits.tiny, limits.max / (2 * most))


def _divide(x: jax.Array, by: jax.Array | float) -> jax.Array:
    """x over one divisor for several numbers, with whose reciprocal the compiler would multiply: NaN have another."""
    return x / jnp.where(jnp.isnan(x), 1.0, by)


def _written(
    pool: jax.Array, scale: jax.Array | None, rows: jax.Array, slots: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """A pool and its scales after rows are written to slots."""
    rows, row_scale = _stored(rows, scale, pool.dtype)
    if scale is not None and row_scale is not None and scale.ndim == 3:
        scale = _scatter(scale, row_scale, slots)
    if pool.dtype.itemsize > 1 or jnp.issubdtype(pool.dtype, jnp.integer):
        return _scatter(pool, rows, slots), scale
    # XLA's CPU backend scatters 8-bit floats through float16, the whole pool twice; their bits, through one copy.
    return lax.platform_dependent(pool, rows, slots, cpu=_scatter_bits, default=_scatter), scale


def _scatter_bits(pool: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
    def bits(x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(x, jnp.uint8)

    return lax.bitcast_convert_type(_scatter(bits(pool), bits(rows), slots), pool.dtype)


def _scatter(pool: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
    flat = pool.reshape(-1, *pool.shape[2:])
    return flat.at[slots].set(rows, mode="drop").reshape(pool.shape)


class OutOfPages(RuntimeError):  # noqa: N818 - reads as what happened
    """The pool has fewer free pages than were asked for; nothing was allocated."""


class PageAllocator:
    """A host-side free list of page ids; pages come back in the order in which they were freed.

    Args:
      num_pages: pages of the pool.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = whole_number("num_pages", num_pages, 1, MAX_TOKENS)
        # A dict keeps order and finds a page in constant time.
        self._free = dict.fromkeys(range(self.num_pages))

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can still give."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages, all or none.

        Raises:
          OutOfPages: fewer are free.
        """
        count = whole_number("count", count, 0)
        if count > len(self._free):
            raise OutOfPages(
                f"asked for {count} pages, {len(self._free)} of {self.num_pages} are free: free sequences, or make"
                " the pool larger"
            )
        pages = [page for page, _ in zip(self._free, range(count), strict=False)]
        for page in pages:
            del self._free[page]
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Gives pages back, all or none.

        Raises:
          ValueError: a page outside the pool, one that is free already, or one given twice. TypeError: no page ids.
        """
        if not isinstance(pages, Iterable):
            raise TypeError(f"pages={pages!r} must be page ids as `allocate` gave them, got {type(pages).__name__}")
        returned: dict[int, None] = {}
        for page in pages:
            page = whole_number("page", page, 0, self.num_pages - 1)
            if page in self._free or page in returned:
                raise ValueError(f"page {page} is free already: it was freed twice, or was never allocated")
            returned[page] = None
        self._free |= returned

    def __repr__(self) -> str:
        return f"PageAllocator(num_pages={self.num_pages}, num_free={self.num_free})"
