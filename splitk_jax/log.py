"""`SPLITK_JAX_LOG=plan`: a line for each plan when it is first traced, through `logging`."""

import logging

from splitk_jax.plan import DecodePlan

LOGGER = logging.getLogger("splitk_jax.plan")

_seen: set[DecodePlan] = set()


def traced(plan: DecodePlan) -> None:
    """Logs a plan once, if its policy was loaded under `SPLITK_JAX_LOG=plan`."""
    if not plan.policy.log_plans or plan in _seen:
        return
    _seen.add(plan)
    # Asked for by name, so whatever level or `disable_existing_loggers` a program has set since.
    record = LOGGER.makeRecord(LOGGER.name, logging.INFO, __file__, 0, line(plan), (), None)
    if LOGGER.hasHandlers():
        LOGGER.callHandlers(record)
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        handler.handle(record)


def line(plan: DecodePlan) -> str:
    """Target, policy, splits, launch and origin of a plan, in a line."""
    policy = plan.policy
    target = "no target" if policy.target is None else policy.target.name
    origin = next(origin for key, _, origin in policy.settings() if key == "splits")
    ctas = plan.num_splits * plan.ctas
    return (
        f"{target}: {plan.num_splits} splits by {policy.rule} ({origin}), {ctas} CTAs with all of them,"
        f" {ctas / policy.sm_count:.1f} waves of {policy.sm_count}, {plan.backend}, plan {plan.fingerprint()}"
    )
