"""Text to token ids and back, and conversations to token ids.

Knows one `tokenizers` tokenizer, its control tokens and its chat template; knows no model. Users'
text never becomes a control token; only a template, or a caller who says so, writes those.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from foredraft.core.errors import InvalidRequest, ModelError
from foredraft.models.chat import (
    ChatTemplate,
    Control,
    ControlSplitter,
    ControlToken,
    Tools,
)
from foredraft.models.chat_messages import Message, check_text
from foredraft.models.detokenizer import Detokenizer

__all__ = ["Detokenizer", "Tokenizer"]

_FIRST, _NEVER = '"prepend_scheme": "first"', '"prepend_scheme": "never"'


class Tokenizer:
    """Built by `tokenizer_files` or `gguf_tokenizer`.

    `special_tokens` are the named ones a template may use (`{"bos_token": "<s>", ...}`);
    `eos_ids` end a generation; `add_bos` None means: as the backend's post-processor does.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        eos_ids: Sequence[int] = (),
        add_bos: bool | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        # From here on the backend reads control tokens as ordinary text; `ControlSplitter` finds
        # them where they are allowed.
        backend.encode_special_tokens = True
        self._backend = backend
        names = dict(special_tokens or {})
        added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        self.control_ids = frozenset(i for i, token in added.items() if token.special)
        self._control_by_text = {added[i].content: i for i in self.control_ids}
        self._splitter = ControlSplitter(
            [ControlToken(t.content, t.lstrip, t.rstrip) for t in added.values() if t.special]
        )
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        bos = names.get("bos_token")
        self.bos_id: int | None = None if bos is None else backend.token_to_id(bos)
        self.eos_ids = tuple(sorted(set(eos_ids)))
        self._template = (
            None if chat_template is None else ChatTemplate(chat_template, names, self._splitter)
        )
        state = _state(backend.decoder)
        self.is_byte_level = state.get("type") == "ByteLevel"
        self._spellings: dict[int, bytes] = {}
        self._prompt_prefix = self._read_prompt_prefix(add_bos)
        self._inner: Backend | None = None

    def encode(self, text: str) -> list[int]:
        """Ids of a user's text: never a control token's, and nothing added before or after.

        Raises InvalidRequest for what is no text, such as half of a surrogate pair.
        """
        if not isinstance(text, str):
            raise InvalidRequest(f"a text must be a str, got a {type(text).__name__}")
        check_text(text, "the text")
        return self._encode_plain(text, self._backend)

    def encode_prompt(self, text: str) -> list[int]:
        """`encode` behind what the tokenizer puts before every text (its BOS token, or nothing)."""
        return [*self._prompt_prefix, *self.encode(text)]

    def encode_with_special(self, text: str) -> list[int]:
        """Ids of trusted text: control tokens in it become themselves."""
        check_text(text, "the text")
        return self._encode_pieces(self._splitter.split(text))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD, unknown ids nothing."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` works."""
        return self._template is not None

    @property
    def chat_template(self) -> str | None:
        """The template's source."""
        return None if self._template is None else self._template.source

    def render_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
    ) -> str:
        """The conversation as text, for people to read. Raises as `apply_chat_template`."""
        return self._need_template().render(messages, add_generation_prompt, tools)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
    ) -> list[int]:
        """Ids of a conversation. Only the template's own control tokens are control tokens.

        `tools`: for templates that know them, as OpenAI's API has them.
        Raises ModelError without a template; InvalidRequest for malformed or refused messages.
        """
        pieces = self._need_template().pieces(messages, add_generation_prompt, tools)
        return self._encode_pieces(pieces)

    def control_id(self, text: str) -> int | None:
        """The id of the control token that is spelled `text`, None where there is none."""
        return self._control_by_text.get(text)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token as the vocabulary spells it, and its id."""
        return dict(self._backend.get_vocab(with_added_tokens=True))

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """What a token adds to the bytes of a text; nothing for an unknown id."""
        if skip_special_tokens and token_id in self.control_ids:
            return b""
        spelling = self._spellings.get(token_id)
        if spelling is None:
            token = self._backend.id_to_token(token_id)
            spelling = self._spellings[token_id] = b"" if token is None else self._spell(token)
        return spelling

    def token_text(self, token_id: int) -> str:
        """One token for people to read: its text, a control token's name."""
        return self.token_bytes(token_id, skip_special_tokens=False).decode("utf-8", "replace")

    def is_unfinished(self, token_id: int) -> bool:
        """Whether the text of a token may change with the next: a byte of a character."""
        token = self._backend.id_to_token(token_id)
        return token is not None and _byte_token(token) is not None

    def _spell(self, token: str) -> bytes:
        if self.is_byte_level:
            values = [BYTE_OF_CHARACTER.get(c) for c in token]
            if None in values:
                return token.encode()
            return bytes(v for v in values if v is not None)
        byte = _byte_token(token)
        return bytes([byte]) if byte is not None else token.replace("▁", " ").encode()

    def _need_template(self) -> ChatTemplate:
        if self._template is None:
            raise ModelError("the model has no chat template; give a prompt as plain text")
        return self._template

    def _encode_pieces(self, pieces: Sequence[str | Control]) -> list[int]:
        ids: list[int] = []
        backend = self._backend
        for piece in pieces:
            if isinstance(piece, Control):
                ids.append(self._control_by_text[piece.text])
            else:
                ids += self._encode_plain(piece, backend)
            backend = self._inner_backend()
        return ids

    def _encode_plain(self, text: str, backend: Backend) -> list[int]:
        encoding = backend.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        if self.control_ids.isdisjoint(ids):
            return ids
        return self._without_controls(text, encoding, backend)

    def _without_controls(self, text: str, encoding: Any, backend: Backend) -> list[int]:
        """The vocabulary itself holds a control token's text as one word: spell it in two parts."""
        ids: list[int] = []
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            part = text[start:end]
            if part in self._control_by_text and len(part) > 1:
                ids += self._encode_plain(part[:1], backend)
                ids += self._encode_plain(part[1:], self._inner_backend())
            else:
                ids.append(token)
        return ids

    def _inner_backend(self) -> Backend:
        """The backend for text that does not begin the whole: some put a space before the first."""
        if self._inner is None:
            self._inner = self._backend
            state = json.dumps(_state(self._backend.pre_tokenizer))
            if _FIRST in state:
                whole = json.loads(self._backend.to_str())
                whole["pre_tokenizer"] = json.loads(state.replace(_FIRST, _NEVER))
                self._inner = Backend.from_str(json.dumps(whole))
                self._inner.encode_special_tokens = True
        return self._inner

    def _read_prompt_prefix(self, add_bos: bool | None) -> list[int]:
        if add_bos is not None:
            return [self.bos_id] if add_bos and self.bos_id is not None else []
        plain = self._backend.encode("a", add_special_tokens=False).ids
        whole: list[int] = self._backend.encode("a", add_special_tokens=True).ids
        before = len(whole)
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                before = start
                break
        return whole[:before] if before < len(whole) else []


def _state(part: Any) -> dict[str, Any]:
    """The settings of a part of the backend."""
    if part is None:
        return {}
    state: dict[str, Any] = json.loads(part.__getstate__())
    return state


def _byte_token(token: str) -> int | None:
    """The byte a token such as "<0x0A>" stands for."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


def _byte_characters() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters (Radford et al. 2019, encoder.py)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_characters()
