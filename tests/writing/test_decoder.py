"""Texts that are written together, and join and leave: each is what it would be alone."""

import numpy as np
import pytest

from smallmind import ModelConfig, Tokenizer, TransformerModel
from smallmind.settings.config import GenerationConfig
from smallmind.settings.presets import ARCHITECTURES
from smallmind.writing.decoder import Continuation, Decoder
from smallmind.writing.generation import generate
from smallmind.writing.sampling import alternatives
from tests.exchange.models import varied
from tests.programs import refuses

TEXT = "A quick brown fox jumps over the lazy dog.\n"
TOKENIZER = Tokenizer(TEXT)


def new_model(architecture="modern", **changes):
    fields = {**ARCHITECTURES[architecture], "n_layer": 2, "n_embd": 32, "n_head": 4, **changes}
    config = ModelConfig(vocab_size=TOKENIZER.vocab_size, block_size=24, **fields)
    return varied(TransformerModel(config, seed=3), 0.2)


def continuation(prompt, *more, **settings):
    return Continuation(TOKENIZER, TOKENIZER.encode(prompt), GenerationConfig(**settings), *more)


def written_until_all_have_ended(decoder):
    """Returns the texts by sequence."""
    texts = {token.continuation for tokens in decoder.write([]) for token in tokens}
    return {text: text.text for text in texts}


@pytest.mark.parametrize("part", [None, 1, 4])
@pytest.mark.parametrize("architecture", ["gpt2", "llama", "modern"])
def test_a_text_is_the_one_that_it_would_be_alone(architecture, part):
    model, random = new_model(architecture), np.random.default_rng(7)
    asked = [
        {"prompt": TEXT[: 1 + int(random.integers(40))], "seed": seed, "max_tokens": 3 + 5 * seed}
        for seed in range(7)
    ]
    sequences = [continuation(**settings) for settings in asked]
    waiting = list(sequences)
    with Decoder(model, TOKENIZER, 3, part=part) as decoder:
        while waiting or len(decoder):
            if waiting and decoder.free and random.random() < 0.5:
                decoder.add(waiting.pop(0))
            decoder.step()
    for one, settings in zip(sequences, asked, strict=True):
        with Decoder(model, TOKENIZER, 1, part=part) as decoder:
            alone = continuation(**settings)
            decoder.add(alone)
            assert written_until_all_have_ended(decoder)[alone] == one.text
        if part is None:
            assert generate(model, TOKENIZER, **settings) == settings["prompt"] + one.text
        assert one.ended == "length" and len(one.tokens) == settings["max_tokens"]


def test_a_part_of_a_prompt_is_read_between_tokens_of_the_others():
    model = new_model()
    with Decoder(model, TOKENIZER, 2, part=4) as decoder:
        first, long = continuation("fox", max_tokens=9), continuation(TEXT[:18], max_tokens=2)
        decoder.add(first)
        decoder.step()
        decoder.add(long)
        steps = [[token.continuation for token in decoder.step()] for _ in range(6)]
    assert steps == [[first]] * 4 + [[long, first], [first, long]]


@pytest.mark.parametrize("part", [2, 8, 30])
def test_prompts_of_one_length_are_read_together(part, monkeypatch):
    model, prompts = new_model(), [TEXT[i : i + 5] for i in range(6)] + [TEXT[:7]]
    alone = [generate(model, TOKENIZER, prompt, max_tokens=4, seed=2) for prompt in prompts]
    passes, decode = [], model.decode

    def counted(ids, cache):
        passes.append(ids.shape)
        return decode(ids, cache)

    monkeypatch.setattr(model, "decode", counted)
    texts = [[continuation(prompt, max_tokens=4, seed=2)] for prompt in prompts]
    with Decoder(model, TOKENIZER, 6, part=part) as decoder:
        for _ in decoder.write(texts):
            pass
    assert [prompt + text.text for prompt, (text,) in zip(prompts, texts, strict=True)] == alone
    assert passes[0] == {2: (1, 2), 8: (1, 5), 30: (6, 5)}[part]


def test_a_sequence_that_leaves_frees_its_slot_at_once():
    with Decoder(new_model(), TOKENIZER, 2, part=2) as decoder:
        reading, writing = continuation("quick brown"), continuation("f")
        decoder.add(writing)
        decoder.add(reading)
        decoder.step()
        refuses("1 texts do not fit in 0 free slots", decoder.add, continuation("dog"))
        decoder.remove(writing)
        decoder.step()
        decoder.remove(reading)
        decoder.remove(reading)
        assert decoder.free == 2 and not decoder.step()
        decoder.add(*(continuation("dog", seed=seed, max_tokens=3) for seed in range(2)))
        assert len(written_until_all_have_ended(decoder)) == 2


def test_of_several_with_one_prompt_the_first_may_leave_before_it_is_read():
    model = new_model()
    with Decoder(model, TOKENIZER, 2, part=2) as decoder:
        one, other = (continuation("lazy dog", seed=seed, max_tokens=8) for seed in range(2))
        decoder.add(one, other)
        decoder.step()
        decoder.remove(one)
        found = written_until_all_have_ended(decoder)
        decoder.add(alone := continuation("lazy dog", seed=1, max_tokens=8))
        assert found == {other: written_until_all_have_ended(decoder)[alone]}


def test_a_sequence_without_tokens_to_write_takes_no_slot():
    with Decoder(new_model(), TOKENIZER, 1) as decoder:
        decoder.add(empty := continuation("fox", max_tokens=0))
        assert empty.ended == "length" and decoder.free == 1


@pytest.mark.parametrize("settings", [{}, {"frequency_penalty": 1.5, "repetition_penalty": 1.3}])
def test_a_text_can_be_continued_from_any_of_its_tokens(settings):
    model = new_model()
    with Decoder(model, TOKENIZER, 1) as decoder:
        decoder.add(whole := continuation("brown ", seed=4, max_tokens=12, **settings))
        text = written_until_all_have_ended(decoder)[whole]
        for count in (1, 7, 11):
            begun = whole.tokens[:count]
            more = {"seed": 4, "max_tokens": 12 - count, **settings}
            decoder.add(rest := continuation("brown ", None, begun, **more))
            assert TOKENIZER.decode(begun) + written_until_all_have_ended(decoder)[rest] == text
            assert rest.tokens == whole.tokens


def test_alternatives_are_the_probabilities_of_the_model():
    model, prompt = new_model(), "brown fox"
    with Decoder(model, TOKENIZER, 1) as decoder:
        settings = {"max_tokens": 1, "temperature": 0, "repetition_penalty": 5.0}
        decoder.add(one := continuation(prompt, 3, **settings))
        ((_, token, _, found, _),) = decoder.step()
    logits = model.forward(TOKENIZER.encode(prompt)[None])[0, -1].astype(np.float64)
    p = np.exp(logits - logits.max())
    p /= p.sum()
    assert one.tokens == [token]
    assert found.logprob == pytest.approx(np.log(p[token]), abs=1e-5)
    assert found.entropy == pytest.approx(-(p * np.log(p)).sum(), abs=1e-5)
    assert found.tokens.tolist() == np.argsort(-p)[:3].tolist()
    np.testing.assert_allclose(found.logprobs, np.log(np.sort(p)[::-1][:3]), atol=1e-5)


def test_alternatives_of_a_certain_choice_have_no_entropy():
    logits = np.full(5, -np.inf, np.float32)
    logits[2] = 3
    found = alternatives(logits, 2, 2)
    assert found.logprob == 0 and found.entropy == 0 and found.tokens.tolist() == [2, 0]
