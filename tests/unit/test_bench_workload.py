"""Workload files: what is read, and what a mistake says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foredraft.bench.workload import Item, read_workload, select
from foredraft.core.errors import UserError


def _file(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _line(**values: object) -> str:
    return json.dumps({"id": "a", "task": "chat", "turns": ["hello"], **values})


def test_reads_items_in_order_and_skips_blank_lines(tmp_path: Path) -> None:
    path = _file(tmp_path, _line(), "", _line(id="b", turns=["one", "two"], license="MIT"))
    assert read_workload(path) == [
        Item("a", "chat", ("hello",)),
        Item("b", "chat", ("one", "two")),
    ]
    assert [item.line for item in read_workload(path)] == [1, 3]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: must be a JSON object"),
        (_line(id=3), "line 2: field 'id'"),
        (_line(task=""), "line 2: field 'task'"),
        (_line(turns="hello"), "line 2: field 'turns'"),
        (_line(turns=[]), "line 2: field 'turns'"),
        (_line(turns=["x", 1]), r"line 2: field 'turns'\[1\]"),
        (_line(turns=["x", "\udcff"]), r"line 2: field 'turns'\[1\]"),
        (_line(id="\ud800"), "line 2: field 'id'"),
        ("[" * 50_000, "line 2: nested too deep"),
        ("9" * 5_000, "line 2: .*too long a number"),
    ],
)
def test_a_mistake_names_line_and_field(tmp_path: Path, line: str, words: str) -> None:
    path = _file(tmp_path, _line(id="first"), line)
    with pytest.raises(UserError, match=words) as caught:
        read_workload(path)
    assert "\n" not in str(caught.value)


def test_prompts_that_share_an_id_are_told_apart(tmp_path: Path) -> None:
    items = read_workload(_file(tmp_path, _line(), _line(id="b"), _line(turns=["other"])))
    assert [item.id for item in items] == ["a", "b", "a#2"]


def test_a_separator_inside_a_prompt_is_no_line_end(tmp_path: Path) -> None:
    line = json.dumps({"id": "a", "task": "chat", "turns": ["x\u2028y"]}, ensure_ascii=False)
    assert read_workload(_file(tmp_path, line))[0].turns == ("x\u2028y",)


def test_an_empty_or_missing_file_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no prompts"):
        read_workload(_file(tmp_path, ""))
    with pytest.raises(UserError, match="cannot read"):
        read_workload(tmp_path / "absent.jsonl")


def test_selects_tasks_and_limits_each() -> None:
    items = [Item(f"{task}{n}", task, ("x",)) for n in range(3) for task in ("chat", "edit")]
    assert [item.id for item in select(items, ["edit"], 2)] == ["edit0", "edit1"]
    assert [item.id for item in select(items, (), 1)] == ["chat0", "edit0"]
    with pytest.raises(UserError, match="it has chat, edit"):
        select(items, ["poetry"])


def test_the_benchmark_prompts_are_read() -> None:
    items = read_workload(Path("benchmarks/data/bench.jsonl"))
    assert {item.task for item in items} == {"chat", "code", "math", "edit", "extract"}
