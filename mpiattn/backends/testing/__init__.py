"""Back ends for tests: late as a GPU, emulating one, or as fast as is asked."""
