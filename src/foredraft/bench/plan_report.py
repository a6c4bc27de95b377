"""The README's tables of a plan that was checked, and of the replayed agent loop.

Knows the form of results; knows nothing of measuring.
"""

from __future__ import annotations

from foredraft.bench.markdown import Result, number, section, times


def plan(result: Result) -> str:
    """Predicted and measured speed-ups."""
    check = result["check"] or {"configs": [], "num_close": 0, "close": 0.0, "repeats": 0}
    rows = [
        [
            each["label"],
            times(each["predicted"]),
            times(each["predicted_at_pace"]),
            times(each["measured"]),
            f"{each['error']:+.0%}",
            f"{each['tokens']['predicted']:.2f}",
            f"{each['tokens']['measured']:.2f}",
            "yes" if each["identical_to_plain"] else "no",
        ]
        for each in check["configs"]
    ]
    words = (
        f"**Plan**, {result['model']}, {result['dtype']}, {result['prompts']} prompts, greedy, at "
        f"most {result['max_tokens']} tokens: speed-ups predicted from a wide run of each drafter "
        f"and what passes cost, then measured beside plain decoding, {check['repeats']} times. "
        f"Costs of passes are read all through both; predictions are judged at those of the check. "
        f"{check['num_close']} of {len(rows)} are within {check['close']:.0%}."
    )
    heading = ["configuration", "predicted", "at the check's costs", "measured", "off by"]
    heading += ["tokens a step, predicted", "measured", "identical"]
    return section(words, heading, rows, result)


def agent_loop(result: Result) -> str:
    """A line a configuration."""
    ceiling = result["ceiling"]
    rows = [
        [
            run["label"],
            f"{run['tokens_per_second']:.1f}",
            times(run["speedup"]),
            f"{run['share_of_ceiling']:.0%}",
            number(run["mean_acceptance_length"]),
            "yes" if run["identical_to_plain"] else "no",
        ]
        for run in result["runs"]
    ]
    words = (
        f"**A replayed agent loop**, {result['model']}, {result['dtype']}: {result['turns']} turns "
        f"of nearly the same tool calls and file edits behind {result['context']} tokens of "
        f"history; plain decoding {result['plain_tokens_per_second']:.1f} tokens/s. The ceiling is "
        f"the best (K + 1) / cost of K + 1 rows there: {ceiling['speedup']:.2f}, at K = "
        f"{ceiling['num_speculative_tokens']}."
    )
    heading = ["run", "tokens/s", "speed", "of the ceiling", "acceptance length", "identical"]
    return section(words, heading, rows, result)
