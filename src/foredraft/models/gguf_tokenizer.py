"""A tokenizer rebuilt from a GGUF file's metadata.

Knows llama.cpp's names of tokenizers and how each cuts text before its merges; knows no tensor.
A kind of tokenizer that is not known for certain is refused by name: wrong ids would be silent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from foredraft.core.errors import ModelError
from foredraft.models.gguf import GGUFFile
from foredraft.models.scored_bpe import scored_bpe
from foredraft.models.tokenizer import Tokenizer
from foredraft.models.tokenizer_json import MAX_TOKEN
from foredraft.models.turn_ends import generation_ends

_PREFIX = "tokenizer.ggml."
# ggml's token types.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_TYPES = range(1, 7)

# Patterns as in llama.cpp's llama-vocab.cpp and the models' own tokenizer.json files.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level(cut: bool) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut)


def _cut(*patterns: str) -> Any:
    """Cut by each pattern in turn, then spell bytes as characters."""
    return pre_tokenizers.Sequence(
        [*(pre_tokenizers.Split(Regex(p), "isolated") for p in patterns), _byte_level(False)]
    )


def _digits_then_gpt2() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(True), _byte_level(True)])


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": lambda: _byte_level(True),
    "smollm": _digits_then_gpt2,
    "llama-bpe": lambda: _cut(_LLAMA3),
    "qwen2": lambda: _cut(_QWEN2),
    "default": lambda: _cut(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}
_ALIASES = {"gpt2": "gpt-2", "llama3": "llama-bpe", "llama-v3": "llama-bpe", "starcoder": "smollm"}
_WHOLE_WORDS_FIRST = {"llama-bpe"}  # a piece that is a token as it stands is never merged up
_NORMALIZED = {"qwen2"}


def tokenizer_from_gguf(file: GGUFFile) -> Tokenizer:
    """The tokenizer and chat template the metadata describes.

    Raises ModelError for a kind that is unknown, and for lists that contradict each other.
    """
    meta = _Metadata(file)
    kind = meta.text("model")
    if kind not in _MODELS:
        raise ModelError(
            f"{file.path}: tokenizer.ggml.model {kind!r} is not supported; "
            f"supported are {', '.join(_MODELS)}"
        )
    tokens = meta.strings("tokens")
    if len(set(tokens)) != len(tokens):
        raise ModelError(f"{meta.source}: tokenizer.ggml.tokens holds a token twice")
    longest = max(tokens, key=len, default="")
    if len(longest) > MAX_TOKEN:
        raise ModelError(
            f"{meta.source}: tokenizer.ggml.tokens holds one of {len(longest)} characters, "
            f"at most {MAX_TOKEN} fit: {longest[:40]!r}..."
        )
    types = meta.types(len(tokens))
    backend = _MODELS[kind](meta, tokens, types)
    _add_tokens(backend, tokens, types, kind, file.metadata.get("general.architecture"))
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{file.path}: tokenizer.chat_template is no string")
    named = {
        name: tokens[token_id]
        for name, key in _NAMED_TOKENS.items()
        if (token_id := meta.token_id(key, len(tokens))) is not None
    }
    ends = [meta.token_id(key, len(tokens)) for key in ("eos_token_id", "eot_token_id")]
    return Tokenizer(
        backend,
        chat_template=template,
        special_tokens=named,
        eos_ids=generation_ends(backend, [e for e in ends if e is not None], template),
        add_bos=meta.flag("add_bos_token", kind == "llama"),
    )


_NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def _byte_level_bpe(meta: _Metadata, tokens: list[str], types: list[int]) -> Backend:
    """GPT-2's kind: bytes spelled as characters, merges in order."""
    pre = meta.text("pre", "gpt-2")
    pre = _ALIASES.get(pre, pre)
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise ModelError(
            f"{meta.source}: tokenizer.ggml.pre {pre!r} is not supported; supported are {known}"
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [_merge(line, vocab, meta.source) for line in meta.strings("merges")]
    backend = Backend(models.BPE(vocab, merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    if pre in _NORMALIZED:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(meta: _Metadata, tokens: list[str], types: list[int]) -> Backend:
    """Llama 1 and 2's kind: pieces with scores, bytes for what no piece covers."""
    if meta.flag("remove_extra_whitespaces", False):
        raise ModelError(f"{meta.source}: tokenizer.ggml.remove_extra_whitespaces is not supported")
    unknown = meta.token_id("unknown_token_id", len(tokens))
    try:
        return scored_bpe(
            tokens,
            meta.numbers("scores", len(tokens)),
            [kind in (_NORMAL, _USER_DEFINED) for kind in types],
            None if unknown is None else tokens[unknown],
            meta.flag("add_space_prefix", True),
        )
    except ModelError as error:
        raise ModelError(f"{meta.source}: {error}") from error


_MODELS: dict[str, Callable[[_Metadata, list[str], list[int]], Backend]] = {
    "gpt2": _byte_level_bpe,
    "llama": _sentencepiece_bpe,
}


def _add_tokens(
    backend: Backend, tokens: list[str], types: list[int], kind: str, architecture: Any
) -> None:
    """Control tokens, and tokens that their owner defined, which text becomes before any merge."""
    strips = kind == "llama" and architecture == "phi3"
    # SentencePiece finds the second kind in text whose spaces are spelled already, and so does
    # `normalized`; where a space is put before each text, their own spelling would get it too.
    normalized = kind == "llama" and not _begins_with_space(backend)
    control, defined = [], []
    for token, token_type in zip(tokens, types, strict=True):
        if token_type in (_CONTROL, _UNKNOWN):
            rstrip = strips and token not in _PHI3_KEEPS_SPACE
            control.append(AddedToken(token, special=True, normalized=False, rstrip=rstrip))
        elif token_type == _USER_DEFINED:
            defined.append(AddedToken(token, special=False, normalized=normalized))
    backend.add_special_tokens(control)
    backend.add_tokens(defined)


# Phi 3's other control tokens take the white space behind them along (llama.cpp, llama-vocab.cpp).
_PHI3_KEEPS_SPACE = {"<unk>", "<s>", "<|endoftext|>"}


def _begins_with_space(backend: Backend) -> bool:
    spelled: str = backend.normalizer.normalize_str("a")
    return spelled != "a"


def _merge(line: str, vocab: dict[str, int], source: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    if left not in vocab or right not in vocab or left + right not in vocab:
        raise ModelError(f"{source}: tokenizer.ggml.merges has {line!r}, of tokens not in the list")
    return left, right


class _Metadata:
    """The tokenizer's part of a file's metadata, with types checked."""

    def __init__(self, file: GGUFFile) -> None:
        self._metadata = file.metadata
        self.source = str(file.path)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._metadata.get(_PREFIX + key, default)
        if not isinstance(value, str):
            raise ModelError(f"{self.source}: {_PREFIX}{key} is {value!r}; expected a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(_PREFIX + key, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.source}: {_PREFIX}{key} is {value!r}; expected true or false")
        return value

    def strings(self, key: str) -> list[str]:
        value = self._metadata.get(_PREFIX + key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ModelError(f"{self.source}: {_PREFIX}{key} is missing or no list of strings")
        return value

    def numbers(self, key: str, count: int) -> list[float]:
        value = self._metadata.get(_PREFIX + key)
        if not isinstance(value, list) or len(value) != count:
            raise ModelError(f"{self.source}: {_PREFIX}{key} needs one number for each token")
        if not all(isinstance(item, int | float) and math.isfinite(item) for item in value):
            raise ModelError(f"{self.source}: {_PREFIX}{key} holds what is no finite number")
        return [float(item) for item in value]

    def types(self, count: int) -> list[int]:
        value = self._metadata.get(f"{_PREFIX}token_type")
        if not isinstance(value, list) or len(value) != count:
            raise ModelError(f"{self.source}: {_PREFIX}token_type needs one number for each token")
        if any(kind not in _TYPES for kind in value):
            raise ModelError(f"{self.source}: {_PREFIX}token_type holds a number outside 1..6")
        return value

    def token_id(self, key: str, count: int) -> int | None:
        value = self._metadata.get(_PREFIX + key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
            raise ModelError(f"{self.source}: {_PREFIX}{key} is {value!r}, not a token of {count}")
        return value
