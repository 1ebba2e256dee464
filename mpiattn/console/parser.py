"""The argument parser of a command that several ranks run: a wrong argument is reported once."""

import argparse
import sys
import time

from ..system.closest import of_choices
from ..system.launch_variables import launch_rank
from . import suggest


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument on rank 0 only, with a suggestion, and ends every rank with code 2.

    chosen: the parser of the chosen subcommand, whose options are suggested.
    """

    words, chosen = (), None

    def parse_known_args(self, args=None, namespace=None):
        """As in argparse; keeps the words for errors."""
        self.words = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    @property
    def options(self):
        """The names of the options, such as "--tile"."""
        return list(self._option_string_actions)

    def _check_value(self, action, value):
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            meant = of_choices(str(value), action.choices)
            raise argparse.ArgumentError(action, error.message + meant) from None

    def error(self, message):
        """Print the message on rank 0 and exit."""
        if launch_rank() == 0:
            known = [*self.options, *(self.chosen.options if self.chosen else ())]
            meant = suggest.of_options(message, self.words, known) + suggest.of_words(message, self.words)
            super().error(message + meant)
        time.sleep(1)  # launchers end all ranks when the first fails: let rank 0 print first
        sys.exit(2)

    def _print_message(self, message, file=None):
        if launch_rank() == 0:
            super()._print_message(message, file)
