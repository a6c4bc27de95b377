"""`foredraft bench serve`, `simulate` and `replay`: many requests at once, plain, fixed widths and
policies.

Knows options and tables; `foredraft.bench.serve` measures.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Group, RenderableType
from rich.text import Text
from typer import Option

from foredraft.cli.options import RuntimeOptions, parse_config
from foredraft.cli.prompt import check_text, read_text
from foredraft.cli.serve_options import read_keys
from foredraft.cli.tables import Figures
from foredraft.core.errors import UserError
from foredraft.planning.allocation import Objective

if TYPE_CHECKING:
    from foredraft.bench.serve.sweep import Settings
    from foredraft.bench.workload import Item

MOST_REQUESTS = 1024
MOST_WIDTH = 64
MOST_ARRIVALS, LONGEST_ARRIVALS = 100_000, 3600.0  # requests of a measurement, and seconds
CONCURRENCY, QUICK_CONCURRENCY = "1,2,4,8,16,32", "1,4,16"
WIDTHS, QUICK_WIDTHS = "1,2,4,5", "2,5"
ROUNDS, QUICK_ROUNDS = 3, 1
SECONDS, QUICK_SECONDS = 20.0, 2.0
PANEL_LOAD, PANEL_COMPARED = "Load", "What is compared"
POLICY_KEYS = ("policy", "objective", "num_speculative_tokens_per_batch_size", "recalibrate")
Progress = Callable[[str, int, int], None]


def _load(words: str, value: str, **more: Any) -> Any:
    return Option(help=words, metavar=value, rich_help_panel=PANEL_LOAD, **more)


def _compared(words: str, value: str, **more: Any) -> Any:
    return Option(help=words, metavar=value, rich_help_panel=PANEL_COMPARED, **more)


@dataclass(frozen=True)
class LoadOptions:
    """How many requests, when, and how long they are."""

    concurrency: Annotated[
        str | None, _load(f"Requests at once. (default: {CONCURRENCY})", "N,...")
    ] = None
    rate: Annotated[
        str | None, _load("Arrivals a second, by chance, instead or besides.", "R,...")
    ] = None
    requests: Annotated[
        int | None,
        _load("That end in a measurement. (default: 8, and 2 for each at once)", "N", min=1),
    ] = None
    seconds: Annotated[
        float | None, _load(f"Of a measurement at most. (default: {SECONDS:g})", "S")
    ] = None
    rounds: Annotated[
        int | None, _load(f"Figures are medians over them. (default: {ROUNDS})", "N", min=1)
    ] = None
    max_tokens: Annotated[int, _load("Of an answer, at most.", "N", min=2)] = 128
    prompt_tokens: Annotated[
        int | None, _load("Make every prompt so long, of the workload's texts.", "N", min=2)
    ] = None
    temperature: Annotated[float, _load("0 is greedy.", "X")] = 0.0
    seed: Annotated[int, _load("Of arrivals and samples.", "N", min=0)] = 0
    quick: Annotated[
        bool,
        Option("--quick", help="Smaller defaults: about a minute.", rich_help_panel=PANEL_LOAD),
    ] = False

    def settings(self) -> Settings:
        """What to measure; raises UserError."""
        from foredraft.bench.serve.sweep import Level, Settings

        seconds = self.seconds
        if seconds is None:
            seconds = QUICK_SECONDS if self.quick else SECONDS
        if not 0.0 < seconds < inf:
            raise UserError(f"--seconds must be above 0, got {seconds:g}")
        if not 0.0 <= self.temperature < inf:
            raise UserError(f"--temperature must be 0 or more, got {self.temperature:g}")
        many = self.concurrency
        if many is None and self.rate is None:
            many = QUICK_CONCURRENCY if self.quick else CONCURRENCY
        crowds = [] if many is None else _counts("--concurrency", many, 1, MOST_REQUESTS)
        rates = [] if self.rate is None else _rates(self.rate)
        settings = Settings(
            [*(Level(concurrency=n) for n in crowds), *(Level(rate=each) for each in rates)],
            self.max_tokens,
            self.rounds or (QUICK_ROUNDS if self.quick else ROUNDS),
            self.requests,
            seconds,
            self.temperature,
            self.seed,
        )
        for rate in rates:
            _check_arrivals(rate, settings)
        return settings


@dataclass(frozen=True)
class ComparedOptions:
    """Which configurations."""

    widths: Annotated[
        str | None,
        _compared(f"Fixed draft lengths; plain is always there. (default: {WIDTHS})", "K,..."),
    ] = None
    speculative_config: Annotated[
        str | None,
        _compared('Whose widths vary. (default: {"method": "auto"})', "JSON"),
    ] = None
    objective: Annotated[
        str, _compared("Of the adaptive policy: throughput, latency, both, none.", "NAME")
    ] = "both"
    hopeless: Annotated[
        bool,
        Option(
            "--hopeless",
            help="Drafts can't pay here: judge whether the policy sees that.",
            rich_help_panel=PANEL_COMPARED,
        ),
    ] = False
    url: Annotated[
        str | None,
        _compared("Measure this server instead: OpenAI's protocol; MODEL is its name.", "URL"),
    ] = None
    api_key_file: Annotated[
        Path | None, _compared("With --url: the key that the server asks for.", "FILE")
    ] = None

    def base(self) -> dict[str, Any]:
        """The configuration that widths and policies vary; raises UserError."""
        config = parse_config(self.speculative_config or '{"method": "auto"}')
        if config is None:
            raise UserError("--speculative-config null: plain decoding is measured anyway")
        for key in POLICY_KEYS:
            if key in config:
                raise UserError(
                    f"--speculative-config: leave {key} out: fixed widths and both objectives are "
                    "what is compared"
                )
        return config

    def objectives(self) -> list[Objective]:
        """Raises UserError."""
        choices: dict[str, list[Objective]] = {"both": list(Objective), "none": []}
        choices |= {each.value: [each] for each in Objective}
        if self.objective not in choices:
            valid = ", ".join([*Objective, "both", "none"])
            raise UserError(f"--objective must be one of {valid}, got {self.objective!r}")
        return choices[self.objective]

    def fixed(self, quick: bool) -> list[int]:
        """Raises UserError."""
        text = self.widths if self.widths is not None else QUICK_WIDTHS if quick else WIDTHS
        return _counts("--widths", text, 0, MOST_WIDTH)

    def api_key(self) -> str | None:
        """Raises UserError."""
        return None if self.api_key_file is None else read_keys(self.api_key_file)[0]

    def check_remote(self, load: LoadOptions) -> None:
        """Raise UserError for options that only engines of this process have."""
        given = [
            name
            for name, is_given in (
                ("--widths", self.widths is not None),
                ("--speculative-config", self.speculative_config is not None),
                ("--objective", self.objective != "both"),
                ("--hopeless", self.hopeless),
                ("--prompt-tokens", load.prompt_tokens is not None),
            )
            if is_given
        ]
        if given:
            raise UserError(f"--url excludes {', '.join(given)}: the server decides")


def _counts(option: str, text: str, least: int, most: int) -> list[int]:
    """Different whole numbers, in their order."""
    check_text(text, option)
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = [least - 1]
    if not all(least <= value <= most for value in values):
        raise UserError(
            f"{option} must be whole numbers in {least}..{most} with commas between, got {text!r}"
        )
    return list(dict.fromkeys(values))


def _rates(text: str) -> list[float]:
    check_text(text, "--rate")
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [0.0]
    if not all(0.0 < value < inf for value in values):
        raise UserError(f"--rate must be numbers above 0 with commas between, got {text!r}")
    return list(dict.fromkeys(values))


def _check_arrivals(rate: float, settings: Settings) -> None:
    number, seconds = settings.arrivals(rate), settings.seconds
    if rate * seconds < 1.0:
        raise UserError(
            f"--rate {rate:g} sends {rate * seconds:g} requests in {seconds:g} seconds: "
            "raise it or --seconds"
        )
    if number > MOST_ARRIVALS:
        raise UserError(
            f"--rate {rate:g} would send {number:g} requests, more than {MOST_ARRIVALS}: lower it, "
            "--seconds or --requests"
        )
    if min(number / rate, settings.longest_arrivals) > LONGEST_ARRIVALS:
        raise UserError(
            f"--rate {rate:g} takes {number / rate:.3g} seconds for {number:g} requests, more than "
            f"{LONGEST_ARRIVALS:g}: raise it, or lower --seconds or --requests"
        )


def measure(
    model: str,
    items: Sequence[Item],
    load: LoadOptions,
    compared: ComparedOptions,
    runtime: RuntimeOptions,
    progress: Progress,
) -> dict[str, Any]:
    """The result, as JSON has it. Raises UserError."""
    from foredraft.bench.serve.bench import Comparison, bench_engines, bench_server
    from foredraft.cli.download import fetch_draft

    settings = load.settings()
    if compared.url is not None:
        compared.check_remote(load)
        key = compared.api_key()
        return asyncio.run(bench_server(compared.url, model, items, settings, progress, key))
    if compared.api_key_file is not None:
        raise UserError("--api-key-file needs --url: it is what a server asks for")
    comparison = Comparison(
        compared.base(),
        compared.fixed(load.quick),
        compared.objectives(),
        load.prompt_tokens,
        runtime.engine_settings(),
        compared.hopeless,
    )
    loaded = runtime.load(model)
    fetch_draft(comparison.base)
    return asyncio.run(bench_engines(loaded, items, comparison, settings, progress))


def replay_table(result: Mapping[str, Any]) -> Group:
    """As of a measurement, and how far that is from the one whose costs were used."""
    near = sum(each["near"] for each in result["errors"])
    words = (
        f"{near} of {len(result['errors'])} points within 10% of those measured, the worst "
        f"{result['largest_error']:.1%} off"
    )
    return Group(serve_table(result), Text(words))


def serve_table(result: Mapping[str, Any]) -> Group:
    """Points, then how policies compare, then what was promised."""
    rows = [_point_row(point) for point in result["points"]]
    headings = (
        "at once, run", "tokens/s", "of plain", "acceptance\nlength", "width", "width 0\nsteps",
        "TTFT ms\np50, p99", "between\ntokens ms\np50, p99",
    )  # fmt: skip
    over = {
        (each["label"], _place(each)): each["tokens_per_second"]["over_plain"]
        for each in result.get("comparisons", ())
    }
    for row, point in zip(rows, result["points"], strict=True):
        ratio = over.get((point["label"], _place(point)))
        row[2] = "-" if ratio is None else f"{ratio['p50']:.2f}x"
    title = f"{result['model']}, at most {result['max_tokens']} tokens, {result['prompts']} prompts"
    parts: list[RenderableType] = [Figures(title, headings, rows)]
    if result.get("verdicts"):
        parts.append(_verdicts(result["verdicts"]))
    if any(point.get("identical_to_plain") is False for point in result["points"]):
        parts.append(Text("OUTPUTS DIFFER from plain decoding's", style="bold"))
    return Group(*parts)


def _place(each: Mapping[str, Any]) -> str:
    if "concurrency" in each:
        return str(each["concurrency"])
    return f"{each['rate']:g}/s"


def _point_row(point: Mapping[str, Any]) -> list[str]:
    share = point.get("width_0_share")
    return [
        f"{_place(point)}, {point['label']}",
        f"{point['tokens_per_second']:.1f}",
        "",
        _number(point["mean_acceptance_length"]),
        _number(point["width"]),
        "-" if share is None else f"{share:.0%}",
        _two(point["ttft_ms"]),
        _two(point["itl_ms"]),
    ]


def _two(each: Mapping[str, float | None]) -> str:
    return ", ".join("-" if value is None else f"{value:.0f}" for value in each.values())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _verdicts(lines: Sequence[Mapping[str, Any]]) -> Figures:
    rows = [
        [
            f"{each['label']}: {each['what']}",
            str(each["concurrency"] or "-"),
            "-" if each["value"] is None else f"{each['value']:.3f}",
            f"{'<=' if each['at_most'] else '>='} {each['bound']:g}",
            {True: "yes", False: "NO", None: "-"}[each["holds"]],
        ]
        for each in lines
    ]
    return Figures("Promises", ("promise", "at once", "found", "bound", "holds"), rows)


def simulated(file: Path) -> dict[str, Any]:
    """The simulator beside a result file. Raises UserError."""
    from foredraft.bench.provenance import provenance
    from foredraft.bench.serve.simulated import check_simulator

    result = _read_result(file)
    with _damaged(file):
        found = check_simulator(result)
    return {**provenance(), "model": result.get("model"), **found}


def replayed(
    model: str,
    file: Path,
    items: Sequence[Item],
    runtime: RuntimeOptions,
    progress: Progress,
) -> dict[str, Any]:
    """What a result file's loads come to with the model's own answers. Raises UserError."""
    from foredraft.bench.serve.replay import NEEDED_TOO, replay
    from foredraft.bench.serve.simulated import check_has

    result = _read_result(file)
    with _damaged(file):  # before a model is loaded
        check_has(result, NEEDED_TOO)
    loaded = runtime.load(model)
    with _damaged(file):
        return replay(result, loaded, items, progress)


def _read_result(file: Path) -> dict[str, Any]:
    text = read_text(file, "result")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"result {str(file)!r} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"result {str(file)!r} must be a JSON object")
    return values


@contextmanager
def _damaged(file: Path) -> Iterator[None]:
    """It has the keys, but not what `bench serve` writes there."""
    try:
        yield
    except UserError:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise UserError(
            f"result {str(file)!r} is damaged: {type(error).__name__}: {error}"
        ) from None


def simulated_table(found: Mapping[str, Any]) -> Group:
    """A line a load and width, then the best widths."""
    rows = [
        [
            f"{each['concurrency']} at once, K={each['width']}",
            f"{each['measured']:.1f}",
            f"{each['simulated']:.1f}",
            f"{each['error']:+.1%}",
        ]
        for each in found["points"]
    ]
    best = [
        [
            f"{each['concurrency']} at once",
            str(each["measured"]),
            ", ".join(map(str, each["tied"])),
            str(each["simulated"]),
            f"{each['loss']:.1%}",
            "yes" if each["same"] else "tied" if each["agree"] else "NO",
        ]
        for each in found["best"]
    ]
    headings = (
        "load", "best\nmeasured", "not told\napart", "best\nsimulated", "lost by\nthat", "agree"
    )  # fmt: skip
    words = (
        f"{found['near_share']:.0%} of the points within 10%; of the best width within 1% at "
        f"{found['same_share']:.0%} of the loads, not told apart from it at "
        f"{found['agree_share']:.0%} (at random: {found['agree_share_at_random']:.0%})"
    )
    return Group(
        Figures("Tokens a second", ("point", "measured", "simulated", "off by"), rows),
        Figures("Best width", headings, best),
        Text(words),
    )
