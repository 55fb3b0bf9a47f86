"""python -m bench step: the time of a training step, beside the arithmetic that it does."""

import argparse
import statistics
import time

import numpy as np

import smallmind


def run(options: argparse.Namespace, machine: dict[str, object]) -> list[dict[str, object]]:
    """Measures and prints; returns the record. Units: seconds, floating-point operations."""
    B, T = options.batch_size, options.block_size
    model = smallmind.TransformerModel(
        options.vocab_size, T, options.n_embd, options.n_layer, options.n_head
    )
    optimizer = smallmind.AdamW(model)
    data = np.random.default_rng(0).integers(0, options.vocab_size, (B, T + 1))

    def one_step() -> float:
        model.loss_and_gradients(data[:, :-1], data[:, 1:])
        return optimizer.step(max_grad_norm=1.0)

    print("  ".join(f"{name} {value}" for name, value in machine.items()))
    for _ in range(10):
        one_step()
    seconds = []
    for _ in range(options.repeat):
        start = time.perf_counter()
        one_step()
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    # 6 a parameter and token, and attention's two products over the causal half, three times.
    flops = 6 * model.flat.count * B * T + 6 * options.n_layer * options.n_embd * T * B * T
    print(
        f"B {B}  T {T}  {options.n_layer} x {options.n_embd}  {options.n_head} heads: "
        f"median {median * 1e3:.2f} ms  least {min(seconds) * 1e3:.2f} ms  "
        f"{B * T / median:,.0f} tokens/s  {flops / median / 1e9:.0f} GFLOP/s"
    )
    sizes = {name: getattr(options, name) for name in ("n_embd", "n_layer", "n_head")}
    return [{"B": B, "T": T, **sizes, "seconds": median, "least": min(seconds), "flops": flops}]
