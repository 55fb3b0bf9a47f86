"""A model of `bench.inferena` in one framework: python -m bench.peers.inferena NAME FILE.

FILE is a model that smallmind saved. Reads commands from stdin and answers each with a line:
`{"turn": "forward"}`, "forward and backward" or "one token" -> seconds; `{"outputs": true}` -> what
the table compares, the seconds until the model was ready, and bytes of memory.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from smallmind import ModelConfig, TransformerModel
from smallmind.files import safetensors
from smallmind.kernels.timing import Contestant, serve, turn
from smallmind.memory.tracker import peak_resident_bytes

T = 128
IDS = np.arange(T)[None]
TARGETS = IDS + 1
ONE = np.zeros((1, 1), np.int64)

# ids -> logits; ids, targets -> the loss; and what forgets the gradients.
Framework = tuple[Callable[[Any], Any], Callable[[Any, Any], Any], Callable[[], object]]


def _ours(path: str) -> Framework:
    model = TransformerModel.load(path)
    return model.forward, model.loss_and_gradients, model.zero_gradients


def _torch(path: str, compiled: bool) -> Framework:
    import torch

    from smallmind.bench.peers import torch_llama, torch_step

    tensors, metadata = safetensors.read(path)
    built = torch_llama.Model(ModelConfig(**json.loads(metadata["config"])))
    torch_step.load(built, tensors)
    model = torch.compile(built) if compiled else built

    def forward(ids: np.ndarray) -> np.ndarray:
        with torch.set_grad_enabled(ids.size > 1):  # as the table has it
            return model(torch.from_numpy(ids)).detach().numpy()

    def train(ids: np.ndarray, targets: np.ndarray) -> None:
        model(torch.from_numpy(ids), torch.from_numpy(targets)).backward()

    return forward, train, built.zero_grad


def main() -> None:
    name, path = sys.argv[1:]
    forward, train, clear = _ours(path) if name == "ours" else _torch(path, name != "torch")
    start = time.perf_counter()
    forward(IDS)
    train(IDS, TARGETS)
    ready = time.perf_counter() - start
    contestants = {
        "forward": Contestant(lambda: forward(IDS)),
        "forward and backward": Contestant(lambda: train(IDS, TARGETS), clear),
        "one token": Contestant(lambda: forward(ONE)),
    }

    def outputs(_: object) -> dict[str, Any]:
        peak_bytes = peak_resident_bytes()  # before what is computed here
        logits = np.ascontiguousarray(forward(IDS)[0], np.float32)
        wide = logits.astype(np.float64)
        wide -= wide.max(axis=1, keepdims=True)
        losses = np.log(np.exp(wide).sum(axis=1)) - wide[np.arange(T), TARGETS[0]]
        return {
            "compile_s": ready,
            "logits_hash": "sha256:" + hashlib.sha256(logits.tobytes()).hexdigest(),
            "logits_sample": [round(float(x), 6) for x in logits[0, :16]],
            "loss": round(float(losses.mean()), 6),
            "peak_bytes": peak_bytes,
        }

    serve(turn=lambda name: turn(contestants[name], least=2), outputs=outputs)


if __name__ == "__main__":
    main()
