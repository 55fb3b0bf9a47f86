"""Runs on texts and conversations with characters that the model lacks that they start from."""

import json

import numpy as np
import pytest

import smallmind
from smallmind import Chat, Run, Tokenizer
from smallmind.settings.presets import ARCHITECTURES
from tests.programs import CATS, refusal
from tests.runs.small import left

SHAPE = {"block_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "val_every": 0}
SHAPE |= ARCHITECTURES["llama"] | {"batch_size": 2, "log_every": 1}
TUNING = {"batch_size": 2, "val_every": 0, "log_every": 1, "save_every": 2, "dropout": 0.0}
TEXT = CATS + "abcdefghijklmnopqrstuvwxyz\n"
NEW_TEXT = CATS + "Where is the cat? On the mät!\n" * 9
NEW = "!?OWä"  # of it, sorted


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The directory with the run `base` and conversations, all of whose questions have a new ?."""
    path = tmp_path_factory.mktemp("characters")
    Run.create(text=TEXT, out=path / "base", steps=3, **SHAPE).train()
    pairs = [{"question": f"who is {x}?", "answer": "a cat"} for x in "abcdefghijkl"]
    (path / "chats.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (path / "new.txt").write_text(NEW_TEXT, encoding="utf-8")
    return path


def tuned(base, out, text="new.txt", start="base", **fields):
    fields = {**TUNING, "init_from": str(base / start), "out": base / out, **fields}
    return Run.create(text=base / text, **fields)


@pytest.fixture(scope="module")
def grown(base):
    run = tuned(base, "grown", steps=4)
    run.train()
    return run


def test_new_characters_follow_all_other_tokens(base, grown):
    before, after = smallmind.load(base / "base")[1], grown.load()[1]
    assert after.vocab_size == before.vocab_size + len(NEW)
    assert after.characters == before.characters + NEW
    assert (after.encode(CATS) == before.encode(CATS)).all()
    assert after.decode(after.encode(NEW_TEXT)) == NEW_TEXT


def test_what_the_model_knew_is_unchanged_at_the_start(base):
    run = tuned(base, "untrained", steps=1, precision="float32")
    model, (old, tokenizer) = run.training.model, smallmind.load(base / "base")
    ids = tokenizer.encode("the cat sat")[None]
    known = model.forward(ids)[..., : tokenizer.vocab_size]
    np.testing.assert_allclose(known, old.forward(ids), rtol=1e-4, atol=1e-6)
    run.discard_untrained()


def test_it_resumes_to_the_same_bits(base, grown):
    left(tuned(base, "again", steps=4), 3)
    again = Run.open(base / "again")
    again.resume()
    np.testing.assert_array_equal(again.load()[0].flat.data, grown.load()[0].flat.data)
    assert again.final == grown.final
    assert all(verdict.fault is None for verdict in again.verify())


def test_conversations_with_a_new_character_are_learned(base):
    run = tuned(base, "chat", "chats.jsonl", epochs=1)
    run.train()
    model, tokenizer = run.load()
    assert list(tokenizer.special) == ["<|im_start|>", "<|im_end|>"]
    assert tokenizer.decode(tokenizer.encode("who?")) == "who?"
    assert Chat(model, tokenizer, max_tokens=2).say("who is on the mat?") is not None


def test_a_model_with_special_tokens_gets_new_characters_after_them(base, tmp_path):
    if not (base / "special").exists():
        tuned(base, "special", "chats.jsonl", epochs=1).train()
    run = tuned(base, "after-special", start="special", steps=2)
    run.train()
    model, tokenizer = run.load(backend="numpy")
    first = smallmind.load(base / "special")[1]
    assert dict(tokenizer.special) == dict(first.special)
    assert max(tokenizer.special.values()) < tokenizer.vocab_size - 1
    assert tokenizer.pieces[: first.vocab_size] == first.pieces
    ids = tokenizer.encode("<|im_start|>the mät?<|im_end|>")
    assert tokenizer.decode(ids) == "<|im_start|>the mät?<|im_end|>"
    assert "".join(tokenizer.stream(ids)) == tokenizer.decode(ids)
    assert tokenizer.spelled(ids).characters == len("<|im_start|>the mät?<|im_end|>")
    for place in ("hf", "model.gguf"):
        run.export(tmp_path / place, "gguf" if place.endswith("gguf") else "hf")
        found, same = smallmind.load(tmp_path / place, "numpy")
        assert same.state() == tokenizer.state()
        np.testing.assert_array_equal(found.forward(ids[None]), model.forward(ids[None]))
    other = pytest.importorskip("tokenizers").Tokenizer.from_file(
        str(tmp_path / "hf" / "tokenizer.json")
    )
    assert other.encode("<|im_start|>the mät?<|im_end|>").ids == ids.tolist()


@pytest.mark.parametrize(
    ("fields", "flag", "why"),
    [
        ({"lora_rank": 2}, "--lora-rank", "which an adapter cannot teach it"),
        ({"freeze": "embedding"}, "--freeze", "whose embedding or head is frozen"),
        ({"freeze": "head"}, "--freeze", "whose embedding or head is frozen"),
    ],
)
def test_parts_that_are_not_trained_cannot_learn_new_characters(base, fields, flag, why):
    message = refusal(tuned, base, "refused", steps=1, **fields)
    assert message == (
        f"the text has 5 characters ('!', '?', 'O', 'W', 'ä') that {base / 'base'} does not know, "
        f"{why}: remove them from the text, or leave out {flag}"
    )
    assert not (base / "refused").exists()
    tuned(base, "refused", steps=1).discard_untrained()  # the advice


def test_frozen_parts_cannot_learn_the_tokens_of_a_template(base, tmp_path):
    (tmp_path / "known.jsonl").write_text('{"question": "who sat", "answer": "the cat"}\n' * 30)
    fields = {"epochs": 1, "freeze": "embedding"}
    message = refusal(tuned, base, "refused", tmp_path / "known.jsonl", **fields)
    assert message.startswith("the template of the conversations adds 2 tokens to the model, whose")
    assert message.endswith("choose --chat-template qa, or leave out --freeze")


def test_the_command_line_says_how_the_vocabulary_grows(base, tmp_path, cli):
    flags = "--init-from", base / "base", "--steps 2 --batch-size 2 --val-every 0"
    printed = cli("train", base / "new.txt", *flags, "--out", tmp_path / "run").flat
    assert "The vocabulary grows by 5 characters ('!', '?', 'O', 'W', 'ä') that" in printed
    again = cli("train", base / "new.txt", "--init-from", tmp_path / "run", "--out", tmp_path / "b",
                "--steps 1 --batch-size 2 --val-every 0").flat  # fmt: skip
    assert "The vocabulary grows" not in again


@pytest.mark.parametrize(
    "state",
    [
        {"characters": "aab"},
        {"characters": "ab", "special": {"<x>": 0}},
        {"characters": "ab", "special": {"<x>": 0}, "first": 1},
        {"characters": "ab", "first": 3},
        {"characters": "ab", "first": "1"},
        {"characters": "ab", "special": {"<x>": 3}},
        {"characters": "ab", "special": {"<x>": -1}},
        {"characters": "ab", "special": {"<x>": 0, "<y>": 0}},
    ],
)
def test_a_damaged_vocabulary_is_refused(state):
    with pytest.raises((ValueError, TypeError)):
        Tokenizer.from_state({"kind": "char", **state})


def test_conversations_that_are_longer_than_the_context_make_it_longer(base, tmp_path):
    """Where positions are rotations, and all weights are trained: else they are cut."""
    question = "who is on the mat and who is on the log and where is the dog and the cat"
    pairs = [{"question": f"{question} {x}", "answer": "a cat"} for x in "abcdefghijkl" * 4]
    file = tmp_path / "long.jsonl"
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    run = tuned(base, "longer", file, epochs=1)
    assert run.settings.model.block_size > 100 > SHAPE["block_size"]
    run.train()
    assert Chat(*run.load(), max_tokens=2).say(f"{question} a") is not None
    message = refusal(tuned, base, "text", block_size=128, steps=1)
    assert message.startswith("block_size=128 contradicts")
