"""Heads' checkpoints: read as others write them, and refused by the name of what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft.core.errors import ModelError
from foredraft.models.heads.config import MedusaConfig
from foredraft.models.heads.eagle3 import Eagle3
from foredraft.models.heads.eagle3_checkpoint import load_eagle3, save_eagle3
from foredraft.models.heads.medusa import Medusa
from foredraft.models.heads.medusa_checkpoint import load_medusa, save_medusa
from foredraft.models.rope import Llama3, Rope
from foredraft.testing.models import tiny_config

from .test_heads import EAGLE, IDS

TARGET = tiny_config(hidden_size=16, vocab_size=20, num_layers=4)
FULL = replace(
    EAGLE,
    rope=Rope(5e5, Llama3(8.0, 1.0, 4.0, 32)),
    feature_layers=(0, 2, 4),
    norm_before_residual=True,
    own_embedding=True,
    target_sha256="a" * 64,
)
MEDUSA = MedusaConfig(16, 20, 3, accuracies=((0.5, 0.1), (0.25,), (0.125,)))


@pytest.fixture
def head():
    torch.manual_seed(1)
    return Eagle3(EAGLE, IDS)


def edit(directory, **values):
    path = directory / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def edit_tensors(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: each.contiguous() for name, each in tensors.items()}, path)


def same(left, right):
    own, other = left.state_dict(), right.state_dict()
    assert left.config == right.config
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)


@pytest.mark.parametrize("config", [EAGLE, FULL], ids=["plain", "with every option"])
def test_an_eagle3_head_is_read_as_it_was_written(tmp_path, config):
    head = Eagle3(config, IDS)
    for _ in range(2):  # in place of itself too
        save_eagle3(head, tmp_path / "head", torch.float32)
    same(load_eagle3(tmp_path / "head", TARGET, target_sha256="a" * 64), head)
    save_eagle3(head, tmp_path / "head")
    assert load_file(tmp_path / "head/model.safetensors")["fc.weight"].dtype == torch.bfloat16
    assert torch.equal(load_eagle3(tmp_path / "head").draft_ids, IDS)


def test_the_names_are_those_that_others_read(tmp_path, head):
    save_eagle3(head, tmp_path)
    layer = [
        *(f"self_attn.{each}_proj" for each in "qkvo"),
        *(f"mlp.{each}_proj" for each in ("gate", "up", "down")),
        "input_layernorm", "hidden_norm", "post_attention_layernorm",
    ]  # fmt: skip
    names = {"d2t", "t2d", "fc.weight", "norm.weight", "lm_head.weight"}
    assert load_file(tmp_path / "model.safetensors").keys() == names | {
        f"midlayer.{each}.weight" for each in layer
    }
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["vocab_size"], config["draft_vocab_size"] == (20, 8)


def test_a_checkpoint_of_the_speculators_library_is_read(tmp_path):
    head = Eagle3(replace(FULL, own_embedding=False, target_sha256=None), IDS)
    save_eagle3(head, tmp_path, torch.float32)
    plain = json.loads((tmp_path / "config.json").read_text())
    own = (
        "draft_vocab_size", "norm_before_residual", "eagle_aux_hidden_state_layer_ids",
        "target_hidden_size", "norm_output",
    )  # fmt: skip
    del plain["eagle_config"]
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Eagle3Speculator"],
                "speculators_model_type": "eagle3",
                "speculators_version": "0.3.0",
                **{key: plain.pop(key) for key in own},
                "transformer_layer_config": plain | {"architectures": ["LlamaForCausalLM"]},
                "speculators_config": {"algorithm": "eagle3", "proposal_methods": [{}]},
            }
        )
    )

    def rename(tensors):
        for name in [name for name in tensors if name.startswith("midlayer.")]:
            tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)

    edit_tensors(tmp_path, rename)
    same(load_eagle3(tmp_path, TARGET), head)
    edit(tmp_path, norm_before_residual=None)
    assert load_eagle3(tmp_path).config.norm_before_residual


def test_without_maps_all_tokens_are_drafted(tmp_path):
    """None are written then: vLLM refuses them there."""
    save_eagle3(Eagle3(replace(EAGLE, draft_vocab_size=20)), tmp_path)
    assert not {"d2t", "t2d"} & load_file(tmp_path / "model.safetensors").keys()
    edit(tmp_path, draft_vocab_size=None)
    assert torch.equal(load_eagle3(tmp_path, TARGET).draft_ids, torch.arange(20))


BROKEN_TENSORS = {
    "missing tensor fc.weight": lambda t: t.pop("fc.weight"),
    "unknown tensor fc.bias": lambda t: t.update({"fc.bias": torch.zeros(16)}),
    "missing tensor norm.weight": lambda t: t.update({"norms.weight": t.pop("norm.weight")}),
    r"midlayer.self_attn.q_proj.weight is bfloat16 \[32, 16\], expected floats \[16, 32\]": (
        lambda t: t.update(
            {"midlayer.self_attn.q_proj.weight": t["midlayer.self_attn.q_proj.weight"].T}
        )
    ),
    "norm.weight is int32": lambda t: t.update({"norm.weight": t["norm.weight"].int()}),
    "lm_head.weight holds what is no finite": lambda t: t["lm_head.weight"].fill_(float("nan")),
    "missing tensor d2t": lambda t: t.pop("d2t"),
    r"d2t is bfloat16 \[8\], expected integers \[8\]": lambda t: t.update(
        {"d2t": t["d2t"].bfloat16()}
    ),
    r"tensor d2t is int64 \[7\]": lambda t: t.update({"d2t": t["d2t"][:7]}),
    "draft ids go from 1 to 100": lambda t: t["d2t"].__setitem__(7, 93),
    "draft ids must ascend": lambda t: t["d2t"].__setitem__(3, 0),
    "d2t and t2d name other tokens": lambda t: t["t2d"].logical_not_(),
    r"t2d is \[3\], expected \[20\]": lambda t: t.update({"t2d": t["t2d"][:3]}),
}


@pytest.mark.parametrize("message", BROKEN_TENSORS)
def test_tensors_that_are_missing_unknown_or_misshapen_are_named(tmp_path, head, message):
    save_eagle3(head, tmp_path)
    edit_tensors(tmp_path, BROKEN_TENSORS[message])
    with pytest.raises(ModelError, match=message) as caught:
        load_eagle3(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


BROKEN_CONFIGS = {
    "architectures is": {"architectures": ["LlamaForCausalLM"]},
    "num_hidden_layers is 2; expected 1": {"num_hidden_layers": 2},
    "attention_bias is True; expected false": {"attention_bias": True},
    "hidden_act is 'gelu'": {"hidden_act": "gelu"},
    "norm_before_fc may change": {"norm_before_fc": True},
    "eagle_config: fc_norm may change": {"eagle_config": {"fc_norm": True}},
    "use_aux_hidden_state is False": {"eagle_config": {"use_aux_hidden_state": False}},
    "sliding_window may change": {"sliding_window": 128},
    "hidden_size is 'a'": {"hidden_size": "a"},
    "hidden_size is missing": {"hidden_size": None},
    "layer_ids is 3; expected a list": {"eagle_aux_hidden_state_layer_ids": 3},
    "expected .1, 2, 3. as elsewhere": {
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
    },
    "2 feature layers given": {"eagle_aux_hidden_state_layer_ids": [1, 2]},
    r"draft_vocab_size 21 is more": {"draft_vocab_size": 21},
    r"tensor d2t is int64 \[8\], expected integers \[9\]": {"draft_vocab_size": 9},
    "eagle_config is 3": {"eagle_config": 3},
    "target_sha256 is 7": {"foredraft": {"target_sha256": 7}},
}


@pytest.mark.parametrize("message", BROKEN_CONFIGS)
def test_configs_that_cannot_be_honoured_are_refused_by_the_key(tmp_path, head, message):
    save_eagle3(head, tmp_path)
    edit(tmp_path, **BROKEN_CONFIGS[message])
    with pytest.raises(ModelError, match=message):
        load_eagle3(tmp_path)


def test_a_head_of_another_target_is_refused_in_one_line(tmp_path):
    save_eagle3(Eagle3(replace(EAGLE, target_sha256="a" * 64), IDS), tmp_path / "eagle")
    save_medusa(Medusa(replace(MEDUSA, target_sha256="a" * 64)), tmp_path / "medusa")
    for name, load in (("eagle", load_eagle3), ("medusa", load_medusa)):
        load(tmp_path / name, TARGET, target_sha256="a" * 64)
        load(tmp_path / name, TARGET)
        for target, sha256, message in (
            (replace(TARGET, hidden_size=32), None, "hidden_size is 16, this target's 32"),
            (replace(TARGET, vocab_size=24), None, "vocab_size is 20, this target's 24"),
            (TARGET, "b" * 64, "checksum aaaaaaaaaaaa..., this target's is bbbbbbbbbbbb"),
        ):
            with pytest.raises(ModelError, match=message) as caught:
                load(tmp_path / name, target, target_sha256=sha256)
            assert "trained for another target" in str(caught.value)


def test_what_is_no_head_is_neither_read_nor_replaced(tmp_path, head):
    with pytest.raises(ModelError, match="is no directory"):
        load_eagle3(tmp_path / "nothing")
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_medusa(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        load_eagle3(tmp_path)
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ModelError, match="no head's directory"):
        save_eagle3(head, tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "mine"


@pytest.mark.parametrize(
    "config",
    [
        MEDUSA,
        MedusaConfig(16, 20, 2, num_layers=2, bias=False, shared_head=True),
        MedusaConfig(16, 20, 2, draft_vocab_size=8, shared_head=True, own_head=False),
        MedusaConfig(16, 20, 2, draft_vocab_size=8),
    ],
    ids=["own heads", "one head", "the target's head", "reduced"],
)
def test_medusa_heads_are_read_as_they_were_written(tmp_path, config):
    torch.manual_seed(2)
    ids = None if config.draft_vocab_size is None else IDS
    heads = Medusa(config, ids, torch.randn(20, 16))
    for each in heads.parameters():
        each.data.normal_()
    save_medusa(heads, tmp_path, torch.float32)
    read = load_medusa(tmp_path, TARGET)
    same(read, heads)
    assert torch.equal(read.draft_ids, heads.draft_ids)


def test_the_authors_medusa_is_read(tmp_path):
    torch.manual_seed(2)
    heads = Medusa(replace(MEDUSA, accuracies=()))
    state = heads.state_dict()
    stored = {
        f"medusa_heads.{h}.{name}": state[own]
        for h in range(3)
        for name, own in (
            ("0.linear.weight", f"blocks.{h}.layers.0.weight"),
            ("0.linear.bias", f"blocks.{h}.layers.0.bias"),
            ("1.weight", f"lm_heads.{h}.weight"),
        )
    }
    save_file(stored, tmp_path / "model.safetensors")
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "x/y"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    same(load_medusa(tmp_path, TARGET), heads)
    with pytest.raises(ModelError, match="vocab_size is missing"):
        load_medusa(tmp_path)


def test_a_token_map_may_stand_in_any_order_and_heads_may_be_whole(tmp_path):
    """As vLLM reads them: whole heads lose the rows that are not drafted."""
    config = MedusaConfig(16, 20, 2, draft_vocab_size=8)
    heads = Medusa(config, IDS, torch.randn(20, 16))
    save_medusa(heads, tmp_path, torch.float32)
    whole = torch.randn(20, 16)

    def change(tensors):
        order = torch.randperm(8)
        tensors["token_map"] = tensors["token_map"][order]
        tensors["lm_heads.0.weight"] = tensors["lm_heads.0.weight"][order]
        tensors["lm_heads.1.weight"] = whole

    edit_tensors(tmp_path, change)
    read = load_medusa(tmp_path, TARGET)
    assert torch.equal(read.lm_heads[0].weight, heads.lm_heads[0].weight)
    assert torch.equal(read.lm_heads[1].weight, whole[IDS])


@pytest.mark.parametrize(
    ("message", "values", "change"),
    [
        ("missing tensor blocks.2", {}, lambda t: t.pop("blocks.2.layers.0.weight")),
        ("unknown tensor blocks.3", {}, lambda t: t.update({"blocks.3": torch.ones(2)})),
        ("missing tensor token_map", {"truncated_vocab_size": 8}, None),
        ("unknown tensor token_map", {}, lambda t: t.update({"token_map": torch.arange(8)})),
        ("lm_heads.1.weight is float32", {}, lambda t: t.update(
            {"lm_heads.1.weight": torch.ones(16, 20)})),
        ("num_heads is 17", {"num_heads": 17}, None),
        ("accuracies of 1 heads", {"foredraft": {"accuracies": [[0.5]]}}, None),
        ("accuracies must be numbers in 0..1", {"foredraft": {"accuracies": [[2.0]] * 3}}, None),
        ("accuracies is 5", {"foredraft": {"accuracies": 5}}, None),
        ("logit_scale is 2.0", {"logit_scale": 2.0}, None),
        ("hidden_act_fn may change", {"hidden_act_fn": "x"}, None),
    ],
)  # fmt: skip
def test_medusas_faults_are_named(tmp_path, message, values, change):
    save_medusa(Medusa(MEDUSA), tmp_path)
    edit(tmp_path, **values)
    if change is not None:
        edit_tensors(tmp_path, change)
    with pytest.raises(ModelError, match=message):
        load_medusa(tmp_path, TARGET)
