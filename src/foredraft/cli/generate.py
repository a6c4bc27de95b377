"""`foredraft generate`: one prompt in, its text out as it is made.

Knows options, prompts and consoles; the engine does the rest.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from typer import Argument, Option

from foredraft.cli.compare import compare_with_plain
from foredraft.cli.console import coloured, legend, message_console, output_console, separator
from foredraft.cli.option_groups import option_groups
from foredraft.cli.options import (
    JsonFlag,
    ModelArgument,
    RuntimeOptions,
    SamplingOptions,
    SpeculationOptions,
)
from foredraft.cli.prompt import read_prompt
from foredraft.cli.stream import TokenWriter, write_stream
from foredraft.cli.structure import StructureOptions
from foredraft.cli.summary import Comparison, output_values, summary_line
from foredraft.core.errors import ConfigError, UserError

if TYPE_CHECKING:
    from foredraft import LLM
    from foredraft.core.sampling import SamplingParams
    from foredraft.engine.outputs import RequestOutput
    from foredraft.models.tokenizer import Tokenizer

COMPARING = "measuring beside plain decoding ..."  # stands while the runs go on that aren't shown
ERASE_LINE = "\r\x1b[2K"


@option_groups
def generate(
    model: ModelArgument,
    prompt: Annotated[
        str | None, Argument(metavar="PROMPT", help="Read from stdin when left out and piped.")
    ] = None,
    prompt_file: Annotated[
        Path | None, Option(help="Read the prompt from this file.", metavar="FILE")
    ] = None,
    chat: Annotated[
        bool | None,
        Option(
            "--chat/--raw",
            help="Put the prompt into the model's chat template, or leave it as it is. "
            "(default: --chat where the model has a template)",
        ),
    ] = None,
    n: Annotated[int, Option("--n", help="Completions of the prompt.", metavar="N", min=1)] = 1,
    compare: Annotated[
        bool, Option("--compare", help="Run plain decoding too: state speed and identity.")
    ] = False,
    json_output: JsonFlag = False,
    *,
    sampling: SamplingOptions,
    structure: StructureOptions,
    speculation: SpeculationOptions,
    runtime: RuntimeOptions,
) -> None:
    """Generate text from one prompt, each token coloured by where it came from."""
    params = replace(sampling.params(n), structured_outputs=structure.structured_outputs())
    config = speculation.config()
    if compare and config is None:
        raise ConfigError("--compare needs speculation to compare with plain decoding")
    if compare and n > 1:
        raise ConfigError(f"--compare measures one completion, not --n {n}")
    if params.logprobs is not None and not json_output:
        raise ConfigError(
            f"--logprobs {params.logprobs} needs --json: the text has no place for it"
        )
    text = read_prompt(prompt, prompt_file)
    loaded = runtime.load(model)
    llm = runtime.llm(loaded, config)
    plain = runtime.llm(loaded, None) if compare else None
    again = partial(runtime.llm, loaded, config)
    ids = prompt_ids(loaded.tokenizer, text, chat)
    if json_output:
        output, comparison = _run(lambda: llm.generate([ids], params)[0], again, plain, ids, params)
        values = {"model": loaded.name, "speculative_config": config}
        sys.stdout.write(json.dumps({**values, **output_values(output, comparison)}) + "\n")
    else:
        console = output_console()
        noted = plain is not None and console.is_terminal

        def shown() -> RequestOutput:
            output = _show(console, llm, ids, params)
            console.file.write(COMPARING if noted else "")
            console.file.flush()
            return output

        output, comparison = _run(shown, again, plain, ids, params)
        console.file.write(ERASE_LINE if noted else "")
        # A pipe gets the text alone.
        last = console if console.is_terminal else message_console()
        line = summary_line(output, comparison, separator(last))
        last.print(line, style="bold", soft_wrap=True)
    for each in output.outputs:
        if each.error is not None:
            raise UserError(each.error)
    if comparison is not None and comparison.identical is False:
        _explain_difference(loaded.model.kernels.name)


def _explain_difference(kernels: str) -> None:
    """Only the native kernels promise equal logits; elsewhere near-ties may fall differently."""
    if kernels == "native":
        raise RuntimeError("speculation changed the tokens: a fault of foredraft, please report it")
    message_console().print(
        f"The {kernels} kernels are not batch-invariant: a row of logits differs a little with "
        "the rows beside it. Tokens are identical with --dtype float64.",
        soft_wrap=True,
    )


def _run(
    first: Callable[[], RequestOutput],
    again: Callable[[], LLM],
    plain: LLM | None,
    ids: list[int],
    params: SamplingParams,
) -> tuple[RequestOutput, Comparison | None]:
    if plain is None:
        return first(), None
    return compare_with_plain(again, plain, ids, params, first)


def _show(console: Console, llm: LLM, ids: list[int], params: SamplingParams) -> RequestOutput:
    """Stream one completion; several are shown one after the other when all are done."""
    from foredraft.engine.outputs import StreamDelta
    from foredraft.models.tokenizer import Detokenizer

    if params.n == 1:
        if coloured(console) and llm.drafter is not None:
            console.print(legend())
        writer = TokenWriter(console, Detokenizer(llm.tokenizer, params.skip_special_tokens))
        try:
            return write_stream(writer, llm.stream(ids, params))
        finally:
            writer.end_line()
    output = llm.generate([ids], params)[0]
    origins = {str(origin.value) for each in output.outputs for origin in each.origins}
    if coloured(console) and origins - {"plain"}:  # the legend of colours that are there
        console.print(legend())
    for each in output.outputs:
        console.print(f"[{each.index + 1}/{params.n}]", style="dim")
        writer = TokenWriter(console, Detokenizer(llm.tokenizer, params.skip_special_tokens))
        writer.write(StreamDelta(each.text, each.token_ids, each.origins))
        writer.end_line()
    return output


def prompt_ids(tokenizer: Tokenizer, text: str, chat: bool | None) -> list[int]:
    """Token ids of a prompt; `chat` None: through the chat template if there is one."""
    if chat is None:
        chat = tokenizer.has_chat_template
    if not chat:
        return tokenizer.encode_prompt(text)
    if not tokenizer.has_chat_template:
        raise UserError("--chat: this model has no chat template; use --raw")
    return tokenizer.apply_chat_template([{"role": "user", "content": text}])
