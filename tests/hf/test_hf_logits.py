"""The example against Hugging Face transformers reading the same GGUF file in float32: `make test-hf`."""

import jax.numpy as jnp
import numpy as np
import pytest

for module in ("torch", "transformers", "accelerate", "flax", "gguf", "jinja2", "tokenizers"):
    pytest.importorskip(module, reason="needs the hf and examples extras (make test-hf installs them)")

# After the skips, since these import the modules above.
import decode  # noqa: E402
import smollm2  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from engine import Engine  # noqa: E402

STEPS = 16
# Thirty layers of float32 sums in another order; the logits reach about 40.
TOLERANCE = 1e-3

pytestmark = pytest.mark.hf


@pytest.fixture(scope="module")
def gguf_path():
    try:
        return smollm2.find_gguf()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def example(gguf_path):
    return smollm2.load(gguf_path, jnp.float32)


@pytest.fixture(scope="module")
def hf_tokenizer(gguf_path):
    return transformers.AutoTokenizer.from_pretrained(
        str(gguf_path.parent), gguf_file=gguf_path.name, local_files_only=True
    )


@pytest.mark.parametrize(
    "text",
    [
        *decode.PROMPTS,
        "In 1984 there were 12,345 of them, and  don't   they know\n\n\tx=3.14; -> I'll we've",
        "naïve café, 日本語, Ελληνικά, 🎉👩‍👩‍👧, \u00a0\u200b end ",
        "<|im_start|>system\nA<|im_end|>\n<|endoftext|> <file_sep>",
        "    def f(x):\n        return x ** 2  # comment\r\n",
    ],
    ids=lambda text: ascii(text[:12]),
)
def test_token_ids(example, hf_tokenizer, text):
    _, tokenizer = example
    assert tokenizer.encode(text) == hf_tokenizer(text).input_ids
    messages = [{"role": "user", "content": text}]
    theirs = hf_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert tokenizer.encode_chat(text) == theirs["input_ids"]


def test_logits_of_the_first_steps(example, gguf_path):
    model, tokenizer = example
    prompts = {row: tokenizer.encode_chat(text) for row, text in enumerate(decode.PROMPTS)}
    max_prompt_len = max(map(len, prompts.values()))
    plan = decode.make_plan(
        model.config,
        np.dtype(np.float32),
        target="cpu",
        max_decode_seqs=len(prompts),
        max_seq_len=max_prompt_len + STEPS,
        splits=4,
        min_kv_per_split=16,
    )
    engine = Engine(
        model,
        plan,
        num_slots=len(prompts),
        num_pages=64,
        page_size=decode.PAGE_SIZE,
        max_prompt_len=max_prompt_len,
        max_seq_len=max_prompt_len + STEPS,
    )
    # No end of text: a short answer is as good a comparison after its end.
    run = decode.run_prompts(engine, prompts, max_new_tokens=STEPS, eos_id=-1, keep_logits=True)

    hf_model = transformers.AutoModelForCausalLM.from_pretrained(
        str(gguf_path.parent), gguf_file=gguf_path.name, dtype=torch.float32, local_files_only=True
    )
    largest = 0.0
    for row, prompt in prompts.items():
        text = prompt + run.tokens[row][:-1]
        with torch.no_grad():
            theirs = hf_model(torch.tensor([text])).logits[0, len(prompt) - 1 :].numpy()
        ours = np.stack(run.logits[row])
        assert ours.shape == theirs.shape == (STEPS, model.config.vocab_size)
        largest = np.maximum(largest, np.abs(ours - theirs).max())
        assert theirs.argmax(-1).tolist() == run.tokens[row]
    print(f"largest logit difference over {STEPS} steps of {len(prompts)} rows: {largest:.3g}")  # noqa: T201
    assert largest <= TOLERANCE
