"""The documents can be read: lines, the README's tree, the index of the log, dates."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DAY = r"\d{4}-\d\d-\d\d"
MEASURED = re.compile(rf"\*({DAY})(?: to ({DAY}))?, measured at (`[0-9a-f]{{8}}`(?:, )?)+\.\*")


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def anchor(heading):
    """The name that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "smallmind/guide/features.md"])
def test_no_line_is_longer_than_120_characters(name):
    assert [line for line in text_of(name).splitlines() if len(line) > 120] == []


def test_the_tree_of_the_readme_names_every_folder():
    tree = re.search(r"```text\n(smallmind/cli/.*?)```", text_of("README.md"), re.DOTALL)[1]
    folders = {path.parent.name for path in (ROOT / "smallmind").glob("*/__init__.py")}
    assert {f"{name}/" for name in folders} <= set(re.findall(r"\b\w+/", tree))


def test_the_index_of_the_log_is_short_and_leads_to_every_section():
    log = text_of("bench/LOG.md")
    index = [line for line in log[: log.index("\n## ")].splitlines() if line.startswith("|")]
    assert index[0] == "| question | answer | section |" and len(index) <= 40
    assert all(line.count(" | ") == 2 and "|  |" not in line for line in index[2:])
    named = re.findall(r"\]\(#([^)]+)\)", "\n".join(index))
    assert sorted(named) == sorted(map(anchor, re.findall(r"^## (.*)", log, re.MULTILINE)))


def test_sections_of_the_log_are_dated_and_the_newest_comes_first():
    sections = re.split(r"^## .*\n\n", text_of("bench/LOG.md"), flags=re.MULTILINE)[1:]
    found = [MEASURED.match(section) for section in sections]
    assert None not in found
    days = [match[2] or match[1] for match in found]
    assert days == sorted(days, reverse=True)


def test_changes_are_listed_by_version_with_its_day_and_by_topic():
    versions = re.split(r"^## ", text_of("CHANGELOG.md"), flags=re.MULTILINE)[1:]
    assert all(re.match(rf"\d+\.\d+\.\d+, {DAY}\n", version) for version in versions)
    assert versions[0].count("\n### ") > 5
