"""Runs on conversations that start from a model of a text: its vocabulary grows."""

import json

import numpy as np
import pytest

import smallmind
from smallmind import Chat, InputError, Run
from smallmind.exchange import gguf_file
from smallmind.settings.presets import ARCHITECTURES
from tests.programs import CATS
from tests.runs.small import left

TEXT = CATS + "ABCDEFGHIJKLMNOPQRSTUVWXYZ abcdefghijklmnopqrstuvwxyz 0123456789?.\n"
ARCHES = {
    "gpt2": ARCHITECTURES["gpt2"],
    "llama": ARCHITECTURES["llama"],
    "modern with hashed pairs": ARCHITECTURES["modern"] | {"bigram_rows": 50},
}
TUNING = {"epochs": 4, "batch_size": 2, "val_every": 0, "log_every": 1, "save_every": 2}
TUNING |= {"keep": 9, "dropout": 0.0}
NEW = ["<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module", params=ARCHES)
def base(request, tmp_path_factory):
    """The directory with the run `base`, its text, and conversations."""
    path = tmp_path_factory.mktemp("grown")
    shape = {"block_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2}
    fields = {**shape, **ARCHES[request.param], "steps": 3, "batch_size": 2, "val_every": 0}
    Run.create(text=TEXT, out=path / "base", **fields).train()
    pairs = [{"question": f"Who is {i}?", "answer": f"A cat {i}."} for i in range(12)]
    (path / "chats.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path


def tuned(base, out, start="base", text=None, **fields):
    fields = {**TUNING, "init_from": str(base / start), "out": base / out, **fields}
    return Run.create(text=text or base / "chats.jsonl", **fields)


@pytest.fixture(scope="module")
def grown(base):
    run = tuned(base, "grown")
    run.train()
    return run


def test_it_resumes_to_the_same_bits(base, grown):
    left(tuned(base, "again"), 3)
    again = Run.open(base / "again")
    again.resume()
    model, tokenizer = again.load()
    assert list(tokenizer.special) == NEW
    np.testing.assert_array_equal(model.flat.data, grown.load()[0].flat.data)
    assert again.final == grown.final


def test_it_is_exported_and_read_again(base, grown):
    model, tokenizer = grown.load(backend="numpy")
    if model.config.bigram_rows:
        with pytest.raises(InputError, match="bigram_rows"):
            grown.export(base / "hf")
        return
    grown.export(base / "hf")
    grown.export(base / "model.gguf", "gguf")
    ids = tokenizer.encode("<|im_start|>user\nWho is 3?<|im_end|>\n")[None]
    for place in ("hf", "model.gguf"):
        found, same = smallmind.load(base / place, "numpy")
        np.testing.assert_array_equal(found.forward(ids), model.forward(ids))
        assert same.encode("<|im_end|>").tolist() == tokenizer.encode("<|im_end|>").tolist()
    metadata, _ = gguf_file.read(base / "model.gguf")
    end = tokenizer.special["<|im_end|>"]
    assert metadata["tokenizer.ggml.eos_token_id"] == metadata["tokenizer.ggml.eot_token_id"] == end
    assert metadata["tokenizer.chat_template"].startswith("{% for message in messages %}")


@pytest.mark.parametrize("text", [None, TEXT])
def test_other_runs_start_from_it(base, grown, text):
    run = tuned(base, f"more-{text is None}", "grown", text)
    model, tokenizer = grown.load()
    assert run.training.model.config == model.config
    assert run.training.tokenizer.digest == tokenizer.digest
    assert run.training.tokenizer.published == tokenizer.published
    np.testing.assert_array_equal(run.training.model.flat.data, model.flat.data)
    run.train()
    assert Chat(*run.load(), max_tokens=2).say("Who?") is not None


def test_another_template_adds_its_tokens_to_it(base, grown):
    run = tuned(base, "llama3", "grown", chat_template="llama3")
    before, after = grown.load()[0].config, run.training.model.config
    assert after.vocab_size == before.vocab_size + 4
    assert after.bigram_vocab == before.bigram_vocab
    assert run.training.tokenizer.ends == {run.training.tokenizer.special["<|eot_id|>"]}
