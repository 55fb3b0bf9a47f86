"""Steps of `bench.adapt` in one framework: python -m bench.peers.adapt CASE NAME DIRECTORY WINDOWS.

DIRECTORY has the model in the format of transformers; WINDOWS is how many go through the model at
once, 0: as many as usual. Reads commands from stdin and answers each with a line: `{"step": i}` ->
seconds and loss of a step on batch i; `{"facts": true}` -> bytes of memory, numbers trained.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from smallmind.kernels.timing import serve
from smallmind.memory.tracker import peak_resident_bytes

RATE, WEIGHT_DECAY = 1e-4, 0.01
LORA, CLASSES = "LoRA ", 2


class Case(NamedTuple):
    """A model and what it is trained on."""

    batch: int
    T: int
    rank: int
    contestants: tuple[str, ...]
    classifies: bool = False  # the loss is on the last token, which is one of two


CASES = {
    "smollm2-135m": Case(
        batch=8,
        T=256,
        rank=16,
        contestants=("ours float32", "ours bfloat16", "torch float32", "torch bfloat16"),
    ),
    "smollm2-135m-lora": Case(
        batch=8,
        T=256,
        rank=16,
        contestants=(
            *("ours float32", "ours bfloat16"),  # all weights
            *("ours LoRA float32", "ours LoRA bfloat16", "ours LoRA q8_0"),
            *("torch LoRA float32", "torch LoRA bfloat16"),
        ),
    ),
    "qwen3-0.6b": Case(
        batch=1,
        T=512,
        rank=8,
        contestants=("ours LoRA bfloat16", "ours LoRA q8_0", "torch LoRA bfloat16"),
    ),
    "gpt2-124m": Case(
        batch=8,
        T=120,
        rank=16,
        contestants=("ours LoRA float32", "ours LoRA bfloat16", "torch LoRA float32"),
        classifies=True,
    ),
}
Step = Callable[[np.ndarray, np.ndarray], float]


def _ours(path: Path, kind: str, case: Case, windows: int) -> tuple[Step, int]:
    from smallmind import AdamW, TransformerModel
    from smallmind.exchange.stored import find
    from smallmind.settings.config import Adapter

    found = find(path)
    adapter = Adapter(case.rank, 2.0 * case.rank) if LORA in kind else None
    precision = kind.removeprefix(LORA)
    model = TransformerModel.unfilled(
        found.config, "numba", precision, trains=True, adapter=adapter
    )
    model.flat.write(found.parameters())
    if adapter:
        model.flat.initialise(1, model.flat.kept)
    model.micro_batch_size = windows or None
    optimizer = AdamW(model, RATE, weight_decay=WEIGHT_DECAY)

    def step(ids: np.ndarray, targets: np.ndarray) -> float:
        weights = None
        if case.classifies:
            weights = np.zeros(targets.shape, np.float32)
            weights[:, -1] = 1
        loss = model.loss_and_gradients(ids, targets, weights=weights)
        optimizer.step()
        return loss

    return step, sum(spec.size for spec in model.flat.trained)


def _torch(path: Path, kind: str, case: Case, windows: int) -> tuple[Step, int]:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    dtype = getattr(torch, kind.removeprefix(LORA))
    if case.classifies:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            path, dtype=dtype, num_labels=CLASSES, pad_token_id=0
        )
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    if LORA in kind:
        import peft

        settings = peft.LoraConfig(
            r=case.rank,
            lora_alpha=2 * case.rank,
            target_modules="all-linear",
            exclude_modules=["score"] if case.classifies else None,
            fan_in_fan_out=case.classifies,
        )
        model = peft.get_peft_model(model, settings)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=WEIGHT_DECAY)

    def step(ids: np.ndarray, targets: np.ndarray) -> float:
        size, total = windows or len(ids), 0.0
        optimizer.zero_grad()
        for first in range(0, len(ids), size):
            given = torch.from_numpy(ids[first : first + size].astype(np.int64))
            wanted = torch.from_numpy(targets[first : first + size].astype(np.int64))
            logits = model(input_ids=given, use_cache=False).logits.float()
            wanted = wanted[:, -1] if case.classifies else wanted.flatten()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), wanted)
            loss = loss * (len(given) / len(ids))
            loss.backward()
            total += float(loss.item())
        optimizer.step()
        return total

    return step, sum(parameter.numel() for parameter in trained)


def main() -> None:
    case, name, directory, windows = sys.argv[1:]
    framework, _, kind = name.partition(" ")
    make = _ours if framework == "ours" else _torch
    settings = CASES[case]
    step, trained = make(Path(directory), kind, settings, int(windows))

    def timed(number: int) -> dict[str, Any]:
        shape = settings.batch, settings.T + 1
        tokens = np.random.default_rng(number).integers(0, 10_000, shape).astype(np.int32)
        ids, targets = tokens[:, :-1].copy(), tokens[:, 1:].copy()
        if settings.classifies:
            targets[:, -1] %= CLASSES
        start, begun = time.perf_counter(), time.process_time()
        loss = step(ids, targets)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "cpu_seconds": time.process_time() - begun, "loss": loss}

    serve(
        step=timed,
        facts=lambda _: {"peak_bytes": peak_resident_bytes(), "trained": trained},
    )


if __name__ == "__main__":
    main()
