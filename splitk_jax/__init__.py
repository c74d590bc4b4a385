"""Paged split-K decode attention for JAX: target -> policy -> plan -> split -> combine -> attention."""

from importlib import metadata

from splitk_jax import testing
from splitk_jax.attention import paged_decode_attention
from splitk_jax.checks import validate_batch
from splitk_jax.inspection import Call, Inspection, inspect
from splitk_jax.kernels.partials import SplitPartials
from splitk_jax.merge import merge_states
from splitk_jax.pages import KVPages, OutOfPages, PageAllocator
from splitk_jax.plan import DecodePlan
from splitk_jax.policy import (
    MAX_DECODE_SPLITS,
    SPLITK_TARGET_WAVES,
    Policy,
    adaptive_splits,
    auto_splits,
    balanced_splits,
    fixed_size_splits,
    legacy_splits,
    load_policy,
    num_splits,
    policy_from_env,
    resolve_policy,
    split_ref_seqs,
    workspace_slots,
)
from splitk_jax.target import ConfigError, Target, Tile, load_target, parse_splits

__version__ = metadata.version("splitk_jax")

__all__ = [
    "ConfigError",
    "Target",
    "Tile",
    "load_target",
    "parse_splits",
    "MAX_DECODE_SPLITS",
    "SPLITK_TARGET_WAVES",
    "Policy",
    "adaptive_splits",
    "auto_splits",
    "balanced_splits",
    "fixed_size_splits",
    "legacy_splits",
    "load_policy",
    "num_splits",
    "policy_from_env",
    "resolve_policy",
    "split_ref_seqs",
    "workspace_slots",
    "DecodePlan",
    "SplitPartials",
    "paged_decode_attention",
    "merge_states",
    "KVPages",
    "OutOfPages",
    "PageAllocator",
    "validate_batch",
    "Call",
    "Inspection",
    "inspect",
    "testing",
]
