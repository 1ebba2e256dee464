"""Progress within a block, told in parts as it is computed."""


class Advance:
    """Tells `progress` of some blocks as they are computed, a part at a time; called with the share done so far."""

    PARTS = 128                             # of a block; a power of two, so that sums of parts are exact

    def __init__(self, progress, blocks):
        self.progress, self.blocks, self.parts = progress, blocks, 0

    def __call__(self, share):
        """So much of the blocks is done."""
        parts = int(share * self.blocks * self.PARTS)
        if parts > self.parts:
            self.progress((parts - self.parts) / self.PARTS)
            self.parts = parts
