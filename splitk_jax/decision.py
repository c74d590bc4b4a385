"""What stands around a decision: what would change it, what it costs by context, and what to be wary of."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # a plan reports its decision
    from splitk_jax.plan import DecodePlan
    from splitk_jax.policy import Policy

SHAPE = (
    "num_q_heads",
    "num_kv_heads",
    "head_dim",
    "head_dim_v",
    "page_size",
    "max_decode_seqs",
    "q_dtype",
    "kv_dtype",
    "partial_dtype",
    "num_seqs",
    "max_seq_len",
)
"""What a plan was made for."""

# How far the search for another count goes, and the largest ceiling that a policy may have.
MOST_SMS = 1024
MOST_HEADS = 256
MOST_WAVES = 64
MOST_SPLITS = 4096


def changes(plan: "DecodePlan") -> list[dict[str, Any]]:
    """The next values of SM count, KV heads (of the same group), query heads (of the same KV heads) and waves at which
    the split count moves.

    Returns:
      {setting, value, num_splits} each, the nearest below and above; none of a setting that nothing moves with.
    """
    policy, found = plan.policy, []
    settings = (
        ("sm_count", policy.sm_count, 1, MOST_SMS),
        ("num_kv_heads", plan.num_kv_heads, 1, MOST_HEADS),
        ("num_q_heads", plan.num_q_heads, plan.num_kv_heads, MOST_HEADS * plan.num_kv_heads),
        ("target_waves", policy.target_waves, 1, MOST_WAVES),
    )
    for setting, now, step, most in settings:
        for values in (range(now - step, 0, -step), range(now + step, most + 1, step)):
            moved = next(_counts(plan, setting, values), None)
            if moved is not None:
                found.append({"setting": setting, "value": moved[0], "num_splits": moved[1]})
    return found


def _counts(plan: "DecodePlan", setting: str, values: range) -> Iterator[tuple[int, int]]:
    """The values at which the split count is another one, with it."""
    for value in values:
        shape: dict[str, int] = {}
        policy = plan.policy
        if setting == "num_q_heads":
            shape = {"num_q_heads": value}
        elif setting == "num_kv_heads":
            shape = {"num_q_heads": value * plan.group, "num_kv_heads": value}
        elif setting == "sm_count":
            # `target_ctas` is the SM count where nobody stated another.
            own: dict[str, Any] = {} if policy.target_ctas != policy.sm_count else {"target_ctas": value}
            policy = replace(policy, sm_count=value, **own)
        else:
            policy = replace(policy, target_waves=value)
        try:
            count = _count(plan, policy, **shape)
        except (ValueError, NotImplementedError):
            continue  # a group that this backend does not serve
        if count != plan.num_splits:
            yield value, count


def read_us(plan: "DecodePlan", kv_bytes: int, ctas: int) -> float | None:
    """Microseconds that so many CTAs take to read KV at the peak bandwidth, if an SM reads its share of it.

    None where the target's bandwidth is not known. An SM that has the memory to itself can read more than its share; a
    launch also starts, waits for its first bytes, and merges.
    """
    target = plan.policy.target
    if target is None or target.hbm_gb_per_s is None:
        return None
    return kv_bytes / target.hbm_gb_per_s / 1e3 / min(1.0, ctas / plan.policy.sm_count)


def warnings(plan: "DecodePlan") -> list[str]:
    """What about the decision is worth a second look."""
    policy, found = plan.policy, []
    target = policy.target
    if target is not None and policy.sm_count != target.sm_count:
        found.append(
            f"{policy.sm_count} SMs are not the {target.sm_count} of {target.name}: a MIG slice, or another part?"
        )
    elif target is not None and target.whole_sm_count is not None:
        found.append(
            f"{target.name} is a slice of {target.hardware_name}, {target.sm_count} of its {target.whole_sm_count} SMs:"
            " counts hold on that slice only, and times only where hbm_gb_per_s is its own"
        )
    if policy.rule != "fixed_size" and plan.num_splits == policy.max_splits:
        more = _count(plan, replace(policy, max_splits=MOST_SPLITS))
        if more > plan.num_splits:
            found.append(f"max_splits={policy.max_splits} binds: the rule asks for {more} splits")
    active = most_active(plan)
    ctas = active * plan.ctas
    if ctas < policy.sm_count:
        idle = policy.sm_count - ctas
        of_all = f": up to {plan.max_seq_len} tokens use at most {active} of {plan.num_splits} splits"
        why = of_all if active < plan.num_splits else ""
        found.append(f"one sequence fills less than a wave: {ctas} CTAs on {policy.sm_count} SMs, {idle} are idle{why}")
    if not plan.batch_invariant:
        found.append("not batch-invariant: a sequence's bits move with the batch bucket that it is traced for")
    return found


def most_active(plan: "DecodePlan") -> int:
    """The most splits that a sequence uses which is no longer than the plan was made for."""
    longest = plan.max_tokens if plan.max_seq_len is None else min(plan.max_seq_len, plan.max_tokens)
    if plan.split_size is None:
        longest = min(longest, plan.num_splits * plan.min_kv_per_split)
    # Rounding spans up to blocks can cost a longer sequence splits, so the last step up is looked at whole.
    first = max(longest - longest % plan.min_kv_per_split, 1)
    edges = plan.edges(np.append(np.arange(first, longest, plan.block_kv), longest))
    return int((edges.stop - edges.first).max())


def _count(plan: "DecodePlan", policy: "Policy", **changed: int) -> int:
    """The split count of a plan's shape under another policy, or with some of it changed."""
    shape = {name: getattr(plan, name) for name in SHAPE} | changed
    return plan.make(policy, **shape).num_splits
