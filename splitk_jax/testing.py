"""For tests of programs that use the library."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from splitk_jax import marks
from splitk_jax.plan import DecodePlan


@dataclass(slots=True)
class Traces:
    """Decode calls that were traced.

    Attributes:
      plans: the plan of each, in order.
    """

    plans: list[DecodePlan] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many."""
        return len(self.plans)


@contextmanager
def count_traces() -> Generator[Traces]:
    """Counts the decode calls that are traced inside: a compiled step that is called again traces none.

    A call outside `jit` is no trace. A function with several decode calls counts each whenever it is traced.
    """
    traces = Traces()
    marks.OBSERVERS.append(traces.plans.append)
    try:
        yield traces
    finally:
        marks.OBSERVERS.remove(traces.plans.append)
