"""A run on several ranks: rank 0 has the run, and tells the others what they need to follow it.

Rank 0 opens or creates the run, reads its text, prints and writes. The others get the settings, the
tokens and the weights from it, and then call the methods of their training that it calls of its
own. They need no file of the run: only tokens on disk that they can read themselves stay where they
are.
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
from smallmind.parallel.group import ORDERLY, Group
from smallmind.parallel.shards import check_size
from smallmind.runs import pace
from smallmind.runs.source import Source, TokenSource
from smallmind.runs.threads import use_threads
from smallmind.settings.config import ModelConfig, TrainingConfig
from smallmind.settings.settings import Settings
from smallmind.text.dataset import Dataset, Tokens
from smallmind.text.tokenizer import Tokenizer
from smallmind.training.checkpoint import Saver
from smallmind.training.distillation import Distillation
from smallmind.training.state import RunState
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


def lead(group: Group, settings: Settings, source: Source, training: Training) -> None:
    """Rank 0 gives the others all that they need to follow a run. They `follow`."""
    if group.size == 1:
        return
    check_size(group.size, settings.training.shards)  # before the others get anything
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
    group.share({"plan": plan._asdict()})
    _send_tokens(group, data, has_them=True)
    group.send(training.model.flat.data)
    if distillation and distillation.teacher:
        group.send(distillation.teacher.flat.data)
    _check_instruction_sets(group, training, settings)


def announce(
    group: Group, call: str, config: TrainingConfig, *more: Any, state: RunState | None = None
) -> None:
    """Makes the others call a method of their training, which rank 0 calls next of its own."""
    if group.size == 1:
        return
    group.share({"call": call, "config": vars(config), "more": more, "resumes": bool(state)})
    if state:
        group.share_arrays(state.tensors, (state.step, state.state))


def follow(group: Group, threads: int | None, stopping: Stopping) -> NoReturn:
    """Takes part in the run of rank 0 until that ends, with SystemExit.

    `threads` is the number to use here; None: one per core that this rank has. `stopping` gets the
    training, for whoever is told to stop it.
    """
    training = None
    while True:
        message = group.share(None)[0]
        try:
            if "plan" in message:
                training = _receive(group, Plan(**message["plan"]), threads)
                stopping(training.stop)
            elif training:
                _call(group, training, **message)
        except ORDERLY as error:
            # Rank 0 has met the others too, and reports them.
            if error is not group.agreed and not isinstance(error, FloatingPointError):
                raise


def _call(
    group: Group,
    training: Training,
    call: str,
    config: dict[str, Any],
    more: list[Any],
    resumes: bool,
) -> None:
    """Does what rank 0 is doing at the same time."""
    training_config, state = TrainingConfig(**config), None
    if resumes:
        tensors, (step, rest) = group.share_arrays({}, None)
        state = RunState(step, tensors, rest)
        del tensors
    if call == "steps":
        steps = training.steps(training_config, state, saver=Saver())
        del state  # its arrays are not needed during the run
        for _ in steps:
            pass
    elif call == "measure":
        pace.measure(training, training_config, *more)
    else:
        assert call == "evaluate_held_out"
        training.evaluate_held_out()


def _receive(group: Group, plan: Plan, threads: int | None) -> Training:
    """Builds the training that rank 0 has."""
    settings, tokenizer = Settings.from_dict(plan.settings), Tokenizer.from_saved(plan.tokenizer)
    run = settings.run
    use_threads(dataclasses.replace(run, threads=threads))
    data = _receive_tokens(group, plan, settings, tokenizer)
    model = TransformerModel(
        **dataclasses.asdict(settings.model), seed=run.seed, backend=run.backend
    )
    model.use_precision(settings.training.requested_precision)
    group.send(model.flat.data)
    model.flat.refresh()
    distillation = None
    if plan.teacher:
        teacher = TransformerModel(ModelConfig(**plan.teacher), backend=run.backend)
        group.send(teacher.flat.data)
        chosen = settings.distillation
        distillation = Distillation(
            teacher, chosen.temperature, chosen.alpha, chosen.learn_temperature
        )
    training = Training(model, data=data, distillation=distillation, group=group)
    _check_instruction_sets(group, training, settings)
    return training


def _check_instruction_sets(group: Group, training: Training, settings: Settings) -> None:
    """InputError naming the first rank whose results would have other bits than those of rank 0."""

    def check(first: str, here: str) -> None:
        if here != first and not settings.training.allow_mixed_cpus:
            raise InputError(
                f"it uses {here} but rank 0 uses {first}; results would depend on the rank count: "
                f"set NUMBA_CPU_NAME to the older CPU on all machines, for example to "
                f"haswell for AVX2 or skylake-avx512 for AVX-512, or add --allow-mixed-cpus"
            )

    here = training.model.instruction_set
    first = group.share(here)[0]
    group.together(lambda: check(first, here))


def _receive_tokens(group: Group, plan: Plan, settings: Settings, tokenizer: Tokenizer) -> Dataset:
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
    _send_tokens(group, data, has_them=found is not None)
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


def _send_tokens(group: Group, data: Dataset, has_them: bool) -> None:
    """Writes rank 0's tokens into the arrays of those who lack them; on all ranks."""
    if all(group.together(lambda: has_them)):
        return
    buffer = np.empty(CHUNK, np.int32)
    with activity.doing("Sending the tokens to the other ranks"):
        for part in (data.train, data.held_out):
            for start in activity.parts(range(0, len(part), CHUNK)):
                chunk = buffer[: min(CHUNK, len(part) - start)]
                if group.is_first:
                    chunk[...] = part[start : start + CHUNK]
                group.send(chunk)
                if not has_them:
                    assert isinstance(part, np.ndarray)
                    part[start : start + CHUNK] = chunk


def _file_of(length: int) -> np.ndarray:
    """An array of tokens in a file that is removed when the program ends."""
    with tempfile.TemporaryFile(prefix="smallmind-") as file:
        return np.memmap(file, np.int32, "w+", shape=(length,))
