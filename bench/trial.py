"""Runs training steps in a separate process, to measure its memory: python -m bench.trial JSON.

The JSON holds the arguments of `run`, or of `train`; the answer is JSON too.
"""

import contextlib
import hashlib
import json
import os
import random
import sys
import time
from dataclasses import asdict
from typing import Any

import smallmind
from smallmind.console.activity import clock
from smallmind.kernels.codegen.scratch import scratch_bytes
from smallmind.memory.tensor_pool import TensorPool
from smallmind.memory.tracker import peak_resident_bytes
from smallmind.training.records import StepRecord

ALPHABET = "".join(map(chr, range(ord("0"), ord("0") + 65)))  # 65, as in Shakespeare


def run(
    model: dict[str, Any],
    batch_size: int,
    settings: list[dict[str, Any]],
    steps: int,
    capacity: int | None = None,
) -> dict[str, Any]:
    """Trains models in turn, each with its settings -> seconds of every step, and what is held.

    model: fields of ModelConfig; settings: of TrainingConfig; capacity: of the pool. Units: bytes;
    those of weights, gradients and moments are the last model's, as are the loss of its last step
    and the digest of its weights.
    """
    pool = TensorPool(capacity)
    trainings = [_training(model, batch_size, pool) for _ in settings]
    configs = [
        smallmind.TrainingConfig(steps=steps, val_every=0, log_every=1, **fields)
        for fields in settings
    ]
    runs = [pair[0].steps(pair[1]) for pair in zip(trainings, configs, strict=True)]
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(steps):
        for times, records in zip(seconds, runs, strict=True):
            start = time.perf_counter()
            record = next(records)
            times.append(time.perf_counter() - start)
    assert isinstance(record, StepRecord)
    digest = hashlib.sha256(trainings[-1].model.flat.data.tobytes()).hexdigest()
    end = {"loss": record.loss, "digest": digest}
    return {"seconds": seconds, "pool": asdict(pool.statistics()), **end, **_held(trainings[-1])}


def train(flags: list[str]) -> dict[str, Any]:
    """smallmind train with these flags -> what its start said it takes, and what it took.

    Units: bytes and seconds; these without compiling, from the start's table to the end.
    """
    from smallmind.cli import main, memory
    from smallmind.forecast import pace

    said: dict[str, Any] = {}
    check_memory, rough_pace = memory.check_memory, pace.rough_pace

    def check(console: Any, plan: Any, ranks: int = 1) -> None:
        said["estimate"] = plan.estimate.total
        check_memory(console, plan, ranks)

    def time_passes(training: Any, config: Any) -> Any:
        begin = clock()
        found = rough_pace(training, config)
        said["predicted"], said["spread"] = found.total(config), found.spread
        said["timing"], said["begin"] = clock() - begin, clock()
        return found

    memory.check_memory, pace.kept_pace = check, time_passes
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        said["status"] = main(["train", *flags])
    seconds = clock() - said.pop("begin")
    return {**said, "seconds": seconds, "peak": peak_resident_bytes()}


def _training(model: dict[str, Any], batch_size: int, pool: TensorPool) -> smallmind.Training:
    transformer = smallmind.TransformerModel(len(ALPHABET), **model)
    transformer.workspace.pool = pool
    text = "".join(random.Random(0).choices(ALPHABET, k=2 * model["block_size"]))
    return smallmind.Training(
        transformer, smallmind.Tokenizer(ALPHABET), text, batch_size=batch_size
    )


def _held(training: smallmind.Training) -> dict[str, int]:
    flat, optimizer = training.model.flat, training.optimizer
    assert optimizer
    return {
        "weights": flat.data.nbytes,
        "working_weights": flat.copied_bytes,
        "gradients": flat.grad.nbytes,
        "moments": sum(tensor.nbytes for tensor in optimizer.tensors().values()),
        "snapshot": training.spikes.held_bytes,
        "scratch": scratch_bytes(),
        "peak": peak_resident_bytes(),
    }


if __name__ == "__main__":
    try:
        given = json.loads(sys.argv[1])
        answer = train(**given) if "flags" in given else run(**given)
    except MemoryError as error:
        answer = {"out_of_memory": str(error)}
    print(json.dumps(answer))
