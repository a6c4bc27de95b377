"""Logits of Gemma 3 270M equal those of transformers, which widens the same quantised file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from foredraft.core.trees import topology
from foredraft.kernels.catalog import native_available
from foredraft.kernels.interface import Segment
from foredraft.models.decoder import new_cache
from foredraft.models.gguf import GGUFFile
from foredraft.models.interface import FlatBatch
from foredraft.models.load import load_model
from foredraft.models.registry import pull

TOLERANCE = 1e-4
PAGES = [3, 1, 0, 2]
PAGE_SIZE = 16
TEXT = (
    "The lighthouse was built in 1874, when ships still steered by the stars.\n\n"
    "Its keeper wrote every night: « vent d'ouest, mer calme ». The next"
)
KERNELS = ["reference", "native"] if native_available() else ["reference"]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """On a busy machine torch's threads wait for each other at the end of every operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def gemma3_path() -> Path:
    return pull("gemma3-270m")


@pytest.fixture(scope="module")
def peer(gemma3_path: Path, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    copy = tmp_path_factory.mktemp("gemma3") / "model.gguf"
    without_lists(gemma3_path, copy)
    model = AutoModelForCausalLM.from_pretrained(
        copy.parent, gguf_file=copy.name, dtype=torch.float32
    )
    copy.unlink()
    return model.eval()


def without_lists(source: Path, target: Path) -> None:
    """The file without the lists in its metadata, which are the tokenizer's; tensors byte for byte.

    ggml's reader, by which transformers reads the file twice, takes ten seconds for 262144 strings.
    """
    file = GGUFFile(source)
    raw = np.memmap(source, np.uint8, mode="r")
    writer = gguf.GGUFWriter(target, "gemma3")
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    for key, value in file.metadata.items():
        if not isinstance(value, list) and key != "general.architecture":
            add[type(value)](key, value)
    writer.add_vocab_size(len(file.metadata["tokenizer.ggml.tokens"]))
    for name, place in file.tensors.items():
        stored = raw[place.start : place.start + place.num_bytes]
        kind = gguf.GGMLQuantizationType(place.kind)
        values = stored.view(np.float32) if kind == gguf.GGMLQuantizationType.F32 else stored
        writer.add_tensor(name, values.reshape(*place.shape[:-1], -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.inference_mode()
def theirs(peer: PreTrainedModel, ids: list[int]) -> Tensor:
    return peer(torch.tensor([ids])).logits[0]


def assert_close(mine: Tensor, expected: Tensor) -> None:
    assert mine.shape == expected.shape
    assert (mine - expected).abs().max().item() < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_prompt_in_chunks_and_a_draft_tree(
    gemma3_path: Path, peer: PreTrainedModel, kernels: str
) -> None:
    loaded = load_model(gemma3_path, dtype="float32", kernels=kernels)
    model = loaded.model
    prompt = loaded.tokenizer.encode_prompt(TEXT)
    cache = new_cache(loaded.config, len(PAGES), PAGE_SIZE, torch.float32, "cpu")

    def rows(ids: list[int], segment: Segment) -> Tensor:
        with torch.inference_mode():
            return model.run(FlatBatch(ids, [segment]), cache).logits

    chunks = [(0, 7), (7, 8), (8, len(prompt))]
    logits = [rows(prompt[a:b], Segment(a, b - a, (), PAGES)) for a, b in chunks]
    assert_close(torch.cat(logits), theirs(peer, prompt))

    root, *others = logits[-1][-1].topk(3).indices.tolist()
    parents, drafts = (-1, -1, 0, 2), [*others, 107, 818]
    tree = rows([root, *drafts], Segment(len(prompt), 1, parents, PAGES))
    assert_close(tree[0], theirs(peer, [*prompt, root])[-1])
    for node in (1, 3):
        path = [drafts[i] for i in topology(parents).path(node)]
        assert_close(tree[1 + node], theirs(peer, [*prompt, root, *path])[-1])
