"""`python -m splitk_jax` is `splitk-jax`."""

from splitk_jax.cli import main

main(prog_name="splitk-jax")
