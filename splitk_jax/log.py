"""`SPLITK_JAX_LOG=plan`: a line for each plan when it is first traced, through `logging`."""

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a policy turns the lines on, and a plan comes after it
    from splitk_jax.plan import DecodePlan

LOGGER = logging.getLogger("splitk_jax.plan")

_asked_for = False
_seen: "set[DecodePlan]" = set()


def show_plans() -> None:
    """Turns the lines on; where nobody has set up logging, to the standard error."""
    global _asked_for
    _asked_for = True
    LOGGER.setLevel(logging.INFO)
    if not LOGGER.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        LOGGER.addHandler(handler)


def traced(plan: "DecodePlan") -> None:
    """Logs a plan once, if that was asked for."""
    if _asked_for and plan not in _seen:
        _seen.add(plan)
        LOGGER.info("%s", line(plan))


def line(plan: "DecodePlan") -> str:
    """Target, policy, splits, launch and origin of a plan, in a line."""
    policy = plan.policy
    target = "no target" if policy.target is None else policy.target.name
    origin = next(origin for key, _, origin in policy.settings() if key == "splits")
    ctas = plan.num_splits * plan.ctas
    return (
        f"{target}: {plan.num_splits} splits by {policy.rule} ({origin}), {ctas} CTAs a sequence,"
        f" {ctas / policy.sm_count:.1f} waves of {policy.sm_count}, {plan.backend}, plan {plan.fingerprint()}"
    )
