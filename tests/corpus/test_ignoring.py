"""Rules of .gitignore files, compared with those of git."""

import os
import shutil
import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smallmind.corpus.ignoring import is_ignored, rules_of
from tests.corpus.reading import written

PATHS = (
    "a",
    "b.o",
    "ab",
    "a/b",
    "a/b.o",
    "b/a/b",
    "b/c/a/b",
    "a/a/a/ab",
    "c/.x",
    "-/!",
    "b/]",
)


def ignored(folder):
    """All paths in a folder that are ignored, those in ignored folders left out."""
    found, waiting = set(), [(str(folder), rules_of(str(folder), None), "")]
    while waiting:
        here, rules, prefix = waiting.pop()
        for name in sorted(set(os.listdir(here)) - {".git"}):
            path = os.path.join(here, name)
            is_folder = os.path.isdir(path) and not os.path.islink(path)
            if is_ignored(rules, name, is_folder):
                found.add(prefix + name)
            elif is_folder:
                waiting.append((path, rules_of(path, rules, name), f"{prefix}{name}/"))
    return found


def ignored_by_git(folder):
    """Returns the same by git, with only the folder in place of all in it."""
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    paths = []
    for here, folders, files in os.walk(folder):
        if ".git" in folders:
            folders.remove(".git")
        for name in (*folders, *files):
            paths.append(os.path.relpath(os.path.join(here, name), folder))
    done = subprocess.run(
        ["git", "-c", "core.excludesFile=", "check-ignore", "-z", "--stdin"],
        cwd=folder,
        input=b"\0".join(os.fsencode(f"./{path}") for path in paths),
        capture_output=True,
        env=environment,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    found = {os.fsdecode(x).removeprefix("./") for x in done.stdout.split(b"\0") if x}
    return {x for x in found if not any(x.startswith(f"{other}/") for other in found)}


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    if not shutil.which("git"):
        pytest.skip("git is not installed")
    folder = tmp_path_factory.mktemp("repository")
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    for name in PATHS:
        path = folder / name
        written(path if not any(x.startswith(f"{name}/") for x in PATHS) else path / "f", "x")
    return folder


PARTS = ["a", "b", "c", "*", "**", "?", "/", "/", ".o", "\\", "[ab]", "[!a]", " ", "]", "[", "-"]
PARTS += ["[[:alpha:]]", "[]-a]", "[a-[:alpha:]]", "[[:x:]]", "\\*", "#", "!", "**/", "/**", "\\ "]
LINES = st.lists(
    st.tuples(
        st.sampled_from(["", "", "!", "/"]), st.lists(st.sampled_from(PARTS), max_size=5)
    ).map(lambda found: found[0] + "".join(found[1])),
    max_size=5,
)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(LINES, LINES, LINES, st.sampled_from(["\n", "\r\n"]))
def test_git_ignores_the_same(repository, top, inner, local, end):
    for path, lines in (
        (repository / ".gitignore", top),
        (repository / "b" / ".gitignore", inner),
        (repository / ".git" / "info" / "exclude", local),
    ):
        path.write_bytes(end.join(lines).encode())
    assert ignored(repository) == ignored_by_git(repository)
