"""The house's rules about its own source: layers, sizes, words. Each check is shown to be able to
fail.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "foredraft"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 50
BANNED_MODULES = re.compile(
    r"^(info|utils?|helpers?|managers?|misc|common)$|_(v\d+|new|old|legacy)$"
)
BANNED_NAMES = re.compile(r"accept_length|accept_len\b|_v2$|_new$|_legacy$")
ENVIRONMENT_READERS = {"models/registry.py"}  # where downloaded models lie is the user's to say


def lint_imports(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def test_the_layers_hold() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A copy of the package under another name, so that the installed one is not what gets read."""
    for source in SOURCES:
        copy = tmp_path / "planted" / source.relative_to(PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(source.read_text().replace("foredraft", "planted"))
    config = (ROOT / "pyproject.toml").read_text().replace("foredraft", "planted")
    (tmp_path / "pyproject.toml").write_text(config)
    return tmp_path


VIOLATIONS = {
    "a lower room imports a higher one": ("core/coins.py", "from planted.kernels import catalog"),
    "drafters import the engine": ("drafters/ngram.py", "import planted.engine.engine"),
    "planning imports torch": ("planning/policy.py", "import torch"),
    "planning imports core beyond counts": (
        "planning/speedup.py",
        "from planted.core.sampling import SamplingParams",
    ),
    "drafters import planning": ("drafters/ngram.py", "import planted.planning.policy"),
    "a head's training imports a drafter": (
        "training/eagle3.py",
        "import planted.drafters.drawing",
    ),
}


def test_a_planted_copy_without_a_violation_passes(planted: Path) -> None:
    result = lint_imports(planted)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_planted_violation_is_reported(name: str, planted: Path) -> None:
    path, line = VIOLATIONS[name]
    module = planted / "planted" / path
    module.write_text(f"{module.read_text()}\n\n{line}\n")
    result = lint_imports(planted)
    assert result.returncode != 0
    assert "broken" in result.stdout
    assert "planted." + path.removesuffix(".py").replace("/", ".") in result.stdout


def test_planning_imports_nothing_of_the_house_but_counts() -> None:
    for source in sorted((PACKAGE / "planning").glob("*.py")):
        for module in imported_modules(source):
            if module.startswith("foredraft."):
                assert module.startswith(("foredraft.planning", "foredraft.core.counts")), source


def test_core_imports_no_modules_io_clock_or_random_generator() -> None:
    foreign = {"random", "time", "os", "sys", "pathlib", "io", "secrets", "torch.nn"}
    for source in sorted((PACKAGE / "core").glob("*.py")):
        assert not foreign & set(imported_modules(source)), source
        assert not re.search(r"torch\.(rand|manual_seed|multinomial|Generator|nn)\b", code(source))


def test_files_are_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in [*SOURCES, *TESTS]}
    assert {path: n for path, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_functions_are_short() -> None:
    long = {
        f"{path.relative_to(ROOT)}:{function.name}": lines
        for path in [*SOURCES, *TESTS]
        for function, lines in functions(path)
        if lines > MAX_FUNCTION_LINES
    }
    assert long == {}


@pytest.mark.parametrize(
    "stem", ["utils", "helpers", "manager", "info", "sampler_v2", "engine_new"]
)
def test_banned_module_names_are_recognised(stem: str) -> None:
    assert BANNED_MODULES.search(stem)


def test_no_module_has_a_banned_name() -> None:
    stems = [part for path in SOURCES for part in (path.stem, path.parent.name)]
    assert [stem for stem in stems if BANNED_MODULES.search(stem)] == []


def test_no_name_is_banned() -> None:
    assert BANNED_NAMES.search("mean_accept_length")
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        for name in names(path)
        if BANNED_NAMES.search(name)
    }
    assert found == set()


def test_every_module_says_what_it_knows() -> None:
    silent = [
        path.relative_to(ROOT)
        for path in SOURCES
        if path.stat().st_size and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def test_nothing_is_unfinished_or_silenced() -> None:
    pattern = re.compile(
        r"NotImplementedError|\bTODO\b|\bFIXME\b|#\s*type:\s*ignore|except\s*:|\bXXX\b"
    )
    assert pattern.search("raise NotImplementedError")
    found = [path for path in SOURCES if pattern.search(path.read_text())]
    assert found == []


def test_the_environment_is_read_by_the_command_only() -> None:
    readers = {
        str(path.relative_to(PACKAGE))
        for path in SOURCES
        if re.search(r"os\.(environ|getenv)", code(path))
    }
    outside = {reader for reader in readers if not reader.startswith("cli/")}
    assert outside <= ENVIRONMENT_READERS


def test_no_module_reaches_for_a_gpu_by_itself() -> None:
    """Devices are arguments."""
    for path in SOURCES:
        assert not re.search(r"torch\.cuda\.|\.cuda\(", code(path)), path


def test_the_plain_package_does_not_load_torch() -> None:
    """`import foredraft` is what the command's help pays."""
    script = "import sys, foredraft; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def imported_modules(path: Path) -> list[str]:
    modules: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules.append(node.module or "")
            modules += [f"{node.module}.{alias.name}" for alias in node.names]
    return modules


def functions(path: Path) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, int]]:
    """Every function and the lines of its body, without signature and docstring."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            yield node, (node.end_lineno or 0) - body[0].lineno + 1 if body else 0


def names(path: Path) -> set[str]:
    """Identifiers: what is defined, assigned, or read as an attribute."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
    return found


def code(path: Path) -> str:
    """The source without its docstrings and comments."""
    return ast.unparse(_WithoutDocstrings().visit(ast.parse(path.read_text())))


class _WithoutDocstrings(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return ast.Pass() if is_text else node
