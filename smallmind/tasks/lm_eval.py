"""A model of this package in lm_eval (https://github.com/EleutherAI/lm-evaluation-harness).

    python -P -m smallmind.tasks.lm_eval run --model smallmind --model_args path=runs/book ...

takes all arguments of `lm_eval`. Its versions after 0.4.13 find the model by themselves:
`lm_eval run --model smallmind ...` does the same with them.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from smallmind.checks import InputError
from smallmind.exchange.stored import find
from smallmind.settings.config import GenerationConfig
from smallmind.tasks.likelihood import Scored, Scorer
from smallmind.text.chat import Turn
from smallmind.text.templates import format_of
from smallmind.text.tokenizer import special_names
from smallmind.writing.answers import answers
from smallmind.writing.decoder import Continuation

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError:
    raise ImportError('lm_eval is not installed: pip install "smallmind[eval]"') from None

Result = TypeVar("Result")
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
USUAL_TOKENS = 256  # that are written, unless a task says so
SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty")
READ = ("until", "do_sample", "temperature", *LENGTHS)


@register_model("smallmind")
class SmallmindLM(LM):
    """`path` is a run, a checkpoint or a model file, others are as in `smallmind.load`.

    What lm_eval says about batches and devices has no effect: texts are packed into windows.
    """

    def __init__(
        self,
        path: str,
        checkpoint: int | str | None = None,
        adapter: str | None = None,
        precision: str = "float32",
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        self.path = str(path)
        self.model, self.tokenizer = find(self.path, checkpoint, adapter).load(precision=precision)
        self.scorer = Scorer(self.model, self.tokenizer)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Returns the log-likelihood of each continuation, and whether it is the likeliest one."""
        found = self.scorer.continuations([request.args for request in requests])
        results = [(each.value, each.is_greedy) for each in found]
        return self._cached("loglikelihood", requests, results)

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Returns the log-likelihood of each text, all of it, in windows if it is long."""
        encoded = self.scorer.encode_each([request.args[0] for request in requests], begins=True)
        begin = self.scorer.beginning
        found = self.scorer.score([Scored(np.insert(ids, 0, begin), 1) for ids in encoded])
        return self._cached("loglikelihood_rolling", requests, [each.value for each in found])

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Returns the text that follows each context, up to what it is to stop at."""
        context = self.scorer.context
        prompts = self.scorer.encode_each([request.args[0] for request in requests], begins=True)
        texts = []
        for ids, request in zip(prompts, requests, strict=True):
            config = _config(request.args[1], max(1, context - 1))
            begun = ids if len(ids) else self.scorer.alone(ids).ids
            ids = begun[-max(1, context - config.max_tokens) :]
            texts.append(Continuation(self.tokenizer, ids, config))
        written = answers(self.model, self.tokenizer, texts)
        if self.tokenizer.special:
            names = special_names(tuple(self.tokenizer.special))
            written = [names.sub("", text) for text in written]
        return self._cached("generate_until", requests, written)

    def _cached(self, kind: str, requests: Sequence[Any], results: list[Result]) -> list[Result]:
        """Returns the results of requests, which lm_eval may cache."""
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial(kind, request.args, result)
        return results

    @property
    def tokenizer_name(self) -> str:
        """A name for caches of requests."""
        return f"smallmind-{self.tokenizer.digest}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Returns the template of conversations, in Jinja."""
        template = format_of(self.tokenizer) if chat_template else None
        return getattr(template, "jinja", "") if template else ""

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns a conversation as the model reads it. InputError if it was not trained on any."""
        template = format_of(self.tokenizer)
        if template is None:
            raise InputError(f"{self.path} has no chat template: leave out --apply_chat_template")
        turns = tuple(Turn(message["role"], message["content"]) for message in chat_history)
        return template.render(turns, answers=add_generation_prompt).text


def _config(said: Mapping[str, Any], most: int) -> GenerationConfig:
    """The generation of a task in the words of lm_eval -> ours. InputError for what we lack."""
    if unknown := said.keys() - {*READ, *SAMPLING}:
        raise InputError(f"generation with {', '.join(sorted(unknown))} is not supported")
    until = said.get("until") or ()
    stops = [until] if isinstance(until, str) else until
    length = next((said[name] for name in LENGTHS if said.get(name) is not None), USUAL_TOKENS)
    samples = said.get("do_sample", bool(said.get("temperature")))
    return GenerationConfig(
        max_tokens=min(int(length), most),
        temperature=float(said.get("temperature", 1.0)) if samples else 0.0,
        stop=tuple(stop for stop in stops if stop) or None,
        **{name: said[name] for name in SAMPLING if samples and said.get(name) is not None},
    )


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except InputError as error:
        sys.exit(f"smallmind: {error}")
