"""Times the reference backend on a CPU against a plain jitted gather and softmax, in one run.

    python docs/benchmarks/reference_cpu.py

Batch 4, context 2048, page 16. Prints a Markdown table of medians; ratios are what to read, the machine is yours.
"""

import platform
import statistics
import time
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np

import splitk_jax as sk
from splitk_jax import peers

BATCH, CONTEXT, PAGE_SIZE = 4, 2048, 16
SHAPES = [(32, 8, 128), (32, 4, 128), (32, 1, 128), (8, 8, 128), (24, 4, 256), (9, 3, 64)]

gather_softmax = jax.jit(peers.gather_softmax)


def milliseconds(f, calls=10):
    f().block_until_ready()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        f().block_until_ready()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def main():
    rng = np.random.default_rng(0)
    width = CONTEXT // PAGE_SIZE
    num_pages = BATCH * width + 8
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("splitk_jax", "jax", "jaxlib"))
    print(f"Python {platform.python_version()}, {versions}, {jax.devices()[0].device_kind}\n")
    print("| dtype | heads q/kv | head dim | plain ms | reference ms | reference / plain |\n|---|---|---|---|---|---|")
    for dtype in ("float32", "bfloat16"):
        for num_q_heads, num_kv_heads, head_dim in SHAPES:
            plan = sk.load_policy("cpu", environ={}).plan(
                num_q_heads=num_q_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                page_size=PAGE_SIZE,
                max_decode_seqs=BATCH,
                q_dtype=dtype,
                kv_dtype=dtype,
            )
            pool = (num_pages, PAGE_SIZE, num_kv_heads, head_dim)
            args = [
                *(jnp.asarray(rng.standard_normal(s), dtype) for s in ((BATCH, num_q_heads, head_dim), pool, pool)),
                jnp.asarray(rng.permutation(num_pages)[: BATCH * width].reshape(BATCH, width), "int32"),
                jnp.full((BATCH,), CONTEXT, "int32"),
            ]
            expected = gather_softmax(*args).astype("float32")
            error = jnp.abs(sk.paged_decode_attention(*args, plan=plan).astype("float32") - expected).max()
            assert error < (1e-5 if dtype == "float32" else 2e-2), error
            # Alternated, so that a slow moment of the machine falls on both.
            pairs = [
                (
                    milliseconds(lambda args=args: gather_softmax(*args)),
                    milliseconds(lambda args=args, plan=plan: sk.paged_decode_attention(*args, plan=plan)),
                )
                for _ in range(5)
            ]
            plain, ours = sorted(pairs, key=lambda pair: pair[1] / pair[0])[2]
            cells = (
                dtype,
                f"{num_q_heads}/{num_kv_heads}",
                head_dim,
                f"{plain:.2f}",
                f"{ours:.2f}",
                f"{ours / plain:.2f}",
            )
            print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
