"""Split policies: how many KV splits a launch uses, as a frozen value and pure functions of configuration.

A policy is a target's declaration with the environment and keyword arguments laid over it. Nothing here reads a
sequence length, and the static batch is read by the two rules that say so, `legacy` and `adaptive`.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from splitk_jax import report
from splitk_jax.target import (
    OVERRIDES,
    ConfigError,
    Environment,
    Target,
    Tile,
    check_override,
    load_target,
    read_environment,
    target_for_device,
    whole_number,
)

if TYPE_CHECKING:
    from splitk_jax.plan import DecodePlan

MAX_DECODE_SPLITS = 64
"""`max_splits` of a target that states none: the ceiling of every rule but `fixed_size`."""

SPLITK_TARGET_WAVES = 2
"""`target_waves` of a target that states none."""

DEFAULT_MIN_KV_PER_SPLIT = 256
"""Tokens; `min_kv_per_split` of a target that states none."""

DEFAULT_SPLIT_SIZE = 512
"""Tokens; `split_size` of a target that states none."""

INSPECTING: ContextVar[bool] = ContextVar("INSPECTING", default=False)
"""Set by `inspect` while it traces: every plan counts as ahead of time, and no device is compared."""

_DEFAULTS = {
    "split_size": (DEFAULT_SPLIT_SIZE, "default DEFAULT_SPLIT_SIZE"),
    "target_waves": (SPLITK_TARGET_WAVES, "default SPLITK_TARGET_WAVES"),
    "max_splits": (MAX_DECODE_SPLITS, "default MAX_DECODE_SPLITS"),
    "min_kv_per_split": (DEFAULT_MIN_KV_PER_SPLIT, "default DEFAULT_MIN_KV_PER_SPLIT"),
}


def ceil_div(a: Any, b: Any) -> Any:
    """`ceil(a / b)` of ints or integer arrays, without the overflow of `a + b - 1`."""
    return -(-a // b)


def auto_splits(
    sm_count: int, ctas: int, *, target_waves: int = SPLITK_TARGET_WAVES, max_splits: int = MAX_DECODE_SPLITS
) -> int:
    """Splits that give one sequence `target_waves` waves of CTAs: the single stream is the shape that starves.

    Args:
      sm_count: SMs of the target.
      ctas: CTAs that one sequence launches at one split.
      target_waves: waves to fill.
      max_splits: the ceiling.

    Returns:
      `clamp(ceil(target_waves * sm_count / ctas), 1, max_splits)`.
    """
    sm_count, ctas = whole_number("sm_count", sm_count), whole_number("ctas", ctas)
    target_waves, max_splits = whole_number("target_waves", target_waves), whole_number("max_splits", max_splits)
    return min(ceil_div(target_waves * sm_count, ctas), max_splits)


def balanced_splits(
    sm_count: int, ctas: int, *, target_waves: int = SPLITK_TARGET_WAVES, max_splits: int = MAX_DECODE_SPLITS
) -> int:
    """Splits that the SMs share evenly: as many sequences' worth of CTAs as fit the target, a whole number for each.

    `auto` rounds up, so that 33 splits of 8 CTAs meet 132 SMs; a persistent launch runs 16 whole teams of 8 there, and
    one of them would compute three splits where the others compute two.

    Args:
      sm_count: SMs of the target.
      ctas: CTAs that one sequence launches at one split.
      target_waves: splits of each team.
      max_splits: the ceiling.

    Returns:
      `clamp(target_waves * max(sm_count // ctas, 1), 1, max_splits)`.
    """
    sm_count, ctas = whole_number("sm_count", sm_count), whole_number("ctas", ctas)
    target_waves, max_splits = whole_number("target_waves", target_waves), whole_number("max_splits", max_splits)
    return min(target_waves * max(sm_count // ctas, 1), max_splits)


def split_ref_seqs(num_seqs: int, max_decode_seqs: int) -> int:
    """The sequence count that `legacy` sizes for: the larger of the live count and the row capacity."""
    return max(whole_number("num_seqs", num_seqs), whole_number("max_decode_seqs", max_decode_seqs))


def legacy_splits(sm_count: int, num_q_heads: int, ref_seqs: int) -> int:
    """The old rule, kept for targets that declare it: one wave of `num_q_heads * ref_seqs` CTAs, or one split."""
    ctas = whole_number("num_q_heads", num_q_heads) * whole_number("ref_seqs", ref_seqs)
    return max(whole_number("sm_count", sm_count) // ctas, 1)


def adaptive_splits(
    target_ctas: int, num_seqs: int, ctas: int, *, max_splits: int, max_seq_len: int, min_kv_per_split: int
) -> int:
    """Splits that bring a batch bucket to `target_ctas` CTAs, no split under `min_kv_per_split` tokens.

    Args:
      target_ctas: CTAs to launch.
      num_seqs: static batch of the trace.
      ctas: CTAs that one sequence launches at one split.
      max_splits: the ceiling.
      max_seq_len: tokens; the static KV length (top-k, or table width * page_size).
      min_kv_per_split: tokens.
    """
    batch_ctas = whole_number("num_seqs", num_seqs) * whole_number("ctas", ctas)
    by_length = whole_number("max_seq_len", max_seq_len) // whole_number("min_kv_per_split", min_kv_per_split)
    wanted = ceil_div(whole_number("target_ctas", target_ctas), batch_ctas)
    return max(min(wanted, whole_number("max_splits", max_splits), by_length), 1)


def fixed_size_splits(max_seq_len: int, split_size: int) -> int:
    """Splits of `split_size` tokens that the longest sequence can have."""
    return ceil_div(whole_number("max_seq_len", max_seq_len), whole_number("split_size", split_size))


def workspace_slots(num_splits: int, num_q_heads: int, max_decode_seqs: int) -> int:
    """Slots of `[o[head_dim], m, l]` that the partials of one launch need; none when nothing is split."""
    slots = whole_number("max_decode_seqs", max_decode_seqs) * whole_number("num_q_heads", num_q_heads)
    return slots * num_splits if whole_number("num_splits", num_splits) > 1 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How split counts are decided, with every number that the rule reads.

    Attributes:
      splits: `auto`, `balanced`, `legacy`, `adaptive`, `fixed_size`, or a pinned count.
      sm_count: SMs of the target; read by `auto`, `balanced` and `legacy`.
      split_size: tokens; read by `fixed_size`.
      target_waves: waves of CTAs; read by `auto` and `balanced`.
      target_ctas: CTAs; read by `adaptive`. `sm_count` when None.
      max_splits: the ceiling of every rule but `fixed_size`, whose count `max_seq_len` bounds.
      min_kv_per_split: tokens; a shorter sequence uses fewer splits.
      backend: the kernels that serve the plan.
      tiles: tile rows, the first that holds is used.
      target: the hardware, for reports; takes no part in equality.
      origins: (key, where its value came from); takes no part in equality.
      ahead_of_time: the plan is for another machine than this one: its device is not compared.
      log_plans: a plan of this policy is logged when it is first traced (`SPLITK_JAX_LOG=plan`).

    Raises:
      ValueError, TypeError: a field that is not accepted, naming it, what was got and what is accepted.
    """

    splits: str | int = "auto"
    sm_count: int
    split_size: int = DEFAULT_SPLIT_SIZE
    target_waves: int = SPLITK_TARGET_WAVES
    target_ctas: int | None = None
    max_splits: int = MAX_DECODE_SPLITS
    min_kv_per_split: int = DEFAULT_MIN_KV_PER_SPLIT
    backend: str = "reference"
    tiles: tuple[Tile, ...] = (Tile(heads_per_cta=16, block_kv=64, step_kv=256),)
    target: Target | None = field(default=None, compare=False, repr=False)
    origins: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)
    ahead_of_time: bool = field(default=False, compare=False, repr=False)
    log_plans: bool = field(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sm_count", whole_number("sm_count", self.sm_count, 1, 4096))
        if self.target_ctas is None:
            object.__setattr__(self, "target_ctas", self.sm_count)
        for key in OVERRIDES:
            object.__setattr__(self, key, check_override(key, getattr(self, key)))
        if type(self.tiles) is not tuple or not self.tiles or not all(isinstance(t, Tile) for t in self.tiles):
            raise TypeError(f"tiles={self.tiles!r} must be a tuple of at least one Tile")
        for tile in self.tiles:
            for key in ("min_kv_per_split", *(("split_size",) if self.splits == "fixed_size" else ())):
                if getattr(self, key) % tile.block_kv:
                    origin = dict(self.origins).get(key, "argument of Policy")
                    raise ConfigError(
                        f"{key}={getattr(self, key)} ({origin}) is not valid: accepted is a multiple of the tile's"
                        f" block_kv={tile.block_kv}, on which split edges lie"
                    )

    @property
    def rule(self) -> str:
        """The rule's name: `splits`, or `pinned` when it is a count."""
        return self.splits if isinstance(self.splits, str) else "pinned"

    def tile(self, head_dim: int, kv_dtype: str, page_size: int) -> Tile:
        """The first tile row whose conditions hold.

        Raises:
          NotImplementedError: no row holds.
        """
        for tile in self.tiles:
            wanted = ((tile.head_dim, head_dim), (tile.kv_dtype, kv_dtype), (tile.page_size, page_size))
            if all(condition in (None, got) for condition, got in wanted):
                return tile
        raise NotImplementedError(
            f"head_dim={head_dim}, kv_dtype={kv_dtype}, page_size={page_size} meet the conditions of no [[kernel.tile]]"
            f" row of {self.target.source if self.target else 'this policy'}: add a row, or one without conditions"
        )

    def plan(self, **shape: Any) -> "DecodePlan":
        """Applies the policy to a model's static shape; the arguments are those of `DecodePlan.make`."""
        from splitk_jax.plan import DecodePlan  # plan.py imports this module: it is the next step of the data path

        return DecodePlan.make(self, **shape)

    def settings(self) -> list[tuple[str, Any, str]]:
        """Every setting as (key, value, origin)."""
        origins = dict(self.origins)
        return [
            (f.name, getattr(self, f.name), origins.get(f.name, "argument of Policy"))
            for f in fields(self)
            if f.compare and f.name != "tiles"
        ]

    def describe(self) -> str:
        """Every setting with its origin, as a table."""
        return report.render(report.table("policy", ("key", "value", "origin"), self.settings(), left=3))


def num_splits(
    policy: Policy,
    *,
    ctas: int,
    num_q_heads: int,
    num_seqs: int,
    max_decode_seqs: int,
    max_seq_len: int | None = None,
) -> int:
    """Applies a policy's rule.

    Args:
      policy: the rule and its numbers.
      ctas: CTAs that one sequence launches at one split; read by `auto`, `balanced` and `adaptive`.
      num_q_heads: query heads; read by `legacy`.
      num_seqs: static batch of the trace; read by `legacy` and `adaptive` only.
      max_decode_seqs: row capacity; read by `legacy`.
      max_seq_len: tokens; the longest KV a launch can attend to; needed by `adaptive` and `fixed_size`.

    Returns:
      The split count, at least 1.

    Raises:
      ValueError, TypeError: an argument that is not a count of at least 1, or a missing `max_seq_len`.
    """
    whole_number("ctas", ctas)
    ref_seqs = split_ref_seqs(num_seqs, max_decode_seqs)
    whole_number("num_q_heads", num_q_heads)
    if policy.splits == "auto":
        return auto_splits(policy.sm_count, ctas, target_waves=policy.target_waves, max_splits=policy.max_splits)
    if policy.splits == "balanced":
        return balanced_splits(policy.sm_count, ctas, target_waves=policy.target_waves, max_splits=policy.max_splits)
    if policy.splits == "legacy":
        return min(legacy_splits(policy.sm_count, num_q_heads, ref_seqs), policy.max_splits)
    if isinstance(policy.splits, int):
        return min(policy.splits, policy.max_splits)
    if max_seq_len is None:
        raise ValueError(
            f"max_seq_len=None: the {policy.splits} rule needs the longest KV a launch can attend to, in tokens"
            " (block-table width * page_size); give max_seq_len (--max-seq-len)"
        )
    if policy.splits == "adaptive":
        assert policy.target_ctas is not None  # set in __post_init__
        return adaptive_splits(
            policy.target_ctas,
            num_seqs,
            ctas,
            max_splits=policy.max_splits,
            max_seq_len=max_seq_len,
            min_kv_per_split=policy.min_kv_per_split,
        )
    return fixed_size_splits(max_seq_len, policy.split_size)


def policy_from_env() -> str | int | None:
    """The split rule that the environment asks for (`SPLITK_JAX_SPLITS` or its alias), None when it asks for none."""
    override = read_environment().overrides.get("splits")
    return None if override is None else override[0]


def resolve_policy(
    target: Target, *, environ: Mapping[str, str] | None = None, ahead_of_time: bool = False, **overrides: Any
) -> Policy:
    """Lays the environment and keyword arguments over a target's declaration.

    Args:
      target: the declaration.
      environ: the variables to read; `os.environ` when None.
      ahead_of_time: see `load_policy`.
      **overrides: TOML key names of `[policy]` and `backend`; they go before the environment.

    Returns:
      A policy each of whose settings knows its origin.

    Raises:
      ConfigError: an unknown key or variable, or a value that is not accepted.
    """
    if not isinstance(target, Target):
        raise TypeError(f"target={target!r} must be a Target (load_target(name)), got {type(target).__name__}")
    return _resolve(target, read_environment(environ), ahead_of_time, overrides)


def _resolve(target: Target, environment: Environment, ahead_of_time: bool, overrides: dict[str, Any]) -> Policy:
    values: dict[str, tuple[Any, str]] = dict(_DEFAULTS)
    values["target_ctas"] = (target.sm_count, "default: sm_count")
    origins = dict(target.origins)
    values |= {key: (value, origins[key]) for key, value in target.settings}
    values |= {
        key: (value, f"environment variable {variable}") for key, (value, variable) in environment.overrides.items()
    }
    values |= {key: (check_override(key, value), f"argument {key}") for key, value in overrides.items()}
    return Policy(
        sm_count=target.sm_count,
        tiles=target.tiles,
        target=target,
        ahead_of_time=ahead_of_time,
        log_plans=environment.log_plans,
        origins=(("sm_count", origins["sm_count"]), *((key, origin) for key, (_, origin) in values.items())),
        **{key: value for key, (value, _) in values.items()},
    )


def load_policy(
    target: str | None = None,
    *,
    ahead_of_time: bool = False,
    environ: Mapping[str, str] | None = None,
    **overrides: Any,
) -> Policy:
    """Loads a policy: by name, by path, or for the first JAX device.

    A name or a path leaves JAX's backends unstarted. The environment is read here, once: a later change of it takes
    effect with the next call, never inside a compiled function.

    Args:
      target: a target's name (`h200`) or the path of a TOML. None: `SPLITK_JAX_TARGET`, else the target that
        answers to the first JAX device's `device_kind`.
      ahead_of_time: the target is another machine than this one, so that its `sm_count` is not compared with the
        device's.
      environ: the variables to read; `os.environ` when None.
      **overrides: TOML key names of `[policy]` and `backend` (`splits=3, min_kv_per_split=16`); they go before the
        environment, which goes before the file.

    Returns:
      The policy.

    Raises:
      ConfigError: an unknown target, device, key or variable, or a value that is not accepted; names what is.
    """
    environment = read_environment(environ)
    if target is not None and not isinstance(target, str):
        raise TypeError(f"target={target!r} must be a target's name or a path as a string, or None")
    name = environment.target if target is None else target
    if name is not None:
        found = load_target(name, config_dir=environment.config_dir)
    else:
        import jax  # only this branch needs a device, and a device starts JAX's backends

        device = jax.devices()[0]
        found = target_for_device(device.device_kind, config_dir=environment.config_dir)
        if not (ahead_of_time or INSPECTING.get()):
            check_sm_count(found.sm_count, found.source, device)
    return _resolve(found, environment, ahead_of_time, overrides)


def check_sm_count(sm_count: int, source: str, device: Any) -> None:
    """Compares a declared SM count with a GPU's own: a MIG slice or a wrong file would size every launch wrongly.

    Args:
      sm_count: the declared count.
      source: where it was declared.
      device: a `jax.Device`; one that is not a GPU or counts no cores is not compared.

    Raises:
      ConfigError: the counts differ.
    """
    cores = getattr(device, "core_count", None)
    if device.platform == "gpu" and cores and cores != sm_count:
        raise ConfigError(
            f"sm_count={sm_count} of {source} is not this device's: {device.device_kind} has {cores} (a MIG slice, or"
            " another part). Name a target with that count, or say ahead_of_time=True if it is for another machine"
        )
