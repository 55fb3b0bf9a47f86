"""The whole model: embedding, blocks, final norm, head; and the same way back."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import Any

import numpy as np

from smallmind import safetensors
from smallmind.config import (
    InputError,
    ModelConfig,
    Precision,
    RunConfig,
    micro_batch_sizes,
)
from smallmind.kernels.half import BFLOAT16, FLOAT16
from smallmind.nn.block import DROPOUT_SITES, Block
from smallmind.nn.dropout import Dropout
from smallmind.nn.layernorm import LayerNorm
from smallmind.nn.linear import Linear
from smallmind.nn.parameters import Parameters
from smallmind.nn.recompute import CheckpointManager, Segment
from smallmind.nn.workspace import Kernel, Workspace

INITIAL_DEVIATION = 0.02  # GPT-2's

# What cross_entropy is called with, and before it which windows of the batch these are:
# objective(windows, losses, dlogits, logits, targets, scale).
Objective = Callable[[slice, np.ndarray, np.ndarray, np.ndarray, np.ndarray, float], None]


def micro_batches(ids: np.ndarray, micro_batch_size: int | None) -> Iterator[slice]:
    """The parts of a batch, ids (B, T), that go through the model one after another.

    So that memory does not grow with the batch. What is summed in which order depends on nothing
    but these numbers.
    """
    end = 0
    for windows in micro_batch_sizes(len(ids), ids.shape[1], micro_batch_size):
        start, end = end, end + windows
        yield slice(start, end)


def resolve_precision(precision: Precision, backend: str) -> Precision:
    """The same, AUTO resolved. InputError for 16 bits with the NumPy backend."""
    if precision == Precision.AUTO:
        if backend == "numpy":
            return Precision.FLOAT32
        from smallmind.kernels.codegen.isa import ISA

        return Precision.BFLOAT16 if ISA.bfloat16 else Precision.FLOAT32
    if precision != Precision.FLOAT32 and backend == "numpy":
        raise InputError(f"precision={precision.value!r} needs backend='numba'")
    return precision


class TransformerModel:
    """A GPT-2 style language model (Radford et al. 2019) with manual backward passes.

    vocab_size V, block_size T at most, n_embd C, n_layer blocks of n_head heads; learned positions,
    pre-norm, tanh-GELU, MLP of 4C. `tie_weights` uses the token embedding as output matrix;
    `bias=False` leaves biases out of linear layers and norms. `backend` is "numba" (compiled,
    float32) or "numpy" (plain, `dtype` float32 or float64). Weights follow from `seed`: normal with
    deviation 0.02, projections into the residual stream 0.02 / sqrt(2 n_layer), biases 0, gains 1.

    `parameters` and `gradients` map names to writable views of one flat vector each. Matrices are
    (in, out). InputError where an argument is out of its range.
    """

    def __init__(
        self,
        vocab_size: int,
        block_size: int,
        n_embd: int,
        n_layer: int,
        n_head: int,
        dropout: float = 0.0,
        seed: int = 42,
        tie_weights: bool = True,
        bias: bool = True,
        backend: str = "numba",
        dtype: Any = np.float32,
    ) -> None:
        self.config = ModelConfig(
            vocab_size=vocab_size,
            block_size=block_size,
            n_layer=n_layer,
            n_head=n_head,
            n_embd=n_embd,
            dropout=dropout,
            tie_weights=tie_weights,
            bias=bias,
        )
        if backend not in ("numba", "numpy"):
            raise InputError(f"backend={backend!r} must be numba or numpy")
        if np.dtype(dtype) != np.float32 and (backend, np.dtype(dtype)) != ("numpy", np.float64):
            raise InputError(f"dtype={np.dtype(dtype)} needs backend='numpy'; numba is float32")
        self.seed = RunConfig(seed=seed).seed
        self.backend = backend
        self.flat = Parameters(self.config.parameter_shapes(), dtype)
        self.parameters = self.flat.views
        self.gradients = self.flat.grad_views
        self._initialise(seed)
        self.workspace = Workspace(backend, dtype, dropout, seed)
        self.passes = 0  # forward passes of training so far: the counter of dropout
        self.micro_batch_size: int | None = (
            None  # that go through the model; None: about 2048 tokens
        )
        self.checkpointing = CheckpointManager(enabled=False)
        self.use_precision(Precision.FLOAT32)

    def _initialise(self, seed: int) -> None:
        residual = INITIAL_DEVIATION / math.sqrt(2 * self.config.n_layer)
        for index, (name, value) in enumerate(self.parameters.items()):
            if value.ndim == 2:
                # A stream for each matrix: its values do not depend on the ones before it.
                stream = np.random.Generator(np.random.Philox(key=[seed, index]))
                deviation = residual if "projection" in name else INITIAL_DEVIATION
                value[...] = deviation * stream.standard_normal(value.shape)
            elif name.endswith("weight"):
                value[...] = 1

    def _build(self) -> None:
        config, workspace, flat = self.config, self.workspace, self.flat
        self.embedding_dropout = Dropout(workspace, site=0)
        self.blocks = [
            Block(workspace, flat, f"blocks.{i}", config.n_head, site=1 + DROPOUT_SITES * i)
            for i in range(config.n_layer)
        ]
        self.use_checkpointing(self.checkpointing)
        self.final_norm = LayerNorm(workspace, flat, "final_norm")
        self.head = None if config.tie_weights else Linear(workspace, flat, "head")

    def use_precision(self, precision: Precision) -> Precision:
        """From now on passes store weights and activations so -> the same, AUTO resolved.

        `parameters` and `gradients` stay float32. In 16 bits passes read a rounded copy, which
        AdamW keeps up to date: call `flat.refresh()` after writing to the parameters by hand.
        InputError for 16 bits with the NumPy backend.
        """
        precision = resolve_precision(precision, self.backend)
        dtype = {Precision.FLOAT16: FLOAT16, Precision.BFLOAT16: BFLOAT16}.get(precision)
        self.precision = precision
        self.flat.store_working_copy(dtype)
        self.workspace.activation_dtype = self.workspace.dtype if dtype is None else dtype
        self._build()
        return precision

    def use_checkpointing(self, manager: CheckpointManager) -> None:
        """From now on training recomputes as manager says; no gradient changes by a bit."""
        self.checkpointing = manager
        places = manager.segments(len(self.blocks))
        self.segments = [
            Segment(self.workspace, self.blocks[place.start : place.stop], place == places[-1])
            for place in places
        ]

    def forward(self, ids: np.ndarray) -> np.ndarray:
        """ids (B, T) -> logits (B, T, V), a new array. Nothing is dropped out.

        InputError where T is over block_size or an id is outside the vocabulary.
        """
        ids = self._checked(ids)
        logits = np.empty((*ids.shape, self.config.vocab_size), self.workspace.dtype)
        for group in micro_batches(ids, self.micro_batch_size):
            with self.logits(ids[group]) as rows:
                logits[group] = rows.reshape(logits[group].shape)
        return logits

    @contextmanager
    def logits(self, ids: np.ndarray) -> Iterator[np.ndarray]:
        """ids (B, T) -> logits (B T, V), rented for the length of the block, and nothing else.

        The whole batch goes through the model at once. Nothing is dropped out.
        """
        ids = self._checked(ids)
        with self.workspace.one_pass():
            with self.workspace.profile("Forward"):
                logits = self._forward(ids)
            self.workspace.release_all_but({id(logits)})
            yield logits

    def loss(self, ids: np.ndarray, targets: np.ndarray) -> float:
        """ids, targets (B, T) -> mean cross-entropy in nats a token. Nothing is dropped out."""
        return float(self.losses(ids, targets).mean(dtype=np.float64))

    def losses(
        self, ids: np.ndarray, targets: np.ndarray, correct: np.ndarray | None = None
    ) -> np.ndarray:
        """ids, targets (B, T) -> cross-entropy of every token (B, T) in nats, a new array.

        Writes into correct (B, T), where it is given, whether the target has the highest logit.
        """
        ids, targets = self._checked_pair(ids, targets)
        losses = np.empty(ids.shape, self.workspace.dtype)
        for group in micro_batches(ids, self.micro_batch_size):
            with self.workspace.one_pass():
                with self.workspace.profile("Forward"):
                    logits = self._forward(ids[group])
                if correct is not None:
                    correct[group] = (
                        logits.argmax(axis=1).reshape(ids[group].shape) == targets[group]
                    )
                with self.workspace.profile("Loss"):
                    self._cross_entropy(losses[group], logits, targets[group])
        return losses

    def loss_and_gradients(
        self,
        ids: np.ndarray,
        targets: np.ndarray,
        scale: float = 1.0,
        objective: Objective | None = None,
    ) -> float:
        """ids, targets (B, T) -> mean cross-entropy in nats a token; adds to the gradients.

        What is added is the gradient of scale * loss. Dropout is on, with a new mask at each call.
        An objective writes other losses than the cross-entropy, and their gradient.
        """
        ids, targets = self._checked_pair(ids, targets)
        total = 0.0
        for group in micro_batches(ids, self.micro_batch_size):
            with self.workspace.one_pass(self.passes):
                self.passes += 1
                with self.workspace.profile("Forward"):
                    logits = self._forward(ids[group])
                with self.workspace.profile("Loss"):
                    losses = self.workspace.rent_full_precision(*ids[group].shape)
                    kernel = objective and functools.partial(objective, group)
                    dlogits = self._cross_entropy(
                        losses, logits, targets[group], scale / targets.size, kernel
                    )
                    total += float(losses.sum())  # in its own precision: another takes a buffer
                with self.workspace.profile("Backward"):
                    self._backward(dlogits)
        return total / targets.size

    def zero_gradients(self) -> None:
        """Sets all gradients to zero."""
        self.flat.grad[:] = 0

    def save(self, path: str | PathLike[str], metadata: Mapping[str, str] | None = None) -> None:
        """Writes parameters and config to a safetensors file, replacing it whole or not at all."""
        config = safetensors.to_json(dataclasses.asdict(self.config))
        safetensors.write(path, self.parameters, {"config": config, **(metadata or {})})

    @classmethod
    def load(cls, path: str | PathLike[str], backend: str = "numba") -> "TransformerModel":
        """The model that `save` wrote. InputError where the file is not one of its files."""
        tensors, metadata = safetensors.read(path)
        try:
            config = ModelConfig(**safetensors.from_json(metadata["config"]))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path} is not a model saved by smallmind: {error}") from None
        # Compared before anything is built: a config that lies may ask for any amount of memory.
        if {name: value.shape for name, value in tensors.items()} != config.parameter_shapes():
            raise InputError(f"{path} does not hold the parameters that its config describes")
        model = cls(**dataclasses.asdict(config), backend=backend)
        for name, value in tensors.items():
            if value.dtype != np.float32 or not np.isfinite(value).all():
                raise InputError(f"{path}: {name} is not finite float32")
            model.parameters[name][...] = value
        return model

    def _forward(self, ids: np.ndarray) -> np.ndarray:
        """ids (B, T) -> logits (B T, V), rented; layers keep what backward needs."""
        kernels, workspace = self.workspace.kernels, self.workspace
        B, T = ids.shape
        self.ids = ids
        rent = workspace.rent_full_precision if self.embedding_dropout.on else workspace.rent
        x = rent(B * T, self.config.n_embd)
        used = self.flat.compute
        kernels.embedding(x, used["token_embedding.weight"], used["position_embedding.weight"], ids)
        if self.embedding_dropout.on:
            embedded, x = x, workspace.rent(*x.shape)
            self.embedding_dropout.forward(x, embedded)
            workspace.release(embedded)
        for segment in self.segments:
            x = segment.forward(x, T)
        self.normed = self.final_norm.forward(x)
        if self.head:
            return self.head.forward(self.normed, exact=True)
        logits = workspace.rent_full_precision(B * T, self.config.vocab_size)
        kernels.matmul_transpose_b(logits, self.normed, used["token_embedding.weight"])
        return logits

    def _backward(self, dlogits: np.ndarray) -> None:
        """dlogits (B T, V) -> adds to all gradients."""
        kernels, workspace = self.workspace.kernels, self.workspace
        dtoken = self.gradients["token_embedding.weight"]
        # forward: logits = normed head
        if self.head:
            self.head.backward_weight(self.normed, dlogits)
            dnormed = self.head.backward_input(dlogits)
        else:
            dnormed = workspace.rent(*self.normed.shape)
            kernels.matmul(dnormed, dlogits, self.flat.compute["token_embedding.weight"])
            kernels.matmul_transpose_a(dtoken, dlogits, self.normed, dtoken)
        workspace.release(dlogits)
        dx = workspace.rent(*dnormed.shape)
        self.final_norm.backward(dnormed, dx, plus=None)
        workspace.release(dnormed)
        for segment in reversed(self.segments):
            segment.backward(dx)
        # forward: x = dropout(token_embedding[ids] + position_embedding)
        if self.embedding_dropout.on:
            self.embedding_dropout.backward(dx, dx)
        dposition = self.gradients["position_embedding.weight"]
        kernels.embedding_backward(dtoken, dposition, dx, self.ids)
        workspace.release(dx)

    def _cross_entropy(
        self,
        losses: np.ndarray,
        logits: np.ndarray,
        targets: np.ndarray,
        scale: float = 1.0,
        kernel: Kernel | None = None,
    ) -> np.ndarray:
        """logits (B T, V), targets (B, T) -> losses (B, T), and the gradient of logits.

        It takes their place, or, where gradients are stored in 16 bits, is rented. A kernel stands
        for that of the cross-entropy.
        """
        workspace = self.workspace
        in_place = workspace.activation_dtype is workspace.dtype
        dlogits = logits if in_place else workspace.rent(*logits.shape)
        kernel = kernel or workspace.kernels.cross_entropy
        kernel(losses.reshape(-1), dlogits, logits, targets.reshape(-1), scale)
        if not in_place:
            workspace.release(logits)
        return dlogits

    def _checked(self, ids: np.ndarray) -> np.ndarray:
        """ids as the kernels take them: C-contiguous int32 (B, T), inside the vocabulary."""
        ids = np.asarray(ids)
        if ids.dtype.kind not in "iu":
            raise InputError(f"ids are {ids.dtype}; they must be whole numbers")
        if ids.ndim != 2 or ids.size == 0:
            raise InputError(f"ids have shape {ids.shape}; they must be (B, T), not empty")
        if ids.shape[1] > self.config.block_size:
            raise InputError(
                f"{ids.shape[1]} tokens are more than block_size={self.config.block_size}"
            )
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            raise InputError(f"ids must be from 0 to vocab_size - 1 = {self.config.vocab_size - 1}")
        return np.require(ids, np.int32, ["C", "W"])

    def _checked_pair(self, ids: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids, targets = self._checked(ids), self._checked(targets)
        if ids.shape != targets.shape:
            raise InputError(f"targets have shape {targets.shape}, ids {ids.shape}")
        return ids, targets
