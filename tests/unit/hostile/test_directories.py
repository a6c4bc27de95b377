"""Directories made to harm: nonsense in their JSON, tokenizers that disagree, pipes for files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foredraft.core.errors import ModelError
from foredraft.models.load import load_model
from foredraft.models.safetensors_weights import INDEX, SINGLE
from foredraft.testing.models import write_tiny_checkpoint

INF, NAN = float("inf"), float("nan")
LONG = "x" * 100_000


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "model")


def table(cases: dict[str, tuple[Any, str]]) -> list[Any]:
    """Parameters `(value, complaint)`."""
    return [pytest.param(*case, id=kind) for kind, case in cases.items()]


CONFIGS: dict[str, tuple[Any, str]] = {
    "a huge vocabulary": ({"vocab_size": 10**30}, "vocab_size is 1000000000000000000000000000000;"),
    "a vocabulary that is not there": ({"vocab_size": 2**31}, r"expected \[2147483648, 32\]"),
    "a negative vocabulary": ({"vocab_size": -1}, "vocab_size is -1; expected an integer from 1"),
    "a vocabulary of text": ({"vocab_size": "32"}, "vocab_size is '32'; expected an integer"),
    "a vocabulary in a list": ({"vocab_size": [32]}, r"vocab_size is \[32\]; expected an integer"),
    "a width that is true": ({"hidden_size": True}, "hidden_size is True; expected an integer"),
    "a width with a fraction": ({"hidden_size": 32.5}, "hidden_size is 32.5; expected"),
    "a width that is no number": ({"hidden_size": NAN}, "hidden_size is nan; expected an integer"),
    "a width that is null": ({"hidden_size": None}, "hidden_size is missing"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads is 0; expected"),
    "more layers than fit": ({"num_hidden_layers": 10**9}, "num_layers is 1000000000, at most"),
    "layers that are not there": ({"num_hidden_layers": 4096}, "missing tensors model.layers"),
    "a wide middle": ({"intermediate_size": 2**40}, r"expected \[1099511627776, 32\]"),
    "more positions than fit": ({"max_position_embeddings": 2**40}, "is 1099511627776, at most"),
    "an epsilon that is no number": ({"rms_norm_eps": NAN}, "rms_norm_eps is nan; expected"),
    "an infinite epsilon": ({"rms_norm_eps": INF}, "rms_norm_eps is inf; expected a finite"),
    "an epsilon of 0": ({"rms_norm_eps": 0}, "rms_norm_eps is 0; expected a finite number above 0"),
    "an epsilon of text": ({"rms_norm_eps": LONG}, r"rms_norm_eps is 'x+\.\.\.; expected a number"),
    "an epsilon beyond every float": ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000.*expected"),
    "a base beyond every float": ({"rope_theta": 10**400}, "rope_theta is 1000.*expected"),
    "a negative base": ({"rope_theta": -1.0}, "rope_theta is -1.0; expected a finite number above"),
    "a huge head": ({"head_dim": 2**40}, "head_dim is 1099511627776"),
    "an odd head": ({"head_dim": 7}, "head_dim is 7"),
    "no architecture": ({"architectures": None}, "architectures is None; expected a list with one"),
    "two architectures": ({"architectures": ["a", "b"]}, r"architectures is \['a', 'b'\]"),
    "an object as architecture": ({"architectures": [{}]}, r"architectures is \[\{\}\]; expected"),
    "a long architecture": ({"architectures": [LONG]}, "architecture 'xx"),
    "an architecture of two lines": ({"architectures": ["a\nb"]}, r"architecture 'a\\nb' is"),
    "half a surrogate pair": ({"architectures": ["\ud800"]}, r"architecture '\\ud800' is not sup"),
    "layers of no type": ({"layer_types": 5}, "layer_types is 5; expected"),
    "layers of many types": ({"layer_types": [[[]]]}, r"layer_types is \[\[\[\]\]\]; expected"),
    "quantised by a long name": ({"quantization_config": {"quant_method": LONG}}, "quantiz"),
    "a type that is a list": ({"torch_dtype": ["float32"]}, r"torch_dtype is \['float32'\]"),
    "a scaling that is a list": ({"rope_scaling": [1]}, r"rope_scaling is \[1\]; expected"),
    "a scaling that is no number": (
        {"rope_scaling": {"rope_type": "linear", "factor": NAN}},
        "factor is nan; expected a finite number above 0",
    ),
    "a scaling of a long key": ({"rope_scaling": {LONG: 1}}, "unknown keys"),
    "an unknown key of two lines": ({"hidden\nsize": 1}, "hidden.*size.* may change"),
    "an unknown key that is long": ({"hidden" + LONG: 1}, "hidden"),
    "unknown keys without end": ({f"hidden_{i}": 1 for i in range(9999)}, "hidden_0"),
    "a negative end": ({"eos_token_id": -1}, "eos_token_id is -1; expected a token id"),
    "an end outside": ({"eos_token_id": 10**30}, "special token id 1000000000000000000"),
    "an end of text": ({"eos_token_id": LONG}, "eos_token_id is 'xxx"),
    "a beginning that is a list of lists": ({"bos_token_id": [[]]}, r"bos_token_id is \[\[\]\]"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("changes", "complaint"), table(CONFIGS))
def test_a_config_of_nonsense_is_refused(
    checkpoint: Path, refusal: Callable[..., str], changes: dict[str, Any], complaint: str
) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    refusal(checkpoint, complaint)


@pytest.mark.parametrize(
    "architecture",
    ["MambaForCausalLM", "RwkvForCausalLM", "JambaForCausalLM", "FalconH1ForCausalLM",
     "Lfm2ForCausalLM", "Qwen3NextForCausalLM", "RecurrentGemmaForCausalLM"],
)  # fmt: skip
def test_a_model_with_state_that_cannot_be_rolled_back_is_refused(
    checkpoint: Path, refusal: Callable[..., str], architecture: str
) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [architecture]}))
    refusal(path, f"architecture '{architecture}' is not supported", lambda p: load_model(p.parent))


TEXTS: dict[str, tuple[Any, str]] = {
    "empty": (b"", "not valid JSON"),
    "zeros": (bytes(100), "not valid JSON"),
    "a list": (b"[]", "holds a list, expected a JSON object"),
    "null": (b"null", "holds null, expected a JSON object"),
    "cut short": (b'{"a": [', "not valid JSON"),
    "lists without end": (b"[" * 100_000, "not valid JSON"),
    "objects without end": (b'{"a":' * 100_000, "not valid JSON"),
    "a number without end": (b'{"vocab_size":' + b"9" * 5000 + b"}", "not valid JSON"),
    "UTF-16": ("{}".encode("utf-16"), "not valid JSON|not UTF-8"),
    "bytes that are no text": (b'{"\xff": 1}', "not valid JSON|not UTF-8"),
    "more than fits": (b" " * (16 * 2**20 + 1), "larger than 16777216 bytes"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(("raw", "complaint"), table(TEXTS))
def test_a_file_that_is_no_json_object_is_refused(
    checkpoint: Path, refusal: Callable[..., str], file: str, raw: bytes, complaint: str
) -> None:
    (checkpoint / file).write_bytes(raw)
    refusal(checkpoint / file, complaint, lambda path: load_model(path.parent, kernels="reference"))


@pytest.mark.timeout(60)
def test_a_key_twice_is_refused(checkpoint: Path, refusal: Callable[..., str]) -> None:
    path = checkpoint / "config.json"
    path.write_text(path.read_text().replace("{", '{"vocab_size": 32, ', 1))
    refusal(checkpoint, "'vocab_size' appears twice")


SETTINGS: dict[str, tuple[Any, str]] = {
    "a template that is a number": ({"chat_template": 5}, "chat_template .* is no string"),
    "a default template that is a number": (
        {"chat_template": [{"name": "default", "template": 1}]},
        "chat_template .* is no string",
    ),
    "a template that does not compile": ({"chat_template": "{% if\n %}"}, "does not compile"),
    "a template that is nested": ({"chat_template": "{{" + "(" * 9999}, "template"),
    "a template that is long": ({"chat_template": "x" * (2**20 + 1)}, "has 1048577 characters"),
    "a template of an unknown filter": ({"chat_template": "{{ 1 | pprint }}"}, "does not compile"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("changes", "complaint"), table(SETTINGS))
def test_settings_of_nonsense_are_refused(
    checkpoint: Path, refusal: Callable[..., str], changes: dict[str, Any], complaint: str
) -> None:
    path = checkpoint / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    refusal(checkpoint, complaint)


TEMPLATES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['datetime'] }}",
    "{{ strftime_now.__code__.co_consts }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ range.__self__ }}",
    "{{ self.__init__.__globals__.__builtins__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{{ ''['__class__'] }}",
    "{{ 'abc'.format.__self__.__class__ }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{a.__globals__}'.format_map({'a': raise_exception}) }}",
    "{{ messages|map('attr', '__class__')|list }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{% set x = messages.append(1) %}{{ messages.__len__() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ lipsum.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ get_flashed_messages.__globals__ }}",
    "{% import 'os' as os %}{{ os.popen('id') }}",
    "{% from '/etc/passwd' import x %}",
    "{% extends '/etc/passwd' %}",
    "{% include '/etc/passwd' %}",
)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("source", TEMPLATES)
def test_a_template_never_reaches_python(checkpoint: Path, source: str) -> None:
    """It fails, or what it asked for is undefined."""
    (checkpoint / "chat_template.jinja").write_text("<" + source + ">")
    assert said_by_template(checkpoint) in ("<>", "<[Undefined]>", None)


def said_by_template(checkpoint: Path) -> str | None:
    """The rendering; None where there is none."""
    try:
        tokenizer = load_model(checkpoint, kernels="reference").tokenizer
        return tokenizer.render_chat([{"role": "user", "content": "hi"}])
    except ModelError:
        return None


def change_tokenizer(checkpoint: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = checkpoint / "tokenizer.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


VOCABULARIES: dict[str, tuple[Any, str]] = {
    "a token beyond the rows": (
        lambda v: v["model"]["vocab"].update(more=32),
        "tokenizer has 33 tokens, the model 32",
    ),
    "a token far beyond the rows": (
        lambda v: v["model"]["vocab"].update(more=2**32 - 1),
        "has 4294967296 tokens, the model 32",
    ),
    "a token at no place": (lambda v: v["model"]["vocab"].update(more=-1), "not a valid tokenizer"),
    "a token beyond every place": (
        lambda v: v["model"]["vocab"].update(more=2**32),
        "not a valid tokenizer",
    ),
    "a token at two places": (
        lambda v: v["added_tokens"].append(v["added_tokens"][0] | {"content": "<t>", "id": 99}),
        "tokens, the model 32|not a valid tokenizer",
    ),
    "another kind of tokenizer": (
        lambda v: v.update(model={"type": "None"}),
        "not a valid tokenizer",
    ),
    "a pattern that is none": (
        lambda v: v.update(
            pre_tokenizer={
                "type": "Split",
                "pattern": {"Regex": "("},
                "behavior": "Isolated",
                "invert": False,
            }
        ),
        "not a valid tokenizer",
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("change", "complaint"), table(VOCABULARIES))
def test_a_tokenizer_that_disagrees_is_refused(
    checkpoint: Path, refusal: Callable[..., str], change: Any, complaint: str
) -> None:
    change_tokenizer(checkpoint, change)
    refusal(checkpoint, complaint)


FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "tokenizer.json",
    INDEX,
    SINGLE,
)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("file", FILES)
def test_a_pipe_for_a_file_is_never_waited_for(
    checkpoint: Path, refusal: Callable[..., str], file: str
) -> None:
    (checkpoint / file).unlink(missing_ok=True)
    os.mkfifo(checkpoint / file)
    refusal(checkpoint / file, "is a pipe", lambda path: load_model(path.parent))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("file", FILES)
def test_a_sparse_file_is_not_read_to_its_end(
    checkpoint: Path, refusal: Callable[..., str], file: str
) -> None:
    (checkpoint / file).touch()
    os.truncate(checkpoint / file, 2**40)
    refusal(checkpoint / file, "", lambda path: load_model(path.parent))


def test_the_guard_of_these_tests_can_fail(tmp_path: Path, refusal: Callable[..., str]) -> None:
    def greedy(path: Path) -> object:
        raise ModelError(f"{path}: {len(bytearray(64 * 2**20))}")

    def far_too_greedy(path: Path) -> object:
        return bytearray(8 * 2**30)

    with pytest.raises(AssertionError, match="bytes at once"):
        refusal(tmp_path, "", greedy)
    with pytest.raises(MemoryError):
        refusal(tmp_path, "", far_too_greedy)
