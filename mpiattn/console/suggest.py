"""Suggestions for mistyped words."""

import difflib

ALIKE = 0.6  # difflib's ratio above which words are similar enough to suggest


def closest(word, choices):
    """The choice most similar to the word; None if none is similar."""
    plain = {str(choice).strip("-"): str(choice) for choice in choices}
    return next((plain[name] for name in difflib.get_close_matches(word.strip("-").lower(), plain, 1, ALIKE)), None)


def of_choices(word, choices):
    """Text to append to an error about a word that is not among the choices."""
    meant = closest(word, choices)
    return f"; did you mean {meant}?" if meant else ""


def of_options(message, words, options):
    """Text to append to an error about a command line: suggestions for its mistyped options.

    words: the command line.  options: all known options; as in argparse, an option may be abbreviated.
    """
    long, text = [option for option in options if option.startswith("--")], ""
    for word in words[: words.index("--") if "--" in words else None]:  # no options after --
        name = word.split("=")[0]
        if (
            name.startswith("--")
            and not any(option.startswith(name) for option in long)
            and (meant := closest(name, long))
        ):
            text += f"; did you mean {meant}?" if name in message else f"; did you mean {meant} by {name}?"
    return text
