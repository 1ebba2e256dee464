"""Progress reports from within a block."""


class Advance:
    """Calls `progress` with the fraction of blocks done since its last call, in steps of 1 / PARTS."""

    PARTS = 128  # parts of a block; a power of 2, so that their sums are exact

    def __init__(self, progress, blocks):
        self.progress, self.blocks, self.parts = progress, blocks, 0

    def __call__(self, share):
        """Report the progress; share: fraction of the blocks done so far, from 0 to 1."""
        parts = int(share * self.blocks * self.PARTS)
        if parts > self.parts:
            self.progress((parts - self.parts) / self.PARTS)
            self.parts = parts
