"""Times one tree of smallmind, which may be an older one: python -m bench.peers.tree.

Everything is called by names that all trees have. Reads commands from stdin and answers each with
a line: `{"build": [kind, ...]}` -> null, or why this tree cannot; then `{"turn": seconds}` -> the
seconds of the fastest call; `{"limit": bytes}` -> bytes copied per second, or with null operations
of multiply-adds.
"""

import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import smallmind

PAGE = 4096  # bytes
ALPHABET = "".join(map(chr, range(ord("0"), ord("0") + 65)))  # 65, as in Shakespeare
Shape = tuple[int, ...]
# This tree has it; the one that is timed may have none, or another one.
TIMING = runpy.run_path(str(Path(__file__).parents[2] / "smallmind" / "kernels" / "timing.py"))
Contestant, serve, turn = (TIMING[name] for name in ("Contestant", "serve", "turn"))


def _numbers(shape: Shape, offset: int = 0) -> np.ndarray:
    """Normal numbers that begin so many bytes after a page, in every tree alike."""
    values = np.random.default_rng(len(shape)).standard_normal(shape, np.float32)
    raw = np.empty(values.nbytes + 2 * PAGE, np.uint8)
    start = -raw.ctypes.data % PAGE + offset
    array = raw[start : start + values.nbytes].view(np.float32).reshape(shape)
    array[...] = values
    return array


def _product(name: str, a: Shape, b: Shape, out: Shape, offset: int) -> Callable[[], object]:
    return partial(getattr(smallmind, name), *(_numbers(tuple(x), offset) for x in (a, b, out)))


def _attention(direction: str, B: int, H: int, T: int, D: int) -> Callable[[], object]:
    from smallmind.kernels import compiled

    C = H * D
    qkv, dqkv = _numbers((B * T, 3 * C)), _numbers((B * T, 3 * C))
    out, dout, logsumexp = _numbers((B * T, C)), _numbers((B * T, C)), _numbers((B, H, T))
    forward = partial(compiled.attention, out, logsumexp, qkv)
    forward()
    backward = partial(compiled.attention_backward, dqkv, dout, out, logsumexp, qkv)
    return forward if direction == "forward" else backward


def _model(T: int, C: int, layers: int, heads: int, precision: str) -> Any:
    model = smallmind.TransformerModel(len(ALPHABET), T, C, layers, heads, tie_weights=True)
    if precision != "float32":  # the first trees had no other
        model.use_precision(smallmind.Precision(precision))
    return model


def _step(B: int, T: int, *sizes: Any) -> Callable[[], object]:
    model = _model(T, *sizes)
    optimizer = smallmind.AdamW(model)
    windows = np.random.default_rng(0).integers(0, len(ALPHABET), (B, T + 1)).astype(np.int32)

    def step() -> None:
        model.loss_and_gradients(windows[:, :-1], windows[:, 1:])
        optimizer.step(max_grad_norm=1.0)

    return step


def _generation(prompt: int, tokens: int, *sizes: Any) -> Callable[[], object]:
    text = (ALPHABET * prompt)[:prompt]
    model, tokenizer = _model(*sizes), smallmind.Tokenizer(ALPHABET)
    return partial(smallmind.generate, model, tokenizer, text, max_tokens=tokens, temperature=0.0)


KINDS: dict[str, Callable[..., Callable[[], object]]] = {
    "product": _product,
    "attention": _attention,
    "step": _step,
    "generation": _generation,
}


def _limit(nbytes: int | None) -> float:
    """This bench knows the vectors of its own tree alone."""
    from smallmind.bench import ceilings

    return ceilings.copy_rate(nbytes) if nbytes else ceilings.multiply_add_rate()


def main() -> None:
    built: list[Any] = []  # the last one

    def build(kind_and_sizes: list[Any]) -> str | None:
        kind, *sizes = kind_and_sizes
        built.clear()
        try:
            contestant = Contestant(KINDS[kind](*sizes))
            contestant.run()  # compiles
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
        built.append(contestant)
        return None

    serve(build=build, turn=lambda length: min(turn(built[0], length, least=2)), limit=_limit)


if __name__ == "__main__":
    main()
