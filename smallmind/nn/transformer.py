"""The model's public interface: passes over batches, precision, files."""

import dataclasses
import functools
import inspect
import numbers
from collections.abc import Callable, Hashable, Mapping
from os import PathLike
from typing import Any, ClassVar

import numpy as np

from smallmind.checks import InputError, check_field, check_type, suggesting
from smallmind.console.table import Table, Tabular
from smallmind.nn import backend as backends
from smallmind.nn import inspection, loading
from smallmind.nn.backend import Backend
from smallmind.nn.batch import (
    CheckedBatch,
    Inputs,
    Objective,
    checked_firsts,
    checked_ids,
    kernel_of,
    micro_batches,
)
from smallmind.nn.block import Block
from smallmind.nn.cache import KeyValueCache
from smallmind.nn.freezing import frozen_numbers, frozen_parts
from smallmind.nn.inspection import Inspection
from smallmind.nn.loading import Base
from smallmind.nn.network import Network
from smallmind.nn.parameters import Parameters, number_type, size_rows, storage_of
from smallmind.nn.recompute import RecomputePlan
from smallmind.nn.recorded_passes import MIN_PASSES, RecordedPasses
from smallmind.nn.workspace import Kernel, Pass, Result, Workspace
from smallmind.settings.config import OF_BLOCKS, Adapter, ModelConfig, Precision, RunConfig
from smallmind.text.ids import check_ids

# The arguments of a model besides the fields of its config.
ARGUMENTS: dict[str, Any] = {"seed": 42, "backend": "numba", "dtype": np.float32}
ARGUMENTS |= {"freeze": None, "adapter": None}


def _signature() -> inspect.Signature:
    """-> the arguments of TransformerModel: fields of ModelConfig, and those of ARGUMENTS.

    Those that may be positional come first; all other fields of ModelConfig are keyword-only.
    """
    required = ("vocab_size", "block_size", "n_embd", "n_layer", "n_head")
    first = (*required, "dropout", "seed", "tie_weights", "bias", "backend", "dtype")
    defaults = {field.name: field.default for field in dataclasses.fields(ModelConfig)} | ARGUMENTS
    defaults |= dict.fromkeys(required, inspect.Parameter.empty)
    kinds: dict[str, Any] = dict.fromkeys(defaults, inspect.Parameter.KEYWORD_ONLY)
    kinds |= dict.fromkeys(first, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = dict.fromkeys((*first, *defaults))
    return inspect.Signature(
        [inspect.Parameter(name, kinds[name], default=defaults[name]) for name in names]
    )


@suggesting()
class TransformerModel(Tabular):
    """A language model with manual backward passes: by default GPT-2 (Radford et al. 2019).

    That is not the default of the command line and of `Run.create`, whose recipe takes the parts of
    Qwen3; `recipe="gpt2"` makes them equal.

    vocab_size V, block_size T at most, n_embd C, n_layer blocks of n_head heads. The other fields
    of ModelConfig choose its parts: norms, positions, perceptrons and shortcuts. `tie_weights` uses
    the token embedding as output matrix; `bias=False` leaves biases out of linear layers and norms.
    `backend` is "numba" (compiled, float32) or "numpy" (plain, `dtype` float32 or float64). `seed`
    determines the weights: normal with deviation 0.02, projections into the residual stream
    0.02 / sqrt(2 n_layer) or, with zero_init, 0, biases 0, gains 1 or `initial_gain`. `freeze`
    names parts that are not trained: see the method. With an `adapter` only the matrices that it
    adds are trained, `lora_a` and `lora_b` among the parameters.

    A ModelConfig may replace its fields: `TransformerModel(config, seed=1)`.

    `parameters` and `gradients` map names to writable views of one flat vector each; what is not
    trained is read-only and has no gradient. Matrices are (in, out). InputError if an argument is
    out of range.
    """

    __signature__: ClassVar[inspect.Signature] = _signature()

    def __init__(self, *arguments: Any, **named: Any) -> None:
        options = dict(ARGUMENTS)
        if arguments and isinstance(arguments[0], ModelConfig):
            if len(arguments) > 1:
                raise TypeError("after a ModelConfig, give seed, backend and dtype by name")
            config, options = arguments[0], {**options, **named}
            if fields := {name: value for name, value in named.items() if name not in ARGUMENTS}:
                config = dataclasses.replace(config, **fields)
        else:
            settings = self.__signature__.bind(*arguments, **named).arguments
            options |= {name: settings.pop(name) for name in ARGUMENTS if name in settings}
            config = ModelConfig(**settings)
        backend = options["backend"]
        opened = backend if isinstance(backend, Backend) else backends.open_backend(backend)
        seed = check_field(RunConfig, "seed", options["seed"])
        adapter = check_type("adapter", options["adapter"], Adapter, None)
        self._build(config, seed, opened, options["dtype"], options["freeze"], adapter)
        if opened.computes:
            self.flat.initialise(self.seed)

    def _build(
        self,
        config: ModelConfig,
        seed: int,
        backend: Backend,
        dtype: Any,
        freeze: str | None = None,
        adapter: Adapter | None = None,
        precision: Precision | None = None,
        trains: bool = True,
    ) -> None:
        """Builds everything; the parameters are zeros."""
        backend.check_dtype(dtype)
        self.config = config
        self.seed = seed
        self.backend = backend.name
        self._has_contents = backend.computes
        self.workspace = Workspace(backend, dtype, config.dropout, seed)
        self.flat = Parameters()
        self.adapter = adapter
        self.network = Network(self.workspace, self.flat, config, adapter)
        self.recompute_plan = RecomputePlan(enabled=False)
        self._frozen: frozenset[str] | None = None  # None: not settled yet
        self.freeze(freeze)
        if not trains:
            self.flat.freeze(range(len(self.flat.specs)))
        if precision is not None:
            self.flat.storage = storage_of(precision)
        self.flat.allocate(dtype, backend.zeros, backend.computes)
        self.tokenizer_digest: str | None = None  # of the one it was trained with, if known
        self.base: Base | None = None  # of its adapter, if that is known
        self.passes = 0  # of training so far that were not given a number
        self.micro_batch_size: int | None = None  # windows; None: about 2048 tokens
        self.forget_recorded()
        self.products = "numba"
        self.use_precision(precision or Precision.FLOAT32)

    def __getstate__(self) -> dict[str, Any]:
        """Returns what copies and pickles are made of: arrays and settings, no memory of passes."""
        return loading.copied_state(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._build(backend=backends.open_backend(state["backend"]), **state["arguments"])
        loading.restore_copied(self, state)

    def table(self) -> Table:
        """Returns its layers, the shapes of their matrices and their numbers of parameters."""
        name = f"{self.config.architecture}, " if self.config.architecture else ""
        title = f"{type(self).__name__}: {name}{self.precision.value}, backend {self.backend}"
        return Table(title, size_rows(self.config, self.flat), align="<<>")

    @property
    def parameters(self) -> Mapping[str, np.ndarray]:
        """The values by name."""
        return self.flat.views

    @property
    def gradients(self) -> Mapping[str, np.ndarray]:
        """The gradients of what is trained, by name."""
        return self.flat.grad_views

    def zero_gradients(self) -> None:
        """Sets all gradients to zero."""
        self.flat.grad[:] = 0

    @property
    def blocks(self) -> list[Block]:
        """The transformer blocks, in order."""
        return self.network.blocks

    @property
    def instruction_set(self) -> str:
        """The machine's influence on the bits of results: "AVX2" or "NumPy on x86_64"."""
        return backends.instruction_set(self.backend, self.precision, self.products)

    def use_precision(self, precision: Precision) -> Precision:
        """Makes passes store weights and activations in precision -> precision, AUTO resolved.

        `parameters` and `gradients` stay float32. In 16 bits passes read a rounded copy, which
        AdamW keeps up to date: call `flat.refresh()` after writing to the parameters by hand. What
        is frozen is rounded itself. In q8_0 and q4_0 only that is stored in blocks of integers,
        where rows are multiples of 32, and everything else stays float32. InputError for 16 bits
        with the NumPy backend, and for blocks if nothing is frozen.
        """
        precision = backends.resolve_precision(precision, self.backend)
        if precision.has_blocks and not self.flat.frozen:
            raise InputError(f"precision={precision.value!r} is {OF_BLOCKS}")
        dtype = number_type(precision)
        self.precision = precision
        self.flat.store(storage_of(precision))
        if self._has_contents:
            self.flat.refresh()
        self.workspace.activation_dtype = self.workspace.dtype if dtype is None else dtype
        return precision

    def use_products(self, products: str | None) -> None:
        """Makes passes multiply float32 by "numba", our own kernels (or None), or NumPy's "blas".

        Counts for the precision in use: call it after `use_precision`. InputError for "blas" with
        the NumPy backend, which has no other products.
        """
        self.products = backends.resolve_products(products, self.backend)
        if self.backend == "numba":
            is_float32 = self.precision == Precision.FLOAT32  # the only type that BLAS has
            self.workspace.use_blas(self.products == "blas" and is_float32)

    def check_trains(self) -> None:
        """Raises InputError if nothing of the model is trained: it was loaded with a precision."""
        if not self.flat.trained:
            raise InputError(
                "the model was loaded with a precision and only runs: load it without `precision` "
                "to train it"
            )

    def freeze(self, names: str | None) -> None:
        """Keeps the weights of some parts: "embedding,blocks.0-1,head"; None: trains all.

        What is frozen has no gradient, and below the first part that is trained there is no
        backward pass. Clears the gradients if that changes. InputError if the model does not have
        such a part, or would have nothing to train.
        """
        frozen = frozen_parts(check_type("freeze", names, str, None), self.config)
        self.check_trains()
        if frozen == self._frozen:
            return
        self.flat.freeze(frozen_numbers(frozen, self.network.parts, self.flat.specs))
        self.use_recompute(self.recompute_plan)
        self.forget_recorded()
        self._frozen = frozen  # last: after an interrupt it is done again

    @property
    def frozen(self) -> str | None:
        """The parts that are frozen, as `freeze` takes them."""
        return ",".join(sorted(self._frozen or ())) or None

    def use_recompute(self, plan: RecomputePlan) -> None:
        """Makes training recompute activations as planned; the gradients stay the same bits."""
        self.recompute_plan = plan
        self.network.use_recompute(plan)

    use_checkpointing = use_recompute  # the public name

    def forward(self, ids: np.ndarray) -> np.ndarray:
        """ids (B, T) -> logits (B, T, V), a new array. Dropout is off.

        InputError if T exceeds block_size or an id is outside the vocabulary.
        """
        ids = checked_ids("ids", ids, self.config)
        V = self.config.vocab_size
        logits = np.empty((*ids.shape, V), self.workspace.dtype)
        for windows in micro_batches(ids, self.micro_batch_size):
            rows = logits[windows].reshape(-1, V)  # a view
            self.with_logits(ids[windows], functools.partial(np.copyto, rows))
        return logits

    def _logits(self, ids: np.ndarray, firsts: np.ndarray | None = None) -> np.ndarray:
        """ids, firsts (B, T) -> logits (B T, V), rented; layers keep what backward needs."""
        return self.network.head.forward(self.network.forward(ids, firsts))

    def with_logits(
        self,
        ids: np.ndarray,
        use: Callable[[np.ndarray], Result],
        firsts: np.ndarray | None = None,
    ) -> Result:
        """ids (B, T) -> use(logits), where logits (B T, V) are rented for the duration of the call.

        The whole batch goes through the model at once. Dropout is off.
        """
        ids, firsts = checked_ids("ids", ids, self.config), checked_firsts(firsts, ids.shape)

        def compute() -> Result:
            with self.workspace.profile("Forward"):
                logits = self._logits(ids, firsts)
            self.workspace.release_all_but({id(logits)})
            return use(logits)

        return self.workspace.one_pass(compute)

    def hidden(self, out: np.ndarray, ids: np.ndarray, firsts: np.ndarray | None = None) -> None:
        """ids (B, T) -> out (B T, C), what the head makes logits of. Writes out. Dropout is off."""
        ids, firsts = checked_ids("ids", ids, self.config), checked_firsts(firsts, ids.shape)
        self.workspace.one_pass(lambda: np.copyto(out, self.network.forward(ids, firsts)))

    def with_logits_of(
        self, hidden: np.ndarray, rows: slice, use: Callable[[np.ndarray], Result]
    ) -> Result:
        """hidden (B T, C), as `hidden` wrote it -> use(logits) of some rows, rented for the call.

        They are one of the blocks of rows that passes of this size have.
        """
        return self.workspace.one_pass(lambda: use(self.network.head.forward(hidden, rows)))

    def decode(self, ids: np.ndarray, cache: KeyValueCache) -> np.ndarray:
        """ids (B, T), the next tokens of the cache's sequences -> logits (B, V) after the last.

        A new array. Only the new tokens go through the model; the cache keeps what later ones
        need. Once it is full, positions continue and each token sees the cache's last ones; if they
        limit the context, the oldest quarter is dropped and the rest is fed again, from position 0
        on. InputError for ids outside the vocabulary, or another number of sequences.
        """
        check_type("cache", cache, KeyValueCache)
        ids = check_ids("ids", ids, self.config.vocab_size)
        limits = self.network.embedding.position.limits_context
        return cache.feed(ids, limits, functools.partial(self._decode, cache=cache))

    def _decode(self, ids: np.ndarray, cache: KeyValueCache) -> np.ndarray:
        """The next tokens, as many as fit or one -> logits (B, V), a new array."""

        def compute() -> np.ndarray:
            if self.backend == "numba":
                self.flat.in_groups(self.workspace.kernels)
            with self.workspace.profile("Forward"):
                # The first token has nothing in the cache to attend to: another pass.
                if ids.shape[1] > 1 or cache.start == 0:
                    return self._logits(ids).copy()
                key = self.workspace, self.flat.compute_address, cache.positions
                logits = cache.steps.repeat(self.workspace, key, (ids,))
                if logits is None:
                    with cache.steps.noting(self.workspace, key, (ids,)) as noted:
                        logits = noted.result = self._logits(*noted.inputs)
                return logits.copy()

        return self.workspace.one_pass(compute, cache=cache)

    def loss(self, ids: np.ndarray, targets: np.ndarray) -> float:
        """ids, targets (B, T) -> mean cross-entropy in nats per token. Dropout is off."""
        return float(self.losses(ids, targets).mean(dtype=np.float64))

    def losses(
        self,
        ids: np.ndarray,
        targets: np.ndarray,
        correct: np.ndarray | None = None,
        firsts: np.ndarray | None = None,
        weights: np.ndarray | None = None,
    ) -> np.ndarray:
        """ids, targets (B, T) -> cross-entropy of each token (B, T) in nats, a new array.

        If correct (B, T) is given, writes to it whether the target has the highest logit. `firsts`
        as in `loss_and_gradients`. With weights (B, T), targets that have none may be left out, as
        if their losses were 0 and none of them correct.
        """
        batch = CheckedBatch.of(self.config, ids, targets, weights, 1.0, firsts)
        losses = np.zeros(batch.ids.shape, self.workspace.dtype)
        right = np.zeros(batch.ids.shape, bool)

        def compute(windows: slice) -> None:
            part = batch.part(windows, selects_rows=True)
            with self.workspace.profile("Forward"):
                x = self.network.forward(part["ids"], part.get("firsts"), part.get("rows"))
            found = np.empty(len(x), losses.dtype)
            hits = None if correct is None else np.empty(len(x), bool)
            self.network.head.losses(found, x, part["targets"].reshape(-1), correct=hits)
            rows = part.get("rows", slice(None))
            losses[windows].reshape(-1)[rows] = found
            if hits is not None:
                right[windows].reshape(-1)[rows] = hits

        for windows in micro_batches(batch.ids, self.micro_batch_size):
            self.workspace.one_pass(functools.partial(compute, windows))
        if correct is not None:
            correct[...] = right
        return losses

    def loss_and_gradients(
        self,
        ids: np.ndarray,
        targets: np.ndarray,
        scale: float = 1.0,
        at: Pass | None = None,
        objective: Objective | None = None,
        weights: np.ndarray | None = None,
        divisor: float | None = None,
        firsts: np.ndarray | None = None,
        repeats_as: Hashable | None = None,
    ) -> float:
        """ids, targets (B, T) -> mean cross-entropy in nats per token; adds to the gradients.

        Adds the gradient of scale * loss. Dropout is on, with the mask of the pass `at`, or a new
        one at each call. An objective replaces the cross-entropy: it writes the losses and their
        gradient. If it only calls kernels, `repeats_as` may say what these are given besides the
        arrays of the pass: passes with the same value are repeated without calling the objective.

        With weights (B, T), one per target, the mean is weighted: the sum of weighted losses is
        divided by `divisor`, by default the sum of the weights. Without any weight it is 0. A
        weight below zero makes its target less likely; such weights may sum to anything, so they
        need a divisor.

        firsts (B, T), int32, are for windows of several documents: for each place the one where its
        document begins. Attention stays inside a document, and positions begin anew in it.
        """
        check_type("scale", scale, numbers.Real)
        self.check_trains()
        batch = CheckedBatch.of(self.config, ids, targets, weights, divisor, firsts)
        if at is None:
            at = Pass(self.passes)
            self.passes += 1
        total, unit = 0.0, scale / batch.divisor if batch.divisor else 0.0
        for windows in micro_batches(batch.ids, self.micro_batch_size):
            kernel = functools.partial(kernel_of, objective, windows) if objective else None
            part = batch.part(windows, selects_rows=objective is None)
            first_row = at.first_row + windows.start * batch.ids.shape[1]
            compute = functools.partial(self._learn, part, unit, kernel, repeats_as)
            total += self.workspace.one_pass(compute, at._replace(first_row=first_row))
        return total / batch.divisor if batch.divisor else 0.0

    def _learn(
        self,
        part: Mapping[str, np.ndarray],
        scale: float,
        kernel: Callable[[Inputs, slice], Kernel] | None,
        repeats_as: Hashable | None,
    ) -> float:
        """The arrays of a part of a batch -> the sum of its losses; adds scale * its gradients."""
        workspace, recorded, names = self.workspace, self._recorded, tuple(part)
        workspace.scale[...] = scale
        kind = self.flat.compute_address, self.recompute_plan.state, names, repeats_as
        inputs = tuple(part.values())
        if kernel and repeats_as is None:
            losses = self._add_gradients(names, inputs, kernel)
        elif (found := recorded.repeat(workspace, kind, inputs)) is not None:
            losses = found
        else:
            with recorded.noting(workspace, kind, inputs) as noted:
                losses = noted.result = self._add_gradients(names, noted.inputs, kernel)
        return float(losses.sum())  # in its own precision: converting takes a buffer

    def _add_gradients(
        self,
        names: tuple[str, ...],
        inputs: tuple[np.ndarray, ...],
        kernel: Callable[[Inputs, slice], Kernel] | None = None,
    ) -> np.ndarray:
        """inputs, the arrays of a part by these names -> its losses, rented; adds its gradients."""
        part, network = dict(zip(names, inputs, strict=True)), self.network
        with self.workspace.profile("Forward"):
            x = network.forward(part["ids"], part.get("firsts"), part.get("rows"))
        losses = self.workspace.rent_full_precision(*part["targets"].shape)
        flat = {name: part[name].reshape(-1) for name in ("targets", "weights") if name in part}
        of_rows = functools.partial(kernel, part) if kernel else None
        network.head.losses(losses.reshape(-1), x, kernel_of=of_rows, **flat)
        with self.workspace.profile("Backward"):
            network.backward(network.head.dx)
        return losses

    def forget_recorded(self, after: int = MIN_PASSES) -> None:
        """Drops the passes that are repeated without Python, and with them their arrays.

        From now on passes of a kind are repeated once there have been more than `after`.
        """
        self._recorded = RecordedPasses(after)

    def inspect(self, ids: np.ndarray, targets: np.ndarray | None = None) -> Inspection:
        """ids (B, T) -> attention, activations and logits of a pass, as copies.

        With targets (B, T) also losses and the gradients of their mean, of all parameters and
        activations. Dropout is off, and the whole batch goes through the model at once, with
        every activation kept. Neither `gradients` nor anything else of the model changes.

            print(inspection := model.inspect(ids, targets))
            inspection.attention[layer, 0, head]  # probabilities (T, T)
            inspection.activations["blocks.0.mlp"], inspection.gradients["final_norm.weight"]
        """
        return inspection.inspect(self, ids, targets)

    def save(
        self,
        path: str | PathLike[str],
        metadata: Mapping[str, str] | None = None,
        announce: Callable[[str], object] | None = None,
    ) -> None:
        """Writes parameters and config to a safetensors file, atomically.

        With an adapter only that, what it is, and which model it belongs to. `announce` gets the
        SHA-256 of the file before it takes the place of another.
        """
        loading.save(self, path, metadata or {}, announce)

    @classmethod
    def load(
        cls, path: str | PathLike[str], backend: str = "numba", precision: str | None = None
    ) -> "TransformerModel":
        """Reads the model that `save` wrote, or the one in the checkpoint of a run.

        See `smallmind.load` for precision. InputError if the file is anything else.
        """
        return loading.load(cls, path, backend, precision)

    @classmethod
    def from_tensors(
        cls,
        config: ModelConfig,
        tensors: dict[str, Any],
        source: str,
        backend: str = "numba",
        precision: str | None = None,
    ) -> "TransformerModel":
        """Builds a model with these parameters, arrays or as in a file: moved out of tensors.

        See `smallmind.load` for precision. InputError naming their source if they do not match
        config.
        """
        return loading.from_tensors(cls, config, tensors, source, backend, precision)

    @classmethod
    def unfilled(
        cls,
        config: ModelConfig,
        backend: str = "numba",
        precision: str | None = None,
        trains: bool = False,
        **options: Any,
    ) -> "TransformerModel":
        """Builds a model whose parameters are zeros, with these arguments besides its config.

        With a precision it only runs, unless it `trains`.
        """
        model, opened = cls.__new__(cls), backends.open_backend(backend)
        resolved = backends.resolve_precision(precision, opened.name) if precision else None
        options = {**ARGUMENTS, **options, "backend": opened}
        model._build(config, precision=resolved, trains=trains or not resolved, **options)
        return model
