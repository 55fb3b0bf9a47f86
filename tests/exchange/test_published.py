"""A chat model's facts about its tokens survive training: import, run, resume, export."""

import json
import shutil

import pytest

import smallmind
from smallmind import Run
from smallmind.exchange import gguf_file
from tests.exchange import chat, models
from tests.programs import refuses
from tests.runs.small import FIELDS

NAMES = list(chat.ENDS)
TOKENS = "tokenizer.ggml."
TEXT = models.TEXT.encode("ascii", "ignore").decode()  # all that each of them knows
TUNING = {k: v for k, v in FIELDS.items() if not k.startswith(("n_", "block"))}
TRAINING = {**TUNING, "block_size": 8}


def tuned(start, out):
    """A run that started from the weights of another and has been resumed from a checkpoint."""
    Run.create(text=TEXT, out=out, init_from=str(start), **TRAINING).train()
    (out / "model.safetensors").unlink()
    run = Run.open(out)
    run.resume(steps=7)
    return run


def chats_in(folder):
    """Writes a file of conversations -> it."""
    file = folder / "chats.jsonl"
    file.write_text((json.dumps({"question": "the cat?", "answer": "the mat"}) + "\n") * 8)
    return file


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("has_own_file", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_chat_model_keeps_its_form_through_training(tmp_path, name, has_own_file):
    source, out = chat.made(tmp_path / "source", name, has_own_file), tmp_path / "out"
    imported = Run.import_model(source, tmp_path / "imported")
    tuned(imported.path, tmp_path / "tuned").export(out)
    before, after = (read(path / "tokenizer_config.json") for path in (source, out))
    del before["auto_map"]  # code is never executed here, and does not travel
    assert after.pop("chat_template") == before.pop("chat_template", chat.TEMPLATE) == chat.TEMPLATE
    assert {key: after[key] for key in before} == before and "auto_map" not in after
    for file in ("generation_config.json", "special_tokens_map.json"):
        assert read(out / file) == read(source / file)
    before, after = (read(path / "config.json") for path in (source, out))
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert after[key] == before[key]
    before, after = (read(path / "tokenizer.json") for path in (source, out))
    assert after["added_tokens"][: len(before["added_tokens"])] == before["added_tokens"]
    assert after["post_processor"] == before["post_processor"]


@pytest.mark.parametrize("name", ["Qwen"])
def test_a_chat_model_keeps_its_template_where_it_learns_conversations(tmp_path, name):
    pytest.importorskip("jinja2")
    source, out = chat.made(tmp_path / "source", name), tmp_path / "out"
    fields = {"text": chats_in(tmp_path), "init_from": str(source), **TUNING}
    run = Run.create(out=tmp_path / "run", **fields)
    run.train()
    run.export(out)
    model, tokenizer = smallmind.load(source, "numpy")
    assert run.training.model.config.vocab_size == model.config.vocab_size
    assert run.load()[1].published == tokenizer.published
    assert read(out / "generation_config.json") == read(source / "generation_config.json")
    assert (out / "chat_template.jinja").read_text() == chat.TEMPLATE


@pytest.mark.parametrize("name", NAMES)
def test_gguf_says_the_same(tmp_path, name):
    source = chat.made(tmp_path / "source", name)
    tuned(source, tmp_path / "tuned").export(tmp_path / "a.gguf", "gguf")
    Run.import_model(tmp_path / "a.gguf", tmp_path / "imported")
    again = tuned(tmp_path / "imported", tmp_path / "again")
    again.export(tmp_path / "b.gguf", "gguf")
    first, second = (gguf_file.read(tmp_path / f"{x}.gguf")[0] for x in "ab")
    said = {k: v for k, v in first.items() if k.startswith("tokenizer.")}
    said = {k: v for k, v in said.items() if isinstance(v, int | str)}
    assert said == {key: second[key] for key in said}
    begin, turn_end = chat.ENDS[name]
    tokens = first[f"{TOKENS}tokens"]
    assert first["tokenizer.chat_template"] == chat.TEMPLATE
    for role in ("eos", "eot"):
        assert tokens[first[f"{TOKENS}{role}_token_id"]] == turn_end
    assert first[f"{TOKENS}add_bos_token"] is (name == "Llama 3")
    if begin:
        assert tokens[first[f"{TOKENS}bos_token_id"]] == begin
    again.export(tmp_path / "out")
    settings = read(tmp_path / "out" / "tokenizer_config.json")
    assert (settings["chat_template"], settings["eos_token"]) == (chat.TEMPLATE, turn_end)
    before, after = (read(path / "generation_config.json") for path in (source, tmp_path / "out"))
    for key in ("eos_token_id", "pad_token_id"):
        assert after[key] == before[key]


def test_several_templates_keep_their_names(tmp_path):
    source = chat.made(tmp_path / "source", "Qwen")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text(chat.TOOLS)
    first = Run.import_model(source, tmp_path / "first")
    first.export(tmp_path / "model.gguf", "gguf")
    metadata, _ = gguf_file.read(tmp_path / "model.gguf")
    assert metadata["tokenizer.chat_templates"] == ["tool_use"]
    assert metadata["tokenizer.chat_template.tool_use"] == chat.TOOLS
    second = Run.import_model(tmp_path / "model.gguf", tmp_path / "second")
    for run in (first, second):
        out = tmp_path / f"{run.path.name}-out"
        run.export(out)
        assert read(out / "tokenizer_config.json")["chat_template"] == [
            {"name": "default", "template": chat.TEMPLATE},
            {"name": "tool_use", "template": chat.TOOLS},
        ]


def test_it_is_known_before_the_first_checkpoint_and_with_prepared_texts(tmp_path, cli):
    source = chat.made(tmp_path / "source", "Qwen")
    wanted = Run.import_model(source, tmp_path / "run").load(backend="numpy")[1].published
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    # The run's file, which has as many tokens as the model has rows.
    flags = "--tokenizer", tmp_path / "run" / "tokenizer.json", "--out", tmp_path / "data"
    cli("prepare", tmp_path / "text.txt", *flags)
    for name, text in (("prepared", str(tmp_path / "data")), ("text", TEXT)):
        path = tmp_path / name
        Run.create(text=text, out=path, init_from=str(source), **TRAINING).directory.unlock()
        run = Run.open(path)
        assert run.data.tokenizer.published == wanted
        run.train()
        shutil.copy(path / "model.safetensors", tmp_path / "alone.safetensors")
        assert smallmind.load(tmp_path / "alone.safetensors", "numpy")[1].published == wanted


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("tokenizer_config.json", "[]", "tokenizer_config.json is not a JSON object"),
        ("generation_config.json", "{", "generation_config.json is not a valid JSON file: "),
        ("generation_config.json", '{"eos_token_id": 1e3}', "eos_token_id is 1000.0, not the"),
        ("generation_config.json", '{"eos_token_id": [1, true]}', "is [1, True], not the number"),
        ("generation_config.json", f'{{"pad_token_id": {2**70}}}', "pad_token_id is 118059162071"),
        ("tokenizer_config.json", '{"x": "\\ud800"}', "surrogates not allowed"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja is not a valid template: "),
        ("chat_template.jinja", b" " * 20_000_001, "it has more than 20,000,000 bytes"),
    ],
)
def test_files_that_are_damaged_are_refused_in_one_line(tmp_path, cli, file, content, reason):
    source = chat.made(tmp_path / "source", "Qwen")
    (source / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    cli.refuses(reason, "import", source, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", ["[]", '{"x": 3}', "{", '{"x": {"y": "\\ud800"}}'])
def test_a_run_whose_published_file_is_damaged_says_so(tmp_path, content):
    run = Run.import_model(chat.made(tmp_path / "source", "Qwen"), tmp_path / "run")
    (run.path / "published.json").write_text(content)
    refuses(r"published\.json was not written by smallmind", run.directory.load_tokenizer)


def test_gguf_with_tokens_that_do_not_exist_is_read_without_them(tmp_path, monkeypatch):
    run = Run.import_model(chat.made(tmp_path / "source", "SmolLM"), tmp_path / "run")
    run.export(tmp_path / "a.gguf", "gguf")
    metadata, tensors = gguf_file.read(tmp_path / "a.gguf")
    wrong = {"eos": 2**40, "padding": 5, "eot": -1, "bos": 1.5}
    metadata |= {f"{TOKENS}{role}_token_id": value for role, value in wrong.items()}
    metadata |= {f"{TOKENS}add_bos_token": 3, "tokenizer.chat_template": 7}
    monkeypatch.setattr(gguf_file, "read", lambda _: (metadata, tensors))
    assert smallmind.load(tmp_path / "a.gguf", "numpy")[1].published == {}


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no') }}", "cannot be rendered: TemplateError: no"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "no special token at the end"),
        ("{{ messages | length }}", "does not write what is said"),
    ],
)
def test_an_import_takes_no_template_that_nothing_could_use(tmp_path, template, reason):
    pytest.importorskip("jinja2")
    source = chat.made(tmp_path / "source", "SmolLM")
    (source / "chat_template.jinja").write_text(template)
    said = f"source: the chat template .*{reason}.*; remove the template from chat_template.jinja"
    refuses(said, Run.import_model, source, tmp_path / "imported")
    assert not (tmp_path / "imported").exists()
    # Its advice works, and so does that of training without an import.
    fields = {"text": chats_in(tmp_path), "init_from": str(source), **TUNING}
    refuses("--init-from MODEL --chat-template chatml", Run.create, out=tmp_path / "a", **fields)
    Run.create(out=tmp_path / "b", chat_template="chatml", **fields).train()
    (source / "chat_template.jinja").unlink()
    imported = Run.import_model(source, tmp_path / "imported")
    Run.create(out=tmp_path / "c", **fields | {"init_from": str(imported.path)}).train()
