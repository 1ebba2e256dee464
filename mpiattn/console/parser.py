"""The parser of a command line that several ranks are given: a wrong argument is said once."""

import argparse
import sys
import time

from ..system.launch_variables import launch_rank
from . import suggest


class Parser(argparse.ArgumentParser):
    """Says a wrong argument once, on rank 0, with what it was probably meant to be; ends every rank with code 2.

    chosen: the parser of the subcommand that was chosen, for the options that it knows.
    """

    words, chosen = (), None

    def parse_known_args(self, args=None, namespace=None):
        """As argparse; the words are kept for errors."""
        self.words = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    def _check_value(self, action, value):
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            meant = suggest.of_choices(str(value), action.choices)
            raise argparse.ArgumentError(action, error.message + meant) from None

    def error(self, message):
        """Print the message on rank 0 and exit."""
        if launch_rank() == 0:
            known = [*self._option_string_actions, *(self.chosen._option_string_actions if self.chosen else ())]
            super().error(message + suggest.of_options(message, self.words, known))
        time.sleep(1)               # a launcher ends all ranks with the first that fails: let rank 0 speak first
        sys.exit(2)

    def _print_message(self, message, file=None):
        if launch_rank() == 0:
            super()._print_message(message, file)
