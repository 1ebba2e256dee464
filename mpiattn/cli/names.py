"""--names: which tensors of a file are q, k, v and so on, where they have other names."""

import argparse

TENSORS = ("q", "k", "v", "dout")
CUTS = ("cu_seqlens", "cu_seqlens_k")


def parser_of(known):
    """A function that parses q=NAME,k=NAME to a dict, role -> name in the file; roles are those of `known`."""

    def parse(text):
        names = {}
        for part in text.split(","):
            key, equals, name = (word.strip() for word in part.partition("="))
            if not equals or not name or key not in known or key in names:
                raise argparse.ArgumentTypeError(
                    f"{part!r} is not one of {', '.join(f'{key}=NAME' for key in known)}, "
                    "each once, with commas between"
                )
            names[key] = name
        return names

    return parse


def add_names(parser, known=TENSORS, of="IN"):
    """--names."""
    parser.add_argument(
        "--names",
        type=parser_of(known),
        default={},
        metavar="q=NAME,...",
        help=f"names of {', '.join(known)} in {of}, for example q=layers.0.q,k=layers.0.k; a tensor "
        "that is not listed is looked up under its own name",
    )
