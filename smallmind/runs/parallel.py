"""A run on several ranks: rank 0 has the run, and tells the others what they need to follow it.

Rank 0 opens or creates the run, reads its text, prints and writes. The others get the settings, the
tokens and the weights from it, and then call the methods of their training that it calls of its
own. They need no file of the run: only tokens on disk that they can read themselves stay where they
are.
"""

import functools
import tempfile
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from smallmind import parts
from smallmind.checks import InputError
from smallmind.console import activity
from smallmind.corpus.tokens import TokensOnDisk, find_tokens
from smallmind.forecast import pace
from smallmind.forecast.threads import use_threads
from smallmind.losses.preferences import PairsDataset
from smallmind.nn.transformer import TransformerModel
from smallmind.parallel.group import ALONE, ORDERLY, Group
from smallmind.parallel.shards import check_processes
from smallmind.runs.assembly import new_model
from smallmind.runs.source import Source, dataset_of
from smallmind.settings.config import ModelConfig, TrainingConfig
from smallmind.settings.settings import Settings
from smallmind.text.dataset import Dataset, Tokens
from smallmind.text.tokenizer import Tokenizer
from smallmind.training.checkpoint import Saver
from smallmind.training.state import RunState
from smallmind.training.training import Training

CHUNK_TOKENS = 1 << 22  # that are sent at once

Stopping = Callable[[Callable[[], None]], object]


class Leader:
    """Rank 0 of a run, perhaps of one rank. The others `follow`."""

    def __init__(self, group: Group = ALONE) -> None:
        self._group = group
        self.size, self.neighbours = group.size, group.neighbours

    def new_training(self, model: TransformerModel, **more: Any) -> Training:
        """Makes the training of rank 0. Arguments as `Training`."""
        return Training(model, **more, group=self._group)

    def share(self, settings: Settings, source: Source, training: Training) -> None:
        """Gives the others all that they need to follow a run."""
        group, data, loss = self._group, training.data, training.loss
        if group.size == 1:
            return
        # Before the others get anything.
        check_processes(group.size, settings.training, loss.one_process)
        on_disk = (str(source.on_disk), source.sha256) if source.on_disk else None
        facts = {  # the arguments of `_receive`
            "saved": settings.to_dict(),
            "saved_tokenizer": training.tokenizer.saved,
            "lengths": tuple(map(len, data.stored)),
            "on_disk": on_disk,
            "others": [vars(model.config) for model in loss.models],
        }
        group.share({"run": facts})
        _send_tokens(group, data.stored, has_them=True)
        for array in training.model.flat.arrays:
            group.send(array)
        for model in loss.models:
            group.send(model.flat.data)
        _check_instruction_sets(group, training, settings)

    def announce(
        self, call: str, config: TrainingConfig, *more: Any, state: RunState | None = None
    ) -> None:
        """Makes the others call a method of their training, which rank 0 calls next of its own."""
        group = self._group
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
            if "run" in message:
                training = _receive(group, threads, **message["run"])
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


def _receive(
    group: Group,
    threads: int | None,
    saved: dict[str, Any],
    saved_tokenizer: str,
    lengths: tuple[int, int],
    on_disk: tuple[str, str] | None,
    others: list[dict[str, Any]],
) -> Training:
    """Builds the training that rank 0 has.

    `lengths` are those of the training and the held-out part, in tokens, `on_disk` the path and
    the digest of tokens on disk, and `others` the ModelConfigs of models that the loss needs.
    """
    settings = Settings.from_dict(saved).replace(threads=threads)
    tokenizer = Tokenizer.from_saved(saved_tokenizer)
    use_threads(settings.run)
    train: Tokens
    held_out: Tokens
    if found := _same_tokens(on_disk, tokenizer):
        train, held_out = found.train, found.held_out
    else:
        make = _file_of if on_disk else functools.partial(np.empty, dtype=np.int32)
        train, held_out = (make(length) for length in lengths)
    _send_tokens(group, (train, held_out), has_them=found is not None)
    T, run = settings.model.block_size, settings.run
    kind, config = settings.loss
    data: Dataset
    if kind == "preferences":
        sizes, kto = (run.batch_size, run.seed), config.loss == "kto"
        data = PairsDataset.of_stored((train, held_out), tokenizer, *sizes, kto)
    else:
        data = dataset_of((train, held_out), tokenizer, T, run)
    model = new_model(settings)
    for array in model.flat.arrays:
        group.send(array)
    model.flat.refresh()
    models = [TransformerModel(ModelConfig(**each), backend=run.backend) for each in others]
    for each in models:
        group.send(each.flat.data)
    loss = parts.load(parts.LOSSES, kind).of(models, config)
    training = Training(model, data=data, loss=loss, group=group)
    _check_instruction_sets(group, training, settings)
    return training


def _check_instruction_sets(group: Group, training: Training, settings: Settings) -> None:
    """Raises InputError naming the first rank whose results would differ from those of rank 0."""

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


def _same_tokens(on_disk: tuple[str, str] | None, tokenizer: Tokenizer) -> TokensOnDisk | None:
    """Returns the tokens on disk of rank 0, if this machine has them in the same place."""
    if not on_disk:
        return None
    path, digest = on_disk
    try:
        found = find_tokens([path], tokenizer)
    except (InputError, OSError):
        return None
    return found if found and found.sha256 == digest else None


def _send_tokens(group: Group, parts: tuple[Tokens, Tokens], has_them: bool) -> None:
    """Writes rank 0's tokens into the arrays of those who lack them; on all ranks."""
    if all(group.together(lambda: has_them)):
        return
    buffer = np.empty(CHUNK_TOKENS, np.int32)
    with activity.doing("Sending the tokens to the other ranks"):
        for part in parts:
            for start in activity.parts(range(0, len(part), CHUNK_TOKENS)):
                chunk = buffer[: min(CHUNK_TOKENS, len(part) - start)]
                if group.is_first:
                    chunk[...] = part[start : start + CHUNK_TOKENS]
                group.send(chunk)
                if not has_them:
                    assert isinstance(part, np.ndarray)
                    part[start : start + CHUNK_TOKENS] = chunk


def _file_of(length: int) -> np.ndarray:
    """Returns an array of tokens in a file that is removed when the program ends."""
    with tempfile.TemporaryFile(prefix="smallmind-") as file:
        return np.memmap(file, np.int32, "w+", shape=(length,))
