"""The compiled extension (native/bindings.cpp). Addresses are `Tensor.data_ptr()`; 0 is none."""

from collections.abc import Sequence

from foredraft.kernels.interface import Segment

class Plan:
    num_rows: int
    positions: list[int]
    slots: list[int]

class PackedWeight:
    bytes: int

class Block:
    def __init__(
        self,
        attention_norm: int,
        qkv: PackedWeight,
        output: PackedWeight,
        mlp_norm: int,
        gate_up: PackedWeight,
        down: PackedWeight,
        cos: int,
        sin: int,
        positions: int,
        half_dim: int,
        eps: float,
        scale: float,
        window: int,
        soft_cap: float,
        activation: int,
        query_norm: int,
        key_norm: int,
        head_eps: float,
        attention_post_norm: int,
        mlp_post_norm: int,
        beside_norm: int,
        norm_residual: bool,
        /,
    ) -> None: ...

# Address, temperature, min_p, top_k, top_p, seed, position.
_Sampled = tuple[int, float, float, int, float, int, int]

class Runtime:
    instruction_set: str
    num_threads: int

    def __init__(self, threads: int, instruction_set: str) -> None: ...
    def pack(self, weight: int, bias: int, n: int, k: int, bf16: bool) -> PackedWeight: ...
    def pack_eight_bit(
        self, values: int, scales: int, bias: int, n: int, k: int, /
    ) -> PackedWeight: ...
    def linear(
        self, weight: PackedWeight, x: int, rows: int, k: int, residual: int, out: int, /
    ) -> None: ...
    def embedding(self, weight: PackedWeight, ids: int, rows: int, out: int, /) -> None: ...
    def rms_norm(
        self, x: int, weight: int, eps: float, residual: int, out: int, rows: int, width: int, /
    ) -> None: ...
    def gate_multiply(
        self, gate_up: int, activation: int, out: int, rows: int, width: int, /
    ) -> None: ...
    def soft_cap(self, x: int, cap: float, out: int, n: int, /) -> None: ...
    def rope_and_store(
        self,
        plan: Plan,
        qkv: int,
        rows: int,
        heads: int,
        cos: int,
        sin: int,
        positions: int,
        keys: int,
        values: int,
        pages: int,
        kv_heads: int,
        page_size: int,
        dim: int,
        bf16: bool,
        query_norm: int,
        key_norm: int,
        norm_eps: float,
        queries: int,
        /,
    ) -> None: ...
    def attention(
        self,
        plan: Plan,
        queries: int,
        rows: int,
        heads: int,
        keys: int,
        values: int,
        pages: int,
        kv_heads: int,
        page_size: int,
        dim: int,
        bf16: bool,
        scale: float,
        window: int,
        soft_cap: float,
        out: int,
        /,
    ) -> None: ...
    def run_blocks(
        self,
        blocks: list[Block],
        plan: Plan,
        keys: int,
        values: int,
        pages: int,
        kv_heads: int,
        page_size: int,
        dim: int,
        bf16: bool,
        hidden: int,
        beside: int,
        rows: int,
        width: int,
        out: int,
        /,
    ) -> None: ...
    def move_slots(
        self,
        keys: int,
        values: int,
        pages: int,
        kv_heads: int,
        page_size: int,
        dim: int,
        bf16: bool,
        sources: list[int],
        destinations: list[int],
        /,
    ) -> None: ...
    def read_memory(self, weight: PackedWeight, /) -> float: ...
    def argmax_rows(self, rows: int, count: int, n: int, wide: bool, /) -> list[int]: ...
    def top_ids(self, rows: int, count: int, n: int, wide: bool, k: int, /) -> list[list[int]]: ...
    def log_softmax(self, row: int, n: int, wide: bool, out: int, /) -> None: ...
    def total(self, weights: int, n: int, /) -> float: ...
    def draw(self, weights: int, n: int, coin: float, /) -> int: ...
    def laws(self, rows: list[_Sampled], n: int, wide: bool, out: int, /) -> list[int]: ...
    def draws(self, rows: list[_Sampled], n: int, wide: bool, /) -> list[int]: ...
    def random_words(self, seed: int, position: int, stream: int, blocks: int, /) -> list[int]: ...

def plan(segments: Sequence[Segment], page_size: int, /) -> Plan: ...
def best_instruction_set() -> str: ...
def instruction_sets() -> list[str]: ...
def available_cores() -> int: ...

class SuffixIndex:
    num_tokens: int
    num_bytes: int

    def __init__(self, max_depth: int, max_occurrences: int, /) -> None: ...
    def add_text(self, context: Sequence[int], /) -> int: ...
    def text(self, number: int, /) -> list[int]: ...
    def extend(self, number: int, tokens: Sequence[int], /) -> None: ...
    def remove(self, number: int, /) -> None: ...
    def is_consistent(self) -> bool: ...
    # Match, text, position.
    def occurrences(
        self, context: Sequence[int], excluded: int, /
    ) -> list[tuple[int, int, int]]: ...
    # Tokens, parents, cells, score, text.
    def propose(
        self,
        context: Sequence[int],
        max_nodes: int,
        max_spec_factor: float,
        min_token_prob: float,
        tree: bool,
        estimates: Sequence[float],
        growing: int,
        excluded: int,
        /,
    ) -> tuple[list[int], list[int], list[int], float, int]: ...
    # Likewise, and whether they are from the others' texts; None where a known token is another.
    def draft(
        self,
        number: int,
        first: int,
        tokens: Sequence[int],
        max_nodes: int,
        max_spec_factor: float,
        min_token_prob: float,
        tree: bool,
        estimates: Sequence[float],
        others: SuffixIndex | None,
        own: int,
        other_estimates: Sequence[float],
        /,
    ) -> tuple[list[int], list[int], list[int], float, int, bool] | None: ...

class NgramTable:
    # Of each order the addresses of its six arrays, contexts, what follows them.
    def __init__(
        self,
        wide: bool,
        levels: Sequence[tuple[int, int, int, int, int, int, int, int]],
        own_orders: Sequence[int],
        weights: Sequence[float],
        /,
    ) -> None: ...

class NgramText:
    num_tokens: int
    num_bytes: int

    def __init__(self, max_depth: int, max_occurrences: int, /) -> None: ...
    def extend(self, tokens: Sequence[int], /) -> None: ...
    def tokens(self, first: int, /) -> list[int]: ...
    def is_consistent(self) -> bool: ...
    # Candidates, the cells of each, those of the escape.
    def cells(
        self, table: NgramTable, past: SuffixIndex | None, own: int, /
    ) -> tuple[list[int], list[list[int]], list[int]]: ...
    # Tokens and their probabilities.
    def law(
        self,
        table: NgramTable,
        path: Sequence[int],
        past: SuffixIndex | None,
        own: int,
        /,
    ) -> tuple[list[int], list[float]]: ...
    # Tokens, parents, confidence; None where a known token is another.
    def draft(
        self,
        table: NgramTable,
        first: int,
        tokens: Sequence[int],
        max_nodes: int,
        min_token_prob: float,
        tree: bool,
        past: SuffixIndex | None,
        own: int,
        /,
    ) -> tuple[list[int], list[int], list[float]] | None: ...
