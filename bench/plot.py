"""A plot of the rates in a record by shape: ours, NumPy's, PyTorch's and the limit."""

from pathlib import Path
from typing import Any

CONTESTANTS = {"ours": "o", "NumPy": "s", "PyTorch": "^"}


def draw(records: list[dict[str, Any]], file: Path) -> None:
    """Draws one panel per kernel: GFLOP/s if arithmetic is counted, GB/s otherwise."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kernels = list(dict.fromkeys(record["kernel"] for record in records))
    figure, panels = pyplot.subplots(
        len(kernels), figsize=(11, 3.2 * len(kernels)), squeeze=False, layout="constrained"
    )
    for panel, kernel in zip(panels[:, 0], kernels, strict=True):
        _draw_kernel(panel, [record for record in records if record["kernel"] == kernel])
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _draw_kernel(panel: Any, records: list[dict[str, Any]]) -> None:
    counts_flops = bool(records[0]["flops"])
    work = "flops" if counts_flops else "bytes"
    shapes = ["x".join(map(str, record["shape"])) for record in records]
    limits = [
        record[work] / (record["times"]["ours"]["median"] * record["share_of_limit"]) / 1e9
        for record in records
    ]
    panel.plot(shapes, limits, "k_", markersize=18, label="limit")
    for name, marker in CONTESTANTS.items():
        measured = [
            (shape, record[work] / record["times"][name]["median"] / 1e9)
            for shape, record in zip(shapes, records, strict=True)
            if name in record["times"]
        ]
        if measured:
            panel.plot(*zip(*measured, strict=True), marker, label=name)
    panel.set_title(f"{records[0]['kernel']} ({records[0]['axes']})", loc="left")
    panel.set_ylabel("GFLOP/s" if counts_flops else "GB/s")
    panel.set_ylim(bottom=0)
    panel.tick_params(axis="x", rotation=45)
    panel.grid(axis="y", alpha=0.3)
    panel.legend(loc="upper right", ncols=4, fontsize="small")
