"""The model's public interface: passes over batches, precision, files."""

import dataclasses
import functools
import inspect
import math
import numbers
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from os import PathLike
from typing import Any, ClassVar, NamedTuple

import numpy as np

from smallmind.checks import InputError, check_field, check_type, from_json, shown_value, suggesting
from smallmind.console import activity
from smallmind.console.table import Table, Tabular
from smallmind.files import safetensors
from smallmind.kernels.number_types import DTYPES
from smallmind.nn.backend import Backend, open_backend
from smallmind.nn.block import Block
from smallmind.nn.cache import REFED, KeyValueCache
from smallmind.nn.freezing import frozen_parts
from smallmind.nn.inspection import Inspection, Observer
from smallmind.nn.loading import Stored, read_tensor
from smallmind.nn.network import Network, declare_parameters
from smallmind.nn.parameters import GROUPS, Parameters, Role
from smallmind.nn.recompute import RecomputePlan
from smallmind.nn.recorded_passes import AFTER, RecordedPasses
from smallmind.nn.sizes import size_rows
from smallmind.nn.workspace import Kernel, Pass, Result, Workspace
from smallmind.parts import PRECISIONS
from smallmind.settings.config import (
    OF_BLOCKS,
    Adapter,
    ModelConfig,
    Precision,
    RunConfig,
    TrainingConfig,
    micro_batch_sizes,
)
from smallmind.settings.settings import from_saved
from smallmind.text.ids import check_ids
from smallmind.text.tokenizer import Tokenizer

FORMAT = "smallmind model 1"
CHECKPOINT_FORMAT = "smallmind checkpoint 1"
ADAPTER_FORMAT = "smallmind adapter 1"  # of a file with the parameters of an adapter alone
WEIGHTS = "model."  # with which the names of a checkpoint's parameters begin
# The arguments of a model besides the fields of its config.
OWN: dict[str, Any] = {
    **{"seed": 42, "backend": "numba", "dtype": np.float32},
    **{"freeze": None, "adapter": None},
}

COPIED = ("tokenizer_digest", "base", "passes", "micro_batch_size")  # attributes of a model's copy
# Called with the arguments of cross_entropy, preceded by the part of the batch that they belong to:
# Where weights are zero, the head computes only some rows: one of ROW_COUNTS numbers of them, if
# that is at most MOST_ROWS of all.
ROW_COUNTS, MOST_ROWS = 16, 0.8
# objective(part, losses, dlogits, logits, targets, scale), and weights if there are any.
Objective = Callable[..., None]


class Base(NamedTuple):
    """The model beside which an adapter is trained: where it is, and a digest of its weights."""

    path: str
    sha256: str


class Part(NamedTuple):
    """A part of a batch that an objective computes: windows, and rows of their tokens (B T,)."""

    windows: slice
    rows: slice


def weights(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a checkpoint -> those that are parameters, by their own names."""
    return {
        name.removeprefix(WEIGHTS): tensor
        for name, tensor in tensors.items()
        if name.startswith(WEIGHTS)
    }


def micro_batches(ids: np.ndarray, micro_batch_size: int | None) -> Iterator[slice]:
    """The parts of a batch, ids (B, T), that go through the model one after another.

    So memory does not grow with the batch. The order of all sums depends only on these sizes.
    """
    end = 0
    for size in activity.parts(micro_batch_sizes(len(ids), ids.shape[1], micro_batch_size)):
        start, end = end, end + size
        yield slice(start, end)


def resolve_precision(precision: str, backend: str) -> Precision:
    """Returns the precision, with AUTO resolved. InputError for 16 bits with the NumPy backend."""
    if check_type("precision", precision, str) not in tuple(Precision):
        raise InputError(f"precision={precision!r} must be one of {', '.join(Precision)}")
    precision = Precision(precision)
    if precision == Precision.AUTO:
        if backend == "numpy":
            return Precision.FLOAT32
        from smallmind.kernels.codegen.isa import ISA

        return Precision.BFLOAT16 if ISA.fast_bfloat16 else Precision.FLOAT32
    if precision.of_trained != Precision.FLOAT32 and backend == "numpy":
        raise InputError(f"precision={precision.value!r} needs backend='numba'")
    return precision


def _number_type(precision: Precision) -> Any:
    """The type in which numbers are stored; None: float32, or whatever type the model has."""
    return DTYPES[PRECISIONS[precision].name] if precision.has_16_bits else None


def _storage(precision: Precision) -> dict[Role, Any]:
    """The number types of parameters by role; None as in `_number_type`."""
    storage = dict.fromkeys(Role, _number_type(precision))
    if precision.has_blocks:
        storage |= dict.fromkeys(GROUPS, DTYPES[precision])
    return storage


def faster_precision(precision: Precision, backend: str) -> Precision | None:
    """The precision in which steps are faster on this CPU than in this one of 16 bits, if known.

    float16 is always converted to be multiplied, bfloat16 where the CPU has no fast product of it.
    """
    if not precision.has_16_bits or backend == "numpy":
        return None
    from smallmind.kernels.codegen.isa import ISA

    fastest = resolve_precision(Precision.AUTO, backend)
    is_known = precision == Precision.FLOAT16 or not ISA.quads  # not measured on Apple's cores
    return fastest if is_known and precision != fastest else None


def resolve_products(products: str | None, backend: str) -> str:
    """Returns the products, by default "numba". InputError for "blas" with the NumPy backend."""
    if products == "blas" and backend == "numpy":
        raise InputError(
            "products='blas' needs backend='numba': backend='numpy' uses the BLAS anyway"
        )
    return products or "numba"


def _signature() -> inspect.Signature:
    """The arguments of TransformerModel: fields of ModelConfig, and those of OWN.

    Those that may be positional are listed; all other fields of ModelConfig are keyword-only.
    """
    required = ("vocab_size", "block_size", "n_embd", "n_layer", "n_head")
    optional = ("dropout", "seed", "tie_weights", "bias", "backend", "dtype")
    fields = {field.name: field for field in dataclasses.fields(ModelConfig)}
    defaults = {name: field.default for name, field in fields.items() if name not in required}
    defaults |= OWN
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in required]
    parameters += [inspect.Parameter(name, kind, default=defaults[name]) for name in optional]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in defaults.items()
        if name not in optional
    ]
    return inspect.Signature(parameters)


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
        own = dict(OWN)
        if arguments and isinstance(arguments[0], ModelConfig):
            if len(arguments) > 1:
                raise TypeError("after a ModelConfig, give seed, backend and dtype by name")
            config, own = arguments[0], {**own, **named}
            if fields := {name: value for name, value in named.items() if name not in OWN}:
                config = dataclasses.replace(config, **fields)
        else:
            settings = self.__signature__.bind(*arguments, **named).arguments
            own |= {name: settings.pop(name) for name in OWN if name in settings}
            config = ModelConfig(**settings)
        backend = own["backend"]
        opened = backend if isinstance(backend, Backend) else open_backend(backend)
        seed = check_field(RunConfig, "seed", own["seed"])
        adapter = check_type("adapter", own["adapter"], Adapter, None)
        self._build(config, seed, opened, own["dtype"], own["freeze"], adapter)
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
        is_plain = backend.name == "numpy" and np.dtype(dtype) == np.float64
        if np.dtype(dtype) != np.float32 and not is_plain:
            raise InputError(f"dtype={np.dtype(dtype)} needs backend='numpy'; numba is float32")
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
            self.flat.storage = _storage(precision)
        self.flat.allocate(dtype, backend.zeros, backend.computes)
        # Digest of the tokenizer it was trained with, or None if unknown.
        self.tokenizer_digest: str | None = None
        self.base: Base | None = None  # of its adapter, if that is known
        self.passes = 0  # of training so far that were not given a number
        self.micro_batch_size: int | None = None  # windows; None: about 2048 tokens
        self.forget_recorded()
        self.products = "numba"
        self.use_precision(precision or Precision.FLOAT32)

    def __getstate__(self) -> dict[str, Any]:
        """Returns what copies and pickles are made of: arrays and settings, no memory of passes."""
        flat = self.flat
        return {
            "arguments": {
                **{"config": self.config, "seed": self.seed, "dtype": self.workspace.dtype},
                **{"freeze": self.frozen, "adapter": self.adapter, "precision": self.precision},
                "trains": bool(flat.trained),
            },
            "backend": self.backend,
            "values": {spec.name: np.array(flat.own(spec.name)) for spec in flat.specs},
            "gradient": flat.grad.copy(),
            "plan": self.recompute_plan,
            "products": self.products,
            "others": {name: getattr(self, name) for name in COPIED},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._build(backend=open_backend(state["backend"]), **state["arguments"])
        for name, values in state["values"].items():
            self.flat.own(name).view(np.ndarray)[...] = values
        self.flat.grad[:] = state["gradient"]
        self.flat.refresh()
        self.use_recompute(state["plan"])
        self.use_products(state["products"])
        for name, value in state["others"].items():
            setattr(self, name, value)

    def table(self) -> Table:
        """Its layers, the shapes of their matrices and their numbers of parameters."""
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

    @property
    def blocks(self) -> list[Block]:
        """The transformer blocks, in order."""
        return self.network.blocks

    @property
    def instruction_set(self) -> str:
        """The machine's influence on the bits of results: "AVX2" or "NumPy on x86_64"."""
        if self.backend == "numpy":
            return f"NumPy on {platform.machine()}"
        from smallmind.kernels.codegen.isa import ISA

        if self.products == "blas" and self.precision == Precision.FLOAT32:
            return f"{ISA.name} with NumPy's BLAS"
        if not ISA.pairs or self.precision != Precision.BFLOAT16:
            return ISA.name
        return f"{ISA.name} with {'AMX' if ISA.matrix_unit else 'bfloat16'}"

    def use_precision(self, precision: Precision) -> Precision:
        """Makes passes store weights and activations in precision -> precision, AUTO resolved.

        `parameters` and `gradients` stay float32. In 16 bits passes read a rounded copy, which
        AdamW keeps up to date: call `flat.refresh()` after writing to the parameters by hand. What
        is frozen is rounded itself. In q8_0 and q4_0 only that is stored in blocks of integers,
        where rows are multiples of 32, and everything else stays float32. InputError for 16 bits
        with the NumPy backend, and for blocks if nothing is frozen.
        """
        precision = resolve_precision(precision, self.backend)
        if precision.has_blocks and not self.flat.frozen:
            raise InputError(f"precision={precision.value!r} is {OF_BLOCKS}")
        dtype = _number_type(precision)
        self.precision = precision
        self.flat.store(_storage(precision))
        if self._has_contents:
            self.flat.refresh()
        self.workspace.activation_dtype = self.workspace.dtype if dtype is None else dtype
        return precision

    def use_products(self, products: str | None) -> None:
        """Makes passes multiply float32 by "numba", our own kernels (or None), or NumPy's "blas".

        Counts for the precision in use: call it after `use_precision`. InputError for "blas" with
        the NumPy backend, which has no other products.
        """
        products = check_field(TrainingConfig, "products", products)
        self.products = resolve_products(products, self.backend)
        if self.backend == "numba":
            is_float32 = self.precision == Precision.FLOAT32  # the only type that BLAS has
            self.workspace.use_blas(self.products == "blas" and is_float32)

    def check_trains(self) -> None:
        """InputError if nothing of the model is trained: it was loaded with a precision."""
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
        numbers = {number for name in frozen for number in self.network.parts[name]}
        if self.adapter:
            specs = enumerate(self.flat.specs)
            numbers |= {number for number, spec in specs if not spec.is_adapter}
        if self.adapter and not any(
            spec.is_adapter for i, spec in enumerate(self.flat.specs) if i not in numbers
        ):
            raise InputError("the adapter is on no part that is trained; choose other parts")
        self.flat.freeze(numbers)
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
        ids = self._checked("ids", ids)
        V = self.config.vocab_size
        logits = np.empty((*ids.shape, V), self.workspace.dtype)
        for windows in micro_batches(ids, self.micro_batch_size):
            rows = logits[windows].reshape(-1, V)  # a view
            self.with_logits(ids[windows], functools.partial(np.copyto, rows))
        return logits

    def with_logits(
        self,
        ids: np.ndarray,
        use: Callable[[np.ndarray], Result],
        firsts: np.ndarray | None = None,
    ) -> Result:
        """ids (B, T) -> use(logits), where logits (B T, V) are rented for the duration of the call.

        The whole batch goes through the model at once. Dropout is off.
        """
        ids, firsts = self._checked("ids", ids), _checked_firsts(firsts, ids.shape)

        def compute() -> Result:
            with self.workspace.profile("Forward"):
                logits = self.network.forward(ids, firsts)
            self.workspace.release_all_but({id(logits)})
            return use(logits)

        return self.workspace.one_pass(compute)

    def hidden(self, out: np.ndarray, ids: np.ndarray, firsts: np.ndarray | None = None) -> None:
        """ids (B, T) -> out (B T, C), what the head makes logits of. Writes out. Dropout is off."""
        ids, firsts = self._checked("ids", ids), _checked_firsts(firsts, ids.shape)

        def compute() -> None:
            self.network.forward_hidden(ids, firsts)
            np.copyto(out, self.network.normed)

        self.workspace.one_pass(compute)

    def with_logits_of(
        self, hidden: np.ndarray, rows: slice, use: Callable[[np.ndarray], Result]
    ) -> Result:
        """hidden (B T, C), as `hidden` wrote it -> use(logits) of some rows, rented for the call.

        They are one of the blocks of rows that passes of this size have.
        """

        def compute() -> Result:
            self.network.normed = hidden
            return use(self.network.head_forward(rows))

        return self.workspace.one_pass(compute)

    def decode(self, ids: np.ndarray, cache: KeyValueCache) -> np.ndarray:
        """ids (B, T), the next tokens of the cache's sequences -> logits (B, V) after the last.

        A new array. Only the new tokens go through the model; the cache keeps what later ones
        need. Once it is full, positions continue and each token sees the cache's last ones; if they
        limit the context, the oldest quarter is dropped and the rest is fed again, from position 0
        on. InputError for ids outside the vocabulary, or another number of sequences.
        """
        check_type("cache", cache, KeyValueCache)
        ids = check_ids("ids", ids, self.config.vocab_size)
        if ids.ndim != 2 or ids.size == 0 or len(ids) != cache.batch:
            raise InputError(
                f"ids has shape {ids.shape}; it must be ({cache.batch}, T), as many sequences as "
                "in the cache"
            )
        ids, begin = np.require(ids, np.int32, ["C"]), 0
        while begin < ids.shape[1]:
            is_limited = self.network.embedding.position.limits_context
            if is_limited and cache.start >= cache.length:
                for row in np.flatnonzero(cache.starts >= cache.length).tolist():
                    with cache.only(row):
                        self._feed_again(cache)
            count = min(ids.shape[1] - begin, max(1, cache.length - cache.start))
            logits = self._decode(np.ascontiguousarray(ids[:, begin : begin + count]), cache)
            begin += count
        return logits

    def _feed_again(self, cache: KeyValueCache) -> None:
        """Makes room in a cache with learned positions, which has none left."""
        kept = cache.last(cache.length - max(1, cache.length // REFED))
        cache.clear()
        if kept.size:
            self._decode(kept, cache)

    def _decode(self, ids: np.ndarray, cache: KeyValueCache) -> np.ndarray:
        """The next tokens, as many as fit or one -> logits (B, V), a new array."""

        def compute() -> np.ndarray:
            with self.workspace.profile("Forward"):
                # The first token has nothing in the cache to attend to: another pass.
                if ids.shape[1] > 1 or cache.start == 0:
                    return self.network.decode(ids).copy()
                key = self.workspace, self.flat.compute_address, cache.positions
                logits = cache.steps.repeat(self.workspace, key, (ids,))
                if logits is None:
                    with cache.steps.noting(self.workspace, key, (ids,)) as noted:
                        logits = noted.result = self.network.decode(*noted.inputs)
                return logits.copy()

        logits = self.workspace.one_pass(compute, cache=cache)
        cache.append(ids)
        return logits

    def loss(self, ids: np.ndarray, targets: np.ndarray) -> float:
        """ids, targets (B, T) -> mean cross-entropy in nats per token. Dropout is off."""
        return float(self.losses(ids, targets).mean(dtype=np.float64))

    def losses(
        self,
        ids: np.ndarray,
        targets: np.ndarray,
        correct: np.ndarray | None = None,
        firsts: np.ndarray | None = None,
    ) -> np.ndarray:
        """ids, targets (B, T) -> cross-entropy of each token (B, T) in nats, a new array.

        If correct (B, T) is given, writes to it whether the target has the highest logit. `firsts`
        as in `loss_and_gradients`.
        """
        ids, targets = self._checked_pair(ids, targets)
        firsts = _checked_firsts(firsts, ids.shape)
        losses = np.empty(ids.shape, self.workspace.dtype)
        network, workspace = self.network, self.workspace

        def compute(windows: slice) -> None:
            own = None if firsts is None else firsts[windows]
            right = targets[windows].reshape(-1)
            flat = losses[windows].reshape(-1)  # a view
            found = None if correct is None else correct[windows].reshape(-1)
            with workspace.profile("Forward"):
                network.forward_hidden(ids[windows], own)
            for block in network.row_blocks:
                with workspace.profile("Forward"):
                    logits = network.head_forward(block)
                if found is not None:
                    found[block] = logits.argmax(axis=1) == right[block]
                with workspace.profile("Loss"):
                    logits = self._cross_entropy(flat[block], logits, right[block])
                workspace.release(logits)
            if correct is not None and found is not None:
                correct[windows] = found.reshape(correct[windows].shape)

        for windows in micro_batches(ids, self.micro_batch_size):
            self.workspace.one_pass(functools.partial(compute, windows))
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
    ) -> float:
        """ids, targets (B, T) -> mean cross-entropy in nats per token; adds to the gradients.

        Adds the gradient of scale * loss. Dropout is on, with the mask of the pass `at`, or a new
        one at each call. An objective replaces the cross-entropy: it writes the losses and their
        gradient.

        With weights (B, T), one per target, the mean is weighted: the sum of weighted losses is
        divided by `divisor`, by default the sum of the weights. Without any weight it is 0. A
        weight below zero makes its target less likely; such weights may sum to anything, so they
        need a divisor.

        firsts (B, T), int32, are for windows of several documents: for each place the one where its
        document begins. Attention stays inside a document, and positions begin anew in it.
        """
        check_type("scale", scale, numbers.Real)
        self.check_trains()
        ids, targets = self._checked_pair(ids, targets)
        if weights is not None:
            weights = _checked_weights(weights, ids.shape)
            if divisor is None:
                if (weights < 0).any():
                    raise InputError("weights below zero need a divisor, such as targets.size")
                divisor = float(weights.sum(dtype=np.float64))
        divisor = targets.size if divisor is None else divisor
        workspace, recorded = self.workspace, self._recorded
        given = {"weights": weights, "firsts": _checked_firsts(firsts, ids.shape)}
        kind = self.flat.compute_address, self.recompute_plan.state

        def compute(windows: slice) -> float:
            workspace.scale[...] = scale / divisor if divisor else 0.0
            optional = {name: x[windows] for name, x in given.items() if x is not None}
            batch = ids[windows], targets[windows]
            rows = None
            if weights is not None and not objective:
                rows = learned_rows(optional["weights"])
            if rows is not None:  # the head computes nothing else
                batch = batch[0], batch[1].reshape(-1)[rows]
                optional |= {"weights": optional["weights"].reshape(-1)[rows], "rows": rows}
            names = tuple(optional)
            inputs = (*batch, *optional.values())
            if objective:
                own = functools.partial(_objective_of, objective, windows)
                losses = self._add_gradients(names, *inputs, objective=own)
            elif (found := recorded.repeat(workspace, (kind, names), inputs)) is not None:
                losses = found
            else:
                with recorded.noting(workspace, (kind, names), inputs) as noted:
                    losses = noted.result = self._add_gradients(names, *noted.inputs)
            return float(losses.sum())  # in its own precision: converting takes a buffer

        if at is None:
            at = Pass(self.passes)
            self.passes += 1
        total = 0.0
        for windows in micro_batches(ids, self.micro_batch_size):
            first_row = at.first_row + windows.start * ids.shape[1]
            part = at._replace(first_row=first_row)
            total += workspace.one_pass(functools.partial(compute, windows), part)
        return total / divisor if divisor else 0.0

    def forget_recorded(self, after: int = AFTER) -> None:
        """Drops the passes that are repeated without Python, and with them their arrays.

        From now on passes of a kind are repeated once there have been more than `after`.
        """
        self._recorded = RecordedPasses(after)

    def _add_gradients(
        self,
        names: tuple[str, ...],
        ids: np.ndarray,
        targets: np.ndarray,
        *others: np.ndarray,
        objective: Callable[[slice], Kernel] | None = None,
    ) -> np.ndarray:
        """ids, targets and others (B, T), by these names -> weighted losses (B, T), rented.

        With rows (N,), targets and weights are those of these tokens, and so are the losses. Adds
        their gradients, times the scale of the workspace.
        """
        optional = dict(zip(names, others, strict=True))
        network, workspace, scale = self.network, self.workspace, self.workspace.scale
        with workspace.profile("Forward"):
            network.forward_hidden(ids, optional.get("firsts"), optional.get("rows"))
        losses = workspace.rent_full_precision(*targets.shape)
        flat, targets, weights = losses.reshape(-1), targets.reshape(-1), optional.get("weights")
        weights = None if weights is None else weights.reshape(-1)
        for block in network.row_blocks:
            with workspace.profile("Forward"):
                logits = network.head_forward(block)
            with workspace.profile("Loss"):
                part = targets[block]
                own = None if weights is None else weights[block]
                kernel = objective and objective(block)
                dlogits = self._cross_entropy(flat[block], logits, part, scale, kernel, own)
            with workspace.profile("Backward"):
                network.head_backward(dlogits, block)
        with workspace.profile("Backward"):
            network.backward_hidden()
        return losses

    def inspect(self, ids: np.ndarray, targets: np.ndarray | None = None) -> Inspection:
        """ids (B, T) -> attention, activations and logits of a pass, as copies.

        With targets (B, T) also losses and the gradients of their mean, of all parameters and
        activations. Dropout is off, and the whole batch goes through the model at once, with
        every activation kept. Neither `gradients` nor anything else of the model changes.

            print(inspection := model.inspect(ids, targets))
            inspection.attention[layer, 0, head]  # probabilities (T, T)
            inspection.activations["blocks.0.mlp"], inspection.gradients["final_norm.weight"]
        """
        if targets is None:
            ids = self._checked("ids", ids)
        else:
            self.check_trains()
            ids, targets = self._checked_pair(ids, targets)
        observer = Observer(self.workspace, ids.shape)

        def compute() -> Inspection:
            workspace, losses, gradients = self.workspace, None, {}
            with workspace.wrapped_kernels(observer.observed), self.network.without_recompute():
                logits = self.network.forward(ids)
                kept = np.array(logits).reshape(*ids.shape, -1)
                if targets is not None:
                    losses = np.empty(ids.shape, workspace.dtype)
                    dlogits = self._cross_entropy(losses, logits, targets, 1 / targets.size)
                    with self.flat.other_gradients():
                        self.network.backward(dlogits)
                        gradients = {name: x.copy() for name, x in self.gradients.items()}
            observed = np.stack(observer.attention), observer.activations
            return Inspection(ids.copy(), kept, *observed, losses, gradients, observer.gradients)

        at = None if targets is None else Pass(self.passes, drops=False)
        return self.workspace.one_pass(compute, at)

    def zero_gradients(self) -> None:
        """Sets all gradients to zero."""
        self.flat.grad[:] = 0

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
        config = safetensors.to_json(dataclasses.asdict(self.config))
        own, parameters = {"format": FORMAT, "config": config}, self.parameters
        if self.adapter:
            own |= {"format": ADAPTER_FORMAT, "adapter": safetensors.to_json(self.adapter_facts())}
            parameters = {name: parameters[name] for name in self.flat.kept}
        safetensors.write(path, parameters, {**own, **(metadata or {})}, announce)

    def adapter_facts(self) -> dict[str, Any] | None:
        """The adapter and its base, as files keep them; None without one."""
        if not self.adapter:
            return None
        return {**self.adapter._asdict(), "base": self.base and self.base._asdict()}

    @classmethod
    def load(
        cls, path: str | PathLike[str], backend: str = "numba", precision: str | None = None
    ) -> "TransformerModel":
        """The model that `save` wrote, or the one in the checkpoint of a run.

        See `smallmind.load` for precision. InputError if the file is anything else.
        """
        check_type("path", path, str, os.PathLike)
        with safetensors.streaming(path) as (tensors, metadata):
            # Files of earlier versions have no format.
            found = metadata.get("format", FORMAT)
            is_adapter = found == ADAPTER_FORMAT or (
                found == CHECKPOINT_FORMAT and _has_adapter(metadata)
            )
            if is_adapter:
                raise InputError(
                    f"{path} holds an adapter alone; smallmind.load reads it with its base"
                )
            if found not in (FORMAT, CHECKPOINT_FORMAT):
                raise InputError(f"{path} is {shown_value(found)}; this version reads {FORMAT!r}")
            try:
                tokenizer = metadata.get("tokenizer")
                if found == FORMAT:
                    saved = from_json(metadata["config"])
                else:
                    state, tensors = from_json(metadata["state"]), weights(tensors)
                    saved = state["model"]
                    if tokenizer is None:  # earlier versions kept it in the state
                        tokenizer = safetensors.to_json(state["tokenizer"])
                config = from_saved(ModelConfig, saved)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise InputError(f"{path} is not a model saved by smallmind: {error}") from None
            model = cls.from_tensors(config, dict(tensors), os.fspath(path), backend, precision)
        with suppress(KeyError, TypeError, ValueError):  # the model computes without it
            model.tokenizer_digest = tokenizer and Tokenizer.from_saved(tokenizer).digest
        return model

    @classmethod
    def from_tensors(
        cls,
        config: ModelConfig,
        tensors: dict[str, Any],
        source: str,
        backend: str = "numba",
        precision: str | None = None,
    ) -> "TransformerModel":
        """A model with these parameters, arrays or as in a file, which are moved out of tensors.

        See `smallmind.load` for precision. InputError naming their source if they do not match
        config.
        """
        # Before anything is allocated: a wrong config may ask for any amount of memory.
        shapes = {name: value.shape for name, value in tensors.items()}
        if config.n_layer > len(shapes) or shapes != declare_parameters(config).shapes:
            raise InputError(f"{source} does not hold the parameters that its config describes")
        model = cls.unfilled(config, backend, precision)
        for name in list(tensors):
            value = tensors.pop(name)  # freed once copied: the weights never exist twice
            if value.dtype != np.float32:
                raise InputError(f"{source}: {name} is not finite float32")
            if isinstance(value, np.ndarray):
                stored = Stored.of(value)
            else:
                stored = Stored(value.shape, value.dtype, value.read_rows)
            place = model.flat.own(name)
            read_tensor(model.workspace.kernels, place, stored, f"{source}: {name}")
        model.flat.refresh()
        return model

    @classmethod
    def unfilled(
        cls,
        config: ModelConfig,
        backend: str = "numba",
        precision: str | None = None,
        trains: bool = False,
        **own: Any,
    ) -> "TransformerModel":
        """A model whose parameters are zeros, made with these arguments besides its config.

        With a precision it only runs, unless it `trains`.
        """
        model, opened = cls.__new__(cls), open_backend(backend)
        resolved = resolve_precision(precision, opened.name) if precision else None
        own = {"seed": OWN["seed"], "dtype": np.float32, "freeze": None, "adapter": None, **own}
        model._build(
            config, backend=opened, precision=resolved, trains=trains or not resolved, **own
        )
        return model

    def _cross_entropy(
        self,
        losses: np.ndarray,
        logits: np.ndarray,
        targets: np.ndarray,
        scale: float | np.ndarray = 1.0,
        kernel: Kernel | None = None,
        weights: np.ndarray | None = None,
    ) -> np.ndarray:
        """logits (B T, V), targets (B, T) -> dlogits (B T, V), the gradient; writes losses (B, T).

        dlogits overwrites logits or, if gradients have 16 bits, is rented and logits are released.
        A kernel replaces cross_entropy.
        """
        workspace = self.workspace
        in_place = workspace.activation_dtype is workspace.dtype
        dlogits = logits if in_place else workspace.rent(*logits.shape)
        kernels = workspace.kernels_for("loss")
        kernel = kernel or kernels.cross_entropy
        weighted = () if weights is None else (weights.reshape(-1),)
        kernel(losses.reshape(-1), dlogits, logits, targets.reshape(-1), scale, *weighted)
        if not in_place:
            workspace.release(logits)
        return dlogits

    def _checked(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Returns ids as kernels take them: C-contiguous int32 (B, T), in the vocabulary."""
        ids = check_ids(name, ids, self.config.vocab_size)
        if ids.ndim != 2 or ids.size == 0:
            raise InputError(f"{name} has shape {ids.shape}; it must be (B, T), not empty")
        if ids.shape[1] > self.config.block_size:
            raise InputError(
                f"{ids.shape[1]} tokens are more than block_size={self.config.block_size}"
            )
        ids = np.ascontiguousarray(ids, np.int32)  # in a third of the time of np.require
        return ids if ids.flags.writeable else ids.copy()

    def _checked_pair(self, ids: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids, targets = self._checked("ids", ids), self._checked("targets", targets)
        if ids.shape != targets.shape:
            raise InputError(f"targets have shape {targets.shape}, ids {ids.shape}")
        return ids, targets


def _has_adapter(metadata: Mapping[str, str]) -> bool:
    """True if the state of a checkpoint is that of an adapter."""
    with suppress(AttributeError, KeyError, ValueError):
        return from_json(metadata["state"]).get("adapter") is not None
    return False


def _objective_of(objective: Objective, windows: slice, rows: slice) -> Kernel:
    """The kernel that an objective is for a part of the batch."""
    return functools.partial(objective, Part(windows, rows))


def _checked_weights(weights: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """weights, one for each target -> float32. InputError if they are not."""
    weights = np.ascontiguousarray(check_type("weights", weights, np.ndarray), np.float32)
    if weights.shape != shape:
        raise InputError(f"weights {weights.shape} must have the shape of ids, {shape}")
    if not np.isfinite(weights).all():
        raise InputError("weights must be finite numbers")
    return weights


def learned_rows(weights: np.ndarray) -> np.ndarray | None:
    """weights (B, T) -> the tokens (N,) whose targets have any, by number, or None for all.

    And a few others, so that N is one of few numbers: passes of the same sizes are repeated.
    """
    flat = weights.reshape(-1)
    learned = np.flatnonzero(flat)
    step = math.ceil(len(flat) / ROW_COUNTS)
    count = step * max(1, math.ceil(len(learned) / step))
    if count > MOST_ROWS * len(flat):
        return None
    others = np.flatnonzero(flat == 0)[: count - len(learned)]
    return np.sort(np.concatenate([learned, others])).astype(np.int32)


def _checked_firsts(firsts: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray | None:
    """Where the document of each place begins, as int32. InputError if that is not so."""
    if firsts is None:
        return None
    check_type("firsts", firsts, np.ndarray)
    if firsts.shape != shape or firsts.dtype.kind not in "iu":
        raise InputError(
            f"firsts {firsts.shape} of {firsts.dtype} must be whole numbers in the shape of ids, "
            f"{shape}"
        )
    # Kernels look only at the first places of some queries: anything else would be silently wrong.
    continues = firsts[:, 1:] == firsts[:, :-1]
    begins = firsts[:, 1:] == np.arange(1, shape[1], dtype=np.int32)
    if firsts[:, 0].any() or not (continues | begins).all():
        raise InputError(
            "firsts must be 0 at the first place, and then as before or, where another document "
            "begins, the place itself"
        )
    return np.ascontiguousarray(firsts, np.int32)
