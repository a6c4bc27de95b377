"""A tiny random model that reads and writes bytes, with a chat template of one's choice."""

from __future__ import annotations

from dataclasses import replace

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from foredraft.models.load import LoadedModel
from foredraft.models.tokenizer import BYTE_OF_CHARACTER, Tokenizer
from foredraft.testing.models import tiny_model

CONTROLS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "<|python_tag|>")
# Templates of each format, no longer than its marks need.
_TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}MARK{{ c.function | tojson }}{% endfor %}"
    "{% if m.tool_call_id %}{{ m.tool_call_id }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TOLD = "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
TEMPLATES = {
    "generic": _TURNS.replace("MARK", ""),
    "hermes": _TOLD + _TURNS.replace("MARK", "<tool_call>"),
    "mistral": _TOLD + _TURNS.replace("MARK", "[TOOL_CALLS]"),
    "llama": _TOLD + _TURNS.replace("MARK", '{# "parameters" ipython #}'),
    "phi": (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}|{{ message['content'] }}"
        "{% if 'tools' in message %}{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}{% endif %}"
        "<|im_end|>{% endfor %}<|im_start|>assistant|"
    ),
}


def byte_tokenizer(template: str) -> Tokenizer:
    """The first ids are the control tokens, the others bytes."""
    tokens = [*CONTROLS, *BYTE_OF_CHARACTER]
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROLS])
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(backend, chat_template=template, special_tokens=names, eos_ids=(1,))


def byte_model(form: str, seed: int = 0) -> LoadedModel:
    """The model with the template of a format."""
    size = len(CONTROLS) + len(BYTE_OF_CHARACTER)
    loaded = tiny_model(seed, sharpness=3.0, max_positions=2048, num_threads=1, vocab_size=size)
    return replace(loaded, tokenizer=byte_tokenizer(TEMPLATES[form]))
