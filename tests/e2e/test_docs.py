"""What the docs show runs, what they link to exists, and the map of the rooms is complete."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from foredraft.testing.models import write_tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]


def _code(page: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    assert len(blocks) == 1
    return str(blocks[0])


def _run(code: str, model: Path) -> dict[str, Any]:
    assert '"smollm2-135m"' in code
    names: dict[str, Any] = {}
    exec(code.replace('"smollm2-135m"', repr(str(model))), names)
    return names


def test_the_readme_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_checkpoint(tmp_path, max_positions=2048)
    names = _run(_code("README.md").replace("max_tokens=256", "max_tokens=16"), model)
    assert (
        capsys.readouterr()
        .out.strip()
        .endswith(str(names["out"].metrics.speculative_decoding.mean_acceptance_length))
    )


def test_the_example_drafter_proposes_and_changes_nothing(tiny: Path) -> None:
    from foredraft import LLM, SamplingParams

    names = _run(_code("docs/adding-a-drafter.md"), tiny)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    output = names["llm"].generate("hello there", params)[0]
    assert output.token_ids == LLM(tiny).generate("hello there", params)[0].token_ids
    assert output.metrics.speculative_decoding.num_accepted_draft_tokens > 0


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if not link.startswith("http"):
                assert (page.parent / link).exists(), f"{page.relative_to(ROOT)}: {link}"


def test_the_map_names_every_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rooms = {path.parent.name for path in (ROOT / "src" / "foredraft").glob("*/__init__.py")}
    assert {room for room in rooms if f"`{room}/`" not in page} == set()


def test_every_decision_is_listed() -> None:
    decisions = ROOT / "docs" / "decisions"
    listed = (decisions / "README.md").read_text()
    for path in decisions.glob("0*.md"):
        assert f"({path.name})" in listed
