"""--names, by which tensors of a file that are called otherwise are said to be q, k, v and so on."""

import argparse

TENSORS = ("q", "k", "v", "dout")
CUTS = ("cu_seqlens", "cu_seqlens_k")


def parser_of(known):
    """What makes a dict, what it is -> its name in the file, of the text q=NAME,k=NAME; keys are of `known`."""
    def parse(text):
        names = {}
        for part in text.split(","):
            key, equals, name = (word.strip() for word in part.partition("="))
            if not equals or not name or key not in known or key in names:
                raise argparse.ArgumentTypeError(f"{part!r} is not one of {', '.join(f'{key}=NAME' for key in known)}, "
                                                 "each once, with commas between")
            names[key] = name
        return names
    return parse


def add_names(parser, known=TENSORS, of="IN"):
    """--names."""
    parser.add_argument("--names", type=parser_of(known), default={}, metavar="q=NAME,...",
                        help=f"what {', '.join(known)} are called in {of}: q=layers.0.q,k=layers.0.k; those that are "
                             "left out have their own names")
