"""Every shape, dtype and argument check of the public functions, at trace time, once.

Array values cannot be seen here: the kernels turn a bad live page id or length into NaN for its own row, and
`validate_batch` says which and why.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from splitk_jax.plan import LOWER_ELSEWHERE, MAX_TOKENS, USE_REFERENCE, DecodePlan
from splitk_jax.target import FLOAT_DTYPES, KV_DTYPES, QUANTISED_DTYPES, whole_number

MOSAIC_JAX = (0, 11)
"""The first JAX whose Pallas has what the mosaic kernels use."""

SMALLEST = float(np.finfo(np.float32).tiny)
"""Below it a float32 is subnormal, and arithmetic may take it for 0."""


def as_array(name: str, x: Any, *accepted: str) -> jax.Array:
    """Takes a JAX or numpy array, without a silent cast; `accepted` dtypes are for what is said of one of 64 bits.

    Raises:
      TypeError: anything else.
    """
    # A masked array would lose its mask.
    if not isinstance(x, jax.Array | np.ndarray | np.generic) or isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} must be a jax or numpy array, got {type(x).__name__}")
    if not isinstance(x, jax.Array):
        numeric = x.dtype == bool or jnp.issubdtype(x.dtype, np.number)
        # Without x64, jnp.asarray would narrow 64 bits without a word.
        if not numeric or x.dtype.itemsize > 4 or not x.dtype.isnative:
            must = f"must be {' or '.join(accepted)}" if accepted else "is not accepted"
            raise TypeError(f"{name}.dtype={x.dtype} {must}; it is not cast for you (64 bits would be narrowed)")
    return jnp.asarray(x, dtype=x.dtype)


def require_dtype(name: str, x: jax.Array, *accepted: str, otherwise: str = "it is not cast for you") -> None:
    if x.dtype.name not in accepted:
        raise TypeError(f"{name}.dtype={x.dtype.name} must be {' or '.join(accepted)}; {otherwise}")


def require_shape(name: str, x: jax.Array, expected: tuple[int | str, ...]) -> None:
    """Checks rank and the axes given as numbers; axes given as names are free but at least 1."""
    wanted = "[" + ", ".join(str(n) for n in expected) + "]"
    if x.ndim != len(expected):
        raise ValueError(f"{name} must be {wanted}, got shape {list(x.shape)} of rank {x.ndim}")
    for axis, (got, want) in enumerate(zip(x.shape, expected, strict=True)):
        if isinstance(want, int) and got != want:
            raise ValueError(f"{name}.shape[{axis}]={got} must be {want}: expected {wanted}, got {list(x.shape)}")
        if isinstance(want, str) and got == 0:
            raise ValueError(f"{name}.shape[{axis}]=0 must be at least 1: expected {wanted}, got {list(x.shape)}")


def require_plan(plan: Any) -> None:
    if not isinstance(plan, DecodePlan):
        raise TypeError(f"plan must be a DecodePlan (policy.plan(...)), a static value, got {type(plan).__name__}")


def decode_arguments(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    block_tables: Any,
    seq_lens: Any,
    *,
    plan: Any,
    sm_scale: Any,
    window: Any,
    softcap: Any,
    sinks: Any,
    k_scale: Any,
    v_scale: Any,
) -> tuple[tuple[jax.Array | None, ...], dict[str, Any]]:
    """Checks a decode call.

    Returns:
      The arrays, q as [batch, q_len, num_q_heads, head_dim] and sm_scale as f32[] among them, and the static options.

    Raises:
      ValueError, TypeError: an argument that is not accepted.
    """
    require_plan(plan)
    q = as_array("q", q, plan.q_dtype)
    if q.ndim not in (3, 4):
        raise ValueError(
            "q must be [batch, num_q_heads, head_dim] or [batch, q_len, num_q_heads, head_dim], got shape"
            f" {list(q.shape)}"
        )
    heads = (plan.num_q_heads, plan.head_dim)
    if q.ndim == 3:
        require_shape("q", q, (q.shape[0], *heads))
        q = q[:, None]
    require_shape("q", q, (q.shape[0], "q_len", *heads))
    batch = q.shape[0]
    if batch > plan.row_capacity:
        raise ValueError(
            f"q.shape[0]={batch} is above the plan's row capacity {plan.row_capacity}: plan with a larger"
            " max_decode_seqs (or num_seqs under adaptive)"
        )
    planned = f"plan with q_dtype={q.dtype.name!r}, or cast it" if q.dtype.name in FLOAT_DTYPES else "cast it"
    require_dtype("q", q, plan.q_dtype, otherwise=f"it is not cast for you: {planned}")

    k_pages, v_pages = (as_array(n, x, plan.kv_dtype) for n, x in (("k_pages", k_pages), ("v_pages", v_pages)))
    require_shape("k_pages", k_pages, ("num_pages", plan.page_size, plan.num_kv_heads, plan.head_dim))
    require_shape("v_pages", v_pages, (k_pages.shape[0], plan.page_size, plan.num_kv_heads, plan.head_dim_v))
    planned = "both pools have the plan's kv_dtype"
    if k_pages.dtype == v_pages.dtype and k_pages.dtype.name in KV_DTYPES:
        planned = f"plan with the kv_dtype that both pools have, here {k_pages.dtype.name!r}"
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        require_dtype(name, pages, plan.kv_dtype, otherwise=f"it is not cast for you: {planned}")
    block_tables, seq_lens = table_arguments(block_tables, seq_lens, batch=batch, page_size=plan.page_size)

    if sm_scale is None:
        sm_scale = plan.head_dim**-0.5
    sm_scale = scalar("sm_scale", sm_scale)
    if window is not None:
        window = whole_number("window", window)
    if softcap is not None:
        softcap = _softcap(softcap)
    if sinks is not None:
        sinks = as_array("sinks", sinks, "float32")
        require_shape("sinks", sinks, (plan.num_q_heads,))
        require_dtype("sinks", sinks, "float32")
    k_scale, v_scale = (kv_scale(name, x, k_pages) for name, x in (("k_scale", k_scale), ("v_scale", v_scale)))
    arrays = (q, k_pages, v_pages, block_tables, seq_lens, sm_scale, sinks, k_scale, v_scale)
    return arrays, {"window": window, "softcap": softcap}


def kv_scale(name: str, x: Any, pages: jax.Array) -> jax.Array | None:
    """The scales of quantised pages, as f32[], f32[num_kv_heads] or f32[num_pages, page_size, num_kv_heads].

    Args:
      name: the argument.
      x: a positive number, a float32 array, whose values are not looked at, or None.
      pages: [num_pages, page_size, num_kv_heads, ...].

    Raises:
      TypeError, ValueError: what is no scale of such pages, or any scale of pages that are not quantised.
    """
    if x is None:
        return None
    if pages.dtype.name not in QUANTISED_DTYPES:
        raise ValueError(
            f"{name} is for quantised pages ({', '.join(QUANTISED_DTYPES)}), got pages of {pages.dtype.name}: leave it"
            " out"
        )
    if isinstance(x, int | float | np.generic):
        return scalar(name, x)
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"{name}={x!r} must be a number or a jax or numpy array of float32, got {type(x).__name__}")
    x = as_array(name, x, "float32")
    require_dtype(name, x, "float32")
    accepted = ((), pages.shape[2:3], pages.shape[:3])
    if x.shape not in accepted:
        raise ValueError(
            f"{name} must be a number, [num_kv_heads]={list(accepted[1])} or [num_pages, page_size, num_kv_heads]="
            f"{list(accepted[2])}, got shape {list(x.shape)}"
        )
    return x


def table_arguments(block_tables: Any, seq_lens: Any, *, batch: int, page_size: int) -> tuple[jax.Array, jax.Array]:
    """Checks the two index arrays of a batch."""
    block_tables = as_array("block_tables", block_tables, "int32")
    seq_lens = as_array("seq_lens", seq_lens, "int32")
    require_dtype("block_tables", block_tables, "int32")
    require_dtype("seq_lens", seq_lens, "int32")
    require_shape("block_tables", block_tables, (batch, "max_pages_per_seq"))
    require_shape("seq_lens", seq_lens, (batch,))
    if block_tables.shape[1] * page_size > MAX_TOKENS:
        raise ValueError(
            f"block_tables.shape[1]={block_tables.shape[1]} pages of {page_size} tokens are above the {MAX_TOKENS}"
            " tokens that a sequence may have"
        )
    return block_tables, seq_lens


def scalar(name: str, x: Any) -> jax.Array:
    """A positive number, Python's or an array of rank 0, as f32[]; the value of a JAX array is not looked at.

    Raises:
      TypeError: not a real number. ValueError: not finite and positive, or an array of another rank.
    """
    given = x
    if isinstance(x, bool) or not isinstance(x, int | float | jax.Array | np.ndarray | np.generic):
        raise TypeError(f"{name}={x!r} must be a number or an array of rank 0, got {type(x).__name__}")
    if not isinstance(x, int | float):
        if x.ndim:
            raise ValueError(f"{name} must be a number or an array of rank 0, got shape {list(x.shape)}")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name}.dtype={x.dtype} must be a float")
    if not isinstance(x, jax.Array):
        x = _float32(x)
        if not (math.isfinite(x) and x >= SMALLEST):
            raise ValueError(f"{name}={given!r} must be finite and above 0 as a float32 (at least {SMALLEST:.3g})")
    return jnp.asarray(x).astype(jnp.float32)


def _float32(x: Any) -> np.float32:
    try:
        with np.errstate(over="ignore"):
            return np.float32(float(x))
    except OverflowError:  # an int beyond every float
        return np.float32(np.inf)


def _softcap(x: Any) -> float | None:
    if isinstance(x, bool) or not isinstance(x, int | float | np.floating | np.integer):
        raise TypeError(f"softcap={x!r} must be a static number or None, got {type(x).__name__}")
    cap = float(_float32(x))
    if not (math.isfinite(cap) and (cap >= SMALLEST or x == 0)):
        raise ValueError(
            f"softcap={x!r} must be finite and above 0 as a float32 (at least {SMALLEST:.3g}); None or 0 is no cap"
        )
    return cap or None


def validate_batch(
    block_tables: Any,
    seq_lens: Any,
    *,
    num_pages: int,
    page_size: int,
    plan: DecodePlan | None = None,
    window: int | None = None,
    q_len: int = 1,
) -> None:
    """Looks at the values of a batch on the host and says what a kernel could only turn into NaN.

    A debugging aid: it waits for the arrays, and no library function calls it.

    Args:
      block_tables: i32[batch, max_pages_per_seq].
      seq_lens: i32[batch], tokens.
      num_pages: pages of the pool.
      page_size: tokens of a page.
      plan: the plan of the call, whose tree may hold fewer tokens than the table.
      window: the window of the call; pages before that of its first query token are not live.
      q_len: query tokens of a sequence in the call.

    Raises:
      ValueError: the first row with a length outside the table or a live page id outside the pool, naming both; or a
        page_size that is not the plan's.
    """
    page_size, q_len = whole_number("page_size", page_size), whole_number("q_len", q_len)
    if plan is not None:
        require_plan(plan)
        if page_size != plan.page_size:
            raise ValueError(f"page_size={page_size} must be the plan's, {plan.page_size}")
    if window is not None:
        window = whole_number("window", window)
    whole_number("num_pages", num_pages)
    tables = np.asarray(as_array("block_tables", block_tables))
    batch = tables.shape[0] if tables.ndim else 0
    table_arguments(block_tables, seq_lens, batch=batch, page_size=page_size)
    capacity = min(tables.shape[1] * page_size, MAX_TOKENS if plan is None else plan.max_tokens)
    for row, seq_len in enumerate(np.asarray(seq_lens)):
        if not 0 <= seq_len <= capacity:
            raise ValueError(f"seq_lens[{row}]={seq_len} is outside [0, {capacity}], what its table and plan can hold")
        first = 0 if window is None else max(int(seq_len) - (q_len - 1) - window, 0) // page_size
        live = tables[row, first : -(-int(seq_len) // page_size)]
        bad = np.flatnonzero((live < 0) | (live >= num_pages))
        if bad.size:
            raise ValueError(
                f"block_tables[{row}, {first + bad[0]}]={live[bad[0]]} is live (seq_lens[{row}]={seq_len}) and outside"
                f" [0, {num_pages}), the pages of the pool"
            )


def on_hopper() -> bool:
    """Whether JAX's first device is one that the mosaic kernels are for."""
    return getattr(jax.devices()[0], "compute_capability", None) == "9.0"


def require_served_by_mosaic(
    plan: DecodePlan,
    q: jax.Array,
    scales: tuple[jax.Array | None, jax.Array | None],
    *,
    elsewhere: bool,
    runs: bool,
) -> None:
    """Refuses by name what the mosaic backend does not serve, and a process that cannot run it.

    Args:
      plan, q: of the call.
      scales: k_scale and v_scale, as `kv_scale` returns them.
      elsewhere: whether the plan is ahead of time, or only looked at: no device is asked for then, unless it runs.
      runs: whether the call runs here and now, on arrays: for another machine it can only be traced and lowered.

    Raises:
      NotImplementedError: naming what was asked for and the backend that serves it.
    """
    q_len = q.shape[1] if q.ndim == 4 else 1
    plan.require_query_tokens(q_len, batch=q.shape[0])
    plan.packed(q_len).with_token_scales(sum(scale is not None and scale.ndim == 3 for scale in scales))
    if jax.__version_info__ < MOSAIC_JAX:
        wanted = ".".join(map(str, MOSAIC_JAX))
        raise NotImplementedError(
            f"jax {jax.__version__}: the mosaic backend needs JAX {wanted} or newer; {USE_REFERENCE}"
        )
    if elsewhere and not runs:
        return
    if not on_hopper():
        device = jax.devices()[0]
        or_elsewhere = (
            LOWER_ELSEWHERE
            if plan.policy.ahead_of_time
            else "say load_policy(..., ahead_of_time=True) to lower for another machine"
        )
        raise NotImplementedError(
            f"device {device.device_kind!r}: the mosaic backend needs an sm_90 GPU as JAX's first device;"
            f" {USE_REFERENCE}, or {or_elsewhere}"
        )
