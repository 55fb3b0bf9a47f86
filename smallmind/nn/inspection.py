"""A look inside a model: attention, activations and gradients of one batch, as copies."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import numpy as np

from smallmind.charts.heat_map import heat_map
from smallmind.charts.svg import Svg
from smallmind.checks import InputError, check_type, count_of
from smallmind.console.table import Table, Tabular
from smallmind.kernels.description import described
from smallmind.kernels.number_types import to_float32
from smallmind.kernels.reference import attention_probabilities, split_heads
from smallmind.nn.batch import CheckedBatch, checked_ids
from smallmind.nn.workspace import Kernel, Pass, Workspace


@dataclass(frozen=True, repr=False, eq=False)
class Inspection(Tabular):
    """The result of `TransformerModel.inspect`, all copies in float32 or float64.

    `attention[l, b, h, t]` are the probabilities with which query t of head h looks at each key.
    `activations` are what each layer wrote, by the name of the layer: a norm its result,
    `blocks.0.attention.qkv` a matrix of all queries, keys and values, `blocks.0.attention.query`,
    `.key` and `.value` those that attention gets, `blocks.0.attention` its heads side by side,
    `blocks.0.mlp.expansion` the preactivation, `blocks.0.mlp` the activation; a projection writes
    the residual stream, to which it has added. `gradients` of the mean loss are by the name of the
    parameter, `activation_gradients` by that of the activation.
    """

    ids: np.ndarray  # (B, T)
    logits: np.ndarray  # (B, T, V)
    attention: np.ndarray  # (L, B, H, T, T)
    activations: Mapping[str, np.ndarray]  # (B, T, channels), queries, keys, values (B, H, T, D)
    # Only with targets:
    losses: np.ndarray | None = None  # (B, T), in nats
    gradients: Mapping[str, np.ndarray] = field(default_factory=dict)
    activation_gradients: Mapping[str, np.ndarray] = field(default_factory=dict)

    def table(self) -> Table:
        """Returns the name, shape and size of each activation, and the size of its gradient."""
        (B, T), (L, _, H) = self.ids.shape, self.attention.shape[:3]
        title = f"Inspection of {B} x {count_of(T, 'token')}: {L} x {count_of(H, 'head')}"
        heads = ["activation", "shape", "root mean square"]
        if self.losses is not None:
            title += f", loss {self.losses.mean():.4f} nats per token"
            heads.append("of its gradient")
        rows = []
        for name, value in self.activations.items():
            row = [name, " x ".join(map(str, value.shape)), _root_mean_square(value)]
            if self.losses is not None:
                gradient = self.activation_gradients.get(name)  # a layer may use no kernels
                row.append("" if gradient is None else _root_mean_square(gradient))
            rows.append(row)
        return Table(title, rows, heads, "<<>>"[: len(heads)])

    def attention_svg(
        self, layer: int, head: int, batch: int = 0, tokens: Sequence[str] | None = None
    ) -> Svg:
        """Returns a heat map of one head: a row per query, a column per key, dark where it looks.

        A notebook shows it, and as a string it is SVG for a file. Each cell shows its probability
        under the pointer, with `tokens` (T of them) what it is between. The shade is the square
        root of the probability. In long windows each cell is the largest of several probabilities.
        InputError for a layer or head that is not there.
        """
        indices = {"layer": layer, "batch": batch, "head": head}
        for (name, index), size in zip(indices.items(), self.attention.shape, strict=False):
            if not 0 <= check_type(name, index, int) < size:
                raise InputError(f"{name}={index} must be at least 0 and below {size}")
        T = self.ids.shape[1]
        if tokens is not None and len(tokens) != T:
            raise InputError(f"{len(tokens)} tokens are not {T}, one for each position")
        names = [f"{t}" if tokens is None else f"{t} {tokens[t]!r}" for t in range(T)]
        title = f"Layer {layer}, head {head}: where each query (row) looks"
        p = self.attention[layer, batch, head].tolist()
        return heat_map(title, p, names, names, ("query", "key"))


def _root_mean_square(values: np.ndarray) -> str:
    return f"{np.sqrt(np.square(values, dtype=np.float64).mean()):.3g}"


class Observer:
    """Copies what the kernels of one pass write, by the names of the layers that call them."""

    def __init__(self, workspace: Workspace, shape: tuple[int, ...]) -> None:
        self.workspace = workspace
        self.shape = shape  # (B, T)
        self.attention: list[np.ndarray] = []
        self.activations: dict[str, np.ndarray] = {}
        self.gradients: dict[str, np.ndarray] = {}

    def observed(self, name: str, kernel: Kernel) -> Kernel:
        """A kernel -> the same, whose results are copied. No block may be recomputed."""
        names = list(signature(kernel).parameters)

        @functools.wraps(kernel)
        def copied(*positional: Any, **named: Any) -> Any:
            arguments = dict(zip(names, positional, strict=False)) | named
            is_backward = self.workspace.direction == "backward"
            if is_backward:
                # The gradient of what the layer wrote: some kernels overwrite it.
                gradient = arguments.get(described(name).gradient, arguments.get("dout"))
                self._keep(self.gradients, gradient, arguments)
            result = kernel(*positional, **named)
            if name in OBSERVED:
                OBSERVED[name](self, arguments)
            elif not is_backward and described(name).is_activation:
                self._keep(self.activations, arguments.get("out", arguments.get("y")), arguments)
            return result

        return copied

    def _keep(self, kept: dict[str, np.ndarray], rows: Any, arguments: dict[str, Any]) -> None:
        """Copies rows (B T, W) as (B, T, W), or only the columns that the kernel is for."""
        if rows is None:
            return
        if "first" in arguments:
            rows = rows[:, arguments["first"] : arguments["first"] + arguments["x"].shape[1]]
        kept[self.workspace.layer] = np.array(to_float32(rows)).reshape(*self.shape, -1)

    def _keep_gelu(self, arguments: dict[str, Any]) -> None:
        """Copies the product and the activation after it, which are one kernel."""
        self._keep(self.activations, arguments["preactivation"], arguments)
        layer = self.workspace.layer.rpartition(".")[0]
        self.activations[layer] = np.array(to_float32(arguments["activation"])).reshape(
            *self.shape, -1
        )

    def _keep_attention(self, arguments: dict[str, Any]) -> None:
        q, k = self._keep_heads(self.activations, arguments["qkv"], arguments)
        seen = arguments.get("firsts"), arguments.get("scale")
        self.attention.append(attention_probabilities(q, k, *seen)[0])
        self._keep(self.activations, arguments["out"], arguments)

    def _keep_attention_gradient(self, arguments: dict[str, Any]) -> None:
        self._keep_heads(self.gradients, arguments["dqkv"], arguments)

    def _keep_heads(
        self, kept: dict[str, np.ndarray], qkv: np.ndarray, arguments: dict[str, Any]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Copies qkv (B T, (H + 2 G) D) head by head -> views of queries and keys."""
        shape, width = arguments["logsumexp"].shape, arguments["out"].shape[1]
        q, k, v = split_heads(to_float32(qkv), shape, width)
        for name, heads in (("query", q), ("key", k), ("value", v)):
            kept[f"{self.workspace.layer}.{name}"] = np.array(heads)
        return q, k


# Kernels that write more than one activation, or whose gradient is more than one.
OBSERVED: dict[str, Callable[[Observer, dict[str, Any]], None]] = {
    "matmul_gelu": Observer._keep_gelu,
    "attention": Observer._keep_attention,
    "attention_backward": Observer._keep_attention_gradient,
}


def inspect(model: Any, ids: np.ndarray, targets: np.ndarray | None) -> Inspection:
    """Computes what `TransformerModel.inspect` returns."""
    if targets is None:
        ids = checked_ids("ids", ids, model.config)
    else:
        model.check_trains()
        ids, targets = CheckedBatch.of(model.config, ids, targets)[:2]
    network, workspace = model.network, model.workspace
    observer = Observer(workspace, ids.shape)

    def compute() -> Inspection:
        losses, gradients, head = None, {}, network.head
        with workspace.wrapped_kernels(observer.observed), network.without_recompute():
            logits = head.forward(network.forward(ids))
            copied = np.array(logits).reshape(*ids.shape, -1)
            if targets is not None:
                losses = np.empty(ids.shape, workspace.dtype)
                dlogits = head.cross_entropy(
                    losses.reshape(-1), logits, targets.reshape(-1), 1 / ids.size
                )
                with model.flat.other_gradients():
                    head.backward(dlogits)
                    network.backward(head.dx)
                    gradients = {name: x.copy() for name, x in model.gradients.items()}
        observed = np.stack(observer.attention), observer.activations
        return Inspection(ids.copy(), copied, *observed, losses, gradients, observer.gradients)

    at = None if targets is None else Pass(model.passes, drops=False)
    return workspace.one_pass(compute, at)
