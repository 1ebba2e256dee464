"""The word that was probably meant."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

ALIKE = 0.6  # difflib's ratio above which words are similar enough to suggest


def closest(word: str, choices: Iterable[object]) -> str | None:
    """The choice most similar to the word; None if none is similar."""
    import difflib  # only here: a mistyped word is rare

    plain = {str(choice).strip("-"): str(choice) for choice in choices}
    return next((plain[name] for name in difflib.get_close_matches(word.strip("-").lower(), plain, 1, ALIKE)), None)


def of_choices(word: str, choices: Iterable[object]) -> str:
    """Text to append to an error about a word that is not among the choices."""
    meant = closest(word, choices)
    return f"; did you mean {meant}?" if meant else ""
