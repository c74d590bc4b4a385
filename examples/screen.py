"""Shows rows of text as they grow: panels on a terminal, a line now and then in a log."""

from collections.abc import Callable
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

LOG_EVERY = 16  # steps
PROMPT_SHOWN = 100  # characters


class Screen:
    """A context manager that is told the tokens of every row after each step.

    Args:
      console: where to show them.
      prompts: text of each row's prompt.
      decode_text: makes text of token ids.
      max_steps: steps that the run may take.
    """

    def __init__(
        self, console: Console, prompts: dict[int, str], decode_text: Callable[[list[int]], str], max_steps: int
    ):
        self.console = console
        self.prompts = prompts
        self.decode_text = decode_text
        self.max_steps = max_steps
        self.tokens: dict[int, list[int]] = {row: [] for row in prompts}
        # Not console.is_terminal: FORCE_COLOR, common in CI, makes that true of a log file.
        self.live = Live(console=console, auto_refresh=False) if console.file.isatty() else None

    def __enter__(self) -> Self:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        finished = Group(*self._panels(decoding=[]))
        if self.live:
            self.live.update(finished)
            self.live.stop()
        else:
            self.console.print(finished)

    def step(self, tokens: dict[int, list[int]], decoding: list[int], step: int, rate: float | None) -> None:
        """Shows what a step added.

        Args:
          tokens: tokens of each row so far.
          decoding: rows that got one in this step.
          step: count of steps so far.
          rate: tokens per second, None before it is known.
        """
        self.tokens = tokens
        progress = (
            f"step {step} of at most {self.max_steps}, decoding {len(decoding)} of {len(self.prompts)} rows, "
            f"{'compiling' if rate is None else f'{rate:.1f} tokens/s'}"
        )
        if self.live:
            self.live.update(Group(*self._panels(decoding), Text(progress)), refresh=True)
        elif step % LOG_EVERY == 1:
            self.console.print(progress)

    def _panels(self, decoding: list[int]) -> list[Panel]:
        panels = []
        for row, prompt in self.prompts.items():
            prompt = " ".join(prompt.split())
            text = Text(prompt if len(prompt) <= PROMPT_SHOWN else f"{prompt[:PROMPT_SHOWN]}...", style="dim")
            text.append(f"\n{self.decode_text(self.tokens[row]).strip()}", style="not dim")
            state = "decoding" if row in decoding else "done"
            title = f"row {row}, {len(self.tokens[row])} tokens, {state}"
            panels.append(Panel(text, title=title, title_align="left"))
        return panels
