"""Keyword arguments that a function does not have: what is meant by them, here and in other libraries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

from ..errors import KeywordError
from ..system.closest import of_choices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# What an argument was called in an earlier version.
FORMER = {"way": "algorithm"}
# What FlashAttention, PyTorch, JAX, transformers and others call an argument.
ELSEWHERE = {
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "is_causal": "causal",
    "window_size": "window",
    "local_window_size": "window",
    "sliding_window": "window",
    "attn_bias": "bias",
    "attention_bias": "bias",
    "position_bias": "bias",
    "dropout_p": "dropout",
    "dropout_rate": "dropout",
    "attention_dropout": "dropout",
    "dropout_seed": "seed",
    "logits_soft_cap": "softcap",
    "soft_cap": "softcap",
    "query": "q",
    "key": "k",
    "value": "v",
    "cu_seqlens_q": "cu_seqlens",
    "cu_seqlens_kv": "cu_seqlens_k",
    "cache_batch_idx": "sequences",
    "seq_lens": "lengths",
    "query_seq_lengths": "lengths",
    "key_value_seq_lengths": "lengths_k",
    "s_aux": "sinks",
    "learnable_sink": "sinks",
    "num_heads": "heads",
    "nheads": "heads",
    "num_attention_heads": "heads",
    "num_kv_heads": "kv_heads",
    "num_key_value_heads": "kv_heads",
    "nheads_k": "kv_heads",
    "num_gqa_groups": "kv_heads",
    "headdim": "head_dim",
    "head_size": "head_dim",
    "seq_len": "seqlen",
    "seqlen_q": "seqlen",
    "max_seqlen": "seqlen",
    "seqlen_kv": "seqlen_k",
    "batch_size": "batch",
    "group": "comm",
    "process_group": "comm",
    "do": "dout",
    "softmax_lse": "lse",
}
_LENGTHS = "lengths or, for packed documents, cu_seqlens say where sequences end"
_MASK = (
    "there are no masks as arrays here: causal, prefix, causal_block, window and a mask of mpiattn.masks say what "
    "queries see, cu_seqlens where documents begin, and lengths where padding begins; numbers that are added to scores "
    "are a bias"
)
_SCORES = (
    "there are no functions of scores here: bias, key_bias, alibi_slopes and relative_bias are added to them, and "
    "softcap bounds them"
)
_FROM_SHAPES = "it follows from the other arguments"
_PAGES = "a KVCache has keys, values and the tables of their pages"
_LSE = "lse is always returned, beside out"
# Arguments of other libraries that have no counterpart, and why.
WITHOUT = {
    **dict.fromkeys(("attn_mask", "attention_mask", "mask", "block_mask"), _MASK),
    "score_mod": _SCORES,
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k", "max_seqlen_kv", "enable_gqa"), _FROM_SHAPES),
    **dict.fromkeys(("k_cache", "v_cache", "block_table", "num_splits"), _PAGES),
    **dict.fromkeys(("return_attn_probs", "return_softmax_lse", "return_lse"), _LSE),
    "key_padding_mask": f"there are no padding masks here: {_LENGTHS}",
    "cache_seqlens": "KVCache knows the lengths of its sequences",
    "deterministic": "results are the same bits in every run, but gradients with the back end cuda+cudnn",
}
# Arguments of calls that few commands have.
OF_CALLS = ("bias", "dropout")
_known: dict[str, tuple[str, ...]] = {}  # names of functions, and those of their arguments


def learn(function: Callable[..., Any], called: str) -> None:
    """Remember the arguments of a function, so that errors of others can name it.  called: its name for users."""
    kinds = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
    _known[called] = tuple(
        name for name, argument in signature(function).parameters.items() if argument.kind in kinds and name != "self"
    )


def names_of_arguments(called: str) -> tuple[str, ...]:
    """The names of the arguments of a function that has been learned."""
    return _known[called]


def for_record(record: type[Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a dataclass has fields for, by name."""
    return {field.name: arguments[field.name] for field in fields(record)}


def unknown(called: str, names: Iterable[str], allowed: Iterable[str] | None = None) -> KeywordError | None:
    """The error about the first of these keywords that a function does not have; None if it has all.

    called: the name for users of a function that has been learned.  names: with their values, where these are known.
    allowed: the names of all its arguments, where it takes more than it lists.
    """
    allowed = tuple(_known[called] if allowed is None else allowed)
    name = next((name for name in names if name not in allowed), None)
    if name is None:
        return None
    value = names[name] if isinstance(names, Mapping) else None
    return KeywordError(f"{name} is not an argument of {called}{_meant(name, allowed, value)}")


def _meant(name: str, allowed: tuple[str, ...], value: Any = None) -> str:
    from ..masks.interval_mask import IntervalMask  # only here: commands that start load no NumPy
    from ..system.values import is_whole

    current = FORMER.get(name, ELSEWHERE.get(name, name))
    if current in allowed and name == "sliding_window":
        before, count = (value - 1, value) if is_whole(value, 1) else ("n - 1", "n")
        return f"; {name}={count} is window=({before}, 0) here, the keys before a query's own, which is not counted"
    if current in allowed:
        return f" any more; it is now called {current}" if name in FORMER else f"; it is called {current} here"
    functions = sorted(function for function, of in _known.items() if current in of and current not in "qkv")
    elsewhere = f"; {current} is one of {', '.join(functions)}" if functions else ""
    if name == "mask" and isinstance(value, IntervalMask):
        return f", which computes without masks of mpiattn.masks{elsewhere}"
    if name in WITHOUT:
        return f": {WITHOUT[name]}{elsewhere}"
    if elsewhere:
        return elsewhere
    return of_choices(name, allowed) or f", which has {', '.join(allowed)}"


def option(name: str, options: Iterable[str]) -> str:
    """Text to append to an error about an option of a command, such as "--softmax-scale"; "" if nothing is known."""
    plain = name.strip("-").replace("-", "_")
    current = FORMER.get(plain, ELSEWHERE.get(plain, ""))
    called = f"--{current.replace('_', '-')}"
    if plain == "sliding_window" and called in options:
        return f"; {name} N is --window N-1,0 here: the keys before a query's own, which is not counted"
    if current and called in options:
        return f"; {name} is now called {called}" if plain in FORMER else f"; {name} is called {called} here"
    if (current or plain) in OF_CALLS:
        return f"; {name}: this command has no {current or plain}, an argument of MeshAttention.forward"
    return f"; {name}: {WITHOUT[plain]}" if plain in WITHOUT else ""
