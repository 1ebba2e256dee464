"""Functions that keep their results, for objects of which many are made."""


class Remembered(dict):
    """A function of positional arguments that keeps its results.

    It is quicker to make than functools.cache: a call with new documents and every tile of a search make several.
    """

    def __init__(self, function):
        super().__init__()
        self._function = function

    def __call__(self, *arguments):
        """The result of the function."""
        return self[arguments]

    def __missing__(self, arguments):
        result = self[arguments] = self._function(*arguments)
        return result
