"""The n-gram table's drafter: what it drafts, learns and forgets, and its options."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from foredraft.core.errors import ConfigError, ModelError
from foredraft.drafters import catalog
from foredraft.drafters.catalog import build_drafter
from foredraft.drafters.interface import Draft, DraftRequest
from foredraft.drafters.ngram_table import NgramTableDrafter
from foredraft.drafters.ngram_table_file import NgramTableFile
from foredraft.drafters.shipped.catalog import HEADS, TABLES, built_in_head, built_in_table
from foredraft.drafters.suffix_source import most_bytes
from foredraft.models import registry
from foredraft.models.built_in import BuiltIn, Licence, PackagedFile, Part
from foredraft.models.fingerprint import fingerprint
from foredraft.models.heads.eagle3_checkpoint import load_eagle3
from foredraft.models.load import LoadedModel, open_files
from foredraft.testing.models import tiny_model
from foredraft.testing.ngram_tables import small_table
from foredraft.testing.requests import draft_request

V = 64
SAID = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8]]


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return tiny_model(seed=1, vocab_size=V)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A table whose experts are all believed by their shares."""
    small_table(tmp_path / "t.ngrams", SAID, V, plain=True)
    return tmp_path / "t.ngrams"


def asked(tokens: Sequence[int], name: str = "r", salt: str = "", **more: int) -> DraftRequest:
    made = draft_request(list(tokens), vocab_size=V, name=name, **more)
    return made._replace(cache_salt=salt)


CHAIN = {"ngram_table_tree": False, "ngram_table_min_token_prob": 0.0}


def draft(drafter: NgramTableDrafter, tokens: Sequence[int], **more) -> Draft:
    (made,) = drafter.propose([asked(tokens, **more)])
    drafter.check_integrity()
    assert made.probs is None
    return made


def test_the_table_is_followed_and_says_how_sure_it_is(target, path) -> None:
    drafter = NgramTableDrafter(target, str(path), **CHAIN)
    made = draft(drafter, [20, 2, 3, 4])
    assert list(made.tokens) == [5, 6, 7, 8]
    assert list(made.parents) == [-1, 0, 1, 2]
    assert made.confidence[1] > made.confidence[0]  # 4 was followed by 5 and by 9
    assert all(0.0 < each < 1.0 for each in made.confidence)


def test_what_the_request_says_goes_before_the_table(target, path) -> None:
    text = [30, 3, 4, 31, 32, 33, 3, 4, 31, 32, 40, 41, 3, 4]
    made = draft(NgramTableDrafter(target, str(path), **CHAIN), text)
    assert list(made.tokens)[:2] == [31, 32]


def test_a_tree_has_siblings_the_likelier_first(target, path) -> None:
    drafter = NgramTableDrafter(target, str(path))
    assert drafter.capabilities.tree
    made = draft(drafter, [1, 2, 3, 4], max_nodes=6)
    first = [t for t, parent in zip(made.tokens, made.parents, strict=True) if parent < 0]
    assert first[:2] == [5, 9]


def test_unlikely_paths_are_not_drafted(target, path) -> None:
    long = draft(NgramTableDrafter(target, str(path), **CHAIN), [1, 2, 3, 4])
    for least in (0.05, 0.3, 0.9):
        options = CHAIN | {"ngram_table_min_token_prob": least}
        drafter = NgramTableDrafter(target, str(path), **options)
        made = draft(drafter, [1, 2, 3, 4])
        reach, wanted = 1.0, 0
        for each in long.confidence:
            reach *= each
            wanted += reach >= least
        assert list(made.tokens) == list(long.tokens)[:wanted]


def test_a_request_grows_and_another_of_the_same_name_is_read_anew(target, path) -> None:
    drafter = NgramTableDrafter(target, str(path), ngram_table_learn=False, **CHAIN)
    tokens = [50, 51, 52, 53, 54, 50, 51]
    assert list(draft(drafter, tokens).tokens)[:2] == [52, 53]
    assert list(draft(drafter, [*tokens, 52, 53]).tokens)[:1] == [54]
    assert list(draft(drafter, [1, 2, 3, 4]).tokens) == [5, 6, 7, 8]
    drafter.release("r")
    assert not drafter._states


def test_what_one_request_said_is_learned_for_its_salt_alone(target, path) -> None:
    drafter = NgramTableDrafter(target, str(path), **CHAIN)
    said = [40, 41, 42, 43, 44, 45, 46, 47, 48]
    draft(drafter, said[:2], name="first", num_prompt_tokens=2, salt="a")
    draft(drafter, said, name="first", num_prompt_tokens=2, salt="a")
    drafter.release("first")
    same = draft(drafter, [60, 43, 44], name="second", salt="a")
    other = draft(drafter, [60, 43, 44], name="third", salt="b")
    assert list(same.tokens)[:3] == [45, 46, 47]
    assert 45 not in other.tokens
    drafter.check_integrity()


def test_without_learning_nothing_is_kept(target, path) -> None:
    drafter = NgramTableDrafter(target, str(path), ngram_table_learn=False)
    assert drafter.learned is None
    assert drafter.capabilities.working_bytes == drafter.table.num_bytes
    few = NgramTableDrafter(target, str(path), ngram_table_max_learned_tokens=1000)
    more = few.capabilities.working_bytes - few.table.num_bytes
    assert more == most_bytes(1000, 1000)


def test_the_catalog_makes_it(target, path) -> None:
    built = build_drafter("ngram_table", {"ngram_table_path": str(path)}, target)
    assert isinstance(built.drafter, NgramTableDrafter)
    assert built.num_speculative_tokens == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be an integer of 1 or more"),
        ({"ngram_table_tree": 1}, "ngram_table_tree must be true or false, got 1"),
        ({"ngram_table_learn": None}, "ngram_table_learn must be true or false, got None"),
        ({"ngram_table_min_token_prob": 2}, "must be a number from 0 to 1, got 2"),
        ({"ngram_table_min_token_prob": float("nan")}, "must be a number from 0 to 1, got nan"),
        ({"ngram_table_max_learned_tokens": 0}, "must be an integer of 1 or more, got 0"),
        ({"ngram_table_path": 5}, "ngram_table_path must be the path of an n-gram table, got 5"),
        ({"ngram_table_path": ""}, "must be the path"),
        ({"ngram_table_bogus": 1}, "unknown option"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(target, path, options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        build_drafter("ngram_table", {"ngram_table_path": str(path)} | options, target)


def test_tables_that_do_not_fit_are_refused_or_named(target, path, tmp_path, caplog) -> None:
    with pytest.raises(ConfigError, match="no n-gram table comes with"):
        NgramTableDrafter(target)
    with pytest.raises(ModelError, match="cannot be read"):
        NgramTableDrafter(target, str(tmp_path / "none"))
    small_table(tmp_path / "v.ngrams", SAID, V + 1)
    with pytest.raises(ConfigError, match="is for a vocabulary of 65"):
        NgramTableDrafter(target, str(tmp_path / "v.ngrams"))
    with caplog.at_level(logging.WARNING, "foredraft"):
        NgramTableDrafter(target, str(path))
    assert "made of answers of 'small'" in caplog.text


def test_auto_takes_it_where_a_table_comes_with_the_target(target) -> None:
    known = replace(target, name="smollm2-135m")
    assert catalog.resolve_method("auto", {}, known) == "ngram_table"
    assert catalog.resolve_method("auto", {}, target) == "suffix"
    assert catalog.resolve_method("auto", {}) == "suffix"
    assert catalog.resolve_method("auto", {"model": "m"}, known) == "draft_model"
    assert catalog.resolve_method("auto", {"prompt_lookup_max": 3}, known) == "ngram"


def test_a_table_is_found_by_the_models_file_whatever_it_is_called(
    target, tmp_path, monkeypatch
) -> None:
    file, other = tmp_path / "mine.gguf", tmp_path / "other.gguf"
    file.write_bytes(b"weights")
    other.write_bytes(b"WEIGHTS")
    packaged = PackagedFile("a.gguf", fingerprint(file), (Part("p", "m", 7, 7),))
    model = BuiltIn("smollm2-135m", "1", packaged, Licence("Apache-2.0"), "")
    monkeypatch.setattr(registry, "BUILT_IN", {model.name: model})
    named = replace(target, name=str(file), path=file)
    assert catalog.resolve_method("auto", {}, named) == "ngram_table"
    assert built_in_table(str(file), file) == built_in_table("smollm2-135m")
    for wrong in (other, tmp_path, tmp_path / "absent"):
        assert built_in_table(str(wrong), wrong) is None


def test_the_tables_that_come_with_the_package_can_be_read() -> None:
    for name in TABLES:
        path = built_in_table(name)
        assert path is not None
        table = NgramTableFile.open(path)
        assert table.header.target == name
        assert table.num_bytes < 16e6


def test_the_heads_that_come_with_the_package_can_be_read() -> None:
    for name in HEADS:
        path = built_in_head(name)
        assert path is not None
        target = open_files(registry.pull(name))[0]
        head = load_eagle3(path, target)
        assert head.config.target_sha256 == fingerprint(registry.pull(name))
    assert built_in_head("another") is None
