"""What a mistyped word was probably meant to be."""

import difflib

ALIKE = 0.6                # of difflib's ratio: less is another word


def closest(word, choices):
    """The choice that is most like the word, None where none is."""
    plain = {str(choice).strip("-"): str(choice) for choice in choices}
    return next((plain[name] for name in difflib.get_close_matches(word.strip("-").lower(), plain, 1, ALIKE)), None)


def of_choices(word, choices):
    """Text to put behind an error about a word that is none of the choices."""
    meant = closest(word, choices)
    return f"; did you mean {meant}?" if meant else ""


def of_options(message, words, options):
    """Text to put behind an error about a command line: what its mistyped options were probably meant to be.

    words: of the command line.  options: all that are known; the beginning of one stands for it, as in argparse.
    """
    long, text = [option for option in options if option.startswith("--")], ""
    for word in words[:words.index("--") if "--" in words else None]:      # what follows is no option
        name = word.split("=")[0]
        if name.startswith("--") and not any(option.startswith(name) for option in long) and (meant := closest(
                name, long)):
            text += f"; did you mean {meant}?" if name in message else f"; did you mean {meant} by {name}?"
    return text
