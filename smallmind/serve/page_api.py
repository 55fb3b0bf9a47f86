"""The endpoints of the page itself: models, a look inside one, runs."""

import asyncio
import math
from typing import Any

import numpy as np
from starlette.requests import Request as HTTPRequest
from starlette.responses import HTMLResponse, JSONResponse, Response

from smallmind.charts.figure import losses_of
from smallmind.checks import InputError, number
from smallmind.serve.api import API
from smallmind.serve.errors import APIError
from smallmind.serve.models import Loaded, ServedModel
from smallmind.serve.request_fields import Fields, check_length, turns_of
from smallmind.serve.security import POLICY
from smallmind.settings.config import __version__
from smallmind.views.page import large_chart
from smallmind.views.run_view import PLOTTED, RunView, State
from smallmind.writing.chat import prompt_of
from smallmind.writing.decoder import choices_in

MAX_SAMPLES = 20
FIELDS = (*PLOTTED, "tokens_per_second")
REPORT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'self'; sandbox"
)


class PageAPI:
    """The endpoints under /api."""

    def __init__(self, api: API) -> None:
        self.api, self.models = api, api.models
        self._beside = api.engine.run_beside
        self._looking = asyncio.Lock()

    async def state(self, _request: HTTPRequest) -> Response:
        """Returns what there is to talk to, and to watch: GET /api/state."""
        entries, runs = self.models.entries(), await self._beside(self._runs)
        limits = self.api.limits
        return JSONResponse(
            {
                "version": __version__,
                "models": await self._beside(lambda: [_model(entry) for entry in entries]),
                "runs": runs,
                "limits": {
                    "max_tokens": limits.max_tokens,
                    "prompt_tokens": limits.prompt_tokens,
                    "n": self.models.slots,
                },
            }
        )

    async def inspect(self, request: HTTPRequest) -> Response:
        """Returns probability, alternatives and entropy of each token: POST /api/inspect."""
        fields = await self.api.fields(request)
        loaded = await self._loaded(fields)
        top, most = fields.whole("top", 10, 0, 50), self.api.limits.prompt_tokens
        with loaded.line.in_use():
            ids = await self._beside(lambda: _ids(fields, loaded, most))
            context = loaded.model.config.block_size
            if not 1 <= len(ids) <= context:
                message = f"the text has {len(ids):,} tokens; give 1 to {context:,}, the context"
                raise APIError(message, "text")
            found = await self._look(lambda: _inspected(loaded, ids, top))
        return await self._beside(lambda: JSONResponse(found))

    async def attention(self, request: HTTPRequest) -> Response:
        """Returns how a head looks at the tokens of a text: POST /api/attention."""
        fields = await self.api.fields(request)
        loaded = await self._loaded(fields)
        config = loaded.model.config
        ids = np.array(fields.ids("ids", loaded.tokenizer.vocab_size), np.int32)
        layer = fields.whole("layer", 0, 0, config.n_layer - 1)
        head = fields.whole("head", 0, 0, config.n_head - 1)
        if not 1 <= len(ids) <= config.block_size:
            raise APIError(f"give 1 to {config.block_size:,} tokens", "ids")

        def weights() -> list[list[float]]:
            found = loaded.model.inspect(ids[None]).attention[layer, 0, head]
            return [np.round(row[: t + 1], 4).tolist() for t, row in enumerate(found)]

        with loaded.line.in_use():
            found = await self._look(weights)
        return await self._beside(lambda: JSONResponse({"weights": found}))

    async def runs(self, _request: HTTPRequest) -> Response:
        """Lists the runs: GET /api/runs."""
        return JSONResponse({"runs": await self._beside(self._runs)})

    async def run(self, request: HTTPRequest) -> Response:
        """Returns the curves and samples of a run, as they are now: GET /api/runs/NAME."""
        view = self._view(request)
        return JSONResponse(await self._beside(lambda: self._course(view)))

    async def report(self, request: HTTPRequest) -> Response:
        """Returns the page that `smallmind report` writes: GET /api/runs/NAME/report."""
        from smallmind.views.report import report

        view = self._view(request)
        try:
            page = await self._beside(lambda: report(view.path))
        except InputError as error:
            raise APIError(str(error), "name", status=404) from None
        return HTMLResponse(page, headers={POLICY: REPORT_POLICY})

    async def _loaded(self, fields: Fields) -> Loaded:
        return await self.api.loaded(self.api.entry(fields.get("model", str)))

    async def _look(self, job: Any) -> Any:
        """Looks into a model between two steps of the texts. APIError if somebody else does."""
        if self._looking.locked():
            raise APIError("another text is being processed; try again in a moment", status=429)
        async with self._looking:
            return await self.api.engine.run(job)

    def _view(self, request: HTTPRequest) -> RunView:
        name = request.path_params["name"]
        for view in self.models.runs():
            if view.name == name:
                return view
        raise APIError(f"there is no run {name[:100]!r}", "name", status=404)

    def _runs(self) -> list[dict[str, Any]]:
        ids = self._model_ids()
        return [_row(view, ids) for view in self.models.runs()]

    def _model_ids(self) -> dict[Any, str]:
        return {entry.path.resolve(): entry.id for entry in self.models.entries() if entry.is_run}

    def _course(self, known: RunView) -> dict[str, Any]:
        view = RunView(known.path, FIELDS)
        step, steps = view.step, view.steps
        left = None
        if steps and step and view.seconds and view.state == State.RUNNING:
            left = view.seconds / step * max(0, steps - step)
        speeds = view.curves["tokens_per_second"].finite().values
        share = number(view.usage.get("used_share"))
        return {
            **_row(view, self._model_ids()),
            "seconds": view.seconds,
            "left_seconds": left,
            "chart": large_chart(
                losses_of(*(view.curves[x].finite() for x in ("loss", "val_loss")))
            ),
            "samples": [
                {"step": step, "text": text} for step, text in view.samples()[-MAX_SAMPLES:]
            ],
            "tokens_per_second": speeds[-1] if len(speeds) else None,
            "share": share if 0 <= share <= 1 else None,  # earlier versions measured it badly
            "notes": view.notes[-5:],
            "problem": view.problem,
        }


def _ids(fields: Fields, loaded: Loaded, most: int) -> np.ndarray:
    """-> the tokens of a text, as it is, as tokens or as a conversation. `most` limits its
    length.
    """
    if "ids" in fields.values:
        return np.array(fields.ids("ids", loaded.tokenizer.vocab_size), np.int32)
    try:
        if "messages" in fields.values:
            if loaded.template is None:
                raise APIError("the model has no chat template; send a text", "messages")
            system, turns = turns_of(fields, loaded.template.tools)
            check_length([system, *(turn.text for turn in turns)], most, "messages")
            context = loaded.model.config.block_size
            tokenizer, template = loaded.tokenizer, loaded.template
            return prompt_of(tokenizer, template, system, turns, context, 1).ids
        text = fields.required("text", str)
        check_length([text], most, "text")
        return loaded.tokenizer.prompt(text)
    except InputError as error:
        raise APIError(str(error), "text") from None


def _inspected(loaded: Loaded, ids: np.ndarray, top: int) -> dict[str, Any]:
    tokenizer = loaded.tokenizer

    def spelled(token: int) -> str:
        return tokenizer.token_bytes(token).decode("utf-8", "replace")

    tokens: list[dict[str, Any]] = []
    choices = [None, *choices_in(loaded.model, ids, tokenizer.vocab_size, top)]
    for token, found in zip(ids.tolist(), choices, strict=True):
        entry = {"id": token, "text": spelled(token)}
        if found is None:
            tokens.append({**entry, "logprob": None, "entropy": None, "top": []})
            continue
        pairs = zip(found.tokens.tolist(), found.logprobs.tolist(), strict=True)
        others = [[id, spelled(id), round(logprob, 5)] for id, logprob in pairs]
        logprob, entropy = round(found.logprob, 5), round(found.entropy, 5)
        tokens.append({**entry, "logprob": logprob, "entropy": entropy, "top": others})
    losses = [-token["logprob"] for token in tokens[1:]]
    return {
        "tokens": tokens,
        "loss": float(np.mean(losses)) if losses else None,
        "block_size": loaded.model.config.block_size,
    }


def _model(entry: ServedModel) -> dict[str, Any]:
    """Returns what the page shows of a model, which need not be loaded."""
    try:
        described = entry.described()
    except (InputError, OSError) as error:
        described = {"kind": "completion", "error": str(error)}
    return {
        "id": entry.id,
        "name": entry.id,
        "run": entry.path.name if entry.is_run else None,
        "loaded": entry.loaded is not None,
        "error": None,
        **described,
    }


def _row(view: RunView, ids: dict[Any, str]) -> dict[str, Any]:
    best = view.best or {}
    loss, final = number(best.get("val_loss")), number((view.final or {}).get("final_loss"))
    return {
        "name": view.name,
        "state": view.state.value,
        "step": view.step,
        "steps": view.steps,
        "loss": loss if math.isfinite(loss) else None,
        "final_loss": final if math.isfinite(final) else None,
        "model": ids.get(view.path.resolve()),
    }
