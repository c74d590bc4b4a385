"""The paged KV cache: a pool of pages as a pytree, and a host-side allocator of page ids."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from splitk_jax import checks
from splitk_jax.plan import MAX_TOKENS, dtype_name
from splitk_jax.target import INT_MAX, KV_DTYPES, whole_number


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class KVPages:
    """The pages of one layer: a pytree of two arrays, made to be donated to a jitted step.

    Every method that writes returns a new `KVPages`; under `jit` with the old one donated it writes in place.

    Attributes:
      k_pages: [num_pages, page_size, num_kv_heads, head_dim].
      v_pages: [num_pages, page_size, num_kv_heads, head_dim_v].
    """

    k_pages: jax.Array
    v_pages: jax.Array

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
    ) -> "KVPages":
        """A pool of zeros, K and V in buffers of their own.

        Args:
          num_pages: pages of the pool.
          page_size: tokens of a page.
          num_kv_heads: KV heads.
          head_dim: lanes of a key.
          head_dim_v: lanes of a value; `head_dim` when None.
          dtype: float32, bfloat16 or float16.

        Raises:
          ValueError, TypeError: an argument that is not accepted, or a pool of more slots than an int32 counts.
          NotImplementedError: a quantised dtype.
        """
        num_pages, page_size = whole_number("num_pages", num_pages), whole_number("page_size", page_size)
        _require_slots(num_pages, page_size)
        lead = (num_pages, page_size, whole_number("num_kv_heads", num_kv_heads))
        head_dim = whole_number("head_dim", head_dim)
        head_dim_v = head_dim if head_dim_v is None else whole_number("head_dim_v", head_dim_v)
        dtype = dtype_name("dtype", dtype)
        return cls(jnp.zeros((*lead, head_dim), dtype), jnp.zeros((*lead, head_dim_v), dtype))

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
          The pages with the tokens written, cast to the pages' dtype. Of tokens that share a slot the last one wins.

        Raises:
          ValueError, TypeError: shapes or dtypes that are not accepted.
        """
        self._require_valid()
        k, v = checks.as_array("k", k), checks.as_array("v", v)
        positions = checks.as_array("positions", positions)
        block_tables = checks.as_array("block_tables", block_tables)
        if positions.ndim not in (1, 2):
            raise ValueError(f"positions must be [batch] or [batch, num_tokens], got shape {list(positions.shape)}")
        batch = positions.shape[0]
        checks.require_shape("positions", positions, (batch, "num_tokens")[: positions.ndim])
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
          k: [n, num_kv_heads, head_dim], cast to the pages' dtype.
          v: [n, num_kv_heads, head_dim_v], cast to the pages' dtype.
          slots: i32[n]. `page * page_size + offset`; a slot outside the pool, -1 among them, writes nothing. Of
            equal slots the last row wins.

        Returns:
          The pages with the rows written.

        Raises:
          ValueError, TypeError: shapes or dtypes that are not accepted.
        """
        self._require_valid()
        k, v, slots = checks.as_array("k", k), checks.as_array("v", v), checks.as_array("slots", slots)
        checks.require_shape("slots", slots, (slots.shape[0] if slots.ndim else "n",))
        checks.require_dtype("slots", slots, "int32")
        checks.require_shape("k", k, (slots.shape[0], *self.k_pages.shape[2:]))
        checks.require_shape("v", v, (slots.shape[0], *self.v_pages.shape[2:]))
        for name, x in (("k", k), ("v", v)):
            checks.require_dtype(name, x, *KV_DTYPES)
        slots = _last_writer(slots, self.num_pages * self.page_size)
        return KVPages(_scatter(self.k_pages, k, slots), _scatter(self.v_pages, v, slots))

    @classmethod
    def from_contiguous(cls, k: jax.Array, v: jax.Array, *, page_size: int) -> tuple["KVPages", jax.Array]:
        """Pages a contiguous cache: sequence `b` takes pages `b * n` to `b * n + n - 1`.

        Args:
          k: [batch, length, num_kv_heads, head_dim].
          v: [batch, length, num_kv_heads, head_dim_v].
          page_size: tokens of a page; the last page of a sequence is filled up with zeros.

        Returns:
          (pages, block_tables): block_tables is i32[batch, ceil(length / page_size)].

        Raises:
          ValueError, TypeError: shapes or dtypes that are not accepted.
        """
        k, v = checks.as_array("k", k), checks.as_array("v", v)
        page_size = whole_number("page_size", page_size)
        checks.require_shape("k", k, ("batch", "length", "num_kv_heads", "head_dim"))
        checks.require_shape("v", v, (*k.shape[:3], "head_dim_v"))
        checks.require_dtype("k", k, *KV_DTYPES)
        checks.require_dtype("v", v, k.dtype.name)
        batch, length = k.shape[:2]
        width = -(-length // page_size)
        _require_slots(batch * width, page_size)

        def paged(x: jax.Array) -> jax.Array:
            padded = jnp.pad(x, ((0, 0), (0, width * page_size - length), (0, 0), (0, 0)))
            return padded.reshape(batch * width, page_size, *x.shape[2:])

        return cls(paged(k), paged(v)), jnp.arange(batch * width, dtype=jnp.int32).reshape(batch, width)

    def to_contiguous(self, block_tables: jax.Array, seq_lens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Gathers each sequence's tokens.

        Args:
          block_tables: i32[batch, max_pages_per_seq].
          seq_lens: i32[batch], tokens.

        Returns:
          k and v, [batch, max_pages_per_seq * page_size, num_kv_heads, head_dim or head_dim_v]; zeros past a
          sequence's end, NaN where a live page id is outside [0, num_pages), and throughout a row whose seq_len is
          outside [0, max_pages_per_seq * page_size].
        """
        self._require_valid()
        block_tables = checks.as_array("block_tables", block_tables)
        batch = block_tables.shape[0] if block_tables.ndim else 0
        block_tables, seq_lens = checks.table_arguments(block_tables, seq_lens, batch=batch, page_size=self.page_size)
        length = block_tables.shape[1] * self.page_size
        tokens = jnp.arange(length, dtype=jnp.int32)
        pages = block_tables[:, tokens // self.page_size]
        length_ok = ((seq_lens >= 0) & (seq_lens <= length))[:, None]
        live = (tokens[None] < seq_lens[:, None]) | ~length_ok
        page_ok = (pages >= 0) & (pages < self.num_pages) & length_ok
        pages = jnp.where(page_ok, pages, 0)

        def gathered(pool: jax.Array) -> jax.Array:
            x = pool[pages, tokens % self.page_size]
            x = jnp.where(page_ok[..., None, None], x, jnp.nan)
            return jnp.where(live[..., None, None], x, 0).astype(pool.dtype)

        return gathered(self.k_pages), gathered(self.v_pages)


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


def _scatter(pool: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
    flat = pool.reshape(-1, *pool.shape[2:])
    return flat.at[slots].set(rows.astype(pool.dtype), mode="drop").reshape(pool.shape)


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
