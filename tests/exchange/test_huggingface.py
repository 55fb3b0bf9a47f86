"""Directories of transformers as people have them: whole in any form, or with a part missing."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import smallmind
from smallmind import Run
from smallmind.exchange import gguf_file
from smallmind.files import safetensors
from tests.exchange import adapters, chat
from tests.exchange.models import MODELS, assert_same_logits, model_of, shard, tokenizer_of
from tests.faults.interrupts import interrupted_everywhere
from tests.programs import edited, refusal, refuses
from tests.text import published

HEAD = "lm_head.weight"
UNSAID = "it is not in the file"


def bpe():
    return tokenizer_of("bpe")


@pytest.fixture
def source(tmp_path):
    """A chat model."""
    return chat.made(tmp_path / "source", "SmolLM")


def with_head(path, name, tied, *, says, file):
    """Writes a model -> it. The config says something about the head; the file has what it has."""
    model = model_of(name, bpe(), tied)
    smallmind.export(model, bpe(), path)
    with edited(path / "config.json") as config:
        config["tie_word_embeddings"] = says
        if says == UNSAID:
            del config["tie_word_embeddings"]
    tensors, metadata = safetensors.read(path / "model.safetensors")
    embedding = next(key for key in tensors if key.endswith(("embed_tokens.weight", "wte.weight")))
    if file == "twice":
        tensors[HEAD] = tensors[embedding]
    if file == "head":
        tensors[HEAD] = tensors.pop(embedding)
    safetensors.write(path / "model.safetensors", tensors, metadata)
    return model


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("file", ["embedding", "twice", "head"])
@pytest.mark.parametrize("says", [True, UNSAID])
@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_a_tied_head_is_read_however_the_file_has_it(tmp_path, recwarn, name, says, file, sharded):
    """The architecture's default counts where a config says nothing: Llama's head is not tied."""
    path = tmp_path / "model"
    model = with_head(path, name, True, says=says, file=file)
    if sharded:
        shard(path)
    is_tied = says is True or name == "GPT-2"
    if file == "head" and not is_tied:
        refuses("lacks the tensor model.embed_tokens.weight", smallmind.load, path, "numpy")
        return
    found = smallmind.load(path, "numpy")[0]
    assert_same_logits(found, model)
    assert found.config.tie_weights == (is_tied or file == "embedding")
    assert len(recwarn) == (file == "embedding" and not is_tied)


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_the_embedding_replaces_a_head_that_is_missing(tmp_path, cli, recwarn, name):
    path = tmp_path / "model"
    with_head(path, name, True, says=False, file="embedding")
    refuses("lacks the tensor lm_head.weight", smallmind.load, path, "numpy")
    shutil.rmtree(path)
    model = with_head(path, name, True, says=UNSAID, file="embedding")
    with pytest.warns(UserWarning, match="lm_head.weight is missing, and") as warned:
        run = Run.import_model(path, tmp_path / "run")
    assert len(warned) == 1 and run.settings.model.tie_weights
    assert_same_logits(run.load(backend="numpy")[0], model)
    printed = cli("generate", path, "--prompt The --max-tokens 3 --temperature 0")
    assert printed.err.count("the embedding replaces it") == 1


def test_a_directory_of_the_hubs_cache_is_links(tmp_path, source):
    """Each of its files is a link to a file elsewhere, which has a name of its own."""
    expected = smallmind.load(source, "numpy")[0]
    (tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshots" / "a1b2"
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(source.iterdir())):
        file.rename(tmp_path / "blobs" / f"{number:064x}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{number:064x}")
    assert_same_logits(smallmind.load(snapshot, "numpy")[0], expected)


def test_ends_are_those_of_the_generation_config_else_of_the_config(source):
    special = smallmind.load(source, "numpy")[1].special
    names = {special[name]: name for name in special}
    for ends, expected in (
        ([published.TURN_END, published.CALL], {published.TURN_END}),
        ([published.TURN_END, "<repo_name>"], {published.TURN_END, "<repo_name>"}),
        (["<repo_name>"], {"<repo_name>"}),
    ):
        ids = [special[end] for end in ends if end in special]
        (source / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        found = smallmind.load(source, "numpy")[1].ends
        assert {names[i] for i in found} == expected | {published.END}
    (source / "generation_config.json").unlink()
    assert json.loads((source / "config.json").read_text())["eos_token_id"] == special["<|im_end|>"]
    found = smallmind.load(source, "numpy")[1].ends
    assert {names[i] for i in found} == {published.TURN_END, published.END}


@pytest.mark.parametrize(
    ("written", "theta"),
    [
        ({"rope_theta": 7000.0}, 7000),
        ({"rope_theta": 7000.0, "rope_scaling": None}, 7000),
        ({"rope_parameters": {"rope_theta": 7000.0, "rope_type": "default"}}, 7000),
        ({"rope_parameters": {"rope_theta": 7000.0}, "rope_theta": 5.0}, 7000),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 7000.0}, 7000),
        ({"rope_parameters": None, "rope_theta": 7000}, 7000),
        ({"rope_scaling": {"type": "default"}, "rope_theta": 7000.0}, 7000),
        ({}, 10_000),
    ],
)
def test_rotations_have_old_and_new_names(tmp_path, written, theta):
    model = model_of("Llama", bpe(), rope_theta=theta)
    smallmind.export(model, bpe(), tmp_path / "model")
    with edited(tmp_path / "model" / "config.json") as config:
        for key in ("rope_theta", "rope_scaling", "rope_parameters"):
            config.pop(key, None)
        config |= written
    assert_same_logits(smallmind.load(tmp_path / "model", "numpy")[0], model)


@pytest.mark.parametrize("kind", [None, 10])
def test_the_size_of_heads_follows_from_the_width_unless_it_is_said(tmp_path, kind):
    model = model_of("Llama", bpe(), head_size=kind)
    smallmind.export(model, bpe(), tmp_path / "model")
    with edited(tmp_path / "model" / "config.json") as config:
        assert config.pop("head_dim") == (kind or 6)
        config |= {"head_dim": kind}
    assert_same_logits(smallmind.load(tmp_path / "model", "numpy")[0], model)


WEIGHTS = "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
# A part that a directory lacks -> its files, and the message.
LACKING = {
    "weights": ([WEIGHTS], "has no model.safetensors; fetch it"),
    "tokenizer": (["tokenizer.json"], "has no tokenizer.json; save the tokenizer there"),
    "config": (
        ["config.json"],
        "has weights, but no config.json that describes their architecture",
    ),
    "model": (
        [WEIGHTS, "config.json", "generation_config.json"],
        "has a tokenizer, but no model: config.json and model.safetensors are missing",
    ),
}
COMMANDS = ["generate", "chat", "evaluate", "import", "export", "serve", "train"]


def command(name, path, tmp_path):
    """The words of a command that takes a model."""
    more = {
        "evaluate": [tmp_path / "text.txt"],
        "export": ["--to", "gguf", tmp_path / "a.gguf"],
        "import": ["--out", tmp_path / "run"],
        "serve": ["--no-browser"],
    }
    if name == "train":
        return [name, tmp_path / "text.txt", "--init-from", path, "--out", tmp_path / "run"]
    return [name, path, *more.get(name, [])]


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("what", LACKING)
def test_a_part_that_is_missing_is_named_in_one_line(tmp_path, source, cli, what, name):
    names, message = LACKING[what]
    for file in names:
        (source / file).unlink()
    (tmp_path / "text.txt").write_text(published.TEXT, encoding="utf-8")
    cli.refuses(f"{source} {message}", command(name, source, tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"source", "text.txt"}


def test_a_shard_without_its_index_says_what_is_missing(source):
    shard(source).unlink()
    message = refusal(smallmind.load, source, "numpy")
    assert "has 0.safetensors, but neither model.safetensors nor model.safetensors.index" in message


def test_a_config_that_names_no_architecture_is_said_so(source, cli):
    with edited(source / "config.json") as config:
        del config["model_type"]
    cli.refuses("config.json has no model_type, which names its", "generate", source)


@pytest.mark.parametrize("count", [1, 2])
def test_a_folder_of_gguf_files_names_one(tmp_path, cli, count):
    smallmind.export(model_of("Llama", bpe()), bpe(), tmp_path / "0.gguf", "gguf")
    folder = tmp_path / "folder"
    folder.mkdir()
    for i in range(count):
        shutil.copy(tmp_path / "0.gguf", folder / f"{i}.gguf")
    one = "the GGUF file" if count == 1 else "one of the GGUF files"
    cli.refuses(f"give {one} in it, such as {folder / '0.gguf'}", "generate", folder)
    assert cli("generate", folder / "0.gguf", "--prompt The --max-tokens 2").out


def test_a_gguf_file_with_a_part_of_a_model_says_what_is_missing(tmp_path, monkeypatch):
    path = tmp_path / "a.gguf"
    smallmind.export(model_of("Llama", bpe()), bpe(), path, "gguf")
    metadata, tensors = gguf_file.read(path)
    others = {key: x for key, x in metadata.items() if not key.startswith("tokenizer.")}
    for found, reason in (
        ((metadata, {}), "it has a tokenizer, but no model; give the file with the weights"),
        ((others, tensors), "it has no tokenizer; convert the model with its tokenizer"),
        (({**metadata, "split.count": np.uint16(3)}, tensors), "it is one of several files of a"),
    ):
        monkeypatch.setattr(gguf_file, "read", lambda _, found=found: found)
        assert f"{path}: {reason}" in refusal(smallmind.load, path, "numpy")
    joined = {**metadata, "split.count": np.uint16(0)}
    monkeypatch.setattr(gguf_file, "read", lambda _: (joined, tensors))
    assert smallmind.load(path, "numpy")


@pytest.mark.parametrize("base", ["gone", "OWNER/NAME", None])
@pytest.mark.parametrize("name", COMMANDS)
def test_an_adapter_whose_base_is_gone_says_so(tmp_path, cli, name, base):
    model = model_of("Llama", bpe())
    smallmind.export(model, bpe(), tmp_path / "base")
    path = tmp_path / "adapter"
    smallmind.exchange.format.export_adapter(adapters.saved(adapters.adapted(model)), path)
    with edited(path / "adapter_config.json") as config:
        config["base_model_name_or_path"] = base
    (tmp_path / "text.txt").write_text(published.TEXT, encoding="utf-8")
    reason = f"adapts {base}, which does not exist" if base else "does not say what it adapts"
    advice = "give its base model: smallmind generate MODEL --adapter RUN"
    cli.refuses(f"{reason}; {advice}", command(name, path, tmp_path))
    assert not {"run", "a.gguf"} & {file.name for file in tmp_path.iterdir()}
    words = ["generate", tmp_path / "base", "--adapter", path, "--prompt The --max-tokens 2"]
    assert cli(*words).out  # as advised


@pytest.mark.parametrize("name", MODELS)
def test_ids_beyond_the_rows_of_the_model_are_refused(tmp_path, name):
    smallmind.export(model_of(name, bpe()), bpe(), tmp_path / "model")
    for change in (added_token, ordinary_token):
        path = Path(shutil.copytree(tmp_path / "model", tmp_path / change.__name__))
        with edited(path / "tokenizer.json") as data:
            change(data, bpe().vocab_size + 4)
        said = f"its tokenizer has {bpe().vocab_size + 5} tokens, its model {bpe().vocab_size}"
        refuses(said, Run.import_model, path, tmp_path / "run")
        assert not (tmp_path / "run").exists()


def added_token(data, number):
    data["added_tokens"].append({**data["added_tokens"][-1], "content": "<new>", "id": number})


def ordinary_token(data, number):
    data["model"]["vocab"]["catcatcat"] = number


def rendered(tokenizer, question):
    """The ids of a question in chat.TEMPLATE, up to the answer."""
    return tokenizer.encode(f"<user>{question}{published.TURN_END}<assistant>")


def greedy(model, tokenizer, ids, most):
    """The text that a model writes after a prompt, one pass per token, up to one of its ends."""
    ids, start = list(ids), len(ids)
    while len(ids) < start + most:
        best = int(model.forward(np.array([ids], np.int32))[0, -1].argmax())
        if best in tokenizer.ends:
            break
        ids.append(best)
    return tokenizer.decode(ids[start:])


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """A chat model as a directory and as a GGUF file, conversations, a text."""
    folder = tmp_path_factory.mktemp("chats")
    chat.made(folder / "model", "SmolLM")
    model, tokenizer = smallmind.load(folder / "model", "numpy")
    smallmind.export(model, tokenizer, folder / "model.gguf", "gguf")
    lines = [{"question": f"the cat {i}?", "answer": f"the mat {i}"} for i in range(20)]
    (folder / "chats.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "text.txt").write_text("the cat sat on the mat. " * 60)
    return folder


@pytest.mark.parametrize("name", ["model", "model.gguf"])
def test_commands_take_a_chat_model_as_it_is(chats, name, cli, monkeypatch):
    """With the template and the ends of its file; nothing is written beside it."""
    pytest.importorskip("jinja2")
    before, path = sorted(chats.rglob("*")), chats / name
    model, tokenizer = smallmind.load(chats / "model", "numpy")
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat?\nthe dog?\n"))
    flags = "--temperature 0 --max-tokens 12"
    first, second = map(json.loads, cli("chat --json", path, flags).out.splitlines())
    said = greedy(model, tokenizer, rendered(tokenizer, "the cat?"), 12)
    assert first["content"] == said != second["content"]
    written = greedy(model, tokenizer, tokenizer.prompt("the"), 12)
    assert cli("generate", path, "--prompt the", flags).out == f"the{written}\n"
    table = cli("evaluate", path, chats / "text.txt").cells
    ids = tokenizer.prompt((chats / "text.txt").read_text())
    expected = smallmind.training.evaluation.evaluate_tokens(model, tokenizer, ids).loss
    assert table["loss"] == f"{expected:.4f} nats per token"
    assert sorted(chats.rglob("*")) == before


@pytest.mark.parametrize("name", ["model", "model.gguf"])
def test_the_server_takes_a_chat_model_as_it_is(chats, name):
    pytest.importorskip("jinja2")
    from tests.serve.conftest import talking

    model, tokenizer = smallmind.load(chats / "model", "numpy")
    asked = {"messages": [{"role": "user", "content": "the cat?"}]}
    with talking([chats / name]) as (client, _):
        (listed,) = client.get("/v1/models").json()["data"]
        assert listed["id"] == "model"
        body = {"model": "model", **asked, "temperature": 0, "max_tokens": 12}
        answer = client.post("/v1/chat/completions", json=body).json()
    said = greedy(model, tokenizer, rendered(tokenizer, "the cat?"), 12)
    assert answer["choices"][0]["message"]["content"] == said


@pytest.mark.parametrize("flags", ["--lora-rank 2 --precision q8_0", "--lora-rank 2", "--steps 4"])
@pytest.mark.parametrize("name", ["model", "model.gguf"])
def test_training_takes_a_chat_model_as_it_is(chats, tmp_path, name, flags, cli, monkeypatch):
    """It begins with the weights of the file, and keeps its template and ends."""
    pytest.importorskip("jinja2")
    out, steps = tmp_path / "run", "" if "--steps" in flags else "--steps 4"
    cli("train", chats / "chats.jsonl", "--init-from", chats / name, flags, steps, "--out", out)
    run, tokenizer = Run.open(out), smallmind.load(chats / name, "numpy")[1]
    found = run.load()[1]
    assert (found.ends, found.published) == (tokenizer.ends, tokenizer.published)
    begun = run.evaluate(chats / "text.txt", checkpoint=4).loss
    start = smallmind.load(chats / name)[0]
    ids = tokenizer.prompt((chats / "text.txt").read_text())
    at_start = smallmind.training.evaluation.evaluate_tokens(start, tokenizer, ids).loss
    assert abs(begun - at_start) < 0.5 and begun != at_start
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat?\n"))
    assert cli("chat", out, "--checkpoint newest --max-tokens 3").out


# An interrupt between opening a file and `with` leaves it to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ["model", "model.gguf"])
def test_an_import_that_is_interrupted_leaves_nothing(chats, tmp_path, name):
    """It ends either before anything is there, or after everything is."""
    whole, moment = {"config.json", "metrics.jsonl", "tokenizer.json", "published.json"}, 0

    def run_import():
        Run.import_model(chats / name, tmp_path / "new" / "run")

    for error in interrupted_everywhere(run_import, "creating.py", "directory.py", every=7):
        error.__traceback__ = None
        moment += 1
        left = {file.name for file in (tmp_path / "new" / "run").glob("*")}
        assert not left or left >= whole, moment
        if left:
            shutil.rmtree(tmp_path / "new")
        assert not (tmp_path / "new").exists(), moment
    assert moment > 9 and Run.open(tmp_path / "new" / "run").load()
