"""A run on several ranks: rank 0 has the run, and tells the others what they need to follow it.

Rank 0 opens or creates the run, reads its text, prints and writes. The others get the settings, the
tokens and the weights from it, and then take every step with it. They need no file of the run: only
tokens on disk that they can read themselves stay where they are.
"""

import dataclasses
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np

from smallmind.checks import InputError
from smallmind.console import activity
from smallmind.corpus.tokens import TokensOnDisk, find_tokens
from smallmind.nn.transformer import TransformerModel
from smallmind.parallel.ranks import ORDERLY, Ranks, together
from smallmind.parallel.shards import check_size
from smallmind.runs import pace
from smallmind.runs.source import Source, TokenSource
from smallmind.runs.threads import use_threads
from smallmind.settings.config import ModelConfig, TrainingConfig
from smallmind.settings.settings import Settings
from smallmind.text.dataset import Dataset, Tokens
from smallmind.text.tokenizer import Tokenizer
from smallmind.training.distillation import Distillation
from smallmind.training.training import Training

CHUNK = 1 << 22  # tokens that are sent at once

Stopping = Callable[[Callable[[], None]], object]


class Plan(NamedTuple):
    """The facts that a rank needs before it gets the tokens and weights of a run; JSON-able."""

    settings: dict[str, Any]
    tokenizer: str  # as it is saved
    lengths: tuple[int, int]  # of the training and the held-out part, in tokens
    on_disk: tuple[str, str] | None  # the place and the digest of tokens on disk
    teacher: dict[str, Any] | None  # the fields of its ModelConfig


def lead(ranks: Ranks, settings: Settings, source: Source, training: Training) -> None:
    """Rank 0 gives the others all that they need to follow a run. They `follow`."""
    if ranks.size == 1:
        return
    check_size(ranks.size, settings.training.shards)  # before the others get anything
    data, distillation = training.data, training.distillation
    on_disk = None
    if isinstance(source, TokenSource):
        on_disk = str(source.found.place), source.sha256
    teacher = None
    if distillation:
        if distillation.cache:
            raise InputError("a teacher cache is for one rank: leave out --teacher-cache")
        teacher = dataclasses.asdict(distillation.teacher_config)
    lengths = len(data.train), len(data.held_out)
    plan = Plan(settings.to_dict(), training.tokenizer.saved, lengths, on_disk, teacher)
    ranks.share({"plan": plan._asdict()})
    _send_tokens(ranks, data, has_them=True)
    ranks.send(training.model.flat.data)
    if distillation and distillation.teacher:
        ranks.send(distillation.teacher.flat.data)
    _check_instruction_sets(ranks, training, settings)


def follow(ranks: Ranks, threads: int | None, stopping: Stopping) -> NoReturn:
    """Takes part in the run of rank 0 until that ends, with SystemExit.

    `threads` is the number to use here; None: one per core that this rank has. `stopping` gets the
    training, for whoever is told to stop it.
    """
    training = None
    while True:
        message = ranks.share(None)[0]
        try:
            if "plan" in message:
                training = _receive(ranks, Plan(**message["plan"]), threads)
                stopping(training.stop)
            elif training:
                _call(training, message["call"], message["arguments"])
        except ORDERLY as error:
            # Rank 0 has met the others too, and reports them.
            if error is not ranks.agreed and not isinstance(error, FloatingPointError):
                raise


def _call(training: Training, name: str, arguments: list[Any]) -> None:
    """Does what rank 0 is doing at the same time."""
    if name == "measure":
        config, seconds = arguments
        pace.measure(training, TrainingConfig(**config), seconds)
    elif name == "steps":
        config, *others = arguments
        for _ in training.follow(TrainingConfig(**config), *others):
            pass
    else:
        assert name == "evaluate_held_out"
        training.evaluate_held_out()


def _receive(ranks: Ranks, plan: Plan, threads: int | None) -> Training:
    """Builds the training that rank 0 has."""
    settings, tokenizer = Settings.from_dict(plan.settings), Tokenizer.from_saved(plan.tokenizer)
    run = settings.run
    use_threads(dataclasses.replace(run, threads=threads))
    data = _receive_tokens(ranks, plan, settings, tokenizer)
    model = TransformerModel(settings.model, seed=run.seed, backend=run.backend)
    model.use_precision(settings.training.requested_precision)
    ranks.send(model.flat.data)
    model.flat.refresh()
    distillation = None
    if plan.teacher:
        teacher = TransformerModel(ModelConfig(**plan.teacher), backend=run.backend)
        ranks.send(teacher.flat.data)
        chosen = settings.distillation
        distillation = Distillation(
            teacher, chosen.temperature, chosen.alpha, chosen.learn_temperature
        )
    training = Training(model, data=data, distillation=distillation, ranks=ranks)
    _check_instruction_sets(ranks, training, settings)
    return training


def _check_instruction_sets(ranks: Ranks, training: Training, settings: Settings) -> None:
    """InputError naming the first rank whose results would have other bits than those of rank 0."""

    def check(first: str, here: str) -> None:
        if here != first and not settings.training.allow_mixed_cpus:
            raise InputError(
                f"it uses {here} but rank 0 uses {first}; results would depend on the rank count: "
                f"set NUMBA_CPU_NAME to the older CPU on all machines, for example to "
                f"haswell for AVX2 or skylake-avx512 for AVX-512, or add --allow-mixed-cpus"
            )

    here = training.model.instruction_set
    first = ranks.share(here)[0]
    together(ranks, lambda: check(first, here))


def _receive_tokens(ranks: Ranks, plan: Plan, settings: Settings, tokenizer: Tokenizer) -> Dataset:
    run, found = settings.run, _same_tokens(plan, tokenizer)
    train: Tokens
    held_out: Tokens
    if found:
        train, held_out = found.train, found.held_out
    elif plan.on_disk:
        train, held_out = (_file_of(length) for length in plan.lengths)
    else:
        train, held_out = (np.empty(length, np.int32) for length in plan.lengths)
    T = settings.model.block_size
    data = Dataset(train, T, run.batch_size, run.seed, tokenizer, held_out)
    _send_tokens(ranks, data, has_them=found is not None)
    return data


def _same_tokens(plan: Plan, tokenizer: Tokenizer) -> TokensOnDisk | None:
    """The tokens on disk of rank 0, if this machine has them in the same place."""
    if not plan.on_disk:
        return None
    place, digest = plan.on_disk
    try:
        found = find_tokens([place], tokenizer)
    except (InputError, OSError):
        return None
    return found if found and found.sha256 == digest else None


def _send_tokens(ranks: Ranks, data: Dataset, has_them: bool) -> None:
    """Writes rank 0's tokens into the arrays of those who lack them; on all ranks."""
    if all(together(ranks, lambda: has_them)):
        return
    buffer = np.empty(CHUNK, np.int32)
    with activity.doing("Sending the tokens to the other ranks"):
        for part in (data.train, data.held_out):
            for start in activity.parts(range(0, len(part), CHUNK)):
                chunk = buffer[: min(CHUNK, len(part) - start)]
                if ranks.rank == 0:
                    chunk[...] = part[start : start + CHUNK]
                ranks.send(chunk)
                if not has_them:
                    assert isinstance(part, np.ndarray)
                    part[start : start + CHUNK] = chunk


def _file_of(length: int) -> np.ndarray:
    """An array of tokens in a file that is removed when the program ends."""
    with tempfile.TemporaryFile(prefix="smallmind-") as file:
        return np.memmap(file, np.int32, "w+", shape=(length,))
