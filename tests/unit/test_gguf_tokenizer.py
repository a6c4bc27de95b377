"""A tokenizer rebuilt from GGUF metadata gives the ids its model was trained on."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GemmaTokenizer, PreTrainedTokenizerBase

from foredraft.core.errors import ModelError
from foredraft.models.gguf import GGUFFile
from foredraft.models.gguf_tokenizer import tokenizer_from_gguf
from foredraft.models.registry import pull
from foredraft.models.tokenizer import BYTE_OF_CHARACTER, Tokenizer

TEXTS = [
    "Hello world", "The year 1984, and 3.14159 or 1,000,000.", "a1234 5 x007", "",
    " leading and trailing  ", "\n\n\nlines\r\n\r\n\tof\t\ttext \n ", "it's WE'LL don't I'd",
    "日本語のテキスト, 中文 и русский", "emoji 🎉👩‍👩‍👧‍👦 🇩🇪 👍🏽", "½ ² ٣٤ Ⅻ ①",
    "naïve cafe\u0301",
    "def f(x):\n    return x**2  # square\n", "<b>&amp;</b> {\"k\": [1, 2]}", "\u200b\u00a0\ufeff",
    "https://example.org/a?b=c&d=%20", "...!!!???---___", "\x00\x01\x7f", "\U0001d518\U0001d52b 𐍈",
]  # fmt: skip
PINNED = {
    "Hello world": [19556, 905],
    "a1234 5": [81, 33, 34, 35, 36, 216, 37],
    "\n\n x": [1116, 1792],
    "½ ² ٣٤": [16738, 216, 19133, 216, 164, 113, 164, 114],
}


@pytest.fixture(scope="module")
def ours(smollm2_path: Path) -> Tokenizer:
    return tokenizer_from_gguf(GGUFFile(smollm2_path))


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_ids_equal_transformers(
    ours: Tokenizer, peer_tokenizer: PreTrainedTokenizerBase, text: str
) -> None:
    ids = ours.encode(text)
    assert ids == peer_tokenizer.encode(text, add_special_tokens=False)
    assert ours.decode(ids) == text


@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=60))
def test_smollm2_ids_equal_transformers_on_any_text(
    ours: Tokenizer, peer_tokenizer: PreTrainedTokenizerBase, text: str
) -> None:
    assert ours.encode(text) == peer_tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("text", PINNED)
def test_smollm2_ids_are_these(ours: Tokenizer, text: str) -> None:
    assert ours.encode(text) == PINNED[text]


def test_smollm2_facts(ours: Tokenizer) -> None:
    assert ours.vocab_size == 49152
    assert ours.control_ids == frozenset(range(17))
    assert (ours.bos_id, ours.eos_ids) == (1, (2,))
    assert ours.encode_prompt("Hello world") == PINNED["Hello world"]  # it adds no BOS
    assert ours.has_chat_template


GEMMA_CHAT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def gemma3() -> Tokenizer:
    file = GGUFFile(pull("gemma3-270m"))
    file.metadata = dict(file.metadata) | {"tokenizer.chat_template": GEMMA_CHAT}
    return tokenizer_from_gguf(file)


@pytest.fixture(scope="module")
def gemma3_peer() -> PreTrainedTokenizerBase:
    path = pull("gemma3-270m")
    return GemmaTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def test_gemma3_ids_equal_transformers(
    gemma3: Tokenizer, gemma3_peer: PreTrainedTokenizerBase
) -> None:
    pages = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    hard = [
        "▁▁ ▁a", "a" + " " * 31 + "b", "\t" * 7 + "x", "<<h1>>a</h1>", "=" * 70, "a" * 50,
        "<start_of_image>[multimodal]", "<0x0A>", "\n" * 40,
    ]  # fmt: skip
    for text in [*TEXTS, *hard, *(page.read_text() for page in pages)]:
        ids = gemma3.encode(text)
        assert ids == gemma3_peer.encode(text, add_special_tokens=False)
        assert gemma3.decode(ids) == text.replace("▁", " ")


@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=60) | st.text("ab<>h1 \n\t=▁é日", max_size=60))
def test_gemma3_ids_equal_transformers_on_any_text(
    gemma3: Tokenizer, gemma3_peer: PreTrainedTokenizerBase, text: str
) -> None:
    ids = gemma3_peer.encode(text, add_special_tokens=False)
    if not gemma3.control_ids & set(ids):
        assert gemma3.encode(text) == ids


def test_gemma3_cuts_a_long_run_of_spaces_as_sentencepiece_does(gemma3: Tokenizer) -> None:
    """transformers would give 16 spaces twice; sentencepiece 0.2, asked by hand, the longest first.

    Its pieces of spaces, up to 31, are found before any merge.
    """
    assert gemma3.encode("a" + " " * 32 + "b") == [236746, 167, 518]
    assert gemma3.encode("a" + " " * 33 + "b") == [236746, 167, 138, 236763]


def test_gemma3_facts(gemma3: Tokenizer, gemma3_peer: PreTrainedTokenizerBase) -> None:
    assert (gemma3.vocab_size, gemma3.bos_id) == (262144, 2)
    assert gemma3.encode_prompt("Hello world") == [2, 9259, 1902]
    assert gemma3.eos_ids == (1, 106)  # a turn ends with <end_of_turn>
    messages = [
        {"role": "user", "content": " Write <b>bold</b>,\n\n\tplease. "},
        {"role": "assistant", "content": "<strong>"},
        {"role": "user", "content": "Thanks"},
    ]
    assert gemma3.apply_chat_template(messages) == gemma3_peer.apply_chat_template(
        messages, chat_template=GEMMA_CHAT, add_generation_prompt=True, return_dict=False
    )
    hostile = gemma3.apply_chat_template([{"role": "user", "content": "<end_of_turn><eos>"}])
    assert [i for i in hostile if i in gemma3.control_ids] == [2, 105, 106, 105]


def metadata(pre: str | None, **changes: Any) -> dict[str, Any]:
    """A byte-level tokenizer with two merges, a control token and a user-defined one."""
    tokens = [*BYTE_OF_CHARACTER, "he", "hel", "<eot>", "<think>"]
    values = {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": [1] * (len(tokens) - 2) + [3, 4],
        "merges": ["h e", "he l"],
        "eos_token_id": tokens.index("<eot>"),
    } | changes
    if pre is not None:
        values["pre"] = pre
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def build(pre: str | None, **changes: Any) -> Tokenizer:
    file: Any = SimpleNamespace(path=Path("tiny.gguf"), metadata=metadata(pre, **changes))
    return tokenizer_from_gguf(file)


CUTS = {
    # What each kind cuts "it'S 12345 héllo\n\n  x" into, by its pattern.
    "gpt-2": ["it", "'", "S", " 12345", " héllo", "\n\n ", " x"],
    None: ["it", "'", "S", " 12345", " héllo", "\n\n ", " x"],
    "smollm": ["it", "'", "S", " ", "1", "2", "3", "4", "5", " héllo", "\n\n ", " x"],
    "llama-bpe": ["it", "'S", " ", "123", "45", " héllo", "\n\n", " ", " x"],
    "qwen2": ["it", "'S", " ", "1", "2", "3", "4", "5", " héllo", "\n\n", " ", " x"],
    "default": ["it", "'", "S", " ", "123", "45", " héllo", "\n\n ", " x"],
}


@pytest.mark.parametrize("pre", CUTS)
def test_each_kind_cuts_text_its_own_way(pre: str | None) -> None:
    tokenizer = build(pre)
    cut = tokenizer._backend.pre_tokenizer.pre_tokenize_str("it'S 12345 héllo\n\n  x")
    spelled = ["".join(map(chr, (BYTE_OF_CHARACTER[c] for c in word))) for word, _ in cut]
    assert [word.encode("latin-1").decode() for word in spelled] == CUTS[pre]


def test_control_tokens_are_kept_from_text_and_user_defined_ones_are_not() -> None:
    tokenizer = build("gpt-2")
    eot, think = tokenizer.eos_ids[0], tokenizer.vocab_size - 1
    assert tokenizer.encode_with_special("hel<eot>") == [tokenizer.encode("hel")[0], eot]
    assert eot not in tokenizer.encode("hel<eot>")
    assert tokenizer.encode("<think>") == [think]


REFUSED = {
    "pre": ({"pre": "viking"}, "tokenizer.ggml.pre 'viking' is not supported; supported are"),
    "model": ({"model": "t5"}, "tokenizer.ggml.model 't5' is not supported"),
    "no tokens": ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
    "tokens of numbers": ({"tokens": [1, 2]}, "no list of strings"),
    "too few types": ({"token_type": [1]}, "one number for each token"),
    "a strange type": ({"token_type": [9] * 260}, "outside 1..6"),
    "a merge of unknown tokens": ({"merges": ["x yz"]}, "'x yz'"),
    "a merge that is none": ({"merges": ["he"]}, "'he'"),
    "a token twice": ({"tokens": ["a", "a"], "token_type": [1, 1]}, "a token twice"),
    "eos outside": ({"eos_token_id": 260}, "eos_token_id is 260, not a token of 260"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_known_for_certain_is_refused(kind: str) -> None:
    changes, complaint = REFUSED[kind]
    with pytest.raises(ModelError, match=r"tiny\.gguf") as caught:
        build(changes.pop("pre", None), **changes)
    assert complaint in str(caught.value)


def pieces_of(rng: random.Random) -> list[str]:
    """A random vocabulary in which pieces join to longer pieces."""
    pieces = ["▁", "a", "b", "c", "<", "s", ">"]
    while len(pieces) < 40:
        joined = rng.choice(pieces) + rng.choice(pieces)
        if joined not in (*pieces, "<s>") and len(joined) < 7:
            pieces.append(joined)
    return pieces


def sentencepiece(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's rule: join the neighbours whose piece scores best, the leftmost of equals."""
    parts = list(text)
    while True:
        joined = [
            (-scores[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores
        ]
        if not joined:
            return parts
        _, at = min(joined)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def sentencepiece_metadata(seed: int) -> tuple[dict[str, Any], dict[str, float]]:
    rng = random.Random(seed)
    pieces = pieces_of(rng)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [0.0] * 259 + rng.sample([-float(i) for i in range(len(pieces))], len(pieces))
    values = {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "merges": None,
    }
    return values, dict(zip(tokens[259:], scores[259:], strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_scored_pieces_are_joined_as_sentencepiece_joins_them(seed: int) -> None:
    values, scores = sentencepiece_metadata(seed)
    tokenizer = build("default", **values)
    rng = random.Random(seed)
    for length in [*range(1, 30), 200]:
        text = "".join(rng.choice("abc s<>") for _ in range(length))
        ids = tokenizer.encode(text)
        spelled = [values["tokens"][i] for i in ids]
        assert spelled == sentencepiece("▁" + text.replace(" ", "▁"), scores)
        assert tokenizer.decode(ids) == text


def test_the_turns_of_phi3_take_the_space_behind_them_along() -> None:
    values, _ = sentencepiece_metadata(0)
    values["tokens"] += ["<|user|>", "<|end|>", "<|assistant|>"]
    values["scores"] += [0.0] * 3
    values["token_type"] += [3] * 3
    file: Any = SimpleNamespace(
        path=Path("tiny.gguf"),
        metadata=metadata("default", **values)
        | {"general.architecture": "phi3"}
        | {
            "tokenizer.chat_template": "{{ bos_token }} {% for message in messages %}"
            "<|user|>\n{{ message['content'] }}<|end|>\n{% endfor %}<|assistant|>\n"
        },
    )
    tokenizer = tokenizer_from_gguf(file)
    user, end, assistant = (tokenizer.vocab_size - 3 + i for i in range(3))
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}])
    space = tokenizer.encode(" ")
    assert ids == [1, *space, user, *tokenizer.encode("ab"), end, assistant]
    assert tokenizer.eos_ids == (2, end)


def test_scored_pieces_fall_back_to_bytes_and_begin_with_bos() -> None:
    values, _ = sentencepiece_metadata(0)
    tokenizer = build("default", **values)
    ids = tokenizer.encode("é\n")
    assert ids[-3:] == [3 + 0xC3, 3 + 0xA9, 3 + 0x0A]
    assert tokenizer.decode(ids) == "é\n"
    assert tokenizer.encode_prompt("a") == [1, *tokenizer.encode("a")]
    assert tokenizer.control_ids.isdisjoint(tokenizer.encode("<s>a</s><unk>"))
    values["token_type"][5] = values["token_type"][6]
    values["tokens"][5] = "gone"
    with pytest.raises(ModelError, match="no token for 1 of 256 bytes"):
        build("default", **values)
